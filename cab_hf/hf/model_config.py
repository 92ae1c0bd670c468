"""The CabConfig in a transformers config: parsed once, and compared with the model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from cab_hf.checks import MAX_COUNT
from cab_hf.config import CAB_FRC, FRC_PREDICTOR, NAMES, CabConfig, Origin
from cab_hf.hf.fit import model_counts, require_layers, require_origin, warn_if_never_sparse


class _ParsedSettings(NamedTuple):
    """The result of the last call of `_parse`.

    Attributes:
        fields: copy of the dict that was parsed.
        published: argument ``published`` of that call.
        settings: result of that call.
    """

    fields: dict[str, Any]
    published: bool
    settings: CabConfig


# one element, which is the cached result; every layer of a model passes the same dict
_parse_cache: list[_ParsedSettings | None] = [None]


class _FitCheck(NamedTuple):
    """The last successful check that settings fit a model.

    Attributes:
        config: weak reference to the transformers config of the model, which has no hash.
        settings: settings that fit the model.
        counts: result of `model_counts` at the time of the check.
    """

    config: weakref.ref[Any]
    settings: CabConfig
    counts: tuple[int | None, ...]


# id of a transformers config -> its last successful check
_fit_checks_cache: dict[int, _FitCheck] = {}
# transformers configs that temporarily have fewer layers than their model
_truncated_configs: list[Any] = []


def cab_config_of(config: Any, implementation: str | None = None) -> CabConfig:
    """Return the CabConfig in a transformers config, or the defaults without a ``cab_config``.

    The defaults of "cab_frc" are `CabConfig.published`. A dict without the field ``predictor``
    overrides fields of these defaults. The layers and heads of the model are checked once, and
    again if settings or model change. A compiled model is not checked.

    Args:
        config: a transformers config.
        implementation: name of the attention implementation; None to read the name in ``config``.

    Raises:
        ValueError: if ``cab_config`` is not a CabConfig, does not fit the layers and heads of the
            model, or has another predictor than "frc" with "cab_frc".
    """
    saved_settings = getattr(config, "cab_config", None)
    is_published = (implementation or getattr(config, "_attn_implementation", None)) == CAB_FRC
    settings = _check_predictor(
        _parse({} if saved_settings is None else saved_settings, is_published), is_published
    )
    if not torch.compiler.is_compiling():
        _require_fit(settings, config)
    return settings


def require_valid_settings(config: Any, new_settings: Any) -> CabConfig | None:
    """Check a new ``cab_config`` before it is set in the config of a model that uses "cab".

    Args:
        config: a transformers config. The config is not checked if no model that uses "cab" has
            read it, because its number of layers can still change.
        new_settings: new ``cab_config``; None is not checked.

    Returns:
        The settings; None without a check.

    Raises:
        ValueError: as in `cab_config_of`.
    """
    if (
        new_settings is None
        or _last_check_of(config) is None
        or config._attn_implementation not in NAMES
    ):
        return None
    is_published = config._attn_implementation == CAB_FRC
    settings = _check_predictor(_parse(new_settings, is_published), is_published)
    _require_fit(settings, config)
    return settings


@contextmanager
def accept_fewer_layers(config: Any) -> Iterator[None]:
    """Accept fewer layers in ``config`` inside the context, and restore the number afterwards.

    Drafts of `assistant_early_exit` run the first layers of a model. transformers does not restore
    the number of layers if a draft fails.

    Args:
        config: a transformers config.
    """
    cab_config_of(config)
    num_layers = config.num_hidden_layers
    _truncated_configs.append(config)
    try:
        yield
    finally:
        config.num_hidden_layers = num_layers
        # compared by identity, because equal configs can be in the list
        index = next(
            i for i, truncated_config in enumerate(_truncated_configs) if truncated_config is config
        )
        del _truncated_configs[index]


def _last_check_of(config: Any) -> _FitCheck | None:
    """Return the last successful check of a transformers config; None without a check."""
    last_check = _fit_checks_cache.get(id(config))
    return None if last_check is None or last_check.config() is not config else last_check


def _require_fit(settings: CabConfig, config: Any) -> None:
    """Raise a ValueError if settings do not fit a model.

    Returns immediately if the last check of the model had the same settings and succeeded.

    Args:
        settings: settings of the model.
        config: a transformers config.
    """
    if any(config is truncated_config for truncated_config in _truncated_configs):
        return
    counts, last_check = model_counts(config), _last_check_of(config)
    if last_check is not None and last_check.settings is settings and last_check.counts == counts:
        return
    require_origin(settings.origin, config)
    require_layers(settings, config)
    key = id(config)
    _fit_checks_cache[key] = _FitCheck(
        weakref.ref(config, lambda _: _forget_config(key)), settings, counts
    )


def _forget_config(key: int) -> None:
    """Remove a deleted config from the cache, unless a newer config has the same id ``key``."""
    last_check = _fit_checks_cache.get(key)
    if last_check is not None and last_check.config() is None:
        del _fit_checks_cache[key]


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


def cab_config_in_use(config: Any) -> CabConfig:
    """Return `cab_config_of`, and warn if the model has too few positions for sparse attention."""
    settings = cab_config_of(config)
    if not torch.compiler.is_compiling():
        warn_if_never_sparse(settings.min_length, config)
    return settings


def _parse(saved_settings: Any, is_published: bool) -> CabConfig:
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
        field_items = tuple((name, _to_hashable(value)) for name, value in saved_settings.items())
        return _make_constant_config(field_items, is_published)
    last_result = _parse_cache[0]
    # comparing tables is faster than hashing, because Python compares numbers by identity first
    if (
        last_result is None
        or last_result.fields != saved_settings
        or last_result.published != is_published
    ):
        settings = _config_of_fields(saved_settings, is_published)
        last_result = _parse_cache[0] = _ParsedSettings(
            copy.deepcopy(saved_settings), is_published, settings
        )
    return last_result.settings


def _config_of_fields(fields: dict[str, Any], is_published: bool) -> CabConfig:
    """Return the settings in a dict of fields.

    Args:
        fields: fields of `CabConfig` by name.
        is_published: True for the defaults of the published method.
    """
    if is_published and "predictor" not in fields:
        return CabConfig.published(**fields)
    return CabConfig.from_dict(fields)


def _to_hashable(value: Any) -> Any:
    """Return a value of a field as a hashable value, which is a constant under torch.compile.

    A number that differed in an earlier compilation is symbolic in dynamo. Dynamo turns the number
    into a constant where Python needs a constant, such as the length of a range or a string.
    """
    if isinstance(value, (list, tuple)):
        # floats without a recursive call: a table can have thousands, and tracing a call is slow
        return tuple(
            [
                float.fromhex(element.hex()) if type(element) is float else _to_hashable(element)
                for element in value
            ]
        )
    if isinstance(value, float):
        return float.fromhex(value.hex())
    if isinstance(value, dict) and set(value) == set(Origin._fields):
        return tuple([(name, _to_hashable(field_value)) for name, field_value in value.items()])
    # `CabConfig` rejects larger values
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT:
        return len(range(value))
    return value if value is None or isinstance(value, (str, int)) else repr(value)


@torch.compiler.assume_constant_result
def _make_constant_config(
    field_items: tuple[tuple[str, Any], ...], is_published: bool
) -> CabConfig:
    """Return the settings in (name, value) pairs of fields, as a constant under torch.compile.

    torch.compile accepts only plain values as arguments of such a function.
    """
    return _config_of_fields(dict(field_items), is_published)
