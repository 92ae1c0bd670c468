"""The attention layers of a model in vLLM: which are sparse, and how their channels rotate."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

from cab_hf.config import CabConfig
from cab_hf.hf.rotary import halved, slow_channels
from cab_hf.predictors.cascade import anchor_of
from cab_hf.vllm import never_sparse, settings_of
from cab_hf.vllm.metrics import METERS, Meter

logger = logging.getLogger("vllm.cab_hf")

# attributes of layers that say whether the layer rotates queries and keys
SWITCHES = ("use_rope", "_use_rope", "use_rotary", "is_local_attention")
# modules of vLLM in whose layers a rotary embedding is applied if one of these attributes is set
APPLIED_IF = {
    "commandr": ("v1", "sliding_window"),
    "cohere2_moe": ("sliding_window", "force_rope"),
    "exaone4": ("sliding_window", "apply_rope_all_layers"),
}


class Layer(nn.Module):
    """The facts that a `Call` reads of a layer.

    Attributes:
        layer_idx: the first number in the layer's name, such as "model.layers.3.self_attn.attn".
        config: the config of the language model.
        slow_channels: the channels by which outliers are scored; () for all channels.
    """

    def __init__(self, name: str, config: Any, slow_channels: tuple[int, ...]) -> None:
        super().__init__()
        self.layer_idx = next((int(x) for x in name.split(".") if x.isdigit()), None)
        self.config = config
        self.slow_channels = slow_channels


def learn(model: nn.Module, vllm_config: Any) -> None:
    """Set the `Layer` of every attention layer of an engine's model, and log how many are sparse.

    Layers of draft models receive no `Layer` and stay dense.

    Raises:
        ValueError: the anchor of a cascade is not sparse in vLLM.
    """
    config = settings_of(vllm_config)
    if config is None:
        return
    text = vllm_config.model_config.hf_text_config
    dense: Counter[str] = Counter()
    sparse: list[Layer] = []
    for owner, attention in attentions(model):
        impl = attention.impl
        reason = why_dense(attention)
        if hasattr(impl, "cab_reason"):
            channels = channels_of(owner, attention)
            impl.cab_layer = Layer(attention.layer_name, text, channels)
            if reason is None and impl.cab_layer.layer_idx in config.dense_layers:
                reason = "in dense_layers"
        if reason is None:
            sparse.append(impl.cab_layer)
        else:
            dense[reason] += 1
    _require_anchors(config, [layer.layer_idx for layer in sparse])
    is_first = get_tensor_model_parallel_rank() == 0
    # every stage of a pipeline computes all prompts, so the first stage counts them
    counts_prompts = is_first and get_pp_group().is_first_rank
    meter = Meter(vllm_config.instance_id, sparse, counts_prompts, is_logged=is_first)
    # ``/metrics`` has the counters before the first prompt
    meter.write(meter.totals())
    METERS[vllm_config.instance_id] = meter
    if is_first and never_sparse(config, vllm_config) is None:
        _log(config, len(sparse), dense)


def why_dense(attention: Any) -> str | None:
    """Return why vLLM's own attention computes a layer; None for a layer that is sparse."""
    if not hasattr(attention.impl, "cab_reason"):
        return "another backend"
    if attention.impl.cab_reason is not None:
        return attention.impl.cab_reason
    # vLLM derives a builder for layers that attend in chunks, or read sinks before each request
    derived = attention.attn_backend.get_builder_cls().__module__ != "cab_hf.vllm.backend"
    return "batches that vLLM rewrites" if derived else None


def attentions(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield (owner, attention layer of vLLM) for every attention layer of a model."""
    # versions before 0.30 keep the layers of models from transformers in a dict
    for owner in model.modules():
        for attention in owner.children():
            if hasattr(attention, "impl") and hasattr(attention, "layer_name"):
                yield owner, attention
        kept = getattr(owner, "attention_instances", None)
        if isinstance(kept, dict):
            owners = {getattr(x, "layer_idx", None): x for x in owner.modules()}
            for index, attention in kept.items():
                yield owners.get(index, owner), attention


def channels_of(owner: nn.Module, attention: Any) -> tuple[int, ...]:
    """Return the slow half of a head's channels, by the rotary embedding that vLLM applies.

    Returns () for a layer without rotary embedding, for one that rotates a part of the channels,
    and for a convention that is not known.
    """
    head_dim = attention.head_size
    if type(owner).__module__.startswith("transformers"):
        return slow_channels(owner, head_dim)
    rotary = next((x for x in owner.children() if hasattr(x, "rotary_dim")), None)
    if rotary is None or not is_rotated(owner):
        return ()
    # proportional embeddings do not rotate some pairs of channels
    partial = rotary.rotary_dim != head_dim or getattr(rotary, "nope_angles", 0)
    if partial or rotary.head_size != head_dim:
        return ()
    return halved(head_dim, interleaved=not getattr(rotary, "is_neox_style", True))


def is_rotated(owner: nn.Module) -> bool:
    """Return whether a layer that has a rotary embedding applies it."""
    if any(getattr(owner, name, True) in (False, 0) for name in SWITCHES):
        return False
    for kind in type(owner).__mro__:
        names = APPLIED_IF.get(kind.__module__.rpartition(".")[2])
        if names is not None:
            return any(getattr(owner, name, None) for name in names)
    config = getattr(owner, "config", None)
    return getattr(config, "use_mem_rope", True) is not False


def _require_anchors(config: CabConfig, sparse: list[int | None]) -> None:
    """Refuse a cascade in which the anchor of a sparse layer is dense."""
    for index in sparse:
        anchor = anchor_of(config, index)
        if anchor is not None and anchor not in sparse:
            raise ValueError(
                f"CabConfig.anchors must be layers that vLLM attends sparsely, got {anchor}, which "
                f"is dense and selects for layer {index}. Remove it, or add an anchor after it."
            )


def _log(config: CabConfig, num_sparse: int, dense: Counter[str]) -> None:
    """Log how many layers are sparse from which length, and why the others are not."""
    reasons = "; ".join(f"{count} dense: {reason}" for reason, count in dense.items())
    total = num_sparse + dense.total()
    if not num_sparse:
        logger.warning("cab_hf: no layer of %d is attended sparsely (%s).", total, reasons)
        return
    details = "; ".join(filter(None, [f"predictor {config.predictor}", reasons]))
    logger.info(
        "cab_hf: %d of %d attention layers are sparse for prompts of %s tokens or more (%s).",
        num_sparse,
        total,
        f"{max(config.min_length, config.query_block):,}",
        details,
    )
