"""The figure of a run, drawn from its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cab_hf.runs.figure import figure

STEP, EVALUATION = "step", "evaluation"  # kinds of records
Record = Mapping[str, Any]
Lines = dict[str, list[tuple[int, float]]]


def draw(path: Path | str, records: Sequence[Record]) -> None:
    """Draw loss, and shares of one (keys found, density, MFU), over the steps; as PNG."""
    with figure(path, 2, 1, sharex=True, figsize=(7, 6)) as axes:
        losses, shares = axes[:, 0]
        for axis, lines in ((losses, _losses(records)), (shares, _shares(records))):
            for label, points in lines.items():
                if points:
                    style = {"marker": "o"} if len(points) < 30 else {}
                    axis.plot(*zip(*points, strict=True), label=label, markersize=3, **style)
            axis.grid(alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8)
        losses.set_ylabel("loss of a token")
        shares.set_ylabel("share")
        shares.set_ylim(0, 1.05)
        shares.set_xlabel("step")


def _losses(records: Sequence[Record]) -> Lines:
    held_out = _points(records, EVALUATION, "held_out_loss")
    return {"training": _points(records, STEP, "loss"), "held out": held_out}


def _shares(records: Sequence[Record]) -> Lines:
    result: Lines = {}
    for each in records:
        for length, share in each.get("passkey", {}).items():
            label = f"keys found in {int(length):,} tokens"
            result.setdefault(label, []).append((each["step"], share))
    lines = {"density": "density", "useful MFU": "mfu", "dense-equivalent": "mfu_dense_equivalent"}
    return {**result, **{name: _points(records, STEP, field) for name, field in lines.items()}}


def _points(records: Sequence[Record], kind: str, field: str) -> list[tuple[int, float]]:
    """(step, value) of records that have one, in order of the steps."""
    chosen = (each for each in records if each["kind"] == kind and each.get(field) is not None)
    return sorted((each["step"], each[field]) for each in chosen)
