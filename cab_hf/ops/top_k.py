"""Lists of the best blocks of every row on the GPU, by bisection instead of a sort.

The definition is `reference.best_of_rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.bisection import is_kept, just_below, threshold_by_count
from cab_hf.ops.launch import on_device_of

# columns of a row of scores per step of a program
CHUNK = 128


def select(
    score: Tensor, bounds: Tensor, wanted: Tensor, start: int, lists: tuple[Tensor, ...]
) -> None:
    """Write the block lists of some heads; see `reference.best_of_rows`.

    Args:
        score: float32 [B, heads of this call, M_q, M_k].
        bounds: int32 [6, B, M_q], `reference.row_bounds`.
        wanted: int32 [B, H, M_q], the number of blocks that each row lists.
        start: The first head of this call.
        lists: Counts and indices of full blocks, then of partial blocks, for all heads.
    """
    batch, count, q_blocks, kv_blocks = score.shape
    room = score.new_empty(batch, count, q_blocks, CHUNK * triton.cdiv(kv_blocks, CHUNK))
    sizes = start, count, wanted.shape[1], q_blocks, kv_blocks, *(x.shape[-1] for x in lists[1::2])
    given = score.contiguous(), room, bounds, wanted, lists, *sizes
    with on_device_of(score):
        _select_kernel[(batch * count * q_blocks,)](*given, CHUNK=CHUNK, num_warps=1)


SIZES = ["start", "count", "heads", "q_blocks", "kv_blocks", "full_room", "partial_room"]


@triton.jit(do_not_specialize=SIZES)
def _select_kernel(
    score,
    room,
    bounds,
    wanted,
    lists,
    start,
    count,
    heads,
    q_blocks,
    kv_blocks,
    full_room,
    partial_room,
    CHUNK: tl.constexpr,
):
    """Write the lists of one row of one head, selected by a threshold found by bisection."""
    planes = tl.num_programs(0) // q_blocks
    # the longest rows start first
    i = q_blocks - 1 - tl.program_id(0) // planes
    plane = (tl.program_id(0) % planes).to(tl.int64)
    b = plane // count
    row = plane * q_blocks + i
    lists_row = (b * heads + start + plane % count) * q_blocks + i
    full, full_indices, partial, partial_indices = lists
    number = tl.load(wanted + lists_row)
    if number == 0:
        tl.store(full + lists_row, 0)
        tl.store(partial + lists_row, 0)
        return
    bounds += b * q_blocks + i
    bound = planes // count * q_blocks
    low = tl.load(bounds)
    high = tl.load(bounds + bound)
    sinks = tl.load(bounds + 2 * bound)
    # a row that lists all blocks ignores scores, because some may be NaN
    local = tl.where(number > high - low, low, tl.load(bounds + 3 * bound))
    whole_low = tl.load(bounds + 4 * bound)
    whole_high = tl.load(bounds + 5 * bound)
    begin = low // CHUNK * CHUNK

    # the row in whole chunks; -inf for forced and invisible blocks
    score += row * kv_blocks
    room += row * (tl.cdiv(kv_blocks, CHUNK) * CHUNK)
    lowest = tl.full([CHUNK], float("inf"), tl.float32)
    highest = tl.full([CHUNK], float("-inf"), tl.float32)
    for first in range(begin, high + 1, CHUNK):
        column = first + tl.arange(0, CHUNK)
        left = (column >= sinks) & (column < local)
        value = tl.load(score + column, mask=left, other=float("-inf"))
        value = tl.where(value == value, value, float("inf"))
        tl.store(room + column, value)
        lowest = tl.minimum(lowest, tl.where(left, value, float("inf")))
        highest = tl.maximum(highest, value)
    tl.debug_barrier()

    candidates = tl.maximum(local - sinks, 0)
    spare = number - (high - low + 1 - candidates)
    under, top = just_below(tl.min(lowest, 0)), tl.max(highest, 0)
    score_low, score_high, cut = threshold_by_count(
        room, under, top, candidates, spare, begin, high + 1, CHUNK
    )
    full_indices += lists_row * full_room
    partial_indices += lists_row * partial_room
    full_count = 0
    partial_count = 0
    for first in range(begin, high + 1, CHUNK):
        column = first + tl.arange(0, CHUNK)
        kept = is_kept(tl.load(room + column), column, score_low, score_high, cut)
        kept = kept | (column < sinks) | (column >= local)
        kept = kept & (column >= low) & (column <= high)
        whole = kept & (column >= whole_low) & (column <= whole_high)
        cut_off = kept & (whole == 0)
        full_rank = full_count - 1 + tl.cumsum(whole.to(tl.int32), 0)
        partial_rank = partial_count - 1 + tl.cumsum(cut_off.to(tl.int32), 0)
        tl.store(full_indices + full_rank, column, mask=whole)
        tl.store(partial_indices + partial_rank, column, mask=cut_off)
        full_count += tl.sum(whole.to(tl.int32), 0)
        partial_count += tl.sum(cut_off.to(tl.int32), 0)
    tl.store(full + lists_row, full_count)
    tl.store(partial + lists_row, partial_count)
