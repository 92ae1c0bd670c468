"""Bridges: which selection formula keeps the few edges that join communities of a block graph?

A synthetic graph of communities, made of real q and k vectors so that the ops of the package
decide. Its bridges are edges from a query block to a key block of an earlier community, weaker than
the edges inside a community where ``strength`` is below 1. Every formula keeps the same number of
blocks in every row; what is measured is the share of the bridges it keeps, and of the true
attention mass.

A sample is one graph (size, strength, index) under all formulas. Samples go to ``samples.jsonl`` as
they are made; ``results.json``, ``results.csv``, ``report.md`` and ``bridges.png`` are derived.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from cab_hf.config import COARSEN, CabConfig
from cab_hf.eval import report
from cab_hf.eval.intervals import LEVEL, Interval, mean_interval, wilson
from cab_hf.ops import reference
from cab_hf.plan import Spans, block_visibility
from cab_hf.predictors.baselines import block_mass
from cab_hf.runs.log import Log, write_atomically
from cab_hf.runs.provenance import fingerprint, provenance
from cab_hf.runs.settings import comma_separated, option, read_settings

LAYOUTS = ("segments", "shuffled")
NEEDLES = ("quiet", "loud")
MAGNITUDE, H2O, RANDOM = "magnitude", "h2o", "random"
BOX, MEAN = COARSEN[:2]
TOKEN = "token"  # blocks of one token have nothing to coarsen
MARGIN = 0.01  # a mean difference below one bridge in a hundred is none
BETTER, WORSE, SAME, MIXED = "better", "worse", "no difference", "mixed"
CHANCE = "no better than random"
VERDICTS = (BETTER, SAME, CHANCE, WORSE)
SIZE_FIELDS = ("blocks", "block_size")
SAMPLE_FIELDS = (*SIZE_FIELDS, "strength", "index")
# equal blocks, so that the product of the block graph with itself needs no change of grid
SQUARE = {"query_block": 64, "key_block": 64}


def parse_size(text: str) -> tuple[int, int]:
    """``256x32``: 256 blocks of 32 tokens."""
    blocks, _, tokens = text.partition("x")
    return int(blocks), int(tokens)


@dataclass(frozen=True)
class Settings:
    """What a run is told.

    Raises:
        ValueError: naming the option, the value seen and what is accepted.
    """

    sizes: tuple[tuple[int, int], ...] = option(
        ((100, 1), (256, 32)),
        "comma-separated BLOCKSxTOKENS of the graphs (default: 100x1,256x32)",
        comma_separated(parse_size),
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
    communities: int = option(8, "communities of a graph", int)
    bridges: int = option(8, "bridges of a graph", int)
    dim: int = option(64, "head dim of q and k", int)
    affinity: float = option(4.0, "mean logit inside a community", float)
    noise: float = option(0.5, "standard deviation of every channel around its community", float)
    layout: str = option(
        "segments", "segments: a community is a stretch of the text; shuffled: it is scattered"
    )
    needle: str = option(
        "quiet", "quiet: a bridge's key has the norm it had without it; loud: a larger one"
    )
    out: str = option("bridges_results", "folder for the results; a run found there goes on")
    seed: int = option(0, "of all graphs and random selections", int)

    def __post_init__(self) -> None:
        # nothing is measured twice: a repeated number counts once
        for name in ("sizes", "strengths", "sparsities"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        self._check("sizes", self.sizes, "at least one size")
        self._check("strengths", self.strengths and min(self.strengths) >= 0, "numbers from 0 on")
        dropped = self.sparsities
        self._check("sparsities", dropped and 0 <= min(dropped) <= max(dropped) < 1, "in [0, 1)")
        self._check("seeds", self.seeds >= 2, "at least 2: intervals are over graphs")
        self._check("bridges", self.bridges >= 1, "at least 1")
        self._check("communities", self.communities >= 2, "at least 2")
        directions = self.communities + self.bridges
        self._check("dim", self.dim >= directions, f"communities + bridges ({directions}) or more")
        self._check("affinity", self.affinity > 0, "over 0")
        self._check("noise", self.noise >= 0, "0 or more")
        self._check("layout", self.layout in LAYOUTS, f"one of {', '.join(LAYOUTS)}")
        self._check("needle", self.needle in NEEDLES, f"one of {', '.join(NEEDLES)}")
        # bridges share no block, and what is left must never lie in one community
        least = max(self.communities, 4 * self.bridges)
        for size in self.sizes:
            self._check("sizes", size[0] >= least and size[1] >= 1, f"{least} blocks or more", size)

    def _check(self, name: str, holds: object, accepted: str, value: object = None) -> None:
        if not holds:
            value = getattr(self, name) if value is None else value
            raise ValueError(f"{name} must be {accepted}; got {value!r}.")

    def identity(self) -> dict[str, Any]:
        """What a sample's outcome depends on.

        Sizes, strengths and seeds are left out, so that a run can be extended by more of them.
        """
        left_out = ("sizes", "strengths", "seeds", "out")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}


# --- the graph


@dataclass(frozen=True, eq=False)
class Graph:
    """A causal graph of M blocks of ``block_size`` tokens.

    Attributes:
        q, k: float32 [1, 1, M * block_size, D].
        community: int64 [M], of every block.
        rows, columns: int64 [bridges], query block and key block of every bridge.
        needles: int64 [bridges], the one token that carries the bridge's key.
    """

    q: Tensor
    k: Tensor
    community: Tensor
    rows: Tensor
    columns: Tensor
    needles: Tensor
    block_size: int

    @property
    def blocks(self) -> int:
        return self.community.shape[0]


def make_graph(size: tuple[int, int], strength: float, index: int, settings: Settings) -> Graph:
    """Graph number ``index`` of a size and strength.

    Queries and keys are their community's prototype plus noise; prototypes and the bridges' shared
    directions are orthonormal up to their lengths. A bridge's direction is added to all queries of
    its row and to one token of its key block, with lengths whose product is ``strength`` times that
    inside a community.
    """
    blocks, block_size = size
    generator = seeded("graph", settings.seed, *size, strength, index)
    normal = partial(torch.randn, generator=generator)
    community = torch.arange(blocks) * settings.communities // blocks
    if settings.layout == "shuffled":
        community = community[torch.randperm(blocks, generator=generator)]
    rows, columns = _plant(community, settings.bridges, generator)
    needles = columns * block_size + torch.randint(
        block_size, (settings.bridges,), generator=generator
    )
    directions = torch.linalg.qr(normal(settings.dim, settings.dim)).Q
    prototypes, shared = directions.split(
        [settings.communities, settings.dim - settings.communities]
    )

    # q·k / sqrt(D) of two vectors of this length along one direction is the affinity
    length = math.sqrt(settings.affinity * math.sqrt(settings.dim))
    centre = (length * prototypes[community]).repeat_interleave(block_size, dim=0)
    q = centre + settings.noise * normal(centre.shape)
    k = centre + settings.noise * normal(centre.shape)

    bridge = math.sqrt(strength) * length * shared[: settings.bridges]
    before = k[needles]
    grown = torch.ones(settings.bridges, 1)
    if settings.needle == "quiet":
        # what the key loses when it is shortened to the norm it had, the queries make up for
        grown = (before + bridge).norm(dim=-1, keepdim=True) / before.norm(dim=-1, keepdim=True)
    k[needles] = (before + bridge) / grown
    q.unflatten(0, (blocks, block_size))[rows] += (bridge * grown).unsqueeze(1)
    return Graph(q[None, None], k[None, None], community, rows, columns, needles, block_size)


def seeded(*identity: Any) -> torch.Generator:
    """A generator of its own for everything that has another identity."""
    return torch.Generator().manual_seed(int(fingerprint({"of": identity}), 16))


def _plant(community: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(rows, columns) of ``count`` bridges that share no block, each row behind its column."""
    free = (community[:, None] != community).tril(-1)
    places = []
    for _ in range(count):
        # first the row, then its column: not every pair, or late rows would be preferred
        row = _one_of(free.any(1), generator)
        column = _one_of(free[row], generator)
        places.append((row, column))
        free[[row, column]] = False
        free[:, [row, column]] = False
    return torch.tensor(places).unbind(1)


def _one_of(allowed: Tensor, generator: torch.Generator) -> int:
    choices = allowed.nonzero().flatten()
    return int(choices[torch.randint(len(choices), (), generator=generator)])


# --- the formulas


def published_score(config: CabConfig, logits: Tensor, visible: Tensor, places: Tensor) -> Tensor:
    """The published scores: edges are rectified logits."""
    affinity = logits.relu().masked_fill(~visible, 0.0)
    return reference.curvature_score(affinity, affinity, visible, places, config)


def cab_score(config: CabConfig, logits: Tensor, visible: Tensor, places: Tensor) -> Tensor:
    """CAB's score F = z(log U) - redundancy * z(U U): edges are the softmax of the logits."""
    reach = reference.block_log_mass(logits, visible)
    direct = reference.standardise(reach, visible)
    return reference.curvature_score(reach.exp(), direct, visible, places, config)


def _forman(sign: int, logits: Tensor, visible: Tensor, places: Tensor) -> Tensor:
    # the score is the negative curvature: the highest score is the lowest curvature
    config = CabConfig.published(curvature="forman", **SQUARE)
    return sign * published_score(config, logits, visible, places)


def _additive(redundancy: float) -> CabConfig:
    return CabConfig.published(curvature="additive", redundancy=redundancy, **SQUARE)


Formula = Callable[[Tensor, Tensor, Tensor], Tensor]

# name -> (logits [1, 1, M, M], visible, places [1, M]) -> what ranks a row's blocks, highest kept
FORMULAS: dict[str, Formula] = {
    MAGNITUDE: lambda logits, visible, places: logits,
    "forman lowest": partial(_forman, 1),
    "forman highest": partial(_forman, -1),
    "additive 0.3": partial(published_score, _additive(0.3)),
    "additive 1": partial(published_score, _additive(1.0)),
    "cab 0.3": partial(cab_score, CabConfig(redundancy=0.3, **SQUARE)),
    "cab 1": partial(cab_score, CabConfig(redundancy=1.0, **SQUARE)),
}
METHODS = (*FORMULAS, H2O, RANDOM)


def selections(
    graph: Graph, sparsities: Sequence[float], mass: Tensor, generator: torch.Generator
) -> Iterator[tuple[str, str | None, Tensor]]:
    """(method, coarsening, bool [S, 1, M, M]) of every method: the blocks kept at each sparsity.

    A row of n visible blocks keeps ceil((1 - sparsity) n) of them, its diagonal block always.

    Args:
        mass: true attention mass of every block, [1, 1, M, M]; h2o ranks by it.
        generator: of the random selection.
    """
    spans = Spans.causal(1, graph.blocks, graph.blocks, "cpu")
    visible = block_visibility(spans, 1, 1).unsqueeze(1)
    places = torch.arange(graph.blocks).unsqueeze(0)
    budget = torch.cat([reference.share_of_row(visible, 1 - dropped) for dropped in sparsities])
    diagonal = torch.eye(graph.blocks, dtype=torch.bool)

    def best(score: Tensor) -> Tensor:
        return diagonal | reference.top_blocks(score, visible & ~diagonal, budget - 1)

    for coarsen in (TOKEN,) if graph.block_size == 1 else COARSEN:
        logits = _logits(graph, MEAN if coarsen == TOKEN else coarsen)
        for name, formula in FORMULAS.items():
            yield name, coarsen, best(formula(logits, visible, places))
    yield H2O, None, _heavy_and_recent(mass, visible, budget)
    yield RANDOM, None, best(torch.rand(mass.shape, generator=generator))


def _logits(graph: Graph, coarsen: str) -> Tensor:
    """Upper logits [1, 1, M, M]; where a block is one vector, its only ones."""
    valid = torch.ones(1, graph.q.shape[2], dtype=torch.bool)
    queries = reference.coarsen_queries(graph.q, valid, graph.block_size, coarsen)
    keys = reference.coarsen_keys(graph.k, valid, graph.block_size, coarsen)
    return reference.block_logits(queries, keys, graph.q.shape[-1] ** -0.5)[0]


def _heavy_and_recent(mass: Tensor, visible: Tensor, budget: Tensor) -> Tensor:
    """H2O row by row: half the budget the latest blocks, half those that received most so far."""
    latest = (budget // 2).clamp(min=1)
    block = torch.arange(mass.shape[-1])
    recent = visible & (block > block.unsqueeze(-1) - latest)
    received = mass.cumsum(-2).expand(recent.shape)
    return recent | reference.top_blocks(received, visible & ~recent, budget - latest)


# --- running


def run(settings: Settings) -> list[dict[str, Any]]:
    """Measure what is not measured yet, write all results, print the tables; returns the rows."""
    out = Path(settings.out)
    places = list(product(settings.sizes, settings.strengths, range(settings.seeds)))
    with Log(out / "samples.jsonl", settings.identity(), SAMPLE_FIELDS) as log:
        for size, strength, index in tqdm(places, unit="graph"):
            place = dict(zip(SAMPLE_FIELDS, (*size, strength, index), strict=True))
            if place not in log:
                graph = make_graph(size, strength, index, settings)
                generator = seeded("selection", settings.seed, *size, strength, index)
                log.append(place | measure(graph, settings.sparsities, generator))
        told = {name: getattr(settings, name) for name in ("sizes", "strengths", "seeds")}
        made = provenance(settings.identity() | told, "cpu", log.started)
        return write_report(out, log.records, made)


def main(words: Sequence[str]) -> int:
    """Run what a command line asks for."""
    run(read_settings(Settings, words, "python -m cab_hf.eval bridges"))
    return 0


@torch.no_grad()
def measure(
    graph: Graph, sparsities: Sequence[float], generator: torch.Generator
) -> dict[str, Any]:
    """Bridges found, attention mass and (query, key) pairs kept, by method and sparsity."""
    tokens, size = graph.q.shape[2], graph.block_size
    spans = Spans.causal(1, tokens, tokens, "cpu")
    mass = block_mass(graph.q, graph.k, spans, graph.q.shape[-1] ** -0.5, size, size)
    pairs = torch.full((graph.blocks, graph.blocks), float(size * size)).tril()
    pairs.fill_diagonal_(size * (size + 1) / 2)

    def share(keep: Tensor, of: Tensor) -> list[float]:
        kept = (keep * of).sum((-1, -2), dtype=torch.float64).flatten()
        return [round(x, 5) for x in (kept / of.sum(dtype=torch.float64)).tolist()]

    outcomes = [
        {
            "method": method,
            "coarsen": coarsen,
            "found": keep[:, 0, graph.rows, graph.columns].sum(-1).tolist(),
            "mass": share(keep, mass),
            "density": share(keep, pairs),
        }
        for method, coarsen, keep in selections(graph, sparsities, mass, generator)
    ]
    return {"bridges": len(graph.rows), "outcomes": outcomes}


# --- intervals and verdicts


def verdict(to_magnitude: Interval, to_random: Interval) -> str:
    """What a formula's paired differences say.

    ``better`` or ``worse`` than magnitude where the interval leaves out 0 and the mean is not under
    `MARGIN`. Magnitude can fall below chance; what beats it and not random finds no bridges either.
    """
    difference, low, high = to_magnitude
    if low > 0 and difference >= MARGIN:
        return BETTER if to_random[1] > 0 else CHANCE
    if high < 0 and difference <= -MARGIN:
        return WORSE
    return SAME


def joint_verdict(verdicts: Sequence[str]) -> str:
    """One word for several places: ``mixed`` where one is better and another worse."""
    better, worse = BETTER in verdicts, WORSE in verdicts
    if better and worse:
        return MIXED
    return BETTER if better else WORSE if worse else SAME


# --- results, from samples alone


class Contender(NamedTuple):
    """What is compared; ``coarsen`` is None for methods that do not look at block summaries."""

    size: tuple[int, int]
    method: str
    coarsen: str | None

    @property
    def baseline(self) -> Contender | None:
        """Magnitude by the same coarsening; for magnitude itself, by the box."""
        plain = TOKEN if self.size[1] == 1 else BOX
        if self.method != MAGNITUDE:
            return self._replace(method=MAGNITUDE, coarsen=self.coarsen or plain)
        return None if self.coarsen == plain else self._replace(coarsen=plain)

    @property
    def chance(self) -> Contender:
        """Random blocks on the same graphs."""
        return self._replace(method=RANDOM, coarsen=None)


class Outcomes:
    """All that was measured of one contender: (strength, index) -> shares at each sparsity."""

    def __init__(self) -> None:
        self.bridges = 0  # of one graph
        self.shares: dict[tuple[float, int], dict[str, list[float]]] = {}

    def add(self, sample: dict[str, Any], outcome: dict[str, Any]) -> None:
        self.bridges = sample["bridges"]
        self.shares[sample["strength"], sample["index"]] = {
            "retrieval": [found / self.bridges for found in outcome["found"]],
            "mass": outcome["mass"],
            "density": outcome["density"],
        }

    def seeds(self, strengths: Sequence[float]) -> list[int]:
        """Graphs that were measured at all of ``strengths``."""
        indices = ({i for s, i in self.shares if s == strength} for strength in strengths)
        return sorted(set.intersection(*indices))

    def by_seed(self, what: str, strengths: Sequence[float], columns: Sequence[int]) -> list[float]:
        """One mean a graph, over ``strengths`` and ``columns`` of the sparsities."""
        return [
            fmean(self.shares[s, index][what][c] for s in strengths for c in columns)
            for index in self.seeds(strengths)
        ]


def summarise(
    samples: Sequence[dict[str, Any]], sparsities: Sequence[float]
) -> list[dict[str, Any]]:
    """Rows of (size, method, coarsening, strength, sparsity), and of means over these.

    A row whose ``sparsity`` is None is the mean over the sweep, and carries a verdict; one whose
    ``strength`` is None too is also the mean over the strengths. ``delta`` is the paired
    difference to the row's baseline over graphs and ``chance`` that to random blocks, both in
    bridges found and with Student's interval: at 95 % in the rows of
    one sparsity; in the others at 95 % for all such verdicts together (Bonferroni), those over the
    strengths and those of one strength being counted apart.
    """
    measured: dict[Contender, Outcomes] = {}
    for sample in samples:
        size = (sample["blocks"], sample["block_size"])
        for outcome in sample["outcomes"]:
            contender = Contender(size, outcome["method"], outcome["coarsen"])
            measured.setdefault(contender, Outcomes()).add(sample, outcome)

    everything = range(len(sparsities))
    plans = []
    for contender, outcomes in measured.items():
        strengths = sorted({strength for strength, _ in outcomes.shares})
        for strength in (*strengths, None):
            chosen = strengths if strength is None else [strength]
            plans.append((contender, strength, chosen, None, everything))
            if strength is not None:
                plans += [(contender, strength, chosen, s, [c]) for c, s in enumerate(sparsities)]
    judged = [
        strength is None
        for contender, strength, _, sparsity, _ in plans
        if sparsity is None and contender.baseline is not None
    ]

    rows = []
    for contender, strength, strengths, sparsity, columns in plans:
        outcomes = measured[contender]
        means = {
            what: outcomes.by_seed(what, strengths, columns)
            for what in ("retrieval", "mass", "density")
        }
        row = {
            **dict(zip(SIZE_FIELDS, contender.size, strict=True)),
            "method": contender.method,
            "coarsen": contender.coarsen,
            "strength": strength,
            "sparsity": sparsity,
            "graphs": len(means["retrieval"]),
            **{what: fmean(values) for what, values in means.items()},
        }
        if sparsity is not None:
            n = row["graphs"] * outcomes.bridges
            found = round(sum(means["retrieval"]) * outcomes.bridges)
            row |= {"n": n, "found": found}
            row |= dict(zip(("low", "high"), wilson(found, n), strict=True))
        if contender.baseline is not None:
            together = judged.count(strength is None) if sparsity is None else 1
            level = 1 - (1 - LEVEL) / together
            base, chance = measured[contender.baseline], measured[contender.chance]
            to_magnitude, to_random = (
                mean_interval(
                    means["retrieval"], other.by_seed("retrieval", strengths, columns), level
                )
                for other in (base, chance)
            )
            row |= dict(zip(("delta", "delta_low", "delta_high"), to_magnitude, strict=True))
            row |= dict(zip(("chance", "chance_low", "chance_high"), to_random, strict=True))
            mass = fmean(base.by_seed("mass", strengths, columns))
            row |= {"mass_delta": row["mass"] - mass, "level": level}
            row["baseline"] = contender.baseline.coarsen
            if sparsity is None:
                row["verdict"] = verdict(to_magnitude, to_random)
        rows.append(row)
    return rows


def _sizes(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row["blocks"], row["block_size"]) for row in rows))


def _size_name(size: tuple[int, int]) -> str:
    blocks, tokens = size
    return f"{blocks} tokens" if tokens == 1 else f"{blocks} blocks of {tokens} tokens"


def _contender(row: dict[str, Any]) -> Contender:
    return Contender((row["blocks"], row["block_size"]), row["method"], row["coarsen"])


def _delta(row: dict[str, Any]) -> str | None:
    if "delta" not in row:
        return None
    return f"{row['delta']:+.2f} [{row['delta_low']:+.2f}, {row['delta_high']:+.2f}]"


def tables(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """One table a size: means over the sweep, and the difference to magnitude at each strength."""
    means = [row for row in rows if row["sparsity"] is None]
    strengths = sorted({row["strength"] for row in means if row["strength"] is not None})
    at = {(_contender(row), row["strength"]): row for row in means}

    def at_strength(strength: float, row: dict[str, Any]) -> str | None:
        there = at.get((_contender(row), strength), {})
        if "delta" not in there:
            return None
        word = "" if there["verdict"] == SAME else f" {there['verdict']}"
        return f"{there['delta']:+.2f}{word}"

    columns = {
        "formula": "method",
        "blocks summarised by": "coarsen",
        "bridges found": "retrieval",
        "mass kept": "mass",
        "to magnitude": _delta,
        "verdict": "verdict",
        **{f"strength {strength:g}": partial(at_strength, strength) for strength in strengths},
    }
    shown = {}
    for size in _sizes(rows):
        of_size = [row for row in means if _contender(row).size == size and row["strength"] is None]
        shown[size] = report.markdown_table(of_size, columns)
    return shown


def overview(rows: Sequence[dict[str, Any]]) -> str:
    """One table: a formula a row, what it finds beside magnitude at every size and summary."""
    means = [row for row in rows if row["sparsity"] is None and row["strength"] is None]
    places = list(dict.fromkeys((_contender(row).size, row["coarsen"]) for row in means))
    at = {(row["method"], _contender(row).size, row["coarsen"]): row for row in means}

    def found(place: tuple[tuple[int, int], str | None], formula: dict[str, Any]) -> str | None:
        row = at.get((formula["method"], *place))
        if row is None or "verdict" not in row:
            return None if row is None else f"{row['retrieval']:.2f} found"
        return f"{row['delta']:+.2f} {row['verdict']}"

    columns = {"formula": "method"}
    for size, coarsen in places:
        if coarsen is not None:
            columns[f"{_size_name(size)}, {coarsen}"] = partial(found, (size, coarsen))
    formulas = [{"method": method} for method in METHODS if any(key[0] == method for key in at)]
    blind = {key[0] for key in at if key[2] is None}
    return report.markdown_table([row for row in formulas if row["method"] not in blind], columns)


def readings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the rows say: a verdict a formula, then what another block summary does to magnitude."""
    means = [row for row in rows if "verdict" in row]
    said = []
    for method in METHODS:
        ours = [row for row in means if row["method"] == method]
        if ours and method != MAGNITUDE:
            said.append(_reading(method, ours))
    for row in means:
        if row["method"] == MAGNITUDE and row["strength"] is None:
            said.append(
                f"{MAGNITUDE} by {row['coarsen']} instead of {row['baseline']}: {row['verdict']} "
                f"at {row['blocks']}x{row['block_size']}, {_delta(row)}."
            )
    return said


def _reading(method: str, ours: Sequence[dict[str, Any]]) -> str:
    whole = [row for row in ours if row["strength"] is None]
    where = {word: [row for row in whole if row["verdict"] == word] for word in VERDICTS}
    each = [row["verdict"] for row in ours if row["strength"] is not None]
    return (
        f"**{method}: {joint_verdict([row['verdict'] for row in whole])}**: "
        + "; ".join(f"{word} at {_places(found)}" for word, found in where.items() if found)
        + f". To {MAGNITUDE} {_range(whole, 'delta')} of the bridges and "
        + f"{_range(whole, 'mass_delta')} of the attention mass. Taken strength by strength: "
        + ", ".join(f"{each.count(word)} {word}" for word in VERDICTS if word in each)
        + "."
    )


def _places(rows: Sequence[dict[str, Any]]) -> str:
    by_size: dict[str, list[str]] = {}
    for row in rows:
        summaries = by_size.setdefault(f"{row['blocks']}x{row['block_size']}", [])
        summaries += [row["coarsen"]] if row["coarsen"] in COARSEN else []
    named = (f"{size} ({', '.join(how)})" if how else size for size, how in by_size.items())
    return ", ".join(named)


def _range(rows: Sequence[dict[str, Any]], field: str) -> str:
    low, high = (f"{end(row[field] for row in rows):+.2f}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def density_gap(rows: Sequence[dict[str, Any]]) -> float:
    """The largest difference in density between two methods of one cell; 0 is matched."""
    cells: dict[tuple, list[float]] = {}
    for row in rows:
        cell = tuple(row[name] for name in (*SIZE_FIELDS, "strength", "sparsity"))
        cells.setdefault(cell, []).append(row["density"])
    return max(max(found) - min(found) for found in cells.values())


def report_text(rows: Sequence[dict[str, Any]], provenance: dict[str, Any]) -> str:
    """The tables and what they say, as Markdown, from the content of results.json."""
    settings = provenance["settings"]
    shown = "\n\n".join(f"## {_size_name(size)}\n\n{table}" for size, table in tables(rows).items())
    said = "\n".join(f"* {sentence}" for sentence in readings(rows))
    swept = ", ".join(f"{dropped:g}" for dropped in settings["sparsities"])
    each = {row["strength"] is None: row["level"] for row in rows if "verdict" in row}
    explained = (
        f"Means over the sparsities {swept} and the strengths, then over "
        f"{max(row['graphs'] for row in rows)} graphs of {settings['communities']} communities "
        f"({settings['layout']}) and {settings['bridges']} bridges each. Strength: the affinity of "
        "a bridge relative to that inside a community, whose mean logit is "
        f"{settings['affinity']:g} (head dim {settings['dim']}, noise {settings['noise']:g}). A "
        f"bridge's key is one {settings['needle']} token of its block, its query every token of "
        "its row. Every method keeps the same number of blocks in every row, the diagonal "
        f"counted; densities of a cell differ by at most {density_gap(rows):.3f}.\n\n"
        "Mass kept: the share of the attention mass, by the softmax over tokens. To magnitude: "
        "paired difference over graphs to magnitude by the same block summary; h2o and random are "
        "held against magnitude by the box, and so is magnitude by mean and max_l2.\n\n"
        f"The rule: *{BETTER}* or *{WORSE}* where Student's interval leaves out 0 and the mean "
        f"difference is {MARGIN:g} or more, else *{SAME}* (a number alone under a strength), which "
        f"means none that this many graphs can tell from 0. *{CHANCE}*: over magnitude, but not "
        "over random blocks of the same density, so nothing was found. Intervals hold together at "
        f"{LEVEL:.0%} (Bonferroni: {each[True]:.2%} each over the strengths, {each[False]:.2%} "
        f"at one strength). A formula as a whole is *{MIXED}* where it is better at one place and "
        f"worse at another, otherwise *{BETTER}* or *{WORSE}* if it is so anywhere. Retrieval at "
        "each sparsity, with Wilson's intervals, is in results.csv."
    )
    made = (
        f"CPU ({provenance['device']}), seed {settings['seed']}; "
        + ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
        + f"; commit {provenance['commit'] or 'unknown'}; finished {provenance['finished']}."
    )
    return (
        f"# Which formula finds bridges?\n\n{said}\n\n{shown}\n\n{explained}\n\n"
        f"![bridges found against sparsity](bridges.png)\n\n{made}\n"
    )


def write_report(
    out: Path, samples: Sequence[dict[str, Any]], provenance: dict[str, Any]
) -> list[dict[str, Any]]:
    """Derive results.json, results.csv, report.md and bridges.png; prints the tables."""
    rows = summarise(samples, provenance["settings"]["sparsities"])
    report.write_results(out, rows, provenance)
    write_atomically(out / "results.csv", report.as_csv(map(_short, rows)))
    write_atomically(out / "report.md", report_text(rows, provenance))
    draw(out / "bridges.png", rows)
    for size, table in tables(rows).items():
        print(f"\n{_size_name(size)}\n\n{table}")
    said = "\n".join(f"* {sentence}" for sentence in readings(rows))
    print(f"\n{said}\n\nfigure: {out / 'bridges.png'}\ntables: {out / 'report.md'}")
    return rows


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """The row, its numbers to six digits."""
    return {name: f"{v:.6g}" if isinstance(v, float) else v for name, v in row.items()}


# method -> colour, marker, line
STYLES = {
    MAGNITUDE: ("black", "o", "-"),
    "forman lowest": ("tab:red", "v", "-"),
    "forman highest": ("tab:orange", "^", "-"),
    "additive 0.3": ("tab:blue", "s", "-"),
    "additive 1": ("tab:blue", "D", "--"),
    "cab 0.3": ("tab:green", "P", "-"),
    "cab 1": ("tab:green", "X", "--"),
    H2O: ("tab:purple", "*", "-"),
    RANDOM: ("tab:gray", ".", ":"),
}


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Bridges found against sparsity: a row of panels a size and coarsening, a column a strength.

    The band is Wilson's interval of magnitude.
    """
    # imported here: the tables need no figure
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["sparsity"] is not None]
    strengths = sorted({row["strength"] for row in rows})
    sparsities = sorted({row["sparsity"] for row in rows})
    settings = list(
        dict.fromkeys((_contender(r).size, r["coarsen"]) for r in rows if r["coarsen"] is not None)
    )
    figure, axes = plt.subplots(
        len(settings),
        len(strengths),
        figsize=(1.0 + 2.9 * len(strengths), 1.2 + 2.4 * len(settings)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for (size, coarsen), across in zip(settings, axes, strict=True):
        for strength, axis in zip(strengths, across, strict=True):
            for method in METHODS:
                line = [
                    row
                    for row in rows
                    if _contender(row) == (size, method, row["coarsen"])
                    and row["coarsen"] in (coarsen, None)
                    and row["strength"] == strength
                ]
                line.sort(key=lambda row: row["sparsity"])
                places = [sparsities.index(row["sparsity"]) for row in line]
                colour, marker, dashes = STYLES[method]
                axis.plot(
                    places,
                    [row["retrieval"] for row in line],
                    color=colour,
                    marker=marker,
                    linestyle=dashes,
                    linewidth=2.2 if method == MAGNITUDE else 1.3,
                    markersize=4.5,
                    label=method,
                    # magnitude lies under what coincides with it
                    zorder=1 if method == MAGNITUDE else 2,
                )
                if method == MAGNITUDE:
                    low, high = ([row[end] for row in line] for end in ("low", "high"))
                    axis.fill_between(places, low, high, color="black", alpha=0.12, linewidth=0)
            axis.set_xticks(range(len(sparsities)), [f"{s:g}" for s in sparsities], fontsize=7)
            axis.set_ylim(-0.03, 1.03)
            axis.tick_params(axis="y", labelsize=7)
            axis.grid(alpha=0.25)
            summary = "" if coarsen == TOKEN else f", {coarsen}"
            axis.set_title(f"{_size_name(size)}{summary}; strength {strength:g}", fontsize=8)
    figure.supxlabel("sparsity (share of every row's blocks dropped)", fontsize=10)
    figure.supylabel("share of the bridges kept", fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format="png")
    plt.close(figure)
    write_atomically(path, drawn.getvalue())
