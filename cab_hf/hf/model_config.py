"""The CabConfig in a transformers config: parsed once, and compared with the model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from cab_hf.checks import MAX_INT32
from cab_hf.config import CAB_FRC, FRC_PREDICTOR, IMPLEMENTATION_NAMES, CabConfig, Origin
from cab_hf.hf.fit import read_model_counts, require_layers, require_origin, warn_if_never_sparse


class _ParsedSettings(NamedTuple):
    """The result of the last call of `_parse_settings`.

    Attributes:
        config_fields: copy of the dict that was parsed.
        is_published: argument ``is_published`` of that call.
        settings: result of that call.
    """

    config_fields: dict[str, Any]
    is_published: bool
    settings: CabConfig


# one element, which is the cached result; every layer of a model passes the same dict
_parsed_settings_cache: list[_ParsedSettings | None] = [None]


class _FitCheck(NamedTuple):
    """The last successful check that settings fit a model.

    Attributes:
        model_config: weak reference to the transformers config of the model, which has no hash.
        settings: settings that fit the model.
        model_counts: result of `read_model_counts` at the time of the check.
    """

    model_config: weakref.ref[Any]
    settings: CabConfig
    model_counts: tuple[int | None, ...]


# id of a transformers config -> its last successful check
_fit_checks_cache: dict[int, _FitCheck] = {}
# transformers configs that temporarily have fewer layers than their model
_truncated_configs: list[Any] = []


def cab_config_of(model_config: Any, implementation: str | None = None) -> CabConfig:
    """Return the CabConfig in a transformers config, or the defaults without a ``cab_config``.

    The defaults of "cab_frc" are `CabConfig.published`. A dict without the field ``predictor``
    overrides fields of these defaults. The layers and heads of the model are checked once, and
    again if settings or model change. A compiled model is not checked.

    Args:
        model_config: a transformers config.
        implementation: name of the attention implementation; None to read the name in
            ``model_config``.

    Raises:
        ValueError: if ``cab_config`` is not a CabConfig, does not fit the layers and heads of the
            model, or has another predictor than "frc" with "cab_frc".
    """
    saved_settings = getattr(model_config, "cab_config", None)
    is_published = (
        implementation or getattr(model_config, "_attn_implementation", None)
    ) == CAB_FRC
    settings = _check_predictor(
        _parse_settings({} if saved_settings is None else saved_settings, is_published),
        is_published,
    )
    if not torch.compiler.is_compiling():
        _require_fit(settings, model_config)
    return settings


def require_valid_settings(model_config: Any, new_settings: Any) -> CabConfig | None:
    """Check a new ``cab_config`` before it is set in the config of a model that uses "cab".

    Args:
        model_config: a transformers config. The config is not checked if no model that uses "cab"
            has read it, because its number of layers can still change.
        new_settings: new ``cab_config``; None is not checked.

    Returns:
        The settings; None without a check.

    Raises:
        ValueError: as in `cab_config_of`.
    """
    if (
        new_settings is None
        or _last_fit_check_of(model_config) is None
        or model_config._attn_implementation not in IMPLEMENTATION_NAMES
    ):
        return None
    is_published = model_config._attn_implementation == CAB_FRC
    settings = _check_predictor(_parse_settings(new_settings, is_published), is_published)
    _require_fit(settings, model_config)
    return settings


@contextmanager
def accept_fewer_layers(model_config: Any) -> Iterator[None]:
    """Accept fewer layers in a config inside the context, and restore the number afterwards.

    Drafts of `assistant_early_exit` run the first layers of a model. transformers does not restore
    the number of layers if a draft fails.

    Args:
        model_config: a transformers config.
    """
    cab_config_of(model_config)
    num_layers = model_config.num_hidden_layers
    _truncated_configs.append(model_config)
    try:
        yield
    finally:
        model_config.num_hidden_layers = num_layers
        # compared by identity, because equal configs can be in the list
        config_index = next(
            list_index
            for list_index, truncated_config in enumerate(_truncated_configs)
            if truncated_config is model_config
        )
        del _truncated_configs[config_index]


def _last_fit_check_of(model_config: Any) -> _FitCheck | None:
    """Return the last successful check of a transformers config; None without a check."""
    last_fit_check = _fit_checks_cache.get(id(model_config))
    return (
        None
        if last_fit_check is None or last_fit_check.model_config() is not model_config
        else last_fit_check
    )


def _require_fit(settings: CabConfig, model_config: Any) -> None:
    """Raise a ValueError if settings do not fit a model.

    Returns immediately if the last check of the model had the same settings and succeeded.

    Args:
        settings: settings of the model.
        model_config: a transformers config.
    """
    if any(model_config is truncated_config for truncated_config in _truncated_configs):
        return
    model_counts, last_fit_check = read_model_counts(model_config), _last_fit_check_of(model_config)
    if (
        last_fit_check is not None
        and last_fit_check.settings is settings
        and last_fit_check.model_counts == model_counts
    ):
        return
    require_origin(settings.origin, model_config)
    require_layers(settings, model_config)
    config_id = id(model_config)
    _fit_checks_cache[config_id] = _FitCheck(
        weakref.ref(model_config, lambda _: _forget_config(config_id)), settings, model_counts
    )


def _forget_config(config_id: int) -> None:
    """Remove a deleted config from the cache, unless a newer config has the same ``config_id``."""
    last_fit_check = _fit_checks_cache.get(config_id)
    if last_fit_check is not None and last_fit_check.model_config() is None:
        del _fit_checks_cache[config_id]


def _check_predictor(settings: CabConfig, is_published: bool) -> CabConfig:
    """Return ``settings``, or raise a ValueError if the predictor does not fit the implementation.

    Args:
        settings: settings of the model.
        is_published: True for "cab_frc", which needs predictor "frc".
    """
    if is_published and settings.predictor != FRC_PREDICTOR:
        raise ValueError(
            f"cab_config must have predictor {FRC_PREDICTOR!r} with attn_implementation "
            f"{CAB_FRC!r}, got {settings.predictor!r}. Use CabConfig.published(...), or "
            "attn_implementation 'cab'."
        )
    return settings


def cab_config_in_use(model_config: Any) -> CabConfig:
    """Return `cab_config_of`, and warn if the model has too few positions for sparse attention."""
    settings = cab_config_of(model_config)
    if not torch.compiler.is_compiling():
        warn_if_never_sparse(settings.min_length, model_config)
    return settings


def _parse_settings(saved_settings: Any, is_published: bool) -> CabConfig:
    """Return the settings in the value of a ``cab_config``.

    Args:
        saved_settings: a CabConfig, or a dict of fields.
        is_published: True for the defaults of the published method.
    """
    if isinstance(saved_settings, CabConfig):
        return saved_settings
    if not isinstance(saved_settings, dict):
        return CabConfig.from_dict(saved_settings)
    if torch.compiler.is_compiling():
        field_items = tuple(
            (field_name, _to_hashable(field_value))
            for field_name, field_value in saved_settings.items()
        )
        return _make_constant_config(field_items, is_published)
    last_parsed_settings = _parsed_settings_cache[0]
    # comparing tables is faster than hashing, because Python compares numbers by identity first
    if (
        last_parsed_settings is None
        or last_parsed_settings.config_fields != saved_settings
        or last_parsed_settings.is_published != is_published
    ):
        settings = _config_of_fields(saved_settings, is_published)
        last_parsed_settings = _parsed_settings_cache[0] = _ParsedSettings(
            copy.deepcopy(saved_settings), is_published, settings
        )
    return last_parsed_settings.settings


def _config_of_fields(config_fields: dict[str, Any], is_published: bool) -> CabConfig:
    """Return the settings in a dict of fields.

    Args:
        config_fields: fields of `CabConfig` by name.
        is_published: True for the defaults of the published method.
    """
    if is_published and "predictor" not in config_fields:
        return CabConfig.published(**config_fields)
    return CabConfig.from_dict(config_fields)


def _to_hashable(saved_value: Any) -> Any:
    """Return a value of a field as a hashable value, which is a constant under torch.compile.

    A number that differed in an earlier compilation is symbolic in dynamo. Dynamo turns the number
    into a constant where Python needs a constant, such as the length of a range or a string.
    """
    if isinstance(saved_value, (list, tuple)):
        # floats without a recursive call: a table can have thousands, and tracing a call is slow
        return tuple(
            [
                float.fromhex(table_element.hex())
                if type(table_element) is float
                else _to_hashable(table_element)
                for table_element in saved_value
            ]
        )
    if isinstance(saved_value, float):
        return float.fromhex(saved_value.hex())
    if isinstance(saved_value, dict) and set(saved_value) == set(Origin._fields):
        return tuple(
            [
                (origin_field_name, _to_hashable(field_value))
                for origin_field_name, field_value in saved_value.items()
            ]
        )
    # `CabConfig` rejects larger values
    if (
        isinstance(saved_value, int)
        and not isinstance(saved_value, bool)
        and 0 < saved_value <= MAX_INT32
    ):
        return len(range(saved_value))
    return (
        saved_value
        if saved_value is None or isinstance(saved_value, (str, int))
        else repr(saved_value)
    )


@torch.compiler.assume_constant_result
def _make_constant_config(
    field_items: tuple[tuple[str, Any], ...], is_published: bool
) -> CabConfig:
    """Return the settings in (name, value) pairs of fields, as a constant under torch.compile.

    torch.compile accepts only plain values as arguments of such a function.
    """
    return _config_of_fields(dict(field_items), is_published)
