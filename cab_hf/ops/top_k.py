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
CHUNK = 128


def select_blocks(
    score: Tensor, bounds: Tensor, num_selected: Tensor, start: int, lists: tuple[Tensor, ...]
) -> None:
    """Select the best blocks of every row for h of H heads, and write the lists of these heads.

    The definition of the best blocks is `reference.select_best_blocks`.

    Args:
        score: float32 [B, h, M_q, M_k], scores of the h heads from ``start`` on.
        bounds: int32 [6, B, M_q], result of `reference.row_bounds`.
        num_selected: int32 [B, H, M_q], the number of blocks to list per row.
        start: Index of the first head whose lists are written.
        lists: Four int32 tensors, changed in place: counts [B, H, M_q] and indices [B, H, M_q, W]
            of full blocks, then counts and indices of partial blocks.
    """
    batch, num_score_heads, q_blocks, kv_blocks = score.shape
    _, full_indices, _, partial_indices = lists
    # each program copies the scores of its row to this workspace, padded to whole chunks
    workspace = score.new_empty(
        batch, num_score_heads, q_blocks, CHUNK * triton.cdiv(kv_blocks, CHUNK)
    )
    with on_device_of(score):
        _select_kernel[(batch * num_score_heads * q_blocks,)](
            score=score.contiguous(),
            workspace=workspace,
            bounds=bounds,
            num_selected=num_selected,
            lists=lists,
            start=start,
            num_score_heads=num_score_heads,
            heads=num_selected.shape[1],
            q_blocks=q_blocks,
            kv_blocks=kv_blocks,
            full_width=full_indices.shape[-1],
            partial_width=partial_indices.shape[-1],
            CHUNK=CHUNK,
            num_warps=1,
        )


UNSPECIALIZED_SIZES = [
    "start",
    "num_score_heads",
    "heads",
    "q_blocks",
    "kv_blocks",
    "full_width",
    "partial_width",
]


@triton.jit(do_not_specialize=UNSPECIALIZED_SIZES)
def _select_kernel(
    score,
    workspace,
    bounds,
    num_selected,
    lists,
    start,
    num_score_heads,
    heads,
    q_blocks,
    kv_blocks,
    full_width,
    partial_width,
    CHUNK: tl.constexpr,
):
    """Write the lists of one row of one head: forced blocks, and the blocks with the best scores.

    Args:
        num_score_heads: Number of heads of ``score``.
        heads: Number of heads of ``lists``.
        full_width, partial_width: Allocated indices per row of the full and of the partial lists.
    """
    planes = tl.num_programs(0) // q_blocks
    # later rows see more blocks, so that their programs start first
    row = q_blocks - 1 - tl.program_id(0) // planes
    plane = (tl.program_id(0) % planes).to(tl.int64)
    batch = plane // num_score_heads
    score_row = plane * q_blocks + row
    list_row = (batch * heads + start + plane % num_score_heads) * q_blocks + row
    full_counts, full_indices, partial_counts, partial_indices = lists
    num_row_selected = tl.load(num_selected + list_row)
    if num_row_selected == 0:
        tl.store(full_counts + list_row, 0)
        tl.store(partial_counts + list_row, 0)
        return

    # the six numbers of `reference.row_bounds`: visible blocks are first..last, forced blocks are
    # before sink_end and from local_start on, and full blocks are full_first..full_last
    bounds += batch * q_blocks + row
    bounds_stride = planes // num_score_heads * q_blocks
    first = tl.load(bounds)
    last = tl.load(bounds + bounds_stride)
    sink_end = tl.load(bounds + 2 * bounds_stride)
    # a row that lists all blocks ignores scores, because some scores may be NaN
    should_list_all = num_row_selected > last - first
    local_start = tl.where(should_list_all, first, tl.load(bounds + 3 * bounds_stride))
    full_first = tl.load(bounds + 4 * bounds_stride)
    full_last = tl.load(bounds + 5 * bounds_stride)
    begin = first // CHUNK * CHUNK

    # copy the scores of candidates, [CHUNK] at a time; -inf for forced and for invisible blocks
    score += score_row * kv_blocks
    workspace += score_row * (tl.cdiv(kv_blocks, CHUNK) * CHUNK)
    lowest_score = tl.full([CHUNK], float("inf"), tl.float32)
    highest_score = tl.full([CHUNK], float("-inf"), tl.float32)
    for chunk_start in range(begin, last + 1, CHUNK):
        column = chunk_start + tl.arange(0, CHUNK)
        is_candidate = (column >= sink_end) & (column < local_start)
        scores_of_chunk = tl.load(score + column, mask=is_candidate, other=float("-inf"))
        scores_of_chunk = tl.where(
            scores_of_chunk == scores_of_chunk, scores_of_chunk, float("inf")
        )
        tl.store(workspace + column, scores_of_chunk)
        lowest_score = tl.minimum(
            lowest_score, tl.where(is_candidate, scores_of_chunk, float("inf"))
        )
        highest_score = tl.maximum(highest_score, scores_of_chunk)
    tl.debug_barrier()

    # find the threshold of the blocks that are listed in addition to the forced blocks
    num_candidates = tl.maximum(local_start - sink_end, 0)
    num_by_score = num_row_selected - (last - first + 1 - num_candidates)
    score_low, score_high, last_column = threshold_by_count(
        scores=workspace,
        low=step_below(tl.min(lowest_score, 0)),
        high=tl.max(highest_score, 0),
        num_candidates=num_candidates,
        num_selected=num_by_score,
        begin=begin,
        end=last + 1,
        CHUNK=CHUNK,
    )

    # write the listed columns in ascending order, [CHUNK] at a time
    full_indices += list_row * full_width
    partial_indices += list_row * partial_width
    num_full = 0
    num_partial = 0
    for chunk_start in range(begin, last + 1, CHUNK):
        column = chunk_start + tl.arange(0, CHUNK)
        scores_of_chunk = tl.load(workspace + column)
        is_listed = is_selected(
            x=scores_of_chunk,
            column=column,
            low=score_low,
            high=score_high,
            last_column=last_column,
        )
        is_listed = is_listed | (column < sink_end) | (column >= local_start)
        is_listed = is_listed & (column >= first) & (column <= last)
        is_full = is_listed & (column >= full_first) & (column <= full_last)
        is_partial = is_listed & (is_full == 0)
        full_slot = num_full - 1 + tl.cumsum(is_full.to(tl.int32), 0)
        partial_slot = num_partial - 1 + tl.cumsum(is_partial.to(tl.int32), 0)
        tl.store(full_indices + full_slot, column, mask=is_full)
        tl.store(partial_indices + partial_slot, column, mask=is_partial)
        num_full += tl.sum(is_full.to(tl.int32), 0)
        num_partial += tl.sum(is_partial.to(tl.int32), 0)
    tl.store(full_counts + list_row, num_full)
    tl.store(partial_counts + list_row, num_partial)
