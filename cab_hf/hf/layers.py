"""The causal self-attention modules of a model, with their head dims and windows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cab_hf.hf.fit import layer_index, layer_type


def attention_layers(model: PreTrainedModel) -> Iterator[tuple[int | None, nn.Module]]:
    """Yield (layer index, module) for every causal self-attention module, in order.

    The index is None for a module that several layers share.
    """
    text_config = model.config.get_text_config()
    num_layers_without_index = 0
    submodules: set[nn.Module] = set()
    for module in model.modules():
        if module in submodules:
            continue
        if _is_causal_attention(module):
            # skipped, because submodules that compute keys can have the same attributes
            submodules.update(module.modules())
            yield layer_index(module), module
        elif _is_causal_by_call(module, text_config):
            yield num_layers_without_index, module
            num_layers_without_index += 1


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside an adapter or another wrapper.

    Args:
        model: a transformers model, or a wrapper that contains one.

    Raises:
        ValueError: if ``model`` contains no transformers model.
    """
    inner_transformers_model = inner_model(model) if isinstance(model, nn.Module) else None
    if inner_transformers_model is None:
        raise ValueError(
            f"model must be a causal language model of transformers, got {type(model).__name__}. "
            "Pass the model, or a wrapper that contains it."
        )
    return inner_transformers_model


def inner_model(model: nn.Module) -> PreTrainedModel | None:
    """Return ``model`` or its first submodule that is a transformers model; None without one."""
    transformers_models = (x for x in model.modules() if isinstance(x, PreTrainedModel))
    return next(transformers_models, None)


def _is_causal_attention(module: nn.Module) -> bool:
    """Return True for a causal self-attention module."""
    # modules without ``is_causal`` are causal if they have groups of query heads
    is_causal_by_default = hasattr(module, "num_key_value_groups")
    return hasattr(module, "layer_idx") and getattr(module, "is_causal", is_causal_by_default)


def _is_causal_by_call(module: nn.Module, text_config: Any) -> bool:
    """Return True for an attention module without an index that receives ``is_causal`` per call.

    CLIP has such modules.

    Args:
        module: any module.
        text_config: config of the language model; modules with other configs are not causal.
    """
    has_no_index = hasattr(module, "is_causal") and not hasattr(module, "layer_idx")
    return has_no_index and getattr(module, "config", None) is text_config


def head_dim(module: nn.Module) -> int:
    """Return the head dim of the queries of an attention module."""
    for attribute_owner in (module, module.config):
        for attribute_name in ("qk_head_dim", "head_dim"):
            if isinstance(getattr(attribute_owner, attribute_name, None), int):
                return getattr(attribute_owner, attribute_name)
    return module.config.hidden_size // module.config.num_attention_heads


def window(module: nn.Module) -> int | None:
    """Return the width of the sliding window or chunks of an attention module, in tokens.

    Returns None without a window.
    """
    if layer_type(module) == "full_attention":
        return None
    if layer_type(module) == "chunked_attention":
        return module.config.attention_chunk_size
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    # some modules have no attribute for the window: their model builds the mask from its config
    modeling_module = sys.modules[type(module).__module__]
    can_have_window = layer_type(module) in (None, "sliding_attention")
    if can_have_window and hasattr(modeling_module, "create_sliding_window_causal_mask"):
        return getattr(module.config, "sliding_window", None)
    return None
