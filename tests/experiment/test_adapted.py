"""Models of a base and an adapter in this package: merged once, identified by file content."""

import configparser
import json
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import SPARSE, tokens
from words import save_llama

import cab_hf
from cab_hf import CabConfig
from cab_hf.experiment import models
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.models import load_model, save_adapter, with_lora

NAME, LENGTH = "tiny-8k", 8192


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return (folder that contains a base and an adapter, logits of the base with the adapter)."""
    folder = tmp_path_factory.mktemp("trained")
    base = save_llama(folder / "base")
    model, tokenizer = load_model(
        str(base), cab_config=SPARSE, dtype="float32", length=LENGTH, rope="theta"
    )
    torch.manual_seed(1)
    adapted = with_lora(model, "all-linear", 4, 8.0, norms=True)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * (0.1 if "lora_" in name else 0.02))
    save_adapter(adapted, tokenizer, folder / "all-files")
    # copy only the files that the package contains
    (folder / NAME).mkdir()
    for file in models.ADAPTER_FILES:
        shutil.copy(folder / "all-files" / file, folder / NAME)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        return folder, adapted(tokens(2, 100)).logits


@pytest.fixture
def shipped(trained, tmp_path, monkeypatch):
    """Register a copy of the adapter as part of the package; return (its folder, cache folder)."""
    adapter = Path(shutil.copytree(trained[0] / NAME, tmp_path / NAME))
    monkeypatch.setitem(models.ADAPTER_FOLDERS, NAME, adapter)
    monkeypatch.setenv("CAB_HF_CACHE", str(tmp_path / "cache"))
    return adapter, tmp_path / "cache"


def compute_logits():
    model, _ = models.load_model(NAME, "cpu", "float32")
    with torch.no_grad():
        return model(tokens(2, 100)).logits


def test_merged_model_is_cached_and_equals_base_with_adapter(trained, shipped, monkeypatch):
    torch.testing.assert_close(compute_logits(), trained[1], atol=1e-4, rtol=1e-4)
    (folder,) = shipped[1].iterdir()
    assert folder.name == f"{NAME}-{models.content_sha256(NAME)[:12]}"
    assert {x.dtype for x in load_file(folder / "model.safetensors").values()} == {torch.float32}
    monkeypatch.setattr(models, "_merge_adapter", lambda *_: pytest.fail("it was merged again"))
    models.load_tokenizer(NAME)
    config = models.load_config(NAME)
    assert models.max_prompt_tokens(config) == config.max_position_embeddings == LENGTH
    assert models.is_local(NAME) and list(shipped[1].iterdir()) == [folder]


def rewrite_json(file, **fields):
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_load_model_uses_adapter_settings_unless_overridden(shipped):
    model, tokenizer = cab_hf.load_model(NAME, device="cpu")
    assert model.config._attn_implementation == "cab" and tokenizer.pad_token is not None
    assert model.config.cab_config == SPARSE.to_dict()
    config = CabConfig(mass_threshold=0.08)
    model, _ = cab_hf.load_model(NAME, device="cpu", cab_config=config)
    assert model.config.cab_config == config.to_dict()


@pytest.mark.parametrize("file", models.ADAPTER_FILES)
def test_missing_adapter_raises(shipped, file):
    (shipped[0] / file).unlink()
    message = f"model '{NAME}' needs an adapter, and its file {file} is missing .* Give smollm2"
    for use in (
        compute_logits,
        lambda: models.load_config(NAME),
        lambda: models.content_sha256(NAME),
    ):
        with pytest.raises(UsageError, match=message):
            use()
    assert not shipped[1].exists()


def test_failed_merge_leaves_no_files(shipped, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        with pytest.raises(
            UsageError, match=r"peft is not installed. Run `pip install 'cab_hf\[fine"
        ):
            compute_logits()
    rewrite_json(shipped[0] / "base.json", sha256="0" * 64)
    with pytest.raises(UsageError, match=f"'{NAME}' cannot be merged: adapter {NAME} was train"):
        compute_logits()
    assert list(shipped[1].iterdir()) == []


@pytest.mark.parametrize("load", ["config", "model"])
def test_adapter_folder_without_base_raises(trained, load):
    name = str(trained[0] / NAME)
    loads = {"config": models.load_config, "model": cab_hf.load_model}
    with pytest.raises(UsageError, match=rf"Merge it into its base .*merge {name} merged`"):
        loads[load](name)


def test_wheel_contains_adapters():
    parser = configparser.ConfigParser()
    parser.read(Path(__file__).parents[2] / "setup.cfg")
    patterns = parser["options.package_data"]["cab_hf"].split()
    for name in models.ADAPTER_FOLDERS:
        for file in models.ADAPTER_FILES:
            assert any(fnmatch(f"adapters/{name}/{file}", pattern) for pattern in patterns), file


@pytest.mark.parametrize("changed", ["nothing", "weights", "positions", "base"])
def test_identity_depends_on_base_and_adapter_content(trained, shipped, tmp_path, changed):
    base = Path(shutil.copytree(trained[0] / "base", tmp_path / "base"))
    rewrite_json(shipped[0] / models.ADAPTER_CONFIG, base_model_name_or_path=str(base))
    before = models.content_sha256(NAME)
    if changed == "weights":
        shutil.copy(base / "model.safetensors", shipped[0] / "adapter_model.safetensors")
    if changed == "positions":
        rewrite_json(shipped[0] / "base.json", max_position_embeddings=1)
    if changed == "base":
        rewrite_json(base / "config.json", rms_norm_eps=0.1)
    assert (models.content_sha256(NAME) == before) is (changed == "nothing")
