"""Ops: one file per op with its kernels and the function that launches them.

`reference` defines every op in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

# looked up at import: torch.compile cannot trace a search for packages
HAS_TRITON = find_spec("triton") is not None


def has_kernels(x: Tensor) -> bool:
    """Return True if the Triton kernels for selecting blocks run on x [B, H, N, D]."""
    # models on the CPU never need Triton
    if not x.is_cuda or not HAS_TRITON:
        return False
    from cab_hf.ops import launch

    return launch.unavailable(x) is None


@dataclass(frozen=True)
class Workload:
    """Requirements that a call of attention makes of a kernel.

    Attributes:
        device: Torch device type, e.g. ``"cuda"``.
        head_dim: Channels of q and k.
        dtype: Dtype of q.
        training: True if gradients flow through attention.
        query_block: Tokens per query block of the plan.
        key_block: Tokens per key block of the plan.
        sinks: True if heads have sinks, which need the log-sum-exp.
        softcap: True if logits are soft-capped.
        value_dim: Channels of v; None if they equal ``head_dim``.
    """

    device: str
    head_dim: int
    dtype: torch.dtype
    training: bool
    query_block: int
    key_block: int
    sinks: bool = False
    softcap: bool = False
    value_dim: int | None = None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[int, int], **features: bool
    ) -> Workload:
        """Return the workload of these tensors under a plan.

        Args:
            blocks: Tokens per query block and per key block.
            features: ``sinks`` and ``softcap``.
        """
        training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        value_dim = None if v.shape[-1] == q.shape[-1] else v.shape[-1]
        query_block, key_block = blocks
        return cls(
            device=q.device.type,
            head_dim=q.shape[-1],
            dtype=q.dtype,
            training=training,
            query_block=query_block,
            key_block=key_block,
            value_dim=value_dim,
            **features,
        )

    @property
    def blocks(self) -> tuple[int, int]:
        """Tokens per query block and per key block."""
        return self.query_block, self.key_block
