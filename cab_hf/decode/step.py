"""Decode steps over selected keys: when a step is sparse, and which keys it reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cab_hf.checks import warn_once
from cab_hf.config import CabConfig
from cab_hf.decode.cache import KeyIndex
from cab_hf.hf.fit import softcap
from cab_hf.ops import decode
from cab_hf.ops.decode import Choice
from cab_hf.predictors.cascade import anchor_of, require_heads_of

# smallest ratio of cached keys to selected keys in a sparse step: below, scoring costs more than
# dense attention
DECODE_FROM = 4
SHARED_CHOICE = "cascade decode"  # key of an anchor's selection in the shared state


class SharedChoice(NamedTuple):
    """The selection that an anchor shares with later layers in a decode step.

    Attributes:
        layer: layer index of the anchor.
        heads: (query heads, KV heads) of the anchor.
        choice: selected keys of each KV head of the anchor.
    """

    layer: int
    heads: tuple[int, int]
    choice: Choice


def select_keys(
    q: Tensor,
    index: KeyIndex | None,
    *,
    config: CabConfig,
    layer: int | None,
    kv_heads: int,
    scale: float,
    length: Tensor,
    num_keys: Tensor,
    padding_mask: Tensor | None,
    sinks: Tensor | None,
    shared: dict[Any, Any],
) -> Choice:
    """Return the keys that each KV head reads, by its index or from the anchor of the layer.

    Args:
        q: [B, H, 1, D].
        index: index of the keys; not read by layers after an anchor.
        config: settings of the layer.
        layer: index of the layer.
        kv_heads: number of KV heads of the layer.
        scale: factor of the logits.
        length, num_keys: results of `MaskInfo.decode_budget`.
        padding_mask: bool [B, N_k], False for padding keys; None without padding.
        sinks: [H], one additional logit per head; None without sinks.
        shared: state that layers of a forward pass share. An anchor stores its selection in it.
    """
    heads, anchor = (q.shape[1], kv_heads), anchor_of(config, layer)
    if anchor is not None and anchor != layer:
        return _choice_of_anchor(
            shared[SHARED_CHOICE], config=config, layer=layer, heads=heads, device=q.device
        )
    keys, channels = index
    choice = decode.choose(
        q,
        keys,
        scale,
        length,
        num_keys,
        channels=channels,
        valid=padding_mask,
        sinks=sinks,
    )
    if anchor is not None:
        shared[SHARED_CHOICE] = SharedChoice(layer, heads, choice)
    return choice


def _choice_of_anchor(
    shared: SharedChoice, *, config: CabConfig, layer: int, heads: tuple[int, int], device: Any
) -> Choice:
    """Return the anchor's selection, mapped to the KV heads of a layer by `mapped_kv_heads`."""
    require_heads_of(shared.layer, shared.heads, layer, heads)
    mapped = mapped_kv_heads(config.head_map[layer], heads[1]) if config.head_map else None
    if mapped == tuple(range(heads[1])):
        mapped = None
    # the layers of a model may be on different devices
    return shared.choice.for_layer(device, mapped)


def why_dense(
    mask: Any, config: CabConfig, layer: nn.Module | None, index: KeyIndex | None
) -> str | None:
    """Return why a call with few queries is no sparse step, as a clause; None if it is one."""
    if softcap(layer) is not None:
        return "soft-capped logits (decode)"
    if not config.sparse_decode or mask.q_length != 1 or mask.doc_ids is not None:
        return f"fewer than query_block={config.query_block} queries (decode)"
    # static caches: the host has the number of slots, and the device the number of written slots
    slots = mask.details.cache_length if mask.kv_length is None else mask.kv_length
    if slots is None or not decodes_sparsely(config, slots):
        short = slots is not None and slots < config.min_length
        name = "min_length" if short else "decode_tokens"
        return f"too short for {name}={getattr(config, name)} (decode)"
    anchor = anchor_of(config, getattr(layer, "layer_idx", None))
    if anchor is not None and anchor < layer.layer_idx:
        shared = mask.state.shared.get(SHARED_CHOICE)
        ready = shared is not None and shared.layer == anchor
    else:
        ready = index is not None
        if not ready and not torch.compiler.is_compiling():
            warn_once(
                ("sparse_decode", "no index"),
                "sparse_decode is True, but the keys of a step have no index: the step is dense. "
                "Let generate make the cache or call cab_hf.index_cache, and pass the keys that "
                "the cache returns to the attention function unchanged.",
            )
    return None if ready else "a cache without an index (decode)"


def decodes_sparsely(config: CabConfig, tokens: int) -> bool:
    """Return whether a decode step over ``tokens`` cached tokens is sparse."""
    least = decode_from(config)
    return config.sparse_decode and least is not None and tokens >= least


def decode_from(config: CabConfig) -> int | None:
    """Return the smallest number of cached tokens for a sparse step; None if steps are dense."""
    tokens = config.decode_tokens
    if isinstance(tokens, int):
        return max(config.min_length, DECODE_FROM * tokens)
    return config.min_length if DECODE_FROM * tokens <= 1 else None


def mapped_kv_heads(row: tuple[int, ...], kv_heads: int) -> tuple[int, ...]:
    """Return the KV head of the anchor for each KV head of a layer.

    It is the KV head to which most query heads of the group are mapped. The first one wins a tie.

    Args:
        row: row of ``head_map``: the query head of the anchor for each query head.
        kv_heads: number of KV heads of the layer.
    """
    group = len(row) // kv_heads
    result = []
    for first in range(0, len(row), group):
        targets = [head // group for head in row[first : first + group]]
        most = max([targets.count(target) for target in targets])
        result.append([target for target in targets if targets.count(target) == most][0])
    return tuple(result)
