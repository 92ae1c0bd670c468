"""Definition of every op in plain PyTorch; kernels are tested against it.

Shapes: q [B, H, N_q, D], k and v [B, H_kv, N_k, D], g = H / H_kv. M_q is the number of query
blocks, M_k the number of key blocks. Everything between the scores and the selection is float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CabConfig, num_typical_queries, tail_of
from cab_hf.plan import BlockPlan, KeyRanges, cached_per_ranges

# queries per chunk of attention: bounds the size of the token mask, not the result
QUERY_CHUNK = 256
# far below any share that matters, and its logarithm is finite
LEAST = 1e-30
# resolution of cosine similarities: closer values are equal. A similarity fits a signed byte
COSINE_STEPS = 127.0
# similarity of padding in these steps: above every cosine, so that real queries come first
PADDING_STEPS = 2 * 127
# similarity of queries that are already samples: padding comes before a second selection
SAMPLED_STEPS = 3 * 127
# lower bound of squared norms: a vector of zeros has similarity 0 to everything
LEAST_SQUARE = 1e-30
# rows that see more keys than this spread their attention over more blocks: from here on, the mass
# threshold is inversely proportional to the number of keys
THRESHOLD_KEYS = 32768
# scored queries per chunk: bounds the size of the logits
QUERIES_AT_A_TIME = 128


class Masks(NamedTuple):
    """Tokens that a chunk of queries attends to.

    Attributes:
        rows: Slice of the queries.
        keys: Slice of the keys that these queries can see.
        seen: bool [B or 1, H or 1, rows, keys], True where a query attends to a key.
        raised: Terms that are added to the logits, same shape as ``seen``; None for no terms.
        sound: False if keys or values that these queries do not see may not be finite.
    """

    rows: slice
    keys: slice
    seen: Tensor
    raised: Tensor | None = None
    sound: bool = True


def _blocked(x: Tensor, valid: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Split [B, H, N, D] into blocks, and return a mask of real tokens.

    Returns:
        float32 [B, H, M, block, D], and bool [B, 1, M, block], False for padding.
    """
    padding = -x.shape[2] % block
    blocks = F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, block)).float()
    return blocks, F.pad(valid, (0, padding)).unflatten(1, (-1, block)).unsqueeze(1)


def _mean(blocks: Tensor, real: Tensor) -> Tensor:
    total = blocks.masked_fill(~real.unsqueeze(-1), 0.0).sum(-2)
    return total / real.sum(-1).clamp(min=1).unsqueeze(-1)


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

    Predictors select these blocks, because no score says how much attention such a key receives.
    """
    return F.pad(marked, (0, -marked.shape[2] % key_block)).unflatten(2, (-1, key_block)).any(-1)


def sees_marked(marked: Tensor, bounds: Tensor) -> Tensor:
    """Return whether a row sees a marked block that is not forced, bool [B, H_kv, M_q].

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
    row sees a marked block that is not forced.

    Args:
        bounds: `row_bounds`.
        marked: bool [B, H_kv, M_k], `marked_blocks`; None if no block is marked.
    """
    first, last, sinks, local = bounds[:4].unsqueeze(2)
    blocks = last - first + 1
    forced = blocks - (local - sinks).clamp(min=0)
    if marked is not None:
        forced = forced + sees_marked(marked, bounds).int()
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
    4. the first block that all queries of the row see completely,
    5. the last block that all queries of the row see completely.

    Blocks that contain positions of the row itself are local. Rows of padding see blocks 0 to -1.
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


def outlier_queries(q: Tensor, ranges: KeyRanges, query_block: int, count: int) -> Tensor:
    """Return a farthest-point sample of each query block by cosine similarity.

    The first sample is the query with the lowest similarity to the mean query of its block. Every
    further sample is the query whose highest similarity to the samples so far is the lowest:
    ``argmin_i max_{s in samples} cos(q_i, q_s)``. Similarities are rounded towards zero to
    multiples of 1 / `COSINE_STEPS`, and ties go to the earlier query. NaN counts as -1.

    Args:
        q: [B, H, N_q, D].
        count: Number of samples per query block.

    Returns:
        int64 [B, H, M_q, count], positions in q, -1 where a block has fewer real queries. All
        queries in order if ``count`` equals ``query_block``.
    """
    blocks, real = _blocked(q, ranges.end >= 0, query_block)
    start = torch.arange(0, q.shape[2], query_block, device=q.device)
    if count == query_block:
        inside = torch.arange(query_block, device=q.device).expand(blocks.shape[:-1])
    else:
        blocks = blocks.masked_fill(~real.unsqueeze(-1), 0.0)
        inside = _farthest_points(blocks, real.expand(blocks.shape[:-1]), count)
    missing = ~real.expand(blocks.shape[:-1]).gather(-1, inside)
    return (inside + start[:, None]).masked_fill(missing, -1)


def _farthest_points(blocks: Tensor, real: Tensor, count: int) -> Tensor:
    """Return indices in each block, int64 [B, H, M, count]; see `outlier_queries`.

    Args:
        blocks: float32 [B, H, M, query_block, D], zeros where ``real`` is False.
        real: bool [B, H, M, query_block].
    """
    mean = blocks.sum(-2)
    inverse, mean_inverse = (
        x.square().sum(-1).clamp(min=LEAST_SQUARE).rsqrt() for x in (blocks, mean.unsqueeze(-2))
    )
    nearest = _cosine_steps((blocks @ mean.unsqueeze(-1))[..., 0], inverse, mean_inverse)
    nearest = nearest.masked_fill(~real, PADDING_STEPS)
    position = torch.arange(nearest.shape[-1], device=nearest.device)
    samples = []
    for number in range(count):
        # argmin returns any of several equal values: the position breaks ties
        chosen = (nearest * nearest.shape[-1] + position).argmin(-1, keepdim=True)
        samples.append(chosen)
        sample = blocks.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, blocks.shape[-1]))
        products = (blocks @ sample.transpose(-1, -2))[..., 0]
        similarity = _cosine_steps(products, inverse, inverse.gather(-1, chosen))
        similarity = similarity.masked_fill(~real, PADDING_STEPS)
        nearest = similarity if number == 0 else torch.maximum(nearest, similarity)
        nearest = nearest.scatter(-1, torch.cat(samples, -1), SAMPLED_STEPS)
    return torch.cat(samples, -1)


def _cosine_steps(products: Tensor, inverse: Tensor, other_inverse: Tensor) -> Tensor:
    """Return cosine similarities in whole steps of 1 / `COSINE_STEPS`, int64."""
    cosine = (products * inverse * other_inverse).nan_to_num(nan=-1.0)
    return (cosine.clamp(-1, 1) * COSINE_STEPS).long()


def typical_queries(ranges: KeyRanges, query_block: int, count: int) -> Tensor:
    """Return the queries in the middle of ``count`` equal steps of each block.

    Returns:
        int64 [B, M_q, count], positions of queries, -1 for padding.
    """
    step = query_block // count
    starts = torch.arange(0, ranges.q_length, query_block, device=ranges.end.device)
    offsets = torch.arange(step // 2, query_block, step, device=ranges.end.device)
    positions = (starts[:, None] + offsets).expand(ranges.end.shape[0], -1, -1)
    last = ranges.blocked(query_block)[1][:, :, offsets]
    return positions.masked_fill(last < 0, -1)


def key_offset(key_stride: int) -> int:
    """Return the position of the first sampled key; the others follow in steps of the stride."""
    return key_stride // 2


def mass_by_rows(
    q: Tensor,
    k: Tensor,
    ranges: KeyRanges,
    scale: float,
    config: CabConfig,
    channels: tuple[int, ...] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (mean share, maximum share) of every key block for every query block.

    The samples of a query block are its outliers (`outlier_queries`) with weight 1 and its typical
    queries (`typical_queries`) with weight (query_block - outliers) / typical: a stratified sample.
    Outliers are scored on ``channels`` of all keys, typical queries on all channels of every
    ``config.typical_key_stride``-th key. With ``share`` from `shares_of_blocks`::

        mean[j] = sum_i weight_i * share_ij / sum_i weight_i
        maximum[j] = max_i share_ij

    A sample that sees no sampled key has weight 0.

    Args:
        q, k: [B, H, N_q, D], [B, H_kv, N_k, D].
        scale: Factor of the dot products, usually 1 / sqrt(D).
        channels: Channels for outliers; () for all.
        sinks: [H], one logit per head that takes part in the softmax; None without.
        softcap: See `capped`.

    Returns:
        Two float32 tensors [B, H, M_q, M_k].
    """
    block = config.query_block
    count, num_typical = config.outlier_queries, num_typical_queries(config)
    typical = (
        typical_queries(ranges, block, num_typical).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    )
    samples = [(typical, (block - count) / num_typical, (), config.typical_key_stride)]
    if count:
        samples.append((outlier_queries(q, ranges, block, count), 1.0, channels, 1))
    mass, total, maximum = 0.0, 0.0, None
    for positions, weight, some, key_stride in samples:
        queries, keys = (x[..., list(some)] if some else x for x in (q, k))
        index = positions.clamp(min=0).flatten(2)[..., None].expand(-1, -1, -1, queries.shape[3])
        largest, shares, num_samples = shares_of_blocks(
            queries.gather(2, index).unflatten(2, positions.shape[2:]),
            positions,
            keys,
            ranges,
            scale,
            config.key_block,
            key_stride=key_stride,
            sinks=sinks,
            softcap=softcap,
        )
        mass = mass + weight * shares
        total = total + weight * num_samples.unsqueeze(-1)
        maximum = largest if maximum is None else torch.maximum(maximum, largest)
    # kernels compare products, so a row without samples needs a mass of 0
    return mass / total.clamp(min=LEAST), maximum


def shares_of_blocks(
    queries: Tensor,
    positions: Tensor,
    keys: Tensor,
    ranges: KeyRanges,
    scale: float,
    key_block: int,
    *,
    key_stride: int = 1,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shares of attention that sampled queries give to key blocks.

    The logit s_ij of query i and key block j is the maximum over the sampled keys of the block. The
    shares of a query are the softmax over the blocks that the query sees::

        s_ij = max_{k in block j, k = offset + n * key_stride} scale * q_i . k
        share_ij = exp(s_ij) / sum_j exp(s_ij)

    A sink adds exp(sink) / ``key_block`` to the denominator, because one maximum represents up to
    ``key_block`` keys. Without this factor, every share would be too small next to the sink.

    Args:
        queries: [B, H, M_q, S, C], S sampled queries of each query block.
        positions: int64 [B, H, M_q, S], positions of the samples; -1 for none.
        keys: [B, H_kv, N_k, C], the same channels of the keys.
        key_stride: Keys `key_offset`, `key_offset` + key_stride, ... are scored.
        sinks, softcap: See `mass_by_rows`.

    Returns:
        maximum: float32 [B, H, M_q, M_k], the maximum of the shares over the samples of a block.
        total: float32 [B, H, M_q, M_k], the sum of the shares over the samples of a block.
        num_samples: float32 [B, H, M_q], the number of samples that see a sampled key.
    """
    heads, kv_blocks = queries.shape[1], -(-keys.shape[2] // key_block)
    maximum, total = (queries.new_zeros(*queries.shape[:3], kv_blocks).float() for _ in range(2))
    num_samples = queries.new_zeros(queries.shape[:3]).float()
    key = torch.arange(keys.shape[2], device=keys.device)[key_offset(key_stride) :: key_stride]
    keys = keys[:, :, key]
    missing = kv_blocks * (key_block // key_stride) - len(key)
    group, step = heads // keys.shape[1], max(1, QUERIES_AT_A_TIME // queries.shape[3])
    for head, start in product(range(heads), range(0, queries.shape[2], step)):
        some = slice(start, start + step)
        at = positions[:, head, some].flatten(1)
        first, last = (x.gather(1, at.clamp(min=0)) for x in (ranges.start, ranges.end))
        last = last.masked_fill(at < 0, -1)
        samples = queries[:, head, some].flatten(1, 2).float()
        logits = samples @ keys[:, head // group].float().transpose(-1, -2) * scale
        logits = capped(logits, softcap)
        unseen = (key < first.unsqueeze(-1)) | (key > last.unsqueeze(-1))
        logits = F.pad(logits.masked_fill(unseen, -torch.inf), (0, missing), value=-torch.inf)
        largest = logits.unflatten(-1, (kv_blocks, -1)).amax(-1)
        # softmax over nothing is NaN: a query that sees no sampled key gives no share
        weighed = largest
        if sinks is not None:
            weighed = F.pad(largest, (0, 1))
            weighed[..., -1] = sinks[head] - math.log(key_block)
        share = weighed.softmax(-1)[..., :kv_blocks].masked_fill(largest == -torch.inf, 0.0)
        share = share.unflatten(1, (-1, queries.shape[3]))
        sees = (~unseen).any(-1).unflatten(1, (-1, queries.shape[3]))
        maximum[:, head, some], total[:, head, some] = share.amax(2), share.sum(2)
        num_samples[:, head, some] = sees.sum(-1).float()
    return maximum, total, num_samples


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
    log(``plan.sample_period``) added to their logits. Queries that see nothing (padding, or no
    listed block) get zeros. A plan may have fewer heads than q, see `BlockPlan.shared_by`.

    The op is differentiable. Token masks are built for `QUERY_CHUNK` queries at a time. A token
    with NaN or an infinity does not affect query blocks that do not see the token. torch.compile
    runs this function as one op, see `cab_hf.ops.attention.traced`.

    Args:
        return_lse: Also return the log-sum-exp of the scaled logits of each query.
        softcap: See `capped`; applies to scaled logits.

    Returns:
        The output. With ``return_lse`` also the log-sum-exp (natural logarithm) [B, H, N_q]. It is
        float32, or float64 for float64 inputs, and -inf where a query sees nothing.
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
        # softmax over nothing is NaN: a blind query attends to everything, and its output is
        # dropped
        blind = ~mask.any(dim=-1, keepdim=True)
        seen = mask | blind
        if return_lse or softcap is not None:
            logits = _logits(queries, keys, raised, scale, softcap)
        if softcap is not None:
            p = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            out = p @ values.to(p.dtype)
        else:
            if raised is not None:
                seen = raised.masked_fill(~seen, -torch.inf)
                queries, keys, values = (x.to(raised.dtype) for x in (queries, keys, values))
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)
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
        lse: [B, H, N_q], its log-sum-exp, -inf where a query sees nothing.
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
            more = sample.token_mask(start, stop, reach).repeat_interleave(sharing, dim=1)
            # in float32, where log(sample_period) is not rounded to the dtype of q
            wide = torch.promote_types(q.dtype, torch.float32)
            mask, raised = mask | more, more.to(wide) * math.log(plan.sample_period)
        yield Masks(slice(start, stop), slice(0, reach), mask, raised, sound)


def _logits(
    q: Tensor, k: Tensor, raised: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = capped(q.to(dtype) @ k.to(dtype).transpose(-1, -2) * scale, softcap)
    return logits if raised is None else logits + raised
