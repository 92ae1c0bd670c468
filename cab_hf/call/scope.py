"""`FORWARD_CONTEXT`: the state around a model call that is not an argument of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn


class PromptProgress:
    """A cache of the answer to the question if calls have started after a prompt.

    The position of a call in a static cache is on the device. Once a call has started after the
    prompt, all later calls do, and need not wait for the device.
    """

    def __init__(self) -> None:
        self._is_over = False

    def is_over(self, q_offset: int | Tensor, end: int) -> bool:
        """Return True if a call with the first slot ``q_offset`` starts after a prompt's ``end``.

        Waits for the device if ``q_offset`` is a tensor, until the first decode step.
        """
        self._is_over = self._is_over or int(q_offset) >= end
        return self._is_over


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt that the calls of a model read, at once or in chunks.

    Attributes:
        end: slot of the first token after the prompt.
        lengths: tokens of each batch row, without padding; None where no row has padding.
    progress: cache whose length shows if calls have started after the prompt.
    start: slot of the first token of the prompt that is not in the cache before the first call.
    """

    end: int
    lengths: tuple[int, ...] | None = None
    progress: PromptProgress = field(default_factory=PromptProgress)
    start: int = 0

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row."""
        return self.end if self.lengths is None else max(self.lengths)

    def longer_by(self, tokens: int) -> Prompt | None:
        """Return the prompt with ``tokens`` more tokens in every row.

        Returns None for fewer tokens in padded rows: padding or real tokens may be missing.
        """
        if tokens == 0:
            return self
        if self.lengths is None:
            return Prompt(self.end + tokens, start=self.start)
        if tokens < 0:
            return None
        lengths = tuple(length + tokens for length in self.lengths)
        return Prompt(self.end + tokens, lengths, start=self.start)


class Generation:
    """One call of `generate`, its prompt, and the calls of the model that read this prompt.

    In every decoding mode, `generate` prepares inputs (``prepare_inputs_for_generation``) and then
    calls the model once with these inputs. No user code runs between the two steps. The prompt
    therefore applies to the preparation, which builds the masks of static caches, and to the next
    call of the model. All other calls are foreign, for example in a logits processor, a stopping
    criterion, a streamer or a hook. Module hooks mark the call, not a wrapper around ``forward``:
    hooks work with PEFT, accelerate and compiled functions, and torch.compile ignores them.

    A mask finds its prompt through the config of its layers. Another model that a hook calls inside
    the forward pass has another config. Encoders of a composite model also have other configs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._prompt: Prompt | None = None
        self._configs: list[Any] = []
        # True between the preparation of inputs and the call of the model
        self._is_prepared = False
        # True while inputs are prepared, and while the model processes them
        self._is_reading = False
        # values of `_is_reading` outside the active calls of the model
        self._outer: list[bool] = []
        # slot after the last token of the first prepared inputs; None before and after that call
        self._prepared_end: int | None = None
        self._is_measured = False
        self._handles: list[Any] = []

    def begin(self, prompt: Prompt | None, is_compiled: bool) -> None:
        """Set the prompt.

        Args:
            prompt: prompt of the call; None if its end is not known.
            is_compiled: True if `generate` may compile the model. All masks are then built while
                inputs are prepared, and new hooks would cause recompilation.
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
        """Return the inputs that ``make`` prepares for the next call of ``model``."""
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
        """Mark prepared inputs as processed, because a compiled model runs no hooks."""
        self._is_prepared = False

    def prompt_of(self, config: Any, end: int | None) -> Prompt | None:
        """Return the prompt that layers with ``config`` process in the current call.

        PEFT, and models that replace placeholders with several tokens, lengthen inputs after
        `generate` has prepared them. The first call shows the number of additional tokens.

        Args:
            config: config of the layers.
            end: slot after the last token of the call; None if it is only on the device.

        Returns:
            The prompt, or None for a foreign call and if the end of the prompt is not known.
        """
        if not self._is_reading or not any(config is each for each in self._configs):
            return None
        if end is not None and self._prepared_end is not None:
            self._prompt = self._prompt.longer_by(end - self._prepared_end)
            self._prepared_end, self._is_measured = None, True
        return self._prompt

    def _enter(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or FORWARD_CONTEXT.get().generation is not self:
            return
        self._outer.append(self._is_reading)
        self._is_reading, self._is_prepared = self._is_prepared, False

    def _leave(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or FORWARD_CONTEXT.get().generation is not self:
            return
        # empty if a hook before `_enter` failed
        if self._outer:
            self._is_reading = self._outer.pop()


def _end_of(inputs: Any) -> int | None:
    """Return the slot after the last token in the inputs of a model; None if not known."""
    ids = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if ids is None else ids
    cache = inputs.get("cache", inputs.get("past_key_values"))
    # the counter of a static cache is on the device
    if tokens is None or getattr(cache, "is_compileable", False):
        return None
    return tokens.shape[1] + (0 if cache is None else int(cache.get_seq_length()))


@dataclass(frozen=True, eq=False)
class Scope:
    """The state around a model call, which layers read through the mask of the forward pass.

    Gradient checkpointing recomputes layers in another thread, where the state is empty.

    Attributes:
        prompt: prompt that all calls process; None if there is none, or if `generate` sets it.
        generation: active call of `generate`; None outside, and in user code inside.
        parallel: `Parallel` of the ranks that share the sequence; None with one process.
        observer: function that receives each `Call` before its computation, or None.
        module: module whose call has set this scope, or None.
        outer: scope outside the call of ``module``, or None.
    """

    prompt: Prompt | None = None
    generation: Generation | None = None
    parallel: Any = None
    observer: Callable[[Any], None] | None = None
    module: nn.Module | None = None
    outer: Scope | None = None


EMPTY = Scope()
FORWARD_CONTEXT: ContextVar[Scope] = ContextVar("state around a model call", default=EMPTY)
# configs of models inside `context_parallel`; torch.compile can read a list, but no ContextVar
SHARDED: list[Any] = []


@contextmanager
def during_calls(model: nn.Module, **fields: Any) -> Iterator[None]:
    """Set ``fields`` of `FORWARD_CONTEXT` during calls of ``model`` and its parts with a config."""

    def enter(module: nn.Module, *_: Any) -> None:
        validate_compiled()
        outer = FORWARD_CONTEXT.get()
        FORWARD_CONTEXT.set(replace(outer, **fields, module=module, outer=outer))

    def leave(module: nn.Module, *_: Any) -> None:
        # another module if a hook before `enter` failed
        if FORWARD_CONTEXT.get().module is module:
            FORWARD_CONTEXT.set(FORWARD_CONTEXT.get().outer)

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
    """Return True if the model with this config object is inside `context_parallel`."""
    return any(config is each for each in SHARDED)


def validate_compiled(config: Any = None) -> None:
    """Raise NotImplementedError in a compiled model; with a config, only if it is sharded."""
    if torch.compiler.is_compiling() and (config is None or is_sharded(config)):
        raise NotImplementedError(
            "the model is compiled, and torch.compile does not trace the state that "
            "context_parallel and calibrate set. Leave out torch.compile there."
        )


class _TracedMask:
    """Position ids of the mask that is traced, because torch.compile traces no ContextVar."""

    position_ids: Tensor | None = None


# an instance: torch 2.11 does not trace assignments to attributes of a class
_TRACED_MASK = _TracedMask()

_POSITIONS: ContextVar[Tensor | None] = ContextVar("position ids of the next mask", default=None)


def record_positions(position_ids: Tensor | None) -> None:
    """Record the position ids of the mask that transformers builds next."""
    if torch.compiler.is_compiling():
        _TRACED_MASK.position_ids = position_ids
    else:
        _POSITIONS.set(position_ids)


def recorded_positions() -> Tensor | None:
    """Return the recorded position ids of this mask, and remove them."""
    if torch.compiler.is_compiling():
        position_ids, _TRACED_MASK.position_ids = _TRACED_MASK.position_ids, None
        return position_ids
    position_ids = _POSITIONS.get()
    if position_ids is not None:
        _POSITIONS.set(None)
    return position_ids


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Run a call of `generate` inside the context, with its own prompt."""
    generation = Generation(model)
    before = FORWARD_CONTEXT.set(replace(FORWARD_CONTEXT.get(), prompt=None, generation=generation))
    try:
        yield
    finally:
        generation.end()
        FORWARD_CONTEXT.reset(before)


@contextmanager
def foreign() -> Iterator[None]:
    """Run user code inside the context, whose model calls have no prompt of `generate`."""
    before = FORWARD_CONTEXT.set(replace(FORWARD_CONTEXT.get(), prompt=None, generation=None))
    try:
        yield
    finally:
        FORWARD_CONTEXT.reset(before)


@contextmanager
def reading(tokens: int, start: int = 0) -> Iterator[None]:
    """Set a prompt of ``tokens`` tokens per row for model calls inside the context.

    Args:
        tokens: tokens of the prompt, including tokens in the cache.
        start: number of tokens that are in the cache before the first call.
    """
    prompt = Prompt(tokens, start=start)
    before = FORWARD_CONTEXT.set(replace(FORWARD_CONTEXT.get(), prompt=prompt, generation=None))
    try:
        yield
    finally:
        FORWARD_CONTEXT.reset(before)


def prompt_of(batch: int, config: Any, end: int | None) -> Prompt | None:
    """Return the prompt that a call processes; None if its end is not known.

    Args:
        batch: batch rows.
        config: config of the layers.
        end: slot after the last token of the call; None if it is only on the device.
    """
    scope = FORWARD_CONTEXT.get()
    prompt = scope.prompt
    if scope.generation is not None:
        prompt = scope.generation.prompt_of(config, end)
    if prompt is None or (prompt.lengths is not None and len(prompt.lengths) != batch):
        return None
    return prompt


def prompt_given(settings: Any, model_kwargs: dict[str, Any]) -> Prompt | None:
    """Return the prompt of a call of `generate`; None if not known.

    The input of an assistant model continues after the prompt, so its end is not known.

    Args:
        settings: generation config of the call.
        model_kwargs: arguments of the model.
    """
    if getattr(settings, "is_assistant", False):
        return None
    start = _cached_tokens(model_kwargs.get("past_key_values"))
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        # a mask without padding is omitted
        end = getattr(settings, "_mask_length", None)
        return None if end is None else Prompt(end, start=start)
    if mask.ndim != 2:
        return None
    lengths = tuple(mask.bool().sum(-1).tolist())
    has_padding = set(lengths) != {mask.shape[1]}
    return Prompt(mask.shape[1], lengths if has_padding else None, start=start)


def _cached_tokens(cache: Any) -> int:
    """Return the number of tokens in a cache; 0 if only the device has this number."""
    tokens = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
    return tokens if isinstance(tokens, int) else 0
