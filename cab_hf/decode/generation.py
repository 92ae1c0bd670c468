"""`index_cache`, which adds a key index to the cache layers that sparse decode steps read."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import lru_cache

from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from cab_hf.call.validate import find_unsupported_feature
from cab_hf.checks import warn_once
from cab_hf.config import SPARSE_IMPLEMENTATIONS, CabConfig
from cab_hf.decode.cache import IndexedDynamicLayer, IndexedStaticLayer, make_indexed_layer
from cab_hf.hf.fit import layer_index, softcap
from cab_hf.hf.layers import attention_layers, head_dim, transformers_model, window
from cab_hf.hf.model_config import cab_config_of
from cab_hf.hf.rotary import slow_channels
from cab_hf.predictors.cascade import find_anchor


def index_cache(model: PreTrainedModel, cache: Cache | None = None) -> Cache:
    """Return ``cache`` with a key index in every layer that selects keys in sparse decode steps.

    Cache layers are replaced in place and keep their keys and values. Layers that need no index
    stay unchanged: layers with a sliding window, layers in ``dense_layers``, and layers that reuse
    the selection of an anchor of a cascade.

    Args:
        model: a model with ``attn_implementation`` "cab" and ``sparse_decode``.
        cache: a `DynamicCache` or `StaticCache` of transformers. None means a new `DynamicCache`.

    Raises:
        ValueError: if the model reads no index, or the cache has another type.
    """
    model = transformers_model(model)
    text_config = model.config.get_text_config()
    reason = _why_no_index(model, DynamicCache() if cache is None else cache)
    if reason is not None:
        raise ValueError(reason)
    config = cab_config_of(text_config)
    cache = DynamicCache(config=text_config) if cache is None else cache
    for layer_idx, module in attention_layers(model):
        if why_no_selection(module, config) is not None:
            continue
        layer_class = cache.layer_class_to_replicate
        while layer_class is not None and layer_idx is not None and len(cache.layers) <= layer_idx:
            cache.layers.append(layer_class())
        channels = slow_channels(module, head_dim(module))
        for cache_layer_index in _find_cache_layer_indices(layer_idx, cache):
            cache.layers[cache_layer_index] = make_indexed_layer(
                cache.layers[cache_layer_index], channels
            )
    return cache


def has_index(cache: Cache, layer: int | None) -> bool:
    """Return True if the cache layer of an attention layer has a key index.

    Args:
        cache: a cache of transformers.
        layer: index of the attention layer; None for a layer that is called several times.
    """
    cache_layers = [cache.layers[i] for i in _find_cache_layer_indices(layer, cache)]
    return any(isinstance(x, (IndexedDynamicLayer, IndexedStaticLayer)) for x in cache_layers)


def index_cache_of_generate(model: PreTrainedModel, cache: object) -> None:
    """Call `index_cache` on the cache of `generate` if the model has sparse decode steps.

    Warns once if the cache cannot have a key index.
    """
    if _why_no_index(model, DynamicCache()) is not None:
        return
    reason = _why_no_index(model, cache)
    if reason is None:
        index_cache(model, cache)
    else:
        warning_key = "no index", type(cache).__name__
        warn_once(warning_key, f"sparse_decode is True, but decode steps are dense. {reason}")


def _why_no_index(model: PreTrainedModel, cache: object) -> str | None:
    """Return the error message of `index_cache` for a model and its cache; None if supported."""
    text_config = model.config.get_text_config()
    remedy = "Call cab_hf.apply_cab(model, sparse_decode=True) first."
    if text_config._attn_implementation not in SPARSE_IMPLEMENTATIONS:
        attn_implementation = repr(text_config._attn_implementation)
        return (
            f"attn_implementation must be 'cab' or 'cab_frc', got {attn_implementation}. {remedy}"
        )
    if not isinstance(cache, (DynamicCache, StaticCache)):
        return (
            f"cache must be a DynamicCache or a StaticCache, got a {type(cache).__name__}, whose "
            "layers cannot have an index. Pass None for a new DynamicCache."
        )
    if not cab_config_of(text_config).sparse_decode:
        return f"CabConfig.sparse_decode must be True, got False: no layer reads an index. {remedy}"
    return None


def _find_cache_layer_indices(layer: int | None, cache: Cache) -> range:
    """Return the indices of the cache layers that may hold the keys of an attention layer.

    An attention layer that is called several times has None for ``layer``: its keys can be in any
    cache layer. Cache layers without keys never have a key index.
    """
    num_layers = len(cache.layers)
    return range(num_layers) if layer is None else range(layer, min(layer + 1, num_layers))


def why_no_selection(module: nn.Module, config: CabConfig) -> str | None:
    """Return why an attention layer never selects keys in a decode step, as a clause.

    Returns None if the layer can select keys. The result is the same for all calls of the layer.
    """
    layer = layer_index(module)
    if find_unsupported_feature(module) is not None:
        return find_unsupported_feature(module)
    if window(module) is not None:
        return f"sliding window of {window(module)} tokens"
    if softcap(module) is not None:
        return "soft-capped logits"
    if layer in config.dense_layers:
        return "in dense_layers"
    if find_anchor(config, layer) not in (None, layer):
        return "keys selected by its anchor"
    return "keys computed from the cache" if _changes_cached_keys(type(module)) else None


@lru_cache
def _changes_cached_keys(layer_class: type[nn.Module]) -> bool:
    """Return True if ``forward`` attends to other keys than the cache returns.

    Latent attention computes keys from a cached vector that all heads share, and some layers
    repeat their keys. Returns False if the source of ``forward`` cannot be read, or if another
    method updates the cache.
    """
    try:
        forward_source = inspect.getsource(inspect.unwrap(layer_class.forward))
        forward_tree = ast.parse(textwrap.dedent(forward_source))
    except (OSError, SyntaxError, TypeError):
        return False
    syntax_nodes = list(ast.walk(forward_tree))
    call_assignments = [
        x for x in syntax_nodes if isinstance(x, ast.Assign) and isinstance(x.value, ast.Call)
    ]
    cache_updates = [x for x in call_assignments if ast.unparse(x.value.func).endswith(".update")]
    if not cache_updates:
        return False
    # keys_name, values_name = past_key_values.update(...)
    last_update = cache_updates[-1]
    keys_target = last_update.targets[0]
    keys_name = ast.unparse(
        keys_target.elts[0] if isinstance(keys_target, ast.Tuple) else keys_target
    )
    later_syntax_nodes = [
        x for x in syntax_nodes if getattr(x, "lineno", 0) > last_update.end_lineno
    ]
    # calls of an attention function, whose first argument is the layer
    attention_calls = [x for x in later_syntax_nodes if isinstance(x, ast.Call) and len(x.args) > 3]
    attention_calls = [x for x in attention_calls if ast.unparse(x.args[0]) == "self"]
    if not attention_calls:
        return False
    attention_call = min(attention_calls, key=lambda x: x.lineno)
    name_nodes = [
        x
        for x in later_syntax_nodes
        if isinstance(x, ast.Name) and x.lineno < attention_call.lineno
    ]
    is_reassigned = any(x.id == keys_name and isinstance(x.ctx, ast.Store) for x in name_nodes)
    return is_reassigned or ast.unparse(attention_call.args[2]) != keys_name
