"""Block attention for head dims to 256: one kernel holds a tile of the output in registers.

Backward makes two passes, one by query tile and one by key tile, so that nothing is summed by
atomics and gradients are the same in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.attention.tiles import (
    LOG2_E,
    Rows,
    described,
    descriptors,
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


class Tile(NamedTuple):
    """The piece of a block pair that a program holds at a time, and how it is scheduled."""

    rows: int
    columns: int
    warps: int
    stages: int


# key tiles at the start, sinks, whose gradients are summed a head at a time
LEAD = 4
# head dims up to which they hold -> tiles, from `speed attention` on an H200
FORWARD_TILES = {64: Tile(128, 64, 4, 2), 128: Tile(128, 64, 4, 2), 256: Tile(128, 64, 8, 2)}
QUERY_GRADIENT_TILES = {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 2)}
KEY_GRADIENT_TILES = {64: Tile(128, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(32, 64, 8, 2)}


def forward(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    """(out [B, H, N_q, D], log-sum-exp float32 [B, H, N_q])."""
    q, k, v = map(described, (q, k, v))
    out, lse = like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    tile = _tile(FORWARD_TILES, q, rows)
    tiles = triton.cdiv(q.shape[2], tile.rows)
    _block_attention_fwd_kernel[(tiles, q.shape[0] * q.shape[1])](
        *descriptors(tile.rows, q),
        *descriptors(tile.columns, k, v),
        *descriptors(tile.rows, out),
        lse,
        *row_arguments(rows),
        scale * LOG2_E,
        *sizes(q, k, rows),
        **_constants(tile, q, rows),
    )
    return out, lse


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
    grad_q, grad_k, grad_v = map(like, (q, k, v))
    counts = sizes(q, k, rows)

    tile = _tile(QUERY_GRADIENT_TILES, q, rows)
    tiles = triton.cdiv(q.shape[2], tile.rows)
    _block_attention_bwd_query_kernel[(tiles, q.shape[0] * q.shape[1])](
        *descriptors(tile.rows, q, grad),
        *descriptors(tile.columns, k, v),
        *descriptors(tile.rows, grad_q),
        level,
        delta,
        level.shape[2],
        *row_arguments(rows),
        scale,
        *counts,
        **_constants(tile, q, rows),
    )

    tile = _tile(KEY_GRADIENT_TILES, q, rows)
    tiles = triton.cdiv(k.shape[2], tile.columns)
    lead = min(LEAD, tiles)
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    part_k, part_v = (
        x.new_empty(batch, heads, lead * tile.columns, x.shape[3], dtype=torch.float32)
        for x in (k, v)
    )
    kv_blocks = triton.cdiv(k.shape[2], rows.key_block)
    full, partial = (pack_columns(lists, kv_blocks) for lists in (rows.full, rows.partial))
    _block_attention_bwd_key_kernel[(batch * (lead * heads + (tiles - lead) * kv_heads),)](
        *descriptors(tile.rows, q, grad),
        *descriptors(tile.columns, k, v, grad_k, grad_v, part_k, part_v),
        level,
        delta,
        level.shape[2],
        *_column_arguments(full, partial, rows),
        scale,
        kv_blocks,
        lead,
        q.shape[0],
        *counts,
        **_constants(tile, q, rows),
    )
    for target, parts in ((grad_k, part_k), (grad_v, part_v)):
        first = target[:, :, : parts.shape[2]]
        first.copy_(parts.unflatten(1, (kv_heads, -1)).sum(2)[:, :, : first.shape[2]])
    return grad_q, grad_k, grad_v


def _column_arguments(full: ColumnLists, partial: ColumnLists, rows: Rows) -> tuple:
    lists = (tensor for part in (full, partial) for tensor in (part.counts, part.starts, part.rows))
    return *lists, *row_arguments(rows)[6:]


def _tile(tiles: dict[int, Tile], q: Tensor, rows: Rows) -> Tile:
    """The tile for this head dim, cut down to divide the plan's blocks."""
    tile = next(tile for dim, tile in tiles.items() if q.shape[3] <= dim)
    if q.element_size() > 2:
        tile = tile._replace(rows=min(tile.rows, 64), columns=32, stages=1)
    return tile._replace(
        rows=tile_of(rows.query_block, tile.rows), columns=tile_of(rows.key_block, tile.columns)
    )


def _constants(tile: Tile, q: Tensor, rows: Rows) -> dict[str, int | str]:
    return {
        "QUERY_BLOCK": rows.query_block,
        "KEY_BLOCK": rows.key_block,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "D": triton.next_power_of_2(q.shape[3]),
        "PRECISION": precision(q),
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


# --- kernels


@triton.jit
def _block_attention_fwd_kernel(
    q,
    k,
    v,
    out,
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
    heads,
    kv_heads,
    plan_heads,
    q_length,
    q_blocks,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # the longest rows first, so that none is left to the end
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // (heads // kv_heads)
    plan_head = head // (heads // plan_heads)
    plan_row = (batch * plan_heads + plan_head).to(tl.int64) * q_blocks + start // QUERY_BLOCK

    queries = q.load([batch, head, start, 0]).reshape(ROWS, D)

    acc = tl.zeros((ROWS, D), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for MASKED in tl.static_range(2):
        counts = partial_counts if MASKED else full_counts
        indices = partial_indices if MASKED else full_indices
        indices += plan_row * (partial_width if MASKED else full_width)
        tiles = tl.load(counts + plan_row) * (KEY_BLOCK // COLUMNS)
        if MASKED:
            # not before: registers are short in the loop over full blocks
            query = start + tl.arange(0, ROWS)
            there = query < q_length
            low = tl.load(first + batch.to(tl.int64) * first_stride + query, mask=there, other=0)
            high = tl.load(last + batch.to(tl.int64) * last_stride + query, mask=there, other=-1)
        for i in tl.range(0, tiles, num_stages=STAGES):
            column = tile_start(indices, i, KEY_BLOCK, COLUMNS)
            keys = k.load([batch, kv_head, column, 0]).reshape(COLUMNS, D)
            logits = tl.dot(queries, keys.T, input_precision=PRECISION)
            if MASKED:
                seen = seen_between(
                    column + tl.arange(0, COLUMNS)[None, :], low[:, None], high[:, None]
                )
                logits = tl.where(seen, logits, float("-inf"))
            new_top = tl.maximum(top, tl.max(logits, 1) * scale)
            # a row that has seen nothing yet has no level of its own
            level = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
            weights = tl.exp2(logits * scale - level[:, None])
            shrunk = tl.exp2(top - level)
            total = total * shrunk + tl.sum(weights, 1)
            acc = acc * shrunk[:, None]
            values = v.load([batch, kv_head, column, 0]).reshape(COLUMNS, D)
            acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
            top = new_top

    blind = (high < 0) | (total == 0)
    total = tl.where(blind, 1.0, total)
    acc = tl.where(blind[:, None], 0.0, acc / total[:, None])
    out.store([batch, head, start, 0], acc.to(queries.dtype).reshape(1, 1, ROWS, D))
    # back to the natural logarithm
    sums = tl.where(blind, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse + tl.program_id(1).to(tl.int64) * q_length + query, sums, mask=there)


@triton.jit
def _block_attention_bwd_query_kernel(
    q,
    grad,
    k,
    v,
    grad_q,
    level,
    delta,
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
    heads,
    kv_heads,
    plan_heads,
    q_length,
    q_blocks,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // (heads // kv_heads)
    plan_head = head // (heads // plan_heads)
    plan_row = (batch * plan_heads + plan_head).to(tl.int64) * q_blocks + start // QUERY_BLOCK

    query = start + tl.arange(0, ROWS)
    there = query < q_length
    low = tl.load(first + batch.to(tl.int64) * first_stride + query, mask=there, other=0)
    high = tl.load(last + batch.to(tl.int64) * last_stride + query, mask=there, other=-1)
    place = tl.program_id(1).to(tl.int64) * term_room + query
    levels = tl.load(level + place)
    deltas = tl.load(delta + place)
    queries = q.load([batch, head, start, 0]).reshape(ROWS, D)
    grads = grad.load([batch, head, start, 0]).reshape(ROWS, D)

    acc = tl.zeros((ROWS, D), tl.float32)
    for MASKED in tl.static_range(2):
        counts = partial_counts if MASKED else full_counts
        indices = partial_indices if MASKED else full_indices
        indices += plan_row * (partial_width if MASKED else full_width)
        tiles = tl.load(counts + plan_row) * (KEY_BLOCK // COLUMNS)
        for i in tl.range(0, tiles, num_stages=STAGES):
            column = tile_start(indices, i, KEY_BLOCK, COLUMNS)
            keys = k.load([batch, kv_head, column, 0]).reshape(COLUMNS, D)
            values = v.load([batch, kv_head, column, 0]).reshape(COLUMNS, D)
            logits = tl.dot(queries, keys.T, input_precision=PRECISION)
            weights = tl.exp2(logits * (scale * 1.4426950408889634) - levels[:, None])
            if MASKED:
                seen = seen_between(
                    column + tl.arange(0, COLUMNS)[None, :], low[:, None], high[:, None]
                )
                weights = tl.where(seen, weights, 0.0)
            slopes = tl.dot(grads, values.T, input_precision=PRECISION)
            slopes = weights * (slopes - deltas[:, None])
            acc = tl.dot(slopes.to(keys.dtype), keys, acc, input_precision=PRECISION)
    grad_q.store([batch, head, start, 0], (acc * scale).to(queries.dtype).reshape(1, 1, ROWS, D))


@triton.jit
def _sinks_first(program, lead, batch, heads, kv_heads, tiles):
    """(key tile, batch row, first head, heads) of a program.

    Every query attends the first ``lead`` key tiles, which would be what the device waits for: they
    come before everything else, and each head of a group has a program of its own.
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
    q,
    grad,
    k,
    v,
    grad_k,
    grad_v,
    part_k,
    part_v,
    level,
    delta,
    term_room,
    full_counts,
    full_starts,
    full_rows,
    partial_counts,
    partial_starts,
    partial_rows,
    first,
    last,
    first_stride,
    last_stride,
    scale,
    kv_blocks,
    lead,
    batches,
    heads,
    kv_heads,
    plan_heads,
    q_length,
    q_blocks,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles = (tl.num_programs(0) // batches - lead * heads) // kv_heads + lead
    tile, batch, first_head, group = _sinks_first(
        tl.program_id(0), lead, batches, heads, kv_heads, tiles
    )
    start = tile * COLUMNS
    kv_head = first_head // (heads // kv_heads)
    first += batch.to(tl.int64) * first_stride
    last += batch.to(tl.int64) * last_stride
    key = start + tl.arange(0, COLUMNS)
    keys = k.load([batch, kv_head, start, 0]).reshape(COLUMNS, D)
    values = v.load([batch, kv_head, start, 0]).reshape(COLUMNS, D)

    key_acc = tl.zeros((COLUMNS, D), tl.float32)
    value_acc = tl.zeros((COLUMNS, D), tl.float32)
    for head in range(first_head, first_head + group):
        plan_head = head // (heads // plan_heads)
        column = (batch * plan_heads + plan_head).to(tl.int64) * kv_blocks + start // KEY_BLOCK
        terms = (batch * heads + head).to(tl.int64) * term_room
        for MASKED in tl.static_range(2):
            counts = partial_counts if MASKED else full_counts
            starts = partial_starts if MASKED else full_starts
            rows = (partial_rows if MASKED else full_rows) + tl.load(starts + column)
            tiles = tl.load(counts + column) * (QUERY_BLOCK // ROWS)
            for i in tl.range(0, tiles, num_stages=STAGES):
                row = tile_start(rows, i, QUERY_BLOCK, ROWS)
                query = row + tl.arange(0, ROWS)
                queries = q.load([batch, head, row, 0]).reshape(ROWS, D)
                grads = grad.load([batch, head, row, 0]).reshape(ROWS, D)
                levels = tl.load(level + terms + query)
                logits = tl.dot(keys, queries.T, input_precision=PRECISION)
                weights = tl.exp2(logits * (scale * 1.4426950408889634) - levels[None, :])
                if MASKED:
                    there = query < q_length
                    low = tl.load(first + query, mask=there, other=0)
                    high = tl.load(last + query, mask=there, other=-1)
                    seen = seen_between(key[:, None], low[None, :], high[None, :])
                    weights = tl.where(seen, weights, 0.0)
                weighed = weights.to(grads.dtype)
                value_acc = tl.dot(weighed, grads, value_acc, input_precision=PRECISION)
                slopes = tl.dot(values, grads.T, input_precision=PRECISION)
                # not before: registers are short
                deltas = tl.load(delta + terms + query)
                slopes = (weights * (slopes - deltas[None, :])).to(queries.dtype)
                key_acc = tl.dot(slopes, queries, key_acc, input_precision=PRECISION)
    key_acc = key_acc * scale
    if tile < lead:
        part_k.store([batch, first_head, start, 0], key_acc.reshape(1, 1, COLUMNS, D))
        part_v.store([batch, first_head, start, 0], value_acc.reshape(1, 1, COLUMNS, D))
    else:
        place = [batch, kv_head, start, 0]
        grad_k.store(place, key_acc.to(keys.dtype).reshape(1, 1, COLUMNS, D))
        grad_v.store(place, value_acc.to(values.dtype).reshape(1, 1, COLUMNS, D))
