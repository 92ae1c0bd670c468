"""`index_cache`: a cache with an index where a model's layers read one."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import lru_cache

from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from cab_hf.call.refusals import foreseen
from cab_hf.checks import warn_once
from cab_hf.config import SPARSE, CabConfig
from cab_hf.decode.cache import IndexedDynamicLayer, IndexedStaticLayer, indexed
from cab_hf.hf.fit import layer_index, softcap
from cab_hf.hf.layers import attention_layers, head_dim, transformers_model, window
from cab_hf.hf.model_config import cab_config_of
from cab_hf.hf.rotary import slow_channels
from cab_hf.predictors.cascade import anchor_of


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
    why = _no_index(model, DynamicCache() if cache is None else cache)
    if why is not None:
        raise ValueError(why)
    config = cab_config_of(text)
    cache = DynamicCache(config=text) if cache is None else cache
    for layer, module in attention_layers(model):
        if why_none(module, config) is not None:
            continue
        kind = cache.layer_class_to_replicate
        while kind is not None and layer is not None and len(cache.layers) <= layer:
            cache.layers.append(kind())
        channels = slow_channels(module, head_dim(module))
        for place in _places(layer, cache):
            cache.layers[place] = indexed(cache.layers[place], channels)
    return cache


def has_index(cache: Cache, layer: int | None) -> bool:
    """Whether there is an index where an attention layer keeps its keys."""
    kept = [cache.layers[place] for place in _places(layer, cache)]
    return any(isinstance(each, (IndexedDynamicLayer, IndexedStaticLayer)) for each in kept)


def index_made(model: PreTrainedModel, cache: object) -> None:
    """`index_cache` of what `generate` has made, where the model would read an index of it."""
    if _no_index(model, DynamicCache()) is not None:
        return
    why = _no_index(model, cache)
    if why is None:
        index_cache(model, cache)
    else:
        key = "no index", type(cache).__name__
        warn_once(key, f"sparse_decode is on, and decoding is dense: {why}")


def _no_index(model: PreTrainedModel, cache: object) -> str | None:
    """Why `index_cache` refuses a model and its cache; None where it does not."""
    text = model.config.get_text_config()
    how = "call cab_hf.apply_cab(model, sparse_decode=True) first."
    if text._attn_implementation not in SPARSE:
        name = repr(text._attn_implementation)
        return f"attn_implementation is {name}, which reads no index of the cache; {how}"
    if not isinstance(cache, (DynamicCache, StaticCache)):
        return (
            f"cache is a {type(cache).__name__}, whose layers cannot have an index; give a "
            "DynamicCache or a StaticCache, or None for a new one."
        )
    if not cab_config_of(text).sparse_decode:
        return f"CabConfig.sparse_decode is False: no layer reads an index; {how}"
    return None


def _places(layer: int | None, cache: Cache) -> range:
    """The layers of a ``cache`` in which an attention layer keeps its keys: any, where it serves
    several. Those that keep no keys have no index anyway."""
    count = len(cache.layers)
    return range(count) if layer is None else range(layer, min(layer + 1, count))


def why_none(module: nn.Module, config: CabConfig) -> str | None:
    """Why an attention layer chooses no keys for a step of decode, as half a sentence, as far as
    it shows it before it is called; None where it chooses."""
    layer = layer_index(module)
    if foreseen(module) is not None:
        return foreseen(module)
    if window(module) is not None:
        return f"sliding window of {window(module)} tokens"
    if softcap(module) is not None:
        return "soft-capped logits"
    if layer in config.dense_layers:
        return "in dense_layers"
    if anchor_of(config, layer) not in (None, layer):
        return "behind an anchor"
    return "keys are made of what the cache keeps" if _makes_keys(type(module)) else None


@lru_cache
def _makes_keys(kind: type[nn.Module]) -> bool:
    """Whether the code of a layer attends other keys than its cache returns: latent attention makes
    them of what is kept for all heads, and some layers repeat theirs.

    Code that cannot be read, or updates a cache elsewhere, is taken to attend what is kept.
    """
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, SyntaxError, TypeError):
        return False
    nodes = list(ast.walk(code))
    assigned = [x for x in nodes if isinstance(x, ast.Assign) and isinstance(x.value, ast.Call)]
    updates = [x for x in assigned if ast.unparse(x.value.func).endswith(".update")]
    if not updates:
        return False
    update = updates[-1]
    target = update.targets[0]
    kept = ast.unparse(target.elts[0] if isinstance(target, ast.Tuple) else target)
    behind = [x for x in nodes if getattr(x, "lineno", 0) > update.end_lineno]
    # of an attention function, recognised by its first argument
    calls = [x for x in behind if isinstance(x, ast.Call) and len(x.args) > 3]
    calls = [x for x in calls if ast.unparse(x.args[0]) == "self"]
    if not calls:
        return False
    call = min(calls, key=lambda x: x.lineno)
    names = [x for x in behind if isinstance(x, ast.Name) and x.lineno < call.lineno]
    changed = any(x.id == kept and isinstance(x.ctx, ast.Store) for x in names)
    return changed or ast.unparse(call.args[2]) != kept
