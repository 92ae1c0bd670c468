"""Methods that choose blocks otherwise than CAB: rivals, and bounds.

Each is a predictor, registered under the method's name, so that it runs through the same plan,
engine and model code as CAB. Forced blocks are those of the config, also where the original forces
others, and blocks have its sizes, where most originals have 128 x 128.
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
from cab_hf.plan import BlockPlan, Spans, block_visibility
from cab_hf.predictors import LayerContext, Predictor, make_predictor, register_predictor
from cab_hf.predictors.attention_mass import block_mass
from cab_hf.predictors.base import sparsity_of

# a share of the mass that is met within this is met: sums of thousands of float32 shares are no
# better
TOLERANCE = 1e-5
# of TriangleMix: the share of layers, from the last one back, that have the pattern; its window and
# its dense queries, in tokens
TRIANGLE_SHARE, WINDOW, LAST_QUERIES = 0.5, 512, 128
SEED = 0  # of the random blocks
STRIDE = 8  # of antidiagonal sums
# (q [B, H, N_q, D], k [B, H_kv, N_k, D], call, query block, key block) -> what ranks the key blocks
# of a row, highest kept, float32 [B, H, M_q, M_k]
Score = Callable[..., Tensor]


class BlockPredictor(Predictor):
    """Base of predictors that say of every block whether it is kept."""

    @abstractmethod
    def keep(self, q: Tensor, k: Tensor, call: LayerContext, seen: Tensor, must: Tensor) -> Tensor:
        """The blocks that are kept, bool, broadcast to [B, H, M_q, M_k].

        Args:
            seen, must: bool [B, 1, M_q, M_k], the blocks that may be kept and that must be.
        """

    @property
    def blocks(self) -> tuple[int, int]:
        return self.config.query_block, self.config.key_block

    def choose(self, q: Tensor, summary: Tensor, call: LayerContext) -> BlockPlan:
        query_block, key_block = self.blocks
        visible = block_visibility(call.spans, query_block, key_block)
        forced = reference.forced_blocks(visible, call.spans, self.config).unsqueeze(1)
        visible = visible.unsqueeze(1)
        keep = (self.keep(q, summary, call, visible, forced) & visible) | forced
        keep = keep.expand(-1, q.shape[1], -1, -1)
        return BlockPlan.from_dense(keep, call.spans, query_block=query_block, key_block=key_block)


class StreamingPredictor(BlockPredictor):
    """Forced blocks alone: ``sink_blocks`` and ``local_blocks``."""

    def gathers(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        return ()

    def keep(self, q: Tensor, k: Tensor, call: LayerContext, seen: Tensor, must: Tensor) -> Tensor:
        return must


class ScorePredictor(BlockPredictor):
    """Ranks blocks by ``score``: keeps forced ones and the best, 1 - ``sparsity`` of a row."""

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
    """Keeps a row's fewest blocks that hold a share of the mass that ``score`` estimates.

    Forced blocks count. The share is ``usual``, or the number behind a colon in
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
    """Random blocks, others for every head and row.

    Drawn anew for other shapes or other keys: a layer replayed by gradient checkpointing, and a run
    repeated, choose the same blocks; two samples do not, or their outcomes would not be
    independent. Packed or in another batch a text gets other blocks than alone, as random.
    """
    content = f"{SEED} {tuple(q.shape)} {tuple(k.shape)} {float(k.double().sum()):.6e}"
    digest = hashlib.sha256(content.encode()).digest()
    generator = torch.Generator(q.device).manual_seed(int.from_bytes(digest[:6], "big"))
    rows, columns = (-(-x.shape[2] // size) for x, size in zip((q, k), blocks, strict=True))
    return torch.rand(*q.shape[:2], rows, columns, generator=generator, device=q.device)


def strided_mass(stride: int) -> Score:
    """Blocks by their attention mass as strided antidiagonal sums estimate it; exactly at 1.

    As of XAttention (Xu et al. 2025, arXiv 2503.16428): the logit of a tile of stride x stride
    tokens is the mean over its antidiagonal. The softmax of a row of tiles, summed over blocks,
    estimates their mass.
    """
    return lambda q, k, call, *blocks: block_mass(q, k, call.spans, call.scale, *blocks, stride)


def pooled_mass(q: Tensor, k: Tensor, call: LayerContext, *blocks: int) -> Tensor:
    """The softmax of logits of mean-pooled queries and keys over the blocks that a row sees.

    Pooled as in MInference's block-sparse heads (Jiang et al. 2024, arXiv 2407.02490). Here a row
    keeps a share of its own, where FlexPrefill (Lai et al. 2025, arXiv 2502.20766) has it over all
    rows together.
    """
    queries = block_means(q, call.spans.last >= 0, blocks[0])
    keys = block_means(k, call.spans.key_valid, blocks[1])
    seen = block_visibility(call.spans, *blocks).unsqueeze(1)
    return share_of_blocks(queries, keys, seen, call.scale)


def fewest(share: Tensor, seen: Tensor, forced: Tensor, wanted: float) -> Tensor:
    """bool: the fewest entries of the last dimension that hold ``wanted``, forced ones first.

    Args:
        share: of each entry. seen, forced: entries that may be kept, and that must be; they
            broadcast with ``share``.
        wanted: share in [0, 1].
    """
    # a forced entry's share counts, whatever its size: it goes to the front of the queue
    queue = torch.where(forced, 2.0, share).masked_fill(~seen, -1.0)
    order = queue.argsort(dim=-1, descending=True, stable=True)
    queued = share.gather(-1, order)
    before = queued.cumsum(-1) - queued
    taken = (before < wanted - TOLERANCE) | (wanted >= 1)
    return (taken.gather(-1, order.argsort(-1)) | forced) & seen


def normalised(x: Tensor) -> Tensor:
    """``x`` over its sum over the last dimension."""
    return x / x.sum(-1, keepdim=True).clamp(min=reference.LEAST)


def block_means(x: Tensor, valid: Tensor, block: int) -> Tensor:
    """The mean of every block of x [B, H, N, D] over tokens ``valid`` [B, N]: [B, H, M, D]."""
    padding = -x.shape[2] % block
    real = F.pad(valid, (0, padding)).unflatten(1, (-1, block)).unsqueeze(1)
    parts = F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, block)).float()
    total = parts.masked_fill(~real.unsqueeze(-1), 0.0).sum(-2)
    return total / real.sum(-1).clamp(min=1).unsqueeze(-1)


def share_of_blocks(queries: Tensor, keys: Tensor, seen: Tensor, scale: float) -> Tensor:
    """The softmax of vectors of query blocks over those of the key blocks that they see.

    Args:
        queries: [B, H, M_q, D]. keys: [B, H_kv, M_k, D].

    Returns:
        [B, H, M_q, M_k], 0 for blocks that are not ``seen``.
    """
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    logits = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale
    return logits.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)


@dataclass(frozen=True)
class Streaming(Cab):
    """StreamingLLM: attention sinks and a recent window (Xiao et al. 2023, arXiv 2309.17453).

    The original keeps 4 sink tokens and numbers positions by place in the cache. Here sinks and
    window are whole key blocks (one sink block, the window sized for the budget), and tokens keep
    the positions they have in the text. What left the window is gone for good, so that the last
    queries of a text have no dense tail, and decoding is limited like prefill whatever the stage.
    """

    name = "streaming"
    matched = True
    decodes = "sinks and window"

    @classmethod
    def fit(cls, cell: Cell) -> Streaming:
        # with a tail the end of a text would see what left the window, which nothing is to find
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
        spans, nothing = Spans.causal(1, length, length, "cpu"), torch.empty(1, 1, length, 0)
        seen = make_predictor(self.config)(nothing, nothing, LayerContext(spans, 1.0)).to_dense()
        first, last = needle[0] // self.config.key_block, (needle[1] - 1) // self.config.key_block
        return bool(seen[0, 0, asking // self.config.query_block :, first : last + 1].any())


class Chosen(Cab):
    """Base of methods whose blocks the predictor of that name chooses."""

    predictor: ClassVar[str]

    @classmethod
    def by(cls, predictor: str, name: str | None = None) -> type[Chosen]:
        """The method ``name``, by default called as its predictor."""
        return type(name or predictor, (cls,), {"name": name or predictor, "predictor": predictor})


@dataclass(frozen=True)
class OfRows(Chosen):
    """Base of methods that keep a share of every row, at the sparsity nearest to the budget.

    Forced blocks and the dense tail are those of CAB, and count in the budget.
    """

    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> OfRows:
        # how many blocks a row keeps does not depend on which, so the cheapest choice is fitted;
        # how long it takes to choose does
        predictor = cls.predictor if cell.took else "random"
        fitted = fitted_sparsity(cell.shared.changed(predictor=predictor), cell)
        return cls(replace(fitted, predictor=cls.predictor))


@dataclass(frozen=True)
class AsPublished(Chosen):
    """Base of methods at the budget of their authors, who have no dense tail: not matched."""

    @classmethod
    def fit(cls, cell: Cell) -> AsPublished:
        return cls(cell.shared.changed(predictor=cls.predictor, dense_tail_blocks=0))


@dataclass(frozen=True)
class ByShare(Chosen):
    """Base of methods by a `SharePredictor`, at the share nearest to the budget.

    Its density, or time, is measured on a text of the cell. Forced blocks and the dense tail are
    those of CAB, and count in the budget.
    """

    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> ByShare:
        if not (cell.took or cell.realised):
            raise ValueError(f"{cls.name} needs a cell that measures the density of a config.")
        shares = [step / BUDGET_STEPS for step in range(1, BUDGET_STEPS + 1)]
        base = cell.shared.changed(predictor=cls.predictor)
        return cls(nearest(shares, lambda x: at_share(base, x), cell, cell.realised))


@dataclass(frozen=True)
class TriangleMix(Cab):
    """TriangleMix (He et al. 2025, arXiv 2507.21526): a triangle pattern in the deeper layers.

    There a query sees 8 sink tokens and the latest 512, and the last 128 queries see everything;
    the layers before are dense, 16 of 32 for Llama-3.1-8B. These numbers are those of the example
    of its code.

    The paper finds the layers of a model by the gradient that reaches what the pattern leaves out;
    here they are the second half of any model. Sinks, window and last queries are whole blocks:
    one sink block, the key blocks that hold the latest 512 tokens of every query, so that those
    further on in their query block see more, and the query blocks with one of the last 128 tokens.
    """

    name = "trianglemix"

    @classmethod
    def fit(cls, cell: Cell) -> TriangleMix:
        if cell.layers is None:
            raise ValueError("trianglemix needs a cell that has how many layers the model has.")
        base, dense = cell.shared, cell.layers - round(TRIANGLE_SHARE * cell.layers)
        triangle = {
            "predictor": Streaming.name,
            "sink_blocks": 1,
            # counted back from the last query of a row, whose first one sees the least
            "local_blocks": -(-(WINDOW + base.query_block - 1) // base.key_block),
            "dense_tail_blocks": -(-LAST_QUERIES // base.query_block),
            "dense_layers": tuple(sorted({*range(dense), *base.dense_layers})),
        }
        return cls(base.changed(**triangle))


def at_share(base: CabConfig, share: float) -> CabConfig:
    """``base``, of a `SharePredictor`, at another share, under a predictor's name of its own."""
    name = f"{base.predictor}:{share}"
    register_predictor(name, SHARES[base.predictor])
    return replace(base, predictor=name)


def logged_config(fields: Mapping[str, Any]) -> CabConfig:
    """Return the config that a log has, and register its predictor if it has a share."""
    fields = dict(fields)
    predictor, _, share = fields.pop("predictor").partition(":")
    config = CabConfig.from_dict({**fields, "predictor": predictor})
    return at_share(config, float(share)) if share else config


# 0.8 is the default of the authors' function; their runs of LLaMA load a threshold for each head,
# in the mean 0.76 at stride 8 and 0.91 at 16, found by a search that is left out here
SHARES: dict[str, Callable[[CabConfig], SharePredictor]] = {
    "xattention": partial(SharePredictor, usual=0.8, score=strided_mass(STRIDE)),
    # the coarser and faster one of its two
    "xattention_16": partial(SharePredictor, usual=0.8, score=strided_mass(16)),
    "mean_pooled": partial(SharePredictor, usual=0.95, score=pooled_mass),
}
SCORES = {"random": random_scores, "antidiagonal": strided_mass(STRIDE), "oracle": strided_mass(1)}
register_predictor(Streaming.name, StreamingPredictor)
for _name, _score in SCORES.items():
    register_predictor(_name, partial(ScorePredictor, score=_score))
for _name, _share in SHARES.items():
    register_predictor(_name, _share)
