"""The CabConfig in a transformers config: parsed once, and compared with the model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from cab_hf.checks import MOST
from cab_hf.config import CAB_FRC, FRC, NAMES, CabConfig, Origin
from cab_hf.hf.fit import counts_of, require_layers, require_origin, warn_if_never_sparse


class _Parsed(NamedTuple):
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
_parse_cache: list[_Parsed | None] = [None]


class _Fit(NamedTuple):
    """The last successful check that settings fit a model.

    Attributes:
        config: weak reference to the transformers config of the model, which has no hash.
        settings: settings that fit the model.
        counts: result of `counts_of` at the time of the check.
    """

    config: weakref.ref[Any]
    settings: CabConfig
    counts: tuple[int | None, ...]


# id of a transformers config -> its last successful check
_fits_cache: dict[int, _Fit] = {}
# transformers configs that temporarily have fewer layers than their model
_truncated: list[Any] = []


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
    saved = getattr(config, "cab_config", None)
    published = (implementation or getattr(config, "_attn_implementation", None)) == CAB_FRC
    result = _checked_predictor(_parse({} if saved is None else saved, published), published)
    if not torch.compiler.is_compiling():
        _require_fit(result, config)
    return result


def require_setting(config: Any, value: Any) -> CabConfig | None:
    """Check a new ``cab_config`` before it is set in the config of a model that uses "cab".

    Args:
        config: a transformers config. The config is not checked if no model that uses "cab" has
            read it, because its number of layers can still change.
        value: new ``cab_config``; None is not checked.

    Returns:
        The settings; None without a check.

    Raises:
        ValueError: as in `cab_config_of`.
    """
    if value is None or _fit_of(config) is None or config._attn_implementation not in NAMES:
        return None
    published = config._attn_implementation == CAB_FRC
    result = _checked_predictor(_parse(value, published), published)
    _require_fit(result, config)
    return result


@contextmanager
def truncated(config: Any) -> Iterator[None]:
    """Accept fewer layers in ``config`` inside the context, and restore the number afterwards.

    Drafts of `assistant_early_exit` run the first layers of a model. transformers does not restore
    the number of layers if a draft fails.

    Args:
        config: a transformers config.
    """
    cab_config_of(config)
    num_layers = config.num_hidden_layers
    _truncated.append(config)
    try:
        yield
    finally:
        config.num_hidden_layers = num_layers
        # compared by identity, because equal configs can be in the list
        index = next(i for i, each in enumerate(_truncated) if each is config)
        del _truncated[index]


def _fit_of(config: Any) -> _Fit | None:
    """Return the last successful check of a transformers config; None without a check."""
    fit = _fits_cache.get(id(config))
    return None if fit is None or fit.config() is not config else fit


def _require_fit(settings: CabConfig, config: Any) -> None:
    """Raise a ValueError if settings do not fit a model.

    Returns immediately if the last check of the model had the same settings and succeeded.

    Args:
        settings: settings of the model.
        config: a transformers config.
    """
    if any(config is each for each in _truncated):
        return
    counts, fit = counts_of(config), _fit_of(config)
    if fit is not None and fit.settings is settings and fit.counts == counts:
        return
    require_origin(settings.origin, config)
    require_layers(settings, config)
    key = id(config)
    _fits_cache[key] = _Fit(weakref.ref(config, lambda _: _forget(key)), settings, counts)


def _forget(key: int) -> None:
    """Remove a deleted config from the cache, unless a newer config has the same id ``key``."""
    fit = _fits_cache.get(key)
    if fit is not None and fit.config() is None:
        del _fits_cache[key]


def _checked_predictor(settings: CabConfig, published: bool) -> CabConfig:
    """Return ``settings``, or raise a ValueError if the predictor does not fit the implementation.

    Args:
        settings: settings of the model.
        published: True for "cab_frc", which needs predictor "frc".
    """
    if published and settings.predictor != FRC:
        raise ValueError(
            f"cab_config must have predictor {FRC!r} with attn_implementation {CAB_FRC!r}, got "
            f"{settings.predictor!r}. Use CabConfig.published(...), or attn_implementation 'cab'."
        )
    return settings


def cab_config_in_use(config: Any) -> CabConfig:
    """Return `cab_config_of`, and warn if the model has too few positions for sparse attention."""
    result = cab_config_of(config)
    if not torch.compiler.is_compiling():
        warn_if_never_sparse(result.min_length, config)
    return result


def _parse(saved: Any, published: bool) -> CabConfig:
    """Return the settings in the value of a ``cab_config``.

    Args:
        saved: a CabConfig, or a dict of fields.
        published: True for the defaults of the published method.
    """
    if isinstance(saved, CabConfig):
        return saved
    if not isinstance(saved, dict):
        return CabConfig.from_dict(saved)
    if torch.compiler.is_compiling():
        items = tuple((name, _plain(value)) for name, value in saved.items())
        return _constant(items, published)
    cached = _parse_cache[0]
    # comparing tables is faster than hashing, because Python compares numbers by identity first
    if cached is None or cached.fields != saved or cached.published != published:
        settings = _config_of_fields(saved, published)
        cached = _parse_cache[0] = _Parsed(copy.deepcopy(saved), published, settings)
    return cached.settings


def _config_of_fields(fields: dict[str, Any], published: bool) -> CabConfig:
    """Return the settings in a dict of fields.

    Args:
        fields: fields of `CabConfig` by name.
        published: True for the defaults of the published method.
    """
    if published and "predictor" not in fields:
        return CabConfig.published(**fields)
    return CabConfig.from_dict(fields)


def _plain(value: Any) -> Any:
    """Return a value of a field as a hashable value, which is a constant under torch.compile.

    A number that differed in an earlier compilation is symbolic in dynamo. Dynamo turns the number
    into a constant where Python needs a constant, such as the length of a range or a string.
    """
    if isinstance(value, (list, tuple)):
        # floats without a recursive call: a table can have thousands, and tracing a call is slow
        return tuple([float.fromhex(x.hex()) if type(x) is float else _plain(x) for x in value])
    if isinstance(value, float):
        return float.fromhex(value.hex())
    if isinstance(value, dict) and set(value) == set(Origin._fields):
        return tuple([(name, _plain(each)) for name, each in value.items()])
    # `CabConfig` rejects larger values
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST:
        return len(range(value))
    return value if value is None or isinstance(value, (str, int)) else repr(value)


@torch.compiler.assume_constant_result
def _constant(items: tuple[tuple[str, Any], ...], published: bool) -> CabConfig:
    """Return the settings in (name, value) pairs of fields, as a constant under torch.compile.

    torch.compile accepts only plain values as arguments of such a function.
    """
    return _config_of_fields(dict(items), published)
