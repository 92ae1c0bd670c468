"""Tiny random models of all causal language model types in transformers.

A tiny config is the default config of its type with reduced sizes (`FIELD_SIZES`), also in nested
configs. A list with an entry per layer is replaced by a cycle of its different entries.
`FIELD_OVERRIDES` has further fields for types whose tiny config would be invalid otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

# token ids from 0 to 31 may be special tokens
FIRST_REGULAR_TOKEN = 32
# each line: a size, and the config fields that are set to the size; sliding windows are shorter
# than the sequences of tests
FIELD_SIZE_TABLE = """
64 hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size
64 output_embedding_size word_embed_proj_dim lru_width hidden_size_global backbone_hidden_size
64 out_hidden_size adapter_in_dim adapter_out_dim adapter_input_size dim_model_base
64 projector_input_dim projector_output_dim ple_embed_dim router_hidden_size
64 intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner d_ff dff dim_ff n_inner
64 mlp_dim feed_forward_size ffn_hidden_size expert_ffn_hidden_size moe_intermediate_size
64 intermediate_size_mlp dense_intermediate_size shared_intermediate_size
64 shared_expert_intermediate_size shared_experts_intermediate_size
64 moe_shared_expert_intermediate_size hidden_size_per_layer_input
128 attention_hidden_size mamba_d_ssm
4 num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks
4 num_decoder_layers num_encoder_layers depth max_window_layers conf_num_hidden_layers
4 num_global_layers
4 num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads
4 attention_heads num_decoder_attention_heads num_encoder_attention_heads
4 swa_num_attention_heads conf_num_attention_heads index_n_heads linear_num_heads
4 linear_num_value_heads
4 num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num
2 num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads
2 num_experts_per_tok moe_k moe_top_k moe_topk index_topk_blocks
2 sliding_window_pattern attn_layer_period attn_layer_offset layer_group_size
2 global_attn_every_n_layers no_rope_layer_interval num_kv_shared_layers
1 n_group topk_group n_groups mamba_n_groups mamba_ngroups n_shared_experts num_shared_experts
1 moe_num_shared_experts first_k_dense_replace num_dense_layers moe_layer_start_index
16 head_dim d_kv d_head dim_head attention_head_size kv_channels swa_head_dim d_rel
16 linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim qk_nope_head_dim
16 qk_rope_head_dim v_head_dim query_pre_attn_scalar state_size ssm_state_size mamba_d_state
16 mamba_d_head mamba_head_dim chunk_size mamba_chunk_size index_block_size
32 qk_head_dim kv_lora_rank q_lora_rank o_lora_rank attention_head_dim index_topk
8 rotary_dim mamba_n_heads mamba_num_heads n_mamba_heads time_step_rank mamba_dt_rank
8 laurel_rank adapter_rank hc_lowrank gated_norm_rank
128 vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size
128 unpadded_vocab_size pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab
128 ngram_vocab_size_base
512 max_position_embeddings n_positions n_ctx max_seq_len max_target_positions
512 max_source_positions context_length original_max_position_embeddings
512 position_bias_max_distance floor_scale log_scaling_n_floor
64 sliding_window sliding_window_size attention_window_size window_size local_attention
64 attention_chunk_size local_attention_window_len rel_extent keep_window_size
"""
FIELD_SIZES = {
    field_name: int(field_size)
    for field_size, *field_names in map(str.split, FIELD_SIZE_TABLE.strip().splitlines())
    for field_name in field_names
}
NUM_LAYERS, NUM_HEADS = FIELD_SIZES["num_hidden_layers"], FIELD_SIZES["num_attention_heads"]
NUM_KV_HEADS, HEAD_DIM, HIDDEN_SIZE = (
    FIELD_SIZES["num_key_value_heads"],
    FIELD_SIZES["head_dim"],
    FIELD_SIZES["hidden_size"],
)
VOCAB_SIZE, WINDOW_TOKENS = FIELD_SIZES["vocab_size"], FIELD_SIZES["sliding_window"]
# fields that are set to their size even if their default is None
ALWAYS_SET_FIELDS = ("head_dim", "num_key_value_heads")
LAYER_TYPES = ("sliding_attention", "full_attention")
ROPE_PARAMETERS = {"rope_type": "default", "rope_theta": 10_000.0}
ALTERNATING_LAYER_TYPES = list(LAYER_TYPES) * (NUM_LAYERS // 2)
# by type: config fields that override the reduced config
FIELD_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"use_cache": False},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(LAYER_TYPES, ROPE_PARAMETERS)},
    "dbrx": {"attn_config": {"kv_n_heads": NUM_KV_HEADS, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        **{"swa_num_attention_heads": NUM_HEADS, "swa_num_key_value_heads": NUM_HEADS},
        **{"swa_q_lora_rank": 2 * HEAD_DIM, "swa_kv_lora_rank": 2 * HEAD_DIM},
        **{"swa_head_dim": 2 * HEAD_DIM, "swa_qk_nope_head_dim": HEAD_DIM},
        **{"swa_v_head_dim": HEAD_DIM},
    },
    "gemma4_text": {"global_head_dim": 2 * HEAD_DIM},
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * (NUM_LAYERS // 2)},
    "jamba": {"attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * (NUM_LAYERS // 2)
    },
    "ministral": {"layer_types": ALTERNATING_LAYER_TYPES},
    # no sliding windows by default; `make_window_fields` adds sliding windows
    "mistral": {"sliding_window": None},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "qwen4_exp_text": {
        **{"indexer_n_heads": NUM_HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM},
        **{"indexer_budget": 64, "indexer_compress_ratio": 8},
    },
    "reformer": {"axial_pos_embds": False, "hash_seed": 0},
    "rwkv": {"attention_hidden_size": HIDDEN_SIZE},
    "xlstm": {"hidden_size": 2 * HIDDEN_SIZE, "embedding_dim": 2 * HIDDEN_SIZE},
    "xmod": {"default_language": "en_XX"},
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"] * (NUM_LAYERS // 2),
        "sliding_window": WINDOW_TOKENS,
    },
}


def list_causal_types() -> list[str]:
    """Return the sorted model types that `AutoModelForCausalLM` supports."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING))


def make_tiny_config(model_type: str, **config_fields: Any) -> PreTrainedConfig:
    """Return a config with few layers and heads, a small vocabulary, and ``config_fields``."""
    config = _reduce_config(CONFIG_MAPPING[model_type](), config_fields)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def make_window_fields(model_type: str) -> dict[str, Any]:
    """Return arguments of `make_tiny_config` that turn on sliding windows.

    Returns {} if the type has no field for windows, or if its tiny config has windows already.
    """
    config = make_tiny_config(model_type)
    field_names = {field.name for field in dataclasses.fields(config)}
    config_values = vars(config)
    layer_types = set(config_values.get("layer_types") or ())
    window_fields = {"sliding_window": WINDOW_TOKENS, "use_sliding_window": True}
    if layer_types == {"full_attention"}:
        window_fields["layer_types"] = ALTERNATING_LAYER_TYPES
    elif layer_types or (
        getattr(config, "use_sliding_window", True) and config_values.get("sliding_window")
    ):
        return {}
    return {
        field_name: window_fields[field_name]
        for field_name in window_fields
        if field_name in field_names and "sliding_window" in field_names
    }


def _reduce_config(
    default_config: PreTrainedConfig, override_fields: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """Return a reduced copy of ``default_config``, with ``override_fields``."""
    # read vars(), because some properties raise an error if a value differs between layers
    default_values = vars(default_config)
    num_layers = default_values.get("num_hidden_layers")
    reduced_fields: dict[str, Any] = {}
    for field_name in (field.name for field in dataclasses.fields(default_config)):
        default_value = default_values.get(field_name)
        if isinstance(default_value, PreTrainedConfig):
            reduced_fields[field_name] = _reduce_config(default_value)
        elif isinstance(default_value, list | tuple) and len(default_value) == num_layers:
            reduced_fields[field_name] = (
                [FIELD_SIZES[field_name]] * NUM_LAYERS
                if field_name in FIELD_SIZES
                else _cycle_entries(default_value)
            )
        elif field_name in ALWAYS_SET_FIELDS or (
            default_value and isinstance(default_value, int) and not isinstance(default_value, bool)
        ):
            reduced_fields |= _reduce_number(field_name, default_value)
    if "kv_lora_rank" in reduced_fields:
        # multi-head latent attention has as many KV heads as query heads
        reduced_fields["num_key_value_heads"] = NUM_HEADS
    return type(default_config)(
        **{
            **reduced_fields,
            **FIELD_OVERRIDES.get(default_config.model_type, {}),
            **(override_fields or {}),
        }
    )


def _reduce_number(field_name: str, default_value: int | None) -> dict[str, int]:
    """Return {name: reduced value} for an integer field; {} to keep its default."""
    if field_name in FIELD_SIZES:
        return {field_name: FIELD_SIZES[field_name]}
    is_token_id = field_name.endswith(("token_id", "token_index"))
    return {field_name: default_value % FIRST_REGULAR_TOKEN} if is_token_id else {}


def _cycle_entries(layer_entries: list[Any] | tuple[Any, ...]) -> list[Any]:
    """Return a list of `NUM_LAYERS` entries that repeats the different entries in turn."""
    distinct_entries = [
        entry for index, entry in enumerate(layer_entries) if entry not in layer_entries[:index]
    ]
    return [distinct_entries[layer % len(distinct_entries)] for layer in range(NUM_LAYERS)]


def make_tiny_model(model_type: str, **config_fields: Any) -> PreTrainedModel:
    """Return a random float32 model of `make_tiny_config` whose attention is far from uniform.

    With the default initialisation, attention is nearly uniform, and tests would not detect errors
    of attention in the logits.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    torch.manual_seed(0)
    config = _select_config(model_class, make_tiny_config(model_type, **config_fields))
    model = model_class._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D):
                num_inputs = module.weight.shape[isinstance(module, nn.Linear)]
                module.weight.normal_(std=num_inputs**-0.5)
    return model


def _select_config(
    model_class: type[PreTrainedModel], config: PreTrainedConfig
) -> PreTrainedConfig:
    """Return ``config``, or the nested config that ``model_class`` needs."""
    config_class = model_class.config_class
    nested_configs = (
        nested_config
        for nested_config in vars(config).values()
        if isinstance(nested_config, config_class)
    )
    return config if isinstance(config, config_class) else next(nested_configs, config)
