"""Deciding: q and k in, a `BlockPlan` out.

A predictor summarises keys, then chooses blocks for queries. Any can be registered under a name and
chosen by ``CabConfig(predictor=name)``; it then runs in every model and every evaluation.
"""

from cab_hf.predictors.base import LayerContext, Predictor, make_predictor, register_predictor
from cab_hf.predictors.cascade import CascadePredictor
from cab_hf.predictors.frc import FrcPredictor
from cab_hf.predictors.published import AdaptiveCurvaturePredictor, CoarseCurvaturePredictor
from cab_hf.predictors.rows import RowsPredictor

__all__ = [
    "AdaptiveCurvaturePredictor",
    "CascadePredictor",
    "CoarseCurvaturePredictor",
    "FrcPredictor",
    "LayerContext",
    "Predictor",
    "RowsPredictor",
    "make_predictor",
    "register_predictor",
]

register_predictor("cascade", CascadePredictor)
register_predictor("frc", FrcPredictor)
register_predictor("rows", RowsPredictor)
