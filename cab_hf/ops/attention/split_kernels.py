"""Kernels of `split`: weights of a stretch of listed keys, and one slice of their products."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cab_hf.ops.attention.tiles import (
    LN_2,
    LOG2_E,
    finite,
    load_spans,
    load_tile,
    locate,
    only_seen,
    plan_plane,
    seen_between,
    store_tile,
    tanh,
    tile_start,
    vectors_at,
)


class Cell(NamedTuple):
    """A tile of queries and a stretch of its listed keys: the work of one program."""

    batch: tl.tensor
    head: tl.tensor
    kv_head: tl.tensor
    start: tl.tensor
    key: tl.tensor
    first_key: tl.tensor


@triton.jit
def _listed_keys(plan, plan_row, place, KEY_BLOCK: tl.constexpr):
    """Return the keys at places of a row's lists, full blocks first, and which places are used."""
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
    """Return x @ y.T [BLOCK_M, STRETCH] for the queries and keys of a cell, in steps of DEPTH."""
    acc = tl.zeros((BLOCK_M, STRETCH), tl.float32)
    channel = tl.arange(0, DEPTH)[None, :]
    y_rows = vectors_at(y, cell.batch, cell.kv_head, cell.key) + channel
    for depth in range(0, D, DEPTH):
        # [BLOCK_M, DEPTH] and [STRETCH, DEPTH]
        a = load_tile(desc_x, cell.batch, cell.head, cell.start, depth, BLOCK_M, DEPTH)
        if KEY_BLOCK % STRETCH == 0:
            key = cell.first_key
            b = load_tile(desc_y, cell.batch, cell.kv_head, key, depth, STRETCH, DEPTH)
        elif D % DEPTH == 0:
            b = tl.load(y_rows + depth)
        else:
            b = tl.load(y_rows + depth, mask=depth + channel < D, other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def block_attention_split_p_kernel(
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
    cap_scale,
    kv_length,
    sizes,
    CAPPED: tl.constexpr,
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
        # keys past the last one are masked, because no query attends to them
        cell = Cell(batch, head, kv_head, start, tl.minimum(key, kv_length - 1), first_key)
        # [BLOCK_M, STRETCH]
        qk = _products(desc_q, desc_k, k, cell, BLOCK_M, STRETCH, KEY_BLOCK, D, DEPTH, PRECISION)
        if CAPPED:
            qk = tanh(qk * cap_scale)
            slope = 1 - qk * qk
        query = start + tl.arange(0, BLOCK_M)
        if column + STRETCH > full:
            first, last = load_spans(plan, batch, query, sizes.q_length)
            seen = taken[None, :] & seen_between(key[None, :], first[:, None], last[:, None])
            qk = tl.where(seen, qk, float("-inf"))
        if terms is None:
            # a whole power of two, so that correcting the weights later does not round
            m_i = tl.ceil(tl.max(qk, 1) * qk_scale)
            p = tl.exp2(qk * qk_scale - finite(m_i)[:, None])
            at = (plane.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * sizes.tokens
            at += row + tl.arange(0, BLOCK_M)
            tl.store(sums.m_i + at, m_i)
            tl.store(sums.l_i + at, tl.sum(p, 1))
            store_tile(desc_p, batch, head, row, column, p, BLOCK_M, STRETCH)
        else:
            at = plane.to(tl.int64) * terms.room + query
            inside = query < sizes.q_length
            lse = tl.load(terms.lse + at, mask=inside, other=float("inf"))
            delta = tl.load(terms.delta + at, mask=inside, other=0.0)
            p = tl.exp2(qk * qk_scale - lse[:, None])
            store_tile(desc_p, batch, head, row, column, p, BLOCK_M, STRETCH)
            dp = _products(
                desc_do, desc_v, v, cell, BLOCK_M, STRETCH, KEY_BLOCK, D, DEPTH, PRECISION
            )
            ds = p * (dp - delta[:, None])
            if CAPPED:
                ds *= slope
            store_tile(desc_ds, batch, head, row, column, ds, BLOCK_M, STRETCH)


@triton.jit
def block_attention_split_lse_kernel(
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
def block_attention_split_query_kernel(
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
        p = load_tile(desc_p, batch, head, row, i * BLOCK_N, BLOCK_M, BLOCK_N)
        if lse is not None:
            m = tl.load(m_i + i * BLOCK_N // STRETCH * sizes.tokens)
            p = p * tl.exp2(m - complete).to(p.dtype)[:, None]
        column = block * KEY_BLOCK + i % TILES * BLOCK_N
        x = load_tile(desc_x, batch, kv_head, column, channel, BLOCK_N, BLOCK_D)
        if STICKS_OUT:
            x = only_seen(x, column + tl.arange(0, BLOCK_N), first, last)
        acc = tl.dot(p, x, acc, input_precision=PRECISION)
    acc = acc * scale
    if lse is not None:
        acc = acc * tl.where(blind, 0.0, tl.exp2(complete - level))[:, None]
    store_tile(desc_out, batch, head, sizes.begin + row, channel, acc, BLOCK_M, BLOCK_D)


@triton.jit
def block_attention_split_bwd_key_kernel(
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
                p = load_tile(desc_p, batch, head, row, place, BLOCK_M, BLOCK_N)
                token = sizes.begin + row
                x = load_tile(desc_x, batch, head, token, channel, BLOCK_M, BLOCK_D)
                acc = tl.dot(p.T, x, acc, input_precision=PRECISION)
    key = start + tl.arange(0, BLOCK_N)
    lane = channel + tl.arange(0, BLOCK_D)[None, :]
    inside = (key[:, None] < kv_length) & (lane < D)
    at = vectors_at(out, batch, kv_head, key) + lane
    tl.store(at, tl.load(at, mask=inside, other=0.0) + acc * scale, mask=inside)
