"""Block shares on the GPU: the attention that query blocks give key blocks.

The definition is `reference.block_shares`; the kernel is that of `exact_scores`, over all queries.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from cab_hf.ops.exact_scores import swept
from cab_hf.plan import Spans


def block_shares(
    q: Tensor,
    k: Tensor,
    spans: Spans,
    scale: float,
    query_block: int,
    key_block: int,
    reduction: str,
) -> Tensor:
    """`reference.block_shares`, float32 [B, H, M_q, M_k]; traced as one registered op."""
    largest = reduction == "max"
    told = q, k, spans.first, spans.last, scale, query_block, key_block, largest
    if torch.compiler.is_compiling():
        found = torch.ops.cab_hf.block_shares(*told)
    else:
        # Triton launches on the current device
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
            found = _block_shares(*told)
    if largest:
        return found
    return found / spans.rows(query_block).queries.clamp(min=1)[:, None, :, None]


def _block_shares(
    q: Tensor,
    k: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    query_block: int,
    key_block: int,
    largest: bool,
) -> Tensor:
    """The largest share of any query of a block, or the sum of them."""
    columns = triton.cdiv(k.shape[2], key_block)
    width = triton.cdiv(columns, 32) * 32
    heads = torch.arange(q.shape[1], device=q.device, dtype=torch.int32)
    blocks = query_block, key_block
    found = swept(q, k, heads, first, last, scale, *blocks, 1, width, summed=True)
    return found[0 if largest else 1][..., :columns].contiguous()


_block_shares_op = torch.library.custom_op("cab_hf::block_shares", _block_shares, mutates_args=())


@_block_shares_op.register_fake
def _(q, k, first, last, scale, query_block, key_block, largest):
    q_blocks, columns = -(-q.shape[2] // query_block), -(-k.shape[2] // key_block)
    return q.new_empty(*q.shape[:2], q_blocks, columns, dtype=torch.float32)
