"""What rotary embeddings remember of the texts they have seen, which a checkpoint has to hold too.

Some follow the longest text of a call, as transformers' ``dynamic`` does: their frequencies are
then those of the longest one so far.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# the longest length seen, of each kind of layer; and what the frequencies are scaled with
REMEMBERED = ("seq_len_cached", "attention_scaling")

State = dict[str, dict[str, Any]]


def rotary_state(model: nn.Module) -> State:
    """Copies of what every rotary embedding of ``model`` remembers, by its name."""
    modules = {name: module for name, module in model.named_modules() if _remembers(module)}
    return {name: copy.deepcopy(_remembered(module)) for name, module in modules.items()}


def load_rotary_state(model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Let rotary embeddings go on as they were when `rotary_state` looked."""
    modules = dict(model.named_modules())
    for name, fields in state.items():
        module = modules[name]
        device = next(module.buffers()).device
        for field, value in fields.items():
            # not in place: two buffers may be one tensor
            on_device = value.to(device, copy=True) if isinstance(value, Tensor) else value
            setattr(module, field, on_device)


@contextmanager
def rotary_kept(model: nn.Module) -> Iterator[None]:
    """Whatever rotary embeddings see inside, they have forgotten behind it."""
    state = rotary_state(model)
    try:
        yield
    finally:
        load_rotary_state(model, state)


def _remembers(module: nn.Module) -> bool:
    given = hasattr(module, "rope_type") or hasattr(module, "max_seq_len_cached")
    return given and next(module.buffers(), None) is not None


def _remembered(module: nn.Module) -> dict[str, Any]:
    # buffers that no state dict has
    buffers = {name: vars(module)["_buffers"][name] for name in module._non_persistent_buffers_set}
    numbers = {name: x for name, x in vars(module).items() if name.endswith(REMEMBERED)}
    return {name: x for name, x in {**buffers, **numbers}.items() if x is not None}
