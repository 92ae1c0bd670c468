"""Long runs on a model: how many cases are left, memory that runs out, and shards of a run.

Several processes measure a run together: each is given ``--shard i/n``, a share of the questions,
and logs its samples beside those of the others. The same command without it adds what they logged,
measures what is left and writes the report.
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
from cab_hf.eval.experiment import PROG, SAMPLES, Row, run
from cab_hf.eval.methods import METHODS, Cell, Method, Realised, layers_of, realised_on
from cab_hf.eval.on_model import OnModel, OnModelSettings
from cab_hf.eval.speed.timing import in_a_sentence, ran_out
from cab_hf.runs.log import Log, as_recorded, is_there, read_log, require_identity
from cab_hf.runs.settings import flag, option, read_settings, require
from cab_hf.texts.needles import Tokens

SHARD_LOG = "samples.shard-{}-of-{}.jsonl"
MATCH = "match"  # a budget: what the matched method realises on the same texts


@dataclass(frozen=True)
class LongRunSettings(OnModelSettings):
    """Of runs that say how many cases they have, and that several processes may share."""

    dry_run: bool = flag("say how many cases are left, and end")
    shard: str | None = option(None, "i/n: measure the i-th of n shares, and write no report")

    def __post_init__(self) -> None:
        super().__post_init__()
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                "each process that torchrun or accelerate starts would measure everything; start "
                "them without either, with `--shard 1/2`, `--shard 2/2` and so on."
            )
        given = re.fullmatch(r"(\d+)/(\d+)", self.shard or "1/1")
        fits = given and 1 <= int(given[1]) <= int(given[2])
        require(self, "shard", fits, "i/n, such as 1/4 for the first of four")

    def check_methods(self) -> None:
        """Refuse a name in ``methods`` that is none, and no name."""
        for method in self.methods:
            require(self, "methods", method in METHODS, f"names of {', '.join(METHODS)}", method)
        require(self, "methods", self.methods, "at least one name")

    def check_match(self, name: str, match: str, there: bool) -> None:
        """Refuse, by the setting ``name``, methods to match ``match`` unless that is ``there``."""
        matched = [method for method in self.methods if METHODS[method].matched]
        accepted = (
            f"a density such as 0.2 where {', '.join(matched)} is to match a budget and {match}, "
            "whose density would be matched, is not among the methods"
        )
        require(self, name, there or not matched, accepted)


@lru_cache(maxsize=1)
def fitted(kind: type[Method], cell: Cell) -> Method:
    """A method of that class, fitted once for all samples of a cell."""
    return kind.fit(cell)


class LongRun(OnModel):
    """Base of experiments whose cases are known before any is measured, all but what some match.

    A case that finds no memory is recorded with its ``error`` and passed over; a later run tries it
    again.

    Attributes:
        CELL: fields of a case that say what is measured, and not on what.
        FITTED: the field that holds what a cell is to match, a density or a time, which may follow
            from samples.
    """

    FAILED = "error"
    CELL: ClassVar[tuple[str, ...]]
    FITTED: ClassVar[str]

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.realised_on = cache(self._realised_on)

    @abstractmethod
    def planned(self) -> Iterator[dict[str, Any]]:
        """All cases in order, by the fields in `CASE` alone."""

    @abstractmethod
    def waits(self, case: Mapping[str, Any]) -> bool:
        """Whether what it is to match follows from samples of other cases, which do not wait."""

    def alone(self, case: Mapping[str, Any]) -> bool:
        """Whether it is timed, and so no case of a shard."""
        return False

    @abstractmethod
    def fitted(self, case: Mapping[str, Any], samples: Sequence[Row]) -> Any:
        """What a case of this cell is to match; None where samples that show it are missing."""

    @abstractmethod
    def question(self, case: Mapping[str, Any]) -> tuple[Any, ...]:
        """What all methods are asked alike; the cases of one question are of one shard."""

    @abstractmethod
    def typical(self, *place: Any) -> Tokens:
        """What has densities (and times) at a text and length, or a length: always the same."""

    def _realised_on(self, *place: Any) -> Realised:
        return realised_on(self.model, self.typical(*place))

    def fit(
        self, kind: type[Method], config: CabConfig, case: Mapping[str, Any], *place: Any, **more
    ) -> Method:
        """A method set up for the cell of a case at `typical`'s ``place``; ``more`` of `Cell`."""
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
        left, there = len(experiment.missing(found)), f" ({len(found):,} are there)" * bool(found)
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
        # behind the handler: the frames of the error hold what was allocated
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {**case, self.FAILED: why}

    # --- shards

    def found(self) -> list[Row]:
        """The samples in the folder, of the run and of all shards; LogError for another run's."""
        identity, path = as_recorded(self.identity()), Path(self.settings.out) / SAMPLES
        samples = []
        for each in [path, *self._shard_logs()] if is_there(path) else self._shard_logs():
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
        """The planned cases of which there is no sample."""
        case_of = itemgetter(*self.CASE)
        seen = set(map(case_of, samples))
        return [case for case in self.planned() if case_of(case) not in seen]

    def share(self, samples: Sequence[Row]) -> list[dict[str, Any]]:
        """What a shard measures beyond ``samples``: cases that wait, once no others are missing."""
        part, parts = map(int, self.settings.shard.split("/"))
        # the same in every shard, whatever has been measured
        questions = dict.fromkeys(map(self.question, self.planned()))
        mine = set(list(questions)[part - 1 :: parts])
        missing = [case for case in self.missing(samples) if not self.alone(case)]
        now = [case for case in missing if not self.waits(case)] or missing
        return [case for case in now if self.question(case) in mine]

    def measure_shard(self, found: Sequence[Row]) -> None:
        """Measure the share of this process."""
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
        """Those with something in them: one that has just been created may be empty."""
        paths = sorted(Path(self.settings.out).glob(SHARD_LOG.format("*", "*")))
        return [path for path in paths if path.stat().st_size]
