"""Reports: rows by hand, tables and sentences in one golden file, and cells."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from cab_hf.eval import charts, fidelity_figure, report
from cab_hf.eval.fidelity import Fidelity
from cab_hf.eval.intervals import mean_interval, mean_of_intervals, paired_difference
from cab_hf.eval.passkey import Passkey
from cab_hf.experiment.log import read_file, read_log
from cab_hf.experiment.markdown import code, plain

RESULTS = Path(__file__).parents[2] / "eval" / "results"
# a section a scene of `SCENES`: its sentences and tables, as they were read and found right
GOLDEN = Path(__file__).with_name("reports.md")
PREFILL = {"stage": "prefill", "filler": "noise"}
HOSTILE = "a|b `c`\n## $d$.txt"


def sample(method, probe, index, text="noise", **result):
    """One of fidelity."""
    place = {"method": method, "text": text, "length": 8, "budget": None, "probe": probe}
    fixed = {"depth": None, "index": index, "fitted": None, "density": 1.0}
    return {**place, **fixed, **result}


def asked(method, index, correct, **more):
    """Return one passkey sample."""
    place = {"method": method, "length": 8, "keys": 1, "depth": 0.5, "index": index}
    fixed = {"budget": None, "density": 1.0, "reached": None, "answer": str(correct)}
    return {**place, "correct": correct, **fixed, **more}


def read(method, right, density=1.0, index=0, **more):
    return sample(method, "recall", index, right=right, density=density, **more)


def matched(method, density, budget="match", **more):
    return read(method, [True], density, **{"budget": budget, "fitted": 0.2, **more})


def by_hand():
    def surprise(method, index, nll, density):
        return sample(method, "perplexity", index, nll=nll, count=10, density=density)

    return [
        *(read("dense", [True, True]), read("dense", [True, False], index=1)),
        *(surprise("dense", 0, 10.0, 1.0), surprise("dense", 1, 20.0, 1.0)),
        *(read("cab:a", [True, False], 0.2), surprise("cab:a", 0, 11.0, 0.3)),
        *(read("cab", [True, False], 0.1), read("cab", [False, False], 0.2, 1)),
        # dense has no sample of the third document
        read("cab", [True, True], 0.3, 2),
        *(surprise("cab", 0, 11.0, 0.2), surprise("cab", 1, 23.0, 0.2)),
        sample("cab", "question_first", 0, right=[True], density=0.9),
    ]


def tasks():
    """Return task samples: dense answers 1 of 2 tracking keys, cab none; both answer uuid."""
    return [
        sample(method, probe, 0, right=right)
        for method, keys in (("dense", [True, False]), ("cab", [False, False]))
        for probe, right in (("tracking", keys), ("uuid", [True]), ("pass", [False]))
    ]


def scene_of_decoding():
    # cab equals dense in 4, 3 and 0 leading tokens; equal tokens after a difference do not count
    wrote = {"dense": ([1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8])}
    wrote |= {"full": wrote["dense"], "cab": ([1, 2, 3, 4], [1, 2, 3, 9], [0, 6, 7, 8])}
    more = {"step_tokens": 2.0, "count": 10, "nll": 1.0, "agree": 8}
    return [
        each
        for (method, written), kl in zip(wrote.items(), (0.0, 0.5, 2.0), strict=True)
        for each in (
            sample(method, "decode", 0, kl=kl, **more),
            *(sample(method, "greedy", i, written=w, **more) for i, w in enumerate(written)),
        )
    ]


def scene_of_turns():
    """Return turns with KL 1 to 5 per token in one document, and twice that in the other."""
    samples = []
    for method, index in product(("dense", "cab"), (0, 1)):
        scale = (index + 1.0) * (method == "cab")
        turns = [{"kl": 2 * scale * at, "agree": 1, "nll": 1.0, "count": 2} for at in range(1, 6)]
        sums = {name: sum(turn[name] for turn in turns) for name in turns[0]}
        samples.append(sample(method, "turns", index, turns=turns, **sums))
    return samples


def scene_with_fewer_samples():
    cases = [("dense", "recall", 3), ("dense", "asked", 2), ("cab", "recall", 3)]
    # random and cab have no samples of the probe asked, which is allowed
    cases += [("random", "recall", 2), ("oracle", "recall", 1), ("oracle", "asked", 1)]
    samples = [sample(x, probe, i, right=[True]) for x, probe, n in cases for i in range(n)]
    # another text has its own number of samples
    return [*samples, sample("cab", "recall", 0, "other", right=[True])]


def dense_in_fact(**more):
    sparse = read("cab:a", [True], 0.3, sparse_density=0.3)
    return [*(read(x, [True], sparse_density=None, **more) for x in ("dense", "cab")), sparse]


def passkeys():
    return [
        *(asked("dense", i, i < 3) for i in range(4)),
        *(asked("cab", i, i < 2, density=0.1 * i) for i in range(4)),
        *(asked("streaming", i, i < 2, reached=i == 0) for i in range(3)),
        asked("full", 2, True),
    ]


def dense_passkeys(method):
    samples = [asked(name, 0, True, sparse_density=None) for name in ("dense", "h2o", "cab")]
    samples += [asked("random", 0, True, density=0.4, sparse_density=0.4)]
    return [*samples, asked(method, 1, True, sparse_density=None)]


TIMES = {"predict_ms": 0.0, "attend_ms": 12.0, "dense_ms": 20.0, "match_ms": 10.0}
SCENES = {
    "by hand": by_hand(),
    "tasks": tasks(),
    # a method with some of the tasks only has no comparable mean
    "some tasks": [x for x in tasks() if (x["method"], x["probe"]) != ("cab", "uuid")],
    "decoding": scene_of_decoding(),
    "turns": scene_of_turns(),
    "fewer cases": scene_with_fewer_samples(),
    "a time that no budget takes": [sample("random", "time", 0, **TIMES, dense_kernel="SDPA")],
    "a density that is not the matched one": [
        # density of the sparse layers only; others are dense
        matched("random", 0.6, sparse_density=0.21),
        matched("streaming", 0.2, sparse_density=0.22),
        matched("oracle", 0.3, 0.2, sparse_density=0.3),
        # a cache that keeps some tokens, and one matched by time, in ms
        matched("h2o", 0.5, sparse_density=None),
        matched("published", 0.3, sparse_density=0.3, fitted_config={}),
    ],
    "dense attention in fact": dense_in_fact(),
    "sparse in fact": [*dense_in_fact()[::2], read("cab", [True], sparse_density=0.2)],
    # a cache that dropped keys after a dense prefill is not dense attention
    "a dense prefill": [*dense_in_fact(tokens=8, step_tokens=2.0)],
    "a name of another kind": [
        sample(method, "pass", 0, text, right=[True])
        for text in ("prose", HOSTILE)
        for method in ("dense", "cab")
    ],
    "passkey by hand": passkeys(),
    # one of the samples of random was sparse
    "passkey, random in part sparse": dense_passkeys("random"),
    "passkey, published dense in fact": dense_passkeys("published"),
}


def rows_of(scene):
    if scene.startswith("passkey"):
        return Passkey.rows(SCENES[scene], PREFILL)
    return Fidelity.rows(SCENES[scene], {})


def shown(scene):
    kind, rows = Passkey if scene.startswith("passkey") else Fidelity, rows_of(scene)
    tables = [f"{title}\n\n{table}" for title, table in kind.tables(rows).items()]
    return "\n\n".join([f"## {scene}", *kind.readings(rows), *tables]) + "\n"


def test_rendered_reports_equal_golden_file():
    assert "\n".join(map(shown, SCENES)) == GOLDEN.read_text()


# --- rows


def test_rows_by_hand():
    dense, cab, other = rows = rows_of("by hand")
    assert [row["method"] for row in rows] == ["dense", "cab", "cab:a"]
    assert "delta" not in dense["recall"]
    assert dense["perplexity"]["value"] == pytest.approx(math.exp(1.5))
    # question-first prompts do not count in the density
    assert cab["density"] == pytest.approx(0.2)
    recall, perplexity = cab["recall"], cab["perplexity"]
    assert (recall["n"], recall["correct"], recall["pairs"]) == (6, 3, 4)
    expected = paired_difference([1, 0, 0, 0], [1, 1, 1, 0])
    assert [recall[name] for name in ("delta", "delta_low", "delta_high")] == list(expected)
    assert recall["ratio"] == pytest.approx(1 / 3)
    interval = map(math.exp, mean_interval([1.1, 2.3], [1.0, 2.0]))
    actual = [perplexity[name] for name in ("ratio", "ratio_low", "ratio_high")]
    assert actual == pytest.approx(list(interval))
    # one document has a ratio and no interval
    assert other["perplexity"]["ratio"] == pytest.approx(math.exp(0.1))
    assert "ratio_low" not in other["perplexity"]


def test_rows_of_passkey_by_hand():
    dense, cab, streaming, full = rows_of("passkey by hand")
    assert (dense["n"], dense["correct"], dense["accuracy"]) == (4, 3, 0.75)
    assert "delta" not in dense
    assert cab["density"] == pytest.approx(0.15)
    assert cab["delta"] == pytest.approx(-0.25)
    assert cab["delta_low"] < -0.25 < cab["delta_high"]
    # paired differences use samples that both methods answered
    assert (streaming["pairs"], streaming["delta"]) == (3, pytest.approx(-1 / 3))
    assert (streaming["outside_n"], streaming["outside_correct"]) == (2, 1)
    assert (full["pairs"], full["same"]) == (1, 1)
    assert list(cab["by_depth"].items()) == [("0.5", 0.5)]


def test_mean_over_tasks_by_hand():
    dense, cab = rows_of("tasks")
    assert (dense["tasks"]["n"], dense["tasks"]["share"], cab["tasks"]["share"]) == (2, 0.75, 0.5)
    assert "delta" not in dense["tasks"]
    names = ("delta", "delta_low", "delta_high")
    parts = [tuple(cab[probe][name] for name in names) for probe in ("tracking", "uuid")]
    assert tuple(cab["tasks"][name] for name in names) == mean_of_intervals(parts)
    dense, cab = rows_of("some tasks")
    assert dense["tasks"]["share"] == 0.75 and "tasks" not in cab and cab["tracking"]["share"] == 0


def test_decoding_by_hand():
    dense, cab, full = rows_of("decoding")
    assert "over_floor" not in dense["decode"]
    assert (full["decode"]["over_floor"], cab["decode"]["over_floor"]) == (1, 4)
    assert (cab["greedy"]["equal"], cab["greedy"]["prefix"]) == (1, pytest.approx(7 / 3))
    assert cab["step_share"] == 2 / 8


@pytest.mark.parametrize("name", ["fidelity-default", *(x.name for x in RESULTS.glob("smollm2-*"))])
def test_committed_rows_equal_rows_of_samples(name):
    content = json.loads(read_file(RESULTS / name / "results.json"))
    identity, samples = read_log(RESULTS / name / "samples.jsonl")
    settings = content["provenance"]["settings"]
    if name == "fidelity-default":
        assert json.loads(json.dumps(Fidelity.rows(samples, settings))) == content["rows"]
        return
    assert identity.items() <= {"experiment": "passkey", **settings}.items()
    # as shown: the last digits are the library's
    assert Passkey.tables(Passkey.rows(samples, settings)) == Passkey.tables(content["rows"])


# --- figures and cells


def test_figure_shows_tasks_side_by_side(tmp_path, monkeypatch):
    probes = ("uuid", "copying")
    samples = [
        sample(method, probe, index, right=[method != "random"])
        for method, probe, index in product(("dense", "cab", "random"), probes, range(3))
        if (method, probe) != ("random", "copying")
    ]
    axis, draw_tasks = Figure().subplots(), fidelity_figure._draw_tasks
    drawn = []
    # on an axis that can be read afterwards
    monkeypatch.setattr(fidelity_figure, "_draw_tasks", lambda _, *given: drawn.append(given))
    Fidelity.draw(tmp_path / "figure.png", Fidelity.rows(samples, {}))
    (given,) = drawn
    draw_tasks(axis, *given)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["UUIDs", "copying"]
    marks = {}
    for each in axis.containers:
        (x,), (y,) = each.lines[0].get_data()
        marks.setdefault(each.get_label(), []).append((round(x), y))
    assert marks == {"cab": [(0, 1.0), (1, 1.0)], "random": [(0, 0.0)]}
    assert [each.get_label() for each in axis.collections].count("dense") == 2


def test_text_name_with_dollar_signs_is_not_typeset(tmp_path):
    Fidelity.draw(tmp_path / "figure.png", rows_of("a name of another kind"))


@pytest.mark.parametrize("panels", [1, 3, 10])
def test_heatmap_writes_an_image(tmp_path, panels):
    path = tmp_path / "heatmap.png"
    grid = {(1024, 0.0): 1.0, (2048, 0.5): 0.25}
    charts.heatmap(path, {f"method {i}": grid for i in range(panels)}, "length", "depth")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_markdown_table_by_hand():
    rows = [{"method": "cab", "accuracy": 0.954}, {"method": "dense", "accuracy": None}]
    columns = {"who": "method", "accuracy": "accuracy", "long": lambda row: len(row["method"])}
    heading = ["| who | accuracy | long |", "| --- | --- | --- |"]
    body = ["| cab | 0.95 | 3 |", "| dense | – | 5 |"]
    assert report.markdown_table(rows, columns).splitlines() == [*heading, *body]
    assert report.markdown_table(rows, ["method", "absent"]).splitlines()[2] == "| cab | – |"


def test_csv_integers_stay_integers_with_missing_values():
    rows = [{"n": 1, "recall": {"share": 0.5}}, {"n": None, "kind": "b"}]
    assert report.as_csv(rows) == "n,recall.share,kind\n1,0.5,\n,,b\n"


def one_cell(value):
    _, _, line = report.markdown_table([{"x": value}], ["x"]).splitlines()
    return line.removeprefix("| ").removesuffix(" |")


@pytest.mark.parametrize(
    ("write", "text", "shown"),
    [
        *((one_cell, "a|b", r"a\|b"), (one_cell, r"a\|b", r"a\|b"), (one_cell, "a\nb", "a b")),
        *((one_cell, "**0.00**", "**0.00**"), (plain, "my_text-1.txt", "my_text-1.txt")),
        *((plain, "a|b.txt", r"a\|b.txt"), (plain, "`rm`.txt", r"\`rm\`.txt")),
        *((plain, "a\n# b.txt", "a # b.txt"), (code, "a.*", "`a.*`"), (code, "a`b", "``a`b``")),
        (plain, "_a_ *b* [c](d) <e>", r"\_a\_ \*b\* \[c\](d) \<e\>"),
        *((code, "(q|v)", r"`(q\|v)`"), (code, "`a", "`` `a ``")),
    ],
)
def test_markdown_in_text_is_escaped(write, text, shown):
    assert write(text) == shown


def test_difference_is_shown_with_interval():
    row = {"delta": 0.05, "delta_low": -0.041, "delta_high": 0.1}
    assert report.difference(row) == "+0.05 [-0.04, +0.10]"
    assert report.difference({"delta": None}) is None and report.difference({}) is None
