"""What kernels and their launches share: for whom they are, and on which device they run."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton.language as tl
from torch import Tensor

from cab_hf.capability import NAMED, NONE, capability

# the maximum of nothing: infinity less infinity is no number
LOWEST = tl.constexpr(-1.0e30)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 256


def unavailable(x: Tensor) -> str | None:
    """Why q or k is not for the kernels of choosing, as half a sentence; None when it is."""
    if not x.is_cuda:
        return f"runs on CUDA devices only, not {x.device.type}"
    if x.dtype not in DTYPES:
        return f"takes float16, bfloat16 and float32, not {x.dtype}"
    if x.shape[-1] > LARGEST_HEAD_DIM:
        return f"takes head dims up to {LARGEST_HEAD_DIM}, not {x.shape[-1]}"
    return None


def on_device_of(x: Tensor) -> torch.cuda.device | nullcontext:
    """Triton launches on the current device: make it that of ``x``."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else nullcontext()


def early(x: Tensor) -> dict[str, bool]:
    """Launches a kernel before the one in front of it is done, where the device can: it waits."""
    ahead = capability(x.device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if ahead else {"EARLY": False}


def registers(x: Tensor, most: int) -> dict[str, int]:
    """At most so many registers a thread; for AMD's GPUs Triton takes no such option."""
    return {"maxnreg": most} if packed(x) else {}


def packed(x: Tensor) -> bool:
    """Whether kernels may use instructions of NVIDIA's GPUs."""
    return capability(x.device) > NONE


def reads_by_descriptor(device: torch.device | str) -> bool:
    """Whether kernels read tiles by tensor descriptors, as in Triton's interpreter.

    They do where tensor cores multiply what lies in shared memory: on Hopper and on Blackwell for
    data centres. For older GPUs and AMD's, Triton turns a descriptor into one load a number; for
    compute capability 12.0, what it copies to registers is spilled.
    """
    interpreted = NAMED is None and torch.device(device).type == "cpu"
    return interpreted or (9, 0) <= capability(device) < (12, 0)


def padding(valid: Tensor | None) -> tuple[Tensor | None, int, Tensor | None]:
    """Padding as kernels read it: its mask, the stride of the mask, and where texts begin."""
    if valid is None:
        return None, 0, None
    valid = valid if valid.stride(-1) == 1 else valid.contiguous()
    return valid, valid.stride(0), valid.int().argmax(-1).int()
