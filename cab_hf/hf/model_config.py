"""The CabConfig in a transformers config: parsed once, and checked against the model."""

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

# the dict that was parsed last, as it was then: every layer of a model brings the same one
_latest: list[tuple[dict[str, Any], bool, CabConfig] | None] = [None]


class _Fit(NamedTuple):
    """The last check of a transformers config that passed.

    Attributes:
        config: weak reference to the transformers config, which has no hash.
        settings: what fitted.
        counts: the layers and heads that ``settings`` were compared with.
    """

    config: weakref.ref[Any]
    settings: CabConfig
    counts: tuple[int | None, ...]


# by the id of the transformers config
_fits_cache: dict[int, _Fit] = {}
# configs that count fewer layers than their model has, for a while
_truncated: list[Any] = []


def cab_config_of(config: Any, implementation: str | None = None) -> CabConfig:
    """Return the CabConfig that a transformers config carries, the defaults when it carries none.

    Those of "cab_frc" are `CabConfig.published`, and a dict that names no predictor changes these.
    The settings are compared with the layers and heads of the model once, and again when one of
    both has changed. A compiled model compares nothing.

    Args:
        implementation: the name of the one that is to read it; by default the config's own.

    Raises:
        ValueError: for what is no CabConfig, one of layers that the model does not have, a
            calibration of a model of another shape, or "cab_frc" with another predictor.
    """
    saved = getattr(config, "cab_config", None)
    published = (implementation or getattr(config, "_attn_implementation", None)) == CAB_FRC
    result = _checked_predictor(_parsed({} if saved is None else saved, published), published)
    if not torch.compiler.is_compiling():
        _require_fit(result, config)
    return result


def require_setting(config: Any, value: Any) -> CabConfig | None:
    """Check a ``cab_config`` before it is set on the config of a model that attends by "cab".

    A config that no such model has read yet is not checked: its layers may still change.

    Returns:
        The settings; None where they are not checked.

    Raises:
        ValueError: as `cab_config_of`.
    """
    if value is None or _fit_of(config) is None or config._attn_implementation not in NAMES:
        return None
    published = config._attn_implementation == CAB_FRC
    result = _checked_predictor(_parsed(value, published), published)
    _require_fit(result, config)
    return result


@contextmanager
def truncated(config: Any) -> Iterator[None]:
    """Keep the settings of a config that counts fewer layers inside, and its count afterwards.

    Drafts of `assistant_early_exit` run the first layers of a model, and transformers leaves the
    model so when a draft fails.
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
    """Refuse settings that do not fit a model, unless they are those that fitted before."""
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
    """Forget a config that is gone, unless another one has its id by now."""
    fit = _fits_cache.get(key)
    if fit is not None and fit.config() is None:
        del _fits_cache[key]


def _checked_predictor(settings: CabConfig, published: bool) -> CabConfig:
    """Return ``settings``, if "cab_frc" (``published``) can use them."""
    if published and settings.predictor != FRC:
        raise ValueError(
            f"cab_config has predictor {settings.predictor!r}, and attn_implementation {CAB_FRC!r} "
            f"is predictor {FRC!r}; give CabConfig.published(...), or attn_implementation 'cab'."
        )
    return settings


def cab_config_in_use(config: Any) -> CabConfig:
    """`cab_config_of`, with a warning where they never let a prompt attend sparsely."""
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
    # numbers of a table are compared by identity first, which is faster than hashing them
    if known is None or known[0] != saved or known[1] != published:
        known = _latest[0] = copy.deepcopy(saved), published, _of_fields(saved, published)
    return known[2]


def _of_fields(fields: dict[str, Any], published: bool) -> CabConfig:
    """Of a dict; where it names no predictor, of the published method if that is meant."""
    if published and "predictor" not in fields:
        return CabConfig.published(**fields)
    return CabConfig.from_dict(fields)


def _plain(value: Any) -> Any:
    """The same value, hashable; under torch.compile a constant.

    A number that differed in an earlier compilation is symbolic to dynamo. It becomes a constant
    where Python needs one: as the length of a range, as text.
    """
    if isinstance(value, (list, tuple)):
        # a table has thousands of numbers: each call that is traced counts
        return tuple([float.fromhex(x.hex()) if type(x) is float else _plain(x) for x in value])
    if isinstance(value, float):
        return float.fromhex(value.hex())
    if isinstance(value, dict) and set(value) == set(Origin._fields):
        return tuple([(name, _plain(each)) for name, each in value.items()])
    # what is larger is refused
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST:
        return len(range(value))
    return value if value is None or isinstance(value, (str, int)) else repr(value)


# a constant to torch.compile, which wants plain arguments
@torch.compiler.assume_constant_result
def _constant(items: tuple[tuple[str, Any], ...], published: bool) -> CabConfig:
    return _of_fields(dict(items), published)
