"""Index lists of selected key blocks: from a bitmap, or the best blocks of capped rows.

No step waits for the device, and no shape depends on data, unless lists would be larger than
`LIST_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.ops import reference as definitions
from cab_hf.ops import top_k
from cab_hf.plan import BlockIndices, KeyRanges, crossed_blocks
from cab_hf.selection.threshold import Bitmap, SelectionRules
from cab_hf.selection.tiles import HeadRange

# bytes of lists that are allocated at the largest width a row could need. The width of larger lists
# is computed first, which synchronises with the device once
LIST_BYTES = 2 << 30
# bytes of scores alive at a time if rows are capped; larger scores are computed in groups of heads
SCORE_BYTES = 1 << 30
# columns that a program converts to lists at a time
CHUNK = 128


class CappedLists(NamedTuple):
    """Lists of rows that may list a share of their visible blocks.

    Attributes:
        full, partial: The lists.
        caps: int32 [B, H, M_q], the largest number of blocks that each row may list.
    """

    full: BlockIndices
    partial: BlockIndices
    caps: Tensor

    @property
    def lists(self) -> tuple[BlockIndices, BlockIndices]:
        return self.full, self.partial

    @classmethod
    def empty(
        cls, bitmap: Bitmap, rules: SelectionRules, ranges: KeyRanges, config: CabConfig
    ) -> CappedLists:
        """Allocate the lists, and compute the caps."""
        kv_blocks = rules.marked.shape[2]
        crossed = crossed_blocks(config.query_block, config.key_block)
        width = kv_blocks
        if rules.tail is None or not rules.is_tail_listed:
            # one more than the share, which is rounded up, here in floating point; and one more
            # than the forced blocks, for a marked block
            forced = config.sink_blocks + max(config.local_blocks, crossed) + 1
            width = max(int(config.max_density * kv_blocks) + 2, forced)
        full, partial = _empty_lists(
            bitmap.counts, min(kv_blocks, width), crossed if ranges.aligned else width
        )
        caps = definitions.most_of_rows(rules.bounds, config.max_density, rules.marked)
        if rules.tail is not None:
            first, last = rules.bounds[:2]
            caps = torch.where(rules.tail.unsqueeze(1), (last - first + 1).unsqueeze(1), caps)
        heads = bitmap.counts.shape[1]
        return cls(full, partial, caps.repeat_interleave(heads // caps.shape[1], dim=1))


def head_groups(bitmap: Bitmap, kv_blocks: int, config: CabConfig) -> Iterator[HeadRange]:
    """Yield the heads that are scored together: all heads, or fewer if rows are capped.

    Scores of capped rows take memory, see `SCORE_BYTES`. A group then belongs to one batch row.
    """
    batch, heads, q_blocks = bitmap.counts.shape
    if config.max_density == 1:
        yield HeadRange(0, batch * heads, heads)
        return
    step = max(1, SCORE_BYTES // (4 * q_blocks * kv_blocks))
    for row in range(batch):
        for start in range(0, heads, step):
            yield HeadRange(row * heads + start, min(step, heads - start), heads)


def lists_of_bitmap(
    bitmap: Bitmap, rules: SelectionRules, ranges: KeyRanges, config: CabConfig
) -> tuple[BlockIndices, BlockIndices]:
    """Return the lists of full and of partial blocks from the bitmap of all heads."""
    counts, width = bitmap.counts, rules.marked.shape[2]
    if 4 * counts.numel() * width > LIST_BYTES and not _is_capturing(counts):
        width = max(1, int(counts.max()))
    crossed = crossed_blocks(config.query_block, config.key_block)
    full, partial = _empty_lists(counts, width, crossed if ranges.aligned else width)
    fill_lists(bitmap.bits, rules.bounds, full, partial)
    return full, partial


def empty_scores(bitmap: Bitmap, rules: SelectionRules, heads: HeadRange) -> Tensor:
    """Allocate the scores of some heads of one batch row, float32 [1, heads, M_q, M_k]."""
    q_blocks, kv_blocks = bitmap.counts.shape[2], rules.marked.shape[2]
    return bitmap.counts.new_empty(1, heads.count, q_blocks, kv_blocks, dtype=torch.float32)


def fill_capped(
    capped: CappedLists,
    scores: Tensor,
    *,
    bitmap: Bitmap,
    rules: SelectionRules,
    heads: HeadRange,
) -> None:
    """Fill the lists of some heads of one batch row: the best of the selected blocks.

    Args:
        scores: float32 [1, heads, M_q, M_k], written by `threshold.threshold_blocks`.
    """
    row, start = divmod(heads.first, heads.per_row)
    own = slice(row, row + 1)
    wanted = bitmap.counts[own].minimum(capped.caps[own])
    full, partial = capped.lists
    targets = full.counts[own], full.indices[own], partial.counts[own], partial.indices[own]
    top_k.select(scores, rules.bounds[:, own].contiguous(), wanted, start, targets)


def _empty_lists(counts: Tensor, full: int, partial: int) -> tuple[BlockIndices, BlockIndices]:
    """Allocate lists with ``full`` and ``partial`` indices per row; ``counts`` is [B, H, M_q]."""
    widths = full, min(full, partial)
    full, partial = (counts.new_empty(*counts.shape, width) for width in widths)
    return BlockIndices(torch.empty_like(counts), full), BlockIndices(
        torch.empty_like(counts), partial
    )


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def fill_lists(bits: Tensor, bounds: Tensor, full: BlockIndices, partial: BlockIndices) -> None:
    """Fill the lists of every row, [B, H, M_q], with the blocks whose bits are set, ascending.

    Blocks that are completely visible to all queries of a row are full, others are partial.

    Args:
        bits: int32 [B, H, M_q, W]: bit j % 32 of word j // 32 is set if a row selects block j.
        bounds: int32 [6, B, M_q], `reference.row_bounds`.
        full, partial: Lists that are wide enough for the selected blocks of each kind.
    """
    heads, q_blocks, words = bits.shape[1:]
    _compact_kernel[(full.counts.numel(),)](
        bits,
        bounds,
        full.counts,
        full.indices,
        full.width,
        partial.counts,
        partial.indices,
        partial.width,
        heads,
        q_blocks,
        words,
        CHUNK=CHUNK,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["full_width", "partial_width", "heads", "q_blocks", "words"])
def _compact_kernel(
    bits,
    bounds,
    full_counts,
    full,
    full_width,
    partial_counts,
    partial,
    partial_width,
    heads,
    q_blocks,
    words,
    CHUNK: tl.constexpr,
):
    """Write the lists of one row, see `fill_lists`."""
    row = tl.program_id(0).to(tl.int64)
    # bounds of the row: scalars
    at = bounds + row // (heads * q_blocks) * q_blocks + row % q_blocks
    plane = tl.num_programs(0) // heads
    low = tl.load(at)
    high = tl.load(at + plane)
    # blocks that are completely visible to all queries of the row
    whole_low = tl.load(at + 4 * plane)
    whole_high = tl.load(at + 5 * plane)
    bits += row * words
    full += row * full_width
    partial += row * partial_width
    full_count = 0
    partial_count = 0
    for first in range(low // CHUNK * CHUNK, high + 1, CHUNK):
        # selected key blocks, and whether all queries see them completely [CHUNK]
        column = first + tl.arange(0, CHUNK)
        there = (column >= low) & (column <= high)
        word = tl.load(bits + column // 32, mask=there, other=0)
        kept = there & (((word >> (column % 32)) & 1) != 0)
        whole = (column >= whole_low) & (column <= whole_high)
        # one scan yields both ranks: full blocks in the lower 16 bits, partial blocks in the upper
        step = tl.where(kept, tl.where(whole, 1, 65536), 0)
        rank = tl.cumsum(step, 0) - 1
        tl.store(full + full_count + (rank & 65535), column, mask=kept & whole)
        behind = partial_count + ((rank + 1) >> 16) - 1
        tl.store(partial + behind, column, mask=kept & (whole == 0))
        added = tl.sum(step, 0)
        full_count += added & 65535
        partial_count += added >> 16
    tl.store(full_counts + row, full_count)
    tl.store(partial_counts + row, partial_count)
