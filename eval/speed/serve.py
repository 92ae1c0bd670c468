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

# seconds to wait for a token before checking that the generation still runs
LOOK_AGAIN = 0.1
# fields of `summary_of`
SUMMARY = (
    *("total_s", "prompt_tokens_s", "output_tokens_s"),
    *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "preempted"),
)
FLASH = ("flash_attention_3", "flash_attention_4", "flash_attention_2")
# vLLM with its own attention
VLLM = "vllm"
KNOWN = (SDPA, *FLASH, CAB_DENSE, *CAB, VLLM)
# new tokens of a warm-up request
WARM_UP_TOKENS = 8
# recorded fields of the final config of a manager
BATCHING = (
    *("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch"),
    *("max_blocks_per_request", "max_memory_percent", "use_cuda_graph", "use_async_batching"),
    *("allow_block_sharing", "scheduler_type"),
)
# factors by which a field is smaller than that of the best dense implementation
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
    """Settings of a run that serves requests."""

    KEYS = {"implementation": "implementations"}

    POSITIVE = (*models.ModelSettings.POSITIVE, "batch_tokens", "warm_up")
    FROM_0 = ("rate",)
    CHOICES = {"implementations": KNOWN, "engine": ("transformers", VLLM)}

    lengths: tuple[int, ...] | None = runner.listed(
        (2**15, 2**17), (256, 512), "tokens of prompts", parse_length
    )
    requests: tuple[str, ...] | None = runner.listed(
        ("16", "131072:4"), ("2",), "requests per length, or LENGTH:COUNT for one length"
    )
    implementations: tuple[str, ...] | None = runner.listed(
        # the slowest comes last: sdpa attends to all pairs of a batch with a mask
        (*FLASH, CAB_DENSE, "cab", SDPA),
        (SDPA, CAB_DENSE, *CAB),
        "attention implementations",
    )
    engine: str = option("transformers", "serving engine: transformers or vllm")
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
        known = (VLLM, *CAB) if self.engine == VLLM else set(KNOWN) - {VLLM}
        ways = f"some of {', '.join(known)} with engine {self.engine}"
        self.check("implementations", set(self.implementations) <= set(known), ways)
        named = self.option_by_length("requests", int).keys() <= {None, *self.lengths}
        self.check("requests", named, f"for lengths among {', '.join(map(str, self.lengths))}")
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
        self.check("shared", 0 <= self.shared < self.lengths[0], "less than the shortest prompt")
        self.check("blocks", self.blocks is None or self.blocks > 0, "at least 1")
        self.check("memory", 0 < self.memory <= 1, "in (0, 1]")
        self.check("page_size", self.page_size >= 4, "at least 4")

    @property
    def counts(self) -> dict[int, int]:
        """The number of requests by length."""
        return {at: self.value_at("requests", at, int, "count") for at in self.lengths}

    longest = property(lambda self: self.lengths[-1])

    @property
    def method(self) -> str:
        arrive = f"a Poisson process of {self.rate:g} requests/s" if self.rate else "all at once"
        counts = ", ".join(f"{count} of {length:,}" for length, count in self.counts.items())
        return (
            f"requests ({counts} tokens, the first {self.shared} shared) arrive {arrive} and "
            f"generate {self.new_tokens} tokens each, after at most {self.warm_up} of every "
            f"length with {WARM_UP_TOKENS}; the time of a token is that at which the manager has "
            "it on the host; the peak is all allocated memory"
        )


class Serve(runner.Speed):
    """The experiment; a case is one attention, and all serve the same trace."""

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
        settings, implementation, longest = (
            self.settings,
            sample["implementation"],
            sample["longest"],
        )
        counts = settings.counts
        few = {length: min(count, settings.warm_up) for length, count in counts.items()}
        # another seed: measured requests must not share a beginning with warm-up requests
        before = trace_of(few, settings.seed + 1, settings.vocab)
        trace = trace_of(counts, settings.seed, settings.vocab, settings.rate, settings.shared)
        config = settings.budgeted(longest, implementation)
        if settings.engine == VLLM:
            from cab_hf.eval.speed import vllm

            sample |= vllm.measured(
                settings, implementation, config, (before, WARM_UP_TOKENS), trace
            )
            return
        model, served = models.random_model(settings), []
        with (
            models.attending(model, implementation, config),
            managing(model, settings, implementation) as manager,
        ):
            serve(manager, before, WARM_UP_TOKENS)
            models.attended_by(model, longest, implementation, reset=True)
            given = manager, trace, settings.new_tokens
            _, sample["peak_gib"] = self.bench.walls(lambda: served.extend(serve(*given)), 1)
            used = manager.continuous_batching_config
            sample["batching"] = {field: getattr(used, field) for field in BATCHING}
            sample["cache_gib"] = settings.cache_gib(used.num_blocks * used.page_size)
            sample |= {**models.attended_by(model, longest, implementation), "served": served}

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the results of the trace, each with the fastest dense implementation."""
        derived = dict.fromkeys((*SUMMARY, "baseline", *OVER))
        rows = [{**sample, **derived} for sample in samples]
        ran = [row for row in rows if row["served"]]
        for row in ran:
            row |= summary_of(row["served"], row["new_tokens"])
        others = {row["implementation"]: row for row in ran if row["implementation"] not in CAB}
        best = dense.against({n: row["total_s"] for n, row in others.items()}, preferred=())
        for row in ran if best else ():
            row["baseline"] = best
            for name, field in OVER.items():
                row[name] = others[best][field] / row[field]
        return rows

    @classmethod
    def tables(cls, rows: Sequence[Row]) -> dict[str, str]:
        """Return tables of all requests, and of each length."""
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
    """Return the results of requests of each length, for every row."""
    return [
        {"implementation": row["implementation"], "length": some[0]["length"]}
        | {"requests": len(some), **summary_of(some, row["new_tokens"])}
        for row in rows
        for some in grouped(sorted(row["served"] or (), key=itemgetter("length")), "length")
    ]


@contextmanager
def managing(
    model: PreTrainedModel, settings: Settings, way: str
) -> Iterator[ContinuousBatchingManager]:
    """Yield a manager that serves ``model``, sized for the trace.

    Managers of all implementations are equal but for CUDA graphs.

    Raises:
        Exception: the error that ended the generation and made a request fail.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    # batches with prompts have many shapes, each captured on first use
    decode_only = way in FLASH and not settings.prefill_graphs
    batching = ContinuousBatchingConfig(
        page_size=settings.page_size,
        num_blocks=settings.blocks,
        max_batch_tokens=settings.batch_tokens,
        max_memory_percent=settings.memory,
        use_cuda_graph=(False, True) if decode_only else None,
        # measure exactly the requested implementation
        auto_switch_to_flash=False,
    )
    # all requests have equal lengths: no token ends one early
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
        # requests receive the error as a sentence only
        raise manager.background_thread_status.fatal_error or error from None


class Request(NamedTuple):
    """A prompt, and its arrival in seconds after the first one."""

    arrives: float
    prompt: list[int]


class RequestFailed(RuntimeError):
    """An error for a request that the manager gave up."""


def trace_of(
    counts: Mapping[int, int], seed: int, vocab: int, rate: float = 0.0, shared: int = 0
) -> list[Request]:
    """Return requests in random order with random tokens, ``counts`` of each length.

    They arrive at ``rate`` per second by a Poisson process, or at once if the rate is 0. All start
    with the same ``shared`` tokens.
    """
    draw = random.Random(seed)
    lengths = [length for length, count in counts.items() for _ in range(count)]
    draw.shuffle(lengths)
    beginning = draw.choices(range(vocab), k=shared)
    made, arrives = [], 0.0
    for length in lengths:
        made.append(Request(arrives, beginning + draw.choices(range(vocab), k=length - shared)))
        arrives += draw.expovariate(rate) if rate else 0.0
    return made


def serve(
    manager: ContinuousBatchingManager, trace: Sequence[Request], new_tokens: int
) -> list[dict[str, Any]]:
    """Submit requests when they arrive, and wait until all have ``new_tokens``.

    Returns:
        For each request its ``length``; the seconds after the start when it ``arrived`` and when
        its ``first`` and ``last`` token appeared; and ``preempted``, True if it was put back for
        lack of pages, and read again from its start.

    Raises:
        RequestFailed: the message is the manager's for the first failed request.
    """
    began, running = time.perf_counter(), len(trace)
    served = {str(number): {"length": len(each.prompt)} for number, each in enumerate(trace)}
    waiting, handed_in = deque(zip(served, trace, strict=True)), {}
    while running:
        patience = LOOK_AGAIN
        if waiting:
            name, request = waiting[0]
            until = began + request.arrives - time.perf_counter()
            if until <= 0:
                waiting.popleft()
                served[name]["arrived"] = time.perf_counter() - began
                told = {"streaming": True, "record_timestamps": True}
                manager.add_request(request.prompt, name, new_tokens, **told)
                handed_in[name] = time.perf_counter()
                continue
            patience = min(patience, until)
        output = manager.get_result(timeout=patience)
        if output is None:
            if not manager.is_running():
                raise RequestFailed("the generation ended before all requests were complete")
            continue
        if output.error is not None:
            raise RequestFailed(output.error)
        # time at which the token appeared, before it waited here
        name, now = output.request_id, output.timestamps[-1] - began
        served[name].setdefault("first", now)
        # a request that is read again is another request with the same name
        preempted = output.created_time > handed_in[name]
        served[name] |= {"last": now, "preempted": preempted}
        running -= output.is_finished()
    return rounded(served.values())


def rounded(served: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return requests with times rounded to the microsecond, as a log stores them."""
    return [
        {what: round(x, 6) if isinstance(x, float) else x for what, x in each.items()}
        for each in served
    ]


def summary_of(served: Sequence[Mapping[str, Any]], new_tokens: int) -> dict[str, float]:
    """Return `SUMMARY`; ``ttft`` is seconds to the first token, ``tpot`` ms per later token."""
    total = max(each["last"] for each in served) - min(each["arrived"] for each in served)
    ttft = [each["first"] - each["arrived"] for each in served]
    tpot = [(each["last"] - each["first"]) / (new_tokens - 1) * 1e3 for each in served]
    return {
        "total_s": total,
        "prompt_tokens_s": sum(each["length"] for each in served) / total,
        "output_tokens_s": len(served) * new_tokens / total,
        **{f"ttft_p{p}": float(np.percentile(ttft, p)) for p in (50, 99)},
        **{f"tpot_p{p}": float(np.percentile(tpot, p)) for p in (50, 99)},
        "preempted": sum(each["preempted"] for each in served),
    }
