"""Exact scores on the GPU: what the outlier queries of a block need of every key block.

The definitions are `reference.outlier_queries` and `reference.exact_scores`. Four kernels: keys
are cut to the scored channels, outlier queries are found and gathered, and one sweep over the keys
leaves the largest logit of every key block in a scratch row until the row's normaliser is known.
Where the device has it, all products are of 8-bit floats.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from cab_hf.ops.attention.tiles import (
    LOG2_E,
    described,
    precision,
    tile_of,
    vectors,
    vectors_at,
)
from cab_hf.ops.coarsen import QuerySummary, cut, store_row_spans
from cab_hf.ops.decode import launch
from cab_hf.ops.reference import COSINE_STEPS, LEAST_SQUARE
from cab_hf.ops.rows import (
    FP8,
    LEAST_CHANNELS,
    ROUNDED_AT,
    UNIT_BEGINS,
    UNITS_APART,
    exponent_of,
    power_of_two,
)
from cab_hf.ops.score import HeadChunk, unpacked, visible_range
from cab_hf.ops.sweep import Units, larger, largest_part
from cab_hf.plan import Spans

# and rows to this norm: products of keys of norms up to 32,000 then fit a float16
ROW_NORM = 8.0
# how a program of the sweep is cut and scheduled: rows, the most keys at a time, registers a thread
# where products are of 8 bits. What an H200 runs fastest: rows in pairs of 64 halve what is read of
# the L2 cache, and are too few programs for a short text
TILE, LARGE_TILE = (64, 256, 168), (128, 128, 128)
WARPS, STAGES = 4, 3
MANY_PROGRAMS = 1024
BYTES_OF_KEYS = 32 << 10
# of keys that are on their way to a program; larger steps of the sweep have fewer stages
BYTES_IN_FLIGHT = 192 << 10
# of all keys, that a GPU's L2 cache holds together; of more, programs share those of a few heads
CACHED_KEYS = 32 << 20
# lanes that hold a row of a product together, and its neighbouring columns that they hold
LANES, COLUMNS_OF_LANES = 4, 8
# the most key blocks of a row that are normalised at a time
CHUNK = 64
# channels of the queries of a block that a program holds at a time while it seeks outliers, and how
# it is scheduled
SOUGHT_CHANNELS, SOUGHT_WARPS, SOUGHT_REGISTERS = 32, 4, 168
# of the outliers, that a program gathers
ROWS_GATHERED = 64
COSINE_STEPS = tl.constexpr(COSINE_STEPS)
LEAST_SQUARE = tl.constexpr(LEAST_SQUARE)
# bytes of scratch at a time: of all rows of a layer of 32 heads that read 131,072 tokens
SCRATCH_AT_A_TIME = 1152 << 20


class Channels(NamedTuple):
    """Which channels are scored, as kernels take them: equal runs of neighbours.

    Attributes:
        first: where the first run begins.
        step: from where one begins to where the next does.
        size, count: of a run, and how many there are.
    """

    first: int
    step: int
    size: int
    count: int

    @classmethod
    @lru_cache
    def of(cls, channels: tuple[int, ...], dim: int) -> Channels:
        """Those of `LayerContext.channels`, () for all ``dim``. Made once for all layers.

        Raises:
            ValueError: for channels that are not one run, or two of one size.
        """
        channels = channels or tuple(range(dim))
        starts = [channels[0], *(b for a, b in pairwise(channels) if b != a + 1)]
        size = len(channels) // len(starts)
        made = cls(starts[0], (starts[-1] - starts[0]) or dim, size, len(starts))
        if len(starts) > 2 or channels != made.listed or channels[-1] >= dim:
            raise ValueError(
                f"channels is {channels}; scored are one run of channels below {dim}, or two runs "
                "of one size."
            )
        return made

    @classmethod
    def of_halves(cls, channels: tuple[int, ...], dim: int) -> Channels:
        """Those of `of` as two runs of one size, which may be neighbours; of an odd count of them
        the last is left out.
        """
        runs = cls.of(channels, dim)
        return runs if runs.count == 2 else cls(runs.first, runs.size // 2, runs.size // 2, 2)

    @property
    def listed(self) -> tuple[int, ...]:
        starts = [self.first + run * self.step for run in range(self.count)]
        return tuple(start + at for start in starts for at in range(self.size))

    @property
    def width(self) -> int:
        """How wide scored vectors are: runs are filled up to powers of two, by zeros."""
        return self.count * self.room

    @property
    def room(self) -> int:
        """Of one run."""
        return max(LEAST_CHANNELS // self.count, triton.next_power_of_2(self.size))

    @property
    def constants(self) -> dict[str, int]:
        """As arguments of kernels."""
        return {"FIRST": self.first, "STEP": self.step, "SIZE": self.size, "RUNS": self.count}


class OutlierRows(NamedTuple):
    """The outlier queries of every query block of some heads, one behind the other.

    Attributes:
        vectors: [heads, M_q * count, C], scaled.
        scale: float32 [heads, M_q * count], what makes logits in powers of two of their products.
        first, last: int32 of the same shape, the keys that a query sees; none where last is -1.
        count: of each query block.
        reach: how many keys more than those of the query block before its queries may see, where
            all see but keys up to their own place; else 0.
    """

    vectors: Tensor
    scale: Tensor
    first: Tensor
    last: Tensor
    count: int
    reach: int

    def heads(self, start: int, stop: int) -> OutlierRows:
        """Those of some of its heads."""
        return OutlierRows(*(x[start:stop] for x in self[:4]), *self[4:])


def empty_keys(
    k: Tensor, channels: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Room for what `scored_keys` gives."""
    width = Channels.of(channels, k.shape[3]).width
    keys = k.new_empty(*k.shape[:3], width, dtype=dtype)
    return keys, k.new_empty(*k.shape[:3], 1, dtype=torch.int8) if dtype == FP8 else None


def scored_keys(
    k: Tensor, channels: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The scored ``channels`` of k [B, H_kv, N_k, D]: [B, H_kv, N_k, C], zeros behind the last.

    All of them for (). 8-bit floats are in a unit of each key, which is its own affair: with the
    exponents of these powers of two, int8 [B, H_kv, N_k, 1].
    """
    batch, heads, length, dim = k.shape
    runs = Channels.of(channels, dim)
    k = k if k.stride(-1) == 1 else k.contiguous()
    keys, exponents = empty_keys(k, channels, dtype)
    tokens = 128
    _scored_keys_kernel[(batch * heads, triton.cdiv(length, tokens))](
        vectors(k),
        keys,
        exponents,
        heads,
        length,
        BLOCK_N=tokens,
        BLOCK_C=runs.room,
        **runs.constants,
        num_warps=4,
    )
    return keys, exponents


def outlier_rows(
    q: Tensor,
    spans: Spans,
    planes: tuple[int, int],
    scale: float,
    query_block: int,
    count: int,
    channels: tuple[int, ...],
    dtype: torch.dtype,
    means: QuerySummary | None = None,
) -> OutlierRows:
    """The ``count`` outliers of every query block of some heads of q [B, H, N_q, D].

    Args:
        planes: the first head, and how many, batch rows and heads counted together.
        means: is filled for these heads, as `coarsen.coarsen_queries` would.
    """
    heads, length, dim = q.shape[1:]
    runs, q_blocks = Channels.of(channels, dim), triton.cdiv(length, query_block)
    start, some = planes
    total = q_blocks * count
    rows = OutlierRows(
        q.new_empty(some, total, runs.width, dtype=dtype),
        q.new_empty(some, total, dtype=torch.float32),
        *(torch.empty(some, total, device=q.device, dtype=torch.int32) for _ in range(2)),
        count,
        # a text that is there as a whole
        query_block if length == spans.kv_length and spans.consecutive else 0,
    )
    first, last = (x if x.stride(1) == 1 else x.contiguous() for x in (spans.first, spans.last))
    at = vectors(q if q.stride(-1) == 1 else q.contiguous())
    positions = torch.empty_like(rows.last)
    # heads run fastest: neighbouring programs read neighbouring memory of a [B, N, H, D] tensor
    _outlier_queries_kernel[(some, q_blocks)](
        at,
        first,
        last,
        first.stride(0),
        last.stride(0),
        positions,
        None if means is None else means.vectors,
        None if means is None else means.rows,
        0 if means is None else means.rows.stride(0),
        start,
        heads,
        length,
        QUERY_BLOCK=query_block,
        COUNT=count,
        BLOCK_Q=triton.next_power_of_2(query_block),
        D=dim,
        BLOCK_D=min(SOUGHT_CHANNELS, triton.next_power_of_2(dim)),
        MEANS=means is not None,
        HALF=q.dtype != torch.float32,
        num_warps=SOUGHT_WARPS,
        maxnreg=SOUGHT_REGISTERS,
    )
    _gathered_rows_kernel[(some, triton.cdiv(total, ROWS_GATHERED))](
        at,
        first,
        last,
        first.stride(0),
        last.stride(0),
        positions,
        rows,
        scale * LOG2_E.value,
        start,
        heads,
        total,
        ROW_NORM=ROW_NORM if dtype == FP8 else 0.0,
        BLOCK_M=ROWS_GATHERED,
        BLOCK_C=runs.room,
        **runs.constants,
        num_warps=4,
    )
    return rows


def exact_scores(
    turn: HeadChunk,
    rows: OutlierRows,
    keys: Tensor,
    exponents: Tensor | None,
    key_block: int,
    most: Tensor,
) -> tuple[Tensor, Tensor]:
    """`reference.exact_scores` of the heads of ``turn``: (most, shares), float32 of a shape.

    Entries of blocks that a row does not see mean nothing.

    Args:
        keys, exponents: those of `scored_keys` for all heads.
        most: [heads, M_q, width], whose memory the answer may take.
    """
    planes, total, dim = rows.vectors.shape
    half, bytes_a_key = rows.vectors.dtype == FP8, dim * keys.element_size()
    by_head = keys.numel() * keys.element_size() > CACHED_KEYS
    tile_rows, most_keys, registers = TILE
    if half and not by_head and planes * triton.cdiv(total, LARGE_TILE[0]) >= MANY_PROGRAMS:
        tile_rows, most_keys, registers = LARGE_TILE
    # the rows of a query block go to groups of a power of two, which tiles hold whole
    group = tile_of(rows.count, tile_rows)
    groups = total // group
    if group != rows.count:
        most = most.new_empty(planes, groups, turn.width)
    shares = torch.empty_like(most)
    tiles = triton.cdiv(total, tile_rows)
    most_keys = min(most_keys, BYTES_OF_KEYS // bytes_a_key)
    tile_keys = most_keys if most_keys % key_block == 0 else tile_of(key_block, most_keys)
    stages = max(1, min(STAGES, BYTES_IN_FLIGHT // (max(tile_keys, key_block) * bytes_a_key)))
    desc_k, together = _alternating(keys, key_block, tile_keys)
    # in key blocks: by how much scratch of a tile is wider than that of the one before
    step = max(1, tile_keys // key_block)
    units = Units.of(exponents) if half else None
    wider = triton.cdiv(triton.cdiv(tile_rows, rows.count) * rows.reach, key_block * step) * step

    def columns(begin: int, end: int) -> int:
        """Of the scratch of some tiles of one head, in key blocks."""
        if wider:
            return wider * (end * (end + 1) - begin * (begin + 1)) // 2
        return (end - begin) * turn.width

    def fits(begin: int, end: int) -> bool:
        a_column = planes * tile_rows * (2 if half else 4)
        return begin + 1 == end or columns(begin, end) * a_column <= SCRATCH_AT_A_TIME

    ends = [tiles]
    while ends[-1]:
        # the longest rows first
        ends.append(bisect_left(range(ends[-1]), True, key=partial(fits, end=ends[-1])))
    parts = [(begin, end) for end, begin in pairwise(ends)]
    scratch = torch.empty(
        max(columns(*part) for part in parts) * planes * tile_rows,
        device=most.device,
        dtype=torch.float16 if half else torch.float32,
    )
    for begin, end in parts:
        _exact_scores_kernel[(end - begin, planes) if by_head else (planes, end - begin)](
            rows,
            desc_k,
            units,
            keys.shape[2],
            scratch,
            columns(begin, end),
            most,
            shares,
            turn.packed,
            begin,
            total,
            groups,
            COUNT=rows.count,
            GROUP=group,
            KEY_BLOCK=key_block,
            WIDER=wider,
            BY_HEAD=by_head,
            BLOCK_M=tile_rows,
            BLOCK_N=tile_keys,
            TOGETHER=together,
            CHUNK=tile_of(turn.width, CHUNK),
            BLOCK_D=dim,
            HALF=half,
            PACKED=half and launch.packed(keys),
            PRECISION=precision(rows.vectors),
            STAGES=stages,
            num_warps=WARPS,
            maxnreg=registers if half else None,
        )
    if group == rows.count:
        return most, shares
    most, shares = (x.unflatten(1, (-1, rows.count // group)) for x in (most, shares))
    return most.amax(2), shares.sum(2)


def _alternating(keys: Tensor, key_block: int, tile: int) -> tuple[TensorDescriptor, int]:
    """Tiles of keys [B, H_kv, N_k, C] whose key blocks alternate, and how many keys of one at once.

    Of a row of a product each of `LANES` lanes holds every fourth pair of columns: in the order of
    keys some of every block, whose largest is then sought across lanes. Where blocks alternate a
    lane holds the logits of one block, and compares registers. The copy engine reads them so.
    """
    blocks = max(1, tile // key_block)
    if blocks == 1:
        # a block is one tile or several
        key_block = together = tile
    else:
        together = COLUMNS_OF_LANES // min(LANES, blocks)
    if missing := -keys.shape[2] % key_block:
        # 8-bit floats are padded as bits
        bits = keys.view(torch.uint8) if keys.element_size() == 1 else keys
        keys = F.pad(bits, (0, 0, 0, missing)).view(keys.dtype)
    # [plane, part of a block, block, key, C]
    x = described(keys).flatten(0, 1).unflatten(1, (-1, key_block // together, together))
    box = [1, key_block // together, blocks, together, keys.shape[3]]
    return TensorDescriptor.from_tensor(x.transpose(1, 2), box), together


@triton.jit
def _scored(
    at, there, FIRST: tl.constexpr, STEP: tl.constexpr, SIZE: tl.constexpr, RUNS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The scored channels of the vectors that begin ``at``, float32 [N, RUNS * BLOCK_C]."""
    inside = tl.arange(0, BLOCK_C)[None, None, :]
    channel = FIRST + STEP * tl.arange(0, RUNS)[None, :, None] + inside
    x = tl.load(at[:, :, None] + channel, mask=there[:, None, None] & (inside < SIZE), other=0.0)
    return tl.reshape(x, (at.shape[0], RUNS * BLOCK_C)).to(tl.float32)


# not compiled again for every length
@triton.jit(do_not_specialize=["length"])
def _scored_keys_kernel(
    k,
    keys,
    exponents,
    heads,
    length,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    plane = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = token < length
    # [BLOCK_N, RUNS * BLOCK_C]
    at = vectors_at(k, plane // heads, plane % heads, token)
    x = _scored(at, inside, FIRST, STEP, SIZE, RUNS, BLOCK_C)
    width: tl.constexpr = RUNS * BLOCK_C
    line = plane.to(tl.int64) * length + token
    target = keys + line[:, None] * width + tl.arange(0, width)[None, :]
    if exponents is not None:
        x = cut(x)
        largest = tl.max(tl.abs(x), 1)
        # of a key that is nothing any unit will do: that of most keys
        exponent = tl.where(largest > 0, exponent_of(largest), 0)
        # a remainder has the sign of what is divided
        above = (exponent - UNIT_BEGINS + 100 * UNITS_APART) % UNITS_APART
        exponent -= ROUNDED_AT
        x = (x * power_of_two(-exponent)[:, None]).to(keys.dtype.element_ty).to(tl.float32)
        x *= power_of_two(above)[:, None]
        tl.store(exponents + line, (exponent - above).to(tl.int8), mask=inside)
    tl.store(target, x.to(keys.dtype.element_ty), mask=inside[:, None])


# not compiled again for every length
@triton.jit(do_not_specialize=["first_stride", "last_stride", "row_spans_plane", "start", "length"])
def _outlier_queries_kernel(
    q,
    first,
    last,
    first_stride,
    last_stride,
    positions,
    means,
    row_spans,
    row_spans_plane,
    start,
    heads,
    length,
    QUERY_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MEANS: tl.constexpr,
    HALF: tl.constexpr,
):
    """The positions of the outliers of a query block, -1 for none; its mean on the way."""
    block = tl.program_id(1)
    q_blocks = tl.num_programs(1)
    mine = tl.program_id(0).to(tl.int64)
    batch = (start + mine) // heads
    head = (start + mine) % heads
    place = tl.arange(0, BLOCK_Q)
    query = block * QUERY_BLOCK + place
    inside = (place < QUERY_BLOCK) & (query < length)
    first += batch * first_stride
    last += batch * last_stride
    real = tl.load(last + query, mask=inside, other=-1) >= 0
    rank = place
    if MEANS or COUNT < QUERY_BLOCK:
        at = vectors_at(q, batch, head, query)
        share = 1 / tl.maximum(tl.sum(real.to(tl.int32), 0), 1).to(tl.float32)
        # all are under way before the first is waited for
        parts = ()
        for begin in tl.static_range(0, D, BLOCK_D):
            # [BLOCK_Q, BLOCK_D]: few lanes hold a query, so that registers are summed, not lanes
            channel = begin + tl.arange(0, BLOCK_D)
            there = real[:, None] & (channel < D)[None, :]
            parts = parts + (tl.load(at + channel[None, :], mask=there, other=0.0),)
        product = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        square = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        size = tl.zeros([BLOCK_D], tl.float32)
        for begin in tl.static_range(0, D, BLOCK_D):
            x = parts[begin // BLOCK_D].to(tl.float32)
            mean = tl.sum(x, 0) * share
            product += x * mean[None, :]
            square += x * x
            size += mean * mean
            if MEANS:
                channel = begin + tl.arange(0, BLOCK_D)
                to_mean = means + ((start + mine) * q_blocks + block) * D + channel
                tl.store(to_mean, cut(mean, HALF), mask=channel < D)
        size = tl.sum(square, 1) * tl.sum(size, 0)
        cosine = tl.sum(product, 1) * tl.rsqrt(tl.maximum(size, LEAST_SQUARE))
        # a NaN comes first: ranks are a permutation whatever q holds
        cosine = tl.where(cosine == cosine, cosine, -1.0)
        # and of what is equal the earlier: one whole number holds both
        key = (cosine * COSINE_STEPS).to(tl.int32) * BLOCK_Q + place
        key = tl.where(real, key, 2147483647 - BLOCK_Q + place)
        rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
    if MEANS and head == 0:
        to_spans = row_spans + batch * q_blocks + block
        store_row_spans(first, last, to_spans, row_spans_plane, block, length, QUERY_BLOCK)
    target = positions + (mine * q_blocks + block) * COUNT + rank
    chosen = (rank < COUNT) & (place < QUERY_BLOCK)
    tl.store(target, tl.where(real, query, -1), mask=chosen)


# not compiled again for every length
@triton.jit(do_not_specialize=["first_stride", "last_stride", "start", "total"])
def _gathered_rows_kernel(
    q,
    first,
    last,
    first_stride,
    last_stride,
    positions,
    rows,
    qk_scale,
    start,
    heads,
    total,
    ROW_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The scored channels of the queries at ``positions``, and the keys that these see."""
    mine = tl.program_id(0).to(tl.int64)
    batch = (start + mine) // heads
    head = (start + mine) % heads
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < total
    row += mine * total
    query = tl.load(positions + row, mask=inside, other=-1)
    real = query >= 0
    lowest = tl.load(first + batch * first_stride + query, mask=real, other=0)
    highest = tl.load(last + batch * last_stride + query, mask=real, other=-1)
    # [BLOCK_M, RUNS * BLOCK_C]
    x = _scored(vectors_at(q, batch, head, query), real, FIRST, STEP, SIZE, RUNS, BLOCK_C)
    scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if ROW_NORM > 0:
        scale = ROW_NORM / tl.sqrt(tl.maximum(tl.sum(x * x, 1), LEAST_SQUARE))
    width: tl.constexpr = RUNS * BLOCK_C
    target = rows.vectors + row[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(target, (x * scale[:, None]).to(rows.vectors.dtype.element_ty), mask=inside[:, None])
    tl.store(rows.scale + row, qk_scale / scale, mask=inside)
    tl.store(rows.first + row, lowest, mask=inside)
    tl.store(rows.last + row, highest, mask=inside)


# the first of several launches is no reason to compile twice
@triton.jit(do_not_specialize=["length", "columns", "begin", "row_count", "groups"])
def _exact_scores_kernel(
    rows,
    desc_k,
    units,
    length,
    scratch,
    columns,
    most,
    shares,
    turn,
    begin,
    row_count,
    groups,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    WIDER: tl.constexpr,
    BY_HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # a step of the sweep is a tile of several key blocks, or a key block of several tiles
    STEP: tl.constexpr = BLOCK_N if BLOCK_N > KEY_BLOCK else KEY_BLOCK
    BLOCKS: tl.constexpr = STEP // KEY_BLOCK
    DTYPE: tl.constexpr = tl.float16 if HALF else tl.float32
    turn = unpacked(turn)
    q_blocks, width, heads, kv_heads = turn.q_blocks, turn.width, turn.heads, turn.kv_heads
    # the longest rows first
    if BY_HEAD:
        plane = tl.program_id(1)
        tile = begin + tl.num_programs(0) - 1 - tl.program_id(0)
    else:
        plane = tl.program_id(0)
        tile = begin + tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (turn.start + plane) // heads
    kv_head = (turn.start + plane) % heads // (heads // kv_heads)
    kv_plane = batch * kv_heads + kv_head
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < row_count
    line = plane.to(tl.int64) * row_count + row
    lowest = tl.load(rows.first + line, mask=inside, other=0)
    highest = tl.load(rows.last + line, mask=inside, other=-1)
    scale = tl.load(rows.scale + line, mask=inside, other=1.0)
    real = highest >= 0
    # [BLOCK_M, BLOCK_D]
    at = rows.vectors + line[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    x = tl.load(at, mask=inside[:, None], other=0.0)

    # steps that some row sees, and those that all rows see wholly
    low = tl.min(tl.where(real, lowest, 2147483647), 0) // STEP
    high = tl.max(highest, 0) // STEP
    whole_low = tl.cdiv(tl.max(tl.where(real, lowest, -1), 0), STEP)
    whole_high = (tl.min(tl.where(real, highest, 2147483647), 0) + 1) // STEP
    low = tl.where(tl.max(highest, 0) < 0, 0, low)
    end = tl.where(tl.max(highest, 0) < 0, 0, high + 1)
    whole_low = tl.minimum(tl.maximum(whole_low, low), end)
    whole_high = tl.minimum(tl.maximum(whole_high, whole_low), end)

    before = (tile - begin) * width
    if WIDER > 0:
        # no row sees so much: what is not reserved is not written
        end = tl.minimum(end, WIDER // BLOCKS * (tile + 1))
        whole_low, whole_high = tl.minimum(whole_low, end), tl.minimum(whole_high, end)
        before = WIDER * (tile * (tile + 1) - begin * (begin + 1)) // 2
    if HALF:
        largest = tl.load(units.largest + kv_plane).to(tl.int32)
        scale *= power_of_two(largest)
        if tl.load(units.least + kv_plane) < largest:
            # keys of several units are multiplied by them, all in the first part
            whole_low, whole_high = end, end
    kept = scratch + (plane.to(tl.int64) * columns + before) * BLOCK_M
    own = tl.arange(0, BLOCK_M)[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    # which key of a tile stands in a column: blocks alternate
    SIZE: tl.constexpr = BLOCK_N // BLOCKS
    PARTS: tl.constexpr = SIZE // TOGETHER
    place = tl.arange(0, BLOCK_N)
    block = place // TOGETHER % BLOCKS
    key = block * SIZE + place // (TOGETHER * BLOCKS) * TOGETHER + place % TOGETHER
    # one normaliser for each key block of a step: no lane asks another until the end
    m_i = tl.full((BLOCK_M, BLOCKS), -1e30, tl.float32)
    l_i = tl.zeros((BLOCK_M, BLOCKS), tl.float32)
    for PART in tl.static_range(3):
        begins = low if PART == 0 else whole_low if PART == 1 else whole_high
        ends = whole_low if PART == 0 else whole_high if PART == 1 else end
        for i in tl.range(begins, ends, num_stages=STAGES):
            top = tl.full((BLOCK_M, BLOCKS), float("-inf"), DTYPE)
            for offset in tl.static_range(0, STEP, BLOCK_N):
                # [BLOCK_N, BLOCK_D], then [BLOCK_M, BLOCK_N]
                column = i * STEP + offset
                k = desc_k.load([kv_plane, 0, column // SIZE, 0, 0])
                qk = tl.dot(
                    x, k.reshape(BLOCK_N, BLOCK_D).T, input_precision=PRECISION, out_dtype=DTYPE
                )
                if HALF and PART == 0:
                    each = units.each + kv_plane.to(tl.int64) * length + column
                    unit = tl.load(each + key, mask=column + key < length, other=0).to(tl.int32)
                    qk *= power_of_two(unit - largest).to(DTYPE)[None, :]
                if PART != 1:
                    seen = key[None, :] <= (highest - column)[:, None]
                    if PART == 0:
                        seen &= key[None, :] >= (lowest - column)[:, None]
                    # a scalar would turn all into float32
                    qk = tl.where(seen, qk, tl.full(qk.shape, float("-inf"), DTYPE))
                # [BLOCK_M, BLOCKS]
                by_block = tl.reshape(qk, (BLOCK_M, PARTS, BLOCKS, TOGETHER))
                top = tl.maximum(top, tl.reduce(largest_part(by_block, PACKED), 2, larger))
            tl.store(kept + i * (BLOCK_M * BLOCKS) + own, top)
            logit = top.to(tl.float32) * scale[:, None]
            rise = logit - m_i
            # one exponential: either what came before fades, or what comes does
            fade = tl.exp2(-tl.abs(rise))
            l_i = tl.where(rise > 0, l_i * fade + 1.0, l_i + fade)
            m_i = tl.maximum(m_i, logit)
    tl.debug_barrier()

    # what a row sees nothing of weighs nothing
    m_row = tl.max(m_i, 1)
    l_row = tl.sum(l_i * tl.exp2(m_i - m_row[:, None]), 1)
    norm = tl.where(real, m_row + tl.log2(tl.maximum(l_row, 1e-30)), float("inf"))
    line = tile * (BLOCK_M // GROUP) + tl.arange(0, BLOCK_M // GROUP)
    written = line < groups
    target = (plane.to(tl.int64) * groups + line) * width
    # all that query blocks see is written: their outliers may see less
    seen = turn.rows + (batch * q_blocks + row // COUNT)
    first, last = visible_range(seen, turn.rows_plane, inside, KEY_BLOCK)
    for j0 in range(tl.min(first, 0) // CHUNK * CHUNK, tl.max(last, 0) + 1, CHUNK):
        column = j0 + tl.arange(0, CHUNK)
        there = (column >= low * BLOCKS) & (column < end * BLOCKS)
        # [CHUNK, BLOCK_M], then [CHUNK, BLOCK_M / GROUP]
        cell = tl.arange(0, BLOCK_M)[None, :] * BLOCKS + (column % BLOCKS)[:, None]
        cell += (column // BLOCKS * (BLOCK_M * BLOCKS))[:, None]
        top = tl.load(kept + cell, mask=there[:, None], other=float("-inf"))
        share = tl.exp2(top.to(tl.float32) * scale[None, :] - norm[None, :])
        share = tl.reshape(share, (CHUNK, BLOCK_M // GROUP, GROUP))
        cells = target[None, :] + column[:, None]
        tl.store(most + cells, tl.max(share, 2), mask=written[None, :])
        tl.store(shares + cells, tl.sum(share, 2), mask=written[None, :])
