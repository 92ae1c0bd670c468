"""Errors for PyTorch transforms that 'cab' does not support."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad


def refuse_tracing(*tensors: Any) -> None:
    """Refuse tracers that record one call, and tensors without values.

    Args:
        tensors: arguments of the call; arguments that are not tensors are ignored.

    Raises:
        NotImplementedError: if a transform is active. The message names the transform.
    """
    if torch.compiler.is_compiling():
        return
    tensors = [x for x in tensors if isinstance(x, Tensor)]
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "torch.jit.trace records the operations of one input, and the operations of 'cab' and "
            "'cab_dense' depend on the input. Use torch.export.export or torch.compile."
        )
    # detecting a mode takes longer than the rest of this function
    is_plain = len(tensors) > 0 and all(type(x) is Tensor for x in tensors)
    if not is_plain and detect_fake_mode(tensors) is not None:
        raise NotImplementedError(
            "the call has fake tensors (FakeTensorMode), and 'cab' reads values of tensors. Use "
            "torch.export.export or torch.compile, or set attn_implementation='sdpa'."
        )
    if any(map(_is_functional, tensors)):
        raise NotImplementedError(
            "torch.func.functionalize is active, and 'cab' reads values of tensors. Use "
            "torch.export.export or torch.compile, or set attn_implementation='sdpa'."
        )


def refuse_vmap(what: str, *tensors: Any) -> None:
    """Refuse tensors that are batched by `torch.vmap`.

    Args:
        what: name of the tensors, for the message.
        tensors: tensors to check; None is ignored.

    Raises:
        NotImplementedError: if `torch.vmap` batches a tensor.
    """
    if torch.compiler.is_compiling():
        return
    if any(isinstance(x, Tensor) and _is_batched(x) for x in tensors):
        raise NotImplementedError(
            f"torch.vmap batches {what}, and 'cab' reads its values. Loop over the samples, or "
            "set attn_implementation='sdpa'."
        )


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Refuse forward-mode differentiation of CUDA kernels, which would drop the tangents.

    Raises:
        NotImplementedError: if forward-mode differentiation is active and a tensor is on a GPU.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x.is_cuda for x in tensors):
        raise NotImplementedError(
            "forward-mode differentiation (torch.func.jvp) is active, and the kernels of 'cab' "
            "have gradients in reverse mode only. Use torch.func.vjp or backward, or set "
            "attn_implementation='eager'."
        )


def _is_batched(x: Tensor) -> bool:
    """Return True if vmap batches ``x`` at any level of nested transforms."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def _is_functional(x: Tensor) -> bool:
    """Return True if functionalize wraps ``x`` at any level of nested transforms."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_functionaltensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False
