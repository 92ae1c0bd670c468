"""Attention under a plan, by an engine that supports only full and partial blocks.

The definition is `reference.attention`. This module adds to the engine:

* v with another head dim than q. The narrower tensors are padded with zeros.
* Sampled blocks. A separate call attends to the sampled blocks, and both results are merged.
* Dense rows, which are query blocks that attend to all visible keys. A separate call computes the
  dense rows under a one-head plan that lists all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.ops import HAS_TRITON, reference
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan, KeyRanges, cached_per_ranges

# device types on which the kernels of `merge` run
MERGE_DEVICE_TYPES = ("cuda",)
# the keys of dense rows are split into parts of at least this many keys
MIN_KEYS_PER_SPLIT = 4096
# largest number of parts into which the keys of dense rows are split
MAX_SPLITS = 16

Attend = Callable[..., Tensor | tuple[Tensor, Tensor]]


def attention(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool = False,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention under ``plan``, as `reference.attention` defines it.

    Args:
        attend: Engine that computes attention over full and partial blocks, for v with the head dim
            of q. The function has the arguments and the results of `reference.attention`.
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        v: [B, H_kv, N_k, D_v].
        plan: The key blocks that each query block attends to, with dense rows and sampled blocks.
        scale: Factor of the products q · k.
        return_lse: True to also return the log-sum-exp of the logits of each query.
        softcap: Soft cap of the scaled logits; None for no cap.

    Returns:
        out: [B, H, N_q, D_v].
        lse: Only with ``return_lse``, float32 [B, H, N_q], the log-sum-exp.
    """
    softcap_option = {} if softcap is None else {"softcap": softcap}
    attend = partial(attend, **softcap_option)
    value_dim = v.shape[-1]
    if value_dim != q.shape[-1]:
        # kernels need one head dim for q, k and v. Channels of zeros change neither the logits nor
        # the first ``value_dim`` channels of the output
        padded_dim = max(value_dim, q.shape[-1])
        q, k, v = (F.pad(x, (0, padded_dim - x.shape[-1])) for x in (q, k, v))
    attend_lists = attend
    if plan.sampled is not None:
        from cab_hf.ops.attention import sampled

        attend_lists = partial(sampled.attention, attend, **softcap_option)
    if plan.dense_rows is None:
        attend_result = attend_lists(q, k, v, plan, scale=scale, return_lse=return_lse)
        out, lse = attend_result if return_lse else (attend_result, None)
    else:
        listed_plan = replace(plan, dense_rows=None)
        attend_result = attend_lists(q, k, v, listed_plan, scale=scale, return_lse=return_lse)
        out, lse = attend_result if return_lse else (attend_result, None)
        out, lse = _add_dense_rows(attend, q, k, v, plan=plan, scale=scale, out=out, lse=lse)
    if value_dim != v.shape[-1]:
        out = out[..., :value_dim]
    return (out, lse) if return_lse else out


def _add_dense_rows(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: BlockPlan,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of the dense rows, and return ``out`` and ``lse`` with these results.

    Args:
        attend: Engine that computes attention over full and partial blocks.
        q: [B, H, N_q, D].
        k, v: [B, H_kv, N_k, D].
        plan: A plan with ``dense_rows``.
        scale: Factor of the products q · k.
        out: [B, H, N_q, D], attention over the listed blocks, which is 0 in dense rows, because
            lists of dense rows are empty. ``out`` changes in place unless it requires a gradient.
        lse: float32 [B, H, N_q], the log-sum-exp of ``out``, which changes in place unless ``out``
            requires a gradient; None if the log-sum-exp is not needed.
    """
    # the backward pass of the engine reads ``out``, so ``out`` must not change if it has gradients
    has_gradients = out.requires_grad
    num_splits = (
        1 if has_gradients or not _can_merge_by_kernels(q) else _choose_num_splits(plan.kv_length)
    )
    query_indices, repeated_query, is_real_query, dense_plan = _gather_dense_rows(
        plan.ranges, plan.dense_rows, plan.blocks, num_splits
    )
    gather_indices = repeated_query[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
    needs_lse = num_splits > 1 or lse is not None
    attend_result = attend(
        q.gather(2, gather_indices), k, v, dense_plan, scale=scale, return_lse=needs_lse
    )
    dense_out, dense_lse = attend_result if needs_lse else (attend_result, None)
    if num_splits > 1:
        from cab_hf.ops.attention.merge import write_merged

        write_merged(
            out=out,
            lse=lse,
            part_outs=dense_out,
            part_lses=dense_lse,
            query_indices=query_indices,
            is_real_query=is_real_query,
        )
        return out, lse
    # ``out`` is 0 and ``lse`` is -inf in dense rows, so that a sum and a maximum write the results.
    # Entries that are not real contain the index of another query, to which zeros are added
    dense_out = dense_out.masked_fill(~is_real_query[:, None, :, None], 0.0)
    scatter_add = out.scatter_add if has_gradients else out.scatter_add_
    out = scatter_add(2, query_indices[:, None, :, None].expand_as(dense_out), dense_out)
    if lse is not None:
        dense_lse = dense_lse.masked_fill(~is_real_query[:, None], -torch.inf)
        scatter_max = lse.scatter_reduce if has_gradients else lse.scatter_reduce_
        lse = scatter_max(2, query_indices[:, None].expand_as(dense_lse), dense_lse, "amax")
    return out, lse


def rescale_for_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Rescale attention to include attention sinks, as `reference.rescale_for_sinks` defines it.

    Args:
        out: [B, H, N_q, D], attention without sinks. ``out`` may change in place if neither ``out``
            nor ``sinks`` requires a gradient.
        lse: float32 [B, H, N_q], the log-sum-exp of ``out``.
        sinks: [H], one additional logit per head.
    """
    has_gradients = torch.is_grad_enabled() and (out.requires_grad or sinks.requires_grad)
    if has_gradients or not _can_merge_by_kernels(out):
        return reference.rescale_for_sinks(out, lse, sinks)
    from cab_hf.ops.attention.merge import share_with_sinks

    share_with_sinks(out, lse, sinks)
    return out


def _can_merge_by_kernels(x: Tensor) -> bool:
    """Return True if the kernels of `merge` run on the device of ``x``, outside of torch.compile.

    torch.compile cannot trace the kernels. Callers must not use the kernels if a gradient is
    required, because the kernels have no backward pass.
    """
    return x.device.type in MERGE_DEVICE_TYPES and HAS_TRITON and not torch.compiler.is_compiling()


def _choose_num_splits(kv_length: int) -> int:
    """Return the number of parts into which the keys of dense rows are split.

    Without a split, a few rows that read all keys would leave most of the GPU idle.
    """
    return max(1, min(MAX_SPLITS, kv_length // MIN_KEYS_PER_SPLIT))


@cached_per_ranges
def _gather_dense_rows(
    key_ranges: KeyRanges, dense_rows: Tensor, block_sizes: tuple[int, int], num_splits: int
) -> tuple[Tensor, Tensor, Tensor, BlockPlan]:
    """Return the queries of dense rows, and a one-head plan that lists all their visible keys.

    Args:
        key_ranges: The visible keys of each query.
        dense_rows: int64 [B, R], indices of the dense rows (query blocks); -1 for unused entries.
        block_sizes: Tokens per query block and per key block.
        num_splits: Number of parts of the keys.

    Returns:
        query_indices: int64 [B, R * query_block], indices of the queries in dense rows.
        repeated_query: int64 [B, num_splits * R * query_block], ``query_indices`` repeated for
            each part of the keys.
        is_real_query: bool [B, R * query_block], False where ``query_indices`` contains an
            arbitrary index: for unused entries of ``dense_rows``, and after the last query of the
            sequence.
        dense_plan: The plan whose queries are ``repeated_query``. Each repetition attends to
            another part of the keys.
    """
    query_block, key_block = block_sizes
    key_block = max(key_block, DENSE_BLOCK_SIZE)
    query_offset = torch.arange(query_block, device=key_ranges.end.device)
    query_indices = (dense_rows.unsqueeze(-1) * query_block + query_offset).flatten(1)
    is_real_query = (query_indices >= 0) & (query_indices < key_ranges.q_length)
    query_indices = query_indices.clamp(0, key_ranges.q_length - 1)
    first_key = key_ranges.start.gather(1, query_indices)
    last_key = key_ranges.end.gather(1, query_indices).masked_fill(~is_real_query, -1)
    if num_splits > 1:
        # each part is a whole number of key blocks, so that no key block is in two parts
        keys_per_split = -(-key_ranges.kv_length // (num_splits * key_block)) * key_block
        split_start = (
            keys_per_split
            * torch.arange(num_splits, device=first_key.device, dtype=first_key.dtype)[:, None]
        )
        first_key = torch.maximum(first_key.unsqueeze(1), split_start).flatten(1)
        last_key = torch.minimum(last_key.unsqueeze(1), split_start + (keys_per_split - 1)).flatten(
            1
        )
        last_key = last_key.masked_fill(last_key < first_key, -1)
    dense_ranges = replace(key_ranges, start=first_key, end=last_key, consecutive=False)
    if key_ranges.documents != 1 and any(
        max(block_sizes) % block_size for block_size in (query_block, key_block)
    ):
        # documents that start at multiples of ``block_sizes`` need not start at multiples of the
        # larger key block, so that the ranges do not count as aligned
        dense_ranges = replace(dense_ranges, aligned=False)
    dense_plan = BlockPlan.causal(dense_ranges, 1, query_block, key_block)
    return query_indices, query_indices.repeat(1, num_splits), is_real_query, dense_plan
