"""CAB: Curvature-Aware Block-sparse attention, the predictor this package is named after."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cab_hf.budgets import OP_SETTINGS, Budgets, budgets_of, op_settings, settings_of_op
from cab_hf.config import CabConfig
from cab_hf.ops import HAS_TRITON, reference
from cab_hf.ops.reference import KeySummary
from cab_hf.plan import BlockLists, BlockPlan, Spans, block_visibility, crossed_blocks
from cab_hf.predictors.base import SHARE_OPTIONS, LayerContext, Predictor

# elements of a [heads, M_q, M_k] score tensor worked on at a time; some 20 of them live at once
SCORE_ELEMENTS_AT_A_TIME = 1 << 25
# (top_p, top_k_share) that a head can be given by a calibration, by how its blocks are scored
ESTIMATED = (
    *((0.0, 0.0), (0.5, 0.0), (0.7, 0.0), (0.8, 0.0), (0.8, 0.02), (0.9, 0.0), (0.9, 0.02)),
    *((0.9, 0.05), (0.95, 0.03), (0.98, 0.05)),
)
EXACT = (
    *((0.0, 0.02), (0.0, 0.04), (0.0, 0.07), (0.0, 0.1), (0.0, 0.14), (0.0, 0.2), (0.0, 0.3)),
    *((0.6, 0.02), (0.7, 0.0), (0.7, 0.02), (0.8, 0.0), (0.8, 0.03), (0.9, 0.0), (0.9, 0.03)),
    *((0.95, 0.0), (0.95, 0.05)),
)
EVERYTHING = ((1.0, 0.0),)


class CurvaturePredictor(Predictor):
    """CAB.

    Coarsens q and k to blocks, estimates each row's attention mass from the block summaries, keeps
    the smallest set of blocks that holds ``config.top_p`` and adds the best of the rest by
    curvature (``config.select="clusters"``), or keeps a fixed share (``"topk"``, the published
    recipe). What a head keeps can be its own. With ``config.exact_queries`` the outlier queries of
    every block are scored against every key: half of the mass is theirs, and what is added is what
    one of them needs most.
    Formulas: `cab_hf.ops.reference`; on CUDA the kernels of `cab_hf.ops.predict` compute them.
    """

    def options(self) -> tuple[Mapping[str, float], ...]:
        """Masses and bridges, for the way in which the config scores blocks; or shares of a row.

        No head is given everything where outlier queries are scored exactly, and all score as many:
        heads that differ in that are scored by launches of their own, which take more time than is
        saved.
        """
        if self.config.select == "topk":
            return SHARE_OPTIONS
        budgets = EXACT if self.config.exact_queries else (*ESTIMATED, *EVERYTHING)
        return tuple({"top_p": top_p, "top_k_share": top_k_share} for top_p, top_k_share in budgets)

    def summarise(
        self, k: Tensor, valid: Tensor | None = None, channels: tuple[int, ...] = ()
    ) -> KeySummary:
        """Mean and bounds of every key block, or its mean or loudest key (``config.coarsen``).

        With the ``channels`` of every key (() for all) where queries are scored exactly.
        """
        if self.config.check_finite:
            reference.refuse_infinite("k", k)
        if valid is None:
            valid = torch.ones(k.shape[0], k.shape[2], device=k.device, dtype=torch.bool)
        if has_kernels(k):
            from cab_hf.ops import predict

            return predict.summarise(k, valid, self.config, channels)
        summary = reference.coarsen_keys(k, valid, self.config.key_block, self.config.coarsen)
        return replace(summary, keys=picked(k, channels)) if self.config.exact_queries else summary

    def summary_of(self, k: Tensor, valid: Tensor, call: LayerContext) -> KeySummary:
        return self.summarise(k, valid, call.channels)

    def gathers(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        """Summaries, and vectors where two-hop paths or column sums run through all rows."""
        if type(self) is not CurvaturePredictor:
            # whoever chooses otherwise knows what that takes
            return super().gathers(call, heads)
        config = self.config
        ranked = config.select == "topk" or any(
            budgets_of(config, call.layer, heads[0]).top_k_share
        )
        return ("summaries", "vectors") if config.curved and ranked else ("summaries",)

    def join(
        self, summary: KeySummary, call: LayerContext, heads: tuple[int, int], frame: Any
    ) -> KeySummary:
        """See `Predictor.join`; keys are gathered for the heads that score queries exactly."""
        planes = frame.blocks(summary.planes, 3, self.config.key_block).contiguous()
        exact = budgets_of(self.config, call.layer, heads[0]).exact(heads[0])
        if not exact:
            return KeySummary(planes)
        sharing = heads[0] // heads[1]
        needed = sorted({head // sharing for head in exact})
        scored = [x for x in (summary.keys, summary.exponents) if x is not None]
        return KeySummary(planes, *(frame.tokens(x, needed) for x in scored))

    def vectors(self, q: Tensor, spans: Spans) -> Tensor:
        """One vector for every query block of q [B, H, N_q, D]: [B, H, M_q, D]."""
        config = self.config
        if config.check_finite:
            reference.refuse_infinite("q", q)
        if has_kernels(q):
            from cab_hf.ops import predict

            return predict.coarsen_queries(q, spans, config.query_block, config.coarsen).vectors
        return reference.coarsen_queries(q, spans.last >= 0, config.query_block, config.coarsen)

    def choose(
        self, q: Tensor, summary: KeySummary, call: LayerContext, vectors: Tensor | None = None
    ) -> BlockPlan:
        """See `Predictor.choose`; ``vectors`` as in `Predictor.gathers`."""
        if vectors is not None:
            return self._choose_by(vectors, q, summary, call)
        return self._choose(q, summary, call)

    def _choose_by(
        self, vectors: Tensor, q: Tensor, summary: KeySummary, call: LayerContext
    ) -> BlockPlan:
        """The estimated plan of all rows of a text, of which a rank keeps its own."""
        config, spans, heads = self.config, call.spans, q.shape[1]
        # who brings vectors is asked for shapes alone
        everyone = q.new_zeros(1).expand(q.shape[0], heads, spans.text.q_length, q.shape[3])
        estimated = CurvaturePredictor(replace(config, exact_queries=0))
        plan = estimated._choose(everyone, summary, replace(call, spans=spans.text), vectors)
        plan = spans.own(plan)
        exact = budgets_of(config, call.layer, heads).exact(heads)
        if exact:
            # exact scores know no paths: the rows at hand are all they need
            plain = CurvaturePredictor(replace(config, redundancy=0))
            plan = _with_heads(plan, plain._choose(q, summary, call), exact)
        return plan

    def _choose(
        self, q: Tensor, summary: KeySummary, call: LayerContext, vectors: Tensor | None = None
    ) -> BlockPlan:
        """The plan for q; with ``vectors`` of its query blocks nothing else reads q."""
        if self.config.check_finite:
            reference.refuse_infinite("q", q)
        config, spans = self.config, call.spans
        budgets = budgets_of(config, call.layer, q.shape[1])
        blocks = config.query_block, config.key_block
        if len(budgets.dense_heads) == q.shape[1]:
            return BlockPlan.all_dense(spans, q.shape[1], *blocks)
        if summary.keys is None and (exact := budgets.exact(q.shape[1])):
            raise ValueError(
                f"exact_queries is above 0 for {len(exact)} heads, and the summary holds no keys; "
                "make it by a predictor of the same config."
            )
        if not has_kernels(q):
            return by_reference(q, summary, call, config, budgets, vectors)
        from cab_hf.ops import predict

        full, partial = predict.choose(
            q, summary, spans, call.scale, config, budgets, call.channels, vectors
        )
        rows = tail_rows(spans, config)
        return BlockPlan(full, partial, spans, *blocks, budgets.dense_heads, rows)


def _with_heads(plan: BlockPlan, other: BlockPlan, heads: tuple[int, ...]) -> BlockPlan:
    """``plan`` with some heads of another plan of the same rows."""

    def merged(mine: BlockLists, theirs: BlockLists) -> BlockLists:
        width = max(mine.width, theirs.width)
        mine, theirs = mine.widened(width), theirs.widened(width)
        index = torch.tensor(heads, device=mine.counts.device)
        return BlockLists(
            mine.counts.index_copy(1, index, theirs.counts[:, index]),
            mine.indices.index_copy(1, index, theirs.indices[:, index]),
        )

    full, partial = merged(plan.full, other.full), merged(plan.partial, other.partial)
    return replace(plan, full=full, partial=partial)


def by_reference(
    q: Tensor,
    summary: KeySummary,
    call: LayerContext,
    config: CabConfig,
    budgets: Budgets,
    vectors: Tensor | None = None,
) -> BlockPlan:
    """What `CurvaturePredictor.choose` means, in plain PyTorch on any device."""
    if torch.compiler.is_compiling() and call.spans.end is None:
        return _as_op(q, summary, call, config, budgets)
    spans, scale = call.spans, call.scale
    visible = block_visibility(spans, config.query_block, config.key_block)
    queries = vectors
    if queries is None:
        queries = reference.coarsen_queries(q, spans.last >= 0, config.query_block, config.coarsen)
    kv_heads = summary.planes.shape[2]
    group = q.shape[1] // kv_heads
    scores_per_kv_head = visible.numel() * group
    step = max(1, min(kv_heads, SCORE_ELEMENTS_AT_A_TIME // max(1, scores_per_kv_head)))
    exact, kept = budgets.exact(q.shape[1]), []
    for head in range(0, kv_heads, step):
        mine = range(head * group, min(head + step, kv_heads) * group)
        some = queries[:, mine.start : mine.stop]
        logits = reference.block_logits(some, summary.heads(head, head + step), scale)
        keep = torch.zeros(*logits[0].shape, device=q.device, dtype=torch.bool)
        if not exact or not set(mine) <= set(exact):
            own = budgets.of_heads(mine)
            keep = reference.select_blocks(*logits, spans, visible, config, own)
        for at, index in enumerate(mine):
            if index in exact:
                estimate = sum(logits)[:, [at]] / 2
                keep[:, [at]] = _by_outliers(
                    q[:, [index]],
                    summary.keys[:, [index // group]],
                    estimate,
                    visible,
                    call,
                    config,
                    budgets.of_heads([index]),
                )
        kept.append(keep)
    return BlockPlan.from_dense(
        torch.cat(kept, dim=1),
        spans,
        query_block=config.query_block,
        key_block=config.key_block,
        dense_heads=budgets.dense_heads,
        dense_rows=tail_rows(spans, config),
    )


def _as_op(
    q: Tensor, summary: KeySummary, call: LayerContext, config: CabConfig, budgets: Budgets
) -> BlockPlan:
    """`by_reference` for torch.compile, which would trace a graph for each length of its loops."""
    spans = call.spans
    known = spans.first, spans.last, spans.key_valid, spans.aligned, spans.documents
    given = call.scale, call.channels, *known, *op_settings(config, budgets)
    lists = _choose_op(q, summary.planes, summary.keys, *given)
    full, partial, rows = BlockLists(*lists[:2]), BlockLists(*lists[2:]), tail_rows(spans, config)
    return BlockPlan(full, partial, spans, *_blocks(config), budgets.dense_heads, rows)


@torch.library.custom_op(
    "cab_hf::choose_by_reference",
    mutates_args=(),
    schema="(Tensor q, Tensor planes, Tensor? keys, float scale, int[] channels, Tensor first,"
    f" Tensor last, Tensor key_valid, bool aligned, int? documents, {OP_SETTINGS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _choose_op(q, planes, keys, scale, channels, first, last, valid, aligned, documents, *values):
    budgets, config = settings_of_op(values)
    spans = Spans(first, last, valid, aligned, documents=documents)
    call = LayerContext(spans, scale, channels=tuple(channels))
    plan = by_reference(q, KeySummary(planes, keys), call, config, budgets)
    return plan.full.counts, plan.full.indices, plan.partial.counts, plan.partial.indices


@_choose_op.register_fake
def _(q, planes, keys, scale, channels, first, last, valid, aligned, documents, *values):
    _, config = settings_of_op(values)
    rows, columns = -(-q.shape[2] // config.query_block), planes.shape[3]
    crossed = min(crossed_blocks(*_blocks(config)), columns) if aligned else columns
    shapes = ((), (columns,), (), (crossed,))
    return tuple(first.new_empty(*q.shape[:2], rows, *width) for width in shapes)


def _blocks(config: CabConfig) -> tuple[int, int]:
    return config.query_block, config.key_block


def _by_outliers(
    q: Tensor,
    keys: Tensor,
    estimate: Tensor,
    visible: Tensor,
    call: LayerContext,
    config: CabConfig,
    own: Budgets,
) -> Tensor:
    """The blocks of one head, bool [B, 1, M_q, M_k], whose outlier queries are scored exactly."""
    spans, count = call.spans, own.exact_queries[0]
    positions = reference.outlier_queries(q, spans, config.query_block, count)
    scored = picked(q, call.channels)
    at = positions.clamp(min=0).flatten(2).unsqueeze(-1).expand(-1, -1, -1, scored.shape[3])
    rows = scored.gather(2, at).unflatten(2, (-1, count))
    parts = spans, call.scale, config.key_block
    most, shares = reference.exact_scores(rows, positions, keys, *parts)
    log_mass = None
    if config.select == "clusters":
        seen = visible.unsqueeze(1)
        log_mass = reference.shared_mass(reference.block_log_mass(estimate, seen), shares, seen)
    return reference.best_blocks(most, log_mass, spans, visible, config, own)


def picked(x: Tensor, channels: tuple[int, ...]) -> Tensor:
    """Some channels of x [..., D], all of them for ()."""
    return x[..., list(channels)] if channels else x


def tail_rows(spans: Spans, config: CabConfig) -> Tensor | None:
    """The rows that attend everything and so list nothing; None where it is not known how many."""
    return spans.tail_rows(config.dense_tail_blocks * config.query_block, config.query_block)


def has_kernels(x: Tensor) -> bool:
    """Whether the predictor's kernels take ``x``."""
    # imported here and above: models on the CPU never need Triton
    if not x.is_cuda or not HAS_TRITON:
        return False
    from cab_hf.ops import predict

    return predict.unavailable(x) is None
