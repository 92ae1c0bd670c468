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
STATE_ATTRIBUTE_SUFFIXES = ("seq_len_cached", "attention_scaling")

# by name of the module: dict from attribute name to value
RotaryState = dict[str, dict[str, Any]]


def get_rotary_state(model: nn.Module) -> RotaryState:
    """Return copies of the state of every rotary embedding of ``model``, by name of the module."""
    state_by_module = {}
    for module_name, module in model.named_modules():
        is_rotary = hasattr(module, "rope_type") or hasattr(module, "max_seq_len_cached")
        if is_rotary and next(module.buffers(), None) is not None:
            # buffers that `state_dict` of torch leaves out
            module_state = {
                attribute: getattr(module, attribute)
                for attribute in module._non_persistent_buffers_set
            }
            module_state |= {
                attribute: value
                for attribute, value in vars(module).items()
                if attribute.endswith(STATE_ATTRIBUTE_SUFFIXES)
            }
            state_by_module[module_name] = {
                attribute: copy.deepcopy(value)
                for attribute, value in module_state.items()
                if value is not None
            }
    return state_by_module


def load_rotary_state(model: nn.Module, rotary_state: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the rotary embeddings of ``model`` to a result of `get_rotary_state`."""
    for module_name, module_state in rotary_state.items():
        module = model.get_submodule(module_name)
        device = next(module.buffers()).device
        for attribute, value in module_state.items():
            # replaced instead of changed in place, because two buffers may be the same tensor
            new_value = value.to(device, copy=True) if isinstance(value, Tensor) else value
            setattr(module, attribute, new_value)
