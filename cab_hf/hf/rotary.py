"""Which channels of a head are scored where scores are to be cheap: those that turn slowest.

Rotary position embeddings turn pairs of channels, each pair at a frequency of its own. Fast pairs
separate near tokens; what a query and a key far before it have in common is in the slow ones.
Half of the channels, the slow ones, choose nearly the blocks that all of them do.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

from cab_hf.hf.fit import rotations

# 8-bit products take multiples of 32 channels: half of fewer than these saves nothing
LEAST_HEAD_DIM = 64


def slow_channels(module: Any, head_dim: int) -> tuple[int, ...]:
    """The half of a head's channels that rotate slowest, ascending; () where that is not known.

    Args:
        module: an attention layer of transformers. How its model pairs channels is seen by its
            ``rotate_half``, or by that of the module that it names as ``modeling``. Heads that are
            rotated in part, or not at all, keep all channels.
    """
    config = getattr(module, "config", None)
    rotated_in_part = (
        getattr(module, "use_rope", True) in (False, 0)
        or getattr(config, "qk_rope_head_dim", None)
        or any(factor != 1 for factor in _partial_factors(config))
    )
    if rotated_in_part or head_dim < LEAST_HEAD_DIM or head_dim % 4:
        return ()
    modeling = getattr(module, "modeling", type(module).__module__)
    return _slow_half(modeling, head_dim)


def _partial_factors(config: Any) -> list[float]:
    """Every share of a head that is rotated, by the config."""
    parts = [getattr(config, "partial_rotary_factor", None)]
    parts += [each.get("partial_rotary_factor") for each in rotations(config)]
    return [factor for factor in parts if factor is not None]


# looked up once, as every layer needs it in every call; a constant where a model is compiled
@cache
@torch.compiler.assume_constant_result
def _slow_half(module_name: str, head_dim: int) -> tuple[int, ...]:
    rotate_half = getattr(sys.modules.get(module_name), "rotate_half", None)
    if rotate_half is None:
        return ()
    partner = abs(int(rotate_half(torch.arange(float(head_dim), device="cpu"))[0]))
    if partner == head_dim // 2:
        return llama_channels(head_dim)
    return tuple(range(head_dim // 2, head_dim)) if partner == 1 else ()


def llama_channels(head_dim: int) -> tuple[int, ...]:
    """Those of `slow_channels` where channel i turns with channel i + head_dim / 2, as in LLaMA."""
    if head_dim < LEAST_HEAD_DIM or head_dim % 4:
        return ()
    half, quarter = head_dim // 2, head_dim // 4
    return (*range(quarter, half), *range(half + quarter, head_dim))
