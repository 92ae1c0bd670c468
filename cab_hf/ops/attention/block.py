"""Attention under a plan by Triton kernels: forward and backward, for head dims up to 1024.

The definition is `reference.attention`. The kernels read the plan's lists directly; no mask, bitmap
or BlockMask is built. Tiles are copied by tensor descriptors: TMA on Hopper and later, plain loads
on older GPUs. Up to `FUSED_HEAD_DIM` channels, one kernel keeps the output in registers
(`fused.py`). Above that, both products are split over D (`split.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.library import CustomOpDef

from cab_hf.ops import launch
from cab_hf.ops.attention import fused, split
from cab_hf.ops.attention.tiles import PlanTensors, backward_stats, described, like
from cab_hf.plan import BlockIndices, BlockPlan

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (16, 1024)
FUSED_HEAD_DIM = 256
# with larger head dims, tiles do not fit the shared memory of GPUs whose kernels read by pointers
POINTER_HEAD_DIM_FLOAT32 = 128
# arguments and results of the registered ops
PLAN = (
    "Tensor full_counts, Tensor full_indices, Tensor partial_counts, Tensor partial_indices,"
    " Tensor first, Tensor last, int query_block, int key_block, float scale, float softcap"
)
FORWARD = f"(Tensor q, Tensor k, Tensor v, {PLAN}) -> (Tensor, Tensor)"
BACKWARD = (
    "(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" {PLAN}) -> (Tensor, Tensor, Tensor)"
)


def unavailable(device: str, head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why this engine cannot run here, as half a sentence; None if it can."""
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
    """Compute attention under ``plan``, [B, H, N_q, D]; `reference.attention` is the definition.

    With ``return_lse`` also return the log-sum-exp of the logits of each query. It is float32 [B,
    H, N_q], and -inf for a query without keys.
    """
    out, lse = forward_op(q, k, v, *flattened(plan, scale, softcap))
    return (out, lse) if return_lse else out


def flattened(plan: BlockPlan, scale: float, softcap: float | None = None) -> tuple:
    """Return the arguments `PLAN` of a registered op; see `rows_of`. No soft cap is passed as 0."""
    lists = (tensor for part in (plan.full, plan.partial) for tensor in (part.counts, part.indices))
    return *lists, plan.ranges.start, plan.ranges.end, *plan.blocks, scale, softcap or 0.0


def rows_of(arguments: tuple) -> tuple[PlanTensors, float, float]:
    """Return the plan, the scale and the soft cap from the arguments `PLAN`."""
    full, partial = BlockIndices(*arguments[:2]), BlockIndices(*arguments[2:4])
    return PlanTensors(full, partial, *arguments[4:-2]), *arguments[-2:]


def shapes(q, k, v, *_):
    """Return empty outputs of an op with these first arguments: output and log-sum-exp."""
    return like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def gradient_shapes(grad, grad_lse, q, k, v, *_):
    """Return empty outputs of the backward op: gradients of q, k and v."""
    return tuple(map(like, (q, k, v)))


def register_gradients(forward_op: CustomOpDef, backward_for: Callable[..., CustomOpDef]) -> None:
    """Register the shapes and gradients of an op of the schema `FORWARD`.

    Args:
        backward_for: Returns the op of the schema `BACKWARD` for a head dim, query block and key
            block. It is used if the loss does not depend on the log-sum-exp.
    """

    def save(ctx, inputs, output):
        tensors, ctx.settings = inputs[:-4], inputs[-4:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])

    def differentiate(ctx, *grads):
        q, *others = ctx.saved_tensors
        work = q.shape[3], *ctx.settings[:2]
        backward = backward_for(*work) if grads[1] is None else backward_op
        gradients = backward(*filled_gradients(grads, others[2]), q, *others, *ctx.settings)
        return *gradients, *(None,) * (len(ctx.needs_input_grad) - len(gradients))

    forward_op.register_fake(shapes)
    forward_op.register_autograd(differentiate, setup_context=save)


def filled_gradients(grads: tuple[Tensor | None, ...], out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of output and log-sum-exp; a missing gradient of the output is zeros."""
    grad, grad_lse = grads
    return torch.zeros_like(out) if grad is None else grad, grad_lse


@torch.library.custom_op("cab_hf::block_attention", mutates_args=(), schema=FORWARD)
def forward_op(q, k, v, *plan):
    q, k, v = map(described, (q, k, v))
    out, lse = like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _way(q).forward(q, k, v, out, lse, *rows_of(plan))
    return out, lse


@torch.library.custom_op("cab_hf::block_attention_backward", mutates_args=(), schema=BACKWARD)
def backward_op(grad, grad_lse, q, k, v, out, lse, *plan):
    grad, q, k, v = map(described, (grad, q, k, v))
    terms = backward_stats(grad, grad_lse, out, lse)
    return _way(q).backward(grad, q, k, v, terms, *rows_of(plan))


backward_op.register_fake(gradient_shapes)
register_gradients(forward_op, lambda *_: backward_op)


def _way(q: Tensor) -> ModuleType:
    return fused if q.shape[3] <= FUSED_HEAD_DIM else split
