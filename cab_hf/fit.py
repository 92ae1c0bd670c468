"""Whether settings fit a model: how far its positions reach."""

from __future__ import annotations

import warnings
from typing import Any

# (model, positions, min_length) that a warning has named in this process
_warned: set[tuple[str, int, int]] = set()


def positions(model_config: Any) -> int | None:
    """How many tokens the positions in a transformers config reach; None where it does not say.

    A rotary scaling reaches beyond ``max_position_embeddings`` in configs that count the original.
    """
    text = model_config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return None
    rotary = getattr(text, "rope_parameters", None) or {}
    # some models have others in each kind of layer
    kinds = [each for each in rotary.values() if isinstance(each, dict)] or [rotary]
    stretched = [
        int(each["factor"] * (each.get("original_max_position_embeddings") or most))
        for each in kinds
        if each.get("factor")
    ]
    return max([most, *stretched])


def warn_if_never_sparse(min_length: int, model_config: Any) -> None:
    """Warn, once a process and model, where no prompt a model can read has ``min_length`` tokens.

    Args:
        min_length: of the model's `CabConfig`.
        model_config: a transformers config; one that names no positions sets no bound.
    """
    most = positions(model_config)
    if most is None or most >= min_length:
        return
    told = (name_of(model_config), most, min_length)
    if told in _warned:
        return
    _warned.add(told)
    warnings.warn(
        f"{told[0]} has {most:,} positions and min_length is {min_length:,}, so 'cab' computes "
        f'exact attention only; set cab_config={{"min_length": {most // 2}}}, or less, to attend '
        "sparsely from so many tokens on.",
        UserWarning,
        stacklevel=2,
    )


def name_of(model_config: Any) -> str:
    """The last part of a model's name or path, else its type."""
    path = str(getattr(model_config, "_name_or_path", None) or "").rstrip("/")
    return path.rpartition("/")[2] or getattr(model_config, "model_type", None) or "this model"
