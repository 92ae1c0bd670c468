"""How the texts of a batch are laid out, and what computes dense attention of each layout."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cab_hf.attention import cab_dense_attention
from cab_hf.call.hook import cab_mask
from cab_hf.call.mask import CabMask
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.dense import (
    CHECK_BLOCKS,
    FA3_MODULES,
    FA4_MODULES,
    FLASH_DIMS,
    ON_GPU,
    Attend,
    Baseline,
    check_rows,
)
from cab_hf.plan import BlockPlan, Spans

WHOLE, PADDED, PACKED = "whole", "padded", "packed"
LAYOUTS = {
    WHOLE: "every text fills its row",
    PADDED: "left padding; texts of a half to all of the length, drawn by the seed",
    PACKED: "one row of batch x length tokens, filled with documents of such lengths",
}


@dataclass(frozen=True, eq=False)
class Texts:
    """Where the tokens of a batch stand.

    Attributes:
        layout: one of `LAYOUTS`.
        rows, slots: of the tensors; slots are tokens or padding.
        places: (row, first slot, slot behind the last) of every text, in order.
    """

    layout: str
    rows: int
    slots: int
    places: tuple[tuple[int, int, int], ...]
    device: torch.device

    @classmethod
    def drawn(
        cls, layout: str, batch: int, length: int, seed: int, device: torch.device | str
    ) -> Texts:
        """Texts of that ``layout``; a larger batch begins with the lengths of a smaller one."""
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
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [stop - start for _, start, stop in self.places]

    @cached_property
    def cu_seq_lens(self) -> Tensor:
        """int32 [texts + 1]: where each text begins and ends once padding is taken out."""
        ends = accumulate(self.lengths, initial=0)
        return torch.tensor(list(ends), dtype=torch.int32, device=self.device)

    @cached_property
    def spans(self) -> Spans:
        """What the token of each slot may see."""
        first = torch.zeros(self.rows, self.slots, dtype=torch.int32)
        last = torch.full_like(first, -1)
        for row, start, stop in self.places:
            first[row, start:stop] = start
            last[row, start:stop] = torch.arange(start, stop)
        first, last = first.to(self.device), last.to(self.device)
        return Spans(first, last, last >= 0)

    def mask(self, config: Any) -> CabMask:
        """What the layers of a model with that ``config`` get in one forward pass."""
        padding = self.spans.key_valid if self.layout == PADDED else None
        shape = (self.rows, self.slots, self.slots)
        mask = cab_mask(*shape, attention_mask=padding, device=self.device, config=config)
        mask.find_documents(None, self.cu_seq_lens if self.layout == PACKED else None)
        return mask

    def check(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> None:
        """`check_rows` of dense attention within each text."""
        out = attend(q, k, v, q.shape[-1] ** -0.5)
        check_rows(out, q, k, v, BlockPlan.causal(self.spans, 1, *CHECK_BLOCKS))


def baselines(texts: Texts, layer: nn.Module) -> dict[str, Baseline]:
    """What computes dense attention of ``texts`` on their device, by name.

    Masks, lengths and places are made before the clock starts, as a model makes them once for all
    layers; taking padding out and putting it back is part of a layer.
    """
    if texts.layout == WHOLE:
        return dense.on(texts.device)
    shipped = Baseline(lambda: _cab_dense(texts, layer))
    masked = Baseline(lambda: _masked(texts, layer), grouped=False)
    varlen = {
        name: Baseline(partial(_varlen, texts, load), ON_GPU[like].version, FLASH_DIMS, grouped)
        for name, like, load, grouped in VARLEN
    }
    # a mask of all pairs is the largest thing there is, and so the last
    on_gpu = varlen if texts.device.type == "cuda" else {}
    return {**on_gpu, "cab_dense": shipped, "masked SDPA": masked}


def _cab_dense(texts: Texts, layer: nn.Module) -> Attend:
    mask = texts.mask(layer.config)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return cab_dense_attention(layer, q, k, v, mask, scaling=scale)[0].transpose(1, 2)

    return attend


def _masked(texts: Texts, layer: nn.Module) -> Attend:
    """SDPA under a mask of all pairs, bool [B or 1, 1, N, N], as transformers makes for it."""
    mask, slots = texts.mask(layer.config), texts.slots
    seen = mask.dense_rows(0, slots, 0, slots, texts.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)

    return attend


# q, k and v [tokens, H or H_kv, D] of texts one behind the other, cumulative lengths int32
# [texts + 1], the longest, a scale -> [tokens, H, D]
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


def _varlen(texts: Texts, load: Callable[[], Kernel]) -> Attend:
    """A kernel of texts one behind the other, as one of rows; zeros at padding."""
    kernel, cu_seq_lens, longest = load(), texts.cu_seq_lens, max(texts.lengths)
    padded = texts.layout == PADDED
    real = texts.spans.key_valid.flatten().nonzero().squeeze(1) if padded else None

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # [B, H, N, D] -> [B * N, H, D]
        tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        if padded:
            tokens = [x.index_select(0, real) for x in tokens]
        out = kernel(*tokens, cu_seq_lens, longest, scale)
        if padded:
            slots = out.new_zeros(texts.rows * texts.slots, *out.shape[1:])
            out = slots.index_copy_(0, real, out)
        return out.unflatten(0, (texts.rows, texts.slots)).transpose(1, 2)

    return attend


def _flash(*modules: str) -> Kernel:
    kernel = dense.flash_attn("flash_attn_varlen_func", modules)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float
    ) -> Tensor:
        lengths = {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
        lengths |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return kernel(q, k, v, **lengths, softmax_scale=scale)

    return attend


def _torch_varlen() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    # nothing behind a query: causal
    return lambda q, k, v, borders, longest, scale: varlen_attn(
        *(q, k, v, borders, borders, longest, longest), scale=scale, window_size=(-1, 0)
    )


# name, the baseline whose library it is of, what loads it, whether it takes fewer key heads in all
# versions
VARLEN = (
    ("FA3 varlen", "FA3", partial(_flash, *FA3_MODULES), True),
    ("FA4 varlen", "FA4", partial(_flash, *FA4_MODULES), True),
    ("flash varlen", "flash", _torch_varlen, False),
)
