"""Compiled models equal eager models, without graph breaks and with few graphs."""

from dataclasses import replace

import pytest
import torch
from call_cases import left_padded, logits
from marks import slow_but
from tiny import FULL, SPARSE, qkv, tiny_model, tokens
from torch._dynamo.backends.debugging import aot_eager
from transformers import StaticCache

import cab_hf
from cab_hf import CabConfig, engines
from cab_hf.attention import cab_attention
from cab_hf.eval import methods  # noqa: F401  it registers rivals
from cab_hf.eval.kv_cache import cache_arguments

EXACT = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def shallow():
    """Return a tiny LLaMA of one layer."""
    return tiny_model(num_hidden_layers=1)


PADDED = {"attention_mask": torch.arange(130)[None] >= 20}
# test packed documents at full budget only: under torch.compile, documents are not aligned to
# blocks, which changes the selection
PACKED = {"position_ids": (torch.arange(130) % 70)[None], "use_cache": False}
CALLED = [
    # with min_length above 0, `route` also compares lengths with break-even points
    pytest.param(replace(SPARSE, min_length=100), {}, "REFERENCE", id="plain"),
    pytest.param(FULL, PACKED, "TRITON", id="packed-by-lists"),
    pytest.param(SPARSE, {"use_cache": False}, "REFERENCE", id="training-call"),
    pytest.param(SPARSE, PADDED, "REFERENCE", id="padded"),
    # engine TRITON reads block lists only, so that the dense tail must be in the lists
    pytest.param(SPARSE, {}, "TRITON", id="plain-by-lists"),
    pytest.param(SPARSE, PADDED, "TRITON", id="padded-by-lists"),
]


@pytest.mark.parametrize(("config", "inputs", "engine"), slow_but(CALLED, 0, 1))
def test_compiles_without_a_graph_break(shallow, config, inputs, engine, monkeypatch):
    ids = tokens(1, 130)
    with cab_hf.cab(shallow, config):
        expected = logits(shallow, input_ids=ids, **inputs)
        monkeypatch.setattr(engines, "REFERENCE", getattr(engines, engine))
        torch._dynamo.reset()
        compiled = torch.compile(shallow, fullgraph=True, backend="aot_eager")
        actual = logits(compiled, input_ids=ids, **inputs)
    is_real = inputs.get("attention_mask", torch.ones(1, 130)).bool()
    torch.testing.assert_close(actual[is_real], expected[is_real], **EXACT)


def test_attention_without_mask_compiles_without_graph_break(shallow):
    q, k, v = qkv(q_length=130, heads=4, kv_heads=2, dim=16)
    layer = shallow.model.layers[0].self_attn
    with cab_hf.cab(shallow, SPARSE), torch.no_grad():
        expected, _ = cab_attention(layer, q, k, v, attention_mask=None)
        torch._dynamo.reset()
        compiled = torch.compile(cab_attention, fullgraph=True, backend="aot_eager")
        actual, _ = compiled(layer, q, k, v, attention_mask=None)
    torch.testing.assert_close(actual, expected, **EXACT)


MASK = {"attention_mask": torch.ones(1, 130, dtype=torch.int64), "use_cache": False}


@pytest.mark.parametrize("family", ["llama", "llama4"])
@pytest.mark.parametrize("kind", ["mask", "cache", "static-cache"])
@torch.no_grad()
def test_compiled_packed_documents_with_mask_or_cache_raise(family, kind):
    model = cab_hf.apply_cab(tiny_model(family, num_hidden_layers=1), FULL)

    def mask_or_cache():
        if kind == "static-cache":
            return cache_arguments(model, StaticCache(model.config, max_cache_len=200))
        return MASK if kind == "mask" else {"use_cache": True}

    torch._dynamo.reset()
    compiled, ids = torch.compile(model, fullgraph=True, backend="aot_eager"), tokens(1, 130)
    expected = logits(model, input_ids=ids, **mask_or_cache())
    torch.testing.assert_close(
        logits(compiled, input_ids=ids, **mask_or_cache()), expected, **EXACT
    )
    packed = {"input_ids": ids, "position_ids": PACKED["position_ids"]}
    with pytest.raises(NotImplementedError, match="^position_ids pack documents in a compiled"):
        logits(compiled, **packed, **mask_or_cache())


@pytest.mark.slow
def test_changed_settings_recompile(shallow):
    """Change settings between calls, because TorchDynamo makes numbers symbolic after a change."""
    ids = tokens(1, 130)
    torch._dynamo.reset()
    for fields in ({}, {"mass_threshold": 0.08}, {"query_block": 64, "sink_blocks": 2}):
        with cab_hf.cab(shallow, SPARSE, **fields):
            expected = logits(shallow, input_ids=ids)
            compiled = torch.compile(shallow, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(logits(compiled, input_ids=ids), expected, **EXACT)


def read_plainly(model, ids):
    """Return the logits of a prefill without cache."""
    return model(ids, use_cache=False).logits


def read_padded(model, ids):
    """Return the logits of a prefill with left padding in row 0, without the padding."""
    ids, mask = left_padded(ids, 45)
    mask = torch.cat([mask[:1], torch.ones_like(mask[1:])])
    return model(ids, attention_mask=mask, use_cache=False).logits[:, 45:]


def read_into_a_static_cache(model, ids):
    """Return the logits of a prefill into a static cache."""
    cache = StaticCache(model.config, max_cache_len=512)
    cache.early_initialization(
        batch_size=len(ids), num_heads=2, head_dim=16, dtype=torch.float32, device="cpu"
    )
    return model(ids, past_key_values=cache).logits


def trained(model, ids):
    """Run a training step, and return the gradients of all parameters, concatenated."""
    model.zero_grad()
    with torch.enable_grad():
        model(ids, labels=ids, use_cache=False).loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


# by name: (CabConfig or None for "cab_dense", family of the model)
COMPILED = {
    "sparse": (replace(SPARSE, outlier_queries=0), "llama"),
    "outliers": (SPARSE, "llama"),
    "full": (FULL, "llama"),
    "streaming": (SPARSE.changed(predictor="streaming"), "llama"),
    "published": (CabConfig.published(0.6, query_block=32, key_block=16, min_length=0), "llama"),
    "cab_dense": (None, "llama"),
    "sliding": (None, "mistral-sliding"),
}
READ = (read_plainly, read_padded, read_into_a_static_cache, trained)
QUICK = ("sparse-read_padded", "outliers-read_into_a_static_cache", "cab_dense-read_plainly")
NAMES = [f"{name}-{read.__name__}" for name in COMPILED for read in READ]


@torch.no_grad()
@pytest.mark.parametrize("case", slow_but(NAMES, *map(NAMES.index, QUICK)))
@pytest.mark.parametrize("dynamic", slow_but([True, None], 0))
def test_many_prompt_lengths_compile_at_most_three_graphs(case, dynamic):
    """Allow three graphs: one for dynamic lengths, one for the first length, one for the loss."""
    name, function = case.split("-")
    (config, family), read = COMPILED[name], globals()[function]
    model, graphs = tiny_model(family, num_hidden_layers=1), []
    cab_hf.apply_cab(model, config or FULL)
    if config is None:
        model.set_attn_implementation("cab_dense")

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs) if read is trained else graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=dynamic, backend=backend)
    for length in (300, 323, 347, 371, 396, 420):
        ids = tokens(2, length)
        torch.testing.assert_close(read(compiled, ids), read(model, ids), **EXACT)
    assert len(graphs) <= 3
