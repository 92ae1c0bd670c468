"""`slow_channels`: the channels of a head with the lowest rotary frequencies.

Rotary position embeddings rotate pairs of channels, each pair with its own frequency. Pairs with
high frequencies distinguish tokens at short distances. Pairs with low frequencies determine the
logits of distant queries and keys. Scores on the half of the channels with the lowest frequencies
therefore select nearly the same blocks as scores on all channels.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

from cab_hf.hf.fit import rope_parameter_dicts

# least number of channels of a head of which half is scored: 8-bit products need multiples of 32
# channels, so half of a smaller head saves nothing
MIN_HALVED_HEAD_DIM = 64


def slow_channels(module: Any, head_dim: int) -> tuple[int, ...]:
    """Return the half of the channels of a head with the lowest rotary frequencies.

    Args:
        module: an attention layer of transformers. The function ``rotate_half`` of its model shows
            which channels form a pair. A layer of another library has an attribute
            ``slow_channels``, which is returned.
        head_dim: number of channels of a head.

    Returns:
        Ascending channel indices; () if the channels are not known, or if the layer does not rotate
        all channels. Predictors then score all channels.
    """
    known_channels = getattr(module, "slow_channels", None)
    if isinstance(known_channels, tuple):
        return known_channels
    model_config = getattr(module, "config", None)
    has_unrotated_channels = (
        not _is_rotated(module)
        or getattr(model_config, "qk_rope_head_dim", None)
        or any(rotary_factor != 1 for rotary_factor in _partial_rotary_factors(model_config))
    )
    if has_unrotated_channels or head_dim < MIN_HALVED_HEAD_DIM or head_dim % 4:
        return ()
    return _slow_channels_of_module(type(module).__module__, head_dim)


# model types that apply rotary embeddings only in layers with a sliding window
MODEL_TYPES_ROTATED_IN_WINDOWS = (
    "afmoe",
    "cohere2",
    "cohere2_moe",
    "exaone4",
    "exaone4_5",
    "exaone_moe",
)


def _is_rotated(module: Any) -> bool:
    """Return True if an attention layer applies rotary embeddings."""
    if getattr(module, "use_rope", True) in (False, 0):
        return False
    model_config = getattr(module, "config", None)
    if getattr(model_config, "position_embedding_type", "rope") not in ("rope", "rotary"):
        return False
    model_type = type(module).__module__.rpartition("modeling_")[2]
    if model_type not in MODEL_TYPES_ROTATED_IN_WINDOWS or getattr(module, "force_rope", False):
        return True
    # EXAONE sets ``sliding_window`` also in layers without a window, where ``is_sliding`` is False
    sliding_window = getattr(module, "sliding_window", None)
    return (
        getattr(module, "is_sliding", True)
        if sliding_window is not None
        else "exaone" in model_type
    )


def _partial_rotary_factors(model_config: Any) -> list[float]:
    """Return every ``partial_rotary_factor`` of a config: the rotated share of the channels."""
    rotary_factors = [getattr(model_config, "partial_rotary_factor", None)]
    rotary_factors += [
        rope_parameters.get("partial_rotary_factor")
        for rope_parameters in rope_parameter_dicts(model_config)
    ]
    return [rotary_factor for rotary_factor in rotary_factors if rotary_factor is not None]


# cached, because every layer needs the result in every call; a constant under torch.compile
@cache
@torch.compiler.assume_constant_result
def _slow_channels_of_module(module_name: str, head_dim: int) -> tuple[int, ...]:
    """Return `slow_channels` of a head whose channels are all rotated.

    Args:
        module_name: Python module of the model, whose function ``rotate_half`` is called.
        head_dim: number of channels of a head.
    """
    rotate_half = getattr(sys.modules.get(module_name), "rotate_half", None)
    if rotate_half is None:
        return ()
    partner_of_channel_0 = abs(int(rotate_half(torch.arange(float(head_dim), device="cpu"))[0]))
    if partner_of_channel_0 not in (1, head_dim // 2):
        return ()
    return slow_channels_of_known_pairs(head_dim, is_interleaved=partner_of_channel_0 == 1)


def slow_channels_of_known_pairs(head_dim: int, is_interleaved: bool) -> tuple[int, ...]:
    """Return `slow_channels` of a head whose channels are all rotated, for known pairs.

    Args:
        head_dim: number of channels of a head.
        is_interleaved: True if channels 2 i and 2 i + 1 form a pair, as in GPT-J; False if channels
            i and i + head_dim / 2 form a pair, as in LLaMA.
    """
    if not is_interleaved or head_dim < MIN_HALVED_HEAD_DIM or head_dim % 4:
        return slow_channels_of_llama(head_dim)
    return tuple(range(head_dim // 2, head_dim))


def slow_channels_of_llama(head_dim: int) -> tuple[int, ...]:
    """Return `slow_channels` of a head with pairs of channels i and i + head_dim / 2."""
    if head_dim < MIN_HALVED_HEAD_DIM or head_dim % 4:
        return ()
    half_dim, quarter_dim = head_dim // 2, head_dim // 4
    return (*range(quarter_dim, half_dim), *range(half_dim + quarter_dim, head_dim))
