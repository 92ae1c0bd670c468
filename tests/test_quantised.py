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

FULL = {"query_block": 32, "key_block": 16, "min_length": 0, "mass_threshold": 0.0}
SPARSE = FULL | {"mass_threshold": 0.1, "share_threshold": 1.0}
LENGTH = 300
# sizes are multiples of 64, because 4-bit formats quantise groups of 64 weights
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 64}
# ignore the warnings of quantisation libraries
pytestmark = pytest.mark.filterwarnings("ignore")


def torchao(name):
    """Return the transformers config of the torchao quantisation ``name``."""
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(getattr(quantization, name)())


def bitsandbytes(**options):
    """Return the transformers config of bitsandbytes with ``options``."""
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**options)


def quanto():
    """Return the transformers config of quanto with 8-bit weights."""
    pytest.importorskip("optimum.quanto")
    return QuantoConfig(weights="int8")


# by name: (function that returns the quantisation config, allowed mean difference of
# log-probabilities, which is larger if activations are quantised)
WEIGHTS = {
    "torchao-int8": (lambda: torchao("Int8WeightOnlyConfig"), 1e-4),
    "torchao-fp8": (lambda: torchao("Float8WeightOnlyConfig"), 1e-4),
    "torchao-int8-activations": (lambda: torchao("Int8DynamicActivationInt8WeightConfig"), 0.05),
    "bitsandbytes-nf4": (
        lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        1e-4,
    ),
    "bitsandbytes-int8": (lambda: bitsandbytes(load_in_8bit=True), 0.05),
    "quanto-int8": (quanto, 1e-4),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a tiny model, and return its folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(**SIZES).save_pretrained(folder)
    return folder


def sparse_model():
    """Return the tiny model with "cab" and the settings `SPARSE`."""
    model = tiny_model(**SIZES)
    cab_hf.apply_cab(model, SPARSE)
    return model


def log_probabilities(model):
    """Return the log-probabilities of ``model`` for 300 random tokens, [1, 300, vocabulary]."""
    with torch.no_grad():
        return model(tokens(1, LENGTH)).logits.float().log_softmax(-1)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_quantised_weights_match_sdpa(saved, kind):
    config, tolerance = WEIGHTS[kind]

    def load(**options):
        quantised = {"quantization_config": config(), "dtype": torch.float32}
        return AutoModelForCausalLM.from_pretrained(saved, **quantised, **options).eval()

    require_as_by_sdpa(load, tolerance)


def require_as_by_sdpa(load, tolerance):
    """Assert that a quantised model with "cab" equals sdpa at full budget, and can be sparse.

    ``load`` is a function that takes arguments of ``from_pretrained`` and returns the model.
    """
    dense = log_probabilities(load(attn_implementation="sdpa"))
    model = load(attn_implementation="cab", cab_config=FULL)
    assert (log_probabilities(model) - dense).abs().mean() < tolerance
    cab_hf.apply_cab(model, SPARSE)
    log_probabilities(model)
    assert cab_hf.stats(model)[0]["density"] < 0.95


def test_compiled_torchao_rounding_is_accurate(monkeypatch):
    module = pytest.importorskip("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    names = ("_choose_scale_float8", "_quantize_affine_float8")
    originals = [getattr(module, name) for name in names]
    for name, function in zip(names, originals, strict=True):
        # set the attribute to its own value, so that monkeypatch restores it after the test
        monkeypatch.setattr(module, name, function)
    quantised._compile_rounding.__wrapped__()
    assert all(getattr(module, n) is not each for n, each in zip(names, originals, strict=True))
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
    compress(model, scheme, tmp_path)

    def load(**options):
        return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)

    quantised_result = log_probabilities(load(attn_implementation="sdpa"))
    assert (quantised_result - log_probabilities(tiny_model(**SIZES))).any()
    require_as_by_sdpa(load, tolerance)


def compress(model, scheme, folder):
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
def four_bits():
    """Return the arguments of a `QuantizedCache` with 4 bits by quanto."""
    pytest.importorskip("optimum.quanto")
    return {"backend": "quanto", "nbits": 4, "residual_length": 32}


def test_quantised_cache_does_not_change_sparse_prefill(four_bits):
    model, ids = sparse_model(), tokens(1, LENGTH)
    with torch.no_grad():
        plain, quantised = (
            model(ids, past_key_values=cache).logits
            for cache in (
                DynamicCache(config=model.config),
                QuantizedCache(config=model.config, **four_bits),
            )
        )
    assert torch.equal(plain, quantised)


def test_sparse_decode_with_quantised_cache_warns_and_is_dense(four_bits, monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())
    model, ids = sparse_model(), tokens(1, LENGTH)
    options = {"cache_implementation": "quantized", "cache_config": four_bits}
    options |= {"max_new_tokens": 4, "do_sample": False}
    dense = model.generate(ids, **options)
    with (
        cab_hf.cab(model, sparse_decode=True, decode_tokens=128),
        pytest.warns(UserWarning, match="decode steps are dense.*QuantizedCache"),
    ):
        assert torch.equal(model.generate(ids, **options), dense)
