"""Thresholds of a row of scores, found by bisection: no sort, no memory beside the row itself.

A bracket of scores holds the threshold. Each round cuts it in two and walks the row, which stays in
the cache, to count or sum what lies above the cut; the half that holds the threshold is kept. Cuts
go halfway by value at first, and after `EVEN_ROUNDS` halfway in the order of float32, of which
there are 2^32: bisection ends after 32 of those however scores are spread. Ties go to the lower
index.
"""

from __future__ import annotations

import triton
import triton.language as tl

# halvings of a bracket of scores by value before halving by representation, which always ends
EVEN_ROUNDS = tl.constexpr(20)


@triton.jit
def _ordered(x):
    """int32 that compare as the float32 do."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(order):
    """The float32 that `_ordered` makes ``order`` of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def just_below(x):
    """A float32 below ``x``: two steps, since one step below 0 is -0, which is not below."""
    return _unordered(_ordered(x) - 2)


@triton.jit
def _between(low, high):
    """A float32 in [low, high), halfway in the order of float32; ``low`` when there is no other."""
    low = _ordered(low)
    high = _ordered(high)
    return _unordered((low & high) + ((low ^ high) >> 1))


@triton.jit
def _next_middle(low, high, rounds):
    """Where to cut a bracket of scores; ``low`` when nothing lies inside.

    Scores lie evenly, until they do not: then by representation, which always ends.
    """
    half_way = low + (high - low) * 0.5
    even = (rounds < EVEN_ROUNDS) & (half_way > low) & (half_way < high)
    return tl.where(even, half_way, _between(low, high))


@triton.jit
def _count_above(values, level, begin, end, CHUNK: tl.constexpr):
    """How many entries are above ``level``: a float32, which sums faster and is exact to 2^24."""
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(begin, end, CHUNK):
        x = tl.load(values + start + tl.arange(0, CHUNK))
        total += tl.where(x > level, 1.0, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _cut(values, level, count, begin, end, CHUNK: tl.constexpr):
    """The column of the ``count``-th entry that equals ``level``."""
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
    """(low, high, cut) of the ``count`` largest of ``total`` entries: `reference.top_blocks`.

    ``low`` lies below all of them, ``high`` is the largest. What `is_kept` keeps is the answer.
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
    """Above the bracket, or in it and not right of the cut, which parts what is equal."""
    return (x > high) | ((x > low) & (column <= cut))
