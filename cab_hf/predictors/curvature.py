"""Deciding: q and k in, a `BlockPlan` out.

CAB is `CurvaturePredictor`. Anything with the same signature can be registered under a name and
chosen by ``CabConfig(predictor=name)``; it then runs in every model and every evaluation. The
published classes, which give the recipe part by part, are written in `cab_hf.predictors.published`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.ops import reference
from cab_hf.plan import BlockPlan, Spans, block_visibility
from cab_hf.predictors.published import (
    AdaptiveCurvaturePredictor,
    CoarseCurvaturePredictor,
    coarsen_qk_max_l2,
    compute_block_frc,
    estimate_flops,
    generate_block_mask_from_frc,
    visualize_frc_statistics,
)

__all__ = [
    "AdaptiveCurvaturePredictor",
    "CoarseCurvaturePredictor",
    "CurvaturePredictor",
    "Predictor",
    "by_reference",
    "coarsen_qk_max_l2",
    "compute_block_frc",
    "estimate_flops",
    "generate_block_mask_from_frc",
    "make_predictor",
    "register_predictor",
    "visualize_frc_statistics",
]

# asked once: torch.compile cannot look for packages
HAS_TRITON = find_spec("triton") is not None
# elements of a [heads, M_q, M_k] score tensor worked on at a time; some 20 of them live at once
SCORES_AT_A_TIME = 1 << 25


class Predictor(Protocol):
    def __call__(self, q: Tensor, k: Tensor, spans: Spans, scale: float) -> BlockPlan:
        """The plan for q [B, H, N_q, D] over k [B, H_kv, N_k, D], both after RoPE.

        ``spans`` is what each query may see at all, ``scale`` what logits are multiplied by. No
        gradient flows through a plan. The same inputs must give the same plan: gradient
        checkpointing runs a layer twice.
        """
        ...


class CurvaturePredictor:
    """CAB: Curvature-Aware Block-sparse attention.

    Coarsens q and k to blocks, estimates each row's attention mass from the block summaries, keeps
    the smallest set of blocks that holds ``config.mass`` and adds bridges by curvature
    (``config.select="clusters"``), or keeps a fixed share (``"topk"``, the published recipe).
    Formulas: `cab_hf.ops.reference`; on CUDA the kernels of `cab_hf.ops.predict` compute them.
    """

    def __init__(self, config: CabConfig) -> None:
        self.config = config

    def __call__(self, q: Tensor, k: Tensor, spans: Spans, scale: float) -> BlockPlan:
        if self.config.check_finite:
            _refuse_infinite(q=q, k=k)
        with torch.no_grad():
            if _has_kernels(q, k):
                return _by_kernels(q, k, spans, scale, self.config)
            return by_reference(q, k, spans, scale, self.config)


def by_reference(q: Tensor, k: Tensor, spans: Spans, scale: float, config: CabConfig) -> BlockPlan:
    """What `CurvaturePredictor` means, in plain PyTorch on any device."""
    visible = block_visibility(spans, config.query_block, config.key_block)
    queries = reference.coarsen_queries(q, spans.last >= 0, config.query_block, config.coarsen)
    keys = reference.coarsen_keys(k, spans.key_valid, config.key_block, config.coarsen)

    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    scores_per_kv_head = visible.numel() * group
    step = max(1, min(kv_heads, SCORES_AT_A_TIME // max(1, scores_per_kv_head)))
    kept = []
    for head in range(0, kv_heads, step):
        part = reference.KeySummary(
            *(x[:, head : head + step] for x in (keys.mean, keys.upper, keys.lower))
        )
        upper, mean = reference.block_logits(
            queries[:, head * group : (head + step) * group], part, scale
        )
        kept.append(reference.select_blocks(upper, mean, spans, visible, config))
    return BlockPlan.from_dense(
        torch.cat(kept, dim=1),
        spans,
        query_block=config.query_block,
        key_block=config.key_block,
    )


def _has_kernels(q: Tensor, k: Tensor) -> bool:
    # imported here and below: models on the CPU never need Triton
    if not q.is_cuda or not HAS_TRITON:
        return False
    from cab_hf.ops import predict

    return predict.unavailable(q, k) is None


def _by_kernels(q: Tensor, k: Tensor, spans: Spans, scale: float, config: CabConfig) -> BlockPlan:
    from cab_hf.ops import predict

    full, partial = predict.predict(q, k, spans, scale, config)
    return BlockPlan(full, partial, spans, config.query_block, config.key_block)


def _refuse_infinite(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{name} holds infinite or NaN values (shape {tuple(tensor.shape)}); nothing can "
                "be selected by them. Look for an overflow in the layers before this one."
            )


Factory = Callable[[CabConfig], Predictor]
_FACTORIES: dict[str, Factory] = {"curvature": CurvaturePredictor}


def register_predictor(name: str, factory: Factory) -> None:
    """Make ``CabConfig(predictor=name)`` use ``factory(config)``. ValueError for a taken name."""
    if _FACTORIES.get(name, factory) is not factory:
        raise ValueError(f"predictor {name!r} is registered already; choose another name.")
    _FACTORIES[name] = factory


def make_predictor(config: CabConfig) -> Predictor:
    """The predictor ``config`` names. Raises ValueError for a name nobody registered."""
    if config.predictor not in _FACTORIES:
        known = ", ".join(sorted(_FACTORIES))
        raise ValueError(
            f"CabConfig.predictor is {config.predictor!r}; registered are {known}. "
            "cab_hf.predictors.register_predictor adds one."
        )
    return _FACTORIES[config.predictor](config)
