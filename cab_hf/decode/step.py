"""`SparseDecode`: one query a head attends the keys that its KV head chooses."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from cab_hf.call.call import Call
from cab_hf.call.transforms import refuse_vmap
from cab_hf.checks import warn_once
from cab_hf.config import CabConfig
from cab_hf.decode.cache import KeyIndex
from cab_hf.hf.fit import layer_index, softcap
from cab_hf.ops import decode
from cab_hf.ops.decode import Choice
from cab_hf.predictors.cascade import anchor_of, require_heads_of

# a text is read sparsely from so many times the keys that are read: below, scoring costs more
DECODE_FROM = 4
SHARED_CHOICE = "cascade decode"  # under which an anchor leaves its choice


class SharedChoice(NamedTuple):
    """What an anchor leaves in a step: its index, its query and KV heads, and what these chose."""

    layer: int
    heads: tuple[int, int]
    choice: Choice


class SparseDecode:
    """Attention of one query a head over the keys chosen for it, of a text in one process.

    They are chosen by the index of the call, or behind an anchor of a cascade by that.
    """

    kind: ClassVar[str] = "sparse decode"
    reason: ClassVar[None] = None

    def attend(self, call: Call) -> Tensor:
        """Return the output [B, H, 1, D_v] of a call.

        Raises:
            NotImplementedError: for queries, keys or values that `torch.vmap` batches.
        """
        refuse_vmap("the input of a sparse decode step", call.q, call.k, call.v)
        q, text, config, layer = call.q, call.text, call.config, layer_index(call.layer)
        heads = q.shape[1], call.k.shape[1]
        length, wanted = text.reach(config.decode_tokens, decode_from(config), q.device)
        valid = None if text.valid is None else text.valid.to(q.device)
        anchor = anchor_of(config, layer)
        if anchor is None or anchor == layer:
            index, channels = call.index
            given = call.scale, length, wanted, channels, valid, call.sinks
            choice = decode.choose(q, index, *given)
        else:
            choice = _mapped(text.state.shared[SHARED_CHOICE], config, layer, heads, q.device)
        if anchor is not None and anchor == layer:
            text.state.shared[SHARED_CHOICE] = SharedChoice(layer, heads, choice)
        return decode.attend(q, call.k, call.v, choice, call.scale, length, valid, call.sinks)


def _mapped(
    shared: SharedChoice, config: CabConfig, layer: int, heads: tuple[int, int], device: Any
) -> Choice:
    """The anchor's choice, KV head by KV head as most of a group's heads are mapped."""
    require_heads_of(shared.layer, shared.heads, layer, heads)
    mapped = mapped_kv_heads(config.head_map[layer], heads[1]) if config.head_map else None
    if mapped == tuple(range(heads[1])):
        mapped = None
    # the layers of a model may be spread over devices
    return shared.choice.elsewhere(device, mapped)


def why_dense(
    text: Any, config: CabConfig, layer: nn.Module | None, index: KeyIndex | None
) -> str | None:
    """Why a call of few queries is no sparse step, as half a sentence; None where it is one."""
    if softcap(layer) is not None:
        return "soft-capped logits (decode)"
    if not config.sparse_decode or text.q_length != 1 or text.document is not None:
        return f"fewer than query_block={config.query_block} queries (decode)"
    # of a static cache the slots are known, and what is written on the device alone
    slots = text.slots if text.kv_length is None else text.kv_length
    if slots is None or not decodes_sparsely(config, slots):
        short = slots is not None and slots < config.min_length
        name = "min_length" if short else "decode_tokens"
        return f"too short for {name}={getattr(config, name)} (decode)"
    anchor = anchor_of(config, getattr(layer, "layer_idx", None))
    if anchor is not None and anchor < layer.layer_idx:
        shared = text.state.shared.get(SHARED_CHOICE)
        ready = shared is not None and shared.layer == anchor
    else:
        ready = index is not None
        if not ready and not torch.compiler.is_compiling():
            warn_once(
                ("sparse_decode", "no index"),
                "sparse_decode is True and the keys of a step have no index, so it is dense: let "
                "generate make the cache, or call cab_hf.index_cache, and pass the keys that the "
                "cache returns to the attention function.",
            )
    return None if ready else "a cache without an index (decode)"


def decodes_sparsely(config: CabConfig, tokens: int) -> bool:
    """Whether a step reads a text of so many tokens sparsely."""
    least = decode_from(config)
    return config.sparse_decode and least is not None and tokens >= least


def decode_from(config: CabConfig) -> int | None:
    """Tokens of a text from which a step reads it sparsely; None where it never does."""
    wanted = config.decode_tokens
    if isinstance(wanted, int):
        return max(config.min_length, DECODE_FROM * wanted)
    return config.min_length if DECODE_FROM * wanted <= 1 else None


def mapped_kv_heads(row: tuple[int, ...], kv_heads: int) -> tuple[int, ...]:
    """For each KV head that of the anchor which most of its query heads are mapped to.

    Args:
        row: of ``head_map``, the head of the anchor for each query head.
    """
    group = len(row) // kv_heads
    result = []
    for first in range(0, len(row), group):
        targets = [head // group for head in row[first : first + group]]
        most = max([targets.count(target) for target in targets])
        result.append([target for target in targets if targets.count(target) == most][0])
    return tuple(result)
