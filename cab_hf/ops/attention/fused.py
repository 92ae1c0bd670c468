"""Block attention for head dims up to 256: a program keeps one tile of the output in registers.

The forward pass is FlashAttention-2's loop (Dao, 2023) over the key blocks that a query block
lists. The loop reads full blocks without a mask, then partial blocks with a mask. The online
softmax merges both.

The backward pass has two kernels. In the first, each program computes dq of one tile of queries. In
the second, each program computes dk and dv of one tile of keys. Thus no kernel uses atomics, and
gradients are bit-identical in every run.
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
    allocate_transposed,
    choose_precision,
    choose_tile_size,
    compute_plan_head_index,
    has_future_keys,
    is_visible,
    load_key_ranges,
    load_tile,
    load_tile_start,
    locate_tile,
    make_descriptor,
    make_kernel_arguments,
    make_logit_scale_arguments,
    online_softmax_update,
    store_tile,
    tanh,
    transpose_plan,
    zero_unseen,
)


class Tile(NamedTuple):
    """Tile sizes and schedule of a kernel.

    Attributes:
        block_m: Queries per tile.
        block_n: Keys per tile.
        num_warps: Warps per program.
        num_stages: Stages of the software pipeline.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# number of sink tiles: the first key tiles of a sequence, to which every query attends. Their
# gradients take longest to compute. Therefore each query head has a separate program per sink tile,
# and the gradients of a group of heads are summed afterwards
NUM_SINK_TILES = 4
# kernel -> largest head dim -> tile, the fastest in the benchmark `speed attention` on an H200
DESCRIPTOR_TILES = {
    "forward": {64: Tile(128, 64, 4, 2), 128: Tile(128, 64, 4, 2), 256: Tile(128, 64, 8, 2)},
    "query gradient": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 2)},
    "key gradient": {64: Tile(128, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(32, 64, 8, 2)},
}
# tiles on GPUs where kernels access tiles by pointers. They fit in 99 KiB of shared memory (AMD:
# 64 KiB) with the fewest register spills, see `tests/ops/test_kernels_compile.py`. Speed was not
# measured
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
    plan: PlanTensors,
    scale: float,
    softcap: float,
) -> None:
    """Compute attention under ``plan``, and write ``out`` and ``lse``.

    Args:
        q: [B, H, N_q, D].
        k, v: [B, H_kv, N_k, D].
        out: [B, H, N_q, D], receives the output.
        lse: float32 [B, H, N_q], receives the log-sum-exp (natural logarithm).
        plan: The key blocks that each query block attends to.
        scale: Factor of the products q · k.
        softcap: Soft cap of the scaled logits; 0 for no cap.
    """
    kernel_plan, sizes = make_kernel_arguments(q, k, plan)
    tile = _choose_tile("forward", q, plan)
    num_tiles = triton.cdiv(q.shape[2], tile.block_m)
    _block_attention_fwd_kernel[(num_tiles, q.shape[0] * q.shape[1])](
        desc_q=make_descriptor(q, tile.block_m),
        desc_k=make_descriptor(k, tile.block_n),
        desc_v=make_descriptor(v, tile.block_n),
        desc_out=make_descriptor(out, tile.block_m),
        lse=lse,
        plan=kernel_plan,
        sizes=sizes,
        **make_logit_scale_arguments(scale, softcap),
        **_make_constexpr_arguments(tile, q, plan),
        HAS_FUTURE_KEYS=has_future_keys(plan, q_length=q.shape[2], kv_length=k.shape[2]),
    )


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: BackwardStats,
    plan: PlanTensors,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, bit-identical in every run.

    Args:
        grad: [B, H, N_q, D], the gradient of the output.
        q: [B, H, N_q, D].
        k, v: [B, H_kv, N_k, D].
        stats: Log-sum-exp and delta of every query, from `compute_backward_stats`.
        plan: The plan of the forward pass.
        scale: Factor of the products q · k.
        softcap: Soft cap of the scaled logits; 0 for no cap.
    """
    dq = allocate_transposed(q)
    _write_query_gradient(
        dq, grad=grad, q=q, k=k, v=v, stats=stats, plan=plan, scale=scale, softcap=softcap
    )
    dk, dv = allocate_transposed(k), allocate_transposed(v)
    _write_key_gradients(
        dk, dv, grad=grad, q=q, k=k, v=v, stats=stats, plan=plan, scale=scale, softcap=softcap
    )
    return dq, dk, dv


def _write_query_gradient(
    dq: Tensor,
    *,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: BackwardStats,
    plan: PlanTensors,
    scale: float,
    softcap: float,
) -> None:
    """Write the gradient of q to ``dq`` [B, H, N_q, D]. The arguments are those of `backward`."""
    kernel_plan, sizes = make_kernel_arguments(q, k, plan)
    tile = _choose_tile("query gradient", q, plan)
    num_tiles = triton.cdiv(q.shape[2], tile.block_m)
    _block_attention_bwd_query_kernel[(num_tiles, q.shape[0] * q.shape[1])](
        desc_q=make_descriptor(q, tile.block_m),
        desc_do=make_descriptor(grad, tile.block_m),
        desc_k=make_descriptor(k, tile.block_n),
        desc_v=make_descriptor(v, tile.block_n),
        desc_dq=make_descriptor(dq, tile.block_m),
        stats=stats,
        plan=kernel_plan,
        softmax_scale=scale,
        sizes=sizes,
        **make_logit_scale_arguments(scale, softcap),
        **_make_constexpr_arguments(tile, q, plan),
    )


def _write_key_gradients(
    dk: Tensor,
    dv: Tensor,
    *,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: BackwardStats,
    plan: PlanTensors,
    scale: float,
    softcap: float,
) -> None:
    """Write the gradients of k and v to ``dk`` and ``dv``, [B, H_kv, N_k, D] each.

    The other arguments are those of `backward`.
    """
    kernel_plan, sizes = make_kernel_arguments(q, k, plan)
    batch, heads, kv_heads = q.shape[0], sizes.heads, sizes.kv_heads
    tile = _choose_tile("key gradient", q, plan)
    num_tiles = triton.cdiv(k.shape[2], tile.block_n)
    num_sink_tiles = min(NUM_SINK_TILES, num_tiles)
    sink_shape = (batch, heads, num_sink_tiles * tile.block_n, k.shape[3])
    sink_dk = k.new_empty(sink_shape, dtype=torch.float32)
    sink_dv = v.new_empty(sink_shape, dtype=torch.float32)
    kv_blocks = triton.cdiv(k.shape[2], plan.key_block)
    num_programs = batch * (num_sink_tiles * heads + (num_tiles - num_sink_tiles) * kv_heads)
    _block_attention_bwd_key_kernel[(num_programs,)](
        desc_q=make_descriptor(q, tile.block_m),
        desc_do=make_descriptor(grad, tile.block_m),
        desc_k=make_descriptor(k, tile.block_n),
        desc_v=make_descriptor(v, tile.block_n),
        desc_dk=make_descriptor(dk, tile.block_n),
        desc_dv=make_descriptor(dv, tile.block_n),
        desc_sink_dk=make_descriptor(sink_dk, tile.block_n),
        desc_sink_dv=make_descriptor(sink_dv, tile.block_n),
        stats=stats,
        plan=transpose_plan(kernel_plan, kv_blocks),
        softmax_scale=scale,
        kv_blocks=kv_blocks,
        num_sink_tiles=num_sink_tiles,
        batch_size=batch,
        sizes=sizes,
        **make_logit_scale_arguments(scale, softcap),
        **_make_constexpr_arguments(tile, q, plan),
    )
    for key_gradient, sink_gradient in ((dk, sink_dk), (dv, sink_dv)):
        key_gradient_of_sinks = key_gradient[:, :, : sink_gradient.shape[2]]
        summed_sink_gradient = sink_gradient.unflatten(1, (kv_heads, -1)).sum(2)
        key_gradient_of_sinks.copy_(summed_sink_gradient[:, :, : key_gradient_of_sinks.shape[2]])


def _choose_tile(kernel_name: str, q: Tensor, plan: PlanTensors) -> Tile:
    """Return the tile of a kernel for the head dim, dtype and device of q.

    The tile sizes divide the block sizes of the plan.

    Args:
        kernel_name: Key of `DESCRIPTOR_TILES`: ``"forward"``, ``"query gradient"`` or
            ``"key gradient"``.
        q: [B, H, N_q, D].
        plan: The plan.
    """
    if launch.reads_by_descriptor(q.device):
        tile = next(
            tile for dim, tile in DESCRIPTOR_TILES[kernel_name].items() if q.shape[3] <= dim
        )
    else:
        # `POINTER_TILES` is for 16-bit numbers; a float32 needs the memory of two
        dim_in_16_bit_channels = q.shape[3] * q.element_size() // 2
        tile = next(
            tile
            for dim, tile in POINTER_TILES[kernel_name].items()
            if dim_in_16_bit_channels <= dim
        )
        if not launch.has_ptx(q):
            # AMD's warps have 64 threads instead of 32
            tile = tile._replace(block_m=tile.block_m // 2, num_warps=4)
    if q.element_size() > 2:
        tile = tile._replace(block_m=min(tile.block_m, 64), block_n=32, num_stages=1)
    return tile._replace(
        block_m=choose_tile_size(plan.query_block, tile.block_m),
        block_n=choose_tile_size(plan.key_block, tile.block_n),
    )


def _make_constexpr_arguments(tile: Tile, q: Tensor, plan: PlanTensors) -> dict[str, int | str]:
    """Return the constexpr arguments and launch options that all kernels of this module share."""
    return {
        "QUERY_BLOCK": plan.query_block,
        "KEY_BLOCK": plan.key_block,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "D": triton.next_power_of_2(q.shape[3]),
        "PRECISION": choose_precision(q),
        "NUM_STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
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
    HAS_SOFTCAP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_FUTURE_KEYS: tl.constexpr,
):
    """Write the output [BLOCK_M, D] and the log-sum-exp [BLOCK_M] of one tile of queries."""
    # later queries attend to more keys. Their programs start first, so that no long program is left
    # over at the end of the launch
    query_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch, head, kv_head, plan_row = locate_tile(tl.program_id(1), query_start, sizes, QUERY_BLOCK)
    q = load_tile(desc_q, batch, head, token=query_start, channel=0, TOKENS=BLOCK_M, CHANNELS=D)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)

    # full blocks without a mask, then partial blocks with a mask
    for IS_MASKED in tl.static_range(2):
        block_lists = plan[IS_MASKED]
        block_indices = block_lists.indices + plan_row * block_lists.width
        num_tiles = tl.load(block_lists.counts + plan_row) * (KEY_BLOCK // BLOCK_N)
        if IS_MASKED:
            # loaded after the loop over full blocks, where registers are scarce
            query_index = query_start + tl.arange(0, BLOCK_M)
            first_key, last_key = load_key_ranges(plan, batch, query_index, sizes.q_length)
        for tile_index in tl.range(0, num_tiles, num_stages=NUM_STAGES):
            # k, v: [BLOCK_N, D]; qk, p: [BLOCK_M, BLOCK_N]
            key_start = load_tile_start(block_indices, tile_index, KEY_BLOCK, BLOCK_N)
            k = load_tile(
                desc_k, batch, kv_head, token=key_start, channel=0, TOKENS=BLOCK_N, CHANNELS=D
            )
            qk = tl.dot(q, k.T, input_precision=PRECISION)
            if HAS_SOFTCAP:
                qk = tanh(qk * cap_scale)
            if IS_MASKED:
                key_index = key_start + tl.arange(0, BLOCK_N)[None, :]
                qk = tl.where(
                    is_visible(key_index, first_key[:, None], last_key[:, None]), qk, float("-inf")
                )
            m_i, l_i, p, alpha = online_softmax_update(
                m_i=m_i, l_i=l_i, qk=qk, qk_scale=qk_scale, IS_MASKED=IS_MASKED
            )
            acc = acc * alpha[:, None]
            v = load_tile(
                desc_v, batch, kv_head, token=key_start, channel=0, TOKENS=BLOCK_N, CHANNELS=D
            )
            if IS_MASKED and HAS_FUTURE_KEYS:
                v = zero_unseen(v, key_start + tl.arange(0, BLOCK_N), first_key, last_key)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    # write zeros and -inf for queries without keys. A padding query (last < 0) may have l_i > 0,
    # because full blocks are not masked
    has_no_keys = (last_key < 0) | (l_i == 0)
    l_i = tl.where(has_no_keys, 1.0, l_i)
    acc = tl.where(has_no_keys[:, None], 0.0, acc / l_i[:, None])
    store_tile(
        desc_out, batch, head, token=query_start, channel=0, tile=acc, TOKENS=BLOCK_M, CHANNELS=D
    )
    query_lse = tl.where(has_no_keys, float("-inf"), (m_i + tl.log2(l_i)) * LN_2)
    plane = tl.program_id(1).to(tl.int64)
    tl.store(
        lse + plane * sizes.q_length + query_index, query_lse, mask=query_index < sizes.q_length
    )


@triton.jit
def _block_attention_bwd_query_kernel(
    desc_q,
    desc_do,
    desc_k,
    desc_v,
    desc_dq,
    stats,
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
    HAS_SOFTCAP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Write the gradient dq [BLOCK_M, D] of one tile of queries."""
    query_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch, head, kv_head, plan_row = locate_tile(tl.program_id(1), query_start, sizes, QUERY_BLOCK)

    # first, last, lse, delta: [BLOCK_M]; q, do, dq: [BLOCK_M, D]
    query_index = query_start + tl.arange(0, BLOCK_M)
    first_key, last_key = load_key_ranges(plan, batch, query_index, sizes.q_length)
    query_offset = tl.program_id(1).to(tl.int64) * stats.padded_length + query_index
    lse = tl.load(stats.lse + query_offset)
    delta = tl.load(stats.delta + query_offset)
    q = load_tile(desc_q, batch, head, token=query_start, channel=0, TOKENS=BLOCK_M, CHANNELS=D)
    do = load_tile(desc_do, batch, head, token=query_start, channel=0, TOKENS=BLOCK_M, CHANNELS=D)
    dq = tl.zeros((BLOCK_M, D), tl.float32)

    # full blocks without a mask, then partial blocks with a mask
    for IS_MASKED in tl.static_range(2):
        block_lists = plan[IS_MASKED]
        block_indices = block_lists.indices + plan_row * block_lists.width
        num_tiles = tl.load(block_lists.counts + plan_row) * (KEY_BLOCK // BLOCK_N)
        for tile_index in tl.range(0, num_tiles, num_stages=NUM_STAGES):
            # k, v: [BLOCK_N, D]; qk, p, dp, ds: [BLOCK_M, BLOCK_N]
            key_start = load_tile_start(block_indices, tile_index, KEY_BLOCK, BLOCK_N)
            k = load_tile(
                desc_k, batch, kv_head, token=key_start, channel=0, TOKENS=BLOCK_N, CHANNELS=D
            )
            v = load_tile(
                desc_v, batch, kv_head, token=key_start, channel=0, TOKENS=BLOCK_N, CHANNELS=D
            )
            qk = tl.dot(q, k.T, input_precision=PRECISION)
            if HAS_SOFTCAP:
                qk = tanh(qk * cap_scale)
            p = tl.exp2(qk * qk_scale - lse[:, None])
            if IS_MASKED:
                key_index = key_start + tl.arange(0, BLOCK_N)[None, :]
                p = tl.where(is_visible(key_index, first_key[:, None], last_key[:, None]), p, 0.0)
            dp = tl.dot(do, v.T, input_precision=PRECISION)
            ds = p * (dp - delta[:, None])
            if HAS_SOFTCAP:
                # derivative of tanh
                ds *= 1 - qk * qk
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq = dq * softmax_scale
    store_tile(
        desc_dq, batch, head, token=query_start, channel=0, tile=dq, TOKENS=BLOCK_M, CHANNELS=D
    )


@triton.jit
def _assign_key_tile(program, num_sink_tiles, batch_size, heads, kv_heads, num_tiles):
    """Return the key tile and the query heads that a program of the key gradient kernel processes.

    Every query attends to the first ``num_sink_tiles`` key tiles, so these tiles take longest.
    Their programs start first, and each query head has a separate program. A program of another
    tile processes all query heads of one KV head.

    Args:
        program: Index of the program.
        num_sink_tiles: Number of sink tiles.
        batch_size: Batch size.
        heads, kv_heads: Heads of q, and of k and v.
        num_tiles: Number of key tiles of the sequence.

    Returns:
        tile: Index of the key tile.
        batch: Index of the batch row.
        first_head: The first query head that the program processes.
        num_heads: Number of consecutive query heads that the program processes.
    """
    num_sink_programs = num_sink_tiles * batch_size * heads
    is_sink = program < num_sink_programs
    program_after_sinks = tl.maximum(program - num_sink_programs, 0)
    num_tiles_after_sinks = tl.maximum(num_tiles - num_sink_tiles, 1)
    plane = tl.where(
        is_sink, program % (batch_size * heads), program_after_sinks // num_tiles_after_sinks
    )
    num_heads = tl.where(is_sink, 1, heads // kv_heads)
    planes_per_batch = tl.where(is_sink, heads, kv_heads)
    tile = tl.where(
        is_sink,
        program // (batch_size * heads),
        num_sink_tiles + program_after_sinks % num_tiles_after_sinks,
    )
    return tile, plane // planes_per_batch, plane % planes_per_batch * num_heads, num_heads


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
    stats,
    plan,
    softmax_scale,
    kv_blocks,
    num_sink_tiles,
    batch_size,
    qk_scale,
    cap_scale,
    sizes,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Write the gradients dk and dv [BLOCK_N, D] of one tile of keys and values.

    ``plan`` contains `ColumnLists`: the query blocks that list each key block. Gradients of sink
    tiles are written per query head to ``desc_sink_dk`` and ``desc_sink_dv``, other gradients per
    KV head to ``desc_dk`` and ``desc_dv``.
    """
    heads, kv_heads = sizes.heads, sizes.kv_heads
    num_tiles = (
        tl.num_programs(0) // batch_size - num_sink_tiles * heads
    ) // kv_heads + num_sink_tiles
    key_tile, batch, first_head, num_heads = _assign_key_tile(
        program=tl.program_id(0),
        num_sink_tiles=num_sink_tiles,
        batch_size=batch_size,
        heads=heads,
        kv_heads=kv_heads,
        num_tiles=num_tiles,
    )

    # k, v, dk, dv: [BLOCK_N, D]
    key_start = key_tile * BLOCK_N
    kv_head = first_head // (heads // kv_heads)
    key_index = key_start + tl.arange(0, BLOCK_N)
    k = load_tile(desc_k, batch, kv_head, token=key_start, channel=0, TOKENS=BLOCK_N, CHANNELS=D)
    v = load_tile(desc_v, batch, kv_head, token=key_start, channel=0, TOKENS=BLOCK_N, CHANNELS=D)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)

    for head in range(first_head, first_head + num_heads):
        plan_column = (
            compute_plan_head_index(batch, head, sizes) * kv_blocks + key_start // KEY_BLOCK
        )
        stats_offset = (batch * heads + head).to(tl.int64) * stats.padded_length
        # query blocks that list the tile as full (without a mask), then as partial (with a mask)
        for IS_MASKED in tl.static_range(2):
            column_lists = plan[IS_MASKED]
            query_blocks = column_lists.rows + tl.load(column_lists.starts + plan_column)
            num_tiles = tl.load(column_lists.counts + plan_column) * (QUERY_BLOCK // BLOCK_M)
            for tile_index in tl.range(0, num_tiles, num_stages=NUM_STAGES):
                # q, do: [BLOCK_M, D]; qk, p, dp, ds: [BLOCK_N, BLOCK_M]
                query_start = load_tile_start(query_blocks, tile_index, QUERY_BLOCK, BLOCK_M)
                query_index = query_start + tl.arange(0, BLOCK_M)
                q = load_tile(
                    desc_q, batch, head, token=query_start, channel=0, TOKENS=BLOCK_M, CHANNELS=D
                )
                do = load_tile(
                    desc_do, batch, head, token=query_start, channel=0, TOKENS=BLOCK_M, CHANNELS=D
                )
                lse = tl.load(stats.lse + stats_offset + query_index)
                qk = tl.dot(k, q.T, input_precision=PRECISION)
                if HAS_SOFTCAP:
                    qk = tanh(qk * cap_scale)
                p = tl.exp2(qk * qk_scale - lse[None, :])
                if IS_MASKED:
                    first_key, last_key = load_key_ranges(plan, batch, query_index, sizes.q_length)
                    p = tl.where(
                        is_visible(key_index[:, None], first_key[None, :], last_key[None, :]),
                        p,
                        0.0,
                    )
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                dp = tl.dot(v, do.T, input_precision=PRECISION)
                # loaded after the product, because registers are scarce
                delta = tl.load(stats.delta + stats_offset + query_index)
                ds = p * (dp - delta[None, :])
                if HAS_SOFTCAP:
                    # derivative of tanh
                    ds *= 1 - qk * qk
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    dk = dk * softmax_scale
    if key_tile < num_sink_tiles:
        store_tile(
            desc_sink_dk,
            batch,
            first_head,
            token=key_start,
            channel=0,
            tile=dk,
            TOKENS=BLOCK_N,
            CHANNELS=D,
        )
        store_tile(
            desc_sink_dv,
            batch,
            first_head,
            token=key_start,
            channel=0,
            tile=dv,
            TOKENS=BLOCK_N,
            CHANNELS=D,
        )
    else:
        store_tile(
            desc_dk, batch, kv_head, token=key_start, channel=0, tile=dk, TOKENS=BLOCK_N, CHANNELS=D
        )
        store_tile(
            desc_dv, batch, kv_head, token=key_start, channel=0, tile=dv, TOKENS=BLOCK_N, CHANNELS=D
        )
