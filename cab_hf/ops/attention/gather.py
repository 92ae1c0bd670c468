"""Attention over the key blocks of a plan on a CPU, in plain PyTorch.

The full blocks that a query block lists are gathered, and PyTorch's fused CPU kernel attends to the
gathered keys without a mask. Another call attends to the partial blocks with a mask. Both results
are merged by their log-sum-exps. Query blocks that list few keys share a call of the kernel.

The fused kernel supports neither soft caps, nor NaN or infinities, nor v with another head dim than
q. For such inputs, `_attend_by_products` computes attention by matrix products.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.ops.reference import cap_logits
from cab_hf.plan import BlockIndices, BlockPlan

# largest number of logits per call of a kernel: 1 MiB in float32, which fits in the CPU's caches
MAX_LOGITS_PER_CALL = 2**18


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

    The result has no gradients. Dense rows and sampled blocks are ignored; `complete.attention`
    adds dense rows and sampled blocks.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        v: [B, H_kv, N_k, D_v].
        plan: The key blocks that each query block attends to.
        scale: Factor of the products q · k.
        return_lse: True to also return the log-sum-exp of each query, float32 [B, H, N_q].
        softcap: Soft cap of the scaled logits; None for no cap.
    """
    # the sum of a finite tensor is finite or overflows; an overflow only selects the slower
    # function, and a sum is faster than isfinite
    is_finite = all(math.isfinite(float(x.sum(dtype=torch.float32))) for x in (q, k, v))
    if softcap is None and is_finite and q.shape[3] == v.shape[3]:
        out, lse = _attend_by_fused_sdpa(q, k, v, plan, scale=scale)
    else:
        out, lse = _attend_by_products(q, k, v, plan, scale=scale, softcap=softcap)
    out, lse = (x.flatten(2, 3)[:, :, : q.shape[2]] for x in (out, lse))
    return (out, lse) if return_lse else out


def _attend_by_fused_sdpa(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention by PyTorch's fused CPU kernel. The arguments are those of `attention`.

    Returns:
        out: [B, H, M_q, query_block, D].
        lse: float32 [B, H, M_q, query_block], or float64 for float64 inputs.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    # the last query block and the last key block are padded; no query attends to padding keys
    queries = F.pad(q, (0, 0, 0, -q.shape[2] % plan.query_block)).to(dtype)
    queries = queries.unflatten(2, (-1, plan.query_block)).transpose(1, 2).contiguous()
    keys, values = (
        F.pad(x, (0, 0, 0, -x.shape[2] % plan.key_block)).to(dtype).contiguous() for x in (k, v)
    )
    keys, values = (x.view(-1, plan.key_block * x.shape[3]) for x in (keys, values))
    out, lse = torch.zeros_like(queries), queries.new_full(queries.shape[:4], -torch.inf)
    shared_arguments = {"q": queries, "k": keys, "v": values, "kv_heads": k.shape[1]}
    _attend_full_blocks(plan, **shared_arguments, scale=scale, out=out, lse=lse)
    _add_partial_blocks(plan, **shared_arguments, scale=scale, out=out, lse=lse)
    first_key, last_key = plan.ranges.blocked(plan.query_block)
    has_no_keys = (first_key > last_key).unsqueeze(2)
    if bool(has_no_keys.any()):
        out.masked_fill_(has_no_keys.unsqueeze(4), 0.0)
        lse.masked_fill_(has_no_keys, -torch.inf)
    return out.to(q.dtype).transpose(1, 2), lse.transpose(1, 2)


def _attend_full_blocks(
    plan: BlockPlan,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_heads: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write attention over the full blocks to ``out`` and ``lse``.

    Query blocks without full blocks do not change. One call of the kernel computes units (see
    `_divide_into_units`) that list the same number of blocks, so that the call needs no mask.

    Args:
        plan: The plan.
        q: [B, M_q, H, query_block, D].
        k, v: [B * H_kv * M_k, key_block * D].
        kv_heads: H_kv.
        scale: Factor of the products q · k.
        out: [B, M_q, H, query_block, D], changed in place.
        lse: [B, M_q, H, query_block], the log-sum-exp, changed in place.
    """
    heads_per_unit, list_index_of_unit, first_block_of_unit = _divide_into_units(
        plan, q.shape[2], kv_heads
    )
    counts = plan.full.counts.flatten()[list_index_of_unit]
    indices = plan.full.indices.flatten(0, 2)
    q, out, lse = (x.unflatten(2, (-1, heads_per_unit)).flatten(0, 2) for x in (q, out, lse))
    counts, unit_order = counts.sort(stable=True)
    logits_per_block = heads_per_unit * plan.query_block * plan.key_block
    for unit_slice, num_blocks in _iterate_unit_slices(counts.tolist(), logits_per_block):
        unit_indices = unit_order[unit_slice]
        block_indices = indices.index_select(0, list_index_of_unit[unit_indices])[:, :num_blocks]
        block_indices = block_indices + first_block_of_unit[unit_indices].unsqueeze(1)
        unit_k, unit_v = (_gather_blocks(x, block_indices, q.shape[3]).unsqueeze(1) for x in (k, v))
        unit_out, unit_lse = _call_fused_sdpa(
            q.index_select(0, unit_indices), unit_k, unit_v, scale
        )
        out.index_copy_(0, unit_indices, unit_out)
        lse.index_copy_(0, unit_indices, unit_lse)


def _add_partial_blocks(
    plan: BlockPlan,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_heads: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merge attention over the partial blocks into ``out`` and ``lse``.

    One call of the kernel computes all heads of a few consecutive query blocks (rows). The
    arguments are those of `_attend_full_blocks`.
    """
    batch, num_rows, heads = q.shape[:3]
    heads_per_unit, list_index_of_unit, first_block_of_unit = _divide_into_units(
        plan, heads, kv_heads
    )
    # [B * M_q, U], for the U units of a query block
    counts = plan.partial.counts.flatten()[list_index_of_unit].view(batch * num_rows, -1)
    indices = plan.partial.indices.flatten(0, 2)[list_index_of_unit].unflatten(0, counts.shape)
    first_block_of_unit = first_block_of_unit.view_as(counts).unsqueeze(2)
    # True if all heads list the same partial blocks, which are usually the blocks on the diagonal.
    # Then all heads need the same mask
    is_mask_shared_by_heads = bool(
        (counts == counts[:, :1]).all() and (indices == indices[:, :1]).all()
    )
    mask_indices, mask_counts = (
        x[:, :1] if is_mask_shared_by_heads else x for x in (indices, counts)
    )
    first_key, last_key = (
        x.flatten(0, 1)[:, None, :, None] for x in plan.ranges.blocked(plan.query_block)
    )
    q, out, lse = (x.flatten(0, 1) for x in (q, out, lse))
    max_blocks = max(1, int(counts.max()))
    rows_per_call = max(
        1, MAX_LOGITS_PER_CALL // (heads * plan.query_block * plan.key_block * max_blocks)
    )
    for first_row in range(0, batch * num_rows, rows_per_call):
        row_slice = slice(first_row, first_row + rows_per_call)
        max_blocks = int(counts[row_slice].max())
        if not max_blocks:
            continue
        block_indices = indices[row_slice, :, :max_blocks] + first_block_of_unit[row_slice]
        row_k, row_v = (_gather_blocks(x, block_indices, q.shape[3]) for x in (k, v))

        is_unseen = _make_unseen_mask(
            mask_indices[row_slice, :, :max_blocks],
            mask_counts[row_slice],
            first_key=first_key[row_slice],
            last_key=last_key[row_slice],
            key_block=plan.key_block,
        )
        logit_mask = q.new_zeros(is_unseen.shape).masked_fill_(is_unseen, -torch.inf)
        has_no_keys = is_unseen.all(-1)
        if not is_mask_shared_by_heads:
            row_k, row_v, logit_mask, has_no_keys = (
                x.repeat_interleave(heads_per_unit, 1)
                for x in (row_k, row_v, logit_mask, has_no_keys)
            )
        elif heads_per_unit > 1:
            row_k, row_v = (x.repeat_interleave(heads_per_unit, 1) for x in (row_k, row_v))
        row_out, row_lse = _call_fused_sdpa(q[row_slice], row_k, row_v, scale, mask=logit_mask)
        if bool(has_no_keys.any()):
            row_out = row_out.masked_fill(has_no_keys.unsqueeze(-1), 0.0)
            row_lse = row_lse.masked_fill(has_no_keys, -torch.inf)
        # for a query without keys, both log-sum-exps are -inf, and their difference is NaN
        partial_weight = (row_lse - lse[row_slice]).sigmoid().nan_to_num_(nan=0.0).unsqueeze(-1)
        torch.lerp(out[row_slice], row_out, partial_weight, out=out[row_slice])
        torch.logaddexp(lse[row_slice], row_lse, out=lse[row_slice])


def _make_unseen_mask(
    indices: Tensor, counts: Tensor, *, first_key: Tensor, last_key: Tensor, key_block: int
) -> Tensor:
    """Return a mask of partial blocks: True for keys that a query does not attend to.

    Args:
        indices: int32 [rows, units, W], the listed blocks of each unit of each query block.
        counts: int32 [rows, units], number of listed blocks; other entries of W are masked.
        first_key, last_key: int32 [rows, 1, query_block, 1], the first and the last visible key.
        key_block: Tokens per key block.

    Returns:
        bool [rows, units, query_block, W * key_block].
    """
    key_offset = torch.arange(key_block, dtype=torch.int32, device=indices.device)
    key_position = (indices.unsqueeze(3) * key_block + key_offset).flatten(2).unsqueeze(2)
    is_unlisted_key = torch.arange(indices.shape[2], device=indices.device) >= counts.unsqueeze(2)
    is_unlisted_key = is_unlisted_key.repeat_interleave(key_block, 2).unsqueeze(2)
    return (key_position < first_key) | (key_position > last_key) | is_unlisted_key


def _divide_into_units(plan: BlockPlan, heads: int, kv_heads: int) -> tuple[int, Tensor, Tensor]:
    """Divide the heads of each query block into units of query heads that attend to the same keys.

    A unit is one query block of the query heads that share both a plan head and a KV head. The
    fused kernel processes a unit as one batch entry. A query block has U units.

    Args:
        plan: The plan.
        heads: H, heads of q.
        kv_heads: H_kv.

    Returns:
        heads_per_unit: Number of query heads per unit.
        list_index_of_unit: int64 [B * M_q * U], the index of each unit's lists among the B * P *
            M_q lists of the plan, which has P heads.
        first_block_of_unit: int64 [B * M_q * U], the index of the first key block of each unit's
            KV head among the B * H_kv * M_k key blocks of all KV heads.
    """
    heads_per_list, group_size = plan.shared_by(heads), heads // kv_heads
    heads_per_unit = math.gcd(heads_per_list, group_size)
    device = plan.full.counts.device
    head = torch.arange(0, heads, heads_per_unit, device=device)
    batch = torch.arange(plan.batch, device=device)[:, None, None]
    row = torch.arange(plan.q_blocks, device=device)[:, None]
    list_index_of_unit = (batch * plan.heads + head // heads_per_list) * plan.q_blocks + row
    first_block_of_unit = (batch * kv_heads + head // group_size) * plan.kv_blocks
    return (
        heads_per_unit,
        list_index_of_unit.flatten(),
        first_block_of_unit.expand_as(list_index_of_unit).flatten(),
    )


def _iterate_unit_slices(counts: list[int], logits_per_block: int) -> Iterator[tuple[slice, int]]:
    """Yield for each call of the kernel: a slice of ``counts``, and the blocks per unit.

    All units of a call list the same number of blocks, at least 1. A call computes one unit, or
    several units with at most `MAX_LOGITS_PER_CALL` logits.

    Args:
        counts: Number of blocks that each unit lists, ascending.
        logits_per_block: Number of logits of a unit per listed block.
    """
    first_unit = bisect_right(counts, 0)
    while first_unit < len(counts):
        num_blocks = counts[first_unit]
        max_units = max(1, MAX_LOGITS_PER_CALL // (num_blocks * logits_per_block))
        end_unit = min(bisect_right(counts, num_blocks), first_unit + max_units)
        yield slice(first_unit, end_unit), num_blocks
        first_unit = end_unit


def _gather_blocks(x: Tensor, block_indices: Tensor, dim: int) -> Tensor:
    """Gather blocks of keys or values, and return their tokens in the order of ``block_indices``.

    Args:
        x: [B * H_kv * M_k, key_block * dim], the key blocks of all KV heads.
        block_indices: int [..., W], indices of blocks in the first dimension of ``x``.
        dim: Channels of a token.

    Returns:
        [..., W * key_block, dim].
    """
    return x.index_select(0, block_indices.flatten()).view((*block_indices.shape[:-1], -1, dim))


def _call_fused_sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Call PyTorch's fused CPU kernel for R independent problems.

    Args:
        q: [R, H, N, D].
        k, v: [R, 1 or H, K, D].
        scale: Factor of the products q · k.
        mask: [R, 1 or H, N, K], added to the logits; None for zeros.

    Returns:
        out: [R, H, N, D].
        lse: [R, H, N], the log-sum-exp.
    """
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    fused_sdpa = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused_sdpa(q, k, v, attn_mask=mask, scale=scale)


def _attend_by_products(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention by matrix products, which support all inputs.

    The arguments are those of `attention`.

    Returns:
        out: [B, H, M_q, query_block, D_v].
        lse: float32 [B, H, M_q, query_block], or float64 for float64 inputs.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads_per_list, group_size = plan.shared_by(q.shape[1]), q.shape[1] // k.shape[1]
    is_finite = all(bool(x.isfinite().all()) for x in (k, v))
    # the last query block is padded with queries that have no keys
    query_blocks = F.pad(q, (0, 0, 0, -q.shape[2] % plan.query_block)) * scale
    query_blocks = query_blocks.unflatten(2, (-1, plan.query_block))
    first_key, last_key = plan.ranges.blocked(plan.query_block)
    out = q.new_empty((*query_blocks.shape[:4], v.shape[3]))
    lse = q.new_empty(query_blocks.shape[:4], dtype=dtype)
    num_listed_keys = ((plan.full.counts + plan.partial.counts) * plan.key_block).tolist()
    queries_per_row = plan.query_block * min(heads_per_list, group_size)
    for batch in range(q.shape[0]):
        for plan_head in range(plan.heads):
            for row_slice in _iterate_row_slices(
                num_listed_keys[batch][plan_head], queries_per_row
            ):
                listed_keys, is_unseen = _find_listed_keys(
                    plan,
                    batch,
                    plan_head,
                    row_slice=row_slice,
                    first_key=first_key[batch, row_slice],
                    last_key=last_key[batch, row_slice],
                )
                for head_slice, kv_head in _iterate_heads_of_plan_head(
                    plan_head, heads_per_list, group_size
                ):
                    row_k, row_v = (_gather_tokens(x[batch, kv_head], listed_keys) for x in (k, v))
                    if not is_finite:
                        # 0 * NaN is NaN, so that values of keys with a weight of 0 must be finite
                        is_unseen_by_all = is_unseen.all(1).unsqueeze(-1)
                        row_k, row_v = (
                            x.masked_fill(is_unseen_by_all, 0.0) for x in (row_k, row_v)
                        )
                    row_out, row_lse = _attend(
                        q=query_blocks[batch, head_slice, row_slice].to(dtype).transpose(0, 1),
                        k=row_k.to(dtype),
                        v=row_v.to(dtype),
                        is_unseen=is_unseen,
                        softcap=softcap,
                    )
                    out[batch, head_slice, row_slice] = row_out.transpose(0, 1).to(q.dtype)
                    lse[batch, head_slice, row_slice] = row_lse.transpose(0, 1)
    return out, lse


def _iterate_heads_of_plan_head(
    plan_head: int, heads_per_list: int, group_size: int
) -> Iterator[tuple[slice, int]]:
    """Yield the query heads of one plan head, grouped by KV head, as (query heads, KV head).

    Args:
        plan_head: Index of the plan head.
        heads_per_list: Query heads per head of the plan.
        group_size: Query heads per KV head.
    """
    first_head, end_head = plan_head * heads_per_list, (plan_head + 1) * heads_per_list
    for kv_head in range(first_head // group_size, (end_head - 1) // group_size + 1):
        yield (
            slice(max(first_head, kv_head * group_size), min(end_head, (kv_head + 1) * group_size)),
            kv_head,
        )


def _iterate_row_slices(num_listed_keys: list[int], queries_per_row: int) -> Iterator[slice]:
    """Yield slices of consecutive query blocks, each of which one matrix product computes.

    The lists of a slice are padded to the longest list. A slice has one query block, or several
    with at most `MAX_LOGITS_PER_CALL` logits.

    Args:
        num_listed_keys: Number of keys that each query block lists.
        queries_per_row: Queries per query block, over all heads of a product.
    """
    first_row, max_num_keys = 0, 0
    for end_row, num_row_keys in enumerate(num_listed_keys):
        num_logits = (end_row + 1 - first_row) * max(max_num_keys, num_row_keys) * queries_per_row
        if end_row > first_row and num_logits > MAX_LOGITS_PER_CALL:
            yield slice(first_row, end_row)
            first_row, max_num_keys = end_row, 0
        max_num_keys = max(max_num_keys, num_row_keys)
    yield slice(first_row, len(num_listed_keys))


def _find_listed_keys(
    plan: BlockPlan,
    batch: int,
    plan_head: int,
    *,
    row_slice: slice,
    first_key: Tensor,
    last_key: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the keys that R query blocks list, and a mask of keys that queries do not attend to.

    Args:
        plan: The plan.
        batch: Index of the batch row.
        plan_head: Index of the plan head.
        row_slice: The R query blocks.
        first_key, last_key: int32 [R, query_block], the first and the last visible key of each
            query.

    Returns:
        listed_keys: int64 [R, K], the indices of the listed keys, padded to K keys.
        is_unseen: bool [R, query_block, K], True for keys that a query does not attend to.
    """
    key_offset = torch.arange(plan.key_block, device=first_key.device)

    def list_keys(block_lists: BlockIndices) -> tuple[Tensor, Tensor]:
        """Return the keys of listed blocks and a mask of padding, both [R, W * key_block]."""
        counts = block_lists.counts[batch, plan_head, row_slice]
        indices = block_lists.indices[batch, plan_head, row_slice, : int(counts.max())]
        is_listed = torch.arange(indices.shape[1], device=counts.device) < counts.unsqueeze(1)
        listed_keys = indices.long().unsqueeze(2) * plan.key_block + key_offset
        return listed_keys.flatten(1), ~is_listed.repeat_interleave(plan.key_block, dim=1)

    full_keys, is_full_padding = list_keys(plan.full)
    partial_keys, is_partial_padding = list_keys(plan.partial)
    # full blocks need no mask, except for queries without keys (first > last)
    is_full_unseen = is_full_padding.unsqueeze(1) | (first_key > last_key).unsqueeze(2)
    partial_key = partial_keys.unsqueeze(1)
    is_out_of_range = (partial_key < first_key.unsqueeze(2)) | (partial_key > last_key.unsqueeze(2))
    is_partial_unseen = is_out_of_range | is_partial_padding.unsqueeze(1)
    # the last block may extend past the last key; such keys are masked
    listed_keys = torch.cat([full_keys, partial_keys], dim=1).clamp(max=plan.kv_length - 1)
    return listed_keys, torch.cat([is_full_unseen, is_partial_unseen], dim=2)


def _gather_tokens(x: Tensor, token_indices: Tensor) -> Tensor:
    """Return the rows ``token_indices``, int64 [R, K], of x [N, D] as [R, K, D]."""
    return x.index_select(0, token_indices.flatten()).unflatten(0, token_indices.shape)


def _attend(
    *, q: Tensor, k: Tensor, v: Tensor, is_unseen: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention of R query blocks of N queries by two batched matrix products.

    Args:
        q: [R, H, N, D], scaled.
        k: [R, K, D].
        v: [R, K, D_v].
        is_unseen: bool [R, N, K], True for keys that a query does not attend to.
        softcap: Soft cap of the logits; None for no cap.

    Returns:
        out: [R, H, N, D_v].
        lse: [R, H, N], the log-sum-exp.
    """
    if not k.shape[1]:
        return q.new_zeros((*q.shape[:3], v.shape[2])), q.new_full(q.shape[:3], -torch.inf)
    p = cap_logits(q.flatten(1, 2) @ k.transpose(1, 2), softcap).unflatten(1, q.shape[1:3])
    p.masked_fill_(is_unseen.unsqueeze(1), -torch.inf)
    lse = p.logsumexp(-1, keepdim=True)
    # a query without keys has weights of 0
    p = p.sub_(lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
    return (p.flatten(1, 2) @ v).unflatten(1, q.shape[1:3]), lse.squeeze(-1)
