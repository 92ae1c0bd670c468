"""Long runs on a model, which count remaining cases, survive out-of-memory errors and use shards.

Several processes can measure a run together. The process with ``--shard i/n`` measures the cases of
every n-th question from question i on, and logs the samples in the results folder. Then the same
command without ``--shard`` joins the logs, measures the missing cases and writes the report.
"""

from __future__ import annotations

import gc
import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from tqdm import tqdm

from cab_hf.config import CabConfig
from cab_hf.data.needles import Tokens
from cab_hf.eval.experiment import PROG, SAMPLES_FILE, Row, run
from cab_hf.eval.methods import (
    METHODS,
    Cell,
    ConfigMeasure,
    Method,
    count_layers,
    make_density_measure,
)
from cab_hf.eval.on_model import OnModel, OnModelSettings
from cab_hf.eval.speed.timing import is_out_of_memory, summarise_error
from cab_hf.experiment.log import Log, convert_through_json, file_exists, read_log, require_identity
from cab_hf.experiment.settings import flag, option, read_settings, require

SHARD_LOG_TEMPLATE = "samples.shard-{}-of-{}.jsonl"
# the budget that is the measured density or time of another method, usually CAB
MATCH_BUDGET = "match"


@dataclass(frozen=True)
class LongRunSettings(OnModelSettings):
    """Settings of a `LongRun`: those of the model, and the options for dry runs and shards."""

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
        shard_match = re.fullmatch(r"(\d+)/(\d+)", self.shard or "1/1")
        is_valid_shard = shard_match and 1 <= int(shard_match[1]) <= int(shard_match[2])
        require(self, "shard", is_valid_shard, "i/n, such as 1/4 for the first of four shards")

    def check_methods(self) -> None:
        """Raise an error if ``methods`` is empty or contains an unknown name."""
        for method in self.methods:
            require(
                settings=self,
                field_name="methods",
                condition=method in METHODS,
                requirement=f"one or more of {', '.join(METHODS)}",
                value=method,
            )
        require(self, "methods", self.methods, "at least one name")

    def check_match(self, setting_name: str, matched_method: str, can_match: bool) -> None:
        """Raise an error if baselines should have the density of a method that is not measured.

        Args:
            setting_name: the setting that the message names.
            matched_method: name of the method whose density baselines should have.
            can_match: True if the run measures this method, or if no budget is `MATCH_BUDGET`.
        """
        matched_methods = [method for method in self.methods if METHODS[method].is_budget_matched]
        requirement = (
            f"a density such as 0.2, because {', '.join(matched_methods)} would match the "
            "density of "
            f"{matched_method}, which is not among the methods"
        )
        require(self, setting_name, can_match or not matched_methods, requirement)


@lru_cache(maxsize=1)
def fit_to_cell(method_class: type[Method], cell: Cell) -> Method:
    """Return a method of class ``method_class`` whose parameters realise the budget of ``cell``.

    Only the latest result is cached.
    """
    return method_class.fit(cell)


class LongRun(OnModel):
    """The base class of experiments that can list all cases before they measure the first.

    Cases do not depend on samples, except for budgets that equal the density or time of another
    method. If a case runs out of memory, the run logs the case with an ``error`` and continues. A
    later run measures the case again.

    Attributes:
        CELL_FIELDS: names of the fields of a case that identify a cell.
        BUDGET_FIELD: name of the field with the budget of a cell, a density or a time.
    """

    ERROR_FIELD = "error"
    CELL_FIELDS: ClassVar[tuple[str, ...]]
    BUDGET_FIELD: ClassVar[str]

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.get_density_measure = cache(
            lambda key: make_density_measure(self.model, self.get_fitting_tokens(key))
        )

    @abstractmethod
    def list_planned_cases(self) -> Iterator[dict[str, Any]]:
        """Yield all cases in order, without the budget (`BUDGET_FIELD`)."""

    @abstractmethod
    def needs_other_samples(self, case: Mapping[str, Any]) -> bool:
        """Return True if the budget of a case follows from samples of other cases."""

    def must_run_alone(self, case: Mapping[str, Any]) -> bool:
        """Return True if only the run without ``--shard`` may measure the case.

        Such a case is timed or fitted to a time, and other processes on the device would change
        the time.
        """
        return False

    @abstractmethod
    def find_budget(self, case: Mapping[str, Any], samples: Sequence[Row]) -> Any:
        """Return the budget of the cell of a case, a density or a time.

        Returns None if the method has no budget, or if ``samples`` lack the samples from which the
        budget follows.
        """

    @abstractmethod
    def get_question_key(self, case: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the key of the question of a case; one shard measures all cases of a question."""

    @abstractmethod
    def get_fitting_tokens(self, text_key: tuple[Any, ...]) -> Tokens:
        """Return the tokens on which density and time are measured when methods are fitted.

        Args:
            text_key: the fields of a case that identify the text.
        """

    def fit_method(
        self,
        method_class: type[Method],
        config: CabConfig,
        case: Mapping[str, Any],
        text_key: tuple[Any, ...],
        measure_time_ms: ConfigMeasure | None = None,
    ) -> Method:
        """Return a method whose parameters realise the budget of a case.

        Args:
            method_class: class of the method.
            config: CAB's config, as in `Cell`.
            case: a case with the field `BUDGET_FIELD`, which contains the budget.
            text_key: the fields that identify the text on which the method is fitted.
            measure_time_ms: as in `Cell`.
        """
        cell = Cell(
            config=config,
            budget=case[self.BUDGET_FIELD],
            length=case["length"],
            device=self.settings.device,
            measure_density=self.get_density_measure(text_key),
            num_layers=count_layers(self.model),
            measure_time_ms=measure_time_ms,
        )
        return fit_to_cell(method_class, cell)

    def num_expected_cases(self) -> int:
        return sum(1 for _ in self.list_planned_cases())

    def cases(
        self, samples: Sequence[Row], planned_cases: Iterable[dict[str, Any]] | None = None
    ) -> Iterator[dict[str, Any]]:
        budget_by_cell: dict[tuple, Any] = {}
        for case in self.list_planned_cases() if planned_cases is None else planned_cases:
            cell = tuple(case[name] for name in self.CELL_FIELDS)
            if cell not in budget_by_cell:
                budget_by_cell[cell] = self.find_budget(case, samples)
            yield {**case, self.BUDGET_FIELD: budget_by_cell[cell]}

    @classmethod
    def main(cls, arguments: Sequence[str]) -> int:
        experiment = cls(read_settings(cls.Settings, arguments, f"{PROG} {cls.name}", cls.purpose))
        experiment.check_settings()
        samples = experiment.read_logged_samples()
        num_missing = len(experiment.list_missing_cases(samples))
        measured_note = f" ({len(samples):,} are measured)" if samples else ""
        message = (
            f"{num_missing:,} cases{measured_note}" if num_missing else "nothing is left to measure"
        )
        print(message, flush=True)
        if experiment.settings.dry_run:
            return 0
        if experiment.settings.shard:
            experiment.measure_shard(samples)
        else:
            run(experiment)
        return 0

    def recorded_settings(self) -> dict[str, Any]:
        settings = super().recorded_settings()
        return {name: settings[name] for name in settings if name not in ("dry_run", "shard")}

    def measure_sample(self, case: Mapping[str, Any]) -> dict[str, Any]:
        if self.needs_other_samples(case) and case[self.BUDGET_FIELD] is None:
            return {**case, self.ERROR_FIELD: "the density to match could not be measured"}
        try:
            return super().measure_sample(case)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = summarise_error(error)
        # free memory outside of the except block: inside, frames of the error keep tensors alive
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {**case, self.ERROR_FIELD: reason}

    def read_logged_samples(self) -> list[Row]:
        """Return the samples without errors in the logs of the run and of all its shards.

        Raises:
            LogError: a log belongs to a run with other settings.
        """
        identity, path = (
            convert_through_json(self.identity()),
            Path(self.settings.out) / SAMPLES_FILE,
        )
        samples = []
        for log_path in (
            [path, *self._list_shard_logs()] if file_exists(path) else self._list_shard_logs()
        ):
            header, records = read_log(
                log_path,
                key_fields=self.CASE_FIELDS,
                added_defaults=self.ADDED_DEFAULTS,
                error_field=self.ERROR_FIELD,
                required_fields=self.required_fields,
            )
            require_identity(log_path, header, identity)
            samples += [record for record in records if record.get(self.ERROR_FIELD) is None]
        return samples

    def list_missing_cases(self, samples: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the planned cases without a sample."""

        def get_case_key(case: Mapping[str, Any]) -> tuple[Any, ...]:
            return tuple(case[name] for name in self.CASE_FIELDS)

        measured_keys = set(map(get_case_key, samples))
        return [
            case for case in self.list_planned_cases() if get_case_key(case) not in measured_keys
        ]

    def list_shard_cases(self, samples: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the cases that this process should measure.

        These are the cases of its shard without a sample. Cases whose budget follows from other
        samples are included only if all other cases of all shards have samples.

        Args:
            samples: the samples that all processes have logged.
        """
        shard, num_shards = map(int, self.settings.shard.split("/"))
        # divide all questions, also measured ones, so that every process computes the same shards
        questions = dict.fromkeys(map(self.get_question_key, self.list_planned_cases()))
        shard_questions = set(list(questions)[shard - 1 :: num_shards])
        missing_cases = [
            case for case in self.list_missing_cases(samples) if not self.must_run_alone(case)
        ]
        ready_cases = [
            case for case in missing_cases if not self.needs_other_samples(case)
        ] or missing_cases
        return [case for case in ready_cases if self.get_question_key(case) in shard_questions]

    def measure_shard(self, samples: Sequence[Row]) -> None:
        """Measure the missing cases of this process's shard.

        Args:
            samples: the samples that all processes have logged.
        """
        shard, num_shards = self.settings.shard.split("/")
        path = Path(self.settings.out) / SHARD_LOG_TEMPLATE.format(shard, num_shards)
        cases = self.list_shard_cases(samples)
        with self.open_log(path) as log:
            for case in tqdm(self.cases(samples, cases), "shard", len(cases), unit="case"):
                log.append(self.measure_sample(case))

    def measure_missing(self, log: Log) -> bool:
        num_logged = len(log.records)
        for path in self._list_shard_logs():
            with self.open_log(path) as shard_log:
                for sample in shard_log.records:
                    log.append(sample)
            path.unlink()
        return super().measure_missing(log) or len(log.records) > num_logged

    def _list_shard_logs(self) -> list[Path]:
        """Return the paths of all shard logs that are not empty files."""
        paths = sorted(Path(self.settings.out).glob(SHARD_LOG_TEMPLATE.format("*", "*")))
        return [path for path in paths if path.stat().st_size]
