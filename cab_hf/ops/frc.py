"""FRC on the GPU: the token with the largest norm in every block; see `cab_hf.predictors.frc`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.attention.tiles import vectors
from cab_hf.ops.launch import on_device_of

# tokens that a program reads at a time
ROWS = tl.constexpr(16)


def largest_tokens(x: Tensor, valid: Tensor, block: int, mark: bool = False) -> Tensor:
    """Return the token with the largest norm in every block of x, float32 [B, H, M, D].

    Args:
        x: [B, H, N, D]. Strided views are read in place if D is contiguous.
        valid: bool [B, N], see `cab_hf.predictors.frc.largest_tokens`.
        mark: See `cab_hf.predictors.frc.largest_tokens`.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, length, dim = x.shape
    blocks = triton.cdiv(length, block)
    target = x.new_empty(batch, heads, blocks, dim, dtype=torch.float32)
    with on_device_of(x):
        _largest_kernel[(batch * heads * blocks,)](
            vectors(x),
            valid.contiguous(),
            target,
            heads,
            length,
            BLOCK=block,
            D=dim,
            MARK=mark,
            num_warps=1,
        )
    return target


# the length must not cause another compilation
@triton.jit(do_not_specialize=["length"])
def _largest_kernel(
    x,
    valid,
    target,
    heads,
    length,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    MARK: tl.constexpr,
):
    # heads vary fastest: neighbouring programs read neighbouring memory of a [B, N, H, D] tensor
    pid = tl.program_id(0).to(tl.int64)
    head = pid % heads
    blocks = tl.cdiv(length, BLOCK)
    block = pid // heads % blocks
    b = pid // (heads * blocks)
    data = x.data + (b * x.batch + head * x.head)
    valid += b * length
    channel = tl.arange(0, max(16, triton.next_power_of_2(D)))
    best = -1.0
    where = block * BLOCK
    marked = tl.zeros([ROWS], tl.int32)
    for start in tl.static_range(0, BLOCK, ROWS):
        token = block * BLOCK + start + tl.arange(0, ROWS)
        there = token < length
        # [ROWS, channels]
        rows = tl.load(
            data + token[:, None] * x.token + channel[None, :],
            mask=there[:, None] & (channel[None, :] < D),
            other=0.0,
        ).to(tl.float32)
        real = tl.load(valid + token, mask=there, other=0) != 0
        norm = tl.sum(rows * rows, 1)
        if MARK:
            marked |= (real & ~(norm < float("inf"))).to(tl.int32)
        norm = tl.where(real & (norm == norm), norm, -1.0)
        largest = tl.max(norm, 0)
        here = tl.argmax(norm, 0, tie_break_left=True)
        where = tl.where(largest > best, block * BLOCK + start + here, where)
        best = tl.maximum(best, largest)
    found = tl.load(data + where * x.token + channel, mask=channel < D, other=0.0)
    if MARK:
        found = tl.where(tl.max(marked, 0) != 0, float("nan"), found.to(tl.float32))
    target += ((b * heads + head) * blocks + block) * D + channel
    tl.store(target, found.to(tl.float32), mask=channel < D)
