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

from cab_hf.config import CAB_PREDICTORS, CabConfig
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges, block_visibility
from cab_hf.predictors import LayerContext
from cab_hf.predictors.cascade import find_anchor
from cab_hf.selection.reference import ScoreOptions, cap_scores, compute_block_scores

# values of `CabConfig.mass_threshold` at which layers are measured, descending from 0.5 to about
# 1e-6 in equal ratios of 2 ** (1 / 4)
THRESHOLDS = tuple(2 ** (-step / 4) for step in range(4, 80))


def measure_densities(
    q: Tensor, k: Tensor, layer_context: LayerContext, config: CabConfig
) -> Tensor:
    """Return the density of a layer at the mass thresholds 1, `THRESHOLDS` and 0, float64 [T + 2].

    The density is the share of the (query, key) pairs that the layer attends to. At threshold 1, a
    row selects its forced blocks, and the blocks that reach ``share_threshold``. At every
    threshold, ``max_density`` limits the number of selected blocks.

    Args:
        q: [1, H, N, D], queries of one sequence.
        k: [1, H_kv, N, D], keys of the sequence.
        layer_context: context of the layer.
        config: settings of the layer.
    """
    block_pairs = count_block_pairs(layer_context.ranges, config)
    ascending_thresholds = torch.tensor(THRESHOLDS[::-1], device=q.device)
    pairs_by_threshold = torch.zeros(len(THRESHOLDS) + 2, dtype=torch.float64, device=q.device)
    score_options = ScoreOptions(
        layer_context.scale, layer_context.channels, layer_context.sinks, layer_context.softcap
    )
    scores = compute_block_scores(
        q, k, key_ranges=layer_context.ranges, config=config, score_options=score_options
    )
    for head_scores in cap_scores(scores, layer_context.ranges, config)[0]:
        # number of the thresholds 1 and `THRESHOLDS` at which a row selects each block
        num_reached_thresholds = torch.bucketize(head_scores, ascending_thresholds, right=True) + (
            head_scores >= 1
        )
        is_visible = head_scores >= 0
        pairs_by_threshold += torch.bincount(
            num_reached_thresholds[is_visible], block_pairs[is_visible], len(pairs_by_threshold)
        )
    return (pairs_by_threshold.flip(0).cumsum(0) / (block_pairs.sum() * q.shape[1])).cpu()


def count_block_pairs(key_ranges: KeyRanges, config: CabConfig) -> Tensor:
    """Return the visible (query, key) pairs of each block of one sequence, float64 [M_q, M_k]."""
    block_start = torch.arange(
        0, key_ranges.kv_length, config.key_block, device=key_ranges.start.device
    )
    block_end = block_start + config.key_block - 1
    first_key, last_key = key_ranges.start[0, :, None], key_ranges.end[0, :, None]
    # [N_q, M_k], number of visible keys of each query in each key block
    num_visible_keys = (
        torch.minimum(block_end, last_key) - torch.maximum(block_start, first_key) + 1
    )
    num_padding_queries = -key_ranges.q_length % config.query_block
    num_visible_keys = F.pad(num_visible_keys.clamp(min=0), (0, 0, 0, num_padding_queries))
    return num_visible_keys.unflatten(0, (-1, config.query_block)).sum(1).double()


def compute_min_density(config: CabConfig, num_tokens: int) -> float:
    """Return the share of (query, key) pairs of ``num_tokens`` tokens that are in forced blocks."""
    key_ranges = KeyRanges.causal(1, num_tokens, num_tokens, "cpu")
    is_visible = block_visibility(key_ranges, config.query_block, config.key_block)
    block_pairs = count_block_pairs(key_ranges, config)
    is_forced = reference.forced_blocks(is_visible, key_ranges, config)[0]
    return float((block_pairs * is_forced).sum() / block_pairs.sum())


def compute_max_density(config: CabConfig, num_tokens: int) -> float:
    """Return the largest density of ``num_tokens`` tokens that ``max_density`` allows."""
    key_ranges = KeyRanges.causal(1, num_tokens, num_tokens, "cpu")
    is_visible = block_visibility(key_ranges, config.query_block, config.key_block)
    is_forced = reference.forced_blocks(is_visible, key_ranges, config)
    # equal ranks, because all blocks that are not forced contain the same number of pairs
    scores = (
        torch.zeros(is_visible.shape)
        .masked_fill(is_forced, torch.inf)
        .masked_fill(~is_visible, -1.0)
    )
    can_be_selected = cap_scores(scores[:, None], key_ranges, config)[0, 0] >= 0
    block_pairs = count_block_pairs(key_ranges, config)
    return float((block_pairs * can_be_selected).sum() / block_pairs.sum())


def require_reachable_target(
    config: CabConfig, target_density: float, document_tokens: int
) -> None:
    """Raise a ValueError if no threshold reaches the target density.

    Args:
        config: settings, whose predictor must select blocks by mass.
        target_density: target density, which must be between the results of `compute_min_density`
            and `compute_max_density`.
        document_tokens: length of the calibration documents, in tokens.
    """
    if config.predictor not in CAB_PREDICTORS:
        raise ValueError(
            f"predictor must be one of {', '.join(map(repr, CAB_PREDICTORS))}, got "
            f"{config.predictor!r}, which does not select blocks by mass. Change the predictor "
            "before you calibrate."
        )
    require_min_density(target_density, compute_min_density(config, document_tokens))
    max_density = compute_max_density(config, document_tokens)
    if target_density > max_density + 1e-6:
        # rounded down, so that the density in the message is accepted as a target
        raise ValueError(
            f"target_density must be at most {floor(1000 * max_density + 1e-6) / 1000:.3f} with "
            f"max_density={config.max_density:g} at this length, got {target_density:g}. Raise "
            "max_density or lower target_density."
        )


def require_min_density(target_density: float, min_density: float) -> None:
    """Raise a ValueError if the target density is below ``min_density``."""
    if not min_density <= target_density:
        # rounded up, so that the density in the message is accepted as a target
        rounded_density = ceil(1000 * min_density - 1e-6) / 1000
        raise ValueError(
            f"target_density must be at least {rounded_density:.3f}, the smallest density of the "
            f"model at this length, got {target_density:g}. Raise target_density or use longer "
            "sequences."
        )


def fit_threshold(
    config: CabConfig, measured_densities: Sequence[Mapping[int, Tensor]], target_density: float
) -> CabConfig:
    """Return the settings with the threshold at which layers have the mean ``target_density``.

    Args:
        config: settings of the model.
        measured_densities: for each document, a dict from layer index to the result of
            `measure_densities`.
        target_density: target density.

    Raises:
        ValueError: if no layer is sparse, or no threshold reaches the target.
    """
    layer_indices = sorted(measured_densities[0])
    if not layer_indices:
        raise ValueError(
            "model must have at least one sparse layer, got none. Remove layers from dense_layers."
        )
    # a layer of a cascade attends to the blocks that its anchor selects
    anchors = [find_anchor(config, layer) for layer in layer_indices]
    selecting_layers = [
        layer if anchor is None else anchor
        for layer, anchor in zip(layer_indices, anchors, strict=True)
    ]
    layer_densities = [
        document_densities[layer]
        for document_densities in measured_densities
        for layer in selecting_layers
    ]
    *mean_densities, density_at_threshold_0 = torch.stack(layer_densities).mean(0).tolist()
    threshold_index, threshold = interpolate_threshold(
        (1.0, *THRESHOLDS), mean_densities, target_density
    )
    is_last_threshold = threshold_index == len(THRESHOLDS)
    if (
        is_last_threshold
        and density_at_threshold_0 - target_density <= target_density - mean_densities[-1]
    ):
        threshold = 0.0
    return config.changed(mass_threshold=threshold)


def interpolate_threshold(
    thresholds: Sequence[float], densities: Sequence[float], target_density: float
) -> tuple[int, float]:
    """Return the threshold at which the density is ``target_density``, by interpolation.

    Args:
        thresholds: descending thresholds.
        densities: density at each threshold, ascending.
        target_density: target density.

    Returns:
        The index of the last threshold whose density is at most the target; and a value between
        this threshold and the next threshold, interpolated linearly in the logarithms of the
        thresholds and rounded to three digits.

    Raises:
        ValueError: if ``target_density`` is below the density of the first threshold.
    """
    require_min_density(target_density, densities[0])
    threshold_index = max(i for i, density in enumerate(densities) if density <= target_density)
    threshold = thresholds[threshold_index]
    if threshold_index + 1 < len(thresholds):
        density_step = max(densities[threshold_index + 1] - densities[threshold_index], 1e-12)
        interpolation_fraction = min(
            (target_density - densities[threshold_index]) / density_step, 1.0
        )
        threshold *= exp(interpolation_fraction * log(thresholds[threshold_index + 1] / threshold))
    return threshold_index, float(f"{threshold:.3g}")
