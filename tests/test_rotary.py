"""`slow_channels` returns the channels with the slowest rotation for layers of several models."""

import sys
from functools import partial

import pytest
import torch
import transformers
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention

import cab_hf
from cab_hf.hf.rotary import slow_channels

MODEL_SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "pad_token_id": 0,
}
# the slower half of 64 channels if RoPE rotates pairs (i, i + 32), or pairs (2 i, 2 i + 1)
HALF_SPLIT_CHANNELS = (*range(16, 32), *range(48, 64))
INTERLEAVED_CHANNELS = tuple(range(32, 64))


def find_attention(model):
    """Return the first attention layer of a model."""
    return next(
        module
        for module_name, module in model.named_modules()
        if module_name.endswith(("attn", "attention"))
    )


def make_model(config_class, model_class, **config_fields):
    """Return a random model with the config fields `MODEL_SIZES` and ``config_fields``."""
    torch.manual_seed(0)
    return model_class(config_class(**{**MODEL_SIZES, **config_fields})).eval()


@pytest.mark.parametrize(
    ("slowest_channels", "build_model"),
    [
        *(
            pytest.param(
                HALF_SPLIT_CHANNELS, partial(make_tiny_model, family, head_dim=64), id=family
            )
            for family in ("llama", "mistral", "qwen3")
        ),
        pytest.param(
            INTERLEAVED_CHANNELS, lambda: make_model(CohereConfig, CohereForCausalLM), id="cohere"
        ),
        pytest.param(
            INTERLEAVED_CHANNELS,
            lambda: make_model(Ernie4_5Config, Ernie4_5ForCausalLM),
            id="ernie",
        ),
    ],
)
def test_slow_channels_are_those_with_lowest_measured_rotation(slowest_channels, build_model):
    """Compare `slow_channels` with the channels that change least from position 0 to 1."""
    model = build_model()
    assert slow_channels(find_attention(model), 64) == slowest_channels
    rotary_embedding = next(
        module
        for module_name, module in model.named_modules()
        if module_name.endswith("rotary_emb")
    )
    unrotated_ones = torch.ones(1, 1, 2, 64)
    cos, sin = rotary_embedding(unrotated_ones, torch.arange(2)[None])
    apply_rotation = sys.modules[type(find_attention(model)).__module__].apply_rotary_pos_emb
    rotated_ones, _ = apply_rotation(unrotated_ones, unrotated_ones, cos, sin)
    channel_changes = (rotated_ones[0, 0, 1] - rotated_ones[0, 0, 0]).abs()
    assert (
        channel_changes[list(slowest_channels)].max()
        < channel_changes[[*set(range(64)) - set(slowest_channels)]].min()
    )


@pytest.mark.parametrize(
    ("build_model", "head_dim"),
    [
        pytest.param(lambda: make_tiny_model(), 16, id="small-heads"),
        pytest.param(lambda: make_model(PhiConfig, PhiForCausalLM), 64, id="phi-in-part"),
        pytest.param(lambda: make_model(GlmConfig, GlmForCausalLM), 64, id="glm-in-part"),
        pytest.param(lambda: make_model(GPTNeoXConfig, GPTNeoXForCausalLM), 64, id="neox-in-part"),
    ],
)
def test_unknown_rotation_keeps_all_channels(build_model, head_dim):
    assert slow_channels(find_attention(build_model()), head_dim) == ()


def test_no_rotation_keeps_all_channels():
    # the Python module of nn.Linear has no function rotate_half
    assert slow_channels(nn.Linear(2, 2), 64) == ()
    assert slow_channels(None, 64) == ()


@pytest.mark.parametrize(
    ("config_fields", "slow_channel_indices"),
    [
        pytest.param({}, HALF_SPLIT_CHANNELS, id="plain"),
        pytest.param({"partial_rotary_factor": 0.5}, (), id="half-of-channels"),
        pytest.param({"partial_rotary_factor": 1.0}, HALF_SPLIT_CHANNELS, id="all-channels"),
        pytest.param({"qk_rope_head_dim": 32}, (), id="separate-channels"),
        pytest.param({"rope_parameters": {"partial_rotary_factor": 0.25}}, (), id="in-parameters"),
        pytest.param(
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25}}},
            (),
            id="in-parameters-by-layer-type",
        ),
    ],
)
def test_slow_channels_of_config_variants(config_fields, slow_channel_indices):
    attention_layer = find_attention(make_tiny_model(head_dim=64))
    for field_name, field_value in config_fields.items():
        setattr(attention_layer.config, field_name, field_value)
    assert isinstance(attention_layer, LlamaAttention)
    assert slow_channels(attention_layer, 64) == slow_channel_indices


@pytest.mark.parametrize(
    ("head_dim", "num_channels"), [(32, 0), (62, 0), (64, 32), (80, 40), (128, 64)]
)
def test_large_heads_score_half_of_the_channels(head_dim, num_channels):
    assert (
        len(slow_channels(find_attention(make_tiny_model(head_dim=64)), head_dim)) == num_channels
    )


def test_layers_without_rotation_keep_all_channels():
    """Check SmolLM3, in which every fourth layer has no RoPE."""
    model = make_tiny_model("smollm3", head_dim=64, num_hidden_layers=4)
    attention_layers = [
        module for module in model.modules() if isinstance(module, SmolLM3Attention)
    ]
    assert [slow_channels(layer, 64) for layer in attention_layers] == [HALF_SPLIT_CHANNELS] * 3 + [
        ()
    ]


@pytest.mark.parametrize("class_prefix", ["Cohere2", "Exaone4"])
def test_unrotated_full_attention_layers_keep_all_channels(class_prefix):
    layer_types = ["sliding_attention", "full_attention"]
    config_class = getattr(transformers, f"{class_prefix}Config")
    config_fields = {"num_hidden_layers": 2, "layer_types": layer_types, "sliding_window": 16}
    model = make_model(
        config_class, getattr(transformers, f"{class_prefix}ForCausalLM"), **config_fields
    )
    attention_layers = [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "q_proj")
    ]
    assert [bool(slow_channels(layer, 64)) for layer in attention_layers] == [True, False]


def test_prefill_scores_slow_channels(monkeypatch):
    scored_channels = []
    original_encode_keys = cab_hf.predictors.RowsPredictor.encode_keys

    def record_and_encode(self, k, valid=None, channels=()):
        scored_channels.append(channels)
        return original_encode_keys(self, k, valid, channels)

    monkeypatch.setattr(cab_hf.predictors.RowsPredictor, "encode_keys", record_and_encode)
    model = make_tiny_model(head_dim=64)
    with cab_hf.cab(model, SPARSE_CONFIG), torch.no_grad():
        model(draw_token_ids(1, 100))
    assert scored_channels == [HALF_SPLIT_CHANNELS] * 3


@pytest.mark.slow
def test_slow_channels_compile_without_graph_break():
    model, ids = make_tiny_model(head_dim=64, num_hidden_layers=1), draw_token_ids(1, 150)
    with cab_hf.cab(model, SPARSE_CONFIG), torch.no_grad():
        expected = model(ids).logits
        torch._dynamo.reset()
        compiled_model = torch.compile(model, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(compiled_model(ids).logits, expected, atol=2e-5, rtol=1e-4)
