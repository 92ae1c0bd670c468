"""Attention over the key blocks of a plan by Triton kernels: forward and backward, D up to 1024.

The definition is `reference.attention`. The kernels read the plan's lists directly; no mask, bitmap
or BlockMask is built. Kernels access tiles by tensor descriptors (TMA) on Hopper and on data-centre
Blackwell GPUs, and by pointers on other GPUs.

For head dims up to `FUSED_HEAD_DIM`, one kernel keeps the output in registers (`fused.py`). For
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
from cab_hf.ops.attention.tiles import PlanTensors, backward_stats, described, empty_transposed
from cab_hf.plan import BlockIndices, BlockPlan

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# smallest and largest head dim
HEAD_DIMS = (16, 1024)
# largest head dim of `fused`
FUSED_HEAD_DIM = 256
# largest head dim of float32 inputs on GPUs where kernels access tiles by pointers; tiles of larger
# head dims do not fit in shared memory
POINTER_HEAD_DIM_FLOAT32 = 128
# schema of the arguments that pass a plan to a registered op, see `PlanArguments`
PLAN = (
    "Tensor full_counts, Tensor full_indices, Tensor partial_counts, Tensor partial_indices,"
    " Tensor first, Tensor last, int query_block, int key_block, float scale, float softcap"
)
# schema of an op that returns the output and the log-sum-exp
FORWARD = f"(Tensor q, Tensor k, Tensor v, {PLAN}) -> (Tensor, Tensor)"
# schema of an op that returns the gradients of q, k and v
BACKWARD = (
    "(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" {PLAN}) -> (Tensor, Tensor, Tensor)"
)


class PlanArguments(NamedTuple):
    """Plan, scale and soft cap as arguments of a registered op, in the order of the schema `PLAN`.

    P is the number of plan heads, M_q the number of query blocks, W the allocated width of a list.

    Attributes:
        full_counts, full_indices: Lists of `BlockPlan.full`, int32 [B, P, M_q] and
            [B, P, M_q, W].
        partial_counts, partial_indices: Lists of `BlockPlan.partial`, int32 [B, P, M_q] and
            [B, P, M_q, W].
        first, last: int32 [B, N_q], the first and the last visible key of each query.
        query_block, key_block: Block sizes in tokens.
        scale: Factor of the products q · k.
        softcap: Soft cap of the scaled logits; 0 for no cap.
    """

    full_counts: Tensor
    full_indices: Tensor
    partial_counts: Tensor
    partial_indices: Tensor
    first: Tensor
    last: Tensor
    query_block: int
    key_block: int
    scale: float
    softcap: float

    def plan(self) -> PlanTensors:
        """Return all fields except ``scale`` and ``softcap`` as `PlanTensors`."""
        return PlanTensors(
            full=BlockIndices(self.full_counts, self.full_indices),
            partial=BlockIndices(self.partial_counts, self.partial_indices),
            first=self.first,
            last=self.last,
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
    if dtype not in DTYPES:
        return f"supports float16, bfloat16 and float32, not {dtype}"
    low, high = HEAD_DIMS
    if dtype == torch.float32 and not launch.reads_by_descriptor(device):
        high = POINTER_HEAD_DIM_FLOAT32
    if not low <= head_dim <= high or head_dim % 8:
        return f"supports head dims {low} to {high} that are multiples of 8, not {head_dim}"
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
    out, lse = forward_op(q, k, v, **op_arguments(plan, scale, softcap))
    return (out, lse) if return_lse else out


def op_arguments(
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
        "first": plan.ranges.start,
        "last": plan.ranges.end,
        "query_block": plan.query_block,
        "key_block": plan.key_block,
        "scale": scale,
        "softcap": softcap or 0.0,
    }


def fake_outputs(q, k, v, *_):
    """Allocate output and log-sum-exp of an op with the schema `FORWARD`, for shape inference."""
    return empty_transposed(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def fake_gradients(grad, grad_lse, q, k, v, *_):
    """Allocate the gradients of an op with the schema `BACKWARD`, for shape inference."""
    return empty_transposed(q), empty_transposed(k), empty_transposed(v)


def register_gradients(
    forward_op: CustomOpDef, backward_without_lse: Callable[[int, int, int], CustomOpDef]
) -> None:
    """Register shape inference and autograd for an op with the schema `FORWARD`.

    Args:
        forward_op: The op to register both for.
        backward_without_lse: Function that maps (head dim, query block, key block) to an op with
            the schema `BACKWARD`. This op computes the gradients if the loss does not depend on the
            log-sum-exp. If the loss does, `backward_op` computes the gradients.
    """

    def save(ctx, inputs, output):
        q, k, v, *values = inputs
        out, lse = output
        plan = PlanArguments._make(values)
        ctx.set_materialize_grads(False)
        ctx.query_block, ctx.key_block = plan.query_block, plan.key_block
        ctx.scale, ctx.softcap = plan.scale, plan.softcap
        ctx.save_for_backward(
            *(q, k, v, out, lse),
            *(plan.full_counts, plan.full_indices, plan.partial_counts, plan.partial_indices),
            *(plan.first, plan.last),
        )

    def differentiate(ctx, grad, grad_lse):
        q, k, v, out, lse, *plan_tensors = ctx.saved_tensors
        full_counts, full_indices, partial_counts, partial_indices, first, last = plan_tensors
        if grad_lse is None:
            backward = backward_without_lse(q.shape[3], ctx.query_block, ctx.key_block)
        else:
            backward = backward_op
        gradients = backward(
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
            first=first,
            last=last,
            query_block=ctx.query_block,
            key_block=ctx.key_block,
            scale=ctx.scale,
            softcap=ctx.softcap,
        )
        return *gradients, *(None,) * (len(ctx.needs_input_grad) - len(gradients))

    forward_op.register_fake(fake_outputs)
    forward_op.register_autograd(differentiate, setup_context=save)


def zeros_if_none(grad: Tensor | None, out: Tensor) -> Tensor:
    """Return ``grad``, or zeros with the shape of ``out`` if autograd passes None as ``grad``."""
    return torch.zeros_like(out) if grad is None else grad


@torch.library.custom_op("cab_hf::block_attention", mutates_args=(), schema=FORWARD)
def forward_op(q, k, v, *values):
    """Compute attention by `fused` or by `split`, depending on the head dim.

    ``values`` are the fields of `PlanArguments`, in order.
    """
    arguments = PlanArguments._make(values)
    q, k, v = map(described, (q, k, v))
    out, lse = empty_transposed(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _kernels(q).forward(
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        plan=arguments.plan(),
        scale=arguments.scale,
        softcap=arguments.softcap,
    )
    return out, lse


@torch.library.custom_op("cab_hf::block_attention_backward", mutates_args=(), schema=BACKWARD)
def backward_op(grad, grad_lse, q, k, v, out, lse, *values):
    """Compute the gradients of q, k and v by `fused` or by `split`, depending on the head dim.

    ``values`` are the fields of `PlanArguments`, in order.
    """
    arguments = PlanArguments._make(values)
    grad, q, k, v = map(described, (grad, q, k, v))
    return _kernels(q).backward(
        grad=grad,
        q=q,
        k=k,
        v=v,
        stats=backward_stats(grad=grad, grad_lse=grad_lse, out=out, lse=lse),
        plan=arguments.plan(),
        scale=arguments.scale,
        softcap=arguments.softcap,
    )


backward_op.register_fake(fake_gradients)
register_gradients(forward_op, lambda *_: backward_op)


def _kernels(q: Tensor) -> ModuleType:
    """Return `fused` or `split`: the module whose kernels support the head dim of q."""
    return fused if q.shape[3] <= FUSED_HEAD_DIM else split
