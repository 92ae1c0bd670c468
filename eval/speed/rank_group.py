"""The ranks of a speed op: their joint calls, and the time of the slowest rank.

Rank 0 runs the experiment and writes; the others measure the cases that it names.
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
from cab_hf.distributed.sharding import sharding_of
from cab_hf.eval.experiment import PROG, run
from cab_hf.eval.speed.runner import Speed, SpeedSettings
from cab_hf.eval.speed.timing import MOST_RUNS, Bench, in_a_sentence
from cab_hf.experiment.settings import UsageError, read_settings

Found = TypeVar("Found")
# time that ranks wait for one that works alone
PATIENCE = timedelta(hours=2)
ROW_SECONDS = 1.0  # seconds of several calls in a row


class Slowest(NamedTuple):
    """Median ms per call over ``runs``, each with ``in_a_row`` calls, and the highest peak."""

    ms: float
    peak_gib: float | None
    runs: int
    in_a_row: int = 1
    each_ms: Sequence[float] = ()


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Synchronised ranks; without groups, one rank alone.

    The measured calls run on ``group``; ``control`` contains the same ranks on the CPU.
    """

    group: ProcessGroup | None = None
    control: ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def all_gather(self, value: Found) -> list[Found]:
        """Return the values of all ranks, in order."""
        if self.control is None:
            return [value]
        result: list[Any] = [None] * self.size
        dist.all_gather_object(result, value, group=self.control)
        return result

    def from_rank_0(self, value: Found) -> Found:
        """Return the value of rank 0 on every rank."""
        return self.all_gather(value)[0]

    def mean(self, value: float, weight: float = 1) -> float:
        """Return the mean over the ranks."""
        pairs = self.all_gather((value, weight))
        return sum(x * by for x, by in pairs) / sum(by for _, by in pairs)

    def pairs(self, length: int, block: int) -> int:
        """Return the causal pairs of this rank's queries for a sequence in blocks of ``block``."""
        sharding = sharding_of((length,), self.size, block)
        return int((sharding.positions[self.rank] + 1)[sharding.real[self.rank]].sum())

    def together(self, call: Callable[[], Found]) -> Found:
        """Return the result of ``call`` on this rank after it has returned on all.

        Raises:
            RuntimeError: on every rank if it failed on any; the message contains that error.
        """
        if self.control is None:
            return call()
        result, why = None, None
        try:
            result = call()
        except RankLost:
            # the others cannot be reached any more
            raise
        except Exception as error:
            why = in_a_sentence(error)
        given = self.all_gather(why)
        failed = [f"rank {rank}: {each}" for rank, each in enumerate(given) if each is not None]
        if failed:
            raise RuntimeError(failed[0] if None in given else given[0])
        return result

    def time_slowest(
        self,
        bench: Bench,
        call: Callable[[], Any],
        least: int,
        seconds: float = 0.0,
        in_a_row: int = 1,
        warm_up: float = math.inf,
        before: Callable[[], Any] = lambda: None,
    ) -> Slowest:
        """Time ``call``, which all ranks start together: at least ``least`` runs, for ``seconds``.

        A run has at most ``in_a_row`` calls, as many as take `ROW_SECONDS` according to an earlier
        call: later calls are launched while earlier ones compute, as in the layers of a model. The
        first call does not count unless it takes more than ``warm_up`` seconds. ``before`` is
        called before each run and is not timed.
        """

        def begin() -> None:
            before()
            if self.group is not None:
                dist.barrier(self.group)

        def walls(runs: int, row: int = 1) -> tuple[list[float], float | None]:
            """Return (ms per call of the slowest rank in each run, the highest peak)."""

            def some() -> None:
                for _ in range(row):
                    call()

            calls = some if row > 1 else call
            mine = self.together(lambda: bench.walls(calls, runs, begin))
            times, peaks = zip(*self.all_gather(mine), strict=True)
            slowest = [max(run) / row for run in zip(*times, strict=True)]
            return slowest, None if None in peaks else max(peaks)

        each, peak = walls(1)
        if each[0] <= warm_up * 1e3:
            each, peak = walls(1)
        took = max(each[0], 1e-6)
        row = max(1, min(in_a_row, int(ROW_SECONDS * 1e3 / took)))
        runs = min(MOST_RUNS, max(least, int(seconds * 1e3 / (row * took))))
        if row > 1:
            each, peak = walls(runs, row)
        elif runs > 1:
            more, peak = walls(runs - 1)
            each += more
        return Slowest(statistics.median(each), peak, runs, row, each)


def by_torchrun() -> bool:
    """Return True if torchrun has started this process."""
    return "RANK" in os.environ


@contextmanager
def launched(device: str, command: str) -> Iterator[RankGroup]:
    """Return the ranks that torchrun has started.

    There is one rank per GPU of this host, or per process on the CPU.

    Raises:
        UsageError: torchrun has started no ranks, or ranks on several hosts.
    """
    if not by_torchrun():
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
        mine = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(mine)
        dist.init_process_group("nccl", device_id=mine)
    else:
        dist.init_process_group("gloo")
    try:
        control = dist.new_group(backend="gloo", timeout=PATIENCE)
        yield RankGroup(dist.group.WORLD, control)
    finally:
        dist.destroy_process_group()


class Ranked(Speed):
    """The base class of ops that run on the ranks of torchrun; some run without it too.

    A rank that fails while the others wait ends the run, at the latest by torch's timeout.
    """

    LEAST_RANKS = 2

    def __init__(self, settings: Any, ranks: RankGroup | None = None) -> None:
        super().__init__(settings)
        self.ranks = RankGroup() if ranks is None else ranks

    @staticmethod
    def needs_ranks(settings: SpeedSettings) -> bool:
        """Return True if the settings ask for ranks, from torchrun or not."""
        return by_torchrun()

    @property
    def is_ranked(self) -> bool:
        return self.ranks.size > 1 or self.needs_ranks(self.settings)

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        settings = read_settings(cls.Settings, words, f"{PROG} {cls.name}", cls.purpose)
        if not cls.needs_ranks(settings):
            run(cls(settings))
            return 0
        with launched(settings.device, f"cab_hf.eval {cls.name}") as ranks:
            cls(settings, ranks).over_ranks()
        return 0

    @staticmethod
    def programs(settings: Mapping[str, Any]) -> list[str]:
        worlds = settings.get("worlds") or ()
        return [f"torchrun --nproc_per_node={n} -m cab_hf.eval" for n in worlds] or [PROG]

    def recorded(self) -> dict[str, Any]:
        """Return the settings, with the number of ranks if ranks matter."""
        worlds = {"worlds": [self.ranks.size]} if self.is_ranked else {}
        return {**super().recorded(), **worlds}

    def check(self) -> None:
        super().check()
        if self.is_ranked and self.ranks.size < self.LEAST_RANKS:
            raise UsageError(
                "torchrun must start at least 2 ranks, because the op measures ranks, and "
                "torchrun started 1; give it --nproc_per_node=2."
            )
        if self.is_ranked and self.settings.device not in ("cuda", "cpu"):
            raise UsageError(
                "device must be cuda or cpu for several ranks, because every rank uses the GPU "
                f"with its number, got {self.settings.device!r}. Give --device cuda."
            )

    def over_ranks(self) -> None:
        """Run the experiment on rank 0, and measure its cases on the other ranks."""
        if self.ranks.rank:
            while (case := self.ranks.from_rank_0(None)) is not None:
                super().measure(case)
            return
        try:
            run(self)
        except RankLost:
            # all other ranks have stopped
            raise
        except Exception:
            self.ranks.from_rank_0(None)
            raise
        self.ranks.from_rank_0(None)

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        return super().measure(self.ranks.from_rank_0(case))

    def reported(self, error: Exception) -> dict[str, Any]:
        if isinstance(error, RankLost):
            raise error
        return super().reported(error)

    def find(self, sample: dict[str, Any]) -> None:
        """Call `find_on_ranks`; a case of one rank is measured by rank 0 while the others wait."""
        if sample["world"] > 1:
            return self.find_on_ranks(sample, self.ranks)
        try:
            if self.ranks.rank == 0:
                self.find_on_ranks(sample, RankGroup())
        finally:
            self.ranks.from_rank_0(None)

    @abstractmethod
    def find_on_ranks(self, sample: dict[str, Any], ranks: RankGroup) -> None:
        """Add the results of the ranks of ``ranks`` to ``sample``; each rank calls it."""
