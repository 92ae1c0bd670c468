"""Transposed lists for the backward pass: for every key block, the rows that attend to it.

The definition is `BlockIndices.transpose`. The intermediate form has one bit per (row, key block),
which avoids integers of size rows * key blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.plan import BlockIndices

WORD = 32
CHUNK = 256
# bytes up to which transposed lists get their largest possible width; computing the width
# synchronises with the device
WIDE_LISTS = 64 << 20


class ColumnLists(NamedTuple):
    """Rows that list each key block, ascending, packed one after the other.

    Attributes:
        counts: int32 [B, P, C], the number of rows that list each key block.
        starts: int64 [B, P, C], the start of each key block's rows in ``rows``.
        rows: int32, as long as the allocated lists; entries after the last one are undefined.
        slots: int32, same shape: the place of the key block in the list of that row. It is ``rows``
            again if not requested, because Triton 3.6 loses a None in a tuple inside a tuple.
    """

    counts: Tensor
    starts: Tensor
    rows: Tensor
    slots: Tensor


def pack_columns(lists: BlockIndices, columns: int, placed: bool = False) -> ColumnLists:
    """Return the transpose of ``lists`` over ``columns`` key blocks, without synchronisation.

    Args:
        placed: True to write ``slots``.
    """
    bits, counts = _bits_by_column(lists, columns)
    starts = counts.flatten().cumsum(0, dtype=torch.int64) - counts.flatten()
    starts = starts.view_as(counts)
    rows = lists.indices.new_empty(max(1, lists.indices.numel()))
    slots = torch.empty_like(rows) if placed else None
    _fill(bits, starts, rows, lists, slots)
    return ColumnLists(counts, starts, rows, slots if placed else rows)


def transpose(lists: BlockIndices, columns: int) -> BlockIndices:
    """Compute `BlockIndices.transpose` on the GPU.

    For large lists, the function synchronises to find the width, except during capture.
    """
    batch, heads, rows = lists.counts.shape
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    wide = captured or 4 * batch * heads * columns * rows <= WIDE_LISTS
    bits, counts = _bits_by_column(lists, columns)
    width = rows if wide else max(1, int(counts.max()))
    starts = torch.arange(counts.numel(), device=counts.device, dtype=torch.int64) * width
    indices = lists.indices.new_zeros(*counts.shape, width)
    _fill(bits, starts.view_as(counts), indices, lists)
    return BlockIndices(counts, indices)


def _bits_by_column(lists: BlockIndices, columns: int) -> tuple[Tensor, Tensor]:
    """Return one bit per row and key block, and the number of rows that list each key block.

    Returns:
        int32 [B, P, C, words], where bit r % 32 of word r // 32 is set if row r lists the block;
        and int32 [B, P, C].
    """
    batch, heads, rows = lists.counts.shape
    words = triton.cdiv(rows, WORD)
    bits = lists.indices.new_zeros(batch, heads, columns, words)
    counts = lists.counts.new_empty(batch, heads, columns)
    if lists.width:
        _mark_kernel[(rows, batch * heads)](
            lists.counts,
            lists.indices,
            bits,
            rows,
            lists.width,
            columns,
            words,
            CHUNK=CHUNK,
            num_warps=1,
        )
    _count_kernel[(columns, batch * heads)](
        bits, counts, columns, words, WORDS=triton.next_power_of_2(words), num_warps=1
    )
    return bits, counts


def _fill(
    bits: Tensor, starts: Tensor, rows: Tensor, lists: BlockIndices, slots: Tensor | None = None
) -> None:
    batch, heads, columns, words = bits.shape
    _unpack_kernel[(columns, batch * heads)](
        bits,
        starts,
        rows,
        slots,
        lists.counts,
        lists.indices,
        columns,
        words,
        lists.counts.shape[2],
        lists.width,
        CHUNK=CHUNK,
        num_warps=1,
    )


@triton.jit
def _mark_kernel(counts, indices, bits, rows, width, columns, words, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + plane * rows + row)
    indices += (plane * rows + row) * width
    # a word is only its bits: the highest bit is the sign
    bit = 1 << (row % 32)
    bits += plane * columns * words + row // 32
    for start in range(0, count, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        listed = slot < count
        column = tl.load(indices + slot, mask=listed, other=0)
        tl.atomic_or(bits + column.to(tl.int64) * words, bit, mask=listed)


@triton.jit
def _count_kernel(bits, counts, columns, words, WORDS: tl.constexpr):
    column = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    word = tl.arange(0, WORDS)
    bits += (plane * columns + column) * words
    x = tl.load(bits + word, mask=word < words, other=0)
    total = tl.zeros((WORDS,), tl.int32)
    for place in tl.static_range(32):
        total += (x >> place) & 1
    tl.store(counts + plane * columns + column, tl.sum(total, 0))


@triton.jit
def _unpack_kernel(
    bits,
    starts,
    rows,
    slots,
    list_counts,
    list_indices,
    columns,
    words,
    row_count,
    width,
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
    """Return the index of ``column`` in the ascending list of every ``row`` that lists it."""
    low = tl.zeros((CHUNK,), tl.int32)
    high = tl.load(counts + row, mask=listed, other=1) - 1
    indices += row.to(tl.int64) * width
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        below = tl.load(indices + middle, mask=listed, other=0) < column
        low = tl.where(below & (low < high), middle + 1, low)
        high = tl.where(below, high, tl.maximum(middle, low))
    return low
