"""Exact scores on the GPU: what queries need of every key block, by whole queries and whole keys.

The definition is `reference.exact_scores`, which goes by the loudest key of a block and so takes
next to no exponentials. It is one sweep over the keys: what a tile of rows found, one number a row
and key block, waits in a scratch row until its normaliser is known.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Tiles(NamedTuple):
    """Sampled queries of a program, keys that it takes at a time, and how it is scheduled."""

    rows: int
    keys: int
    warps: int
    stages: int


# from an H200
TILES = Tiles(64, 128, 4, 3)
# the most key blocks of a row that are normalised at a time
CHUNK = 64
# bytes of scratch at a time
SCRATCH_AT_A_TIME = 256 << 20


def exact_scores(
    q: Tensor,
    k: Tensor,
    heads: Tensor,
    spans: Spans,
    scale: float,
    query_block: int,
    key_block: int,
    stride: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """`reference.exact_scores` of some heads: (most, log mass), float32 [B, n, M_q, width] both.

    The first M_k columns are key blocks. Log masses are up to a constant of the row.

    Args:
        q: [B, H, N_q, D]. k: [B, H_kv, N_k, D].
        heads: int32 [n], which heads of q.
        stride: so many queries of a block stand for one that is looked at; divides ``query_block``.
        width: room for the columns of a row, a multiple of 32.
    """
    batch, q_heads, q_length, dim = q.shape
    # sampled queries of a query block go to groups of a power of two, which tiles hold whole
    samples = query_block // stride
    group = tile_of(samples, TILES.rows)
    rows = triton.cdiv(q_length, query_block) * samples
    most = q.new_empty(batch, len(heads), rows // group, width, dtype=torch.float32)
    mass = torch.empty_like(most)
    tiles, planes = triton.cdiv(rows, TILES.rows), batch * len(heads)
    step = max(1, SCRATCH_AT_A_TIME // (4 * planes * TILES.rows * width))
    scratch = q.new_empty(min(step, tiles) * planes, width, TILES.rows, dtype=torch.float32)
    first, last = (x if x.stride(1) == 1 else x.contiguous() for x in (spans.first, spans.last))
    tile_keys = TILES.keys if TILES.keys % key_block == 0 else tile_of(key_block, TILES.keys)
    k = described(k)
    # the longest rows first
    for end in range(tiles, 0, -step):
        begin = max(0, end - step)
        _exact_scores_kernel[(end - begin, planes)](
            vectors(q if q.stride(-1) == 1 else q.contiguous()),
            *descriptors(tile_keys, k),
            heads,
            first,
            last,
            first.stride(0),
            last.stride(0),
            scratch,
            most,
            mass,
            scale * LOG2_E.value,
            begin,
            len(heads),
            q_heads // k.shape[1],
            q_length,
            rows // group,
            width,
            STRIDE=stride,
            GROUP=group,
            KEY_BLOCK=key_block,
            BLOCK_M=TILES.rows,
            BLOCK_N=tile_keys,
            CHUNK=tile_of(width, CHUNK),
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            PRECISION=precision(q),
            STAGES=TILES.stages,
            num_warps=TILES.warps,
        )
    if group != samples:
        most, mass = (x.unflatten(2, (-1, samples // group)) for x in (most, mass))
        most, mass = most.amax(3), mass.sum(3)
    # far below any share that counts, and finite
    return most, mass.clamp_(min=1e-30).log_()


@triton.jit
def _exact_scores_kernel(
    q,
    desc_k,
    heads,
    first,
    last,
    first_stride,
    last_stride,
    scratch,
    most,
    mass,
    qk_scale,
    begin,
    count,
    group_heads,
    q_length,
    groups,
    width,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # a step of the sweep is a tile of several key blocks, or a key block of several tiles
    STEP: tl.constexpr = BLOCK_N if BLOCK_N > KEY_BLOCK else KEY_BLOCK
    BLOCKS: tl.constexpr = STEP // KEY_BLOCK
    plane = tl.program_id(1)
    batch = plane // count
    head = tl.load(heads + plane % count)
    turn = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = begin + turn
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row * STRIDE
    inside = query < q_length
    lowest = tl.load(first + batch.to(tl.int64) * first_stride + query, mask=inside, other=0)
    highest = tl.load(last + batch.to(tl.int64) * last_stride + query, mask=inside, other=-1)
    real = highest >= 0
    # [BLOCK_M, BLOCK_D]
    channel = tl.arange(0, BLOCK_D)[None, :]
    at = vectors_at(q, batch, head, query) + channel
    x = tl.load(at, mask=inside[:, None] & (channel < D), other=0.0)

    # tiles of keys that some row sees, and those that all rows see wholly
    low = tl.min(tl.where(real, lowest, 2147483647), 0) // STEP
    high = tl.max(highest, 0) // STEP
    whole_low = tl.cdiv(tl.max(tl.where(real, lowest, -1), 0), STEP)
    whole_high = (tl.min(tl.where(real, highest, 2147483647), 0) + 1) // STEP
    low = tl.where(tl.max(highest, 0) < 0, 0, low)
    end = tl.where(tl.max(highest, 0) < 0, 0, high + 1)
    whole_low = tl.minimum(tl.maximum(whole_low, low), end)
    whole_high = tl.minimum(tl.maximum(whole_high, whole_low), end)

    place = (tl.program_id(0) * tl.num_programs(1) + plane).to(tl.int64) * width * BLOCK_M
    kept = scratch + place + tl.arange(0, BLOCK_M)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for PART in tl.static_range(3):
        begins = low if PART == 0 else whole_low if PART == 1 else whole_high
        ends = whole_low if PART == 0 else whole_high if PART == 1 else end
        for i in tl.range(begins, ends, num_stages=STAGES):
            top = tl.full((BLOCK_M, BLOCKS), float("-inf"), tl.float32)
            for start in tl.static_range(0, STEP, BLOCK_N):
                # [BLOCK_N, D], then [BLOCK_M, BLOCK_N]
                column = i * STEP + start
                k = desc_k.load([batch, head // group_heads, column, 0]).reshape(BLOCK_N, BLOCK_D)
                qk = tl.dot(x, k.T, input_precision=PRECISION)
                if PART != 1:
                    key = column + tl.arange(0, BLOCK_N)[None, :]
                    seen = seen_between(key, lowest[:, None], highest[:, None])
                    qk = tl.where(seen, qk, float("-inf"))
                # [BLOCK_M, BLOCKS]
                by_block = tl.reshape(qk, (BLOCK_M, BLOCKS, BLOCK_N // BLOCKS))
                top = tl.maximum(top, tl.max(by_block, 2) * qk_scale)
            m_new = tl.maximum(m_i, tl.max(top, 1))
            m_safe = finite(m_new)
            l_i = l_i * tl.exp2(m_i - m_safe) + tl.sum(tl.exp2(top - m_safe[:, None]), 1)
            m_i = m_new
            block = i * BLOCKS + tl.arange(0, BLOCKS)
            tl.store(kept[:, None] + block[None, :].to(tl.int64) * BLOCK_M, top)
    tl.debug_barrier()

    # what a row sees nothing of weighs nothing
    norm = tl.where(real, finite(m_i) + tl.log2(tl.maximum(l_i, 1e-30)), float("inf"))
    line = tile * (BLOCK_M // GROUP) + tl.arange(0, BLOCK_M // GROUP)
    written = line < groups
    target = (plane.to(tl.int64) * groups + line) * width
    for j0 in range(0, width, CHUNK):
        column = j0 + tl.arange(0, CHUNK)
        there = (column >= low * BLOCKS) & (column < end * BLOCKS)
        # [CHUNK, BLOCK_M], then [CHUNK, BLOCK_M / GROUP]
        top = tl.load(
            kept[None, :] + column[:, None].to(tl.int64) * BLOCK_M,
            mask=there[:, None],
            other=float("-inf"),
        )
        share = tl.exp2(top - norm[None, :])
        share = tl.reshape(share, (CHUNK, BLOCK_M // GROUP, GROUP))
        cell = target[None, :] + column[:, None]
        tl.store(most + cell, tl.max(share, 2), mask=written[None, :])
        tl.store(mass + cell, tl.sum(share, 2), mask=written[None, :])
