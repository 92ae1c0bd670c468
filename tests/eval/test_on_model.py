"""What all commands on a model share: what they take CAB to be."""

from pathlib import Path

import pytest

from cab_hf import CabConfig
from cab_hf.eval import calibrate, fidelity, passkey
from cab_hf.eval.experiment import named
from cab_hf.eval.fidelity import Fidelity
from cab_hf.eval.on_model import SMALL
from cab_hf.runs.settings import read_settings


def chosen(command, *assignments):
    """The config that a command on a CPU gives the method cab."""
    settings = command.Settings(device="cpu", cab=assignments)
    return settings.cab_config if command is passkey else settings.configs["cab"]


@pytest.mark.parametrize("command", [passkey, fidelity], ids=lambda x: x.__name__)
def test_what_is_set_comes_in_the_place_of_small_blocks_in_every_comparison(command):
    """A predictor that is set need not read what small blocks set beside their sizes."""
    assert chosen(command) == CabConfig(min_length=0, **SMALL)
    assert chosen(command, "mass_threshold=0.08") == CabConfig(min_length=0, mass_threshold=0.08)
    random = CabConfig(min_length=0, predictor="random")
    assert chosen(command, "predictor=random") == random


def test_a_calibration_is_of_the_blocks_that_a_model_is_to_be_read_with():
    assert calibrate.Settings(device="cpu").cab_config == CabConfig()
    assert "small" not in calibrate.Settings.__dataclass_fields__["cab"].metadata["help"]


OF_TEXTS = [
    pytest.param("fidelity", "--texts a.txt,b.txt --lengths 400,900,1200", id="fidelity"),
    pytest.param("passkey", "--filler text --haystack a.txt --lengths 400,900,1200", id="passkey"),
]


@pytest.fixture
def opened(model_folder, tmp_path, monkeypatch):
    """(command, words) -> its experiment, where a.txt has 400 tokens and b.txt 1,200."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("So it goes. " * 100, "utf-8-sig")
    Path("b.txt").write_text("So it goes. " * 300)

    def opened(command, words):
        words = ["--model", str(model_folder), "--device", "cpu", *words.split()]
        kind = named(command)
        return kind(read_settings(kind.Settings, words, command, ""))

    return opened


@pytest.mark.parametrize(("command", "words"), OF_TEXTS)
def test_a_text_that_is_shorter_than_what_is_read_is_named(opened, command, words):
    made = opened(command, words).provenance("now")
    said = "a.txt has 400 tokens, so that texts of 900 and 1,200 tokens repeat it."
    assert made["repeated"] == [said]


@pytest.mark.parametrize(("command", "words"), OF_TEXTS)
def test_a_byte_order_mark_is_no_text(opened, command, words):
    assert set(opened(command, words).running()["a.txt"]) == {"So it goes."}


@pytest.mark.parametrize(
    ("folder", "name"), [("runs/mine/model", "mine"), ("runs/mine", "mine"), ("model", "here")]
)
def test_a_model_that_a_run_has_trained_is_called_as_the_run(folder, name, tmp_path, monkeypatch):
    (tmp_path / "here" / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Fidelity, "content", "its hash")
    (tmp_path / "here" / "a.txt").write_text("It was.")
    settings = fidelity.Settings(model=folder, device="cpu", texts=("a.txt",))
    assert Fidelity(settings).recorded()["model"] == name
