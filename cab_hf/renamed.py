"""Names of earlier versions, of fields of `CabConfig` and options: what was saved by them loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# field of an earlier version -> its name of today
RENAMED = {"mass": "top_p", "bridges": "top_k_share", "dense_tail": "dense_tail_blocks"}
RENAMED_VALUES = {"coarsen": {"box": "minmax"}}
# how blocks were chosen by block summaries, before they were chosen by rows
SUMMARIES = ("coarsen", "select", "top_k_share", "top_p", "curvature", "redundancy", "sparsity")
# and how the published recipe was told, before it was a predictor of its own
PUBLISHED = {"coarsen": "max_l2", "select": "topk", "exact_queries": 0}
# what settings record of a config alone: options of a calibration, budgets that are set
PARTS = {"top_p", "top_k_share", "sparsity", "exact_queries", "exact_stride", "max_density"}


def renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` of a `CabConfig`, those of earlier versions by their names of today (`RENAMED`).

    Raises:
        ValueError: a field is there by both of its names.
    """
    for old, new in RENAMED.items():
        if old in fields and new in fields:
            raise ValueError(
                f"{old!r} and {new!r} are two names of one field of CabConfig; leave out {old!r}, "
                "the name that earlier versions had."
            )
    return {RENAMED.get(name, name): _value(name, value) for name, value in fields.items()}


def by_rows(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``fields`` of a `CabConfig` of before blocks were chosen by rows, as ones of today.

    With what of them is dropped, as ``name=value``.
    """
    old = {"coarsen", "select", "top_k_share"} & fields.keys()
    if not old and fields.get("predictor") != "curvature":
        return dict(fields), []
    kept = {name: value for name, value in fields.items() if name not in SUMMARIES}
    predictor = kept.get("predictor", "curvature")
    if predictor == "curvature" and all(fields.get(x) == y for x, y in PUBLISHED.items()):
        same = ("sparsity", "curvature", "redundancy")
        kept |= {name: fields[name] for name in same if name in fields}
        return {**kept, "predictor": "frc", "exact_queries": 16}, []
    if predictor not in ("curvature", "cascade"):
        return {name: x for name, x in fields.items() if name not in SUMMARIES[:3]}, []
    if predictor == "curvature":
        kept["predictor"] = "rows"
    if isinstance(kept.get("exact_queries"), (tuple, list)):
        del kept["exact_queries"]
    names = [name for name in fields if name not in kept]
    return kept, [f"{name}={str(fields[name])[:30]}" for name in names]


def renamed_in(recorded: Any) -> Any:
    """What a run has recorded, as JSON has it, with `renamed` configs wherever it holds some.

    Options that set fields of a `CabConfig` go by their names of today, too (`_options`). A config
    is a dict that has ``key_block``, or nothing but `PARTS`; ``field=value`` in a list is
    a field that a command line sets.
    """
    if isinstance(recorded, list):
        return [_assignment(renamed_in(item)) for item in recorded]
    if not isinstance(recorded, dict):
        return recorded
    values = {name: _value(name, renamed_in(value)) for name, value in _options(recorded).items()}
    names = {RENAMED.get(name, name) for name in values}
    return renamed(values) if "key_block" in names or names <= PARTS else values


def _options(recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """``recorded`` with ``cab`` for ``set`` and ``config``; what ``cab`` was is ``variant``."""
    options = dict(recorded)
    if isinstance(options.get("set"), list):
        if "cab" in options:
            options["variant"] = options["cab"]
        options["cab"] = options.pop("set")
    elif isinstance(options.get("config"), list):
        options["cab"] = options.pop("config")
    return options


def _value(name: str, value: Any) -> Any:
    return RENAMED_VALUES[name].get(value, value) if _is_named(name, value) else value


def _is_named(name: str, value: Any) -> bool:
    return name in RENAMED_VALUES and isinstance(value, str)


def _assignment(item: Any) -> Any:
    if not isinstance(item, str) or "=" not in item:
        return item
    name, value = map(str.strip, item.split("=", 1))
    if name in RENAMED or name in RENAMED_VALUES:
        return f"{RENAMED.get(name, name)}={_value(name, value)}"
    return item
