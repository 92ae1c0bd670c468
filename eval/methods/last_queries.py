"""Methods that select all blocks by the attention of the last queries of a sequence.

If a sequence is read in chunks, these are the last queries of the row's chunk. Packed documents
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
    block_means,
    fewest,
    normalised,
    pooled_mass,
    share_of_blocks,
)
from cab_hf.eval.methods.caches import columns_and_diagonals, last_queries
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, register_predictor
from cab_hf.predictors.attention_mass import block_sums

ASKING_QUERIES = 64  # vertical_slash
TAU = 0.1  # FlexPrefill: the divergence below which the pooled estimate of a head is used
MIN_TOKENS = 1024  # FlexPrefill: minimum tokens of a head in columns, and in diagonals


class FlexPrefillPredictor(SharePredictor):
    """FlexPrefill (Lai et al. 2025, arXiv 2502.20766), with blocks instead of tokens.

    The last block of queries is attended exactly, and mean-pooled queries and keys estimate the
    same by block. If the square root of the Jensen-Shannon divergence of both is below tau = 0.1,
    the head is query-aware: the estimate is computed for all rows, and the fewest blocks with gamma
    = 0.95 of it over all rows together are kept.

    Any other head is vertical-slash: n is the smallest number of columns, token by token, with more
    than gamma of the last block's attention. The n // key_block + 1 best blocks of columns are
    kept, and diagonals alike. Every head keeps at least 1,024 tokens of columns and of diagonals,
    which is the minimum of the paper as far as we know; the README of its code has gamma 0.9 and
    512 tokens.
    """

    def __init__(self, config: CabConfig) -> None:
        super().__init__(config, usual=0.95)

    def keep(self, q: Tensor, k: Tensor, call: LayerContext, seen: Tensor, must: Tensor) -> Tensor:
        self.refuse_packed(call.ranges)
        (query_block, key_block), ranges = self.blocks, call.ranges
        gamma = torch.tensor(self.share, device=q.device, dtype=torch.float64)
        # [B, H, N_k] each, sums to 1: shares of keys, and of distances
        columns, diagonals = map(
            normalised, columns_and_diagonals(q, k, ranges, call.scale, query_block)
        )
        keys = block_means(k, ranges.key_valid, key_block)
        pooled = pooled_last_block(q, keys, ranges, call.scale, query_block, key_block)
        # [B, H]: heads whose estimate is used; of the pattern they keep only the minimum
        aware = root_divergence(pooled, in_blocks(columns, key_block)) < TAU
        asked = gamma.where(~aware.unsqueeze(-1), 0.0)
        kept = (counted_by_token(x, asked, key_block) for x in (columns, diagonals))
        keep = touched(*kept, ranges, query_block, key_block)
        group = q.shape[1] // k.shape[1]
        for head in aware.any(0).nonzero().flatten().tolist():
            own = q[:, [head]], k[:, [head // group]]
            # over all rows together: rows with flat attention keep more
            share = pooled_mass(*own, call, *self.blocks)
            together = normalised(share.flatten(2))
            everything = torch.ones_like(together, dtype=torch.bool)
            held = fewest(together, everything, ~everything, self.share).view_as(share)
            keep[:, head] |= held[:, 0] & aware[:, head, None, None]
        return keep


class VerticalSlashPredictor(ScorePredictor):
    """Top-k blocks by `vertical_slash_scores`; packed documents raise an error."""

    def __init__(self, config: CabConfig) -> None:
        super().__init__(config, vertical_slash_scores)

    def keep(self, q: Tensor, k: Tensor, call: LayerContext, seen: Tensor, must: Tensor) -> Tensor:
        self.refuse_packed(call.ranges)
        return super().keep(q, k, call, seen, must)


def vertical_slash_scores(
    q: Tensor,
    k: Tensor,
    call: LayerContext,
    query_block: int,
    key_block: int,
    asking: int = ASKING_QUERIES,
) -> Tensor:
    """Score blocks by MInference's vertical-slash pattern (Jiang et al. 2024, arXiv 2407.02490).

    The attention of each sequence's last ``asking`` queries is summed over columns (keys) and over
    diagonals (distances between query and key). The score of a block is that of the best column or
    diagonal that touches it. Padding queries do not count.

    The original keeps a fixed number of columns and of diagonals per head, token by token, and its
    kernel gathers single columns. Here every row keeps its share of blocks, and a column costs a
    whole key block in every row. At an equal number of (query, key) pairs it therefore loses more
    attention than MInference.
    """
    kv_length, ranges = k.shape[2], call.ranges
    vertical, slash = columns_and_diagonals(q, k, ranges, call.scale, asking)
    columns = F.pad(vertical, (0, -kv_length % key_block)).unflatten(-1, (-1, key_block))
    columns = columns.amax(-1).unsqueeze(2)

    # distances between a block's first query and the key block's last key and upwards touch the
    # block
    rows = ranges.rows(query_block)
    ends = torch.arange(key_block - 1, kv_length + key_block - 1, key_block, device=q.device)
    begins = rows.min_last.long().where(rows.queries > 0, 0)
    nearest = begins.unsqueeze(-1) - ends
    # negative distances between queries and later keys have score 0
    num_negative = query_block + key_block - 2
    window = (nearest + num_negative).clamp(0, kv_length - 1 + num_negative)
    # entry t: the maximum score of distances t - num_negative to t
    padded = F.pad(slash, (num_negative, num_negative))
    best = F.max_pool1d(padded, num_negative + 1, stride=1)
    place = window.flatten(1).unsqueeze(1).expand(-1, best.shape[1], -1)
    diagonals = best.gather(-1, place).unflatten(-1, window.shape[1:])
    return torch.maximum(columns, diagonals)


def pooled_last_block(
    q: Tensor, keys: Tensor, ranges: KeyRanges, scale: float, query_block: int, block: int
) -> Tensor:
    """Return the pooled estimate of the attention of the last ``query_block`` queries: [B, H, M_k].

    It is the softmax over key blocks of the mean query against the mean of each block.
    """
    query = last_queries(ranges, query_block)
    index = query.clamp(min=0)[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
    real = (query >= 0)[:, None, :, None]
    total = (q.gather(2, index).float() * real).sum(2, keepdim=True)
    mean = total / real.sum(2, keepdim=True).clamp(min=1)
    first, last = (x.gather(1, query.clamp(min=0)) for x in (ranges.start, ranges.end))
    start = torch.arange(0, ranges.kv_length, block, device=q.device)
    # [B, 1, 1, M_k]: blocks that are visible to any of these queries
    begun = (start <= last.amax(-1, keepdim=True)) & (start + block > first[:, :1])
    return share_of_blocks(mean, keys, begun[:, None, None], scale).squeeze(2)


def root_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return the square root of the Jensen-Shannon divergence, in nats, over the last dimension."""
    middle = (p + q) / 2
    # 0 log 0 is 0, and both are 0 where the middle is 0
    parts = torch.xlogy(p, p) + torch.xlogy(q, q) - 2 * torch.xlogy(middle, middle)
    return (parts.sum(-1) / 2).clamp(min=0).sqrt()


def in_blocks(share: Tensor, size: int) -> Tensor:
    """Sum shares over blocks of ``size`` tokens, [..., N] -> [..., M]."""
    return block_sums(share, size, -(-share.shape[-1] // size))


def counted_by_token(share: Tensor, wanted: Tensor, size: int) -> Tensor:
    """Select the best blocks of ``size`` tokens, as many as the original: bool [..., M].

    If n is the smallest number of tokens whose shares exceed ``wanted``, the number of blocks is
    n // size + 1, and at least that of `MIN_TOKENS` tokens. All blocks are kept if ``wanted`` is 1.

    Args:
        share: [..., N], sums to 1 over tokens.
        wanted: broadcasts with ``share``.
        size: tokens per block.
    """
    held = share.sort(dim=-1, descending=True).values.cumsum(-1)
    tokens = ((held <= wanted) | (wanted >= 1)).sum(-1, keepdim=True) + 1
    blocks = in_blocks(share, size)
    count = (tokens // size + 1).clamp(min=-(-MIN_TOKENS // size))
    return reference.top_blocks(blocks, torch.ones_like(blocks, dtype=torch.bool), count)


def touched(
    columns: Tensor, diagonals: Tensor, ranges: KeyRanges, query_block: int, key_block: int
) -> Tensor:
    """Return the blocks of each row in a kept column or diagonal, bool [B, H, M_q, M_k].

    Args:
        columns: bool [B, H, M_k], by key block.
        diagonals: bool [B, H, M_k], by distance in key blocks: entry t is the key block t blocks
            before that of the row's own positions.
    """
    rows = ranges.rows(query_block)
    block = torch.arange(columns.shape[-1], device=columns.device)
    inhabited = rows.queries > 0
    near, far = (
        (position.long().where(inhabited, -1) // key_block).unsqueeze(-1) - block
        for position in (rows.min_last, rows.max_last)
    )
    # entry t: number of kept diagonals before t
    before = F.pad(diagonals.cumsum(-1), (1, 0))

    def kept_before(distance: Tensor) -> Tensor:
        place = distance.clamp(0, columns.shape[-1]).flatten(1).unsqueeze(1)
        found = before.gather(-1, place.expand(-1, before.shape[1], -1))
        return found.unflatten(-1, distance.shape[1:])

    return columns.unsqueeze(2) | (kept_before(far + 1) > kept_before(near))


register_predictor("vertical_slash", VerticalSlashPredictor)
register_predictor("flexprefill", FlexPrefillPredictor)
SHARES["flexprefill"] = FlexPrefillPredictor
