"""`attention`: exact attention by SDPA, under a separate mask tensor for each chunk of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.mask import MaskDetails, MaskInfo
from cab_hf.ops.attention import traced
from cab_hf.ops.reference import Masks

# query rows that share one mask tensor, and the most elements of this tensor: both bound memory,
# not the result
ROWS_AT_A_TIME = 1024
MASK_AT_A_TIME = 1 << 28
# logits in memory at a time in the backward pass of a compiled model
LOGITS_AT_A_TIME = 1 << 26


def attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskInfo, scale: float) -> Tensor:
    """Return the output [B, H, N_q, D_v] of q, k and v under ``mask``.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        v: [B, H_kv, N_k, D_v].
        mask: visible keys of each query.
        scale: factor of the logits.
    """
    if torch.compiler.is_compiling() and q.shape[2] > 1:
        is_live = isinstance(mask.q_offset, Tensor)
        return _masked_op(
            q,
            k,
            v,
            scale,
            softcap=None,
            padding_mask=mask.padding_mask,
            doc_ids=mask.doc_ids,
            window=mask.window,
            chunk_starts=mask.details.chunk_starts,
            q_offset=0 if is_live else mask.q_offset,
            live_offset=mask.q_offset if is_live else None,
            return_lse=False,
        )[0]
    rows_of_a_key = q.shape[0] * (q.shape[1] // k.shape[1])
    outs = [
        _masked(q[:, :, rows], k[:, :, keys], v[:, :, keys], visible, scale=scale)
        for rows, keys, visible, *_ in _masks(q, k, mask, MASK_AT_A_TIME // rows_of_a_key)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _masks(query: Tensor, key: Tensor, mask: MaskInfo, max_pairs: int) -> Iterator[Masks]:
    """Yield the visible keys of chunks of rows, with at most ``max_pairs`` (query, key) pairs."""
    q_length, kv_length = query.shape[2], key.shape[2]
    is_known = not isinstance(mask.q_offset, Tensor)
    num_keys = kv_length if mask.window is None else min(kv_length, mask.window + ROWS_AT_A_TIME)
    step = min(ROWS_AT_A_TIME, max(1, max_pairs // num_keys))
    for start in range(0, q_length, step):
        stop = min(start + step, q_length)
        high = min(kv_length, mask.q_offset + stop) if is_known else kv_length
        low = max(0, mask.q_offset + start + 1 - mask.window) if is_known and mask.window else 0
        visible = mask.dense_rows(start=start, stop=stop, low=low, high=high, device=query.device)
        yield Masks(slice(start, stop), slice(low, high), visible)


def _masked(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Compute SDPA under the mask ``rows``, bool [B or 1, 1, N_q, N_k]: [B, H, N_q, D].

    SDPA's fast kernels accept a mask only if q and k have the same number of heads. Therefore the
    queries of a group become more queries of their KV head, and no key is repeated.
    """
    batch, kv_heads = key.shape[:2]
    group, length = query.shape[1] // kv_heads, query.shape[2]
    folded = query.unflatten(1, (kv_heads, group)).flatten(2, 3)
    folded_mask = (
        rows.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3).expand(batch, -1, -1, -1)
    )
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=folded_mask, scale=scale)
    return out.unflatten(2, (group, length)).flatten(1, 2)


def _mask_of(query: Tensor, key: Tensor, values: tuple) -> MaskInfo:
    """Build the mask from the values that `attention` passes to the op."""
    padding_mask, doc_ids, window, chunk_starts, q_offset, live_offset, _ = values
    return MaskInfo(
        batch=query.shape[0],
        q_length=query.shape[2],
        kv_length=key.shape[2],
        q_offset=q_offset if live_offset is None else live_offset,
        padding_mask=padding_mask,
        doc_ids=doc_ids,
        window=window,
        details=MaskDetails(chunk_starts=chunk_starts),
    )


def _attend(query, key, value, scale, softcap, *values):
    """Compute `attention` as the body of the op, and an empty log-sum-exp."""
    out = attention(query, key, value, _mask_of(query, key, values), scale=scale)
    return out, query.new_empty(0, dtype=torch.float32)


def _masks_of_logits(query, key, value, *values):
    """Return the masks of chunks whose logits the backward pass of the op holds at a time."""
    max_pairs = LOGITS_AT_A_TIME // (query.shape[0] * query.shape[1])
    return _masks(query, key, _mask_of(query, key, values), max_pairs)


_masked_op = traced.register(
    "attention_by_rows",
    "Tensor? padding_mask, Tensor? doc_ids, int? window, Tensor? chunk_starts, SymInt q_offset,"
    " Tensor? live_offset, bool return_lse",
    _attend,
    _masks_of_logits,
)
