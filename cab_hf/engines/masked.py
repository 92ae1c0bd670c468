"""Exact attention by SDPA, with a separate mask tensor for each chunk of query rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.mask import MaskDetails, MaskInfo
from cab_hf.ops.attention import traced
from cab_hf.ops.reference import Masks

# most query rows that share one mask tensor; bounds memory, does not affect the result
MAX_ROWS_PER_MASK = 1024
# most elements of a mask tensor; bounds memory, does not affect the result
MAX_MASK_ELEMENTS = 1 << 28
# most logits in memory at a time in the backward pass of a compiled model
MAX_LOGITS = 1 << 26


def attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskInfo, scale: float) -> Tensor:
    """Compute exact attention of q, k and v under ``mask``, [B, H, N_q, D_v].

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        v: [B, H_kv, N_k, D_v].
        mask: visible keys of each query.
        scale: factor of the logits.
    """
    if torch.compiler.is_compiling() and q.shape[2] > 1:
        # a static cache has a tensor offset, which the device changes
        is_offset_on_device = isinstance(mask.q_offset, Tensor)
        return _masked_attention_op(
            q,
            k,
            v,
            scale,
            softcap=None,
            padding_mask=mask.padding_mask,
            doc_ids=mask.doc_ids,
            window=mask.window,
            chunk_starts=mask.details.chunk_starts,
            q_offset=0 if is_offset_on_device else mask.q_offset,
            live_offset=mask.q_offset if is_offset_on_device else None,
            return_lse=False,
        )[0]
    # a mask tensor has one element per (query, key) pair, batch row and query head of a KV head
    num_mask_copies = q.shape[0] * (q.shape[1] // k.shape[1])
    out_chunks = [
        _attend_masked(
            q[:, :, query_slice],
            k[:, :, key_slice],
            v[:, :, key_slice],
            is_visible=is_visible,
            scale=scale,
        )
        for query_slice, key_slice, is_visible, *_ in _make_masks(
            q, k, mask, MAX_MASK_ELEMENTS // num_mask_copies
        )
    ]
    return out_chunks[0] if len(out_chunks) == 1 else torch.cat(out_chunks, dim=2)


def _make_masks(query: Tensor, key: Tensor, mask: MaskInfo, max_pairs: int) -> Iterator[Masks]:
    """Yield chunks of queries with their mask tensors, at most ``max_pairs`` pairs per chunk."""
    q_length, kv_length = query.shape[2], key.shape[2]
    # an offset on the device is unknown to the host, which then cannot cut the keys
    is_offset_on_host = not isinstance(mask.q_offset, Tensor)
    max_num_keys = (
        kv_length if mask.window is None else min(kv_length, mask.window + MAX_ROWS_PER_MASK)
    )
    queries_per_chunk = min(MAX_ROWS_PER_MASK, max(1, max_pairs // max_num_keys))
    for query_start in range(0, q_length, queries_per_chunk):
        query_stop = min(query_start + queries_per_chunk, q_length)
        key_stop = min(kv_length, mask.q_offset + query_stop) if is_offset_on_host else kv_length
        key_start = (
            max(0, mask.q_offset + query_start + 1 - mask.window)
            if is_offset_on_host and mask.window
            else 0
        )
        is_visible = mask.dense_mask(
            query_start=query_start,
            query_stop=query_stop,
            key_start=key_start,
            key_stop=key_stop,
            device=query.device,
        )
        yield Masks(slice(query_start, query_stop), slice(key_start, key_stop), is_visible)


def _attend_masked(
    query: Tensor, key: Tensor, value: Tensor, *, is_visible: Tensor, scale: float
) -> Tensor:
    """Compute SDPA under the mask ``is_visible``, bool [B or 1, 1, N_q, N_k]: [B, H, N_q, D_v].

    SDPA's fast kernels accept a mask only if q and k have the same number of heads. Therefore the
    queries of a group become more queries of their KV head, and no key is repeated.
    """
    batch, kv_heads = key.shape[:2]
    group_size, num_queries = query.shape[1] // kv_heads, query.shape[2]
    folded_query = query.unflatten(1, (kv_heads, group_size)).flatten(2, 3)
    folded_mask = is_visible.unsqueeze(2).expand((-1, -1, group_size, -1, -1)).flatten(2, 3)
    folded_mask = folded_mask.expand(batch, -1, -1, -1)
    out = F.scaled_dot_product_attention(
        folded_query, key, value, attn_mask=folded_mask, scale=scale
    )
    return out.unflatten(2, (group_size, num_queries)).flatten(1, 2)


def _make_mask_info(query: Tensor, key: Tensor, mask_arguments: tuple) -> MaskInfo:
    """Build a `MaskInfo` from the arguments of `_masked_attention_op` after ``softcap``."""
    padding_mask, doc_ids, window, chunk_starts, q_offset, live_offset, _ = mask_arguments
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


def _attend_for_op(query, key, value, scale, softcap, *mask_arguments):
    """Return the output of `attention` and an empty log-sum-exp, for `_masked_attention_op`."""
    out = attention(query, key, value, _make_mask_info(query, key, mask_arguments), scale=scale)
    return out, query.new_empty(0, dtype=torch.float32)


def _make_backward_masks(query, key, value, *mask_arguments):
    """Return chunks of queries with masks for the backward pass, as an iterator.

    A chunk has at most `MAX_LOGITS` logits.
    """
    max_pairs = MAX_LOGITS // (query.shape[0] * query.shape[1])
    return _make_masks(query, key, _make_mask_info(query, key, mask_arguments), max_pairs)


_masked_attention_op = traced.register_attention_op(
    "attention_by_rows",
    "Tensor? padding_mask, Tensor? doc_ids, int? window, Tensor? chunk_starts, SymInt q_offset,"
    " Tensor? live_offset, bool return_lse",
    _attend_for_op,
    _make_backward_masks,
)
