"""Layers such as Mamba that mix tokens without attention raise if documents would mix."""

import pytest
import torch
from launches import SHORT_RUN_OPTIONS
from tiny_types import FIRST_REGULAR_TOKEN, make_tiny_model
from words import make_tokenizer

import cab_hf
from cab_hf.finetune import lora
from cab_hf.hf.token_mixers import token_mixers

# by model type: class of the layer that mixes tokens without attention
MIXER_CLASSES = {
    "bamba": "BambaMixer",
    "jamba": "JambaMambaMixer",
    "zamba2": "Zamba2MambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "lfm2_moe": "Lfm2MoeShortConv",
    "zaya": "ZayaCCAProjection",
    "minimax": "MiniMaxLightningAttention",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5": "Qwen3_5GatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
}
# types that mix tokens by attention only
ATTENTION_ONLY_TYPES = "llama mixtral deepseek_v3 gemma3 gemma4 qwen3_moe olmo2 gpt2 moshi"


@pytest.mark.parametrize("model_type", MIXER_CLASSES)
def test_other_token_mixers_raise_under_context_parallel(model_type, single_process_group):
    model = cab_hf.apply_cab(make_tiny_model(model_type), min_length=0)
    error_pattern = (
        rf"mix tokens without attention \({MIXER_CLASSES[model_type]}.*\); inside context_parallel"
    )
    with pytest.raises(NotImplementedError, match=error_pattern), cab_hf.context_parallel(model):
        pass
    # after the error, the model works outside of the block
    model(torch.full((1, 8), FIRST_REGULAR_TOKEN))


@pytest.mark.parametrize("model_type", ATTENTION_ONLY_TYPES.split())
def test_attention_layers_are_not_token_mixers(model_type):
    assert list(token_mixers(make_tiny_model(model_type))) == []


def test_hybrid_with_attention_layers_only_has_no_token_mixers():
    config_fields = {"layer_types": ["full_attention"] * 4}
    assert list(token_mixers(make_tiny_model("granitemoehybrid", **config_fields))) == []


@pytest.mark.parametrize("implementation", ["cab", "sdpa"])
@pytest.mark.parametrize("run_options", [[], ["--dry-run"]], ids=["train", "dry-run"])
def test_packed_training_raises_for_other_token_mixers(
    implementation, run_options, tmp_path, capsys
):
    make_tiny_model("bamba").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    arguments = [
        *SHORT_RUN_OPTIONS,
        "--model",
        str(tmp_path),
        "--attention",
        implementation,
        *run_options,
    ]
    assert lora.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error_message = (
        "BambaForCausalLM has layers that mix tokens without attention (BambaMixer); such"
    )
    assert error_message in capsys.readouterr().err
