"""Tiny random models of several families, and CabConfigs with small blocks."""

from dataclasses import replace

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from cab_hf import CabConfig

VOCAB_SIZE = 64
MODEL_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# by family: (config class, model class, config fields in addition to SIZES)
MODEL_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral-sliding": (MistralConfig, MistralForCausalLM, {"sliding_window": 40}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3-some-sliding": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {}),
    # has attention sinks; all layers except the first have sliding windows
    "granite-swa": (
        GraniteSWAConfig,
        GraniteSWAForCausalLM,
        {"sliding_window": 40, "attention_multiplier": 0.25},
    ),
    # has a soft cap of logits, which sdpa ignores in some versions of transformers; the first and
    # the last layer have sliding windows
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "sliding_window": 40,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 16,
            "attn_implementation": "eager",
        },
    ),
    # all layers except the last have chunked attention
    "llama4": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            "attention_chunk_size": 40,
            "no_rope_layer_interval": 3,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "use_qk_norm": False,
        },
    ),
}
# small blocks, so that sequences of a few hundred tokens have many blocks
SMALL_BLOCKS_CONFIG = CabConfig(query_block=32, key_block=16, min_length=0)
FULL_BUDGET_CONFIG = CabConfig(query_block=32, key_block=16, min_length=0, mass_threshold=0.0)
SPARSE_CONFIG = replace(
    SMALL_BLOCKS_CONFIG,
    mass_threshold=0.08,
    share_threshold=0.5,
    outlier_queries=4,
    typical_queries=4,
    # the default, two dense query blocks at the end, would be a large part of a short sequence
    dense_tail_blocks=1,
)
# `SPARSE_CONFIG` as values of the option --cab, without its numbers of outlier and typical queries
SPARSE_ASSIGNMENTS = (
    "query_block=32",
    "key_block=16",
    "mass_threshold=0.08",
    "share_threshold=0.5",
    "dense_tail_blocks=1",
)


def make_tiny_model(family="llama", model_class=None, **config_fields):
    """Return a random model in eval mode whose attention is far from uniform.

    Args:
        family: key of `MODEL_FAMILIES`.
        model_class: class of the model; None: the causal LM of the family.
        config_fields: config fields.
    """
    config_class, causal_lm_class, family_fields = MODEL_FAMILIES[family]
    torch.manual_seed(0)
    model = (model_class or causal_lm_class)(
        config_class(**{**MODEL_SIZES, **family_fields, **config_fields})
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(8.0)
            elif "sinks" in name:
                weight.normal_(std=2.0)
    return model


def make_tiny_llava():
    """Return a random LLaVA model (CLIP image encoder and LLaMA), whose image token id is 2."""
    vision_fields = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    vision_fields |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision_fields),
        text_config=make_tiny_model().config,
        image_token_id=2,
    )
    return LlavaForConditionalGeneration(config).eval()


def draw_token_ids(batch, length, seed=1):
    """Return random token ids, int64 [batch, length]; special tokens (ids 0 to 2) do not occur."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=generator)


def draw_qkv(
    batch=1, heads=6, kv_heads=2, q_length=200, kv_length=None, dim=16, seed=0, **tensor_options
):
    """Return random q, k and v, [B, H, N, D] with the strides of [B, N, H, D].

    ``tensor_options`` has arguments of `Tensor.to`, such as ``dtype``. ``kv_length`` None:
    ``q_length`` keys.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw_tensor(length, num_heads):
        x = torch.randn(batch, length, num_heads, dim, generator=generator)
        return x.to(**tensor_options).transpose(1, 2)

    kv_length = kv_length or q_length
    return (
        draw_tensor(q_length, heads),
        draw_tensor(kv_length, kv_heads),
        draw_tensor(kv_length, kv_heads),
    )
