"""Top-k thresholds of a row of scores, found by bisection instead of a sort.

A bracket (low, high] of scores contains the threshold. Each round reads the row from the L1 or L2
cache, counts the scores above the middle of the bracket, and continues with the half of the bracket
that contains the threshold.

In the first `EVEN_ROUNDS` rounds, the middle is the mean of low and high. In later rounds, half of
the float32 numbers of the bracket are below the middle. There are 2^32 float32 numbers, so at most
32 more rounds follow. Among equal scores, the lower index comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

# number of rounds whose middle is the mean of low and high; evenly distributed scores need about
# log2(row length) rounds
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
    """Return a float32 number that is slightly less than ``x``.

    The result is two steps below ``x`` in the order of `_ordered`, because one step below 0 is -0,
    which equals 0.
    """
    return _unordered(_ordered(x) - 2)


@triton.jit
def _between(low, high):
    """Return the float32 number in the middle of all float32 numbers from ``low`` to ``high``.

    Returns ``low`` if no float32 number lies between ``low`` and ``high``.
    """
    low = _ordered(low)
    high = _ordered(high)
    return _unordered((low & high) + ((low ^ high) >> 1))


@triton.jit
def _next_middle(low, high, rounds):
    """Return the middle of the bracket (low, high] for the next round.

    The middle is the mean of ``low`` and ``high`` in the first `EVEN_ROUNDS` rounds, then
    `_between`. The middle is ``low`` if no float32 number lies between ``low`` and ``high``.
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
    """Return the thresholds with which `is_kept` selects the ``count`` largest entries of a row.

    The definition of the selection is `reference.top_blocks`.

    Args:
        values: Pointer to a row of float32 scores. Columns [begin, end) are read in whole chunks,
            and columns that are no candidates contain -inf.
        low: A number below the scores of all candidates.
        high: The largest score of a candidate.
        total: Number of candidates.
        count: Number of entries to select. Nothing is selected if ``count`` is at most 0.
        begin, end: The first column, and the column after the last.

    Returns:
        low, high: Entries above ``high`` are selected. Entries in (low, high] are selected up to
            ``last_column``. If only some entries in (low, high] are selected, all are equal.
        last_column: The last column where an entry in (low, high] is selected.
    """
    wanted = tl.minimum(count, total).to(tl.float32)
    # invariant: at least `wanted` entries are above `low`, and fewer than `wanted` above `high`
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
        # all entries in (low, high] equal `high`, and are more than needed: select the first ones
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
