"""Models for training: RoPE scaling, float32 adapters, and the loss from hidden states."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model
from torch import nn
from torch.nn import functional as F
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    PhiConfig,
    PhiForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from words import save_llama

from cab_hf import CabConfig
from cab_hf.experiment.models import BASE_MODEL_FILE, content_sha256
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import models
from cab_hf.finetune.loss import IGNORED_LABEL, linear_cross_entropy
from cab_hf.finetune.models import forward_hidden, load_model, stretch_positions, with_lora

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
SMALL_CONFIG_SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
    **{"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1},
}


def test_4_bit_weights_pass_gradients_after_evaluation():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    load_options = {"dtype": "float32", "attn_implementation": "sdpa"}
    quantised_model, _ = load_model("tiny", qlora=True, **load_options)
    reference_model, _ = load_model("tiny", **load_options)
    with torch.no_grad():
        for weight_name, weight in quantised_model.named_parameters():
            dequantised_weight = weight
            if isinstance(weight, bitsandbytes.nn.Params4bit):
                dequantised_weight = bitsandbytes.functional.dequantize_4bit(
                    weight, weight.quant_state
                )
            reference_model.get_parameter(weight_name).copy_(dequantised_weight)
    token_ids = draw_token_ids(1, 100)

    def compute_gradients(model):
        with torch.no_grad():
            model.eval()(token_ids)
        model.train()(input_ids=token_ids, labels=token_ids).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]

    actual_gradients, expected_gradients = (
        compute_gradients(make_adapted_model(quantised_model)),
        compute_gradients(make_adapted_model(reference_model)),
    )
    torch.testing.assert_close(actual_gradients, expected_gradients, atol=1e-5, rtol=1e-3)


def make_float64_model(**model_options):
    """Return the tiny model in float64."""
    return make_tiny_model(**model_options).double()


def make_adapted_model(model=None, targets=LORA_TARGETS, rank=4, alpha=8.0, **lora_options):
    """Return a model with random LoRA adapters; B is not zero, so that adapters change logits."""
    torch.manual_seed(1)
    peft_model = with_lora(model or make_tiny_model(), targets, rank, alpha, **lora_options)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return peft_model


def make_packed_batch(num_tokens=90, num_rows=2):
    """Return rows of two packed documents, with shifted labels.

    The last token of each document and token 50 have no label.
    """
    token_ids = draw_token_ids(num_rows, num_tokens)
    labels = torch.cat([token_ids[:, 1:], torch.full((num_rows, 1), IGNORED_LABEL)], dim=1)
    labels[:, [40, 50]] = IGNORED_LABEL
    positions = torch.cat([torch.arange(41), torch.arange(num_tokens - 41)]).expand(num_rows, -1)
    return {"input_ids": token_ids, "position_ids": positions, "labels": labels}


def compute_loss_from_logits(model, batch):
    """Return the cross-entropy of the logits of ``model``, summed over tokens."""
    model_inputs = {
        input_name: tensor for input_name, tensor in batch.items() if input_name != "labels"
    }
    logits = model(**model_inputs, use_cache=False).logits.flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


def compute_loss_from_hidden(model, batch):
    """Return the same loss, computed from hidden states in chunks of 16 tokens."""
    hidden, weight = forward_hidden(model, batch)
    return linear_cross_entropy(hidden, weight, batch["labels"], chunk_tokens=16)


def find_trainable_parameters(model):
    """Return the parameters that require gradients, by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


MODEL_MAKERS = {
    "llama": make_tiny_model,
    "qwen3": lambda: make_tiny_model("qwen3"),
    "scaled logits": lambda: CohereForCausalLM(
        CohereConfig(**SMALL_CONFIG_SIZES, logit_scale=0.3)
    ).eval(),
    "divided logits": lambda: GraniteForCausalLM(
        GraniteConfig(**SMALL_CONFIG_SIZES, logits_scaling=5.0)
    ).eval(),
    "lora": lambda: make_adapted_model(make_float64_model()),
    "lora on the head": lambda: make_adapted_model(
        make_float64_model(), (*LORA_TARGETS, "lm_head")
    ),
    "norms": lambda: make_adapted_model(
        make_float64_model(tie_word_embeddings=True), trains_norms=True
    ),
}


@pytest.mark.parametrize("make_model", MODEL_MAKERS.values(), ids=MODEL_MAKERS)
def test_chunked_loss_equals_loss_of_logits(make_model):
    model, batch = make_model().double(), make_packed_batch()
    loss_from_logits, loss_from_hidden = (
        compute_loss_from_logits(model, batch),
        compute_loss_from_hidden(model, batch),
    )
    torch.testing.assert_close(loss_from_hidden, loss_from_logits, rtol=1e-10, atol=0)
    parameters = find_trainable_parameters(model).values()
    actual_grads, expected_grads = (
        torch.autograd.grad(loss, parameters) for loss in (loss_from_hidden, loss_from_logits)
    )
    torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-9, atol=1e-9)
    assert all(gradient.abs().sum() > 0 for gradient in actual_grads)
    # `forward_hidden` has restored the head of the model
    assert model(batch["input_ids"]).logits.shape[-1] == 64


def test_unsupported_output_heads_raise():
    capped_model = Gemma2ForCausalLM(
        Gemma2Config(**SMALL_CONFIG_SIZES, final_logit_softcapping=30.0)
    )
    model_by_message = {
        r"got Gemma2ForCausalLM, which caps its logits \(final_logit_softcapping=30.0\)": (
            capped_model
        ),
        "has a head with a bias": PhiForCausalLM(PhiConfig(**SMALL_CONFIG_SIZES)),
    }
    for message, model in model_by_message.items():
        with pytest.raises(NotImplementedError, match=message):
            forward_hidden(model.eval(), make_packed_batch())


LLAMA_POSITION_FIELDS = {"max_position_embeddings": 1000, "head_dim": 16}


def compute_rope_frequencies(config, num_positions):
    """Return the RoPE frequencies that are in use after a call with ``num_positions`` positions."""
    rotary = LlamaRotaryEmbedding(config)
    rotary(torch.ones(1), torch.arange(num_positions).unsqueeze(0))
    return rotary.inv_freq


@pytest.mark.parametrize(
    # ratios of the scaled to the unscaled frequency, for the lowest and the highest
    # frequency. "dynamic" multiplies theta by (4 x 4000 / 1000 - 3)^(16 / 14)
    ("rope", "lowest_frequency_ratio", "highest_frequency_ratio"),
    [
        *(("linear", 1 / 4, 1 / 4), ("dynamic", 13.0 ** -(16 / 14 * 14 / 16), 1)),
        *(("yarn", 1 / 4, 1), ("llama3", 1 / 4, 1), ("theta", 1 / 4, 1)),
    ],
)
def test_rope_scaling_follows_its_name(rope, lowest_frequency_ratio, highest_frequency_ratio):
    unscaled_config, scaled_config = (
        LlamaConfig(**SMALL_CONFIG_SIZES, **LLAMA_POSITION_FIELDS) for _ in range(2)
    )
    stretch_positions(scaled_config, "a-model", 4000, rope)
    scaled_config.validate_rope()
    frequency_ratios = compute_rope_frequencies(scaled_config, 4000) / compute_rope_frequencies(
        unscaled_config, 4000
    )
    assert frequency_ratios[0].item() == pytest.approx(highest_frequency_ratio)
    assert frequency_ratios[-1].item() == pytest.approx(lowest_frequency_ratio, rel=1e-4)
    assert models.run_models.max_prompt_tokens(scaled_config) == 4000


@pytest.mark.parametrize("attn_implementation", ["cab", "sdpa"])
def test_settings_are_compared_with_settings_of_the_model(tmp_path, attn_implementation):
    model_folder = save_llama(tmp_path / "model")
    config_file = model_folder / "config.json"
    saved_fields = {"cab_config": CabConfig.published(0.9).to_dict()}
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | saved_fields))

    def load_with_fields(**cab_fields):
        load_model(
            str(model_folder), cab_config=cab_fields, attn_implementation=attn_implementation
        )

    # the predictor in the saved config reads sparsity; mass_threshold is a field of the default one
    load_with_fields(sparsity=0.8)
    message = "mass_threshold is 0.08, which predictor='frc' does not read"
    with pytest.raises(ValueError, match=message):
        load_with_fields(mass_threshold=0.08)


def test_model_is_loaded_for_training(tmp_path):
    model_folder = str(save_llama(tmp_path / "model"))
    model, tokenizer = load_model(
        model_folder,
        cab_config={"mass_threshold": 0.08},
        dtype="bfloat16",
        length=4096,
        rope="yarn",
    )
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "cab"
    assert model.config.cab_config["mass_threshold"] == 0.08
    assert model.config.max_position_embeddings == 4096
    assert model.model.rotary_emb.rope_type == "yarn"
    assert tokenizer.pad_token is not None
    with pytest.raises(UsageError, match="nothing' does not exist. Give "):
        load_model(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="^length must be at most 2048 .*, got 4096"):
        load_model(model_folder, length=4096)


def test_adapter_products_equal_autocast():
    torch.manual_seed(0)
    layer_input = torch.randn(2, 7, 48, dtype=torch.bfloat16)

    def compute_results(rounds_products):
        """Return the output and the gradients of an adapted linear layer."""
        torch.manual_seed(1)
        adapted_layer = nn.Sequential()
        adapted_layer.q_proj = nn.Linear(48, 32, bias=False, dtype=torch.bfloat16)
        adapted_layer = get_peft_model(
            adapted_layer, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
        )
        for parameter in find_trainable_parameters(adapted_layer).values():
            parameter.data = torch.randn_like(parameter, dtype=torch.float32)
        if rounds_products:
            models.compute_in_input_dtype(adapted_layer)
        leaf_input = layer_input.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=not rounds_products):
            layer_output = adapted_layer(leaf_input)
        layer_output.float().square().sum().backward()
        return [
            layer_output,
            leaf_input.grad,
            *(tensor.grad for tensor in find_trainable_parameters(adapted_layer).values()),
        ]

    actual = compute_results(rounds_products=True)
    assert [tensor.dtype for tensor in actual] == [torch.bfloat16] * 2 + [torch.float32] * 2
    for tensor, expected in zip(actual, compute_results(rounds_products=False), strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("trains_norms", [False, True], ids=["", "norms"])
def test_trained_parameters_and_dtypes(trains_norms):
    peft_model = with_lora(
        make_tiny_model().to(torch.bfloat16), LORA_TARGETS, 2, 4.0, trains_norms=trains_norms
    )
    trained_parameters = find_trainable_parameters(peft_model)
    assert {parameter.dtype for parameter in trained_parameters.values()} == {torch.float32}
    last_name_parts = {
        name.split(".modules_to_save")[0].rpartition(".")[2] for name in trained_parameters
    }
    expected_norms = (
        {"norm", "input_layernorm", "post_attention_layernorm"} if trains_norms else set()
    )
    assert {
        name for name in last_name_parts if "lora" not in name and name != "weight"
    } == expected_norms
    assert sum("lora_A" in name for name in trained_parameters) == 3 * len(LORA_TARGETS)
    # outside of autocast, the float32 adapters do not change the dtype of hidden states
    hidden, weight = forward_hidden(peft_model, make_packed_batch())
    assert hidden.dtype == torch.bfloat16
    assert peft_model(draw_token_ids(1, 5)).logits.isfinite().all()
    compute_loss_from_hidden(peft_model, make_packed_batch()).backward()
    names_without_gradient = [
        name for name, parameter in trained_parameters.items() if parameter.grad is None
    ]
    assert not names_without_gradient


def test_saved_adapter_records_its_base(tmp_path):
    model, tokenizer = load_model("tiny", cab_config=SPARSE_CONFIG, length=8192, rope="linear")
    models.save_adapter(make_adapted_model(model, trains_norms=True), tokenizer, tmp_path)
    base_fields = json.loads((tmp_path / BASE_MODEL_FILE).read_text())
    assert base_fields["sha256"] == content_sha256("tiny")
    assert (
        base_fields["rope_parameters"]["factor"] == 2.0
        and base_fields["max_position_embeddings"] == 4096
    )
    assert base_fields["cab_config"] == SPARSE_CONFIG.to_dict()
    peft_config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert peft_config["base_model_name_or_path"] == "tiny"


def test_gathered_parameters_save_like_the_model(tmp_path):
    model = make_adapted_model(trains_norms=True)
    model.get_base_model().name_or_path = "tiny"
    _, tokenizer = load_model("tiny", dtype="float32")
    models.save_adapter(model, tokenizer, tmp_path / "own")
    gathered_parameters = {
        name: parameter.detach().clone()
        for name, parameter in find_trainable_parameters(model).items()
    }
    with torch.no_grad():
        for parameter in find_trainable_parameters(model).values():
            parameter.zero_()
    models.save_adapter(model, tokenizer, tmp_path / "gathered", gathered_parameters)
    saved_from_model, saved_from_gathered = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("own", "gathered")
    )
    torch.testing.assert_close(saved_from_gathered, saved_from_model, rtol=0, atol=0)
