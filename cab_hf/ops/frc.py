"""Kernel of the FRC predictor: find the token with the largest norm in every block.

The definition is `cab_hf.predictors.frc.find_largest_norm_tokens`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.attention.tiles import make_vectors
from cab_hf.ops.launch import on_device_of

# tokens that a program reads per loop iteration
TOKENS_PER_CHUNK = tl.constexpr(16)


def find_largest_norm_tokens(
    x: Tensor, is_valid: Tensor, block_size: int, mark_not_finite: bool = False
) -> Tensor:
    """Return the token vector with the largest norm in every block of x, float32 [B, H, M, D].

    Args:
        x: [B, H, N, D]. Strided views are read in place if D is contiguous.
        is_valid: bool [B, N], False for padding. Padding tokens and tokens with NaN are returned
            only if a block has no other token.
        block_size: Tokens per block.
        mark_not_finite: True to fill the result of a block with NaN if the squared norm of any
            valid token is infinite or NaN.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, length, head_dim = x.shape
    num_blocks = triton.cdiv(length, block_size)
    largest_tokens = x.new_empty(batch, heads, num_blocks, head_dim, dtype=torch.float32)
    with on_device_of(x):
        _largest_norm_tokens_kernel[(batch * heads * num_blocks,)](
            x=make_vectors(x),
            is_valid_token=is_valid.contiguous(),
            largest_tokens=largest_tokens,
            heads=heads,
            length=length,
            BLOCK_SIZE=block_size,
            D=head_dim,
            MARK_NOT_FINITE=mark_not_finite,
            num_warps=1,
        )
    return largest_tokens


# the length must not cause another compilation
@triton.jit(do_not_specialize=["length"])
def _largest_norm_tokens_kernel(
    x,
    is_valid_token,
    largest_tokens,
    heads,
    length,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    MARK_NOT_FINITE: tl.constexpr,
):
    """Write the vector [D] of the token with the largest norm in one block of one head."""
    # heads vary fastest: neighbouring programs read neighbouring memory of a [B, N, H, D] tensor
    program_index = tl.program_id(0).to(tl.int64)
    head = program_index % heads
    num_blocks = tl.cdiv(length, BLOCK_SIZE)
    block = program_index // heads % num_blocks
    batch = program_index // (heads * num_blocks)
    head_pointer = x.data + (batch * x.batch_stride + head * x.head_stride)
    is_valid_token += batch * length
    channel = tl.arange(0, max(16, triton.next_power_of_2(D)))
    max_squared_norm = -1.0
    max_token = block * BLOCK_SIZE
    has_nonfinite_token = tl.zeros([TOKENS_PER_CHUNK], tl.int32)
    for chunk_start in tl.static_range(0, BLOCK_SIZE, TOKENS_PER_CHUNK):
        token = block * BLOCK_SIZE + chunk_start + tl.arange(0, TOKENS_PER_CHUNK)
        is_in_sequence = token < length
        # [TOKENS_PER_CHUNK, channels]
        token_vectors = tl.load(
            head_pointer + token[:, None] * x.token_stride + channel[None, :],
            mask=is_in_sequence[:, None] & (channel[None, :] < D),
            other=0.0,
        ).to(tl.float32)
        is_valid = tl.load(is_valid_token + token, mask=is_in_sequence, other=0) != 0
        squared_norm = tl.sum(token_vectors * token_vectors, 1)
        if MARK_NOT_FINITE:
            has_nonfinite_token |= (is_valid & ~(squared_norm < float("inf"))).to(tl.int32)
        # padding and NaN get -1, which is below every squared norm
        squared_norm = tl.where(is_valid & (squared_norm == squared_norm), squared_norm, -1.0)
        max_chunk_squared_norm = tl.max(squared_norm, 0)
        chunk_argmax = tl.argmax(squared_norm, 0, tie_break_left=True)
        max_token = tl.where(
            max_chunk_squared_norm > max_squared_norm,
            block * BLOCK_SIZE + chunk_start + chunk_argmax,
            max_token,
        )
        max_squared_norm = tl.maximum(max_squared_norm, max_chunk_squared_norm)
    max_vector = tl.load(
        head_pointer + max_token * x.token_stride + channel, mask=channel < D, other=0.0
    )
    if MARK_NOT_FINITE:
        max_vector = tl.where(
            tl.max(has_nonfinite_token, 0) != 0, float("nan"), max_vector.to(tl.float32)
        )
    largest_tokens += ((batch * heads + head) * num_blocks + block) * D + channel
    tl.store(largest_tokens, max_vector.to(tl.float32), mask=channel < D)
