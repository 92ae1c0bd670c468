"""Coarsen on the GPU: one pass over Q and K to one summary per block.

The definitions are `reference.coarsen_queries` and `reference.coarsen_keys`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.attention.tiles import vectors
from cab_hf.ops.reference import KeySummary
from cab_hf.plan import Spans

# products of so large channels are finite, and nothing competes with them
LARGEST_CHANNEL = tl.constexpr(2.0**56)


@dataclass(frozen=True, eq=False)
class QuerySummary:
    """What is known of every query block.

    Attributes:
        vectors: float32 [B, H, M_q, D].
        rows: int32 [4, B, M_q], the fields min_first, max_first, min_last, max_last of `RowSpans`.
    """

    vectors: Tensor
    rows: Tensor


def coarsen_queries(q: Tensor, spans: Spans, query_block: int, how: str) -> QuerySummary:
    """One vector per query block of q [B, H, N_q, D]: the mean, or the query of largest norm.

    Strided views are read as they are, here and below, as long as D is contiguous.
    """
    batch, heads, length, dim = q.shape
    blocks = triton.cdiv(length, query_block)
    planes = q.new_empty(1, batch, heads, blocks, dim, dtype=torch.float32)
    rows = q.new_empty(4, batch, blocks, dtype=torch.int32)
    _launch(q, spans.last, planes, query_block, how, _flat(spans.first), rows)
    return QuerySummary(planes[0], rows)


def coarsen_keys(k: Tensor, valid: Tensor, key_block: int, how: str) -> KeySummary:
    """Mean and box of every key block of k [B, H_kv, N_k, D], or its mean or loudest key.

    ``valid``, bool [B, N_k], is False for padding keys. Values are float32, `cut`.
    """
    batch, heads, length, dim = k.shape
    shape = (3 if how == "minmax" else 1, batch, heads, triton.cdiv(length, key_block), dim)
    planes = k.new_empty(shape, dtype=torch.float32)
    _launch(k, valid, planes, key_block, how)
    return KeySummary(planes)


def _launch(
    x: Tensor,
    real: Tensor,
    target: Tensor,
    block: int,
    how: str,
    first: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """``first`` and ``rows`` come with queries, whose spans are summed up on the way."""
    x, real = _flat(x), _flat(real)
    batch, heads, length, dim = x.shape
    blocks = target.shape[3]
    queries = rows is not None
    _coarsen_kernel[(batch * heads * blocks,)](
        vectors(x),
        first,
        real,
        target,
        rows,
        first.stride(0) if queries else 0,
        real.stride(0),
        target.stride(0),
        rows.stride(0) if queries else 0,
        heads,
        length,
        blocks,
        BLOCK=block,
        # more rows at a time only fill registers; a box takes three times those of a mean
        ROWS=32 if queries else 16,
        D=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        QUERIES=queries,
        LOUDEST=how == "max_l2",
        MINMAX=target.shape[0] == 3,
        HALF=x.dtype != torch.float32,
        num_warps=1,
    )


def _flat(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class Tokens(NamedTuple):
    """The block of a head that a program summarises, and where it reads tokens and which count."""

    x: tl.tensor
    stride: tl.tensor
    real: tl.tensor
    channel: tl.tensor
    block: tl.tensor
    length: tl.tensor


# not compiled again for every length
@triton.jit(do_not_specialize=["first_stride_b", "real_stride_b", "rows_plane", "length", "blocks"])
def _coarsen_kernel(
    x,
    first,
    real,
    target,
    rows,
    first_stride_b,
    real_stride_b,
    plane,
    rows_plane,
    heads,
    length,
    blocks,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    LOUDEST: tl.constexpr,
    MINMAX: tl.constexpr,
    HALF: tl.constexpr,
):
    """One block of one head: its summary to ``target``, [planes, B, heads, blocks, D]."""
    # heads run fastest: neighbouring programs read neighbouring memory of a [B, N, H, D] tensor
    pid = tl.program_id(0).to(tl.int64)
    head = pid % heads
    block = pid // heads % blocks
    b = pid // (heads * blocks)
    data = x.data + (b * x.batch + head * x.head)
    real += b * real_stride_b
    channel = tl.arange(0, BLOCK_D)
    target += ((b * heads + head) * blocks + block) * D + channel
    tokens = Tokens(data, x.token, real, channel, block, length)
    if LOUDEST:
        token = _loudest(tokens, BLOCK, ROWS, D, QUERIES)
    else:
        token, upper, lower = _mean_and_box(tokens, BLOCK, ROWS, D, QUERIES, MINMAX)
        if MINMAX:
            tl.store(target + plane, cut(upper), mask=channel < D)
            tl.store(target + 2 * plane, cut(lower), mask=channel < D)
    tl.store(target, cut(token, HALF), mask=channel < D)
    if QUERIES and head == 0:
        first += b * first_stride_b
        rows += b * blocks + block
        store_row_spans(first, real, rows, rows_plane, block, length, BLOCK)


@triton.jit
def cut(x, HALF: tl.constexpr = False):
    """float32, cut to `LARGEST_CHANNEL`, and of ``HALF`` rounded to 11 bits; NaN stays."""
    x = tl.clamp(x, -LARGEST_CHANNEL, LARGEST_CHANNEL, propagate_nan=tl.PropagateNan.ALL)
    if HALF:
        bits = x.to(tl.int32, bitcast=True)
        # to the nearest, and of two to the even one
        bits += 0xFFF + ((bits >> 13) & 1)
        x = tl.where(x == x, (bits & -0x2000).to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def _read_rows(
    tokens, start, BLOCK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr
):
    """Some tokens of a block, float32 [ROWS, BLOCK_D], and which of them count."""
    inside = start + tl.arange(0, ROWS)
    token = tokens.block * BLOCK + inside
    there = (inside < BLOCK) & (token < tokens.length)
    # what exists is read without waiting to know what counts
    x = tl.load(
        tokens.x + token[:, None] * tokens.stride + tokens.channel[None, :],
        mask=there[:, None] & (tokens.channel[None, :] < D),
        other=0.0,
    ).to(tl.float32)
    if QUERIES:
        counts = there & (tl.load(tokens.real + token, mask=there, other=-1) >= 0)
    else:
        counts = there & (tl.load(tokens.real + token, mask=there, other=0) != 0)
    return x, counts


@triton.jit
def _mean_and_box(
    tokens,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    MINMAX: tl.constexpr,
):
    # [ROWS, BLOCK_D]: reduced over rows once, at the end
    total = tl.zeros([ROWS, tokens.channel.shape[0]], tl.float32)
    upper = tl.full(total.shape, float("-inf"), tl.float32)
    lower = tl.full(total.shape, float("inf"), tl.float32)
    counted = tl.zeros([ROWS], tl.int32)
    for start in tl.static_range(0, BLOCK, ROWS):
        x, counts = _read_rows(tokens, start, BLOCK, ROWS, D, QUERIES)
        total += tl.where(counts[:, None], x, 0.0)
        counted += counts.to(tl.int32)
        if MINMAX:
            upper = tl.maximum(upper, tl.where(counts[:, None], x, float("-inf")))
            lower = tl.minimum(lower, tl.where(counts[:, None], x, float("inf")))
    count = tl.sum(counted, 0)
    mean = tl.sum(total, 0) / tl.maximum(count, 1).to(tl.float32)
    top = tl.where(count > 0, tl.max(upper, 0), 0.0)
    bottom = tl.where(count > 0, tl.min(lower, 0), 0.0)
    return mean, top, bottom


@triton.jit
def _loudest(
    tokens, BLOCK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr
):
    """The token of largest norm; the first token where no token counts, as in the reference."""
    best = -1.0
    where = tokens.block * BLOCK
    for start in tl.static_range(0, BLOCK, ROWS):
        x, counts = _read_rows(tokens, start, BLOCK, ROWS, D, QUERIES)
        norm = tl.where(counts, tl.sum(x * x, 1), -1.0)
        loudest = tl.max(norm, 0)
        here = tl.argmax(norm, 0, tie_break_left=True)
        where = tl.where(loudest > best, tokens.block * BLOCK + start + here, where)
        best = tl.maximum(best, loudest)
    at = tokens.x + where * tokens.stride + tokens.channel
    return tl.load(at, mask=tokens.channel < D, other=0.0).to(tl.float32)


@triton.jit
def store_row_spans(first, last, target, plane, block, length, BLOCK: tl.constexpr):
    """The fields of `QuerySummary.rows` of one query block."""
    nobody: tl.constexpr = 2147483647
    SIZE: tl.constexpr = triton.next_power_of_2(BLOCK)
    inside = tl.arange(0, SIZE)
    token = block * BLOCK + inside
    there = (inside < BLOCK) & (token < length)
    end = tl.load(last + token, mask=there, other=-1)
    begin = tl.load(first + token, mask=there, other=0)
    real = end >= 0
    tl.store(target, tl.min(tl.where(real, begin, nobody), 0))
    tl.store(target + plane, tl.max(tl.where(real, begin, -1), 0))
    tl.store(target + 2 * plane, tl.min(tl.where(real, end, nobody), 0))
    tl.store(target + 3 * plane, tl.max(end, 0))
