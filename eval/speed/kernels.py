"""Which part of the work a GPU kernel does, by its name."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cab_hf.eval.speed.timing import Bench, in_a_sentence

# part -> what the names of its kernels contain; the first that fits
PREDICTOR = {
    "coarsen": ("coarsen",),
    "curvature": ("block_scores", "affinity", "two_hop", "column_strength"),
    "select": ("select", "lists"),
}
OTHER = "other"


def part_of(kernel: str, parts: Mapping[str, Sequence[str]] = PREDICTOR) -> str:
    """Which of ``parts`` a kernel of that name belongs to; `OTHER` where none fits."""
    fitting = (part for part, marks in parts.items() if any(mark in kernel for mark in marks))
    return next(fitting, OTHER)


def split(
    calls: Sequence[Sequence[tuple[str, float]]],
    parts: Mapping[str, Sequence[str]] = PREDICTOR,
) -> dict[str, float]:
    """ms of every part and of the rest, the median over calls of (kernel name, ms) each."""
    sums = {part: [0.0] * len(calls) for part in (*parts, OTHER)}
    for place, call in enumerate(calls):
        for name, ms in call:
            sums[part_of(name, parts)][place] += ms
    return {f"{part}_ms": statistics.median(spent) for part, spent in sums.items()}


def profiled(
    bench: Bench, call: Callable[[], Any], parts: Mapping[str, Sequence[str]] = PREDICTOR
) -> dict[str, Any]:
    """`split` of the kernels of ``call``, or ``why_no_split``."""
    try:
        return split(bench.kernels(call), parts)
    except RuntimeError as error:
        return {"why_no_split": in_a_sentence(error)}
