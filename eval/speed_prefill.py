"""``speed prefill``: the longest prompt a GPU reads, chunk by chunk into one cache.

A row is one length. The longest that fits is found by a line through the peaks of the others, and
then run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from cab_hf.eval import charts, report
from cab_hf.eval.speed_model import (
    INITIAL_STD,
    ModelSettings,
    attending,
    prefill,
    ran_as,
    random_model,
    realised_density,
    weight_bytes,
)
from cab_hf.eval.timing import Bench, in_a_sentence
from cab_hf.runs.settings import by_device, comma_separated, option

PURPOSE = "the longest prompt that fits, read chunk by chunk: seconds, tokens/s, peak memory"
TITLE = "Long prompts on one GPU"
CAPTION = "rate and peak memory by length"
WAY = "cab-always"
# the length whose needs are told even where it does not fit
GOAL = 2**20
# the first chunk begins a cache, the second goes on with one: kernels of both are compiled then
WARM_UP_CHUNKS = 2
# what CUDA's libraries say when they, and not torch, find no memory
NO_MEMORY = ("out of memory", "ALLOC_FAILED")
DERIVED = ("line_gib",)


def yes_or_no(text: str) -> bool:
    """What a word means, a boolean of YAML included."""
    words = {"yes": True, "true": True, "no": False, "false": False}
    if text.lower() not in words:
        raise ValueError(f"must be yes or no; got {text!r}.")
    return words[text.lower()]


@dataclass(frozen=True)
class Settings(ModelSettings):
    """What a run of chunked prefills is told."""

    KEYS: ClassVar[Mapping[str, str]] = {"length": "lengths"}

    lengths: tuple[int, ...] | None = by_device(
        tuple(2**n for n in range(17, 20)), (256, 512), "tokens", comma_separated(int)
    )
    chunk: int | None = by_device(2**15, 128, "tokens read at a time", int)
    longest: bool = option(True, "whether the longest length that fits is sought", yes_or_no)
    max_density: tuple[str, ...] = option(
        ("0.05",), "CAB's budget, the same at every length", comma_separated(str)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        one = len(self.max_density) == 1 and ":" not in self.max_density[0]
        self.check("max_density", one, "one share, so that lengths compare")
        block = self.cab_config.query_block
        whole = self.chunk > 0 and self.chunk % block == 0
        self.check("chunk", whole, f"a multiple of query_block={block}")

    @property
    def method(self) -> str:
        return (
            f"one run by time.perf_counter after a prompt of {WARM_UP_CHUNKS} chunks that warms "
            "up, from the first chunk until the device is done: the prompt, random tokens, is read "
            "into a static cache of exactly its length, and every chunk gives the logits of its "
            "last token alone; the peak is all that was allocated"
            + ("; a functional check, no result" if self.on_cpu else "")
        )

    @staticmethod
    def shape(told: Mapping[str, Any]) -> str:
        return f"{ModelSettings.shape(told)}, read {told['chunk']:,} tokens at a time"

    def identity(self) -> dict[str, Any]:
        # the longest may be sought later
        return {name: value for name, value in super().identity().items() if name != "longest"}

    def follow_up(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The length to try next in search of the longest."""
        length = longest_left(rows) if self.longest else None
        return [] if length is None else [{"length": length, "sought": True}]


# --- measuring


def measure(settings: Settings, key: Mapping[str, Any], bench: Bench) -> dict[str, Any]:
    """The row of ``key``, less what is derived. What cannot be run is a row with its reason.

    ``fits`` is False where memory ran out, and None where something else went wrong.
    """
    length = key["length"]
    row = {
        "op": "prefill",
        "length": length,
        # whether this length comes from the search for the longest
        "sought": key.get("sought", False),
        **{name: getattr(settings, name) for name in ("chunk", "layers", "dtype")},
        **dict.fromkeys(("ms", "tokens_s", "tflops", "density", "peak_gib", "weights_gib")),
        "cache_gib": settings.cache_bytes(length) / 2**30,
        **dict.fromkeys(("rest_gib", "room_gib", "ran_as", "fits", "error")),
    }
    try:
        model = random_model(settings)
        row["weights_gib"] = weight_bytes(model) / 2**30
        _warm_up(settings)
        room = bench.room()
        row["room_gib"] = None if room is None else room / 1024
        with attending(model, WAY, settings.budgeted(length, min_length=0)):
            ms, peak = bench.once(prefill(settings, length, settings.chunk))
            row |= {"density": realised_density(model), "ran_as": ran_as(model, length)}
    except Exception as error:
        # a length that does not fit is told of, and so is an engine that refuses
        row["fits"] = False if _is_no_memory(error) else None
        row["error"] = in_a_sentence(error)
        return row
    finally:
        bench.settle()
    work = settings.model_flops(length)
    done = work["linear"] + row["density"] * work["attention"]
    row |= {"fits": True, "ms": ms, "tokens_s": length / ms * 1e3, "tflops": done / ms / 1e9}
    if peak is not None:
        row["peak_gib"] = peak / 1024
        row["rest_gib"] = row["peak_gib"] - row["weights_gib"] - row["cache_gib"]
    return row


# once a process: what is compiled stays
@lru_cache(maxsize=1)
def _warm_up(settings: Settings) -> None:
    length = WARM_UP_CHUNKS * settings.chunk
    with attending(random_model(settings), WAY, settings.budgeted(length, min_length=0)):
        prefill(settings, length, settings.chunk)()


def _is_no_memory(error: BaseException) -> bool:
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return told or isinstance(error, torch.OutOfMemoryError)


# --- arithmetic


class Line(NamedTuple):
    """Peak GiB by length: ``base + length * a_token``, at most ``off`` from what it is made of."""

    base: float
    a_token: float
    off: float
    points: int

    def at(self, length: int) -> float:
        return self.base + length * self.a_token


def line_through(rows: Iterable[Mapping[str, Any]]) -> Line | None:
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


def longest_left(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The longest length in whole chunks that may still fit, longer than all that ran.

    None when there is none, or no line to tell by. The line is trusted until memory runs out
    earlier.
    """
    line = line_through(rows)
    if line is None or line.a_token <= 0:
        return None
    chunk = rows[0]["chunk"]
    room = min(row["room_gib"] for row in rows if row["room_gib"] is not None)
    most = int((room - line.base) / line.a_token)
    most = min([most, *(row["length"] - 1 for row in rows if row["fits"] is False)])
    most = most // chunk * chunk
    return most if most > max(row["length"] for row in rows if row["fits"]) else None


def gpus_for(weights: float, cache: float, rest: float, room: float) -> int | None:
    """The fewest GPUs with ``room`` that hold an even share of weights and cache, and the rest."""
    return None if rest >= room else max(1, -int(-(weights + cache) // (room - rest)))


def derive(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows by length, each with what the line says of its peak."""
    rows = [{**row, **dict.fromkeys(DERIVED)} for row in sorted(rows, key=itemgetter("length"))]
    line = line_through(rows)
    if line is not None:
        for row in rows:
            row["line_gib"] = line.at(row["length"])
    return rows


# --- the report


COLUMNS = {
    "tokens": lambda row: f"{row['length']:,}",
    "s": lambda row: row["ms"] and report.digits(row["ms"] / 1e3),
    "tokens/s": lambda row: row["tokens_s"] and f"{row['tokens_s']:,.0f}",
    "TFLOP/s": lambda row: report.digits(row["tflops"]),
    "density": lambda row: row["density"] and f"{row['density']:.3f}",
    "peak GiB": "peak_gib",
    "weights": "weights_gib",
    "cache": "cache_gib",
    "rest": "rest_gib",
    "by the line": "line_gib",
}


def overview(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of all that was measured."""
    return report.markdown_table(rows, COLUMNS)


def sections(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """None: one table says it all."""
    return []


def readings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows say, a sentence each: the longest prompt, the line, what `GOAL` needs."""
    line = line_through(rows)
    told = []
    if line is not None:
        told = [_longest_told(rows, line), _line_told(rows, line), _goal_told(rows, line)]
    elif any(row["fits"] for row in rows):
        told = ["The longest prompt that fits is unknown: it takes the peaks of two lengths."]
    return [
        *told,
        *(
            sentence
            for field, words in (
                ("ran_as", "At {lengths} tokens: {why}."),
                ("error", "Nothing was measured at {lengths} tokens: {why}."),
            )
            for sentence in report.told_by_length(
                rows, lambda row, field=field: {"": row[field]} if row[field] else {}, words
            )
        ),
    ]


def _longest_told(rows: Sequence[Mapping[str, Any]], line: Line) -> str:
    left = longest_left(rows)
    if left is not None:
        return f"By the line below {left:,} tokens would fit; that was not run."
    last = max((row for row in rows if row["fits"]), key=itemgetter("length"))
    more = last["length"] + last["chunk"]
    failed = any(row["fits"] is False and row["length"] <= more for row in rows)
    needs = "ran out of memory" if failed else f"needs {_gib(line.at(more))} by the line below"
    return (
        f"{last['length']:,} tokens are the longest prompt that fits, and it was run: "
        f"{report.digits(last['ms'] / 1e3)} s, {last['tokens_s']:,.0f} tokens/s, "
        f"{_gib(last['peak_gib'])} of {_gib(last['room_gib'])} at the peak; one chunk of "
        f"{last['chunk']:,} more {needs}."
    )


def _line_told(rows: Sequence[Mapping[str, Any]], line: Line) -> str:
    found = [
        f"{_gib(abs(row['peak_gib'] - row['line_gib']))} off at {row['length']:,}"
        for row in rows
        if row["sought"] and row["fits"]
    ]
    a_token = rows[0]["cache_gib"] / rows[0]["length"]
    return (
        f"The peak is {_gib(line.base)} and {_kib(line.a_token)} a token, of which the cache takes "
        f"{_kib(a_token)}: a line through {line.points} lengths, at most {_gib(line.off)} off "
        f"there{''.join(f' and {words}' for words in found)}."
    )


def _goal_told(rows: Sequence[Mapping[str, Any]], line: Line) -> str:
    weights = next(row["weights_gib"] for row in rows if row["fits"])
    room = min(row["room_gib"] for row in rows if row["room_gib"] is not None)
    cache = GOAL * rows[0]["cache_gib"] / rows[0]["length"]
    rest = line.at(GOAL) - weights - cache
    return (
        f"By that line {GOAL:,} tokens need {_gib(line.at(GOAL))}, {_gib(weights)} for weights, "
        f"{_gib(cache)} for the cache and {_gib(rest)} for the rest: "
        f"{_gpus_told(gpus_for(weights, cache, rest, room))}."
    )


def _gpus_told(count: int | None) -> str:
    if count is None:
        return "the rest alone is more than such a GPU has"
    if count == 1:
        return "one such GPU"
    return f"{count} such GPUs, weights and cache spread evenly over them"


def _gib(value: float) -> str:
    return f"{value:,.2f} GiB"


def _kib(gib: float) -> str:
    return f"{gib * 2**20:,.2f} KiB"


def notes(settings: Mapping[str, Any]) -> str:
    """What the words of the report mean."""
    return (
        "Every layer attends sparsely, short inputs too. Rest: the peak less weights and cache, "
        "which is what one chunk needs on its way. What fits is compared with all that torch can "
        "allocate on the device. Density is attended over causal pairs, over all layers. TFLOP/s "
        f"count what is attended. Weights are normal with a standard deviation of {INITIAL_STD}."
    )


# --- the figure


def draw(path: Path | str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Tokens a second by length, and beside it what the peak is made of."""
    lengths = [row["length"] for row in rows]
    with charts.figure(path, 1, 2, figsize=(11, 4.6)) as axes:
        left, right = axes[0]
        charts.line(left, rows, itemgetter("tokens_s"), label="cab")
        left.set_ylabel("tokens/s")
        left.set_title("rate of a whole prefill", fontsize=10)
        for value, style in (
            ("peak_gib", {"label": "peak"}),
            ("line_gib", {"label": "the line", "color": "grey", "linestyle": "--", "marker": ""}),
            ("cache_gib", {"label": "cache"}),
            ("weights_gib", {"label": "weights"}),
        ):
            charts.line(right, rows, itemgetter(value), **style)
        room = [row["room_gib"] for row in rows if row["room_gib"] is not None]
        if room:
            right.axhline(min(room), color="C3", linewidth=1, label="what can be allocated")
        right.set_ylabel("GiB")
        right.set_title("memory", fontsize=10)
        charts.over_tokens(left, lengths, "{:,.0f}".format, log=False)
        charts.over_tokens(right, lengths, log=False)
