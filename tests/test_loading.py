"""Loading models by `cab_hf.load_model`, and passing cab_config to transformers."""

import json
import re
import shutil

import pytest
import torch
from call_cases import compute_logits
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import cab_hf
from cab_hf import CabConfig, checks
from cab_hf.experiment import models, offline_models


@pytest.fixture
def tiny_model_names(model_folder, tmp_path, monkeypatch):
    """Make the names of an embedded model and of a hub model load the tiny model.

    Returns:
        {element of `MODEL_NAMES`: name of the model, for `load_model`}.
    """
    monkeypatch.setenv("CAB_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(offline_models, "find_smollm2_gguf", lambda scratch: scratch / "model.gguf")
    monkeypatch.setattr(offline_models, "_check_gguf", lambda gguf: None)
    copy_tiny_model = lambda gguf, to: shutil.copytree(model_folder, to)  # noqa: E731
    monkeypatch.setattr(offline_models, "convert_gguf", copy_tiny_model)
    original_source = models._resolve_source
    hub_models = {"someone/tiny": str(model_folder)}
    monkeypatch.setattr(
        models, "_resolve_source", lambda name: hub_models.get(name) or original_source(name)
    )
    return {"folder": str(model_folder), "path": model_folder, "hub": "someone/tiny"}


MODEL_NAMES = ["tiny", "smollm2", "folder", "path", "hub"]


@pytest.mark.parametrize("model_name", MODEL_NAMES)
def test_load_model_returns_model_on_cab(tiny_model_names, model_name):
    model, tokenizer = cab_hf.load_model(tiny_model_names.get(model_name, model_name), device="cpu")
    assert model.config._attn_implementation == "cab" and not model.training
    assert (model.device.type, model.dtype) == ("cpu", torch.float32)
    assert cab_hf.describe(model, tokens=20000).splitlines()[1].startswith("  layers 0-1: sparse")
    assert tokenizer.pad_token is not None


@pytest.mark.parametrize("config_kind", ["config", "dict", "file"])
@pytest.mark.parametrize("model_name", MODEL_NAMES)
def test_settings_apply_to_hub_path_and_embedded_names(
    tiny_model_names, model_name, config_kind, tmp_path
):
    SPARSE_CONFIG.save(tmp_path / "own.json")
    config_by_kind = {
        "config": SPARSE_CONFIG,
        "dict": SPARSE_CONFIG.to_dict(),
        "file": str(tmp_path / "own.json"),
    }
    model, _ = cab_hf.load_model(
        tiny_model_names.get(model_name, model_name),
        device="cpu",
        cab_config=config_by_kind[config_kind],
    )
    assert model.config.cab_config == SPARSE_CONFIG.to_dict()
    ids = torch.randint(3, 50, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids)
    assert all(0 < layer_stats["density"] < 1 for layer_stats in cab_hf.stats(model))


@pytest.mark.parametrize(
    ("has_gpu", "load_arguments", "device", "dtype"),
    [
        pytest.param(True, {}, "cuda", torch.bfloat16, id="gpu"),
        pytest.param(False, {}, "cpu", torch.float32, id="no-gpu"),
        pytest.param(True, {"device": "cpu"}, "cpu", torch.float32, id="cpu-with-gpu"),
        pytest.param(True, {"device": "cuda:1"}, "cuda:1", torch.bfloat16, id="second-gpu"),
        pytest.param(False, {"dtype": "float16"}, "cpu", "float16", id="dtype-name"),
        pytest.param(False, {"dtype": torch.float16}, "cpu", torch.float16, id="dtype"),
    ],
)
def test_default_dtype_and_device_follow_the_machine(
    monkeypatch, has_gpu, load_arguments, device, dtype
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    load_calls, original_load_model = [], models.load_model

    def load_on_cpu(name, device, dtype, **options):
        load_calls.append((device, dtype))
        return original_load_model(name, "cpu", "float32", **options)

    monkeypatch.setattr(models, "load_model", load_on_cpu)
    cab_hf.load_model("tiny", **load_arguments)
    assert load_calls == [(device, dtype)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_dtype_accepts_dtype_or_name(dtype):
    assert cab_hf.load_model("tiny", device="cpu", dtype=dtype)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("load_arguments", "error_pattern"),
    [
        pytest.param({"dtype": "float13"}, "dtype must be a torch dtype", id="dtype"),
        pytest.param({"dtype": 16}, "dtype must be a torch dtype", id="dtype-kind"),
        pytest.param({"cab_config": 3}, "cab_config must be a dict .*, got 3", id="kind"),
        pytest.param({"cab_config": {"top_pp": 1}}, "CabConfig has no field 'top_pp'", id="field"),
        pytest.param({"cab_config": "none.json"}, "'none.json' is not a file", id="file"),
    ],
)
def test_invalid_arguments_raise_before_reading_files(load_arguments, error_pattern):
    with pytest.raises(ValueError, match=error_pattern):
        cab_hf.load_model("tiny", device="cpu", **load_arguments)


def _save_fields(folder, config_fields):
    """Save ``config_fields`` to a JSON file and return its path."""
    (folder / "own.json").write_text(json.dumps(config_fields))
    return folder / "own.json"


def _save_model(folder, config_fields):
    """Save a model to ``folder``, with ``config_fields`` as its cab_config; return the folder."""
    make_tiny_model().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "cab_config": config_fields}))
    return folder


def _save_and_load_model(folder, config_fields):
    """Save a model without cab_config, and load the model with ``config_fields`` as cab_config."""
    make_tiny_model().save_pretrained(folder)
    from_pretrained = AutoModelForCausalLM.from_pretrained
    return from_pretrained(folder, attn_implementation="cab", cab_config=config_fields)


@pytest.mark.parametrize(
    ("config_fields", "error_pattern"),
    [
        pytest.param(
            {"coarsen": "minmax", "top_p": 0.9},
            "CabConfig has no field 'coarsen' or 'top_p'; its fields are query_block, key_block",
            id="unknown-fields",
        ),
        pytest.param(
            {"predictor": "frc", "select": "topk"},
            "CabConfig has no field 'select'; its fields are query_block, key_block",
            id="next-to-a-predictor",
        ),
        pytest.param(
            {"predictor": "curvature"},
            "CabConfig.predictor must be one of ",
            id="unknown-predictor",
        ),
    ],
)
@pytest.mark.parametrize(
    "apply_fields",
    [
        pytest.param(lambda _, fields: cab_hf.apply_cab(make_tiny_model(), fields), id="dict"),
        pytest.param(
            lambda _, fields: cab_hf.apply_cab(make_tiny_model(), **fields), id="keywords"
        ),
        pytest.param(
            lambda folder, fields: cab_hf.apply_cab(
                make_tiny_model(), _save_fields(folder, fields)
            ),
            id="file",
        ),
        pytest.param(
            lambda folder, fields: _save_and_load_model(folder, fields), id="from_pretrained"
        ),
        pytest.param(
            lambda folder, fields: _save_and_load_model(folder, str(_save_fields(folder, fields))),
            id="from_pretrained-file",
        ),
        pytest.param(
            lambda folder, fields: AutoModelForCausalLM.from_pretrained(
                _save_model(folder, fields), attn_implementation="cab"
            ),
            id="saved-model",
        ),
        pytest.param(
            lambda folder, fields: cab_hf.apply_cab(
                AutoModelForCausalLM.from_pretrained(_save_model(folder, fields))
            ),
            id="saved-model-switched-later",
        ),
    ],
)
def test_unknown_fields_raise_at_every_entry_point(
    tmp_path, apply_fields, config_fields, error_pattern
):
    with pytest.raises(ValueError, match=re.escape(error_pattern)):
        apply_fields(tmp_path, config_fields)


def test_cab_model_shorter_than_min_length_warns(monkeypatch, recwarn):
    monkeypatch.setattr(checks, "_shown_warning_keys", set())
    cab_hf.load_model("tiny", device="cpu", attn_implementation="sdpa")
    assert not [warning for warning in recwarn if "positions" in str(warning.message)]
    cab_hf.load_model("tiny", device="cpu")
    (warning_text,) = [
        str(warning.message) for warning in recwarn if "positions" in str(warning.message)
    ]
    assert re.match(r"tiny-\w+ has 4,096 positions and min_length is 16,384", warning_text)
    cab_hf.load_model("tiny", device="cpu", cab_config=CabConfig(min_length=4096))


def test_loading_by_name_keeps_the_saved_config(tmp_path):
    model = cab_hf.apply_cab(make_tiny_model(), SPARSE_CONFIG)
    model.save_pretrained(tmp_path)
    loaded_model = type(model).from_pretrained(tmp_path, attn_implementation="cab")
    ids = draw_token_ids(1, 200)
    assert torch.equal(
        compute_logits(loaded_model, input_ids=ids), compute_logits(model, input_ids=ids)
    )
    assert cab_hf.stats(loaded_model) == cab_hf.stats(model)


@pytest.mark.parametrize(
    "cab_config", [SPARSE_CONFIG, SPARSE_CONFIG.to_dict()], ids=["CabConfig", "dict"]
)
def test_from_pretrained_accepts_cab_config(tmp_path, cab_config):
    model = make_tiny_model()
    model.save_pretrained(tmp_path)
    loaded_model = type(model).from_pretrained(
        tmp_path, attn_implementation="cab", cab_config=cab_config, dtype=torch.float32
    )
    ids = draw_token_ids(1, 200)
    expected = compute_logits(cab_hf.apply_cab(model, SPARSE_CONFIG), input_ids=ids)
    assert torch.equal(compute_logits(loaded_model, input_ids=ids), expected)
    loaded_model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config.cab_config == SPARSE_CONFIG.to_dict()


@pytest.mark.parametrize(
    "load_model",
    [
        pytest.param(
            lambda folder, config, **options: LlamaForCausalLM.from_pretrained(
                folder, config=config, **options
            ),
            id="class",
        ),
        pytest.param(
            lambda folder, config, **options: AutoModelForCausalLM.from_pretrained(
                pretrained_model_name_or_path=folder, config=config, **options
            ),
            id="auto",
        ),
        pytest.param(
            lambda folder, config, **options: AutoModelForCausalLM.from_config(config, **options),
            id="without-weights",
        ),
    ],
)
def test_from_pretrained_accepts_cab_config_with_config(tmp_path, load_model):
    make_tiny_model().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    model = load_model(tmp_path, config, attn_implementation="cab", cab_config=SPARSE_CONFIG)
    assert model.config.cab_config == SPARSE_CONFIG.to_dict() and config.cab_config is None
    with pytest.raises(ValueError, match=r"CabConfig\.mass_threshold must be .*, got 7"):
        load_model(tmp_path, config, attn_implementation="cab", cab_config={"mass_threshold": 7})
