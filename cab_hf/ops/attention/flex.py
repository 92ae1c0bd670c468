"""Attention over the key blocks of a plan by FlexAttention, with the TRITON or the CPU backend.

A `BlockMask` is built directly from the plan's lists. This module works around these limits and
silent errors of FlexAttention:

* Uncompiled, FlexAttention ignores the lists and computes dense attention. After the recompilation
  limit, FlexAttention runs uncompiled.
* On CUDA (torch 2.11), FlexAttention reads the full lists with the strides of the partial lists.
* On CUDA, FlexAttention misreads lists with fewer heads than q, except lists with one head.
* On CPU, FlexAttention rejects compact lists. A kernel tile may contain blocks that are not listed,
  so that the mask function must mask these blocks.
* The TRITON backend has no backward kernel for key blocks of 64.
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

from cab_hf.ops.reference import cap_logits
from cab_hf.plan import BlockIndices, BlockPlan

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
# tokens; on Hopper, FlexAttention's backward kernel supports blocks that are multiples of this size
TRAINING_BLOCK_TOKENS = 128
# largest number of compilations per process; on CPU, every new sequence length is compiled
RECOMPILE_LIMIT = 64


def unavailable(
    device: str, head_dim: int, dtype: torch.dtype, training: bool, query_block: int, key_block: int
) -> str | None:
    """Return why this engine does not support a workload; None if the workload is supported.

    The reason continues a sentence that starts with the name of the engine, e.g. "has no backward
    on CPU".
    """
    if device not in ("cuda", "cpu"):
        return f"runs on cuda and cpu, not on {device}"
    if dtype not in SUPPORTED_DTYPES:
        return f"supports float16, bfloat16 and float32, not {dtype}"
    if device == "cpu":
        if training:
            return "has no backward on CPU"
        if not _has_compiler():
            return "compiles C++ on CPU, and no C++ compiler is installed"
        return None
    if not 16 <= head_dim <= MAX_HEAD_DIM:
        return f"supports head dims 16 to {MAX_HEAD_DIM}, not {head_dim}"
    if training and any(
        block_size % TRAINING_BLOCK_TOKENS and TRAINING_BLOCK_TOKENS % block_size
        for block_size in (query_block, key_block)
    ):
        return (
            f"trains on CUDA with blocks that divide {TRAINING_BLOCK_TOKENS} or are multiples of it"
        )
    return None


# a constant in compiled graphs, because torch.compile cannot trace a search for files
@torch.compiler.assume_constant_result
def _has_compiler() -> bool:
    """Return True if a C++ compiler is installed."""
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
    """Compute attention over the full and partial blocks of ``plan``; see `reference.attention`.

    Args:
        q: [B, H, N_q, D].
        k, v: [B, H_kv, N_k, D].
        plan: The key blocks that each query block attends to.
        scale: Factor of the products q · k.
        return_lse: True to also return the log-sum-exp of each query, float32 [B, H, N_q].
        softcap: Soft cap of the scaled logits; None for no cap.

    Raises:
        NotImplementedError: If ``return_lse`` is set on CPU.
    """
    if return_lse and q.device.type == "cpu":
        raise NotImplementedError(
            "return_lse must be False on CPU, where FlexAttention returns no log-sum-exp, got "
            "True. Use engine='reference'."
        )
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    # raises if the number of plan heads does not divide the number of query heads
    plan.shared_by(q.shape[1])
    block_tables = make_block_tables(plan, heads=q.shape[1], device=q.device, training=training)
    tile_options = make_kernel_options(plan, q)
    if torch.compiler.is_compiling():
        return _attend(
            q,
            k,
            v,
            block_tables,
            scale=scale,
            tile_options=tile_options,
            return_lse=return_lse,
            softcap=softcap,
        )
    # the recompilation limit must raise, because an uncompiled call would ignore the lists. With
    # symbolic block sizes, inductor's cache returns kernels for other sizes (torch 2.11).
    # FlexAttention does not support a symbolic soft cap
    with torch._dynamo.config.patch(
        fail_on_recompile_limit_hit=True,
        recompile_limit=RECOMPILE_LIMIT,
        specialize_int=True,
        specialize_float=True,
    ):
        return _compile_attend(q.device.type)(
            q,
            k,
            v,
            block_tables,
            scale=scale,
            tile_options=tile_options,
            return_lse=return_lse,
            softcap=softcap,
        )


@cache
def _compile_attend(device: str) -> Callable[..., Tensor]:
    """Return the compiled `_attend` for a device type."""
    # the C++ template does not compile with a dynamic shape inside mask_mod (torch 2.13)
    return torch.compile(_attend, dynamic=device != "cpu")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: BlockTables,
    scale: float,
    tile_options: dict | None,
    return_lse: bool,
    softcap: float | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Call FlexAttention; return the output, with ``return_lse`` also the log-sum-exp.

    Args:
        q: [B, H, N_q, D].
        k, v: [B, H_kv, N_k, D].
        block_tables: Lists and masks of the plan, from `make_block_tables`.
        scale: Factor of the products q · k.
        tile_options: Tile sizes, see `make_kernel_options`; None for FlexAttention's choice.
        return_lse: True to also return the log-sum-exp.
        softcap: Soft cap of the scaled logits; None for no cap.
    """
    # the mask is built here, inside the compiled function, so that lengths come from tensors and
    # only block sizes are constants
    flex_arguments = {
        "block_mask": make_block_mask(block_tables, q.shape[2], k.shape[2]),
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
        "kernel_options": tile_options,
    }
    if softcap is not None:
        flex_arguments["score_mod"] = lambda score, *indices: cap_logits(score, softcap)
    if not return_lse:
        return flex_attention(q, k, v, **flex_arguments)
    out, aux = flex_attention(q, k, v, **flex_arguments, return_aux=AuxRequest(lse=True))
    return out, aux.lse


class FullAndPartialLists(NamedTuple):
    """Partial and full lists for a `BlockMask`, all with the same width W.

    Attributes:
        partial_counts, full_counts: int32 [B, 1 or H, M], number of listed blocks in each of M
            lists.
        partial_indices, full_indices: int32 [B, 1 or H, M, W], indices of the listed blocks.
    """

    partial_counts: Tensor
    partial_indices: Tensor
    full_counts: Tensor
    full_indices: Tensor


class BlockTables(NamedTuple):
    """Plan for FlexAttention: lists of blocks, and the data that masks tokens inside blocks.

    Attributes:
        lists: The key blocks of each query block.
        transposed_lists: The query blocks of each key block, for the backward pass; None without
            gradients.
        block_sizes: Tokens per query block and per key block of the lists.
        first_key, last_key: int32 [B, N_q], the first and the last visible key of each query.
        bitmap: bool [B, H, M_q, M_k], True for blocks that the plan lists; None if ``lists`` need
            no mask of blocks. The mask function needs the bitmap on CPU, and if ``lists`` have
            larger blocks than the plan.
        bitmap_block_sizes: Tokens per query block and per key block of the plan.
    """

    lists: FullAndPartialLists
    transposed_lists: FullAndPartialLists | None
    block_sizes: tuple[int, int]
    first_key: Tensor
    last_key: Tensor
    bitmap: Tensor | None
    bitmap_block_sizes: tuple[int, int]


def make_block_tables(
    plan: BlockPlan, heads: int, device: torch.device, training: bool
) -> BlockTables:
    """Convert a plan to lists and masks for FlexAttention.

    Args:
        plan: The key blocks that each query block attends to.
        heads: Heads of q.
        device: Device of q.
        training: True to return transposed lists, and to merge blocks if TRITON has no backward
            kernel for the blocks of the plan.
    """
    partial, full, block_sizes = plan.partial, plan.full, plan.blocks
    is_merged = (
        training and choose_merged_block_sizes(plan.query_block, plan.key_block) != block_sizes
    )
    if is_merged:
        partial, full, block_sizes = _merge_blocks(plan)
    transposed_lists = None
    if training:
        num_key_blocks = -(-plan.kv_length // block_sizes[1])
        transposed_lists = _make_list_pair(
            partial=_transpose_lists(partial, num_key_blocks),
            full=_transpose_lists(full, num_key_blocks),
            heads=heads,
        )
    bitmap = None
    if is_merged or device.type == "cpu":
        bitmap = plan.to_dense().repeat_interleave(plan.shared_by(heads), dim=1)
    return BlockTables(
        lists=_make_list_pair(partial=partial, full=full, heads=heads),
        transposed_lists=transposed_lists,
        block_sizes=block_sizes,
        first_key=plan.ranges.start,
        last_key=plan.ranges.end,
        bitmap=bitmap,
        bitmap_block_sizes=plan.blocks,
    )


def _transpose_lists(block_lists: BlockIndices, num_key_blocks: int) -> BlockIndices:
    """Return lists per key block: the query blocks that list each of ``num_key_blocks`` blocks.

    A kernel computes these lists on a GPU outside of compiled graphs.
    """
    if block_lists.counts.device.type == "cpu" or torch.compiler.is_compiling():
        return block_lists.transpose(num_key_blocks)
    from cab_hf.ops.attention.transpose import transpose

    return transpose(block_lists, num_key_blocks)


def make_block_mask(block_tables: BlockTables, q_length: int, kv_length: int) -> BlockMask:
    """Build the BlockMask that passes a plan to FlexAttention.

    Args:
        block_tables: The plan, converted by `make_block_tables`.
        q_length: Number of queries.
        kv_length: Number of keys.
    """
    first_key, last_key, bitmap = block_tables.first_key, block_tables.last_key, block_tables.bitmap
    query_block, key_block = block_tables.bitmap_block_sizes

    def is_in_key_range(batch, head, query, key):
        return (key >= first_key[batch, query]) & (key <= last_key[batch, query])

    def is_listed_and_in_key_range(batch, head, query, key):
        is_listed = bitmap[batch, head, query // query_block, key // key_block]
        return is_listed & is_in_key_range(batch, head, query, key)

    block_lists, transposed_lists = block_tables.lists, block_tables.transposed_lists
    return BlockMask(
        seq_lengths=(q_length, kv_length),
        kv_num_blocks=block_lists.partial_counts,
        kv_indices=block_lists.partial_indices,
        full_kv_num_blocks=block_lists.full_counts,
        full_kv_indices=block_lists.full_indices,
        q_num_blocks=None if transposed_lists is None else transposed_lists.partial_counts,
        q_indices=None if transposed_lists is None else transposed_lists.partial_indices,
        full_q_num_blocks=None if transposed_lists is None else transposed_lists.full_counts,
        full_q_indices=None if transposed_lists is None else transposed_lists.full_indices,
        BLOCK_SIZE=block_tables.block_sizes,
        mask_mod=is_in_key_range if bitmap is None else is_listed_and_in_key_range,
    )


def choose_merged_block_sizes(query_block: int, key_block: int) -> tuple[int, int]:
    """Return the smallest multiples of the block sizes for which TRITON has a backward kernel."""
    merged_query_block, merged_key_block = (
        block_size * max(1, TRAINING_BLOCK_TOKENS // block_size)
        for block_size in (query_block, key_block)
    )
    return merged_query_block, merged_key_block


def _merge_blocks(plan: BlockPlan) -> tuple[BlockIndices, BlockIndices, tuple[int, int]]:
    """Return the plan's lists for larger blocks of at least `TRAINING_BLOCK_TOKENS` tokens.

    A larger block is full if all blocks inside are full. A larger block is partial if the plan
    attends to some blocks inside, and the bitmap then masks the others.

    Returns:
        partial: Lists of partial blocks.
        full: Lists of full blocks.
        merged_sizes: Tokens per larger query block and key block.
    """
    merged_sizes = choose_merged_block_sizes(plan.query_block, plan.key_block)
    query_blocks_per_group, key_blocks_per_group = (
        merged_sizes[0] // plan.query_block,
        merged_sizes[1] // plan.key_block,
    )

    def group_blocks(block_lists: BlockIndices) -> Tensor:
        """Return True for listed blocks, grouped into larger blocks.

        The shape is [B, H, larger query blocks, rows, larger key blocks, columns].
        """
        is_listed = block_lists.to_dense(plan.kv_blocks)
        num_padding_blocks = (
            0,
            -is_listed.shape[3] % key_blocks_per_group,
            0,
            -is_listed.shape[2] % query_blocks_per_group,
        )
        return (
            F.pad(is_listed, num_padding_blocks)
            .unflatten(3, (-1, key_blocks_per_group))
            .unflatten(2, (-1, query_blocks_per_group))
        )

    full, partial = group_blocks(plan.full), group_blocks(plan.partial)
    is_full = full.all(dim=5).all(dim=3)
    is_partial = (full | partial).any(dim=5).any(dim=3) & ~is_full
    return BlockIndices.from_dense(is_partial), BlockIndices.from_dense(is_full), merged_sizes


def _make_list_pair(
    *, partial: BlockIndices, full: BlockIndices, heads: int
) -> FullAndPartialLists:
    """Return the lists expanded to ``heads`` heads and widened to the same width."""
    list_width = max(partial.width, full.width)
    partial, full = (
        block_lists.for_heads(heads).widened(list_width) for block_lists in (partial, full)
    )
    return FullAndPartialLists(
        partial_counts=partial.counts,
        partial_indices=partial.indices,
        full_counts=full.counts,
        full_indices=full.indices,
    )


def make_kernel_options(plan: BlockPlan, q: Tensor) -> dict[str, int | str] | None:
    """Return kernel options with tiles that divide the plan's blocks; None on CPU.

    FlexAttention's default tiles need not divide the blocks.
    """
    if q.device.type == "cpu":
        return None
    # large tiles fit in shared memory if a token of k has at most 256 bytes (D = 128 in bf16)
    is_key_over_256_bytes = q.shape[-1] * q.element_size() > 256
    max_queries_per_tile, max_keys_per_tile, num_stages = (
        (64, 32, 2) if is_key_over_256_bytes else (128, 64, 3)
    )
    return {
        # for short queries, AUTO selects the decoding kernel, which needs masks of other shapes
        "BACKEND": "TRITON",
        # the largest power of two that divides the block
        "fwd_BLOCK_M": min(max_queries_per_tile, plan.query_block & -plan.query_block),
        "fwd_BLOCK_N": min(max_keys_per_tile, plan.key_block & -plan.key_block),
        "fwd_num_stages": num_stages,
    }
