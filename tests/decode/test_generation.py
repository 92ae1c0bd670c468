"""`generate` with sparse decode: equal to dense attention if every step selects all keys."""

import copy
import re
from functools import partial

import pytest
import torch
from marks import mark_slow_except, skip_before_transformers
from tiny import draw_token_ids, make_tiny_model
from tiny_types import list_causal_types
from tiny_types import make_tiny_model as make_model_of_type
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    CompileConfig,
    DynamicCache,
    EncoderDecoderCache,
    OPTConfig,
    OPTForCausalLM,
    StaticCache,
)

import cab_hf
from cab_hf import CabConfig, checks
from cab_hf.decode import cache as cache_layers
from cab_hf.decode.cache import IndexedDynamicLayer, IndexedStaticLayer
from cab_hf.decode.step import min_sparse_tokens
from cab_hf.ops import decode

# the prompts of this module are shorter than min_length, so that prefill is dense
DENSE_PREFILL_CONFIG = CabConfig(min_length=2000)
# decode steps select all keys: 0.9999 of the length of a short sequence is rounded up
READ_ALL_KEYS_FIELDS = {"sparse_decode": True, "decode_tokens": 0.9999}
# decode steps select 128 keys
READ_128_KEYS_FIELDS = {"sparse_decode": True, "decode_tokens": 128}
pytestmark = pytest.mark.usefixtures("zero_min_length")


def generate(model, ids, **generate_options):
    torch.manual_seed(4)
    return model.generate(ids, **{"max_new_tokens": 5, "do_sample": False, **generate_options})


def make_plain_cache(model, cache_kind, num_slots):
    """Create a cache as a user would, without cab_hf.

    Args:
        cache_kind: "static" or "dynamic".
        num_slots: slots of a static cache.
    """
    if cache_kind == "static":
        return StaticCache(model.config, max_cache_len=num_slots)
    return DynamicCache(config=model.config)


def index_equals_rebuilt_index(cache):
    """Return True if the index of every layer is bit-identical to one built from all keys."""
    return all(
        all(map(torch.equal, layer.index, decode.index_keys(layer.keys, layer.channels)))
        for layer in cache.layers
    )


STATIC_CACHE_OPTIONS = {"cache_implementation": "static"}
# keyword arguments of `generate` by test id
GENERATE_OPTIONS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "sampled-beams": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "several-of-each": {"do_sample": True, "num_return_sequences": 3},
    "chunked": {"prefill_chunk_size": 50},
    "static": STATIC_CACHE_OPTIONS,
    "static-beams": STATIC_CACHE_OPTIONS | {"num_beams": 3},
    "static-chunked": STATIC_CACHE_OPTIONS | {"prefill_chunk_size": 50},
}
# config fields of the model by test id
MODEL_FIELDS = {
    "groups-of-3": {},
    "groups-of-1": {"num_key_value_heads": 6},
    "groups-of-4": {"num_attention_heads": 8},
    "half-of-the-channels": {"head_dim": 64},
}
# fields of CabConfig with which layers reuse the keys that an anchor layer selected
CASCADE_FIELDS = {
    "cascade": {"predictor": "cascade", "anchors": (0, 2)},
    "mapped": {"predictor": "cascade", "anchors": (0,), "head_map": ((5, 4, 3, 2, 1, 0),) * 3},
}
NO_EOS_OPTIONS = {"eos_token_id": None, "pad_token_id": 0}


def make_opt_model(head_dim):
    """Return a random OPT model with head dim ``head_dim``."""
    torch.manual_seed(0)
    config_fields = {
        "vocab_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
    }
    return OPTForCausalLM(OPTConfig(**config_fields, hidden_size=4 * head_dim)).eval()


def make_cases_reading_all_keys():
    """Yield the parameters of `test_reading_all_keys_generates_dense_tokens`."""

    def make_case(
        case_name,
        make_model=make_tiny_model,
        *,
        generate_options=None,
        config_fields=None,
        num_padding_tokens=0,
        layer_indices=None,
        is_slow=False,
    ):
        marks = pytest.mark.slow if is_slow else ()
        generate_options, config_fields = generate_options or {}, config_fields or {}
        return pytest.param(
            make_model,
            generate_options,
            config_fields,
            num_padding_tokens,
            layer_indices,
            id=case_name,
            marks=marks,
        )

    all_layer_indices = (0, 1, 2)
    for options_name, generate_options in GENERATE_OPTIONS.items():
        yield make_case(
            f"{options_name}-padded",
            generate_options=generate_options,
            num_padding_tokens=21,
            layer_indices=all_layer_indices,
        )
        yield make_case(
            options_name,
            generate_options=generate_options,
            layer_indices=all_layer_indices,
            is_slow=True,
        )
    for cache_kind, generate_options in {"dynamic": {}, "static": STATIC_CACHE_OPTIONS}.items():
        for case_name, model_fields in MODEL_FIELDS.items():
            make_model = partial(make_tiny_model, **model_fields)
            yield make_case(
                f"{case_name}-{cache_kind}",
                make_model,
                generate_options=generate_options,
                layer_indices=all_layer_indices,
            )
        for case_name, config_fields in CASCADE_FIELDS.items():
            yield make_case(
                f"{case_name}-{cache_kind}",
                generate_options=generate_options,
                config_fields=config_fields,
                layer_indices=all_layer_indices,
            )
        for head_dim in (33, 17):
            make_model = partial(make_opt_model, head_dim)
            yield make_case(
                f"odd-{head_dim}-{cache_kind}",
                make_model,
                generate_options=generate_options,
                layer_indices=(0, 1),
            )
        # three hybrid models, whose linear attention layers have no index, and minimax, which
        # creates its own cache
        for model_type in ("falcon_h1", "zamba", "zamba2", "minimax"):
            # minimax accepts no other cache than its own
            if model_type != "minimax" or not generate_options:
                is_slow = model_type not in ("zamba", "minimax")
                compile_options = {"disable_compile": True} if generate_options else {}
                yield make_case(
                    f"{model_type}-{cache_kind}",
                    partial(make_model_of_type, model_type),
                    generate_options=NO_EOS_OPTIONS | generate_options | compile_options,
                    is_slow=is_slow,
                )
    for family in ("qwen3", "mistral", "mixtral", "smollm3"):
        yield make_case(family, partial(make_tiny_model, family), is_slow=family != "qwen3")
    make_model = partial(make_tiny_model, "qwen3-some-sliding")
    yield make_case("sliding-window-layers-stay-dense", make_model, layer_indices=(0,))


@pytest.mark.parametrize(
    ("make_model", "generate_options", "config_fields", "num_padding_tokens", "layer_indices"),
    make_cases_reading_all_keys(),
)
def test_reading_all_keys_generates_dense_tokens(
    make_model,
    generate_options,
    config_fields,
    num_padding_tokens,
    layer_indices,
    sparse_step_layers,
):
    """``layer_indices`` are those of layers with sparse decode steps; None skips this check."""
    model, ids = make_model(), draw_token_ids(2, 130)
    if num_padding_tokens:
        mask = torch.ones_like(ids)
        mask[0, :num_padding_tokens] = 0
        generate_options = generate_options | {"attention_mask": mask}
    expected = generate(model, ids, **generate_options)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_ALL_KEYS_FIELDS, **config_fields)
    assert torch.equal(generate(model, ids, **generate_options), expected)
    assert sparse_step_layers == 4 * list(layer_indices) if layer_indices else sparse_step_layers


# settings under which decode steps are dense for the shorter row and sparse for the longer row
MIXED_LENGTH_FIELDS = [
    pytest.param({"min_length": 500, "decode_tokens": 128}, id="min_length"),
    pytest.param({"min_length": 0, "decode_tokens": 128}, id="decode_tokens"),
    pytest.param({"min_length": 500, "decode_tokens": 0.2}, id="share"),
]


@pytest.mark.parametrize("options_name", ["greedy", "static", "chunked"])
@pytest.mark.parametrize("config_fields", MIXED_LENGTH_FIELDS)
def test_padded_row_equals_single_row(config_fields, options_name, monkeypatch):
    monkeypatch.setattr("cab_hf.decode.step.min_sparse_tokens", min_sparse_tokens)
    model = cab_hf.apply_cab(
        make_tiny_model(), sparse_decode=True, mass_threshold=0.0, **config_fields
    )
    short_prompt, long_prompt = draw_token_ids(1, 300), draw_token_ids(1, 700, seed=2)
    ids = torch.cat([F.pad(short_prompt, (400, 0)), long_prompt])
    generate_options = {"output_logits": True, "return_dict_in_generate": True, "min_new_tokens": 5}
    generate_options |= {"disable_compile": True, **GENERATE_OPTIONS[options_name]}
    batch_result = generate(model, ids, attention_mask=(ids != 0).long(), **generate_options)
    for row, prompt in enumerate((short_prompt, long_prompt)):
        single_result = generate(
            model, prompt, attention_mask=torch.ones_like(prompt), **generate_options
        )
        actual, expected = (torch.stack(x.logits) for x in (batch_result, single_result))
        torch.testing.assert_close(actual[:, row], expected[:, 0], atol=1e-4, rtol=1e-4)


@skip_before_transformers(
    "5.24", "phi3 creates the second cache outside of the code that adds an index"
)
@pytest.mark.parametrize("length", [130, 98])
def test_recreated_cache_is_indexed_again(length, sparse_step_layers):
    # Phi-3 drops its cache when the sequence exceeds original_max_position_embeddings
    model, ids = (
        make_model_of_type("phi3", original_max_position_embeddings=100),
        draw_token_ids(1, length),
    )
    generate_options = NO_EOS_OPTIONS | {"max_new_tokens": 8}
    expected = generate(model, ids, **generate_options)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_ALL_KEYS_FIELDS)
    assert torch.equal(generate(model, ids, **generate_options), expected)
    # the call that creates the cache again is a prefill, so that one decode step less is recorded
    assert len(sparse_step_layers) == (7 if length == 130 else 6) * 4


# model types that `make test` runs; other types are marked as slow
FAST_MODEL_TYPES = ["llama", "deepseek_v3", "jetmoe", "zaya", "moshi", "exaone4", "recurrent_gemma"]
SLOW_MODEL_TYPES = [name for name in list_causal_types() if name not in FAST_MODEL_TYPES]


@pytest.mark.parametrize(
    "model_type",
    mark_slow_except(FAST_MODEL_TYPES + SLOW_MODEL_TYPES, *range(len(FAST_MODEL_TYPES))),
)
def test_describe_reports_sparse_decode_support(model_type, sparse_step_layers):
    try:
        model = cab_hf.apply_cab(
            make_model_of_type(model_type), DENSE_PREFILL_CONFIG, **READ_128_KEYS_FIELDS
        )
        description = re.search(r"decode: (\w+)", cab_hf.describe(model))
        generate(model, draw_token_ids(1, 200), **NO_EOS_OPTIONS)
    except Exception as error:  # noqa: BLE001 - some types also fail without cab_hf
        pytest.skip(str(error)[:80])
    assert description[1] == ("sparse" if sparse_step_layers else "dense")


def test_keys_changed_before_attention_warn_and_are_dense(monkeypatch, sparse_step_layers):
    model, ids = make_tiny_model(), draw_token_ids(1, 130)
    expected = generate(model, ids)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_128_KEYS_FIELDS)
    attend = AttentionInterface()["cab"]

    def attend_to_copied_keys(module, q, k, v, mask, **generate_options):
        return attend(module, q, k.clone(), v, mask, **generate_options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "cab", attend_to_copied_keys)
    monkeypatch.setattr(checks, "_shown_warning_keys", set())
    with pytest.warns(UserWarning) as caught_warnings:
        assert torch.equal(generate(model, ids), expected)
    messages = [str(warning.message) for warning in caught_warnings]
    assert sum("keys of a step have no index" in message for message in messages) == 1
    assert not sparse_step_layers


@pytest.mark.parametrize("draft_source", ["assistant", "prompt-lookup"])
def test_assisted_decoding_crops_index_and_generates_dense_tokens(draft_source):
    model, ids = make_tiny_model(), draw_token_ids(1, 40).repeat(1, 3)
    generate_options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20}
    if draft_source == "assistant":
        # the draft model has other weights, so that some drafted tokens are rejected
        assistant = make_tiny_model(num_hidden_layers=1)
        generate_options = {"assistant_model": assistant, "max_new_tokens": 20}
    expected = generate(model, ids, **generate_options)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_ALL_KEYS_FIELDS)
    cache = cab_hf.index_cache(model)
    actual = generate(model, ids, past_key_values=cache, **generate_options)
    assert torch.equal(actual, expected) and index_equals_rebuilt_index(cache)


@torch.no_grad()
@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
def test_copies_of_prefilled_cache_generate_dense_tokens(cache_kind, sparse_step_layers):
    model, prompt = make_tiny_model(), draw_token_ids(1, 130)
    questions = [torch.cat([prompt, draw_token_ids(1, 5, seed)], dim=1) for seed in (7, 8)]
    expected = [generate(model, ids) for ids in questions]
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_ALL_KEYS_FIELDS)
    cache = cab_hf.index_cache(model, make_plain_cache(model, cache_kind, 150))
    model(prompt, past_key_values=cache)
    for ids, expected_ids in zip(questions, expected, strict=True):
        assert torch.equal(generate(model, ids, past_key_values=copy.deepcopy(cache)), expected_ids)
    assert len(sparse_step_layers) == 2 * 4 * 3


@torch.no_grad()
@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
def test_filled_cache_gets_index_of_its_keys(cache_kind, sparse_step_layers):
    model, ids = make_tiny_model(head_dim=64), draw_token_ids(1, 135)
    expected = generate(model, ids)
    cache = make_plain_cache(model, cache_kind, 150)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_ALL_KEYS_FIELDS)
    model(ids[:, :130], past_key_values=cache)
    assert cab_hf.index_cache(model, cache) is cache and index_equals_rebuilt_index(cache)
    assert torch.equal(generate(model, ids, past_key_values=cache), expected)
    assert len(sparse_step_layers) == 4 * 3 and index_equals_rebuilt_index(cache)


@torch.no_grad()
@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
def test_reset_cache_equals_new_cache(cache_kind):
    model, ids = make_tiny_model(), draw_token_ids(1, 130)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_128_KEYS_FIELDS)
    cache = cab_hf.index_cache(model, make_plain_cache(model, cache_kind, 200))
    expected = generate(model, ids, past_key_values=cache)
    cache.reset()
    assert torch.equal(generate(model, ids, past_key_values=cache), expected)
    assert index_equals_rebuilt_index(cache)


def test_user_cache_without_index_is_dense(sparse_step_layers):
    model, ids = make_tiny_model(), draw_token_ids(1, 300)
    expected = generate(model, ids)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_128_KEYS_FIELDS)
    cache = DynamicCache(config=model.config)
    assert torch.equal(generate(model, ids, past_key_values=cache), expected)
    assert not sparse_step_layers and not any(
        isinstance(x, IndexedDynamicLayer) for x in cache.layers
    )
    generate(model, ids)
    assert len(sparse_step_layers) == 4 * 3


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_dense_decode_creates_plain_caches(is_static, sparse_step_layers):
    model, ids = make_tiny_model(), draw_token_ids(1, 130)
    generate_options = STATIC_CACHE_OPTIONS if is_static else {}
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_ALL_KEYS_FIELDS)
    expected = generate(model, ids, **generate_options)
    sparse_step_layers.clear()
    # turn off sparse decode (no field sparse_decode) before the second call
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG)
    result = generate(model, ids, return_dict_in_generate=True, **generate_options)
    indexed_classes = (IndexedDynamicLayer, IndexedStaticLayer)
    assert not any(isinstance(layer, indexed_classes) for layer in result.past_key_values.layers)
    assert torch.equal(result.sequences, expected) and not sparse_step_layers


@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
@pytest.mark.parametrize("num_tokens", [70, pytest.param(2000, marks=pytest.mark.slow)])
def test_index_after_generate_equals_rebuilt_index(cache_kind, num_tokens, sparse_step_layers):
    model = make_tiny_model(num_hidden_layers=2, head_dim=64, max_position_embeddings=4096)
    ids = draw_token_ids(1, 140)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_128_KEYS_FIELDS)
    generate_options = (STATIC_CACHE_OPTIONS if cache_kind == "static" else {}) | {
        "max_new_tokens": num_tokens,
        "min_new_tokens": num_tokens,
    }
    cache = generate(model, ids, return_dict_in_generate=True, **generate_options).past_key_values
    assert cache.get_seq_length() == 140 + num_tokens - 1
    assert index_equals_rebuilt_index(cache) and len(sparse_step_layers) == 2 * (num_tokens - 1)


def make_recording_backend(graphs, backend_name):
    """Return a torch.compile backend that appends graphs to ``graphs`` and then compiles them."""

    def record_then_compile(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend_name)(graph, inputs)

    return record_then_compile


def test_generate_compiles_a_static_cache():
    model, ids = make_tiny_model(head_dim=64), draw_token_ids(2, 260)
    generate_options = STATIC_CACHE_OPTIONS | {
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    dense_result = generate(model, ids, disable_compile=True, **generate_options)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_128_KEYS_FIELDS)
    eager_result = generate(model, ids, disable_compile=True, **generate_options)
    torch._dynamo.reset()
    graphs = []
    compile_config = CompileConfig(
        backend=make_recording_backend(graphs, "aot_eager"), mode=None, fullgraph=True
    )
    compile_config._compile_all_devices = True
    compiled_result = generate(model, ids, compile_config=compile_config, **generate_options)
    assert len(graphs) == 1
    torch.testing.assert_close(compiled_result.logits, eager_result.logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(dense_result.logits[1], eager_result.logits[1], atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("backend_name", mark_slow_except(["eager", "aot_eager"], 1))
@pytest.mark.parametrize("config_fields", [{}, {"predictor": "cascade", "anchors": (0,)}])
def test_compiled_step_is_one_graph_and_equals_eager_step(backend_name, config_fields):
    model, ids = make_tiny_model(head_dim=64), draw_token_ids(2, 304)
    dense_logits = model(ids).logits[:, 300:]
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_128_KEYS_FIELDS, **config_fields)

    def run_steps(forward):
        cache = cab_hf.index_cache(model, StaticCache(model.config, max_cache_len=320))
        model(ids[:, :300], past_key_values=cache)
        logits = [forward(ids[:, i : i + 1], past_key_values=cache).logits for i in range(300, 304)]
        return torch.cat(logits, dim=1), cache.layers[0].index

    expected, key_index = run_steps(model)
    torch._dynamo.reset()
    graphs = []
    compiled_model = torch.compile(
        model, fullgraph=True, backend=make_recording_backend(graphs, backend_name)
    )
    actual, compiled_index = run_steps(compiled_model)
    assert len(graphs) == 1
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(compiled_index, key_index)
    assert not torch.allclose(expected, dense_logits, atol=1e-2)


@torch.no_grad()
def test_sparse_steps_differ_from_dense_and_match_static_cache():
    model, ids = make_tiny_model(head_dim=64), draw_token_ids(2, 301)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_128_KEYS_FIELDS)

    def run_sparse_step(cache):
        cache = cab_hf.index_cache(model, cache)
        model(ids[:, :300], past_key_values=cache)
        return model(ids[:, 300:], past_key_values=cache).logits

    dynamic_logits = run_sparse_step(None)
    static_logits = run_sparse_step(StaticCache(model.config, max_cache_len=400))
    torch.testing.assert_close(dynamic_logits, static_logits, atol=1e-5, rtol=1e-5)
    dense_logits = model(ids, use_cache=False).logits[:, -1:]
    assert not torch.allclose(dynamic_logits, dense_logits, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
@pytest.mark.parametrize("nonfinite_value", [float("nan"), float("inf")])
def test_nan_row_does_not_change_other_rows(cache_kind, nonfinite_value, sparse_step_layers):
    model, ids = make_tiny_model(), draw_token_ids(2, 300)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_128_KEYS_FIELDS)
    logits_of_runs = []
    for factor in (1.0, nonfinite_value):
        cache = cab_hf.index_cache(model, make_plain_cache(model, cache_kind, 400))
        model(ids, past_key_values=cache)
        embeddings = model.get_input_embeddings()(ids[:, :1])
        embeddings[0] *= factor
        # the second call reads the NaN key from the cache
        logits_of_runs.append(
            [model(inputs_embeds=embeddings, past_key_values=cache).logits for _ in range(2)]
        )
    for expected, actual in zip(logits_of_runs[0], logits_of_runs[1], strict=True):
        assert torch.equal(actual[1], expected[1]) and actual[0].isnan().all()
    assert len(sparse_step_layers) == 2 * 2 * 3


@skip_before_transformers("5.24", "older static caches have the dtype of the model under autocast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_dynamic_cache_equals_static_cache(dtype, sparse_step_layers, monkeypatch):
    # with 2 spare slots, the buffers of the dynamic cache also grow during decode steps
    monkeypatch.setattr(cache_layers, "BUFFER_GROWTH_TOKENS", 2)
    model, ids = make_tiny_model(), draw_token_ids(2, 300)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_128_KEYS_FIELDS)
    generate_options = {
        "output_logits": True,
        "return_dict_in_generate": True,
        "disable_compile": True,
    }
    with torch.autocast("cpu", dtype):
        dynamic_result = generate(model, ids, **generate_options)
        static_result = generate(model, ids, cache_implementation="static", **generate_options)
    assert (
        index_equals_rebuilt_index(dynamic_result.past_key_values)
        and len(sparse_step_layers) == 2 * 4 * 3
    )
    torch.testing.assert_close(dynamic_result.logits, static_result.logits, atol=0.1, rtol=0.1)


@torch.no_grad()
def test_unused_static_cache_slots_do_not_change_logits():
    model, ids = make_tiny_model(head_dim=64), draw_token_ids(2, 301)
    cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **READ_128_KEYS_FIELDS)
    logits_of_runs = []
    for value_of_unused_slots in (0.0, 50.0):
        cache = cab_hf.index_cache(model, StaticCache(model.config, max_cache_len=400))
        model(ids[:, :300], past_key_values=cache)
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values, *layer.index):
                tensor[:, :, 300:] = value_of_unused_slots
        logits_of_runs.append(model(ids[:, 300:], past_key_values=cache).logits)
    assert torch.equal(logits_of_runs[0], logits_of_runs[1])


@pytest.mark.parametrize(
    ("config_fields", "make_cache", "error_pattern"),
    [
        pytest.param(None, None, "attn_implementation must be .*, got 'sdpa'", id="not-on"),
        pytest.param({}, None, "sparse_decode must be True, got False", id="off"),
        pytest.param(
            READ_ALL_KEYS_FIELDS,
            lambda config: EncoderDecoderCache(DynamicCache(), DynamicCache()),
            "cache must be .*, got a EncoderDecoderCache",
            id="two-caches",
        ),
        pytest.param(
            READ_ALL_KEYS_FIELDS, lambda config: (), "cache must be .*, got a tuple", id="no-cache"
        ),
    ],
)
def test_index_cache_with_unsupported_cache_raises(config_fields, make_cache, error_pattern):
    model = make_tiny_model()
    if config_fields is not None:
        cab_hf.apply_cab(model, DENSE_PREFILL_CONFIG, **config_fields)
    with pytest.raises(ValueError, match=error_pattern):
        cab_hf.index_cache(model, None if make_cache is None else make_cache(model.config))
