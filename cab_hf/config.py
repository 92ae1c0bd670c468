"""What a user decides: one frozen, validated dataclass, saved as a dict in the model config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COARSEN = ("box", "mean", "max_l2")
CURVATURE = ("none", "additive", "forman")
SELECT = ("clusters", "topk")


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
        coarsen: how a key block is summarised: ``"box"`` (per-channel bounds and mean), ``"mean"``,
            or ``"max_l2"`` (its key of largest norm, as for queries; the published recipe).
        select: ``"clusters"`` takes the smallest set of blocks holding ``mass``, then bridges;
            ``"topk"`` takes a fixed share of every row.
        mass: with ``"clusters"``, the share of estimated attention mass a row keeps, in (0, 1].
            1 keeps every block and is exact.
        bridges: with ``"clusters"``, the share of a row's blocks added by curvature score, in
            [0, 1].
        sparsity: with ``"topk"``, the share of a row's blocks that is dropped, in [0, 1).
        curvature: ``"additive"`` (direct minus ``redundancy`` times two-hop), ``"forman"``
            (Forman-Ricci), or ``"none"``.
        redundancy: weight of the curvature term, in [0, 1]; 0 is the selection by magnitude, bit
            for bit.
        max_density: at most this share of a row's blocks is kept, in (0, 1]; forced blocks always
            are.
        dense_layers: layer indices computed with exact attention.
        min_length: inputs with fewer keys than this are computed with exact attention.
        engine: ``"auto"`` (the fastest that can), ``"flex"``, ``"triton"`` or ``"reference"``. One
            asked for by name never falls back.
        predictor: name of a registered predictor; ``"curvature"`` is CAB.
        sparse_decode: when True, single-token steps attend only the blocks the predictor selects;
            otherwise, and on a static cache, they attend everything.
        check_finite: refuse queries and keys that hold infinities or NaN, by name. Costs a pass
            over both and a wait for the device in every sparse layer; not under CUDA graphs.

    Raises:
        ValueError: naming the field, the value seen and what is accepted.
    """

    query_block: int = 128
    key_block: int = 64
    sink_blocks: int = 1
    local_blocks: int = 2
    coarsen: str = "box"
    select: str = "clusters"
    mass: float = 0.9
    bridges: float = 0.05
    sparsity: float = 0.95
    curvature: str = "additive"
    redundancy: float = 0.3
    max_density: float = 1.0
    dense_layers: tuple[int, ...] = ()
    min_length: int = 16384
    engine: str = "auto"
    predictor: str = "curvature"
    sparse_decode: bool = False
    check_finite: bool = False

    def __post_init__(self) -> None:
        for name in ("query_block", "key_block"):
            size = self._whole(name, least=16)
            if size % 16:
                self._refuse(name, "a multiple of 16")
        if max(self.query_block, self.key_block) % min(self.query_block, self.key_block):
            self._refuse("key_block", f"a divisor or a multiple of query_block={self.query_block}")
        for name in ("sink_blocks", "local_blocks", "min_length"):
            self._whole(name, least=0)
        for name, choices in (("coarsen", COARSEN), ("select", SELECT), ("curvature", CURVATURE)):
            if getattr(self, name) not in choices:
                self._refuse(name, "one of " + ", ".join(map(repr, choices)))
        self._share("mass", above=0.0)
        self._share("max_density", above=0.0)
        self._share("bridges")
        self._share("redundancy")
        self._share("sparsity")
        if self.sparsity == 1:
            self._refuse("sparsity", "below 1: every row needs at least one block")
        for name in ("engine", "predictor"):
            if not isinstance(getattr(self, name), str):
                self._refuse(name, "a name (str)")
        for name in ("sparse_decode", "check_finite"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "True or False")
        layers = self.dense_layers
        if not isinstance(layers, (tuple, list)) or not all(_is_int(i) and i >= 0 for i in layers):
            self._refuse("dense_layers", "a tuple of layer indices >= 0")
        # a list is what JSON gives back; a frozen value must hash
        object.__setattr__(self, "dense_layers", tuple(layers))

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
        unknown = sorted(set(settings) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            known = ", ".join(field.name for field in dataclasses.fields(cls))
            raise ValueError(f"CabConfig has no field {unknown[0]!r}; its fields are {known}.")
        return cls(**settings)

    @property
    def curved(self) -> bool:
        """Whether curvature takes part in the selection at all."""
        if self.curvature == "none" or self.redundancy == 0:
            return False
        # with clusters it ranks bridges, and a row that keeps all its mass has none to add
        return self.select == "topk" or (self.bridges > 0 and self.mass < 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that survive JSON, ready for ``model.config.cab_config``."""
        return {**dataclasses.asdict(self), "dense_layers": list(self.dense_layers)}

    def _refuse(self, name: str, accepted: str) -> None:
        raise ValueError(f"CabConfig.{name} is {getattr(self, name)!r}; it must be {accepted}.")

    def _whole(self, name: str, least: int) -> int:
        value = getattr(self, name)
        if not _is_int(value) or value < least:
            self._refuse(name, f"a whole number >= {least}")
        return value

    def _share(self, name: str, above: float | None = None) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # written so that NaN fails too
        if not number or not 0 <= value <= 1 or (above is not None and not value > above):
            self._refuse(name, "in (0, 1]" if above is not None else "in [0, 1]")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
