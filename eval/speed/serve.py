"""``speed serve``: serve requests of mixed lengths by continuous batching or by vLLM."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cab_hf.eval.experiment import Row
from cab_hf.eval.report import grouped
from cab_hf.eval.speed import dense, runner
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.model import CAB, SDPA
from cab_hf.eval.speed.runner import CAB_DENSE, Panel, table
from cab_hf.experiment.settings import by_device, flag, option, parse_length

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager, PreTrainedModel

# seconds to wait for a generated token before checking that the manager still runs
LOOK_AGAIN = 0.1
# fields of `summary_of`
SUMMARY = (
    *("total_s", "prompt_tokens_s", "output_tokens_s"),
    *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "preempted"),
)
FLASH = ("flash_attention_3", "flash_attention_4", "flash_attention_2")
VLLM = "vllm"  # name of vLLM's own attention, and of the engine
KNOWN = (SDPA, *FLASH, CAB_DENSE, *CAB, VLLM)
WARM_UP_TOKENS = 8  # generated tokens of a warm-up request
# fields of a manager's config that results record
BATCHING = (
    *("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch"),
    *("max_blocks_per_request", "max_memory_percent", "use_cuda_graph", "use_async_batching"),
    *("allow_block_sharing", "scheduler_type"),
)
# field with a speed-up over the best dense implementation -> field whose values are compared
OVER = {"over_best": "total_s", "ttft_over_best": "ttft_p99", "tpot_over_best": "tpot_p99"}
NOTES = (
    "All implementations serve the same trace of random prompts. ttft: s from arrival to the "
    "first token. tpot: ms per output token after the first one. Percentiles are over requests; "
    "tokens/s are over all seconds from the first arrival to the last token. Preempted: requests "
    f"that were put back for lack of pages, and read again. {models.WAYS} It counts sparse calls "
    "only: no chunks that end before min_length and no decoding. The baseline is the dense "
    "implementation with the fewest seconds in all."
)


@dataclass(frozen=True)
class Settings(models.ModelSettings):
    """Settings of a run of ``speed serve``."""

    KEYS = {"implementation": "implementations"}

    POSITIVE = (*models.ModelSettings.POSITIVE, "batch_tokens", "warm_up")
    FROM_0 = (*models.ModelSettings.FROM_0, "rate")
    CHOICES = {"implementations": KNOWN, "engine": ("transformers", VLLM)}

    lengths: tuple[int, ...] | None = runner.listed(
        (2**15, 2**17), (256, 512), "tokens of prompts", parse_length
    )
    requests: tuple[str, ...] | None = runner.listed(
        ("16", "131072:4"), ("2",), "requests per length, or LENGTH:COUNT for one length"
    )
    implementations: tuple[str, ...] | None = runner.listed(
        # sdpa comes last, because it computes all pairs of a batch with a mask and is the slowest
        (*FLASH, CAB_DENSE, "cab", SDPA),
        (SDPA, CAB_DENSE, *CAB),
        "attention implementations",
    )
    engine: str = option("transformers", "serving engine: transformers or vllm")
    quantization: str = option("", "vLLM's quantization of the weights, such as fp8; empty: none")
    new_tokens: int | None = by_device(64, 8, "tokens generated per request", int)
    rate: float = option(0.0, "requests per second of Poisson arrivals; 0: all at once", float)
    shared: int = option(0, "tokens at the start that all prompts share", parse_length)
    batch_tokens: int | None = by_device(8192, 128, "max_batch_tokens", parse_length)
    page_size: int | None = by_device(256, 16, "tokens per page of the cache", int)
    blocks: int | None = by_device(
        None, 256, "pages of the cache; default on a GPU: by --memory", int
    )
    memory: float = option(0.9, "share of the GPU's free memory for the cache", float)
    prefill_graphs: bool = flag("make CUDA graphs of batches with prompts too, for flash attention")
    warm_up: int = option(2, "warm-up requests per length, at most", int)

    def __post_init__(self) -> None:
        if self.engine == VLLM and self.implementations is None:
            object.__setattr__(self, "implementations", (VLLM, "cab"))
        super().__post_init__()
        supported = (VLLM, *CAB) if self.engine == VLLM else set(KNOWN) - {VLLM}
        accepted = f"some of {', '.join(supported)} with engine {self.engine}"
        self.check("implementations", set(self.implementations) <= set(supported), accepted)
        are_lengths = self.option_by_length("requests", int).keys() <= {None, *self.lengths}
        accepted = f"for lengths among {', '.join(map(str, self.lengths))}"
        self.check("requests", are_lengths, accepted)
        counts = self.counts.values()
        self.check("requests", min(counts) > 0, "numbers from 1 up")
        densities = {self.density_at(length) for length in self.lengths}
        self.check(
            "max_density",
            len(densities) == 1,
            "one value, because a model serves all lengths alike",
        )
        self.check(
            "new_tokens", self.new_tokens > 1, "at least 2, because the first one is not timed"
        )
        accepted = f"empty with engine {self.engine}: only vLLM quantizes the weights of the trace"
        self.check("quantization", not self.quantization or self.engine == VLLM, accepted)
        self.check("shared", 0 <= self.shared < self.lengths[0], "less than the shortest prompt")
        self.check("blocks", self.blocks is None or self.blocks > 0, "at least 1")
        self.check("memory", 0 < self.memory <= 1, "in (0, 1]")
        self.check("page_size", self.page_size >= 4, "at least 4")

    @property
    def counts(self) -> dict[int, int]:
        """The number of requests by the length of their prompts."""
        return {length: self.value_at("requests", length, int, "count") for length in self.lengths}

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompts."""
        return self.lengths[-1]

    @property
    def method(self) -> str:
        arrivals = f"a Poisson process of {self.rate:g} requests/s" if self.rate else "all at once"
        counts = ", ".join(f"{count} of {length:,}" for length, count in self.counts.items())
        return (
            f"requests ({counts} tokens, the first {self.shared} shared) arrive {arrivals} and "
            f"generate {self.new_tokens} tokens each, after at most {self.warm_up} of every "
            f"length with {WARM_UP_TOKENS}; the time of a token is that at which the manager has "
            "it on the host; the peak is all allocated memory"
        )


class Serve(runner.Speed):
    """The experiment that serves a trace of requests; a case is one attention implementation.

    All cases serve the same trace.
    """

    name = "speed serve"
    purpose = "serve requests of mixed lengths by continuous batching, next to dense attention"
    title = "Continuous batching"
    caption = "latency by tokens of the prompt"
    Settings = Settings
    CASE = tuple(Settings.KEYS)
    GROWS = (*Settings.KEYS.values(), "cab")

    SHAPE = ("dtype", "new_tokens", "longest")
    FOUND = ("served", "density", "peak_gib", "cache_gib", "ran_as")
    BY_NAME = ("batching",)
    BY = {"way": "implementation"}
    PANELS = (
        Panel("time to the first token, p99", "s", ("ttft_p99",), log=False),
        Panel("time per output token, p99", "ms", ("tpot_p99",), log=False),
    )
    NOTES = {"": NOTES}
    described = staticmethod(models.described)

    def find(self, sample: dict[str, Any]) -> None:
        settings, implementation = self.settings, sample["implementation"]
        longest = sample["longest"]
        counts = settings.counts
        warm_up_counts = {length: min(count, settings.warm_up) for length, count in counts.items()}
        # another seed, so that measured requests share no prefix with warm-up requests
        warm_up_trace = trace_of(warm_up_counts, settings.seed + 1, settings.vocab)
        trace = trace_of(
            counts,
            seed=settings.seed,
            vocab=settings.vocab,
            rate=settings.rate,
            shared=settings.shared,
        )
        config = settings.budgeted(longest, implementation)
        if settings.engine == VLLM:
            from cab_hf.eval.speed import vllm

            sample |= vllm.measured(
                settings=settings,
                implementation=implementation,
                config=config,
                warm_up_trace=warm_up_trace,
                warm_up_tokens=WARM_UP_TOKENS,
                trace=trace,
            )
            return
        model, served = models.random_model(settings), []
        with (
            models.attending(model, implementation, config),
            batching_manager(model, settings, implementation) as manager,
        ):
            serve(manager, warm_up_trace, WARM_UP_TOKENS)
            models.attended_by(model, longest, implementation, reset=True)
            _, sample["peak_gib"] = self.bench.walls(
                lambda: served.extend(serve(manager, trace, settings.new_tokens)), 1
            )
            batching = manager.continuous_batching_config
            sample["batching"] = {field: getattr(batching, field) for field in BATCHING}
            sample["cache_gib"] = settings.cache_gib(batching.num_blocks * batching.page_size)
            sample |= {**models.attended_by(model, longest, implementation), "served": served}

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a row per sample, with `SUMMARY` and speed-ups over the best dense attention."""
        derived = dict.fromkeys((*SUMMARY, "baseline", *OVER))
        rows = [{**sample, **derived} for sample in samples]
        served_rows = [row for row in rows if row["served"]]
        for row in served_rows:
            row |= summary_of(row["served"], row["new_tokens"])
        dense_rows = {
            row["implementation"]: row for row in served_rows if row["implementation"] not in CAB
        }
        total_s = {name: row["total_s"] for name, row in dense_rows.items()}
        best = dense.against(total_s, preferred=())
        for row in served_rows if best else ():
            row["baseline"] = best
            for name, field in OVER.items():
                row[name] = dense_rows[best][field] / row[field]
        return rows

    @classmethod
    def tables(cls, rows: Sequence[Row]) -> dict[str, str]:
        """Return a table over all requests, a table by length, and remarks."""
        return {
            "All requests": cls.table(rows),
            "By length": table(by_length(rows)),
            **cls.remarks([{**row, "length": row["longest"]} for row in rows]),
        }

    @classmethod
    def draw(cls, path: Path, rows: Sequence[Row]) -> None:
        super().draw(path, by_length(rows))


EXPERIMENT = Serve


def by_length(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row per implementation and length of prompts, with the `SUMMARY` of its requests."""
    return [
        {
            "implementation": row["implementation"],
            "length": requests[0]["length"],
            "requests": len(requests),
            **summary_of(requests, row["new_tokens"]),
        }
        for row in rows
        for requests in grouped(sorted(row["served"] or (), key=itemgetter("length")), ["length"])
    ]


@contextmanager
def batching_manager(
    model: PreTrainedModel, settings: Settings, implementation: str
) -> Iterator[ContinuousBatchingManager]:
    """Yield a manager of continuous batching that serves ``model``.

    The manager has the same cache for all implementations. Only the use of CUDA graphs depends on
    the implementation.

    Args:
        model: the model.
        settings: settings of the cache and of the trace.
        implementation: name of the attention implementation.

    Raises:
        Exception: the error in the manager's thread, if a request has failed because of it.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    # no graphs of batches with prompts: each of their many shapes would be captured on first use
    decode_only = implementation in FLASH and not settings.prefill_graphs
    batching = ContinuousBatchingConfig(
        page_size=settings.page_size,
        num_blocks=settings.blocks,
        max_batch_tokens=settings.batch_tokens,
        max_memory_percent=settings.memory,
        use_cuda_graph=(False, True) if decode_only else None,
        # otherwise the manager could replace the requested implementation
        auto_switch_to_flash=False,
    )
    # without an end-of-text token, all requests generate the same number of tokens
    tokens = {"max_new_tokens": settings.new_tokens, "eos_token_id": -1, "pad_token_id": 0}
    hints = WorkloadHints(settings.longest, settings.new_tokens, sum(settings.counts.values()))
    try:
        with model.continuous_batching_context_manager(
            GenerationConfig(do_sample=False, **tokens),
            continuous_batching_config=batching,
            workload_hints=hints,
        ) as manager:
            yield manager
    except RequestFailed as error:
        # the request has only the message of the error; raise the original error of the thread
        raise manager.background_thread_status.fatal_error or error from None


class Request(NamedTuple):
    """A request of a trace.

    Attributes:
        arrives: seconds after the arrival of the first request.
        prompt: token ids.
    """

    arrives: float
    prompt: list[int]


class RequestFailed(RuntimeError):
    """Raised if the manager aborted a request, or stopped before all requests were complete."""


def trace_of(
    counts: Mapping[int, int], seed: int, vocab: int, rate: float = 0.0, shared: int = 0
) -> list[Request]:
    """Return requests with random tokens, in random order.

    Args:
        counts: length of prompts -> number of requests.
        seed: seed of tokens, order and arrivals.
        vocab: vocabulary size.
        rate: requests per second of a Poisson process; 0: all requests arrive at once.
        shared: number of tokens at the start that all prompts share.
    """
    rng = random.Random(seed)
    lengths = [length for length, count in counts.items() for _ in range(count)]
    rng.shuffle(lengths)
    prefix = rng.choices(range(vocab), k=shared)
    requests, arrives = [], 0.0
    for length in lengths:
        prompt = prefix + rng.choices(range(vocab), k=length - shared)
        requests.append(Request(arrives, prompt))
        arrives += rng.expovariate(rate) if rate else 0.0
    return requests


def serve(
    manager: ContinuousBatchingManager, trace: Sequence[Request], new_tokens: int
) -> list[dict[str, Any]]:
    """Submit requests when they arrive, and wait until each has ``new_tokens`` generated tokens.

    Returns:
        A mapping per request. ``length``: tokens of the prompt. ``arrived``, ``first`` and
        ``last``: seconds after the start at which the request was submitted, and at which its first
        and its last token appeared. ``preempted``: True if the manager dropped the request's cache
        for lack of pages, and read the request again.

    Raises:
        RequestFailed: a request failed, or the manager stopped.
    """
    began, num_running = time.perf_counter(), len(trace)
    served = {str(number): {"length": len(request.prompt)} for number, request in enumerate(trace)}
    waiting, submitted = deque(zip(served, trace, strict=True)), {}
    while num_running:
        timeout = LOOK_AGAIN
        if waiting:
            name, request = waiting[0]
            until_arrival = began + request.arrives - time.perf_counter()
            if until_arrival <= 0:
                waiting.popleft()
                served[name]["arrived"] = time.perf_counter() - began
                options = {"streaming": True, "record_timestamps": True}
                manager.add_request(request.prompt, name, new_tokens, **options)
                submitted[name] = time.perf_counter()
                continue
            timeout = min(timeout, until_arrival)
        output = manager.get_result(timeout=timeout)
        if output is None:
            if not manager.is_running():
                raise RequestFailed("the generation ended before all requests were complete")
            continue
        if output.error is not None:
            raise RequestFailed(output.error)
        # the time at which the token appeared, not the time at which this loop received it
        name, now = output.request_id, output.timestamps[-1] - began
        served[name].setdefault("first", now)
        # after a preemption, the manager creates another request with the same name
        is_preempted = output.created_time > submitted[name]
        served[name] |= {"last": now, "preempted": is_preempted}
        num_running -= output.is_finished()
    return rounded(served.values())


def rounded(served: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of `serve` with times rounded to microseconds, which shortens the log."""
    return [
        {
            field: round(value, 6) if isinstance(value, float) else value
            for field, value in request.items()
        }
        for request in served
    ]


def summary_of(served: Sequence[Mapping[str, Any]], new_tokens: int) -> dict[str, float]:
    """Return the fields `SUMMARY`, computed over all requests.

    ``ttft_p50`` and ``ttft_p99`` are percentiles of the time to the first token, in seconds.
    ``tpot_p50`` and ``tpot_p99`` are those of the mean time per later token, in ms.

    Args:
        served: the result of `serve`.
        new_tokens: generated tokens per request.
    """
    total = max(x["last"] for x in served) - min(x["arrived"] for x in served)
    ttft = [x["first"] - x["arrived"] for x in served]
    tpot = [(x["last"] - x["first"]) / (new_tokens - 1) * 1e3 for x in served]
    return {
        "total_s": total,
        "prompt_tokens_s": sum(x["length"] for x in served) / total,
        "output_tokens_s": len(served) * new_tokens / total,
        **{f"ttft_p{p}": float(np.percentile(ttft, p)) for p in (50, 99)},
        **{f"tpot_p{p}": float(np.percentile(tpot, p)) for p in (50, 99)},
        "preempted": sum(x["preempted"] for x in served),
    }
