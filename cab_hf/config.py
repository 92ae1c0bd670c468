"""What a user decides: one frozen, validated dataclass, saved as a dict in the model config."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cab_hf.checks import MOST, is_count, is_number, is_share, is_whole, require, short, warn_once

# names under which attention is registered with transformers: blocks by any predictor, or by the
# published one, where a text is long enough for them; and exact attention throughout
CAB_FRC = "cab_frc"
SPARSE = ("cab", CAB_FRC)
NAMES = (*SPARSE, "cab_dense")

CURVATURE = ("none", "additive", "forman")
# fields that take a table of layers and heads
TABLES = ("sparsity", "head_map")
ENGINES = ("auto", "flex", "triton", "gather", "reference")
CHOICES = {"curvature": CURVATURE, "engine": ENGINES}
# a number for every head of every layer, [layers][heads]
Table = tuple[tuple[float, ...], ...]

# predictors that choose by rows, the published one, and all that come with cab_hf; others may read
# any field
CAB, FRC = ("rows", "cascade"), "frc"
SHIPPED = (*CAB, FRC)
# the name of outlier_queries in earlier versions
OLD_OUTLIERS = "exact_queries"
Class = TypeVar("Class", bound=type)


def _read_by(*predictors: str, default: Any, off: Any = dataclasses.MISSING) -> Any:
    """A field that only some predictors read. The others accept ``off``, which disables it."""
    return dataclasses.field(default=default, metadata={"predictors": predictors, "off": off})


class Origin(NamedTuple):
    """What a calibration was measured for; None where layers differ or a config has no such field.

    Attributes:
        model: its name.
        layers, heads, kv_heads: how many it has, of heads in every layer.
        length: tokens of the documents that it read.
    """

    model: str
    layers: int | None
    heads: int | None
    kv_heads: int | None
    length: int

    @classmethod
    def of(cls, given: Any) -> Origin:
        """Of its fields by name, as JSON has them.

        Raises:
            ValueError: for fields that are missing, unknown or of another kind.
        """
        if isinstance(given, Origin):
            return given
        # torch.compile has taken a dict apart
        pairs = isinstance(given, tuple) and all(
            isinstance(x, tuple) and len(x) == 2 for x in given
        )
        fields = dict(given) if pairs or isinstance(given, Mapping) else {}
        if set(fields) == set(cls._fields):
            origin = cls(**fields)
            counts = [x for x in origin[1:4] if x is not None] + [origin.length]
            if isinstance(origin.model, str) and all(type(x) is int and x > 0 for x in counts):
                return origin
        raise ValueError(
            f"CabConfig.origin must be None or a dict of {', '.join(cls._fields)}, got "
            f"{str(given)[:80]!r}."
        )

    @property
    def shape(self) -> str:
        parts = zip(self[1:4], ("layers", "heads", "KV heads"), strict=True)
        return ", ".join([f"{count} {what}" for count, what in parts if count is not None])


def _refuse_unknown_fields(config_class: Class) -> Class:
    """Have the constructor of a dataclass refuse unknown fields as `CabConfig.from_dict` does."""
    init = config_class.__init__

    @functools.wraps(init)
    def __init__(self: Any, /, *values: Any, **fields: Any) -> None:
        fields = _renamed(fields)
        _require_known(fields)
        by_name = dict(zip([*FIELDS][: len(values)], values, strict=True))
        init(self, **by_name, **fields)

    config_class.__init__ = __init__
    return config_class


@_refuse_unknown_fields
@dataclass(frozen=True)
class CabConfig:
    """Which blocks are attended, and how attention over them is computed.

    Stored as ``model.config.cab_config = CabConfig(...).to_dict()``; `cab_hf.apply_cab` does so.

    Args:
        query_block: consecutive queries that share one row of the plan.
        key_block: consecutive keys that are attended or skipped together. One of the two block
            sizes divides the other; both are multiples of 16.
        sink_blocks: key blocks at the start of the text (of each packed document) every row keeps.
        local_blocks: key blocks up to and including the diagonal every row keeps. The key blocks
            that hold the row's own positions are kept even when they are more than this.
        dense_tail_blocks: in query blocks. A query block with one of the last ``dense_tail_blocks *
            query_block`` tokens of a text (of each packed document) attends everything it may, as
            questions are often there. `generate` and continuous batching record where a text
            ends; elsewhere the end of a call counts as one, so that a text read in several calls
            attends more than in one. Calls of fewer than ``query_block`` queries have no tail.
        outlier_queries: Number of queries per block that are sampled by farthest-point sampling
            (`reference.outlier_queries`) and scored against every key, on half of the channels.
            They find keys that single queries need. 0 or a power of two that divides
            ``query_block``.
        typical_queries: Number of queries per block that are sampled at equal steps and scored on
            all channels of every ``typical_key_stride``-th key. They represent all queries but the
            outliers. A power of two that divides ``query_block``. The default also fits blocks
            that it does not divide: the largest power of two that divides such a block is used.
        typical_key_stride: Distance in tokens between the keys that typical queries are scored
            against. A power of two that divides ``key_block``; 1 for every key.
        mass_threshold: a row keeps the blocks to which its queries give so much of their attention
            on average, by those that are scored, in [0, 1]; 0 keeps every block and is exact. A row
            that sees more than 32,768 keys keeps blocks of less, in proportion: at 131,072 of a
            quarter.
        share_threshold: a row keeps the blocks to which one scored query gives so much of its
            attention, in (0, 1].
        sparsity: with ``"frc"``, the share of a row's blocks that is dropped, in [0, 1). A number
            or a `Table`.
        curvature: with ``"frc"``, ``"forman"`` (Forman-Ricci), ``"additive"`` (direct minus
            ``redundancy`` times two-hop), or ``"none"``. ``"additive"`` weighs by the key blocks of
            the call, as published: there padding and packing change what a text selects.
        redundancy: with ``"frc"``, weight of the curvature term, in [0, 1]; 0 is the selection by
            magnitude, bit for bit.
        max_density: at most this share of a row's blocks is kept, the best ones, in (0, 1]; forced
            blocks always are.
        sampled_one_in: in training, each row of each head draws one of every so many neighbouring
            key blocks at random, and attends it with so many times its weight, unless it was chosen
            anyway. The sample represents the blocks that were not chosen, so that gradients come
            closer to those of dense attention and the model can be read densely as well. 0 turns it
            off. Nothing is drawn where no gradients flow.
        dense_layers: layer indices computed with exact attention.
        min_length: in tokens. A text (a packed document, a row without its padding) that has fewer
            so far is computed with exact attention, and so are the first chunks of a longer prompt.
            So is what has fewer than ``query_block`` queries in a call, single ones with
            ``sparse_decode`` excepted: the last chunk of a prompt looks like a step of
            assisted decoding.
        engine: ``"auto"`` (the fastest that can), ``"flex"``, ``"triton"``, ``"gather"`` (on a CPU)
            or ``"reference"``. A named engine never falls back to another.
        predictor: name of a registered predictor; ``"rows"`` is the default, ``"cascade"`` the same
            in ``anchors`` alone, ``"frc"`` the published method (`published`).
        anchors: with ``"cascade"``, indices of the layers that choose blocks, ascending. The layers
            behind each attend what it has chosen. The first sparse layer is one of them.
        head_map: with ``"cascade"``, a table [layers][heads]: the head of its anchor whose blocks a
            head attends; () for the same head. Rows of anchors are not read.
        sparse_decode: when True, a step of one query reads ``decode_tokens`` of the cache's keys,
            chosen anew at every step by the largest share of attention that a head of the group
            gives them. The cache needs an index for that: `generate` makes one, and so does
            `cab_hf.index_cache`; any other cache is read whole.
        decode_tokens: with ``sparse_decode``, how many keys a KV head reads in a step, the first 16
            and the last 64 of a text among them: a number of at least 128, or a share of the text
            in (0, 1). A text is read whole up to ``min_length``, and up to four times as many
            tokens as are read: a share above 1/4 leaves nothing to gain.
        check_finite: refuse queries and keys that hold infinities or NaN, by name. Costs a pass
            over both and a wait for the device in every sparse layer; not under CUDA graphs.
        origin: what a calibration was measured for, an `Origin` or a dict of its fields; a model of
            other layers or heads is refused. None for settings that were not calibrated.

    Raises:
        ValueError: naming the field, the value seen and what is accepted.
    """

    query_block: int = 128
    key_block: int = 64
    sink_blocks: int = 1
    local_blocks: int = 3
    dense_tail_blocks: int = 2
    outlier_queries: int = _read_by(*CAB, default=16, off=0)
    typical_queries: int = _read_by(*CAB, default=32)
    typical_key_stride: int = _read_by(*CAB, default=4)
    mass_threshold: float = _read_by(*CAB, default=0.0027)
    share_threshold: float = _read_by(*CAB, default=0.05)
    sparsity: float | Table = _read_by(FRC, default=0.95, off=0)
    curvature: str = _read_by(FRC, default="forman", off="none")
    redundancy: float = _read_by(FRC, default=1.0, off=0)
    max_density: float = _read_by(*CAB, FRC, default=1.0)
    sampled_one_in: int = 0
    dense_layers: tuple[int, ...] = ()
    min_length: int = 16384
    engine: str = "auto"
    predictor: str = "rows"
    anchors: tuple[int, ...] = _read_by("cascade", default=(), off=[])
    head_map: Table = _read_by("cascade", default=(), off=[])
    sparse_decode: bool = False
    decode_tokens: int | float = 4096
    check_finite: bool = _read_by(*CAB, FRC, default=False)
    origin: Origin | None = None

    def __post_init__(self) -> None:
        blocks = ("query_block", "key_block")
        accepted = f"a whole number from 16 to {MOST}, a multiple of 16"
        self._require(blocks, lambda size: is_count(size) and size and size % 16 == 0, accepted)
        fits = max(self.query_block, self.key_block) % min(self.query_block, self.key_block) == 0
        of_rows = f"a divisor or a multiple of query_block={self.query_block}"
        self._require(("key_block",), lambda _: fits, of_rows)
        counts = ("sink_blocks", "local_blocks", "dense_tail_blocks")
        counts += ("sampled_one_in", "min_length")
        self._require(counts, is_count, f"a whole number from 0 to {MOST}")
        for name, choices in CHOICES.items():
            self._require((name,), choices.__contains__, "one of " + ", ".join(map(repr, choices)))
        power = f"a power of two that divides query_block={self.query_block}"
        default = FIELDS["typical_queries"].default
        self._require(
            ("typical_queries",),
            lambda x: self._is_power(x) or (is_whole(x, 1) and x == default),
            power,
        )
        self._require(
            ("typical_key_stride",),
            lambda x: is_whole(x, 1) and x & (x - 1) == 0 and self.key_block % x == 0,
            f"a power of two that divides key_block={self.key_block}",
        )
        none = f"0 or {power}"
        self._require(
            ("outlier_queries",), lambda x: self._is_power(x) or (is_count(x) and x == 0), none
        )
        self._require(("mass_threshold",), is_share, "in [0, 1]")
        self._require(("share_threshold",), lambda x: is_share(x) and x > 0, "in (0, 1]")
        every_row = "in [0, 1) so that every row keeps at least one block"
        self._freeze_table("sparsity", lambda x: is_share(x) and x < 1, every_row)
        self._require(("max_density",), lambda x: is_share(x) and x > 0, "in (0, 1]")
        self._require(("redundancy",), is_share, "in [0, 1]")
        self._require(("predictor",), lambda x: isinstance(x, str) and x, "a name (str)")
        switches = ("sparse_decode", "check_finite")
        self._require(switches, lambda x: isinstance(x, bool), "True or False")

        def some_keys(x: Any) -> bool:
            return (is_count(x) and x >= 128) or (is_number(x) and 0 < x < 1)

        self._require(("decode_tokens",), some_keys, "a whole number >= 128, or a share in (0, 1)")

        def indices(layers: Any) -> bool:
            return isinstance(layers, (tuple, list)) and all(is_count(i) for i in layers)

        self._require(("dense_layers", "anchors"), indices, "a tuple of layer indices >= 0")
        # a list is what JSON gives back; a frozen value must hash
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        object.__setattr__(self, "anchors", tuple(self.anchors))
        # here one number for all heads means nothing
        same_heads = "() for the same heads"
        a_table = f"a table [layers][heads], or {same_heads}"
        self._require(("head_map",), lambda x: isinstance(x, (tuple, list)), a_table)
        if self.head_map:
            self._freeze_table("head_map", is_count, same_heads)
        else:
            object.__setattr__(self, "head_map", ())
        if self.origin is not None:
            object.__setattr__(self, "origin", Origin.of(self.origin))
        for name, reader in unread(vars(self)).items():
            raise ValueError(
                f"CabConfig.{name} is {short(getattr(self, name))}, which {reader} does not read; "
                f"leave it at {FIELDS[name].default!r}{_others(name)}."
            )
        if self.predictor == "cascade":
            self._check_cascade()

    @classmethod
    def published(
        cls, /, sparsity: float = 0.95, curvature: str = "forman", **overrides: Any
    ) -> CabConfig:
        """The published CAB recipe, predictor "frc": row-wise top-k by Forman-Ricci curvature.

        Args:
            sparsity: share of every row's blocks that is dropped.
            curvature: ``"forman"`` (``redundancy`` 1: lowest Forman-Ricci curvature kept),
                ``"additive"`` or ``"none"``.
            overrides: any other field; what of the recipe is then not read falls back.
        """
        recipe = {
            "query_block": 64,
            "key_block": 64,
            "sink_blocks": 0,
            "local_blocks": 1,
            "dense_tail_blocks": 0,
            "predictor": FRC,
            "redundancy": 1.0 if curvature == "forman" else 0.3,
        }
        return cls(**recipe, sparsity=sparsity, curvature=curvature).changed(**overrides)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> CabConfig:
        """Return the config with some fields by name, or the config that `to_dict` saved.

        Raises:
            ValueError: if ``settings`` is not a dict, has an unknown field, or sets a field that
                the other settings do not read.
        """
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"cab_config must be a dict of CabConfig fields, got {short(settings)}. "
                "CabConfig(...).to_dict() returns one."
            )
        settings = _renamed(settings)
        _require_known(settings)
        return cls(**settings)

    @classmethod
    def reading(cls, fields: Mapping[str, Any]) -> CabConfig:
        """The config of those ``fields`` that it reads; the others fall back to their defaults."""
        idle = unread(fields)
        return cls(**{name: value for name, value in fields.items() if name not in idle})

    def changed(self, /, **fields: Any) -> CabConfig:
        """This config with other ``fields``; what is then not read any more falls back.

        Raises:
            ValueError: as of `from_dict`; a field that is given must be read.
        """
        fields = _renamed(fields)
        _require_known(fields)
        kept = CabConfig.reading({**vars(self), **fields})
        return dataclasses.replace(kept, **fields)

    @classmethod
    def calibrated(cls, path: str | Path) -> CabConfig:
        """The config of a calibration: a file that `save` wrote.

        Raises:
            ValueError: where there is no such file, or it holds no config.
        """
        if not Path(path).is_file():
            raise ValueError(
                f"{str(path)!r} is no file; give one that CabConfig.save wrote, a CabConfig, or a "
                "dict of its fields."
            )
        try:
            content = json.loads(Path(path).read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} must be a JSON file of CabConfig fields: {error}.") from None
        return cls.from_dict(content)

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file that `calibrated` reads."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n", "utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Plain values that survive JSON, ready for ``model.config.cab_config``."""
        fields = {name: _thawed(value) for name, value in vars(self).items()}
        if self.origin is None:
            del fields["origin"]
        return fields

    def _check_cascade(self) -> None:
        """Check the fields that a cascade needs."""

        def ascending(layers: tuple[int, ...]) -> bool:
            return layers != () and list(layers) == sorted(set(layers))

        self._require(("anchors",), ascending, "ascending layer indices, at least one of them")
        dense = sorted(set(self.anchors) & set(self.dense_layers))
        if dense:
            raise ValueError(
                f"CabConfig.anchors has {dense[0]}, which is in dense_layers and so chooses no "
                "blocks; remove it from one of them."
            )

    def _freeze_table(self, name: str, accepts: Callable[[Any], bool], what: str) -> None:
        """Refuse what is neither accepted nor a table of what is; a list becomes a tuple."""
        value = getattr(self, name)
        if not isinstance(value, (tuple, list)):
            self._require((name,), accepts, f"{what}, or a table")
            return
        rows = tuple(tuple(row) if isinstance(row, (tuple, list)) else () for row in value)
        even = len({len(row) for row in rows}) == 1 and rows[0] != ()
        if not even or not all(accepts(each) for row in rows for each in row):
            raise ValueError(
                f"CabConfig.{name} must be {what}, or a table [layers][heads] of such numbers "
                f"with rows of one length, got {short(value)}."
            )
        # as with dense_layers: a list is what JSON gives back
        object.__setattr__(self, name, rows)

    def _is_power(self, x: Any) -> bool:
        """Whether ``x`` is a power of two that divides ``query_block``."""
        return is_whole(x, 1) and x & (x - 1) == 0 and self.query_block % x == 0

    def _require(self, names: tuple[str, ...], accepts: Callable[[Any], bool], what: str) -> None:
        for name in names:
            value = getattr(self, name)
            require(accepts(value), f"CabConfig.{name}", value, what)


FIELDS = {field.name: field for field in dataclasses.fields(CabConfig)}


# functions: torch.compile traces no property of a value that is a constant to it
def blocks_of(config: CabConfig) -> tuple[int, int]:
    """(query, key) block sizes."""
    return config.query_block, config.key_block


def num_typical_queries(config: CabConfig) -> int:
    """Return the number of typical queries per block: a power of two that divides the block."""
    return gcd(config.typical_queries, config.query_block)


def tail_of(config: CabConfig) -> tuple[int, int]:
    """What `Spans.tail` takes: tokens of the dense tail, and of a query block."""
    return config.dense_tail_blocks * config.query_block, config.query_block


def unread(settings: Mapping[str, Any]) -> dict[str, str]:
    """Of fields by name those that are set and not read, and what it is that does not read them.

    What is missing is at its default. Bad values are left to `CabConfig`.
    """
    predictor = settings.get("predictor", FIELDS["predictor"].default)
    idle = {}
    decode_tokens = settings.get("decode_tokens", CabConfig.decode_tokens)
    if decode_tokens != CabConfig.decode_tokens and not settings.get("sparse_decode", False):
        idle["decode_tokens"] = "sparse_decode=False"
    if predictor not in SHIPPED:
        return idle
    for name, value in settings.items():
        metadata = FIELDS[name].metadata
        if not metadata or value == FIELDS[name].default or value == metadata["off"]:
            continue
        if predictor not in metadata["predictors"]:
            idle[name] = f"predictor={predictor!r}"
    return idle


def _others(name: str) -> str:
    """What reads a field, as the end of a sentence."""
    if name == "decode_tokens":
        return ", or give sparse_decode=True"
    parts = [f"predictor={x!r}" for x in FIELDS[name].metadata["predictors"]]
    return f", or choose what reads it ({', '.join(parts)})"


def _renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with today's names, and warn once about an old name.

    A config that was saved under the old name scored typical queries on every key: its stride is 1.
    """
    settings = dict(settings)
    if OLD_OUTLIERS not in settings:
        return settings
    if "outlier_queries" in settings:
        raise ValueError(
            f"CabConfig.{OLD_OUTLIERS} is the old name of outlier_queries, got both. Remove "
            f"{OLD_OUTLIERS}."
        )
    warn_once(
        (OLD_OUTLIERS,),
        f"CabConfig.{OLD_OUTLIERS} is now outlier_queries. Rename it: a later version will not "
        "accept the old name.",
    )
    settings["outlier_queries"] = settings.pop(OLD_OUTLIERS)
    if "typical_queries" in settings:
        settings.setdefault("typical_key_stride", 1)
    return settings


def _require_known(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError that names every unknown field and lists the known fields."""
    unknown = [repr(name) for name in settings if name not in FIELDS]
    if unknown:
        *first, last = unknown
        named = f"{', '.join(first)} or {last}" if first else last
        raise ValueError(f"CabConfig has no field {named}; its fields are {', '.join(FIELDS)}.")


def _thawed(value: Any) -> Any:
    if isinstance(value, Origin):
        return value._asdict()
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value
