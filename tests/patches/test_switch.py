"""`apply_cab`, `remove_cab` and `cab` set and restore model configs, and reject settings."""

import copy
import dataclasses
import io
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tiny import FULL, SIZES, SPARSE, tiny_model, tokens
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

# `state` of a new model, to which `apply_cab` was not applied
PLAIN = ("sdpa", None)
# a predictor whose field sparsity may be a table with a number for each head
BY_HEAD = {"predictor": "frc"}
# `Origin` of a calibration for a model with the shape of `tiny_model`
ORIGIN = Origin("somebody's", layers=3, heads=6, kv_heads=2, length=4096)


@pytest.fixture
def model():
    return tiny_model()


def state(model):
    """Return (attention implementation, settings of CAB or None)."""
    return model.config._attn_implementation, getattr(model.config, "cab_config", None)


def test_apply_is_idempotent_and_remove_restores(model):
    assert cab_hf.apply_cab(model, SPARSE) is model
    cab_hf.apply_cab(model, mass_threshold=0.05)
    assert model.config.cab_config["mass_threshold"] == 0.05
    assert model.config.cab_config["key_block"] == SPARSE.key_block
    for _ in range(2):
        assert cab_hf.remove_cab(model) is model and state(model) == PLAIN


def through_pickle(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def in_lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))


def applied(model):
    return cab_hf.apply_cab(model, SPARSE)


MOVED = {
    "copy": lambda m: copy.deepcopy(applied(m)),
    "pickle": lambda m: through_pickle(applied(m)),
    "copy-adapter": lambda m: copy.deepcopy(in_lora(applied(m))),
    "merged": lambda m: in_lora(applied(m)).merge_and_unload(),
    "adapter-merged": lambda m: applied(in_lora(m)).merge_and_unload(),
    "inside": lambda m: applied(in_lora(m)).get_base_model(),
    "compiled": lambda m: torch.compile(applied(m)),
}


@pytest.mark.parametrize("move", MOVED.values(), ids=MOVED)
def test_remove_cab_restores_state_after_pickle_and_copy(model, move):
    moved = move(model)
    assert state(moved)[0] == "cab"
    assert "layers 0-2: sparse" in cab_hf.describe(moved, tokens=200)
    assert [row["layer"] for row in cab_hf.stats(moved)] == [0, 1, 2]
    assert state(cab_hf.remove_cab(moved)) == PLAIN


def test_switching_a_copy_leaves_the_original(model):
    applied(model)
    with cab_hf.cab(model, mass_threshold=0.05):
        other = copy.deepcopy(model)
    assert state(cab_hf.remove_cab(model)) == PLAIN
    assert state(other)[1]["mass_threshold"] == 0.05
    assert state(cab_hf.remove_cab(other)) == PLAIN


def test_saved_config_has_cab_config_only(model, tmp_path):
    plain = model.config.to_dict()
    saved = loaded(applied(model), tmp_path)
    assert saved.config.to_dict().keys() == plain.keys() | {"cab_config", "architectures"}
    before = state(saved)
    assert before[0] == "sdpa" and CabConfig.from_dict(before[1]) == SPARSE
    # apply_cab was not called on the loaded model, so remove_cab keeps the saved settings
    assert state(cab_hf.remove_cab(saved)) == before
    assert state(cab_hf.remove_cab(cab_hf.apply_cab(saved, mass_threshold=0.08))) == before


def switch_by_transformers(model):
    cab_hf.apply_cab(model, FULL)
    model.config.cab_config = SPARSE.to_dict()
    model.set_attn_implementation("cab_dense")


PREPARATIONS = {
    "plain": lambda model: None,
    "applied": lambda model: cab_hf.apply_cab(model, FULL),
    "by-hand": switch_by_transformers,
}
with_preparations = pytest.mark.parametrize("prepare", PREPARATIONS.values(), ids=PREPARATIONS)


@with_preparations
@pytest.mark.parametrize("first_to_end", [0, 1, 2])
def test_cab_blocks_can_end_in_any_order(model, first_to_end, prepare):
    prepare(model)
    before = state(model)
    blocks = [cab_hf.cab(model, mass_threshold=value) for value in (0.5, 0.6, 0.7)]
    for block in blocks:
        block.__enter__()
    blocks.pop(first_to_end).__exit__(None, None, None)
    # the settings of the innermost ``with`` block that is still open apply
    assert state(model)[1]["mass_threshold"] == (0.6 if first_to_end == 2 else 0.7)
    for block in blocks:
        block.__exit__(None, None, None)
    assert state(model) == before
    assert state(cab_hf.remove_cab(model)) == PLAIN


def fail(model):
    raise RuntimeError("from inside")


INSIDE = {
    "nothing": lambda model: None,
    "remove": lambda model: state(cab_hf.remove_cab(model)) == PLAIN or 1 / 0,
    "apply": lambda model: cab_hf.apply_cab(model, mass_threshold=0.08),
    "again": lambda model: cab_hf.apply_cab(cab_hf.remove_cab(model), mass_threshold=0.08),
    "eager": lambda model: model.set_attn_implementation("eager"),
    "error": fail,
}


@with_preparations
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_cab_block_restores_state_after_exceptions(model, inside, prepare):
    prepare(model)
    before = state(model)
    raises = pytest.raises(RuntimeError, match="from inside") if inside is fail else nullcontext()
    with raises, cab_hf.cab(model, mass_threshold=0.08):
        assert state(model)[0] == "cab" and state(model)[1]["mass_threshold"] == 0.08
        inside(model)
    assert state(model) == before
    assert state(cab_hf.remove_cab(model)) == PLAIN


def tiny_llava(**implementations):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "projection_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes),
        text_config=LlamaConfig(**SIZES),
        image_token_index=5,
        attn_implementation=implementations or None,
    )
    return LlavaForConditionalGeneration(config).eval()


def implementations_of(model):
    """Return attention implementations by part: "" (the model), "v" (vision) and "t" (text)."""
    configs = {"": model.config, "v": model.config.vision_config, "t": model.config.text_config}
    return {name: config._attn_implementation for name, config in configs.items()}


IMPLEMENTATIONS = {
    "default": {},
    "vision": {"vision_config": "eager"},
    "text": {"text_config": "eager"},
    "others": {"": "eager", "text_config": "sdpa"},
}


@pytest.mark.parametrize("implementations", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_apply_cab_switches_language_model_only(implementations):
    model = tiny_llava(**implementations)
    before = implementations_of(model)
    ids = tokens(1, 150).clamp(min=6)
    ids[:, 3:7] = 5
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, pixel_values=pixels).logits
        cab_hf.apply_cab(model, FULL)
        assert implementations_of(model) == before | {"t": "cab"}
        actual = model(input_ids=ids, pixel_values=pixels).logits
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    assert [row["density"] for row in cab_hf.stats(model)] == [1.0, 1.0, 1.0]
    cab_hf.remove_cab(model)
    assert implementations_of(model) == before
    with cab_hf.cab(model, FULL):
        assert implementations_of(model) == before | {"t": "cab"}
    assert implementations_of(model) == before


@pytest.mark.parametrize("implementations", [{}, {"text_config": "cab"}], ids=["sdpa", "text-cab"])
def test_calibrate_uses_language_model_only(implementations, monkeypatch):
    monkeypatch.setattr(calibration, "KEYS", 2)
    model = tiny_llava(**implementations)
    model.resize_token_embeddings(400)
    chosen = cab_hf.calibrate(
        model, make_tokenizer(), "So it goes.", 0.7, config=SPARSE, length=300, documents=1
    )
    assert implementations_of(model) == {"": "sdpa", "v": "sdpa", "t": "cab"}
    assert model.config.text_config.cab_config == chosen.to_dict()
    assert model.config.cab_config is model.config.vision_config.cab_config is None


def test_models_with_shared_config_are_switched_separately():
    config = LlamaConfig(**SIZES)
    a, b = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    ids = tokens(1, 200)
    with torch.no_grad():
        expected = b(ids).logits
        applied(a)
        assert state(b) == PLAIN == (config._attn_implementation, None)
        assert torch.equal(b(ids).logits, expected)
        cab_hf.apply_cab(b, FULL)
        assert state(a)[1]["mass_threshold"] == SPARSE.mass_threshold
        cab_hf.remove_cab(a)
        assert state(b)[1]["mass_threshold"] == FULL.mass_threshold
    with cab_hf.cab(b, mass_threshold=0.08):
        built_in_block = LlamaForCausalLM(b.config)
    cab_hf.remove_cab(b)
    assert state(built_in_block)[1]["mass_threshold"] == 0.08


def model_without_attention_interface():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return FalconForCausalLM(FalconConfig(**sizes))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        pytest.param(lambda: torch.nn.Linear(2, 2), {}, "transformers, got Linear", id="no-model"),
        pytest.param(
            model_without_attention_interface, {}, "keeps attn_implementation='sdpa'", id="falcon"
        ),
        pytest.param(tiny_model, {"mass_threshold": 7}, "mass_threshold", id="setting"),
        pytest.param(tiny_llava, BY_HEAD | {"sparsity": [[0.5] * 5] * 3}, "sparsity", id="table"),
    ],
)
def test_apply_cab_to_unsupported_model_raises_and_restores(build, options, message):
    model = build()
    before = copy.deepcopy(getattr(model, "config", None))
    with pytest.raises(ValueError, match=message):
        cab_hf.apply_cab(model, **options)
    with pytest.raises(ValueError, match=message), cab_hf.cab(model, **options):
        pass
    assert getattr(model, "config", None) == before
    assert cab_hf.remove_cab(model) is model and getattr(model, "config", None) == before


@pytest.mark.parametrize("no_model", [None, "meta-llama/Llama-3.1-8B"], ids=["none", "name"])
@pytest.mark.parametrize(
    "function", ["apply_cab", "describe", "stats", "index_cache", "remove_cab", "calibrate"]
)
def test_apply_cab_to_other_objects_raises(function, no_model):
    options = {"tokenizer": "a tokenizer"} if function == "calibrate" else {}
    with pytest.raises(ValueError, match="^model (is|must be) "):
        getattr(cab_hf, function)(no_model, **options)


# --- forms of settings


@pytest.mark.parametrize("kind", [dict, str, Path])
def test_apply_cab_accepts_dict_or_file(model, tmp_path, kind):
    config = dataclasses.replace(SPARSE, dense_layers=(1,))
    config.save(tmp_path / "own.json")
    settings = config.to_dict() if kind is dict else kind(tmp_path / "own.json")
    with cab_hf.cab(model, settings, mass_threshold=0.05):
        assert state(model) == ("cab", dataclasses.replace(config, mass_threshold=0.05).to_dict())
    cab_hf.apply_cab(model, settings)
    assert state(model) == ("cab", config.to_dict())
    # the config of a saved model contains the settings, not the path of the file
    reloaded = loaded(
        tiny_model(), tmp_path / "model", attn_implementation="cab", cab_config=settings
    )
    assert state(reloaded) == ("cab", config.to_dict())
    # fields that a dict leaves out are reset to their defaults
    cab_hf.apply_cab(model, {"mass_threshold": 0.08})
    assert state(model)[1] == CabConfig(mass_threshold=0.08).to_dict()


def loaded(model, folder, **options):
    """Save a model to ``folder``, and return the model that ``from_pretrained`` loads from it."""
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


# settings for 30 layers; `tiny_model` has 3
DEEP = BY_HEAD | {"sparsity": [[0.5] * 6] * 30}
HEAD_MAP = {"predictor": "cascade", "anchors": [0], "head_map": [[0] * 9] * 3}
OTHER_SHAPE = (
    r"for somebody's \(4 layers, 6 heads, 2 KV heads\), and \w+ has 3 layers, 6 heads, 2 KV"
)
# (settings that do not fit `tiny_model`, part of the error message)
MISFITS = {
    "layers": (DEEP, "sparsity has 30 layers of 6 heads, and this model has 3"),
    "fewer-layers": (BY_HEAD | {"sparsity": [[0.1] * 6] * 2}, "sparsity has 2 layers of 6 heads"),
    "heads": (BY_HEAD | {"sparsity": [[0.5] * 9] * 3}, "9 heads, and this model has 3 layers of 6"),
    "map": (HEAD_MAP, "head_map has 3 layers of 9 heads"),
    "dense": ({"dense_layers": [3]}, "dense_layers has 3; this model has layers 0 to 2"),
    "origin-layers": ({"origin": ORIGIN._replace(layers=4)._asdict()}, OTHER_SHAPE),
    "origin-heads": ({"origin": ORIGIN._replace(kv_heads=6)._asdict()}, "3 layers, 6 heads, 6 KV"),
    "field": ({"mass_treshold": 0.5}, "CabConfig has no field 'mass_treshold'"),
    "kind": ({"mass_threshold": "much"}, "CabConfig.mass_threshold must be .*, got 'much'"),
    "predictor": ({"predictor": "row"}, "predictor"),
}


def pass_settings(model, folder, config, entry_point):
    """Pass the settings ``config`` to a model by an entry point.

    Args:
        model: the model.
        folder: empty folder, for the entry point "load".
        config: the settings.
        entry_point: "apply", "block", "load", or any other word for an assignment to the config.
    """
    if entry_point == "apply":
        cab_hf.apply_cab(model, config)
    elif entry_point == "block":
        with cab_hf.cab(model, config):
            pass
    elif entry_point == "load":
        loaded(model, folder, attn_implementation="cab", cab_config=config)
    else:
        model.config.cab_config = config
        if entry_point == "save":
            loaded(model, folder, attn_implementation="cab")
        elif entry_point == "build":
            model.config._attn_implementation = "cab"
            type(model)(model.config)
        else:
            model.set_attn_implementation("cab")


@pytest.mark.parametrize("entry_point", ["apply", "block", "load", "save", "build", "switch"])
@pytest.mark.parametrize(("config", "message"), MISFITS.values(), ids=MISFITS)
def test_settings_of_another_model_raise_at_every_entry_point(
    model, tmp_path, entry_point, config, message
):
    with pytest.raises(ValueError, match=message):
        pass_settings(model, tmp_path, config, entry_point)


def test_assigning_settings_of_another_model_raises(model):
    cab_hf.apply_cab(model, SPARSE)
    for config, message in MISFITS.values():
        with pytest.raises(ValueError, match=message):
            model.config.cab_config = config
    assert model.config.cab_config == SPARSE.to_dict()
    # settings are checked with "cab" only: a model with "sdpa" does not use settings
    cab_hf.remove_cab(model)
    model.config.cab_config = DEEP


@pytest.mark.parametrize("use", [cab_hf.describe, lambda model: model(tokens(1, 40))])
def test_calibration_of_another_model_raises_at_forward(model, use):
    cab_hf.apply_cab(model, SPARSE)
    model = copy.deepcopy(model)
    model.config.cab_config["origin"] = ORIGIN._replace(layers=4)._asdict()
    with pytest.raises(ValueError, match="was calibrated for somebody's"):
        use(model)


def test_settings_are_compared_once_per_model(model, monkeypatch):
    compared = []
    monkeypatch.setattr(model_config, "require_layers", lambda *args: compared.append(args))
    cab_hf.apply_cab(model, SPARSE, dense_layers=(2,))
    compared.clear()
    for _ in range(3):
        model(tokens(1, 40))
    assert not compared
    # after a change of the model config, settings are compared with the model again
    model.config.num_hidden_layers = 2
    model(tokens(1, 40))
    assert len(compared) == 1


def test_rejected_settings_can_be_replaced(model):
    model.config.cab_config = DEEP
    assert state(applied(model)) == ("cab", SPARSE.to_dict())
    assert state(cab_hf.remove_cab(model)) == ("sdpa", DEEP)


@pytest.mark.parametrize("missing", ["layers", "heads", "kv_heads"])
def test_fields_missing_from_calibration_are_not_compared(model, missing):
    cab_hf.apply_cab(model, SPARSE, origin=ORIGIN._replace(**{missing: None}))


# --- gradient checkpointing, which computes layers again


def loss_of(model, padded=False):
    ids = tokens(1, 160)
    mask = {"attention_mask": (torch.arange(160) > 4)[None].long()} if padded else {}
    return model(input_ids=ids, labels=ids, use_cache=False, **mask).loss


def gradient_of(loss, model):
    loss.backward()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    model.zero_grad()
    return gradient


def loss_inside_block(model, padded):
    """Compute a loss inside a ``with cab(...)`` block, and return the loss after the block."""
    with cab_hf.cab(model, SPARSE):
        return loss_of(model, padded)


def loss_before_remove_cab(model, padded):
    loss = loss_of(applied(model), padded)
    cab_hf.remove_cab(model)
    return loss


def loss_before_apply_cab(model, padded):
    loss = loss_of(model, padded)
    cab_hf.apply_cab(model, SPARSE)
    return loss


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "loss_before_switch", [loss_inside_block, loss_before_remove_cab, loss_before_apply_cab]
)
@pytest.mark.parametrize(
    ("implementation", "padded"),
    [("sdpa", False), ("sdpa", True), ("eager", False), ("cab", False), ("cab_dense", False)],
)
def test_recompute_with_other_settings_raises(
    implementation, padded, loss_before_switch, reentrant
):
    model = tiny_model(attn_implementation=implementation, num_hidden_layers=2).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with cab_hf.cab(model, SPARSE):
        # run forward and backward inside the block; the next step must not depend on this step
        expected = gradient_of(loss_of(model, padded), model)
    loss = loss_before_switch(model, padded)
    with pytest.raises(RuntimeError, match="was left or entered in between"):
        loss.backward()
    model.zero_grad()
    # the error has left no state: a step under unchanged settings succeeds
    loss = loss_of(applied(model), padded)
    assert torch.equal(gradient_of(loss, applied(model)), expected)


def test_backward_after_cab_block_works_without_checkpointing(model):
    with cab_hf.cab(model, SPARSE):
        expected = gradient_of(loss_of(model), model)
    loss = loss_inside_block(model, padded=False)
    assert torch.equal(gradient_of(loss, model), expected)
