"""The kernel that writes the index of keys: of a new one, or of all that a cache holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import launch
from cab_hf.ops.attention.tiles import Vectors, vectors, vectors_at
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.channels import Channels
from cab_hf.ops.decode.reference import Index
from cab_hf.ops.launch import on_device_of

LARGEST_CODE = tl.constexpr(float(reference.LARGEST_CODE))
A_CODE = tl.constexpr(1 / reference.LARGEST_CODE)
LARGEST_SCALE = tl.constexpr(reference.LARGEST_SCALE)
LEAST_SCALE = tl.constexpr(reference.LEAST_SCALE)
# keys whose index a program writes: what an H200 runs fastest
INDEXED = 128


def index_keys(k: Tensor, channels: tuple[int, ...]) -> Index:
    """See `reference.index_keys`."""
    codes = k.new_empty(*k.shape[:3], len(channels) or k.shape[3], dtype=torch.int8)
    index = Index(codes, k.new_empty(k.shape[:3], dtype=torch.float16))
    write_index(index, k, channels, None)
    return index


def write_index(index: Index, k: Tensor, channels: tuple[int, ...], start: Tensor | None) -> None:
    """See `reference.write_index`; for None from the first slot on."""
    write = torch.ops.cab_hf.decode_write_index if torch.compiler.is_compiling() else _write
    write(*index, k, list(channels), start)


def _write(
    codes: Tensor, scales: Tensor, k: Tensor, channels: list[int], start: Tensor | None
) -> None:
    batch, heads, length, dim = k.shape
    scored = Channels.of(tuple(channels), dim)
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
            **scored.constants,
            BLOCK_N=tokens,
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
    SIZE: tl.constexpr,
    GAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`reference.index_keys` of some keys, written from slot ``start`` on."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    plane = tl.program_id(1).to(tl.int64)
    batch, head = plane // heads, plane % heads
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_C)[None, :]
    there = (token < length)[:, None] & (inner < CHANNELS)
    at = vectors_at(k, batch, head, token) + channel_at(inner, FIRST, SIZE, GAP)
    x = tl.load(at, mask=there, other=0.0).to(tl.float32)
    scale = tl.minimum(tl.max(tl.abs(x), 1) * A_CODE, LARGEST_SCALE).to(tl.float16)
    inverse = one_over(tl.maximum(scale.to(tl.float32), LEAST_SCALE))
    slot = token.to(tl.int64)
    if start is not None:
        slot += tl.load(start)
    place = scales.data + batch * scales.batch + head * scales.head + slot * scales.token
    tl.store(place, scale, mask=token < length)
    tl.store(vectors_at(codes, batch, head, slot) + inner, code_of(x * inverse[:, None]), there)


@triton.jit
def channel_at(inner, FIRST: tl.constexpr, SIZE: tl.constexpr, GAP: tl.constexpr):
    """Which channel the scored ones are, see `Channels`."""
    return FIRST + inner + tl.where(inner < SIZE, 0, GAP)


@triton.jit
def one_over(x):
    """Rounded as PyTorch rounds it."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def code_of(x):
    """The nearest whole numbers of 8 bits.

    The bounds come before the sum, so that no product is fused with it and rounded once.
    """
    x = tl.minimum(tl.maximum(x, -LARGEST_CODE), LARGEST_CODE)
    return tl.floor(x + 0.5).to(tl.int8)


_write_op = torch.library.custom_op(
    "cab_hf::decode_write_index", _write, mutates_args=("codes", "scales")
)


@_write_op.register_fake
def _(codes, scales, k, channels, start):
    return None
