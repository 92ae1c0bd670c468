"""Products of 8-bit queries and a 4-bit index on tensor cores, several keys at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from cab_hf.ops.attention.tiles import INFINITE_BITS, magnitude
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.index_kernel import LEAST_SCALE, nearest

LARGEST_QUERY = tl.constexpr(float(reference.LARGEST_QUERY))
A_QUERY = tl.constexpr(1 / reference.LARGEST_QUERY)
# the smallest product on tensor cores: rows of keys, columns of queries, and summed bytes
LEAST_ROWS, LEAST_COLUMNS, LEAST_BYTES = 64, 16, 32
# bytes of the index per product, the fastest on an H200
SCORED_BYTES = 8 << 10


def packing(group: int, width: int, most: int) -> tuple[int, int, int, int]:
    """Return the layout of a product.

    Keys whose width is not a power of two are not packed.

    Args:
        group: Query heads per KV head.
        width: Bytes per key of the index.
        most: The most neighbouring keys in a row.

    Returns:
        The neighbouring keys in a row, the columns per key, the bytes per key with padding, and the
        keys of a product.
    """
    padded_group, alone = triton.next_power_of_2(group), triton.next_power_of_2(width)
    pack = max(LEAST_COLUMNS // padded_group, LEAST_BYTES // width, 1)
    if alone != width or pack > most and most * width < LEAST_BYTES:
        pack = 1
    pack = min(pack, most)
    columns = max(alone, LEAST_BYTES // pack)
    at_a_time = pack * max(LEAST_ROWS, SCORED_BYTES // (pack * columns))
    return pack, max(padded_group, LEAST_COLUMNS // pack), columns, at_a_time


@triton.jit
def _spread(x, PACK: tl.constexpr, ROOM: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return x [ROOM, BLOCK_C] in every block of a diagonal, int8 [PACK * BLOCK_C, PACK * ROOM]."""
    one, other = tl.arange(0, PACK)[:, None, None, None], tl.arange(0, PACK)[None, None, :, None]
    x = tl.where(one == other, x[None, :, None, :], 0.0).to(tl.int8)
    return tl.trans(tl.reshape(x, (PACK * ROOM, PACK * BLOCK_C)))


@triton.jit
def _half_bytes(x, UPPER: tl.constexpr, PACKED: tl.constexpr):
    """Return the lower or upper halves of bytes, int8."""
    if PACKED:
        # four at a time: Triton would extract them one at a time
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
def queries_of(
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
    """Load the queries of a group and quantise them to the 8-bit operand of a product.

    A product has 16 columns, and a group has fewer queries. `PACK` neighbouring keys, adjacent in
    memory, count as one key with `PACK` times the channels. Column j * ROOM + g is the product of
    query g and the j-th of these keys. The query of this column is 0 in the channels of the other
    keys. Thus no column is wasted.

    Returns:
        low, high: int8 [PACK * BLOCK_C, PACK * ROOM], the two halves of the channels.
        offset: int32 [1, PACK * ROOM], to be subtracted from the products of each column.
        unit: float32 [ROOM], the unit of the difference; NaN for a query that is not finite.
    """
    member, inner = tl.arange(0, ROOM), tl.arange(0, BLOCK_C)
    real = (member < GROUP)[:, None] & (inner < SIZE)[None, :]
    at = q.data + batch * q.batch + (head * GROUP + member)[:, None] * q.head + FIRST
    low = tl.load(at + inner[None, :], mask=real, other=0.0).to(tl.float32)
    high = tl.load(at + STEP + inner[None, :], mask=real, other=0.0).to(tl.float32)
    bits = tl.maximum(tl.max(magnitude(low), 1), tl.max(magnitude(high), 1))
    finite = bits < INFINITE_BITS
    low, high = tl.where(finite[:, None], low, 0.0), tl.where(finite[:, None], high, 0.0)
    unit = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    unit = tl.maximum(unit * A_QUERY, LEAST_SCALE)
    inverse = tl.div_rn(tl.full([ROOM], 1.0, tl.float32), unit)[:, None]
    low, high = nearest(low * inverse, LARGEST_QUERY), nearest(high * inverse, LARGEST_QUERY)
    # codes are 8 more than their values
    offset = (8.0 * (tl.sum(low, 1) + tl.sum(high, 1))).to(tl.int32)
    low, high = _spread(low, PACK, ROOM, BLOCK_C), _spread(high, PACK, ROOM, BLOCK_C)
    unit = tl.where(finite, unit * qk_scale, float("nan"))
    return low, high, a_column(offset, PACK, ROOM), unit


@triton.jit
def a_column(x, PACK: tl.constexpr, ROOM: tl.constexpr):
    """Return x [ROOM] repeated for each packed key, [1, PACK * ROOM]."""
    return tl.reshape(tl.broadcast_to(x[None, :], (PACK, ROOM)), (1, PACK * ROOM))


@triton.jit
def scores_of(codes, scale, low, high, offset, PACKED: tl.constexpr):
    """Return products of rows of codes and queries, in their units.

    The result is float32 [keys / PACK, PACK * ROOM].
    """
    s = tl.dot(_half_bytes(codes, False, PACKED), low, out_dtype=tl.int32)
    s = tl.dot(_half_bytes(codes, True, PACKED), high, s, out_dtype=tl.int32)
    return (s - offset).to(tl.float32) * scale.to(tl.float32)
