"""Block attention for large head dims: both products are split over D.

A tile of the output no longer fits in registers beside its weights, and recomputing the weights for
every slice of D would cost as much as the products. So weights are kept: a first kernel multiplies
queries and keys some channels at a time and writes the weights of a stretch of listed keys, a
second one multiplies them with one slice of the values' channels. Neither shared memory nor
registers grow with D. A weight is two bytes beside 4 D operations, so that it costs little to
write; `WORKSPACE` bounds how many are held, query blocks are taken that many at a time.

Weights are relative to the largest logit of their stretch, and are set right by the query's
log-sum-exp when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cab_hf.ops.attention.tiles import (
    LN_2,
    LOG2_E,
    BackwardStats,
    Plan,
    PlanTensors,
    Sizes,
    arguments,
    by_column,
    descriptors,
    finite,
    like,
    load_spans,
    locate,
    only_seen,
    plan_plane,
    precision,
    seen_between,
    sticks_out,
    tile_of,
    tile_start,
    vectors,
    vectors_at,
)
from cab_hf.plan import BlockLists

# bytes of weights held at a time; one block of queries is held whatever it takes
WORKSPACE = 2 << 30
# listed keys whose weights one program computes
STRETCH = 128
# channels of the output that a program holds: by row, and by column
ROW_SLICE = 128
COLUMN_SLICES = (256, 128)
# channels of queries and keys multiplied at a time
DEPTH = 64


class Piece(NamedTuple):
    """Query blocks whose weights are held at the same time.

    Attributes:
        rows: their part of the plan.
        plan: the same for kernels.
        sizes: what it is a piece of, its tokens being those of whole blocks.
        keys: room for the listed keys of a query, in whole stretches.
        stretch: listed keys whose weights one program computes.
    """

    rows: PlanTensors
    plan: Plan
    sizes: Sizes
    keys: int
    stretch: int


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: PlanTensors, scale: float
) -> None:
    """Write ``out`` [B, H, N_q, D] and its log-sum-exp ``lse``, float32 [B, H, N_q]."""
    for piece in _pieces(q, k, rows, matrices=1):
        # of the weights of a stretch, what they are relative to, and their sum
        shape = (*q.shape[:2], piece.keys // piece.stretch, piece.sizes.tokens)
        m_i, l_i = lse.new_full(shape, -torch.inf), lse.new_zeros(shape)
        p, _ = _weigh(q, k, piece, scale, sums=(m_i, l_i))
        _write_lse(lse, m_i, l_i, piece)
        _multiply_rows(p, v, out, piece, 1.0, m_i, lse)
        # the next piece takes their memory
        del p, m_i, l_i


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: BackwardStats,
    rows: PlanTensors,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from that of the output; deterministic."""
    dq = like(q)
    # summed over pieces
    dk, dv = (torch.zeros_like(like(x), dtype=torch.float32) for x in (k, v))
    for piece in _pieces(q, k, rows, matrices=2):
        p, ds = _weigh(q, k, piece, scale, terms=terms, gradients=(grad, v))
        _multiply_rows(ds, k, dq, piece, scale)
        columns = by_column(piece.plan, triton.cdiv(k.shape[2], rows.key_block), placed=True)
        _multiply_columns(p, grad, dv, piece, columns, 1.0)
        _multiply_columns(ds, q, dk, piece, columns, scale)
        # the next piece takes their memory
        del p, ds, columns
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _pieces(q: Tensor, k: Tensor, rows: PlanTensors, matrices: int) -> Iterator[Piece]:
    """The plan in pieces of as many query blocks as ``matrices`` of weights may be held for."""
    block = rows.query_block
    room = WORKSPACE // (matrices * q.shape[0] * q.shape[1] * block * q.element_size())
    # twice the bytes an element, half the elements
    stretch = STRETCH * 2 // max(2, q.element_size())
    longest = [_padded(max(1, keys), stretch) for keys in _longest(rows)]
    begin = 0
    while begin < len(longest):
        end, keys = begin + 1, longest[begin]
        while end < len(longest) and (end + 1 - begin) * max(keys, longest[end]) <= room:
            keys = max(keys, longest[end])
            end += 1
        # contiguous() copies nothing where a piece is all there is
        full, partial = (
            BlockLists(*(x[:, :, begin:end].contiguous() for x in (part.counts, part.indices)))
            for part in (rows.full, rows.partial)
        )
        part = rows._replace(full=full, partial=partial)
        plan, sizes = arguments(q, k, part)
        sizes = sizes._replace(begin=begin * block, tokens=(end - begin) * block)
        yield Piece(part, plan, sizes, keys, stretch)
        begin = end


def _longest(rows: PlanTensors) -> list[int]:
    """The most keys that any list of each query block holds. Waits for the device if it may."""
    counts = rows.full.counts + rows.partial.counts
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        return [(rows.full.width + rows.partial.width) * rows.key_block] * counts.shape[2]
    return (counts.amax((0, 1)) * rows.key_block).tolist()


def _weigh(
    q: Tensor,
    k: Tensor,
    piece: Piece,
    scale: float,
    sums: tuple[Tensor, Tensor] | None = None,
    terms: BackwardStats | None = None,
    gradients: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The weights of every query of a piece and listed key, [B H tokens, keys], and their gradient
    from ``terms`` and ``gradients``, (grad, v). A forward pass has ``sums`` to write instead."""
    rows, plan, sizes, keys, stretch = piece
    tile, planes = _row_tile(rows), q.shape[0] * q.shape[1]
    p = q.new_empty(planes * sizes.tokens, keys)
    ds = torch.empty_like(p) if gradients else None

    def product(x: Tensor, y: Tensor, target: Tensor) -> tuple:
        tiled = TensorDescriptor.from_tensor(target, [tile, stretch])
        return *descriptors(tile, x, channels=DEPTH), vectors(y), tiled

    grid = (keys // stretch, sizes.tokens // tile, planes)
    _block_attention_split_p_kernel[grid](
        *product(q, k, p),
        *(product(*gradients, ds) if gradients else (None,) * 3),
        sums,
        terms,
        plan,
        scale * LOG2_E.value,
        k.shape[2],
        sizes,
        **_constants(q, rows),
        BLOCK_M=tile,
        STRETCH=stretch,
        D=q.shape[3],
        DEPTH=DEPTH,
    )
    return p, ds


def _write_lse(lse: Tensor, m_i: Tensor, l_i: Tensor, piece: Piece) -> None:
    """Write the log-sum-exps of a piece of its sums, [B, H, stretches, tokens] each."""
    begin = piece.sizes.begin
    last = piece.rows.last[:, None, begin : begin + piece.sizes.tokens]
    m_i, l_i = (x[..., : last.shape[2]] for x in (m_i, l_i))
    most = m_i.amax(2)
    # full blocks are not masked, not even for padding queries
    blind = (last < 0) | (most == -torch.inf)
    most = most.masked_fill(blind, 0)
    total = most + (l_i * torch.exp2(m_i - most.unsqueeze(2))).sum(2).log2()
    total = (total * LN_2.value).masked_fill(blind, -torch.inf)
    lse[:, :, begin : begin + last.shape[2]] = total


def _multiply_rows(
    p: Tensor,
    x: Tensor,
    out: Tensor,
    piece: Piece,
    scale: float,
    m_i: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """out[i] = scale * the sum over listed keys j of p[i, j] x[j].

    With ``m_i`` and ``lse`` the weights are those of a forward pass, relative to their stretch.
    """
    rows, plan, sizes, keys, stretch = piece
    tile, columns = _row_tile(rows), _column_tile(rows)
    grid = (triton.cdiv(x.shape[3], ROW_SLICE), sizes.tokens // tile, out.shape[0] * out.shape[1])
    _block_attention_split_query_kernel[grid](
        TensorDescriptor.from_tensor(p, [tile, columns]),
        *descriptors(columns, x, channels=ROW_SLICE),
        *descriptors(tile, out, channels=ROW_SLICE),
        m_i,
        lse,
        plan,
        scale,
        keys // stretch,
        sizes,
        **_constants(x, rows),
        BLOCK_M=tile,
        BLOCK_N=columns,
        STRETCH=stretch,
        BLOCK_D=ROW_SLICE,
        STICKS_OUT=lse is not None and sticks_out(rows, sizes.q_length, x.shape[2]),
    )


def _multiply_columns(
    p: Tensor, x: Tensor, out: Tensor, piece: Piece, columns: Plan, scale: float
) -> None:
    """out[j] += scale * the sum over the queries i of a piece that list j of p[i, j] x[i]."""
    rows, plan, sizes, *_ = piece
    tile, keys = min(64, _row_tile(rows)), _column_tile(rows)
    batch, kv_heads, length, dim = out.shape
    width = min(COLUMN_SLICES, key=lambda width: _padded(dim, width))
    grid = (triton.cdiv(dim, width), triton.cdiv(length, keys), batch * kv_heads)
    _block_attention_split_bwd_key_kernel[grid](
        TensorDescriptor.from_tensor(p, [tile, keys]),
        *descriptors(tile, x, channels=width),
        vectors(out),
        plan.full.counts,
        columns,
        scale,
        length,
        triton.cdiv(length, rows.key_block),
        sizes,
        **_constants(x, rows),
        BLOCK_M=tile,
        BLOCK_N=keys,
        BLOCK_D=width,
        D=dim,
    )


def _row_tile(rows: PlanTensors) -> int:
    return tile_of(rows.query_block, 128)


def _column_tile(rows: PlanTensors) -> int:
    return tile_of(rows.key_block, 64)


def _padded(dim: int, width: int) -> int:
    return triton.cdiv(dim, width) * width


def _constants(x: Tensor, rows: PlanTensors) -> dict[str, int | str]:
    return {
        "QUERY_BLOCK": rows.query_block,
        "KEY_BLOCK": rows.key_block,
        "PRECISION": precision(x),
        "num_warps": 8,
        "num_stages": 3,
    }


@triton.jit
def _products(
    desc_x,
    y,
    batch,
    head,
    start,
    BLOCK_M: tl.constexpr,
    STRETCH: tl.constexpr,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x @ y.T [BLOCK_M, STRETCH] of the queries from ``start`` on, and keys that ``y`` points to,
    DEPTH channels at a time."""
    acc = tl.zeros((BLOCK_M, STRETCH), tl.float32)
    channel = tl.arange(0, DEPTH)[None, :]
    for depth in range(0, D, DEPTH):
        # [BLOCK_M, DEPTH] and [STRETCH, DEPTH]
        a = desc_x.load([batch, head, start, depth]).reshape(BLOCK_M, DEPTH)
        if D % DEPTH == 0:
            b = tl.load(y + depth + channel)
        else:
            b = tl.load(y + depth + channel, mask=depth + channel < D, other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _block_attention_split_p_kernel(
    desc_q,
    k,
    desc_p,
    desc_do,
    v,
    desc_ds,
    sums,
    terms,
    plan,
    qk_scale,
    kv_length,
    sizes,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STRETCH: tl.constexpr,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    plane = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_M
    column = tl.program_id(0) * STRETCH
    batch, head, kv_head, plan_row = locate(plane, row, sizes, QUERY_BLOCK)
    full = tl.load(plan.full.counts + plan_row)
    listed = full + tl.load(plan.partial.counts + plan_row)
    if column < listed * KEY_BLOCK:
        # keys at these places of the row's lists, full blocks first
        place = column + tl.arange(0, STRETCH)
        slot = place // KEY_BLOCK
        complete, taken = slot < full, slot < listed
        block = plan.full.indices + plan_row * plan.full.width + slot
        block = tl.load(block, mask=complete, other=0)
        cut = plan.partial.indices + plan_row * plan.partial.width - full + slot
        cut = tl.load(cut, mask=taken & (slot >= full), other=0)
        key = tl.where(complete, block, cut) * KEY_BLOCK + place % KEY_BLOCK
        # what lies behind the last key is masked, since no query sees it
        there, start = tl.minimum(key, kv_length - 1), sizes.begin + row
        y = vectors_at(k, batch, kv_head, there)
        # [BLOCK_M, STRETCH]
        qk = _products(desc_q, y, batch, head, start, BLOCK_M, STRETCH, D, DEPTH, PRECISION)
        query = start + tl.arange(0, BLOCK_M)
        if column + STRETCH > full * KEY_BLOCK:
            first, last = load_spans(plan, batch, query, sizes.q_length)
            seen = taken[None, :] & seen_between(key[None, :], first[:, None], last[:, None])
            qk = tl.where(seen, qk, float("-inf"))
        if terms is None:
            # a whole power of two, so that weights are set right without rounding
            m_i = tl.ceil(tl.max(qk, 1) * qk_scale)
            p = tl.exp2(qk * qk_scale - finite(m_i)[:, None])
            at = (plane.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * sizes.tokens
            at += row + tl.arange(0, BLOCK_M)
            tl.store(sums[0] + at, m_i)
            tl.store(sums[1] + at, tl.sum(p, 1))
            desc_p.store([plane * sizes.tokens + row, column], p.to(desc_p.dtype))
        else:
            at = plane.to(tl.int64) * terms.room + query
            inside = query < sizes.q_length
            lse = tl.load(terms.lse + at, mask=inside, other=float("inf"))
            delta = tl.load(terms.delta + at, mask=inside, other=0.0)
            p = tl.exp2(qk * qk_scale - lse[:, None])
            desc_p.store([plane * sizes.tokens + row, column], p.to(desc_p.dtype))
            y = vectors_at(v, batch, kv_head, there)
            dp = _products(desc_do, y, batch, head, start, BLOCK_M, STRETCH, D, DEPTH, PRECISION)
            ds = p * (dp - delta[:, None])
            desc_ds.store([plane * sizes.tokens + row, column], ds.to(desc_ds.dtype))


@triton.jit
def _block_attention_split_query_kernel(
    desc_p,
    desc_x,
    desc_out,
    m_i,
    lse,
    plan,
    scale,
    stretches,
    sizes,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STICKS_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    plane = tl.program_id(2)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    channel = tl.program_id(0) * BLOCK_D
    batch, head, kv_head, plan_row = locate(plane, row, sizes, QUERY_BLOCK)
    full = tl.load(plan.full.counts + plan_row)
    listed = full + tl.load(plan.partial.counts + plan_row)
    full_indices = plan.full.indices + plan_row * plan.full.width
    partial_indices = plan.partial.indices + plan_row * plan.partial.width - full
    token = row + tl.arange(0, BLOCK_M)
    if lse is not None:
        query = sizes.begin + token
        at = plane.to(tl.int64) * sizes.q_length + query
        level = tl.load(lse + at, mask=query < sizes.q_length, other=float("-inf"))
        blind = level == float("-inf")
        level = tl.where(blind, 0.0, level * LOG2_E)
        complete = tl.ceil(level)
        m_i += plane.to(tl.int64) * stretches * sizes.tokens + token
        if STICKS_OUT:
            first, last = load_spans(plan, batch, query, sizes.q_length)

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    TILES: tl.constexpr = KEY_BLOCK // BLOCK_N
    for i in range(0, listed * TILES):
        slot = i // TILES
        block = tl.load((full_indices if slot < full else partial_indices) + slot)
        # [BLOCK_M, BLOCK_N] and [BLOCK_N, BLOCK_D]
        p = desc_p.load([plane * sizes.tokens + row, i * BLOCK_N])
        if lse is not None:
            m = tl.load(m_i + i * BLOCK_N // STRETCH * sizes.tokens)
            p = p * tl.exp2(m - complete).to(p.dtype)[:, None]
        column = block * KEY_BLOCK + i % TILES * BLOCK_N
        x = desc_x.load([batch, kv_head, column, channel]).reshape(BLOCK_N, BLOCK_D)
        if STICKS_OUT:
            x = only_seen(x, column + tl.arange(0, BLOCK_N), first, last)
        acc = tl.dot(p, x, acc, input_precision=PRECISION)
    acc = acc * scale
    if lse is not None:
        acc = acc * tl.where(blind, 0.0, tl.exp2(complete - level))[:, None]
    acc = acc.to(desc_out.dtype).reshape(1, 1, BLOCK_M, BLOCK_D)
    desc_out.store([batch, head, sizes.begin + row, channel], acc)


@triton.jit
def _block_attention_split_bwd_key_kernel(
    desc_p,
    desc_x,
    out,
    full_counts,
    plan,
    scale,
    kv_length,
    kv_blocks,
    sizes,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    batch = tl.program_id(2) // sizes.kv_heads
    kv_head = tl.program_id(2) % sizes.kv_heads
    start = tl.program_id(1) * BLOCK_N
    channel = tl.program_id(0) * BLOCK_D
    group = sizes.heads // sizes.kv_heads
    TILES: tl.constexpr = QUERY_BLOCK // BLOCK_M
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
        plane = batch * sizes.heads + head
        of_plan = plan_plane(batch, head, sizes)
        column = of_plan * kv_blocks + start // KEY_BLOCK
        for PARTIAL in tl.static_range(2):
            lists = plan[PARTIAL]
            offset = tl.load(lists.starts + column)
            rows = lists.rows + offset
            slots = lists.slots + offset
            for i in range(0, tl.load(lists.counts + column) * TILES):
                row = tile_start(rows, i, QUERY_BLOCK, BLOCK_M)
                slot = tl.load(slots + i // TILES)
                if PARTIAL:
                    slot += tl.load(full_counts + of_plan * sizes.q_blocks + row // QUERY_BLOCK)
                # [BLOCK_M, BLOCK_N] and [BLOCK_M, BLOCK_D]
                place = slot * KEY_BLOCK + start % KEY_BLOCK
                p = desc_p.load([plane * sizes.tokens + row, place])
                x = desc_x.load([batch, head, sizes.begin + row, channel]).reshape(BLOCK_M, BLOCK_D)
                acc = tl.dot(p.T, x, acc, input_precision=PRECISION)
    key = start + tl.arange(0, BLOCK_N)
    lane = channel + tl.arange(0, BLOCK_D)[None, :]
    inside = (key[:, None] < kv_length) & (lane < D)
    at = vectors_at(out, batch, kv_head, key) + lane
    tl.store(at, tl.load(at, mask=inside, other=0.0) + acc * scale, mask=inside)
