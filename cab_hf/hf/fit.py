"""Checks that settings fit a model: its layers and heads, its positions, and its calibration."""

from __future__ import annotations

from typing import Any

from cab_hf.checks import is_whole, warn_once
from cab_hf.config import TABLES, CabConfig, Origin, Table

COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# names of the number of layers in configs
LAYERS = ("num_hidden_layers", "decoder_layers")


def counts_of(model_config: Any) -> tuple[int | None, ...]:
    """Return the numbers of layers and heads of a transformers config, to compare with settings."""
    return tuple(number(model_config, name) for name in (*COUNTS, LAYERS[1]))


def origin_of(model_config: Any, length: int, model: str | None = None) -> Origin:
    """Return the `Origin` of a calibration of the model with this transformers config."""
    text = model_config.get_text_config()
    return Origin(model or name_of(text), *(number(text, name) for name in COUNTS), length)


def require_origin(origin: Origin | None, model_config: Any) -> None:
    """Refuse a calibration of a model with other layers or heads.

    Args:
        origin: origin of the calibration; None for settings without a calibration.
        model_config: a transformers config.

    Raises:
        ValueError: if the numbers of layers or heads differ. The message names both models.
    """
    if origin is None:
        return
    here = origin_of(model_config, origin.length)
    for there, count in zip(origin[1:4], here[1:4], strict=True):
        if there is not None and count is not None and there != count:
            raise ValueError(
                f"cab_config was calibrated for {origin.model} ({origin.shape}), and {here.model} "
                f"has {here.shape}. Calibrate this model with cab_hf.calibrate, or use settings "
                "without tables."
            )


def require_layers(config: CabConfig, model_config: Any) -> None:
    """Refuse layer indices and tables that do not fit the layers and heads of a model.

    Args:
        config: settings of the model.
        model_config: a transformers config. Numbers that it does not have are not compared.

    Raises:
        ValueError: if a field does not fit. The message names the field and both numbers.
    """
    counts = [n for n in [getattr(model_config, name, None) for name in LAYERS] if is_whole(n)]
    for layer in config.dense_layers:
        if counts and layer >= max(counts):
            raise ValueError(
                f"CabConfig.dense_layers has {layer}; this model has layers 0 to {max(counts) - 1}."
            )
    layers = max(counts, default=None)
    for name in TABLES:
        table = getattr(config, name)
        if isinstance(table, tuple) and table:
            _require_shape(name, table, layers, model_config)
    if counts and config.predictor == "cascade":
        _require_anchors(config, model_config, max(counts))


def _require_shape(name: str, table: Table, layers: int | None, model_config: Any) -> None:
    """Raise a ValueError if a table does not have the layers and heads of a model."""
    here = layers, number(model_config, "num_attention_heads")
    shape = len(table), len(table[0])
    if any(count is not None and count != own for count, own in zip(here, shape, strict=True)):
        parts = [f"{n} {of}" for n, of in zip(here, ("layers", "heads"), strict=True) if n]
        raise ValueError(
            f"CabConfig.{name} has {shape[0]} layers of {shape[1]} heads, and this model has "
            f"{' of '.join(parts)}. Calibrate this model, or use settings without tables."
        )


def _require_anchors(config: CabConfig, model_config: Any, layers: int) -> None:
    """Raise a ValueError if ``anchors`` do not fit a model with this number of ``layers``."""
    if config.anchors[-1] >= layers:
        raise ValueError(
            f"CabConfig.anchors has {config.anchors[-1]}; this model has layers 0 to {layers - 1}."
        )
    kinds = getattr(model_config, "layer_types", None) or ["full_attention"] * layers
    sparse = [
        layer
        for layer, kind in enumerate(kinds)
        if kind == "full_attention" and layer not in config.dense_layers
    ]
    if sparse and sparse[0] not in config.anchors:
        raise ValueError(
            f"CabConfig.anchors must contain the first sparse layer {sparse[0]}, got "
            f"{config.anchors}. Add it."
        )


def number(text: Any, name: str) -> int | None:
    """Return an int of a config; None if layers differ or the config has no such field."""
    if getattr(text, f"{name}_per_layer", None) is not None:
        return None
    try:
        value = getattr(text, name, None)
    except RuntimeError:
        # heterogeneous configs of transformers raise for values that differ between layers
        return None
    return value if isinstance(value, int) else None


def rotations(text: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters of a config: shared ones, then those of each layer type."""
    shared = getattr(text, "rope_parameters", None) or {}
    return [shared, *(each for each in shared.values() if isinstance(each, dict))]


def positions(model_config: Any) -> int | None:
    """Return the number of positions of a transformers config; None if not known.

    Rotary scaling can exceed ``max_position_embeddings``, which some configs state before scaling.
    """
    text = model_config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return None
    stretched = [
        int(each["factor"] * (each.get("original_max_position_embeddings") or most))
        for each in rotations(text)
        if each.get("factor")
    ]
    return max([most, *stretched])


def warn_if_never_sparse(min_length: int, model_config: Any) -> None:
    """Warn once per process and model if ``min_length`` exceeds the positions of the model.

    Args:
        min_length: `CabConfig.min_length` of the model, in tokens.
        model_config: a transformers config. Without a number of positions there is no warning.
    """
    most = positions(model_config)
    if most is None or most >= min_length:
        return
    name = name_of(model_config)
    warn_once(
        (name, most, min_length),
        f"{name} has {most:,} positions and min_length is {min_length:,}, so 'cab' computes "
        f'exact attention only. Set cab_config={{"min_length": {most // 2}}} or less for sparse '
        "attention to prompts of this length and longer.",
    )


def warn_if_too_short(tokens: int, min_length: int, default: int, model_config: Any) -> None:
    """Warn once per process and model about a prompt that is too short for sparse attention.

    There is no warning if ``min_length`` is below the ``default``, because the user has set it.
    There is also no warning if `warn_if_never_sparse` has warned.

    Args:
        tokens: length of the prompt, in tokens.
        min_length: `CabConfig.min_length` of the model, in tokens.
        default: default of ``min_length``, in tokens.
        model_config: a transformers config.
    """
    most = positions(model_config)
    if tokens >= min_length or min_length < default or (most is not None and most < min_length):
        return
    name = name_of(model_config)
    warn_once(
        (name, "prompt", min_length),
        f"{name} reads {tokens:,} tokens and min_length is {min_length:,}, so 'cab' computes exact "
        'attention here. Lower cab_config={"min_length": ...} for sparse attention to shorter '
        "prompts.",
    )


def warn_if_unused(text_config: Any) -> None:
    """Warn once per process and model about a ``cab_config`` that no layer uses."""
    if text_config.cab_config is None:
        return
    name = name_of(text_config)
    warn_once(
        (name, "cab_config"),
        f"The config of {name} has a cab_config, which nothing uses: the model is loaded without "
        "'cab'. Load it with attn_implementation='cab', or call cab_hf.apply_cab(model). Any other "
        "attn_implementation turns this warning off.",
    )


def layer_index(module: Any) -> int | None:
    """Return the layer index of an attention module; None if shared by layers or not set."""
    index = getattr(module, "layer_idx", None)
    # -1 if each call passes the index
    return index if is_whole(index, 0) else None


def name_of(model_config: Any) -> str:
    """Return the last part of a model's name or path, or else its model type."""
    path = str(getattr(model_config, "_name_or_path", None) or "").rstrip("/")
    return path.rpartition("/")[2] or getattr(model_config, "model_type", None) or "this model"


def softcap(module: Any) -> float | None:
    """Return the soft cap of a layer's logits; None without a soft cap."""
    return getattr(module, "attn_logit_softcapping", None)


def layer_type(module: Any) -> str | None:
    """Return the type of a layer in ``config.layer_types``; None if the config has none."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = layer_index(module)
    return types[index] if types and index is not None and index < len(types) else None
