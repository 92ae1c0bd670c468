"""Long runs on a model: remaining cases, out-of-memory errors, and shards of a run.

Several processes measure a run together. Each process gets ``--shard i/n``, a share of the
questions, and logs its samples in the same folder. The same command without ``--shard`` joins the
logs, measures the rest and writes the report.
"""

from __future__ import annotations

import gc
import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from tqdm import tqdm

from cab_hf.config import CabConfig
from cab_hf.data.needles import Tokens
from cab_hf.eval.experiment import PROG, SAMPLES, Row, run
from cab_hf.eval.methods import METHODS, Cell, Method, Realised, layers_of, realised_on
from cab_hf.eval.on_model import OnModel, OnModelSettings
from cab_hf.eval.speed.timing import in_a_sentence, ran_out
from cab_hf.experiment.log import Log, as_recorded, file_exists, read_log, require_identity
from cab_hf.experiment.settings import flag, option, read_settings, require

SHARD_LOG = "samples.shard-{}-of-{}.jsonl"
MATCH = "match"  # a budget: the density or time of the matched method on the same texts


@dataclass(frozen=True)
class LongRunSettings(OnModelSettings):
    """Settings of runs that count their cases, and that several processes may share."""

    dry_run: bool = flag("print the number of remaining cases, then exit")
    shard: str | None = option(None, "i/n: measure the i-th of n shards, and write no report")

    def __post_init__(self) -> None:
        super().__post_init__()
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                "WORLD_SIZE must be 1, because each process of torchrun or accelerate would "
                "measure everything. Start the processes without a launcher, with `--shard 1/2`, "
                "`--shard 2/2` and so on."
            )
        given = re.fullmatch(r"(\d+)/(\d+)", self.shard or "1/1")
        fits = given and 1 <= int(given[1]) <= int(given[2])
        require(self, "shard", fits, "i/n, such as 1/4 for the first of four shards")

    def check_methods(self) -> None:
        """Raise an error if ``methods`` is empty or contains an unknown name."""
        for method in self.methods:
            require(
                self, "methods", method in METHODS, f"one or more of {', '.join(METHODS)}", method
            )
        require(self, "methods", self.methods, "at least one name")

    def check_match(self, name: str, match: str, there: bool) -> None:
        """Raise an error if methods match ``match`` and it is not among the methods.

        The message names the setting ``name``.
        """
        matched = [method for method in self.methods if METHODS[method].matched]
        accepted = (
            f"a density such as 0.2, because {', '.join(matched)} would match the density of "
            f"{match}, which is not among the methods"
        )
        require(self, name, there or not matched, accepted)


@lru_cache(maxsize=1)
def fitted(kind: type[Method], cell: Cell) -> Method:
    """Return a method of that class, fitted once for all samples of a cell."""
    return kind.fit(cell)


class LongRun(OnModel):
    """The base class of experiments whose cases are known in advance, except for matched budgets.

    A case that runs out of memory is recorded with its ``error`` and skipped; a later run tries it
    again.

    Attributes:
        CELL: fields of a case that identify a cell.
        FITTED: the field with the density or time that a cell matches, which may follow from
            samples.
    """

    FAILED = "error"
    CELL: ClassVar[tuple[str, ...]]
    FITTED: ClassVar[str]

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.realised_on = cache(self._realised_on)

    @abstractmethod
    def planned(self) -> Iterator[dict[str, Any]]:
        """Yield all cases in order, with the fields in `CASE` only."""

    @abstractmethod
    def waits(self, case: Mapping[str, Any]) -> bool:
        """Return True if the matched value follows from samples of other cases."""

    def alone(self, case: Mapping[str, Any]) -> bool:
        """Return True if the case is timed, and therefore in no shard."""
        return False

    @abstractmethod
    def fitted(self, case: Mapping[str, Any], samples: Sequence[Row]) -> Any:
        """Return the value that a case of this cell matches; None while its samples are missing."""

    @abstractmethod
    def question(self, case: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the question of a case; all cases of a question belong to one shard."""

    @abstractmethod
    def typical(self, *place: Any) -> Tokens:
        """Return the fixed reading on which densities (and times) are measured."""

    def _realised_on(self, *place: Any) -> Realised:
        return realised_on(self.model, self.typical(*place))

    def fit(
        self, kind: type[Method], config: CabConfig, case: Mapping[str, Any], *place: Any, **more
    ) -> Method:
        """Return a method fitted to the cell of a case; ``more`` are fields of `Cell`."""
        given = config, case[self.FITTED], case["length"], self.settings.device
        return fitted(kind, Cell(*given, self.realised_on(*place), layers_of(self.model), **more))

    def expected(self) -> int:
        return sum(1 for _ in self.planned())

    def cases(
        self, samples: Sequence[Row], planned: Iterable[dict[str, Any]] | None = None
    ) -> Iterator[dict[str, Any]]:
        cell_of, matches = itemgetter(*self.CELL), {}
        for case in self.planned() if planned is None else planned:
            if cell_of(case) not in matches:
                matches[cell_of(case)] = self.fitted(case, samples)
            yield {**case, self.FITTED: matches[cell_of(case)]}

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        experiment = cls(read_settings(cls.Settings, words, f"{PROG} {cls.name}", cls.purpose))
        experiment.check()
        found = experiment.found()
        left, there = (
            len(experiment.missing(found)),
            f" ({len(found):,} are measured)" * bool(found),
        )
        print(f"{left:,} cases{there}" if left else "nothing is left to measure", flush=True)
        if experiment.settings.dry_run:
            return 0
        if experiment.settings.shard:
            experiment.measure_shard(found)
        else:
            run(experiment)
        return 0

    def recorded(self) -> dict[str, Any]:
        given = super().recorded()
        return {name: given[name] for name in given if name not in ("dry_run", "shard")}

    def sample(self, case: Mapping[str, Any]) -> dict[str, Any]:
        if self.waits(case) and case[self.FITTED] is None:
            return {**case, self.FAILED: "the density to match could not be measured"}
        try:
            return super().sample(case)
        except Exception as error:
            if not ran_out(error):
                raise
            why = in_a_sentence(error)
        # after the handler: the frames of the error refer to the allocated memory
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {**case, self.FAILED: why}

    # --- shards

    def found(self) -> list[Row]:
        """Return the samples of the run and of all shards; LogError for other runs."""
        identity, path = as_recorded(self.identity()), Path(self.settings.out) / SAMPLES
        samples = []
        for each in [path, *self._shard_logs()] if file_exists(path) else self._shard_logs():
            header, records = read_log(
                each,
                key=self.CASE,
                added=self.ADDED,
                failed=self.FAILED,
                fields_of=self.fields_of,
            )
            require_identity(each, header, identity)
            samples += [record for record in records if record.get(self.FAILED) is None]
        return samples

    def missing(self, samples: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the planned cases without a sample."""
        case_of = itemgetter(*self.CASE)
        seen = set(map(case_of, samples))
        return [case for case in self.planned() if case_of(case) not in seen]

    def share(self, samples: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the cases of a shard that ``samples`` lacks; cases that wait come last."""
        part, parts = map(int, self.settings.shard.split("/"))
        # equal in every shard, independent of earlier measurements
        questions = dict.fromkeys(map(self.question, self.planned()))
        mine = set(list(questions)[part - 1 :: parts])
        missing = [case for case in self.missing(samples) if not self.alone(case)]
        now = [case for case in missing if not self.waits(case)] or missing
        return [case for case in now if self.question(case) in mine]

    def measure_shard(self, found: Sequence[Row]) -> None:
        """Measure the shard of this process."""
        path = Path(self.settings.out) / SHARD_LOG.format(*self.settings.shard.split("/"))
        cases = self.share(found)
        with self.log(path) as log:
            for case in tqdm(self.cases(found, cases), "shard", len(cases), unit="case"):
                log.append(self.sample(case))

    def measure_missing(self, log: Log) -> bool:
        before = len(log.records)
        for path in self._shard_logs():
            with self.log(path) as shard:
                for sample in shard.records:
                    log.append(sample)
            path.unlink()
        return super().measure_missing(log) or len(log.records) > before

    def _shard_logs(self) -> list[Path]:
        """Return shard logs that are not empty: a new log may be."""
        paths = sorted(Path(self.settings.out).glob(SHARD_LOG.format("*", "*")))
        return [path for path in paths if path.stat().st_size]
