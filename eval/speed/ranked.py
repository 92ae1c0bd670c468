"""Speed ops that several ranks measure together: rank 0 decides and writes, the others follow."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cab_hf.distributed import RankLost
from cab_hf.eval.experiment import PROG, run
from cab_hf.eval.speed.base import Speed, SpeedSettings
from cab_hf.eval.speed.team import Team, launched
from cab_hf.runs.settings import UsageError, read_settings

Found = TypeVar("Found")


def by_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ


class Ranked(Speed):
    """Base of ops that run on the ranks of torchrun; some of them without it as well.

    Rank 0 runs the experiment; the others measure the cases that it tells them of. A rank that
    fails where the others wait for it ends the run, at the latest when torch's patience does.
    """

    LEAST_RANKS = 2

    def __init__(self, settings: Any, team: Team | None = None) -> None:
        super().__init__(settings)
        self.team = Team() if team is None else team

    @staticmethod
    def needs_ranks(settings: SpeedSettings) -> bool:
        """Whether what is asked for runs on ranks, torchrun's or none."""
        return True

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
        worlds = settings.get("worlds")
        return [f"torchrun --nproc_per_node={n} -m cab_hf.eval" for n in worlds or ()] or [PROG]

    def recorded(self) -> dict[str, Any]:
        """The settings, and on how many ranks where it is about ranks."""
        worlds = {"worlds": [self.team.size]} if self.is_ranked else {}
        return {**super().recorded(), **worlds}

    def check(self) -> None:
        super().check()
        if not self.is_ranked:
            return
        if self.team.size < self.LEAST_RANKS:
            raise UsageError(
                "it is about ranks, and torchrun started 1; give it --nproc_per_node=2."
            )
        if self.settings.device not in ("cuda", "cpu"):
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

    def alone(self, call: Callable[[], Found]) -> Found | None:
        """What ``call`` returns on rank 0; the others wait meanwhile, for None."""
        try:
            return call() if self.team.rank == 0 else None
        finally:
            self.team.from_rank_0(None)
