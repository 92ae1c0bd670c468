"""Kernels that merge attention over parts of the keys, and that add attention sinks.

The output over all keys is the mean of the outputs over the parts, with weights proportional to
exp(log-sum-exp of the part). In PyTorch, this merge takes twenty kernel launches, and PyTorch's
product of a tensor with one factor per row reaches only a third of the memory bandwidth.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.attention.tiles import make_vector_pointers, make_vectors
from cab_hf.ops.launch import on_device_of

# largest number of output entries that a program writes
MAX_VALUES_PER_PROGRAM = 4096


def write_merged(
    out: Tensor,
    lse: Tensor | None,
    part_outs: Tensor,
    part_lses: Tensor,
    query_indices: Tensor,
    is_real_query: Tensor,
) -> None:
    """Merge attention of R queries over P parts of the keys, and write the result to ``out``.

    Args:
        out: [B, H, N, D], changed in place.
        lse: float32 [B, H, N], the log-sum-exp of ``out``, changed in place; None if the
            log-sum-exp is not needed.
        part_outs: [B, H, P * R, D]: the output of all R queries over the first part, then over the
            second part, and so on.
        part_lses: float32 [B, H, P * R], the log-sum-exps of ``part_outs``; -inf for parts without
            keys.
        query_indices: int64 [B, R], indices of the R queries in ``out``.
        is_real_query: bool [B, R], False for queries whose result is not written.
    """
    batch, heads, _, dim = out.shape
    num_rows = query_indices.shape[1]
    block_d = triton.next_power_of_2(dim)
    block_m = max(1, MAX_VALUES_PER_PROGRAM // block_d)
    with on_device_of(out):
        _merge_rows_kernel[(triton.cdiv(num_rows, block_m), batch * heads)](
            out=make_vectors(out),
            lse=lse,
            stride_lse_batch=0 if lse is None else lse.stride(0),
            stride_lse_head=0 if lse is None else lse.stride(1),
            part_outs=make_vectors(part_outs),
            part_lses=part_lses.contiguous(),
            query_indices=query_indices.contiguous(),
            is_written=is_real_query.contiguous(),
            heads=heads,
            num_rows=num_rows,
            num_parts=part_outs.shape[2] // num_rows,
            dim=dim,
            BLOCK_M=block_m,
            BLOCK_D=block_d,
        )


def share_with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Rescale attention in place to include attention sinks; see `reference.rescale_for_sinks`.

    Args:
        out: [B, H, N, D], attention without sinks, changed in place.
        lse: float32 [B, H, N], the log-sum-exp of ``out``.
        sinks: [H], one additional logit per head.
    """
    batch, heads, num_rows, dim = out.shape
    block_d = triton.next_power_of_2(dim)
    block_m = max(1, MAX_VALUES_PER_PROGRAM // block_d)
    with on_device_of(out):
        _share_with_sinks_kernel[(triton.cdiv(num_rows, block_m), batch * heads)](
            out=make_vectors(out),
            lse=lse.contiguous(),
            sinks=sinks,
            heads=heads,
            num_rows=num_rows,
            dim=dim,
            BLOCK_M=block_m,
            BLOCK_D=block_d,
        )


# numbers that depend on the sequence length must not cause another compilation
@triton.jit(do_not_specialize=["num_rows"])
def _share_with_sinks_kernel(
    out,
    lse,
    sinks,
    heads,
    num_rows,
    dim,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Multiply ``out`` of BLOCK_M queries of one head by exp(lse) / (exp(lse) + exp(sink))."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    plane = tl.program_id(1).to(tl.int64)
    batch, head = plane // heads, plane % heads
    is_in_bounds = row < num_rows
    row_lse = tl.load(lse + plane * num_rows + row, mask=is_in_bounds, other=0.0)
    share = tl.sigmoid(row_lse - tl.load(sinks + head).to(tl.float32))
    # [BLOCK_M, BLOCK_D]
    channel = tl.arange(0, BLOCK_D)[None, :]
    mask = is_in_bounds[:, None] & (channel < dim)
    out_ptrs = make_vector_pointers(out, batch, head, row) + channel
    rescaled_out = tl.load(out_ptrs, mask=mask).to(tl.float32) * share[:, None]
    tl.store(out_ptrs, rescaled_out.to(out.data.dtype.element_ty), mask=mask)


# numbers that depend on the sequence length must not cause another compilation
@triton.jit(do_not_specialize=["stride_lse_batch", "stride_lse_head", "num_rows", "num_parts"])
def _merge_rows_kernel(
    out,
    lse,
    stride_lse_batch,
    stride_lse_head,
    part_outs,
    part_lses,
    query_indices,
    is_written,
    heads,
    num_rows,
    num_parts,
    dim,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the results over all parts of the keys for BLOCK_M queries of one head.

    The merge is an online softmax over the log-sum-exps of the parts. ``stride_lse_batch`` and
    ``stride_lse_head`` are strides of ``lse`` in elements.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    plane = tl.program_id(1).to(tl.int64)
    batch, head = plane // heads, plane % heads
    is_in_bounds = row < num_rows
    row_mask = tl.load(is_written + batch * num_rows + row, mask=is_in_bounds, other=0) != 0
    out_row = tl.load(query_indices + batch * num_rows + row, mask=is_in_bounds, other=0)
    channel = tl.arange(0, BLOCK_D)[None, :]
    mask = row_mask[:, None] & (channel < dim)

    # m_i, l_i: [BLOCK_M]; acc: [BLOCK_M, BLOCK_D]
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for part in range(num_parts):
        part_row = part * num_rows + row
        part_lse = tl.load(
            part_lses + plane * num_parts * num_rows + part_row, mask=row_mask, other=float("-inf")
        )
        m_new = tl.maximum(m_i, part_lse)
        # m_new is -inf until a part with keys is read; the difference of two infinities is NaN
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, p = tl.exp(m_i - m_safe), tl.exp(part_lse - m_safe)
        part_out = tl.load(
            make_vector_pointers(part_outs, batch, head, part_row) + channel, mask=mask, other=0.0
        )
        acc = acc * alpha[:, None] + part_out.to(tl.float32) * p[:, None]
        l_i = l_i * alpha + p
        m_i = m_new

    acc /= tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_ptrs = make_vector_pointers(out, batch, head, out_row) + channel
    tl.store(out_ptrs, acc.to(out.data.dtype.element_ty), mask=mask)
    if lse is not None:
        merged_lse = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log(l_i))
        tl.store(
            lse + batch * stride_lse_batch + head * stride_lse_head + out_row,
            merged_lse,
            mask=row_mask,
        )
