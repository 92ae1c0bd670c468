"""Methods that select all blocks by the attention of the last queries of a sequence.

If a sequence is read in chunks, the last queries of each chunk select its blocks. Packed documents
raise an error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CabConfig
from cab_hf.eval.methods.blocks import (
    TOP_P_PREDICTORS,
    ScorePredictor,
    SharePredictor,
    average_blocks,
    compute_block_weights,
    compute_pooled_mass,
    normalise_sum,
    select_fewest_entries,
)
from cab_hf.eval.methods.caches import find_last_queries, sum_columns_and_diagonals
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, register_predictor
from cab_hf.predictors.attention_mass import sum_blocks

# vertical_slash: number of the last queries whose attention scores all blocks
VERTICAL_SLASH_QUERIES = 64
# FlexPrefill: a head whose `compute_root_divergence` is below FLEXPREFILL_TAU uses the mean-pooled
# estimate
FLEXPREFILL_TAU = 0.1
# FlexPrefill: smallest number of tokens in columns, and in diagonals, of a head
FLEXPREFILL_MIN_TOKENS = 1024


class FlexPrefillPredictor(SharePredictor):
    """FlexPrefill (Lai et al. 2025, arXiv 2502.20766), for blocks.

    The method selects blocks where the paper selects tokens.

    For each head, the attention of the last block of queries to key blocks is computed exactly, and
    estimated from mean-pooled queries and keys. The head is query-aware if the square root of the
    Jensen-Shannon divergence of the two distributions is below tau = 0.1. A query-aware head
    estimates the mass of all blocks by mean pooling. The head keeps the smallest set of blocks,
    over all query blocks together, that has the fraction gamma = 0.95 of the total mass.

    Any other head is vertical-slash. Let n be the smallest number of columns (single keys) that
    receive more than gamma of the last query block's attention. The head keeps the n // key_block +
    1 blocks of columns with the most attention. Diagonals are selected in the same way.

    Every head keeps at least 1,024 tokens of columns and of diagonals. As far as we know, this is
    the minimum of the paper; the README of the authors' code has gamma 0.9 and 512 tokens.
    """

    def __init__(self, config: CabConfig) -> None:
        super().__init__(config, default_mass_share=0.95)

    def select_blocks(
        self,
        q: Tensor,
        k: Tensor,
        layer_context: LayerContext,
        is_visible: Tensor,
        is_forced: Tensor,
    ) -> Tensor:
        self.refuse_packed(layer_context.ranges)
        query_block, key_block = self.config.query_block, self.config.key_block
        ranges = layer_context.ranges
        gamma = torch.tensor(self.mass_share, device=q.device, dtype=torch.float64)
        # [B, H, N_k] each, sums to 1: attention of the last query block per key, and per distance
        column_shares, diagonal_shares = map(
            normalise_sum,
            sum_columns_and_diagonals(
                q=q, k=k, ranges=ranges, scale=layer_context.scale, num_queries=query_block
            ),
        )
        pooled_estimate = estimate_last_block(
            q=q,
            mean_keys=average_blocks(k, ranges.key_valid, key_block),
            ranges=ranges,
            scale=layer_context.scale,
            query_block=query_block,
            key_block=key_block,
        )
        # bool [B, H]
        is_query_aware = (
            compute_root_divergence(pooled_estimate, sum_over_blocks(column_shares, key_block))
            < FLEXPREFILL_TAU
        )
        # query-aware heads keep only `FLEXPREFILL_MIN_TOKENS` tokens of columns and of diagonals
        min_mass_share = gamma.where(~is_query_aware.unsqueeze(-1), 0.0)
        is_kept = select_touched_blocks(
            is_kept_column=select_blocks_by_tokens(column_shares, min_mass_share, key_block),
            is_kept_diagonal=select_blocks_by_tokens(diagonal_shares, min_mass_share, key_block),
            ranges=ranges,
            query_block=query_block,
            key_block=key_block,
        )
        group_size = q.shape[1] // k.shape[1]
        for head in is_query_aware.any(0).nonzero().flatten().tolist():
            block_mass = compute_pooled_mass(
                q[:, [head]], k[:, [head // group_size]], layer_context, **self.block_sizes
            )
            # [B, 1, M_q * M_k]: mass of each block, divided by that of all rows together, so that
            # rows with flat attention keep more blocks
            block_shares = normalise_sum(block_mass.flatten(2))
            all_blocks = torch.ones_like(block_shares, dtype=torch.bool)
            is_best = select_fewest_entries(
                block_shares, all_blocks, ~all_blocks, self.mass_share
            ).view_as(block_mass)
            is_kept[:, head] |= is_best[:, 0] & is_query_aware[:, head, None, None]
        return is_kept


class VerticalSlashPredictor(ScorePredictor):
    """A predictor that keeps the top-k blocks of each row by `score_vertical_slash`.

    Packed documents raise an error.
    """

    def __init__(self, config: CabConfig) -> None:
        super().__init__(config, score_vertical_slash)

    def select_blocks(
        self,
        q: Tensor,
        k: Tensor,
        layer_context: LayerContext,
        is_visible: Tensor,
        is_forced: Tensor,
    ) -> Tensor:
        self.refuse_packed(layer_context.ranges)
        return super().select_blocks(
            q=q, k=k, layer_context=layer_context, is_visible=is_visible, is_forced=is_forced
        )


def score_vertical_slash(
    q: Tensor,
    k: Tensor,
    layer_context: LayerContext,
    query_block: int,
    key_block: int,
    num_queries: int = VERTICAL_SLASH_QUERIES,
) -> Tensor:
    """Score blocks by MInference's vertical-slash pattern (Jiang et al. 2024, arXiv 2407.02490).

    The attention of each sequence's last ``num_queries`` queries is summed over columns (keys) and
    over diagonals (distances between query and key). The score of a block is that of the best
    column or diagonal that touches the block. Padding queries do not count.

    The original keeps a fixed number of columns and of diagonals per head, and its kernel gathers
    single columns. Here every row keeps a fraction of its blocks, and a column costs a whole key
    block in every row. At an equal number of (query, key) pairs, this version therefore covers less
    attention than MInference.

    Returns:
        Scores, float32 [B, H, M_q, M_k].
    """
    kv_length, ranges = k.shape[2], layer_context.ranges
    # [B, H, N_k] each
    attention_by_key, attention_by_distance = sum_columns_and_diagonals(
        q=q, k=k, ranges=ranges, scale=layer_context.scale, num_queries=num_queries
    )
    column_scores = F.pad(attention_by_key, (0, -kv_length % key_block)).unflatten(
        -1, (-1, key_block)
    )
    # [B, H, 1, M_k]
    column_scores = column_scores.amax(-1).unsqueeze(2)

    # a diagonal touches a block if its distance is at least that between the first query of the
    # query block and the last key of the key block
    block_rows = ranges.rows(query_block)
    last_keys = torch.arange(key_block - 1, kv_length + key_block - 1, key_block, device=q.device)
    first_queries = block_rows.min_last.long().where(block_rows.queries > 0, 0)
    # [B, M_q, M_k]
    min_distances = first_queries.unsqueeze(-1) - last_keys
    # distances to later keys are negative, and have score 0
    num_negative_distances = query_block + key_block - 2
    window_indices = (min_distances + num_negative_distances).clamp(
        0, kv_length - 1 + num_negative_distances
    )
    # entry t: the maximum score of the distances t - num_negative_distances to t
    padded_attention = F.pad(
        attention_by_distance, (num_negative_distances, num_negative_distances)
    )
    max_by_window = F.max_pool1d(padded_attention, num_negative_distances + 1, stride=1)
    gather_indices = window_indices.flatten(1).unsqueeze(1).expand(-1, max_by_window.shape[1], -1)
    diagonal_scores = max_by_window.gather(-1, gather_indices).unflatten(
        -1, window_indices.shape[1:]
    )
    return torch.maximum(column_scores, diagonal_scores)


def estimate_last_block(
    q: Tensor, mean_keys: Tensor, ranges: KeyRanges, scale: float, query_block: int, key_block: int
) -> Tensor:
    """Estimate the attention of the last ``query_block`` queries to key blocks by mean pooling.

    Args:
        q: [B, H, N_q, D].
        mean_keys: means of the key blocks, [B, H_kv, M_k, D].
        ranges: ranges of the queries over the keys.
        scale: factor of the logits.
        query_block: number of the last queries.
        key_block: tokens per key block.

    Returns:
        [B, H, M_k]: the softmax over key blocks of the logits of the mean query with the mean keys.
    """
    # [B, R], -1 for missing queries
    query_indices = find_last_queries(ranges, query_block)
    gather_indices = query_indices.clamp(min=0)[:, None, :, None].expand(
        -1, q.shape[1], -1, q.shape[3]
    )
    is_real_query = (query_indices >= 0)[:, None, :, None]
    query_sums = (q.gather(2, gather_indices).float() * is_real_query).sum(2, keepdim=True)
    mean_query = query_sums / is_real_query.sum(2, keepdim=True).clamp(min=1)
    first_keys, last_keys = (
        x.gather(1, query_indices.clamp(min=0)) for x in (ranges.start, ranges.end)
    )
    block_starts = torch.arange(0, ranges.kv_length, key_block, device=q.device)
    # [B, M_k]: key blocks to which at least one of the last queries may attend
    is_visible = (block_starts <= last_keys.amax(-1, keepdim=True)) & (
        block_starts + key_block > first_keys[:, :1]
    )
    return compute_block_weights(mean_query, mean_keys, is_visible[:, None, None], scale).squeeze(2)


def compute_root_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return the square root of the Jensen-Shannon divergence of distributions, in nats.

    Args:
        p, q: probabilities over the last dimension.
    """
    mixture = (p + q) / 2
    # xlogy(0, 0) is 0
    divergence_terms = torch.xlogy(p, p) + torch.xlogy(q, q) - 2 * torch.xlogy(mixture, mixture)
    return (divergence_terms.sum(-1) / 2).clamp(min=0).sqrt()


def sum_over_blocks(token_shares: Tensor, block_tokens: int) -> Tensor:
    """Return the sums of ``token_shares`` [..., N] over blocks of tokens, [..., M]."""
    return sum_blocks(token_shares, block_tokens, -(-token_shares.shape[-1] // block_tokens))


def select_blocks_by_tokens(token_shares: Tensor, min_share: Tensor, block_tokens: int) -> Tensor:
    """Return a mask of the blocks with the largest sums of attention, bool [..., M].

    Let n be the smallest number of tokens whose attention sums to more than ``min_share``. As in
    the original, n // block_tokens + 1 blocks are selected, but at least as many
    as `FLEXPREFILL_MIN_TOKENS` tokens fill. All blocks are selected if ``min_share`` is 1.

    Args:
        token_shares: attention that each token receives, [..., N], sums to 1.
        min_share: fraction of the attention, in [0, 1]; broadcasts with ``token_shares``.
        block_tokens: tokens per block.
    """
    cumulative_shares = token_shares.sort(dim=-1, descending=True).values.cumsum(-1)
    num_tokens = ((cumulative_shares <= min_share) | (min_share >= 1)).sum(-1, keepdim=True) + 1
    block_shares = sum_over_blocks(token_shares, block_tokens)
    num_blocks = (num_tokens // block_tokens + 1).clamp(
        min=-(-FLEXPREFILL_MIN_TOKENS // block_tokens)
    )
    return reference.top_blocks(
        block_shares, torch.ones_like(block_shares, dtype=torch.bool), num_blocks
    )


def select_touched_blocks(
    is_kept_column: Tensor,
    is_kept_diagonal: Tensor,
    ranges: KeyRanges,
    query_block: int,
    key_block: int,
) -> Tensor:
    """Return a mask of the blocks that overlap a kept column or diagonal, bool [B, H, M_q, M_k].

    Args:
        is_kept_column: mask of the key blocks that every query keeps, bool [B, H, M_k].
        is_kept_diagonal: mask of kept distances, counted in key blocks, bool [B, H, M_k]. If entry
            t is True, a query keeps the key block that is t blocks before the query's own key
            block.
        ranges: ranges of the queries over the keys.
        query_block: tokens per query block.
        key_block: tokens per key block.
    """
    block_rows = ranges.rows(query_block)
    key_block_indices = torch.arange(is_kept_column.shape[-1], device=is_kept_column.device)
    has_queries = block_rows.queries > 0
    # [B, M_q, M_k]: smallest and largest distance between a query of the row and the key block
    min_distances, max_distances = (
        (query_positions.long().where(has_queries, -1) // key_block).unsqueeze(-1)
        - key_block_indices
        for query_positions in (block_rows.min_last, block_rows.max_last)
    )
    # [B, H, M_k + 1], entry t: number of kept diagonals below t
    kept_diagonal_counts = F.pad(is_kept_diagonal.cumsum(-1), (1, 0))

    def count_kept_below(distance: Tensor) -> Tensor:
        gather_indices = distance.clamp(0, is_kept_column.shape[-1]).flatten(1).unsqueeze(1)
        counts_below = kept_diagonal_counts.gather(
            -1, gather_indices.expand(-1, kept_diagonal_counts.shape[1], -1)
        )
        return counts_below.unflatten(-1, distance.shape[1:])

    return is_kept_column.unsqueeze(2) | (
        count_kept_below(max_distances + 1) > count_kept_below(min_distances)
    )


register_predictor("vertical_slash", VerticalSlashPredictor)
register_predictor("flexprefill", FlexPrefillPredictor)
TOP_P_PREDICTORS["flexprefill"] = FlexPrefillPredictor
