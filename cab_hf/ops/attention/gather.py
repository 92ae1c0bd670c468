"""Attention under a plan in plain PyTorch, over the listed keys only; fast on a CPU.

Chunks of query blocks of a head are attended together. The keys and values that each block lists
are gathered, padded to the longest list of the chunk.
"""

from __future__ import annotations

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
    wide = torch.promote_types(q.dtype, torch.float32)
    sharing, group = plan.shared_by(q.shape[1]), q.shape[1] // k.shape[1]
    sound = all(bool(x.isfinite().all()) for x in (k, v))
    # the last block is padded with queries that see nothing
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
    out, lse = (x.flatten(2, 3)[:, :, : q.shape[2]] for x in (out, lse))
    return (out, lse) if return_lse else out


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
    # every query that sees any key sees all keys of full blocks
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
    # a query that sees nothing has weights of 0
    p = p.sub_(lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
    return (p.flatten(1, 2) @ v).unflatten(1, q.shape[1:3]), lse.squeeze(-1)
