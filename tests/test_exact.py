"""Exact attention by "cab_dense" and "cab": decode steps, sliding windows and gradients."""

from dataclasses import replace

import pytest
import torch
from call_cases import gradients
from decode_cases import masks_of_a_step, require_dense_step_equals_sdpa
from tiny import FULL, qkv, tiny_model, tokens

import cab_hf
from cab_hf import CabConfig
from cab_hf.call.call import Call
from cab_hf.call.mask import MaskDetails, MaskInfo
from cab_hf.dispatch import dense_blockwise, dense_masked
from cab_hf.engines import REFERENCE
from cab_hf.ops import Workload, decode


@pytest.mark.parametrize("family", ["llama", "granite-swa", "llama4", "gemma2"])
def test_full_budget_has_the_gradients_of_dense_attention(family):
    """Compare the gradients of all parameters, including attention sinks."""
    model, ids = tiny_model(family), tokens(2, 150)
    expected = gradients(model, ids)
    actual = gradients(cab_hf.apply_cab(model, FULL), ids)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", masks_of_a_step())
def test_dense_step_matches_rowwise_attention(monkeypatch, name):
    monkeypatch.setattr(decode, "has_kernels", lambda *tensors: True)
    require_dense_step_equals_sdpa(masks_of_a_step()[name], monkeypatch)


def test_dense_step_with_gradients_uses_no_kernel(monkeypatch):
    monkeypatch.setattr(decode, "_implementation", lambda x: None)
    x = torch.zeros(1, requires_grad=True)
    assert decode.has_kernels(x.detach()) and not decode.has_kernels(x.detach(), x)
    with torch.no_grad():
        assert decode.has_kernels(x)
    monkeypatch.undo()
    assert not decode.has_kernels(x.detach())


def windowed(**fields):
    """Return a `MaskInfo` of two rows: 90 queries after 30 cached keys, with a window of 40."""
    return MaskInfo(2, 90, 120, 30, window=40, **fields)


PADDED = torch.arange(120) >= torch.tensor([[50], [0]])
# padding inside rows, as between the turns of a chat
HOLES = (torch.arange(120) % 37 > 9).expand(2, -1)
WINDOWED = {
    "chunk": windowed(),
    "left": windowed(padding_mask=PADDED),
    "holes": windowed(padding_mask=HOLES),
    "live-slot": replace(
        windowed(),
        kv_length=None,
        q_offset=torch.tensor(30),
        details=MaskDetails(cache_length=120),
    ),
    "packed": MaskInfo(
        2,
        120,
        120,
        0,
        window=40,
        doc_ids=(torch.arange(120) // 47).expand(2, -1),
        padding_mask=HOLES,
    ),
}


@pytest.mark.parametrize("mask", WINDOWED.values(), ids=WINDOWED)
def test_blockwise_window_matches_rowwise_window(mask):
    """`dense_blockwise` removes padding first, and must apply the window to the same keys."""
    q, k, v = qkv(2, q_length=mask.q_length, kv_length=120)
    work = Workload.of(q, k, v, (128, 128))
    call = Call(
        q=q, k=k, v=v, scale=0.2, layer=None, config=CabConfig(), sparse=False, work=work, mask=mask
    )
    expected, actual = dense_masked(call), dense_blockwise(call, REFERENCE)
    valid = torch.ones(2, 120, dtype=torch.bool) if mask.padding_mask is None else mask.padding_mask
    is_real = valid[:, -mask.q_length :, None].unsqueeze(1)
    torch.testing.assert_close(actual * is_real, expected * is_real, atol=1e-5, rtol=1e-4)
