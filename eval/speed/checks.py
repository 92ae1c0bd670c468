"""Comparisons with float32 attention: what computes something else is given no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from cab_hf.engines import REFERENCE
from cab_hf.plan import BlockPlan, Spans

# q [B, H, N, D], k and v [B, H_kv, N, D], scale -> [B, H, N, D]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]

# not a multiple of any kernel's tile; below 512 tokens ffpa hands over to SDPA
CHECK_LENGTH = 600
# bf16 operands err up to 1e-2, gradients a few times that; a wrong layout errs by about 1
CHECK_TOLERANCE = 2e-2
CHECK_GRADIENT_TOLERANCE = 5e-2
CHECK_BLOCKS = (128, 64)
CHECKED_QUERIES = 32  # in a row, at the start, in the middle and at the end


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """k or v [B, H_kv, N, D] with as many heads as q; itself where it has them."""
    group = q.shape[1] // x.shape[1]
    return x.repeat_interleave(group, dim=1) if group > 1 else x


@torch.enable_grad()
def gradients_of(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *more: Any
) -> Callable[[], tuple[Tensor, ...]]:
    """What computes the gradients of q, k and v again and again, the forward pass being done once.

    Raises:
        RuntimeError: when nothing can be differentiated.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    # a compiled backward that may overwrite what it saved runs only once
    with torch._functorch.config.patch(donated_buffer=False):
        out = attend(*leaves, *more)
    if not out.requires_grad:
        raise RuntimeError("it has no backward")
    # the same whatever the layout: a gradient is compared with that of another kernel
    generator = torch.Generator(out.device).manual_seed(0)
    drawn = torch.randn(out.shape[2:], generator=generator, device=out.device)
    gradient = torch.empty_like(out).copy_(drawn)
    return lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)


def close(result: Tensor, expected: Tensor, where: str, tolerance: float = CHECK_TOLERANCE) -> None:
    """ArithmeticError, with the relative error, unless the two agree."""
    error = float((result.float() - expected).norm() / expected.norm())
    if not error <= tolerance:  # written so that NaN fails too
        raise ArithmeticError(f"wrong by {error:.2g} (relative) {where}")


def check_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> None:
    """Compare some rows of ``out`` with float32 attention over what the plan lets queries see.

    Padding queries see nothing, and are left out.

    Raises:
        ArithmeticError: with the relative error, and where.
    """
    last = max(0, plan.q_length - CHECKED_QUERIES)
    for start in dict.fromkeys((0, last // 2, last)):
        stop = min(start + CHECKED_QUERIES, plan.q_length)
        where = f"in queries {start} to {stop - 1}"
        padding = (plan.spans.last[:, start:stop] < 0)[:, None, :, None]
        if not padding.all():
            pair = out[:, :, start:stop], exact_rows(q, k, v, plan, start, stop)
            close(*(x.masked_fill(padding, 0.0) for x in pair), where)


def exact_rows(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, start: int, stop: int) -> Tensor:
    """Float32 attention of queries ``start`` to ``stop`` under the plan, [B, H, rows, D]."""
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]

    def grouped(x: Tensor) -> Tensor:
        # [B, H, rows, .] -> [B, H_kv, group * rows, .]: no key is repeated
        return x.unflatten(1, (kv_heads, group)).flatten(2, 3)

    mask = plan.token_mask(start, stop).repeat_interleave(plan.shared_by(q.shape[1]), dim=1)
    rows = grouped(q[:, :, start:stop].float()) * q.shape[-1] ** -0.5
    logits = rows @ k.float().transpose(-1, -2)
    weights = logits.masked_fill_(~grouped(mask), -torch.inf).softmax(dim=-1)
    return (weights @ v.float()).unflatten(2, (group, -1)).flatten(1, 2)


def check_gradients(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    planner: Callable[[Tensor, Tensor, Spans], BlockPlan],
) -> None:
    """Compare gradients with those of the reference in float32, on the first tokens.

    Raises:
        ArithmeticError: with the relative error, and of which gradient.
    """
    q, k, v = (x[:, :, :CHECK_LENGTH] for x in (q, k, v))
    batch, _, length, dim = q.shape
    plan = planner(q, k, Spans.causal(batch, length, length, q.device))
    floats = (x.float() for x in (q, k, v))
    result = gradients_of(attend, q, k, v, plan, dim**-0.5)()
    exact = gradients_of(REFERENCE.attention, *floats, plan, dim**-0.5)()
    for name, ours, theirs in zip("qkv", result, exact, strict=True):
        where = f"in the gradient of {name} at {length} tokens"
        close(ours, theirs, where, CHECK_GRADIENT_TOLERANCE)


def check_dense(attend: Attend, q: Tensor, k: Tensor, v: Tensor, backward: bool = False) -> None:
    """`check_rows` of causal attention on the first tokens, `check_gradients` where asked.

    Fewer queries than keys are the last of them.
    """

    def causal(q: Tensor, k: Tensor, spans: Spans) -> BlockPlan:
        return BlockPlan.causal(spans, q.shape[1], *CHECK_BLOCKS)

    q, k, v = (x[:, :, :CHECK_LENGTH] for x in (q, k, v))
    spans = Spans.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    check_rows(attend(q, k, v, q.shape[-1] ** -0.5), q, k, v, causal(q, k, spans))
    if backward:
        check_gradients(lambda q, k, v, plan, scale: attend(q, k, v, scale), q, k, v, causal)
