"""Layouts of a batch: whole rows, padded rows, and documents packed into one row."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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
from cab_hf.eval.speed.dense import Attend, Baseline, check_attention, check_dense
from cab_hf.plan import KeyRanges

WHOLE_LAYOUT, PADDED_LAYOUT, PACKED_LAYOUT = "whole", "padded", "packed"
LAYOUTS = {
    WHOLE_LAYOUT: "every sequence fills its row",
    PADDED_LAYOUT: "left padding; sequences of half to all of the length, drawn by the seed",
    PACKED_LAYOUT: "one row of batch x length tokens, filled with documents of such lengths",
}


@dataclass(frozen=True, eq=False)
class Sequences:
    """The positions of a batch's sequences in tensors [num_rows, ..., num_slots, ...].

    Attributes:
        layout: one of `LAYOUTS`.
        num_rows: rows of the tensors.
        num_slots: tokens per row, including padding.
        spans: for each sequence, a tuple (row, first slot, slot after the last token).
        device: device of all tensors.
    """

    layout: str
    num_rows: int
    num_slots: int
    spans: tuple[tuple[int, int, int], ...]
    device: torch.device

    @classmethod
    def draw_random(
        cls, layout: str, batch: int, length: int, seed: int, device: torch.device | str
    ) -> Sequences:
        """Return sequences with random lengths from ``length`` / 2 to ``length`` tokens.

        In `WHOLE_LAYOUT`, all sequences have ``length`` tokens. With equal seeds, a larger batch
        starts with the sequences of a smaller batch. The last document of a row in `PACKED_LAYOUT`
        is an exception, because it is cut at the end of the row.

        Args:
            layout: one of `LAYOUTS`.
            batch: number of sequences. In `PACKED_LAYOUT`, the row has ``batch`` x ``length``
                tokens, and documents fill the row.
            length: largest number of tokens of a sequence.
            seed: seed of the lengths.
            device: device of all tensors.
        """
        draw_length = partial(random.Random(seed).randint, -(-length // 2), length)
        device = torch.device(device)
        if layout == PACKED_LAYOUT:
            document_borders, num_row_tokens = [0], batch * length
            while document_borders[-1] < num_row_tokens:
                document_borders.append(min(document_borders[-1] + draw_length(), num_row_tokens))
            spans = tuple((0, start, stop) for start, stop in pairwise(document_borders))
            return cls(
                layout=layout, num_rows=1, num_slots=num_row_tokens, spans=spans, device=device
            )
        lengths = [length if layout == WHOLE_LAYOUT else draw_length() for _ in range(batch)]
        spans = tuple((row, length - num_tokens, length) for row, num_tokens in enumerate(lengths))
        return cls(layout=layout, num_rows=batch, num_slots=length, spans=spans, device=device)

    @property
    def num_causal_pairs(self) -> int:
        """The number of causal pairs: half of all (query, key) pairs within each sequence."""
        return sum(length**2 for length in self.sequence_lengths) // 2

    @property
    def sequence_lengths(self) -> list[int]:
        """The number of tokens of each sequence."""
        return [stop - start for _, start, stop in self.spans]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The cumulative lengths of the sequences, without padding, int32 [sequences + 1]."""
        cumulative_lengths = accumulate(self.sequence_lengths, initial=0)
        return torch.tensor(list(cumulative_lengths), dtype=torch.int32, device=self.device)

    @cached_property
    def key_ranges(self) -> KeyRanges:
        """The range of keys that the token in each slot may attend to; none for padding."""
        first_keys = torch.zeros(self.num_rows, self.num_slots, dtype=torch.int32)
        last_keys = torch.full_like(first_keys, -1)
        for row, start, stop in self.spans:
            first_keys[row, start:stop] = start
            last_keys[row, start:stop] = torch.arange(start, stop)
        first_keys, last_keys = first_keys.to(self.device), last_keys.to(self.device)
        return KeyRanges(first_keys, last_keys, last_keys >= 0)

    def make_mask(self) -> MaskInfo:
        """Return the mask that a model passes to all its layers in one forward pass."""
        padding = self.key_ranges.key_valid if self.layout == PADDED_LAYOUT else None
        mask = cab_mask(
            self.num_rows,
            self.num_slots,
            self.num_slots,
            attention_mask=padding,
            device=self.device,
        )
        cu_seqlens = self.cu_seqlens if self.layout == PACKED_LAYOUT else None
        mask, _ = mask.with_documents(position_ids=None, cu_seqlens=cu_seqlens)
        return mask

    def make_block_layout(self, query_block: int, key_block: int) -> BlockLayout:
        """Return the `BlockLayout` that reorders tokens before blocks of these sizes are selected.

        Args:
            query_block: tokens per query block.
            key_block: tokens per key block.
        """
        if self.layout == WHOLE_LAYOUT:
            ranges = KeyRanges.causal(self.num_rows, self.num_slots, self.num_slots, self.device)
            return BlockLayout(ranges, self.num_slots)
        return self.make_mask().layout(query_block, key_block, self.device)

    def check_kernel(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> None:
        """Compare dense attention within each sequence with float32 attention.

        Args:
            attend: the kernel to check.
            q: [rows, H, slots, D].
            k, v: [rows, H_kv, slots, D].
            backward: True to check gradients too, which only the layout `WHOLE_LAYOUT` supports.

        Raises:
            ArithmeticError: a relative error exceeds its tolerance.
        """
        if self.layout == WHOLE_LAYOUT:
            check_dense(attend, q, k, v, backward=backward)
            return
        out = attend(q, k, v, q.shape[-1] ** -0.5)
        check_attention(
            out=out, q=q, k=k, v=v, plan=dense.make_causal_plan(self.key_ranges, num_heads=1)
        )


def make_baselines(sequences: Sequences) -> dict[str, Baseline]:
    """Return a mapping from names to dense baselines for ``sequences``.

    Masks and lengths are computed before the timed call, because a model computes them once for all
    layers. The timed call removes and restores padding, because every layer does both.
    """
    if sequences.layout == WHOLE_LAYOUT:
        return dense.get_baselines(sequences.device)
    masked_sdpa = Baseline(lambda: _make_masked_sdpa(sequences), supports_gqa=False)
    varlen_baselines = {
        kernel_name: Baseline(
            partial(_wrap_varlen, sequences, load_kernel),
            head_dims=dense.FLASH_HEAD_DIMS,
            supports_gqa=supports_gqa,
        )
        for kernel_name, load_kernel, supports_gqa in VARLEN_KERNELS
    }
    # the mask of all pairs needs the most memory, so this kernel comes last
    device_baselines = varlen_baselines if sequences.device.type == "cuda" else {}
    return {**device_baselines, "masked SDPA": masked_sdpa}


def _make_masked_sdpa(sequences: Sequences) -> Attend:
    """Return SDPA with a mask of all pairs, bool [B or 1, 1, N, N], as transformers builds it."""
    num_slots = sequences.num_slots
    mask = sequences.make_mask().dense_mask(0, num_slots, 0, num_slots, device=sequences.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    return attend


# function with keywords q, k and v [tokens, H or H_kv, D] of concatenated sequences, cu_seqlens
# int32 [sequences + 1], max_length (tokens of the longest sequence) and scale -> [tokens, H, D]
VarlenKernel = Callable[..., Tensor]


def _wrap_varlen(sequences: Sequences, load_kernel: Callable[[], VarlenKernel]) -> Attend:
    """Wrap a varlen kernel as a function of q, k and v in rows, [rows, H or H_kv, slots, D].

    Each call removes padding before the kernel, and returns an output with zeros at padding.

    Args:
        sequences: the sequences of the rows.
        load_kernel: function that imports and returns the varlen kernel.
    """
    kernel, cu_seqlens, max_length = (
        load_kernel(),
        sequences.cu_seqlens,
        max(sequences.sequence_lengths),
    )
    is_padded = sequences.layout == PADDED_LAYOUT
    # int64 [tokens]: slots of all tokens in the flattened batch
    token_slots = (
        sequences.key_ranges.key_valid.flatten().nonzero().squeeze(1) if is_padded else None
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # [B, H, N, D] -> [B * N, H, D]
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        if is_padded:
            q, k, v = (x.index_select(0, token_slots) for x in (q, k, v))
        out = kernel(q=q, k=k, v=v, cu_seqlens=cu_seqlens, max_length=max_length, scale=scale)
        if is_padded:
            padded_out = out.new_zeros(sequences.num_rows * sequences.num_slots, *out.shape[1:])
            out = padded_out.index_copy_(0, token_slots, out)
        return out.unflatten(0, (sequences.num_rows, sequences.num_slots)).transpose(1, 2)

    return attend


def _load_flash_varlen(module_names: Sequence[str]) -> VarlenKernel:
    """Return flash_attn_varlen_func of the first installed module, as a `VarlenKernel`."""
    kernel = dense.load_flash_function("flash_attn_varlen_func", module_names)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, scale: float
    ) -> Tensor:
        return kernel(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_length,
            max_seqlen_k=max_length,
            softmax_scale=scale,
        )

    return attend


def _load_torch_varlen() -> VarlenKernel:
    """Return torch's varlen_attn as a `VarlenKernel`."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, scale: float
    ) -> Tensor:
        return varlen_attn(
            query=q,
            key=k,
            value=v,
            cu_seq_q=cu_seqlens,
            cu_seq_k=cu_seqlens,
            max_q=max_length,
            max_k=max_length,
            scale=scale,
            # no window on the left and no keys on the right: causal attention
            window_size=(-1, 0),
        )

    return attend


# (name, loader, True if all versions support fewer KV heads than query heads)
VARLEN_KERNELS = (
    ("FA3 varlen", partial(_load_flash_varlen, dense.FA3_MODULES), True),
    ("FA4 varlen", partial(_load_flash_varlen, dense.FA4_MODULES), True),
    ("flash varlen", _load_torch_varlen, False),
)
