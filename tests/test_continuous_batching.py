"""Continuous batching equals generation of one prompt at a time; unsupported models raise."""

import dataclasses
import warnings

import pytest
import torch
import transformers
from batching_cases import (
    GREEDY,
    LOW,
    PAGES,
    PROMPTS,
    WAYS,
    batching,
    generated,
    implementations,
    on_cab,
    routed,
    served,
)
from marks import slow_but
from tiny import SPARSE, tiny_llava, tiny_model, tokens
from transformers import GenerationConfig
from transformers.cli.serving.model_manager import ModelManager
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestState

import cab_hf
from cab_hf import checks
from cab_hf.batching import batch, support
from cab_hf.config import NAMES

allocators = pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators.full_attention",
    reason="this version of transformers is too old for continuous batching",
)


@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("family", "name"),
    slow_but(
        [("llama", "cab"), ("qwen3", "cab"), ("llama", "cab_dense"), ("granite-swa", "cab")],
        *(0, 1, 2),
    ),
)
def test_full_budget_equals_dense_attention(family, name, changes):
    fields = {"layer_types": ["full_attention"] * 3} if family == "granite-swa" else {}
    model = tiny_model(family, **fields)
    expected = generated(model)
    on_cab(model).set_attn_implementation(name)
    assert served(model, **changes) == expected


@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS)
def test_decode_steps_read_pages_without_gather(changes, monkeypatch):
    """Count gathered keys: decode steps must read pages in place, and prompts gather their keys."""
    monkeypatch.setattr(batch.decode, "has_kernels", lambda *_: True)
    model, gathered = tiny_model(), []
    expected = generated(model)
    update = allocators.FullAttentionCacheAllocator.update

    def recording_update(self, keys, values, layer, read, write):
        gathered.append((len(read), len(write)))
        # transformers calls this method with positional arguments
        return update(self, keys, values, layer, read, write)

    monkeypatch.setattr(allocators.FullAttentionCacheAllocator, "update", recording_update)
    assert served(on_cab(model), **changes) == expected
    if "max_blocks_per_request" not in changes:
        # batches of decode steps gather no keys; other batches gather the keys of their prompts
        longest = max(map(len, PROMPTS))
        assert all(read == 0 for read, written in gathered if written <= len(PROMPTS))
        # at most two prompts are in a batch: the end of one prompt and the start of the next prompt
        assert max(read - written for read, written in gathered) < 2 * longest


@pytest.mark.parametrize("changes", [{}, PAGES], ids=["at-once", "pages"])
def test_sparse_sequence_equals_single_generation(changes):
    model = on_cab(tiny_model(), SPARSE)
    assert served(model, **changes) == generated(model)


def test_chunked_prompt_selects_same_blocks_as_whole_prompt():
    model = on_cab(tiny_model(), dataclasses.replace(SPARSE, dense_tail_blocks=1))
    for prompt, answer in zip(PROMPTS, generated(model), strict=True):
        # 90 tokens are no multiple of the query block
        assert served(model, [prompt], max_batch_tokens=90) == [answer]


@pytest.mark.parametrize("batch_tokens", [96, 100, 133])
def test_chunks_of_several_prompts_select_same_blocks_as_whole_prompts(batch_tokens, monkeypatch):
    """Check that the chunks of each prompt end at multiples of the query block."""
    routes = routed(monkeypatch)
    model = on_cab(tiny_model(), LOW)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (340, 77, 201, 20, 150, 96)]
    expected = generated(model, prompts)
    assert served(model, prompts, max_batch_tokens=batch_tokens, page_size=32) == expected
    prompt_ends = set(map(len, prompts))
    chunks = [(mask.q_offset, mask.kv_length) for mask, _ in routes if mask.q_length > 1]
    assert all(start % 32 == 0 and (end % 32 == 0 or end in prompt_ends) for start, end in chunks)
    assert any(end % 32 for _, end in chunks)


@pytest.mark.parametrize(("answers", "end"), [(1, 340), (2, 339)])
def test_dense_tail_applies_to_prompt_end_only(answers, end, monkeypatch):
    """Test a dense tail of 2 blocks of 32, which starts in the third chunk and ends in the fourth.

    With several answers, ``end`` is 339: the answers share a prefill without the last token.
    """
    routes = routed(monkeypatch)
    model = on_cab(tiny_model(), dataclasses.replace(SPARSE, dense_tail_blocks=2))
    model.generate_batch(
        tokens(1, 340).tolist(),
        GenerationConfig(
            max_new_tokens=1, do_sample=True, pad_token_id=0, num_return_sequences=answers
        ),
        batching(max_batch_tokens=96),
        warmup=False,
    )
    tails = {
        mask.kv_length: route.config.dense_tail_blocks if route.method == "sparse" else route.method
        for mask, route in routes
        if mask.q_length > 1
    }
    assert tails == {96: 0, 192: 0, 288: 2, end: "dense_masked"}


def test_common_prefixes_share_pages():
    model = on_cab(tiny_model(), SPARSE)
    settings = batching()
    with model.continuous_batching_context_manager(
        GREEDY, continuous_batching_config=settings
    ) as manager:
        answers = []
        for prompt in PROMPTS[-3:]:
            manager.add_request(prompt)
            answers.append(manager.get_result(timeout=60))
    assert [answer.generated_tokens for answer in answers] == generated(model, PROMPTS[-3:])


def test_preempted_requests_are_resumed(monkeypatch):
    results, offload = [], OffloadingManager.offload_requests
    monkeypatch.setattr(
        OffloadingManager,
        "offload_requests",
        lambda self: results.append(offload(self)) or results[-1],
    )
    model = tiny_model()
    expected = generated(model)
    assert served(on_cab(model), num_blocks=26) == expected
    assert any(results)


def test_preempted_request_reads_its_answer_as_decode(monkeypatch):
    """Count the generated tokens of a restarted request as decode steps, not as its prompt.

    Without offloading, transformers restarts a preempted request with these tokens appended.
    """
    answer_lengths, create = [], RequestState.create_equivalent_initial_request
    monkeypatch.setattr(
        RequestState,
        "create_equivalent_initial_request",
        lambda self: answer_lengths.append(len(self.generated_tokens)) or create(self),
    )
    model = on_cab(tiny_model(), LOW)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (300, 250, 320, 280, 310)]
    greedy = GenerationConfig(max_new_tokens=60, do_sample=False, pad_token_id=0, eos_token_id=-1)

    def answers(num_pages):
        settings = batching(num_blocks=num_pages, page_size=32, allow_block_sharing=False)
        result = model.generate_batch(prompts, greedy, settings, warmup=False)
        return [answer.generated_tokens for answer in result.values()]

    expected = answers(400)
    assert not answer_lengths
    assert answers(48) == expected
    assert max(answer_lengths) > 1


def test_last_chunk_of_one_token_is_prefill(monkeypatch):
    routes = routed(monkeypatch)
    model = on_cab(tiny_model(num_hidden_layers=1), dataclasses.replace(LOW, dense_tail_blocks=0))
    prompt = tokens(1, 97)[0].tolist()
    served(model, [prompt], max_batch_tokens=96)
    calls = [(mask.q_offset, mask.q_length, route.method) for mask, route in routes[:3]]
    assert calls == [(0, 96, "sparse"), (96, 1, "sparse"), (97, 1, "dense")]


def test_cancelled_request_leaves_others_unchanged():
    model = on_cab(tiny_model())
    expected = generated(model, PROMPTS[:3])
    with model.continuous_batching_context_manager(
        GREEDY, continuous_batching_config=batching(max_batch_tokens=32)
    ) as manager:
        names = [manager.add_request(prompt) for prompt in PROMPTS[:3]]
        manager.cancel_request(names[1])
        answers = {}
        while len(answers) < 2:
            answer = manager.get_result(timeout=60)
            if answer.request_id != names[1]:
                answers[answer.request_id] = answer.generated_tokens
    assert answers == {names[0]: expected[0], names[2]: expected[2]}


def in_a_context(model):
    """Generate with the context manager; return a list with the tokens of the first prompt."""
    with model.continuous_batching_context_manager(
        GREEDY, continuous_batching_config=batching()
    ) as manager:
        manager.add_request(PROMPTS[0])
        return [manager.get_result(timeout=60).generated_tokens]


# by name: function that runs continuous batching for the first prompt
BEGINNINGS = {
    "generate_batch": lambda model: served(model, PROMPTS[:1]),
    "context": in_a_context,
}


@pytest.fixture
def flash_is_installed(monkeypatch):
    """Patch transformers to find FlashAttention 3, and fail if it switches the model.

    Continuous batching switches the attention of models to FlashAttention if it is installed.
    """
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "set_attn_implementation",
        lambda *_: pytest.fail("the model was switched"),
    )


@pytest.mark.parametrize("serve", BEGINNINGS.values(), ids=BEGINNINGS)
def test_cab_is_not_switched_to_flash_attention(serve, request):
    model = tiny_model()
    expected = generated(model, PROMPTS[:1])
    on_cab(model)
    request.getfixturevalue("flash_is_installed")
    assert serve(model) == expected
    assert implementations(model) == ["cab", "cab"]


def tiny_hybrid():
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


def tiny_deepseek():
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
REFUSED = {
    "vision-language": (tiny_llava, "some of its parts use another attention"),
    "window": (lambda: tiny_model("mistral-sliding"), "a sliding window of 40 tokens"),
    "chunks": (lambda: tiny_model("llama4"), "layers that attend in chunks of 40 tokens"),
    "linear": (tiny_hybrid, "layers that mix tokens without attention"),
    "latent": (tiny_deepseek, "multi-head latent attention"),
}
# by name: function that starts continuous batching with a model
STARTS = {
    **BEGINNINGS,
    "generate": lambda model: model.generate(
        torch.tensor(PROMPTS[:1]), cache_implementation="paged", max_new_tokens=2
    ),
    "init_continuous_batching": lambda model: model.init_continuous_batching(GREEDY, batching()),
    "manager": lambda model: continuous_api.ContinuousBatchingManager(model, GREEDY, batching()),
}


def require_refused(model, start, reason, request):
    """Assert that ``start`` raises an error with ``reason``, and does not switch the attention."""
    on_cab(model)
    names = implementations(model)
    request.getfixturevalue("flash_is_installed")
    with pytest.raises(NotImplementedError, match=f"has attn_implementation='cab'.*{reason}"):
        start(model)
    assert "cab" in names and implementations(model) == names


@pytest.mark.parametrize(("build", "reason"), REFUSED.values(), ids=REFUSED)
def test_unsupported_models_raise_before_switching(build, reason, request):
    require_refused(build(), STARTS["init_continuous_batching"], reason, request)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_every_entry_point_raises_for_unsupported_models(start, request):
    require_refused(tiny_model("mistral-sliding"), start, "a sliding window", request)


@pytest.mark.parametrize("name", ["cab", "cab_dense"])
def test_describe_reports_continuous_batching_support(name):
    supported = "each sequence by itself" + (", decode dense" if name == "cab" else "")
    windowed = "refused, it has layers under a sliding window of 40 tokens"
    chunked = "refused, it has layers that attend in chunks of 40 tokens"
    text_of_family = {"llama": supported, "mistral-sliding": windowed, "llama4": chunked}
    for family, text in text_of_family.items():
        model = on_cab(tiny_model(family))
        model.set_attn_implementation(name)
        *layers, last = cab_hf.describe(model).splitlines()
        assert last.startswith(f"  generate_batch: {text}")
        assert any("decode:" in line for line in layers) == (name == "cab")


@pytest.mark.parametrize("name", NAMES)
def test_server_accepts_registered_names(name):
    manager = ModelManager(attn_implementation=name)
    assert manager.attn_implementation == name


def test_server_rejects_unregistered_names():
    with pytest.raises(ValueError, match="Unsupported attention implementation: 'cabb'"):
        ModelManager(attn_implementation="cabb")


def test_error_names_required_transformers_version(monkeypatch, request):
    monkeypatch.setattr(support, "reads_a_batch", lambda: False)
    reason = f"transformers must be 5.19 or newer, got {transformers.__version__}"
    require_refused(tiny_model(), STARTS["manager"], reason, request)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_cuda_graph": True}, "use_cuda_graph must not include batches with prompts"),
        ({"default_compile_level": 1, **PAGES}, "'cab' is not compiled in continuous batching"),
    ],
)
def test_cuda_graphs_or_compile_raise_when_unsupported(changes, sentence, monkeypatch):
    # patch transformers to find a GPU with CUDA graphs
    function = "get_accelerator_graph_name"
    module = "transformers.generation.continuous_batching.initialization"
    monkeypatch.setattr(f"{module}.{function}", lambda: "cuda")
    with pytest.raises(NotImplementedError, match=sentence):
        on_cab(tiny_model()).init_continuous_batching(GREEDY, batching(**changes))


# by name: (fields of ContinuousBatchingConfig, part of the warning; None: no warning)
GRID = {
    "max_batch_tokens": (
        {"max_batch_tokens": 31, "page_size": 32},
        "max_batch_tokens must be at least query_block=32, got 31",
    ),
    "page_size": ({"page_size": 48}, "page_size must be a multiple of query_block=32, got 48"),
    "whole": ({"max_batch_tokens": 32, "page_size": 64}, None),
    "not-shared": ({"page_size": 48, "allow_block_sharing": False}, None),
    "by-default": ({"max_batch_tokens": None, "page_size": 32}, None),
}


def start_warnings(name, changes, monkeypatch):
    """Start continuous batching, and return the messages of warnings about query_block."""
    monkeypatch.setattr(checks, "_warned", set())
    model = on_cab(tiny_model())
    model.set_attn_implementation(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.init_continuous_batching(GREEDY, batching(**changes))
    return [str(warning.message) for warning in caught if "query_block" in str(warning.message)]


@pytest.mark.parametrize(("changes", "sentence"), GRID.values(), ids=GRID)
def test_batch_or_page_size_unaligned_to_query_blocks_warns(changes, sentence, monkeypatch):
    messages = start_warnings("cab", changes, monkeypatch)
    assert [text.startswith(sentence) for text in messages] == [True] * (sentence is not None)
    assert not start_warnings("cab_dense", changes, monkeypatch)


def test_other_implementations_are_unchanged():
    model = tiny_model()
    expected = generated(model)
    assert served(model) == expected
    on_cab(model)
    cab_hf.remove_cab(model)
    assert served(model) == expected
