"""What users paste from the README runs, and the page stays a page."""

import re
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tokens
from transformers import AutoModelForCausalLM
from words import make_tokenizer

from cab_hf import CabConfig
from cab_hf.patches import calibration

PAGE = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A tiny model stands for whatever the README loads by name."""
    tiny_model(vocab_size=len(make_tokenizer())).save_pretrained(tmp_path)
    load = AutoModelForCausalLM.from_pretrained

    def loaded(name, **options):
        return load(tmp_path, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)


def test_the_python_of_the_readme_runs(hub, capsys, monkeypatch, tmp_path):
    inputs = {"input_ids": tokens(1, 150), "max_new_tokens": 2, "do_sample": False}
    monkeypatch.chdir(tmp_path)
    # many blocks in a short text
    small = CabConfig(query_block=16, key_block=16, min_length=0)
    monkeypatch.setattr(calibration, "settings", lambda _: small)
    monkeypatch.setattr(calibration, "LENGTH", 900)
    monkeypatch.setattr(calibration, "KEYS", 2)
    place = {"inputs": inputs, "tokenizer": make_tokenizer()}
    with torch.no_grad():
        for block in BLOCKS:
            exec(block, place)
    assert place["model"].config._attn_implementation == "cab"
    described = capsys.readouterr().out
    assert "layer 0: dense, in dense_layers" in described and "'density'" in described


def test_the_readme_is_for_the_first_five_minutes():
    assert len(PAGE.splitlines()) <= 145
    for path in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[1] / path).exists(), path
