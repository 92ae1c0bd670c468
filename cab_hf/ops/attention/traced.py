"""Attention in plain PyTorch as registered ops, for torch.compile.

The implementation loops over chunks of rows. Traced, each chunk would be a part of the graph, and
each sequence length would need another graph. The definition is `reference.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cab_hf.ops import reference
from cab_hf.ops.reference import Masks, capped
from cab_hf.plan import BlockIndices, BlockPlan, KeyRanges

PLAN = (
    "Tensor full_counts, Tensor full_indices, Tensor partial_counts, Tensor partial_indices,"
    " Tensor? sampled_counts, Tensor? sampled_indices, int sample_period, Tensor? dense_rows,"
    " Tensor first, Tensor last, Tensor key_valid, int query_block, int key_block, bool return_lse"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool = False,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `reference.attention` as one node of a graph."""
    sampled, ranges = plan.sampled, plan.ranges
    out, lse = _attention_op(
        *(q, k, v, scale, softcap),
        *(plan.full.counts, plan.full.indices, plan.partial.counts, plan.partial.indices),
        *((None, None) if sampled is None else (sampled.counts, sampled.indices)),
        *(plan.sample_period, plan.dense_rows),
        *(ranges.start, ranges.end, ranges.key_valid, *plan.blocks, return_lse),
    )
    return (out, lse) if return_lse else out


def register(
    name: str,
    schema: str,
    attend: Callable[..., tuple[Tensor, Tensor]],
    masks: Callable[..., Iterable[Masks]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register the op ``cab_hf::name`` of (q, k, v, scale, softcap, others), with gradients.

    Args:
        schema: Schema of the others. The last argument is True if the log-sum-exp is returned.
        attend: Computes the output [B, H, N_q, D_v] and the log-sum-exp, empty if not requested.
        masks: Maps (q, k, v, others) to the masks of the queries.
    """
    given = f"Tensor q, Tensor k, Tensor v, float scale, float? softcap, {schema}"

    def forward(q, *others):
        return tuple(x.contiguous() for x in attend(q, *others))

    def forward_shapes(q, k, v, *others):
        lse = q.shape[:3] if others[-1] else (0,)
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(lse, dtype=wide)

    def backward(grad, grad_lse, q, k, v, scale, softcap, *others):
        return gradients(grad, grad_lse, q, k, v, scale, softcap, masks(q, k, v, *others))

    def save(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)
        ctx.shape = output[0].shape
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        # values that are not tensors, and None in the places of tensors
        ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]

    def differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple:
        tensors = iter(ctx.saved_tensors)
        inputs = [next(tensors) if x is None else x[0] for x in ctx.others]
        grad = inputs[0].new_zeros(ctx.shape) if grad is None else grad
        return *backward_op(grad, grad_lse, *inputs), *(None,) * (len(inputs) - 3)

    def op(name: str, function: Callable[..., Any], given: str, given_back: str):
        schema = f"({given}) -> ({given_back})"
        # the search for NaN and infinities synchronises with the device
        known = {"mutates_args": (), "schema": schema, "tags": (torch.Tag.cudagraph_unsafe,)}
        return torch.library.custom_op(f"cab_hf::{name}", function, **known)

    forward_op = op(name, forward, given, "Tensor, Tensor")
    backward_op = op(
        *(f"{name}_backward", backward),
        *(f"Tensor grad, Tensor? grad_lse, {given}", "Tensor, Tensor, Tensor"),
    )
    forward_op.register_fake(forward_shapes)
    forward_op.register_autograd(differentiate, setup_context=save)
    backward_op.register_fake(lambda *x: tuple(each.new_empty(each.shape) for each in x[2:5]))
    return forward_op


def gradients(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    masks: Iterable[Masks],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v for queries under ``masks``.

    Args:
        grad: [B, H, N_q, D_v], gradient of the output.
        grad_lse: [B, H, N_q], gradient of the log-sum-exp; None for zeros.
    """
    wide, groups = torch.promote_types(q.dtype, torch.float32), (k.shape[1], -1)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, v))
    for rows, keys, seen, raised, sound in masks:
        # [B, H_kv, g, rows, D] and [B, H_kv, 1, keys, D]
        query, out_grad = (x[:, :, rows].to(wide).unflatten(1, groups) for x in (q, grad))
        key, value = (x[:, :, keys].to(wide).unsqueeze(2) for x in (k, v))
        heads = query.shape[0], q.shape[1], -1, -1
        unseen = ~seen.expand(heads).unflatten(1, groups)
        if not sound:
            # as in the forward pass: a weight of 0 does not remove a NaN
            nowhere = unseen.all(dim=-2).unsqueeze(-1)
            key, value = (torch.where(nowhere, 0.0, x) for x in (key, value))
        logits = capped(query @ key.transpose(-1, -2) * scale, softcap)
        slope = None if softcap is None else 1 - (logits / softcap).square()
        if raised is not None:
            logits = logits + raised.expand(heads).unflatten(1, groups)
        p = logits.masked_fill(unseen, -torch.inf).softmax(-1).masked_fill(unseen, 0.0)
        dp = out_grad @ value.transpose(-1, -2)
        delta = (p * dp).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse[:, :, rows].unflatten(1, groups).unsqueeze(-1)
        ds = p * (dp - delta) * scale
        ds = ds if slope is None else ds * slope
        dq[:, :, rows] = (ds @ key).flatten(1, 2)
        dk[:, :, keys] += (ds.transpose(-1, -2) @ query).sum(2)
        dv[:, :, keys] += (p.transpose(-1, -2) @ out_grad).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _plan_of(values: tuple) -> BlockPlan:
    """Build the plan from the values that `attention` passes."""
    lists, (sampled, indices, sample_period, dense_rows) = values[:4], values[4:8]
    return BlockPlan(
        BlockIndices(*lists[:2]),
        BlockIndices(*lists[2:]),
        KeyRanges(*values[8:11]),
        *values[11:13],
        dense_rows,
        None if sampled is None else BlockIndices(sampled, indices),
        sample_period,
    )


def _attend(q, k, v, scale, softcap, *values):
    plan, return_lse = _plan_of(values), values[-1]
    result = reference.attention(q, k, v, plan, scale, return_lse, softcap)
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


def _masks(q, k, v, *values):
    return reference.masks(q, k, v, _plan_of(values))


_attention_op = register("reference_attention", PLAN, _attend, _masks)
