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
README_TEXT = (ROOT / "README.md").read_text()
GUIDE_TEXT = (ROOT / "docs" / "guide.md").read_text()
README_CODE_BLOCKS = re.findall(r"```python\n(.*?)```", README_TEXT, re.DOTALL)
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
def hub_of_tiny_models(monkeypatch, tmp_path):
    """Make `from_pretrained` return a tiny model with max_position_embeddings 131,072."""
    model_folder = save_llama(tmp_path / "tiny")
    config = json.loads((model_folder / "config.json").read_text())
    config["max_position_embeddings"] = LLAMA_8B_CONFIG.max_position_embeddings
    (model_folder / "config.json").write_text(json.dumps(config))
    original_load = AutoModelForCausalLM.from_pretrained

    def load_tiny(model_name, **model_options):
        assert model_name in ("meta-llama/Llama-3.1-8B", str(model_folder))
        return original_load(model_folder, **model_options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_tiny)
    # `load_model` of the embedded model returns the tiny model, too
    monkeypatch.setattr(models, "make_model_folder", lambda name: model_folder)


def shrink_code_block(code_block):
    """Return a code block, changed to run on the CPU with a short prompt."""
    return code_block.replace('"cuda"', '"cpu"').replace("* 1150", "* 20")


def test_python_blocks_of_readme_run(hub_of_tiny_models, capsys):
    global_names, printed_texts = {}, []
    with torch.no_grad():
        for code_block in README_CODE_BLOCKS:
            exec(shrink_code_block(code_block), global_names)
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
    description = cab_hf.describe(model).replace("engine reference", "engine flex (FLASH)")
    assert f"```\n{description}\n```" in GUIDE_TEXT


def test_readme_models_load_without_hub():
    model_names = re.findall(r'load_model\("([^"]+)"\)', README_TEXT)
    assert model_names and all(models.is_built_in_model(model_name) for model_name in model_names)
    for model_name, adapter_folder in models.ADAPTER_FOLDER_BY_MODEL.items():
        base_config = json.loads((adapter_folder / "base.json").read_text())
        assert f"`{model_name}`" in README_TEXT
        assert f"{base_config['max_position_embeddings']:,}" in README_TEXT
        assert "cab_config" not in base_config, (
            "the model uses the default, not the settings of training"
        )


def test_readme_states_current_defaults():
    config = CabConfig()
    assert f"Below {config.min_length:,} tokens (`min_length`)" in README_TEXT
    assert f"queries are cut into blocks of {config.query_block} and keys into" in README_TEXT
    assert f"blocks of {config.key_block}." in README_TEXT
    for threshold in (config.mass_threshold, config.share_threshold):
        assert f"\\ge {threshold:g}".replace("0.", ".") in README_TEXT


def find_anchors(page_text):
    """Return the link targets (#...) that GitHub generates for the headings of a page."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page_text, flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "finetune" / "README.md"]
    + sorted((ROOT / "docs").glob("*.md")),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page_links_resolve(page):
    for link_path, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if link_path.startswith("https://"):
            continue
        linked_page = page.parent / link_path if link_path else page
        assert linked_page.exists(), link_path
        assert not anchor or anchor in find_anchors(linked_page.read_text()), (link_path, anchor)
