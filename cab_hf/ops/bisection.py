"""Thresholds of a row of scores, found by bisection: no sort, and no memory except the row.

A bracket of scores contains the threshold. Each round cuts the bracket in two. It reads the row,
which stays in the cache, and counts the scores above the cut. The half that contains the threshold
becomes the new bracket.

The first `EVEN_ROUNDS` cuts bisect the value. Later cuts bisect the order of float32, which has
2^32 numbers, so that bisection ends after 32 more rounds. Ties go to the lower index.
"""

from __future__ import annotations

import triton
import triton.language as tl

# halvings of a bracket by value, before halving by representation, which always ends
EVEN_ROUNDS = tl.constexpr(20)


@triton.jit
def _ordered(x):
    """Return int32 numbers that compare as the float32 numbers do."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(order):
    """Return the float32 number whose `_ordered` is ``order``."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def just_below(x):
    """Return a float32 number below ``x``: two steps, because one step below 0 is -0."""
    return _unordered(_ordered(x) - 2)


@triton.jit
def _between(low, high):
    """Return the middle of [low, high) in the order of float32; ``low`` if nothing is between."""
    low = _ordered(low)
    high = _ordered(high)
    return _unordered((low & high) + ((low ^ high) >> 1))


@triton.jit
def _next_middle(low, high, rounds):
    """Return the next cut of a bracket of scores, or ``low`` if nothing is inside.

    The cut bisects values first, which suits evenly spread scores. After `EVEN_ROUNDS` it bisects
    representations, which always ends.
    """
    half_way = low + (high - low) * 0.5
    even = (rounds < EVEN_ROUNDS) & (half_way > low) & (half_way < high)
    return tl.where(even, half_way, _between(low, high))


@triton.jit
def _count_above(values, level, begin, end, CHUNK: tl.constexpr):
    """Return the number of entries above ``level``, as float32: faster sums, exact up to 2^24."""
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(begin, end, CHUNK):
        x = tl.load(values + start + tl.arange(0, CHUNK))
        total += tl.where(x > level, 1.0, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _cut(values, level, count, begin, end, CHUNK: tl.constexpr):
    """Return the column of the ``count``-th entry that equals ``level``."""
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
    """Return (low, high, cut) of the ``count`` largest entries; see `reference.top_blocks`.

    `is_kept` selects these entries. ``total`` is the number of entries. On entry, ``low`` is below
    all entries and ``high`` is the largest entry.
    """
    wanted = tl.minimum(count, total).to(tl.float32)
    # at least `wanted` entries are > low, fewer are > high
    at_low = total.to(tl.float32)
    at_high = 0.0
    rounds = 0
    middle = _next_middle(low, high, rounds)
    while (count > 0) & (at_low > wanted) & (middle > low):
        here = _count_above(values, middle, begin, end, CHUNK)
        enough = here >= wanted
        low = tl.where(enough, middle, low)
        at_low = tl.where(enough, here, at_low)
        high = tl.where(enough, high, middle)
        at_high = tl.where(enough, at_high, here)
        rounds += 1
        middle = _next_middle(low, high, rounds)
    cut = end
    if (count > 0) & (at_low > wanted):
        cut = _cut(values, high, wanted - at_high, begin, end, CHUNK)
    nothing = float("inf")
    return tl.where(count > 0, low, nothing), tl.where(count > 0, high, nothing), cut


@triton.jit
def is_kept(x, column, low, high, cut):
    """Return True above the bracket, and for entries of the bracket up to column ``cut``."""
    return (x > high) | ((x > low) & (column <= cut))
