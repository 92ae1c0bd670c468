"""The kernels that choose which keys a step reads: from a query and the index to a list of slots.

Sample: the sampled keys of a long cache are scored, and those that are always read; programs leave
logits in whole steps, and their part of each head's log-sum-exp. Limit: one program a row finds the
last step that fits by bisection; it finds how large a score of each head must be, and what all
smaller ones weigh. Choose: the index is read once, and a bit a key marks whether it is read. List:
bits become slots, one behind the other.

Why 4 bits, which cost packing and PTX: an index of 8 bits with plain products, of half the lines,
took 21 % more of a step on an H100 at 131,072 keys and batch 4 (32 heads, 8 of K and V, head dim
128: 0.167 ms for 0.139, choice and attention; 32 of both, head dim 64: 0.322 for 0.264), and keys
that it read had within .006 of the same share of attention.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import launch
from cab_hf.ops.attention.tiles import LOG2_E, Vectors, vectors
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.channels import Channels
from cab_hf.ops.decode.index_kernel import LEAST_SCALE, nearest
from cab_hf.ops.decode.reference import Choice, Index, spread_of
from cab_hf.ops.launch import LOWEST, on_device_of

STEPS_AN_OCTAVE = tl.constexpr(reference.STEPS_AN_OCTAVE)
A_STEP = tl.constexpr(1 / reference.STEPS_AN_OCTAVE)
LEAST, HIDDEN = tl.constexpr(reference.LEAST), tl.constexpr(reference.HIDDEN)
NEIGHBOURS = tl.constexpr(reference.NEIGHBOURS)
SINKS, LOCAL = tl.constexpr(reference.SINKS), tl.constexpr(reference.LOCAL)
LOG_UNREAD_SHARE = tl.constexpr(math.log2(reference.UNREAD_SHARE))
LARGEST_QUERY = tl.constexpr(float(reference.LARGEST_QUERY))
A_QUERY = tl.constexpr(1 / reference.LARGEST_QUERY)
STEP_BITS = tl.constexpr(reference.LEAST.bit_length())
# in place of the logit of a key that is not counted
UNCOUNTED = tl.constexpr(-32768)

# of a product on tensor cores: rows of keys, columns of queries, and bytes that it sums over
LEAST_ROWS, LEAST_COLUMNS, LEAST_BYTES = 64, 16, 32
# how launches are cut: what an H200 runs fastest. Bytes of the index at a time; fewest and most
# keys that a program chooses among, and programs that there should be
SCORED_BYTES, CHOSEN, CHOOSING_PROGRAMS = 8 << 10, (2048, 8192), 512
SCORE_WARPS, SCORE_STAGES = 4, 3
# warps that find the limit of a row
LIMIT_WARPS = 16
# keys whose bits become slots at a time
LISTED = 2048


def choose(
    q: Tensor,
    index: Index,
    scale: float,
    length: Tensor,
    wanted: Tensor,
    channels: tuple[int, ...] = (),
    valid: Tensor | None = None,
) -> Choice:
    """See `reference.choose`."""
    given = q, *index, scale, length, wanted, list(channels), valid
    if torch.compiler.is_compiling():
        return Choice(*torch.ops.cab_hf.decode_choose(*given))
    return Choice(*_choose(*given))


def _choose(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    scale: float,
    length: Tensor,
    wanted: Tensor,
    channels: list[int],
    valid: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(slots, counts, unread) of a `Choice`."""
    batch, kv_heads, slots, width = codes.shape
    group = q.shape[1] // kv_heads
    halves, rows = Channels.of_halves(tuple(channels), q.shape[3]), batch * kv_heads
    q = q if q.stride(-1) == 1 else q.contiguous()
    codes = codes if codes.stride()[2:] == (width, 1) else codes.contiguous()
    scales = scales if scales.stride(2) == 1 else scales.contiguous()
    seen, wanted = launch.padding(valid), wanted.expand(batch).contiguous()
    chosen = q.new_empty(batch, kv_heads, slots, dtype=torch.int32)
    counts = q.new_empty(batch, kv_heads, dtype=torch.int32)
    unread = q.new_empty(batch, q.shape[1], dtype=torch.float32)
    words = triton.cdiv(slots, 32)
    bits = q.new_empty(rows, words, dtype=torch.int32)
    spread = spread_of(slots)

    given = vectors(q), vectors(codes), Vectors(scales, *scales.stride()), length, *seen
    given = *given, scale * LOG2_E.value, kv_heads, slots
    shape = {"GROUP": group, "FIRST": halves.first, "STEP": halves.step, "SIZE": halves.size}
    shape["PACKED"] = launch.packed(q)
    pack, room, columns, at_a_time = _packing(group, width, NEIGHBOURS.value)
    sampled = triton.cdiv(slots, NEIGHBOURS.value * spread) * NEIGHBOURS.value
    splits = triton.cdiv(sampled, at_a_time)
    logits = q.new_empty(rows, splits * at_a_time, room, dtype=torch.int16)
    lse = q.new_empty(rows, splits + 1, room, dtype=torch.float32)
    always = q.new_empty(rows, dtype=torch.int32)
    units, least = (q.new_empty(rows, room, dtype=torch.float32) for _ in range(2))
    with on_device_of(q):
        _sample_kernel[(splits + 1, rows)](
            *given,
            logits,
            lse,
            units,
            always,
            SPREAD=spread,
            LOG_SPREAD=spread.bit_length() - 1,
            ROOM=room,
            PACK=pack,
            BLOCK_N=at_a_time,
            BLOCK_C=columns,
            num_warps=SCORE_WARPS,
            **launch.early(q),
            **shape,
        )
        _limit_kernel[(rows,)](
            logits,
            lse,
            units,
            always,
            least,
            unread,
            length,
            wanted,
            kv_heads,
            splits * at_a_time,
            splits,
            SPREAD=spread,
            LOG_SPREAD=spread.bit_length() - 1,
            GROUP=group,
            ROOM=room,
            SPLITS=triton.next_power_of_2(splits + 1),
            PACKED=launch.packed(q),
            BLOCK_N=triton.next_power_of_2(sampled),
            num_warps=LIMIT_WARPS,
            **launch.early(q),
        )
        # columns are filled by neighbouring keys, see `_queries`
        pack, own_room, columns, at_a_time = _packing(group, width, LEAST_COLUMNS)
        fewest, most = CHOSEN
        a_program = triton.next_power_of_2(triton.cdiv(slots * rows, CHOOSING_PROGRAMS))
        a_program = max(at_a_time, fewest, min(most, a_program))
        splits = triton.cdiv(slots, a_program)
        read = q.new_empty(rows, splits, dtype=torch.int32)
        _choose_kernel[(splits, rows)](
            *given,
            least,
            bits,
            read,
            words,
            LEASTS=room,
            ROOM=own_room,
            PACK=pack,
            KEYS=a_program,
            BLOCK_N=at_a_time,
            BLOCK_C=columns,
            PADDED=columns != width,
            num_warps=SCORE_WARPS,
            num_stages=SCORE_STAGES,
            **launch.early(q),
            **shape,
        )
        _list_kernel[(splits, rows)](
            bits,
            read,
            chosen,
            counts,
            length,
            words,
            slots,
            splits,
            KEYS=a_program,
            SPLITS=triton.next_power_of_2(splits),
            BLOCK_N=min(LISTED, a_program),
            num_warps=4,
            **launch.early(q),
        )
    return chosen, counts, unread


def _packing(group: int, width: int, most: int) -> tuple[int, int, int, int]:
    """Of a product: neighbouring keys in a row, queries each has room for, bytes of one, all keys.

    No more than ``most`` neighbours. Keys of a width that is no power of two are alone.
    """
    room, alone = triton.next_power_of_2(group), triton.next_power_of_2(width)
    pack = max(LEAST_COLUMNS // room, LEAST_BYTES // width, 1)
    if alone != width or pack > most and most * width < LEAST_BYTES:
        pack = 1
    pack = min(pack, most)
    columns = max(alone, LEAST_BYTES // pack)
    at_a_time = pack * max(LEAST_ROWS, SCORED_BYTES // (pack * columns))
    return pack, max(room, LEAST_COLUMNS // pack), columns, at_a_time


@triton.jit
def _spread(x, PACK: tl.constexpr, ROOM: tl.constexpr, BLOCK_C: tl.constexpr):
    """int8 [PACK * BLOCK_C, PACK * ROOM] of x [ROOM, BLOCK_C]: x in every block of the diagonal."""
    one, other = tl.arange(0, PACK)[:, None, None, None], tl.arange(0, PACK)[None, None, :, None]
    x = tl.where(one == other, x[None, :, None, :], 0.0).to(tl.int8)
    return tl.trans(tl.reshape(x, (PACK * ROOM, PACK * BLOCK_C)))


@triton.jit
def _half_bytes(x, UPPER: tl.constexpr, PACKED: tl.constexpr):
    """The lower or upper halves of bytes, int8."""
    if PACKED:
        # four at a time: Triton would take them apart one by one
        if UPPER:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0f0f0f0f; }",
                "=r,r",
                [x],
                tl.int8,
                True,
                4,
            )
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0f0f0f0f;", "=r,r", [x], tl.int8, True, 4
        )
    return ((x >> 4) if UPPER else (x & 15)).to(tl.int8)


@triton.jit
def _in_steps(x, PACKED: tl.constexpr):
    """`reference.in_steps`, int16."""
    x = x * STEPS_AN_OCTAVE
    if PACKED:
        return tl.inline_asm_elementwise(
            "cvt.rni.sat.s16.f32 $0, $1;", "=h,f", [x], tl.int16, True, 1
        )
    return tl.floor(tl.minimum(tl.maximum(x, -32768.0), 32767.0) + 0.5).to(tl.int16)


@triton.jit
def _queries(
    q,
    batch,
    head,
    qk_scale,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    PACK: tl.constexpr,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Queries of a group in 8 bits, as a product takes them.

    A product has 16 columns, and a group fewer queries. `PACK` neighbouring keys, which lie in
    memory one behind the other, count as one of as many times the channels; column j * ROOM + g is
    the product of query g with the j-th of them, by a query that is 0 in the channels of the
    others. So no lane works on a column that is thrown away.

    Returns:
        int8 [PACK * BLOCK_C, PACK * ROOM] for each half of the channels; what is taken off the
        products of each column, int32 [1, PACK * ROOM]; the unit of what is left, float32 [ROOM].
    """
    member, inner = tl.arange(0, ROOM), tl.arange(0, BLOCK_C)
    real = (member < GROUP)[:, None] & (inner < SIZE)[None, :]
    at = q.data + batch * q.batch + (head * GROUP + member)[:, None] * q.head + FIRST
    low = tl.load(at + inner[None, :], mask=real, other=0.0).to(tl.float32)
    high = tl.load(at + STEP + inner[None, :], mask=real, other=0.0).to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    unit = tl.maximum(unit * A_QUERY, LEAST_SCALE)
    inverse = tl.div_rn(tl.full([ROOM], 1.0, tl.float32), unit)[:, None]
    low, high = nearest(low * inverse, LARGEST_QUERY), nearest(high * inverse, LARGEST_QUERY)
    # codes are 8 more than their values
    offset = (8.0 * (tl.sum(low, 1) + tl.sum(high, 1))).to(tl.int32)
    low, high = _spread(low, PACK, ROOM, BLOCK_C), _spread(high, PACK, ROOM, BLOCK_C)
    return low, high, _a_column(offset, PACK, ROOM), unit * qk_scale


@triton.jit
def _a_column(x, PACK: tl.constexpr, ROOM: tl.constexpr):
    """[1, PACK * ROOM] of x [ROOM]."""
    return tl.reshape(tl.broadcast_to(x[None, :], (PACK, ROOM)), (1, PACK * ROOM))


@triton.jit
def _scores(codes, scale, low, high, offset, PACKED: tl.constexpr):
    """Products of rows of codes and queries, float32 [keys / PACK, PACK * ROOM], in their units."""
    s = tl.dot(_half_bytes(codes, False, PACKED), low, out_dtype=tl.int32)
    s = tl.dot(_half_bytes(codes, True, PACKED), high, s, out_dtype=tl.int32)
    return (s - offset).to(tl.float32) * scale.to(tl.float32)


@triton.jit
def _sample_kernel(
    q,
    codes,
    scales,
    length,
    valid,
    valid_stride,
    first,
    qk_scale,
    kv_heads,
    slots,
    logits,
    lse,
    units,
    always,
    SPREAD: tl.constexpr,
    LOG_SPREAD: tl.constexpr,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PACKED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Logits of some sampled keys in whole steps, and their part of each head's log-sum-exp.

    The last program of a row has the keys that are always read in their place, and counts them.
    """
    if EARLY:
        # in this order: choosing reads the query before it waits
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // kv_heads, row % kv_heads
    splits = tl.num_programs(0)
    end = tl.load(length).to(tl.int32)
    begin = 0
    if valid is not None:
        begin = tl.load(first + batch)
    columns: tl.constexpr = PACK * ROOM
    tile: tl.constexpr = BLOCK_N // PACK
    column, line = tl.arange(0, columns), tl.arange(0, tile)
    part = (row * splits + split) * ROOM + tl.arange(0, ROOM)
    sampling = split < splits - 1
    if sampling & (split * BLOCK_N * SPREAD >= end):
        tl.store(lse + part, tl.full([ROOM], LOWEST, tl.float32))
        return

    place = split * BLOCK_N + line * PACK
    slot = place // NEIGHBOURS * (NEIGHBOURS * SPREAD) + place % NEIGHBOURS
    local = end - LOCAL + line * PACK - SINKS
    around = tl.where(line * PACK < SINKS, begin + line * PACK, local)
    around = tl.where(line * PACK < SINKS + LOCAL, around, end)
    slot = tl.where(sampling, slot, around)[:, None]
    token = slot + (column // ROOM)[None, :]
    seen = (token >= 0) & (token < end)
    if valid is not None:
        shown = tl.load(valid + batch * valid_stride + token, mask=seen, other=0)
        seen = seen & (shown != 0)
    ends = (token < begin + SINKS) | (token >= end - LOCAL)
    # near the start of a text the last tokens are among the first
    sink = (line * PACK < SINKS)[:, None]
    counted = seen & tl.where(sampling, ~ends, sink == (token < begin + SINKS))

    place = tl.arange(0, PACK * BLOCK_C)[None, :]
    behind, inner = place // BLOCK_C, place % BLOCK_C
    there = (slot + behind >= 0) & (slot + behind < end) & (inner < SIZE)
    y = codes.data + batch * codes.batch + head * codes.head
    y = tl.load(y + slot.to(tl.int64) * SIZE + (behind * SIZE + inner), mask=there, other=0)
    own = scales.data + batch * scales.batch + head * scales.head
    own = tl.load(own + token, mask=counted, other=0.0)
    low, high, offset, unit = _queries(
        q, batch, head, qk_scale, GROUP, ROOM, PACK, FIRST, STEP, SIZE, BLOCK_C
    )
    s = _scores(y, own, low, high, offset, PACKED) * _a_column(unit, PACK, ROOM)
    if sampling:
        steps = tl.maximum(_in_steps(s, PACKED), UNCOUNTED + 1)
        steps = tl.where(counted, steps, UNCOUNTED).to(tl.int16)
        target = logits + (row * (splits - 1) + split) * (BLOCK_N * ROOM)
        tl.store(target + line[:, None] * columns + column[None, :], steps)
        # a key represents as many as are not sampled
        s += LOG_SPREAD
    else:
        count = counted & (column % ROOM == 0)[None, :]
        tl.store(always + row, tl.sum(tl.sum(count.to(tl.int32), 1), 0))
        tl.store(units + row * ROOM + tl.arange(0, ROOM), unit)
    s = tl.reshape(tl.where(counted, s, LOWEST), (tile * PACK, ROOM))
    # of keys that no query sees the maximum is the lowest, and the sum means nothing
    largest = tl.max(s, 0)
    total = largest + tl.log2(tl.sum(tl.exp2(s - largest[None, :]), 0))
    tl.store(lse + part, tl.where(largest > LOWEST, total, LOWEST))


@triton.jit
def _limit_kernel(
    logits,
    lse,
    units,
    always,
    least,
    unread,
    length,
    wanted,
    kv_heads,
    samples,
    splits,
    SPREAD: tl.constexpr,
    LOG_SPREAD: tl.constexpr,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    SPLITS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The least product, in units of its query, by which a key is read for each head of a row; and
    the logarithm of what the keys that are not read weigh, `Choice.unread`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    end, own = tl.load(length).to(tl.int32), tl.load(always + row)
    many = tl.load(wanted + row // kv_heads)
    member, at = tl.arange(0, ROOM), tl.arange(0, BLOCK_N)
    # programs behind the text have left nothing
    count = tl.minimum(tl.cdiv(end, NEIGHBOURS * SPREAD) * NEIGHBOURS, samples)
    place = logits + (row * samples + at)[:, None] * ROOM + member[None, :]
    # by a choice of its own: for `other` Triton 3.6 gives every second number of 16 bits another
    logit = tl.load(place, mask=(at < count)[:, None]).to(tl.int32)
    logit = tl.where((at < count)[:, None], logit, UNCOUNTED)
    split = tl.arange(0, SPLITS)
    part = (row * (splits + 1) + split)[:, None] * ROOM + member[None, :]
    parts = tl.load(lse + part, mask=(split <= splits)[:, None], other=LOWEST)
    most = tl.max(parts, 0)
    total = most + tl.log2(tl.sum(tl.exp2(parts - most[None, :]), 0))
    total = _in_steps(total, PACKED).to(tl.int32)
    below = total[None, :] - logit
    if GROUP < ROOM:
        below = tl.where(member[None, :] < GROUP, below, LEAST)
    step = tl.minimum(tl.maximum(tl.min(below, 1), 1), LEAST)
    step = tl.where(tl.max(logit, 1) > UNCOUNTED, step, HIDDEN)
    # the largest step that fits, bit by bit; what is always read is step 0
    last, taken = 0, own
    for bit in tl.static_range(STEP_BITS):
        other = last + ((LEAST + 1) >> (bit + 1))
        with_it = own + SPREAD * tl.sum((step <= other).to(tl.int32), 0)
        fits = (with_it <= many) & (other < LEAST)
        last, taken = tl.where(fits, other, last), tl.where(fits, with_it, taken)
    last += ((2 * taken < many) & (last + 1 < LEAST)).to(tl.int32)
    everything = own + SPREAD * tl.sum((step < HIDDEN).to(tl.int32), 0) <= many
    everything = everything | (end <= many)
    gone = (step > last) & (step < HIDDEN) & ~everything
    weight = tl.exp2(below.to(tl.float32) * -A_STEP)
    weight = tl.sum(tl.where(gone[:, None], weight, 0.0), 0)
    weight = tl.log2(weight) + total.to(tl.float32) * A_STEP + (LOG_SPREAD + LOG_UNREAD_SHARE)
    tl.store(unread + row * GROUP + member, weight, mask=member < GROUP)
    # half a step less: products are not rounded
    product = (total - last).to(tl.float32) - 0.5
    product = product * A_STEP / tl.load(units + row * ROOM + member)
    product = tl.where(everything, float("-inf"), product)
    product = tl.where(member < GROUP, product, float("inf"))
    tl.store(least + row * ROOM + member, product)


@triton.jit
def _choose_kernel(
    q,
    codes,
    scales,
    length,
    valid,
    valid_stride,
    first,
    qk_scale,
    kv_heads,
    slots,
    least,
    bits,
    read,
    words,
    LEASTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    PACK: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Which of ``KEYS`` keys are read, a bit each, and how many."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // kv_heads, row % kv_heads
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    columns: tl.constexpr = PACK * ROOM
    tile: tl.constexpr = BLOCK_N // PACK
    low, high, offset, _ = _queries(
        q, batch, head, qk_scale, GROUP, ROOM, PACK, FIRST, STEP, SIZE, BLOCK_C
    )
    if EARLY:
        tl.extra.cuda.gdc_wait()
    end = tl.load(length).to(tl.int32)
    begin = split * KEYS
    stop = tl.minimum(begin + KEYS, slots)
    written = tl.minimum(stop, end)
    column, behind = tl.arange(0, columns)[None, :], tl.arange(0, PACK)[None, :]
    line = tl.arange(0, tile)[:, None] * PACK
    begin_of_text, valid_at = 0, valid
    if valid is not None:
        begin_of_text, valid_at = tl.load(first + batch), valid + batch * valid_stride
    own = column % ROOM
    own = tl.load(least + row * LEASTS + own, mask=own < LEASTS, other=float("inf"))

    place = tl.arange(0, PACK * BLOCK_C)[None, :]
    ahead_of, inner = place // BLOCK_C, place % BLOCK_C
    keys = codes.data + batch * codes.batch + head * codes.head
    keys += (line + ahead_of) * SIZE + inner
    key_size = tl.full([], SIZE, tl.int64)
    scales_at = scales.data + batch * scales.batch + head * scales.head + line + behind
    word = tl.arange(0, BLOCK_N // 32)
    target = bits + row * words + word
    count = tl.zeros([BLOCK_N // 32], tl.int32)
    # whole tiles need no mask: what is not written is no more than not read
    whole = begin
    if not PADDED:
        whole = tl.maximum(begin, tl.minimum(written, slots // BLOCK_N * BLOCK_N))
    # scales of the next tile are on their way while one is computed
    ahead = tl.load(scales_at + begin, mask=begin + line + behind < slots, other=0.0)
    for start in range(begin, whole, BLOCK_N):
        y = tl.load(keys + start * key_size)
        scale, next_start = ahead, tl.minimum(start + BLOCK_N, tl.maximum(slots - BLOCK_N, 0))
        ahead = tl.load(scales_at + next_start)
        tile_bits, many = _bits(
            y, scale, low, high, offset, own, start, begin_of_text, end, valid_at,
            PACK, ROOM, BLOCK_N, PACKED,
        )  # fmt: skip
        tl.store(target + start // 32, tile_bits)
        count += many
    for start in tl.range(whole, written, BLOCK_N, num_stages=1):
        there = (start + line + ahead_of < slots) & (inner < SIZE)
        y = tl.load(keys + start * key_size, mask=there, other=0)
        scale = tl.load(scales_at + start, mask=start + line + behind < slots, other=0.0)
        tile_bits, many = _bits(
            y, scale, low, high, offset, own, start, begin_of_text, end, valid_at,
            PACK, ROOM, BLOCK_N, PACKED,
        )  # fmt: skip
        tl.store(target + start // 32, tile_bits, mask=start // 32 + word < words)
        count += many
    tl.store(read + row * tl.num_programs(0) + split, tl.sum(count, 0))


@triton.jit
def _bits(
    codes,
    scale,
    low,
    high,
    offset,
    least,
    start,
    begin,
    end,
    valid,
    PACK: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr,
):
    """(which of ``BLOCK_N`` keys from ``start`` on are read, a bit each; how many of each word)."""
    tile: tl.constexpr = BLOCK_N // PACK
    scale = tl.broadcast_to(scale[:, :, None], (tile, PACK, ROOM))
    s = _scores(codes, tl.reshape(scale, (tile, PACK * ROOM)), low, high, offset, PACKED) - least
    read = tl.max(tl.reshape(s, (tile, PACK, ROOM)), 2) >= 0
    token = start + tl.arange(0, tile)[:, None] * PACK + tl.arange(0, PACK)[None, :]
    if (start < begin + SINKS) | (start + BLOCK_N > end - LOCAL):
        read = (read | (token < begin + SINKS) | (token >= end - LOCAL)) & (token < end)
    if valid is not None:
        shown = tl.load(valid + token, mask=token < end, other=0)
        read = read & (shown != 0)
    bits = tl.where(read, 1 << (token % 32), 0)
    bits = tl.sum(tl.reshape(bits, (BLOCK_N // 32, 32)), 1)
    return bits, _count(bits, PACKED)


@triton.jit
def _count(bits, PACKED: tl.constexpr):
    """How many bits of each int32 are set."""
    if PACKED:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [bits], tl.int32, True, 1)
    x = bits.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _list_kernel(
    bits,
    read,
    chosen,
    counts,
    length,
    words,
    slots,
    splits,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The slots of the keys that are read among ``KEYS`` of them, in their place of all."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part = tl.arange(0, SPLITS)
    many = tl.load(read + row * splits + part, mask=part < splits, other=0)
    if split == 0:
        tl.store(counts + row, tl.sum(many, 0))
    place = tl.sum(tl.where(part < split, many, 0), 0)
    begin = split * KEYS
    stop = tl.minimum(tl.minimum(begin + KEYS, slots), tl.load(length).to(tl.int32))
    target = chosen + row * slots
    for start in range(begin, stop, BLOCK_N):
        word = start // 32 + tl.arange(0, BLOCK_N // 32)
        # behind the text nothing was written
        each = tl.load(bits + row * words + word, mask=word * 32 < stop, other=0)
        each = (each[:, None] >> tl.arange(0, 32)[None, :]) & 1
        each = tl.reshape(each, (BLOCK_N,))
        behind = place + tl.cumsum(each, 0)
        tl.store(target + behind - 1, start + tl.arange(0, BLOCK_N), mask=each != 0)
        place += tl.sum(each, 0)


_choose_op = torch.library.custom_op("cab_hf::decode_choose", _choose, mutates_args=())


@_choose_op.register_fake
def _(q, codes, scales, scale, length, wanted, channels, valid):
    chosen = q.new_empty(scales.shape, dtype=torch.int32)
    counts = q.new_empty(scales.shape[:2], dtype=torch.int32)
    return chosen, counts, q.new_empty(q.shape[:2], dtype=torch.float32)
