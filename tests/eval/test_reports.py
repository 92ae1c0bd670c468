"""Reports: rows computed by hand, tables and sentences in a golden file, and table cells."""

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
from cab_hf.experiment.markdown import escape_markdown, format_code

RESULTS = Path(__file__).parents[2] / "eval" / "results"
# golden file, with the sentences and tables of each entry of `SCENES`
GOLDEN = Path(__file__).with_name("reports.md")
# settings of a passkey run
PREFILL = {"stage": "prefill", "filler": "noise"}
# text name with special characters of Markdown
HOSTILE = "a|b `c`\n## $d$.txt"


def sample(method, probe, index, text="noise", **result):
    """Return a fidelity sample; the keywords ``result`` add or replace fields."""
    case = {"method": method, "text": text, "length": 8, "budget": None, "probe": probe}
    defaults = {"depth": None, "index": index, "fitted": None, "density": 1.0}
    return {**case, **defaults, **result}


def passkey_sample(method, index, correct, **result):
    """Return a passkey sample; the keywords ``result`` add or replace fields."""
    case = {"method": method, "length": 8, "keys": 1, "depth": 0.5, "index": index}
    defaults = {"budget": None, "density": 1.0, "reached": None, "answer": str(correct)}
    return {**case, "correct": correct, **defaults, **result}


def recall_sample(method, right, density=1.0, index=0, **result):
    """Return a fidelity sample of recall; ``right`` has a bool for each key."""
    return sample(method, "recall", index, right=right, density=density, **result)


def matched(method, density, budget="match", **result):
    """Return a recall sample of a method that was fitted to the density 0.2 of cab.

    ``budget`` is a density, or "match" (`long_run.MATCH`) for the measured density of cab.
    """
    fields = {"budget": budget, "fitted": 0.2, **result}
    return recall_sample(method, [True], density, **fields)


def recall_and_perplexity():
    """Return samples of recall and perplexity of dense, cab and a variant of cab."""

    def perplexity_sample(method, index, nll, density):
        return sample(method, "perplexity", index, nll=nll, count=10, density=density)

    return [
        *(recall_sample("dense", [True, True]), recall_sample("dense", [True, False], index=1)),
        *(perplexity_sample("dense", 0, 10.0, 1.0), perplexity_sample("dense", 1, 20.0, 1.0)),
        *(recall_sample("cab:a", [True, False], 0.2), perplexity_sample("cab:a", 0, 11.0, 0.3)),
        *(recall_sample("cab", [True, False], 0.1), recall_sample("cab", [False, False], 0.2, 1)),
        # dense has no sample of the third document
        recall_sample("cab", [True, True], 0.3, 2),
        *(perplexity_sample("cab", 0, 11.0, 0.2), perplexity_sample("cab", 1, 23.0, 0.2)),
        sample("cab", "question_first", 0, right=[True], density=0.9),
    ]


def tasks():
    """Return samples of two tasks and of pass.

    Dense attention answers one of two tracking keys, and cab none. Both methods answer uuid.
    """
    return [
        sample(method, probe, 0, right=right)
        for method, keys in (("dense", [True, False]), ("cab", [False, False]))
        for probe, right in (("tracking", keys), ("uuid", [True]), ("pass", [False]))
    ]


def decoding():
    """Return samples of the probes decode and greedy.

    The greedy continuations of cab agree with dense attention in their first 4, 3 and 0 tokens.
    Equal tokens after the first difference do not count.
    """
    continuations = {"dense": ([1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8])}
    continuations["full"] = continuations["dense"]
    continuations["cab"] = ([1, 2, 3, 4], [1, 2, 3, 9], [0, 6, 7, 8])
    kl = {"dense": 0.0, "full": 0.5, "cab": 2.0}
    fields = {"step_tokens": 2.0, "count": 10, "nll": 1.0, "agree": 8}
    samples = []
    for method, written in continuations.items():
        samples.append(sample(method, "decode", 0, kl=kl[method], **fields))
        samples += [
            sample(method, "greedy", index, written=tokens, **fields)
            for index, tokens in enumerate(written)
        ]
    return samples


def turns():
    """Return samples of two documents with five turns: KL per token 1 to 5, and 2 to 10."""
    samples = []
    for method, index in product(("dense", "cab"), (0, 1)):
        scale = (index + 1.0) * (method == "cab")
        by_turn = [{"kl": 2 * scale * at, "agree": 1, "nll": 1.0, "count": 2} for at in range(1, 6)]
        sums = {name: sum(turn[name] for turn in by_turn) for name in by_turn[0]}
        samples.append(sample(method, "turns", index, turns=by_turn, **sums))
    return samples


def fewer_samples():
    """Return samples in which random and oracle have fewer samples of a probe than dense.

    The methods random and cab have no sample at all of the probe asked, which is allowed.
    """
    counts = [("dense", "recall", 3), ("dense", "asked", 2), ("cab", "recall", 3)]
    counts += [("random", "recall", 2), ("oracle", "recall", 1), ("oracle", "asked", 1)]
    samples = [
        sample(method, probe, index, right=[True])
        for method, probe, count in counts
        for index in range(count)
    ]
    # samples of another text, which must not count: numbers of samples are compared within a text
    return [*samples, sample("cab", "recall", 0, "other", right=[True])]


def cab_without_sparse_layers(**result):
    """Return samples of dense and cab without sparse layers, and of a variant with them."""
    samples = [
        recall_sample(method, [True], sparse_density=None, **result) for method in ("dense", "cab")
    ]
    return [*samples, recall_sample("cab:a", [True], 0.3, sparse_density=0.3)]


def passkeys():
    """Return passkey samples of four methods."""
    return [
        *(passkey_sample("dense", i, i < 3) for i in range(4)),
        *(passkey_sample("cab", i, i < 2, density=0.1 * i) for i in range(4)),
        *(passkey_sample("streaming", i, i < 2, reached=i == 0) for i in range(3)),
        passkey_sample("full", 2, True),
    ]


def dense_passkeys(method):
    """Return one passkey sample each of dense, h2o, cab and random, and one of ``method``.

    In all samples except that of random, no layer was sparse: ``sparse_density`` is None.
    """
    samples = [
        passkey_sample(name, 0, True, sparse_density=None) for name in ("dense", "h2o", "cab")
    ]
    samples += [passkey_sample("random", 0, True, density=0.4, sparse_density=0.4)]
    return [*samples, passkey_sample(method, 1, True, sparse_density=None)]


TIMES = {"predict_ms": 0.0, "attend_ms": 12.0, "dense_ms": 20.0, "match_ms": 10.0}
# heading in the golden file -> samples
SCENES = {
    "recall and perplexity": recall_and_perplexity(),
    "tasks": tasks(),
    # a method without a task has no mean that is comparable with the mean of dense
    "some tasks": [x for x in tasks() if (x["method"], x["probe"]) != ("cab", "uuid")],
    "decoding": decoding(),
    "turns": turns(),
    "fewer samples": fewer_samples(),
    "unreachable time": [sample("random", "time", 0, **TIMES, dense_kernel="SDPA")],
    "density differs from the matched density": [
        # sparse_density is the mean density of the sparse layers, and density that of all layers
        matched("random", 0.6, sparse_density=0.21),
        matched("streaming", 0.2, sparse_density=0.22),
        matched("oracle", 0.3, 0.2, sparse_density=0.3),
        # h2o drops keys from the cache and has no sparse layers; published is matched by time
        matched("h2o", 0.5, sparse_density=None),
        matched("published", 0.3, sparse_density=0.3, fitted_config={}),
    ],
    "cab without sparse layers": cab_without_sparse_layers(),
    "cab with sparse layers": [
        *cab_without_sparse_layers()[::2],
        recall_sample("cab", [True], sparse_density=0.2),
    ],
    # a method that drops keys after a dense prefill is not dense attention
    "dense prefill and fewer keys": [*cab_without_sparse_layers(tokens=8, step_tokens=2.0)],
    "text name with special characters": [
        sample(method, "pass", 0, text, right=[True])
        for text in ("prose", HOSTILE)
        for method in ("dense", "cab")
    ],
    "passkey": passkeys(),
    # one sample of random was sparse
    "passkey, random partly sparse": dense_passkeys("random"),
    "passkey, published without sparse layers": dense_passkeys("published"),
}


def rows_of(scene):
    """Return the rows of a report from the samples of a scene."""
    if scene.startswith("passkey"):
        return Passkey.rows(SCENES[scene], PREFILL)
    return Fidelity.rows(SCENES[scene], {})


def section_of(scene):
    """Return the section of the golden file: sentences and tables of a scene."""
    experiment = Passkey if scene.startswith("passkey") else Fidelity
    rows = rows_of(scene)
    tables = [f"{title}\n\n{table}" for title, table in experiment.tables(rows).items()]
    return "\n\n".join([f"## {scene}", *experiment.readings(rows), *tables]) + "\n"


def test_rendered_reports_equal_golden_file():
    assert "\n".join(map(section_of, SCENES)) == GOLDEN.read_text()


def test_rows_by_hand():
    dense, cab, variant = rows = rows_of("recall and perplexity")
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
    # a single document gives a ratio without an interval
    assert variant["perplexity"]["ratio"] == pytest.approx(math.exp(0.1))
    assert "ratio_low" not in variant["perplexity"]


def test_rows_of_passkey_by_hand():
    dense, cab, streaming, full = rows_of("passkey")
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
    # the last digits, which tables do not show, depend on the version of scipy
    assert Passkey.tables(Passkey.rows(samples, settings)) == Passkey.tables(content["rows"])


def test_figure_shows_tasks_side_by_side(tmp_path, monkeypatch):
    probes = ("uuid", "copying")
    samples = [
        sample(method, probe, index, right=[method != "random"])
        for method, probe, index in product(("dense", "cab", "random"), probes, range(3))
        if (method, probe) != ("random", "copying")
    ]
    axis, draw_tasks = Figure().subplots(), fidelity_figure._draw_tasks
    # draw on an axis that the test can read
    monkeypatch.setattr(
        fidelity_figure,
        "_draw_tasks",
        lambda _, rows, titles, styles: draw_tasks(axis, rows, titles, styles),
    )
    Fidelity.draw(tmp_path / "figure.png", Fidelity.rows(samples, {}))
    assert [label.get_text() for label in axis.get_xticklabels()] == ["UUIDs", "copying"]
    marks = {}
    for each in axis.containers:
        (x,), (y,) = each.lines[0].get_data()
        marks.setdefault(each.get_label(), []).append((round(x), y))
    assert marks == {"cab": [(0, 1.0), (1, 1.0)], "random": [(0, 0.0)]}
    assert [each.get_label() for each in axis.collections].count("dense") == 2


def test_text_name_with_dollar_signs_is_not_typeset(tmp_path):
    Fidelity.draw(tmp_path / "figure.png", rows_of("text name with special characters"))


@pytest.mark.parametrize("panels", [1, 3, 10])
def test_heatmap_writes_an_image(tmp_path, panels):
    path = tmp_path / "heatmap.png"
    grid = {(1024, 0.0): 1.0, (2048, 0.5): 0.25}
    charts.draw_heatmap(path, {f"method {i}": grid for i in range(panels)}, "length", "depth")
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
    """Return the only cell of a Markdown table."""
    _, _, line = report.markdown_table([{"x": value}], ["x"]).splitlines()
    return line.removeprefix("| ").removesuffix(" |")


@pytest.mark.parametrize(
    ("write", "text", "expected"),
    [
        *((one_cell, "a|b", r"a\|b"), (one_cell, r"a\|b", r"a\|b"), (one_cell, "a\nb", "a b")),
        *((one_cell, "**0.00**", "**0.00**"), (escape_markdown, "my_text-1.txt", "my_text-1.txt")),
        *((escape_markdown, "a|b.txt", r"a\|b.txt"), (escape_markdown, "`rm`.txt", r"\`rm\`.txt")),
        *(
            (escape_markdown, "a\n# b.txt", "a # b.txt"),
            (format_code, "a.*", "`a.*`"),
            (format_code, "a`b", "``a`b``"),
        ),
        (escape_markdown, "_a_ *b* [c](d) <e>", r"\_a\_ \*b\* \[c\](d) \<e\>"),
        *((format_code, "(q|v)", r"`(q\|v)`"), (format_code, "`a", "`` `a ``")),
    ],
)
def test_markdown_in_text_is_escaped(write, text, expected):
    assert write(text) == expected


def test_difference_is_shown_with_interval():
    row = {"delta": 0.05, "delta_low": -0.041, "delta_high": 0.1}
    assert report.difference(row) == "+0.05 [-0.04, +0.10]"
    assert report.difference({"delta": None}) is None and report.difference({}) is None
