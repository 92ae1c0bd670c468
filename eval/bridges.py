"""Bridges: which selection formula keeps the few edges that join communities of a block graph?

The graphs are synthetic (`cab_hf.eval.bridge_graphs`); what is measured is the share of their
bridges that a formula keeps, and of the true attention mass. A case is one graph (size, strength,
index); its sample holds all formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from cab_hf.config import CabConfig
from cab_hf.eval import bridge_graphs, charts
from cab_hf.eval.bridge_graphs import H2O, MAGNITUDE, METHODS, MINMAX, RANDOM, TOKEN, GraphSettings
from cab_hf.eval.experiment import Experiment, Row
from cab_hf.eval.intervals import LEVEL, Interval, mean_interval
from cab_hf.eval.report import difference, markdown_table
from cab_hf.runs.settings import comma_separated, option, require, spell

SHIPPED = CabConfig()  # its formula and block summary are what the verdict is on
MARGIN = 0.01  # a mean difference below one bridge in a hundred is none
BETTER, WORSE, SAME, MIXED = "better", "worse", "no difference", "mixed"
CHANCE = "no better than random"


def parse_size(text: str) -> tuple[int, int]:
    """``256x32``: 256 blocks of 32 tokens."""
    blocks, _, tokens = text.partition("x")
    return int(blocks), int(tokens)


def spell_sizes(sizes: Sequence[Sequence[int]]) -> str:
    """What `parse_size` reads, with commas between."""
    return spell([f"{blocks}x{tokens}" for blocks, tokens in sizes])


@dataclass(frozen=True)
class Settings(GraphSettings):
    """What a run is told; a ValueError names the option that is refused."""

    sizes: tuple[tuple[int, int], ...] = option(
        ((100, 1), (256, 32)),
        "comma-separated BLOCKSxTOKENS of the graphs",
        comma_separated(parse_size),
        spell=spell_sizes,
    )
    strengths: tuple[float, ...] = option(
        (0.3, 0.5, 0.8, 1.2),
        "comma-separated affinities of a bridge, relative to that inside a community",
        comma_separated(float),
    )
    sparsities: tuple[float, ...] = option(
        (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99),
        "comma-separated shares of every row's blocks that are dropped",
        comma_separated(float),
    )
    seeds: int = option(20, "graphs of each size and strength", int)
    out: str = option("bridges_results", "folder for the results; a run found there goes on")

    def __post_init__(self) -> None:
        super().__post_init__()
        check = partial(require, self)
        check("sizes", self.sizes, "at least one size")
        # bridges share no block, and what is left must never lie in one community
        least = max(self.communities, 4 * self.bridges)
        for blocks, tokens in self.sizes:
            fits = blocks >= least and tokens >= 1
            check("sizes", fits, f"{least} blocks or more", (blocks, tokens))
        check("strengths", self.strengths and min(self.strengths) >= 0, "numbers from 0 on")
        dropped = self.sparsities
        check("sparsities", dropped and 0 <= min(dropped) <= max(dropped) < 1, "in [0, 1)")
        check("seeds", self.seeds >= 2, "at least 2: intervals are over graphs")


class Bridges(Experiment):
    """A sample is what every formula keeps of one graph, at every sparsity."""

    name = "bridges"
    purpose = "find the edges that join communities of a block graph"
    title = "Which formula finds bridges?"
    caption = "bridges found against sparsity"
    Settings = Settings
    CASE = ("blocks", "block_size", "strength", "index")
    GROWS = ("sizes", "strengths", "seeds")

    def expected(self) -> int:
        return len(list(self.cases(())))

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        given = self.settings
        for size, *rest in product(given.sizes, given.strengths, range(given.seeds)):
            yield dict(zip(self.CASE, (*size, *rest), strict=True))

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        *size, strength, index = place = [case[name] for name in self.CASE]
        graph = bridge_graphs.make_graph(tuple(size), strength, index, self.settings)
        generator = bridge_graphs.seeded("selection", self.settings.seed, *place)
        return bridge_graphs.measure(graph, self.settings.sparsities, generator)

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Rows of (size, method, coarsening, strength, sparsity), and of means over these.

        A row whose ``sparsity`` is None is the mean over the sweep, and carries a verdict; one
        whose ``strength`` is None too is also the mean over the strengths. ``delta`` is the paired
        difference to the row's baseline over graphs and ``chance`` that to random blocks, both in
        bridges found and with Student's interval, at 95 % for all verdicts together (Bonferroni),
        those over the strengths and those of one strength being counted apart.
        """
        measured: dict[Contender, Outcomes] = {}
        for sample in samples:
            planted, graph = sample["bridges"], (sample["strength"], sample["index"])
            for outcome in sample["outcomes"]:
                retrieval = [result / planted for result in outcome["found"]]
                outcomes = measured.setdefault(Contender.of({**sample, **outcome}), {})
                outcomes[graph] = {**outcome, "bridges": planted, "retrieval": retrieval}

        sparsities = settings["sparsities"]
        judged = [_strengths(outcomes) for who, outcomes in measured.items() if who != who.base]
        rows = []
        for contender, outcomes in measured.items():
            row = partial(_row, measured, contender, sparsities)
            for strength in _strengths(outcomes):
                rows.append(row(strength, None, sum(map(len, judged))))
                rows += [row(strength, dropped) for dropped in sparsities]
            rows.append(row(None, None, len(judged)))
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """A formula a row; then a formula and place a row, strength by strength."""
        means = [row for row in rows if row["sparsity"] is None]
        return {"Bridges found": _overview(means), "By strength": _by_strength(means)}

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Whether the curvature term that the package ships finds bridges."""
        shipped = f"cab {SHIPPED.redundancy:g}"
        results = [
            f"{row['verdict']} at {Contender.of(row).place} ({difference(row)} of the bridges)"
            for row in rows
            if _is_whole(row)
            and row["method"] == shipped
            and row["coarsen"] in (TOKEN, SHIPPED.coarsen)
        ]
        text = f"CAB's curvature term as it is shipped ({shipped}), beside {MAGNITUDE} alone: "
        return [f"{text}{'; '.join(results)}."] if results else []

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return (
            f"Means over {settings['seeds']} graphs of {settings['communities']} communities "
            f"({settings['layout']}) and {settings['bridges']} bridges, sparsities "
            f"{spell(settings['sparsities'])} and strengths, a bridge's affinity relative to that "
            f"inside a community. A bridge leads to one {settings['needle']} token. Every formula "
            "keeps as many blocks of a row. Differences are paired over graphs: to "
            f"{MAGNITUDE} by the same summary of blocks; of {H2O}, {RANDOM} and {MAGNITUDE} itself "
            f"to that by the box. *{BETTER}*, *{WORSE}*: Student's interval leaves out 0 and the "
            f"difference is {MARGIN:g} or more; *{CHANCE}*: better than {MAGNITUDE}, not than "
            f"random blocks; *{MIXED}*: better at one place, worse at another. Verdicts over all "
            f"strengths hold together at {LEVEL:.0%} (Bonferroni), and so do those of one."
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Bridges found against sparsity, over all strengths; a panel a size and block summary."""
        result: dict[Contender, dict[float, list[float]]] = {}
        for row in rows:
            if row["sparsity"] is not None:
                of_row = result.setdefault(Contender.of(row), {})
                of_row.setdefault(row["sparsity"], []).append(row["retrieval"])
        sparsities = sorted({dropped for at in result.values() for dropped in at})
        lines = {c: [fmean(at[dropped]) for dropped in sparsities] for c, at in result.items()}
        panels = {}
        for plain in (who for who in lines if who.method == MAGNITUDE):
            # all methods by the same summary, and those that look at none
            beside = {plain, plain._replace(coarsen=None)}
            panels[plain.place] = {
                c.method: lines[c] for c in lines if c._replace(method=MAGNITUDE) in beside
            }
        x_label = "sparsity (share of every row's blocks dropped)"
        charts.sweep(path, panels, sparsities, x_label, "share of the bridges kept")


EXPERIMENT = Bridges


def verdict(to_magnitude: Interval, to_random: Interval) -> str:
    """What a formula's paired differences say.

    ``better`` or ``worse`` than magnitude where the interval leaves out 0 and the mean is not under
    `MARGIN`. Magnitude can fall below chance; what beats it and not random finds no bridges either.
    """
    mean, low, high = to_magnitude
    if low > 0 and mean >= MARGIN:
        return BETTER if to_random[1] > 0 else CHANCE
    return WORSE if high < 0 and mean <= -MARGIN else SAME


def joint_verdict(verdicts: Sequence[str]) -> str:
    """One word for several places: ``mixed`` where one is better and another worse."""
    if {BETTER, WORSE} <= set(verdicts):
        return MIXED
    return next((word for word in (BETTER, WORSE) if word in verdicts), SAME)


class Contender(NamedTuple):
    """What is compared; ``coarsen`` is None for methods that do not look at block summaries."""

    blocks: int
    block_size: int
    method: str
    coarsen: str | None

    @classmethod
    def of(cls, row: Row) -> Contender:
        return cls(*(row[field] for field in cls._fields))

    @property
    def base(self) -> Contender:
        """Magnitude by the same coarsening; for magnitude itself, by the box."""
        plain = TOKEN if self.block_size == 1 else MINMAX
        own = None if self.method == MAGNITUDE else self.coarsen
        return self._replace(method=MAGNITUDE, coarsen=own or plain)

    @property
    def place(self) -> str:
        """The size, and the summary of blocks that is looked at or held against."""
        if self.block_size == 1:
            return f"{self.blocks} tokens"
        size = f"{self.blocks} blocks of {self.block_size} tokens"
        return f"{size}, {self.coarsen or self.base.coarsen}"


# (strength, index) of a graph -> what it gave at each sparsity, and how many ``bridges`` it has
Outcomes = dict[tuple[float, int], Row]


def _strengths(outcomes: Outcomes) -> list[float]:
    return sorted({strength for strength, _ in outcomes})


def _row(
    measured: Mapping[Contender, Outcomes],
    contender: Contender,
    sparsities: Sequence[float],
    strength: float | None,
    sparsity: float | None,
    together: int = 1,
) -> dict[str, Any]:
    """A row, whose interval holds with ``together`` - 1 others."""
    ours, base = measured[contender], contender.base
    columns = [c for c, each in enumerate(sparsities) if sparsity in (None, each)]
    strengths = _strengths(ours) if strength is None else [strength]

    def by_graph(of: Contender, what: str) -> list[float]:
        """One mean for every graph that was measured at all strengths."""
        outcomes = measured[of]
        graphs = ({i for s, i in outcomes if s == each} for each in strengths)
        return [
            fmean(outcomes[s, index][what][c] for s in strengths for c in columns)
            for index in sorted(set.intersection(*graphs))
        ]

    retrieval = by_graph(contender, "retrieval")
    row = {
        **contender._asdict(),
        **{"strength": strength, "sparsity": sparsity, "graphs": len(retrieval)},
        **{what: fmean(by_graph(contender, what)) for what in ("retrieval", "mass", "density")},
    }
    if contender == base or sparsity is not None:
        return row
    level = 1 - (1 - LEVEL) / together
    random = contender._replace(method=RANDOM, coarsen=None)
    intervals = []
    for name, other in (("delta", base), ("chance", random)):
        intervals.append(mean_interval(retrieval, by_graph(other, "retrieval"), level))
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), intervals[-1], strict=True))
    row |= {"mass_delta": row["mass"] - fmean(by_graph(base, "mass"))}
    return {**row, "level": level, "baseline": base.coarsen, "verdict": verdict(*intervals)}


def _is_whole(row: Row) -> bool:
    """Whether it is the mean over all sparsities and strengths."""
    return row["sparsity"] is None and row["strength"] is None


def _overview(means: Sequence[Row]) -> str:
    """What each formula finds at every place, and one word for all of them."""
    shown: dict[str, dict[str, str]] = {}
    means = list(filter(_is_whole, means))
    for row in means:
        judged = f" ({row['delta']:+.2f}, {row['verdict']})" if "verdict" in row else ""
        formula = shown.setdefault(row["method"], {"formula": row["method"]})
        formula[Contender.of(row).place] = f"{row['retrieval']:.2f}{judged}"
    for method in shown.keys() - {MAGNITUDE}:
        words = [row["verdict"] for row in means if row["method"] == method]
        shown[method]["anywhere"] = joint_verdict(words)
    places = dict.fromkeys(Contender.of(row).place for row in means)
    formulas = [shown[method] for method in METHODS if method in shown]
    return markdown_table(formulas, ["formula", *places, "anywhere"])


def _by_strength(means: Sequence[Row]) -> str:
    """What is found over the sweep at every place, and the difference at each strength."""
    at = {(Contender.of(row), row["strength"]): row for row in means}

    def described(strength: float, row: Row) -> str | None:
        there = at.get((Contender.of(row), strength), {})
        # no word where there is no difference
        words = f"{there['delta']:+.2f} {there['verdict']}" if "verdict" in there else None
        return words and words.removesuffix(f" {SAME}")

    columns = {
        **{"formula": "method", "at": lambda row: Contender.of(row).place},
        **{"bridges found": "retrieval", "mass kept": "mass", "density": "density"},
        **{f"to {MAGNITUDE}": difference, "verdict": "verdict"},
    }
    strengths = sorted({row["strength"] for row in means} - {None})
    columns |= {f"strength {strength:g}": partial(described, strength) for strength in strengths}
    return markdown_table(list(filter(_is_whole, means)), columns)
