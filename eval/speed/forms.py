"""Uneven budgets, as a calibration would give them, for heads that nothing was calibrated on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.plan import Spans
from cab_hf.predictors import Call, make_predictor

SPELLINGS = "uniform:DENSITY, whole:SHARE:DENSITY or exact:SHARE:QUERIES:DENSITY"
# kind -> what its spelling gives, in order
GIVEN = {
    "uniform": ("density",),
    "whole": ("share", "density"),
    "exact": ("share", "queries", "density"),
}
# halvings of the bracket around a max_density: 1/16,384 is left of it
HALVINGS = 14
# its multiples, modulo 1, stand far apart however many there are
GOLDEN = 0.6180339887498949

Pairs = Collection[tuple[int, int]]  # (layer, head)


class Form(NamedTuple):
    """Which share of all heads is apart, and how.

    Attributes:
        kind: ``"uniform"`` has none apart, heads of ``"whole"`` attend everything, those of
            ``"exact"`` choose by exact scores.
        density: what all heads together attend.
        share: of the heads, those apart.
        queries: how many of a query block are scored, its outliers.
    """

    kind: str
    density: float
    share: float = 0.0
    queries: int = 0

    @classmethod
    def parse(cls, text: str) -> Form:
        """The form of that spelling. Raises ValueError where there is none."""
        kind, *numbers = text.strip().split(":")
        try:
            given = dict(zip(GIVEN.get(kind, ()), map(_number, numbers), strict=True))
            form = cls(kind, **given)
        except (TypeError, ValueError):
            form = None
        if form is None or not form._possible():
            raise ValueError(
                f"budgets are {SPELLINGS}: shares in (0, 1], whole heads fewer than the density, a "
                f"whole number of queries; got {text!r}."
            )
        return form

    def _possible(self) -> bool:
        shares = 0 < self.density <= 1 and (self.kind == "uniform" or 0 < self.share <= 1)
        counted = isinstance(self.queries, int) and (self.kind != "exact" or self.queries > 0)
        return shares and counted and self.whole < self.density

    def __str__(self) -> str:
        """As it is spelled."""
        return ":".join([self.kind, *(f"{getattr(self, name):g}" for name in GIVEN[self.kind])])

    @property
    def whole(self) -> float:
        """The share of heads that attend everything."""
        return self.share if self.kind == "whole" else 0.0

    def table(self, apart: Pairs, layers: int, heads: int, mass: float) -> dict[str, Any]:
        """The field of CabConfig, [layers][heads], that sets the heads ``apart`` from the others.

        ``mass`` is that of the others where a table of it is made.
        """
        if self.kind == "uniform":
            return {}
        own = {"whole": ("mass", 1.0, mass), "exact": ("exact_queries", self.queries, 0)}
        name, there, elsewhere = own[self.kind]
        return {
            name: tuple(
                tuple(there if (layer, head) in apart else elsewhere for head in range(heads))
                for layer in range(layers)
            )
        }


def spelled(text: str) -> str:
    """The one spelling of a form, so that a case has one name."""
    return str(Form.parse(text))


def spread(layers: int, heads: int) -> list[tuple[int, int]]:
    """Every (layer, head): however many of the first are taken, layers have as many, or one more.

    Of one layer, neighbours in the list are far apart.
    """
    order = sorted(range(heads), key=lambda turn: turn * GOLDEN % 1)
    places = sorted(range(heads), key=order.__getitem__)
    return [(layer, (place + layer) % heads) for place in places for layer in range(layers)]


def filled(config: CabConfig, density: float, q: Tensor, k: Tensor) -> CabConfig:
    """``config`` with the max_density by which a head attends ``density``, as nearly as it can.

    Forced blocks and rows that attend everything count. Which blocks are chosen does not matter
    where the budget is filled, so that one head tells it for all.

    Args:
        config: one budget for all heads.
        q, k: [1, 1, N, D], of the length that is asked for.
    """
    length = q.shape[2]
    known = Call(Spans.causal(1, length, length, q.device), q.shape[-1] ** -0.5)

    def found(max_density: float) -> float:
        predictor = make_predictor(replace(config, max_density=max_density))
        return predictor(q, k, known).density()

    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) < density else (low, middle)
    # the least there is where forced blocks alone are more
    near = [high] if low == 0 else [low, high]
    best = min(near, key=lambda max_density: abs(found(max_density) - density))
    return replace(config, max_density=best)


def budgeted(
    config: CabConfig,
    apart: Mapping[Form, Pairs],
    layers: int,
    heads: int,
    q: Tensor,
    k: Tensor,
    whole: float | None = None,
) -> CabConfig:
    """``config`` with tables [layers][heads] and the max_density that leaves the asked density.

    Args:
        config: one budget for all heads.
        apart: the heads of each form; the forms have one density.
        q, k: as in `filled`.
        whole: the share of heads that attend everything, where it is not that of the tables.
    """
    (density,) = {form.density for form in apart}
    whole = whole_share(apart, layers, heads) if whole is None else whole
    # the others share what is left
    even = filled(config, (density - whole) / (1 - whole), q, k)
    return replace(even, **tables(config, apart, layers, heads))


def tables(
    config: CabConfig, apart: Mapping[Form, Pairs], layers: int, heads: int
) -> dict[str, Any]:
    """The fields of ``config`` that become tables [layers][heads] where heads are ``apart``."""
    made = {}
    for form, pairs in apart.items():
        made |= form.table(pairs, layers, heads, config.mass)
    return made


def whole_share(apart: Mapping[Form, Pairs], layers: int, heads: int) -> float:
    """The share of all heads that attends everything."""
    counts = (len(pairs) for form, pairs in apart.items() if form.kind == "whole")
    return sum(counts) / (layers * heads)


def shared_out(forms: Sequence[Form], layers: int, heads: int) -> dict[Form, list[tuple[int, int]]]:
    """The heads of each form in a whole model: those of one, then those of the next."""
    pairs, apart = spread(layers, heads), {}
    for form in forms:
        count = round(form.share * layers * heads)
        apart[form], pairs = pairs[:count], pairs[count:]
    return apart


def _number(text: str) -> float | int:
    return int(text) if text.isdigit() else float(text)
