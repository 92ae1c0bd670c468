"""Fast scores on a CPU: `compute_sampled_scores` of the reference, in one pass over the logits.

One batched product multiplies the sampled queries of a few query blocks of all heads with the keys
of consecutive key blocks. The maxima per key block are computed while the logits are in the cache.
Keys are masked only in the blocks that are partly visible to a query. Query blocks whose visible
blocks are all forced are not scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CabConfig, num_typical_queries
from cab_hf.ops import reference as ops_reference
from cab_hf.plan import KeyRanges
from cab_hf.selection import reference
from cab_hf.selection.reference import ScoreOptions

# largest number of logits of one product: 4 MiB in float32, which stay in the cache of a core until
# the maxima per key block are computed
MAX_LOGITS_PER_PRODUCT = 2**20
# the number of key blocks per product is a multiple of this number if memory allows, because `amax`
# over the keys of a block is vectorised over key blocks
KEY_BLOCKS_PER_VECTOR = 32
# largest number of sampled queries, of all heads, that are scored together: enough for fast
# products, and few enough that most key blocks need no mask
MAX_SAMPLES_PER_GROUP = 2048
# largest number of elements of the Gram matrices that are in memory together: 8 MiB in float32
MAX_GRAM_ELEMENTS = 2**21


@dataclass(frozen=True, eq=False)
class SampledQueries:
    """The sampled queries of one kind, typical or outlier, and the keys that they are scored on.

    Attributes:
        positions: int64 [B, H or 1, M_q, S], positions of the queries; -1 for missing samples. One
            head if all heads have the same positions.
        first_key, last_key: int64 [B, H or 1, M_q, S], the first and the last visible key of each
            query, as indices of ``keys``. If no sampled key is visible, 0 and -1.
        channels: int64 [C], the channels that are scored; None for all channels.
        keys: float32 [B, H_kv, N, C], the sampled keys with these channels, padded to whole blocks.
        key_stride: Distance between sampled keys, in tokens.
        weight: Number of queries of the block that one sample represents.
    """

    positions: Tensor
    first_key: Tensor
    last_key: Tensor
    channels: Tensor | None
    keys: Tensor
    key_stride: int
    weight: float

    @classmethod
    def create(
        cls,
        positions: Tensor,
        *,
        key_ranges: KeyRanges,
        channels: Tensor | None,
        keys: Tensor,
        key_stride: int,
        weight: float,
    ) -> SampledQueries:
        """Compute the visible sampled keys of the queries at ``positions``."""
        first_position = reference.get_first_sampled_key(key_stride)
        batch_row = torch.arange(len(positions), device=positions.device)[:, None, None, None]
        range_index = batch_row, positions.clamp(min=0)
        # index of the first sampled key at or after the start, and of the last at or before the end
        first_key = (key_ranges.start[range_index].long() - first_position).clamp_(min=0)
        first_key = first_key.add_(key_stride - 1).div_(key_stride, rounding_mode="floor")
        last_key = (key_ranges.end[range_index].long() - first_position).div_(
            key_stride, rounding_mode="floor"
        )
        has_no_key = (positions < 0) | (last_key < first_key)
        return cls(
            positions=positions,
            first_key=first_key.masked_fill_(has_no_key, 0),
            last_key=last_key.masked_fill_(has_no_key, -1),
            channels=channels,
            keys=keys,
            key_stride=key_stride,
            weight=weight,
        )

    def count_samples(self) -> Tensor:
        """Return the number of samples with a visible sampled key, float32 [B, H or 1, M_q]."""
        return (self.last_key >= 0).sum(-1).float()


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
    """Compute `reference.compute_sampled_scores` for the same arguments, but faster.

    ``score_options.scale`` must be positive, because the maximum over keys is taken before scaling.
    """
    num_heads = q.shape[1]
    samples_by_kind = _sample_queries(
        q, k, key_ranges=key_ranges, config=config, channels=score_options.channels
    )
    max_samples = max(samples.positions.shape[3] for samples in samples_by_kind)
    q_blocks_per_group = max(1, MAX_SAMPLES_PER_GROUP // (num_heads * max_samples))
    num_visible_keys = config.key_block * is_visible.sum(-1)
    length_factor = (num_visible_keys / reference.MAX_KEYS_AT_FULL_THRESHOLD).clamp(min=1)
    weight_sum = sum(samples.weight * samples.count_samples() for samples in samples_by_kind)
    weight_sum = weight_sum.clamp(min=ops_reference.MIN_DIVISOR)
    # a query block whose visible blocks are all forced needs no scores
    needs_scores = (is_visible & ~is_forced).any(-1)
    scores = torch.zeros(q.shape[0], num_heads, *is_visible.shape[1:], device=q.device)
    for batch_row in range(q.shape[0]):
        scored_q_blocks = needs_scores[batch_row].nonzero()[:, 0]
        for group_q_blocks in (
            scored_q_blocks.split(q_blocks_per_group) if len(scored_q_blocks) else ()
        ):
            block_group = _QueryBlockGroup.from_blocks(
                key_ranges, batch_row, group_q_blocks, config
            )
            share_sum, max_share = 0.0, None
            for samples in samples_by_kind:
                max_share_of_kind, share_sum_of_kind = _compute_shares(
                    q,
                    samples,
                    block_group=block_group,
                    score_options=score_options,
                    key_block=config.key_block,
                )
                share_sum = share_sum + samples.weight * share_sum_of_kind
                max_share = (
                    max_share_of_kind
                    if max_share is None
                    else torch.maximum(max_share, max_share_of_kind)
                )
            mean_share = share_sum / weight_sum[batch_row][:, group_q_blocks, None]
            group_scores = (mean_share * length_factor[batch_row, group_q_blocks, None]).clamp(
                max=1
            )
            has_large_share = max_share >= config.share_threshold
            group_scores = torch.where(has_large_share, 1 + max_share, group_scores)
            # a sampled query that is not finite has shares of NaN: the score 1 selects all blocks
            group_scores = group_scores.masked_fill(group_scores.isnan(), 1.0)
            scores[batch_row][
                :, group_q_blocks, block_group.first_key_block : block_group.end_key_block
            ] = group_scores
    return scores


@dataclass(frozen=True, eq=False)
class _QueryBlockGroup:
    """A few query blocks of one batch row, which are scored together, and their key blocks.

    Attributes:
        batch_row: Index of the batch row.
        q_blocks: int64 [R], indices of the query blocks.
        first_key_block: First key block that is visible to any of the queries.
        end_key_block: End (exclusive) of the key blocks that are visible to any of the queries.
    """

    batch_row: int
    q_blocks: Tensor
    first_key_block: int
    end_key_block: int

    @classmethod
    def from_blocks(
        cls, key_ranges: KeyRanges, batch_row: int, q_blocks: Tensor, config: CabConfig
    ) -> _QueryBlockGroup:
        """Compute the visible key blocks of the query blocks ``q_blocks`` of one batch row."""
        key_bounds, key_block = key_ranges.rows(config.query_block), config.key_block
        return cls(
            batch_row=batch_row,
            q_blocks=q_blocks,
            first_key_block=int(key_bounds.min_first[batch_row, q_blocks].min()) // key_block,
            end_key_block=int(key_bounds.max_last[batch_row, q_blocks].max()) // key_block + 1,
        )


def _sample_queries(
    q: Tensor, k: Tensor, *, key_ranges: KeyRanges, config: CabConfig, channels: tuple[int, ...]
) -> list[SampledQueries]:
    """Return the typical queries, then the outlier queries if ``config.outlier_queries`` > 0.

    `reference.compute_block_shares` defines their weights, channels and keys.
    """
    query_block, num_outliers = config.query_block, config.outlier_queries
    num_typical, key_stride = num_typical_queries(config), config.typical_key_stride
    typical_positions = reference.sample_typical_queries(key_ranges, query_block, num_typical)
    num_padding_keys = -k.shape[2] % config.key_block
    # without the condition, F.pad would copy all keys
    padded_keys = F.pad(k, (0, 0, 0, num_padding_keys)) if num_padding_keys else k
    first_sampled_key = reference.get_first_sampled_key(key_stride)
    samples_by_kind = [
        SampledQueries.create(
            typical_positions.unsqueeze(1),
            key_ranges=key_ranges,
            channels=None,
            keys=padded_keys[:, :, first_sampled_key::key_stride].float(),
            key_stride=key_stride,
            weight=(query_block - num_outliers) / num_typical,
        )
    ]
    if num_outliers:
        channel_index = torch.tensor(channels, device=q.device) if channels else None
        outlier_keys = (
            padded_keys if channel_index is None else padded_keys.index_select(-1, channel_index)
        )
        samples_by_kind.append(
            SampledQueries.create(
                sample_outlier_queries(q, key_ranges, query_block, num_outliers),
                key_ranges=key_ranges,
                channels=channel_index,
                keys=outlier_keys.float(),
                key_stride=1,
                weight=1.0,
            )
        )
    return samples_by_kind


def _compute_shares(
    q: Tensor,
    samples: SampledQueries,
    *,
    block_group: _QueryBlockGroup,
    score_options: ScoreOptions,
    key_block: int,
) -> tuple[Tensor, Tensor]:
    """Compute `reference.compute_sample_shares` for the blocks of ``block_group``.

    Returns:
        max_share, share_sum: float32 [H, R, blocks], for R query blocks and the key blocks of
            ``block_group``.
    """
    keys = samples.keys[block_group.batch_row]
    samples_per_block, keys_per_block = samples.positions.shape[3], key_block // samples.key_stride
    queries = _gather_queries(q, samples, block_group)
    # [H or 1, R * S]
    first_key, last_key = (
        x[block_group.batch_row][:, block_group.q_blocks].flatten(1)
        for x in (samples.first_key, samples.last_key)
    )
    block_max_logits = _compute_block_maxima(
        queries,
        first_key=first_key,
        last_key=last_key,
        keys=keys,
        keys_per_block=keys_per_block,
        block_group=block_group,
    )
    # scaling and soft caps do not change the order of logits: apply both to the maxima only
    block_max_logits = ops_reference.cap_logits(
        block_max_logits.mul_(score_options.scale), score_options.softcap
    )
    # after the soft cap, which turns -inf into a finite logit
    _mask_invisible_blocks(
        block_max_logits,
        first_block=first_key // keys_per_block,
        last_block=last_key.div(keys_per_block, rounding_mode="floor"),
        first_column=block_group.first_key_block,
    )
    shares = _compute_softmax(block_max_logits, score_options.sinks, key_block)
    shares = shares.unflatten(1, (-1, samples_per_block))
    return shares.amax(2), shares.sum(2)


def _gather_queries(q: Tensor, samples: SampledQueries, block_group: _QueryBlockGroup) -> Tensor:
    """Return the samples of ``block_group``, float32 [H, R * S, C]; arbitrary if missing."""
    positions = samples.positions[block_group.batch_row][:, block_group.q_blocks]
    positions = positions.flatten(1).clamp(min=0)
    queries = q[block_group.batch_row]
    if positions.shape[0] == 1:
        # not index_select, which would first copy all queries if q is not contiguous
        queries = queries[:, positions[0]]
    else:
        head = torch.arange(q.shape[1], device=q.device).unsqueeze(-1)
        queries = queries[head, positions]
    if samples.channels is not None:
        queries = queries.index_select(-1, samples.channels)
    return queries.float()


def _compute_block_maxima(
    queries: Tensor,
    *,
    first_key: Tensor,
    last_key: Tensor,
    keys: Tensor,
    keys_per_block: int,
    block_group: _QueryBlockGroup,
) -> Tensor:
    """Return the maximum dot product per sampled query and key block, float32 [H, S, blocks].

    In blocks that are partly visible to a query, `_mask_border_block` masks the invisible keys.
    Blocks without visible sampled keys have arbitrary values.

    Args:
        queries: float32 [H, S, C], S sampled queries per head.
        first_key, last_key: int64 [H or 1, S], the first and last visible sampled key of each
            query, as indices of ``keys``.
        keys: float32 [H_kv, N, C], the sampled keys, padded to whole blocks.
        keys_per_block: Sampled keys per key block.
        block_group: Its key blocks ``first_key_block`` to ``end_key_block`` are the columns of the
            result.
    """
    num_heads, kv_heads, num_channels = len(queries), len(keys), queries.shape[2]
    num_samples = num_heads * queries.shape[1]
    # one product per KV head: [H_kv, group * S, C]
    kv_queries = queries.reshape(kv_heads, -1, num_channels)
    first_column, end_column = block_group.first_key_block, block_group.end_key_block
    max_blocks_per_product = max(1, MAX_LOGITS_PER_PRODUCT // (keys_per_block * num_samples))
    max_blocks_per_product = (
        max_blocks_per_product // KEY_BLOCKS_PER_VECTOR * KEY_BLOCKS_PER_VECTOR
        or max_blocks_per_product
    )
    max_blocks_per_product = min(max_blocks_per_product, end_column - first_column)
    latest_first_key, earliest_last_key = int(first_key.max()), int(last_key.min())
    product_buffer = queries.new_empty(num_samples * max_blocks_per_product * keys_per_block)
    block_max_products = queries.new_empty(*queries.shape[:2], end_column - first_column)
    for first_block in range(first_column, end_column, max_blocks_per_product):
        end_block = min(first_block + max_blocks_per_product, end_column)
        num_blocks = end_block - first_block
        # [H_kv, keys_per_block * num_blocks, C]: adjacent rows belong to adjacent blocks, so that
        # the maximum over the keys of a block is a maximum of vectors
        keys_of_product = keys[:, first_block * keys_per_block : end_block * keys_per_block]
        keys_of_product = keys_of_product.unflatten(1, (num_blocks, keys_per_block))
        keys_of_product = keys_of_product.transpose(1, 2).reshape(kv_heads, -1, num_channels)
        products = product_buffer[: num_samples * keys_of_product.shape[1]]
        torch.bmm(
            kv_queries,
            keys_of_product.transpose(1, 2),
            out=products.view(kv_heads, -1, keys_of_product.shape[1]),
        )
        products = products.view(num_heads, -1, keys_per_block, num_blocks)
        if end_block * keys_per_block - 1 > earliest_last_key:
            _mask_border_block(products, last_key, first_block, is_last_visible_key=True)
        if first_block * keys_per_block < latest_first_key:
            _mask_border_block(products, first_key, first_block, is_last_visible_key=False)
        # amax over few columns is slow: halve the keys by elementwise maxima instead
        while (
            products.shape[2] > 1
            and products.shape[2] % 2 == 0
            and num_blocks < KEY_BLOCKS_PER_VECTOR
        ):
            num_keys_per_half = products.shape[2] // 2
            products = torch.maximum(
                products[:, :, :num_keys_per_half], products[:, :, num_keys_per_half:]
            )
        column_slice = slice(first_block - first_column, end_block - first_column)
        torch.amax(products, 2, out=block_max_products[..., column_slice])
    return block_max_products


def _mask_border_block(
    products: Tensor, border_key: Tensor, first_block: int, *, is_last_visible_key: bool
) -> None:
    """Write -inf to the invisible keys of the block that contains ``border_key``.

    Only the blocks of the first and the last visible key are partly visible to a query.
    `_mask_invisible_blocks` masks the other blocks, after the maxima per block are computed.
    If the border of a query is outside of ``products``, its visible products do not change.

    Args:
        products: float32 [H, S, keys_per_block, blocks], contiguous, changed in place.
        border_key: int64 [H or 1, S], the last visible sampled key of each query if
            ``is_last_visible_key``, else the first.
        first_block: Index of the first block of ``products``.
        is_last_visible_key: True to mask the keys after the border, False to mask the keys before
            the border.
    """
    num_heads, _, keys_per_block, num_blocks = products.shape
    key_in_block = torch.arange(keys_per_block, device=products.device)
    border_block = border_key.div(keys_per_block, rounding_mode="floor").sub_(first_block)
    border_block = border_block.clamp_(0, num_blocks - 1).unsqueeze(-1)
    # [H or 1, S, keys_per_block]
    key_index = (border_block + first_block) * keys_per_block + key_in_block
    border_key = border_key.unsqueeze(-1)
    is_invisible = key_index > border_key if is_last_visible_key else key_index < border_key
    product_index = (border_block + key_in_block * num_blocks).expand(num_heads, -1, -1)
    products = products.flatten(2)
    border_products = products.gather(2, product_index).masked_fill_(is_invisible, -torch.inf)
    products.scatter_(2, product_index, border_products)


def _mask_invisible_blocks(
    block_max_logits: Tensor, *, first_block: Tensor, last_block: Tensor, first_column: int
) -> None:
    """Write -inf to the blocks before ``first_block`` and after ``last_block``.

    Args:
        block_max_logits: float32 [H, S, blocks], changed in place.
        first_block, last_block: int64 [H or 1, S], the first and the last visible block of each
            query.
        first_column: Index of the first block of ``block_max_logits``.
    """
    block_index = torch.arange(block_max_logits.shape[2], device=last_block.device) + first_column
    # only the columns after the earliest end, and before the latest start, need a mask
    end_slice = slice(max(0, int(last_block.min()) + 1 - first_column), None)
    start_slice = slice(0, max(0, int(first_block.max()) - first_column))
    block_max_logits[..., end_slice].masked_fill_(
        block_index[end_slice] > last_block.unsqueeze(-1), -torch.inf
    )
    block_max_logits[..., start_slice].masked_fill_(
        block_index[start_slice] < first_block.unsqueeze(-1), -torch.inf
    )


def _compute_softmax(block_max_logits: Tensor, sinks: Tensor | None, key_block: int) -> Tensor:
    """Return the attention share of each key block, float32 [H, S, blocks].

    `reference.compute_sample_shares` defines the shares.

    Args:
        block_max_logits: float32 [H, S, blocks], the maximum logit per key block; -inf for
            invisible blocks.
        sinks: [H], sink logits; None for no sinks.
        key_block: Tokens per key block.
    """
    softmax_input = block_max_logits
    if sinks is not None:
        sink_logits = sinks.float() - torch.tensor(key_block, dtype=torch.float32).log()
        sink_logits = sink_logits[:, None, None].expand(-1, block_max_logits.shape[1], 1)
        softmax_input = torch.cat([block_max_logits, sink_logits], -1)
    shares = softmax_input.softmax(-1)[..., : block_max_logits.shape[-1]]
    # softmax over no keys is NaN in all blocks
    if bool(shares[..., 0].isnan().any()):
        shares = shares.masked_fill(block_max_logits == -torch.inf, 0.0)
    return shares


def sample_outlier_queries(
    q: Tensor, key_ranges: KeyRanges, query_block: int, samples_per_block: int
) -> Tensor:
    """Compute `reference.sample_outlier_queries` from the Gram matrix of each query block."""
    if samples_per_block == query_block:
        return reference.sample_outlier_queries(q, key_ranges, query_block, samples_per_block)
    q_blocks = -(-q.shape[2] // query_block)
    num_padding = q_blocks * query_block - q.shape[2]
    is_real_query = F.pad(key_ranges.end >= 0, (0, num_padding)).unflatten(1, (-1, query_block))
    sample_indices = torch.empty(
        *q.shape[:2], q_blocks, samples_per_block, dtype=torch.int64, device=q.device
    )
    gram_elements = q.shape[0] * q.shape[1] * query_block**2
    blocks_per_chunk = max(1, MAX_GRAM_ELEMENTS // gram_elements)
    for first_block in range(0, q_blocks, blocks_per_chunk):
        # [B, H, query blocks of the chunk, query_block, D]
        chunk = slice(first_block, first_block + blocks_per_chunk)
        queries_by_block = q[:, :, chunk.start * query_block : chunk.stop * query_block].float()
        if queries_by_block.shape[2] % query_block:
            queries_by_block = F.pad(queries_by_block, (0, 0, 0, num_padding))
        queries_by_block = queries_by_block.unflatten(2, (-1, query_block))
        is_real_query_of_chunk = (
            is_real_query[:, chunk].unsqueeze(1).expand(queries_by_block.shape[:-1])
        )
        if not bool(is_real_query_of_chunk.all()):
            queries_by_block = queries_by_block.masked_fill(
                ~is_real_query_of_chunk.unsqueeze(-1), 0.0
            )
        chunk_sample_indices = _sample_farthest_points(
            _compute_gram(queries_by_block), is_real_query_of_chunk.flatten(0, 2), samples_per_block
        )
        sample_indices[:, :, chunk] = chunk_sample_indices.view(sample_indices[:, :, chunk].shape)
    block_start = torch.arange(0, q.shape[2], query_block, device=q.device)
    is_missing_sample = ~is_real_query.unsqueeze(1).expand(-1, q.shape[1], -1, -1).gather(
        -1, sample_indices
    )
    return (sample_indices + block_start[:, None]).masked_fill_(is_missing_sample, -1)


def _compute_gram(queries_by_block: Tensor) -> Tensor:
    """Return the dot products of the queries of each block, [B * H * M, query_block, query_block].

    One product per head reads the queries where they are. A product of all heads would first copy
    queries that have the strides of [B, N, H, D].

    Args:
        queries_by_block: float32 [B, H, M, query_block, D].
    """
    num_blocks, query_block = queries_by_block.shape[2:4]
    gram = queries_by_block.new_empty(
        *queries_by_block.shape[:2], num_blocks, query_block, query_block
    )
    for batch_row, head in product(*map(range, gram.shape[:2])):
        queries = queries_by_block[batch_row, head]
        torch.bmm(queries, queries.transpose(1, 2), out=gram[batch_row, head])
    return gram.flatten(0, 2)


def _sample_farthest_points(gram: Tensor, is_real_query: Tensor, samples_per_block: int) -> Tensor:
    """Compute `sample_outlier_queries` as indices in the blocks, int64 [M, samples_per_block].

    All blocks are sampled in the same steps. The diagonal of a Gram matrix contains the squared
    norms of the queries. The sum of a row is the dot product with the sum of the queries.

    For each query, ``max_similarity`` contains similarity_steps * query_block + query_index, where
    similarity_steps is the rounded similarity times `reference.COSINE_STEPS`. These integers are
    exact in float32. The minimum belongs to the query with the lowest similarity, and ties go to
    the lower index.

    Args:
        gram: float32 [M, query_block, query_block], the dot products of the queries of each block;
            zeros where ``is_real_query`` is False.
        is_real_query: bool [M, query_block], False for padding.
        samples_per_block: Samples per block.
    """
    (num_blocks, query_block), device = gram.shape[:2], gram.device
    # the cosine does not depend on the factor 1 / query_block of the mean query
    dot_products_with_sum = gram.sum(-1)
    squared_norm = gram.diagonal(dim1=1, dim2=2)
    squared_sum_norm = dot_products_with_sum.sum(-1, keepdim=True)
    inverse_norm, inverse_sum_norm = (
        x.clamp(min=reference.MIN_SQUARED_NORM).rsqrt() for x in (squared_norm, squared_sum_norm)
    )
    query_index = torch.arange(query_block, device=device, dtype=torch.float32)
    first_row = torch.arange(0, num_blocks * query_block, query_block, device=device)
    is_padding_query = None if bool(is_real_query.all()) else ~is_real_query
    # a query with NaN or an infinity has a squared norm that is not finite
    is_finite = bool((squared_norm.sum() + dot_products_with_sum.abs().sum()).isfinite())

    def compute_similarity(dot_products: Tensor, right_inverse_norm: Tensor) -> Tensor:
        cosine = dot_products.mul_(inverse_norm).mul_(right_inverse_norm)
        if not is_finite:
            cosine.nan_to_num_(nan=-1.0)
        similarity_steps = cosine.clamp_(-1, 1).mul_(reference.COSINE_STEPS).trunc_()
        if is_padding_query is not None:
            similarity_steps.masked_fill_(is_padding_query, reference.PADDING_SIMILARITY)
        return torch.add(query_index, similarity_steps, alpha=query_block)

    max_similarity = compute_similarity(dot_products_with_sum, inverse_sum_norm)
    gram_rows, inverse_norm_of_rows = gram.flatten(0, 1), inverse_norm.flatten()
    sample_indices = []
    for sample_number in range(samples_per_block):
        sampled_index = max_similarity.argmin(-1)
        sample_indices.append(sampled_index)
        sampled_row = sampled_index + first_row
        similarity = compute_similarity(
            gram_rows.index_select(0, sampled_row),
            inverse_norm_of_rows.index_select(0, sampled_row).unsqueeze(-1),
        )
        if sample_number == 0:
            max_similarity = similarity
        else:
            torch.maximum(max_similarity, similarity, out=max_similarity)
        # larger than every similarity, so that no query is sampled twice
        max_similarity.scatter_(
            -1, sampled_index.unsqueeze(-1), reference.SAMPLED_SIMILARITY * query_block
        )
    return torch.stack(sample_indices, -1)
