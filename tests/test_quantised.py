"""Models with quantised weights or quantised KV caches work with "cab"."""

import pytest
import torch
from tiny import tiny_model, tokens
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

FULL_FIELDS = {"query_block": 32, "key_block": 16, "min_length": 0, "mass_threshold": 0.0}
SPARSE_FIELDS = FULL_FIELDS | {"mass_threshold": 0.1, "share_threshold": 1.0}
LENGTH = 300
# sizes are multiples of 64, because 4-bit formats quantise groups of 64 weights
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 64}
# ignore the warnings of quantisation libraries
pytestmark = pytest.mark.filterwarnings("ignore")


def make_torchao_config(name):
    """Return the transformers config of the torchao quantisation ``name``."""
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(getattr(quantization, name)())


def make_bitsandbytes_config(**options):
    """Return the transformers config of bitsandbytes with ``options``."""
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**options)


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
    tiny_model(**SIZES).save_pretrained(folder)
    return folder


def make_sparse_model():
    """Return the tiny model with "cab" and the settings `SPARSE_FIELDS`."""
    model = tiny_model(**SIZES)
    cab_hf.apply_cab(model, SPARSE_FIELDS)
    return model


def compute_log_probabilities(model):
    """Return the log-probabilities of ``model`` for 300 random tokens, [1, 300, vocabulary]."""
    with torch.no_grad():
        return model(tokens(1, LENGTH)).logits.float().log_softmax(-1)


@pytest.mark.parametrize("weight_format", WEIGHT_CONFIGS)
def test_quantised_weights_match_sdpa(saved_folder, weight_format):
    make_config, tolerance = WEIGHT_CONFIGS[weight_format]

    def load(**options):
        quantisation_options = {"quantization_config": make_config(), "dtype": torch.float32}
        return AutoModelForCausalLM.from_pretrained(
            saved_folder, **quantisation_options, **options
        ).eval()

    assert_equals_sdpa(load, tolerance)


def assert_equals_sdpa(load, tolerance):
    """Assert that a quantised model with "cab" equals sdpa at full budget, and can be sparse.

    ``load`` is a function that takes arguments of ``from_pretrained`` and returns the model.
    """
    expected = compute_log_probabilities(load(attn_implementation="sdpa"))
    model = load(attn_implementation="cab", cab_config=FULL_FIELDS)
    assert (compute_log_probabilities(model) - expected).abs().mean() < tolerance
    cab_hf.apply_cab(model, SPARSE_FIELDS)
    compute_log_probabilities(model)
    assert cab_hf.stats(model)[0]["density"] < 0.95


def test_compiled_torchao_rounding_is_accurate(monkeypatch):
    module = pytest.importorskip("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    names = ("_choose_scale_float8", "_quantize_affine_float8")
    original_functions = [getattr(module, name) for name in names]
    for name, function in zip(names, original_functions, strict=True):
        # set the attribute to its own value, so that monkeypatch restores it after the test
        monkeypatch.setattr(module, name, function)
    quantised._compile_rounding.__wrapped__()
    assert all(
        getattr(module, name) is not original_function
        for name, original_function in zip(names, original_functions, strict=True)
    )
    for shape in ((1, 300, 256), (1, 200, 256), (1, 200, 96)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        rounded = module.Float8Tensor.from_hp(x)
        assert rounded.qdata.dtype == torch.float8_e4m3fn
        scale = x.abs().amax(-1, keepdim=True).float() / 448
        torch.testing.assert_close(rounded.scale, scale, rtol=2**-8, atol=0)
        # float8_e4m3fn has three mantissa bits: the relative rounding error is at most 2^-4
        tolerance = {"rtol": 2**-4, "atol": 2**-10 * scale.max().item()}
        torch.testing.assert_close(rounded.qdata.float() * rounded.scale, x.float(), **tolerance)


# W8A8 also quantises activations
@pytest.mark.parametrize(("scheme", "tolerance"), [("W4A16", 1e-4), ("W8A8", 0.05)])
def test_compressed_weights_match_sdpa(tmp_path, scheme, tolerance):
    pytest.importorskip("compressed_tensors")
    model = tiny_model(**SIZES)
    save_compressed(model, scheme, tmp_path)

    def load(**options):
        return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)

    quantised_result = compute_log_probabilities(load(attn_implementation="sdpa"))
    assert (quantised_result - compute_log_probabilities(tiny_model(**SIZES))).any()
    assert_equals_sdpa(load, tolerance)


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

    group = preset_name_to_scheme(scheme, ["Linear"])
    if group.weights.group_size:
        # the default group size exceeds the width of the model's layers
        group.weights.group_size = SIZES["hidden_size"]
    config = QuantizationConfig(config_groups={"all": group}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            weight_arguments = layer.quantization_scheme.weights
            groups = layer.weight.detach().unflatten(
                1, (-1, weight_arguments.group_size or layer.in_features)
            )
            scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), weight_arguments)
            layer.weight_scale.data.copy_(scale)
            if hasattr(layer, "weight_zero_point"):
                layer.weight_zero_point.data.copy_(zero)
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
    model, ids = make_sparse_model(), tokens(1, LENGTH)
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
    monkeypatch.setattr(checks, "_shown_warnings", set())
    model, ids = make_sparse_model(), tokens(1, LENGTH)
    options = {"cache_implementation": "quantized", "cache_config": quanto_cache_options}
    options |= {"max_new_tokens": 4, "do_sample": False}
    dense_tokens = model.generate(ids, **options)
    with (
        cab_hf.cab(model, sparse_decode=True, decode_tokens=128),
        pytest.warns(UserWarning, match="decode steps are dense.*QuantizedCache"),
    ):
        assert torch.equal(model.generate(ids, **options), dense_tokens)
