"""Draw the loss, density and MFU of a run from its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cab_hf.experiment.figure import figure

STEP, EVALUATION = "step", "evaluation"  # values of the field "kind" of a log's records
# (label, kind of record, field of the record) of each curve: losses in the upper panel, values from
# 0 to 1 in the lower panel
LOSSES = (("training", STEP, "loss"), ("held out", EVALUATION, "held_out_loss"))
SHARES = (
    ("density", STEP, "density"),
    ("useful MFU", STEP, "mfu"),
    ("dense-equivalent", STEP, "mfu_dense_equivalent"),
)


def draw(path: Path | str, records: Sequence[Mapping[str, Any]]) -> None:
    """Write a PNG of loss, pass-key accuracy, density and MFU over steps.

    Args:
        path: file to write.
        records: records of a training log, of kinds `STEP` and `EVALUATION`.
    """
    passkey_lines: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for length, share in record.get("passkey", {}).items():
            points = passkey_lines.setdefault(f"keys found, {int(length):,} tokens", [])
            points.append((record["step"], share))
    with figure(path, 2, 1, sharex=True, figsize=(7, 6)) as axes:
        loss_axis, share_axis = axes[:, 0]
        for axis, fields, lines in (
            (loss_axis, LOSSES, {}),
            (share_axis, SHARES, passkey_lines),
        ):
            for label, kind, field in fields:
                chosen = (x for x in records if x["kind"] == kind and x.get(field) is not None)
                lines[label] = sorted((record["step"], record[field]) for record in chosen)
            for label, points in lines.items():
                if points:
                    steps = [step for step, _ in points]
                    values = [value for _, value in points]
                    style = {"marker": "o"} if len(points) < 30 else {}
                    axis.plot(steps, values, label=label, markersize=3, **style)
            axis.grid(alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8)
        loss_axis.set_ylabel("loss per token")
        share_axis.set_ylabel("share")
        share_axis.set_ylim(0, 1.05)
        share_axis.set_xlabel("step")
