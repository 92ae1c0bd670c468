"""``speed ttft``: the time to the first token of a whole model, by what it attends with.

A row is one length and one way to attend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from cab_hf.eval import charts, dense, report
from cab_hf.eval.speed_model import (
    CAB,
    INITIAL_STD,
    SDPA,
    ModelSettings,
    attending,
    prefill,
    ran_as,
    random_model,
    realised_density,
)
from cab_hf.eval.timing import Bench, in_a_sentence
from cab_hf.runs.settings import by_device, comma_separated, option

PURPOSE = "time to the first token of a LLaMA, by what it attends with"
TITLE = "Time to the first token"
CAPTION = "time to the first token by length, and what CAB gains"
RUNS = 3
# what several rows together tell; computed anew whenever one is added
DERIVED = ("baseline", "baseline_ms", "ratio", "over_sdpa", "over_best")


@dataclass(frozen=True)
class Settings(ModelSettings):
    """What a run of whole prefills is told."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "length": "lengths",
        "implementation": "implementations",
    }

    lengths: tuple[int, ...] | None = by_device(
        tuple(2**n for n in range(12, 18)), (256, 512), "tokens", comma_separated(int)
    )
    implementations: tuple[str, ...] | None = by_device(
        (SDPA, "cuDNN", "FA3", "FA4", *CAB),
        (SDPA, "SDPA", *CAB),
        "ways to attend",
        comma_separated(str),
    )
    runs: int = option(RUNS, "timed runs of every row", int)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("runs")
        known = (SDPA, *CAB, *dense.on(self.device))
        named = set(self.implementations) <= set(known)
        self.check("implementations", named, f"out of {', '.join(known)}")

    @property
    def method(self) -> str:
        return (
            f"median of {self.runs} runs by time.perf_counter after one that warms up, from the "
            "call of the model on a prompt of random tokens until the device is done: the whole "
            "prompt is read into the cache and the logits of its last token are there; the peak is "
            "all that was allocated, weights and cache included"
            + ("; a functional check, no result" if self.on_cpu else "")
        )


# --- measuring


def measure(settings: Settings, key: Mapping[str, Any], bench: Bench) -> dict[str, Any]:
    """The row of ``key``, less what is derived. What cannot be run is a row with its reason."""
    length, name = key["length"], key["implementation"]
    work = settings.model_flops(length)
    row = {
        "op": "ttft",
        **key,
        "dtype": settings.dtype,
        **dict.fromkeys(("ms", "peak_gib", "density", "ceiling", "tflops", "ran_as", "error")),
    }
    try:
        model = random_model(settings)
        call = prefill(settings, length)
        with attending(model, name, settings.budgeted(length, **CAB.get(name, {}))):
            ms, peak = bench.wall(call, settings.runs)
            row["ran_as"] = ran_as(model, length) if name in CAB else None
            row["density"] = realised_density(model)
    except Exception as error:
        # a kernel that is missing, refuses, is wrong or does not fit is told of
        row["error"] = in_a_sentence(error)
        return row
    finally:
        bench.settle()
    done = work["linear"] + row["density"] * work["attention"]
    return row | {
        "ms": ms,
        "peak_gib": None if peak is None else peak / 1024,
        "ceiling": sum(work.values()) / done,
        "tflops": done / ms / 1e9,
    }


def derive(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows by length, each beside sdpa and the fastest dense way at its length (`DERIVED`).

    ``over_sdpa`` and ``over_best`` say how many times faster a row is, ``ratio`` is one over the
    latter.
    """
    # ways to attend stay in the order they came in
    rows = [{**row, **dict.fromkeys(DERIVED)} for row in sorted(rows, key=itemgetter("length"))]
    for row in rows:
        alike = {
            each["implementation"]: each["ms"]
            for each in rows
            if each["length"] == row["length"] and each["ms"] is not None
        }
        others = {name: ms for name, ms in alike.items() if name not in CAB}
        best = dense.against(others, preferred=())
        if best is None or row["ms"] is None:
            continue
        row["baseline"], row["baseline_ms"] = best, others[best]
        row["ratio"] = row["ms"] / others[best]
        row["over_best"] = 1 / row["ratio"]
        if SDPA in others:
            row["over_sdpa"] = others[SDPA] / row["ms"]
    return rows


# --- the report


def _by_length(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One mapping a length: implementation -> its row."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["length"], {"length": row["length"]})[row["implementation"]] = row
    return list(found.values())


def _implementations(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["implementation"] for row in rows))


def _cell(
    name: str, value: str, write: Callable[[Any], str | None], at: Mapping[str, Any]
) -> str | None:
    found = at.get(name, {}).get(value)
    return None if found is None else write(found)


def _seconds(ms: float) -> str | None:
    return report.digits(ms / 1e3)


def _times(factor: float) -> str:
    return f"{factor:.2f}×"


def _table(
    rows: Sequence[Mapping[str, Any]], unit: str, value: str, write: Callable[[Any], str | None]
) -> dict[str, Any]:
    """A column for every implementation."""
    return {f"{n}{unit}": partial(_cell, n, value, write) for n in _implementations(rows)}


COLUMNS = {
    "density": ("density", "{:.3f}".format),
    "over sdpa": ("over_sdpa", _times),
    "over best dense": ("over_best", _times),
    "at most": ("ceiling", _times),
}
TOKENS = {"tokens": lambda at: f"{at['length']:,}"}


def overview(rows: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of every way to attend by length, and below them what each of `CAB` gains."""
    gains = dict(TOKENS)
    for name in _implementations(rows):
        if name in CAB:
            for heading, (value, write) in COLUMNS.items():
                gains[f"{name}: {heading}"] = partial(_cell, name, value, write)
    at = _by_length(rows)
    seconds = report.markdown_table(at, TOKENS | _table(rows, " s", "ms", _seconds))
    if len(gains) == len(TOKENS):
        return seconds
    return f"{seconds}\n\n{report.markdown_table(at, gains)}"


def sections(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The other tables: peak memory, and the rate of the whole model."""
    at = _by_length(rows)
    return [
        f"{heading}:\n\n"
        + report.markdown_table(at, TOKENS | _table(rows, "", value, report.digits))
        for heading, value in (("Peak GiB", "peak_gib"), ("TFLOP/s of the model", "tflops"))
    ]


def readings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows say, a sentence each: gains and their ceiling, break-even, what is missing."""
    told = []
    for name in CAB:
        compared = [
            row for row in rows if row["implementation"] == name and row["ratio"] is not None
        ]
        if compared:
            points = [(row["length"], row["ratio"]) for row in compared]
            told += [
                _gain_told(compared[-1]),
                f"{name} is faster than the fastest dense way {dense.break_even_told(points)}.",
            ]
    return [
        *told,
        *report.told_by_length(
            rows,
            lambda row: {row["implementation"]: row["ran_as"]} if row["ran_as"] else {},
            "with {name} at {lengths} tokens: {why}.",
        ),
        *report.told_by_length(
            rows,
            lambda row: {row["implementation"]: row["error"]} if row["error"] else {},
            "{name} was not measured at {lengths} tokens: {why}.",
        ),
    ]


def _gain_told(row: Mapping[str, Any]) -> str:
    sdpa = "" if row["over_sdpa"] is None else f"{_times(row['over_sdpa'])} as fast as sdpa and "
    return (
        f"At {row['length']:,} tokens {row['implementation']} has the first token after "
        f"{_seconds(row['ms'])} s, attending {report.percent(row['density'])} of the pairs: {sdpa}"
        f"{_times(row['over_best'])} as fast as {row['baseline']}, the fastest dense way; counted "
        f"in operations, no attention at that density could bring more than "
        f"{_times(row['ceiling'])}."
    )


def notes(settings: Mapping[str, Any]) -> str:
    """What the words of the report mean."""
    return (
        "sdpa is transformers' own; cuDNN, FA3 and the like take its place in every layer; cab "
        "computes prompts shorter than min_length dense, cab-always computes none so. At most: "
        "operations of the dense model over those with attention at the realised density, the most "
        "a faster attention can bring where all operations take alike. Density is attended over "
        "causal pairs, over all layers. TFLOP/s count what is attended. Weights are normal with a "
        f"standard deviation of {INITIAL_STD}. A break-even length lies between two measured ones "
        "on a line through logarithms."
    )


# --- the figure


def draw(path: Path | str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Seconds by length of every way to attend, and beside it what each of `CAB` gains."""
    lengths = [row["length"] for row in rows]
    with charts.figure(path, 1, 2, figsize=(11, 4.6)) as axes:
        left, right = axes[0]
        greys = iter(charts.GREYS)
        for place, name in enumerate(_implementations(rows)):
            some = [row for row in rows if row["implementation"] == name]
            look = {"color": f"C{place}"} if name in CAB else {"color": next(greys), "marker": "s"}
            charts.line(left, some, lambda row: row["ms"] and row["ms"] / 1e3, label=name, **look)
            if name not in CAB:
                continue
            gained = {"label": f"{name} over the fastest dense way", **look}
            charts.line(right, some, itemgetter("over_best"), **gained)
            bound = {"label": f"    at most, at {name}'s density", "linestyle": "--", "marker": ""}
            charts.line(right, some, itemgetter("ceiling"), **{**look, **bound})
        right.axhline(1, color="grey", linewidth=1)
        left.set_ylabel("s")
        left.set_title("time to the first token", fontsize=10)
        right.set_ylabel("times as fast")
        right.set_title("what a faster attention brings to the whole model", fontsize=10)
        charts.over_tokens(left, lengths)
        charts.over_tokens(right, lengths, log=False)
