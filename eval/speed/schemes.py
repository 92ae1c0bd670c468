"""Ring attention, the baseline of `cab_hf.distributed.zigzag_attention`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cab_hf import engines
from cab_hf.call.layout import full_plan
from cab_hf.distributed import zigzag
from cab_hf.distributed.exchange import finish, name_lost_rank
from cab_hf.distributed.sharded import ShardedLayout
from cab_hf.distributed.sharding import ShardMap
from cab_hf.distributed.zigzag import zigzag_attention
from cab_hf.engines import Engine, Workload
from cab_hf.plan import KeyRanges, cached_per_ranges


def ring_attention(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Compute attention like `zigzag_attention`, but pass K and V around the ring of ranks.

    Outputs over the keys of different ranks are merged by their log-sum-exp.

    Args:
        q, k, v: as in `zigzag_attention`.
        settings: as in `zigzag_attention`. ``heads_k_stride`` and ``regather_kv`` have no effect,
            because a ring sends all heads at once and saves received tensors for the backward.

    Raises:
        NotImplementedError: ``plan`` is set; or gradients are needed, and the engine is not the
            reference, which alone has gradients of its log-sum-exp.
    """
    if settings.get("plan") is not None:
        raise NotImplementedError(
            "plan must be None for ring_attention, got a plan. Use zigzag_attention."
        )
    settings = {**zigzag_attention.__kwdefaults__, **settings}
    layout, engine, _, scale = zigzag.check_arguments(q, k, v, **settings)
    is_training = Workload.of(q, k, v, (0, 0)).training
    if is_training and engine is not engines.REFERENCE:
        raise NotImplementedError(
            "engine must have gradients of its log-sum-exp for ring_attention, got "
            f"{engine.name!r}. Use engine='reference'."
        )
    return _ring(q=q, k=k, v=v, layout=layout, engine=engine, scale=scale)


def _ring(
    q: Tensor, k: Tensor, v: Tensor, layout: ShardedLayout, engine: Engine, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of one rank per step, and merge the results of all steps.

    Returns:
        Attention [B, H, n, D], and the log-sum-exp [B, H, n] without gradients.
    """
    rank, world = layout.group.rank(), layout.group.size()
    out = lse = None
    kv = torch.cat((k, v), dim=-1)
    for step in range(world):
        if step + 1 < world:
            # the transfer to the next rank overlaps with the computation of this step
            received, works = _send_on(kv.detach(), layout.group, 1)
        keys, values = kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]
        ranges = _ranges_over(layout.ranges, layout.shard_map, (rank - step) % world)
        plan = full_plan(ranges, layout.shard_map.sharding.dense_block_size)
        step_out, step_lse = engine.attention(q, keys, values, plan, scale=scale, return_lse=True)
        # merge in at least float32, so that the output is rounded only once
        step_out = step_out.to(step_lse.dtype)
        if step == 0:
            out, lse = step_out, step_lse
        else:
            out, lse = _merged(out, lse, step_out, step_lse)
        if step + 1 < world:
            for work in works:
                finish(work, layout.group)
            kv = _Passed.apply(kv, received, layout.group)
    return out.to(q.dtype), lse.detach()


def _merged(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over two disjoint sets of keys.

    Args:
        out, other_out: attention over each set, [B, H, N, D].
        lse, other_lse: log-sum-exp over each set, [B, H, N].

    Returns:
        Attention and log-sum-exp over both sets.
    """
    # a query without keys in either set has two log-sum-exps of -inf; zeros in their place avoid
    # NaN in the weights and in the gradients
    has_no_keys = (lse == -torch.inf) & (other_lse == -torch.inf)
    both = torch.stack((lse, other_lse)).masked_fill(has_no_keys, 0.0)
    total = both.logsumexp(0)
    weight = (both - total).exp().unsqueeze(-1)
    merged = out * weight[0] + other_out * weight[1]
    return merged, total.masked_fill(has_no_keys, -torch.inf)


@cached_per_ranges
def _ranges_over(ranges: KeyRanges, shard_map: ShardMap, rank: int) -> KeyRanges:
    """Return, for each of this rank's queries, the range of keys of another rank.

    Args:
        ranges: ranges of this rank's queries over the tokens of all ranks.
        shard_map: the positions of the tokens of all ranks.
        rank: the rank whose keys are attended to.
    """
    sharding, device = shard_map.sharding, ranges.start.device
    real = sharding.real[rank].to(device)
    # even numbers for tokens and odd numbers for padding: padding sorts after the last token of its
    # document and before the next document
    order = 2 * (shard_map.document_start + sharding.positions[rank].to(device)) + (~real).long()
    first = torch.searchsorted(order, 2 * ranges.start.to(order.dtype))
    last = torch.searchsorted(order, 2 * ranges.end.to(order.dtype), right=True) - 1
    has_keys = (ranges.end >= 0) & (first <= last)
    return KeyRanges(
        first.where(has_keys, 0).to(torch.int32),
        last.where(has_keys, -1).to(torch.int32),
        real.expand(ranges.start.shape[0], -1),
        consecutive=False,
    )


def _send_on(x: Tensor, group: ProcessGroup, step: int) -> tuple[Tensor, list[dist.Work]]:
    """Start sending ``x`` to rank + ``step``, and receiving from rank - ``step``.

    Returns:
        The tensor that will contain the received values, and the transfers to wait for.
    """
    rank, world = group.rank(), group.size()
    x = x.contiguous()
    received = torch.empty_like(x)
    with name_lost_rank(group):
        return received, dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group, group_peer=(rank + step) % world),
                dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - step) % world),
            ]
        )


class _Passed(torch.autograd.Function):
    """The exchange of K and V with the neighbouring ranks, as a differentiable function.

    The forward pass returns the received tensor. The backward pass sends the gradient of the
    received tensor back to its sender, and returns the gradient of the sent tensor.
    """

    @staticmethod
    def forward(ctx: Any, sent: Tensor, received: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        returned, works = _send_on(grad, ctx.group, -1)
        for work in works:
            finish(work, ctx.group)
        return returned, None, None
