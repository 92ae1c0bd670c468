"""The state of rotary embeddings that follow the longest text, which a checkpoint must hold.

The frequencies of transformers' ``dynamic``, for example, are those of the longest text so far.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

# the longest length seen, of each kind of layer; and what the frequencies are scaled with
REMEMBERED = ("seq_len_cached", "attention_scaling")

State = dict[str, dict[str, Any]]


def rotary_state(model: nn.Module) -> State:
    """Copies of the state of every rotary embedding of ``model``, by its name."""
    result = {}
    for name, module in model.named_modules():
        rotary = hasattr(module, "rope_type") or hasattr(module, "max_seq_len_cached")
        if rotary and next(module.buffers(), None) is not None:
            # buffers that no state dict has, and numbers
            own = {x: getattr(module, x) for x in module._non_persistent_buffers_set}
            own |= {x: value for x, value in vars(module).items() if x.endswith(REMEMBERED)}
            result[name] = {x: copy.deepcopy(y) for x, y in own.items() if y is not None}
    return result


def load_rotary_state(model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Set rotary embeddings to what `rotary_state` returned."""
    for name, fields in state.items():
        module = model.get_submodule(name)
        device = next(module.buffers()).device
        for field, value in fields.items():
            # not in place: two buffers may be one tensor
            on_device = value.to(device, copy=True) if isinstance(value, Tensor) else value
            setattr(module, field, on_device)
