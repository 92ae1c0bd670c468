"""The figure of a run, drawn from its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cab_hf.experiment.figure import figure

STEP, EVALUATION = "step", "evaluation"  # kinds of records
# (label, kind of record, field) of the lines
LOSSES = (("training", STEP, "loss"), ("held out", EVALUATION, "held_out_loss"))
SHARES = (
    ("density", STEP, "density"),
    ("useful MFU", STEP, "mfu"),
    ("dense-equivalent", STEP, "mfu_dense_equivalent"),
)


def draw(path: Path | str, records: Sequence[Mapping[str, Any]]) -> None:
    """Draw the loss and the shares (keys found, density, MFU) over steps, as PNG."""
    found: dict[str, list[tuple[int, float]]] = {}
    for each in records:
        for length, share in each.get("passkey", {}).items():
            points = found.setdefault(f"keys found, {int(length):,} tokens", [])
            points.append((each["step"], share))
    with figure(path, 2, 1, sharex=True, figsize=(7, 6)) as axes:
        losses, shares = axes[:, 0]
        for axis, kinds, lines in ((losses, LOSSES, {}), (shares, SHARES, found)):
            for label, kind, field in kinds:
                chosen = (x for x in records if x["kind"] == kind and x.get(field) is not None)
                lines[label] = sorted((each["step"], each[field]) for each in chosen)
            for label, points in lines.items():
                if points:
                    style = {"marker": "o"} if len(points) < 30 else {}
                    axis.plot(*zip(*points, strict=True), label=label, markersize=3, **style)
            axis.grid(alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8)
        losses.set_ylabel("loss per token")
        shares.set_ylabel("share")
        shares.set_ylim(0, 1.05)
        shares.set_xlabel("step")
