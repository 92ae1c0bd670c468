"""The kernels that choose which keys a step reads: from a query and the index to lists of slots.

Sample: the sampled keys of a long cache are scored, and those that are always read; programs leave
logits, and their part of each head's log-sum-exp. Limit: one program a row finds the last step that
fits by bisection; it finds how large a score of each head must be, and what all smaller ones weigh.
Choose: the index is read once, and each program lists the slots of its keys that are read.
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
from cab_hf.ops.decode.index_kernel import A_CODE, LEAST_SCALE, channel_at, code_of, one_over
from cab_hf.ops.decode.reference import Choice, Index, spread_of
from cab_hf.ops.launch import LOWEST, on_device_of

STEPS_AN_OCTAVE = tl.constexpr(reference.STEPS_AN_OCTAVE)
A_STEP = tl.constexpr(1 / reference.STEPS_AN_OCTAVE)
LEAST, HIDDEN = tl.constexpr(reference.LEAST), tl.constexpr(reference.HIDDEN)
NEIGHBOURS = tl.constexpr(reference.NEIGHBOURS)
SINKS, LOCAL = tl.constexpr(reference.SINKS), tl.constexpr(reference.LOCAL)
LOG_UNREAD_SHARE = tl.constexpr(math.log2(reference.UNREAD_SHARE))
STEP_BITS = tl.constexpr(reference.LEAST.bit_length())

# columns of a product on tensor cores
LEAST_COLUMNS = 16
# how launches are cut: keys that are scored at a time, by their bytes; keys that a program chooses
# among; warps that find the limit of a row
SCORED_BYTES, SCORE_WARPS, SCORE_STAGES, CHOSEN, LIMIT_WARPS = 16 << 10, 4, 3, 4096, 16


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
    batch, kv_heads, slots, _ = codes.shape
    heads, rows = q.shape[1], batch * kv_heads
    q = q if q.stride(-1) == 1 else q.contiguous()
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    scales = scales if scales.stride(-1) == 1 else scales.contiguous()
    wanted = wanted.expand(batch).contiguous()
    scored = Channels.of(tuple(channels), q.shape[3]).constants
    at_a_time = SCORED_BYTES // scored["BLOCK_C"]
    # what is always read is one tile
    sampled = max(at_a_time, triton.next_power_of_2(SINKS.value + LOCAL.value))
    spread = spread_of(slots)
    samples = triton.cdiv(slots, NEIGHBOURS.value * spread) * NEIGHBOURS.value
    splits = triton.cdiv(samples, sampled)
    parts = triton.cdiv(slots, CHOSEN)
    chosen = q.new_empty(batch, kv_heads, parts, CHOSEN, dtype=torch.int32)
    counts = q.new_empty(batch, kv_heads, parts, dtype=torch.int32)
    unread = q.new_empty(batch, heads, dtype=torch.float32)
    group = heads // kv_heads
    room = triton.next_power_of_2(group)
    logits = q.new_empty(rows, splits * sampled, room, dtype=torch.float32)
    lse = q.new_empty(rows, splits + 1, room, dtype=torch.float32)
    always = q.new_empty(rows, dtype=torch.int32)
    units, least = (q.new_empty(rows, room, dtype=torch.float32) for _ in range(2))

    given = vectors(q), vectors(codes), Vectors(scales, *scales.stride()), length
    given = *given, *launch.padding(valid), kv_heads
    sizes = {"GROUP": group, "ROOM": room, **launch.early(q)}
    tiles = {"COLUMNS": max(LEAST_COLUMNS, room), **scored}
    spreads = {"SPREAD": spread, "LOG_SPREAD": spread.bit_length() - 1}
    with on_device_of(q):
        _sample_kernel[(splits + 1, rows)](
            *given,
            scale * LOG2_E.value,
            logits,
            lse,
            units,
            always,
            BLOCK_N=sampled,
            num_warps=SCORE_WARPS,
            **sizes,
            **tiles,
            **spreads,
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
            splits * sampled,
            splits,
            SPLITS=triton.next_power_of_2(splits + 1),
            BLOCK_N=triton.next_power_of_2(samples),
            num_warps=LIMIT_WARPS,
            **sizes,
            **spreads,
        )
        _choose_kernel[(parts, rows)](
            *given,
            least,
            chosen,
            counts,
            slots,
            KEYS=CHOSEN,
            BLOCK_N=at_a_time,
            STAGES=SCORE_STAGES,
            num_warps=SCORE_WARPS,
            **sizes,
            **tiles,
        )
    return chosen, counts, unread


@triton.jit
def _queries(
    q,
    batch,
    head,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    GAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """(queries of a group in 8 bits, int8 [BLOCK_C, COLUMNS]; their units, float32 [COLUMNS])."""
    member, inner = tl.arange(0, COLUMNS)[None, :], tl.arange(0, BLOCK_C)[:, None]
    at = q.data + batch * q.batch + (head * GROUP + member) * q.head
    there = (member < GROUP) & (inner < CHANNELS)
    x = tl.load(at + channel_at(inner, FIRST, SIZE, GAP), mask=there, other=0.0).to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(x), 0) * A_CODE, LEAST_SCALE)
    return code_of(x * one_over(unit)[None, :]), unit


@triton.jit
def _sample_kernel(
    q,
    codes,
    scales,
    length,
    valid,
    valid_stride,
    first,
    kv_heads,
    qk_scale,
    logits,
    lse,
    units,
    always,
    SPREAD: tl.constexpr,
    LOG_SPREAD: tl.constexpr,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    GAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Logits of some sampled keys, and their part of each head's log-sum-exp.

    The last program of a row has the keys that are always read in their place, and counts them.
    """
    if EARLY:
        # in this order: choosing reads the query before it waits
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head, splits = row // kv_heads, row % kv_heads, tl.num_programs(0)
    end = tl.load(length).to(tl.int32)
    begin = 0
    if valid is not None:
        begin = tl.load(first + batch)
    member, line = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_N)
    part = (row * splits + split) * ROOM + member
    sampling = split < splits - 1
    if sampling & (split * BLOCK_N * SPREAD >= end):
        tl.store(lse + part, tl.full([COLUMNS], LOWEST, tl.float32), mask=member < ROOM)
        return

    place = split * BLOCK_N + line
    token = place // NEIGHBOURS * (NEIGHBOURS * SPREAD) + place % NEIGHBOURS
    around = tl.where(line < SINKS, begin + line, end - LOCAL - SINKS + line)
    token = tl.where(sampling, token, around)
    seen = (token >= 0) & (token < end)
    if valid is not None:
        seen = seen & (tl.load(valid + batch * valid_stride + token, mask=seen, other=0) != 0)
    # near the start of a text the last tokens are among the first
    sinks, local = token < begin + SINKS, token >= end - LOCAL
    counted = seen & tl.where(sampling, ~sinks & ~local, (line < SINKS) | ~sinks)

    x, unit = _queries(q, batch, head, GROUP, COLUMNS, FIRST, SIZE, GAP, CHANNELS, BLOCK_C)
    inner = tl.arange(0, BLOCK_C)[None, :]
    y = codes.data + batch * codes.batch + head * codes.head
    y = y + token.to(tl.int64)[:, None] * codes.token + inner
    y = tl.load(y, mask=counted[:, None] & (inner < CHANNELS), other=0)
    scale = scales.data + batch * scales.batch + head * scales.head + token
    scale = tl.load(scale, mask=counted, other=0.0).to(tl.float32)
    unit *= qk_scale
    s = tl.dot(y, x, out_dtype=tl.int32).to(tl.float32) * scale[:, None] * unit[None, :]
    s = tl.where(counted[:, None], s, LOWEST)
    if sampling:
        target = logits + (row * (splits - 1) + split) * (BLOCK_N * ROOM)
        tl.store(target + line[:, None] * ROOM + member[None, :], s, mask=member[None, :] < ROOM)
        # a key represents as many as are not sampled
        s += LOG_SPREAD
    else:
        tl.store(always + row, tl.sum(counted.to(tl.int32), 0))
        tl.store(units + row * ROOM + member, unit, mask=member < ROOM)
    # of keys that no query sees the maximum is the lowest, and the sum means nothing
    largest = tl.max(s, 0)
    total = largest + tl.log2(tl.sum(tl.exp2(s - largest[None, :]), 0))
    tl.store(lse + part, tl.where(largest > 0.5 * LOWEST, total, LOWEST), mask=member < ROOM)


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
    member, at, split = tl.arange(0, ROOM), tl.arange(0, BLOCK_N), tl.arange(0, SPLITS)
    # programs behind the text have left nothing
    there = at < tl.minimum(tl.cdiv(end, NEIGHBOURS * SPREAD) * NEIGHBOURS, samples)
    there = there[:, None] & (member < GROUP)[None, :]
    place = (row * samples + at)[:, None] * ROOM + member[None, :]
    # [BLOCK_N, ROOM]
    logit = tl.load(logits + place, mask=there, other=LOWEST)
    part = (row * (splits + 1) + split)[:, None] * ROOM + member[None, :]
    parts = tl.load(lse + part, mask=(split <= splits)[:, None], other=LOWEST)
    most = tl.max(parts, 0)
    total = most + tl.log2(tl.sum(tl.exp2(parts - most[None, :]), 0))
    seen = tl.max(logit, 1) > 0.5 * LOWEST
    below = total[None, :] - logit
    step = tl.floor(tl.minimum(tl.min(below, 1) * STEPS_AN_OCTAVE + 0.5, LEAST))
    step = tl.where(seen, tl.maximum(step, 0.0), HIDDEN).to(tl.int32)
    # the largest step that fits, bit by bit
    last, taken = 0, own + SPREAD * tl.sum((step == 0).to(tl.int32), 0)
    for bit in tl.static_range(STEP_BITS):
        other = last + ((LEAST + 1) >> (bit + 1))
        with_it = own + SPREAD * tl.sum((step <= other).to(tl.int32), 0)
        fits = (with_it <= many) & (other < LEAST)
        last, taken = tl.where(fits, other, last), tl.where(fits, with_it, taken)
    last += ((2 * taken < many) & (last + 1 < LEAST)).to(tl.int32)
    everything = own + SPREAD * tl.sum((step < HIDDEN).to(tl.int32), 0) <= many
    everything = everything | (end <= many)
    gone = (step > last) & (step < HIDDEN) & ~everything
    weight = tl.sum(tl.where(gone[:, None], tl.exp2(-below), 0.0), 0)
    weight = tl.log2(weight) + total + (LOG_SPREAD + LOG_UNREAD_SHARE)
    tl.store(unread + row * GROUP + member, weight, mask=member < GROUP)
    product = total - (last.to(tl.float32) + 0.5) * A_STEP
    product = tl.where(everything, float("-inf"), product / tl.load(units + row * ROOM + member))
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
    kv_heads,
    least,
    chosen,
    counts,
    slots,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    GAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The slots that are read among ``KEYS`` keys, and how many they are."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // kv_heads, row % kv_heads
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    x, _ = _queries(q, batch, head, GROUP, COLUMNS, FIRST, SIZE, GAP, CHANNELS, BLOCK_C)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    end = tl.load(length).to(tl.int32)
    begin = 0
    if valid is not None:
        begin = tl.load(first + batch)
        valid += batch * valid_stride
    member, line = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_N)
    own = tl.load(least + row * ROOM + member, mask=member < GROUP, other=float("inf"))
    inner = tl.arange(0, BLOCK_C)[None, :]
    keys = codes.data + batch * codes.batch + head * codes.head + inner
    scale_of = scales.data + batch * scales.batch + head * scales.head
    part = row * tl.num_programs(0) + split
    target = chosen + part * KEYS
    count, start_of_part = 0, split * KEYS
    stop = tl.minimum(start_of_part + KEYS, tl.minimum(end, slots))
    # scales of the next keys are on their way while some are scored
    ahead = start_of_part + line
    scale_ahead = tl.load(scale_of + ahead, mask=ahead < stop, other=0.0)
    for start in tl.range(start_of_part, stop, BLOCK_N, num_stages=STAGES):
        token = start + line
        there = token < stop
        mask = there[:, None]
        if BLOCK_C > CHANNELS:
            mask = mask & (inner < CHANNELS)
        y = tl.load(keys + token.to(tl.int64)[:, None] * codes.token, mask=mask, other=0)
        scale, ahead = scale_ahead.to(tl.float32), token + BLOCK_N
        scale_ahead = tl.load(scale_of + ahead, mask=ahead < stop, other=0.0)
        s = tl.dot(y, x, out_dtype=tl.int32).to(tl.float32) * scale[:, None]
        read = tl.max(s - own[None, :], 1) >= 0
        read = there & (read | (token < begin + SINKS) | (token >= end - LOCAL))
        if valid is not None:
            read = read & (tl.load(valid + token, mask=there, other=0) != 0)
        behind = count + tl.cumsum(read.to(tl.int32), 0)
        tl.store(target + behind - 1, token, mask=read)
        count += tl.sum(read.to(tl.int32), 0)
    tl.store(counts + part, count)


_choose_op = torch.library.custom_op("cab_hf::decode_choose", _choose, mutates_args=())


@_choose_op.register_fake
def _(q, codes, scales, scale, length, wanted, channels, valid):
    batch, kv_heads, slots = scales.shape
    parts = triton.cdiv(slots, CHOSEN)
    chosen = q.new_empty(batch, kv_heads, parts, CHOSEN, dtype=torch.int32)
    counts = q.new_empty(batch, kv_heads, parts, dtype=torch.int32)
    return chosen, counts, q.new_empty(q.shape[:2], dtype=torch.float32)
