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
from cab_hf.hf.rotary import slow_channels, slow_channels_of_known_pairs
from cab_hf.predictors.cascade import find_anchor
from cab_hf.vllm import never_sparse_reason, settings_of
from cab_hf.vllm.metrics import METER_BY_INSTANCE_ID, Meter

logger = logging.getLogger("vllm.cab_hf")

# attributes of attention modules that are False or 0 if the module does not rotate queries and keys
ROTARY_SWITCH_ATTRIBUTES = ("use_rope", "_use_rope", "use_rotary", "is_local_attention")
# key: name of a model file of vLLM. Value: names of attributes of the attention modules in the
# file. A module applies its rotary embedding only if one of these attributes is set
ROTARY_CONDITION_ATTRIBUTES = {
    "commandr": ("v1", "sliding_window"),
    "cohere2_moe": ("sliding_window", "force_rope"),
    "exaone4": ("sliding_window", "apply_rope_all_layers"),
}


class CabLayer(nn.Module):
    """The attributes of an attention layer that a `Call` reads.

    Attributes:
        layer_idx: index of the layer, the first number in its name, such as 3 in
            "model.layers.3.self_attn.attn"; None if the name has no number.
        config: the config of the language model.
        slow_channels: channels with low rotary frequencies, on which outlier queries are scored; ()
            for all channels.
    """

    def __init__(self, layer_name: str, config: Any, slow_channels: tuple[int, ...]) -> None:
        super().__init__()
        self.layer_idx = next(
            (int(name_part) for name_part in layer_name.split(".") if name_part.isdigit()), None
        )
        self.config = config
        self.slow_channels = slow_channels


def register_layers(model: nn.Module, vllm_config: Any) -> None:
    """Set ``cab_layer`` of all attention layers of a model, and log how many layers are sparse.

    Also create the `Meter` that counts the sparse prompts of the engine in this process.

    Layers of draft models receive no `CabLayer` and stay dense.

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
    sparse_layers: list[CabLayer] = []
    for owner_module, attention_layer in iterate_attention_layers(model):
        impl = attention_layer.impl
        dense_reason = find_dense_reason(attention_layer)
        if hasattr(impl, "cab_dense_reason"):
            low_frequency_channels = find_slow_channels(owner_module, attention_layer)
            impl.cab_layer = CabLayer(
                attention_layer.layer_name, model_config, low_frequency_channels
            )
            if dense_reason is None and impl.cab_layer.layer_idx in config.dense_layers:
                dense_reason = "in dense_layers"
        if dense_reason is None:
            sparse_layers.append(impl.cab_layer)
        else:
            dense_reasons[dense_reason] += 1
    _require_sparse_anchors(config, [sparse_layer.layer_idx for sparse_layer in sparse_layers])
    is_first_rank = get_tensor_model_parallel_rank() == 0
    # all stages of a pipeline compute the same prompts: only the first stage counts prompts
    should_count_prompts = is_first_rank and get_pp_group().is_first_rank
    meter = Meter(
        vllm_config.instance_id, sparse_layers, should_count_prompts, is_logged=is_first_rank
    )
    # write zeros now, so that ``/metrics`` shows the counters before the first prompt
    meter.write_totals(meter.read_totals())
    METER_BY_INSTANCE_ID[vllm_config.instance_id] = meter
    if is_first_rank and never_sparse_reason(config, vllm_config) is None:
        _log_layers(config, len(sparse_layers), dense_reasons)


def find_dense_reason(attention_layer: Any) -> str | None:
    """Return the reason why vLLM's own attention computes a layer; None if the layer is sparse.

    Args:
        attention_layer: an attention layer of vLLM.
    """
    if not hasattr(attention_layer.impl, "cab_dense_reason"):
        return "another backend"
    if attention_layer.impl.cab_dense_reason is not None:
        return attention_layer.impl.cab_dense_reason
    # vLLM derives builders for layers with chunked attention, or with sinks before each request
    has_derived_builder = (
        attention_layer.attn_backend.get_builder_cls().__module__ != "cab_hf.vllm.backend"
    )
    return "batches that vLLM rewrites" if has_derived_builder else None


def iterate_attention_layers(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the owner and the layer for every attention layer of vLLM in a model.

    Yields:
        (owner, layer). The owner is the module that contains the layer and its rotary embedding.
    """
    # vLLM before 0.30 stores the layers of models from transformers in a dict
    for owner_module in model.modules():
        for attention_layer in owner_module.children():
            if hasattr(attention_layer, "impl") and hasattr(attention_layer, "layer_name"):
                yield owner_module, attention_layer
        attention_instances = getattr(owner_module, "attention_instances", None)
        if isinstance(attention_instances, dict):
            modules_by_index = {
                getattr(module, "layer_idx", None): module for module in owner_module.modules()
            }
            for layer_index, attention_layer in attention_instances.items():
                yield modules_by_index.get(layer_index, owner_module), attention_layer


def find_slow_channels(owner_module: nn.Module, attention_layer: Any) -> tuple[int, ...]:
    """Return the half of a head's channels with the lowest rotary frequencies.

    Returns () for a layer without rotary embedding, for an embedding that rotates a part of the
    channels, and for an unknown convention.

    Args:
        owner_module: the module that contains the attention layer and its rotary embedding.
        attention_layer: the attention layer of vLLM.
    """
    head_dim = attention_layer.head_size
    if type(owner_module).__module__.startswith("transformers"):
        return slow_channels(owner_module, head_dim)
    rotary_embedding = next(
        (
            child_module
            for child_module in owner_module.children()
            if hasattr(child_module, "rotary_dim")
        ),
        None,
    )
    if rotary_embedding is None or not has_active_rotary_embedding(owner_module):
        return ()
    # proportional embeddings do not rotate some pairs of channels
    is_partially_rotated = rotary_embedding.rotary_dim != head_dim or getattr(
        rotary_embedding, "nope_angles", 0
    )
    if is_partially_rotated or rotary_embedding.head_size != head_dim:
        return ()
    return slow_channels_of_known_pairs(
        head_dim, is_interleaved=not getattr(rotary_embedding, "is_neox_style", True)
    )


def has_active_rotary_embedding(owner_module: nn.Module) -> bool:
    """Return True if an attention module applies its rotary embedding."""
    if any(
        getattr(owner_module, attribute_name, True) in (False, 0)
        for attribute_name in ROTARY_SWITCH_ATTRIBUTES
    ):
        return False
    for base_class in type(owner_module).__mro__:
        attribute_names = ROTARY_CONDITION_ATTRIBUTES.get(base_class.__module__.rpartition(".")[2])
        if attribute_names is not None:
            return any(
                getattr(owner_module, attribute_name, None) for attribute_name in attribute_names
            )
    config = getattr(owner_module, "config", None)
    return getattr(config, "use_mem_rope", True) is not False


def _require_sparse_anchors(config: CabConfig, sparse_layer_indices: list[int | None]) -> None:
    """Raise a ValueError if a sparse layer reuses the blocks of a dense anchor layer.

    Args:
        config: the settings.
        sparse_layer_indices: indices of the sparse layers.
    """
    for layer_index in sparse_layer_indices:
        anchor = find_anchor(config, layer_index)
        if anchor is not None and anchor not in sparse_layer_indices:
            raise ValueError(
                f"CabConfig.anchors must be layers that vLLM attends sparsely, got {anchor}, which "
                f"is dense and selects for layer {layer_index}. Remove it, or add an anchor after "
                "it."
            )


def _log_layers(config: CabConfig, num_sparse_layers: int, dense_reasons: Counter[str]) -> None:
    """Log the number of sparse layers, the shortest sparse prompt, and why layers are dense.

    Args:
        config: the settings.
        num_sparse_layers: number of sparse layers.
        dense_reasons: number of dense layers by reason.
    """
    reasons_text = "; ".join(
        f"{num_dense_layers} dense: {dense_reason}"
        for dense_reason, num_dense_layers in dense_reasons.items()
    )
    num_layers = num_sparse_layers + dense_reasons.total()
    if not num_sparse_layers:
        logger.warning(
            "cab_hf: no layer of %d is attended sparsely (%s).", num_layers, reasons_text
        )
        return
    detail_text = "; ".join(filter(None, [f"predictor {config.predictor}", reasons_text]))
    min_prompt_text = f"{max(config.min_length, config.query_block):,}"
    logger.info(
        f"cab_hf: {num_sparse_layers} of {num_layers} attention layers are sparse for prompts of "
        f"{min_prompt_text} tokens or more ({detail_text})."
    )
