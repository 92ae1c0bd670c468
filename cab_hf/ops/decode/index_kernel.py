"""Kernel that writes the index of keys: of one new key, or of all keys of a cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import launch
from cab_hf.ops.attention.tiles import INFINITE_BITS, Vectors, magnitude, vectors, vectors_at
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.channels import Halves
from cab_hf.ops.decode.reference import Index
from cab_hf.ops.launch import on_device_of

LARGEST_CODE = tl.constexpr(float(reference.LARGEST_CODE))
A_CODE = tl.constexpr(1 / reference.LARGEST_CODE)
LARGEST_SCALE = tl.constexpr(reference.LARGEST_SCALE)
LEAST_SCALE = tl.constexpr(reference.LEAST_SCALE)
# keys per program, the fastest on an H200
INDEXED = 128
# channels of these keys that are checked for NaN and infinities at a time
CHANNELS_AT_A_TIME = 16


def index_keys(k: Tensor, channels: tuple[int, ...]) -> Index:
    """Build the index of keys; see `reference.index_keys`."""
    width = (len(channels) or k.shape[3]) // 2
    codes = k.new_empty(*k.shape[:3], width, dtype=torch.uint8)
    index = Index(codes, k.new_empty(k.shape[:3], dtype=torch.float16))
    write_index(index, k, channels, None)
    return index


def write_index(index: Index, k: Tensor, channels: tuple[int, ...], start: Tensor | None) -> None:
    """Write the index of keys; see `reference.write_index`. None starts at the first slot."""
    write = torch.ops.cab_hf.decode_write_index if torch.compiler.is_compiling() else _write
    write(*index, k, list(channels), start)


def _write(
    codes: Tensor, scales: Tensor, k: Tensor, channels: list[int], start: Tensor | None
) -> None:
    batch, heads, length, dim = k.shape
    halves = Halves.of(tuple(channels), dim)
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
            **halves.constants,
            BLOCK_N=tokens,
            BLOCK_C=triton.next_power_of_2(halves.size),
            D=dim,
            ROOM=min(CHANNELS_AT_A_TIME, triton.next_power_of_2(dim)),
            EARLY=launch.early(k)["EARLY"],
            num_warps=4,
        )


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
    D: tl.constexpr,
    ROOM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write `reference.index_keys` of some keys, from slot ``start`` on."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    plane = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_C)
    there = (token < length)[:, None] & (inner < SIZE)[None, :]
    at = vectors_at(k, plane // heads, plane % heads, token) + (FIRST + inner)[None, :]
    low = tl.load(at, mask=there, other=0.0).to(tl.float32)
    high = tl.load(at + STEP, mask=there, other=0.0).to(tl.float32)
    bits = tl.maximum(tl.max(magnitude(low), 1), tl.max(magnitude(high), 1))
    if 2 * SIZE < D:
        # check the channels outside of the index, a few at a time: more would not fit the registers
        key = vectors_at(k, plane // heads, plane % heads, token)
        for begin in tl.static_range(0, D, ROOM):
            channel = begin + tl.arange(0, ROOM)
            inside = (token < length)[:, None] & (channel < D)[None, :]
            some = tl.load(key + channel[None, :], mask=inside, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, tl.max(magnitude(some), 1))
    finite = bits < INFINITE_BITS
    low, high = tl.where(finite[:, None], low, 0.0), tl.where(finite[:, None], high, 0.0)
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    scale = tl.minimum(largest * A_CODE, LARGEST_SCALE).to(tl.float16)
    unit = tl.maximum(scale.to(tl.float32), LEAST_SCALE)
    inverse = tl.div_rn(tl.full([BLOCK_N], 1.0, tl.float32), unit)[:, None]
    scale = tl.where(finite, scale, float("inf")).to(tl.float16)
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
    """Return the nearest integers as codes, 0 to 15 for -8 to 7."""
    return (nearest(x, LARGEST_CODE) + 8.0).to(tl.int32)


@triton.jit
def nearest(x, LARGEST: tl.constexpr):
    """Return the nearest integers from -LARGEST - 1 to LARGEST.

    Clamping comes before the sum, so that the sum is not fused with a product, which would round
    only once.
    """
    return tl.floor(tl.minimum(tl.maximum(x, -LARGEST - 1.0), LARGEST) + 0.5)


_write_op = torch.library.custom_op(
    "cab_hf::decode_write_index", _write, mutates_args=("codes", "scales")
)


@_write_op.register_fake
def _(codes, scales, k, channels, start):
    return None
