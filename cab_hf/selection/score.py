"""Scores of sampled queries: maximum logits per key block, and their log-sum-exp over key blocks.

`reference.compute_sample_shares` is the definition. `score_samples` scores the samples of one kind,
typical queries or outlier queries, against all visible keys. `threshold` computes attention shares
from the maximum logits and the log-sum-exp.

The maxima are stored in a scratch, one logit per sample and key block, in this order::

    scratch        | head 0             | head 1             | ...
    of a head      | tile b | tile b + 1 | ... | tile e - 1 |           tiles b to e of a chunk
    of a tile      | step 0 | step 1 | ... | last step |                 visible steps of the tile
    of a step      | row 0: blocks_per_step logits | row 1: ... | ...    [rows, blocks_per_step]

    row of a tile = query block in the tile * num_samples + sample
    key block     = step * blocks_per_step + logit in the row

In this order, a program writes contiguous memory in each step. If the queries are a whole sequence,
the scratch of a tile has ``scratch_growth`` more key blocks than the scratch of the previous tile,
because later tiles have more visible keys. Otherwise every tile has ``num_columns`` key blocks.

Logits and the log-sum-exp are to base two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from cab_hf.ops import launch
from cab_hf.ops.attention.tiles import (
    LOG2_E,
    Tiles,
    choose_precision,
    make_descriptor,
    make_descriptor_ready,
    make_vector_pointers,
    tanh,
)
from cab_hf.selection import reference
from cab_hf.selection.gather import QuerySample, power_of_two
from cab_hf.selection.tiles import FP8, HeadRange, SampleTiles, TilePlan, TileRange

WARPS_PER_PROGRAM = 4
# registers per thread for 8-bit products, so that three programs fit on a multiprocessor
REGISTERS_PER_THREAD = 168
# `reduce_max` reduces at most 2 ** MAX_HALVINGS numbers
MAX_HALVINGS = tl.constexpr(7)
# arguments of `_score_kernel` and of the kernel of `threshold` that change from launch to launch,
# see `do_not_specialize`
UNSPECIALIZED_ARGUMENTS = ["first_head", "heads_per_row", "q_blocks"]
# further arguments of `_score_kernel` that change from launch to launch
UNSPECIALIZED_SCORE_ARGUMENTS = [
    "columns_per_head",
    "columns_per_tile",
    "first_tile",
    "kv_heads",
    "kv_length",
]


class KeyScaleExponents(NamedTuple):
    """Exponents of the quantisation scales of 8-bit keys, see `gather.quantize`.

    Attributes:
        per_key: int8 [B * H_kv, N_k], the exponent of each key.
        min_per_head: int8 [B * H_kv], the smallest exponent of the keys of each KV head.
        max_per_head: int8 [B * H_kv], the largest exponent of the keys of each KV head.
    """

    per_key: Tensor
    min_per_head: Tensor
    max_per_head: Tensor

    @classmethod
    def flatten(cls, key_scale_exponents: Tensor) -> KeyScaleExponents:
        """Flatten the exponents of all keys, and compute their range per KV head.

        Args:
            key_scale_exponents: int8 [B, H_kv, N_k, 1], ``exponents`` of `api.QuantizedKeys`.
        """
        per_key = key_scale_exponents.flatten(2).flatten(0, 1).contiguous()
        min_per_head, max_per_head = per_key.aminmax(dim=1)
        return cls(per_key, min_per_head, max_per_head)


class SampleScoring(NamedTuple):
    """The operands and the result of scoring the samples of one kind, typical or outlier.

    Attributes:
        sample: The sampled queries.
        tiles: Sizes of the launch.
        keys: Result of `interleave_keys`: one tensor of all channels, or two tensors, of the first
            and of the other channels.
        scratch: Maximum logits, one-dimensional, in the order that the module describes. The number
            of logits is an entry of `TilePlan.scratch_logits`.
    """

    sample: QuerySample
    tiles: SampleTiles
    keys: list[TensorDescriptor | Tiles]
    scratch: Tensor


def prepare_scoring(
    samples: list[QuerySample], stored_keys: Tensor, tile_plan: TilePlan, key_block: int
) -> list[list[SampleScoring]]:
    """Arrange the keys for every kind of samples, and allocate the scratch of all chunks in flight.

    Args:
        samples: Typical queries, then outlier queries if there are any.
        stored_keys: Stored keys [B, H_kv, N_k, C] of `api.QuantizedKeys`.
        tile_plan: Sizes of the launches.
        key_block: Tokens per key block.

    Returns:
        For each chunk in flight, the operands of typical queries, then of outlier queries. They
        differ in the scratch only.
    """
    keys_by_kind = [
        interleave_keys(stored_keys, tiles, key_block) for tiles in tile_plan.sample_tiles
    ]
    return [
        [
            SampleScoring(
                sample=sample,
                tiles=tiles,
                keys=keys,
                scratch=torch.empty(
                    num_logits, device=stored_keys.device, dtype=tile_plan.scratch_dtype
                ),
            )
            for sample, tiles, keys, num_logits in zip(
                samples, tile_plan.sample_tiles, keys_by_kind, tile_plan.scratch_logits, strict=True
            )
        ]
        for _ in range(tile_plan.chunks_in_flight)
    ]


def interleave_keys(
    stored_keys: Tensor, tiles: SampleTiles, key_block: int
) -> list[TensorDescriptor | Tiles]:
    """Return the sampled keys for `load_keys`, in an order in which key blocks alternate.

    In a row of a product, each of `tiles.LANES_PER_ROW` threads holds every fourth pair of columns.
    If the columns of a key block were adjacent, each thread would hold some columns of every block,
    and a maximum per block would need exchanges between threads. With alternating blocks, a thread
    holds the logits of one block and compares its own registers only.

    Tensor descriptors load the keys in this order. Without descriptors, `load_keys` computes one
    pointer per key.

    Args:
        stored_keys: Stored keys [B, H_kv, N_k, C].
        tiles: Sizes of the launch.
        key_block: Tokens per key block.

    Returns:
        One element of all channels if ``tiles.num_other_channels`` is 0. Otherwise two elements:
        the first channels and the other channels.
    """
    if tiles.key_stride > 1:
        # pad to whole blocks, so that every block has the same number of sampled keys
        stored_keys = pad_to_blocks(stored_keys, key_block)
        stored_keys = stored_keys[
            :, :, reference.get_first_sampled_key(tiles.key_stride) :: tiles.key_stride
        ]
    keys = stored_keys[..., : tiles.num_first_channels + tiles.num_other_channels]
    num_first_channels = tiles.num_first_channels
    if not launch.reads_by_descriptor(keys.device):
        channel_groups = [keys]
        if tiles.num_other_channels:
            channel_groups = [keys[..., :num_first_channels], keys[..., num_first_channels:]]
        return [
            make_descriptor(channel_group, tokens=tiles.tile_keys)
            for channel_group in channel_groups
        ]
    keys_per_run = tiles.keys_per_run
    # keys that are interleaved as one block: a key block, or a tile if a tile is smaller
    interleaved_block = (
        tiles.keys_per_block if tiles.tile_keys > tiles.keys_per_block else tiles.tile_keys
    )
    keys = pad_to_blocks(keys, interleaved_block)
    # [B * H_kv, blocks, runs of a block, keys of a run, C]
    key_runs = (
        make_descriptor_ready(keys)
        .flatten(0, 1)
        .unflatten(1, (-1, interleaved_block // keys_per_run, keys_per_run))
    )
    # [B * H_kv, runs of a block, blocks, keys of a run, C]
    key_runs = key_runs.transpose(1, 2)
    block_shape = [1, interleaved_block // keys_per_run, tiles.blocks_per_step, keys_per_run]
    channel_groups = (
        [key_runs[..., :num_first_channels], key_runs[..., num_first_channels:]]
        if tiles.num_other_channels
        else [key_runs]
    )
    return [
        TensorDescriptor.from_tensor(channel_group, [*block_shape, channel_group.shape[-1]])
        for channel_group in channel_groups
    ]


def pad_to_blocks(keys: Tensor, key_block: int) -> Tensor:
    """Pad keys [B, H_kv, N_k, C] with zeros after the last key, to a multiple of ``key_block``."""
    num_padding = -keys.shape[2] % key_block
    if not num_padding:
        return keys
    # PyTorch cannot pad 8-bit floats: pad them as integers
    paddable_keys = keys.view(torch.uint8) if keys.element_size() == 1 else keys
    return F.pad(paddable_keys, (0, 0, 0, num_padding)).view(keys.dtype)


def score_samples(
    scoring: SampleScoring,
    *,
    stored_keys: Tensor,
    key_scale_exponents: KeyScaleExponents | None,
    tile_plan: TilePlan,
    chunk: TileRange,
    head_range: HeadRange,
    key_block: int,
    sinks: Tensor | None,
    softcap: float | None,
) -> None:
    """Score the samples of one kind in one chunk of tiles.

    Writes the maximum logits to ``scoring.scratch`` and the log-sum-exp to ``scoring.sample.lse``.

    Args:
        scoring: Samples, keys and scratch.
        stored_keys: Stored keys [B, H_kv, N_k, C].
        key_scale_exponents: Exponents of 8-bit keys; None for other dtypes.
        tile_plan: Sizes of the launches.
        chunk: One of ``tile_plan.chunks``.
        head_range: Heads of the samples.
        key_block: Tokens per key block.
        sinks: [H], one logit per head that takes part in the softmax; None for no sinks.
        softcap: Soft cap of logits to base two; None for no cap.
    """
    sample, tiles = scoring.sample, scoring.tiles
    chunk_tiles = tile_plan.convert_chunk_to_tiles(tiles, chunk)
    num_tiles = chunk_tiles.end - chunk_tiles.begin
    is_fp8 = stored_keys.dtype == FP8
    grid = (
        (num_tiles, head_range.num_heads)
        if tile_plan.is_head_major
        else (head_range.num_heads, num_tiles)
    )
    _score_kernel[grid](
        sample=sample.tensors,
        keys_of_first_channels=scoring.keys[0],
        keys_of_other_channels=scoring.keys[-1],
        key_scale_exponents=key_scale_exponents,
        sinks=sinks,
        softcap=softcap,
        scratch=scoring.scratch,
        columns_per_head=tiles.count_columns(chunk_tiles),
        columns_per_tile=tiles.num_columns,
        first_tile=chunk_tiles.begin,
        first_head=head_range.first_head,
        heads_per_row=head_range.heads_per_row,
        kv_heads=stored_keys.shape[1],
        kv_length=stored_keys.shape[2],
        q_blocks=tile_plan.q_blocks,
        SAMPLES_PER_BLOCK=tiles.num_samples,
        Q_BLOCKS_PER_TILE=tiles.q_blocks_per_tile,
        SCRATCH_GROWTH=tiles.scratch_growth,
        TOKENS_PER_KEY_BLOCK=key_block,
        SAMPLED_KEYS_PER_BLOCK=tiles.keys_per_block,
        KEY_STRIDE=tiles.key_stride,
        FIRST_SAMPLED_KEY=reference.get_first_sampled_key(tiles.key_stride),
        IS_HEAD_MAJOR=tile_plan.is_head_major,
        BLOCK_N=tiles.tile_keys,
        KEYS_PER_RUN=tiles.keys_per_run,
        FIRST_WIDTH=tiles.num_first_channels,
        OTHER_WIDTH=tiles.num_other_channels,
        IS_FP8=is_fp8,
        USE_PACKED_MAX=is_fp8 and launch.has_ptx(stored_keys),
        PRECISION=choose_precision(sample.vectors),
        NUM_STAGES=tiles.num_stages,
        num_warps=WARPS_PER_PROGRAM,
        **(launch.limit_registers(stored_keys, REGISTERS_PER_THREAD) if is_fp8 else {}),
    )


@triton.jit
def locate_tile_scratch(
    scratch,
    launch_head,
    tile,
    first_tile,
    columns_per_head,
    columns_per_tile,
    ROWS_PER_TILE: tl.constexpr,
    SCRATCH_GROWTH: tl.constexpr,
):
    """Return a pointer to the first logit of a tile in the scratch.

    Args:
        launch_head: Index of the head in the launch.
        tile: Index of the tile among the tiles of the head.
        first_tile: Index of the first tile of the chunk.
        columns_per_head: Key blocks of all tiles of a head.
        columns_per_tile: Key blocks of a tile if SCRATCH_GROWTH is 0.
        ROWS_PER_TILE: Samples per tile.
        SCRATCH_GROWTH: `SampleTiles.scratch_growth`.
    """
    num_columns_before_tile = (tile - first_tile) * columns_per_tile
    if SCRATCH_GROWTH > 0:
        num_columns_before_tile = (
            SCRATCH_GROWTH * (tile * (tile + 1) - first_tile * (first_tile + 1)) // 2
        )
    return (
        scratch
        + (launch_head.to(tl.int64) * columns_per_head + num_columns_before_tile) * ROWS_PER_TILE
    )


@triton.jit
def cap_logits(logit, softcap):
    """Return softcap * tanh(logit / softcap), or the logit if ``softcap`` is None.

    A logit of -inf remains -inf.
    """
    if softcap is not None:
        logit = tl.where(logit == float("-inf"), logit, softcap * tanh(logit / softcap))
    return logit


@triton.jit
def load_keys(
    keys,
    flat_kv_head,
    kv_heads,
    first_key,
    key_offset,
    TILE_KEYS_PER_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
):
    """Load a tile of the keys ``first_key + key_offset``, [BLOCK_N, NUM_CHANNELS].

    Args:
        keys: An element of `interleave_keys`.
        first_key: The first sampled key of the tile.
        key_offset: int32 [BLOCK_N], offset of each key, in the order of `interleave_keys`.
        TILE_KEYS_PER_BLOCK: Keys of the tile that belong to one block.
    """
    if isinstance(keys, tl.tensor_descriptor):
        descriptor_block = keys.load([flat_kv_head, 0, first_key // TILE_KEYS_PER_BLOCK, 0, 0])
        key_tile = descriptor_block.reshape(BLOCK_N, NUM_CHANNELS)
    else:
        key_pointers = make_vector_pointers(
            keys, flat_kv_head // kv_heads, flat_kv_head % kv_heads, first_key + key_offset
        )
        is_in_sequence = (first_key + key_offset < keys.num_tokens)[:, None]
        key_tile = tl.load(
            key_pointers + tl.arange(0, NUM_CHANNELS)[None, :], mask=is_in_sequence, other=0.0
        )
    return key_tile


@triton.jit
def reduce_max(x, USE_PACKED_MAX: tl.constexpr):
    """Return the maximum of ``x`` [R, n, S, m] over dim 1, [R, S, m].

    n is a power of two. If USE_PACKED_MAX, ``x`` is float16, and one instruction compares two
    numbers.
    """
    maxima = x
    for _ in tl.static_range(MAX_HALVINGS):
        if maxima.shape[1] > 1:
            maxima = tl.reshape(
                maxima, (maxima.shape[0], 2, maxima.shape[1] // 2, maxima.shape[2], maxima.shape[3])
            )
            lower_half, upper_half = tl.split(tl.permute(maxima, (0, 2, 3, 4, 1)))
            if USE_PACKED_MAX:
                # Triton would compare one number per instruction
                maxima = tl.inline_asm_elementwise(
                    asm="max.f16x2 $0, $1, $2;",
                    constraints="=r,r,r",
                    args=[lower_half, upper_half],
                    dtype=tl.float16,
                    is_pure=True,
                    pack=2,
                )
            else:
                maxima = tl.maximum(lower_half, upper_half)
    return tl.reshape(maxima, (x.shape[0], x.shape[2], x.shape[3]))


@triton.jit
def elementwise_max(a, b):
    """Return the elementwise maximum, for `tl.reduce`."""
    # tl.max would convert float16 to float32, which halves the rate of comparisons
    return tl.maximum(a, b)


@triton.jit
def _compute_max_per_block(
    qk,
    relative_key_scale,
    key_offset,
    first_visible_key,
    last_visible_key,
    first_key,
    PHASE: tl.constexpr,
    HAS_KEY_SCALES: tl.constexpr,
    USE_PACKED_MAX: tl.constexpr,
    BLOCKS_PER_STEP: tl.constexpr,
    KEYS_PER_RUN: tl.constexpr,
):
    """Return the maximum of a tile of products per key block, [ROWS_PER_TILE, BLOCKS_PER_STEP].

    Args:
        qk: [ROWS_PER_TILE, BLOCK_N], products of samples and keys.
        relative_key_scale: [BLOCK_N], quantisation scale of each key divided by the largest
            quantisation scale of the KV head. Used if HAS_KEY_SCALES.
        key_offset: int32 [BLOCK_N], offset of each key from ``first_key``.
        first_visible_key, last_visible_key: int32 [ROWS_PER_TILE], the first and last visible
            sampled key of each row.
        first_key: The first sampled key of the tile.
        PHASE: 1 if all keys of the tile are visible to all rows, so that no mask is needed. 2 if
            keys after ``last_visible_key`` must be masked. 0 if keys before ``first_visible_key``
            must be masked as well.
    """
    if HAS_KEY_SCALES:
        qk *= relative_key_scale[None, :]
    if PHASE != 1:
        is_visible = key_offset[None, :] <= (last_visible_key - first_key)[:, None]
        if PHASE == 0:
            is_visible &= key_offset[None, :] >= (first_visible_key - first_key)[:, None]
        # a Python float would convert float16 products to float32
        qk = tl.where(is_visible, qk, tl.full(qk.shape, float("-inf"), qk.dtype))
    num_rows: tl.constexpr = qk.shape[0]
    runs_per_block: tl.constexpr = qk.shape[1] // BLOCKS_PER_STEP // KEYS_PER_RUN
    qk = tl.reshape(qk, (num_rows, runs_per_block, BLOCKS_PER_STEP, KEYS_PER_RUN))
    return tl.reduce(reduce_max(qk, USE_PACKED_MAX), 2, elementwise_max)


@triton.jit
def _update_online_softmax(m_i, l_i, block_max_products, qk_scale, softcap):
    """Return the running maximum and sum of exponentials after one more step.

    Args:
        m_i, l_i: float32 [ROWS_PER_TILE, BLOCKS_PER_STEP], the running maximum and sum per column
            of a step.
        block_max_products: [ROWS_PER_TILE, BLOCKS_PER_STEP], maximum products of the key blocks of
            the step.
        qk_scale: float32 [ROWS_PER_TILE], factor from products to logits.
    """
    logit = cap_logits(block_max_products.to(tl.float32) * qk_scale[:, None], softcap)
    logit_difference = logit - m_i
    # one exponential suffices: either the old sum or the new term has the factor 1
    rescaling_factor = tl.exp2(-tl.abs(logit_difference))
    l_i = tl.where(logit_difference > 0, l_i * rescaling_factor + 1.0, l_i + rescaling_factor)
    return tl.maximum(m_i, logit), l_i


@triton.jit
def _compute_log_sum_exp(m_i, l_i, has_keys, sinks, head, TOKENS_PER_KEY_BLOCK: tl.constexpr):
    """Return the log-sum-exp of each row, float32 [ROWS_PER_TILE]; infinity for rows without keys.

    Args:
        m_i, l_i: float32 [ROWS_PER_TILE, BLOCKS_PER_STEP], the running maximum and sum per column
            of a step.
        has_keys: bool [ROWS_PER_TILE].
        sinks: [H], sink logits, or None. A sink adds exp(sink) / TOKENS_PER_KEY_BLOCK.
    """
    row_max = tl.max(m_i, 1)
    if sinks is not None:
        sink_logit = tl.load(sinks + head).to(tl.float32) * LOG2_E
        row_max = tl.maximum(row_max, sink_logit)
    exp_sum = tl.sum(l_i * tl.exp2(m_i - row_max[:, None]), 1)
    if sinks is not None:
        exp_sum += tl.exp2(sink_logit - row_max) / TOKENS_PER_KEY_BLOCK
    return tl.where(has_keys, row_max + tl.log2(tl.maximum(exp_sum, 1e-30)), float("inf"))


@triton.jit
def _find_visible_steps(first_visible_key, last_visible_key, KEYS_PER_STEP: tl.constexpr):
    """Return two ranges of steps: visible to at least one row, and completely visible to all rows.

    Args:
        first_visible_key, last_visible_key: int32 [ROWS_PER_TILE], the first and the last visible
            sampled key of each row. ``last_visible_key`` is -1 if no sampled key is visible.
        KEYS_PER_STEP: Sampled keys per step.

    Returns:
        Four scalars: the first step and the end (exclusive) of both ranges.
    """
    has_visible_key = last_visible_key >= 0
    last_key = tl.max(last_visible_key, 0)
    first_step = tl.where(
        last_key < 0,
        0,
        tl.min(tl.where(has_visible_key, first_visible_key, 2147483647), 0) // KEYS_PER_STEP,
    )
    end_step = tl.where(last_key < 0, 0, last_key // KEYS_PER_STEP + 1)
    first_full_step = tl.cdiv(
        tl.max(tl.where(has_visible_key, first_visible_key, -1), 0), KEYS_PER_STEP
    )
    end_full_step = (
        tl.min(tl.where(has_visible_key, last_visible_key, 2147483647), 0) + 1
    ) // KEYS_PER_STEP
    return first_step, end_step, first_full_step, end_full_step


# these arguments change from call to call: without specialisation, Triton compiles once
@triton.jit(do_not_specialize=[*UNSPECIALIZED_ARGUMENTS, *UNSPECIALIZED_SCORE_ARGUMENTS])
def _score_kernel(
    sample,
    keys_of_first_channels,
    keys_of_other_channels,
    key_scale_exponents,
    sinks,
    softcap,
    scratch,
    columns_per_head,
    columns_per_tile,
    first_tile,
    first_head,
    heads_per_row,
    kv_heads,
    kv_length,
    q_blocks,
    SAMPLES_PER_BLOCK: tl.constexpr,
    Q_BLOCKS_PER_TILE: tl.constexpr,
    SCRATCH_GROWTH: tl.constexpr,
    TOKENS_PER_KEY_BLOCK: tl.constexpr,
    SAMPLED_KEYS_PER_BLOCK: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    FIRST_SAMPLED_KEY: tl.constexpr,
    IS_HEAD_MAJOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEYS_PER_RUN: tl.constexpr,
    FIRST_WIDTH: tl.constexpr,
    OTHER_WIDTH: tl.constexpr,
    IS_FP8: tl.constexpr,
    USE_PACKED_MAX: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Write the maximum logit per key block and the log-sum-exp for every sample of a tile.

    The log-sum-exp is over the maxima of all visible key blocks. Positions of keys are indices of
    sampled keys: key i is the token FIRST_SAMPLED_KEY + i * KEY_STRIDE.
    """
    # a step is one tile of several key blocks, or several tiles of one key block
    KEYS_PER_STEP: tl.constexpr = (
        BLOCK_N if BLOCK_N > SAMPLED_KEYS_PER_BLOCK else SAMPLED_KEYS_PER_BLOCK
    )
    BLOCKS_PER_STEP: tl.constexpr = KEYS_PER_STEP // SAMPLED_KEYS_PER_BLOCK
    PRODUCT_DTYPE: tl.constexpr = tl.float16 if IS_FP8 else tl.float32
    ROWS_PER_TILE: tl.constexpr = Q_BLOCKS_PER_TILE * SAMPLES_PER_BLOCK
    # the last tiles start first, because their programs have the most visible keys
    if IS_HEAD_MAJOR:
        launch_head = tl.program_id(1)
        tile = first_tile + tl.num_programs(0) - 1 - tl.program_id(0)
    else:
        launch_head = tl.program_id(0)
        tile = first_tile + tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (first_head + launch_head) // heads_per_row
    head = (first_head + launch_head) % heads_per_row
    flat_kv_head = batch * kv_heads + head // (heads_per_row // kv_heads)

    # samples: q_first [ROWS_PER_TILE, FIRST_WIDTH] and q_other [ROWS_PER_TILE, OTHER_WIDTH];
    # visible keys and scale [ROWS_PER_TILE]
    tile_row = tile * ROWS_PER_TILE + tl.arange(0, ROWS_PER_TILE)
    is_real_sample = tile_row < q_blocks * SAMPLES_PER_BLOCK
    sample_row = launch_head.to(tl.int64) * (q_blocks * SAMPLES_PER_BLOCK) + tile_row
    first_visible_key = tl.load(sample.first_key + sample_row, mask=is_real_sample, other=0)
    last_visible_key = tl.load(sample.last_key + sample_row, mask=is_real_sample, other=-1)
    qk_scale = tl.load(sample.scale + sample_row, mask=is_real_sample, other=1.0)
    query_pointers = sample.vectors + sample_row[:, None] * (FIRST_WIDTH + OTHER_WIDTH)
    first_channels = tl.arange(0, FIRST_WIDTH)
    q_first = tl.load(
        query_pointers + first_channels[None, :], mask=is_real_sample[:, None], other=0.0
    )
    if OTHER_WIDTH > 0:
        other_channels = FIRST_WIDTH + tl.arange(0, OTHER_WIDTH)
        q_other = tl.load(
            query_pointers + other_channels[None, :], mask=is_real_sample[:, None], other=0.0
        )

    # ranges of steps: scalars
    first_step, end_step, first_full_step, end_full_step = _find_visible_steps(
        first_visible_key, last_visible_key, KEYS_PER_STEP
    )
    if SCRATCH_GROWTH > 0:
        # the scratch has no columns for keys after the tile
        end_step = tl.minimum(end_step, SCRATCH_GROWTH // BLOCKS_PER_STEP * (tile + 1))
    first_full_step = tl.minimum(tl.maximum(first_full_step, first_step), end_step)
    end_full_step = tl.minimum(tl.maximum(end_full_step, first_full_step), end_step)
    if IS_FP8:
        max_key_exponent = tl.load(key_scale_exponents.max_per_head + flat_kv_head).to(tl.int32)
        qk_scale *= power_of_two(max_key_exponent)
        if tl.load(key_scale_exponents.min_per_head + flat_kv_head) < max_key_exponent:
            # the quantisation scales differ, and only phase 0 multiplies products by them: run all
            # steps in phase 0
            first_full_step, end_full_step = end_step, end_step

    # scratch of a step: [ROWS_PER_TILE, BLOCKS_PER_STEP]
    scratch_pointers = locate_tile_scratch(
        scratch,
        launch_head=launch_head,
        tile=tile,
        first_tile=first_tile,
        columns_per_head=columns_per_head,
        columns_per_tile=columns_per_tile,
        ROWS_PER_TILE=ROWS_PER_TILE,
        SCRATCH_GROWTH=SCRATCH_GROWTH,
    )
    scratch_pointers += (
        tl.arange(0, ROWS_PER_TILE)[:, None] * BLOCKS_PER_STEP
        + tl.arange(0, BLOCKS_PER_STEP)[None, :]
    )
    # key offset of each column of a tile [BLOCK_N], in the order of `interleave_keys`
    TILE_KEYS_PER_BLOCK: tl.constexpr = BLOCK_N // BLOCKS_PER_STEP
    column_index = tl.arange(0, BLOCK_N)
    key_offset = column_index // KEYS_PER_RUN % BLOCKS_PER_STEP * TILE_KEYS_PER_BLOCK
    key_offset += (
        column_index // (KEYS_PER_RUN * BLOCKS_PER_STEP) * KEYS_PER_RUN
        + column_index % KEYS_PER_RUN
    )

    # running maximum and sum [ROWS_PER_TILE, BLOCKS_PER_STEP]: threads exchange nothing before the
    # last step
    m_i = tl.full((ROWS_PER_TILE, BLOCKS_PER_STEP), -1e30, tl.float32)
    l_i = tl.zeros((ROWS_PER_TILE, BLOCKS_PER_STEP), tl.float32)
    # phases 0, 1 and 2: steps before, in and after the range that is completely visible to all rows
    for PHASE in tl.static_range(3):
        first_phase_step = (
            first_step if PHASE == 0 else first_full_step if PHASE == 1 else end_full_step
        )
        end_phase_step = (
            first_full_step if PHASE == 0 else end_full_step if PHASE == 1 else end_step
        )
        for step in tl.range(first_phase_step, end_phase_step, num_stages=NUM_STAGES):
            block_max_products = tl.full(
                (ROWS_PER_TILE, BLOCKS_PER_STEP), float("-inf"), PRODUCT_DTYPE
            )
            for tile_offset in tl.static_range(0, KEYS_PER_STEP, BLOCK_N):
                first_key = step * KEYS_PER_STEP + tile_offset
                # quantisation scales of the keys divided by the largest one [BLOCK_N]
                relative_key_scale = 0
                if IS_FP8 and PHASE == 0:
                    token = FIRST_SAMPLED_KEY + (first_key + key_offset) * KEY_STRIDE
                    head_exponents = (
                        key_scale_exponents.per_key + flat_kv_head.to(tl.int64) * kv_length
                    )
                    relative_key_scale = tl.load(
                        head_exponents + token, mask=token < kv_length, other=0
                    )
                    relative_key_scale = power_of_two(
                        relative_key_scale.to(tl.int32) - max_key_exponent
                    ).to(PRODUCT_DTYPE)
                # keys [FIRST_WIDTH, BLOCK_N] and [OTHER_WIDTH, BLOCK_N], products [ROWS_PER_TILE,
                # BLOCK_N]
                k = load_keys(
                    keys_of_first_channels,
                    flat_kv_head,
                    kv_heads,
                    first_key=first_key,
                    key_offset=key_offset,
                    TILE_KEYS_PER_BLOCK=TILE_KEYS_PER_BLOCK,
                    BLOCK_N=BLOCK_N,
                    NUM_CHANNELS=FIRST_WIDTH,
                ).T
                qk = tl.dot(q_first, k, input_precision=PRECISION, out_dtype=PRODUCT_DTYPE)
                if OTHER_WIDTH > 0:
                    k = load_keys(
                        keys_of_other_channels,
                        flat_kv_head,
                        kv_heads,
                        first_key=first_key,
                        key_offset=key_offset,
                        TILE_KEYS_PER_BLOCK=TILE_KEYS_PER_BLOCK,
                        BLOCK_N=BLOCK_N,
                        NUM_CHANNELS=OTHER_WIDTH,
                    ).T
                    qk = tl.dot(q_other, k, qk, input_precision=PRECISION, out_dtype=PRODUCT_DTYPE)
                tile_max = _compute_max_per_block(
                    qk,
                    relative_key_scale=relative_key_scale,
                    key_offset=key_offset,
                    first_visible_key=first_visible_key,
                    last_visible_key=last_visible_key,
                    first_key=first_key,
                    PHASE=PHASE,
                    HAS_KEY_SCALES=IS_FP8 and PHASE == 0,
                    USE_PACKED_MAX=USE_PACKED_MAX,
                    BLOCKS_PER_STEP=BLOCKS_PER_STEP,
                    KEYS_PER_RUN=KEYS_PER_RUN,
                )
                block_max_products = tl.maximum(block_max_products, tile_max)
            tl.store(
                scratch_pointers + step * (ROWS_PER_TILE * BLOCKS_PER_STEP), block_max_products
            )
            m_i, l_i = _update_online_softmax(
                m_i, l_i, block_max_products=block_max_products, qk_scale=qk_scale, softcap=softcap
            )

    # log-sum-exp, and the scale multiplied by the largest quantisation scale of the keys:
    # [ROWS_PER_TILE]
    lse = _compute_log_sum_exp(
        m_i,
        l_i,
        has_keys=last_visible_key >= 0,
        sinks=sinks,
        head=head,
        TOKENS_PER_KEY_BLOCK=TOKENS_PER_KEY_BLOCK,
    )
    tl.store(sample.lse + sample_row, lse, mask=is_real_sample)
    tl.store(sample.scale + sample_row, qk_scale, mask=is_real_sample)
