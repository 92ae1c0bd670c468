"""Products of 8-bit queries and 4-bit keys on tensor cores, with several keys per matrix row.

The keys are those of the decode index, see `reference.Index`. The lower four bits of a byte contain
a channel of the first half of the channels, the upper four bits a channel of the second half. One
matrix product per half is computed, and both are added.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cab_hf.ops.attention.tiles import INFINITE_BITS, get_magnitude_bits
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.index_kernel import MIN_SCALE, round_to_integer

MAX_QUERY_CODE = tl.constexpr(float(reference.MAX_QUERY_CODE))
INVERSE_MAX_QUERY_CODE = tl.constexpr(1 / reference.MAX_QUERY_CODE)
# smallest number of rows (keys) of a matrix product on tensor cores
MIN_DOT_ROWS = 64
# smallest number of columns (queries) of a matrix product on tensor cores
MIN_DOT_COLUMNS = 16
# smallest inner dimension of a matrix product on tensor cores, in bytes (one per channel)
MIN_INNER_BYTES = 32
# bytes of the index per matrix product, the fastest number on an H200
INDEX_BYTES_PER_TILE = 8 << 10


class Packing(NamedTuple):
    """Layout of the matrix product of keys and the queries of a group; see `load_queries`.

    Attributes:
        keys_per_row: Number of adjacent keys in a row of the left matrix (``KEYS_PER_ROW``).
        padded_group_size: Columns per key: the number of queries of a group, padded (``BLOCK_G``).
        padded_bytes: Bytes per key of the index, padded (``BLOCK_C``).
        keys_per_tile: Number of keys of one matrix product (``BLOCK_N``).
    """

    keys_per_row: int
    padded_group_size: int
    padded_bytes: int
    keys_per_tile: int

    @property
    def constexpr_arguments(self) -> dict[str, int]:
        """The layout as constexpr arguments of kernels, by name."""
        return {
            "KEYS_PER_ROW": self.keys_per_row,
            "BLOCK_G": self.padded_group_size,
            "BLOCK_C": self.padded_bytes,
            "BLOCK_N": self.keys_per_tile,
        }


def make_packing(group_size: int, key_bytes: int, max_keys_per_row: int) -> Packing:
    """Return the layout of the matrix product of keys and the queries of a group.

    A row contains only one key if the number of bytes per key is not a power of two.

    Args:
        group_size: Query heads per KV head.
        key_bytes: Bytes per key of the index.
        max_keys_per_row: Largest number of adjacent keys in a row.
    """
    padded_group_size = triton.next_power_of_2(group_size)
    padded_bytes = triton.next_power_of_2(key_bytes)
    keys_per_row = max(MIN_DOT_COLUMNS // padded_group_size, MIN_INNER_BYTES // key_bytes, 1)
    is_row_too_short = (
        keys_per_row > max_keys_per_row and max_keys_per_row * key_bytes < MIN_INNER_BYTES
    )
    if padded_bytes != key_bytes or is_row_too_short:
        keys_per_row = 1
    keys_per_row = min(keys_per_row, max_keys_per_row)
    padded_bytes = max(padded_bytes, MIN_INNER_BYTES // keys_per_row)
    return Packing(
        keys_per_row=keys_per_row,
        padded_group_size=max(padded_group_size, MIN_DOT_COLUMNS // keys_per_row),
        padded_bytes=padded_bytes,
        keys_per_tile=keys_per_row
        * max(MIN_DOT_ROWS, INDEX_BYTES_PER_TILE // (keys_per_row * padded_bytes)),
    )


@triton.jit
def _make_block_diagonal(
    x, KEYS_PER_ROW: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Return an int8 block diagonal matrix with ``KEYS_PER_ROW`` diagonal blocks, x transposed.

    The shape is [BLOCK_G, BLOCK_C] for x, and [KEYS_PER_ROW * BLOCK_C, KEYS_PER_ROW * BLOCK_G] for
    the result.
    """
    key_of_row_block = tl.arange(0, KEYS_PER_ROW)[:, None, None, None]
    key_of_column_block = tl.arange(0, KEYS_PER_ROW)[None, None, :, None]
    x = tl.where(key_of_row_block == key_of_column_block, x[None, :, None, :], 0.0).to(tl.int8)
    return tl.trans(tl.reshape(x, (KEYS_PER_ROW * BLOCK_G, KEYS_PER_ROW * BLOCK_C)))


@triton.jit
def _unpack_half_bytes(x, IS_UPPER: tl.constexpr, HAS_PTX: tl.constexpr):
    """Return the lower or upper four bits of each byte, int8."""
    if HAS_PTX:
        # PTX processes four bytes per instruction, Triton's own code one
        if IS_UPPER:
            return tl.inline_asm_elementwise(
                asm="{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0f0f0f0f; }",
                constraints="=r,r",
                args=[x],
                dtype=tl.int8,
                is_pure=True,
                pack=4,
            )
        return tl.inline_asm_elementwise(
            asm="and.b32 $0, $1, 0x0f0f0f0f;",
            constraints="=r,r",
            args=[x],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return ((x >> 4) if IS_UPPER else (x & 15)).to(tl.int8)


@triton.jit
def load_queries(
    q,
    batch,
    kv_head,
    qk_scale,
    GROUP_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    KEYS_PER_ROW: tl.constexpr,
    FIRST_CHANNEL: tl.constexpr,
    HALF_DISTANCE: tl.constexpr,
    HALF_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Load the queries of a group, and quantise the queries to the right matrices of the product.

    The matrix product needs at least 16 columns, and a group has fewer queries. Therefore a row of
    the left matrix contains `KEYS_PER_ROW` adjacent keys. Column j * BLOCK_G + g of the right
    matrix contains query g at the channels of key j, and zeros at the channels of the other keys.
    Thus an entry of the result is the product of one key and one query.

    Returns:
        first_half_queries, second_half_queries: int8
            [KEYS_PER_ROW * BLOCK_C, KEYS_PER_ROW * BLOCK_G], first and second half of the channels.
        product_offset: int32 [1, KEYS_PER_ROW * BLOCK_G], which must be subtracted from the
            products of a column, because the code of a key is 8 more than its value.
        query_scale: float32 [BLOCK_G], which turns products without the offset into logits to base
            two; NaN for a query with NaN or infinities.
    """
    # [BLOCK_G, BLOCK_C]
    head_in_group, channel = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_C)
    is_in_bounds = (head_in_group < GROUP_SIZE)[:, None] & (channel < HALF_SIZE)[None, :]
    query_ptrs = (
        q.data
        + batch * q.batch_stride
        + (kv_head * GROUP_SIZE + head_in_group)[:, None] * q.head_stride
        + FIRST_CHANNEL
    )
    first_half_queries = tl.load(query_ptrs + channel[None, :], mask=is_in_bounds, other=0.0).to(
        tl.float32
    )
    second_half_queries = tl.load(
        query_ptrs + HALF_DISTANCE + channel[None, :], mask=is_in_bounds, other=0.0
    ).to(tl.float32)

    # quantise with one scale per query
    max_bits = tl.maximum(
        tl.max(get_magnitude_bits(first_half_queries), 1),
        tl.max(get_magnitude_bits(second_half_queries), 1),
    )
    is_finite = max_bits < INFINITE_BITS
    first_half_queries, second_half_queries = (
        tl.where(is_finite[:, None], first_half_queries, 0.0),
        tl.where(is_finite[:, None], second_half_queries, 0.0),
    )
    query_scale = tl.maximum(
        tl.max(tl.abs(first_half_queries), 1), tl.max(tl.abs(second_half_queries), 1)
    )
    query_scale = tl.maximum(query_scale * INVERSE_MAX_QUERY_CODE, MIN_SCALE)
    inverse_scale = tl.div_rn(tl.full([BLOCK_G], 1.0, tl.float32), query_scale)[:, None]
    first_half_queries = round_to_integer(first_half_queries * inverse_scale, MAX_QUERY_CODE)
    second_half_queries = round_to_integer(second_half_queries * inverse_scale, MAX_QUERY_CODE)

    # sum over channels of 8 * query, because the code of a key is 8 more than its value
    product_offset = (8.0 * (tl.sum(first_half_queries, 1) + tl.sum(second_half_queries, 1))).to(
        tl.int32
    )
    first_half_queries = _make_block_diagonal(first_half_queries, KEYS_PER_ROW, BLOCK_G, BLOCK_C)
    second_half_queries = _make_block_diagonal(second_half_queries, KEYS_PER_ROW, BLOCK_G, BLOCK_C)
    query_scale = tl.where(is_finite, query_scale * qk_scale, float("nan"))
    return (
        first_half_queries,
        second_half_queries,
        repeat_per_key(product_offset, KEYS_PER_ROW, BLOCK_G),
        query_scale,
    )


@triton.jit
def repeat_per_key(x, KEYS_PER_ROW: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return x [BLOCK_G] repeated for each key of a row, [1, KEYS_PER_ROW * BLOCK_G]."""
    return tl.reshape(
        tl.broadcast_to(x[None, :], (KEYS_PER_ROW, BLOCK_G)), (1, KEYS_PER_ROW * BLOCK_G)
    )


@triton.jit
def compute_key_products(
    codes, key_scale, first_half_queries, second_half_queries, product_offset, HAS_PTX: tl.constexpr
):
    """Return the products of keys and queries, multiplied by key scales but not by query scales.

    Args:
        codes: uint8 [keys / KEYS_PER_ROW, KEYS_PER_ROW * BLOCK_C], codes of the keys.
        key_scale: [keys / KEYS_PER_ROW, KEYS_PER_ROW * BLOCK_G], the key scale of each product.
        first_half_queries, second_half_queries, product_offset: Results of `load_queries`.

    Returns:
        float32 [keys / KEYS_PER_ROW, KEYS_PER_ROW * BLOCK_G].
    """
    s = tl.dot(_unpack_half_bytes(codes, False, HAS_PTX), first_half_queries, out_dtype=tl.int32)
    s = tl.dot(_unpack_half_bytes(codes, True, HAS_PTX), second_half_queries, s, out_dtype=tl.int32)
    return (s - product_offset).to(tl.float32) * key_scale.to(tl.float32)
