"""`describe` and `stats`: the attention kernels and the measured density of every layer."""

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
from cab_hf.config import CAB, FRC, NAMES, SPARSE, CabConfig, num_typical_queries
from cab_hf.decode.generation import has_index, index_cache, why_no_selection
from cab_hf.decode.step import decode_from
from cab_hf.dispatch import attended
from cab_hf.engines import SDPA, Workload
from cab_hf.hf.fit import softcap
from cab_hf.hf.layers import attention_layers, head_dim, transformers_model, window
from cab_hf.hf.model_config import cab_config_of
from cab_hf.hf.rotary import slow_channels
from cab_hf.ops.decode import index_keys
from cab_hf.predictors.cascade import anchor_of
from cab_hf.route import route


def describe(
    model: PreTrainedModel, tokens: int | None = None, training: bool | None = None
) -> str:
    """Describe how each attention layer would compute a prompt, and why a layer is not sparse.

    Args:
        model: a model of transformers, or a PEFT model around one.
        tokens: length of the prompt; by default the largest length in the config of the model.
        training: True if gradients are computed; by default ``model.training``.

    Returns:
        Lines of text: the settings, consecutive layers that behave alike, decoding (not for
        "cab_dense") and continuous batching. Another line names the GPU if CAB was not measured on
        this kind of GPU. Layers that will raise an error are called "refused".

    Raises:
        ValueError: ``tokens`` is below 1, ``cab_config`` is invalid, or ``model`` is not a model.
    """
    model = transformers_model(model)
    require(tokens is None or is_whole(tokens), "tokens", tokens, "a whole number >= 1, or None")
    is_switch = training is None or isinstance(training, bool)
    require(is_switch, "training", training, "True, False or None")
    text = model.config.get_text_config()
    name = text._attn_implementation
    if name not in NAMES:
        return f"attn_implementation is {name!r}, so cab_hf computes no layer."
    config = cab_config_of(text)
    tokens = tokens or getattr(text, "max_position_embeddings", None) or config.min_length
    training = model.training if training is None else training
    sparse, origin = name in SPARSE, config.origin
    head, calibrated = "cab_dense: exact attention", ""
    if sparse:
        blocks = f"blocks {config.query_block} x {config.key_block}"
        head = f"{name}: predictor {config.predictor}{_budget(config)}, {blocks}"
    if sparse and origin is not None:
        calibrated = f" (calibrated for {origin.model} at {origin.length:,} tokens)"
    lines = [f"{head}; a prompt of {tokens} tokens{calibrated}:"]
    if sparse:
        lines += _gpu(next(model.parameters()).device, model.dtype)
    layers = [
        (_sentence(module, config, model.dtype, tokens, training, sparse), index)
        for index, module in attention_layers(model)
    ]
    if not layers:
        lines.append("  no layer is known to attend causally, and layers that do not are refused.")
    for sentence, run in groupby(layers, key=itemgetter(0)):
        first, *others = [index for _, index in run]
        of = f"layers {first}-{others[-1]}" if others else f"layer {first}"
        if first is None:
            of = "layers that occur several times"
        lines.append(f"  {of}: {sentence}")
    if sparse and layers:
        lines.append(f"  decode: {_decode(model, config)}")
    if layers:
        reason = unbatchable_reason(model)
        how = f"refused, {reason}" if reason else "each sequence by itself, decode dense"
        lines.append(f"  generate_batch: {how}")
    return "\n".join(lines)


def _gpu(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return a line for a GPU of another generation than Hopper, or no line."""
    version = capability.capability(device)
    if version[0] == capability.HOPPER or (device.type != "cuda" and capability.NAMED is None):
        return []
    major, minor = version
    name = "not by NVIDIA" if version == capability.NONE else f"compute capability {major}.{minor}"
    named = "" if capability.NAMED is None else f", as {capability.VARIABLE} says"
    small = version >= capability.FP8 and dtype != torch.float32
    scores = "8 bits" if small else str(dtype).removeprefix("torch.")
    return [f"  GPU: {name}{named}; keys scored in {scores}; nothing was measured on one"]


def _budget(config: CabConfig) -> str:
    """Describe which blocks the predictor selects; nothing for predictors of other packages."""
    if config.predictor == FRC:
        return f" ({config.curvature}: sparsity {config.sparsity})"
    if config.predictor not in CAB:
        return ""
    scored = f"{config.outlier_queries} outlier queries and {num_typical_queries(config)} typical"
    stride = config.typical_key_stride
    scored += f" queries on every {stride}th key" if stride > 3 else " queries"
    scored += {2: " on every 2nd key"}.get(stride, "")
    kept = f"mass_threshold {config.mass_threshold}, share_threshold {config.share_threshold}"
    anchors = f"{len(config.anchors)} anchors, " if config.predictor == "cascade" else ""
    return f" ({anchors}{scored}, {kept})"


def _chosen(config: CabConfig, module: nn.Module) -> str:
    """Describe where a layer of a cascade gets its blocks."""
    layer = getattr(module, "layer_idx", None)
    if config.predictor != "cascade" or layer is None:
        return ""
    anchor = anchor_of(config, layer)
    if anchor is None:
        return ", refused: no anchor before it"
    return ", an anchor" if anchor == layer else f", the blocks of layer {anchor}"


def _decode(model: PreTrainedModel, config: CabConfig) -> str:
    """Describe the keys that a decode step reads, and the size of the index."""
    if not config.sparse_decode:
        return "dense"
    least, tokens = decode_from(config), config.decode_tokens
    if least is None:
        return f"dense, decode_tokens {tokens} is too large a share of the keys to save time"
    layers, whys = list(attention_layers(model)), {}
    refused = next(filter(None, (unsupported_reason(module) for _, module in layers)), None)
    if refused is not None:
        return f"refused, {refused}"
    try:
        indexed_cache = index_cache(model)
    except AttributeError:
        # the config does not contain the number of layers
        return "dense, transformers makes no cache for this model"
    cache = index = 0
    for layer, module in layers:
        dim = head_dim(module)
        # only the shape matters: nothing is computed
        key = torch.empty(1, 1, 1, dim, dtype=model.dtype, device="meta")
        cache += (dim + getattr(module, "v_head_dim", dim)) * key.element_size()
        why = why_no_selection(module, config)
        if why is None and not has_index(indexed_cache, layer):
            why = "their cache layers cannot have an index"
        if why is None:
            index += index_keys(key, slow_channels(module, dim)).nbytes
        else:
            whys[why] = None
    if not index:
        return f"dense, no layer selects keys ({'; '.join(whys)})"
    keys = f"{tokens} keys" if isinstance(tokens, int) else f"{tokens} of the keys"
    return (
        f"sparse, {keys} per KV head, from {least} tokens on, if the cache has an index of "
        f"{index / cache:.3f} of its bytes (generate() makes one, index_cache(model, cache) adds "
        "one); dense with any other cache"
    )


def stats(model: PreTrainedModel, reset: bool = False) -> list[dict[str, Any]]:
    """Return the measured density of every layer over all sparse calls since the last reset.

    Density is attended (query, key) pairs divided by causal pairs, including blocks that training
    samples. Dense calls, decode steps and calls inside ``torch.compile`` do not count. Reading the
    counts is a device sync.

    Args:
        model: a model of transformers, or a PEFT model around one.
        reset: True to reset all counts after reading.

    Returns:
        ``{"layer": index, "density": float or None}`` for each attention layer, in order. The
        density is None if the layer had no sparse call.

    Raises:
        ValueError: ``model`` is not a model.
    """
    rows = []
    for index, module in attention_layers(transformers_model(model)):
        pairs = attended.pop(module, None) if reset else attended.get(module)
        seen, causal = (0, 0) if pairs is None else pairs.tolist()
        density = None if pairs is None else seen / max(1, causal)
        rows.append({"layer": index, "density": density})
    return rows


def _sentence(
    module: nn.Module,
    config: CabConfig,
    dtype: torch.dtype,
    tokens: int,
    training: bool,
    sparse: bool,
) -> str:
    reason = unsupported_reason(module)
    if reason is not None:
        return f"refused, {reason}"
    device = next(module.parameters()).device.type
    work = Workload(
        device,
        head_dim(module),
        dtype,
        training,
        query_block=config.query_block,
        key_block=config.key_block,
        sinks=getattr(module, "sinks", None) is not None,
        softcap=softcap(module) is not None,
    )
    prompt = MaskInfo(1, tokens, tokens, 0, window=window(module))
    chosen = route(prompt, config, work, sparse=sparse, layer=module)
    if chosen.method == "sparse":
        text = f"sparse, engine {chosen.engine.label(work)}{_chosen(config, module)}"
        if training and config.sampled_one_in:
            text += f", 1 in {config.sampled_one_in} of the other blocks sampled"
    else:
        # the engine is named if it is not the usual one
        how = [] if chosen.reason and chosen.engine is SDPA else [chosen.engine.name]
        text = ", ".join(["dense", *([chosen.reason] if chosen.reason else []), *how])
    causal = getattr(module, "is_causal", True)
    return text if causal else f"{text}; refused unless its model calls it causal"
