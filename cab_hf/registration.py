"""Telling transformers about "cab" and "cab_dense", without making `import cab_hf` slow.

transformers itself imports torch and its modelling code only when a model class is first touched.
Registration waits for that moment, so that importing cab_hf costs next to nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODELING = "transformers.modeling_utils"


def register() -> None:
    """Register both implementations now."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from cab_hf.attention import cab_attention, cab_dense_attention
    from cab_hf.call import cab_mask

    AttentionInterface.register("cab", cab_attention)
    AttentionInterface.register("cab_dense", cab_dense_attention)
    AttentionMaskInterface.register("cab", cab_mask)
    AttentionMaskInterface.register("cab_dense", cab_mask)


def register_when_imported() -> None:
    """Register now if transformers' modelling code is loaded, else as soon as it is."""
    if MODELING in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _AfterModeling())


class _AfterModeling(MetaPathFinder):
    """Finds nothing itself: lets the others find `MODELING`, and registers once it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != MODELING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then_register(module: ModuleType) -> None:
            run(module)
            register()

        spec.loader.exec_module = run_then_register
        return spec
