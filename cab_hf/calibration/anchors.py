"""Which layers of a model choose blocks for which, and from which head each head takes them.

What the blocks of one layer keep of the attention of another is measured on a text, at several
thresholds of mass (`viewed`, `kept_between`). At each of them a dynamic program picks the anchors
that are worth most (`best_anchors`), and every head takes the head of its anchor that is
(`assign_anchors`). One threshold for all makes the model attend as much as it may (`cascaded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cab_hf.calibration.density import block_pairs, threshold_for
from cab_hf.config import CabConfig
from cab_hf.plan import Spans
from cab_hf.predictors import LayerContext
from cab_hf.predictors.attention_mass import attention_rows, block_mass, block_sums
from cab_hf.predictors.rows import capped_ranks, ranks

# of mass, what anchors may choose by
THRESHOLDS = (0.064, 0.032, 0.016, 0.011, 0.008, 0.0055, 0.004, 0.0028, 0.002, 0.0014)
# of what blocks are worth: what a missed needle weighs beside missed mass
NEEDLE_WEIGHT = 3.0


class Needles(NamedTuple):
    """Queries that look for something, and where it is: int64 [n] each, [start, end)."""

    queries: Tensor
    starts: Tensor
    ends: Tensor


class View(NamedTuple):
    """What is measured of one layer."""

    keep: Tensor  # bool [H, M_q, M_k], the blocks it would choose
    density: Tensor  # float64 [H], the share of all pairs of query and key that are in them
    mass: Tensor  # float32 [H, M_q, M_k], their share of the attention; sums to 1
    needle: Tensor  # float32 [H, n, M_k], what falls on the needle that each of n queries seeks
    rows: Tensor  # int64 [n], the query blocks of those


class Coverage(NamedTuple):
    """What blocks of layer a keep for layer b: float64 [L, L, H, H], as [a, b, head, head]."""

    mass: Tensor  # share of the attention of b's head that the blocks of a's head keep
    needle: Tensor  # mean over needle queries of the attention on the needle that they keep
    density: Tensor  # [L, H], the share of all pairs of query and key that are in a's blocks
    importance: Tensor  # [L], how much a layer changes its input: 1 - cosine


class Assignment(NamedTuple):
    """Who takes blocks from whom."""

    anchors: tuple[int, ...]  # ascending, as indices of what was measured
    of_layer: tuple[int, ...]  # [L], the anchor of each layer
    sources: Tensor  # int64 [L, H], the head of its anchor that each head has

    def density(self, kept: Coverage) -> float:
        """The share of the pairs that the layers attend, in the mean."""
        return float(kept.density[torch.tensor(self.of_layer)].gather(1, self.sources).mean())


def viewed(
    q: Tensor, k: Tensor, call: LayerContext, config: CabConfig, needles: Needles
) -> list[View]:
    """The `View` of one layer at each of `THRESHOLDS`.

    Args:
        q: [1, H, N, D]. k: [1, H_kv, N, D]. Of one text.
    """
    blocks = config.query_block, config.key_block
    rank = capped_ranks(ranks(q, k, call, config), call.spans, config)[0]
    keep = torch.stack([rank >= threshold for threshold in THRESHOLDS]).cpu()
    pairs = block_pairs(call.spans, config).cpu().flatten()
    density = torch.stack([each.flatten(1).double() @ pairs for each in keep]) / pairs.sum()
    mass = block_mass(q, k, call.spans, call.scale, *blocks)[0]
    mass /= call.spans.rows(config.query_block).queries.sum()
    needle = needle_shares(q, k, call, config.key_block, needles)
    of_all = [x.cpu() for x in (mass, needle, needles.queries // config.query_block)]
    return [View(*of_each, *of_all) for of_each in zip(keep, density, strict=True)]


def needle_shares(
    q: Tensor, k: Tensor, call: LayerContext, key_block: int, needles: Needles
) -> Tensor:
    """float32 [H, n, M_k]: the attention of each needle query on its needle, by key block."""
    first, last = (x[:, needles.queries] for x in (call.spans.first, call.spans.last))
    spans = Spans(first, last, call.spans.key_valid, consecutive=False)
    shares = q.new_zeros(
        q.shape[1], len(needles.queries), -(-k.shape[2] // key_block), dtype=torch.float32
    )
    for start, attention in attention_rows(q[:, :, needles.queries], k, spans, call.scale):
        rows = slice(start, start + attention.shape[2])
        key = torch.arange(attention.shape[-1], device=k.device)
        sought = (key >= needles.starts[rows, None]) & (key < needles.ends[rows, None])
        shares[:, rows] = block_sums(attention[0] * sought, key_block, shares.shape[-1])
    return shares


def kept_between(views: Sequence[View], importance: Sequence[float]) -> Coverage:
    """What the blocks of each layer keep of every layer, over all pairs of heads."""
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
    """The mean over documents of what was kept of each, by `THRESHOLDS`."""
    return [
        Coverage(*(torch.stack(parts).mean(0) for parts in zip(*of_each, strict=True)))
        for of_each in zip(*measured, strict=True)
    ]


def gains(kept: Coverage) -> Tensor:
    """What a head of b has of the blocks of a head of a, needles weighed."""
    return kept.mass + NEEDLE_WEIGHT * kept.needle


def values(gain: Tensor, importance: Tensor) -> list[list[float]]:
    """[a][b]: what it is worth that layer a chooses for layer b, weighed by b's importance.

    Every head of b takes the head of a that is worth most to it.

    Args:
        gain: [L, L, H, H], as `gains` has it.
    """
    return (gain.amax(2).mean(-1) * importance).tolist()


def require_anchors(count: int, layers: int) -> None:
    """Refuse a number of anchors that so many sparse layers cannot have.

    Raises:
        ValueError: naming both.
    """
    if not 1 <= count <= layers:
        raise ValueError(f"anchors must be 1 to {layers}, the sparse layers, got {count}.")


def best_anchors(value: Sequence[Sequence[float]], count: int) -> tuple[int, ...]:
    """The ``count`` layers, the first among them, that are worth most as anchors.

    A layer has the blocks of the last anchor up to itself; ``value[a][b]`` is what layer b gains
    from those of layer a. Of several that are worth the same, those that come first.

    Raises:
        ValueError: for a count that is not 1 to the number of layers.
    """
    layers = len(value)
    require_anchors(count, layers)
    # worth of layers a to b - 1 under anchor a
    worth = [[sum(value[a][a:b]) for b in range(layers + 1)] for a in range(layers)]
    # (total, anchors) of layers up to b, by b, for so many anchors
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
    """The heads that are worth most. A head of an anchor has its own blocks.

    Args:
        gain: as of `values`.
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
    """The cascade of ``count`` anchors for a model of ``total`` layers.

    Args:
        kept: at each of `THRESHOLDS`; of the layers with these indices, the others have no part.
        target: share of the pairs that the model is to attend.

    Raises:
        ValueError: for a target below what the highest threshold takes; see `best_anchors` for the
            count.
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
