"""Predictor "cascade": anchor layers select blocks, and the layers after them reuse blocks."""

from dataclasses import replace

import pytest
import torch
from attention_cases import make_block_layout
from call_cases import compute_gradients
from marks import mark_slow_except
from selecting import draw_peaked_qk
from tiny import (
    FULL_BUDGET_CONFIG,
    SMALL_BLOCKS_CONFIG,
    SPARSE_CONFIG,
    draw_token_ids,
    make_tiny_model,
)
from torch import nn
from valid_plan import assert_valid_plan

import cab_hf
from cab_hf import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.predictors import CascadePredictor, LayerContext, make_predictor

CASCADE_CONFIG = replace(SPARSE_CONFIG, predictor="cascade", anchors=(0, 2))
CASCADE_CONFIG_WITHOUT_OUTLIERS = replace(CASCADE_CONFIG, outlier_queries=0)
NUM_TOKENS = 205


def select_plans_of_layers(config, num_layers=4, length=NUM_TOKENS, key_ranges=None, **shape):
    """Return the plans of layers that share state; each layer has its own q and k."""
    predictor, shared_state, plans = make_predictor(config), {}, []
    for layer in range(num_layers):
        q, k = draw_peaked_qk(q_length=length, seed=layer, **{"heads": 4, "kv_heads": 2, **shape})
        key_ranges = key_ranges or KeyRanges.causal(q.shape[0], length, length, "cpu")
        plans.append(predictor(q, k, LayerContext(key_ranges, 0.25, layer, shared_state)))
        assert_valid_plan(plans[-1])
    return plans


@pytest.mark.parametrize(
    "config", [CASCADE_CONFIG, CASCADE_CONFIG_WITHOUT_OUTLIERS], ids=["rows", "typical"]
)
def test_layers_reuse_the_plan_of_the_previous_anchor(config):
    plans = [plan.to_dense() for plan in select_plans_of_layers(config)]
    assert torch.equal(plans[0], plans[1]) and torch.equal(plans[2], plans[3])
    assert not torch.equal(plans[0], plans[2])


@pytest.mark.parametrize(
    "config_fields",
    [{}, {"max_density": 0.4}, {"outlier_queries": 0}],
    ids=["rows", "capped", "typical"],
)
def test_all_layers_as_anchors_equal_rows_predictor(config_fields):
    rows_config = SPARSE_CONFIG.changed(**config_fields)
    config = replace(rows_config, predictor="cascade", anchors=(0, 1, 2, 3))
    for actual, expected in zip(
        select_plans_of_layers(config), select_plans_of_layers(rows_config), strict=True
    ):
        for list_name in ("full", "partial"):
            assert torch.equal(
                getattr(actual, list_name).counts, getattr(expected, list_name).counts
            )
            assert torch.equal(
                getattr(actual, list_name).indices, getattr(expected, list_name).indices
            )
        assert torch.equal(actual.dense_rows, expected.dense_rows)


def test_heads_follow_head_map():
    head_map_row = (2, 0, 0, 3)
    config = replace(CASCADE_CONFIG, anchors=(0,), head_map=((0,) * 4, head_map_row))
    anchor_plan, mapped_plan = select_plans_of_layers(config, 2)
    assert torch.equal(mapped_plan.to_dense(), anchor_plan.to_dense()[:, list(head_map_row)])


def test_reused_plan_does_not_read_q_and_k():
    shared_state, predictor = {}, make_predictor(CASCADE_CONFIG)
    q, k = draw_peaked_qk(q_length=64)
    key_ranges = KeyRanges.causal(1, 64, 64, "cpu")
    anchor_plan = predictor(q, k, LayerContext(key_ranges, 0.25, 0, shared_state))
    q, k = (torch.full_like(x, torch.nan) for x in (q, k))
    reused_plan = predictor(q, k, LayerContext(key_ranges, 0.25, 1, shared_state))
    assert torch.equal(anchor_plan.to_dense(), reused_plan.to_dense())


@pytest.mark.parametrize(
    "config", [CASCADE_CONFIG, CASCADE_CONFIG_WITHOUT_OUTLIERS], ids=["rows", "typical"]
)
def test_later_tokens_do_not_change_earlier_rows(config):
    predictor = make_predictor(replace(config, anchors=(0,), dense_tail_blocks=0))
    layer_context = LayerContext(KeyRanges.causal(1, 150, 150, "cpu"), 0.25, 0)
    q, k = draw_peaked_qk(q_length=150)
    expected = predictor(q, k, layer_context).to_dense()
    q[:, :, 96:], k[:, :, 96:] = 5.0, -7.0
    actual = predictor(q, k, layer_context).to_dense()
    assert torch.equal(expected[:, :, :3], actual[:, :, :3])
    assert not torch.equal(expected, actual)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_padded_rows_and_documents_select_as_single_sequences(layout):
    q, k = draw_peaked_qk(q_length=111, batch=2, heads=2, kv_heads=1)
    block_layout = make_block_layout(
        layout, batch=2, length=111, kv_length=111, align=32, device="cpu"
    )
    predictor = make_predictor(replace(CASCADE_CONFIG, anchors=(0,)))
    layer_context = LayerContext(block_layout.ranges, 0.25, 0)
    plan_of_batch = predictor(block_layout.queries(q), block_layout.keys(k), layer_context)
    assert_valid_plan(plan_of_batch)
    # expected: the plan of row 1 alone; if packed, the plan of its last document alone
    document_start = 111 // 3 if layout == "packed" else 0
    q, k = q[1:, :, document_start:], k[1:, :, document_start:]
    plan_of_sequence = predictor(
        q,
        k,
        LayerContext(
            KeyRanges.causal(1, 111 - document_start, 111 - document_start, "cpu"), 0.25, 0
        ),
    )
    actual, expected = plan_of_batch.to_dense()[1:], plan_of_sequence.to_dense()
    num_rows, num_columns = expected.shape[2:]
    actual = actual[:, :, -num_rows:] if layout == "packed" else actual[:, :, :num_rows]
    actual = actual[..., -num_columns:] if layout == "packed" else actual[..., :num_columns]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("config_fields", "error_pattern"),
    [
        ({"anchors": ()}, r"anchors must be ascending layer indices.*, got \(\)"),
        ({"anchors": (3, 0)}, r"anchors must be ascending.*, got \(3, 0\)"),
        ({"anchors": (0, 0.5)}, "a tuple of layer indices"),
        ({"anchors": (0, 4), "dense_layers": (4,)}, "got layer 4 in both"),
        ({"head_map": ((0, -1),)}, "head_map must be .*, got "),
        ({"head_map": ((0, 1), (0,))}, "head_map must be .*rows of one length"),
    ],
)
def test_invalid_cascade_fields_raise(config_fields, error_pattern):
    with pytest.raises(ValueError, match=error_pattern):
        replace(CASCADE_CONFIG, **config_fields)


@pytest.mark.parametrize(
    ("config_fields", "error_pattern"),
    [
        ({"anchors": (1,)}, "anchors must contain the first sparse layer 0, got"),
        ({"anchors": (0,), "dense_layers": (0,)}, "no layer of dense_layers"),
        ({"anchors": (2,), "dense_layers": (0,)}, "must contain the first sparse layer 1"),
        ({"anchors": (0, 3)}, "anchors has 3; this model has layers 0 to 2"),
        ({"head_map": ((0,) * 6,)}, "head_map has 1 layers of 6 heads, and this model has 3"),
        ({"head_map": ((0,) * 4,) * 3}, "4 heads, and this model has 3 layers of 6 heads"),
        (
            {"head_map": ((6,) * 6,) * 3},
            "head_map must have a row for layer 1 that maps 6 heads, got",
        ),
    ],
)
def test_cascade_fields_that_do_not_fit_the_model_raise(config_fields, error_pattern):
    model = make_tiny_model()
    with pytest.raises(ValueError, match=error_pattern):
        cab_hf.apply_cab(model, replace(CASCADE_CONFIG, **config_fields))
        model(draw_token_ids(1, 80))


def test_layer_without_anchor_plan_raises():
    q, k = draw_peaked_qk(q_length=64)
    key_ranges, predictor = KeyRanges.causal(1, 64, 64, "cpu"), CascadePredictor(CASCADE_CONFIG)
    with pytest.raises(
        ValueError, match="Layer 1 needs the plan of anchor layer 0, which did not run"
    ):
        predictor(q, k, LayerContext(key_ranges, 0.25, 1))
    with pytest.raises(ValueError, match="predictor must not be 'cascade' .* no index"):
        predictor(q, k, LayerContext(key_ranges, 0.25))
    shared_state = {}
    predictor(q, k, LayerContext(key_ranges, 0.25, 0, shared_state))
    # anchor layer 2 was not called in this forward pass
    with pytest.raises(ValueError, match="Layer 3 needs the plan of anchor layer 2"):
        predictor(q, k, LayerContext(key_ranges, 0.25, 3, shared_state))
    with pytest.raises(ValueError, match="layer 1 has 3 query heads and 2 KV heads, its anchor"):
        predictor(q[:, :3], k, LayerContext(key_ranges, 0.25, 1, shared_state))


def compute_logits(model, config, ids, **model_arguments):
    """Return the logits of ``model`` inside ``with cab_hf.cab(model, config)``."""
    with cab_hf.cab(model, config), torch.no_grad():
        return model(ids, **model_arguments).logits


@pytest.mark.parametrize("family", ["llama", "qwen3-some-sliding", "smollm3"])
def test_full_budget_cascade_equals_dense_attention(family):
    model, ids = make_tiny_model(family), draw_token_ids(2, 150)
    anchors = (0, 2) if family != "qwen3-some-sliding" else (0,)
    config = replace(FULL_BUDGET_CONFIG, predictor="cascade", anchors=anchors)
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(compute_logits(model, config, ids), expected, atol=1e-4, rtol=1e-4)


def test_dense_layer_before_anchor_has_no_plan():
    model, ids = make_tiny_model(), draw_token_ids(1, 200)
    config = replace(CASCADE_CONFIG, anchors=(1,), dense_layers=(0,), mass_threshold=0.3)
    with cab_hf.cab(model, config), torch.no_grad():
        model(ids)
        dense_layer_stats, *sparse_layer_stats = cab_hf.stats(model)
    assert dense_layer_stats["density"] is None
    assert sparse_layer_stats[0]["density"] == sparse_layer_stats[1]["density"] < 1


@pytest.mark.parametrize(
    "config", [CASCADE_CONFIG, CASCADE_CONFIG_WITHOUT_OUTLIERS], ids=["rows", "typical"]
)
def test_anchors_select_again_for_every_chunk(config):
    """Anchors select blocks for the queries of each chunk, not once per sequence."""
    model, ids = make_tiny_model(), draw_token_ids(1, 256)
    config = replace(config, anchors=(0,), dense_tail_blocks=0)
    with cab_hf.cab(model, config), torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = model(ids[:, :128]).past_key_values
        actual = model(ids[:, 128:], past_key_values=cache).logits
    torch.testing.assert_close(actual, expected[:, 128:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "config", [CASCADE_CONFIG, CASCADE_CONFIG_WITHOUT_OUTLIERS], ids=["rows", "typical"]
)
def test_checkpointed_gradients_are_equal(config):
    ids, model = draw_token_ids(1, 200), cab_hf.apply_cab(make_tiny_model().train(), config)
    expected = compute_gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for actual, expected_gradient in zip(compute_gradients(model, ids), expected, strict=True):
        torch.testing.assert_close(actual, expected_gradient, atol=1e-6, rtol=1e-5)


def test_reentrant_checkpointing_with_several_anchors_raises():
    model, ids = make_tiny_model().train(), draw_token_ids(1, 200)
    cab_hf.apply_cab(model, replace(CASCADE_CONFIG, anchors=(0, 2)))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    loss = model(ids, labels=ids, use_cache=False).loss
    with pytest.raises(ValueError, match="use_reentrant=False"):
        loss.backward()


def test_checkpointing_a_layer_called_several_times_raises():
    model, ids = make_tiny_model().train(), draw_token_ids(1, 200)
    first_layer, second_layer = model.model.layers[:2]
    model.model.layers = nn.ModuleList([first_layer, second_layer, first_layer, second_layer])
    model.config.num_hidden_layers = 4
    cab_hf.apply_cab(model, replace(CASCADE_CONFIG, anchors=(0,)))
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(ids, labels=ids, use_cache=False).loss
    with pytest.raises(ValueError, match="do not checkpoint layers that are called several times"):
        loss.backward()


@pytest.mark.parametrize(
    "config_fields", mark_slow_except([{"head_map": ((3,) * 6,) * 3}, {"outlier_queries": 4}], 0)
)
def test_cascade_compiles_without_graph_break(config_fields):
    model, ids = make_tiny_model(), draw_token_ids(1, 150)
    config = replace(CASCADE_CONFIG, anchors=(0,), engine="reference", **config_fields)
    expected = compute_logits(model, config, ids, use_cache=False)
    torch._dynamo.reset()
    compiled_model = torch.compile(model, fullgraph=True, backend="eager")
    with cab_hf.cab(model, config), torch.no_grad():
        actual = compiled_model(ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_all_layers_as_anchors_give_logits_of_rows_predictor():
    model, ids = make_tiny_model(), draw_token_ids(2, 300)
    config = replace(CASCADE_CONFIG, anchors=(0, 1, 2))
    assert torch.equal(
        compute_logits(model, config, ids), compute_logits(model, SPARSE_CONFIG, ids)
    )
    assert not torch.equal(
        compute_logits(model, CASCADE_CONFIG, ids), compute_logits(model, SPARSE_CONFIG, ids)
    )


def test_head_map_survives_json(tmp_path):
    config = replace(CASCADE_CONFIG, head_map=((0, 1), (1, 0), (0, 0)))
    config.save(tmp_path / "own.json")
    assert CabConfig.calibrated(tmp_path / "own.json") == config
    assert CabConfig.from_dict(SMALL_BLOCKS_CONFIG.to_dict()).head_map == ()
