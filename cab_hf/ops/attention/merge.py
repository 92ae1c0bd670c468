"""Merge of separately attended parts of the keys in one launch: rows, and attention sinks.

The weight of a part is proportional to exp(log-sum-exp). In PyTorch, merging rows takes twenty
launches, and a product with one factor per row runs at a third of the memory's speed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.attention.tiles import vectors, vectors_at
from cab_hf.ops.launch import on_device_of

# numbers of the output that a program writes
VALUES_AT_A_TIME = 4096


def write_merged(
    out: Tensor,
    lse: Tensor | None,
    parts: Tensor,
    sums: Tensor,
    query: Tensor,
    real: Tensor,
) -> None:
    """Merge attention over parts of the keys, and write it to some queries of ``out``.

    Args:
        out: [B, H, N, D], changed in place.
        lse: float32 [B, H, N], changed in place; None if it is not needed.
        parts: [B, H, P * R, D]: all rows over the first part of the keys, then over the second.
        sums: float32 [B, H, P * R], the log-sum-exps of the parts.
        query: int64 [B, R], the queries of the rows.
        real: bool [B, R], False for rows that do not exist.
    """
    batch, heads, _, dim = out.shape
    rows = query.shape[1]
    block_d = triton.next_power_of_2(dim)
    block_m = max(1, VALUES_AT_A_TIME // block_d)
    with on_device_of(out):
        _merge_rows_kernel[(triton.cdiv(rows, block_m), batch * heads)](
            vectors(out),
            lse,
            0 if lse is None else lse.stride(0),
            0 if lse is None else lse.stride(1),
            vectors(parts),
            sums.contiguous(),
            query.contiguous(),
            real.contiguous(),
            heads,
            rows,
            parts.shape[2] // rows,
            dim,
            BLOCK_M=block_m,
            BLOCK_D=block_d,
        )


def share_with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Compute `reference.with_sinks` in place in ``out``."""
    batch, heads, rows, dim = out.shape
    block_d = triton.next_power_of_2(dim)
    block_m = max(1, VALUES_AT_A_TIME // block_d)
    with on_device_of(out):
        _share_with_sinks_kernel[(triton.cdiv(rows, block_m), batch * heads)](
            vectors(out),
            lse.contiguous(),
            sinks,
            heads,
            rows,
            dim,
            BLOCK_M=block_m,
            BLOCK_D=block_d,
        )


@triton.jit(do_not_specialize=["rows"])
def _share_with_sinks_kernel(
    out, lse, sinks, heads, rows, dim, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    plane = tl.program_id(1).to(tl.int64)
    batch, head = plane // heads, plane % heads
    inside = row < rows
    total = tl.load(lse + plane * rows + row, mask=inside, other=0.0)
    share = tl.sigmoid(total - tl.load(sinks + head).to(tl.float32))
    channel = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None] & (channel < dim)
    at = vectors_at(out, batch, head, row) + channel
    x = tl.load(at, mask=mask).to(tl.float32) * share[:, None]
    tl.store(at, x.to(out.data.dtype.element_ty), mask=mask)


# numbers that depend on the sequence length must not cause another compilation
@triton.jit(do_not_specialize=["lse_batch", "lse_head", "rows", "parts_count"])
def _merge_rows_kernel(
    out,
    lse,
    lse_batch,
    lse_head,
    parts,
    sums,
    query,
    real,
    heads,
    rows,
    parts_count,
    dim,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    plane = tl.program_id(1).to(tl.int64)
    batch, head = plane // heads, plane % heads
    inside = row < rows
    there = tl.load(real + batch * rows + row, mask=inside, other=0) != 0
    target = tl.load(query + batch * rows + row, mask=inside, other=0)
    channel = tl.arange(0, BLOCK_D)[None, :]
    mask = there[:, None] & (channel < dim)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    # [BLOCK_M, BLOCK_D]
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for part in range(parts_count):
        place = part * rows + row
        own = tl.load(sums + plane * parts_count * rows + place, mask=there, other=float("-inf"))
        m_new = tl.maximum(m_i, own)
        # some parts, or all parts, may have no keys
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, p = tl.exp(m_i - shift), tl.exp(own - shift)
        x = tl.load(vectors_at(parts, batch, head, place) + channel, mask=mask, other=0.0)
        acc = acc * alpha[:, None] + x.to(tl.float32) * p[:, None]
        l_i = l_i * alpha + p
        m_i = m_new
    acc /= tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(
        vectors_at(out, batch, head, target) + channel, acc.to(out.data.dtype.element_ty), mask=mask
    )
    if lse is not None:
        total = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log(l_i))
        tl.store(lse + batch * lse_batch + head * lse_head + target, total, mask=there)
