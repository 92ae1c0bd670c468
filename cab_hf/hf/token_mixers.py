"""Which layers of a model mix tokens without attention; what cannot serve them refuses the model.

Inside an attention function documents and shards of a text are known. A convolution, a state space
or linear attention receives hidden states alone, and reads whatever comes before a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

from torch import nn
from transformers import PreTrainedModel

from cab_hf.hf.layers import inner_model

# what layers call in a cache, or look for there, that keep a state from token to token
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
    """For what is right only where attention alone takes a token to another.

    Args:
        why: what goes wrong with other layers, and what to do.

    Raises:
        NotImplementedError: naming the kinds of layers of ``model`` that mix tokens otherwise.
    """
    kinds = dict.fromkeys(type(module).__name__ for module in token_mixers(model))
    if kinds:
        raise NotImplementedError(
            f"{type(inner_model(model)).__name__} has layers that mix tokens without attention "
            f"({', '.join(kinds)}); {why}"
        )


def token_mixers(model: nn.Module) -> Iterator[nn.Module]:
    """What takes one token to another beside attention, in the text part of a model.

    Convolutions along the text, and layers that keep a state of their own in the cache: state
    spaces, recurrent layers, linear attention.
    """
    complete = inner_model(model)
    if complete is None:
        return
    text = complete.config.get_text_config().model_type
    waiting = [model]
    while waiting:
        module = waiting.pop()
        tower = isinstance(module, PreTrainedModel) and module is not complete
        # an encoder of pictures or sound reads none of the text
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
    """Whether the code of a module speaks of `STATES`."""
    own = [each for each in kind.__mro__ if issubclass(each, nn.Module) and each is not nn.Module]
    functions = (inspect.unwrap(f) for each in own for f in vars(each).values() if callable(f))
    codes = (f.__code__ for f in functions if inspect.isfunction(f))
    return any(not STATES.isdisjoint(_names(code)) for code in codes)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
