"""Measured break-even points between sparse and dense attention, by device type.

Prompts shorter than `CabConfig.min_length` have dense attention. By two measured rules, some longer
prompts have dense attention too:

* `has_enough_queries`: dense attention is faster for a prompt with few queries after a long cache,
  such as a question about a document. The reason is that selection scores all cached keys.
* `min_length_for`: dense attention is faster for short prompts of layers with few heads, where
  launching the kernels of sparse attention takes longer than the dense computation.

The file break_even.json contains the measured points. `python -m cab_hf.eval.break_even` measures
the points of `has_enough_queries`, and `python -m cab_hf.eval.quickcheck` the point of
`min_length_for`.
"""

from __future__ import annotations

import json
from math import ceil, sqrt
from pathlib import Path

# file with the measured points
POINTS_FILE = Path(__file__).with_suffix(".json")
_MEASUREMENTS = json.loads(POINTS_FILE.read_text("utf-8"))
# device type -> pairs (keys, least queries for which sparse attention is not slower), in tokens,
# ascending by keys
BREAK_EVEN_POINTS: dict[str, tuple[tuple[int, int], ...]] = {
    device: tuple((num_keys, num_queries) for num_keys, num_queries in measurements["points"])
    for device, measurements in _MEASUREMENTS.items()
}
# device type -> (channels of all query heads, least tokens) of a measured layer with few heads
FEW_HEADS_POINTS: dict[str, tuple[int, int]] = {
    device: (
        few_heads_point["heads"] * few_heads_point["head_dim"],
        few_heads_point["tokens"],
    )
    for device, measurements in _MEASUREMENTS.items()
    if (few_heads_point := measurements.get("few_heads"))
}


def has_enough_queries(q_length: int, kv_length: int, device_type: str) -> bool:
    """Return True if a prompt has enough queries for sparse attention to be as fast as dense.

    Args:
        q_length: queries of the prompt, in tokens.
        kv_length: keys, including the cache, in tokens.
        device_type: torch device type, such as "cuda".
    """
    return q_length >= min_queries_for(kv_length, device_type)


def min_queries_for(kv_length: int, device_type: str) -> int:
    """Return the least number of queries for which sparse attention is not slower than dense.

    The result is the number at the longest measured length up to ``kv_length``, or 0 if all
    measured lengths are longer.

    Args:
        kv_length: keys, including the cache, in tokens.
        device_type: torch device type, such as "cuda".
    """
    min_queries = 0
    for num_keys, num_queries in BREAK_EVEN_POINTS.get(device_type, ()):
        if num_keys <= kv_length:
            min_queries = num_queries
    return min_queries


def min_length_for(num_channels: int | None, device_type: str) -> int:
    """Return the least length for which sparse attention of a prompt is not slower than dense.

    The time of dense attention is proportional to num_channels * tokens**2, and the time of
    launches is constant. Thus the least length is that of the measured layer times
    ``sqrt(num_measured_channels / num_channels)``. Returns 0 if nothing was measured.

    Args:
        num_channels: channels of all query heads, H * D; None if unknown.
        device_type: torch device type, such as "cuda".
    """
    if num_channels is None or device_type not in FEW_HEADS_POINTS:
        return 0
    num_measured_channels, num_measured_tokens = FEW_HEADS_POINTS[device_type]
    return ceil(num_measured_tokens * sqrt(num_measured_channels / num_channels))
