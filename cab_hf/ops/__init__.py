"""One file an op: its kernels and the function that launches them; `reference` defines them all."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

# looked up once: torch.compile cannot trace a search for packages
HAS_TRITON = find_spec("triton") is not None


@dataclass(frozen=True)
class Workload:
    """What kernels of attention must be able to run.

    Attributes:
        device: torch device type, e.g. ``"cuda"``.
        training: whether gradients flow through attention.
        query_block, key_block: of the plan.
        sinks: whether heads have sinks, and a log-sum-exp is needed.
        softcap: whether logits are soft-capped.
    """

    device: str
    head_dim: int
    dtype: torch.dtype
    training: bool
    query_block: int
    key_block: int
    sinks: bool = False
    softcap: bool = False

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[int, int], **features: bool
    ) -> Workload:
        """Of these tensors under a plan of such (query, key) blocks, with ``sinks`` and so on."""
        training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return cls(q.device.type, q.shape[-1], q.dtype, training, *blocks, **features)

    @property
    def blocks(self) -> tuple[int, int]:
        """(query, key) block sizes."""
        return self.query_block, self.key_block
