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
from cab_hf.eval.report import group_rows
from cab_hf.eval.speed import dense, runner
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.model import CAB_IMPLEMENTATIONS, SDPA
from cab_hf.eval.speed.runner import CAB_DENSE, Panel, format_table
from cab_hf.experiment.settings import by_device, flag, option, parse_length

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager, PreTrainedModel

# seconds to wait for a generated token before checking that the manager still runs
POLL_SECONDS = 0.1
# fields of `summarise_requests`
SUMMARY_FIELDS = (
    *("total_s", "prompt_tokens_s", "output_tokens_s"),
    *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "preempted"),
)
FLASH_IMPLEMENTATIONS = ("flash_attention_3", "flash_attention_4", "flash_attention_2")
VLLM = "vllm"  # name of vLLM's own attention, and of the engine
IMPLEMENTATIONS = (SDPA, *FLASH_IMPLEMENTATIONS, CAB_DENSE, *CAB_IMPLEMENTATIONS, VLLM)
WARM_UP_TOKENS = 8  # generated tokens of a warm-up request
# fields of a manager's config that results record
BATCHING_FIELDS = (
    *("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch"),
    *("max_blocks_per_request", "max_memory_percent", "use_cuda_graph", "use_async_batching"),
    *("allow_block_sharing", "scheduler_type"),
)
# field with a speed-up over the best dense implementation -> field whose values are compared
SPEED_UP_FIELDS = {
    "over_best": "total_s",
    "ttft_over_best": "ttft_p99",
    "tpot_over_best": "tpot_p99",
}
NOTES = (
    "All implementations serve the same trace of random prompts. ttft: s from arrival to the "
    "first token. tpot: ms per output token after the first one. Percentiles are over requests; "
    "tokens/s are over all seconds from the first arrival to the last token. Preempted: requests "
    f"that were put back for lack of pages, and read again. {models.IMPLEMENTATIONS_NOTE} "
    "It counts sparse calls only: no chunks that end before min_length and no decoding. The "
    "baseline is the dense implementation with the fewest seconds in all."
)


@dataclass(frozen=True)
class Settings(models.ModelSettings):
    """Settings of a run of ``speed serve``."""

    CASE_OPTIONS = {"implementation": "implementations"}

    POSITIVE = (*models.ModelSettings.POSITIVE, "batch_tokens", "warm_up")
    NON_NEGATIVE = (*models.ModelSettings.NON_NEGATIVE, "rate")
    CHOICES = {"implementations": IMPLEMENTATIONS, "engine": ("transformers", VLLM)}

    lengths: tuple[int, ...] | None = runner.make_list_option(
        (2**15, 2**17), (256, 512), "tokens of prompts", parse_length
    )
    requests: tuple[str, ...] | None = runner.make_list_option(
        ("16", "131072:4"), ("2",), "requests per length, or LENGTH:COUNT for one length"
    )
    implementations: tuple[str, ...] | None = runner.make_list_option(
        # sdpa comes last, because it computes all pairs of a batch with a mask and is the slowest
        (*FLASH_IMPLEMENTATIONS, CAB_DENSE, "cab", SDPA),
        (SDPA, CAB_DENSE, *CAB_IMPLEMENTATIONS),
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
        supported_names = (
            (VLLM, *CAB_IMPLEMENTATIONS) if self.engine == VLLM else set(IMPLEMENTATIONS) - {VLLM}
        )
        accepted_values = f"some of {', '.join(supported_names)} with engine {self.engine}"
        self.require_option(
            "implementations", set(self.implementations) <= set(supported_names), accepted_values
        )
        are_known_lengths = self.parse_option_by_length("requests", int).keys() <= {
            None,
            *self.lengths,
        }
        accepted_values = f"for lengths among {', '.join(map(str, self.lengths))}"
        self.require_option("requests", are_known_lengths, accepted_values)
        request_counts = self.num_requests_by_length.values()
        self.require_option("requests", min(request_counts) > 0, "numbers from 1 up")
        densities = {self.get_density_at_length(length) for length in self.lengths}
        self.require_option(
            "max_density",
            len(densities) == 1,
            "one value, because a model serves all lengths alike",
        )
        self.require_option(
            "new_tokens", self.new_tokens > 1, "at least 2, because the first one is not timed"
        )
        accepted_quantization = (
            f"empty with engine {self.engine}: only vLLM quantizes the weights of the trace"
        )
        self.require_option(
            "quantization", not self.quantization or self.engine == VLLM, accepted_quantization
        )
        self.require_option(
            "shared", 0 <= self.shared < self.lengths[0], "less than the shortest prompt"
        )
        self.require_option("blocks", self.blocks is None or self.blocks > 0, "at least 1")
        self.require_option("memory", 0 < self.memory <= 1, "in (0, 1]")
        self.require_option("page_size", self.page_size >= 4, "at least 4")

    @property
    def num_requests_by_length(self) -> dict[int, int]:
        """The number of requests by the length of their prompts."""
        return {
            length: self.get_value_at_length("requests", length, int, "count")
            for length in self.lengths
        }

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompts."""
        return self.lengths[-1]

    @property
    def method_description(self) -> str:
        arrivals_phrase = (
            f"a Poisson process of {self.rate:g} requests/s" if self.rate else "all at once"
        )
        counts_phrase = ", ".join(
            f"{count} of {length:,}" for length, count in self.num_requests_by_length.items()
        )
        return (
            f"requests ({counts_phrase} tokens, the first {self.shared} shared) arrive "
            f"{arrivals_phrase} and generate {self.new_tokens} tokens each, after at most "
            f"{self.warm_up} of every length with {WARM_UP_TOKENS}; the time of a token is that at "
            "which the manager has it on the host; the peak is all allocated memory"
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
    CASE_FIELDS = tuple(Settings.CASE_OPTIONS)
    EXTENSIBLE_SETTINGS = (*Settings.CASE_OPTIONS.values(), "cab")

    COPIED_SETTINGS = ("dtype", "new_tokens", "longest")
    RESULT_FIELDS = ("served", "density", "peak_gib", "cache_gib", "ran_as")
    RESULT_FIELDS_BY_NAME = ("batching",)
    GROUP_FIELDS = {"way": "implementation"}
    PANELS = (
        Panel("time to the first token, p99", "s", ("ttft_p99",), is_logarithmic=False),
        Panel("time per output token, p99", "ms", ("tpot_p99",), is_logarithmic=False),
    )
    NOTES = {"": NOTES}
    describe_run = staticmethod(models.describe_run)

    def fill_sample(self, sample: dict[str, Any]) -> None:
        settings, implementation = self.settings, sample["implementation"]
        longest_length = sample["longest"]
        request_counts = settings.num_requests_by_length
        warm_up_counts = {
            length: min(count, settings.warm_up) for length, count in request_counts.items()
        }
        # another seed, so that measured requests share no prefix with warm-up requests
        warm_up_trace = make_trace(warm_up_counts, settings.seed + 1, settings.vocab)
        trace = make_trace(
            request_counts,
            seed=settings.seed,
            vocab=settings.vocab,
            requests_per_second=settings.rate,
            num_shared_tokens=settings.shared,
        )
        config = settings.make_config_with_density(longest_length, implementation)
        if settings.engine == VLLM:
            from cab_hf.eval.speed import vllm

            sample |= vllm.serve_in_new_process(
                settings=settings,
                implementation=implementation,
                config=config,
                warm_up_trace=warm_up_trace,
                warm_up_tokens=WARM_UP_TOKENS,
                trace=trace,
            )
            return
        model, served_requests = models.make_random_model(settings), []
        with (
            models.use_attention(model, implementation, config),
            make_batching_manager(model, settings, implementation) as manager,
        ):
            serve(manager, warm_up_trace, WARM_UP_TOKENS)
            models.read_attention_fields(model, longest_length, implementation, reset=True)
            _, sample["peak_gib"] = self.bench.time_runs(
                lambda: served_requests.extend(serve(manager, trace, settings.new_tokens)), 1
            )
            batching_config = manager.continuous_batching_config
            sample["batching"] = {
                field: getattr(batching_config, field) for field in BATCHING_FIELDS
            }
            sample["cache_gib"] = settings.compute_cache_gib(
                batching_config.num_blocks * batching_config.page_size
            )
            sample |= {
                **models.read_attention_fields(model, longest_length, implementation),
                "served": served_requests,
            }

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a row per sample, with `SUMMARY_FIELDS` and `SPEED_UP_FIELDS`."""
        derived_fields = dict.fromkeys((*SUMMARY_FIELDS, "baseline", *SPEED_UP_FIELDS))
        rows = [{**sample, **derived_fields} for sample in samples]
        served_rows = [row for row in rows if row["served"]]
        for row in served_rows:
            row |= summarise_requests(row["served"], row["new_tokens"])
        dense_rows = {
            row["implementation"]: row
            for row in served_rows
            if row["implementation"] not in CAB_IMPLEMENTATIONS
        }
        total_s_by_implementation = {name: row["total_s"] for name, row in dense_rows.items()}
        fastest_dense = dense.choose_baseline(total_s_by_implementation, preferred_names=())
        for row in served_rows if fastest_dense else ():
            row["baseline"] = fastest_dense
            for name, field in SPEED_UP_FIELDS.items():
                row[name] = dense_rows[fastest_dense][field] / row[field]
        return rows

    @classmethod
    def tables(cls, rows: Sequence[Row]) -> dict[str, str]:
        """Return a table over all requests, a table by length if any were served, and remarks."""
        rows_by_length = summarise_by_length(rows)
        return {
            "All requests": cls.make_table(rows),
            **({"By length": format_table(rows_by_length)} if rows_by_length else {}),
            **cls.make_remarks_table([{**row, "length": row["longest"]} for row in rows]),
        }

    @classmethod
    def draw(cls, path: Path, rows: Sequence[Row]) -> None:
        super().draw(path, summarise_by_length(rows))


EXPERIMENT = Serve


def summarise_by_length(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row per implementation and length of prompts, with `SUMMARY_FIELDS`."""
    return [
        {
            "implementation": row["implementation"],
            "length": length_requests[0]["length"],
            "requests": len(length_requests),
            **summarise_requests(length_requests, row["new_tokens"]),
        }
        for row in rows
        for length_requests in group_rows(
            sorted(row["served"] or (), key=itemgetter("length")), ["length"]
        )
    ]


@contextmanager
def make_batching_manager(
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
    has_decode_graphs_only = implementation in FLASH_IMPLEMENTATIONS and not settings.prefill_graphs
    batching_config = ContinuousBatchingConfig(
        page_size=settings.page_size,
        num_blocks=settings.blocks,
        max_batch_tokens=settings.batch_tokens,
        max_memory_percent=settings.memory,
        use_cuda_graph=(False, True) if has_decode_graphs_only else None,
        # otherwise the manager could replace the requested implementation
        auto_switch_to_flash=False,
    )
    # without an end-of-text token, all requests generate the same number of tokens
    token_options = {"max_new_tokens": settings.new_tokens, "eos_token_id": -1, "pad_token_id": 0}
    workload_hints = WorkloadHints(
        settings.longest, settings.new_tokens, sum(settings.num_requests_by_length.values())
    )
    try:
        with model.continuous_batching_context_manager(
            GenerationConfig(do_sample=False, **token_options),
            continuous_batching_config=batching_config,
            workload_hints=workload_hints,
        ) as manager:
            yield manager
    except RequestFailed as error:
        # the request has only the message of the error; raise the original error of the thread
        raise manager.background_thread_status.fatal_error or error from None


class Request(NamedTuple):
    """A request of a trace.

    Attributes:
        arrival_s: seconds after the arrival of the first request.
        prompt: token ids.
    """

    arrival_s: float
    prompt: list[int]


class RequestFailed(RuntimeError):
    """Raised if the manager aborted a request, or stopped before all requests were complete."""


def make_trace(
    request_counts: Mapping[int, int],
    seed: int,
    vocab: int,
    requests_per_second: float = 0.0,
    num_shared_tokens: int = 0,
) -> list[Request]:
    """Return requests with random tokens, in random order.

    Args:
        request_counts: length of prompts -> number of requests.
        seed: seed of tokens, order and arrivals.
        vocab: vocabulary size.
        requests_per_second: rate of a Poisson process; 0: all requests arrive at once.
        num_shared_tokens: number of tokens at the start that all prompts share.
    """
    rng = random.Random(seed)
    lengths = [length for length, count in request_counts.items() for _ in range(count)]
    rng.shuffle(lengths)
    prefix = rng.choices(range(vocab), k=num_shared_tokens)
    requests, arrival_s = [], 0.0
    for length in lengths:
        prompt = prefix + rng.choices(range(vocab), k=length - num_shared_tokens)
        requests.append(Request(arrival_s, prompt))
        arrival_s += rng.expovariate(requests_per_second) if requests_per_second else 0.0
    return requests


def serve(
    manager: ContinuousBatchingManager, trace: Sequence[Request], num_new_tokens: int
) -> list[dict[str, Any]]:
    """Submit requests at their times of arrival, and wait for ``num_new_tokens`` tokens of each.

    Returns:
        A mapping per request. ``length``: tokens of the prompt. ``arrived``, ``first`` and
        ``last``: seconds after the start at which the request was submitted, and at which its first
        and its last token appeared. ``preempted``: True if the manager dropped the request's cache
        for lack of pages, and read the request again.

    Raises:
        RequestFailed: a request failed, or the manager stopped.
    """
    start_time, num_unfinished = time.perf_counter(), len(trace)
    result_by_name = {
        str(request_index): {"length": len(request.prompt)}
        for request_index, request in enumerate(trace)
    }
    waiting_requests, submission_times = deque(zip(result_by_name, trace, strict=True)), {}
    while num_unfinished:
        timeout_s = POLL_SECONDS
        if waiting_requests:
            request_name, request = waiting_requests[0]
            s_until_arrival = start_time + request.arrival_s - time.perf_counter()
            if s_until_arrival <= 0:
                waiting_requests.popleft()
                result_by_name[request_name]["arrived"] = time.perf_counter() - start_time
                request_options = {"streaming": True, "record_timestamps": True}
                manager.add_request(request.prompt, request_name, num_new_tokens, **request_options)
                submission_times[request_name] = time.perf_counter()
                continue
            timeout_s = min(timeout_s, s_until_arrival)
        output = manager.get_result(timeout=timeout_s)
        if output is None:
            if not manager.is_running():
                raise RequestFailed("the generation ended before all requests were complete")
            continue
        if output.error is not None:
            raise RequestFailed(output.error)
        # the time at which the token appeared, not the time at which this loop received it
        request_name, token_s = output.request_id, output.timestamps[-1] - start_time
        result_by_name[request_name].setdefault("first", token_s)
        # after a preemption, the manager creates another request with the same name
        is_preempted = output.created_time > submission_times[request_name]
        result_by_name[request_name] |= {"last": token_s, "preempted": is_preempted}
        num_unfinished -= output.is_finished()
    return round_times(result_by_name.values())


def round_times(request_results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of `serve` with times rounded to microseconds, which shortens the log."""
    return [
        {
            field_name: round(field_value, 6) if isinstance(field_value, float) else field_value
            for field_name, field_value in request_result.items()
        }
        for request_result in request_results
    ]


def summarise_requests(
    request_results: Sequence[Mapping[str, Any]], num_new_tokens: int
) -> dict[str, float]:
    """Return the fields `SUMMARY_FIELDS`, computed over all requests.

    ``ttft_p50`` and ``ttft_p99`` are percentiles of the time to the first token, in seconds.
    ``tpot_p50`` and ``tpot_p99`` are those of the mean time per later token, in ms.

    Args:
        request_results: the result of `serve`.
        num_new_tokens: generated tokens per request.
    """
    total_s = max(result["last"] for result in request_results) - min(
        result["arrived"] for result in request_results
    )
    ttfts = [result["first"] - result["arrived"] for result in request_results]
    tpots = [
        (result["last"] - result["first"]) / (num_new_tokens - 1) * 1e3
        for result in request_results
    ]
    return {
        "total_s": total_s,
        "prompt_tokens_s": sum(result["length"] for result in request_results) / total_s,
        "output_tokens_s": len(request_results) * num_new_tokens / total_s,
        **{f"ttft_p{percent}": float(np.percentile(ttfts, percent)) for percent in (50, 99)},
        **{f"tpot_p{percent}": float(np.percentile(tpots, percent)) for percent in (50, 99)},
        "preempted": sum(result["preempted"] for result in request_results),
    }
