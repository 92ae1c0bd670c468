"""The state of rotary embeddings that depend on the longest sequence so far, for checkpoints.

An example is ``dynamic`` of transformers, whose frequencies change with the longest sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

# the longest length so far per kind of layer, and the scale of attention
REMEMBERED = ("seq_len_cached", "attention_scaling")

State = dict[str, dict[str, Any]]


def rotary_state(model: nn.Module) -> State:
    """Return copies of the state of every rotary embedding of ``model``, by name."""
    result = {}
    for name, module in model.named_modules():
        rotary = hasattr(module, "rope_type") or hasattr(module, "max_seq_len_cached")
        if rotary and next(module.buffers(), None) is not None:
            # buffers that are in no state dict, and numbers
            own = {x: getattr(module, x) for x in module._non_persistent_buffers_set}
            own |= {x: value for x, value in vars(module).items() if x.endswith(REMEMBERED)}
            result[name] = {x: copy.deepcopy(y) for x, y in own.items() if y is not None}
    return result


def load_rotary_state(model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Set rotary embeddings to the result of `rotary_state`."""
    for name, fields in state.items():
        module = model.get_submodule(name)
        device = next(module.buffers()).device
        for field, value in fields.items():
            # not in place: two buffers may be one tensor
            on_device = value.to(device, copy=True) if isinstance(value, Tensor) else value
            setattr(module, field, on_device)
