"""Lists the other way round: for every key block, the rows that attend it. Backward reads these.

The definition is `BlockLists.transpose`. Between the two forms is one bit for every (row, key
block), so that nothing of the size of rows x key blocks is held in whole numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.plan import BlockLists

WORD = 32
CHUNK = 256
# bytes up to which transposed lists are as wide as they could be: to know their width is a wait
WIDE_LISTS = 64 << 20


class ColumnLists(NamedTuple):
    """For every key block the rows that list it, ascending, packed one after the other.

    Attributes:
        counts: int32 [B, P, C], rows listing each key block.
        starts: int64 [B, P, C], where each key block's rows begin in ``rows``.
        rows: int32, as long as the lists had room for; what is behind the last means nothing.
        slots: int32 beside ``rows``: at which place of that row's list the key block is; ``rows``
            again where that was not wanted, as Triton 3.6 loses a None in a tuple inside a tuple.
    """

    counts: Tensor
    starts: Tensor
    rows: Tensor
    slots: Tensor


def pack_columns(lists: BlockLists, columns: int, placed: bool = False) -> ColumnLists:
    """The transpose of ``lists`` over ``columns`` key blocks. Never waits for the device.

    Args:
        placed: whether ``slots`` are written.
    """
    batch, heads, rows = lists.counts.shape
    words, width = triton.cdiv(rows, WORD), lists.width
    # bit r % 32 of word r // 32 of a key block says that row r lists it
    bits = lists.indices.new_zeros(batch, heads, columns, words)
    counts = lists.counts.new_zeros(batch, heads, columns)
    sizes = rows, width, columns, words
    if width:
        _mark_kernel[(rows, batch * heads)](
            lists.counts, lists.indices, bits, counts, *sizes, CHUNK=CHUNK, num_warps=1
        )
    starts = counts.flatten().cumsum(0, dtype=torch.int64) - counts.flatten()
    packed = lists.indices.new_empty(max(1, lists.indices.numel()))
    slots = torch.empty_like(packed) if placed else None
    _unpack_kernel[(columns, batch * heads)](
        bits, starts, packed, slots, lists.counts, lists.indices, *sizes, CHUNK=CHUNK, num_warps=1
    )
    return ColumnLists(counts, starts.view_as(counts), packed, slots if placed else packed)


def transpose(lists: BlockLists, columns: int) -> BlockLists:
    """`BlockLists.transpose` on the GPU; large lists, unless captured, wait to be no wider."""
    rows = lists.counts.shape[2]
    packed = pack_columns(lists, columns)
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    wide = captured or 4 * packed.counts.numel() * rows <= WIDE_LISTS
    width = rows if wide else max(1, int(packed.counts.max()))
    place = torch.arange(width, device=packed.counts.device)
    there = place < packed.counts.unsqueeze(-1)
    indices = packed.rows[(packed.starts.unsqueeze(-1) + place).masked_fill(~there, 0)]
    return BlockLists(packed.counts, indices.masked_fill(~there, 0))


@triton.jit
def _mark_kernel(
    list_counts,
    list_indices,
    bits,
    counts,
    rows,
    width,
    columns,
    words,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    count = tl.load(list_counts + plane * rows + row)
    list_indices += (plane * rows + row) * width
    counts += plane * columns
    # a word has no other meaning than its bits: the highest is the sign
    bit = 1 << (row % 32)
    bits += plane * columns * words + row // 32
    for start in range(0, count, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        listed = slot < count
        column = tl.load(list_indices + slot, mask=listed, other=0)
        tl.atomic_add(counts + column, 1, mask=listed)
        tl.atomic_or(bits + column.to(tl.int64) * words, bit, mask=listed)


@triton.jit
def _unpack_kernel(
    bits,
    starts,
    rows,
    slots,
    list_counts,
    list_indices,
    row_count,
    width,
    columns,
    words,
    CHUNK: tl.constexpr,
):
    column = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    bits += (plane * columns + column) * words
    start = tl.load(starts + plane * columns + column)
    list_counts += plane * row_count
    list_indices += plane * row_count * width
    written = 0
    for begin in range(0, words * 32, CHUNK):
        row = begin + tl.arange(0, CHUNK)
        word = tl.load(bits + row // 32, mask=row < words * 32, other=0)
        listed = (word >> (row % 32)) & 1
        place = start + written + tl.cumsum(listed, 0) - 1
        tl.store(rows + place, row, mask=listed != 0)
        if slots is not None:
            slot = _find(column, list_counts, list_indices, row, width, listed != 0, CHUNK)
            tl.store(slots + place, slot, mask=listed != 0)
        written += tl.sum(listed, 0)


@triton.jit
def _find(column, counts, indices, row, width, listed, CHUNK: tl.constexpr):
    """The index of ``column`` in the ascending list of every ``row`` that lists it."""
    low = tl.zeros((CHUNK,), tl.int32)
    high = tl.load(counts + row, mask=listed, other=1) - 1
    indices += row.to(tl.int64) * width
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        below = tl.load(indices + middle, mask=listed, other=0) < column
        low = tl.where(below & (low < high), middle + 1, low)
        high = tl.where(below, high, tl.maximum(middle, low))
    return low
