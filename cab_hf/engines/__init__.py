"""Computing: the engines that run attention under a plan, and which of them runs what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.ops import HAS_TRITON, reference
from cab_hf.ops.attention import dense_parts, ffpa, traced
from cab_hf.plan import BlockPlan

HOPPER = 9
# SDPA's fast kernels end here; beyond, all it has is memory-efficient attention
SDPA_HEAD_DIM = 256
# queries times keys of blocks from which a CPU gathers what they list: smaller ones are many calls
GATHERED_FROM = 64 * 64


@dataclass(frozen=True)
class Workload:
    """What an engine must be able to run.

    Attributes:
        device: torch device type, e.g. ``"cuda"``.
        training: whether gradients flow through attention.
        query_block, key_block: of the plan.
    """

    device: str
    head_dim: int
    dtype: torch.dtype
    training: bool
    query_block: int
    key_block: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[int, int]) -> Workload:
        """Of these tensors under a plan of such (query, key) blocks."""
        training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return cls(q.device.type, q.shape[-1], q.dtype, training, *blocks)


class Engine:
    """One way to compute attention; stateless, so that there is one of each.

    Attributes:
        name: what `CabConfig.engine` calls it. Engines of one name are its backends.
    """

    name: str

    def unavailable(self, work: Workload) -> str | None:
        """Why it cannot run ``work``, as half a sentence; None when it can."""
        return None

    def label(self, work: Workload) -> str:
        """Its name for people, with the kernels that run ``work`` where the name leaves it open."""
        return self.name

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: BlockPlan,
        scale: float,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention under ``plan``: q [B, H, N_q, D], k [B, H_kv, N_k, D], v [B, H_kv, N_k, D_v].

        Returns:
            [B, H, N_q, D_v]; with ``return_lse`` also the log-sum-exp, float32 [B, H, N_q]. See
            `reference.attention`, which defines both.
        """
        wanted = v.shape[-1]
        if wanted == q.shape[-1]:
            return dense_parts.attention(self._attend_lists, q, k, v, plan, scale, return_lse)
        # kernels take one head dim: channels of zeros change no logit and no value
        widest = max(wanted, q.shape[-1])
        q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
        result = dense_parts.attention(self._attend_lists, q, k, v, plan, scale, return_lse)
        return (result[0][..., :wanted], result[1]) if return_lse else result[..., :wanted]

    def _attend_lists(self, q, k, v, plan, scale, return_lse):
        """`attention` under a plan's lists, of v with the head dim of q."""
        if plan.sampled is None:
            return self._attend(q, k, v, plan, scale, return_lse)
        from cab_hf.ops.attention import sampled

        result = sampled.attention(self._attend, q, k, v, plan, scale)
        return result if return_lse else result[0]

    def _attend(self, q, k, v, plan, scale, return_lse):
        """The same without what a plan samples."""
        raise NotImplementedError


class Reference(Engine):
    """Plain PyTorch, everywhere: the meaning of a plan."""

    name = "reference"

    def attention(self, q, k, v, plan, scale, return_lse=False):
        if torch.compiler.is_compiling():
            return traced.attention(q, k, v, plan, scale, return_lse)
        return reference.attention(q, k, v, plan, scale, return_lse)


class Gather(Engine):
    """Plain PyTorch over the listed keys alone: what a CPU takes for a prompt."""

    name = "gather"

    def unavailable(self, work: Workload) -> str | None:
        if work.device != "cpu":
            return f"runs on a CPU, not on {work.device}"
        if torch.compiler.is_compiling():
            return "is not traced by torch.compile"
        return "has no backward" if work.training else None

    def _attend(self, *arguments):
        from cab_hf.ops.attention import gather

        return gather.attention(*arguments)


class Triton(Engine):
    """Our own kernels."""

    name = "triton"

    def unavailable(self, work: Workload) -> str | None:
        if not HAS_TRITON:
            return "needs the package triton, which is not installed"
        from cab_hf.ops.attention import block

        return block.unavailable(work.device, work.head_dim, work.dtype)

    def _attend(self, *arguments):
        from cab_hf.ops.attention import block

        return block.attention(*arguments)


class Flex(Engine):
    """FlexAttention: its TRITON backend on CUDA, its CPU one."""

    name = "flex"

    def unavailable(self, work: Workload) -> str | None:
        # imported here: FlexAttention is a heavy import that models without sparse layers never
        # need
        from cab_hf.ops.attention import flex

        blocks = work.query_block, work.key_block
        return flex.unavailable(work.device, work.head_dim, work.dtype, work.training, *blocks)

    def label(self, work: Workload) -> str:
        from cab_hf.ops.attention import flex

        if work.device == "cpu":
            return "flex (CPU)"
        blocks = work.query_block, work.key_block
        trained = flex.merged_blocks(*blocks)
        if not work.training or trained == blocks:
            return "flex (TRITON)"
        return "flex (TRITON, blocks merged to {} x {})".format(*trained)

    def _attend(self, *arguments):
        from cab_hf.ops.attention import flex

        return flex.attention(*arguments)


class Flash(Flex):
    """FlexAttention's FLASH backend: flash-attn-4's kernels."""

    def unavailable(self, work: Workload) -> str | None:
        blocks = work.query_block, work.key_block
        return super().unavailable(work) or _flash_unavailable(
            work.device, work.head_dim, work.dtype, *blocks
        )

    def label(self, work: Workload) -> str:
        from cab_hf.ops.attention import flash

        blocks = work.query_block, work.key_block
        if not work.training or flash.own_backward(work.head_dim, *blocks):
            return "flex (FLASH)"
        return "flex (FLASH, gradients by triton)"

    def _attend(self, q, k, v, plan, scale, return_lse):
        from cab_hf.ops.attention import flash

        out, lse = flash.attention(q, k, v, plan, scale)
        return (out, lse) if return_lse else out


@dataclass(frozen=True)
class DenseKernel:
    """One way to compute exact causal attention: of a text, or of the last of its queries.

    Attributes:
        name: for people.
        attention: (q [B, H, N_q, D], k and v [B, H_kv, N_k, D], scale) to [B, H, N_q, D].
    """

    name: str
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    causal, grouped = q.shape[2] > 1, q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
    )


REFERENCE, GATHER, TRITON, FLEX, FLASH = Reference(), Gather(), Triton(), Flex(), Flash()
# PyTorch's own, and ffpa-attn's for large heads of texts that have no cache
SDPA, FFPA = DenseKernel("sdpa", _sdpa), DenseKernel("ffpa", ffpa.attention)
# name -> what it stands for, the preferred first
ENGINES: dict[str, tuple[Engine, ...]] = {
    "reference": (REFERENCE,),
    "gather": (GATHER,),
    "flex": (FLASH, FLEX),
    "triton": (TRITON,),
}
# the fastest first; tests hold the order to what was measured, in eval/results/speed-attention and
# eval/results/speed-attention-without-flash
FASTEST = (FLASH, TRITON, FLEX, REFERENCE)
# on GPUs before Hopper nothing was measured, and tiles were not chosen for their shared memory
UNMEASURED = (FLASH, FLEX, TRITON, REFERENCE)


def choose(name: str, work: Workload) -> Engine:
    """The engine that runs ``work``: one of that name, or for ``"auto"`` the fastest that can.

    Raises:
        ValueError: for an unknown name, or an engine asked for by name that cannot run this.
    """
    if name == "auto":
        # a compiled kernel is compiled on CPU for every new length
        if work.device == "cpu":
            large = work.query_block * work.key_block >= GATHERED_FROM
            return GATHER if large and GATHER.unavailable(work) is None else REFERENCE
        candidates = FASTEST if _measured_here() else UNMEASURED
    elif name in ENGINES:
        candidates = ENGINES[name]
    else:
        known = ", ".join(map(repr, ("auto", *ENGINES)))
        raise ValueError(f"CabConfig.engine is {name!r}; it must be one of {known}.")
    for engine in candidates:
        reason = engine.unavailable(work)
        if reason is None:
            return engine
    raise ValueError(
        f"CabConfig.engine is {name!r}, which {reason}; use engine='auto' or 'reference'."
    )


def exact(work: Workload, length: int | None) -> Engine | DenseKernel:
    """What computes exact attention: SDPA, FFPA, or an engine under a plan that keeps everything.

    ``length`` is that of queries and keys where nothing but causality masks them, else None. SDPA's
    fast kernels take neither masks nor head dims above `SDPA_HEAD_DIM`.
    """
    if length is not None and work.head_dim <= SDPA_HEAD_DIM:
        return SDPA
    if TRITON.unavailable(work) or not _measured_here():
        return SDPA
    if length is not None and not ffpa.unavailable(
        work.device, work.head_dim, work.dtype, work.training, length
    ):
        return FFPA
    return TRITON


# constants where a model is compiled: finding packages and asking the device is not traced
@torch.compiler.assume_constant_result
def _measured_here() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= HOPPER


@torch.compiler.assume_constant_result
def _flash_unavailable(
    device: str, head_dim: int, dtype: torch.dtype, query_block: int, key_block: int
) -> str | None:
    # a ROCm device has capabilities of other meaning
    if device == "cpu" or torch.version.cuda is None or not torch.cuda.is_available():
        return f"runs on CUDA devices, not on {device}"
    from cab_hf.ops.attention import flash

    capability = torch.cuda.get_device_capability()
    return flash.unavailable(capability, head_dim, dtype, query_block, key_block)
