"""Block shares on the GPU: the attention that query blocks give key blocks, in two passes.

The definition is `reference.block_shares`. The first pass finds the log-sum-exp of every query, the
second computes the same logits again and sums their probabilities over key blocks. Both are as
large as the result, and nothing is N x N.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.attention.tiles import (
    LOG2_E,
    described,
    descriptors,
    finite,
    precision,
    seen_between,
    tile_of,
    vectors,
    vectors_at,
)
from cab_hf.plan import Spans

# queries of a program, keys that it takes at a time, and how it is scheduled: those of exact scores
TILE_ROWS = 64
TILE_KEYS = 128
WARPS = 4
STAGES = 3


def block_shares(
    q: Tensor,
    k: Tensor,
    spans: Spans,
    scale: float,
    query_block: int,
    key_block: int,
    reduction: str,
) -> Tensor:
    """`reference.block_shares`, float32 [B, H, M_q, M_k]; traced as one registered op."""
    largest = reduction == "max"
    told = q, k, spans.first, spans.last, scale, query_block, key_block, largest
    if torch.compiler.is_compiling():
        found = torch.ops.cab_hf.block_shares(*told)
    else:
        # Triton launches on the current device
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
            found = _block_shares(*told)
    if largest:
        return found
    return found / spans.rows(query_block).queries.clamp(min=1)[:, None, :, None]


def _block_shares(
    q: Tensor,
    k: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    query_block: int,
    key_block: int,
    largest: bool,
) -> Tensor:
    """The largest share of any query of a block, or the sum of them."""
    batch, heads, q_length, dim = q.shape
    rows = tile_of(query_block, TILE_ROWS)
    q_blocks, columns = triton.cdiv(q_length, query_block), triton.cdiv(k.shape[2], key_block)
    # tiles of rows, whole query blocks of them
    tiles = q_blocks * (query_block // rows)
    shares = q.new_zeros(batch, heads, tiles, columns, dtype=torch.float32)
    first, last = (x if x.stride(1) == 1 else x.contiguous() for x in (first, last))
    tile_keys = TILE_KEYS if TILE_KEYS % key_block == 0 else tile_of(key_block, TILE_KEYS)
    k = described(k)
    _block_shares_kernel[(tiles, batch * heads)](
        vectors(q if q.stride(-1) == 1 else q.contiguous()),
        *descriptors(tile_keys, k),
        first,
        last,
        first.stride(0),
        last.stride(0),
        shares,
        scale * LOG2_E.value,
        heads,
        heads // k.shape[1],
        q_length,
        columns,
        LARGEST=largest,
        KEY_BLOCK=key_block,
        BLOCK_M=rows,
        BLOCK_N=tile_keys,
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        PRECISION=precision(q),
        STAGES=STAGES,
        num_warps=WARPS,
    )
    if tiles == q_blocks:
        return shares
    shares = shares.unflatten(2, (q_blocks, -1))
    return shares.amax(3) if largest else shares.sum(3)


@triton.jit
def _block_shares_kernel(
    q,
    desc_k,
    first,
    last,
    first_stride,
    last_stride,
    shares,
    qk_scale,
    heads,
    group_heads,
    q_length,
    columns,
    LARGEST: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # a step of a pass is a tile of several key blocks, or a key block of several tiles
    STEP: tl.constexpr = BLOCK_N if BLOCK_N > KEY_BLOCK else KEY_BLOCK
    BLOCKS: tl.constexpr = STEP // KEY_BLOCK
    plane = tl.program_id(1)
    batch = plane // heads
    head = plane % heads
    # the longest rows first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = query < q_length
    lowest = tl.load(first + batch.to(tl.int64) * first_stride + query, mask=inside, other=0)
    highest = tl.load(last + batch.to(tl.int64) * last_stride + query, mask=inside, other=-1)
    real = highest >= 0
    # [BLOCK_M, BLOCK_D]
    channel = tl.arange(0, BLOCK_D)[None, :]
    at = vectors_at(q, batch, head, query) + channel
    x = tl.load(at, mask=inside[:, None] & (channel < D), other=0.0)

    # steps that any query sees, and those that all see wholly
    low = tl.min(tl.where(real, lowest, 2147483647), 0) // STEP
    end = tl.max(highest, 0) // STEP + 1
    whole_low = tl.cdiv(tl.max(tl.where(real, lowest, -1), 0), STEP)
    whole_high = (tl.min(tl.where(real, highest, 2147483647), 0) + 1) // STEP
    low = tl.where(tl.max(highest, 0) < 0, 0, low)
    end = tl.where(tl.max(highest, 0) < 0, 0, end)
    whole_low = tl.minimum(tl.maximum(whole_low, low), end)
    whole_high = tl.minimum(tl.maximum(whole_high, whole_low), end)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for PART in tl.static_range(3):
        begins = low if PART == 0 else whole_low if PART == 1 else whole_high
        ends = whole_low if PART == 0 else whole_high if PART == 1 else end
        for i in tl.range(begins * (STEP // BLOCK_N), ends * (STEP // BLOCK_N), num_stages=STAGES):
            qk = _logits(
                x,
                desc_k,
                batch,
                head // group_heads,
                i * BLOCK_N,
                lowest,
                highest,
                PART != 1,
                BLOCK_N,
                BLOCK_D,
                PRECISION,
            )
            m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
            m_safe = finite(m_new)
            p = tl.exp2(qk * qk_scale - m_safe[:, None])
            l_i = l_i * tl.exp2(m_i - m_safe) + tl.sum(p, 1)
            m_i = m_new

    # what a row sees nothing of weighs nothing
    lse = tl.where(real, finite(m_i) + tl.log2(tl.maximum(l_i, 1e-30)), float("inf"))
    line = shares + (plane.to(tl.int64) * tl.num_programs(0) + tile) * columns
    for PART in tl.static_range(3):
        begins = low if PART == 0 else whole_low if PART == 1 else whole_high
        ends = whole_low if PART == 0 else whole_high if PART == 1 else end
        for i in tl.range(begins, ends, num_stages=STAGES):
            given = tl.zeros((BLOCK_M, BLOCKS), tl.float32)
            for start in tl.static_range(0, STEP, BLOCK_N):
                qk = _logits(
                    x,
                    desc_k,
                    batch,
                    head // group_heads,
                    i * STEP + start,
                    lowest,
                    highest,
                    PART != 1,
                    BLOCK_N,
                    BLOCK_D,
                    PRECISION,
                )
                p = tl.exp2(qk * qk_scale - lse[:, None])
                # [BLOCK_M, BLOCKS]
                given += tl.sum(tl.reshape(p, (BLOCK_M, BLOCKS, BLOCK_N // BLOCKS)), 2)
            found = tl.max(given, 0) if LARGEST else tl.sum(given, 0)
            block = i * BLOCKS + tl.arange(0, BLOCKS)
            tl.store(line + block, found, mask=block < columns)


@triton.jit
def _logits(
    x,
    desc_k,
    batch,
    kv_head,
    column,
    lowest,
    highest,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N]: of keys from ``column`` on, before scaling; -inf for what is not seen."""
    k = desc_k.load([batch, kv_head, column, 0]).reshape(BLOCK_N, BLOCK_D)
    qk = tl.dot(x, k.T, input_precision=PRECISION)
    if MASKED:
        key = column + tl.arange(0, BLOCK_N)[None, :]
        seen = seen_between(key, lowest[:, None], highest[:, None])
        qk = tl.where(seen, qk, float("-inf"))
    return qk


_block_shares_op = torch.library.custom_op("cab_hf::block_shares", _block_shares, mutates_args=())


@_block_shares_op.register_fake
def _(q, k, first, last, scale, query_block, key_block, largest):
    q_blocks, columns = -(-q.shape[2] // query_block), -(-k.shape[2] // key_block)
    return q.new_empty(*q.shape[:2], q_blocks, columns, dtype=torch.float32)
