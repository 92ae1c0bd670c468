"""`BlockLayout`: an order of tokens with padding at the end, and documents at block borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.packing import (
    DocumentLength,
    document_lengths,
    first_tokens,
    read_document_lengths,
)
from cab_hf.ops.attention.complete import with_sinks
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan, KeyRanges, cached_per_ranges, row_indices
from cab_hf.predictors import LayerContext, Predictor


class LayoutOptions(NamedTuple):
    """Optional properties of a call, for `BlockLayout.build`.

    Attributes:
        lengths: `DocumentLength` of each document of each row, on the host; None if reading the
            lengths would wait for the device.
        block_offset: position of the first query in its query block, in tokens: one number for all
            rows, or one number per row. The layout starts with this number of vacant positions.
        sequence_end: length of the prompt in tokens, int or int32 [B, 1]; None if sequences end
            with this call.
        window: width of a sliding window, in slots; None without a window.
    """

    lengths: Sequence[Sequence[DocumentLength]] | None = None
    block_offset: int | list[int] = 0
    sequence_end: int | Tensor | None = None
    window: int | None = None


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """An order of the tokens of a call in which blocks do not depend on padding or packing.

    Without a layout, left padding would shift all blocks, and a block could contain tokens of two
    documents. A layout moves the padding of each row to its end, and starts each document at a
    block border. A sequence then selects the same blocks alone, padded or packed.

    A layer moves tensors into the layout (`queries`, `keys`), selects blocks (`choose`, or
    `full_plan`), computes attention (`attend`) and moves the output back (`restore`).
    `cab_hf.distributed.sharded.ShardedLayout` has the same methods for a sequence over many ranks.

    Attributes:
        ranges: visible keys of each query, in positions of the layout.
        kv_length: number of written key slots.
        query_order: reordering of the queries; None if the order does not change.
        key_order: reordering of the keys; None if the order does not change.
        document_queries: int [B, N'_q], number of queries in the document of each query position.
            None if no document is shorter than the call, or if lengths are not known.
        document_tokens: int [B, N'_q], number of tokens in the same document. None if
            ``document_queries`` is None.
        lengths: `DocumentLength` of each document of each row, on the host; None if reading the
            lengths would wait for the device.
    """

    ranges: KeyRanges
    kv_length: int
    query_order: TokenPermutation | None = None
    key_order: TokenPermutation | None = None
    document_queries: Tensor | None = None
    document_tokens: Tensor | None = None
    lengths: Sequence[Sequence[DocumentLength]] | None = None

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
        options: LayoutOptions | None = None,
    ) -> BlockLayout:
        """Build the layout of a call.

        Args:
            batch: batch rows.
            q_length: queries per row.
            kv_length: key slots per row.
            q_offset: slot of the first query, int or 0-d tensor.
            padding_mask: bool [B, N_k], False for padding keys; None without padding.
            doc_ids: int [B, N_k], equal for tokens of one packed document; None if not packed.
            align: larger one of the two block sizes, in tokens.
            device: device of the tensors.
            options: further properties of the call; None for the defaults.

        Raises:
            NotImplementedError: for documents with padding under torch.compile.
        """
        options = LayoutOptions() if options is None else options
        if padding_mask is None and doc_ids is None:
            ranges = KeyRanges.causal(batch, q_length, kv_length, device=device, q_slot=q_offset)
            return cls._unmoved(ranges, kv_length, options)
        if doc_ids is not None and torch.compiler.is_compiling():
            ranges = _ranges_without_layout(doc_ids, padding_mask)
            return cls(_in_window(ranges, options.window), kv_length)
        is_real = padding_mask
        if is_real is None:
            is_real = torch.ones(batch, kv_length, dtype=torch.bool, device=device)
        if isinstance(q_offset, Tensor):
            query_slots = torch.arange(q_length, device=device) + q_offset
            # slots after the last query are not written
            is_real = is_real & (torch.arange(kv_length, device=device) <= query_slots[-1])
        else:
            query_slots = slice(q_offset, q_offset + q_length)
        if doc_ids is None:
            positions = _positions_of_rows(is_real, query_slots, options)
        else:
            positions = _positions_of_documents(
                is_real, query_slots, doc_ids, lengths=options.lengths, align=align
            )
            options = options._replace(lengths=positions.lengths)
        return cls._moved(
            is_real,
            query_slots,
            positions,
            has_padding=padding_mask is not None,
            options=options,
        )

    @classmethod
    def _unmoved(cls, ranges: KeyRanges, kv_length: int, options: LayoutOptions) -> BlockLayout:
        """Return the layout of a call without padding and documents, whose keys do not move.

        Args:
            ranges: causal ranges of the call.
            kv_length: key slots per row.
            options: see `build`; ``block_offset`` is one number for all rows.
        """
        ranges = replace(ranges, sequence_end=options.sequence_end)
        ranges = _in_window(ranges, options.window)
        if options.block_offset:
            layout = cls._shifted(ranges, kv_length, options.block_offset)
        else:
            layout = cls(ranges, kv_length)
        if isinstance(options.sequence_end, Tensor):
            # this chunk has no padding, but rows of the complete prompt have different lengths
            tokens = options.sequence_end.expand(-1, layout.ranges.end.shape[1])
            layout = replace(
                layout, document_queries=tokens, document_tokens=tokens, lengths=options.lengths
            )
        return layout

    @classmethod
    def _moved(
        cls,
        is_real: Tensor,
        query_slots: Tensor | slice,
        positions: _Positions,
        *,
        has_padding: bool,
        options: LayoutOptions,
    ) -> BlockLayout:
        """Return the layout that moves tokens to ``positions``.

        Args:
            is_real: bool [B, N_k], True for written keys without padding.
            query_slots: slots of the queries.
            positions: positions of keys and queries.
            has_padding: True if some tokens have no position.
            options: see `build`.
        """
        kv_length, is_real_query = is_real.shape[1], is_real[:, query_slots]
        key_source, has_key = _invert(positions.keys, is_real, positions.num_keys)
        query_source, has_query = _invert(positions.queries, is_real_query, positions.num_queries)

        def by_query(values: Tensor, fill: int) -> Tensor:
            """Move one value per slot to the query positions, int32 [B, N'_q].

            Positions without a query have the value ``fill``.
            """
            moved = values.expand(-1, kv_length)[:, query_slots].gather(1, query_source)
            return moved.masked_fill(~has_query, fill).to(torch.int32)

        ranges = KeyRanges(
            start=by_query(positions.document_start, 0),
            end=by_query(positions.keys, -1),
            key_valid=has_key,
            aligned=True,
            documents=positions.num_documents,
            sequence_end=options.sequence_end,
        )
        window = options.window
        if window is not None:
            # positions of the first key inside the window of each slot
            window_start = F.pad(is_real.cumsum(-1), (window, 0))[:, :kv_length] + positions.shift
            ranges = _windowed(ranges, by_query(window_start, 0))
        return cls(
            ranges=ranges,
            kv_length=kv_length,
            query_order=TokenPermutation.of(
                source=query_source,
                filled=has_query,
                target=positions.queries,
                real=is_real_query if has_padding else None,
            ),
            key_order=TokenPermutation.of(
                source=key_source,
                filled=has_key,
                target=positions.keys,
                real=is_real if has_padding else None,
            ),
            document_queries=by_query(positions.document_queries, 0),
            document_tokens=by_query(positions.document_tokens, 0),
            lengths=options.lengths,
        )

    @classmethod
    def _shifted(cls, ranges: KeyRanges, kv_length: int, num_vacant: int) -> BlockLayout:
        """Return a layout with ``num_vacant`` vacant positions before the first query."""
        batch, tokens = ranges.end.shape
        target = torch.arange(num_vacant, num_vacant + tokens, device=ranges.end.device)
        source = torch.arange(-num_vacant, tokens, device=ranges.end.device)
        filled = (source >= 0).expand(batch, -1)
        source, target = source.clamp(min=0).expand(batch, -1), target.expand(batch, -1)
        ranges = replace(
            ranges,
            start=F.pad(ranges.start, (num_vacant, 0)),
            end=F.pad(ranges.end, (num_vacant, 0), value=-1),
        )
        query_order = TokenPermutation.of(source=source, filled=filled, target=target, real=None)
        return cls(ranges, kv_length, query_order)

    def rows_below_min_length(self, queries: int, tokens: int, query_block: int) -> Tensor | None:
        """Return the query blocks of short documents, int64 [B, R], filled with -1.

        Returns None if no document is short.

        Args:
            queries: documents with fewer queries are short.
            tokens: documents with fewer tokens are short.
            query_block: query block size in tokens, a divisor of the ``align`` of `build`.
        """
        if self.document_queries is None:
            return None
        if self.lengths is None:
            # upper bound, because reading the lengths would wait for the device
            num_blocks = -(-max(queries, tokens) // query_block)
        else:
            short = [
                [x for x in row if x.queries < queries or x.tokens < tokens] for row in self.lengths
            ]
            num_blocks = max(sum(-(-x.queries // query_block) for x in row) for row in short)
        if num_blocks == 0:
            return None
        # positional, because `cached_per_ranges` accepts no keywords
        return _short_documents(
            self.ranges,
            self.document_queries,
            self.document_tokens,
            queries,
            tokens,
            query_block,
            num_blocks,
        )

    def queries(self, x: Tensor) -> Tensor:
        """Return x [B, H, N_q, D] in the order of the layout."""
        return x if self.query_order is None else self.query_order.apply(x)

    def keys(self, x: Tensor) -> Tensor:
        """Return x [B, H_kv, N_k, D] in the order of the layout, without unwritten cache slots."""
        x = x[:, :, : self.kv_length]
        return x if self.key_order is None else self.key_order.apply(x)

    def choose(self, predictor: Predictor, q: Tensor, k: Tensor, call: LayerContext) -> BlockPlan:
        """Return the plan that ``predictor`` selects, without gradient.

        Args:
            predictor: method that selects blocks.
            q: [B, H, N', D], result of `queries`.
            k: [B, H_kv, N'_k, D], result of `keys`.
            call: context of the layer.
        """
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
        """Compute attention under ``plan`` and return the output [B, H, N', D_v].

        Args:
            engine: `Engine` that computes attention.
            q: [B, H, N', D], result of `queries`.
            k: [B, H_kv, N'_k, D], result of `keys`.
            v: [B, H_kv, N'_k, D_v], result of `keys`.
            plan: blocks to attend to.
            scale: factor of the logits.
            sinks: [H], one additional logit per head in the softmax; None without sinks.
            softcap: cap c of the logits, ``c * tanh(logits / c)``; None without a cap.
        """
        if sinks is None:
            return engine.attention(q, k, v, plan=plan, scale=scale, softcap=softcap)
        out, lse = engine.attention(
            q, k, v, plan=plan, scale=scale, return_lse=True, softcap=softcap
        )
        return with_sinks(out, lse, sinks)

    def restore(self, out: Tensor) -> Tensor:
        """Return out [B, H, N', D_v] in the order of the call, with zeros at padding queries."""
        return out if self.query_order is None else self.query_order.undo(out)


@cached_per_ranges
def full_plan(ranges: KeyRanges, size: int) -> BlockPlan:
    """Return the plan of all visible blocks of ``size`` tokens, cached for all layers."""
    return BlockPlan.causal(ranges, 1, size, size)


@cached_per_ranges
def _short_documents(
    ranges: KeyRanges,
    document_queries: Tensor,
    document_tokens: Tensor,
    min_queries: int,
    min_tokens: int,
    query_block: int,
    max_blocks: int,
) -> Tensor:
    """Return the query blocks that contain tokens of short documents, int64 [B, max_blocks].

    Rows with fewer such blocks are filled with -1.

    Args:
        ranges: visible keys of each query.
        document_queries: int [B, N'_q], number of queries in the document of each query.
        document_tokens: int [B, N'_q], number of tokens in the document of each query.
        min_queries: documents with fewer queries are short.
        min_tokens: documents with fewer tokens are short.
        query_block: query block size, in tokens.
        max_blocks: upper bound of the number of query blocks per row.
    """
    is_short = (document_queries < min_queries) | (document_tokens < min_tokens)
    is_short = is_short & (ranges.end >= 0)
    is_short = F.pad(is_short, (0, -is_short.shape[1] % query_block))
    return row_indices(is_short.unflatten(1, (-1, query_block)).any(-1), max_blocks)


class _Positions(NamedTuple):
    """The positions in a layout to which the tokens of a call move.

    Attributes:
        keys: int64 [B, N_k], position of each key.
        queries: int64 [B, N_q], position of each query.
        num_keys: number of positions for keys.
        num_queries: number of positions for queries.
        document_start: int64 [B, N_k], position of the first token in the document of each key.
        shift: int64 [B, N_k], position of each key minus the number of earlier keys of its row
            that are not padding.
        num_documents: documents per row.
        document_queries: int64 [B, 1 or N_k], number of queries in the document of each key.
        document_tokens: int64 [B, 1 or N_k], number of tokens in the document of each key.
        lengths: `DocumentLength` of every document of each row; None for rows without documents.
    """

    keys: Tensor
    queries: Tensor
    num_keys: int
    num_queries: int
    document_start: Tensor
    shift: Tensor
    num_documents: int
    document_queries: Tensor
    document_tokens: Tensor
    lengths: Sequence[Sequence[DocumentLength]] | None = None


def _positions_of_rows(
    is_real: Tensor, query_slots: Tensor | slice, options: LayoutOptions
) -> _Positions:
    """Return the positions of rows with padding, each of which is one document.

    Args:
        is_real: bool [B, N_k], True for written keys without padding.
        query_slots: slots of the queries.
        options: see `BlockLayout.build`.
    """
    is_real_query, keys = is_real[:, query_slots], is_real.cumsum(-1) - 1
    zeros = torch.zeros_like(keys)
    # queries move left, without gaps
    queries, num_queries = is_real_query.cumsum(-1) - 1, is_real_query.shape[1]
    block_offset = options.block_offset
    if block_offset:
        queries = queries + torch.tensor(block_offset, device=is_real.device).unsqueeze(1)
        num_queries += max(block_offset)
    if options.sequence_end is None:
        document_queries = is_real_query.sum(-1, keepdim=True)
        document_tokens = is_real.sum(-1, keepdim=True)
    else:
        document_queries = document_tokens = options.sequence_end
    return _Positions(
        keys=keys,
        queries=queries,
        num_keys=is_real.shape[1],
        num_queries=num_queries,
        document_start=zeros,
        shift=zeros,
        num_documents=1,
        document_queries=document_queries,
        document_tokens=document_tokens,
    )


def _positions_of_documents(
    is_real: Tensor,
    query_slots: Tensor | slice,
    doc_ids: Tensor,
    *,
    lengths: Sequence[Sequence[DocumentLength]] | None,
    align: int,
) -> _Positions:
    """Return the positions of packed documents, each of which starts at a block border.

    Args:
        is_real: bool [B, N_k], True for written keys without padding.
        query_slots: slots of the queries.
        doc_ids: int [B, N_k], document of each key.
        lengths: `DocumentLength` of each document of each row; None to read them from the device.
        align: larger one of the two block sizes, in tokens.
    """
    if lengths is None:
        lengths = read_document_lengths(is_real, doc_ids)
    num_tokens = document_lengths(is_real, doc_ids, len(lengths[0]))
    document_start, shift = _aligned_documents(num_tokens, doc_ids, align)
    keys = is_real.cumsum(-1) - 1 + shift
    # at least one position, also for a call that is all padding
    num_positions = max(1, *(_aligned_length(row, align) for row in lengths))
    document_tokens = num_tokens.gather(1, doc_ids.to(torch.int64))
    return _Positions(
        keys=keys,
        # queries have the positions of their keys
        queries=keys[:, query_slots],
        num_keys=num_positions,
        num_queries=num_positions,
        document_start=document_start,
        shift=shift,
        num_documents=len(lengths[0]),
        document_queries=document_tokens,
        document_tokens=document_tokens,
        lengths=lengths,
    )


def _in_window(ranges: KeyRanges, window: int | None) -> KeyRanges:
    """Return ``ranges`` limited to the last ``window`` keys of each query.

    If ``window`` is None, all keys remain. The keys of a query must be consecutive, without padding
    between them.
    """
    return ranges if window is None else _windowed(ranges, ranges.end - (window - 1))


def _windowed(ranges: KeyRanges, window_start: Tensor) -> KeyRanges:
    """Return ``ranges`` without the keys before the window of each query.

    Args:
        ranges: visible keys of each query.
        window_start: int32 [B, N_q], first key inside the window of each query.
    """
    start = torch.maximum(ranges.start, window_start)
    return replace(ranges, start=start, aligned=False)


def _invert(target: Tensor, is_real: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return the token at each position of a layout.

    Args:
        target: int64 [B, N], position of each token.
        is_real: bool [B, N], True for tokens that have a position.
        num_positions: number N' of positions.

    Returns:
        source int64 [B, N'], the index of the token, 0 without a token; and filled bool [B, N'],
        True for positions with a token.
    """
    # tokens without a position move to an additional column
    column = target.masked_fill(~is_real, num_positions)
    slots = torch.arange(target.shape[1], device=target.device).expand_as(target)
    source = slots.new_zeros(target.shape[0], num_positions + 1).scatter(1, column, slots)
    filled = torch.zeros_like(source, dtype=torch.bool).scatter(1, column, True)
    return source[:, :num_positions], filled[:, :num_positions]


def _aligned_documents(num_tokens: Tensor, doc_ids: Tensor, align: int) -> tuple[Tensor, Tensor]:
    """Return where documents start if each starts at a multiple of ``align``.

    Args:
        num_tokens: int64 [B, documents], number of tokens of each document.
        doc_ids: int [B, N_k], document of each key.
        align: larger one of the two block sizes, in tokens.

    Returns:
        The start of the document of each key, and the difference between this start and the start
        without alignment; both int64 [B, N_k].
    """
    padded = (num_tokens + align - 1) // align * align
    aligned_starts, packed_starts = (F.pad(x.cumsum(-1), (1, -1)) for x in (padded, num_tokens))
    doc_ids = doc_ids.to(torch.int64)
    document_start = aligned_starts.gather(1, doc_ids)
    return document_start, document_start - packed_starts.gather(1, doc_ids)


def _aligned_length(lengths: Sequence[DocumentLength], align: int) -> int:
    """Return the number of positions of a row whose documents start at multiples of ``align``."""
    start = end = 0
    for _, tokens in lengths:
        end = start + tokens if tokens else end
        start += -(-tokens // align) * align
    return end


def _ranges_without_layout(doc_ids: Tensor, padding_mask: Tensor | None) -> KeyRanges:
    """Return the key ranges of packed documents whose tokens do not move to block borders.

    torch.compile needs such ranges, because moving tokens needs document lengths on the host.

    Args:
        doc_ids: int [B, N], document of each token.
        padding_mask: must be None.

    Raises:
        NotImplementedError: if there is padding.
    """
    if padding_mask is not None:
        raise NotImplementedError(
            "attention_mask is set under torch.compile for packed documents, or for windows of "
            "a model with sinks or soft caps, where 'cab' cannot read padding. Leave it out, or do "
            "not compile."
        )
    slot = torch.arange(doc_ids.shape[1], device=doc_ids.device, dtype=torch.int32)
    slot = slot.expand_as(doc_ids)
    first_slot = slot.masked_fill(~first_tokens(doc_ids), 0).cummax(-1).values
    return KeyRanges(first_slot, slot, torch.ones_like(doc_ids, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class TokenPermutation:
    """A mapping from N tokens per row to N' positions, and back.

    Every position has at most one token. The gradient is therefore the inverse mapping, a gather
    without sums. A position without a token has an arbitrary value and no gradient.

    Attributes:
        source: int64 [B * N'], index of the token at each position, counted over the batch. Vacant
            positions have the first token of their row.
        vacant: bool [B, N'], True for positions without a token.
        target: int64 [B * N], index of the position of each token, counted over the batch. Padding
            has the first position of its row.
        padding: bool [B, N], True for tokens without a position; None if all tokens have one.
    """

    source: Tensor
    vacant: Tensor
    target: Tensor
    padding: Tensor | None

    @classmethod
    def of(
        cls, source: Tensor, filled: Tensor, target: Tensor, real: Tensor | None
    ) -> TokenPermutation:
        """Build a reordering from indices within a row.

        Args:
            source: int64 [B, N'], token at each position.
            filled: bool [B, N'], True for positions with a token.
            target: int64 [B, N], position of each token.
            real: bool [B, N], True for tokens with a position; None for all tokens.
        """
        padding = None if real is None else ~real
        target = target if padding is None else target.masked_fill(padding, 0)
        if len(source) > 1:
            row = torch.arange(len(source), device=source.device).unsqueeze(1)
            num_tokens, num_positions = target.shape[1], source.shape[1]
            source, target = source + row * num_tokens, target + row * num_positions
        return cls(source.flatten(), ~filled, target.flatten(), padding)

    def apply(self, x: Tensor) -> Tensor:
        """Return x [B, H, N, D] in the new order, [B, H, N', D] with strides of [B, N', H, D]."""
        return _Gather.apply(x, self.source, None, self.target, self.padding)

    def undo(self, x: Tensor) -> Tensor:
        """Return x [B, H, N', D] in the old order, [B, H, N, D], with zeros at padding.

        The strides are those of [B, N, H, D].
        """
        return _Gather.apply(x, self.target, self.padding, self.source, self.vacant)


class _Gather(torch.autograd.Function):
    """`_gather_tokens` with a gradient, which gathers by the inverse indices.

    The gradient is ``_gather_tokens(grad, inverse, inverse_zero)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        zero: Tensor | None,
        inverse: Tensor,
        inverse_zero: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(inverse, inverse_zero)
        return _gather_tokens(x, index, zero)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse, inverse_zero = ctx.saved_tensors
        return _gather_tokens(grad, inverse, inverse_zero), None, None, None, None


def _gather_tokens(x: Tensor, index: Tensor, zero: Tensor | None) -> Tensor:
    """Gather tokens of x [B, H, N, D] and return [B, H, N', D].

    Models pass tensors with strides of [B, N, H, D]. Other tensors are copied first.

    Args:
        x: [B, H, N, D].
        index: int64 [B * N'], tokens to gather, counted over the batch.
        zero: bool [B, N'], True for results that are zero; None for no zeros.
    """
    batch, heads, _, dim = x.shape
    tokens = x.transpose(1, 2).reshape(-1, heads * dim).index_select(0, index)
    tokens = tokens.view(batch, -1, heads, dim)
    if zero is not None:
        tokens = tokens.masked_fill_(zero[:, :, None, None], 0.0)
    return tokens.transpose(1, 2)
