"""``speed breakdown``: split the time of a prefill by the names of its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cab_hf.eval.experiment import Row
from cab_hf.eval.speed import base
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.reported import Panel
from cab_hf.eval.speed.timing import OTHER, PREDICTOR, PROFILED_CALLS, method_on
from cab_hf.experiment.settings import by_device

PARTS = {
    **PREDICTOR,
    # our kernels; FlexAttention's, compiled from a template or not; kernels of dense libraries
    "attention": ("block_attention", "flex", "triton_tem", "flash", "fmha", "cudnn"),
}


@dataclass(frozen=True)
class Settings(models.ModelSettings):
    """Settings of a breakdown."""

    layers: int | None = by_device(4, 2, "number of decoder layers", int)

    @property
    def method(self) -> str:
        return (
            f"{method_on(self.device, graph=False)}, of the whole prefill; the parts are kernel "
            f"times of the profiler, the median of {PROFILED_CALLS} other calls"
        )


class Breakdown(models.ModelSpeed):
    """The experiment; a case is one length."""

    name = "speed breakdown"
    purpose = "split the time of a prefill: selecting blocks, attention, the rest"
    title = "Parts of the time of a prefill"
    caption = "time of the parts by length"
    Settings = Settings

    SHAPE = ("layers", "dtype")
    FOUND = ("ms", "density", "ran_as", *(f"{part}_ms" for part in (*PARTS, OTHER)), "why_no_split")
    PANELS = (
        Panel("prefill", "ms", ("ms", "attention_ms", f"{OTHER}_ms")),
        Panel("selecting blocks", "ms", tuple(f"{part}_ms" for part in PREDICTOR)),
    )
    NOTES = {
        "": "Other: projections, MLP, norms, rotary embedding, cache, embedding and logits. Idle: "
        "the wall time minus all kernels, negative if profiled calls were slower. Density is "
        "attended over causal pairs."
    }

    def find(self, sample: dict[str, Any]) -> None:
        with models.prefilling(self.settings, sample["length"], "cab-always") as (call, known, _):
            sample["ms"] = self.bench.time(call, graph=False).ms
            sample |= known() | self.bench.parts(call, PARTS)

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return rows by length; ``idle_ms`` is wall time minus all kernels, ``gap`` its share."""
        rows = base.by_length(samples, ("kernels_ms", "idle_ms", "gap"))
        for row in rows:
            if row["ms"] is not None and row[f"{OTHER}_ms"] is not None:
                row["kernels_ms"] = sum(row[f"{part}_ms"] for part in (*PARTS, OTHER))
                row["idle_ms"] = row["ms"] - row["kernels_ms"]
                row["gap"] = row["idle_ms"] / row["ms"]
        return rows


EXPERIMENT = Breakdown
