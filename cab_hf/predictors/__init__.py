"""Deciding: q and k in, a `BlockPlan` out."""

from cab_hf.predictors.curvature import (
    AdaptiveCurvaturePredictor,
    CoarseCurvaturePredictor,
    CurvaturePredictor,
    Predictor,
    by_reference,
    coarsen_qk_max_l2,
    compute_block_frc,
    estimate_flops,
    generate_block_mask_from_frc,
    make_predictor,
    register_predictor,
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
