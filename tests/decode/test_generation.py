"""`generate` with sparse decode: equal to dense attention if every step selects all keys."""

import copy
import re
from functools import partial

import pytest
import torch
from marks import mark_slow_except, skip_before
from tiny import tiny_model, tokens
from tiny_types import causal_types
from tiny_types import tiny_model as tiny_type
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
DENSE_PROMPTS = CabConfig(min_length=2000)
# decode steps select all keys: 0.9999 of the length of a short sequence is rounded up
READ_ALL_KEYS = {"sparse_decode": True, "decode_tokens": 0.9999}
# decode steps select 128 keys
READ_128_KEYS = {"sparse_decode": True, "decode_tokens": 128}
pytestmark = pytest.mark.usefixtures("from_anywhere")


def generate(model, ids, **options):
    torch.manual_seed(4)
    return model.generate(ids, **{"max_new_tokens": 5, "do_sample": False, **options})


def make_plain_cache(model, kind, num_slots):
    """Create a cache as a user would, without cab_hf.

    Args:
        kind: "static" or "dynamic".
        num_slots: slots of a static cache.
    """
    if kind == "static":
        return StaticCache(model.config, max_cache_len=num_slots)
    return DynamicCache(config=model.config)


def index_equals_rebuilt_index(cache):
    """Return True if the index of every layer is bit-identical to one built from all keys."""
    return all(
        all(map(torch.equal, layer.index, decode.index_keys(layer.keys, layer.channels)))
        for layer in cache.layers
    )


STATIC_CACHE = {"cache_implementation": "static"}
# keyword arguments of `generate` by test id
GENERATE_OPTIONS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "sampled-beams": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "several-of-each": {"do_sample": True, "num_return_sequences": 3},
    "chunked": {"prefill_chunk_size": 50},
    "static": STATIC_CACHE,
    "static-beams": STATIC_CACHE | {"num_beams": 3},
    "static-chunked": STATIC_CACHE | {"prefill_chunk_size": 50},
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
WITHOUT_EOS = {"eos_token_id": None, "pad_token_id": 0}


def make_opt_model(dim):
    """Return a random OPT model with head dim ``dim``."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    return OPTForCausalLM(OPTConfig(**sizes, hidden_size=4 * dim)).eval()


def make_cases_reading_all_keys():
    """Yield the parameters of `test_reading_all_keys_generates_dense_tokens`."""

    def make_case(
        name,
        make_model=tiny_model,
        *,
        options=None,
        fields=None,
        padding=0,
        layers=None,
        slow=False,
    ):
        marks = pytest.mark.slow if slow else ()
        options, fields = options or {}, fields or {}
        return pytest.param(make_model, options, fields, padding, layers, id=name, marks=marks)

    all_layer_indices = (0, 1, 2)
    for path, options in GENERATE_OPTIONS.items():
        yield make_case(f"{path}-padded", options=options, padding=21, layers=all_layer_indices)
        yield make_case(path, options=options, layers=all_layer_indices, slow=True)
    for cache, options in {"dynamic": {}, "static": STATIC_CACHE}.items():
        for name, shape in MODEL_FIELDS.items():
            make_model = partial(tiny_model, **shape)
            yield make_case(
                f"{name}-{cache}", make_model, options=options, layers=all_layer_indices
            )
        for name, fields in CASCADE_FIELDS.items():
            yield make_case(
                f"{name}-{cache}", options=options, fields=fields, layers=all_layer_indices
            )
        for dim in (33, 17):
            make_model = partial(make_opt_model, dim)
            yield make_case(f"odd-{dim}-{cache}", make_model, options=options, layers=(0, 1))
        # three hybrid models, whose linear attention layers have no index, and minimax, which
        # creates its own cache
        for model_type in ("falcon_h1", "zamba", "zamba2", "minimax"):
            # minimax accepts no other cache than its own
            if model_type != "minimax" or not options:
                is_slow = model_type not in ("zamba", "minimax")
                without_compile = {"disable_compile": True} if options else {}
                yield make_case(
                    f"{model_type}-{cache}",
                    partial(tiny_type, model_type),
                    options=WITHOUT_EOS | options | without_compile,
                    slow=is_slow,
                )
    for family in ("qwen3", "mistral", "mixtral", "smollm3"):
        yield make_case(family, partial(tiny_model, family), slow=family != "qwen3")
    make_model = partial(tiny_model, "qwen3-some-sliding")
    yield make_case("sliding-window-layers-stay-dense", make_model, layers=(0,))


@pytest.mark.parametrize(
    ("make_model", "options", "fields", "padding", "layers"), make_cases_reading_all_keys()
)
def test_reading_all_keys_generates_dense_tokens(
    make_model, options, fields, padding, layers, steps
):
    """``layers`` are the indices of layers with sparse decode steps; None skips this check."""
    model, ids = make_model(), tokens(2, 130)
    if padding:
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        options = options | {"attention_mask": mask}
    expected = generate(model, ids, **options)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_ALL_KEYS, **fields)
    assert torch.equal(generate(model, ids, **options), expected)
    assert steps == 4 * list(layers) if layers else steps


# settings under which decode steps are dense for the shorter row and sparse for the longer row
MIXED_LENGTH_FIELDS = [
    pytest.param({"min_length": 500, "decode_tokens": 128}, id="min_length"),
    pytest.param({"min_length": 0, "decode_tokens": 128}, id="decode_tokens"),
    pytest.param({"min_length": 500, "decode_tokens": 0.2}, id="share"),
]


@pytest.mark.parametrize("path", ["greedy", "static", "chunked"])
@pytest.mark.parametrize("fields", MIXED_LENGTH_FIELDS)
def test_padded_row_equals_single_row(fields, path, monkeypatch):
    monkeypatch.setattr("cab_hf.decode.step.min_sparse_tokens", min_sparse_tokens)
    model = cab_hf.apply_cab(tiny_model(), sparse_decode=True, mass_threshold=0.0, **fields)
    short_prompt, long_prompt = tokens(1, 300), tokens(1, 700, seed=2)
    ids = torch.cat([F.pad(short_prompt, (400, 0)), long_prompt])
    options = {"output_logits": True, "return_dict_in_generate": True, "min_new_tokens": 5}
    options |= {"disable_compile": True, **GENERATE_OPTIONS[path]}
    batch_result = generate(model, ids, attention_mask=(ids != 0).long(), **options)
    for row, prompt in enumerate((short_prompt, long_prompt)):
        single_result = generate(model, prompt, attention_mask=torch.ones_like(prompt), **options)
        actual, expected = (torch.stack(x.logits) for x in (batch_result, single_result))
        torch.testing.assert_close(actual[:, row], expected[:, 0], atol=1e-4, rtol=1e-4)


@skip_before("5.24", "phi3 creates the second cache outside of the code that adds an index")
@pytest.mark.parametrize("length", [130, 98])
def test_recreated_cache_is_indexed_again(length, steps):
    # Phi-3 drops its cache when the sequence exceeds original_max_position_embeddings
    model, ids = tiny_type("phi3", original_max_position_embeddings=100), tokens(1, length)
    options = WITHOUT_EOS | {"max_new_tokens": 8}
    expected = generate(model, ids, **options)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_ALL_KEYS)
    assert torch.equal(generate(model, ids, **options), expected)
    # the call that creates the cache again is a prefill, so that one decode step less is recorded
    assert len(steps) == (7 if length == 130 else 6) * 4


# model types that `make test` runs; other types are marked as slow
FAST_TYPES = ["llama", "deepseek_v3", "jetmoe", "zaya", "moshi", "exaone4", "recurrent_gemma"]
SLOW_TYPES = [name for name in causal_types() if name not in FAST_TYPES]


@pytest.mark.parametrize(
    "model_type", mark_slow_except(FAST_TYPES + SLOW_TYPES, *range(len(FAST_TYPES)))
)
def test_describe_reports_sparse_decode_support(model_type, steps):
    try:
        model = cab_hf.apply_cab(tiny_type(model_type), DENSE_PROMPTS, **READ_128_KEYS)
        description = re.search(r"decode: (\w+)", cab_hf.describe(model))
        generate(model, tokens(1, 200), **WITHOUT_EOS)
    except Exception as error:  # noqa: BLE001 - some types also fail without cab_hf
        pytest.skip(str(error)[:80])
    assert description[1] == ("sparse" if steps else "dense")


def test_keys_changed_before_attention_warn_and_are_dense(monkeypatch, steps):
    model, ids = tiny_model(), tokens(1, 130)
    expected = generate(model, ids)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_128_KEYS)
    attend = AttentionInterface()["cab"]

    def attend_to_copied_keys(module, q, k, v, mask, **options):
        return attend(module, q, k.clone(), v, mask, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "cab", attend_to_copied_keys)
    monkeypatch.setattr(checks, "_shown_warnings", set())
    with pytest.warns(UserWarning) as caught_warnings:
        assert torch.equal(generate(model, ids), expected)
    messages = [str(warning.message) for warning in caught_warnings]
    assert sum("keys of a step have no index" in message for message in messages) == 1
    assert not steps


@pytest.mark.parametrize("drafts", ["assistant", "prompt-lookup"])
def test_assisted_decoding_crops_index_and_generates_dense_tokens(drafts):
    model, ids = tiny_model(), tokens(1, 40).repeat(1, 3)
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20}
    if drafts == "assistant":
        # the draft model has other weights, so that some drafted tokens are rejected
        assistant = tiny_model(num_hidden_layers=1)
        options = {"assistant_model": assistant, "max_new_tokens": 20}
    expected = generate(model, ids, **options)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_ALL_KEYS)
    cache = cab_hf.index_cache(model)
    actual = generate(model, ids, past_key_values=cache, **options)
    assert torch.equal(actual, expected) and index_equals_rebuilt_index(cache)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_cached_prompt_serves_several_questions(kind, steps):
    model, prompt = tiny_model(), tokens(1, 130)
    questions = [torch.cat([prompt, tokens(1, 5, seed)], dim=1) for seed in (7, 8)]
    expected = [generate(model, ids) for ids in questions]
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_ALL_KEYS)
    cache = cab_hf.index_cache(model, make_plain_cache(model, kind, 150))
    model(prompt, past_key_values=cache)
    for ids, result in zip(questions, expected, strict=True):
        assert torch.equal(generate(model, ids, past_key_values=copy.deepcopy(cache)), result)
    assert len(steps) == 2 * 4 * 3


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_filled_cache_gets_index_of_its_keys(kind, steps):
    model, ids = tiny_model(head_dim=64), tokens(1, 135)
    expected = generate(model, ids)
    cache = make_plain_cache(model, kind, 150)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_ALL_KEYS)
    model(ids[:, :130], past_key_values=cache)
    assert cab_hf.index_cache(model, cache) is cache and index_equals_rebuilt_index(cache)
    assert torch.equal(generate(model, ids, past_key_values=cache), expected)
    assert len(steps) == 4 * 3 and index_equals_rebuilt_index(cache)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_reset_cache_equals_new_cache(kind):
    model, ids = tiny_model(), tokens(1, 130)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_128_KEYS)
    cache = cab_hf.index_cache(model, make_plain_cache(model, kind, 200))
    expected = generate(model, ids, past_key_values=cache)
    cache.reset()
    assert torch.equal(generate(model, ids, past_key_values=cache), expected)
    assert index_equals_rebuilt_index(cache)


def test_user_cache_without_index_is_dense(steps):
    model, ids = tiny_model(), tokens(1, 300)
    expected = generate(model, ids)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_128_KEYS)
    cache = DynamicCache(config=model.config)
    assert torch.equal(generate(model, ids, past_key_values=cache), expected)
    assert not steps and not any(isinstance(x, IndexedDynamicLayer) for x in cache.layers)
    generate(model, ids)
    assert len(steps) == 4 * 3


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_dense_decode_creates_plain_caches(is_static, steps):
    model, ids = tiny_model(), tokens(1, 130)
    options = STATIC_CACHE if is_static else {}
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_ALL_KEYS)
    expected = generate(model, ids, **options)
    steps.clear()
    # turn off sparse decode (no field sparse_decode) before the second call
    cab_hf.apply_cab(model, DENSE_PROMPTS)
    result = generate(model, ids, return_dict_in_generate=True, **options)
    indexed_classes = (IndexedDynamicLayer, IndexedStaticLayer)
    assert not any(isinstance(layer, indexed_classes) for layer in result.past_key_values.layers)
    assert torch.equal(result.sequences, expected) and not steps


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("num_tokens", [70, pytest.param(2000, marks=pytest.mark.slow)])
def test_index_after_generate_equals_rebuilt_index(kind, num_tokens, steps):
    model = tiny_model(num_hidden_layers=2, head_dim=64, max_position_embeddings=4096)
    ids = tokens(1, 140)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_128_KEYS)
    options = (STATIC_CACHE if kind == "static" else {}) | {
        "max_new_tokens": num_tokens,
        "min_new_tokens": num_tokens,
    }
    cache = generate(model, ids, return_dict_in_generate=True, **options).past_key_values
    assert cache.get_seq_length() == 140 + num_tokens - 1
    assert index_equals_rebuilt_index(cache) and len(steps) == 2 * (num_tokens - 1)


def make_recording_backend(graphs, backend):
    """Return a torch.compile backend that appends graphs to ``graphs`` and calls ``backend``."""

    def record_then_compile(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return record_then_compile


def test_generate_compiles_a_static_cache():
    model, ids = tiny_model(head_dim=64), tokens(2, 260)
    options = STATIC_CACHE | {"output_logits": True, "return_dict_in_generate": True}
    dense_result = generate(model, ids, disable_compile=True, **options)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_128_KEYS)
    eager_result = generate(model, ids, disable_compile=True, **options)
    torch._dynamo.reset()
    graphs = []
    compile_config = CompileConfig(
        backend=make_recording_backend(graphs, "aot_eager"), mode=None, fullgraph=True
    )
    compile_config._compile_all_devices = True
    compiled_result = generate(model, ids, compile_config=compile_config, **options)
    assert len(graphs) == 1
    torch.testing.assert_close(compiled_result.logits, eager_result.logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(dense_result.logits[1], eager_result.logits[1], atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("backend", mark_slow_except(["eager", "aot_eager"], 1))
@pytest.mark.parametrize("fields", [{}, {"predictor": "cascade", "anchors": (0,)}])
def test_compiled_step_is_one_graph_and_equals_eager_step(backend, fields):
    model, ids = tiny_model(head_dim=64), tokens(2, 304)
    dense_logits = model(ids).logits[:, 300:]
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_128_KEYS, **fields)

    def run_steps(step):
        cache = cab_hf.index_cache(model, StaticCache(model.config, max_cache_len=320))
        model(ids[:, :300], past_key_values=cache)
        logits = [step(ids[:, i : i + 1], past_key_values=cache).logits for i in range(300, 304)]
        return torch.cat(logits, dim=1), cache.layers[0].index

    expected, index = run_steps(model)
    torch._dynamo.reset()
    graphs = []
    compiled_model = torch.compile(
        model, fullgraph=True, backend=make_recording_backend(graphs, backend)
    )
    actual, compiled_index = run_steps(compiled_model)
    assert len(graphs) == 1
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(compiled_index, index)
    assert not torch.allclose(expected, dense_logits, atol=1e-2)


@torch.no_grad()
def test_sparse_steps_differ_from_dense_and_match_static_cache():
    model, ids = tiny_model(head_dim=64), tokens(2, 301)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_128_KEYS)

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
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_row_does_not_change_other_rows(kind, value, steps):
    model, ids = tiny_model(), tokens(2, 300)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_128_KEYS)
    outputs = []
    for factor in (1.0, value):
        cache = cab_hf.index_cache(model, make_plain_cache(model, kind, 400))
        model(ids, past_key_values=cache)
        embeddings = model.get_input_embeddings()(ids[:, :1])
        embeddings[0] *= factor
        # the second call reads the NaN key from the cache
        outputs.append(
            [model(inputs_embeds=embeddings, past_key_values=cache).logits for _ in range(2)]
        )
    for expected, actual in zip(outputs[0], outputs[1], strict=True):
        assert torch.equal(actual[1], expected[1]) and actual[0].isnan().all()
    assert len(steps) == 2 * 2 * 3


@skip_before("5.24", "older static caches have the dtype of the model under autocast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_dynamic_cache_equals_static_cache(dtype, steps, monkeypatch):
    # with 2 spare slots, the buffers of the dynamic cache also grow during decode steps
    monkeypatch.setattr(cache_layers, "SPARE_TOKENS", 2)
    model, ids = tiny_model(), tokens(2, 300)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_128_KEYS)
    options = {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
    with torch.autocast("cpu", dtype):
        dynamic_result = generate(model, ids, **options)
        static_result = generate(model, ids, cache_implementation="static", **options)
    assert index_equals_rebuilt_index(dynamic_result.past_key_values) and len(steps) == 2 * 4 * 3
    torch.testing.assert_close(dynamic_result.logits, static_result.logits, atol=0.1, rtol=0.1)


@torch.no_grad()
def test_unused_static_cache_slots_do_not_change_logits():
    model, ids = tiny_model(head_dim=64), tokens(2, 301)
    cab_hf.apply_cab(model, DENSE_PROMPTS, **READ_128_KEYS)
    outputs = []
    for unused_value in (0.0, 50.0):
        cache = cab_hf.index_cache(model, StaticCache(model.config, max_cache_len=400))
        model(ids[:, :300], past_key_values=cache)
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values, *layer.index):
                tensor[:, :, 300:] = unused_value
        outputs.append(model(ids[:, 300:], past_key_values=cache).logits)
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("settings", "make_cache", "message"),
    [
        pytest.param(None, None, "attn_implementation must be .*, got 'sdpa'", id="not-on"),
        pytest.param({}, None, "sparse_decode must be True, got False", id="off"),
        pytest.param(
            READ_ALL_KEYS,
            lambda config: EncoderDecoderCache(DynamicCache(), DynamicCache()),
            "cache must be .*, got a EncoderDecoderCache",
            id="two-caches",
        ),
        pytest.param(
            READ_ALL_KEYS, lambda config: (), "cache must be .*, got a tuple", id="no-cache"
        ),
    ],
)
def test_index_cache_with_unsupported_cache_raises(settings, make_cache, message):
    model = tiny_model()
    if settings is not None:
        cab_hf.apply_cab(model, DENSE_PROMPTS, **settings)
    with pytest.raises(ValueError, match=message):
        cab_hf.index_cache(model, None if make_cache is None else make_cache(model.config))
