"""`index_cache`: a cache with an index where a model's layers read one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from cab_hf.attention_layers import attention_layers, head_dim, transformers_model, window
from cab_hf.config import CabConfig
from cab_hf.decode.cache import indexed
from cab_hf.model_config import cab_config_of
from cab_hf.predictors.cascade import anchor_of
from cab_hf.refusals import foreseen
from cab_hf.rotary import slow_channels


def index_cache(model: PreTrainedModel, cache: Cache | None = None) -> Cache:
    """The ``cache`` with an index in every layer that chooses keys: it is then decoded sparsely.

    Layers are replaced in place and keep what they hold. Those under a sliding window, in
    ``dense_layers`` or behind an anchor of a cascade need no index and stay as they are.

    Args:
        model: on "cab", with ``sparse_decode``.
        cache: a `DynamicCache` or `StaticCache` of transformers; by default a new dynamic one.

    Raises:
        ValueError: for a model that reads no index, or another kind of cache.
    """
    model = transformers_model(model)
    text = model.config.get_text_config()
    how = "call cab_hf.apply_cab(model, sparse_decode=True) first."
    if text._attn_implementation != "cab":
        raise ValueError(
            f"attn_implementation is {text._attn_implementation!r}, which reads no index of the "
            f"cache; {how}"
        )
    config = cab_config_of(text)
    if not config.sparse_decode:
        raise ValueError(f"CabConfig.sparse_decode is False: no layer reads an index; {how}")
    if cache is None:
        cache = DynamicCache(config=text)
    if not isinstance(cache, (DynamicCache, StaticCache)):
        raise ValueError(
            f"cache is a {type(cache).__name__}, whose layers cannot have an index; give a "
            "DynamicCache or a StaticCache, or None for a new one."
        )
    for module in choosing_layers(model, config):
        layer = module.layer_idx
        while cache.layer_class_to_replicate is not None and len(cache.layers) <= layer:
            cache.layers.append(cache.layer_class_to_replicate())
        if layer < len(cache.layers):
            channels = slow_channels(module, head_dim(module))
            cache.layers[layer] = indexed(cache.layers[layer], channels)
    return cache


def index_made(model: PreTrainedModel, cache: object) -> None:
    """`index_cache` of what `generate` has made, where the model would read an index of it."""
    text = model.config.get_text_config()
    if text._attn_implementation != "cab" or not isinstance(cache, (DynamicCache, StaticCache)):
        return
    if cab_config_of(text).sparse_decode:
        index_cache(model, cache)


def choosing_layers(model: PreTrainedModel, config: CabConfig) -> Iterator[nn.Module]:
    """The attention layers that choose keys for a step of decode."""
    for layer, module in attention_layers(model):
        if not hasattr(module, "layer_idx") or window(module) is not None:
            continue
        behind = anchor_of(config, layer) not in (None, layer)
        if layer not in config.dense_layers and not behind and foreseen(module) is None:
            yield module
