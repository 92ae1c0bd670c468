"""`KeyRanges`, the visible keys of each query, and `BlockIndices`, lists of key blocks."""

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
    """Return ``function`` with results cached in its first argument, a `KeyRanges`.

    All layers of a forward pass share their ranges and the cache. Tensor arguments are compared by
    identity. Integer arguments must not be lengths: torch.compile treats them as constants.

    Args:
        function: receives `KeyRanges` and other positional arguments, which must be hashable.
    """

    @functools.wraps(function)
    def call_with_cache(ranges: KeyRanges, *args: Any) -> Any:
        cache_key = function, *args
        if cache_key not in ranges._cache:
            ranges._cache[cache_key] = function(ranges, *args)
        return ranges._cache[cache_key]

    return call_with_cache


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """The keys that each query may attend to, as one interval per query.

    These ranges express causality, packed documents and padding without an N x N mask.

    Attributes:
        start: int32 [B, N_q], the first visible key slot of a query: the start of its document.
        end: int32 [B, N_q], the last visible key slot, inclusive: the query's own slot. -1 for a
            padding query.
        key_valid: bool [B, N_k], False for padding keys.
        aligned: True if documents start at block borders and the queries of a block are consecutive
            tokens of one document. This static hint avoids a device sync.
        consecutive: True if each query block starts where the previous block ends, as in a sequence
            or a chunk of a sequence. The blocks of concatenated pieces of a sequence are not
            consecutive. This static hint avoids a device sync.
        documents: the largest number of documents in a batch row, if the queries of each document
            are contiguous; None if unknown. This static hint avoids a device sync.
        sequence_end: number of tokens of the complete sequence of each row, int or int32 [B, 1], if
            the sequence ends before or after the end of the call. None if documents end with the
            call.
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
            batch: number of batch rows.
            q_length, kv_length: number of queries and of keys.
            device: device of the tensors.
            q_slot: key slot of the first query; None if the queries are the last tokens.
        """
        q_slot = kv_length - q_length if q_slot is None else q_slot
        last_key = torch.arange(q_length, device=device, dtype=torch.int32) + q_slot
        last_key = last_key.to(torch.int32).expand(batch, -1)
        return cls(
            start=torch.zeros(batch, q_length, device=device, dtype=torch.int32),
            end=last_key,
            key_valid=torch.arange(kv_length, device=device) <= last_key[:, -1:],
            aligned=True,
            documents=1,
        )

    @property
    def first(self) -> Tensor:
        """Return ``start``, with a warning: ``first`` is the old name."""
        warn_renamed("KeyRanges.first", "KeyRanges.start")
        return self.start

    @property
    def last(self) -> Tensor:
        """Return ``end``, with a warning: ``last`` is the old name."""
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
        """Return ``start`` and ``end`` by query block, each int32 [B, M_q, query_block].

        Entries after the last query contain 0 and -1, a range without keys.
        """
        num_padding_queries = -self.q_length % query_block
        first_key = F.pad(self.start, (0, num_padding_queries)).unflatten(1, (-1, query_block))
        last_key = F.pad(self.end, (0, num_padding_queries), value=-1).unflatten(
            1, (-1, query_block)
        )
        return first_key, last_key

    @cached_per_ranges
    def tail(self, tokens: int, query_block: int) -> Tensor:
        """Return bool [B, M_q], True for query blocks that contain a tail token.

        Tail tokens are the last ``tokens`` tokens of a document, without padding. If
        ``sequence_end`` is None, documents end with the call. Then a call with fewer queries than
        ``query_block`` has no tail.

        Args:
            tokens: number of tail tokens per document.
            query_block: block size in tokens.
        """
        num_padding_queries = -self.q_length % query_block
        if not self.has_tail(tokens, query_block):
            is_tail = torch.zeros_like(self.end, dtype=torch.bool)
        elif self.sequence_end is not None:
            is_tail = (self.end >= 0) & (self.end >= self.sequence_end - tokens)
        else:
            # a query is a tail token unless the query ``tokens`` later is in the same document
            num_queries_without_later = min(tokens, self.q_length)
            start_of_later_query = F.pad(self.start[:, tokens:], (0, num_queries_without_later))
            end_of_later_query = F.pad(
                self.end[:, tokens:], (0, num_queries_without_later), value=-1
            )
            is_tail = (self.end >= 0) & (
                (end_of_later_query < 0) | (start_of_later_query != self.start)
            )
        return F.pad(is_tail, (0, num_padding_queries)).unflatten(1, (-1, query_block)).any(-1)

    @cached_per_ranges
    def tail_rows(self, tokens: int, query_block: int) -> Tensor | None:
        """Return the query blocks of `tail` as int64 [B, R], ascending, filled with -1.

        Returns None if there is no tail, or if ``documents`` is None, so that R has no upper bound
        without a device sync.
        """
        if not self.has_tail(tokens, query_block) or self.documents is None:
            return None
        max_rows = self.documents * (-(-tokens // query_block) + 1)
        return row_indices(self.tail(tokens, query_block), max_rows)

    def has_tail(self, tokens: int, query_block: int) -> bool:
        """Return True if `tail` may contain a query block."""
        return tokens > 0 and (self.sequence_end is not None or self.q_length >= query_block)

    @cached_per_ranges
    def rows(self, query_block: int) -> BlockRanges:
        """Return the bounds of the key ranges in every query block, without padding queries."""
        max_int32 = torch.iinfo(torch.int32).max
        first_key, last_key = self.blocked(query_block)
        is_real_query = last_key >= 0
        return BlockRanges(
            min_first=first_key.masked_fill(~is_real_query, max_int32).amin(-1),
            max_first=first_key.masked_fill(~is_real_query, -1).amax(-1),
            min_last=last_key.masked_fill(~is_real_query, max_int32).amin(-1),
            max_last=last_key.amax(-1),
            queries=is_real_query.sum(-1, dtype=torch.int32),
        )


@dataclass(frozen=True, eq=False)
class BlockRanges:
    """Bounds of the key ranges over the queries of each query block, all int32 [B, M_q].

    Padding queries have no range. A block of padding queries has the minima 2^31 - 1 and the
    maxima -1.

    Attributes:
        min_first, max_first: smallest and largest first visible key of a query.
        min_last, max_last: smallest and largest last visible key of a query, inclusive.
        queries: number of queries without padding.
    """

    min_first: Tensor
    max_first: Tensor
    min_last: Tensor
    max_last: Tensor
    queries: Tensor

    def block_positions(self, query_block: int) -> Tensor:
        """Return int64 [B, M_q], the index of each query block in its complete sequence.

        The index of a block without queries is 0.
        """
        return self.min_last.where(self.queries > 0, 0).to(torch.int64) // query_block


def crossed_blocks(query_block: int, key_block: int) -> int:
    """Return the largest number of key blocks that the diagonal of one query block can cross."""
    return -(-query_block // key_block) + 1


def block_visibility(ranges: KeyRanges, query_block: int, key_block: int) -> Tensor:
    """Return bool [B, M_q, M_k], True if a query of block i may attend to a key of key block j."""
    return visibility(ranges.rows(query_block), key_block, ranges.kv_length)[0]


def visibility(rows: BlockRanges, key_block: int, kv_length: int) -> tuple[Tensor, Tensor]:
    """Return which key blocks each query block may attend to, partly and completely.

    Args:
        rows: bounds of the query blocks.
        key_block: block size in tokens.
        kv_length: number of keys.

    Returns:
        is_visible: bool [B, M_q, M_k], True if any query of the query block may attend to any key
            of the key block.
        is_complete: bool [B, M_q, M_k], True if all queries of the query block may attend to all
            keys of the key block.
    """
    block_start = torch.arange(
        0, kv_length, key_block, device=rows.max_last.device, dtype=torch.int32
    )
    block_end = block_start + (key_block - 1)
    has_queries = rows.queries.unsqueeze(-1) > 0
    is_visible = (block_start <= rows.max_last.unsqueeze(-1)) & (
        block_end >= rows.min_first.unsqueeze(-1)
    )
    is_complete = (block_start >= rows.max_first.unsqueeze(-1)) & (
        block_end <= rows.min_last.unsqueeze(-1)
    )
    return is_visible & has_queries, is_complete & has_queries


@dataclass(frozen=True, eq=False)
class BlockIndices:
    """Lists of block indices in ascending order, one list per row.

    A row is a query block of a head and batch row, or a key block in transposed lists.

    Attributes:
        counts: int32 [B, H, M], number of listed blocks per row.
        indices: int32 [B, H, M, W]; the first ``counts`` entries of a row are its list, and the
            other entries are unused.
    """

    counts: Tensor
    indices: Tensor

    @classmethod
    def from_dense(cls, selected: Tensor, width: int | None = None) -> BlockIndices:
        """List the True columns of each row of ``selected``.

        Args:
            selected: bool [B, H, M, C].
            width: an upper bound of the counts, the width of the lists. None means C, which needs
                more memory, but no device sync.
        """
        columns = selected.shape[-1]
        width = columns if width is None else min(width, columns)
        column_indices = torch.arange(columns, device=selected.device, dtype=torch.int32)
        return cls.of(column_indices.expand_as(selected), selected, width)

    @classmethod
    def of(cls, values: Tensor, selected: Tensor, width: int) -> BlockIndices:
        """List the entries of ``values`` where ``selected`` is True.

        Args:
            values: int32 [B, H, M, C], block indices.
            selected: bool [B, H, M, C].
            width: an upper bound of the counts, the width of the lists.
        """
        list_entry = selected.cumsum(-1, dtype=torch.int32) - 1
        # unselected values are written to one spare column, which is removed afterwards
        list_entry = torch.where(selected, list_entry, width).to(torch.int64)
        indices = values.new_zeros(*selected.shape[:-1], width + 1)
        indices.scatter_(-1, list_entry, values)
        return cls(selected.sum(-1, dtype=torch.int32), indices[..., :width].contiguous())

    @property
    def width(self) -> int:
        return self.indices.shape[-1]

    def listed(self) -> Tensor:
        """Return bool [B, H, M, W], True for the used entries of ``indices``."""
        list_entry = torch.arange(self.width, device=self.counts.device)
        return list_entry < self.counts.unsqueeze(-1)

    def to_dense(self, columns: int) -> Tensor:
        """Return bool [B, H, M, columns], True for listed blocks; the inverse of `from_dense`."""
        # unused entries are written to one spare column
        listed_columns = torch.where(self.listed(), self.indices, columns).to(torch.int64)
        is_listed = listed_columns.new_zeros((*self.counts.shape, columns + 1), dtype=torch.bool)
        return is_listed.scatter_(-1, listed_columns, True)[..., :columns]

    def transpose(self, columns: int) -> BlockIndices:
        """Return lists per column: the rows that list each of the ``columns`` columns."""
        return BlockIndices.from_dense(self.to_dense(columns).transpose(2, 3))

    def for_heads(self, heads: int) -> BlockIndices:
        """Return the lists repeated to ``heads`` heads; lists of one head stay unchanged."""
        plan_heads = self.counts.shape[1]
        if plan_heads in (1, heads):
            return self
        return self.map_tensors(lambda x: x.repeat_interleave(heads // plan_heads, dim=1))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> BlockIndices:
        """Return the lists with ``change`` applied to counts and indices."""
        return BlockIndices(change(self.counts), change(self.indices))

    def widened(self, width: int) -> BlockIndices:
        """Return the lists padded to at least ``width`` entries per row."""
        return BlockIndices(self.counts, F.pad(self.indices, (0, max(0, width - self.width))))


def row_indices(selected: Tensor, max_rows: int) -> Tensor:
    """Return the True columns of ``selected`` as int64 [B, R], ascending, filled with -1.

    Args:
        selected: bool [B, M].
        max_rows: upper bound of the number of True columns per batch row.
    """
    column_lists = BlockIndices.from_dense(selected[:, None, None], max_rows)
    return torch.where(column_lists.listed(), column_lists.indices, -1)[:, 0, 0].to(torch.int64)
