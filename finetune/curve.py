"""Draw the loss, density and MFU of a run from its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cab_hf.experiment.figure import figure

# values of the field "kind" of a log's records
STEP_RECORD_KIND = "step"
EVALUATION_RECORD_KIND = "evaluation"
# (label, kind of record, field of the record) of each curve: losses in the upper panel, values from
# 0 to 1 in the lower panel
LOSS_CURVES = (
    ("training", STEP_RECORD_KIND, "loss"),
    ("held out", EVALUATION_RECORD_KIND, "held_out_loss"),
)
SHARE_CURVES = (
    ("density", STEP_RECORD_KIND, "density"),
    ("useful MFU", STEP_RECORD_KIND, "mfu"),
    ("dense-equivalent", STEP_RECORD_KIND, "mfu_dense_equivalent"),
)


def draw_training_curves(path: Path | str, records: Sequence[Mapping[str, Any]]) -> None:
    """Write a PNG of loss, pass-key accuracy, density and MFU over steps.

    Args:
        path: file to write.
        records: records of a training log, of kinds `STEP_RECORD_KIND` and
            `EVALUATION_RECORD_KIND`.
    """
    passkey_points_by_label: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for length, key_share in record.get("passkey", {}).items():
            curve_points = passkey_points_by_label.setdefault(
                f"keys found, {int(length):,} tokens", []
            )
            curve_points.append((record["step"], key_share))
    with figure(path, 2, 1, sharex=True, figsize=(7, 6)) as axes:
        loss_axis, share_axis = axes[:, 0]
        for panel_axes, curve_definitions, points_by_label in (
            (loss_axis, LOSS_CURVES, {}),
            (share_axis, SHARE_CURVES, passkey_points_by_label),
        ):
            for label, record_kind, record_field in curve_definitions:
                curve_records = (
                    record
                    for record in records
                    if record["kind"] == record_kind and record.get(record_field) is not None
                )
                points_by_label[label] = sorted(
                    (record["step"], record[record_field]) for record in curve_records
                )
            for label, curve_points in points_by_label.items():
                if curve_points:
                    steps = [step for step, _ in curve_points]
                    curve_values = [curve_value for _, curve_value in curve_points]
                    line_style = {"marker": "o"} if len(curve_points) < 30 else {}
                    panel_axes.plot(steps, curve_values, label=label, markersize=3, **line_style)
            panel_axes.grid(alpha=0.3)
            if panel_axes.get_legend_handles_labels()[0]:
                panel_axes.legend(fontsize=8)
        loss_axis.set_ylabel("loss per token")
        share_axis.set_ylabel("share")
        share_axis.set_ylim(0, 1.05)
        share_axis.set_xlabel("step")
