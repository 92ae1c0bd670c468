"""Calibration of a cascade: the anchor layer of each layer, and the anchor's head for each head.

1. `measure_layer` and `compute_coverage` measure one sequence at several mass thresholds. The
   result for layers a and b is the share of the attention of b to the blocks that a selects.
2. At each threshold, `find_best_anchors` finds the anchors with the largest total value, by a
   dynamic program. `compute_anchor_values` returns the value of each layer as an anchor.
3. `assign_anchors` maps every head to the head of its anchor with the largest of `compute_gains`.
4. `fit_cascade` sets one threshold for all layers, at which the model reaches its target density.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cab_hf.calibration.density import count_block_pairs, interpolate_threshold
from cab_hf.config import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext
from cab_hf.predictors.attention_mass import compute_block_mass, iterate_attention_rows, sum_blocks
from cab_hf.selection.reference import ScoreOptions, cap_scores, compute_block_scores

# values of `CabConfig.mass_threshold` at which layers are measured, descending
THRESHOLDS = (0.064, 0.032, 0.016, 0.011, 0.008, 0.0055, 0.004, 0.0028, 0.002, 0.0014)
# weight of the attention to needles relative to the attention to all blocks, in `compute_gains`
NEEDLE_WEIGHT = 3.0


class Needles(NamedTuple):
    """Queries that need a needle, a hidden passage, and the position of each needle.

    Attributes:
        query_positions: int64 [n], positions of the queries.
        needle_starts: int64 [n], first position of the needle of each query.
        needle_ends: int64 [n], position after the needle of each query.
    """

    query_positions: Tensor
    needle_starts: Tensor
    needle_ends: Tensor


class LayerMeasurement(NamedTuple):
    """The measurement of one layer at one threshold.

    Attributes:
        is_selected: bool [H, M_q, M_k], True for the blocks that the layer selects.
        density: float64 [H], share of all (query, key) pairs in the selected blocks.
        mass: float32 [H, M_q, M_k], share of the attention per block, with sum 1 per head.
        needle_attention: float32 [H, n, M_k], attention of each needle query to its needle, per key
            block.
        needle_rows: int64 [n], query blocks of the needle queries.
    """

    is_selected: Tensor
    density: Tensor
    mass: Tensor
    needle_attention: Tensor
    needle_rows: Tensor


class Coverage(NamedTuple):
    """The attention of each layer b to the blocks that each layer a selects.

    The dimensions of [L, L, H, H] are layer a, layer b, head of a and head of b.

    Attributes:
        mass: float64 [L, L, H, H], share of the attention of b to the blocks of a.
        needle_attention: float64 [L, L, H, H], attention of b to needles in the blocks of a, mean
            over needle queries.
        density: float64 [L, H], share of all (query, key) pairs in the blocks of a.
        importance: float64 [L], change of the hidden states by the layer: 1 - cosine similarity of
            its input and output.
    """

    mass: Tensor
    needle_attention: Tensor
    density: Tensor
    importance: Tensor


class Assignment(NamedTuple):
    """Anchors of a cascade: the anchor layer of each layer, and the anchor's head for each head.

    Attributes:
        anchors: indices of the anchors among the L measured layers, ascending.
        anchor_of_layer: for each measured layer, the index of its anchor among the measured layers.
        source_heads: int64 [L, H], the anchor's head whose blocks each head attends to.
    """

    anchors: tuple[int, ...]
    anchor_of_layer: tuple[int, ...]
    source_heads: Tensor

    def compute_density(self, coverage: Coverage) -> float:
        """Return the share of (query, key) pairs that are attended, mean over layers and heads."""
        return float(
            coverage.density[torch.tensor(self.anchor_of_layer)].gather(1, self.source_heads).mean()
        )


def measure_layer(
    q: Tensor, k: Tensor, layer_context: LayerContext, config: CabConfig, needles: Needles
) -> list[LayerMeasurement]:
    """Return the measurement of one layer at each of `THRESHOLDS`.

    Args:
        q: [1, H, N, D], queries of one sequence.
        k: [1, H_kv, N, D], keys of the sequence.
        layer_context: context of the layer.
        config: settings of the layer.
        needles: needle queries of the sequence.
    """
    score_options = ScoreOptions(
        layer_context.scale, layer_context.channels, layer_context.sinks, layer_context.softcap
    )
    scores = compute_block_scores(
        q, k, key_ranges=layer_context.ranges, config=config, score_options=score_options
    )
    scores = cap_scores(scores, layer_context.ranges, config)[0]
    selected_blocks = torch.stack([scores >= threshold for threshold in THRESHOLDS]).cpu()
    block_pairs = count_block_pairs(layer_context.ranges, config).cpu().flatten()
    densities = torch.stack(
        [is_selected.flatten(1).double() @ block_pairs for is_selected in selected_blocks]
    )
    densities = densities / block_pairs.sum()
    mass = compute_block_mass(
        q,
        k,
        key_ranges=layer_context.ranges,
        scale=layer_context.scale,
        query_block=config.query_block,
        key_block=config.key_block,
    )[0]
    mass /= layer_context.ranges.rows(config.query_block).queries.sum()
    needle_attention = compute_needle_shares(
        q, k, layer_context, key_block=config.key_block, needles=needles
    )
    mass, needle_attention, needle_rows = (
        mass.cpu(),
        needle_attention.cpu(),
        (needles.query_positions // config.query_block).cpu(),
    )
    return [
        LayerMeasurement(
            is_selected=is_selected,
            density=density,
            mass=mass,
            needle_attention=needle_attention,
            needle_rows=needle_rows,
        )
        for is_selected, density in zip(selected_blocks, densities, strict=True)
    ]


def compute_needle_shares(
    q: Tensor, k: Tensor, layer_context: LayerContext, key_block: int, needles: Needles
) -> Tensor:
    """Return the attention of each needle query to its needle, float32 [H, n, M_k].

    Args:
        q: [1, H, N, D], queries of one sequence.
        k: [1, H_kv, N, D], keys of the sequence.
        layer_context: context of the layer.
        key_block: key block size, in tokens.
        needles: needle queries of the sequence.
    """
    first_visible_key, last_visible_key = (
        x[:, needles.query_positions]
        for x in (layer_context.ranges.start, layer_context.ranges.end)
    )
    key_ranges = KeyRanges(
        first_visible_key, last_visible_key, layer_context.ranges.key_valid, consecutive=False
    )
    needle_shares = q.new_zeros(
        q.shape[1], len(needles.query_positions), -(-k.shape[2] // key_block), dtype=torch.float32
    )
    attention_chunks = iterate_attention_rows(
        q[:, :, needles.query_positions], k, key_ranges, layer_context.scale
    )
    for first_query, row_attention in attention_chunks:
        query_slice = slice(first_query, first_query + row_attention.shape[2])
        key_positions = torch.arange(row_attention.shape[-1], device=k.device)
        is_needle = (key_positions >= needles.needle_starts[query_slice, None]) & (
            key_positions < needles.needle_ends[query_slice, None]
        )
        needle_shares[:, query_slice] = sum_blocks(
            row_attention[0] * is_needle, key_block, needle_shares.shape[-1]
        )
    return needle_shares


def compute_coverage(
    measurements: Sequence[LayerMeasurement], importance: Sequence[float]
) -> Coverage:
    """Return the `Coverage` for all pairs of layers and of heads.

    Args:
        measurements: measurement of each layer, at one threshold.
        importance: `Coverage.importance` of each layer.
    """
    num_layers, num_heads = len(measurements), measurements[0].is_selected.shape[0]
    needle_rows = measurements[0].needle_rows
    is_selected = torch.stack([measurement.is_selected.float() for measurement in measurements])
    mass = torch.stack([measurement.mass for measurement in measurements]).flatten(0, 1).flatten(1)
    needle_attention = (
        torch.stack([measurement.needle_attention for measurement in measurements])
        .flatten(0, 1)
        .flatten(1)
    )
    needle_attention = needle_attention / max(1, len(needle_rows))

    def sum_shares(selected_blocks: Tensor, attention_shares: Tensor) -> Tensor:
        """Return the attention of layer b to the blocks that layer a selects, [L, L, H, H].

        Args:
            selected_blocks: float32 [L, H, rows, blocks], 1 for blocks that a head of a layer
                selects.
            attention_shares: [L * H, rows * blocks], attention of each head of each layer to each
                block.

        Returns:
            float64. The dimensions are layer a, layer b, head of a and head of b.
        """
        coverage_of_pairs = selected_blocks.flatten(0, 1).flatten(1) @ attention_shares.T
        coverage_of_pairs = coverage_of_pairs.view(num_layers, num_heads, num_layers, num_heads)
        return coverage_of_pairs.transpose(1, 2).double()

    return Coverage(
        mass=sum_shares(is_selected, mass),
        needle_attention=sum_shares(is_selected[:, :, needle_rows], needle_attention),
        density=torch.stack([measurement.density for measurement in measurements]).double(),
        importance=torch.tensor(importance, dtype=torch.float64),
    )


def average_coverage(coverages: Sequence[Sequence[Coverage]]) -> list[Coverage]:
    """Return the mean `Coverage` over documents, at each of `THRESHOLDS`.

    Args:
        coverages: for each document, the `Coverage` at each of `THRESHOLDS`.
    """
    coverages_by_threshold = [
        [document_coverages[threshold_index] for document_coverages in coverages]
        for threshold_index in range(len(coverages[0]))
    ]
    return [
        Coverage(
            mass=torch.stack([coverage.mass for coverage in threshold_coverages]).mean(0),
            needle_attention=torch.stack(
                [coverage.needle_attention for coverage in threshold_coverages]
            ).mean(0),
            density=torch.stack([coverage.density for coverage in threshold_coverages]).mean(0),
            importance=torch.stack([coverage.importance for coverage in threshold_coverages]).mean(
                0
            ),
        )
        for threshold_coverages in coverages_by_threshold
    ]


def compute_gains(coverage: Coverage) -> Tensor:
    """Return ``mass + NEEDLE_WEIGHT * needle_attention`` of a coverage, float64 [L, L, H, H]."""
    return coverage.mass + NEEDLE_WEIGHT * coverage.needle_attention


def compute_anchor_values(gain: Tensor, importance: Tensor) -> list[list[float]]:
    """Return the value of each layer a as the anchor of each layer b, as a list of lists [a][b].

    ``anchor_values[a][b] = importance[b] * mean_{head of b} max_{head of a} gain[a, b]``

    Args:
        gain: [L, L, H, H], result of `compute_gains`.
        importance: [L], `Coverage.importance`.
    """
    return (gain.amax(2).mean(-1) * importance).tolist()


def require_num_anchors(num_anchors: int, num_layers: int) -> None:
    """Raise a ValueError unless ``num_anchors`` is between 1 and ``num_layers``."""
    if not 1 <= num_anchors <= num_layers:
        raise ValueError(
            f"anchors must be 1 to {num_layers}, the number of sparse layers, got {num_anchors}. "
            "Pass a number in this range."
        )


def find_best_anchors(
    anchor_values: Sequence[Sequence[float]], num_anchors: int
) -> tuple[int, ...]:
    """Return the anchors with the largest total value, by a dynamic program.

    The first layer is always an anchor. The anchor of a layer is the last anchor that is not after
    the layer. Of results with equal values, the result whose last anchor is earliest is returned.
    Returns ascending indices among the measured layers.

    Args:
        anchor_values: result of `compute_anchor_values`.
        num_anchors: number of anchors.

    Raises:
        ValueError: if ``num_anchors`` is not between 1 and the number of layers.
    """
    num_layers = len(anchor_values)
    require_num_anchors(num_anchors, num_layers)
    # segment_values[anchor][segment_end]: total value of layers anchor to segment_end - 1
    segment_values = [
        [sum(anchor_values[anchor][anchor:segment_end]) for segment_end in range(num_layers + 1)]
        for anchor in range(num_layers)
    ]
    # for each segment_end: largest total value of layers 0 to segment_end - 1, and its anchors
    best_anchors_of_first_layers = {
        segment_end: (segment_values[0][segment_end], (0,))
        for segment_end in range(1, num_layers + 1)
    }
    for num_placed_anchors in range(2, num_anchors + 1):
        best_anchors_of_first_layers = {
            segment_end: max(
                (
                    (
                        best_anchors_of_first_layers[anchor][0]
                        + segment_values[anchor][segment_end],
                        (*best_anchors_of_first_layers[anchor][1], anchor),
                    )
                    for anchor in range(num_placed_anchors - 1, segment_end)
                ),
                key=lambda candidate: candidate[0],
            )
            for segment_end in range(num_placed_anchors, num_layers + 1)
        }
    return best_anchors_of_first_layers[num_layers][1]


def assign_anchors(gain: Tensor, anchors: Sequence[int]) -> Assignment:
    """Map each head to the head of its anchor with the largest gain.

    A head of an anchor is mapped to itself.

    Args:
        gain: [L, L, H, H], result of `compute_gains`.
        anchors: indices of the anchors among the measured layers.
    """
    num_layers, num_heads = gain.shape[1:3]
    anchor_of_layer = tuple(
        max(anchor for anchor in anchors if anchor <= layer_index)
        for layer_index in range(num_layers)
    )
    head_indices = torch.arange(num_heads)
    source_heads = [
        head_indices if anchor == layer else gain[anchor, layer].argmax(0)
        for layer, anchor in enumerate(anchor_of_layer)
    ]
    return Assignment(tuple(anchors), anchor_of_layer, torch.stack(source_heads))


def fit_cascade(
    config: CabConfig,
    coverages: Sequence[Coverage],
    sparse_layers: Sequence[int],
    *,
    num_layers: int,
    num_anchors: int,
    target_density: float,
) -> CabConfig:
    """Return the settings with a cascade that reaches the target density.

    Args:
        config: settings of the model.
        coverages: `Coverage` of the sparse layers at each of `THRESHOLDS`, mean over documents.
        sparse_layers: indices of the sparse layers in the model.
        num_layers: number of all layers of the model.
        num_anchors: number of anchors.
        target_density: share of the (query, key) pairs that the model attends to.

    Raises:
        ValueError: if ``target_density`` is below the density of the highest threshold, or if
            ``num_anchors`` is out of range (see `find_best_anchors`).
    """
    assignments = []
    for coverage in coverages:
        gain = compute_gains(coverage)
        anchors = find_best_anchors(compute_anchor_values(gain, coverage.importance), num_anchors)
        assignments.append(assign_anchors(gain, anchors))
    densities = [
        assignment.compute_density(coverage)
        for assignment, coverage in zip(assignments, coverages, strict=True)
    ]
    threshold_index, threshold = interpolate_threshold(THRESHOLDS, densities, target_density)
    assignment = assignments[threshold_index]
    identity_map = list(range(assignment.source_heads.shape[1]))
    source_heads = {
        layer: anchor_heads.tolist()
        for layer, anchor_heads in zip(sparse_layers, assignment.source_heads, strict=True)
    }
    return config.changed(
        predictor="cascade",
        mass_threshold=threshold,
        anchors=tuple(sparse_layers[anchor] for anchor in assignment.anchors),
        head_map=[source_heads.get(layer, identity_map) for layer in range(num_layers)],
    )
