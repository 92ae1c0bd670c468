"""Which layers decide for which: the dynamic program, maps of heads, and what is measured."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from tiny import SMALL, qkv

from cab_hf import CabConfig
from cab_hf.calibration.anchors import (
    SHARES,
    Coverage,
    as_options,
    assign_anchors,
    best_anchors,
    best_at,
    cascaded,
    gains,
    kept_between,
    similarity,
    utility,
    viewed,
    within,
)
from cab_hf.calibration.budgets import Needles, tables
from cab_hf.plan import Spans
from cab_hf.predictors import LayerContext, make_predictor

LENGTH = 400
NEEDLES = Needles(torch.tensor([140, 150]), torch.tensor([40, 90]), torch.tensor([44, 94]))


def total_of(value, anchors):
    return sum(value[max(a for a in anchors if a <= b)][b] for b in range(len(value)))


@pytest.mark.parametrize("layers", range(1, 11))
def test_the_dynamic_program_finds_what_trying_all_finds(layers):
    for seed in range(5):
        torch.manual_seed(seed)
        value = torch.randn(layers, layers).double().tolist()
        for count in range(1, layers + 1):
            actual = best_anchors(value, count)
            assert len(actual) == count and actual[0] == 0 and list(actual) == sorted(set(actual))
            others = combinations(range(1, layers), count - 1)
            best = max(total_of(value, (0, *some)) for some in others)
            assert total_of(value, actual) == pytest.approx(best, abs=1e-12)


def test_anchors_by_hand():
    # layers 0 and 1 are alike, and so are 2 and 3
    value = [[1, 0.9, 0.1, 0.1], [0, 1, 0.2, 0.2], [0, 0, 1, 0.9], [0, 0, 0, 1]]
    assert best_anchors(value, 1) == (0,)
    assert best_anchors(value, 2) == (0, 2)
    # of two that are worth the same the first
    assert best_anchors([[1.0] * 4] * 4, 3) == (0, 1, 2)


@pytest.mark.parametrize("count", [0, 5])
def test_more_anchors_than_layers_are_refused(count):
    with pytest.raises(ValueError, match=f"anchors is {count}; it must be 1 to 4"):
        best_anchors([[1.0] * 4] * 4, count)


def kept_at(config, layers, shares, importance=None):
    """`Coverage` at each share, of layers of q and k [1, H, N, D] each."""
    spans, config = Spans.causal(1, LENGTH, LENGTH, "cpu"), replace(config, dense_tail_blocks=0)
    views = [
        viewed(q, k, LayerContext(spans, 0.25, layer), config, shares, NEEDLES)
        for layer, (q, k) in enumerate(layers)
    ]
    weights = importance or [1.0] * len(layers)
    return [kept_between(some, weights) for some in zip(*views, strict=True)]


def loud(seed, heads=4):
    q, k, _ = qkv(q_length=LENGTH, heads=heads, kv_heads=heads, seed=seed)
    return 3 * q, 3 * k


@pytest.mark.parametrize("exact_queries", [0, 4])
def test_a_planted_permutation_of_heads_is_recovered(exact_queries):
    config = replace(SMALL, exact_queries=exact_queries)
    q, k = loud(0)
    # tokens of a block are alike, so that the estimate is as good as the truth
    q, k = (
        x[:, :, ::size].repeat_interleave(size, 2)[:, :, :LENGTH] for x, size in ((q, 32), (k, 16))
    )
    order = [2, 0, 3, 1]
    kept = kept_at(config, [(q, k), (q[:, order], k[:, order])], SHARES)
    at = kept[4]
    assert assign_anchors(utility([at], 0.0), (0,)).sources.tolist() == [[0, 1, 2, 3], order]
    # and nothing is lost by it
    mass, _ = similarity(at, gains(at))
    torch.testing.assert_close(mass[0], mass[0, :1].expand(2))
    assert cascaded(config, kept, (0, 1), 2, 1, 0.5).head_map[1] == tuple(order)


def test_what_is_kept_by_hand():
    (q, k), (other_q, other_k) = loud(0, heads=2), loud(1, heads=2)
    (kept,) = kept_at(SMALL, [(q, k), (other_q, other_k)], [0.4])
    config, options = as_options(replace(SMALL, dense_tail_blocks=0), [0.4])
    config = replace(config, **tables(options, torch.zeros(1, 2, dtype=torch.int64)))
    spans = Spans.causal(1, LENGTH, LENGTH, "cpu")
    plan = make_predictor(config)(q, k, LayerContext(spans, 0.25, 0))
    tokens = plan.token_mask()[0, 1]
    logits = other_q[0, 0] @ other_k[0, 0].T * 0.25
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    shares = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    # head 1 of layer 0 for head 0 of layer 1
    meant = (shares * tokens).sum(-1).mean()
    assert float(kept.mass[0, 1, 1, 0]) == pytest.approx(float(meant), abs=1e-5)
    actual = [(shares * tokens)[140, 40:44].sum(), (shares * tokens)[150, 90:94].sum()]
    assert float(kept.needle[0, 1, 1, 0]) == pytest.approx(float(sum(actual) / 2), abs=1e-6)
    listed = sum(part.counts[0, 1].sum() for part in (plan.full, plan.partial))
    # 13 rows of 32 queries over key blocks of 16
    blocks = sum(range(2, 26, 2)) + 25
    assert float(kept.density[0, 1]) == pytest.approx(float(listed) / blocks)
    needed = (shares[140, 40:44].sum() + shares[150, 90:94].sum()) / 2
    assert float(kept.needed[1, 0]) == pytest.approx(float(needed), abs=1e-6)


def test_a_full_share_keeps_everything():
    (kept,) = kept_at(SMALL, [loud(0), loud(1)], [1.0], [0.5, 0.25])
    torch.testing.assert_close(kept.mass, torch.ones(2, 2, 4, 4, dtype=torch.float64))
    mass, needle = similarity(kept, gains(kept))
    torch.testing.assert_close(mass, torch.ones(2, 2, dtype=torch.float64))
    torch.testing.assert_close(needle, torch.ones(2, 2, dtype=torch.float64))


def sample_of(mass, density, needle=None, importance=None):
    """A `Coverage` of [L, L, P, P] and [L, P]."""
    layers, heads = mass.shape[1:3]
    needle = torch.zeros_like(mass) if needle is None else needle
    weights = torch.tensor(importance or [1.0] * layers).double()
    return Coverage(mass, needle, torch.ones(layers, heads).double(), density, weights)


def test_what_layers_change_weighs():
    """Layer 2 is like neither; whether it decides is a matter of how much layers 1 and 2 do."""
    mass = torch.ones(3, 3, 1, 1, dtype=torch.float64)
    mass[0, 1], mass[0, 2], mass[1, 2] = 0.5, 0.6, 0.55
    nothing = torch.zeros(3, 1, dtype=torch.float64)

    def anchors(*importance):
        return best_at([sample_of(mass, nothing, importance=importance)], 2, 0.0).anchors

    assert anchors(1.0, 1.0, 0.1) == (0, 1)
    assert anchors(1.0, 0.1, 1.0) == (0, 2)


def test_heads_and_shares_by_hand():
    """Head 1 of layer 0 keeps more with more blocks, head 0 and those of layer 1 do not."""
    few = torch.tensor([[[0.9, 0.1], [0.95, 0.5]], [[0.9, 0.2], [0.4, 0.9]]]).double()
    much = torch.tensor([[[0.9, 0.1], [0.95, 0.9]], [[0.9, 0.2], [0.8, 0.9]]]).double()
    # [a, b, head of a, head of b]; a layer that chooses has its own blocks, whatever others keep
    mass = [torch.stack([each, each.flip(1)]) for each in (few, much)]
    density = [torch.full((2, 2), share).double() for share in (0.1, 0.4)]
    kept = [sample_of(*both) for both in zip(mass, density, strict=True)]
    # .4 more for one head, at .3 more of two that have these blocks
    for multiplier, options in ((0.0, [0, 1]), (0.66, [0, 1]), (0.67, [0, 0])):
        actual = assign_anchors(utility(kept, multiplier), (0,))
        assert actual.of_layer == (0, 0) and actual.sources[0].tolist() == [0, 1]
        assert actual.options[0].tolist() == options
    kept_mass = assign_anchors(utility(kept, 0.0), (0,)).of(torch.stack(mass))
    torch.testing.assert_close(kept_mass[0], torch.tensor([0.9, 0.9]).double())


def test_an_allotment_is_the_best_that_one_change_comes_to():
    torch.manual_seed(0)
    mass = torch.rand(3, 4, 4, 3, 3).double().cumsum(0) / 3
    density = torch.tensor([0.1, 0.2, 0.5]).double()[:, None, None].expand(3, 4, 3)
    kept = [sample_of(*both) for both in zip(mass, density, strict=True)]
    actual = assign_anchors(utility(kept, 0.8), (0, 2))

    def worth(sources, options):
        each = actual._replace(sources=sources, options=options)
        return float((each.of(mass) - 0.8 * each.of(density)).sum())

    best = worth(actual.sources, actual.options)
    for layer, head, source in ((i, j, k) for i in (1, 3) for j in range(3) for k in range(3)):
        sources, options = actual.sources.clone(), actual.options.clone()
        anchor = actual.of_layer[layer]
        sources[layer, head], options[layer, head] = source, actual.options[anchor, source]
        assert worth(sources, options) <= best + 1e-9
    for anchor, head, option in ((i, j, k) for i in (0, 2) for j in range(3) for k in range(3)):
        options = actual.options.clone()
        for layer in (i for i in range(4) if actual.of_layer[i] == anchor):
            options[layer][actual.sources[layer] == head] = option
        assert worth(actual.sources, options) <= best + 1e-9


@pytest.mark.parametrize("target", [0.38, 0.42, 0.5])
def test_the_target_is_met_by_heads_that_differ(target):
    kept = kept_at(SMALL, [loud(0), loud(1), loud(2)], SHARES)
    actual = within(kept, 2, target)
    density = float(actual.of(torch.stack([each.density for each in kept])).mean())
    assert target - 0.05 < density <= target
    assert len(set(actual.options.flatten().tolist())) > 1
    # it keeps more than the largest even share that costs no more
    costs = [float(each.density.mean()) for each in kept]
    at = max(i for i, cost in enumerate(costs) if cost <= density)
    same = assign_anchors(utility(kept[at : at + 1], 0.0), actual.anchors)
    mine, alike = (
        float(each.of(torch.stack([gains(x) for x in some])).mean())
        for each, some in ((actual, kept), (same, kept[at : at + 1]))
    )
    assert mine > alike


def test_a_target_below_what_is_forced_is_refused():
    kept = kept_at(SMALL, [loud(0), loud(1)], SHARES)
    with pytest.raises(
        ValueError, match=r"target_density is 0\.01; it must be at least 0\.\d+, which blocks"
    ):
        within(kept, 1, 0.01)
    # and all may have the most
    assert set(within(kept, 1, 1.0).options.flatten().tolist()) <= set(range(len(SHARES)))


@pytest.mark.parametrize("counts", [4, ((4, 0, 2, 0), (0, 0, 4, 4))], ids=["all", "some"])
def test_anchors_are_found_by_the_scores_that_they_choose_by(counts):
    config, layers = replace(SMALL, exact_queries=counts), [loud(0), loud(1)]
    kept = kept_at(config, layers, SHARES)
    actual = cascaded(config, kept, (0, 1), 2, 2, 0.4)
    assert actual.exact_queries == counts
    # the blocks that were measured are those that an anchor then attends
    spans = Spans.causal(1, LENGTH, LENGTH, "cpu")
    of_shares = torch.stack([each.density for each in kept])
    for layer, (q, k) in enumerate(layers):
        call = LayerContext(spans, 0.25, layer)
        keep = (
            make_predictor(replace(actual, dense_tail_blocks=0))(q, k, call).to_dense()[0].float()
        )
        rows = [SHARES.index(share) for share in actual.top_k_share[layer]]
        meant = of_shares[rows, layer, range(4)] * (sum(range(2, 26, 2)) + 25)
        torch.testing.assert_close(keep.sum((1, 2)).double(), meant)


def test_the_saved_cascade_is_a_config():
    kept = kept_at(SMALL, [loud(0), loud(1)], SHARES)
    config = cascaded(SMALL, kept, (0, 2), 4, 2, 0.4)
    assert CabConfig.from_dict(config.to_dict()) == config
    assert config.anchors == (0, 2) and len(config.top_k_share) == len(config.head_map) == 4
    actual = within(kept, 2, 0.4)
    assert [SHARES.index(share) for share in config.top_k_share[2]] == actual.options[1].tolist()
    assert not any(map(any, config.top_p)) and config.max_density == 1.0
    by_share = CabConfig(32, 16, select="topk", sparsity=0.9)
    rows = cascaded(by_share, kept, (0, 2), 4, 2, 0.4).sparsity
    assert rows[2] == tuple(1 - share for share in config.top_k_share[2])
