"""Chunks into which the plugin's schedulers divide prompts, without running a model."""

import copy
import json
import math
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from cab_hf.vllm.scheduler import BlockAligned, CabAsyncScheduler, CabScheduler

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
# number of steps without scheduled tokens after which a test fails
IDLE_STEPS = 50


@dataclass(frozen=True)
class Setup:
    """Options of an engine whose scheduler is tested.

    Attributes:
        budget: option ``max_num_batched_tokens``.
        query_block: tokens of a query block.
        block_size: tokens of a block of the KV cache, and of a state of Mamba layers.
        scheduled: option ``max_num_scheduled_tokens``; None for the budget.
        threshold: option ``long_prefill_token_threshold``; 0 for none.
        num_seqs: option ``max_num_seqs``.
        num_blocks: blocks of the KV cache.
        has_mamba: True if the model has attention and Mamba layers.
        has_prefix_cache: True if prompts with a common prefix share blocks of the KV cache.
        min_length: tokens of the shortest prompt with sparse attention.
        is_async: True for an asynchronous scheduler.
        draft_slots: tokens that speculative decoding adds to each request and step.
    """

    budget: int = 160
    query_block: int = 32
    block_size: int = 32
    scheduled: int | None = None
    threshold: int = 0
    num_seqs: int = 8
    num_blocks: int = 1000
    has_mamba: bool = False
    has_prefix_cache: bool = False
    min_length: int = 0
    is_async: bool = False
    draft_slots: int = 0


@dataclass
class Trace:
    """Record of the chunks into which a scheduler divided prompts.

    Attributes:
        steps: number of scheduler steps until all requests were finished.
        chunks: by request id: (step, first token, end token) of every chunk.
        outside: (request id, start, end) of chunks that vLLM's own scheduler would end earlier.
    """

    steps: int = 0
    chunks: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    outside: list[tuple[str, int, int]] = field(default_factory=list)


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    init_none_hash(sha256)
    return VllmConfig(
        model_config=ModelConfig(str(folder), skip_tokenizer_init=True, dtype="float32"),
        scheduler_config=SchedulerConfig.default_factory(
            max_model_len=4096, is_encoder_decoder=False, max_num_batched_tokens=4096
        ),
        cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
        additional_config={"cab": {"query_block": 32, "key_block": 16, "min_length": 0}},
    )


def scheduler_of(vllm_config, setup, is_cab=True):
    """Return a scheduler with the options ``setup``: the plugin's if ``is_cab``, else vLLM's."""
    config = copy.copy(vllm_config)
    for part in ("scheduler_config", "cache_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.additional_config = {
        "cab": {
            "query_block": setup.query_block,
            "key_block": min(setup.query_block, 16),
            "min_length": setup.min_length,
        }
    }
    config.scheduler_config.max_num_batched_tokens = setup.budget
    config.scheduler_config.max_num_scheduled_tokens = setup.scheduled
    config.scheduler_config.long_prefill_token_threshold = setup.threshold
    config.scheduler_config.max_num_seqs = setup.num_seqs
    config.cache_config.block_size = setup.block_size
    config.cache_config.num_gpu_blocks = setup.num_blocks
    config.cache_config.enable_prefix_caching = setup.has_prefix_cache
    config.cache_config.mamba_cache_mode = "align" if setup.has_mamba else "none"
    size = setup.block_size
    groups = [FullAttentionSpec(size, num_kv_heads=2, head_size=32, dtype=torch.float32)]
    if setup.has_mamba:
        groups.append(
            MambaSpec(size, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
        )
    kv_cache_config = KVCacheConfig(
        num_blocks=setup.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([str(n)], spec) for n, spec in enumerate(groups)],
    )
    classes = {
        (True, False): CabScheduler,
        (True, True): CabAsyncScheduler,
        (False, False): Scheduler,
        (False, True): AsyncScheduler,
    }
    scheduler = classes[is_cab, setup.is_async](
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
    )
    if setup.draft_slots:
        config.speculative_config = SimpleNamespace(
            max_num_new_slots_for_drafting=setup.draft_slots
        )
    return scheduler


def request_of(name, prompt, setup, num_answer=2):
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=num_answer, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(setup.block_size, sha256),
    )


def step(scheduler, trace):
    """Schedule a step, record its chunks in ``trace``, and add a token to each finished prompt."""
    output = scheduler.schedule()
    tokens = {}
    for name, count in output.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        end = request.num_computed_tokens
        if end - count < request.num_prompt_tokens:
            trace.chunks.setdefault(name, []).append((trace.steps, end - count, end))
            if not vllm_ends_at(scheduler, request, end - count, end):
                trace.outside.append((name, end - count, end))
        tokens[name] = [7] if end >= request.num_tokens else []
    trace.steps += 1
    names = list(tokens)
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: n for n, name in enumerate(names)},
        sampled_token_ids=list(tokens.values()),
    )
    scheduler.update_from_output(output, result)
    return output


def vllm_ends_at(scheduler, request, start, end):
    """Return True if vLLM's scheduler accepts a chunk from ``start`` to ``end``.

    In models with Mamba layers, vLLM shortens chunks to multiples of the block size.
    """
    if not scheduler.has_mamba_layers:
        return True
    earlier = copy.copy(request)
    earlier.num_computed_tokens = start
    return Scheduler._mamba_block_aligned_split(scheduler, earlier, end - start) == end - start


def run(scheduler, setup, arrivals):
    """Schedule requests until all are finished, and return the `Trace`.

    ``arrivals`` lists (step of the arrival, prompt, number of tokens to generate) of all requests.
    """
    trace, waiting, num_idle = Trace(), list(enumerate(arrivals)), 0
    while waiting or scheduler.has_unfinished_requests():
        while waiting and waiting[0][1][0] <= trace.steps:
            name, (_, prompt, num_answer) = waiting.pop(0)
            scheduler.add_request(request_of(str(name), prompt, setup, num_answer))
        output = step(scheduler, trace)
        is_idle = scheduler.requests and not output.total_num_scheduled_tokens
        num_idle = num_idle + 1 if is_idle else 0
        assert num_idle < IDLE_STEPS, "no request makes progress"
    return trace


def draw_setup(draw):
    block_size = draw.choice([16, 32, 48, 96, 128])
    has_mamba = draw.random() < 0.4
    query_block = draw.choice([16, 32, 64, 128])
    # budgets below one block are included: vLLM's scheduler before 0.27 fails for Mamba with these
    budget = draw.randrange(8, 400)
    return Setup(
        budget=budget,
        query_block=query_block,
        block_size=block_size,
        scheduled=draw.choice([None, None, draw.randrange(1, budget + 1)]),
        threshold=draw.choice([0, 0, draw.randrange(4, 300)]),
        num_seqs=draw.randrange(1, 9),
        num_blocks=draw.choice([1000, math.ceil(1000 / block_size) * 2 + 8]),
        has_mamba=has_mamba,
        has_prefix_cache=has_mamba or draw.random() < 0.5,
        min_length=draw.choice([0, 0, 200]),
        is_async=draw.random() < 0.3,
    )


def draw_arrivals(draw):
    prefix = [draw.randrange(3, 510) for _ in range(draw.choice([0, 100, 400]))]
    arrivals = []
    for _ in range(draw.randrange(1, 9)):
        suffix = [draw.randrange(3, 510) for _ in range(draw.randrange(1, 600))]
        prompt = prefix + suffix if draw.random() < 0.6 else suffix
        arrivals.append((draw.randrange(0, 8), prompt, draw.randrange(1, 30)))
    return sorted(arrivals, key=lambda arrival: arrival[0])


def borders(setup, start, end):
    """Return the multiples of the query block in (start, end] at which vLLM can end a chunk.

    With Mamba layers, these are the common multiples of query block and KV cache block.
    """
    chunk_alignment = math.lcm(setup.query_block, setup.block_size if setup.has_mamba else 1)
    return range((start // chunk_alignment + 1) * chunk_alignment, end + 1, chunk_alignment)


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_requests_finish_and_chunks_end_at_block_borders(vllm_config, first):
    for seed in range(first, first + 100):
        draw = Random(seed)
        setup, arrivals = draw_setup(draw), draw_arrivals(draw)
        vllm_trace = run(scheduler_of(vllm_config, setup, is_cab=False), setup, arrivals)
        trace = run(scheduler_of(vllm_config, setup), setup, arrivals)
        assert trace.steps <= 2 * vllm_trace.steps + len(arrivals), (seed, setup)
        assert not trace.outside, (seed, setup)
        for name, chunks in trace.chunks.items():
            length = len(arrivals[int(name)][1])
            if length < max(setup.min_length, setup.query_block):
                continue
            for _, start, end in chunks:
                if end < length and end % setup.query_block:
                    assert not borders(setup, start, end), (seed, setup, name, start, end)


def prompts(*lengths):
    """Return ``arrivals`` for `run`: prompts of these lengths in step 0, with one token each."""
    return [(0, [n + 3] * length, 1) for n, length in enumerate(lengths)]


def ends(trace, name):
    return [end for _, _, end in trace.chunks[name]]


@pytest.mark.parametrize(
    ("setup", "length", "expected"),
    [
        pytest.param(
            {"scheduled": 16}, 70, [16, 32, 48, 64, 70], id="scheduled-tokens-below-block"
        ),
        pytest.param({"scheduled": 20}, 70, [20, 32, 52, 70], id="block-is-no-multiple"),
        pytest.param({"budget": 16}, 70, [16, 32, 48, 64, 70], id="batch-below-block"),
        pytest.param({"budget": 32, "draft_slots": 4}, 70, [28, 32, 60, 70], id="draft-model"),
        pytest.param({"budget": 100}, 250, [96, 192, 250], id="budget-above-block"),
        pytest.param({"min_length": 300}, 250, [160, 250], id="dense-prompt"),
    ],
)
def test_budget_below_block_size_lets_prompt_finish(vllm_config, setup, length, expected):
    setup = Setup(**setup)
    assert ends(run(scheduler_of(vllm_config, setup), setup, prompts(length)), "0") == expected


def test_threshold_below_block_size_lets_prompts_finish(vllm_config):
    """Schedule two requests, because vLLM applies the threshold to several requests only."""
    setup = Setup(threshold=12)
    trace = run(scheduler_of(vllm_config, setup), setup, prompts(40, 40))
    assert ends(trace, "0") == ends(trace, "1") == [12, 24, 32, 40]


@pytest.mark.parametrize(
    ("block_size", "budget", "length", "expected"),
    [
        # chunks end at common multiples: lcm(128, 96) = 384, and lcm(128, 288) = 1152
        (96, 512, 700, [384, 672, 700]),
        (288, 512, 700, [288, 576, 700]),
        (288, 1200, 1500, [1152, 1440, 1500]),
        (64, 512, 1000, [512, 896, 960, 1000]),
    ],
)
def test_hybrid_chunks_end_at_cached_mamba_states(
    vllm_config, block_size, budget, length, expected
):
    setup = Setup(
        budget=budget,
        query_block=128,
        block_size=block_size,
        has_mamba=True,
        has_prefix_cache=True,
    )
    scheduler, prompt = scheduler_of(vllm_config, setup), list(range(3, 3 + length))
    arrivals = [(0, prompt, 1), (20, [*prompt[:-5], 1, 2], 1)]
    trace = run(scheduler, setup, arrivals)
    assert ends(trace, "0") == expected
    # the second prompt reuses the last Mamba state of the first prompt in the prefix cache
    assert trace.chunks["1"][0][1] == expected[-2]
    assert not trace.outside


def test_waiting_prompt_does_not_block_shorter_prompts(vllm_config):
    setup = Setup(budget=150)
    trace = run(scheduler_of(vllm_config, setup), setup, prompts(300, 300, 20))
    assert trace.chunks["0"][0] == (0, 0, 128)
    assert trace.chunks["2"] == [(0, 0, 20)]
    assert trace.chunks["1"][0][1:] == (0, 96)


def test_decode_steps_with_small_remaining_budget_do_not_stall_prompt(vllm_config):
    setup = Setup(budget=34, num_seqs=7)
    answers = [(0, [n + 3] * 4, 200) for n in range(5)]
    trace = run(scheduler_of(vllm_config, setup), setup, [*answers, (2, [9] * 100, 1)])
    _, _, first_end = trace.chunks["5"][0]
    last_step, _, last_end = trace.chunks["5"][-1]
    # the prompt arrives in step 2, waits for at most one step, and takes at most two steps for each
    # of its four query blocks
    assert last_step - 2 <= 1 + 2 * 4
    assert (first_end, last_end) == (29, 100)


# tokens: length of the chunk before an image; expected: length after alignment to query blocks
@pytest.mark.parametrize(("tokens", "expected"), [(20, 20), (31, 31), (32, 32), (50, 32)])
def test_full_encoder_cache_leaves_nonempty_chunk_before_image(vllm_config, tokens, expected):
    # vLLM 0.22 to 0.26 first ends the chunk before the image, and then aligns the end of this chunk
    scheduler = scheduler_of(vllm_config, Setup())
    request = request_of("0", [5] * 300, Setup())
    scheduler.schedule()
    assert scheduler._mamba_block_aligned_split(request, tokens) == expected
    scheduler.scheduled_tokens["another"] = 32
    assert scheduler._mamba_block_aligned_split(request, tokens) == expected


@pytest.mark.parametrize(("is_whole", "expected"), [(True, 32), (False, 96)])
def test_indivisible_image_is_not_split(vllm_config, is_whole, expected):
    scheduler = scheduler_of(vllm_config, Setup())
    scheduler.scheduler_config.disable_chunked_mm_input = is_whole
    request = request_of("0", [5] * 300, Setup())
    # the image has tokens 40 to 109: the multiples 64 and 96 of the query block are inside
    position = SimpleNamespace(offset=40, length=70)
    request.mm_features = [SimpleNamespace(mm_position=position)]
    scheduler.schedule()
    assert scheduler._mamba_block_aligned_split(request, 110) == expected


def test_dropped_short_chunk_is_scheduled_without_alignment(vllm_config):
    scheduler = scheduler_of(vllm_config, Setup())
    request = request_of("0", [5] * 300, Setup())
    lengths = []
    for _ in range(3):
        scheduler.schedule()
        lengths.append(scheduler._mamba_block_aligned_split(request, 110))
    assert lengths == [96, 110, 96]


class LoadsFirst:
    """Base scheduler that handles asynchronous loads of KV caches as vLLM 0.22 does."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.scheduler_config = vllm_config.scheduler_config
        self.max_num_scheduled_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.connector = object()
        self.need_mamba_block_aligned_split = False
        self.kv_cache_manager = SimpleNamespace(
            new_step_starts=lambda: None, allocate_slots=lambda request, tokens: []
        )

    def schedule(self, request):
        tokens = 0
        if self.need_mamba_block_aligned_split:
            tokens = self._mamba_block_aligned_split(request, tokens, 0, 64)
            if tokens == 0:
                return "not loaded"
        return self.kv_cache_manager.allocate_slots(request, tokens)


def test_async_kv_load_starts_in_vllm_0_22(vllm_config, monkeypatch):
    monkeypatch.setattr("cab_hf.vllm.scheduler.__version__", "0.22.1")
    scheduler = type("Old", (BlockAligned, LoadsFirst), {})(vllm_config)
    assert scheduler.schedule(request_of("0", [5] * 300, Setup())) == []


def test_connector_chunks_are_aligned_since_vllm_0_23(vllm_config, monkeypatch):
    monkeypatch.setattr("cab_hf.vllm.scheduler.__version__", "0.23.0")
    assert type("New", (BlockAligned, LoadsFirst), {})(vllm_config).need_mamba_block_aligned_split


def test_mamba_split_accepts_common_prefix_of_vllm_0_24(vllm_config):
    scheduler = scheduler_of(vllm_config, Setup())
    scheduler.schedule()
    request = request_of("0", [5] * 300, Setup())
    assert scheduler._mamba_block_aligned_split(request, 110, 0, 0, 0) == 96
