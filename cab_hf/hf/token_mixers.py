"""Layers that mix tokens without attention: convolutions, state spaces and linear attention.

An attention function separates documents and shards. These layers receive only hidden states and
read all tokens before a token. Features that depend on the separation refuse such models.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

from torch import nn
from transformers import PreTrainedModel

from cab_hf.hf.layers import inner_model

# attributes of a cache that layers with a recurrent state use
STATES = frozenset(
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


def refuse_token_mixers(model: nn.Module, why: str) -> None:
    """Refuse a model whose layers mix tokens without attention.

    Args:
        model: a model of transformers, or a wrapper of one.
        why: end of the message: the consequence, and a remedy.

    Raises:
        NotImplementedError: if ``model`` has such layers. The message names their classes.
    """
    kinds = dict.fromkeys(type(module).__name__ for module in token_mixers(model))
    if kinds:
        raise NotImplementedError(
            f"{type(inner_model(model)).__name__} has layers that mix tokens without attention "
            f"({', '.join(kinds)}); {why}"
        )


def token_mixers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that mix tokens without attention, in the language model of a model.

    These are convolutions along the sequence, and layers with their own state in the cache: state
    spaces, recurrent layers and linear attention.
    """
    complete = inner_model(model)
    if complete is None:
        return
    text = complete.config.get_text_config().model_type
    waiting = [model]
    while waiting:
        module = waiting.pop()
        tower = isinstance(module, PreTrainedModel) and module is not complete
        # encoders of images or audio do not process the token sequence
        if tower and module.config.get_text_config().model_type != text:
            continue
        children = list(module.children())
        if any(map(_convolves, children)) or _keeps_state(type(module)):
            yield module
        waiting.extend(reversed(children))


def _convolves(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1


@lru_cache
def _keeps_state(kind: type[nn.Module]) -> bool:
    """Return True if the code of a module uses a name in `STATES`."""
    own = [each for each in kind.__mro__ if issubclass(each, nn.Module) and each is not nn.Module]
    functions = (inspect.unwrap(f) for each in own for f in vars(each).values() if callable(f))
    codes = (f.__code__ for f in functions if inspect.isfunction(f))
    return any(not STATES.isdisjoint(_names(code)) for code in codes)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
