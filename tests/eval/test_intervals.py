"""Confidence intervals, compared with hand calculations and tables."""

import math
from statistics import NormalDist, stdev

import pytest

from cab_hf.eval.intervals import (
    mean_difference,
    mean_of_intervals,
    paired_difference,
    wilson_interval,
)

Z_SQUARED = NormalDist().inv_cdf(0.975) ** 2
# half of the width of Wilson's interval for 5 of 10
WILSON_HALF_WIDTH = 0.263407


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        # [n / (n + z²), 1] if all answers are correct, and its mirror image if none is
        *((10, 10, 10 / (10 + Z_SQUARED), 1.0), (0, 10, 0.0, Z_SQUARED / (10 + Z_SQUARED))),
        *(
            (5, 10, 0.236593, 0.763407),
            (100, 100, 100 / (100 + Z_SQUARED), 1.0),
            (1, 1, 0.206549, 1.0),
        ),
    ],
)
def test_wilson_interval_by_hand(correct, n, low, high):
    assert wilson_interval(correct, n) == pytest.approx((low, high), abs=1e-6)


def compute_paired_difference(
    num_both, num_only_ours, num_only_base, num_neither, is_swapped=False
):
    """Return `paired_difference` of two methods, "ours" and "base", from numbers of questions.

    Args:
        num_both, num_neither: number of questions that both methods, or neither, answer correctly.
        num_only_ours, num_only_base: number of questions that only this method answers correctly.
        is_swapped: True for the difference base minus ours.
    """
    scores_of_ours = [1] * (num_both + num_only_ours) + [0] * (num_only_base + num_neither)
    scores_of_base = [1] * num_both + [0] * num_only_ours + [1] * num_only_base + [0] * num_neither
    return (
        paired_difference(scores_of_base, scores_of_ours)
        if is_swapped
        else paired_difference(scores_of_ours, scores_of_base)
    )


@pytest.mark.parametrize(
    ("num_both", "num_only_ours", "num_only_base", "num_neither", "difference", "low", "high"),
    [
        # both methods are always right: phi is undefined and counts as 0
        (10, 0, 0, 0, 0.0, -Z_SQUARED / (10 + Z_SQUARED), Z_SQUARED / (10 + Z_SQUARED)),
        # the methods always agree: phi = (25 - 10 / 2) / 25 = 0.8; width² is half² (1 + 1 - 1.6)
        (5, 0, 0, 5, 0.0, -WILSON_HALF_WIDTH * math.sqrt(0.4), WILSON_HALF_WIDTH * math.sqrt(0.4)),
        # the methods never agree: phi = -25 / 25, and the half widths add up
        (0, 5, 5, 0, 0.0, -2 * WILSON_HALF_WIDTH, 2 * WILSON_HALF_WIDTH),
        # only our method is right: the difference is 1 - 0
        (0, 10, 0, 0, 1.0, 1 - math.sqrt(2) * Z_SQUARED / (10 + Z_SQUARED), 1.0),
    ],
)
def test_paired_difference_by_hand(
    num_both, num_only_ours, num_only_base, num_neither, difference, low, high
):
    actual_difference = compute_paired_difference(
        num_both=num_both,
        num_only_ours=num_only_ours,
        num_only_base=num_only_base,
        num_neither=num_neither,
    )
    assert actual_difference == pytest.approx((difference, low, high), abs=2e-6)


def test_paired_difference_is_antisymmetric():
    outcome_counts = {"num_both": 11, "num_only_ours": 2, "num_only_base": 5, "num_neither": 3}
    difference, low, high = compute_paired_difference(**outcome_counts)
    assert compute_paired_difference(**outcome_counts, is_swapped=True) == pytest.approx(
        (-difference, -high, -low)
    )
    assert low < difference < high


def test_invalid_counts_and_unequal_pairs_raise():
    for correct, n in ((1, 0), (-1, 5), (6, 5)):
        with pytest.raises(ValueError, match="correct must be 0 to n"):
            wilson_interval(correct, n)
    with pytest.raises(ValueError, match="same length"):
        paired_difference([True], [True, False])


@pytest.mark.parametrize(
    ("level", "degrees_of_freedom", "quantile"),
    [
        # with 1 degree of freedom (Cauchy) the quantile is tan(pi / 2 * level)
        # with 2 degrees of freedom the quantile is level * sqrt(2 / (1 - level²))
        *((0.95, 1, math.tan(math.pi / 2 * 0.95)), (0.95, 2, 0.95 * math.sqrt(2 / (1 - 0.95**2)))),
        *((0.95, 3, 3.182446), (0.95, 19, 2.093024)),
        *((0.999, 20, 3.849516), (0.95, 2001, 1.961147)),
    ],
)
def test_student_quantile_by_table(level, degrees_of_freedom, quantile):
    samples = [float(i) for i in range(degrees_of_freedom + 1)]
    mean, low, high = mean_difference(samples, [0.0] * len(samples), level)
    standard_error = stdev(samples) / math.sqrt(len(samples))
    assert (mean - low) / standard_error == pytest.approx(quantile, abs=2e-5)
    assert high - mean == pytest.approx(mean - low)


def test_paired_mean_and_mean_of_intervals_by_hand():
    # differences 0, 0.1, 0.2: mean 0.1, deviation 0.1, t(0.95, 2) = 4.302653
    half_width = 4.302653 * 0.1 / math.sqrt(3)
    actual = mean_difference([0.5, 0.6, 0.9], [0.5, 0.5, 0.7], 0.95)
    assert actual == pytest.approx((0.1, 0.1 - half_width, 0.1 + half_width), abs=1e-5)
    # if all differences are equal, the interval has width 0
    assert mean_difference([0.5, 0.25], [0.25, 0.0]) == (0.25, 0.25, 0.25)
    first_interval, second_interval = (0.5, 0.4, 0.7), (0.1, 0.0, 0.5)
    assert mean_of_intervals([first_interval]) == pytest.approx(first_interval)
    width_below, width_above = math.sqrt(0.1**2 + 0.1**2) / 2, math.sqrt(0.2**2 + 0.4**2) / 2
    assert mean_of_intervals([first_interval, second_interval]) == pytest.approx(
        (0.3, 0.3 - width_below, 0.3 + width_above)
    )
