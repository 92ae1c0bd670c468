"""`watched`: observe the attention calls of a model while all layers use exact attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from cab_hf.batching.hooks import validate_while_batching
from cab_hf.call.call import Call
from cab_hf.call.scope import during_calls
from cab_hf.hf.layers import transformers_model
from cab_hf.patches.switch import own_configs, put_back, switch


@contextmanager
def watched(model: PreTrainedModel, look: Callable[[Call], None]) -> Iterator[None]:
    """Use exact attention in ``model``, and pass the call of each layer to ``look`` before it runs.

    The model is in eval mode inside the block. Afterwards it keeps its own copies of its configs,
    as after `apply_cab`.
    """
    inner = transformers_model(model)
    validate_while_batching(inner, "dense attention under observation")
    saved = own_configs(model)
    training = [module for module in model.modules() if module.training]
    try:
        switch(inner, inner.config.get_text_config(), "cab_dense")
        model.eval()
        with during_calls(model, observer=look):
            yield
    finally:
        put_back(saved)
        for module in training:
            module.training = True
