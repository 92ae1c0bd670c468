"""The kernels of a sparse decode step; `reference` of this package says what they compute.

The index of a new key is one launch, a step six. Sample: the sampled keys of a long cache are
scored, and those that are always read; programs leave logits in whole steps, and their part of each
head's log-sum-exp. Limit: one program a row finds the last step that fits by bisection; it tells
how large a score of each head must be, and what all smaller ones weigh. Choose: the index is read
once, and a bit a key says whether it is read. List: bits become slots, one behind the other.
Attention: the keys of a row that are read are shared out evenly, wherever they stand, and K and V
of those gathered. Merge: the parts of a row become one (split-K, as in Flash-Decoding). Nothing
waits for the device and no shape depends on the length of the text, so that a step can be captured
in a CUDA graph.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import predict
from cab_hf.ops.attention.tiles import LOG2_E, Vectors, precision, vectors, vectors_at
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.reference import Choice, Index, on_device, spread_of
from cab_hf.ops.exact_scores import Channels
from cab_hf.ops.predict import on_device_of

STEPS_AN_OCTAVE = tl.constexpr(reference.STEPS_AN_OCTAVE)
A_STEP = tl.constexpr(1 / reference.STEPS_AN_OCTAVE)
LEAST, HIDDEN = tl.constexpr(reference.LEAST), tl.constexpr(reference.HIDDEN)
NEIGHBOURS = tl.constexpr(reference.NEIGHBOURS)
SINKS, LOCAL = tl.constexpr(reference.SINKS), tl.constexpr(reference.LOCAL)
SPREAD_VALUES = tl.constexpr(reference.SPREAD_VALUES)
LOG_UNREAD_SHARE = tl.constexpr(math.log2(reference.UNREAD_SHARE))
LARGEST_CODE = tl.constexpr(float(reference.LARGEST_CODE))
LARGEST_QUERY = tl.constexpr(float(reference.LARGEST_QUERY))
A_CODE, A_QUERY = (tl.constexpr(1 / x) for x in (reference.LARGEST_CODE, reference.LARGEST_QUERY))
LARGEST_SCALE = tl.constexpr(reference.LARGEST_SCALE)
LEAST_SCALE = tl.constexpr(reference.LEAST_SCALE)
STEP_BITS = tl.constexpr(reference.LEAST.bit_length())
# in place of the logit of a key that is not counted
UNCOUNTED = tl.constexpr(-32768)
# what stands for a maximum of nothing: infinity less infinity is no number
LOWEST = tl.constexpr(-1.0e30)

# of a product on tensor cores: rows of keys, columns of queries, and bytes that it sums over
LEAST_ROWS, LEAST_COLUMNS, LEAST_BYTES = 64, 16, 32
# how launches are cut: what an H200 runs fastest. Keys whose index a program writes
INDEXED = 128
# bytes of the index at a time; fewest and most keys that a program chooses among, and programs that
# there should be
SCORED_BYTES, CHOSEN, CHOOSING_PROGRAMS = 8 << 10, (2048, 8192), 512
SCORE_WARPS, SCORE_STAGES = 4, 3
# warps that find the limit of a row
LIMIT_WARPS = 16
# keys whose bits become slots at a time
LISTED = 2048
# fewest and most programs that share the keys of a row, and programs that there should be; how many
# keys each attends at a time; and how many values each takes of those that tell the mean
READERS, READING_PROGRAMS, READ, READ_STAGES, READ_WARPS, VALUES = (16, 120), 960, 16, 3, 2, 32
# parts of a row that are merged at a time
MERGED_AT_A_TIME = 64


def unavailable(x: Tensor) -> str | None:
    """Why q or k is not for the kernels, as half a sentence; None when it is."""
    if torch.version.cuda is not None and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "runs on GPUs of compute capability 8.0 and newer"
    return predict.unavailable(x)


def index_keys(k: Tensor, channels: tuple[int, ...]) -> Index:
    """See `reference.index_keys`."""
    if torch.compiler.is_compiling():
        return Index(*torch.ops.cab_hf.decode_index(k, list(channels)))
    return Index(*_index(k, list(channels)))


def write_index(index: Index, k: Tensor, channels: tuple[int, ...], start: Tensor) -> None:
    """See `reference.write_index`."""
    if torch.compiler.is_compiling():
        torch.ops.cab_hf.decode_write_index(*index, k, list(channels), start)
    else:
        _write(*index, k, list(channels), start)


def choose(
    q: Tensor,
    index: Index,
    scale: float,
    length: Tensor,
    wanted: Tensor,
    channels: tuple[int, ...] = (),
    valid: Tensor | None = None,
    dense_heads: tuple[int, ...] = (),
) -> Choice:
    """See `reference.choose`."""
    given = q, *index, scale, length, wanted, list(channels), valid, list(dense_heads)
    if torch.compiler.is_compiling():
        return Choice(*torch.ops.cab_hf.decode_choose(*given))
    return Choice(*_choose(*given))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    scale: float,
    length: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """See `reference.attend`."""
    if torch.compiler.is_compiling():
        return torch.ops.cab_hf.decode_attend(q, k, v, *choice, scale, length, valid)
    return _attend(q, k, v, *choice, scale, length, valid)


def _index(k: Tensor, channels: list[int]) -> tuple[Tensor, Tensor]:
    """(codes, scales) of an `Index`."""
    halves = Channels.of_halves(tuple(channels), k.shape[3])
    codes = k.new_empty(*k.shape[:3], halves.size, dtype=torch.uint8)
    scales = k.new_empty(k.shape[:3], dtype=torch.float16)
    _write(codes, scales, k, channels, None)
    return codes, scales


def _write(
    codes: Tensor, scales: Tensor, k: Tensor, channels: list[int], start: Tensor | None
) -> None:
    """Write the index of ``k`` from a slot on, by default the first."""
    batch, heads, length, dim = k.shape
    halves = Channels.of_halves(tuple(channels), dim)
    k = k if k.stride(-1) == 1 else k.contiguous()
    tokens = min(INDEXED, triton.next_power_of_2(length))
    with on_device_of(k):
        _index_kernel[(triton.cdiv(length, tokens), batch * heads)](
            vectors(k),
            vectors(codes),
            Vectors(scales, *scales.stride()),
            start,
            heads,
            length,
            FIRST=halves.first,
            STEP=halves.step,
            SIZE=halves.size,
            BLOCK_N=tokens,
            BLOCK_C=triton.next_power_of_2(halves.size),
            EARLY=_early(k)["EARLY"],
            num_warps=4,
        )


def _choose(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    scale: float,
    length: Tensor,
    wanted: Tensor,
    channels: list[int],
    valid: Tensor | None,
    dense_heads: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """(slots, counts, unread) of a `Choice`."""
    batch, kv_heads, slots, width = codes.shape
    group = q.shape[1] // kv_heads
    halves, rows = Channels.of_halves(tuple(channels), q.shape[3]), batch * kv_heads
    q = q if q.stride(-1) == 1 else q.contiguous()
    codes = codes if codes.stride()[2:] == (width, 1) else codes.contiguous()
    scales = scales if scales.stride(2) == 1 else scales.contiguous()
    seen = _seen(valid)
    chosen = q.new_empty(batch, kv_heads, slots, dtype=torch.int32)
    counts = q.new_empty(batch, kv_heads, dtype=torch.int32)
    unread = q.new_empty(batch, q.shape[1], dtype=torch.float32)
    words = triton.cdiv(slots, 32)
    bits = q.new_empty(rows, words, dtype=torch.int32)
    spread = spread_of(slots)

    given = vectors(q), vectors(codes), Vectors(scales, *scales.stride()), length, *seen
    given = *given, scale * LOG2_E.value, kv_heads, slots
    told = {"GROUP": group, "FIRST": halves.first, "STEP": halves.step, "SIZE": halves.size}
    told["PACKED"] = _packed(q)
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
            **_early(q),
            **told,
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
            on_device(tuple(dense_heads), q.device) if dense_heads else None,
            kv_heads,
            splits * at_a_time,
            splits,
            SPREAD=spread,
            LOG_SPREAD=spread.bit_length() - 1,
            GROUP=group,
            ROOM=room,
            SPLITS=triton.next_power_of_2(splits + 1),
            DENSE=len(dense_heads),
            PACKED=_packed(q),
            BLOCK_N=triton.next_power_of_2(sampled),
            num_warps=LIMIT_WARPS,
            **_early(q),
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
            **_early(q),
            **told,
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
            **_early(q),
        )
    return chosen, counts, unread


def _seen(valid: Tensor | None) -> tuple[Tensor | None, int, int, Tensor | None]:
    """What kernels are told of padding: its mask, a stride and a width, and where texts begin."""
    if valid is None:
        return None, 0, 0, None
    valid = valid if valid.stride(-1) == 1 else valid.contiguous()
    return valid, valid.stride(0), valid.shape[1], valid.int().argmax(-1).int()


def _packing(group: int, width: int, most: int) -> tuple[int, int, int, int]:
    """Of a product: neighbouring keys in a row, queries each has room for, bytes of one, all keys.

    No more than ``most`` neighbours. Keys of a width that is no power of two stand alone.
    """
    room, alone = triton.next_power_of_2(group), triton.next_power_of_2(width)
    pack = max(LEAST_COLUMNS // room, LEAST_BYTES // width, 1)
    if alone != width or pack > most and most * width < LEAST_BYTES:
        pack = 1
    pack = min(pack, most)
    columns = max(alone, LEAST_BYTES // pack)
    at_a_time = pack * max(LEAST_ROWS, SCORED_BYTES // (pack * columns))
    return pack, max(room, LEAST_COLUMNS // pack), columns, at_a_time


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    counts: Tensor,
    unread: Tensor | None,
    scale: float,
    length: Tensor | None,
    valid: Tensor | None,
) -> Tensor:
    batch, kv_heads, slots, dim = k.shape
    heads, values = q.shape[1], v.shape[3]
    group, rows = heads // kv_heads, batch * kv_heads
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    chosen = chosen if chosen.stride(-1) == 1 else chosen.contiguous()
    fewest, most = READERS
    readers = max(fewest, min(most, READING_PROGRAMS // rows))
    # some more have what is not read
    splits = readers if unread is None else readers + SPREAD_VALUES.value // VALUES
    largest = q.new_empty(rows, splits, group, dtype=torch.float32)
    sums = torch.empty_like(largest)
    weighted = q.new_empty(rows, splits, group, values, dtype=torch.float32)
    out = q.new_empty(batch, heads, 1, values)
    with on_device_of(q):
        _attend_kernel[(splits, rows)](
            vectors(q),
            vectors(k),
            vectors(v),
            chosen,
            *chosen.stride()[:2],
            counts,
            *counts.stride(),
            unread,
            length,
            *_seen(valid),
            largest,
            sums,
            weighted,
            scale * LOG2_E.value,
            kv_heads,
            readers,
            GROUP=group,
            ROWS=max(LEAST_COLUMNS, triton.next_power_of_2(group)),
            BLOCK_N=READ,
            D=dim,
            D_V=values,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_V=max(16, triton.next_power_of_2(values)),
            FAR=slots * max(k.stride(2), v.stride(2)) >= 1 << 31,
            VALUES=VALUES,
            PRECISION=precision(q),
            num_warps=READ_WARPS,
            num_stages=READ_STAGES,
            **_early(q),
        )
        _merge_kernel[(rows, group)](
            largest,
            sums,
            weighted,
            out,
            splits,
            D_V=values,
            BLOCK_S=MERGED_AT_A_TIME,
            BLOCK_V=triton.next_power_of_2(values),
            num_warps=4,
            **_early(q),
        )
    return out


def _early(x: Tensor) -> dict[str, bool]:
    """Launches a kernel before the one in front of it is done, where the device can: it waits."""
    early = _packed(x) and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def _packed(x: Tensor) -> bool:
    """Whether kernels may use instructions of NVIDIA's GPUs."""
    return x.is_cuda and torch.version.cuda is not None


@triton.jit
def _index_kernel(
    k,
    codes,
    scales,
    start,
    heads,
    length,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`reference.index_keys` of some keys, written from slot ``start`` on."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    plane = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_C)
    there = (token < length)[:, None] & (inner < SIZE)[None, :]
    at = vectors_at(k, plane // heads, plane % heads, token) + (FIRST + inner)[None, :]
    low = tl.load(at, mask=there, other=0.0).to(tl.float32)
    high = tl.load(at + STEP, mask=there, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    scale = tl.minimum(largest * A_CODE, LARGEST_SCALE).to(tl.float16)
    unit = tl.maximum(scale.to(tl.float32), LEAST_SCALE)
    inverse = tl.div_rn(tl.full([BLOCK_N], 1.0, tl.float32), unit)[:, None]
    code = _code(low * inverse) | (_code(high * inverse) << 4)
    slot = token.to(tl.int64)
    if start is not None:
        slot += tl.load(start)
    batch, head = plane // heads, plane % heads
    place = scales.data + batch * scales.batch + head * scales.head + slot * scales.token
    tl.store(place, scale, mask=token < length)
    place = vectors_at(codes, batch, head, slot) + inner[None, :]
    tl.store(place, code.to(tl.uint8), mask=there)


@triton.jit
def _code(x):
    """The nearest whole numbers, 0 to 15 for -8 to 7."""
    return (_nearest(x, LARGEST_CODE) + 8.0).to(tl.int32)


@triton.jit
def _nearest(x, LARGEST: tl.constexpr):
    """The nearest whole numbers from -LARGEST - 1 to LARGEST.

    The bounds stand before the sum, so that no product is fused with it and rounded once.
    """
    return tl.floor(tl.minimum(tl.maximum(x, -LARGEST - 1.0), LARGEST) + 0.5)


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
    low, high = _nearest(low * inverse, LARGEST_QUERY), _nearest(high * inverse, LARGEST_QUERY)
    # codes are 8 more than what they stand for
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
    valid_width,
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
        # a key stands for as many as are not sampled
        s += LOG_SPREAD
    else:
        count = counted & (column % ROOM == 0)[None, :]
        tl.store(always + row, tl.sum(tl.sum(count.to(tl.int32), 1), 0))
        tl.store(units + row * ROOM + tl.arange(0, ROOM), unit)
    s = tl.reshape(tl.where(counted, s, LOWEST), (tile * PACK, ROOM))
    # of what nobody sees the maximum is the lowest, and the sum means nothing
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
    dense_heads,
    kv_heads,
    samples,
    splits,
    SPREAD: tl.constexpr,
    LOG_SPREAD: tl.constexpr,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    SPLITS: tl.constexpr,
    DENSE: tl.constexpr,
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
    end, many, own = tl.load(length).to(tl.int32), tl.load(wanted), tl.load(always + row)
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
    for dense in tl.static_range(DENSE):
        everything = everything | (tl.load(dense_heads + dense) == row % kv_heads)
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
    valid_width,
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
            y, scale, low, high, offset, own, start, begin_of_text, end, valid_at, valid_width,
            PACK, ROOM, BLOCK_N, PACKED,
        )  # fmt: skip
        tl.store(target + start // 32, tile_bits)
        count += many
    for start in tl.range(whole, written, BLOCK_N, num_stages=1):
        there = (start + line + ahead_of < slots) & (inner < SIZE)
        y = tl.load(keys + start * key_size, mask=there, other=0)
        scale = tl.load(scales_at + start, mask=start + line + behind < slots, other=0.0)
        tile_bits, many = _bits(
            y, scale, low, high, offset, own, start, begin_of_text, end, valid_at, valid_width,
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
    valid_width,
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
        shown = tl.load(valid + token, mask=token < valid_width, other=0)
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


@triton.jit
def _attend_kernel(
    q,
    k,
    v,
    chosen,
    chosen_batch,
    chosen_head,
    counts,
    counts_batch,
    counts_head,
    unread,
    length,
    valid,
    valid_stride,
    valid_width,
    first,
    largest,
    sums,
    weighted,
    qk_scale,
    kv_heads,
    readers,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FAR: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attention over a share of the keys that are read: weighted values, and the largest and the
    sum of the weights. Further programs have the keys that are not read, as one of the mean value,
    of which each has a part.
    """
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // kv_heads, row % kv_heads
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    member = tl.arange(0, ROWS)
    there = member < GROUP
    channel, value = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    values = v.data + batch * v.batch + head * v.head
    part = (row * tl.num_programs(0) + split) * GROUP + member
    target = weighted + part[:, None] * D_V + value[None, :]
    if unread is not None:  # noqa: SIM102 - only this is known when the kernel is compiled
        if split >= readers:
            begin, end = 0, tl.load(length).to(tl.int64)
            if valid is not None:
                begin = tl.load(first + batch)
            mean, share = tl.zeros([BLOCK_V], tl.float32), 0.0
            for start in range(0, VALUES, BLOCK_N):
                at = (split - readers) * VALUES + start + tl.arange(0, BLOCK_N)
                slot = begin + at * (end - begin) // SPREAD_VALUES
                seen = slot < end
                if valid is not None:
                    seen = tl.load(valid + batch * valid_stride + slot, mask=seen, other=0) != 0
                mask = seen[:, None] & (value < D_V)[None, :]
                z = tl.load(values + slot[:, None] * v.token + value[None, :], mask=mask, other=0.0)
                mean += tl.sum(z.to(tl.float32), 0) / SPREAD_VALUES
                share += tl.sum(seen.to(tl.float32), 0) / SPREAD_VALUES
            weight = tl.load(unread + row * GROUP + member, mask=there, other=0.0)
            some = weight > LOWEST
            tl.store(largest + part, tl.where(some, weight, LOWEST), mask=there)
            tl.store(sums + part, tl.where(some, share, 0.0), mask=there)
            mean = tl.where(some[:, None], mean[None, :], 0.0)
            tl.store(target, mean, mask=there[:, None] & (value < D_V)[None, :])
            return

    vector = q.data + batch * q.batch + (head * GROUP + member)[:, None] * q.head
    x = tl.load(vector + channel[None, :], mask=there[:, None] & (channel < D)[None, :], other=0.0)
    keys = k.data + batch * k.batch + head * k.head
    listed = chosen + batch * chosen_batch + head * chosen_head
    count = tl.load(counts + batch * counts_batch + head * counts_head)
    share = tl.cdiv(count, readers)
    stop = tl.minimum((split + 1) * share, count)
    most = tl.full([ROWS], LOWEST, tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(split * share, stop, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = at < stop
        slot = tl.load(listed + at, mask=inside, other=0)
        if FAR:
            slot = slot.to(tl.int64)
        y = tl.load(
            keys + slot[:, None] * k.token + channel[None, :],
            mask=inside[:, None] & (channel < D)[None, :],
            other=0.0,
        )
        z = tl.load(
            values + slot[:, None] * v.token + value[None, :],
            mask=inside[:, None] & (value < D_V)[None, :],
            other=0.0,
        )
        s = tl.dot(x, tl.trans(y), input_precision=PRECISION) * qk_scale
        s = tl.where(inside[None, :], s, float("-inf"))
        more = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - more[:, None])
        old = tl.exp2(most - more)
        total = total * old + tl.sum(p, 1)
        acc = tl.dot(p.to(z.dtype), z, acc * old[:, None], input_precision=PRECISION)
        most = more
    tl.store(largest + part, most, mask=there)
    tl.store(sums + part, total, mask=there)
    tl.store(target, acc, mask=there[:, None] & (value < D_V)[None, :])


@triton.jit
def _merge_kernel(
    largest,
    sums,
    weighted,
    out,
    splits,
    D_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row of the output of its ``splits`` parts."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row, member, group = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    value = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    total = tl.zeros([1], tl.float32)
    most = tl.full([1], LOWEST, tl.float32)
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        at = (row * splits + split) * group + member
        part = tl.load(largest + at, mask=split < splits, other=LOWEST)
        more = tl.maximum(most, tl.max(part, 0))
        # programs without a key have left sums of 0
        weight = tl.exp2(part - more)
        own = tl.load(sums + at, mask=split < splits, other=0.0)
        x = tl.load(
            weighted + at[:, None] * D_V + value[None, :],
            mask=(split < splits)[:, None] & (value < D_V)[None, :],
            other=0.0,
        )
        old = tl.exp2(most - more)
        acc = acc * old + tl.sum(x * weight[:, None], 0)
        total = total * old + tl.sum(own * weight, 0)
        most = more
    place = out + (row * group + member) * D_V + value
    tl.store(place, (acc / total).to(out.dtype.element_ty), mask=value < D_V)


_index_op = torch.library.custom_op("cab_hf::decode_index", _index, mutates_args=())
_write_op = torch.library.custom_op(
    "cab_hf::decode_write_index", _write, mutates_args=("codes", "scales")
)
_choose_op = torch.library.custom_op("cab_hf::decode_choose", _choose, mutates_args=())
_attend_op = torch.library.custom_op("cab_hf::decode_attend", _attend, mutates_args=())


@_index_op.register_fake
def _(k, channels):
    codes = k.new_empty(*k.shape[:3], (len(channels) or k.shape[3]) // 2, dtype=torch.uint8)
    return codes, k.new_empty(k.shape[:3], dtype=torch.float16)


@_write_op.register_fake
def _(codes, scales, k, channels, start):
    return None


@_choose_op.register_fake
def _(q, codes, scales, scale, length, wanted, channels, valid, dense_heads):
    chosen = q.new_empty(scales.shape, dtype=torch.int32)
    counts = q.new_empty(scales.shape[:2], dtype=torch.int32)
    return chosen, counts, q.new_empty(q.shape[:2], dtype=torch.float32)


@_attend_op.register_fake
def _(q, k, v, chosen, counts, unread, scale, length, valid):
    return q.new_empty(*q.shape[:3], v.shape[3])
