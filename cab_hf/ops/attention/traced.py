"""Attention in plain PyTorch as registered ops, for torch.compile.

The implementation is a loop over chunks of rows. If torch.compile traced the loop, each chunk would
add nodes to the graph, and each sequence length would need another graph. The definition is
`reference.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef

from cab_hf.ops import reference
from cab_hf.ops.reference import Masks, capped
from cab_hf.plan import BlockIndices, BlockPlan, KeyRanges

# schema of the arguments that pass a plan to the op, see `PlanArguments`
PLAN = (
    "Tensor full_counts, Tensor full_indices, Tensor partial_counts, Tensor partial_indices,"
    " Tensor? sampled_counts, Tensor? sampled_indices, int sample_period, Tensor? dense_rows,"
    " Tensor first, Tensor last, Tensor key_valid, int query_block, int key_block, bool return_lse"
)


class PlanArguments(NamedTuple):
    """Arguments `PLAN` of the op, in the order of the schema.

    Attributes:
        full_counts, full_indices: `BlockPlan.full`, int32 [B, P, M_q] and [B, P, M_q, W].
        partial_counts, partial_indices: `BlockPlan.partial`, same shapes.
        sampled_counts, sampled_indices: `BlockPlan.sampled`, same shapes; None without sampling.
        sample_period: Number of blocks that each sampled block represents.
        dense_rows: int64 [B, R], query blocks that attend to all visible keys; None if no block
            does.
        first, last: int32 [B, N_q], the first and the last visible key of each query.
        key_valid: bool [B, N_k], False for padding keys.
        query_block, key_block: Block sizes in tokens.
        return_lse: True if the op returns the log-sum-exp.
    """

    full_counts: Tensor
    full_indices: Tensor
    partial_counts: Tensor
    partial_indices: Tensor
    sampled_counts: Tensor | None
    sampled_indices: Tensor | None
    sample_period: int
    dense_rows: Tensor | None
    first: Tensor
    last: Tensor
    key_valid: Tensor
    query_block: int
    key_block: int
    return_lse: bool

    def plan(self) -> BlockPlan:
        """Return the plan. The static hints of `KeyRanges` have default values."""
        sampled = None
        if self.sampled_counts is not None:
            sampled = BlockIndices(self.sampled_counts, self.sampled_indices)
        return BlockPlan(
            full=BlockIndices(self.full_counts, self.full_indices),
            partial=BlockIndices(self.partial_counts, self.partial_indices),
            ranges=KeyRanges(start=self.first, end=self.last, key_valid=self.key_valid),
            query_block=self.query_block,
            key_block=self.key_block,
            dense_rows=self.dense_rows,
            sampled=sampled,
            sample_period=self.sample_period,
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
    """Compute `reference.attention`, with the same arguments, as one node of a graph."""
    sampled, ranges = plan.sampled, plan.ranges
    out, lse = _attention_op(
        q,
        k,
        v,
        scale=scale,
        softcap=softcap,
        full_counts=plan.full.counts,
        full_indices=plan.full.indices,
        partial_counts=plan.partial.counts,
        partial_indices=plan.partial.indices,
        sampled_counts=None if sampled is None else sampled.counts,
        sampled_indices=None if sampled is None else sampled.indices,
        sample_period=plan.sample_period,
        dense_rows=plan.dense_rows,
        first=ranges.start,
        last=ranges.end,
        key_valid=ranges.key_valid,
        query_block=plan.query_block,
        key_block=plan.key_block,
        return_lse=return_lse,
    )
    return (out, lse) if return_lse else out


def register(
    name: str,
    schema: str,
    attend: Callable[..., tuple[Tensor, Tensor]],
    masks: Callable[..., Iterable[Masks]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register the op ``cab_hf::name`` of (q, k, v, scale, softcap, *values), with gradients.

    Args:
        name: Name of the op.
        schema: Schema of ``values``, which describe the mask. The last value is a bool, True if the
            op returns the log-sum-exp.
        attend: Maps (q, k, v, scale, softcap, *values) to the output [B, H, N_q, D_v] and to the
            log-sum-exp [B, H, N_q], which is empty if the op does not return it.
        masks: Maps (q, k, v, *values) to the masks of all queries, in chunks.
    """
    parameters = f"Tensor q, Tensor k, Tensor v, float scale, float? softcap, {schema}"

    def forward(*inputs):
        return tuple(x.contiguous() for x in attend(*inputs))

    def forward_shapes(q, k, v, scale, softcap, *values):
        lse_shape = q.shape[:3] if values[-1] else (0,)
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        return out, q.new_empty(lse_shape, dtype=dtype)

    def backward(grad, grad_lse, q, k, v, scale, softcap, *values):
        return gradients(
            grad=grad,
            grad_lse=grad_lse,
            q=q,
            k=k,
            v=v,
            scale=scale,
            softcap=softcap,
            masks=masks(q, k, v, *values),
        )

    def backward_shapes(grad, grad_lse, q, k, v, *_):
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    def save(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)
        ctx.out_shape = output[0].shape
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        # (value,) for values that are not tensors, and None for tensors
        ctx.values = [None if isinstance(x, Tensor) else (x,) for x in inputs]

    def differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple:
        tensors = iter(ctx.saved_tensors)
        inputs = [next(tensors) if value is None else value[0] for value in ctx.values]
        grad = inputs[0].new_zeros(ctx.out_shape) if grad is None else grad
        return *backward_op(grad, grad_lse, *inputs), *(None,) * (len(inputs) - 3)

    forward_op = _custom_op(name, forward, f"({parameters}) -> (Tensor, Tensor)")
    backward_op = _custom_op(
        f"{name}_backward",
        backward,
        f"(Tensor grad, Tensor? grad_lse, {parameters}) -> (Tensor, Tensor, Tensor)",
    )
    forward_op.register_fake(forward_shapes)
    forward_op.register_autograd(differentiate, setup_context=save)
    backward_op.register_fake(backward_shapes)
    return forward_op


def _custom_op(name: str, function: Callable[..., Any], signature: str) -> CustomOpDef:
    """Register ``function`` as the op ``cab_hf::name`` with the schema ``signature``."""
    return torch.library.custom_op(
        f"cab_hf::{name}",
        function,
        mutates_args=(),
        schema=signature,
        # the search for NaN and infinities synchronises with the device
        tags=(torch.Tag.cudagraph_unsafe,),
    )


def gradients(
    *,
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
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        v: [B, H_kv, N_k, D_v].
        scale: Factor of the products q · k.
        softcap: Soft cap of the scaled logits; None for no cap.
        masks: The masks of all queries, in chunks.
    """
    dtype, groups = torch.promote_types(q.dtype, torch.float32), (k.shape[1], -1)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
    for chunk in masks:
        rows, keys = chunk.rows, chunk.keys
        # query, out_grad: [B, H_kv, g, rows, D]; key, value: [B, H_kv, 1, keys, D]
        query, out_grad = (x[:, :, rows].to(dtype).unflatten(1, groups) for x in (q, grad))
        key, value = (x[:, :, keys].to(dtype).unsqueeze(2) for x in (k, v))
        mask_shape = query.shape[0], q.shape[1], -1, -1
        unseen = ~chunk.seen.expand(mask_shape).unflatten(1, groups)
        if not chunk.is_finite:
            # as in the forward pass: a weight of 0 does not remove a NaN
            is_unused = unseen.all(dim=-2).unsqueeze(-1)
            key, value = (torch.where(is_unused, 0.0, x) for x in (key, value))

        # logits, p, dp, ds: [B, H_kv, g, rows, keys]
        logits = capped(query @ key.transpose(-1, -2) * scale, softcap)
        slope = None if softcap is None else 1 - (logits / softcap).square()
        if chunk.logit_bias is not None:
            logits = logits + chunk.logit_bias.expand(mask_shape).unflatten(1, groups)
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


def _attend(q, k, v, scale, softcap, *values):
    """Compute `reference.attention` as the body of the op; an empty log-sum-exp if not returned."""
    arguments = PlanArguments._make(values)
    result = reference.attention(
        q,
        k,
        v,
        arguments.plan(),
        scale=scale,
        return_lse=arguments.return_lse,
        softcap=softcap,
    )
    return result if arguments.return_lse else (result, q.new_empty(0, dtype=torch.float32))


def _masks(q, k, v, *values):
    """Return the masks of the op's plan, for the backward pass."""
    return reference.masks(q, k, v, PlanArguments._make(values).plan())


_attention_op = register("reference_attention", PLAN, _attend, _masks)
