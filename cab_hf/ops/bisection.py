"""Top-k thresholds of a row of scores, found by bisection instead of a sort.

A bracket (low, high] of scores contains the threshold. Each round reads the row from the L1 or L2
cache, counts the scores above the middle of the bracket, and continues with the half of the bracket
that contains the threshold.

In the first `NUM_MEAN_ROUNDS` rounds, the middle is the mean of low and high. In later rounds, half
of the float32 numbers of the bracket are below the middle. There are 2^32 float32 numbers, so at
most 32 more rounds follow. Among equal scores, the lower index comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

# number of rounds whose middle is the mean of low and high; evenly distributed scores need about
# log2(row length) rounds
NUM_MEAN_ROUNDS = tl.constexpr(20)


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
def _middle_float(low_score, high_score):
    """Return the middle of all float32 numbers from ``low_score`` to ``high_score``.

    Returns ``low_score`` if no float32 number lies between ``low_score`` and ``high_score``.
    """
    low_score = _to_ordered_int(low_score)
    high_score = _to_ordered_int(high_score)
    return _from_ordered_int((low_score & high_score) + ((low_score ^ high_score) >> 1))


@triton.jit
def _next_middle(low_score, high_score, num_rounds):
    """Return the middle of the bracket (low_score, high_score] for the next round.

    The middle is the mean of ``low_score`` and ``high_score`` in the first `NUM_MEAN_ROUNDS`
    rounds, then `_middle_float`. The middle is ``low_score`` if no float32 number lies between
    ``low_score`` and ``high_score``.
    """
    mean_score = low_score + (high_score - low_score) * 0.5
    is_mean_inside = (
        (num_rounds < NUM_MEAN_ROUNDS) & (mean_score > low_score) & (mean_score < high_score)
    )
    return tl.where(is_mean_inside, mean_score, _middle_float(low_score, high_score))


@triton.jit
def _count_above(scores, threshold, first_column, end_column, SCORES_PER_CHUNK: tl.constexpr):
    """Return the number of entries of ``scores`` above ``threshold``.

    Only columns [first_column, end_column) count.

    The count is float32, which is faster to sum than int32, and exact up to 2^24.
    """
    counts_above = tl.zeros([SCORES_PER_CHUNK], tl.float32)
    for chunk_start in range(first_column, end_column, SCORES_PER_CHUNK):
        chunk_scores = tl.load(scores + chunk_start + tl.arange(0, SCORES_PER_CHUNK))
        counts_above += tl.where(chunk_scores > threshold, 1.0, 0.0)
    return tl.sum(counts_above, 0)


@triton.jit
def _find_tied_column(
    scores, tied_score, num_ties, first_column, end_column, SCORES_PER_CHUNK: tl.constexpr
):
    """Return the column of the ``num_ties``-th entry that equals ``tied_score``.

    Only columns [first_column, end_column) count.
    """
    low_column = first_column - 1
    high_column = end_column
    while low_column + 1 < high_column:
        middle_column = (low_column + high_column) // 2
        tie_counts = tl.zeros([SCORES_PER_CHUNK], tl.float32)
        for chunk_start in range(first_column, middle_column + 1, SCORES_PER_CHUNK):
            column = chunk_start + tl.arange(0, SCORES_PER_CHUNK)
            chunk_scores = tl.load(scores + column)
            tie_counts += tl.where(
                (chunk_scores == tied_score) & (column <= middle_column), 1.0, 0.0
            )
        has_enough_ties = tl.sum(tie_counts, 0) >= num_ties
        low_column = tl.where(has_enough_ties, low_column, middle_column)
        high_column = tl.where(has_enough_ties, middle_column, high_column)
    return high_column


@triton.jit
def threshold_by_count(
    scores,
    low_score,
    high_score,
    num_candidates,
    num_selected,
    first_column,
    end_column,
    SCORES_PER_CHUNK: tl.constexpr,
):
    """Return the thresholds with which `is_selected` selects the largest entries of a row.

    The definition of the selection is `reference.top_blocks`.

    Args:
        scores: Pointer to a row of float32 scores. Columns [first_column, end_column) are read in
            whole chunks, and columns that are no candidates contain -inf.
        low_score: A number below the scores of all candidates.
        high_score: The largest score of a candidate.
        num_candidates: Number of candidates.
        num_selected: Number of entries to select. Nothing is selected if ``num_selected`` is at
            most 0.
        first_column, end_column: The first column, and the column after the last.

    Returns:
        low_score, high_score: Entries above ``high_score`` are selected. Entries in (low_score,
            high_score] are selected up to ``last_column``. If only some entries in (low_score,
            high_score] are selected, all are equal.
        last_column: The last column where an entry in (low_score, high_score] is selected.
    """
    num_to_select = tl.minimum(num_selected, num_candidates).to(tl.float32)
    # invariant: at least `num_to_select` entries are above `low_score`, and fewer above
    # `high_score`
    num_above_low = num_candidates.to(tl.float32)
    num_above_high = 0.0
    num_rounds = 0
    middle_score = _next_middle(low_score, high_score, num_rounds)
    while (num_selected > 0) & (num_above_low > num_to_select) & (middle_score > low_score):
        num_above = _count_above(
            scores, middle_score, first_column, end_column, SCORES_PER_CHUNK=SCORES_PER_CHUNK
        )
        has_enough_above = num_above >= num_to_select
        low_score = tl.where(has_enough_above, middle_score, low_score)
        num_above_low = tl.where(has_enough_above, num_above, num_above_low)
        high_score = tl.where(has_enough_above, high_score, middle_score)
        num_above_high = tl.where(has_enough_above, num_above_high, num_above)
        num_rounds += 1
        middle_score = _next_middle(low_score, high_score, num_rounds)
    last_column = end_column
    if (num_selected > 0) & (num_above_low > num_to_select):
        # all entries in (low_score, high_score] equal `high_score`, and are more than needed:
        # select the first ones
        last_column = _find_tied_column(
            scores,
            high_score,
            num_to_select - num_above_high,
            first_column=first_column,
            end_column=end_column,
            SCORES_PER_CHUNK=SCORES_PER_CHUNK,
        )
    unreachable_score = float("inf")
    return (
        tl.where(num_selected > 0, low_score, unreachable_score),
        tl.where(num_selected > 0, high_score, unreachable_score),
        last_column,
    )


@triton.jit
def is_selected(scores, columns, low_score, high_score, last_column):
    """Return True for scores that `threshold_by_count` selects.

    Scores above ``high_score`` are selected, and scores in (low_score, high_score] up to
    ``last_column``.

    Args:
        scores: Scores of the columns ``columns``.
        low_score, high_score, last_column: Results of `threshold_by_count`.
    """
    return (scores > high_score) | ((scores > low_score) & (columns <= last_column))
