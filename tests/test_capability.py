"""The variable CAB_HF_CAPABILITY overrides the compute capability for kernels and engines."""

import pytest
import torch

from cab_hf import capability
from cab_hf.experiment.provenance import device_name
from cab_hf.ops import launch
from cab_hf.ops.attention import ffpa, flash
from cab_hf.selection import gather, tiles


@pytest.fixture(params=[(8, 0), (8, 9), (9, 0), (0, 0)], ids=lambda x: f"{x[0]}.{x[1]}")
def capability_override(request, monkeypatch):
    """Patch the value of CAB_HF_CAPABILITY, which is read at import, and return the value."""
    monkeypatch.setattr(capability, "CAPABILITY_OVERRIDE", request.param)
    monkeypatch.setattr(launch, "CAPABILITY_OVERRIDE", request.param)
    return request.param


def test_environment_variable_selects_capability(capability_override):
    tensor = torch.zeros(1, dtype=torch.bfloat16)
    is_hopper = capability_override == (9, 0)
    assert (gather.choose_scoring_dtype(tensor) == tiles.FP8) == (capability_override >= (8, 9))
    assert (
        launch.reads_by_descriptor("cuda")
        == launch.make_pdl_options(tensor)["USE_PDL"]
        == is_hopper
    )
    assert launch.has_ptx(tensor) == (capability_override != (0, 0))
    unavailable_reason = flash.unavailable(128, tensor.dtype, 128, 64)
    assert ("runs on sm_90" in (unavailable_reason or "")) != is_hopper
    unavailable_reason = ffpa.unavailable("cuda", 512, tensor.dtype, False, length=4096)
    assert ("Hopper" in (unavailable_reason or "")) != is_hopper


def test_provenance_records_overridden_capability(capability_override):
    major, minor = capability_override
    assert device_name("cpu").endswith(f", code of compute capability {major}.{minor}")


def test_no_override_without_the_variable():
    assert capability.capability("cpu") == capability.NO_CAPABILITY
    assert "capability" not in device_name("cpu")


@pytest.mark.parametrize("variable_value", ["8", "ampere", "8.x", "8.0.1"])
def test_invalid_capability_variable_raises(variable_value):
    with pytest.raises(ValueError, match="CAB_HF_CAPABILITY must be"):
        capability._parse_capability(variable_value)
