"""A text that many ranks hold, as its layers see it: `CabMask` and `Layout` of one process.

Plans are those of one process. A rank summarises its own keys, and what a row's choice depends on
beside them is gathered as the predictor says (`Predictor.gathers`). Which rows end a text
(``dense_tail_blocks``) is known to the sharding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cab_hf.call.layout import everything
from cab_hf.call.mask import CabMask
from cab_hf.distributed.exchange import gathered
from cab_hf.distributed.kv_gather import KV_HEADS_TOGETHER, KVGather, over_slices
from cab_hf.distributed.sharding import Shard, Sharding, ShardMap
from cab_hf.engines import Engine
from cab_hf.ops.attention.complete import with_sinks
from cab_hf.plan import BlockPlan, named_rows, once_per_spans, rows_grid
from cab_hf.predictors import LayerContext, Predictor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class ShardedLayout:
    """The layout of a text that ranks hold, with the methods of `Layout`.

    Queries stay where they are, in the order of the rank. Keys have places in the layout of one
    process: it is put together for choosing as far as a predictor needs it, and for attention.

    Attributes:
        spans: what this rank's queries see of the layout.
        window: width of a sliding window, for exact attention.
        heads_k_stride, regather_kv: see `KVGather`.
    """

    shard_map: ShardMap
    group: ProcessGroup
    spans: Shard
    window: int | None = None
    heads_k_stride: int = KV_HEADS_TOGETHER
    regather_kv: bool = True

    def queries(self, x: Tensor) -> Tensor:
        """[B, H, n, D], this rank's, as they are."""
        return x

    def keys(self, x: Tensor) -> Tensor:
        """[B, H_kv, n, D], this rank's, as they are."""
        return x

    def restore(self, out: Tensor) -> Tensor:
        """[B, H, n, D], of this rank's queries, as it is."""
        return out

    @torch.no_grad()
    def choose(self, predictor: Predictor, q: Tensor, k: Tensor, call: LayerContext) -> BlockPlan:
        """This rank's rows of what ``predictor`` chooses for the whole text."""
        heads = q.shape[1], k.shape[1]
        needed = predictor.gathers(call, heads)
        if "queries" in needed:
            return self._choose_all(predictor, q, k, call)
        if "summaries" not in needed:
            return predictor.choose(q, k, call)
        real = self.shard_map.sharding.real[self.group.rank()].to(k.device).expand(k.shape[0], -1)
        mine = predictor.summary_of(k, real, call)
        summary = predictor.join(mine, call, heads, self)
        if "vectors" not in needed:
            return predictor.choose(q, summary, call)
        vectors = self.blocks(predictor.vectors(q, self.spans), 2, predictor.config.query_block)
        return predictor.choose(q, summary, call, vectors)

    def _choose_all(
        self, predictor: Predictor, q: Tensor, k: Tensor, call: LayerContext
    ) -> BlockPlan:
        complete = replace(call, spans=self.spans.text)
        plan = predictor(self.tokens(q), self.tokens(k), complete)
        align, chunks = self.shard_map.align, self.shard_map.sharding.block
        if plan.query_block % align and align % plan.query_block:
            raise ValueError(
                f"predictor {predictor.config.predictor!r} makes query blocks of "
                f"{plan.query_block}, which the ranks' chunks of {chunks} tokens cut; "
                f"give block={plan.query_block} to what shards and to what attends."
            )
        return self.spans.own(plan)

    def everything(self) -> BlockPlan:
        """The plan that leaves nothing out, of blocks of `Sharding.exact_block`."""
        batch = self.spans.first.shape[0]
        spans = self.shard_map.kept_spans(self.group.rank(), batch, window=self.window)
        return everything(spans, self.shard_map.sharding.exact_block)

    def attend(self, *given: Any) -> Tensor:
        """`attention` without the log-sum-exp."""
        return self.attention(*given)[0]

    def attention(
        self,
        engine: Engine,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: BlockPlan,
        scale: float,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[B, H, n, D_v] of q [B, H, n, D] over all ranks' k and v [B, H_kv, n, D or D_v], and the
        log-sum-exp [B, H, n]; early and late chunks are in one launch."""
        group = q.shape[1] // k.shape[1]
        gather = KVGather(k, v, self.shard_map, self.group, self.heads_k_stride, self.regather_kv)

        def attend(keys: Tensor, values: Tensor, i: int) -> tuple[Tensor, Tensor]:
            heads = slice(gather.slices[i].start * group, gather.slices[i].stop * group)
            part = plan.slice_heads(heads.start, heads.stop, q.shape[1])
            out, lse = engine.attention(q[:, heads], keys, values, part, scale, return_lse=True)
            return (out if sinks is None else with_sinks(out, lse, sinks[heads])), lse

        return over_slices(gather, k, v, attend)

    def short(self, queries: int, tokens: int, query_block: int) -> Tensor | None:
        """`Layout.short` of the whole text, as rows of this rank, int64 [B, R]."""
        short = self.shard_map.layout.short(queries, tokens, query_block)
        return None if short is None else _short_rows(self.spans, short, query_block)

    def blocks(self, x: Tensor, dim: int, size: int) -> Tensor:
        """What all ranks know of their blocks of ``size`` tokens, put together in ``dim``.

        Zeros for a block of the layout that holds no token. No gradient.
        """
        source, filled = self.shard_map.blocks(size)
        everyone = gathered(x.movedim(dim, 0), self.group)[source]
        filled = filled.view(-1, *[1] * (x.ndim - 1))
        return everyone.masked_fill(~filled, 0.0).movedim(0, dim)

    def tokens(self, x: Tensor) -> Tensor:
        """x [B, H, n, C] of all ranks in the order of the layout, [B, H, N', C]. No gradient."""
        everyone = gathered(x.permute(2, 0, 1, 3), self.group)
        return everyone[self.shard_map.source].permute(1, 2, 0, 3)


@dataclass(eq=False)
class ShardedText(CabMask):
    """The text of one forward pass, of which each rank holds a shard.

    All of it is queries and keys; where documents begin is known to its ``sharding``.
    """

    sharding: Sharding | None = None

    def layout(
        self, query_block: int, key_block: int, device: torch.device, from_start: bool = True
    ) -> ShardedLayout:
        """As of a `CabMask`; made once for all layers."""
        ranks = self.parallel
        shard_map = self.sharding.shard_map(max(query_block, key_block), device)

        def build() -> ShardedLayout:
            spans = shard_map.spans(ranks.group.rank(), self.batch)
            how = self.window, ranks.heads_k_stride, ranks.regather_kv
            return ShardedLayout(shard_map, ranks.group, spans, *how)

        return self.state.once(("layout", shard_map), build)


@once_per_spans
def _short_rows(spans: Shard, short: Tensor, query_block: int) -> Tensor:
    """The rows of this rank, int64 [B, R], of those of the whole text that ``short`` names."""
    rows = spans.taken(rows_grid(spans.text, short, query_block)[:, 0], query_block)
    return named_rows(rows, rows.shape[1]).expand(spans.first.shape[0], -1)
