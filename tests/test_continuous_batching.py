"""Continuous batching equals generation of one prompt at a time; unsupported models raise."""

import dataclasses
import warnings

import pytest
import torch
import transformers
from batching_cases import (
    BATCHING_OPTIONS,
    BLOCK_TABLE_OPTIONS,
    GREEDY_GENERATION_CONFIG,
    LOW_THRESHOLD_CONFIG,
    PROMPTS,
    apply_config,
    generate_batched,
    generate_one_by_one,
    list_attention_implementations,
    make_batching_config,
    record_routes,
)
from marks import mark_slow_except
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_llava, make_tiny_model
from transformers import GenerationConfig
from transformers.cli.serving.model_manager import ModelManager
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestState

import cab_hf
from cab_hf import checks
from cab_hf.batching import batch, support
from cab_hf.config import IMPLEMENTATION_NAMES

cache_allocators = pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators.full_attention",
    reason="this version of transformers is too old for continuous batching",
)


@pytest.mark.parametrize("batching_options", BATCHING_OPTIONS.values(), ids=BATCHING_OPTIONS)
@pytest.mark.parametrize(
    ("family", "implementation"),
    mark_slow_except(
        [("llama", "cab"), ("qwen3", "cab"), ("llama", "cab_dense"), ("granite-swa", "cab")],
        *(0, 1, 2),
    ),
)
def test_full_budget_equals_dense_attention(family, implementation, batching_options):
    model_fields = {"layer_types": ["full_attention"] * 3} if family == "granite-swa" else {}
    model = make_tiny_model(family, **model_fields)
    expected_tokens = generate_one_by_one(model)
    apply_config(model).set_attn_implementation(implementation)
    assert generate_batched(model, **batching_options) == expected_tokens


@pytest.mark.parametrize("batching_options", BATCHING_OPTIONS.values(), ids=BATCHING_OPTIONS)
def test_decode_steps_read_pages_without_gather(batching_options, monkeypatch):
    """Count gathered keys: decode steps must read pages in place, and prompts gather their keys."""
    monkeypatch.setattr(batch.decode, "has_kernels", lambda *_: True)
    model, num_keys_of_updates = make_tiny_model(), []
    expected_tokens = generate_one_by_one(model)
    original_update = cache_allocators.FullAttentionCacheAllocator.update

    def record_update(self, keys, values, layer, read, write):
        num_keys_of_updates.append((len(read), len(write)))
        # transformers calls this method with positional arguments
        return original_update(self, keys, values, layer, read, write)

    monkeypatch.setattr(cache_allocators.FullAttentionCacheAllocator, "update", record_update)
    assert generate_batched(apply_config(model), **batching_options) == expected_tokens
    if "max_blocks_per_request" not in batching_options:
        # batches of decode steps gather no keys; other batches gather the keys of their prompts
        max_length = max(map(len, PROMPTS))
        assert all(
            num_read_keys == 0
            for num_read_keys, num_written_keys in num_keys_of_updates
            if num_written_keys <= len(PROMPTS)
        )
        # at most two prompts are in a batch: the end of one prompt and the start of the next prompt
        assert (
            max(
                num_read_keys - num_written_keys
                for num_read_keys, num_written_keys in num_keys_of_updates
            )
            < 2 * max_length
        )


@pytest.mark.parametrize("batching_options", [{}, BLOCK_TABLE_OPTIONS], ids=["at-once", "pages"])
def test_sparse_sequence_equals_single_generation(batching_options):
    model = apply_config(make_tiny_model(), SPARSE_CONFIG)
    assert generate_batched(model, **batching_options) == generate_one_by_one(model)


def test_chunked_prompt_selects_same_blocks_as_whole_prompt():
    model = apply_config(make_tiny_model(), dataclasses.replace(SPARSE_CONFIG, dense_tail_blocks=1))
    for prompt, answer_tokens in zip(PROMPTS, generate_one_by_one(model), strict=True):
        # 90 tokens are no multiple of the query block
        assert generate_batched(model, [prompt], max_batch_tokens=90) == [answer_tokens]


@pytest.mark.parametrize("batch_tokens", [96, 100, 133])
def test_chunks_of_several_prompts_select_same_blocks_as_whole_prompts(batch_tokens, monkeypatch):
    """Check that the chunks of each prompt end at multiples of the query block."""
    routes = record_routes(monkeypatch)
    model = apply_config(make_tiny_model(), LOW_THRESHOLD_CONFIG)
    prompts = [
        draw_token_ids(1, prompt_length, seed=prompt_length)[0].tolist()
        for prompt_length in (340, 77, 201, 20, 150, 96)
    ]
    expected_tokens = generate_one_by_one(model, prompts)
    assert (
        generate_batched(model, prompts, max_batch_tokens=batch_tokens, page_size=32)
        == expected_tokens
    )
    prompt_ends = set(map(len, prompts))
    chunk_bounds = [(mask.q_offset, mask.kv_length) for mask, _ in routes if mask.q_length > 1]
    assert all(
        chunk_start % 32 == 0 and (chunk_end % 32 == 0 or chunk_end in prompt_ends)
        for chunk_start, chunk_end in chunk_bounds
    )
    assert any(chunk_end % 32 for _, chunk_end in chunk_bounds)


@pytest.mark.parametrize(("num_answers", "prefill_length"), [(1, 340), (2, 339)])
def test_dense_tail_applies_to_prompt_end_only(num_answers, prefill_length, monkeypatch):
    """Test a dense tail of 2 blocks of 32, which starts in the third chunk and ends in the fourth.

    For two answers, ``prefill_length`` is 339: the answers share a prefill without the last token.
    """
    routes = record_routes(monkeypatch)
    model = apply_config(make_tiny_model(), dataclasses.replace(SPARSE_CONFIG, dense_tail_blocks=2))
    model.generate_batch(
        draw_token_ids(1, 340).tolist(),
        GenerationConfig(
            max_new_tokens=1, do_sample=True, pad_token_id=0, num_return_sequences=num_answers
        ),
        make_batching_config(max_batch_tokens=96),
        warmup=False,
    )
    tail_by_kv_length = {
        mask.kv_length: route.config.dense_tail_blocks if route.method == "sparse" else route.method
        for mask, route in routes
        if mask.q_length > 1
    }
    assert tail_by_kv_length == {96: 0, 192: 0, 288: 2, prefill_length: "dense_masked"}


def test_common_prefixes_share_pages():
    model = apply_config(make_tiny_model(), SPARSE_CONFIG)
    batching_config = make_batching_config()
    with model.continuous_batching_context_manager(
        GREEDY_GENERATION_CONFIG, continuous_batching_config=batching_config
    ) as manager:
        results = []
        for prompt in PROMPTS[-3:]:
            manager.add_request(prompt)
            results.append(manager.get_result(timeout=60))
    assert [result.generated_tokens for result in results] == generate_one_by_one(
        model, PROMPTS[-3:]
    )


def test_preempted_requests_are_resumed(monkeypatch):
    offload_results, original_offload_requests = [], OffloadingManager.offload_requests
    monkeypatch.setattr(
        OffloadingManager,
        "offload_requests",
        lambda self: offload_results.append(original_offload_requests(self)) or offload_results[-1],
    )
    model = make_tiny_model()
    expected = generate_one_by_one(model)
    assert generate_batched(apply_config(model), num_blocks=26) == expected
    assert any(offload_results)


def test_preempted_request_reads_its_answer_as_decode(monkeypatch):
    """Count the generated tokens of a restarted request as decode steps, not as its prompt.

    Without offloading, transformers restarts a preempted request with these tokens appended.
    """
    answer_lengths, original_create_request = [], RequestState.create_equivalent_initial_request
    monkeypatch.setattr(
        RequestState,
        "create_equivalent_initial_request",
        lambda self: (
            answer_lengths.append(len(self.generated_tokens)) or original_create_request(self)
        ),
    )
    model = apply_config(make_tiny_model(), LOW_THRESHOLD_CONFIG)
    prompts = [
        draw_token_ids(1, prompt_length, seed=prompt_length)[0].tolist()
        for prompt_length in (300, 250, 320, 280, 310)
    ]
    generation_config = GenerationConfig(
        max_new_tokens=60, do_sample=False, pad_token_id=0, eos_token_id=-1
    )

    def generate_answers(num_pages):
        batching_config = make_batching_config(
            num_blocks=num_pages, page_size=32, allow_block_sharing=False
        )
        results_by_request = model.generate_batch(
            prompts, generation_config, batching_config, warmup=False
        )
        return [answer.generated_tokens for answer in results_by_request.values()]

    expected = generate_answers(400)
    assert not answer_lengths
    assert generate_answers(48) == expected
    assert max(answer_lengths) > 1


def test_last_chunk_of_one_token_is_prefill(monkeypatch):
    routes = record_routes(monkeypatch)
    model = apply_config(
        make_tiny_model(num_hidden_layers=1),
        dataclasses.replace(LOW_THRESHOLD_CONFIG, dense_tail_blocks=0),
    )
    prompt = draw_token_ids(1, 97)[0].tolist()
    generate_batched(model, [prompt], max_batch_tokens=96)
    call_routes = [(mask.q_offset, mask.q_length, route.method) for mask, route in routes[:3]]
    assert call_routes == [(0, 96, "sparse"), (96, 1, "sparse"), (97, 1, "dense")]


def test_cancelled_request_leaves_others_unchanged():
    model = apply_config(make_tiny_model())
    expected_tokens = generate_one_by_one(model, PROMPTS[:3])
    with model.continuous_batching_context_manager(
        GREEDY_GENERATION_CONFIG,
        continuous_batching_config=make_batching_config(max_batch_tokens=32),
    ) as manager:
        request_ids = [manager.add_request(prompt) for prompt in PROMPTS[:3]]
        manager.cancel_request(request_ids[1])
        tokens_by_request = {}
        while len(tokens_by_request) < 2:
            result = manager.get_result(timeout=60)
            if result.request_id != request_ids[1]:
                tokens_by_request[result.request_id] = result.generated_tokens
    assert tokens_by_request == {
        request_ids[0]: expected_tokens[0],
        request_ids[2]: expected_tokens[2],
    }


def generate_in_context_manager(model):
    """Generate with the context manager; return a list with the tokens of the first prompt."""
    with model.continuous_batching_context_manager(
        GREEDY_GENERATION_CONFIG, continuous_batching_config=make_batching_config()
    ) as manager:
        manager.add_request(PROMPTS[0])
        return [manager.get_result(timeout=60).generated_tokens]


# by name: function that runs continuous batching for the first prompt
GENERATE_FUNCTIONS = {
    "generate_batch": lambda model: generate_batched(model, PROMPTS[:1]),
    "context": generate_in_context_manager,
}


@pytest.fixture
def fake_flash_attention(monkeypatch):
    """Patch transformers to find FlashAttention 3, and to fail the test if a model is switched.

    If FlashAttention is installed, continuous batching calls ``set_attn_implementation`` to switch
    models to FlashAttention.
    """
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "set_attn_implementation",
        lambda *_: pytest.fail("the model was switched"),
    )


@pytest.mark.parametrize(
    "generate_first_prompt", GENERATE_FUNCTIONS.values(), ids=GENERATE_FUNCTIONS
)
def test_cab_is_not_switched_to_flash_attention(generate_first_prompt, request):
    model = make_tiny_model()
    expected = generate_one_by_one(model, PROMPTS[:1])
    apply_config(model)
    request.getfixturevalue("fake_flash_attention")
    assert generate_first_prompt(model) == expected
    assert list_attention_implementations(model) == ["cab", "cab"]


def make_tiny_hybrid():
    """Return an LFM2 model with an attention layer and a convolution layer."""
    return transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            layer_types=["full_attention", "conv"],
        )
    ).eval()


def make_tiny_deepseek():
    """Return a DeepSeek-V3 model, which has multi-head latent attention."""
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        )
    ).eval()


# by name: (function that returns an unsupported model, reason in the error message)
UNSUPPORTED_MODELS = {
    "vision-language": (make_tiny_llava, "some of its parts use another attention"),
    "window": (lambda: make_tiny_model("mistral-sliding"), "a sliding window of 40 tokens"),
    "chunks": (lambda: make_tiny_model("llama4"), "layers that attend in chunks of 40 tokens"),
    "linear": (make_tiny_hybrid, "layers that mix tokens without attention"),
    "latent": (make_tiny_deepseek, "multi-head latent attention"),
}
# by name: function that starts continuous batching with a model
START_FUNCTIONS = {
    **GENERATE_FUNCTIONS,
    "generate": lambda model: model.generate(
        torch.tensor(PROMPTS[:1]), cache_implementation="paged", max_new_tokens=2
    ),
    "init_continuous_batching": lambda model: model.init_continuous_batching(
        GREEDY_GENERATION_CONFIG, make_batching_config()
    ),
    "manager": lambda model: continuous_api.ContinuousBatchingManager(
        model, GREEDY_GENERATION_CONFIG, make_batching_config()
    ),
}


def assert_start_raises(model, start_batching, reason, request):
    """Assert that ``start_batching`` raises with ``reason``, and does not switch the attention."""
    apply_config(model)
    implementations = list_attention_implementations(model)
    request.getfixturevalue("fake_flash_attention")
    with pytest.raises(NotImplementedError, match=f"has attn_implementation='cab'.*{reason}"):
        start_batching(model)
    assert "cab" in implementations and list_attention_implementations(model) == implementations


@pytest.mark.parametrize(
    ("make_model", "reason"), UNSUPPORTED_MODELS.values(), ids=UNSUPPORTED_MODELS
)
def test_unsupported_models_raise_before_switching(make_model, reason, request):
    assert_start_raises(make_model(), START_FUNCTIONS["init_continuous_batching"], reason, request)


@pytest.mark.parametrize("start_batching", START_FUNCTIONS.values(), ids=START_FUNCTIONS)
def test_every_entry_point_raises_for_unsupported_models(start_batching, request):
    assert_start_raises(
        make_tiny_model("mistral-sliding"), start_batching, "a sliding window", request
    )


@pytest.mark.parametrize("implementation", ["cab", "cab_dense"])
def test_describe_reports_continuous_batching_support(implementation):
    supported_text = "each sequence by itself" + (
        ", decode dense" if implementation == "cab" else ""
    )
    windowed_text = "refused, it has layers under a sliding window of 40 tokens"
    chunked_text = "refused, it has layers that attend in chunks of 40 tokens"
    support_texts = {
        "llama": supported_text,
        "mistral-sliding": windowed_text,
        "llama4": chunked_text,
    }
    for family, support_text in support_texts.items():
        model = apply_config(make_tiny_model(family))
        model.set_attn_implementation(implementation)
        *earlier_lines, last_line = cab_hf.describe(model).splitlines()
        assert last_line.startswith(f"  generate_batch: {support_text}")
        assert any("decode:" in line for line in earlier_lines) == (implementation == "cab")


@pytest.mark.parametrize("implementation", IMPLEMENTATION_NAMES)
def test_server_accepts_registered_names(implementation):
    manager = ModelManager(attn_implementation=implementation)
    assert manager.attn_implementation == implementation


def test_server_rejects_unregistered_names():
    with pytest.raises(ValueError, match="Unsupported attention implementation: 'cabb'"):
        ModelManager(attn_implementation="cabb")


def test_error_names_required_transformers_version(monkeypatch, request):
    monkeypatch.setattr(support, "transformers_passes_paged_cache", lambda: False)
    reason = f"transformers must be 5.19 or newer, got {transformers.__version__}"
    assert_start_raises(make_tiny_model(), START_FUNCTIONS["manager"], reason, request)


@pytest.mark.parametrize(
    ("batching_options", "error_pattern"),
    [
        ({"use_cuda_graph": True}, "use_cuda_graph must not include batches with prompts"),
        (
            {"default_compile_level": 1, **BLOCK_TABLE_OPTIONS},
            "'cab' is not compiled in continuous batching",
        ),
    ],
)
def test_cuda_graphs_or_compile_raise_when_unsupported(
    batching_options, error_pattern, monkeypatch
):
    # patch transformers to find a GPU with CUDA graphs
    function_name = "get_accelerator_graph_name"
    module_name = "transformers.generation.continuous_batching.initialization"
    monkeypatch.setattr(f"{module_name}.{function_name}", lambda: "cuda")
    with pytest.raises(NotImplementedError, match=error_pattern):
        apply_config(make_tiny_model()).init_continuous_batching(
            GREEDY_GENERATION_CONFIG, make_batching_config(**batching_options)
        )


# by name: (fields of ContinuousBatchingConfig, part of the warning; None: no warning)
ALIGNMENT_CASES = {
    "max_batch_tokens": (
        {"max_batch_tokens": 31, "page_size": 32},
        "max_batch_tokens must be at least query_block=32, got 31",
    ),
    "page_size": ({"page_size": 48}, "page_size must be a multiple of query_block=32, got 48"),
    "whole": ({"max_batch_tokens": 32, "page_size": 64}, None),
    "not-shared": ({"page_size": 48, "allow_block_sharing": False}, None),
    "by-default": ({"max_batch_tokens": None, "page_size": 32}, None),
}


def collect_start_warnings(implementation, batching_options, monkeypatch):
    """Start continuous batching, and return the messages of warnings about query_block."""
    monkeypatch.setattr(checks, "_shown_warning_keys", set())
    model = apply_config(make_tiny_model())
    model.set_attn_implementation(implementation)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        model.init_continuous_batching(
            GREEDY_GENERATION_CONFIG, make_batching_config(**batching_options)
        )
    return [
        str(warning.message) for warning in caught_warnings if "query_block" in str(warning.message)
    ]


@pytest.mark.parametrize(
    ("batching_options", "warning_start"), ALIGNMENT_CASES.values(), ids=ALIGNMENT_CASES
)
def test_batch_or_page_size_unaligned_to_query_blocks_warns(
    batching_options, warning_start, monkeypatch
):
    start_warnings = collect_start_warnings("cab", batching_options, monkeypatch)
    assert [warning_text.startswith(warning_start) for warning_text in start_warnings] == [True] * (
        warning_start is not None
    )
    assert not collect_start_warnings("cab_dense", batching_options, monkeypatch)


def test_other_implementations_are_unchanged():
    model = make_tiny_model()
    expected = generate_one_by_one(model)
    assert generate_batched(model) == expected
    apply_config(model)
    cab_hf.remove_cab(model)
    assert generate_batched(model) == expected
