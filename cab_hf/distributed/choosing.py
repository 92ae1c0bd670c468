"""Functions that compute and inspect plans of a sharded sequence without computing attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cab_hf.config import CabConfig, block_sizes
from cab_hf.distributed.exchange import resolve_group
from cab_hf.distributed.sharded import ShardedLayout
from cab_hf.distributed.sharding import sharding_from_boundaries
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan, KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def predict(
    q: Tensor,
    k: Tensor,
    *,
    group: ProcessGroup | None,
    config: CabConfig,
    layer: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    block: int = DENSE_BLOCK_SIZE,
    ranges: KeyRanges | None = None,
    channels: tuple[int, ...] = (),
) -> BlockPlan:
    """Return the plan of this rank's queries, for `zigzag_attention`.

    The plan has this rank's rows of the plan that a single process would compute. All ranks must
    call `predict` together.

    Args:
        q: this rank's queries, [B, H, n, D], after RoPE with their positions in the document.
        k: this rank's keys, [B, H_kv, n, D], after RoPE.
        group: the ranks that share the sequence. None means all ranks.
        config: settings with the predictor. Its block sizes must divide ``block``.
        layer: index of the layer; required if budgets of ``config`` differ between layers.
        scale: factor of the logits. None means 1 / sqrt(D).
        cu_seqlens: boundaries of the documents of the whole sequence without padding, int
            [documents + 1]; equal on all ranks. None means one document of W * n tokens.
        block: every chunk is a multiple of ``block`` tokens; equal on all ranks.
        ranges: ``plan.ranges`` of another layer for the same sequence, so that both layers share
            results that depend on the ranges only. None means new ranges.
        channels: ascending channels of q and k that predictors use for approximate scores; equal on
            all ranks. () means all channels.

    Returns:
        A plan with n / query_block rows, over the key blocks of the whole sequence.

    Raises:
        ValueError: ``ranges`` belongs to another sequence.
    """
    group = resolve_group(group)
    sharding = sharding_from_boundaries(cu_seqlens, q.shape[2], group.size(), block)
    shard_map = sharding.shard_map(max(block_sizes(config)), q.device)
    if ranges is None:
        ranges = shard_map.ranges(group.rank(), q.shape[0])
    elif getattr(ranges, "shard_map", None) is not shard_map or ranges.start.shape[0] != q.shape[0]:
        raise ValueError(
            "ranges must belong to the sequence of q, got ranges of another sequence. Give the "
            "ranges of a plan from predict for this sequence on this rank, or None."
        )
    layer_context = LayerContext(
        ranges, q.shape[-1] ** -0.5 if scale is None else scale, layer, channels=channels
    )
    layout = ShardedLayout(shard_map=shard_map, group=group, ranges=ranges)
    return layout.select_plan(make_predictor(config), q, k, layer_context)


def union(plan: BlockPlan, kv_heads: int) -> Tensor:
    """Return the key blocks that at least one query of a plan attends to, for each KV head.

    Args:
        plan: plan of one rank's queries.
        kv_heads: number of KV heads, H_kv.

    Returns:
        Bool [B, H_kv, M_k]. The mean of this mask is the fraction of the key blocks whose K and V
        the rank needs.
    """
    attended_blocks = plan.to_dense().any(2)
    if plan.heads < kv_heads:
        return attended_blocks.repeat_interleave(kv_heads // plan.heads, dim=1)
    return attended_blocks.unflatten(1, (kv_heads, -1)).any(2)
