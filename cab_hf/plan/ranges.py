"""`KeyRanges`, the visible keys of each query, and `BlockIndices`, lists of visible blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.checks import warn_renamed


def cached_per_ranges(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache ``function(ranges, *args)`` for all layers of a forward pass, which share ranges.

    The cache is part of the ranges. Tensor arguments are compared by identity. Integer arguments
    must not be lengths, because torch.compile treats each integer as a constant.
    """

    @functools.wraps(function)
    def shared(ranges: KeyRanges, *args: Any) -> Any:
        key = function, *args
        if key not in ranges._cache:
            ranges._cache[key] = function(ranges, *args)
        return ranges._cache[key]

    return shared


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """The keys that each query may attend to, as one interval per query.

    KeyRanges express causality, packed documents and padding without an N x N mask.

    Attributes:
        start: int32 [B, N_q], the first visible key slot of a query: the start of its document.
        end: int32 [B, N_q], the last visible key slot, inclusive: the query's own slot. -1 for a
            padding query.
        key_valid: bool [B, N_k], False for padding keys.
        aligned: True if documents start at block borders and the queries of a block are consecutive
            tokens of one document. A static hint that avoids a device sync.
        consecutive: True if every query block starts where the block before it ends, as in a
            sequence or a chunk of a sequence. Joined pieces of a sequence are not consecutive. A
            static hint that avoids a device sync.
        documents: the largest number of documents in a batch row, if the queries of each document
            are contiguous; None if unknown. A static hint that avoids a device sync.
        sequence_end: number of tokens of each row's whole sequence, int or int32 [B, 1], if the
            sequence ends before or after the end of the call. None if documents end with the call.
    """

    start: Tensor
    end: Tensor
    key_valid: Tensor
    aligned: bool = False
    consecutive: bool = True
    documents: int | None = None
    sequence_end: int | Tensor | None = None
    # see `cached_per_ranges`
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def causal(
        cls,
        batch: int,
        q_length: int,
        kv_length: int,
        device: torch.device | str,
        q_slot: int | Tensor | None = None,
    ) -> KeyRanges:
        """Build causal ranges of ``q_length`` queries over ``kv_length`` keys.

        Args:
            batch: batch rows.
            q_length, kv_length: tokens of q and of k.
            device: device of the tensors.
            q_slot: key slot of the first query; by default the queries are the last tokens.
        """
        q_slot = kv_length - q_length if q_slot is None else q_slot
        last = torch.arange(q_length, device=device, dtype=torch.int32) + q_slot
        last = last.to(torch.int32).expand(batch, -1)
        return cls(
            start=torch.zeros(batch, q_length, device=device, dtype=torch.int32),
            end=last,
            key_valid=torch.arange(kv_length, device=device) <= last[:, -1:],
            aligned=True,
            documents=1,
        )

    @property
    def first(self) -> Tensor:
        """Return ``start``, whose old name this is."""
        warn_renamed("KeyRanges.first", "KeyRanges.start")
        return self.start

    @property
    def last(self) -> Tensor:
        """Return ``end``, whose old name this is."""
        warn_renamed("KeyRanges.last", "KeyRanges.end")
        return self.end

    @property
    def q_length(self) -> int:
        return self.start.shape[1]

    @property
    def kv_length(self) -> int:
        return self.key_valid.shape[1]

    @cached_per_ranges
    def pairs(self) -> Tensor:
        """Return the number of causal (query, key) pairs of one head, an int64 scalar."""
        return (self.end - self.start + 1).clamp(min=0).sum(dtype=torch.int64)

    @cached_per_ranges
    def blocked(self, query_block: int) -> tuple[Tensor, Tensor]:
        """Return (first, last) per query block, int32 [B, M_q, query_block].

        Entries after the last query have no keys.
        """
        padding = -self.q_length % query_block
        first = F.pad(self.start, (0, padding)).unflatten(1, (-1, query_block))
        last = F.pad(self.end, (0, padding), value=-1).unflatten(1, (-1, query_block))
        return first, last

    @cached_per_ranges
    def tail(self, tokens: int, query_block: int) -> Tensor:
        """Return bool [B, M_q], True for query blocks that contain a tail token.

        Tail tokens are the last ``tokens`` tokens of a document, without padding. Without
        ``sequence_end``, documents end with the call, and a call with fewer queries than a block
        has no tail.
        """
        padding = -self.q_length % query_block
        if not self.has_tail(tokens, query_block):
            ends = torch.zeros_like(self.end, dtype=torch.bool)
        elif self.sequence_end is not None:
            ends = (self.end >= 0) & (self.end >= self.sequence_end - tokens)
        else:
            # the query this number of places later, if it is a token of the same document
            beyond = min(tokens, self.q_length)
            later_first = F.pad(self.start[:, tokens:], (0, beyond))
            later_last = F.pad(self.end[:, tokens:], (0, beyond), value=-1)
            ends = (self.end >= 0) & ((later_last < 0) | (later_first != self.start))
        return F.pad(ends, (0, padding)).unflatten(1, (-1, query_block)).any(-1)

    @cached_per_ranges
    def tail_rows(self, tokens: int, query_block: int) -> Tensor | None:
        """Return the indices of `tail` as int64 [B, R], ascending, filled with -1.

        Returns None if there is no tail, or if only the device knows the number of rows.
        """
        if not self.has_tail(tokens, query_block) or self.documents is None:
            return None
        room = self.documents * (-(-tokens // query_block) + 1)
        return named_rows(self.tail(tokens, query_block), room)

    def has_tail(self, tokens: int, query_block: int) -> bool:
        """Return True if a query block can be in a `tail`."""
        return tokens > 0 and (self.sequence_end is not None or self.q_length >= query_block)

    @cached_per_ranges
    def rows(self, query_block: int) -> BlockRanges:
        """Return the ranges of every query block, without padding queries."""
        no_query = torch.iinfo(torch.int32).max
        first, last = self.blocked(query_block)
        real = last >= 0
        return BlockRanges(
            min_first=first.masked_fill(~real, no_query).amin(-1),
            max_first=first.masked_fill(~real, -1).amax(-1),
            min_last=last.masked_fill(~real, no_query).amin(-1),
            max_last=last.amax(-1),
            queries=real.sum(-1, dtype=torch.int32),
        )


@dataclass(frozen=True, eq=False)
class BlockRanges:
    """Bounds over the queries of each query block, all int32 [B, M_q].

    ``queries`` counts the queries of a block without padding.
    """

    min_first: Tensor
    max_first: Tensor
    min_last: Tensor
    max_last: Tensor
    queries: Tensor

    def places(self, query_block: int) -> Tensor:
        """Return int64 [B, M_q], the index of each row on the query grid of the whole sequence."""
        return self.min_last.where(self.queries > 0, 0).to(torch.int64) // query_block


def crossed_blocks(query_block: int, key_block: int) -> int:
    """Return the largest number of key blocks that the diagonal of one query block can cross."""
    return -(-query_block // key_block) + 1


def block_visibility(ranges: KeyRanges, query_block: int, key_block: int) -> Tensor:
    """Return bool [B, M_q, M_k], True if any key of a block is visible to any query of a block."""
    return visibility(ranges.rows(query_block), key_block, ranges.kv_length)[0]


def visibility(rows: BlockRanges, key_block: int, kv_length: int) -> tuple[Tensor, Tensor]:
    """Return two masks, both bool [B, M_q, M_k].

    The first is True if any key of the block is visible to any query of the row. The second is
    True if all keys of the block are visible to all queries of the row.
    """
    start = torch.arange(0, kv_length, key_block, device=rows.max_last.device, dtype=torch.int32)
    end = start + (key_block - 1)
    inhabited = rows.queries.unsqueeze(-1) > 0
    visible = (start <= rows.max_last.unsqueeze(-1)) & (end >= rows.min_first.unsqueeze(-1))
    complete = (start >= rows.max_first.unsqueeze(-1)) & (end <= rows.min_last.unsqueeze(-1))
    return visible & inhabited, complete & inhabited


@dataclass(frozen=True, eq=False)
class BlockIndices:
    """Lists of block indices, one per row: ascending, compact and padded after the row's count.

    Attributes:
        counts: int32 [B, H, M], number of listed blocks per row.
        indices: int32 [B, H, M, W]; entries from the row's count on are 0 and unused.
    """

    counts: Tensor
    indices: Tensor

    @classmethod
    def from_dense(cls, chosen: Tensor, width: int | None = None) -> BlockIndices:
        """List the True columns of ``chosen``, bool [B, H, M, C].

        Args:
            chosen: bool [B, H, M, C].
            width: a known upper bound of the counts. By default the lists have C columns, which
                costs memory but no device sync.
        """
        columns = chosen.shape[-1]
        width = columns if width is None else min(width, columns)
        column = torch.arange(columns, device=chosen.device, dtype=torch.int32)
        return cls.of(column.expand_as(chosen), chosen, width)

    @classmethod
    def of(cls, values: Tensor, kept: Tensor, width: int) -> BlockIndices:
        """List the entries of ``values`` where ``kept`` is True, int32 and bool [B, H, M, C]."""
        slot = kept.cumsum(-1, dtype=torch.int32) - 1
        # entries that are not kept go to one spare column, which is cut off afterwards
        slot = torch.where(kept, slot, width).to(torch.int64)
        indices = values.new_zeros(*kept.shape[:-1], width + 1)
        indices.scatter_(-1, slot, values)
        return cls(kept.sum(-1, dtype=torch.int32), indices[..., :width].contiguous())

    @property
    def width(self) -> int:
        return self.indices.shape[-1]

    def listed(self) -> Tensor:
        """Return bool [B, H, M, W], True for entries of ``indices`` before the row's count."""
        slots = torch.arange(self.width, device=self.counts.device)
        return slots < self.counts.unsqueeze(-1)

    def to_dense(self, columns: int) -> Tensor:
        """Return bool [B, H, M, columns], the inverse of `from_dense`."""
        target = torch.where(self.listed(), self.indices, columns).to(torch.int64)
        dense = target.new_zeros(*self.counts.shape, columns + 1, dtype=torch.bool)
        return dense.scatter_(-1, target, True)[..., :columns]

    def transpose(self, columns: int) -> BlockIndices:
        """Return lists per column: the rows that list each of the ``columns`` columns."""
        return BlockIndices.from_dense(self.to_dense(columns).transpose(2, 3))

    def for_heads(self, heads: int) -> BlockIndices:
        """Return the lists repeated to ``heads`` heads. Lists of one head stay as they are."""
        own = self.counts.shape[1]
        if own in (1, heads):
            return self
        return self.map_tensors(lambda x: x.repeat_interleave(heads // own, dim=1))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> BlockIndices:
        """Return the lists with ``change`` applied to counts and indices."""
        return BlockIndices(change(self.counts), change(self.indices))

    def widened(self, width: int) -> BlockIndices:
        """Return the lists padded to ``width`` entries per row."""
        return BlockIndices(self.counts, F.pad(self.indices, (0, max(0, width - self.width))))


def named_rows(chosen: Tensor, room: int) -> Tensor:
    """Return the True columns of bool [B, M] as int64 [B, R], ascending, filled with -1.

    Args:
        chosen: bool [B, M].
        room: upper bound of the number of True columns.
    """
    lists = BlockIndices.from_dense(chosen[:, None, None], room)
    return torch.where(lists.listed(), lists.indices, -1)[:, 0, 0].to(torch.int64)
