"""`observe_calls`: run a model with exact attention, and pass each `Call` to a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from cab_hf.batching.hooks import validate_switch_while_batching
from cab_hf.call.call import Call
from cab_hf.call.scope import set_context_during_calls
from cab_hf.hf.layers import transformers_model
from cab_hf.patches.switch import copy_configs, restore_settings, switch_implementation


@contextmanager
def observe_calls(model: PreTrainedModel, observer: Callable[[Call], None]) -> Iterator[None]:
    """Switch a model to exact attention and eval mode in a ``with`` block, and observe its layers.

    After the block, the model has its former attention implementation and mode. Its configs stay
    copies that no other model shares, as after `apply_cab`.

    Args:
        model: a model of transformers, or a PEFT model around one.
        observer: function that receives the `Call` of each layer before the layer computes
            attention.
    """
    inner_model = transformers_model(model)
    validate_switch_while_batching(inner_model, "dense attention under observation")
    saved_configs = copy_configs(model)
    training_modules = [module for module in model.modules() if module.training]
    try:
        switch_implementation(inner_model, inner_model.config.get_text_config(), "cab_dense")
        model.eval()
        with set_context_during_calls(model, observer=observer):
            yield
    finally:
        restore_settings(saved_configs)
        for module in training_modules:
            module.training = True
