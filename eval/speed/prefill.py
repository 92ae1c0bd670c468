"""``speed prefill``: the longest prompt a GPU reads, chunk by chunk into one cache."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import column, digits, markdown_table, seconds
from cab_hf.eval.speed.base import DENSITY, TOKENS, Speed, by_length, powers, remarks
from cab_hf.eval.speed.model import ModelSettings, described, prefilling, random_model
from cab_hf.runs.settings import by_device, comma_separated, option

WAY = "cab-always"
# the first chunk begins a cache, the second goes on with one: kernels of both are compiled then
WARM_UP_CHUNKS = 2


def yes_or_no(text: str) -> bool:
    """What a word means, a boolean of YAML included."""
    words = {"yes": True, "true": True, "no": False, "false": False}
    if text.lower() not in words:
        raise ValueError(f"must be yes or no; got {text!r}.")
    return words[text.lower()]


@dataclass(frozen=True)
class Settings(ModelSettings):
    """What a run of chunked prefills is told."""

    lengths: tuple[int, ...] | None = powers(17, 19)
    chunk: int | None = by_device(2**15, 128, "tokens read at a time", int)
    longest: bool = option(True, "whether to search for the longest length that fits", yes_or_no)
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


class Prefill(Speed):
    """A case is one length: those asked for, then those tried in search of the longest that fits.

    What fits is told by a line through the peaks of those asked for, and then run.
    """

    name = "speed prefill"
    purpose = "the longest prompt that fits, read chunk by chunk: seconds, tokens/s, peak memory"
    title = "Long prompts on one GPU"
    caption = "rate and peak memory by length"
    Settings = Settings
    GROWS = (*Speed.GROWS, "longest")

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

    SHAPE = ("chunk", "layers", "dtype")
    FOUND = (
        *("ms", "tokens_s", "tflops", "density", "peak_gib", "weights_gib", "cache_gib"),
        *("rest_gib", "room_gib", "ran_as", "fits"),
    )
    REPORTED_ERRORS = Exception  # a length that does not fit, or an engine that refuses

    def find(self, sample: dict[str, Any]) -> None:
        settings, bench, length = self.settings, self.bench, sample["length"]
        sample["cache_gib"] = settings.cache_bytes(length) / 2**30
        model = random_model(settings)
        weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        sample["weights_gib"] = weights / 2**30
        _warm_up(settings)
        sample["room_gib"] = bench.room()
        with prefilling(settings, length, WAY, settings.chunk) as (call, known):
            ms, peak = bench.wall(call, warm_up_calls=0)
            sample |= {"fits": True, "ms": ms, "peak_gib": peak, **known()}
        sample["tokens_s"] = length / ms * 1e3
        sample["tflops"] = settings.attended_flops(length, sample["density"]) / ms / 1e9
        if peak is not None:
            sample["rest_gib"] = peak - sample["weights_gib"] - sample["cache_gib"]

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """By length, each with what the line says of its peak."""
        rows = by_length(samples, ("line_gib",))
        line = line_through(rows)
        if line is not None:
            for row in rows:
                row["line_gib"] = line.at(row["length"])
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        made = {"By length": markdown_table(rows, COLUMNS)}
        line = line_through(rows)
        if line is not None:
            cache = rows[0]["cache_gib"] / rows[0]["length"]
            results = [r["peak_gib"] - r["line_gib"] for r in rows if r["sought"] and r["fits"]]
            shown = {
                "GiB": line.base,
                "KiB a token": line.a_token * 2**20,
                "of it cache": cache * 2**20,
                "lengths": line.points,
                "GiB off at most": line.off,
                "where sought": max(map(abs, results), default=None),
            }
            made["Peak, by a line through those asked for"] = markdown_table([shown], list(shown))
        return made | remarks(rows)

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """The longest prompt, and what one chunk more would take."""
        line, fitting = line_through(rows), [row for row in rows if row["fits"]]
        if line is None:
            unknown = "The longest prompt that fits is unknown: it takes the peaks of two lengths."
            return [unknown] if fitting else []
        left = longest_left(rows)
        if left is not None:
            return [f"By the line through the peaks {left:,} tokens would fit; that was not run."]
        last = fitting[-1]
        more = last["length"] + last["chunk"]
        failed = any(row["fits"] is False and row["length"] <= more for row in rows)
        needs = "ran out of memory" if failed else f"needs {line.at(more):,.2f} GiB by the line"
        return [
            f"{last['length']:,} tokens are the longest prompt that fits: "
            f"{seconds(last['ms'])} s, {last['tokens_s']:,.0f} tokens/s, "
            f"{last['peak_gib']:,.2f} of {last['room_gib']:,.2f} GiB at the peak; one chunk of "
            f"{last['chunk']:,} more {needs}."
        ]

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return (
            f"{described(settings)}\n\nChunks have {settings['chunk']:,} tokens, and every layer "
            "attends sparsely. Rest: the peak less weights and cache, which is what one chunk "
            "needs on its way. Room: all that torch can allocate. Density is attended over causal "
            "pairs, over all layers; TFLOP/s count what is attended."
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Tokens a second by length, and beside it what the peak is made of."""
        lengths = [row["length"] for row in rows]
        with charts.figure(path, 1, 2, figsize=(11, 4.6)) as axes:
            left, right = axes[0]
            charts.line(left, rows, itemgetter("tokens_s"))
            charts.line(right, rows, itemgetter("peak_gib"), label="peak")
            dashed = {"color": "grey", "linestyle": "--", "marker": ""}
            charts.line(right, rows, itemgetter("line_gib"), label="the line", **dashed)
            charts.line(right, rows, itemgetter("cache_gib"), label="cache")
            charts.line(right, rows, itemgetter("weights_gib"), label="weights")
            if room := room_of(rows):
                right.axhline(room, color="C3", linewidth=1, label="what can be allocated")
            rate = ("rate of a whole prefill", "tokens/s", "{:,.0f}".format)
            charts.over_tokens(left, lengths, *rate, log=False)
            charts.over_tokens(right, lengths, "memory", "GiB", log=False)


EXPERIMENT = Prefill


# once a process: what is compiled stays
@lru_cache(maxsize=1)
def _warm_up(settings: Settings) -> None:
    with prefilling(settings, WARM_UP_CHUNKS * settings.chunk, WAY, settings.chunk) as (call, _):
        call()


class Line(NamedTuple):
    """Peak GiB by length: ``base + length * a_token``, at most ``off`` from what it is made of."""

    base: float
    a_token: float
    off: float
    points: int

    def at(self, length: int) -> float:
        return self.base + length * self.a_token


def line_through(rows: Iterable[Row]) -> Line | None:
    """The least-squares line through the peaks of lengths that were asked for; None below two.

    What the search found is left out, so that it can tell how good the line is.
    """
    points = [
        (row["length"], row["peak_gib"])
        for row in rows
        if row["peak_gib"] is not None and not row["sought"]
    ]
    if len(points) < 2:
        return None
    a_token, base = statistics.linear_regression(*zip(*points, strict=True))
    off = max(abs(peak - base - length * a_token) for length, peak in points)
    return Line(base, a_token, off, len(points))


def room_of(rows: Iterable[Row]) -> float | None:
    """GiB that could be allocated in every row that says so; None where none does."""
    return min((row["room_gib"] for row in rows if row["room_gib"] is not None), default=None)


def longest_left(rows: Sequence[Row]) -> int | None:
    """The longest length in whole chunks that may still fit, longer than all that ran.

    None when there is none, or no line to tell by. The line is trusted until memory runs out
    earlier.
    """
    line = line_through(rows)
    if line is None or line.a_token <= 0:
        return None
    chunk = rows[0]["chunk"]
    most = int((room_of(rows) - line.base) / line.a_token)
    most = min([most, *(row["length"] - 1 for row in rows if row["fits"] is False)])
    most = most // chunk * chunk
    return most if most > max(row["length"] for row in rows if row["fits"]) else None


COLUMNS = {
    **TOKENS,
    "s": column(seconds, "ms"),
    "tokens/s": column("{:,.0f}".format, "tokens_s"),
    "TFLOP/s": column(digits, "tflops"),
    **DENSITY,
    "peak GiB": "peak_gib",
    "weights": "weights_gib",
    "cache": "cache_gib",
    "rest": "rest_gib",
    "by the line": "line_gib",
    "room": "room_gib",
}
