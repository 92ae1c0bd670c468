"""Definition of every op in plain PyTorch; kernels are tested against it.

Shapes: q [B, H, N_q, D], k and v [B, H_kv, N_k, D], g = H / H_kv. M_q is the number of query
blocks, M_k the number of key blocks. Everything between the scores and the selection is float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CabConfig, tail_of
from cab_hf.plan import BlockPlan, KeyRanges, cached_per_ranges

# queries per chunk of attention: bounds the size of the token mask, not the result
QUERY_CHUNK = 256
# far below any share that matters, and its logarithm is finite
LEAST = 1e-30


class Masks(NamedTuple):
    """Tokens that a chunk of queries attends to.

    Attributes:
        rows: Slice of the queries.
        keys: Slice of the keys that are visible to any of these queries.
        seen: bool [B or 1, H or 1, rows, keys], True where a query attends to a key.
        raised: Terms that are added to the logits, same shape as ``seen``; None for no terms.
        sound: False if keys or values that are invisible to these queries may not be finite.
    """

    rows: slice
    keys: slice
    seen: Tensor
    raised: Tensor | None = None
    sound: bool = True


def standardise(x: Tensor, visible: Tensor) -> Tensor:
    """Scale the visible part of each row to zero mean and unit variance; the rest is 0."""
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    x = x.masked_fill(~visible, 0.0)
    centred = (x - x.sum(-1, keepdim=True) / count).masked_fill(~visible, 0.0)
    deviation = (centred.square().sum(-1, keepdim=True) / count).sqrt()
    return centred / deviation.clamp(min=torch.finfo(x.dtype).eps)


def forced_blocks(visible: Tensor, ranges: KeyRanges, config: CabConfig) -> Tensor:
    """Return the blocks that rows attend regardless of scores, bool [B, M_q, M_k].

    Sinks, local blocks and blocks of the row's own positions are forced. Rows of the tail
    (``config.dense_tail_blocks``, see `KeyRanges.tail`) attend to all visible blocks.
    """
    rows = ranges.rows(config.query_block)
    block = torch.arange(visible.shape[-1], device=visible.device)
    first = (rows.min_first // config.key_block).unsqueeze(-1)
    last = (rows.max_last // config.key_block).unsqueeze(-1)
    diagonal = (rows.min_last // config.key_block).unsqueeze(-1)
    sink = block < first + config.sink_blocks
    local = (block > last - config.local_blocks) | (block >= diagonal)
    return visible & (sink | local | ranges.tail(*tail_of(config)).unsqueeze(-1))


def share_of_row(visible: Tensor, share: float | Tensor) -> Tensor:
    """Return ceil(share * number of visible blocks) of each row."""
    blocks = visible.sum(-1, keepdim=True).to(torch.float64)
    # 0.05 * 20 must not round up to 2
    return (blocks * share - 1e-9).ceil().to(torch.int64)


def top_blocks(score: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """Return the ``count`` best candidates of each row, bool; ties go to the lower index."""
    order = score.masked_fill(~candidates, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(-1)
    return candidates & (rank < count)


def not_finite(k: Tensor, valid: Tensor) -> Tensor:
    """Return which keys hold NaN or an infinity, bool [B, H_kv, N_k].

    Args:
        k: [B, H_kv, N_k, D].
        valid: bool [B, N_k], False for padding, which is never marked.
    """
    # a maximum is NaN if any entry is; faster than isfinite().all()
    return ~(k.abs().amax(-1) < torch.inf) & valid.unsqueeze(1)


def marked_blocks(marked: Tensor, key_block: int) -> Tensor:
    """Return which key blocks contain a key of `not_finite`, bool [B, H_kv, M_k].

    Predictors select these blocks, because their scores are NaN or infinite.
    """
    return F.pad(marked, (0, -marked.shape[2] % key_block)).unflatten(2, (-1, key_block)).any(-1)


def has_visible_marked(marked: Tensor, bounds: Tensor) -> Tensor:
    """Return whether a marked block that is not forced is visible to a row, bool [B, H_kv, M_q].

    Args:
        marked: [B, H_kv, M_k], `marked_blocks`.
        bounds: `row_bounds`.
    """
    before = F.pad(marked.cumsum(-1, dtype=torch.int32), (1, 0))
    sinks, local = (x.long().unsqueeze(1).expand(-1, marked.shape[1], -1) for x in bounds[2:4])
    return before.gather(2, local) > before.gather(2, sinks)


def most_of_rows(bounds: Tensor, max_density: float, marked: Tensor | None = None) -> Tensor:
    """Return the largest number of blocks that a row may select, int32 [B, 1 or H_kv, M_q].

    The number is max(ceil(max_density * visible), forced). ``forced`` counts one more block if the
    row has a visible marked block that is not forced.

    Args:
        bounds: `row_bounds`.
        marked: bool [B, H_kv, M_k], `marked_blocks`; None if no block is marked.
    """
    first, last, sinks, local = bounds[:4].unsqueeze(2)
    blocks = last - first + 1
    forced = blocks - (local - sinks).clamp(min=0)
    if marked is not None:
        forced = forced + has_visible_marked(marked, bounds).int()
    # 0.05 * 20 must not round up to 2
    return (blocks.double() * max_density - 1e-9).ceil().int().maximum(forced)


def best_of_rows(score: Tensor, visible: Tensor, forced: Tensor, wanted: Tensor) -> Tensor:
    """Return the best ``wanted`` [B, H, M_q] blocks of each row, bool [B, H, M_q, M_k].

    Forced blocks come first, then the highest scores; ties go to the lower index. NaN counts as
    infinity.
    """
    wanted, score = wanted.unsqueeze(-1), score.masked_fill(score.isnan(), torch.inf)
    spare = wanted - forced.sum(-1, keepdim=True)
    return (forced & (wanted > 0)) | top_blocks(score, visible & ~forced, spare)


@cached_per_ranges
def row_bounds(
    ranges: KeyRanges, query_block: int, key_block: int, sink_blocks: int, local_blocks: int
) -> Tensor:
    """Return the ranges of key blocks of each row, int32 [6, B, M_q].

    The six numbers of a row are:

    0. the first visible block,
    1. the last visible block,
    2. the first block after the sinks,
    3. the first local block,
    4. the first block that is completely visible to all queries of the row,
    5. the last block that is completely visible to all queries of the row.

    Blocks that contain positions of the row itself are local. Rows of padding have blocks 0 to -1.
    """
    rows = ranges.rows(query_block)
    real = rows.queries > 0
    first = rows.min_first.where(real, 0) // key_block
    last = rows.max_last // key_block
    own = rows.min_last.where(real, -1) // key_block
    sinks = (first + sink_blocks).minimum(last + 1)
    local = own.minimum(last + 1 - local_blocks).maximum(first)
    begin = -(-rows.max_first // key_block)
    end = (rows.min_last.where(real, -1) + 1) // key_block - 1
    return torch.stack((first, last, sinks, local, begin, end)).int()


def refuse_infinite(name: str, x: Tensor) -> None:
    """Raise ValueError if ``x``, called ``name``, contains infinities or NaN."""
    if not bool(torch.isfinite(x).all()):
        raise ValueError(
            f"{name} must be finite, got infinite or NaN values (shape {tuple(x.shape)}). "
            "Look for an overflow in the layers before this one."
        )


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(logits / softcap); None returns the logits unchanged."""
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool = False,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention under a plan, [B, H, N_q, D_v].

    The softmax of a query runs over the keys that the plan lists. Sampled blocks have
    log(``plan.sample_period``) added to their logits. The output is 0 for queries without keys
    (padding, or no listed block). A plan may have fewer heads than q, see `BlockPlan.shared_by`.

    The op is differentiable. Token masks are built for `QUERY_CHUNK` queries at a time. A token
    with NaN or an infinity does not affect query blocks that do not attend to it. torch.compile
    runs this function as one op, see `cab_hf.ops.attention.traced`.

    Args:
        return_lse: Also return the log-sum-exp of the scaled logits of each query.
        softcap: See `capped`; applies to scaled logits.

    Returns:
        The output. With ``return_lse`` also the log-sum-exp (natural logarithm) [B, H, N_q]. It is
        float32, or float64 for float64 inputs, and -inf for a query without keys.
    """
    chunks = masks(q, k, v, plan)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    outs, sums = [], []
    for rows, reach, mask, raised, sound in chunks:
        queries, keys, values = q[:, :, rows], k[:, :, reach], v[:, :, reach]
        if not sound:
            # neither an additive mask nor a weight of 0 removes a NaN
            unseen = ~mask.any(dim=-2).unsqueeze(-1)
            keys, values = (x.masked_fill(unseen, 0.0) for x in (keys, values))
        # softmax over no keys is NaN: a query without keys attends to all, and its output is
        # dropped
        blind = ~mask.any(dim=-1, keepdim=True)
        safe_mask = mask | blind
        if return_lse or softcap is not None:
            logits = _logits(queries, keys, raised, scale, softcap)
        if softcap is not None:
            p = logits.masked_fill(~safe_mask, -torch.inf).softmax(-1)
            out = p @ values.to(p.dtype)
        else:
            if raised is not None:
                safe_mask = raised.masked_fill(~safe_mask, -torch.inf)
                queries, keys, values = (x.to(raised.dtype) for x in (queries, keys, values))
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=safe_mask, scale=scale
            )
        outs.append(out.to(q.dtype).masked_fill(blind, 0.0))
        if return_lse:
            sums.append(logits.masked_fill(~mask, -torch.inf).logsumexp(-1))
    out = torch.cat(outs, dim=2)
    return (out, torch.cat(sums, dim=2)) if return_lse else out


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Rescale attention as if the softmax had one more logit per head, without a value.

        out * exp(lse) / (exp(lse) + exp(sink))

    Args:
        out: [B, H, N_q, D_v], attention without sinks.
        lse: [B, H, N_q], its log-sum-exp, -inf for a query without keys.
        sinks: [H], the additional logits, not multiplied by the scale.
    """
    share = (lse - sinks.to(lse.dtype).unsqueeze(-1)).sigmoid()
    return out * share.to(out.dtype).unsqueeze(-1)


def masks(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> Iterator[Masks]:
    """Yield the masks of ``plan``, one chunk of queries at a time.

    If k or v is not finite, the queries of a chunk belong to one query block.
    """
    sound = all(bool(x.isfinite().all()) for x in (k, v))
    sharing = plan.shared_by(q.shape[1])
    sample = None if plan.sampled is None else plan.of_sampled()
    chunk = QUERY_CHUNK if sound else math.gcd(QUERY_CHUNK, plan.query_block)
    for start in range(0, plan.q_length, chunk):
        stop = min(start + chunk, plan.q_length)
        reach = max(1, int(plan.ranges.end[:, start:stop].max()) + 1)
        mask = plan.token_mask(start, stop, reach).repeat_interleave(sharing, dim=1)
        raised = None
        if sample is not None:
            sampled = sample.token_mask(start, stop, reach).repeat_interleave(sharing, dim=1)
            # in float32, where log(sample_period) is not rounded to the dtype of q
            wide = torch.promote_types(q.dtype, torch.float32)
            mask, raised = mask | sampled, sampled.to(wide) * math.log(plan.sample_period)
        yield Masks(slice(start, stop), slice(0, reach), mask, raised, sound)


def _logits(
    q: Tensor, k: Tensor, raised: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = capped(q.to(dtype) @ k.to(dtype).transpose(-1, -2) * scale, softcap)
    return logits if raised is None else logits + raised
