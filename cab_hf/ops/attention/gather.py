"""Attention under a plan in plain PyTorch, over the listed keys only; fast on a CPU.

The fused kernel of PyTorch attends to the full blocks that a row lists, gathered and without a
mask. It attends to partial blocks with a mask, and the two results are merged by their
log-sum-exps. Rows with few keys are attended together, under one mask.

The kernel supports neither soft caps nor tensors that are not finite. `_by_products` computes
these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.ops.reference import capped
from cab_hf.plan import BlockIndices, BlockPlan

# logits that are computed at a time: 1 MiB in float32, which fits caches
LOGITS_AT_A_TIME = 2**18


class Blocks(NamedTuple):
    """Tensors that are split into blocks.

    Attributes:
        q: [B, H, M_q, query_block, D].
        k, v: [B, H_kv, M_k, key_block * D].
        first, last: int32 [B, M_q, query_block], the visible keys of each query.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    first: Tensor
    last: Tensor


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
    is_finite = all(bool(x.isfinite().all()) for x in (q, k, v))
    if softcap is None and is_finite and q.shape[3] == v.shape[3]:
        out, lse = _by_fused_kernel(q, k, v, plan, scale)
    else:
        out, lse = _by_products(q, k, v, plan, scale, softcap)
    out, lse = (x.flatten(2, 3)[:, :, : q.shape[2]] for x in (out, lse))
    return (out, lse) if return_lse else out


def _by_fused_kernel(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, M_q, query_block, D] and the log-sum-exp by PyTorch's kernel."""
    wide = torch.promote_types(q.dtype, torch.float32)
    sharing, group = plan.shared_by(q.shape[1]), q.shape[1] // k.shape[1]
    # the last block is padded: no query sees the padding
    queries = F.pad(q, (0, 0, 0, -q.shape[2] % plan.query_block)).to(wide)
    keys, values = (F.pad(x, (0, 0, 0, -x.shape[2] % plan.key_block)).to(wide) for x in (k, v))
    blocks = Blocks(
        queries.unflatten(2, (-1, plan.query_block)),
        *(x.contiguous().unflatten(2, (-1, plan.key_block)).flatten(3) for x in (keys, values)),
        *plan.ranges.blocked(plan.query_block),
    )
    out = q.new_empty(blocks.q.shape)
    lse = q.new_empty(blocks.q.shape[:4], dtype=wide)
    full, partial = plan.full.counts.tolist(), plan.partial.counts.tolist()
    for batch in range(q.shape[0]):
        for head in range(plan.heads):
            counts = full[batch][head], partial[batch][head]
            lengths = [sum(x) * plan.key_block for x in zip(*counts, strict=True)]
            for heads, kv_head in _heads_under(head, sharing, group):
                queries_per_row = plan.query_block * (heads.stop - heads.start)
                for rows in _chunks(lengths, queries_per_row):
                    place = batch, head, rows
                    is_long = lengths[rows.start] * queries_per_row > LOGITS_AT_A_TIME
                    if is_long and counts[0][rows.start]:
                        # one row: a mask for all keys would be larger than the caches
                        parts = [_full_part(blocks, plan, place, heads, kv_head, scale)]
                        if counts[1][rows.start]:
                            parts += [_masked(blocks, plan, place, heads, kv_head, scale, False)]
                    else:
                        parts = [_masked(blocks, plan, place, heads, kv_head, scale, True)]
                    part, sums = _merged(*parts)
                    out[batch, heads, rows] = part.transpose(0, 1).to(q.dtype)
                    lse[batch, heads, rows] = sums.transpose(0, 1)
    blind = blocks.first > blocks.last
    if bool(blind.any()):
        out.masked_fill_(blind[:, None, :, :, None], 0.0)
        lse.masked_fill_(blind[:, None], -torch.inf)
    return out, lse


Place = tuple[int, int, slice]


def _full_part(
    blocks: Blocks, plan: BlockPlan, place: Place, heads: slice, kv_head: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the full blocks of one row: output [1, H, query_block, D] and log-sum-exp."""
    batch, _, rows = place
    count = plan.full.counts[place]
    index = plan.full.indices[place][0, : int(count)]
    q = blocks.q[batch, heads, rows].transpose(0, 1)
    return _fused(q, *_gathered(blocks, batch, kv_head, index[None]), scale)


def _masked(
    blocks: Blocks,
    plan: BlockPlan,
    place: Place,
    heads: slice,
    kv_head: int,
    scale: float,
    with_full: bool,
) -> tuple[Tensor, Tensor]:
    """Attend to the partial blocks of R rows, and to the full blocks if ``with_full``.

    Returns:
        The output [R, H, query_block, D] and the log-sum-exp [R, H, query_block].
    """
    batch, _, rows = place
    first, last = (x[batch, rows].unsqueeze(2) for x in (blocks.first, blocks.last))
    partial, absent = _columns(plan.partial, place)
    within = torch.arange(plan.key_block, device=first.device, dtype=torch.int32)
    key = (partial.unsqueeze(2) * plan.key_block + within).flatten(1).unsqueeze(1)
    # [R, query_block, keys]
    unseen = (key < first) | (key > last)
    unseen |= absent.repeat_interleave(plan.key_block, 1).unsqueeze(1)
    blind = unseen.all(-1)
    index = partial
    if with_full:
        full, lacking = _columns(plan.full, place)
        lacking = lacking.repeat_interleave(plan.key_block, 1).unsqueeze(1)
        index = torch.cat([partial, full], 1)
        unseen = torch.cat([unseen, lacking.expand(-1, unseen.shape[1], -1)], 2)
        blind &= lacking.all(-1)
    q = blocks.q[batch, heads, rows].transpose(0, 1)
    if not index.shape[1]:
        return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    mask = q.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)
    out, lse = _fused(q, *_gathered(blocks, batch, kv_head, index), scale, mask.unsqueeze(1))
    if bool(blind.any()):
        out = out.masked_fill(blind[:, None, :, None], 0.0)
        lse = lse.masked_fill(blind[:, None], -torch.inf)
    return out, lse


def _columns(part: BlockIndices, place: Place) -> tuple[Tensor, Tensor]:
    """Return the block indices of R rows, int32 [R, W], and which entries are not listed."""
    counts = part.counts[place]
    indices = part.indices[place][:, : int(counts.max())]
    slot = torch.arange(indices.shape[1], device=counts.device)
    return indices, slot >= counts.unsqueeze(1)


def _gathered(blocks: Blocks, batch: int, kv_head: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of blocks ``index`` [R, W], both [R, 1, W * key_block, D]."""
    rows, dim = index.shape[0], blocks.q.shape[4]
    return tuple(
        x[batch, kv_head].index_select(0, index.flatten()).view(rows, 1, -1, dim)
        for x in (blocks.k, blocks.v)
    )


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output [R, H, N, D] and the log-sum-exp [R, H, N] of PyTorch's CPU kernel."""
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(q, k, v, attn_mask=mask, scale=scale)


def _merged(
    part: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp over the keys of both parts; no part is blind."""
    if other is None:
        return part
    (out, lse), (other_out, other_lse) = part, other
    # the log-sum-exp of ``part`` is finite: the row lists full blocks
    weight = (other_lse - lse).sigmoid().unsqueeze(-1)
    return torch.lerp(out, other_out, weight), torch.logaddexp(lse, other_lse)


def _by_products(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, M_q, query_block, D] and the log-sum-exp by matrix products."""
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
