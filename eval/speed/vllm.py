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
from cab_hf.dispatch import attended
from cab_hf.eval.speed.model import CAB, model_config
from cab_hf.eval.speed.serve import rounded
from cab_hf.eval.speed.timing import bench_on

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from cab_hf.eval.speed.serve import Request, Settings

# vLLM's names of its own attention backend and of a plug-in backend, which is CAB's
OWN, CUSTOM = "FLASH_ATTN", "CUSTOM"


def measured(**arguments: Any) -> dict[str, Any]:
    """Run `serve_traces` in another process, and return its result.

    The end of this process frees all GPU memory.

    Args:
        arguments: keyword arguments of `serve_traces`.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(serve_traces, **arguments).result()


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
        implementation: one of `CAB`, or vLLM's own attention.
        config: the config of CAB.
        warm_up_trace: requests that are served first.
        warm_up_tokens: generated tokens of a warm-up request.
        trace: the measured requests.

    Returns:
        The fields of a result record: ``served`` from `serve`, ``peak_gib``, and `engine_fields`.
    """
    engine, served = engine_of(settings, implementation, config), []
    serve(engine, warm_up_trace, warm_up_tokens)
    _, peak = bench_on(settings.device).walls(
        lambda: served.extend(serve(engine, trace, settings.new_tokens)), 1
    )
    return {**engine_fields(engine, settings), "served": served, "peak_gib": peak}


def engine_of(settings: Settings, implementation: str, config: CabConfig) -> LLMEngine:
    """Return an engine of vLLM for a model with random weights and for the lengths of the trace.

    Args:
        settings: shape of the model, cache and trace.
        implementation: one of `CAB`, or vLLM's own attention.
        config: the config of CAB.
    """
    # run the engine in this process, where `serve` and `engine_fields` read its counts
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    options: dict[str, Any] = {}
    if implementation in CAB:
        options["additional_config"] = {"cab": config.to_dict()}
    if settings.device != "cpu":
        options["attention_backend"] = CUSTOM if implementation in CAB else OWN
        options["gpu_memory_utilization"] = settings.memory
    longest = settings.longest + settings.new_tokens
    with TemporaryDirectory() as folder:
        model = model_config(settings)
        model.max_position_embeddings = longest
        model.architectures = ["Qwen3MoeForCausalLM" if settings.experts else "LlamaForCausalLM"]
        model.save_pretrained(folder)
        return LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=settings.dtype,
            seed=settings.seed,
            max_model_len=longest,
            max_num_batched_tokens=settings.batch_tokens,
            max_num_seqs=sum(settings.counts.values()),
            num_gpu_blocks_override=settings.blocks,
            enable_prefix_caching=settings.shared > 0,
            quantization=settings.quantization or None,
            **options,
        ).llm_engine


def serve(engine: LLMEngine, trace: Sequence[Request], new_tokens: int) -> list[dict[str, Any]]:
    """Submit requests when they arrive, and wait until each has ``new_tokens`` generated tokens.

    Returns:
        A mapping per request, as `cab_hf.eval.speed.serve.serve` returns it.
    """
    from vllm import SamplingParams

    scheduler, preempted = engine.engine_core.engine_core.scheduler, set()
    preempt = scheduler._preempt_request

    def record_and_preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.add(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = record_and_preempt
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    attended.clear()
    began = time.perf_counter()
    served = {str(number): {"length": len(request.prompt)} for number, request in enumerate(trace)}
    waiting = deque(zip(served, trace, strict=True))
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - began
        while waiting and waiting[0][1].arrives <= now:
            name, request = waiting.popleft()
            served[name]["arrived"] = now
            engine.add_request(name, {"prompt_token_ids": request.prompt}, sampling)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[0][1].arrives - now))
            continue
        for output in engine.step():
            result, now = served[output.request_id], time.perf_counter() - began
            result.setdefault("first", now)
            result["last"] = now
    scheduler._preempt_request = preempt
    for name, result in served.items():
        # vLLM appends a suffix to the id of a request
        result["preempted"] = any(request_id.split("-")[0] == name for request_id in preempted)
    return rounded(served.values())


def engine_fields(engine: LLMEngine, settings: Settings) -> dict[str, Any]:
    """Return the fields of a result record that describe the engine and its last trace.

    The fields are the batching settings, the size of the KV cache, and the density of the trace.

    Args:
        engine: the engine.
        settings: shape of the model.
    """
    from vllm import __version__

    config = engine.vllm_config
    cache, scheduler = config.cache_config, config.scheduler_config
    pages = cache.num_gpu_blocks
    # (attended pairs, causal pairs) of each sparse layer
    density = fmean([float(x[0] / x[1]) for x in attended.values()]) if attended else 1.0
    return {
        "batching": {
            "block_size": cache.block_size,
            "num_gpu_blocks": pages,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "async_scheduling": scheduler.async_scheduling,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        },
        "cache_gib": settings.cache_gib(pages * cache.block_size),
        "density": density,
        "ran_as": f"vLLM {__version__}, {len(attended)} layers sparse",
    }
