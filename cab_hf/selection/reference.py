"""Definition of the selection, in plain PyTorch; the kernels are tested against it.

For query block m, sampled query i of block m, key block j and sampled key n of block j::

    logit[i, j] = max_n scale * q_i . k_n
    share[i, j] = exp(logit[i, j]) / sum_j exp(logit[i, j])

    mean_share[m, j] = sum_i weight_i * share[i, j] / sum_i weight_i
    max_share[m, j]  = max_i share[i, j]

    selected[m, j] = mean_share[m, j] >= mass_threshold * min(1, 32768 / num_visible_keys[m])
                     or max_share[m, j] >= share_threshold
                     or block j is forced, or has a key that is not finite

Shapes: q [B, H, N_q, D], k [B, H_kv, N_k, D]. M_q is the number of query blocks, M_k the number of
key blocks. Everything between the scores and the selection is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CabConfig, blocks_of, num_typical_queries
from cab_hf.ops import reference as definitions
from cab_hf.plan import KeyRanges, block_visibility

# rows with more visible keys than this spread their attention over more blocks: above this number,
# the mass threshold is inversely proportional to the number of keys
THRESHOLD_KEYS = 32768
# resolution of cosine similarities: closer values are equal. A similarity fits a signed byte
COSINE_STEPS = 127.0
# similarity of padding in these steps: above every cosine, so that real queries come first
PADDING_STEPS = 2 * 127
# similarity of queries that are already samples: padding comes before a second selection
SAMPLED_STEPS = 3 * 127
# lower bound of squared norms: a vector of zeros has similarity 0 to everything
LEAST_SQUARE = 1e-30
# sampled queries per chunk: bounds the size of the logits
QUERY_CHUNK = 128


def selected_blocks(
    q: Tensor,
    k: Tensor,
    ranges: KeyRanges,
    config: CabConfig,
    *,
    scale: float,
    channels: tuple[int, ...] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
    score: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return the selected blocks, bool [B, H, M_q, M_k].

    Args:
        q, k: [B, H, N_q, D], [B, H_kv, N_k, D].
        scale, channels, sinks, softcap: See `block_shares`.
        score: See `ranks`.
    """
    rank = ranks(
        q,
        k,
        ranges,
        config,
        scale=scale,
        channels=channels,
        sinks=sinks,
        softcap=softcap,
        score=score,
    )
    if config.max_density < 1:
        bad = definitions.not_finite(k, ranges.key_valid)
        marked = definitions.marked_blocks(bad, config.key_block)
        rank = capped_ranks(rank, ranges, config, marked)
    return rank >= config.mass_threshold


def ranks(
    q: Tensor,
    k: Tensor,
    ranges: KeyRanges,
    config: CabConfig,
    *,
    scale: float,
    channels: tuple[int, ...] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
    score: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return the largest mass threshold that selects each block, float32 [B, H, M_q, M_k].

    The first case that applies determines the value of a block:

    * -1 if the row does not see the block;
    * infinity if the block is forced or has a key that is not finite;
    * 1 if a sampled query of the row is not finite;
    * 1 + share if the share of one query reaches ``share_threshold``;
    * else min(1, mean_share * max(1, n / `THRESHOLD_KEYS`)) for n visible keys.

    A key that is not finite counts as zeros in the shares of other blocks.

    Args:
        q, k: [B, H, N_q, D], [B, H_kv, N_k, D].
        scale, channels, sinks, softcap: See `block_shares`.
        score: Function that computes the last three cases, with the arguments of `scores`; None for
            the definition.
    """
    visible = block_visibility(ranges, config.query_block, config.key_block)
    forced = definitions.forced_blocks(visible, ranges, config)
    bad = definitions.not_finite(k, ranges.key_valid)
    marked = definitions.marked_blocks(bad, config.key_block).unsqueeze(2)
    if k.device.type != "cpu" or bool(bad.any()):
        k = k.masked_fill(bad.unsqueeze(-1), 0.0)
    rank = (score or scores)(
        q,
        k,
        ranges,
        config,
        scale=scale,
        channels=channels,
        sinks=sinks,
        softcap=softcap,
        visible=visible,
        forced=forced,
    )
    is_kept = forced.unsqueeze(1) | marked.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return rank.masked_fill_(is_kept, torch.inf).masked_fill_(~visible.unsqueeze(1), -1.0)


def scores(
    q: Tensor,
    k: Tensor,
    ranges: KeyRanges,
    config: CabConfig,
    *,
    scale: float,
    channels: tuple[int, ...],
    sinks: Tensor | None,
    softcap: float | None,
    visible: Tensor,
    forced: Tensor,
) -> Tensor:
    """Return the ranks of blocks that are neither forced nor marked, float32 [B, H, M_q, M_k].

    The ranks of other blocks are any numbers.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D], finite.
        scale, channels, sinks, softcap: See `block_shares`.
        visible, forced: bool [B, M_q, M_k], visible blocks of rows, and blocks that rows always
            attend to.
    """
    group = q.shape[1] // k.shape[1]
    num_visible_keys = config.key_block * visible.sum(-1, keepdim=True).unsqueeze(1)
    longer = (num_visible_keys / THRESHOLD_KEYS).clamp(min=1)
    result = []
    for head in range(q.shape[1]):
        kv_head = head // group
        mean_share, max_share = block_shares(
            q[:, [head]],
            k[:, [kv_head]],
            ranges,
            config,
            scale=scale,
            channels=channels,
            sinks=None if sinks is None else sinks[[head]],
            softcap=softcap,
        )
        mean_share = (mean_share * longer).clamp(max=1)
        rank = torch.where(max_share >= config.share_threshold, 1 + max_share, mean_share)
        result.append(rank.masked_fill(rank.isnan(), 1.0))
    return torch.cat(result, dim=1)


def capped_ranks(
    rank: Tensor, ranges: KeyRanges, config: CabConfig, marked: Tensor | None = None
) -> Tensor:
    """Return ``rank`` [B, H, M_q, M_k] with -1 for the blocks that ``max_density`` excludes.

    A row can keep its forced blocks, and its best other blocks up to ``max_density``.

    Args:
        marked: bool [B, H_kv, M_k], blocks with a key that is not finite; None for none.
    """
    if config.max_density == 1:
        return rank
    query_block, key_block = blocks_of(config)
    visible = block_visibility(ranges, query_block, key_block)
    forced = definitions.forced_blocks(visible, ranges, config).unsqueeze(1)
    bounds = definitions.row_bounds(
        ranges, query_block, key_block, config.sink_blocks, config.local_blocks
    )
    cap = definitions.most_of_rows(bounds, config.max_density, marked)
    cap = cap.repeat_interleave(rank.shape[1] // cap.shape[1], dim=1)
    wanted = cap.maximum(forced.sum(-1))
    best = definitions.best_of_rows(rank, rank >= 0, forced, wanted)
    return rank.masked_fill(~best, -1.0)


def block_shares(
    q: Tensor,
    k: Tensor,
    ranges: KeyRanges,
    config: CabConfig,
    *,
    scale: float,
    channels: tuple[int, ...] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (mean_share, max_share) of every key block for every query block.

    The samples of a query block are its outliers (`outlier_queries`) with weight 1 and its typical
    queries (`typical_queries`) with weight (query_block - outliers) / typical: a stratified sample.
    Outliers are scored on ``channels`` of all keys, typical queries on all channels of every
    ``config.typical_key_stride``-th key.

    A sample without visible sampled keys has weight 0.

    Args:
        q, k: [B, H, N_q, D], [B, H_kv, N_k, D].
        scale: Factor of the dot products, usually 1 / sqrt(D).
        channels: Channels for outliers; () for all.
        sinks: [H], one logit per head that takes part in the softmax; None without.
        softcap: Soft cap of the logits, see `capped` of `cab_hf.ops.reference`.

    Returns:
        Two float32 tensors [B, H, M_q, M_k].
    """
    query_block, num_outliers = config.query_block, config.outlier_queries
    num_typical = num_typical_queries(config)
    typical = typical_queries(ranges, query_block, num_typical)
    typical = typical.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    weight = (query_block - num_outliers) / num_typical
    kinds = [(typical, weight, (), config.typical_key_stride)]
    if num_outliers:
        outliers = outlier_queries(q, ranges, query_block, num_outliers)
        kinds.append((outliers, 1.0, channels, 1))
    share_sum, weight_sum, max_share = 0.0, 0.0, None
    for positions, weight, scored_channels, key_stride in kinds:
        queries, keys = (x[..., list(scored_channels)] if scored_channels else x for x in (q, k))
        index = positions.clamp(min=0).flatten(2)[..., None].expand(-1, -1, -1, queries.shape[3])
        maximum, total, num_samples = shares_of_samples(
            queries.gather(2, index).unflatten(2, positions.shape[2:]),
            positions=positions,
            keys=keys,
            ranges=ranges,
            scale=scale,
            key_block=config.key_block,
            key_stride=key_stride,
            sinks=sinks,
            softcap=softcap,
        )
        share_sum = share_sum + weight * total
        weight_sum = weight_sum + weight * num_samples.unsqueeze(-1)
        max_share = maximum if max_share is None else torch.maximum(max_share, maximum)
    # kernels compare products, so a row without samples needs a mean share of 0
    return share_sum / weight_sum.clamp(min=definitions.LEAST), max_share


def shares_of_samples(
    queries: Tensor,
    *,
    positions: Tensor,
    keys: Tensor,
    ranges: KeyRanges,
    scale: float,
    key_block: int,
    key_stride: int = 1,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shares of attention that sampled queries give to key blocks.

    The logit of a query and a key block is the maximum over the sampled keys of the block. The
    shares of a query are the softmax over the visible blocks of the query.

    A sink adds exp(sink) / ``key_block`` to the denominator, because one maximum represents up to
    ``key_block`` keys.

    Args:
        queries: [B, H, M_q, S, C], S sampled queries of each query block.
        positions: int64 [B, H, M_q, S], positions of the samples; -1 for none.
        keys: [B, H_kv, N_k, C], the same channels of the keys.
        key_stride: Keys `key_offset`, `key_offset` + key_stride, ... are scored.
        sinks, softcap: See `block_shares`.

    Returns:
        maximum, total: float32 [B, H, M_q, M_k], maximum and sum of the shares over the samples.
        num_samples: float32 [B, H, M_q], the number of samples with a visible sampled key.
    """
    heads, kv_blocks = queries.shape[1], -(-keys.shape[2] // key_block)
    maximum, total = (queries.new_zeros(*queries.shape[:3], kv_blocks).float() for _ in range(2))
    num_samples = queries.new_zeros(queries.shape[:3]).float()
    key = torch.arange(keys.shape[2], device=keys.device)[key_offset(key_stride) :: key_stride]
    keys = keys[:, :, key]
    missing = kv_blocks * (key_block // key_stride) - len(key)
    group, step = heads // keys.shape[1], max(1, QUERY_CHUNK // queries.shape[3])
    for head, start in product(range(heads), range(0, queries.shape[2], step)):
        some = slice(start, start + step)
        at = positions[:, head, some].flatten(1)
        start_key, end_key = (x.gather(1, at.clamp(min=0)) for x in (ranges.start, ranges.end))
        end_key = end_key.masked_fill(at < 0, -1)
        samples = queries[:, head, some].flatten(1, 2).float()
        products = samples @ keys[:, head // group].float().transpose(-1, -2)
        logits = definitions.capped(products * scale, softcap)
        unseen = (key < start_key.unsqueeze(-1)) | (key > end_key.unsqueeze(-1))
        logits = F.pad(logits.masked_fill(unseen, -torch.inf), (0, missing), value=-torch.inf)
        largest = logits.unflatten(-1, (kv_blocks, -1)).amax(-1)
        # softmax over no keys is NaN: a query without visible sampled keys adds no share
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


def _blocked(x: Tensor, valid: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Split [B, H, N, D] into blocks, and return a mask of real tokens.

    Returns:
        float32 [B, H, M, block, D], and bool [B, 1, M, block], False for padding.
    """
    padding = -x.shape[2] % block
    blocks = F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, block)).float()
    return blocks, F.pad(valid, (0, padding)).unflatten(1, (-1, block)).unsqueeze(1)
