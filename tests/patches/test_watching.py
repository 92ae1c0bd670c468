"""`observe_calls` calls a function with the `Call` of every attention layer of a model."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
from tiny import MODEL_FAMILIES, draw_token_ids, make_tiny_model

from cab_hf.call.scope import FORWARD_CONTEXT
from cab_hf.hf.layers import attention_layers
from cab_hf.patches.watching import observe_calls


class ObservedCall(NamedTuple):
    """Fields of one attention call: module, shapes of q, k and v, logit scale, sliding window."""

    layer: torch.nn.Module
    shapes: list[tuple[int, ...]]
    scale: float
    window: int | None


def record_calls(model, observed_calls):
    """Return a context manager that appends every attention call to ``observed_calls``."""

    def append_call(call):
        shapes = [tuple(tensor.shape) for tensor in (call.q, call.k, call.v)]
        observed_calls.append(ObservedCall(call.layer, shapes, call.scale, call.mask.window))

    return observe_calls(model, append_call)


@torch.no_grad()
@pytest.mark.parametrize("model_family", MODEL_FAMILIES)
def test_observed_calls_have_heads_and_window_of_every_layer(model_family):
    model, observed_calls = make_tiny_model(model_family), []
    expected = model(draw_token_ids(1, 50)).logits
    with record_calls(model, observed_calls):
        torch.testing.assert_close(
            model(draw_token_ids(1, 50)).logits, expected, atol=1e-5, rtol=1e-4
        )
    assert [call.layer for call in observed_calls] == [
        module for _, module in attention_layers(model)
    ]
    shapes = [(1, 6, 50, 16), (1, 2, 50, 16), (1, 2, 50, 16)]
    assert all((call.shapes, call.scale) == (shapes, 0.25) for call in observed_calls)
    windows_by_family = {"mistral-sliding": [40] * 3, "qwen3-some-sliding": [None, 40, 40]}
    windows_by_family |= {"granite-swa": [None, 40, 40], "llama4": [40, 40, None]}
    windows_by_family["gemma2"] = [40, None, 40]
    assert [call.window for call in observed_calls] == windows_by_family.get(
        model_family, [None] * 3
    )
    model(draw_token_ids(1, 50))
    assert len(observed_calls) == 3 and FORWARD_CONTEXT.get().observer is None
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_calls_of_two_observed_models_are_recorded_separately():
    observed_models, calls_of_models = (make_tiny_model(), make_tiny_model("qwen3")), ([], [])
    with (
        record_calls(observed_models[0], calls_of_models[0]),
        record_calls(observed_models[1], calls_of_models[1]),
    ):
        for model, num_tokens in product(observed_models, (40, 60)):
            model(draw_token_ids(1, num_tokens))
    for model, calls_of_model in zip(observed_models, calls_of_models, strict=True):
        layer_modules = [module for _, module in attention_layers(model)]
        assert [call.layer for call in calls_of_model] == layer_modules * 2
