"""Kernel that compresses new keys, or all keys of a cache, to the index for selecting keys.

The definition is `reference.index_keys`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import launch
from cab_hf.ops.attention.tiles import (
    INFINITE_BITS,
    Vectors,
    get_magnitude_bits,
    make_vector_pointers,
    make_vectors,
)
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.channels import ChannelHalves
from cab_hf.ops.decode.reference import Index
from cab_hf.ops.launch import on_device_of

MAX_KEY_CODE = tl.constexpr(float(reference.MAX_KEY_CODE))
INVERSE_MAX_KEY_CODE = tl.constexpr(1 / reference.MAX_KEY_CODE)
MAX_KEY_SCALE = tl.constexpr(reference.MAX_KEY_SCALE)
MIN_SCALE = tl.constexpr(reference.MIN_SCALE)
# keys per program, the fastest on an H200
KEYS_PER_PROGRAM = 128
# channels that a program checks for NaN and infinities per loop iteration; more would not fit in
# registers
CHECKED_CHANNELS_PER_ITERATION = 16


def index_keys(k: Tensor, channels: tuple[int, ...]) -> Index:
    """Compress keys to an index; see `reference.index_keys`."""
    key_bytes = (len(channels) or k.shape[3]) // 2
    codes = k.new_empty(*k.shape[:3], key_bytes, dtype=torch.uint8)
    index = Index(codes, k.new_empty(k.shape[:3], dtype=torch.float16))
    write_index(index, k, channels, start=None)
    return index


def write_index(index: Index, k: Tensor, channels: tuple[int, ...], start: Tensor | None) -> None:
    """Compress keys, and write them to an index; see `reference.write_index`.

    ``start`` is the slot of the first key; None for slot 0.
    """
    write_function = (
        torch.ops.cab_hf.decode_write_index if torch.compiler.is_compiling() else _write_index
    )
    write_function(
        codes=index.codes, key_scales=index.scales, k=k, channels=list(channels), start=start
    )


def _write_index(
    codes: Tensor, key_scales: Tensor, k: Tensor, channels: list[int], start: Tensor | None
) -> None:
    batch, heads, length, dim = k.shape
    channel_halves = ChannelHalves.from_channels(tuple(channels), dim)
    k = k if k.stride(-1) == 1 else k.contiguous()
    block_n = min(KEYS_PER_PROGRAM, triton.next_power_of_2(length))
    with on_device_of(k):
        _index_kernel[(triton.cdiv(length, block_n), batch * heads)](
            k=make_vectors(k),
            codes=make_vectors(codes),
            key_scales=make_per_token_argument(key_scales),
            start_ptr=start,
            heads=heads,
            length=length,
            **channel_halves.constexpr_arguments,
            BLOCK_N=block_n,
            BLOCK_C=triton.next_power_of_2(channel_halves.half_size),
            D=dim,
            CHUNK_D=min(CHECKED_CHANNELS_PER_ITERATION, triton.next_power_of_2(dim)),
            USE_PDL=launch.make_pdl_options(k)["USE_PDL"],
            num_warps=4,
        )


def make_per_token_argument(x: Tensor) -> Vectors:
    """Return x [B, H, N], one number per token, as an argument of kernels."""
    batch_stride, head_stride, token_stride = x.stride()
    return Vectors(x, batch_stride=batch_stride, head_stride=head_stride, token_stride=token_stride)


@triton.jit
def _index_kernel(
    k,
    codes,
    key_scales,
    start_ptr,
    heads,
    length,
    FIRST_CHANNEL: tl.constexpr,
    HALF_DISTANCE: tl.constexpr,
    HALF_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    D: tl.constexpr,
    CHUNK_D: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Compress ``BLOCK_N`` of ``length`` new keys of one KV head, and write codes and scales.

    ``start_ptr`` points to the slot of the first new key; None for slot 0.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    plane = tl.program_id(1).to(tl.int64)
    batch, head = plane // heads, plane % heads
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)

    # first and second half of the scored channels, [BLOCK_N, BLOCK_C]
    channel = tl.arange(0, BLOCK_C)
    is_in_bounds = (token < length)[:, None] & (channel < HALF_SIZE)[None, :]
    key_ptrs = make_vector_pointers(k, batch, head, token)
    scored_ptrs = key_ptrs + (FIRST_CHANNEL + channel)[None, :]
    first_half = tl.load(scored_ptrs, mask=is_in_bounds, other=0.0).to(tl.float32)
    second_half = tl.load(scored_ptrs + HALF_DISTANCE, mask=is_in_bounds, other=0.0).to(tl.float32)

    # bits of the largest magnitude over all channels, [BLOCK_N]; also channels that are not scored
    # may contain NaN
    max_bits = tl.maximum(
        tl.max(get_magnitude_bits(first_half), 1), tl.max(get_magnitude_bits(second_half), 1)
    )
    if 2 * HALF_SIZE < D:
        for first_channel in tl.static_range(0, D, CHUNK_D):
            chunk_channel = first_channel + tl.arange(0, CHUNK_D)
            is_in_chunk = (token < length)[:, None] & (chunk_channel < D)[None, :]
            chunk_values = tl.load(
                key_ptrs + chunk_channel[None, :], mask=is_in_chunk, other=0.0
            ).to(tl.float32)
            max_bits = tl.maximum(max_bits, tl.max(get_magnitude_bits(chunk_values), 1))
    is_finite = max_bits < INFINITE_BITS

    # quantise with one scale per key
    first_half, second_half = (
        tl.where(is_finite[:, None], first_half, 0.0),
        tl.where(is_finite[:, None], second_half, 0.0),
    )
    max_abs = tl.maximum(tl.max(tl.abs(first_half), 1), tl.max(tl.abs(second_half), 1))
    key_scale = tl.minimum(max_abs * INVERSE_MAX_KEY_CODE, MAX_KEY_SCALE).to(tl.float16)
    divisor = tl.maximum(key_scale.to(tl.float32), MIN_SCALE)
    inverse_scale = tl.div_rn(tl.full([BLOCK_N], 1.0, tl.float32), divisor)[:, None]
    key_scale = tl.where(is_finite, key_scale, float("inf")).to(tl.float16)
    packed_code = _encode_key_channel(first_half * inverse_scale) | (
        _encode_key_channel(second_half * inverse_scale) << 4
    )

    slot = token.to(tl.int64)
    if start_ptr is not None:
        slot += tl.load(start_ptr)
    scale_ptrs = (
        key_scales.data
        + batch * key_scales.batch_stride
        + head * key_scales.head_stride
        + slot * key_scales.token_stride
    )
    tl.store(scale_ptrs, key_scale, mask=token < length)
    code_ptrs = make_vector_pointers(codes, batch, head, slot) + channel[None, :]
    tl.store(code_ptrs, packed_code.to(tl.uint8), mask=is_in_bounds)


@triton.jit
def _encode_key_channel(x):
    """Round x to an integer from -8 to 7, and return this integer plus 8 as a code, 0 to 15."""
    return (round_to_integer(x, MAX_KEY_CODE) + 8.0).to(tl.int32)


@triton.jit
def round_to_integer(x, MAX_CODE: tl.constexpr):
    """Return x rounded to the nearest integers from -MAX_CODE - 1 to MAX_CODE.

    The clamp precedes the addition of 0.5. Otherwise the compiler would fuse the addition with the
    product that computes x (FMA), and round once instead of twice as `reference.index_keys` does.
    """
    return tl.floor(tl.minimum(tl.maximum(x, -MAX_CODE - 1.0), MAX_CODE) + 0.5)


_write_op = torch.library.custom_op(
    "cab_hf::decode_write_index", _write_index, mutates_args=("codes", "key_scales")
)


@_write_op.register_fake
def _(codes, key_scales, k, channels, start):
    return None
