"""`BlockLayout`: the token order on the block grid, without padding, with aligned documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.packing import Length, begins, document_lengths, whole_documents
from cab_hf.ops.attention.complete import with_sinks
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan, KeyRanges, cached_per_ranges, row_indices
from cab_hf.predictors import LayerContext, Predictor


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """An order of the tokens of a call in which blocks do not depend on padding or packing.

    With blocks of slots, left padding would shift all blocks, and a block could contain tokens of
    two documents. A layout moves the padding of each row to its end, and starts each document at a
    block border. A sequence then selects the same blocks alone, padded or packed.

    A layer moves tensors into the layout (`queries`, `keys`), selects blocks (`choose`, or
    `full_plan`), computes attention (`attend`) and moves the output back (`restore`).
    `cab_hf.distributed.sharded.ShardedLayout` has the same methods for a sequence over many ranks.

    Attributes:
        ranges: visible keys of each query, in positions of the layout.
        kv_length: number of written key slots.
        query_order: reordering of the queries; None if the order does not change.
        key_order: reordering of the keys; None if the order does not change.
        sizes: queries and tokens of the document of each position, two int64 [B, N'_q]; None if all
            documents are as long as the call, or if lengths are not known.
        lengths: `Length` of every document of each batch row, on the host; None if reading the
            lengths would wait for the device.
    """

    ranges: KeyRanges
    kv_length: int
    query_order: TokenPermutation | None = None
    key_order: TokenPermutation | None = None
    sizes: tuple[Tensor, Tensor] | None = None
    lengths: Sequence[Sequence[Length]] | None = None

    @classmethod
    def build(
        cls,
        batch: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor,
        padding_mask: Tensor | None,
        doc_ids: Tensor | None,
        align: int,
        device: torch.device,
        lengths: Sequence[Sequence[Length]] | None = None,
        ahead: int | list[int] = 0,
        sequence_end: int | Tensor | None = None,
        window: int | None = None,
    ) -> BlockLayout:
        """Build the layout of a call; further arguments as in `MaskInfo`.

        Args:
            align: larger one of the two block sizes, in tokens.
            device: device of the tensors.
            lengths: see `BlockLayout`.
            ahead: number of vacant places before the first query, for all rows or for each row.
            sequence_end: see `KeyRanges`.
            window: width of a sliding window, in slots; None without a window.

        Raises:
            NotImplementedError: for documents with padding under torch.compile.
        """
        if padding_mask is None and doc_ids is None:
            ranges = KeyRanges.causal(batch, q_length, kv_length, device, q_offset)
            ranges = _in_window(replace(ranges, sequence_end=sequence_end), window)
            layout = cls._led(ranges, kv_length, ahead) if ahead else cls(ranges, kv_length)
            if isinstance(sequence_end, Tensor):
                # padding comes in a later chunk, and rows end at different tokens
                rows = sequence_end.expand(-1, layout.ranges.end.shape[1])
                layout = replace(layout, sizes=(rows, rows), lengths=lengths)
            return layout
        if doc_ids is not None and torch.compiler.is_compiling():
            return cls(_in_window(_ranges_in_place(doc_ids, padding_mask), window), kv_length)
        has_padding, valid = padding_mask is not None, padding_mask
        if not has_padding:
            valid = torch.ones(batch, kv_length, dtype=torch.bool, device=device)
        if isinstance(q_offset, Tensor):
            own = torch.arange(q_length, device=device) + q_offset
            # slots after the last query are not written
            valid = valid & (torch.arange(kv_length, device=device) <= own[-1])
        else:
            own = slice(q_offset, q_offset + q_length)
        if doc_ids is None:
            places = _places_of_rows(valid, own, ahead=ahead, sequence_end=sequence_end)
        else:
            places = _places_of_documents(valid, own, doc_ids, lengths=lengths, align=align)
            lengths = places.lengths if lengths is None else lengths
        return cls._moved(
            valid,
            own,
            places,
            has_padding=has_padding,
            lengths=lengths,
            sequence_end=sequence_end,
            window=window,
        )

    @classmethod
    def _moved(
        cls,
        valid: Tensor,
        own: Tensor | slice,
        places: _Places,
        *,
        has_padding: bool,
        lengths: Sequence[Sequence[Length]] | None,
        sequence_end: int | Tensor | None,
        window: int | None,
    ) -> BlockLayout:
        """Return the layout that moves tokens to ``places``.

        Args:
            valid: bool [B, N_k], True for written keys without padding.
            own: slots of the queries.
            places: places of keys and queries.
            has_padding: True if some tokens have no place.
            lengths, sequence_end, window: see `build`.
        """
        kv_length, real = valid.shape[1], valid[:, own]
        key_source, key_valid = _invert(places.keys, valid, places.num_keys)
        query_source, query_valid = _invert(places.queries, real, places.num_queries)

        def by_query(values: Tensor, fill: int) -> Tensor:
            taken = values.gather(1, query_source).masked_fill(~query_valid, fill)
            return taken.to(torch.int32)

        ranges = KeyRanges(
            by_query(places.first[:, own], 0),
            by_query(places.keys[:, own], -1),
            key_valid,
            aligned=True,
            documents=places.num_documents,
            sequence_end=sequence_end,
        )
        if window is not None:
            # index among valid tokens of the first key inside the window
            far = F.pad(valid.cumsum(-1), (window, 0))[:, :kv_length] + places.shift
            ranges = _windowed(ranges, by_query(far[:, own], 0))
        # a list, because torch.compile does not trace a generator here
        sizes = tuple([by_query(x.expand(-1, kv_length)[:, own], 0) for x in places.sizes])
        query_order = TokenPermutation.of(
            query_source, query_valid, places.queries, real if has_padding else None
        )
        key_order = TokenPermutation.of(
            key_source, key_valid, places.keys, valid if has_padding else None
        )
        return cls(ranges, kv_length, query_order, key_order, sizes, lengths)

    @classmethod
    def _led(cls, ranges: KeyRanges, kv_length: int, ahead: int) -> BlockLayout:
        """Return a layout with ``ahead`` vacant places before the first query."""
        batch, tokens = ranges.end.shape
        place = torch.arange(ahead, ahead + tokens, device=ranges.end.device)
        source = torch.arange(-ahead, tokens, device=ranges.end.device)
        filled = (source >= 0).expand(batch, -1)
        source, place = source.clamp(min=0).expand(batch, -1), place.expand(batch, -1)
        ranges = replace(
            ranges,
            start=F.pad(ranges.start, (ahead, 0)),
            end=F.pad(ranges.end, (ahead, 0), value=-1),
        )
        return cls(ranges, kv_length, TokenPermutation.of(source, filled, place, None))

    def rows_below_min_length(self, queries: int, tokens: int, query_block: int) -> Tensor | None:
        """Return the query blocks of short documents, int64 [B, R], filled with -1.

        Returns None if no document is short.

        Args:
            queries: least number of queries of a document that is not short.
            tokens: least number of tokens of a document that is not short.
            query_block: block size in tokens, one that the layout was built for.
        """
        if self.sizes is None:
            return None
        if self.lengths is None:
            # upper bound, because reading the lengths would wait for the device
            num_rows = -(-max(queries, tokens) // query_block)
        else:
            short = [
                [x for x in row if x.queries < queries or x.tokens < tokens] for row in self.lengths
            ]
            num_rows = max(sum(-(-x.queries // query_block) for x in row) for row in short)
        if num_rows == 0:
            return None
        return _short_rows(self.ranges, *self.sizes, queries, tokens, query_block, num_rows)

    def queries(self, x: Tensor) -> Tensor:
        """Return x [B, H, N_q, D] in the order of the layout."""
        return x if self.query_order is None else self.query_order.apply(x)

    def keys(self, x: Tensor) -> Tensor:
        """Return x [B, H_kv, N_k, D] in the order of the layout, without unwritten cache slots."""
        x = x[:, :, : self.kv_length]
        return x if self.key_order is None else self.key_order.apply(x)

    def choose(self, predictor: Predictor, q: Tensor, k: Tensor, call: LayerContext) -> BlockPlan:
        """Return the plan that ``predictor`` selects for q and k, without gradient."""
        with torch.no_grad():
            return predictor.choose(q, predictor.summary_of(k, self.ranges.key_valid, call), call)

    def full_plan(self) -> BlockPlan:
        """Return the plan of all visible blocks, with blocks of `DENSE_BLOCK_SIZE` tokens."""
        return full_plan(self.ranges, DENSE_BLOCK_SIZE)

    def attend(
        self,
        engine: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: BlockPlan,
        scale: float,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return attention under ``plan``, [B, H, N', D_v].

        Args:
            engine: `Engine` that computes attention.
            q, k, v: tensors in the order of the layout.
            plan: blocks to attend to.
            scale: factor of the logits.
            sinks: see `complete.with_sinks`; None without sinks.
            softcap: cap c of the logits, ``c * tanh(logits / c)``; None without a cap.
        """
        if sinks is None:
            return engine.attention(q, k, v, plan, scale, softcap=softcap)
        out, lse = engine.attention(q, k, v, plan, scale, return_lse=True, softcap=softcap)
        return with_sinks(out, lse, sinks)

    def restore(self, out: Tensor) -> Tensor:
        """Return out [B, H, N', D] in the order of the call, with zeros at padding queries."""
        return out if self.query_order is None else self.query_order.undo(out)


@cached_per_ranges
def full_plan(ranges: KeyRanges, size: int) -> BlockPlan:
    """Return the plan of all visible blocks of ``size`` tokens, cached for all layers."""
    return BlockPlan.causal(ranges, 1, size, size)


@cached_per_ranges
def _short_rows(
    ranges: KeyRanges,
    of_queries: Tensor,
    of_tokens: Tensor,
    queries: int,
    tokens: int,
    query_block: int,
    room: int,
) -> Tensor:
    """Return the query blocks of `BlockLayout.rows_below_min_length`, int64 [B, room]."""
    short = ((of_queries < queries) | (of_tokens < tokens)) & (ranges.end >= 0)
    short = F.pad(short, (0, -short.shape[1] % query_block))
    return row_indices(short.unflatten(1, (-1, query_block)).any(-1), room)


class _Places(NamedTuple):
    """The places of the tokens of a call in a layout.

    Attributes:
        keys: int64 [B, N_k], place of each key.
        queries: int64 [B, N_q], place of each query.
        num_keys, num_queries: numbers of places.
        first: int64 [B, N_k], place of the first token in the document of each key.
        shift: int64 [B, N_k], place of each key minus its index among the real keys.
        num_documents: documents per row.
        sizes: queries and tokens of the document of each key, two int64 [B, 1 or N_k].
        lengths: `Length` of every document of each row; None if not needed.
    """

    keys: Tensor
    queries: Tensor
    num_keys: int
    num_queries: int
    first: Tensor
    shift: Tensor
    num_documents: int
    sizes: tuple[Tensor, Tensor]
    lengths: Sequence[Sequence[Length]] | None = None


def _places_of_rows(
    valid: Tensor,
    own: Tensor | slice,
    *,
    ahead: int | list[int],
    sequence_end: int | Tensor | None,
) -> _Places:
    """Return places in which every row is one document without gaps; see `BlockLayout._moved`."""
    real, keys = valid[:, own], valid.cumsum(-1) - 1
    first = torch.zeros_like(keys)
    # queries move left, without gaps
    queries, num_queries = real.cumsum(-1) - 1, real.shape[1]
    if ahead:
        queries = queries + torch.tensor(ahead, device=valid.device).unsqueeze(1)
        num_queries += max(ahead)
    sizes = real.sum(-1, keepdim=True), valid.sum(-1, keepdim=True)
    return _Places(
        keys=keys,
        queries=queries,
        num_keys=valid.shape[1],
        num_queries=num_queries,
        first=first,
        shift=first,
        num_documents=1,
        sizes=sizes if sequence_end is None else (sequence_end,) * 2,
    )


def _places_of_documents(
    valid: Tensor,
    own: Tensor | slice,
    doc_ids: Tensor,
    *,
    lengths: Sequence[Sequence[Length]] | None,
    align: int,
) -> _Places:
    """Return places in which documents start at block borders; see `BlockLayout._moved`."""
    if lengths is None:
        lengths = whole_documents(valid, doc_ids)
    tokens = document_lengths(valid, doc_ids, len(lengths[0]))
    first, shift = _aligned_documents(tokens, doc_ids, align)
    keys = valid.cumsum(-1) - 1 + shift
    # at least one place, also for a call that is all padding
    num_places = max(1, *(_extent(row, align) for row in lengths))
    return _Places(
        keys=keys,
        # queries have the places of their keys
        queries=keys[:, own],
        num_keys=num_places,
        num_queries=num_places,
        first=first,
        shift=shift,
        num_documents=len(lengths[0]),
        sizes=(tokens.gather(1, doc_ids.to(torch.int64)),) * 2,
        lengths=lengths,
    )


def _in_window(ranges: KeyRanges, window: int | None) -> KeyRanges:
    """Return ``ranges`` of consecutive keys, restricted to a sliding window if there is one."""
    return ranges if window is None else _windowed(ranges, ranges.end - (window - 1))


def _windowed(ranges: KeyRanges, first: Tensor) -> KeyRanges:
    """Return ``ranges`` in which no query attends to a key before ``first`` [B, N_q]."""
    return replace(ranges, start=torch.maximum(ranges.start, first), aligned=False)


def _invert(place: Tensor, real: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return (source int64, filled bool), both [B, length]; ``real`` tokens move to ``place``."""
    # other tokens move to an additional column
    target = place.masked_fill(~real, length)
    slots = torch.arange(place.shape[1], device=place.device).expand_as(place)
    source = slots.new_zeros(place.shape[0], length + 1).scatter(1, target, slots)
    filled = torch.zeros_like(source, dtype=torch.bool).scatter(1, target, True)
    return source[:, :length], filled[:, :length]


def _aligned_documents(tokens: Tensor, doc_ids: Tensor, align: int) -> tuple[Tensor, Tensor]:
    """Return (start of each token's document, shift from index to place), int64 [B, N_k]."""
    padded = (tokens + align - 1) // align * align
    starts, packed = (F.pad(x.cumsum(-1), (1, -1)) for x in (padded, tokens))
    doc_ids = doc_ids.to(torch.int64)
    first = starts.gather(1, doc_ids)
    return first, first - packed.gather(1, doc_ids)


def _extent(lengths: Sequence[Length], align: int) -> int:
    """Return the end of the last document, if each document starts at a block border."""
    start = end = 0
    for _, tokens in lengths:
        end = start + tokens if tokens else end
        start += -(-tokens // align) * align
    return end


def _ranges_in_place(doc_ids: Tensor, padding_mask: Tensor | None) -> KeyRanges:
    """Return ranges of documents that are not moved, because moving needs lengths on the host."""
    if padding_mask is not None:
        raise NotImplementedError(
            "attention_mask is set under torch.compile for packed documents, or for windows of "
            "a model with sinks or soft caps, where 'cab' cannot read padding. Leave it out, or do "
            "not compile."
        )
    slot = torch.arange(doc_ids.shape[1], device=doc_ids.device, dtype=torch.int32)
    slot = slot.expand_as(doc_ids)
    first = slot.masked_fill(~begins(doc_ids), 0).cummax(-1).values
    return KeyRanges(first, slot, torch.ones_like(doc_ids, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class TokenPermutation:
    """A mapping from N tokens per row to N' places, and back.

    Every place has at most one token. The gradient is therefore the inverse mapping, a gather
    without sums. A place without a token has an arbitrary value and no gradient.

    Attributes:
        source: int64 [B * N'], index of the token at each place, counted over the batch. Vacant
            places have the first token of their row.
        vacant: bool [B, N'], True for places without a token.
        place: int64 [B * N], index of the place of each token, counted over the batch. Padding has
            the first place of its row.
        padding: bool [B, N], True for tokens without a place; None if all tokens have a place.
    """

    source: Tensor
    vacant: Tensor
    place: Tensor
    padding: Tensor | None

    @classmethod
    def of(
        cls, source: Tensor, filled: Tensor, place: Tensor, real: Tensor | None
    ) -> TokenPermutation:
        """Build a reordering from indices within a row.

        Args:
            source: int64 [B, N'], token of each place.
            filled: bool [B, N'], True for places with a token.
            place: int64 [B, N], place of each token.
            real: bool [B, N], True for tokens with a place; None for all tokens.
        """
        padding = None if real is None else ~real
        place = place if padding is None else place.masked_fill(padding, 0)
        indices = source, place
        if len(source) > 1:
            row = torch.arange(len(source), device=source.device).unsqueeze(1)
            indices = source + row * place.shape[1], place + row * source.shape[1]
        source, place = (x.flatten() for x in indices)
        return cls(source, ~filled, place, padding)

    def apply(self, x: Tensor) -> Tensor:
        """Return x [B, H, N, D] in the new order, [B, H, N', D] with strides of [B, N', H, D]."""
        return _Moved.apply(x, self.source, None, self.place, self.padding)

    def undo(self, x: Tensor) -> Tensor:
        """Return x [B, H, N', D] in the old order, [B, H, N, D], with zeros at padding.

        The strides are those of [B, N, H, D].
        """
        return _Moved.apply(x, self.place, self.padding, self.source, self.vacant)


class _Moved(torch.autograd.Function):
    """`_rows` with a gradient: the rows of the gradient by ``back`` and ``back_zero``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        zero: Tensor | None,
        back: Tensor,
        back_zero: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(back, back_zero)
        return _rows(x, index, zero)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _rows(grad, *ctx.saved_tensors), None, None, None, None


def _rows(x: Tensor, index: Tensor, zero: Tensor | None) -> Tensor:
    """Gather tokens of x [B, H, N, D] and return [B, H, N', D].

    Models pass tensors with strides of [B, N, H, D]. Other tensors are copied first.

    Args:
        x: [B, H, N, D].
        index: int64 [B * N'], tokens to gather, counted over the batch.
        zero: bool [B, N'], True for results that are zero; None for none.
    """
    batch, heads, _, dim = x.shape
    rows = x.transpose(1, 2).reshape(-1, heads * dim).index_select(0, index)
    rows = rows.view(batch, -1, heads, dim)
    if zero is not None:
        rows = rows.masked_fill_(zero[:, :, None, None], 0.0)
    return rows.transpose(1, 2)
