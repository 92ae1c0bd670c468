"""Selection of key blocks on the GPU: score the sampled queries against the keys, then threshold.

The definition is `choose_by_reference` of `cab_hf.predictors.rows`. `_sweep_kernel` scores one kind
of samples, outliers or typical queries, against all keys that they see. It writes the maximum logit
per key block and the log-sum-exp over blocks for every sample. `keep._keep_kernel` turns both into
shares, and shares into a bitmap.

Scratch layout: a tile is `q_blocks_per_tile` query blocks. Its rows are the samples of its blocks.
A step is `blocks_per_step` key blocks. The scratch of a tile is [steps, rows, blocks_per_step], so
that a program writes one contiguous piece per step. If the queries are a whole sequence, the
scratch of tiles grows with their position, because they see more keys.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import keep, launch, reference
from cab_hf.ops.alternating import alternating, load_keys, padded_to_blocks
from cab_hf.ops.attention.tiles import LOG2_E, precision, tile_of
from cab_hf.ops.keep import scratch_of
from cab_hf.ops.rows import FP8, QuerySample, power_of_two

# samples per program, at least: a warp group multiplies 64 rows, and twice as many hide latency
LEAST_ROWS = 128
# the same for float32 products, which need more registers
LEAST_ROWS_FLOAT32 = 16
# keys per tile of FP8 products; half as many for 16 bits
KEYS = 128
# the fewest keys that one product takes
LEAST_KEYS = 16
# key blocks per step, at most: each has a maximum and a sum per row in registers
MOST_BLOCKS_PER_STEP = 8
WARPS = 4
# registers per thread
REGISTERS = 168
# tiles of keys in flight
STAGES = 3
# bytes of a tile of keys, at most
BYTES_OF_KEYS = 32 << 10
# bytes of keys in flight per program; larger tiles have fewer stages
BYTES_IN_FLIGHT = 96 << 10
# bytes of keys that fit a GPU's L2 cache together; if there are more, programs that run together
# share the keys of a few heads
CACHED_KEYS = 32 << 20
# halvings that reduce a tile of at most 2 ** 7 parts to one part
HALVINGS = tl.constexpr(7)
# bytes of scratch at a time
SCRATCH_AT_A_TIME = 1152 << 20


class Units(NamedTuple):
    """Units of the 8-bit keys of every KV head, as exponents of two.

    Attributes:
        each: int8 [B * H_kv, N_k], the exponent of each key.
        least: int8 [B * H_kv], the smallest exponent of each KV head.
        largest: int8 [B * H_kv], the largest exponent of each KV head.
    """

    each: Tensor
    least: Tensor
    largest: Tensor


class RowRules(NamedTuple):
    """The thresholds, and the blocks that query blocks attend regardless of scores.

    Attributes:
        bounds: int32 [6, B, M_q], `reference.row_bounds`.
        mass: Mean share from which on a block is selected, see `predictors.rows.ranks`.
        share: Share of a single sample from which on a block is selected.
        tail: bool [B, M_q], query blocks that attend to everything; None if there are none.
        tail_listed: True if such query blocks list all blocks. Otherwise they list nothing, and
            the plan names them.
    """

    bounds: Tensor
    mass: float
    share: float
    tail: Tensor | None
    tail_listed: bool


@dataclass(frozen=True)
class Stream:
    """One kind of samples with the keys that they are scored against, and the sizes of its launch.

    Attributes:
        samples: The queries.
        key_tiles: Tiles of the sampled keys, see `alternating`: of the first and of other channels.
        interleave: Keys of a block that are adjacent in a tile.
        first, others: Channels of the two tiles; ``others`` is 0 if the first tile has all.
        key_block: Sampled keys per key block.
        tile_keys: Sampled keys per tile.
        blocks_per_step: Key blocks per step of the sweep, at least 1.
        q_blocks_per_tile: Query blocks per program.
        stages: Tiles of keys in flight.
        kv_blocks: Key blocks of the sequence.
        growth: Key blocks by which the scratch of a tile is wider than the scratch of the tile
            before it; 0 if all tiles have the same width.
    """

    samples: QuerySample
    key_tiles: list[Any]
    interleave: int
    first: int
    others: int
    key_block: int
    tile_keys: int
    blocks_per_step: int
    q_blocks_per_tile: int
    stages: int
    kv_blocks: int
    growth: int

    @classmethod
    def create(
        cls,
        samples: QuerySample,
        keys: Tensor,
        query_block: int,
        key_block: int,
        is_whole_sequence: bool,
    ) -> Stream:
        """Choose the sizes of a launch.

        Args:
            keys: [B, H_kv, N_k, C], `rows.scored_keys`.
            is_whole_sequence: True if queries see no key after their own position.
        """
        stride, kv_blocks = samples.key_stride, triton.cdiv(keys.shape[2], key_block)
        if stride > 1:
            keys = _every(keys, stride, key_block)
        key_block //= stride
        width = samples.vectors.shape[2]
        # if both powers of two are equal, they form one power of two, and one product has all
        # channels
        first = width if width & (width - 1) == 0 else 1 << (width.bit_length() - 1)
        is_fp8 = keys.dtype == FP8
        least = LEAST_ROWS_FLOAT32 if keys.dtype == torch.float32 else LEAST_ROWS
        q_blocks_per_tile = triton.cdiv(least, samples.count)
        key_bytes = width * keys.element_size()
        # if keys are read by pointers, a multiprocessor may have half the memory
        described = launch.reads_by_descriptor(keys.device)
        share = 1 if described else 2
        most_keys = min(KEYS if is_fp8 else KEYS // 2, BYTES_OF_KEYS // share // key_bytes)
        most_keys = max(LEAST_KEYS, min(most_keys, MOST_BLOCKS_PER_STEP * key_block))
        tile_keys = most_keys if most_keys % key_block == 0 else tile_of(key_block, most_keys)
        # all tiles of a key block are in flight at the same time
        in_flight = tile_keys if described else max(tile_keys, key_block)
        stages = max(1, min(STAGES, BYTES_IN_FLIGHT // share // (in_flight * key_bytes)))
        key_tiles, interleave = alternating(keys[..., :width], first, key_block, tile_keys)
        step = max(1, tile_keys // key_block)
        growth = triton.cdiv(q_blocks_per_tile * query_block, key_block * stride * step) * step
        return cls(
            samples=samples,
            key_tiles=key_tiles,
            interleave=interleave,
            first=first,
            others=width - first,
            key_block=key_block,
            tile_keys=tile_keys,
            blocks_per_step=step,
            q_blocks_per_tile=q_blocks_per_tile,
            stages=stages,
            kv_blocks=kv_blocks,
            growth=growth if is_whole_sequence else 0,
        )

    @property
    def rows(self) -> int:
        """Samples per tile."""
        return self.q_blocks_per_tile * self.samples.count

    @property
    def all_columns(self) -> int:
        """Key blocks of whole steps."""
        return triton.cdiv(self.kv_blocks, self.blocks_per_step) * self.blocks_per_step

    def columns(self, begin: int, end: int) -> int:
        """Return the scratch of tiles ``begin`` to ``end`` of one head, in key blocks."""
        if self.growth:
            return self.growth * (end * (end + 1) - begin * (begin + 1)) // 2
        return (end - begin) * self.all_columns

    def scratch(self, begin: int, end: int, num_heads: int) -> int:
        """Return the number of logits in the scratch of tiles ``begin`` to ``end``."""
        return self.columns(begin, end) * num_heads * self.rows


def kept_blocks(
    outliers: QuerySample | None,
    typical: QuerySample,
    keys: Tensor,
    exponents: Tensor,
    marked: Tensor,
    rules: RowRules,
    start: int,
    heads: int,
    blocks: tuple[int, int],
    is_whole_sequence: bool,
    bits: Tensor,
    counts: Tensor,
    scores: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """Fill ``bits`` and ``counts`` for some heads; the predictor's reference is the definition.

    Args:
        outliers, typical: The samples of ``planes`` heads.
        keys, exponents: `rows.scored_keys`, [B, H_kv, N_k, C] and [B, H_kv, N_k, 1].
        marked: int8 [B, H_kv, M_k], `marks.marked_blocks`.
        start: The first of these heads, counted over batch rows and heads.
        heads: Heads per batch row.
        blocks: Tokens of a query block and of a key block.
        is_whole_sequence: True if queries see no key after their own position.
        bits: int32 [B, H, M_q, ceil(M_k / 32)]: bit j % 32 of word j // 32 is set if block j is
            selected. Words of blocks that a query block does not see are undefined.
        counts: int32 [B, H, M_q], the number of selected blocks.
        scores: float32 [planes, M_q, M_k], receives the rank of each visible block, see
            `predictors.rows.ranks`; the rank of a forced block is any number. None for no ranks.
        sinks: [H], one logit per head that takes part in the softmax; None without.
        softcap: See `reference.capped`.
    """
    query_block, key_block = blocks
    planes, total = typical.last.shape
    q_blocks = total // typical.count
    samples = [typical] if outliers is None else [typical, outliers]
    streams = [Stream.create(x, keys, query_block, key_block, is_whole_sequence) for x in samples]
    # a part is a range of the largest tiles
    tile = max(stream.q_blocks_per_tile for stream in streams)
    ratios = [tile // stream.q_blocks_per_tile for stream in streams]
    is_fp8 = keys.dtype == FP8
    dtype = torch.float16 if is_fp8 else torch.float32

    def logits(begin: int, end: int) -> list[int]:
        pairs = zip(streams, ratios, strict=True)
        return [x.scratch(begin * ratio, end * ratio, planes) for x, ratio in pairs]

    def fits(begin: int, end: int) -> bool:
        return begin + 1 == end or sum(logits(begin, end)) * dtype.itemsize <= SCRATCH_AT_A_TIME

    ends = [triton.cdiv(q_blocks, tile)]
    while ends[-1]:
        # the longest rows start first
        ends.append(bisect_left(range(ends[-1]), True, key=partial(fits, end=ends[-1])))
    parts = [(begin, end) for end, begin in pairwise(ends)]
    sizes = [
        max(sizes) for sizes in zip(*(logits(begin, end) for begin, end in parts), strict=True)
    ]
    scratches = [torch.empty(size, device=keys.device, dtype=dtype) for size in sizes]
    units = None
    if is_fp8:
        each = exponents.flatten(2).flatten(0, 1).contiguous()
        units = Units(each, *each.aminmax(dim=1))
    cap = None if softcap is None else softcap * LOG2_E.value
    for begin, end in parts:
        for stream, ratio, scratch in zip(streams, ratios, scratches, strict=True):
            _sweep(
                stream,
                keys,
                units,
                sinks,
                cap,
                scratch=scratch,
                tiles=(begin * ratio, end * ratio),
                start=start,
                heads=heads,
                q_blocks=q_blocks,
                key_block=key_block,
            )
        _threshold(
            streams,
            ratios,
            scratches,
            rules,
            marked,
            bits,
            counts,
            scores,
            cap,
            part=(begin, end),
            tile=tile,
            start=start,
            heads=heads,
            blocks=blocks,
        )


def _every(keys: Tensor, stride: int, key_block: int) -> Tensor:
    """Return a view of every ``stride``-th key, from `reference.key_offset` on.

    Keys are padded to whole blocks, so that every block has the same number of sampled keys.
    """
    keys = padded_to_blocks(keys, key_block)
    return keys[:, :, reference.key_offset(stride) :: stride]


def _sweep(
    stream: Stream,
    keys: Tensor,
    units: Units | None,
    sinks: Tensor | None,
    cap: float | None,
    *,
    scratch: Tensor,
    tiles: tuple[int, int],
    start: int,
    heads: int,
    q_blocks: int,
    key_block: int,
) -> None:
    """Launch `_sweep_kernel` for some tiles of a stream."""
    begin, end = tiles
    planes = stream.samples.last.shape[0]
    is_fp8 = keys.dtype == FP8
    by_head = keys.numel() * keys.element_size() > CACHED_KEYS
    _sweep_kernel[(end - begin, planes) if by_head else (planes, end - begin)](
        stream.samples[:5],
        stream.key_tiles[0],
        stream.key_tiles[-1],
        units,
        sinks,
        cap,
        scratch,
        stream.columns(begin, end),
        stream.all_columns,
        begin,
        start,
        heads,
        keys.shape[1],
        keys.shape[2],
        q_blocks,
        COUNT=stream.samples.count,
        Q_BLOCKS=stream.q_blocks_per_tile,
        GROWTH=stream.growth,
        TOKENS=key_block,
        KEY_BLOCK=stream.key_block,
        KEY_STRIDE=stream.samples.key_stride,
        KEY_OFFSET=reference.key_offset(stream.samples.key_stride),
        BY_HEAD=by_head,
        BLOCK_N=stream.tile_keys,
        INTERLEAVE=stream.interleave,
        FIRST=stream.first,
        OTHERS=stream.others,
        HALF=is_fp8,
        PACKED=is_fp8 and launch.packed(keys),
        PRECISION=precision(stream.samples.vectors),
        STAGES=stream.stages,
        num_warps=WARPS,
        **(launch.registers(keys, REGISTERS) if is_fp8 else {}),
    )


def _threshold(
    streams: list[Stream],
    ratios: list[int],
    scratches: list[Tensor],
    rules: RowRules,
    marked: Tensor,
    bits: Tensor,
    counts: Tensor,
    scores: Tensor | None,
    cap: float | None,
    *,
    part: tuple[int, int],
    tile: int,
    start: int,
    heads: int,
    blocks: tuple[int, int],
) -> None:
    """Launch `keep._keep_kernel` for the query blocks of some tiles."""
    query_block, key_block = blocks
    begin, end = part
    q_blocks = bits.shape[2]
    typical, *others = streams
    outliers = others[0] if others else typical
    num_outliers = outliers.samples.count if others else 0
    columns = [
        stream.columns(begin * ratio, end * ratio)
        for stream, ratio in zip(streams, ratios, strict=True)
    ]
    keep._keep_kernel[((end - begin) * tile, typical.samples.last.shape[0])](
        typical.samples[:5],
        outliers.samples[:5],
        rules.bounds,
        marked,
        bits if rules.tail is None else rules.tail,
        bits,
        counts,
        scores,
        cap,
        scratches[0],
        scratches[-1],
        columns[0],
        columns[-1],
        typical.all_columns,
        outliers.all_columns,
        rules.mass,
        rules.share,
        begin * tile,
        start,
        heads,
        marked.shape[1],
        q_blocks,
        typical.kv_blocks,
        bits.shape[-1],
        bits.shape[0] * q_blocks,
        TYPICAL=typical.samples.count,
        OUTLIERS=num_outliers,
        TYPICAL_Q_BLOCKS=typical.q_blocks_per_tile,
        OUTLIER_Q_BLOCKS=outliers.q_blocks_per_tile,
        TYPICAL_KEY_BLOCK=typical.key_block,
        OUTLIER_KEY_BLOCK=outliers.key_block,
        TYPICAL_STEP=typical.blocks_per_step,
        OUTLIER_STEP=outliers.blocks_per_step,
        TYPICAL_GROWTH=typical.growth,
        OUTLIER_GROWTH=outliers.growth,
        WEIGHT=(query_block - num_outliers) / typical.samples.count,
        THRESHOLD_BLOCKS=reference.THRESHOLD_KEYS / key_block,
        CHUNK=keep.CHUNK,
        TAIL="none" if rules.tail is None else "listed" if rules.tail_listed else "named",
        num_warps=keep.WARPS,
    )


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
    qk, unit, key, lowest, highest, column, PART: tl.constexpr, UNITS: tl.constexpr,
    PACKED: tl.constexpr, BLOCKS: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """Return the maximum of a tile of products per key block, [ROWS, BLOCKS].

    Rows see keys ``lowest`` to ``highest``. In ``PART`` 1 they see all keys of a tile.
    """
    if UNITS:
        qk *= unit[None, :]
    if PART != 1:
        there = key[None, :] <= (highest - column)[:, None]
        if PART == 0:
            there &= key[None, :] >= (lowest - column)[:, None]
        # a scalar would convert all to float32
        qk = tl.where(there, qk, tl.full(qk.shape, float("-inf"), qk.dtype))
    rows: tl.constexpr = qk.shape[0]
    parts: tl.constexpr = qk.shape[1] // BLOCKS // INTERLEAVE
    qk = tl.reshape(qk, (rows, parts, BLOCKS, INTERLEAVE))
    return tl.reduce(largest_part(qk, PACKED), 2, larger)


@triton.jit
def _added(m, total, top, scale, softcap):
    """Return the running maximum and sum of powers of two after adding some key blocks."""
    logit = keep.capped(top.to(tl.float32) * scale[:, None], softcap)
    rise = logit - m
    # one exponential: either the old sum is scaled down, or the new term
    fade = tl.exp2(-tl.abs(rise))
    total = tl.where(rise > 0, total * fade + 1.0, total + fade)
    return tl.maximum(m, logit), total


@triton.jit
def _log_total(m, total, real, sinks, head, TOKENS: tl.constexpr):
    """Return the log-sum-exp of each row to base two; infinity for rows that see nothing."""
    largest = tl.max(m, 1)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    total = tl.sum(total * tl.exp2(m - largest[:, None]), 1)
    if sinks is not None:
        total += tl.exp2(sink - largest) / TOKENS
    return tl.where(real, largest + tl.log2(tl.maximum(total, 1e-30)), float("inf"))


@triton.jit
def _visible_steps(lowest, highest, STEP: tl.constexpr):
    """Return the range of steps that some row sees, and the range that all rows see completely."""
    real = highest >= 0
    most = tl.max(highest, 0)
    low = tl.where(most < 0, 0, tl.min(tl.where(real, lowest, 2147483647), 0) // STEP)
    end = tl.where(most < 0, 0, most // STEP + 1)
    whole_low = tl.cdiv(tl.max(tl.where(real, lowest, -1), 0), STEP)
    whole_high = (tl.min(tl.where(real, highest, 2147483647), 0) + 1) // STEP
    return low, end, whole_low, whole_high


# the position of a launch must not cause another compilation
@triton.jit(do_not_specialize=[*keep.PLACES, "kv_heads", "kv_length"])
def _sweep_kernel(
    samples,
    keys_first,
    keys_others,
    units,
    sinks,
    softcap,
    scratch,
    columns,
    all_columns,
    begin,
    start,
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
    vectors, scales, norms, firsts, lasts = samples
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
    batch = (start + plane) // heads
    kv_plane = batch * kv_heads + (start + plane) % heads // (heads // kv_heads)

    # samples: [ROWS, FIRST] and [ROWS, OTHERS]
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < q_blocks * COUNT
    line = plane.to(tl.int64) * (q_blocks * COUNT) + row
    lowest = tl.load(firsts + line, mask=inside, other=0)
    highest = tl.load(lasts + line, mask=inside, other=-1)
    scale = tl.load(scales + line, mask=inside, other=1.0)
    source = vectors + line[:, None] * (FIRST + OTHERS)
    x = tl.load(source + tl.arange(0, FIRST)[None, :], mask=inside[:, None], other=0.0)
    if OTHERS > 0:
        other = FIRST + tl.arange(0, OTHERS)
        y = tl.load(source + other[None, :], mask=inside[:, None], other=0.0)

    low, end, whole_low, whole_high = _visible_steps(lowest, highest, STEP)
    if GROWTH > 0:
        # the scratch has no columns for keys after the tile
        end = tl.minimum(end, GROWTH // BLOCKS * (tile + 1))
    whole_low = tl.minimum(tl.maximum(whole_low, low), end)
    whole_high = tl.minimum(tl.maximum(whole_high, whole_low), end)
    if HALF:
        largest = tl.load(units.largest + kv_plane).to(tl.int32)
        scale *= power_of_two(largest)
        if tl.load(units.least + kv_plane) < largest:
            # keys with several units are multiplied by their unit, all in the first part
            whole_low, whole_high = end, end
    target = scratch_of(scratch, plane, tile, begin, columns, all_columns, ROWS, GROWTH)
    target += tl.arange(0, ROWS)[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    # the key of each column of a tile: blocks alternate
    SIZE: tl.constexpr = BLOCK_N // BLOCKS
    place = tl.arange(0, BLOCK_N)
    key = place // INTERLEAVE % BLOCKS * SIZE
    key += place // (INTERLEAVE * BLOCKS) * INTERLEAVE + place % INTERLEAVE
    # one maximum and one sum per key block of a step: lanes exchange nothing before the end
    m_i = tl.full((ROWS, BLOCKS), -1e30, tl.float32)
    l_i = tl.zeros((ROWS, BLOCKS), tl.float32)
    # parts: steps that some rows do not see completely, complete steps, and the rest
    for PART in tl.static_range(3):
        begins = low if PART == 0 else whole_low if PART == 1 else whole_high
        ends = whole_low if PART == 0 else whole_high if PART == 1 else end
        for i in tl.range(begins, ends, num_stages=STAGES):
            top = tl.full((ROWS, BLOCKS), float("-inf"), DTYPE)
            for offset in tl.static_range(0, STEP, BLOCK_N):
                column = i * STEP + offset
                unit = 0
                if HALF and PART == 0:
                    token = KEY_OFFSET + (column + key) * KEY_STRIDE
                    each = units.each + kv_plane.to(tl.int64) * kv_length
                    unit = tl.load(each + token, mask=token < kv_length, other=0)
                    unit = power_of_two(unit.to(tl.int32) - largest).to(DTYPE)
                # [BLOCK_N, FIRST], then [ROWS, BLOCK_N]
                k = load_keys(keys_first, kv_plane, kv_heads, column, key, SIZE, BLOCK_N, FIRST).T
                qk = tl.dot(x, k, input_precision=PRECISION, out_dtype=DTYPE)
                if OTHERS > 0:
                    k = load_keys(
                        keys_others, kv_plane, kv_heads, column, key, SIZE, BLOCK_N, OTHERS
                    ).T
                    qk = tl.dot(y, k, qk, input_precision=PRECISION, out_dtype=DTYPE)
                here = _by_block(
                    qk, unit, key, lowest, highest, column, PART, HALF and PART == 0, PACKED,
                    BLOCKS, INTERLEAVE,
                )  # fmt: skip
                top = tl.maximum(top, here)
            tl.store(target + i * (ROWS * BLOCKS), top)
            m_i, l_i = _added(m_i, l_i, top, scale, softcap)
    head = (start + plane) % heads
    norm = _log_total(m_i, l_i, highest >= 0, sinks, head, TOKENS)
    tl.store(norms + line, norm, mask=inside)
    # the stored scale includes the unit of the keys
    tl.store(scales + line, scale, mask=inside)
