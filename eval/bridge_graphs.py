"""Graphs of communities with planted bridges, and what each selection formula keeps of them.

A graph is made of real q and k vectors, so that the ops of the package decide. Its bridges are
edges from a query block to a key block of an earlier community, weaker than the edges inside a
community where ``strength`` is below 1. Every formula keeps the same number of blocks in every row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cab_hf.config import COARSEN, CabConfig
from cab_hf.ops import reference
from cab_hf.plan import Spans, block_visibility
from cab_hf.predictors import frc
from cab_hf.predictors.attention_mass import block_mass
from cab_hf.runs.provenance import fingerprint
from cab_hf.runs.settings import option, require

LAYOUTS = ("segments", "shuffled")
NEEDLES = ("quiet", "loud")
MAGNITUDE, H2O, RANDOM = "magnitude", "h2o", "random"
MINMAX = "minmax"
TOKEN = "token"  # how blocks of one token are summarised: there is nothing to coarsen
# equal blocks, so that the product of the block graph with itself needs no change of grid
SQUARE = {"query_block": 64, "key_block": 64}


@dataclass(frozen=True)
class GraphSettings:
    """What all graphs have in common; a ValueError names the option that is refused."""

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
    seed: int = option(0, "random seed of all graphs and selections", int)

    def __post_init__(self) -> None:
        check = partial(require, self)
        check("bridges", self.bridges >= 1, "at least 1")
        check("communities", self.communities >= 2, "at least 2")
        directions = self.communities + self.bridges
        check("dim", self.dim >= directions, f"communities + bridges ({directions}) or more")
        check("affinity", self.affinity > 0, "over 0")
        check("noise", self.noise >= 0, "0 or more")
        check("layout", self.layout in LAYOUTS, f"one of {', '.join(LAYOUTS)}")
        check("needle", self.needle in NEEDLES, f"one of {', '.join(NEEDLES)}")


@dataclass(frozen=True, eq=False)
class Graph:
    """A causal graph of M blocks of ``block_size`` tokens; indices are int64."""

    q: Tensor  # float32 [1, 1, M * block_size, D], as k
    k: Tensor
    community: Tensor  # [M], of every block
    rows: Tensor  # [bridges], the query block
    columns: Tensor  # [bridges], the key block
    needles: Tensor  # [bridges], the one token that carries the bridge's key
    block_size: int

    @property
    def blocks(self) -> int:
        return self.community.shape[0]


def make_graph(
    size: tuple[int, int], strength: float, index: int, settings: GraphSettings
) -> Graph:
    """Graph number ``index`` of a ``size``, (blocks, tokens of a block), and strength.

    Queries and keys are their community's prototype plus noise; prototypes and the bridges' shared
    directions are orthonormal up to their lengths. A bridge's direction is added to all queries of
    its row and to one token of its key block, with lengths whose product is ``strength`` times that
    inside a community.
    """
    blocks, block_size = size
    communities, bridges = settings.communities, settings.bridges
    generator = seeded("graph", settings.seed, *size, strength, index)
    normal = partial(torch.randn, generator=generator)
    community = torch.arange(blocks) * communities // blocks
    if settings.layout == "shuffled":
        community = community[torch.randperm(blocks, generator=generator)]
    rows, columns = _plant(community, bridges, generator)
    needles = columns * block_size + torch.randint(block_size, (bridges,), generator=generator)
    directions = torch.linalg.qr(normal(settings.dim, settings.dim)).Q
    prototypes, shared = directions[:communities], directions[communities:][:bridges]

    # q·k / sqrt(D) of two vectors of this length along one direction is the affinity
    length = math.sqrt(settings.affinity * math.sqrt(settings.dim))
    centre = (length * prototypes[community]).repeat_interleave(block_size, dim=0)
    q = centre + settings.noise * normal(centre.shape)
    k = centre + settings.noise * normal(centre.shape)

    bridge = math.sqrt(strength) * length * shared
    before = k[needles]
    grown = torch.ones(bridges, 1)
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


# (logits [1, 1, M, M], visible, places [1, M]) -> what ranks a row's blocks, the highest kept
Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


def published(curvature: str, redundancy: float = 1.0) -> Formula:
    """The published scores: edges are rectified logits."""

    def score(logits: Tensor, visible: Tensor, places: Tensor) -> Tensor:
        affinity = logits.relu().masked_fill(~visible, 0.0)
        hops = frc.two_hop(affinity, places, *SQUARE.values())
        return frc.score(affinity, hops, visible, curvature, redundancy)

    return score


def cab(redundancy: float) -> Formula:
    """CAB's score F = z(log U) - redundancy * z(U U): edges are the softmax of the logits."""
    config = CabConfig(redundancy=redundancy, exact_queries=0, **SQUARE)

    def score(logits: Tensor, visible: Tensor, places: Tensor) -> Tensor:
        reach = reference.block_log_mass(logits, visible)
        direct = reference.standardise(reach, visible)
        return reference.curvature_score(reach.exp(), direct, visible, places, config)

    return score


# the score is the negative curvature: the highest score is the lowest curvature
FORMAN = published("forman")
FORMULAS: dict[str, Formula] = {
    MAGNITUDE: lambda logits, visible, places: logits,
    "forman lowest": FORMAN,
    "forman highest": lambda *block_graph: -FORMAN(*block_graph),
    "additive 0.3": published("additive", 0.3),
    "additive 1": published("additive", 1.0),
    "cab 0.3": cab(0.3),
    "cab 1": cab(1.0),
}
METHODS = (*FORMULAS, H2O, RANDOM)


def selections(
    graph: Graph, sparsities: Sequence[float], mass: Tensor, generator: torch.Generator
) -> Iterator[tuple[str, str | None, Tensor]]:
    """(method, coarsening, bool [S, 1, M, M]) of every method: the blocks kept at each sparsity.

    A row of n visible blocks keeps ceil((1 - sparsity) n) of them, its diagonal block always. h2o
    ranks by ``mass``, the true attention mass of every block, [1, 1, M, M].
    """
    spans = Spans.causal(1, graph.blocks, graph.blocks, "cpu")
    visible = block_visibility(spans, 1, 1).unsqueeze(1)
    places = torch.arange(graph.blocks).unsqueeze(0)
    budget = torch.cat([reference.share_of_row(visible, 1 - dropped) for dropped in sparsities])
    diagonal = torch.eye(graph.blocks, dtype=torch.bool)

    def best(score: Tensor) -> Tensor:
        return diagonal | reference.top_blocks(score, visible & ~diagonal, budget - 1)

    for coarsen in (TOKEN,) if graph.block_size == 1 else COARSEN:
        logits = _logits(graph, "mean" if coarsen == TOKEN else coarsen)
        for name, formula in FORMULAS.items():
            yield name, coarsen, best(formula(logits, visible, places))
    yield H2O, None, heavy_and_recent(mass, visible, budget)
    yield RANDOM, None, best(torch.rand(mass.shape, generator=generator))


def _logits(graph: Graph, coarsen: str) -> Tensor:
    """[1, 1, M, M]: upper logits by the box, the only ones where a block is one vector."""
    valid = torch.ones(1, graph.q.shape[2], dtype=torch.bool)
    queries = reference.coarsen_queries(graph.q, valid, graph.block_size, coarsen)
    keys = reference.coarsen_keys(graph.k, valid, graph.block_size, coarsen)
    return reference.block_logits(queries, keys, graph.q.shape[-1] ** -0.5)[0]


def heavy_and_recent(mass: Tensor, visible: Tensor, budget: Tensor) -> Tensor:
    """H2O row by row: half the budget the latest blocks, half those that received most so far."""
    latest = (budget // 2).clamp(min=1)
    block = torch.arange(mass.shape[-1])
    recent = visible & (block > block.unsqueeze(-1) - latest)
    received = mass.cumsum(-2).expand(recent.shape)
    return recent | reference.top_blocks(received, visible & ~recent, budget - latest)


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
