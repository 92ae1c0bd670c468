"""Checks of values, and the sentences of errors and warnings."""

from __future__ import annotations

import math
import warnings
from typing import Any

# blocks and tokens are counted in int32
MOST = 2**31 - 1
# what a warning has named in this process
_warned: set[tuple[Any, ...]] = set()


def require(accepted: object, name: str, value: Any, what: str) -> None:
    """Refuse the ``value`` of an argument, in one sentence, unless it is ``accepted``."""
    if not accepted:
        raise ValueError(f"{name} must be {what}, got {short(value)}.")


def require_finite(outputs: Any, attention: str) -> None:
    """Refuse a tensor that a model has computed under ``attention`` where anything of it is none.

    Raises:
        ValueError: saying so.
    """
    # one pass that stores nothing: logits may be most of the memory
    if not all(map(math.isfinite, outputs.detach().aminmax())):
        raise ValueError(
            f"The model's outputs are not finite (NaN or infinite) under {attention} attention, so "
            "that nothing can be measured; give a model whose weights are sound, or another dtype."
        )


def short(value: Any) -> str:
    """A value as a sentence can hold it."""
    # one number, numpy's or torch's, has a shape of nothing
    shape = getattr(value, "shape", None)
    text = f"a tensor of shape {tuple(shape)}" if shape else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_count(value: Any) -> bool:
    return is_whole(value, 0) and value <= MOST


def is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def warn_once(key: tuple[Any, ...], sentence: str) -> None:
    """Warn of what ``key`` names, once a process."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(sentence, UserWarning, stacklevel=3)
