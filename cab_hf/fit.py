"""Whether settings fit a model: how far its positions reach, and whose calibration it is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# what a warning has named in this process
_warned: set[tuple[Any, ...]] = set()


class Origin(NamedTuple):
    """What a calibration was measured for; None where the model's layers differ or do not say.

    Attributes:
        model: its name.
        layers, heads, kv_heads: how many it has, of heads in every layer.
        length: tokens of the documents that it read.
    """

    model: str
    layers: int | None
    heads: int | None
    kv_heads: int | None
    length: int

    @classmethod
    def of(cls, told: Any) -> Origin:
        """Of its fields by name, as JSON has them.

        Raises:
            ValueError: for fields that are missing, unknown or of another kind.
        """
        if isinstance(told, Origin):
            return told
        # torch.compile has taken a dict apart
        pairs = isinstance(told, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in told)
        fields = dict(told) if pairs or isinstance(told, Mapping) else {}
        if set(fields) == set(cls._fields):
            origin = cls(**fields)
            counts = [x for x in origin[1:4] if x is not None] + [origin.length]
            if isinstance(origin.model, str) and all(type(x) is int and x > 0 for x in counts):
                return origin
        raise ValueError(
            f"CabConfig.origin is {str(told)[:80]!r}; it must be None or a dict of "
            f"{', '.join(cls._fields)}."
        )

    @classmethod
    def found(cls, model_config: Any, length: int, model: str | None = None) -> Origin:
        """That of a calibration of the model with this transformers config."""
        text = model_config.get_text_config()
        return cls(model or name_of(text), *(number(text, name) for name in COUNTS), length)

    @property
    def shape(self) -> str:
        told = zip(self[1:4], ("layers", "heads", "KV heads"), strict=True)
        return ", ".join([f"{count} {what}" for count, what in told if count is not None])


def require_origin(origin: Origin | None, model_config: Any) -> None:
    """Refuse what was calibrated for a model of other layers or heads than this one's.

    Raises:
        ValueError: naming both.
    """
    if origin is None:
        return
    here = Origin.found(model_config, origin.length)
    for there, count in zip(origin[1:4], here[1:4], strict=True):
        if there is not None and count is not None and there != count:
            raise ValueError(
                f"cab_config was calibrated for {origin.model} ({origin.shape}), and {here.model} "
                f"has {here.shape}; calibrate this model with cab_hf.calibrate, or give settings "
                "without tables."
            )


def number(text: Any, name: str) -> int | None:
    """What a config says of all layers alike; None where it does not."""
    if getattr(text, f"{name}_per_layer", None) is not None:
        return None
    try:
        value = getattr(text, name, None)
    except RuntimeError:
        # what differs from layer to layer, transformers' heterogeneous configs refuse to say
        return None
    return value if isinstance(value, int) else None


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
    name = name_of(model_config)
    _warn_once(
        (name, most, min_length),
        f"{name} has {most:,} positions and min_length is {min_length:,}, so 'cab' computes "
        f'exact attention only; set cab_config={{"min_length": {most // 2}}}, or less, to attend '
        "sparsely from so many tokens on.",
    )


def warn_if_too_short(tokens: int, min_length: int, default: int, model_config: Any) -> None:
    """Warn, once a process and model, of a prompt that is too short to be attended sparsely.

    Nothing is said of a ``min_length`` below the ``default``, which somebody has set knowing it,
    nor where `warn_if_never_sparse` has said all.
    """
    most = positions(model_config)
    if tokens >= min_length or min_length < default or (most is not None and most < min_length):
        return
    name = name_of(model_config)
    _warn_once(
        (name, "prompt", min_length),
        f"{name} reads {tokens:,} tokens and min_length is {min_length:,}, so 'cab' computes exact "
        'attention here; set cab_config={"min_length": ...} lower to attend shorter prompts '
        "sparsely.",
    )


def warn_if_unused(text_config: Any) -> None:
    """Warn, once a process and model, of a ``cab_config`` where nobody has asked for "cab"."""
    if text_config.cab_config is None:
        return
    name = name_of(text_config)
    _warn_once(
        (name, "cab_config"),
        f"The config of {name} has a cab_config, which nothing uses: the model is loaded without "
        "'cab'. Load it with attn_implementation='cab' (or any other, for no warning), or call "
        "cab_hf.apply_cab(model).",
    )


def _warn_once(told: tuple[Any, ...], sentence: str) -> None:
    if told not in _warned:
        _warned.add(told)
        warnings.warn(sentence, UserWarning, stacklevel=3)


def name_of(model_config: Any) -> str:
    """The last part of a model's name or path, else its type."""
    path = str(getattr(model_config, "_name_or_path", None) or "").rstrip("/")
    return path.rpartition("/")[2] or getattr(model_config, "model_type", None) or "this model"
