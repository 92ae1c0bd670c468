"""Marks of key blocks that contain a key with NaN or an infinity, on the GPU.

The definition is `reference.marked_blocks`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.rows import NOT_FINITE_EXPONENT

# keys per program
KEYS = 2048


def marked_blocks(exponents: Tensor, valid: Tensor, key_block: int) -> Tensor:
    """Return which key blocks contain a marked key that is not padding, int8 [B, H_kv, M_k].

    Args:
        exponents: int8 [B, H_kv, N_k, 1], from `rows.scored_keys`.
        valid: bool [B, N_k], False for padding.
    """
    batch, heads, length, _ = exponents.shape
    kv_blocks = triton.cdiv(length, key_block)
    marked = exponents.new_empty(batch, heads, kv_blocks)
    block = triton.next_power_of_2(key_block)
    at_a_time = max(1, KEYS // block)
    valid = valid.expand(batch, length)
    _marked_kernel[(batch * heads, triton.cdiv(kv_blocks, at_a_time))](
        exponents.contiguous(),
        valid.view(torch.int8),
        *valid.stride(),
        marked,
        heads,
        length,
        kv_blocks,
        KEY_BLOCK=key_block,
        BLOCK=block,
        BLOCKS=at_a_time,
        num_warps=4,
    )
    return marked


# the length must not cause another compilation
@triton.jit(do_not_specialize=["valid_batch", "length", "kv_blocks"])
def _marked_kernel(
    exponents,
    valid,
    valid_batch,
    valid_token,
    marked,
    heads,
    length,
    kv_blocks,
    KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    plane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inner = tl.arange(0, BLOCK)
    # [BLOCKS, BLOCK]
    token = column[:, None] * KEY_BLOCK + inner[None, :]
    there = (token < length) & (inner < KEY_BLOCK)[None, :]
    own = tl.load(exponents + plane * length + token, mask=there, other=0)
    real = valid + plane // heads * valid_batch + token * valid_token
    real = tl.load(real, mask=there, other=0) != 0
    found = tl.max(((own == NOT_FINITE_EXPONENT) & real).to(tl.int32), 1)
    tl.store(marked + plane * kv_blocks + column, found.to(tl.int8), mask=column < kv_blocks)
