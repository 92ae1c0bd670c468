"""Attention under a plan by our own Triton kernels: forward, backward, any head dim to 1024.

The definition is `reference.attention`. A plan's lists are read as they are; no mask, bitmap or
BlockMask is made. Tiles travel by tensor descriptors (TMA on Hopper and later, plain loads before).
Up to `FUSED_HEAD_DIM` channels one kernel keeps its output in registers (below); above, both
products are split over D (`split_attention.py`).
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from cab_hf.ops.attention import fused, split
from cab_hf.ops.attention.tiles import Rows, like
from cab_hf.plan import BlockLists, BlockPlan

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (16, 1024)
FUSED_HEAD_DIM = 256


def unavailable(device: str, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why this engine cannot run here, as half a sentence; None when it can."""
    if device != "cuda":
        return f"runs on cuda, not on {device}"
    if dtype not in DTYPES:
        return f"takes float16, bfloat16 and float32, not {dtype}"
    low, high = HEAD_DIMS
    if not low <= head_dim <= high or head_dim % 8:
        return f"takes head dims {low} to {high} that are multiples of 8, not {head_dim}"
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention under ``plan``, [B, H, N_q, D]; see `reference.attention`, which defines it.

    With ``return_lse`` also the log-sum-exp of every query's logits, float32 [B, H, N_q], -inf for
    a query that sees nothing; gradients flow through the output alone.
    """
    out, lse = _forward_op(
        q,
        k,
        v,
        plan.full.counts,
        plan.full.indices,
        plan.partial.counts,
        plan.partial.indices,
        plan.spans.first,
        plan.spans.last,
        plan.query_block,
        plan.key_block,
        scale,
    )
    return (out, lse) if return_lse else out


# --- registered ops


@torch.library.custom_op("cab_hf::block_attention", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    full_counts: Tensor,
    full_indices: Tensor,
    partial_counts: Tensor,
    partial_indices: Tensor,
    first: Tensor,
    last: Tensor,
    query_block: int,
    key_block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    lists = (full_counts, full_indices, partial_counts, partial_indices)
    rows = _rows(*lists, first, last, query_block, key_block)
    return _way(q).forward(q, k, v, rows, scale)


@_forward_op.register_fake
def _(q, k, v, *_):
    return like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("cab_hf::block_attention_backward", mutates_args=())
def backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    full_counts: Tensor,
    full_indices: Tensor,
    partial_counts: Tensor,
    partial_indices: Tensor,
    first: Tensor,
    last: Tensor,
    query_block: int,
    key_block: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lists = (full_counts, full_indices, partial_counts, partial_indices)
    rows = _rows(*lists, first, last, query_block, key_block)
    return _way(q).backward(grad, q, k, v, out, lse, rows, scale)


@backward_op.register_fake
def _(grad, q, k, v, *_):
    return tuple(map(like, (q, k, v)))


def _save(ctx, inputs, output):
    *tensors, ctx.query_block, ctx.key_block, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _differentiate(ctx, grad, _):
    grads = backward_op(grad, *ctx.saved_tensors, ctx.query_block, ctx.key_block, ctx.scale)
    return *grads, *(None,) * 9


_forward_op.register_autograd(_differentiate, setup_context=_save)


def _rows(
    full_counts: Tensor,
    full_indices: Tensor,
    partial_counts: Tensor,
    partial_indices: Tensor,
    first: Tensor,
    last: Tensor,
    query_block: int,
    key_block: int,
) -> Rows:
    full = BlockLists(full_counts, full_indices)
    partial = BlockLists(partial_counts, partial_indices)
    first, last = (x if x.stride(-1) == 1 else x.contiguous() for x in (first, last))
    return Rows(full, partial, first, last, query_block, key_block)


def _way(q: Tensor) -> ModuleType:
    return fused if q.shape[3] <= FUSED_HEAD_DIM else split
