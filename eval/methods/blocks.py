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
    find_nearest_config,
    find_nearest_config_on_random_qk,
    fit_sparsity,
)
from cab_hf.eval.methods.caches import make_sink_cache
from cab_hf.ops import reference
from cab_hf.plan import BlockPlan, KeyRanges, block_visibility
from cab_hf.predictors import LayerContext, Predictor, make_predictor, register_predictor
from cab_hf.predictors.attention_mass import compute_block_mass
from cab_hf.predictors.base import get_head_sparsity

# tolerance for a sum of the masses of blocks: the rounding error of thousands of float32 numbers
MASS_TOLERANCE = 1e-5
TRIANGLE_LAYER_SHARE = 0.5  # TriangleMix: this fraction of the layers, the last ones, is sparse
TRIANGLE_WINDOW_TOKENS = 512  # TriangleMix: tokens of the window
TRIANGLE_LAST_QUERIES = 128  # TriangleMix: number of the last queries, which attend densely
RANDOM_BLOCKS_SEED = 0  # seed of the random blocks
ANTIDIAGONAL_STRIDE = 8  # stride of antidiagonal sums in tokens
# function of q [B, H, N_q, D], k [B, H_kv, N_k, D], a LayerContext, query_block and key_block that
# returns a score per query block and key block, float32 [B, H, M_q, M_k]; high scores are kept
BlockScorer = Callable[..., Tensor]


class BlockPredictor(Predictor):
    """The base class of predictors whose `select_blocks` returns a mask of kept blocks."""

    @abstractmethod
    def select_blocks(
        self,
        q: Tensor,
        k: Tensor,
        layer_context: LayerContext,
        is_visible: Tensor,
        is_forced: Tensor,
    ) -> Tensor:
        """Return the kept blocks, bool, broadcastable to [B, H, M_q, M_k].

        Args:
            q: [B, H, N_q, D].
            k: [B, H_kv, N_k, D].
            layer_context: the context of the layer.
            is_visible: blocks with a (query, key) pair that is not masked, bool [B, 1, M_q, M_k].
            is_forced: blocks that are kept in any case, bool [B, 1, M_q, M_k].
        """

    @property
    def block_sizes(self) -> dict[str, int]:
        """The block sizes as keyword arguments."""
        return {"query_block": self.config.query_block, "key_block": self.config.key_block}

    def choose(self, q: Tensor, summary: Tensor, layer_context: LayerContext) -> BlockPlan:
        is_visible = block_visibility(layer_context.ranges, **self.block_sizes)
        is_forced = reference.forced_blocks(
            is_visible, layer_context.ranges, self.config
        ).unsqueeze(1)
        is_visible = is_visible.unsqueeze(1)
        is_kept = self.select_blocks(
            q=q, k=summary, layer_context=layer_context, is_visible=is_visible, is_forced=is_forced
        )
        is_kept = ((is_kept & is_visible) | is_forced).expand(-1, q.shape[1], -1, -1)
        return BlockPlan.from_dense(is_kept, layer_context.ranges, **self.block_sizes)


class StreamingPredictor(BlockPredictor):
    """A predictor that keeps only forced blocks: ``sink_blocks`` and ``local_blocks``."""

    def required_inputs(
        self, layer_context: LayerContext, heads: tuple[int, int]
    ) -> Collection[str]:
        return ()

    def select_blocks(
        self,
        q: Tensor,
        k: Tensor,
        layer_context: LayerContext,
        is_visible: Tensor,
        is_forced: Tensor,
    ) -> Tensor:
        return is_forced


class ScorePredictor(BlockPredictor):
    """A predictor that keeps the top-k blocks of each row of blocks.

    A row keeps the fraction 1 - ``sparsity`` of its visible blocks: first the forced blocks, then
    the blocks with the highest scores.

    Args:
        config: the config.
        score_blocks: function that scores blocks.
    """

    def __init__(self, config: CabConfig, score_blocks: BlockScorer) -> None:
        super().__init__(config)
        self.score_blocks = score_blocks

    def select_blocks(
        self,
        q: Tensor,
        k: Tensor,
        layer_context: LayerContext,
        is_visible: Tensor,
        is_forced: Tensor,
    ) -> Tensor:
        sparsity = torch.tensor(
            get_head_sparsity(self.config, layer_context.layer, q.shape[1]),
            device=q.device,
            dtype=torch.float64,
        )
        kept_share = (1 - sparsity[:, None, None]).clamp(max=self.config.max_density)
        # [B, H or 1, M_q, 1]: number of blocks that a row keeps
        num_kept_blocks = reference.share_of_row(is_visible, kept_share).maximum(
            is_forced.sum(-1, keepdim=True)
        )
        block_scores = self.score_blocks(q, k, layer_context, **self.block_sizes)
        num_kept_blocks = num_kept_blocks.squeeze(-1).expand(block_scores.shape[:3])
        return reference.select_best_blocks(block_scores, is_visible, is_forced, num_kept_blocks)


class SharePredictor(BlockPredictor):
    """A top-p predictor: each row keeps the fewest blocks with a fraction of its attention mass.

    The mass of forced blocks counts towards the fraction.

    Args:
        config: the config. If ``config.predictor`` has a number after a colon, such as
            "xattention:0.9", this number is the fraction; `with_mass_share` registers such
            predictors.
        default_mass_share: the fraction for other predictors.
        score_blocks: function that estimates the mass of blocks; None for subclasses with their own
            `select_blocks`.
    """

    def __init__(
        self, config: CabConfig, default_mass_share: float, score_blocks: BlockScorer | None = None
    ) -> None:
        super().__init__(config)
        mass_share_text = config.predictor.partition(":")[2]
        self.default_mass_share, self.score_blocks = default_mass_share, score_blocks
        self.mass_share = float(mass_share_text) if mass_share_text else default_mass_share

    def select_blocks(
        self,
        q: Tensor,
        k: Tensor,
        layer_context: LayerContext,
        is_visible: Tensor,
        is_forced: Tensor,
    ) -> Tensor:
        block_mass = self.score_blocks(q, k, layer_context, **self.block_sizes)
        return select_fewest_entries(
            normalise_sum(block_mass), is_visible, is_forced, self.mass_share
        )


def draw_random_scores(
    q: Tensor, k: Tensor, layer_context: LayerContext, query_block: int, key_block: int
) -> Tensor:
    """Score blocks at random, differently for every head and row.

    The seed is computed from the shapes and the keys. Gradient checkpointing and repeated runs
    therefore select the same blocks again, and different samples get independent blocks. A sequence
    gets other blocks in a batch, or packed with other sequences, than alone.

    Returns:
        Scores in [0, 1), float32 [B, H, M_q, M_k].
    """
    seed_content = (
        f"{RANDOM_BLOCKS_SEED} {tuple(q.shape)} {tuple(k.shape)} {float(k.double().sum()):.6e}"
    )
    digest = hashlib.sha256(seed_content.encode()).digest()
    generator = torch.Generator(q.device).manual_seed(int.from_bytes(digest[:6], "big"))
    num_query_blocks, num_key_blocks = -(-q.shape[2] // query_block), -(-k.shape[2] // key_block)
    shape = (*q.shape[:2], num_query_blocks, num_key_blocks)
    return torch.rand(shape, generator=generator, device=q.device)


def make_strided_scorer(stride: int) -> BlockScorer:
    """Return a function that scores blocks by the antidiagonal estimate of XAttention.

    As in XAttention (Xu et al. 2025, arXiv 2503.16428), the logit of a tile of stride x stride
    tokens is the mean over the antidiagonal of the tile. The softmax over a row of tiles, summed
    over the tiles of a block, estimates the mass of the block. The estimate is exact at stride 1.
    """

    def score_blocks(
        q: Tensor, k: Tensor, layer_context: LayerContext, query_block: int, key_block: int
    ) -> Tensor:
        return compute_block_mass(
            q=q,
            k=k,
            key_ranges=layer_context.ranges,
            scale=layer_context.scale,
            query_block=query_block,
            key_block=key_block,
            stride=stride,
        )

    return score_blocks


def compute_pooled_mass(
    q: Tensor, k: Tensor, layer_context: LayerContext, query_block: int, key_block: int
) -> Tensor:
    """Score blocks by the softmax over the logits of mean-pooled queries and keys.

    MInference's block-sparse heads pool in the same way (Jiang et al. 2024, arXiv 2407.02490). The
    method mean_pooled keeps a fraction of the mass of each row. FlexPrefill (Lai et al. 2025, arXiv
    2502.20766) keeps a fraction of the mass of all rows together.

    Returns:
        Scores, float32 [B, H, M_q, M_k]; each row sums to 1.
    """
    mean_queries = average_blocks(q, layer_context.ranges.end >= 0, query_block)
    mean_keys = average_blocks(k, layer_context.ranges.key_valid, key_block)
    is_visible = block_visibility(layer_context.ranges, query_block, key_block).unsqueeze(1)
    return compute_block_weights(mean_queries, mean_keys, is_visible, layer_context.scale)


def select_fewest_entries(
    shares: Tensor, is_visible: Tensor, is_forced: Tensor, min_share: float
) -> Tensor:
    """Return a mask of the fewest entries, per last dimension, that sum to at least ``min_share``.

    Args:
        shares: the entries; they sum to 1 over the last dimension.
        is_visible: bool, entries that may be kept; broadcasts with ``shares``.
        is_forced: bool, entries that are kept in any case and count in the sum; broadcasts with
            ``shares``.
        min_share: the sum to reach, in [0, 1].

    Returns:
        bool, in the shape of ``shares``.
    """
    # sort forced entries before all others; the cumulative sum uses the entries of ``shares``
    priority = torch.where(is_forced, 2.0, shares).masked_fill(~is_visible, -1.0)
    sort_indices = priority.argsort(dim=-1, descending=True, stable=True)
    sorted_shares = shares.gather(-1, sort_indices)
    sum_before = sorted_shares.cumsum(-1) - sorted_shares
    is_taken = (sum_before < min_share - MASS_TOLERANCE) | (min_share >= 1)
    return (is_taken.gather(-1, sort_indices.argsort(-1)) | is_forced) & is_visible


def normalise_sum(x: Tensor) -> Tensor:
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
    block_sums = blocks.masked_fill(~is_counted_in_block.unsqueeze(-1), 0.0).sum(-2)
    return block_sums / is_counted_in_block.sum(-1).clamp(min=1).unsqueeze(-1)


def compute_block_weights(
    queries: Tensor, keys: Tensor, is_visible: Tensor, scale: float
) -> Tensor:
    """Return attention weights between one query per query block and one key per key block.

    Args:
        queries: one query per query block, such as the mean of its queries, [B, H, M_q, D].
        keys: one key per key block, [B, H_kv, M_k, D].
        is_visible: blocks over which the softmax runs, bool, broadcastable to [B, H, M_q, M_k].
        scale: factor of the logits.

    Returns:
        [B, H, M_q, M_k], 0 for blocks that are not visible.
    """
    grouped_queries = queries.unflatten(1, (keys.shape[1], -1))
    logits = (grouped_queries @ keys.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale
    return logits.masked_fill(~is_visible, -torch.inf).softmax(-1).masked_fill(~is_visible, 0.0)


@dataclass(frozen=True)
class Streaming(Cab):
    """StreamingLLM: attention sinks and a recent window (Xiao et al. 2023, arXiv 2309.17453).

    The original keeps 4 sink tokens, and a token's position is its position in the cache. Here
    sinks and window are whole key blocks: one sink block, and a window whose size matches the
    budget. Tokens keep their position ids. Keys outside the window are dropped for good: the last
    queries of a prompt have no dense tail, and decode steps read only sinks and window.
    """

    name = "streaming"
    is_budget_matched = True
    decode_description = "sinks and window"

    @classmethod
    def fit(cls, cell: Cell) -> Streaming:
        # no dense tail, because its queries would attend to keys outside of the window
        base_config = cell.config_without_cab.changed(
            predictor=cls.name, sink_blocks=1, dense_tail_blocks=0
        )
        window_blocks = range(1, -(-cell.length // base_config.key_block) + 1)
        config = find_nearest_config_on_random_qk(
            window_blocks, lambda window: replace(base_config, local_blocks=window), cell
        )
        return cls(config)

    def make_cache(self, model: PreTrainedModel) -> Cache:
        sink_tokens, window_tokens = (
            num_blocks * self.config.key_block
            for num_blocks in (self.config.sink_blocks, self.config.local_blocks)
        )
        return make_sink_cache(model, sink_tokens, sink_tokens + window_tokens)

    def can_reach(self, length: int, question_start: int, needle_span: tuple[int, int]) -> bool:
        ranges = KeyRanges.causal(1, length, length, "cpu")
        # the plan depends only on the shape of q and k
        empty_heads = torch.empty(1, 1, length, 0)
        is_kept = make_predictor(self.config)(
            empty_heads, empty_heads, LayerContext(ranges, 1.0)
        ).to_dense()
        first_needle_block, last_needle_block = (
            needle_span[0] // self.config.key_block,
            (needle_span[1] - 1) // self.config.key_block,
        )
        return bool(
            is_kept[
                0,
                0,
                question_start // self.config.query_block :,
                first_needle_block : last_needle_block + 1,
            ].any()
        )


class PredictorMethod(Cab):
    """The base class of methods that run `cab_hf.cab` with a predictor other than CAB's.

    Attributes:
        predictor: name of the predictor.
    """

    predictor: ClassVar[str]

    @classmethod
    def with_predictor(cls, predictor: str, name: str | None = None) -> type[PredictorMethod]:
        """Return a subclass of this class whose blocks ``predictor`` selects.

        Args:
            predictor: name of the predictor.
            name: name of the method; None: the name of the predictor.
        """
        return type(name or predictor, (cls,), {"name": name or predictor, "predictor": predictor})


@dataclass(frozen=True)
class RowShareMethod(PredictorMethod):
    """The base class of methods that keep the same fraction of visible blocks in every row.

    `fit` chooses the fraction by the budget. Forced blocks and the dense tail are those of CAB, and
    the matched density or time includes them.
    """

    is_budget_matched = True

    @classmethod
    def fit(cls, cell: Cell) -> RowShareMethod:
        # the density is the same for all predictors, so it is fitted with the fastest predictor;
        # the time depends on the predictor
        predictor = cls.predictor if cell.measure_time_ms else "random"
        fitted_config = fit_sparsity(cell.config_without_cab.changed(predictor=predictor), cell)
        return cls(replace(fitted_config, predictor=cls.predictor))


@dataclass(frozen=True)
class AuthorsShareMethod(PredictorMethod):
    """The base class of top-p methods that keep their authors' fraction of the mass.

    These methods are not matched to a budget, and have no dense tail.
    """

    @classmethod
    def fit(cls, cell: Cell) -> AuthorsShareMethod:
        return cls(cell.config_without_cab.changed(predictor=cls.predictor, dense_tail_blocks=0))


@dataclass(frozen=True)
class MassShareMethod(PredictorMethod):
    """The base class of top-p methods, which keep a fraction of the attention mass.

    `fit` finds the fraction at which the density (``Cell.measure_density``) or the time
    (``Cell.measure_time_ms``) is that of the budget. Forced blocks and the dense tail are those of
    CAB, and the measurements include them.
    """

    is_budget_matched = True

    @classmethod
    def fit(cls, cell: Cell) -> MassShareMethod:
        if not (cell.measure_time_ms or cell.measure_density):
            raise ValueError(
                f"cell must measure the density of a config for method {cls.name}, got "
                "measure_density=None. Pass Cell.measure_density."
            )
        mass_shares = [step / BUDGET_STEPS for step in range(1, BUDGET_STEPS + 1)]
        base_config = cell.config_without_cab.changed(predictor=cls.predictor)
        config = find_nearest_config(
            mass_shares,
            lambda mass_share: with_mass_share(base_config, mass_share),
            cell,
            cell.measure_density,
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
        if cell.num_layers is None:
            raise ValueError(
                "cell must contain the number of layers for method trianglemix, got "
                "num_layers=None. Pass Cell.num_layers."
            )
        base_config = cell.config_without_cab
        num_dense_layers = cell.num_layers - round(TRIANGLE_LAYER_SHARE * cell.num_layers)
        triangle_fields = {
            "predictor": Streaming.name,
            "sink_blocks": 1,
            # the window of the first query of a block starts earliest, and local blocks are counted
            # from the last query
            "local_blocks": -(
                -(TRIANGLE_WINDOW_TOKENS + base_config.query_block - 1) // base_config.key_block
            ),
            "dense_tail_blocks": -(-TRIANGLE_LAST_QUERIES // base_config.query_block),
            "dense_layers": tuple(sorted({*range(num_dense_layers), *base_config.dense_layers})),
        }
        return cls(base_config.changed(**triangle_fields))


def with_mass_share(base_config: CabConfig, mass_share: float) -> CabConfig:
    """Return ``base_config`` with a top-p predictor that keeps ``mass_share`` of the mass.

    The predictor is registered under a name such as "xattention:0.9".

    Args:
        base_config: a config whose predictor is a key of `TOP_P_PREDICTORS`.
        mass_share: fraction of the attention mass, in (0, 1].
    """
    predictor_name = f"{base_config.predictor}:{mass_share}"
    register_predictor(predictor_name, TOP_P_PREDICTORS[base_config.predictor])
    return replace(base_config, predictor=predictor_name)


def logged_config(fields: Mapping[str, Any]) -> CabConfig:
    """Return a config from its logged fields.

    A predictor whose name contains a fraction, such as "xattention:0.9", is registered.
    """
    fields = dict(fields)
    predictor_name, _, mass_share = fields.pop("predictor").partition(":")
    config = CabConfig.from_dict({**fields, "predictor": predictor_name})
    return with_mass_share(config, float(mass_share)) if mass_share else config


# name of a top-p predictor -> function that builds the predictor, with the default of its fraction
# of the mass. For xattention, 0.8 is the default of the authors' function. The authors' runs of
# LLaMA load a threshold per head, on average 0.76 at stride 8 and 0.91 at stride 16. These
# thresholds come from a search that is left out here.
TOP_P_PREDICTORS: dict[str, Callable[[CabConfig], SharePredictor]] = {
    "xattention": partial(
        SharePredictor,
        default_mass_share=0.8,
        score_blocks=make_strided_scorer(ANTIDIAGONAL_STRIDE),
    ),
    # the faster of the two strides of the authors
    "xattention_16": partial(
        SharePredictor, default_mass_share=0.8, score_blocks=make_strided_scorer(16)
    ),
    "mean_pooled": partial(
        SharePredictor, default_mass_share=0.95, score_blocks=compute_pooled_mass
    ),
}
BLOCK_SCORERS = {
    "random": draw_random_scores,
    "antidiagonal": make_strided_scorer(ANTIDIAGONAL_STRIDE),
    "oracle": make_strided_scorer(1),
}
register_predictor(Streaming.name, StreamingPredictor)
for _predictor_name, _scorer in BLOCK_SCORERS.items():
    register_predictor(_predictor_name, partial(ScorePredictor, score_blocks=_scorer))
for _predictor_name, _make_predictor in TOP_P_PREDICTORS.items():
    register_predictor(_predictor_name, _make_predictor)
