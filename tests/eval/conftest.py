"""Fixtures that replace libraries that are not installed."""

import pytest
import torch

from cab_hf.eval.methods import base
from cab_hf.eval.quantised import linear_layers


@pytest.fixture
def halved_for_fp8(monkeypatch):
    """Weights are halved where torchao, on a GPU, would round them to 8 bits."""

    def halve(model):
        for layer in linear_layers(model):
            layer.weight = torch.nn.Parameter(layer.weight.detach() / 2)

    monkeypatch.setattr(base, "to_8_bits", halve)
    monkeypatch.setattr(base, "find_spec", lambda _: True)
