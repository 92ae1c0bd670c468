"""Lists of selected key blocks, from the bitmap, or from scores if ``max_density`` is below 1.

A row is a query block of a head. Rows are *capped* if ``max_density`` is below 1: a row lists its
forced blocks and the blocks with the highest scores, up to ``max_density`` of its visible blocks.

The functions do not synchronise with the device, and the widths of lists depend on shapes and
settings only. The exception are lists larger than `MAX_LIST_BYTES`, whose width is read from the
device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.ops import reference as ops_reference
from cab_hf.ops import top_k
from cab_hf.plan import BlockIndices, KeyRanges, crossed_blocks
from cab_hf.selection.threshold import Bitmap, SelectionRules
from cab_hf.selection.tiles import HeadRange

# largest size of lists, in bytes, that are allocated with one column per key block. For larger
# lists, the largest number of selected blocks of a row is read from the device and used as width
MAX_LIST_BYTES = 2 << 30
# largest size of the scores of capped rows, in bytes; more heads are processed in several groups
MAX_SCORE_BYTES = 1 << 30
# key blocks per iteration of a program of `_compact_kernel`
KEY_BLOCKS_PER_ITERATION = 128


class CappedLists(NamedTuple):
    """The lists of selected blocks if ``max_density`` is below 1, and the cap of each row.

    Attributes:
        full: Lists of full blocks.
        partial: Lists of partial blocks.
        caps: int32 [B, H, M_q], the largest number of blocks that each row may list.
    """

    full: BlockIndices
    partial: BlockIndices
    caps: Tensor

    @property
    def full_and_partial(self) -> tuple[BlockIndices, BlockIndices]:
        """Return the lists of full blocks and the lists of partial blocks."""
        return self.full, self.partial

    @classmethod
    def allocate(
        cls,
        bitmap: Bitmap,
        selection_rules: SelectionRules,
        key_ranges: KeyRanges,
        config: CabConfig,
    ) -> CappedLists:
        """Allocate the lists without initialising them, and compute the caps.

        Args:
            bitmap: Bitmap of all heads; only its shape is used.
            selection_rules: Blocks that are selected regardless of scores.
            key_ranges: Keys that each query may attend to.
            config: Settings of the selection.
        """
        kv_blocks = selection_rules.marked_blocks.shape[2]
        num_crossed_blocks = crossed_blocks(config.query_block, config.key_block)
        list_width = kv_blocks
        if selection_rules.tail_mask is None or not selection_rules.is_tail_listed:
            # add 1 because the number of blocks is rounded up, and 1 for floating-point errors
            max_selected = int(config.max_density * kv_blocks) + 2
            # add 1 because a row with a marked block may list one more block
            max_forced = config.sink_blocks + max(config.local_blocks, num_crossed_blocks) + 1
            list_width = max(max_selected, max_forced)
        full, partial = _allocate_lists(
            bitmap.counts,
            full_width=min(kv_blocks, list_width),
            partial_width=num_crossed_blocks if key_ranges.aligned else list_width,
        )
        caps = ops_reference.compute_max_blocks(
            selection_rules.block_bounds, config.max_density, selection_rules.marked_blocks
        )
        if selection_rules.tail_mask is not None:
            first_visible, last_visible = selection_rules.block_bounds[:2]
            num_visible = last_visible - first_visible + 1
            caps = torch.where(
                selection_rules.tail_mask.unsqueeze(1), num_visible.unsqueeze(1), caps
            )
        group_size = bitmap.counts.shape[1] // caps.shape[1]
        return cls(full=full, partial=partial, caps=caps.repeat_interleave(group_size, dim=1))


def split_heads(bitmap: Bitmap, kv_blocks: int, config: CabConfig) -> Iterator[HeadRange]:
    """Yield the groups of heads that are processed together.

    If ``max_density`` is 1, all heads of all batch rows are one group. Otherwise a group has heads
    of one batch row, and the scores of a group take at most `MAX_SCORE_BYTES` bytes.

    Args:
        bitmap: Bitmap of all heads; only its shape is used.
        kv_blocks: Key blocks of the sequence.
        config: Settings of the selection.
    """
    batch, heads, q_blocks = bitmap.counts.shape
    if config.max_density == 1:
        yield HeadRange(first_head=0, num_heads=batch * heads, heads_per_row=heads)
        return
    score_bytes_per_head = 4 * q_blocks * kv_blocks
    heads_per_group = max(1, MAX_SCORE_BYTES // score_bytes_per_head)
    for batch_row in range(batch):
        for first_head in range(0, heads, heads_per_group):
            num_group_heads = min(heads_per_group, heads - first_head)
            yield HeadRange(
                first_head=batch_row * heads + first_head,
                num_heads=num_group_heads,
                heads_per_row=heads,
            )


def convert_bitmap_to_lists(
    bitmap: Bitmap, selection_rules: SelectionRules, key_ranges: KeyRanges, config: CabConfig
) -> tuple[BlockIndices, BlockIndices]:
    """Return the lists of full and of partial blocks of all heads.

    Args:
        bitmap: Selected blocks of all heads.
        selection_rules: Its ``block_bounds`` contain the visible and the full blocks of each query
            block.
        key_ranges: Keys that each query may attend to.
        config: Settings of the selection.
    """
    counts, list_width = bitmap.counts, selection_rules.marked_blocks.shape[2]
    if 4 * counts.numel() * list_width > MAX_LIST_BYTES and not _is_capturing_graph(counts):
        list_width = max(1, int(counts.max()))
    num_crossed_blocks = crossed_blocks(config.query_block, config.key_block)
    full, partial = _allocate_lists(
        counts,
        full_width=list_width,
        partial_width=num_crossed_blocks if key_ranges.aligned else list_width,
    )
    fill_lists(bitmap.bits, block_bounds=selection_rules.block_bounds, full=full, partial=partial)
    return full, partial


def allocate_scores(
    bitmap: Bitmap, selection_rules: SelectionRules, head_range: HeadRange
) -> Tensor:
    """Allocate scores of a group of heads of one batch row, float32 [1, heads, M_q, M_k]."""
    q_blocks, kv_blocks = bitmap.counts.shape[2], selection_rules.marked_blocks.shape[2]
    return bitmap.counts.new_empty(
        1, head_range.num_heads, q_blocks, kv_blocks, dtype=torch.float32
    )


def fill_capped_lists(
    capped_lists: CappedLists,
    scores: Tensor,
    *,
    bitmap: Bitmap,
    selection_rules: SelectionRules,
    head_range: HeadRange,
) -> None:
    """Write the lists of a group of heads.

    A row lists the blocks with the highest scores. The number of blocks is the smaller one of the
    number of selected blocks and the cap of the row.

    Args:
        capped_lists: Lists of all heads, and the caps.
        scores: float32 [1, heads, M_q, M_k], written by `threshold.threshold_blocks`.
        bitmap: Selected blocks of all heads; only the counts are used.
        selection_rules: Its ``block_bounds`` contain the visible and the full blocks of each query
            block.
        head_range: Heads of the scores, all of the same batch row.
    """
    batch_row, first_head = divmod(head_range.first_head, head_range.heads_per_row)
    batch_row_slice = slice(batch_row, batch_row + 1)
    full, partial = capped_lists.full_and_partial
    top_k.select_blocks(
        score=scores,
        block_bounds=selection_rules.block_bounds[:, batch_row_slice].contiguous(),
        num_selected=bitmap.counts[batch_row_slice].minimum(capped_lists.caps[batch_row_slice]),
        first_head=first_head,
        block_lists=(
            full.counts[batch_row_slice],
            full.indices[batch_row_slice],
            partial.counts[batch_row_slice],
            partial.indices[batch_row_slice],
        ),
    )


def _allocate_lists(
    counts: Tensor, *, full_width: int, partial_width: int
) -> tuple[BlockIndices, BlockIndices]:
    """Allocate lists of full and of partial blocks without initialising them.

    Args:
        counts: int32 [B, H, M_q]; only its shape and device are used.
        full_width: Entries per list of full blocks.
        partial_width: Entries per list of partial blocks. If larger than ``full_width``, the lists
            have ``full_width`` entries.
    """
    full, partial = (
        BlockIndices(
            counts=torch.empty_like(counts), indices=counts.new_empty((*counts.shape, list_width))
        )
        for list_width in (full_width, min(full_width, partial_width))
    )
    return full, partial


def _is_capturing_graph(x: Tensor) -> bool:
    """Return True while the current CUDA stream captures a graph, which forbids synchronisation."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def fill_lists(
    bitmap_bits: Tensor, *, block_bounds: Tensor, full: BlockIndices, partial: BlockIndices
) -> None:
    """Write the selected blocks of every row to the lists of the row, in ascending order.

    A block is full if every query of the row may attend to every key of the block, and partial
    otherwise.

    Args:
        bitmap_bits: int32 [B, H, M_q, W], see `Bitmap`.
        block_bounds: int32 [6, B, M_q], see `compute_block_bounds` of `cab_hf.ops.reference`.
        full: Receives the lists of full blocks. Its width must suffice for every row.
        partial: Receives the lists of partial blocks. Its width must suffice for every row.
    """
    heads, q_blocks, num_words = bitmap_bits.shape[1:]
    _compact_kernel[(full.counts.numel(),)](
        bitmap_bits=bitmap_bits,
        block_bounds=block_bounds,
        full_counts=full.counts,
        full_indices=full.indices,
        full_width=full.width,
        partial_counts=partial.counts,
        partial_indices=partial.indices,
        partial_width=partial.width,
        heads=heads,
        q_blocks=q_blocks,
        num_words=num_words,
        COLUMNS_PER_ITERATION=KEY_BLOCKS_PER_ITERATION,
        num_warps=1,
    )


# these arguments change from call to call: without specialisation, Triton compiles once
@triton.jit(do_not_specialize=["full_width", "partial_width", "heads", "q_blocks", "num_words"])
def _compact_kernel(
    bitmap_bits,
    block_bounds,
    full_counts,
    full_indices,
    full_width,
    partial_counts,
    partial_indices,
    partial_width,
    heads,
    q_blocks,
    num_words,
    COLUMNS_PER_ITERATION: tl.constexpr,
):
    """Write the selected blocks of one query block of a head to its lists, see `fill_lists`."""
    row = tl.program_id(0).to(tl.int64)
    # bounds of the row, see `compute_block_bounds`: scalars. ``block_bounds_stride`` is the stride
    # between bounds
    row_bounds = block_bounds + row // (heads * q_blocks) * q_blocks + row % q_blocks
    block_bounds_stride = tl.num_programs(0) // heads
    first_visible = tl.load(row_bounds)
    last_visible = tl.load(row_bounds + block_bounds_stride)
    first_full = tl.load(row_bounds + 4 * block_bounds_stride)
    last_full = tl.load(row_bounds + 5 * block_bounds_stride)
    bitmap_bits += row * num_words
    full_indices += row * full_width
    partial_indices += row * partial_width
    num_full = 0
    num_partial = 0
    for first_column in range(
        first_visible // COLUMNS_PER_ITERATION * COLUMNS_PER_ITERATION,
        last_visible + 1,
        COLUMNS_PER_ITERATION,
    ):
        # selected and full key blocks [COLUMNS_PER_ITERATION]
        column = first_column + tl.arange(0, COLUMNS_PER_ITERATION)
        is_visible = (column >= first_visible) & (column <= last_visible)
        bitmap_word = tl.load(bitmap_bits + column // 32, mask=is_visible, other=0)
        is_selected = is_visible & (((bitmap_word >> (column % 32)) & 1) != 0)
        is_full = (column >= first_full) & (column <= last_full)
        # positions in both lists [COLUMNS_PER_ITERATION] from one scan: the lower 16 bits count
        # full blocks, the upper 16 bits count partial blocks
        packed_increment = tl.where(is_selected, tl.where(is_full, 1, 65536), 0)
        packed_positions = tl.cumsum(packed_increment, 0) - 1
        tl.store(
            full_indices + num_full + (packed_positions & 65535), column, mask=is_selected & is_full
        )
        partial_position = num_partial + ((packed_positions + 1) >> 16) - 1
        tl.store(partial_indices + partial_position, column, mask=is_selected & (is_full == 0))
        packed_counts = tl.sum(packed_increment, 0)
        num_full += packed_counts & 65535
        num_partial += packed_counts >> 16
    tl.store(full_counts + row, num_full)
    tl.store(partial_counts + row, num_partial)
