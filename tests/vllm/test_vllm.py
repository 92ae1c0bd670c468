"""The vLLM backend on a CPU. `make vllm-test` runs these tests in a separate environment."""

import json
import random

import pytest
import torch

pytest.importorskip("vllm")
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from cab_hf.dispatch import attended

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCKS = {"query_block": 32, "key_block": 16, "min_length": 0, "local_blocks": 1}
FULL = BLOCKS | {"mass_threshold": 0.0}
SPARSE = BLOCKS | {"mass_threshold": 0.3, "share_threshold": 1.0}
# maximum difference of log-probabilities that are equal up to rounding
TOLERANCE = 2e-5
# number of generated tokens per prompt
ANSWER = 4


def prompts_of(seed, max_count=5, longest=600):
    """Return up to ``max_count`` random prompts of 20 to ``longest`` tokens."""
    draw = random.Random(seed)
    lengths = [draw.randrange(20, longest) for _ in range(draw.randint(1, max_count))]
    return [[draw.randrange(3, 510) for _ in range(length)] for length in lengths]


def served(engine, prompts, prompt_too=True):
    """Generate `ANSWER` tokens per prompt; return a list with a tuple for each prompt.

    The tuple is (generated token ids, log-probabilities of prompt and generated tokens). If
    ``prompt_too`` is False, log-probabilities are of generated tokens only.
    """
    sampling = SamplingParams(
        temperature=0,
        max_tokens=ANSWER,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0 if prompt_too else None,
    )
    requests = [{"prompt_token_ids": x} for x in prompts]
    return [read(x) for x in engine.generate(requests, sampling, use_tqdm=False)]


def read(request_output):
    """Return (generated token ids, log-probabilities) of the output of a request."""
    # the first token of a prompt has no log-probability
    steps = [
        *(request_output.prompt_logprobs or [None])[1:],
        *request_output.outputs[0].logprobs,
    ]
    # each step is a dict of log-probabilities, whose first entry is that of the actual token
    logprobs = [next(iter(step.values())).logprob for step in steps]
    return list(request_output.outputs[0].token_ids), logprobs


class Reference:
    """Model with "cab" in transformers. A call returns the result of `served` for one prompt."""

    def __init__(self, folder, config):
        options = {"attn_implementation": "cab", "cab_config": config}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    @torch.no_grad()
    def __call__(self, prompt, prompt_too=True):
        tokens, logprobs = torch.tensor([prompt]), []
        out = self.model.generate(
            tokens,
            max_new_tokens=ANSWER,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        if prompt_too:
            logits = self.model(tokens).logits[0, :-1].log_softmax(-1)
            logprobs = logits.gather(1, tokens[0, 1:, None])[:, 0].tolist()
        answer = out.sequences[0, len(prompt) :].tolist()
        steps = zip(out.logits, answer, strict=True)
        logprobs += [x[0].log_softmax(-1)[token].item() for x, token in steps]
        return answer, logprobs


@pytest.fixture(scope="module")
def reference(llama):
    return Reference(llama, SPARSE)


def assert_same(actual, expected, tolerance=TOLERANCE):
    """Assert that two results of `served` have equal tokens and close log-probabilities."""
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, expected_logprobs) in zip(actual, expected, strict=True):
        assert len(logprobs) == len(expected_logprobs)
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(expected_logprobs), atol=tolerance, rtol=0
        )


def density():
    """Return the density of all sparse layers since ``attended.clear()``."""
    pairs = [x.double() for x in attended.values()]
    return float(sum(x[0] for x in pairs) / sum(x[1] for x in pairs))


@pytest.mark.parametrize(
    ("token_budget", "first_seed"), [(2048, 0), (160, 100)], ids=["whole", "in-chunks"]
)
def test_full_budget_equals_vllm_dense_attention(engine, token_budget, first_seed):
    attended.clear()
    theirs, ours = (
        engine(None, max_num_batched_tokens=2048),
        engine(FULL, max_num_batched_tokens=token_budget),
    )
    for seed in range(first_seed, first_seed + 100):
        prompts = prompts_of(seed)
        assert_same(served(ours, prompts), served(theirs, prompts))
    assert density() == 1


@pytest.mark.parametrize(
    ("token_budget", "first_seed"), [(2048, 0), (160, 100)], ids=["whole", "in-chunks"]
)
def test_sparse_answers_equal_transformers(engine, reference, token_budget, first_seed):
    ours = engine(SPARSE, max_num_batched_tokens=token_budget)
    traces = [prompts_of(seed) for seed in range(first_seed, first_seed + 100)]
    attended.clear()
    answers = [served(ours, prompts) for prompts in traces]
    assert density() < 0.8
    for actual, prompts in zip(answers, traces, strict=True):
        assert_same(actual, [reference(x) for x in prompts])


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
    prompts = prompts_of(3, max_count=3, longest=200)
    small_cache = {"num_gpu_blocks_override": 64}
    expected = served(engine(None, max_num_batched_tokens=2048), prompts)
    attended.clear()
    assert_same(served(engine(FULL, **small_cache | options), prompts), expected)
    assert attended


def test_cached_prefix_is_not_recomputed(engine, reference):
    ours = engine(SPARSE, max_num_batched_tokens=160)
    prefix = [(7 * i * i + 3) % 500 + 3 for i in range(256)]
    prompts = [prefix + x for x in ([5, 6] * 90, [9, 8, 7] * 70, [11] * 150)]
    expected = [reference(x, prompt_too=False) for x in prompts]
    for prompt, answer in zip(prompts, expected, strict=True):
        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        cached = ours.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        assert cached.num_cached_tokens == (0 if prompt is prompts[0] else 256)
        assert_same(served(ours, [prompt], prompt_too=False), [answer])


def test_preempted_requests_are_recomputed(engine, reference, monkeypatch):
    ours = engine(
        SPARSE, max_num_batched_tokens=2048, num_gpu_blocks_override=10, enable_prefix_caching=False
    )
    # the cache has nine pages of 128 tokens. Each of three prompts fills three pages, and its
    # answer needs a fourth page, so that a request is preempted
    prompts = [[(i * n) % 500 + 3 for i in range(383)] for n in (3, 7, 11)]
    scheduler, preempted = ours.llm_engine.engine_core.engine_core.scheduler, []
    original_preempt = scheduler._preempt_request

    def preempt(request, timestamp, **options):
        preempted.append(request)
        return original_preempt(request, timestamp, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    actual = served(ours, prompts, prompt_too=False)
    assert preempted
    assert_same(actual, [reference(x, prompt_too=False) for x in prompts])


def test_aborted_request_does_not_change_others(engine, reference):
    ours = engine(SPARSE, max_num_batched_tokens=160).llm_engine
    prompts = [[(i * n) % 500 + 3 for i in range(400)] for n in (3, 7, 11)]
    sampling = SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, logprobs=0
    )
    for name, prompt in zip("abc", prompts, strict=True):
        ours.add_request(name, {"prompt_token_ids": prompt}, sampling)
    ours.step()
    ours.abort_request(["b"])
    finished = {}
    while ours.has_unfinished_requests():
        finished |= {x.request_id[0]: x for x in ours.step() if x.finished}
    expected = [reference(prompts[i], prompt_too=False) for i in (0, 2)]
    assert_same([read(finished[name]) for name in "ac"], expected)


def test_prompts_below_min_length_use_dense_backend(engine):
    attended.clear()
    prompts = prompts_of(7, 5, 300)
    ours = engine(SPARSE | {"min_length": 400})
    assert_same(served(ours, prompts), served(engine(None, max_num_batched_tokens=2048), prompts))
    assert not attended


def test_batch_with_short_and_long_prompts_equals_reference(engine, llama):
    config = SPARSE | {"min_length": 300}
    prompts = prompts_of(8, 5, 250) + prompts_of(9, 3, 600)
    ours, alone = engine(config, max_num_batched_tokens=2048), Reference(llama, config)
    assert {len(x) < 300 for x in prompts} == {True, False}
    assert_same(served(ours, prompts), [alone(x) for x in prompts])


def test_tensor_parallel_ranks_equal_reference(engine, reference):
    ours = engine(SPARSE, max_num_batched_tokens=160, tensor_parallel_size=2)
    prompts = prompts_of(10, 3)
    assert_same(served(ours, prompts), [reference(x) for x in prompts])


def test_cab_config_of_model_is_used(engine, llama, tmp_path):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    saved = SPARSE | {"dense_layers": [0]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"cab_config": saved}))
    prompts = prompts_of(11, 3)
    attended.clear()
    actual = served(engine({}, tmp_path), prompts)
    assert sorted(layer.layer_idx for layer in attended) == [1, 2]
    assert_same(actual, [Reference(tmp_path, saved)(x) for x in prompts])
    # another engine in the same process still uses its own settings
    assert_same(
        served(engine(FULL), prompts), served(engine(None, max_num_batched_tokens=2048), prompts)
    )


def test_speculative_decoding_equals_reference(engine, reference):
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    ours = engine(SPARSE, max_num_batched_tokens=160, speculative_config=guesses)
    prompts = [[(i * i) % 11 + 3 for i in range(n)] for n in (300, 170)]
    actual = served(ours, prompts, prompt_too=False)
    expected = [reference(x, prompt_too=False) for x in prompts]
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize(
    ("cab", "message"),
    [
        ({"mass_treshold": 0.1}, "mass_treshold"),
        ({"mass_threshold": 2}, "mass_threshold"),
        ({"dense_layers": [3]}, "dense_layers"),
        ("sparse", "sparse"),
    ],
)
def test_invalid_settings_raise_at_start(llama, cab, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(llama), skip_tokenizer_init=True, max_model_len=64, additional_config={"cab": cab})


def test_unsupported_vllm_version_raises(llama, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with pytest.raises(ValueError, match="vLLM must be .*, got 0.34.0"):
        LLM(str(llama), skip_tokenizer_init=True, additional_config={"cab": {}})
