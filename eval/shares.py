"""A run that several processes share, as torchrun and accelerate start them, one or more a GPU.

Each measures the cases of its share of the questions, under all methods. First come the cases that
wait for no other; then all know every sample of them, and so what the others are to match.
What is timed rank 0 measures, while the others wait. It also writes the log and the report. The
others keep what they measure in logs beside it until rank 0 has it; what a kill leaves of them is
taken up by the next run, of any number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain, product
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from tqdm import tqdm

from cab_hf.eval.experiment import SAMPLES, Row, identity_of, measure_missing, run
from cab_hf.runs.log import Log
from cab_hf.runs.settings import UsageError

if TYPE_CHECKING:
    from cab_hf.eval.long_run import LongRun

# for the slowest of the others
PATIENCE = timedelta(days=30)


def shared_by() -> tuple[int, int]:
    """(rank, ranks) of this process; (0, 1) where nothing has started several."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


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
