"""Reports: rows computed by hand, tables and sentences in a golden file, and table cells."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from cab_hf.eval import charts, fidelity_figure, report
from cab_hf.eval.fidelity import Fidelity
from cab_hf.eval.intervals import mean_difference, mean_of_intervals, paired_difference
from cab_hf.eval.passkey import Passkey
from cab_hf.experiment.log import read_file, read_log
from cab_hf.experiment.markdown import escape_markdown, format_code

RESULTS_FOLDER = Path(__file__).parents[2] / "eval" / "results"
# golden file, with the sentences and tables of each entry of `SAMPLES_BY_HEADING`
GOLDEN_FILE = Path(__file__).with_name("reports.md")
# settings of a passkey run
PASSKEY_SETTINGS = {"stage": "prefill", "filler": "noise"}
# text name with special characters of Markdown
NAME_WITH_MARKUP = "a|b `c`\n## $d$.txt"


def make_sample(method, probe, sample_index, text="noise", **result):
    """Return a fidelity sample; the keywords ``result`` add or replace fields."""
    case_fields = {"method": method, "text": text, "length": 8, "budget": None, "probe": probe}
    default_fields = {"depth": None, "index": sample_index, "fitted": None, "density": 1.0}
    return {**case_fields, **default_fields, **result}


def make_passkey_sample(method, sample_index, is_correct, **result):
    """Return a passkey sample; the keywords ``result`` add or replace fields."""
    case_fields = {"method": method, "length": 8, "keys": 1, "depth": 0.5, "index": sample_index}
    default_fields = {"budget": None, "density": 1.0, "reached": None, "answer": str(is_correct)}
    return {**case_fields, "correct": is_correct, **default_fields, **result}


def make_recall_sample(method, is_key_right, density=1.0, sample_index=0, **result):
    """Return a fidelity sample of recall; ``is_key_right`` has a bool for each key."""
    return make_sample(
        method, "recall", sample_index, right=is_key_right, density=density, **result
    )


def make_matched_sample(method, density, budget="match", **result):
    """Return a recall sample of a method that was fitted to the density 0.2 of cab.

    ``budget`` is a density, or "match" (`long_run.MATCH_BUDGET`) for the measured density of cab.
    """
    matched_fields = {"budget": budget, "fitted": 0.2, **result}
    return make_recall_sample(method, [True], density, **matched_fields)


def make_recall_and_perplexity_samples():
    """Return samples of recall and perplexity of dense, cab and a variant of cab."""

    def make_perplexity_sample(method, sample_index, nll, density):
        return make_sample(method, "perplexity", sample_index, nll=nll, count=10, density=density)

    return [
        *(
            make_recall_sample("dense", [True, True]),
            make_recall_sample("dense", [True, False], sample_index=1),
        ),
        *(
            make_perplexity_sample("dense", 0, 10.0, 1.0),
            make_perplexity_sample("dense", 1, 20.0, 1.0),
        ),
        *(
            make_recall_sample("cab:a", [True, False], 0.2),
            make_perplexity_sample("cab:a", 0, 11.0, 0.3),
        ),
        *(
            make_recall_sample("cab", [True, False], 0.1),
            make_recall_sample("cab", [False, False], 0.2, 1),
        ),
        # dense has no sample of the third document
        make_recall_sample("cab", [True, True], 0.3, 2),
        *(make_perplexity_sample("cab", 0, 11.0, 0.2), make_perplexity_sample("cab", 1, 23.0, 0.2)),
        make_sample("cab", "question_first", 0, right=[True], density=0.9),
    ]


def make_task_samples():
    """Return samples of two tasks and of pass.

    Dense attention answers one of two tracking keys, and cab none. Both methods answer uuid.
    """
    return [
        make_sample(method, probe, 0, right=answers_right)
        for method, tracking_answers_right in (("dense", [True, False]), ("cab", [False, False]))
        for probe, answers_right in (
            ("tracking", tracking_answers_right),
            ("uuid", [True]),
            ("pass", [False]),
        )
    ]


def make_decoding_samples():
    """Return samples of the probes decode and greedy.

    The greedy continuations of cab agree with dense attention in their first 4, 3 and 0 tokens.
    Equal tokens after the first difference do not count.
    """
    continuations = {"dense": ([1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8])}
    continuations["full"] = continuations["dense"]
    continuations["cab"] = ([1, 2, 3, 4], [1, 2, 3, 9], [0, 6, 7, 8])
    kl_by_method = {"dense": 0.0, "full": 0.5, "cab": 2.0}
    result_fields = {"step_tokens": 2.0, "count": 10, "nll": 1.0, "agree": 8}
    samples = []
    for method, continuations_of_method in continuations.items():
        samples.append(make_sample(method, "decode", 0, kl=kl_by_method[method], **result_fields))
        samples += [
            make_sample(method, "greedy", index, written=written_tokens, **result_fields)
            for index, written_tokens in enumerate(continuations_of_method)
        ]
    return samples


def make_turn_samples():
    """Return samples of two documents with five turns: KL per token 1 to 5, and 2 to 10."""
    samples = []
    for method, index in product(("dense", "cab"), (0, 1)):
        kl_scale = (index + 1.0) * (method == "cab")
        turn_results = [
            {"kl": 2 * kl_scale * turn_number, "agree": 1, "nll": 1.0, "count": 2}
            for turn_number in range(1, 6)
        ]
        summed_fields = {
            field: sum(turn[field] for turn in turn_results) for field in turn_results[0]
        }
        samples.append(make_sample(method, "turns", index, turns=turn_results, **summed_fields))
    return samples


def make_unequal_samples():
    """Return samples in which random and oracle have fewer samples of a probe than dense.

    The methods random and cab have no sample at all of the probe asked, which is allowed.
    """
    sample_counts = [("dense", "recall", 3), ("dense", "asked", 2), ("cab", "recall", 3)]
    sample_counts += [("random", "recall", 2), ("oracle", "recall", 1), ("oracle", "asked", 1)]
    samples = [
        make_sample(method, probe, index, right=[True])
        for method, probe, num_samples in sample_counts
        for index in range(num_samples)
    ]
    # samples of another text, which must not count: numbers of samples are compared within a text
    return [*samples, make_sample("cab", "recall", 0, "other", right=[True])]


def make_samples_without_sparse_layers(**result):
    """Return samples of dense and cab without sparse layers, and of a variant with them."""
    samples = [
        make_recall_sample(method, [True], sparse_density=None, **result)
        for method in ("dense", "cab")
    ]
    return [*samples, make_recall_sample("cab:a", [True], 0.3, sparse_density=0.3)]


def make_passkey_samples():
    """Return passkey samples of four methods."""
    return [
        *(make_passkey_sample("dense", i, i < 3) for i in range(4)),
        *(make_passkey_sample("cab", i, i < 2, density=0.1 * i) for i in range(4)),
        *(make_passkey_sample("streaming", i, i < 2, reached=i == 0) for i in range(3)),
        make_passkey_sample("full", 2, True),
    ]


def make_dense_passkey_samples(method):
    """Return one passkey sample each of dense, h2o, cab and random, and one of ``method``.

    In all samples except that of random, no layer was sparse: ``sparse_density`` is None.
    """
    samples = [
        make_passkey_sample(dense_method, 0, True, sparse_density=None)
        for dense_method in ("dense", "h2o", "cab")
    ]
    samples += [make_passkey_sample("random", 0, True, density=0.4, sparse_density=0.4)]
    return [*samples, make_passkey_sample(method, 1, True, sparse_density=None)]


TIME_FIELDS = {"predict_ms": 0.0, "attend_ms": 12.0, "dense_ms": 20.0, "match_ms": 10.0}
# heading in the golden file -> samples
SAMPLES_BY_HEADING = {
    "recall and perplexity": make_recall_and_perplexity_samples(),
    "tasks": make_task_samples(),
    # a method without a task has no mean that is comparable with the mean of dense
    "some tasks": [x for x in make_task_samples() if (x["method"], x["probe"]) != ("cab", "uuid")],
    "decoding": make_decoding_samples(),
    "turns": make_turn_samples(),
    "fewer samples": make_unequal_samples(),
    "unreachable time": [make_sample("random", "time", 0, **TIME_FIELDS, dense_kernel="SDPA")],
    "density differs from the matched density": [
        # sparse_density is the mean density of the sparse layers, and density that of all layers
        make_matched_sample("random", 0.6, sparse_density=0.21),
        make_matched_sample("streaming", 0.2, sparse_density=0.22),
        make_matched_sample("oracle", 0.3, 0.2, sparse_density=0.3),
        # h2o drops keys from the cache and has no sparse layers; published is matched by time
        make_matched_sample("h2o", 0.5, sparse_density=None),
        make_matched_sample("published", 0.3, sparse_density=0.3, fitted_config={}),
    ],
    "cab without sparse layers": make_samples_without_sparse_layers(),
    "cab with sparse layers": [
        *make_samples_without_sparse_layers()[::2],
        make_recall_sample("cab", [True], sparse_density=0.2),
    ],
    # a method that drops keys after a dense prefill is not dense attention
    "dense prefill and fewer keys": [
        *make_samples_without_sparse_layers(tokens=8, step_tokens=2.0)
    ],
    "text name with special characters": [
        make_sample(method, "pass", 0, text, right=[True])
        for text in ("prose", NAME_WITH_MARKUP)
        for method in ("dense", "cab")
    ],
    "passkey": make_passkey_samples(),
    # one sample of random was sparse
    "passkey, random partly sparse": make_dense_passkey_samples("random"),
    "passkey, published without sparse layers": make_dense_passkey_samples("published"),
}


def make_rows(heading):
    """Return the rows of a report from the samples under a heading of the golden file."""
    if heading.startswith("passkey"):
        return Passkey.rows(SAMPLES_BY_HEADING[heading], PASSKEY_SETTINGS)
    return Fidelity.rows(SAMPLES_BY_HEADING[heading], {})


def render_section(heading):
    """Return the section of the golden file under a heading: its sentences and tables."""
    experiment = Passkey if heading.startswith("passkey") else Fidelity
    rows = make_rows(heading)
    tables = [f"{title}\n\n{table}" for title, table in experiment.tables(rows).items()]
    return "\n\n".join([f"## {heading}", *experiment.summary_sentences(rows), *tables]) + "\n"


def test_rendered_reports_equal_golden_file():
    assert "\n".join(map(render_section, SAMPLES_BY_HEADING)) == GOLDEN_FILE.read_text()


def test_rows_of_fidelity_by_hand():
    dense_row, cab_row, variant_row = rows = make_rows("recall and perplexity")
    assert [row["method"] for row in rows] == ["dense", "cab", "cab:a"]
    assert "delta" not in dense_row["recall"]
    assert dense_row["perplexity"]["value"] == pytest.approx(math.exp(1.5))
    # question-first prompts do not count in the density
    assert cab_row["density"] == pytest.approx(0.2)
    recall, perplexity = cab_row["recall"], cab_row["perplexity"]
    assert (recall["n"], recall["correct"], recall["pairs"]) == (6, 3, 4)
    expected = paired_difference([1, 0, 0, 0], [1, 1, 1, 0])
    assert [recall[field] for field in ("delta", "delta_low", "delta_high")] == list(expected)
    assert recall["ratio"] == pytest.approx(1 / 3)
    expected_ratios = map(math.exp, mean_difference([1.1, 2.3], [1.0, 2.0]))
    actual_ratios = [perplexity[field] for field in ("ratio", "ratio_low", "ratio_high")]
    assert actual_ratios == pytest.approx(list(expected_ratios))
    # a single document gives a ratio without an interval
    assert variant_row["perplexity"]["ratio"] == pytest.approx(math.exp(0.1))
    assert "ratio_low" not in variant_row["perplexity"]


def test_rows_of_passkey_by_hand():
    dense_row, cab_row, streaming_row, full_row = make_rows("passkey")
    assert (dense_row["n"], dense_row["correct"], dense_row["accuracy"]) == (4, 3, 0.75)
    assert "delta" not in dense_row
    assert cab_row["density"] == pytest.approx(0.15)
    assert cab_row["delta"] == pytest.approx(-0.25)
    assert cab_row["delta_low"] < -0.25 < cab_row["delta_high"]
    # paired differences use samples that both methods answered
    assert (streaming_row["pairs"], streaming_row["delta"]) == (3, pytest.approx(-1 / 3))
    assert (streaming_row["outside_n"], streaming_row["outside_correct"]) == (2, 1)
    assert (full_row["pairs"], full_row["same"]) == (1, 1)
    assert list(cab_row["by_depth"].items()) == [("0.5", 0.5)]


def test_mean_over_tasks_by_hand():
    dense_row, cab_row = make_rows("tasks")
    assert (dense_row["tasks"]["n"], dense_row["tasks"]["share"], cab_row["tasks"]["share"]) == (
        2,
        0.75,
        0.5,
    )
    assert "delta" not in dense_row["tasks"]
    difference_fields = ("delta", "delta_low", "delta_high")
    differences = [
        tuple(cab_row[probe][field] for field in difference_fields)
        for probe in ("tracking", "uuid")
    ]
    assert tuple(cab_row["tasks"][field] for field in difference_fields) == mean_of_intervals(
        differences
    )
    dense_row, cab_row = make_rows("some tasks")
    assert (
        dense_row["tasks"]["share"] == 0.75
        and "tasks" not in cab_row
        and cab_row["tracking"]["share"] == 0
    )


def test_rows_of_decoding_by_hand():
    dense_row, cab_row, full_row = make_rows("decoding")
    assert "over_floor" not in dense_row["decode"]
    assert (full_row["decode"]["over_floor"], cab_row["decode"]["over_floor"]) == (1, 4)
    assert (cab_row["greedy"]["equal"], cab_row["greedy"]["prefix"]) == (1, pytest.approx(7 / 3))
    assert cab_row["step_share"] == 2 / 8


@pytest.mark.parametrize(
    "folder_name", ["fidelity-default", *(x.name for x in RESULTS_FOLDER.glob("smollm2-*"))]
)
def test_committed_rows_equal_rows_of_samples(folder_name):
    content = json.loads(read_file(RESULTS_FOLDER / folder_name / "results.json"))
    identity, samples = read_log(RESULTS_FOLDER / folder_name / "samples.jsonl")
    settings = content["provenance"]["settings"]
    if folder_name == "fidelity-default":
        assert json.loads(json.dumps(Fidelity.rows(samples, settings))) == content["rows"]
        return
    assert identity.items() <= {"experiment": "passkey", **settings}.items()
    # the last digits, which tables do not show, depend on the version of scipy
    assert Passkey.tables(Passkey.rows(samples, settings)) == Passkey.tables(content["rows"])


def test_figure_shows_tasks_side_by_side(tmp_path, monkeypatch):
    probes = ("uuid", "copying")
    samples = [
        make_sample(method, probe, index, right=[method != "random"])
        for method, probe, index in product(("dense", "cab", "random"), probes, range(3))
        if (method, probe) != ("random", "copying")
    ]
    axes, draw_tasks = Figure().subplots(), fidelity_figure._draw_tasks
    # draw on an axis that the test can read
    monkeypatch.setattr(
        fidelity_figure,
        "_draw_tasks",
        lambda _, rows, titles, styles: draw_tasks(axes, rows, titles, styles),
    )
    Fidelity.draw(tmp_path / "figure.png", Fidelity.rows(samples, {}))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["UUIDs", "copying"]
    points_by_method = {}
    for container in axes.containers:
        (x,), (y,) = container.lines[0].get_data()
        points_by_method.setdefault(container.get_label(), []).append((round(x), y))
    assert points_by_method == {"cab": [(0, 1.0), (1, 1.0)], "random": [(0, 0.0)]}
    assert [container.get_label() for container in axes.collections].count("dense") == 2


def test_text_name_with_dollar_signs_is_not_typeset(tmp_path):
    Fidelity.draw(tmp_path / "figure.png", make_rows("text name with special characters"))


@pytest.mark.parametrize("num_panels", [1, 3, 10])
def test_heatmap_writes_an_image(tmp_path, num_panels):
    path = tmp_path / "heatmap.png"
    grid = {(1024, 0.0): 1.0, (2048, 0.5): 0.25}
    charts.draw_heatmap(path, {f"method {i}": grid for i in range(num_panels)}, "length", "depth")
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


def render_cell(value):
    """Return the only cell of a Markdown table."""
    _, _, line = report.markdown_table([{"x": value}], ["x"]).splitlines()
    return line.removeprefix("| ").removesuffix(" |")


@pytest.mark.parametrize(
    ("render", "text", "expected"),
    [
        *(
            (render_cell, "a|b", r"a\|b"),
            (render_cell, r"a\|b", r"a\|b"),
            (render_cell, "a\nb", "a b"),
        ),
        *(
            (render_cell, "**0.00**", "**0.00**"),
            (escape_markdown, "my_text-1.txt", "my_text-1.txt"),
        ),
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
def test_markdown_in_text_is_escaped(render, text, expected):
    assert render(text) == expected


def test_difference_is_shown_with_interval():
    row = {"delta": 0.05, "delta_low": -0.041, "delta_high": 0.1}
    assert report.format_difference(row) == "+0.05 [-0.04, +0.10]"
    assert (
        report.format_difference({"delta": None}) is None and report.format_difference({}) is None
    )
