"""Dense attention kernels that a first token is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SDPA = "sdpa"
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "PyTorch's flash": SDPBackend.FLASH_ATTENTION,
}
# name -> modules with flash_attn_func, of which the first installed one is used; the wheel of
# FlashAttention-3 with the forward pass alone has its own module
FLASH = {
    "FlashAttention-2": ("flash_attn.flash_attn_interface",),
    "FlashAttention-3": ("flash_attn_interface", "fa3_fwd_interface"),
    "FlashAttention-4": ("flash_attn.cute",),
}
PREFIX = "quickcheck "  # of names that are registered with transformers


def kernel_names(own: str, on_cpu: bool) -> list[str]:
    """Return the dense kernels to compare: the model's ``own`` first, and others on a GPU."""
    if on_cpu:
        return [own]
    installed = [name for name, modules in FLASH.items() if any(map(_is_installed, modules))]
    return [own, *BACKENDS, *installed, "cab_dense"]


@contextmanager
def attending_by(model: Any, name: str, own: str) -> Iterator[None]:
    """Make ``model``, whose attention is ``own``, attend by the kernel ``name`` inside the block.

    Raises:
        ImportError, NotImplementedError, RuntimeError, ValueError: the kernel cannot run the model.
    """
    implementation = SDPA if name in BACKENDS else name
    if name in FLASH:
        implementation = PREFIX + name
        ALL_ATTENTION_FUNCTIONS[implementation] = _flash_attention(FLASH[name])
    try:
        if implementation != own:
            model.set_attn_implementation(implementation)
        with sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext():
            yield
    finally:
        if implementation != own:
            model.set_attn_implementation(own)
        if name in FLASH:
            del ALL_ATTENTION_FUNCTIONS[implementation]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _flash_attention(modules: tuple[str, ...]) -> Callable[..., tuple[Tensor, None]]:
    """Return causal attention of a prompt with the signature of transformers' functions."""
    kernel = import_module(next(filter(_is_installed, modules))).flash_attn_func

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if any(x is not None for x in (attention_mask, sliding_window, softcap, s_aux)):
            raise NotImplementedError("is compared without masks, windows, soft caps and sinks")
        out = kernel(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            softmax_scale=scaling,
            causal=True,
        )
        # some versions return the log-sum-exp too
        return out[0] if isinstance(out, tuple) else out, None

    return attention
