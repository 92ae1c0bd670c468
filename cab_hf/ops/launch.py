"""Helpers for launching kernels: checks of inputs, properties of the device, launch options."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton.language as tl
from torch import Tensor

from cab_hf.capability import NAMED, NONE, capability

# initial value of a running maximum; not -inf, because the difference of two infinities is NaN
LOWEST = tl.constexpr(-1.0e30)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 256


def unavailable(x: Tensor) -> str | None:
    """Return why the kernels that select blocks or keys do not support ``x``; None if they do.

    The reason continues a sentence that starts with the name of the engine, e.g. "supports float32,
    not float64".
    """
    if not x.is_cuda:
        return f"runs on CUDA devices only, not {x.device.type}"
    if x.dtype not in DTYPES:
        return f"supports float16, bfloat16 and float32, not {x.dtype}"
    if x.shape[-1] > LARGEST_HEAD_DIM:
        return f"supports head dims up to {LARGEST_HEAD_DIM}, not {x.shape[-1]}"
    return None


def on_device_of(x: Tensor) -> torch.cuda.device | nullcontext:
    """Return a context in which the device of ``x`` is current: Triton uses the current device."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else nullcontext()


def early(x: Tensor) -> dict[str, bool]:
    """Return the options of a kernel launch with programmatic dependent launch (PDL).

    With PDL, a kernel starts before the previous kernel ends. If ``EARLY`` is True, the kernel must
    call ``gdc_wait`` before it reads results of the previous kernel. ``EARLY`` is False on GPUs
    below compute capability 9.0, which do not support PDL.
    """
    ahead = capability(x.device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if ahead else {"EARLY": False}


def registers(x: Tensor, most: int) -> dict[str, int]:
    """Return the launch option that limits registers per thread to ``most``; {} on AMD's GPUs."""
    return {"maxnreg": most} if packed(x) else {}


def packed(x: Tensor) -> bool:
    """Return True if ``x`` is on an NVIDIA GPU, where kernels may use PTX instructions."""
    return capability(x.device) > NONE


def reads_by_descriptor(device: torch.device | str) -> bool:
    """Return True if kernels access tiles on ``device`` by tensor descriptors, not by pointers.

    Descriptors are faster where tensor cores read shared memory: on Hopper and on data-centre
    Blackwell GPUs. For older GPUs and AMD's, Triton compiles a descriptor to one load per number.
    On compute capability 12.0, tiles that descriptors load are copied to registers, which spill.
    Triton's interpreter on a CPU uses descriptors.
    """
    interpreted = NAMED is None and torch.device(device).type == "cpu"
    return interpreted or (9, 0) <= capability(device) < (12, 0)


def padding(valid: Tensor | None) -> tuple[Tensor | None, int, Tensor | None]:
    """Return the arguments that pass a padding mask to a decode kernel.

    Args:
        valid: bool [B, N_k], False for padding; None without padding.

    Returns:
        mask: ``valid`` with contiguous rows; None without padding.
        batch_stride: Elements between two rows of the mask; 0 without padding.
        first: int32 [B], the index of the first token of each row that is not padding; None without
            padding.
    """
    if valid is None:
        return None, 0, None
    valid = valid if valid.stride(-1) == 1 else valid.contiguous()
    return valid, valid.stride(0), valid.int().argmax(-1).int()
