"""Zigzag sharding: which rank has each token of a sequence, and where the token is in the layout.

Every document is padded to 2 W chunks of equal length, where W is the number of ranks. A chunk is a
multiple of the block size. Rank r has chunks r and 2 W - 1 - r of every document (zigzag), so that
all ranks have the same causal work. All-gathered keys are put in the order of the `BlockLayout` of
a single process, without the padding of chunks. Plans list the key blocks of this layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cab_hf.call.layout import BlockLayout, LayoutOptions
from cab_hf.call.packing import DocumentLength
from cab_hf.checks import warn_renamed
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan, KeyRanges, cached_per_ranges

# maximum number of cached `Sharding` objects, and of cached `ShardMap` objects: a few batches
MAX_CACHED_SHARDINGS = 8


@dataclass(frozen=True)
class Sharding:
    """The assignment of the tokens of a sequence to ranks; equal on all ranks.

    Attributes:
        document_lengths: number of tokens of each document without padding, in the order of the
            sequence.
        world_size: number of ranks, W.
        block: every chunk is a multiple of ``block`` tokens. The block sizes of plans must divide
            ``block``.
    """

    document_lengths: tuple[int, ...]
    world_size: int
    block: int = DENSE_BLOCK_SIZE

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole sequence without padding, N."""
        return sum(self.document_lengths)

    @cached_property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Number of tokens in one chunk of each document, including padding."""
        min_padded_length = 2 * self.world_size * self.block
        return tuple(
            [
                -(-document_length // min_padded_length) * self.block
                for document_length in self.document_lengths
            ]
        )

    @property
    def tokens_per_rank(self) -> int:
        """Number of tokens of each rank, including padding, n."""
        return 2 * sum(self.chunk_lengths)

    @property
    def dense_block_size(self) -> int:
        """Query and key block size of a plan with all visible blocks, in tokens."""
        return math.gcd(self.block, DENSE_BLOCK_SIZE)

    @cached_property
    def document_offsets(self) -> Tensor:
        """Offset of each token of each rank from the start of its document, int64 [W, n].

        Padding has the offsets after the last token of the document.
        """
        early_chunks = torch.arange(self.world_size).unsqueeze(1)
        late_chunks = 2 * self.world_size - 1 - early_chunks
        document_offsets = [
            chunk_index * chunk_length + torch.arange(chunk_length)
            for chunk_length in self.chunk_lengths
            for chunk_index in (early_chunks, late_chunks)
        ]
        return torch.cat(document_offsets, dim=1)

    @cached_property
    def document_ids(self) -> Tensor:
        """Index of the document of each token of a rank, int64 [n]; equal on all ranks."""
        chunk_lengths = torch.tensor(self.chunk_lengths)
        return torch.arange(len(self.document_lengths)).repeat_interleave(2 * chunk_lengths)

    @cached_property
    def is_real(self) -> Tensor:
        """Bool [W, n], True for tokens of the sequence, False for padding."""
        return self.document_offsets < torch.tensor(self.document_lengths)[self.document_ids]

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in its document, int64 [W, n]; padding has the last position."""
        return torch.minimum(
            self.document_offsets, torch.tensor(self.document_lengths)[self.document_ids] - 1
        )

    @cached_property
    def sequence_index(self) -> Tensor:
        """Index in the sequence of each token of each rank, int64 [W, n].

        Padding has the index of the last token of its document.
        """
        document_starts = torch.tensor([0, *self.document_lengths]).cumsum(0)
        return document_starts[self.document_ids] + self.positions

    @cached_property
    def shard_index(self) -> Tensor:
        """Index of each token of the sequence in the concatenated shards, int64 [N].

        The index is rank * n + index on the rank.
        """
        return self.find_shard_indices(self.sequence_index, self.num_tokens)

    def find_shard_indices(self, target_of_token: Tensor, num_targets: int) -> Tensor:
        """Return the index in the concatenated shards of the token at each target.

        Args:
            target_of_token: int64 [W, n], a different number below ``num_targets`` for each token;
                the numbers of padding are ignored.
            num_targets: number of targets.

        Returns:
            int64 [num_targets], rank * n + index on the rank; 0 for targets without a token.
        """
        shard_indices = torch.zeros(num_targets, dtype=torch.int64)
        is_real = self.is_real.flatten()
        shard_indices[target_of_token.flatten()[is_real]] = is_real.nonzero().squeeze(1)
        return shard_indices

    def shard_map(self, align: int, device: torch.device | str) -> ShardMap:
        """Return the `ShardMap` for a layout whose documents start at multiples of ``align`` slots.

        Equal arguments return the same object, which all layers share.

        Args:
            align: the larger one of the query and key block sizes of the plan, in tokens.
            device: device of the tensors of the map.

        Raises:
            ValueError: ``block`` is not a multiple of ``align``.
        """
        return _shard_map(self, align, torch.device(device))


@dataclass(frozen=True, eq=False)
class ShardMap:
    """The assignment of the tokens of all ranks to the slots of the layout.

    The layout is the `BlockLayout` of a single process. A slot is an index of a key in this layout.

    Attributes:
        sharding: the assignment of tokens to ranks.
        align: documents start at multiples of ``align`` slots.
        slot_of_token: int64 [W, n], the slot of each token of each rank; -1 for padding.
        token_of_slot: int64 [N'], the index of each slot's token in the concatenated shards,
            rank * n + index on the rank; 0 for an empty slot.
        is_filled: bool [N'], True for slots with a token.
        document_start: int64 [n], the first slot of the document of each token of a rank; equal on
            all ranks.
    """

    sharding: Sharding
    align: int
    slot_of_token: Tensor
    token_of_slot: Tensor
    is_filled: Tensor
    document_start: Tensor

    @property
    def num_slots(self) -> int:
        """Number of slots of the layout, N'."""
        return self.token_of_slot.shape[0]

    @cached_property
    def flat_slots(self) -> tuple[Tensor, Tensor | None]:
        """Slots of the concatenated shards, and indices of padding in the concatenated shards.

        The slots are int64 [W * n], 0 for padding. The indices of padding are int64 [P], or None if
        no rank has padding.
        """
        slots = self.slot_of_token.flatten()
        padding_indices = (slots < 0).nonzero().squeeze(1)
        return slots.clamp(min=0), padding_indices if len(padding_indices) else None

    @cached_property
    def layout(self) -> BlockLayout:
        """The layout of a single process, for one batch row."""
        document_lengths, device = self.sharding.document_lengths, self.token_of_slot.device
        doc_ids = None
        if len(document_lengths) > 1:
            length_tensor = torch.tensor(document_lengths, device=device)
            doc_ids = torch.arange(len(document_lengths), device=device).repeat_interleave(
                length_tensor
            )[None]
        return BlockLayout.build(
            batch=1,
            q_length=self.sharding.num_tokens,
            kv_length=self.sharding.num_tokens,
            q_offset=0,
            padding_mask=None,
            doc_ids=doc_ids,
            align=self.align,
            device=device,
            options=LayoutOptions(
                document_lengths=[
                    [
                        DocumentLength(document_length, document_length)
                        for document_length in document_lengths
                    ]
                ]
            ),
        )

    def find_rank_blocks(self, block_size: int) -> tuple[Tensor, Tensor]:
        """Map every block of the layout to the block of a rank that contains its tokens.

        The first slot of a layout block determines the block of a rank: if any slot of the layout
        block has a token, its first slot has a token, which is the first token of a block of a
        rank.

        Args:
            block_size: tokens per block.

        Returns:
            (indices, is_filled), int64 and bool [N' / block_size], for every layout block. An index
            is rank * (blocks per rank) + block on the rank. ``is_filled`` is False for layout
            blocks without tokens.
        """
        return self.token_of_slot[::block_size] // block_size, self.is_filled[::block_size]

    def cached_ranges(
        self, rank: int, batch: int, causal: bool = True, window: int | None = None
    ) -> LocalRanges:
        """Return the result of `ranges` from a cache, for plans of all visible blocks."""
        arguments = _RangesArguments(rank=rank, batch=batch, causal=causal, window=window)
        return _cached_ranges(self.layout.ranges, self, arguments)

    def ranges(
        self, rank: int, batch: int, causal: bool = True, window: int | None = None
    ) -> LocalRanges:
        """Return a new object with the visible slots of each query of a rank.

        Results that depend on the ranges only are cached in the ranges object. A new object per
        forward pass frees these caches after the pass.

        Args:
            rank: index of the rank in its group.
            batch: number of batch rows.
            causal: True if queries do not attend to later keys.
            window: width of a sliding window, in slots; None means no window.
        """
        first_slot, last_slot = self.document_start, self.slot_of_token[rank]
        if window is not None:
            first_slot = torch.maximum(first_slot, last_slot - (window - 1))
        if not causal:
            document_lengths = torch.tensor(self.sharding.document_lengths, device=last_slot.device)
            document_end = (
                self.document_start
                + document_lengths[self.sharding.document_ids.to(last_slot.device)]
                - 1
            )
            last_slot = document_end.where(last_slot >= 0, -1)
        sequence_ranges = self.layout.ranges
        return LocalRanges(
            start=first_slot.to(torch.int32).expand(batch, -1),
            end=last_slot.to(torch.int32).expand(batch, -1),
            key_valid=self.is_filled.expand(batch, -1),
            aligned=causal and window is None,
            consecutive=False,
            # the early and the late chunk of a document count as two documents
            documents=2 * len(self.sharding.document_lengths),
            sequence_ranges=replace(
                sequence_ranges,
                start=sequence_ranges.start.expand(batch, -1),
                end=sequence_ranges.end.expand(batch, -1),
                key_valid=sequence_ranges.key_valid.expand(batch, -1),
            ),
            shard_map=self,
        )


class _RangesArguments(NamedTuple):
    """The arguments of `ShardMap.ranges`, as one key of a cache."""

    rank: int
    batch: int
    causal: bool
    window: int | None


@cached_per_ranges
def _cached_ranges(
    key_ranges: KeyRanges, shard_map: ShardMap, ranges_arguments: _RangesArguments
) -> LocalRanges:
    """Return the result of `ShardMap.ranges`, cached in the object ``key_ranges``."""
    return shard_map.ranges(
        rank=ranges_arguments.rank,
        batch=ranges_arguments.batch,
        causal=ranges_arguments.causal,
        window=ranges_arguments.window,
    )


@dataclass(frozen=True, eq=False)
class LocalRanges(KeyRanges):
    """The visible slots of one rank's queries.

    In names of methods, ``rows`` are query blocks. The whole sequence has M query blocks, this rank
    has m query blocks.

    Attributes:
        sequence_ranges: the ranges of all queries of the sequence, over the same slots.
        shard_map: the slots of the tokens of all ranks.
    """

    sequence_ranges: KeyRanges | None = None
    shard_map: ShardMap | None = None

    @property
    def text(self) -> KeyRanges:
        """Return ``sequence_ranges``; ``text`` is a deprecated name."""
        warn_renamed("ranges.text", "ranges.sequence_ranges")
        return self.sequence_ranges

    def own(self, plan: BlockPlan) -> BlockPlan:
        """Return the result of `local_plan`; ``own`` is a deprecated name."""
        warn_renamed("ranges.own", "ranges.local_plan")
        return self.local_plan(plan)

    @cached_per_ranges
    def tail(self, tokens: int, query_block: int) -> Tensor:
        """Return bool [B, m], True for query blocks that contain a tail token of a document.

        `KeyRanges.tail` of the whole sequence defines the tail tokens.
        """
        return self.take_local_rows(self.sequence_ranges.tail(tokens, query_block), query_block)

    @cached_per_ranges
    def sequence_row_indices(self, query_block: int) -> Tensor:
        """Return the index of each query block of this rank in the whole sequence, int64 [m].

        Query blocks that contain only padding have index -1.
        """
        block_rows = self.rows(query_block)
        return block_rows.block_positions(query_block).masked_fill(block_rows.queries == 0, -1)[0]

    def local_plan(self, plan: BlockPlan) -> BlockPlan:
        """Return this rank's rows of a plan of the whole sequence."""
        return plan.take_rows(self.sequence_row_indices(plan.query_block), self)

    def take_local_rows(self, sequence_mask: Tensor, query_block: int) -> Tensor:
        """Return this rank's columns of a mask of the query blocks of the whole sequence.

        Args:
            sequence_mask: bool [B, M], one column per query block of the whole sequence.
            query_block: query block size in tokens.

        Returns:
            bool [B, m], one column per query block of this rank; False for padding.
        """
        sequence_row_indices = self.sequence_row_indices(query_block)
        return sequence_mask[:, sequence_row_indices.clamp(min=0)] & (sequence_row_indices >= 0)


def sharding_from_boundaries(
    cu_seqlens: Tensor | None, tokens_per_rank: int, world_size: int, block: int
) -> Sharding:
    """Return the `Sharding` of packed documents with the boundaries ``cu_seqlens``.

    Args:
        cu_seqlens: int [documents + 1]; None means one document that fills all ranks.
        tokens_per_rank: tokens of each rank.
        world_size: number of ranks.
        block: every chunk is a multiple of ``block`` tokens.
    """
    document_lengths = (
        (world_size * tokens_per_rank,)
        if cu_seqlens is None
        else lengths_from_boundaries(cu_seqlens)
    )
    return get_sharding(document_lengths, world_size, block)


def lengths_from_boundaries(cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """Return the number of tokens of each document with boundaries ``cu_seqlens``.

    Reading a tensor on a GPU synchronises with the GPU. Documents of length 0 are left out.

    Args:
        cu_seqlens: int [documents + 1], from 0 to the number of tokens.

    Raises:
        ValueError: the boundaries do not start at 0, or decrease.
    """
    boundaries = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    document_lengths = [end - start for start, end in zip(boundaries, boundaries[1:], strict=False)]
    if (
        not document_lengths
        or boundaries[0] != 0
        or min(document_lengths) < 0
        or boundaries[-1] == 0
    ):
        raise ValueError(
            "cu_seqlens must start at 0 and increase, got "
            f"{boundaries if len(boundaries) < 10 else [*boundaries[:9], '...']}. Give the "
            "document boundaries of the whole sequence, up to its number of tokens."
        )
    return tuple([document_length for document_length in document_lengths if document_length])


@lru_cache(MAX_CACHED_SHARDINGS)
def get_sharding(
    document_lengths: tuple[int, ...], world_size: int, block: int = DENSE_BLOCK_SIZE
) -> Sharding:
    """Return the `Sharding` of documents from a cache, so that equal arguments return one object.

    Args:
        document_lengths: number of tokens of each document without padding.
        world_size: number of ranks.
        block: every chunk is a multiple of ``block`` tokens.
    """
    return Sharding(document_lengths, world_size, block)


@lru_cache(MAX_CACHED_SHARDINGS)
def _shard_map(sharding: Sharding, align: int, device: torch.device) -> ShardMap:
    """Compute the result of `Sharding.shard_map`; equal arguments return one cached object."""
    if sharding.block % align:
        raise ValueError(
            f"block must be a multiple of {align}, the block size of this plan, got "
            f"{sharding.block}. Give block={math.lcm(sharding.block, align)} to shard and to "
            "context_parallel or zigzag_attention."
        )
    padded_lengths = [
        -(-document_length // align) * align for document_length in sharding.document_lengths
    ]
    document_starts = torch.tensor([0, *padded_lengths]).cumsum(0)
    document_start_of_token = document_starts[sharding.document_ids]
    slot_of_token = (document_start_of_token + sharding.document_offsets).masked_fill(
        ~sharding.is_real, -1
    )
    num_slots = int(document_starts[-2]) + sharding.document_lengths[-1]
    is_filled = torch.zeros(num_slots, dtype=torch.bool)
    is_filled[slot_of_token[sharding.is_real]] = True
    return ShardMap(
        sharding=sharding,
        align=align,
        slot_of_token=slot_of_token.to(device),
        token_of_slot=sharding.find_shard_indices(slot_of_token, num_slots).to(device),
        is_filled=is_filled.to(device),
        document_start=document_start_of_token.to(device),
    )
