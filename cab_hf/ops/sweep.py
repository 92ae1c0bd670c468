"""Which blocks are kept, on the GPU: one sweep over the keys, and the pass `keep` over the rest.

The definition is `choose_by_reference` of `cab_hf.predictors.rows`. A program of the sweep scores
the outliers and the typical queries of some query blocks against all keys that these see, and
leaves the largest logit of every key block and the normaliser of every row.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import keep, launch, reference
from cab_hf.ops.alternating import alternating, load_keys
from cab_hf.ops.attention.tiles import LOG2_E, precision, tile_of
from cab_hf.ops.keep import scratch_of
from cab_hf.ops.rows import FP8, ScoredRows, power_of_two

# rows of typical queries of a program, and of outliers, at least: a warp group multiplies so many;
# and where products are of float32, of which a multiprocessor holds few
LEAST_ROWS, LEAST_ROWS_FLOAT32 = 64, 16
# how a program is scheduled where products are of 8 bits: keys at a time, warps, registers a thread
KEYS, WARPS, REGISTERS, STAGES = 128, 4, 168, 3
BYTES_OF_KEYS = 32 << 10
# of keys that are on their way to a program; larger steps of the sweep have fewer stages
BYTES_IN_FLIGHT = 96 << 10
# of all keys, that a GPU's L2 cache holds together; of more, programs share those of a few heads
CACHED_KEYS = 32 << 20
# of at most 2 ** 7 parts of a tile, until one is left
HALVINGS = tl.constexpr(7)
# bytes of scratch at a time
SCRATCH_AT_A_TIME = 1152 << 20


class Units(NamedTuple):
    """Units of the 8-bit keys of every KV head, as exponents of two, as the sweep takes them.

    Attributes:
        each: int8 [B * H_kv, N_k].
        least, largest: int8 [B * H_kv].
    """

    each: Tensor
    least: Tensor
    largest: Tensor


class RowRules(NamedTuple):
    """What decides beside the scores, of every query block.

    Attributes:
        bounds: int32 [6, B, M_q], `reference.row_bounds`.
        mass: from which on a block's mass keeps it, as `predictors.rows.ranks` has it.
        share: of one query, from which on a block is kept.
        tail: bool [B, M_q], the rows that attend everything; None where there are none.
        tail_listed: whether they list it; otherwise they list nothing, and the plan names them.
    """

    bounds: Tensor
    mass: float
    share: float
    tail: Tensor | None
    tail_listed: bool


def kept_blocks(
    outliers: ScoredRows | None,
    typical: ScoredRows,
    keys: Tensor,
    exponents: Tensor,
    marked: Tensor,
    rules: RowRules,
    start: int,
    heads: int,
    blocks: tuple[int, int],
    whole_text: bool,
    bits: Tensor,
    counts: Tensor,
    scores: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """Fill ``bits`` and ``counts`` for some heads, as the predictor's reference has it.

    Args:
        keys, exponents: those of `rows.scored_keys`, [B, H_kv, N_k, C] and [B, H_kv, N_k, 1].
        marked: int8 [B, H_kv, M_k], `marks.marked_blocks`.
        start: the first of the heads whose rows these are, batch rows and heads counted together.
        heads: of a batch row.
        blocks: tokens of a query block and of a key block.
        whole_text: whether queries see no key behind their own place.
        bits: int32 [B, H, M_q, ceil(M_k / 32)]: bit j % 32 of word j // 32 is set where block
            j is kept. Words of blocks that a row does not see mean nothing.
        counts: int32 [B, H, M_q], how many are kept.
        scores: float32 [heads at hand, M_q, M_k], receives the rank of each block that a row sees,
            see `predictors.rows.ranks`; the rank of a forced block is any number. None for no
            ranks.
        sinks: [H], a logit of each head that no block has; None without.
        softcap: that of `reference.capped`.
    """
    query_block, key_block = blocks
    kv_heads, kv_length = keys.shape[1:3]
    planes, total = typical.last.shape
    q_blocks = total // typical.count
    half = typical.vectors.dtype == FP8
    count = 0 if outliers is None else outliers.count
    width = keys.shape[3]
    first = outliers.vectors.shape[2] if count else width
    least = LEAST_ROWS_FLOAT32 if keys.dtype == torch.float32 else LEAST_ROWS
    together = max(1, *(triton.cdiv(least, x) for x in (typical.count, count) if x))
    rows = together * (count + typical.count)
    bytes_a_key = width * keys.element_size()
    # where keys are read by pointers, a multiprocessor may have half the memory
    described = launch.reads_by_descriptor(keys.device)
    at_a_time, in_flight = (x // (1 if described else 2) for x in (BYTES_OF_KEYS, BYTES_IN_FLIGHT))
    most_keys = min(KEYS if half else KEYS // 2, at_a_time // bytes_a_key)
    tile_keys = most_keys if most_keys % key_block == 0 else tile_of(key_block, most_keys)
    # and all tiles of a key block are on their way at the same time
    together_keys = tile_keys if described else max(tile_keys, key_block)
    stages = max(1, min(STAGES, in_flight // (together_keys * bytes_a_key)))
    key_tiles, at_once = alternating(keys, first, key_block, tile_keys)
    step = max(1, tile_keys // key_block)  # in key blocks
    tiles = triton.cdiv(q_blocks, together)
    kv_blocks = triton.cdiv(kv_length, key_block)
    all_columns = triton.cdiv(kv_blocks, step) * step
    # in key blocks: by how much scratch of a tile is wider than that of the one before
    wider = triton.cdiv(together * query_block, key_block * step) * step if whole_text else 0

    def columns(begin: int, end: int) -> int:
        """Of the scratch of some tiles of one head, in key blocks."""
        if wider:
            return wider * (end * (end + 1) - begin * (begin + 1)) // 2
        return (end - begin) * all_columns

    def fits(begin: int, end: int) -> bool:
        a_column = planes * rows * (2 if half else 4)
        return begin + 1 == end or columns(begin, end) * a_column <= SCRATCH_AT_A_TIME

    ends = [tiles]
    while ends[-1]:
        # the longest rows first
        ends.append(bisect_left(range(ends[-1]), True, key=partial(fits, end=ends[-1])))
    parts = [(begin, end) for end, begin in pairwise(ends)]
    scratch = torch.empty(
        max(columns(*part) for part in parts) * planes * rows,
        device=keys.device,
        dtype=torch.float16 if half else torch.float32,
    )
    by_head = keys.numel() * keys.element_size() > CACHED_KEYS
    units = None
    if half:
        each = exponents.flatten(2).flatten(0, 1).contiguous()
        units = Units(each, *each.aminmax(dim=1))
    tail = "none" if rules.tail is None else "listed" if rules.tail_listed else "named"
    scored = outliers if count else typical, typical
    cap = None if softcap is None else softcap * LOG2_E.value
    shape = dict(OUTLIERS=count, TYPICAL=typical.count, TOGETHER=together, WIDER=wider)
    for begin, end in parts:
        left = scratch, columns(begin, end), all_columns
        _sweep_kernel[(end - begin, planes) if by_head else (planes, end - begin)](
            *scored,
            *key_tiles,
            units,
            sinks,
            cap,
            *left,
            begin,
            start,
            heads,
            kv_heads,
            kv_length,
            q_blocks,
            **shape,
            KEY_BLOCK=key_block,
            BY_HEAD=by_head,
            BLOCK_N=tile_keys,
            ALTERNATING=at_once,
            FIRST=first,
            OTHERS=width - first,
            HALF=half,
            PACKED=half and launch.packed(keys),
            PRECISION=precision(typical.vectors),
            STAGES=stages,
            num_warps=WARPS,
            **(launch.registers(keys, REGISTERS) if half else {}),
        )
        keep._keep_kernel[((end - begin) * together, planes)](
            *scored,
            rules.bounds,
            marked,
            bits if rules.tail is None else rules.tail,
            bits,
            counts,
            scores,
            cap,
            *left,
            rules.mass,
            rules.share,
            begin,
            start,
            heads,
            kv_heads,
            q_blocks,
            kv_blocks,
            bits.shape[-1],
            bits.shape[0] * q_blocks,
            **shape,
            WEIGHT=(query_block - count) / typical.count,
            THRESHOLD_BLOCKS=reference.THRESHOLD_KEYS / key_block,
            STEP=step * key_block,
            BLOCKS=step,
            CHUNK=keep.CHUNK,
            TAIL=tail,
            num_warps=keep.WARPS,
        )


@triton.jit
def largest_part(x, PACKED: tl.constexpr):
    """The maximum over the second of the four dims of ``x``, a power of two."""
    y = x
    for _ in tl.static_range(HALVINGS):
        if y.shape[1] > 1:
            y = tl.reshape(y, (y.shape[0], 2, y.shape[1] // 2, y.shape[2], y.shape[3]))
            one, other = tl.split(tl.permute(y, (0, 2, 3, 4, 1)))
            if PACKED:
                # two of float16 at a time: Triton would compare them one by one
                y = tl.inline_asm_elementwise(
                    "max.f16x2 $0, $1, $2;", "=r,r,r", [one, other], tl.float16, True, 2
                )
            else:
                y = tl.maximum(one, other)
    return tl.reshape(y, (x.shape[0], x.shape[2], x.shape[3]))


@triton.jit
def larger(a, b):
    # tl.max would turn float16 into float32, of which half as many are compared at once
    return tl.maximum(a, b)


@triton.jit
def _by_block(
    qk, unit, key, seen, column, PART: tl.constexpr, UNITS: tl.constexpr, PACKED: tl.constexpr,
    BLOCKS: tl.constexpr, ALTERNATING: tl.constexpr,
):  # fmt: skip
    """The largest of a tile of products in each of its key blocks, [rows, BLOCKS].

    ``seen``: the first and the last key that every row sees. All keys of a tile in ``PART`` 1.
    """
    lowest, highest = seen
    if UNITS:
        qk *= unit[None, :]
    if PART != 1:
        there = key[None, :] <= (highest - column)[:, None]
        if PART == 0:
            there &= key[None, :] >= (lowest - column)[:, None]
        # a scalar would turn all into float32
        qk = tl.where(there, qk, tl.full(qk.shape, float("-inf"), qk.dtype))
    rows: tl.constexpr = qk.shape[0]
    parts: tl.constexpr = qk.shape[1] // BLOCKS // ALTERNATING
    qk = tl.reshape(qk, (rows, parts, BLOCKS, ALTERNATING))
    return tl.reduce(largest_part(qk, PACKED), 2, larger)


@triton.jit
def _added(m, total, top, scale, softcap):
    """(largest logit, sum of powers of two below it) with those of some more key blocks."""
    logit = keep.capped(top.to(tl.float32) * scale[:, None], softcap)
    rise = logit - m
    # one exponential: either what came before fades, or what comes does
    fade = tl.exp2(-tl.abs(rise))
    total = tl.where(rise > 0, total * fade + 1.0, total + fade)
    return tl.maximum(m, logit), total


@triton.jit
def _log_total(m, total, real, sinks, head, KEY_BLOCK: tl.constexpr):
    """What is taken off the logits of a row; what sees nothing weighs nothing."""
    largest = tl.max(m, 1)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    total = tl.sum(total * tl.exp2(m - largest[:, None]), 1)
    if sinks is not None:
        total += tl.exp2(sink - largest) / KEY_BLOCK
    return tl.where(real, largest + tl.log2(tl.maximum(total, 1e-30)), float("inf"))


@triton.jit
def _load_rows(rows, plane, block, q_blocks, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """Indices of the rows of some query blocks, (first, last) key that they see, and scales."""
    row = block * COUNT + tl.arange(0, ROWS)
    inside = row < q_blocks * COUNT
    line = plane.to(tl.int64) * (q_blocks * COUNT) + row
    lowest = tl.load(rows.first + line, mask=inside, other=0)
    highest = tl.load(rows.last + line, mask=inside, other=-1)
    scale = tl.load(rows.scale + line, mask=inside, other=1.0)
    return line, inside, (lowest, highest), scale


@triton.jit
def _seen_by_all(seen, STEP: tl.constexpr):
    """Steps that some row sees, from and to, and those that all rows see wholly."""
    lowest, highest = seen
    real = highest >= 0
    most = tl.max(highest, 0)
    low = tl.where(most < 0, 0, tl.min(tl.where(real, lowest, 2147483647), 0) // STEP)
    end = tl.where(most < 0, 0, most // STEP + 1)
    whole_low = tl.cdiv(tl.max(tl.where(real, lowest, -1), 0), STEP)
    whole_high = (tl.min(tl.where(real, highest, 2147483647), 0) + 1) // STEP
    return low, end, whole_low, whole_high


# the first of several launches is no reason to compile twice
@triton.jit(do_not_specialize=[*keep.PLACES, "kv_heads", "kv_length"])
def _sweep_kernel(
    outliers,
    typical,
    desc_first,
    desc_others,
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
    OUTLIERS: tl.constexpr,
    TYPICAL: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDER: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BY_HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALTERNATING: tl.constexpr,
    FIRST: tl.constexpr,
    OTHERS: tl.constexpr,
    HALF: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of all scored rows of some query blocks: largest logits of key blocks, and normalisers."""
    # a step of the sweep is a tile of several key blocks, or a key block of several tiles
    STEP: tl.constexpr = BLOCK_N if BLOCK_N > KEY_BLOCK else KEY_BLOCK
    BLOCKS: tl.constexpr = STEP // KEY_BLOCK
    DTYPE: tl.constexpr = tl.float16 if HALF else tl.float32
    ODD: tl.constexpr = TOGETHER * OUTLIERS
    EVEN: tl.constexpr = TOGETHER * TYPICAL
    ALL: tl.constexpr = ODD + EVEN
    # the longest rows first
    if BY_HEAD:
        plane = tl.program_id(1)
        tile = begin + tl.num_programs(0) - 1 - tl.program_id(0)
    else:
        plane = tl.program_id(0)
        tile = begin + tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (start + plane) // heads
    kv_plane = batch * kv_heads + (start + plane) % heads // (heads // kv_heads)
    block = tile * TOGETHER

    even, even_there, even_seen, even_scale = _load_rows(
        typical, plane, block, q_blocks, TYPICAL, EVEN
    )
    low, end, whole_low, whole_high = _seen_by_all(even_seen, STEP)
    source = typical.vectors + even[:, None] * (FIRST + OTHERS)
    x = tl.load(source + tl.arange(0, FIRST)[None, :], mask=even_there[:, None], other=0.0)
    if OTHERS > 0:
        other = FIRST + tl.arange(0, OTHERS)
        y = tl.load(source + other[None, :], mask=even_there[:, None], other=0.0)
    if OUTLIERS > 0:
        odd, odd_there, odd_seen, odd_scale = _load_rows(
            outliers, plane, block, q_blocks, OUTLIERS, ODD
        )
        low_2, end_2, whole_low_2, whole_high_2 = _seen_by_all(odd_seen, STEP)
        # one of them may see nothing
        low = tl.where(end == 0, low_2, tl.where(end_2 == 0, low, tl.minimum(low, low_2)))
        end = tl.maximum(end, end_2)
        whole_low = tl.maximum(whole_low, whole_low_2)
        whole_high = tl.minimum(whole_high, whole_high_2)
        source = outliers.vectors + odd[:, None] * FIRST + tl.arange(0, FIRST)[None, :]
        z = tl.load(source, mask=odd_there[:, None], other=0.0)

    if WIDER > 0:
        # no row sees so much: what is not reserved is not written
        end = tl.minimum(end, WIDER // BLOCKS * (tile + 1))
    whole_low = tl.minimum(tl.maximum(whole_low, low), end)
    whole_high = tl.minimum(tl.maximum(whole_high, whole_low), end)
    if HALF:
        largest = tl.load(units.largest + kv_plane).to(tl.int32)
        even_scale *= power_of_two(largest)
        if OUTLIERS > 0:
            odd_scale *= power_of_two(largest)
        if tl.load(units.least + kv_plane) < largest:
            # keys of several units are multiplied by them, all in the first part
            whole_low, whole_high = end, end
    kept = scratch_of(scratch, plane, tile, begin, columns, all_columns, ALL, WIDER)
    in_step = tl.arange(0, BLOCKS)[None, :]
    # the key of each column of a tile: blocks alternate
    SIZE: tl.constexpr = BLOCK_N // BLOCKS
    place = tl.arange(0, BLOCK_N)
    key = place // ALTERNATING % BLOCKS * SIZE
    key += place // (ALTERNATING * BLOCKS) * ALTERNATING + place % ALTERNATING
    # one normaliser for each key block of a step: lanes do not exchange anything until the end
    even_m = tl.full((EVEN, BLOCKS), -1e30, tl.float32)
    even_l = tl.zeros((EVEN, BLOCKS), tl.float32)
    if OUTLIERS > 0:
        odd_m = tl.full((ODD, BLOCKS), -1e30, tl.float32)
        odd_l = tl.zeros((ODD, BLOCKS), tl.float32)
    for PART in tl.static_range(3):
        begins = low if PART == 0 else whole_low if PART == 1 else whole_high
        ends = whole_low if PART == 0 else whole_high if PART == 1 else end
        for i in tl.range(begins, ends, num_stages=STAGES):
            even_top = tl.full((EVEN, BLOCKS), float("-inf"), DTYPE)
            if OUTLIERS > 0:
                odd_top = tl.full((ODD, BLOCKS), float("-inf"), DTYPE)
            for offset in tl.static_range(0, STEP, BLOCK_N):
                column = i * STEP + offset
                unit = 0
                if HALF and PART == 0:
                    each = units.each + kv_plane.to(tl.int64) * kv_length + column
                    unit = tl.load(each + key, mask=column + key < kv_length, other=0)
                    unit = power_of_two(unit.to(tl.int32) - largest).to(DTYPE)
                # [BLOCK_N, FIRST], then [rows, BLOCK_N]
                k = load_keys(desc_first, kv_plane, kv_heads, column, key, SIZE, BLOCK_N, FIRST).T
                if OUTLIERS > 0:
                    qk = tl.dot(z, k, input_precision=PRECISION, out_dtype=DTYPE)
                    here = _by_block(
                        qk, unit, key, odd_seen, column, PART, HALF and PART == 0, PACKED, BLOCKS,
                        ALTERNATING,
                    )  # fmt: skip
                    odd_top = tl.maximum(odd_top, here)
                qk = tl.dot(x, k, input_precision=PRECISION, out_dtype=DTYPE)
                if OTHERS > 0:
                    k = load_keys(
                        desc_others, kv_plane, kv_heads, column, key, SIZE, BLOCK_N, OTHERS
                    ).T
                    qk = tl.dot(y, k, qk, input_precision=PRECISION, out_dtype=DTYPE)
                here = _by_block(
                    qk, unit, key, even_seen, column, PART, HALF and PART == 0, PACKED, BLOCKS,
                    ALTERNATING,
                )  # fmt: skip
                even_top = tl.maximum(even_top, here)
            target = kept + i * (ALL * BLOCKS)
            tl.store(target + tl.arange(0, EVEN)[:, None] * BLOCKS + in_step, even_top)
            even_m, even_l = _added(even_m, even_l, even_top, even_scale, softcap)
            if OUTLIERS > 0:
                own = (EVEN + tl.arange(0, ODD))[:, None] * BLOCKS + in_step
                tl.store(target + own, odd_top)
                odd_m, odd_l = _added(odd_m, odd_l, odd_top, odd_scale, softcap)
    head = (start + plane) % heads
    even_norm = _log_total(even_m, even_l, even_seen[1] >= 0, sinks, head, KEY_BLOCK)
    tl.store(typical.norm + even, even_norm, mask=even_there)
    # with the unit of the keys
    tl.store(typical.scale + even, even_scale, mask=even_there)
    if OUTLIERS > 0:
        odd_norm = _log_total(odd_m, odd_l, odd_seen[1] >= 0, sinks, head, KEY_BLOCK)
        tl.store(outliers.norm + odd, odd_norm, mask=odd_there)
        tl.store(outliers.scale + odd, odd_scale, mask=odd_there)
