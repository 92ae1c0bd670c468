"""Scored vectors on the GPU: the keys, and the outliers and typical queries of each query block.

The definitions are `reference.outlier_queries` and `reference.typical_queries`. On devices with
8-bit products, keys and queries are rounded to 8-bit floats here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from cab_hf import capability
from cab_hf.ops import reference
from cab_hf.ops.attention.tiles import (
    INFINITE_BITS,
    LOG2_E,
    magnitude,
    precision,
    vectors,
    vectors_at,
)
from cab_hf.ops.reference import COSINE_STEPS, LEAST_SQUARE
from cab_hf.plan import KeyRanges

FP8 = torch.float8_e4m3fn
# 8-bit keys are rounded as if the exponent of their largest channel were -2: to four bits, and to
# multiples of 2^-9. Thus keys of all magnitudes have the same relative rounding, and no key affects
# another. The result also fits with exponents up to 7: units are 2^10 apart. The keys of a head
# nearly always share one unit, because their largest channels rarely leave 2^-3 to 2^7
ROUNDED_AT, UNIT_BEGINS, UNITS_APART = map(tl.constexpr, (-2, -3, 10))
# products of larger channels would not be finite
LARGEST_CHANNEL = tl.constexpr(2.0**56)
# exponent that marks a key with NaN or an infinity. Exponents of finite keys are one less than a
# multiple of 10, and most are -1. An exponent next to -1 does not widen the range that a float16
# must hold
NOT_FINITE = -2
NOT_FINITE_EXPONENT = tl.constexpr(NOT_FINITE)
# norm of 8-bit queries: products with keys of norms up to 32,000 fit a float16
QUERY_NORM = 8.0
# the number of channels in a product of 8-bit floats is a multiple of this
LEAST_CHANNELS = 32
# 16-bit channels that one instruction reads
LONGEST_RUN = 8
# tables of channels that are cached on devices
COPIES = 256
TOKENS_OF_KEYS, ROWS_GATHERED = 128, 64
# channels per product of queries with queries
GRAM_CHANNELS = 64
# the largest query block whose Gram matrix fits the registers of a program
GRAM_QUERIES = 128
# bytes of Gram matrices at a time: larger inputs are processed in several launches
GRAM_BYTES = 512 << 20
COSINE_STEPS = tl.constexpr(COSINE_STEPS)
LEAST_SQUARE = tl.constexpr(LEAST_SQUARE)
PADDING_STEPS = tl.constexpr(reference.PADDING_STEPS)
SAMPLED_STEPS = tl.constexpr(reference.SAMPLED_STEPS)


class Channels(NamedTuple):
    """Order in which channels are stored: the channels that score outliers, then the others.

    Attributes:
        table: int32 [width], the channel of q or k at each place; -1 for padding.
        first: Places of the outliers' channels, a power of two; ``width`` if outliers use all.
        width: All places. The number of places of the other channels is a power of two as well.
        run: Number of adjacent places that hold adjacent channels, or none; they are read at once.
    """

    table: Tensor
    first: int
    width: int
    run: int

    @classmethod
    @lru_cache(COPIES)
    def of(cls, channels: tuple[int, ...], dim: int, device: torch.device) -> Channels:
        """Return the order for `LayerContext.channels`, () for all ``dim``.

        The result is cached, because the copy to the device synchronises.
        """
        others = [x for x in range(dim) if x not in channels] if channels else []
        parts = [part for part in (channels or tuple(range(dim)), others) if part]
        rooms = [max(LEAST_CHANNELS, triton.next_power_of_2(len(part))) for part in parts]
        table = [
            channel
            for part, room in zip(parts, rooms, strict=True)
            for channel in (*part, *[-1] * (room - len(part)))
        ]
        made = torch.tensor(table, dtype=torch.int32, device=device)
        return cls(made, rooms[0], sum(rooms), _run(table))

    @staticmethod
    def widths(channels: tuple[int, ...], dim: int) -> int:
        """Return the ``width`` of `of` without a device."""
        sizes = (len(channels), dim - len(channels)) if channels else (dim,)
        return sum(max(LEAST_CHANNELS, triton.next_power_of_2(size)) for size in sizes if size)


def _run(table: list[int]) -> int:
    """Return the ``run`` of `Channels`, a power of two up to `LONGEST_RUN`."""
    run = LONGEST_RUN
    while not all(
        group == [-1] * run or group[0] % run == 0 and group == [*range(group[0], group[0] + run)]
        for group in (table[at : at + run] for at in range(0, len(table), run))
    ):
        run //= 2
    return run


class QuerySample(NamedTuple):
    """Scored queries of every query block of some heads, one block after the other.

    Attributes:
        vectors: [heads, M_q * count, C], scaled.
        scale: float32 [heads, M_q * count], factors from products to logits in base two. The sweep
            multiplies the unit of 8-bit keys into them.
        norm: float32, same shape: the log-sum-exp that the sweep writes.
        first: int32, same shape: the first sampled key that a query sees.
        last: int32, same shape: the last sampled key that a query sees; -1 if it sees none.
        count: Scored queries per query block.
        key_stride: Distance in tokens of the keys that these queries are scored against. ``first``
            and ``last`` count in steps of it.
    """

    vectors: Tensor
    scale: Tensor
    norm: Tensor
    first: Tensor
    last: Tensor
    count: int
    key_stride: int


def scored_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of scored products: 8-bit floats for 16-bit ``x`` if the GPU has them."""
    has_units = x.dtype != torch.float32 and capability.capability(x.device) >= capability.FP8
    return FP8 if has_units else x.dtype


def empty_keys(k: Tensor, channels: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate what `scored_keys` returns."""
    keys = k.new_empty(*k.shape[:3], Channels.widths(channels, k.shape[3]), dtype=dtype)
    return keys, k.new_empty(*k.shape[:3], 1, dtype=torch.int8)


def scored_keys(k: Tensor, channels: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scored keys [B, H_kv, N_k, C] of k [B, H_kv, N_k, D], and their exponents.

    `Channels` defines the order of the channels. Each 8-bit key has a unit, a power of two. The
    exponent of the unit is int8 [B, H_kv, N_k, 1], and 0 for other dtypes. A key with NaN or an
    infinity in any channel becomes zeros, and its exponent is `NOT_FINITE`.
    """
    batch, heads, length, dim = k.shape
    order = Channels.of(channels, dim, k.device)
    k = k if k.stride(-1) == 1 else k.contiguous()
    keys, exponents = empty_keys(k, channels, dtype)
    _scored_keys_kernel[(batch * heads, triton.cdiv(length, TOKENS_OF_KEYS))](
        vectors(k),
        keys,
        exponents,
        order.table,
        heads,
        length,
        BLOCK_N=TOKENS_OF_KEYS,
        FIRST=order.first,
        OTHERS=order.width - order.first,
        RUN=order.run,
        num_warps=4,
    )
    return keys, exponents


def outliers(
    q: Tensor, ranges: KeyRanges, planes: tuple[int, int], query_block: int, count: int
) -> Tensor:
    """Return `reference.outlier_queries` of some heads of q [B, H, N_q, D].

    Args:
        planes: The first head and the number of heads, counted over batch rows and heads.

    Returns:
        int32 [heads, M_q * count].
    """
    heads, length, dim = q.shape[1:]
    start, some = planes
    q_blocks = triton.cdiv(length, query_block)
    if count == query_block:
        place = torch.arange(q_blocks * count, device=q.device, dtype=torch.int32)
        last = F.pad(ranges.end, (0, len(place) - length), value=-1)
        return place.where(last >= 0, -1).repeat_interleave(heads, 0)[start : start + some]
    block_q = triton.next_power_of_2(query_block)
    has_gram = query_block <= GRAM_QUERIES
    step = max(1, GRAM_BYTES // (block_q * block_q * some)) if has_gram else q_blocks
    step = min(step, q_blocks)
    positions = torch.empty(some, q_blocks * count, device=q.device, dtype=torch.int32)
    gram = q.new_empty(some * step * block_q, block_q, dtype=torch.int8) if has_gram else None
    nearest = positions.new_empty(some * step, block_q)
    inverse = torch.empty_like(nearest, dtype=torch.float32)
    last = ranges.end if ranges.end.stride(1) == 1 else ranges.end.contiguous()
    queries = vectors(q if q.stride(-1) == 1 else q.contiguous())
    for begin in range(0, q_blocks, step):
        # heads vary fastest: neighbouring programs read neighbouring memory of a [B, N, H, D]
        # tensor
        grid = some, min(step, q_blocks - begin)
        _similarities_kernel[grid](
            queries,
            last,
            last.stride(0),
            gram,
            nearest,
            inverse,
            begin,
            start,
            heads,
            length,
            QUERY_BLOCK=query_block,
            BLOCK_Q=block_q,
            D=dim,
            BLOCK_D=max(16, min(GRAM_CHANNELS, triton.next_power_of_2(dim))),
            PRECISION=precision(q),
            num_warps=4,
        )
        _farthest_points_kernel[grid](
            queries,
            gram,
            nearest,
            inverse,
            positions,
            begin,
            start,
            heads,
            q_blocks,
            QUERY_BLOCK=query_block,
            COUNT=count,
            BLOCK_Q=block_q,
            D=dim,
            BLOCK_D=max(16, min(GRAM_CHANNELS, triton.next_power_of_2(dim))),
            num_warps=1 if has_gram else 4,
        )
    return positions


def scored_rows(
    q: Tensor,
    ranges: KeyRanges,
    planes: tuple[int, int],
    scale: float,
    query_block: int,
    count: int,
    channels: tuple[int, ...],
    dtype: torch.dtype,
    positions: Tensor | None = None,
    key_stride: int = 1,
) -> QuerySample:
    """Gather the sampled queries of some heads and convert them to ``dtype``.

    Args:
        planes: See `outliers`.
        positions: Outliers, see `outliers`: they are gathered on ``channels``. None for the
            ``count`` typical queries of every block, on all channels.
        key_stride: Distance of the keys that the queries will be scored against.
    """
    heads, length, dim = q.shape[1:]
    order = Channels.of(channels, dim, q.device)
    width = order.width if positions is None else order.first
    start, some = planes
    total = triton.cdiv(length, query_block) * count
    rows = QuerySample(
        q.new_empty(some, total, width, dtype=dtype),
        *(q.new_empty(some, total, dtype=torch.float32) for _ in range(2)),
        *(torch.empty(some, total, device=q.device, dtype=torch.int32) for _ in range(2)),
        count,
        key_stride,
    )
    first, last = (x if x.stride(1) == 1 else x.contiguous() for x in (ranges.start, ranges.end))
    _scored_rows_kernel[(some, triton.cdiv(total, ROWS_GATHERED))](
        vectors(q if q.stride(-1) == 1 else q.contiguous()),
        first,
        last,
        first.stride(0),
        last.stride(0),
        positions,
        order.table,
        rows[:-2],
        scale * LOG2_E.value,
        start,
        heads,
        length,
        total,
        NORM=QUERY_NORM if dtype == FP8 else 0.0,
        QUERY_BLOCK=query_block,
        COUNT=count,
        BLOCK_M=ROWS_GATHERED,
        FIRST=order.first,
        OTHERS=width - order.first,
        RUN=order.run,
        KEY_STRIDE=key_stride,
        KEY_OFFSET=reference.key_offset(key_stride),
        num_warps=4,
    )
    return rows


@triton.jit
def exponent_of(x):
    """Return the binary exponents of non-negative float32 numbers, clamped to -60 to 60."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.minimum(tl.maximum(exponent, -60), 60)


@triton.jit
def power_of_two(exponent):
    """Return exact float32 powers of two for whole exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _read(at, there, table, BEGIN: tl.constexpr, COUNT: tl.constexpr, RUN: tl.constexpr):
    """Read some channels of the vectors ``at``, in the order of the table; return their places too.

    The values are float32 [N, COUNT], zeros where a place has no channel.
    """
    place = BEGIN + tl.arange(0, COUNT)
    channel = tl.max_contiguous(tl.multiple_of(tl.load(table + place), RUN), RUN)
    mask = there[:, None] & (channel >= 0)[None, :]
    return tl.load(at + channel[None, :], mask=mask, other=0.0).to(tl.float32), place


@triton.jit
def _clamped(x):
    """Clamp finite float32 to `LARGEST_CHANNEL`."""
    return tl.clamp(x, -LARGEST_CHANNEL, LARGEST_CHANNEL)


@triton.jit
def _rounded(x, exponent, above, keys):
    """Return ``x`` as 8-bit floats, rounded at `ROUNDED_AT` and scaled by 2 ** ``above``."""
    x = (x * power_of_two(-exponent)[:, None]).to(keys.dtype.element_ty).to(tl.float32)
    return (x * power_of_two(above)[:, None]).to(keys.dtype.element_ty)


# the length must not cause another compilation
@triton.jit(do_not_specialize=["length"])
def _scored_keys_kernel(
    k,
    keys,
    exponents,
    table,
    heads,
    length,
    BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr,
    OTHERS: tl.constexpr,
    RUN: tl.constexpr,
):
    plane = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = token < length
    at = vectors_at(k, plane // heads, plane % heads, token)
    line = plane.to(tl.int64) * length + token
    target = keys + line[:, None] * (FIRST + OTHERS)
    x, place = _read(at, inside, table, 0, FIRST, RUN)
    if OTHERS > 0:
        y, behind = _read(at, inside, table, FIRST, OTHERS, RUN)
    # as integers: a maximum of floats may drop a NaN
    bits = tl.max(magnitude(x), 1)
    if OTHERS > 0:
        bits = tl.maximum(bits, tl.max(magnitude(y), 1))
    finite = bits < INFINITE_BITS
    x = tl.where(finite[:, None], x, 0.0)
    if OTHERS > 0:
        y = tl.where(finite[:, None], y, 0.0)
    if keys.dtype.element_ty.is_fp8():
        x = _clamped(x)
        if OTHERS > 0:
            y = _clamped(y)
        largest = tl.where(finite, bits, 0).to(tl.float32, bitcast=True)
        largest = tl.minimum(largest, LARGEST_CHANNEL)
        # any unit fits a key of zeros: use the unit of most keys
        exponent = tl.where(largest > 0, exponent_of(largest), 0)
        # the remainder in Triton has the sign of the dividend
        above = (exponent - UNIT_BEGINS + 100 * UNITS_APART) % UNITS_APART
        exponent -= ROUNDED_AT
        stored = tl.where(finite, exponent - above, NOT_FINITE_EXPONENT)
        tl.store(exponents + line, stored.to(tl.int8), mask=inside)
        tl.store(target + place[None, :], _rounded(x, exponent, above, keys), mask=inside[:, None])
        if OTHERS > 0:
            y = _rounded(y, exponent, above, keys)
            tl.store(target + behind[None, :], y, mask=inside[:, None])
    else:
        stored = tl.where(finite, 0, NOT_FINITE_EXPONENT)
        tl.store(exponents + line, stored.to(tl.int8), mask=inside)
        tl.store(target + place[None, :], x.to(keys.dtype.element_ty), mask=inside[:, None])
        if OTHERS > 0:
            tl.store(target + behind[None, :], y.to(keys.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _cosine_steps(products, inverse, other_inverse):
    """Return cosine similarities in steps of 1 / COSINE_STEPS; NaN counts as -1."""
    cosine = products * inverse * other_inverse
    cosine = tl.where(cosine == cosine, cosine, -1.0)
    return tl.minimum(tl.maximum(cosine, -1.0), 1.0) * COSINE_STEPS


@triton.jit
def _load_queries(at, real, begin, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load channels from ``begin`` on of the queries of a block, [BLOCK_Q, BLOCK_D]."""
    channel = begin + tl.arange(0, BLOCK_D)
    mask = real[:, None] & (channel < D)[None, :]
    return tl.load(at + channel[None, :], mask=mask, other=0.0)


# these numbers must not cause another compilation
@triton.jit(do_not_specialize=["last_stride", "begin", "start", "length"])
def _similarities_kernel(
    q,
    last,
    last_stride,
    gram,
    nearest,
    inverse,
    begin,
    start,
    heads,
    length,
    QUERY_BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the cosine similarities of one query block, in steps of 1 / COSINE_STEPS.

    Outputs: ``gram`` int8 [BLOCK_Q, BLOCK_Q], None if blocks are too large; ``nearest`` int32
    [BLOCK_Q], the similarity to the mean query, PADDING_STEPS for padding; ``inverse`` float32
    [BLOCK_Q], 1 / norm.
    """
    block = begin + tl.program_id(1)
    mine = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_Q)
    query = block * QUERY_BLOCK + place
    inside = (place < QUERY_BLOCK) & (query < length)
    real = tl.load(last + (start + mine) // heads * last_stride + query, mask=inside, other=-1) >= 0
    at = vectors_at(q, (start + mine) // heads, (start + mine) % heads, query)
    # the sum replaces the mean: its length does not change the cosine
    if gram is not None:
        matrix = tl.zeros([BLOCK_Q, BLOCK_Q], tl.float32)
        for channel in tl.static_range(0, D, BLOCK_D):
            x = _load_queries(at, real, channel, D, BLOCK_D)
            matrix = tl.dot(x, x.T, matrix, input_precision=PRECISION)
        square = tl.sum(tl.where(place[:, None] == place[None, :], matrix, 0.0), 1)
        products = tl.sum(matrix, 1)
        mean_square = tl.sum(products, 0)
    else:
        square = tl.zeros([BLOCK_Q], tl.float32)
        products = tl.zeros([BLOCK_Q], tl.float32)
        mean_square = 0.0
        for channel in tl.static_range(0, D, BLOCK_D):
            x = _load_queries(at, real, channel, D, BLOCK_D).to(tl.float32)
            total = tl.sum(x, 0)
            square += tl.sum(x * x, 1)
            products += tl.sum(x * total[None, :], 1)
            mean_square += tl.sum(total * total, 0)
    own = tl.rsqrt(tl.maximum(square, LEAST_SQUARE))
    line = (tl.program_id(1) * tl.num_programs(0) + mine) * BLOCK_Q
    to_mean = _cosine_steps(products, own, tl.rsqrt(tl.maximum(mean_square, LEAST_SQUARE)))
    tl.store(nearest + line + place, tl.where(real, to_mean.to(tl.int32), PADDING_STEPS))
    tl.store(inverse + line + place, own)
    if gram is not None:
        # sums of rows and of columns have different layouts: one of the two is read again
        tl.debug_barrier()
        other = tl.load(inverse + line + place)
        steps = _cosine_steps(matrix, own[:, None], other[None, :]).to(tl.int8)
        tl.store(gram + (line + place)[:, None] * BLOCK_Q + place[None, :], steps)


@triton.jit
def _products_with(at, vector, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return dot products of a block's queries with one vector in memory, float32 [BLOCK_Q]."""
    products = tl.zeros([BLOCK_Q], tl.float32)
    for begin in tl.static_range(0, D, BLOCK_D):
        channel = begin + tl.arange(0, BLOCK_D)
        y = tl.load(vector + channel, mask=channel < D, other=0.0).to(tl.float32)
        x = tl.load(at + channel[None, :], mask=(channel < D)[None, :], other=0.0).to(tl.float32)
        products += tl.sum(x * y[None, :], 1)
    return products


# these numbers must not cause another compilation
@triton.jit(do_not_specialize=["begin", "start", "q_blocks"])
def _farthest_points_kernel(
    q,
    gram,
    nearest,
    inverse,
    positions,
    begin,
    start,
    heads,
    q_blocks,
    QUERY_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the positions of a farthest-point sample of one query block, -1 for none.

    A step takes one row of similarities from ``gram``, or computes the row where that is None.
    """
    block = begin + tl.program_id(1)
    mine = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_Q)
    line = (tl.program_id(1) * tl.num_programs(0) + mine) * BLOCK_Q
    similarity = tl.load(nearest + line + place)
    real = similarity < PADDING_STEPS
    highest = similarity
    if gram is None:
        own = tl.load(inverse + line + place)
        batch = (start + mine) // heads
        head = (start + mine) % heads
        # padding repeats the first query of the block: its similarities are not used
        at = vectors_at(q, batch, head, block * QUERY_BLOCK + tl.where(real, place, 0))
    number = tl.arange(0, COUNT)
    samples = tl.full([COUNT], -1, tl.int32)
    for i in range(COUNT):
        # the position is in the lowest bits: ties go to the earlier query
        least = tl.min(highest * BLOCK_Q + place, 0)
        chosen = least & (BLOCK_Q - 1)
        is_real = least < PADDING_STEPS * BLOCK_Q
        samples = tl.where((number == i) & is_real, block * QUERY_BLOCK + chosen, samples)
        if gram is not None:
            similarity = tl.load(gram + (line + chosen) * BLOCK_Q + place).to(tl.int32)
        else:
            token = (block * QUERY_BLOCK + tl.where(is_real, chosen, 0)).to(tl.int64)
            vector = q.data + batch * q.batch + head * q.head + token * q.token
            products = _products_with(at, vector, D, BLOCK_Q, BLOCK_D)
            other = tl.load(inverse + line + chosen)
            similarity = _cosine_steps(products, own, other).to(tl.int32)
        highest = tl.where(i == 0, similarity, tl.maximum(highest, similarity))
        highest = tl.where(place == chosen, SAMPLED_STEPS, highest)
        highest = tl.where(real, highest, PADDING_STEPS)
    tl.store(positions + (mine * q_blocks + block) * COUNT + number, samples)


# these numbers must not cause another compilation
@triton.jit(do_not_specialize=["first_stride", "last_stride", "start", "length", "total"])
def _scored_rows_kernel(
    q,
    first,
    last,
    first_stride,
    last_stride,
    positions,
    table,
    rows,
    qk_scale,
    start,
    heads,
    length,
    total,
    NORM: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FIRST: tl.constexpr,
    OTHERS: tl.constexpr,
    RUN: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    KEY_OFFSET: tl.constexpr,
):
    """Gather, scale and round ROWS_GATHERED sampled queries, and write the keys that they see."""
    vectors, scales, _, firsts, lasts = rows
    mine = tl.program_id(0).to(tl.int64)
    batch = (start + mine) // heads
    head = (start + mine) % heads
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < total
    if positions is not None:
        query = tl.load(positions + mine * total + row, mask=inside, other=-1)
    else:
        # the middle of equal steps
        apart: tl.constexpr = QUERY_BLOCK // COUNT
        query = row // COUNT * QUERY_BLOCK + row % COUNT * apart + apart // 2
        query = tl.where(inside & (query < length), query, -1)
    there = query >= 0
    lowest = tl.load(first + batch * first_stride + query, mask=there, other=0)
    highest = tl.load(last + batch * last_stride + query, mask=there, other=-1)
    real = highest >= 0
    at = vectors_at(q, batch, head, query)
    x, place = _read(at, real, table, 0, FIRST, RUN)
    size = tl.sum(x * x, 1)
    bits = tl.max(magnitude(x), 1)
    if OTHERS > 0:
        y, behind = _read(at, real, table, FIRST, OTHERS, RUN)
        size += tl.sum(y * y, 1)
        bits = tl.maximum(bits, tl.max(magnitude(y), 1))
    scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if NORM > 0:
        scale = NORM / tl.sqrt(tl.maximum(size, LEAST_SQUARE))
    row += mine * total
    target = vectors + row[:, None] * (FIRST + OTHERS)
    x = (x * scale[:, None]).to(vectors.dtype.element_ty)
    tl.store(target + place[None, :], x, mask=inside[:, None])
    if OTHERS > 0:
        y = (y * scale[:, None]).to(vectors.dtype.element_ty)
        tl.store(target + behind[None, :], y, mask=inside[:, None])
    # convert tokens to sampled keys
    lowest = (tl.maximum(lowest - KEY_OFFSET, 0) + KEY_STRIDE - 1) // KEY_STRIDE
    highest = tl.where(highest >= KEY_OFFSET, (highest - KEY_OFFSET) // KEY_STRIDE, -1)
    highest = tl.where(highest >= lowest, highest, -1)
    # a query that is not finite gives NaN as its share of every key block
    scale = tl.where(bits < INFINITE_BITS, qk_scale / scale, float("nan"))
    tl.store(scales + row, scale, mask=inside)
    tl.store(firsts + row, lowest, mask=inside)
    tl.store(lasts + row, highest, mask=inside)
