"""``speed prefill``: the longest prompt a GPU reads, chunk by chunk into one cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cab_hf.eval.experiment import Row
from cab_hf.eval.speed import base
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.reported import Panel
from cab_hf.runs.settings import by_device, option, parse_flag

WAY = "cab-always"
# the first chunk begins a cache, the second goes on with one: kernels of both are compiled then
WARM_UP_CHUNKS = 2


@dataclass(frozen=True)
class Settings(models.ModelSettings):
    """What a run of chunked prefills is told."""

    lengths: tuple[int, ...] | None = base.powers(17, 19)
    chunk: int | None = by_device(2**15, 128, "tokens read at a time", int)
    longest: bool = option(True, "whether to search for the longest length that fits", parse_flag)
    max_density: tuple[str, ...] = base.listed(("0.05",), None, "of CAB, alike at every length")

    def __post_init__(self) -> None:
        super().__post_init__()
        one = len(self.max_density) == 1 and ":" not in self.max_density[0]
        self.check("max_density", one, "one share, so that lengths compare")
        block = self.cab_config.query_block
        complete = self.chunk > 0 and self.chunk % block == 0
        self.check("chunk", complete, f"a multiple of query_block={block}")

    @property
    def method(self) -> str:
        return (
            f"one run by time.perf_counter after a prompt of {WARM_UP_CHUNKS} chunks that warms "
            "up: random tokens are read into a static cache of exactly their length, and every "
            "chunk gives the logits of its last token; the peak is all that was allocated"
        )


class Prefill(models.ModelSpeed):
    """A case is one length: those asked for, then those tried in search of the longest."""

    name = "speed prefill"
    purpose = "the longest prompt that fits, read chunk by chunk: seconds, tokens/s, peak memory"
    title = "Long prompts on one GPU"
    caption = "rate and peak memory by length"
    Settings = Settings
    GROWS = (*base.Speed.GROWS, "longest")
    SHAPE = ("chunk", "layers", "dtype")
    FOUND = ("ms", "tokens_s", "tflops", "density", "peak_gib", "weights_gib", "cache_gib")
    FOUND += ("rest_gib", "room_gib", "ran_as", "fits")
    PANELS = (
        Panel("rate of a whole prefill", "tokens/s", ("tokens_s",), log=False),
        Panel("memory", "GiB", ("peak_gib", "cache_gib", "weights_gib"), log=False),
    )
    NOTES = {
        "": "Every layer attends sparsely. Rest: the peak less weights and cache. Room: all that "
        "torch can allocate. Density is attended over causal pairs in all layers; TFLOP/s count "
        "what is attended."
    }

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for case in self.settings.asked():
            yield {**case, "sought": False}
        if self.settings.longest:
            yield from self.search({}, samples, self.settings.chunk)

    def find(self, sample: dict[str, Any]) -> None:
        settings, bench, length = self.settings, self.bench, sample["length"]
        model = models.random_model(settings)
        weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers())) / 2**30
        sample |= {"cache_gib": settings.cache_gib(length), "weights_gib": weights}
        _warm_up(settings)
        sample["room_gib"] = bench.room()
        with models.prefilling(settings, length, WAY, settings.chunk) as (call, known, _):
            (ms,), peak = bench.walls(call, 1)
            sample |= {"fits": True, "ms": ms, "peak_gib": peak, **known()}
        sample["tokens_s"] = length / ms * 1e3
        sample["tflops"] = settings.flops(length, sample["density"]) / ms / 1e9
        if peak is not None:
            sample["rest_gib"] = peak - weights - sample["cache_gib"]

    @classmethod
    def readings(cls, rows: Sequence[Row]) -> list[str]:
        return base.longest(rows, cls.BY)


EXPERIMENT = Prefill


# once a process: what is compiled stays
@lru_cache(maxsize=1)
def _warm_up(settings: Settings) -> None:
    length = WARM_UP_CHUNKS * settings.chunk
    with models.prefilling(settings, length, WAY, settings.chunk) as (call, *_):
        call()
