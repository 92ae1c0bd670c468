"""The compute capability for which kernels and engines are selected."""

from __future__ import annotations

import os

import torch

from cab_hf.checks import require

# environment variable that overrides the capability of the device, for tests and measurements
VARIABLE = "CAB_HF_CAPABILITY"
# capability of a GPU that is not from NVIDIA
NONE = (0, 0)
# lowest capability with products in 8-bit floats
FP8 = (8, 9)
# major capability of the GPUs on which times were measured
HOPPER = 9


def _parsed(value: str | None) -> tuple[int, int] | None:
    if not value:
        return None
    parts = value.split(".")
    known = len(parts) == 2 and all(map(str.isdecimal, parts))
    require(
        known, VARIABLE, value, "a capability such as 8.0, or 0.0 for a GPU that is not from NVIDIA"
    )
    return int(parts[0]), int(parts[1])


# read once, so that torch.compile does not trace the environment
NAMED = _parsed(os.environ.get(VARIABLE))


def capability(device: torch.device | str = "cuda") -> tuple[int, int]:
    """Return (major, minor) of an NVIDIA GPU, or of `VARIABLE` if it is set; otherwise `NONE`."""
    if NAMED is not None:
        return NAMED
    # capabilities of ROCm devices have another meaning
    if torch.device(device).type != "cuda" or torch.version.cuda is None:
        return NONE
    return torch.cuda.get_device_capability(device)
