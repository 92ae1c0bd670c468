"""Block attention for head dims up to 256: one kernel holds a tile of the output in registers.

The forward pass is FlashAttention-2's loop (Dao, 2023) over the key blocks that a row lists. It
reads full blocks without a mask, then partial blocks with a mask, merged by the online softmax. The
backward pass makes two passes, by query tile and by key tile. Thus no sum uses atomics, and
gradients are the same in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import launch
from cab_hf.ops.attention.tiles import (
    LN_2,
    BackwardStats,
    PlanTensors,
    arguments,
    by_column,
    descriptors,
    like,
    load_spans,
    load_tile,
    locate,
    logit_scales,
    online_softmax_update,
    only_seen,
    plan_plane,
    precision,
    seen_between,
    sticks_out,
    store_tile,
    tanh,
    tile_of,
    tile_start,
)


class Tile(NamedTuple):
    """Size of the tiles of a program, and its schedule.

    Attributes:
        block_m: Queries per tile.
        block_n: Keys per tile.
        warps: Warps per program.
        stages: Stages of the software pipeline.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


# key tiles at the start of the sequence (sinks) whose gradients are summed one head at a time
LEAD = 4
# largest head dim -> tiles, from `speed attention` on an H200
TILES = {
    "forward": {64: Tile(128, 64, 4, 2), 128: Tile(128, 64, 4, 2), 256: Tile(128, 64, 8, 2)},
    "query gradient": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 2)},
    "key gradient": {64: Tile(128, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(32, 64, 8, 2)},
}
# for kernels that read by pointers: tiles that fit 99 KiB of shared memory, and AMD's 64 KiB, with
# the fewest spills, see `tests/ops/test_kernels_compile.py`; their speed was not measured
POINTER_TILES = {
    "forward": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    "query gradient": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 4, 2)},
    "key gradient": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
}


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
    plan, sizes = arguments(q, k, rows)
    tile = _tile("forward", q, rows)
    tiles = triton.cdiv(q.shape[2], tile.block_m)
    _block_attention_fwd_kernel[(tiles, q.shape[0] * q.shape[1])](
        *descriptors(tile.block_m, q),
        *descriptors(tile.block_n, k, v),
        *descriptors(tile.block_m, out),
        lse,
        plan,
        sizes=sizes,
        **logit_scales(scale, softcap),
        **_constants(tile, q, rows),
        STICKS_OUT=sticks_out(rows, q.shape[2], k.shape[2]),
    )


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
    dq, dk, dv = map(like, (q, k, v))
    plan, sizes = arguments(q, k, rows)
    batch, heads, kv_heads = q.shape[0], sizes.heads, sizes.kv_heads

    tile = _tile("query gradient", q, rows)
    tiles = triton.cdiv(q.shape[2], tile.block_m)
    _block_attention_bwd_query_kernel[(tiles, batch * heads)](
        *descriptors(tile.block_m, q, grad),
        *descriptors(tile.block_n, k, v),
        *descriptors(tile.block_m, dq),
        terms,
        plan,
        scale,
        sizes=sizes,
        **logit_scales(scale, softcap),
        **_constants(tile, q, rows),
    )

    tile = _tile("key gradient", q, rows)
    tiles = triton.cdiv(k.shape[2], tile.block_n)
    lead = min(LEAD, tiles)
    sinks = [
        x.new_empty(batch, heads, lead * tile.block_n, x.shape[3], dtype=torch.float32)
        for x in (k, v)
    ]
    kv_blocks = triton.cdiv(k.shape[2], rows.key_block)
    _block_attention_bwd_key_kernel[(batch * (lead * heads + (tiles - lead) * kv_heads),)](
        *descriptors(tile.block_m, q, grad),
        *descriptors(tile.block_n, k, v, dk, dv, *sinks),
        terms,
        by_column(plan, kv_blocks),
        scale,
        kv_blocks,
        lead,
        batch,
        sizes=sizes,
        **logit_scales(scale, softcap),
        **_constants(tile, q, rows),
    )
    for target, parts in zip((dk, dv), sinks, strict=True):
        first = target[:, :, : parts.shape[2]]
        first.copy_(parts.unflatten(1, (kv_heads, -1)).sum(2)[:, :, : first.shape[2]])
    return dq, dk, dv


def _tile(kernel: str, q: Tensor, rows: PlanTensors) -> Tile:
    """Return the tile for this head dim, reduced to divide the plan's blocks."""
    if launch.reads_by_descriptor(q.device):
        tile = next(tile for dim, tile in TILES[kernel].items() if q.shape[3] <= dim)
    else:
        # a float32 needs the memory of two 16-bit numbers
        width = q.shape[3] * q.element_size() // 2
        tile = next(tile for dim, tile in POINTER_TILES[kernel].items() if width <= dim)
        if not launch.packed(q):
            # AMD's warps have 64 lanes
            tile = tile._replace(block_m=tile.block_m // 2, warps=4)
    if q.element_size() > 2:
        tile = tile._replace(block_m=min(tile.block_m, 64), block_n=32, stages=1)
    return tile._replace(
        block_m=tile_of(rows.query_block, tile.block_m),
        block_n=tile_of(rows.key_block, tile.block_n),
    )


def _constants(tile: Tile, q: Tensor, rows: PlanTensors) -> dict[str, int | str]:
    return {
        "QUERY_BLOCK": rows.query_block,
        "KEY_BLOCK": rows.key_block,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "D": triton.next_power_of_2(q.shape[3]),
        "PRECISION": precision(q),
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


@triton.jit
def _block_attention_fwd_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_out,
    lse,
    plan,
    qk_scale,
    cap_scale,
    sizes,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
    STICKS_OUT: tl.constexpr,
):
    # the longest rows start first, so that none is left for the end
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch, head, kv_head, plan_row = locate(tl.program_id(1), start, sizes, QUERY_BLOCK)
    # [BLOCK_M, D]
    q = load_tile(desc_q, batch, head, start, 0, BLOCK_M, D)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for MASKED in tl.static_range(2):
        lists = plan[MASKED]
        indices = lists.indices + plan_row * lists.width
        tiles = tl.load(lists.counts + plan_row) * (KEY_BLOCK // BLOCK_N)
        if MASKED:
            # loaded late: registers are scarce in the loop over full blocks
            query = start + tl.arange(0, BLOCK_M)
            first, last = load_spans(plan, batch, query, sizes.q_length)
        for i in tl.range(0, tiles, num_stages=STAGES):
            # [BLOCK_N, D], then [BLOCK_M, BLOCK_N]
            column = tile_start(indices, i, KEY_BLOCK, BLOCK_N)
            k = load_tile(desc_k, batch, kv_head, column, 0, BLOCK_N, D)
            qk = tl.dot(q, k.T, input_precision=PRECISION)
            if CAPPED:
                qk = tanh(qk * cap_scale)
            if MASKED:
                key = column + tl.arange(0, BLOCK_N)[None, :]
                qk = tl.where(seen_between(key, first[:, None], last[:, None]), qk, float("-inf"))
            m_i, l_i, p, alpha = online_softmax_update(m_i, l_i, qk, qk_scale, MASKED)
            acc = acc * alpha[:, None]
            v = load_tile(desc_v, batch, kv_head, column, 0, BLOCK_N, D)
            if MASKED and STICKS_OUT:
                v = only_seen(v, column + tl.arange(0, BLOCK_N), first, last)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    # full blocks are not masked, not even for padding queries
    blind = (last < 0) | (l_i == 0)
    l_i = tl.where(blind, 1.0, l_i)
    acc = tl.where(blind[:, None], 0.0, acc / l_i[:, None])
    store_tile(desc_out, batch, head, start, 0, acc, BLOCK_M, D)
    sums = tl.where(blind, float("-inf"), (m_i + tl.log2(l_i)) * LN_2)
    plane = tl.program_id(1).to(tl.int64)
    tl.store(lse + plane * sizes.q_length + query, sums, mask=query < sizes.q_length)


@triton.jit
def _block_attention_bwd_query_kernel(
    desc_q,
    desc_do,
    desc_k,
    desc_v,
    desc_dq,
    terms,
    plan,
    softmax_scale,
    qk_scale,
    cap_scale,
    sizes,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
):
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch, head, kv_head, plan_row = locate(tl.program_id(1), start, sizes, QUERY_BLOCK)
    query = start + tl.arange(0, BLOCK_M)
    first, last = load_spans(plan, batch, query, sizes.q_length)
    place = tl.program_id(1).to(tl.int64) * terms.room + query
    lse = tl.load(terms.lse + place)
    delta = tl.load(terms.delta + place)
    # [BLOCK_M, D]
    q = load_tile(desc_q, batch, head, start, 0, BLOCK_M, D)
    do = load_tile(desc_do, batch, head, start, 0, BLOCK_M, D)
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    for MASKED in tl.static_range(2):
        lists = plan[MASKED]
        indices = lists.indices + plan_row * lists.width
        tiles = tl.load(lists.counts + plan_row) * (KEY_BLOCK // BLOCK_N)
        for i in tl.range(0, tiles, num_stages=STAGES):
            # [BLOCK_N, D], then [BLOCK_M, BLOCK_N]
            column = tile_start(indices, i, KEY_BLOCK, BLOCK_N)
            k = load_tile(desc_k, batch, kv_head, column, 0, BLOCK_N, D)
            v = load_tile(desc_v, batch, kv_head, column, 0, BLOCK_N, D)
            qk = tl.dot(q, k.T, input_precision=PRECISION)
            if CAPPED:
                qk = tanh(qk * cap_scale)
            p = tl.exp2(qk * qk_scale - lse[:, None])
            if MASKED:
                key = column + tl.arange(0, BLOCK_N)[None, :]
                p = tl.where(seen_between(key, first[:, None], last[:, None]), p, 0.0)
            dp = tl.dot(do, v.T, input_precision=PRECISION)
            ds = p * (dp - delta[:, None])
            if CAPPED:
                ds *= 1 - qk * qk
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(desc_dq, batch, head, start, 0, dq * softmax_scale, BLOCK_M, D)


@triton.jit
def _sinks_first(program, lead, batch, heads, kv_heads, tiles):
    """Return (key tile, batch row, first head, heads) of a program.

    Every query attends to the first ``lead`` key tiles, so these take longest. Their programs start
    first, and each head of a group has a separate program.
    """
    alone = lead * batch * heads
    ahead = program < alone
    other = tl.maximum(program - alone, 0)
    rest = tl.maximum(tiles - lead, 1)
    plane = tl.where(ahead, program % (batch * heads), other // rest)
    group = tl.where(ahead, 1, heads // kv_heads)
    per_row = tl.where(ahead, heads, kv_heads)
    tile = tl.where(ahead, program // (batch * heads), lead + other % rest)
    return tile, plane // per_row, plane % per_row * group, group


@triton.jit
def _block_attention_bwd_key_kernel(
    desc_q,
    desc_do,
    desc_k,
    desc_v,
    desc_dk,
    desc_dv,
    desc_sink_dk,
    desc_sink_dv,
    terms,
    plan,
    softmax_scale,
    kv_blocks,
    lead,
    batches,
    qk_scale,
    cap_scale,
    sizes,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
):
    heads, kv_heads = sizes.heads, sizes.kv_heads
    tiles = (tl.num_programs(0) // batches - lead * heads) // kv_heads + lead
    tile, batch, first_head, group = _sinks_first(
        tl.program_id(0), lead, batches, heads, kv_heads, tiles
    )
    start = tile * BLOCK_N
    kv_head = first_head // (heads // kv_heads)
    key = start + tl.arange(0, BLOCK_N)
    # [BLOCK_N, D]
    k = load_tile(desc_k, batch, kv_head, start, 0, BLOCK_N, D)
    v = load_tile(desc_v, batch, kv_head, start, 0, BLOCK_N, D)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for head in range(first_head, first_head + group):
        plan_column = plan_plane(batch, head, sizes) * kv_blocks + start // KEY_BLOCK
        plane = (batch * heads + head).to(tl.int64) * terms.room
        for MASKED in tl.static_range(2):
            lists = plan[MASKED]
            rows = lists.rows + tl.load(lists.starts + plan_column)
            tiles = tl.load(lists.counts + plan_column) * (QUERY_BLOCK // BLOCK_M)
            for i in tl.range(0, tiles, num_stages=STAGES):
                # [BLOCK_M, D], then [BLOCK_N, BLOCK_M]
                row = tile_start(rows, i, QUERY_BLOCK, BLOCK_M)
                query = row + tl.arange(0, BLOCK_M)
                q = load_tile(desc_q, batch, head, row, 0, BLOCK_M, D)
                do = load_tile(desc_do, batch, head, row, 0, BLOCK_M, D)
                lse = tl.load(terms.lse + plane + query)
                qk = tl.dot(k, q.T, input_precision=PRECISION)
                if CAPPED:
                    qk = tanh(qk * cap_scale)
                p = tl.exp2(qk * qk_scale - lse[None, :])
                if MASKED:
                    first, last = load_spans(plan, batch, query, sizes.q_length)
                    p = tl.where(seen_between(key[:, None], first[None, :], last[None, :]), p, 0.0)
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                dp = tl.dot(v, do.T, input_precision=PRECISION)
                # loaded late: registers are scarce
                delta = tl.load(terms.delta + plane + query)
                ds = p * (dp - delta[None, :])
                if CAPPED:
                    ds *= 1 - qk * qk
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    dk = dk * softmax_scale
    if tile < lead:
        store_tile(desc_sink_dk, batch, first_head, start, 0, dk, BLOCK_N, D)
        store_tile(desc_sink_dv, batch, first_head, start, 0, dv, BLOCK_N, D)
    else:
        store_tile(desc_dk, batch, kv_head, start, 0, dk, BLOCK_N, D)
        store_tile(desc_dv, batch, kv_head, start, 0, dv, BLOCK_N, D)
