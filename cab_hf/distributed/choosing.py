"""Plans of a text that many ranks hold, made apart from attention over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cab_hf.config import CabConfig, blocks_of
from cab_hf.distributed.exchange import group_of
from cab_hf.distributed.sharded import ShardedLayout
from cab_hf.distributed.sharding import sharding_between
from cab_hf.plan import EXACT_BLOCK, BlockPlan, Spans
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
    block: int = EXACT_BLOCK,
    spans: Spans | None = None,
) -> BlockPlan:
    """The plan of this rank's queries for `zigzag_attention`, rows of the plan of one process.

    Args:
        q, k, group, scale, cu_seqlens, block: as in `zigzag_attention`; every rank calls this.
        config: whose predictor decides; its blocks divide ``block``.
        layer: whose budgets count, where they are a table.
        spans: those of the plan of another layer of the same text: what is made of them is then
            made once for both.

    Returns:
        A plan of [B, H, n / query_block] rows, in key blocks of the layout of the whole text.

    Raises:
        ValueError: for ``spans`` of another text.
    """
    group = group_of(group)
    sharding = sharding_between(cu_seqlens, q.shape[2], group.size(), block)
    shard_map = sharding.shard_map(max(blocks_of(config)), q.device)
    if spans is None:
        spans = shard_map.spans(group.rank(), q.shape[0])
    elif getattr(spans, "shard_map", None) is not shard_map or spans.first.shape[0] != q.shape[0]:
        raise ValueError(
            "spans is of another text than q; give those of a plan that predict made of this text "
            "on this rank, or None."
        )
    call = LayerContext(spans, q.shape[-1] ** -0.5 if scale is None else scale, layer)
    return ShardedLayout(shard_map, group, spans).choose(make_predictor(config), q, k, call)


def union(plan: BlockPlan, kv_heads: int) -> Tensor:
    """bool [B, H_kv, M_k]: the key blocks that any query of a rank attends.

    Its mean is the share of the text's K and V that a rank could do with.
    """
    needed = plan.to_dense().any(2)
    if plan.heads < kv_heads:
        return needed.repeat_interleave(kv_heads // plan.heads, dim=1)
    return needed.unflatten(1, (kv_heads, -1)).any(2)
