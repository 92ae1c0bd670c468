"""Kernels of `split`: weights of a stretch of listed keys, and products with one slice of D.

The listed keys of a query block are the keys of its full blocks, then the keys of its partial
blocks. A stretch is STRETCH consecutive listed keys. Weights p and gradients ds have the shape
[B, H, tokens, keys]: column c belongs to the c-th listed key of the query's block.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cab_hf.ops.attention.tiles import (
    LN_2,
    LOG2_E,
    finite,
    is_visible,
    load_key_ranges,
    load_tile,
    locate,
    plan_plane,
    store_tile,
    tanh,
    tile_start,
    vectors_at,
    zero_unseen,
)


class StretchTile(NamedTuple):
    """Tile of queries and one stretch of the listed keys, which one program processes.

    Attributes:
        batch: Index of the batch row.
        head: Index of the query head.
        kv_head: KV head of the query head.
        start: The first query of the tile.
        key: [STRETCH], indices of the listed keys, clamped to the last key of the sequence.
        first_key: Index of the first listed key of the stretch.
    """

    batch: tl.tensor
    head: tl.tensor
    kv_head: tl.tensor
    start: tl.tensor
    key: tl.tensor
    first_key: tl.tensor


@triton.jit
def _listed_keys(plan, plan_row, column, KEY_BLOCK: tl.constexpr):
    """Return the index of the listed key of each column of the weights.

    Args:
        plan: Lists of key blocks per query block.
        plan_row: Index of the query block's lists.
        column: Indices of columns of the weights; full blocks come first.

    Returns:
        keys: The index of the key of each column.
        is_listed: False for columns after the last listed block, whose key is undefined.
    """
    slot = column // KEY_BLOCK
    num_full = tl.load(plan.full.counts + plan_row)
    num_listed = num_full + tl.load(plan.partial.counts + plan_row)
    is_full = slot < num_full
    is_listed = slot < num_listed
    full_indices = plan.full.indices + plan_row * plan.full.width
    partial_indices = plan.partial.indices + plan_row * plan.partial.width - num_full
    full_block = tl.load(full_indices + slot, mask=is_full, other=0)
    is_partial = is_listed & (slot >= num_full)
    partial_block = tl.load(partial_indices + slot, mask=is_partial, other=0)
    block = tl.where(is_full, full_block, partial_block)
    return block * KEY_BLOCK + column % KEY_BLOCK, is_listed


@triton.jit
def _products(
    desc_x,
    desc_y,
    y,
    tile,
    BLOCK_M: tl.constexpr,
    STRETCH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return x @ y.T [BLOCK_M, STRETCH] for the queries and keys of a tile.

    The loop multiplies DEPTH channels per iteration.

    Args:
        desc_x: Descriptor of q or of the gradient of the output.
        desc_y: Descriptor of k or v; read if every stretch is inside one key block.
        y: The same tensor as `Vectors`; read if a stretch contains several key blocks.
        tile: The `StretchTile` with the queries and keys.
    """
    acc = tl.zeros((BLOCK_M, STRETCH), tl.float32)
    channel = tl.arange(0, DEPTH)[None, :]
    y_rows = vectors_at(y, tile.batch, tile.kv_head, tile.key) + channel
    for depth in range(0, D, DEPTH):
        # a: [BLOCK_M, DEPTH]; b: [STRETCH, DEPTH]
        a = load_tile(
            desc_x,
            tile.batch,
            tile.head,
            token=tile.start,
            channel=depth,
            TOKENS=BLOCK_M,
            CHANNELS=DEPTH,
        )
        if KEY_BLOCK % STRETCH == 0:
            b = load_tile(
                desc_y,
                tile.batch,
                tile.kv_head,
                token=tile.first_key,
                channel=depth,
                TOKENS=STRETCH,
                CHANNELS=DEPTH,
            )
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
    stats,
    backward_stats,
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
    """Write the weights p [BLOCK_M, STRETCH] of one tile of queries and one stretch.

    In the forward pass (``backward_stats`` is None), also write the `StretchStats` of the stretch.
    In the backward pass, also write the gradients of the logits, ds [BLOCK_M, STRETCH].
    """
    plane = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_M
    column = tl.program_id(0) * STRETCH
    batch, head, kv_head, plan_row = locate(plane, row, sizes, QUERY_BLOCK)
    full_keys = tl.load(plan.full.counts + plan_row) * KEY_BLOCK
    listed_keys = full_keys + tl.load(plan.partial.counts + plan_row) * KEY_BLOCK
    if column < listed_keys:
        # qk: [BLOCK_M, STRETCH], from q [BLOCK_M, D] and the listed keys [STRETCH, D]
        key, is_listed = _listed_keys(plan, plan_row, column + tl.arange(0, STRETCH), KEY_BLOCK)
        first_key, _ = _listed_keys(plan, plan_row, column, KEY_BLOCK)
        start = sizes.begin + row
        tile = StretchTile(
            batch=batch,
            head=head,
            kv_head=kv_head,
            start=start,
            # the last block may extend past the last key; such keys are masked below
            key=tl.minimum(key, kv_length - 1),
            first_key=first_key,
        )
        qk = _products(
            desc_x=desc_q,
            desc_y=desc_k,
            y=k,
            tile=tile,
            BLOCK_M=BLOCK_M,
            STRETCH=STRETCH,
            KEY_BLOCK=KEY_BLOCK,
            D=D,
            DEPTH=DEPTH,
            PRECISION=PRECISION,
        )
        if CAPPED:
            qk = tanh(qk * cap_scale)
            slope = 1 - qk * qk

        # stretches that contain only keys of full blocks need no mask
        query = start + tl.arange(0, BLOCK_M)
        if column + STRETCH > full_keys:
            first, last = load_key_ranges(plan, batch, query, sizes.q_length)
            seen = is_listed[None, :] & is_visible(key[None, :], first[:, None], last[:, None])
            qk = tl.where(seen, qk, float("-inf"))

        if backward_stats is None:
            # m_i is an integer: then the later rescaling multiplies weights by a power of two,
            # which does not round
            m_i = tl.ceil(tl.max(qk, 1) * qk_scale)
            p = tl.exp2(qk * qk_scale - finite(m_i)[:, None])
            offset = (plane.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * sizes.tokens
            offset += row + tl.arange(0, BLOCK_M)
            tl.store(stats.m_i + offset, m_i)
            tl.store(stats.l_i + offset, tl.sum(p, 1))
            store_tile(
                desc_p,
                batch,
                head,
                token=row,
                channel=column,
                tile=p,
                TOKENS=BLOCK_M,
                CHANNELS=STRETCH,
            )
        else:
            # lse, delta: [BLOCK_M]; dp, ds: [BLOCK_M, STRETCH]
            offset = plane.to(tl.int64) * backward_stats.padded_length + query
            inside = query < sizes.q_length
            lse = tl.load(backward_stats.lse + offset, mask=inside, other=float("inf"))
            delta = tl.load(backward_stats.delta + offset, mask=inside, other=0.0)
            p = tl.exp2(qk * qk_scale - lse[:, None])
            store_tile(
                desc_p,
                batch,
                head,
                token=row,
                channel=column,
                tile=p,
                TOKENS=BLOCK_M,
                CHANNELS=STRETCH,
            )
            dp = _products(
                desc_x=desc_do,
                desc_y=desc_v,
                y=v,
                tile=tile,
                BLOCK_M=BLOCK_M,
                STRETCH=STRETCH,
                KEY_BLOCK=KEY_BLOCK,
                D=D,
                DEPTH=DEPTH,
                PRECISION=PRECISION,
            )
            ds = p * (dp - delta[:, None])
            if CAPPED:
                ds *= slope
            store_tile(
                desc_ds,
                batch,
                head,
                token=row,
                channel=column,
                tile=ds,
                TOKENS=BLOCK_M,
                CHANNELS=STRETCH,
            )


@triton.jit
def block_attention_split_lse_kernel(
    stats,
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
    """Write the log-sum-exp of BLOCK_M queries, merged from the `StretchStats` of all stretches."""
    plane = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M
    batch, _, _, plan_row = locate(tl.program_id(1), row, sizes, QUERY_BLOCK)
    num_blocks = tl.load(plan.full.counts + plan_row) + tl.load(plan.partial.counts + plan_row)
    num_stretches = (num_blocks * KEY_BLOCK + STRETCH - 1) // STRETCH

    # online softmax over the stretches
    token = row + tl.arange(0, BLOCK_M)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, num_stretches, STRETCHES):
        # [STRETCHES, BLOCK_M]
        stretch = start + tl.arange(0, STRETCHES)
        offset = (plane * stretches + stretch)[:, None] * sizes.tokens + token[None, :]
        inside = stretch[:, None] < num_stretches
        m = tl.load(stats.m_i + offset, mask=inside, other=float("-inf"))
        m_new = tl.maximum(m_i, tl.max(m, 0))
        m_safe = finite(m_new)
        l_part = tl.load(stats.l_i + offset, mask=inside, other=0.0) * tl.exp2(m - m_safe[None, :])
        l_i = l_i * tl.exp2(m_i - m_safe) + tl.sum(l_part, 0)
        m_i = m_new

    # write -inf for queries without keys. Padding queries (last < 0) may have a finite m_i, because
    # full blocks are not masked
    query = sizes.begin + token
    _, last = load_key_ranges(plan, batch, query, sizes.q_length)
    has_no_keys = (m_i == float("-inf")) | (last < 0)
    query_lse = tl.where(has_no_keys, 0.0, m_i) + tl.log2(tl.where(has_no_keys, 1.0, l_i))
    query_lse = tl.where(has_no_keys, float("-inf"), query_lse * LN_2)
    tl.store(lse + plane * sizes.q_length + query, query_lse, mask=query < sizes.q_length)


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
    HAS_FUTURE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write scale * p @ x [BLOCK_M, BLOCK_D] over the listed keys of a tile of queries.

    In the forward pass (``lse`` is not None), x is v and the weights p are rescaled to ``lse``. In
    the backward pass, x is k and p are the gradients of the logits.
    """
    plane = tl.program_id(2)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    channel = tl.program_id(0) * BLOCK_D
    batch, head, kv_head, plan_row = locate(plane, row, sizes, QUERY_BLOCK)
    num_full = tl.load(plan.full.counts + plan_row)
    num_listed = num_full + tl.load(plan.partial.counts + plan_row)
    full_indices = plan.full.indices + plan_row * plan.full.width
    partial_indices = plan.partial.indices + plan_row * plan.partial.width - num_full
    token = row + tl.arange(0, BLOCK_M)

    # [BLOCK_M]: log-sum-exp to base two, and the log-sum-exp rounded up to an integer. Weights are
    # rescaled to the integer inside the loop, and the output to the log-sum-exp after the loop
    if lse is not None:
        query = sizes.begin + token
        lse_offset = plane.to(tl.int64) * sizes.q_length + query
        lse_2 = tl.load(lse + lse_offset, mask=query < sizes.q_length, other=float("-inf"))
        has_no_keys = lse_2 == float("-inf")
        lse_2 = tl.where(has_no_keys, 0.0, lse_2 * LOG2_E)
        lse_ceil = tl.ceil(lse_2)
        m_i += plane.to(tl.int64) * stretches * sizes.tokens + token
        if HAS_FUTURE_KEYS:
            first, last = load_key_ranges(plan, batch, query, sizes.q_length)

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    TILES: tl.constexpr = KEY_BLOCK // BLOCK_N
    for i in range(0, num_listed * TILES):
        # p: [BLOCK_M, BLOCK_N]; x: [BLOCK_N, BLOCK_D]
        slot = i // TILES
        block = tl.load((full_indices if slot < num_full else partial_indices) + slot)
        p = load_tile(
            desc_p, batch, head, token=row, channel=i * BLOCK_N, TOKENS=BLOCK_M, CHANNELS=BLOCK_N
        )
        if lse is not None:
            # the factor is a power of two, so that the product does not round the weights
            m = tl.load(m_i + i * BLOCK_N // STRETCH * sizes.tokens)
            p = p * tl.exp2(m - lse_ceil).to(p.dtype)[:, None]
        column = block * KEY_BLOCK + i % TILES * BLOCK_N
        x = load_tile(
            desc_x,
            batch,
            kv_head,
            token=column,
            channel=channel,
            TOKENS=BLOCK_N,
            CHANNELS=BLOCK_D,
        )
        if HAS_FUTURE_KEYS:
            x = zero_unseen(x, column + tl.arange(0, BLOCK_N), first, last)
        acc = tl.dot(p, x, acc, input_precision=PRECISION)

    acc = acc * scale
    if lse is not None:
        acc = acc * tl.where(has_no_keys, 0.0, tl.exp2(lse_ceil - lse_2))[:, None]
    store_tile(
        desc_out,
        batch,
        head,
        token=sizes.begin + row,
        channel=channel,
        tile=acc,
        TOKENS=BLOCK_M,
        CHANNELS=BLOCK_D,
    )


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
    """Add scale * p.T @ x [BLOCK_N, BLOCK_D] to ``out``, over the queries that list a tile of keys.

    ``plan`` contains `ColumnLists` with slots: the query blocks that list each key block.
    ``full_counts`` are the numbers of full blocks that each query block lists.
    """
    batch = tl.program_id(2) // sizes.kv_heads
    kv_head = tl.program_id(2) % sizes.kv_heads
    start = tl.program_id(1) * BLOCK_N
    channel = tl.program_id(0) * BLOCK_D
    group = sizes.heads // sizes.kv_heads
    TILES: tl.constexpr = QUERY_BLOCK // BLOCK_M
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
        plan_head = plan_plane(batch, head, sizes)
        column = plan_head * kv_blocks + start // KEY_BLOCK
        for PARTIAL in tl.static_range(2):
            lists = plan[PARTIAL]
            offset = tl.load(lists.starts + column)
            rows = lists.rows + offset
            slots = lists.slots + offset
            for i in range(0, tl.load(lists.counts + column) * TILES):
                # p: [BLOCK_M, BLOCK_N]; x: [BLOCK_M, BLOCK_D]
                row = tile_start(rows, i, QUERY_BLOCK, BLOCK_M)
                slot = tl.load(slots + i // TILES)
                if PARTIAL:
                    # in p, columns of partial blocks follow the columns of full blocks
                    slot += tl.load(full_counts + plan_head * sizes.q_blocks + row // QUERY_BLOCK)
                p = load_tile(
                    desc_p,
                    batch,
                    head,
                    token=row,
                    channel=slot * KEY_BLOCK + start % KEY_BLOCK,
                    TOKENS=BLOCK_M,
                    CHANNELS=BLOCK_N,
                )
                x = load_tile(
                    desc_x,
                    batch,
                    head,
                    token=sizes.begin + row,
                    channel=channel,
                    TOKENS=BLOCK_M,
                    CHANNELS=BLOCK_D,
                )
                acc = tl.dot(p.T, x, acc, input_precision=PRECISION)

    # add to the sums of earlier pieces
    key = start + tl.arange(0, BLOCK_N)
    out_channel = channel + tl.arange(0, BLOCK_D)[None, :]
    inside = (key[:, None] < kv_length) & (out_channel < D)
    pointers = vectors_at(out, batch, kv_head, key) + out_channel
    tl.store(pointers, tl.load(pointers, mask=inside, other=0.0) + acc * scale, mask=inside)
