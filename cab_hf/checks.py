"""Checks of argument values with error messages, and warnings that appear once per process."""

from __future__ import annotations

import math
import warnings
from typing import Any

# largest number of blocks or tokens, because kernels count in int32
MAX_INT32 = 2**31 - 1
# keys of the warnings that this process has shown
_shown_warning_keys: set[tuple[Any, ...]] = set()


def require(is_valid: object, argument_name: str, value: Any, requirement: str) -> None:
    """Raise a ValueError for an argument whose value is not valid.

    Args:
        is_valid: True if the value is valid.
        argument_name: name of the argument.
        value: value of the argument.
        requirement: description of valid values, for the message.
    """
    if not is_valid:
        raise ValueError(f"{argument_name} must be {requirement}, got {short_repr(value)}.")


def require_finite(outputs: Any, attention_name: str) -> None:
    """Check that the outputs of a model are finite.

    Args:
        outputs: tensor that the model computed, for example logits.
        attention_name: name of the attention implementation, for the message.

    Raises:
        ValueError: if a number is infinite or NaN.
    """
    # aminmax allocates no mask, unlike isfinite: logits can already take most of the memory
    if not all(map(math.isfinite, outputs.detach().aminmax())):
        raise ValueError(
            f"The model's outputs are not finite (NaN or infinite) under {attention_name} "
            "attention, so nothing can be measured. Pass a model with finite outputs, or use "
            "another dtype."
        )


def short_repr(value: Any) -> str:
    """Return a description of a value with at most 80 characters, for a message.

    The description is the shape of a tensor or array, or the repr of any other value.
    """
    # empty for scalars of numpy and torch, whose repr is short
    shape = getattr(value, "shape", None)
    description = f"a tensor of shape {tuple(shape)}" if shape else repr(value)
    return description if len(description) <= 80 else f"{description[:77]}..."


def is_whole_number(value: Any, minimum: int = 1) -> bool:
    """Return True for an int (not a bool) of at least ``minimum``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_count(value: Any) -> bool:
    """Return True for an int from 0 to `MAX_INT32`."""
    return is_whole_number(value, 0) and value <= MAX_INT32


def is_number(value: Any) -> bool:
    """Return True for a finite int or float (not a bool)."""
    is_real_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real_number and math.isfinite(value)


def is_fraction(value: Any) -> bool:
    """Return True for a number in [0, 1]."""
    return is_number(value) and 0 <= value <= 1


def warn_renamed(old_name: str, new_name: str, stacklevel: int = 3) -> None:
    """Warn that a public name has been renamed.

    Args:
        old_name: name that the user's code uses.
        new_name: current name.
        stacklevel: argument of `warnings.warn`, counted from this function.
    """
    warnings.warn(
        f"{old_name} is an old name that the next version removes. Use {new_name}.",
        FutureWarning,
        stacklevel=stacklevel,
    )


def warn_once(warning_key: tuple[Any, ...], message: str) -> None:
    """Show a warning once per process and key.

    Args:
        warning_key: identifies the warning; a second call with an equal key shows nothing.
        message: message of the warning.
    """
    if warning_key not in _shown_warning_keys:
        _shown_warning_keys.add(warning_key)
        warnings.warn(message, UserWarning, stacklevel=3)
