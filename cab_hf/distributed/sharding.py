"""The place of every token of a text: on which rank, and in the layout of a single process.

Every document is padded to 2 W chunks of whole blocks, W the number of ranks. Rank r holds chunks r
and 2 W - 1 - r of every document (zigzag), an early and a late one, so that causal work is the same
on all ranks. Padding never leaves its rank: keys are put into the `Layout` of one process, and
plans are in its key blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from cab_hf.call.layout import Layout, Length
from cab_hf.plan import EXACT_BLOCK, BlockPlan, Spans, once_per_spans

# shardings kept, and the maps made of each: those of a few batches on their way
KEPT = 8


@dataclass(frozen=True)
class Sharding:
    """How documents are sharded; the same on every rank.

    Attributes:
        lengths: real tokens of each document, in order.
        world: ranks.
        block: tokens of which chunks are whole multiples; blocks of plans divide it.
    """

    lengths: tuple[int, ...]
    world: int
    block: int = EXACT_BLOCK

    @property
    def text(self) -> int:
        """Real tokens of the whole text."""
        return sum(self.lengths)

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Tokens of a chunk of each document, padding included."""
        least = 2 * self.world * self.block
        return tuple([-(-length // least) * self.block for length in self.lengths])

    @property
    def tokens(self) -> int:
        """Tokens that each rank holds, padding included."""
        return 2 * sum(self.chunks)

    @property
    def exact_block(self) -> int:
        """Query and key block of plans that keep everything."""
        return math.gcd(self.block, EXACT_BLOCK)

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [W, n]: the positions of each rank's tokens in their document, padding behind."""
        early = torch.arange(self.world).unsqueeze(1)
        pair = early, 2 * self.world - 1 - early
        held = [chunk * size + torch.arange(size) for size in self.chunks for chunk in pair]
        return torch.cat(held, dim=1)

    @cached_property
    def documents(self) -> Tensor:
        """int64 [n]: the document of each token of a rank, the same for all ranks."""
        sizes = torch.tensor(self.chunks)
        return torch.arange(len(self.lengths)).repeat_interleave(2 * sizes)

    @cached_property
    def real(self) -> Tensor:
        """bool [W, n]: False for padding."""
        return self.offsets < torch.tensor(self.lengths)[self.documents]

    @cached_property
    def positions(self) -> Tensor:
        """int64 [W, n]: positions in the document; padding repeats the last real one."""
        return torch.minimum(self.offsets, torch.tensor(self.lengths)[self.documents] - 1)

    @cached_property
    def slots(self) -> Tensor:
        """int64 [W, n]: tokens of the whole text that each rank holds; padding repeats one."""
        begins = torch.tensor([0, *self.lengths]).cumsum(0)
        return begins[self.documents] + self.positions

    @cached_property
    def holders(self) -> Tensor:
        """int64 [N]: for each token of the text, rank * n + its index on the rank."""
        return self._inverse(self.slots, self.text)

    def _inverse(self, place: Tensor, length: int) -> Tensor:
        """int64 [length]: the rank and index that hold each place; 0 for an empty one."""
        holder = torch.zeros(length, dtype=torch.int64)
        real = self.real.flatten()
        holder[place.flatten()[real]] = real.nonzero().squeeze(1)
        return holder

    def shard_map(self, align: int, device: torch.device | str) -> ShardMap:
        """Of a layout whose documents begin at multiples of ``align``; made once for all layers."""
        return _shard_map(self, align, torch.device(device))


@dataclass(frozen=True, eq=False)
class ShardMap:
    """The places of the tokens of all ranks in the layout of a single process.

    Attributes:
        align: at multiples of which documents begin in the layout.
        place: int64 [W, n], the layout position of each token of each rank; -1 for padding.
        source: int64 [N'], rank * n + index of the token at each place; 0 for an empty one.
        filled: bool [N'], where one does.
        begins: int64 [n], where the document of each token of a rank begins in the layout.
    """

    sharding: Sharding
    align: int
    place: Tensor
    source: Tensor
    filled: Tensor
    begins: Tensor

    @property
    def length(self) -> int:
        """N', the keys of the layout."""
        return self.source.shape[0]

    @cached_property
    def home(self) -> tuple[Tensor, Tensor | None]:
        """(`place` of all ranks, flat and 0 for padding; int64, which of it is padding, or None
        where there is none)."""
        place = self.place.flatten()
        padding = (place < 0).nonzero().squeeze(1)
        return place.clamp(min=0), padding if len(padding) else None

    @cached_property
    def layout(self) -> Layout:
        """The layout of one process, of one batch row."""
        lengths, device = self.sharding.lengths, self.source.device
        document = None
        if len(lengths) > 1:
            sizes = torch.tensor(lengths, device=device)
            document = torch.arange(len(lengths), device=device).repeat_interleave(sizes)[None]
        known = [[Length(length, length) for length in lengths]]
        text = self.sharding.text
        return Layout.build(1, text, text, 0, None, document, self.align, device, known)

    def blocks(self, size: int) -> tuple[Tensor, Tensor]:
        """(rank * blocks of a rank + block at each place, whether there is one), both [N' / size].

        A block of the layout that holds any token begins with one, and so does the rank's block.
        """
        return self.source[::size] // size, self.filled[::size]

    def kept_spans(
        self, rank: int, batch: int, causal: bool = True, window: int | None = None
    ) -> Shard:
        """`spans`, the same object every time: for plans that leave nothing out."""
        return _kept_spans(self.layout.spans, self, rank, batch, causal, window)

    def spans(self, rank: int, batch: int, causal: bool = True, window: int | None = None) -> Shard:
        """What the queries of a rank may see of the layout, and nothing made of it yet.

        What is made of plans stays with their spans: those of a forward pass go with it.
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

        text = self.layout.spans
        return Shard(
            rows(first),
            rows(last),
            self.filled.expand(batch, -1),
            aligned=causal and window is None,
            consecutive=False,
            # each is held in two stretches
            documents=2 * len(self.sharding.lengths),
            text=replace(text, **{name: getattr(text, name).expand(batch, -1) for name in TENSORS}),
            shard_map=self,
        )


# the tensors of `Spans`
TENSORS = ("first", "last", "key_valid")


@once_per_spans
def _kept_spans(
    spans: Spans, shard_map: ShardMap, rank: int, batch: int, causal: bool, window: int | None
) -> Shard:
    return shard_map.spans(rank, batch, causal, window)


@dataclass(frozen=True, eq=False)
class Shard(Spans):
    """The spans of one rank's queries. Which of them end a text is known to the whole text alone.

    Attributes:
        text: the spans of the whole text, in the same layout.
        shard_map: the places of its tokens.
    """

    text: Spans | None = None
    shard_map: ShardMap | None = None

    @once_per_spans
    def tail(self, tokens: int, query_block: int) -> Tensor:
        return self.taken(self.text.tail(tokens, query_block), query_block)

    @once_per_spans
    def text_rows(self, query_block: int) -> Tensor:
        """int64 [m]: which query block of the whole text each of this rank is; -1 for padding."""
        rows = self.rows(query_block)
        return rows.places(query_block).masked_fill(rows.queries == 0, -1)[0]

    def own(self, plan: BlockPlan) -> BlockPlan:
        """The rows of this rank's queries, of a plan of the whole text."""
        return plan.take_rows(self.text_rows(plan.query_block), self)

    def taken(self, named: Tensor, query_block: int) -> Tensor:
        """bool [B, m]: those of the whole text's query blocks, bool [B, M], that this rank has."""
        rows = self.text_rows(query_block)
        return named[:, rows.clamp(min=0)] & (rows >= 0)


def sharding_between(cu_seqlens: Tensor | None, tokens: int, world: int, block: int) -> Sharding:
    """The sharding of documents that begin and end at ``cu_seqlens``.

    None is one document without padding, of ``tokens`` for each of ``world`` ranks.
    """
    lengths = (world * tokens,) if cu_seqlens is None else lengths_between(cu_seqlens)
    return sharding_of(lengths, world, block)


def lengths_between(cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """The lengths of documents that begin and end at ``cu_seqlens``, int [documents + 1].

    Waits for the device. What repeats is no document.

    Raises:
        ValueError: where they do not begin at 0 and rise.
    """
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    lengths = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    if not lengths or ends[0] != 0 or min(lengths) < 0 or ends[-1] == 0:
        raise ValueError(
            "cu_seqlens must begin at 0, rise, and end at the number of tokens of the whole "
            f"sequence, got {ends if len(ends) < 10 else [*ends[:9], '...']}."
        )
    return tuple([length for length in lengths if length])


@lru_cache(KEPT)
def sharding_of(lengths: tuple[int, ...], world: int, block: int = EXACT_BLOCK) -> Sharding:
    """The `Sharding`, the same object for the same arguments."""
    return Sharding(lengths, world, block)


@lru_cache(KEPT)
def _shard_map(sharding: Sharding, align: int, device: torch.device) -> ShardMap:
    if sharding.block % align:
        raise ValueError(
            f"block is {sharding.block}, of which the blocks of this plan are no part ({align}); "
            f"give block={math.lcm(sharding.block, align)} to what shards and to what attends."
        )
    room = [-(-length // align) * align for length in sharding.lengths]
    starts = torch.tensor([0, *room]).cumsum(0)
    begins = starts[sharding.documents]
    place = (begins + sharding.offsets).masked_fill(~sharding.real, -1)
    length = int(starts[-2]) + sharding.lengths[-1]
    filled = torch.zeros(length, dtype=torch.bool)
    filled[place[sharding.real]] = True
    source = sharding._inverse(place, length)
    return ShardMap(sharding, align, *(x.to(device) for x in (place, source, filled, begins)))
