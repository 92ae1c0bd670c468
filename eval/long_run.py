"""Long runs on a model: how many cases they have, memory that runs out, and several processes.

Processes share a run as torchrun and accelerate start them, one or more a GPU. Each measures the
cases of its share of the questions, under all methods. First come the cases that wait for no other;
then all know every sample of them, and so what the others are to match. What is timed rank 0
measures, while the others wait. It also writes the log and the report. The others keep what they
measure in logs beside it until rank 0 has it; what a kill leaves of them is taken up by the next
run, of any number of processes.
"""

from __future__ import annotations

import gc
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, product
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import distributed as dist
from tqdm import tqdm

from cab_hf.eval.experiment import PROG, SAMPLES, Row, identity_of, measure_missing, run
from cab_hf.eval.on_model import OnModel, OnModelSettings
from cab_hf.eval.speed.timing import in_a_sentence, ran_out
from cab_hf.runs.log import Log, is_there, read_log
from cab_hf.runs.settings import UsageError, flag, read_settings

# for the slowest of the others
PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class LongRunSettings(OnModelSettings):
    """Of runs that say how many cases they have."""

    dry_run: bool = flag("say how many cases are left, and end")


class LongRun(OnModel):
    """Base of experiments whose cases are known before any is measured, all but what some match.

    A case that finds no memory is recorded with its ``error`` and passed over; a later run tries it
    again. Several processes share the cases, see `Share`.

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
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
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
        case_of, seen = itemgetter(*self.CASE), set()
        path = Path(self.settings.out) / SAMPLES
        if is_there(path):
            _, records = read_log(path, self.CASE, self.ADDED, self.FAILED)
            seen = {case_of(each) for each in records if each.get(self.FAILED) is None}
        left = sum(case_of(case) not in seen for case in self.planned())
        there = f" ({len(seen):,} are there)" if seen else ""
        return f"{left:,} cases{there}" if left else "nothing is left to measure"


# --- a run that several processes share


def take_gpu(ranks: int) -> None:
    """Have "cuda" mean the GPU of this process, before anything is put on one.

    Where a host has more processes than GPUs they take turns: a small model leaves a GPU idle.
    """
    if ranks > 1 and torch.cuda.is_available():
        mine = int(os.environ.get("LOCAL_RANK", 0))
        torch.cuda.set_device(mine % torch.cuda.device_count())


def run_shares(experiment: LongRun, rank: int, ranks: int) -> None:
    """Run ``experiment``, of which this process measures its share; errors as of `run`.

    Raises:
        UsageError: a device is named that all processes would take.
    """
    if ranks == 1:
        run(experiment, _measure_alone)
        return
    device = experiment.settings.device
    if device not in ("cuda", "cpu"):
        raise UsageError(
            f"device is {device!r}; where {ranks} processes share a run it must be cuda or cpu: "
            "each takes the GPU of its own number."
        )
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        share = Share(experiment, rank, ranks)
        if rank == 0:
            run(experiment, share.lead)
        else:
            share.follow()
    finally:
        dist.destroy_process_group()


def _measure_alone(experiment: LongRun, log: Log) -> bool:
    taken = _take_up(experiment, log)
    return measure_missing(experiment, log) or taken


class Share:
    """The cases of one of several processes."""

    def __init__(self, experiment: LongRun, rank: int, ranks: int) -> None:
        self.experiment, self.rank, self.ranks = experiment, rank, ranks

    def lead(self, experiment: LongRun, log: Log) -> bool:
        """`measure_missing` of rank 0, whose ``log`` gets the samples of all."""
        before = len(log.records)
        _take_up(experiment, log)
        known = list(log.records)
        dist.broadcast_object_list([known])
        _, *others = self.measure(known, log)
        for sample in chain(*others):
            log.append(sample)
        # the others may drop theirs
        dist.barrier()
        return len(log.records) > before

    def follow(self) -> None:
        """Measure beside rank 0."""
        given: list[Any] = [None]
        dist.broadcast_object_list(given)
        path = Path(self.experiment.settings.out) / _log_of(self.rank)
        with _opened(self.experiment, path) as log:
            self.measure(given[0], log)
        dist.barrier()
        path.unlink()

    def measure(self, known: Sequence[Row], log: Log) -> list[list[Row]]:
        """The samples of each rank beyond those ``known``; this one's go into ``log``."""
        experiment, everyone, own = self.experiment, [], []
        mine = self.mine(known)
        with tqdm(total=len(mine), unit="case", smoothing=0, disable=self.rank > 0) as bar:
            # what waits for no other, then the rest; of both first what is timed
            for stage in product((False, True), (True, False)):
                counted = [s for s in chain(*everyone) if s.get(experiment.FAILED) is None]
                cases = (c for c in mine if (experiment.waits(c), experiment.alone(c)) == stage)
                for case in experiment.with_match(cases, [*known, *counted]):
                    words = (f"{name} {case[name]}" for name in experiment.CASE)
                    bar.set_description(", ".join(words))
                    own.append(experiment.sample(case))
                    log.append(own[-1])
                    bar.update()
                # waits for the slowest
                everyone = [[] for _ in range(self.ranks)]
                dist.all_gather_object(everyone, own)
        return everyone

    def mine(self, known: Sequence[Row]) -> list[dict[str, Any]]:
        """The missing cases of this rank's questions; all that are timed are those of rank 0."""
        case_of, questions = itemgetter(*self.experiment.CASE), {}
        seen = set(map(case_of, known))
        missing = [case for case in self.experiment.planned() if case_of(case) not in seen]
        places = [
            questions.setdefault(self.experiment.question(case), len(questions)) for case in missing
        ]
        return [
            case
            for case, place in zip(missing, places, strict=True)
            if (0 if self.experiment.alone(case) else place % self.ranks) == self.rank
        ]


def _log_of(rank: int | str) -> str:
    return f"{Path(SAMPLES).stem}.rank{rank}{Path(SAMPLES).suffix}"


def _opened(experiment: LongRun, path: Path) -> Log:
    kind = type(experiment)
    return Log(path, identity_of(experiment), kind.CASE, kind.ADDED, kind.FAILED)


def _take_up(experiment: LongRun, log: Log) -> bool:
    """Whether a run that was killed has left samples of other ranks, which ``log`` then has."""
    before = len(log.records)
    for path in sorted(Path(experiment.settings.out).glob(_log_of("*"))):
        with _opened(experiment, path) as left:
            for sample in left.records:
                log.append(sample)
        path.unlink()
    return len(log.records) > before
