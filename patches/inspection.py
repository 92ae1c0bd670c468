"""`describe` and `stats`: report how every layer computes attention, and its measured density."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cab_hf import capability
from cab_hf.batching.served import unbatchable_reason
from cab_hf.call.mask import MaskInfo
from cab_hf.call.validate import unsupported_reason
from cab_hf.checks import is_whole, require
from cab_hf.config import (
    CAB_PREDICTORS,
    FRC_PREDICTOR,
    NAMES,
    SPARSE,
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
    require(tokens is None or is_whole(tokens), "tokens", tokens, "a whole number >= 1, or None")
    is_switch = training is None or isinstance(training, bool)
    require(is_switch, "training", training, "True, False or None")
    text_config = model.config.get_text_config()
    name = text_config._attn_implementation
    if name not in NAMES:
        return f"attn_implementation is {name!r}, so cab_hf computes no layer."
    config = cab_config_of(text_config)
    tokens = tokens or getattr(text_config, "max_position_embeddings", None) or config.min_length
    training = model.training if training is None else training
    is_sparse = name in SPARSE
    lines = [_settings_line(name, config, tokens)]
    if is_sparse:
        lines += _gpu_lines(next(model.parameters()).device, model.dtype)
    layers = [
        (
            _layer_text(
                module, config, model.dtype, tokens=tokens, training=training, sparse=is_sparse
            ),
            index,
        )
        for index, module in attention_layers(model)
    ]
    if not layers:
        lines.append("  no layer is known to attend causally, and layers that do not are refused.")
    for description, equal_layers in groupby(layers, key=itemgetter(0)):
        first_index, *other_indices = [index for _, index in equal_layers]
        subject = (
            f"layers {first_index}-{other_indices[-1]}" if other_indices else f"layer {first_index}"
        )
        if first_index is None:
            subject = "layers that occur several times"
        lines.append(f"  {subject}: {description}")
    if is_sparse and layers:
        lines.append(f"  decode: {_decode_text(model, config)}")
    if layers:
        reason = unbatchable_reason(model)
        batching = f"refused, {reason}" if reason else "each sequence by itself, decode dense"
        lines.append(f"  generate_batch: {batching}")
    return "\n".join(lines)


def _settings_line(name: str, config: CabConfig, tokens: int) -> str:
    """Return the first line of `describe`: attention implementation, settings, prompt length."""
    if name not in SPARSE:
        return f"cab_dense: exact attention; a prompt of {tokens} tokens:"
    block_text = f"blocks {config.query_block} x {config.key_block}"
    origin = config.origin
    calibration_text = ""
    if origin is not None:
        calibration_text = f" (calibrated for {origin.model} at {origin.length:,} tokens)"
    settings_text = f"{name}: predictor {config.predictor}{_budget_text(config)}, {block_text}"
    return f"{settings_text}; a prompt of {tokens} tokens{calibration_text}:"


def _gpu_lines(device: torch.device, dtype: torch.dtype) -> list[str]:
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
    source_text = (
        ""
        if capability.CAPABILITY_OVERRIDE is None
        else f", as {capability.CAPABILITY_VARIABLE} says"
    )
    has_8_bit_scores = gpu_capability >= capability.FP8_CAPABILITY and dtype != torch.float32
    score_text = "8 bits" if has_8_bit_scores else str(dtype).removeprefix("torch.")
    return [
        f"  GPU: {capability_text}{source_text}; keys scored in {score_text}; nothing was measured "
        "on one"
    ]


def _budget_text(config: CabConfig) -> str:
    """Return the settings that limit the selected blocks; "" for predictors of other packages."""
    if config.predictor == FRC_PREDICTOR:
        return f" ({config.curvature}: sparsity {config.sparsity})"
    if config.predictor not in CAB_PREDICTORS:
        return ""
    sample_text = (
        f"{config.outlier_queries} outlier queries and {num_typical_queries(config)} typical"
    )
    stride = config.typical_key_stride
    sample_text += f" queries on every {stride}th key" if stride > 3 else " queries"
    sample_text += {2: " on every 2nd key"}.get(stride, "")
    limit_text = f"mass_threshold {config.mass_threshold}, share_threshold {config.share_threshold}"
    anchor_text = f"{len(config.anchors)} anchors, " if config.predictor == "cascade" else ""
    return f" ({anchor_text}{sample_text}, {limit_text})"


def _anchor_text(config: CabConfig, module: nn.Module) -> str:
    """Return the words of `describe` about the anchor of a layer; "" without a cascade.

    The anchor is the layer of the cascade that selects the blocks of this layer.
    """
    layer = getattr(module, "layer_idx", None)
    if config.predictor != "cascade" or layer is None:
        return ""
    anchor = find_anchor(config, layer)
    if anchor is None:
        return ", refused: no anchor before it"
    return ", an anchor" if anchor == layer else f", the blocks of layer {anchor}"


def _decode_text(model: PreTrainedModel, config: CabConfig) -> str:
    """Return the words of `describe` about decode steps.

    They give the number of keys that a sparse step reads and the size of the index of keys, or the
    reason why decode steps are dense.
    """
    if not config.sparse_decode:
        return "dense"
    min_tokens, decode_tokens = min_sparse_tokens(config), config.decode_tokens
    if min_tokens is None:
        return f"dense, decode_tokens {decode_tokens} is too large a share of the keys to save time"
    layers = list(attention_layers(model))
    # a dict without values, as an ordered set
    dense_reasons: dict[str, None] = {}
    refusal_reason = next(filter(None, (unsupported_reason(module) for _, module in layers)), None)
    if refusal_reason is not None:
        return f"refused, {refusal_reason}"
    try:
        indexed_cache = index_cache(model)
    except AttributeError:
        # the config does not contain the number of layers
        return "dense, transformers makes no cache for this model"
    # bytes per token and KV head, summed over layers
    cache_bytes = index_bytes = 0
    for layer, module in layers:
        key_dim = head_dim(module)
        # on the meta device, because only the shape of the index is needed
        key = torch.empty(1, 1, 1, key_dim, dtype=model.dtype, device="meta")
        cache_bytes += (key_dim + getattr(module, "v_head_dim", key_dim)) * key.element_size()
        reason = why_no_selection(module, config)
        if reason is None and not has_index(indexed_cache, layer):
            reason = "their cache layers cannot have an index"
        if reason is None:
            index_bytes += index_keys(key, slow_channels(module, key_dim)).nbytes
        else:
            dense_reasons[reason] = None
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
    for index, module in attention_layers(transformers_model(model)):
        pair_counts = attended_pairs.pop(module, None) if reset else attended_pairs.get(module)
        num_attended, num_causal = (0, 0) if pair_counts is None else pair_counts.tolist()
        density = None if pair_counts is None else num_attended / max(1, num_causal)
        density_rows.append({"layer": index, "density": density})
    return density_rows


def _layer_text(
    module: nn.Module,
    config: CabConfig,
    dtype: torch.dtype,
    *,
    tokens: int,
    training: bool,
    sparse: bool,
) -> str:
    """Return the words of `describe` about one attention layer.

    Args:
        module: the attention layer.
        config: the settings.
        dtype: dtype of q, k and v.
        tokens: tokens of the prompt.
        training: True to describe a forward pass with gradients.
        sparse: True for "cab" and "cab_frc", False for "cab_dense".
    """
    reason = unsupported_reason(module)
    if reason is not None:
        return f"refused, {reason}"
    work = Workload(
        device=next(module.parameters()).device.type,
        head_dim=head_dim(module),
        dtype=dtype,
        training=training,
        query_block=config.query_block,
        key_block=config.key_block,
        sinks=getattr(module, "sinks", None) is not None,
        softcap=softcap(module) is not None,
        num_heads=read_int_field(module.config, "num_attention_heads"),
    )
    prompt_mask = MaskInfo(
        batch=1, q_length=tokens, kv_length=tokens, q_offset=0, window=window(module)
    )
    chosen_route = route(prompt_mask, config, work, sparse=sparse, layer=module)
    if chosen_route.method == "sparse":
        description = (
            f"sparse, engine {chosen_route.engine.label(work)}{_anchor_text(config, module)}"
        )
        if training and config.sampled_one_in:
            description += f", 1 in {config.sampled_one_in} of the other blocks sampled"
    else:
        description_parts = ["dense"]
        if chosen_route.reason:
            description_parts.append(chosen_route.reason)
        # if a reason is shown, SDPA is the usual kernel and is not named
        if not chosen_route.reason or chosen_route.engine is not SDPA:
            description_parts.append(chosen_route.engine.name)
        description = ", ".join(description_parts)
    is_causal = getattr(module, "is_causal", True)
    return description if is_causal else f"{description}; refused unless its model calls it causal"
