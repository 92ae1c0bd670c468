"""Shared parts of the block attention kernels: the plan as an argument, tiles, the softmax.

Exponentials are to base two. A plan is passed to kernels as NamedTuples. Descriptors of tiles stay
separate arguments, because Triton 3.6 cannot launch a kernel with a descriptor inside a tuple.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cab_hf.ops import launch
from cab_hf.ops.attention.transpose import ColumnLists, pack_columns
from cab_hf.plan import BlockIndices

# a row of a descriptor and its start must be multiples of this many bytes
ALIGNMENT = 16
# a number of queries that is divisible by every tile
WHOLE_TILE = 128
# queries whose `BackwardStats` one program computes
TERM_TILE = 32
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# `magnitude` returns at least this for infinities and NaN
INFINITE_BITS = tl.constexpr(0x7F800000)


class PlanTensors(NamedTuple):
    """Plan as the kernels read it; ``first`` and ``last`` are its ranges, int32 [B, N_q]."""

    full: BlockIndices
    partial: BlockIndices
    first: Tensor
    last: Tensor
    query_block: int
    key_block: int


class Lists(NamedTuple):
    """`BlockIndices` as an argument of kernels."""

    counts: Tensor
    indices: Tensor
    width: int

    @classmethod
    def of(cls, lists: BlockIndices) -> Lists:
        # Triton 3.6 turns a 1 into a constant, and loses the constant in a tuple inside a tuple
        lists = lists.widened(2) if lists.width < 2 else lists
        return cls(lists.counts, lists.indices, lists.width)


class Plan(NamedTuple):
    """`PlanTensors` as an argument of kernels; kernels receive block sizes as constants.

    The lists come first: ``plan[MASKED]`` are the full lists for 0, and the partial lists for 1.
    """

    full: Lists | ColumnLists
    partial: Lists | ColumnLists
    first: Tensor
    last: Tensor
    first_stride: int
    last_stride: int


class Sizes(NamedTuple):
    """Numbers of heads of q, k and the plan, of queries, and of query blocks in the plan.

    If the plan is a piece, its blocks are those of ``tokens`` queries from ``begin`` on.
    """

    heads: int
    kv_heads: int
    plan_heads: int
    q_length: int
    q_blocks: int
    begin: int = 0
    tokens: int = 0


class Vectors(NamedTuple):
    """Tensor [B, H, N, D] as an argument of kernels, with the strides of the first three dims."""

    data: Tensor
    batch: int
    head: int
    token: int


class Tiles(NamedTuple):
    """Tensor [B, H, N, D] as an argument of kernels that access tiles by pointers."""

    data: Tensor
    batch: int
    head: int
    token: int
    tokens: int
    channels: int


class BackwardStats(NamedTuple):
    """Statistics of every query that the backward pass needs, float32 [B, H, room] each.

    Attributes:
        lse: Log-sum-exp to base two. It is +inf if a query has no keys or does not exist, so that
            its weights vanish.
        delta: sum_d grad * out - grad_lse.
        room: N_q rounded up to `WHOLE_TILE`.
    """

    lse: Tensor
    delta: Tensor
    room: int


def arguments(q: Tensor, k: Tensor, rows: PlanTensors) -> tuple[Plan, Sizes]:
    """Return the kernel arguments for a plan, q [B, H, N_q, D] and k [B, H_kv, N_k, D]."""
    full, partial = map(Lists.of, (rows.full, rows.partial))
    first, last = (x if x.stride(1) == 1 else x.contiguous() for x in (rows.first, rows.last))
    plan = Plan(full, partial, first, last, first.stride(0), last.stride(0))
    _, plan_heads, q_blocks = full.counts.shape
    return plan, Sizes(q.shape[1], k.shape[1], plan_heads, q.shape[2], q_blocks)


def by_column(plan: Plan, kv_blocks: int, placed: bool = False) -> Plan:
    """Return the plan with transposed lists, for each of ``kv_blocks`` key blocks.

    Args:
        placed: See `pack_columns`.
    """
    full, partial = (pack_columns(lists, kv_blocks, placed) for lists in plan[:2])
    return plan._replace(full=full, partial=partial)


def backward_stats(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> BackwardStats:
    """Compute the `BackwardStats` of an output.

    Args:
        grad: [B, H, N_q, D], gradient of the output.
        grad_lse: [B, H, N_q], gradient of the log-sum-exp; None if it has none.
        out: [B, H, N_q, D].
        lse: [B, H, N_q], the log-sum-exp.
    """
    batch, heads, length, dim = grad.shape
    room = triton.cdiv(length, WHOLE_TILE) * WHOLE_TILE
    terms = BackwardStats(*(lse.new_empty(batch, heads, room) for _ in range(2)), room)
    _row_terms_kernel[(room // TERM_TILE, batch * heads)](
        vectors(grad),
        vectors(out),
        lse,
        terms,
        heads,
        length,
        BLOCK_M=TERM_TILE,
        D=dim,
        BLOCK_D=triton.next_power_of_2(min(dim, 128)),
        num_warps=4,
    )
    if grad_lse is not None:
        terms.delta[:, :, :length] -= grad_lse
    return terms


def described(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if a descriptor does not support its strides or its start."""
    complete = all(stride * x.element_size() % ALIGNMENT == 0 for stride in x.stride()[:3])
    if complete and x.stride(3) == 1 and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.contiguous().clone() if x.data_ptr() % ALIGNMENT else x.contiguous()


def like(x: Tensor, dim: int | None = None) -> Tensor:
    """Allocate [B, H, N, D] with the memory layout [B, N, H, D], which models use afterwards."""
    batch, heads, length, _ = x.shape
    return x.new_empty(batch, length, heads, dim or x.shape[3]).transpose(1, 2)


def vectors(x: Tensor) -> Vectors:
    return Vectors(x, *x.stride()[:3])


def descriptors(
    tokens: int, *tensors: Tensor, channels: int | None = None
) -> list[TensorDescriptor | Tiles]:
    """Return [B, H, N, D] for `load_tile`, in tiles of ``tokens`` and ``channels``, default all."""
    if not launch.reads_by_descriptor(tensors[0].device):
        return [Tiles(*vectors(x), *x.shape[2:]) for x in tensors]
    return [
        TensorDescriptor.from_tensor(
            x, [1, 1, tokens, channels or triton.next_power_of_2(x.shape[3])]
        )
        for x in tensors
    ]


def tile_of(block: int, most: int) -> int:
    """Return the largest power of two that divides ``block``, at most ``most``."""
    return min(most, block & -block)


def sticks_out(rows: PlanTensors, q_length: int, kv_length: int) -> bool:
    """Return True if listed blocks may contain keys after all queries of their row.

    They do not if q and k are the whole sequence and key blocks divide query blocks.
    """
    return q_length != kv_length or rows.key_block > rows.query_block


def precision(x: Tensor) -> str:
    """Return the precision of float32 products; 16 bits have only one, and gfx950 has no tf32."""
    return "tf32" if x.dtype != torch.float32 and launch.packed(x) else "ieee"


def logit_scales(scale: float, softcap: float) -> dict[str, float | bool]:
    """Return the factors that turn products into logits to base two, inside and outside of a tanh.

    Without a soft cap (0) there is no tanh; see `reference.capped`.
    """
    outer = softcap or scale
    inner = scale / softcap if softcap else 0.0
    return {"qk_scale": outer * LOG2_E.value, "cap_scale": inner, "CAPPED": softcap > 0}


@triton.jit
def locate(plane, start, sizes, QUERY_BLOCK: tl.constexpr):
    """Return (batch, head, kv_head, row of the plan's lists) of the query ``start`` of a plane."""
    batch = plane // sizes.heads
    head = plane % sizes.heads
    kv_head = head // (sizes.heads // sizes.kv_heads)
    plan_row = plan_plane(batch, head, sizes) * sizes.q_blocks + start // QUERY_BLOCK
    return batch, head, kv_head, plan_row


@triton.jit
def plan_plane(batch, head, sizes):
    plan_head = head // (sizes.heads // sizes.plan_heads)
    return (batch * sizes.plan_heads + plan_head).to(tl.int64)


@triton.jit
def tile_start(indices, i, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the first token of the i-th tile of the listed blocks."""
    TILES: tl.constexpr = BLOCK // TILE
    return tl.load(indices + i // TILES) * BLOCK + i % TILES * TILE


@triton.jit
def vectors_at(x, batch, head, token):
    """Return pointers [N, 1] to the first channel of each token."""
    plane = x.data + batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head
    return plane + token.to(tl.int64)[:, None] * x.token


@triton.jit
def load_tile(x, batch, head, token, channel, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Load a tile [TOKENS, CHANNELS] of one of `descriptors`, with zeros past the ends."""
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([batch, head, token, channel]).reshape(TOKENS, CHANNELS)
    else:
        at, inside = _tile_at(x, batch, head, token, channel, TOKENS, CHANNELS)
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    x, batch, head, token, channel, tile, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Write a tile [TOKENS, CHANNELS], in the dtype of ``x``."""
    if isinstance(x, tl.tensor_descriptor):
        tile = tile.to(x.dtype).reshape(1, 1, TOKENS, CHANNELS)
        x.store([batch, head, token, channel], tile)
    else:
        at, inside = _tile_at(x, batch, head, token, channel, TOKENS, CHANNELS)
        tl.store(at, tile.to(x.data.dtype.element_ty), mask=inside)


@triton.jit
def _tile_at(x, batch, head, token, channel, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    tokens = token + tl.arange(0, TOKENS)
    channels = channel + tl.arange(0, CHANNELS)[None, :]
    inside = (tokens < x.tokens)[:, None] & (channels < x.channels)
    # the interpreter counts loops over heads with Python integers, which have no ``to``
    zero = tl.zeros([], tl.int32)
    return vectors_at(x, batch + zero, head + zero, tokens) + channels, inside


@triton.jit
def load_spans(plan, batch, query, q_length):
    """Return the (first, last) visible key of each query; an empty range past the last query."""
    inside = query < q_length
    batch = batch.to(tl.int64)
    first = tl.load(plan.first + batch * plan.first_stride + query, mask=inside, other=0)
    last = tl.load(plan.last + batch * plan.last_stride + query, mask=inside, other=-1)
    return first, last


@triton.jit
def seen_between(key, first, last):
    return (key >= first) & (key <= last)


@triton.jit
def only_seen(x, key, first, last):
    """Return the rows of ``x`` whose key is visible to the queries, zeros elsewhere.

    A weight of 0 does not remove a NaN.
    """
    lowest = tl.min(tl.where(last < 0, 2147483647, first), 0)
    seen = (key >= lowest) & (key <= tl.max(last, 0))
    return tl.where(seen[:, None], x, 0.0).to(x.dtype)


@triton.jit
def finite(m):
    """Return the maximum, or 0 for a row without keys, which has no finite maximum."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def magnitude(x):
    """Return the bits of float32 without the sign, int32.

    They compare as the magnitudes do, and a maximum of integers drops no NaN.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def tanh(x):
    """Compute the hyperbolic tangent with an absolute error below one float32 step of 1.

    The numerator is exact for small x, which it is not in 2 * sigmoid(2 * x) - 1.
    """
    e = tl.exp(-2 * tl.abs(x))
    y = (1 - e) / (1 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def online_softmax_update(m_i, l_i, qk, qk_scale, MASKED: tl.constexpr):
    """Return (m_i, l_i, p, alpha); previous sums must be multiplied by alpha.

    Without ``MASKED``, every row of ``qk`` must have a finite logit.
    """
    m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
    m_safe = finite(m_new) if MASKED else m_new
    p = tl.exp2(qk * qk_scale - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    return m_new, l_i * alpha + tl.sum(p, 1), p, alpha


@triton.jit
def _row_terms_kernel(
    grad,
    out,
    lse,
    terms,
    heads,
    length,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    plane = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = query < length
    grad_row = vectors_at(grad, batch, head, query)
    out_row = vectors_at(out, batch, head, query)
    delta = tl.zeros((BLOCK_M,), tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        # [BLOCK_M, BLOCK_D]
        channel = start + tl.arange(0, BLOCK_D)[None, :]
        mask = inside[:, None] & (channel < D)
        do = tl.load(grad_row + channel, mask=mask, other=0.0).to(tl.float32)
        o = tl.load(out_row + channel, mask=mask, other=0.0).to(tl.float32)
        delta += tl.sum(do * o, 1)
    tl.store(terms.delta + plane * terms.room + query, delta)
    x = tl.load(lse + plane * length + query, mask=inside, other=float("-inf"))
    x = tl.where(x == float("-inf"), float("inf"), x * LOG2_E)
    tl.store(terms.lse + plane * terms.room + query, x)
