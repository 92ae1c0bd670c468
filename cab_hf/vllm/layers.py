"""Registration of the attention layers of a loaded vLLM model.

The functions find out which layers are dense and why, and which channels have low rotary
frequencies.
"""

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

# attributes of attention modules that are False or 0 if the module does not rotate queries and keys
SWITCHES = ("use_rope", "_use_rope", "use_rotary", "is_local_attention")
# key: name of a model file of vLLM. Value: names of attributes of the attention modules in the
# file. A module applies its rotary embedding only if one of these attributes is set
APPLIED_IF = {
    "commandr": ("v1", "sliding_window"),
    "cohere2_moe": ("sliding_window", "force_rope"),
    "exaone4": ("sliding_window", "apply_rope_all_layers"),
}


class Layer(nn.Module):
    """The attributes of an attention layer that a `Call` reads.

    Attributes:
        layer_idx: index of the layer, the first number in its name, such as 3 in
            "model.layers.3.self_attn.attn"; None if the name has no number.
        config: the config of the language model.
        slow_channels: channels with low rotary frequencies, on which outlier queries are scored; ()
            for all channels.
    """

    def __init__(self, name: str, config: Any, slow_channels: tuple[int, ...]) -> None:
        super().__init__()
        self.layer_idx = next((int(part) for part in name.split(".") if part.isdigit()), None)
        self.config = config
        self.slow_channels = slow_channels


def register_layers(model: nn.Module, vllm_config: Any) -> None:
    """Set ``cab_layer`` of all attention layers of a model, and log how many layers are sparse.

    Also create the `Meter` that counts the sparse prompts of the engine in this process.

    Layers of draft models receive no `Layer` and stay dense.

    Args:
        model: the loaded model of an engine.
        vllm_config: the config of the engine.

    Raises:
        ValueError: the anchor of a cascade is not sparse in vLLM.
    """
    config = settings_of(vllm_config)
    if config is None:
        return
    model_config = vllm_config.model_config.hf_text_config
    dense_reasons: Counter[str] = Counter()
    sparse: list[Layer] = []
    for owner, attention in attentions(model):
        impl = attention.impl
        reason = why_dense(attention)
        if hasattr(impl, "cab_reason"):
            channels = channels_of(owner, attention)
            impl.cab_layer = Layer(attention.layer_name, model_config, channels)
            if reason is None and impl.cab_layer.layer_idx in config.dense_layers:
                reason = "in dense_layers"
        if reason is None:
            sparse.append(impl.cab_layer)
        else:
            dense_reasons[reason] += 1
    _require_anchors(config, [layer.layer_idx for layer in sparse])
    is_first = get_tensor_model_parallel_rank() == 0
    # all stages of a pipeline compute the same prompts: only the first stage counts prompts
    counts_prompts = is_first and get_pp_group().is_first_rank
    meter = Meter(vllm_config.instance_id, sparse, counts_prompts, is_logged=is_first)
    # write zeros now, so that ``/metrics`` shows the counters before the first prompt
    meter.write(meter.totals())
    METERS[vllm_config.instance_id] = meter
    if is_first and never_sparse(config, vllm_config) is None:
        _log(config, len(sparse), dense_reasons)


def why_dense(attention: Any) -> str | None:
    """Return the reason why vLLM's own attention computes a layer; None if the layer is sparse.

    Args:
        attention: an attention layer of vLLM.
    """
    if not hasattr(attention.impl, "cab_reason"):
        return "another backend"
    if attention.impl.cab_reason is not None:
        return attention.impl.cab_reason
    # vLLM derives builders for layers with chunked attention, or with sinks before each request
    is_derived = attention.attn_backend.get_builder_cls().__module__ != "cab_hf.vllm.backend"
    return "batches that vLLM rewrites" if is_derived else None


def attentions(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the owner and the layer for every attention layer of vLLM in a model.

    Yields:
        (owner, layer). The owner is the module that contains the layer and its rotary embedding.
    """
    # vLLM before 0.30 stores the layers of models from transformers in a dict
    for owner in model.modules():
        for attention in owner.children():
            if hasattr(attention, "impl") and hasattr(attention, "layer_name"):
                yield owner, attention
        instances = getattr(owner, "attention_instances", None)
        if isinstance(instances, dict):
            modules = {getattr(x, "layer_idx", None): x for x in owner.modules()}
            for index, attention in instances.items():
                yield modules.get(index, owner), attention


def channels_of(owner: nn.Module, attention: Any) -> tuple[int, ...]:
    """Return the half of a head's channels with the lowest rotary frequencies.

    Returns () for a layer without rotary embedding, for an embedding that rotates a part of the
    channels, and for an unknown convention.

    Args:
        owner: the module that contains the attention layer and its rotary embedding.
        attention: the attention layer of vLLM.
    """
    head_dim = attention.head_size
    if type(owner).__module__.startswith("transformers"):
        return slow_channels(owner, head_dim)
    rotary = next((x for x in owner.children() if hasattr(x, "rotary_dim")), None)
    if rotary is None or not is_rotated(owner):
        return ()
    # proportional embeddings do not rotate some pairs of channels
    is_partial = rotary.rotary_dim != head_dim or getattr(rotary, "nope_angles", 0)
    if is_partial or rotary.head_size != head_dim:
        return ()
    return halved(head_dim, interleaved=not getattr(rotary, "is_neox_style", True))


def is_rotated(owner: nn.Module) -> bool:
    """Return True if an attention module applies its rotary embedding."""
    if any(getattr(owner, name, True) in (False, 0) for name in SWITCHES):
        return False
    for base in type(owner).__mro__:
        names = APPLIED_IF.get(base.__module__.rpartition(".")[2])
        if names is not None:
            return any(getattr(owner, name, None) for name in names)
    config = getattr(owner, "config", None)
    return getattr(config, "use_mem_rope", True) is not False


def _require_anchors(config: CabConfig, sparse: list[int | None]) -> None:
    """Raise a ValueError if a layer in ``sparse`` reuses the blocks of a dense anchor layer.

    Args:
        config: the settings.
        sparse: indices of the sparse layers.
    """
    for index in sparse:
        anchor = anchor_of(config, index)
        if anchor is not None and anchor not in sparse:
            raise ValueError(
                f"CabConfig.anchors must be layers that vLLM attends sparsely, got {anchor}, which "
                f"is dense and selects for layer {index}. Remove it, or add an anchor after it."
            )


def _log(config: CabConfig, num_sparse: int, dense_reasons: Counter[str]) -> None:
    """Log the number of sparse layers, the shortest sparse prompt, and why layers are dense.

    Args:
        config: the settings.
        num_sparse: number of sparse layers.
        dense_reasons: number of dense layers by reason.
    """
    reasons = "; ".join(f"{count} dense: {reason}" for reason, count in dense_reasons.items())
    total = num_sparse + dense_reasons.total()
    if not num_sparse:
        logger.warning("cab_hf: no layer of %d is attended sparsely (%s).", total, reasons)
        return
    details = "; ".join(filter(None, [f"predictor {config.predictor}", reasons]))
    min_prompt = f"{max(config.min_length, config.query_block):,}"
    logger.info(
        f"cab_hf: {num_sparse} of {total} attention layers are sparse for prompts of {min_prompt} "
        f"tokens or more ({details})."
    )
