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

# copy of the dict that was parsed last: every layer of a model passes the same dict
_latest: list[tuple[dict[str, Any], bool, CabConfig] | None] = [None]


class _Fit(NamedTuple):
    """The last check of a transformers config that passed.

    Attributes:
        config: weak reference to the transformers config, which has no hash.
        settings: settings that fitted.
        counts: numbers of layers and heads that ``settings`` were compared with.
    """

    config: weakref.ref[Any]
    settings: CabConfig
    counts: tuple[int | None, ...]


# key: id of the transformers config
_fits_cache: dict[int, _Fit] = {}
# configs that temporarily have fewer layers than their model
_truncated: list[Any] = []


def cab_config_of(config: Any, implementation: str | None = None) -> CabConfig:
    """Return the CabConfig in a transformers config, or the defaults if there is none.

    The defaults of "cab_frc" are `CabConfig.published`. A dict without a predictor changes these
    defaults. The settings are compared with the layers and heads of the model once, and again if
    settings or model change. A compiled model compares nothing.

    Args:
        config: a transformers config.
        implementation: name of the attention implementation; by default the name in ``config``.

    Raises:
        ValueError: if the setting is not a CabConfig, does not fit the layers and heads of the
            model, or has another predictor than "frc" under "cab_frc".
    """
    saved = getattr(config, "cab_config", None)
    published = (implementation or getattr(config, "_attn_implementation", None)) == CAB_FRC
    result = _checked_predictor(_parsed({} if saved is None else saved, published), published)
    if not torch.compiler.is_compiling():
        _require_fit(result, config)
    return result


def require_setting(config: Any, value: Any) -> CabConfig | None:
    """Check a ``cab_config`` before it is set on the config of a model that uses "cab".

    A config that no such model has read is not checked, because its layers can still change.

    Returns:
        The settings; None if they are not checked.

    Raises:
        ValueError: as in `cab_config_of`.
    """
    if value is None or _fit_of(config) is None or config._attn_implementation not in NAMES:
        return None
    published = config._attn_implementation == CAB_FRC
    result = _checked_predictor(_parsed(value, published), published)
    _require_fit(result, config)
    return result


@contextmanager
def truncated(config: Any) -> Iterator[None]:
    """Accept fewer layers in ``config`` inside the context, and restore their number afterwards.

    Drafts of `assistant_early_exit` run the first layers of a model. transformers does not restore
    the number of layers if a draft fails.
    """
    cab_config_of(config)
    layers = config.num_hidden_layers
    _truncated.append(config)
    try:
        yield
    finally:
        config.num_hidden_layers = layers
        place = next(i for i, each in enumerate(_truncated) if each is config)
        del _truncated[place]


def _fit_of(config: Any) -> _Fit | None:
    """Return the last check of a config that passed; None for a config that was never checked."""
    fit = _fits_cache.get(id(config))
    return None if fit is None or fit.config() is not config else fit


def _require_fit(settings: CabConfig, config: Any) -> None:
    """Raise a ValueError if settings do not fit a model; settings that fitted are not compared."""
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
    """Remove a deleted config from the cache, unless another config has the same id by now."""
    fit = _fits_cache.get(key)
    if fit is not None and fit.config() is None:
        del _fits_cache[key]


def _checked_predictor(settings: CabConfig, published: bool) -> CabConfig:
    """Return ``settings``; raise a ValueError if "cab_frc" (``published``) cannot use them."""
    if published and settings.predictor != FRC:
        raise ValueError(
            f"cab_config must have predictor {FRC!r} with attn_implementation {CAB_FRC!r}, got "
            f"{settings.predictor!r}. Use CabConfig.published(...), or attn_implementation 'cab'."
        )
    return settings


def cab_config_in_use(config: Any) -> CabConfig:
    """Return `cab_config_of`, and warn if no prompt can be long enough for sparse attention."""
    result = cab_config_of(config)
    if not torch.compiler.is_compiling():
        warn_if_never_sparse(result.min_length, config)
    return result


def _parsed(saved: Any, published: bool) -> CabConfig:
    if isinstance(saved, CabConfig):
        return saved
    if not isinstance(saved, dict):
        return CabConfig.from_dict(saved)
    if torch.compiler.is_compiling():
        items = tuple((name, _plain(value)) for name, value in saved.items())
        return _constant(items, published)
    known = _latest[0]
    # comparing tables is faster than hashing: Python compares numbers by identity first
    if known is None or known[0] != saved or known[1] != published:
        known = _latest[0] = copy.deepcopy(saved), published, _config_of_fields(saved, published)
    return known[2]


def _config_of_fields(fields: dict[str, Any], published: bool) -> CabConfig:
    """Return the config of a dict; ``published`` selects the defaults of the published method."""
    if published and "predictor" not in fields:
        return CabConfig.published(**fields)
    return CabConfig.from_dict(fields)


def _plain(value: Any) -> Any:
    """Return a hashable value that is a constant under torch.compile.

    A number that differed in an earlier compilation is symbolic in dynamo. It becomes a constant
    when Python needs one, such as the length of a range or a string.
    """
    if isinstance(value, (list, tuple)):
        # a table has thousands of numbers, and each traced call takes time
        return tuple([float.fromhex(x.hex()) if type(x) is float else _plain(x) for x in value])
    if isinstance(value, float):
        return float.fromhex(value.hex())
    if isinstance(value, dict) and set(value) == set(Origin._fields):
        return tuple([(name, _plain(each)) for name, each in value.items()])
    # larger values raise an error later
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST:
        return len(range(value))
    return value if value is None or isinstance(value, (str, int)) else repr(value)


# torch.compile accepts only plain arguments for a constant result
@torch.compiler.assume_constant_result
def _constant(items: tuple[tuple[str, Any], ...], published: bool) -> CabConfig:
    return _config_of_fields(dict(items), published)
