"""Which part of the work a GPU kernel does, by its name."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

# part -> what the names of its kernels contain; the first that fits
PREDICTOR = {
    "coarsen": ("coarsen",),
    "curvature": ("block_scores", "affinity", "two_hop", "column_strength"),
    "select": ("select", "lists"),
}
OTHER = "other"


def part_of(kernel: str, parts: Mapping[str, Sequence[str]] = PREDICTOR) -> str:
    """Which of ``parts`` a kernel of that name belongs to; `OTHER` where none fits."""
    for part, marks in parts.items():
        if any(mark in kernel for mark in marks):
            return part
    return OTHER


def split(
    calls: Sequence[Sequence[tuple[str, float]]],
    parts: Mapping[str, Sequence[str]] = PREDICTOR,
) -> dict[str, float]:
    """ms of every part and of the rest, the median over calls of (kernel name, ms) each."""
    sums = []
    for call in calls:
        spent = dict.fromkeys((*parts, OTHER), 0.0)
        for name, ms in call:
            spent[part_of(name, parts)] += ms
        sums.append(spent)
    return {
        f"{part}_ms": statistics.median(spent[part] for spent in sums) for part in (*parts, OTHER)
    }
