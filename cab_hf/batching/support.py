"""Facts about transformers and models that both `hooks` and `served` read.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # transformers is still importing itself at this moment
    from transformers import PreTrainedModel

PACKAGE = "transformers.generation.continuous_batching"


def reads_a_batch() -> bool:
    """Return whether this version of transformers passes its paged cache to attention functions."""
    return importlib.util.find_spec(f"{PACKAGE}.cache_allocators") is not None


def parts(model: Any) -> Iterator[PreTrainedModel]:
    """Return an iterator over the transformers models in ``model``, including ``model``."""
    from transformers import PreTrainedModel

    return (module for module in model.modules() if isinstance(module, PreTrainedModel))
