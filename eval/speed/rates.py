"""Floating-point operations of attention, dense and under a plan, and the rates that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cab_hf.eval.experiment import Row
from cab_hf.eval.speed import dense
from cab_hf.plan import BlockPlan

# direction -> its floating-point operations over those of the forward pass: five products, not two
DIRECTIONS = {"forward": 1.0, "backward": 2.5}
# whose rate an engine's is held against: the fastest dense kernels known
RATED_AGAINST = {"forward": ("FA3",), "backward": ("FA4",)}


def counted(plan: BlockPlan, heads: int) -> dict[str, float]:
    """Density, and (query, key) pairs over all ``heads``: attended ones, and all of listed blocks.

    A listed block counts whole, masked pairs and all: that is what a kernel computes.
    """
    attended, causal = map(int, plan.pairs())
    listed = int(plan.full.counts.sum() + plan.partial.counts.sum())
    sharing = plan.shared_by(heads)
    return {
        "density": attended / causal,
        "attended_pairs": attended * sharing,
        "listed_pairs": listed * sharing * plan.query_block * plan.key_block,
    }


def flops(row: Row, pairs: float) -> float:
    """Floating-point operations of that many (query, key) pairs in the row's direction.

    Forward, a pair is a multiplication and an addition per channel, in each of two products.
    """
    return 4 * row["head_dim"] * pairs * DIRECTIONS[row["direction"]]


def dense_flops(row: Row) -> float:
    """The same for the causal half of all pairs."""
    return flops(row, row["batch"] * row["heads"] * row["length"] ** 2 / 2)


def rates(row: Row, alike: Sequence[Row]) -> dict[str, Any]:
    """TFLOP/s of the engines and dense kernels of ``row``, and whose its engines are compared with.

    ``alike`` has the head dim and direction of ``row``.
    """
    blocks, pairs = (
        {name: flops(row, row[counted]) / ms / 1e9 for name, ms in row["attend_ms"].items()}
        for counted in ("listed_pairs", "attended_pairs")
    )
    kernels = {name: dense_flops(row) / ms / 1e9 for name, ms in row["baselines"].items()}
    found = {"tflops": blocks | kernels, "tflops_pairs": pairs}
    rated = dense.compared(row, alike, preferred=RATED_AGAINST[row["direction"]])
    name, ms = rated["baseline"], rated["baseline_ms"]
    if name is None:
        return {**found, "rated_against": None, "rate_ratio": None}
    over = {engine: rate / (dense_flops(row) / ms / 1e9) for engine, rate in blocks.items()}
    return {**found, "rated_against": name, "rate_ratio": over}
