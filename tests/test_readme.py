"""The code in the README runs, its models exist, and links between documentation pages work."""

import json
import re
from pathlib import Path

import pytest
import torch
from marks import NEEDS_SERVING
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from words import save_llama

import cab_hf
from cab_hf import CabConfig
from cab_hf.experiment import models

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDE_PAGE = (ROOT / "docs" / "guide.md").read_text()
README_CODE_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
# config with the layers, heads and positions of Llama-3.1-8B, which the README loads
LLAMA_8B_CONFIG = LlamaConfig(
    vocab_size=8,
    hidden_size=4096,
    intermediate_size=8,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
)


@pytest.fixture
def tiny_hub(monkeypatch, tmp_path):
    """Make `from_pretrained` return a tiny model with max_position_embeddings 131,072."""
    folder = save_llama(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = LLAMA_8B_CONFIG.max_position_embeddings
    (folder / "config.json").write_text(json.dumps(config))
    original_load = AutoModelForCausalLM.from_pretrained

    def load_tiny(name, **options):
        assert name in ("meta-llama/Llama-3.1-8B", str(folder))
        return original_load(folder, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_tiny)
    # `load_model` of the embedded model returns the tiny model, too
    monkeypatch.setattr(models, "make_folder", lambda name: folder)


def shrink_code_block(block):
    """Return a code block, changed to run on the CPU with a short prompt."""
    return block.replace('"cuda"', '"cpu"').replace("* 1150", "* 20")


def test_python_blocks_of_readme_run(tiny_hub, capsys):
    global_names, printed_texts = {}, []
    with torch.no_grad():
        for block in README_CODE_BLOCKS:
            exec(shrink_code_block(block), global_names)
            printed_texts.append(capsys.readouterr().out)
    assert global_names["output"].shape[1] > global_names["inputs"].input_ids.shape[1] > 200
    assert "'density'" in printed_texts[0]
    assert (
        "a prompt of 131072 tokens" in printed_texts[1]
        and "  layers 0-1: sparse" in printed_texts[1]
    )
    model = global_names["model"]
    assert model.config._attn_implementation == "cab"
    assert cab_hf.CabConfig.from_dict(model.config.cab_config) == cab_hf.CabConfig.published()


@NEEDS_SERVING
def test_guide_shows_current_output_of_describe():
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA_8B_CONFIG).eval()
    model.set_attn_implementation("cab")
    text = cab_hf.describe(model).replace("engine reference", "engine flex (FLASH)")
    assert f"```\n{text}\n```" in GUIDE_PAGE


def test_readme_models_load_without_hub():
    names = re.findall(r'load_model\("([^"]+)"\)', README)
    assert names and all(models.is_built_in(name) for name in names)
    for name, folder in models.ADAPTER_FOLDERS.items():
        base_config = json.loads((folder / "base.json").read_text())
        assert f"`{name}`" in README
        assert f"{base_config['max_position_embeddings']:,}" in README
        assert "cab_config" not in base_config, (
            "the model uses the default, not the settings of training"
        )


def test_readme_states_current_defaults():
    config = CabConfig()
    assert f"Below {config.min_length:,} tokens (`min_length`)" in README
    assert f"queries are cut into blocks of {config.query_block} and keys into" in README
    assert f"blocks of {config.key_block}." in README
    for threshold in (config.mass_threshold, config.share_threshold):
        assert f"\\ge {threshold:g}".replace("0.", ".") in README


def find_anchors(page):
    """Return the link targets (#...) that GitHub generates for the headings of a page."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "finetune" / "README.md"]
    + sorted((ROOT / "docs").glob("*.md")),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page_links_resolve(page):
    for path, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if path.startswith("https://"):
            continue
        linked_page = page.parent / path if path else page
        assert linked_page.exists(), path
        assert not anchor or anchor in find_anchors(linked_page.read_text()), (path, anchor)
