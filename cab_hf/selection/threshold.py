"""Selection of key blocks from the logits of `score`, as a bitmap with one bit per key block.

A kernel computes attention shares from the logits, and compares their mean and maximum with the
thresholds. `reference.select_blocks` is the definition. Scoring and selection are separate
launches, because selection waits for memory most of the time. A multiprocessor runs too few scoring
programs to hide these waits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cab_hf.config import CabConfig, block_sizes, tail_sizes
from cab_hf.ops import reference as ops_reference
from cab_hf.ops.attention.tiles import LOG2_E
from cab_hf.plan import KeyRanges
from cab_hf.selection import gather, reference
from cab_hf.selection.gather import QuerySample
from cab_hf.selection.reference import ScoreOptions
from cab_hf.selection.score import (
    UNSPECIALIZED_ARGUMENTS,
    KeyExponents,
    SampleScoring,
    cap_logits,
    locate_tile_scratch,
    prepare_scoring,
    score_samples,
)
from cab_hf.selection.tiles import FP8, HeadRange, TilePlan, TileRange

# key blocks per iteration of a program, a multiple of the 32 bits of a word
BLOCKS_PER_ITERATION = 64
# warps per program: a program processes one query block of one head
WARPS = 1
# bytes that a thread loads with one instruction
LOAD_BYTES = tl.constexpr(16)
# arguments of `_threshold_kernel`, in addition to `UNSPECIALIZED_ARGUMENTS`, that change from
# launch to launch
UNSPECIALIZED_THRESHOLD_ARGUMENTS = [
    "mean_threshold",
    "max_threshold",
    "kv_heads",
    "kv_blocks",
    "num_words",
    "bounds_plane",
    "typical_columns",
    "outlier_columns",
    "all_typical_columns",
    "all_outlier_columns",
]


class SelectionRules(NamedTuple):
    """The blocks that query blocks attend to regardless of scores.

    Attributes:
        bounds: int32 [6, B, M_q], the visible, the forced and the full blocks of each query block,
            see `row_bounds` of `cab_hf.ops.reference`.
        marked: int8 [B, H_kv, M_k], 1 for blocks with a key that contains NaN or an infinity.
        tail_mask: bool [B, M_q], True for query blocks of the dense tail, which attend to all
            visible blocks; None if there is no tail.
        is_tail_listed: True if the lists of the tail contain all visible blocks. False if they are
            empty, because the plan names the query blocks of the tail.
    """

    bounds: Tensor
    marked: Tensor
    tail_mask: Tensor | None
    is_tail_listed: bool

    @classmethod
    def create(cls, exponents: Tensor, ranges: KeyRanges, config: CabConfig) -> SelectionRules:
        """Compute bounds and tail from the ranges, and marked blocks from the exponents of keys.

        Args:
            exponents: int8 [B, H_kv, N_k, 1], the exponents of the keys, see `gather.quantize`.
            ranges: Keys that each query may attend to.
            config: Settings of the selection.
        """
        query_block, key_block = block_sizes(config)
        bounds = ops_reference.row_bounds(
            ranges, query_block, key_block, config.sink_blocks, config.local_blocks
        )
        tail_tokens, _ = tail_sizes(config)
        has_tail = ranges.has_tail(tail_tokens, query_block)
        return cls(
            bounds=bounds,
            marked=gather.mark_blocks(exponents, ranges.key_valid, key_block),
            tail_mask=ranges.tail(tail_tokens, query_block) if has_tail else None,
            is_tail_listed=ranges.documents is None,
        )


class Bitmap(NamedTuple):
    """The selected key blocks of every query block of every head, one bit per key block.

    Attributes:
        bits: int32 [B, H, M_q, ceil(M_k / 32)]. Bit j % 32 of word j // 32 is set if block j is
            selected. Words that contain only invisible blocks are not initialised.
        counts: int32 [B, H, M_q], the number of selected blocks.
    """

    bits: Tensor
    counts: Tensor

    @classmethod
    def allocate(cls, rules: SelectionRules, num_heads: int) -> Bitmap:
        """Allocate a bitmap of ``num_heads`` heads per batch row without initialising it."""
        _, batch, q_blocks = rules.bounds.shape
        counts = rules.bounds.new_empty(batch, num_heads, q_blocks)
        num_words = triton.cdiv(rules.marked.shape[2], 32)
        return cls(bits=counts.new_empty((*counts.shape, num_words)), counts=counts)


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
    options: ScoreOptions,
) -> None:
    """Score the samples of a group of heads and write their bits to ``bitmap``, chunk by chunk.

    Args:
        bitmap: Bitmap of all heads, which receives the bits.
        samples: Result of `gather.sample_queries`.
        values: Stored keys [B, H_kv, N_k, C].
        exponents: int8 [B, H_kv, N_k, 1], exponents of the stored keys.
        plan: Sizes of the launches.
        rules: Blocks that are selected regardless of scores.
        heads: Heads of the samples.
        config: Settings of the selection.
        scores: float32 [heads, M_q, M_k], receives the scores, see `threshold_blocks`; None for no
            scores.
        options: Parameters of the logits; ``sinks`` and ``softcap`` are used.
    """
    scorings = prepare_scoring(samples, values, plan, config.key_block)
    key_exponents = KeyExponents.flatten(exponents) if values.dtype == FP8 else None
    softcap = None if options.softcap is None else options.softcap * LOG2_E.value
    for chunk in plan.chunks:
        for scoring in scorings:
            score_samples(
                scoring,
                values=values,
                exponents=key_exponents,
                plan=plan,
                chunk=chunk,
                heads=heads,
                key_block=config.key_block,
                sinks=options.sinks,
                softcap=softcap,
            )
        threshold_blocks(
            scorings,
            plan=plan,
            chunk=chunk,
            heads=heads,
            rules=rules,
            bitmap=bitmap,
            config=config,
            scores=scores,
            softcap=softcap,
        )


def threshold_blocks(
    scorings: list[SampleScoring],
    *,
    plan: TilePlan,
    chunk: TileRange,
    heads: HeadRange,
    rules: SelectionRules,
    bitmap: Bitmap,
    config: CabConfig,
    scores: Tensor | None,
    softcap: float | None,
) -> None:
    """Write the bits and counts of the query blocks of one chunk of tiles to ``bitmap``.

    Args:
        scorings: Scored typical queries, then scored outlier queries if there are any.
        plan: Sizes of the launches.
        chunk: One of ``plan.chunks``.
        heads: Heads of the samples.
        rules: Blocks that are selected regardless of scores.
        bitmap: Bitmap of all heads, which receives the bits.
        config: Settings of the selection.
        scores: float32 [heads, M_q, M_k], receives `reference.compute_block_scores` of the visible
            blocks. The scores of forced blocks are arbitrary. None for no scores.
        softcap: Soft cap of logits to base two; None for no cap.
    """
    typical_scoring, outlier_scoring = scorings[0], scorings[-1]
    typical_tiles, outlier_tiles = typical_scoring.tiles, outlier_scoring.tiles
    first_block = chunk.begin * plan.q_blocks_per_chunk_tile
    end_block = chunk.end * plan.q_blocks_per_chunk_tile
    batch, kv_heads, kv_blocks = rules.marked.shape
    tail_mode = "none"
    if rules.tail_mask is not None:
        tail_mode = "listed" if rules.is_tail_listed else "named"
    _threshold_kernel[(end_block - first_block, heads.num_heads)](
        typical_sample=typical_scoring.sample.tensors,
        outlier_sample=outlier_scoring.sample.tensors,
        bounds=rules.bounds,
        marked=rules.marked,
        tail_mask=bitmap.bits if rules.tail_mask is None else rules.tail_mask,
        bitmap=bitmap,
        scores=scores,
        softcap=softcap,
        typical_scratch=typical_scoring.scratch,
        outlier_scratch=outlier_scoring.scratch,
        typical_columns=typical_tiles.count_columns(plan.convert_chunk(typical_tiles, chunk)),
        outlier_columns=outlier_tiles.count_columns(plan.convert_chunk(outlier_tiles, chunk)),
        all_typical_columns=typical_tiles.num_columns,
        all_outlier_columns=outlier_tiles.num_columns,
        mean_threshold=config.mass_threshold,
        max_threshold=config.share_threshold,
        begin=first_block,
        first_head=heads.first_head,
        heads=heads.heads_per_row,
        kv_heads=kv_heads,
        q_blocks=plan.q_blocks,
        kv_blocks=kv_blocks,
        num_words=bitmap.bits.shape[-1],
        bounds_plane=batch * plan.q_blocks,
        TYPICAL=typical_tiles.num_samples,
        OUTLIERS=config.outlier_queries,
        TYPICAL_Q_BLOCKS=typical_tiles.q_blocks_per_tile,
        OUTLIER_Q_BLOCKS=outlier_tiles.q_blocks_per_tile,
        TYPICAL_KEY_BLOCK=typical_tiles.key_block,
        OUTLIER_KEY_BLOCK=outlier_tiles.key_block,
        TYPICAL_STEP=typical_tiles.blocks_per_step,
        OUTLIER_STEP=outlier_tiles.blocks_per_step,
        TYPICAL_GROWTH=typical_tiles.scratch_growth,
        OUTLIER_GROWTH=outlier_tiles.scratch_growth,
        WEIGHT=(config.query_block - config.outlier_queries) / typical_tiles.num_samples,
        THRESHOLD_BLOCKS=reference.THRESHOLD_KEYS / config.key_block,
        COLUMNS=BLOCKS_PER_ITERATION,
        TAIL=tail_mode,
        num_warps=WARPS,
    )


@triton.jit
def _compute_shares(
    sample, softcap, flat_block, logits, first_column, first_key, last_key, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the maximum and the sum, over the samples, of the attention shares of key blocks.

    The key blocks are ``first_column`` to ``first_column`` + COLUMNS - 1.

    Args:
        sample: `SampleTensors` of typical queries or of outlier queries.
        flat_block: Index of the query block among the query blocks of all heads of the launch.
        logits: Pointer to the first logit of the query block in the scratch, whose layout is
            [steps, ROWS, BLOCKS].
        first_column: The first of the key blocks.
        first_key, last_key: The first and the last sampled key that are visible to any sample. The
            scratch contains only steps of these keys.

    Returns:
        Maximum and sum, float32 [COLUMNS] each.
    """
    STEP: tl.constexpr = BLOCKS * KEY_BLOCK
    row = flat_block * COUNT + tl.arange(0, COUNT)
    qk_scale = tl.load(sample.scale + row)
    lse = tl.load(sample.lse + row)
    # the faster order of loads depends on the bytes of a row of a step. Logits of 8-bit products
    # have two bytes
    if BLOCKS * 2 >= LOAD_BYTES:
        # [COUNT, COLUMNS]: a thread holds adjacent key blocks of several samples
        column = first_column + tl.arange(0, COLUMNS)
        step = column // BLOCKS
        is_inside = (step >= first_key // STEP) & (step <= last_key // STEP)
        logit_offsets = step[None, :] * (ROWS * BLOCKS) + (column % BLOCKS)[None, :]
        logit_offsets += tl.arange(0, COUNT)[:, None] * BLOCKS
        block_max = tl.load(
            logits + logit_offsets, mask=is_inside[None, :], other=float("-inf")
        ).to(tl.float32)
        shares = tl.exp2(cap_logits(block_max * qk_scale[:, None], softcap) - lse[:, None])
        return tl.max(shares, 0), tl.sum(shares, 0)
    # [steps, COUNT * BLOCKS]: a thread holds samples of few key blocks
    step = first_column // BLOCKS + tl.arange(0, COLUMNS // BLOCKS)
    is_inside = (step >= first_key // STEP) & (step <= last_key // STEP)
    logit_offsets = step[:, None] * (ROWS * BLOCKS) + tl.arange(0, COUNT * BLOCKS)[None, :]
    block_max = tl.load(logits + logit_offsets, mask=is_inside[:, None], other=float("-inf")).to(
        tl.float32
    )
    block_max = tl.reshape(block_max, (step.shape[0], COUNT, BLOCKS))
    shares = tl.exp2(cap_logits(block_max * qk_scale[None, :, None], softcap) - lse[None, :, None])
    return tl.reshape(tl.max(shares, 1), (COLUMNS,)), tl.reshape(tl.sum(shares, 1), (COLUMNS,))


@triton.jit
def _find_visible_keys(sample, flat_block, COUNT: tl.constexpr):
    """Return the range of visible sampled keys of the samples of a query block.

    Returns:
        first_key: The first sampled key that is visible to any sample.
        last_key: The last sampled key that is visible to any sample.
        num_samples: Number of samples with a visible sampled key, float32.
    """
    row = flat_block * COUNT + tl.arange(0, COUNT)
    last_key = tl.load(sample.end + row)
    first_key = tl.where(last_key >= 0, tl.load(sample.start + row), 2147483647)
    return tl.min(first_key, 0), tl.max(last_key, 0), tl.sum((last_key >= 0).to(tl.float32), 0)


# these arguments change from call to call: without specialisation, Triton compiles once
@triton.jit(do_not_specialize=[*UNSPECIALIZED_ARGUMENTS[2:], *UNSPECIALIZED_THRESHOLD_ARGUMENTS])
def _threshold_kernel(
    typical_sample,
    outlier_sample,
    bounds,
    marked,
    tail_mask,
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
    num_words,
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
    COLUMNS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Write the bitmap of one query block of a head from the logits of its samples.

    ``bounds_plane`` is the stride, in elements, between the different bounds in ``bounds``.
    ``begin`` is the first query block of the launch. TAIL is "none" for no dense tail, and "listed"
    if the tail selects all visible blocks. TAIL is "named" if the tail selects no block, because
    the plan names the query blocks of the tail.
    """
    # query block, its scratch, and the visible sampled keys and the weight of its samples: scalars
    TYPICAL_ROWS: tl.constexpr = TYPICAL_Q_BLOCKS * TYPICAL
    launch_head = tl.program_id(1)
    # the last query blocks start first, because their programs have the most visible keys
    block = begin + tl.num_programs(0) - 1 - tl.program_id(0)
    if block >= q_blocks:
        return
    # index of the query block among the query blocks of all heads of the launch
    flat_block = launch_head.to(tl.int64) * q_blocks + block
    typical_logits = locate_tile_scratch(
        typical_scratch, launch_head=launch_head, tile=block // TYPICAL_Q_BLOCKS,
        begin=begin // TYPICAL_Q_BLOCKS, columns=typical_columns,
        all_columns=all_typical_columns, ROWS=TYPICAL_ROWS, GROWTH=TYPICAL_GROWTH,
    )  # fmt: skip
    typical_logits += block % TYPICAL_Q_BLOCKS * (TYPICAL * TYPICAL_STEP)
    first_typical_key, last_typical_key, num_samples = _find_visible_keys(
        typical_sample, flat_block, TYPICAL
    )
    weight = num_samples * WEIGHT
    if OUTLIERS > 0:
        OUTLIER_ROWS: tl.constexpr = OUTLIER_Q_BLOCKS * OUTLIERS
        outlier_logits = locate_tile_scratch(
            outlier_scratch, launch_head=launch_head, tile=block // OUTLIER_Q_BLOCKS,
            begin=begin // OUTLIER_Q_BLOCKS, columns=outlier_columns,
            all_columns=all_outlier_columns, ROWS=OUTLIER_ROWS, GROWTH=OUTLIER_GROWTH,
        )  # fmt: skip
        outlier_logits += block % OUTLIER_Q_BLOCKS * (OUTLIERS * OUTLIER_STEP)
        first_outlier_key, last_outlier_key, num_samples = _find_visible_keys(
            outlier_sample, flat_block, OUTLIERS
        )
        weight += num_samples
    # bounds of the query block, see `row_bounds`, and the threshold of its share sums: scalars
    batch = (first_head + launch_head) // heads
    batch_block = batch * q_blocks + block
    first_visible = tl.load(bounds + batch_block)
    last_visible = tl.load(bounds + bounds_plane + batch_block)
    end_of_sinks = tl.load(bounds + 2 * bounds_plane + batch_block)
    first_local = tl.load(bounds + 3 * bounds_plane + batch_block)
    # a query block with more keys spreads its attention over more blocks
    length_factor = tl.maximum((last_visible - first_visible + 1) / THRESHOLD_BLOCKS, 1.0)
    weight = tl.maximum(weight, 1e-30) / length_factor
    min_share_sum = mean_threshold * weight
    if TAIL != "none":
        is_tail = tl.load(tail_mask + batch_block) != 0
    kv_head = (first_head + launch_head) % heads // (heads // kv_heads)
    flat_kv_head = batch * kv_heads + kv_head
    marked += flat_kv_head.to(tl.int64) * kv_blocks
    # index of the query block among the query blocks of all heads of all batch rows
    bitmap_row = (first_head + launch_head).to(tl.int64) * q_blocks + block
    num_selected = 0
    for first_column in range(first_visible // COLUMNS * COLUMNS, last_visible + 1, COLUMNS):
        # maximum and weighted sum of the shares over all samples [COLUMNS]
        max_share, share_sum = _compute_shares(
            typical_sample, softcap=softcap, flat_block=flat_block, logits=typical_logits,
            first_column=first_column, first_key=first_typical_key, last_key=last_typical_key,
            COLUMNS=COLUMNS, BLOCKS=TYPICAL_STEP, ROWS=TYPICAL_ROWS, COUNT=TYPICAL,
            KEY_BLOCK=TYPICAL_KEY_BLOCK,
        )  # fmt: skip
        share_sum *= WEIGHT
        if OUTLIERS > 0:
            outlier_max, outlier_sum = _compute_shares(
                outlier_sample, softcap=softcap, flat_block=flat_block, logits=outlier_logits,
                first_column=first_column, first_key=first_outlier_key, last_key=last_outlier_key,
                COLUMNS=COLUMNS, BLOCKS=OUTLIER_STEP, ROWS=OUTLIER_ROWS, COUNT=OUTLIERS,
                KEY_BLOCK=OUTLIER_KEY_BLOCK,
            )  # fmt: skip
            share_sum += outlier_sum
            max_share = tl.maximum(max_share, outlier_max)
        # selected key blocks and their scores [COLUMNS]. ``~(x < threshold)`` also selects the
        # blocks whose share is NaN, because a sampled query contains NaN
        column = first_column + tl.arange(0, COLUMNS)
        is_selected = ~(share_sum < min_share_sum) | (max_share >= max_threshold)
        is_marked = tl.load(marked + column, mask=column < kv_blocks, other=0) != 0
        if scores is not None:
            score = tl.where(
                max_share >= max_threshold, 1 + max_share, tl.minimum(share_sum / weight, 1.0)
            )
            score = tl.where(share_sum == share_sum, score, 1.0)
            score = tl.where(is_marked, float("inf"), score)
            tl.store(scores + flat_block * kv_blocks + column, score, mask=column < kv_blocks)
        is_selected |= is_marked | (column < end_of_sinks) | (column >= first_local)
        if TAIL == "listed":
            is_selected |= is_tail
        is_selected &= (column >= first_visible) & (column <= last_visible)
        if TAIL == "named":
            is_selected &= is_tail == 0
        # words of 32 bits [COLUMNS // 32]
        bits = is_selected.to(tl.int32)
        num_selected += tl.sum(bits, 0)
        bits = tl.reshape(bits, (COLUMNS // 32, 32)) << tl.arange(0, 32)[None, :]
        word_index = first_column // 32 + tl.arange(0, COLUMNS // 32)
        tl.store(
            bitmap.bits + bitmap_row * num_words + word_index,
            tl.sum(bits, 1),
            mask=word_index < num_words,
        )
    tl.store(bitmap.counts + bitmap_row, num_selected)
