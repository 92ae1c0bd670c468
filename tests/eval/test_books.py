"""The books command: what it reads, how places of books are put together, and that it resumes."""

import json
import math
import random
from itertools import chain

import pytest
import torch
from bench import DensityBench
from torch.nn import functional as F
from words import TEXT, make_merging_tokenizer

from cab_hf.config import CabConfig
from cab_hf.eval import books, comparison
from cab_hf.eval.__main__ import main
from cab_hf.eval.books import PG19, Books, Settings
from cab_hf.eval.experiment import render
from cab_hf.eval.intervals import mean_interval
from cab_hf.eval.methods import CabAtBudget, Cell

SPARSE = ("query_block=32", "key_block=16", "share_threshold=0.5", "dense_tail_blocks=0")
LENGTHS, READ = (128, 384), 40


@pytest.fixture
def folder(tmp_path):
    """Three books of words in no order, one of them too short, and what is no book."""
    made = tmp_path / "shelf"
    made.mkdir()
    rng = random.Random(0)
    for name, words in (("a", 500), ("b", 900), ("short", 200)):
        (made / f"{name}.txt").write_text(" ".join(rng.choices(TEXT.split(), k=words)))
    (made / "notes.md").write_text(TEXT)
    return made


def start(model_folder, folder, out, *more, methods="dense,full,cab,streaming", drawn=False):
    given = ["--model", model_folder, "--books", folder, "--out", out, "--methods", methods]
    given += ["--lengths", ",".join(map(str, LENGTHS)), "--continuation", READ, "--device", "cpu"]
    given += [
        "--budgets",
        "0.3,0.6",
        *chain(*(("--cab", field) for field in (*SPARSE, "mass_threshold=0.2"))),
    ]
    with pytest.MonkeyPatch.context() as patch:
        # which takes longer than the rest
        if not drawn:
            patch.setattr(Books, "draw", lambda *_: None)
        return main(["books", *map(str, (*given, *more))])


def command(*given, **kind):
    assert start(*given, **kind) == 0
    return json.loads((given[2] / "results.json").read_text())


def samples_in(out):
    return [json.loads(line) for line in (out / "samples.jsonl").open()][1:]


def settings_of(model_folder, folder, **more):
    fields = {"lengths": LENGTHS, "continuation": READ, "device": "cpu", **more}
    return Settings(model=str(model_folder), books=str(folder), **fields)


# --- what is read


def test_contexts_of_all_lengths_end_at_the_same_token(model_folder, folder):
    experiment = Books(settings_of(model_folder, folder, places=2))
    assert [each.book for each in experiment.excerpts] == ["a.txt", "b.txt"] * 2
    for index, excerpt in enumerate(experiment.excerpts):
        text = (folder / excerpt.book).read_text()
        tokens = experiment.tokenizer(text, add_special_tokens=False)["input_ids"]
        for length in LENGTHS:
            reading = experiment.reading(index, length)
            assert list(reading.tokens) == tokens[excerpt.end - length : excerpt.end + READ]
            assert reading.prompt == length and reading.spans == ((length, length + READ),)
    ends = [each.end for each in experiment.excerpts]
    assert len(set(ends)) == 4
    assert [each.end for each in Books(experiment.settings).excerpts] == ends
    others = settings_of(model_folder, folder, places=2, seed=1)
    assert [each.end for each in Books(others).excerpts] != ends


def test_tokens_before_a_text_are_part_of_the_context(model_folder, folder):
    experiment = Books(settings_of(model_folder, folder))
    experiment.tokenizer = make_merging_tokenizer()
    short, long = (experiment.reading(0, length) for length in LENGTHS)
    for reading, length in zip((short, long), LENGTHS, strict=True):
        assert len(reading.tokens) == length + READ
        assert reading.tokens[0] == experiment.tokenizer.bos_token_id
    assert long.tokens[-len(short.tokens) + 1 :] == short.tokens[1:]


def test_a_place_leaves_room_before_and_behind_it(model_folder, folder):
    """In a book of just as many tokens there is one."""
    text = " ".join(["day"] * (max(LENGTHS) + READ))
    for file in folder.iterdir():
        file.unlink()
    (folder / "only.txt").write_text(text)
    experiment = Books(settings_of(model_folder, folder, places=3))
    assert {each.end for each in experiment.excerpts} == {max(LENGTHS)}
    (folder / "only.txt").write_text(text.removeprefix("day "))
    with pytest.raises(ValueError, match="none of the 1 in"):
        _ = Books(experiment.settings).excerpts


# --- what is found


def test_perplexity_is_that_of_one_pass_over_all(model_folder, folder, tmp_path):
    rows = command(model_folder, folder, tmp_path / "out", methods="dense,full,cab")["rows"]
    experiment = Books(settings_of(model_folder, folder))
    for length in LENGTHS:
        losses = []
        for index in range(2):
            ids = torch.tensor([experiment.reading(index, length).tokens])
            with torch.no_grad():
                logits = experiment.model(ids).logits[0, length - 1 : -1]
            losses.append(F.cross_entropy(logits, ids[0, length:]).item())
        expected = math.exp(sum(losses) / 2)
        of = {(r["method"], r["budget"]): r for r in rows if r["length"] == length}
        dense, full, cab = (of[name, None] for name in ("dense", "full", "cab"))
        assert dense["perplexity"]["value"] == pytest.approx(expected, rel=1e-4)
        assert dense["perplexity"]["ratio"] == 1 == dense["density"]
        assert full["perplexity"]["ratio"] == pytest.approx(1, abs=1e-4)
        # what is sparse is another thing, and so are other lengths
        assert abs(cab["perplexity"]["ratio"] - 1) > 1e-4 and cab["density"] < 0.9
        shift = abs(dense["to_shortest"]["ratio"] - 1)
        assert shift == 0 if length == min(LENGTHS) else shift > 1e-4


def test_cab_stands_at_its_default_and_at_budgets(model_folder, folder, tmp_path):
    out = tmp_path / "out"
    more = ("--lengths", "384", "--variant", f"more={','.join(SPARSE)},mass_threshold=0.08")
    results = command(model_folder, folder, out, *more, drawn=True)
    of = {(row["method"], row["budget"]): row["density"] for row in results["rows"]}
    methods = ("cab", "cab:more")
    assert set(of) == {
        *(("dense", None), ("full", None), ("streaming", 0.3), ("streaming", 0.6)),
        *((name, budget) for name in methods for budget in (None, 0.3, 0.6)),
    }
    for name in methods:
        for budget in (0.3, 0.6):
            assert of[name, budget] == pytest.approx(budget, abs=0.06)
    assert of["cab", None] < of["cab:more", None]
    report = (out / "report.md").read_text()
    assert (
        "| method | length | budget | density | perplexity | perplexity × dense [95 %] |" in report
    )
    assert "attention ms" not in report.splitlines()[2]
    assert "--books shelf" in report
    drawn = (out / "figure.png").read_bytes()
    render(out)
    assert (out / "report.md").read_text() == report and (out / "figure.png").read_bytes() == drawn


def test_cab_at_a_budget_keeps_all_else():
    asked = []

    def realised(config):
        asked.append(config)
        return 0.4 - config.mass_threshold

    config = CabConfig(sink_blocks=2, max_density=0.4)
    method = CabAtBudget.fit(Cell(config, 0.2, 1024, realised=realised))
    # the least threshold that is not below the budget comes first
    assert method.config.changed(mass_threshold=config.mass_threshold) == config.changed(
        max_density=1.0
    )
    assert method.config.mass_threshold == pytest.approx(0.2, rel=0.02)
    assert CabAtBudget.takes(config) and not CabAtBudget.takes(CabConfig(predictor="random"))
    assert not CabAtBudget.takes(CabConfig.published())


def test_attention_is_timed_once_a_cell(model_folder, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "layer_bench", lambda device: DensityBench())
    out = tmp_path / "out"
    given = {"methods": "dense,cab,streaming", "drawn": True}
    results = command(model_folder, folder, out, "--budgets", "0.5", **given)
    for row in results["rows"]:
        assert row["over_dense"] == (row["predict_ms"] + row["attend_ms"]) / row["dense_ms"]
    times = [s for s in samples_in(out) if s["probe"] == "time"]
    assert len(times) == len(results["rows"]) == 8
    report = (out / "report.md").read_text()
    assert "| attention ms (predict + attend) | × dense |" in report
    assert "× the time of SDPA, and has " in report


def sample(method, book, index, nll, length=8):
    case = {"method": method, "text": "shelf", "length": length, "budget": None}
    found = {"probe": "continuation", "index": index, "book": book, "nll": nll, "count": 10}
    return {**case, **found, "fitted": None, "density": 0.5}


def test_places_of_a_book_count_as_one_by_hand():
    samples = [
        *(sample("dense", book, i, 20.0) for i, book in enumerate("abab")),
        *(sample("dense", book, i, 10.0, length=16) for i, book in enumerate("abab")),
        *(sample("cab", "ab"[i % 2], i, nll) for i, nll in enumerate((21.0, 22.0, 23.0, 26.0))),
        # not read by dense attention
        sample("cab", "c", 4, 90.0),
    ]
    rows = Books.rows(samples, {"lengths": [8, 16]})
    assert Books.rows(samples[::-1], {"lengths": [8, 16]}) == rows
    dense, cab, longer = rows
    assert [row["method"] for row in rows] == ["dense", "cab", "dense"]
    # a: 44 over 40, b: 48 over 40, of 20 tokens each
    mean, low, high = mean_interval([2.2, 2.4], [2.0, 2.0])
    expected = dict(zip(books.RATIO, map(math.exp, (mean, low, high)), strict=True))
    actual = cab["perplexity"]
    assert {name: actual[name] for name in books.RATIO} == pytest.approx(expected)
    assert (actual["pairs"], actual["n"]) == (2, 5)
    assert cab["to_shortest"]["ratio"] == actual["ratio"]
    assert longer["perplexity"]["ratio"] == 1
    assert longer["to_shortest"]["ratio"] == pytest.approx(math.exp(-1))
    assert dense["perplexity"]["value"] == pytest.approx(math.exp(2))
    said = Books.readings(rows)
    assert said[0] == (
        "Dense attention has perplexity 7.39 behind 8 tokens, 2.72 behind 16 tokens."
    )
    assert said[1].startswith("Behind 8 tokens cab attends 50% of the pairs, and has 1.350 [")
    assert said[2].endswith("cases that others have: dense on shelf at 8 tokens (4 of 5).")


def test_a_budget_that_forced_blocks_do_not_reach_is_named_and_marked():
    samples = [
        sample("dense", "a", 0, 20.0),
        *(
            sample("cab", "a", 0, 21.0)
            | {"budget": budget, "fitted": budget, "density": density, "sparse_density": density}
            for budget, density in ((0.05, 0.11), (0.4, 0.41))
        ),
    ]
    rows = Books.rows(samples, {"lengths": [8]})
    assert Books.readings(rows)[-1] == (
        "The density is not the matched one within 5%: cab on shelf at 8 tokens and budget 0.05 "
        "(2.20 ×)."
    )
    (table,) = Books.tables(rows).values()
    assert "| cab | 8 | 0.05 (missed) | 0.11 |" in table and "| cab | 8 | 0.40 | 0.41 |" in table


# --- the command


def test_a_killed_run_goes_on_and_grows(model_folder, folder, tmp_path, monkeypatch):
    given = {"methods": "dense,full,streaming"}
    complete = command(model_folder, folder, tmp_path / "whole", **given)
    probed, calls, killed = Books.probed, [], []

    def counted(self, case, method):
        if len(calls) == 8 and not killed:
            killed.append(case)
            raise KeyboardInterrupt
        calls.append(tuple(case[name] for name in Books.CASE))
        return probed(self, case, method)

    out = tmp_path / "killed"
    monkeypatch.setattr(Books, "probed", counted)
    with pytest.raises(KeyboardInterrupt):
        command(model_folder, folder, out, **given)
    assert command(model_folder, folder, out, **given)["rows"] == complete["rows"]
    # 4 arms, of all lengths and books, and none of them twice
    assert len(calls) == len(set(calls)) == 4 * 2 * 2
    calls.clear()
    more = ("--places", "2", "--budgets", "0.6")
    grown = command(model_folder, folder, out, *more, methods="dense,cab")
    # dense attention at the new places, cab at all of them by its default and at a budget
    assert len(calls) == 2 * 2 + 2 * 2 * 4
    assert {index for method, *_, index in calls if method == "dense"} == {2, 3}
    assert all(row["perplexity"]["pairs"] == 2 for row in grown["rows"])


def test_books_that_are_too_short_are_left_out_in_a_sentence(
    model_folder, folder, tmp_path, capsys
):
    left_out = "1 book is too short and left out: short.txt"
    out = tmp_path / "out"
    results = command(model_folder, folder, out, methods="dense", drawn=True)
    assert capsys.readouterr().out.splitlines()[0].endswith(f"; {left_out}")
    assert f"{left_out}." in (out / "report.md").read_text()
    given = results["provenance"]["settings"]["books"]
    assert (given["name"], given["read"], given["too_short"]) == ("shelf", 2, ["short.txt"])
    (folder / "short.txt").unlink()
    command(model_folder, folder, tmp_path / "again", methods="dense")
    assert "left out" not in capsys.readouterr().out


def test_hidden_files_are_no_books(model_folder, folder):
    (folder / "._a.txt").write_bytes(b"\0\xff")
    assert Books(settings_of(model_folder, folder)).contents.keys() == {
        "a.txt",
        "b.txt",
        "short.txt",
    }


def test_books_that_have_changed_are_others(model_folder, folder, tmp_path, capsys):
    command(model_folder, folder, tmp_path / "out", methods="dense")
    (folder / "b.txt").write_text((folder / "b.txt").read_text() + " day")
    assert start(model_folder, folder, tmp_path / "out", methods="dense") == 2
    assert "books" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--books", "empty"], "a folder with .txt files, or pg19", id="no texts"),
        pytest.param(["--books", "nowhere"], "a folder with .txt files, or pg19", id="no folder"),
        pytest.param(["--methods", "cab"], "with dense, which all is held against", id="no dense"),
        pytest.param(["--methods", "dense,no_needle"], "no key is asked for", id="no needle"),
        pytest.param(["--methods", "dense,h2o"], "without h2o, whose prefill is", id="h2o"),
        pytest.param(["--places", "0"], "places is 0; it must be at least 1", id="places"),
        pytest.param(["--continuation", "-1"], "continuation is -1", id="continuation"),
        pytest.param(["--budgets", "2"], "densities in (0, 1]", id="budget"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["books", "--device", "cpu", *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_what_is_no_text_and_what_is_too_long_is_refused(model_folder, folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert start(model_folder, folder, out, "--lengths", "128,2k") == 2
    assert "books must have one of 2,088 tokens or more" in capsys.readouterr().err
    (folder / "c.txt").write_bytes(b"\xff\xfe\x00")
    assert start(model_folder, folder, out) == 2
    assert "books must name a UTF-8 text; got" in capsys.readouterr().err
    assert not out.exists()


def test_the_hub_is_asked_for_pg19_and_missed_in_a_sentence(
    model_folder, folder, tmp_path, monkeypatch, capsys
):
    datasets = pytest.importorskip("datasets")
    texts = [file.read_text() for file in sorted(folder.glob("*.txt"))]

    def load(name, split):
        assert (name, split) == ("emozilla/pg19-test", "test")
        return {"text": texts}

    monkeypatch.setattr(datasets, "load_dataset", load)
    results = command(model_folder, PG19, tmp_path / "out", methods="dense")
    assert {row["text"] for row in results["rows"]} == {PG19}
    assert results["provenance"]["settings"]["books"]["too_short"] == ["002"]

    def unreachable(name, split):
        raise ConnectionError("Couldn't reach 'emozilla/pg19-test' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    assert start(model_folder, PG19, tmp_path / "none") == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "books is 'pg19', which the hub has not given (Couldn't reach" in line
    assert line.endswith("give a folder with .txt files.")
