"""Quantised keys and sampled queries: the operands of the scoring kernels.

`reference.outlier_queries` and `reference.typical_queries` define the samples. On devices with
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
from cab_hf.config import CabConfig, num_typical_queries
from cab_hf.ops.attention.tiles import (
    INFINITE_BITS,
    LOG2_E,
    magnitude,
    precision,
    vectors,
    vectors_at,
)
from cab_hf.plan import KeyRanges
from cab_hf.selection import reference
from cab_hf.selection.tiles import FP8, HeadRange, channel_widths, plan_gram

# 8-bit keys are rounded as if the exponent of their largest channel were -2: to four bits, and to
# multiples of 2^-9. Thus keys of all magnitudes have the same relative rounding, and no key affects
# another
ROUNDED_AT = tl.constexpr(-2)
# a stored key also fits with exponents from -3 to 7, so that exponents of units are 10 apart. The
# keys of a head nearly always share one unit, because their largest channels rarely leave 2^-3 to
# 2^7
UNIT_BEGINS = tl.constexpr(-3)
UNITS_APART = tl.constexpr(10)
# products of larger channels would not be finite
LARGEST_CHANNEL = tl.constexpr(2.0**56)
# exponent that marks a key with NaN or an infinity. Exponents of finite keys are one less than a
# multiple of 10, and most are -1. An exponent next to -1 does not widen the range that a float16
# must hold
NOT_FINITE = -2
NOT_FINITE_EXPONENT = tl.constexpr(NOT_FINITE)
# norm of 8-bit queries: products with keys of norms up to 32,000 fit a float16
QUERY_NORM = 8.0
# 16-bit channels that one instruction reads
MAX_CONTIGUOUS = 8
# tables of channels that are cached on devices
CACHED_TABLES = 256
# keys per program that quantises
KEYS_QUANTIZED = 128
# samples per program that gathers
QUERIES_GATHERED = 64
# keys per program that marks blocks
KEYS_MARKED = 2048
COSINE_STEPS = tl.constexpr(reference.COSINE_STEPS)
LEAST_SQUARE = tl.constexpr(reference.LEAST_SQUARE)
PADDING_STEPS = tl.constexpr(reference.PADDING_STEPS)
SAMPLED_STEPS = tl.constexpr(reference.SAMPLED_STEPS)


class Channels(NamedTuple):
    """Order in which channels are stored: the channels of outliers, then the others.

    Attributes:
        table: int32 [first + others], the channel of q or k at each place; -1 for padding.
        first: Places of the outliers' channels, a power of two; all places if outliers use all.
        others: Places of the other channels, a power of two or 0.
        contiguous: Number of adjacent places that hold adjacent channels, or none of them. One
            instruction reads these channels.
    """

    table: Tensor
    first: int
    others: int
    contiguous: int

    @classmethod
    @lru_cache(CACHED_TABLES)
    def of(cls, channels: tuple[int, ...], dim: int, device: torch.device) -> Channels:
        """Return the order for `LayerContext.channels`, () for all ``dim``.

        The result is cached, because the copy to the device synchronises.
        """
        others = [x for x in range(dim) if x not in channels] if channels else []
        parts = channels or tuple(range(dim)), others
        widths = channel_widths(channels, dim)
        table = [
            channel
            for part, width in zip(parts, widths, strict=True)
            for channel in (*part, *[-1] * (width - len(part)))
        ]
        on_device = torch.tensor(table, dtype=torch.int32, device=device)
        return cls(on_device, widths.outliers, widths.others, _contiguous(table))

    @property
    def width(self) -> int:
        """All places."""
        return self.first + self.others


def _contiguous(table: list[int]) -> int:
    """Return ``Channels.contiguous``, a power of two up to `MAX_CONTIGUOUS`."""
    run = MAX_CONTIGUOUS
    while not all(
        group == [-1] * run or group[0] % run == 0 and group == [*range(group[0], group[0] + run)]
        for group in (table[at : at + run] for at in range(0, len(table), run))
    ):
        run //= 2
    return run


class QuerySample(NamedTuple):
    """Sampled queries of every query block of some heads, one block after the other.

    Attributes:
        vectors: [heads, M_q * count, C], scaled.
        scale: float32 [heads, M_q * count], factors from products to logits to base two. `score`
            multiplies the unit of 8-bit keys into them.
        lse: float32, same shape: the log-sum-exp to base two, which `score` writes.
        start: int32, same shape: the first visible sampled key of a query.
        end: int32, same shape: the last visible sampled key of a query, inclusive; -1 for none.
        count: Samples per query block.
        key_stride: Distance in tokens of the keys that these queries are scored against. ``start``
            and ``end`` count in steps of it.
    """

    vectors: Tensor
    scale: Tensor
    lse: Tensor
    start: Tensor
    end: Tensor
    count: int
    key_stride: int

    @property
    def tensors(self) -> SampleTensors:
        """The sample as an argument of kernels."""
        return SampleTensors(self.vectors, self.scale, self.lse, self.start, self.end)


class SampleTensors(NamedTuple):
    """Tensors of a `QuerySample` as an argument of kernels."""

    vectors: Tensor
    scale: Tensor
    lse: Tensor
    start: Tensor
    end: Tensor


def scored_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of scored products: 8-bit floats for 16-bit ``x`` if the GPU has them."""
    has_fp8 = x.dtype != torch.float32 and capability.capability(x.device) >= capability.FP8
    return FP8 if has_fp8 else x.dtype


def empty_keys(k: Tensor, channels: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate the results of `quantize`."""
    width = sum(channel_widths(channels, k.shape[3]))
    values = k.new_empty(*k.shape[:3], width, dtype=dtype)
    return values, k.new_empty(*k.shape[:3], 1, dtype=torch.int8)


def quantize(k: Tensor, channels: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the values and exponents of `api.QuantizedKeys` for k [B, H_kv, N_k, D].

    `Channels` defines the order of the channels. Each 8-bit key has a unit, a power of two. The
    exponent of the unit is 0 for other dtypes. A key with NaN or an infinity in any channel becomes
    zeros, and its exponent is `NOT_FINITE`.

    Returns:
        values: ``dtype`` [B, H_kv, N_k, C].
        exponents: int8 [B, H_kv, N_k, 1].
    """
    batch, heads, length, dim = k.shape
    order = Channels.of(channels, dim, k.device)
    k = k if k.stride(-1) == 1 else k.contiguous()
    values, exponents = empty_keys(k, channels, dtype)
    _quantize_keys_kernel[(batch * heads, triton.cdiv(length, KEYS_QUANTIZED))](
        vectors(k),
        values,
        exponents,
        order.table,
        heads,
        length,
        BLOCK_N=KEYS_QUANTIZED,
        FIRST=order.first,
        OTHERS=order.others,
        CONTIGUOUS=order.contiguous,
        num_warps=4,
    )
    return values, exponents


def marked_blocks(exponents: Tensor, valid: Tensor, key_block: int) -> Tensor:
    """Return which key blocks contain a key that is not finite, int8 [B, H_kv, M_k].

    `reference.marked_blocks` of `cab_hf.ops` is the definition. Padding is never marked.

    Args:
        exponents: int8 [B, H_kv, N_k, 1], from `quantize`.
        valid: bool [B, N_k], False for padding.
    """
    batch, heads, length, _ = exponents.shape
    kv_blocks = triton.cdiv(length, key_block)
    marked = exponents.new_empty(batch, heads, kv_blocks)
    block = triton.next_power_of_2(key_block)
    blocks_per_program = max(1, KEYS_MARKED // block)
    valid = valid.expand(batch, length)
    _marked_kernel[(batch * heads, triton.cdiv(kv_blocks, blocks_per_program))](
        exponents.contiguous(),
        valid.view(torch.int8),
        *valid.stride(),
        marked,
        heads,
        length,
        kv_blocks,
        KEY_BLOCK=key_block,
        BLOCK=block,
        BLOCKS=blocks_per_program,
        num_warps=4,
    )
    return marked


def sample_queries(
    q: Tensor,
    ranges: KeyRanges,
    config: CabConfig,
    heads: HeadRange,
    *,
    scale: float,
    channels: tuple[int, ...],
    dtype: torch.dtype,
) -> list[QuerySample]:
    """Gather the typical queries of some heads, then the outliers if there are any.

    Args:
        q: [B, H, N_q, D].
        scale: Factor of the logits.
        channels: Channels of outliers; () for all.
        dtype: Dtype of the gathered queries, the same as of the keys.
    """
    order = Channels.of(channels, q.shape[3], q.device)
    options = {"scale": scale, "query_block": config.query_block}
    outliers = []
    if count := config.outlier_queries:
        positions = outlier_positions(q, ranges, heads, config.query_block, count)
        empty = _empty_sample(q, heads, config, count=count, width=order.first, dtype=dtype)
        outliers = [_gather(q, ranges, heads, empty, order, positions=positions, **options)]
    empty = _empty_sample(
        q,
        heads,
        config,
        count=num_typical_queries(config),
        width=order.width,
        dtype=dtype,
        key_stride=config.typical_key_stride,
    )
    typical = _gather(q, ranges, heads, empty, order, positions=None, **options)
    return [typical, *outliers]


def outlier_positions(
    q: Tensor, ranges: KeyRanges, heads: HeadRange, query_block: int, count: int
) -> Tensor:
    """Return `reference.outlier_queries` of some heads of q, int32 [heads, M_q * count]."""
    length, dim = q.shape[2:]
    start, num_heads, per_row = heads
    q_blocks = triton.cdiv(length, query_block)
    if count == query_block:
        return _all_positions(ranges, heads, q_blocks * count)
    tiles = plan_gram(query_block, dim, num_heads, q_blocks)
    block_q, step = tiles.block_q, tiles.q_blocks_per_launch
    positions = torch.empty(num_heads, q_blocks * count, device=q.device, dtype=torch.int32)
    gram_shape = num_heads * step * block_q, block_q
    gram = q.new_empty(gram_shape, dtype=torch.int8) if tiles.has_gram else None
    nearest = positions.new_empty(num_heads * step, block_q)
    inverse = torch.empty_like(nearest, dtype=torch.float32)
    end = ranges.end if ranges.end.stride(1) == 1 else ranges.end.contiguous()
    queries = vectors(q if q.stride(-1) == 1 else q.contiguous())
    for begin in range(0, q_blocks, step):
        # heads vary fastest: neighbouring programs read neighbouring memory of [B, N, H, D]
        grid = num_heads, min(step, q_blocks - begin)
        _similarities_kernel[grid](
            queries,
            end,
            end.stride(0),
            gram,
            nearest,
            inverse,
            begin,
            start,
            per_row,
            length,
            QUERY_BLOCK=query_block,
            BLOCK_Q=block_q,
            D=dim,
            BLOCK_D=tiles.block_d,
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
            per_row,
            q_blocks,
            QUERY_BLOCK=query_block,
            COUNT=count,
            BLOCK_Q=block_q,
            D=dim,
            BLOCK_D=tiles.block_d,
            num_warps=1 if tiles.has_gram else 4,
        )
    return positions


def _all_positions(ranges: KeyRanges, heads: HeadRange, num_places: int) -> Tensor:
    """Return the position of every query, padded to ``num_places``; int32 [heads, num_places]."""
    place = torch.arange(num_places, device=ranges.end.device, dtype=torch.int32)
    end = F.pad(ranges.end, (0, num_places - ranges.q_length), value=-1)
    positions = place.where(end >= 0, -1).repeat_interleave(heads.per_row, 0)
    return positions[heads.first : heads.first + heads.count]


def _empty_sample(
    q: Tensor,
    heads: HeadRange,
    config: CabConfig,
    *,
    count: int,
    width: int,
    dtype: torch.dtype,
    key_stride: int = 1,
) -> QuerySample:
    """Allocate a `QuerySample` of ``count`` queries per query block, with ``width`` channels."""
    shape = heads.count, triton.cdiv(q.shape[2], config.query_block) * count
    return QuerySample(
        vectors=q.new_empty((*shape, width), dtype=dtype),
        scale=q.new_empty(shape, dtype=torch.float32),
        lse=q.new_empty(shape, dtype=torch.float32),
        start=torch.empty(shape, device=q.device, dtype=torch.int32),
        end=torch.empty(shape, device=q.device, dtype=torch.int32),
        count=count,
        key_stride=key_stride,
    )


def _gather(
    q: Tensor,
    ranges: KeyRanges,
    heads: HeadRange,
    sample: QuerySample,
    order: Channels,
    *,
    positions: Tensor | None,
    scale: float,
    query_block: int,
) -> QuerySample:
    """Fill ``sample`` with the queries at ``positions``, or with typical queries if None."""
    total, width = sample.vectors.shape[1:]
    start, end = (x if x.stride(1) == 1 else x.contiguous() for x in (ranges.start, ranges.end))
    _gather_queries_kernel[(heads.count, triton.cdiv(total, QUERIES_GATHERED))](
        vectors(q if q.stride(-1) == 1 else q.contiguous()),
        start,
        end,
        start.stride(0),
        end.stride(0),
        positions,
        order.table,
        sample.tensors,
        scale * LOG2_E.value,
        heads.first,
        heads.per_row,
        q.shape[2],
        total,
        NORM=QUERY_NORM if sample.vectors.dtype == FP8 else 0.0,
        QUERY_BLOCK=query_block,
        COUNT=sample.count,
        BLOCK_M=QUERIES_GATHERED,
        FIRST=order.first,
        OTHERS=width - order.first,
        CONTIGUOUS=order.contiguous,
        KEY_STRIDE=sample.key_stride,
        KEY_OFFSET=reference.key_offset(sample.key_stride),
        num_warps=4,
    )
    return sample


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
def _read(at, there, table, BEGIN: tl.constexpr, COUNT: tl.constexpr, CONTIGUOUS: tl.constexpr):
    """Read some channels of the vectors ``at``, in the order of the table; return their places too.

    The values are float32 [N, COUNT], zeros where a place has no channel.
    """
    place = BEGIN + tl.arange(0, COUNT)
    channel = tl.max_contiguous(tl.multiple_of(tl.load(table + place), CONTIGUOUS), CONTIGUOUS)
    mask = there[:, None] & (channel >= 0)[None, :]
    return tl.load(at + channel[None, :], mask=mask, other=0.0).to(tl.float32), place


@triton.jit
def _clamped(x):
    """Clamp finite float32 to `LARGEST_CHANNEL`."""
    return tl.clamp(x, -LARGEST_CHANNEL, LARGEST_CHANNEL)


@triton.jit
def _rounded(x, exponent, exponent_shift, values):
    """Return ``x`` as 8-bit floats, rounded at `ROUNDED_AT`, times 2 ** ``exponent_shift``."""
    x = (x * power_of_two(-exponent)[:, None]).to(values.dtype.element_ty).to(tl.float32)
    return (x * power_of_two(exponent_shift)[:, None]).to(values.dtype.element_ty)


# the length must not cause another compilation
@triton.jit(do_not_specialize=["length"])
def _quantize_keys_kernel(
    k,
    values,
    exponents,
    table,
    heads,
    length,
    BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr,
    OTHERS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """Write the values and exponents of BLOCK_N keys of a head, see `quantize`."""
    # keys: x [BLOCK_N, FIRST] and y [BLOCK_N, OTHERS], in the order of the table
    plane = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = token < length
    at = vectors_at(k, plane // heads, plane % heads, token)
    line = plane.to(tl.int64) * length + token
    target = values + line[:, None] * (FIRST + OTHERS)
    x, place = _read(at, inside, table, 0, FIRST, CONTIGUOUS)
    if OTHERS > 0:
        y, y_place = _read(at, inside, table, FIRST, OTHERS, CONTIGUOUS)
    # largest magnitude of each key [BLOCK_N], as integers: a maximum of floats may drop a NaN
    bits = tl.max(magnitude(x), 1)
    if OTHERS > 0:
        bits = tl.maximum(bits, tl.max(magnitude(y), 1))
    finite = bits < INFINITE_BITS
    x = tl.where(finite[:, None], x, 0.0)
    if OTHERS > 0:
        y = tl.where(finite[:, None], y, 0.0)
    if values.dtype.element_ty.is_fp8():
        # exponents [BLOCK_N], and 8-bit values
        x = _clamped(x)
        if OTHERS > 0:
            y = _clamped(y)
        largest = tl.where(finite, bits, 0).to(tl.float32, bitcast=True)
        largest = tl.minimum(largest, LARGEST_CHANNEL)
        # any unit fits a key of zeros: use the unit of most keys
        exponent = tl.where(largest > 0, exponent_of(largest), 0)
        # the remainder in Triton has the sign of the dividend
        exponent_shift = (exponent - UNIT_BEGINS + 100 * UNITS_APART) % UNITS_APART
        exponent -= ROUNDED_AT
        stored = tl.where(finite, exponent - exponent_shift, NOT_FINITE_EXPONENT)
        tl.store(exponents + line, stored.to(tl.int8), mask=inside)
        tl.store(
            target + place[None, :],
            _rounded(x, exponent, exponent_shift, values),
            mask=inside[:, None],
        )
        if OTHERS > 0:
            y = _rounded(y, exponent, exponent_shift, values)
            tl.store(target + y_place[None, :], y, mask=inside[:, None])
    else:
        # 16-bit or float32 values, whose exponent is 0
        stored = tl.where(finite, 0, NOT_FINITE_EXPONENT)
        tl.store(exponents + line, stored.to(tl.int8), mask=inside)
        tl.store(target + place[None, :], x.to(values.dtype.element_ty), mask=inside[:, None])
        if OTHERS > 0:
            tl.store(target + y_place[None, :], y.to(values.dtype.element_ty), mask=inside[:, None])


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
@triton.jit(do_not_specialize=["end_stride", "begin", "start", "length"])
def _similarities_kernel(
    q,
    end,
    end_stride,
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
    # queries of the block: place, query and real [BLOCK_Q]
    block = begin + tl.program_id(1)
    plane = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_Q)
    query = block * QUERY_BLOCK + place
    inside = (place < QUERY_BLOCK) & (query < length)
    real = tl.load(end + (start + plane) // heads * end_stride + query, mask=inside, other=-1) >= 0
    at = vectors_at(q, (start + plane) // heads, (start + plane) % heads, query)
    # products with the sum of the queries [BLOCK_Q], and all products [BLOCK_Q, BLOCK_Q]. The sum
    # replaces the mean: its length does not change the cosine
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
    # similarities to the mean query [BLOCK_Q]
    own = tl.rsqrt(tl.maximum(square, LEAST_SQUARE))
    line = (tl.program_id(1) * tl.num_programs(0) + plane) * BLOCK_Q
    to_mean = _cosine_steps(products, own, tl.rsqrt(tl.maximum(mean_square, LEAST_SQUARE)))
    tl.store(nearest + line + place, tl.where(real, to_mean.to(tl.int32), PADDING_STEPS))
    tl.store(inverse + line + place, own)
    if gram is not None:
        # similarities [BLOCK_Q, BLOCK_Q]. Sums of rows and of columns have different layouts: one
        # of the two is read again
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
    # similarities to the mean query [BLOCK_Q]
    block = begin + tl.program_id(1)
    plane = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_Q)
    line = (tl.program_id(1) * tl.num_programs(0) + plane) * BLOCK_Q
    similarity = tl.load(nearest + line + place)
    real = similarity < PADDING_STEPS
    highest = similarity
    if gram is None:
        own = tl.load(inverse + line + place)
        batch = (start + plane) // heads
        head = (start + plane) % heads
        # padding repeats the first query of the block: its similarities are not used
        at = vectors_at(q, batch, head, block * QUERY_BLOCK + tl.where(real, place, 0))
    # one sample per step: the query whose highest similarity to the samples is the lowest
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
    tl.store(positions + (plane * q_blocks + block) * COUNT + number, samples)


# these numbers must not cause another compilation
@triton.jit(do_not_specialize=["start_stride", "end_stride", "first_head", "length", "total"])
def _gather_queries_kernel(
    q,
    starts,
    ends,
    start_stride,
    end_stride,
    positions,
    table,
    sample,
    qk_scale,
    first_head,
    heads,
    length,
    total,
    NORM: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FIRST: tl.constexpr,
    OTHERS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    KEY_OFFSET: tl.constexpr,
):
    """Gather, scale and round BLOCK_M sampled queries, and write their visible keys."""
    # positions of the samples [BLOCK_M], -1 for none
    plane = tl.program_id(0).to(tl.int64)
    batch = (first_head + plane) // heads
    head = (first_head + plane) % heads
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < total
    if positions is not None:
        query = tl.load(positions + plane * total + row, mask=inside, other=-1)
    else:
        # the middle of equal steps
        apart: tl.constexpr = QUERY_BLOCK // COUNT
        query = row // COUNT * QUERY_BLOCK + row % COUNT * apart + apart // 2
        query = tl.where(inside & (query < length), query, -1)
    there = query >= 0
    start = tl.load(starts + batch * start_stride + query, mask=there, other=0)
    end = tl.load(ends + batch * end_stride + query, mask=there, other=-1)
    real = end >= 0
    # channels x [BLOCK_M, FIRST] and y [BLOCK_M, OTHERS], squared norm and magnitude [BLOCK_M]
    at = vectors_at(q, batch, head, query)
    x, place = _read(at, real, table, 0, FIRST, CONTIGUOUS)
    square = tl.sum(x * x, 1)
    bits = tl.max(magnitude(x), 1)
    if OTHERS > 0:
        y, y_place = _read(at, real, table, FIRST, OTHERS, CONTIGUOUS)
        square += tl.sum(y * y, 1)
        bits = tl.maximum(bits, tl.max(magnitude(y), 1))
    # vectors [BLOCK_M, FIRST + OTHERS], of norm NORM if they are rounded to 8 bits
    scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if NORM > 0:
        scale = NORM / tl.sqrt(tl.maximum(square, LEAST_SQUARE))
    row += plane * total
    target = sample.vectors + row[:, None] * (FIRST + OTHERS)
    x = (x * scale[:, None]).to(sample.vectors.dtype.element_ty)
    tl.store(target + place[None, :], x, mask=inside[:, None])
    if OTHERS > 0:
        y = (y * scale[:, None]).to(sample.vectors.dtype.element_ty)
        tl.store(target + y_place[None, :], y, mask=inside[:, None])
    # visible sampled keys [BLOCK_M], from tokens
    start = (tl.maximum(start - KEY_OFFSET, 0) + KEY_STRIDE - 1) // KEY_STRIDE
    end = tl.where(end >= KEY_OFFSET, (end - KEY_OFFSET) // KEY_STRIDE, -1)
    end = tl.where(end >= start, end, -1)
    # a query that is not finite gives NaN as its share of every key block
    scale = tl.where(bits < INFINITE_BITS, qk_scale / scale, float("nan"))
    tl.store(sample.scale + row, scale, mask=inside)
    tl.store(sample.start + row, start, mask=inside)
    tl.store(sample.end + row, end, mask=inside)


# the length must not cause another compilation
@triton.jit(do_not_specialize=["valid_batch", "length", "kv_blocks"])
def _marked_kernel(
    exponents,
    valid,
    valid_batch,
    valid_token,
    marked,
    heads,
    length,
    kv_blocks,
    KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Mark BLOCKS key blocks of a KV head, see `marked_blocks`."""
    plane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inner = tl.arange(0, BLOCK)
    # keys of the blocks [BLOCKS, BLOCK]
    token = column[:, None] * KEY_BLOCK + inner[None, :]
    there = (token < length) & (inner < KEY_BLOCK)[None, :]
    own = tl.load(exponents + plane * length + token, mask=there, other=0)
    real = valid + plane // heads * valid_batch + token * valid_token
    real = tl.load(real, mask=there, other=0) != 0
    found = tl.max(((own == NOT_FINITE_EXPONENT) & real).to(tl.int32), 1)
    tl.store(marked + plane * kv_blocks + column, found.to(tl.int8), mask=column < kv_blocks)
