"""Operators on tensors. Most modules contain the Triton kernels of one op and their launcher.

`reference` defines block selection and attention in plain PyTorch. `decode.reference` defines
sparse decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

# a constant, because torch.compile cannot trace `find_spec`
HAS_TRITON = find_spec("triton") is not None


def has_kernels(x: Tensor) -> bool:
    """Return True if the Triton kernels that select blocks support ``x``.

    Args:
        x: [B, H, N, D], q or k.
    """
    # `launch` imports Triton. This check comes first, so that models on a CPU do not need Triton
    if not x.is_cuda or not HAS_TRITON:
        return False
    from cab_hf.ops import launch

    return launch.unavailable(x) is None


@dataclass(frozen=True)
class Workload:
    """Properties of an attention call that decide which engines support the call.

    Attributes:
        device: Torch device type, e.g. ``"cuda"``.
        head_dim: Channels of q and k.
        dtype: Dtype of q.
        training: True if q, k or v requires a gradient.
        query_block: Tokens per query block of the plan.
        key_block: Tokens per key block of the plan.
        sinks: True if the softmax of each head has one more logit (GPT-OSS). Sinks are applied to
            the output afterwards, so that the engine must return the log-sum-exp.
        softcap: True if logits are soft-capped (Gemma2).
        value_dim: Channels of v; None if v has ``head_dim`` channels.
        num_heads: Query heads; None if the number is unknown.
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
    num_heads: int | None = None

    @classmethod
    def from_tensors(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_sizes: tuple[int, int],
        **optional_features: bool,
    ) -> Workload:
        """Build the workload of an attention call.

        Args:
            q: [B, H, N_q, D].
            k: [B, H_kv, N_k, D].
            v: [B, H_kv, N_k, D_v].
            block_sizes: Tokens per query block and per key block of the plan.
            optional_features: Values of the fields ``sinks`` and ``softcap``; False by default.
        """
        is_training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        value_dim = None if v.shape[-1] == q.shape[-1] else v.shape[-1]
        query_block, key_block = block_sizes
        return cls(
            device=q.device.type,
            head_dim=q.shape[-1],
            dtype=q.dtype,
            training=is_training,
            query_block=query_block,
            key_block=key_block,
            value_dim=value_dim,
            num_heads=q.shape[1],
            **optional_features,
        )

    @property
    def block_sizes(self) -> tuple[int, int]:
        """The block sizes (query_block, key_block) in tokens."""
        return self.query_block, self.key_block
