"""Models with changed numbers or sizes of heads keep the logits of the original model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from words import make_tokenizer

from cab_hf.experiment import models, reshape
from cab_hf.experiment.reshape import RESHAPED_MODELS, WIDE_MODEL, add_qk_norm, widen_heads

INPUT_IDS = torch.randint(200, (1, 70), generator=torch.Generator().manual_seed(0))


def build_small_model(head_dim=16, num_heads=4, num_kv_heads=2, rope_theta=10_000.0):
    """Return a LLaMA of two layers with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def test_wider_model_equals_original_with_equal_frequencies():
    model = build_small_model()
    # with 32 channels, RoPE pair 2 j has the frequency of pair j with 16 channels
    wide_model = widen_heads(model, head_dim=32, group_size=4, theta=10_000.0).eval()
    assert wide_model.model.layers[0].self_attn.q_proj.weight.shape == (2 * 4 * 32, 96)
    torch.testing.assert_close(
        wide_model(INPUT_IDS).logits, model(INPUT_IDS).logits, atol=1e-5, rtol=1e-4
    )


@torch.no_grad()
def test_other_rope_base_uses_nearest_frequencies():
    model = build_small_model(head_dim=64, num_heads=3, num_kv_heads=1, rope_theta=100_000.0)
    wide_model = widen_heads(model, head_dim=128, group_size=4, theta=500_000.0).eval()
    assert wide_model.config.rope_parameters["rope_theta"] == 500_000.0
    frequencies = model.model.rotary_emb.inv_freq
    wide_frequencies = wide_model.model.rotary_emb.inv_freq
    # channel i < 64 is the first channel of RoPE pair i; the weights of unused pairs are zero
    is_channel_used = wide_model.model.layers[0].self_attn.q_proj.weight[:128].abs().sum(1)[:64] > 0
    frequency_ratio = wide_frequencies[is_channel_used] / frequencies
    assert (
        is_channel_used.sum() == 32
        and frequency_ratio.min() > 0.89
        and frequency_ratio.max() < 1.12
    )


@torch.no_grad()
def test_qk_norms_preserve_query_and_key_norms():
    model = build_small_model()
    projection_outputs = {}
    attention_module = model.model.layers[0].self_attn
    for projection_name in ("q", "k"):
        projection = getattr(attention_module, f"{projection_name}_proj")
        projection.register_forward_hook(
            lambda m, i, o, name=projection_name: projection_outputs.update({name: o})
        )
    model(INPUT_IDS)
    norm_model = add_qk_norm(model, INPUT_IDS)
    norm_attention_module = norm_model.model.layers[0].self_attn
    assert norm_model.config.model_type == "qwen3"
    assert torch.equal(norm_attention_module.q_proj.weight, attention_module.q_proj.weight)
    for projection_name in ("q", "k"):
        rms = (projection_outputs[projection_name][0, 8:] ** 2).mean() ** 0.5
        norm_weight = getattr(norm_attention_module, f"{projection_name}_norm").weight
        torch.testing.assert_close(norm_weight, rms.expand(16))


@pytest.mark.parametrize("name", RESHAPED_MODELS)
def test_reshaped_models_load_by_name_and_are_cached(tmp_path, monkeypatch, name):
    build_small_model(head_dim=64, num_heads=3, num_kv_heads=1).save_pretrained(
        tmp_path / "smollm2"
    )
    make_tokenizer().save_pretrained(tmp_path / "smollm2")
    monkeypatch.setenv("CAB_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(reshape, "smollm2_folder", lambda: tmp_path / "smollm2")
    monkeypatch.setattr(reshape, "MEASURED_CHARACTERS", slice(0, 200))
    model, _ = models.load_model(name, "cpu", "float32")
    attention_module = model.model.layers[0].self_attn
    assert (attention_module.head_dim, attention_module.num_key_value_groups) == (
        (128, 4) if name == WIDE_MODEL else (64, 3)
    )
    assert hasattr(attention_module, "q_norm") == (name != WIDE_MODEL)
    # the second call reads the reshaped model from the cache, without its source
    monkeypatch.setattr(reshape, "smollm2_folder", None)
    cached_model, _ = models.load_model(name, "cpu", "float32")
    cached_weights = cached_model.state_dict()
    assert all(
        torch.equal(weight, cached_weights[weight_name])
        for weight_name, weight in model.state_dict().items()
    )
    assert models.is_local_model(name)
    assert (
        len({models.content_sha256(model_name) for model_name in (*RESHAPED_MODELS, "smollm2")})
        == 3
    )
