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
from torch import Tensor

from cab_hf.ops.attention import split_kernels as kernels
from cab_hf.ops.attention.tiles import (
    BackwardStats,
    Plan,
    PlanTensors,
    Sizes,
    arguments,
    by_column,
    descriptors,
    like,
    logit_scales,
    precision,
    sticks_out,
    tile_of,
    vectors,
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: PlanTensors,
    scale: float,
    softcap: float,
) -> None:
    """Write ``out`` [B, H, N_q, D] and its log-sum-exp ``lse``, float32 [B, H, N_q]."""
    for piece in _pieces(q, k, rows, matrices=1):
        part, plan, sizes, keys, stretch = piece
        planes, stretches, tile = q.shape[0] * q.shape[1], keys // stretch, _row_tile(rows)
        p = _matrix(q, piece)
        shape = (planes, stretches, sizes.tokens)
        sums = Sums(*(q.new_empty(shape, dtype=torch.float32) for _ in range(2)))
        _weigh(q, k, p, piece, scale, softcap, sums)
        kernels.block_attention_split_lse_kernel[(sizes.tokens // tile, planes)](
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
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from that of the output; deterministic."""
    dq = like(q)
    # summed over pieces
    dk, dv = (torch.zeros_like(like(x), dtype=torch.float32) for x in (k, v))
    for piece in _pieces(q, k, rows, matrices=2):
        p, ds = (_matrix(q, piece) for _ in range(2))
        _weigh(q, k, p, piece, scale, softcap, terms=terms, gradients=(grad, v, ds))
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
    """Room for one weight for every query of a piece and listed key, [B, H, tokens, keys]."""
    return q.new_empty(*q.shape[:2], piece.sizes.tokens, piece.keys)


def _weigh(
    q: Tensor,
    k: Tensor,
    p: Tensor,
    piece: Piece,
    scale: float,
    softcap: float,
    sums: Sums | None = None,
    terms: BackwardStats | None = None,
    gradients: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Write the weights ``p``, and ``sums`` or, from ``terms``, the last of (grad, v, ds)."""
    rows, plan, sizes, keys, stretch = piece
    tile = _row_tile(rows)

    def product(x: Tensor, y: Tensor, target: Tensor) -> tuple:
        of_x, of_y = descriptors(tile, x, channels=DEPTH), descriptors(stretch, y, channels=DEPTH)
        return *of_x, *of_y, vectors(y), *descriptors(tile, target, channels=stretch)

    grid = (keys // stretch, sizes.tokens // tile, q.shape[0] * q.shape[1])
    kernels.block_attention_split_p_kernel[grid](
        *product(q, k, p),
        *(product(*gradients) if gradients else (None,) * 4),
        sums,
        terms,
        plan,
        kv_length=k.shape[2],
        sizes=sizes,
        **logit_scales(scale, softcap),
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
    kernels.block_attention_split_query_kernel[grid](
        *descriptors(tile, p, channels=columns),
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
    kernels.block_attention_split_bwd_key_kernel[grid](
        *descriptors(tile, p, channels=keys),
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
