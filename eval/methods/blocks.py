"""Methods that select blocks by other criteria than CAB: published baselines, random and oracle.

Each method is a predictor, registered under the method's name, so that the method runs with the
same plan, engine and model code as CAB. All methods use the block sizes and the forced blocks of
the config, even if the original method has blocks of 128 x 128 or forces other blocks.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel

from cab_hf.config import CabConfig
from cab_hf.eval.methods.base import (
    BUDGET_STEPS,
    Cab,
    Cell,
    find_nearest,
    find_nearest_on_random_qk,
    fit_sparsity,
)
from cab_hf.eval.methods.caches import make_sink_cache
from cab_hf.ops import reference
from cab_hf.plan import BlockPlan, KeyRanges, block_visibility
from cab_hf.predictors import LayerContext, Predictor, make_predictor, register_predictor
from cab_hf.predictors.attention_mass import compute_block_mass
from cab_hf.predictors.base import get_head_sparsity

# tolerance for a sum of the masses of blocks: the rounding error of thousands of float32 numbers
TOLERANCE = 1e-5
TRIANGLE_SHARE = 0.5  # TriangleMix: this fraction of the layers, the last ones, is sparse
WINDOW = 512  # TriangleMix: tokens of the window
LAST_QUERIES = 128  # TriangleMix: number of the last queries, which attend densely
SEED = 0  # seed of the random blocks
STRIDE = 8  # stride of antidiagonal sums in tokens
# function of q [B, H, N_q, D], k [B, H_kv, N_k, D], a LayerContext, query_block and key_block that
# returns a score per query block and key block, float32 [B, H, M_q, M_k]; high scores are kept
Score = Callable[..., Tensor]


class BlockPredictor(Predictor):
    """The base class of predictors whose `keep` returns a mask of kept blocks."""

    @abstractmethod
    def keep(
        self, q: Tensor, k: Tensor, call: LayerContext, visible: Tensor, forced: Tensor
    ) -> Tensor:
        """Return the kept blocks, bool, broadcastable to [B, H, M_q, M_k].

        Args:
            q: [B, H, N_q, D].
            k: [B, H_kv, N_k, D].
            call: the context of the layer.
            visible: blocks with a (query, key) pair that is not masked, bool [B, 1, M_q, M_k].
            forced: blocks that are kept in any case, bool [B, 1, M_q, M_k].
        """

    @property
    def blocks(self) -> dict[str, int]:
        """The block sizes as keyword arguments."""
        return {"query_block": self.config.query_block, "key_block": self.config.key_block}

    def choose(self, q: Tensor, summary: Tensor, call: LayerContext) -> BlockPlan:
        visible = block_visibility(call.ranges, **self.blocks)
        forced = reference.forced_blocks(visible, call.ranges, self.config).unsqueeze(1)
        visible = visible.unsqueeze(1)
        keep = self.keep(q=q, k=summary, call=call, visible=visible, forced=forced)
        keep = ((keep & visible) | forced).expand(-1, q.shape[1], -1, -1)
        return BlockPlan.from_dense(keep, call.ranges, **self.blocks)


class StreamingPredictor(BlockPredictor):
    """A predictor that keeps only forced blocks: ``sink_blocks`` and ``local_blocks``."""

    def required_inputs(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        return ()

    def keep(
        self, q: Tensor, k: Tensor, call: LayerContext, visible: Tensor, forced: Tensor
    ) -> Tensor:
        return forced


class ScorePredictor(BlockPredictor):
    """A predictor that keeps the top-k blocks of each row of blocks.

    A row keeps the fraction 1 - ``sparsity`` of its visible blocks: first the forced blocks, then
    the blocks with the highest scores.

    Args:
        config: the config.
        score: function that scores blocks.
    """

    def __init__(self, config: CabConfig, score: Score) -> None:
        super().__init__(config)
        self.score = score

    def keep(
        self, q: Tensor, k: Tensor, call: LayerContext, visible: Tensor, forced: Tensor
    ) -> Tensor:
        sparsity = torch.tensor(
            get_head_sparsity(self.config, call.layer, q.shape[1]),
            device=q.device,
            dtype=torch.float64,
        )
        share = (1 - sparsity[:, None, None]).clamp(max=self.config.max_density)
        # [B, H or 1, M_q, 1]: number of blocks that a row keeps
        count = reference.share_of_row(visible, share).maximum(forced.sum(-1, keepdim=True))
        score = self.score(q, k, call, **self.blocks)
        count = count.squeeze(-1).expand(score.shape[:3])
        return reference.select_best_blocks(score, visible, forced, count)


class SharePredictor(BlockPredictor):
    """A top-p predictor: each row keeps the fewest blocks with a fraction of its attention mass.

    The mass of forced blocks counts towards the fraction.

    Args:
        config: the config. If ``config.predictor`` has a number after a colon, such as
            "xattention:0.9", this number is the fraction; `with_mass_share` registers such
            predictors.
        default_share: the fraction for other predictors.
        score: function that estimates the mass of blocks; None for subclasses with their own
            `keep`.
    """

    def __init__(self, config: CabConfig, default_share: float, score: Score | None = None) -> None:
        super().__init__(config)
        share = config.predictor.partition(":")[2]
        self.default_share, self.score = default_share, score
        self.share = float(share) if share else default_share

    def keep(
        self, q: Tensor, k: Tensor, call: LayerContext, visible: Tensor, forced: Tensor
    ) -> Tensor:
        mass = self.score(q, k, call, **self.blocks)
        return select_fewest(normalise(mass), visible, forced, self.share)


def draw_random_scores(
    q: Tensor, k: Tensor, call: LayerContext, query_block: int, key_block: int
) -> Tensor:
    """Score blocks at random, differently for every head and row.

    The seed is computed from the shapes and the keys. Gradient checkpointing and repeated runs
    therefore select the same blocks again, and different samples get independent blocks. A sequence
    gets other blocks in a batch, or packed with other sequences, than alone.

    Returns:
        Scores in [0, 1), float32 [B, H, M_q, M_k].
    """
    content = f"{SEED} {tuple(q.shape)} {tuple(k.shape)} {float(k.double().sum()):.6e}"
    digest = hashlib.sha256(content.encode()).digest()
    generator = torch.Generator(q.device).manual_seed(int.from_bytes(digest[:6], "big"))
    rows, columns = -(-q.shape[2] // query_block), -(-k.shape[2] // key_block)
    shape = (*q.shape[:2], rows, columns)
    return torch.rand(shape, generator=generator, device=q.device)


def make_strided_score(stride: int) -> Score:
    """Return a function that scores blocks by the antidiagonal estimate of XAttention.

    As in XAttention (Xu et al. 2025, arXiv 2503.16428), the logit of a tile of stride x stride
    tokens is the mean over the antidiagonal of the tile. The softmax over a row of tiles, summed
    over the tiles of a block, estimates the mass of the block. The estimate is exact at stride 1.
    """

    def score(q: Tensor, k: Tensor, call: LayerContext, query_block: int, key_block: int) -> Tensor:
        return compute_block_mass(
            q=q,
            k=k,
            ranges=call.ranges,
            scale=call.scale,
            query_block=query_block,
            key_block=key_block,
            stride=stride,
        )

    return score


def compute_pooled_mass(
    q: Tensor, k: Tensor, call: LayerContext, query_block: int, key_block: int
) -> Tensor:
    """Score blocks by the softmax over the logits of mean-pooled queries and keys.

    MInference's block-sparse heads pool in the same way (Jiang et al. 2024, arXiv 2407.02490). The
    method mean_pooled keeps a fraction of the mass of each row. FlexPrefill (Lai et al. 2025, arXiv
    2502.20766) keeps a fraction of the mass of all rows together.

    Returns:
        Scores, float32 [B, H, M_q, M_k]; each row sums to 1.
    """
    queries = average_blocks(q, call.ranges.end >= 0, query_block)
    keys = average_blocks(k, call.ranges.key_valid, key_block)
    visible = block_visibility(call.ranges, query_block, key_block).unsqueeze(1)
    return compute_block_weights(queries, keys, visible, call.scale)


def select_fewest(shares: Tensor, visible: Tensor, forced: Tensor, min_share: float) -> Tensor:
    """Return a mask of the fewest entries, per last dimension, that sum to at least ``min_share``.

    Args:
        shares: the entries; they sum to 1 over the last dimension.
        visible: bool, entries that may be kept; broadcasts with ``shares``.
        forced: bool, entries that are kept in any case and count in the sum; broadcasts with
            ``shares``.
        min_share: the sum to reach, in [0, 1].

    Returns:
        bool, in the shape of ``shares``.
    """
    # sort forced entries before all others; the cumulative sum uses the entries of ``share``
    priority = torch.where(forced, 2.0, shares).masked_fill(~visible, -1.0)
    sort_indices = priority.argsort(dim=-1, descending=True, stable=True)
    sorted_shares = shares.gather(-1, sort_indices)
    sum_before = sorted_shares.cumsum(-1) - sorted_shares
    is_taken = (sum_before < min_share - TOLERANCE) | (min_share >= 1)
    return (is_taken.gather(-1, sort_indices.argsort(-1)) | forced) & visible


def normalise(x: Tensor) -> Tensor:
    """Return ``x`` divided by its sum over the last dimension."""
    return x / x.sum(-1, keepdim=True).clamp(min=reference.MIN_DIVISOR)


def average_blocks(x: Tensor, is_counted: Tensor, block_tokens: int) -> Tensor:
    """Return the means over blocks of tokens, float32 [B, H, M, D].

    Args:
        x: [B, H, N, D].
        is_counted: tokens that count, bool [B, N].
        block_tokens: tokens per block.
    """
    num_padding_tokens = -x.shape[2] % block_tokens
    # [B, 1, M, block]
    is_counted_in_block = (
        F.pad(is_counted, (0, num_padding_tokens)).unflatten(1, (-1, block_tokens)).unsqueeze(1)
    )
    # [B, H, M, block, D]
    blocks = F.pad(x, (0, 0, 0, num_padding_tokens)).unflatten(2, (-1, block_tokens)).float()
    total = blocks.masked_fill(~is_counted_in_block.unsqueeze(-1), 0.0).sum(-2)
    return total / is_counted_in_block.sum(-1).clamp(min=1).unsqueeze(-1)


def compute_block_weights(queries: Tensor, keys: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Return attention weights between one query per query block and one key per key block.

    Args:
        queries: one query per query block, such as the mean of its queries, [B, H, M_q, D].
        keys: one key per key block, [B, H_kv, M_k, D].
        visible: blocks over which the softmax runs, bool, broadcastable to [B, H, M_q, M_k].
        scale: factor of the logits.

    Returns:
        [B, H, M_q, M_k], 0 for blocks that are not visible.
    """
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    logits = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale
    return logits.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0.0)


@dataclass(frozen=True)
class Streaming(Cab):
    """StreamingLLM: attention sinks and a recent window (Xiao et al. 2023, arXiv 2309.17453).

    The original keeps 4 sink tokens, and a token's position is its position in the cache. Here
    sinks and window are whole key blocks: one sink block, and a window whose size matches the
    budget. Tokens keep their position ids. Keys outside the window are dropped for good: the last
    queries of a prompt have no dense tail, and decode steps read only sinks and window.
    """

    name = "streaming"
    matched = True
    decodes = "sinks and window"

    @classmethod
    def fit(cls, cell: Cell) -> Streaming:
        # no dense tail, because its queries would attend to keys outside of the window
        base = cell.shared.changed(predictor=cls.name, sink_blocks=1, dense_tail_blocks=0)
        windows = range(1, -(-cell.length // base.key_block) + 1)
        config = find_nearest_on_random_qk(
            windows, lambda window: replace(base, local_blocks=window), cell
        )
        return cls(config)

    def cache(self, model: PreTrainedModel) -> Cache:
        sinks, window = (
            blocks * self.config.key_block
            for blocks in (self.config.sink_blocks, self.config.local_blocks)
        )
        return make_sink_cache(model, sinks, sinks + window)

    def reaches(self, length: int, asking: int, needle: tuple[int, int]) -> bool:
        ranges = KeyRanges.causal(1, length, length, "cpu")
        # the plan depends only on the shape of q and k
        heads = torch.empty(1, 1, length, 0)
        keep = make_predictor(self.config)(heads, heads, LayerContext(ranges, 1.0)).to_dense()
        first, last = needle[0] // self.config.key_block, (needle[1] - 1) // self.config.key_block
        return bool(keep[0, 0, asking // self.config.query_block :, first : last + 1].any())


class Chosen(Cab):
    """The base class of methods that run `cab_hf.cab` with a predictor other than CAB's.

    Attributes:
        predictor: name of the predictor.
    """

    predictor: ClassVar[str]

    @classmethod
    def by(cls, predictor: str, name: str | None = None) -> type[Chosen]:
        """Return a subclass of this class whose blocks ``predictor`` selects.

        Args:
            predictor: name of the predictor.
            name: name of the method; None: the name of the predictor.
        """
        return type(name or predictor, (cls,), {"name": name or predictor, "predictor": predictor})


@dataclass(frozen=True)
class RowShareMethod(Chosen):
    """The base class of methods that keep the same fraction of visible blocks in every row.

    `fit` chooses the fraction by the budget. Forced blocks and the dense tail are those of CAB, and
    the matched density or time includes them.
    """

    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> RowShareMethod:
        # the density is the same for all predictors, so it is fitted with the fastest predictor;
        # the time depends on the predictor
        predictor = cls.predictor if cell.took else "random"
        fitted = fit_sparsity(cell.shared.changed(predictor=predictor), cell)
        return cls(replace(fitted, predictor=cls.predictor))


@dataclass(frozen=True)
class AuthorsShareMethod(Chosen):
    """The base class of top-p methods that keep their authors' fraction of the mass.

    These methods are not matched to a budget, and have no dense tail.
    """

    @classmethod
    def fit(cls, cell: Cell) -> AuthorsShareMethod:
        return cls(cell.shared.changed(predictor=cls.predictor, dense_tail_blocks=0))


@dataclass(frozen=True)
class MassShareMethod(Chosen):
    """The base class of top-p methods, which keep a fraction of the attention mass.

    `fit` finds the fraction at which the density (``Cell.realised``) or the time (``Cell.took``) is
    that of the budget. Forced blocks and the
    dense tail are those of CAB, and the measurements include them.
    """

    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> MassShareMethod:
        if not (cell.took or cell.realised):
            raise ValueError(
                f"cell must measure the density of a config for method {cls.name}, got "
                "realised=None. Pass Cell.realised."
            )
        shares = [step / BUDGET_STEPS for step in range(1, BUDGET_STEPS + 1)]
        base = cell.shared.changed(predictor=cls.predictor)
        config = find_nearest(
            shares, lambda share: with_mass_share(base, share), cell, cell.realised
        )
        return cls(config)


@dataclass(frozen=True)
class TriangleMix(Cab):
    """TriangleMix (He et al. 2025, arXiv 2507.21526): a triangle pattern in the deeper layers.

    In the deeper layers, a query attends to 8 sink tokens and the latest 512 tokens, and the last
    128 queries attend to all tokens. The first layers are dense, 16 of 32 for Llama-3.1-8B. These
    numbers are from the example in the authors' code.

    The paper finds the sparse layers by gradients; here the second half of the layers is sparse.
    Sinks, window and last queries are whole blocks: one sink block, the key blocks with the latest
    512 tokens of every query, and the query blocks with one of the last 128 tokens. Later queries
    of a block therefore attend to more than 512 tokens.
    """

    name = "trianglemix"

    @classmethod
    def fit(cls, cell: Cell) -> TriangleMix:
        if cell.layers is None:
            raise ValueError(
                "cell must contain the number of layers for method trianglemix, got layers=None. "
                "Pass Cell.layers."
            )
        base, num_dense = cell.shared, cell.layers - round(TRIANGLE_SHARE * cell.layers)
        triangle = {
            "predictor": Streaming.name,
            "sink_blocks": 1,
            # the window of the first query of a block starts earliest, and local blocks are counted
            # from the last query
            "local_blocks": -(-(WINDOW + base.query_block - 1) // base.key_block),
            "dense_tail_blocks": -(-LAST_QUERIES // base.query_block),
            "dense_layers": tuple(sorted({*range(num_dense), *base.dense_layers})),
        }
        return cls(base.changed(**triangle))


def with_mass_share(base: CabConfig, share: float) -> CabConfig:
    """Return ``base`` with a top-p predictor that keeps the fraction ``share`` of the mass.

    The predictor is registered under a name such as "xattention:0.9".

    Args:
        base: a config whose predictor is a key of `SHARES`.
        share: fraction of the attention mass, in (0, 1].
    """
    name = f"{base.predictor}:{share}"
    register_predictor(name, SHARES[base.predictor])
    return replace(base, predictor=name)


def logged_config(fields: Mapping[str, Any]) -> CabConfig:
    """Return a config from its logged fields.

    A predictor whose name contains a fraction, such as "xattention:0.9", is registered.
    """
    fields = dict(fields)
    predictor, _, share = fields.pop("predictor").partition(":")
    config = CabConfig.from_dict({**fields, "predictor": predictor})
    return with_mass_share(config, float(share)) if share else config


# name of a top-p predictor -> function that builds the predictor, with the default of its fraction
# of the mass. For xattention, 0.8 is the default of the authors' function. The authors' runs of
# LLaMA load a threshold per head, on average 0.76 at stride 8 and 0.91 at stride 16. These
# thresholds come from a search that is left out here.
SHARES: dict[str, Callable[[CabConfig], SharePredictor]] = {
    "xattention": partial(SharePredictor, default_share=0.8, score=make_strided_score(STRIDE)),
    # the faster of the two strides of the authors
    "xattention_16": partial(SharePredictor, default_share=0.8, score=make_strided_score(16)),
    "mean_pooled": partial(SharePredictor, default_share=0.95, score=compute_pooled_mass),
}
SCORES = {
    "random": draw_random_scores,
    "antidiagonal": make_strided_score(STRIDE),
    "oracle": make_strided_score(1),
}
register_predictor(Streaming.name, StreamingPredictor)
for _name, _score in SCORES.items():
    register_predictor(_name, partial(ScorePredictor, score=_score))
for _name, _share in SHARES.items():
    register_predictor(_name, _share)
