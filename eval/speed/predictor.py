"""``speed predictor``: time selecting blocks, next to the best dense attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cab_hf.eval.experiment import Row
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.base import by_length, powers
from cab_hf.eval.speed.heads import HeadSettings, HeadSpeed, call_of
from cab_hf.eval.speed.reported import Panel
from cab_hf.eval.speed.timing import OTHER, PREDICTOR, PROFILED_CALLS, method_on
from cab_hf.experiment.settings import option
from cab_hf.plan import KeyRanges
from cab_hf.predictors import make_predictor

PARTS = tuple(f"{part}_ms" for part in (*PREDICTOR, OTHER))


@dataclass(frozen=True)
class Settings(HeadSettings):
    """Settings of a run of the predictor."""

    POSITIVE = (*HeadSettings.POSITIVE, "head_dim")

    lengths: tuple[int, ...] | None = powers(10, 20)
    head_dim: int = option(128, "head dim", int)

    @property
    def method(self) -> str:
        return (
            f"{method_on(self.device)}; the parts are kernel times of the profiler, the median of "
            f"{PROFILED_CALLS} eager calls; the peak excludes the inputs and includes the result"
        )


class Predictor(HeadSpeed):
    """The experiment; a case is one length."""

    name = "speed predictor"
    purpose = "time selecting blocks, next to dense attention"
    title = "Speed of the predictor"
    caption = "time and share of dense attention by length"
    Settings = Settings

    SHAPE = (*HeadSpeed.SHAPE, "head_dim")
    FOUND = ("density", "ms", "eager_ms", "graph_ms", *PARTS, "peak_mib", "why_no_split")
    BY = {"way": "way"}
    HIDDEN = ("way", "graph_ms", "gflops")
    PANELS = (
        Panel("selecting blocks, and dense attention", "ms", ("ms",)),
        Panel("parts of selecting blocks", "ms", PARTS),
        Panel("selecting blocks relative to dense attention", "share of its time", ("ratio",)),
    )
    NOTES = {
        "": "Density is attended over causal (query, key) pairs. Exponent: the time grows as N to "
        "this power from the row above."
    }

    @torch.no_grad()
    def find(self, sample: dict[str, Any]) -> None:
        settings, bench, length = self.settings, self.bench, sample["length"]
        q, k = settings.random_heads(length, settings.head_dim, bench.device, "qk")
        ranges = KeyRanges.causal(settings.batch, length, length, bench.device)
        config = settings.cab_config
        call = partial(make_predictor(config), q, k, call_of(config, ranges, settings.head_dim))

        call()  # compiles and tunes kernels, which needs its own memory
        plan, peak = bench.peak(call)
        density = plan.density()
        del plan
        timing = self.time(sample, "predictor", call)
        sample |= {"density": density, "peak_mib": peak, **bench.parts(call)}
        sample |= {"ms": timing.ms, "eager_ms": timing.eager, "graph_ms": timing.graph}

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return rows by length, with the ratio to dense attention and the growth of the time."""
        rows = by_length(samples, (*dense.COMPARED, "exponent"))
        before = None
        for row in rows:
            row |= dense.compared(row, rows)
            if row["ms"] is not None:
                if before is not None:
                    longer = row["length"] / before["length"]
                    row["exponent"] = math.log(row["ms"] / before["ms"]) / math.log(longer)
                before = row
        return rows

    @classmethod
    def shown(cls, rows: Sequence[Row]) -> Sequence[Row]:
        return [{**row, "way": "cab"} for row in rows]

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        compared = [row for row in rows if row["ratio"] is not None]
        return [dense.reading(compared, "predicting")] if compared else []


EXPERIMENT = Predictor
