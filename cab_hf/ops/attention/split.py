"""Block attention for large head dims: separate kernels for the products q · k and weights · v.

For large D, a tile of the output [queries, D] does not fit in registers next to the weights
[queries, keys]. If each program computed one slice of D, it would recompute the weights for its
slice. Therefore one kernel writes the weights to memory, and another kernel reads the weights:

* The first kernel multiplies queries and keys, `DEPTH` channels at a time. A program writes the
  weights of one tile of queries and one stretch: `STRETCH` consecutive keys in the list of keys.
* The second kernel multiplies the weights with one slice of the values' channels.

The need for shared memory and registers is independent of D. A 16-bit weight has two bytes per 4 D
operations, so that writing the weights costs little time. `WORKSPACE` limits the memory of the
weights: query blocks are processed in pieces.

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
    BackwardStats,
    Plan,
    PlanTensors,
    Sizes,
    descriptor,
    empty_transposed,
    has_future_keys,
    kernel_arguments,
    logit_scales,
    precision,
    tile_of,
    transposed_plan,
    vectors,
)
from cab_hf.plan import BlockIndices

# largest number of bytes of the weights of a piece; a piece with only one query block may need more
WORKSPACE = 2 << 30
# listed keys whose weights one program computes, for 16-bit numbers
STRETCH = 128
# output channels per program in products p @ x, see `_multiply_rows`
ROW_SLICE = 128
# output channels per program in products p.T @ x, see `_multiply_columns`; the size that needs the
# least padding of D is used
COLUMN_SLICES = (256, 128)
# channels of queries and keys that a program multiplies at a time
DEPTH = 64
# stretches whose softmax statistics a program reads per loop iteration
STRETCHES = 16


class Piece(NamedTuple):
    """Consecutive query blocks whose weights are in memory at the same time.

    Attributes:
        plan: The lists of the piece's query blocks, and the key ranges of all queries.
        kernel_plan: ``plan`` as an argument of kernels.
        sizes: Sizes of the attention call, with ``begin`` and ``tokens`` of this piece.
        keys: Allocated weights per query, a multiple of ``stretch``.
        stretch: Number of listed keys whose weights one program computes.
    """

    plan: PlanTensors
    kernel_plan: Plan
    sizes: Sizes
    keys: int
    stretch: int


class StretchStats(NamedTuple):
    """Softmax statistics of every query per stretch, float32 [B * H, stretches, tokens].

    Attributes:
        m_i: The maximum logit of the stretch, to base two, rounded up to an integer.
        l_i: The sum of exp2(logit - m_i) over the stretch.
    """

    m_i: Tensor
    l_i: Tensor


class Gradients(NamedTuple):
    """Inputs and output of the kernel that computes the gradients of the logits.

    Attributes:
        grad: [B, H, N_q, D], the gradient of the output.
        v: [B, H_kv, N_k, D].
        stats: Log-sum-exp and delta of every query, from `backward_stats`.
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
    for piece in _pieces(q, k, plan, matrices=1):
        planes, stretches = q.shape[0] * q.shape[1], piece.keys // piece.stretch
        tokens, tile = piece.sizes.tokens, _row_tile(plan)
        p = _empty_weights(q, piece)
        shape = (planes, stretches, tokens)
        stats = StretchStats(
            m_i=q.new_empty(shape, dtype=torch.float32),
            l_i=q.new_empty(shape, dtype=torch.float32),
        )
        _write_weights(q, k, p, piece, scale=scale, softcap=softcap, stats=stats)
        kernels.block_attention_split_lse_kernel[(tokens // tile, planes)](
            stats=stats,
            lse=lse,
            plan=piece.kernel_plan,
            stretches=stretches,
            sizes=piece.sizes,
            QUERY_BLOCK=plan.query_block,
            KEY_BLOCK=plan.key_block,
            BLOCK_M=tile,
            STRETCH=piece.stretch,
            STRETCHES=STRETCHES,
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
        stats: Log-sum-exp and delta of every query, from `backward_stats`.
        plan: The plan of the forward pass.
        scale: Factor of the products q · k.
        softcap: Soft cap of the scaled logits; 0 for no cap.
    """
    dq = empty_transposed(q)
    # in float32, because every piece adds to these tensors
    dk, dv = (torch.zeros_like(empty_transposed(x), dtype=torch.float32) for x in (k, v))
    kv_blocks = triton.cdiv(k.shape[2], plan.key_block)
    for piece in _pieces(q, k, plan, matrices=2):
        p, ds = _empty_weights(q, piece), _empty_weights(q, piece)
        gradients = Gradients(grad=grad, v=v, stats=stats, ds=ds)
        _write_weights(q, k, p, piece, scale=scale, softcap=softcap, gradients=gradients)
        _multiply_rows(ds, x=k, out=dq, piece=piece, scale=scale)
        columns = transposed_plan(piece.kernel_plan, kv_blocks, with_slots=True)
        _multiply_columns(p, x=grad, out=dv, piece=piece, columns=columns, scale=1.0)
        _multiply_columns(ds, x=q, out=dk, piece=piece, columns=columns, scale=scale)
        # free the memory before the next piece allocates it
        del p, ds, gradients, columns
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _pieces(q: Tensor, k: Tensor, plan: PlanTensors, matrices: int) -> Iterator[Piece]:
    """Divide the query blocks into pieces whose weights fit in `WORKSPACE` bytes; yield the pieces.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        plan: The plan of all query blocks.
        matrices: Number of weight matrices: 1 (p) in the forward pass, 2 (p and ds) in the backward
            pass.
    """
    block = plan.query_block
    bytes_per_key = matrices * q.shape[0] * q.shape[1] * block * q.element_size()
    max_keys = WORKSPACE // bytes_per_key
    # half the keys for float32, so that a stretch needs the same shared memory
    stretch = STRETCH * 2 // max(2, q.element_size())
    longest = [_round_up(max(1, keys), stretch) for keys in _longest_lists(plan)]
    begin = 0
    while begin < len(longest):
        end, keys = begin + 1, longest[begin]
        while end < len(longest) and (end + 1 - begin) * max(keys, longest[end]) <= max_keys:
            keys = max(keys, longest[end])
            end += 1
        piece_plan = plan._replace(
            full=_query_blocks(plan.full, begin, end),
            partial=_query_blocks(plan.partial, begin, end),
        )
        kernel_plan, sizes = kernel_arguments(q, k, piece_plan)
        yield Piece(
            plan=piece_plan,
            kernel_plan=kernel_plan,
            sizes=sizes._replace(begin=begin * block, tokens=(end - begin) * block),
            keys=keys,
            stretch=stretch,
        )
        begin = end


def _query_blocks(lists: BlockIndices, begin: int, end: int) -> BlockIndices:
    """Return the lists of query blocks begin to end - 1, without a copy if these are all blocks."""
    return lists.map_tensors(lambda x: x[:, :, begin:end].contiguous())


def _longest_lists(plan: PlanTensors) -> list[int]:
    """Return for every query block the largest number of listed keys over all heads and batch rows.

    The function synchronises with the device. While a CUDA graph is captured, the function returns
    the allocated number of keys instead.
    """
    counts = plan.full.counts + plan.partial.counts
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        return [(plan.full.width + plan.partial.width) * plan.key_block] * counts.shape[2]
    return (counts.amax((0, 1)) * plan.key_block).tolist()


def _empty_weights(q: Tensor, piece: Piece) -> Tensor:
    """Allocate the weights of a piece, [B, H, tokens, keys]: one per query and listed key."""
    return q.new_empty(q.shape[0], q.shape[1], piece.sizes.tokens, piece.keys)


def _write_weights(
    q: Tensor,
    k: Tensor,
    p: Tensor,
    piece: Piece,
    *,
    scale: float,
    softcap: float,
    stats: StretchStats | None = None,
    gradients: Gradients | None = None,
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
        gradients: Inputs and output for the gradients of the logits in the backward pass; None in
            the forward pass.
    """
    plan, stretch = piece.plan, piece.stretch
    tile = _row_tile(plan)
    backward_arguments = dict.fromkeys(("desc_do", "desc_v", "v", "desc_ds", "backward_stats"))
    if gradients is not None:
        backward_arguments = {
            "desc_do": descriptor(gradients.grad, tile, channels=DEPTH),
            "desc_v": descriptor(gradients.v, stretch, channels=DEPTH),
            "v": vectors(gradients.v),
            "desc_ds": descriptor(gradients.ds, tile, channels=stretch),
            "backward_stats": gradients.stats,
        }
    grid = (piece.keys // stretch, piece.sizes.tokens // tile, q.shape[0] * q.shape[1])
    kernels.block_attention_split_p_kernel[grid](
        desc_q=descriptor(q, tile, channels=DEPTH),
        desc_k=descriptor(k, stretch, channels=DEPTH),
        k=vectors(k),
        desc_p=descriptor(p, tile, channels=stretch),
        **backward_arguments,
        stats=stats,
        plan=piece.kernel_plan,
        kv_length=k.shape[2],
        sizes=piece.sizes,
        **logit_scales(scale, softcap),
        **_constants(q, plan),
        BLOCK_M=tile,
        STRETCH=stretch,
        D=q.shape[3],
        DEPTH=DEPTH,
    )


def _multiply_rows(
    p: Tensor,
    *,
    x: Tensor,
    out: Tensor,
    piece: Piece,
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
    plan, sizes, stretch = piece.plan, piece.sizes, piece.stretch
    tile, key_tile = _row_tile(plan), _column_tile(plan)
    is_forward = lse is not None
    grid = (triton.cdiv(x.shape[3], ROW_SLICE), sizes.tokens // tile, out.shape[0] * out.shape[1])
    kernels.block_attention_split_query_kernel[grid](
        desc_p=descriptor(p, tile, channels=key_tile),
        desc_x=descriptor(x, key_tile, channels=ROW_SLICE),
        desc_out=descriptor(out, tile, channels=ROW_SLICE),
        m_i=m_i,
        lse=lse,
        plan=piece.kernel_plan,
        scale=scale,
        stretches=piece.keys // stretch,
        sizes=sizes,
        **_constants(x, plan),
        BLOCK_M=tile,
        BLOCK_N=key_tile,
        STRETCH=stretch,
        BLOCK_D=ROW_SLICE,
        HAS_FUTURE_KEYS=is_forward and has_future_keys(plan, sizes.q_length, x.shape[2]),
    )


def _multiply_columns(
    p: Tensor, *, x: Tensor, out: Tensor, piece: Piece, columns: Plan, scale: float
) -> None:
    """Add scale * sum_i p[i, j] x[i] to out[j], over the queries i of a piece that list key j.

    Args:
        p: [B, H, tokens, keys], weights, or gradients of the logits.
        x: [B, H, N_q, D], the gradient of the output, or q.
        out: float32 [B, H_kv, N_k, D], changed in place.
        piece: The query blocks.
        columns: The plan of the piece as `ColumnLists` (query blocks that list each key block) with
            slots.
        scale: Factor of the product.
    """
    plan = piece.plan
    tile, key_tile = min(64, _row_tile(plan)), _column_tile(plan)
    batch, kv_heads, kv_length, dim = out.shape
    width = min(COLUMN_SLICES, key=lambda width: _round_up(dim, width))
    grid = (triton.cdiv(dim, width), triton.cdiv(kv_length, key_tile), batch * kv_heads)
    kernels.block_attention_split_bwd_key_kernel[grid](
        desc_p=descriptor(p, tile, channels=key_tile),
        desc_x=descriptor(x, tile, channels=width),
        out=vectors(out),
        full_counts=piece.kernel_plan.full.counts,
        plan=columns,
        scale=scale,
        kv_length=kv_length,
        kv_blocks=triton.cdiv(kv_length, plan.key_block),
        sizes=piece.sizes,
        **_constants(x, plan),
        BLOCK_M=tile,
        BLOCK_N=key_tile,
        BLOCK_D=width,
        D=dim,
    )


def _row_tile(plan: PlanTensors) -> int:
    """Return the queries per tile, a divisor of the query block."""
    return tile_of(plan.query_block, 128)


def _column_tile(plan: PlanTensors) -> int:
    """Return the keys per tile, a divisor of the key block."""
    return tile_of(plan.key_block, 64)


def _round_up(number: int, multiple: int) -> int:
    return triton.cdiv(number, multiple) * multiple


def _constants(x: Tensor, plan: PlanTensors) -> dict[str, int | str]:
    """Return the constexpr arguments and launch options that the kernels with products share."""
    return {
        "QUERY_BLOCK": plan.query_block,
        "KEY_BLOCK": plan.key_block,
        "PRECISION": precision(x),
        "num_warps": 8,
        "num_stages": 3,
    }
