"""Run a speed op on several ranks, and time the slowest rank.

Rank 0 runs the experiment, broadcasts each case and writes all files. The other ranks measure the
broadcast cases together with rank 0.
"""

from __future__ import annotations

import math
import os
import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from cab_hf.distributed import RankLost
from cab_hf.distributed.sharding import get_sharding
from cab_hf.eval.experiment import PROG, run
from cab_hf.eval.speed.runner import Speed, SpeedSettings
from cab_hf.eval.speed.timing import MAX_RUNS, Bench, summarise_error
from cab_hf.experiment.settings import UsageError, read_settings

Result = TypeVar("Result")
# largest time that the other ranks wait while rank 0 measures a case of one rank
CONTROL_TIMEOUT = timedelta(hours=2)
MAX_RUN_SECONDS = 1.0  # largest time of a timed run that consists of several calls


class SlowestTime(NamedTuple):
    """The time of a call that all ranks start together, on the slowest rank of each run.

    Attributes:
        ms: median milliseconds per call over all runs.
        peak_gib: peak GiB allocated of the rank with the largest peak; None on a CPU.
        runs: number of runs.
        in_a_row: calls per run.
        each_ms: milliseconds per call of each run.
    """

    ms: float
    peak_gib: float | None
    runs: int
    in_a_row: int = 1
    each_ms: Sequence[float] = ()


@dataclass(frozen=True, eq=False)
class RankGroup:
    """The ranks that measure a case together, or a single rank.

    Attributes:
        process_group: process group of the measured calls; None for a single rank.
        control_group: process group of the same ranks on the CPU, for control messages; None for a
            single rank.
    """

    process_group: ProcessGroup | None = None
    control_group: ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.process_group is None else self.process_group.rank()

    @property
    def num_ranks(self) -> int:
        return 1 if self.process_group is None else self.process_group.size()

    def all_gather(self, own_value: Result) -> list[Result]:
        """Return the values of all ranks, in the order of the ranks."""
        if self.control_group is None:
            return [own_value]
        rank_values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(rank_values, own_value, group=self.control_group)
        return rank_values

    def broadcast_from_rank_0(self, rank_value: Result) -> Result:
        """Return the value of rank 0 on every rank."""
        return self.all_gather(rank_value)[0]

    def compute_mean(self, value: float, weight: float = 1) -> float:
        """Return the weighted mean of a value over the ranks."""
        value_weight_pairs = self.all_gather((value, weight))
        weighted_sum = sum(
            rank_value * rank_weight for rank_value, rank_weight in value_weight_pairs
        )
        return weighted_sum / sum(rank_weight for _, rank_weight in value_weight_pairs)

    def count_rank_pairs(self, length: int, block_tokens: int) -> int:
        """Return the number of causal (query, key) pairs of this rank's queries.

        Args:
            length: tokens of the sharded sequence.
            block_tokens: tokens of which the chunks of ranks are multiples.
        """
        sharding = get_sharding((length,), self.num_ranks, block_tokens)
        return int((sharding.positions[self.rank] + 1)[sharding.is_real[self.rank]].sum())

    def call_on_all_ranks(self, call: Callable[[], Result]) -> Result:
        """Call ``call`` on all ranks, and return this rank's result after all ranks have returned.

        Raises:
            RuntimeError: on every rank if the call failed on any rank. The message is that of the
                first rank that failed.
        """
        if self.control_group is None:
            return call()
        own_result, own_message = None, None
        try:
            own_result = call()
        except RankLost:
            # a rank has ended, so that messages cannot reach all ranks any more
            raise
        except Exception as error:
            own_message = summarise_error(error)
        messages = self.all_gather(own_message)
        failures = [
            f"rank {rank}: {message}"
            for rank, message in enumerate(messages)
            if message is not None
        ]
        if failures:
            # name the rank only if other ranks succeeded
            raise RuntimeError(failures[0] if None in messages else messages[0])
        return own_result

    def time_slowest(
        self,
        bench: Bench,
        call: Callable[[], Any],
        min_runs: int,
        seconds: float = 0.0,
        max_calls_per_run: int = 1,
        warm_up_seconds: float = math.inf,
        before_run: Callable[[], Any] = lambda: None,
    ) -> SlowestTime:
        """Time a call that all ranks start together.

        A run can consist of several calls. The host then launches the kernels of a call while the
        device computes the call before, as in successive layers of a model.

        Args:
            bench: the timer of this rank.
            call: the function to time.
            min_runs: smallest number of runs.
            seconds: total time to fill with runs, if it permits more than ``min_runs`` runs.
            max_calls_per_run: largest number of calls per run, which takes at most
                `MAX_RUN_SECONDS`.
            warm_up_seconds: the first call counts as a run if it takes more than this many seconds;
                otherwise it is a warm-up call.
            before_run: a function that is called before each run and is not timed.
        """

        def synchronise_start() -> None:
            before_run()
            if self.process_group is not None:
                dist.barrier(self.process_group)

        def time_calls(num_runs: int, num_calls: int = 1) -> tuple[list[float], float | None]:
            """Return times and memory of the worst rank.

            Returns:
                For each run, the milliseconds per call of the slowest rank; and the peak GiB
                allocated of the rank with the largest peak, or None on a CPU.
            """

            def call_repeatedly() -> None:
                for _ in range(num_calls):
                    call()

            timed_call = call_repeatedly if num_calls > 1 else call
            own_result = self.call_on_all_ranks(
                lambda: bench.time_runs(timed_call, num_runs, synchronise_start)
            )
            rank_results = self.all_gather(own_result)
            slowest_ms = [
                max(run_times_ms[run_index] for run_times_ms, _ in rank_results) / num_calls
                for run_index in range(num_runs)
            ]
            peak_gibs = [peak_gib for _, peak_gib in rank_results]
            return slowest_ms, None if None in peak_gibs else max(peak_gibs)

        each_ms, peak_gib = time_calls(1)
        if each_ms[0] <= warm_up_seconds * 1e3:
            each_ms, peak_gib = time_calls(1)
        call_ms = max(each_ms[0], 1e-6)
        num_calls = max(1, min(max_calls_per_run, int(MAX_RUN_SECONDS * 1e3 / call_ms)))
        num_runs = min(MAX_RUNS, max(min_runs, int(seconds * 1e3 / (num_calls * call_ms))))
        if num_calls > 1:
            each_ms, peak_gib = time_calls(num_runs, num_calls)
        elif num_runs > 1:
            later_ms, peak_gib = time_calls(num_runs - 1)
            each_ms += later_ms
        return SlowestTime(
            ms=statistics.median(each_ms),
            peak_gib=peak_gib,
            runs=num_runs,
            in_a_row=num_calls,
            each_ms=each_ms,
        )


def is_torchrun() -> bool:
    """Return True if torchrun has started this process."""
    return "RANK" in os.environ


@contextmanager
def init_process_groups(device: str, command: str) -> Iterator[RankGroup]:
    """Initialise torch.distributed, and yield the ranks that torchrun has started.

    On "cuda", rank n uses GPU n. The process groups are destroyed after the block.

    Args:
        device: "cuda" or "cpu".
        command: what to start by torchrun, such as "cab_hf.eval speed lora", for the error message.

    Raises:
        UsageError: torchrun has started no ranks, or ranks on several hosts.
    """
    if not is_torchrun():
        raise UsageError(
            "this command must be started by torchrun, got a single process. Run torchrun "
            f"--nproc_per_node=N -m {command}."
        )
    if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
        raise UsageError(
            f"torchrun must start all ranks on one host, got {os.environ['WORLD_SIZE']} ranks on "
            "several. Start them on one host."
        )
    if torch.device(device).type == "cuda":
        gpu_device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu_device)
        dist.init_process_group("nccl", device_id=gpu_device)
    else:
        dist.init_process_group("gloo")
    try:
        control_group = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        yield RankGroup(dist.group.WORLD, control_group)
    finally:
        dist.destroy_process_group()


class RankedSpeed(Speed):
    """The base class of ops that can run on the ranks of torchrun.

    If a rank ends while other ranks wait for it, the run ends too, at the latest after the timeout
    of torch.distributed.

    Attributes:
        MIN_RANKS: smallest number of ranks in a run under torchrun.
    """

    MIN_RANKS = 2

    def __init__(self, settings: Any, ranks: RankGroup | None = None) -> None:
        super().__init__(settings)
        self.ranks = RankGroup() if ranks is None else ranks

    @staticmethod
    def needs_ranks(settings: SpeedSettings) -> bool:
        """Return True if the op must run on the ranks of torchrun."""
        return is_torchrun()

    @property
    def is_ranked(self) -> bool:
        """True if results depend on the number of ranks."""
        return self.ranks.num_ranks > 1 or self.needs_ranks(self.settings)

    @classmethod
    def main(cls, arguments: Sequence[str]) -> int:
        settings = read_settings(cls.Settings, arguments, f"{PROG} {cls.name}", cls.purpose)
        if not cls.needs_ranks(settings):
            run(cls(settings))
            return 0
        with init_process_groups(settings.device, f"cab_hf.eval {cls.name}") as ranks:
            cls(settings, ranks).run_on_all_ranks()
        return 0

    @staticmethod
    def command_prefixes(settings: Mapping[str, Any]) -> list[str]:
        world_sizes = settings.get("worlds") or ()
        return [
            f"torchrun --nproc_per_node={num_ranks} -m cab_hf.eval" for num_ranks in world_sizes
        ] or [PROG]

    def recorded_settings(self) -> dict[str, Any]:
        """Return the settings, and the number of ranks if results depend on it."""
        rank_fields = {"worlds": [self.ranks.num_ranks]} if self.is_ranked else {}
        return {**super().recorded_settings(), **rank_fields}

    def check_settings(self) -> None:
        super().check_settings()
        if self.is_ranked and self.ranks.num_ranks < self.MIN_RANKS:
            raise UsageError(
                "torchrun must start at least 2 ranks, because the op measures ranks, and "
                "torchrun started 1; give it --nproc_per_node=2."
            )
        if self.is_ranked and self.settings.device not in ("cuda", "cpu"):
            raise UsageError(
                "device must be cuda or cpu for several ranks, because every rank uses the GPU "
                f"with its number, got {self.settings.device!r}. Give --device cuda."
            )

    def run_on_all_ranks(self) -> None:
        """Run the experiment on rank 0, and measure its cases on the other ranks."""
        if self.ranks.rank:
            while (case := self.ranks.broadcast_from_rank_0(None)) is not None:
                super().measure(case)
            return
        try:
            run(self)
        except RankLost:
            # rank 0 must not broadcast the end of the run, because a rank has ended
            raise
        except Exception:
            self.ranks.broadcast_from_rank_0(None)
            raise
        self.ranks.broadcast_from_rank_0(None)

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        return super().measure(self.ranks.broadcast_from_rank_0(case))

    def make_error_fields(self, error: Exception) -> dict[str, Any]:
        if isinstance(error, RankLost):
            raise error
        return super().make_error_fields(error)

    def fill_sample(self, sample: dict[str, Any]) -> None:
        """Measure a case of several ranks on all ranks, and a case of one rank on rank 0 only.

        In the second case, the other ranks wait.
        """
        if sample["world"] > 1:
            return self.fill_sample_on_ranks(sample, self.ranks)
        try:
            if self.ranks.rank == 0:
                self.fill_sample_on_ranks(sample, RankGroup())
        finally:
            self.ranks.broadcast_from_rank_0(None)

    @abstractmethod
    def fill_sample_on_ranks(self, sample: dict[str, Any], ranks: RankGroup) -> None:
        """Measure a case together with the other ranks, and add the results to ``sample``.

        Args:
            sample: the fields of the case.
            ranks: the ranks that call this method.
        """
