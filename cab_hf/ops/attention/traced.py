"""`reference.attention` as a registered op, for torch.compile.

`reference.attention` is a loop over chunks of queries. If torch.compile traced the loop, each chunk
would add nodes to the graph, and each sequence length would need another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef

from cab_hf.ops import reference
from cab_hf.ops.reference import Masks, cap_logits
from cab_hf.plan import BlockIndices, BlockPlan, KeyRanges

# schema of the arguments that pass a plan to the op, see `PlanArguments`
PLAN_SCHEMA = (
    "Tensor full_counts, Tensor full_indices, Tensor partial_counts, Tensor partial_indices,"
    " Tensor? sampled_counts, Tensor? sampled_indices, int sample_period, Tensor? dense_rows,"
    " Tensor first_key, Tensor last_key, Tensor key_valid, int query_block, int key_block,"
    " bool return_lse"
)


class PlanArguments(NamedTuple):
    """Plan and result options as arguments of the op, in the order of the schema `PLAN_SCHEMA`.

    P is the number of plan heads, M_q the number of query blocks, W the allocated width of a list.

    Attributes:
        full_counts, full_indices: Lists of `BlockPlan.full`, int32 [B, P, M_q] and
            [B, P, M_q, W].
        partial_counts, partial_indices: Lists of `BlockPlan.partial`, same shapes.
        sampled_counts, sampled_indices: Lists of `BlockPlan.sampled`, same shapes; None without
            sampled blocks.
        sample_period: Number of blocks that each sampled block represents.
        dense_rows: int64 [B, R], query blocks that attend to all visible keys, -1 for unused
            entries; None if the plan has no dense rows.
        first_key, last_key: int32 [B, N_q], the first and the last visible key of each query.
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
    first_key: Tensor
    last_key: Tensor
    key_valid: Tensor
    query_block: int
    key_block: int
    return_lse: bool

    def to_block_plan(self) -> BlockPlan:
        """Return the `BlockPlan`. Other fields of `KeyRanges` have their default values."""
        sampled = None
        if self.sampled_counts is not None:
            sampled = BlockIndices(self.sampled_counts, self.sampled_indices)
        return BlockPlan(
            full=BlockIndices(self.full_counts, self.full_indices),
            partial=BlockIndices(self.partial_counts, self.partial_indices),
            ranges=KeyRanges(start=self.first_key, end=self.last_key, key_valid=self.key_valid),
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
    """Compute `reference.attention` as one node of a compiled graph, with the same arguments."""
    sampled_lists, key_ranges = plan.sampled, plan.ranges
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
        sampled_counts=None if sampled_lists is None else sampled_lists.counts,
        sampled_indices=None if sampled_lists is None else sampled_lists.indices,
        sample_period=plan.sample_period,
        dense_rows=plan.dense_rows,
        first_key=key_ranges.start,
        last_key=key_ranges.end,
        key_valid=key_ranges.key_valid,
        query_block=plan.query_block,
        key_block=plan.key_block,
        return_lse=return_lse,
    )
    return (out, lse) if return_lse else out


def register_attention_op(
    op_name: str,
    schema: str,
    attend: Callable[..., tuple[Tensor, Tensor]],
    make_masks: Callable[..., Iterable[Masks]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register an attention op of (q, k, v, scale, softcap, *mask_arguments), with autograd.

    Args:
        op_name: Name of the op in the namespace ``cab_hf``.
        schema: Schema of ``mask_arguments``, the arguments that describe the mask. The last value
            is a bool, True if the op returns the log-sum-exp.
        attend: Forward function. Maps (q, k, v, scale, softcap, *mask_arguments) to the output
            [B, H, N_q, D_v] and the log-sum-exp [B, H, N_q]. The log-sum-exp is an empty tensor if
            the last value is False.
        make_masks: Maps (q, k, v, *mask_arguments) to the token masks of all queries, in chunks,
            from which the backward pass computes gradients.

    Returns:
        The op.
    """
    input_schema = f"Tensor q, Tensor k, Tensor v, float scale, float? softcap, {schema}"

    def forward(*inputs):
        return tuple(x.contiguous() for x in attend(*inputs))

    def allocate_outputs(q, k, v, scale, softcap, *mask_arguments):
        lse_shape = q.shape[:3] if mask_arguments[-1] else (0,)
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        return out, q.new_empty(lse_shape, dtype=dtype)

    def backward(grad, grad_lse, q, k, v, scale, softcap, *mask_arguments):
        return compute_gradients(
            grad=grad,
            grad_lse=grad_lse,
            q=q,
            k=k,
            v=v,
            scale=scale,
            softcap=softcap,
            masks=make_masks(q, k, v, *mask_arguments),
        )

    def allocate_gradients(grad, grad_lse, q, k, v, *_):
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    def save_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)
        ctx.out_shape = output[0].shape
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        # None for inputs that are tensors; (x,) for other inputs x, because x itself may be None
        ctx.non_tensor_inputs = [None if isinstance(x, Tensor) else (x,) for x in inputs]

    def differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple:
        saved_tensors = iter(ctx.saved_tensors)
        inputs = [
            next(saved_tensors) if non_tensor_input is None else non_tensor_input[0]
            for non_tensor_input in ctx.non_tensor_inputs
        ]
        grad = inputs[0].new_zeros(ctx.out_shape) if grad is None else grad
        return *backward_op(grad, grad_lse, *inputs), *(None,) * (len(inputs) - 3)

    forward_op = _register_custom_op(op_name, forward, f"({input_schema}) -> (Tensor, Tensor)")
    backward_op = _register_custom_op(
        f"{op_name}_backward",
        backward,
        f"(Tensor grad, Tensor? grad_lse, {input_schema}) -> (Tensor, Tensor, Tensor)",
    )
    forward_op.register_fake(allocate_outputs)
    forward_op.register_autograd(differentiate, setup_context=save_for_backward)
    backward_op.register_fake(allocate_gradients)
    return forward_op


def _register_custom_op(
    op_name: str, op_function: Callable[..., Any], signature: str
) -> CustomOpDef:
    """Register ``op_function`` as the op ``cab_hf::name`` with the schema ``signature``."""
    return torch.library.custom_op(
        f"cab_hf::{op_name}",
        op_function,
        mutates_args=(),
        schema=signature,
        # a CUDA graph cannot capture the op: the check for NaN and infinities is a device sync
        tags=(torch.Tag.cudagraph_unsafe,),
    )


def compute_gradients(
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
    """Compute the gradients of q, k and v for attention under token masks.

    Args:
        grad: [B, H, N_q, D_v], gradient of the output.
        grad_lse: [B, H, N_q], gradient of the log-sum-exp; None for zeros.
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        v: [B, H_kv, N_k, D_v].
        scale: Factor of the products q · k.
        softcap: Soft cap of the scaled logits; None for no cap.
        masks: The token masks of all queries, in chunks.
    """
    dtype, group_shape = torch.promote_types(q.dtype, torch.float32), (k.shape[1], -1)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
    for mask_chunk in masks:
        query_slice, key_slice = mask_chunk.query_slice, mask_chunk.key_slice
        # q_chunk, grad_chunk: [B, H_kv, g, rows, D]; k_chunk, v_chunk: [B, H_kv, 1, keys, D]
        q_chunk, grad_chunk = (
            x[:, :, query_slice].to(dtype).unflatten(1, group_shape) for x in (q, grad)
        )
        k_chunk, v_chunk = (x[:, :, key_slice].to(dtype).unsqueeze(2) for x in (k, v))
        mask_shape = q_chunk.shape[0], q.shape[1], -1, -1
        is_unseen = ~mask_chunk.is_attended.expand(mask_shape).unflatten(1, group_shape)
        if not mask_chunk.has_finite_kv:
            # as in the forward pass: 0 * NaN is NaN, so that keys and values with a weight of 0 are
            # replaced by zeros
            is_unseen_by_all = is_unseen.all(dim=-2).unsqueeze(-1)
            k_chunk, v_chunk = (torch.where(is_unseen_by_all, 0.0, x) for x in (k_chunk, v_chunk))

        # logits, p, dp, ds: [B, H_kv, g, rows, keys]
        logits = cap_logits(q_chunk @ k_chunk.transpose(-1, -2) * scale, softcap)
        softcap_slope = None if softcap is None else 1 - (logits / softcap).square()
        if mask_chunk.logit_bias is not None:
            logits = logits + mask_chunk.logit_bias.expand(mask_shape).unflatten(1, group_shape)
        p = logits.masked_fill(is_unseen, -torch.inf).softmax(-1).masked_fill(is_unseen, 0.0)
        dp = grad_chunk @ v_chunk.transpose(-1, -2)
        delta = (p * dp).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse[:, :, query_slice].unflatten(1, group_shape).unsqueeze(-1)
        ds = p * (dp - delta) * scale
        ds = ds if softcap_slope is None else ds * softcap_slope
        dq[:, :, query_slice] = (ds @ k_chunk).flatten(1, 2)
        dk[:, :, key_slice] += (ds.transpose(-1, -2) @ q_chunk).sum(2)
        dv[:, :, key_slice] += (p.transpose(-1, -2) @ grad_chunk).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _attend_by_reference(q, k, v, scale, softcap, *plan_values):
    """Compute `reference.attention` for the op: return the output and the log-sum-exp.

    The log-sum-exp is an empty tensor if ``return_lse`` is False.
    """
    plan_arguments = PlanArguments._make(plan_values)
    attend_result = reference.attention(
        q,
        k,
        v,
        plan_arguments.to_block_plan(),
        scale=scale,
        return_lse=plan_arguments.return_lse,
        softcap=softcap,
    )
    return (
        attend_result
        if plan_arguments.return_lse
        else (attend_result, q.new_empty(0, dtype=torch.float32))
    )


def _make_masks(q, k, v, *plan_values):
    """Return the token masks of the op's plan, for the backward pass."""
    return reference.iterate_masks(q, k, v, PlanArguments._make(plan_values).to_block_plan())


_attention_op = register_attention_op(
    "reference_attention", PLAN_SCHEMA, _attend_by_reference, _make_masks
)
