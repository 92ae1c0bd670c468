"""The causal self-attention layers of a model, and their attributes."""

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
    text = model.config.get_text_config()
    unnumbered = 0
    parts: set[nn.Module] = set()
    for module in model.modules():
        if module in parts:
            continue
        if _causal(module):
            # submodules that compute keys can look like attention layers
            parts.update(module.modules())
            yield layer_index(module), module
        elif _causal_by_call(module, text):
            yield unnumbered, module
            unnumbered += 1


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model, which can be inside an adapter or another wrapper.

    Raises:
        ValueError: if ``model`` contains no transformers model.
    """
    inner = inner_model(model) if isinstance(model, nn.Module) else None
    if inner is None:
        raise ValueError(
            f"model must be a causal language model of transformers, got {type(model).__name__}. "
            "Pass the model, or a wrapper that contains it."
        )
    return inner


def inner_model(model: nn.Module) -> PreTrainedModel | None:
    """Return the transformers model that is ``model`` or in ``model``; None if there is none."""
    return next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)


def _causal(module: nn.Module) -> bool:
    """Return True for a causal self-attention layer; not every such layer has ``is_causal``."""
    unsaid = hasattr(module, "num_key_value_groups")
    return hasattr(module, "layer_idx") and getattr(module, "is_causal", unsaid)


def _causal_by_call(module: nn.Module, text: Any) -> bool:
    """Return True for a layer without an index that receives `is_causal` per call, as in CLIP."""
    given = hasattr(module, "is_causal") and not hasattr(module, "layer_idx")
    return given and getattr(module, "config", None) is text


def head_dim(module: nn.Module) -> int:
    """Return the channels of a query, from the layer or its config."""
    for owner in (module, module.config):
        for name in ("qk_head_dim", "head_dim"):
            if isinstance(getattr(owner, name, None), int):
                return getattr(owner, name)
    return module.config.hidden_size // module.config.num_attention_heads


def window(module: nn.Module) -> int | None:
    """Return the width of a layer's sliding window or chunks, in tokens; None without a window.

    Some layers have no attribute for the window: their model builds one mask from its config.
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
