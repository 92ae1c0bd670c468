"""The compute capability of the GPU, by which kernels and engines are chosen."""

from __future__ import annotations

import os

import torch

from cab_hf.checks import require

# environment variable that overrides the capability of the device, for tests and measurements
VARIABLE = "CAB_HF_CAPABILITY"
# capability of a GPU that is not from NVIDIA
NONE = (0, 0)
# lowest capability of a GPU that multiplies matrices of 8-bit floats
FP8 = (8, 9)
# major capability of Hopper GPUs, on which the times in this package were measured
HOPPER = 9


def _parsed(value: str | None) -> tuple[int, int] | None:
    """Return (major, minor) from a string such as "8.0"; None for None or an empty string."""
    if not value:
        return None
    parts = value.split(".")
    is_capability = len(parts) == 2 and all(map(str.isdecimal, parts))
    accepted = "a capability such as 8.0, or 0.0 for a GPU that is not from NVIDIA"
    require(is_capability, VARIABLE, value, accepted)
    return int(parts[0]), int(parts[1])


# capability in `VARIABLE`; read once, because torch.compile does not trace the environment
NAMED = _parsed(os.environ.get(VARIABLE))


def capability(device: torch.device | str = "cuda") -> tuple[int, int]:
    """Return the compute capability (major, minor) of a device.

    The environment variable `VARIABLE` overrides the device. The result is `NONE` for a device that
    is not an NVIDIA GPU.
    """
    if NAMED is not None:
        return NAMED
    # capabilities of ROCm devices have another meaning
    if torch.device(device).type != "cuda" or torch.version.cuda is None:
        return NONE
    return torch.cuda.get_device_capability(device)
