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
        end: slot of the first token after the prompt.
        lengths: tokens of each batch row, without padding; None where no row has padding.
        read: whether a call has been seen that begins after the prompt.
    """

    end: int
    lengths: tuple[int, ...] | None = None
    read: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.end if self.lengths is None else max(self.lengths)

    def longer_by(self, tokens: int) -> Prompt | None:
        """Return the prompt with ``tokens`` more in every row.

        Returns None for fewer tokens in padded rows: padding or text may be missing then.
        """
        if tokens == 0:
            return self
        if self.lengths is None:
            return Prompt(self.end + tokens)
        if tokens < 0:
            return None
        return Prompt(self.end + tokens, tuple(length + tokens for length in self.lengths))


class Generation:
    """One call of `generate`, its prompt, and the calls of the model that read this prompt.

    `generate` calls its model in two steps, in every mode of decoding: it prepares inputs
    (``prepare_inputs_for_generation``) and calls the model once with these inputs. No code of the
    user runs between the two steps. The prompt therefore belongs to the preparation, which makes
    the masks of static caches, and to the next call of the model. Every other call is foreign: that
    of a logits processor, a stopping criterion, a streamer or a hook, of this model or of another.
    Module hooks mark the call instead of a wrapper around ``forward``: they follow the model
    through PEFT, accelerate and compiled functions, and torch.compile traces them as nothing.

    A mask asks for the prompt by the config of its layers: another model that a module hook calls
    inside the forward pass has a config of its own, and so have the encoders of a composite model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._prompt: Prompt | None = None
        self._configs: list[Any] = []
        # inputs are prepared, and the model was not called since
        self._is_prepared = False
        # the model reads prepared inputs, or they are being prepared
        self._is_reading = False
        # `_is_reading` around the calls of the model that have not returned
        self._outer: list[bool] = []
        # slot after the first call's last token, as prepared; None before and after that call
        self._prepared_end: int | None = None
        self._is_measured = False
        self._handles: list[Any] = []

    def begin(self, prompt: Prompt | None, is_compiled: bool) -> None:
        """Set the prompt, or None where its end is not known.

        Args:
            is_compiled: whether `generate` may compile the model. All masks are then made while
                inputs are prepared, and new hooks would have the model compiled again.
        """
        self._prompt = prompt
        self.end()
        if prompt is None:
            return
        text = self._model.config.get_text_config()
        found = [vars(module).get("config") for module in self._model.modules()]
        # composite models copy the config of their language model
        alike = {id(config): config for config in found if type(config) is type(text)}
        self._configs = [text, *alike.values()]
        if not is_compiled:
            enter = self._model.register_forward_pre_hook(self._enter)
            leave = self._model.register_forward_hook(self._leave, always_call=True)
            self._handles = [enter, leave]

    def end(self) -> None:
        """Remove the hooks of `begin`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def prepare(self, model: nn.Module, make: Callable[[], Any]) -> Any:
        """Return the inputs of the next call, which ``make`` prepares for ``model``."""
        if model is not self._model or self._prompt is None:
            return make()
        before, self._is_reading = self._is_reading, True
        try:
            inputs = make()
        finally:
            self._is_reading = before
        self._is_prepared = True
        if not self._is_measured:
            self._prepared_end = _end_of(inputs)
        return inputs

    def forget_inputs(self) -> None:
        """Take the prepared inputs as read: a compiled model runs no hooks."""
        self._is_prepared = False

    def prompt_of(self, config: Any, end: int | None) -> Prompt | None:
        """Return the prompt that the layers under ``config`` read in the current call.

        PEFT, and models that replace placeholders by several tokens, lengthen inputs after
        `generate` has prepared them. The first call shows by how much.

        Args:
            end: slot after the last token of the call; None where only the device knows it.

        Returns:
            None for a foreign call, and where the end of the prompt is not known.
        """
        if not self._is_reading or not any(config is each for each in self._configs):
            return None
        if end is not None and self._prepared_end is not None:
            self._prompt = self._prompt.longer_by(end - self._prepared_end)
            self._prepared_end, self._is_measured = None, True
        return self._prompt

    def _enter(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or SCOPE.get().generation is not self:
            return
        self._outer.append(self._is_reading)
        self._is_reading, self._is_prepared = self._is_prepared, False

    def _leave(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or SCOPE.get().generation is not self:
            return
        # a hook before `_enter` may have failed
        if self._outer:
            self._is_reading = self._outer.pop()


def _end_of(inputs: Any) -> int | None:
    """Return the slot after the last token that inputs of a model hold; None if not known."""
    ids = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if ids is None else ids
    cache = inputs.get("cache", inputs.get("past_key_values"))
    # the counter of a static cache is on the device
    if tokens is None or getattr(cache, "is_compileable", False):
        return None
    return tokens.shape[1] + (0 if cache is None else int(cache.get_seq_length()))


@dataclass(frozen=True, eq=False)
class Scope:
    """What calls of a model find set around them; layers have it from the mask of a forward pass.

    Those that gradient checkpointing computes again, in another thread, find nothing here.

    Attributes:
        prompt: the prompt that all calls read; None where they read none, or `generate` sets it.
        generation: the call of `generate` that runs; None outside, and in foreign code inside.
        parallel: the `Parallel` of the ranks that hold the text; None where one process does.
        observer: sees each `Call` before it is computed; None for none.
        module: whose call has set this, and
        outer: what was set before it.
    """

    prompt: Prompt | None = None
    generation: Generation | None = None
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
def generating(model: nn.Module) -> Iterator[None]:
    """Run a call of `generate` inside: it reads a prompt of its own, and none from outside."""
    generation = Generation(model)
    before = SCOPE.set(replace(SCOPE.get(), prompt=None, generation=generation))
    try:
        yield
    finally:
        generation.end()
        SCOPE.reset(before)


@contextmanager
def foreign() -> Iterator[None]:
    """Run code of the user inside, whose calls of a model read no prompt of `generate`."""
    before = SCOPE.set(replace(SCOPE.get(), prompt=None, generation=None))
    try:
        yield
    finally:
        SCOPE.reset(before)


@contextmanager
def reading(tokens: int) -> Iterator[None]:
    """Have calls of a model inside read a prompt of ``tokens`` tokens in every row."""
    before = SCOPE.set(replace(SCOPE.get(), prompt=Prompt(tokens), generation=None))
    try:
        yield
    finally:
        SCOPE.reset(before)


def prompt_of(batch: int, config: Any, end: int | None) -> Prompt | None:
    """Return the prompt that a call reads; None where its end is not known.

    Args:
        batch: rows of the call.
        config: that of the layers.
        end: slot after the last token of the call; None where only the device knows it.
    """
    scope = SCOPE.get()
    prompt = scope.prompt
    if scope.generation is not None:
        prompt = scope.generation.prompt_of(config, end)
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
