"""Attention over the key blocks of a plan by flash-attn-4: the FLASH backend of the flex engine.

FlexAttention's FLASH backend calls flash-attn-4 from compiled code. This module calls the same
functions directly, so that no graph is compiled per shape, and compact lists need no conversion.

flash-attn-4 needs query blocks that are multiples of the query tile, and key blocks of exactly one
key tile. Therefore each wider key block of a list is replaced by its tiles.

The backward pass of flash-attn-4 supports only multiples of fixed tiles (`has_flash_backward`). For
other blocks, `block.backward_op` computes the gradients from the output and the log-sum-exp.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from packaging.version import Version
from torch import Tensor
from torch.library import CustomOpDef

from cab_hf.capability import HOPPER, capability
from cab_hf.ops.attention import block
from cab_hf.ops.attention.tiles import make_vector_pointers, make_vectors
from cab_hf.ops.attention.transpose import transpose
from cab_hf.plan import BlockIndices, BlockPlan

PACKAGE_NAME = "flash-attn-4"
# the first version that works, and the first version that was not tested; this module uses private
# functions, which may change in every beta version
MIN_VERSION, UNTESTED_VERSION = "4.0.0b36", "4.0.0b37"
SUPPORTED_DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
# head dim -> (queries, keys) per tile of flash-attn-4's block-sparse backward pass on Hopper
BACKWARD_TILES = {64: (128, 128), 96: (64, 128), 128: (64, 128), 256: (64, 64)}
# major compute capabilities of Blackwell GPUs that flash-attn-4 supports
BLACKWELL_MAJORS = (10, 11)
# (queries, keys) of which block sizes must be multiples in the block-sparse Blackwell kernel
BLACKWELL_BLOCK_MULTIPLES = (256, 128)
# rows of a Hopper matrix instruction (wgmma); tile sizes are multiples of this number
MIN_TILE_TOKENS = 64
# largest head dim for which a tile of 128 keys fits into shared memory
MAX_WIDE_TILE_HEAD_DIM = 128
# queries per program of `_blank_padding_kernel`
QUERIES_PER_PROGRAM = 32


def unavailable(head_dim: int, dtype: torch.dtype, query_block: int, key_block: int) -> str | None:
    """Return why flash-attn-4 does not support a workload on this GPU; None if it is supported.

    The reason continues a sentence that starts with the name of the engine, e.g. "supports float16,
    not float32".
    """
    major, minor = capability()
    is_blackwell = major in BLACKWELL_MAJORS
    if major != HOPPER and not is_blackwell:
        return f"runs on sm_90, sm_100 and sm_110, not on sm_{major}{minor}"
    if dtype not in SUPPORTED_DTYPES:
        return f"supports float16 and bfloat16, not {dtype}"
    max_head_dim = MAX_WIDE_TILE_HEAD_DIM if is_blackwell else MAX_HEAD_DIM
    if head_dim > max_head_dim or head_dim % 8:
        return f"supports head dims up to {max_head_dim} that are multiples of 8, not {head_dim}"
    query_multiple, key_multiple = (
        BLACKWELL_BLOCK_MULTIPLES if is_blackwell else (MIN_TILE_TOKENS, MIN_TILE_TOKENS)
    )
    if query_block % query_multiple or key_block % key_multiple:
        return (
            f"supports blocks of multiples of {query_multiple} x {key_multiple}, "
            f"not {query_block} x {key_block}"
        )
    return _why_not_installed()


def has_flash_backward(head_dim: int, query_block: int, key_block: int) -> bool:
    """Return True if the backward pass of flash-attn-4 supports the blocks on this GPU."""
    if head_dim not in BACKWARD_TILES or capability()[0] != HOPPER:
        return False
    query_multiple, key_multiple = BACKWARD_TILES[head_dim]
    return query_block % query_multiple == 0 and key_block % key_multiple == 0


@cache
def _why_not_installed() -> str | None:
    """Return a reason for `unavailable` if no tested flash-attn-4 is installed; else None."""
    try:
        installed_version = version(PACKAGE_NAME)
    except PackageNotFoundError:
        return f"needs the package {PACKAGE_NAME}, which is not installed"
    if not Version(MIN_VERSION) <= Version(installed_version) < Version(UNTESTED_VERSION):
        return (
            f"needs {PACKAGE_NAME} {MIN_VERSION} or later, below {UNTESTED_VERSION}, "
            f"not {installed_version}"
        )
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over the full and partial blocks of ``plan``; see `reference.attention`.

    Dense rows and sampled blocks are ignored; `complete.attention` adds dense rows and sampled
    blocks.

    Args:
        q: [B, H, N_q, D].
        k, v: [B, H_kv, N_k, D].
        plan: The key blocks that each query block attends to.
        scale: Factor of the products q · k.
        return_lse: True to also return the log-sum-exp of each query, float32 [B, H, N_q].
    """
    out, lse = _forward_op(q, k, v, **block.make_op_arguments(plan, scale))
    return (out, lse) if return_lse else out


@torch.library.custom_op("cab_hf::flash_attention", mutates_args=(), schema=block.FORWARD_SCHEMA)
def _forward_op(q, k, v, *plan_values):
    """Compute attention by flash-attn-4. ``plan_values`` are the fields of `PlanArguments`."""
    plan_arguments = block.PlanArguments._make(plan_values)
    plan = plan_arguments.to_plan_tensors()
    batch, heads, length, dim = q.shape
    kv_heads, kv_length = k.shape[1:3]
    tile_keys = choose_tile_keys(dim, plan.key_block)
    tiles_per_block, num_tiles = plan.key_block // tile_keys, -(-kv_length // tile_keys)
    partial = split_key_blocks(plan.partial, tiles_per_block, num_tiles)
    full = split_key_blocks(plan.full, tiles_per_block, num_tiles)
    first_key, last_key = plan.first_key, plan.last_key
    out = q.new_empty(batch, length, heads, v.shape[3])
    # flash-attn-4 reads and writes [B, N, H, D]
    flash_q, flash_k, flash_v, flash_out = (*(x.transpose(1, 2) for x in (q, k, v)), out)
    # if all query heads of a KV head are packed into one tile, keys are read once per KV head; with
    # tiles of 64 keys this is not faster
    can_pack_heads = tile_keys > MIN_TILE_TOKENS and kv_heads < heads
    if can_pack_heads and partial.counts.shape[1] == kv_heads and (batch == 1 or kv_heads == 1):
        flash_q, flash_k, flash_v, flash_out = (
            _fold_heads_into_batch(x, kv_heads) for x in (flash_q, flash_k, flash_v, flash_out)
        )
        partial, full = (
            block_lists.map_tensors(lambda x: x.flatten(0, 1).unsqueeze(1))
            for block_lists in (partial, full)
        )
        first_key, last_key = (x.repeat_interleave(kv_heads, dim=0) for x in (first_key, last_key))
    else:
        partial, full = partial.for_heads(heads), full.for_heads(heads)
    flash_functions = _import_flash()
    _, lse, *_ = flash_functions.forward(
        flash_q,
        flash_k,
        flash_v,
        out=flash_out,
        softmax_scale=plan_arguments.scale,
        return_lse=True,
        pack_gqa=can_pack_heads and partial.counts.shape[1] == 1,
        **_make_sparsity_arguments(
            flash_functions,
            partial=partial,
            full=full,
            block_sizes=(plan.query_block, tile_keys),
            first_key=first_key,
            last_key=last_key,
        ),
    )
    out, lse = out.transpose(1, 2), lse.view(batch, heads, length)
    _blank_padding_queries(out, lse, plan.last_key)
    return out, lse


@torch.library.custom_op(
    "cab_hf::flash_attention_backward", mutates_args=(), schema=block.BACKWARD_SCHEMA
)
def _backward_op(grad, grad_lse, q, k, v, out, lse, *plan_values):
    """Compute the gradients of q, k and v. ``plan_values`` are the fields of `block.PlanArguments`.

    ``grad_lse`` must be None, because flash-attn-4 has no gradient of the log-sum-exp.
    """
    assert grad_lse is None
    plan_arguments = block.PlanArguments._make(plan_values)
    plan = plan_arguments.to_plan_tensors()
    heads, kv_length = q.shape[1], k.shape[2]
    _, tile_keys = BACKWARD_TILES[q.shape[3]]
    # flash-attn-4 does not mask full blocks, but exp(logit - inf) = 0 for padding queries
    lse = lse.masked_fill((plan.last_key < 0).unsqueeze(1), torch.inf)
    partial, full = (
        transpose_to_tiles(
            block_lists, plan.key_block, tile_keys=tile_keys, kv_length=kv_length
        ).for_heads(heads)
        for block_lists in (plan.partial, plan.full)
    )
    # flash-attn-4 reads and writes [B, N, H, D]
    flash_q, flash_k, flash_v, flash_out, flash_grad = (
        x.transpose(1, 2) for x in (q, k, v, out, grad)
    )
    flash_functions = _import_flash()
    gradients = flash_functions.backward(
        q=flash_q,
        k=flash_k,
        v=flash_v,
        out=flash_out,
        dout=flash_grad,
        lse=lse,
        softmax_scale=plan_arguments.scale,
        **_make_sparsity_arguments(
            flash_functions,
            partial=partial,
            full=full,
            block_sizes=(plan.query_block, tile_keys),
            first_key=plan.first_key,
            last_key=plan.last_key,
        ),
    )
    return tuple(x.transpose(1, 2) for x in gradients)


@_backward_op.register_fake
def _(grad, grad_lse, q, k, v, *_):
    """Allocate gradients with the strides that flash-attn-4 returns, for shape inference."""
    return tuple(torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v))


def _select_backward_op(head_dim: int, query_block: int, key_block: int) -> CustomOpDef:
    """Return the backward op for losses that do not depend on the log-sum-exp.

    The op is `block.backward_op` if the backward pass of flash-attn-4 does not support the blocks.
    """
    is_supported = has_flash_backward(head_dim, query_block, key_block)
    return _backward_op if is_supported else block.backward_op


block.register_gradients(_forward_op, _select_backward_op)


def choose_tile_keys(head_dim: int, key_block: int) -> int:
    """Return the number of keys per tile of the forward pass, a divisor of the key block."""
    is_wide_tile = key_block % (2 * MIN_TILE_TOKENS) == 0 and head_dim <= MAX_WIDE_TILE_HEAD_DIM
    return 2 * MIN_TILE_TOKENS if is_wide_tile else MIN_TILE_TOKENS


def split_key_blocks(
    block_lists: BlockIndices, tiles_per_block: int, num_tiles: int
) -> BlockIndices:
    """Return the lists with every key block replaced by ``tiles_per_block`` smaller key blocks.

    Args:
        block_lists: Lists of key blocks per query block.
        tiles_per_block: Smaller key blocks per key block.
        num_tiles: Number of smaller key blocks in the sequence. The last key block may contain
            fewer than ``tiles_per_block``.
    """
    if tiles_per_block == 1:
        return block_lists
    tile_in_block = torch.arange(
        tiles_per_block, device=block_lists.indices.device, dtype=torch.int32
    )
    indices = (block_lists.indices.unsqueeze(-1) * tiles_per_block + tile_in_block).flatten(-2)
    indices = indices.narrow(-1, 0, min(num_tiles, indices.shape[-1]))
    # only the last key block of the sequence may have fewer parts. Lists are ascending, so that
    # this block is the last entry of a list
    last_slot = (block_lists.counts - 1).clamp(min=0).unsqueeze(-1).to(torch.int64)
    last_tile = block_lists.indices.gather(-1, last_slot).squeeze(-1) * tiles_per_block + (
        tiles_per_block - 1
    )
    num_missing_tiles = (last_tile - (num_tiles - 1)).clamp(min=0).where(block_lists.counts > 0, 0)
    return BlockIndices(
        block_lists.counts * tiles_per_block - num_missing_tiles, indices.contiguous()
    )


def transpose_to_tiles(
    block_lists: BlockIndices, key_block: int, tile_keys: int, kv_length: int
) -> BlockIndices:
    """Return transposed lists: for every tile of keys, the query blocks that attend to the tile.

    Args:
        block_lists: Lists of key blocks per query block.
        key_block: Keys per key block.
        tile_keys: Keys per tile, a divisor of ``key_block``.
        kv_length: Number of keys.
    """
    lists_by_key_block = transpose(block_lists, -(-kv_length // key_block))
    tiles_per_block, num_tiles = key_block // tile_keys, -(-kv_length // tile_keys)
    if tiles_per_block == 1:
        return lists_by_key_block
    return lists_by_key_block.map_tensors(
        lambda x: x.repeat_interleave(tiles_per_block, dim=2).narrow(2, 0, num_tiles).contiguous()
    )


def _fold_heads_into_batch(x: Tensor, kv_heads: int) -> Tensor:
    """Return x [1, N, H, D] as [H_kv, N, H / H_kv, D]: KV heads become the batch dimension.

    If there is one KV head, return x [B, N, H, D] unchanged.
    """
    return x if kv_heads == 1 else x.squeeze(0).unflatten(1, (kv_heads, -1)).transpose(0, 1)


def _blank_padding_queries(out: Tensor, lse: Tensor, last_keys: Tensor) -> None:
    """Write zeros to ``out`` and -inf to ``lse`` for padding queries.

    flash-attn-4 does not mask full blocks, so that results of padding queries are arbitrary.

    Args:
        out: [B, H, N_q, D], changed in place.
        lse: float32 [B, H, N_q], changed in place.
        last_keys: int32 [B, N_q], the last visible key of each query; -1 for padding queries.
    """
    batch, heads, length, dim = out.shape
    batch_stride, token_stride = last_keys.stride()
    _blank_padding_kernel[(triton.cdiv(length, QUERIES_PER_PROGRAM), batch)](
        last_keys=last_keys,
        last_keys_batch_stride=batch_stride,
        last_keys_token_stride=token_stride,
        out=make_vectors(out),
        lse=lse,
        heads=heads,
        length=length,
        dim=dim,
        BLOCK_M=QUERIES_PER_PROGRAM,
        D=triton.next_power_of_2(dim),
    )


# numbers that depend on the sequence length must not cause another compilation
@triton.jit(do_not_specialize=["last_keys_batch_stride", "length"])
def _blank_padding_kernel(
    last_keys,
    last_keys_batch_stride,
    last_keys_token_stride,
    out,
    lse,
    heads,
    length,
    dim,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
):
    """Write 0 to ``out`` and -inf to ``lse`` for all heads of the padding queries of one tile.

    A tile is BLOCK_M queries of one batch row.
    """
    batch = tl.program_id(1).to(tl.int64)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_in_bounds = query < length
    last_key = tl.load(
        last_keys + batch * last_keys_batch_stride + query * last_keys_token_stride,
        mask=is_in_bounds,
        other=0,
    )
    is_padding = is_in_bounds & (last_key < 0)
    if tl.max(is_padding.to(tl.int32), 0) > 0:
        channel = tl.arange(0, D)[None, :]
        zeros = tl.zeros((BLOCK_M, D), out.data.dtype.element_ty)
        for head in range(heads):
            out_ptrs = make_vector_pointers(out, batch, head, query) + channel
            tl.store(out_ptrs, zeros, mask=is_padding[:, None] & (channel < dim))
            lse_ptrs = lse + (batch * heads + head) * length + query
            minus_infinity = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            tl.store(lse_ptrs, minus_infinity, mask=is_padding)


@cache
def _import_flash() -> SimpleNamespace:
    """Import flash-attn-4, which takes seconds, and return the functions that this module uses.

    Returns:
        forward, backward: The block-sparse forward and backward pass.
        lists: Class of the lists of blocks.
        is_in_key_range: Mask function of partial blocks, first visible key <= key <= last visible
            key.
    """
    from cutlass import cute
    from flash_attn.cute import interface
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def is_in_key_range(batch, head, query, key, lengths, key_ranges):
        first_key = key_ranges[0][batch[0], query[0]]
        last_key = key_ranges[1][batch[0], query[0]]
        return (key >= first_key) & (key <= last_key)

    return SimpleNamespace(
        forward=interface._flash_attn_fwd,
        backward=interface._flash_attn_bwd,
        lists=BlockSparseTensorsTorch,
        is_in_key_range=is_in_key_range,
    )


def _make_sparsity_arguments(
    flash_functions: SimpleNamespace,
    *,
    partial: BlockIndices,
    full: BlockIndices,
    block_sizes: tuple[int, int],
    first_key: Tensor,
    last_key: Tensor,
) -> dict[str, object]:
    """Return the keyword arguments that pass the lists and the mask of a plan to flash-attn-4.

    Args:
        flash_functions: Result of `_import_flash`.
        partial, full: In the forward pass, lists of key tiles per query block. In the backward
            pass, lists of query blocks per key tile.
        block_sizes: Queries and keys per block of the lists.
        first_key, last_key: int32 [B, N_q], the first and the last visible key of each query, which
            mask partial blocks.
    """
    key_ranges = [first_key.contiguous(), last_key.contiguous()]
    for range_tensor in key_ranges:
        # flash-attn-4 takes a dimension with stride 1 as the contiguous dimension. Both dimensions
        # may have stride 1 if one has size 1, so that the dimension is set here
        range_tensor.__leading_dim__ = 1
    return {
        "block_sparse_tensors": flash_functions.lists(
            mask_block_cnt=partial.counts,
            mask_block_idx=partial.indices,
            full_block_cnt=full.counts,
            full_block_idx=full.indices,
            block_size=block_sizes,
        ),
        "mask_mod": flash_functions.is_in_key_range,
        "aux_tensors": key_ranges,
    }
