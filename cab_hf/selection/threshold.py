"""Selection of key blocks from the logits of `score`, as a bitmap with one bit per key block.

A kernel computes attention shares from the logits, and compares their mean and maximum with the
thresholds. `reference.select_blocks` is the definition. Scoring and selection are separate
launches, because selection waits for memory most of the time. A multiprocessor runs too few scoring
programs to hide these waits.
"""

from __future__ import annotations

import dataclasses
from itertools import cycle
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cab_hf.config import CabConfig, block_sizes, tail_and_query_block_sizes
from cab_hf.ops import launch
from cab_hf.ops import reference as ops_reference
from cab_hf.ops.attention.tiles import LOG2_E
from cab_hf.plan import KeyRanges
from cab_hf.selection import gather, reference
from cab_hf.selection.gather import QuerySample
from cab_hf.selection.reference import ScoreOptions
from cab_hf.selection.score import (
    UNSPECIALIZED_ARGUMENTS,
    KeyScaleExponents,
    SampleScoring,
    cap_logits,
    locate_tile_scratch,
    prepare_scoring,
    score_samples,
)
from cab_hf.selection.tiles import FP8, HeadRange, TilePlan, TileRange

# key blocks per iteration of a program, a multiple of the 32 bits of a word
KEY_BLOCKS_PER_ITERATION = 64
# warps per program: a program processes one query block of one head
WARPS_PER_PROGRAM = 1
# bytes that a thread loads with one instruction
BYTES_PER_LOAD = tl.constexpr(16)
# arguments of `_threshold_kernel`, in addition to `UNSPECIALIZED_ARGUMENTS`, that change from
# launch to launch
UNSPECIALIZED_THRESHOLD_ARGUMENTS = [
    "first_q_block",
    "mass_threshold",
    "share_threshold",
    "kv_heads",
    "kv_blocks",
    "num_words",
    "block_bounds_stride",
    "min_visible_blocks",
    "max_visible_blocks",
    "typical_columns_per_head",
    "outlier_columns_per_head",
    "typical_columns_per_tile",
    "outlier_columns_per_tile",
]


class SelectionRules(NamedTuple):
    """The blocks that query blocks attend to regardless of scores.

    Attributes:
        block_bounds: int32 [6, B, M_q], the visible, the forced and the full blocks of each query
            block, see `compute_block_bounds` of `cab_hf.ops.reference`.
        marked_blocks: int8 [B, H_kv, M_k], 1 for blocks with a key that contains NaN or an
            infinity.
        tail_mask: bool [B, M_q], True for query blocks of the dense tail, which attend to all
            visible blocks; None if there is no tail.
        is_tail_listed: True if the lists of the tail contain all visible blocks. False if they are
            empty, because the plan names the query blocks of the tail.
    """

    block_bounds: Tensor
    marked_blocks: Tensor
    tail_mask: Tensor | None
    is_tail_listed: bool

    @classmethod
    def create(
        cls, key_scale_exponents: Tensor, key_ranges: KeyRanges, config: CabConfig
    ) -> SelectionRules:
        """Compute bounds and tail from the ranges, and marked blocks from the exponents of keys.

        Args:
            key_scale_exponents: int8 [B, H_kv, N_k, 1], the exponents of the keys, see
                `gather.quantize`.
            key_ranges: Keys that each query may attend to.
            config: Settings of the selection.
        """
        query_block, key_block = block_sizes(config)
        block_bounds = ops_reference.compute_block_bounds(
            key_ranges, query_block, key_block, config.sink_blocks, config.local_blocks
        )
        tail_tokens, _ = tail_and_query_block_sizes(config)
        has_tail = key_ranges.has_tail(tail_tokens, query_block)
        return cls(
            block_bounds=block_bounds,
            marked_blocks=gather.mark_blocks(key_scale_exponents, key_ranges.key_valid, key_block),
            tail_mask=key_ranges.tail(tail_tokens, query_block) if has_tail else None,
            is_tail_listed=key_ranges.documents is None,
        )


class SamplePass(NamedTuple):
    """The query blocks that are scored with one sample: the full or the smaller one.

    Attributes:
        config: Settings of the sample.
        ranges: Keys that each query may attend to. The queries of all other query blocks are
            padding here, so that they are not sampled.
        min_visible_blocks: Smallest number of visible key blocks of a query block of the pass.
        max_visible_blocks: Largest number of visible key blocks of a query block of the pass.
    """

    config: CabConfig
    ranges: KeyRanges
    min_visible_blocks: int
    max_visible_blocks: int


def split_by_sample(
    selection_rules: SelectionRules, key_ranges: KeyRanges, config: CabConfig
) -> list[SamplePass]:
    """Return a pass for the full sample, and one for `reference.shrink_sample` if it may be needed.

    Args:
        selection_rules: Its ``block_bounds`` contain the visible blocks of each query block.
        key_ranges: Keys that each query may attend to.
        config: Settings of the full sample.
    """
    kv_blocks = selection_rules.marked_blocks.shape[2]
    max_full_sample_blocks = reference.MAX_KEYS_AT_FULL_SAMPLE // config.key_block
    if kv_blocks <= max_full_sample_blocks:
        return [SamplePass(config, key_ranges, min_visible_blocks=0, max_visible_blocks=kv_blocks)]
    first_visible, last_visible = selection_rules.block_bounds[:2]
    has_small_sample = last_visible - first_visible + 1 > max_full_sample_blocks
    # [B, N_q]: the size of the sample of each query
    has_small_sample = has_small_sample.repeat_interleave(config.query_block, dim=1)
    has_small_sample = has_small_sample[:, : key_ranges.q_length]
    full_sample_ranges, small_sample_ranges = (
        dataclasses.replace(key_ranges, end=key_ranges.end.masked_fill(is_other_sample, -1))
        for is_other_sample in (has_small_sample, ~has_small_sample)
    )
    return [
        SamplePass(
            config,
            full_sample_ranges,
            min_visible_blocks=0,
            max_visible_blocks=max_full_sample_blocks,
        ),
        SamplePass(
            reference.shrink_sample(config),
            small_sample_ranges,
            min_visible_blocks=max_full_sample_blocks + 1,
            max_visible_blocks=kv_blocks,
        ),
    ]


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
    def allocate(cls, selection_rules: SelectionRules, num_heads: int) -> Bitmap:
        """Allocate a bitmap of ``num_heads`` heads per batch row without initialising it."""
        _, batch, q_blocks = selection_rules.block_bounds.shape
        counts = selection_rules.block_bounds.new_empty(batch, num_heads, q_blocks)
        num_words = triton.cdiv(selection_rules.marked_blocks.shape[2], 32)
        return cls(bits=counts.new_empty((*counts.shape, num_words)), counts=counts)


def fill_bitmap(
    *,
    bitmap: Bitmap,
    samples: list[QuerySample],
    stored_keys: Tensor,
    key_scale_exponents: Tensor,
    tile_plan: TilePlan,
    selection_rules: SelectionRules,
    head_range: HeadRange,
    sample_pass: SamplePass,
    scores: Tensor | None,
    score_options: ScoreOptions,
) -> None:
    """Score the samples of a group of heads and write their bits to ``bitmap``, chunk by chunk.

    Only the bits of the query blocks of ``sample_pass`` are written. The chunks in flight run on
    separate streams, which the current stream waits for.

    Args:
        bitmap: Bitmap of all heads, which receives the bits.
        samples: Result of `gather.sample_queries` for ``sample_pass``.
        stored_keys: Stored keys [B, H_kv, N_k, C].
        key_scale_exponents: int8 [B, H_kv, N_k, 1], exponents of the stored keys.
        tile_plan: Sizes of the launches.
        selection_rules: Blocks that are selected regardless of scores.
        head_range: Heads of the samples.
        sample_pass: The query blocks that are scored, and their settings.
        scores: float32 [heads, M_q, M_k], receives the scores, see `threshold_blocks`; None for no
            scores.
        score_options: Parameters of the logits; ``sinks`` and ``softcap`` are used.
    """
    key_block = sample_pass.config.key_block
    scorings_by_stream = prepare_scoring(samples, stored_keys, tile_plan, key_block)
    flat_exponents = (
        KeyScaleExponents.flatten(key_scale_exponents) if stored_keys.dtype == FP8 else None
    )
    softcap = None if score_options.softcap is None else score_options.softcap * LOG2_E.value
    with launch.fork_streams(stored_keys, tile_plan.chunks_in_flight) as streams:
        for chunk, stream, scorings in zip(
            tile_plan.chunks, cycle(streams), cycle(scorings_by_stream), strict=False
        ):
            with stream:
                for scoring in scorings:
                    score_samples(
                        scoring,
                        stored_keys=stored_keys,
                        key_scale_exponents=flat_exponents,
                        tile_plan=tile_plan,
                        chunk=chunk,
                        head_range=head_range,
                        key_block=key_block,
                        sinks=score_options.sinks,
                        softcap=softcap,
                    )
                threshold_blocks(
                    scorings,
                    tile_plan=tile_plan,
                    chunk=chunk,
                    head_range=head_range,
                    selection_rules=selection_rules,
                    bitmap=bitmap,
                    sample_pass=sample_pass,
                    scores=scores,
                    softcap=softcap,
                )


def threshold_blocks(
    scorings: list[SampleScoring],
    *,
    tile_plan: TilePlan,
    chunk: TileRange,
    head_range: HeadRange,
    selection_rules: SelectionRules,
    bitmap: Bitmap,
    sample_pass: SamplePass,
    scores: Tensor | None,
    softcap: float | None,
) -> None:
    """Write the bits and counts of the query blocks of one chunk of tiles to ``bitmap``.

    Query blocks that do not belong to ``sample_pass`` are skipped.

    Args:
        scorings: Scored typical queries, then scored outlier queries if there are any.
        tile_plan: Sizes of the launches.
        chunk: One of ``tile_plan.chunks``.
        head_range: Heads of the samples.
        selection_rules: Blocks that are selected regardless of scores.
        bitmap: Bitmap of all heads, which receives the bits.
        sample_pass: The query blocks that are scored, and their settings.
        scores: float32 [heads, M_q, M_k], receives `reference.compute_block_scores` of the visible
            blocks. The scores of forced blocks are arbitrary. None for no scores.
        softcap: Soft cap of logits to base two; None for no cap.
    """
    config = sample_pass.config
    typical_scoring, outlier_scoring = scorings[0], scorings[-1]
    typical_tiles, outlier_tiles = typical_scoring.tiles, outlier_scoring.tiles
    first_q_block = chunk.begin * tile_plan.q_blocks_per_chunk_tile
    end_q_block = chunk.end * tile_plan.q_blocks_per_chunk_tile
    batch, kv_heads, kv_blocks = selection_rules.marked_blocks.shape
    tail_mode = "none"
    if selection_rules.tail_mask is not None:
        tail_mode = "listed" if selection_rules.is_tail_listed else "named"
    _threshold_kernel[(end_q_block - first_q_block, head_range.num_heads)](
        typical_sample=typical_scoring.sample.tensors,
        outlier_sample=outlier_scoring.sample.tensors,
        block_bounds=selection_rules.block_bounds,
        marked_blocks=selection_rules.marked_blocks,
        tail_mask=bitmap.bits if selection_rules.tail_mask is None else selection_rules.tail_mask,
        bitmap=bitmap,
        scores=scores,
        softcap=softcap,
        typical_scratch=typical_scoring.scratch,
        outlier_scratch=outlier_scoring.scratch,
        typical_columns_per_head=typical_tiles.count_columns(
            tile_plan.convert_chunk_to_tiles(typical_tiles, chunk)
        ),
        outlier_columns_per_head=outlier_tiles.count_columns(
            tile_plan.convert_chunk_to_tiles(outlier_tiles, chunk)
        ),
        typical_columns_per_tile=typical_tiles.num_columns,
        outlier_columns_per_tile=outlier_tiles.num_columns,
        mass_threshold=config.mass_threshold,
        share_threshold=config.share_threshold,
        first_q_block=first_q_block,
        first_head=head_range.first_head,
        heads_per_row=head_range.heads_per_row,
        kv_heads=kv_heads,
        q_blocks=tile_plan.q_blocks,
        kv_blocks=kv_blocks,
        num_words=bitmap.bits.shape[-1],
        block_bounds_stride=batch * tile_plan.q_blocks,
        min_visible_blocks=sample_pass.min_visible_blocks,
        max_visible_blocks=sample_pass.max_visible_blocks,
        TYPICAL_SAMPLES=typical_tiles.num_samples,
        OUTLIER_SAMPLES=config.outlier_queries,
        TYPICAL_Q_BLOCKS_PER_TILE=typical_tiles.q_blocks_per_tile,
        OUTLIER_Q_BLOCKS_PER_TILE=outlier_tiles.q_blocks_per_tile,
        TYPICAL_KEYS_PER_BLOCK=typical_tiles.keys_per_block,
        OUTLIER_KEYS_PER_BLOCK=outlier_tiles.keys_per_block,
        TYPICAL_BLOCKS_PER_STEP=typical_tiles.blocks_per_step,
        OUTLIER_BLOCKS_PER_STEP=outlier_tiles.blocks_per_step,
        TYPICAL_SCRATCH_GROWTH=typical_tiles.scratch_growth,
        OUTLIER_SCRATCH_GROWTH=outlier_tiles.scratch_growth,
        TYPICAL_WEIGHT=(config.query_block - config.outlier_queries) / typical_tiles.num_samples,
        MAX_BLOCKS_AT_FULL_THRESHOLD=reference.MAX_KEYS_AT_FULL_THRESHOLD / config.key_block,
        COLUMNS_PER_ITERATION=KEY_BLOCKS_PER_ITERATION,
        TAIL_MODE=tail_mode,
        num_warps=WARPS_PER_PROGRAM,
    )


@triton.jit
def _compute_shares(
    sample,
    softcap,
    flat_q_block,
    logits,
    first_column,
    first_visible_key,
    last_visible_key,
    COLUMNS_PER_ITERATION: tl.constexpr,
    BLOCKS_PER_STEP: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    SAMPLES_PER_BLOCK: tl.constexpr,
    SAMPLED_KEYS_PER_BLOCK: tl.constexpr,
):
    """Return the maximum and the sum, over the samples, of the attention shares of key blocks.

    The key blocks are ``first_column`` to ``first_column`` + COLUMNS_PER_ITERATION - 1.

    Args:
        sample: `SampleTensors` of typical queries or of outlier queries.
        flat_q_block: Index of the query block among the query blocks of all heads of the launch.
        logits: Pointer to the first logit of the query block in the scratch, whose layout is
            [steps, ROWS_PER_TILE, BLOCKS_PER_STEP].
        first_column: The first of the key blocks.
        first_visible_key, last_visible_key: The first and the last sampled key that are visible to
            any sample. The scratch contains only steps of these keys.

    Returns:
        Maximum and sum, float32 [COLUMNS_PER_ITERATION] each.
    """
    KEYS_PER_STEP: tl.constexpr = BLOCKS_PER_STEP * SAMPLED_KEYS_PER_BLOCK
    sample_row = flat_q_block * SAMPLES_PER_BLOCK + tl.arange(0, SAMPLES_PER_BLOCK)
    qk_scale = tl.load(sample.scale + sample_row)
    lse = tl.load(sample.lse + sample_row)
    # the faster order of loads depends on the bytes of a row of a step. Logits of 8-bit products
    # have two bytes
    if BLOCKS_PER_STEP * 2 >= BYTES_PER_LOAD:
        # [SAMPLES_PER_BLOCK, COLUMNS_PER_ITERATION]: a thread holds adjacent key blocks of several
        # samples
        column = first_column + tl.arange(0, COLUMNS_PER_ITERATION)
        step = column // BLOCKS_PER_STEP
        is_visible_step = (step >= first_visible_key // KEYS_PER_STEP) & (
            step <= last_visible_key // KEYS_PER_STEP
        )
        logit_offsets = (
            step[None, :] * (ROWS_PER_TILE * BLOCKS_PER_STEP) + (column % BLOCKS_PER_STEP)[None, :]
        )
        logit_offsets += tl.arange(0, SAMPLES_PER_BLOCK)[:, None] * BLOCKS_PER_STEP
        block_max_products = tl.load(
            logits + logit_offsets, mask=is_visible_step[None, :], other=float("-inf")
        ).to(tl.float32)
        shares = tl.exp2(cap_logits(block_max_products * qk_scale[:, None], softcap) - lse[:, None])
        return tl.max(shares, 0), tl.sum(shares, 0)
    # [steps, SAMPLES_PER_BLOCK * BLOCKS_PER_STEP]: a thread holds samples of few key blocks
    step = first_column // BLOCKS_PER_STEP + tl.arange(0, COLUMNS_PER_ITERATION // BLOCKS_PER_STEP)
    is_visible_step = (step >= first_visible_key // KEYS_PER_STEP) & (
        step <= last_visible_key // KEYS_PER_STEP
    )
    logit_offsets = (
        step[:, None] * (ROWS_PER_TILE * BLOCKS_PER_STEP)
        + tl.arange(0, SAMPLES_PER_BLOCK * BLOCKS_PER_STEP)[None, :]
    )
    block_max_products = tl.load(
        logits + logit_offsets, mask=is_visible_step[:, None], other=float("-inf")
    ).to(tl.float32)
    block_max_products = tl.reshape(
        block_max_products, (step.shape[0], SAMPLES_PER_BLOCK, BLOCKS_PER_STEP)
    )
    shares = tl.exp2(
        cap_logits(block_max_products * qk_scale[None, :, None], softcap) - lse[None, :, None]
    )
    return tl.reshape(tl.max(shares, 1), (COLUMNS_PER_ITERATION,)), tl.reshape(
        tl.sum(shares, 1), (COLUMNS_PER_ITERATION,)
    )


@triton.jit
def _find_visible_keys(sample, flat_q_block, SAMPLES_PER_BLOCK: tl.constexpr):
    """Return the range of visible sampled keys of the samples of a query block.

    Returns:
        first_key: The first sampled key that is visible to any sample.
        last_key: The last sampled key that is visible to any sample.
        num_samples: Number of samples with a visible sampled key, float32.
    """
    sample_row = flat_q_block * SAMPLES_PER_BLOCK + tl.arange(0, SAMPLES_PER_BLOCK)
    last_key = tl.load(sample.last_key + sample_row)
    first_key = tl.where(last_key >= 0, tl.load(sample.first_key + sample_row), 2147483647)
    return tl.min(first_key, 0), tl.max(last_key, 0), tl.sum((last_key >= 0).to(tl.float32), 0)


# these arguments change from call to call: without specialisation, Triton compiles once
@triton.jit(do_not_specialize=[*UNSPECIALIZED_ARGUMENTS, *UNSPECIALIZED_THRESHOLD_ARGUMENTS])
def _threshold_kernel(
    typical_sample,
    outlier_sample,
    block_bounds,
    marked_blocks,
    tail_mask,
    bitmap,
    scores,
    softcap,
    typical_scratch,
    outlier_scratch,
    typical_columns_per_head,
    outlier_columns_per_head,
    typical_columns_per_tile,
    outlier_columns_per_tile,
    mass_threshold,
    share_threshold,
    first_q_block,
    first_head,
    heads_per_row,
    kv_heads,
    q_blocks,
    kv_blocks,
    num_words,
    block_bounds_stride,
    min_visible_blocks,
    max_visible_blocks,
    TYPICAL_SAMPLES: tl.constexpr,
    OUTLIER_SAMPLES: tl.constexpr,
    TYPICAL_Q_BLOCKS_PER_TILE: tl.constexpr,
    OUTLIER_Q_BLOCKS_PER_TILE: tl.constexpr,
    TYPICAL_KEYS_PER_BLOCK: tl.constexpr,
    OUTLIER_KEYS_PER_BLOCK: tl.constexpr,
    TYPICAL_BLOCKS_PER_STEP: tl.constexpr,
    OUTLIER_BLOCKS_PER_STEP: tl.constexpr,
    TYPICAL_SCRATCH_GROWTH: tl.constexpr,
    OUTLIER_SCRATCH_GROWTH: tl.constexpr,
    TYPICAL_WEIGHT: tl.constexpr,
    MAX_BLOCKS_AT_FULL_THRESHOLD: tl.constexpr,
    COLUMNS_PER_ITERATION: tl.constexpr,
    TAIL_MODE: tl.constexpr,
):
    """Write the bitmap of one query block of a head from the logits of its samples.

    ``block_bounds_stride`` is the stride, in elements, between the different bounds in
    ``block_bounds``. ``first_q_block`` is the first query block of the launch. TAIL_MODE is "none"
    for no dense tail, and "listed" if the tail selects all visible blocks. TAIL_MODE is "named" if
    the tail selects no block, because the plan names the query blocks of the tail.

    A query block with fewer visible key blocks than ``min_visible_blocks``, or with more than
    ``max_visible_blocks``, is skipped: another launch scores it with another sample.
    """
    launch_head = tl.program_id(1)
    # the last query blocks start first, because their programs have the most visible keys
    q_block = first_q_block + tl.num_programs(0) - 1 - tl.program_id(0)
    if q_block >= q_blocks:
        return
    # bounds of the query block, see `compute_block_bounds`: scalars
    batch = (first_head + launch_head) // heads_per_row
    bounds_offset = batch * q_blocks + q_block
    first_visible = tl.load(block_bounds + bounds_offset)
    last_visible = tl.load(block_bounds + block_bounds_stride + bounds_offset)
    end_of_sinks = tl.load(block_bounds + 2 * block_bounds_stride + bounds_offset)
    first_local = tl.load(block_bounds + 3 * block_bounds_stride + bounds_offset)
    num_visible_blocks = last_visible - first_visible + 1
    if (num_visible_blocks < min_visible_blocks) | (num_visible_blocks > max_visible_blocks):
        return
    # scratch of the query block, and the visible sampled keys and the weight of its samples:
    # scalars
    TYPICAL_ROWS_PER_TILE: tl.constexpr = TYPICAL_Q_BLOCKS_PER_TILE * TYPICAL_SAMPLES
    # index of the query block among the query blocks of all heads of the launch
    flat_q_block = launch_head.to(tl.int64) * q_blocks + q_block
    typical_logits = locate_tile_scratch(
        typical_scratch,
        launch_head=launch_head,
        tile=q_block // TYPICAL_Q_BLOCKS_PER_TILE,
        first_tile=first_q_block // TYPICAL_Q_BLOCKS_PER_TILE,
        columns_per_head=typical_columns_per_head,
        columns_per_tile=typical_columns_per_tile,
        ROWS_PER_TILE=TYPICAL_ROWS_PER_TILE,
        SCRATCH_GROWTH=TYPICAL_SCRATCH_GROWTH,
    )
    typical_logits += (
        q_block % TYPICAL_Q_BLOCKS_PER_TILE * (TYPICAL_SAMPLES * TYPICAL_BLOCKS_PER_STEP)
    )
    first_typical_key, last_typical_key, num_samples = _find_visible_keys(
        typical_sample, flat_q_block, TYPICAL_SAMPLES
    )
    weight_sum = num_samples * TYPICAL_WEIGHT
    if OUTLIER_SAMPLES > 0:
        OUTLIER_ROWS_PER_TILE: tl.constexpr = OUTLIER_Q_BLOCKS_PER_TILE * OUTLIER_SAMPLES
        outlier_logits = locate_tile_scratch(
            outlier_scratch,
            launch_head=launch_head,
            tile=q_block // OUTLIER_Q_BLOCKS_PER_TILE,
            first_tile=first_q_block // OUTLIER_Q_BLOCKS_PER_TILE,
            columns_per_head=outlier_columns_per_head,
            columns_per_tile=outlier_columns_per_tile,
            ROWS_PER_TILE=OUTLIER_ROWS_PER_TILE,
            SCRATCH_GROWTH=OUTLIER_SCRATCH_GROWTH,
        )
        outlier_logits += (
            q_block % OUTLIER_Q_BLOCKS_PER_TILE * (OUTLIER_SAMPLES * OUTLIER_BLOCKS_PER_STEP)
        )
        first_outlier_key, last_outlier_key, num_samples = _find_visible_keys(
            outlier_sample, flat_q_block, OUTLIER_SAMPLES
        )
        weight_sum += num_samples
    # threshold of the share sums of the query block: a scalar. A query block with more keys spreads
    # its attention over more blocks
    length_factor = tl.maximum(num_visible_blocks / MAX_BLOCKS_AT_FULL_THRESHOLD, 1.0)
    weight_sum = tl.maximum(weight_sum, 1e-30) / length_factor
    min_share_sum = mass_threshold * weight_sum
    if TAIL_MODE != "none":
        is_tail_block = tl.load(tail_mask + bounds_offset) != 0
    kv_head = (first_head + launch_head) % heads_per_row // (heads_per_row // kv_heads)
    flat_kv_head = batch * kv_heads + kv_head
    marked_blocks += flat_kv_head.to(tl.int64) * kv_blocks
    # index of the query block among the query blocks of all heads of all batch rows
    bitmap_row = (first_head + launch_head).to(tl.int64) * q_blocks + q_block
    num_selected = 0
    for first_column in range(
        first_visible // COLUMNS_PER_ITERATION * COLUMNS_PER_ITERATION,
        last_visible + 1,
        COLUMNS_PER_ITERATION,
    ):
        # maximum and weighted sum of the shares over all samples [COLUMNS_PER_ITERATION]
        max_share, share_sum = _compute_shares(
            typical_sample,
            softcap=softcap,
            flat_q_block=flat_q_block,
            logits=typical_logits,
            first_column=first_column,
            first_visible_key=first_typical_key,
            last_visible_key=last_typical_key,
            COLUMNS_PER_ITERATION=COLUMNS_PER_ITERATION,
            BLOCKS_PER_STEP=TYPICAL_BLOCKS_PER_STEP,
            ROWS_PER_TILE=TYPICAL_ROWS_PER_TILE,
            SAMPLES_PER_BLOCK=TYPICAL_SAMPLES,
            SAMPLED_KEYS_PER_BLOCK=TYPICAL_KEYS_PER_BLOCK,
        )
        share_sum *= TYPICAL_WEIGHT
        if OUTLIER_SAMPLES > 0:
            outlier_max, outlier_sum = _compute_shares(
                outlier_sample,
                softcap=softcap,
                flat_q_block=flat_q_block,
                logits=outlier_logits,
                first_column=first_column,
                first_visible_key=first_outlier_key,
                last_visible_key=last_outlier_key,
                COLUMNS_PER_ITERATION=COLUMNS_PER_ITERATION,
                BLOCKS_PER_STEP=OUTLIER_BLOCKS_PER_STEP,
                ROWS_PER_TILE=OUTLIER_ROWS_PER_TILE,
                SAMPLES_PER_BLOCK=OUTLIER_SAMPLES,
                SAMPLED_KEYS_PER_BLOCK=OUTLIER_KEYS_PER_BLOCK,
            )
            share_sum += outlier_sum
            max_share = tl.maximum(max_share, outlier_max)
        # selected key blocks and their scores [COLUMNS_PER_ITERATION]. ``~(x < threshold)`` also
        # selects the blocks whose share is NaN, because a sampled query contains NaN
        column = first_column + tl.arange(0, COLUMNS_PER_ITERATION)
        is_selected = ~(share_sum < min_share_sum) | (max_share >= share_threshold)
        is_marked_block = tl.load(marked_blocks + column, mask=column < kv_blocks, other=0) != 0
        if scores is not None:
            score = tl.where(
                max_share >= share_threshold, 1 + max_share, tl.minimum(share_sum / weight_sum, 1.0)
            )
            score = tl.where(share_sum == share_sum, score, 1.0)
            score = tl.where(is_marked_block, float("inf"), score)
            tl.store(scores + flat_q_block * kv_blocks + column, score, mask=column < kv_blocks)
        is_selected |= is_marked_block | (column < end_of_sinks) | (column >= first_local)
        if TAIL_MODE == "listed":
            is_selected |= is_tail_block
        is_selected &= (column >= first_visible) & (column <= last_visible)
        if TAIL_MODE == "named":
            is_selected &= is_tail_block == 0
        # words of 32 bits [COLUMNS_PER_ITERATION // 32]
        selected_bits = is_selected.to(tl.int32)
        num_selected += tl.sum(selected_bits, 0)
        selected_bits = (
            tl.reshape(selected_bits, (COLUMNS_PER_ITERATION // 32, 32))
            << tl.arange(0, 32)[None, :]
        )
        word_index = first_column // 32 + tl.arange(0, COLUMNS_PER_ITERATION // 32)
        tl.store(
            bitmap.bits + bitmap_row * num_words + word_index,
            tl.sum(selected_bits, 1),
            mask=word_index < num_words,
        )
    tl.store(bitmap.counts + bitmap_row, num_selected)
