"""Checks that settings fit the layers, heads and positions of a model."""

from __future__ import annotations

from typing import Any

from cab_hf.checks import is_whole_number, warn_once
from cab_hf.config import TABLE_FIELDS, CabConfig, HeadTable, Origin

# names of the numbers of layers, query heads and KV heads in configs of transformers
COUNT_FIELDS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# names of the number of layers in configs of transformers
LAYER_COUNT_FIELDS = ("num_hidden_layers", "decoder_layers")


def read_model_counts(model_config: Any) -> tuple[int | None, ...]:
    """Return the numbers of layers, query heads, KV heads and decoder layers of a model.

    A number is None if it differs between layers or is not in the config.

    Args:
        model_config: a transformers config.
    """
    return tuple(
        read_int_field(model_config, field_name)
        for field_name in (*COUNT_FIELDS, LAYER_COUNT_FIELDS[1])
    )


def make_origin(model_config: Any, document_tokens: int, model_name: str | None = None) -> Origin:
    """Return the `Origin` of a calibration.

    Args:
        model_config: transformers config of the calibrated model.
        document_tokens: length of the calibration documents, in tokens.
        model_name: name of the model; None to read the name from the config.
    """
    text_config = model_config.get_text_config()
    num_layers, num_heads, num_kv_heads = (
        read_int_field(text_config, field_name) for field_name in COUNT_FIELDS
    )
    return Origin(
        model=model_name or model_name_of(text_config),
        layers=num_layers,
        heads=num_heads,
        kv_heads=num_kv_heads,
        length=document_tokens,
    )


def require_origin(origin: Origin | None, model_config: Any) -> None:
    """Raise a ValueError for a calibration of a model with other numbers of layers or heads.

    Args:
        origin: origin of the calibration; None for settings without a calibration.
        model_config: a transformers config.

    Raises:
        ValueError: if the numbers of layers or heads differ. The message names both models.
    """
    if origin is None:
        return
    model_origin = make_origin(model_config, origin.length)
    for calibrated_count, model_count in zip(origin[1:4], model_origin[1:4], strict=True):
        is_known = calibrated_count is not None and model_count is not None
        if is_known and calibrated_count != model_count:
            raise ValueError(
                f"cab_config was calibrated for {origin.model} ({origin.shape_text}), and "
                f"{model_origin.model} has {model_origin.shape_text}. Calibrate this model with "
                "cab_hf.calibrate, or use settings without tables."
            )


def require_layers(config: CabConfig, model_config: Any) -> None:
    """Raise a ValueError for layer indices and tables that do not fit a model.

    Args:
        config: settings of the model.
        model_config: a transformers config. Numbers that are not in the config are not compared.

    Raises:
        ValueError: if a field does not fit. The message names the field and both numbers.
    """
    layer_counts = [getattr(model_config, field_name, None) for field_name in LAYER_COUNT_FIELDS]
    num_layers = max(filter(is_whole_number, layer_counts), default=None)
    for layer in config.dense_layers:
        if num_layers is not None and layer >= num_layers:
            raise ValueError(
                f"CabConfig.dense_layers has {layer}; this model has layers 0 to {num_layers - 1}."
            )
    for field_name in TABLE_FIELDS:
        table = getattr(config, field_name)
        if isinstance(table, tuple) and table:
            _require_table_shape(field_name, table, num_layers, model_config)
    if num_layers is not None and config.predictor == "cascade":
        _require_anchors(config, model_config, num_layers)


def _require_table_shape(
    field_name: str, table: HeadTable, num_layers: int | None, model_config: Any
) -> None:
    """Raise a ValueError if a table does not have the layers and heads of a model.

    Args:
        field_name: field of `CabConfig` that contains the table.
        table: table [layers][heads].
        num_layers: number of layers of the model; None if not known.
        model_config: a transformers config.
    """
    model_shape = num_layers, read_int_field(model_config, "num_attention_heads")
    table_shape = len(table), len(table[0])
    counts_of_model_and_table = zip(model_shape, table_shape, strict=True)
    if any(
        model_count is not None and model_count != table_count
        for model_count, table_count in counts_of_model_and_table
    ):
        counts_and_units = zip(model_shape, ("layers", "heads"), strict=True)
        shape_text = " of ".join(
            f"{model_count} {unit}" for model_count, unit in counts_and_units if model_count
        )
        raise ValueError(
            f"CabConfig.{field_name} has {table_shape[0]} layers of {table_shape[1]} heads, and "
            f"this model has {shape_text}. Calibrate this model, or use settings without tables."
        )


def _require_anchors(config: CabConfig, model_config: Any, num_layers: int) -> None:
    """Raise a ValueError if ``anchors`` do not fit a model.

    Args:
        config: settings of the model.
        model_config: a transformers config.
        num_layers: number of layers of the model.
    """
    last_anchor = config.anchors[-1]
    if last_anchor >= num_layers:
        raise ValueError(
            f"CabConfig.anchors has {last_anchor}; this model has layers 0 to {num_layers - 1}."
        )
    layer_types = getattr(model_config, "layer_types", None) or ["full_attention"] * num_layers
    sparse_layers = [
        layer
        for layer, layer_type_name in enumerate(layer_types)
        if layer_type_name == "full_attention" and layer not in config.dense_layers
    ]
    if sparse_layers and sparse_layers[0] not in config.anchors:
        raise ValueError(
            f"CabConfig.anchors must contain the first sparse layer {sparse_layers[0]}, got "
            f"{config.anchors}. Add layer {sparse_layers[0]}."
        )


def read_int_field(model_config: Any, field_name: str) -> int | None:
    """Return the int field ``field_name`` of a transformers config.

    Returns None if the number differs between layers, or if the config does not have the field.
    """
    if getattr(model_config, f"{field_name}_per_layer", None) is not None:
        return None
    try:
        field_value = getattr(model_config, field_name, None)
    except RuntimeError:
        # heterogeneous configs of transformers raise for values that differ between layers
        return None
    return field_value if isinstance(field_value, int) else None


def rope_parameter_dicts(model_config: Any) -> list[dict[str, Any]]:
    """Return ``rope_parameters`` of a config, followed by the parameters of each layer type in it.

    Args:
        model_config: a transformers config.
    """
    rope_parameters = getattr(model_config, "rope_parameters", None) or {}
    return [
        rope_parameters,
        *(
            layer_type_parameters
            for layer_type_parameters in rope_parameters.values()
            if isinstance(layer_type_parameters, dict)
        ),
    ]


def max_positions(model_config: Any) -> int | None:
    """Return the longest supported sequence of a model, in tokens; None if not known.

    The result includes rotary scaling. In some configs, ``max_position_embeddings`` does not.

    Args:
        model_config: a transformers config.
    """
    text_config = model_config.get_text_config()
    unscaled_positions = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(unscaled_positions, int) or unscaled_positions <= 0:
        return None
    scaled_positions = [
        int(
            rope_parameters["factor"]
            * (rope_parameters.get("original_max_position_embeddings") or unscaled_positions)
        )
        for rope_parameters in rope_parameter_dicts(text_config)
        if rope_parameters.get("factor")
    ]
    return max([unscaled_positions, *scaled_positions])


def warn_if_never_sparse(min_length: int, model_config: Any) -> None:
    """Warn once per process and model if ``min_length`` exceeds the positions of the model.

    Args:
        min_length: `CabConfig.min_length` of the model, in tokens.
        model_config: a transformers config. There is no warning if the number of positions is not
            known.
    """
    num_positions = max_positions(model_config)
    if num_positions is None or num_positions >= min_length:
        return
    model_name = model_name_of(model_config)
    warn_once(
        (model_name, num_positions, min_length),
        f"{model_name} has {num_positions:,} positions and min_length is {min_length:,}, so 'cab' "
        f'computes exact attention only. Set cab_config={{"min_length": {num_positions // 2}}} or '
        "less for sparse attention to prompts of this length and longer.",
    )


def warn_if_too_short(
    num_tokens: int, min_length: int, default_min_length: int, model_config: Any
) -> None:
    """Warn once per process and model about a prompt that is too short for sparse attention.

    There is no warning if ``min_length`` is below ``default_min_length``, because the user has then
    set ``min_length``. There is also no warning if `warn_if_never_sparse` has warned.

    Args:
        num_tokens: length of the prompt, in tokens.
        min_length: `CabConfig.min_length` of the model, in tokens.
        default_min_length: default of ``min_length``, in tokens.
        model_config: a transformers config.
    """
    num_positions = max_positions(model_config)
    is_never_sparse = num_positions is not None and num_positions < min_length
    if num_tokens >= min_length or min_length < default_min_length or is_never_sparse:
        return
    model_name = model_name_of(model_config)
    warn_once(
        (model_name, "prompt", min_length),
        f"{model_name} reads {num_tokens:,} tokens and min_length is {min_length:,}, so 'cab' "
        'computes exact attention here. Lower cab_config={"min_length": ...} for sparse attention '
        "to shorter prompts.",
    )


def warn_if_unused(text_config: Any) -> None:
    """Warn once per process and model if a config has a ``cab_config`` that no layer uses."""
    if text_config.cab_config is None:
        return
    model_name = model_name_of(text_config)
    warn_once(
        (model_name, "cab_config"),
        f"The config of {model_name} has a cab_config, which nothing uses: the model is loaded "
        "without 'cab'. Load it with attn_implementation='cab', or call cab_hf.apply_cab(model). "
        "Any other attn_implementation turns this warning off.",
    )


def layer_index(module: Any) -> int | None:
    """Return the layer index of an attention module.

    Returns None if several layers share the module, or if the module has no index.
    """
    layer_idx = getattr(module, "layer_idx", None)
    # the index is -1 in a module that receives its layer index in each call
    return layer_idx if is_whole_number(layer_idx, 0) else None


def model_name_of(model_config: Any) -> str:
    """Return the name of a model for messages: the end of its path, or its model type.

    Args:
        model_config: a transformers config.
    """
    model_path = str(getattr(model_config, "_name_or_path", None) or "").rstrip("/")
    return (
        model_path.rpartition("/")[2] or getattr(model_config, "model_type", None) or "this model"
    )


def softcap(module: Any) -> float | None:
    """Return the soft cap of the logits of an attention module; None without a soft cap."""
    return getattr(module, "attn_logit_softcapping", None)


def layer_type(module: Any) -> str | None:
    """Return the type of an attention module, such as "sliding_attention".

    Returns None if the config has no ``layer_types``, or if the module has no index.
    """
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    layer_idx = layer_index(module)
    return (
        layer_types[layer_idx]
        if layer_types and layer_idx is not None and layer_idx < len(layer_types)
        else None
    )
