"""Rows, tables and sentences of fidelity, by hand and of committed results."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from cab_hf.eval import (
    fidelity_figure,
)
from cab_hf.eval.fidelity import Fidelity
from cab_hf.eval.intervals import mean_interval, mean_of_intervals, paired_difference
from cab_hf.runs.log import read_file, read_log


def test_a_time_that_no_budget_takes_is_said():
    row = sample("random", "time", 0, predict_ms=0.0, attend_ms=12.0, dense_ms=20.0)
    rows = Fidelity.rows([{**row, "dense_kernel": "SDPA", "match_ms": 10.0}], {})
    assert rows[0]["over_match"] == 1.2
    assert ["random on noise at 8 tokens (1.20 ×)" in x for x in Fidelity.readings(rows)] == [True]


def test_a_density_that_is_not_the_matched_one_is_said():
    def read(method, density, budget="match", **more):
        fields = {"right": [True], "budget": budget, "fitted": 0.2, **more}
        return sample(method, "recall", 0, **fields | {"density": density})

    samples = [
        # of the layers that are sparse, beside dense ones
        read("random", 0.6, sparse_density=0.21),
        read("streaming", 0.2, sparse_density=0.22),
        read("oracle", 0.3, 0.2, sparse_density=0.3),
        # a cache that keeps some tokens, and one matched by time, in ms
        read("h2o", 0.5, sparse_density=None),
        read("published", 0.3, sparse_density=0.3, fitted_config={}),
    ]
    rows = Fidelity.rows(samples, {})
    assert ["density_over_match" in row for row in rows].count(True) == 2
    (said,) = Fidelity.readings(rows)
    assert said == (
        "The density is not the matched one within 5%: streaming on noise at 8 tokens (1.10 ×), "
        "oracle on noise at 8 tokens and budget 0.2 (1.50 ×)."
    )


def test_rows_of_fewer_cases_than_others_are_named():
    cases = [("dense", "recall", 3), ("dense", "asked", 2), ("cab", "recall", 3)]
    # never asked the other probe, which may be as it was to be
    cases += [("random", "recall", 2), ("oracle", "recall", 1), ("oracle", "asked", 1)]
    samples = [sample(x, probe, i, right=[True]) for x, probe, n in cases for i in range(n)]
    # another text has as many as it has
    rows = Fidelity.rows([*samples, sample("cab", "recall", 0, "other", right=[True])], {})
    marked = {row["method"]: row["fewer"] for row in rows if "fewer" in row}
    assert marked == {
        "random": {"recall": "2 of 3"},
        "oracle": {"recall": "1 of 3", "asked": "1 of 2"},
    }
    assert Fidelity.readings(rows)[-1].endswith(
        "random on noise at 8 tokens (2 of 3), oracle on noise at 8 tokens (1 of 3 or 1 of 2)."
    )


def sample(method, probe, index, text="noise", **result):
    place = {"method": method, "text": text, "length": 8, "budget": None, "probe": probe}
    fixed = {"depth": None, "index": index, "fitted": None, "density": 1.0}
    return {**place, **fixed, **result}


def test_a_method_that_was_dense_attention_is_said_to_be():
    samples = [
        sample("dense", "recall", 0, right=[True], sparse_density=None),
        sample("cab", "recall", 0, right=[True], sparse_density=None),
        sample("cab:a", "recall", 0, right=[True], sparse_density=0.3, density=0.3),
    ]
    *_, given = Fidelity.readings(Fidelity.rows(samples, {}))
    assert given.startswith("No layer attended sparsely under cab at 8 tokens:")
    samples[1]["sparse_density"] = 0.2
    assert not any("sparsely" in each for each in Fidelity.readings(Fidelity.rows(samples, {})))
    # a cache that dropped keys behind a dense prefill is not dense attention
    samples[1] |= {"sparse_density": None, "tokens": 8, "step_tokens": 2.0}
    assert not any("sparsely" in each for each in Fidelity.readings(Fidelity.rows(samples, {})))


def test_rows_by_hand():
    samples = [
        sample("dense", "recall", 0, right=[True, True]),
        sample("dense", "recall", 1, right=[True, False]),
        sample("dense", "perplexity", 0, nll=10.0, count=10),
        sample("dense", "perplexity", 1, nll=20.0, count=10),
        sample("cab:a", "recall", 0, right=[True, False], density=0.2),
        sample("cab:a", "perplexity", 0, nll=11.0, count=10, density=0.3),
        sample("cab", "recall", 0, right=[True, False], density=0.1),
        sample("cab", "recall", 1, right=[False, False], density=0.2),
        # dense has read no third document
        sample("cab", "recall", 2, right=[True, True], density=0.3),
        sample("cab", "perplexity", 0, nll=11.0, count=10, density=0.2),
        sample("cab", "perplexity", 1, nll=23.0, count=10, density=0.2),
        sample("cab", "question_first", 0, right=[True], density=0.9),
    ]
    dense, cab, other = rows = Fidelity.rows(samples, {})
    assert [row["method"] for row in rows] == ["dense", "cab", "cab:a"]
    assert "delta" not in dense["recall"]
    assert dense["perplexity"]["value"] == pytest.approx(math.exp(1.5))
    # a question asked twice tells no usual density
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
    (table,) = Fidelity.tables(rows).values()
    # no row has it
    assert "pass [95 %]" not in table
    assert "| 0.333 |" in table


def test_the_mean_over_tasks_by_hand():
    """One right of two and two of two on dense attention, then none and two."""
    samples = [
        sample(method, probe, 0, right=right)
        for method, keys in (("dense", [True, False]), ("cab", [False, False]))
        for probe, right in (("tracking", keys), ("uuid", [True]), ("pass", [False]))
    ]
    dense, cab = Fidelity.rows(samples, {})
    assert (dense["tasks"]["n"], dense["tasks"]["share"], cab["tasks"]["share"]) == (2, 0.75, 0.5)
    assert "delta" not in dense["tasks"]
    names = ("delta", "delta_low", "delta_high")
    parts = [tuple(cab[probe][name] for name in names) for probe in ("tracking", "uuid")]
    assert tuple(cab["tasks"][name] for name in names) == mean_of_intervals(parts)
    # who was asked some of them has no mean that could stand beside
    some = [each for each in samples if (each["method"], each["probe"]) != ("cab", "uuid")]
    dense, cab = Fidelity.rows(some, {})
    assert dense["tasks"]["share"] == 0.75 and "tasks" not in cab and cab["tracking"]["share"] == 0


def test_decoding_by_hand():
    def decoded(method, kl, *written):
        more = {"step_tokens": 2.0, "count": 10, "nll": 1.0, "agree": 8}
        return [
            sample(method, "decode", 0, kl=kl, **more),
            *(sample(method, "greedy", i, written=w, **more) for i, w in enumerate(written)),
        ]

    samples = [
        *decoded("dense", 0.0, [1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]),
        *decoded("full", 0.5, [1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]),
        # alike to the end, to the third, and from nowhere on; what meets again stays another
        *decoded("cab", 2.0, [1, 2, 3, 4], [1, 2, 3, 9], [0, 6, 7, 8]),
    ]
    dense, cab, full = Fidelity.rows(samples, {})
    assert "over_floor" not in dense["decode"]
    assert (full["decode"]["over_floor"], cab["decode"]["over_floor"]) == (1, 4)
    assert (cab["greedy"]["equal"], cab["greedy"]["prefix"]) == (1, pytest.approx(7 / 3))
    assert cab["step_share"] == 2 / 8
    (table,) = Fidelity.tables([dense, cab, full]).values()
    assert "| 2 | 0.200 | 4.00 | 0.800 | 1 of 3 | 2 of 4 |" in table
    (said,) = Fidelity.readings([dense, cab, full])
    assert "decoded KL 0.200 a token (4.0 × the floor), decoded agreement 80.0%" in said


def test_turns_by_hand():
    """KL a token 1 to 5 in the turns of one document, twice that in those of the other."""

    def turned(method, index, scale):
        turns = [{"kl": 2 * scale * at, "agree": 1, "nll": 1.0, "count": 2} for at in range(1, 6)]
        sums = {name: sum(turn[name] for turn in turns) for name in turns[0]}
        return sample(method, "turns", index, turns=turns, **sums)

    samples = [turned("dense", at, 0.0) for at in (0, 1)]
    samples += [turned("cab", at, 1.0 + at) for at in (0, 1)]
    dense, cab = Fidelity.rows(samples, {})
    assert [turn["kl"] for turn in cab["turns"]["turns"]] == [1.5, 3, 4.5, 6, 7.5]
    interval = mean_interval([5.0, 10.0], [1.0, 2.0])
    names = ("growth", "growth_low", "growth_high")
    assert [cab["turns"][name] for name in names] == pytest.approx(interval)
    (table,) = Fidelity.tables([dense, cab]).values()
    assert "| +6 [-19, +31] | 0.500, 0.500, 0.500, 0.500, 0.500 |" in table
    (said,) = Fidelity.readings([dense, cab])
    assert "KL a token 1.50 [" in said and "] in turn 5 of a chat" in said


def test_a_table_a_text_whose_name_stays_in_its_place(tmp_path):
    name = "a|b `c`\n## $d$.txt"
    samples = [
        sample(method, "pass", 0, text, right=[True])
        for text in ("prose", name)
        for method in ("dense", "cab")
    ]
    rows = Fidelity.rows(samples, {})
    shown = r"On a\|b \`c\` ## \$d\$.txt"
    assert list(Fidelity.tables(rows)) == ["On prose", shown]
    _, said = Fidelity.readings(rows)
    assert said.startswith(f"{shown}, 8 tokens")
    # nor is it a formula that matplotlib would set
    Fidelity.draw(tmp_path / "figure.png", rows)


def test_tasks_stand_side_by_side_in_a_figure(tmp_path, monkeypatch):
    tasks = ("uuid", "copying")
    samples = [
        sample(method, probe, index, right=[method != "random"])
        for method, probe, index in product(("dense", "cab", "random"), tasks, range(3))
        if (method, probe) != ("random", "copying")
    ]
    rows = Fidelity.rows(samples, {})
    drawn = []
    monkeypatch.setattr(
        fidelity_figure, "_by_name", lambda axis, *given: drawn.append((axis, given))
    )
    Fidelity.draw(tmp_path / "figure.png", rows)
    ((_, given),) = drawn
    monkeypatch.undo()
    axis = Figure().subplots()
    fidelity_figure._by_name(axis, *given)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["UUIDs", "copying"]
    marks = {}
    for each in axis.containers:
        (x,), (y,) = each.lines[0].get_data()
        marks.setdefault(each.get_label(), []).append((round(x), y))
    assert marks == {"cab": [(0, 1.0), (1, 1.0)], "random": [(0, 0.0)]}
    levels = [each for each in axis.collections if each.get_label() == "dense"]
    assert len(levels) == 2


def test_committed_results_are_those_of_their_samples():
    folder = Path(__file__).parents[2] / "eval" / "results" / "fidelity-default"
    content = json.loads(read_file(folder / "results.json"))
    _, samples = read_log(folder / "samples.jsonl")
    again = Fidelity.rows(samples, content["provenance"]["settings"])
    assert json.loads(json.dumps(again)) == content["rows"]
