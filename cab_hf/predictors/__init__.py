"""Predictors: classes that take q and k and return a `BlockPlan`.

A predictor encodes the keys and then selects key blocks for every query block. After
``register_predictor(name, Class)``, every model and every evaluation uses the class if its config
is ``CabConfig(predictor=name)``.
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
