"""``speed prefill``: find the longest prompt that a GPU reads, chunk by chunk into one cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cab_hf.eval.experiment import Row
from cab_hf.eval.fits import DYNAMIC, GIB, STATIC, Prompts
from cab_hf.eval.speed import base
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.reported import CAB_DENSE, Panel
from cab_hf.experiment.settings import by_device, option, parse_flag

WAY = "cab-always"
# chunks that start a cache and continue one, so that the kernels of both are compiled
WARM_UP_CHUNKS = 2
# tokens of a warm-up prompt in one call
WARM_UP_TOKENS = 2**14


@dataclass(frozen=True)
class Settings(models.LongestSettings):
    """Settings of a run of chunked prefills."""

    KEYS = {"implementation": "implementations", "length": "lengths"}
    POSITIVE = (*models.LongestSettings.POSITIVE, "multiple")
    FROM_0 = (*models.LongestSettings.FROM_0, "chunk")
    CHOICES = {"implementations": (models.SDPA, CAB_DENSE, *models.CAB)}

    lengths: tuple[int, ...] | None = base.powers(17, 19)
    implementations: tuple[str, ...] = base.listed((WAY,), None, "attention implementations")
    chunk: int | None = by_device(2**15, 128, "tokens per chunk; 0: the whole prompt", int)
    longest: bool = option(True, "search for the longest length that fits", parse_flag)
    multiple: int | None = by_device(
        2**15, 128, "tokens of which the longest length is a multiple", int
    )
    max_density: tuple[str, ...] = base.listed(
        ("0.05",), None, "max_density of CAB, equal at every length"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        one = len(self.max_density) == 1 and ":" not in self.max_density[0]
        self.check("max_density", one, "one share, so that lengths are comparable")
        block = self.cab_config.query_block
        self.check("chunk", self.chunk % block == 0, f"a multiple of query_block={block}")

    @property
    def method(self) -> str:
        warming, cache = f"of {WARM_UP_CHUNKS} chunks", "a static cache of exactly their length"
        if not self.chunk:
            warming, cache = f"of at most {WARM_UP_TOKENS:,} tokens", "a dynamic cache, in one call"
        return (
            f"one run by time.perf_counter after a warm-up prompt {warming}: random tokens are "
            f"read into {cache}, and every chunk computes the logits of its last token; the peak "
            "is all allocated memory"
        )


class Prefill(models.ModelSpeed):
    """The experiment; a case is one attention and one length: given lengths, then searched ones."""

    name = "speed prefill"
    purpose = "find the longest prompt that fits, chunk by chunk: seconds, tokens/s, peak memory"
    title = "Long prompts on one GPU"
    caption = "rate and peak memory by length"
    Settings = Settings
    GROWS = (*Settings.KEYS.values(), "cab", "longest", "multiple")
    CASE = tuple(Settings.KEYS)
    ADDED = {"implementation": WAY, "estimate": 0}
    BY = {"way": "implementation"}
    SHAPE = ("chunk", "layers", "dtype")
    FOUND = ("ms", "tokens_s", "tflops", "density", "peak_gib", "weights_gib", "cache_gib")
    FOUND += ("rest_gib", "room_gib", "estimate", "ran_as", "fits")
    PANELS = (
        Panel("rate of a whole prefill", "tokens/s", ("tokens_s",), log=False),
        Panel("memory", "GiB", ("peak_gib", "cache_gib", "weights_gib"), log=False),
    )
    NOTES = {
        "": f"{models.WAYS} Rest: the peak minus weights and cache. Room: all memory that torch "
        "can allocate. TFLOP/s count attended pairs.",
        "multiple": "Estimate: the longest prompt by the estimate of `python -m cab_hf.eval fits`.",
    }

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for case in self.settings.asked():
            yield {**case, "sought": False}
        for way in self.settings.implementations if self.settings.longest else ():
            place, estimate = {"implementation": way}, self.estimated(way)
            yield from self.search(place, samples, self.settings.multiple, estimate)

    def estimated(self, way: str) -> int:
        """Return the longest prompt by ``fits``; 0 if the memory is unknown."""
        settings, room = self.settings, self.bench.room()
        if room is None:
            return 0
        prompts = replace(_prompts(settings), config=settings.cab_config)
        if way not in models.CAB:
            # no blocks are selected
            prompts = replace(prompts, heads=frozenset())
        cache = STATIC if settings.chunk else DYNAMIC
        return prompts.longest(room * GIB, settings.chunk or None, cache)

    def find(self, sample: dict[str, Any]) -> None:
        settings, bench, length = self.settings, self.bench, sample["length"]
        way = sample["implementation"]
        model = models.random_model(settings)
        weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers())) / 2**30
        sample |= {"cache_gib": settings.cache_gib(length), "weights_gib": weights}
        _warm_up(settings, way, WARM_UP_CHUNKS * settings.chunk or min(length, WARM_UP_TOKENS))
        sample |= {"room_gib": bench.room(), "estimate": self.estimated(way)}
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


@lru_cache
def _prompts(settings: Settings) -> Prompts:
    return Prompts.of(models.llama_config(settings))


# once per process: compiled kernels stay
@lru_cache
def _warm_up(settings: Settings, way: str, length: int) -> None:
    with models.prefilling(settings, length, way, settings.chunk) as (call, *_):
        call()
