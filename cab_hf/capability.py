"""The compute capability that kernels and engines are chosen for."""

from __future__ import annotations

import os

import torch

from cab_hf.checks import require

# in the environment, names a capability in place of the device's own: for tests and measurements
VARIABLE = "CAB_HF_CAPABILITY"
# of a GPU that is not NVIDIA's
NONE = (0, 0)
# from which on products are computed in 8-bit floats
FP8 = (8, 9)
# of the GPUs that times were measured on
HOPPER = 9


def _parsed(value: str | None) -> tuple[int, int] | None:
    if not value:
        return None
    parts = value.split(".")
    known = len(parts) == 2 and all(map(str.isdecimal, parts))
    require(
        known, VARIABLE, value, "a capability such as 8.0, or 0.0 for a GPU that is not NVIDIA's"
    )
    return int(parts[0]), int(parts[1])


# read once: torch.compile need not trace it, and it does not change within a run
NAMED = _parsed(os.environ.get(VARIABLE))


def capability(device: torch.device | str = "cuda") -> tuple[int, int]:
    """(major, minor) of an NVIDIA GPU, or what `VARIABLE` names in its place; else `NONE`."""
    if NAMED is not None:
        return NAMED
    # a ROCm device has capabilities of another meaning
    if torch.device(device).type != "cuda" or torch.version.cuda is None:
        return NONE
    return torch.cuda.get_device_capability(device)
