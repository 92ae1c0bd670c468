"""Exact attention: of one query that a mask or a static cache shows its keys, and its gradients."""

import pytest
import torch
from call_cases import gradients
from decode_cases import require_step_as_by_rows, texts_of_a_step
from tiny import FULL, tiny_model, tokens

import cab_hf
from cab_hf.ops import decode


@pytest.mark.parametrize("family", ["llama", "granite-swa", "llama4", "gemma2"])
def test_full_budget_has_the_gradients_of_dense_attention(family):
    """Of all weights, sinks among them."""
    model, ids = tiny_model(family), tokens(2, 150)
    expected = gradients(model, ids)
    actual = gradients(cab_hf.apply_cab(model, FULL), ids)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("text", texts_of_a_step())
def test_a_step_reads_all_it_may_see(monkeypatch, text):
    monkeypatch.setattr(decode, "has_kernels", lambda *tensors: True)
    require_step_as_by_rows(texts_of_a_step()[text], monkeypatch)


def test_no_kernel_stands_for_a_step_with_gradients(monkeypatch):
    monkeypatch.setattr(decode, "_ops", lambda x: None)
    x = torch.zeros(1, requires_grad=True)
    assert decode.has_kernels(x.detach()) and not decode.has_kernels(x.detach(), x)
    with torch.no_grad():
        assert decode.has_kernels(x)
    monkeypatch.undo()
    assert not decode.has_kernels(x.detach())
