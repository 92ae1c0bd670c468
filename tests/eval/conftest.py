"""Fixtures that replace packages that are not installed."""

import pytest
import torch

from cab_hf.eval.methods import base
from cab_hf.eval.quantised import list_linear_layers


@pytest.fixture
def halve_weights_for_fp8(monkeypatch):
    """Make the method ``fp8`` halve the weights, because torchao and a GPU are missing here."""

    def halve_weights(model):
        for layer in list_linear_layers(model):
            layer.weight = torch.nn.Parameter(layer.weight.detach() / 2)

    monkeypatch.setattr(base, "to_8_bits", halve_weights)
    monkeypatch.setattr(base, "find_spec", lambda _: True)
