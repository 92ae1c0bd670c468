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
    SHARES,
    ScorePredictor,
    SharePredictor,
    average_blocks,
    compute_block_weights,
    compute_pooled_mass,
    normalise,
    select_fewest,
)
from cab_hf.eval.methods.caches import last_queries, sum_columns_and_diagonals
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, register_predictor
from cab_hf.predictors.attention_mass import sum_blocks

ASKING_QUERIES = 64  # vertical_slash: number of the last queries whose attention scores all blocks
# FlexPrefill: a head whose `compute_root_divergence` is below TAU uses the mean-pooled estimate
TAU = 0.1
MIN_TOKENS = 1024  # FlexPrefill: smallest number of tokens in columns, and in diagonals, of a head


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
        super().__init__(config, default_share=0.95)

    def keep(
        self, q: Tensor, k: Tensor, call: LayerContext, visible: Tensor, forced: Tensor
    ) -> Tensor:
        self.refuse_packed(call.ranges)
        query_block, key_block = self.config.query_block, self.config.key_block
        ranges = call.ranges
        gamma = torch.tensor(self.share, device=q.device, dtype=torch.float64)
        # [B, H, N_k] each, sums to 1: attention of the last query block per key, and per distance
        columns, diagonals = map(
            normalise,
            sum_columns_and_diagonals(
                q=q, k=k, ranges=ranges, scale=call.scale, num_queries=query_block
            ),
        )
        pooled = estimate_last_block(
            q=q,
            keys=average_blocks(k, ranges.key_valid, key_block),
            ranges=ranges,
            scale=call.scale,
            query_block=query_block,
            key_block=key_block,
        )
        # bool [B, H]
        is_query_aware = compute_root_divergence(pooled, sum_over_blocks(columns, key_block)) < TAU
        # query-aware heads keep only `MIN_TOKENS` tokens of columns and of diagonals
        min_share = gamma.where(~is_query_aware.unsqueeze(-1), 0.0)
        keep = select_touched_blocks(
            columns=select_blocks_by_tokens(columns, min_share, key_block),
            diagonals=select_blocks_by_tokens(diagonals, min_share, key_block),
            ranges=ranges,
            query_block=query_block,
            key_block=key_block,
        )
        group = q.shape[1] // k.shape[1]
        for head in is_query_aware.any(0).nonzero().flatten().tolist():
            mass = compute_pooled_mass(q[:, [head]], k[:, [head // group]], call, **self.blocks)
            # [B, 1, M_q * M_k]: mass of each block, divided by that of all rows together, so that
            # rows with flat attention keep more blocks
            share = normalise(mass.flatten(2))
            all_blocks = torch.ones_like(share, dtype=torch.bool)
            best = select_fewest(share, all_blocks, ~all_blocks, self.share).view_as(mass)
            keep[:, head] |= best[:, 0] & is_query_aware[:, head, None, None]
        return keep


class VerticalSlashPredictor(ScorePredictor):
    """A predictor that keeps the top-k blocks of each row by `score_vertical_slash`.

    Packed documents raise an error.
    """

    def __init__(self, config: CabConfig) -> None:
        super().__init__(config, score_vertical_slash)

    def keep(
        self, q: Tensor, k: Tensor, call: LayerContext, visible: Tensor, forced: Tensor
    ) -> Tensor:
        self.refuse_packed(call.ranges)
        return super().keep(q=q, k=k, call=call, visible=visible, forced=forced)


def score_vertical_slash(
    q: Tensor,
    k: Tensor,
    call: LayerContext,
    query_block: int,
    key_block: int,
    num_queries: int = ASKING_QUERIES,
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
    kv_length, ranges = k.shape[2], call.ranges
    # [B, H, N_k] each
    by_key, by_distance = sum_columns_and_diagonals(
        q=q, k=k, ranges=ranges, scale=call.scale, num_queries=num_queries
    )
    columns = F.pad(by_key, (0, -kv_length % key_block)).unflatten(-1, (-1, key_block))
    # [B, H, 1, M_k]
    columns = columns.amax(-1).unsqueeze(2)

    # a diagonal touches a block if its distance is at least that between the first query of the
    # query block and the last key of the key block
    rows = ranges.rows(query_block)
    last_keys = torch.arange(key_block - 1, kv_length + key_block - 1, key_block, device=q.device)
    first_queries = rows.min_last.long().where(rows.queries > 0, 0)
    # [B, M_q, M_k]
    smallest = first_queries.unsqueeze(-1) - last_keys
    # distances to later keys are negative, and have score 0
    num_negative = query_block + key_block - 2
    window = (smallest + num_negative).clamp(0, kv_length - 1 + num_negative)
    # entry t: the maximum score of the distances t - num_negative to t
    padded = F.pad(by_distance, (num_negative, num_negative))
    best = F.max_pool1d(padded, num_negative + 1, stride=1)
    index = window.flatten(1).unsqueeze(1).expand(-1, best.shape[1], -1)
    diagonals = best.gather(-1, index).unflatten(-1, window.shape[1:])
    return torch.maximum(columns, diagonals)


def estimate_last_block(
    q: Tensor, keys: Tensor, ranges: KeyRanges, scale: float, query_block: int, key_block: int
) -> Tensor:
    """Estimate the attention of the last ``query_block`` queries to key blocks by mean pooling.

    Args:
        q: [B, H, N_q, D].
        keys: means of the key blocks, [B, H_kv, M_k, D].
        ranges: ranges of the queries over the keys.
        scale: factor of the logits.
        query_block: number of the last queries.
        key_block: tokens per key block.

    Returns:
        [B, H, M_k]: the softmax over key blocks of the logits of the mean query with the mean keys.
    """
    # [B, R], -1 for missing queries
    query = last_queries(ranges, query_block)
    index = query.clamp(min=0)[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
    is_valid = (query >= 0)[:, None, :, None]
    total = (q.gather(2, index).float() * is_valid).sum(2, keepdim=True)
    mean = total / is_valid.sum(2, keepdim=True).clamp(min=1)
    first, last = (x.gather(1, query.clamp(min=0)) for x in (ranges.start, ranges.end))
    start = torch.arange(0, ranges.kv_length, key_block, device=q.device)
    # [B, M_k]: key blocks to which at least one of the last queries may attend
    visible = (start <= last.amax(-1, keepdim=True)) & (start + key_block > first[:, :1])
    return compute_block_weights(mean, keys, visible[:, None, None], scale).squeeze(2)


def compute_root_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return the square root of the Jensen-Shannon divergence of distributions, in nats.

    Args:
        p, q: probabilities over the last dimension.
    """
    mean = (p + q) / 2
    # xlogy(0, 0) is 0
    terms = torch.xlogy(p, p) + torch.xlogy(q, q) - 2 * torch.xlogy(mean, mean)
    return (terms.sum(-1) / 2).clamp(min=0).sqrt()


def sum_over_blocks(token_shares: Tensor, block_tokens: int) -> Tensor:
    """Return the sums of ``token_shares`` [..., N] over blocks of tokens, [..., M]."""
    return sum_blocks(token_shares, block_tokens, -(-token_shares.shape[-1] // block_tokens))


def select_blocks_by_tokens(token_shares: Tensor, min_share: Tensor, block_tokens: int) -> Tensor:
    """Return a mask of the blocks with the largest sums of attention, bool [..., M].

    Let n be the smallest number of tokens whose attention sums to more than ``min_share``. As in
    the original, n // size + 1 blocks are selected, but at least as many as `MIN_TOKENS` tokens
    fill. All blocks are selected if ``min_share`` is 1.

    Args:
        token_shares: attention that each token receives, [..., N], sums to 1.
        min_share: fraction of the attention, in [0, 1]; broadcasts with ``token_shares``.
        block_tokens: tokens per block.
    """
    cumulative = token_shares.sort(dim=-1, descending=True).values.cumsum(-1)
    tokens = ((cumulative <= min_share) | (min_share >= 1)).sum(-1, keepdim=True) + 1
    blocks = sum_over_blocks(token_shares, block_tokens)
    count = (tokens // block_tokens + 1).clamp(min=-(-MIN_TOKENS // block_tokens))
    return reference.top_blocks(blocks, torch.ones_like(blocks, dtype=torch.bool), count)


def select_touched_blocks(
    columns: Tensor, diagonals: Tensor, ranges: KeyRanges, query_block: int, key_block: int
) -> Tensor:
    """Return a mask of the blocks that overlap a kept column or diagonal, bool [B, H, M_q, M_k].

    Args:
        columns: mask of the key blocks that every query keeps, bool [B, H, M_k].
        diagonals: mask of kept distances, counted in key blocks, bool [B, H, M_k]. If entry t is
            True, a query keeps the key block that is t blocks before the query's own key block.
        ranges: ranges of the queries over the keys.
        query_block: tokens per query block.
        key_block: tokens per key block.
    """
    rows = ranges.rows(query_block)
    block = torch.arange(columns.shape[-1], device=columns.device)
    has_queries = rows.queries > 0
    # [B, M_q, M_k]: smallest and largest distance between a query of the row and the key block
    smallest, largest = (
        (position.long().where(has_queries, -1) // key_block).unsqueeze(-1) - block
        for position in (rows.min_last, rows.max_last)
    )
    # [B, H, M_k + 1], entry t: number of kept diagonals below t
    counts = F.pad(diagonals.cumsum(-1), (1, 0))

    def count_below(distance: Tensor) -> Tensor:
        index = distance.clamp(0, columns.shape[-1]).flatten(1).unsqueeze(1)
        below = counts.gather(-1, index.expand(-1, counts.shape[1], -1))
        return below.unflatten(-1, distance.shape[1:])

    return columns.unsqueeze(2) | (count_below(largest + 1) > count_below(smallest))


register_predictor("vertical_slash", VerticalSlashPredictor)
register_predictor("flexprefill", FlexPrefillPredictor)
SHARES["flexprefill"] = FlexPrefillPredictor
