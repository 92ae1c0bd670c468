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
    compute_plan_head_index,
    is_visible,
    load_key_ranges,
    load_tile,
    load_tile_start,
    locate_tile,
    make_vector_pointers,
    replace_minus_infinity,
    store_tile,
    tanh,
    zero_unseen,
)


class StretchTile(NamedTuple):
    """Tile of queries and one stretch of the listed keys, which one program processes.

    Attributes:
        batch: Index of the batch row.
        head: Index of the query head.
        kv_head: KV head of the query head.
        first_query: The first query of the tile.
        keys: [STRETCH], indices of the listed keys, clamped to the last key of the sequence.
        first_listed_key: Index of the first listed key of the stretch.
    """

    batch: tl.tensor
    head: tl.tensor
    kv_head: tl.tensor
    first_query: tl.tensor
    keys: tl.tensor
    first_listed_key: tl.tensor


@triton.jit
def _find_listed_keys(plan, plan_row, column, KEY_BLOCK: tl.constexpr):
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
def _compute_products(
    desc_x,
    desc_y,
    y,
    tile,
    BLOCK_M: tl.constexpr,
    STRETCH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    D: tl.constexpr,
    CHUNK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return x @ y.T [BLOCK_M, STRETCH] for the queries and keys of a tile.

    The loop multiplies CHUNK_D channels per iteration.

    Args:
        desc_x: Descriptor of q or of the gradient of the output.
        desc_y: Descriptor of k or v; read if every stretch is inside one key block.
        y: The same tensor as `Vectors`; read if a stretch contains several key blocks.
        tile: The `StretchTile` with the queries and keys.
    """
    acc = tl.zeros((BLOCK_M, STRETCH), tl.float32)
    channel = tl.arange(0, CHUNK_D)[None, :]
    y_ptrs = make_vector_pointers(y, tile.batch, tile.kv_head, tile.keys) + channel
    for first_channel in range(0, D, CHUNK_D):
        # x_tile: [BLOCK_M, CHUNK_D]; y_tile: [STRETCH, CHUNK_D]
        x_tile = load_tile(
            desc_x,
            tile.batch,
            tile.head,
            token=tile.first_query,
            channel=first_channel,
            TOKENS=BLOCK_M,
            CHANNELS=CHUNK_D,
        )
        if KEY_BLOCK % STRETCH == 0:
            y_tile = load_tile(
                desc_y,
                tile.batch,
                tile.kv_head,
                token=tile.first_listed_key,
                channel=first_channel,
                TOKENS=STRETCH,
                CHANNELS=CHUNK_D,
            )
        elif D % CHUNK_D == 0:
            y_tile = tl.load(y_ptrs + first_channel)
        else:
            y_tile = tl.load(y_ptrs + first_channel, mask=first_channel + channel < D, other=0.0)
        acc = tl.dot(x_tile, y_tile.T, acc, input_precision=PRECISION)
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
    HAS_SOFTCAP: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STRETCH: tl.constexpr,
    D: tl.constexpr,
    CHUNK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the weights p [BLOCK_M, STRETCH] of one tile of queries and one stretch.

    In the forward pass (``backward_stats`` is None), also write the `StretchStats` of the stretch.
    In the backward pass, also write the gradients of the logits, ds [BLOCK_M, STRETCH].
    """
    plane = tl.program_id(2)
    query_start = tl.program_id(1) * BLOCK_M
    first_column = tl.program_id(0) * STRETCH
    batch, head, kv_head, plan_row = locate_tile(plane, query_start, sizes, QUERY_BLOCK)
    num_full_keys = tl.load(plan.full.counts + plan_row) * KEY_BLOCK
    num_listed_keys = num_full_keys + tl.load(plan.partial.counts + plan_row) * KEY_BLOCK
    if first_column < num_listed_keys:
        # qk: [BLOCK_M, STRETCH], from q [BLOCK_M, D] and the listed keys [STRETCH, D]
        key, is_listed = _find_listed_keys(
            plan, plan_row, first_column + tl.arange(0, STRETCH), KEY_BLOCK
        )
        first_listed_key, _ = _find_listed_keys(plan, plan_row, first_column, KEY_BLOCK)
        first_query = sizes.first_query + query_start
        tile = StretchTile(
            batch=batch,
            head=head,
            kv_head=kv_head,
            first_query=first_query,
            # the last block may extend past the last key; such keys are masked below
            keys=tl.minimum(key, kv_length - 1),
            first_listed_key=first_listed_key,
        )
        qk = _compute_products(
            desc_x=desc_q,
            desc_y=desc_k,
            y=k,
            tile=tile,
            BLOCK_M=BLOCK_M,
            STRETCH=STRETCH,
            KEY_BLOCK=KEY_BLOCK,
            D=D,
            CHUNK_D=CHUNK_D,
            PRECISION=PRECISION,
        )
        if HAS_SOFTCAP:
            qk = tanh(qk * cap_scale)
            tanh_slope = 1 - qk * qk

        # stretches that contain only keys of full blocks need no mask
        query = first_query + tl.arange(0, BLOCK_M)
        if first_column + STRETCH > num_full_keys:
            first_key, last_key = load_key_ranges(plan, batch, query, sizes.q_length)
            is_seen = is_listed[None, :] & is_visible(
                key[None, :], first_key[:, None], last_key[:, None]
            )
            qk = tl.where(is_seen, qk, float("-inf"))

        if backward_stats is None:
            # m_i is an integer: then the later rescaling multiplies weights by a power of two,
            # which does not round
            m_i = tl.ceil(tl.max(qk, 1) * qk_scale)
            p = tl.exp2(qk * qk_scale - replace_minus_infinity(m_i)[:, None])
            offset = (plane.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * sizes.num_tokens
            offset += query_start + tl.arange(0, BLOCK_M)
            tl.store(stats.m_i + offset, m_i)
            tl.store(stats.l_i + offset, tl.sum(p, 1))
            store_tile(
                desc_p,
                batch,
                head,
                token=query_start,
                channel=first_column,
                tile=p,
                TOKENS=BLOCK_M,
                CHANNELS=STRETCH,
            )
        else:
            # lse, delta: [BLOCK_M]; dp, ds: [BLOCK_M, STRETCH]
            offset = plane.to(tl.int64) * backward_stats.padded_length + query
            is_in_bounds = query < sizes.q_length
            lse = tl.load(backward_stats.lse + offset, mask=is_in_bounds, other=float("inf"))
            delta = tl.load(backward_stats.delta + offset, mask=is_in_bounds, other=0.0)
            p = tl.exp2(qk * qk_scale - lse[:, None])
            store_tile(
                desc_p,
                batch,
                head,
                token=query_start,
                channel=first_column,
                tile=p,
                TOKENS=BLOCK_M,
                CHANNELS=STRETCH,
            )
            dp = _compute_products(
                desc_x=desc_do,
                desc_y=desc_v,
                y=v,
                tile=tile,
                BLOCK_M=BLOCK_M,
                STRETCH=STRETCH,
                KEY_BLOCK=KEY_BLOCK,
                D=D,
                CHUNK_D=CHUNK_D,
                PRECISION=PRECISION,
            )
            ds = p * (dp - delta[:, None])
            if HAS_SOFTCAP:
                ds *= tanh_slope
            store_tile(
                desc_ds,
                batch,
                head,
                token=query_start,
                channel=first_column,
                tile=ds,
                TOKENS=BLOCK_M,
                CHANNELS=STRETCH,
            )


@triton.jit
def block_attention_split_lse_kernel(
    stats,
    lse,
    plan,
    num_allocated_stretches,
    sizes,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK_STRETCHES: tl.constexpr,
):
    """Write the log-sum-exp of BLOCK_M queries, merged from the `StretchStats` of all stretches."""
    plane = tl.program_id(1).to(tl.int64)
    query_start = tl.program_id(0) * BLOCK_M
    batch, _, _, plan_row = locate_tile(tl.program_id(1), query_start, sizes, QUERY_BLOCK)
    num_blocks = tl.load(plan.full.counts + plan_row) + tl.load(plan.partial.counts + plan_row)
    num_stretches = (num_blocks * KEY_BLOCK + STRETCH - 1) // STRETCH

    # online softmax over the stretches
    token = query_start + tl.arange(0, BLOCK_M)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, num_stretches, BLOCK_STRETCHES):
        # [BLOCK_STRETCHES, BLOCK_M]
        stretch = start + tl.arange(0, BLOCK_STRETCHES)
        offset = (plane * num_allocated_stretches + stretch)[:, None] * sizes.num_tokens + token[
            None, :
        ]
        is_in_bounds = stretch[:, None] < num_stretches
        stretch_max = tl.load(stats.m_i + offset, mask=is_in_bounds, other=float("-inf"))
        m_new = tl.maximum(m_i, tl.max(stretch_max, 0))
        m_safe = replace_minus_infinity(m_new)
        stretch_sums = tl.load(stats.l_i + offset, mask=is_in_bounds, other=0.0) * tl.exp2(
            stretch_max - m_safe[None, :]
        )
        l_i = l_i * tl.exp2(m_i - m_safe) + tl.sum(stretch_sums, 0)
        m_i = m_new

    # write -inf for queries without keys. Padding queries (last_key < 0) may have a finite m_i,
    # because full blocks are not masked
    query = sizes.first_query + token
    _, last_key = load_key_ranges(plan, batch, query, sizes.q_length)
    has_no_keys = (m_i == float("-inf")) | (last_key < 0)
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
    num_allocated_stretches,
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
    query_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    first_channel = tl.program_id(0) * BLOCK_D
    batch, head, kv_head, plan_row = locate_tile(plane, query_start, sizes, QUERY_BLOCK)
    num_full = tl.load(plan.full.counts + plan_row)
    num_listed = num_full + tl.load(plan.partial.counts + plan_row)
    full_indices = plan.full.indices + plan_row * plan.full.width
    partial_indices = plan.partial.indices + plan_row * plan.partial.width - num_full
    token = query_start + tl.arange(0, BLOCK_M)

    # [BLOCK_M]: log-sum-exp to base two, and the log-sum-exp rounded up to an integer. Weights are
    # rescaled to the integer inside the loop, and the output to the log-sum-exp after the loop
    if lse is not None:
        query = sizes.first_query + token
        lse_offset = plane.to(tl.int64) * sizes.q_length + query
        lse_base_2 = tl.load(lse + lse_offset, mask=query < sizes.q_length, other=float("-inf"))
        has_no_keys = lse_base_2 == float("-inf")
        lse_base_2 = tl.where(has_no_keys, 0.0, lse_base_2 * LOG2_E)
        lse_ceil = tl.ceil(lse_base_2)
        m_i += plane.to(tl.int64) * num_allocated_stretches * sizes.num_tokens + token
        if HAS_FUTURE_KEYS:
            first_key, last_key = load_key_ranges(plan, batch, query, sizes.q_length)

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    TILES_PER_BLOCK: tl.constexpr = KEY_BLOCK // BLOCK_N
    for tile_index in range(0, num_listed * TILES_PER_BLOCK):
        # p: [BLOCK_M, BLOCK_N]; x: [BLOCK_N, BLOCK_D]
        slot = tile_index // TILES_PER_BLOCK
        block = tl.load((full_indices if slot < num_full else partial_indices) + slot)
        p = load_tile(
            desc_p,
            batch,
            head,
            token=query_start,
            channel=tile_index * BLOCK_N,
            TOKENS=BLOCK_M,
            CHANNELS=BLOCK_N,
        )
        if lse is not None:
            # the factor is a power of two, so that the product does not round the weights
            stretch_max = tl.load(m_i + tile_index * BLOCK_N // STRETCH * sizes.num_tokens)
            p = p * tl.exp2(stretch_max - lse_ceil).to(p.dtype)[:, None]
        key_start = block * KEY_BLOCK + tile_index % TILES_PER_BLOCK * BLOCK_N
        x = load_tile(
            desc_x,
            batch,
            kv_head,
            token=key_start,
            channel=first_channel,
            TOKENS=BLOCK_N,
            CHANNELS=BLOCK_D,
        )
        if HAS_FUTURE_KEYS:
            x = zero_unseen(x, key_start + tl.arange(0, BLOCK_N), first_key, last_key)
        acc = tl.dot(p, x, acc, input_precision=PRECISION)

    acc = acc * scale
    if lse is not None:
        acc = acc * tl.where(has_no_keys, 0.0, tl.exp2(lse_ceil - lse_base_2))[:, None]
    store_tile(
        desc_out,
        batch,
        head,
        token=sizes.first_query + query_start,
        channel=first_channel,
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
    key_start = tl.program_id(1) * BLOCK_N
    first_channel = tl.program_id(0) * BLOCK_D
    group_size = sizes.heads // sizes.kv_heads
    TILES_PER_BLOCK: tl.constexpr = QUERY_BLOCK // BLOCK_M
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for head in range(kv_head * group_size, kv_head * group_size + group_size):
        plan_head_index = compute_plan_head_index(batch, head, sizes)
        column = plan_head_index * kv_blocks + key_start // KEY_BLOCK
        for IS_PARTIAL in tl.static_range(2):
            column_lists = plan[IS_PARTIAL]
            offset = tl.load(column_lists.starts + column)
            query_blocks = column_lists.rows + offset
            slots = column_lists.slots + offset
            for tile_index in range(0, tl.load(column_lists.counts + column) * TILES_PER_BLOCK):
                # p: [BLOCK_M, BLOCK_N]; x: [BLOCK_M, BLOCK_D]
                query_start = load_tile_start(query_blocks, tile_index, QUERY_BLOCK, BLOCK_M)
                slot = tl.load(slots + tile_index // TILES_PER_BLOCK)
                if IS_PARTIAL:
                    # in p, columns of partial blocks follow the columns of full blocks
                    slot += tl.load(
                        full_counts + plan_head_index * sizes.q_blocks + query_start // QUERY_BLOCK
                    )
                p = load_tile(
                    desc_p,
                    batch,
                    head,
                    token=query_start,
                    channel=slot * KEY_BLOCK + key_start % KEY_BLOCK,
                    TOKENS=BLOCK_M,
                    CHANNELS=BLOCK_N,
                )
                x = load_tile(
                    desc_x,
                    batch,
                    head,
                    token=sizes.first_query + query_start,
                    channel=first_channel,
                    TOKENS=BLOCK_M,
                    CHANNELS=BLOCK_D,
                )
                acc = tl.dot(p.T, x, acc, input_precision=PRECISION)

    # add to the sums of earlier pieces
    key = key_start + tl.arange(0, BLOCK_N)
    out_channel = first_channel + tl.arange(0, BLOCK_D)[None, :]
    is_in_bounds = (key[:, None] < kv_length) & (out_channel < D)
    pointers = make_vector_pointers(out, batch, kv_head, key) + out_channel
    tl.store(
        pointers, tl.load(pointers, mask=is_in_bounds, other=0.0) + acc * scale, mask=is_in_bounds
    )
