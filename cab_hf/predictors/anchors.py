"""Which layers of a model are to choose blocks for which, and whose head a head takes them from.

What the blocks of one layer keep of the attention of another is measured on a text, at one share of
every row (`viewed`, `kept_between`). A dynamic program then picks the anchors (`best_anchors`), and
every head takes the head of its anchor that keeps most for it (`head_map`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.ops import reference
from cab_hf.predictors.base import Call
from cab_hf.predictors.calibration import NEEDLE_WEIGHT, Needles, block_shares_of
from cab_hf.predictors.cascade import anchor_predictor


class View(NamedTuple):
    """What is looked at of one layer; P are the heads of a plan, R rows and needle queries.

    Attributes:
        keep: bool [P, M_q, M_k], the blocks it would choose.
        mass: float32 [P, M_q, M_k], the attention blocks get, of all that queries give; sums to 1.
        needle: float32 [P, n, M_k], what falls on the needle that each of n queries looks for.
        rows: int64 [n], the query blocks of those.
    """

    keep: Tensor
    mass: Tensor
    needle: Tensor
    rows: Tensor


class Kept(NamedTuple):
    """What blocks of layer a keep for layer b: float64 [L, L, P, P], as [a, b, head, head].

    Attributes:
        mass: share of the attention of b's head that the blocks of a's head keep.
        needle: mean over needle queries of the attention on the needle that they keep.
        needed: [L, P], the mean of what there is of that.
        importance: [L], how much a layer changes its input: 1 - cosine.
    """

    mass: Tensor
    needle: Tensor
    needed: Tensor
    importance: Tensor


def with_share(config: CabConfig, share: float) -> CabConfig:
    """``config`` with no budgets but one: that share of every row."""
    if config.select == "topk":
        return replace(config, sparsity=1 - share)
    return replace(config, mass=1.0, bridges=0.0, exact_stride=0, max_density=share)


def viewed(
    q: Tensor, k: Tensor, call: Call, configs: Sequence[CabConfig], needles: Needles
) -> list[View]:
    """The `View` of one layer by each config: q [1, H, N, D] and k [1, H_kv, N, D] of one text.

    Args:
        configs: of the same blocks.
    """
    alone, (config, *_) = Call(call.spans, call.scale, 0), configs
    blocks = config.query_block, config.key_block
    mass = reference.block_shares(q, k, call.spans, call.scale, *blocks, "mean")[0]
    queries = call.spans.rows(config.query_block).queries[0, :, None]
    key = torch.arange(k.shape[2], device=k.device)
    sought = (key >= needles.starts[:, None]) & (key < needles.ends[:, None])
    needle = block_shares_of(q, k, call, config.key_block, needles.queries, sought)
    rows = needles.queries // config.query_block
    views = []
    for config in configs:
        keep = anchor_predictor(config)(q, k, alone).to_dense()[0]
        # heads that share a plan lose together
        own, sought_by = (
            x.unflatten(0, (keep.shape[0], -1)).mean(1) for x in (mass * queries, needle)
        )
        views.append(View(*(x.cpu() for x in (keep, own / queries.sum(), sought_by, rows))))
    return views


def kept_between(views: Sequence[View], importance: Sequence[float]) -> Kept:
    """What the blocks of each layer keep of every layer, over all pairs of heads."""
    layers, heads = len(views), views[0].keep.shape[0]
    rows = views[0].rows
    keep = torch.stack([view.keep.float() for view in views])
    mass = torch.stack([view.mass for view in views]).flatten(0, 1).flatten(1)
    needle = torch.stack([view.needle for view in views]).flatten(0, 1).flatten(1)
    needle = needle / max(1, len(rows))

    def products(chosen: Tensor, shares: Tensor) -> Tensor:
        found = chosen.flatten(0, 1).flatten(1) @ shares.T
        return found.view(layers, heads, layers, heads).transpose(1, 2).double()

    needed = needle.sum(-1).view(layers, heads).double()
    told = torch.tensor(importance, dtype=torch.float64)
    return Kept(products(keep, mass), products(keep[:, :, rows], needle), needed, told)


def gains(kept: Kept) -> Tensor:
    """What a head of b has of the blocks of a head of a, needles weighed as budgets weigh them."""
    return kept.mass + NEEDLE_WEIGHT * kept.needle


def similarity(kept: Kept, gain: Tensor) -> tuple[Tensor, Tensor]:
    """(mass, needle mass) that layer a keeps of layer b's, [L, L], by the best map of heads.

    The map is the best by ``gain``, as `gains` has it. A layer has its own blocks by itself.
    """
    layers, heads = kept.needed.shape
    best = torch.tensor(
        [[sources(gain, a, b) for b in range(layers)] for a in range(layers)]
    ).unsqueeze(2)
    mass, needle = (x.gather(2, best).squeeze(2) for x in (kept.mass, kept.needle))
    needed = kept.needed.sum(-1)
    return mass.mean(-1), torch.where(needed > 0, needle.sum(-1) / needed.clamp(min=1e-30), 1.0)


def sources(gain: Tensor, a: int, b: int) -> list[int]:
    """For each head of layer b, the head of layer a that it has most of; the first of several."""
    if a == b:
        return list(range(gain.shape[-1]))
    columns = gain[a, b].T.tolist()
    return [max(range(len(column)), key=column.__getitem__) for column in columns]


def values(kept: Kept) -> list[list[float]]:
    """[a][b]: what it is worth that layer a chooses for layer b, weighed by b's importance."""
    gain = gains(kept)
    layers = range(len(kept.importance))
    return [
        [
            float(kept.importance[b])
            * float(gain[a, b, sources(gain, a, b), range(gain.shape[-1])].mean())
            for b in layers
        ]
        for a in layers
    ]


def best_anchors(value: Sequence[Sequence[float]], count: int) -> tuple[int, ...]:
    """The ``count`` layers, the first among them, that are worth most as anchors.

    A layer has the blocks of the last anchor up to itself; ``value[a][b]`` is what layer b gains
    from those of layer a. Of several that are worth the same, those that come first.

    Raises:
        ValueError: for a count that is not 1 to the number of layers.
    """
    layers = len(value)
    if not 1 <= count <= layers:
        raise ValueError(f"anchors is {count}; it must be 1 to {layers}, the sparse layers.")
    # worth of layers a to b - 1 under anchor a
    worth = [[sum(value[a][a:b]) for b in range(layers + 1)] for a in range(layers)]
    # (total, anchors) of layers up to b, by b, for so many anchors
    best = {b: (worth[0][b], (0,)) for b in range(1, layers + 1)}
    for so_many in range(2, count + 1):
        best = {
            b: max(
                ((best[a][0] + worth[a][b], (*best[a][1], a)) for a in range(so_many - 1, b)),
                key=lambda found: found[0],
            )
            for b in range(so_many, layers + 1)
        }
    return best[layers][1]


def head_map(gain: Tensor, anchors: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """[layers][heads]: the head of a layer's anchor that each head has most of."""
    of_layer = [max(a for a in anchors if a <= b) for b in range(gain.shape[0])]
    return tuple(tuple(sources(gain, a, b)) for b, a in enumerate(of_layer))


def cascaded(
    config: CabConfig, kept: Kept, layers: Sequence[int], total: int, count: int, share: float
) -> CabConfig:
    """The cascade of ``count`` anchors for a model of ``total`` layers.

    Args:
        layers: the indices of those that ``kept`` is of; the others have no part.
        share: of a row that is kept.
    """
    anchors = best_anchors(values(kept), count)
    own = head_map(gains(kept), anchors)
    rows = {layer: row for layer, row in zip(layers, own, strict=True)}
    nothing = tuple(range(len(own[0])))
    table = tuple(rows.get(layer, nothing) for layer in range(total))
    return replace(
        with_share(config, share),
        predictor="cascade",
        anchors=tuple(layers[anchor] for anchor in anchors),
        # one plan for all heads has no heads to choose from
        head_map=table if len(nothing) > 1 else (),
    )
