"""The KV cache as an argument and as an output of a model, which transformers renamed in 5.24."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

NAME, NAME_BEFORE = "cache", "past_key_values"


def cache_name(model: Any) -> str:
    """Return the name of the argument through which ``model`` receives a cache."""
    return NAME if NAME in inspect.signature(model.forward).parameters else NAME_BEFORE


def cache_of(output: Any) -> Any:
    """Return the cache in an output of a model."""
    return output[NAME] if NAME in output else output[NAME_BEFORE]


def cache_arguments(model: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword arguments for a call of ``model`` that reads and extends ``cache``."""
    return {cache_name(model): cache, "use_cache": True}


def read_on(model: Any, ids: Tensor, cache: Any, **options: Any) -> Any:
    """Return the output of ``model`` for tokens that follow the cached tokens.

    Args:
        model: the model.
        ids: token ids, int64 [B, N].
        cache: the cache; None for the default of the model.
        options: other arguments of the model.
    """
    return model(ids, **cache_arguments(model, cache), **options)
