"""95 % intervals of estimates from a sample: one proportion, two proportions, two means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy import stats

LEVEL = 0.95
Interval = tuple[float, float, float]  # (estimate, low, high)


def wilson(correct: int, n: int) -> tuple[float, float]:
    """Return Wilson's score interval (low, high) of a proportion (Wilson 1927), within [0, 1].

    Unlike the normal approximation, the interval has a width at 0 of n and n of n: 10 of 10 gives
    [0.72, 1].
    """
    if n <= 0 or not 0 <= correct <= n:
        raise ValueError(f"correct must be 0 to n, and n above 0, got correct={correct}, n={n}.")
    interval = stats.binomtest(correct, n).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def paired_difference(ours: Sequence[bool], base: Sequence[bool]) -> Interval:
    """Return the accuracy of ``ours`` minus that of ``base``, with an interval.

    Both contain the outcomes of the same n samples in order. The interval is Newcombe's for paired
    proportions (Newcombe 1998, Statistics in Medicine 17, 2635-2650, method 10): it joins the two
    Wilson intervals through the correlation of the outcomes. Its width stays sensible if the two
    always agree; Wald's interval has no width then.
    """
    n = len(ours)
    if n == 0 or n != len(base):
        raise ValueError(
            f"ours and base must have the same length above 0, got {n} and {len(base)}."
        )
    right, base_right = sum(map(bool, ours)), sum(map(bool, base))
    both = sum(bool(a and b) for a, b in zip(ours, base, strict=True))
    p, q = right / n, base_right / n
    (p_low, p_high), (q_low, q_high) = wilson(right, n), wilson(base_right, n)
    # both * neither - only ours * only base
    product = both * n - right * base_right
    if product > 0:  # the continuity correction of method 10
        product = max(product - n / 2, 0.0)
    margins = right * (n - right) * base_right * (n - base_right)
    phi = product / math.sqrt(margins) if margins else 0.0

    def joined(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    return p - q, p - q - joined(p - p_low, q_high - q), p - q + joined(p_high - p, q - q_low)


def compared_shares(
    right: Sequence[bool], pairs: Sequence[tuple[bool, bool]]
) -> dict[str, float | int]:
    """Return the share of right outcomes, and the difference to dense attention over ``pairs``.

    Args:
        right: outcomes.
        pairs: outcomes of both methods for the same questions.

    Returns:
        ``n, correct, share, low, high``; with pairs also ``delta, delta_low, delta_high`` and
        ``pairs``, their number.
    """
    low, high = wilson(sum(right), len(right))
    fields = {"n": len(right), "correct": sum(right), "share": fmean(right)}
    fields |= {"low": low, "high": high}
    if pairs:
        names = ("delta", "delta_low", "delta_high")
        fields |= zip(names, paired_difference(*zip(*pairs, strict=True)), strict=True)
        fields["pairs"] = len(pairs)
    return fields


def mean_of_intervals(parts: Sequence[Interval]) -> Interval:
    """Return the mean of independent estimates, each with its own interval.

    The squares of the distances to the edges are summed, as in `paired_difference` (MOVER; Zou and
    Donner 2008, Statistics in Medicine 27, 1693-1702).
    """
    mean, n = fmean(estimate for estimate, _, _ in parts), len(parts)
    below = math.hypot(*(estimate - low for estimate, low, _ in parts)) / n
    above = math.hypot(*(high - estimate for estimate, _, high in parts)) / n
    return mean, mean - below, mean + above


def mean_interval(ours: Sequence[float], base: Sequence[float], level: float = LEVEL) -> Interval:
    """Return Student's interval of the mean difference of pairs."""
    values = [one - other for one, other in zip(ours, base, strict=True)]
    mean, n = fmean(values), len(values)
    # not ttest_rel: pairs that never differ have an interval of width 0
    spread = float(stats.t.ppf((1 + level) / 2, n - 1)) * stdev(values) / math.sqrt(n)
    return mean, mean - spread, mean + spread
