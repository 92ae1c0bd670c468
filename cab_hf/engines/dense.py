"""Exact attention: by a dense kernel if one is fast, else under a plan or masks of few rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.call import Call
from cab_hf.call.mask import MaskInfo
from cab_hf.engines import DenseKernel, Engine
from cab_hf.ops import decode
from cab_hf.ops.attention import traced
from cab_hf.ops.decode import Choice
from cab_hf.ops.reference import Masks
from cab_hf.plan import DENSE_BLOCK_SIZE

# query rows that share one mask tensor, and the most elements of this tensor: both bound memory,
# not the result
ROWS_AT_A_TIME = 1024
MASK_AT_A_TIME = 1 << 28
# logits in memory at a time in the backward pass of a compiled model
LOGITS_AT_A_TIME = 1 << 26


@dataclass(frozen=True)
class Exact:
    """Exact attention by a dense kernel, for sequences without a mask except causality.

    Attributes:
        engine: The kernel or engine.
        kind: ``"exact"``; or ``"decode"`` if there are too few queries for sparse attention to pay.
        reason: Why the call is not sparse, as half a sentence; None if sparse attention was not
            requested.
    """

    engine: Engine | DenseKernel
    kind: str = "exact"
    reason: str | None = None

    def attend(self, call: Call) -> Tensor:
        """Return the output [B, H, N_q, D_v] of a call."""
        return self.engine.attention(call.q, *_written(call), call.scale)


class ExactByBlocks(Exact):
    """Exact attention by an engine, under a plan of all blocks."""

    def attend(self, call: Call) -> Tensor:
        size = call.text.dense_block_size or DENSE_BLOCK_SIZE
        layout = call.text.layout(size, size, call.q.device, from_start=False)
        q, k, v = layout.queries(call.q), layout.keys(call.k), layout.keys(call.v)
        plan, engine = layout.everything(), self.engine.capped(call.softcap)
        return layout.restore(layout.attend(engine, q, k, v, plan, call.scale, call.sinks))


class ExactByRows(Exact):
    """Exact attention by SDPA, under a separate mask for each chunk of rows.

    The sparse decode kernel serves single queries, with all visible keys selected. SDPA would run
    one program per batch row and head, which are few. It would also read every slot, and it
    supports neither sinks nor soft caps.
    """

    def attend(self, call: Call) -> Tensor:
        q, (k, v) = call.q, _written(call)
        special = call.work.sinks or call.work.softcap
        if q.shape[2] == 1 and (special or decode.has_kernels(q, k, v)):
            more = {"sinks": call.sinks, "softcap": call.softcap}
            return decode.attend(q, k, v, _all_seen(call.text, k), call.scale, **more)
        return _by_rows(q, k, v, call.text, call.scale)


def _written(call: Call) -> tuple[Tensor, Tensor]:
    """Return k and v without unwritten slots of a static cache, if the length is known."""
    length = call.text.kv_length
    return (call.k, call.v) if length is None else (call.k[:, :, :length], call.v[:, :, :length])


def _all_seen(text: MaskInfo, k: Tensor) -> Choice:
    """Return the visible keys of k [B, H_kv, N, D] for one query; cached for all layers."""
    batch, kv_heads, slots = k.shape[:3]
    seen: Choice = text.state.once(
        ("all keys of a decode step", slots, k.device),
        lambda: Choice.of(text.dense_rows(0, 1, 0, slots, k.device)[:, 0]),
    )
    return seen.expanded(batch, kv_heads)


def _by_rows(query: Tensor, key: Tensor, value: Tensor, mask: MaskInfo, scale: float) -> Tensor:
    if torch.compiler.is_compiling() and query.shape[2] > 1:
        slot = (0, mask.q_slot) if isinstance(mask.q_slot, Tensor) else (mask.q_slot, None)
        known = mask.valid, mask.document, mask.window, mask.chunks_from, *slot, False
        return _by_rows_op(query, key, value, scale, None, *known)[0]
    a_query = query.shape[0] * (query.shape[1] // key.shape[1])
    pieces = [
        _masked(query[:, :, rows], key[:, :, keys], value[:, :, keys], seen, scale)
        for rows, keys, seen, *_ in _masks(query, key, mask, MASK_AT_A_TIME // a_query)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _masks(query: Tensor, key: Tensor, mask: MaskInfo, at_a_time: int) -> Iterator[Masks]:
    """Yield the visible keys of chunks of rows, with ``at_a_time`` (query, key) pairs per chunk."""
    q_length, kv_length = query.shape[2], key.shape[2]
    known = not isinstance(mask.q_slot, Tensor)
    reach = kv_length if mask.window is None else min(kv_length, mask.window + ROWS_AT_A_TIME)
    step = min(ROWS_AT_A_TIME, max(1, at_a_time // reach))
    for start in range(0, q_length, step):
        stop = min(start + step, q_length)
        high = min(kv_length, mask.q_slot + stop) if known else kv_length
        low = max(0, mask.q_slot + start + 1 - mask.window) if known and mask.window else 0
        seen = mask.dense_rows(start, stop, low, high, query.device)
        yield Masks(slice(start, stop), slice(low, high), seen)


def _masked(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Compute SDPA under the mask ``rows``, bool [B or 1, 1, N_q, N_k]: [B, H, N_q, D].

    SDPA's fast kernels accept a mask only if q and k have the same number of heads. Therefore the
    queries of a group become more queries of their KV head, and no key is repeated.
    """
    batch, kv_heads = key.shape[:2]
    group, length = query.shape[1] // kv_heads, query.shape[2]
    folded = query.unflatten(1, (kv_heads, group)).flatten(2, 3)
    seen = rows.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3).expand(batch, -1, -1, -1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=seen, scale=scale)
    return out.unflatten(2, (group, length)).flatten(1, 2)


def _mask_of(query: Tensor, key: Tensor, values: tuple) -> MaskInfo:
    """Build the mask from the values that `_by_rows` passes to the op."""
    valid, document, window, chunks_from, slot, live, _ = values
    q_slot = slot if live is None else live
    shape = query.shape[0], query.shape[2], key.shape[2]
    return MaskInfo(*shape, q_slot, valid, document, window, chunks_from=chunks_from)


def _attend(query, key, value, scale, softcap, *values):
    out = _by_rows(query, key, value, _mask_of(query, key, values), scale)
    return out, query.new_empty(0, dtype=torch.float32)


def _masks_of_logits(query, key, value, *values):
    at_a_time = LOGITS_AT_A_TIME // (query.shape[0] * query.shape[1])
    return _masks(query, key, _mask_of(query, key, values), at_a_time)


_by_rows_op = traced.register(
    "attention_by_rows",
    "Tensor? valid, Tensor? document, int? window, Tensor? chunks_from, SymInt slot, Tensor? live,"
    " bool return_lse",
    _attend,
    _masks_of_logits,
)
