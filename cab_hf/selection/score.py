"""Scores of sampled queries: the maximum logit per key block, and the log-sum-exp over blocks.

`reference.shares_of_samples` is the definition. `score_samples` scores one kind of samples, typical
queries (``typical_*``) or outliers (``outlier_*``), against all visible keys. Shares are
computed from both results in `threshold`.

Layout of the scratch of one kind of samples, one logit per cell::

    scratch        | head 0             | head 1             | ...
    of a head      | tile b | tile b + 1 | ... | tile e - 1 |           tiles b to e of a part
    of a tile      | step 0 | step 1 | ... | last step |                 visible steps of the tile
    of a step      | row 0: blocks_per_step logits | row 1: ... | ...    [rows, blocks_per_step]

    row of a tile = query block in the tile * num_samples + sample
    key block     = step * blocks_per_step + logit in the row

A program writes one contiguous piece per step. If the queries are a whole sequence, the scratch of
a tile has ``scratch_growth`` key blocks more than the scratch of the tile before it, because later
tiles have more visible keys. Otherwise all tiles have ``all_columns`` key blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    described,
    descriptor,
    precision,
    tanh,
    vectors_at,
)
from cab_hf.selection import reference
from cab_hf.selection.gather import QuerySample, power_of_two
from cab_hf.selection.tiles import FP8, HeadRange, SampleTiles, TilePlan, TileRange

WARPS = 4
# registers per thread of 8-bit products, so that three programs share a multiprocessor
REGISTERS = 168
# halvings that reduce a tile of at most 2 ** 7 parts to one part
HALVINGS = tl.constexpr(7)
# arguments that differ from part to part and must not cause another compilation
POSITIONS = ["columns", "all_columns", "begin", "first_head", "heads", "q_blocks"]


class KeyExponents(NamedTuple):
    """Exponents of the units of 8-bit keys.

    Attributes:
        each: int8 [B * H_kv, N_k], the exponent of each key.
        smallest: int8 [B * H_kv], the smallest exponent of each KV head.
        largest: int8 [B * H_kv], the largest exponent of each KV head.
    """

    each: Tensor
    smallest: Tensor
    largest: Tensor

    @classmethod
    def of(cls, exponents: Tensor) -> KeyExponents:
        """Return the exponents of `api.QuantizedKeys`, int8 [B, H_kv, N_k, 1], per KV head."""
        each = exponents.flatten(2).flatten(0, 1).contiguous()
        smallest, largest = each.aminmax(dim=1)
        return cls(each, smallest, largest)


class Stream(NamedTuple):
    """One kind of samples with its keys, the sizes of its launch and its scratch.

    Attributes:
        sample: The sampled queries.
        tiles: Sizes of the launch.
        keys: Tiles of keys, see `interleaved_keys`: of the first channels and of the others.
        scratch: Logits, see the layout in the docstring of the module.
    """

    sample: QuerySample
    tiles: SampleTiles
    keys: list[Any]
    scratch: Tensor


def open_streams(
    samples: list[QuerySample], values: Tensor, plan: TilePlan, key_block: int
) -> list[Stream]:
    """Prepare the keys of every kind of samples, and allocate the scratch.

    Args:
        values: Stored keys [B, H_kv, N_k, C] of `api.QuantizedKeys`.
        key_block: Tokens per key block.
    """
    keys = [interleaved_keys(values, tiles, key_block) for tiles in plan.kinds]
    scratch = [
        torch.empty(size, device=values.device, dtype=plan.scratch_dtype)
        for size in plan.scratch_logits
    ]
    return [
        Stream(sample=sample, tiles=tiles, keys=own_keys, scratch=logits)
        for sample, tiles, own_keys, logits in zip(samples, plan.kinds, keys, scratch, strict=True)
    ]


def interleaved_keys(
    values: Tensor, tiles: SampleTiles, key_block: int
) -> list[TensorDescriptor | Tiles]:
    """Return tiles of the sampled keys, in which the key blocks of a step alternate.

    In a row of a product, each of `tiles.LANES` lanes holds every fourth pair of columns. With keys
    in order, a lane would hold some columns of every block, and a maximum per block would need
    exchanges between lanes. With alternating blocks, a lane holds the logits of one block and
    compares registers only. Tensor descriptors or pointers read the keys in this order.

    Args:
        values: Stored keys [B, H_kv, N_k, C].
        key_block: Tokens per key block.

    Returns:
        One tile, or two: of the first channels, and of the other channels.
    """
    if tiles.key_stride > 1:
        # whole blocks, so that every block has the same number of sampled keys
        values = padded_to_blocks(values, key_block)
        values = values[:, :, reference.key_offset(tiles.key_stride) :: tiles.key_stride]
    keys = values[..., : tiles.first + tiles.others]
    first = tiles.first
    if not launch.reads_by_descriptor(keys.device):
        parts = [keys[..., :first], keys[..., first:]] if tiles.others else [keys]
        return [descriptor(part, tokens=tiles.tile_keys) for part in parts]
    interleave = tiles.interleave
    # without several blocks per step, a block is one tile or several tiles
    block = tiles.key_block if tiles.tile_keys > tiles.key_block else tiles.tile_keys
    keys = padded_to_blocks(keys, block)
    # [plane, part of a block, block, key, C]
    x = described(keys).flatten(0, 1).unflatten(1, (-1, block // interleave, interleave))
    x = x.transpose(1, 2)
    box = [1, block // interleave, tiles.blocks_per_step, interleave]
    parts = [x[..., :first], x[..., first:]] if tiles.others else [x]
    return [TensorDescriptor.from_tensor(part, [*box, part.shape[-1]]) for part in parts]


def padded_to_blocks(keys: Tensor, key_block: int) -> Tensor:
    """Return keys [B, H_kv, N_k, C] with zeros after the last key, up to whole key blocks."""
    missing = -keys.shape[2] % key_block
    if not missing:
        return keys
    # pad 8-bit floats as bits: PyTorch cannot pad their dtype
    bits = keys.view(torch.uint8) if keys.element_size() == 1 else keys
    return F.pad(bits, (0, 0, 0, missing)).view(keys.dtype)


def score_samples(
    stream: Stream,
    *,
    values: Tensor,
    exponents: KeyExponents | None,
    plan: TilePlan,
    part: TileRange,
    heads: HeadRange,
    key_block: int,
    sinks: Tensor | None,
    softcap: float | None,
) -> None:
    """Fill the scratch and the log-sum-exp of one kind of samples for one part of the tiles.

    Args:
        values: Stored keys [B, H_kv, N_k, C].
        exponents: Exponents of 8-bit keys; None for other dtypes.
        key_block: Tokens per key block.
        sinks: See `reference.block_shares`.
        softcap: Soft cap of logits to base two.
    """
    sample, tiles = stream.sample, stream.tiles
    own = plan.tiles_of(tiles, part)
    is_fp8, num_tiles = values.dtype == FP8, own.end - own.begin
    grid = (num_tiles, heads.count) if plan.is_by_head else (heads.count, num_tiles)
    _score_kernel[grid](
        sample.tensors,
        stream.keys[0],
        stream.keys[-1],
        exponents,
        sinks,
        softcap,
        stream.scratch,
        tiles.columns(own),
        tiles.all_columns,
        own.begin,
        heads.first,
        heads.per_row,
        values.shape[1],
        values.shape[2],
        plan.q_blocks,
        COUNT=tiles.num_samples,
        Q_BLOCKS=tiles.q_blocks_per_tile,
        GROWTH=tiles.scratch_growth,
        TOKENS=key_block,
        KEY_BLOCK=tiles.key_block,
        KEY_STRIDE=tiles.key_stride,
        KEY_OFFSET=reference.key_offset(tiles.key_stride),
        BY_HEAD=plan.is_by_head,
        BLOCK_N=tiles.tile_keys,
        INTERLEAVE=tiles.interleave,
        FIRST=tiles.first,
        OTHERS=tiles.others,
        HALF=is_fp8,
        PACKED=is_fp8 and launch.packed(values),
        PRECISION=precision(sample.vectors),
        STAGES=tiles.stages,
        num_warps=WARPS,
        **(launch.registers(values, REGISTERS) if is_fp8 else {}),
    )


@triton.jit
def scratch_of(
    scratch, plane, tile, begin, columns, all_columns, ROWS: tl.constexpr, GROWTH: tl.constexpr
):  # fmt: skip
    """Return a pointer to the first logit of a tile of rows."""
    before = (tile - begin) * all_columns
    if GROWTH > 0:
        before = GROWTH * (tile * (tile + 1) - begin * (begin + 1)) // 2
    return scratch + (plane.to(tl.int64) * columns + before) * ROWS


@triton.jit
def capped(logit, softcap):
    """Return `reference.capped`; -inf stays -inf."""
    if softcap is not None:
        logit = tl.where(logit == float("-inf"), logit, softcap * tanh(logit / softcap))
    return logit


@triton.jit
def load_keys(
    x, plane, kv_heads, column, key, SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Load the keys ``column + key`` from a tile of `interleaved_keys`, [BLOCK_N, CHANNELS]."""
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([plane, 0, column // SIZE, 0, 0]).reshape(BLOCK_N, CHANNELS)
    else:
        at = vectors_at(x, plane // kv_heads, plane % kv_heads, column + key)
        inside = (column + key < x.tokens)[:, None]
        tile = tl.load(at + tl.arange(0, CHANNELS)[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def largest_part(x, PACKED: tl.constexpr):
    """Return the maximum over dim 1 of the four dims of ``x``; its size is a power of two."""
    y = x
    for _ in tl.static_range(HALVINGS):
        if y.shape[1] > 1:
            y = tl.reshape(y, (y.shape[0], 2, y.shape[1] // 2, y.shape[2], y.shape[3]))
            one, other = tl.split(tl.permute(y, (0, 2, 3, 4, 1)))
            if PACKED:
                # two float16 at a time: Triton would compare them one at a time
                y = tl.inline_asm_elementwise(
                    "max.f16x2 $0, $1, $2;", "=r,r,r", [one, other], tl.float16, True, 2
                )
            else:
                y = tl.maximum(one, other)
    return tl.reshape(y, (x.shape[0], x.shape[2], x.shape[3]))


@triton.jit
def larger(a, b):
    # tl.max would convert float16 to float32, which halves the rate of comparisons
    return tl.maximum(a, b)


@triton.jit
def _by_block(
    qk, unit, key, start, end, column, PART: tl.constexpr, HAS_UNITS: tl.constexpr,
    PACKED: tl.constexpr, BLOCKS: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """Return the maximum of a tile of products per key block, [ROWS, BLOCKS].

    Keys ``start`` to ``end`` are visible to a row. In ``PART`` 1 all keys of a tile are visible.
    """
    if HAS_UNITS:
        qk *= unit[None, :]
    if PART != 1:
        there = key[None, :] <= (end - column)[:, None]
        if PART == 0:
            there &= key[None, :] >= (start - column)[:, None]
        # a scalar would convert all to float32
        qk = tl.where(there, qk, tl.full(qk.shape, float("-inf"), qk.dtype))
    rows: tl.constexpr = qk.shape[0]
    parts: tl.constexpr = qk.shape[1] // BLOCKS // INTERLEAVE
    qk = tl.reshape(qk, (rows, parts, BLOCKS, INTERLEAVE))
    return tl.reduce(largest_part(qk, PACKED), 2, larger)


@triton.jit
def _added(m_i, l_i, block_max, qk_scale, softcap):
    """Return the running maximum and sum of powers of two after adding some key blocks."""
    logit = capped(block_max.to(tl.float32) * qk_scale[:, None], softcap)
    rise = logit - m_i
    # one exponential: either the old sum is scaled down, or the new term
    fade = tl.exp2(-tl.abs(rise))
    l_i = tl.where(rise > 0, l_i * fade + 1.0, l_i + fade)
    return tl.maximum(m_i, logit), l_i


@triton.jit
def _log_sum_exp(m_i, l_i, real, sinks, head, TOKENS: tl.constexpr):
    """Return the log-sum-exp of each row to base two; infinity for rows without keys."""
    m = tl.max(m_i, 1)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        m = tl.maximum(m, sink)
    total = tl.sum(l_i * tl.exp2(m_i - m[:, None]), 1)
    if sinks is not None:
        total += tl.exp2(sink - m) / TOKENS
    return tl.where(real, m + tl.log2(tl.maximum(total, 1e-30)), float("inf"))


@triton.jit
def _visible_steps(start, end, STEP: tl.constexpr):
    """Return the steps that are visible to any row, and the steps completely visible to all."""
    real = end >= 0
    last = tl.max(end, 0)
    first_step = tl.where(last < 0, 0, tl.min(tl.where(real, start, 2147483647), 0) // STEP)
    end_step = tl.where(last < 0, 0, last // STEP + 1)
    whole_first = tl.cdiv(tl.max(tl.where(real, start, -1), 0), STEP)
    whole_end = (tl.min(tl.where(real, end, 2147483647), 0) + 1) // STEP
    return first_step, end_step, whole_first, whole_end


# the position of a launch must not cause another compilation
@triton.jit(do_not_specialize=[*POSITIONS, "kv_heads", "kv_length"])
def _score_kernel(
    sample,
    keys_first,
    keys_others,
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
    BY_HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    FIRST: tl.constexpr,
    OTHERS: tl.constexpr,
    HALF: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write for every sample of a tile the maximum logit per key block, and the log-sum-exp.

    The log-sum-exp runs over the maxima of key blocks. Keys are counted in sampled keys: key i is
    the token KEY_OFFSET + i * KEY_STRIDE.
    """
    # a step is one tile of several key blocks, or one key block of several tiles
    STEP: tl.constexpr = BLOCK_N if BLOCK_N > KEY_BLOCK else KEY_BLOCK
    BLOCKS: tl.constexpr = STEP // KEY_BLOCK
    DTYPE: tl.constexpr = tl.float16 if HALF else tl.float32
    ROWS: tl.constexpr = Q_BLOCKS * COUNT
    # the longest rows start first
    if BY_HEAD:
        plane = tl.program_id(1)
        tile = begin + tl.num_programs(0) - 1 - tl.program_id(0)
    else:
        plane = tl.program_id(0)
        tile = begin + tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (first_head + plane) // heads
    kv_plane = batch * kv_heads + (first_head + plane) % heads // (heads // kv_heads)

    # samples: q_first [ROWS, FIRST] and q_others [ROWS, OTHERS]; visible keys and scale [ROWS]
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < q_blocks * COUNT
    line = plane.to(tl.int64) * (q_blocks * COUNT) + row
    start = tl.load(sample.start + line, mask=inside, other=0)
    end = tl.load(sample.end + line, mask=inside, other=-1)
    qk_scale = tl.load(sample.scale + line, mask=inside, other=1.0)
    source = sample.vectors + line[:, None] * (FIRST + OTHERS)
    q_first = tl.load(source + tl.arange(0, FIRST)[None, :], mask=inside[:, None], other=0.0)
    if OTHERS > 0:
        other = FIRST + tl.arange(0, OTHERS)
        q_others = tl.load(source + other[None, :], mask=inside[:, None], other=0.0)

    # steps: scalars
    first_step, end_step, whole_first, whole_end = _visible_steps(start, end, STEP)
    if GROWTH > 0:
        # the scratch has no columns for keys after the tile
        end_step = tl.minimum(end_step, GROWTH // BLOCKS * (tile + 1))
    whole_first = tl.minimum(tl.maximum(whole_first, first_step), end_step)
    whole_end = tl.minimum(tl.maximum(whole_end, whole_first), end_step)
    if HALF:
        largest = tl.load(exponents.largest + kv_plane).to(tl.int32)
        qk_scale *= power_of_two(largest)
        if tl.load(exponents.smallest + kv_plane) < largest:
            # keys with several units are multiplied by their unit, all in the first part
            whole_first, whole_end = end_step, end_step

    # scratch of a step: [ROWS, BLOCKS]
    target = scratch_of(scratch, plane, tile, begin, columns, all_columns, ROWS, GROWTH)
    target += tl.arange(0, ROWS)[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    # the key of each column of a tile [BLOCK_N]: blocks alternate
    SIZE: tl.constexpr = BLOCK_N // BLOCKS
    place = tl.arange(0, BLOCK_N)
    key = place // INTERLEAVE % BLOCKS * SIZE
    key += place // (INTERLEAVE * BLOCKS) * INTERLEAVE + place % INTERLEAVE

    # running maximum and sum [ROWS, BLOCKS]: lanes exchange nothing before the end
    m_i = tl.full((ROWS, BLOCKS), -1e30, tl.float32)
    l_i = tl.zeros((ROWS, BLOCKS), tl.float32)
    # parts: steps before, inside of and after the range that is completely visible to all rows
    for PART in tl.static_range(3):
        begins = first_step if PART == 0 else whole_first if PART == 1 else whole_end
        ends = whole_first if PART == 0 else whole_end if PART == 1 else end_step
        for i in tl.range(begins, ends, num_stages=STAGES):
            block_max = tl.full((ROWS, BLOCKS), float("-inf"), DTYPE)
            for offset in tl.static_range(0, STEP, BLOCK_N):
                column = i * STEP + offset
                # units of the keys [BLOCK_N], relative to the largest one
                unit = 0
                if HALF and PART == 0:
                    token = KEY_OFFSET + (column + key) * KEY_STRIDE
                    each = exponents.each + kv_plane.to(tl.int64) * kv_length
                    unit = tl.load(each + token, mask=token < kv_length, other=0)
                    unit = power_of_two(unit.to(tl.int32) - largest).to(DTYPE)
                # keys [FIRST, BLOCK_N] and [OTHERS, BLOCK_N], products [ROWS, BLOCK_N]
                k = load_keys(keys_first, kv_plane, kv_heads, column, key, SIZE, BLOCK_N, FIRST).T
                qk = tl.dot(q_first, k, input_precision=PRECISION, out_dtype=DTYPE)
                if OTHERS > 0:
                    k = load_keys(
                        keys_others, kv_plane, kv_heads, column, key, SIZE, BLOCK_N, OTHERS
                    ).T
                    qk = tl.dot(q_others, k, qk, input_precision=PRECISION, out_dtype=DTYPE)
                here = _by_block(
                    qk, unit, key, start, end, column, PART, HALF and PART == 0, PACKED,
                    BLOCKS, INTERLEAVE,
                )  # fmt: skip
                block_max = tl.maximum(block_max, here)
            tl.store(target + i * (ROWS * BLOCKS), block_max)
            m_i, l_i = _added(m_i, l_i, block_max, qk_scale, softcap)

    # log-sum-exp, and the scale with the unit of the keys: [ROWS]
    head = (first_head + plane) % heads
    lse = _log_sum_exp(m_i, l_i, end >= 0, sinks, head, TOKENS)
    tl.store(sample.lse + line, lse, mask=inside)
    tl.store(sample.scale + line, qk_scale, mask=inside)
