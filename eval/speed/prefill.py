"""``speed prefill``: the longest prompt a GPU reads, chunk by chunk into one cache."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from cab_hf.eval.experiment import Row
from cab_hf.eval.report import seconds
from cab_hf.eval.speed import base
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.reported import Panel, Reported
from cab_hf.runs.settings import by_device, comma_separated, option, parse_flag

WAY = "cab-always"
# the first chunk begins a cache, the second goes on with one: kernels of both are compiled then
WARM_UP_CHUNKS = 2


@dataclass(frozen=True)
class Settings(models.ModelSettings):
    """What a run of chunked prefills is told."""

    lengths: tuple[int, ...] | None = base.powers(17, 19)
    chunk: int | None = by_device(2**15, 128, "tokens read at a time", int)
    longest: bool = option(True, "whether to search for the longest length that fits", parse_flag)
    max_density: tuple[str, ...] = option(
        ("0.05",), "max_density of CAB, the same at every length", comma_separated(str)
    )

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
            "up, from the first chunk until the device is done: the prompt, random tokens, is read "
            "into a static cache of exactly its length, and every chunk gives the logits of its "
            "last token alone; the peak is all that was allocated"
        )


class Prefill(Reported, base.Speed):
    """A case is one length: those asked for, then those tried in search of the longest that fits.

    A line through the peaks of those asked for says what should fit, which is then run.
    """

    name = "speed prefill"
    purpose = "the longest prompt that fits, read chunk by chunk: seconds, tokens/s, peak memory"
    title = "Long prompts on one GPU"
    caption = "rate and peak memory by length"
    Settings = Settings
    GROWS = (*base.Speed.GROWS, "longest")
    SHAPE = ("chunk", "layers", "dtype")
    FOUND = (
        *("ms", "tokens_s", "tflops", "density", "peak_gib", "weights_gib", "cache_gib"),
        *("rest_gib", "room_gib", "ran_as", "fits"),
    )
    REPORTED_ERRORS = Exception  # a length that does not fit, or an engine that refuses
    PANELS = (
        Panel("rate of a whole prefill", "tokens/s", ("tokens_s",), log=False),
        Panel("memory", "GiB", ("peak_gib", "line_gib", "cache_gib", "weights_gib"), log=False),
    )
    NOTES: ClassVar[Mapping[str, str]] = {
        "": "Every layer attends sparsely. Rest: the peak less weights and cache. Room: all that "
        "torch can allocate. By the line: the peak, on a line through those of the lengths asked "
        "for. Density is attended over causal pairs in all layers; TFLOP/s count what is attended."
    }

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for case in self.settings.asked():
            yield {**case, "sought": False}
        while self.settings.longest:
            length = longest_left(samples)
            # one that was tried and failed for another reason ends the search
            if length is None or any(sample["length"] == length for sample in samples):
                return
            yield {"length": length, "sought": True}

    def expected(self) -> int | None:
        return None if self.settings.longest else super().expected()

    def find(self, sample: dict[str, Any]) -> None:
        settings, bench, length = self.settings, self.bench, sample["length"]
        model = models.random_model(settings)
        weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers())) / 2**30
        sample |= {"cache_gib": settings.cache_gib(length), "weights_gib": weights}
        _warm_up(settings)
        sample["room_gib"] = bench.room()
        with models.prefilling(settings, length, WAY, settings.chunk) as (call, known, _):
            ms, peak = bench.wall(call, warm_up_calls=0)
            sample |= {"fits": True, "ms": ms, "peak_gib": peak, **known()}
        sample["tokens_s"] = length / ms * 1e3
        sample["tflops"] = settings.flops(length, sample["density"]) / ms / 1e9
        if peak is not None:
            sample["rest_gib"] = peak - weights - sample["cache_gib"]

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """By length, each with what the line says of its peak."""
        rows = base.by_length(samples, ("line_gib",))
        line = line_through(rows)
        if line is not None:
            for row in rows:
                row["line_gib"] = line.slope * row["length"] + line.intercept
        return rows

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """The longest prompt, and what one chunk more would take."""
        line = line_through(rows)
        if line is None or longest_left(rows) is not None:
            return []
        last = [row for row in rows if row["fits"]][-1]
        more = last["length"] + last["chunk"]
        needs = f"needs {line.slope * more + line.intercept:,.2f} GiB by the line"
        if any(row["fits"] is False and row["length"] <= more for row in rows):
            needs = "ran out of memory"
        return [
            f"{last['length']:,} tokens are the longest prompt that fits: "
            f"{seconds(last['ms'])} s, {last['tokens_s']:,.0f} tokens/s, "
            f"{last['peak_gib']:,.2f} of {last['room_gib']:,.2f} GiB at the peak; one chunk of "
            f"{last['chunk']:,} more {needs}."
        ]


EXPERIMENT = Prefill


# once a process: what is compiled stays
@lru_cache(maxsize=1)
def _warm_up(settings: Settings) -> None:
    length = WARM_UP_CHUNKS * settings.chunk
    with models.prefilling(settings, length, WAY, settings.chunk) as (call, *_):
        call()


def line_through(rows: Sequence[Row]) -> statistics.LinearRegression | None:
    """Peak GiB by length: the least-squares line of lengths that were asked for; None below two.

    What the search found is left out, so that it can tell how good the line is.
    """
    points = [
        (row["length"], row["peak_gib"])
        for row in rows
        if row["peak_gib"] is not None and not row["sought"]
    ]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True))


def longest_left(rows: Sequence[Row]) -> int | None:
    """The longest length in whole chunks that may still fit, longer than all that ran.

    None when there is none, or no line to tell by. The line is trusted until memory runs out
    earlier.
    """
    line = line_through(rows)
    if line is None or line.slope <= 0:
        return None
    room = min(row["room_gib"] for row in rows if row["room_gib"] is not None)
    failed = [row["length"] - 1 for row in rows if row["fits"] is False]
    chunk = rows[0]["chunk"]
    most = min([int((room - line.intercept) / line.slope), *failed]) // chunk * chunk
    return most if most > max(row["length"] for row in rows if row["fits"]) else None
