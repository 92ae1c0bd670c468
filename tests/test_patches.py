"""Turning CAB on and off, and what the model says of itself."""

import copy

import pytest
import torch
import transformers
from tiny import FULL, SIZES, SPARSE, tiny_model, tokens

import cab_hf
from cab_hf import CabConfig


@pytest.fixture
def model():
    return tiny_model()


def state(model):
    return model.config._attn_implementation, getattr(model.config, "cab_config", None)


def test_apply_is_idempotent_and_remove_puts_back(model):
    before = state(model)
    assert cab_hf.apply_cab(model, SPARSE) is model
    cab_hf.apply_cab(model, mass=0.7)
    assert model.config.cab_config["mass"] == 0.7
    assert model.config.cab_config["key_block"] == SPARSE.key_block
    assert cab_hf.remove_cab(model) is model
    assert state(model) == before
    cab_hf.remove_cab(model)
    assert state(model) == before


def test_the_context_manager_restores_what_it_found(model):
    with cab_hf.cab(model, mass=0.8):
        assert model.config._attn_implementation == "cab"
    assert state(model) == ("sdpa", None)
    cab_hf.apply_cab(model, FULL)
    with cab_hf.cab(model, mass=0.5):
        assert model.config.cab_config["mass"] == 0.5
    assert CabConfig.from_dict(model.config.cab_config) == FULL
    with pytest.raises(RuntimeError, match="from inside"), cab_hf.cab(model, mass=0.5):
        raise RuntimeError("from inside")
    assert CabConfig.from_dict(model.config.cab_config) == FULL
    cab_hf.remove_cab(model)
    assert state(model) == ("sdpa", None)


def test_two_models_do_not_share_settings(model):
    other = copy.deepcopy(model)
    cab_hf.apply_cab(model, SPARSE)
    assert state(other) == ("sdpa", None)
    ids = tokens(1, 200)
    with torch.no_grad():
        model(ids)
        other(ids)
    assert all(row["density"] is None for row in cab_hf.stats(other))


def test_stats_add_up_until_reset(model):
    cab_hf.apply_cab(model, SPARSE, dense_layers=(1,))
    assert cab_hf.stats(model) == [{"layer": i, "density": None} for i in range(3)]
    with torch.no_grad():
        model(tokens(1, 300))
        once = cab_hf.stats(model)
        model(tokens(1, 300))
    assert cab_hf.stats(model) == once
    assert once[1]["density"] is None
    assert all(0 < once[i]["density"] < 1 for i in (0, 2))
    cab_hf.stats(model, reset=True)
    assert cab_hf.stats(model)[0]["density"] is None


def test_full_budget_has_density_one(model):
    with cab_hf.cab(model, FULL), torch.no_grad():
        model(tokens(2, 250))
        assert [row["density"] for row in cab_hf.stats(model)] == [1.0, 1.0, 1.0]


def test_describe_says_what_runs_where_and_why(model):
    assert "'sdpa'" in cab_hf.describe(model)
    cab_hf.apply_cab(model, SPARSE, dense_layers=(0,), min_length=100)
    lines = cab_hf.describe(model, tokens=500).splitlines()
    assert "mass 0.4" in lines[0] and "32 x 16" in lines[0] and "500 tokens" in lines[0]
    assert lines[1] == "  layer 0: dense, in dense_layers"
    assert lines[2] == "  layers 1-2: sparse, engine reference"
    assert "shorter than min_length=100" in cab_hf.describe(model, tokens=99)
    sliding = cab_hf.apply_cab(tiny_model("qwen3-some-sliding"), SPARSE)
    assert "layers 1-2: dense, sliding window of 40 tokens" in cab_hf.describe(sliding)


def test_describe_finds_layers_that_are_causal_by_call_alone():
    config = transformers.CLIPTextConfig(
        **SIZES | {"num_hidden_layers": 2, "eos_token_id": 2}, projection_dim=48
    )
    model = transformers.CLIPTextModel(config).eval()
    model.config.cab_config = FULL
    model.set_attn_implementation("cab")
    assert "layers 0-1: sparse" in cab_hf.describe(model, tokens=100)
    with torch.no_grad():
        model(tokens(1, 100))
    assert cab_hf.stats(model) == [{"layer": i, "density": 1.0} for i in range(2)]


def test_describe_does_not_pretend_to_layers():
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=48, num_hidden_layers=1, num_attention_heads=6
    )
    model = transformers.BertModel(config)
    model.set_attn_implementation("cab")
    assert "no layer is known to attend causally" in cab_hf.describe(model)


def test_describe_says_what_will_be_refused_layer_by_layer():
    config = transformers.MiMoV2FlashConfig(
        **SIZES | {"num_hidden_layers": 2}, layer_types=["full_attention", "sliding_attention"]
    )
    with torch.device("meta"):
        model = transformers.MiMoV2FlashForCausalLM(config)
    model.set_attn_implementation("cab")
    lines = cab_hf.describe(model, tokens=200).splitlines()[1:]
    assert lines[0] == "  layer 0: dense, input shorter than min_length=16384"
    assert lines[1] == "  layer 1: refused, sink logits"


def test_describe_agrees_with_what_runs(model):
    cab_hf.apply_cab(model, SPARSE, dense_layers=(2,))
    with torch.no_grad():
        model(tokens(1, 200))
    ran = [row["density"] is not None for row in cab_hf.stats(model)]
    text = cab_hf.describe(model, tokens=200)
    assert ran == [True, True, False] and "layers 0-1: sparse" in text and "layer 2: dense" in text


def test_a_peft_model_is_switched_too(model):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    ids = tokens(1, 200)
    with torch.no_grad():
        expected = wrapped(ids).logits
        with cab_hf.cab(wrapped, FULL):
            assert cab_hf.describe(wrapped, tokens=200).count("sparse") == 1
            torch.testing.assert_close(wrapped(ids).logits, expected, atol=2e-5, rtol=1e-4)
            assert cab_hf.stats(wrapped)[0]["density"] == 1
