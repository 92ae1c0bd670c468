"""Kernels that select the keys of a decode step: from a query and the index to a list of slots.

* Sample: scores the sample of a long cache and the keys that are always read. Programs write logits
  in whole steps, and their part of each head's log-sum-exp.
* Limit: one program per row finds the last step that fits, by bisection. It writes the least score
  of a read key for each head, and the weight of all smaller scores.
* Choose: reads the index once, and writes one bit per key: read or not.
* List: converts bits to slots, one after the other.

The index has 4 bits, although that needs packing and PTX. An 8-bit index with plain products needs
half the lines. On an H100, with 131,072 keys and batch 4, it took 21 % more time per step.
Selection and attention took 0.167 ms instead of 0.139 ms with 32 heads, 8 KV heads and head dim
128. With 32 heads, 32 KV heads and head dim 64 it was 0.322 ms instead of 0.264 ms. The share of
attention of the selected keys was the same within .006.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import launch
from cab_hf.ops.attention.tiles import LOG2_E, Vectors, vectors
from cab_hf.ops.decode.channels import Halves
from cab_hf.ops.decode.limit_kernels import LOCAL, NEIGHBOURS, SINKS, limit_kernel, sample_kernel
from cab_hf.ops.decode.packed import LEAST_COLUMNS, packing, queries_of, scores_of
from cab_hf.ops.decode.reference import Choice, Index, spread_of
from cab_hf.ops.launch import on_device_of

# sizes of launches, the fastest on an H200: the fewest and the most keys that a program selects
# from, and the number of programs to aim for
CHOSEN, CHOOSING_PROGRAMS = (2048, 8192), 512
SCORE_WARPS, SCORE_STAGES = 4, 3
# stages that fit 64 KiB of shared memory
AMD_STAGES = 2
# warps that find the limit of a row
LIMIT_WARPS = 16
# keys whose bits are converted to slots at a time
LISTED = 2048


def choose(
    q: Tensor,
    index: Index,
    scale: float,
    length: Tensor,
    wanted: Tensor,
    channels: tuple[int, ...] = (),
    valid: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Choice:
    """Select the keys that a decode step reads; see `reference.choose`."""
    given = q, *index, scale, length, wanted, list(channels), valid, sinks
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
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (slots, counts, unread) of a `Choice`."""
    batch, kv_heads, slots, width = codes.shape
    group = q.shape[1] // kv_heads
    halves, rows = Halves.of(tuple(channels), q.shape[3]), batch * kv_heads
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
    shape = {"GROUP": group, "PACKED": launch.packed(q), **launch.early(q)}
    spreads = {"SPREAD": spread, "LOG_SPREAD": spread.bit_length() - 1}
    pack, room, columns, at_a_time = packing(group, width, NEIGHBOURS.value)
    sampled = triton.cdiv(slots, NEIGHBOURS.value * spread) * NEIGHBOURS.value
    splits = triton.cdiv(sampled, at_a_time)
    logits = q.new_empty(rows, splits * at_a_time, room, dtype=torch.int16)
    lse = q.new_empty(rows, splits + 1, room, dtype=torch.float32)
    always = q.new_empty(rows, dtype=torch.int32)
    units, least = (q.new_empty(rows, room, dtype=torch.float32) for _ in range(2))
    with on_device_of(q):
        sample_kernel[(splits + 1, rows)](
            *given,
            logits,
            lse,
            units,
            always,
            ROOM=room,
            PACK=pack,
            BLOCK_N=at_a_time,
            BLOCK_C=columns,
            num_warps=SCORE_WARPS,
            **spreads,
            **shape,
            **halves.constants,
        )
        limit_kernel[(rows,)](
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
            splits * at_a_time,
            splits,
            GROUP=group,
            ROOM=room,
            SPLITS=triton.next_power_of_2(splits + 1),
            PACKED=launch.packed(q),
            BLOCK_N=triton.next_power_of_2(sampled),
            num_warps=LIMIT_WARPS,
            **spreads,
            **launch.early(q),
        )
        # neighbouring keys fill the columns, see `queries_of`
        pack, own_room, columns, at_a_time = packing(group, width, LEAST_COLUMNS)
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
            num_stages=SCORE_STAGES if launch.packed(q) else AMD_STAGES,
            **shape,
            **halves.constants,
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
    """Write which of ``KEYS`` keys are read, one bit per key, and how many."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // kv_heads, row % kv_heads
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    columns: tl.constexpr = PACK * ROOM
    tile: tl.constexpr = BLOCK_N // PACK
    low, high, offset, _ = queries_of(
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
    # whole tiles need no mask: unwritten keys among them are never listed
    whole = begin
    if not PADDED:
        whole = tl.maximum(begin, tl.minimum(written, slots // BLOCK_N * BLOCK_N))
    # the scales of the next tile are loaded while a tile is computed
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
    """Return one bit per key for ``BLOCK_N`` keys from ``start`` on, and the count of each word."""
    tile: tl.constexpr = BLOCK_N // PACK
    scale = tl.broadcast_to(scale[:, :, None], (tile, PACK, ROOM))
    s = scores_of(codes, tl.reshape(scale, (tile, PACK * ROOM)), low, high, offset, PACKED) - least
    # NaN, the product of a key that is not finite, is read
    read = ~(tl.max(tl.reshape(s, (tile, PACK, ROOM)), 2) < 0)
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
    """Return the number of set bits of each int32."""
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
    """Write the slots of the read keys among ``KEYS`` keys, at their places in the whole list."""
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
        # bits past the end of the sequence were not written
        each = tl.load(bits + row * words + word, mask=word * 32 < stop, other=0)
        each = (each[:, None] >> tl.arange(0, 32)[None, :]) & 1
        each = tl.reshape(each, (BLOCK_N,))
        behind = place + tl.cumsum(each, 0)
        tl.store(target + behind - 1, start + tl.arange(0, BLOCK_N), mask=each != 0)
        place += tl.sum(each, 0)


_choose_op = torch.library.custom_op("cab_hf::decode_choose", _choose, mutates_args=())


@_choose_op.register_fake
def _(q, codes, scales, scale, length, wanted, channels, valid, sinks=None):
    chosen = q.new_empty(scales.shape, dtype=torch.int32)
    counts = q.new_empty(scales.shape[:2], dtype=torch.int32)
    return chosen, counts, q.new_empty(q.shape[:2], dtype=torch.float32)
