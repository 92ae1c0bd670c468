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
    LOG2_E,
    Rows,
    described,
    like,
    precision,
    row_arguments,
    row_terms,
    seen_between,
    sizes,
    tile_of,
    tile_start,
)
from cab_hf.ops.attention.transpose import ColumnLists, pack_columns
from cab_hf.plan import BlockLists

# bytes of weights held at a time; one block of queries is held whatever it takes
WORKSPACE = 2 << 30
# listed keys whose weights one program computes
STRETCH = 128
SCHEDULE = {"num_warps": 8, "num_stages": 3}
# channels of the output that a program holds: by row, and by column
ROW_SLICE = 128
COLUMN_SLICES = (256, 128)
# channels of queries and keys multiplied at a time
DEPTH = 64
# stretches whose sums are added at a time
STRETCHES = 16


def forward(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    """(out [B, H, N_q, D], log-sum-exp float32 [B, H, N_q])."""
    q, k, v = map(described, (q, k, v))
    out, lse = like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    for piece in _pieces(rows, q, matrices=1):
        _forward_piece(q, k, v, out, lse, piece, scale)
    return out, lse


def _forward_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    piece: Piece,
    scale: float,
) -> None:
    # a function of its own, so that weights are given back before those of the next piece
    batch, heads = q.shape[:2]
    stretch = _stretch(q)
    begin, tokens, keys, rows = piece
    weights = _matrix(q, piece)
    stretches = keys // stretch
    tops, totals = (
        q.new_empty(batch * heads, stretches, tokens, dtype=torch.float32) for _ in range(2)
    )
    tile = _row_tile(rows)
    grid = (stretches, tokens // tile, batch * heads)
    _block_attention_split_weights_kernel[grid](
        *_chunked(tile, q),
        k,
        *_chunked(stretch, k),
        *k.stride()[:3],
        *_tiled(weights, tile, stretch),
        tops,
        totals,
        *row_arguments(rows),
        scale * LOG2_E,
        begin,
        tokens,
        k.shape[2],
        *sizes(q, k, rows),
        **_constants(q, rows),
        STRETCH=stretch,
        **SCHEDULE,
    )
    _block_attention_split_levels_kernel[(tokens // tile, batch * heads)](
        tops,
        totals,
        lse,
        rows.full.counts,
        rows.partial.counts,
        rows.last,
        rows.last.stride(0),
        stretches,
        begin,
        tokens,
        *sizes(q, k, rows),
        QUERY_BLOCK=rows.query_block,
        KEY_BLOCK=rows.key_block,
        ROWS=tile,
        STRETCH=stretch,
        STRETCHES=STRETCHES,
        num_warps=4,
    )
    _multiply_rows(weights, v, out, rows, begin, q, k, 1.0, stretch, tops, lse)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Rows,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from that of ``out``; deterministic."""
    grad, q, k, v = map(described, (grad, q, k, v))
    level, delta = row_terms(grad, out, lse)
    grad_q = like(q)
    # summed over pieces
    grad_k, grad_v = (torch.zeros_like(like(x), dtype=torch.float32) for x in (k, v))
    for piece in _pieces(rows, q, matrices=2):
        _backward_piece(grad, q, k, v, (level, delta), (grad_q, grad_k, grad_v), piece, scale)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _backward_piece(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    piece: Piece,
    scale: float,
) -> None:
    """Write the piece's rows of the first of ``grads``, and add to the others."""
    level, delta = terms
    grad_q, grad_k, grad_v = grads
    batch, heads = q.shape[:2]
    stretch = _stretch(q)
    begin, tokens, keys, rows = piece
    weights, slopes = (_matrix(q, piece) for _ in range(2))
    tile = _row_tile(rows)
    grid = (keys // stretch, tokens // tile, batch * heads)
    _block_attention_split_slopes_kernel[grid](
        *_chunked(tile, q, grad),
        k,
        v,
        *_chunked(stretch, k, v),
        *k.stride()[:3],
        *v.stride()[:3],
        *_tiled(weights, tile, stretch),
        *_tiled(slopes, tile, stretch),
        level,
        delta,
        level.shape[2],
        *row_arguments(rows),
        scale * LOG2_E,
        begin,
        tokens,
        k.shape[2],
        *sizes(q, k, rows),
        **_constants(q, rows),
        STRETCH=stretch,
        **SCHEDULE,
    )
    _multiply_rows(slopes, k, grad_q, rows, begin, q, k, scale, stretch)
    kv_blocks = triton.cdiv(k.shape[2], rows.key_block)
    columns = [pack_columns(lists, kv_blocks) for lists in (rows.full, rows.partial)]
    _multiply_columns(weights, grad, grad_v, rows, columns, begin, k, 1.0)
    _multiply_columns(slopes, q, grad_k, rows, columns, begin, k, scale)


class Piece(NamedTuple):
    """Query blocks whose weights are held at the same time.

    Attributes:
        begin: the first of their queries.
        tokens: how many there are, to a whole block.
        keys: room for the listed keys of a query, in whole stretches.
        rows: their part of the plan.
    """

    begin: int
    tokens: int
    keys: int
    rows: Rows


def _pieces(rows: Rows, q: Tensor, matrices: int) -> Iterator[Piece]:
    """The plan in pieces of as many query blocks as ``matrices`` of weights may be held for."""
    block = rows.query_block
    room = WORKSPACE // (matrices * q.shape[0] * q.shape[1] * block * q.element_size())
    stretch = _stretch(q)
    longest = [_padded(max(1, keys), stretch) for keys in _longest(rows)]
    begin = 0
    while begin < len(longest):
        end, keys = begin, 0
        while end < len(longest) and (end == begin or _fits(begin, end, keys, longest, room)):
            keys = max(keys, longest[end])
            end += 1
        # contiguous() copies nothing where a piece is all there is
        full, partial = (
            BlockLists(*(x[:, :, begin:end].contiguous() for x in (part.counts, part.indices)))
            for part in (rows.full, rows.partial)
        )
        part = rows._replace(full=full, partial=partial)
        yield Piece(begin * block, (end - begin) * block, keys, part)
        begin = end


def _fits(begin: int, end: int, keys: int, longest: list[int], room: int) -> bool:
    return (end + 1 - begin) * max(keys, longest[end]) <= room


def _longest(rows: Rows) -> list[int]:
    """The most keys that any list of each query block holds. Waits for the device if it may."""
    counts = rows.full.counts + rows.partial.counts
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        return [(rows.full.width + rows.partial.width) * rows.key_block] * counts.shape[2]
    return (counts.amax((0, 1)) * rows.key_block).tolist()


def _matrix(q: Tensor, piece: Piece) -> Tensor:
    """Room for one weight for every query of a piece and listed key, [B H tokens, keys]."""
    return q.new_empty(q.shape[0] * q.shape[1] * piece.tokens, piece.keys)


def _multiply_rows(
    weights: Tensor,
    x: Tensor,
    out: Tensor,
    rows: Rows,
    begin: int,
    q: Tensor,
    k: Tensor,
    scale: float,
    stretch: int,
    tops: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """out[i] = scale * the sum over listed keys j of weights[i, j] x[j].

    With ``tops`` and ``lse`` the weights are those of a forward pass, relative to their stretch.
    """
    tile, columns = _row_tile(rows), _column_tile(rows)
    planes = q.shape[0] * q.shape[1]
    tokens = weights.shape[0] // planes
    grid = (triton.cdiv(x.shape[3], ROW_SLICE), tokens // tile, planes)
    _block_attention_split_rows_kernel[grid](
        *_tiled(weights, tile, columns),
        _sliced(x, columns, ROW_SLICE),
        _sliced(out, tile, ROW_SLICE),
        tops,
        lse,
        *row_arguments(rows),
        scale,
        begin,
        tokens,
        weights.shape[1] // stretch,
        *sizes(q, k, rows),
        QUERY_BLOCK=rows.query_block,
        KEY_BLOCK=rows.key_block,
        ROWS=tile,
        COLUMNS=columns,
        STRETCH=stretch,
        WIDTH=ROW_SLICE,
        RELATIVE=tops is not None,
        PRECISION=precision(x),
        **SCHEDULE,
    )


def _multiply_columns(
    weights: Tensor,
    x: Tensor,
    out: Tensor,
    rows: Rows,
    columns: list[ColumnLists],
    begin: int,
    k: Tensor,
    scale: float,
) -> None:
    """out[j] += scale * the sum over the queries i of a piece that list j of weights[i, j] x[i]."""
    tile, keys = min(64, _row_tile(rows)), _column_tile(rows)
    batch, heads, _, dim = x.shape
    width = min(COLUMN_SLICES, key=lambda width: _padded(dim, width))
    kv_blocks = triton.cdiv(k.shape[2], rows.key_block)
    grid = (
        triton.cdiv(dim, width),
        triton.cdiv(k.shape[2], keys),
        batch * k.shape[1],
    )
    _block_attention_split_columns_kernel[grid](
        *_tiled(weights, tile, keys),
        _sliced(x, tile, width),
        out,
        *out.stride()[:3],
        rows.full.counts,
        *(tensor for x in columns for tensor in (x.counts, x.starts, x.rows, x.slots)),
        scale,
        begin,
        weights.shape[0] // (batch * heads),
        k.shape[2],
        kv_blocks,
        heads,
        k.shape[1],
        rows.full.counts.shape[1],
        rows.full.counts.shape[2],
        QUERY_BLOCK=rows.query_block,
        KEY_BLOCK=rows.key_block,
        ROWS=tile,
        COLUMNS=keys,
        WIDTH=width,
        D=dim,
        PRECISION=precision(x),
        **SCHEDULE,
    )


def _stretch(q: Tensor) -> int:
    # twice the bytes an element, half the elements
    return STRETCH * 2 // max(2, q.element_size())


def _row_tile(rows: Rows) -> int:
    return tile_of(rows.query_block, 128)


def _column_tile(rows: Rows) -> int:
    return tile_of(rows.key_block, 64)


def _padded(dim: int, width: int) -> int:
    return triton.cdiv(dim, width) * width


def _chunked(tile: int, *tensors: Tensor) -> list[TensorDescriptor]:
    return [_sliced(x, tile, DEPTH) for x in tensors]


def _sliced(x: Tensor, tile: int, channels: int) -> TensorDescriptor:
    """[B, H, N, D] in tiles of so many tokens and channels."""
    return TensorDescriptor.from_tensor(x, [1, 1, tile, channels])


def _tiled(weights: Tensor, *tile: int) -> list[TensorDescriptor]:
    return [TensorDescriptor.from_tensor(weights, list(tile))]


def _constants(q: Tensor, rows: Rows) -> dict[str, int | str]:
    return {
        "QUERY_BLOCK": rows.query_block,
        "KEY_BLOCK": rows.key_block,
        "ROWS": _row_tile(rows),
        "D": q.shape[3],
        "DEPTH": DEPTH,
        "PRECISION": precision(q),
    }


# --- kernels


@triton.jit
def _listed_keys(
    full_counts,
    full_indices,
    partial_counts,
    partial_indices,
    full_width,
    partial_width,
    plan_row,
    place,
    KEY_BLOCK: tl.constexpr,
):
    """(the keys at these places of a row's lists, full blocks first; which places are taken)."""
    slot = place // KEY_BLOCK
    full = tl.load(full_counts + plan_row)
    total = full + tl.load(partial_counts + plan_row)
    whole = slot < full
    taken = slot < total
    block = tl.load(full_indices + plan_row * full_width + slot, mask=whole, other=0)
    cut = tl.load(
        partial_indices + plan_row * partial_width + slot - full,
        mask=taken & (slot >= full),
        other=0,
    )
    return tl.where(whole, block, cut) * KEY_BLOCK + place % KEY_BLOCK, taken


@triton.jit
def _logits(
    q,
    k,
    k_tiles,
    k_batch,
    k_head,
    k_token,
    key,
    first_key,
    batch,
    head,
    kv_head,
    start,
    kv_length,
    ROWS: tl.constexpr,
    STRETCH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products [ROWS, STRETCH] of a tile of q with the vectors of k at ``key``, DEPTH at a time."""
    acc = tl.zeros((ROWS, STRETCH), tl.float32)
    channel = tl.arange(0, DEPTH)
    # what lies behind the last key is masked later, since no query sees it
    key = tl.minimum(key, kv_length - 1).to(tl.int64)
    k += batch.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head
    k += key[:, None] * k_token + channel[None, :]
    for depth in range(0, D, DEPTH):
        queries = q.load([batch, head, start, depth]).reshape(ROWS, DEPTH)
        if KEY_BLOCK % STRETCH == 0:
            keys = k_tiles.load([batch, kv_head, first_key, depth]).reshape(STRETCH, DEPTH)
        elif D % DEPTH == 0:
            keys = tl.load(k + depth)
        else:
            keys = tl.load(k + depth, mask=depth + channel[None, :] < D, other=0.0)
        acc = tl.dot(queries, keys.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _block_attention_split_weights_kernel(
    q,
    k,
    k_tiles,
    k_batch,
    k_head,
    k_token,
    weights,
    tops,
    totals,
    full_counts,
    full_indices,
    partial_counts,
    partial_indices,
    full_width,
    partial_width,
    first,
    last,
    first_stride,
    last_stride,
    scale,
    begin,
    tokens,
    kv_length,
    heads,
    kv_heads,
    plan_heads,
    q_length,
    q_blocks,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    STRETCH: tl.constexpr,
):
    plane = tl.program_id(2).to(tl.int64)
    batch = tl.program_id(2) // heads
    head = tl.program_id(2) % heads
    kv_head = head // (heads // kv_heads)
    row = tl.program_id(1) * ROWS
    plan_row = (batch * plan_heads + head // (heads // plan_heads)).to(tl.int64) * q_blocks
    plan_row += row // QUERY_BLOCK
    place = tl.program_id(0) * STRETCH + tl.arange(0, STRETCH)
    full = tl.load(full_counts + plan_row) * KEY_BLOCK
    listed = full + tl.load(partial_counts + plan_row) * KEY_BLOCK
    if tl.program_id(0) * STRETCH < listed:
        key, taken = _listed_keys(
            full_counts,
            full_indices,
            partial_counts,
            partial_indices,
            full_width,
            partial_width,
            plan_row,
            place,
            KEY_BLOCK,
        )
        first_key, _ = _listed_keys(
            full_counts,
            full_indices,
            partial_counts,
            partial_indices,
            full_width,
            partial_width,
            plan_row,
            tl.program_id(0) * STRETCH,
            KEY_BLOCK,
        )
        start = begin + row
        logits = _logits(
            q,
            k,
            k_tiles,
            k_batch,
            k_head,
            k_token,
            key,
            first_key,
            batch,
            head,
            kv_head,
            start,
            kv_length,
            ROWS,
            STRETCH,
            KEY_BLOCK,
            D,
            DEPTH,
            PRECISION,
        )
        if tl.program_id(0) * STRETCH + STRETCH > full:
            query = start + tl.arange(0, ROWS)
            there = query < q_length
            low = tl.load(first + batch.to(tl.int64) * first_stride + query, mask=there, other=0)
            high = tl.load(last + batch.to(tl.int64) * last_stride + query, mask=there, other=-1)
            seen = taken[None, :] & seen_between(key[None, :], low[:, None], high[:, None])
            logits = tl.where(seen, logits, float("-inf"))
        # a whole power of two, so that weights are set right without rounding
        top = tl.ceil(tl.max(logits, 1) * scale)
        level = tl.where(top == float("-inf"), 0.0, top)
        shares = tl.exp2(logits * scale - level[:, None])
        column = tl.program_id(0) * STRETCH
        target = tl.program_id(2) * tokens + row
        weights.store([target, column], shares.to(weights.dtype))
        at = (plane * (tl.num_programs(0)) + tl.program_id(0)) * tokens + row + tl.arange(0, ROWS)
        tl.store(tops + at, top)
        tl.store(totals + at, tl.sum(shares, 1))


@triton.jit
def _block_attention_split_levels_kernel(
    tops,
    totals,
    lse,
    full_counts,
    partial_counts,
    last,
    last_stride,
    stretches,
    begin,
    tokens,
    heads,
    kv_heads,
    plan_heads,
    q_length,
    q_blocks,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STRETCH: tl.constexpr,
    STRETCHES: tl.constexpr,
):
    plane = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    row = tl.program_id(0) * ROWS
    plan_row = (batch * plan_heads + head // (heads // plan_heads)).to(tl.int64) * q_blocks
    plan_row += row // QUERY_BLOCK
    listed = (tl.load(full_counts + plan_row) + tl.load(partial_counts + plan_row)) * KEY_BLOCK
    used = (listed + STRETCH - 1) // STRETCH
    token = row + tl.arange(0, ROWS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, used, STRETCHES):
        stretch = start + tl.arange(0, STRETCHES)
        at = (plane * stretches + stretch)[:, None] * tokens + token[None, :]
        inside = stretch[:, None] < used
        each = tl.load(tops + at, mask=inside, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(each, 0))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        sums = tl.load(totals + at, mask=inside, other=0.0) * tl.exp2(each - level[None, :])
        total = total * tl.exp2(top - level) + tl.sum(sums, 0)
        top = new_top
    query = begin + token
    high = tl.load(last + batch.to(tl.int64) * last_stride + query, mask=query < q_length, other=-1)
    # full blocks are not masked, not even for padding queries
    blind = (top == float("-inf")) | (high < 0)
    level = tl.where(blind, 0.0, top) + tl.log2(tl.where(blind, 1.0, total))
    level = tl.where(blind, float("-inf"), level * 0.6931471805599453)
    tl.store(lse + plane * q_length + query, level, mask=query < q_length)


@triton.jit
def _block_attention_split_rows_kernel(
    weights,
    x,
    out,
    tops,
    lse,
    full_counts,
    full_indices,
    partial_counts,
    partial_indices,
    full_width,
    partial_width,
    first,
    last,
    first_stride,
    last_stride,
    scale,
    begin,
    tokens,
    stretches,
    heads,
    kv_heads,
    plan_heads,
    q_length,
    q_blocks,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRETCH: tl.constexpr,
    WIDTH: tl.constexpr,
    RELATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    plane = tl.program_id(2).to(tl.int64)
    batch = tl.program_id(2) // heads
    head = tl.program_id(2) % heads
    kv_head = head // (heads // kv_heads)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    channel = tl.program_id(0) * WIDTH
    plan_row = (batch * plan_heads + head // (heads // plan_heads)).to(tl.int64) * q_blocks
    plan_row += row // QUERY_BLOCK
    full = tl.load(full_counts + plan_row)
    listed = full + tl.load(partial_counts + plan_row)
    full_indices += plan_row * full_width
    partial_indices += plan_row * partial_width - full
    token = row + tl.arange(0, ROWS)
    if RELATIVE:
        query = begin + token
        there = query < q_length
        level = tl.load(lse + plane * q_length + query, mask=there, other=float("-inf"))
        blind = level == float("-inf")
        level = tl.where(blind, 0.0, level * 1.4426950408889634)
        whole = tl.ceil(level)
        tops += plane * stretches * tokens + token

    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    TILES: tl.constexpr = KEY_BLOCK // COLUMNS
    for i in range(0, listed * TILES):
        slot = i // TILES
        block = tl.load((full_indices if slot < full else partial_indices) + slot)
        shares = weights.load([tl.program_id(2) * tokens + row, i * COLUMNS])
        if RELATIVE:
            top = tl.load(tops + i * COLUMNS // STRETCH * tokens)
            shares = shares * tl.exp2(top - whole).to(shares.dtype)[:, None]
        column = block * KEY_BLOCK + i % TILES * COLUMNS
        vectors = x.load([batch, kv_head, column, channel]).reshape(COLUMNS, WIDTH)
        acc = tl.dot(shares, vectors, acc, input_precision=PRECISION)
    acc = acc * scale
    if RELATIVE:
        acc = acc * tl.where(blind, 0.0, tl.exp2(whole - level))[:, None]
    acc = acc.to(out.dtype)
    out.store([batch, head, begin + row, channel], acc.reshape(1, 1, ROWS, WIDTH))


@triton.jit
def _block_attention_split_slopes_kernel(
    q,
    grad,
    k,
    v,
    k_tiles,
    v_tiles,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    weights,
    slopes,
    levels,
    deltas,
    term_room,
    full_counts,
    full_indices,
    partial_counts,
    partial_indices,
    full_width,
    partial_width,
    first,
    last,
    first_stride,
    last_stride,
    scale,
    begin,
    tokens,
    kv_length,
    heads,
    kv_heads,
    plan_heads,
    q_length,
    q_blocks,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    STRETCH: tl.constexpr,
):
    plane = tl.program_id(2).to(tl.int64)
    batch = tl.program_id(2) // heads
    head = tl.program_id(2) % heads
    kv_head = head // (heads // kv_heads)
    row = tl.program_id(1) * ROWS
    plan_row = (batch * plan_heads + head // (heads // plan_heads)).to(tl.int64) * q_blocks
    plan_row += row // QUERY_BLOCK
    place = tl.program_id(0) * STRETCH + tl.arange(0, STRETCH)
    full = tl.load(full_counts + plan_row) * KEY_BLOCK
    listed = full + tl.load(partial_counts + plan_row) * KEY_BLOCK
    if tl.program_id(0) * STRETCH < listed:
        key, taken = _listed_keys(
            full_counts,
            full_indices,
            partial_counts,
            partial_indices,
            full_width,
            partial_width,
            plan_row,
            place,
            KEY_BLOCK,
        )
        first_key, _ = _listed_keys(
            full_counts,
            full_indices,
            partial_counts,
            partial_indices,
            full_width,
            partial_width,
            plan_row,
            tl.program_id(0) * STRETCH,
            KEY_BLOCK,
        )
        start = begin + row
        logits = _logits(
            q,
            k,
            k_tiles,
            k_batch,
            k_head,
            k_token,
            key,
            first_key,
            batch,
            head,
            kv_head,
            start,
            kv_length,
            ROWS,
            STRETCH,
            KEY_BLOCK,
            D,
            DEPTH,
            PRECISION,
        )
        query = start + tl.arange(0, ROWS)
        there = query < q_length
        level = tl.load(levels + plane * term_room + query, mask=there, other=float("inf"))
        delta = tl.load(deltas + plane * term_room + query, mask=there, other=0.0)
        shares = tl.exp2(logits * scale - level[:, None])
        if tl.program_id(0) * STRETCH + STRETCH > full:
            low = tl.load(first + batch.to(tl.int64) * first_stride + query, mask=there, other=0)
            high = tl.load(last + batch.to(tl.int64) * last_stride + query, mask=there, other=-1)
            seen = taken[None, :] & seen_between(key[None, :], low[:, None], high[:, None])
            shares = tl.where(seen, shares, 0.0)
        column = tl.program_id(0) * STRETCH
        target = tl.program_id(2) * tokens + row
        weights.store([target, column], shares.to(weights.dtype))
        products = _logits(
            grad,
            v,
            v_tiles,
            v_batch,
            v_head,
            v_token,
            key,
            first_key,
            batch,
            head,
            kv_head,
            start,
            kv_length,
            ROWS,
            STRETCH,
            KEY_BLOCK,
            D,
            DEPTH,
            PRECISION,
        )
        slopes.store([target, column], (shares * (products - delta[:, None])).to(slopes.dtype))


@triton.jit
def _block_attention_split_columns_kernel(
    weights,
    x,
    out,
    out_batch,
    out_head,
    out_token,
    row_counts,
    full_counts,
    full_starts,
    full_rows,
    full_slots,
    partial_counts,
    partial_starts,
    partial_rows,
    partial_slots,
    scale,
    begin,
    tokens,
    kv_length,
    kv_blocks,
    heads,
    kv_heads,
    plan_heads,
    q_blocks,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    batch = tl.program_id(2) // kv_heads
    kv_head = tl.program_id(2) % kv_heads
    start = tl.program_id(1) * COLUMNS
    channel = tl.program_id(0) * WIDTH
    group = heads // kv_heads
    TILES: tl.constexpr = QUERY_BLOCK // ROWS
    acc = tl.zeros((COLUMNS, WIDTH), tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
        plane = batch * heads + head
        plan_plane = (batch * plan_heads + head // (heads // plan_heads)).to(tl.int64)
        column = plan_plane * kv_blocks + start // KEY_BLOCK
        for PARTIAL in tl.static_range(2):
            counts = partial_counts if PARTIAL else full_counts
            starts = partial_starts if PARTIAL else full_starts
            offset = tl.load(starts + column)
            rows = (partial_rows if PARTIAL else full_rows) + offset
            slots = (partial_slots if PARTIAL else full_slots) + offset
            for i in range(0, tl.load(counts + column) * TILES):
                row = tile_start(rows, i, QUERY_BLOCK, ROWS)
                slot = tl.load(slots + i // TILES)
                if PARTIAL:
                    slot += tl.load(row_counts + plan_plane * q_blocks + row // QUERY_BLOCK)
                place = slot * KEY_BLOCK + start % KEY_BLOCK
                shares = weights.load([plane * tokens + row, place])
                vectors = x.load([batch, head, begin + row, channel]).reshape(ROWS, WIDTH)
                acc = tl.dot(shares.T, vectors, acc, input_precision=PRECISION)
    key = (start + tl.arange(0, COLUMNS))[:, None]
    lane = channel + tl.arange(0, WIDTH)[None, :]
    inside = (key < kv_length) & (lane < D)
    out += batch.to(tl.int64) * out_batch + kv_head.to(tl.int64) * out_head
    out += key.to(tl.int64) * out_token + lane
    tl.store(out, tl.load(out, mask=inside, other=0.0) + acc * scale, mask=inside)
