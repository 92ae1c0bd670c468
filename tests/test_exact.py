"""Exact attention by "cab_dense" and "cab": decode steps, sliding windows and gradients."""

from dataclasses import replace

import pytest
import torch
from call_cases import compute_gradients
from decode_cases import assert_dense_step_equals_sdpa, make_step_masks
from tiny import FULL_BUDGET_CONFIG, draw_qkv, draw_token_ids, make_tiny_model

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
    model, ids = make_tiny_model(family), draw_token_ids(2, 150)
    expected_gradients = compute_gradients(model, ids)
    actual_gradients = compute_gradients(cab_hf.apply_cab(model, FULL_BUDGET_CONFIG), ids)
    torch.testing.assert_close(actual_gradients, expected_gradients, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case_name", make_step_masks())
def test_dense_step_matches_rowwise_attention(monkeypatch, case_name):
    monkeypatch.setattr(decode, "has_kernels", lambda *tensors: True)
    assert_dense_step_equals_sdpa(make_step_masks()[case_name], monkeypatch)


def test_dense_step_with_gradients_uses_no_kernel(monkeypatch):
    monkeypatch.setattr(decode, "_choose_implementation", lambda x: None)
    query = torch.zeros(1, requires_grad=True)
    assert decode.has_kernels(query.detach()) and not decode.has_kernels(query.detach(), query)
    with torch.no_grad():
        assert decode.has_kernels(query)
    monkeypatch.undo()
    assert not decode.has_kernels(query.detach())


def make_windowed_mask(**mask_fields):
    """Return a `MaskInfo` of two rows: 90 queries after 30 cached keys, with a window of 40."""
    return MaskInfo(2, 90, 120, 30, window=40, **mask_fields)


LEFT_PADDING_MASK = torch.arange(120) >= torch.tensor([[50], [0]])
# padding inside rows, as between the turns of a chat
MIDDLE_PADDING_MASK = (torch.arange(120) % 37 > 9).expand(2, -1)
WINDOWED_MASKS = {
    "chunk": make_windowed_mask(),
    "left": make_windowed_mask(padding_mask=LEFT_PADDING_MASK),
    "holes": make_windowed_mask(padding_mask=MIDDLE_PADDING_MASK),
    "live-slot": replace(
        make_windowed_mask(),
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
        padding_mask=MIDDLE_PADDING_MASK,
    ),
}


@pytest.mark.parametrize("mask", WINDOWED_MASKS.values(), ids=WINDOWED_MASKS)
def test_blockwise_window_matches_rowwise_window(mask):
    """`dense_blockwise` removes padding first, and must apply the window to the same keys."""
    q, k, v = draw_qkv(2, q_length=mask.q_length, kv_length=120)
    workload = Workload.from_tensors(q, k, v, (128, 128))
    attention_call = Call(
        q=q,
        k=k,
        v=v,
        scale=0.2,
        layer=None,
        config=CabConfig(),
        is_sparse=False,
        workload=workload,
        mask=mask,
    )
    expected, actual = dense_masked(attention_call), dense_blockwise(attention_call, REFERENCE)
    padding_mask = (
        torch.ones(2, 120, dtype=torch.bool) if mask.padding_mask is None else mask.padding_mask
    )
    is_real_token = padding_mask[:, -mask.q_length :, None].unsqueeze(1)
    torch.testing.assert_close(
        actual * is_real_token, expected * is_real_token, atol=1e-5, rtol=1e-4
    )
