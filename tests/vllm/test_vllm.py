"""The vLLM backend on a CPU. `make vllm-test` runs these tests in a separate environment."""

import json
import random

import pytest
import torch

pytest.importorskip("vllm")
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from cab_hf.dispatch import attended

# warnings are those of vLLM and its libraries
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCKS = {"query_block": 32, "key_block": 16, "min_length": 0, "local_blocks": 1}
FULL = BLOCKS | {"mass_threshold": 0.0}
SPARSE = BLOCKS | {"mass_threshold": 0.3, "share_threshold": 1.0}
CLOSE = 2e-5
ANSWER = 4


def prompts_of(seed, most=5, longest=600):
    draw = random.Random(seed)
    lengths = [draw.randrange(20, longest) for _ in range(draw.randint(1, most))]
    return [[draw.randrange(3, 510) for _ in range(length)] for length in lengths]


def served(engine, prompts, prompt_too=True):
    """Return (answer tokens, log-probabilities of prompt and answer tokens) of every prompt."""
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


def read(answer):
    numbers_of_prompt = [
        next(iter(x.values())).logprob for x in (answer.prompt_logprobs or [None])[1:]
    ]
    tokens, numbers = answer.outputs[0].token_ids, answer.outputs[0].logprobs
    return list(tokens), [*numbers_of_prompt, *(next(iter(x.values())).logprob for x in numbers)]


class Reference:
    """Reference answers of "cab" under transformers, one prompt at a time."""

    def __init__(self, folder, config):
        options = {"attn_implementation": "cab", "cab_config": config}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    @torch.no_grad()
    def __call__(self, prompt, prompt_too=True):
        tokens, numbers = torch.tensor([prompt]), []
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
            numbers = logits.gather(1, tokens[0, 1:, None])[:, 0].tolist()
        answer = out.sequences[0, len(prompt) :].tolist()
        steps = zip(out.logits, answer, strict=True)
        return answer, numbers + [x[0].log_softmax(-1)[token].item() for x, token in steps]


@pytest.fixture(scope="module")
def reference(llama):
    return Reference(llama, SPARSE)


def assert_same(got, wanted, close=CLOSE):
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]
    for (_, here), (_, there) in zip(got, wanted, strict=True):
        assert len(here) == len(there)
        torch.testing.assert_close(torch.tensor(here), torch.tensor(there), atol=close, rtol=0)


def density():
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
    got = [served(ours, prompts) for prompts in traces]
    assert density() < 0.8
    for here, prompts in zip(got, traces, strict=True):
        assert_same(here, [reference(x) for x in prompts])


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
    """Every query block is cut, and its parts select key blocks separately."""
    prompts = prompts_of(3, most=3, longest=200)
    small = {"num_gpu_blocks_override": 64}
    wanted = served(engine(None, max_num_batched_tokens=2048), prompts)
    attended.clear()
    assert_same(served(engine(FULL, **small | options), prompts), wanted)
    assert attended


def test_cached_prefix_is_not_recomputed(engine, reference):
    ours = engine(SPARSE, max_num_batched_tokens=160)
    prefix = [(7 * i * i + 3) % 500 + 3 for i in range(256)]
    prompts = [prefix + x for x in ([5, 6] * 90, [9, 8, 7] * 70, [11] * 150)]
    wanted = [reference(x, prompt_too=False) for x in prompts]
    for prompt, answer in zip(prompts, wanted, strict=True):
        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        cached = ours.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        assert cached.num_cached_tokens == (0 if prompt is prompts[0] else 256)
        assert_same(served(ours, [prompt], prompt_too=False), [answer])


def test_preempted_requests_are_recomputed(engine, reference, monkeypatch):
    ours = engine(
        SPARSE, max_num_batched_tokens=2048, num_gpu_blocks_override=10, enable_prefix_caching=False
    )
    # three pages of 128 tokens each, of nine; the answers need a fourth
    prompts = [[(i * n) % 500 + 3 for i in range(383)] for n in (3, 7, 11)]
    scheduler, preempted = ours.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *x, **y: (preempted.append(x), preempt(*x, **y))[1]
    )
    got = served(ours, prompts, prompt_too=False)
    assert preempted
    assert_same(got, [reference(x, prompt_too=False) for x in prompts])


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
    done = {}
    while ours.has_unfinished_requests():
        done |= {x.request_id[0]: x for x in ours.step() if x.finished}
    wanted = [reference(prompts[at], prompt_too=False) for at in (0, 2)]
    assert_same([read(done[name]) for name in "ac"], wanted)


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
    got = served(engine({}, tmp_path), prompts)
    assert sorted(x.layer_idx for x in attended) == [1, 2]
    assert_same(got, [Reference(tmp_path, saved)(x) for x in prompts])
    # an engine of another model has its own settings
    assert_same(
        served(engine(FULL), prompts), served(engine(None, max_num_batched_tokens=2048), prompts)
    )


def test_speculative_decoding_equals_reference(engine, reference):
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    ours = engine(SPARSE, max_num_batched_tokens=160, speculative_config=guesses)
    prompts = [[(i * i) % 11 + 3 for i in range(n)] for n in (300, 170)]
    got = served(ours, prompts, prompt_too=False)
    wanted = [reference(x, prompt_too=False) for x in prompts]
    assert [x for x, _ in got] == [x for x, _ in wanted]


@pytest.mark.parametrize(
    ("cab", "options", "named"),
    [
        ({"mass_treshold": 0.1}, {}, "mass_treshold"),
        ({"mass_threshold": 2}, {}, "mass_threshold"),
        ({"dense_layers": [3]}, {}, "dense_layers"),
        ("sparse", {}, "sparse"),
    ],
)
def test_invalid_settings_raise_at_start(llama, cab, options, named):
    given = {"skip_tokenizer_init": True, "max_model_len": 64} | options
    with pytest.raises(ValueError, match=named):
        LLM(str(llama), additional_config={"cab": cab}, **given)


def test_unsupported_vllm_version_raises(llama, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with pytest.raises(ValueError, match="vLLM must be .*, got 0.34.0"):
        LLM(str(llama), skip_tokenizer_init=True, additional_config={"cab": {}})
