"""Mask and layout of a sharded sequence, with the interfaces of `MaskInfo` and `BlockLayout`.

The plan of each rank consists of rows of the plan that a single process would compute. Each rank
summarises its own keys. `Predictor.required_inputs` names the inputs of the selection that ranks
all-gather. Tail rows (``dense_tail_blocks``) are the last rows of the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cab_hf.call.layout import make_plan_of_visible_blocks
from cab_hf.call.mask import MaskInfo
from cab_hf.distributed.exchange import all_gather
from cab_hf.distributed.kv_gather import KV_HEADS_PER_GATHER, KVGather, attend_over_slices
from cab_hf.distributed.sharding import LocalRanges, Sharding, ShardMap
from cab_hf.engines import Engine
from cab_hf.ops.attention.complete import rescale_for_sinks
from cab_hf.plan import BlockPlan, cached_per_ranges, row_indices, rows_mask
from cab_hf.predictors import LayerContext, Predictor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# key of the `Sharding` in the `ForwardState` of a forward pass
SHARDING_KEY = "sharding"


@dataclass(frozen=True, eq=False)
class ShardedLayout:
    """The layout of a sharded sequence, with the methods of `BlockLayout`.

    Queries stay on their rank, in the order of the shard. Attention all-gathers the keys in the
    order of a single process, which defines the slots of the layout.

    Attributes:
        shard_map: the slots of the tokens of all ranks.
        group: the ranks that share the sequence.
        ranges: the visible slots of each query of this rank.
        window: width of a sliding window in tokens, for exact attention; None means no window.
        heads_k_stride: number of KV heads per all-gather of K and V.
        regather_kv: True to gather K and V again in the backward pass, False to save both.
    """

    shard_map: ShardMap
    group: ProcessGroup
    ranges: LocalRanges
    window: int | None = None
    heads_k_stride: int = KV_HEADS_PER_GATHER
    regather_kv: bool = True

    def queries(self, q_in_call_order: Tensor) -> Tensor:
        """Return this rank's queries [B, H, n, D] unchanged."""
        return q_in_call_order

    def keys(self, kv_in_call_order: Tensor) -> Tensor:
        """Return this rank's keys [B, H_kv, n, D] unchanged."""
        return kv_in_call_order

    def restore(self, out_in_layout_order: Tensor) -> Tensor:
        """Return the output [B, H, n, D] of this rank's queries unchanged."""
        return out_in_layout_order

    @torch.no_grad()
    def select_plan(
        self, predictor: Predictor, q: Tensor, k: Tensor, layer_context: LayerContext
    ) -> BlockPlan:
        """Return this rank's rows of the plan that ``predictor`` selects for the whole sequence.

        Args:
            predictor: predictor of the layer. Its method `Predictor.required_inputs` names the
                tensors that ranks gather before the selection.
            q: queries of this rank, [B, H, n, D].
            k: keys of this rank, [B, H_kv, n, D].
            layer_context: context of the layer, with the ranges of this layout.
        """
        head_counts = q.shape[1], k.shape[1]
        required_inputs = predictor.required_inputs(layer_context, head_counts)
        if "queries" in required_inputs:
            return self._choose_from_all_tokens(predictor, q, k, layer_context)
        if "summaries" not in required_inputs:
            return predictor.choose(q, k, layer_context)
        is_real = (
            self.shard_map.sharding.is_real[self.group.rank()].to(k.device).expand(k.shape[0], -1)
        )
        local_summary = predictor.summary_of(k, is_real, layer_context)
        summary = predictor.merge(local_summary, layer_context, head_counts, self)
        if "vectors" not in required_inputs:
            return predictor.choose(q, summary, layer_context)
        vectors = self.all_gather_blocks(
            predictor.vectors(q, self.ranges), 2, predictor.config.query_block
        )
        return predictor.choose(q, summary, layer_context, vectors)

    def _choose_from_all_tokens(
        self, predictor: Predictor, q: Tensor, k: Tensor, layer_context: LayerContext
    ) -> BlockPlan:
        """Select the plan from q and k of all ranks, and return this rank's rows."""
        sequence_context = replace(layer_context, ranges=self.ranges.sequence_ranges)
        plan = predictor(self.all_gather_tokens(q), self.all_gather_tokens(k), sequence_context)
        align, block = self.shard_map.align, self.shard_map.sharding.block
        if plan.query_block % align and align % plan.query_block:
            raise ValueError(
                f"block must be a multiple of {plan.query_block}, the query block of predictor "
                f"{predictor.config.predictor!r}, got {block}. Give block={plan.query_block} to "
                "shard and to context_parallel or predict."
            )
        return self.ranges.local_plan(plan)

    def make_plan_of_visible_blocks(self) -> BlockPlan:
        """Return the plan in which this rank's queries attend to all visible key blocks.

        Blocks have `Sharding.dense_block_size` tokens.
        """
        batch = self.ranges.start.shape[0]
        ranges = self.shard_map.cached_ranges(self.group.rank(), batch, window=self.window)
        return make_plan_of_visible_blocks(ranges, self.shard_map.sharding.dense_block_size)

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
        """Return the output of `attention` without the log-sum-exp; arguments as in `attention`."""
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
        """Compute attention of this rank's queries over the keys of all ranks.

        One kernel launch per slice of KV heads computes the early and the late chunks of the rank.

        Args:
            engine: the engine that computes attention.
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
        group_size = q.shape[1] // k.shape[1]
        kv_gather = KVGather(
            k=k,
            v=v,
            shard_map=self.shard_map,
            group=self.group,
            heads_k_stride=self.heads_k_stride,
            regather_kv=self.regather_kv,
        )

        def attend_slice(
            gathered_k: Tensor, gathered_v: Tensor, slice_index: int
        ) -> tuple[Tensor, Tensor]:
            kv_heads = kv_gather.slices[slice_index]
            query_heads = slice(kv_heads.start * group_size, kv_heads.stop * group_size)
            out, lse = engine.attention(
                q[:, query_heads],
                gathered_k,
                gathered_v,
                plan=plan.slice_heads(query_heads.start, query_heads.stop, q.shape[1]),
                scale=scale,
                return_lse=True,
                softcap=softcap,
            )
            return (out if sinks is None else rescale_for_sinks(out, lse, sinks[query_heads])), lse

        return attend_over_slices(kv_gather, k, v, attend_slice)

    def query_blocks_below_min_length(
        self, min_queries: int, min_tokens: int, query_block: int
    ) -> Tensor | None:
        """Return the query blocks of this rank that belong to short documents.

        `BlockLayout.query_blocks_below_min_length` describes the arguments, and when a document is
        short.

        Returns:
            Indices of the query blocks on this rank, int64 [B, R], filled with -1; None if no
            document is short.
        """
        short_rows = self.shard_map.layout.query_blocks_below_min_length(
            min_queries, min_tokens, query_block
        )
        return (
            None if short_rows is None else _local_row_indices(self.ranges, short_rows, query_block)
        )

    def all_gather_blocks(self, x: Tensor, dim: int, block_size: int) -> Tensor:
        """All-gather a tensor with one entry per block, and put blocks in the order of the layout.

        Args:
            x: tensor of this rank, with n / block_size entries in dimension ``dim``.
            dim: dimension of the blocks.
            block_size: tokens per block.

        Returns:
            The entries of all ranks, N' / block_size in dimension ``dim``, without gradient. Blocks
            without tokens have zeros.
        """
        block_index, is_filled = self.shard_map.find_rank_blocks(block_size)
        gathered_blocks = all_gather(x.movedim(dim, 0), self.group)[block_index]
        is_filled = is_filled.view(-1, *[1] * (x.ndim - 1))
        return gathered_blocks.masked_fill(~is_filled, 0.0).movedim(0, dim)

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        """All-gather x [B, H, n, C] to the order of the layout, [B, H, N', C], without gradient."""
        gathered_tokens = all_gather(x.permute(2, 0, 1, 3), self.group)
        return gathered_tokens[self.shard_map.token_of_slot].permute(1, 2, 0, 3)


@dataclass(frozen=True, eq=False)
class ShardedMask(MaskInfo):
    """The mask of one forward pass over a sharded sequence.

    ``q_length`` and ``kv_length`` are the number of tokens of the whole sequence.
    ``details.parallel_settings`` contains the group of ranks and the settings of
    `context_parallel`. ``forward_state`` contains the `Sharding` under the key ``SHARDING_KEY``.
    """

    @property
    def sharding(self) -> Sharding:
        """The `Sharding` of the sequence: the assignment of tokens to ranks."""
        return self.forward_state.get_stored(SHARDING_KEY)

    def layout(
        self,
        query_block: int,
        key_block: int,
        device: torch.device,
        from_sequence_start: bool = True,
    ) -> ShardedLayout:
        """Return the layout of a sharded sequence, one object for all layers of a forward pass.

        Args:
            query_block, key_block: block sizes of the plan, in tokens.
            device: device of the layout's tensors.
            from_sequence_start: not used, because a sharded sequence has no cached keys before the
                call.
        """
        parallel_settings = self.details.parallel_settings
        shard_map = self.sharding.shard_map(max(query_block, key_block), device)

        def build_layout() -> ShardedLayout:
            ranges = shard_map.ranges(parallel_settings.group.rank(), self.batch)
            return ShardedLayout(
                shard_map=shard_map,
                group=parallel_settings.group,
                ranges=ranges,
                window=self.window,
                heads_k_stride=parallel_settings.heads_k_stride,
                regather_kv=parallel_settings.regather_kv,
            )

        return self.forward_state.get_or_compute(("layout", shard_map), build_layout)


@cached_per_ranges
def _local_row_indices(
    local_ranges: LocalRanges, sequence_rows: Tensor, query_block: int
) -> Tensor:
    """Convert indices of query blocks in the whole sequence to indices on this rank.

    Args:
        local_ranges: the ranges of this rank.
        sequence_rows: int64 [1, R], indices in the whole sequence, filled with -1.
        query_block: query block size in tokens.

    Returns:
        int64 [B, m], indices of those query blocks that this rank has, filled with -1.
    """
    sequence_mask = rows_mask(local_ranges.sequence_ranges, sequence_rows, query_block)[:, 0]
    local_mask = local_ranges.take_local_rows(sequence_mask, query_block)
    return row_indices(local_mask, local_mask.shape[1]).expand(local_ranges.start.shape[0], -1)
