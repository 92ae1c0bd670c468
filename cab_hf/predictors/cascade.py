"""Cascade: a few layers choose blocks, the layers behind each of them attend the same ones.

Which keys matter changes slowly from layer to layer (Kascade). An anchor's plan goes through
`Call.handed` to the layers of the same forward pass, head by head as ``config.head_map`` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cab_hf.config import CabConfig, budgets_of
from cab_hf.ops import reference
from cab_hf.ops.reference import KeySummary
from cab_hf.plan import BlockPlan, block_visibility
from cab_hf.predictors.base import SHARE_OPTIONS, Call, Predictor
from cab_hf.predictors.curvature import (
    ESTIMATED,
    EVERYTHING,
    EXACT,
    CurvaturePredictor,
    has_kernels,
    refuse_infinite,
    tail_rows,
)

HANDED = "cascade"  # under which an anchor leaves its plan
# elements of [heads, M_q, M_k] that are sorted at a time; some 20 of them live at once
SORTED_AT_A_TIME = 1 << 22


class Handed(NamedTuple):
    """What an anchor leaves: its index, its query and KV heads, and its plan."""

    layer: int
    heads: tuple[int, int]
    plan: BlockPlan


class CascadePredictor(Predictor):
    """Anchors choose, by exact scores or as CAB does; the other layers take what they chose.

    Only the latest plan is kept: a layer's anchor is the last one before it.
    """

    def __init__(self, config: CabConfig) -> None:
        super().__init__(config)
        self.anchor = anchor_predictor(config)

    def options(self) -> tuple[Mapping[str, float], ...]:
        return self.anchor.options()

    def summarise(self, k: Tensor, valid: Tensor | None = None) -> Any:
        return self.anchor.summarise(k, valid)

    def choose(self, q: Tensor, summary: Any, call: Call) -> BlockPlan:
        kv_heads = summary.planes.shape[2] if isinstance(summary, KeySummary) else summary.shape[1]
        heads = q.shape[1], kv_heads
        return self.handed_on(heads, call, lambda: self.anchor.choose(q, summary, call))

    def __call__(self, q: Tensor, k: Tensor, call: Call) -> BlockPlan:
        # a layer that decides nothing summarises nothing
        heads = q.shape[1], k.shape[1]
        return self.handed_on(heads, call, lambda: self.anchor(q, k, call))

    def handed_on(
        self, heads: tuple[int, int], call: Call, decide: Callable[[], BlockPlan]
    ) -> BlockPlan:
        """What ``decide`` returns, left for the layers behind; or what the anchor before has left.

        Args:
            heads: query and KV heads of the layer.

        Raises:
            ValueError: for a layer without an index, without an anchor, or of other heads than its
                anchor has.
        """
        if call.layer in self.config.anchors:
            plan = decide()
            call.handed[HANDED] = Handed(call.layer, heads, plan)
            return plan
        handed = self._from_anchor(heads, call)
        plan = self._mapped(handed.plan, call.layer)
        # the layers of a model may be spread over devices
        device = call.spans.first.device
        rows = None if plan.whole_rows is None else plan.whole_rows.to(device)
        return replace(plan.each(lambda x: x.to(device)), spans=call.spans, whole_rows=rows)

    def _from_anchor(self, heads: tuple[int, int], call: Call) -> Handed:
        layer, anchors = call.layer, self.config.anchors
        if layer is None:
            raise ValueError("A layer has no index, and 'cascade' goes by it; use 'curvature'.")
        before = [anchor for anchor in anchors if anchor < layer]
        if not before:
            raise ValueError(
                f"CabConfig.anchors is {anchors}, and nobody chooses for layer {layer}; add the "
                "first sparse layer."
            )
        handed: Handed | None = call.handed.get(HANDED)
        if handed is None or handed.layer != before[-1]:
            raise ValueError(
                f"Layer {layer} attends what layer {before[-1]} chooses, which has handed nothing "
                "on in this pass; make an anchor of a layer that attends sparsely, and checkpoint "
                "gradients with use_reentrant=False, and not of layers that are called several "
                "times."
            )
        if handed.heads != heads:
            raise ValueError(
                f"Layer {layer} has {heads[0]} heads over {heads[1]} of k, and its anchor, layer "
                f"{handed.layer}, {handed.heads[0]} over {handed.heads[1]}; 'cascade' is for "
                "layers with the same heads, use 'curvature'."
            )
        return handed

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
        row = table[layer]
        whole = tuple([head for head, source in enumerate(row) if source in plan.whole_heads])
        # stacked, so that no index has to travel to the device
        plan = plan.each(lambda x: torch.stack([x[:, source] for source in row], dim=1))
        return replace(plan, whole_heads=whole)


def anchor_predictor(config: CabConfig) -> Predictor:
    """What chooses in the anchors of a config."""
    if config.anchor_scores == "exact":
        return ExactPredictor(config)
    return CurvaturePredictor(config) if config.anchor_heads == "each" else PooledPredictor(config)


class ExactPredictor(Predictor):
    """By the attention mass that key blocks really get (`reference.block_shares`).

    Blocks are ranked, and fill the mass, by the most or the mean that queries give them, as a share
    of the row.
    """

    def options(self) -> tuple[Mapping[str, float], ...]:
        if self.config.select == "topk":
            return SHARE_OPTIONS
        budgets = (*EXACT, *EVERYTHING)
        return tuple({"mass": mass, "bridges": bridges} for mass, bridges in budgets)

    def choose(self, q: Tensor, summary: Tensor, call: Call) -> BlockPlan:
        config = self.config
        if config.check_finite:
            refuse_infinite("q", q)
            refuse_infinite("k", summary)
        blocks = config.query_block, config.key_block
        if len(budgets_of(config, call.layer, q.shape[1]).whole) == q.shape[1]:
            return BlockPlan.unlisted(call.spans, q.shape[1], *blocks)
        told = call.spans, call.scale, *blocks, config.anchor_reduction
        if has_kernels(q):
            # imported here: models on the CPU never need Triton
            from cab_hf.ops.block_shares import block_shares

            shares = pooled(block_shares(q, summary, *told), summary.shape[1], config)
            return selected_by_kernels(shares, None, call, config)
        shares = pooled(reference.block_shares(q, summary, *told), summary.shape[1], config)
        return selected(shares, shares, call, config)


class PooledPredictor(Predictor):
    """CAB's estimates, pooled over the heads that share a plan before blocks are chosen."""

    def options(self) -> tuple[Mapping[str, float], ...]:
        return tuple({"mass": mass, "bridges": bridges} for mass, bridges in ESTIMATED)

    def summarise(self, k: Tensor, valid: Tensor | None = None) -> KeySummary:
        return CurvaturePredictor(self.config).summarise(k, valid)

    def choose(self, q: Tensor, summary: KeySummary, call: Call) -> BlockPlan:
        config, spans = self.config, call.spans
        queries = CurvaturePredictor(config).vectors(q, spans).float()
        visible = block_visibility(spans, config.query_block, config.key_block).unsqueeze(1)
        kv_heads = summary.planes.shape[2]
        group = q.shape[1] // kv_heads
        estimate, reach = [], []
        for head in range(kv_heads):
            some = queries[:, head * group : (head + 1) * group]
            upper, mean = reference.block_logits(some, summary.heads(head, head + 1), call.scale)
            for found, logits in ((estimate, (upper + mean) / 2), (reach, upper)):
                shares = reference.block_log_mass(logits, visible).exp()
                found.append(reduced(shares, config.anchor_reduction))
        shares = (torch.cat(found, dim=1) for found in (estimate, reach))
        if config.anchor_heads == "all":
            shares = (reduced(each, config.anchor_reduction) for each in shares)
        if has_kernels(q):
            return selected_by_kernels(*shares, call, config)
        return selected(*shares, call, config, bridged=True)


def reduced(shares: Tensor, reduction: str) -> Tensor:
    """[B, 1, M_q, M_k]: the most, or the mean, over the heads of ``shares``."""
    return shares.amax(1, keepdim=True) if reduction == "max" else shares.mean(1, keepdim=True)


def pooled(shares: Tensor, kv_heads: int, config: CabConfig) -> Tensor:
    """``shares`` [B, H, M_q, M_k] of the plan's heads: of each, of each KV head, or of all."""
    if config.anchor_heads == "each":
        return shares
    groups = kv_heads if config.anchor_heads == "group" else 1
    return torch.cat([reduced(x, config.anchor_reduction) for x in shares.chunk(groups, 1)], dim=1)


def selected(
    estimate: Tensor, reach: Tensor, call: Call, config: CabConfig, bridged: bool = False
) -> BlockPlan:
    """The plan of the heads of ``estimate``, which fills the mass, and ``reach``, which ranks.

    Both are shares [B, heads, M_q, M_k]. ``bridged`` ranks by curvature over ``reach``.
    """
    spans, heads = call.spans, estimate.shape[1]
    budgets = budgets_of(config, call.layer, heads)
    visible = block_visibility(spans, config.query_block, config.key_block)
    kept = []
    step = max(1, SORTED_AT_A_TIME // max(1, visible.numel()))
    for start in range(0, heads, step):
        some = slice(start, start + step)
        own = budgets.of_heads(range(heads)[some])
        log_mass = _log_share(estimate[:, some], visible)
        if bridged and any(own.bridges):
            ranks = _log_share(reach[:, some], visible)
            keep = reference.clusters_and_bridges(log_mass, ranks, spans, visible, config, own)
        else:
            keep = reference.best_blocks(reach[:, some], log_mass, spans, visible, config, own)
        kept.append(keep)
    return BlockPlan.from_dense(
        torch.cat(kept, dim=1),
        spans,
        query_block=config.query_block,
        key_block=config.key_block,
        whole_heads=budgets.whole,
        whole_rows=tail_rows(spans, config),
    )


def selected_by_kernels(
    shares: Tensor, reach: Tensor | None, call: Call, config: CabConfig
) -> BlockPlan:
    """`selected`, sorting nothing: ``reach``, where there is one, ranks by curvature over it."""
    # imported here: models on the CPU never need Triton
    from cab_hf.ops import predict

    budgets = budgets_of(config, call.layer, shares.shape[1])
    full, partial = predict.choose_by_shares(shares, reach, call.spans, config, budgets)
    rows = tail_rows(call.spans, config)
    blocks = config.query_block, config.key_block
    return BlockPlan(full, partial, call.spans, *blocks, budgets.whole, rows)


def _log_share(shares: Tensor, visible: Tensor) -> Tensor:
    """The logarithm of what each block has of its row; -inf where the row sees nothing."""
    return reference.log_share_(shares.clone()).masked_fill(~visible.unsqueeze(1), -torch.inf)
