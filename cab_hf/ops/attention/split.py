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
# stretches whose sums are added at a time
STRETCHES = 16


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


class Sums(NamedTuple):
    """Of a query's weights in each stretch, float32 [B H, stretches, tokens].

    Attributes:
        m_i: what they are relative to, in powers of two.
        l_i: their sum.
    """

    m_i: Tensor
    l_i: Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: PlanTensors, scale: float
) -> None:
    """Write ``out`` [B, H, N_q, D] and its log-sum-exp ``lse``, float32 [B, H, N_q]."""
    for piece in _pieces(q, k, rows, matrices=1):
        part, plan, sizes, keys, stretch = piece
        planes, stretches, tile = q.shape[0] * q.shape[1], keys // stretch, _row_tile(rows)
        p = _matrix(q, piece)
        shape = (planes, stretches, sizes.tokens)
        sums = Sums(*(q.new_empty(shape, dtype=torch.float32) for _ in range(2)))
        _weigh(q, k, p, piece, scale, sums)
        _block_attention_split_lse_kernel[(sizes.tokens // tile, planes)](
            sums,
            lse,
            plan,
            stretches,
            sizes,
            QUERY_BLOCK=part.query_block,
            KEY_BLOCK=part.key_block,
            BLOCK_M=tile,
            STRETCH=stretch,
            STRETCHES=STRETCHES,
            num_warps=4,
        )
        _multiply_rows(p, v, out, piece, 1.0, sums.m_i, lse)
        # the next piece takes their memory
        del p, sums


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
        p, ds = (_matrix(q, piece) for _ in range(2))
        _weigh(q, k, p, piece, scale, terms=terms, gradients=(grad, v, ds))
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


def _matrix(q: Tensor, piece: Piece) -> Tensor:
    """Room for one weight for every query of a piece and listed key, [B H tokens, keys]."""
    return q.new_empty(q.shape[0] * q.shape[1] * piece.sizes.tokens, piece.keys)


def _weigh(
    q: Tensor,
    k: Tensor,
    p: Tensor,
    piece: Piece,
    scale: float,
    sums: Sums | None = None,
    terms: BackwardStats | None = None,
    gradients: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Write the weights ``p``, and ``sums`` or, from ``terms``, the last of (grad, v, ds)."""
    rows, plan, sizes, keys, stretch = piece
    tile = _row_tile(rows)

    def product(x: Tensor, y: Tensor, target: Tensor) -> tuple:
        of_x, of_y = descriptors(tile, x, channels=DEPTH), descriptors(stretch, y, channels=DEPTH)
        return *of_x, *of_y, vectors(y), _tiled(target, tile, stretch)

    grid = (keys // stretch, sizes.tokens // tile, q.shape[0] * q.shape[1])
    _block_attention_split_p_kernel[grid](
        *product(q, k, p),
        *(product(*gradients) if gradients else (None,) * 4),
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
        _tiled(p, tile, columns),
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
        _tiled(p, tile, keys),
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


def _tiled(weights: Tensor, *tile: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weights, list(tile))


def _constants(x: Tensor, rows: PlanTensors) -> dict[str, int | str]:
    return {
        "QUERY_BLOCK": rows.query_block,
        "KEY_BLOCK": rows.key_block,
        "PRECISION": precision(x),
        "num_warps": 8,
        "num_stages": 3,
    }


class Cell(NamedTuple):
    """A tile of queries and a stretch of the keys its row lists: what one program multiplies."""

    batch: tl.tensor
    head: tl.tensor
    kv_head: tl.tensor
    start: tl.tensor
    key: tl.tensor
    first_key: tl.tensor


@triton.jit
def _listed_keys(plan, plan_row, place, KEY_BLOCK: tl.constexpr):
    """(the keys at these places of a row's lists, full blocks first; which places are taken)."""
    slot = place // KEY_BLOCK
    full = tl.load(plan.full.counts + plan_row)
    total = full + tl.load(plan.partial.counts + plan_row)
    complete = slot < full
    taken = slot < total
    full_indices = plan.full.indices + plan_row * plan.full.width
    partial_indices = plan.partial.indices + plan_row * plan.partial.width - full
    block = tl.load(full_indices + slot, mask=complete, other=0)
    cut = tl.load(partial_indices + slot, mask=taken & (slot >= full), other=0)
    return tl.where(complete, block, cut) * KEY_BLOCK + place % KEY_BLOCK, taken


@triton.jit
def _products(
    desc_x,
    desc_y,
    y,
    cell,
    BLOCK_M: tl.constexpr,
    STRETCH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x @ y.T [BLOCK_M, STRETCH] of the queries and keys of a cell, DEPTH channels at a time."""
    acc = tl.zeros((BLOCK_M, STRETCH), tl.float32)
    channel = tl.arange(0, DEPTH)[None, :]
    y_rows = vectors_at(y, cell.batch, cell.kv_head, cell.key) + channel
    for depth in range(0, D, DEPTH):
        # [BLOCK_M, DEPTH] and [STRETCH, DEPTH]
        a = desc_x.load([cell.batch, cell.head, cell.start, depth]).reshape(BLOCK_M, DEPTH)
        if KEY_BLOCK % STRETCH == 0:
            place = [cell.batch, cell.kv_head, cell.first_key, depth]
            b = desc_y.load(place).reshape(STRETCH, DEPTH)
        elif D % DEPTH == 0:
            b = tl.load(y_rows + depth)
        else:
            b = tl.load(y_rows + depth, mask=depth + channel < D, other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _block_attention_split_p_kernel(
    desc_q,
    desc_k,
    k,
    desc_p,
    desc_do,
    desc_v,
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
    full = tl.load(plan.full.counts + plan_row) * KEY_BLOCK
    listed = full + tl.load(plan.partial.counts + plan_row) * KEY_BLOCK
    if column < listed:
        key, taken = _listed_keys(plan, plan_row, column + tl.arange(0, STRETCH), KEY_BLOCK)
        first_key, _ = _listed_keys(plan, plan_row, column, KEY_BLOCK)
        start = sizes.begin + row
        # what lies behind the last key is masked, since no query sees it
        cell = Cell(batch, head, kv_head, start, tl.minimum(key, kv_length - 1), first_key)
        # [BLOCK_M, STRETCH]
        qk = _products(desc_q, desc_k, k, cell, BLOCK_M, STRETCH, KEY_BLOCK, D, DEPTH, PRECISION)
        query = start + tl.arange(0, BLOCK_M)
        if column + STRETCH > full:
            first, last = load_spans(plan, batch, query, sizes.q_length)
            seen = taken[None, :] & seen_between(key[None, :], first[:, None], last[:, None])
            qk = tl.where(seen, qk, float("-inf"))
        if terms is None:
            # a whole power of two, so that weights are set right without rounding
            m_i = tl.ceil(tl.max(qk, 1) * qk_scale)
            p = tl.exp2(qk * qk_scale - finite(m_i)[:, None])
            at = (plane.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * sizes.tokens
            at += row + tl.arange(0, BLOCK_M)
            tl.store(sums.m_i + at, m_i)
            tl.store(sums.l_i + at, tl.sum(p, 1))
            desc_p.store([plane * sizes.tokens + row, column], p.to(desc_p.dtype))
        else:
            at = plane.to(tl.int64) * terms.room + query
            inside = query < sizes.q_length
            lse = tl.load(terms.lse + at, mask=inside, other=float("inf"))
            delta = tl.load(terms.delta + at, mask=inside, other=0.0)
            p = tl.exp2(qk * qk_scale - lse[:, None])
            desc_p.store([plane * sizes.tokens + row, column], p.to(desc_p.dtype))
            dp = _products(
                desc_do, desc_v, v, cell, BLOCK_M, STRETCH, KEY_BLOCK, D, DEPTH, PRECISION
            )
            ds = p * (dp - delta[:, None])
            desc_ds.store([plane * sizes.tokens + row, column], ds.to(desc_ds.dtype))


@triton.jit
def _block_attention_split_lse_kernel(
    sums,
    lse,
    plan,
    stretches,
    sizes,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STRETCH: tl.constexpr,
    STRETCHES: tl.constexpr,
):
    plane = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M
    batch, _, _, plan_row = locate(tl.program_id(1), row, sizes, QUERY_BLOCK)
    blocks = tl.load(plan.full.counts + plan_row) + tl.load(plan.partial.counts + plan_row)
    used = (blocks * KEY_BLOCK + STRETCH - 1) // STRETCH
    token = row + tl.arange(0, BLOCK_M)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, used, STRETCHES):
        # [STRETCHES, BLOCK_M]
        stretch = start + tl.arange(0, STRETCHES)
        at = (plane * stretches + stretch)[:, None] * sizes.tokens + token[None, :]
        inside = stretch[:, None] < used
        m = tl.load(sums.m_i + at, mask=inside, other=float("-inf"))
        m_new = tl.maximum(m_i, tl.max(m, 0))
        m_safe = finite(m_new)
        each = tl.load(sums.l_i + at, mask=inside, other=0.0) * tl.exp2(m - m_safe[None, :])
        l_i = l_i * tl.exp2(m_i - m_safe) + tl.sum(each, 0)
        m_i = m_new
    query = sizes.begin + token
    _, last = load_spans(plan, batch, query, sizes.q_length)
    # full blocks are not masked, not even for padding queries
    blind = (m_i == float("-inf")) | (last < 0)
    total = tl.where(blind, 0.0, m_i) + tl.log2(tl.where(blind, 1.0, l_i))
    total = tl.where(blind, float("-inf"), total * LN_2)
    tl.store(lse + plane * sizes.q_length + query, total, mask=query < sizes.q_length)


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
