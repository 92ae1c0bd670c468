"""The KV cache that a model takes and returns, whose name transformers changed in 5.24."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

NAME, NAME_BEFORE = "cache", "past_key_values"


def cache_name(model: Any) -> str:
    """The argument of ``model`` that takes a cache."""
    return NAME if NAME in inspect.signature(model.forward).parameters else NAME_BEFORE


def cache_of(output: Any) -> Any:
    """The cache in what a model returned."""
    return output[NAME] if NAME in output else output[NAME_BEFORE]


def cache_arguments(model: Any, cache: Any) -> dict[str, Any]:
    """What `read_on` gives ``model`` beside the tokens, for calls that are timed."""
    return {cache_name(model): cache, "use_cache": True}


def read_on(model: Any, ids: Tensor, cache: Any, **options: Any) -> Any:
    """What ``model`` returns for tokens ``ids`` [B, N] behind those in ``cache``; None for none."""
    return model(ids, **cache_arguments(model, cache), **options)
