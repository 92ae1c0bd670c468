"""Calibration of a cascade: the anchor layer of each layer, and the anchor's head for each head.

1. `measure_layer` and `coverage_of_layers` measure one sequence at several mass thresholds. The
   result for layers a and b is the share of the attention of b to the blocks that a selects.
2. At each threshold, `best_anchors` finds the anchors with the largest total of `values`, by a
   dynamic program.
3. `assign_anchors` maps every head to the head of its anchor with the largest of `gains`.
4. `fit_cascade` sets one threshold for all layers, at which the model reaches its target density.
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

# values of `CabConfig.mass_threshold` at which layers are measured, descending
THRESHOLDS = (0.064, 0.032, 0.016, 0.011, 0.008, 0.0055, 0.004, 0.0028, 0.002, 0.0014)
# weight of the attention to needles relative to the attention to all blocks, in `gains`
NEEDLE_WEIGHT = 3.0


class Needles(NamedTuple):
    """Queries that need a needle, a hidden passage, and the position of each needle.

    Attributes:
        queries: int64 [n], positions of the queries.
        starts: int64 [n], first position of the needle of each query.
        ends: int64 [n], position after the needle of each query.
    """

    queries: Tensor
    starts: Tensor
    ends: Tensor


class LayerMeasurement(NamedTuple):
    """The measurement of one layer at one threshold.

    Attributes:
        selected: bool [H, M_q, M_k], True for the blocks that the layer selects.
        density: float64 [H], share of all (query, key) pairs in the selected blocks.
        mass: float32 [H, M_q, M_k], share of the attention per block, with sum 1 per head.
        needle: float32 [H, n, M_k], attention of each needle query to its needle, per key block.
        rows: int64 [n], query blocks of the needle queries.
    """

    selected: Tensor
    density: Tensor
    mass: Tensor
    needle: Tensor
    rows: Tensor


class Coverage(NamedTuple):
    """The attention of each layer b to the blocks that each layer a selects.

    The dimensions of [L, L, H, H] are layer a, layer b, head of a and head of b.

    Attributes:
        mass: float64 [L, L, H, H], share of the attention of b to the blocks of a.
        needle: float64 [L, L, H, H], attention of b to needles in the blocks of a, mean over needle
            queries.
        density: float64 [L, H], share of all (query, key) pairs in the blocks of a.
        importance: float64 [L], change of the hidden states by the layer: 1 - cosine similarity of
            its input and output.
    """

    mass: Tensor
    needle: Tensor
    density: Tensor
    importance: Tensor


class Assignment(NamedTuple):
    """Anchors of a cascade: the anchor layer of each layer, and the anchor's head for each head.

    Attributes:
        anchors: indices of the anchors among the L measured layers, ascending.
        of_layer: for each measured layer, the index of its anchor among the measured layers.
        sources: int64 [L, H], the anchor's head whose blocks each head attends to.
    """

    anchors: tuple[int, ...]
    of_layer: tuple[int, ...]
    sources: Tensor

    def density(self, coverage: Coverage) -> float:
        """Return the share of (query, key) pairs that are attended, mean over layers and heads."""
        return float(coverage.density[torch.tensor(self.of_layer)].gather(1, self.sources).mean())


def measure_layer(
    q: Tensor, k: Tensor, call: LayerContext, config: CabConfig, needles: Needles
) -> list[LayerMeasurement]:
    """Return the measurement of one layer at each of `THRESHOLDS`.

    Args:
        q: [1, H, N, D], queries of one sequence.
        k: [1, H_kv, N, D], keys of the sequence.
        call: context of the layer.
        config: settings of the layer.
        needles: needle queries of the sequence.
    """
    options = ScoreOptions(call.scale, call.channels, call.sinks, call.softcap)
    rank = block_scores(q, k, ranges=call.ranges, config=config, options=options)
    rank = capped_scores(rank, call.ranges, config)[0]
    selected = torch.stack([rank >= threshold for threshold in THRESHOLDS]).cpu()
    pairs = block_pairs(call.ranges, config).cpu().flatten()
    densities = torch.stack([blocks.flatten(1).double() @ pairs for blocks in selected])
    densities = densities / pairs.sum()
    mass = block_mass(
        q,
        k,
        ranges=call.ranges,
        scale=call.scale,
        query_block=config.query_block,
        key_block=config.key_block,
    )[0]
    mass /= call.ranges.rows(config.query_block).queries.sum()
    needle = needle_shares(q, k, call, key_block=config.key_block, needles=needles)
    mass, needle, rows = mass.cpu(), needle.cpu(), (needles.queries // config.query_block).cpu()
    return [
        LayerMeasurement(selected=blocks, density=density, mass=mass, needle=needle, rows=rows)
        for blocks, density in zip(selected, densities, strict=True)
    ]


def needle_shares(
    q: Tensor, k: Tensor, call: LayerContext, key_block: int, needles: Needles
) -> Tensor:
    """Return the attention of each needle query to its needle, float32 [H, n, M_k].

    Args:
        q: [1, H, N, D], queries of one sequence.
        k: [1, H_kv, N, D], keys of the sequence.
        call: context of the layer.
        key_block: key block size, in tokens.
        needles: needle queries of the sequence.
    """
    start, end = (x[:, needles.queries] for x in (call.ranges.start, call.ranges.end))
    ranges = KeyRanges(start, end, call.ranges.key_valid, consecutive=False)
    shares = q.new_zeros(
        q.shape[1], len(needles.queries), -(-k.shape[2] // key_block), dtype=torch.float32
    )
    chunks = attention_rows(q[:, :, needles.queries], k, ranges, call.scale)
    for first_query, attention in chunks:
        queries = slice(first_query, first_query + attention.shape[2])
        key = torch.arange(attention.shape[-1], device=k.device)
        is_needle = (key >= needles.starts[queries, None]) & (key < needles.ends[queries, None])
        shares[:, queries] = block_sums(attention[0] * is_needle, key_block, shares.shape[-1])
    return shares


def coverage_of_layers(
    measurements: Sequence[LayerMeasurement], importance: Sequence[float]
) -> Coverage:
    """Return the `Coverage` for all pairs of layers and of heads.

    Args:
        measurements: measurement of each layer, at one threshold.
        importance: `Coverage.importance` of each layer.
    """
    num_layers, num_heads = len(measurements), measurements[0].selected.shape[0]
    rows = measurements[0].rows
    selected = torch.stack([layer.selected.float() for layer in measurements])
    mass = torch.stack([layer.mass for layer in measurements]).flatten(0, 1).flatten(1)
    needle = torch.stack([layer.needle for layer in measurements]).flatten(0, 1).flatten(1)
    needle = needle / max(1, len(rows))

    def shares_in(blocks: Tensor, shares: Tensor) -> Tensor:
        """Return the attention of layer b to the blocks that layer a selects, [L, L, H, H].

        Args:
            blocks: float32 [L, H, rows, blocks], 1 for blocks that a head of a layer selects.
            shares: [L * H, rows * blocks], attention of each head of each layer to each block.

        Returns:
            float64. The dimensions are layer a, layer b, head of a and head of b.
        """
        result = blocks.flatten(0, 1).flatten(1) @ shares.T
        result = result.view(num_layers, num_heads, num_layers, num_heads)
        return result.transpose(1, 2).double()

    return Coverage(
        mass=shares_in(selected, mass),
        needle=shares_in(selected[:, :, rows], needle),
        density=torch.stack([layer.density for layer in measurements]).double(),
        importance=torch.tensor(importance, dtype=torch.float64),
    )


def mean_coverage(coverages: Sequence[Sequence[Coverage]]) -> list[Coverage]:
    """Return the mean `Coverage` over documents, at each of `THRESHOLDS`.

    Args:
        coverages: for each document, the `Coverage` at each of `THRESHOLDS`.
    """
    by_threshold = [[document[i] for document in coverages] for i in range(len(coverages[0]))]
    return [
        Coverage(
            mass=torch.stack([coverage.mass for coverage in documents]).mean(0),
            needle=torch.stack([coverage.needle for coverage in documents]).mean(0),
            density=torch.stack([coverage.density for coverage in documents]).mean(0),
            importance=torch.stack([coverage.importance for coverage in documents]).mean(0),
        )
        for documents in by_threshold
    ]


def gains(coverage: Coverage) -> Tensor:
    """Return ``mass + NEEDLE_WEIGHT * needle`` of a coverage, float64 [L, L, H, H]."""
    return coverage.mass + NEEDLE_WEIGHT * coverage.needle


def values(gain: Tensor, importance: Tensor) -> list[list[float]]:
    """Return the value of each layer a as the anchor of each layer b, as a list of lists [a][b].

    ``values[a][b] = importance[b] * mean_{head of b} max_{head of a} gain[a, b]``

    Args:
        gain: [L, L, H, H], result of `gains`.
        importance: [L], `Coverage.importance`.
    """
    return (gain.amax(2).mean(-1) * importance).tolist()


def require_anchors(count: int, layers: int) -> None:
    """Raise a ValueError if a model with ``layers`` sparse layers cannot have ``count`` anchors."""
    if not 1 <= count <= layers:
        raise ValueError(
            f"anchors must be 1 to {layers}, the number of sparse layers, got {count}. Pass a "
            "number in this range."
        )


def best_anchors(value: Sequence[Sequence[float]], count: int) -> tuple[int, ...]:
    """Return the anchors with the largest total value, by a dynamic program.

    The first layer is always an anchor. The anchor of a layer is the last anchor that is not after
    the layer. Of results with equal values, the result whose last anchor is earliest is returned.
    Returns ascending indices among the measured layers.

    Args:
        value: result of `values`.
        count: number of anchors.

    Raises:
        ValueError: if ``count`` is not between 1 and the number of layers.
    """
    num_layers = len(value)
    require_anchors(count, num_layers)
    # segment_value[a][b]: total value of layers a to b - 1 if layer a is their anchor
    segment_value = [[sum(value[a][a:b]) for b in range(num_layers + 1)] for a in range(num_layers)]
    # best[b]: largest total value of layers 0 to b - 1, and its anchors
    best = {b: (segment_value[0][b], (0,)) for b in range(1, num_layers + 1)}
    for num_anchors in range(2, count + 1):
        best = {
            b: max(
                (
                    (best[a][0] + segment_value[a][b], (*best[a][1], a))
                    for a in range(num_anchors - 1, b)
                ),
                key=lambda candidate: candidate[0],
            )
            for b in range(num_anchors, num_layers + 1)
        }
    return best[num_layers][1]


def assign_anchors(gain: Tensor, anchors: Sequence[int]) -> Assignment:
    """Map each head to the head of its anchor with the largest gain.

    A head of an anchor is mapped to itself.

    Args:
        gain: [L, L, H, H], result of `gains`.
        anchors: indices of the anchors among the measured layers.
    """
    num_layers, num_heads = gain.shape[1:3]
    anchor_of_layer = tuple(max(a for a in anchors if a <= b) for b in range(num_layers))
    own_heads = torch.arange(num_heads)
    sources = [
        own_heads if anchor == layer else gain[anchor, layer].argmax(0)
        for layer, anchor in enumerate(anchor_of_layer)
    ]
    return Assignment(tuple(anchors), anchor_of_layer, torch.stack(sources))


def fit_cascade(
    config: CabConfig,
    coverages: Sequence[Coverage],
    layers: Sequence[int],
    *,
    num_layers: int,
    num_anchors: int,
    target: float,
) -> CabConfig:
    """Return the settings with a cascade that reaches the target density.

    Args:
        config: settings of the model.
        coverages: `Coverage` of the sparse layers at each of `THRESHOLDS`, mean over documents.
        layers: indices of the sparse layers in the model.
        num_layers: number of all layers of the model.
        num_anchors: number of anchors.
        target: target density: share of the (query, key) pairs that the model attends to.

    Raises:
        ValueError: if ``target`` is below the density of the highest threshold, or if
            ``num_anchors`` is out of range (see `best_anchors`).
    """
    assignments = []
    for coverage in coverages:
        gain = gains(coverage)
        anchors = best_anchors(values(gain, coverage.importance), num_anchors)
        assignments.append(assign_anchors(gain, anchors))
    densities = [
        assignment.density(coverage)
        for assignment, coverage in zip(assignments, coverages, strict=True)
    ]
    index, threshold = threshold_for(THRESHOLDS, densities, target)
    assignment = assignments[index]
    own_heads = list(range(assignment.sources.shape[1]))
    sources = {
        layer: heads.tolist() for layer, heads in zip(layers, assignment.sources, strict=True)
    }
    return config.changed(
        predictor="cascade",
        mass_threshold=threshold,
        anchors=tuple(layers[anchor] for anchor in assignment.anchors),
        head_map=[sources.get(layer, own_heads) for layer in range(num_layers)],
    )
