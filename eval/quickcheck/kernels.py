"""Dense attention kernels, the fastest of which quickcheck compares with CAB."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cab_hf.eval.speed.dense import FA3_MODULES, FA4_MODULES, flash_attn

SDPA = "sdpa"
# name of a kernel -> backend of torch's scaled_dot_product_attention
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "PyTorch's flash": SDPBackend.FLASH_ATTENTION,
}
# name of a kernel -> modules that define its flash_attn_func; the first installed module is used
FLASH = {
    "FlashAttention-2": ("flash_attn.flash_attn_interface",),
    "FlashAttention-3": FA3_MODULES,
    "FlashAttention-4": FA4_MODULES,
}
PREFIX = "quickcheck "  # prefix of the names under which kernels are registered with transformers


def kernel_names(own: str, on_cpu: bool) -> list[str]:
    """Return the names of the dense kernels to compare, the model's own implementation first.

    Args:
        own: the attention implementation with which the model was loaded.
        on_cpu: True if the model is on a CPU, where ``own`` is the only name.
    """
    if on_cpu:
        return [own]
    installed = [name for name, modules in FLASH.items() if any(map(_is_installed, modules))]
    return [own, *BACKENDS, *installed, "cab_dense"]


@contextmanager
def attend_with(model: Any, name: str, own: str) -> Iterator[None]:
    """Switch the attention of ``model`` to a dense kernel inside the block.

    Args:
        model: the model.
        name: one of `kernel_names`.
        own: the attention implementation with which the model was loaded; it is restored after the
            block.

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
    """Return a function that computes causal attention by flash_attn_func.

    Its signature is that of transformers' attention functions.

    Args:
        modules: modules that may define flash_attn_func; the first installed module is used.
    """
    kernel = flash_attn("flash_attn_func", modules)

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
        # flash-attn takes and returns [B, N, H, D], the layout that transformers expects
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return kernel(q, k, v, softmax_scale=scaling), None

    return attention
