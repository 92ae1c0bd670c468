"""The places of tokens on the block grid: padding closed up, documents at block borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.reordering import Reordering
from cab_hf.ops.attention.complete import with_sinks
from cab_hf.plan import EXACT_BLOCK, BlockPlan, Spans, named_rows, once_per_spans
from cab_hf.predictors import LayerContext, Predictor


class Length(NamedTuple):
    """How long a document is: its queries in this call, and its tokens so far. No padding."""

    queries: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A re-arrangement of a call's tokens that makes blocks mean the same whatever surrounds them.

    Blocks anchored at slots would move with left padding, and a block across two documents would
    mix them. Here each row's padding comes last and each document starts a new block, so a text
    selects the same blocks alone, padded or packed.

    A layer puts `queries` and `keys` into it, has blocks chosen (`choose`, or `everything` of them)
    and attended (`attend`), and takes the output back (`restore`). A text that many ranks hold has
    a layout with the same methods: `cab_hf.distributed.sharded.ShardedLayout`.

    Attributes:
        spans: what each query may see, in positions of the layout.
        query_order, key_order: from the call's order to this one; None where it is the call's.
        sizes: the `Length` of the document of each position, int64 [B, N'_q] twice; None where all
            are as long as the call, or it is not known.
        lengths: the same of every document of a batch row, on the host; None where waiting for the
            device is not allowed.
    """

    spans: Spans
    kv_length: int
    query_order: Reordering | None = None
    key_order: Reordering | None = None
    sizes: tuple[Tensor, Tensor] | None = None
    lengths: Sequence[Sequence[Length]] | None = None

    @classmethod
    def build(
        cls,
        batch: int,
        q_length: int,
        kv_length: int,
        q_slot: int | Tensor,
        valid: Tensor | None,
        document: Tensor | None,
        align: int,
        device: torch.device,
        lengths: Sequence[Sequence[Length]] | None = None,
        ahead: int | list[int] = 0,
        end: int | Tensor | None = None,
        window: int | None = None,
    ) -> Layout:
        """The layout of a call; arguments as in `CabMask`.

        Args:
            align: the larger block size.
            ahead: places without a query before the first of every row, or of each.
            end: see `Spans`.
            window: width of a sliding window, in slots.

        Raises:
            NotImplementedError: while compiling, for documents with padding.
        """
        if valid is None and document is None:
            spans = replace(Spans.causal(batch, q_length, kv_length, device, q_slot), end=end)
            spans = _in_window(spans, window)
            layout = cls._led(spans, kv_length, ahead) if ahead else cls(spans, kv_length)
            if isinstance(end, Tensor):
                # padding comes in a later chunk, and rows end in different places
                rows = end.expand(-1, layout.spans.last.shape[1])
                layout = replace(layout, sizes=(rows, rows), lengths=lengths)
            return layout
        if document is not None and torch.compiler.is_compiling():
            return cls(_in_window(_spans_in_place(document, valid), window), kv_length)

        padded = valid is not None
        if not padded:
            valid = torch.ones(batch, kv_length, dtype=torch.bool, device=device)
        if isinstance(q_slot, Tensor):
            mine = torch.arange(q_length, device=device) + q_slot
            # what is behind the last of them is not written
            valid = valid & (torch.arange(kv_length, device=device) <= mine[-1])
        else:
            mine = slice(q_slot, q_slot + q_length)
        real = valid[:, mine]
        place = valid.cumsum(-1) - 1
        if document is None:
            first, length, documents = torch.zeros_like(place), kv_length, 1
            shift = first
            # queries close up from the left
            inside, q_places = real.cumsum(-1) - 1, q_length
            if ahead:
                inside = inside + torch.tensor(ahead, device=device).unsqueeze(1)
                q_places += max(ahead)
            sizes = real.sum(-1, keepdim=True), valid.sum(-1, keepdim=True)
            if end is not None:
                sizes = (end,) * 2
        else:
            if lengths is None:
                lengths = whole_documents(valid, document)
            documents = len(lengths[0])
            tokens = document_lengths(valid, document, documents)
            first, shift = _aligned_documents(tokens, document, align)
            place = place + shift
            # queries are where their keys are
            inside = place[:, mine]
            # a call of nothing but padding has a layout as well
            length = q_places = max(1, *(_extent(row, align) for row in lengths))
            sizes = (tokens.gather(1, document.to(torch.int64)),) * 2
        key_source, key_valid = _invert(place, valid, length)
        query_source, query_valid = _invert(inside, real, q_places)

        def by_query(values: Tensor, fill: int) -> Tensor:
            taken = values.gather(1, query_source).masked_fill(~query_valid, fill)
            return taken.to(torch.int32)

        starts, ends = by_query(first[:, mine], 0), by_query(place[:, mine], -1)
        spans = Spans(starts, ends, key_valid, aligned=True, documents=documents, end=end)
        if window is not None:
            # the rank of the first key that is not too far behind
            far = F.pad(valid.cumsum(-1), (window, 0))[:, :kv_length] + shift
            spans = _windowed(spans, by_query(far[:, mine], 0))
        sizes = tuple([by_query(x.expand(-1, kv_length)[:, mine], 0) for x in sizes])
        query_order = Reordering.of(query_source, query_valid, inside, real if padded else None)
        key_order = Reordering.of(key_source, key_valid, place, valid if padded else None)
        return cls(spans, kv_length, query_order, key_order, sizes, lengths)

    @classmethod
    def _led(cls, spans: Spans, kv_length: int, ahead: int) -> Layout:
        """The layout whose first queries come after so many places without one."""
        batch, tokens = spans.last.shape
        place = torch.arange(ahead, ahead + tokens, device=spans.last.device)
        source = torch.arange(-ahead, tokens, device=spans.last.device)
        filled = (source >= 0).expand(batch, -1)
        source, place = source.clamp(min=0).expand(batch, -1), place.expand(batch, -1)
        spans = replace(
            spans,
            first=F.pad(spans.first, (ahead, 0)),
            last=F.pad(spans.last, (ahead, 0), value=-1),
        )
        return cls(spans, kv_length, Reordering.of(source, filled, place, None))

    def short(self, queries: int, tokens: int, query_block: int) -> Tensor | None:
        """int64 [B, R]: query blocks of documents with fewer ``queries`` or ``tokens``, then -1.

        None where no document is. ``query_block`` is one that the layout was built for.
        """
        if self.sizes is None:
            return None
        if self.lengths is None:
            # where lengths may not be read: as many as there could be
            room = -(-max(queries, tokens) // query_block)
        else:
            short = [
                [x for x in row if x.queries < queries or x.tokens < tokens] for row in self.lengths
            ]
            room = max(sum(-(-x.queries // query_block) for x in row) for row in short)
        if room == 0:
            return None
        return _short_rows(self.spans, *self.sizes, queries, tokens, query_block, room)

    def queries(self, x: Tensor) -> Tensor:
        """[B, H, N_q, D] from the call's order to the layout's."""
        return x if self.query_order is None else self.query_order.apply(x)

    def keys(self, x: Tensor) -> Tensor:
        """[B, H_kv, N_k, D] from slots to the layout's order; unwritten cache slots are dropped."""
        x = x[:, :, : self.kv_length]
        return x if self.key_order is None else self.key_order.apply(x)

    def choose(self, predictor: Predictor, q: Tensor, k: Tensor, call: LayerContext) -> BlockPlan:
        """What ``predictor`` chooses for q and k of the layout, without gradient."""
        with torch.no_grad():
            return predictor.choose(q, predictor.summary_of(k, self.spans.key_valid, call), call)

    def everything(self) -> BlockPlan:
        """The plan that leaves nothing out, of blocks of `EXACT_BLOCK`."""
        return everything(self.spans, EXACT_BLOCK)

    def attend(
        self,
        engine: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: BlockPlan,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[B, H, N', D] of q, k and v of the layout, by an `Engine` under ``plan``.

        ``sinks`` are those of `complete.with_sinks`.
        """
        if sinks is None:
            return engine.attention(q, k, v, plan, scale)
        return with_sinks(*engine.attention(q, k, v, plan, scale, return_lse=True), sinks)

    def restore(self, out: Tensor) -> Tensor:
        """[B, H, N', D] back to the call's order, zeros at padding queries."""
        return out if self.query_order is None else self.query_order.undo(out)


@once_per_spans
def everything(spans: Spans, size: int) -> BlockPlan:
    """The plan that leaves nothing out of ``spans``; made once for all layers and heads."""
    return BlockPlan.causal(spans, 1, size, size)


@once_per_spans
def _short_rows(
    spans: Spans,
    of_queries: Tensor,
    of_tokens: Tensor,
    queries: int,
    tokens: int,
    query_block: int,
    room: int,
) -> Tensor:
    """int64 [B, room]: the query blocks of `Layout.short`."""
    short = ((of_queries < queries) | (of_tokens < tokens)) & (spans.last >= 0)
    short = F.pad(short, (0, -short.shape[1] % query_block))
    return named_rows(short.unflatten(1, (-1, query_block)).any(-1), room)


def _in_window(spans: Spans, window: int | None) -> Spans:
    """``spans`` of keys that lie one behind the other, under a sliding window if there is one."""
    return spans if window is None else _windowed(spans, spans.last - (window - 1))


def _windowed(spans: Spans, first: Tensor) -> Spans:
    """``spans`` in which no query sees a key before ``first`` [B, N_q]."""
    return replace(spans, first=torch.maximum(spans.first, first), aligned=False)


def _invert(place: Tensor, real: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(source, filled bool), both [B, length], for tokens that go to ``place`` where ``real``."""
    # what is not real lands in one spare column
    target = place.masked_fill(~real, length)
    slots = torch.arange(place.shape[1], device=place.device).expand_as(place)
    source = slots.new_zeros(place.shape[0], length + 1).scatter(1, target, slots)
    filled = torch.zeros_like(source, dtype=torch.bool).scatter(1, target, True)
    return source[:, :length], filled[:, :length]


def whole_documents(
    valid: Tensor, document: Tensor, documents: int | None = None
) -> list[list[Length]]:
    """The lengths of documents all of whose tokens are queries. Waits for the device.

    ``documents`` is an upper bound of how many there are; looked for without it.
    """
    if documents is None:
        documents = int(document.max()) + 1
    tokens = document_lengths(valid, document, documents)
    return [[Length(count, count) for count in row] for row in tokens.tolist()]


def document_lengths(valid: Tensor, document: Tensor, documents: int) -> Tensor:
    """int64 [B, documents]: the real tokens of each; ``valid`` and ``document`` as in `CabMask`."""
    tokens = torch.zeros(valid.shape[0], documents, dtype=torch.int64, device=valid.device)
    return tokens.scatter_add_(1, document.to(torch.int64), valid.to(torch.int64))


def _aligned_documents(tokens: Tensor, document: Tensor, align: int) -> tuple[Tensor, Tensor]:
    """(where a token's document starts, shift from rank to place) of a layout, int64 [B, N_k]."""
    room = (tokens + align - 1) // align * align
    starts, packed = (F.pad(x.cumsum(-1), (1, -1)) for x in (room, tokens))
    document = document.to(torch.int64)
    first = starts.gather(1, document)
    return first, first - packed.gather(1, document)


def _extent(lengths: Sequence[Length], align: int) -> int:
    """Where the last of some documents ends, each of which starts at a block border."""
    start = end = 0
    for _, tokens in lengths:
        end = start + tokens if tokens else end
        start += -(-tokens // align) * align
    return end


def _spans_in_place(document: Tensor, valid: Tensor | None) -> Spans:
    """Of documents that stay where they are: moving them needs their lengths on the host."""
    if valid is not None:
        raise NotImplementedError(
            "attention_mask is set under torch.compile for packed documents, or for windows of "
            "a model with sinks or soft caps, where 'cab' cannot look for padding; leave it out, "
            "or do not compile."
        )
    slot = torch.arange(document.shape[1], device=document.device, dtype=torch.int32)
    slot = slot.expand_as(document)
    begins = F.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    first = slot.masked_fill(~begins, 0).cummax(-1).values
    return Spans(first, slot, torch.ones_like(document, dtype=torch.bool))
