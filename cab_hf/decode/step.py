"""Sparse decode steps: the conditions for a sparse step, and the keys that a step reads."""

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
from cab_hf.predictors.cascade import find_anchor, require_equal_heads

# smallest ratio of cached keys to selected keys in a sparse step: at smaller ratios, scoring costs
# more than dense attention
MIN_CACHED_TO_SELECTED_RATIO = 4
# key of a `SharedChoice` in the state that the layers of a forward pass share
SHARED_CHOICE_KEY = "cascade decode"


class SharedChoice(NamedTuple):
    """Selection of an anchor (`find_anchor`), which later layers reuse in a decode step.

    Attributes:
        layer: layer index of the anchor.
        head_counts: numbers of query heads and of KV heads of the anchor.
        choice: selected keys of each KV head of the anchor.
    """

    layer: int
    head_counts: tuple[int, int]
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
    shared_state: dict[Any, Any],
) -> Choice:
    """Return the keys that each KV head of a layer reads in a decode step.

    A layer after an anchor of a cascade reuses the selection of the anchor. Any other layer selects
    keys by ``index``.

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
        shared_state: state that layers of a forward pass share. An anchor stores its selection in
            it.
    """
    head_counts, anchor_layer = (q.shape[1], kv_heads), find_anchor(config, layer)
    if anchor_layer is not None and anchor_layer != layer:
        return _map_choice_of_anchor(
            shared_state[SHARED_CHOICE_KEY],
            config=config,
            layer=layer,
            head_counts=head_counts,
            device=q.device,
        )
    choice = decode.choose(
        q,
        index=index.index,
        scale=scale,
        length=length,
        num_keys=num_keys,
        channels=index.channels,
        padding_mask=padding_mask,
        sinks=sinks,
    )
    if anchor_layer is not None:
        shared_state[SHARED_CHOICE_KEY] = SharedChoice(layer, head_counts, choice)
    return choice


def _map_choice_of_anchor(
    shared_choice: SharedChoice,
    *,
    config: CabConfig,
    layer: int,
    head_counts: tuple[int, int],
    device: Any,
) -> Choice:
    """Return the selection of the anchor for the KV heads of a later layer.

    Args:
        shared_choice: selection of the anchor.
        config: settings of the layer.
        layer: index of the later layer.
        head_counts: numbers of query heads and of KV heads of the later layer.
        device: device of the later layer, which may differ from the device of the anchor.
    """
    require_equal_heads(shared_choice.layer, shared_choice.head_counts, layer, head_counts)
    kv_heads = head_counts[1]
    anchor_kv_heads = map_kv_heads(config.head_map[layer], kv_heads) if config.head_map else None
    if anchor_kv_heads == tuple(range(kv_heads)):
        anchor_kv_heads = None
    return shared_choice.choice.map_to_layer(device, anchor_kv_heads)


def why_dense(
    mask: Any, config: CabConfig, layer: nn.Module | None, index: KeyIndex | None
) -> str | None:
    """Return the reason why a call with few queries is not a sparse decode step, as a clause.

    Returns None if the call is a sparse decode step. Warns once if the keys have no index.

    Args:
        mask: `MaskInfo` of the call.
        config: settings of the layer.
        layer: the attention layer.
        index: index of the keys; None if the keys have no index.
    """
    if softcap(layer) is not None:
        return "soft-capped logits (decode)"
    if not config.sparse_decode or mask.q_length != 1 or mask.doc_ids is not None:
        return f"fewer than query_block={config.query_block} queries (decode)"
    # the number of written slots of a static cache is on the device: use the number of all slots
    num_slots = mask.details.cache_length if mask.kv_length is None else mask.kv_length
    if num_slots is None or not decodes_sparsely(config, num_slots):
        is_below_min_length = num_slots is not None and num_slots < config.min_length
        field_name = "min_length" if is_below_min_length else "decode_tokens"
        return f"too short for {field_name}={getattr(config, field_name)} (decode)"
    anchor_layer = find_anchor(config, getattr(layer, "layer_idx", None))
    if anchor_layer is not None and anchor_layer < layer.layer_idx:
        shared_choice = mask.forward_state.shared_state.get(SHARED_CHOICE_KEY)
        can_select = shared_choice is not None and shared_choice.layer == anchor_layer
    else:
        can_select = index is not None
        if not can_select and not torch.compiler.is_compiling():
            warn_once(
                ("sparse_decode", "no index"),
                "sparse_decode is True, but the keys of a step have no index: the step is dense. "
                "Let generate make the cache or call cab_hf.index_cache, and pass the keys that "
                "the cache returns to the attention function unchanged.",
            )
    return None if can_select else "a cache without an index (decode)"


def decodes_sparsely(config: CabConfig, num_tokens: int) -> bool:
    """Return True if a decode step over ``num_tokens`` cached tokens is sparse."""
    min_tokens = min_sparse_tokens(config)
    return config.sparse_decode and min_tokens is not None and num_tokens >= min_tokens


def min_sparse_tokens(config: CabConfig) -> int | None:
    """Return the smallest number of cached tokens for a sparse step; None if never sparse."""
    tokens_or_share = config.decode_tokens
    if isinstance(tokens_or_share, int):
        return max(config.min_length, MIN_CACHED_TO_SELECTED_RATIO * tokens_or_share)
    # a share of the cached tokens
    return config.min_length if MIN_CACHED_TO_SELECTED_RATIO * tokens_or_share <= 1 else None


def map_kv_heads(head_map_row: tuple[int, ...], kv_heads: int) -> tuple[int, ...]:
    """Return the KV head of the anchor whose selected keys each KV head of a later layer reuses.

    The anchor of a cascade is the layer that selects keys for the later layers. ``head_map`` maps
    every query head of a later layer to a query head of the anchor, and thereby to a KV head of the
    anchor. The query heads of one group share one KV head of the later layer, and can be mapped to
    different KV heads of the anchor. The most frequent KV head of the anchor is returned; in a tie,
    the KV head of the first query head in the group.

    Args:
        head_map_row: the query head of the anchor for each query head of the later layer, a row of
            ``head_map``.
        kv_heads: number of KV heads of the later layer, equal to that of the anchor.

    Returns:
        One KV head of the anchor for each KV head of the later layer.
    """
    group_size = len(head_map_row) // kv_heads
    mapped_heads = []
    for first_head in range(0, len(head_map_row), group_size):
        anchor_heads = [
            head // group_size for head in head_map_row[first_head : first_head + group_size]
        ]
        largest_count = max([anchor_heads.count(head) for head in anchor_heads])
        most_frequent_heads = [
            head for head in anchor_heads if anchor_heads.count(head) == largest_count
        ]
        mapped_heads.append(most_frequent_heads[0])
    return tuple(mapped_heads)
