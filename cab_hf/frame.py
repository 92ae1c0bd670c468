"""Where tokens stand on the block grid: padding closed up, documents at block borders."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.plan import Spans


@dataclass(frozen=True, eq=False)
class Frame:
    """A re-arrangement of a call's tokens that makes blocks mean the same whatever surrounds them.

    Blocks anchored at slots would move with left padding, and a block across two documents would
    mix them. In the frame each row's padding comes last and each document starts a new block, so a
    text selects the same blocks alone, padded or packed.

    Attributes:
        spans: what each query of the frame may see, in frame positions.
        query_source, key_source: int64 [B, N'], the slot each frame position is filled from;
            None when the frame is the call itself.
        query_place: int64 [B, N_q], where each query of the call stands in the frame.
        padding: bool [B, N_q], the call's padding queries.
    """

    spans: Spans
    kv_length: int
    query_source: Tensor | None = None
    key_source: Tensor | None = None
    query_place: Tensor | None = None
    padding: Tensor | None = None

    @classmethod
    def build(
        cls,
        batch: int,
        q_length: int,
        kv_length: int,
        q_slot: int,
        valid: Tensor | None,
        document: Tensor | None,
        align: int,
        device: torch.device,
    ) -> Frame:
        """The frame of a call; arguments as in `CabMask`. ``align`` is the larger block size."""
        if valid is None and document is None:
            return cls(Spans.causal(batch, q_length, kv_length, device), kv_length)
        if document is not None and torch.compiler.is_compiling():
            # moving documents needs their lengths on the host; they stay where they are
            return cls(_spans_in_place(document), kv_length)

        if valid is None:
            valid = torch.ones(batch, kv_length, dtype=torch.bool, device=device)
        mine = slice(q_slot, q_slot + q_length)
        real = valid[:, mine]
        place = valid.cumsum(-1) - 1
        if document is None:
            first, length, documents = torch.zeros_like(place), kv_length, 1
            # queries close up from the left
            inside, q_frame = real.cumsum(-1) - 1, q_length
        else:
            first, shift, length, documents = _aligned_documents(valid, document, align)
            place = place + shift
            # queries are where their keys are
            inside, q_frame = place[:, mine], length
        key_source, key_valid = _invert(place, valid, length)
        query_source, query_valid = _invert(inside, real, q_frame)

        def by_query(values: Tensor, fill: int) -> Tensor:
            taken = values.gather(1, query_source).masked_fill(~query_valid, fill)
            return taken.to(torch.int32)

        starts, ends = by_query(first[:, mine], 0), by_query(place[:, mine], -1)
        spans = Spans(starts, ends, key_valid, aligned=True, documents=documents)
        inside = inside.masked_fill(~real, 0)
        return cls(spans, kv_length, query_source, key_source, inside, ~real)

    def queries(self, x: Tensor) -> Tensor:
        """[B, H, N_q, D] from the call's order to the frame's."""
        return x if self.query_source is None else _take(x, self.query_source)

    def keys(self, x: Tensor) -> Tensor:
        """[B, H_kv, N_k, D] from slots to the frame's order; unwritten cache slots are dropped."""
        x = x[:, :, : self.kv_length]
        return x if self.key_source is None else _take(x, self.key_source)

    def restore(self, out: Tensor) -> Tensor:
        """[B, H, N', D] back to the call's order, zeros at padding queries."""
        if self.query_place is None:
            return out
        return _take(out, self.query_place).masked_fill(self.padding[:, None, :, None], 0.0)


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _invert(place: Tensor, real: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(source, filled bool), both [B, length], for tokens that go to ``place`` where ``real``."""
    # what is not real lands in one spare column
    target = place.masked_fill(~real, length)
    slots = torch.arange(place.shape[1], device=place.device).expand_as(place)
    source = slots.new_zeros(place.shape[0], length + 1).scatter(1, target, slots)
    filled = torch.zeros_like(source, dtype=torch.bool).scatter(1, target, True)
    return source[:, :length], filled[:, :length]


def _aligned_documents(
    valid: Tensor, document: Tensor, align: int
) -> tuple[Tensor, Tensor, int, int]:
    """(where a token's document starts, shift from rank to place, length, documents) of a frame."""
    count = int(document.max()) + 1
    document = document.to(torch.int64)
    lengths = torch.zeros(document.shape[0], count, dtype=torch.int64, device=document.device)
    lengths.scatter_add_(1, document, valid.to(torch.int64))
    room = (lengths + align - 1) // align * align
    starts, packed = (F.pad(x.cumsum(-1), (1, -1)) for x in (room, lengths))
    first = starts.gather(1, document)
    length = int((starts[:, -1] + lengths[:, -1]).max())
    return first, first - packed.gather(1, document), length, count


def _spans_in_place(document: Tensor) -> Spans:
    slot = torch.arange(document.shape[1], device=document.device, dtype=torch.int32)
    slot = slot.expand_as(document)
    begins = F.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    first = slot.masked_fill(~begins, 0).cummax(-1).values
    return Spans(first, slot, torch.ones_like(document, dtype=torch.bool))
