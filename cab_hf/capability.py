"""The compute capability of the GPU, by which kernels and engines are chosen."""

from __future__ import annotations

import os

import torch

from cab_hf.checks import require

# environment variable that overrides the capability of the device, for tests and measurements
CAPABILITY_VARIABLE = "CAB_HF_CAPABILITY"
# capability of a GPU that is not from NVIDIA
NO_CAPABILITY = (0, 0)
# lowest capability of a GPU that multiplies matrices of 8-bit floats
FP8_CAPABILITY = (8, 9)
# major capability of Hopper GPUs, on which the times in this package were measured
HOPPER = 9


def _parse_capability(variable_value: str | None) -> tuple[int, int] | None:
    """Return (major, minor) from a string such as "8.0"; None for None or an empty string."""
    if not variable_value:
        return None
    version_parts = variable_value.split(".")
    has_two_numbers = len(version_parts) == 2 and all(map(str.isdecimal, version_parts))
    requirement = "a capability such as 8.0, or 0.0 for a GPU that is not from NVIDIA"
    require(has_two_numbers, CAPABILITY_VARIABLE, variable_value, requirement)
    return int(version_parts[0]), int(version_parts[1])


# capability in `CAPABILITY_VARIABLE`; read once, because torch.compile does not trace the
# environment
CAPABILITY_OVERRIDE = _parse_capability(os.environ.get(CAPABILITY_VARIABLE))


def capability(device: torch.device | str = "cuda") -> tuple[int, int]:
    """Return the compute capability (major, minor) of a device.

    The environment variable `CAPABILITY_VARIABLE` overrides the device. The result is
    `NO_CAPABILITY` for a device that is not an NVIDIA GPU.
    """
    if CAPABILITY_OVERRIDE is not None:
        return CAPABILITY_OVERRIDE
    # capabilities of ROCm devices have another meaning
    if torch.device(device).type != "cuda" or torch.version.cuda is None:
        return NO_CAPABILITY
    return torch.cuda.get_device_capability(device)
