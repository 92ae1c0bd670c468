"""Attention under a plan with FlexAttention: its TRITON backend and its CPU backend.

The plan's lists become a `BlockMask` directly. This module works around silent errors of
FlexAttention:

* Uncompiled, it computes dense attention and ignores the lists. It also does so after the
  recompilation limit.
* On CUDA (torch 2.11), it reads the full lists with the strides of the partial lists.
* On CPU, it rejects compact lists, and the lists alone do not mask inside the kernel's tiles.
* On CUDA, it misreads lists of fewer heads than q has.
* TRITON has no backward kernel for key blocks of 64.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from cab_hf.ops.reference import capped
from cab_hf.plan import BlockIndices, BlockPlan

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
# FlexAttention has a backward kernel on Hopper for blocks that are multiples of this
TRAINED = 128
# distinct shapes that a process may compile for; on CPU every new length is one
RECOMPILE_LIMIT = 64


def unavailable(
    device: str, head_dim: int, dtype: torch.dtype, training: bool, query_block: int, key_block: int
) -> str | None:
    """Return why this engine cannot run here, as half a sentence; None if it can."""
    if device not in ("cuda", "cpu"):
        return f"runs on cuda and cpu, not on {device}"
    if dtype not in DTYPES:
        return f"supports float16, bfloat16 and float32, not {dtype}"
    if device == "cpu":
        if training:
            return "has no backward on CPU"
        if not _has_compiler():
            return "compiles C++ on CPU, and no C++ compiler is installed"
        return None
    if not 16 <= head_dim <= MAX_HEAD_DIM:
        return f"supports head dims 16 to {MAX_HEAD_DIM}, not {head_dim}"
    if training and any(block % TRAINED and TRAINED % block for block in (query_block, key_block)):
        return f"trains on CUDA with blocks that divide {TRAINED} or are multiples of it"
    return None


# a constant of a compiled model: torch.compile cannot trace a search for files
@torch.compiler.assume_constant_result
def _has_compiler() -> bool:
    return any(map(shutil.which, ("c++", "g++", "clang++")))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool = False,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention under ``plan``, [B, H, N_q, D]; `reference.attention` is the definition.

    Raises:
        NotImplementedError: If ``return_lse`` is set on CPU.
    """
    if return_lse and q.device.type == "cpu":
        raise NotImplementedError(
            "return_lse must be False on CPU, where FlexAttention returns no log-sum-exp, got "
            "True. Use engine='reference'."
        )
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    plan.shared_by(q.shape[1])
    tables = block_tables(plan, q.shape[1], q.device, training)
    options = kernel_options(plan, q)
    if torch.compiler.is_compiling():
        return _attend(q, k, v, tables, scale, options, return_lse, softcap)
    # after the limit, dynamo would run flex uncompiled, which ignores the lists: fail instead. With
    # symbolic block sizes, inductor's cache returns kernels for other sizes (torch 2.11). Flex does
    # not support a symbolic cap
    with torch._dynamo.config.patch(
        fail_on_recompile_limit_hit=True,
        recompile_limit=RECOMPILE_LIMIT,
        specialize_int=True,
        specialize_float=True,
    ):
        how = scale, options, return_lse, softcap
        return _compiled(q.device.type)(q, k, v, tables, *how)


@cache
def _compiled(device: str) -> Callable[..., Tensor]:
    # the C++ template does not compile with a dynamic shape inside mask_mod (torch 2.13)
    return torch.compile(_attend, dynamic=device != "cpu")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: BlockTables,
    scale: float,
    options: dict | None,
    return_lse: bool,
    softcap: float | None,
) -> Tensor | tuple[Tensor, Tensor]:
    # the mask is built inside, so that lengths come from tensors and only block sizes are plain
    # ints
    mask = block_mask(tables, q.shape[2], k.shape[2])
    gqa = q.shape[1] != k.shape[1]
    how = {"block_mask": mask, "scale": scale, "enable_gqa": gqa, "kernel_options": options}
    if softcap is not None:
        how["score_mod"] = lambda score, *place: capped(score, softcap)
    if not return_lse:
        return flex_attention(q, k, v, **how)
    out, aux = flex_attention(q, k, v, **how, return_aux=AuxRequest(lse=True))
    return out, aux.lse


class BlockTables(NamedTuple):
    """Plan for FlexAttention: lists on the kernel's grid, and the data that masks inside blocks.

    Attributes:
        lists: Counts and indices of the partial and of the full key blocks of each query block. All
            lists have the same width.
        transposed: The same for the query blocks of each key block, which the backward pass reads;
            else empty.
        blocks: Tokens per query block and per key block of these lists.
        first, last: KeyRanges of the plan, int32 [B, N_q].
        bitmap: bool [B, H, M_q, M_k], the blocks of the plan; None if the lists alone suffice.
        bitmap_blocks: Tokens per query block and per key block of the bitmap.
    """

    lists: tuple[Tensor, ...]
    transposed: tuple[Tensor, ...]
    blocks: tuple[int, int]
    first: Tensor
    last: Tensor
    bitmap: Tensor | None
    bitmap_blocks: tuple[int, int]


def block_tables(plan: BlockPlan, heads: int, device: torch.device, training: bool) -> BlockTables:
    """Return the plan's lists for ``heads`` of q, merged to trainable blocks and transposed."""
    lists, blocks = (plan.partial, plan.full), plan.blocks
    merged = training and merged_blocks(*blocks) != blocks
    if merged:
        lists, blocks = _merged(plan)
    transposed = ()
    if training:
        key_blocks = -(-plan.kv_length // blocks[1])
        transposed = _tables(heads, *(_transposed(part, key_blocks) for part in lists))
    bitmap = None
    if merged or device.type == "cpu":
        bitmap = plan.to_dense().repeat_interleave(plan.shared_by(heads), dim=1)
    ranges = plan.ranges.start, plan.ranges.end
    return BlockTables(_tables(heads, *lists), transposed, blocks, *ranges, bitmap, plan.blocks)


def _transposed(lists: BlockIndices, columns: int) -> BlockIndices:
    if lists.counts.device.type == "cpu" or torch.compiler.is_compiling():
        return lists.transpose(columns)
    from cab_hf.ops.attention.transpose import transpose

    return transpose(lists, columns)


def block_mask(tables: BlockTables, q_length: int, kv_length: int) -> BlockMask:
    """Build a BlockMask from the tables, for q and k of these lengths."""
    first, last, bitmap = tables.first, tables.last, tables.bitmap
    rows, columns = tables.bitmap_blocks

    def in_span(batch, head, query, key):
        return (key >= first[batch, query]) & (key <= last[batch, query])

    def listed_and_in_span(batch, head, query, key):
        listed = bitmap[batch, head, query // rows, key // columns]
        return listed & in_span(batch, head, query, key)

    return BlockMask(
        (q_length, kv_length),
        *tables.lists,
        *(tables.transposed or (None,) * 4),
        BLOCK_SIZE=tables.blocks,
        mask_mod=in_span if bitmap is None else listed_and_in_span,
    )


def merged_blocks(query_block: int, key_block: int) -> tuple[int, int]:
    """Return the (query, key) block sizes with which TRITON trains instead of these."""
    rows, columns = (block * max(1, TRAINED // block) for block in (query_block, key_block))
    return rows, columns


def _merged(plan: BlockPlan) -> tuple[tuple[BlockIndices, BlockIndices], tuple[int, int]]:
    """Merge the plan's lists to a grid of blocks of at least `TRAINED` tokens.

    A merged block is full if all its parts are full. It is partial if some of its tokens are
    attended; the bitmap then masks inside.

    Returns:
        The partial and the full lists, and their block sizes.
    """
    blocks = merged_blocks(*plan.blocks)
    rows, columns = blocks[0] // plan.query_block, blocks[1] // plan.key_block

    def tiles(lists: BlockIndices) -> Tensor:
        dense = lists.to_dense(plan.kv_blocks)
        padding = (0, -dense.shape[3] % columns, 0, -dense.shape[2] % rows)
        return F.pad(dense, padding).unflatten(3, (-1, columns)).unflatten(2, (-1, rows))

    full, partial = tiles(plan.full), tiles(plan.partial)
    complete = full.all(dim=5).all(dim=3)
    some = (full | partial).any(dim=5).any(dim=3) & ~complete
    return (BlockIndices.from_dense(some), BlockIndices.from_dense(complete)), blocks


def _tables(heads: int, *lists: BlockIndices) -> tuple[Tensor, ...]:
    """Return counts and indices of the lists, widened to one width and expanded to ``heads``."""
    width = max(part.width for part in lists)
    lists = tuple(part.for_heads(heads).widened(width) for part in lists)
    return tuple(tensor for part in lists for tensor in (part.counts, part.indices))


def kernel_options(plan: BlockPlan, q: Tensor) -> dict[str, int | str] | None:
    """Return kernel tiles that divide the plan's blocks; FlexAttention's own choice may not."""
    if q.device.type == "cpu":
        return None
    # large tiles fit for 256 bytes per token (D 128 in bf16); shared memory limits larger heads
    wide = q.shape[-1] * q.element_size() > 256
    rows, columns, stages = (64, 32, 2) if wide else (128, 64, 3)
    # for short queries AUTO selects the decoding kernel, which reads masks of other shapes
    return {
        "BACKEND": "TRITON",
        # the largest power of two that divides the block
        "fwd_BLOCK_M": min(rows, plan.query_block & -plan.query_block),
        "fwd_BLOCK_N": min(columns, plan.key_block & -plan.key_block),
        "fwd_num_stages": stages,
    }
