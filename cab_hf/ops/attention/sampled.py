"""Attention under a plan with sampled blocks: random blocks that represent the unlisted blocks.

An engine attends to the listed blocks, and `block` attends to the sampled blocks. Both results are
merged by their log-sum-exps. The backward pass computes the gradients of both parts with the merged
log-sum-exp, so that the weights are those of the merged softmax, and adds the gradients. The
definition is `reference.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cab_hf.ops.attention import block
from cab_hf.ops.attention.block import PlanArguments
from cab_hf.ops.attention.tiles import allocate_transposed
from cab_hf.plan import BlockPlan

# schemas of the ops: the sampled lists and the sample period, then a plan as `PlanArguments`
SAMPLED_SCHEMA = f"Tensor counts, Tensor indices, int sample_period, {block.PLAN_SCHEMA}"
FORWARD_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor listed_out, Tensor listed_lse,"
    f" {SAMPLED_SCHEMA}) -> (Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" {SAMPLED_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)


def attention(
    attend: Callable[..., Tensor | tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool = False,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over listed and sampled blocks, on CUDA devices.

    Args:
        attend: Engine that computes attention over full and partial blocks, with the arguments of
            `reference.attention` except ``softcap``.
        q: [B, H, N_q, D].
        k, v: [B, H_kv, N_k, D].
        plan: A plan with ``sampled``.
        scale: Factor of the products q · k.
        return_lse: True to also return the log-sum-exp, float32 [B, H, N_q].
        softcap: Soft cap of the scaled logits; None for no cap. ``attend`` must apply the same cap.
    """
    assert plan.sampled is not None
    # no gradients here, because the op below defines the gradients of both parts
    with torch.no_grad():
        listed_out, listed_lse = attend(q, k, v, plan, scale=scale, return_lse=True)
    result = _forward_op(
        q=q,
        k=k,
        v=v,
        listed_out=listed_out,
        listed_lse=listed_lse,
        counts=plan.sampled.counts,
        indices=plan.sampled.indices,
        sample_period=plan.sample_period,
        **block.make_op_arguments(plan, scale, softcap),
    )
    return result if return_lse else result[0]


@torch.library.custom_op("cab_hf::sampled_attention", mutates_args=(), schema=FORWARD_SCHEMA)
def _forward_op(q, k, v, listed_out, listed_lse, counts, indices, sample_period, *plan_values):
    """Attend to the sampled blocks, and merge the result with ``listed_out`` and ``listed_lse``."""
    plan = _make_sampled_plan(counts, indices, PlanArguments._make(plan_values))
    sampled_out, sampled_lse = block.forward_op(q, k, v, **plan._asdict())
    sampled_lse = sampled_lse + math.log(sample_period)
    # weight of ``sampled_out`` in the merge; 0 for queries without sampled blocks. Padding queries
    # have two log-sum-exps of -inf, whose difference is NaN
    sampled_share = (sampled_lse - listed_lse).sigmoid().masked_fill(sampled_lse == -torch.inf, 0.0)
    out = allocate_transposed(q, v.shape[3])
    # lerp reads both outputs once
    torch.lerp(listed_out, sampled_out, sampled_share.unsqueeze(-1).to(sampled_out.dtype), out=out)
    return out, torch.logaddexp(listed_lse, sampled_lse)


@torch.library.custom_op(
    "cab_hf::sampled_attention_backward", mutates_args=(), schema=BACKWARD_SCHEMA
)
def _backward_op(grad, grad_lse, q, k, v, out, lse, counts, indices, sample_period, *plan_values):
    """Return the gradients of q, k and v, summed over the listed and the sampled blocks.

    ``out`` and ``lse`` are the merged results of `_forward_op`.
    """
    listed_plan = PlanArguments._make(plan_values)
    shared_arguments = {"grad": grad, "grad_lse": grad_lse, "q": q, "k": k, "v": v, "out": out}
    gradients = block.backward_op(**shared_arguments, lse=lse, **listed_plan._asdict())
    # log(sample_period) is added to logits of sampled blocks; subtracting it from ``lse`` has the
    # same effect on the weights exp(logit - lse)
    sampled_gradients = block.backward_op(
        **shared_arguments,
        lse=lse - math.log(sample_period),
        **_make_sampled_plan(counts, indices, listed_plan)._asdict(),
    )
    return tuple(x.add_(y) for x, y in zip(gradients, sampled_gradients, strict=True))


def _save_for_backward(ctx, inputs, output):
    q, k, v, _, _, counts, indices, sample_period, *plan_values = inputs
    out, lse = output
    plan = PlanArguments._make(plan_values)
    ctx.set_materialize_grads(False)
    ctx.sample_period = sample_period
    ctx.query_block, ctx.key_block = plan.query_block, plan.key_block
    ctx.scale, ctx.softcap = plan.scale, plan.softcap
    ctx.save_for_backward(
        *(q, k, v, out, lse, counts, indices),
        *(plan.full_counts, plan.full_indices, plan.partial_counts, plan.partial_indices),
        *(plan.first_key, plan.last_key),
    )


def _compute_gradients(ctx, grad, grad_lse):
    q, k, v, out, lse, counts, indices, *plan_tensors = ctx.saved_tensors
    full_counts, full_indices, partial_counts, partial_indices, first_key, last_key = plan_tensors
    gradients = _backward_op(
        grad=block.zeros_if_none(grad, out),
        grad_lse=grad_lse,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        counts=counts,
        indices=indices,
        sample_period=ctx.sample_period,
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


_forward_op.register_fake(block.allocate_outputs)
_forward_op.register_autograd(_compute_gradients, setup_context=_save_for_backward)
_backward_op.register_fake(block.allocate_gradients)


def _make_sampled_plan(counts: Tensor, indices: Tensor, plan: PlanArguments) -> PlanArguments:
    """Return ``plan`` with the sampled blocks as full blocks, and without partial blocks.

    The result corresponds to `BlockPlan.of_sampled`.

    Args:
        counts: int32 [B, P, M_q], number of sampled blocks per query block.
        indices: int32 [B, P, M_q, W], indices of the sampled blocks.
        plan: The plan with the listed blocks, which are removed.
    """
    zero_counts = torch.zeros_like(counts)
    return plan._replace(
        full_counts=counts,
        full_indices=indices,
        partial_counts=zero_counts,
        partial_indices=zero_counts.unsqueeze(-1),
    )
