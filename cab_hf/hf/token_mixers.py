"""Layers that mix tokens without attention: convolutions, state spaces and linear attention.

Such layers receive only hidden states, and mix each token with all tokens before it. Attention
functions cannot separate packed documents or shards of a sequence in such layers. Features that
need the separation therefore refuse models with such layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

from torch import nn
from transformers import PreTrainedModel

from cab_hf.hf.layers import inner_model

# attributes of a cache that layers with a recurrent state read or call
STATE_ATTRIBUTES = frozenset(
    {
        "conv_states",
        "get_linear_cache",
        "recurrent_states",
        "set_linear_cache",
        "ssm_states",
        "update_conv_state",
        "update_recurrent_state",
    }
)


def refuse_token_mixers(model: nn.Module, message_end: str) -> None:
    """Raise an error for a model whose layers mix tokens without attention.

    Args:
        model: a model of transformers, or a wrapper of one.
        message_end: end of the message, with the consequence and a remedy.

    Raises:
        NotImplementedError: if ``model`` has such layers. The message names their classes.
    """
    class_names = dict.fromkeys(type(module).__name__ for module in token_mixers(model))
    if class_names:
        raise NotImplementedError(
            f"{type(inner_model(model)).__name__} has layers that mix tokens without attention "
            f"({', '.join(class_names)}); {message_end}"
        )


def token_mixers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of the language model that mix tokens without attention.

    The layers are convolutions along the sequence, and layers with their own state in the cache:
    state spaces, recurrent layers and linear attention.

    Args:
        model: a model of transformers, or a wrapper of one.
    """
    complete_model = inner_model(model)
    if complete_model is None:
        return
    text_model_type = complete_model.config.get_text_config().model_type
    module_stack = [model]
    while module_stack:
        module = module_stack.pop()
        is_submodel = isinstance(module, PreTrainedModel) and module is not complete_model
        # encoders of images or audio do not process the token sequence
        if is_submodel and module.config.get_text_config().model_type != text_model_type:
            continue
        child_modules = list(module.children())
        if any(map(_is_convolution, child_modules)) or _has_recurrent_state(type(module)):
            yield module
        module_stack.extend(reversed(child_modules))


def _is_convolution(module: nn.Module) -> bool:
    """Return True for a convolution over several tokens."""
    return isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1


@lru_cache
def _has_recurrent_state(module_class: type[nn.Module]) -> bool:
    """Return True if the code of a module class uses a name in `STATE_ATTRIBUTES`."""
    for base_class in module_class.__mro__:
        if not issubclass(base_class, nn.Module) or base_class is nn.Module:
            continue
        for class_function in filter(callable, vars(base_class).values()):
            class_function = inspect.unwrap(class_function)
            if inspect.isfunction(class_function) and not STATE_ATTRIBUTES.isdisjoint(
                _names_in_code(class_function.__code__)
            ):
                return True
    return False


def _names_in_code(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes and globals in compiled code, including nested functions."""
    yield from code.co_names
    for code_constant in code.co_consts:
        if isinstance(code_constant, CodeType):
            yield from _names_in_code(code_constant)
