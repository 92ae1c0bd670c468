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

BLOCKS = {"query_block": 32, "key_block": 16, "min_length": 0, "local_blocks": 1}
FULL = BLOCKS | {"mass_threshold": 0.0}
SPARSE = BLOCKS | {"mass_threshold": 0.3, "share_threshold": 1.0}
# maximum difference of log-probabilities that are equal up to rounding
TOLERANCE = 2e-5
# number of generated tokens per prompt
ANSWER_TOKENS = 4


def draw_prompts(seed, max_prompts=5, max_length=600):
    """Return up to ``max_prompts`` random prompts of 20 to ``max_length`` tokens."""
    generator = random.Random(seed)
    lengths = [
        generator.randrange(20, max_length) for _ in range(generator.randint(1, max_prompts))
    ]
    return [[generator.randrange(3, 510) for _ in range(length)] for length in lengths]


def generate_with_logprobs(engine, prompts, has_prompt_logprobs=True):
    """Generate `ANSWER_TOKENS` tokens per prompt; return a list with a tuple for each prompt.

    The tuple is (generated token ids, log-probabilities of prompt and generated tokens). If
    ``has_prompt_logprobs`` is False, log-probabilities are of generated tokens only.
    """
    sampling = SamplingParams(
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0 if has_prompt_logprobs else None,
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [read_logprobs(prompt) for prompt in engine.generate(requests, sampling, use_tqdm=False)]


def read_logprobs(request_output):
    """Return (generated token ids, log-probabilities) of the output of a request."""
    # the first token of a prompt has no log-probability
    step_logprobs = [
        *(request_output.prompt_logprobs or [None])[1:],
        *request_output.outputs[0].logprobs,
    ]
    # each step is a dict of log-probabilities, whose first entry is that of the actual token
    logprobs = [next(iter(step.values())).logprob for step in step_logprobs]
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
        tokens, logprobs = torch.tensor([prompt]), []
        output = self.model.generate(
            tokens,
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        if has_prompt_logprobs:
            logits = self.model(tokens).logits[0, :-1].log_softmax(-1)
            logprobs = logits.gather(1, tokens[0, 1:, None])[:, 0].tolist()
        answer = output.sequences[0, len(prompt) :].tolist()
        steps = zip(output.logits, answer, strict=True)
        logprobs += [step_logits[0].log_softmax(-1)[token].item() for step_logits, token in steps]
        return answer, logprobs


@pytest.fixture(scope="module")
def reference(llama):
    return TransformersReference(llama, SPARSE)


def assert_answers_close(actual, expected, tolerance=TOLERANCE):
    """Assert that answers have equal tokens and close log-probabilities.

    ``actual`` and ``expected`` are results of `generate_with_logprobs`.
    """
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, expected_logprobs) in zip(actual, expected, strict=True):
        assert len(logprobs) == len(expected_logprobs)
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(expected_logprobs), atol=tolerance, rtol=0
        )


def measured_density():
    """Return the density of all sparse layers since ``attended_pairs.clear()``."""
    pair_counts = [counts.double() for counts in attended_pairs.values()]
    return float(
        sum(counts[0] for counts in pair_counts) / sum(counts[1] for counts in pair_counts)
    )


@pytest.mark.parametrize(
    ("token_budget", "first_seed"), [(2048, 0), (160, 100)], ids=["whole", "in-chunks"]
)
def test_full_budget_equals_vllm_dense_attention(engine, token_budget, first_seed):
    attended_pairs.clear()
    vllm_engine, cab_engine = (
        engine(None, max_num_batched_tokens=2048),
        engine(FULL, max_num_batched_tokens=token_budget),
    )
    for seed in range(first_seed, first_seed + 100):
        prompts = draw_prompts(seed)
        assert_answers_close(
            generate_with_logprobs(cab_engine, prompts),
            generate_with_logprobs(vllm_engine, prompts),
        )
    assert measured_density() == 1


@pytest.mark.parametrize(
    ("token_budget", "first_seed"), [(2048, 0), (160, 100)], ids=["whole", "in-chunks"]
)
def test_sparse_answers_equal_transformers(engine, reference, token_budget, first_seed):
    cab_engine = engine(SPARSE, max_num_batched_tokens=token_budget)
    batches = [draw_prompts(seed) for seed in range(first_seed, first_seed + 100)]
    attended_pairs.clear()
    answers = [generate_with_logprobs(cab_engine, prompts) for prompts in batches]
    assert measured_density() < 0.8
    for actual, prompts in zip(answers, batches, strict=True):
        assert_answers_close(actual, [reference(x) for x in prompts])


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 20},
        {"max_num_batched_tokens": 64, "max_num_scheduled_tokens": 17},
    ],
    ids=["batch", "threshold", "scheduled"],
)
def test_chunks_smaller_than_query_block_equal_dense(engine, options):
    """Split query blocks over several chunks, each of which selects key blocks for its part."""
    prompts = draw_prompts(3, max_prompts=3, max_length=200)
    cache_options = {"num_gpu_blocks_override": 64}
    expected = generate_with_logprobs(engine(None, max_num_batched_tokens=2048), prompts)
    attended_pairs.clear()
    assert_answers_close(
        generate_with_logprobs(engine(FULL, **cache_options | options), prompts), expected
    )
    assert attended_pairs


def test_cached_prefix_is_not_recomputed(engine, reference):
    cab_engine = engine(SPARSE, max_num_batched_tokens=160)
    prefix = [(7 * i * i + 3) % 500 + 3 for i in range(256)]
    prompts = [prefix + suffix for suffix in ([5, 6] * 90, [9, 8, 7] * 70, [11] * 150)]
    expected = [reference(suffix, has_prompt_logprobs=False) for suffix in prompts]
    for prompt, answer in zip(prompts, expected, strict=True):
        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        output = cab_engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        assert output.num_cached_tokens == (0 if prompt is prompts[0] else 256)
        assert_answers_close(
            generate_with_logprobs(cab_engine, [prompt], has_prompt_logprobs=False), [answer]
        )


def test_preempted_requests_are_recomputed(engine, reference, monkeypatch):
    cab_engine = engine(
        SPARSE, max_num_batched_tokens=2048, num_gpu_blocks_override=10, enable_prefix_caching=False
    )
    # the cache has nine pages of 128 tokens. Each of three prompts fills three pages, and its
    # answer needs a fourth page, so that a request is preempted
    prompts = [[(i * n) % 500 + 3 for i in range(383)] for n in (3, 7, 11)]
    scheduler, preempted_requests = cab_engine.llm_engine.engine_core.engine_core.scheduler, []
    original_preempt = scheduler._preempt_request

    def record_and_preempt(request, timestamp, **options):
        preempted_requests.append(request)
        return original_preempt(request, timestamp, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", record_and_preempt)
    actual = generate_with_logprobs(cab_engine, prompts, has_prompt_logprobs=False)
    assert preempted_requests
    assert_answers_close(actual, [reference(x, has_prompt_logprobs=False) for x in prompts])


def test_aborted_request_does_not_change_others(engine, reference):
    llm_engine = engine(SPARSE, max_num_batched_tokens=160).llm_engine
    prompts = [[(i * factor) % 500 + 3 for i in range(400)] for factor in (3, 7, 11)]
    sampling = SamplingParams(
        temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )
    for name, prompt in zip("abc", prompts, strict=True):
        llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    llm_engine.step()
    llm_engine.abort_request(["b"])
    finished_outputs = {}
    while llm_engine.has_unfinished_requests():
        finished_outputs |= {
            output.request_id[0]: output for output in llm_engine.step() if output.finished
        }
    expected = [reference(prompts[i], has_prompt_logprobs=False) for i in (0, 2)]
    assert_answers_close([read_logprobs(finished_outputs[name]) for name in "ac"], expected)


def test_prompts_below_min_length_use_dense_backend(engine):
    attended_pairs.clear()
    prompts = draw_prompts(7, 5, 300)
    cab_engine = engine(SPARSE | {"min_length": 400})
    assert_answers_close(
        generate_with_logprobs(cab_engine, prompts),
        generate_with_logprobs(engine(None, max_num_batched_tokens=2048), prompts),
    )
    assert not attended_pairs


def test_batch_with_short_and_long_prompts_equals_reference(engine, llama):
    config = SPARSE | {"min_length": 300}
    prompts = draw_prompts(8, 5, 250) + draw_prompts(9, 3, 600)
    cab_engine, transformers_reference = (
        engine(config, max_num_batched_tokens=2048),
        TransformersReference(llama, config),
    )
    assert {len(x) < 300 for x in prompts} == {True, False}
    assert_answers_close(
        generate_with_logprobs(cab_engine, prompts), [transformers_reference(x) for x in prompts]
    )


def test_tensor_parallel_ranks_equal_reference(engine, reference):
    cab_engine = engine(SPARSE, max_num_batched_tokens=160, tensor_parallel_size=2)
    prompts = draw_prompts(10, 3)
    assert_answers_close(
        generate_with_logprobs(cab_engine, prompts), [reference(x) for x in prompts]
    )


def test_engine_without_settings_uses_cab_config_of_model(engine, llama, tmp_path):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    saved_settings = SPARSE | {"dense_layers": [0]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"cab_config": saved_settings}))
    prompts = draw_prompts(11, 3)
    attended_pairs.clear()
    actual = generate_with_logprobs(engine({}, tmp_path), prompts)
    assert sorted(layer.layer_idx for layer in attended_pairs) == [1, 2]
    assert_answers_close(
        actual, [TransformersReference(tmp_path, saved_settings)(x) for x in prompts]
    )
    # another engine in the same process still uses its own settings
    assert_answers_close(
        generate_with_logprobs(engine(FULL), prompts),
        generate_with_logprobs(engine(None, max_num_batched_tokens=2048), prompts),
    )


def test_speculative_decoding_equals_reference(engine, reference):
    speculative_config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    cab_engine = engine(SPARSE, max_num_batched_tokens=160, speculative_config=speculative_config)
    prompts = [[(i * i) % 11 + 3 for i in range(n)] for n in (300, 170)]
    actual = generate_with_logprobs(cab_engine, prompts, has_prompt_logprobs=False)
    expected = [reference(x, has_prompt_logprobs=False) for x in prompts]
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize(
    ("cab_settings", "message"),
    [
        ({"mass_treshold": 0.1}, "mass_treshold"),
        ({"mass_threshold": 2}, "mass_threshold"),
        ({"dense_layers": [3]}, "dense_layers"),
        ("sparse", "sparse"),
    ],
)
def test_invalid_settings_raise_at_start(llama, cab_settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(
            str(llama),
            skip_tokenizer_init=True,
            max_model_len=64,
            additional_config={"cab": cab_settings},
        )


def test_unsupported_vllm_version_raises(llama, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with pytest.raises(ValueError, match="vLLM must be .*, got 0.34.0"):
        LLM(str(llama), skip_tokenizer_init=True, additional_config={"cab": {}})
