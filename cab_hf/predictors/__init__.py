"""Deciding: q and k in, a `BlockPlan` out.

A predictor summarises keys, then chooses blocks for queries. Any can be registered under a name and
chosen by ``CabConfig(predictor=name)``; it then runs in every model and every evaluation.
"""

from cab_hf.predictors.base import LayerContext, Predictor, make_predictor, register_predictor
from cab_hf.predictors.baselines import (
    AntidiagonalPredictor,
    MeanPooledPredictor,
    OraclePredictor,
    RandomPredictor,
    StreamingPredictor,
    VerticalSlashPredictor,
    XAttention16Predictor,
    XAttentionPredictor,
)
from cab_hf.predictors.cascade import CascadePredictor
from cab_hf.predictors.flexprefill import FlexPrefillPredictor
from cab_hf.predictors.frc import FrcPredictor
from cab_hf.predictors.published import AdaptiveCurvaturePredictor, CoarseCurvaturePredictor
from cab_hf.predictors.rows import RowsPredictor

__all__ = [
    "AdaptiveCurvaturePredictor",
    "AntidiagonalPredictor",
    "CascadePredictor",
    "CoarseCurvaturePredictor",
    "FlexPrefillPredictor",
    "FrcPredictor",
    "LayerContext",
    "MeanPooledPredictor",
    "OraclePredictor",
    "Predictor",
    "RandomPredictor",
    "RowsPredictor",
    "StreamingPredictor",
    "VerticalSlashPredictor",
    "XAttention16Predictor",
    "XAttentionPredictor",
    "make_predictor",
    "register_predictor",
]

register_predictor("antidiagonal", AntidiagonalPredictor)
register_predictor("cascade", CascadePredictor)
register_predictor("flexprefill", FlexPrefillPredictor)
register_predictor("frc", FrcPredictor)
register_predictor("mean_pooled", MeanPooledPredictor)
register_predictor("oracle", OraclePredictor)
register_predictor("random", RandomPredictor)
register_predictor("rows", RowsPredictor)
register_predictor("streaming", StreamingPredictor)
register_predictor("vertical_slash", VerticalSlashPredictor)
register_predictor("xattention", XAttentionPredictor)
register_predictor("xattention_16", XAttention16Predictor)
