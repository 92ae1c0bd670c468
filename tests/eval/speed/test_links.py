"""The cost model of context parallelism, against values computed by hand."""

import pytest
from shards import BLOCK

from cab_hf.distributed.layout import Layout, layout_of
from cab_hf.eval.speed import links
from cab_hf.eval.speed.links import BOTH, FORWARD, Alone, Link, Text
from cab_hf.eval.speed.schemes import Contiguous

# a second before anything arrives, then two bytes a second
SLOW = Link(1.0, 2.0)
# four ranks of two tokens, each of one byte of K and V a head
TEXT = Text(tokens=8, world=4, held=2, token_bytes=1, slices=(1, 1))
# 6 and 12 seconds on four ranks, 1.5 and 3 for each of two slices
ALONE = Alone(12.0, 24.0)


def test_a_fit_finds_the_line():
    points = [(x, 3.0 + x / 4) for x in (0.0, 8.0, 100.0)]
    link = links.fitted(points)
    assert (link.latency, link.rate) == (pytest.approx(3.0), pytest.approx(4.0))
    assert link.seconds(40) == pytest.approx(13.0)


def test_a_fit_errs_relatively():
    # the line through the short ones: a second off in a thousand says nothing of microseconds
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (1000.0, 1011.0)]
    link = links.fitted(points)
    assert link.latency == pytest.approx(1.0, abs=0.02) and link.rate == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param([(1.0, 2.0), (2.0, 1.0)], id="falling"),
        pytest.param([(1.0, 2.0), (1.0, 3.0)], id="one size"),
    ],
)
def test_what_is_no_link(points):
    assert links.fitted(points) is None


def test_no_latency_is_below_zero():
    # through both it would be -0.5; of (1, 1) and (3, 4), weighed by 1 and 1 / 16:
    link = links.fitted([(1.0, 1.0), (3.0, 4.0)])
    assert link.latency == 0
    assert link.rate == pytest.approx((1 + 9 / 16) / (1 + 12 / 16))


def test_the_slowest_hop_decides():
    assert Link(1.0, 400.0).at_most(50.0) == Link(1.0, 50.0)
    assert Link(1.0, 25.0).at_most(50.0) == Link(1.0, 25.0)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize(("scheme", "kind"), [("grouped", Layout), ("contiguous", Contiguous)])
def test_the_share_of_the_slowest_rank_is_counted_pairs(world, scheme, kind):
    tokens = 2 * world * BLOCK
    layout = layout_of((tokens,), world, BLOCK, kind)
    # a query at position p has p + 1 causal pairs
    pairs = (layout.offsets + 1).sum(1)
    share = links.slowest_share(scheme, tokens, world)
    assert share == pytest.approx(int(pairs.max()) / int(pairs.sum()), rel=1e-12)


def test_contiguous_is_nearly_twice_as_slow_as_the_mean():
    # 2 ranks of 2 tokens: 1 + 2 and 3 + 4 pairs
    assert links.slowest_share("contiguous", 4, 2) == pytest.approx(0.7)
    assert 8 * links.slowest_share("contiguous", 1 << 20, 8) == pytest.approx(15 / 8, abs=1e-5)
    assert links.slowest_share("grouped", 4, 2) == links.slowest_share("ring", 4, 2) == 0.5


def test_bytes_by_hand():
    # two tokens of a byte, from three others
    assert TEXT.received(1) == 6 and TEXT.hop(2) == 4
    assert TEXT.received(TEXT.heads) == 12


def test_the_first_slice_is_waited_for_and_the_others_are_beside():
    # arrives 2; 5 beside 4; 1 beside 3; 7 beside nothing
    assert links.forward_pass([5.0, 1.0, 7.0], [2.0, 4.0, 3.0]) == 2 + 5 + 3 + 7


def test_gradients_go_home_beside_the_slice_before():
    # the last slice arrives 3; 7 beside a gather of 4; 1 beside gradients 30 and a gather of 2;
    # 50 beside gradients 20; those of the first take 10
    actual = links.backward_pass([50.0, 1.0, 7.0], [2.0, 4.0, 3.0], [10.0, 20.0, 30.0])
    assert actual == 3 + 7 + 32 + 50 + 10


def test_a_ring_passes_beside_each_step_but_the_last():
    # four steps of 3, three hops of 5
    assert links.ring(12.0, None, 4, 5.0) == 3 * 5 + 3
    assert links.ring(12.0, None, 4, 2.0) == 4 * 3
    # backward: four steps of 6 and every hop
    assert links.ring(12.0, 24.0, 4, 2.0) == 12 + 24 + 3 * 2


@pytest.mark.parametrize(
    ("scheme", "direction", "seconds"),
    [
        # 6 bytes a slice are 1 + 3 seconds; forward 12 / 4 in two slices
        pytest.param("grouped", FORWARD, 4 + 4 + 1.5, id="grouped"),
        # backward 24 / 4 in two slices: gathers 4 and 4, gradients 5 and 5
        pytest.param("grouped", BOTH, 9.5 + 4 + max(3, 4) + max(3, 5) + 5, id="with backward"),
        pytest.param("two-launches", FORWARD, 9.5, id="two launches"),
        # the last rank has 7 + 8 of 36 pairs
        pytest.param("contiguous", FORWARD, 4 + 4 + 12 * 15 / 36 / 2, id="contiguous"),
        # hops of 4 bytes are 1 + 2 seconds, steps 12 / 16
        pytest.param("ring", FORWARD, 3 * 3 + 0.75, id="ring"),
        pytest.param("ring", BOTH, 9.75 + 6 + 3 * 3, id="ring with backward"),
    ],
)
def test_a_turn_by_hand(scheme, direction, seconds):
    scatter = Link(2.0, 2.0)
    actual = links.turn(scheme, direction, TEXT, ALONE, SLOW, scatter)
    assert actual == pytest.approx(seconds)


def test_what_every_rank_does_is_not_divided():
    free = Link(0.0, 1e18)
    alone = Alone(12.0, 24.0, undivided=4.0)
    assert links.turn("grouped", FORWARD, TEXT, alone, free, free) == pytest.approx(4 + 8 / 4)
    assert links.turn("grouped", BOTH, TEXT, alone, free, free) == pytest.approx(4 + 2 + 24 / 4)


def test_of_an_unknown_backward_pass_nothing_is_said():
    assert links.turn("grouped", BOTH, TEXT, Alone(12.0), SLOW, SLOW) is None
