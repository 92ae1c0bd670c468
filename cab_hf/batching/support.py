"""Functions that `hooks` and `served` share.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # not at run time, because `hooks` imports this module while transformers is being imported
    from transformers import PreTrainedModel

# package of transformers with continuous batching
BATCHING_PACKAGE = "transformers.generation.continuous_batching"


def transformers_passes_paged_cache() -> bool:
    """Return True if this version of transformers passes its paged cache to attention functions."""
    return importlib.util.find_spec(f"{BATCHING_PACKAGE}.cache_allocators") is not None


def transformers_submodels(model: Any) -> Iterator[PreTrainedModel]:
    """Return an iterator over ``model`` and its submodules that are transformers models."""
    from transformers import PreTrainedModel

    return (module for module in model.modules() if isinstance(module, PreTrainedModel))
