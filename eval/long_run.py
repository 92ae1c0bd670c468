"""Long runs on a model: how many cases they have, and memory that runs out."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch

from cab_hf.eval.experiment import PROG, SAMPLES, Row
from cab_hf.eval.on_model import OnModel, OnModelSettings
from cab_hf.eval.shares import run_shares, shared_by, take_gpu
from cab_hf.eval.speed.timing import in_a_sentence, ran_out
from cab_hf.runs.log import is_there, read_log
from cab_hf.runs.settings import flag, read_settings


@dataclass(frozen=True)
class LongRunSettings(OnModelSettings):
    """Of runs that say how many cases they have."""

    dry_run: bool = flag("say how many cases are left, and end")


class LongRun(OnModel):
    """Base of experiments whose cases are known before any is measured, all but what some match.

    A case that finds no memory is recorded with its ``error`` and passed over; a later run tries it
    again. Several processes share the cases, see `shares`.

    Attributes:
        CELL: fields of a case that say what is measured, and not on what.
        FITTED: the field that holds what a cell is to match, a density or a time, which may follow
            from samples.
    """

    FAILED = "error"
    CELL: ClassVar[tuple[str, ...]]
    FITTED: ClassVar[str]

    @abstractmethod
    def planned(self) -> Iterator[dict[str, Any]]:
        """All cases in order, by the fields in `CASE` alone."""

    @abstractmethod
    def waits(self, case: Mapping[str, Any]) -> bool:
        """Whether what it is to match follows from samples of other cases, which do not wait."""

    def alone(self, case: Mapping[str, Any]) -> bool:
        """Whether it is timed, so that no process may measure another case beside it."""
        return False

    @abstractmethod
    def fitted(self, case: Mapping[str, Any], samples: Sequence[Row]) -> Any:
        """What a case of this cell is to match; None where samples that tell it are missing."""

    @abstractmethod
    def question(self, case: Mapping[str, Any]) -> tuple[Any, ...]:
        """What all methods are asked alike; cases that are measured at once have one."""

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        return self.with_match(self.planned(), samples)

    def with_match(
        self, cases: Iterable[dict[str, Any]], samples: Sequence[Row]
    ) -> Iterator[dict[str, Any]]:
        """The ``cases``, each with what its cell is to match."""
        cell_of, matches = itemgetter(*self.CELL), {}
        for case in cases:
            if cell_of(case) not in matches:
                matches[cell_of(case)] = self.fitted(case, samples)
            yield {**case, self.FITTED: matches[cell_of(case)]}

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        rank, ranks = shared_by()
        take_gpu(ranks)
        experiment = cls(read_settings(cls.Settings, words, f"{PROG} {cls.name}", cls.purpose))
        if rank == 0:
            experiment.check()
            print(experiment.ahead(), flush=True)
        if not experiment.settings.dry_run:
            run_shares(experiment, rank, ranks)
        return 0

    def recorded(self) -> dict[str, Any]:
        return {name: value for name, value in super().recorded().items() if name != "dry_run"}

    def sample(self, case: Mapping[str, Any]) -> dict[str, Any]:
        if self.waits(case) and case[self.FITTED] is None:
            return {**case, self.FAILED: "the density to match could not be measured"}
        try:
            return super().sample(case)
        except Exception as error:
            if not ran_out(error):
                raise
            why = in_a_sentence(error)
        # behind the handler: the frames of the error hold what was allocated
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {**case, self.FAILED: why}

    def ahead(self) -> str:
        """How many cases are left."""
        case_of, samples = itemgetter(*self.CASE), self._measured()
        seen = set(map(case_of, samples))
        left = sum(case_of(case) not in seen for case in self.planned())
        there = f" ({len(seen):,} are there)" if seen else ""
        return f"{left:,} cases{there}" if left else "nothing is left to measure"

    def _measured(self) -> list[Row]:
        path = Path(self.settings.out) / SAMPLES
        if not is_there(path):
            return []
        _, records = read_log(path, self.CASE, self.ADDED, self.FAILED)
        return [record for record in records if record.get(self.FAILED) is None]
