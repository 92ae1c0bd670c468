"""Cascade: a few layers choose blocks, the layers behind each of them attend the same ones.

Which keys matter changes slowly from layer to layer (Kascade). An anchor chooses by rows; its
plan goes through `LayerContext.shared_state` to the layers of the same forward pass, head by head
as ``config.head_map`` has it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.plan import BlockPlan
from cab_hf.predictors.base import LayerContext, Predictor
from cab_hf.predictors.rows import RowsPredictor, ScoredKeys

SHARED_PLAN = "cascade"  # under which an anchor leaves its plan


class SharedPlan(NamedTuple):
    """What an anchor leaves: its index, its query and KV heads, and its plan."""

    layer: int
    heads: tuple[int, int]
    plan: BlockPlan


class CascadePredictor(Predictor):
    """Anchors choose by rows (`RowsPredictor`); the other layers take what they chose.

    Only the latest plan is kept: a layer's anchor is the last one before it.
    """

    def __init__(self, config: CabConfig) -> None:
        super().__init__(config)
        self.anchor = RowsPredictor(config)

    def summarise(self, k: Tensor, valid: Tensor | None = None) -> ScoredKeys:
        return self.anchor.summarise(k, valid)

    def summary_of(self, k: Tensor, valid: Tensor, call: LayerContext) -> ScoredKeys | Tensor:
        # a layer that decides nothing summarises nothing
        return self.anchor.summary_of(k, valid, call) if self._decides(call) else k

    def gathers(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        return self.anchor.gathers(call, heads) if self._decides(call) else ()

    def join(
        self, summary: ScoredKeys, call: LayerContext, heads: tuple[int, int], layout: Any
    ) -> ScoredKeys:
        return self.anchor.join(summary, call, heads, layout)

    def _decides(self, call: LayerContext) -> bool:
        return call.layer in self.config.anchors

    def choose(self, q: Tensor, summary: ScoredKeys | Tensor, call: LayerContext) -> BlockPlan:
        """What an anchor chooses, left for the layers behind; or what the anchor before has left.

        Args:
            summary: of k, or k itself where the layer decides nothing.

        Raises:
            ValueError: for a layer without an index, without an anchor, or of other heads than its
                anchor has.
        """
        kv_heads = summary.shape[1] if isinstance(summary, Tensor) else summary.kv_heads
        heads = q.shape[1], kv_heads
        if self._decides(call):
            plan = self.anchor.choose(q, summary, call)
            call.shared_state[SHARED_PLAN] = SharedPlan(call.layer, heads, plan)
            return plan
        shared = self._from_anchor(heads, call)
        # the layers of a model may be spread over devices
        return self._mapped(shared.plan, call.layer).on(call.spans)

    def _from_anchor(self, heads: tuple[int, int], call: LayerContext) -> SharedPlan:
        layer = call.layer
        if layer is None:
            raise ValueError("A layer has no index, and 'cascade' goes by it; use 'rows'.")
        anchor = anchor_of(self.config, layer)
        if anchor is None:
            raise ValueError(
                f"CabConfig.anchors is {self.config.anchors}, and no anchor comes before layer "
                f"{layer}; add the first sparse layer."
            )
        shared: SharedPlan | None = call.shared_state.get(SHARED_PLAN)
        if shared is None or shared.layer != anchor:
            raise ValueError(
                f"Layer {layer} attends what layer {anchor} chooses, which did not run sparsely in "
                "this forward pass; make an anchor of a layer that does, and checkpoint "
                "gradients with use_reentrant=False, and not of layers that are called several "
                "times."
            )
        require_heads_of(shared.layer, shared.heads, layer, heads)
        return shared

    def _mapped(self, plan: BlockPlan, layer: int) -> BlockPlan:
        """The plan with, for each head, the lists of that head of the anchor that the map names."""
        table = self.config.head_map
        if not table:
            return plan
        if layer >= len(table) or len(table[0]) != plan.heads or max(table[layer]) >= plan.heads:
            raise ValueError(
                f"CabConfig.head_map has {len(table)} layers of {len(table[0])} heads, which do "
                f"not fit layer {layer} and a plan of {plan.heads} heads; calibrate this model, or "
                "give ()."
            )
        return plan.select_heads(table[layer])


def anchor_of(config: CabConfig, layer: int | None) -> int | None:
    """The layer of a cascade that chooses for one, itself or one before; None without any."""
    if config.predictor != "cascade" or layer is None:
        return None
    before = [anchor for anchor in config.anchors if anchor <= layer]
    return before[-1] if before else None


def require_heads_of(
    anchor: int, of_anchor: tuple[int, int], layer: int, heads: tuple[int, int]
) -> None:
    """Refuse a layer of other query and KV ``heads`` than its anchor has.

    Raises:
        ValueError: naming both.
    """
    if of_anchor != heads:
        raise ValueError(
            f"Layer {layer} has {heads[0]} heads over {heads[1]} of k, and its anchor, layer "
            f"{anchor}, {of_anchor[0]} over {of_anchor[1]}; 'cascade' is for layers with the same "
            "heads, use 'rows'."
        )
