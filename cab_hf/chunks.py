"""Prompts that are read in chunks: whether more of one is to come, where the caller knows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# slots up to which a prompt is read, in calls of which each reads a chunk; None where nobody said
_until: ContextVar[int | None] = ContextVar("tokens of the prompt that is read", default=None)


@contextmanager
def reading(tokens: int | None) -> Iterator[None]:
    """Calls of a model inside read chunks of one prompt of so many tokens; None: nobody knows."""
    before = _until.set(tokens)
    try:
        yield
    finally:
        _until.reset(before)


def goes_on(written: int) -> bool:
    """Whether the prompt that is read goes on behind its first ``written`` tokens."""
    until = _until.get()
    return until is not None and written < until
