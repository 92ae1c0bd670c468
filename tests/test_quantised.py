"""Models with quantised weights or quantised KV caches work with "cab"."""

import pytest
import torch
from tiny import draw_token_ids, make_tiny_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DynamicCache,
    QuantizedCache,
    QuantoConfig,
    TorchAoConfig,
)

import cab_hf
from cab_hf import checks
from cab_hf.eval import quantised

FULL_BUDGET_FIELDS = {"query_block": 32, "key_block": 16, "min_length": 0, "mass_threshold": 0.0}
SPARSE_CONFIG_FIELDS = FULL_BUDGET_FIELDS | {"mass_threshold": 0.1, "share_threshold": 1.0}
PROMPT_TOKENS = 300
# sizes are multiples of 64, because 4-bit formats quantise groups of 64 weights
MODEL_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 64,
}
# ignore the warnings of quantisation libraries
pytestmark = pytest.mark.filterwarnings("ignore")


def make_torchao_config(config_class_name):
    """Return the transformers config of the torchao quantisation ``config_class_name``."""
    torchao_quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(getattr(torchao_quantization, config_class_name)())


def make_bitsandbytes_config(**quantisation_options):
    """Return the transformers config of bitsandbytes with ``quantisation_options``."""
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**quantisation_options)


def make_quanto_config():
    """Return the transformers config of quanto with 8-bit weights."""
    pytest.importorskip("optimum.quanto")
    return QuantoConfig(weights="int8")


# by name: (function that returns the quantisation config, allowed mean difference of
# log-probabilities, which is larger if activations are quantised)
WEIGHT_CONFIGS = {
    "torchao-int8": (lambda: make_torchao_config("Int8WeightOnlyConfig"), 1e-4),
    "torchao-fp8": (lambda: make_torchao_config("Float8WeightOnlyConfig"), 1e-4),
    "torchao-int8-activations": (
        lambda: make_torchao_config("Int8DynamicActivationInt8WeightConfig"),
        0.05,
    ),
    "bitsandbytes-nf4": (
        lambda: make_bitsandbytes_config(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        1e-4,
    ),
    "bitsandbytes-int8": (lambda: make_bitsandbytes_config(load_in_8bit=True), 0.05),
    "quanto-int8": (make_quanto_config, 1e-4),
}


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory):
    """Save a tiny model, and return its folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(**MODEL_SIZES).save_pretrained(folder)
    return folder


def make_sparse_model():
    """Return the tiny model with "cab" and the settings `SPARSE_CONFIG_FIELDS`."""
    model = make_tiny_model(**MODEL_SIZES)
    cab_hf.apply_cab(model, SPARSE_CONFIG_FIELDS)
    return model


def compute_log_probabilities(model):
    """Return the log-probabilities of ``model`` for 300 random tokens, [1, 300, vocabulary]."""
    with torch.no_grad():
        return model(draw_token_ids(1, PROMPT_TOKENS)).logits.float().log_softmax(-1)


@pytest.mark.parametrize("weight_format", WEIGHT_CONFIGS)
def test_quantised_weights_match_sdpa(saved_folder, weight_format):
    make_config, tolerance = WEIGHT_CONFIGS[weight_format]

    def load_model(**model_options):
        quantisation_options = {"quantization_config": make_config(), "dtype": torch.float32}
        return AutoModelForCausalLM.from_pretrained(
            saved_folder, **quantisation_options, **model_options
        ).eval()

    assert_equals_sdpa(load_model, tolerance)


def assert_equals_sdpa(load_model, tolerance):
    """Assert that a quantised model with "cab" equals sdpa at full budget, and can be sparse.

    ``load_model`` is a function that takes arguments of ``from_pretrained`` and returns the model.
    """
    expected_log_probabilities = compute_log_probabilities(load_model(attn_implementation="sdpa"))
    model = load_model(attn_implementation="cab", cab_config=FULL_BUDGET_FIELDS)
    assert (compute_log_probabilities(model) - expected_log_probabilities).abs().mean() < tolerance
    cab_hf.apply_cab(model, SPARSE_CONFIG_FIELDS)
    compute_log_probabilities(model)
    assert cab_hf.stats(model)[0]["density"] < 0.95


def test_compiled_torchao_rounding_is_accurate(monkeypatch):
    module = pytest.importorskip("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    function_names = ("_choose_scale_float8", "_quantize_affine_float8")
    original_functions = [getattr(module, function_name) for function_name in function_names]
    for function_name, rounding_function in zip(function_names, original_functions, strict=True):
        # set the attribute to its own value, so that monkeypatch restores it after the test
        monkeypatch.setattr(module, function_name, rounding_function)
    quantised._compile_rounding.__wrapped__()
    assert all(
        getattr(module, function_name) is not original_function
        for function_name, original_function in zip(function_names, original_functions, strict=True)
    )
    for tensor_shape in ((1, 300, 256), (1, 200, 256), (1, 200, 96)):
        original_tensor = torch.randn(tensor_shape, dtype=torch.bfloat16)
        rounded_tensor = module.Float8Tensor.from_hp(original_tensor)
        assert rounded_tensor.qdata.dtype == torch.float8_e4m3fn
        scale = original_tensor.abs().amax(-1, keepdim=True).float() / 448
        torch.testing.assert_close(rounded_tensor.scale, scale, rtol=2**-8, atol=0)
        # float8_e4m3fn has three mantissa bits: the relative rounding error is at most 2^-4
        tolerance = {"rtol": 2**-4, "atol": 2**-10 * scale.max().item()}
        torch.testing.assert_close(
            rounded_tensor.qdata.float() * rounded_tensor.scale,
            original_tensor.float(),
            **tolerance,
        )


# W8A8 also quantises activations
@pytest.mark.parametrize(("scheme", "tolerance"), [("W4A16", 1e-4), ("W8A8", 0.05)])
def test_compressed_weights_match_sdpa(tmp_path, scheme, tolerance):
    pytest.importorskip("compressed_tensors")
    model = make_tiny_model(**MODEL_SIZES)
    save_compressed(model, scheme, tmp_path)

    def load_model(**model_options):
        return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **model_options)

    quantised_log_probabilities = compute_log_probabilities(load_model(attn_implementation="sdpa"))
    assert (
        quantised_log_probabilities - compute_log_probabilities(make_tiny_model(**MODEL_SIZES))
    ).any()
    assert_equals_sdpa(load_model, tolerance)


def save_compressed(model, scheme, folder):
    """Quantise a model and save it in the format of llm-compressor.

    The scale of each group follows from its smallest and its largest weight.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    quantisation_scheme = preset_name_to_scheme(scheme, ["Linear"])
    if quantisation_scheme.weights.group_size:
        # the default group size exceeds the width of the model's layers
        quantisation_scheme.weights.group_size = MODEL_SIZES["hidden_size"]
    quantisation_config = QuantizationConfig(
        config_groups={"all": quantisation_scheme}, ignore=["lm_head"]
    )
    apply_quantization_config(model, quantisation_config)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            weight_arguments = layer.quantization_scheme.weights
            weight_groups = layer.weight.detach().unflatten(
                1, (-1, weight_arguments.group_size or layer.in_features)
            )
            scale, zero_point = calculate_qparams(
                weight_groups.amin(2), weight_groups.amax(2), weight_arguments
            )
            layer.weight_scale.data.copy_(scale)
            if hasattr(layer, "weight_zero_point"):
                layer.weight_zero_point.data.copy_(zero_point)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.fixture
def quanto_cache_options():
    """Return the arguments of a `QuantizedCache` with 4 bits by quanto."""
    pytest.importorskip("optimum.quanto")
    return {"backend": "quanto", "nbits": 4, "residual_length": 32}


def test_quantised_cache_does_not_change_sparse_prefill(quanto_cache_options):
    model, ids = make_sparse_model(), draw_token_ids(1, PROMPT_TOKENS)
    with torch.no_grad():
        plain_logits, quantised_logits = (
            model(ids, past_key_values=cache).logits
            for cache in (
                DynamicCache(config=model.config),
                QuantizedCache(config=model.config, **quanto_cache_options),
            )
        )
    assert torch.equal(plain_logits, quantised_logits)


def test_sparse_decode_with_quantised_cache_warns_and_is_dense(quanto_cache_options, monkeypatch):
    monkeypatch.setattr(checks, "_shown_warning_keys", set())
    model, ids = make_sparse_model(), draw_token_ids(1, PROMPT_TOKENS)
    generate_options = {"cache_implementation": "quantized", "cache_config": quanto_cache_options}
    generate_options |= {"max_new_tokens": 4, "do_sample": False}
    dense_tokens = model.generate(ids, **generate_options)
    with (
        cab_hf.cab(model, sparse_decode=True, decode_tokens=128),
        pytest.warns(UserWarning, match="decode steps are dense.*QuantizedCache"),
    ):
        assert torch.equal(model.generate(ids, **generate_options), dense_tokens)
