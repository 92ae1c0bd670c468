"""Requests of continuous batching: a trace made by a seed, and when its tokens came out."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager

# seconds to wait for a token before looking whether the generation still runs
LOOK_AGAIN = 0.1
# fields of `summary_of`
SUMMARY = (
    *("total_s", "prompt_tokens_s", "output_tokens_s"),
    *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "preempted"),
)


class Request(NamedTuple):
    """A prompt, and when it is handed in, in seconds after the first one."""

    arrives: float
    prompt: list[int]


class RequestFailed(RuntimeError):
    """A request was given up by the manager that served it."""


def trace_of(
    counts: Mapping[int, int], seed: int, vocab: int, rate: float = 0.0, shared: int = 0
) -> list[Request]:
    """Requests in random order with random tokens; the same arguments give the same trace.

    Args:
        counts: tokens of a prompt -> how many requests have as many.
        vocab: tokens are below it.
        rate: requests a second of a Poisson process; with 0 all arrive at once.
        shared: tokens at their beginning that all prompts share.
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
    """Hand in requests when they arrive, and wait until all have ``new_tokens``.

    Returns:
        For each request in order its ``length``; in seconds after the start when it ``arrived``,
        that is was handed in, and when its ``first`` and ``last`` token came out; and whether it
        was ``preempted``: put back for lack of pages, and read again from its beginning.

    Raises:
        RequestFailed: with what the manager says of the first request that it gave up.
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
                raise RequestFailed("the generation ended before all requests did")
            continue
        if output.error is not None:
            raise RequestFailed(output.error)
        # taken where the token came out, before it waited here
        name, now = output.request_id, output.timestamps[-1] - began
        served[name].setdefault("first", now)
        # what is read again is another request by the same name
        preempted = output.created_time > handed_in[name]
        served[name] |= {"last": now, "preempted": preempted}
        running -= output.is_finished()
    return [
        {what: round(x, 6) if isinstance(x, float) else x for what, x in each.items()}
        for each in served.values()
    ]


def summary_of(served: Sequence[Mapping[str, Any]], new_tokens: int) -> dict[str, float]:
    """What requests took: seconds in all, tokens a second, percentiles, and how many gave way.

    ``ttft`` is seconds from arrival to the first token, ``tpot`` milliseconds a token behind it.
    """
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
