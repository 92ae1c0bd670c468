"""Mask and layout of a sharded sequence, with the interfaces of `MaskInfo` and `BlockLayout`.

Plans are those of a single process. Each rank encodes its own keys. `Predictor.required_inputs`
names the other inputs of a selection, which ranks all-gather. The sharding determines the last rows
of a sequence (``dense_tail_blocks``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cab_hf.call.layout import full_plan
from cab_hf.call.mask import MaskInfo
from cab_hf.distributed.exchange import all_gather
from cab_hf.distributed.kv_gather import KV_HEADS_TOGETHER, KVGather, over_slices
from cab_hf.distributed.sharding import Shard, Sharding, ShardMap
from cab_hf.engines import Engine
from cab_hf.ops.attention.complete import with_sinks
from cab_hf.plan import BlockPlan, cached_per_ranges, row_indices, rows_mask
from cab_hf.predictors import LayerContext, Predictor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class ShardedLayout:
    """The layout of a sharded sequence, with the methods of `BlockLayout`.

    Queries stay on their rank, in the order of the rank. Keys have places in the layout of a single
    process. Ranks gather keys for attention, and for selection as far as the predictor needs them.

    Attributes:
        shard_map: the places of the tokens of all ranks.
        group: the ranks that hold one sequence.
        ranges: the keys that are visible to this rank's queries, as places in the layout.
        window: width of a sliding window in tokens, for exact attention; None means no window.
        heads_k_stride, regather_kv: see `KVGather`.
    """

    shard_map: ShardMap
    group: ProcessGroup
    ranges: Shard
    window: int | None = None
    heads_k_stride: int = KV_HEADS_TOGETHER
    regather_kv: bool = True

    def queries(self, x: Tensor) -> Tensor:
        """Return this rank's queries [B, H, n, D] unchanged."""
        return x

    def keys(self, x: Tensor) -> Tensor:
        """Return this rank's keys [B, H_kv, n, D] unchanged."""
        return x

    def restore(self, out: Tensor) -> Tensor:
        """Return the output [B, H, n, D] of this rank's queries unchanged."""
        return out

    @torch.no_grad()
    def choose(self, predictor: Predictor, q: Tensor, k: Tensor, call: LayerContext) -> BlockPlan:
        """Return this rank's rows of the plan that ``predictor`` selects for the whole sequence."""
        heads = q.shape[1], k.shape[1]
        needed = predictor.required_inputs(call, heads)
        if "queries" in needed:
            return self._choose_all(predictor, q, k, call)
        if "summaries" not in needed:
            return predictor.choose(q, k, call)
        real = self.shard_map.sharding.real[self.group.rank()].to(k.device).expand(k.shape[0], -1)
        own_summary = predictor.summary_of(k, real, call)
        summary = predictor.merge(own_summary, call, heads, self)
        if "vectors" not in needed:
            return predictor.choose(q, summary, call)
        vectors = self.blocks(predictor.vectors(q, self.ranges), 2, predictor.config.query_block)
        return predictor.choose(q, summary, call, vectors)

    def _choose_all(
        self, predictor: Predictor, q: Tensor, k: Tensor, call: LayerContext
    ) -> BlockPlan:
        complete = replace(call, ranges=self.ranges.text)
        plan = predictor(self.tokens(q), self.tokens(k), complete)
        align, chunks = self.shard_map.align, self.shard_map.sharding.block
        if plan.query_block % align and align % plan.query_block:
            raise ValueError(
                f"block must be a multiple of {plan.query_block}, the query block of predictor "
                f"{predictor.config.predictor!r}, got {chunks}. Give block={plan.query_block} to "
                "shard and to context_parallel or predict."
            )
        return self.ranges.own(plan)

    def full_plan(self) -> BlockPlan:
        """Return the plan of all visible blocks of `Sharding.dense_block_size` tokens."""
        batch = self.ranges.start.shape[0]
        ranges = self.shard_map.cached_ranges(self.group.rank(), batch, window=self.window)
        return full_plan(ranges, self.shard_map.sharding.dense_block_size)

    def attend(
        self,
        engine: Engine,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: BlockPlan,
        scale: float,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return the output of `attention` without the log-sum-exp."""
        out, _ = self.attention(
            engine, q, k, v, plan=plan, scale=scale, sinks=sinks, softcap=softcap
        )
        return out

    def attention(
        self,
        engine: Engine,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: BlockPlan,
        scale: float,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return attention of this rank's queries over the keys of all ranks.

        The early and the late chunks of the rank run in one kernel launch.

        Args:
            engine: engine that computes attention.
            q: queries of this rank, [B, H, n, D].
            k: keys of this rank, [B, H_kv, n, D].
            v: values of this rank, [B, H_kv, n, D_v].
            plan: plan of this rank's queries.
            scale: factor of the logits.
            sinks: logits of attention sinks, [H]; None means no sinks.
            softcap: cap c of the logits, ``c * tanh(logits / c)``; None means no cap.

        Returns:
            Output [B, H, n, D_v] and log-sum-exp [B, H, n].
        """
        group = q.shape[1] // k.shape[1]
        gather = KVGather(k, v, self.shard_map, self.group, self.heads_k_stride, self.regather_kv)

        def attend(keys: Tensor, values: Tensor, i: int) -> tuple[Tensor, Tensor]:
            heads = slice(gather.slices[i].start * group, gather.slices[i].stop * group)
            part = plan.slice_heads(heads.start, heads.stop, q.shape[1])
            out, lse = engine.attention(
                q[:, heads], keys, values, part, scale, return_lse=True, softcap=softcap
            )
            return (out if sinks is None else with_sinks(out, lse, sinks[heads])), lse

        return over_slices(gather, k, v, attend)

    def rows_below_min_length(self, queries: int, tokens: int, query_block: int) -> Tensor | None:
        """Return the rows of short documents on this rank, as in `BlockLayout`, int64 [B, R]."""
        short = self.shard_map.layout.rows_below_min_length(queries, tokens, query_block)
        return None if short is None else _short_rows(self.ranges, short, query_block)

    def blocks(self, x: Tensor, dim: int, size: int) -> Tensor:
        """All-gather x, which has one entry per block of ``size`` tokens in dimension ``dim``.

        The result has the order of the layout, zeros for blocks without tokens, and no gradient.
        """
        source, filled = self.shard_map.blocks(size)
        values = all_gather(x.movedim(dim, 0), self.group)[source]
        filled = filled.view(-1, *[1] * (x.ndim - 1))
        return values.masked_fill(~filled, 0.0).movedim(0, dim)

    def tokens(self, x: Tensor) -> Tensor:
        """All-gather x [B, H, n, C] to the order of the layout, [B, H, N', C], without gradient."""
        values = all_gather(x.permute(2, 0, 1, 3), self.group)
        return values[self.shard_map.source].permute(1, 2, 0, 3)


@dataclass(frozen=True, eq=False)
class ShardedMask(MaskInfo):
    """The mask of one forward pass over a sharded sequence.

    All tokens of the sequence are queries and keys. ``sharding`` has the document boundaries.
    """

    sharding: Sharding | None = None

    def layout(
        self, query_block: int, key_block: int, device: torch.device, from_start: bool = True
    ) -> ShardedLayout:
        """Return the layout for some block sizes; all layers of a forward pass share it."""
        ranks = self.details.parallel
        shard_map = self.sharding.shard_map(max(query_block, key_block), device)

        def build() -> ShardedLayout:
            ranges = shard_map.ranges(ranks.group.rank(), self.batch)
            return ShardedLayout(
                shard_map=shard_map,
                group=ranks.group,
                ranges=ranges,
                window=self.window,
                heads_k_stride=ranks.heads_k_stride,
                regather_kv=ranks.regather_kv,
            )

        return self.state.cached(("layout", shard_map), build)


@cached_per_ranges
def _short_rows(ranges: Shard, short: Tensor, query_block: int) -> Tensor:
    """Return this rank's rows among the rows ``short`` of the whole sequence, int64 [B, R]."""
    rows = ranges.rank_rows(rows_mask(ranges.text, short, query_block)[:, 0], query_block)
    return row_indices(rows, rows.shape[1]).expand(ranges.start.shape[0], -1)
