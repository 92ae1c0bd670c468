"""Selection of anchor layers by dynamic programming, head maps, and measured coverage."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from tiny import SPARSE, qkv

from cab_hf import CabConfig
from cab_hf.calibration import anchors as anchor_calibration
from cab_hf.calibration.anchors import (
    Coverage,
    Needles,
    assign_anchors,
    best_anchors,
    coverage_of_layers,
    fit_cascade,
    gains,
    measure_layer,
    values,
)
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

LENGTH = 400
# higher than the defaults: a short sequence has few blocks, each with a large share of the mass
THRESHOLDS = (0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
SMALL = replace(SPARSE, share_threshold=1.0, dense_tail_blocks=0)
NEEDLES = Needles(torch.tensor([140, 150]), torch.tensor([40, 90]), torch.tensor([44, 94]))


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch):
    monkeypatch.setattr(anchor_calibration, "THRESHOLDS", THRESHOLDS)


def total_of(value, anchors):
    """Return sum_b value[a_b][b], where a_b is the last anchor at or before layer b."""
    return sum(value[max(a for a in anchors if a <= b)][b] for b in range(len(value)))


@pytest.mark.parametrize("layers", range(1, 11))
def test_best_anchors_equal_exhaustive_search(layers):
    for seed in range(5):
        torch.manual_seed(seed)
        value = torch.randn(layers, layers).double().tolist()
        for count in range(1, layers + 1):
            actual = best_anchors(value, count)
            assert len(actual) == count and actual[0] == 0 and list(actual) == sorted(set(actual))
            others = combinations(range(1, layers), count - 1)
            best = max(total_of(value, (0, *anchors)) for anchors in others)
            assert total_of(value, actual) == pytest.approx(best, abs=1e-12)


def test_anchors_by_hand():
    # value[a][b]: coverage of layer b by the blocks of layer a; layers 0 and 1 are similar, and so
    # are layers 2 and 3
    value = [[1, 0.9, 0.1, 0.1], [0, 1, 0.2, 0.2], [0, 0, 1, 0.9], [0, 0, 0, 1]]
    assert best_anchors(value, 1) == (0,)
    assert best_anchors(value, 2) == (0, 2)
    # of equal values, the earlier layer is selected
    assert best_anchors([[1.0] * 4] * 4, 3) == (0, 1, 2)
    with pytest.raises(ValueError, match="anchors must be 1 to 4, .*, got 5"):
        best_anchors(value, 5)


def kept_of(config, layers, importance=None):
    """Measure all layers, and return a list with a `Coverage` for each threshold.

    Args:
        config: settings of the predictor.
        layers: (q, k) of each layer, [1, H, N, D].
        importance: weight of each layer; None for equal weights.
    """
    ranges = KeyRanges.causal(1, LENGTH, LENGTH, "cpu")
    measured = [
        measure_layer(q, k, LayerContext(ranges, 0.25, layer), config, NEEDLES)
        for layer, (q, k) in enumerate(layers)
    ]
    weights = importance or [1.0] * len(layers)
    return [
        coverage_of_layers([layer[i] for layer in measured], weights)
        for i in range(len(measured[0]))
    ]


def cascaded_config(config, kept, *, layers=(0, 1), total=2, count=1, target):
    """Return the CabConfig that `fit_cascade` fits for a model of ``total`` layers."""
    return fit_cascade(config, kept, layers, num_layers=total, num_anchors=count, target=target)


def plan_of(config, q, k, layer=0):
    """Return the plan that the predictor of ``config`` selects for causal q and k."""
    ranges = KeyRanges.causal(1, LENGTH, LENGTH, "cpu")
    return make_predictor(config)(q, k, LayerContext(ranges, 0.25, layer))


def loud(seed, heads=4):
    q, k, _ = qkv(q_length=LENGTH, heads=heads, kv_heads=heads, seed=seed)
    return 3 * q, 3 * k


@pytest.mark.parametrize("outlier_queries", [0, 4])
def test_permuted_heads_are_mapped_back(outlier_queries):
    config = replace(SMALL, outlier_queries=outlier_queries)
    q, k = loud(0)
    # if all tokens of a block are equal, any sampled query gives the exact mass of its block
    q, k = (
        x[:, :, ::size].repeat_interleave(size, 2)[:, :, :LENGTH] for x, size in ((q, 32), (k, 16))
    )
    order = [2, 0, 3, 1]
    kept = kept_of(config, [(q, k), (q[:, order], k[:, order])])
    coverage = kept[4]
    assert assign_anchors(gains(coverage), (0,)).sources.tolist() == [[0, 1, 2, 3], order]
    # with the head map, blocks cover as much mass in layer 1 as in the anchor layer
    mass = coverage.mass[0, 1, order, range(4)].mean()
    torch.testing.assert_close(mass, coverage.mass[0, 0].diagonal().mean())
    assert cascaded_config(config, kept, target=0.5).head_map[1] == tuple(order)


def test_coverage_by_hand():
    (q, k), (other_q, other_k) = loud(0, heads=2), loud(1, heads=2)
    kept = kept_of(SMALL, [(q, k), (other_q, other_k)])[3]
    plan = plan_of(replace(SMALL, mass_threshold=THRESHOLDS[3]), q, k)
    tokens = plan.token_mask()[0, 1]
    logits = other_q[0, 0] @ other_k[0, 0].T * 0.25
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    shares = logits.masked_fill(~causal, -torch.inf).softmax(-1)
    # expected coverage of head 0 of layer 1 by the blocks of head 1 of layer 0
    expected = (shares * tokens).sum(-1).mean()
    assert float(kept.mass[0, 1, 1, 0]) == pytest.approx(float(expected), abs=1e-5)
    actual = [(shares * tokens)[140, 40:44].sum(), (shares * tokens)[150, 90:94].sum()]
    assert float(kept.needle[0, 1, 1, 0]) == pytest.approx(float(sum(actual) / 2), abs=1e-6)
    assert float(kept.density[0, 1]) == pytest.approx(float(tokens.sum() / causal.sum()))


def test_threshold_0_covers_all_mass(monkeypatch):
    monkeypatch.setattr(anchor_calibration, "THRESHOLDS", (0.0,))
    (kept,) = kept_of(SMALL, [loud(0), loud(1)], [0.5, 0.25])
    torch.testing.assert_close(kept.mass, torch.ones(2, 2, 4, 4, dtype=torch.float64))
    # if all blocks are selected, needle coverage is the same for every anchor head
    torch.testing.assert_close(kept.needle, kept.needle[:1, :, :1].expand_as(kept.needle))
    assert kept.importance.tolist() == [0.5, 0.25]


def test_anchors_are_weighted_by_importance():
    """Layers 1 and 2 compete to be the second anchor: the more important layer must win."""
    mass = torch.ones(3, 3, 1, 1, dtype=torch.float64)
    mass[0, 1], mass[0, 2], mass[1, 2] = 0.5, 0.6, 0.55

    def anchors(*importance):
        return best_anchors(values(mass, torch.tensor(importance)), 2)

    assert anchors(1.0, 1.0, 0.1) == (0, 1)
    assert anchors(1.0, 0.1, 1.0) == (0, 2)


def test_heads_and_densities_by_hand():
    """Heads of anchor layers map to themselves; other heads map to the head that covers most."""
    mass = torch.tensor([[[0.9, 0.1], [0.95, 0.5]], [[0.9, 0.2], [0.4, 0.9]]]).double()
    # gain [anchor layer a, layer b, head of a, head of b]; in an anchor layer, each head maps to
    # itself even if another head covers more
    gain = torch.stack([mass, mass.flip(1)])
    actual = assign_anchors(gain, (0,))
    assert actual.of_layer == (0, 0) and actual.sources.tolist() == [[0, 1], [0, 1]]
    actual = assign_anchors(gain.flip(2), (0,))
    assert actual.sources.tolist() == [[0, 1], [1, 0]]
    assert assign_anchors(gain, (0, 1)).sources.tolist() == [[0, 1], [0, 1]]
    gain[0, 1, 1, 0] = 0.95
    actual = assign_anchors(gain, (0,))
    assert actual.sources.tolist() == [[0, 1], [1, 1]]
    density = torch.tensor([[0.1, 0.4], [0.7, 0.8]]).double()
    kept = Coverage(gain, gain, density, density[0])
    assert actual.density(kept) == pytest.approx((0.1 + 3 * 0.4) / 4)


@pytest.mark.parametrize("target", [0.45, 0.5, 0.6])
def test_cascade_reaches_target_density(target):
    layers = [loud(0), loud(1), loud(2)]
    config = cascaded_config(
        SMALL, kept_of(SMALL, layers), layers=(0, 1, 2), total=3, count=2, target=target
    )
    assert THRESHOLDS[-1] <= config.mass_threshold <= THRESHOLDS[0]
    predictor, shared_state = make_predictor(config), {}
    ranges = KeyRanges.causal(1, LENGTH, LENGTH, "cpu")
    layer_densities = [
        predictor(q, k, LayerContext(ranges, 0.25, layer, shared_state)).density()
        for layer, (q, k) in enumerate(layers)
    ]
    assert sum(layer_densities) / 3 == pytest.approx(target, abs=0.02)


def test_target_below_forced_density_raises():
    kept = kept_of(SMALL, [loud(0), loud(1)])
    with pytest.raises(ValueError, match=r"target_density must be at least 0\.\d+, .*, got 0\.01"):
        cascaded_config(SMALL, kept, target=0.01)
    # target density 1 selects the lowest threshold
    assert cascaded_config(SMALL, kept, target=1.0).mass_threshold == THRESHOLDS[-1]


@pytest.mark.parametrize("fields", [{}, {"outlier_queries": 0}, {"share_threshold": 0.9}], ids=str)
def test_coverage_density_equals_plan_density(fields):
    config, layers = replace(SMALL, **fields), [loud(0), loud(1)]
    kept = kept_of(config, layers)
    for threshold, coverage in zip(THRESHOLDS, kept, strict=True):
        anchors = config.changed(predictor="cascade", anchors=(0, 1), mass_threshold=threshold)
        for layer, (q, k) in enumerate(layers):
            keep = plan_of(anchors, q, k, layer).token_mask()[0].sum((1, 2))
            expected = coverage.density[layer] * LENGTH * (LENGTH + 1) / 2
            torch.testing.assert_close(keep.double(), expected)


def test_cascade_config_survives_serialisation():
    kept = kept_of(SMALL, [loud(0), loud(1)])
    config = cascaded_config(SMALL, kept, layers=(0, 2), total=4, count=2, target=0.5)
    assert CabConfig.from_dict(config.to_dict()) == config
    assert config.anchors == (0, 2) and len(config.head_map) == 4
    assert config.changed(predictor="rows", mass_threshold=SMALL.mass_threshold) == SMALL.changed(
        predictor="rows"
    )
