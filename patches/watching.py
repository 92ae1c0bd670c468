"""`watched`: run a model with exact attention, and call a function with each attention call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from cab_hf.batching.hooks import validate_while_batching
from cab_hf.call.call import Call
from cab_hf.call.scope import during_calls
from cab_hf.hf.layers import transformers_model
from cab_hf.patches.switch import copy_configs, restore_settings, switch


@contextmanager
def watched(model: PreTrainedModel, look: Callable[[Call], None]) -> Iterator[None]:
    """Switch a model to exact attention and eval mode in a ``with`` block, and observe its layers.

    After the block, the model has its former attention implementation and mode. Its configs stay
    copies that no other model shares, as after `apply_cab`.

    Args:
        model: a model of transformers, or a PEFT model around one.
        look: function that receives the `Call` of each layer before the layer computes attention.
    """
    inner = transformers_model(model)
    validate_while_batching(inner, "dense attention under observation")
    saved = copy_configs(model)
    training_modules = [module for module in model.modules() if module.training]
    try:
        switch(inner, inner.config.get_text_config(), "cab_dense")
        model.eval()
        with during_calls(model, observer=look):
            yield
    finally:
        restore_settings(saved)
        for module in training_modules:
            module.training = True
