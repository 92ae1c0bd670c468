"""Selection of key blocks from scores: shares, their weighted mean and maximum, one bit per block.

`reference.selected_blocks` is the definition. This work is a launch of its own: few scoring
programs fit on a multiprocessor, and there it would mostly wait for memory.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cab_hf.config import CabConfig, blocks_of, tail_of
from cab_hf.ops import reference as definitions
from cab_hf.ops.attention.tiles import LOG2_E
from cab_hf.plan import KeyRanges
from cab_hf.selection import gather, reference
from cab_hf.selection.gather import QuerySample
from cab_hf.selection.score import (
    POSITIONS,
    KeyExponents,
    Stream,
    capped,
    open_streams,
    score_samples,
    scratch_of,
)
from cab_hf.selection.tiles import FP8, HeadRange, TilePlan, TileRange

# key blocks per step of a row, whole words of bits
CHUNK = 64
WARPS = 1
# bytes that a lane loads at a time
BYTES_OF_A_LOAD = tl.constexpr(16)
# further arguments whose values must not cause another compilation
NUMBERS = ["mean_threshold", "max_threshold", "kv_heads", "kv_blocks", "words", "bounds_plane"]
NUMBERS += ["typical_columns", "outlier_columns", "all_typical_columns", "all_outlier_columns"]


class SelectionRules(NamedTuple):
    """Thresholds, and the blocks that query blocks attend regardless of scores.

    Attributes:
        bounds: int32 [6, B, M_q], `row_bounds` of `cab_hf.ops.reference`.
        marked: int8 [B, H_kv, M_k], blocks with a key that is not finite.
        tail: bool [B, M_q], query blocks that attend to everything; None if there are none.
        is_tail_listed: True if such query blocks list all blocks. Otherwise they list nothing, and
            the plan names them.
    """

    bounds: Tensor
    marked: Tensor
    tail: Tensor | None
    is_tail_listed: bool

    @classmethod
    def create(cls, exponents: Tensor, ranges: KeyRanges, config: CabConfig) -> SelectionRules:
        """Compute the rules for keys with these exponents, int8 [B, H_kv, N_k, 1]."""
        query_block, key_block = blocks_of(config)
        bounds = definitions.row_bounds(
            ranges, query_block, key_block, config.sink_blocks, config.local_blocks
        )
        tokens, _ = tail_of(config)
        has_tail = ranges.has_tail(tokens, query_block)
        tail = ranges.tail(tokens, query_block) if has_tail else None
        marked = gather.marked_blocks(exponents, ranges.key_valid, key_block)
        return cls(bounds, marked, tail, ranges.documents is None)


class Bitmap(NamedTuple):
    """Selected blocks of every query block of every head.

    Attributes:
        bits: int32 [B, H, M_q, ceil(M_k / 32)]: bit j % 32 of word j // 32 is set if block j is
            selected. Words of blocks that are invisible to a query block are undefined.
        counts: int32 [B, H, M_q], the number of selected blocks.
    """

    bits: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, rules: SelectionRules, num_heads: int) -> Bitmap:
        """Allocate the bitmap of ``num_heads`` heads per batch row."""
        _, batch, q_blocks = rules.bounds.shape
        counts = rules.bounds.new_empty(batch, num_heads, q_blocks)
        words = triton.cdiv(rules.marked.shape[2], 32)
        return cls(counts.new_empty(*counts.shape, words), counts)


class LogitRules(NamedTuple):
    """Changes of logits in addition to their scale.

    Attributes:
        sinks: [H], one logit per head that takes part in the softmax; None without.
        softcap: Soft cap of the logits; None for no cap.
    """

    sinks: Tensor | None
    softcap: float | None


def fill_bitmap(
    *,
    bitmap: Bitmap,
    samples: list[QuerySample],
    values: Tensor,
    exponents: Tensor,
    plan: TilePlan,
    rules: SelectionRules,
    heads: HeadRange,
    config: CabConfig,
    scores: Tensor | None,
    logits: LogitRules,
) -> None:
    """Score the samples of some heads and fill their bits, part by part of the scratch.

    Args:
        samples: `gather.sample_queries`.
        values, exponents: Fields of `api.QuantizedKeys`.
        scores: See `threshold_blocks`.
    """
    streams = open_streams(samples, values, plan, config.key_block)
    key_exponents = KeyExponents.of(exponents) if values.dtype == FP8 else None
    softcap = None if logits.softcap is None else logits.softcap * LOG2_E.value
    for part in plan.parts:
        for stream in streams:
            score_samples(
                stream,
                values=values,
                exponents=key_exponents,
                plan=plan,
                part=part,
                heads=heads,
                key_block=config.key_block,
                sinks=logits.sinks,
                softcap=softcap,
            )
        threshold_blocks(
            streams,
            plan=plan,
            part=part,
            heads=heads,
            rules=rules,
            bitmap=bitmap,
            config=config,
            scores=scores,
            softcap=softcap,
        )


def threshold_blocks(
    streams: list[Stream],
    *,
    plan: TilePlan,
    part: TileRange,
    heads: HeadRange,
    rules: SelectionRules,
    bitmap: Bitmap,
    config: CabConfig,
    scores: Tensor | None,
    softcap: float | None,
) -> None:
    """Fill the bitmap for the query blocks of one part of the tiles.

    Args:
        streams: Typical queries, then outliers if there are any, scored by `score`.
        scores: float32 [heads, M_q, M_k], receives `reference.ranks` of each visible block. The
            rank of a forced block is any number. None for no ranks.
        softcap: Soft cap of logits to base two; None for no cap.
    """
    typical, outlier = streams[0], streams[-1]
    num_outliers = config.outlier_queries
    typical_tiles, outlier_tiles = typical.tiles, outlier.tiles
    begin = part.begin * plan.q_blocks_per_part_tile
    end = part.end * plan.q_blocks_per_part_tile
    batch, kv_heads, kv_blocks = rules.marked.shape
    tail_mode = "listed" if rules.is_tail_listed else "named"
    _threshold_kernel[(end - begin, heads.count)](
        typical.sample.tensors,
        outlier.sample.tensors,
        rules.bounds,
        rules.marked,
        bitmap.bits if rules.tail is None else rules.tail,
        bitmap,
        scores,
        softcap,
        typical.scratch,
        outlier.scratch,
        typical_tiles.columns(plan.tiles_of(typical_tiles, part)),
        outlier_tiles.columns(plan.tiles_of(outlier_tiles, part)),
        typical_tiles.all_columns,
        outlier_tiles.all_columns,
        config.mass_threshold,
        config.share_threshold,
        begin,
        heads.first,
        heads.per_row,
        kv_heads,
        plan.q_blocks,
        kv_blocks,
        bitmap.bits.shape[-1],
        batch * plan.q_blocks,
        TYPICAL=typical_tiles.num_samples,
        OUTLIERS=num_outliers,
        TYPICAL_Q_BLOCKS=typical_tiles.q_blocks_per_tile,
        OUTLIER_Q_BLOCKS=outlier_tiles.q_blocks_per_tile,
        TYPICAL_KEY_BLOCK=typical_tiles.key_block,
        OUTLIER_KEY_BLOCK=outlier_tiles.key_block,
        TYPICAL_STEP=typical_tiles.blocks_per_step,
        OUTLIER_STEP=outlier_tiles.blocks_per_step,
        TYPICAL_GROWTH=typical_tiles.scratch_growth,
        OUTLIER_GROWTH=outlier_tiles.scratch_growth,
        WEIGHT=(config.query_block - num_outliers) / typical_tiles.num_samples,
        THRESHOLD_BLOCKS=reference.THRESHOLD_KEYS / config.key_block,
        CHUNK=CHUNK,
        TAIL="none" if rules.tail is None else tail_mode,
        num_warps=WARPS,
    )


@triton.jit
def _shares(
    sample, softcap, line, logits, begins, first, last, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COUNT: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the maximum and the sum of the shares that the samples of a query block give.

    Args:
        line: The query block.
        logits: Pointer to the logits of its samples, [steps, ROWS, BLOCKS].
        begins: The first of CHUNK key blocks.
        first, last: Range of sampled keys visible to any sample. The scratch has no other steps.

    Returns:
        Two tensors [CHUNK], one number per key block.
    """
    STEP: tl.constexpr = BLOCKS * KEY_BLOCK
    row = line * COUNT + tl.arange(0, COUNT)
    qk_scale = tl.load(sample.scale + row)
    lse = tl.load(sample.lse + row)
    if BLOCKS * 2 >= BYTES_OF_A_LOAD:
        # [COUNT, CHUNK]: a lane holds neighbouring key blocks of several samples
        column = begins + tl.arange(0, CHUNK)
        step = column // BLOCKS
        is_inside = (step >= first // STEP) & (step <= last // STEP)
        cell = step[None, :] * (ROWS * BLOCKS) + (column % BLOCKS)[None, :]
        cell += tl.arange(0, COUNT)[:, None] * BLOCKS
        block_max = tl.load(logits + cell, mask=is_inside[None, :], other=float("-inf")).to(
            tl.float32
        )
        share = tl.exp2(capped(block_max * qk_scale[:, None], softcap) - lse[:, None])
        return tl.max(share, 0), tl.sum(share, 0)
    # [steps, COUNT * BLOCKS]: a lane holds samples of few key blocks
    step = begins // BLOCKS + tl.arange(0, CHUNK // BLOCKS)
    is_inside = (step >= first // STEP) & (step <= last // STEP)
    cell = step[:, None] * (ROWS * BLOCKS) + tl.arange(0, COUNT * BLOCKS)[None, :]
    block_max = tl.load(logits + cell, mask=is_inside[:, None], other=float("-inf")).to(tl.float32)
    block_max = tl.reshape(block_max, (step.shape[0], COUNT, BLOCKS))
    share = tl.exp2(capped(block_max * qk_scale[None, :, None], softcap) - lse[None, :, None])
    return tl.reshape(tl.max(share, 1), (CHUNK,)), tl.reshape(tl.sum(share, 1), (CHUNK,))


@triton.jit
def _seen_by(sample, line, COUNT: tl.constexpr):
    """Return the first and last visible key of the samples, and the number of samples with keys."""
    row = line * COUNT + tl.arange(0, COUNT)
    last = tl.load(sample.end + row)
    first = tl.where(last >= 0, tl.load(sample.start + row), 2147483647)
    return tl.min(first, 0), tl.max(last, 0), tl.sum((last >= 0).to(tl.float32), 0)


@triton.jit(do_not_specialize=[*POSITIONS[2:], *NUMBERS])
def _threshold_kernel(
    typical,
    outliers,
    bounds,
    marked,
    tails,
    bitmap,
    scores,
    softcap,
    typical_scratch,
    outlier_scratch,
    typical_columns,
    outlier_columns,
    all_typical_columns,
    all_outlier_columns,
    mean_threshold,
    max_threshold,
    begin,
    first_head,
    heads,
    kv_heads,
    q_blocks,
    kv_blocks,
    words,
    bounds_plane,
    TYPICAL: tl.constexpr,
    OUTLIERS: tl.constexpr,
    TYPICAL_Q_BLOCKS: tl.constexpr,
    OUTLIER_Q_BLOCKS: tl.constexpr,
    TYPICAL_KEY_BLOCK: tl.constexpr,
    OUTLIER_KEY_BLOCK: tl.constexpr,
    TYPICAL_STEP: tl.constexpr,
    OUTLIER_STEP: tl.constexpr,
    TYPICAL_GROWTH: tl.constexpr,
    OUTLIER_GROWTH: tl.constexpr,
    WEIGHT: tl.constexpr,
    THRESHOLD_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Write the bitmap of one query block of a head from the logits of its samples.

    ``begin`` is the first query block of the launch.
    """
    # scratch of the query block, visible sampled keys and weight of its samples: scalars
    TYPICAL_ROWS: tl.constexpr = TYPICAL_Q_BLOCKS * TYPICAL
    plane = tl.program_id(1)
    # the longest rows start first
    block = begin + tl.num_programs(0) - 1 - tl.program_id(0)
    if block >= q_blocks:
        return
    line = plane.to(tl.int64) * q_blocks + block
    typical_logits = scratch_of(
        typical_scratch, plane, block // TYPICAL_Q_BLOCKS, begin // TYPICAL_Q_BLOCKS,
        typical_columns, all_typical_columns, TYPICAL_ROWS, TYPICAL_GROWTH,
    )  # fmt: skip
    typical_logits += block % TYPICAL_Q_BLOCKS * (TYPICAL * TYPICAL_STEP)
    first, last, num_samples = _seen_by(typical, line, TYPICAL)
    weight = num_samples * WEIGHT
    if OUTLIERS > 0:
        OUTLIER_ROWS: tl.constexpr = OUTLIER_Q_BLOCKS * OUTLIERS
        outlier_logits = scratch_of(
            outlier_scratch, plane, block // OUTLIER_Q_BLOCKS, begin // OUTLIER_Q_BLOCKS,
            outlier_columns, all_outlier_columns, OUTLIER_ROWS, OUTLIER_GROWTH,
        )  # fmt: skip
        outlier_logits += block % OUTLIER_Q_BLOCKS * (OUTLIERS * OUTLIER_STEP)
        outlier_first, outlier_last, num_samples = _seen_by(outliers, line, OUTLIERS)
        weight += num_samples
    # bounds of the query block, and thresholds that do not depend on its number of keys: scalars
    at = (first_head + plane) // heads * q_blocks + block
    lowest = tl.load(bounds + at)
    highest = tl.load(bounds + bounds_plane + at)
    sinks = tl.load(bounds + 2 * bounds_plane + at)
    local = tl.load(bounds + 3 * bounds_plane + at)
    # a row with more keys spreads its attention over more blocks
    longer = tl.maximum((highest - lowest + 1) / THRESHOLD_BLOCKS, 1.0)
    weight = tl.maximum(weight, 1e-30) / longer
    min_share_sum = mean_threshold * weight
    if TAIL != "none":
        tail = tl.load(tails + at) != 0
    kv_head = (first_head + plane) % heads // (heads // kv_heads)
    kv_plane = (first_head + plane) // heads * kv_heads + kv_head
    marked += kv_plane.to(tl.int64) * kv_blocks
    # index over all heads; the other indices count the heads of this launch
    own = (first_head + plane).to(tl.int64) * q_blocks + block
    found = 0
    for begins in range(lowest // CHUNK * CHUNK, highest + 1, CHUNK):
        # shares of CHUNK key blocks: maximum and weighted sum over samples [CHUNK]
        max_share, share_sum = _shares(
            typical, softcap, line, typical_logits, begins, first, last, CHUNK, TYPICAL_STEP,
            TYPICAL_ROWS, TYPICAL, TYPICAL_KEY_BLOCK,
        )  # fmt: skip
        share_sum *= WEIGHT
        if OUTLIERS > 0:
            outlier_max, outlier_sum = _shares(
                outliers, softcap, line, outlier_logits, begins, outlier_first, outlier_last, CHUNK,
                OUTLIER_STEP, OUTLIER_ROWS, OUTLIERS, OUTLIER_KEY_BLOCK,
            )  # fmt: skip
            share_sum += outlier_sum
            max_share = tl.maximum(max_share, outlier_max)
        # selected key blocks [CHUNK], and their ranks. NaN, the share if a sampled query is not
        # finite, is not below any threshold
        column = begins + tl.arange(0, CHUNK)
        keep = ~(share_sum < min_share_sum) | (max_share >= max_threshold)
        is_marked = tl.load(marked + column, mask=column < kv_blocks, other=0) != 0
        if scores is not None:
            score = tl.where(
                max_share >= max_threshold, 1 + max_share, tl.minimum(share_sum / weight, 1.0)
            )
            score = tl.where(share_sum == share_sum, score, 1.0)
            score = tl.where(is_marked, float("inf"), score)
            tl.store(scores + line * kv_blocks + column, score, mask=column < kv_blocks)
        keep |= is_marked | (column < sinks) | (column >= local)
        if TAIL == "listed":
            keep |= tail
        keep &= (column >= lowest) & (column <= highest)
        if TAIL == "named":
            keep &= tail == 0
        # bits [CHUNK // 32]
        found += tl.sum(keep.to(tl.int32), 0)
        word = tl.reshape(keep.to(tl.int32), (CHUNK // 32, 32)) << tl.arange(0, 32)[None, :]
        place = begins // 32 + tl.arange(0, CHUNK // 32)
        tl.store(bitmap.bits + own * words + place, tl.sum(word, 1), mask=place < words)
    tl.store(bitmap.counts + own, found)
