"""Cascade: a few anchor layers select blocks, and the layers after each anchor reuse its blocks.

The important keys change slowly from layer to layer (Kascade). An anchor selects blocks like the
default predictor, `RowsPredictor`. The layers after the anchor read its plan from
`LayerContext.shared_state`. ``config.head_map`` maps the heads of these layers to heads of the
anchor.
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

SHARED_PLAN = "cascade"  # key of the shared plan


class SharedPlan(NamedTuple):
    """The plan of an anchor, with the anchor's index and its numbers of query and KV heads."""

    layer: int
    heads: tuple[int, int]
    plan: BlockPlan


class CascadePredictor(Predictor):
    """The predictor "cascade": anchors select blocks like `RowsPredictor`, other layers reuse them.

    The anchor of a layer is the last anchor before the layer, so only the latest plan is stored.
    """

    def __init__(self, config: CabConfig) -> None:
        super().__init__(config)
        self.anchor = RowsPredictor(config)

    def encode_keys(self, k: Tensor, valid: Tensor | None = None) -> QuantizedKeys:
        return self.anchor.encode_keys(k, valid)

    def summary_of(self, k: Tensor, valid: Tensor, call: LayerContext) -> QuantizedKeys | Tensor:
        # a layer that is no anchor needs no summary
        return self.anchor.summary_of(k, valid, call) if self._decides(call) else k

    def required_inputs(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        return self.anchor.required_inputs(call, heads) if self._decides(call) else ()

    def merge(
        self, summary: QuantizedKeys, call: LayerContext, heads: tuple[int, int], layout: Any
    ) -> QuantizedKeys:
        return self.anchor.merge(summary, call, heads, layout)

    def _decides(self, call: LayerContext) -> bool:
        return call.layer in self.config.anchors

    def choose(self, q: Tensor, summary: QuantizedKeys | Tensor, call: LayerContext) -> BlockPlan:
        """Return the plan of this layer if it is an anchor, else the plan of the anchor before it.

        Args:
            q: [B, H, N_q, D], after RoPE.
            summary: the summary of k, or k itself if the layer is no anchor.
            call: the context of the layer.

        Raises:
            ValueError: the layer has no index, no anchor precedes it, or its number of heads
                differs from its anchor's.
        """
        kv_heads = summary.shape[1] if isinstance(summary, Tensor) else summary.kv_heads
        heads = q.shape[1], kv_heads
        if self._decides(call):
            plan = self.anchor.choose(q, summary, call)
            call.shared_state[SHARED_PLAN] = SharedPlan(call.layer, heads, plan)
            return plan
        shared = self._from_anchor(heads, call)
        # the layers of a model may be on several devices
        return self._mapped(shared.plan, call.layer).on(call.ranges)

    def _from_anchor(self, heads: tuple[int, int], call: LayerContext) -> SharedPlan:
        layer = call.layer
        if layer is None:
            raise ValueError(
                "predictor must not be 'cascade' for a model in which a layer has no index, got "
                "'cascade'. Use 'rows'."
            )
        anchor = anchor_of(self.config, layer)
        if anchor is None:
            raise ValueError(
                f"CabConfig.anchors must have a layer at or before layer {layer}, got "
                f"{self.config.anchors}. Add the first sparse layer."
            )
        shared: SharedPlan | None = call.shared_state.get(SHARED_PLAN)
        if shared is None or shared.layer != anchor:
            raise ValueError(
                f"Layer {layer} needs the plan of anchor layer {anchor}, which did not run "
                "sparsely in this forward pass. Select an anchor that runs sparsely. Checkpoint "
                "gradients with use_reentrant=False, and do not checkpoint layers that are "
                "called several times."
            )
        require_heads_of(shared.layer, shared.heads, layer, heads)
        return shared

    def _mapped(self, plan: BlockPlan, layer: int) -> BlockPlan:
        """Return the plan with the anchor's heads replaced as ``config.head_map`` assigns them."""
        table = self.config.head_map
        if not table:
            return plan
        if layer >= len(table) or len(table[0]) != plan.heads or max(table[layer]) >= plan.heads:
            raise ValueError(
                f"CabConfig.head_map must have a row for layer {layer} that maps {plan.heads} "
                f"heads, got a table of {len(table)} layers of {len(table[0])} heads. Calibrate "
                "this model, or give ()."
            )
        return plan.select_heads(table[layer])


def anchor_of(config: CabConfig, layer: int | None) -> int | None:
    """Return the anchor of a layer, the layer itself or the last anchor before it, or None."""
    if config.predictor != "cascade" or layer is None:
        return None
    before = [anchor for anchor in config.anchors if anchor <= layer]
    return before[-1] if before else None


def require_heads_of(
    anchor: int, of_anchor: tuple[int, int], layer: int, heads: tuple[int, int]
) -> None:
    """Raise an error if a layer and its anchor differ in their numbers of heads.

    Args:
        anchor: index of the anchor.
        of_anchor: (query heads, KV heads) of the anchor.
        layer: index of the layer.
        heads: (query heads, KV heads) of the layer.

    Raises:
        ValueError: the numbers differ. The message contains both.
    """
    if of_anchor != heads:
        raise ValueError(
            "predictor must not be 'cascade' for layers that differ in their heads: layer "
            f"{layer} has {heads[0]} query heads and {heads[1]} KV heads, its anchor, layer "
            f"{anchor}, has {of_anchor[0]} and {of_anchor[1]}. Use 'rows'."
        )
