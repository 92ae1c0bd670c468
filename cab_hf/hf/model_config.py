"""The CabConfig in a transformers config: parsed once, and checked against the model."""

from __future__ import annotations

import copy
from typing import Any

import torch

from cab_hf.checks import MOST
from cab_hf.config import CAB_FRC, FRC, CabConfig, Origin
from cab_hf.hf.fit import require_layers, require_origin, warn_if_never_sparse

# the dict that was parsed last, as it was then: every layer of a model brings the same one
_latest: list[tuple[dict[str, Any], bool, CabConfig] | None] = [None]


def cab_config_of(config: Any, implementation: str | None = None) -> CabConfig:
    """The CabConfig that a transformers config carries, the defaults when it carries none.

    Those of "cab_frc" are `CabConfig.published`, and a dict that names no predictor changes these.

    Args:
        implementation: the name of the one that is to read it; by default the config's own.

    Raises:
        ValueError: for what is no CabConfig, one of layers that the model does not have, a
            calibration of a model of another shape, or "cab_frc" with another predictor.
    """
    saved = getattr(config, "cab_config", None)
    published = (implementation or getattr(config, "_attn_implementation", None)) == CAB_FRC
    result = _parsed({} if saved is None else saved, published)
    if published and result.predictor != FRC:
        raise ValueError(
            f"cab_config has predictor {result.predictor!r}, and attn_implementation {CAB_FRC!r} "
            f"is predictor {FRC!r}; give CabConfig.published(...), or attn_implementation 'cab'."
        )
    require_origin(result.origin, config)
    require_layers(result, config)
    return result


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
