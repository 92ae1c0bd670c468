"""The bridges command: its graph, its budgets, its verdicts and its files."""

import json
import math
from dataclasses import replace

import pytest
import torch

from cab_hf.eval import __main__, bridge_graphs, bridges, experiment
from cab_hf.eval.bridge_graphs import MAGNITUDE, MINMAX, RANDOM, TOKEN, seeded
from cab_hf.eval.bridges import BETTER, CHANCE, MIXED, SAME, WORSE, Bridges, Settings

SPARSITIES = (0.0, 0.5, 0.9)
TINY = Settings(
    sizes=((40, 1), (24, 4)),
    strengths=(0.5, 40.0),
    sparsities=SPARSITIES,
    seeds=3,
    communities=3,
    bridges=4,
    dim=16,
)
SIZES = pytest.mark.parametrize("size", TINY.sizes, ids=["tokens", "blocks"])


def graph_of(size, strength=0.5, index=0, **changes):
    return bridge_graphs.make_graph(size, strength, index, replace(TINY, **changes))


def kept_by(graph, sparsities=SPARSITIES):
    """(method, coarsening) -> bool [S, M, M], with true mass that nobody should need."""
    mass = torch.rand(1, 1, graph.blocks, graph.blocks, generator=seeded("mass")).tril()
    result = bridge_graphs.selections(graph, sparsities, mass, seeded("random"))
    return {(method, coarsen): keep[:, 0] for method, coarsen, keep in result}


# --- the graph


@pytest.mark.parametrize("layout", bridge_graphs.LAYOUTS)
@SIZES
def test_bridges_join_communities_and_point_back(size, layout):
    for index in range(20):
        graph = graph_of(size, index=index, layout=layout)
        assert (graph.columns < graph.rows).all()
        assert (graph.community[graph.columns] != graph.community[graph.rows]).all()
        # each has two blocks of its own
        assert len(torch.cat([graph.rows, graph.columns]).unique()) == 2 * TINY.bridges
        assert torch.equal(graph.needles // graph.block_size, graph.columns)


@pytest.mark.parametrize("needle", bridge_graphs.NEEDLES)
@SIZES
def test_a_planted_bridge_has_the_affinity_it_was_given(size, needle):
    strength = 0.5
    graph = graph_of(size, strength, needle=needle, noise=0.0)
    logits = (graph.q @ graph.k.mT)[0, 0] * TINY.dim**-0.5
    community = graph.community.repeat_interleave(graph.block_size)
    expected = torch.where(community[:, None] == community, TINY.affinity, 0.0)
    asking = torch.arange(len(logits)) // graph.block_size == graph.rows[:, None]
    for rows, key in zip(asking, graph.needles, strict=True):
        expected[rows, key] = strength * TINY.affinity
    # a quiet needle turns from its own community as far as it turns to the bridge
    others = torch.ones(len(logits), dtype=torch.bool)
    if needle == "quiet":
        others[graph.needles] = False
    torch.testing.assert_close(logits[:, others], expected[:, others], atol=1e-4, rtol=0)
    for rows, key in zip(asking, graph.needles, strict=True):
        torch.testing.assert_close(logits[rows, key], expected[rows, key], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("needle", "louder"), [("quiet", 1.0), ("loud", math.sqrt(1.5))], ids=bridge_graphs.NEEDLES
)
def test_only_a_loud_needle_is_louder_than_its_block(needle, louder):
    graph = graph_of((24, 4), 0.5, needle=needle, noise=0.0)
    norms = graph.k[0, 0].norm(dim=-1)
    expected = torch.full_like(norms, math.sqrt(TINY.affinity * math.sqrt(TINY.dim)))
    expected[graph.needles] *= louder
    torch.testing.assert_close(norms, expected)


def test_graphs_differ_by_index_and_come_back():
    size = TINY.sizes[0]
    assert torch.equal(graph_of(size).q, graph_of(size).q)
    assert not torch.equal(graph_of(size).q, graph_of(size, index=1).q)
    assert not torch.equal(graph_of(size).q, graph_of(size, seed=1).q)


# --- the selections


@SIZES
def test_every_method_keeps_exactly_the_budget(size):
    graph = graph_of(size)
    kept = kept_by(graph)
    assert {method for method, _ in kept} == set(bridge_graphs.METHODS)
    visible = torch.arange(1, graph.blocks + 1)
    for keep in kept.values():
        assert not keep.triu(1).any()
        assert keep.diagonal(dim1=1, dim2=2).all()
        for dropped, rows in zip(SPARSITIES, keep.sum(-1), strict=True):
            assert torch.equal(rows, torch.ceil((1 - dropped) * visible - 1e-9).long())


@SIZES
def test_nothing_a_row_keeps_depends_on_later_rows(size):
    graph = graph_of(size)
    half = graph.blocks // 2
    tokens = half * graph.block_size
    later = torch.randn(graph.q.shape, generator=seeded("later")) * 9
    later[:, :, :tokens] = 0
    disturbed = replace(graph, q=graph.q + later, k=graph.k + later.flip(-1))
    before, after = kept_by(graph), kept_by(disturbed)
    for name, keep in before.items():
        if name[0] != RANDOM:
            assert torch.equal(keep[:, :half], after[name][:, :half]), name


@SIZES
def test_without_redundancy_cab_is_magnitude(size, monkeypatch):
    monkeypatch.setitem(bridge_graphs.FORMULAS, "cab 0.3", bridge_graphs.cab(0.0))
    kept = kept_by(graph_of(size))
    for method, coarsen in kept:
        if method == "cab 0.3":
            assert torch.equal(kept[method, coarsen], kept[MAGNITUDE, coarsen])


def test_h2o_by_hand():
    mass = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [0, 3, 1, 0], [0, 0, 0, 1]])
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    budget = torch.tensor([[1], [1], [2], [3]])
    kept = bridge_graphs.heavy_and_recent(mass[None, None], visible[None, None], budget[None, None])
    # so far the columns received 2, 1 in row 1; 2, 4 in row 2; 2, 4, 1 in row 3
    expected = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 1]]
    assert kept[0, 0].long().tolist() == expected


# --- what is measured


def test_random_finds_its_density(monkeypatch):
    monkeypatch.setattr(bridge_graphs, "FORMULAS", {})
    sparsities, graphs = (0.25, 0.5, 0.75), 30
    actual = torch.zeros(len(sparsities))
    for index in range(graphs):
        sample = bridge_graphs.measure(
            graph_of((40, 1), index=index), sparsities, seeded("random", index)
        )
        (random,) = (each for each in sample["outcomes"] if each["method"] == RANDOM)
        actual += torch.tensor(random["found"]) / (graphs * TINY.bridges)
    # 120 bridges: twice the standard error, and what rounding up and the diagonal do
    assert actual.tolist() == pytest.approx([1 - x for x in sparsities], abs=0.12)


@SIZES
def test_magnitude_finds_bridges_of_overwhelming_strength(size):
    for index in range(5):
        graph = graph_of(size, 40.0, index)
        coarsen = TOKEN if size[1] == 1 else MINMAX
        keep = kept_by(graph, (0.9,))[MAGNITUDE, coarsen][0]
        # an early row's budget is its diagonal block, which holds no bridge
        roomy = keep.sum(-1)[graph.rows] > 1
        assert torch.equal(keep[graph.rows, graph.columns], roomy) and roomy.any()


@SIZES
def test_everything_finds_everything_at_sparsity_0(size):
    sample = bridge_graphs.measure(graph_of(size), (0.0,), seeded("random"))
    for outcome in sample["outcomes"]:
        assert outcome["found"] == [TINY.bridges]
        assert outcome["mass"] == [1.0] and outcome["density"] == [1.0]


@SIZES
def test_density_and_mass_are_over_tokens(size):
    graph = graph_of(size)
    sample = bridge_graphs.measure(graph, (0.5,), seeded("random"))
    logits = (graph.q @ graph.k.mT)[0, 0] * TINY.dim**-0.5
    causal = torch.ones_like(logits, dtype=torch.bool).tril()
    attention = logits.masked_fill(~causal, -math.inf).softmax(-1)
    keep = kept_by(graph, (0.5,))[MAGNITUDE, sample["outcomes"][0]["coarsen"]][0]
    tokens = keep.repeat_interleave(graph.block_size, 0).repeat_interleave(graph.block_size, 1)
    actual = sample["outcomes"][0]
    assert actual["method"] == MAGNITUDE
    mass = (attention * tokens).sum() / len(attention)
    assert actual["mass"][0] == pytest.approx(float(mass), abs=1e-4)
    density = (tokens & causal).sum() / causal.sum()
    assert actual["density"][0] == pytest.approx(float(density), abs=1e-4)


# --- verdicts


FOUND, LOST = (0.3, 0.2, 0.4), (0.0, -0.1, 0.1)


@pytest.mark.parametrize(
    ("to_magnitude", "to_random", "word"),
    [
        pytest.param((0.10, 0.05, 0.15), FOUND, BETTER, id="better"),
        pytest.param((0.10, 0.05, 0.15), LOST, CHANCE, id="better than magnitude alone"),
        pytest.param((0.10, -0.01, 0.21), FOUND, SAME, id="wide"),
        pytest.param((0.005, 0.004, 0.006), FOUND, SAME, id="sure but tiny"),
        pytest.param((-0.10, -0.15, -0.05), FOUND, WORSE, id="worse"),
        pytest.param((-0.10, -0.21, 0.01), FOUND, SAME, id="wide below"),
        pytest.param((-0.005, -0.006, -0.004), LOST, SAME, id="sure but tiny below"),
        pytest.param((0.0, 0.0, 0.0), LOST, SAME, id="never apart"),
    ],
)
def test_verdict_by_hand(to_magnitude, to_random, word):
    assert bridges.verdict(to_magnitude, to_random) == word


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ((BETTER, SAME), BETTER),
        ((WORSE, SAME, SAME), WORSE),
        ((BETTER, WORSE), MIXED),
        ((SAME, CHANCE), SAME),
    ],
)
def test_joint_verdict_by_hand(words, word):
    assert bridges.joint_verdict(words) == word


def sample_by_hand(index, result):
    """A graph of 10 bridges at one sparsity; ``result`` by method."""
    outcomes = [
        {
            "method": method,
            "coarsen": None if method == RANDOM else TOKEN,
            "found": [count],
            "mass": [count / 20],
            "density": [0.25],
        }
        for method, count in result.items()
    ]
    place = {"blocks": 40, "block_size": 1, "strength": 0.5, "index": index}
    return {**place, "bridges": 10, "outcomes": outcomes}


def test_rows_and_verdicts_by_hand():
    samples = [
        sample_by_hand(i, {"magnitude": 4, "cab 0.3": 8 + i % 2, "forman lowest": 2, "random": 3})
        for i in range(10)
    ]
    rows = Bridges.rows(samples, {"sparsities": (0.9,)})
    of_cab = {(r["strength"], r["sparsity"]): r for r in rows if r["method"] == "cab 0.3"}
    # a sparsity, its sweep, and the sweep over all strengths
    assert [of_cab[place]["retrieval"] for place in ((0.5, 0.9), (0.5, None), (None, None))] == (
        pytest.approx([0.85] * 3)
    )
    cab = of_cab[0.5, None]
    assert cab["delta"] == pytest.approx(0.45) and cab["mass_delta"] == pytest.approx(0.225)
    words = {r["method"]: r.get("verdict") for r in rows if r["strength"] is None}
    assert words == {"magnitude": None, "cab 0.3": BETTER, "forman lowest": WORSE, "random": WORSE}
    # one level over the strengths, where three methods are judged
    assert {r["level"] for r in rows if r.get("verdict")} == {1 - 0.05 / 3}
    overview = next(iter(Bridges.tables(rows).values()))
    assert "| cab 0.3 | 0.85 (+0.45, better) | better |" in overview
    assert Bridges.readings(rows) == [
        "CAB's curvature term as it is shipped (cab 0.3), beside magnitude alone: better at 40 "
        "tokens (+0.45 [+0.40, +0.50] of the bridges)."
    ]


# --- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bridges")
    command(folder)
    return folder


def start(out, *more):
    given = ["--sizes", "40x1,24x4", "--strengths", "0.5,1.2", "--sparsities", "0.5,0.9"]
    given += ["--seeds", "3", "--communities", "3", "--bridges", "4", "--dim", "16"]
    return __main__.main(["bridges", "--out", str(out), *given, *more])


def command(out, *more):
    assert start(out, *more) == 0
    return json.loads((out / "results.json").read_text())


def test_densities_are_matched(folder):
    cells = {}
    for row in json.loads((folder / "results.json").read_text())["rows"]:
        cell = (row["blocks"], row["strength"], row["sparsity"])
        cells.setdefault(cell, set()).add(row["density"])
    assert all(len(densities) == 1 for densities in cells.values())


def test_results_have_provenance_and_rebuild_the_report(folder):
    content = json.loads((folder / "results.json").read_text())
    made = content["provenance"]
    assert made["settings"]["seeds"] == 3 and made["settings"]["needle"] == "quiet"
    assert str(folder) not in json.dumps(content)
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "report.md").read_text()
    assert experiment.report_text(Bridges, content["rows"], made) == text
    given = "--communities 3 --bridges 4 --dim 16 --sizes 40x1,24x4 --strengths 0.5,1.2"
    assert text.endswith(f"bridges {given} --sparsities 0.5,0.9 --seeds 3\n```\n")


def test_a_run_goes_on_where_it_was_killed(folder, tmp_path, monkeypatch):
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(lines[:7]) + lines[7][:50])
    made = []
    make_graph = bridge_graphs.make_graph
    monkeypatch.setattr(
        bridge_graphs, "make_graph", lambda *place: made.append(place) or make_graph(*place)
    )
    monkeypatch.setattr(Bridges, "draw", staticmethod(lambda path, rows: None))
    rows = command(tmp_path)["rows"]
    assert len(made) == len(lines) - 7
    assert rows == json.loads((folder / "results.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"sizes": ((8, 1),)}, r"sizes is \(8,\ 1\); it must be 16 blocks or more", id="size"
        ),
        pytest.param(
            {"sparsities": (1.0,)},
            r"sparsities is \(1\.0,\); it must be in \[0, 1\)",
            id="sparsity",
        ),
        pytest.param({"seeds": 1}, "seeds is 1; it must be at least 2", id="seeds"),
        pytest.param({"dim": 6}, r"dim is 6; it must be communities \+ bridges \(7\)", id="dim"),
        pytest.param(
            {"layout": "ring"},
            "layout is 'ring'; it must be one of segments, shuffled",
            id="layout",
        ),
        pytest.param(
            {"needle": "blunt"}, "needle is 'blunt'; it must be one of quiet, loud", id="needle"
        ),
    ],
)
def test_settings_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)
