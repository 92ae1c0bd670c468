"""What users paste from the README runs, and the page stays a page."""

import json
import re
from pathlib import Path

import pytest
import torch
from marks import SERVING
from tiny import tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from words import save_llama

import cab_hf
from cab_hf import CabConfig
from cab_hf.patches import calibration as passes
from cab_hf.runs import models

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


# what the first block loads, with as many layers and heads
LLAMA = LlamaConfig(
    vocab_size=8,
    hidden_size=4096,
    intermediate_size=8,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A tiny model of as many positions stands for whatever the README loads by name."""
    folder = save_llama(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = LLAMA.max_position_embeddings
    (folder / "config.json").write_text(json.dumps(config))
    load = AutoModelForCausalLM.from_pretrained

    def loaded(name, **options):
        assert name in ("meta-llama/Llama-3.1-8B", str(folder))
        return load(folder, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    # of the embedded model as well
    monkeypatch.setattr(models, "made_folder", lambda name: folder)


def on_this_machine(block):
    """The same block without a GPU, and with a text that a tiny model soon has read."""
    return block.replace('"cuda"', '"cpu"').replace("* 1150", "* 20")


def test_the_python_of_the_readme_runs(hub, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # many blocks in a short text
    small = CabConfig(query_block=16, key_block=16, min_length=0, share_threshold=1.0)
    monkeypatch.setattr(passes, "cab_config_of", lambda _: small)
    monkeypatch.setattr(passes, "LENGTH", 900)
    monkeypatch.setattr(passes, "KEYS", 2)
    place, printed = {}, []
    with torch.no_grad():
        for block in BLOCKS:
            exec(on_this_machine(block), place)
            printed.append(capsys.readouterr().out)
    model = place["model"]
    assert model.config._attn_implementation == "cab"
    # the first thing that is seen is that it is on, and the layer that was left out later is not
    assert "a prompt of 131072 tokens" in printed[0] and "  layers 0-1: sparse" in printed[0]
    assert "layer 0: dense, in dense_layers" in printed[2] and "'density'" in printed[2]
    assert place["output"].shape[1] > place["inputs"].input_ids.shape[1] > 200
    fresh = tiny_model(num_hidden_layers=2)
    assert cab_hf.apply_cab(fresh, "budgets.json").config.cab_config == place["config"].to_dict()


@SERVING
def test_the_readme_shows_what_describe_says():
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA).eval()
    model.set_attn_implementation("cab")
    says = cab_hf.describe(model).replace("engine reference", "engine flex (FLASH)")
    assert f"```\n{says}\n```" in PAGE


def test_the_readme_says_what_a_server_gained():
    results = ROOT / "eval" / "results" / "speed-serve-vllm" / "results.json"
    (row,) = (x for x in json.loads(results.read_text())["rows"] if x["implementation"] == "cab")
    assert f"in vLLM ({row['over_best']:.2f} × its own speed)" in PAGE


def test_the_readme_knows_the_models_that_need_no_hub():
    names = re.findall(r'load_model\("([^"]+)"\)', PAGE)
    assert names and all(models.is_made(name) for name in names)
    for name, folder in models.ADAPTED.items():
        base = json.loads((folder / "base.json").read_text())
        assert f"`{name}`" in PAGE
        assert f"{base['max_position_embeddings']:,} positions" in PAGE
        assert "cab_config" not in base, "it attends by the default, whatever it was trained with"
    assert f"sparse from {CabConfig().min_length:,} tokens on (`min_length`" in PAGE


def test_the_readme_is_for_the_first_five_minutes():
    assert len(PAGE.splitlines()) <= 150


def test_links_of_the_pages_lead_somewhere():
    pages = (ROOT / "README.md", ROOT / "finetune" / "README.md", *(ROOT / "docs").glob("*.md"))
    for page in pages:
        for path in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert path.startswith("https://") or (page.parent / path).exists(), (page, path)
