"""Selection by rows on the GPU, from q and scored keys to `BlockIndices`.

The definition is `cab_hf.predictors.rows.choose_by_reference`. No step waits for the device, and no
shape depends on data, unless lists would be larger than `LISTS_AT_MOST`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.config import CabConfig, blocks_of, num_typical_queries, tail_of
from cab_hf.ops import marks, reference, rows, top_k
from cab_hf.ops.launch import on_device_of
from cab_hf.ops.sweep import RowRules, kept_blocks
from cab_hf.plan import BlockIndices, KeyRanges, crossed_blocks

# bytes of lists that are allocated at the largest width a row could need. The width of larger lists
# is computed first, which synchronises with the device once
LISTS_AT_MOST = 2 << 30
# bytes of scores alive at a time if rows are capped; larger scores are computed in groups of heads
SCORE_BYTES_AT_A_TIME = 1 << 30
# columns that a program converts to lists at a time
CHUNK = 128


def keys_of(k: Tensor, channels: tuple[int, ...]) -> list[Tensor]:
    """Return `rows.scored_keys` of k [B, H_kv, N_k, D], in the dtype that the device multiplies."""
    with on_device_of(k):
        return list(rows.scored_keys(k, channels, rows.scored_dtype(k)))


def choose(
    q: Tensor,
    keys: Tensor,
    exponents: Tensor,
    ranges: KeyRanges,
    scale: float,
    channels: tuple[int, ...],
    config: CabConfig,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[BlockIndices, BlockIndices]:
    """Return the lists of full and of partial key blocks that each block of q attends.

    Query blocks of ``ranges.tail_rows``, if any, list nothing: the plan must name these rows. Safe
    in a CUDA graph after the table of channels has been copied to the device.

    Args:
        q: [B, H, N_q, D].
        keys, exponents: From `keys_of`, for the same ``channels``.
        sinks, softcap: See `reference.mass_by_rows`.
    """
    batch, heads, length, _ = q.shape
    blocks = blocks_of(config)
    kv_blocks = triton.cdiv(keys.shape[2], config.key_block)
    whole = length == keys.shape[2] and ranges.consecutive
    with on_device_of(q):
        bounds = reference.row_bounds(ranges, *blocks, config.sink_blocks, config.local_blocks)
        ends = ranges.tail(*tail_of(config)) if ranges.has_tail(*tail_of(config)) else None
        thresholds = config.mass_threshold, config.share_threshold
        rules = RowRules(bounds, *thresholds, ends, ranges.documents is None)
        marked = marks.marked_blocks(exponents, ranges.key_valid, config.key_block)
        counts = bounds.new_empty(batch, heads, bounds.shape[2])
        bits = counts.new_empty(*counts.shape, triton.cdiv(kv_blocks, 32))

        def sweep(start: int, some: int, scores: Tensor | None = None) -> None:
            planes, outliers = (start, some), None
            if count := config.outlier_queries:
                outliers = rows.scored_rows(
                    q,
                    ranges,
                    planes,
                    scale,
                    query_block=config.query_block,
                    count=count,
                    channels=channels,
                    dtype=keys.dtype,
                    positions=rows.outliers(q, ranges, planes, config.query_block, count),
                )
            typical = rows.scored_rows(
                q,
                ranges,
                planes,
                scale,
                query_block=config.query_block,
                count=num_typical_queries(config),
                channels=channels,
                dtype=keys.dtype,
                key_stride=config.typical_key_stride,
            )
            given = keys, exponents, marked, rules, start, heads, blocks, whole, bits, counts
            kept_blocks(outliers, typical, *given, scores, sinks, softcap)

        crossed = crossed_blocks(*blocks)
        if config.max_density < 1:
            room = kv_blocks
            if ends is None or not rules.tail_listed:
                # one more than the share, which is rounded up, here in floating point; and one more
                # than the forced blocks, for a marked block
                forced = config.sink_blocks + max(config.local_blocks, crossed) + 1
                room = max(int(config.max_density * kv_blocks) + 2, forced)
            made = _empty_lists(counts, min(kv_blocks, room), crossed if ranges.aligned else room)
            _fill_capped(sweep, rules, counts, made, marked, config.max_density)
            return made
        sweep(0, batch * heads)
        room = kv_blocks
        if 4 * counts.numel() * room > LISTS_AT_MOST and not _capturing(q):
            room = max(1, int(counts.max()))
        made = _empty_lists(counts, room, crossed if ranges.aligned else room)
        fill_lists(bits, bounds, *made)
    return made


def _empty_lists(counts: Tensor, full: int, partial: int) -> tuple[BlockIndices, BlockIndices]:
    """Allocate lists with ``full`` and ``partial`` indices per row; ``counts`` is [B, H, M_q]."""
    rooms = full, min(full, partial)
    full, partial = (counts.new_empty(*counts.shape, room) for room in rooms)
    return BlockIndices(torch.empty_like(counts), full), BlockIndices(
        torch.empty_like(counts), partial
    )


def _fill_capped(
    sweep: Callable[[int, int, Tensor], None],
    rules: RowRules,
    counts: Tensor,
    made: tuple[BlockIndices, BlockIndices],
    marked: Tensor,
    max_density: float,
) -> None:
    """Fill the lists of rows that select at most a share: the best of the blocks above a threshold.

    Args:
        marked: int8 [B, H_kv, M_k], `marks.marked_blocks`.
    """
    (batch, heads, q_blocks), kv_blocks = counts.shape, marked.shape[2]
    cap = reference.most_of_rows(rules.bounds, max_density, marked)
    if rules.tail is not None:
        first, last = rules.bounds[:2]
        cap = torch.where(rules.tail.unsqueeze(1), (last - first + 1).unsqueeze(1), cap)
    cap = cap.repeat_interleave(heads // cap.shape[1], dim=1)
    step = max(1, SCORE_BYTES_AT_A_TIME // (4 * q_blocks * kv_blocks))
    for row, start in product(range(batch), range(0, heads, step)):
        some = min(step, heads - start)
        scores = cap.new_empty(1, some, q_blocks, kv_blocks, dtype=torch.float32)
        sweep(row * heads + start, some, scores)
        wanted = counts[row : row + 1].minimum(cap[row : row + 1])
        own = [x[row : row + 1] for lists in made for x in (lists.counts, lists.indices)]
        top_k.select(scores, rules.bounds[:, row : row + 1].contiguous(), wanted, start, tuple(own))


def _capturing(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def fill_lists(bits: Tensor, bounds: Tensor, full: BlockIndices, partial: BlockIndices) -> None:
    """Fill the lists of every row, [B, H, M_q], with the blocks whose bits are set, ascending.

    Blocks that all queries of a row see completely are full, the others are partial.

    Args:
        bits: int32 [B, H, M_q, W]: bit j % 32 of word j // 32 is set if a row selects block j.
        bounds: int32 [6, B, M_q], `reference.row_bounds`.
        full, partial: Lists that are wide enough for the selected blocks of each kind.
    """
    heads, q_blocks, words = bits.shape[1:]
    _lists_kernel[(full.counts.numel(),)](
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
def _lists_kernel(
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
    row = tl.program_id(0).to(tl.int64)
    at = bounds + row // (heads * q_blocks) * q_blocks + row % q_blocks
    plane = tl.num_programs(0) // heads
    low = tl.load(at)
    high = tl.load(at + plane)
    # the blocks that all queries of the row see completely
    whole_low = tl.load(at + 4 * plane)
    whole_high = tl.load(at + 5 * plane)
    bits += row * words
    full += row * full_width
    partial += row * partial_width
    full_count = 0
    partial_count = 0
    for first in range(low // CHUNK * CHUNK, high + 1, CHUNK):
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
