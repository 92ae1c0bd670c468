"""Calibration of one `mass_threshold` for a model, at which the model reaches a target density.

One threshold spends the budget where the attention mass is, because rows differ more than heads do.
One dense pass over a few documents counts the pairs that each layer keeps at each threshold of
`THRESHOLDS`. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, exp, floor, log

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CAB, CabConfig
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges, block_visibility
from cab_hf.predictors import LayerContext
from cab_hf.predictors.cascade import anchor_of
from cab_hf.selection.reference import ScoreOptions, block_scores, capped_scores

# descending, in equal ratios of 2 ** (1 / 4), from 0.5 to about 1e-6
THRESHOLDS = tuple(2 ** (-step / 4) for step in range(4, 80))


def densities(q: Tensor, k: Tensor, call: LayerContext, config: CabConfig) -> Tensor:
    """Return the density of a layer at each threshold, float64 [T + 2].

    The density is the share of the (query, key) pairs that the layer attends. The thresholds are 1,
    `THRESHOLDS` and 0. At 1 a row keeps its forced blocks, and the blocks that one query needs.
    ``max_density`` limits the blocks of a row at every threshold.

    Args:
        q: queries of one sequence, [1, H, N, D].
        k: keys of the sequence, [1, H_kv, N, D].
    """
    pairs = block_pairs(call.ranges, config)
    rising = torch.tensor(THRESHOLDS[::-1], device=q.device)
    pairs_by_threshold = torch.zeros(len(THRESHOLDS) + 2, dtype=torch.float64, device=q.device)
    options = ScoreOptions(call.scale, call.channels, call.sinks, call.softcap)
    rank_of_heads = block_scores(q, k, ranges=call.ranges, config=config, options=options)
    for rank in capped_scores(rank_of_heads, call.ranges, config)[0]:
        # number of thresholds that a block reaches, plus one if it is kept at threshold 1
        num_reached = torch.bucketize(rank, rising, right=True) + (rank >= 1)
        is_visible = rank >= 0
        pairs_by_threshold += torch.bincount(
            num_reached[is_visible], pairs[is_visible], len(pairs_by_threshold)
        )
    return (pairs_by_threshold.flip(0).cumsum(0) / (pairs.sum() * q.shape[1])).cpu()


def block_pairs(ranges: KeyRanges, config: CabConfig) -> Tensor:
    """Return the visible (query, key) pairs of each block of one sequence, float64 [M_q, M_k]."""
    start = torch.arange(0, ranges.kv_length, config.key_block, device=ranges.start.device)
    first, last = ranges.start[0, :, None], ranges.end[0, :, None]
    seen = torch.minimum(start + config.key_block - 1, last) - torch.maximum(start, first) + 1
    padding = -ranges.q_length % config.query_block
    rows = F.pad(seen.clamp(min=0), (0, 0, 0, padding)).unflatten(0, (-1, config.query_block))
    return rows.sum(1).double()


def least_density(config: CabConfig, length: int) -> float:
    """Return the share of the (query, key) pairs of ``length`` tokens that are in forced blocks."""
    ranges = KeyRanges.causal(1, length, length, "cpu")
    visible = block_visibility(ranges, config.query_block, config.key_block)
    pairs = block_pairs(ranges, config)
    return float((pairs * reference.forced_blocks(visible, ranges, config)[0]).sum() / pairs.sum())


def most_density(config: CabConfig, length: int) -> float:
    """Return the largest share of the pairs of ``length`` tokens that ``max_density`` allows."""
    ranges = KeyRanges.causal(1, length, length, "cpu")
    visible = block_visibility(ranges, config.query_block, config.key_block)
    forced = reference.forced_blocks(visible, ranges, config)
    # blocks that are not forced have the same pairs, whatever their order
    rank = torch.zeros(visible.shape).masked_fill(forced, torch.inf).masked_fill(~visible, -1.0)
    can_be_kept = capped_scores(rank[:, None], ranges, config)[0, 0] >= 0
    pairs = block_pairs(ranges, config)
    return float((pairs * can_be_kept).sum() / pairs.sum())


def require_target(config: CabConfig, target: float, length: int) -> None:
    """Raise a ValueError if no threshold makes ``config`` attend ``target`` of ``length`` tokens.

    The predictor must read a threshold, and the target must be between the density of forced
    blocks and the density that ``max_density`` allows.
    """
    if config.predictor not in CAB:
        raise ValueError(
            f"predictor must be one of {', '.join(map(repr, CAB))}, got {config.predictor!r}, "
            "which does not select blocks by mass. Change the predictor before you calibrate."
        )
    require_reachable(target, least_density(config, length))
    most = most_density(config, length)
    if target > most + 1e-6:
        # rounded down, so that the density in the message is accepted as a target
        raise ValueError(
            f"target_density must be at most {floor(1000 * most + 1e-6) / 1000:.3f} with "
            f"max_density={config.max_density:g} at this length, got {target:g}. Raise "
            "max_density or lower target_density."
        )


def require_reachable(target: float, least: float) -> None:
    """Raise a ValueError if the target density is below the smallest density of the model."""
    if not least <= target:
        # rounded up, so that the density in the message is accepted as a target
        named = ceil(1000 * least - 1e-6) / 1000
        raise ValueError(
            f"target_density must be at least {named:.3f}, the smallest density of the model at "
            f"this length, got {target:g}. Raise target_density or use longer sequences."
        )


def fitted(config: CabConfig, measured: Sequence[Mapping[int, Tensor]], target: float) -> CabConfig:
    """Return ``config`` with the threshold at which the mean density of the layers is ``target``.

    Args:
        config: settings of the model.
        measured: result of `densities` per document, by layer.
        target: target density.

    Raises:
        ValueError: no layer is sparse, or no threshold reaches the target.
    """
    layers = sorted(measured[0])
    if not layers:
        raise ValueError(
            "model must have at least one sparse layer, got none. Remove layers from dense_layers."
        )
    # a layer of a cascade attends the blocks that its anchor selects
    choosing = [anchor_of(config, layer) for layer in layers]
    choosing = [layer if a is None else a for a, layer in zip(choosing, layers, strict=True)]
    of_all = torch.stack([each[layer] for each in measured for layer in choosing]).mean(0).tolist()
    *of_all, at_zero = of_all
    # no block reaches a threshold above 1
    at, threshold = threshold_for((1.0, *THRESHOLDS), of_all, target)
    if at == len(THRESHOLDS) and at_zero - target <= target - of_all[-1]:
        threshold = 0.0
    return config.changed(mass_threshold=threshold)


def threshold_for(
    thresholds: Sequence[float], spent: Sequence[float], target: float
) -> tuple[int, float]:
    """Return the index of the last threshold within the target, and the threshold that meets it.

    The second value is interpolated between this threshold and the next one, linearly in their
    logarithms, and rounded to three digits.

    Args:
        thresholds: descending thresholds.
        spent: density at each threshold, ascending.
        target: target density.

    Raises:
        ValueError: ``target`` is below the density of the first threshold.
    """
    require_reachable(target, spent[0])
    at = max(at for at, density in enumerate(spent) if density <= target)
    named = thresholds[at]
    if at + 1 < len(thresholds):
        way = (target - spent[at]) / max(spent[at + 1] - spent[at], 1e-12)
        named *= exp(min(way, 1.0) * log(thresholds[at + 1] / named))
    return at, float(f"{named:.3g}")
