"""Calibration of a cascade: the anchor layer of each layer, and the anchor's head for each head.

1. `viewed` and `kept_between` measure a sequence at several mass thresholds: which share of the
   attention of one layer falls on the blocks that another layer selects.
2. At each threshold, `best_anchors` selects the most valuable anchors with a dynamic program.
3. `assign_anchors` maps every head to the most valuable head of its anchor.
4. `cascaded` sets one threshold for all layers, at which the model reaches its target density.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cab_hf.calibration.density import block_pairs, threshold_for
from cab_hf.config import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext
from cab_hf.predictors.attention_mass import attention_rows, block_mass, block_sums
from cab_hf.selection.reference import ScoreOptions, block_scores, capped_scores

# mass thresholds at which layers are measured, descending
THRESHOLDS = (0.064, 0.032, 0.016, 0.011, 0.008, 0.0055, 0.004, 0.0028, 0.002, 0.0014)
# weight of needle attention relative to attention mass, in the value of blocks
NEEDLE_WEIGHT = 3.0


class Needles(NamedTuple):
    """Queries that look for a needle, and the place of each needle.

    Attributes:
        queries: positions of the queries, int64 [n].
        starts: first position of each needle, int64 [n].
        ends: position after each needle, int64 [n].
    """

    queries: Tensor
    starts: Tensor
    ends: Tensor


class View(NamedTuple):
    """Measurements of one layer at one threshold."""

    keep: Tensor  # bool [H, M_q, M_k], the blocks that the layer selects
    density: Tensor  # float64 [H], share of all (query, key) pairs in the selected blocks
    mass: Tensor  # float32 [H, M_q, M_k], share of the attention per block; sums to 1 per head
    needle: Tensor  # float32 [H, n, M_k], attention of each needle query on its needle
    rows: Tensor  # int64 [n], query blocks of the needle queries


class Coverage(NamedTuple):
    """Attention of layer b in the blocks of layer a: float64 [L, L, H, H], [a, b, head, head]."""

    mass: Tensor  # share of the attention of a head of b that falls into the blocks of a head of a
    needle: Tensor  # attention of b's head on needles in these blocks, mean over needle queries
    density: Tensor  # [L, H], share of all (query, key) pairs in the blocks of a
    importance: Tensor  # [L], change of the layer's input by the layer: 1 - cosine similarity


class Assignment(NamedTuple):
    """The anchor of each layer, and the anchor's head for each head."""

    anchors: tuple[int, ...]  # indices of measured layers, ascending
    of_layer: tuple[int, ...]  # [L], the anchor of each layer
    sources: Tensor  # int64 [L, H], the anchor's head whose blocks each head attends

    def density(self, kept: Coverage) -> float:
        """Return the share of (query, key) pairs that are attended, mean over layers and heads."""
        return float(kept.density[torch.tensor(self.of_layer)].gather(1, self.sources).mean())


def viewed(
    q: Tensor, k: Tensor, call: LayerContext, config: CabConfig, needles: Needles
) -> list[View]:
    """Return the `View` of one layer at each of `THRESHOLDS`.

    Args:
        q: queries of one sequence, [1, H, N, D].
        k: keys of the sequence, [1, H_kv, N, D].
    """
    options = ScoreOptions(call.scale, call.channels, call.sinks, call.softcap)
    rank = block_scores(q, k, ranges=call.ranges, config=config, options=options)
    rank = capped_scores(rank, call.ranges, config)[0]
    keep = torch.stack([rank >= threshold for threshold in THRESHOLDS]).cpu()
    pairs = block_pairs(call.ranges, config).cpu().flatten()
    density = torch.stack([each.flatten(1).double() @ pairs for each in keep]) / pairs.sum()
    mass = block_mass(
        q,
        k,
        ranges=call.ranges,
        scale=call.scale,
        query_block=config.query_block,
        key_block=config.key_block,
    )[0]
    mass /= call.ranges.rows(config.query_block).queries.sum()
    needle = needle_shares(q, k, call, config.key_block, needles)
    mass, needle, rows = mass.cpu(), needle.cpu(), (needles.queries // config.query_block).cpu()
    return [
        View(keep=blocks, density=shares, mass=mass, needle=needle, rows=rows)
        for blocks, shares in zip(keep, density, strict=True)
    ]


def needle_shares(
    q: Tensor, k: Tensor, call: LayerContext, key_block: int, needles: Needles
) -> Tensor:
    """Return the attention of needle queries on their needles by key block, float32 [H, n, M_k]."""
    first, last = (x[:, needles.queries] for x in (call.ranges.start, call.ranges.end))
    ranges = KeyRanges(first, last, call.ranges.key_valid, consecutive=False)
    shares = q.new_zeros(
        q.shape[1], len(needles.queries), -(-k.shape[2] // key_block), dtype=torch.float32
    )
    for start, attention in attention_rows(q[:, :, needles.queries], k, ranges, call.scale):
        rows = slice(start, start + attention.shape[2])
        key = torch.arange(attention.shape[-1], device=k.device)
        sought = (key >= needles.starts[rows, None]) & (key < needles.ends[rows, None])
        shares[:, rows] = block_sums(attention[0] * sought, key_block, shares.shape[-1])
    return shares


def kept_between(views: Sequence[View], importance: Sequence[float]) -> Coverage:
    """Return the `Coverage` between all layers, for all pairs of heads.

    Args:
        views: `View` of each layer, at one threshold.
        importance: change of its input by each layer: 1 - cosine similarity.
    """
    layers, heads = len(views), views[0].keep.shape[0]
    rows = views[0].rows
    keep = torch.stack([view.keep.float() for view in views])
    mass = torch.stack([view.mass for view in views]).flatten(0, 1).flatten(1)
    needle = torch.stack([view.needle for view in views]).flatten(0, 1).flatten(1)
    needle = needle / max(1, len(rows))

    def products(chosen: Tensor, shares: Tensor) -> Tensor:
        result = chosen.flatten(0, 1).flatten(1) @ shares.T
        return result.view(layers, heads, layers, heads).transpose(1, 2).double()

    density = torch.stack([view.density for view in views]).double()
    weights = torch.tensor(importance, dtype=torch.float64)
    return Coverage(products(keep, mass), products(keep[:, :, rows], needle), density, weights)


def averaged_kept(measured: Sequence[Sequence[Coverage]]) -> list[Coverage]:
    """Return the mean `Coverage` over documents, at each of `THRESHOLDS`."""
    return [
        Coverage._make(
            torch.stack([document[i][field] for document in measured]).mean(0)
            for field in range(len(Coverage._fields))
        )
        for i in range(len(measured[0]))
    ]


def gains(kept: Coverage) -> Tensor:
    """Return ``mass + NEEDLE_WEIGHT * needle`` of a coverage, float64 [L, L, H, H]."""
    return kept.mass + NEEDLE_WEIGHT * kept.needle


def values(gain: Tensor, importance: Tensor) -> list[list[float]]:
    """Return the value of layer a as the anchor of layer b, as a list of lists [a][b].

    ``values[a][b] = importance[b] * mean_{head of b} max_{head of a} gain[a, b]``

    Args:
        gain: result of `gains`, [L, L, H, H].
        importance: importance of each layer, [L].
    """
    return (gain.amax(2).mean(-1) * importance).tolist()


def require_anchors(count: int, layers: int) -> None:
    """Raise a ValueError if a model with ``layers`` sparse layers cannot have ``count`` anchors."""
    if not 1 <= count <= layers:
        raise ValueError(
            f"anchors must be 1 to {layers}, the number of sparse layers, got {count}. Give a "
            "number in this range."
        )


def best_anchors(value: Sequence[Sequence[float]], count: int) -> tuple[int, ...]:
    """Return the ``count`` most valuable anchors; the first layer is always an anchor.

    A layer takes the blocks of the last anchor at or before the layer. Earlier layers win a tie.

    Args:
        value: ``value[a][b]`` is the value of layer a as the anchor of layer b.
        count: number of anchors.

    Raises:
        ValueError: ``count`` is not between 1 and the number of layers.
    """
    layers = len(value)
    require_anchors(count, layers)
    # total value of layers a to b - 1 if layer a is their anchor
    worth = [[sum(value[a][a:b]) for b in range(layers + 1)] for a in range(layers)]
    # b -> (total value, anchors) of layers 0 to b - 1, for a given number of anchors
    best = {b: (worth[0][b], (0,)) for b in range(1, layers + 1)}
    for so_many in range(2, count + 1):
        best = {
            b: max(
                ((best[a][0] + worth[a][b], (*best[a][1], a)) for a in range(so_many - 1, b)),
                key=lambda result: result[0],
            )
            for b in range(so_many, layers + 1)
        }
    return best[layers][1]


def assign_anchors(gain: Tensor, anchors: Sequence[int]) -> Assignment:
    """Map each head to the most valuable head of its anchor. Heads of an anchor keep their blocks.

    Args:
        gain: result of `gains`, [L, L, H, H].
        anchors: indices of the anchors.
    """
    layers, heads = gain.shape[1:3]
    of_layer = tuple(max(a for a in anchors if a <= b) for b in range(layers))
    every = torch.arange(heads)
    sources = [every if a == b else gain[a, b].argmax(0) for b, a in enumerate(of_layer)]
    return Assignment(tuple(anchors), of_layer, torch.stack(sources))


def cascaded(
    config: CabConfig,
    kept: Sequence[Coverage],
    layers: Sequence[int],
    total: int,
    count: int,
    target: float,
) -> CabConfig:
    """Return ``config`` with a cascade of ``count`` anchors that reaches the target density.

    Args:
        config: settings of the model.
        kept: `Coverage` at each of `THRESHOLDS`, for the sparse layers only.
        layers: indices of the sparse layers in the model.
        total: number of layers of the model.
        count: number of anchors.
        target: target density: share of the (query, key) pairs that the model attends.

    Raises:
        ValueError: ``target`` is below the density of the highest threshold, or ``count`` is out
            of range (see `best_anchors`).
    """
    tried = []
    for each in kept:
        gain = gains(each)
        tried.append(assign_anchors(gain, best_anchors(values(gain, each.importance), count)))
    spent = [each.density(of_all) for each, of_all in zip(tried, kept, strict=True)]
    at, threshold = threshold_for(THRESHOLDS, spent, target)
    result = tried[at]
    same = list(range(result.sources.shape[1]))
    rows = {layer: row.tolist() for layer, row in zip(layers, result.sources, strict=True)}
    return config.changed(
        predictor="cascade",
        mass_threshold=threshold,
        anchors=tuple(layers[anchor] for anchor in result.anchors),
        head_map=[rows.get(layer, same) for layer in range(total)],
    )
