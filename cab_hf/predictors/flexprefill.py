"""FlexPrefill: each head takes its pattern, and how much of it, by what the last queries attend."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.ops import reference
from cab_hf.plan import BlockPlan, Spans, block_visibility
from cab_hf.predictors.attention_mass import block_sums
from cab_hf.predictors.base import LayerContext, Predictor
from cab_hf.predictors.baselines import columns_and_diagonals, last_queries

GAMMA = 0.95  # share of attention that a head is to hold
TAU = 0.1  # divergence below which the pooled estimate of a head is believed
MIN_TOKENS = 1024  # the least that a head keeps in columns, and in diagonals


class FlexPrefillPredictor(Predictor):
    """FlexPrefill (Lai et al. 2025, arXiv 2502.20766), at block grain.

    The last block of queries is attended exactly. Mean-pooled queries and keys estimate the same by
    block; where the square root of the Jensen-Shannon divergence of both is below tau = 0.1, the
    head is query-aware: the estimate is made for all rows, and the fewest blocks are kept that hold
    gamma of it over all rows together. Any other head is vertical-slash: n is the smallest number
    of columns, token by token, that hold more than gamma of what the last block attends, and the
    n // key_block + 1 best blocks of columns are kept, whatever these hold; diagonals alike. gamma
    is ``top_p``, None for 0.95. Every head keeps 1,024 tokens of columns and of diagonals at least,
    which is the minimum of the paper as far as we know; the README of its code has gamma 0.9 and
    512 tokens.

    Here forced blocks are those of the config, on top of these, where the original forces the first
    and the diagonal one and counts them; and blocks have the sizes of the config, where the
    original has 128 x 128.

    Which blocks any row keeps depends on the end of the text, as in the original; where a text is
    read in chunks, on the end of the row's chunk. Packed documents are refused.
    """

    def choose(self, q: Tensor, summary: Tensor, call: LayerContext) -> BlockPlan:
        self.refuse_packed(call.spans)
        config, spans, k = self.config, call.spans, summary
        blocks = config.query_block, config.key_block
        gamma = torch.tensor(
            GAMMA if config.top_p is None else config.top_p, device=q.device, dtype=torch.float64
        )
        # [B, H, N_k] each, of sum 1: shares of keys, and of distances
        columns, diagonals = map(
            _normalised, columns_and_diagonals(q, k, spans, call.scale, config.query_block)
        )
        keys = reference.block_means(k, spans.key_valid, config.key_block)
        pooled = pooled_last_block(q, keys, spans, call.scale, *blocks)
        # [B, H]: heads whose estimate is believed; the minimum is all that they keep of a pattern
        aware = root_divergence(pooled, in_blocks(columns, config.key_block)) < TAU
        asked = gamma.where(~aware.unsqueeze(-1), 0.0)
        kept = (counted_by_token(x, asked, config.key_block) for x in (columns, diagonals))
        keep = touched(*kept, spans, *blocks)

        visible = block_visibility(spans, *blocks)
        queries = reference.block_means(q, spans.last >= 0, config.query_block)
        group = q.shape[1] // k.shape[1]
        for head in aware.any(0).nonzero().flatten().tolist():
            own = keys[:, [head // group]]
            logits = reference.block_logits(queries[:, [head]], own, call.scale)
            share = reference.block_log_mass(logits, visible.unsqueeze(1)).exp()
            # over all rows together: rows that are spread out keep more
            held = fewest(_normalised(share.flatten(2)), gamma).view_as(share)
            keep[:, head] |= held[:, 0] & aware[:, head, None, None]
        keep = keep & visible.unsqueeze(1)
        keep = keep | reference.forced_blocks(visible, spans, config).unsqueeze(1)
        return BlockPlan.from_dense(keep, spans, query_block=blocks[0], key_block=blocks[1])


def _normalised(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp(min=reference.LEAST)


def pooled_last_block(
    q: Tensor, keys: Tensor, spans: Spans, scale: float, query_block: int, block: int
) -> Tensor:
    """The pooled estimate of what the last ``query_block`` real queries attend: [B, H, M_k].

    The softmax over key blocks of their mean against the mean of each.
    """
    query = last_queries(spans, query_block)
    index = query.clamp(min=0)[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
    real = (query >= 0)[:, None, :, None]
    total = (q.gather(2, index).float() * real).sum(2, keepdim=True)
    mean = total / real.sum(2, keepdim=True).clamp(min=1)
    first, last = (x.gather(1, query.clamp(min=0)) for x in (spans.first, spans.last))
    start = torch.arange(0, spans.kv_length, block, device=q.device)
    # [B, 1, 1, M_k]: the blocks that one of them sees
    begun = (start <= last.amax(-1, keepdim=True)) & (start + block > first[:, :1])
    logits = reference.block_logits(mean, keys, scale)
    return reference.block_log_mass(logits, begun[:, None, None]).exp().squeeze(2)


def root_divergence(p: Tensor, q: Tensor) -> Tensor:
    """The square root of the Jensen-Shannon divergence, in nats, over the last dimension."""
    middle = (p + q) / 2
    # 0 log 0 is 0, and where the middle is 0 both are
    parts = torch.xlogy(p, p) + torch.xlogy(q, q) - 2 * torch.xlogy(middle, middle)
    return (parts.sum(-1) / 2).clamp(min=0).sqrt()


def in_blocks(share: Tensor, size: int) -> Tensor:
    """[..., N] -> [..., M]: what blocks of ``size`` tokens hold together."""
    return block_sums(share, size, -(-share.shape[-1] // size))


def counted_by_token(share: Tensor, wanted: Tensor, size: int) -> Tensor:
    """bool [..., M]: the best blocks of ``size`` tokens, as many as the original keeps.

    With n the smallest number of tokens that hold more than ``wanted``, they are n // size + 1, and
    at least those of `MIN_TOKENS`. All are kept where ``wanted`` is 1.

    Args:
        share: [..., N], of sum 1 over tokens.
        wanted: broadcasts with ``share``.
    """
    held = share.sort(dim=-1, descending=True).values.cumsum(-1)
    tokens = ((held <= wanted) | (wanted >= 1)).sum(-1, keepdim=True) + 1
    blocks = in_blocks(share, size)
    count = (tokens // size + 1).clamp(min=-(-MIN_TOKENS // size))
    return reference.top_blocks(blocks, torch.ones_like(blocks, dtype=torch.bool), count)


def fewest(share: Tensor, wanted: Tensor) -> Tensor:
    """bool like ``share``: the fewest entries that hold ``wanted`` of each row.

    ``wanted`` broadcasts with ``share``.
    """
    everything = torch.ones_like(share, dtype=torch.bool)
    return reference.top_p_blocks(share.log(), ~everything, everything, wanted, share.shape[-1])


def touched(
    columns: Tensor, diagonals: Tensor, spans: Spans, query_block: int, key_block: int
) -> Tensor:
    """The blocks of each row in a kept column or on a kept diagonal, bool [B, H, M_q, M_k].

    Args:
        columns: bool [B, H, M_k], by key block.
        diagonals: bool [B, H, M_k], by distance in key blocks: entry t stands for the key blocks t
            before those that hold the row's own positions.
    """
    rows = spans.rows(query_block)
    block = torch.arange(columns.shape[-1], device=columns.device)
    inhabited = rows.queries > 0
    near, far = (
        (position.long().where(inhabited, -1) // key_block).unsqueeze(-1) - block
        for position in (rows.min_last, rows.max_last)
    )
    # entry t: how many of the diagonals before t are kept
    before = F.pad(diagonals.cumsum(-1), (1, 0))

    def kept_before(distance: Tensor) -> Tensor:
        place = distance.clamp(0, columns.shape[-1]).flatten(1).unsqueeze(1)
        found = before.gather(-1, place.expand(-1, before.shape[1], -1))
        return found.unflatten(-1, distance.shape[1:])

    return columns.unsqueeze(2) | (kept_before(far + 1) > kept_before(near))
