"""What the kernels of block attention share: a plan's lists as arguments, tiles, descriptors."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cab_hf.plan import BlockLists

# bytes that a row of a descriptor, and where it starts, must be a multiple of
ALIGNMENT = 16
# queries that any tile divides
WHOLE_TILE = 128
LOG2_E = 1.4426950408889634


class Rows(NamedTuple):
    """A plan as the kernels read it; ``first`` and ``last`` are its spans, int32 [B, N_q].

    The last dimension of both has stride 1.
    """

    full: BlockLists
    partial: BlockLists
    first: Tensor
    last: Tensor
    query_block: int
    key_block: int


def row_terms(grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """What backward needs of every query, float32 [B, H, N_q rounded up to `WHOLE_TILE`] each.

    The log-sum-exp in powers of two, +inf where a query sees nothing or is none (so that its
    weights vanish), and the sum over D of grad * out.
    """
    batch, heads, length, dim = grad.shape
    room = triton.cdiv(length, WHOLE_TILE) * WHOLE_TILE
    level, delta = (lse.new_empty(batch, heads, room) for _ in range(2))
    _row_terms_kernel[(room // 32, batch * heads)](
        grad,
        out,
        lse,
        level,
        delta,
        *grad.stride()[:3],
        *out.stride()[:3],
        heads,
        length,
        room,
        D=dim,
        BLOCK_D=triton.next_power_of_2(min(dim, 128)),
        num_warps=4,
    )
    return level, delta


def described(x: Tensor) -> Tensor:
    """``x``, copied where its strides or its start are not what a descriptor takes."""
    whole = all(stride * x.element_size() % ALIGNMENT == 0 for stride in x.stride()[:3])
    if whole and x.stride(3) == 1 and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.contiguous().clone() if x.data_ptr() % ALIGNMENT else x.contiguous()


def like(x: Tensor, dim: int | None = None) -> Tensor:
    """An empty tensor [B, H, N, D] that lies in memory as [B, N, H, D], as models go on with it."""
    batch, heads, length, _ = x.shape
    return x.new_empty(batch, length, heads, dim or x.shape[3]).transpose(1, 2)


def descriptors(length: int, *tensors: Tensor) -> list[TensorDescriptor]:
    """Descriptors of [B, H, N, D] in tiles of ``length`` tokens and all channels."""
    return [
        TensorDescriptor.from_tensor(x, [1, 1, length, triton.next_power_of_2(x.shape[3])])
        for x in tensors
    ]


def tile_of(block: int, most: int) -> int:
    """The largest power of two that divides a block, at most ``most``."""
    return min(most, block & -block)


def precision(x: Tensor) -> str:
    """How products of float32 are to be computed; 16 bits have one way."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def row_arguments(rows: Rows) -> tuple:
    """Counts and indices of both lists, their widths, spans and the spans' batch strides."""
    lists = (rows.full, rows.partial)
    return (
        *(tensor for part in lists for tensor in (part.counts, part.indices)),
        *(part.width for part in lists),
        rows.first,
        rows.last,
        rows.first.stride(0),
        rows.last.stride(0),
    )


def sizes(q: Tensor, k: Tensor, rows: Rows) -> tuple[int, ...]:
    """Heads of q, of k and of the plan, queries, and query blocks."""
    q_blocks = rows.full.counts.shape[2]
    return q.shape[1], k.shape[1], rows.full.counts.shape[1], q.shape[2], q_blocks


@triton.jit
def tile_start(indices, i, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The first token of the i-th tile of the listed blocks."""
    TILES: tl.constexpr = BLOCK // TILE
    return tl.load(indices + i // TILES) * BLOCK + i % TILES * TILE


@triton.jit
def seen_between(key, low, high):
    return (key >= low) & (key <= high)


@triton.jit
def _row_terms_kernel(
    grad,
    out,
    lse,
    level,
    delta,
    grad_batch,
    grad_head,
    grad_token,
    out_batch,
    out_head,
    out_token,
    heads,
    length,
    room,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    token = tl.program_id(0) * 32 + tl.arange(0, 32)
    there = token < length
    grad += batch * grad_batch + head * grad_head + token.to(tl.int64)[:, None] * grad_token
    out += batch * out_batch + head * out_head + token.to(tl.int64)[:, None] * out_token
    total = tl.zeros((32,), tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        channel = start + tl.arange(0, BLOCK_D)[None, :]
        inside = there[:, None] & (channel < D)
        a = tl.load(grad + channel, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(out + channel, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(a * b, 1)
    plane = tl.program_id(1).to(tl.int64)
    tl.store(delta + plane * room + token, total)
    x = tl.load(lse + plane * length + token, mask=there, other=float("-inf"))
    x = tl.where(x == float("-inf"), float("inf"), x * 1.4426950408889634)
    tl.store(level + plane * room + token, x)
