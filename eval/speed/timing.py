"""`Bench` and `GpuBench`, which measure the time and the peak memory of a call."""

from __future__ import annotations

import gc
import itertools
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

WARM_UP_CALLS = 3
WARM_UP_SECONDS = 0.1  # smallest warm-up time, in which an idle GPU reaches its clock rate
MIN_RUNS = 5
MAX_RUNS = 100
MAX_CASE_SECONDS = 1.5
# parts of error messages by which CUDA's libraries, unlike torch, report missing memory
OUT_OF_MEMORY_MESSAGES = ("out of memory", "ALLOC_FAILED")
FLUSHED_BYTES = 256 << 20  # several times the L2 cache of any current GPU


def describe_timing(device: str, seconds: float = MAX_CASE_SECONDS, has_graph: bool = True) -> str:
    """Return a description of how `Bench.time` measures on a device, for reports.

    Args:
        device: the device.
        seconds: time limit of a case, as in `Bench`.
        has_graph: as in `Bench.time`.
    """
    method_phrase = (
        f"median of {MIN_RUNS} to {MAX_RUNS} runs ({seconds} s if there is time for more) "
        f"after at least {WARM_UP_CALLS} calls and {WARM_UP_SECONDS} s of warm-up, by "
    )
    if torch.device(device).type == "cpu":
        return f"{method_phrase}time.perf_counter; a functional check, no result"
    method_phrase += (
        f"CUDA events with a cold L2 cache: {FLUSHED_BYTES >> 20} MiB are read before every run"
    )
    graph_phrase = (
        "; ms is the replay of a CUDA graph if one could be made, for dense attention too"
    )
    return f"{method_phrase}{graph_phrase}" if has_graph else method_phrase


@dataclass(frozen=True)
class Timing:
    """The time of a call: launched from Python, and replayed as a CUDA graph.

    Attributes:
        eager_ms: milliseconds of a call from Python.
        graph_ms: milliseconds of a replayed CUDA graph; None if no graph was timed.
        no_graph_reason: reason why no graph could be captured; None if a graph was timed or not
            requested.
    """

    eager_ms: float
    graph_ms: float | None = None
    no_graph_reason: str | None = None

    @property
    def ms(self) -> float:
        """The milliseconds of the graph, or else of the call from Python."""
        return self.eager_ms if self.graph_ms is None else self.graph_ms


class Bench:
    """A timer for calls on a CPU, and the base class of `GpuBench`.

    On a CPU, neither CUDA graphs nor peak memory are measured.

    Args:
        device: the device.
        seconds: time limit of a case; at least `MIN_RUNS` runs are timed. None: `MAX_CASE_SECONDS`.
    """

    def __init__(self, device: str, seconds: float | None = None) -> None:
        self.device = torch.device(device)
        self.seconds = seconds

    def free_memory(self) -> None:
        """Release unused GPU memory; does nothing on a CPU."""

    def measure_peak(self, call: Callable[[], Any]) -> tuple[Any, float | None]:
        """Return the result of ``call``, and its peak memory in MiB including the result.

        The peak is None on a CPU.
        """
        return call(), None

    def time(self, call: Callable[[], Any], has_graph: bool = True) -> Timing:
        """Warm up, and return the median time over `MIN_RUNS` to `MAX_RUNS` runs.

        Args:
            call: the function to time.
            has_graph: True to time a CUDA graph of the call too, on a GPU.
        """
        return Timing(statistics.median(self.time_runs(call, self._warm_up(call))[0]))

    def _warm_up(self, call: Callable[[], Any]) -> int:
        """Run warm-up calls, and return the number of runs that fit into the time limit."""
        first_start = time.perf_counter()
        for num_calls in itertools.count(1):
            last_start = time.perf_counter()
            call()
            self._wait_for_device()
            end = time.perf_counter()
            if num_calls >= WARM_UP_CALLS and end - first_start >= WARM_UP_SECONDS:
                break
        seconds = MAX_CASE_SECONDS if self.seconds is None else self.seconds
        return min(MAX_RUNS, max(MIN_RUNS, int(seconds / max(end - last_start, 1e-9))))

    def time_runs(
        self, call: Callable[[], Any], num_runs: int, before_run: Callable[[], Any] = lambda: None
    ) -> tuple[list[float], float | None]:
        """Return the milliseconds of every run by the wall clock, and the peak GiB allocated.

        Args:
            call: the function to time.
            num_runs: number of runs.
            before_run: a function that is called before each run and is not timed.

        Returns:
            A list of ``num_runs`` times; and the peak, or None on a CPU.
        """
        run_ms = []
        for _ in range(num_runs):
            before_run()
            self._wait_for_device()
            start = time.perf_counter()
            call()
            self._wait_for_device()
            run_ms.append((time.perf_counter() - start) * 1e3)
        return run_ms, None

    def available_gib(self) -> float | None:
        """Return the GiB that torch can allocate, including allocated GiB; None on a CPU."""
        return None

    def _wait_for_device(self) -> None:
        """Wait until the device has finished all kernels; does nothing on a CPU."""


class GpuBench(Bench):
    """A timer for calls on a GPU, by CUDA events, with a cold L2 cache and with CUDA graphs.

    Args:
        device, seconds: as in `Bench`.
        limit_gib: limit of allocated GiB, to simulate a smaller GPU; 0: no limit.
    """

    def __init__(self, device: str, seconds: float | None = None, limit_gib: float = 0.0) -> None:
        super().__init__(device, seconds)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        # the L2 cache is flushed by reading this tensor, because a write would be written back to
        # memory during the timed call
        self.flush_buffer = torch.zeros(FLUSHED_BYTES // 8, device=self.device, dtype=torch.int64)
        self.limit_gib = limit_gib or inf
        if limit_gib:
            _, total_bytes = torch.cuda.mem_get_info(self.device)
            memory_fraction = (limit_gib * 2**30 + FLUSHED_BYTES) / total_bytes
            # the function accepts no device without a number
            device_index = torch.cuda.current_device()
            torch.cuda.set_per_process_memory_fraction(min(memory_fraction, 1.0), device_index)

    def free_memory(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def measure_peak(self, call: Callable[[], Any]) -> tuple[Any, float]:
        self.free_memory()
        torch.cuda.reset_peak_memory_stats()
        bytes_before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        return result, (torch.cuda.max_memory_allocated() - bytes_before) / 2**20

    def time(self, call: Callable[[], Any], has_graph: bool = True) -> Timing:
        eager_ms = self._time_median(call)
        if not has_graph:
            return Timing(eager_ms)
        try:
            graph_of_call = self._capture_graph(call)
            return Timing(eager_ms, self._time_median(graph_of_call.replay))
        except Exception as error:
            # ending a failed capture raises another error; the first error is the reason
            while error.__context__ is not None:
                error = error.__context__
            return Timing(eager_ms, no_graph_reason=summarise_error(error))

    def time_runs(
        self, call: Callable[[], Any], num_runs: int, before_run: Callable[[], Any] = lambda: None
    ) -> tuple[list[float], float]:
        torch.cuda.reset_peak_memory_stats()
        run_ms, _ = super().time_runs(call, num_runs, before_run)
        return run_ms, (torch.cuda.max_memory_allocated() - FLUSHED_BYTES) / 2**30

    def available_gib(self) -> float:
        self.free_memory()
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        return min(
            self.limit_gib, (free_bytes + torch.cuda.memory_reserved() - FLUSHED_BYTES) / 2**30
        )

    def _wait_for_device(self) -> None:
        torch.cuda.synchronize()

    def _time_median(self, call: Callable[[], Any]) -> float:
        return self.time_by_events(call, self._warm_up(call))

    def time_by_events(
        self,
        call: Callable[[], Any],
        num_runs: int,
        num_flushes: int = 1,
        before_run: Any = lambda: None,
    ) -> float:
        """Return the median milliseconds of a call by CUDA events.

        Args:
            call: the function to time.
            num_runs: number of runs.
            num_flushes: flushes of the L2 cache before each run.
            before_run: a function that is called before each run and is not timed.
        """
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_runs)]
        for start_event, end_event in events:
            before_run()
            for _ in range(num_flushes):
                self._flush_cache()
            start_event.record()
            call()
            end_event.record()
        torch.cuda.synchronize()
        return statistics.median(
            start_event.elapsed_time(end_event) for start_event, end_event in events
        )

    def _flush_cache(self) -> None:
        self.flush_buffer.amax()

    def _capture_graph(self, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """Return a CUDA graph of ``call``, captured after warm-up calls on the same stream."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # the outer context restores the stream even if ending the capture raises
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=stream):
            call()
        return graph


def make_bench(device: str, seconds: float | None = None, limit_gib: float = 0.0) -> Bench:
    """Return a `GpuBench` or `Bench` for ``device``; arguments as in these classes."""
    is_cuda = torch.device(device).type == "cuda"
    return GpuBench(device, seconds, limit_gib) if is_cuda else Bench(device, seconds)


def summarise_error(error: BaseException) -> str:
    """Return the message of an error as one line without a full stop."""
    if isinstance(error, torch.OutOfMemoryError):
        size_match = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
        return "out of memory" + (f": tried to allocate {size_match[1]}" if size_match else "")
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    error_class = type(error).__name__
    # the name of a general error class does not explain the error
    message = (
        first_line
        if first_line and error_class == "RuntimeError"
        else ": ".join(filter(None, (error_class, first_line)))
    )
    return (message if len(message) <= 160 else f"{message[:157]}...").rstrip(".")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` reports a lack of memory, on this rank or on another rank."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        message_part in str(error) for message_part in OUT_OF_MEMORY_MESSAGES
    )
