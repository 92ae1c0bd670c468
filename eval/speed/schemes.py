"""Ring attention, the baseline of `cab_hf.distributed.zigzag_attention`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cab_hf import engines
from cab_hf.call.layout import make_plan_of_visible_blocks
from cab_hf.distributed import zigzag
from cab_hf.distributed.exchange import name_lost_rank, wait_for_collective
from cab_hf.distributed.sharded import ShardedLayout
from cab_hf.distributed.sharding import ShardMap
from cab_hf.distributed.zigzag import zigzag_attention
from cab_hf.engines import Engine, Workload
from cab_hf.plan import KeyRanges, cached_per_ranges


def ring_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute attention like `zigzag_attention`, but pass K and V around the ring of ranks.

    Outputs over the keys of different ranks are merged by their log-sum-exp.

    Args:
        q, k, v: as in `zigzag_attention`.
        options: as in `zigzag_attention`. ``heads_k_stride`` and ``regather_kv`` have no effect,
            because a ring sends all heads at once and saves received tensors for the backward.

    Raises:
        NotImplementedError: ``plan`` is set; or gradients are needed, and the engine is not the
            reference, which alone has gradients of its log-sum-exp.
    """
    if options.get("plan") is not None:
        raise NotImplementedError(
            "plan must be None for ring_attention, got a plan. Use zigzag_attention."
        )
    options = {**zigzag_attention.__kwdefaults__, **options}
    layout, engine, _, scale = zigzag.check_arguments(q, k, v, **options)
    is_training = Workload.from_tensors(q, k, v, (0, 0)).training
    if is_training and engine is not engines.REFERENCE:
        raise NotImplementedError(
            "engine must have gradients of its log-sum-exp for ring_attention, got "
            f"{engine.name!r}. Use engine='reference'."
        )
    return _attend_in_ring(q=q, k=k, v=v, layout=layout, engine=engine, scale=scale)


def _attend_in_ring(
    q: Tensor, k: Tensor, v: Tensor, layout: ShardedLayout, engine: Engine, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of one rank per step, and merge the results of all steps.

    Returns:
        Attention [B, H, n, D], and the log-sum-exp [B, H, n] without gradients.
    """
    rank, num_ranks = layout.group.rank(), layout.group.size()
    out = lse = None
    kv = torch.cat((k, v), dim=-1)
    for step in range(num_ranks):
        if step + 1 < num_ranks:
            # the transfer to the next rank overlaps with the computation of this step
            received_kv, transfers = _start_exchange(kv.detach(), layout.group, 1)
        keys, values = kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]
        ranges = _make_ranges_for_rank(layout.ranges, layout.shard_map, (rank - step) % num_ranks)
        plan = make_plan_of_visible_blocks(ranges, layout.shard_map.sharding.dense_block_size)
        step_out, step_lse = engine.attention(q, keys, values, plan, scale=scale, return_lse=True)
        # merge in at least float32, so that the output is rounded only once
        step_out = step_out.to(step_lse.dtype)
        if step == 0:
            out, lse = step_out, step_lse
        else:
            out, lse = _merge_attention(out, lse, step_out, step_lse)
        if step + 1 < num_ranks:
            for transfer in transfers:
                wait_for_collective(transfer, layout.group)
            kv = _RingExchange.apply(kv, received_kv, layout.group)
    return out.to(q.dtype), lse.detach()


def _merge_attention(
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
    lses = torch.stack((lse, other_lse)).masked_fill(has_no_keys, 0.0)
    merged_lse = lses.logsumexp(0)
    weights = (lses - merged_lse).exp().unsqueeze(-1)
    merged_out = out * weights[0] + other_out * weights[1]
    return merged_out, merged_lse.masked_fill(has_no_keys, -torch.inf)


@cached_per_ranges
def _make_ranges_for_rank(ranges: KeyRanges, shard_map: ShardMap, key_rank: int) -> KeyRanges:
    """Return, for each of this rank's queries, the range of keys of another rank.

    Args:
        ranges: ranges of this rank's queries over the tokens of all ranks.
        shard_map: the positions of the tokens of all ranks.
        key_rank: the rank whose keys are attended to.
    """
    sharding, device = shard_map.sharding, ranges.start.device
    is_real = sharding.is_real[key_rank].to(device)
    # even numbers for tokens and odd numbers for padding: padding sorts after the last token of its
    # document and before the next document
    sort_keys = (
        2 * (shard_map.document_start + sharding.positions[key_rank].to(device)) + (~is_real).long()
    )
    first_keys = torch.searchsorted(sort_keys, 2 * ranges.start.to(sort_keys.dtype))
    last_keys = torch.searchsorted(sort_keys, 2 * ranges.end.to(sort_keys.dtype), right=True) - 1
    has_keys = (ranges.end >= 0) & (first_keys <= last_keys)
    return KeyRanges(
        first_keys.where(has_keys, 0).to(torch.int32),
        last_keys.where(has_keys, -1).to(torch.int32),
        is_real.expand(ranges.start.shape[0], -1),
        consecutive=False,
    )


def _start_exchange(
    sent_tensor: Tensor, group: ProcessGroup, rank_offset: int
) -> tuple[Tensor, list[dist.Work]]:
    """Start sending to rank + ``rank_offset``, and receiving from rank - ``rank_offset``.

    Returns:
        The tensor that will contain the received values, and the transfers to wait for.
    """
    rank, num_ranks = group.rank(), group.size()
    sent_tensor = sent_tensor.contiguous()
    received_tensor = torch.empty_like(sent_tensor)
    with name_lost_rank(group):
        return received_tensor, dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend,
                    sent_tensor,
                    group=group,
                    group_peer=(rank + rank_offset) % num_ranks,
                ),
                dist.P2POp(
                    dist.irecv,
                    received_tensor,
                    group=group,
                    group_peer=(rank - rank_offset) % num_ranks,
                ),
            ]
        )


class _RingExchange(torch.autograd.Function):
    """The exchange of K and V with the neighbouring ranks, as a differentiable function.

    The forward pass returns the received tensor. The backward pass sends the gradient of the
    received tensor back to its sender, and returns the gradient of the sent tensor.
    """

    @staticmethod
    def forward(ctx: Any, sent: Tensor, received: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad_received: Tensor) -> tuple[Tensor | None, ...]:
        grad_sent, transfers = _start_exchange(grad_received, ctx.group, -1)
        for transfer in transfers:
            wait_for_collective(transfer, ctx.group)
        return grad_sent, None, None
