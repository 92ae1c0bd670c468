"""Exact attention by flash-attn: supported calls, and the arguments of flash-attn."""

import sys
from types import ModuleType

import pytest
import torch
from tiny import draw_qkv
from torch.nn import functional as F

from cab_hf import engines
from cab_hf.capability import HOPPER
from cab_hf.ops import Workload
from cab_hf.ops.attention import flash_dense


def make_workload(**workload_fields):
    """Return a `Workload` that flash-attn supports, except for ``workload_fields``."""
    supported_fields = {
        "device": "cuda",
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "training": False,
    }
    return Workload(**supported_fields | {"query_block": 128, "key_block": 64} | workload_fields)


@pytest.fixture
def hopper_monkeypatch(monkeypatch):
    """Patch `flash_dense` to find flash-attn on a Hopper GPU; return monkeypatch."""
    monkeypatch.setattr(flash_dense, "capability", lambda: (HOPPER, 0))
    monkeypatch.setattr(flash_dense, "_import_flash_attn_func", lambda: object)
    return monkeypatch


def test_installed_flash_attn_computes_causal_calls_and_last_queries(hopper_monkeypatch):
    assert engines.choose_exact_attention(make_workload(), 4096, 4096) is engines.FLASH_ATTN
    assert engines.choose_exact_attention(make_workload(), None, 512) is engines.FLASH_ATTN


@pytest.mark.parametrize(
    ("workload_fields", "num_queries"),
    [
        pytest.param({"device": "cpu"}, 512, id="cpu"),
        pytest.param({"training": True}, 512, id="training"),
        pytest.param({"dtype": torch.float32}, 512, id="float32"),
        pytest.param({"head_dim": 320}, 512, id="d320"),
        pytest.param({"head_dim": 100}, 512, id="d100"),
        pytest.param({"value_dim": 64}, 512, id="narrow-values"),
        pytest.param({}, 64, id="few-queries"),
    ],
)
def test_unsupported_calls_are_unavailable(hopper_monkeypatch, workload_fields, num_queries):
    assert flash_dense.unavailable(make_workload(**workload_fields), num_queries) is not None


def test_masked_calls_do_not_use_flash_attn(hopper_monkeypatch):
    assert engines.choose_exact_attention(make_workload(), None) is not engines.FLASH_ATTN


def test_flash_attn_without_hopper_or_package_is_unavailable(hopper_monkeypatch):
    hopper_monkeypatch.setattr(flash_dense, "capability", lambda: (HOPPER - 1, 0))
    assert flash_dense.unavailable(make_workload(), 512) is not None
    hopper_monkeypatch.setattr(flash_dense, "capability", lambda: (HOPPER, 0))
    hopper_monkeypatch.setattr(flash_dense, "_import_flash_attn_func", lambda: None)
    assert "not installed" in flash_dense.unavailable(make_workload(), 512)


@pytest.mark.parametrize("returns_lse", [False, True])
def test_flash_attn_receives_token_major_tensors(monkeypatch, returns_lse):
    def flash_attn_func(q, k, v, softmax_scale, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        mask = mask.tril(k.shape[2] - q.shape[2]) if causal else mask
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        ).transpose(1, 2)
        return (out, None) if returns_lse else out

    flash_attn_module = ModuleType("flash_attn_interface")
    flash_attn_module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_module)
    monkeypatch.setattr(
        flash_dense, "_import_flash_attn_func", flash_dense._import_flash_attn_func.__wrapped__
    )
    q, k, v = draw_qkv(q_length=30, kv_length=70, heads=4, kv_heads=2, dim=16)
    k = k + torch.arange(70).view(-1, 1) / 70
    mask = torch.ones(30, 70, dtype=torch.bool).tril(40)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(flash_dense.attention(q, k, v, 0.3), expected)


def test_package_that_cannot_be_imported_is_skipped(monkeypatch):
    monkeypatch.setattr(flash_dense, "MODULE_NAMES", ("no_module_of_this_name", "json"))
    assert flash_dense._import_flash_attn_func.__wrapped__() is None
