"""Calibration of one `mass_threshold` for a model, at which the model reaches a target density.

All layers and heads have the same threshold. Rows with much attention mass in few blocks then
select fewer blocks than other rows. One dense pass over a few documents counts the (query, key)
pairs that each layer selects at each threshold of `THRESHOLDS`. Nothing is trained.
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

# values of `CabConfig.mass_threshold` at which layers are measured, descending from 0.5 to about
# 1e-6 in equal ratios of 2 ** (1 / 4)
THRESHOLDS = tuple(2 ** (-step / 4) for step in range(4, 80))


def densities(q: Tensor, k: Tensor, call: LayerContext, config: CabConfig) -> Tensor:
    """Return the density of a layer at the mass thresholds 1, `THRESHOLDS` and 0, float64 [T + 2].

    The density is the share of the (query, key) pairs that the layer attends to. At threshold 1, a
    row selects its forced blocks, and the blocks that reach ``share_threshold``. At every
    threshold, ``max_density`` limits the number of selected blocks.

    Args:
        q: [1, H, N, D], queries of one sequence.
        k: [1, H_kv, N, D], keys of the sequence.
        call: context of the layer.
        config: settings of the layer.
    """
    pairs = block_pairs(call.ranges, config)
    ascending = torch.tensor(THRESHOLDS[::-1], device=q.device)
    pairs_by_threshold = torch.zeros(len(THRESHOLDS) + 2, dtype=torch.float64, device=q.device)
    options = ScoreOptions(call.scale, call.channels, call.sinks, call.softcap)
    rank_of_heads = block_scores(q, k, ranges=call.ranges, config=config, options=options)
    for rank in capped_scores(rank_of_heads, call.ranges, config)[0]:
        # number of the thresholds 1 and `THRESHOLDS` at which a row selects each block
        num_reached = torch.bucketize(rank, ascending, right=True) + (rank >= 1)
        is_visible = rank >= 0
        pairs_by_threshold += torch.bincount(
            num_reached[is_visible], pairs[is_visible], len(pairs_by_threshold)
        )
    return (pairs_by_threshold.flip(0).cumsum(0) / (pairs.sum() * q.shape[1])).cpu()


def block_pairs(ranges: KeyRanges, config: CabConfig) -> Tensor:
    """Return the visible (query, key) pairs of each block of one sequence, float64 [M_q, M_k]."""
    start = torch.arange(0, ranges.kv_length, config.key_block, device=ranges.start.device)
    end = start + config.key_block - 1
    first_key, last_key = ranges.start[0, :, None], ranges.end[0, :, None]
    # [N_q, M_k], number of visible keys of each query in each key block
    num_visible = torch.minimum(end, last_key) - torch.maximum(start, first_key) + 1
    padding = -ranges.q_length % config.query_block
    num_visible = F.pad(num_visible.clamp(min=0), (0, 0, 0, padding))
    return num_visible.unflatten(0, (-1, config.query_block)).sum(1).double()


def least_density(config: CabConfig, length: int) -> float:
    """Return the share of the (query, key) pairs of ``length`` tokens that are in forced blocks."""
    ranges = KeyRanges.causal(1, length, length, "cpu")
    visible = block_visibility(ranges, config.query_block, config.key_block)
    pairs = block_pairs(ranges, config)
    is_forced = reference.forced_blocks(visible, ranges, config)[0]
    return float((pairs * is_forced).sum() / pairs.sum())


def most_density(config: CabConfig, length: int) -> float:
    """Return the largest density of ``length`` tokens that ``max_density`` allows."""
    ranges = KeyRanges.causal(1, length, length, "cpu")
    visible = block_visibility(ranges, config.query_block, config.key_block)
    is_forced = reference.forced_blocks(visible, ranges, config)
    # equal ranks, because all blocks that are not forced contain the same number of pairs
    rank = torch.zeros(visible.shape).masked_fill(is_forced, torch.inf).masked_fill(~visible, -1.0)
    can_be_selected = capped_scores(rank[:, None], ranges, config)[0, 0] >= 0
    pairs = block_pairs(ranges, config)
    return float((pairs * can_be_selected).sum() / pairs.sum())


def require_target(config: CabConfig, target: float, length: int) -> None:
    """Raise a ValueError if no threshold reaches the target density.

    Args:
        config: settings, whose predictor must select blocks by mass.
        target: target density, which must be between the results of `least_density` and
            `most_density`.
        length: length of the calibration documents, in tokens.
    """
    if config.predictor not in CAB:
        raise ValueError(
            f"predictor must be one of {', '.join(map(repr, CAB))}, got {config.predictor!r}, "
            "which does not select blocks by mass. Change the predictor before you calibrate."
        )
    require_reachable(target, least_density(config, length))
    largest = most_density(config, length)
    if target > largest + 1e-6:
        # rounded down, so that the density in the message is accepted as a target
        raise ValueError(
            f"target_density must be at most {floor(1000 * largest + 1e-6) / 1000:.3f} with "
            f"max_density={config.max_density:g} at this length, got {target:g}. Raise "
            "max_density or lower target_density."
        )


def require_reachable(target: float, least: float) -> None:
    """Raise a ValueError if the target density is below ``least``, the least possible density."""
    if not least <= target:
        # rounded up, so that the density in the message is accepted as a target
        accepted = ceil(1000 * least - 1e-6) / 1000
        raise ValueError(
            f"target_density must be at least {accepted:.3f}, the smallest density of the model at "
            f"this length, got {target:g}. Raise target_density or use longer sequences."
        )


def fit_threshold(
    config: CabConfig, measured: Sequence[Mapping[int, Tensor]], target: float
) -> CabConfig:
    """Return the settings with the threshold at which the mean density of the layers is ``target``.

    Args:
        config: settings of the model.
        measured: for each document, a dict from layer index to the result of `densities`.
        target: target density.

    Raises:
        ValueError: if no layer is sparse, or no threshold reaches the target.
    """
    layers = sorted(measured[0])
    if not layers:
        raise ValueError(
            "model must have at least one sparse layer, got none. Remove layers from dense_layers."
        )
    # a layer of a cascade attends to the blocks that its anchor selects
    anchors = [anchor_of(config, layer) for layer in layers]
    selecting_layers = [
        layer if anchor is None else anchor for layer, anchor in zip(layers, anchors, strict=True)
    ]
    per_layer = [document[layer] for document in measured for layer in selecting_layers]
    *mean_densities, density_at_zero = torch.stack(per_layer).mean(0).tolist()
    index, threshold = threshold_for((1.0, *THRESHOLDS), mean_densities, target)
    is_last = index == len(THRESHOLDS)
    if is_last and density_at_zero - target <= target - mean_densities[-1]:
        threshold = 0.0
    return config.changed(mass_threshold=threshold)


def threshold_for(
    thresholds: Sequence[float], densities: Sequence[float], target: float
) -> tuple[int, float]:
    """Return the threshold at which the density is ``target``, by interpolation.

    Args:
        thresholds: descending thresholds.
        densities: density at each threshold, ascending.
        target: target density.

    Returns:
        The index of the last threshold whose density is at most the target; and a value between
        this threshold and the next threshold, interpolated linearly in the logarithms of the
        thresholds and rounded to three digits.

    Raises:
        ValueError: if ``target`` is below the density of the first threshold.
    """
    require_reachable(target, densities[0])
    index = max(i for i, density in enumerate(densities) if density <= target)
    threshold = thresholds[index]
    if index + 1 < len(thresholds):
        step = max(densities[index + 1] - densities[index], 1e-12)
        fraction = min((target - densities[index]) / step, 1.0)
        threshold *= exp(fraction * log(thresholds[index + 1] / threshold))
    return index, float(f"{threshold:.3g}")
