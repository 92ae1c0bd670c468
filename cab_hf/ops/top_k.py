"""Kernel that lists the key blocks with the highest scores of every query block (row).

The kernel finds a threshold by bisection instead of a sort. The definition is
`reference.select_best_blocks`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.bisection import is_selected, step_below, threshold_by_count
from cab_hf.ops.launch import on_device_of

# scores of a row that a program reads per loop iteration
SCORES_PER_CHUNK = 128


def select_blocks(
    score: Tensor,
    block_bounds: Tensor,
    num_selected: Tensor,
    first_head: int,
    block_lists: tuple[Tensor, ...],
) -> None:
    """Select the best blocks of every row for h of H heads, and write the lists of these heads.

    The definition of the best blocks is `reference.select_best_blocks`.

    Args:
        score: float32 [B, h, M_q, M_k], scores of the h heads from ``first_head`` on.
        block_bounds: int32 [6, B, M_q], result of `reference.compute_block_bounds`.
        num_selected: int32 [B, H, M_q], the number of blocks to list per row.
        first_head: Index of the first head whose lists are written.
        block_lists: Four int32 tensors, changed in place: counts [B, H, M_q] and indices [B, H,
            M_q, W] of full blocks, then counts and indices of partial blocks.
    """
    batch, num_score_heads, q_blocks, kv_blocks = score.shape
    _, full_indices, _, partial_indices = block_lists
    # each program copies the scores of its row to this workspace, padded to whole chunks
    workspace = score.new_empty(
        batch,
        num_score_heads,
        q_blocks,
        SCORES_PER_CHUNK * triton.cdiv(kv_blocks, SCORES_PER_CHUNK),
    )
    with on_device_of(score):
        _select_kernel[(batch * num_score_heads * q_blocks,)](
            score=score.contiguous(),
            workspace=workspace,
            block_bounds=block_bounds,
            num_selected=num_selected,
            block_lists=block_lists,
            first_head=first_head,
            num_score_heads=num_score_heads,
            heads=num_selected.shape[1],
            q_blocks=q_blocks,
            kv_blocks=kv_blocks,
            full_width=full_indices.shape[-1],
            partial_width=partial_indices.shape[-1],
            SCORES_PER_CHUNK=SCORES_PER_CHUNK,
            num_warps=1,
        )


UNSPECIALIZED_ARGUMENTS = [
    "first_head",
    "num_score_heads",
    "heads",
    "q_blocks",
    "kv_blocks",
    "full_width",
    "partial_width",
]


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _select_kernel(
    score,
    workspace,
    block_bounds,
    num_selected,
    block_lists,
    first_head,
    num_score_heads,
    heads,
    q_blocks,
    kv_blocks,
    full_width,
    partial_width,
    SCORES_PER_CHUNK: tl.constexpr,
):
    """Write the lists of one row of one head: forced blocks, and the blocks with the best scores.

    Args:
        num_score_heads: Number of heads of ``score``.
        heads: Number of heads of ``block_lists``.
        full_width, partial_width: Allocated indices per row of the full and of the partial lists.
    """
    num_flat_heads = tl.num_programs(0) // q_blocks
    # later rows see more blocks, so that their programs start first
    q_block = q_blocks - 1 - tl.program_id(0) // num_flat_heads
    flat_head = (tl.program_id(0) % num_flat_heads).to(tl.int64)
    batch = flat_head // num_score_heads
    score_row = flat_head * q_blocks + q_block
    list_row = (batch * heads + first_head + flat_head % num_score_heads) * q_blocks + q_block
    full_counts, full_indices, partial_counts, partial_indices = block_lists
    num_selected_of_row = tl.load(num_selected + list_row)
    if num_selected_of_row == 0:
        tl.store(full_counts + list_row, 0)
        tl.store(partial_counts + list_row, 0)
        return

    # the six numbers of `reference.compute_block_bounds`: visible blocks are
    # first_visible..last_visible, forced blocks are before end_of_sinks and from first_local on,
    # and full blocks are first_full..last_full
    block_bounds += batch * q_blocks + q_block
    block_bounds_stride = num_flat_heads // num_score_heads * q_blocks
    first_visible = tl.load(block_bounds)
    last_visible = tl.load(block_bounds + block_bounds_stride)
    end_of_sinks = tl.load(block_bounds + 2 * block_bounds_stride)
    # a row that lists all blocks ignores scores, because some scores may be NaN
    should_list_all = num_selected_of_row > last_visible - first_visible
    first_local = tl.where(
        should_list_all, first_visible, tl.load(block_bounds + 3 * block_bounds_stride)
    )
    first_full = tl.load(block_bounds + 4 * block_bounds_stride)
    last_full = tl.load(block_bounds + 5 * block_bounds_stride)
    first_column = first_visible // SCORES_PER_CHUNK * SCORES_PER_CHUNK

    # copy the scores of candidates, [SCORES_PER_CHUNK] at a time; -inf for forced and for invisible
    # blocks
    score += score_row * kv_blocks
    workspace += score_row * (tl.cdiv(kv_blocks, SCORES_PER_CHUNK) * SCORES_PER_CHUNK)
    lowest_score = tl.full([SCORES_PER_CHUNK], float("inf"), tl.float32)
    highest_score = tl.full([SCORES_PER_CHUNK], float("-inf"), tl.float32)
    for chunk_start in range(first_column, last_visible + 1, SCORES_PER_CHUNK):
        column = chunk_start + tl.arange(0, SCORES_PER_CHUNK)
        is_candidate = (column >= end_of_sinks) & (column < first_local)
        chunk_scores = tl.load(score + column, mask=is_candidate, other=float("-inf"))
        chunk_scores = tl.where(chunk_scores == chunk_scores, chunk_scores, float("inf"))
        tl.store(workspace + column, chunk_scores)
        lowest_score = tl.minimum(lowest_score, tl.where(is_candidate, chunk_scores, float("inf")))
        highest_score = tl.maximum(highest_score, chunk_scores)
    tl.debug_barrier()

    # find the threshold of the blocks that are listed in addition to the forced blocks
    num_candidates = tl.maximum(first_local - end_of_sinks, 0)
    num_selected_by_score = num_selected_of_row - (
        last_visible - first_visible + 1 - num_candidates
    )
    low_score, high_score, last_column = threshold_by_count(
        scores=workspace,
        low_score=step_below(tl.min(lowest_score, 0)),
        high_score=tl.max(highest_score, 0),
        num_candidates=num_candidates,
        num_selected=num_selected_by_score,
        first_column=first_column,
        end_column=last_visible + 1,
        SCORES_PER_CHUNK=SCORES_PER_CHUNK,
    )

    # write the listed columns in ascending order, [SCORES_PER_CHUNK] at a time
    full_indices += list_row * full_width
    partial_indices += list_row * partial_width
    num_full = 0
    num_partial = 0
    for chunk_start in range(first_column, last_visible + 1, SCORES_PER_CHUNK):
        column = chunk_start + tl.arange(0, SCORES_PER_CHUNK)
        chunk_scores = tl.load(workspace + column)
        is_listed = is_selected(
            scores=chunk_scores,
            columns=column,
            low_score=low_score,
            high_score=high_score,
            last_column=last_column,
        )
        is_listed = is_listed | (column < end_of_sinks) | (column >= first_local)
        is_listed = is_listed & (column >= first_visible) & (column <= last_visible)
        is_full = is_listed & (column >= first_full) & (column <= last_full)
        is_partial = is_listed & (is_full == 0)
        full_slot = num_full - 1 + tl.cumsum(is_full.to(tl.int32), 0)
        partial_slot = num_partial - 1 + tl.cumsum(is_partial.to(tl.int32), 0)
        tl.store(full_indices + full_slot, column, mask=is_full)
        tl.store(partial_indices + partial_slot, column, mask=is_partial)
        num_full += tl.sum(is_full.to(tl.int32), 0)
        num_partial += tl.sum(is_partial.to(tl.int32), 0)
    tl.store(full_counts + list_row, num_full)
    tl.store(partial_counts + list_row, num_partial)
