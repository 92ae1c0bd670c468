"""The default predictor: sample a few queries per block and score them against the keys.

Typical queries, at equal strides in the block, estimate the mean attention mass of a key block.
Outliers, a farthest-point sample, find keys that single queries need. SampleAttention (arXiv
2406.15486) samples queries at a stride. FlashPrefill and BLASST keep blocks above a threshold. The
outliers, the strided keys and the weights of outliers and typical queries are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cab_hf.config import CabConfig, blocks_of, tail_of
from cab_hf.ops import reference
from cab_hf.plan import BlockIndices, BlockPlan, KeyRanges, block_visibility, crossed_blocks
from cab_hf.predictors.base import LayerContext, Predictor, has_kernels
from cab_hf.selection import cpu

# fields of CabConfig for selecting blocks, with their types in the registered op
FIELDS = {
    **dict.fromkeys(("query_block", "key_block", "sink_blocks", "local_blocks"), "int"),
    **dict.fromkeys(("dense_tail_blocks", "outlier_queries"), "int"),
    **dict.fromkeys(("typical_queries", "typical_key_stride"), "int"),
    **dict.fromkeys(("mass_threshold", "share_threshold", "max_density"), "float"),
}


@dataclass(frozen=True, eq=False)
class QuantizedKeys:
    """The keys of a sequence in the format in which queries are scored against them.

    Attributes:
        keys: [B, H_kv, N_k, C]; k itself for the reference, else the result of
            `cab_hf.ops.rows.scored_keys`.
        exponents: int8 [B, H_kv, N_k, 1], the exponents of `cab_hf.ops.rows.scored_keys`; None for
            the reference.
    """

    keys: Tensor
    exponents: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]


class RowsPredictor(Predictor):
    """The default predictor: keeps key blocks whose mean or maximum attention share is large.

    For query block m and key block j, with the shares of `reference.mass_by_rows`::

        select(m, j) = mean_share[m, j] >= mass_threshold * min(1, 32768 / num_visible_keys)
                       or max_share[m, j] >= share_threshold

    ``config.outlier_queries`` outliers per block are scored against every key, on
    ``LayerContext.channels``. ``config.typical_queries`` typical queries are scored on all channels
    of every ``config.typical_key_stride``-th key. Sinks take part in the softmax but are never
    selected. `choose_by_reference` defines the selection. On CUDA, the kernels of `cab_hf.ops.rows`
    and `cab_hf.ops.sweep` compute the same selection.
    """

    def summarise(
        self, k: Tensor, valid: Tensor | None = None, channels: tuple[int, ...] = ()
    ) -> QuantizedKeys:
        """Return the keys that ``choose`` scores; outliers are scored on ``channels``."""
        if self.config.check_finite:
            reference.refuse_infinite("k", k)
        if not has_kernels(k):
            return QuantizedKeys(k)
        if torch.compiler.is_compiling():
            return QuantizedKeys(*torch.ops.cab_hf.keys_of_rows(k, channels))
        from cab_hf.ops import lists

        return QuantizedKeys(*lists.keys_of(k, channels))

    def summary_of(self, k: Tensor, valid: Tensor, call: LayerContext) -> QuantizedKeys:
        return self.summarise(k, valid, call.channels)

    def gathers(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        return ("summaries",)

    def join(
        self, summary: QuantizedKeys, call: LayerContext, heads: tuple[int, int], layout: Any
    ) -> QuantizedKeys:
        """Join the keys of all ranks, because every query is scored against every key."""
        scored = [x for x in (summary.keys, summary.exponents) if x is not None]
        return QuantizedKeys(*map(layout.tokens, scored))

    def choose(self, q: Tensor, summary: QuantizedKeys, call: LayerContext) -> BlockPlan:
        config, ranges = self.config, call.ranges
        if config.check_finite:
            reference.refuse_infinite("q", q)
        if torch.compiler.is_compiling():
            lists = _as_op(q, summary, call, config)
        else:
            lists = _choose(q, summary, call, config)
        return BlockPlan(
            *lists, ranges, *blocks_of(config), dense_rows=ranges.tail_rows(*tail_of(config))
        )


def _choose(
    q: Tensor, summary: QuantizedKeys, call: LayerContext, config: CabConfig
) -> tuple[BlockIndices, BlockIndices]:
    """Return (full, partial) lists for q [B, H, N_q, D].

    The lists of tail rows are empty if the number of tail rows is known.
    """
    if has_kernels(q):
        from cab_hf.ops import lists

        parts = summary.keys, summary.exponents, call.ranges, call.scale, call.channels, config
        return lists.choose(q, *parts, call.sinks, call.softcap)
    score = cpu.scores if q.device.type == "cpu" and call.scale > 0 else _scores
    plan = BlockPlan.from_dense(
        choose_by_reference(q, summary.keys, call, config, score),
        call.ranges,
        query_block=config.query_block,
        key_block=config.key_block,
        dense_rows=call.ranges.tail_rows(*tail_of(config)),
    )
    return plan.full, plan.partial


def choose_by_reference(
    q: Tensor,
    k: Tensor,
    call: LayerContext,
    config: CabConfig,
    score: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return the blocks that `RowsPredictor` keeps, bool [B, H, M_q, M_k], in plain PyTorch.

    Args:
        score: see `ranks`.
    """
    rank = ranks(q, k, call, config, score)
    if config.max_density < 1:
        bad = reference.not_finite(k, call.ranges.key_valid)
        marked = reference.marked_blocks(bad, config.key_block)
        rank = capped_ranks(rank, call.ranges, config, marked)
    return rank >= config.mass_threshold


def capped_ranks(
    rank: Tensor, ranges: KeyRanges, config: CabConfig, marked: Tensor | None = None
) -> Tensor:
    """Return ``rank`` [B, H, M_q, M_k] with -1 for the blocks that ``max_density`` excludes.

    A row can keep its forced blocks, and its best other blocks up to ``max_density``.

    Args:
        marked: bool [B, H_kv, M_k], `reference.marked_blocks`; None for none.
    """
    if config.max_density == 1:
        return rank
    visible = block_visibility(ranges, *blocks_of(config))
    forced = reference.forced_blocks(visible, ranges, config).unsqueeze(1)
    bounds = reference.row_bounds(
        ranges, *blocks_of(config), config.sink_blocks, config.local_blocks
    )
    cap = reference.most_of_rows(bounds, config.max_density, marked)
    cap = cap.repeat_interleave(rank.shape[1] // cap.shape[1], dim=1)
    most = cap.maximum(forced.sum(-1))
    return rank.masked_fill(~reference.best_of_rows(rank, rank >= 0, forced, most), -1.0)


def ranks(
    q: Tensor,
    k: Tensor,
    call: LayerContext,
    config: CabConfig,
    score: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return the largest mass threshold that keeps each block, float32 [B, H, M_q, M_k].

    The first case that applies determines the value of a block:

    * -1 if the row does not see the block;
    * infinity if the block is forced or has a key that is not finite (`reference.marked_blocks`);
    * 1 if a scored query of the row is not finite;
    * 1 + share if the share of one query reaches ``share_threshold``;
    * else min(1, mass * max(1, n / `reference.THRESHOLD_KEYS`)) for n visible keys.

    A key that is not finite counts as zeros in the masses of other blocks.

    Args:
        score: function that computes the last three cases, with the arguments of `cpu.scores`; None
            for the definition.
    """
    ranges, group = call.ranges, q.shape[1] // k.shape[1]
    visible = block_visibility(ranges, *blocks_of(config))
    forced = reference.forced_blocks(visible, ranges, config)
    bad = reference.not_finite(k, ranges.key_valid)
    marked = reference.marked_blocks(bad, config.key_block).unsqueeze(2)
    if k.device.type != "cpu" or bool(bad.any()):
        k = k.masked_fill(bad.unsqueeze(-1), 0.0)
    rank = (score or _scores)(q, k, call, config, visible=visible, forced=forced)
    always = forced.unsqueeze(1) | marked.repeat_interleave(group, dim=1)
    return rank.masked_fill_(always, torch.inf).masked_fill_(~visible.unsqueeze(1), -1.0)


def _scores(
    q: Tensor, k: Tensor, call: LayerContext, config: CabConfig, *, visible: Tensor, forced: Tensor
) -> Tensor:
    """Return the ranks of blocks that are neither forced nor marked, by the reference."""
    ranges, group = call.ranges, q.shape[1] // k.shape[1]
    seen = config.key_block * visible.sum(-1, keepdim=True).unsqueeze(1)
    longer = (seen / reference.THRESHOLD_KEYS).clamp(min=1)
    result = []
    for head in range(q.shape[1]):
        one, keys = q[:, [head]], k[:, [head // group]]
        sinks = None if call.sinks is None else call.sinks[[head]]
        given = ranges, call.scale, config, call.channels, sinks, call.softcap
        mass, most = reference.mass_by_rows(one, keys, *given)
        mass = (mass * longer).clamp(max=1)
        rank = torch.where(most >= config.share_threshold, 1 + most, mass)
        result.append(rank.masked_fill(rank.isnan(), 1.0))
    return torch.cat(result, dim=1)


def _as_op(
    q: Tensor, summary: QuantizedKeys, call: LayerContext, config: CabConfig
) -> tuple[BlockIndices, BlockIndices]:
    """Compute `_choose` as one op: torch.compile would trace a graph per length of its loops."""
    ranges = call.ranges
    end = ranges.sequence_end
    if end is not None and not isinstance(end, Tensor):
        end = torch.full((1, 1), end, device=q.device, dtype=torch.int32)
    known = ranges.start, ranges.end, ranges.key_valid, ranges.aligned, ranges.consecutive
    settings = [getattr(config, name) for name in FIELDS]
    parts = summary.keys, summary.exponents, call.sinks, call.softcap, call.scale, call.channels
    known = *known, ranges.documents, end
    lists = torch.ops.cab_hf.choose_by_rows(q, *parts, *known, *settings)
    return BlockIndices(*lists[:2]), BlockIndices(*lists[2:])


@torch.library.custom_op(
    "cab_hf::choose_by_rows",
    mutates_args=(),
    schema="(Tensor q, Tensor keys, Tensor? exponents, Tensor? sinks, float? softcap, float scale,"
    " int[] channels, Tensor first, Tensor last, Tensor key_valid, bool aligned, bool consecutive,"
    " int? documents, Tensor? end, "
    + ", ".join(f"{kind} {name}" for name, kind in FIELDS.items())
    + ") -> (Tensor, Tensor, Tensor, Tensor)",
)
def _choose_op(q, keys, exponents, sinks, softcap, scale, channels, *values):
    ranges, config = KeyRanges(*values[:7]), _config_of(values[7:])
    more = {"channels": tuple(channels), "sinks": sinks, "softcap": softcap}
    call = LayerContext(ranges, scale, **more)
    full, partial = _choose(q, QuantizedKeys(keys, exponents), call, config)
    return full.counts, full.indices, partial.counts, partial.indices


@_choose_op.register_fake
def _(
    q, keys, exponents, sinks, softcap, scale, channels, first, last, key_valid, aligned, *values
):
    config = _config_of(values[3:])
    rows, columns = -(-q.shape[2] // config.query_block), -(-keys.shape[2] // config.key_block)
    crossed = crossed_blocks(*blocks_of(config)) if aligned else columns
    shapes = ((), (columns,), (), (min(crossed, columns),))
    return tuple(first.new_empty(*q.shape[:2], rows, *width) for width in shapes)


def _config_of(settings: tuple) -> CabConfig:
    return CabConfig(**dict(zip(FIELDS, settings, strict=True)), predictor="rows")


@torch.library.custom_op("cab_hf::keys_of_rows", mutates_args=())
def _keys_op(k: Tensor, channels: list[int]) -> list[Tensor]:
    from cab_hf.ops import lists

    return lists.keys_of(k, tuple(channels))


@_keys_op.register_fake
def _(k: Tensor, channels: list[int]) -> list[Tensor]:
    from cab_hf.ops import rows

    return list(rows.empty_keys(k, tuple(channels), rows.scored_dtype(k)))
