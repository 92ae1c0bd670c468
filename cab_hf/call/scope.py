"""`FORWARD_CONTEXT`: the state of a model call that layers do not receive as an argument.

The state contains the prompt that `generate` processes, the ranks of `context_parallel`, and the
observer of `calibrate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn


class PromptProgress:
    """A record whether any call has started after the end of a prompt.

    With a static cache, the position of a call is on the device, so reading the position waits for
    the device. After the first call that starts after the prompt, all later calls do too, and
    `is_prompt_over` does not read their positions.
    """

    def __init__(self) -> None:
        self._is_over = False

    def is_prompt_over(self, q_offset: int | Tensor, prompt_end: int) -> bool:
        """Return True if a call starts after the prompt.

        Waits for the device if ``q_offset`` is a tensor, until the first decode step.

        Args:
            q_offset: slot of the first query, int or 0-d tensor.
            prompt_end: slot of the first token after the prompt.
        """
        self._is_over = self._is_over or int(q_offset) >= prompt_end
        return self._is_over


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt that one or several calls of a model process.

    Attributes:
        end: slot of the first token after the prompt.
        row_lengths: tokens of each batch row, without padding; None if no row has padding.
        progress: record whether any call has started after the end of the prompt.
        start: slot of the first token of the prompt that is not in the cache before the first call.
    """

    end: int
    row_lengths: tuple[int, ...] | None = None
    progress: PromptProgress = field(default_factory=PromptProgress)
    start: int = 0

    @property
    def longest_row_tokens(self) -> int:
        """Number of tokens of the longest row, without padding."""
        return self.end if self.row_lengths is None else max(self.row_lengths)

    def add_tokens(self, num_tokens: int) -> Prompt | None:
        """Return the prompt with ``num_tokens`` more tokens in every row.

        Returns None if ``num_tokens`` is negative and rows have padding. The new lengths are then
        not known, because the removed tokens can be padding.
        """
        if num_tokens == 0:
            return self
        if self.row_lengths is None:
            return Prompt(self.end + num_tokens, start=self.start)
        if num_tokens < 0:
            return None
        row_lengths = tuple(length + num_tokens for length in self.row_lengths)
        return Prompt(self.end + num_tokens, row_lengths, start=self.start)


class Generation:
    """One call of `generate`, with its prompt and the model calls that process this prompt.

    In every decoding mode, `generate` prepares inputs (``prepare_inputs_for_generation``) and then
    calls the model once with these inputs. No user code runs between the two steps. The prompt
    therefore applies to the preparation, which builds the masks of static caches, and to the next
    call of the model. The prompt does not apply to calls of user code, for example in a logits
    processor, a stopping criterion, a streamer or a hook.

    Module hooks mark the call, because hooks work with PEFT, accelerate and compiled functions, and
    torch.compile ignores hooks. A wrapper around ``forward`` would not work in these cases.

    The prompt applies only to layers with a config of the language model. Another model that a hook
    calls inside the forward pass has another config, and so do encoders of a composite model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._prompt: Prompt | None = None
        # configs of the language model
        self._configs: list[Any] = []
        # True between the preparation of inputs and the call of the model
        self._has_inputs = False
        # True while `generate` prepares inputs, and while the model processes these inputs
        self._is_prompt_active = False
        # values of `_is_prompt_active` before each active call of the model
        self._outer_prompt_states: list[bool] = []
        # slot after the last token of the first inputs; None before and after their model call
        self._prepared_end: int | None = None
        # True if the first model call has shown the length of the prompt
        self._has_final_prompt = False
        # handles of the module hooks
        self._hook_handles: list[Any] = []

    def begin_generation(self, prompt: Prompt | None, is_compiled: bool) -> None:
        """Set the prompt, and install the module hooks that mark its model calls.

        Args:
            prompt: prompt of the call; None if its end is not known.
            is_compiled: True if `generate` may compile the model. Hooks are then omitted: they
                would cause recompilation, and `generate` builds all masks while it prepares inputs.
        """
        self._prompt = prompt
        self.end_generation()
        if prompt is None:
            return
        text_config = self._model.config.get_text_config()
        submodule_configs = [vars(module).get("config") for module in self._model.modules()]
        # composite models copy the config of their language model
        text_configs = {
            id(config): config for config in submodule_configs if type(config) is type(text_config)
        }
        self._configs = [text_config, *text_configs.values()]
        if not is_compiled:
            enter_handle = self._model.register_forward_pre_hook(self._enter_forward)
            leave_handle = self._model.register_forward_hook(self._leave_forward, always_call=True)
            self._hook_handles = [enter_handle, leave_handle]

    def end_generation(self) -> None:
        """Remove the hooks that `begin_generation` has installed."""
        for hook_handle in self._hook_handles:
            hook_handle.remove()
        self._hook_handles = []

    def prepare_inputs(self, model: nn.Module, make_inputs: Callable[[], Any]) -> Any:
        """Return the inputs of the next model call, and apply the prompt to this call.

        Args:
            model: model whose inputs `generate` prepares. The inputs of other models, such as
                assistant models, are prepared without the prompt.
            make_inputs: function that prepares and returns the inputs.
        """
        if model is not self._model or self._prompt is None:
            return make_inputs()
        was_prompt_active, self._is_prompt_active = self._is_prompt_active, True
        try:
            model_inputs = make_inputs()
        finally:
            self._is_prompt_active = was_prompt_active
        self._has_inputs = True
        if not self._has_final_prompt:
            self._prepared_end = _find_end_of_inputs(model_inputs)
        return model_inputs

    def forget_inputs(self) -> None:
        """Record that the model has processed its inputs.

        This method replaces the module hooks in a compiled model.
        """
        self._has_inputs = False

    def current_prompt(self, config: Any, call_end_slot: int | None) -> Prompt | None:
        """Return the prompt that layers with ``config`` process in the current call.

        Inputs can become longer after `generate` has prepared them: PEFT adds virtual tokens, and
        some models replace a placeholder with several tokens. The first model call shows the number
        of additional tokens.

        Args:
            config: config of the layers.
            call_end_slot: slot after the last token of the call; None if only the device has the
                slot.

        Returns:
            The prompt. None for calls of user code, and if the end of the prompt is not known.
        """
        is_language_model = any(config is text_config for text_config in self._configs)
        if not self._is_prompt_active or not is_language_model:
            return None
        if call_end_slot is not None and self._prepared_end is not None:
            self._prompt = self._prompt.add_tokens(call_end_slot - self._prepared_end)
            self._prepared_end, self._has_final_prompt = None, True
        return self._prompt

    def _enter_forward(self, *_: Any) -> None:
        """Apply the prompt to this model call if `generate` has prepared its inputs."""
        if torch.compiler.is_compiling() or FORWARD_CONTEXT.get().generation is not self:
            return
        self._outer_prompt_states.append(self._is_prompt_active)
        self._is_prompt_active, self._has_inputs = self._has_inputs, False

    def _leave_forward(self, *_: Any) -> None:
        """Restore the state before this model call."""
        if torch.compiler.is_compiling() or FORWARD_CONTEXT.get().generation is not self:
            return
        # empty if an earlier hook failed, so that `_enter_forward` did not run
        if self._outer_prompt_states:
            self._is_prompt_active = self._outer_prompt_states.pop()


def _find_end_of_inputs(model_inputs: Any) -> int | None:
    """Return the slot after the last token of the inputs of a model; None if not known."""
    input_ids = model_inputs.get("input_ids")
    input_tokens = model_inputs.get("inputs_embeds") if input_ids is None else input_ids
    cache = model_inputs.get("cache", model_inputs.get("past_key_values"))
    # the counter of a static cache is on the device
    if input_tokens is None or getattr(cache, "is_compileable", False):
        return None
    return input_tokens.shape[1] + (0 if cache is None else int(cache.get_seq_length()))


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """The state of a model call that layers do not receive as an argument.

    The mask hook reads the state once per forward pass. Layers read the state from the mask,
    because gradient checkpointing recomputes layers in another thread, where the state is empty.

    Attributes:
        prompt: prompt of `set_prompt`, which all model calls process; None outside of `set_prompt`,
            and inside `generate`.
        generation: active call of `generate`; None outside of `generate`, and in user code that
            `generate` calls.
        parallel_settings: `ParallelSettings` of the ranks that share the sequence; None with one
            process.
        observer: function that receives each `Call` before its computation, or None.
        module: module whose call has set this context; None if no module call has set the context.
        outer_context: context before the call of ``module``; None without ``module``.
    """

    prompt: Prompt | None = None
    generation: Generation | None = None
    parallel_settings: Any = None
    observer: Callable[[Any], None] | None = None
    module: nn.Module | None = None
    outer_context: ForwardContext | None = None


EMPTY_FORWARD_CONTEXT = ForwardContext()
FORWARD_CONTEXT: ContextVar[ForwardContext] = ContextVar(
    "state of a model call", default=EMPTY_FORWARD_CONTEXT
)
# configs of models inside `context_parallel`; a list, because torch.compile reads no ContextVar
SHARDED_CONFIGS: list[Any] = []


@contextmanager
def set_context_during_calls(model: nn.Module, **context_fields: Any) -> Iterator[None]:
    """Set fields of `FORWARD_CONTEXT` during each call of a model, while the context is active.

    Args:
        model: model to call. The fields are also set during calls of submodules with a ``config``.
        context_fields: fields of `ForwardContext`, by name.
    """

    def enter_module(module: nn.Module, *_: Any) -> None:
        refuse_compiled_model()
        outer_context = FORWARD_CONTEXT.get()
        FORWARD_CONTEXT.set(
            replace(outer_context, **context_fields, module=module, outer_context=outer_context)
        )

    def leave_module(module: nn.Module, *_: Any) -> None:
        # another module if an earlier hook failed, so that `enter_module` did not run
        if FORWARD_CONTEXT.get().module is module:
            FORWARD_CONTEXT.set(FORWARD_CONTEXT.get().outer_context)

    hook_handles = []
    for module in model.modules():
        if module is model or hasattr(module, "config"):
            hook_handles.append(module.register_forward_pre_hook(enter_module))
            hook_handles.append(module.register_forward_hook(leave_module, always_call=True))
    try:
        yield
    finally:
        for hook_handle in hook_handles:
            hook_handle.remove()


def is_sharded(config: Any) -> bool:
    """Return True if the model with this config object is inside `context_parallel`."""
    return any(config is sharded_config for sharded_config in SHARDED_CONFIGS)


def refuse_compiled_model(config: Any = None) -> None:
    """Raise an error in a compiled model.

    Args:
        config: config of the layers; models outside of `context_parallel` are then accepted. None
            to accept no compiled model.

    Raises:
        NotImplementedError: if torch.compile traces the call.
    """
    if torch.compiler.is_compiling() and (config is None or is_sharded(config)):
        raise NotImplementedError(
            "the model is compiled, and torch.compile does not trace the state that "
            "context_parallel and calibrate set. Leave out torch.compile for these functions."
        )


class _TracedPositions:
    """Position ids of the next mask under torch.compile, which traces no ContextVar."""

    position_ids: Tensor | None = None


# an instance, because torch 2.11 does not trace assignments to attributes of a class
_TRACED_POSITIONS = _TracedPositions()

_RECORDED_POSITION_IDS: ContextVar[Tensor | None] = ContextVar(
    "position ids of the next mask", default=None
)


def record_positions(position_ids: Tensor | None) -> None:
    """Record the position ids of the next mask that transformers builds."""
    if torch.compiler.is_compiling():
        _TRACED_POSITIONS.position_ids = position_ids
    else:
        _RECORDED_POSITION_IDS.set(position_ids)


def take_recorded_positions() -> Tensor | None:
    """Return the recorded position ids of this mask, and remove the record."""
    if torch.compiler.is_compiling():
        position_ids, _TRACED_POSITIONS.position_ids = _TRACED_POSITIONS.position_ids, None
        return position_ids
    position_ids = _RECORDED_POSITION_IDS.get()
    if position_ids is not None:
        _RECORDED_POSITION_IDS.set(None)
    return position_ids


@contextmanager
def set_generation(model: nn.Module) -> Iterator[None]:
    """Set a new `Generation` in `FORWARD_CONTEXT` for the call of `generate` inside the context."""
    generation = Generation(model)
    reset_token = FORWARD_CONTEXT.set(
        replace(FORWARD_CONTEXT.get(), prompt=None, generation=generation)
    )
    try:
        yield
    finally:
        generation.end_generation()
        FORWARD_CONTEXT.reset(reset_token)


@contextmanager
def hide_prompt() -> Iterator[None]:
    """Hide the prompt of `generate` from model calls inside the context, which user code makes."""
    reset_token = FORWARD_CONTEXT.set(replace(FORWARD_CONTEXT.get(), prompt=None, generation=None))
    try:
        yield
    finally:
        FORWARD_CONTEXT.reset(reset_token)


@contextmanager
def set_prompt(num_tokens: int, num_cached_tokens: int = 0) -> Iterator[None]:
    """Set a prompt without padding for model calls inside the context.

    Args:
        num_tokens: tokens of the prompt per row, including tokens in the cache.
        num_cached_tokens: number of tokens that are in the cache before the first call.
    """
    prompt = Prompt(num_tokens, start=num_cached_tokens)
    reset_token = FORWARD_CONTEXT.set(
        replace(FORWARD_CONTEXT.get(), prompt=prompt, generation=None)
    )
    try:
        yield
    finally:
        FORWARD_CONTEXT.reset(reset_token)


def current_prompt(batch: int, config: Any, call_end_slot: int | None) -> Prompt | None:
    """Return the prompt that a call processes; None if its end is not known.

    Args:
        batch: batch rows.
        config: config of the layers.
        call_end_slot: slot after the last token of the call; None if only the device has the slot.
    """
    forward_context = FORWARD_CONTEXT.get()
    prompt = forward_context.prompt
    if forward_context.generation is not None:
        prompt = forward_context.generation.current_prompt(config, call_end_slot)
    if prompt is None or (prompt.row_lengths is not None and len(prompt.row_lengths) != batch):
        return None
    return prompt


def prompt_of_generate(generation_config: Any, model_kwargs: dict[str, Any]) -> Prompt | None:
    """Return the prompt of a call of `generate`; None if its end is not known.

    Args:
        generation_config: generation config of the call.
        model_kwargs: arguments of the model, by name.
    """
    if getattr(generation_config, "is_assistant", False):
        # the input of an assistant model also contains tokens of the answer
        return None
    num_cached_tokens = _count_cached_tokens(model_kwargs.get("past_key_values"))
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is None:
        # a mask without padding is omitted
        prompt_end = getattr(generation_config, "_mask_length", None)
        return None if prompt_end is None else Prompt(prompt_end, start=num_cached_tokens)
    if attention_mask.ndim != 2:
        return None
    row_lengths = tuple(attention_mask.bool().sum(-1).tolist())
    has_padding = set(row_lengths) != {attention_mask.shape[1]}
    return Prompt(
        attention_mask.shape[1], row_lengths if has_padding else None, start=num_cached_tokens
    )


def _count_cached_tokens(cache: Any) -> int:
    """Return the number of tokens in a cache; 0 if only the device has the number."""
    num_tokens = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
    return num_tokens if isinstance(num_tokens, int) else 0
