"""Save and load the state of rotary embeddings.

The state may depend on earlier forward passes. For example, the frequencies of the RoPE type
``dynamic`` of transformers change with the longest sequence so far.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

# suffixes of attribute names: longest length so far, and the factor of cosines and sines
STATE_SUFFIXES = ("seq_len_cached", "attention_scaling")

# by name of the module: dict from attribute name to value
State = dict[str, dict[str, Any]]


def rotary_state(model: nn.Module) -> State:
    """Return copies of the state of every rotary embedding of ``model``, by name of the module."""
    result = {}
    for name, module in model.named_modules():
        is_rotary = hasattr(module, "rope_type") or hasattr(module, "max_seq_len_cached")
        if is_rotary and next(module.buffers(), None) is not None:
            # buffers that `state_dict` of torch leaves out
            state = {x: getattr(module, x) for x in module._non_persistent_buffers_set}
            state |= {x: value for x, value in vars(module).items() if x.endswith(STATE_SUFFIXES)}
            result[name] = {x: copy.deepcopy(y) for x, y in state.items() if y is not None}
    return result


def load_rotary_state(model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the rotary embeddings of ``model`` to a result of `rotary_state`."""
    for name, fields in state.items():
        module = model.get_submodule(name)
        device = next(module.buffers()).device
        for field, value in fields.items():
            # replaced instead of changed in place, because two buffers may be the same tensor
            new_value = value.to(device, copy=True) if isinstance(value, Tensor) else value
            setattr(module, field, new_value)
