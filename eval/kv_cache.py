"""Pass a KV cache to a model and read it from the output, for all versions of transformers.

Version 5.24 renamed the argument and the output from ``past_key_values`` to ``cache``.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

CACHE_ARGUMENT, OLD_CACHE_ARGUMENT = "cache", "past_key_values"


def get_cache_name(model: Any) -> str:
    """Return the name of the argument of ``model`` for the KV cache."""
    return (
        CACHE_ARGUMENT
        if CACHE_ARGUMENT in inspect.signature(model.forward).parameters
        else OLD_CACHE_ARGUMENT
    )


def get_cache(output: Any) -> Any:
    """Return the KV cache in an output of a model."""
    return output[CACHE_ARGUMENT] if CACHE_ARGUMENT in output else output[OLD_CACHE_ARGUMENT]


def make_cache_arguments(model: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword arguments for a call of ``model`` that reads and extends ``cache``."""
    return {get_cache_name(model): cache, "use_cache": True}


def read_with_cache(model: Any, ids: Tensor, cache: Any, **model_options: Any) -> Any:
    """Call ``model`` with tokens that follow the cached tokens, and return its output.

    Args:
        model: the model.
        ids: token ids, int64 [B, N].
        cache: the KV cache, to which the call adds the tokens; None to let the model create one.
        model_options: other arguments of the model.
    """
    return model(ids, **make_cache_arguments(model, cache), **model_options)
