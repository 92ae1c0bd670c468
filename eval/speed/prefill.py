"""``speed prefill``: the longest prompt a GPU reads, chunk by chunk into one cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cab_hf.eval.experiment import Row
from cab_hf.eval.speed import base
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.reported import CAB_DENSE, Panel
from cab_hf.runs.settings import by_device, option, parse_flag

WAY = "cab-always"
# the first chunk begins a cache, the second goes on with one: kernels of both are compiled then
WARM_UP_CHUNKS = 2


@dataclass(frozen=True)
class Settings(models.ModelSettings):
    """What a run of chunked prefills is told."""

    KEYS = {"implementation": "implementations", "length": "lengths"}
    FROM_0 = ("gpu_gib",)
    CHOICES = {"implementations": (models.SDPA, CAB_DENSE, *models.CAB)}

    lengths: tuple[int, ...] | None = base.powers(17, 19)
    implementations: tuple[str, ...] = base.listed((WAY,), None, "ways to attend")
    chunk: int | None = by_device(2**15, 128, "tokens read at a time", int)
    longest: bool = option(True, "whether to search for the longest length that fits", parse_flag)
    max_density: tuple[str, ...] = base.listed(("0.05",), None, "of CAB, alike at every length")
    gpu_gib: float = option(0.0, "GiB that may be allocated, as on a smaller GPU; 0: all", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("gpu_gib", not self.gpu_gib or self.device != "cpu", "0 on a CPU")
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
    """A case is one way to attend and one length: those asked for, then those sought."""

    name = "speed prefill"
    purpose = "the longest prompt that fits, read chunk by chunk: seconds, tokens/s, peak memory"
    title = "Long prompts on one GPU"
    caption = "rate and peak memory by length"
    Settings = Settings
    GROWS = (*Settings.KEYS.values(), "cab", "longest")
    CASE = tuple(Settings.KEYS)
    ADDED = {"implementation": WAY}
    BY = {"way": "implementation"}
    SHAPE = ("chunk", "layers", "dtype")
    FOUND = ("ms", "tokens_s", "tflops", "density", "peak_gib", "weights_gib", "cache_gib")
    FOUND += ("rest_gib", "room_gib", "ran_as", "fits")
    PANELS = (
        Panel("rate of a whole prefill", "tokens/s", ("tokens_s",), log=False),
        Panel("memory", "GiB", ("peak_gib", "cache_gib", "weights_gib"), log=False),
    )
    NOTES = {
        "": f"{models.WAYS} Rest: the peak less weights and cache. Room: all that torch can "
        "allocate. TFLOP/s count what is attended."
    }

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for case in self.settings.asked():
            yield {**case, "sought": False}
        for way in self.settings.implementations if self.settings.longest else ():
            yield from self.search({"implementation": way}, samples, self.settings.chunk)

    def find(self, sample: dict[str, Any]) -> None:
        settings, bench, length = self.settings, self.bench, sample["length"]
        way = sample["implementation"]
        if settings.gpu_gib:
            bench.limit(settings.gpu_gib)
        model = models.random_model(settings)
        weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers())) / 2**30
        sample |= {"cache_gib": settings.cache_gib(length), "weights_gib": weights}
        _warm_up(settings, way)
        sample["room_gib"] = bench.room()
        with models.prefilling(settings, length, way, settings.chunk) as (call, known, _):
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
@lru_cache
def _warm_up(settings: Settings, way: str) -> None:
    length = WARM_UP_CHUNKS * settings.chunk
    with models.prefilling(settings, length, way, settings.chunk) as (call, *_):
        call()
