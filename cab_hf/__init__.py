"""Block-sparse attention for Hugging Face causal language models.

Importing this package registers the attention implementations "cab", "cab_frc" and "cab_dense" with
transformers.
"""

import importlib
from typing import TYPE_CHECKING

from cab_hf.registration import register_when_imported

if TYPE_CHECKING:
    from cab_hf.config import CabConfig
    from cab_hf.decode.generation import index_cache
    from cab_hf.distributed import context_parallel
    from cab_hf.experiment.loading import load_model
    from cab_hf.patches import apply_cab, cab, describe, remove_cab, stats
    from cab_hf.patches.calibration import calibrate
    from cab_hf.patches.plotting import plot_plan
    from cab_hf.plan import BlockPlan
    from cab_hf.predictors import register_predictor

__version__ = "0.3.0"
__all__ = [
    "BlockPlan",
    "CabConfig",
    "apply_cab",
    "cab",
    "calibrate",
    "context_parallel",
    "describe",
    "index_cache",
    "load_model",
    "plot_plan",
    "register_predictor",
    "remove_cab",
    "stats",
]

# public name -> module that defines the name
_MODULE_OF_NAME = {
    "BlockPlan": "cab_hf.plan",
    "CabConfig": "cab_hf.config",
    "calibrate": "cab_hf.patches.calibration",
    "context_parallel": "cab_hf.distributed",
    "index_cache": "cab_hf.decode.generation",
    "load_model": "cab_hf.experiment.loading",
    "plot_plan": "cab_hf.patches.plotting",
    "register_predictor": "cab_hf.predictors",
    **dict.fromkeys(("apply_cab", "cab", "describe", "remove_cab", "stats"), "cab_hf.patches"),
}

register_when_imported()


def __getattr__(name: str) -> object:
    # lazy imports (PEP 562): importing cab_hf does not import torch, so that it is fast
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'cab_hf' has no attribute {name!r}")
    public_object = globals()[name] = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    return public_object


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
