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
    row_indices,
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
    "row_indices",
    "rows_mask",
    "visibility",
]

# old names of classes, which import with a warning
CLASSES_BY_OLD_NAME = {"Spans": KeyRanges, "RowSpans": BlockRanges, "BlockLists": BlockIndices}


def __getattr__(name: str) -> type:
    if name not in CLASSES_BY_OLD_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new_class = CLASSES_BY_OLD_NAME[name]
    warn_renamed(f"cab_hf.plan.{name}", f"cab_hf.plan.{new_class.__name__}")
    return new_class


# smallest block size, in tokens, of a plan that attends to all visible blocks
DENSE_BLOCK_SIZE = 128


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """The key blocks that each query block of each head and batch row attends to.

    Query block i contains queries [i * query_block, (i + 1) * query_block). Key block j contains
    keys [j * key_block, (j + 1) * key_block). A query attends to a key if the query block lists the
    block of the key and the key is in the range of the query.

    All lists have the width of the longest list. A query block that attends to all visible blocks
    would make all lists wide. Therefore ``dense_rows`` contains the index of such a query block,
    and its lists are empty.

    A plan may also sample blocks that it does not list. Each sampled block represents
    ``sample_period`` blocks: log(sample_period) is added to the logits of its keys.

    Attributes:
        full: blocks that are completely visible to every query of the row, so they need no mask.
        partial: blocks cut by the diagonal, a document border or padding.
        ranges: the interval of keys that each query may attend to (token level).
        query_block, key_block: block sizes in tokens.
        dense_rows: int64 [B, R], distinct query blocks that attend to all visible blocks; -1 for
            unused entries. None if no query block does.
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
        """Return ``ranges``, with a warning: ``spans`` is the old name."""
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
        """Build the plan that attends to the blocks where ``keep`` is True, inside the ranges.

        Args:
            keep: bool [B, H, M_q, M_k].
            ranges: the interval of keys that each query may attend to.
            query_block, key_block: block sizes in tokens.
            dense_rows: int64 [B, R], query blocks that attend to all visible blocks, independent of
                ``keep``; -1 for unused entries. None if no query block does.

        Raises:
            ValueError: if ``keep`` has another shape or dtype.
        """
        is_visible, is_complete = visibility(ranges.rows(query_block), key_block, ranges.kv_length)
        if keep.dtype != torch.bool or keep.ndim != 4 or keep.shape[2:] != is_visible.shape[1:]:
            raise ValueError(
                f"keep must be bool [B, H, {is_visible.shape[1]}, {is_visible.shape[2]}] for these "
                f"ranges and block sizes, got {keep.dtype} {tuple(keep.shape)}. Pass one entry per "
                "query block and key block."
            )
        keep = keep & is_visible.unsqueeze(1)
        if dense_rows is not None:
            keep = keep & ~rows_mask(ranges, dense_rows, query_block).unsqueeze(-1)
        is_complete = is_complete.unsqueeze(1)
        max_partial_blocks = crossed_blocks(query_block, key_block) if ranges.aligned else None
        return cls(
            full=BlockIndices.from_dense(keep & is_complete),
            partial=BlockIndices.from_dense(keep & ~is_complete, max_partial_blocks),
            ranges=ranges,
            query_block=query_block,
            key_block=key_block,
            dense_rows=dense_rows,
        )

    @classmethod
    def causal(cls, ranges: KeyRanges, heads: int, query_block: int, key_block: int) -> BlockPlan:
        """Build the plan that attends to all visible blocks, which is exact attention."""
        is_visible = block_visibility(ranges, query_block, key_block)
        keep = is_visible.unsqueeze(1).expand(-1, heads, -1, -1)
        return cls.from_dense(keep, ranges, query_block=query_block, key_block=key_block)

    def of_sampled(self) -> BlockPlan:
        """Return a plan that lists only the sampled blocks of this plan."""
        assert self.sampled is not None
        zero_counts = torch.zeros_like(self.sampled.counts)
        empty_lists = BlockIndices(counts=zero_counts, indices=zero_counts.unsqueeze(-1))
        return replace(self, full=self.sampled, partial=empty_lists, dense_rows=None, sampled=None)

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
            ValueError: if the number of plan heads does not divide ``heads``.
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
        lists = {"full": self.full, "partial": self.partial}
        return lists if self.sampled is None else lists | {"sampled": self.sampled}

    def map_lists(
        self, change: Callable[[BlockIndices], BlockIndices], **other_fields: Any
    ) -> BlockPlan:
        """Return the plan with ``change`` applied to all lists.

        Args:
            change: maps `BlockIndices` to `BlockIndices`.
            other_fields: new values of other fields of the plan.
        """
        changed_lists = {list_name: change(lists) for list_name, lists in self.lists.items()}
        return replace(self, **changed_lists, **other_fields)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> BlockPlan:
        """Return the plan with ``change`` applied to all counts and indices."""
        return self.map_lists(lambda lists: lists.map_tensors(change))

    def with_dense_rows(self, rows: Tensor) -> BlockPlan:
        """Return the plan with ``rows``, int64 [B, R], added to ``dense_rows``."""
        is_added_row = rows_mask(self.ranges, rows, self.query_block)
        if self.dense_rows is not None:
            rows = _merge_rows(self.ranges, rows, self.dense_rows, self.query_block)
        return self.map_lists(
            lambda lists: BlockIndices(lists.counts.masked_fill(is_added_row, 0), lists.indices),
            dense_rows=rows,
        )

    def with_sample(self, sample_period: int, seed: Tensor) -> BlockPlan:
        """Return the plan with a sample of the blocks that it does not list.

        Each row of each head draws one of every ``sample_period`` adjacent blocks. The drawn block
        enters the sample if it is unlisted and visible to all queries of the row. An unlisted block
        is therefore sampled with probability 1 / ``sample_period``, and its weight is multiplied by
        ``sample_period``. In expectation, the sum of exp(logit) equals the sum over all blocks.

        The plan must list all blocks that are partly visible to a row. Predictors list them if
        documents start at block borders.

        Args:
            sample_period: number of blocks that each sampled block represents.
            seed: int64 scalar on the device of the plan. The same plan and seed draw the same
                sample.
        """
        row_bounds, device = self.ranges.rows(self.query_block), seed.device
        # one drawn block per row and run of adjacent blocks, [B, H, M_q, runs]
        block_run_index = torch.arange(-(-self.kv_blocks // sample_period), device=device)
        drawn_blocks_shape = (*self.full.counts.shape, len(block_run_index))
        draw_numbers = torch.arange(math.prod(drawn_blocks_shape), device=device).view(
            drawn_blocks_shape
        )
        drawn_blocks = (
            block_run_index * sample_period + _hash_to_integers(draw_numbers + seed) % sample_period
        )
        max_first_key, min_last_key, num_queries = (
            x[:, None, :, None]
            for x in (row_bounds.max_first, row_bounds.min_last, row_bounds.queries)
        )
        block_starts = drawn_blocks * self.key_block
        is_sampled = (
            (block_starts >= max_first_key)
            & (block_starts + (self.key_block - 1) <= min_last_key)
            & (num_queries > 0)
        )
        clamped_blocks = drawn_blocks.clamp(max=self.kv_blocks - 1)
        is_sampled &= ~self.full.to_dense(self.kv_blocks).gather(-1, clamped_blocks)
        is_dense_row = self.is_dense()
        if is_dense_row is not None:
            is_sampled &= ~is_dense_row.unsqueeze(-1)
        sampled = BlockIndices.of(drawn_blocks.to(torch.int32), is_sampled, len(block_run_index))
        return replace(self, sampled=sampled, sample_period=sample_period)

    def on(self, ranges: KeyRanges) -> BlockPlan:
        """Return the plan on the device of ``ranges``, which must equal the ranges of this plan."""
        device = ranges.start.device
        dense_rows = None if self.dense_rows is None else self.dense_rows.to(device)
        return replace(
            self.map_tensors(lambda x: x.to(device)), ranges=ranges, dense_rows=dense_rows
        )

    def select_heads(self, heads: Sequence[int]) -> BlockPlan:
        """Return a plan whose head i attends to the blocks of head ``heads[i]`` of this plan."""
        # by stack, because an index tensor would be copied from the host to the device
        return self.map_tensors(lambda x: torch.stack([x[:, head] for head in heads], dim=1))

    def slice_heads(self, start: int, stop: int, heads: int) -> BlockPlan:
        """Return the plan of query heads ``start`` to ``stop`` of ``heads``; see `shared_by`."""
        q_heads_per_plan_head, plan = self.shared_by(heads), self
        if plan.heads == 1:
            return plan
        if start % q_heads_per_plan_head or stop % q_heads_per_plan_head:
            # the slice splits the query heads of a plan head: repeat the lists for each query head
            plan = plan.map_lists(lambda lists: lists.for_heads(heads))
            q_heads_per_plan_head = 1
        plan_heads = slice(start // q_heads_per_plan_head, stop // q_heads_per_plan_head)
        return plan.map_tensors(lambda x: x[:, plan_heads].contiguous())

    def take_rows(self, rows: Tensor, ranges: KeyRanges) -> BlockPlan:
        """Return the plan of the query blocks ``rows`` of this plan, in this order.

        Args:
            rows: int64 [m], the query blocks; -1 for a query block with empty lists.
            ranges: the ranges of the queries of these query blocks.
        """
        is_empty, row_index = rows < 0, rows.clamp(min=0)

        def take_list_rows(lists: BlockIndices) -> BlockIndices:
            counts = lists.counts[:, :, row_index].masked_fill(is_empty, 0)
            return BlockIndices(counts, lists.indices[:, :, row_index])

        dense_rows = self.dense_rows
        if dense_rows is not None:
            dense_rows = _find_dense_rows(ranges, dense_rows, rows, self.q_blocks)
        return self.map_lists(take_list_rows, ranges=ranges, dense_rows=dense_rows)

    def is_dense(self) -> Tensor | None:
        """Return bool [B, 1, M_q], True for ``dense_rows``; None if the plan has no dense rows."""
        if self.dense_rows is None:
            return None
        return rows_mask(self.ranges, self.dense_rows, self.query_block)

    def to_dense(self) -> Tensor:
        """Return the attended blocks as bool [B, H, M_q, M_k], without sampled blocks."""
        is_selected = self._find_selected_blocks(slice(None))
        if self.dense_rows is None:
            return is_selected
        is_visible = block_visibility(self.ranges, self.query_block, self.key_block)
        return is_selected & is_visible.unsqueeze(1)

    def _find_selected_blocks(self, rows: slice) -> Tensor:
        """Return bool [B, H, rows, M_k], True for listed blocks and every block of dense rows."""
        full, partial = (
            lists.map_tensors(lambda x: x[:, :, rows]).to_dense(self.kv_blocks)
            for lists in (self.full, self.partial)
        )
        is_dense_row = self.is_dense()
        is_listed = full | partial
        if is_dense_row is None:
            return is_listed
        return is_listed | is_dense_row[:, :, rows].unsqueeze(-1)

    def token_mask(
        self, start: int = 0, stop: int | None = None, kv_stop: int | None = None
    ) -> Tensor:
        """Return the attended keys of some queries as bool [B, H, stop - start, kv_stop].

        The mask is quadratic in the sequence length, for tests and the reference. The mask is False
        for keys of sampled blocks.

        Args:
            start, stop: first query, and the end of the queries; None for all queries from
                ``start`` on.
            kv_stop: number of keys; None for all keys.
        """
        stop = self.q_length if stop is None else min(stop, self.q_length)
        kv_stop = self.kv_length if kv_stop is None else kv_stop
        q_block_slice = slice(start // self.query_block, -(-stop // self.query_block))
        q_block_of_query = (
            torch.arange(start, stop, device=self.ranges.start.device) // self.query_block
        )
        key_position = torch.arange(kv_stop, device=q_block_of_query.device)
        is_selected = self._find_selected_blocks(q_block_slice)[
            :, :, q_block_of_query - q_block_slice.start
        ][..., key_position // self.key_block]
        first_key, last_key = (x[:, start:stop, None] for x in (self.ranges.start, self.ranges.end))
        return is_selected & ((key_position >= first_key) & (key_position <= last_key)).unsqueeze(1)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Count (query, key) pairs over all heads: attended pairs, and all causal pairs.

        Returns:
            Two int64 scalars. Sampled blocks count once.
        """
        row_bounds = self.ranges.rows(self.query_block)
        num_queries = row_bounds.queries.unsqueeze(1).to(torch.int64)
        num_attended = (self.full.counts * num_queries).sum() * self.key_block
        if self.sampled is not None:
            num_attended = num_attended + (self.sampled.counts * num_queries).sum() * self.key_block
        first_key, last_key = self.ranges.blocked(self.query_block)
        is_listed = self.partial.listed()
        for list_entry in range(self.partial.width):
            block_start = self.partial.indices[..., list_entry, None] * self.key_block
            first_attended = torch.maximum(block_start, first_key.unsqueeze(1))
            last_attended = torch.minimum(block_start + (self.key_block - 1), last_key.unsqueeze(1))
            row_pairs = (last_attended - first_attended + 1).clamp(min=0).sum(-1, dtype=torch.int64)
            num_attended = (
                num_attended + torch.where(is_listed[..., list_entry], row_pairs, 0).sum()
            )
        is_dense_row = self.is_dense()
        if is_dense_row is not None:
            row_pairs = (last_key - first_key + 1).clamp(min=0).sum(-1, dtype=torch.int64)
            num_attended = num_attended + (is_dense_row * row_pairs.unsqueeze(1)).sum() * self.heads
        return num_attended, self.ranges.pairs() * self.heads

    def density(self) -> float:
        """Return attended (query, key) pairs divided by causal pairs; synchronises the device."""
        num_attended, num_causal = self.pairs()
        return int(num_attended) / max(1, int(num_causal))


def _build_row_mask(rows: Tensor, num_blocks: int) -> Tensor:
    """Return bool [B, num_blocks], True for the query blocks ``rows``, int64 [B, R].

    Rows of -1 are ignored.
    """
    row_mask = torch.zeros(rows.shape[0], num_blocks + 1, device=rows.device, dtype=torch.bool)
    # -1 is written to one spare column
    return row_mask.scatter_(1, rows.masked_fill(rows < 0, num_blocks), True)[:, :num_blocks]


def _hash_to_integers(x: Tensor) -> Tensor:
    """Hash int64 x to pseudo-random integers >= 0 by the finaliser of SplitMix64.

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (2014).
    """
    for shift_bits, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        # right shifts of negative numbers fill with ones
        x = (x ^ ((x >> shift_bits) & ((1 << (64 - shift_bits)) - 1))) * factor
    return (x ^ (x >> 31)) & (2**62 - 1)


@cached_per_ranges
def rows_mask(ranges: KeyRanges, rows: Tensor, query_block: int) -> Tensor:
    """Return bool [B, 1, M_q], True for the query blocks ``rows``, int64 [B, R].

    Rows of -1 are ignored. The result is cached for all layers of a forward pass.
    """
    return _build_row_mask(rows, -(-ranges.q_length // query_block)).unsqueeze(1)


@cached_per_ranges
def _find_dense_rows(
    key_ranges: KeyRanges, dense_rows: Tensor, rows: Tensor, q_blocks: int
) -> Tensor:
    """Return the indices i for which ``rows[i]`` is a dense row, int64 [B, min(R, m)].

    Unused entries are -1. The result is cached: all layers of a forward pass have the same dense
    rows.

    Args:
        key_ranges: owner of the cache.
        dense_rows: int64 [B, R], dense query blocks; -1 for unused entries.
        rows: int64 [m], some query blocks; -1 for unused entries.
        q_blocks: number of query blocks.
    """
    is_dense_row = _build_row_mask(dense_rows, q_blocks)[:, rows.clamp(min=0)] & (rows >= 0)
    return row_indices(is_dense_row, min(dense_rows.shape[1], rows.shape[0]))


@cached_per_ranges
def _merge_rows(
    key_ranges: KeyRanges, added_rows: Tensor, dense_rows: Tensor, query_block: int
) -> Tensor:
    """Return the union of two lists of query block indices for each sequence, int64 [B, R + S].

    Entries of -1 are unused.

    Args:
        key_ranges: visible keys of every query, which give the number of query blocks.
        added_rows: int64 [B, R], -1 for unused entries.
        dense_rows: int64 [B, S], -1 for unused entries.
        query_block: query block size, in tokens.
    """
    is_added_row = rows_mask(key_ranges, added_rows, query_block)[:, 0]
    is_repeated_row = (dense_rows >= 0) & is_added_row.gather(1, dense_rows.clamp(min=0))
    return torch.cat((added_rows, dense_rows.masked_fill(is_repeated_row, -1)), dim=1)
