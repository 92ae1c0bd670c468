"""Whether settings fit a model: its layers and heads, its positions, and what was calibrated."""

from __future__ import annotations

from typing import Any

from cab_hf.checks import is_whole, warn_once
from cab_hf.config import TABLES, CabConfig, Origin, Table

COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# what models call their layers
LAYERS = ("num_hidden_layers", "decoder_layers")


def counts_of(model_config: Any) -> tuple[int | None, ...]:
    """Return the layers and heads of a transformers config, which settings are compared with."""
    return tuple(number(model_config, name) for name in (*COUNTS, LAYERS[1]))


def origin_of(model_config: Any, length: int, model: str | None = None) -> Origin:
    """The `Origin` of a calibration of the model with this transformers config."""
    text = model_config.get_text_config()
    return Origin(model or name_of(text), *(number(text, name) for name in COUNTS), length)


def require_origin(origin: Origin | None, model_config: Any) -> None:
    """Refuse what was calibrated for a model of other layers or heads than this one's.

    Raises:
        ValueError: naming both.
    """
    if origin is None:
        return
    here = origin_of(model_config, origin.length)
    for there, count in zip(origin[1:4], here[1:4], strict=True):
        if there is not None and count is not None and there != count:
            raise ValueError(
                f"cab_config was calibrated for {origin.model} ({origin.shape}), and {here.model} "
                f"has {here.shape}; calibrate this model with cab_hf.calibrate, or give settings "
                "without tables."
            )


def require_layers(config: CabConfig, model_config: Any) -> None:
    """Refuse layers, and tables of layers and heads, that a model does not have.

    Args:
        model_config: a transformers config; what it does not count is not compared.

    Raises:
        ValueError: naming the field, what is in it, and what the model has.
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
    """Refuse a table of other layers or heads than a model has."""
    here = layers, number(model_config, "num_attention_heads")
    shape = len(table), len(table[0])
    if any(count is not None and count != own for count, own in zip(here, shape, strict=True)):
        parts = [f"{n} {of}" for n, of in zip(here, ("layers", "heads"), strict=True) if n]
        raise ValueError(
            f"CabConfig.{name} has {shape[0]} layers of {shape[1]} heads, and this model has "
            f"{' of '.join(parts)}; calibrate this model, or give settings without tables."
        )


def _require_anchors(config: CabConfig, model_config: Any, layers: int) -> None:
    """Refuse anchors, and a map of heads, that a model of so many layers does not have."""
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
            f"CabConfig.anchors is {config.anchors}, and layer {sparse[0]} is the first sparse "
            "one, and has no anchor before it; add it."
        )


def number(text: Any, name: str) -> int | None:
    """A config's value for all layers; None where they differ or it has none."""
    if getattr(text, f"{name}_per_layer", None) is not None:
        return None
    try:
        value = getattr(text, name, None)
    except RuntimeError:
        # transformers' heterogeneous configs raise for values that differ from layer to layer
        return None
    return value if isinstance(value, int) else None


def rotations(text: Any) -> list[dict[str, Any]]:
    """What a config has of rotary embeddings; some models have others in each kind of layer."""
    shared = getattr(text, "rope_parameters", None) or {}
    return [shared, *(each for each in shared.values() if isinstance(each, dict))]


def positions(model_config: Any) -> int | None:
    """How many tokens the positions in a transformers config reach; None where not known.

    A rotary scaling reaches beyond ``max_position_embeddings`` in configs that count the original.
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
    """Warn, once a process and model, where no prompt a model can read has ``min_length`` tokens.

    Args:
        min_length: of the model's `CabConfig`.
        model_config: a transformers config; one that names no positions sets no bound.
    """
    most = positions(model_config)
    if most is None or most >= min_length:
        return
    name = name_of(model_config)
    warn_once(
        (name, most, min_length),
        f"{name} has {most:,} positions and min_length is {min_length:,}, so 'cab' computes "
        f'exact attention only; set cab_config={{"min_length": {most // 2}}}, or less, to attend '
        "sparsely from so many tokens on.",
    )


def warn_if_too_short(tokens: int, min_length: int, default: int, model_config: Any) -> None:
    """Warn, once a process and model, of a prompt that is too short to be attended sparsely.

    No warning for a ``min_length`` below the ``default``, which was set on purpose, nor where
    `warn_if_never_sparse` has warned.
    """
    most = positions(model_config)
    if tokens >= min_length or min_length < default or (most is not None and most < min_length):
        return
    name = name_of(model_config)
    warn_once(
        (name, "prompt", min_length),
        f"{name} reads {tokens:,} tokens and min_length is {min_length:,}, so 'cab' computes exact "
        'attention here; set cab_config={"min_length": ...} lower to attend shorter prompts '
        "sparsely.",
    )


def warn_if_unused(text_config: Any) -> None:
    """Warn, once a process and model, of a ``cab_config`` that no layer attends by."""
    if text_config.cab_config is None:
        return
    name = name_of(text_config)
    warn_once(
        (name, "cab_config"),
        f"The config of {name} has a cab_config, which nothing uses: the model is loaded without "
        "'cab'. Load it with attn_implementation='cab' (or any other, for no warning), or call "
        "cab_hf.apply_cab(model).",
    )


def layer_index(module: Any) -> int | None:
    """The layer index of an attention module; None for one that serves several or has none."""
    index = getattr(module, "layer_idx", None)
    # -1 where it comes with the call
    return index if is_whole(index, 0) else None


def name_of(model_config: Any) -> str:
    """The last part of a model's name or path, else its type."""
    path = str(getattr(model_config, "_name_or_path", None) or "").rstrip("/")
    return path.rpartition("/")[2] or getattr(model_config, "model_type", None) or "this model"


def softcap(module: Any) -> float | None:
    """What a layer caps its logits at; None where it does not."""
    return getattr(module, "attn_logit_softcapping", None)


def layer_type(module: Any) -> str | None:
    """What the model's config calls this layer, where it names its layers."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = layer_index(module)
    return types[index] if types and index is not None and index < len(types) else None
