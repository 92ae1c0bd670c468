"""The vLLM backend on a CPU. `make vllm-test` runs these tests in a separate environment."""

import json
import random

import pytest
import torch

pytest.importorskip("vllm")
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from cab_hf.dispatch import attended_pairs

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK_SETTINGS = {"query_block": 32, "key_block": 16, "min_length": 0, "local_blocks": 1}
FULL_BUDGET_SETTINGS = BLOCK_SETTINGS | {"mass_threshold": 0.0}
SPARSE_SETTINGS = BLOCK_SETTINGS | {"mass_threshold": 0.3, "share_threshold": 1.0}
# maximum difference of log-probabilities that are equal up to rounding
LOGPROB_TOLERANCE = 2e-5
# number of generated tokens per prompt
NUM_ANSWER_TOKENS = 4


def draw_prompts(seed, max_prompts=5, max_length=600):
    """Return up to ``max_prompts`` random prompts of 20 to ``max_length`` tokens."""
    generator = random.Random(seed)
    lengths = [
        generator.randrange(20, max_length) for _ in range(generator.randint(1, max_prompts))
    ]
    return [[generator.randrange(3, 510) for _ in range(length)] for length in lengths]


def generate_with_logprobs(engine, prompts, has_prompt_logprobs=True):
    """Generate `NUM_ANSWER_TOKENS` tokens per prompt; return a list with a tuple for each prompt.

    The tuple is (generated token ids, log-probabilities of prompt and generated tokens). If
    ``has_prompt_logprobs`` is False, log-probabilities are of generated tokens only.
    """
    sampling_params = SamplingParams(
        temperature=0,
        max_tokens=NUM_ANSWER_TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0 if has_prompt_logprobs else None,
    )
    engine_prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [
        read_logprobs(prompt)
        for prompt in engine.generate(engine_prompts, sampling_params, use_tqdm=False)
    ]


def read_logprobs(request_output):
    """Return (generated token ids, log-probabilities) of the output of a request."""
    # the first token of a prompt has no log-probability
    step_logprobs = [
        *(request_output.prompt_logprobs or [None])[1:],
        *request_output.outputs[0].logprobs,
    ]
    # each step is a dict of log-probabilities, whose first entry is that of the actual token
    logprobs = [next(iter(token_logprobs.values())).logprob for token_logprobs in step_logprobs]
    return list(request_output.outputs[0].token_ids), logprobs


class TransformersReference:
    """Model with "cab" in transformers.

    A call returns an entry of the result of `generate_with_logprobs`, for one prompt.
    """

    def __init__(self, folder, config):
        model_options = {"attn_implementation": "cab", "cab_config": config}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **model_options).eval()

    @torch.no_grad()
    def __call__(self, prompt, has_prompt_logprobs=True):
        prompt_ids, logprobs = torch.tensor([prompt]), []
        output = self.model.generate(
            prompt_ids,
            max_new_tokens=NUM_ANSWER_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        if has_prompt_logprobs:
            logits = self.model(prompt_ids).logits[0, :-1].log_softmax(-1)
            logprobs = logits.gather(1, prompt_ids[0, 1:, None])[:, 0].tolist()
        answer = output.sequences[0, len(prompt) :].tolist()
        generated_steps = zip(output.logits, answer, strict=True)
        logprobs += [
            step_logits[0].log_softmax(-1)[token].item() for step_logits, token in generated_steps
        ]
        return answer, logprobs


@pytest.fixture(scope="module")
def transformers_reference(llama_folder):
    return TransformersReference(llama_folder, SPARSE_SETTINGS)


def assert_answers_close(actual, expected, tolerance=LOGPROB_TOLERANCE):
    """Assert that answers have equal tokens and close log-probabilities.

    ``actual`` and ``expected`` are results of `generate_with_logprobs`.
    """
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, expected_logprobs) in zip(actual, expected, strict=True):
        assert len(logprobs) == len(expected_logprobs)
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(expected_logprobs), atol=tolerance, rtol=0
        )


def compute_density():
    """Return the density of all sparse layers since ``attended_pairs.clear()``."""
    pair_counts = [counts_of_layer.double() for counts_of_layer in attended_pairs.values()]
    return float(
        sum(counts_of_layer[0] for counts_of_layer in pair_counts)
        / sum(counts_of_layer[1] for counts_of_layer in pair_counts)
    )


@pytest.mark.parametrize(
    ("token_budget", "first_seed"), [(2048, 0), (160, 100)], ids=["whole", "in-chunks"]
)
def test_full_budget_equals_vllm_dense_attention(start_engine, token_budget, first_seed):
    attended_pairs.clear()
    vllm_engine, cab_engine = (
        start_engine(None, max_num_batched_tokens=2048),
        start_engine(FULL_BUDGET_SETTINGS, max_num_batched_tokens=token_budget),
    )
    for seed in range(first_seed, first_seed + 100):
        prompts = draw_prompts(seed)
        assert_answers_close(
            generate_with_logprobs(cab_engine, prompts),
            generate_with_logprobs(vllm_engine, prompts),
        )
    assert compute_density() == 1


@pytest.mark.parametrize(
    ("token_budget", "first_seed"), [(2048, 0), (160, 100)], ids=["whole", "in-chunks"]
)
def test_sparse_answers_equal_transformers(
    start_engine, transformers_reference, token_budget, first_seed
):
    cab_engine = start_engine(SPARSE_SETTINGS, max_num_batched_tokens=token_budget)
    batches = [draw_prompts(seed) for seed in range(first_seed, first_seed + 100)]
    attended_pairs.clear()
    answers = [generate_with_logprobs(cab_engine, prompts) for prompts in batches]
    assert compute_density() < 0.8
    for actual, prompts in zip(answers, batches, strict=True):
        assert_answers_close(actual, [transformers_reference(prompt) for prompt in prompts])


@pytest.mark.parametrize(
    "engine_options",
    [
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 20},
        {"max_num_batched_tokens": 64, "max_num_scheduled_tokens": 17},
    ],
    ids=["batch", "threshold", "scheduled"],
)
def test_chunks_smaller_than_query_block_equal_dense(start_engine, engine_options):
    """Split query blocks over several chunks, each of which selects key blocks for its part."""
    prompts = draw_prompts(3, max_prompts=3, max_length=200)
    cache_options = {"num_gpu_blocks_override": 64}
    expected = generate_with_logprobs(start_engine(None, max_num_batched_tokens=2048), prompts)
    attended_pairs.clear()
    assert_answers_close(
        generate_with_logprobs(
            start_engine(FULL_BUDGET_SETTINGS, **cache_options | engine_options), prompts
        ),
        expected,
    )
    assert attended_pairs


def test_cached_prefix_is_not_recomputed(start_engine, transformers_reference):
    cab_engine = start_engine(SPARSE_SETTINGS, max_num_batched_tokens=160)
    prefix_tokens = [(7 * token_index * token_index + 3) % 500 + 3 for token_index in range(256)]
    prompts = [prefix_tokens + suffix for suffix in ([5, 6] * 90, [9, 8, 7] * 70, [11] * 150)]
    expected = [transformers_reference(prompt, has_prompt_logprobs=False) for prompt in prompts]
    for prompt, answer in zip(prompts, expected, strict=True):
        sampling_params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        output = cab_engine.generate(
            [{"prompt_token_ids": prompt}], sampling_params, use_tqdm=False
        )[0]
        assert output.num_cached_tokens == (0 if prompt is prompts[0] else 256)
        assert_answers_close(
            generate_with_logprobs(cab_engine, [prompt], has_prompt_logprobs=False), [answer]
        )


def test_preempted_requests_are_recomputed(start_engine, transformers_reference, monkeypatch):
    cab_engine = start_engine(
        SPARSE_SETTINGS,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=10,
        enable_prefix_caching=False,
    )
    # the cache has nine pages of 128 tokens. Each of three prompts fills three pages, and its
    # answer needs a fourth page, so that a request is preempted
    prompts = [
        [(token_index * prompt_factor) % 500 + 3 for token_index in range(383)]
        for prompt_factor in (3, 7, 11)
    ]
    scheduler, preempted_requests = cab_engine.llm_engine.engine_core.engine_core.scheduler, []
    original_preempt = scheduler._preempt_request

    def record_and_preempt(request, timestamp, **preempt_options):
        preempted_requests.append(request)
        return original_preempt(request, timestamp, **preempt_options)

    monkeypatch.setattr(scheduler, "_preempt_request", record_and_preempt)
    actual = generate_with_logprobs(cab_engine, prompts, has_prompt_logprobs=False)
    assert preempted_requests
    assert_answers_close(
        actual, [transformers_reference(prompt, has_prompt_logprobs=False) for prompt in prompts]
    )


def test_aborted_request_does_not_change_others(start_engine, transformers_reference):
    llm_engine = start_engine(SPARSE_SETTINGS, max_num_batched_tokens=160).llm_engine
    prompts = [[(i * prompt_factor) % 500 + 3 for i in range(400)] for prompt_factor in (3, 7, 11)]
    sampling_params = SamplingParams(
        temperature=0, max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )
    for request_id, prompt in zip("abc", prompts, strict=True):
        llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling_params)
    llm_engine.step()
    llm_engine.abort_request(["b"])
    finished_outputs = {}
    while llm_engine.has_unfinished_requests():
        finished_outputs |= {
            output.request_id[0]: output for output in llm_engine.step() if output.finished
        }
    expected = [transformers_reference(prompts[i], has_prompt_logprobs=False) for i in (0, 2)]
    assert_answers_close(
        [read_logprobs(finished_outputs[request_id]) for request_id in "ac"], expected
    )


def test_prompts_below_min_length_use_dense_backend(start_engine):
    attended_pairs.clear()
    prompts = draw_prompts(7, 5, 300)
    cab_engine = start_engine(SPARSE_SETTINGS | {"min_length": 400})
    assert_answers_close(
        generate_with_logprobs(cab_engine, prompts),
        generate_with_logprobs(start_engine(None, max_num_batched_tokens=2048), prompts),
    )
    assert not attended_pairs


def test_batch_with_short_and_long_prompts_equals_reference(start_engine, llama_folder):
    cab_settings = SPARSE_SETTINGS | {"min_length": 300}
    prompts = draw_prompts(8, 5, 250) + draw_prompts(9, 3, 600)
    cab_engine, reference_of_settings = (
        start_engine(cab_settings, max_num_batched_tokens=2048),
        TransformersReference(llama_folder, cab_settings),
    )
    assert {len(prompt) < 300 for prompt in prompts} == {True, False}
    assert_answers_close(
        generate_with_logprobs(cab_engine, prompts),
        [reference_of_settings(prompt) for prompt in prompts],
    )


def test_tensor_parallel_ranks_equal_reference(start_engine, transformers_reference):
    cab_engine = start_engine(SPARSE_SETTINGS, max_num_batched_tokens=160, tensor_parallel_size=2)
    prompts = draw_prompts(10, 3)
    assert_answers_close(
        generate_with_logprobs(cab_engine, prompts),
        [transformers_reference(prompt) for prompt in prompts],
    )


def test_engine_without_settings_uses_cab_config_of_model(start_engine, llama_folder, tmp_path):
    for model_file in llama_folder.iterdir():
        (tmp_path / model_file.name).write_bytes(model_file.read_bytes())
    model_config = json.loads((tmp_path / "config.json").read_text())
    saved_settings = SPARSE_SETTINGS | {"dense_layers": [0]}
    (tmp_path / "config.json").write_text(json.dumps(model_config | {"cab_config": saved_settings}))
    prompts = draw_prompts(11, 3)
    attended_pairs.clear()
    actual = generate_with_logprobs(start_engine({}, tmp_path), prompts)
    assert sorted(layer.layer_idx for layer in attended_pairs) == [1, 2]
    assert_answers_close(
        actual, [TransformersReference(tmp_path, saved_settings)(prompt) for prompt in prompts]
    )
    # another engine in the same process still uses its own settings
    assert_answers_close(
        generate_with_logprobs(start_engine(FULL_BUDGET_SETTINGS), prompts),
        generate_with_logprobs(start_engine(None, max_num_batched_tokens=2048), prompts),
    )


def test_speculative_decoding_equals_reference(start_engine, transformers_reference):
    speculative_config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    cab_engine = start_engine(
        SPARSE_SETTINGS, max_num_batched_tokens=160, speculative_config=speculative_config
    )
    prompts = [[(i * i) % 11 + 3 for i in range(length)] for length in (300, 170)]
    actual = generate_with_logprobs(cab_engine, prompts, has_prompt_logprobs=False)
    expected = [transformers_reference(prompt, has_prompt_logprobs=False) for prompt in prompts]
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize(
    ("cab_settings", "error_pattern"),
    [
        ({"mass_treshold": 0.1}, "mass_treshold"),
        ({"mass_threshold": 2}, "mass_threshold"),
        ({"dense_layers": [3]}, "dense_layers"),
        ("sparse", "sparse"),
    ],
)
def test_invalid_settings_raise_at_start(llama_folder, cab_settings, error_pattern):
    with pytest.raises(ValueError, match=error_pattern):
        LLM(
            str(llama_folder),
            skip_tokenizer_init=True,
            max_model_len=64,
            additional_config={"cab": cab_settings},
        )


def test_unsupported_vllm_version_raises(llama_folder, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with pytest.raises(ValueError, match="vLLM must be .*, got 0.34.0"):
        LLM(str(llama_folder), skip_tokenizer_init=True, additional_config={"cab": {}})
