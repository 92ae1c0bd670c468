"""Cascade: a few anchor layers select blocks, and the layers after an anchor reuse its blocks.

The important keys change slowly from layer to layer (Kascade). An anchor selects blocks like the
default predictor, `RowsPredictor`, and stores its plan in `LayerContext.shared_state`. The layers
up to the next anchor read the plan. ``config.head_map`` assigns a head of the anchor to every head
of these layers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.plan import BlockPlan
from cab_hf.predictors.base import LayerContext, Predictor
from cab_hf.predictors.rows import RowsPredictor
from cab_hf.selection import QuantizedKeys

# key of the plan in `LayerContext.shared_state`
SHARED_PLAN_KEY = "cascade"


class SharedPlan(NamedTuple):
    """The plan of an anchor layer, as stored in `LayerContext.shared_state` for later layers.

    Attributes:
        layer: index of the anchor.
        heads: (number of query heads, number of KV heads) of the anchor.
        plan: the blocks that the anchor selected.
    """

    layer: int
    heads: tuple[int, int]
    plan: BlockPlan


class CascadePredictor(Predictor):
    """The predictor "cascade": anchor layers select blocks, and other layers reuse these blocks.

    Anchors select blocks like `RowsPredictor`. A layer reuses the blocks of the last anchor before
    the layer. Therefore only the plan of the latest anchor is stored.
    """

    def __init__(self, config: CabConfig) -> None:
        super().__init__(config)
        self.anchor_predictor = RowsPredictor(config)

    def encode_keys(self, k: Tensor, valid: Tensor | None = None) -> QuantizedKeys:
        """Return the quantised keys, as `RowsPredictor.encode_keys` does."""
        return self.anchor_predictor.encode_keys(k, valid)

    def summary_of(
        self, k: Tensor, valid: Tensor, layer_context: LayerContext
    ) -> QuantizedKeys | Tensor:
        """Return the quantised keys for an anchor, and k itself for other layers."""
        return (
            self.anchor_predictor.summary_of(k, valid, layer_context)
            if self._is_anchor(layer_context)
            else k
        )

    def required_inputs(
        self, layer_context: LayerContext, heads: tuple[int, int]
    ) -> Collection[str]:
        """Return "summaries" for an anchor. Other layers need no tensors of other ranks."""
        return (
            self.anchor_predictor.required_inputs(layer_context, heads)
            if self._is_anchor(layer_context)
            else ()
        )

    def merge(
        self,
        summary: QuantizedKeys,
        layer_context: LayerContext,
        heads: tuple[int, int],
        layout: Any,
    ) -> QuantizedKeys:
        """Return the quantised keys of all ranks; called for anchors only."""
        return self.anchor_predictor.merge(summary, layer_context, heads, layout)

    def _is_anchor(self, layer_context: LayerContext) -> bool:
        """Return True if the layer is an anchor."""
        return layer_context.layer in self.config.anchors

    def choose(
        self, q: Tensor, summary: QuantizedKeys | Tensor, layer_context: LayerContext
    ) -> BlockPlan:
        """Select blocks if the layer is an anchor. Otherwise, return the plan of its anchor.

        Args:
            q: [B, H, N_q, D], after RoPE.
            summary: the summary of k for an anchor, and k itself for other layers.
            layer_context: the context of the layer.

        Raises:
            ValueError: the layer has no index, no anchor precedes the layer, the anchor stored no
                plan, or the layer and its anchor have different numbers of heads.
        """
        kv_heads = summary.shape[1] if isinstance(summary, Tensor) else summary.kv_heads
        head_counts = q.shape[1], kv_heads
        if self._is_anchor(layer_context):
            plan = self.anchor_predictor.choose(q, summary, layer_context)
            layer_context.shared_state[SHARED_PLAN_KEY] = SharedPlan(
                layer_context.layer, head_counts, plan
            )
            return plan
        shared_plan = self._get_shared_plan(head_counts, layer_context)
        # the anchor may be on another device than this layer
        return self._map_heads(shared_plan.plan, layer_context.layer).on(layer_context.ranges)

    def _get_shared_plan(
        self, head_counts: tuple[int, int], layer_context: LayerContext
    ) -> SharedPlan:
        """Return the plan that the anchor of the layer ``layer_context.layer`` has stored.

        Args:
            head_counts: (number of query heads, number of KV heads) of the layer.
            layer_context: the context of the layer.

        Raises:
            ValueError: see `choose`.
        """
        layer = layer_context.layer
        if layer is None:
            raise ValueError(
                "predictor must not be 'cascade' for a model in which a layer has no index, got "
                "'cascade'. Use 'rows'."
            )
        anchor = find_anchor(self.config, layer)
        if anchor is None:
            raise ValueError(
                f"CabConfig.anchors must have a layer at or before layer {layer}, got "
                f"{self.config.anchors}. Add the first sparse layer."
            )
        shared_plan: SharedPlan | None = layer_context.shared_state.get(SHARED_PLAN_KEY)
        if shared_plan is None or shared_plan.layer != anchor:
            raise ValueError(
                f"Layer {layer} needs the plan of anchor layer {anchor}, which did not run "
                "sparsely in this forward pass. Select an anchor that runs sparsely. Checkpoint "
                "gradients with use_reentrant=False, and do not checkpoint layers that are "
                "called several times."
            )
        require_equal_heads(shared_plan.layer, shared_plan.heads, layer, head_counts)
        return shared_plan

    def _map_heads(self, plan: BlockPlan, layer: int) -> BlockPlan:
        """Return ``plan`` with its heads in the order of ``config.head_map[layer]``.

        Head h of the result is head ``config.head_map[layer][h]`` of the anchor's plan. Without a
        head map, the plan is returned unchanged.
        """
        head_map = self.config.head_map
        if not head_map:
            return plan
        if (
            layer >= len(head_map)
            or len(head_map[0]) != plan.heads
            or max(head_map[layer]) >= plan.heads
        ):
            raise ValueError(
                f"CabConfig.head_map must have a row for layer {layer} that maps {plan.heads} "
                f"heads, got a table of {len(head_map)} layers of {len(head_map[0])} heads. "
                "Calibrate this model, or give ()."
            )
        return plan.select_heads(head_map[layer])


def find_anchor(config: CabConfig, layer: int | None) -> int | None:
    """Return the index of the last anchor up to and including ``layer``.

    Returns None if no anchor precedes the layer, the layer has no index, or the predictor is not
    "cascade".
    """
    if config.predictor != "cascade" or layer is None:
        return None
    preceding_anchors = [anchor for anchor in config.anchors if anchor <= layer]
    return preceding_anchors[-1] if preceding_anchors else None


def require_equal_heads(
    anchor: int, anchor_head_counts: tuple[int, int], layer: int, head_counts: tuple[int, int]
) -> None:
    """Raise an error if a layer and its anchor differ in their numbers of heads.

    Args:
        anchor: index of the anchor.
        anchor_head_counts: (query heads, KV heads) of the anchor.
        layer: index of the layer.
        head_counts: (query heads, KV heads) of the layer.

    Raises:
        ValueError: the numbers differ. The message contains both.
    """
    if anchor_head_counts != head_counts:
        raise ValueError(
            "predictor must not be 'cascade' for layers that differ in their heads: layer "
            f"{layer} has {head_counts[0]} query heads and {head_counts[1]} KV heads, its anchor, "
            f"layer {anchor}, has {anchor_head_counts[0]} and {anchor_head_counts[1]}. Use 'rows'."
        )
