"""The calibrate command: densities of a document a sample, and config files from them."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from words import TEXT

import cab_hf
from cab_hf import CabConfig
from cab_hf.calibration import anchors as of_anchors
from cab_hf.calibration import passes as of_models
from cab_hf.config import Origin
from cab_hf.eval import calibrate
from cab_hf.eval.__main__ import main
from cab_hf.eval.calibrate import Calibrate
from cab_hf.eval.experiment import render

# of few blocks, each of which has more of the attention than one among many
THRESHOLDS = (0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01)
SMALL = ("query_block=16", "key_block=16", "share_threshold=1.0")


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "KEYS", 2)
    file = tmp_path / "book.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def few_blocks(monkeypatch):
    monkeypatch.setattr(of_anchors, "THRESHOLDS", THRESHOLDS)
    monkeypatch.setattr(calibrate, "ANCHOR_THRESHOLDS", THRESHOLDS)


def command(model_folder, book, out, *more):
    given = ["--model", model_folder, "--texts", book, "--out", out, "--length", 300]
    given += ["--device", "cpu", *(word for field in SMALL for word in ("--cab", field))]
    return main(["calibrate", *map(str, (*given, *more))])


def test_it_writes_a_config_for_every_density_and_goes_on(model_folder, book, tmp_path, capsys):
    out = tmp_path / "run"
    assert command(model_folder, book, out, "--target-densities", "0.6") == 0
    low = CabConfig.calibrated(out / "cab_config-0.6.json")
    assert low.predictor == "rows" and 0 < low.mass_threshold < 1
    assert low.origin == Origin(Path(model_folder).name, 2, 6, 2, 300)
    assert low.query_block == 16 and low.min_length == CabConfig().min_length
    assert command(model_folder, book, out, "--target-densities", "0.9", "--documents", 2) == 0
    content = json.loads((out / "results.json").read_text())
    assert content["provenance"]["settings"]["target_densities"] == [0.6, 0.9]
    assert len((out / "samples.jsonl").read_text().splitlines()) == 3
    for target in (0.6, 0.9):
        assert (out / f"cab_config-{target}.json").is_file()
        spent = [row["density"] for row in content["rows"] if row["target"] == target]
        assert len(spent) == 2 and sum(spent) / 2 <= target + 1e-4
    assert CabConfig.calibrated(out / "cab_config-0.9.json").mass_threshold < low.mass_threshold
    assert "config: " in capsys.readouterr().out
    before = (out / "results.json").read_text()
    render(out)
    assert (out / "results.json").read_text() == before
    assert (out / "figure.png").stat().st_size > 3_000


def test_rows_say_what_each_layer_attends(model_folder, book, tmp_path):
    out = tmp_path / "run"
    assert command(model_folder, book, out, "--target-densities", "0.7") == 0
    config = CabConfig.calibrated(out / "cab_config-0.7.json")
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [row["layer"] for row in rows] == [0, 1]
    assert {row["mass_threshold"] for row in rows} == {config.mass_threshold}
    # the measured threshold is at most a quarter of an octave above
    assert fmean(row["density"] for row in rows) == pytest.approx(0.7, abs=0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target-densities", "1.5"], r"target_densities is (1.5,); it must be in (0, 1]"),
        (["--texts", "nowhere.txt"], "texts is 'nowhere.txt'; it must be UTF-8 files or built-in"),
        (["--cab", "mas=1"], "CabConfig has no field 'mas'"),
    ],
)
def test_bad_settings_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["calibrate", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--anchors", 1)], ids=["threshold", "anchors"])
def test_a_density_out_of_reach_is_refused_before_the_model_is_opened(
    model_folder, book, tmp_path, capsys, monkeypatch, more
):
    monkeypatch.setattr("cab_hf.eval.on_model.load_model", None)
    words = ("--target-densities", "0.9,0.1", *more)
    assert command(model_folder, book, tmp_path / "run", *words) == 2
    shown = capsys.readouterr().err
    assert "target_densities: target_density is 0.1; it must be at least 0." in shown
    assert not (tmp_path / "run").exists()


def test_what_is_measured_by_default_on_a_cpu_can_be_reached():
    Calibrate(calibrate.Settings(model="tiny", device="cpu")).check()


def test_the_table_shows_means_and_edges():
    shared = {"target": 0.2, "mass_threshold": 0.004}
    rows = [{**shared, "density": density} for density in (0.05, 0.1, 0.15)]
    (table,) = Calibrate.tables(rows).values()
    assert "| 0.20 | 3 | 0.004 | 0.1000 | 0.0500 | 0.1500 |" in table


# --- anchors


def test_anchors_are_found_and_saved_with_their_map(
    model_folder, book, tmp_path, capsys, few_blocks
):
    out, words = tmp_path / "run", ("--target-densities", "0.8", "--anchors")
    assert command(model_folder, book, out, *words, 1) == 0
    config = CabConfig.calibrated(out / "cab_config-0.8.json")
    assert (config.predictor, config.anchors, config.max_density) == ("cascade", (0,), 1.0)
    assert THRESHOLDS[-1] <= config.mass_threshold <= THRESHOLDS[0]
    assert config.head_map[0] == tuple(range(6)) and len(config.head_map) == 2
    first = (out / "cab_config-0.8.json").read_text()
    samples = (out / "samples.jsonl").read_text()
    # another number of them follows from the same samples
    assert command(model_folder, book, out, *words, 2) == 0
    assert (out / "samples.jsonl").read_text() == samples
    assert CabConfig.calibrated(out / "cab_config-0.8.json").anchors == (0, 1)
    before = (out / "results.json").read_text()
    render(out)
    assert (out / "results.json").read_text() == before
    assert (out / "figure.png").stat().st_size > 3_000
    # and a run anew finds the same
    assert command(model_folder, book, tmp_path / "again", *words, 1) == 0
    assert (tmp_path / "again" / "cab_config-0.8.json").read_text() == first
    rows = json.loads(before)["rows"]
    assert [(row["anchor"], row["layer"]) for row in rows] == [(0, 0), (0, 1), (1, 1)]
    assert all(0 <= row["needle"] <= 1 + 1e-4 and 0 < row["mass"] <= 1 + 1e-4 for row in rows)
    assert [row["chosen"] for row in rows] == [True, False, True]
    assert fmean(row["density"] for row in rows if row["chosen"]) <= 0.8
    assert [row["density"] is None for row in rows] == [False, True, False]
    # another target needs nothing that was not measured
    assert command(model_folder, book, out, "--target-densities", "0.9", *words[2:], 1) == 0
    assert (out / "samples.jsonl").read_text() == samples
    assert CabConfig.calibrated(out / "cab_config-0.9.json").anchors == (0,)
    assert command(model_folder, book, tmp_path / "too-many", *words, 3) != 0
    assert "anchors must be at most 2" in capsys.readouterr().err
    assert not (tmp_path / "too-many").exists()


def test_what_a_layer_changes_is_one_less_the_cosine(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad(), of_models._changes(model) as actual:
        states = model(ids, output_hidden_states=True).hidden_states
    cosine = torch.cosine_similarity(states[0], states[1], dim=-1).mean()
    assert sorted(actual) == [0, 1] and actual[0] == pytest.approx(float(1 - cosine), abs=1e-6)
    # nothing is watched any longer
    actual.clear()
    model(ids)
    assert not actual


def test_a_calibrated_cascade_runs_and_keeps_its_anchors(
    model_folder, book, tmp_path, monkeypatch, few_blocks
):
    monkeypatch.setattr(of_models, "KEYS", 2)
    out = tmp_path / "run"
    assert command(model_folder, book, out, "--target-densities", "0.8", "--anchors", 1) == 0
    config = replace(CabConfig.calibrated(out / "cab_config-0.8.json"), min_length=0)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = torch.arange(3, 60).repeat(5)[None]
    with cab_hf.cab(model, config), torch.no_grad():
        model(ids)
        first, second = (layer["density"] for layer in cab_hf.stats(model))
    # heads of the second layer attend what heads of the first chose, whichever they like
    assert 0.5 < first < 0.95 and (first + second) / 2 == pytest.approx(0.8, abs=0.05)
    tokenizer, text = AutoTokenizer.from_pretrained(model_folder), book.read_text()
    fields = {"length": 300, "documents": 1}
    # the library finds what the command found, which is recorded in 16 bits
    own = CabConfig.from_dict(
        json.loads((out / "results.json").read_text())["provenance"]["settings"]["cab_config"]
    )
    given = cab_hf.calibrate(model, tokenizer, [text], 0.8, config=own, anchors=1, **fields)
    assert given.anchors == config.anchors
    assert given.mass_threshold == pytest.approx(config.mass_threshold, rel=0.05)
    # the same anchors and heads, by another threshold
    fields["config"] = config
    given = cab_hf.calibrate(model, tokenizer, [text], 0.7, **fields)
    assert given.anchors == (0,) and given.head_map == config.head_map
    assert given.mass_threshold > config.mass_threshold
