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
    """Compute `zigzag_attention` by passing K and V around the ring of ranks.

    Outputs are merged by log-sum-exp. ``heads_k_stride`` and ``regather_kv`` have no effect: all
    heads are sent, and received tensors are kept.

    Raises:
        NotImplementedError: ``plan`` is set, or gradients are needed from an engine whose
            log-sum-exp has none.
    """
    if settings.get("plan") is not None:
        raise NotImplementedError(
            "plan must be None for ring_attention, got a plan. Use zigzag_attention."
        )
    settings = {**zigzag_attention.__kwdefaults__, **settings}
    layout, engine, _, scale = zigzag.check_arguments(q, k, v, **settings)
    training = Workload.of(q, k, v, (0, 0)).training
    if training and engine is not engines.REFERENCE:
        raise NotImplementedError(
            "engine must have gradients of its log-sum-exp for ring_attention, got "
            f"{engine.name!r}. Use engine='reference'."
        )
    return _around(q, k, v, layout, engine, scale)


def _around(
    q: Tensor, k: Tensor, v: Tensor, layout: ShardedLayout, engine: Engine, scale: float
) -> tuple[Tensor, Tensor]:
    """Run W steps around the ring, each over the keys of one rank."""
    rank, world = layout.group.rank(), layout.group.size()
    out = lse = None
    both = torch.cat((k, v), dim=-1)
    for step in range(world):
        if step + 1 < world:
            # sent to the next rank while this step computes
            received, works = _hop(both.detach(), layout.group, 1)
        keys, values = both[..., : k.shape[-1]], both[..., k.shape[-1] :]
        ranges = _seen_of(layout.ranges, layout.shard_map, (rank - step) % world)
        plan = full_plan(ranges, layout.shard_map.sharding.dense_block_size)
        result = engine.attention(q, keys, values, plan, scale, return_lse=True)
        # merged in at least float32, and rounded once
        result = result[0].to(result[1].dtype), result[1]
        out, lse = result if step == 0 else _merged((out, lse), result)
        if step + 1 < world:
            for work in works:
                finish(work, layout.group)
            both = _Passed.apply(both, received, layout.group)
    return out.to(q.dtype), lse.detach()


def _merged(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge (out [B, H, N, D], log-sum-exp [B, H, N]) over the keys of two parts."""
    (one, first), (other, second) = parts
    # a query without keys has no weight; the mask keeps NaN out of gradients
    blind = (first == -torch.inf) & (second == -torch.inf)
    lse = torch.stack((first, second)).masked_fill(blind, 0.0)
    total = lse.logsumexp(0)
    weight = (lse - total).exp().unsqueeze(-1)
    return one * weight[0] + other * weight[1], total.masked_fill(blind, -torch.inf)


@cached_per_ranges
def _seen_of(ranges: KeyRanges, shard_map: ShardMap, holder: int) -> KeyRanges:
    """Return the ranges of this rank's queries over another rank's keys, in their order."""
    sharding, device = shard_map.sharding, ranges.start.device
    real = sharding.real[holder].to(device)
    # padding is ordered between the last token of its document and the first of the next
    order = 2 * (shard_map.document_start + sharding.positions[holder].to(device)) + (~real).long()
    first = torch.searchsorted(order, 2 * ranges.start.to(order.dtype))
    last = torch.searchsorted(order, 2 * ranges.end.to(order.dtype), right=True) - 1
    seen = (ranges.end >= 0) & (first <= last)
    return KeyRanges(
        first.where(seen, 0).to(torch.int32),
        last.where(seen, -1).to(torch.int32),
        real.expand(ranges.start.shape[0], -1),
        consecutive=False,
    )


def _hop(x: Tensor, group: ProcessGroup, step: int) -> tuple[Tensor, list[dist.Work]]:
    """Send ``x`` to the next rank.

    Returns the tensor of the rank ``step`` before, and the work to wait for.
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
    """An autograd function that maps the sent to the received tensor.

    Gradients return the same way.
    """

    @staticmethod
    def forward(ctx: Any, sent: Tensor, received: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        returned, works = _hop(grad, ctx.group, -1)
        for work in works:
            finish(work, ctx.group)
        return returned, None, None
