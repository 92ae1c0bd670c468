"""One threshold for a model: what `mass_threshold` makes it attend a density.

Rows differ more than heads do, and one threshold spends where attention is: what every layer would
keep at each of `THRESHOLDS` is counted in one dense pass over a few texts. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, exp, floor, log

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CAB, CabConfig
from cab_hf.ops import reference
from cab_hf.plan import Spans, block_visibility
from cab_hf.predictors import LayerContext
from cab_hf.predictors.cascade import anchor_of
from cab_hf.predictors.rows import capped_ranks, ranks

# falling, in equal ratios
THRESHOLDS = tuple(2 ** (-step / 4) for step in range(4, 80))


def densities(q: Tensor, k: Tensor, call: LayerContext, config: CabConfig) -> Tensor:
    """Return the share of the pairs that a layer attends at each threshold: float64 [T + 2].

    The thresholds are 1, `THRESHOLDS` and 0. At 1 a row keeps its forced blocks, and the blocks
    that one query needs. ``max_density`` limits the blocks of a row at every threshold.

    Args:
        q: [1, H, N, D]. k: [1, H_kv, N, D]. Of one text.
    """
    pairs = block_pairs(call.spans, config)
    rising = torch.tensor(THRESHOLDS[::-1], device=q.device)
    found = torch.zeros(len(THRESHOLDS) + 2, dtype=torch.float64, device=q.device)
    for rank in capped_ranks(ranks(q, k, call, config), call.spans, config)[0]:
        # how many thresholds a block reaches, and one more where it needs none
        place = torch.bucketize(rank, rising, right=True) + (rank >= 1)
        seen = rank >= 0
        found += torch.bincount(place[seen], pairs[seen], len(found))
    return (found.flip(0).cumsum(0) / (pairs.sum() * q.shape[1])).cpu()


def block_pairs(spans: Spans, config: CabConfig) -> Tensor:
    """float64 [M_q, M_k]: (query, key) pairs of each block that the spans of the one text allow."""
    start = torch.arange(0, spans.kv_length, config.key_block, device=spans.first.device)
    first, last = spans.first[0, :, None], spans.last[0, :, None]
    seen = torch.minimum(start + config.key_block - 1, last) - torch.maximum(start, first) + 1
    padding = -spans.q_length % config.query_block
    rows = F.pad(seen.clamp(min=0), (0, 0, 0, padding)).unflatten(0, (-1, config.query_block))
    return rows.sum(1).double()


def least_density(config: CabConfig, length: int) -> float:
    """The share of the pairs that forced blocks are in a text of so many tokens."""
    spans = Spans.causal(1, length, length, "cpu")
    visible = block_visibility(spans, config.query_block, config.key_block)
    pairs = block_pairs(spans, config)
    return float((pairs * reference.forced_blocks(visible, spans, config)[0]).sum() / pairs.sum())


def most_density(config: CabConfig, length: int) -> float:
    """Return the largest share of the pairs of ``length`` tokens that ``max_density`` allows."""
    spans = Spans.causal(1, length, length, "cpu")
    visible = block_visibility(spans, config.query_block, config.key_block)
    forced = reference.forced_blocks(visible, spans, config)
    # blocks that are not forced have the same pairs, whatever their order
    rank = torch.zeros(visible.shape).masked_fill(forced, torch.inf).masked_fill(~visible, -1.0)
    can_be_kept = capped_ranks(rank[:, None], spans, config)[0, 0] >= 0
    pairs = block_pairs(spans, config)
    return float((pairs * can_be_kept).sum() / pairs.sum())


def require_target(config: CabConfig, target: float, length: int) -> None:
    """Raise a ValueError if no threshold makes ``config`` attend ``target`` of ``length`` tokens.

    The predictor must read a threshold, and the target must be between the density of forced
    blocks and the density that ``max_density`` allows.
    """
    if config.predictor not in CAB:
        raise ValueError(
            f"predictor {config.predictor!r} does not choose blocks by their mass, so there "
            "is nothing to calibrate."
        )
    require_reachable(target, least_density(config, length))
    most = most_density(config, length)
    if target > most + 1e-6:
        # rounded down: a target of the density in the message is accepted
        raise ValueError(
            f"target_density is {target:g}; with max_density={config.max_density:g} the model "
            f"attends at most {floor(1000 * most + 1e-6) / 1000:.3f} at this length. Raise "
            "max_density or lower target_density."
        )


def require_reachable(target: float, least: float) -> None:
    """Refuse a target density below what a model takes at the least.

    Raises:
        ValueError: naming both.
    """
    if not least <= target:
        # rounded up: what is named is accepted
        named = ceil(1000 * least - 1e-6) / 1000
        raise ValueError(
            f"target_density must be at least {named:.3f}, the least that the model attends at "
            f"this length (a smaller share of longer texts), got {target:g}."
        )


def fitted(config: CabConfig, measured: Sequence[Mapping[int, Tensor]], target: float) -> CabConfig:
    """``config`` with the threshold at which layers attend the target, in the mean.

    Args:
        measured: `densities` of each document, by layer.
    """
    layers = sorted(measured[0])
    if not layers:
        raise ValueError("No layer of the model attends sparsely: there is nothing to calibrate.")
    # a layer of a cascade attends what its anchor chooses
    choosing = [anchor_of(config, layer) for layer in layers]
    choosing = [layer if a is None else a for a, layer in zip(choosing, layers, strict=True)]
    of_all = torch.stack([each[layer] for each in measured for layer in choosing]).mean(0).tolist()
    *of_all, at_zero = of_all
    # nothing reaches a threshold above 1
    at, threshold = threshold_for((1.0, *THRESHOLDS), of_all, target)
    if at == len(THRESHOLDS) and at_zero - target <= target - of_all[-1]:
        threshold = 0.0
    return config.changed(mass_threshold=threshold)


def threshold_for(
    thresholds: Sequence[float], spent: Sequence[float], target: float
) -> tuple[int, float]:
    """The last of ``thresholds`` that spends no more than the target, and the one that meets it.

    The latter is on a line to the next one, if any, by their logarithms; to three digits.

    Raises:
        ValueError: for a target below what the first one spends.
    """
    require_reachable(target, spent[0])
    at = max(at for at, density in enumerate(spent) if density <= target)
    named = thresholds[at]
    if at + 1 < len(thresholds):
        way = (target - spent[at]) / max(spent[at + 1] - spent[at], 1e-12)
        named *= exp(min(way, 1.0) * log(thresholds[at + 1] / named))
    return at, float(f"{named:.3g}")
