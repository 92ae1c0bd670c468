"""Compiled models equal eager models, without graph breaks and with few graphs."""

from dataclasses import replace

import pytest
import torch
from call_cases import compute_logits, pad_left
from marks import mark_slow_except
from tiny import FULL_BUDGET_CONFIG, SPARSE_CONFIG, draw_qkv, draw_token_ids, make_tiny_model
from torch._dynamo.backends.debugging import aot_eager
from transformers import StaticCache

import cab_hf
from cab_hf import CabConfig, engines
from cab_hf.attention import cab_attention
from cab_hf.eval import methods  # noqa: F401  it registers rivals
from cab_hf.eval.kv_cache import make_cache_arguments

TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def one_layer_llama():
    """Return a tiny LLaMA of one layer."""
    return make_tiny_model(num_hidden_layers=1)


PADDED_INPUTS = {"attention_mask": torch.arange(130)[None] >= 20}
# test packed documents at full budget only: under torch.compile, documents are not aligned to
# blocks, which changes the selection
PACKED_INPUTS = {"position_ids": (torch.arange(130) % 70)[None], "use_cache": False}
CALL_CASES = [
    # with min_length above 0, `route` also compares lengths with break-even points
    pytest.param(replace(SPARSE_CONFIG, min_length=100), {}, "REFERENCE", id="plain"),
    pytest.param(FULL_BUDGET_CONFIG, PACKED_INPUTS, "TRITON", id="packed-by-lists"),
    pytest.param(SPARSE_CONFIG, {"use_cache": False}, "REFERENCE", id="training-call"),
    pytest.param(SPARSE_CONFIG, PADDED_INPUTS, "REFERENCE", id="padded"),
    # engine TRITON reads block lists only, so that the dense tail must be in the lists
    pytest.param(SPARSE_CONFIG, {}, "TRITON", id="plain-by-lists"),
    pytest.param(SPARSE_CONFIG, PADDED_INPUTS, "TRITON", id="padded-by-lists"),
]


@pytest.mark.parametrize(("config", "inputs", "engine"), mark_slow_except(CALL_CASES, 0, 1))
def test_compiles_without_a_graph_break(one_layer_llama, config, inputs, engine, monkeypatch):
    ids = draw_token_ids(1, 130)
    with cab_hf.cab(one_layer_llama, config):
        expected = compute_logits(one_layer_llama, input_ids=ids, **inputs)
        monkeypatch.setattr(engines, "REFERENCE", getattr(engines, engine))
        torch._dynamo.reset()
        compiled_model = torch.compile(one_layer_llama, fullgraph=True, backend="aot_eager")
        actual = compute_logits(compiled_model, input_ids=ids, **inputs)
    is_real_token = inputs.get("attention_mask", torch.ones(1, 130)).bool()
    torch.testing.assert_close(actual[is_real_token], expected[is_real_token], **TOLERANCE)


def test_attention_without_mask_compiles_without_graph_break(one_layer_llama):
    q, k, v = draw_qkv(q_length=130, heads=4, kv_heads=2, dim=16)
    layer = one_layer_llama.model.layers[0].self_attn
    with cab_hf.cab(one_layer_llama, SPARSE_CONFIG), torch.no_grad():
        expected, _ = cab_attention(layer, q, k, v, attention_mask=None)
        torch._dynamo.reset()
        compiled_attention = torch.compile(cab_attention, fullgraph=True, backend="aot_eager")
        actual, _ = compiled_attention(layer, q, k, v, attention_mask=None)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


MASK_INPUTS = {"attention_mask": torch.ones(1, 130, dtype=torch.int64), "use_cache": False}


@pytest.mark.parametrize("family", ["llama", "llama4"])
@pytest.mark.parametrize("input_kind", ["mask", "cache", "static-cache"])
@torch.no_grad()
def test_compiled_packed_documents_with_mask_or_cache_raise(family, input_kind):
    model = cab_hf.apply_cab(make_tiny_model(family, num_hidden_layers=1), FULL_BUDGET_CONFIG)

    def make_mask_or_cache():
        if input_kind == "static-cache":
            return make_cache_arguments(model, StaticCache(model.config, max_cache_len=200))
        return MASK_INPUTS if input_kind == "mask" else {"use_cache": True}

    torch._dynamo.reset()
    compiled_model, ids = (
        torch.compile(model, fullgraph=True, backend="aot_eager"),
        draw_token_ids(1, 130),
    )
    expected = compute_logits(model, input_ids=ids, **make_mask_or_cache())
    torch.testing.assert_close(
        compute_logits(compiled_model, input_ids=ids, **make_mask_or_cache()), expected, **TOLERANCE
    )
    packed_inputs = {"input_ids": ids, "position_ids": PACKED_INPUTS["position_ids"]}
    with pytest.raises(NotImplementedError, match="^position_ids pack documents in a compiled"):
        compute_logits(compiled_model, **packed_inputs, **make_mask_or_cache())


@pytest.mark.slow
def test_changed_settings_recompile(one_layer_llama):
    """Change settings between calls, because TorchDynamo makes numbers symbolic after a change."""
    ids = draw_token_ids(1, 130)
    torch._dynamo.reset()
    for changed_fields in ({}, {"mass_threshold": 0.08}, {"query_block": 64, "sink_blocks": 2}):
        with cab_hf.cab(one_layer_llama, SPARSE_CONFIG, **changed_fields):
            expected = compute_logits(one_layer_llama, input_ids=ids)
            compiled_model = torch.compile(one_layer_llama, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(
                compute_logits(compiled_model, input_ids=ids), expected, **TOLERANCE
            )


def prefill_plain(model, ids):
    """Return the logits of a prefill without cache."""
    return model(ids, use_cache=False).logits


def prefill_padded(model, ids):
    """Return the logits of a prefill with left padding in row 0, without the padding."""
    ids, mask = pad_left(ids, 45)
    mask = torch.cat([mask[:1], torch.ones_like(mask[1:])])
    return model(ids, attention_mask=mask, use_cache=False).logits[:, 45:]


def prefill_static_cache(model, ids):
    """Return the logits of a prefill into a static cache."""
    cache = StaticCache(model.config, max_cache_len=512)
    cache.early_initialization(
        batch_size=len(ids), num_heads=2, head_dim=16, dtype=torch.float32, device="cpu"
    )
    return model(ids, past_key_values=cache).logits


def run_training_step(model, ids):
    """Run a training step, and return the gradients of all parameters, concatenated."""
    model.zero_grad()
    with torch.enable_grad():
        model(ids, labels=ids, use_cache=False).loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


# by name: (CabConfig or None for "cab_dense", family of the model)
COMPILED_CONFIGS = {
    "sparse": (replace(SPARSE_CONFIG, outlier_queries=0), "llama"),
    "outliers": (SPARSE_CONFIG, "llama"),
    "full": (FULL_BUDGET_CONFIG, "llama"),
    "streaming": (SPARSE_CONFIG.changed(predictor="streaming"), "llama"),
    "published": (CabConfig.published(0.6, query_block=32, key_block=16, min_length=0), "llama"),
    "cab_dense": (None, "llama"),
    "sliding": (None, "mistral-sliding"),
}
MODEL_FUNCTIONS = (prefill_plain, prefill_padded, prefill_static_cache, run_training_step)
FAST_CASE_NAMES = (
    "sparse-prefill_padded",
    "outliers-prefill_static_cache",
    "cab_dense-prefill_plain",
)
CASE_NAMES = [
    f"{config_name}-{model_function.__name__}"
    for config_name in COMPILED_CONFIGS
    for model_function in MODEL_FUNCTIONS
]


@torch.no_grad()
@pytest.mark.parametrize(
    "case_name", mark_slow_except(CASE_NAMES, *map(CASE_NAMES.index, FAST_CASE_NAMES))
)
@pytest.mark.parametrize("dynamic_shapes", mark_slow_except([True, None], 0))
def test_many_prompt_lengths_compile_at_most_three_graphs(case_name, dynamic_shapes):
    """Allow three graphs: one for dynamic lengths, one for the first length, one for the loss."""
    config_name, function_name = case_name.split("-")
    (config, family), run_model = COMPILED_CONFIGS[config_name], globals()[function_name]
    model, graphs = make_tiny_model(family, num_hidden_layers=1), []
    cab_hf.apply_cab(model, config or FULL_BUDGET_CONFIG)
    if config is None:
        model.set_attn_implementation("cab_dense")

    def record_graph(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs) if run_model is run_training_step else graph.forward

    torch._dynamo.reset()
    compiled_model = torch.compile(model, dynamic=dynamic_shapes, backend=record_graph)
    for length in (300, 323, 347, 371, 396, 420):
        ids = draw_token_ids(2, length)
        torch.testing.assert_close(
            run_model(compiled_model, ids), run_model(model, ids), **TOLERANCE
        )
    assert len(graphs) <= 3
