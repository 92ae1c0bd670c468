"""Attention with a plan's sample in training: random blocks that represent unlisted blocks.

An engine attends to the listed blocks, `block` to the sampled blocks, and both are merged by their
log-sum-exps. The backward pass needs no merge: given the log-sum-exp of everything, attention under
one part alone finds the right weights of that part. The definition is `reference.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cab_hf.ops.attention import block
from cab_hf.ops.attention.tiles import like
from cab_hf.plan import BlockPlan

SAMPLED = f"Tensor counts, Tensor indices, int sample_period, {block.PLAN}"
FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor listed_out, Tensor listed_lse,"
    f" {SAMPLED}) -> (Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" {SAMPLED}) -> (Tensor, Tensor, Tensor)"
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
    """Compute `reference.attention` under a plan's lists and its sample, on CUDA devices.

    Args:
        attend: Attention under the lists of a plan, with the arguments of `reference.attention`.
    """
    assert plan.sampled is not None
    # the op below defines the gradients
    with torch.no_grad():
        listed = attend(q, k, v, plan, scale, True)
    sampled = plan.sampled.counts, plan.sampled.indices, plan.sample_period
    result = _forward_op(q, k, v, *listed, *sampled, *block.flattened(plan, scale, softcap))
    return result if return_lse else result[0]


@torch.library.custom_op("cab_hf::sampled_attention", mutates_args=(), schema=FORWARD)
def _forward_op(q, k, v, listed_out, listed_lse, counts, indices, sample_period, *plan):
    sampled_out, sums = block.forward_op(q, k, v, *_sampled_plan(counts, indices, plan))
    sums = sums + math.log(sample_period)
    # the weight of the sampled part; 0 if nothing is sampled, also for padding queries
    share = (sums - listed_lse).sigmoid().masked_fill(sums == -torch.inf, 0.0)
    out = like(q, v.shape[3])
    # one pass over both parts, without a concatenated copy
    torch.lerp(listed_out, sampled_out, share.unsqueeze(-1).to(sampled_out.dtype), out=out)
    return out, torch.logaddexp(listed_lse, sums)


@torch.library.custom_op("cab_hf::sampled_attention_backward", mutates_args=(), schema=BACKWARD)
def _backward_op(grad, grad_lse, q, k, v, out, lse, counts, indices, sample_period, *plan):
    given = grad, grad_lse, q, k, v, out
    gradients = block.backward_op(*given, lse, *plan)
    lse = lse - math.log(sample_period)
    more = block.backward_op(*given, lse, *_sampled_plan(counts, indices, plan))
    return tuple(x.add_(y) for x, y in zip(gradients, more, strict=True))


def _save(ctx, inputs, output):
    q, k, v, _, _, counts, indices, sample_period, *lists = inputs
    lists, ctx.settings = lists[:-4], (sample_period, *lists[-4:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, counts, indices, *lists)


def _differentiate(ctx, *grads):
    q, k, v, out, lse, counts, indices, *lists = ctx.saved_tensors
    sample_period, *settings = ctx.settings
    sampled = counts, indices, sample_period
    grads = block.filled_gradients(grads, out)
    gradients = _backward_op(*grads, q, k, v, out, lse, *sampled, *lists, *settings)
    return *gradients, *(None,) * (len(ctx.needs_input_grad) - len(gradients))


_forward_op.register_fake(block.shapes)
_forward_op.register_autograd(_differentiate, setup_context=_save)
_backward_op.register_fake(block.gradient_shapes)


def _sampled_plan(counts: Tensor, indices: Tensor, plan: tuple) -> tuple:
    """Return `block.PLAN` with the sampled blocks as its lists, as `BlockPlan.of_sampled` does."""
    none = torch.zeros_like(counts)
    return counts, indices, none, none.unsqueeze(-1), *plan[4:]
