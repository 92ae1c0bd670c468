"""Block attention for large head dims: both products are split over D.

A tile of the output and its weights no longer fit in registers together. Recomputing the weights
for every slice of D would cost as much as the products. Therefore the weights are stored:

* The first kernel multiplies queries and keys, `DEPTH` channels at a time. It writes the weights of
  a stretch of listed keys.
* The second kernel multiplies the weights with one slice of the values' channels.

Neither shared memory nor registers grow with D. A weight has two bytes per 4 D operations, so that
writing it costs little. `WORKSPACE` limits the memory of weights: query blocks are processed in
pieces.

Weights are relative to the largest logit of their stretch. The log-sum-exp of the query corrects
them when they are read.
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
from cab_hf.plan import BlockIndices

# bytes of weights in memory at a time; a single query block is processed whatever its size
WORKSPACE = 2 << 30
# listed keys whose weights one program computes
STRETCH = 128
# channels of the output per program: by row, and by column
ROW_SLICE = 128
COLUMN_SLICES = (256, 128)
# channels of queries and keys that are multiplied at a time
DEPTH = 64
# stretches whose sums are added at a time
STRETCHES = 16


class Piece(NamedTuple):
    """Query blocks whose weights are in memory at the same time.

    Attributes:
        rows: Their part of the plan.
        plan: The same part as an argument of kernels.
        sizes: Sizes of the complete problem; ``tokens`` counts the tokens of whole blocks.
        keys: Allocated keys per query, in whole stretches.
        stretch: Listed keys whose weights one program computes.
    """

    rows: PlanTensors
    plan: Plan
    sizes: Sizes
    keys: int
    stretch: int


class Sums(NamedTuple):
    """Statistics of a query's weights in each stretch, float32 [B H, stretches, tokens].

    Attributes:
        m_i: The reference of the weights, as an exponent of two.
        l_i: The sum of the weights.
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
        # the next piece reuses this memory
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
    """Return the gradients of q, k and v, given that of the output; deterministic."""
    dq = like(q)
    # accumulated over pieces, in float32
    dk, dv = (torch.zeros_like(like(x), dtype=torch.float32) for x in (k, v))
    for piece in _pieces(q, k, rows, matrices=2):
        p, ds = (_matrix(q, piece) for _ in range(2))
        _weigh(q, k, p, piece, scale, softcap, terms=terms, gradients=(grad, v, ds))
        _multiply_rows(ds, k, dq, piece, scale)
        columns = by_column(piece.plan, triton.cdiv(k.shape[2], rows.key_block), placed=True)
        _multiply_columns(p, grad, dv, piece, columns, 1.0)
        _multiply_columns(ds, q, dk, piece, columns, scale)
        # the next piece reuses this memory
        del p, ds, columns
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _pieces(q: Tensor, k: Tensor, rows: PlanTensors, matrices: int) -> Iterator[Piece]:
    """Yield the plan in pieces whose ``matrices`` of weights fit in `WORKSPACE`."""
    block = rows.query_block
    num_rows = WORKSPACE // (matrices * q.shape[0] * q.shape[1] * block * q.element_size())
    # with twice the bytes per element, half the elements
    stretch = STRETCH * 2 // max(2, q.element_size())
    longest = [_padded(max(1, keys), stretch) for keys in _longest(rows)]
    begin = 0
    while begin < len(longest):
        end, keys = begin + 1, longest[begin]
        while end < len(longest) and (end + 1 - begin) * max(keys, longest[end]) <= num_rows:
            keys = max(keys, longest[end])
            end += 1
        # contiguous() copies nothing if there is only one piece
        full, partial = (
            BlockIndices(*(x[:, :, begin:end].contiguous() for x in (part.counts, part.indices)))
            for part in (rows.full, rows.partial)
        )
        part = rows._replace(full=full, partial=partial)
        plan, sizes = arguments(q, k, part)
        sizes = sizes._replace(begin=begin * block, tokens=(end - begin) * block)
        yield Piece(part, plan, sizes, keys, stretch)
        begin = end


def _longest(rows: PlanTensors) -> list[int]:
    """Return the most keys that any list of each query block contains.

    The function synchronises with the device, except while a CUDA graph is captured.
    """
    counts = rows.full.counts + rows.partial.counts
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        return [(rows.full.width + rows.partial.width) * rows.key_block] * counts.shape[2]
    return (counts.amax((0, 1)) * rows.key_block).tolist()


def _matrix(q: Tensor, piece: Piece) -> Tensor:
    """Allocate one weight per query of a piece and listed key, [B, H, tokens, keys]."""
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
    """Write the weights of a piece.

    Args:
        p: Receives the weights.
        sums: Receives the sums of the weights in the forward pass; None in the backward pass.
        terms: Statistics of the queries for the backward pass; None in the forward pass.
        gradients: (grad, v, ds) of the backward pass; ds receives the gradients of the logits.
    """
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
    """Compute out[i] = scale * sum_j p[i, j] x[j] over the listed keys j.

    With ``m_i`` and ``lse``, the weights come from the forward pass, relative to their stretch.
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
    """Add scale * sum_i p[i, j] x[i] to out[j], over the queries i of a piece that list key j."""
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
