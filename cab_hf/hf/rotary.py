"""The channels of a head that approximate scores read: those with the lowest rotary frequency.

Rotary position embeddings rotate pairs of channels, each pair with its own frequency. Fast pairs
distinguish tokens at short distances. Slow pairs contain the similarity of distant queries and
keys. The slow half of the channels selects nearly the same blocks as all channels.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

from cab_hf.hf.fit import rotations

# channels; 8-bit products take multiples of 32 channels, so half of a smaller head saves nothing
LEAST_HEAD_DIM = 64


def slow_channels(module: Any, head_dim: int) -> tuple[int, ...]:
    """Return the indices of the half of a head's channels with the lowest frequencies, ascending.

    Returns () if the channels are not known, or if the head is not rotated as a whole. All channels
    are then scored.

    Args:
        module: an attention layer of transformers. The function ``rotate_half`` of its model shows
            which channels form a pair. Layers of other libraries have an attribute
            ``slow_channels``.
        head_dim: channels of a head.
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


# model types whose layers rotate queries and keys only in layers with a sliding window
ROTATED_IN_WINDOWS = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone4_5", "exaone_moe")


def _is_rotated(module: Any) -> bool:
    """Return True if a layer applies rotary embeddings."""
    if getattr(module, "use_rope", True) in (False, 0):
        return False
    config = getattr(module, "config", None)
    if getattr(config, "position_embedding_type", "rope") not in ("rope", "rotary"):
        return False
    family = type(module).__module__.rpartition("modeling_")[2]
    if family not in ROTATED_IN_WINDOWS or getattr(module, "force_rope", False):
        return True
    # EXAONE sets the attribute also in layers without a sliding window
    window = getattr(module, "sliding_window", None)
    return getattr(module, "is_sliding", True) if window is not None else "exaone" in family


def _partial_factors(config: Any) -> list[float]:
    """Return every share of a head's channels that the config rotates."""
    parts = [getattr(config, "partial_rotary_factor", None)]
    parts += [each.get("partial_rotary_factor") for each in rotations(config)]
    return [factor for factor in parts if factor is not None]


# cached because every layer needs the result in every call; a constant under torch.compile
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
        interleaved: True if channels 2 i and 2 i + 1 form a pair, as in GPT-J; False if channels i
            and i + head_dim / 2 form a pair, as in LLaMA.
    """
    if not interleaved or head_dim < LEAST_HEAD_DIM or head_dim % 4:
        return llama_channels(head_dim)
    return tuple(range(head_dim // 2, head_dim))


def llama_channels(head_dim: int) -> tuple[int, ...]:
    """Return `slow_channels` for pairs of channels i and i + head_dim / 2, as in LLaMA."""
    if head_dim < LEAST_HEAD_DIM or head_dim % 4:
        return ()
    half, quarter = head_dim // 2, head_dim // 4
    return (*range(quarter, half), *range(half + quarter, head_dim))
