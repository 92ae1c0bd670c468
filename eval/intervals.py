"""95 % confidence intervals of a proportion, of a difference of proportions, and of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy import stats

CONFIDENCE_LEVEL = 0.95
Interval = tuple[float, float, float]  # (estimate, low, high)


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """Return Wilson's score interval (low, high) of a proportion (Wilson 1927), within [0, 1].

    Unlike the interval of the normal approximation, Wilson's interval is wider than 0 for 0 of n
    and n of n: for 10 of 10 it is [0.72, 1].
    """
    if n <= 0 or not 0 <= correct <= n:
        raise ValueError(f"correct must be 0 to n, and n above 0, got correct={correct}, n={n}.")
    interval = stats.binomtest(correct, n).proportion_ci(CONFIDENCE_LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def paired_difference(our_outcomes: Sequence[bool], base_outcomes: Sequence[bool]) -> Interval:
    """Return the accuracy of ``our_outcomes`` minus that of ``base_outcomes``, with an interval.

    The interval is Newcombe's for paired proportions (Newcombe 1998, Statistics in Medicine 17,
    2635-2650, method 10), which combines the two Wilson intervals and the correlation of the
    outcomes. Unlike Wald's interval, Newcombe's is wider than 0 if all paired outcomes agree.

    Args:
        our_outcomes, base_outcomes: outcomes of two methods for the same questions, in the same
            order.
    """
    n = len(our_outcomes)
    if n == 0 or n != len(base_outcomes):
        raise ValueError(
            f"our_outcomes and base_outcomes must have the same length above 0, got {n} and "
            f"{len(base_outcomes)}."
        )
    num_right, num_base_right = sum(map(bool, our_outcomes)), sum(map(bool, base_outcomes))
    num_both_right = sum(bool(a and b) for a, b in zip(our_outcomes, base_outcomes, strict=True))
    p_ours, p_base = num_right / n, num_base_right / n
    (ours_low, ours_high), (base_low, base_high) = (
        wilson_interval(num_right, n),
        wilson_interval(num_base_right, n),
    )
    # the determinant of the 2 x 2 table: both right * both wrong - only ours * only base
    determinant = num_both_right * n - num_right * num_base_right
    if determinant > 0:  # the continuity correction of method 10
        determinant = max(determinant - n / 2, 0.0)
    margins = num_right * (n - num_right) * num_base_right * (n - num_base_right)
    phi = determinant / math.sqrt(margins) if margins else 0.0

    def correlated_distance(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    low = p_ours - p_base - correlated_distance(p_ours - ours_low, base_high - p_base)
    return (
        p_ours - p_base,
        low,
        p_ours - p_base + correlated_distance(ours_high - p_ours, p_base - base_low),
    )


def compare_shares(
    outcomes: Sequence[bool], pairs: Sequence[tuple[bool, bool]]
) -> dict[str, float | int]:
    """Return the share of right answers, and its difference to dense attention, with intervals.

    Args:
        outcomes: for each question, True if the method's answer is right.
        pairs: (outcome of the method, outcome of dense attention) for each question that both
            answered.

    Returns:
        ``n, correct, share, low, high``; if there are pairs also ``delta, delta_low, delta_high``,
        and ``pairs``, the number of pairs.
    """
    low, high = wilson_interval(sum(outcomes), len(outcomes))
    fields = {"n": len(outcomes), "correct": sum(outcomes), "share": fmean(outcomes)}
    fields |= {"low": low, "high": high}
    if pairs:
        delta, delta_low, delta_high = paired_difference(
            [our_outcome for our_outcome, _ in pairs], [dense_outcome for _, dense_outcome in pairs]
        )
        fields |= {"delta": delta, "delta_low": delta_low, "delta_high": delta_high}
        fields["pairs"] = len(pairs)
    return fields


def mean_of_intervals(intervals: Sequence[Interval]) -> Interval:
    """Return the mean of independent estimates with intervals, and the interval of the mean.

    The distances from the estimates to the ends of their intervals are added in quadrature (MOVER;
    Zou and Donner 2008, Statistics in Medicine 27, 1693-1702).
    """
    mean, n = fmean(estimate for estimate, _, _ in intervals), len(intervals)
    distance_below = math.hypot(*(estimate - low for estimate, low, _ in intervals)) / n
    distance_above = math.hypot(*(high - estimate for estimate, _, high in intervals)) / n
    return mean, mean - distance_below, mean + distance_above


def mean_difference(
    our_values: Sequence[float], base_values: Sequence[float], level: float = CONFIDENCE_LEVEL
) -> Interval:
    """Return the mean of ``our_values[i] - base_values[i]`` with Student's interval.

    Args:
        our_values, base_values: paired values, at least two.
        level: confidence level of the interval.
    """
    differences = [
        our_value - base_value
        for our_value, base_value in zip(our_values, base_values, strict=True)
    ]
    mean, n = fmean(differences), len(differences)
    # scipy's ttest_rel returns NaN for equal differences; here the interval has width 0
    margin = float(stats.t.ppf((1 + level) / 2, n - 1)) * stdev(differences) / math.sqrt(n)
    return mean, mean - margin, mean + margin
