"""`SCOPE`: what is known around a call of a model, and reaches a layer by none of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from cab_hf.call.call import Call


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


@dataclass(frozen=True, eq=False)
class Scope:
    """What calls of a model find set around them; layers have it from the mask of a forward pass.

    Those that gradient checkpointing computes again, in another thread, find nothing here.

    Attributes:
        prompt: that is read; None where its end is not known.
        takes_prompt: whether `set_prompt` sets it.
        parallel: the `Parallel` of the ranks that hold the text; None where one process does.
        observer: sees each `Call` before it is computed; None for none.
        module: whose call has set this, and
        outer: what was set before it.
    """

    prompt: Prompt | None = None
    takes_prompt: bool = False
    parallel: Any = None
    observer: Callable[[Call], None] | None = None
    module: nn.Module | None = None
    outer: Scope | None = None


NOTHING = Scope()
SCOPE: ContextVar[Scope] = ContextVar("what calls of a model find set around", default=NOTHING)
# the configs in models that are inside `context_parallel`: what torch.compile can look at
SHARDED: list[Any] = []


@contextmanager
def during_calls(model: nn.Module, **fields: Any) -> Iterator[None]:
    """Inside, `SCOPE` has these ``fields`` while ``model``, or a part with a config, is called."""

    def enter(module: nn.Module, *_: Any) -> None:
        refuse_compiled()
        outer = SCOPE.get()
        SCOPE.set(replace(outer, **fields, module=module, outer=outer))

    def leave(module: nn.Module, *_: Any) -> None:
        # a hook before `enter` may have failed
        if SCOPE.get().module is module:
            SCOPE.set(SCOPE.get().outer)

    handles = []
    for module in model.modules():
        if module is model or hasattr(module, "config"):
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_sharded(config: Any) -> bool:
    """Whether a model with this very config is inside `context_parallel`."""
    return any(config is each for each in SHARDED)


def refuse_compiled(config: Any = None) -> None:
    """Raises NotImplementedError in a compiled model, with a config if that is not sharded."""
    if torch.compiler.is_compiling() and (config is None or is_sharded(config)):
        raise NotImplementedError(
            "the model is compiled, and what context_parallel and calibrate set around its calls "
            "is not traced. Leave out torch.compile there."
        )


class _Traced:
    """The position ids of the mask that is being traced: torch.compile traces no ContextVar."""

    position_ids: Tensor | None = None


_POSITIONS: ContextVar[Tensor | None] = ContextVar("position ids of the next mask", default=None)


def record_positions(position_ids: Tensor | None) -> None:
    """Record the position ids of the mask that transformers makes next."""
    if torch.compiler.is_compiling():
        _Traced.position_ids = position_ids
    else:
        _POSITIONS.set(position_ids)


def recorded_positions() -> Tensor | None:
    """Return what `record_positions` has recorded for this mask, and forget it."""
    if torch.compiler.is_compiling():
        position_ids, _Traced.position_ids = _Traced.position_ids, None
        return position_ids
    position_ids = _POSITIONS.get()
    if position_ids is not None:
        _POSITIONS.set(None)
    return position_ids


@contextmanager
def prompt_scope() -> Iterator[None]:
    """Calls of a model inside read no prompt but one that is set inside."""
    before = SCOPE.set(replace(SCOPE.get(), prompt=None, takes_prompt=True))
    try:
        yield
    finally:
        SCOPE.reset(before)


def set_prompt(prompt: Prompt | None) -> None:
    """Set the prompt that calls of the innermost `prompt_scope` read; None: its end is not known.

    `generate` finds it out on its way.
    """
    scope = SCOPE.get()
    if scope.takes_prompt:
        SCOPE.set(replace(scope, prompt=prompt))


@contextmanager
def reading(tokens: int) -> Iterator[None]:
    """Calls of a model inside read a prompt of so many tokens in every row."""
    with prompt_scope():
        set_prompt(Prompt(tokens))
        yield


def prompt_of(batch: int) -> Prompt | None:
    """The prompt that a call of so many rows reads; None where its end is not known."""
    prompt = SCOPE.get().prompt
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
