"""The ranks that a speed op runs on: what they do together, and how long the slowest of them takes.

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
from cab_hf.eval.speed.base import Speed, SpeedSettings
from cab_hf.eval.speed.timing import MOST_RUNS, Bench, in_a_sentence
from cab_hf.runs.settings import UsageError, read_settings

Found = TypeVar("Found")
# how long ranks wait for one that works alone
PATIENCE = timedelta(hours=2)
ROW_SECONDS = 1.0  # that several calls in a row may take


class Slowest(NamedTuple):
    """Median ms a call over ``runs``, each of so many calls ``in_a_row``, and the highest peak."""

    ms: float
    peak_gib: float | None
    runs: int
    in_a_row: int = 1
    each_ms: Sequence[float] = ()


@dataclass(frozen=True, eq=False)
class Team:
    """Ranks in step; without groups, one rank for itself.

    What is measured runs on ``group``; ``control`` is of the same ranks, on the CPU.
    """

    group: ProcessGroup | None = None
    control: ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def everyone(self, value: Found) -> list[Found]:
        """What the ranks gave, in order."""
        if self.control is None:
            return [value]
        result: list[Any] = [None] * self.size
        dist.all_gather_object(result, value, group=self.control)
        return result

    def from_rank_0(self, value: Found) -> Found:
        """What rank 0 gave, on every rank."""
        return self.everyone(value)[0]

    def mean(self, value: float, weight: float = 1) -> float:
        """The mean over the ranks."""
        given = self.everyone((value, weight))
        return sum(x * by for x, by in given) / sum(by for _, by in given)

    def pairs(self, length: int, block: int) -> int:
        """Causal pairs of this rank's queries of a text that is sharded by blocks of ``block``."""
        sharding = sharding_of((length,), self.size, block)
        return int((sharding.positions[self.rank] + 1)[sharding.real[self.rank]].sum())

    def together(self, call: Callable[[], Found]) -> Found:
        """What ``call`` returns on this rank, once it has returned on all.

        Raises:
            RuntimeError: on every rank where it failed on any, with what went wrong there.
        """
        if self.control is None:
            return call()
        result, why = None, None
        try:
            result = call()
        except RankLost:
            # the others cannot be asked any more
            raise
        except Exception as error:
            why = in_a_sentence(error)
        given = self.everyone(why)
        failed = [f"rank {rank}: {each}" for rank, each in enumerate(given) if each is not None]
        if failed:
            raise RuntimeError(failed[0] if None in given else given[0])
        return result

    def slowest(
        self,
        bench: Bench,
        call: Callable[[], Any],
        least: int,
        seconds: float = 0.0,
        in_a_row: int = 1,
        warm_up: float = math.inf,
        before: Callable[[], Any] = lambda: None,
    ) -> Slowest:
        """Time ``call``, which all ranks begin together: at least ``least`` runs, for ``seconds``.

        A run is at most ``in_a_row`` calls, as many as take `ROW_SECONDS` by one before: what
        follows is set under way while others compute, as in the layers of a model. A first call
        is not counted, unless it takes more than ``warm_up`` seconds. ``before`` is called ahead
        of each run, untimed.
        """

        def begin() -> None:
            before()
            if self.group is not None:
                dist.barrier(self.group)

        def walls(runs: int, row: int = 1) -> tuple[list[float], float | None]:
            """(ms a call of the slowest rank in each run, the highest peak)."""

            def some() -> None:
                for _ in range(row):
                    call()

            mine = self.together(lambda: bench.walls(some, runs, begin))
            times, peaks = zip(*self.everyone(mine), strict=True)
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
    """Whether torchrun has started this process."""
    return "RANK" in os.environ


@contextmanager
def launched(device: str, command: str) -> Iterator[Team]:
    """The ranks that torchrun has started, one a GPU of this host, or one a process on the CPU.

    Raises:
        UsageError: where torchrun has started nothing, or ranks of several hosts.
    """
    if not by_torchrun():
        raise UsageError(
            "it runs on ranks that torchrun starts, and this process is none; launch it with "
            f"torchrun --nproc_per_node=N -m {command}."
        )
    if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
        raise UsageError(
            f"torchrun has started {os.environ['WORLD_SIZE']} ranks on several hosts; start all on "
            "one, of which it measures the ranks."
        )
    if torch.device(device).type == "cuda":
        mine = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(mine)
        dist.init_process_group("nccl", device_id=mine)
    else:
        dist.init_process_group("gloo")
    try:
        control = dist.new_group(backend="gloo", timeout=PATIENCE)
        yield Team(dist.group.WORLD, control)
    finally:
        dist.destroy_process_group()


class Ranked(Speed):
    """Base of ops that run on the ranks of torchrun; some of them without it as well.

    A rank that fails where the others wait for it ends the run, at the latest when torch's patience
    does.
    """

    LEAST_RANKS = 2

    def __init__(self, settings: Any, team: Team | None = None) -> None:
        super().__init__(settings)
        self.team = Team() if team is None else team

    @staticmethod
    def needs_ranks(settings: SpeedSettings) -> bool:
        """Whether what is asked for runs on ranks, torchrun's or none."""
        return by_torchrun()

    @property
    def is_ranked(self) -> bool:
        return self.team.size > 1 or self.needs_ranks(self.settings)

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        settings = read_settings(cls.Settings, words, f"{PROG} {cls.name}", cls.purpose)
        if not cls.needs_ranks(settings):
            run(cls(settings))
            return 0
        with launched(settings.device, f"cab_hf.eval {cls.name}") as team:
            cls(settings, team).over_ranks()
        return 0

    @staticmethod
    def programs(settings: Mapping[str, Any]) -> list[str]:
        worlds = settings.get("worlds") or ()
        return [f"torchrun --nproc_per_node={n} -m cab_hf.eval" for n in worlds] or [PROG]

    def recorded(self) -> dict[str, Any]:
        """The settings, and on how many ranks where it is about ranks."""
        worlds = {"worlds": [self.team.size]} if self.is_ranked else {}
        return {**super().recorded(), **worlds}

    def check(self) -> None:
        super().check()
        if self.is_ranked and self.team.size < self.LEAST_RANKS:
            raise UsageError(
                "it is about ranks, and torchrun started 1; give it --nproc_per_node=2."
            )
        if self.is_ranked and self.settings.device not in ("cuda", "cpu"):
            raise UsageError(
                f"device is {self.settings.device!r}; over ranks it must be cuda or cpu: every "
                "rank takes the GPU of its own number."
            )

    def over_ranks(self) -> None:
        """Run on rank 0, and measure on the others what it is at."""
        if self.team.rank:
            while (case := self.team.from_rank_0(None)) is not None:
                super().measure(case)
            return
        try:
            run(self)
        except RankLost:
            # nobody is left to tell
            raise
        except Exception:
            self.team.from_rank_0(None)
            raise
        self.team.from_rank_0(None)

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        return super().measure(self.team.from_rank_0(case))

    def reported(self, error: Exception) -> dict[str, Any]:
        if isinstance(error, RankLost):
            raise error
        return super().reported(error)

    def find(self, sample: dict[str, Any]) -> None:
        """As `find_on`; where a case is of one rank, rank 0 measures it and the others wait."""
        if sample["world"] > 1:
            return self.find_on(sample, self.team)
        try:
            if self.team.rank == 0:
                self.find_on(sample, Team())
        finally:
            self.team.from_rank_0(None)

    @abstractmethod
    def find_on(self, sample: dict[str, Any], team: Team) -> None:
        """Write into ``sample`` what the ranks of ``team`` find, each of which calls it."""
