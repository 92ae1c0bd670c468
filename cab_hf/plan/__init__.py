"""Block plans: the lists of key blocks that every query block attends to.

A plan is the only value that passes from selecting blocks to computing attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cab_hf.checks import warn_renamed
from cab_hf.plan.ranges import (
    BlockIndices,
    BlockRanges,
    KeyRanges,
    block_visibility,
    cached_per_ranges,
    crossed_blocks,
    named_rows,
    visibility,
)

__all__ = [
    "DENSE_BLOCK_SIZE",
    "BlockIndices",
    "BlockPlan",
    "BlockRanges",
    "KeyRanges",
    "block_visibility",
    "cached_per_ranges",
    "crossed_blocks",
    "named_rows",
    "rows_grid",
    "visibility",
]

# classes by the names that they had
OLD_NAMES = {"Spans": KeyRanges, "RowSpans": BlockRanges, "BlockLists": BlockIndices}


def __getattr__(name: str) -> type:
    if name not in OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    renamed = OLD_NAMES[name]
    warn_renamed(f"cab_hf.plan.{name}", f"cab_hf.plan.{renamed.__name__}")
    return renamed


# query and key blocks of a plan that keeps everything; larger blocks stay
DENSE_BLOCK_SIZE = 128


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """The key blocks that each query block of each head and batch row attends to.

    Query block i contains queries [i * query_block, (i + 1) * query_block), and key block j
    likewise. A query attends to a key if the query block lists the key's block and the key is
    inside the span of the query. All lists have the width of the longest list, so a row that
    attends to everything would make all lists wide. ``dense_rows`` names such rows instead, and
    their lists are empty.

    A plan may also sample blocks that it does not list. Each sampled block represents
    ``sample_period`` blocks: log(sample_period) is added to the logits of its keys.

    Attributes:
        full: blocks that are completely visible to every query of the row, so they need no mask.
        partial: blocks cut by the diagonal, a document border or padding.
        ranges: the interval of keys that each query may attend to (token level).
        query_block, key_block: block sizes in tokens.
        dense_rows: int64 [B, R], query blocks that attend to everything, each named once; -1 for
            unused entries. None if there are none.
        sampled: sampled blocks, completely visible to every query of the row; None without
            sampling.
        sample_period: number of blocks that each sampled block represents.
    """

    full: BlockIndices
    partial: BlockIndices
    ranges: KeyRanges
    query_block: int
    key_block: int
    dense_rows: Tensor | None = None
    sampled: BlockIndices | None = None
    sample_period: int = 1

    @property
    def spans(self) -> KeyRanges:
        """Return ``ranges``, whose old name this is."""
        warn_renamed("BlockPlan.spans", "BlockPlan.ranges")
        return self.ranges

    @classmethod
    def from_dense(
        cls,
        keep: Tensor,
        ranges: KeyRanges,
        *,
        query_block: int,
        key_block: int,
        dense_rows: Tensor | None = None,
    ) -> BlockPlan:
        """Build the plan that attends to the blocks ``keep`` inside the ranges.

        Args:
            keep: bool [B, H, M_q, M_k].
            ranges: the interval of keys that each query may attend to.
            query_block, key_block: block sizes in tokens.
            dense_rows: int64 [B, R], query blocks that attend to everything, independent of
                ``keep``.

        Raises:
            ValueError: ``keep`` has another shape or dtype.
        """
        visible, complete = visibility(ranges.rows(query_block), key_block, ranges.kv_length)
        if keep.dtype != torch.bool or keep.ndim != 4 or keep.shape[2:] != visible.shape[1:]:
            raise ValueError(
                f"keep must be bool [B, H, {visible.shape[1]}, {visible.shape[2]}] for these "
                f"ranges and block sizes, got {keep.dtype} {tuple(keep.shape)}. Pass one entry per "
                "query block and key block."
            )
        keep = keep & visible.unsqueeze(1)
        if dense_rows is not None:
            keep = keep & ~rows_grid(ranges, dense_rows, query_block).unsqueeze(-1)
        complete = complete.unsqueeze(1)
        crossed = crossed_blocks(query_block, key_block) if ranges.aligned else None
        return cls(
            full=BlockIndices.from_dense(keep & complete),
            partial=BlockIndices.from_dense(keep & ~complete, crossed),
            ranges=ranges,
            query_block=query_block,
            key_block=key_block,
            dense_rows=dense_rows,
        )

    @classmethod
    def causal(cls, ranges: KeyRanges, heads: int, query_block: int, key_block: int) -> BlockPlan:
        """Build the plan that attends to all visible blocks, which is exact attention."""
        visible = block_visibility(ranges, query_block, key_block)
        keep = visible.unsqueeze(1).expand(-1, heads, -1, -1)
        return cls.from_dense(keep, ranges, query_block=query_block, key_block=key_block)

    def of_sampled(self) -> BlockPlan:
        """Return a plan that lists only the sampled blocks of this plan."""
        assert self.sampled is not None
        counts = torch.zeros_like(self.sampled.counts)
        nothing = BlockIndices(counts, counts.unsqueeze(-1))
        return replace(self, full=self.sampled, partial=nothing, dense_rows=None, sampled=None)

    @property
    def blocks(self) -> tuple[int, int]:
        """The block sizes (query_block, key_block) in tokens."""
        return self.query_block, self.key_block

    @property
    def batch(self) -> int:
        return self.full.counts.shape[0]

    @property
    def heads(self) -> int:
        return self.full.counts.shape[1]

    def shared_by(self, heads: int) -> int:
        """Return the number of query heads per head of the plan.

        A plan has one head per query head, one per KV head, or any number that divides ``heads``.
        Head h of the plan applies to query heads h * g to h * g + g - 1, where g is the returned
        value.

        Raises:
            ValueError: the number of plan heads does not divide ``heads``.
        """
        if heads % self.heads:
            raise ValueError(
                f"plan must have a number of heads that divides the {heads} heads of q, got "
                f"{self.heads}. Build a plan with one head, or with one per KV or query head."
            )
        return heads // self.heads

    @property
    def q_length(self) -> int:
        return self.ranges.q_length

    @property
    def kv_length(self) -> int:
        return self.ranges.kv_length

    @property
    def q_blocks(self) -> int:
        return -(-self.q_length // self.query_block)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_length // self.key_block)

    @property
    def lists(self) -> dict[str, BlockIndices]:
        """All lists by name: "full", "partial", and "sampled" if blocks are sampled."""
        named = {"full": self.full, "partial": self.partial}
        return named if self.sampled is None else named | {"sampled": self.sampled}

    def map_lists(self, change: Callable[[BlockIndices], BlockIndices], **other: Any) -> BlockPlan:
        """Return the plan with ``change`` applied to every list and ``other`` fields replaced."""
        return replace(self, **{name: change(x) for name, x in self.lists.items()}, **other)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> BlockPlan:
        """Return the plan with ``change`` applied to all counts and indices."""
        return self.map_lists(lambda part: part.map_tensors(change))

    def with_dense_rows(self, rows: Tensor) -> BlockPlan:
        """Return the plan with ``rows``, int64 [B, R], added to ``dense_rows``."""
        grid = rows_grid(self.ranges, rows, self.query_block)
        if self.dense_rows is not None:
            rows = _both(self.ranges, rows, self.dense_rows, self.query_block)
        return self.map_lists(
            lambda part: BlockIndices(part.counts.masked_fill(grid, 0), part.indices),
            dense_rows=rows,
        )

    def with_sample(self, sample_period: int, seed: Tensor) -> BlockPlan:
        """Return the plan with a sample of the blocks that it does not list.

        Each row of each head draws one of every ``sample_period`` neighbouring blocks. The drawn
        block is kept if it is unlisted and visible to all queries of the row. An unlisted
        block is therefore kept with probability 1 / ``sample_period``, and its weight is multiplied
        by ``sample_period``.
        In expectation, the sum of exp(logit) equals the sum over all blocks. The plan must list all
        blocks that are partly visible to a row. Predictors do so if documents start at block
        borders.

        Args:
            sample_period: number of blocks that each sampled block represents.
            seed: int64 scalar on the device; the same plan and seed draw the same sample.
        """
        rows, device = self.ranges.rows(self.query_block), seed.device
        runs = torch.arange(-(-self.kv_blocks // sample_period), device=device)
        shape = (*self.full.counts.shape, len(runs))
        place = torch.arange(math.prod(shape), device=device).view(shape)
        drawn_blocks = runs * sample_period + _scattered(place + seed) % sample_period
        first, last, queries = (
            x[:, None, :, None] for x in (rows.max_first, rows.min_last, rows.queries)
        )
        begins = drawn_blocks * self.key_block
        is_full = (begins >= first) & (begins + (self.key_block - 1) <= last) & (queries > 0)
        inside = drawn_blocks.clamp(max=self.kv_blocks - 1)
        is_full &= ~self.full.to_dense(self.kv_blocks).gather(-1, inside)
        dense = self.is_dense()
        if dense is not None:
            is_full &= ~dense.unsqueeze(-1)
        sampled = BlockIndices.of(drawn_blocks.to(torch.int32), is_full, len(runs))
        return replace(self, sampled=sampled, sample_period=sample_period)

    def on(self, ranges: KeyRanges) -> BlockPlan:
        """Return the plan on the device of ``ranges``, which must equal the ranges of this plan."""
        device = ranges.start.device
        rows = None if self.dense_rows is None else self.dense_rows.to(device)
        return replace(self.map_tensors(lambda x: x.to(device)), ranges=ranges, dense_rows=rows)

    def select_heads(self, heads: Sequence[int]) -> BlockPlan:
        """Return a plan whose head i attends to the blocks of head ``heads[i]`` of this plan."""
        # stacked, so that no index is copied to the device
        return self.map_tensors(lambda x: torch.stack([x[:, head] for head in heads], dim=1))

    def slice_heads(self, start: int, stop: int, heads: int) -> BlockPlan:
        """Return the plan of query heads ``start`` to ``stop`` of ``heads``; see `shared_by`."""
        sharing, plan = self.shared_by(heads), self
        if plan.heads == 1:
            return plan
        if start % sharing or stop % sharing:
            # the slice cuts a head of the plan: repeat it for each query head
            plan = plan.map_lists(lambda part: part.for_heads(heads))
            sharing = 1
        start, stop = start // sharing, stop // sharing
        return plan.map_tensors(lambda x: x[:, start:stop].contiguous())

    def take_rows(self, rows: Tensor, ranges: KeyRanges) -> BlockPlan:
        """Return the plan of some query blocks.

        Args:
            rows: int64 [m], the query blocks; -1 for a block with empty lists.
            ranges: the ranges of the queries of these blocks.
        """
        missing, index = rows < 0, rows.clamp(min=0)

        def taken(part: BlockIndices) -> BlockIndices:
            counts = part.counts[:, :, index].masked_fill(missing, 0)
            return BlockIndices(counts, part.indices[:, :, index])

        dense = self.dense_rows
        if dense is not None:
            # all layers of a forward pass have the same dense rows
            dense = _taken(ranges, dense, rows, self.q_blocks)
        return self.map_lists(taken, ranges=ranges, dense_rows=dense)

    def is_dense(self) -> Tensor | None:
        """Return bool [B, 1, M_q], True for rows that attend to everything, or None."""
        if self.dense_rows is None:
            return None
        return rows_grid(self.ranges, self.dense_rows, self.query_block)

    def to_dense(self) -> Tensor:
        """Return the attended blocks as bool [B, H, M_q, M_k], without sampled blocks."""
        chosen, dense = self._chosen(slice(None)), self.is_dense()
        if dense is None:
            return chosen
        return chosen & block_visibility(self.ranges, *self.blocks).unsqueeze(1)

    def _chosen(self, rows: slice) -> Tensor:
        """Return bool [B, H, rows, M_k]: listed blocks, and every block of dense rows."""
        lists = (part.map_tensors(lambda x: x[:, :, rows]) for part in (self.full, self.partial))
        full, partial = (part.to_dense(self.kv_blocks) for part in lists)
        dense = self.is_dense()
        listed = full | partial
        return listed if dense is None else listed | dense[:, :, rows].unsqueeze(-1)

    def token_mask(
        self, start: int = 0, stop: int | None = None, kv_stop: int | None = None
    ) -> Tensor:
        """Return the attended keys of queries ``start`` to ``stop``.

        The mask is bool [B, H, stop - start, kv_stop]. Sampled blocks are left out. The mask is
        quadratic in the sequence length; use it in tests and in the reference.
        """
        stop = self.q_length if stop is None else min(stop, self.q_length)
        kv_stop = self.kv_length if kv_stop is None else kv_stop
        rows = slice(start // self.query_block, -(-stop // self.query_block))
        row = torch.arange(start, stop, device=self.ranges.start.device) // self.query_block
        key = torch.arange(kv_stop, device=row.device)
        tokens = self._chosen(rows)[:, :, row - rows.start][..., key // self.key_block]
        first, last = (x[:, start:stop, None] for x in (self.ranges.start, self.ranges.end))
        return tokens & ((key >= first) & (key <= last)).unsqueeze(1)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Count (attended, causal) pairs of a query and a key over all heads, int64 scalars."""
        rows = self.ranges.rows(self.query_block)
        queries = rows.queries.unsqueeze(1).to(torch.int64)
        attended = (self.full.counts * queries).sum() * self.key_block
        if self.sampled is not None:
            attended = attended + (self.sampled.counts * queries).sum() * self.key_block
        first, last = self.ranges.blocked(self.query_block)
        listed = self.partial.listed()
        for slot in range(self.partial.width):
            start = self.partial.indices[..., slot, None] * self.key_block
            low = torch.maximum(start, first.unsqueeze(1))
            high = torch.minimum(start + (self.key_block - 1), last.unsqueeze(1))
            seen = (high - low + 1).clamp(min=0).sum(-1, dtype=torch.int64)
            attended = attended + torch.where(listed[..., slot], seen, 0).sum()
        dense = self.is_dense()
        if dense is not None:
            seen = (last - first + 1).clamp(min=0).sum(-1, dtype=torch.int64)
            attended = attended + (dense * seen.unsqueeze(1)).sum() * self.heads
        return attended, self.ranges.pairs() * self.heads

    def density(self) -> float:
        """Return attended (query, key) pairs divided by causal pairs. This is a device sync."""
        attended, causal = self.pairs()
        return int(attended) / max(1, int(causal))


def _grid(rows: Tensor, blocks: int) -> Tensor:
    """Return bool [B, M_q] with ``blocks`` columns, True for ``rows``, int64 [B, R].

    Rows of -1 are ignored.
    """
    grid = torch.zeros(rows.shape[0], blocks + 1, device=rows.device, dtype=torch.bool)
    # -1 goes to one spare column
    return grid.scatter_(1, rows.masked_fill(rows < 0, blocks), True)[:, :blocks]


def _scattered(x: Tensor) -> Tensor:
    """Hash int64 x to pseudo-random integers >= 0 by the finaliser of SplitMix64.

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (2014).
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        # right shifts of negative numbers fill with ones
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x ^ (x >> 31)) & (2**62 - 1)


@cached_per_ranges
def rows_grid(ranges: KeyRanges, rows: Tensor, query_block: int) -> Tensor:
    """Return bool [B, 1, M_q], True for ``rows`` [B, R]."""
    return _grid(rows, -(-ranges.q_length // query_block)).unsqueeze(1)


@cached_per_ranges
def _taken(ranges: KeyRanges, complete: Tensor, rows: Tensor, q_blocks: int) -> Tensor:
    """Return the positions of query blocks in ``rows``, int64 [m].

    ``complete``, int64 [B, R], contains the query blocks.
    """
    named = _grid(complete, q_blocks)[:, rows.clamp(min=0)] & (rows >= 0)
    return named_rows(named, min(complete.shape[1], rows.shape[0]))


@cached_per_ranges
def _both(ranges: KeyRanges, rows: Tensor, others: Tensor, query_block: int) -> Tensor:
    """Return the union of ``rows``, int64 [B, R], and ``others``, int64 [B, S]: [B, R + S]."""
    grid = rows_grid(ranges, rows, query_block)[:, 0]
    named = (others >= 0) & grid.gather(1, others.clamp(min=0))
    return torch.cat((rows, others.masked_fill(named, -1)), dim=1)
