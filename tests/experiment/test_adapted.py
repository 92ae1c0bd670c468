"""Models that merge a base with an adapter of this package: merged once, identified by content."""

import configparser
import json
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import SPARSE_CONFIG, draw_token_ids
from words import save_llama

import cab_hf
from cab_hf import CabConfig
from cab_hf.experiment import models
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.models import load_model, save_adapter, with_lora

MODEL_NAME, MAX_POSITIONS = "tiny-8k", 8192


@pytest.fixture(scope="module")
def trained_adapter(tmp_path_factory):
    """Return (folder that contains a base and an adapter, logits of the base with the adapter)."""
    folder = tmp_path_factory.mktemp("trained")
    base_folder = save_llama(folder / "base")
    model, tokenizer = load_model(
        str(base_folder),
        cab_config=SPARSE_CONFIG,
        dtype="float32",
        length=MAX_POSITIONS,
        rope="theta",
    )
    torch.manual_seed(1)
    adapted_model = with_lora(model, "all-linear", 4, 8.0, trains_norms=True)
    with torch.no_grad():
        for parameter_name, parameter in adapted_model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(
                    torch.randn_like(parameter) * (0.1 if "lora_" in parameter_name else 0.02)
                )
    save_adapter(adapted_model, tokenizer, folder / "all-files")
    # copy only the files that the package contains
    (folder / MODEL_NAME).mkdir()
    for file_name in models.ADAPTER_FILES:
        shutil.copy(folder / "all-files" / file_name, folder / MODEL_NAME)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        return folder, adapted_model(draw_token_ids(2, 100)).logits


@pytest.fixture
def packaged_adapter(trained_adapter, tmp_path, monkeypatch):
    """Register a copy of the adapter as part of the package; return (its folder, cache folder)."""
    adapter_folder = Path(shutil.copytree(trained_adapter[0] / MODEL_NAME, tmp_path / MODEL_NAME))
    monkeypatch.setitem(models.ADAPTER_FOLDER_BY_MODEL, MODEL_NAME, adapter_folder)
    monkeypatch.setenv("CAB_HF_CACHE", str(tmp_path / "cache"))
    return adapter_folder, tmp_path / "cache"


def compute_logits():
    model, _ = models.load_model(MODEL_NAME, "cpu", "float32")
    with torch.no_grad():
        return model(draw_token_ids(2, 100)).logits


def test_merged_model_is_cached_and_equals_base_with_adapter(
    trained_adapter, packaged_adapter, monkeypatch
):
    torch.testing.assert_close(compute_logits(), trained_adapter[1], atol=1e-4, rtol=1e-4)
    (merged_folder,) = packaged_adapter[1].iterdir()
    assert merged_folder.name == f"{MODEL_NAME}-{models.content_sha256(MODEL_NAME)[:12]}"
    assert {weight.dtype for weight in load_file(merged_folder / "model.safetensors").values()} == {
        torch.float32
    }
    monkeypatch.setattr(models, "_merge_adapter", lambda *_: pytest.fail("it was merged again"))
    models.load_tokenizer(MODEL_NAME)
    config = models.load_config(MODEL_NAME)
    assert models.max_prompt_tokens(config) == config.max_position_embeddings == MAX_POSITIONS
    assert models.is_local_model(MODEL_NAME) and list(packaged_adapter[1].iterdir()) == [
        merged_folder
    ]


def rewrite_json(json_file, **fields):
    json_file.write_text(json.dumps({**json.loads(json_file.read_text()), **fields}))


def test_load_model_uses_adapter_settings_unless_overridden(packaged_adapter):
    model, tokenizer = cab_hf.load_model(MODEL_NAME, device="cpu")
    assert model.config._attn_implementation == "cab" and tokenizer.pad_token is not None
    assert model.config.cab_config == SPARSE_CONFIG.to_dict()
    config = CabConfig(mass_threshold=0.08)
    model, _ = cab_hf.load_model(MODEL_NAME, device="cpu", cab_config=config)
    assert model.config.cab_config == config.to_dict()


@pytest.mark.parametrize("file_name", models.ADAPTER_FILES)
def test_missing_adapter_raises(packaged_adapter, file_name):
    (packaged_adapter[0] / file_name).unlink()
    error_pattern = (
        f"model '{MODEL_NAME}' needs an adapter, and its file {file_name} is missing .* Give "
        "smollm2"
    )
    for use_model in (
        compute_logits,
        lambda: models.load_config(MODEL_NAME),
        lambda: models.content_sha256(MODEL_NAME),
    ):
        with pytest.raises(UsageError, match=error_pattern):
            use_model()
    assert not packaged_adapter[1].exists()


def test_failed_merge_leaves_no_files(packaged_adapter, monkeypatch):
    with monkeypatch.context() as patch_context:
        patch_context.setitem(sys.modules, "peft", None)
        with pytest.raises(
            UsageError, match=r"peft is not installed. Run `pip install 'cab_hf\[fine"
        ):
            compute_logits()
    rewrite_json(packaged_adapter[0] / "base.json", sha256="0" * 64)
    with pytest.raises(
        UsageError, match=f"'{MODEL_NAME}' cannot be merged: adapter {MODEL_NAME} was train"
    ):
        compute_logits()
    assert list(packaged_adapter[1].iterdir()) == []


@pytest.mark.parametrize("load_name", ["config", "model"])
def test_adapter_folder_without_base_raises(trained_adapter, load_name):
    adapter_path = str(trained_adapter[0] / MODEL_NAME)
    load_functions = {"config": models.load_config, "model": cab_hf.load_model}
    with pytest.raises(UsageError, match=rf"Merge it into its base .*merge {adapter_path} merged`"):
        load_functions[load_name](adapter_path)


def test_wheel_contains_adapters():
    setup_parser = configparser.ConfigParser()
    setup_parser.read(Path(__file__).parents[2] / "setup.cfg")
    file_patterns = setup_parser["options.package_data"]["cab_hf"].split()
    for model_name in models.ADAPTER_FOLDER_BY_MODEL:
        for file_name in models.ADAPTER_FILES:
            assert any(
                fnmatch(f"adapters/{model_name}/{file_name}", file_pattern)
                for file_pattern in file_patterns
            ), file_name


@pytest.mark.parametrize("changed_part", ["nothing", "weights", "positions", "base"])
def test_identity_depends_on_base_and_adapter_content(
    trained_adapter, packaged_adapter, tmp_path, changed_part
):
    base_folder = Path(shutil.copytree(trained_adapter[0] / "base", tmp_path / "base"))
    rewrite_json(
        packaged_adapter[0] / models.ADAPTER_CONFIG_FILE, base_model_name_or_path=str(base_folder)
    )
    hash_before = models.content_sha256(MODEL_NAME)
    if changed_part == "weights":
        shutil.copy(
            base_folder / "model.safetensors", packaged_adapter[0] / "adapter_model.safetensors"
        )
    if changed_part == "positions":
        rewrite_json(packaged_adapter[0] / "base.json", max_position_embeddings=1)
    if changed_part == "base":
        rewrite_json(base_folder / "config.json", rms_norm_eps=0.1)
    assert (models.content_sha256(MODEL_NAME) == hash_before) is (changed_part == "nothing")
