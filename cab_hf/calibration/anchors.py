"""Which layers of a model are to choose blocks for which, and whose head a head takes them from.

What the blocks of one layer keep of the attention of another is measured on a text, at several
shares of a row (`viewed`, `kept_between`). Blocks have a price: a dynamic program picks the anchors
that are worth most at it (`best_anchors`), every head takes the head of its anchor that is, and
every head of an anchor the share that is for all who take from it (`assign_anchors`). The price is
what makes the model attend as much as it may (`cascaded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cab_hf.calibration.budgets import (
    NEEDLE_WEIGHT,
    Needles,
    Option,
    kept_blocks,
    least_kept,
    needle_shares,
    require_reachable,
    tables,
)
from cab_hf.config import CabConfig
from cab_hf.plan import Spans, block_visibility
from cab_hf.predictors import CurvaturePredictor, LayerContext
from cab_hf.predictors.attention_mass import block_mass

# of a row's blocks, what a head of an anchor may be given beside those that are forced
SHARES = (0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.45)
ROUNDS = 20  # heads and shares are found in turns, which settle after a few
HALVINGS = 40  # of the range in which the price is


class View(NamedTuple):
    """What is looked at of one layer.

    Attributes:
        keep: bool [H, M_q, M_k], the blocks it would choose.
        density: float32 [H], the share of all that is visible that they are.
        mass: float32 [H, M_q, M_k], the attention blocks get, of all that queries give; sums to 1.
        needle: float32 [H, n, M_k], what falls on the needle that each of n queries looks for.
        rows: int64 [n], the query blocks of those.
    """

    keep: Tensor
    density: Tensor
    mass: Tensor
    needle: Tensor
    rows: Tensor


class Coverage(NamedTuple):
    """What blocks of layer a keep for layer b: float64 [L, L, H, H], as [a, b, head, head].

    Attributes:
        mass: share of the attention of b's head that the blocks of a's head keep.
        needle: mean over needle queries of the attention on the needle that they keep.
        needed: [L, H], the mean of what there is of that.
        density: [L, H], the share of pairs that a's blocks are.
        importance: [L], how much a layer changes its input: 1 - cosine.
    """

    mass: Tensor
    needle: Tensor
    needed: Tensor
    density: Tensor
    importance: Tensor


class Assignment(NamedTuple):
    """Who takes blocks from whom, and how many there are.

    Attributes:
        anchors: ascending, as indices of what was measured.
        of_layer: [L], the anchor of each layer.
        sources: int64 [L, H], the head of its anchor that each head has.
        options: int64 [L, H], which of the shares each head has, by its anchor's head.
    """

    anchors: tuple[int, ...]
    of_layer: tuple[int, ...]
    sources: Tensor
    options: Tensor

    def of(self, result: Tensor) -> Tensor:
        """[L, H]: what each head has of [S, L, L, H, H], or pays of [S, L, H]."""
        layer, anchor = torch.arange(len(self.of_layer)), torch.tensor(self.of_layer)
        place = self.options, anchor[:, None].expand_as(self.sources)
        if result.ndim == 3:
            return result[(*place, self.sources)]
        head = torch.arange(self.sources.shape[1]).expand_as(self.sources)
        return result[(*place, layer[:, None].expand_as(head), self.sources, head)]


def viewed(
    q: Tensor,
    k: Tensor,
    call: LayerContext,
    config: CabConfig,
    shares: Sequence[float],
    needles: Needles,
) -> list[View]:
    """The `View` of one layer at each share of a row, the same for all of its heads.

    Args:
        q: [1, H, N, D]. k: [1, H_kv, N, D]. Of one text.
    """
    blocks = config.query_block, config.key_block
    keep = kept_blocks(q, k, call, *as_options(config, shares), CurvaturePredictor)
    density = keep.sum((1, 2)) / _visible(call.spans, config)
    mass = block_mass(q, k, call.spans, call.scale, *blocks)[0]
    mass /= call.spans.rows(config.query_block).queries.sum()
    needle = needle_shares(q, k, call, config.key_block, needles)
    of_all = [x.cpu() for x in (mass, needle, needles.queries // config.query_block)]
    by_share = zip(keep.cpu().unbind(-1), density.cpu().unbind(-1), strict=True)
    return [View(*of_share, *of_all) for of_share in by_share]


def smallest_density(config: CabConfig, length: int) -> float:
    """The share of the blocks that an anchor takes at the smallest of `SHARES`."""
    config, (option,) = as_options(config, SHARES[:1])
    keep, call = least_kept(config, option, length, CurvaturePredictor)
    return float(keep.sum() / _visible(call.spans, config))


def as_options(config: CabConfig, shares: Sequence[float]) -> tuple[CabConfig, list[Option]]:
    """Shares of a row as options of a head, and ``config`` without what would cap them.

    How blocks are scored stays.
    """
    if config.select == "topk":
        return config.changed(predictor="curvature"), [{"sparsity": 1 - x} for x in shares]
    config = config.changed(predictor="curvature", max_density=1.0)
    return config, [{"top_p": 0.0, "top_k_share": x} for x in shares]


def _visible(spans: Spans, config: CabConfig) -> Tensor:
    """int64 scalar: the blocks of which something may be seen."""
    return block_visibility(spans, config.query_block, config.key_block).sum()


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

    needed = needle.sum(-1).view(layers, heads).double()
    density = torch.stack([view.density for view in views]).double()
    values = torch.tensor(importance, dtype=torch.float64)
    return Coverage(
        products(keep, mass), products(keep[:, :, rows], needle), needed, density, values
    )


def averaged_kept(measured: Sequence[Sequence[Coverage]]) -> list[Coverage]:
    """The mean over documents of what was kept of each, by `SHARES`."""
    return [
        Coverage(*(torch.stack(parts).mean(0) for parts in zip(*of_share, strict=True)))
        for of_share in zip(*measured, strict=True)
    ]


def gains(kept: Coverage) -> Tensor:
    """What a head of b has of the blocks of a head of a, needles weighed as budgets weigh them."""
    return kept.mass + NEEDLE_WEIGHT * kept.needle


def similarity(kept: Coverage, gain: Tensor) -> tuple[Tensor, Tensor]:
    """(mass, needle mass) that layer a keeps of layer b's, [L, L], by the best map of heads.

    The map is the best by ``gain``, as `gains` has it. A layer has its own blocks by itself.
    """
    layers, heads = kept.needed.shape
    best = gain.argmax(2, keepdim=True)
    own = torch.arange(layers)
    best[own, own, 0] = torch.arange(heads)
    mass, needle = (x.gather(2, best).squeeze(2) for x in (kept.mass, kept.needle))
    needed = kept.needed.sum(-1)
    return mass.mean(-1), torch.where(needed > 0, needle.sum(-1) / needed.clamp(min=1e-30), 1.0)


def utility(kept: Sequence[Coverage], multiplier: float) -> Tensor:
    """[S, L, L, H, H]: `gains` at each share, less what the blocks of a's head cost.

    Args:
        multiplier: of attending everything, by the measure of `gains`.
    """
    return torch.stack([gains(each) - multiplier * each.density[:, None, :, None] for each in kept])


def values(worth: Tensor, importance: Tensor) -> list[list[float]]:
    """[a][b]: what it is worth that layer a chooses for layer b, weighed by b's importance.

    Every head of b takes the head and the share of a that are worth most to it.

    Args:
        worth: as of `utility`.
    """
    return (worth.amax((0, 3)).mean(-1) * importance).tolist()


def require_anchors(count: int, layers: int) -> None:
    """Refuse a number of anchors that so many sparse layers cannot have.

    Raises:
        ValueError: naming both.
    """
    if not 1 <= count <= layers:
        raise ValueError(f"anchors is {count}; it must be 1 to {layers}, the sparse layers.")


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


def assign_anchors(worth: Tensor, anchors: Sequence[int]) -> Assignment:
    """The heads and shares that are worth most, each in turn and the others as they are.

    A head of an anchor has its own blocks. Of several that are worth the same, the first.

    Args:
        worth: as of `utility`.
    """
    shares, layers, _, heads, _ = worth.shape
    of_layer = [max(a for a in anchors if a <= b) for b in range(layers)]
    every = torch.arange(heads)
    options = {a: worth[:, a, a, every, every].argmax(0) for a in anchors}
    before = None
    for _ in range(ROUNDS):
        sources = [
            every if a == b else worth[options[a], a, b, every].argmax(0)
            for b, a in enumerate(of_layer)
        ]
        for a in anchors:
            total = worth.new_zeros(shares, heads)
            for b in (b for b in range(layers) if of_layer[b] == a):
                total.index_add_(1, sources[b], worth[:, a, b, sources[b], every])
            options[a] = total.argmax(0)
        now = torch.stack([options[a][source] for a, source in zip(of_layer, sources, strict=True)])
        if before is not None and torch.equal(now, before):
            break
        before = now
    return Assignment(tuple(anchors), tuple(of_layer), torch.stack(sources), now)


def best_at(kept: Sequence[Coverage], count: int, multiplier: float) -> Assignment:
    """The `Assignment` to the ``count`` anchors that are worth most at a price."""
    worth = utility(kept, multiplier)
    return assign_anchors(worth, best_anchors(values(worth, kept[0].importance), count))


def within(kept: Sequence[Coverage], count: int, target: float) -> Assignment:
    """The `Assignment` to ``count`` anchors under which the mean density of heads is the target.

    Raises:
        ValueError: for a target below what the smallest share takes; see `best_anchors` for the
            count.
    """
    density = torch.stack([each.density for each in kept])
    least, most = (float(each.density.mean()) for each in (kept[0], kept[-1]))
    require_reachable(target, least)
    result = None
    cheap, dear = 0.0, 2 * (1 + NEEDLE_WEIGHT) / max(1e-6, most - least)
    for halving in range(HALVINGS):
        # the first is what costs nothing
        multiplier = (cheap + dear) / 2 if halving else cheap
        tried = best_at(kept, count, multiplier)
        if float(tried.of(density).mean()) <= target:
            result, dear = tried, multiplier
            if not multiplier:
                break
        else:
            cheap = multiplier
    return result or best_at(kept, count, dear)


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
        kept: at each of `SHARES`; of the layers with these indices, the others have no part.
        target: share of the pairs that the model is to attend.

    Raises:
        ValueError: see `within`.
    """
    result = within(kept, count, target)
    same = list(range(result.sources.shape[1]))
    choice = torch.zeros(total, len(same), dtype=torch.int64)
    for anchor in result.anchors:
        choice[layers[anchor]] = result.options[anchor]
    rows = {layer: row.tolist() for layer, row in zip(layers, result.sources, strict=True)}
    config, options = as_options(config, SHARES)
    return replace(
        config,
        **tables(options, choice),
        predictor="cascade",
        anchors=tuple(layers[anchor] for anchor in result.anchors),
        head_map=[rows.get(layer, same) for layer in range(total)],
    )


def nearest(target: float) -> int:
    """Which of `SHARES` is nearest to the target."""
    return min(range(len(SHARES)), key=lambda i: abs(SHARES[i] - target))
