"""Exact attention of one query, where a mask or a static cache says what it sees."""

import pytest
import torch
from decode_cases import require_step_as_by_rows, texts_of_a_step

from cab_hf.ops import decode


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
