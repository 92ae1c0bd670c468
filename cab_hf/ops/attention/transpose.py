"""Transposed lists for the backward pass: the query blocks that attend to each key block.

The definition is `BlockIndices.transpose`. Kernels first write a bitmap with one bit per (query
block, key block), and then convert the bitmap to lists. Below, a row is a query block and a column
is a key block. P is the number of heads of the plan, M of rows, C of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.plan import BlockIndices

# bits per word of the bitmap
WORD_BITS = 32
# entries of a list, or rows of the bitmap, that a program reads at a time
ENTRIES_PER_CHUNK = 256
# bytes; transposed lists up to this size have the largest possible width. Larger lists have the
# smallest sufficient width, which needs a device sync
MAX_WIDE_LISTS_BYTES = 64 << 20


class ColumnLists(NamedTuple):
    """Lists of the rows that list each key block, packed without gaps, as an argument of kernels.

    P is the number of heads of the plan, and C the number of key blocks.

    Attributes:
        counts: int32 [B, P, C], the number of rows that list each key block.
        starts: int64 [B, P, C], the index in ``rows`` of the first row that lists each key block.
        rows: int32 [number of allocated indices in the lists], the rows of all key blocks,
            ascending per key block. Entries after the last row are undefined.
        slots: int32, same shape as ``rows``. For each entry of ``rows``, the index of the key block
            in the list of that row. If not requested, the field contains ``rows``, because Triton
            3.6 loses a None in a tuple inside a tuple.
    """

    counts: Tensor
    starts: Tensor
    rows: Tensor
    slots: Tensor


def pack_columns(
    block_lists: BlockIndices, num_columns: int, with_slots: bool = False
) -> ColumnLists:
    """Compute the transpose of ``block_lists`` as `ColumnLists`, without a device sync.

    Args:
        block_lists: Lists of key blocks per row: `BlockIndices`, or `BlockLists` of `tiles`.
        num_columns: C, the number of key blocks.
        with_slots: True to compute `ColumnLists.slots`.
    """
    bitmap, counts = _make_bitmap(block_lists, num_columns)
    starts = counts.flatten().cumsum(0, dtype=torch.int64) - counts.flatten()
    starts = starts.view_as(counts)
    rows = block_lists.indices.new_empty(max(1, block_lists.indices.numel()))
    slots = torch.empty_like(rows) if with_slots else None
    _write_rows(bitmap, starts=starts, rows=rows, block_lists=block_lists, slots=slots)
    return ColumnLists(
        counts=counts, starts=starts, rows=rows, slots=rows if slots is None else slots
    )


def transpose(block_lists: BlockIndices, num_columns: int) -> BlockIndices:
    """Compute `BlockIndices.transpose` on the GPU.

    The allocated width of the result is the number of rows. If the result would then need more than
    `MAX_WIDE_LISTS_BYTES`, the width is the length of the longest list, which needs a device sync.
    While a CUDA graph is captured, the width is always the number of rows.

    Args:
        block_lists: Lists of key blocks per row.
        num_columns: C, the number of key blocks.
    """
    batch, heads, num_rows = block_lists.counts.shape
    is_capturing_graph = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    has_entry_per_row = (
        is_capturing_graph or 4 * batch * heads * num_columns * num_rows <= MAX_WIDE_LISTS_BYTES
    )
    bitmap, counts = _make_bitmap(block_lists, num_columns)
    list_width = num_rows if has_entry_per_row else max(1, int(counts.max()))
    starts = torch.arange(counts.numel(), device=counts.device, dtype=torch.int64) * list_width
    indices = block_lists.indices.new_zeros((*counts.shape, list_width))
    _write_rows(
        bitmap, starts=starts.view_as(counts), rows=indices, block_lists=block_lists, slots=None
    )
    return BlockIndices(counts, indices)


def _make_bitmap(block_lists: BlockIndices, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return the bitmap of ``block_lists``, and the number of rows that list each key block.

    Returns:
        bitmap: int32 [B, P, C, words]. Bit r % 32 of word r // 32 is set if row r lists the block.
        counts: int32 [B, P, C].
    """
    batch, heads, num_rows = block_lists.counts.shape
    num_words = triton.cdiv(num_rows, WORD_BITS)
    bitmap = block_lists.indices.new_zeros(batch, heads, num_columns, num_words)
    counts = block_lists.counts.new_empty(batch, heads, num_columns)
    if block_lists.width:
        _mark_kernel[(num_rows, batch * heads)](
            counts=block_lists.counts,
            indices=block_lists.indices,
            bitmap=bitmap,
            num_rows=num_rows,
            width=block_lists.width,
            num_columns=num_columns,
            num_words=num_words,
            ENTRIES_PER_CHUNK=ENTRIES_PER_CHUNK,
            num_warps=1,
        )
    _count_kernel[(num_columns, batch * heads)](
        bitmap=bitmap,
        counts=counts,
        num_columns=num_columns,
        num_words=num_words,
        BLOCK_WORDS=triton.next_power_of_2(num_words),
        num_warps=1,
    )
    return bitmap, counts


def _write_rows(
    bitmap: Tensor, *, starts: Tensor, rows: Tensor, block_lists: BlockIndices, slots: Tensor | None
) -> None:
    """Write the rows of every key block, ascending, to ``rows``.

    Args:
        bitmap: int32 [B, P, C, words], the bitmap of ``block_lists``.
        starts: int64 [B, P, C], index of each key block's first row in the flat ``rows``.
        rows: int32, receives the rows; its shape depends on ``starts``.
        block_lists: Lists of key blocks per row.
        slots: int32, shape of ``rows``, receives the index of the key block in the list of each
            row; None if not needed.
    """
    batch, heads, num_columns, num_words = bitmap.shape
    _unpack_kernel[(num_columns, batch * heads)](
        bitmap=bitmap,
        starts=starts,
        rows=rows,
        slots=slots,
        list_counts=block_lists.counts,
        list_indices=block_lists.indices,
        num_columns=num_columns,
        num_words=num_words,
        num_rows=block_lists.counts.shape[2],
        width=block_lists.width,
        ENTRIES_PER_CHUNK=ENTRIES_PER_CHUNK,
        num_warps=1,
    )


@triton.jit
def _mark_kernel(
    counts,
    indices,
    bitmap,
    num_rows,
    width,
    num_columns,
    num_words,
    ENTRIES_PER_CHUNK: tl.constexpr,
):
    """Set the bit of one row in the bitmap of every key block that the row lists."""
    row = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + plane * num_rows + row)
    indices += (plane * num_rows + row) * width
    # bit 31 makes an int32 word negative; this has no effect, because words are only read as bits
    bit = 1 << (row % 32)
    bitmap += plane * num_columns * num_words + row // 32
    for start in range(0, count, ENTRIES_PER_CHUNK):
        slot = start + tl.arange(0, ENTRIES_PER_CHUNK)
        is_listed = slot < count
        column = tl.load(indices + slot, mask=is_listed, other=0)
        tl.atomic_or(bitmap + column.to(tl.int64) * num_words, bit, mask=is_listed)


@triton.jit
def _count_kernel(bitmap, counts, num_columns, num_words, BLOCK_WORDS: tl.constexpr):
    """Count the rows that list one key block: the set bits of its bitmap."""
    column = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    word_index = tl.arange(0, BLOCK_WORDS)
    bitmap += (plane * num_columns + column) * num_words
    word = tl.load(bitmap + word_index, mask=word_index < num_words, other=0)
    num_set_bits = tl.zeros((BLOCK_WORDS,), tl.int32)
    for bit in tl.static_range(32):
        num_set_bits += (word >> bit) & 1
    tl.store(counts + plane * num_columns + column, tl.sum(num_set_bits, 0))


@triton.jit
def _unpack_kernel(
    bitmap,
    starts,
    rows,
    slots,
    list_counts,
    list_indices,
    num_columns,
    num_words,
    num_rows,
    width,
    ENTRIES_PER_CHUNK: tl.constexpr,
):
    """Write the rows that list one key block to ``rows``, in ascending order.

    If ``slots`` is not None, also write the index of the key block in the list of each row.
    """
    column = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    bitmap += (plane * num_columns + column) * num_words
    start = tl.load(starts + plane * num_columns + column)
    list_counts += plane * num_rows
    list_indices += plane * num_rows * width
    num_written = 0
    for first_row in range(0, num_words * 32, ENTRIES_PER_CHUNK):
        # [ENTRIES_PER_CHUNK]
        row = first_row + tl.arange(0, ENTRIES_PER_CHUNK)
        word = tl.load(bitmap + row // 32, mask=row < num_words * 32, other=0)
        is_listed = (word >> (row % 32)) & 1
        position = start + num_written + tl.cumsum(is_listed, 0) - 1
        tl.store(rows + position, row, mask=is_listed != 0)
        if slots is not None:
            slot = _find_slots(
                column,
                list_counts,
                list_indices,
                row=row,
                width=width,
                is_listed=is_listed != 0,
                ENTRIES_PER_CHUNK=ENTRIES_PER_CHUNK,
            )
            tl.store(slots + position, slot, mask=is_listed != 0)
        num_written += tl.sum(is_listed, 0)


@triton.jit
def _find_slots(column, counts, indices, row, width, is_listed, ENTRIES_PER_CHUNK: tl.constexpr):
    """Return the index of a key block in the lists of ENTRIES_PER_CHUNK rows, by binary search.

    Args:
        column: Index of the key block.
        counts, indices: Pointers to the lists of one head; lists are ascending.
        row: [ENTRIES_PER_CHUNK], the rows whose lists are searched.
        width: Allocated indices per row.
        is_listed: bool [ENTRIES_PER_CHUNK], False for rows that do not list the key block. The
            result of these rows is undefined.
    """
    low = tl.zeros((ENTRIES_PER_CHUNK,), tl.int32)
    high = tl.load(counts + row, mask=is_listed, other=1) - 1
    indices += row.to(tl.int64) * width
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        is_below = tl.load(indices + middle, mask=is_listed, other=0) < column
        low = tl.where(is_below & (low < high), middle + 1, low)
        high = tl.where(is_below, high, tl.maximum(middle, low))
    return low
