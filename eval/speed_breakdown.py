"""``speed breakdown``: where the time of a prefill goes, by the names of its kernels.

A row is one length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from cab_hf.eval import charts, kernels, report
from cab_hf.eval.speed_model import (
    ModelSettings,
    attending,
    prefill,
    ran_as,
    random_model,
    realised_density,
)
from cab_hf.eval.timing import (
    METHOD_ON_CPU,
    PROFILED_CALLS,
    SECONDS_A_CASE,
    Bench,
    in_a_sentence,
    method_on_gpu,
)
from cab_hf.runs.settings import by_device, comma_separated

PURPOSE = "where the time of a prefill goes: coarsen, curvature, select, attention, the rest"
TITLE = "Where the time of a prefill goes"
CAPTION = "shares of the wall time by length"
PARTS = {
    **kernels.PREDICTOR,
    # our own; FlexAttention's, compiled from a template or not; the dense libraries'
    "attention": ("block_attention", "flex", "triton_tem", "flash", "fmha", "cudnn"),
}
# part -> how a reader calls it
SHOWN = {part: part for part in PARTS} | {kernels.OTHER: "rest"}
AGREEMENT = 0.03  # by how much the parts may miss the wall time
DERIVED = ("kernels_ms", "idle_ms", "gap")


@dataclass(frozen=True)
class Settings(ModelSettings):
    """What a breakdown is told."""

    METHOD: ClassVar[Mapping[str, str]] = {
        "cuda": (
            f"{method_on_gpu(SECONDS_A_CASE)}; that is the wall time of the whole prefill, called "
            "from Python and not profiled; the parts are kernel times of the profiler, median of "
            f"{PROFILED_CALLS} other calls"
        ),
        "cpu": METHOD_ON_CPU,
    }

    lengths: tuple[int, ...] | None = by_device(
        tuple(2**n for n in range(13, 18)), (256, 512), "tokens", comma_separated(int)
    )
    layers: int | None = by_device(4, 2, "decoder layers", int)


def measure(settings: Settings, key: Mapping[str, Any], bench: Bench) -> dict[str, Any]:
    """The row of ``key["length"]``, less what is derived. What cannot be run has its reason."""
    length = key["length"]
    row = {
        "op": "breakdown",
        "length": length,
        **{name: getattr(settings, name) for name in ("layers", "dtype")},
        **dict.fromkeys(("ms", "density", "ran_as")),
        **dict.fromkeys(f"{part}_ms" for part in SHOWN),
        **dict.fromkeys(("why_no_split", "error")),
    }
    try:
        model = random_model(settings)
        call = prefill(settings, length)
        with attending(model, "cab", settings.budgeted(length, min_length=0)):
            row["ms"] = bench.time(call, graph=False).ms
            row["density"] = realised_density(model)
            row["ran_as"] = ran_as(model, length)
            try:
                row |= kernels.split(bench.kernels(call), PARTS)
            except RuntimeError as error:
                row["why_no_split"] = in_a_sentence(error)
    except Exception as error:
        # an engine that refuses or does not fit is told of
        row["error"] = in_a_sentence(error)
    bench.settle()
    return row


def derive(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows by length, each with the sum of its parts and by how much that misses the wall time.

    ``idle_ms`` is the wall time less all kernels, ``gap`` its share: what passes while none runs,
    or, where it is negative, what the two kinds of call differ by.
    """
    rows = [{**row, **dict.fromkeys(DERIVED)} for row in sorted(rows, key=itemgetter("length"))]
    for row in rows:
        if row["ms"] is not None and _spent(row, kernels.OTHER) is not None:
            row["kernels_ms"] = sum(_spent(row, part) for part in SHOWN)
            row["idle_ms"] = row["ms"] - row["kernels_ms"]
            row["gap"] = row["idle_ms"] / row["ms"]
    return rows


def _spent(row: Mapping[str, Any], part: str) -> float | None:
    return row[f"{part}_ms"]


# --- the report


def _with_share(ms: float | None, row: Mapping[str, Any]) -> str | None:
    """``12.3 (4.5 %)`` of the wall time, below zero too."""
    if ms is None or row["ms"] is None:
        return None
    sign = "-" if ms < 0 else ""
    return f"{sign}{report.digits(abs(ms))} ({sign}{report.percent(abs(ms) / row['ms'])})"


COLUMNS = {
    "tokens": lambda row: f"{row['length']:,}",
    "density": lambda row: None if row["density"] is None else f"{row['density']:.3f}",
    "wall ms": lambda row: report.digits(row["ms"]),
    **{
        f"{shown} ms": lambda row, part=part: _with_share(_spent(row, part), row)
        for part, shown in SHOWN.items()
    },
    "kernels ms": lambda row: report.digits(row["kernels_ms"]),
    "idle ms": lambda row: _with_share(row["idle_ms"], row),
}


def overview(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of all that was measured."""
    return report.markdown_table(rows, COLUMNS)


def sections(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """None: one table says it all."""
    return []


def readings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows say, a sentence each: what takes how much, whether the parts add up."""
    return [
        *_shares_told(rows),
        *_agreement_told(rows),
        *(
            line
            for field, sentence in (
                ("ran_as", "At {lengths} tokens: {why}."),
                ("why_no_split", "Time is not split into parts at {lengths} tokens: {why}."),
                ("error", "Nothing was measured at {lengths} tokens: {why}."),
            )
            for line in report.told_by_length(
                rows, lambda row, field=field: {"": row[field]} if row[field] else {}, sentence
            )
        ),
    ]


def _shares_told(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    split = [row for row in rows if row["gap"] is not None]
    if not split:
        return []
    last = split[-1]
    shares = [
        f"{shown} {report.percent(_spent(last, part) / last['ms'])}"
        for part, shown in SHOWN.items()
    ]
    return [
        f"At {last['length']:,} tokens, attending {report.percent(last['density'])} of the pairs, "
        f"of the wall time go to {', '.join(shares)}."
    ]


def _agreement_told(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    split = [row for row in rows if row["gap"] is not None]
    if not split:
        return []
    off = [row["length"] for row in split if abs(row["gap"]) > AGREEMENT]
    widest = max(split, key=lambda row: abs(row["gap"]))
    if off:
        said = f"The parts miss the wall time by more than {AGREEMENT:.0%} at {report.listed(off)}"
        said += " tokens"
    else:
        said = f"The parts sum to the wall time within {AGREEMENT:.0%} at every length"
    return [
        f"{said}; they are furthest off at {widest['length']:,}, by {widest['gap']:+.1%} of it."
    ]


def notes(settings: Mapping[str, Any]) -> str:
    """What the words of the report mean."""
    return (
        "One prefill of the whole model. Rest: projections, MLP, norms, rotary embedding, cache, "
        "embedding and the last token's logits. Idle: the wall time less all kernels, negative "
        "where profiled calls ran longer. Density is attended over causal pairs."
    )


# --- the figure


def draw(path: Path | str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Shares of the wall time, a stacked bar a length."""
    with charts.figure(path, 1, 1, figsize=(7, 4.6)) as axes:
        axis = axes[0][0]
        split = [row for row in rows if row["gap"] is not None]
        bars = [charts.short(row["length"]) for row in split]
        below = [0.0] * len(split)
        stacked = [*SHOWN.items(), ("idle", "idle")]
        for (part, shown), colour in zip(
            stacked, ("C2", "C3", "C1", "C0", "lightgrey", "white"), strict=True
        ):
            # a gap below zero has no height: profiled kernels ran longer than the wall time
            heights = [100 * max(0.0, _spent(row, part)) / row["ms"] for row in split]
            axis.bar(bars, heights, bottom=below, label=shown, color=colour, edgecolor="grey")
            below = [low + height for low, height in zip(below, heights, strict=True)]
        axis.set_xlabel("tokens")
        axis.set_ylabel("% of the wall time")
        axis.set_title("where the time of a prefill goes", fontsize=10)
        if split:
            axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
