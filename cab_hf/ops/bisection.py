"""Top-k thresholds of a row of scores, found by bisection instead of a sort.

A bracket (low, high] of scores contains the threshold. Each round reads the row from the cache,
counts the scores above the middle of the bracket, and keeps the half that contains the threshold.

The first `EVEN_ROUNDS` rounds halve the bracket by value. Later rounds halve the number of float32
numbers in the bracket. There are 2^32 float32 numbers, so at most 32 more rounds follow. Among
equal scores, the lower index comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

# rounds that halve a bracket by value; evenly spread scores need about log2(row length) rounds
EVEN_ROUNDS = tl.constexpr(20)


@triton.jit
def _ordered(x):
    """Return int32 numbers with the same order as the float32 numbers ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(order):
    """Return the float32 numbers that `_ordered` maps to ``order``."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def just_below(x):
    """Return a float32 number that is less than ``x``.

    The result is two representations below ``x``, because one representation below 0 is -0.
    """
    return _unordered(_ordered(x) - 2)


@triton.jit
def _between(low, high):
    """Return the float32 number halfway from ``low`` to ``high`` in the order of representations.

    Returns ``low`` if no number lies between ``low`` and ``high``.
    """
    low = _ordered(low)
    high = _ordered(high)
    return _unordered((low & high) + ((low ^ high) >> 1))


@triton.jit
def _next_middle(low, high, rounds):
    """Return the middle of the bracket (low, high], or ``low`` if no number is between.

    The middle is by value in the first `EVEN_ROUNDS` rounds, then by representation.
    """
    half_way = low + (high - low) * 0.5
    even = (rounds < EVEN_ROUNDS) & (half_way > low) & (half_way < high)
    return tl.where(even, half_way, _between(low, high))


@triton.jit
def _count_above(values, level, begin, end, CHUNK: tl.constexpr):
    """Return the number of entries above ``level`` in columns [begin, end) of ``values``.

    The count is float32, which is faster to sum than int32, and exact up to 2^24.
    """
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(begin, end, CHUNK):
        x = tl.load(values + start + tl.arange(0, CHUNK))
        total += tl.where(x > level, 1.0, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _column_of_tie(values, level, count, begin, end, CHUNK: tl.constexpr):
    """Return the column in [begin, end) of the ``count``-th entry that equals ``level``."""
    low = begin - 1
    high = end
    while low + 1 < high:
        middle = (low + high) // 2
        total = tl.zeros([CHUNK], tl.float32)
        for start in range(begin, middle + 1, CHUNK):
            column = start + tl.arange(0, CHUNK)
            x = tl.load(values + column)
            total += tl.where((x == level) & (column <= middle), 1.0, 0.0)
        enough = tl.sum(total, 0) >= count
        low = tl.where(enough, low, middle)
        high = tl.where(enough, middle, high)
    return high


@triton.jit
def threshold_by_count(values, low, high, total, count, begin, end, CHUNK: tl.constexpr):
    """Return (low, high, last_column), with which `is_kept` selects the ``count`` largest entries.

    The definition of the selection is `reference.top_blocks`.

    Args:
        values: Pointer to a row of float32 scores. Columns [begin, end) are read in whole chunks,
            and columns that are no candidates contain -inf.
        low: A number below all candidates.
        high: The largest candidate.
        total: Number of candidates.
        count: Number of entries to select. Nothing is selected if ``count`` is at most 0.
    """
    wanted = tl.minimum(count, total).to(tl.float32)
    # invariant: at least `wanted` entries are above `low`, and fewer are above `high`
    num_above_low = total.to(tl.float32)
    num_above_high = 0.0
    rounds = 0
    middle = _next_middle(low, high, rounds)
    while (count > 0) & (num_above_low > wanted) & (middle > low):
        num_above = _count_above(values, middle, begin, end, CHUNK=CHUNK)
        enough = num_above >= wanted
        low = tl.where(enough, middle, low)
        num_above_low = tl.where(enough, num_above, num_above_low)
        high = tl.where(enough, high, middle)
        num_above_high = tl.where(enough, num_above_high, num_above)
        rounds += 1
        middle = _next_middle(low, high, rounds)
    last_column = end
    if (count > 0) & (num_above_low > wanted):
        # several entries equal `high`: the first ones complete the count
        last_column = _column_of_tie(
            values, high, wanted - num_above_high, begin=begin, end=end, CHUNK=CHUNK
        )
    nothing = float("inf")
    return tl.where(count > 0, low, nothing), tl.where(count > 0, high, nothing), last_column


@triton.jit
def is_kept(x, column, low, high, last_column):
    """Return True for scores above ``high``, and for scores in (low, high] up to ``last_column``.

    Args:
        x: Scores of the columns ``column``.
        low, high, last_column: Results of `threshold_by_count`.
    """
    return (x > high) | ((x > low) & (column <= last_column))
