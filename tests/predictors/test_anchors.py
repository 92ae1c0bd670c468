"""Selection of anchor layers by dynamic programming, head maps, and measured coverage."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from tiny import SPARSE_CONFIG, draw_qkv

from cab_hf import CabConfig
from cab_hf.calibration import anchors as anchor_calibration
from cab_hf.calibration.anchors import (
    Coverage,
    Needles,
    assign_anchors,
    compute_anchor_values,
    compute_coverage,
    compute_gains,
    find_best_anchors,
    fit_cascade,
    measure_layer,
)
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

NUM_TOKENS = 400
# higher than the defaults: a short sequence has few blocks, each with a large share of the mass
THRESHOLDS = (0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
MASS_CONFIG = replace(SPARSE_CONFIG, share_threshold=1.0, dense_tail_blocks=0)
NEEDLES = Needles(torch.tensor([140, 150]), torch.tensor([40, 90]), torch.tensor([44, 94]))


@pytest.fixture(autouse=True)
def _set_thresholds_for_few_blocks(monkeypatch):
    monkeypatch.setattr(anchor_calibration, "THRESHOLDS", THRESHOLDS)


def sum_anchor_values(anchor_values, anchors):
    """Return sum_b anchor_values[a_b][b], where a_b is the last anchor at or before layer b."""
    return sum(
        anchor_values[max(a for a in anchors if a <= b)][b] for b in range(len(anchor_values))
    )


@pytest.mark.parametrize("num_layers", range(1, 11))
def test_best_anchors_equal_exhaustive_search(num_layers):
    for seed in range(5):
        torch.manual_seed(seed)
        anchor_values = torch.randn(num_layers, num_layers).double().tolist()
        for num_anchors in range(1, num_layers + 1):
            actual = find_best_anchors(anchor_values, num_anchors)
            assert (
                len(actual) == num_anchors
                and actual[0] == 0
                and list(actual) == sorted(set(actual))
            )
            later_anchors = combinations(range(1, num_layers), num_anchors - 1)
            max_total = max(
                sum_anchor_values(anchor_values, (0, *anchors)) for anchors in later_anchors
            )
            assert sum_anchor_values(anchor_values, actual) == pytest.approx(max_total, abs=1e-12)


def test_best_anchors_equal_hand_computed_anchors():
    # anchor_values[a][b]: coverage of layer b by the blocks of layer a; layers 0 and 1 are similar,
    # and so are layers 2 and 3
    anchor_values = [[1, 0.9, 0.1, 0.1], [0, 1, 0.2, 0.2], [0, 0, 1, 0.9], [0, 0, 0, 1]]
    assert find_best_anchors(anchor_values, 1) == (0,)
    assert find_best_anchors(anchor_values, 2) == (0, 2)
    # of equal values, the earlier layer is selected
    assert find_best_anchors([[1.0] * 4] * 4, 3) == (0, 1, 2)
    with pytest.raises(ValueError, match="anchors must be 1 to 4, .*, got 5"):
        find_best_anchors(anchor_values, 5)


def measure_coverages(config, layers, importance=None):
    """Measure all layers, and return a list with a `Coverage` for each threshold.

    Args:
        config: settings of the predictor.
        layers: (q, k) of each layer, [1, H, N, D].
        importance: weight of each layer; None for equal weights.
    """
    key_ranges = KeyRanges.causal(1, NUM_TOKENS, NUM_TOKENS, "cpu")
    measurements = [
        measure_layer(q, k, LayerContext(key_ranges, 0.25, layer), config, NEEDLES)
        for layer, (q, k) in enumerate(layers)
    ]
    layer_importance = importance or [1.0] * len(layers)
    return [
        compute_coverage([layer[threshold_index] for layer in measurements], layer_importance)
        for threshold_index in range(len(measurements[0]))
    ]


def fit_cascade_config(
    config, coverages, *, layers=(0, 1), num_layers=2, num_anchors=1, target_density
):
    """Return the CabConfig that `fit_cascade` fits for a model of ``num_layers`` layers."""
    return fit_cascade(
        config,
        coverages,
        layers,
        num_layers=num_layers,
        num_anchors=num_anchors,
        target_density=target_density,
    )


def select_plan(config, q, k, layer=0):
    """Return the plan that the predictor of ``config`` selects for causal q and k."""
    key_ranges = KeyRanges.causal(1, NUM_TOKENS, NUM_TOKENS, "cpu")
    return make_predictor(config)(q, k, LayerContext(key_ranges, 0.25, layer))


def make_q_and_k(seed, num_heads=4):
    q, k, _ = draw_qkv(q_length=NUM_TOKENS, heads=num_heads, kv_heads=num_heads, seed=seed)
    return 3 * q, 3 * k


@pytest.mark.parametrize("outlier_queries", [0, 4])
def test_permuted_heads_are_mapped_back(outlier_queries):
    config = replace(MASS_CONFIG, outlier_queries=outlier_queries)
    q, k = make_q_and_k(0)
    # if all tokens of a block are equal, any sampled query gives the exact mass of its block
    q, k = (
        x[:, :, ::block_size].repeat_interleave(block_size, 2)[:, :, :NUM_TOKENS]
        for x, block_size in ((q, 32), (k, 16))
    )
    head_order = [2, 0, 3, 1]
    coverages = measure_coverages(config, [(q, k), (q[:, head_order], k[:, head_order])])
    coverage = coverages[4]
    assert assign_anchors(compute_gains(coverage), (0,)).source_heads.tolist() == [
        [0, 1, 2, 3],
        head_order,
    ]
    # with the head map, blocks cover as much mass in layer 1 as in the anchor layer
    covered_mass = coverage.mass[0, 1, head_order, range(4)].mean()
    torch.testing.assert_close(covered_mass, coverage.mass[0, 0].diagonal().mean())
    assert fit_cascade_config(config, coverages, target_density=0.5).head_map[1] == tuple(
        head_order
    )


def test_coverage_equals_hand_computed_values():
    (q, k), (layer_1_q, layer_1_k) = make_q_and_k(0, num_heads=2), make_q_and_k(1, num_heads=2)
    coverage = measure_coverages(MASS_CONFIG, [(q, k), (layer_1_q, layer_1_k)])[3]
    plan = select_plan(replace(MASS_CONFIG, mass_threshold=THRESHOLDS[3]), q, k)
    is_attended = plan.token_mask()[0, 1]
    logits = layer_1_q[0, 0] @ layer_1_k[0, 0].T * 0.25
    is_visible = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril()
    attention = logits.masked_fill(~is_visible, -torch.inf).softmax(-1)
    # expected coverage of head 0 of layer 1 by the blocks of head 1 of layer 0
    expected = (attention * is_attended).sum(-1).mean()
    assert float(coverage.mass[0, 1, 1, 0]) == pytest.approx(float(expected), abs=1e-5)
    needle_attention = [
        (attention * is_attended)[140, 40:44].sum(),
        (attention * is_attended)[150, 90:94].sum(),
    ]
    assert float(coverage.needle_attention[0, 1, 1, 0]) == pytest.approx(
        float(sum(needle_attention) / 2), abs=1e-6
    )
    assert float(coverage.density[0, 1]) == pytest.approx(
        float(is_attended.sum() / is_visible.sum())
    )


def test_threshold_0_covers_all_mass(monkeypatch):
    monkeypatch.setattr(anchor_calibration, "THRESHOLDS", (0.0,))
    (coverage,) = measure_coverages(MASS_CONFIG, [make_q_and_k(0), make_q_and_k(1)], [0.5, 0.25])
    torch.testing.assert_close(coverage.mass, torch.ones(2, 2, 4, 4, dtype=torch.float64))
    # if all blocks are selected, needle coverage is the same for every anchor head
    torch.testing.assert_close(
        coverage.needle_attention,
        coverage.needle_attention[:1, :, :1].expand_as(coverage.needle_attention),
    )
    assert coverage.importance.tolist() == [0.5, 0.25]


def test_anchors_are_weighted_by_importance():
    """Layers 1 and 2 compete to be the second anchor: the more important layer must win."""
    covered_mass = torch.ones(3, 3, 1, 1, dtype=torch.float64)
    covered_mass[0, 1], covered_mass[0, 2], covered_mass[1, 2] = 0.5, 0.6, 0.55

    def find_two_anchors(*importance):
        return find_best_anchors(compute_anchor_values(covered_mass, torch.tensor(importance)), 2)

    assert find_two_anchors(1.0, 1.0, 0.1) == (0, 1)
    assert find_two_anchors(1.0, 0.1, 1.0) == (0, 2)


def test_assigned_heads_and_density_equal_hand_computed_values():
    """Heads of anchor layers map to themselves; other heads map to the head that covers most."""
    covered_mass = torch.tensor([[[0.9, 0.1], [0.95, 0.5]], [[0.9, 0.2], [0.4, 0.9]]]).double()
    # [anchor layer a, layer b, head of a, head of b]; in an anchor layer, each head maps to itself
    # even if another head covers more
    covered_mass_by_head = torch.stack([covered_mass, covered_mass.flip(1)])
    actual = assign_anchors(covered_mass_by_head, (0,))
    assert actual.anchor_of_layer == (0, 0) and actual.source_heads.tolist() == [[0, 1], [0, 1]]
    actual = assign_anchors(covered_mass_by_head.flip(2), (0,))
    assert actual.source_heads.tolist() == [[0, 1], [1, 0]]
    assert assign_anchors(covered_mass_by_head, (0, 1)).source_heads.tolist() == [[0, 1], [0, 1]]
    covered_mass_by_head[0, 1, 1, 0] = 0.95
    actual = assign_anchors(covered_mass_by_head, (0,))
    assert actual.source_heads.tolist() == [[0, 1], [1, 1]]
    density = torch.tensor([[0.1, 0.4], [0.7, 0.8]]).double()
    coverage = Coverage(covered_mass_by_head, covered_mass_by_head, density, density[0])
    assert actual.compute_density(coverage) == pytest.approx((0.1 + 3 * 0.4) / 4)


@pytest.mark.parametrize("target_density", [0.45, 0.5, 0.6])
def test_cascade_reaches_target_density(target_density):
    layers = [make_q_and_k(0), make_q_and_k(1), make_q_and_k(2)]
    config = fit_cascade_config(
        MASS_CONFIG,
        measure_coverages(MASS_CONFIG, layers),
        layers=(0, 1, 2),
        num_layers=3,
        num_anchors=2,
        target_density=target_density,
    )
    assert THRESHOLDS[-1] <= config.mass_threshold <= THRESHOLDS[0]
    predictor, shared_state = make_predictor(config), {}
    key_ranges = KeyRanges.causal(1, NUM_TOKENS, NUM_TOKENS, "cpu")
    layer_densities = [
        predictor(q, k, LayerContext(key_ranges, 0.25, layer, shared_state)).density()
        for layer, (q, k) in enumerate(layers)
    ]
    assert sum(layer_densities) / 3 == pytest.approx(target_density, abs=0.02)


def test_target_below_forced_density_raises():
    coverages = measure_coverages(MASS_CONFIG, [make_q_and_k(0), make_q_and_k(1)])
    with pytest.raises(ValueError, match=r"target_density must be at least 0\.\d+, .*, got 0\.01"):
        fit_cascade_config(MASS_CONFIG, coverages, target_density=0.01)
    # target density 1 selects the lowest threshold
    assert (
        fit_cascade_config(MASS_CONFIG, coverages, target_density=1.0).mass_threshold
        == THRESHOLDS[-1]
    )


@pytest.mark.parametrize(
    "config_fields", [{}, {"outlier_queries": 0}, {"share_threshold": 0.9}], ids=str
)
def test_coverage_density_equals_plan_density(config_fields):
    config, layers = replace(MASS_CONFIG, **config_fields), [make_q_and_k(0), make_q_and_k(1)]
    coverages = measure_coverages(config, layers)
    for threshold, coverage in zip(THRESHOLDS, coverages, strict=True):
        anchor_config = config.changed(
            predictor="cascade", anchors=(0, 1), mass_threshold=threshold
        )
        for layer, (q, k) in enumerate(layers):
            num_attended = select_plan(anchor_config, q, k, layer).token_mask()[0].sum((1, 2))
            expected = coverage.density[layer] * NUM_TOKENS * (NUM_TOKENS + 1) / 2
            torch.testing.assert_close(num_attended.double(), expected)


def test_cascade_config_equals_config_read_from_dict():
    coverages = measure_coverages(MASS_CONFIG, [make_q_and_k(0), make_q_and_k(1)])
    config = fit_cascade_config(
        MASS_CONFIG, coverages, layers=(0, 2), num_layers=4, num_anchors=2, target_density=0.5
    )
    assert CabConfig.from_dict(config.to_dict()) == config
    assert config.anchors == (0, 2) and len(config.head_map) == 4
    assert config.changed(
        predictor="rows", mass_threshold=MASS_CONFIG.mass_threshold
    ) == MASS_CONFIG.changed(predictor="rows")
