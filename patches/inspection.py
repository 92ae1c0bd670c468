"""`describe` and `stats`: report how every layer computes attention, and its measured density."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cab_hf import capability
from cab_hf.batching.served import find_unbatchable_reason
from cab_hf.call.mask import MaskInfo
from cab_hf.call.validate import find_unsupported_feature
from cab_hf.checks import is_whole_number, require
from cab_hf.config import (
    CAB_PREDICTORS,
    FRC_PREDICTOR,
    IMPLEMENTATION_NAMES,
    SPARSE_IMPLEMENTATIONS,
    CabConfig,
    num_typical_queries,
)
from cab_hf.decode.generation import has_index, index_cache, why_no_selection
from cab_hf.decode.step import min_sparse_tokens
from cab_hf.dispatch import attended_pairs
from cab_hf.engines import SDPA, Workload
from cab_hf.hf.fit import read_int_field, softcap
from cab_hf.hf.layers import attention_layers, head_dim, transformers_model, window
from cab_hf.hf.model_config import cab_config_of
from cab_hf.hf.rotary import slow_channels
from cab_hf.ops.decode import index_keys
from cab_hf.predictors.cascade import find_anchor
from cab_hf.route import route


def describe(
    model: PreTrainedModel, tokens: int | None = None, training: bool | None = None
) -> str:
    """Describe how each attention layer would compute a prompt, and why a layer is not sparse.

    Args:
        model: a model of transformers, or a PEFT model around one.
        tokens: length of the prompt; by default the largest length in the config of the model.
        training: True to describe a forward pass with gradients; by default ``model.training``.

    Returns:
        Lines of text: the settings, a line for consecutive layers with the same computation, a line
        for decoding (not for "cab_dense") and a line for continuous batching. If CAB was not
        measured on this kind of GPU, a line names the GPU. The line of a layer that will raise an
        error contains the word "refused".

    Raises:
        ValueError: ``tokens`` is below 1, ``cab_config`` is invalid, or ``model`` is not a model.
    """
    model = transformers_model(model)
    require(
        tokens is None or is_whole_number(tokens), "tokens", tokens, "a whole number >= 1, or None"
    )
    is_bool_or_none = training is None or isinstance(training, bool)
    require(is_bool_or_none, "training", training, "True, False or None")
    text_config = model.config.get_text_config()
    implementation = text_config._attn_implementation
    if implementation not in IMPLEMENTATION_NAMES:
        return f"attn_implementation is {implementation!r}, so cab_hf computes no layer."
    config = cab_config_of(text_config)
    tokens = tokens or getattr(text_config, "max_position_embeddings", None) or config.min_length
    training = model.training if training is None else training
    is_sparse = implementation in SPARSE_IMPLEMENTATIONS
    description_lines = [_format_settings_line(implementation, config, tokens)]
    if is_sparse:
        description_lines += _make_gpu_lines(next(model.parameters()).device, model.dtype)
    described_layers = [
        (
            _describe_layer(
                module,
                config,
                model.dtype,
                prompt_tokens=tokens,
                is_training=training,
                is_sparse=is_sparse,
            ),
            layer_index,
        )
        for layer_index, module in attention_layers(model)
    ]
    if not described_layers:
        description_lines.append(
            "  no layer is known to attend causally, and layers that do not are refused."
        )
    for description, equal_layers in groupby(described_layers, key=itemgetter(0)):
        first_layer_index, *other_layer_indices = [layer_index for _, layer_index in equal_layers]
        layers_text = (
            f"layers {first_layer_index}-{other_layer_indices[-1]}"
            if other_layer_indices
            else f"layer {first_layer_index}"
        )
        if first_layer_index is None:
            layers_text = "layers that occur several times"
        description_lines.append(f"  {layers_text}: {description}")
    if is_sparse and described_layers:
        description_lines.append(f"  decode: {_describe_decode(model, config)}")
    if described_layers:
        refusal_reason = find_unbatchable_reason(model)
        batching_text = (
            f"refused, {refusal_reason}"
            if refusal_reason
            else "each sequence by itself, decode dense"
        )
        description_lines.append(f"  generate_batch: {batching_text}")
    return "\n".join(description_lines)


def _format_settings_line(implementation: str, config: CabConfig, prompt_tokens: int) -> str:
    """Return the first line of `describe`: attention implementation, settings, prompt length."""
    if implementation not in SPARSE_IMPLEMENTATIONS:
        return f"cab_dense: exact attention; a prompt of {prompt_tokens} tokens:"
    block_size_text = f"blocks {config.query_block} x {config.key_block}"
    calibration_origin = config.origin
    calibration_text = ""
    if calibration_origin is not None:
        calibration_text = (
            f" (calibrated for {calibration_origin.model} at {calibration_origin.length:,} tokens)"
        )
    settings_text = (
        f"{implementation}: predictor {config.predictor}{_format_budget(config)}, {block_size_text}"
    )
    return f"{settings_text}; a prompt of {prompt_tokens} tokens{calibration_text}:"


def _make_gpu_lines(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return a list with the line of `describe` about a GPU on which CAB was not measured.

    The list is empty on Hopper, the measured architecture, and on a CPU without
    $CAB_HF_CAPABILITY.

    Args:
        device: device of the model.
        dtype: dtype of the model.
    """
    gpu_capability = capability.capability(device)
    if gpu_capability[0] == capability.HOPPER or (
        device.type != "cuda" and capability.CAPABILITY_OVERRIDE is None
    ):
        return []
    major, minor = gpu_capability
    capability_text = (
        "not by NVIDIA"
        if gpu_capability == capability.NO_CAPABILITY
        else f"compute capability {major}.{minor}"
    )
    override_text = (
        ""
        if capability.CAPABILITY_OVERRIDE is None
        else f", as {capability.CAPABILITY_VARIABLE} says"
    )
    has_8_bit_scores = gpu_capability >= capability.FP8_CAPABILITY and dtype != torch.float32
    score_dtype_text = "8 bits" if has_8_bit_scores else str(dtype).removeprefix("torch.")
    return [
        f"  GPU: {capability_text}{override_text}; keys scored in {score_dtype_text}; nothing "
        "was measured on one"
    ]


def _format_budget(config: CabConfig) -> str:
    """Return the settings that limit the selected blocks; "" for predictors of other packages."""
    if config.predictor == FRC_PREDICTOR:
        return f" ({config.curvature}: sparsity {config.sparsity})"
    if config.predictor not in CAB_PREDICTORS:
        return ""
    sampled_queries_text = (
        f"{config.outlier_queries} outlier queries and {num_typical_queries(config)} typical"
    )
    key_stride = config.typical_key_stride
    sampled_queries_text += (
        f" queries on every {key_stride}th key" if key_stride > 3 else " queries"
    )
    sampled_queries_text += {2: " on every 2nd key"}.get(key_stride, "")
    threshold_text = (
        f"mass_threshold {config.mass_threshold}, share_threshold {config.share_threshold}"
    )
    anchor_text = f"{len(config.anchors)} anchors, " if config.predictor == "cascade" else ""
    return f" ({anchor_text}{sampled_queries_text}, {threshold_text})"


def _format_anchor(config: CabConfig, module: nn.Module) -> str:
    """Return the words of `describe` about the anchor of a layer; "" without a cascade.

    The anchor is the layer of the cascade that selects the blocks of this layer.
    """
    layer_index = getattr(module, "layer_idx", None)
    if config.predictor != "cascade" or layer_index is None:
        return ""
    anchor_index = find_anchor(config, layer_index)
    if anchor_index is None:
        return ", refused: no anchor before it"
    return ", an anchor" if anchor_index == layer_index else f", the blocks of layer {anchor_index}"


def _describe_decode(model: PreTrainedModel, config: CabConfig) -> str:
    """Return the words of `describe` about decode steps.

    They give the number of keys that a sparse step reads and the size of the index of keys, or the
    reason why decode steps are dense.
    """
    if not config.sparse_decode:
        return "dense"
    min_tokens, decode_tokens = min_sparse_tokens(config), config.decode_tokens
    if min_tokens is None:
        return f"dense, decode_tokens {decode_tokens} is too large a share of the keys to save time"
    attention_modules = list(attention_layers(model))
    # a dict without values, as an ordered set
    dense_reasons: dict[str, None] = {}
    refusal_reason = next(
        filter(None, (find_unsupported_feature(module) for _, module in attention_modules)), None
    )
    if refusal_reason is not None:
        return f"refused, {refusal_reason}"
    try:
        indexed_cache = index_cache(model)
    except AttributeError:
        # the config does not contain the number of layers
        return "dense, transformers makes no cache for this model"
    # bytes per token and KV head, summed over layers
    cache_bytes = index_bytes = 0
    for layer_index, module in attention_modules:
        key_dim = head_dim(module)
        # on the meta device, because only the shape of the index is needed
        sample_key = torch.empty(1, 1, 1, key_dim, dtype=model.dtype, device="meta")
        cache_bytes += (
            key_dim + getattr(module, "v_head_dim", key_dim)
        ) * sample_key.element_size()
        dense_reason = why_no_selection(module, config)
        if dense_reason is None and not has_index(indexed_cache, layer_index):
            dense_reason = "their cache layers cannot have an index"
        if dense_reason is None:
            index_bytes += index_keys(sample_key, slow_channels(module, key_dim)).nbytes
        else:
            dense_reasons[dense_reason] = None
    if not index_bytes:
        return f"dense, no layer selects keys ({'; '.join(dense_reasons)})"
    num_keys_text = (
        f"{decode_tokens} keys"
        if isinstance(decode_tokens, int)
        else f"{decode_tokens} of the keys"
    )
    return (
        f"sparse, {num_keys_text} per KV head, from {min_tokens} tokens on, if the cache has an "
        f"index of {index_bytes / cache_bytes:.3f} of its bytes (generate() makes one, "
        "index_cache(model, cache) adds one); dense with any other cache"
    )


def stats(model: PreTrainedModel, reset: bool = False) -> list[dict[str, Any]]:
    """Return the measured density of every layer over all sparse calls since the last reset.

    Density is the number of attended (query, key) pairs divided by the number of causal pairs.
    Attended pairs include blocks that training samples at random. Dense calls, decode steps and
    calls inside ``torch.compile`` do not count. Reading the counts synchronises with the device.

    Args:
        model: a model of transformers, or a PEFT model around one.
        reset: True to reset all counts after reading.

    Returns:
        ``{"layer": index, "density": float or None}`` for each attention layer, in order. The
        density is None if the layer had no sparse call.

    Raises:
        ValueError: ``model`` is not a model.
    """
    density_rows = []
    for layer_index, module in attention_layers(transformers_model(model)):
        pair_counts = attended_pairs.pop(module, None) if reset else attended_pairs.get(module)
        num_attended, num_causal = (0, 0) if pair_counts is None else pair_counts.tolist()
        density = None if pair_counts is None else num_attended / max(1, num_causal)
        density_rows.append({"layer": layer_index, "density": density})
    return density_rows


def _describe_layer(
    module: nn.Module,
    config: CabConfig,
    dtype: torch.dtype,
    *,
    prompt_tokens: int,
    is_training: bool,
    is_sparse: bool,
) -> str:
    """Return the words of `describe` about one attention layer.

    Args:
        module: the attention layer.
        config: the settings.
        dtype: dtype of q, k and v.
        prompt_tokens: tokens of the prompt.
        is_training: True to describe a forward pass with gradients.
        is_sparse: True for "cab" and "cab_frc", False for "cab_dense".
    """
    refusal_reason = find_unsupported_feature(module)
    if refusal_reason is not None:
        return f"refused, {refusal_reason}"
    workload = Workload(
        device=next(module.parameters()).device.type,
        head_dim=head_dim(module),
        dtype=dtype,
        training=is_training,
        query_block=config.query_block,
        key_block=config.key_block,
        sinks=getattr(module, "sinks", None) is not None,
        softcap=softcap(module) is not None,
        num_heads=read_int_field(module.config, "num_attention_heads"),
    )
    prompt_mask = MaskInfo(
        batch=1, q_length=prompt_tokens, kv_length=prompt_tokens, q_offset=0, window=window(module)
    )
    chosen_route = route(prompt_mask, config, workload, is_sparse=is_sparse, layer=module)
    if chosen_route.method == "sparse":
        description = (
            f"sparse, engine {chosen_route.engine.label(workload)}{_format_anchor(config, module)}"
        )
        if is_training and config.sampled_one_in:
            description += f", 1 in {config.sampled_one_in} of the other blocks sampled"
    else:
        description_parts = ["dense"]
        if chosen_route.dense_reason:
            description_parts.append(chosen_route.dense_reason)
        # if a reason is shown, SDPA is the usual kernel and is not named
        if not chosen_route.dense_reason or chosen_route.engine is not SDPA:
            description_parts.append(chosen_route.engine.name)
        description = ", ".join(description_parts)
    is_causal = getattr(module, "is_causal", True)
    return description if is_causal else f"{description}; refused unless its model calls it causal"
