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
    count_document_tokens,
    is_first_token,
    read_document_lengths,
)
from cab_hf.ops.attention.complete import rescale_for_sinks
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan, KeyRanges, cached_per_ranges, row_indices
from cab_hf.predictors import LayerContext, Predictor


class LayoutOptions(NamedTuple):
    """Optional properties of a call, for `BlockLayout.build`.

    Attributes:
        document_lengths: `DocumentLength` of each document of each row, on the host; None if
            reading the lengths would wait for the device.
        block_offset: position of the first query in its query block, in tokens: one number for all
            rows, or one number per row. The layout starts with this number of vacant positions.
        sequence_end: length of the prompt in tokens, int or int32 [B, 1]; None if sequences end
            with this call.
        window: width of a sliding window, in slots; None without a window.
    """

    document_lengths: Sequence[Sequence[DocumentLength]] | None = None
    block_offset: int | list[int] = 0
    sequence_end: int | Tensor | None = None
    window: int | None = None


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """An order of the tokens of a call in which blocks do not depend on padding or packing.

    Without a layout, left padding would shift all blocks, and a block could contain tokens of two
    documents. A layout moves the padding of each row to its end, and starts each document at a
    block border. A sequence then selects the same blocks alone, padded or packed.

    A layer moves tensors into the layout (`queries`, `keys`), selects blocks
    (`select_plan`, or `make_plan_of_visible_blocks`), computes attention (`attend`) and moves the
    output back (`restore`).
    `cab_hf.distributed.sharded.ShardedLayout` has the same methods for a sequence over many ranks.

    Attributes:
        ranges: visible keys of each query, in positions of the layout.
        kv_length: number of written key slots.
        query_order: reordering of the queries; None if the order does not change.
        key_order: reordering of the keys; None if the order does not change.
        num_document_queries: int [B, N'_q], number of queries in the document of each query
            position. None if no document is shorter than the call, or if lengths are not known.
        num_document_tokens: int [B, N'_q], number of tokens in the same document. None if
            ``num_document_queries`` is None.
        document_lengths: `DocumentLength` of each document of each row, on the host; None if
            reading the lengths would wait for the device.
    """

    ranges: KeyRanges
    kv_length: int
    query_order: TokenPermutation | None = None
    key_order: TokenPermutation | None = None
    num_document_queries: Tensor | None = None
    num_document_tokens: Tensor | None = None
    document_lengths: Sequence[Sequence[DocumentLength]] | None = None

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
            key_ranges = KeyRanges.causal(
                batch, q_length, kv_length, device=device, q_slot=q_offset
            )
            return cls._build_without_moving_tokens(key_ranges, kv_length, options)
        if doc_ids is not None and torch.compiler.is_compiling():
            key_ranges = _make_ranges_without_layout(doc_ids, padding_mask)
            return cls(_limit_ranges_to_window(key_ranges, options.window), kv_length)
        is_valid_key = padding_mask
        if is_valid_key is None:
            is_valid_key = torch.ones(batch, kv_length, dtype=torch.bool, device=device)
        if isinstance(q_offset, Tensor):
            query_slots = torch.arange(q_length, device=device) + q_offset
            # slots after the last query are not written
            is_valid_key = is_valid_key & (
                torch.arange(kv_length, device=device) <= query_slots[-1]
            )
        else:
            query_slots = slice(q_offset, q_offset + q_length)
        if doc_ids is None:
            positions = _compute_positions_of_rows(is_valid_key, query_slots, options)
        else:
            positions = _compute_positions_of_documents(
                is_valid_key,
                query_slots,
                doc_ids,
                document_lengths=options.document_lengths,
                align=align,
            )
            options = options._replace(document_lengths=positions.document_lengths)
        return cls._build_by_moving_tokens(
            is_valid_key,
            query_slots,
            positions,
            has_padding=padding_mask is not None,
            options=options,
        )

    @classmethod
    def _build_without_moving_tokens(
        cls, key_ranges: KeyRanges, kv_length: int, options: LayoutOptions
    ) -> BlockLayout:
        """Return the layout of a call without padding and documents, with keys in their slots.

        Args:
            key_ranges: causal ranges of the call.
            kv_length: key slots per row.
            options: see `build`; ``block_offset`` is one number for all rows.
        """
        key_ranges = replace(key_ranges, sequence_end=options.sequence_end)
        key_ranges = _limit_ranges_to_window(key_ranges, options.window)
        if options.block_offset:
            layout = cls._build_shifted(key_ranges, kv_length, options.block_offset)
        else:
            layout = cls(key_ranges, kv_length)
        if isinstance(options.sequence_end, Tensor):
            # this chunk has no padding, but rows of the complete prompt have different lengths
            num_tokens = options.sequence_end.expand(-1, layout.ranges.end.shape[1])
            layout = replace(
                layout,
                num_document_queries=num_tokens,
                num_document_tokens=num_tokens,
                document_lengths=options.document_lengths,
            )
        return layout

    @classmethod
    def _build_by_moving_tokens(
        cls,
        is_valid_key: Tensor,
        query_slots: Tensor | slice,
        positions: _Positions,
        *,
        has_padding: bool,
        options: LayoutOptions,
    ) -> BlockLayout:
        """Return the layout that moves tokens from their slots to ``positions``.

        Args:
            is_valid_key: bool [B, N_k], True for written keys without padding.
            query_slots: slots of the queries.
            positions: positions of keys and queries.
            has_padding: True if some tokens have no position.
            options: see `build`.
        """
        kv_length, is_valid_query = is_valid_key.shape[1], is_valid_key[:, query_slots]
        key_indices, has_key = _invert_positions(
            positions.key_positions, is_valid_key, positions.num_key_positions
        )
        query_indices, has_query = _invert_positions(
            positions.query_positions, is_valid_query, positions.num_query_positions
        )

        def move_to_queries(slot_values: Tensor, fill_value: int) -> Tensor:
            """Move one value per slot to the query positions, int32 [B, N'_q].

            Positions without a query have the value ``fill_value``.
            """
            moved_values = slot_values.expand(-1, kv_length)[:, query_slots].gather(
                1, query_indices
            )
            return moved_values.masked_fill(~has_query, fill_value).to(torch.int32)

        key_ranges = KeyRanges(
            start=move_to_queries(positions.document_start, 0),
            end=move_to_queries(positions.key_positions, -1),
            key_valid=has_key,
            aligned=True,
            documents=positions.num_documents,
            sequence_end=options.sequence_end,
        )
        window = options.window
        if window is not None:
            # positions of the first key inside the window of each slot
            window_start = (
                F.pad(is_valid_key.cumsum(-1), (window, 0))[:, :kv_length]
                + positions.document_shift
            )
            key_ranges = _drop_keys_before_window(key_ranges, move_to_queries(window_start, 0))
        return cls(
            ranges=key_ranges,
            kv_length=kv_length,
            query_order=TokenPermutation.from_row_indices(
                token_indices=query_indices,
                has_token=has_query,
                positions=positions.query_positions,
                has_position=is_valid_query if has_padding else None,
            ),
            key_order=TokenPermutation.from_row_indices(
                token_indices=key_indices,
                has_token=has_key,
                positions=positions.key_positions,
                has_position=is_valid_key if has_padding else None,
            ),
            num_document_queries=move_to_queries(positions.num_document_queries, 0),
            num_document_tokens=move_to_queries(positions.num_document_tokens, 0),
            document_lengths=options.document_lengths,
        )

    @classmethod
    def _build_shifted(
        cls, key_ranges: KeyRanges, kv_length: int, num_vacant_positions: int
    ) -> BlockLayout:
        """Return a layout with ``num_vacant_positions`` vacant positions before the first query."""
        batch, num_tokens = key_ranges.end.shape
        query_positions = torch.arange(
            num_vacant_positions, num_vacant_positions + num_tokens, device=key_ranges.end.device
        )
        query_indices = torch.arange(
            -num_vacant_positions, num_tokens, device=key_ranges.end.device
        )
        has_query = (query_indices >= 0).expand(batch, -1)
        query_indices, query_positions = (
            query_indices.clamp(min=0).expand(batch, -1),
            query_positions.expand(batch, -1),
        )
        key_ranges = replace(
            key_ranges,
            start=F.pad(key_ranges.start, (num_vacant_positions, 0)),
            end=F.pad(key_ranges.end, (num_vacant_positions, 0), value=-1),
        )
        query_order = TokenPermutation.from_row_indices(
            token_indices=query_indices,
            has_token=has_query,
            positions=query_positions,
            has_position=None,
        )
        return cls(key_ranges, kv_length, query_order)

    def query_blocks_below_min_length(
        self, min_queries: int, min_tokens: int, query_block: int
    ) -> Tensor | None:
        """Return the query blocks of short documents, int64 [B, R], filled with -1.

        Returns None if no document is short.

        Args:
            min_queries: documents with fewer queries are short.
            min_tokens: documents with fewer tokens are short.
            query_block: query block size in tokens, a divisor of the ``align`` of `build`.
        """
        if self.num_document_queries is None:
            return None
        if self.document_lengths is None:
            # upper bound, because reading the lengths would wait for the device
            num_blocks = -(-max(min_queries, min_tokens) // query_block)
        else:
            short_documents = [
                [x for x in row if x.num_queries < min_queries or x.num_tokens < min_tokens]
                for row in self.document_lengths
            ]
            num_blocks = max(
                sum(-(-x.num_queries // query_block) for x in row) for row in short_documents
            )
        if num_blocks == 0:
            return None
        # positional, because `cached_per_ranges` accepts no keywords
        return _query_blocks_of_short_documents(
            self.ranges,
            self.num_document_queries,
            self.num_document_tokens,
            min_queries,
            min_tokens,
            query_block,
            num_blocks,
        )

    def queries(self, q_in_call_order: Tensor) -> Tensor:
        """Return queries [B, H, N_q, D] in the order of the layout."""
        return (
            q_in_call_order
            if self.query_order is None
            else self.query_order.permute_tokens(q_in_call_order)
        )

    def keys(self, kv_in_call_order: Tensor) -> Tensor:
        """Return K or V [B, H_kv, N_k, D] in the order of the layout, without unwritten slots."""
        kv_in_call_order = kv_in_call_order[:, :, : self.kv_length]
        return (
            kv_in_call_order
            if self.key_order is None
            else self.key_order.permute_tokens(kv_in_call_order)
        )

    def select_plan(
        self, predictor: Predictor, q: Tensor, k: Tensor, layer_context: LayerContext
    ) -> BlockPlan:
        """Return the plan that ``predictor`` selects, without gradient.

        Args:
            predictor: method that selects blocks.
            q: [B, H, N', D], result of `queries`.
            k: [B, H_kv, N'_k, D], result of `keys`.
            layer_context: context of the layer.
        """
        with torch.no_grad():
            return predictor.choose(
                q, predictor.summary_of(k, self.ranges.key_valid, layer_context), layer_context
            )

    def make_plan_of_visible_blocks(self) -> BlockPlan:
        """Return the plan of all visible blocks, with blocks of `DENSE_BLOCK_SIZE` tokens."""
        return make_plan_of_visible_blocks(self.ranges, DENSE_BLOCK_SIZE)

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
        return rescale_for_sinks(out, lse, sinks)

    def restore(self, out_in_layout_order: Tensor) -> Tensor:
        """Return the output [B, H, N', D_v] in the order of the call, with 0 at padding queries."""
        return (
            out_in_layout_order
            if self.query_order is None
            else self.query_order.unpermute_tokens(out_in_layout_order)
        )


@cached_per_ranges
def make_plan_of_visible_blocks(key_ranges: KeyRanges, block_size: int) -> BlockPlan:
    """Return the plan of all visible blocks of ``block_size`` tokens, cached for all layers."""
    return BlockPlan.causal(key_ranges, 1, block_size, block_size)


@cached_per_ranges
def _query_blocks_of_short_documents(
    key_ranges: KeyRanges,
    num_document_queries: Tensor,
    num_document_tokens: Tensor,
    min_queries: int,
    min_tokens: int,
    query_block: int,
    max_blocks: int,
) -> Tensor:
    """Return the query blocks that contain tokens of short documents, int64 [B, max_blocks].

    Rows with fewer such blocks are filled with -1.

    Args:
        key_ranges: visible keys of each query.
        num_document_queries: int [B, N'_q], number of queries in the document of each query.
        num_document_tokens: int [B, N'_q], number of tokens in the document of each query.
        min_queries: documents with fewer queries are short.
        min_tokens: documents with fewer tokens are short.
        query_block: query block size, in tokens.
        max_blocks: upper bound of the number of query blocks per row.
    """
    is_in_short_document = (num_document_queries < min_queries) | (num_document_tokens < min_tokens)
    is_in_short_document = is_in_short_document & (key_ranges.end >= 0)
    is_in_short_document = F.pad(
        is_in_short_document, (0, -is_in_short_document.shape[1] % query_block)
    )
    return row_indices(is_in_short_document.unflatten(1, (-1, query_block)).any(-1), max_blocks)


class _Positions(NamedTuple):
    """The positions in a layout to which the tokens of a call move.

    Attributes:
        key_positions: int64 [B, N_k], position of each key.
        query_positions: int64 [B, N_q], position of each query.
        num_key_positions: number of positions for keys.
        num_query_positions: number of positions for queries.
        document_start: int64 [B, N_k], position of the first token in the document of each key.
        document_shift: int64 [B, N_k], position of each key minus the number of earlier keys of its
            row that are not padding.
        num_documents: documents per row.
        num_document_queries: int64 [B, 1 or N_k], number of queries in the document of each key.
        num_document_tokens: int64 [B, 1 or N_k], number of tokens in the document of each key.
        document_lengths: `DocumentLength` of every document of each row; None for rows without
            documents.
    """

    key_positions: Tensor
    query_positions: Tensor
    num_key_positions: int
    num_query_positions: int
    document_start: Tensor
    document_shift: Tensor
    num_documents: int
    num_document_queries: Tensor
    num_document_tokens: Tensor
    document_lengths: Sequence[Sequence[DocumentLength]] | None = None


def _compute_positions_of_rows(
    is_valid_key: Tensor, query_slots: Tensor | slice, options: LayoutOptions
) -> _Positions:
    """Return the positions of rows with padding, each of which is one document.

    Args:
        is_valid_key: bool [B, N_k], True for written keys without padding.
        query_slots: slots of the queries.
        options: see `BlockLayout.build`.
    """
    is_valid_query, key_positions = is_valid_key[:, query_slots], is_valid_key.cumsum(-1) - 1
    zero_positions = torch.zeros_like(key_positions)
    # queries move left, without gaps
    query_positions, num_query_positions = is_valid_query.cumsum(-1) - 1, is_valid_query.shape[1]
    block_offset = options.block_offset
    if block_offset:
        query_positions = query_positions + torch.tensor(
            block_offset, device=is_valid_key.device
        ).unsqueeze(1)
        num_query_positions += max(block_offset)
    if options.sequence_end is None:
        num_document_queries = is_valid_query.sum(-1, keepdim=True)
        num_document_tokens = is_valid_key.sum(-1, keepdim=True)
    else:
        num_document_queries = num_document_tokens = options.sequence_end
    return _Positions(
        key_positions=key_positions,
        query_positions=query_positions,
        num_key_positions=is_valid_key.shape[1],
        num_query_positions=num_query_positions,
        document_start=zero_positions,
        document_shift=zero_positions,
        num_documents=1,
        num_document_queries=num_document_queries,
        num_document_tokens=num_document_tokens,
    )


def _compute_positions_of_documents(
    is_valid_key: Tensor,
    query_slots: Tensor | slice,
    doc_ids: Tensor,
    *,
    document_lengths: Sequence[Sequence[DocumentLength]] | None,
    align: int,
) -> _Positions:
    """Return the positions of packed documents, each of which starts at a block border.

    Args:
        is_valid_key: bool [B, N_k], True for written keys without padding.
        query_slots: slots of the queries.
        doc_ids: int [B, N_k], document of each key.
        document_lengths: `DocumentLength` of each document of each row; None to read them from the
            device.
        align: larger one of the two block sizes, in tokens.
    """
    if document_lengths is None:
        document_lengths = read_document_lengths(is_valid_key, doc_ids)
    num_tokens = count_document_tokens(is_valid_key, doc_ids, len(document_lengths[0]))
    document_start, document_shift = _align_documents(num_tokens, doc_ids, align)
    key_positions = is_valid_key.cumsum(-1) - 1 + document_shift
    # at least one position, also for a call that is all padding
    num_positions = max(1, *(_count_aligned_positions(row, align) for row in document_lengths))
    num_document_tokens = num_tokens.gather(1, doc_ids.to(torch.int64))
    return _Positions(
        key_positions=key_positions,
        # queries have the positions of their keys
        query_positions=key_positions[:, query_slots],
        num_key_positions=num_positions,
        num_query_positions=num_positions,
        document_start=document_start,
        document_shift=document_shift,
        num_documents=len(document_lengths[0]),
        num_document_queries=num_document_tokens,
        num_document_tokens=num_document_tokens,
        document_lengths=document_lengths,
    )


def _limit_ranges_to_window(key_ranges: KeyRanges, window: int | None) -> KeyRanges:
    """Return ``key_ranges`` limited to the last ``window`` keys of each query.

    If ``window`` is None, all keys remain. The keys of a query must be consecutive, without padding
    between them.
    """
    return (
        key_ranges
        if window is None
        else _drop_keys_before_window(key_ranges, key_ranges.end - (window - 1))
    )


def _drop_keys_before_window(key_ranges: KeyRanges, window_start: Tensor) -> KeyRanges:
    """Return ``key_ranges`` without the keys before the window of each query.

    Args:
        key_ranges: visible keys of each query.
        window_start: int32 [B, N_q], first key inside the window of each query.
    """
    first_visible_keys = torch.maximum(key_ranges.start, window_start)
    return replace(key_ranges, start=first_visible_keys, aligned=False)


def _invert_positions(
    positions: Tensor, has_position: Tensor, num_positions: int
) -> tuple[Tensor, Tensor]:
    """Return the token at each position of a layout.

    Args:
        positions: int64 [B, N], position of each token.
        has_position: bool [B, N], True for tokens that have a position.
        num_positions: number N' of positions.

    Returns:
        token_indices: int64 [B, N'], the index of the token, 0 without a token.
        has_token: bool [B, N'], True for positions with a token.
    """
    # tokens without a position move to an additional column
    scatter_positions = positions.masked_fill(~has_position, num_positions)
    all_token_indices = torch.arange(positions.shape[1], device=positions.device).expand_as(
        positions
    )
    token_indices = all_token_indices.new_zeros(positions.shape[0], num_positions + 1).scatter(
        1, scatter_positions, all_token_indices
    )
    has_token = torch.zeros_like(token_indices, dtype=torch.bool).scatter(
        1, scatter_positions, True
    )
    return token_indices[:, :num_positions], has_token[:, :num_positions]


def _align_documents(
    num_document_tokens: Tensor, doc_ids: Tensor, align: int
) -> tuple[Tensor, Tensor]:
    """Return where documents start if each starts at a multiple of ``align``.

    Args:
        num_document_tokens: int64 [B, documents], number of tokens of each document.
        doc_ids: int [B, N_k], document of each key.
        align: larger one of the two block sizes, in tokens.

    Returns:
        The start of the document of each key, and the difference between this start and the start
        without alignment; both int64 [B, N_k].
    """
    padded_lengths = (num_document_tokens + align - 1) // align * align
    aligned_starts, packed_starts = (
        F.pad(x.cumsum(-1), (1, -1)) for x in (padded_lengths, num_document_tokens)
    )
    doc_ids = doc_ids.to(torch.int64)
    document_start = aligned_starts.gather(1, doc_ids)
    return document_start, document_start - packed_starts.gather(1, doc_ids)


def _count_aligned_positions(document_lengths: Sequence[DocumentLength], align: int) -> int:
    """Return the number of positions of a row whose documents start at multiples of ``align``."""
    next_document_start = row_end = 0
    for _, num_tokens in document_lengths:
        row_end = next_document_start + num_tokens if num_tokens else row_end
        next_document_start += -(-num_tokens // align) * align
    return row_end


def _make_ranges_without_layout(doc_ids: Tensor, padding_mask: Tensor | None) -> KeyRanges:
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
    token_slots = torch.arange(doc_ids.shape[1], device=doc_ids.device, dtype=torch.int32)
    token_slots = token_slots.expand_as(doc_ids)
    document_start = token_slots.masked_fill(~is_first_token(doc_ids), 0).cummax(-1).values
    return KeyRanges(document_start, token_slots, torch.ones_like(doc_ids, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class TokenPermutation:
    """A mapping from N tokens per row to N' positions, and back.

    Every position has at most one token. The gradient is therefore the inverse mapping, a gather
    without sums. A position without a token has an arbitrary value and no gradient.

    Attributes:
        token_indices: int64 [B * N'], index of the token at each position, counted over the batch.
            Vacant positions have the first token of their row.
        is_vacant: bool [B, N'], True for positions without a token.
        position_indices: int64 [B * N], index of the position of each token, counted over the
            batch. Padding has the first position of its row.
        is_padding: bool [B, N], True for tokens without a position; None if all tokens have one.
    """

    token_indices: Tensor
    is_vacant: Tensor
    position_indices: Tensor
    is_padding: Tensor | None

    @classmethod
    def from_row_indices(
        cls,
        token_indices: Tensor,
        has_token: Tensor,
        positions: Tensor,
        has_position: Tensor | None,
    ) -> TokenPermutation:
        """Build a permutation from indices within a row.

        Args:
            token_indices: int64 [B, N'], token at each position.
            has_token: bool [B, N'], True for positions with a token.
            positions: int64 [B, N], position of each token.
            has_position: bool [B, N], True for tokens with a position; None for all tokens.
        """
        is_padding = None if has_position is None else ~has_position
        positions = positions if is_padding is None else positions.masked_fill(is_padding, 0)
        if len(token_indices) > 1:
            row_indices = torch.arange(len(token_indices), device=token_indices.device).unsqueeze(1)
            num_tokens, num_positions = positions.shape[1], token_indices.shape[1]
            token_indices, positions = (
                token_indices + row_indices * num_tokens,
                positions + row_indices * num_positions,
            )
        return cls(token_indices.flatten(), ~has_token, positions.flatten(), is_padding)

    def permute_tokens(self, x: Tensor) -> Tensor:
        """Return x [B, H, N, D] in the new order, [B, H, N', D] with strides of [B, N', H, D]."""
        return _GatherTokens.apply(
            x, self.token_indices, None, self.position_indices, self.is_padding
        )

    def unpermute_tokens(self, x: Tensor) -> Tensor:
        """Return x [B, H, N', D] in the old order, [B, H, N, D], with zeros at padding.

        The strides are those of [B, N, H, D].
        """
        return _GatherTokens.apply(
            x, self.position_indices, self.is_padding, self.token_indices, self.is_vacant
        )


class _GatherTokens(torch.autograd.Function):
    """`_gather_tokens` with a gradient, which gathers by the inverse indices.

    The gradient is ``_gather_tokens(grad, inverse_indices, inverse_is_zero)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token_indices: Tensor,
        is_zero: Tensor | None,
        inverse_indices: Tensor,
        inverse_is_zero: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(inverse_indices, inverse_is_zero)
        return _gather_tokens(x, token_indices, is_zero)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse_indices, inverse_is_zero = ctx.saved_tensors
        return _gather_tokens(grad, inverse_indices, inverse_is_zero), None, None, None, None


def _gather_tokens(x: Tensor, token_indices: Tensor, is_zero: Tensor | None) -> Tensor:
    """Gather tokens of x [B, H, N, D] and return [B, H, N', D].

    Models pass tensors with strides of [B, N, H, D]. Other tensors are copied first.

    Args:
        x: [B, H, N, D].
        token_indices: int64 [B * N'], tokens to gather, counted over the batch.
        is_zero: bool [B, N'], True for results that are zero; None for no zeros.
    """
    batch, num_heads, _, head_dim = x.shape
    gathered_tokens = (
        x.transpose(1, 2).reshape(-1, num_heads * head_dim).index_select(0, token_indices)
    )
    gathered_tokens = gathered_tokens.view(batch, -1, num_heads, head_dim)
    if is_zero is not None:
        gathered_tokens = gathered_tokens.masked_fill_(is_zero[:, :, None, None], 0.0)
    return gathered_tokens.transpose(1, 2)
