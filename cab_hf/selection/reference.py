"""Definition of block selection in plain PyTorch; the kernels are tested against it.

For query block m, sampled query i of block m, key block j and sampled key n of block j::

    logit[i, j] = max_n scale * q_i . k_n
    share[i, j] = exp(logit[i, j]) / sum_j exp(logit[i, j])

    mean_share[m, j] = sum_i weight_i * share[i, j] / sum_i weight_i
    max_share[m, j]  = max_i share[i, j]

    selected[m, j] = mean_share[m, j] >= mass_threshold * min(1, 32768 / num_visible_keys[m])
                     or max_share[m, j] >= share_threshold
                     or block j is forced or marked

The sampled queries of a block are outlier queries (`sample_outlier_queries`) and typical queries
(`sample_typical_queries`). Query blocks with more than `MAX_KEYS_AT_FULL_SAMPLE` visible keys have
a smaller sample (`shrink_sample`).

A query block attends to its *forced* blocks regardless of scores: sink blocks, local blocks and the
blocks of its own positions. In the dense tail of a sequence all visible blocks are forced. A
*marked* block contains a key with NaN or an infinity.

Shapes: q [B, H, N_q, D], k [B, H_kv, N_k, D]. M_q is the number of query blocks, M_k the number of
key blocks. All scores and shares are float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CabConfig, block_sizes, num_typical_queries
from cab_hf.ops import reference as ops_reference
from cab_hf.plan import KeyRanges, block_visibility

# query blocks with more visible keys than this spread their attention over more blocks: above this
# number, the mass threshold is inversely proportional to the number of keys
MAX_KEYS_AT_FULL_THRESHOLD = 32768
# query blocks with more visible keys than this have a smaller sample, see `shrink_sample`
MAX_KEYS_AT_FULL_SAMPLE = 262144
# cosine similarities are rounded to multiples of 1 / COSINE_STEPS, so that they fit a signed byte
COSINE_STEPS = 127.0
# rounded similarity of padding: larger than every cosine, so that padding is sampled last
PADDING_SIMILARITY = 2 * 127
# rounded similarity of queries that are already samples: larger than padding, so that no query is
# sampled twice
SAMPLED_SIMILARITY = 3 * 127
# lower bound of squared norms: a vector of zeros has similarity 0 to every vector
MIN_SQUARED_NORM = 1e-30
# sampled queries per matrix product: bounds the size of the logits
QUERIES_PER_CHUNK = 128


class ScoreOptions(NamedTuple):
    """Parameters of the logits of one layer, in addition to q, k and the visible keys.

    Attributes:
        scale: Factor of the dot products, usually 1 / sqrt(D).
        channels: Ascending channels of q and k that outlier queries are scored on; () for all.
        sinks: [H], one logit per head that takes part in the softmax; None for no sinks.
        softcap: Soft cap of the logits, see `cap_logits` of `cab_hf.ops.reference`; None for no
            cap.
    """

    scale: float
    channels: tuple[int, ...] = ()
    sinks: Tensor | None = None
    softcap: float | None = None


def shrink_sample(config: CabConfig) -> CabConfig:
    """Return the settings of query blocks with more than `MAX_KEYS_AT_FULL_SAMPLE` visible keys.

    Half of the outlier queries are scored, and typical queries are scored on half of the keys. Thus
    a pair of a query block and a key block costs half as many products. The smaller sample is a
    part of the full sample, because farthest-point samples are nested: the first n points of a
    sample are the sample of n points.

    One outlier query remains if ``config`` has one, and one key per key block.
    """
    return dataclasses.replace(
        config,
        outlier_queries=config.outlier_queries - config.outlier_queries // 2,
        typical_key_stride=min(2 * config.typical_key_stride, config.key_block),
    )


def select_blocks(
    q: Tensor,
    k: Tensor,
    ranges: KeyRanges,
    config: CabConfig,
    score_options: ScoreOptions,
    *,
    sampled_scores_fn: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return the selected blocks, bool [B, H, M_q, M_k].

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        ranges: Keys that each query may attend to.
        config: Settings of the selection.
        score_options: Parameters of the logits.
        sampled_scores_fn: Replacement of `compute_sampled_scores` with the same arguments; None for
            `compute_sampled_scores` itself.
    """
    scores = compute_block_scores(
        q,
        k,
        key_ranges=ranges,
        config=config,
        score_options=score_options,
        sampled_scores_fn=sampled_scores_fn,
    )
    if config.max_density < 1:
        is_nonfinite_key = ops_reference.find_nonfinite_keys(k, ranges.key_valid)
        is_marked_block = ops_reference.find_marked_blocks(is_nonfinite_key, config.key_block)
        scores = cap_scores(scores, ranges, config, is_marked_block)
    return scores >= config.mass_threshold


def compute_block_scores(
    q: Tensor,
    k: Tensor,
    key_ranges: KeyRanges,
    config: CabConfig,
    score_options: ScoreOptions,
    *,
    sampled_scores_fn: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return the score of each block, float32 [B, H, M_q, M_k].

    The score of a block is the largest ``mass_threshold`` that selects the block. The first case
    that applies determines the score:

    * -1 if the block is invisible to the query block;
    * infinity if the block is forced or marked;
    * 1 if a sampled query of the query block is not finite;
    * 1 + max_share if max_share >= ``share_threshold``;
    * else min(1, mean_share * max(1, num_visible_keys / `MAX_KEYS_AT_FULL_THRESHOLD`)).

    A key with NaN or an infinity is replaced by zeros before the shares are computed.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        key_ranges: Keys that each query may attend to.
        config: Settings of the selection.
        score_options: Parameters of the logits.
        sampled_scores_fn: Replacement of `compute_sampled_scores`, which computes the last three
            cases; None for `compute_sampled_scores` itself.
    """
    is_visible = block_visibility(key_ranges, config.query_block, config.key_block)
    is_forced = ops_reference.forced_blocks(is_visible, key_ranges, config)
    is_nonfinite_key = ops_reference.find_nonfinite_keys(k, key_ranges.key_valid)
    is_marked_block = ops_reference.find_marked_blocks(
        is_nonfinite_key, config.key_block
    ).unsqueeze(2)
    # on a GPU, replace always: to read the condition would synchronise with the device
    if k.device.type != "cpu" or bool(is_nonfinite_key.any()):
        k = k.masked_fill(is_nonfinite_key.unsqueeze(-1), 0.0)
    scores = _compute_scores_by_sample(
        sampled_scores_fn or compute_sampled_scores,
        q,
        k,
        key_ranges=key_ranges,
        config=config,
        score_options=score_options,
        is_visible=is_visible,
        is_forced=is_forced,
    )
    group_size = q.shape[1] // k.shape[1]
    is_always_selected = is_forced.unsqueeze(1) | is_marked_block.repeat_interleave(
        group_size, dim=1
    )
    return scores.masked_fill_(is_always_selected, torch.inf).masked_fill_(
        ~is_visible.unsqueeze(1), -1.0
    )


def _compute_scores_by_sample(
    sampled_scores_fn: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    config: CabConfig,
    *,
    is_visible: Tensor,
    is_forced: Tensor,
    **arguments: Any,
) -> Tensor:
    """Compute the scores of each query block with its sample: the full one, or `shrink_sample`.

    Args:
        sampled_scores_fn: `compute_sampled_scores` or a replacement, which is called once for each
            of the two samples. All blocks of the other query blocks are passed as forced.
        q, k, config, is_visible, is_forced: As in `compute_sampled_scores`.
        arguments: Further arguments of `compute_sampled_scores`.
    """
    if k.shape[2] <= MAX_KEYS_AT_FULL_SAMPLE:
        return sampled_scores_fn(
            q, k, config=config, is_visible=is_visible, is_forced=is_forced, **arguments
        )
    num_visible_keys = config.key_block * is_visible.sum(-1, keepdim=True)
    has_small_sample = num_visible_keys > MAX_KEYS_AT_FULL_SAMPLE
    scores, small_sample_scores = (
        sampled_scores_fn(
            q,
            k,
            config=sample_config,
            is_visible=is_visible,
            is_forced=is_forced | is_other_sample,
            **arguments,
        )
        for sample_config, is_other_sample in (
            (config, has_small_sample),
            (shrink_sample(config), ~has_small_sample),
        )
    )
    return torch.where(has_small_sample.unsqueeze(1), small_sample_scores, scores)


def compute_sampled_scores(
    q: Tensor,
    k: Tensor,
    key_ranges: KeyRanges,
    config: CabConfig,
    score_options: ScoreOptions,
    *,
    is_visible: Tensor,
    is_forced: Tensor,
) -> Tensor:
    """Return `compute_block_scores` of the visible blocks that are neither forced nor marked.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D], without NaN and infinities.
        key_ranges: Keys that each query may attend to.
        config: Settings of the selection.
        score_options: Parameters of the logits.
        is_visible: bool [B, M_q, M_k], True if a query of the query block may attend to a key of
            the key block.
        is_forced: bool [B, M_q, M_k], forced blocks. Unused here; other implementations skip query
            blocks whose visible blocks are all forced.

    Returns:
        float32 [B, H, M_q, M_k]. The values of all other blocks are arbitrary.
    """
    group_size = q.shape[1] // k.shape[1]
    num_visible_keys = config.key_block * is_visible.sum(-1, keepdim=True).unsqueeze(1)
    length_factor = (num_visible_keys / MAX_KEYS_AT_FULL_THRESHOLD).clamp(min=1)
    scores_of_heads = []
    for head in range(q.shape[1]):
        head_sinks = None if score_options.sinks is None else score_options.sinks[[head]]
        mean_share, max_share = compute_block_shares(
            q[:, [head]],
            k[:, [head // group_size]],
            key_ranges=key_ranges,
            config=config,
            score_options=score_options._replace(sinks=head_sinks),
        )
        head_scores = (mean_share * length_factor).clamp(max=1)
        head_scores = torch.where(max_share >= config.share_threshold, 1 + max_share, head_scores)
        scores_of_heads.append(head_scores.masked_fill(head_scores.isnan(), 1.0))
    return torch.cat(scores_of_heads, dim=1)


def cap_scores(
    scores: Tensor, key_ranges: KeyRanges, config: CabConfig, is_marked_block: Tensor | None = None
) -> Tensor:
    """Return ``scores`` with -1 for the blocks that ``config.max_density`` excludes.

    The forced blocks of a query block keep their scores. Other blocks keep their scores in
    descending order, until ``max_density`` times the number of visible blocks is reached.

    Args:
        scores: float32 [B, H, M_q, M_k], from `compute_block_scores`.
        key_ranges: Keys that each query may attend to.
        config: Settings of the selection.
        is_marked_block: bool [B, H_kv, M_k], marked blocks; None if no block is marked.

    Returns:
        float32 [B, H, M_q, M_k].
    """
    if config.max_density == 1:
        return scores
    query_block, key_block = block_sizes(config)
    is_visible = block_visibility(key_ranges, query_block, key_block)
    is_forced = ops_reference.forced_blocks(is_visible, key_ranges, config).unsqueeze(1)
    block_bounds = ops_reference.compute_block_bounds(
        key_ranges, query_block, key_block, config.sink_blocks, config.local_blocks
    )
    max_listed = ops_reference.compute_max_blocks(block_bounds, config.max_density, is_marked_block)
    max_listed = max_listed.repeat_interleave(scores.shape[1] // max_listed.shape[1], dim=1)
    num_listed = max_listed.maximum(is_forced.sum(-1))
    is_listed = ops_reference.select_best_blocks(scores, scores >= 0, is_forced, num_listed)
    return scores.masked_fill(~is_listed, -1.0)


class _SampledQueries(NamedTuple):
    """The sampled queries of one kind, typical or outlier, and what they are scored on.

    Attributes:
        positions: int64 [B, H, M_q, S], positions of S sampled queries per block; -1 for missing
            samples.
        weight: Number of queries of the block that one sample represents.
        channels: Channels that are scored; () for all channels.
        key_stride: Distance between scored keys, in tokens.
    """

    positions: Tensor
    weight: float
    channels: tuple[int, ...]
    key_stride: int


def compute_block_shares(
    q: Tensor, k: Tensor, key_ranges: KeyRanges, config: CabConfig, score_options: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Return (mean_share, max_share) of every key block for every query block.

    ``mean_share`` is a weighted mean over the samples of the query block: an outlier query has
    weight 1, and a typical query has weight (query_block - num_outliers) / num_typical. Outlier
    queries are scored on ``score_options.channels`` of all keys. Typical queries are scored on all
    channels of every ``config.typical_key_stride``-th key.

    A sample without visible sampled keys has weight 0.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        key_ranges: Keys that each query may attend to.
        config: Settings of the selection.
        score_options: Parameters of the logits.

    Returns:
        mean_share, max_share: float32 [B, H, M_q, M_k].
    """
    query_block, num_outliers = config.query_block, config.outlier_queries
    num_typical = num_typical_queries(config)
    typical_positions = sample_typical_queries(key_ranges, query_block, num_typical)
    samples_by_kind = [
        _SampledQueries(
            positions=typical_positions.unsqueeze(1).expand(-1, q.shape[1], -1, -1),
            weight=(query_block - num_outliers) / num_typical,
            channels=(),
            key_stride=config.typical_key_stride,
        )
    ]
    if num_outliers:
        outlier_positions = sample_outlier_queries(q, key_ranges, query_block, num_outliers)
        samples_by_kind.append(
            _SampledQueries(
                positions=outlier_positions,
                weight=1.0,
                channels=score_options.channels,
                key_stride=1,
            )
        )
    share_sum, weight_sum, max_share = 0.0, 0.0, None
    for samples in samples_by_kind:
        queries, keys = q, k
        if samples.channels:
            queries, keys = q[..., list(samples.channels)], k[..., list(samples.channels)]
        query_index = samples.positions.clamp(min=0).flatten(2)[..., None]
        query_index = query_index.expand(-1, -1, -1, queries.shape[3])
        max_share_of_kind, share_sum_of_kind, num_samples = compute_sample_shares(
            queries.gather(2, query_index).unflatten(2, samples.positions.shape[2:]),
            positions=samples.positions,
            keys=keys,
            key_ranges=key_ranges,
            score_options=score_options,
            key_block=config.key_block,
            key_stride=samples.key_stride,
        )
        share_sum = share_sum + samples.weight * share_sum_of_kind
        weight_sum = weight_sum + samples.weight * num_samples.unsqueeze(-1)
        max_share = (
            max_share_of_kind if max_share is None else torch.maximum(max_share, max_share_of_kind)
        )
    # without samples the mean share is 0 and not NaN, as in the kernels
    return share_sum / weight_sum.clamp(min=ops_reference.MIN_DIVISOR), max_share


def compute_sample_shares(
    queries: Tensor,
    *,
    positions: Tensor,
    keys: Tensor,
    key_ranges: KeyRanges,
    score_options: ScoreOptions,
    key_block: int,
    key_stride: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maximum and the sum of the attention shares of sampled queries, per key block.

    The logit of a query and a key block is the maximum over the sampled keys of the block. The
    shares of a query are the softmax of these logits over the visible blocks of the query.

    A sink adds exp(sink) / ``key_block`` to the denominator, because one maximum represents up to
    ``key_block`` keys.

    Args:
        queries: [B, H, M_q, S, C], S sampled queries of each query block.
        positions: int64 [B, H, M_q, S], positions of the samples; -1 for missing samples.
        keys: [B, H_kv, N_k, C], the same channels of the keys.
        key_ranges: Keys that each query may attend to.
        score_options: Parameters of the logits; ``channels`` is not used.
        key_block: Tokens per key block.
        key_stride: Distance between sampled keys, in tokens. The first sampled key is the token
            ``get_first_sampled_key(key_stride)``.

    Returns:
        max_share, share_sum: float32 [B, H, M_q, M_k], maximum and sum of the shares over the
            samples.
        num_samples: float32 [B, H, M_q], the number of samples with a visible sampled key.
    """
    heads, samples_per_block = queries.shape[1], queries.shape[3]
    kv_blocks = -(-keys.shape[2] // key_block)
    max_share, share_sum = (
        queries.new_zeros(*queries.shape[:3], kv_blocks).float() for _ in range(2)
    )
    num_samples = queries.new_zeros(queries.shape[:3]).float()
    key_positions = torch.arange(keys.shape[2], device=keys.device)
    key_positions = key_positions[get_first_sampled_key(key_stride) :: key_stride]
    keys = keys[:, :, key_positions]
    group_size, q_blocks_per_chunk = (
        heads // keys.shape[1],
        max(1, QUERIES_PER_CHUNK // samples_per_block),
    )
    for head, first_block in product(range(heads), range(0, queries.shape[2], q_blocks_per_chunk)):
        # the samples of a chunk of query blocks: [B, Q, C] with Q = query blocks * S
        chunk = slice(first_block, first_block + q_blocks_per_chunk)
        block_max_logits, has_visible_key = _compute_max_logits(
            queries[:, head, chunk].flatten(1, 2),
            positions=positions[:, head, chunk].flatten(1),
            keys=keys[:, head // group_size],
            key_positions=key_positions,
            keys_per_block=key_block // key_stride,
            kv_blocks=kv_blocks,
            key_ranges=key_ranges,
            score_options=score_options,
        )
        softmax_input = block_max_logits
        if score_options.sinks is not None:
            softmax_input = F.pad(block_max_logits, (0, 1))
            softmax_input[..., -1] = score_options.sinks[head] - math.log(key_block)
        # softmax over no keys is NaN: a query without visible sampled keys adds no share
        shares = softmax_input.softmax(-1)[..., :kv_blocks].masked_fill(
            block_max_logits == -torch.inf, 0.0
        )
        shares = shares.unflatten(1, (-1, samples_per_block))
        max_share[:, head, chunk], share_sum[:, head, chunk] = shares.amax(2), shares.sum(2)
        has_visible_key = has_visible_key.unflatten(1, (-1, samples_per_block))
        num_samples[:, head, chunk] = has_visible_key.sum(-1).float()
    return max_share, share_sum, num_samples


def _compute_max_logits(
    queries: Tensor,
    *,
    positions: Tensor,
    keys: Tensor,
    key_positions: Tensor,
    keys_per_block: int,
    kv_blocks: int,
    key_ranges: KeyRanges,
    score_options: ScoreOptions,
) -> tuple[Tensor, Tensor]:
    """Return the maximum logit of each query and key block of one head.

    Args:
        queries: [B, Q, C], sampled queries.
        positions: int64 [B, Q], positions of the queries; -1 for missing samples.
        keys: [B, K, C], sampled keys.
        key_positions: int64 [K], positions of the keys, ascending.
        keys_per_block: Sampled keys per key block; the last block may have fewer.
        kv_blocks: M_k, the number of key blocks.
        key_ranges: Keys that each query may attend to.
        score_options: Parameters of the logits.

    Returns:
        block_max: float32 [B, Q, M_k], -inf for invisible blocks.
        has_visible_key: bool [B, Q], False for queries without visible sampled keys.
    """
    first_key, last_key = (
        x.gather(1, positions.clamp(min=0)) for x in (key_ranges.start, key_ranges.end)
    )
    last_key = last_key.masked_fill(positions < 0, -1)
    dot_products = queries.float() @ keys.float().transpose(-1, -2)
    logits = ops_reference.cap_logits(dot_products * score_options.scale, score_options.softcap)
    is_masked = key_positions < first_key.unsqueeze(-1)
    is_masked |= key_positions > last_key.unsqueeze(-1)
    logits = logits.masked_fill(is_masked, -torch.inf)
    num_padding_keys = kv_blocks * keys_per_block - len(key_positions)
    logits = F.pad(logits, (0, num_padding_keys), value=-torch.inf)
    return logits.unflatten(-1, (kv_blocks, -1)).amax(-1), (~is_masked).any(-1)


def sample_outlier_queries(
    q: Tensor, key_ranges: KeyRanges, query_block: int, samples_per_block: int
) -> Tensor:
    """Return a farthest-point sample of each query block by cosine similarity.

    The first sample is the query with the lowest similarity to the mean query of its block. Every
    further sample is the query whose highest similarity to the earlier samples is the lowest:
    ``argmin_i max_{s in samples} cos(q_i, q_s)``. Similarities are rounded towards zero to
    multiples of 1 / `COSINE_STEPS`, and ties go to the earlier query. NaN counts as -1.

    Args:
        q: [B, H, N_q, D].
        key_ranges: Keys that each query may attend to; queries without keys are padding.
        query_block: Queries per block.
        samples_per_block: Samples per query block. If equal to ``query_block``, all queries are
            sampled in order.

    Returns:
        int64 [B, H, M_q, samples_per_block], positions in q. Blocks with too few real queries are
        filled with -1.
    """
    queries_by_block, is_real_query = _split_into_blocks(q, key_ranges.end >= 0, query_block)
    is_real_query = is_real_query.expand(queries_by_block.shape[:-1])
    block_start = torch.arange(0, q.shape[2], query_block, device=q.device)
    if samples_per_block == query_block:
        sample_indices = torch.arange(query_block, device=q.device).expand(
            queries_by_block.shape[:-1]
        )
    else:
        queries_by_block = queries_by_block.masked_fill(~is_real_query.unsqueeze(-1), 0.0)
        sample_indices = _sample_farthest_points(queries_by_block, is_real_query, samples_per_block)
    is_missing_sample = ~is_real_query.gather(-1, sample_indices)
    return (sample_indices + block_start[:, None]).masked_fill(is_missing_sample, -1)


def _sample_farthest_points(
    queries_by_block: Tensor, is_real_query: Tensor, samples_per_block: int
) -> Tensor:
    """Compute `sample_outlier_queries` as indices in blocks, int64 [B, H, M, samples_per_block].

    Args:
        queries_by_block: float32 [B, H, M, query_block, D], zeros where ``is_real_query`` is False.
        is_real_query: bool [B, H, M, query_block], False for padding.
        samples_per_block: Samples per block.
    """
    query_sum = queries_by_block.sum(-2)  # the cosine does not depend on the factor 1 / query_block
    inverse_norm, inverse_sum_norm = (
        x.square().sum(-1).clamp(min=MIN_SQUARED_NORM).rsqrt()
        for x in (queries_by_block, query_sum.unsqueeze(-2))
    )
    dot_products = (queries_by_block @ query_sum.unsqueeze(-1))[..., 0]
    max_similarity = _compute_cosine_steps(dot_products, inverse_norm, inverse_sum_norm)
    max_similarity = max_similarity.masked_fill(~is_real_query, PADDING_SIMILARITY)
    query_block = max_similarity.shape[-1]
    query_index = torch.arange(query_block, device=queries_by_block.device)
    sample_indices = []
    for sample_number in range(samples_per_block):
        # argmin returns any of several equal values: the query index breaks ties
        sampled_index = (max_similarity * query_block + query_index).argmin(-1, keepdim=True)
        sample_indices.append(sampled_index)
        sampled_query = queries_by_block.take_along_dim(sampled_index.unsqueeze(-1), dim=-2)
        dot_products = (queries_by_block @ sampled_query.transpose(-1, -2))[..., 0]
        similarity = _compute_cosine_steps(
            dot_products, inverse_norm, inverse_norm.gather(-1, sampled_index)
        )
        similarity = similarity.masked_fill(~is_real_query, PADDING_SIMILARITY)
        if sample_number > 0:
            similarity = torch.maximum(max_similarity, similarity)
        max_similarity = similarity.scatter(-1, torch.cat(sample_indices, -1), SAMPLED_SIMILARITY)
    return torch.cat(sample_indices, -1)


def _compute_cosine_steps(
    dot_products: Tensor, left_inverse_norm: Tensor, right_inverse_norm: Tensor
) -> Tensor:
    """Return cosine similarities times `COSINE_STEPS`, rounded towards zero, int64."""
    cosine = (dot_products * left_inverse_norm * right_inverse_norm).nan_to_num(nan=-1.0)
    return (cosine.clamp(-1, 1) * COSINE_STEPS).long()


def sample_typical_queries(
    key_ranges: KeyRanges, query_block: int, samples_per_block: int
) -> Tensor:
    """Return ``samples_per_block`` equally spaced queries of each block.

    A block is divided into ``samples_per_block`` equal steps. The query in the middle of a step is
    sampled.

    Args:
        key_ranges: Keys that each query may attend to; queries without keys are padding.
        query_block: Queries per block.
        samples_per_block: Samples per query block; divides ``query_block``.

    Returns:
        int64 [B, M_q, samples_per_block], positions of queries; -1 for padding.
    """
    queries_per_step = query_block // samples_per_block
    block_start = torch.arange(0, key_ranges.q_length, query_block, device=key_ranges.end.device)
    offsets_in_block = torch.arange(
        queries_per_step // 2, query_block, queries_per_step, device=key_ranges.end.device
    )
    positions = (block_start[:, None] + offsets_in_block).expand(key_ranges.end.shape[0], -1, -1)
    _, last_key = key_ranges.blocked(query_block)
    return positions.masked_fill(last_key[:, :, offsets_in_block] < 0, -1)


def get_first_sampled_key(key_stride: int) -> int:
    """Return the position of the first sampled key: the middle of the first stride."""
    return key_stride // 2


def _split_into_blocks(x: Tensor, is_valid: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Split [B, H, N, D] into M blocks, and return a mask of real tokens.

    Args:
        x: [B, H, N, D].
        is_valid: bool [B, N], False for padding.
        block_size: Tokens per block.

    Returns:
        float32 [B, H, M, block_size, D] and bool [B, 1, M, block_size], False for padding.
    """
    num_padding = -x.shape[2] % block_size
    blocks = F.pad(x, (0, 0, 0, num_padding)).unflatten(2, (-1, block_size)).float()
    return blocks, F.pad(is_valid, (0, num_padding)).unflatten(1, (-1, block_size)).unsqueeze(1)
