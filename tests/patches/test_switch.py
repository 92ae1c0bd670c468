"""`apply_cab`, `remove_cab` and `cab` set and restore model configs, and reject settings."""

import copy
import dataclasses
import io
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tiny import FULL_BUDGET_CONFIG, MODEL_SIZES, SPARSE_CONFIG, draw_token_ids, make_tiny_model
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from words import make_tokenizer

import cab_hf
from cab_hf import CabConfig
from cab_hf.config import Origin
from cab_hf.hf import model_config
from cab_hf.patches import calibration

# state of a new model, to which `apply_cab` was not applied
STATE_WITHOUT_CAB = ("sdpa", None)
# a predictor whose field sparsity may be a table with a number for each head
FRC_PREDICTOR_SETTINGS = {"predictor": "frc"}
# `Origin` of a calibration for a model with the shape of `make_tiny_model`
CALIBRATION_ORIGIN = Origin("somebody's", layers=3, heads=6, kv_heads=2, length=4096)


@pytest.fixture
def model():
    return make_tiny_model()


def read_cab_state(model):
    """Return (attention implementation, settings of CAB or None)."""
    return model.config._attn_implementation, getattr(model.config, "cab_config", None)


def test_apply_cab_is_idempotent_and_remove_cab_restores_settings(model):
    assert cab_hf.apply_cab(model, SPARSE_CONFIG) is model
    cab_hf.apply_cab(model, mass_threshold=0.05)
    assert model.config.cab_config["mass_threshold"] == 0.05
    assert model.config.cab_config["key_block"] == SPARSE_CONFIG.key_block
    for _ in range(2):
        assert cab_hf.remove_cab(model) is model and read_cab_state(model) == STATE_WITHOUT_CAB


def pickle_and_load(model):
    pickle_buffer = io.BytesIO()
    torch.save(model, pickle_buffer)
    pickle_buffer.seek(0)
    return torch.load(pickle_buffer, weights_only=False)


def add_lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))


def apply_sparse_cab(model):
    return cab_hf.apply_cab(model, SPARSE_CONFIG)


DERIVE_FUNCTIONS = {
    "copy": lambda m: copy.deepcopy(apply_sparse_cab(m)),
    "pickle": lambda m: pickle_and_load(apply_sparse_cab(m)),
    "copy-adapter": lambda m: copy.deepcopy(add_lora(apply_sparse_cab(m))),
    "merged": lambda m: add_lora(apply_sparse_cab(m)).merge_and_unload(),
    "adapter-merged": lambda m: apply_sparse_cab(add_lora(m)).merge_and_unload(),
    "inside": lambda m: apply_sparse_cab(add_lora(m)).get_base_model(),
    "compiled": lambda m: torch.compile(apply_sparse_cab(m)),
}


@pytest.mark.parametrize("derive_model", DERIVE_FUNCTIONS.values(), ids=DERIVE_FUNCTIONS)
def test_remove_cab_restores_state_after_pickle_and_copy(model, derive_model):
    derived_model = derive_model(model)
    assert read_cab_state(derived_model)[0] == "cab"
    assert "layers 0-2: sparse" in cab_hf.describe(derived_model, tokens=200)
    assert [row["layer"] for row in cab_hf.stats(derived_model)] == [0, 1, 2]
    assert read_cab_state(cab_hf.remove_cab(derived_model)) == STATE_WITHOUT_CAB


def test_switching_a_copy_does_not_change_the_original(model):
    apply_sparse_cab(model)
    with cab_hf.cab(model, mass_threshold=0.05):
        copied_model = copy.deepcopy(model)
    assert read_cab_state(cab_hf.remove_cab(model)) == STATE_WITHOUT_CAB
    assert read_cab_state(copied_model)[1]["mass_threshold"] == 0.05
    assert read_cab_state(cab_hf.remove_cab(copied_model)) == STATE_WITHOUT_CAB


def test_saved_config_differs_by_cab_config_only(model, tmp_path):
    fields_before = model.config.to_dict()
    loaded_model = save_and_load(apply_sparse_cab(model), tmp_path)
    assert loaded_model.config.to_dict().keys() == fields_before.keys() | {
        "cab_config",
        "architectures",
    }
    state_before = read_cab_state(loaded_model)
    assert state_before[0] == "sdpa" and CabConfig.from_dict(state_before[1]) == SPARSE_CONFIG
    # apply_cab was not called on the loaded model, so remove_cab keeps the saved settings
    assert read_cab_state(cab_hf.remove_cab(loaded_model)) == state_before
    assert (
        read_cab_state(cab_hf.remove_cab(cab_hf.apply_cab(loaded_model, mass_threshold=0.08)))
        == state_before
    )


def switch_by_transformers(model):
    cab_hf.apply_cab(model, FULL_BUDGET_CONFIG)
    model.config.cab_config = SPARSE_CONFIG.to_dict()
    model.set_attn_implementation("cab_dense")


PREPARE_FUNCTIONS = {
    "plain": lambda model: None,
    "applied": lambda model: cab_hf.apply_cab(model, FULL_BUDGET_CONFIG),
    "by-hand": switch_by_transformers,
}
parametrize_preparations = pytest.mark.parametrize(
    "prepare_model", PREPARE_FUNCTIONS.values(), ids=PREPARE_FUNCTIONS
)


@parametrize_preparations
@pytest.mark.parametrize("first_ending_block", [0, 1, 2])
def test_cab_blocks_can_end_in_any_order(model, first_ending_block, prepare_model):
    prepare_model(model)
    state_before = read_cab_state(model)
    cab_blocks = [cab_hf.cab(model, mass_threshold=threshold) for threshold in (0.5, 0.6, 0.7)]
    for cab_block in cab_blocks:
        cab_block.__enter__()
    cab_blocks.pop(first_ending_block).__exit__(None, None, None)
    # the settings of the innermost ``with`` block that is still open apply
    assert read_cab_state(model)[1]["mass_threshold"] == (0.6 if first_ending_block == 2 else 0.7)
    for cab_block in cab_blocks:
        cab_block.__exit__(None, None, None)
    assert read_cab_state(model) == state_before
    assert read_cab_state(cab_hf.remove_cab(model)) == STATE_WITHOUT_CAB


def raise_runtime_error(model):
    raise RuntimeError("from inside")


ACTIONS_INSIDE_BLOCK = {
    "nothing": lambda model: None,
    "remove": lambda model: read_cab_state(cab_hf.remove_cab(model)) == STATE_WITHOUT_CAB or 1 / 0,
    "apply": lambda model: cab_hf.apply_cab(model, mass_threshold=0.08),
    "again": lambda model: cab_hf.apply_cab(cab_hf.remove_cab(model), mass_threshold=0.08),
    "eager": lambda model: model.set_attn_implementation("eager"),
    "error": raise_runtime_error,
}


@parametrize_preparations
@pytest.mark.parametrize(
    "act_inside_block", ACTIONS_INSIDE_BLOCK.values(), ids=ACTIONS_INSIDE_BLOCK
)
def test_cab_block_restores_state_after_exceptions(model, act_inside_block, prepare_model):
    prepare_model(model)
    state_before = read_cab_state(model)
    expectation = (
        pytest.raises(RuntimeError, match="from inside")
        if act_inside_block is raise_runtime_error
        else nullcontext()
    )
    with expectation, cab_hf.cab(model, mass_threshold=0.08):
        assert (
            read_cab_state(model)[0] == "cab" and read_cab_state(model)[1]["mass_threshold"] == 0.08
        )
        act_inside_block(model)
    assert read_cab_state(model) == state_before
    assert read_cab_state(cab_hf.remove_cab(model)) == STATE_WITHOUT_CAB


def make_tiny_llava(**implementations):
    vision_sizes = {"hidden_size": 32, "intermediate_size": 32, "projection_dim": 16}
    vision_sizes |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision_sizes),
        text_config=LlamaConfig(**MODEL_SIZES),
        image_token_index=5,
        attn_implementation=implementations or None,
    )
    return LlavaForConditionalGeneration(config).eval()


def read_implementations(model):
    """Return attention implementations by part: "" (the model), "v" (vision) and "t" (text)."""
    configs = {"": model.config, "v": model.config.vision_config, "t": model.config.text_config}
    return {part_name: config._attn_implementation for part_name, config in configs.items()}


IMPLEMENTATION_CASES = {
    "default": {},
    "vision": {"vision_config": "eager"},
    "text": {"text_config": "eager"},
    "others": {"": "eager", "text_config": "sdpa"},
}


@pytest.mark.parametrize("implementations", IMPLEMENTATION_CASES.values(), ids=IMPLEMENTATION_CASES)
def test_apply_cab_switches_language_model_only(implementations):
    model = make_tiny_llava(**implementations)
    implementations_before = read_implementations(model)
    input_ids = draw_token_ids(1, 150).clamp(min=6)
    input_ids[:, 3:7] = 5
    pixel_values = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=input_ids, pixel_values=pixel_values).logits
        cab_hf.apply_cab(model, FULL_BUDGET_CONFIG)
        assert read_implementations(model) == implementations_before | {"t": "cab"}
        actual = model(input_ids=input_ids, pixel_values=pixel_values).logits
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    assert [row["density"] for row in cab_hf.stats(model)] == [1.0, 1.0, 1.0]
    cab_hf.remove_cab(model)
    assert read_implementations(model) == implementations_before
    with cab_hf.cab(model, FULL_BUDGET_CONFIG):
        assert read_implementations(model) == implementations_before | {"t": "cab"}
    assert read_implementations(model) == implementations_before


@pytest.mark.parametrize("implementations", [{}, {"text_config": "cab"}], ids=["sdpa", "text-cab"])
def test_calibrate_uses_language_model_only(implementations, monkeypatch):
    monkeypatch.setattr(calibration, "KEYS_PER_DOCUMENT", 2)
    model = make_tiny_llava(**implementations)
    model.resize_token_embeddings(400)
    fitted_config = cab_hf.calibrate(
        model, make_tokenizer(), "So it goes.", 0.7, config=SPARSE_CONFIG, length=300, documents=1
    )
    assert read_implementations(model) == {"": "sdpa", "v": "sdpa", "t": "cab"}
    assert model.config.text_config.cab_config == fitted_config.to_dict()
    assert model.config.cab_config is model.config.vision_config.cab_config is None


def test_models_with_shared_config_are_switched_separately():
    config = LlamaConfig(**MODEL_SIZES)
    first_model, second_model = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    input_ids = draw_token_ids(1, 200)
    with torch.no_grad():
        expected = second_model(input_ids).logits
        apply_sparse_cab(first_model)
        assert (
            read_cab_state(second_model) == STATE_WITHOUT_CAB == (config._attn_implementation, None)
        )
        assert torch.equal(second_model(input_ids).logits, expected)
        cab_hf.apply_cab(second_model, FULL_BUDGET_CONFIG)
        assert read_cab_state(first_model)[1]["mass_threshold"] == SPARSE_CONFIG.mass_threshold
        cab_hf.remove_cab(first_model)
        assert (
            read_cab_state(second_model)[1]["mass_threshold"] == FULL_BUDGET_CONFIG.mass_threshold
        )
    with cab_hf.cab(second_model, mass_threshold=0.08):
        model_built_in_block = LlamaForCausalLM(second_model.config)
    cab_hf.remove_cab(second_model)
    assert read_cab_state(model_built_in_block)[1]["mass_threshold"] == 0.08


def make_model_without_attention_interface():
    config_fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return FalconForCausalLM(FalconConfig(**config_fields))


@pytest.mark.parametrize(
    ("make_model", "cab_settings", "error_pattern"),
    [
        pytest.param(lambda: torch.nn.Linear(2, 2), {}, "transformers, got Linear", id="no-model"),
        pytest.param(
            make_model_without_attention_interface,
            {},
            "keeps attn_implementation='sdpa'",
            id="falcon",
        ),
        pytest.param(make_tiny_model, {"mass_threshold": 7}, "mass_threshold", id="setting"),
        pytest.param(
            make_tiny_llava,
            FRC_PREDICTOR_SETTINGS | {"sparsity": [[0.5] * 5] * 3},
            "sparsity",
            id="table",
        ),
    ],
)
def test_apply_cab_to_unsupported_model_raises_and_restores(
    make_model, cab_settings, error_pattern
):
    model = make_model()
    config_before = copy.deepcopy(getattr(model, "config", None))
    with pytest.raises(ValueError, match=error_pattern):
        cab_hf.apply_cab(model, **cab_settings)
    with pytest.raises(ValueError, match=error_pattern), cab_hf.cab(model, **cab_settings):
        pass
    assert getattr(model, "config", None) == config_before
    assert cab_hf.remove_cab(model) is model and getattr(model, "config", None) == config_before


@pytest.mark.parametrize("invalid_model", [None, "meta-llama/Llama-3.1-8B"], ids=["none", "name"])
@pytest.mark.parametrize(
    "function_name", ["apply_cab", "describe", "stats", "index_cache", "remove_cab", "calibrate"]
)
def test_public_functions_raise_for_objects_that_are_no_models(function_name, invalid_model):
    required_arguments = {"tokenizer": "a tokenizer"} if function_name == "calibrate" else {}
    with pytest.raises(ValueError, match="^model (is|must be) "):
        getattr(cab_hf, function_name)(invalid_model, **required_arguments)


@pytest.mark.parametrize("settings_type", [dict, str, Path])
def test_apply_cab_accepts_dict_or_file(model, tmp_path, settings_type):
    config = dataclasses.replace(SPARSE_CONFIG, dense_layers=(1,))
    config.save(tmp_path / "own.json")
    settings = config.to_dict() if settings_type is dict else settings_type(tmp_path / "own.json")
    with cab_hf.cab(model, settings, mass_threshold=0.05):
        assert read_cab_state(model) == (
            "cab",
            dataclasses.replace(config, mass_threshold=0.05).to_dict(),
        )
    cab_hf.apply_cab(model, settings)
    assert read_cab_state(model) == ("cab", config.to_dict())
    # the config of a saved model contains the settings, not the path of the file
    reloaded_model = save_and_load(
        make_tiny_model(), tmp_path / "model", attn_implementation="cab", cab_config=settings
    )
    assert read_cab_state(reloaded_model) == ("cab", config.to_dict())
    # fields that a dict leaves out are reset to their defaults
    cab_hf.apply_cab(model, {"mass_threshold": 0.08})
    assert read_cab_state(model)[1] == CabConfig(mass_threshold=0.08).to_dict()


def save_and_load(model, folder, **load_options):
    """Save a model to ``folder``, and return the model that ``from_pretrained`` loads from it."""
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **load_options)


# settings for 30 layers; `make_tiny_model` has 3
SETTINGS_OF_30_LAYERS = FRC_PREDICTOR_SETTINGS | {"sparsity": [[0.5] * 6] * 30}
HEAD_MAP_OF_9_HEADS = {"predictor": "cascade", "anchors": [0], "head_map": [[0] * 9] * 3}
SHAPE_ERROR_PATTERN = (
    r"for somebody's \(4 layers, 6 heads, 2 KV heads\), and \w+ has 3 layers, 6 heads, 2 KV"
)
# (settings that do not fit `make_tiny_model`, part of the error message)
MISFITTING_SETTINGS = {
    "layers": (SETTINGS_OF_30_LAYERS, "sparsity has 30 layers of 6 heads, and this model has 3"),
    "fewer-layers": (
        FRC_PREDICTOR_SETTINGS | {"sparsity": [[0.1] * 6] * 2},
        "sparsity has 2 layers of 6 heads",
    ),
    "heads": (
        FRC_PREDICTOR_SETTINGS | {"sparsity": [[0.5] * 9] * 3},
        "9 heads, and this model has 3 layers of 6",
    ),
    "map": (HEAD_MAP_OF_9_HEADS, "head_map has 3 layers of 9 heads"),
    "dense": ({"dense_layers": [3]}, "dense_layers has 3; this model has layers 0 to 2"),
    "origin-layers": (
        {"origin": CALIBRATION_ORIGIN._replace(layers=4)._asdict()},
        SHAPE_ERROR_PATTERN,
    ),
    "origin-heads": (
        {"origin": CALIBRATION_ORIGIN._replace(kv_heads=6)._asdict()},
        "3 layers, 6 heads, 6 KV",
    ),
    "field": ({"mass_treshold": 0.5}, "CabConfig has no field 'mass_treshold'"),
    "kind": ({"mass_threshold": "much"}, "CabConfig.mass_threshold must be .*, got 'much'"),
    "predictor": ({"predictor": "row"}, "predictor"),
}


def pass_settings_to_model(model, folder, settings, entry_point):
    """Pass ``settings`` to a model by an entry point.

    Args:
        model: the model.
        folder: empty folder, for the entry point "load".
        settings: the settings.
        entry_point: "apply", "block", "load", or any other word for an assignment to the config.
    """
    if entry_point == "apply":
        cab_hf.apply_cab(model, settings)
    elif entry_point == "block":
        with cab_hf.cab(model, settings):
            pass
    elif entry_point == "load":
        save_and_load(model, folder, attn_implementation="cab", cab_config=settings)
    else:
        model.config.cab_config = settings
        if entry_point == "save":
            save_and_load(model, folder, attn_implementation="cab")
        elif entry_point == "build":
            model.config._attn_implementation = "cab"
            type(model)(model.config)
        else:
            model.set_attn_implementation("cab")


@pytest.mark.parametrize("entry_point", ["apply", "block", "load", "save", "build", "switch"])
@pytest.mark.parametrize(
    ("settings", "error_pattern"), MISFITTING_SETTINGS.values(), ids=MISFITTING_SETTINGS
)
def test_settings_of_another_model_raise_at_every_entry_point(
    model, tmp_path, entry_point, settings, error_pattern
):
    with pytest.raises(ValueError, match=error_pattern):
        pass_settings_to_model(model, tmp_path, settings, entry_point)


def test_assigning_settings_of_another_model_raises(model):
    cab_hf.apply_cab(model, SPARSE_CONFIG)
    for settings, error_pattern in MISFITTING_SETTINGS.values():
        with pytest.raises(ValueError, match=error_pattern):
            model.config.cab_config = settings
    assert model.config.cab_config == SPARSE_CONFIG.to_dict()
    # settings are checked with "cab" only: a model with "sdpa" does not use settings
    cab_hf.remove_cab(model)
    model.config.cab_config = SETTINGS_OF_30_LAYERS


@pytest.mark.parametrize("use_model", [cab_hf.describe, lambda model: model(draw_token_ids(1, 40))])
def test_calibration_of_another_model_raises_at_forward(model, use_model):
    cab_hf.apply_cab(model, SPARSE_CONFIG)
    model = copy.deepcopy(model)
    model.config.cab_config["origin"] = CALIBRATION_ORIGIN._replace(layers=4)._asdict()
    with pytest.raises(ValueError, match="was calibrated for somebody's"):
        use_model(model)


def test_settings_are_compared_once_per_model(model, monkeypatch):
    compared_settings = []
    monkeypatch.setattr(
        model_config, "require_layers", lambda *args: compared_settings.append(args)
    )
    cab_hf.apply_cab(model, SPARSE_CONFIG, dense_layers=(2,))
    compared_settings.clear()
    for _ in range(3):
        model(draw_token_ids(1, 40))
    assert not compared_settings
    # after a change of the model config, settings are compared with the model again
    model.config.num_hidden_layers = 2
    model(draw_token_ids(1, 40))
    assert len(compared_settings) == 1


def test_rejected_settings_can_be_replaced(model):
    model.config.cab_config = SETTINGS_OF_30_LAYERS
    assert read_cab_state(apply_sparse_cab(model)) == ("cab", SPARSE_CONFIG.to_dict())
    assert read_cab_state(cab_hf.remove_cab(model)) == ("sdpa", SETTINGS_OF_30_LAYERS)


@pytest.mark.parametrize("missing_field", ["layers", "heads", "kv_heads"])
def test_fields_missing_from_calibration_are_not_compared(model, missing_field):
    cab_hf.apply_cab(
        model, SPARSE_CONFIG, origin=CALIBRATION_ORIGIN._replace(**{missing_field: None})
    )


def compute_loss(model, has_padding=False):
    input_ids = draw_token_ids(1, 160)
    mask_arguments = {"attention_mask": (torch.arange(160) > 4)[None].long()} if has_padding else {}
    return model(input_ids=input_ids, labels=input_ids, use_cache=False, **mask_arguments).loss


def compute_gradient(loss, model):
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return gradient


def compute_loss_inside_block(model, has_padding):
    """Compute a loss inside a ``with cab(...)`` block, and return the loss after the block."""
    with cab_hf.cab(model, SPARSE_CONFIG):
        return compute_loss(model, has_padding)


def compute_loss_before_remove_cab(model, has_padding):
    loss = compute_loss(apply_sparse_cab(model), has_padding)
    cab_hf.remove_cab(model)
    return loss


def compute_loss_before_apply_cab(model, has_padding):
    loss = compute_loss(model, has_padding)
    cab_hf.apply_cab(model, SPARSE_CONFIG)
    return loss


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    "compute_loss_before_switch",
    [compute_loss_inside_block, compute_loss_before_remove_cab, compute_loss_before_apply_cab],
)
@pytest.mark.parametrize(
    ("implementation", "has_padding"),
    [("sdpa", False), ("sdpa", True), ("eager", False), ("cab", False), ("cab_dense", False)],
)
def test_recompute_with_other_settings_raises(
    implementation, has_padding, compute_loss_before_switch, use_reentrant
):
    model = make_tiny_model(attn_implementation=implementation, num_hidden_layers=2).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    with cab_hf.cab(model, SPARSE_CONFIG):
        # run forward and backward inside the block; the next step must not depend on this step
        expected = compute_gradient(compute_loss(model, has_padding), model)
    loss = compute_loss_before_switch(model, has_padding)
    with pytest.raises(RuntimeError, match="was left or entered in between"):
        loss.backward()
    model.zero_grad()
    # the error has left no state: a step under unchanged settings succeeds
    loss = compute_loss(apply_sparse_cab(model), has_padding)
    assert torch.equal(compute_gradient(loss, apply_sparse_cab(model)), expected)


def test_backward_after_cab_block_works_without_checkpointing(model):
    with cab_hf.cab(model, SPARSE_CONFIG):
        expected = compute_gradient(compute_loss(model), model)
    loss = compute_loss_inside_block(model, has_padding=False)
    assert torch.equal(compute_gradient(loss, model), expected)
