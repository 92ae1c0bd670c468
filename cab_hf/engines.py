"""Computing: which engine runs attention under a plan, and running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.ops import reference
from cab_hf.ops.attention import ffpa
from cab_hf.plan import BlockPlan

ENGINES = ("reference", "flex", "triton")
# by the kernels that flex would run on; tests hold the order to what was measured, in
# eval/results/speed-attention and eval/results/speed-attention-without-flash
FASTEST = {"FLASH": ("flex", "triton"), "TRITON": ("triton", "flex")}
# on GPUs before Hopper nothing was measured, and tiles were not chosen for their shared memory
UNMEASURED = ("flex", "triton")
HOPPER = 9
# SDPA's fast kernels end here; beyond, all it has is memory-efficient attention
SDPA_HEAD_DIM = 256
# query and key blocks of the plan that keeps everything
EXACT_BLOCK = 128


@dataclass(frozen=True)
class Workload:
    """What an engine must be able to run.

    Attributes:
        device: torch device type, e.g. ``"cuda"``.
        training: whether gradients flow through attention.
    """

    device: str
    head_dim: int
    dtype: torch.dtype
    training: bool
    query_block: int
    key_block: int


def unavailable(engine: str, work: Workload) -> str | None:
    """Why ``engine`` cannot run ``work``, as half a sentence; None when it can."""
    if engine == "reference":
        return None
    if engine == "triton":
        if not _has_triton():
            return "needs the package triton, which is not installed"
        from cab_hf.ops.attention import block

        return block.unavailable(work.device, work.head_dim, work.dtype)
    # imported here: FlexAttention is a heavy import that models without sparse layers never need
    from cab_hf.ops.attention import flex

    return flex.unavailable(
        work.device, work.head_dim, work.dtype, work.training, work.query_block, work.key_block
    )


# a constant where a model is compiled: finding packages is not traced
@torch.compiler.assume_constant_result
def _has_triton() -> bool:
    return find_spec("triton") is not None


@torch.compiler.assume_constant_result
def _measured_here() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= HOPPER


def choose(engine: str, work: Workload) -> str:
    """The engine that runs ``work``: the one asked for, or for ``"auto"`` the fastest that can.

    Raises:
        ValueError: for an unknown name, or an engine asked for by name that cannot run this.
    """
    if engine == "auto":
        # on CPU the compiled kernel saves less than its compilation costs
        if work.device == "cpu":
            return "reference"
        return next(name for name in fastest(work) if not unavailable(name, work))
    if engine not in ENGINES:
        known = ", ".join(map(repr, ("auto", *ENGINES)))
        raise ValueError(f"CabConfig.engine is {engine!r}; it must be one of {known}.")
    reason = unavailable(engine, work)
    if reason:
        raise ValueError(
            f"CabConfig.engine is {engine!r}, which {reason}; use engine='auto' or 'reference'."
        )
    return engine


def fastest(work: Workload) -> tuple[str, ...]:
    """Engines for ``work`` on a GPU, the fastest first."""
    from cab_hf.ops.attention import flex

    backend = flex.backend(
        work.device, work.head_dim, work.dtype, work.training, work.query_block, work.key_block
    )
    return *(FASTEST[backend] if _measured_here() else UNMEASURED), "reference"


def exact(work: Workload, length: int | None) -> str:
    """What computes exact attention: ``"sdpa"``, ``"ffpa"``, or an engine that keeps everything.

    ``length`` is that of queries and keys where nothing but causality masks them, else None. SDPA's
    fast kernels take neither masks nor head dims above `SDPA_HEAD_DIM`.
    """
    if length is not None and work.head_dim <= SDPA_HEAD_DIM:
        return "sdpa"
    if unavailable("triton", work) or not _measured_here():
        return "sdpa"
    if length is not None and not ffpa.unavailable(
        work.device, work.head_dim, work.dtype, work.training, length
    ):
        return "ffpa"
    return "triton"


def label(engine: str, work: Workload) -> str:
    """``engine`` for people: for flex with the kernels that run ``work``, and on which blocks."""
    if engine != "flex":
        return engine
    from cab_hf.ops.attention import flex

    manner = flex.manner(
        work.device, work.head_dim, work.dtype, work.training, work.query_block, work.key_block
    )
    return f"flex ({manner})"


def run(
    engine: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention under ``plan``: q [B, H, N_q, D], k [B, H_kv, N_k, D] and v [B, H_kv, N_k, D_v].

    Returns:
        [B, H, N_q, D_v]; with ``return_lse`` also the log-sum-exp, float32 [B, H, N_q]. See
        `reference.attention`, which defines both.
    """
    attend, wanted = _attend(engine), v.shape[-1]
    if engine == "reference" or wanted == q.shape[-1]:
        return attend(q, k, v, plan, scale, return_lse)
    # kernels take one head dim: channels of zeros change no logit and no value
    widest = max(wanted, q.shape[-1])
    q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    result = attend(q, k, v, plan, scale, return_lse)
    return (result[0][..., :wanted], result[1]) if return_lse else result[..., :wanted]


def _attend(engine: str) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    if engine == "flex":
        from cab_hf.ops.attention import flex

        return flex.attention
    if engine == "triton":
        from cab_hf.ops.attention import block

        return block.attention
    return reference.attention


def needs_grad(*tensors: Tensor) -> bool:
    """Whether a backward pass will come through these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
