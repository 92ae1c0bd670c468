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
    descriptor,
    make_descriptor_ready,
    precision,
    tanh,
    vectors_at,
)
from cab_hf.selection import reference
from cab_hf.selection.gather import QuerySample, power_of_two
from cab_hf.selection.tiles import FP8, HeadRange, SampleTiles, TilePlan, TileRange

WARPS = 4
# registers per thread for 8-bit products, so that three programs fit on a multiprocessor
REGISTERS_PER_THREAD = 168
# `reduce_max` reduces at most 2 ** MAX_HALVINGS numbers
MAX_HALVINGS = tl.constexpr(7)
# arguments of kernels that change from launch to launch, see `do_not_specialize`
UNSPECIALIZED_ARGUMENTS = ["columns", "all_columns", "begin", "first_head", "heads", "q_blocks"]


class KeyExponents(NamedTuple):
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
    def flatten(cls, exponents: Tensor) -> KeyExponents:
        """Flatten ``exponents`` of `api.QuantizedKeys`, and compute their range per KV head.

        Args:
            exponents: int8 [B, H_kv, N_k, 1].
        """
        per_key = exponents.flatten(2).flatten(0, 1).contiguous()
        min_per_head, max_per_head = per_key.aminmax(dim=1)
        return cls(per_key, min_per_head, max_per_head)


class SampleScoring(NamedTuple):
    """The operands and the result of scoring the samples of one kind, typical or outlier.

    Attributes:
        sample: The sampled queries.
        tiles: Sizes of the launch.
        keys: Result of `interleave_keys`: one tensor of all channels, or two tensors, of the first
            and of the other channels.
        scratch: [plan.scratch_logits], maximum logits in the order that the module describes.
    """

    sample: QuerySample
    tiles: SampleTiles
    keys: list[TensorDescriptor | Tiles]
    scratch: Tensor


def prepare_scoring(
    samples: list[QuerySample], values: Tensor, plan: TilePlan, key_block: int
) -> list[SampleScoring]:
    """Arrange the keys for every kind of samples, and allocate the scratch.

    Args:
        samples: Typical queries, then outlier queries if there are any.
        values: Stored keys [B, H_kv, N_k, C] of `api.QuantizedKeys`.
        plan: Sizes of the launches.
        key_block: Tokens per key block.
    """
    keys_of_kinds = [interleave_keys(values, tiles, key_block) for tiles in plan.sample_tiles]
    scratch_of_kinds = [
        torch.empty(num_logits, device=values.device, dtype=plan.scratch_dtype)
        for num_logits in plan.scratch_logits
    ]
    return [
        SampleScoring(sample=sample, tiles=tiles, keys=keys, scratch=scratch)
        for sample, tiles, keys, scratch in zip(
            samples, plan.sample_tiles, keys_of_kinds, scratch_of_kinds, strict=True
        )
    ]


def interleave_keys(
    values: Tensor, tiles: SampleTiles, key_block: int
) -> list[TensorDescriptor | Tiles]:
    """Return the sampled keys for `load_keys`, in an order in which key blocks alternate.

    In a row of a product, each of `tiles.LANES` threads holds every fourth pair of columns. If the
    columns of a key block were adjacent, each thread would hold some columns of every block, and a
    maximum per block would need exchanges between threads. With alternating blocks, a thread holds
    the logits of one block and compares its own registers only.

    Tensor descriptors load the keys in this order. Without descriptors, `load_keys` computes one
    pointer per key.

    Args:
        values: Stored keys [B, H_kv, N_k, C].
        tiles: Sizes of the launch.
        key_block: Tokens per key block.

    Returns:
        One element of all channels if ``tiles.other_width`` is 0. Otherwise two elements: the first
        channels and the other channels.
    """
    if tiles.key_stride > 1:
        # pad to whole blocks, so that every block has the same number of sampled keys
        values = pad_to_blocks(values, key_block)
        values = values[:, :, reference.get_first_sampled_key(tiles.key_stride) :: tiles.key_stride]
    keys = values[..., : tiles.first_width + tiles.other_width]
    first_width = tiles.first_width
    if not launch.reads_by_descriptor(keys.device):
        channel_groups = [keys]
        if tiles.other_width:
            channel_groups = [keys[..., :first_width], keys[..., first_width:]]
        return [
            descriptor(channel_group, tokens=tiles.tile_keys) for channel_group in channel_groups
        ]
    interleave = tiles.interleave
    # keys that are interleaved as one block: a key block, or a tile if a tile is smaller
    interleaved_block = tiles.key_block if tiles.tile_keys > tiles.key_block else tiles.tile_keys
    keys = pad_to_blocks(keys, interleaved_block)
    # [B * H_kv, blocks, runs of a block, keys of a run, C]
    key_runs = (
        make_descriptor_ready(keys)
        .flatten(0, 1)
        .unflatten(1, (-1, interleaved_block // interleave, interleave))
    )
    # [B * H_kv, runs of a block, blocks, keys of a run, C]
    key_runs = key_runs.transpose(1, 2)
    block_shape = [1, interleaved_block // interleave, tiles.blocks_per_step, interleave]
    channel_groups = (
        [key_runs[..., :first_width], key_runs[..., first_width:]]
        if tiles.other_width
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
    bits = keys.view(torch.uint8) if keys.element_size() == 1 else keys
    return F.pad(bits, (0, 0, 0, num_padding)).view(keys.dtype)


def score_samples(
    scoring: SampleScoring,
    *,
    values: Tensor,
    exponents: KeyExponents | None,
    plan: TilePlan,
    chunk: TileRange,
    heads: HeadRange,
    key_block: int,
    sinks: Tensor | None,
    softcap: float | None,
) -> None:
    """Score the samples of one kind in one chunk of tiles.

    Writes the maximum logits to ``scoring.scratch`` and the log-sum-exp to ``scoring.sample.lse``.

    Args:
        scoring: Samples, keys and scratch.
        values: Stored keys [B, H_kv, N_k, C].
        exponents: Exponents of 8-bit keys; None for other dtypes.
        plan: Sizes of the launches.
        chunk: One of ``plan.chunks``.
        heads: Heads of the samples.
        key_block: Tokens per key block.
        sinks: [H], one logit per head that takes part in the softmax; None for no sinks.
        softcap: Soft cap of logits to base two; None for no cap.
    """
    sample, tiles = scoring.sample, scoring.tiles
    chunk_tiles = plan.convert_chunk(tiles, chunk)
    num_tiles = chunk_tiles.end - chunk_tiles.begin
    is_fp8 = values.dtype == FP8
    grid = (num_tiles, heads.num_heads) if plan.is_head_major else (heads.num_heads, num_tiles)
    _score_kernel[grid](
        sample=sample.tensors,
        first_keys=scoring.keys[0],
        other_keys=scoring.keys[-1],
        exponents=exponents,
        sinks=sinks,
        softcap=softcap,
        scratch=scoring.scratch,
        columns=tiles.count_columns(chunk_tiles),
        all_columns=tiles.num_columns,
        begin=chunk_tiles.begin,
        first_head=heads.first_head,
        heads=heads.heads_per_row,
        kv_heads=values.shape[1],
        kv_length=values.shape[2],
        q_blocks=plan.q_blocks,
        COUNT=tiles.num_samples,
        Q_BLOCKS=tiles.q_blocks_per_tile,
        GROWTH=tiles.scratch_growth,
        TOKENS=key_block,
        KEY_BLOCK=tiles.key_block,
        KEY_STRIDE=tiles.key_stride,
        KEY_OFFSET=reference.get_first_sampled_key(tiles.key_stride),
        HEAD_MAJOR=plan.is_head_major,
        BLOCK_N=tiles.tile_keys,
        INTERLEAVE=tiles.interleave,
        FIRST_WIDTH=tiles.first_width,
        OTHER_WIDTH=tiles.other_width,
        IS_FP8=is_fp8,
        PACKED=is_fp8 and launch.has_ptx(values),
        PRECISION=precision(sample.vectors),
        STAGES=tiles.stages,
        num_warps=WARPS,
        **(launch.register_limit(values, REGISTERS_PER_THREAD) if is_fp8 else {}),
    )


@triton.jit
def locate_tile_scratch(
    scratch, launch_head, tile, begin, columns, all_columns, ROWS: tl.constexpr,
    GROWTH: tl.constexpr,
):  # fmt: skip
    """Return a pointer to the first logit of a tile in the scratch.

    Args:
        launch_head: Index of the head in the launch.
        tile: Index of the tile among the tiles of the head.
        begin: Index of the first tile of the chunk.
        columns: Key blocks of all tiles of a head.
        all_columns: Key blocks of a tile if GROWTH is 0.
        ROWS: Samples per tile.
        GROWTH: `SampleTiles.scratch_growth`.
    """
    columns_before = (tile - begin) * all_columns
    if GROWTH > 0:
        columns_before = GROWTH * (tile * (tile + 1) - begin * (begin + 1)) // 2
    return scratch + (launch_head.to(tl.int64) * columns + columns_before) * ROWS


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
    keys, flat_kv_head, kv_heads, first_key, key_offset, KEYS_PER_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Load a tile of the keys ``first_key + key_offset``, [BLOCK_N, CHANNELS].

    Args:
        keys: An element of `interleave_keys`.
        first_key: The first sampled key of the tile.
        key_offset: int32 [BLOCK_N], offset of each key, in the order of `interleave_keys`.
        KEYS_PER_BLOCK: Keys of the tile that belong to one block.
    """
    if isinstance(keys, tl.tensor_descriptor):
        descriptor_block = keys.load([flat_kv_head, 0, first_key // KEYS_PER_BLOCK, 0, 0])
        key_tile = descriptor_block.reshape(BLOCK_N, CHANNELS)
    else:
        key_pointers = vectors_at(
            keys, flat_kv_head // kv_heads, flat_kv_head % kv_heads, first_key + key_offset
        )
        is_inside = (first_key + key_offset < keys.tokens)[:, None]
        key_tile = tl.load(
            key_pointers + tl.arange(0, CHANNELS)[None, :], mask=is_inside, other=0.0
        )
    return key_tile


@triton.jit
def reduce_max(x, PACKED: tl.constexpr):
    """Return the maximum of ``x`` [ROWS, n, BLOCKS, m] over dim 1, [ROWS, BLOCKS, m].

    n is a power of two. If PACKED, ``x`` is float16, and one instruction compares two numbers.
    """
    maxima = x
    for _ in tl.static_range(MAX_HALVINGS):
        if maxima.shape[1] > 1:
            maxima = tl.reshape(
                maxima, (maxima.shape[0], 2, maxima.shape[1] // 2, maxima.shape[2], maxima.shape[3])
            )
            lower_half, upper_half = tl.split(tl.permute(maxima, (0, 2, 3, 4, 1)))
            if PACKED:
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
    qk, relative_unit, key_offset, start, end, first_key, PHASE: tl.constexpr,
    HAS_UNITS: tl.constexpr, PACKED: tl.constexpr, BLOCKS: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """Return the maximum of a tile of products per key block, [ROWS, BLOCKS].

    Args:
        qk: [ROWS, BLOCK_N], products of samples and keys.
        relative_unit: [BLOCK_N], quantisation scale of each key divided by the largest quantisation
            scale of the KV head. Used if HAS_UNITS.
        key_offset: int32 [BLOCK_N], offset of each key from ``first_key``.
        start, end: int32 [ROWS], the first and last visible sampled key of each row.
        first_key: The first sampled key of the tile.
        PHASE: 1 if all keys of the tile are visible to all rows, so that no mask is needed. 2 if
            keys after ``end`` must be masked. 0 if keys before ``start`` must be masked as well.
    """
    if HAS_UNITS:
        qk *= relative_unit[None, :]
    if PHASE != 1:
        is_visible = key_offset[None, :] <= (end - first_key)[:, None]
        if PHASE == 0:
            is_visible &= key_offset[None, :] >= (start - first_key)[:, None]
        # a Python float would convert float16 products to float32
        qk = tl.where(is_visible, qk, tl.full(qk.shape, float("-inf"), qk.dtype))
    num_rows: tl.constexpr = qk.shape[0]
    runs_per_block: tl.constexpr = qk.shape[1] // BLOCKS // INTERLEAVE
    qk = tl.reshape(qk, (num_rows, runs_per_block, BLOCKS, INTERLEAVE))
    return tl.reduce(reduce_max(qk, PACKED), 2, elementwise_max)


@triton.jit
def _update_online_softmax(m_i, l_i, block_max, qk_scale, softcap):
    """Return the running maximum and sum of exponentials after one more step.

    Args:
        m_i, l_i: float32 [ROWS, BLOCKS], the running maximum and sum per column of a step.
        block_max: [ROWS, BLOCKS], maximum products of the key blocks of the step.
        qk_scale: float32 [ROWS], factor from products to logits.
    """
    logit = cap_logits(block_max.to(tl.float32) * qk_scale[:, None], softcap)
    difference = logit - m_i
    # one exponential suffices: either the old sum or the new term has the factor 1
    factor = tl.exp2(-tl.abs(difference))
    l_i = tl.where(difference > 0, l_i * factor + 1.0, l_i + factor)
    return tl.maximum(m_i, logit), l_i


@triton.jit
def _compute_log_sum_exp(m_i, l_i, has_keys, sinks, head, TOKENS: tl.constexpr):
    """Return the log-sum-exp of each row, float32 [ROWS]; infinity for rows without keys.

    Args:
        m_i, l_i: float32 [ROWS, BLOCKS], the running maximum and sum per column of a step.
        has_keys: bool [ROWS].
        sinks: [H], sink logits, or None. A sink adds exp(sink) / TOKENS.
    """
    row_max = tl.max(m_i, 1)
    if sinks is not None:
        sink_logit = tl.load(sinks + head).to(tl.float32) * LOG2_E
        row_max = tl.maximum(row_max, sink_logit)
    exp_sum = tl.sum(l_i * tl.exp2(m_i - row_max[:, None]), 1)
    if sinks is not None:
        exp_sum += tl.exp2(sink_logit - row_max) / TOKENS
    return tl.where(has_keys, row_max + tl.log2(tl.maximum(exp_sum, 1e-30)), float("inf"))


@triton.jit
def _find_visible_steps(start, end, STEP: tl.constexpr):
    """Return two ranges of steps: visible to at least one row, and completely visible to all rows.

    Args:
        start, end: int32 [ROWS], the first and the last visible sampled key of each row. ``end`` is
            -1 if no sampled key is visible.
        STEP: Sampled keys per step.

    Returns:
        Four scalars: the first step and the end (exclusive) of both ranges.
    """
    is_real = end >= 0
    last_key = tl.max(end, 0)
    first_step = tl.where(last_key < 0, 0, tl.min(tl.where(is_real, start, 2147483647), 0) // STEP)
    end_step = tl.where(last_key < 0, 0, last_key // STEP + 1)
    full_first = tl.cdiv(tl.max(tl.where(is_real, start, -1), 0), STEP)
    full_end = (tl.min(tl.where(is_real, end, 2147483647), 0) + 1) // STEP
    return first_step, end_step, full_first, full_end


# these arguments change from call to call: without specialisation, Triton compiles once
@triton.jit(do_not_specialize=[*UNSPECIALIZED_ARGUMENTS, "kv_heads", "kv_length"])
def _score_kernel(
    sample,
    first_keys,
    other_keys,
    exponents,
    sinks,
    softcap,
    scratch,
    columns,
    all_columns,
    begin,
    first_head,
    heads,
    kv_heads,
    kv_length,
    q_blocks,
    COUNT: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    GROWTH: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    KEY_OFFSET: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    FIRST_WIDTH: tl.constexpr,
    OTHER_WIDTH: tl.constexpr,
    IS_FP8: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the maximum logit per key block and the log-sum-exp for every sample of a tile.

    The log-sum-exp is over the maxima of all visible key blocks. Positions of keys are indices of
    sampled keys: key i is the token KEY_OFFSET + i * KEY_STRIDE.
    """
    # a step is one tile of several key blocks, or several tiles of one key block
    STEP: tl.constexpr = BLOCK_N if BLOCK_N > KEY_BLOCK else KEY_BLOCK
    BLOCKS: tl.constexpr = STEP // KEY_BLOCK
    DTYPE: tl.constexpr = tl.float16 if IS_FP8 else tl.float32
    ROWS: tl.constexpr = Q_BLOCKS * COUNT
    # the last tiles start first, because their programs have the most visible keys
    if HEAD_MAJOR:
        launch_head = tl.program_id(1)
        tile = begin + tl.num_programs(0) - 1 - tl.program_id(0)
    else:
        launch_head = tl.program_id(0)
        tile = begin + tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (first_head + launch_head) // heads
    head = (first_head + launch_head) % heads
    flat_kv_head = batch * kv_heads + head // (heads // kv_heads)

    # samples: q_first [ROWS, FIRST_WIDTH] and q_other [ROWS, OTHER_WIDTH]; visible keys and
    # scale [ROWS]
    tile_row = tile * ROWS + tl.arange(0, ROWS)
    is_inside = tile_row < q_blocks * COUNT
    row = launch_head.to(tl.int64) * (q_blocks * COUNT) + tile_row
    start = tl.load(sample.start + row, mask=is_inside, other=0)
    end = tl.load(sample.end + row, mask=is_inside, other=-1)
    qk_scale = tl.load(sample.scale + row, mask=is_inside, other=1.0)
    query_pointers = sample.vectors + row[:, None] * (FIRST_WIDTH + OTHER_WIDTH)
    first_channel = tl.arange(0, FIRST_WIDTH)
    q_first = tl.load(query_pointers + first_channel[None, :], mask=is_inside[:, None], other=0.0)
    if OTHER_WIDTH > 0:
        other_channel = FIRST_WIDTH + tl.arange(0, OTHER_WIDTH)
        q_other = tl.load(
            query_pointers + other_channel[None, :], mask=is_inside[:, None], other=0.0
        )

    # ranges of steps: scalars
    first_step, end_step, full_first, full_end = _find_visible_steps(start, end, STEP)
    if GROWTH > 0:
        # the scratch has no columns for keys after the tile
        end_step = tl.minimum(end_step, GROWTH // BLOCKS * (tile + 1))
    full_first = tl.minimum(tl.maximum(full_first, first_step), end_step)
    full_end = tl.minimum(tl.maximum(full_end, full_first), end_step)
    if IS_FP8:
        max_exponent = tl.load(exponents.max_per_head + flat_kv_head).to(tl.int32)
        qk_scale *= power_of_two(max_exponent)
        if tl.load(exponents.min_per_head + flat_kv_head) < max_exponent:
            # the quantisation scales differ, and only phase 0 multiplies products by them: run all
            # steps in phase 0
            full_first, full_end = end_step, end_step

    # scratch of a step: [ROWS, BLOCKS]
    scratch_pointers = locate_tile_scratch(
        scratch, launch_head=launch_head, tile=tile, begin=begin, columns=columns,
        all_columns=all_columns, ROWS=ROWS, GROWTH=GROWTH,
    )  # fmt: skip
    scratch_pointers += tl.arange(0, ROWS)[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    # key offset of each column of a tile [BLOCK_N], in the order of `interleave_keys`
    KEYS_PER_BLOCK: tl.constexpr = BLOCK_N // BLOCKS
    column_index = tl.arange(0, BLOCK_N)
    key_offset = column_index // INTERLEAVE % BLOCKS * KEYS_PER_BLOCK
    key_offset += column_index // (INTERLEAVE * BLOCKS) * INTERLEAVE + column_index % INTERLEAVE

    # running maximum and sum [ROWS, BLOCKS]: threads exchange nothing before the last step
    m_i = tl.full((ROWS, BLOCKS), -1e30, tl.float32)
    l_i = tl.zeros((ROWS, BLOCKS), tl.float32)
    # phases 0, 1 and 2: steps before, in and after the range that is completely visible to all rows
    for PHASE in tl.static_range(3):
        first_phase_step = first_step if PHASE == 0 else full_first if PHASE == 1 else full_end
        end_phase_step = full_first if PHASE == 0 else full_end if PHASE == 1 else end_step
        for step in tl.range(first_phase_step, end_phase_step, num_stages=STAGES):
            block_max = tl.full((ROWS, BLOCKS), float("-inf"), DTYPE)
            for offset in tl.static_range(0, STEP, BLOCK_N):
                first_key = step * STEP + offset
                # quantisation scales of the keys divided by the largest one [BLOCK_N]
                relative_unit = 0
                if IS_FP8 and PHASE == 0:
                    token = KEY_OFFSET + (first_key + key_offset) * KEY_STRIDE
                    head_exponents = exponents.per_key + flat_kv_head.to(tl.int64) * kv_length
                    relative_unit = tl.load(head_exponents + token, mask=token < kv_length, other=0)
                    relative_unit = power_of_two(relative_unit.to(tl.int32) - max_exponent).to(
                        DTYPE
                    )
                # keys [FIRST_WIDTH, BLOCK_N] and [OTHER_WIDTH, BLOCK_N], products [ROWS, BLOCK_N]
                k = load_keys(
                    first_keys, flat_kv_head, kv_heads, first_key=first_key, key_offset=key_offset,
                    KEYS_PER_BLOCK=KEYS_PER_BLOCK, BLOCK_N=BLOCK_N, CHANNELS=FIRST_WIDTH,
                ).T  # fmt: skip
                qk = tl.dot(q_first, k, input_precision=PRECISION, out_dtype=DTYPE)
                if OTHER_WIDTH > 0:
                    k = load_keys(
                        other_keys, flat_kv_head, kv_heads, first_key=first_key,
                        key_offset=key_offset, KEYS_PER_BLOCK=KEYS_PER_BLOCK, BLOCK_N=BLOCK_N,
                        CHANNELS=OTHER_WIDTH,
                    ).T  # fmt: skip
                    qk = tl.dot(q_other, k, qk, input_precision=PRECISION, out_dtype=DTYPE)
                tile_max = _compute_max_per_block(
                    qk, relative_unit=relative_unit, key_offset=key_offset, start=start, end=end,
                    first_key=first_key, PHASE=PHASE, HAS_UNITS=IS_FP8 and PHASE == 0,
                    PACKED=PACKED, BLOCKS=BLOCKS, INTERLEAVE=INTERLEAVE,
                )  # fmt: skip
                block_max = tl.maximum(block_max, tile_max)
            tl.store(scratch_pointers + step * (ROWS * BLOCKS), block_max)
            m_i, l_i = _update_online_softmax(
                m_i, l_i, block_max=block_max, qk_scale=qk_scale, softcap=softcap
            )

    # log-sum-exp, and the scale multiplied by the largest quantisation scale of the keys: [ROWS]
    lse = _compute_log_sum_exp(m_i, l_i, has_keys=end >= 0, sinks=sinks, head=head, TOKENS=TOKENS)
    tl.store(sample.lse + row, lse, mask=is_inside)
    tl.store(sample.scale + row, qk_scale, mask=is_inside)
