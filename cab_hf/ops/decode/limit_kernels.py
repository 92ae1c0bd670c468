"""Kernels that find the smallest share of attention that is read, from a sample of the cache."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from cab_hf.ops.attention.tiles import LOG2_E
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.packed import a_column, queries_of, scores_of
from cab_hf.ops.launch import LOWEST

STEPS_AN_OCTAVE = tl.constexpr(reference.STEPS_AN_OCTAVE)
A_STEP = tl.constexpr(1 / reference.STEPS_AN_OCTAVE)
LEAST, HIDDEN = tl.constexpr(reference.LEAST), tl.constexpr(reference.HIDDEN)
NEIGHBOURS = tl.constexpr(reference.NEIGHBOURS)
SINKS, LOCAL = tl.constexpr(reference.SINKS), tl.constexpr(reference.LOCAL)
LOG_UNREAD_SHARE = tl.constexpr(math.log2(reference.UNREAD_SHARE))
STEP_BITS = tl.constexpr(reference.LEAST.bit_length())
# logit of a key that is not counted
UNCOUNTED = tl.constexpr(-32768)


@triton.jit
def _in_steps(x, PACKED: tl.constexpr):
    """Return `reference.in_steps` as int16."""
    x = x * STEPS_AN_OCTAVE
    if PACKED:
        return tl.inline_asm_elementwise(
            "cvt.rni.sat.s16.f32 $0, $1;", "=h,f", [x], tl.int16, True, 1
        )
    return tl.floor(tl.minimum(tl.maximum(x, -32768.0), 32767.0) + 0.5).to(tl.int16)


@triton.jit
def sample_kernel(
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
    """Write logits of some sampled keys in whole steps, and their part of each head's log-sum-exp.

    The last program of a row processes the keys that are always read, and counts them.
    """
    if EARLY:
        # in this order: the choosing kernel reads the query before it waits
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
    # in a short sequence, the last tokens are also among the first: count them once
    sink = (line * PACK < SINKS)[:, None]
    counted = seen & tl.where(sampling, ~ends, sink == (token < begin + SINKS))

    place = tl.arange(0, PACK * BLOCK_C)[None, :]
    behind, inner = place // BLOCK_C, place % BLOCK_C
    there = (slot + behind >= 0) & (slot + behind < end) & (inner < SIZE)
    y = codes.data + batch * codes.batch + head * codes.head
    y = tl.load(y + slot.to(tl.int64) * SIZE + (behind * SIZE + inner), mask=there, other=0)
    key_scale = scales.data + batch * scales.batch + head * scales.head
    key_scale = tl.load(key_scale + token, mask=counted, other=0.0)
    # keys that are not finite are always read
    counted = counted & (key_scale < float("inf"))
    low, high, offset, unit = queries_of(
        q, batch, head, qk_scale, GROUP, ROOM, PACK, FIRST, STEP, SIZE, BLOCK_C
    )
    s = scores_of(y, key_scale, low, high, offset, PACKED) * a_column(unit, PACK, ROOM)
    if sampling:
        steps = tl.maximum(_in_steps(s, PACKED), UNCOUNTED + 1)
        steps = tl.where(counted, steps, UNCOUNTED).to(tl.int16)
        target = logits + (row * (splits - 1) + split) * (BLOCK_N * ROOM)
        tl.store(target + line[:, None] * columns + column[None, :], steps)
        # a sampled key represents SPREAD keys
        s += LOG_SPREAD
    else:
        count = counted & (column % ROOM == 0)[None, :]
        tl.store(always + row, tl.sum(tl.sum(count.to(tl.int32), 1), 0))
        tl.store(units + row * ROOM + tl.arange(0, ROOM), unit)
    s = tl.reshape(tl.where(counted, s, LOWEST), (tile * PACK, ROOM))
    # if no key is counted, the maximum is LOWEST and the sum is meaningless
    largest = tl.max(s, 0)
    total = largest + tl.log2(tl.sum(tl.exp2(s - largest[None, :]), 0))
    tl.store(lse + part, tl.where(largest > LOWEST, total, LOWEST))


@triton.jit
def limit_kernel(
    logits,
    lse,
    units,
    always,
    sinks,
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
    """Write the least product of a read key for each head of a row, in units of its query.

    Also write the logarithm of the weight of the unread keys, `Choice.unread`.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    end, own = tl.load(length).to(tl.int32), tl.load(always + row)
    many = tl.load(wanted + row // kv_heads)
    member, at = tl.arange(0, ROOM), tl.arange(0, BLOCK_N)
    # programs past the end of the sequence have written nothing
    count = tl.minimum(tl.cdiv(end, NEIGHBOURS * SPREAD) * NEIGHBOURS, samples)
    place = logits + (row * samples + at)[:, None] * ROOM + member[None, :]
    # a separate select: with `other`, Triton 3.6 returns wrong values for every second 16-bit
    # number
    logit = tl.load(place, mask=(at < count)[:, None]).to(tl.int32)
    logit = tl.where((at < count)[:, None], logit, UNCOUNTED)
    split = tl.arange(0, SPLITS)
    part = (row * (splits + 1) + split)[:, None] * ROOM + member[None, :]
    parts = tl.load(lse + part, mask=(split <= splits)[:, None], other=LOWEST)
    most = tl.max(parts, 0)
    if sinks is not None:
        own_sink = sinks + row % kv_heads * GROUP + member
        sink = tl.load(own_sink, mask=member < GROUP, other=0.0).to(tl.float32) * LOG2_E
        most = tl.maximum(most, sink)
    total = tl.sum(tl.exp2(parts - most[None, :]), 0)
    if sinks is not None:
        total += tl.exp2(sink - most)
    total = most + tl.log2(total)
    total = _in_steps(total, PACKED).to(tl.int32)
    unit = tl.load(units + row * ROOM + member)
    # queries that are not finite do not affect the selection
    choosing = (member < GROUP) & (unit == unit)
    below = tl.where(choosing[None, :], total[None, :] - logit, LEAST)
    step = tl.minimum(tl.maximum(tl.min(below, 1), 1), LEAST)
    step = tl.where(tl.max(logit, 1) > UNCOUNTED, step, HIDDEN)
    # the largest step that fits, bit by bit; keys of step 0 are always read
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
    # half a step less, because products are not rounded
    product = (total - last).to(tl.float32) - 0.5
    product = product * A_STEP / unit
    product = tl.where(everything, float("-inf"), product)
    product = tl.where(choosing, product, float("inf"))
    tl.store(least + row * ROOM + member, product)
