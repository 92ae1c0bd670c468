"""CAB: Curvature-Aware Block-sparse attention, the predictor this package is named after."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from cab_hf.config import Budgets, CabConfig, budgets_of
from cab_hf.ops import reference
from cab_hf.ops.reference import KeySummary
from cab_hf.plan import BlockPlan, Spans, block_visibility
from cab_hf.predictors.base import Call, Predictor

# asked once: torch.compile cannot look for packages
HAS_TRITON = find_spec("triton") is not None
# elements of a [heads, M_q, M_k] score tensor worked on at a time; some 20 of them live at once
SCORES_AT_A_TIME = 1 << 25


class CurvaturePredictor(Predictor):
    """CAB.

    Coarsens q and k to blocks, estimates each row's attention mass from the block summaries, keeps
    the smallest set of blocks that holds ``config.mass`` and adds bridges by curvature
    (``config.select="clusters"``), or keeps a fixed share (``"topk"``, the published recipe). What
    a head keeps can be its own: everything, or the best by exact scores (``config.exact_share``).
    Formulas: `cab_hf.ops.reference`; on CUDA the kernels of `cab_hf.ops.predict` compute them.
    """

    def summarise(self, k: Tensor, valid: Tensor | None = None) -> KeySummary:
        """Mean and bounds of every key block, or its mean or loudest key (``config.coarsen``)."""
        if self.config.check_finite:
            _refuse_infinite("k", k)
        if valid is None:
            valid = torch.ones(k.shape[0], k.shape[2], device=k.device, dtype=torch.bool)
        if _has_kernels(k):
            from cab_hf.ops import predict

            summary = predict.summarise(k, valid, self.config)
        else:
            summary = reference.coarsen_keys(k, valid, self.config.key_block, self.config.coarsen)
        return replace(summary, keys=k) if self.config.exact_share else summary

    def choose(self, q: Tensor, summary: KeySummary, call: Call) -> BlockPlan:
        if self.config.check_finite:
            _refuse_infinite("q", q)
        config, spans = self.config, call.spans
        budgets = budgets_of(config, call.layer, q.shape[1])
        blocks = config.query_block, config.key_block
        if len(budgets.whole) == q.shape[1]:
            return BlockPlan.unlisted(spans, q.shape[1], *blocks)
        if budgets.exact and summary.keys is None:
            raise ValueError(
                f"exact_share is above 0 for {len(budgets.exact)} heads, and the summary holds no "
                "keys; make it by a predictor of the same config."
            )
        if not _has_kernels(q):
            return by_reference(q, summary, spans, call.scale, config, budgets)
        from cab_hf.ops import predict

        full, partial = predict.choose(q, summary, spans, call.scale, config, budgets)
        rows = _tail_rows(spans, config)
        return BlockPlan(full, partial, spans, *blocks, budgets.whole, rows)


def by_reference(
    q: Tensor,
    summary: KeySummary,
    spans: Spans,
    scale: float,
    config: CabConfig,
    budgets: Budgets,
) -> BlockPlan:
    """What `CurvaturePredictor.choose` means, in plain PyTorch on any device."""
    mass = budgets.mass[0]
    if len(budgets.mass) > 1:
        mass = torch.tensor(budgets.mass, device=q.device)
    visible = block_visibility(spans, config.query_block, config.key_block)
    queries = reference.coarsen_queries(q, spans.last >= 0, config.query_block, config.coarsen)
    kv_heads = summary.planes.shape[2]
    group = q.shape[1] // kv_heads
    scores_per_kv_head = visible.numel() * group
    step = max(1, min(kv_heads, SCORES_AT_A_TIME // max(1, scores_per_kv_head)))
    kept = []
    for head in range(0, kv_heads, step):
        some = queries[:, head * group : (head + step) * group]
        logits = reference.block_logits(some, summary.heads(head, head + step), scale)
        own = mass[head * group : (head + step) * group] if isinstance(mass, Tensor) else mass
        kept.append(reference.select_blocks(*logits, spans, visible, config, own))
    keep = torch.cat(kept, dim=1)
    if budgets.exact:
        heads = list(budgets.exact)
        keys = summary.keys[:, [head // group for head in heads]]
        blocks = config.query_block, config.key_block
        scores = reference.exact_scores(q[:, heads], keys, spans, scale, *blocks)
        shares = [budgets.exact_share[head] for head in heads]
        keep[:, heads] = reference.select_exact(scores, spans, visible, config, shares)
    return BlockPlan.from_dense(
        keep,
        spans,
        query_block=config.query_block,
        key_block=config.key_block,
        whole_heads=budgets.whole,
        whole_rows=_tail_rows(spans, config),
    )


def _tail_rows(spans: Spans, config: CabConfig) -> Tensor | None:
    """The rows that attend everything and so list nothing; None where it is not known how many."""
    return spans.tail_rows(config.dense_tail * config.query_block, config.query_block)


def _has_kernels(x: Tensor) -> bool:
    # imported here and above: models on the CPU never need Triton
    if not x.is_cuda or not HAS_TRITON:
        return False
    from cab_hf.ops import predict

    return predict.unavailable(x) is None


def _refuse_infinite(name: str, x: Tensor) -> None:
    if not bool(torch.isfinite(x).all()):
        raise ValueError(
            f"{name} holds infinite or NaN values (shape {tuple(x.shape)}); nothing can be "
            "selected by them. Look for an overflow in the layers before this one."
        )
