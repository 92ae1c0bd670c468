"""``speed predictor``: deciding which blocks are attended, beside the best dense attention.

A row is one length.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch

from cab_hf.config import CabConfig
from cab_hf.eval import charts, dense, kernels, report
from cab_hf.eval.speed_heads import INPUTS, HeadSettings, time_baselines
from cab_hf.eval.timing import (
    METHOD_ON_CPU,
    PROFILED_CALLS,
    SECONDS_A_CASE,
    Bench,
    in_a_sentence,
    method_on_gpu,
)
from cab_hf.plan import BlockPlan, Spans
from cab_hf.predictors import Call, make_predictor
from cab_hf.runs.settings import by_device, comma_separated, option

PURPOSE = "time deciding which blocks are attended, beside dense attention"

TITLE = "Speed of the predictor"
CAPTION = "time and share of dense attention by length"
PARTS = (*kernels.PREDICTOR, kernels.OTHER)
GROWTH_FROM = 131_072  # tokens from which growth is summed up, where there are such rows
# what only several rows together tell; computed anew whenever one is added
DERIVED = (
    "baseline",
    "baseline_ms",
    "ratio",
    "extrapolated",
    "growth",
    "growth_linear",
    "growth_quadratic",
    "exponent",
)


@dataclass(frozen=True)
class Settings(HeadSettings):
    """What a run of the predictor is told."""

    METHOD: ClassVar[Mapping[str, str]] = {
        "cuda": (
            f"{method_on_gpu(SECONDS_A_CASE)}; ms is the replay of a CUDA graph of the op, for the "
            "dense baselines too, and eager_ms the same calls made from Python; the parts are "
            f"kernel times of the profiler, median of {PROFILED_CALLS} eager calls; the peak is "
            "that of an eager call over its inputs, its result included"
        ),
        "cpu": METHOD_ON_CPU,
    }

    lengths: tuple[int, ...] | None = by_device(
        tuple(2**n for n in range(10, 21)), (256, 512), "tokens", comma_separated(int)
    )
    head_dim: int = option(128, "channels of a head", int)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("head_dim")

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


# --- measuring


def measure(settings: Settings, key: Mapping[str, Any], bench: Bench) -> dict[str, Any]:
    """The row of ``key["length"]``, less what is derived. Out of memory is a row too."""
    length = key["length"]
    row = {
        "op": "predictor",
        "length": length,
        **{name: getattr(settings, name) for name in ("batch", "heads", "kv_heads", "head_dim")},
        "dtype": settings.dtype,
        **dict.fromkeys(("density", "ms", "eager_ms", "graph_ms", "peak_mib", "gflops")),
        **dict.fromkeys(f"{part}_ms" for part in PARTS),
        "why_no_split": None,
        "error": None,
        "baselines": {},
        "not_measured": {},
        "without_graph": {},
    }
    try:
        row |= time_predictor(settings, length, bench)
    except torch.OutOfMemoryError as error:
        row["error"] = in_a_sentence(error)
    bench.settle()
    if length <= settings.dense_up_to:
        measured = time_baselines(settings, length, settings.head_dim, bench)
        row["baselines"], row["not_measured"] = measured.times, measured.not_measured
        row["without_graph"] |= measured.without_graph
        bench.settle()
    return row


@torch.no_grad()
def time_predictor(settings: Settings, length: int, bench: Bench) -> dict[str, Any]:
    """Time, parts, peak memory and density of predicting; torch.OutOfMemoryError passes through."""
    config = settings.cab_config
    q, k = settings.random_heads(length, settings.head_dim, bench.device, "qk")
    spans = Spans.causal(settings.batch, length, length, bench.device)
    predict, told = make_predictor(config), Call(spans, settings.scale)

    def call() -> BlockPlan:
        return predict(q, k, told)

    call()  # kernels are compiled and tuned, which takes memory of its own
    plan, peak = bench.peak(call)
    density = plan.density()
    del plan
    timing = bench.time(call)
    work = sum(predictor_flops(config, settings, length).values())
    row = {
        "density": density,
        "ms": timing.ms,
        "eager_ms": timing.eager,
        "graph_ms": timing.graph,
        "peak_mib": peak,
        "gflops": work / timing.ms / 1e6,
        "without_graph": {"predictor": timing.why_not} if timing.why_not else {},
    }
    try:
        return row | kernels.split(bench.kernels(call))
    except RuntimeError as error:
        return row | {"why_no_split": in_a_sentence(error)}


def predictor_flops(config: CabConfig, settings: Settings, length: int) -> dict[str, int]:
    """Floating-point operations of deciding a causal prefill, by step.

    Counted are coarsening (one operation per element for a mean, a maximum or a minimum, two for a
    norm), block logits (a multiplication and an addition per channel and product: mean, and for
    boxes upper and lower bound) over the causal tiles, and the two-hop product of the lower
    triangular matrix on the query grid with itself. Softmax, standardising and selecting are not.
    """
    dim, heads = settings.head_dim, settings.batch * settings.heads
    kv_heads = settings.batch * settings.kv_heads
    a_query, a_key, products = {"box": (1, 3, 3), "mean": (1, 1, 1), "max_l2": (2, 2, 1)}[
        config.coarsen
    ]
    rows = -(-length // config.query_block)
    ends = (min(length, (row + 1) * config.query_block) for row in range(rows))
    tiles = sum(-(-end // config.key_block) for end in ends)
    # paths i -> t -> j with j <= t <= i
    paths = rows * (rows + 1) * (rows + 2) // 6
    return {
        "coarsen": length * dim * (a_query * heads + a_key * kv_heads),
        "logits": 2 * products * dim * heads * tiles,
        "two_hop": 2 * heads * paths if config.curved else 0,
    }


# --- what rows tell together


def derive(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows by length, with what only several of them together tell (`DERIVED`).

    A row's ratio is against the baseline measured at its length, or else extrapolated from the
    longest it was measured at. Growth is from the row before that has a time.
    """
    rows = [dict(row) for row in sorted(rows, key=itemgetter("length"))]
    before = None
    for row in rows:
        row |= dict.fromkeys(DERIVED)
        against = dense.reference(row, rows)
        if against is not None:
            row["baseline"], row["baseline_ms"], row["extrapolated"] = against
        if row["ms"] is None:
            continue
        if row["baseline_ms"] is not None:
            row["ratio"] = row["ms"] / row["baseline_ms"]
        if before is not None:
            row |= growth([before, row])
        before = row
    return rows


def growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How the time grows from the first row to the last, and how it would if linear or quadratic.

    The exponent is that of N in a least squares fit of log ms over all the rows, at least two.
    """
    first, last = rows[0], rows[-1]
    longer = last["length"] / first["length"]
    fit = statistics.linear_regression(
        [math.log(row["length"]) for row in rows], [math.log(row["ms"]) for row in rows]
    )
    return {
        "growth": last["ms"] / first["ms"],
        "growth_linear": longer,
        "growth_quadratic": longer**2,
        "exponent": fit.slope,
    }


# --- the report


def _digits_of(key: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda row: report.digits(row[key])


def _growth(row: Mapping[str, Any]) -> str | None:
    if row["growth"] is None:
        return None
    return f"{row['growth']:.2f} (N: {row['growth_linear']:.3g}, N²: {row['growth_quadratic']:.3g})"


COLUMNS = {
    "tokens": lambda row: f"{row['length']:,}",
    "graph ms": _digits_of("graph_ms"),
    "eager ms": _digits_of("eager_ms"),
    **{part: _digits_of(f"{part}_ms") for part in PARTS},
    "GFLOP/s": _digits_of("gflops"),
    "peak MiB": _digits_of("peak_mib"),
    "density": "density",
    "dense ms": dense.time_told,
    "of dense": lambda row: report.percent(row["ratio"]),
    "times the row above": _growth,
}


def readings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows say, a sentence each: growth, where it loses, what is missing and why."""
    return [
        *_growth_told(rows),
        *_losses_told(rows),
        *(f"At {row['length']:,} tokens: {row['error']}." for row in rows if row["error"]),
        *report.told_by_length(
            rows,
            lambda row: {"": row["why_no_split"]} if row["why_no_split"] else {},
            "Time is not split into parts at {lengths} tokens: {why}.",
        ),
        *report.told_by_length(
            rows,
            lambda row: row["without_graph"],
            "{name} could not be captured as a CUDA graph at {lengths} tokens and its time is "
            "eager: {why}.",
        ),
        *report.told_by_length(
            rows,
            lambda row: row["not_measured"],
            "{name} was not measured at {lengths} tokens: {why}.",
        ),
    ]


def _growth_told(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    timed = [row for row in rows if row["ms"] is not None]
    long = [row for row in timed if row["length"] >= GROWTH_FROM]
    over = long if len(long) > 1 else timed
    if len(over) < 2:
        return []
    grown = growth(over)
    return [
        f"From {over[0]['length']:,} to {over[-1]['length']:,} tokens the time grows "
        f"{grown['growth']:.1f} times; linear would be {grown['growth_linear']:.3g}, "
        f"quadratic {grown['growth_quadratic']:.3g}. The fitted exponent of N is "
        f"{grown['exponent']:.2f}."
    ]


def _losses_told(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    compared = [row for row in rows if row["ratio"] is not None]
    if not compared:
        return []
    lost = [row["length"] for row in compared if row["ratio"] >= 1]
    if lost:
        said = (
            f"Predicting takes as long as dense attention or longer at {report.listed(lost)} tokens"
        )
    else:
        said = "Predicting takes less time than dense attention at every length"
    last = compared[-1]
    about = " (extrapolated)" if last["extrapolated"] else ""
    return [
        f"{said}; at {last['length']:,} tokens it takes {report.percent(last['ratio'])} of "
        f"{last['baseline']}'s time{about}."
    ]


def overview(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of all that was measured."""
    return report.markdown_table(rows, COLUMNS)


def sections(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What else a report shows: each dense baseline."""
    names = dict.fromkeys(name for row in rows for name in row["baselines"])
    columns = {"tokens": COLUMNS["tokens"]}
    columns |= {
        f"{name} ms": lambda row, name=name: report.digits(row["baselines"].get(name))
        for name in names
    }
    table = report.markdown_table([row for row in rows if row["baselines"]], columns)
    return [f"Dense causal attention, forward:\n\n{table}"]


def notes(settings: Mapping[str, Any]) -> str:
    """What the words of the report mean."""
    return (
        "Density is attended over causal (query, key) pairs. "
        f"Inputs are {INPUTS[settings['inputs']]}; no model made them. GFLOP/s counts coarsening, "
        "block logits and the two-hop product. ≈: extrapolated by N² beyond "
        f"{settings['dense_up_to']:,} tokens."
    )


def draw(path: Path | str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Time by length with its parts and dense attention, and beside it the share of the latter."""
    lengths = [row["length"] for row in rows]
    with charts.figure(path, 1, 2, figsize=(11, 4.6), sharex=True) as axes:
        left, right = axes[0]
        _draw_times(left, rows)
        _draw_share(right, rows)
        charts.over_tokens(left, lengths)
        charts.over_tokens(right, lengths, lambda share: f"{share * 100:g} %")


def _draw_times(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    replayed = any(row["graph_ms"] is not None for row in rows)
    timed = "predictor (CUDA graph)" if replayed else "predictor (eager)"
    charts.line(axis, rows, itemgetter("ms"), label=timed, color="C0", linewidth=2.2)
    if replayed:
        charts.line(
            axis,
            rows,
            itemgetter("eager_ms"),
            label="predictor (eager)",
            color="C0",
            linestyle=":",
            marker="",
        )
    for part, colour in zip(PARTS, ("C2", "C3", "C1", "C5"), strict=True):
        style = {"label": f"    {part}", "color": colour, "linewidth": 1, "markersize": 2.5}
        charts.line(axis, rows, itemgetter(f"{part}_ms"), **style)
    names = dict.fromkeys(name for row in rows for name in row["baselines"])
    for name, grey in zip(names, charts.GREYS, strict=False):
        style = {"label": f"{name} dense", "color": grey, "linewidth": 1.2, "marker": "s"}
        charts.line(axis, rows, lambda row, name=name: row["baselines"].get(name), **style)
    charts.line(
        axis,
        _from_last_measured(rows),
        itemgetter("baseline_ms"),
        label="dense, extrapolated by N²",
        color="black",
        linestyle="--",
        linewidth=1.2,
        marker="",
    )
    axis.set_ylabel("ms")
    axis.set_title("time of one layer's selection and of its dense attention", fontsize=10)


def _draw_share(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    measured = [row for row in rows if row["extrapolated"] is False]
    style = {"color": "C0", "linewidth": 2.2}
    charts.line(axis, measured, itemgetter("ratio"), label="predictor / dense", **style)
    charts.line(
        axis,
        _from_last_measured(rows),
        itemgetter("ratio"),
        label="dense extrapolated by N²",
        linestyle="--",
        markerfacecolor="white",
        zorder=1,
        **style,
    )
    axis.axhline(1, color="grey", linewidth=1)
    axis.set_ylabel("share of dense attention")
    axis.set_title("what selecting adds to a layer", fontsize=10)


def _from_last_measured(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows with an extrapolated baseline, and the one their line starts at."""
    beyond = [row for row in rows if row["extrapolated"]]
    measured = [row for row in rows if row["extrapolated"] is False]
    return [*measured[-1:], *beyond] if beyond else []
