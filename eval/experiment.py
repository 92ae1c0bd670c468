"""The base class of experiments, and the runner that measures, resumes and reports them.

An experiment turns settings into cases. A case is one measurement, such as one prompt that one
method answers, and its sample is the logged record of case and result. Rows, tables, the figure and
sentences are computed from all samples. The runner measures each case once and logs its sample
immediately; `render` computes everything else again from the log.
"""

from __future__ import annotations

import importlib
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from cab_hf import __version__
from cab_hf.config import OLD_OUTLIER_FIELD, CabConfig
from cab_hf.eval import report
from cab_hf.eval.archive import REMOVED_COMMANDS, ArchivedRun
from cab_hf.experiment.log import (
    Log,
    LogError,
    convert_write_errors,
    file_exists,
    read_file,
    read_log,
    to_json,
    write_atomically,
)
from cab_hf.experiment.provenance import provenance
from cab_hf.experiment.settings import UsageError, read_settings, to_command_line

PROG = "python -m cab_hf.eval"
SAMPLES_FILE, RESULTS_FILE, CSV_FILE = "samples.jsonl", "results.json", "results.csv"
REPORT_FILE, FIGURE_FILE = "report.md", "figure.png"
# fields that number repetitions; cases that differ only in these fields belong to one cell
REPETITION_FIELDS = ("depth", "index")
Row = Mapping[str, Any]


class Experiment(ABC):
    """The base class of experiments.

    A case is one measurement, identified by the values of the fields `CASE_FIELDS`. The sample of a
    case is the logged record of the case and its result. Subclasses load models, and create objects
    that time kernels, when `measure` first needs them, not in the constructor.

    Attributes:
        name: the command that runs the experiment.
        purpose: the line that help shows for the command.
        title: title of the report.
        caption: caption of the figure.
        Settings: a dataclass of options (`cab_hf.experiment.settings`) with the results folder
            ``out``.
        CASE_FIELDS: names of the fields that identify a case and its sample.
        ADDED_DEFAULTS: field -> value, for fields that logs of earlier versions lack.
        EXTENSIBLE_SETTINGS: names of the settings that determine the number of cases; a later run
            in the same folder may change these settings.
        ERROR_FIELD: name of the field that contains the reason if a case failed; a later run
            measures failed cases again. None: the experiment logs no failed cases.
    """

    name: ClassVar[str]
    purpose: ClassVar[str]
    title: ClassVar[str]
    caption: ClassVar[str]
    Settings: ClassVar[type]
    CASE_FIELDS: ClassVar[tuple[str, ...]]
    ADDED_DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    EXTENSIBLE_SETTINGS: ClassVar[tuple[str, ...]] = ()
    ERROR_FIELD: ClassVar[str | None] = None

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def recorded_settings(self) -> dict[str, Any]:
        """Return the settings as the results record them, without the folder ``out``."""
        return {name: value for name, value in asdict(self.settings).items() if name != "out"}

    def identity(self) -> dict[str, Any]:
        """Return the header of the log: the experiment and the settings that a run cannot extend.

        `EXTENSIBLE_SETTINGS` are left out. A run continues a log only if their headers are equal.
        """
        recorded_settings = self.recorded_settings()
        fixed_settings = {
            name: recorded_settings[name]
            for name in recorded_settings
            if name not in self.EXTENSIBLE_SETTINGS
        }
        return {"experiment": self.name, **fixed_settings}

    def open_log(self, path: Path) -> Log:
        """Open the log of samples at ``path``."""
        return Log(
            path,
            self.identity(),
            key_fields=self.CASE_FIELDS,
            added_defaults=self.ADDED_DEFAULTS,
            error_field=self.ERROR_FIELD,
            required_fields=self.required_fields,
        )

    @staticmethod
    def measured_fields(sample: Row) -> Sequence[str]:
        """Return the fields of ``sample`` that `rows` or `cases` read.

        The fields of `CASE_FIELDS` are left out.
        """
        return ()

    @classmethod
    def required_fields(cls, sample: Row) -> Sequence[str]:
        """Return the names of the fields that ``sample`` must have in addition to `CASE_FIELDS`.

        The sample of a failed case needs no fields in addition.
        """
        has_failed = cls.ERROR_FIELD is not None and sample.get(cls.ERROR_FIELD) is not None
        return () if has_failed else cls.measured_fields(sample)

    def provenance(self, started: str) -> dict[str, Any]:
        """Return the provenance of results: experiment, settings, device and versions.

        Args:
            started: time at which the run started.
        """
        device = getattr(self.settings, "device", "cpu")
        return {"experiment": self.name, **provenance(self.recorded_settings(), device, started)}

    @abstractmethod
    def cases(self, samples: Sequence[Row]) -> Iterable[dict[str, Any]]:
        """Yield all cases in order, with `CASE_FIELDS` and the fields that `measure` needs.

        Args:
            samples: a list that the runner extends during the iteration. When a case is yielded,
                the list contains the samples of all earlier cases.
        """

    def check_settings(self) -> None:  # noqa: B027  most experiments accept all settings
        """Raise an error for settings that cannot be measured; `run` then writes no file.

        Raises:
            UsageError: the message contains the setting, its value and the accepted values.
        """

    def num_expected_cases(self) -> int | None:
        """Return the number of cases for the progress bar; None if the number is unknown."""
        return None

    @abstractmethod
    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Return the measured fields of one case."""

    def measure_sample(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Measure a case and return its sample: the fields of the case and the measured fields.

        The sample has the field `ERROR_FIELD` if a later run should measure the case again.
        """
        return {**case, **self.measure(case)}

    def measure_missing(self, log: Log) -> bool:
        """Measure the cases that ``log`` lacks; return True if at least one case was missing."""
        num_logged = len(log.records)
        # smoothing=0 estimates the remaining time from all cases, because the times of cells differ
        with tqdm(total=self.num_expected_cases(), unit="case", smoothing=0) as progress_bar:
            for case in self.cases(log.records):
                if case in log:
                    # an earlier run measured the case
                    progress_bar.initial += 1
                else:
                    progress_bar.set_description(
                        ", ".join(f"{name} {case[name]}" for name in self.CASE_FIELDS)
                    )
                    log.append(self.measure_sample(case))
                progress_bar.update()
        return len(log.records) > num_logged

    @staticmethod
    @abstractmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of the results, in order.

        Args:
            samples: samples of all cases that did not fail.
            settings: the recorded settings.
        """

    @staticmethod
    @abstractmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """Return heading -> Markdown table, the most important table first."""

    @staticmethod
    @abstractmethod
    def summary_sentences(rows: Sequence[Row]) -> list[str]:
        """Summarise the rows in one or two sentences."""

    @staticmethod
    @abstractmethod
    def notes(settings: Mapping[str, Any]) -> str:
        """Return a paragraph that explains the terms of the report, from recorded settings."""

    @staticmethod
    @abstractmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Draw the figure and write it to ``path`` as PNG."""

    @classmethod
    def commands(cls, settings: Row) -> list[str]:
        """Return the command lines that repeat a run with the recorded ``settings``."""
        arguments = f"{cls.name} {shlex.join(to_command_line(settings, cls.Settings))}".strip()
        return [
            f"{command_prefix} {arguments}" for command_prefix in cls.command_prefixes(settings)
        ]

    @staticmethod
    def command_prefixes(settings: Row) -> list[str]:
        """Return the part of each command line before the name of the experiment."""
        return [PROG]

    @classmethod
    def main(cls, arguments: Sequence[str]) -> int:
        """Run the experiment with command-line ``arguments``, and return the exit status."""
        run(cls(read_settings(cls.Settings, arguments, f"{PROG} {cls.name}", cls.purpose)))
        return 0


def run(experiment: Experiment) -> list[dict[str, Any]]:
    """Measure the missing cases, write all files, print the first table and return the rows.

    Raises:
        LogError: the results folder contains files that this run cannot continue
            (`cab_hf.experiment.log`), or the folder cannot be written.
        UsageError: the settings cannot be measured.
    """
    out = Path(experiment.settings.out)
    _refuse_files_of_other_runs(out)
    experiment.check_settings()
    experiment_class = type(experiment)
    with experiment.open_log(out / SAMPLES_FILE) as log:
        earlier_provenance = read_provenance(out)
        has_new_samples = experiment.measure_missing(log)
        failures = log.failures
        reasons = _join_reasons(experiment_class, failures)
        if failures and not log.records:
            raise UsageError(
                f"no case could be measured: {reasons}. Give shorter lengths, or use a device with "
                "more memory, on which the same command continues."
            )
        provenance_record = _merge_provenance(
            experiment, earlier_provenance, log.started, has_new_samples
        )
        rows = _write_files(
            experiment_class=experiment_class,
            out=out,
            samples=log.records,
            failures=failures,
            provenance_record=provenance_record,
        )
    if failures:
        print(
            f"\n{len(failures)} cases failed ({reasons}). The report lists them, and the same "
            "command tries them again."
        )
    print(
        "\n"
        + "\n\n".join(
            [*make_summary(experiment_class, rows), *provenance_record.get("repeated", ())]
        )
    )
    print(f"\nfigure: {out / FIGURE_FILE}\nreport: {out / REPORT_FILE}")
    return rows


def import_experiment(name: str) -> type[Experiment]:
    """Import and return the experiment of the command ``name``, such as ``speed ttft``.

    Raises:
        ValueError: the experiment was removed.
    """
    if name in REMOVED_COMMANDS:
        raise ValueError(
            f"experiment must exist, got {name!r}, which was removed. Check out the commit of the "
            f"run, or use {REMOVED_COMMANDS[name]}."
        )
    module_name = name.replace(" ", ".").replace("-", "_")
    return importlib.import_module(f"cab_hf.eval.{module_name}").EXPERIMENT


def find_experiment_class(record: Row, folder: Path) -> type[Experiment] | ArchivedRun:
    """Return the class of the experiment that wrote results, or an `ArchivedRun` in its place.

    An `ArchivedRun` replaces the class of a removed experiment.

    Args:
        record: provenance of the results.
        folder: folder of the results.
    """
    name = record["experiment"]
    return (
        ArchivedRun.read(name, folder / REPORT_FILE)
        if name in REMOVED_COMMANDS
        else import_experiment(name)
    )


def render(folder: Path | str) -> list[dict[str, Any]]:
    """Write rows, figure and report of ``folder`` again from its samples; return the rows."""
    folder = Path(folder)
    provenance_record = read_provenance(folder)
    if provenance_record is None:
        raise LogError(f"{folder} has no {RESULTS_FILE}. Let its run finish.")
    experiment_class = import_experiment(provenance_record["experiment"])
    _, records = read_log(
        folder / SAMPLES_FILE,
        key_fields=experiment_class.CASE_FIELDS,
        added_defaults=experiment_class.ADDED_DEFAULTS,
        error_field=experiment_class.ERROR_FIELD,
        required_fields=experiment_class.required_fields,
    )
    failures = [
        record
        for record in records
        if experiment_class.ERROR_FIELD and record.get(experiment_class.ERROR_FIELD)
    ]
    return _write_files(
        experiment_class=experiment_class,
        out=folder,
        # `read_log` returns failures last
        samples=records[: len(records) - len(failures)],
        failures=failures,
        provenance_record=provenance_record,
    )


def read_provenance(folder: Path) -> Row | None:
    """Return the provenance of the results in ``folder``; None if the folder has no results.

    Raises:
        LogError: the results file has no provenance.
    """
    path = folder / RESULTS_FILE
    if not file_exists(path):
        return None
    try:
        record = json.loads(read_file(path))["provenance"]
        if {"settings", "versions"} <= record.keys():
            return record
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    raise LogError(
        f"{path} must contain results of a run. Remove it, and the next run writes it again."
    )


def _refuse_files_of_other_runs(out: Path) -> None:
    """Raise an error if ``out`` contains result files but no samples.

    Result files without samples do not come from a run in this folder, and must not be overwritten.
    """
    for file_name in (
        ()
        if file_exists(out / SAMPLES_FILE)
        else (RESULTS_FILE, CSV_FILE, REPORT_FILE, FIGURE_FILE)
    ):
        if (out / file_name).exists():
            raise LogError(
                f"out must be a new folder or the folder of a run, got {out}, which contains "
                f"{file_name} and no {SAMPLES_FILE}. Remove it or give another --out."
            )


def _join_reasons(experiment_class: type[Experiment], failures: Sequence[Row]) -> str:
    """Return the distinct reasons of failed cases, separated by semicolons."""
    return "; ".join(
        dict.fromkeys(str(sample[experiment_class.ERROR_FIELD]) for sample in failures)
    )


def _merge_provenance(
    experiment: Experiment, earlier_provenance: Row | None, started: str, has_new_samples: bool
) -> Row:
    """Return the provenance of the last run that added samples.

    Its settings in `EXTENSIBLE_SETTINGS` are merged with those of earlier runs: the union of lists,
    and the largest number.

    Args:
        experiment: the experiment of this run.
        earlier_provenance: the provenance that earlier runs wrote; None without earlier runs.
        started: time at which this run started.
        has_new_samples: True if this run added samples.
    """
    # turn tuples into lists, so that the settings are comparable with those of earlier runs
    record = json.loads(json.dumps(experiment.provenance(started)))
    if earlier_provenance is None:
        return record
    if repetition_notes := dict.fromkeys(
        [*earlier_provenance.get("repeated", ()), *record.get("repeated", ())]
    ):
        record["repeated"] = list(repetition_notes)
    for setting_name in experiment.EXTENSIBLE_SETTINGS:
        old_value, new_value = (
            earlier_provenance["settings"].get(setting_name),
            record["settings"].get(setting_name),
        )
        if isinstance(old_value, list):
            record["settings"][setting_name] = list(dict.fromkeys([*old_value, *new_value]))
        elif isinstance(old_value, int):
            record["settings"][setting_name] = max(old_value, new_value)
    return (
        record
        if has_new_samples or record["settings"] != earlier_provenance["settings"]
        else earlier_provenance
    )


def _write_files(
    experiment_class: type[Experiment],
    out: Path,
    samples: Sequence[Row],
    failures: Sequence[Row],
    provenance_record: Row,
) -> list[dict[str, Any]]:
    """Write all files of a run to ``out`` and return the rows.

    The written provenance lists each failed cell, with the number of failed cases and their
    reasons.
    """
    record = {name: value for name, value in provenance_record.items() if name != "failed"}
    cell_field_names = [
        name for name in experiment_class.CASE_FIELDS if name not in REPETITION_FIELDS
    ]
    if failed_cells := report.group_rows(failures, cell_field_names):
        record["failed"] = [
            {
                **{name: cell_failures[0][name] for name in cell_field_names},
                "cases": len(cell_failures),
                "why": _join_reasons(experiment_class, cell_failures),
            }
            for cell_failures in failed_cells
        ]
    rows = _compute_rows(experiment_class, samples, record["settings"], out / SAMPLES_FILE)
    # turn tuples into lists, so that report and figure see the rows as results.json contains them
    rows = json.loads(to_json(rows, out / RESULTS_FILE))
    with convert_write_errors(out):
        report.write_results(out, rows, record)
        write_atomically(out / CSV_FILE, report.as_csv(rows))
        experiment_class.draw(out / FIGURE_FILE, rows)
        write_atomically(out / REPORT_FILE, render_report(experiment_class, rows, record))
    return rows


def _compute_rows(
    experiment_class: type[Experiment], samples: Sequence[Row], settings: Row, path: Path
) -> list[Row]:
    """Return the rows of an experiment.

    Raises:
        LogError: a sample in the log ``path`` lacks a field that the rows need.
    """
    try:
        return experiment_class.rows(samples, settings)
    except KeyError as error:
        (field_name,) = error.args
        if all(field_name in sample for sample in samples):
            raise
        raise LogError(
            f"{path} has a sample without {field_name!r}. Repair it or give another --out."
        ) from error


def make_summary(
    experiment_class: type[Experiment] | ArchivedRun, rows: Sequence[Row]
) -> list[str]:
    """Return the first table and, if there are any, the sentences about the rows as a paragraph."""
    paragraphs = [
        next(iter(experiment_class.tables(rows).values())),
        " ".join(experiment_class.summary_sentences(rows)),
    ]
    return list(filter(None, paragraphs))


def render_report(
    experiment_class: type[Experiment] | ArchivedRun, rows: Sequence[Row], provenance: Row
) -> str:
    """Return the content of ``report.md`` for rows and provenance of ``results.json``."""
    if isinstance(experiment_class, ArchivedRun):
        return experiment_class.report
    other_tables = [
        *list(experiment_class.tables(rows).items())[1:],
        *make_failed_table(provenance).items(),
    ]
    paragraphs = [
        f"# {experiment_class.title}",
        *make_summary(experiment_class, rows),
        *provenance.get("repeated", ()),
        f"![{experiment_class.caption}]({FIGURE_FILE})",
        *(f"## {heading}\n\n{table}" for heading, table in other_tables),
        experiment_class.notes(provenance["settings"]),
        *describe_configs(provenance["settings"]),
        f"{describe_run(provenance)}:",
        format_command(experiment_class, provenance["settings"]),
    ]
    return "\n\n".join(paragraphs) + "\n"


# The default config of earlier versions, as far as it differs from the current default. These
# versions scored typical queries on every key.
EARLIER_DEFAULT_FIELDS = {
    OLD_OUTLIER_FIELD: 16,
    "typical_queries": 8,
    "mass_threshold": 0.0025,
    "share_threshold": 0.05,
}


def make_failed_table(provenance: Row) -> dict[str, str]:
    """Return heading -> table of the failed cells; {} if no cell failed."""
    cells = provenance.get("failed")
    return {"Not measured yet": report.markdown_table(cells, list(cells[0]))} if cells else {}


def describe_run(provenance: Row) -> str:
    """Return device, versions, commit and time of a run, as a sentence without a full stop."""
    packages = [f"{name} {version}" for name, version in provenance["versions"].items()]
    packages += [*provenance.get("baselines", {}).values(), *provenance.get("environment", ())]
    return (
        f"Made on {provenance['device']} with {', '.join(dict.fromkeys(packages))}, commit "
        f"{provenance['commit'] or 'unknown'}; finished {provenance['finished']}"
    )


def describe_configs(settings: Row) -> list[str]:
    """Return one sentence per config of a run.

    A sentence lists the fields that differ from the default, or all fields of a config that
    `CabConfig` no longer accepts.
    """
    config_by_method = settings.get("cab_configs") or {"cab": settings.get("cab_config")}
    sentences = []
    for method, config in config_by_method.items():
        if config and has_current_fields(config):
            changed_fields = json.dumps(find_changed_fields(config))
            default_name = f"the default of cab_hf {__version__}"
            if is_from_earlier_version(config):
                default_name = "the earlier default (8 typical queries on every key)"
            sentences.append(
                f"Config of {method}: `{changed_fields}`, other fields as in {default_name}"
            )
        elif config:
            sentences.append(f"Config of {method}: `{json.dumps(config)}`")
    return sentences


def has_current_fields(config: Row) -> bool:
    """Return True if `CabConfig` has all fields of a recorded config.

    A field may have its current name, or its name in the version `is_from_earlier_version`.
    """
    accepted_names = {field.name for field in fields(CabConfig)} | get_default_fields(config).keys()
    return drop_unset_share(config).keys() <= accepted_names


def is_from_earlier_version(config: Row) -> bool:
    """Return True for a recorded config of versions that scored typical queries on every key."""
    return OLD_OUTLIER_FIELD in config


def get_default_fields(config: Row) -> dict[str, Any]:
    """Return the fields of the default config of the version that recorded ``config``."""
    default_fields = CabConfig().to_dict()
    if not is_from_earlier_version(config):
        return default_fields
    later_fields = {"outlier_queries", "typical_key_stride"}
    return {
        name: value for name, value in default_fields.items() if name not in later_fields
    } | EARLIER_DEFAULT_FIELDS


def drop_unset_share(config: Row) -> dict[str, Any]:
    """Return a recorded config without ``top_p=None``, a renamed field that was not set."""
    return {name: value for name, value in config.items() if (name, value) != ("top_p", None)}


def find_changed_fields(config: Row) -> dict[str, Any]:
    """Return the fields of a recorded config that differ from the default of the same version."""
    default_fields = get_default_fields(config)
    return {name: value for name, value in config.items() if value != default_fields.get(name)}


def format_command(experiment_class: type[Experiment] | ArchivedRun, settings: Row) -> str:
    """Return a Markdown code block of the commands that repeat a run with ``settings``."""
    if isinstance(experiment_class, ArchivedRun):
        return experiment_class.command
    return "\n".join(["```", *experiment_class.commands(settings), "```"])
