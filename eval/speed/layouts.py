"""Layouts of a batch: whole rows, padded rows, and documents packed into one row."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.hook import cab_mask
from cab_hf.call.layout import BlockLayout
from cab_hf.call.mask import MaskInfo
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.dense import Attend, Baseline, check_dense, check_rows
from cab_hf.plan import BlockPlan, KeyRanges

WHOLE, PADDED, PACKED = "whole", "padded", "packed"
LAYOUTS = {
    WHOLE: "every sequence fills its row",
    PADDED: "left padding; sequences of half to all of the length, drawn by the seed",
    PACKED: "one row of batch x length tokens, filled with documents of such lengths",
}


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a batch, in tensors with ``rows`` rows of ``slots`` tokens.

    Attributes:
        layout: one of `LAYOUTS`.
        rows: rows of the tensors.
        slots: tokens per row, including padding.
        places: (row, first slot, slot after the last) of every sequence, in order.
        device: device of all tensors.
    """

    layout: str
    rows: int
    slots: int
    places: tuple[tuple[int, int, int], ...]
    device: torch.device

    @classmethod
    def drawn(
        cls, layout: str, batch: int, length: int, seed: int, device: torch.device | str
    ) -> Sequences:
        """Draw sequences of a ``layout``; larger batches start with the lengths of smaller ones."""
        draw = partial(random.Random(seed).randint, -(-length // 2), length)
        device = torch.device(device)
        if layout == PACKED:
            borders, end = [0], batch * length
            while borders[-1] < end:
                borders.append(min(borders[-1] + draw(), end))
            return cls(layout, 1, end, tuple((0, *pair) for pair in pairwise(borders)), device)
        lengths = [length if layout == WHOLE else draw() for _ in range(batch)]
        places = tuple((row, length - own, length) for row, own in enumerate(lengths))
        return cls(layout, batch, length, places, device)

    @property
    def causal_pairs(self) -> int:
        """The causal pairs of all sequences, half of all pairs within each."""
        return sum(length**2 for length in self.lengths) // 2

    @property
    def lengths(self) -> list[int]:
        """The tokens of each sequence."""
        return [stop - start for _, start, stop in self.places]

    @cached_property
    def cu_seq_lens(self) -> Tensor:
        """The cumulative lengths of sequences without padding, int32 [sequences + 1]."""
        ends = accumulate(self.lengths, initial=0)
        return torch.tensor(list(ends), dtype=torch.int32, device=self.device)

    @cached_property
    def ranges(self) -> KeyRanges:
        """The ranges of the token in each slot."""
        first = torch.zeros(self.rows, self.slots, dtype=torch.int32)
        last = torch.full_like(first, -1)
        for row, start, stop in self.places:
            first[row, start:stop] = start
            last[row, start:stop] = torch.arange(start, stop)
        first, last = first.to(self.device), last.to(self.device)
        return KeyRanges(first, last, last >= 0)

    def mask(self) -> MaskInfo:
        """Return the mask for the layers of a model in one forward pass."""
        padding = self.ranges.key_valid if self.layout == PADDED else None
        mask = cab_mask(
            self.rows, self.slots, self.slots, attention_mask=padding, device=self.device
        )
        cu_seqlens = self.cu_seq_lens if self.layout == PACKED else None
        mask, _ = mask.with_documents(position_ids=None, cu_seqlens=cu_seqlens)
        return mask

    def block_layout(self, query_block: int, key_block: int) -> BlockLayout:
        """Return the order of the tokens on a grid of such blocks."""
        if self.layout == WHOLE:
            ranges = KeyRanges.causal(self.rows, self.slots, self.slots, self.device)
            return BlockLayout(ranges, self.slots)
        return self.mask().layout(query_block, key_block, self.device)

    def check(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> None:
        """Run `check_rows` of dense attention within each sequence.

        Gradients are checked for whole rows alone.
        """
        if self.layout == WHOLE:
            check_dense(attend, q, k, v, backward)
            return
        out = attend(q, k, v, q.shape[-1] ** -0.5)
        check_rows(out, q, k, v, BlockPlan.causal(self.ranges, 1, *dense.CHECK_BLOCKS))


def baselines(sequences: Sequences) -> dict[str, Baseline]:
    """Return kernels for dense attention of ``sequences`` on their device, by name.

    Masks and lengths are computed before the clock starts, because a model computes them once for
    all layers. Removing and restoring padding is part of a layer.
    """
    if sequences.layout == WHOLE:
        return dense.on(sequences.device)
    masked = Baseline(lambda: _masked(sequences), grouped=False)
    varlen = {
        name: Baseline(
            partial(_varlen, sequences, load), head_dims=dense.FLASH_DIMS, grouped=grouped
        )
        for name, load, grouped in VARLEN
    }
    # a mask of all pairs is the largest tensor, so it comes last
    on_gpu = varlen if sequences.device.type == "cuda" else {}
    return {**on_gpu, "masked SDPA": masked}


def _masked(sequences: Sequences) -> Attend:
    """Return SDPA with a mask of all pairs, bool [B or 1, 1, N, N], as transformers makes it."""
    slots = sequences.slots
    seen = sequences.mask().dense_rows(0, slots, 0, slots, sequences.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)

    return attend


# q, k and v [tokens, H or H_kv, D] of concatenated sequences, cumulative lengths int32
# [sequences + 1], the longest, a scale -> [tokens, H, D]
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


def _varlen(sequences: Sequences, load: Callable[[], Kernel]) -> Attend:
    """Return a kernel of concatenated sequences as a kernel of rows, with zeros at padding."""
    kernel, cu_seq_lens, longest = load(), sequences.cu_seq_lens, max(sequences.lengths)
    padded = sequences.layout == PADDED
    real = sequences.ranges.key_valid.flatten().nonzero().squeeze(1) if padded else None

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # [B, H, N, D] -> [B * N, H, D]
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        if padded:
            q, k, v = (x.index_select(0, real) for x in (q, k, v))
        out = kernel(q, k, v, cu_seq_lens, longest, scale)
        if padded:
            slots = out.new_zeros(sequences.rows * sequences.slots, *out.shape[1:])
            out = slots.index_copy_(0, real, out)
        return out.unflatten(0, (sequences.rows, sequences.slots)).transpose(1, 2)

    return attend


def _flash(*modules: str) -> Kernel:
    kernel = dense.flash_attn("flash_attn_varlen_func", modules)
    return lambda q, k, v, borders, longest, scale: kernel(
        *(q, k, v),
        **{"cu_seqlens_q": borders, "cu_seqlens_k": borders, "softmax_scale": scale},
        **{"max_seqlen_q": longest, "max_seqlen_k": longest},
    )


def _torch_varlen() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    # no keys after a query: causal
    return lambda q, k, v, borders, longest, scale: varlen_attn(
        *(q, k, v, borders, borders, longest, longest), scale=scale, window_size=(-1, 0)
    )


# name, loader, True if all versions take fewer key heads
VARLEN = (
    ("FA3 varlen", partial(_flash, *dense.FA3_MODULES), True),
    ("FA4 varlen", partial(_flash, *dense.FA4_MODULES), True),
    ("flash varlen", _torch_varlen, False),
)
