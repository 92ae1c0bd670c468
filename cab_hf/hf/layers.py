"""Finds the causal self-attention layers of a model, and reads their attributes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cab_hf.hf.fit import layer_index, layer_type


def attention_layers(model: PreTrainedModel) -> Iterator[tuple[int | None, nn.Module]]:
    """(layer index, module) of every self-attention module, in order.

    The index is None for a module that serves several layers.
    """
    text = model.config.get_text_config()
    unnumbered = 0
    parts: set[nn.Module] = set()
    for module in model.modules():
        if module in parts:
            continue
        if _causal(module):
            # what makes the keys of a layer may look like one
            parts.update(module.modules())
            yield layer_index(module), module
        elif _causal_by_call(module, text):
            yield unnumbered, module
            unnumbered += 1


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The model itself, or the one inside of an adapter or another wrapper; ValueError for none."""
    inner = inner_model(model) if isinstance(model, nn.Module) else None
    if inner is None:
        raise ValueError(
            f"model is a {type(model).__name__} with no transformers model in it; give a causal "
            "language model of transformers."
        )
    return inner


def inner_model(model: nn.Module) -> PreTrainedModel | None:
    """The transformers model that a module is or holds; None for none."""
    return next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)


def _causal(module: nn.Module) -> bool:
    """Whether a module is a layer of causal self-attention; not all have an attribute for it."""
    unsaid = hasattr(module, "num_key_value_groups")
    return hasattr(module, "layer_idx") and getattr(module, "is_causal", unsaid)


def _causal_by_call(module: nn.Module, text: Any) -> bool:
    """Whether a module has no index and may get `is_causal` in the call, as CLIP's."""
    given = hasattr(module, "is_causal") and not hasattr(module, "layer_idx")
    return given and getattr(module, "config", None) is text


def head_dim(module: nn.Module) -> int:
    """Channels of a query, by the layer's attribute or its config."""
    for owner in (module, module.config):
        for name in ("qk_head_dim", "head_dim"):
            if isinstance(getattr(owner, name, None), int):
                return getattr(owner, name)
    return module.config.hidden_size // module.config.num_attention_heads


def window(module: nn.Module) -> int | None:
    """Width of a layer's sliding window, or of its chunks; None without.

    Some layers do not know: their model makes one mask by its config for all of them.
    """
    if layer_type(module) == "full_attention":
        return None
    if layer_type(module) == "chunked_attention":
        return module.config.attention_chunk_size
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    model = sys.modules[type(module).__module__]
    windowed = layer_type(module) in (None, "sliding_attention")
    if windowed and hasattr(model, "create_sliding_window_causal_mask"):
        return getattr(module.config, "sliding_window", None)
    return None
