"""What the kernels of block attention share: a plan as an argument, tiles, the softmax.

Exponentials are to base two. What a kernel reads of a plan comes as NamedTuples; descriptors of
tiles stay arguments of their own, since Triton 3.6 launches none inside a tuple.
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
from cab_hf.plan import BlockLists

# bytes that a row of a descriptor, and where it starts, must be a multiple of
ALIGNMENT = 16
# queries that any tile divides
WHOLE_TILE = 128
# queries whose `BackwardStats` one program computes
TERM_TILE = 32
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# what `magnitude` returns is at least this for infinities and NaN
INFINITE_BITS = tl.constexpr(0x7F800000)


class PlanTensors(NamedTuple):
    """A plan as the kernels read it; ``first`` and ``last`` are its spans, int32 [B, N_q]."""

    full: BlockLists
    partial: BlockLists
    first: Tensor
    last: Tensor
    query_block: int
    key_block: int


class Lists(NamedTuple):
    """`BlockLists` as an argument of kernels."""

    counts: Tensor
    indices: Tensor
    width: int

    @classmethod
    def of(cls, lists: BlockLists) -> Lists:
        # Triton 3.6 makes a constant of a 1, and loses it in a tuple inside a tuple
        lists = lists.widened(2) if lists.width < 2 else lists
        return cls(lists.counts, lists.indices, lists.width)


class Plan(NamedTuple):
    """`PlanTensors` as an argument of kernels; block sizes are constants of theirs.

    The lists come first, so that ``plan[MASKED]`` are those whose blocks are masked or not.
    """

    full: Lists | ColumnLists
    partial: Lists | ColumnLists
    first: Tensor
    last: Tensor
    first_stride: int
    last_stride: int


class Sizes(NamedTuple):
    """Heads of q, of k and of the plan, queries, and query blocks that the plan has rows for.

    Where they are not all, these are the blocks of ``tokens`` queries from ``begin``.
    """

    heads: int
    kv_heads: int
    plan_heads: int
    q_length: int
    q_blocks: int
    begin: int = 0
    tokens: int = 0


class Vectors(NamedTuple):
    """[B, H, N, D] as an argument of kernels, with the strides of the first three."""

    data: Tensor
    batch: int
    head: int
    token: int


class Tiles(NamedTuple):
    """[B, H, N, D] as an argument of kernels that read and write tiles of it by pointers."""

    data: Tensor
    batch: int
    head: int
    token: int
    tokens: int
    channels: int


class BackwardStats(NamedTuple):
    """What backward needs of every query, float32 [B, H, room] each.

    Attributes:
        lse: the log-sum-exp in powers of two, +inf where a query sees nothing or is none (so that
            its weights vanish).
        delta: the sum over D of grad * out, less the gradient of the log-sum-exp.
        room: N_q rounded up to `WHOLE_TILE`.
    """

    lse: Tensor
    delta: Tensor
    room: int


def arguments(q: Tensor, k: Tensor, rows: PlanTensors) -> tuple[Plan, Sizes]:
    """What every kernel gets of a plan, and of q [B, H, N_q, D] and k [B, H_kv, N_k, D]."""
    full, partial = map(Lists.of, (rows.full, rows.partial))
    first, last = (x if x.stride(1) == 1 else x.contiguous() for x in (rows.first, rows.last))
    plan = Plan(full, partial, first, last, first.stride(0), last.stride(0))
    _, plan_heads, q_blocks = full.counts.shape
    return plan, Sizes(q.shape[1], k.shape[1], plan_heads, q.shape[2], q_blocks)


def by_column(plan: Plan, kv_blocks: int, placed: bool = False) -> Plan:
    """The plan with its lists the other way round, for each of ``kv_blocks`` key blocks.

    ``placed`` is that of `pack_columns`.
    """
    full, partial = (pack_columns(lists, kv_blocks, placed) for lists in plan[:2])
    return plan._replace(full=full, partial=partial)


def backward_stats(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> BackwardStats:
    """`BackwardStats` of the gradient of ``out``, both [B, H, N_q, D], and the log-sum-exp [B, H,
    N_q], whose own gradient is None where there is none."""
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
    """``x``, copied where its strides or its start are not what a descriptor takes."""
    complete = all(stride * x.element_size() % ALIGNMENT == 0 for stride in x.stride()[:3])
    if complete and x.stride(3) == 1 and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.contiguous().clone() if x.data_ptr() % ALIGNMENT else x.contiguous()


def like(x: Tensor, dim: int | None = None) -> Tensor:
    """An empty tensor [B, H, N, D] that lies in memory as [B, N, H, D], as models go on with it."""
    batch, heads, length, _ = x.shape
    return x.new_empty(batch, length, heads, dim or x.shape[3]).transpose(1, 2)


def vectors(x: Tensor) -> Vectors:
    return Vectors(x, *x.stride()[:3])


def descriptors(
    tokens: int, *tensors: Tensor, channels: int | None = None
) -> list[TensorDescriptor | Tiles]:
    """[B, H, N, D] for `load_tile`, in tiles of so many tokens and channels, by default all."""
    if not launch.reads_by_descriptor(tensors[0].device):
        return [Tiles(*vectors(x), *x.shape[2:]) for x in tensors]
    return [
        TensorDescriptor.from_tensor(
            x, [1, 1, tokens, channels or triton.next_power_of_2(x.shape[3])]
        )
        for x in tensors
    ]


def tile_of(block: int, most: int) -> int:
    """The largest power of two that divides a block, at most ``most``."""
    return min(most, block & -block)


def sticks_out(rows: PlanTensors, q_length: int, kv_length: int) -> bool:
    """Whether listed blocks may hold keys behind all queries of their row.

    They hold none where a text is there as a whole, in key blocks that divide query blocks.
    """
    return q_length != kv_length or rows.key_block > rows.query_block


def precision(x: Tensor) -> str:
    """How products of float32 are to be computed; 16 bits have one way, and gfx950 no tf32."""
    return "tf32" if x.dtype != torch.float32 and launch.packed(x) else "ieee"


def logit_scales(scale: float, softcap: float) -> dict[str, float | bool]:
    """What products are multiplied by to be logits to base two: within a tanh, and beside it.

    ``softcap`` is that of `reference.capped`, 0 for none: then there is no tanh.
    """
    outer = softcap or scale
    inner = scale / softcap if softcap else 0.0
    return {"qk_scale": outer * LOG2_E.value, "cap_scale": inner, "CAPPED": softcap > 0}


@triton.jit
def locate(plane, start, sizes, QUERY_BLOCK: tl.constexpr):
    """(batch, head, kv_head, row of the plan's lists) of the query at ``start`` of a plane."""
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
    """The first token of the i-th tile of the listed blocks."""
    TILES: tl.constexpr = BLOCK // TILE
    return tl.load(indices + i // TILES) * BLOCK + i % TILES * TILE


@triton.jit
def vectors_at(x, batch, head, token):
    """Pointers [N, 1] to the first channel of each token."""
    plane = x.data + batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head
    return plane + token.to(tl.int64)[:, None] * x.token


@triton.jit
def load_tile(x, batch, head, token, channel, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """[TOKENS, CHANNELS] of one of `descriptors`, zeros behind its ends."""
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
    # the interpreter counts loops over heads in numbers of Python
    zero = tl.zeros([], tl.int32)
    return vectors_at(x, batch + zero, head + zero, tokens) + channels, inside


@triton.jit
def load_spans(plan, batch, query, q_length):
    """(first, last) key that each query sees; none where there is no query."""
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
    """The rows of ``x`` whose key lies among those that queries see, zeros for the others.

    A weight of 0 makes no 0 of a NaN.
    """
    lowest = tl.min(tl.where(last < 0, 2147483647, first), 0)
    seen = (key >= lowest) & (key <= tl.max(last, 0))
    return tl.where(seen[:, None], x, 0.0).to(x.dtype)


@triton.jit
def finite(m):
    """A row that has seen nothing has no maximum to be relative to."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def magnitude(x):
    """Return the bits of float32 without the sign, int32.

    They compare as the magnitudes do, and a maximum of integers drops no NaN.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def online_softmax_update(m_i, l_i, qk, qk_scale, MASKED: tl.constexpr):
    """(m_i, l_i, p, alpha), where alpha is what anything summed so far is to be multiplied by.

    Without ``MASKED`` every row of ``qk`` must have a finite logit.
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
