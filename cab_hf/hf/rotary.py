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
            ``rotate_half``. Heads that are rotated in part, or not at all, keep all channels. A
            module of another library has the answer as ``slow_channels``.
    """
    known = getattr(module, "slow_channels", None)
    if isinstance(known, tuple):
        return known
    config = getattr(module, "config", None)
    rotated_in_part = (
        not _is_rotated(module)
        or getattr(config, "qk_rope_head_dim", None)
        or any(factor != 1 for factor in _partial_factors(config))
    )
    if rotated_in_part or head_dim < LEAST_HEAD_DIM or head_dim % 4:
        return ()
    return _slow_half(type(module).__module__, head_dim)


# models whose layers rotate queries and keys only if they have a sliding window
ROTATED_IN_WINDOWS = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone4_5", "exaone_moe")


def _is_rotated(module: Any) -> bool:
    """Return whether a layer applies rotary embeddings."""
    if getattr(module, "use_rope", True) in (False, 0):
        return False
    config = getattr(module, "config", None)
    if getattr(config, "position_embedding_type", "rope") not in ("rope", "rotary"):
        return False
    family = type(module).__module__.rpartition("modeling_")[2]
    if family not in ROTATED_IN_WINDOWS or getattr(module, "force_rope", False):
        return True
    # EXAONE keeps the window of the model in layers without one
    window = getattr(module, "sliding_window", None)
    return getattr(module, "is_sliding", True) if window is not None else "exaone" in family


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
    if partner not in (1, head_dim // 2):
        return ()
    return halved(head_dim, interleaved=partner == 1)


def halved(head_dim: int, interleaved: bool) -> tuple[int, ...]:
    """Return the slow half of the channels of a head that is rotated as a whole.

    Args:
        head_dim: channels of a head.
        interleaved: whether channel 2 i turns with channel 2 i + 1, as in GPT-J; otherwise channel
            i turns with channel i + head_dim / 2, as in LLaMA.
    """
    if not interleaved or head_dim < LEAST_HEAD_DIM or head_dim % 4:
        return llama_channels(head_dim)
    return tuple(range(head_dim // 2, head_dim))


def llama_channels(head_dim: int) -> tuple[int, ...]:
    """Those of `slow_channels` where channel i turns with channel i + head_dim / 2, as in LLaMA."""
    if head_dim < LEAST_HEAD_DIM or head_dim % 4:
        return ()
    half, quarter = head_dim // 2, head_dim // 4
    return (*range(quarter, half), *range(half + quarter, head_dim))
