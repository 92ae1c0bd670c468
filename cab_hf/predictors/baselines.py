"""What CAB is held against: predictors of other papers, and bounds.

``streaming`` keeps a window. ``random``, ``antidiagonal``, ``vertical_slash`` and ``oracle`` keep a
row's forced blocks and its best by a score, 1 - sparsity of it in all. ``xattention`` and
``xattention_16`` keep what holds a share of an estimated mass, as their authors do.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.ops import reference
from cab_hf.plan import BlockPlan, Spans, block_visibility
from cab_hf.predictors.attention_mass import block_mass
from cab_hf.predictors.base import LayerContext, Predictor, sparsity_of

ANTIDIAGONAL_STRIDE = 8  # of XAttention's 8 and 16 the finer one
# the default of its authors' function; their LLaMA runs have a threshold a head, see its predictor
XATTENTION_THRESHOLD = 0.8
POOLED_THRESHOLD = 0.95  # of mean_pooled
ASKING_QUERIES = 64  # of vertical_slash: the last queries, whose attention ranks all blocks
SEED = 0  # of the random blocks


class StreamingPredictor(Predictor):
    """StreamingLLM: ``sink_blocks`` and ``local_blocks`` (Xiao et al. 2023, arXiv 2309.17453)."""

    def gathers(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        return ()

    def choose(self, q: Tensor, summary: Tensor, call: LayerContext) -> BlockPlan:
        query_block, key_block = self.config.query_block, self.config.key_block
        visible = block_visibility(call.spans, query_block, key_block)
        keep = reference.forced_blocks(visible, call.spans, self.config).unsqueeze(1)
        keep = keep.expand(-1, q.shape[1], -1, -1)
        return BlockPlan.from_dense(keep, call.spans, query_block=query_block, key_block=key_block)


class ScorePredictor(Predictor):
    """Base of predictors that rank blocks: forced ones and the best, 1 - ``sparsity`` of a row."""

    @abstractmethod
    def score(self, q: Tensor, k: Tensor, call: LayerContext) -> Tensor:
        """What ranks the key blocks of a row, highest kept: [B, H, M_q, M_k]."""

    def choose(self, q: Tensor, summary: Tensor, call: LayerContext) -> BlockPlan:
        config, spans = self.config, call.spans
        visible = block_visibility(spans, config.query_block, config.key_block)
        forced = reference.forced_blocks(visible, spans, config).unsqueeze(1)
        dropped = torch.tensor(
            sparsity_of(config, call.layer, q.shape[1]), device=q.device, dtype=torch.float64
        )
        visible = visible.unsqueeze(1)
        share = (1 - dropped[:, None, None]).clamp(max=config.max_density)
        wanted = reference.share_of_row(visible, share).maximum(forced.sum(-1, keepdim=True))
        score = self.score(q, summary, call)
        wanted = wanted.squeeze(-1).expand(score.shape[:3])
        keep = reference.best_of_rows(score, visible, forced, wanted)
        return BlockPlan.from_dense(
            keep, spans, query_block=config.query_block, key_block=config.key_block
        )


class RandomPredictor(ScorePredictor):
    """Random blocks, others for every head and row: the lower bar.

    Drawn anew for other shapes or other keys: a layer replayed by gradient checkpointing, and a run
    repeated, choose the same blocks; two samples do not, or their outcomes would not be
    independent. Packed or in another batch a text gets other blocks than alone, as random.
    """

    def score(self, q: Tensor, k: Tensor, call: LayerContext) -> Tensor:
        content = f"{SEED} {tuple(q.shape)} {tuple(k.shape)} {float(k.double().sum()):.6e}"
        digest = hashlib.sha256(content.encode()).digest()
        generator = torch.Generator(q.device).manual_seed(int.from_bytes(digest[:6], "big"))
        rows = -(-q.shape[2] // self.config.query_block)
        blocks = -(-k.shape[2] // self.config.key_block)
        return torch.rand(*q.shape[:2], rows, blocks, generator=generator, device=q.device)


class AntidiagonalPredictor(ScorePredictor):
    """XAttention's score, strided antidiagonal sums (Xu et al. 2025, arXiv 2503.16428).

    The original keeps blocks up to a share of the mass; here it is a share of each row.
    """

    stride = ANTIDIAGONAL_STRIDE

    def score(self, q: Tensor, k: Tensor, call: LayerContext) -> Tensor:
        blocks = self.config.query_block, self.config.key_block
        return block_mass(q, k, call.spans, call.scale, *blocks, stride=self.stride)


class OraclePredictor(AntidiagonalPredictor):
    """The true attention mass of every block, from exact attention: costs more than attending."""

    stride = 1


class XAttentionPredictor(Predictor):
    """XAttention as it was published (Xu et al. 2025, arXiv 2503.16428), at stride 8.

    The logit of a tile of stride x stride tokens is the mean over its antidiagonal. The softmax of
    a row of tiles, summed over blocks, estimates their mass, and a row keeps the fewest blocks that
    hold ``top_p`` of it, forced ones counted; None stands for a threshold of 0.8.

    Here the forced blocks are those of the config, where the original forces the first and the
    diagonal one, and blocks have its sizes, where the original has 128 x 128. One threshold holds
    for all heads. That is not what the authors use for language models:
    their runs of LLaMA load a threshold for each head, in the mean 0.76 at stride 8 and 0.91 at 16,
    found by a search that is left out here. 0.8 is the default of their function.
    """

    stride = ANTIDIAGONAL_STRIDE

    def choose(self, q: Tensor, summary: Tensor, call: LayerContext) -> BlockPlan:
        config, spans = self.config, call.spans
        blocks = config.query_block, config.key_block
        top_p = XATTENTION_THRESHOLD if config.top_p is None else config.top_p
        visible = block_visibility(spans, *blocks)
        forced = reference.forced_blocks(visible, spans, config).unsqueeze(1)
        mass = block_mass(q, summary, spans, call.scale, *blocks, stride=self.stride)
        share = mass / mass.sum(-1, keepdim=True).clamp(min=reference.LEAST)
        keep = reference.top_p_blocks(
            share.log(),
            forced.expand_as(share),
            visible.unsqueeze(1).expand_as(share),
            torch.tensor(top_p, device=q.device, dtype=torch.float64),
            share.shape[-1],
        )
        return BlockPlan.from_dense(keep, spans, query_block=blocks[0], key_block=blocks[1])


class XAttention16Predictor(XAttentionPredictor):
    """The same at stride 16, the coarser and faster one of its two."""

    stride = 16


class VerticalSlashPredictor(ScorePredictor):
    """MInference's vertical-slash pattern (Jiang et al. 2024, arXiv 2407.02490), at block grain.

    The attention of the text's last `ASKING_QUERIES` queries is summed over columns (keys) and over
    diagonals (distances between query and key). A block scores what the best column or diagonal
    that touches it has. The original keeps a fixed number of columns and of diagonals for a head,
    token by token, and its kernel gathers single columns; here every row keeps its share of blocks,
    whichever of the two touches them, and a column costs a whole key block in every row. At as many
    (query, key) pairs it therefore loses more of the attention than MInference does.

    Which blocks any row keeps depends on the end of the text, as in the original; where a text is
    read in chunks, on the end of the row's chunk. Packed documents are refused.
    """

    def score(self, q: Tensor, k: Tensor, call: LayerContext) -> Tensor:
        self.refuse_packed(call.spans)
        blocks = self.config.query_block, self.config.key_block
        return vertical_slash_scores(q, k, call.spans, call.scale, *blocks)


def vertical_slash_scores(
    q: Tensor,
    k: Tensor,
    spans: Spans,
    scale: float,
    query_block: int,
    key_block: int,
    asking: int = ASKING_QUERIES,
) -> Tensor:
    """The best column or diagonal that touches each block, float32 [B, H, M_q, M_k].

    Columns and diagonals are ranked by the attention they get from the last ``asking`` real queries
    of each batch row.

    Args:
        q: [B, H, N_q, D]. k: [B, H_kv, N_k, D].
    """
    kv_length = k.shape[2]
    vertical, slash = columns_and_diagonals(q, k, spans, scale, asking)
    columns = F.pad(vertical, (0, -kv_length % key_block)).unflatten(-1, (-1, key_block))
    columns = columns.amax(-1).unsqueeze(2)

    # a block is touched by the distances of its first query to its last key, and so on upwards
    rows = spans.rows(query_block)
    ends = torch.arange(key_block - 1, kv_length + key_block - 1, key_block, device=q.device)
    begins = rows.min_last.long().where(rows.queries > 0, 0)
    nearest = begins.unsqueeze(-1) - ends
    # behind as many zeros as the nearest may be below none
    zeros = query_block + key_block - 2
    window = (nearest + zeros).clamp(0, kv_length - 1 + zeros)
    # entry t: the best of the distances t - zeros to t
    best = F.max_pool1d(F.pad(slash, (zeros, zeros)), zeros + 1, stride=1)
    place = window.flatten(1).unsqueeze(1).expand(-1, best.shape[1], -1)
    diagonals = best.gather(-1, place).unflatten(-1, window.shape[1:])
    return torch.maximum(columns, diagonals)


def last_queries(spans: Spans, count: int) -> Tensor:
    """int64 [B, R]: the last ``count`` real queries of each batch row, -1 for those it lacks."""
    query = torch.arange(spans.q_length, device=spans.last.device).where(spans.last >= 0, -1)
    return query.topk(min(count, spans.q_length), dim=-1).values


def columns_and_diagonals(
    q: Tensor, k: Tensor, spans: Spans, scale: float, asking: int
) -> tuple[Tensor, Tensor]:
    """Attention of the last ``asking`` real queries, summed over them: by key, and by distance.

    Args:
        q: [B, H, N_q, D]. k: [B, H_kv, N_k, D].

    Returns:
        Two of float32 [B, H, N_k]: what each key receives, and each distance from query to key.
    """
    heads, (kv_heads, kv_length) = q.shape[1], k.shape[1:3]
    key = torch.arange(kv_length, device=q.device)
    query = last_queries(spans, asking)
    # [B, R]: where these queries stand among the keys
    first = spans.first.gather(1, query.clamp(min=0)).long()
    last = spans.last.gather(1, query.clamp(min=0)).long().where(query >= 0, -1)
    seen = (key >= first.unsqueeze(-1)) & (key <= last.unsqueeze(-1)) & spans.key_valid[:, None]
    mask = seen.unsqueeze(1)
    # [B, 1, R, N_k]: the key at each distance before a query
    far = (last.unsqueeze(-1) - key).unsqueeze(1)

    sums = []
    for head in range(kv_heads):
        group = slice(head * heads // kv_heads, (head + 1) * heads // kv_heads)
        index = query.clamp(min=0)[:, None, :, None].expand(-1, -1, -1, q.shape[-1])
        own = q[:, group]
        own = own.gather(2, index.expand(-1, own.shape[1], -1, -1)).float()
        logits = own @ k[:, head : head + 1].float().transpose(-1, -2) * scale
        attention = logits.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)
        by_distance = attention.gather(-1, far.clamp(min=0).expand_as(attention))
        sums.append((attention.sum(2), by_distance.masked_fill(far < 0, 0.0).sum(2)))
    vertical, slash = zip(*sums, strict=True)
    return torch.cat(vertical, dim=1), torch.cat(slash, dim=1)


class MeanPooledPredictor(Predictor):
    """Block scores of mean-pooled queries and keys, a row's best up to a share of their softmax.

    Pooled as in MInference's block-sparse heads (Jiang et al. 2024, arXiv 2407.02490), chosen by
    top-p of each row, where FlexPrefill (Lai et al. 2025, arXiv 2502.20766) has it over all rows
    together. ``top_p`` None stands for 0.95.
    """

    def choose(self, q: Tensor, summary: Tensor, call: LayerContext) -> BlockPlan:
        config, spans = self.config, call.spans
        blocks = config.query_block, config.key_block
        visible = block_visibility(spans, *blocks)
        forced = reference.forced_blocks(visible, spans, config).unsqueeze(1)
        queries = reference.block_means(q, spans.last >= 0, config.query_block)
        keys = reference.block_means(summary, spans.key_valid, config.key_block)
        logits = reference.block_logits(queries, keys, call.scale)
        visible = visible.unsqueeze(1)
        mass = reference.block_log_mass(logits, visible)
        top_p = POOLED_THRESHOLD if config.top_p is None else config.top_p
        top_p = torch.tensor(top_p, device=q.device, dtype=torch.float64)
        parts = forced.expand_as(mass), visible.expand_as(mass)
        keep = reference.top_p_blocks(mass, *parts, top_p, mass.shape[-1])
        return BlockPlan.from_dense(keep, spans, query_block=blocks[0], key_block=blocks[1])
