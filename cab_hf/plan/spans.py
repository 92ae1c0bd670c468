"""What queries may see: intervals of keys, and lists of the blocks that these reach."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def once_per_spans(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute ``function(spans, *args)`` once for all layers of a forward pass, which share spans.

    The result lives as long as the spans. Tensor arguments are compared by identity. Numbers must
    not be lengths: torch.compile makes a constant of each.
    """

    @functools.wraps(function)
    def shared(spans: Spans, *args: Any) -> Any:
        key = function, *args
        if key not in spans._made:
            spans._made[key] = function(spans, *args)
        return spans._made[key]

    return shared


@dataclass(frozen=True, eq=False)
class Spans:
    """The keys that each query may attend to: one interval.

    Causality, packed documents and padding are all expressed this way, so that nothing downstream
    needs an N x N mask.

    Attributes:
        first: int32 [B, N_q], the first key slot a query sees (the start of its document).
        last: int32 [B, N_q], the last one, inclusive: the query's own slot. -1 for a padding query.
        key_valid: bool [B, N_k], False for padding keys.
        aligned: a static hint, so that nothing waits for the device: documents start at block
            borders and the queries of a block are consecutive tokens of one document.
        consecutive: a static hint, so that nothing waits for the device: every query block begins
            where the one before it ends, as in a text and in a chunk of one. Pieces of a text from
            several places do not.
        documents: a static hint, so that nothing waits for the device: each batch row holds at most
            so many documents, the queries of each in one stretch. None where they were not counted.
        end: tokens of each row's text, int or int32 [B, 1], where it is known to end before the
            call does or behind it; None where a document ends with the call.
    """

    first: Tensor
    last: Tensor
    key_valid: Tensor
    aligned: bool = False
    consecutive: bool = True
    documents: int | None = None
    end: int | Tensor | None = None
    # see `once_per_spans`
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def causal(
        cls,
        batch: int,
        q_length: int,
        kv_length: int,
        device: torch.device | str,
        q_slot: int | Tensor | None = None,
    ) -> Spans:
        """Plain causal attention of ``q_length`` of ``kv_length`` tokens, by default the last.

        ``q_slot`` is the first of them; nothing is behind the last one.
        """
        q_slot = kv_length - q_length if q_slot is None else q_slot
        last = torch.arange(q_length, device=device, dtype=torch.int32) + q_slot
        last = last.to(torch.int32).expand(batch, -1)
        return cls(
            first=torch.zeros(batch, q_length, device=device, dtype=torch.int32),
            last=last,
            key_valid=torch.arange(kv_length, device=device) <= last[:, -1:],
            aligned=True,
            documents=1,
        )

    @property
    def q_length(self) -> int:
        return self.first.shape[1]

    @property
    def kv_length(self) -> int:
        return self.key_valid.shape[1]

    @once_per_spans
    def pairs(self) -> Tensor:
        """int64 scalar: the (query, key) pairs of one head that causality allows."""
        return (self.last - self.first + 1).clamp(min=0).sum(dtype=torch.int64)

    @once_per_spans
    def blocked(self, query_block: int) -> tuple[Tensor, Tensor]:
        """(first, last) by block, int32 [B, M_q, query_block]; the ragged end sees nothing."""
        padding = -self.q_length % query_block
        first = F.pad(self.first, (0, padding)).unflatten(1, (-1, query_block))
        last = F.pad(self.last, (0, padding), value=-1).unflatten(1, (-1, query_block))
        return first, last

    @once_per_spans
    def tail(self, tokens: int, query_block: int) -> Tensor:
        """bool [B, M_q]: query blocks with one of the last ``tokens`` real tokens of a document.

        Without an ``end``, the end of the call is that of its documents, and fewer queries than a
        block have no tail.
        """
        padding = -self.q_length % query_block
        if not self.has_tail(tokens, query_block):
            ends = torch.zeros_like(self.last, dtype=torch.bool)
        elif self.end is not None:
            ends = (self.last >= 0) & (self.last >= self.end - tokens)
        else:
            # the query that many places later, if it is a token of the same document
            beyond = min(tokens, self.q_length)
            later_first = F.pad(self.first[:, tokens:], (0, beyond))
            later_last = F.pad(self.last[:, tokens:], (0, beyond), value=-1)
            ends = (self.last >= 0) & ((later_last < 0) | (later_first != self.first))
        return F.pad(ends, (0, padding)).unflatten(1, (-1, query_block)).any(-1)

    @once_per_spans
    def tail_rows(self, tokens: int, query_block: int) -> Tensor | None:
        """int64 [B, R]: the indices of `tail`, ascending, -1 behind the last of a batch row.

        None where there is no tail, or where the number of rows is known to the device alone.
        """
        if not self.has_tail(tokens, query_block) or self.documents is None:
            return None
        room = self.documents * (-(-tokens // query_block) + 1)
        return named_rows(self.tail(tokens, query_block), room)

    def has_tail(self, tokens: int, query_block: int) -> bool:
        """Whether a query block may be of a `tail`."""
        return tokens > 0 and (self.end is not None or self.q_length >= query_block)

    @once_per_spans
    def rows(self, query_block: int) -> RowSpans:
        """The spans of every query block, padding queries left out."""
        no_query = torch.iinfo(torch.int32).max
        first, last = self.blocked(query_block)
        real = last >= 0
        return RowSpans(
            min_first=first.masked_fill(~real, no_query).amin(-1),
            max_first=first.masked_fill(~real, -1).amax(-1),
            min_last=last.masked_fill(~real, no_query).amin(-1),
            max_last=last.amax(-1),
            queries=real.sum(-1, dtype=torch.int32),
        )


@dataclass(frozen=True, eq=False)
class RowSpans:
    """Bounds over the queries of each query block, all int32 [B, M_q]; ``queries`` counts them."""

    min_first: Tensor
    max_first: Tensor
    min_last: Tensor
    max_last: Tensor
    queries: Tensor

    def places(self, query_block: int) -> Tensor:
        """int64 [B, M_q]: the index of each row on the query grid, wherever a chunk begins."""
        return self.min_last.where(self.queries > 0, 0).to(torch.int64) // query_block


def crossed_blocks(query_block: int, key_block: int) -> int:
    """The most key blocks that the diagonal of consecutive queries crosses, wherever it begins."""
    return -(-query_block // key_block) + 1


def block_visibility(spans: Spans, query_block: int, key_block: int) -> Tensor:
    """bool [B, M_q, M_k]: some query of the block may see some key of the block."""
    return visibility(spans.rows(query_block), key_block, spans.kv_length)[0]


def visibility(rows: RowSpans, key_block: int, kv_length: int) -> tuple[Tensor, Tensor]:
    """(seen by some query of the row, seen wholly by all of them), both bool [B, M_q, M_k]."""
    start = torch.arange(0, kv_length, key_block, device=rows.max_last.device, dtype=torch.int32)
    end = start + (key_block - 1)
    inhabited = rows.queries.unsqueeze(-1) > 0
    visible = (start <= rows.max_last.unsqueeze(-1)) & (end >= rows.min_first.unsqueeze(-1))
    complete = (start >= rows.max_first.unsqueeze(-1)) & (end <= rows.min_last.unsqueeze(-1))
    return visible & inhabited, complete & inhabited


@dataclass(frozen=True, eq=False)
class BlockLists:
    """For every row, a list of block indices: ascending, compact, padded behind its count.

    Attributes:
        counts: int32 [B, H, M], blocks listed in each row.
        indices: int32 [B, H, M, W]; entries at and behind the row's count are 0 and mean nothing.
    """

    counts: Tensor
    indices: Tensor

    @classmethod
    def from_dense(cls, chosen: Tensor, width: int | None = None) -> BlockLists:
        """Lists of the True columns of ``chosen``, bool [B, H, M, C].

        ``width`` is an upper bound of the counts that the caller knows; without it the lists are as
        wide as ``chosen``, which costs memory but no device sync.
        """
        columns = chosen.shape[-1]
        width = columns if width is None else min(width, columns)
        column = torch.arange(columns, device=chosen.device, dtype=torch.int32)
        return cls.of(column.expand_as(chosen), chosen, width)

    @classmethod
    def of(cls, values: Tensor, kept: Tensor, width: int) -> BlockLists:
        """Lists of the ``values`` that are ``kept``, int32 and bool [B, H, M, C]."""
        slot = kept.cumsum(-1, dtype=torch.int32) - 1
        # everything not kept is written to one spare column, cut off afterwards
        slot = torch.where(kept, slot, width).to(torch.int64)
        indices = values.new_zeros(*kept.shape[:-1], width + 1)
        indices.scatter_(-1, slot, values)
        return cls(kept.sum(-1, dtype=torch.int32), indices[..., :width].contiguous())

    @property
    def width(self) -> int:
        return self.indices.shape[-1]

    def listed(self) -> Tensor:
        """bool [B, H, M, W]: which entries of ``indices`` are real."""
        slots = torch.arange(self.width, device=self.counts.device)
        return slots < self.counts.unsqueeze(-1)

    def to_dense(self, columns: int) -> Tensor:
        """bool [B, H, M, columns], the inverse of `from_dense`."""
        target = torch.where(self.listed(), self.indices, columns).to(torch.int64)
        dense = target.new_zeros(*self.counts.shape, columns + 1, dtype=torch.bool)
        return dense.scatter_(-1, target, True)[..., :columns]

    def transpose(self, columns: int) -> BlockLists:
        """For each of the ``columns``, the rows that list it."""
        return BlockLists.from_dense(self.to_dense(columns).transpose(2, 3))

    def for_heads(self, heads: int) -> BlockLists:
        """The same lists, one for each of ``heads``; a single one is shared by all as it is."""
        own = self.counts.shape[1]
        if own in (1, heads):
            return self
        return self.map_tensors(lambda x: x.repeat_interleave(heads // own, dim=1))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> BlockLists:
        """The same change made to counts and indices."""
        return BlockLists(change(self.counts), change(self.indices))

    def widened(self, width: int) -> BlockLists:
        """The same lists with room for ``width`` entries a row."""
        return BlockLists(self.counts, F.pad(self.indices, (0, max(0, width - self.width))))


def named_rows(chosen: Tensor, room: int) -> Tensor:
    """int64 [B, R]: the True columns of bool [B, M], ascending, -1 behind the last of a batch row.

    ``room`` is an upper bound of how many there are.
    """
    lists = BlockLists.from_dense(chosen[:, None, None], room)
    return torch.where(lists.listed(), lists.indices, -1)[:, 0, 0].to(torch.int64)
