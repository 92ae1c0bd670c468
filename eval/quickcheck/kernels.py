"""Dense attention kernels, the fastest of which quickcheck compares with CAB."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cab_hf.eval.speed.dense import FA3_MODULES, FA4_MODULES, load_flash_function

SDPA = "sdpa"
# name of a kernel -> backend of torch's scaled_dot_product_attention
SDPA_BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "PyTorch's flash": SDPBackend.FLASH_ATTENTION,
}
# name of a kernel -> modules that define its flash_attn_func; the first installed module is used
FLASH_MODULES = {
    "FlashAttention-2": ("flash_attn.flash_attn_interface",),
    "FlashAttention-3": FA3_MODULES,
    "FlashAttention-4": FA4_MODULES,
}
# prefix of the names under which kernels are registered with transformers
REGISTERED_NAME_PREFIX = "quickcheck "


def list_kernel_names(own_implementation: str, is_on_cpu: bool) -> list[str]:
    """Return the names of the dense kernels to compare, the model's own implementation first.

    Args:
        own_implementation: the attention implementation with which the model was loaded.
        is_on_cpu: True if the model is on a CPU, where ``own_implementation`` is the only name.
    """
    if is_on_cpu:
        return [own_implementation]
    installed_names = [
        kernel_name
        for kernel_name, module_names in FLASH_MODULES.items()
        if any(map(_is_installed, module_names))
    ]
    return [own_implementation, *SDPA_BACKENDS, *installed_names, "cab_dense"]


@contextmanager
def use_dense_kernel(model: Any, kernel_name: str, own_implementation: str) -> Iterator[None]:
    """Switch the attention of ``model`` to a dense kernel inside the block.

    Args:
        model: the model.
        kernel_name: one of `list_kernel_names`.
        own_implementation: the attention implementation with which the model was loaded; it is
            restored after the block.

    Raises:
        ImportError, NotImplementedError, RuntimeError, ValueError: the kernel cannot run the model.
    """
    implementation = SDPA if kernel_name in SDPA_BACKENDS else kernel_name
    if kernel_name in FLASH_MODULES:
        implementation = REGISTERED_NAME_PREFIX + kernel_name
        ALL_ATTENTION_FUNCTIONS[implementation] = _make_flash_attention(FLASH_MODULES[kernel_name])
    try:
        if implementation != own_implementation:
            model.set_attn_implementation(implementation)
        with (
            sdpa_kernel(SDPA_BACKENDS[kernel_name])
            if kernel_name in SDPA_BACKENDS
            else nullcontext()
        ):
            yield
    finally:
        if implementation != own_implementation:
            model.set_attn_implementation(own_implementation)
        if kernel_name in FLASH_MODULES:
            del ALL_ATTENTION_FUNCTIONS[implementation]


def _is_installed(module_name: str) -> bool:
    try:
        return find_spec(module_name) is not None
    except (ImportError, ValueError):
        return False


def _make_flash_attention(module_names: tuple[str, ...]) -> Callable[..., tuple[Tensor, None]]:
    """Return a function that computes causal attention by flash_attn_func.

    Its signature is that of transformers' attention functions.

    Args:
        module_names: modules that may define flash_attn_func; the first installed module is used.
    """
    kernel = load_flash_function("flash_attn_func", module_names)

    def compute_attention(
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

    return compute_attention
