"""Which layers decide for which: the dynamic program, maps of heads, and what is measured."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from tiny import SMALL, qkv

from cab_hf import CabConfig
from cab_hf.plan import Spans
from cab_hf.predictors import Call, make_predictor
from cab_hf.predictors.anchors import (
    Kept,
    best_anchors,
    cascaded,
    gains,
    head_map,
    kept_between,
    similarity,
    values,
    viewed,
    with_share,
)
from cab_hf.predictors.calibration import Needles

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
            found = best_anchors(value, count)
            assert len(found) == count and found[0] == 0 and list(found) == sorted(set(found))
            others = combinations(range(1, layers), count - 1)
            best = max(total_of(value, (0, *some)) for some in others)
            assert total_of(value, found) == pytest.approx(best, abs=1e-12)


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


def views_of(config, layers, share=0.4):
    """Of layers of q and k [1, H, N, D] each."""
    spans = Spans.causal(1, LENGTH, LENGTH, "cpu")
    config = with_share(replace(config, dense_tail=0), share)
    return [viewed(q, k, Call(spans, 0.25, 7), [config], NEEDLES)[0] for q, k in layers]


def loud(seed, heads=4):
    q, k, _ = qkv(q_length=LENGTH, heads=heads, kv_heads=heads, seed=seed)
    return 3 * q, 3 * k


@pytest.mark.parametrize("scores", ["exact", "cab"])
def test_a_planted_permutation_of_heads_is_recovered(scores):
    config = replace(SMALL, anchor_scores=scores)
    q, k = loud(0)
    # tokens of a block are alike, so that the estimate is as good as the truth
    q, k = (
        x[:, :, ::size].repeat_interleave(size, 2)[:, :, :LENGTH] for x, size in ((q, 32), (k, 16))
    )
    order = [2, 0, 3, 1]
    kept = kept_between(views_of(config, [(q, k), (q[:, order], k[:, order])]), [1.0, 1.0])
    assert head_map(gains(kept), (0,)) == ((0, 1, 2, 3), tuple(order))
    # and nothing is lost by it
    mass, _ = similarity(kept, gains(kept))
    torch.testing.assert_close(mass[0], mass[0, :1].expand(2))
    assert cascaded(config, kept, (0, 1), 2, 1, 0.4).head_map[1] == tuple(order)


def test_what_is_kept_by_hand():
    (q, k), (other_q, other_k) = loud(0, heads=2), loud(1, heads=2)
    kept = kept_between(views_of(SMALL, [(q, k), (other_q, other_k)]), [1.0, 1.0])
    config = replace(
        with_share(replace(SMALL, dense_tail=0), 0.4), predictor="cascade", anchors=(0,)
    )
    spans = Spans.causal(1, LENGTH, LENGTH, "cpu")
    tokens = make_predictor(config)(q, k, Call(spans, 0.25, 0)).token_mask()[0, 1]
    logits = other_q[0, 0] @ other_k[0, 0].T * 0.25
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    shares = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    # head 1 of layer 0 for head 0 of layer 1
    meant = (shares * tokens).sum(-1).mean()
    assert float(kept.mass[0, 1, 1, 0]) == pytest.approx(float(meant), abs=1e-5)
    found = [(shares * tokens)[140, 40:44].sum(), (shares * tokens)[150, 90:94].sum()]
    assert float(kept.needle[0, 1, 1, 0]) == pytest.approx(float(sum(found) / 2), abs=1e-6)
    needed = (shares[140, 40:44].sum() + shares[150, 90:94].sum()) / 2
    assert float(kept.needed[1, 0]) == pytest.approx(float(needed), abs=1e-6)


def test_a_full_share_keeps_everything():
    kept = kept_between(views_of(SMALL, [loud(0), loud(1)], share=1.0), [0.5, 0.25])
    torch.testing.assert_close(kept.mass, torch.ones(2, 2, 4, 4, dtype=torch.float64))
    mass, needle = similarity(kept, gains(kept))
    torch.testing.assert_close(mass, torch.ones(2, 2, dtype=torch.float64))
    torch.testing.assert_close(needle, torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize(("heads", "shared"), [("group", 2), ("all", 1)])
def test_heads_that_share_a_plan_are_one(heads, shared):
    config = replace(SMALL, anchor_heads=heads)
    q, k, _ = qkv(q_length=LENGTH, heads=4, kv_heads=2)
    views = views_of(config, [(q, k), (2 * q, k)])
    kept = kept_between(views, [1.0, 1.0])
    assert kept.mass.shape == (2, 2, shared, shared)
    chosen = cascaded(config, kept, (1, 3), 4, 1, 0.4)
    assert chosen.anchors == (1,)
    assert [len(row) for row in chosen.head_map] == ([] if shared == 1 else [2] * 4)


def test_what_layers_change_weighs():
    """Layer 2 is like neither; whether it decides is a matter of how much layers 1 and 2 do."""
    mass = torch.ones(3, 3, 1, 1, dtype=torch.float64)
    mass[0, 1], mass[0, 2], mass[1, 2] = 0.5, 0.6, 0.55
    nothing = torch.zeros_like(mass), torch.zeros(3, 1, dtype=torch.float64)

    def anchors(*importance):
        return best_anchors(values(Kept(mass, *nothing, torch.tensor(importance).double())), 2)

    assert anchors(1.0, 1.0, 0.1) == (0, 1)
    assert anchors(1.0, 0.1, 1.0) == (0, 2)


def test_the_saved_cascade_is_a_config():
    kept = kept_between(views_of(SMALL, [loud(0), loud(1)]), [1.0, 1.0])
    config = cascaded(SMALL, kept, (0, 1), 2, 2, 0.25)
    assert CabConfig.from_dict(config.to_dict()) == config
    assert (config.anchors, config.max_density, config.mass) == ((0, 1), 0.25, 1.0)
    published = CabConfig.published(0.9, query_block=32, key_block=16)
    assert cascaded(published, kept, (0, 1), 2, 1, 0.25).sparsity == 0.75
