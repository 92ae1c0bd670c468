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

from cab_hf.vllm.scheduler import BlockAlignedMixin, CabAsyncScheduler, CabScheduler

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

MODEL_FIELDS = {
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
MAX_IDLE_STEPS = 50


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine whose scheduler is tested.

    Attributes:
        max_batched_tokens: option ``max_num_batched_tokens``.
        query_block: tokens of a query block.
        block_size: tokens of a block of the KV cache, and of a state of Mamba layers.
        max_scheduled_tokens: option ``max_num_scheduled_tokens``; None for the budget.
        long_prompt_threshold: option ``long_prefill_token_threshold``; 0 for none.
        num_seqs: option ``max_num_seqs``.
        num_blocks: blocks of the KV cache.
        has_mamba: True if the model has attention and Mamba layers.
        has_prefix_cache: True if prompts with a common prefix share blocks of the KV cache.
        min_length: tokens of the shortest prompt with sparse attention.
        is_async: True for an asynchronous scheduler.
        draft_slots: tokens that speculative decoding adds to each request and step.
    """

    max_batched_tokens: int = 160
    query_block: int = 32
    block_size: int = 32
    max_scheduled_tokens: int | None = None
    long_prompt_threshold: int = 0
    num_seqs: int = 8
    num_blocks: int = 1000
    has_mamba: bool = False
    has_prefix_cache: bool = False
    min_length: int = 0
    is_async: bool = False
    draft_slots: int = 0


@dataclass
class ScheduleTrace:
    """Record of the chunks into which a scheduler divided prompts.

    Attributes:
        num_steps: number of scheduler steps until all requests were finished.
        chunks: by request id: (step, first token, end token) of every chunk.
        rejected_chunks: (request id, start, end) of chunks that vLLM's own scheduler would end
            earlier.
    """

    num_steps: int = 0
    chunks: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    rejected_chunks: list[tuple[str, int, int]] = field(default_factory=list)


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    model_folder = tmp_path_factory.mktemp("model")
    (model_folder / "config.json").write_text(json.dumps(MODEL_FIELDS))
    init_none_hash(sha256)
    return VllmConfig(
        model_config=ModelConfig(str(model_folder), skip_tokenizer_init=True, dtype="float32"),
        scheduler_config=SchedulerConfig.default_factory(
            max_model_len=4096, is_encoder_decoder=False, max_num_batched_tokens=4096
        ),
        cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
        additional_config={"cab": {"query_block": 32, "key_block": 16, "min_length": 0}},
    )


def make_scheduler(vllm_config, engine_options, is_cab=True):
    """Return a scheduler with ``engine_options``: the plugin's if ``is_cab``, else vLLM's."""
    engine_config = copy.copy(vllm_config)
    for config_name in ("scheduler_config", "cache_config"):
        setattr(engine_config, config_name, copy.copy(getattr(engine_config, config_name)))
    engine_config.additional_config = {
        "cab": {
            "query_block": engine_options.query_block,
            "key_block": min(engine_options.query_block, 16),
            "min_length": engine_options.min_length,
        }
    }
    engine_config.scheduler_config.max_num_batched_tokens = engine_options.max_batched_tokens
    engine_config.scheduler_config.max_num_scheduled_tokens = engine_options.max_scheduled_tokens
    engine_config.scheduler_config.long_prefill_token_threshold = (
        engine_options.long_prompt_threshold
    )
    engine_config.scheduler_config.max_num_seqs = engine_options.num_seqs
    engine_config.cache_config.block_size = engine_options.block_size
    engine_config.cache_config.num_gpu_blocks = engine_options.num_blocks
    engine_config.cache_config.enable_prefix_caching = engine_options.has_prefix_cache
    engine_config.cache_config.mamba_cache_mode = "align" if engine_options.has_mamba else "none"
    block_size = engine_options.block_size
    kv_cache_specs = [
        FullAttentionSpec(block_size, num_kv_heads=2, head_size=32, dtype=torch.float32)
    ]
    if engine_options.has_mamba:
        kv_cache_specs.append(
            MambaSpec(
                block_size, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
            )
        )
    kv_cache_config = KVCacheConfig(
        num_blocks=engine_options.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([str(group_index)], kv_cache_spec)
            for group_index, kv_cache_spec in enumerate(kv_cache_specs)
        ],
    )
    scheduler_classes = {
        (True, False): CabScheduler,
        (True, True): CabAsyncScheduler,
        (False, False): Scheduler,
        (False, True): AsyncScheduler,
    }
    scheduler = scheduler_classes[is_cab, engine_options.is_async](
        vllm_config=engine_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(engine_config),
        block_size=block_size,
    )
    if engine_options.draft_slots:
        engine_config.speculative_config = SimpleNamespace(
            max_num_new_slots_for_drafting=engine_options.draft_slots
        )
    return scheduler


def make_request(request_id, prompt, engine_options, num_answer_tokens=2):
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=num_answer_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(engine_options.block_size, sha256),
    )


def schedule_step(scheduler, trace):
    """Schedule a step, record its chunks in ``trace``, and add a token to each finished prompt."""
    scheduler_output = scheduler.schedule()
    sampled_tokens = {}
    for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
        request = scheduler.requests[request_id]
        end = request.num_computed_tokens
        if end - num_tokens < request.num_prompt_tokens:
            trace.chunks.setdefault(request_id, []).append((trace.num_steps, end - num_tokens, end))
            if not is_vllm_chunk_end(scheduler, request, end - num_tokens, end):
                trace.rejected_chunks.append((request_id, end - num_tokens, end))
        sampled_tokens[request_id] = [7] if end >= request.num_tokens else []
    trace.num_steps += 1
    request_ids = list(sampled_tokens)
    runner_output = ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={
            request_id: request_index for request_index, request_id in enumerate(request_ids)
        },
        sampled_token_ids=list(sampled_tokens.values()),
    )
    scheduler.update_from_output(scheduler_output, runner_output)
    return scheduler_output


def is_vllm_chunk_end(scheduler, request, start, end):
    """Return True if vLLM's scheduler accepts a chunk from ``start`` to ``end``.

    In models with Mamba layers, vLLM shortens chunks to multiples of the block size.
    """
    if not scheduler.has_mamba_layers:
        return True
    earlier_request = copy.copy(request)
    earlier_request.num_computed_tokens = start
    return (
        Scheduler._mamba_block_aligned_split(scheduler, earlier_request, end - start) == end - start
    )


def schedule_all(scheduler, engine_options, arrivals):
    """Schedule requests until all are finished, and return the `ScheduleTrace`.

    ``arrivals`` lists (step of the arrival, prompt, number of tokens to generate) of all requests.
    """
    trace, waiting_arrivals, num_idle_steps = ScheduleTrace(), list(enumerate(arrivals)), 0
    while waiting_arrivals or scheduler.has_unfinished_requests():
        while waiting_arrivals and waiting_arrivals[0][1][0] <= trace.num_steps:
            request_index, (_, prompt, num_answer_tokens) = waiting_arrivals.pop(0)
            scheduler.add_request(
                make_request(str(request_index), prompt, engine_options, num_answer_tokens)
            )
        scheduler_output = schedule_step(scheduler, trace)
        is_idle_step = scheduler.requests and not scheduler_output.total_num_scheduled_tokens
        num_idle_steps = num_idle_steps + 1 if is_idle_step else 0
        assert num_idle_steps < MAX_IDLE_STEPS, "no request makes progress"
    return trace


def draw_options(generator):
    block_size = generator.choice([16, 32, 48, 96, 128])
    has_mamba = generator.random() < 0.4
    query_block = generator.choice([16, 32, 64, 128])
    # budgets below one block are included: vLLM's scheduler before 0.27 fails for Mamba with these
    token_budget = generator.randrange(8, 400)
    return EngineOptions(
        max_batched_tokens=token_budget,
        query_block=query_block,
        block_size=block_size,
        max_scheduled_tokens=generator.choice(
            [None, None, generator.randrange(1, token_budget + 1)]
        ),
        long_prompt_threshold=generator.choice([0, 0, generator.randrange(4, 300)]),
        num_seqs=generator.randrange(1, 9),
        num_blocks=generator.choice([1000, math.ceil(1000 / block_size) * 2 + 8]),
        has_mamba=has_mamba,
        has_prefix_cache=has_mamba or generator.random() < 0.5,
        min_length=generator.choice([0, 0, 200]),
        is_async=generator.random() < 0.3,
    )


def draw_arrivals(generator):
    prefix_tokens = [generator.randrange(3, 510) for _ in range(generator.choice([0, 100, 400]))]
    arrivals = []
    for _ in range(generator.randrange(1, 9)):
        suffix_tokens = [generator.randrange(3, 510) for _ in range(generator.randrange(1, 600))]
        prompt = prefix_tokens + suffix_tokens if generator.random() < 0.6 else suffix_tokens
        arrivals.append((generator.randrange(0, 8), prompt, generator.randrange(1, 30)))
    return sorted(arrivals, key=lambda arrival: arrival[0])


def find_possible_borders(engine_options, start, end):
    """Return the multiples of the query block in (start, end] at which vLLM can end a chunk.

    With Mamba layers, these are the common multiples of query block and KV cache block.
    """
    chunk_alignment = math.lcm(
        engine_options.query_block, engine_options.block_size if engine_options.has_mamba else 1
    )
    return range((start // chunk_alignment + 1) * chunk_alignment, end + 1, chunk_alignment)


@pytest.mark.parametrize("first_seed", range(0, 300, 100))
def test_requests_finish_and_chunks_end_at_block_borders(vllm_config, first_seed):
    for seed in range(first_seed, first_seed + 100):
        generator = Random(seed)
        engine_options, arrivals = draw_options(generator), draw_arrivals(generator)
        vllm_trace = schedule_all(
            make_scheduler(vllm_config, engine_options, is_cab=False), engine_options, arrivals
        )
        trace = schedule_all(make_scheduler(vllm_config, engine_options), engine_options, arrivals)
        assert trace.num_steps <= 2 * vllm_trace.num_steps + len(arrivals), (seed, engine_options)
        assert not trace.rejected_chunks, (seed, engine_options)
        for request_id, chunks in trace.chunks.items():
            prompt_length = len(arrivals[int(request_id)][1])
            if prompt_length < max(engine_options.min_length, engine_options.query_block):
                continue
            for _, start, end in chunks:
                if end < prompt_length and end % engine_options.query_block:
                    assert not find_possible_borders(engine_options, start, end), (
                        seed,
                        engine_options,
                        request_id,
                        start,
                        end,
                    )


def make_arrivals(*prompt_lengths):
    """Return arrivals for `schedule_all`: prompts in step 0, with one token each to generate."""
    return [
        (0, [prompt_index + 3] * prompt_length, 1)
        for prompt_index, prompt_length in enumerate(prompt_lengths)
    ]


def read_chunk_ends(trace, request_id):
    return [end for _, _, end in trace.chunks[request_id]]


@pytest.mark.parametrize(
    ("engine_options", "prompt_length", "expected_ends"),
    [
        pytest.param(
            {"max_scheduled_tokens": 16},
            70,
            [16, 32, 48, 64, 70],
            id="scheduled-tokens-below-block",
        ),
        pytest.param({"max_scheduled_tokens": 20}, 70, [20, 32, 52, 70], id="block-is-no-multiple"),
        pytest.param({"max_batched_tokens": 16}, 70, [16, 32, 48, 64, 70], id="batch-below-block"),
        pytest.param(
            {"max_batched_tokens": 32, "draft_slots": 4}, 70, [28, 32, 60, 70], id="draft-model"
        ),
        pytest.param({"max_batched_tokens": 100}, 250, [96, 192, 250], id="budget-above-block"),
        pytest.param({"min_length": 300}, 250, [160, 250], id="dense-prompt"),
    ],
)
def test_budget_below_block_size_lets_prompt_finish(
    vllm_config, engine_options, prompt_length, expected_ends
):
    engine_options = EngineOptions(**engine_options)
    assert (
        read_chunk_ends(
            schedule_all(
                make_scheduler(vllm_config, engine_options),
                engine_options,
                make_arrivals(prompt_length),
            ),
            "0",
        )
        == expected_ends
    )


def test_threshold_below_block_size_lets_prompts_finish(vllm_config):
    """Schedule two requests, because vLLM applies the threshold to several requests only."""
    engine_options = EngineOptions(long_prompt_threshold=12)
    trace = schedule_all(
        make_scheduler(vllm_config, engine_options), engine_options, make_arrivals(40, 40)
    )
    assert read_chunk_ends(trace, "0") == read_chunk_ends(trace, "1") == [12, 24, 32, 40]


@pytest.mark.parametrize(
    ("block_size", "max_batched_tokens", "prompt_length", "expected_ends"),
    [
        # chunks end at common multiples: lcm(128, 96) = 384, and lcm(128, 288) = 1152
        (96, 512, 700, [384, 672, 700]),
        (288, 512, 700, [288, 576, 700]),
        (288, 1200, 1500, [1152, 1440, 1500]),
        (64, 512, 1000, [512, 896, 960, 1000]),
    ],
)
def test_hybrid_chunks_end_at_cached_mamba_states(
    vllm_config, block_size, max_batched_tokens, prompt_length, expected_ends
):
    engine_options = EngineOptions(
        max_batched_tokens=max_batched_tokens,
        query_block=128,
        block_size=block_size,
        has_mamba=True,
        has_prefix_cache=True,
    )
    scheduler, prompt = (
        make_scheduler(vllm_config, engine_options),
        list(range(3, 3 + prompt_length)),
    )
    arrivals = [(0, prompt, 1), (20, [*prompt[:-5], 1, 2], 1)]
    trace = schedule_all(scheduler, engine_options, arrivals)
    assert read_chunk_ends(trace, "0") == expected_ends
    # the second prompt reuses the last Mamba state of the first prompt in the prefix cache
    assert trace.chunks["1"][0][1] == expected_ends[-2]
    assert not trace.rejected_chunks


def test_waiting_prompt_does_not_block_shorter_prompts(vllm_config):
    engine_options = EngineOptions(max_batched_tokens=150)
    trace = schedule_all(
        make_scheduler(vllm_config, engine_options), engine_options, make_arrivals(300, 300, 20)
    )
    assert trace.chunks["0"][0] == (0, 0, 128)
    assert trace.chunks["2"] == [(0, 0, 20)]
    assert trace.chunks["1"][0][1:] == (0, 96)


def test_decode_steps_with_small_remaining_budget_do_not_stall_prompt(vllm_config):
    engine_options = EngineOptions(max_batched_tokens=34, num_seqs=7)
    decode_arrivals = [(0, [prompt_index + 3] * 4, 200) for prompt_index in range(5)]
    trace = schedule_all(
        make_scheduler(vllm_config, engine_options),
        engine_options,
        [*decode_arrivals, (2, [9] * 100, 1)],
    )
    _, _, first_end = trace.chunks["5"][0]
    last_step, _, last_end = trace.chunks["5"][-1]
    # the prompt arrives in step 2, waits for at most one step, and takes at most two steps for each
    # of its four query blocks
    assert last_step - 2 <= 1 + 2 * 4
    assert (first_end, last_end) == (29, 100)


# tokens: length of the chunk before an image; expected: length after alignment to query blocks
@pytest.mark.parametrize(
    ("num_tokens", "num_aligned_tokens"), [(20, 20), (31, 31), (32, 32), (50, 32)]
)
def test_full_encoder_cache_leaves_nonempty_chunk_before_image(
    vllm_config, num_tokens, num_aligned_tokens
):
    # vLLM 0.22 to 0.26 first ends the chunk before the image, and then aligns the end of this chunk
    scheduler = make_scheduler(vllm_config, EngineOptions())
    request = make_request("0", [5] * 300, EngineOptions())
    scheduler.schedule()
    assert scheduler._mamba_block_aligned_split(request, num_tokens) == num_aligned_tokens
    scheduler.scheduled_tokens["another"] = 32
    assert scheduler._mamba_block_aligned_split(request, num_tokens) == num_aligned_tokens


@pytest.mark.parametrize(("is_indivisible", "num_aligned_tokens"), [(True, 32), (False, 96)])
def test_indivisible_image_is_not_split(vllm_config, is_indivisible, num_aligned_tokens):
    scheduler = make_scheduler(vllm_config, EngineOptions())
    scheduler.scheduler_config.disable_chunked_mm_input = is_indivisible
    request = make_request("0", [5] * 300, EngineOptions())
    # the image has tokens 40 to 109: the multiples 64 and 96 of the query block are inside
    image_position = SimpleNamespace(offset=40, length=70)
    request.mm_features = [SimpleNamespace(mm_position=image_position)]
    scheduler.schedule()
    assert scheduler._mamba_block_aligned_split(request, 110) == num_aligned_tokens


def test_dropped_short_chunk_is_scheduled_without_alignment(vllm_config):
    scheduler = make_scheduler(vllm_config, EngineOptions())
    request = make_request("0", [5] * 300, EngineOptions())
    chunk_lengths = []
    for _ in range(3):
        scheduler.schedule()
        chunk_lengths.append(scheduler._mamba_block_aligned_split(request, 110))
    assert chunk_lengths == [96, 110, 96]


class AsyncLoadScheduler:
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
        num_tokens = 0
        if self.need_mamba_block_aligned_split:
            num_tokens = self._mamba_block_aligned_split(request, num_tokens, 0, 64)
            if num_tokens == 0:
                return "not loaded"
        return self.kv_cache_manager.allocate_slots(request, num_tokens)


def test_async_kv_load_starts_in_vllm_0_22(vllm_config, monkeypatch):
    monkeypatch.setattr("cab_hf.vllm.scheduler.__version__", "0.22.1")
    scheduler = type("Old", (BlockAlignedMixin, AsyncLoadScheduler), {})(vllm_config)
    assert scheduler.schedule(make_request("0", [5] * 300, EngineOptions())) == []


def test_connector_chunks_are_aligned_since_vllm_0_23(vllm_config, monkeypatch):
    monkeypatch.setattr("cab_hf.vllm.scheduler.__version__", "0.23.0")
    assert type("New", (BlockAlignedMixin, AsyncLoadScheduler), {})(
        vllm_config
    ).need_mamba_block_aligned_split


def test_mamba_split_accepts_common_prefix_of_vllm_0_24(vllm_config):
    scheduler = make_scheduler(vllm_config, EngineOptions())
    scheduler.schedule()
    request = make_request("0", [5] * 300, EngineOptions())
    assert scheduler._mamba_block_aligned_split(request, 110, 0, 0, 0) == 96
