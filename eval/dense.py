"""Dense causal attention, what sparse attention is measured against: the fastest kernels there are.

Nothing is imported before it is asked for: a baseline that is not installed is a reason, not an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# q [B, H, N, D], k and v [B, H_kv, N, D], scale -> [B, H, N, D]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]

PREFERRED = ("FA3", "cuDNN")  # what a ratio is against, the first that ran
CHECK_LENGTH = 300  # not a multiple of any kernel's tile
# bf16 operands err up to 1e-2; a wrong layout errs by about 1
CHECK_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Baseline:
    """One dense kernel.

    Attributes:
        load: imports what it needs and returns the kernel; ImportError where it is not there.
        version: of the library behind it, None where that is torch alone.
    """

    load: Callable[[], Attend]
    version: Callable[[], str | None] = lambda: None


def on(device: torch.device | str) -> dict[str, Baseline]:
    """The baselines that make sense on ``device``, by name."""
    return ON_GPU if torch.device(device).type == "cuda" else ON_CPU


def against(measured: Mapping[str, float]) -> str | None:
    """Which of the baselines, name -> ms, a ratio is against: FA3, else cuDNN, else the fastest."""
    first = next((name for name in PREFERRED if name in measured), None)
    return first or min(measured, key=measured.__getitem__, default=None)


def extrapolate(ms: float, measured_at: int, length: int) -> float:
    """The time at ``length`` of what took ``ms`` at ``measured_at`` tokens: quadratic."""
    return ms * (length / measured_at) ** 2


def check(attend: Attend, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Compare with float32 attention on the first tokens of the inputs.

    Raises:
        ArithmeticError: with the relative error; a kernel that computes something else has no time.
    """
    q, k, v = (x[:, :, :CHECK_LENGTH] for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    full = [x.float().repeat_interleave(n, dim=1) for x, n in ((q, 1), (k, group), (v, group))]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*full, is_causal=True, scale=scale)
    found = attend(q, k, v, scale)
    error = float((found.float() - expected).norm() / expected.norm())
    if not error <= CHECK_TOLERANCE:  # written so that NaN fails too
        raise ArithmeticError(f"wrong by {error:.2g} (relative) at {q.shape[2]} tokens")


def _sdpa(backend: SDPBackend) -> Callable[[], Attend]:
    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )

    return lambda: attend


def _token_major(kernel: Callable[..., Tensor | tuple]) -> Attend:
    """A flash-attn function, [B, N, H, D], as one of head-major views: nothing is copied."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        out = kernel(*turned, softmax_scale=scale, causal=True)
        # some versions return the log-sum-exp as well
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def _load_fa3() -> Attend:
    # the wheel of the forward pass alone has a module of its own
    name = "flash_attn_interface" if find_spec("flash_attn_interface") else "fa3_fwd_interface"
    return _token_major(import_module(name).flash_attn_func)


def _load_fa4() -> Attend:
    from flash_attn.cute import flash_attn_func

    return _token_major(flash_attn_func)


def _package(*names: str) -> Callable[[], str | None]:
    """Version of the first of these packages that is installed."""

    def version() -> str | None:
        for name in names:
            try:
                return f"{name} {metadata.version(name)}"
            except metadata.PackageNotFoundError:
                continue
        return None

    return version


def _cudnn_version() -> str | None:
    version = torch.backends.cudnn.version()
    return None if version is None else f"cuDNN {version}"


ON_GPU = {
    "FA3": Baseline(_load_fa3, _package("flash_attn_3", "flash-attn-3", "fa3-fwd")),
    "FA4": Baseline(_load_fa4, _package("flash-attn-4")),
    "cuDNN": Baseline(_sdpa(SDPBackend.CUDNN_ATTENTION), _cudnn_version),
    "flash": Baseline(_sdpa(SDPBackend.FLASH_ATTENTION)),
}
ON_CPU = {
    "SDPA": Baseline(_sdpa(SDPBackend.FLASH_ATTENTION)),
}
