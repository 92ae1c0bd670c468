"""Block attention for large head dims: separate kernels for the products q · k and weights · v.

For large D, a tile of the output [queries, D] does not fit in registers next to the weights
[queries, keys]. If each program computed one slice of D, it would recompute the weights for its
slice. Therefore one kernel writes the weights to memory, and another kernel reads the weights:

* The first kernel multiplies queries and keys, `CHUNK_D` channels at a time. A program writes the
  weights of one tile of queries and one stretch: `KEYS_PER_STRETCH` consecutive keys in the list of
  keys.
* The second kernel multiplies the weights with one slice of the values' channels.

The need for shared memory and registers is independent of D. A 16-bit weight has two bytes per 4 D
operations, so that writing the weights costs little time. `WORKSPACE_BYTES` limits the memory of
the weights: query blocks are processed in pieces.

In the forward pass, the first kernel writes exp2(logit - m), where m is the maximum of the query in
the stretch. The second kernel rescales these weights to the log-sum-exp of the query.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from cab_hf.ops.attention import split_kernels as kernels
from cab_hf.ops.attention.tiles import (
    AttentionSizes,
    BackwardStats,
    KernelPlan,
    PlanTensors,
    allocate_transposed,
    choose_precision,
    choose_tile_size,
    has_future_keys,
    make_descriptor,
    make_kernel_arguments,
    make_logit_scale_arguments,
    make_vectors,
    transpose_plan,
)
from cab_hf.plan import BlockIndices

# largest number of bytes of the weights of a piece; a piece with only one query block may need more
WORKSPACE_BYTES = 2 << 30
# listed keys whose weights one program computes, for 16-bit numbers
KEYS_PER_STRETCH = 128
# output channels per program in products p @ x, see `_multiply_rows`
ROW_SLICE_CHANNELS = 128
# output channels per program in products p.T @ x, see `_multiply_columns`; the size that needs the
# least padding of D is used
COLUMN_SLICE_CHANNELS = (256, 128)
# channels of queries and keys that a program multiplies at a time
CHUNK_D = 64
# stretches whose softmax statistics a program reads per loop iteration
STRETCHES_PER_ITERATION = 16


class QueryPiece(NamedTuple):
    """Consecutive query blocks whose weights are in memory at the same time.

    Attributes:
        plan: The lists of the piece's query blocks, and the key ranges of all queries.
        kernel_plan: ``plan`` as an argument of kernels.
        sizes: Sizes of the attention call, with ``first_query`` and ``num_tokens`` of this piece.
        num_keys: Allocated weights per query, a multiple of ``keys_per_stretch``.
        keys_per_stretch: Number of listed keys whose weights one program computes.
    """

    plan: PlanTensors
    kernel_plan: KernelPlan
    sizes: AttentionSizes
    num_keys: int
    keys_per_stretch: int


class StretchStats(NamedTuple):
    """Softmax statistics of every query per stretch, float32 [B * H, stretches, tokens].

    Attributes:
        m_i: The maximum logit of the stretch, to base two, rounded up to an integer.
        l_i: The sum of exp2(logit - m_i) over the stretch.
    """

    m_i: Tensor
    l_i: Tensor


class LogitGradients(NamedTuple):
    """Inputs and output of the kernel that computes the gradients of the logits.

    Attributes:
        grad: [B, H, N_q, D], the gradient of the output.
        v: [B, H_kv, N_k, D].
        stats: Log-sum-exp and delta of every query, from `compute_backward_stats`.
        ds: [B, H, tokens, keys], receives the gradients of the logits.
    """

    grad: Tensor
    v: Tensor
    stats: BackwardStats
    ds: Tensor


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
    for piece in _divide_into_pieces(q, k, plan, num_weight_matrices=1):
        num_planes, num_stretches = (
            q.shape[0] * q.shape[1],
            piece.num_keys // piece.keys_per_stretch,
        )
        num_tokens, query_tile = piece.sizes.num_tokens, _choose_query_tile(plan)
        p = _allocate_weights(q, piece)
        stats_shape = (num_planes, num_stretches, num_tokens)
        stats = StretchStats(
            m_i=q.new_empty(stats_shape, dtype=torch.float32),
            l_i=q.new_empty(stats_shape, dtype=torch.float32),
        )
        _write_weights(q, k, p, piece, scale=scale, softcap=softcap, stats=stats)
        kernels.block_attention_split_lse_kernel[(num_tokens // query_tile, num_planes)](
            stats=stats,
            lse=lse,
            plan=piece.kernel_plan,
            num_allocated_stretches=num_stretches,
            sizes=piece.sizes,
            QUERY_BLOCK=plan.query_block,
            KEY_BLOCK=plan.key_block,
            BLOCK_M=query_tile,
            STRETCH=piece.keys_per_stretch,
            BLOCK_STRETCHES=STRETCHES_PER_ITERATION,
            num_warps=4,
        )
        _multiply_rows(p, x=v, out=out, piece=piece, scale=1.0, m_i=stats.m_i, lse=lse)
        # free the memory before the next piece allocates it
        del p, stats


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
    # in float32, because every piece adds to these tensors
    dk, dv = (torch.zeros_like(allocate_transposed(x), dtype=torch.float32) for x in (k, v))
    kv_blocks = triton.cdiv(k.shape[2], plan.key_block)
    for piece in _divide_into_pieces(q, k, plan, num_weight_matrices=2):
        p, ds = _allocate_weights(q, piece), _allocate_weights(q, piece)
        logit_gradients = LogitGradients(grad=grad, v=v, stats=stats, ds=ds)
        _write_weights(
            q, k, p, piece, scale=scale, softcap=softcap, logit_gradients=logit_gradients
        )
        _multiply_rows(ds, x=k, out=dq, piece=piece, scale=scale)
        column_plan = transpose_plan(piece.kernel_plan, kv_blocks, with_slots=True)
        _multiply_columns(p, x=grad, out=dv, piece=piece, column_plan=column_plan, scale=1.0)
        _multiply_columns(ds, x=q, out=dk, piece=piece, column_plan=column_plan, scale=scale)
        # free the memory before the next piece allocates it
        del p, ds, logit_gradients, column_plan
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _divide_into_pieces(
    q: Tensor, k: Tensor, plan: PlanTensors, num_weight_matrices: int
) -> Iterator[QueryPiece]:
    """Yield consecutive pieces of the query blocks whose weights fit in `WORKSPACE_BYTES`.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        plan: The plan of all query blocks.
        num_weight_matrices: 1 (p) in the forward pass, 2 (p and ds) in the backward pass.
    """
    query_block = plan.query_block
    bytes_per_key = num_weight_matrices * q.shape[0] * q.shape[1] * query_block * q.element_size()
    max_keys = WORKSPACE_BYTES // bytes_per_key
    # half the keys for float32, so that a stretch needs the same shared memory
    keys_per_stretch = KEYS_PER_STRETCH * 2 // max(2, q.element_size())
    num_keys_of_blocks = [
        _round_up(max(1, num_keys), keys_per_stretch) for num_keys in _count_listed_keys(plan)
    ]
    first_block = 0
    while first_block < len(num_keys_of_blocks):
        end_block, num_keys = first_block + 1, num_keys_of_blocks[first_block]
        while (
            end_block < len(num_keys_of_blocks)
            and (end_block + 1 - first_block) * max(num_keys, num_keys_of_blocks[end_block])
            <= max_keys
        ):
            num_keys = max(num_keys, num_keys_of_blocks[end_block])
            end_block += 1
        piece_plan = plan._replace(
            full=_slice_query_blocks(plan.full, first_block, end_block),
            partial=_slice_query_blocks(plan.partial, first_block, end_block),
        )
        kernel_plan, sizes = make_kernel_arguments(q, k, piece_plan)
        yield QueryPiece(
            plan=piece_plan,
            kernel_plan=kernel_plan,
            sizes=sizes._replace(
                first_query=first_block * query_block,
                num_tokens=(end_block - first_block) * query_block,
            ),
            num_keys=num_keys,
            keys_per_stretch=keys_per_stretch,
        )
        first_block = end_block


def _slice_query_blocks(block_lists: BlockIndices, begin: int, end: int) -> BlockIndices:
    """Return the lists of query blocks begin to end - 1, without a copy if these are all blocks."""
    return block_lists.map_tensors(lambda x: x[:, :, begin:end].contiguous())


def _count_listed_keys(plan: PlanTensors) -> list[int]:
    """Return for every query block the largest number of listed keys over all heads and batch rows.

    The function synchronises with the device. While a CUDA graph is captured, the function returns
    the allocated number of keys instead.
    """
    counts = plan.full.counts + plan.partial.counts
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        return [(plan.full.width + plan.partial.width) * plan.key_block] * counts.shape[2]
    return (counts.amax((0, 1)) * plan.key_block).tolist()


def _allocate_weights(q: Tensor, piece: QueryPiece) -> Tensor:
    """Allocate the weights of a piece, [B, H, tokens, keys]: one per query and listed key."""
    return q.new_empty(q.shape[0], q.shape[1], piece.sizes.num_tokens, piece.num_keys)


def _write_weights(
    q: Tensor,
    k: Tensor,
    p: Tensor,
    piece: QueryPiece,
    *,
    scale: float,
    softcap: float,
    stats: StretchStats | None = None,
    logit_gradients: LogitGradients | None = None,
) -> None:
    """Write the weights of a piece, and in the backward pass the gradients of the logits.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        p: [B, H, tokens, keys], receives the weights.
        piece: The query blocks.
        scale: Factor of the products q · k.
        softcap: Soft cap of the scaled logits; 0 for no cap.
        stats: Receives the softmax statistics of each stretch in the forward pass; None in the
            backward pass.
        logit_gradients: Inputs and output for the gradients of the logits in the backward pass;
            None in the forward pass.
    """
    plan, keys_per_stretch = piece.plan, piece.keys_per_stretch
    query_tile = _choose_query_tile(plan)
    backward_arguments = dict.fromkeys(("desc_do", "desc_v", "v", "desc_ds", "backward_stats"))
    if logit_gradients is not None:
        backward_arguments = {
            "desc_do": make_descriptor(logit_gradients.grad, query_tile, channels=CHUNK_D),
            "desc_v": make_descriptor(logit_gradients.v, keys_per_stretch, channels=CHUNK_D),
            "v": make_vectors(logit_gradients.v),
            "desc_ds": make_descriptor(logit_gradients.ds, query_tile, channels=keys_per_stretch),
            "backward_stats": logit_gradients.stats,
        }
    grid = (
        piece.num_keys // keys_per_stretch,
        piece.sizes.num_tokens // query_tile,
        q.shape[0] * q.shape[1],
    )
    kernels.block_attention_split_p_kernel[grid](
        desc_q=make_descriptor(q, query_tile, channels=CHUNK_D),
        desc_k=make_descriptor(k, keys_per_stretch, channels=CHUNK_D),
        k=make_vectors(k),
        desc_p=make_descriptor(p, query_tile, channels=keys_per_stretch),
        **backward_arguments,
        stats=stats,
        plan=piece.kernel_plan,
        kv_length=k.shape[2],
        sizes=piece.sizes,
        **make_logit_scale_arguments(scale, softcap),
        **_make_constexpr_arguments(q, plan),
        BLOCK_M=query_tile,
        STRETCH=keys_per_stretch,
        D=q.shape[3],
        CHUNK_D=CHUNK_D,
    )


def _multiply_rows(
    p: Tensor,
    *,
    x: Tensor,
    out: Tensor,
    piece: QueryPiece,
    scale: float,
    m_i: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Write out[i] = scale * sum_j p[i, j] x[j] over the listed keys j, for queries i of a piece.

    Args:
        p: [B, H, tokens, keys], weights of the forward pass, or gradients of the logits.
        x: [B, H_kv, N_k, D], v or k.
        out: [B, H, N_q, D], receives the product.
        piece: The query blocks.
        scale: Factor of the product.
        m_i: `StretchStats.m_i`, for weights of the forward pass; None if p needs no rescaling.
        lse: float32 [B, H, N_q], the log-sum-exp, for weights of the forward pass; None if p needs
            no rescaling.
    """
    plan, sizes, keys_per_stretch = piece.plan, piece.sizes, piece.keys_per_stretch
    query_tile, key_tile = _choose_query_tile(plan), _choose_key_tile(plan)
    is_forward = lse is not None
    grid = (
        triton.cdiv(x.shape[3], ROW_SLICE_CHANNELS),
        sizes.num_tokens // query_tile,
        out.shape[0] * out.shape[1],
    )
    kernels.block_attention_split_query_kernel[grid](
        desc_p=make_descriptor(p, query_tile, channels=key_tile),
        desc_x=make_descriptor(x, key_tile, channels=ROW_SLICE_CHANNELS),
        desc_out=make_descriptor(out, query_tile, channels=ROW_SLICE_CHANNELS),
        m_i=m_i,
        lse=lse,
        plan=piece.kernel_plan,
        scale=scale,
        num_allocated_stretches=piece.num_keys // keys_per_stretch,
        sizes=sizes,
        **_make_constexpr_arguments(x, plan),
        BLOCK_M=query_tile,
        BLOCK_N=key_tile,
        STRETCH=keys_per_stretch,
        BLOCK_D=ROW_SLICE_CHANNELS,
        HAS_FUTURE_KEYS=is_forward and has_future_keys(plan, sizes.q_length, x.shape[2]),
    )


def _multiply_columns(
    p: Tensor, *, x: Tensor, out: Tensor, piece: QueryPiece, column_plan: KernelPlan, scale: float
) -> None:
    """Add scale * sum_i p[i, j] x[i] to out[j], over the queries i of a piece that list key j.

    Args:
        p: [B, H, tokens, keys], weights, or gradients of the logits.
        x: [B, H, N_q, D], the gradient of the output, or q.
        out: float32 [B, H_kv, N_k, D], changed in place.
        piece: The query blocks.
        column_plan: The plan of the piece as `ColumnLists` (query blocks that list each key block)
            with slots.
        scale: Factor of the product.
    """
    plan = piece.plan
    query_tile, key_tile = min(64, _choose_query_tile(plan)), _choose_key_tile(plan)
    batch, kv_heads, kv_length, dim = out.shape
    slice_channels = min(
        COLUMN_SLICE_CHANNELS, key=lambda slice_channels: _round_up(dim, slice_channels)
    )
    grid = (triton.cdiv(dim, slice_channels), triton.cdiv(kv_length, key_tile), batch * kv_heads)
    kernels.block_attention_split_bwd_key_kernel[grid](
        desc_p=make_descriptor(p, query_tile, channels=key_tile),
        desc_x=make_descriptor(x, query_tile, channels=slice_channels),
        out=make_vectors(out),
        full_counts=piece.kernel_plan.full.counts,
        plan=column_plan,
        scale=scale,
        kv_length=kv_length,
        kv_blocks=triton.cdiv(kv_length, plan.key_block),
        sizes=piece.sizes,
        **_make_constexpr_arguments(x, plan),
        BLOCK_M=query_tile,
        BLOCK_N=key_tile,
        BLOCK_D=slice_channels,
        D=dim,
    )


def _choose_query_tile(plan: PlanTensors) -> int:
    """Return the queries per tile, a divisor of the query block."""
    return choose_tile_size(plan.query_block, 128)


def _choose_key_tile(plan: PlanTensors) -> int:
    """Return the keys per tile, a divisor of the key block."""
    return choose_tile_size(plan.key_block, 64)


def _round_up(minimum: int, multiple: int) -> int:
    return triton.cdiv(minimum, multiple) * multiple


def _make_constexpr_arguments(x: Tensor, plan: PlanTensors) -> dict[str, int | str]:
    """Return the constexpr arguments and launch options that the kernels with products share."""
    return {
        "QUERY_BLOCK": plan.query_block,
        "KEY_BLOCK": plan.key_block,
        "PRECISION": choose_precision(x),
        "num_warps": 8,
        "num_stages": 3,
    }
