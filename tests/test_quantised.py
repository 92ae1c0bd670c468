"""Models with quantised weights, and quantised KV caches, on "cab"."""

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
# four bits have blocks of 64 weights
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 64}
# warnings of libraries
pytestmark = pytest.mark.filterwarnings("ignore")


def torchao(name):
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(getattr(quantization, name)())


def bitsandbytes(**options):
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**options)


def quanto():
    pytest.importorskip("optimum.quanto")
    return QuantoConfig(weights="int8")


# name -> (config, tolerance of log-probabilities; larger if activations are quantised)
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
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(**SIZES).save_pretrained(folder)
    return folder


def sparse_model():
    model = tiny_model(**SIZES)
    cab_hf.apply_cab(model, SPARSE)
    return model


def answers(model):
    with torch.no_grad():
        return model(tokens(1, LENGTH)).logits.float().log_softmax(-1)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_quantised_weights_match_sdpa(saved, kind):
    config, apart = WEIGHTS[kind]

    def loaded(**options):
        quantised = {"quantization_config": config(), "dtype": torch.float32}
        return AutoModelForCausalLM.from_pretrained(saved, **quantised, **options).eval()

    require_as_by_sdpa(loaded, apart)


def require_as_by_sdpa(loaded, apart):
    dense = answers(loaded(attn_implementation="sdpa"))
    model = loaded(attn_implementation="cab", cab_config=FULL)
    assert (answers(model) - dense).abs().mean() < apart
    cab_hf.apply_cab(model, SPARSE)
    answers(model)
    assert cab_hf.stats(model)[0]["density"] < 0.95


def test_compiled_torchao_rounding_is_accurate(monkeypatch):
    place = pytest.importorskip("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    names = ("_choose_scale_float8", "_quantize_affine_float8")
    before = [getattr(place, name) for name in names]
    for name, function in zip(names, before, strict=True):
        # monkeypatch restores the functions after the test
        monkeypatch.setattr(place, name, function)
    quantised._compile_rounding.__wrapped__()
    assert all(getattr(place, n) is not each for n, each in zip(names, before, strict=True))
    for shape in ((1, 300, 256), (1, 200, 256), (1, 200, 96)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        rounded = place.Float8Tensor.from_hp(x)
        assert rounded.qdata.dtype == torch.float8_e4m3fn
        scale = x.abs().amax(-1, keepdim=True).float() / 448
        torch.testing.assert_close(rounded.scale, scale, rtol=2**-8, atol=0)
        # three mantissa bits
        close = {"rtol": 2**-4, "atol": 2**-10 * scale.max().item()}
        torch.testing.assert_close(rounded.qdata.float() * rounded.scale, x.float(), **close)


# of which activations are rounded too where both have 8 bits
@pytest.mark.parametrize(("scheme", "apart"), [("W4A16", 1e-4), ("W8A8", 0.05)])
def test_compressed_weights_match_sdpa(tmp_path, scheme, apart):
    pytest.importorskip("compressed_tensors")
    model = tiny_model(**SIZES)
    compress(model, scheme, tmp_path)

    def loaded(**options):
        return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)

    assert (answers(loaded(attn_implementation="sdpa")) - answers(tiny_model(**SIZES))).any()
    require_as_by_sdpa(loaded, apart)


def compress(model, scheme, folder):
    """Save a model as llm-compressor would, with scales of the extremes of its weights."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    group = preset_name_to_scheme(scheme, ["Linear"])
    if group.weights.group_size:
        # the model is narrower than groups usually are
        group.weights.group_size = SIZES["hidden_size"]
    config = QuantizationConfig(config_groups={"all": group}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            how = layer.quantization_scheme.weights
            groups = layer.weight.detach().unflatten(1, (-1, how.group_size or layer.in_features))
            scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), how)
            layer.weight_scale.data.copy_(scale)
            if hasattr(layer, "weight_zero_point"):
                layer.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.fixture
def four_bits():
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
    given = {"cache_implementation": "quantized", "cache_config": four_bits}
    given |= {"max_new_tokens": 4, "do_sample": False}
    dense = model.generate(ids, **given)
    with (
        cab_hf.cab(model, sparse_decode=True, decode_tokens=128),
        pytest.warns(UserWarning, match="decode steps are dense.*QuantizedCache"),
    ):
        assert torch.equal(model.generate(ids, **given), dense)
