"""What a user decides: one frozen, validated dataclass, saved as a dict in the model config."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cab_hf.fit import Origin, number

COARSEN = ("box", "mean", "max_l2")
CURVATURE = ("none", "additive", "forman")
SELECT = ("clusters", "topk")
# blocks and tokens are counted in int32
MOST = 2**31 - 1
# fields that take a table of layers and heads
TABLES = ("mass", "bridges", "sparsity", "exact_queries", "head_map")
CHOICES = {"coarsen": COARSEN, "select": SELECT, "curvature": CURVATURE}
# what a row keeps where ``mass`` is None, as (keys it sees, share of its estimated attention mass):
# constant outside and on a line between. Measured on SmolLM2, see eval/results
MASS_BY_KEYS = ((8192, 0.95), (16384, 0.72))
# a number for every head of every layer, [layers][heads]
Table = tuple[tuple[float, ...], ...]


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
        dense_tail: in query blocks. A query block with one of the last ``dense_tail * query_block``
            tokens of a text (of each packed document) attends everything it may: what is asked at
            the end is asked by these rows. Nobody knows whether more comes, so what ends a call
            counts as an end: in chunked prefill every chunk has a tail, and attends more than the
            whole text at once would, never less. Calls of fewer than ``query_block`` queries have
            none.
        coarsen: how a key block is summarised: ``"box"`` (per-channel bounds and mean), ``"mean"``,
            or ``"max_l2"`` (its key of largest norm, as for queries; the published recipe).
        select: ``"clusters"`` takes the smallest set of blocks holding ``mass``, then bridges;
            ``"topk"`` takes a fixed share of every row.
        mass: with ``"clusters"``, the share of estimated attention mass a row keeps, in (0, 1]; 1
            lists every block and is exact. Or a `Table` of them, in [0, 1]: a head of 1 attends
            everything and lists nothing, one of 0 keeps no block for its mass. None goes by the
            keys that a row sees, along `MASS_BY_KEYS`: 0.95 up to 8,192 of them, where dense
            attention is cheap and weak look-ups need many blocks, and 0.72 from 16,384 on.
        bridges: with ``"clusters"``, the share of a row's blocks added by the largest share of
            attention that any of the ``exact_queries`` gives them, or without those by curvature,
            in [0, 1]. A number or a `Table`.
        exact_queries: how many queries of a block are scored against every key: its outliers, those
            least like the block's mean query (`reference.outlier_queries`). They see what the mean
            hides, and half of the estimated mass is theirs. 0 leaves the choice to the estimate
            over block summaries. A divisor of ``query_block``, or a `Table`.
        sparsity: with ``"topk"``, the share of a row's blocks that is dropped, in [0, 1). A number
            or a `Table`.
        curvature: ``"additive"`` (direct minus ``redundancy`` times two-hop), ``"forman"``
            (Forman-Ricci), or ``"none"``. With ``"topk"``, ``"additive"`` weighs by the key blocks
            of the call, as published: there padding and packing change what a text selects.
        redundancy: weight of the curvature term, in [0, 1]; 0 is the selection by magnitude, bit
            for bit.
        max_density: at most this share of a row's blocks is kept, in (0, 1]; forced blocks always
            are, and heads of mass 1 in a `Table` know no such bound.
        dense_layers: layer indices computed with exact attention.
        min_length: in tokens. A text (a packed document, a row without its padding) that has fewer
            so far is computed with exact attention, and so are the first chunks of a longer prompt.
            So is, unless ``sparse_decode``, what has fewer than ``query_block`` queries in a call:
            the last chunk of a prompt cannot be told from a step of assisted decoding.
        engine: ``"auto"`` (the fastest that can), ``"flex"``, ``"triton"`` or ``"reference"``. One
            asked for by name never falls back.
        predictor: name of a registered predictor; ``"curvature"`` is CAB, ``"cascade"`` is CAB
            that decides in ``anchors`` alone.
        anchors: with ``"cascade"``, indices of the layers that choose blocks, ascending. The layers
            behind each attend what it has chosen. The first sparse layer is one of them.
        head_map: with ``"cascade"``, a table [layers][heads]: the head of its anchor whose blocks a
            head attends; () for the same head. Rows of anchors are not read.
        sparse_decode: when True, single-token steps attend only the blocks the predictor selects;
            otherwise, and on a static cache, they attend everything.
        check_finite: refuse queries and keys that hold infinities or NaN, by name. Costs a pass
            over both and a wait for the device in every sparse layer; not under CUDA graphs.
        origin: what a calibration was measured for, an `Origin` or a dict of its fields; a model of
            other layers or heads is refused. None for settings that nobody calibrated.

    Raises:
        ValueError: naming the field, the value seen and what is accepted.
    """

    query_block: int = 128
    key_block: int = 64
    sink_blocks: int = 1
    local_blocks: int = 3
    dense_tail: int = 1
    coarsen: str = "box"
    select: str = "clusters"
    mass: float | Table | None = None
    bridges: float | Table = 0.02
    exact_queries: int | Table = 16
    sparsity: float | Table = 0.95
    curvature: str = "additive"
    redundancy: float = 0.3
    max_density: float = 1.0
    dense_layers: tuple[int, ...] = ()
    min_length: int = 8192
    engine: str = "auto"
    predictor: str = "curvature"
    anchors: tuple[int, ...] = ()
    head_map: Table = ()
    sparse_decode: bool = False
    check_finite: bool = False
    origin: Origin | None = None

    def __post_init__(self) -> None:
        blocks = ("query_block", "key_block")
        whole = f"a whole number from 16 to {MOST}, a multiple of 16"
        self._require(blocks, lambda size: is_count(size) and size and size % 16 == 0, whole)
        fits = max(self.query_block, self.key_block) % min(self.query_block, self.key_block) == 0
        of_rows = f"a divisor or a multiple of query_block={self.query_block}"
        self._require(("key_block",), lambda _: fits, of_rows)
        counts = ("sink_blocks", "local_blocks", "dense_tail", "min_length")
        self._require(counts, is_count, f"a whole number from 0 to {MOST}")
        for name, choices in CHOICES.items():
            self._require((name,), choices.__contains__, "one of " + ", ".join(map(repr, choices)))
        if isinstance(self.mass, (tuple, list)):
            self._freeze_table("mass", is_share, "in [0, 1]")
        else:
            above = "in (0, 1], a table, or None"
            self._require(("mass",), lambda x: x is None or (is_share(x) and x > 0), above)
        self._freeze_table("bridges", is_share, "in [0, 1]")
        fits = f"0 or a divisor of query_block={self.query_block}"
        self._freeze_table(
            "exact_queries", lambda x: is_whole(x, 0) and self.query_block % (x or 1) == 0, fits
        )
        every_row = "in [0, 1): every row needs at least one block"
        self._freeze_table("sparsity", lambda x: is_share(x) and x < 1, every_row)
        self._require(("max_density",), lambda x: is_share(x) and x > 0, "in (0, 1]")
        self._require(("redundancy",), is_share, "in [0, 1]")
        self._require(("engine", "predictor"), lambda x: isinstance(x, str), "a name (str)")
        switches = ("sparse_decode", "check_finite")
        self._require(switches, lambda x: isinstance(x, bool), "True or False")

        def indices(layers: Any) -> bool:
            return isinstance(layers, (tuple, list)) and all(is_count(i) for i in layers)

        self._require(("dense_layers", "anchors"), indices, "a tuple of layer indices >= 0")
        # a list is what JSON gives back; a frozen value must hash
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        object.__setattr__(self, "anchors", tuple(self.anchors))
        # an empty one is a table of nothing, which is what JSON gives back of ()
        object.__setattr__(self, "head_map", self.head_map or ())
        if self.head_map != ():
            self._freeze_table("head_map", is_count, "() for the same heads")
        if self.origin is not None:
            object.__setattr__(self, "origin", Origin.of(self.origin))
        if self.predictor == "cascade":
            self._check_cascade()

    @classmethod
    def published(
        cls, sparsity: float = 0.95, curvature: str = "forman", **overrides: Any
    ) -> CabConfig:
        """The published CAB recipe: max-L2 tokens, ReLU scores, row-wise top-k by curvature.

        Args:
            sparsity: share of every row's blocks that is dropped.
            curvature: ``"forman"`` (``redundancy`` 1: lowest Forman-Ricci curvature kept),
                ``"additive"`` or ``"none"``.
            overrides: any other field.
        """
        recipe = {
            "query_block": 64,
            "key_block": 64,
            "sink_blocks": 0,
            "local_blocks": 1,
            "dense_tail": 0,
            "exact_queries": 0,
            "coarsen": "max_l2",
            "select": "topk",
            "redundancy": 1.0 if curvature == "forman" else cls.redundancy,
        }
        return cls(**{**recipe, "sparsity": sparsity, "curvature": curvature, **overrides})

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> CabConfig:
        """The config saved by `to_dict`. Raises ValueError for a field that does not exist."""
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"cab_config is {settings!r}; it must be a dict of CabConfig fields "
                "(CabConfig(...).to_dict() makes one)."
            )
        fields = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in fields:
                known = ", ".join(fields)
                raise ValueError(f"CabConfig has no field {name!r}; its fields are {known}.")
        return cls(**settings)

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

    @property
    def curved(self) -> bool:
        """Whether curvature takes part in the selection at all."""
        if self.curvature == "none" or self.redundancy == 0:
            return False
        exact = self.exact_queries
        # heads that score queries exactly rank by those
        if all(map(all, exact)) if isinstance(exact, tuple) else exact:
            return False
        # with clusters it ranks bridges, and a row that keeps all its mass has none to add
        table = self.bridges if isinstance(self.bridges, tuple) else ((self.bridges,),)
        bridged = any(map(any, table)) and self.mass != 1
        return self.select == "topk" or bridged

    def to_dict(self) -> dict[str, Any]:
        """Plain values that survive JSON, ready for ``model.config.cab_config``."""
        told = {name: _thawed(value) for name, value in vars(self).items()}
        if self.origin is None:
            del told["origin"]
        return told

    def _check_cascade(self) -> None:
        """What deciding in some layers asks of the other fields."""

        def ascending(layers: tuple[int, ...]) -> bool:
            return layers != () and list(layers) == sorted(set(layers))

        self._require(("anchors",), ascending, "ascending layer indices, at least one of them")
        dense = sorted(set(self.anchors) & set(self.dense_layers))
        if dense:
            raise ValueError(
                f"CabConfig.anchors has {dense[0]}, which is in dense_layers and chooses nothing; "
                "take it out of one of them."
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
                f"CabConfig.{name} is {_short(value)}; it must be {what}, or a table "
                "[layers][heads] of such numbers, its rows of one length."
            )
        # as with dense_layers: a list is what JSON gives back
        object.__setattr__(self, name, rows)

    def _require(self, names: tuple[str, ...], accepts: Callable[[Any], bool], what: str) -> None:
        for name in names:
            value = getattr(self, name)
            require(accepts(value), f"CabConfig.{name}", value, what)


class Budgets(NamedTuple):
    """What the heads of one layer get: fields of `CabConfig`, a number for each head or for all.

    Attributes:
        mass: of rows that see few keys, where it goes by keys.
        whole: heads that attend everything, and so list nothing.
    """

    mass: tuple[float, ...]
    bridges: tuple[float, ...]
    sparsity: tuple[float, ...]
    exact_queries: tuple[int, ...] = (0,)
    whole: tuple[int, ...] = ()

    @property
    def alike(self) -> bool:
        """Whether there is one number for all heads, and none is apart."""
        return not self.whole and all(len(numbers) == 1 for numbers in self[:4])

    def of_head(self, head: int) -> tuple[float, float, float, int]:
        """(mass, bridges, sparsity, exact_queries) of one head."""
        return tuple([numbers[head if len(numbers) > 1 else 0] for numbers in self[:4]])

    def of_heads(self, heads: Sequence[int]) -> Budgets:
        """Those of some heads, as far as they are listed."""
        picked = [
            tuple([numbers[head] for head in heads]) if len(numbers) > 1 else numbers
            for numbers in self[:4]
        ]
        return Budgets(*picked)

    def exact(self, heads: int) -> tuple[int, ...]:
        """Those of ``heads`` that choose by exact scores."""
        if not any(self.exact_queries):
            return ()
        listed = [head for head in range(heads) if head not in self.whole]
        return tuple([head for head in listed if self.of_head(head)[3] > 0])


def require_layers(config: CabConfig, model_config: Any) -> None:
    """Refuse layers, and tables of layers and heads, that a model does not have.

    Args:
        model_config: a transformers config; what it does not count is not compared.

    Raises:
        ValueError: naming the field, what is in it, and what the model has.
    """
    fields = ("num_hidden_layers", "decoder_layers")
    counts = [n for n in [getattr(model_config, name, None) for name in fields] if is_whole(n)]
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
        told = [f"{n} {of}" for n, of in zip(here, ("layers", "heads"), strict=True) if n]
        raise ValueError(
            f"CabConfig.{name} has {shape[0]} layers of {shape[1]} heads, and this model has "
            f"{' of '.join(told)}; calibrate this model, or give settings without tables."
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
            "one, for which nobody chooses; add it."
        )


# functions: torch.compile traces no method of a value that is a constant to it
def budgets_of(config: CabConfig, layer: int | None, heads: int) -> Budgets:
    """What each of the ``heads`` of a layer gets.

    Raises:
        ValueError: where a table has no such layer or another number of heads, or there is a table
            and the layer has no index.
    """
    fields = ("mass", "bridges", "sparsity", "exact_queries")
    mass, bridges, sparsity, exact = [_of_layer(config, name, layer, heads) for name in fields]
    if config.mass is None:
        mass = (MASS_BY_KEYS[0][1],)
    whole: tuple[int, ...] = ()
    if config.select == "clusters":
        if isinstance(config.mass, tuple):
            whole = tuple([head for head in range(heads) if mass[head] == 1])
        elif config.mass == 1:
            # everything is listed: nothing is to be scored
            exact = (0,)
    numbers = [x[:1] if len(set(x)) == 1 else x for x in (mass, bridges, sparsity, exact)]
    return Budgets(*numbers, whole)


def _of_layer(config: CabConfig, name: str, layer: int | None, heads: int) -> tuple[float, ...]:
    """The row of a field that may be a table, or its one number."""
    table = getattr(config, name)
    if not isinstance(table, tuple):
        return (table,)
    if layer is None:
        raise ValueError(
            f"CabConfig.{name} is a table of layers, and this layer has no index; give one number "
            "for all."
        )
    if layer >= len(table) or heads != len(table[0]):
        raise ValueError(
            f"CabConfig.{name} has {len(table)} layers of {len(table[0])} heads, which do not fit "
            f"layer {layer} of {heads} heads; calibrate this model, or give one number."
        )
    return table[layer]


def _thawed(value: Any) -> Any:
    if isinstance(value, Origin):
        return value._asdict()
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    """A value as a sentence can hold it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def require(accepted: bool, name: str, value: Any, what: str) -> None:
    """Refuse the ``value`` of an argument, in one sentence, unless it is ``accepted``."""
    if not accepted:
        raise ValueError(f"{name} is {_short(value)}; it must be {what}.")


def is_whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_count(value: Any) -> bool:
    return is_whole(value, 0) and value <= MOST


def is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1
