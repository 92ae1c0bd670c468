"""Attention over the key blocks of a plan by Triton kernels: forward and backward, D up to 1024.

The definition is `reference.attention`. The kernels read the plan's lists directly; no mask, bitmap
or BlockMask is built. Kernels access tiles by tensor descriptors (TMA) on Hopper and on data-centre
Blackwell GPUs, and by pointers on other GPUs.

For head dims up to `MAX_FUSED_HEAD_DIM`, one kernel keeps the output in registers (`fused.py`). For
larger head dims, separate kernels compute the products q · k and weights · v (`split.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef

from cab_hf.ops import launch
from cab_hf.ops.attention import fused, split
from cab_hf.ops.attention.tiles import (
    PlanTensors,
    allocate_transposed,
    compute_backward_stats,
    make_descriptor_ready,
)
from cab_hf.plan import BlockIndices, BlockPlan

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# smallest and largest head dim
HEAD_DIM_LIMITS = (16, 1024)
# largest head dim of `fused`
MAX_FUSED_HEAD_DIM = 256
# largest head dim of float32 inputs on GPUs where kernels access tiles by pointers; tiles of larger
# head dims do not fit in shared memory
MAX_POINTER_HEAD_DIM_FLOAT32 = 128
# schema of the arguments that pass a plan to a registered op, see `PlanArguments`
PLAN_SCHEMA = (
    "Tensor full_counts, Tensor full_indices, Tensor partial_counts, Tensor partial_indices,"
    " Tensor first_key, Tensor last_key, int query_block, int key_block, float scale, float softcap"
)
# schema of an op that returns the output and the log-sum-exp
FORWARD_SCHEMA = f"(Tensor q, Tensor k, Tensor v, {PLAN_SCHEMA}) -> (Tensor, Tensor)"
# schema of an op that returns the gradients of q, k and v
BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" {PLAN_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)


class PlanArguments(NamedTuple):
    """Plan, scale and soft cap as arguments of a registered op, in the order of `PLAN_SCHEMA`.

    P is the number of plan heads, M_q the number of query blocks, W the allocated width of a list.

    Attributes:
        full_counts, full_indices: Lists of `BlockPlan.full`, int32 [B, P, M_q] and
            [B, P, M_q, W].
        partial_counts, partial_indices: Lists of `BlockPlan.partial`, int32 [B, P, M_q] and
            [B, P, M_q, W].
        first_key, last_key: int32 [B, N_q], the first and the last visible key of each query.
        query_block, key_block: Block sizes in tokens.
        scale: Factor of the products q · k.
        softcap: Soft cap of the scaled logits; 0 for no cap.
    """

    full_counts: Tensor
    full_indices: Tensor
    partial_counts: Tensor
    partial_indices: Tensor
    first_key: Tensor
    last_key: Tensor
    query_block: int
    key_block: int
    scale: float
    softcap: float

    def to_plan_tensors(self) -> PlanTensors:
        """Return all fields except ``scale`` and ``softcap`` as `PlanTensors`."""
        return PlanTensors(
            full=BlockIndices(self.full_counts, self.full_indices),
            partial=BlockIndices(self.partial_counts, self.partial_indices),
            first_key=self.first_key,
            last_key=self.last_key,
            query_block=self.query_block,
            key_block=self.key_block,
        )


def unavailable(device: str, head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why this engine does not support a workload; None if the workload is supported.

    The reason continues a sentence that starts with the name of the engine, e.g. "runs on cuda, not
    on cpu".
    """
    if device != "cuda":
        return f"runs on cuda, not on {device}"
    if dtype not in SUPPORTED_DTYPES:
        return f"supports float16, bfloat16 and float32, not {dtype}"
    min_head_dim, max_head_dim = HEAD_DIM_LIMITS
    if dtype == torch.float32 and not launch.reads_by_descriptor(device):
        max_head_dim = MAX_POINTER_HEAD_DIM_FLOAT32
    if not min_head_dim <= head_dim <= max_head_dim or head_dim % 8:
        return (
            f"supports head dims {min_head_dim} to {max_head_dim} that are multiples of 8, "
            f"not {head_dim}"
        )
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool = False,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over the full and partial blocks of ``plan``; see `reference.attention`.

    Dense rows and sampled blocks are ignored; `complete.attention` adds dense rows and sampled
    blocks.

    Args:
        q: [B, H, N_q, D].
        k, v: [B, H_kv, N_k, D].
        plan: The key blocks that each query block attends to.
        scale: Factor of the products q · k.
        return_lse: True to also return the log-sum-exp of the logits of each query.
        softcap: Soft cap of the scaled logits; None for no cap.

    Returns:
        out: [B, H, N_q, D].
        lse: Only with ``return_lse``, float32 [B, H, N_q]. It is -inf for queries without keys.
    """
    out, lse = forward_op(q, k, v, **make_op_arguments(plan, scale, softcap))
    return (out, lse) if return_lse else out


def make_op_arguments(
    plan: BlockPlan, scale: float, softcap: float | None = None
) -> dict[str, Tensor | int | float]:
    """Return the fields of `PlanArguments` for ``plan``, as keyword arguments of a registered op.

    Args:
        plan: The plan. Dense rows and sampled blocks are not passed.
        scale: Factor of the products q · k.
        softcap: Soft cap of the scaled logits; None for no cap.
    """
    return {
        "full_counts": plan.full.counts,
        "full_indices": plan.full.indices,
        "partial_counts": plan.partial.counts,
        "partial_indices": plan.partial.indices,
        "first_key": plan.ranges.start,
        "last_key": plan.ranges.end,
        "query_block": plan.query_block,
        "key_block": plan.key_block,
        "scale": scale,
        "softcap": softcap or 0.0,
    }


def allocate_outputs(q, k, v, *_):
    """Allocate the results of an op with the schema `FORWARD_SCHEMA`, for shape inference."""
    return allocate_transposed(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def allocate_gradients(grad, grad_lse, q, k, v, *_):
    """Allocate the gradients of an op with the schema `BACKWARD_SCHEMA`, for shape inference."""
    return allocate_transposed(q), allocate_transposed(k), allocate_transposed(v)


def register_gradients(
    forward_op: CustomOpDef, select_backward_op: Callable[[int, int, int], CustomOpDef]
) -> None:
    """Register shape inference and autograd for an op with the schema `FORWARD_SCHEMA`.

    Args:
        forward_op: The op to register both for.
        select_backward_op: Function that maps (head dim, query block, key block) to an op with the
            schema `BACKWARD_SCHEMA`. This op computes the gradients if the loss does not depend on
            the log-sum-exp. If the loss does, `backward_op` computes the gradients.
    """

    def save_for_backward(ctx, inputs, output):
        q, k, v, *plan_values = inputs
        out, lse = output
        plan = PlanArguments._make(plan_values)
        ctx.set_materialize_grads(False)
        ctx.query_block, ctx.key_block = plan.query_block, plan.key_block
        ctx.scale, ctx.softcap = plan.scale, plan.softcap
        ctx.save_for_backward(
            *(q, k, v, out, lse),
            *(plan.full_counts, plan.full_indices, plan.partial_counts, plan.partial_indices),
            *(plan.first_key, plan.last_key),
        )

    def differentiate(ctx, grad, grad_lse):
        q, k, v, out, lse, *plan_tensors = ctx.saved_tensors
        full_counts, full_indices, partial_counts, partial_indices, first_key, last_key = (
            plan_tensors
        )
        if grad_lse is None:
            selected_op = select_backward_op(q.shape[3], ctx.query_block, ctx.key_block)
        else:
            selected_op = backward_op
        gradients = selected_op(
            grad=zeros_if_none(grad, out),
            grad_lse=grad_lse,
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            full_counts=full_counts,
            full_indices=full_indices,
            partial_counts=partial_counts,
            partial_indices=partial_indices,
            first_key=first_key,
            last_key=last_key,
            query_block=ctx.query_block,
            key_block=ctx.key_block,
            scale=ctx.scale,
            softcap=ctx.softcap,
        )
        return *gradients, *(None,) * (len(ctx.needs_input_grad) - len(gradients))

    forward_op.register_fake(allocate_outputs)
    forward_op.register_autograd(differentiate, setup_context=save_for_backward)


def zeros_if_none(grad: Tensor | None, out: Tensor) -> Tensor:
    """Return ``grad``, or zeros with the shape of ``out`` if autograd passes None as ``grad``."""
    return torch.zeros_like(out) if grad is None else grad


@torch.library.custom_op("cab_hf::block_attention", mutates_args=(), schema=FORWARD_SCHEMA)
def forward_op(q, k, v, *plan_values):
    """Compute attention by `fused` or by `split`, depending on the head dim.

    ``plan_values`` are the fields of `PlanArguments`, in order.
    """
    plan_arguments = PlanArguments._make(plan_values)
    q, k, v = map(make_descriptor_ready, (q, k, v))
    out, lse = allocate_transposed(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _choose_kernel_module(q).forward(
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        plan=plan_arguments.to_plan_tensors(),
        scale=plan_arguments.scale,
        softcap=plan_arguments.softcap,
    )
    return out, lse


@torch.library.custom_op(
    "cab_hf::block_attention_backward", mutates_args=(), schema=BACKWARD_SCHEMA
)
def backward_op(grad, grad_lse, q, k, v, out, lse, *plan_values):
    """Compute the gradients of q, k and v by `fused` or by `split`, depending on the head dim.

    ``plan_values`` are the fields of `PlanArguments`, in order.
    """
    plan_arguments = PlanArguments._make(plan_values)
    grad, q, k, v = map(make_descriptor_ready, (grad, q, k, v))
    return _choose_kernel_module(q).backward(
        grad=grad,
        q=q,
        k=k,
        v=v,
        stats=compute_backward_stats(grad=grad, grad_lse=grad_lse, out=out, lse=lse),
        plan=plan_arguments.to_plan_tensors(),
        scale=plan_arguments.scale,
        softcap=plan_arguments.softcap,
    )


backward_op.register_fake(allocate_gradients)
register_gradients(forward_op, lambda *_: backward_op)


def _choose_kernel_module(q: Tensor) -> ModuleType:
    """Return `fused` or `split`: the module whose kernels support the head dim of q."""
    return fused if q.shape[3] <= MAX_FUSED_HEAD_DIM else split
