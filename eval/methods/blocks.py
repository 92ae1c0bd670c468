"""Methods that select blocks in other ways than CAB: baselines and bounds.

Each is a predictor, registered under the method's name, so that it runs with the same plan, engine
and model code as CAB. Forced blocks and block sizes are those of the config, even if the original
forces other blocks or uses 128 x 128.
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
    fitted_sparsity,
    nearest,
    nearest_on_probe,
)
from cab_hf.eval.methods.caches import sink_cache
from cab_hf.ops import reference
from cab_hf.plan import BlockPlan, KeyRanges, block_visibility
from cab_hf.predictors import LayerContext, Predictor, make_predictor, register_predictor
from cab_hf.predictors.attention_mass import block_mass
from cab_hf.predictors.base import sparsity_of

# tolerance of a share of the mass: sums of thousands of float32 shares are no more exact
TOLERANCE = 1e-5
# TriangleMix: share of layers with the pattern, from the last one back; window and dense queries in
# tokens
TRIANGLE_SHARE, WINDOW, LAST_QUERIES = 0.5, 512, 128
SEED = 0  # seed of the random blocks
STRIDE = 8  # stride of antidiagonal sums
# (q [B, H, N_q, D], k [B, H_kv, N_k, D], call, query block, key block) -> scores of the key blocks
# of a row, highest kept, float32 [B, H, M_q, M_k]
Score = Callable[..., Tensor]


class BlockPredictor(Predictor):
    """The base class of predictors that return a mask of kept blocks."""

    @abstractmethod
    def keep(self, q: Tensor, k: Tensor, call: LayerContext, seen: Tensor, must: Tensor) -> Tensor:
        """Return the kept blocks, bool, broadcast to [B, H, M_q, M_k].

        Args:
            q, k, call: as in `Predictor.choose`.
            seen, must: bool [B, 1, M_q, M_k], the blocks that may be kept and that must be kept.
        """

    @property
    def blocks(self) -> tuple[int, int]:
        return self.config.query_block, self.config.key_block

    def choose(self, q: Tensor, summary: Tensor, call: LayerContext) -> BlockPlan:
        query_block, key_block = self.blocks
        visible = block_visibility(call.ranges, query_block, key_block)
        forced = reference.forced_blocks(visible, call.ranges, self.config).unsqueeze(1)
        visible = visible.unsqueeze(1)
        keep = (self.keep(q, summary, call, visible, forced) & visible) | forced
        keep = keep.expand(-1, q.shape[1], -1, -1)
        return BlockPlan.from_dense(keep, call.ranges, query_block=query_block, key_block=key_block)


class StreamingPredictor(BlockPredictor):
    """Forced blocks alone: ``sink_blocks`` and ``local_blocks``."""

    def required_inputs(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        return ()

    def keep(self, q: Tensor, k: Tensor, call: LayerContext, seen: Tensor, must: Tensor) -> Tensor:
        return must


class ScorePredictor(BlockPredictor):
    """Top-k blocks by ``score``: forced blocks and the best ones, 1 - ``sparsity`` of a row."""

    def __init__(self, config: CabConfig, score: Score) -> None:
        super().__init__(config)
        self.score = score

    def keep(self, q: Tensor, k: Tensor, call: LayerContext, seen: Tensor, must: Tensor) -> Tensor:
        dropped = torch.tensor(
            sparsity_of(self.config, call.layer, q.shape[1]), device=q.device, dtype=torch.float64
        )
        share = (1 - dropped[:, None, None]).clamp(max=self.config.max_density)
        wanted = reference.share_of_row(seen, share).maximum(must.sum(-1, keepdim=True))
        score = self.score(q, k, call, *self.blocks)
        wanted = wanted.squeeze(-1).expand(score.shape[:3])
        return reference.best_of_rows(score, seen, must, wanted)


class SharePredictor(BlockPredictor):
    """The fewest blocks of a row that contain a share of the mass estimated by ``score``.

    Forced blocks count. The share is ``usual``, or the number after a colon in
    ``CabConfig.predictor``, which `at_share` has registered.
    """

    def __init__(self, config: CabConfig, usual: float, score: Score | None = None) -> None:
        super().__init__(config)
        share = config.predictor.partition(":")[2]
        self.usual, self.score = usual, score
        self.share = float(share) if share else usual

    def keep(self, q: Tensor, k: Tensor, call: LayerContext, seen: Tensor, must: Tensor) -> Tensor:
        mass = self.score(q, k, call, *self.blocks)
        return fewest(normalised(mass), seen, must, self.share)


def random_scores(q: Tensor, k: Tensor, call: LayerContext, *blocks: int) -> Tensor:
    """Score blocks at random, differently for every head and row.

    The seed depends on shapes and keys. A layer recomputed by gradient checkpointing, and a
    repeated run, select the same blocks. Two samples select different ones, so that their outcomes
    are independent. A text that is packed or in another batch gets other blocks than alone.
    """
    content = f"{SEED} {tuple(q.shape)} {tuple(k.shape)} {float(k.double().sum()):.6e}"
    digest = hashlib.sha256(content.encode()).digest()
    generator = torch.Generator(q.device).manual_seed(int.from_bytes(digest[:6], "big"))
    rows, columns = (-(-x.shape[2] // size) for x, size in zip((q, k), blocks, strict=True))
    return torch.rand(*q.shape[:2], rows, columns, generator=generator, device=q.device)


def strided_mass(stride: int) -> Score:
    """Score blocks by attention mass estimated from strided antidiagonal sums; exact at stride 1.

    As in XAttention (Xu et al. 2025, arXiv 2503.16428): the logit of a tile of stride x stride
    tokens is the mean over its antidiagonal. The softmax of a row of tiles, summed over blocks,
    estimates their mass.
    """
    return lambda q, k, call, *blocks: block_mass(q, k, call.ranges, call.scale, *blocks, stride)


def pooled_mass(q: Tensor, k: Tensor, call: LayerContext, *blocks: int) -> Tensor:
    """Score blocks by the softmax of logits of mean-pooled queries and keys in each row.

    Pooling is that of MInference's block-sparse heads (Jiang et al. 2024, arXiv 2407.02490). Here
    each row keeps its own share; FlexPrefill (Lai et al. 2025, arXiv 2502.20766) applies the share
    to all rows together.
    """
    queries = block_means(q, call.ranges.end >= 0, blocks[0])
    keys = block_means(k, call.ranges.key_valid, blocks[1])
    seen = block_visibility(call.ranges, *blocks).unsqueeze(1)
    return share_of_blocks(queries, keys, seen, call.scale)


def fewest(share: Tensor, seen: Tensor, forced: Tensor, wanted: float) -> Tensor:
    """Return bool: the fewest entries that sum to ``wanted``, forced ones first.

    Args:
        share: share of each entry of the last dimension.
        seen, forced: entries that may be kept, and that must be kept; they broadcast with
            ``share``.
        wanted: share in [0, 1].
    """
    # forced entries come first, but their shares count as they are
    queue = torch.where(forced, 2.0, share).masked_fill(~seen, -1.0)
    order = queue.argsort(dim=-1, descending=True, stable=True)
    queued = share.gather(-1, order)
    before = queued.cumsum(-1) - queued
    taken = (before < wanted - TOLERANCE) | (wanted >= 1)
    return (taken.gather(-1, order.argsort(-1)) | forced) & seen


def normalised(x: Tensor) -> Tensor:
    """Divide ``x`` by its sum over the last dimension."""
    return x / x.sum(-1, keepdim=True).clamp(min=reference.LEAST)


def block_means(x: Tensor, valid: Tensor, block: int) -> Tensor:
    """Return block means of x [B, H, N, D] over tokens ``valid`` [B, N]: [B, H, M, D]."""
    padding = -x.shape[2] % block
    real = F.pad(valid, (0, padding)).unflatten(1, (-1, block)).unsqueeze(1)
    parts = F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, block)).float()
    total = parts.masked_fill(~real.unsqueeze(-1), 0.0).sum(-2)
    return total / real.sum(-1).clamp(min=1).unsqueeze(-1)


def share_of_blocks(queries: Tensor, keys: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return the softmax of query block vectors over the vectors of visible key blocks.

    Args:
        queries: [B, H, M_q, D].
        keys: [B, H_kv, M_k, D].
        seen: visible blocks.
        scale: factor of the logits.

    Returns:
        [B, H, M_q, M_k], 0 for blocks that are not ``seen``.
    """
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    logits = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale
    return logits.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)


@dataclass(frozen=True)
class Streaming(Cab):
    """StreamingLLM: attention sinks and a recent window (Xiao et al. 2023, arXiv 2309.17453).

    The original keeps 4 sink tokens and numbers positions inside the cache. Here sinks and window
    are whole key blocks (one sink block, the window sized for the budget), and tokens keep their
    positions in the text. Keys outside the window are dropped for good: the last queries of a text
    have no dense tail, and decoding is limited like prefill in both stages.
    """

    name = "streaming"
    matched = True
    decodes = "sinks and window"

    @classmethod
    def fit(cls, cell: Cell) -> Streaming:
        # a dense tail would attend to keys outside of the window, which must not be found
        base = cell.shared.changed(predictor=cls.name, sink_blocks=1, dense_tail_blocks=0)
        windows = range(1, -(-cell.length // base.key_block) + 1)
        return cls(nearest_on_probe(windows, lambda w: replace(base, local_blocks=w), cell))

    def cache(self, model: PreTrainedModel) -> Cache:
        sinks, window = (
            blocks * self.config.key_block
            for blocks in (self.config.sink_blocks, self.config.local_blocks)
        )
        return sink_cache(model, sinks, sinks + window)

    def reaches(self, length: int, asking: int, needle: tuple[int, int]) -> bool:
        ranges, nothing = KeyRanges.causal(1, length, length, "cpu"), torch.empty(1, 1, length, 0)
        seen = make_predictor(self.config)(nothing, nothing, LayerContext(ranges, 1.0)).to_dense()
        first, last = needle[0] // self.config.key_block, (needle[1] - 1) // self.config.key_block
        return bool(seen[0, 0, asking // self.config.query_block :, first : last + 1].any())


class Chosen(Cab):
    """The base class of methods whose blocks a predictor selects."""

    predictor: ClassVar[str]

    @classmethod
    def by(cls, predictor: str, name: str | None = None) -> type[Chosen]:
        """Return the method ``name`` with this predictor; the default is the predictor's name."""
        return type(name or predictor, (cls,), {"name": name or predictor, "predictor": predictor})


@dataclass(frozen=True)
class OfRows(Chosen):
    """The base class of methods that keep a share of every row, fitted to the budget.

    Forced blocks and the dense tail are those of CAB, and count in the budget.
    """

    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> OfRows:
        # the number of blocks per row does not depend on the selection, so the cheapest selection
        # is fitted; its time does depend on it
        predictor = cls.predictor if cell.took else "random"
        fitted = fitted_sparsity(cell.shared.changed(predictor=predictor), cell)
        return cls(replace(fitted, predictor=cls.predictor))


@dataclass(frozen=True)
class AsPublished(Chosen):
    """The base class of methods at the budget of their authors, without dense tail."""

    @classmethod
    def fit(cls, cell: Cell) -> AsPublished:
        return cls(cell.shared.changed(predictor=cls.predictor, dense_tail_blocks=0))


@dataclass(frozen=True)
class ByShare(Chosen):
    """The base class of methods with a `SharePredictor`, at the share nearest to the budget.

    Density, or time, is measured on a text of the cell. Forced blocks and the dense tail are those
    of CAB, and count in the budget.
    """

    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> ByShare:
        if not (cell.took or cell.realised):
            raise ValueError(
                f"cell must measure the density of a config for method {cls.name}, got "
                "realised=None. Pass Cell.realised."
            )
        shares = [step / BUDGET_STEPS for step in range(1, BUDGET_STEPS + 1)]
        base = cell.shared.changed(predictor=cls.predictor)
        return cls(nearest(shares, lambda x: at_share(base, x), cell, cell.realised))


@dataclass(frozen=True)
class TriangleMix(Cab):
    """TriangleMix (He et al. 2025, arXiv 2507.21526): a triangle pattern in the deeper layers.

    In these layers a query attends to 8 sink tokens and the latest 512, and the last 128 queries
    attend to everything. The layers before are dense, 16 of 32 for Llama-3.1-8B. These numbers are
    those of the example in its code.

    The paper finds the layers by the gradient that reaches the omitted part; here they are the
    second half of any model. Sinks, window and last queries are whole blocks: one sink block, the
    key blocks with the latest 512 tokens of every query, and the query blocks with one of the last
    128 tokens. Later queries of a block therefore attend to more than 512 tokens.
    """

    name = "trianglemix"

    @classmethod
    def fit(cls, cell: Cell) -> TriangleMix:
        if cell.layers is None:
            raise ValueError(
                "cell must contain the number of layers for method trianglemix, got layers=None. "
                "Pass Cell.layers."
            )
        base, dense = cell.shared, cell.layers - round(TRIANGLE_SHARE * cell.layers)
        triangle = {
            "predictor": Streaming.name,
            "sink_blocks": 1,
            # counted from the last query of a row; the first query has the fewest keys
            "local_blocks": -(-(WINDOW + base.query_block - 1) // base.key_block),
            "dense_tail_blocks": -(-LAST_QUERIES // base.query_block),
            "dense_layers": tuple(sorted({*range(dense), *base.dense_layers})),
        }
        return cls(base.changed(**triangle))


def at_share(base: CabConfig, share: float) -> CabConfig:
    """Register ``base``, a `SharePredictor`, with another share, under its own predictor name."""
    name = f"{base.predictor}:{share}"
    register_predictor(name, SHARES[base.predictor])
    return replace(base, predictor=name)


def logged_config(fields: Mapping[str, Any]) -> CabConfig:
    """Return the config that a log has, and register its predictor if it has a share."""
    fields = dict(fields)
    predictor, _, share = fields.pop("predictor").partition(":")
    config = CabConfig.from_dict({**fields, "predictor": predictor})
    return at_share(config, float(share)) if share else config


# 0.8 is the default of the authors' function. Their runs of LLaMA load a threshold per head, on
# average 0.76 at stride 8 and 0.91 at 16, found by a search that is left out here.
SHARES: dict[str, Callable[[CabConfig], SharePredictor]] = {
    "xattention": partial(SharePredictor, usual=0.8, score=strided_mass(STRIDE)),
    # the coarser and faster of their two settings
    "xattention_16": partial(SharePredictor, usual=0.8, score=strided_mass(16)),
    "mean_pooled": partial(SharePredictor, usual=0.95, score=pooled_mass),
}
SCORES = {"random": random_scores, "antidiagonal": strided_mass(STRIDE), "oracle": strided_mass(1)}
register_predictor(Streaming.name, StreamingPredictor)
for _name, _score in SCORES.items():
    register_predictor(_name, partial(ScorePredictor, score=_score))
for _name, _share in SHARES.items():
    register_predictor(_name, _share)
