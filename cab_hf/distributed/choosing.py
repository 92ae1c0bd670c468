"""Plans for a sharded sequence, computed separately from attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cab_hf.config import CabConfig, blocks_of
from cab_hf.distributed.exchange import group_of
from cab_hf.distributed.sharded import ShardedLayout
from cab_hf.distributed.sharding import sharding_between
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
) -> BlockPlan:
    """Return the plan of this rank's queries, for `zigzag_attention`.

    Its rows are rows of the plan that a single process would compute. Every rank must call this.

    Args:
        q, k, group, scale, cu_seqlens, block: see `zigzag_attention`.
        config: settings with the predictor. Its block sizes divide ``block``.
        layer: layer index, if budgets are a table by layer.
        ranges: ranges of the plan of another layer for the same sequence. Both plans then share
            everything that is computed from ranges. None means new ranges.

    Returns:
        A plan with [B, H, n / query_block] rows, over key blocks of the whole sequence.

    Raises:
        ValueError: ``ranges`` belongs to another sequence.
    """
    group = group_of(group)
    sharding = sharding_between(cu_seqlens, q.shape[2], group.size(), block)
    shard_map = sharding.shard_map(max(blocks_of(config)), q.device)
    if ranges is None:
        ranges = shard_map.ranges(group.rank(), q.shape[0])
    elif getattr(ranges, "shard_map", None) is not shard_map or ranges.start.shape[0] != q.shape[0]:
        raise ValueError(
            "ranges must belong to the sequence of q, got ranges of another sequence. Give the "
            "ranges of a plan from predict for this sequence on this rank, or None."
        )
    call = LayerContext(ranges, q.shape[-1] ** -0.5 if scale is None else scale, layer)
    return ShardedLayout(shard_map, group, ranges).choose(make_predictor(config), q, k, call)


def union(plan: BlockPlan, kv_heads: int) -> Tensor:
    """Return the key blocks that any query of a rank attends, bool [B, H_kv, M_k].

    The mean is the share of K and V that the rank needs.
    """
    needed = plan.to_dense().any(2)
    if plan.heads < kv_heads:
        return needed.repeat_interleave(kv_heads // plan.heads, dim=1)
    return needed.unflatten(1, (kv_heads, -1)).any(2)
