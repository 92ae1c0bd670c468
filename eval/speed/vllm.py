"""The measurement of ``speed serve --engine vllm``: a trace of requests, served by vLLM."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from cab_hf.config import CabConfig
from cab_hf.dispatch import attended_pairs
from cab_hf.eval.speed.model import CAB_IMPLEMENTATIONS, make_model_config
from cab_hf.eval.speed.serve import round_times
from cab_hf.eval.speed.timing import make_bench

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from cab_hf.eval.speed.serve import Request, Settings

# vLLM's names of its own attention backend and of a plug-in backend, which is CAB's
VLLM_BACKEND, CAB_BACKEND = "FLASH_ATTN", "CUSTOM"


def serve_in_new_process(**arguments: Any) -> dict[str, Any]:
    """Run `serve_traces` in another process, and return its result.

    The end of this process frees all GPU memory.

    Args:
        arguments: keyword arguments of `serve_traces`.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        return executor.submit(serve_traces, **arguments).result()


def serve_traces(
    settings: Settings,
    implementation: str,
    config: CabConfig,
    warm_up_trace: Sequence[Request],
    warm_up_tokens: int,
    trace: Sequence[Request],
) -> dict[str, Any]:
    """Build a vLLM engine, serve a warm-up trace, then serve and measure ``trace``.

    Args:
        settings: the settings.
        implementation: one of `CAB_IMPLEMENTATIONS`, or vLLM's own attention.
        config: the config of CAB.
        warm_up_trace: requests that are served first.
        warm_up_tokens: generated tokens of a warm-up request.
        trace: the measured requests.

    Returns:
        The fields of a result record: ``served`` from `serve`, ``peak_gib``, and
        `read_engine_fields`.
    """
    engine, request_results = build_engine(settings, implementation, config), []
    serve(engine, warm_up_trace, warm_up_tokens)
    _, peak_gib = make_bench(settings.device).time_runs(
        lambda: request_results.extend(serve(engine, trace, settings.new_tokens)), 1
    )
    return {**read_engine_fields(engine, settings), "served": request_results, "peak_gib": peak_gib}


def build_engine(settings: Settings, implementation: str, config: CabConfig) -> LLMEngine:
    """Return an engine of vLLM for a model with random weights and for the lengths of the trace.

    Args:
        settings: shape of the model, cache and trace.
        implementation: one of `CAB_IMPLEMENTATIONS`, or vLLM's own attention.
        config: the config of CAB.
    """
    # run the engine in this process, where `serve` and `read_engine_fields` read its counts
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    engine_options: dict[str, Any] = {}
    if implementation in CAB_IMPLEMENTATIONS:
        engine_options["additional_config"] = {"cab": config.to_dict()}
    if settings.device != "cpu":
        engine_options["attention_backend"] = (
            CAB_BACKEND if implementation in CAB_IMPLEMENTATIONS else VLLM_BACKEND
        )
        engine_options["gpu_memory_utilization"] = settings.memory
    max_sequence_tokens = settings.longest + settings.new_tokens
    with TemporaryDirectory() as model_folder:
        hf_config = make_model_config(settings)
        hf_config.max_position_embeddings = max_sequence_tokens
        architecture = "Qwen3MoeForCausalLM" if settings.experts else "LlamaForCausalLM"
        hf_config.architectures = [architecture]
        hf_config.save_pretrained(model_folder)
        return LLM(
            model_folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=settings.dtype,
            seed=settings.seed,
            max_model_len=max_sequence_tokens,
            max_num_batched_tokens=settings.batch_tokens,
            max_num_seqs=sum(settings.num_requests_by_length.values()),
            num_gpu_blocks_override=settings.blocks,
            enable_prefix_caching=settings.shared > 0,
            quantization=settings.quantization or None,
            **engine_options,
        ).llm_engine


def serve(engine: LLMEngine, trace: Sequence[Request], num_new_tokens: int) -> list[dict[str, Any]]:
    """Submit requests at their times of arrival, and wait for ``num_new_tokens`` tokens of each.

    Returns:
        A mapping per request, as `cab_hf.eval.speed.serve.serve` returns it.
    """
    from vllm import SamplingParams

    scheduler, preempted_ids = engine.engine_core.engine_core.scheduler, set()
    original_preempt = scheduler._preempt_request

    def record_and_preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted_ids.add(request.request_id)
        return original_preempt(request, *args, **kwargs)

    scheduler._preempt_request = record_and_preempt
    sampling_params = SamplingParams(
        temperature=0, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False
    )
    attended_pairs.clear()
    start_time = time.perf_counter()
    result_by_name = {
        str(request_index): {"length": len(request.prompt)}
        for request_index, request in enumerate(trace)
    }
    waiting_requests = deque(zip(result_by_name, trace, strict=True))
    while waiting_requests or engine.has_unfinished_requests():
        now_s = time.perf_counter() - start_time
        while waiting_requests and waiting_requests[0][1].arrival_s <= now_s:
            request_name, request = waiting_requests.popleft()
            result_by_name[request_name]["arrived"] = now_s
            engine.add_request(request_name, {"prompt_token_ids": request.prompt}, sampling_params)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting_requests[0][1].arrival_s - now_s))
            continue
        for output in engine.step():
            request_result, now_s = (
                result_by_name[output.request_id],
                time.perf_counter() - start_time,
            )
            request_result.setdefault("first", now_s)
            request_result["last"] = now_s
    scheduler._preempt_request = original_preempt
    for request_name, request_result in result_by_name.items():
        # vLLM appends a suffix to the id of a request
        request_result["preempted"] = any(
            request_id.split("-")[0] == request_name for request_id in preempted_ids
        )
    return round_times(result_by_name.values())


def read_engine_fields(engine: LLMEngine, settings: Settings) -> dict[str, Any]:
    """Return the fields of a result record that describe the engine and its last trace.

    The fields are the batching settings, the size of the KV cache, and the density of the trace.

    Args:
        engine: the engine.
        settings: shape of the model.
    """
    from vllm import __version__

    vllm_config = engine.vllm_config
    cache_config, scheduler_config = vllm_config.cache_config, vllm_config.scheduler_config
    num_pages = cache_config.num_gpu_blocks
    # (attended pairs, causal pairs) of each sparse layer
    density = (
        fmean([float(pair_counts[0] / pair_counts[1]) for pair_counts in attended_pairs.values()])
        if attended_pairs
        else 1.0
    )
    return {
        "batching": {
            "block_size": cache_config.block_size,
            "num_gpu_blocks": num_pages,
            "max_num_batched_tokens": scheduler_config.max_num_batched_tokens,
            "max_num_seqs": scheduler_config.max_num_seqs,
            "async_scheduling": scheduler_config.async_scheduling,
            "enable_prefix_caching": cache_config.enable_prefix_caching,
            "cudagraph_mode": str(vllm_config.compilation_config.cudagraph_mode),
        },
        "cache_gib": settings.compute_cache_gib(num_pages * cache_config.block_size),
        "density": density,
        "ran_as": f"vLLM {__version__}, {len(attended_pairs)} layers sparse",
    }
