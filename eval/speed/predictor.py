"""``speed predictor``: deciding which blocks are attended, beside the best dense attention."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from cab_hf.config import CAB, CabConfig
from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import column, digits, markdown_table, percent
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.base import TOKENS, by_length, powers, remarks
from cab_hf.eval.speed.heads import HeadSettings, HeadSpeed, call_of, described, draw_dense, names
from cab_hf.eval.speed.timing import OTHER, PREDICTOR, PROFILED_CALLS, method_on
from cab_hf.hf.rotary import llama_channels
from cab_hf.plan import Spans
from cab_hf.predictors import make_predictor
from cab_hf.runs.settings import option

PARTS = (*PREDICTOR, OTHER)
GROWTH_FROM = 131_072  # tokens from which growth is summed up, where there are such rows
GROWTH = ("growth", "growth_linear", "growth_quadratic", "exponent")


@dataclass(frozen=True)
class Settings(HeadSettings):
    """What a run of the predictor is told."""

    POSITIVE = (*HeadSettings.POSITIVE, "head_dim")

    lengths: tuple[int, ...] | None = powers(10, 20)
    head_dim: int = option(128, "head dim", int)

    @property
    def method(self) -> str:
        return (
            f"{method_on(self.device)}; ms is the replay of a CUDA graph, for the dense baselines "
            "too, and eager_ms the same calls made from Python; the parts are kernel times of the "
            f"profiler, median of {PROFILED_CALLS} eager calls; the peak is that of an eager call "
            "over its inputs, its result included"
        )


class Predictor(HeadSpeed):
    """A case is one length."""

    name = "speed predictor"
    purpose = "time deciding which blocks are attended, beside dense attention"
    title = "Speed of the predictor"
    caption = "time and share of dense attention by length"
    Settings = Settings

    SHAPE = (*HeadSpeed.SHAPE, "head_dim")
    FOUND = (
        *("density", "ms", "eager_ms", "graph_ms", *(f"{part}_ms" for part in PARTS)),
        *("peak_mib", "gflops", "why_no_split"),
    )

    @torch.no_grad()
    def find(self, sample: dict[str, Any]) -> None:
        settings, bench, length = self.settings, self.bench, sample["length"]
        q, k = settings.random_heads(length, settings.head_dim, bench.device, "qk")
        spans = Spans.causal(settings.batch, length, length, bench.device)
        config = settings.cab_config
        call = partial(make_predictor(config), q, k, call_of(config, spans, settings.head_dim))

        call()  # kernels are compiled and tuned, which takes memory of its own
        plan, peak = bench.peak(call)
        density = plan.density()
        del plan
        timing = self.time(sample, "predictor", call)
        sample |= {"density": density, "peak_mib": peak, **bench.parts(call)}
        sample |= {"ms": timing.ms, "eager_ms": timing.eager, "graph_ms": timing.graph}
        if config.predictor in CAB:
            sample["gflops"] = predictor_flops(config, settings, length) / timing.ms / 1e6

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """By length, with the ratio over dense attention and the growth from the row before.

        The row before is the last that has a time.
        """
        rows = by_length(samples, (*dense.COMPARED, *GROWTH))
        before = None
        for row in rows:
            row |= dense.compared(row, rows)
            if row["ms"] is not None:
                row |= growth([before, row]) if before else {}
                before = row
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        dense_ms = {f"{name} ms": column(digits, "baselines", name) for name in names(rows)}
        measured = [row for row in rows if row["baselines"]]
        return {
            "Predicting": markdown_table(rows, COLUMNS),
            "Dense causal attention, forward": markdown_table(measured, TOKENS | dense_ms),
            **remarks(rows),
        }

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """What predicting costs at the longest input, and how that grows."""
        timed = [row for row in rows if row["ms"] is not None]
        parts = []
        if compared := [row for row in timed if row["ratio"] is not None]:
            last = compared[-1]
            parts.append(
                f"At {last['length']:,} tokens predicting takes {percent(last['ratio'])} of "
                f"{last['baseline']}'s time{' (extrapolated)' * last['extrapolated']}; it is "
                f"faster {dense.break_even_shown(compared)}."
            )
        long = [row for row in timed if row["length"] >= GROWTH_FROM]
        over = long if len(long) > 1 else timed
        if len(over) > 1:
            grown = growth(over)
            parts.append(
                f"From {over[0]['length']:,} to {over[-1]['length']:,} tokens its time grows "
                f"{grown['growth']:.1f} times, as N to the power of {grown['exponent']:.2f}."
            )
        return parts

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return (
            f"{described(settings)} Density is attended over causal (query, key) pairs. GFLOP/s "
            "count the products of scored queries and keys."
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Time with its parts and dense attention, and beside it the share of the latter."""
        lengths = [row["length"] for row in rows]
        with charts.figure(path, 1, 2, figsize=(11, 4.6), sharex=True) as axes:
            left, right = axes[0]
            charts.line(left, rows, itemgetter("ms"), label="predictor", linewidth=2.2)
            for part in PARTS:
                look = {"label": f"    {part}", "linewidth": 1, "markersize": 2.5}
                charts.line(left, rows, itemgetter(f"{part}_ms"), **look)
            draw_dense(left, rows, names(rows), lambda name, row: row["baselines"].get(name))
            beyond = [row for row in rows if row["extrapolated"]]
            look = {"color": "black", "linestyle": "--", "marker": "", "label": "dense, ≈ by N²"}
            charts.line(left, beyond, itemgetter("baseline_ms"), **look)
            charts.line(right, rows, itemgetter("ratio"), label="predictor / dense")
            right.axhline(1, color="grey", linewidth=1)
            charts.over_tokens(left, lengths, "one layer's selection and dense attention", "ms")
            title = "selection over dense attention of a layer"
            charts.over_tokens(right, lengths, title, "share", "{:.3g}".format)


EXPERIMENT = Predictor


def predictor_flops(config: CabConfig, settings: Settings, length: int) -> int:
    """Floating-point operations of deciding a causal prefill.

    Counted are a multiplication and an addition per channel of the scored queries of every block
    and of the keys up to its end: outliers on their channels, typical queries on all. Rounding
    keys, finding outliers, softmax and the pass that keeps are not.
    """
    dim, rows = settings.head_dim, -(-length // config.query_block)
    ends = sum(min(length, (row + 1) * config.query_block) for row in range(rows))
    some = len(llama_channels(dim)) or dim
    channels = config.exact_queries * some + config.typical_queries * dim
    return 2 * channels * settings.batch * settings.heads * ends


def growth(rows: Sequence[Row]) -> dict[str, float]:
    """How the time grows from the first row to the last, and how it would if linear or quadratic.

    The exponent is that of N in a least squares fit of log ms over all the rows, at least two.
    """
    first, last = rows[0], rows[-1]
    longer = last["length"] / first["length"]
    fit = statistics.linear_regression(
        [math.log(row["length"]) for row in rows], [math.log(row["ms"]) for row in rows]
    )
    return dict(zip(GROWTH, (last["ms"] / first["ms"], longer, longer**2, fit.slope), strict=True))


def _growth(row: Row) -> str | None:
    if row["growth"] is None:
        return None
    return f"{row['growth']:.2f} (N: {row['growth_linear']:.3g}, N²: {row['growth_quadratic']:.3g})"


COLUMNS = {
    **TOKENS,
    "graph ms": column(digits, "graph_ms"),
    "eager ms": column(digits, "eager_ms"),
    **{part: column(digits, f"{part}_ms") for part in PARTS},
    "GFLOP/s": column(digits, "gflops"),
    "peak MiB": column(digits, "peak_mib"),
    "density": "density",
    "dense ms": dense.time_shown,
    "of dense": column(percent, "ratio"),
    "times the row above": _growth,
}
