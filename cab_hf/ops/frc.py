"""Kernel of the FRC predictor: find the token with the largest norm in every block.

The definition is `cab_hf.predictors.frc.largest_norm_tokens`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.attention.tiles import vectors
from cab_hf.ops.launch import on_device_of

# tokens that a program reads per loop iteration
ROWS = tl.constexpr(16)


def largest_norm_tokens(x: Tensor, valid: Tensor, block: int, mark: bool = False) -> Tensor:
    """Return the token vector with the largest norm in every block of x, float32 [B, H, M, D].

    Args:
        x: [B, H, N, D]. Strided views are read in place if D is contiguous.
        valid: bool [B, N], False for padding. Padding tokens and tokens with NaN are returned only
            if a block has no other token.
        block: Tokens per block.
        mark: True to fill the result of a block with NaN if the squared norm of any valid token is
            infinite or NaN.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, length, dim = x.shape
    num_blocks = triton.cdiv(length, block)
    out = x.new_empty(batch, heads, num_blocks, dim, dtype=torch.float32)
    with on_device_of(x):
        _largest_kernel[(batch * heads * num_blocks,)](
            x=vectors(x),
            valid=valid.contiguous(),
            out=out,
            heads=heads,
            length=length,
            BLOCK=block,
            D=dim,
            MARK=mark,
            num_warps=1,
        )
    return out


# the length must not cause another compilation
@triton.jit(do_not_specialize=["length"])
def _largest_kernel(
    x,
    valid,
    out,
    heads,
    length,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    MARK: tl.constexpr,
):
    """Write the vector [D] of the token with the largest norm in one block of one head."""
    # heads vary fastest: neighbouring programs read neighbouring memory of a [B, N, H, D] tensor
    pid = tl.program_id(0).to(tl.int64)
    head = pid % heads
    num_blocks = tl.cdiv(length, BLOCK)
    block = pid // heads % num_blocks
    batch = pid // (heads * num_blocks)
    x_head = x.data + (batch * x.batch + head * x.head)
    valid += batch * length
    channel = tl.arange(0, max(16, triton.next_power_of_2(D)))
    max_norm = -1.0
    max_token = block * BLOCK
    has_infinite = tl.zeros([ROWS], tl.int32)
    for start in tl.static_range(0, BLOCK, ROWS):
        token = block * BLOCK + start + tl.arange(0, ROWS)
        is_in_bounds = token < length
        # [ROWS, channels]
        token_vectors = tl.load(
            x_head + token[:, None] * x.token + channel[None, :],
            mask=is_in_bounds[:, None] & (channel[None, :] < D),
            other=0.0,
        ).to(tl.float32)
        is_valid = tl.load(valid + token, mask=is_in_bounds, other=0) != 0
        squared_norm = tl.sum(token_vectors * token_vectors, 1)
        if MARK:
            has_infinite |= (is_valid & ~(squared_norm < float("inf"))).to(tl.int32)
        # padding and NaN get -1, which is below every squared norm
        squared_norm = tl.where(is_valid & (squared_norm == squared_norm), squared_norm, -1.0)
        max_tile_norm = tl.max(squared_norm, 0)
        argmax_norm = tl.argmax(squared_norm, 0, tie_break_left=True)
        max_token = tl.where(
            max_tile_norm > max_norm, block * BLOCK + start + argmax_norm, max_token
        )
        max_norm = tl.maximum(max_norm, max_tile_norm)
    max_vector = tl.load(x_head + max_token * x.token + channel, mask=channel < D, other=0.0)
    if MARK:
        max_vector = tl.where(tl.max(has_infinite, 0) != 0, float("nan"), max_vector.to(tl.float32))
    out += ((batch * heads + head) * num_blocks + block) * D + channel
    tl.store(out, max_vector.to(tl.float32), mask=channel < D)
