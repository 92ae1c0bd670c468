"""`CabConfig`: the settings of block-sparse attention, which a model config saves as a dict."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cab_hf.checks import (
    MAX_INT32,
    is_count,
    is_fraction,
    is_number,
    is_whole_number,
    require,
    short_repr,
    warn_once,
)

# attention implementation with the published predictor
CAB_FRC = "cab_frc"
# attention implementations that are sparse
SPARSE_IMPLEMENTATIONS = ("cab", CAB_FRC)
# all attention implementations; "cab_dense" computes exact attention in every layer
IMPLEMENTATION_NAMES = (*SPARSE_IMPLEMENTATIONS, "cab_dense")

CURVATURES = ("none", "additive", "forman")
# fields that accept a `HeadTable`
TABLE_FIELDS = ("sparsity", "head_map")
ENGINES = ("auto", "flex", "triton", "gather", "reference")
# field -> accepted strings
CHOICES_BY_FIELD = {"curvature": CURVATURES, "engine": ENGINES}
# one number per head of each layer, [layers][heads]
HeadTable = tuple[tuple[float, ...], ...]

# predictors that select blocks by attention mass
CAB_PREDICTORS = ("rows", "cascade")
# predictor of the published method
FRC_PREDICTOR = "frc"
# all predictors of cab_hf; predictors that users register may read any field
BUILT_IN_PREDICTORS = (*CAB_PREDICTORS, FRC_PREDICTOR)
# name of the field outlier_queries in earlier versions
OLD_OUTLIER_FIELD = "exact_queries"
ConfigClass = TypeVar("ConfigClass", bound=type)


def _make_predictor_field(
    predictors: tuple[str, ...], default: Any, off_value: Any = dataclasses.MISSING
) -> Any:
    """Return a dataclass field that only some predictors of cab_hf read.

    Args:
        predictors: names of the predictors that read the field.
        default: default of the field.
        off_value: value that disables the field. With other predictors, the field must be
            ``default`` or ``off_value``.
    """
    return dataclasses.field(default=default, metadata={"predictors": predictors, "off": off_value})


class Origin(NamedTuple):
    """The model and the sequence length that a calibration was measured with.

    Attributes:
        model: name of the model.
        layers: number of layers; None if the model config has no such field.
        heads: number of query heads per layer; None if layers differ or the field is missing.
        kv_heads: number of KV heads per layer; None if layers differ or the field is missing.
        length: length of the calibration documents, in tokens.
    """

    model: str
    layers: int | None
    heads: int | None
    kv_heads: int | None
    length: int

    @classmethod
    def of(cls, origin_or_fields: Any) -> Origin:
        """Return ``origin_or_fields`` as an `Origin`.

        Args:
            origin_or_fields: an `Origin`, a dict of its fields, or a tuple of (name, field) pairs.

        Raises:
            ValueError: if a field is missing, unknown or of a wrong type.
        """
        if isinstance(origin_or_fields, Origin):
            return origin_or_fields
        # under torch.compile a dict arrives as a tuple of pairs
        is_tuple_of_pairs = isinstance(origin_or_fields, tuple) and all(
            isinstance(x, tuple) and len(x) == 2 for x in origin_or_fields
        )
        fields = (
            dict(origin_or_fields)
            if is_tuple_of_pairs or isinstance(origin_or_fields, Mapping)
            else {}
        )
        if set(fields) == set(cls._fields):
            origin = cls(**fields)
            known_counts = [x for x in origin[1:4] if x is not None] + [origin.length]
            if isinstance(origin.model, str) and all(
                type(x) is int and x > 0 for x in known_counts
            ):
                return origin
        raise ValueError(
            f"CabConfig.origin must be None or a dict of {', '.join(cls._fields)}, got "
            f"{str(origin_or_fields)[:80]!r}."
        )

    @property
    def shape_text(self) -> str:
        """The numbers of layers and heads that are not None, such as "30 layers, 9 heads"."""
        counts_and_units = zip(self[1:4], ("layers", "heads", "KV heads"), strict=True)
        return ", ".join(
            [f"{count} {unit}" for count, unit in counts_and_units if count is not None]
        )


def _refuse_unknown_fields(config_class: ConfigClass) -> ConfigClass:
    """Make the constructor of a dataclass raise the errors of `CabConfig.from_dict`.

    The errors name unknown fields and list the known fields. The constructor of a dataclass raises
    a TypeError that does not list the fields.
    """
    original_init = config_class.__init__

    @functools.wraps(original_init)
    def __init__(self: Any, /, *positional_values: Any, **fields: Any) -> None:
        fields = _rename_old_fields(fields)
        _require_known_fields(fields)
        positional_fields = dict(
            zip([*FIELDS_BY_NAME][: len(positional_values)], positional_values, strict=True)
        )
        original_init(self, **positional_fields, **fields)

    config_class.__init__ = __init__
    return config_class


@_refuse_unknown_fields
@dataclass(frozen=True)
class CabConfig:
    """Settings of block-sparse attention: which blocks are selected, and how attention is computed.

    `cab_hf.apply_cab` saves the settings as ``model.config.cab_config = CabConfig(...).to_dict()``.
    A *row* is one query block of one head. A *sequence* is a batch row without its padding, or a
    packed document. Each layer selects the key blocks of every row.

    Args:
        query_block: Queries per row, in tokens. A multiple of 16. Default 128.
        key_block: Consecutive keys that are selected or skipped together, in tokens. A multiple of
            16 that divides ``query_block``, or that ``query_block`` divides. Default 64.
        sink_blocks: Key blocks at the start of a sequence that every row attends to. Default 1.
        local_blocks: Key blocks, up to and including the diagonal, that every row attends to. A row
            always attends to the key blocks of its own positions, even if this number is smaller.
            Default 3.
        dense_tail_blocks: Length of the dense tail, in query blocks. The tail is the last
            ``dense_tail_blocks * query_block`` tokens of a prompt or packed document. Rows with a
            token of the tail attend to all visible keys, because prompts often end in a question.
            `generate` and continuous batching record the end of the prompt. Any other model call
            counts as a complete prompt, so each chunk of a prompt then has a dense tail. Calls with
            fewer than ``query_block`` queries have no tail. Default 2.
        outlier_queries: Queries per block that are selected by farthest-point sampling
            (`reference.sample_outlier_queries`) and scored on half of the channels of every key.
            Outlier queries detect keys that very few queries of a block attend to. Rows with more
            than 262,144 visible keys have half as many. 0, or a power of two that divides
            ``query_block``. Default 16.
        typical_queries: Queries per block that are sampled at equal steps and scored on all
            channels of every ``typical_key_stride``-th key. Typical queries represent the queries
            that are not outliers. A power of two that divides ``query_block``. If the default does
            not divide ``query_block``, the largest power of two that divides both is used. Default
            32.
        typical_key_stride: Distance between the keys that typical queries are scored on, in tokens.
            Twice the distance for rows with more than 262,144 visible keys. A power of two that
            divides ``key_block``; 1 scores every key. Default 4.
        mass_threshold: A block is selected if it receives at least this share of the attention,
            averaged over the scored queries of a row. In [0, 1]; 0 selects every block, which is
            exact attention. For rows with more than 32,768 visible keys, the threshold is
            multiplied by 32,768 / keys, for example by 1/4 at 131,072 keys. Default 0.003.
        share_threshold: A block is also selected if it receives at least this share of the
            attention of any one scored query. In (0, 1]. Default 0.03.
        sparsity: Share of the blocks of a row that is dropped, in [0, 1). Predictor ``"frc"`` only.
            A number, or a `HeadTable` with a number per layer and head. Default 0.95.
        curvature: Curvature term of the score. Predictor ``"frc"`` only. ``"forman"`` is
            Forman-Ricci curvature, ``"additive"`` is direct minus ``redundancy`` times two-hop
            affinity, ``"none"`` disables the term. As published, ``"additive"`` depends on the
            number of key blocks of the call, so padding and packing change the selection. Default
            ``"forman"``.
        redundancy: Weight of the curvature term, in [0, 1]. Predictor ``"frc"`` only. 0 disables
            the term, as ``curvature="none"`` does. Default 1.0.
        max_density: Largest share of the blocks of a row that is selected, in (0, 1]. If more
            blocks qualify, the blocks with the highest scores are selected. Sink blocks, local
            blocks and the dense tail are always selected. Default 1.0.
        sampled_one_in: Sampling of blocks in training: each row of each head samples one of every
            ``sampled_one_in`` neighbouring key blocks. A sampled block that is not selected is
            attended to with ``sampled_one_in`` times its weight, to represent the blocks that are
            not selected. Gradients are then closer to the gradients of dense attention, and the
            trained model also works with dense attention. Nothing is sampled without gradients. 0
            disables sampling. Default 0.
        dense_layers: Indices of the layers that compute exact attention. Default ().
        min_length: Length below which a sequence is computed with exact attention, in tokens. The
            length includes the cache, so the first chunks of a long prompt are exact too. Calls
            with fewer than ``query_block`` queries are also exact, except single queries with
            ``sparse_decode``: a short last chunk of a prompt has the same arguments as a step of
            assisted decoding.
            Prompts with few tokens after a long cache are exact where dense attention was measured
            to be faster, and so are prompts of models with few heads (`cab_hf.break_even`). A value
            below 16384 disables the rule for few heads. 0 disables all these rules: every call with
            at least ``query_block`` queries is sparse, even where dense attention is faster.
            Default 16384.
        engine: Engine that computes attention over the selected blocks: ``"auto"`` (the fastest
            engine that supports the call), ``"flex"``, ``"triton"``, ``"gather"`` (on a CPU) or
            ``"reference"``. A named engine never falls back to another. Default ``"auto"``.
        predictor: Name of the registered predictor that selects blocks: ``"rows"``, ``"cascade"``
            (the same method, in the layers ``anchors`` only), ``"frc"`` (the published method, see
            `published`), or a predictor of your own. Default ``"rows"``.
        anchors: Indices of the layers that select blocks, ascending. Predictor ``"cascade"`` only.
            Each other sparse layer reuses the selection of the last anchor before it. The first
            sparse layer must be an anchor. Default ().
        head_map: Table [layers][heads] with the head of the anchor whose selection a head reuses.
            Predictor ``"cascade"`` only. () reuses the selection of the same head. Rows of anchors
            are ignored. Default ().
        sparse_decode: If True, a decode step of one query reads ``decode_tokens`` keys of the KV
            cache. Each step selects the keys to which a head of the group pays the largest share of
            attention. The cache needs an index of its keys, which `generate` and
            `cab_hf.index_cache` add. Without the index, a step reads all keys. Default False.
        decode_tokens: Keys that each KV head reads in a decode step with ``sparse_decode``: at
            least 128 tokens, or a share of the sequence in (0, 1). The keys include the first 16
            and the last 64 of the sequence. A step reads all keys of a sequence shorter than
            ``min_length`` or than four times the keys to read. With a share above 1/4, every step
            therefore reads all keys. Default 4096.
        check_finite: If True, raise an error for queries and keys that contain infinities or NaN.
            The check costs a pass over q and k and a wait for the device in every sparse layer.
            CUDA graphs ignore the check. Default False.
        origin: Model and length of the calibration, an `Origin` or a dict of its fields. A model
            with other numbers of layers or heads raises an error. None for settings without a
            calibration. Default None.

    Raises:
        ValueError: if a field has a bad value or is not read by the predictor. The message names
            the field, the value and the accepted values.
    """

    query_block: int = 128
    key_block: int = 64
    sink_blocks: int = 1
    local_blocks: int = 3
    dense_tail_blocks: int = 2
    outlier_queries: int = _make_predictor_field(CAB_PREDICTORS, default=16, off_value=0)
    typical_queries: int = _make_predictor_field(CAB_PREDICTORS, default=32)
    typical_key_stride: int = _make_predictor_field(CAB_PREDICTORS, default=4)
    mass_threshold: float = _make_predictor_field(CAB_PREDICTORS, default=0.003)
    share_threshold: float = _make_predictor_field(CAB_PREDICTORS, default=0.03)
    sparsity: float | HeadTable = _make_predictor_field((FRC_PREDICTOR,), default=0.95, off_value=0)
    curvature: str = _make_predictor_field((FRC_PREDICTOR,), default="forman", off_value="none")
    redundancy: float = _make_predictor_field((FRC_PREDICTOR,), default=1.0, off_value=0)
    max_density: float = _make_predictor_field((*CAB_PREDICTORS, FRC_PREDICTOR), default=1.0)
    sampled_one_in: int = 0
    dense_layers: tuple[int, ...] = ()
    min_length: int = 16384
    engine: str = "auto"
    predictor: str = "rows"
    anchors: tuple[int, ...] = _make_predictor_field(("cascade",), default=(), off_value=[])
    head_map: HeadTable = _make_predictor_field(("cascade",), default=(), off_value=[])
    sparse_decode: bool = False
    decode_tokens: int | float = 4096
    check_finite: bool = _make_predictor_field((*CAB_PREDICTORS, FRC_PREDICTOR), default=False)
    origin: Origin | None = None

    def __post_init__(self) -> None:
        self._check_block_sizes()
        count_fields = ("sink_blocks", "local_blocks", "dense_tail_blocks")
        count_fields += ("sampled_one_in", "min_length")
        self._require(count_fields, is_count, f"a whole number from 0 to {MAX_INT32}")
        for field_name, choices in CHOICES_BY_FIELD.items():
            self._require(
                (field_name,), choices.__contains__, "one of " + ", ".join(map(repr, choices))
            )
        self._check_sampled_queries()
        self._require(("mass_threshold",), is_fraction, "in [0, 1]")
        self._require(("share_threshold",), lambda x: is_fraction(x) and x > 0, "in (0, 1]")
        self._freeze_table(
            "sparsity",
            lambda x: is_fraction(x) and x < 1,
            "in [0, 1) so that every row keeps at least one block",
        )
        self._require(("max_density",), lambda x: is_fraction(x) and x > 0, "in (0, 1]")
        self._require(("redundancy",), is_fraction, "in [0, 1]")
        self._require(("predictor",), lambda x: isinstance(x, str) and x, "a name (str)")
        bool_fields = ("sparse_decode", "check_finite")
        self._require(bool_fields, lambda x: isinstance(x, bool), "True or False")

        self._require(
            ("decode_tokens",),
            lambda x: (is_count(x) and x >= 128) or (is_number(x) and 0 < x < 1),
            "a whole number >= 128, or a share in (0, 1)",
        )
        self._check_layers_and_heads()
        if self.origin is not None:
            object.__setattr__(self, "origin", Origin.of(self.origin))
        for field_name, ignoring_setting in find_unread_fields(vars(self)).items():
            raise ValueError(
                f"CabConfig.{field_name} is {short_repr(getattr(self, field_name))}, which "
                f"{ignoring_setting} does not read. Leave it at "
                f"{FIELDS_BY_NAME[field_name].default!r}{_describe_remedy_for_unread(field_name)}."
            )
        if self.predictor == "cascade":
            self._check_cascade()

    @classmethod
    def published(
        cls, /, sparsity: float = 0.95, curvature: str = "forman", **overrides: Any
    ) -> CabConfig:
        """Return the published CAB recipe, predictor "frc": row-wise top-k by curvature.

        Args:
            sparsity: Share of the blocks of a row that is dropped, in [0, 1).
            curvature: ``"forman"`` (with ``redundancy=1``, which keeps the lowest Forman-Ricci
                curvature), ``"additive"`` or ``"none"``.
            overrides: Values of other fields, by name. With another ``predictor``, fields of the
                recipe that this predictor does not read return to their defaults.
        """
        recipe = {
            "query_block": 64,
            "key_block": 64,
            "sink_blocks": 0,
            "local_blocks": 1,
            "dense_tail_blocks": 0,
            "predictor": FRC_PREDICTOR,
            "redundancy": 1.0 if curvature == "forman" else 0.3,
        }
        return cls(**recipe, sparsity=sparsity, curvature=curvature).changed(**overrides)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> CabConfig:
        """Return the config with the fields of ``settings``, a dict such as `to_dict` returns.

        Args:
            settings: fields by name; other fields have their defaults.

        Raises:
            ValueError: if ``settings`` is not a dict, has an unknown field, or sets a field that
                has no effect with the other settings.
        """
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"cab_config must be a dict of CabConfig fields, got {short_repr(settings)}. "
                "CabConfig(...).to_dict() returns one."
            )
        settings = _rename_old_fields(settings)
        _require_known_fields(settings)
        return cls(**settings)

    @classmethod
    def reading(cls, fields: Mapping[str, Any]) -> CabConfig:
        """Return a config with ``fields``, except fields that have no effect with the others.

        Args:
            fields: fields by name. Fields without effect return to their defaults; see
                `find_unread_fields`.
        """
        unread_fields = find_unread_fields(fields)
        return cls(
            **{
                field_name: value
                for field_name, value in fields.items()
                if field_name not in unread_fields
            }
        )

    def changed(self, /, **fields: Any) -> CabConfig:
        """Return this config with other values for some fields.

        Any other field returns to its default if it has no effect in the new config.

        Args:
            fields: new values, by name.

        Raises:
            ValueError: as in `from_dict`; the new config must read all ``fields``.
        """
        fields = _rename_old_fields(fields)
        _require_known_fields(fields)
        base_config = CabConfig.reading({**vars(self), **fields})
        return dataclasses.replace(base_config, **fields)

    @classmethod
    def calibrated(cls, path: str | Path) -> CabConfig:
        """Return the config in a file that `save` wrote, for example after a calibration.

        Args:
            path: JSON file.

        Raises:
            ValueError: if the file does not exist or contains no config.
        """
        if not Path(path).is_file():
            raise ValueError(
                f"{str(path)!r} is not a file. Pass a file written by CabConfig.save, a CabConfig, "
                "or a dict of its fields."
            )
        try:
            file_content = json.loads(Path(path).read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} must be a JSON file of CabConfig fields: {error}.") from None
        return cls.from_dict(file_content)

    def save(self, path: str | Path) -> None:
        """Write this config to a JSON file that `calibrated` reads."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n", "utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values, ready for ``model.config.cab_config``."""
        fields = {field_name: _to_json_value(value) for field_name, value in vars(self).items()}
        if self.origin is None:
            del fields["origin"]
        return fields

    def _check_block_sizes(self) -> None:
        """Raise a ValueError for block sizes that are invalid or do not fit each other."""
        self._require(
            ("query_block", "key_block"),
            lambda size: is_count(size) and size and size % 16 == 0,
            f"a whole number from 16 to {MAX_INT32}, a multiple of 16",
        )
        smaller_block, larger_block = sorted((self.query_block, self.key_block))
        self._require(
            ("key_block",),
            lambda _: larger_block % smaller_block == 0,
            f"a divisor or a multiple of query_block={self.query_block}",
        )

    def _check_sampled_queries(self) -> None:
        """Raise a ValueError for numbers of sampled queries or keys that do not fit the blocks."""
        default_typical_queries = FIELDS_BY_NAME["typical_queries"].default
        requirement = f"a power of two that divides query_block={self.query_block}"
        self._require(
            ("typical_queries",),
            lambda x: (
                self._is_power_of_two_divisor(x)
                or (is_whole_number(x, 1) and x == default_typical_queries)
            ),
            requirement,
        )
        self._require(
            ("typical_key_stride",),
            lambda x: is_whole_number(x, 1) and x & (x - 1) == 0 and self.key_block % x == 0,
            f"a power of two that divides key_block={self.key_block}",
        )
        self._require(
            ("outlier_queries",),
            lambda x: self._is_power_of_two_divisor(x) or (is_count(x) and x == 0),
            f"0 or {requirement}",
        )

    def _check_layers_and_heads(self) -> None:
        """Check indices of layers and the table of heads, and turn lists into tuples.

        JSON has lists in place of tuples, and a frozen dataclass must be hashable.

        Raises:
            ValueError: if ``dense_layers``, ``anchors`` or ``head_map`` has a bad value.
        """
        self._require(
            ("dense_layers", "anchors"),
            lambda x: isinstance(x, (tuple, list)) and all(is_count(layer) for layer in x),
            "a tuple of layer indices >= 0",
        )
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        object.__setattr__(self, "anchors", tuple(self.anchors))
        # checked before `_freeze_table`, which also accepts a single number for all heads
        same_heads_description = "() for the same heads"
        self._require(
            ("head_map",),
            lambda x: isinstance(x, (tuple, list)),
            f"a table [layers][heads], or {same_heads_description}",
        )
        if self.head_map:
            self._freeze_table("head_map", is_count, same_heads_description)
        else:
            object.__setattr__(self, "head_map", ())

    def _check_cascade(self) -> None:
        """Raise a ValueError if ``anchors`` is empty, not ascending or contains a dense layer."""

        self._require(
            ("anchors",),
            lambda layers: layers != () and list(layers) == sorted(set(layers)),
            "ascending layer indices, at least one",
        )
        dense_anchors = sorted(set(self.anchors) & set(self.dense_layers))
        if dense_anchors:
            raise ValueError(
                "CabConfig.anchors must contain no layer of dense_layers, got layer "
                f"{dense_anchors[0]} in both. Remove it from one of the two fields."
            )

    def _freeze_table(
        self, field_name: str, is_valid: Callable[[Any], bool], requirement: str
    ) -> None:
        """Check a field that is one value or a table of values, and turn lists into tuples.

        Args:
            field_name: name of the field.
            is_valid: function that returns True for a valid value.
            requirement: description of valid values, for the error.

        Raises:
            ValueError: if the field is neither a valid value nor a table of valid values.
        """
        value = getattr(self, field_name)
        if not isinstance(value, (tuple, list)):
            self._require((field_name,), is_valid, f"{requirement}, or a table")
            return
        table_rows = tuple(tuple(row) if isinstance(row, (tuple, list)) else () for row in value)
        is_rectangular = len({len(row) for row in table_rows}) == 1 and table_rows[0] != ()
        if not is_rectangular or not all(
            is_valid(table_value) for row in table_rows for table_value in row
        ):
            raise ValueError(
                f"CabConfig.{field_name} must be {requirement}, or a table [layers][heads] of such "
                f"numbers with rows of one length, got {short_repr(value)}."
            )
        # JSON has lists in place of tuples, and a frozen dataclass must be hashable
        object.__setattr__(self, field_name, table_rows)

    def _is_power_of_two_divisor(self, x: Any) -> bool:
        """Return True if ``x`` is a power of two that divides ``query_block``."""
        return is_whole_number(x, 1) and x & (x - 1) == 0 and self.query_block % x == 0

    def _require(
        self, field_names: tuple[str, ...], is_valid: Callable[[Any], bool], requirement: str
    ) -> None:
        """Raise a ValueError for the first field whose value is not accepted.

        Args:
            field_names: names of the fields.
            is_valid: function that returns True for a valid value.
            requirement: description of valid values, for the error.
        """
        for field_name in field_names:
            value = getattr(self, field_name)
            require(is_valid(value), f"CabConfig.{field_name}", value, requirement)


FIELDS_BY_NAME = {field.name: field for field in dataclasses.fields(CabConfig)}


# functions in place of properties, because torch.compile does not trace properties of constants
def block_sizes(config: CabConfig) -> tuple[int, int]:
    """Return the sizes of (query, key) blocks, in tokens."""
    return config.query_block, config.key_block


def num_typical_queries(config: CabConfig) -> int:
    """Return the number of typical queries per block, a power of two that divides the block."""
    return gcd(config.typical_queries, config.query_block)


def tail_and_query_block_sizes(config: CabConfig) -> tuple[int, int]:
    """Return the length of the dense tail and the size of a query block, both in tokens.

    The two numbers are the arguments of `KeyRanges.tail`.
    """
    return config.dense_tail_blocks * config.query_block, config.query_block


def find_unread_fields(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that have no effect.

    Args:
        settings: fields by name, with values of any type; missing fields have their defaults.

    Returns:
        A dict from each such field to the setting that does not read the field, for example
        {"decode_tokens": "sparse_decode=False"}.
    """
    predictor = settings.get("predictor", FIELDS_BY_NAME["predictor"].default)
    unread_fields = {}
    decode_tokens = settings.get("decode_tokens", CabConfig.decode_tokens)
    if decode_tokens != CabConfig.decode_tokens and not settings.get("sparse_decode", False):
        unread_fields["decode_tokens"] = "sparse_decode=False"
    if predictor not in BUILT_IN_PREDICTORS:
        return unread_fields
    for field_name, value in settings.items():
        field_metadata = FIELDS_BY_NAME[field_name].metadata
        if (
            not field_metadata
            or value == FIELDS_BY_NAME[field_name].default
            or value == field_metadata["off"]
        ):
            continue
        if predictor not in field_metadata["predictors"]:
            unread_fields[field_name] = f"predictor={predictor!r}"
    return unread_fields


def _describe_remedy_for_unread(field_name: str) -> str:
    """Return the remedy for a field that has no effect, as the end of a sentence."""
    if field_name == "decode_tokens":
        return ", or set sparse_decode=True"
    predictor_settings = [
        f"predictor={x!r}" for x in FIELDS_BY_NAME[field_name].metadata["predictors"]
    ]
    return f", or select a predictor that reads it ({', '.join(predictor_settings)})"


def _rename_old_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with current field names, and warn once about an old name.

    In a config with an old name, ``typical_key_stride`` is 1: earlier versions scored typical
    queries on every key.
    """
    settings = dict(settings)
    if OLD_OUTLIER_FIELD not in settings:
        return settings
    if "outlier_queries" in settings:
        raise ValueError(
            f"CabConfig.{OLD_OUTLIER_FIELD} is the old name of outlier_queries, got both names. "
            f"Remove {OLD_OUTLIER_FIELD}."
        )
    warn_once(
        (OLD_OUTLIER_FIELD,),
        f"CabConfig.{OLD_OUTLIER_FIELD} is now outlier_queries. Rename it: a later version will "
        "not accept the old name.",
    )
    settings["outlier_queries"] = settings.pop(OLD_OUTLIER_FIELD)
    if "typical_queries" in settings:
        settings.setdefault("typical_key_stride", 1)
    return settings


def _require_known_fields(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError that names every unknown field and lists the known fields."""
    unknown_names = [
        repr(field_name) for field_name in settings if field_name not in FIELDS_BY_NAME
    ]
    if unknown_names:
        joined_names = " or ".join(filter(None, (", ".join(unknown_names[:-1]), unknown_names[-1])))
        raise ValueError(
            f"CabConfig has no field {joined_names}; its fields are {', '.join(FIELDS_BY_NAME)}."
        )


def _to_json_value(field_value: Any) -> Any:
    """Return the value of a field for JSON: a tuple as a list, an `Origin` as a dict."""
    if isinstance(field_value, Origin):
        return field_value._asdict()
    return (
        [_to_json_value(element) for element in field_value]
        if isinstance(field_value, tuple)
        else field_value
    )
