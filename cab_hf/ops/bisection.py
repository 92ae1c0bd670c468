"""Top-k thresholds of a row of scores, found by bisection instead of a sort.

A bracket (low, high] of scores contains the threshold. Each round reads the row from the L1 or L2
cache, counts the scores above the middle of the bracket, and continues with the half of the bracket
that contains the threshold.

In the first `MEAN_ROUNDS` rounds, the middle is the mean of low and high. In later rounds, half of
the float32 numbers of the bracket are below the middle. There are 2^32 float32 numbers, so at most
32 more rounds follow. Among equal scores, the lower index comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

# number of rounds whose middle is the mean of low and high; evenly distributed scores need about
# log2(row length) rounds
MEAN_ROUNDS = tl.constexpr(20)


@triton.jit
def _to_ordered_int(x):
    """Return int32 numbers with the same order as the float32 numbers ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_ordered_int(ordered_int):
    """Return the float32 numbers that `_to_ordered_int` maps to ``ordered_int``."""
    return (ordered_int ^ ((ordered_int >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def step_below(x):
    """Return a float32 number that is slightly less than ``x``.

    The result is two steps below ``x`` in the order of `_to_ordered_int`, because one step below 0
    is -0, which equals 0.
    """
    return _from_ordered_int(_to_ordered_int(x) - 2)


@triton.jit
def _middle_float(low, high):
    """Return the float32 number in the middle of all float32 numbers from ``low`` to ``high``.

    Returns ``low`` if no float32 number lies between ``low`` and ``high``.
    """
    low = _to_ordered_int(low)
    high = _to_ordered_int(high)
    return _from_ordered_int((low & high) + ((low ^ high) >> 1))


@triton.jit
def _next_middle(low, high, num_rounds):
    """Return the middle of the bracket (low, high] for the next round.

    The middle is the mean of ``low`` and ``high`` in the first `MEAN_ROUNDS` rounds, then
    `_middle_float`. The middle is ``low`` if no float32 number lies between ``low`` and ``high``.
    """
    mean = low + (high - low) * 0.5
    is_mean_inside = (num_rounds < MEAN_ROUNDS) & (mean > low) & (mean < high)
    return tl.where(is_mean_inside, mean, _middle_float(low, high))


@triton.jit
def _count_above(scores, threshold, begin, end, CHUNK: tl.constexpr):
    """Return the number of entries above ``threshold`` in columns [begin, end) of ``scores``.

    The count is float32, which is faster to sum than int32, and exact up to 2^24.
    """
    counts = tl.zeros([CHUNK], tl.float32)
    for start in range(begin, end, CHUNK):
        x = tl.load(scores + start + tl.arange(0, CHUNK))
        counts += tl.where(x > threshold, 1.0, 0.0)
    return tl.sum(counts, 0)


@triton.jit
def _find_tied_column(scores, tied_score, num_ties, begin, end, CHUNK: tl.constexpr):
    """Return the column in [begin, end) of the ``num_ties``-th entry that equals ``tied_score``."""
    low = begin - 1
    high = end
    while low + 1 < high:
        middle = (low + high) // 2
        counts = tl.zeros([CHUNK], tl.float32)
        for start in range(begin, middle + 1, CHUNK):
            column = start + tl.arange(0, CHUNK)
            x = tl.load(scores + column)
            counts += tl.where((x == tied_score) & (column <= middle), 1.0, 0.0)
        has_enough = tl.sum(counts, 0) >= num_ties
        low = tl.where(has_enough, low, middle)
        high = tl.where(has_enough, middle, high)
    return high


@triton.jit
def threshold_by_count(
    scores, low, high, num_candidates, num_selected, begin, end, CHUNK: tl.constexpr
):
    """Return the thresholds with which `is_selected` selects the largest entries of a row.

    The definition of the selection is `reference.top_blocks`.

    Args:
        scores: Pointer to a row of float32 scores. Columns [begin, end) are read in whole chunks,
            and columns that are no candidates contain -inf.
        low: A number below the scores of all candidates.
        high: The largest score of a candidate.
        num_candidates: Number of candidates.
        num_selected: Number of entries to select. Nothing is selected if ``num_selected`` is at
            most 0.
        begin, end: The first column, and the column after the last.

    Returns:
        low, high: Entries above ``high`` are selected. Entries in (low, high] are selected up to
            ``last_column``. If only some entries in (low, high] are selected, all are equal.
        last_column: The last column where an entry in (low, high] is selected.
    """
    num_to_select = tl.minimum(num_selected, num_candidates).to(tl.float32)
    # invariant: at least `num_to_select` entries are above `low`, and fewer above `high`
    num_above_low = num_candidates.to(tl.float32)
    num_above_high = 0.0
    num_rounds = 0
    middle = _next_middle(low, high, num_rounds)
    while (num_selected > 0) & (num_above_low > num_to_select) & (middle > low):
        num_above = _count_above(scores, middle, begin, end, CHUNK=CHUNK)
        has_enough = num_above >= num_to_select
        low = tl.where(has_enough, middle, low)
        num_above_low = tl.where(has_enough, num_above, num_above_low)
        high = tl.where(has_enough, high, middle)
        num_above_high = tl.where(has_enough, num_above_high, num_above)
        num_rounds += 1
        middle = _next_middle(low, high, num_rounds)
    last_column = end
    if (num_selected > 0) & (num_above_low > num_to_select):
        # all entries in (low, high] equal `high`, and are more than needed: select the first ones
        last_column = _find_tied_column(
            scores, high, num_to_select - num_above_high, begin=begin, end=end, CHUNK=CHUNK
        )
    no_score = float("inf")
    return (
        tl.where(num_selected > 0, low, no_score),
        tl.where(num_selected > 0, high, no_score),
        last_column,
    )


@triton.jit
def is_selected(x, column, low, high, last_column):
    """Return True for scores above ``high``, and for scores in (low, high] up to ``last_column``.

    Args:
        x: Scores of the columns ``column``.
        low, high, last_column: Results of `threshold_by_count`.
    """
    return (x > high) | ((x > low) & (column <= last_column))
