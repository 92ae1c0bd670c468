"""`watched` reports the layers of a model."""

from itertools import product

import pytest
import torch
from tiny import FAMILIES, tiny_model, tokens

from cab_hf.call.scope import FORWARD_CONTEXT
from cab_hf.hf.layers import attention_layers
from cab_hf.patches.watching import watched


def seen_of(model, seen):
    def look(call):
        shapes = (tuple(x.shape) for x in (call.q, call.k, call.v))
        seen.append((call.layer, *shapes, call.scale, call.mask.window))

    return watched(model, look)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_watched_reports_heads_and_window_of_every_layer(family):
    model, seen = tiny_model(family), []
    before = model(tokens(1, 50)).logits
    with seen_of(model, seen):
        torch.testing.assert_close(model(tokens(1, 50)).logits, before, atol=1e-5, rtol=1e-4)
    assert [module for module, *_ in seen] == [m for _, m in attention_layers(model)]
    shapes = (1, 6, 50, 16), (1, 2, 50, 16), (1, 2, 50, 16)
    assert all(each[1:5] == (*shapes, 0.25) for each in seen)
    windows = {"mistral-sliding": [40] * 3, "qwen3-some-sliding": [None, 40, 40]}
    windows |= {"granite-swa": [None, 40, 40], "llama4": [40, 40, None]}
    windows["gemma2"] = [40, None, 40]
    assert [window for *_, window in seen] == windows.get(family, [None] * 3)
    model(tokens(1, 50))
    assert len(seen) == 3 and FORWARD_CONTEXT.get().observer is None
    assert not any(x._forward_pre_hooks or x._forward_hooks for x in model.modules())


@torch.no_grad()
def test_two_watched_models_are_independent():
    models, seen = (tiny_model(), tiny_model("qwen3")), ([], [])
    with seen_of(models[0], seen[0]), seen_of(models[1], seen[1]):
        for model, length in product(models, (40, 60)):
            model(tokens(1, length))
    for model, own in zip(models, seen, strict=True):
        layers = [module for _, module in attention_layers(model)]
        assert [module for module, *_ in own] == layers * 2
