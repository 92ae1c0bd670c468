"""The rank and the layout place of every token of a sharded sequence.

Every document is padded to 2 W chunks of whole blocks, where W is the number of ranks. Rank r has
chunks r and 2 W - 1 - r of every document (zigzag). All ranks therefore have the same causal work.
Gathered keys have no padding: their places are those of the `BlockLayout` of a single process, and
plans use its key blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from cab_hf.call.layout import BlockLayout, LayoutOptions
from cab_hf.call.packing import Length
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan, KeyRanges, cached_per_ranges

# number of cached shardings, and of cached shard maps: enough for a few batches in flight
NUM_CACHED = 8


@dataclass(frozen=True)
class Sharding:
    """The assignment of the tokens of documents to ranks; equal on all ranks.

    Attributes:
        lengths: tokens of each document without padding, in order.
        world: number of ranks, W.
        block: chunks are multiples of ``block`` tokens. Block sizes of plans divide it.
    """

    lengths: tuple[int, ...]
    world: int
    block: int = DENSE_BLOCK_SIZE

    @property
    def length(self) -> int:
        """Tokens of the whole sequence without padding, N."""
        return sum(self.lengths)

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Tokens in a chunk of each document, including padding."""
        least = 2 * self.world * self.block
        return tuple([-(-length // least) * self.block for length in self.lengths])

    @property
    def tokens(self) -> int:
        """Tokens that each rank holds, including padding, n."""
        return 2 * sum(self.chunks)

    @property
    def dense_block_size(self) -> int:
        """Query and key block size of plans that keep all blocks, in tokens."""
        return math.gcd(self.block, DENSE_BLOCK_SIZE)

    @cached_property
    def offsets(self) -> Tensor:
        """Positions of each rank's tokens in their document, padding after them: int64 [W, n]."""
        early = torch.arange(self.world).unsqueeze(1)
        pair = early, 2 * self.world - 1 - early
        offsets = [chunk * size + torch.arange(size) for size in self.chunks for chunk in pair]
        return torch.cat(offsets, dim=1)

    @cached_property
    def documents(self) -> Tensor:
        """Document of each token of a rank, int64 [n]; equal on all ranks."""
        sizes = torch.tensor(self.chunks)
        return torch.arange(len(self.lengths)).repeat_interleave(2 * sizes)

    @cached_property
    def real(self) -> Tensor:
        """Mask of the tokens of each rank, bool [W, n]; False for padding."""
        return self.offsets < torch.tensor(self.lengths)[self.documents]

    @cached_property
    def positions(self) -> Tensor:
        """Positions in the document, int64 [W, n]; padding repeats the last position."""
        return torch.minimum(self.offsets, torch.tensor(self.lengths)[self.documents] - 1)

    @cached_property
    def slots(self) -> Tensor:
        """Places of each rank's tokens in the whole sequence, int64 [W, n]; padding repeats one."""
        begins = torch.tensor([0, *self.lengths]).cumsum(0)
        return begins[self.documents] + self.positions

    @cached_property
    def owner(self) -> Tensor:
        """Index of each token in the joined shards, rank * n + index on the rank: int64 [N]."""
        return self._inverse(self.slots, self.length)

    def _inverse(self, place: Tensor, length: int) -> Tensor:
        """Return rank * n + index of the token at each place, int64 [length]; 0 if empty."""
        owner = torch.zeros(length, dtype=torch.int64)
        real = self.real.flatten()
        owner[place.flatten()[real]] = real.nonzero().squeeze(1)
        return owner

    def shard_map(self, align: int, device: torch.device | str) -> ShardMap:
        """Return the map to a layout whose documents start at multiples of ``align`` tokens.

        All layers share one map.
        """
        return _shard_map(self, align, torch.device(device))


@dataclass(frozen=True, eq=False)
class ShardMap:
    """The places of the tokens of all ranks in the layout of a single process.

    Attributes:
        sharding: the assignment of tokens to ranks.
        align: documents start at multiples of ``align`` tokens in the layout.
        place: int64 [W, n], the layout place of each token of each rank; -1 for padding.
        source: int64 [N'], rank * n + index of the token at each place; 0 for an empty place.
        filled: bool [N'], True for places with a token.
        begins: int64 [n], the layout place where the document of each token of a rank starts.
    """

    sharding: Sharding
    align: int
    place: Tensor
    source: Tensor
    filled: Tensor
    begins: Tensor

    @property
    def length(self) -> int:
        """Number of key places in the layout, N'."""
        return self.source.shape[0]

    @cached_property
    def local_index(self) -> tuple[Tensor, Tensor | None]:
        """Flat `place` of all ranks with 0 for padding, and the int64 indices of padding.

        The indices are None if no rank has padding.
        """
        place = self.place.flatten()
        padding = (place < 0).nonzero().squeeze(1)
        return place.clamp(min=0), padding if len(padding) else None

    @cached_property
    def layout(self) -> BlockLayout:
        """The layout of a single process, for one batch row."""
        lengths, device = self.sharding.lengths, self.source.device
        document = None
        if len(lengths) > 1:
            sizes = torch.tensor(lengths, device=device)
            document = torch.arange(len(lengths), device=device).repeat_interleave(sizes)[None]
        lengths_of_row = [[Length(length, length) for length in lengths]]
        total = self.sharding.length
        return BlockLayout.build(
            batch=1,
            q_length=total,
            kv_length=total,
            q_offset=0,
            padding_mask=None,
            doc_ids=document,
            align=self.align,
            device=device,
            options=LayoutOptions(lengths=lengths_of_row),
        )

    def blocks(self, size: int) -> tuple[Tensor, Tensor]:
        """Return (source block, True if it exists) for each block of the layout, [N' / size] each.

        The source block is rank * (blocks per rank) + block. If a block of the layout has any
        token, its first place has a token, and so has the first place of the rank's block.
        """
        return self.source[::size] // size, self.filled[::size]

    def cached_ranges(
        self, rank: int, batch: int, causal: bool = True, window: int | None = None
    ) -> Shard:
        """Return `ranges` as one cached object, for plans of all visible blocks."""
        return _cached_ranges(self.layout.ranges, self, rank, batch, causal, window)

    def ranges(
        self, rank: int, batch: int, causal: bool = True, window: int | None = None
    ) -> Shard:
        """Return new ranges of the queries of a rank over the layout.

        Results that depend on the ranges only are cached in the ranges object. New ranges per
        forward pass free these caches after the pass.
        """
        first, last = self.begins, self.place[rank]
        if window is not None:
            first = torch.maximum(first, last - (window - 1))
        if not causal:
            lengths = torch.tensor(self.sharding.lengths, device=last.device)
            ends = self.begins + lengths[self.sharding.documents.to(last.device)] - 1
            last = ends.where(last >= 0, -1)

        def rows(x: Tensor) -> Tensor:
            return x.to(torch.int32).expand(batch, -1)

        sequence = self.layout.ranges
        return Shard(
            rows(first),
            rows(last),
            self.filled.expand(batch, -1),
            aligned=causal and window is None,
            consecutive=False,
            # a rank holds two chunks of each document
            documents=2 * len(self.sharding.lengths),
            text=replace(
                sequence, **{name: getattr(sequence, name).expand(batch, -1) for name in TENSORS}
            ),
            shard_map=self,
        )


# tensor attributes of `KeyRanges`
TENSORS = ("start", "end", "key_valid")


@cached_per_ranges
def _cached_ranges(
    ranges: KeyRanges, shard_map: ShardMap, rank: int, batch: int, causal: bool, window: int | None
) -> Shard:
    return shard_map.ranges(rank, batch, causal, window)


@dataclass(frozen=True, eq=False)
class Shard(KeyRanges):
    """The ranges of one rank's queries; `tail` needs the ranges of the whole sequence.

    Attributes:
        text: the ranges of the whole sequence, in the same layout.
        shard_map: the places of the tokens of all ranks.
    """

    text: KeyRanges | None = None
    shard_map: ShardMap | None = None

    @cached_per_ranges
    def tail(self, tokens: int, query_block: int) -> Tensor:
        return self.rank_rows(self.text.tail(tokens, query_block), query_block)

    @cached_per_ranges
    def sequence_rows(self, query_block: int) -> Tensor:
        """Return the query block of the whole sequence for each block of this rank, int64 [m].

        Blocks of padding have -1.
        """
        rows = self.rows(query_block)
        return rows.block_positions(query_block).masked_fill(rows.queries == 0, -1)[0]

    def own(self, plan: BlockPlan) -> BlockPlan:
        """Return this rank's rows of a plan of the whole sequence."""
        return plan.take_rows(self.sequence_rows(plan.query_block), self)

    def rank_rows(self, named: Tensor, query_block: int) -> Tensor:
        """Return this rank's part of a mask of query blocks: bool [B, M] -> bool [B, m]."""
        rows = self.sequence_rows(query_block)
        return named[:, rows.clamp(min=0)] & (rows >= 0)


def sharding_between(cu_seqlens: Tensor | None, tokens: int, world: int, block: int) -> Sharding:
    """Return the sharding of documents with boundaries ``cu_seqlens``.

    None means one document without padding, with ``tokens`` tokens on each of ``world`` ranks.
    """
    lengths = (world * tokens,) if cu_seqlens is None else lengths_between(cu_seqlens)
    return sharding_of(lengths, world, block)


def lengths_between(cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of documents with boundaries ``cu_seqlens``, int [documents + 1].

    Waits for the device. Repeated boundaries are ignored.

    Raises:
        ValueError: the boundaries do not start at 0, or decrease.
    """
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    lengths = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    if not lengths or ends[0] != 0 or min(lengths) < 0 or ends[-1] == 0:
        raise ValueError(
            "cu_seqlens must start at 0 and increase, got "
            f"{ends if len(ends) < 10 else [*ends[:9], '...']}. Give the document boundaries of "
            "the whole sequence, up to its number of tokens."
        )
    return tuple([length for length in lengths if length])


@lru_cache(NUM_CACHED)
def sharding_of(lengths: tuple[int, ...], world: int, block: int = DENSE_BLOCK_SIZE) -> Sharding:
    """Return the `Sharding`; equal arguments return the same object."""
    return Sharding(lengths, world, block)


@lru_cache(NUM_CACHED)
def _shard_map(sharding: Sharding, align: int, device: torch.device) -> ShardMap:
    if sharding.block % align:
        raise ValueError(
            f"block must be a multiple of {align}, the block size of this plan, got "
            f"{sharding.block}. Give block={math.lcm(sharding.block, align)} to shard and to "
            "context_parallel or zigzag_attention."
        )
    padded_lengths = [-(-length // align) * align for length in sharding.lengths]
    starts = torch.tensor([0, *padded_lengths]).cumsum(0)
    begins = starts[sharding.documents]
    place = (begins + sharding.offsets).masked_fill(~sharding.real, -1)
    length = int(starts[-2]) + sharding.lengths[-1]
    filled = torch.zeros(length, dtype=torch.bool)
    filled[place[sharding.real]] = True
    source = sharding._inverse(place, length)
    return ShardMap(sharding, align, *(x.to(device) for x in (place, source, filled, begins)))
