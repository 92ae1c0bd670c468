"""Exact attention: by PyTorch where that is fast, else under a plan or masks of a few rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.engines import FFPA, SDPA, Engine
from cab_hf.mask import CabMask
from cab_hf.plan import EXACT_BLOCK

# query rows that share one mask tensor, and the elements it may have: they bound memory, not the
# result
ROWS_AT_A_TIME = 1024
MASK_AT_A_TIME = 1 << 28


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: CabMask, scale: float, engine: Engine
) -> Tensor:
    """[B, H, N_q, D] of query [B, H, N_q, D] over key and value [B, H_kv, N_k, D]."""
    written = mask.kv_length is not None
    if written:
        key, value = key[:, :, : mask.kv_length], value[:, :, : mask.kv_length]
    if engine is FFPA:
        return engine.attention(query, key, value, None, scale)
    if engine is not SDPA:
        return _by_blocks(query, key, value, mask, scale, engine)
    if mask.plain and written and query.shape[2] in (1, key.shape[2]):
        return engine.attention(query, key, value, None, scale)
    return _by_rows(query, key, value, mask, scale)


def _by_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: CabMask, scale: float, engine: Engine
) -> Tensor:
    """By an engine, under a plan that keeps everything."""
    frame = mask.frame(EXACT_BLOCK, EXACT_BLOCK, query.device)
    q, k, v = frame.queries(query), frame.keys(key), frame.keys(value)
    return frame.restore(engine.attention(q, k, v, mask.everything(frame), scale))


def _by_rows(query: Tensor, key: Tensor, value: Tensor, mask: CabMask, scale: float) -> Tensor:
    """By SDPA under a mask of its own for some rows at a time."""
    batch, kv_heads, kv_length = key.shape[:3]
    q_length = query.shape[2]
    known = isinstance(mask.q_slot, int)
    reach = kv_length if mask.window is None else min(kv_length, mask.window + ROWS_AT_A_TIME)
    a_query = batch * (query.shape[1] // kv_heads) * reach
    step = min(ROWS_AT_A_TIME, max(1, MASK_AT_A_TIME // a_query))
    pieces = []
    for start in range(0, q_length, step):
        stop = min(start + step, q_length)
        high = min(kv_length, mask.q_slot + stop) if known else kv_length
        low = max(0, mask.q_slot + start + 1 - mask.window) if known and mask.window else 0
        rows = mask.dense_rows(start, stop, low, high, query.device)
        keys, values = key[:, :, low:high], value[:, :, low:high]
        pieces.append(_masked(query[:, :, start:stop], keys, values, rows, scale))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _masked(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scale: float) -> Tensor:
    """SDPA under the mask ``rows``, bool [B or 1, 1, N_q, N_k]: [B, H, N_q, D].

    SDPA's fast kernels take a mask only where every query head has keys of its own. The queries of
    a group become more queries of their KV head, so that no key is repeated.
    """
    batch, kv_heads = key.shape[:2]
    group, length = query.shape[1] // kv_heads, query.shape[2]
    folded = query.unflatten(1, (kv_heads, group)).flatten(2, 3)
    seen = rows.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3).expand(batch, -1, -1, -1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=seen, scale=scale)
    return out.unflatten(2, (group, length)).flatten(1, 2)
