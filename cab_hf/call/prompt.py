"""Where a prompt ends, recorded once by the caller that knows: what follows is an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Prompt:
    """The prompt that the calls of a model read, at once or in chunks.

    Attributes:
        end: slot of the first token behind it.
        lengths: tokens of each batch row, without padding; None where no row has padding.
        read: whether a call has been seen that begins behind it.
    """

    end: int
    lengths: tuple[int, ...] | None = None
    read: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.end if self.lengths is None else max(self.lengths)


class _Scope:
    prompt: Prompt | None = None


# of `generate`, which finds out where the prompt ends on its way
_scope: ContextVar[_Scope | None] = ContextVar("the prompt that is read", default=None)


@contextmanager
def scope() -> Iterator[None]:
    """Calls of a model inside read no prompt but one that is set inside."""
    before = _scope.set(_Scope())
    try:
        yield
    finally:
        _scope.reset(before)


def set_prompt(prompt: Prompt | None) -> None:
    """Set the prompt that calls of the innermost `scope` read; None: its end is not known."""
    here = _scope.get()
    if here is not None:
        here.prompt = prompt


@contextmanager
def reading(tokens: int) -> Iterator[None]:
    """Calls of a model inside read a prompt of so many tokens in every row."""
    with scope():
        set_prompt(Prompt(tokens))
        yield


def prompt_of(batch: int) -> Prompt | None:
    """The prompt that a call of so many rows reads; None where its end is not known."""
    here = _scope.get()
    prompt = None if here is None else here.prompt
    if prompt is None or (prompt.lengths is not None and len(prompt.lengths) != batch):
        return None
    return prompt


def prompt_given(settings: Any, model_kwargs: dict[str, Any]) -> Prompt | None:
    """The prompt of a call of `generate`, by its settings and arguments; None if not known.

    An assistant reads what its model has accepted, which begins with the prompt and does not end
    with it.
    """
    if getattr(settings, "is_assistant", False):
        return None
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        # a mask that hides nothing is left out
        end = getattr(settings, "_mask_length", None)
        return None if end is None else Prompt(end)
    if mask.ndim != 2:
        return None
    lengths = tuple(mask.bool().sum(-1).tolist())
    return Prompt(mask.shape[1], None if set(lengths) == {mask.shape[1]} else lengths)
