"""The calibrate command: saved configs, their densities, and refused targets."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from words import PROSE_TEXT

import cab_hf
from cab_hf import CabConfig
from cab_hf.calibration import anchors as anchor_fit
from cab_hf.calibration.density import require_reachable_target
from cab_hf.config import Origin
from cab_hf.eval import calibrate
from cab_hf.eval.__main__ import main
from cab_hf.patches import calibration as calibration_passes

# higher than the default thresholds: in a short sequence, each block has a large share of the mass
THRESHOLDS = (0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01)
SMALL_BLOCK_ASSIGNMENTS = ("query_block=16", "key_block=16", "share_threshold=1.0")


@pytest.fixture
def book_file(tmp_path, monkeypatch):
    """Return the path of a short text file, and make `calibrate` use 2 keys and `THRESHOLDS`."""
    for module in (calibration_passes, calibrate):
        monkeypatch.setattr(module, "KEYS_PER_DOCUMENT", 2)
    monkeypatch.setattr(anchor_fit, "THRESHOLDS", THRESHOLDS)
    text_file = tmp_path / "book.txt"
    text_file.write_text(PROSE_TEXT)
    return text_file


def run_calibrate(model_folder, book_file, out, more_options):
    """Run the command with the options in the list ``more_options``, and return its exit status."""
    options = ["--model", model_folder, "--texts", book_file, "--out", out, "--length", 300]
    options += [
        "--device",
        "cpu",
        *(option for assignment in SMALL_BLOCK_ASSIGNMENTS for option in ("--cab", assignment)),
    ]
    return main(["calibrate", *map(str, (*options, *more_options))])


def test_calibrate_writes_config_per_target_density(model_folder, book_file, tmp_path, capsys):
    out = tmp_path / "run"
    assert run_calibrate(model_folder, book_file, out, ["--target-densities", "0.6,0.9"]) == 0
    low_density_config, high_density_config = (
        CabConfig.calibrated(out / f"cab_config-{density}.json") for density in (0.6, 0.9)
    )
    assert (
        low_density_config.predictor == "rows"
        and 0 < high_density_config.mass_threshold < low_density_config.mass_threshold < 1
    )
    assert low_density_config.origin == Origin(
        model=Path(model_folder).name, layers=2, heads=6, kv_heads=2, length=300
    )
    assert (
        low_density_config.query_block == 16
        and low_density_config.min_length == CabConfig().min_length
    )
    assert (out / "figure.png").stat().st_size > 3_000
    # the printed densities, measured on the calibration text, reach the targets
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "config-" in line]
    assert [float(row[2]) for row in rows] == pytest.approx([0.6, 0.9], abs=0.1)
    # cab_hf.calibrate returns the same config as the command
    model, tokenizer = (
        auto_class.from_pretrained(model_folder)
        for auto_class in (AutoModelForCausalLM, AutoTokenizer)
    )
    calibrate_options = {"length": 300, "documents": 1, "config": low_density_config}
    assert (
        cab_hf.calibrate(model, tokenizer, book_file.read_text(), 0.6, **calibrate_options)
        == low_density_config
    )


@pytest.mark.parametrize("more_options", [(), ("--anchors", 1)], ids=["threshold", "anchors"])
def test_unreachable_density_is_refused_before_model_load(
    model_folder, book_file, tmp_path, capsys, monkeypatch, more_options
):
    monkeypatch.setattr("cab_hf.eval.calibrate.load_model", None)
    options = ("--target-densities", "0.9,0.1", *more_options)
    assert run_calibrate(model_folder, book_file, tmp_path / "run", options) == 2
    error = capsys.readouterr().err
    assert "target_densities: target_density must be at least 0." in error
    assert not (tmp_path / "run").exists()


def test_target_above_max_density_is_refused(model_folder, book_file, tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--target-densities", "0.6,0.9", "--cab", "max_density=0.7"]
    assert run_calibrate(model_folder, book_file, out, options) == 2
    error = capsys.readouterr().err
    assert "target_densities: target_density must be at most 0." in error and "got 0.9" in error
    assert not (tmp_path / "run").exists()


def test_calibrate_defaults_use_default_config_and_reachable_targets():
    settings = calibrate.Settings(model="tiny", device="cpu")
    require_reachable_target(settings.cab_config, min(settings.target_densities), settings.length)
    assert settings.cab_config == CabConfig()
    assert "small" not in calibrate.Settings.__dataclass_fields__["cab"].metadata["help"]


def test_calibrate_saves_anchors_and_head_map(model_folder, book_file, tmp_path, capsys):
    out, options = tmp_path / "run", ["--target-densities", "0.8", "--anchors"]
    assert run_calibrate(model_folder, book_file, out, [*options, 1]) == 0
    config = CabConfig.calibrated(out / "cab_config-0.8.json")
    assert (config.predictor, config.anchors, config.max_density) == ("cascade", (0,), 1.0)
    assert THRESHOLDS[-1] <= config.mass_threshold <= THRESHOLDS[0]
    assert config.head_map[0] == tuple(range(6)) and len(config.head_map) == 2
    # heads of the second layer use the blocks of heads of the first layer
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "config-" in line]
    assert float(rows[0][2]) == pytest.approx(0.8, abs=0.05) and 0.5 < float(rows[0][3]) < 0.95
    assert run_calibrate(model_folder, book_file, out, [*options, 2]) == 0
    assert CabConfig.calibrated(out / "cab_config-0.8.json").anchors == (0, 1)
    assert run_calibrate(model_folder, book_file, tmp_path / "too-many", [*options, 3]) == 2
    assert "anchors must be 1 to 2, the number of sparse layers, got 3" in capsys.readouterr().err
    assert not (tmp_path / "too-many").exists()


def test_layer_importance_is_one_minus_cosine(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad(), calibration_passes._measure_input_changes(model) as layer_changes:
        hidden_states = model(ids, output_hidden_states=True).hidden_states
    cosine = torch.cosine_similarity(hidden_states[0], hidden_states[1], dim=-1).mean()
    assert sorted(layer_changes) == [0, 1] and layer_changes[0] == pytest.approx(
        float(1 - cosine), abs=1e-6
    )
    # the hooks are removed
    layer_changes.clear()
    model(ids)
    assert not layer_changes
