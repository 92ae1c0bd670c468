"""Attention under a plan in plain PyTorch, over the listed keys only; fast on a CPU.

The fused kernel of PyTorch attends to the full blocks that a row lists, gathered and without a
mask. It attends to partial blocks with a mask, and the two results are merged by their
log-sum-exps. Rows with few keys are attended together, under one mask.

The kernel supports neither soft caps nor tensors that are not finite. `_by_products` computes
these.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.ops.reference import capped
from cab_hf.plan import BlockIndices, BlockPlan

# logits that are computed at a time: 1 MiB in float32, which fits caches
LOGITS_AT_A_TIME = 2**18


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool = False,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention under the lists of ``plan``, [B, H, N_q, D_v], without gradients.

    `reference.attention` is the definition.
    """
    # a sum is faster than isfinite; a sum that overflows only selects the slower function
    is_finite = all(math.isfinite(float(x.sum(dtype=torch.float32))) for x in (q, k, v))
    if softcap is None and is_finite and q.shape[3] == v.shape[3]:
        out, lse = _fused_attention(q, k, v, plan, scale)
    else:
        out, lse = _by_products(q, k, v, plan, scale, softcap)
    out, lse = (x.flatten(2, 3)[:, :, : q.shape[2]] for x in (out, lse))
    return (out, lse) if return_lse else out


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, M_q, query_block, D] and the log-sum-exp by PyTorch's kernel."""
    wide = torch.promote_types(q.dtype, torch.float32)
    # the last block is padded: no query attends to padding
    queries = F.pad(q, (0, 0, 0, -q.shape[2] % plan.query_block)).to(wide)
    queries = queries.unflatten(2, (-1, plan.query_block)).transpose(1, 2).contiguous()
    keys, values = (
        F.pad(x, (0, 0, 0, -x.shape[2] % plan.key_block)).to(wide).contiguous() for x in (k, v)
    )
    keys, values = (x.view(-1, plan.key_block * x.shape[3]) for x in (keys, values))
    # [B, M_q, H, query_block, D] and [B, M_q, H, query_block]
    out, lse = torch.zeros_like(queries), queries.new_full(queries.shape[:4], -torch.inf)
    _attend_full(queries, keys, values, plan, scale, kv_heads=k.shape[1], out=out, lse=lse)
    _add_partial(queries, keys, values, plan, scale, kv_heads=k.shape[1], out=out, lse=lse)
    first, last = plan.ranges.blocked(plan.query_block)
    blind = (first > last).unsqueeze(2)
    if bool(blind.any()):
        out.masked_fill_(blind.unsqueeze(4), 0.0)
        lse.masked_fill_(blind, -torch.inf)
    return out.to(q.dtype).transpose(1, 2), lse.transpose(1, 2)


def _attend_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    *,
    kv_heads: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write attention over the full blocks to ``out`` and ``lse``; other rows do not change.

    Rows that list equally many blocks are attended together and need no mask.

    Args:
        q: [B, M_q, H, query_block, D].
        k, v: [B * H_kv * M_k, key_block * D].
        out, lse: [B, M_q, H, query_block, D] and [B, M_q, H, query_block].
    """
    together, lists, base = _units(plan, q.shape[2], kv_heads)
    counts = plan.full.counts.flatten()[lists]
    indices = plan.full.indices.flatten(0, 2)
    q, out, lse = (x.unflatten(2, (-1, together)).flatten(0, 2) for x in (q, out, lse))
    counts, order = counts.sort(stable=True)
    per_block = together * plan.query_block * plan.key_block
    for unit_slice, count in _alike(counts.tolist(), per_block):
        unit = order[unit_slice]
        blocks = indices.index_select(0, lists[unit])[:, :count] + base[unit].unsqueeze(1)
        listed_k, listed_v = (_taken_blocks(x, blocks, q.shape[3]) for x in (k, v))
        unit_queries = q.index_select(0, unit)
        part, sums = _fused(unit_queries, listed_k.unsqueeze(1), listed_v.unsqueeze(1), scale)
        out.index_copy_(0, unit, part)
        lse.index_copy_(0, unit, sums)


def _add_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    *,
    kv_heads: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merge attention over the partial blocks into ``out`` and ``lse``; see `_attend_full`.

    All heads of a few rows are attended together.
    """
    batch, rows, heads = q.shape[:3]
    together, lists, base = _units(plan, heads, kv_heads)
    counts = plan.partial.counts.flatten()[lists].view(batch * rows, -1)
    indices = plan.partial.indices.flatten(0, 2)[lists].unflatten(0, counts.shape)
    base = base.view(*counts.shape, 1)
    # the lists of all heads are usually those of the diagonal
    shared = bool((counts == counts[:, :1]).all() and (indices == indices[:, :1]).all())
    first, last = (x.flatten(0, 1)[:, None, :, None] for x in plan.ranges.blocked(plan.query_block))
    q, out, lse = (x.flatten(0, 1) for x in (q, out, lse))
    within = torch.arange(plan.key_block, dtype=torch.int32, device=q.device)
    width = max(1, int(counts.max()))
    step = max(1, LOGITS_AT_A_TIME // (heads * plan.query_block * plan.key_block * width))
    for start in range(0, batch * rows, step):
        row_slice = slice(start, start + step)
        width = int(counts[row_slice].max())
        if not width:
            continue
        blocks = indices[row_slice, :, :width]
        listed_k, listed_v = (
            _taken_blocks(x, blocks + base[row_slice], q.shape[3]) for x in (k, v)
        )
        mine, listed = (x[row_slice, :1] if shared else x[row_slice] for x in (indices, counts))
        # [rows, 1 or units, 1, keys]
        key = (mine[..., :width, None] * plan.key_block + within).flatten(2).unsqueeze(2)
        absent = torch.arange(width, device=q.device) >= listed.unsqueeze(2)
        absent = absent.repeat_interleave(plan.key_block, 2).unsqueeze(2)
        unseen = (key < first[row_slice]) | (key > last[row_slice]) | absent
        mask = q.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)
        blind = unseen.all(-1)
        if not shared:
            listed_k, listed_v, mask, blind = (
                x.repeat_interleave(together, 1) for x in (listed_k, listed_v, mask, blind)
            )
        elif together > 1:
            listed_k, listed_v = (x.repeat_interleave(together, 1) for x in (listed_k, listed_v))
        part, sums = _fused(q[row_slice], listed_k, listed_v, scale, mask)
        if bool(blind.any()):
            part = part.masked_fill(blind.unsqueeze(-1), 0.0)
            sums = sums.masked_fill(blind, -torch.inf)
        # both log-sum-exps are -inf for a query without keys
        weight = (sums - lse[row_slice]).sigmoid().nan_to_num_(nan=0.0).unsqueeze(-1)
        torch.lerp(out[row_slice], part, weight, out=out[row_slice])
        torch.logaddexp(lse[row_slice], sums, out=lse[row_slice])


def _units(plan: BlockPlan, heads: int, kv_heads: int) -> tuple[int, Tensor, Tensor]:
    """Return the units of attention: a row of the query heads that share lists and keys.

    Returns:
        heads: Number of query heads per unit.
        lists: int64 [B * M_q * U], the row of each unit in the flattened lists [B * H_p * M_q].
        base: int64 [B * M_q * U], the first block of each unit's keys in [B * H_kv * M_k].
    """
    sharing, group = plan.shared_by(heads), heads // kv_heads
    together = math.gcd(sharing, group)
    device = plan.full.counts.device
    head = torch.arange(0, heads, together, device=device)
    batch = torch.arange(plan.batch, device=device)[:, None, None]
    row = torch.arange(plan.q_blocks, device=device)[:, None]
    lists = (batch * plan.heads + head // sharing) * plan.q_blocks + row
    base = (batch * kv_heads + head // group) * plan.kv_blocks
    return together, lists.flatten(), base.expand_as(lists).flatten()


def _alike(counts: list[int], logits_per_block: int) -> Iterator[tuple[slice, int]]:
    """Yield (units, count) with one count above 0 and at most `LOGITS_AT_A_TIME` logits.

    Args:
        counts: Number of blocks of each unit, ascending.
        logits_per_block: Logits of a unit per block.
    """
    start = bisect_right(counts, 0)
    while start < len(counts):
        count = counts[start]
        most = max(1, LOGITS_AT_A_TIME // (count * logits_per_block))
        stop = min(bisect_right(counts, count), start + most)
        yield slice(start, stop), count
        start = stop


def _taken_blocks(x: Tensor, blocks: Tensor, dim: int) -> Tensor:
    """Gather blocks [..., W] of x [blocks, key_block * D]: [..., W * key_block, D]."""
    return x.index_select(0, blocks.flatten()).view(*blocks.shape[:-1], -1, dim)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output [R, H, N, D] and the log-sum-exp [R, H, N] of PyTorch's CPU kernel."""
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(q, k, v, attn_mask=mask, scale=scale)


def _by_products(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, M_q, query_block, D] and the log-sum-exp by matrix products."""
    wide = torch.promote_types(q.dtype, torch.float32)
    sharing, group = plan.shared_by(q.shape[1]), q.shape[1] // k.shape[1]
    sound = all(bool(x.isfinite().all()) for x in (k, v))
    # the last block is padded with queries without keys
    blocks = F.pad(q, (0, 0, 0, -q.shape[2] % plan.query_block)) * scale
    blocks = blocks.unflatten(2, (-1, plan.query_block))
    first, last = plan.ranges.blocked(plan.query_block)
    out = q.new_empty(*blocks.shape[:4], v.shape[3])
    lse = q.new_empty(blocks.shape[:4], dtype=wide)
    lengths = ((plan.full.counts + plan.partial.counts) * plan.key_block).tolist()
    for batch in range(q.shape[0]):
        for head in range(plan.heads):
            for rows in _chunks(lengths[batch][head], plan.query_block * min(sharing, group)):
                place = batch, head, rows
                keys, unseen = _listed(plan, place, first[batch, rows], last[batch, rows])
                for heads, kv_head in _heads_under(head, sharing, group):
                    listed_k, listed_v = (_taken(x[batch, kv_head], keys) for x in (k, v))
                    if not sound:
                        # a weight of 0 does not remove a NaN
                        unused = unseen.all(1).unsqueeze(-1)
                        listed_k, listed_v = (
                            x.masked_fill(unused, 0.0) for x in (listed_k, listed_v)
                        )
                    part = blocks[batch, heads, rows].to(wide).transpose(0, 1)
                    listed = listed_k.to(wide), listed_v.to(wide)
                    part, sums = _attend(part, *listed, unseen, softcap)
                    out[batch, heads, rows] = part.transpose(0, 1).to(q.dtype)
                    lse[batch, heads, rows] = sums.transpose(0, 1)
    return out, lse


def _heads_under(head: int, sharing: int, group: int) -> Iterator[tuple[slice, int]]:
    """Yield (heads of q, their KV head) for the ``sharing`` heads under one head of the plan."""
    first, end = head * sharing, (head + 1) * sharing
    for kv_head in range(first // group, (end - 1) // group + 1):
        yield slice(max(first, kv_head * group), min(end, (kv_head + 1) * group)), kv_head


def _chunks(lengths: list[int], queries: int) -> Iterator[slice]:
    """Yield the rows that are attended together, given the number of keys that each row lists."""
    begin, longest = 0, 0
    for end, length in enumerate(lengths):
        together = (end + 1 - begin) * max(longest, length) * queries
        if end > begin and together > LOGITS_AT_A_TIME:
            yield slice(begin, end)
            begin, longest = end, 0
        longest = max(longest, length)
    yield slice(begin, len(lengths))


def _listed(
    plan: BlockPlan, place: tuple[int, int, slice], first: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys that R rows list, and a mask of unseen keys.

    Returns:
        int64 [R, K], and bool [R, query_block, K].
    """
    within = torch.arange(plan.key_block, device=first.device)

    def tokens(part: BlockIndices) -> tuple[Tensor, Tensor]:
        counts = part.counts[place]
        indices = part.indices[place][:, : int(counts.max())]
        real = torch.arange(indices.shape[1], device=counts.device) < counts.unsqueeze(1)
        keys = indices.long().unsqueeze(2) * plan.key_block + within
        return keys.flatten(1), ~real.repeat_interleave(plan.key_block, dim=1)

    (full, absent), (partial, lacking) = tokens(plan.full), tokens(plan.partial)
    # all keys of full blocks are visible to every query that has keys
    blind = (first > last).unsqueeze(2)
    cut = partial.unsqueeze(1)
    cut = (cut < first.unsqueeze(2)) | (cut > last.unsqueeze(2)) | lacking.unsqueeze(1)
    # the last block may extend past the last key
    keys = torch.cat([full, partial], dim=1).clamp(max=plan.kv_length - 1)
    return keys, torch.cat([absent.unsqueeze(1) | blind, cut], dim=2)


def _taken(x: Tensor, keys: Tensor) -> Tensor:
    """Gather x [N, D] at keys [R, K]: [R, K, D]."""
    return x.index_select(0, keys.flatten()).unflatten(0, keys.shape)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, unseen: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output [R, H, N, D_v] and the log-sum-exp [R, H, N].

    Args:
        q: [R, H, N, D], scaled.
        k: [R, K, D].
        v: [R, K, D_v].
        unseen: bool [R, N, K].
    """
    if not k.shape[1]:
        return q.new_zeros(*q.shape[:3], v.shape[2]), q.new_full(q.shape[:3], -torch.inf)
    p = capped(q.flatten(1, 2) @ k.transpose(1, 2), softcap).unflatten(1, q.shape[1:3])
    p.masked_fill_(unseen.unsqueeze(1), -torch.inf)
    lse = p.logsumexp(-1, keepdim=True)
    # a query without keys has weights of 0
    p = p.sub_(lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
    return (p.flatten(1, 2) @ v).unflatten(1, q.shape[1:3]), lse.squeeze(-1)
