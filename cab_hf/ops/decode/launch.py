"""What the kernels of a decode step, and their launches, share."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

# what stands for a maximum of nothing: infinity less infinity is no number
LOWEST = tl.constexpr(-1.0e30)


def early(x: Tensor) -> dict[str, bool]:
    """Launches a kernel before the one in front of it is done, where the device can: it waits."""
    ahead = packed(x) and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if ahead else {"EARLY": False}


def packed(x: Tensor) -> bool:
    """Whether kernels may use instructions of NVIDIA's GPUs."""
    return x.is_cuda and torch.version.cuda is not None


def padding(valid: Tensor | None) -> tuple[Tensor | None, int, Tensor | None]:
    """What kernels are told of padding: its mask, the stride of it, and where texts begin."""
    if valid is None:
        return None, 0, None
    valid = valid if valid.stride(-1) == 1 else valid.contiguous()
    return valid, valid.stride(0), valid.int().argmax(-1).int()
