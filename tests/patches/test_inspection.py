"""`describe`, `stats`, and warnings about settings without effect."""

import pytest
import torch
import transformers
from marks import NEEDS_SERVING
from tiny import FULL_BUDGET_CONFIG, MODEL_SIZES, SPARSE_CONFIG, draw_token_ids, make_tiny_model
from tiny_types import make_tiny_model as make_model_of_type

import cab_hf
from cab_hf import capability, checks
from cab_hf.config import Origin

# `Origin` of a calibration for a model with the shape of `make_tiny_model`
CALIBRATION_ORIGIN = Origin("somebody's", layers=3, heads=6, kv_heads=2, length=4096)


@pytest.fixture
def model():
    return make_tiny_model()


def test_stats_accumulate_until_reset(model):
    cab_hf.apply_cab(model, SPARSE_CONFIG, dense_layers=(1,))
    assert cab_hf.stats(model) == [
        {"layer": layer_index, "density": None} for layer_index in range(3)
    ]
    with torch.no_grad():
        model(draw_token_ids(1, 300))
        stats_after_first_call = cab_hf.stats(model)
        model(draw_token_ids(1, 300))
    # densities are means over calls, so that a repeated call changes nothing
    assert cab_hf.stats(model) == stats_after_first_call
    assert stats_after_first_call[1]["density"] is None
    assert all(0 < stats_after_first_call[layer_index]["density"] < 1 for layer_index in (0, 2))
    cab_hf.stats(model, reset=True)
    assert cab_hf.stats(model)[0]["density"] is None


def test_describe_reports_engine_and_reason_per_layer(model):
    assert "'sdpa'" in cab_hf.describe(model)
    cab_hf.apply_cab(model, SPARSE_CONFIG, dense_layers=(0,), min_length=100)
    description_lines = cab_hf.describe(model, tokens=500).splitlines()
    assert (
        "mass_threshold 0.08" in description_lines[0]
        and "32 x 16" in description_lines[0]
        and "500 tokens" in description_lines[0]
    )
    assert description_lines[1] == "  layer 0: dense, in dense_layers"
    assert description_lines[2] == "  layers 1-2: sparse, engine gather"
    assert "shorter than min_length=100" in cab_hf.describe(model, tokens=99)
    cab_hf.apply_cab(model, sampled_one_in=16, origin=CALIBRATION_ORIGIN)
    training_description = cab_hf.describe(model, tokens=500, training=True)
    assert "sparse, engine reference, 1 in 16 of the other blocks sampled" in training_description
    assert "(calibrated for somebody's at 4,096 tokens):" in training_description
    assert "sampled" not in cab_hf.describe(model, tokens=500, training=False)
    sliding_model = cab_hf.apply_cab(make_tiny_model("qwen3-some-sliding"), SPARSE_CONFIG)
    assert "layers 1-2: dense, sliding window of 40 tokens" in cab_hf.describe(sliding_model)


@pytest.mark.parametrize(
    ("named_capability", "dtype", "expected_text"),
    [
        ((8, 0), torch.bfloat16, "8.0, as CAB_HF_CAPABILITY says; keys scored in bfloat16"),
        ((8, 9), torch.bfloat16, "8.9, as CAB_HF_CAPABILITY says; keys scored in 8 bits"),
        ((0, 0), torch.float16, "not by NVIDIA, as CAB_HF_CAPABILITY says; keys scored in float16"),
    ],
)
def test_describe_names_unmeasured_gpu(monkeypatch, model, named_capability, dtype, expected_text):
    cab_hf.apply_cab(model.to(dtype), SPARSE_CONFIG)
    assert "GPU" not in cab_hf.describe(model)
    monkeypatch.setattr(capability, "CAPABILITY_OVERRIDE", named_capability)
    assert expected_text in cab_hf.describe(model)
    monkeypatch.setattr(capability, "CAPABILITY_OVERRIDE", (9, 0))
    assert "GPU" not in cab_hf.describe(model)


@NEEDS_SERVING
def test_describe_reports_cascade_anchors(model):
    cab_hf.apply_cab(model, SPARSE_CONFIG, predictor="cascade", anchors=(0, 2))
    description_lines = cab_hf.describe(model, tokens=500).splitlines()
    assert "predictor cascade (2 anchors, " in description_lines[0]
    assert description_lines[1:] == [
        "  layer 0: sparse, engine gather, an anchor",
        "  layer 1: sparse, engine gather, the blocks of layer 0",
        "  layer 2: sparse, engine gather, an anchor",
        "  decode: dense",
        "  generate_batch: each sequence by itself, decode dense",
    ]


def test_describe_finds_layers_without_is_causal_attribute():
    config = transformers.CLIPTextConfig(
        **MODEL_SIZES | {"num_hidden_layers": 2, "eos_token_id": 2}, projection_dim=48
    )
    model = transformers.CLIPTextModel(config).eval()
    model.config.cab_config = FULL_BUDGET_CONFIG
    model.set_attn_implementation("cab")
    assert "layers 0-1: sparse" in cab_hf.describe(model, tokens=100)
    with torch.no_grad():
        model(draw_token_ids(1, 100))
    assert cab_hf.stats(model) == [
        {"layer": layer_index, "density": 1.0} for layer_index in range(2)
    ]


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_describe_reports_layers_without_layer_index(model_type):
    model = cab_hf.apply_cab(make_model_of_type(model_type), FULL_BUDGET_CONFIG)
    description_lines = cab_hf.describe(model, tokens=100).splitlines()
    assert description_lines[1].startswith("  layers that occur several times: sparse, ")
    cab_hf.apply_cab(model, predictor="frc", sparsity=((0.5,) * 4,) * 4)
    with pytest.raises(
        ValueError, match="sparsity must be one number for a layer that has no index"
    ):
        model(draw_token_ids(1, 100))


@pytest.mark.parametrize(
    "invalid_arguments", [{"tokens": 0}, {"tokens": 1.5}, {"training": "no"}], ids=str
)
def test_describe_with_invalid_arguments_raises(model, invalid_arguments):
    (argument_name,) = invalid_arguments
    with pytest.raises(ValueError, match=f"{argument_name} must be .*, got "):
        cab_hf.describe(cab_hf.apply_cab(model, SPARSE_CONFIG), **invalid_arguments)


def test_describe_reports_unsupported_layers():
    model = cab_hf.apply_cab(make_tiny_model(), {})
    # `skip_topk` marks a layer that reuses the keys which the indexer of another layer selected
    model.model.layers[1].self_attn.skip_topk = True
    description_lines = cab_hf.describe(model, tokens=200).splitlines()[1:]
    assert description_lines[0] == "  layer 0: dense, input shorter than min_length=16384"
    assert description_lines[1] == "  layer 1: refused, keys chosen by an indexer"


def test_describe_agrees_with_executed_route(model):
    cab_hf.apply_cab(model, SPARSE_CONFIG, dense_layers=(2,))
    with torch.no_grad():
        model(draw_token_ids(1, 200))
    is_layer_sparse = [row["density"] is not None for row in cab_hf.stats(model)]
    assert is_layer_sparse == [True, True, False]
    description = cab_hf.describe(model, tokens=200)
    assert "layers 0-1: sparse" in description and "layer 2: dense" in description


@pytest.fixture
def find_warnings(monkeypatch, recwarn):
    """Return a function that takes a string and returns the warnings that contain the string."""
    monkeypatch.setattr(checks, "_shown_warning_keys", set())
    return lambda message_part: [
        str(warning.message) for warning in recwarn if message_part in str(warning.message)
    ]


def test_unused_saved_settings_warn_once(model, tmp_path, find_warnings):
    model.config.cab_config = SPARSE_CONFIG.to_dict()
    model.save_pretrained(tmp_path / "own")

    def load_model(**load_options):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own", **load_options)

    for implementation in ("cab", "cab_dense", "sdpa", "eager"):
        load_model(attn_implementation=implementation)
    assert not find_warnings("has a cab_config")
    for _ in range(2):
        load_model()
    (warning_message,) = find_warnings("has a cab_config")
    assert warning_message.startswith("The config of own has a cab_config, which nothing uses")
    assert "attn_implementation='cab'" in warning_message


def switch_by_apply_cab(model, min_length):
    cab_hf.apply_cab(model, min_length=min_length)


def switch_by_cab_block(model, min_length):
    with cab_hf.cab(model, min_length=min_length):
        pass


def switch_by_transformers(model, min_length):
    model.config.cab_config = {"min_length": min_length}
    model.set_attn_implementation("cab")
    with torch.no_grad():
        model(draw_token_ids(1, 40))


SWITCH_FUNCTIONS = [switch_by_apply_cab, switch_by_cab_block, switch_by_transformers]


@pytest.mark.parametrize("switch_model", SWITCH_FUNCTIONS)
def test_model_that_is_always_dense_warns_once(model, find_warnings, switch_model):
    switch_model(model, 8192)
    (warning_message,) = find_warnings("positions")
    assert warning_message.startswith(
        "llama has 2,048 positions and min_length is 8,192, so 'cab' "
    )
    assert 'Set cab_config={"min_length": 1024}' in warning_message
    # calling apply_cab again with the same settings does not warn again
    for switch_again in SWITCH_FUNCTIONS:
        switch_again(model, 8192)
    assert len(find_warnings("positions")) == 1
    # other settings cause another warning
    switch_model(model, 4096)
    assert len(find_warnings("positions")) == 2


def prefill(model):
    model(draw_token_ids(1, 50))


def generate(model):
    model.generate(draw_token_ids(1, 50), max_new_tokens=3, do_sample=False)


def prefill_one_token(model):
    model(draw_token_ids(1, 1))


def prefill_after_dense_chunk(model):
    model.set_attn_implementation("cab_dense")
    cache = model(draw_token_ids(1, 50)).past_key_values
    model.set_attn_implementation("cab")
    model(draw_token_ids(1, 50), past_key_values=cache)


def prefill_packed(model):
    model(draw_token_ids(1, 100), position_ids=torch.arange(50).repeat(2)[None])


def prefill_compiled(model):
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend="eager")(draw_token_ids(1, 50))


def prefill_by_cab_dense(model):
    model.set_attn_implementation("cab_dense")
    prefill(model)


LINEAR_ROPE_FIELDS = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("use_model", "config_changes", "min_length"),
    [
        *((switch, {}, 2048) for switch in SWITCH_FUNCTIONS),
        *((switch, LINEAR_ROPE_FIELDS, 8192) for switch in SWITCH_FUNCTIONS),
        # "cab_dense" and compiled models do not warn either
        (prefill_by_cab_dense, {}, None),
        (prefill_compiled, {}, None),
    ],
)
def test_sparse_or_intentionally_dense_model_does_not_warn(
    find_warnings, use_model, config_changes, min_length
):
    model = make_tiny_model(**config_changes)
    if min_length is None:
        model.set_attn_implementation("cab")
        use_model(model)
    else:
        use_model(model, min_length)
    assert not find_warnings("positions")


@pytest.mark.parametrize(
    ("use_model", "cab_settings", "should_warn"),
    [
        (prefill, {}, True),
        (generate, {}, True),
        (prefill_packed, {}, True),
        (generate, {"min_length": 16383}, False),
        (generate, {"min_length": 0}, False),
        (prefill_one_token, {}, False),
        (prefill_after_dense_chunk, {}, False),
        (prefill_compiled, {}, False),
        (prefill_by_cab_dense, {}, False),
    ],
)
def test_prompt_below_min_length_warns_once(find_warnings, use_model, cab_settings, should_warn):
    model = make_tiny_model(max_position_embeddings=32768, num_hidden_layers=1)
    cab_hf.apply_cab(model, cab_settings)
    with torch.no_grad():
        for _ in range(2 if should_warn else 1):
            use_model(model)
    warning_messages = find_warnings("min_length")
    assert len(warning_messages) == (1 if should_warn else 0)
    for warning_message in warning_messages:
        assert warning_message.startswith(
            "llama reads 50 tokens and min_length is 16,384, so 'cab' "
        )
