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
SAMPLES, RESULTS, CSV = "samples.jsonl", "results.json", "results.csv"
REPORT, FIGURE = "report.md", "figure.png"
# fields that number repetitions; cases that differ only in these fields belong to one cell
REPETITION_FIELDS = ("depth", "index")
Row = Mapping[str, Any]


class Experiment(ABC):
    """The base class of experiments.

    A case is one measurement, identified by the values of the fields `CASE`. The sample of a case
    is the logged record of the case and its result. Subclasses load models, and create objects that
    time kernels, when `measure` first needs them, not in the constructor.

    Attributes:
        name: the command that runs the experiment.
        purpose: the line that help shows for the command.
        title: title of the report.
        caption: caption of the figure.
        Settings: a dataclass of options (`cab_hf.experiment.settings`) with the results folder
            ``out``.
        CASE: names of the fields that identify a case and its sample.
        ADDED: field -> value, for fields that logs of earlier versions lack.
        GROWS: names of the settings that determine the number of cases; a later run in the same
            folder may change these settings.
        FAILED: name of the field that contains the reason if a case failed; a later run measures
            failed cases again. None: the experiment logs no failed cases.
    """

    name: ClassVar[str]
    purpose: ClassVar[str]
    title: ClassVar[str]
    caption: ClassVar[str]
    Settings: ClassVar[type]
    CASE: ClassVar[tuple[str, ...]]
    ADDED: ClassVar[Mapping[str, Any]] = {}
    GROWS: ClassVar[tuple[str, ...]] = ()
    FAILED: ClassVar[str | None] = None

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def recorded(self) -> dict[str, Any]:
        """Return the settings as the results record them, without the folder ``out``."""
        return {name: value for name, value in asdict(self.settings).items() if name != "out"}

    def identity(self) -> dict[str, Any]:
        """Return the header of the log: the experiment and all settings except `GROWS`.

        A run can continue a log only if their headers are equal.
        """
        recorded_settings = self.recorded()
        fixed_settings = {
            name: recorded_settings[name] for name in recorded_settings if name not in self.GROWS
        }
        return {"experiment": self.name, **fixed_settings}

    def log(self, path: Path) -> Log:
        """Open the log of samples at ``path``."""
        return Log(
            path,
            self.identity(),
            key=self.CASE,
            added=self.ADDED,
            failed=self.FAILED,
            fields_of=self.fields_of,
        )

    @staticmethod
    def measured(sample: Row) -> Sequence[str]:
        """Return the fields of ``sample`` that `rows` or `cases` read, in addition to `CASE`."""
        return ()

    @classmethod
    def fields_of(cls, sample: Row) -> Sequence[str]:
        """Return the names of the fields that ``sample`` must have in addition to `CASE`.

        The sample of a failed case needs no fields in addition.
        """
        has_failed = cls.FAILED is not None and sample.get(cls.FAILED) is not None
        return () if has_failed else cls.measured(sample)

    def provenance(self, started: str) -> dict[str, Any]:
        """Return the provenance of results: experiment, settings, device and versions.

        Args:
            started: time at which the run started.
        """
        device = getattr(self.settings, "device", "cpu")
        return {"experiment": self.name, **provenance(self.recorded(), device, started)}

    @abstractmethod
    def cases(self, samples: Sequence[Row]) -> Iterable[dict[str, Any]]:
        """Yield all cases in order, with the fields of `CASE` and fields that `measure` needs.

        Args:
            samples: a list that the runner extends during the iteration. When a case is yielded,
                the list contains the samples of all earlier cases.
        """

    def check(self) -> None:  # noqa: B027  most experiments accept all settings
        """Raise an error for settings that cannot be measured; `run` then writes no file.

        Raises:
            UsageError: the message contains the setting, its value and the accepted values.
        """

    def expected(self) -> int | None:
        """Return the number of cases for the progress bar; None if the number is unknown."""
        return None

    @abstractmethod
    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Return the measured fields of one case."""

    def sample(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Measure a case and return its sample: the fields of the case and the measured fields.

        The sample has the field `FAILED` if a later run should measure the case again.
        """
        return {**case, **self.measure(case)}

    def measure_missing(self, log: Log) -> bool:
        """Measure the cases that ``log`` lacks; return True if at least one case was missing."""
        num_logged = len(log.records)
        # smoothing=0 estimates the remaining time from all cases, because the times of cells differ
        with tqdm(total=self.expected(), unit="case", smoothing=0) as progress_bar:
            for case in self.cases(log.records):
                if case in log:
                    # an earlier run measured the case
                    progress_bar.initial += 1
                else:
                    progress_bar.set_description(
                        ", ".join(f"{name} {case[name]}" for name in self.CASE)
                    )
                    log.append(self.sample(case))
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
    def readings(rows: Sequence[Row]) -> list[str]:
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
        return [f"{program} {arguments}" for program in cls.programs(settings)]

    @staticmethod
    def programs(settings: Row) -> list[str]:
        """Return the part of each command line before the name of the experiment."""
        return [PROG]

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        """Run the experiment with ``words``, its command-line options; return the exit status."""
        run(cls(read_settings(cls.Settings, words, f"{PROG} {cls.name}", cls.purpose)))
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
    experiment.check()
    experiment_class = type(experiment)
    with experiment.log(out / SAMPLES) as log:
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
            kind=experiment_class,
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
        + "\n\n".join([*summary(experiment_class, rows), *provenance_record.get("repeated", ())])
    )
    print(f"\nfigure: {out / FIGURE}\nreport: {out / REPORT}")
    return rows


def named(name: str) -> type[Experiment]:
    """Import and return the experiment of the command ``name``, such as ``speed ttft``.

    Raises:
        ValueError: the experiment was removed.
    """
    if name in REMOVED_COMMANDS:
        raise ValueError(
            f"experiment must exist, got {name!r}, which was removed. Check out the commit of the "
            f"run, or use {REMOVED_COMMANDS[name]}."
        )
    module = name.replace(" ", ".").replace("-", "_")
    return importlib.import_module(f"cab_hf.eval.{module}").EXPERIMENT


def find_experiment_class(record: Row, folder: Path) -> type[Experiment] | ArchivedRun:
    """Return the class of the experiment that wrote results, or an `ArchivedRun` in its place.

    An `ArchivedRun` replaces the class of a removed experiment.

    Args:
        record: provenance of the results.
        folder: folder of the results.
    """
    name = record["experiment"]
    return ArchivedRun.read(name, folder / REPORT) if name in REMOVED_COMMANDS else named(name)


def render(folder: Path | str) -> list[dict[str, Any]]:
    """Write rows, figure and report of ``folder`` again from its samples; return the rows."""
    folder = Path(folder)
    provenance_record = read_provenance(folder)
    if provenance_record is None:
        raise LogError(f"{folder} has no {RESULTS}. Let its run finish.")
    experiment_class = named(provenance_record["experiment"])
    _, records = read_log(
        folder / SAMPLES,
        key=experiment_class.CASE,
        added=experiment_class.ADDED,
        failed=experiment_class.FAILED,
        fields_of=experiment_class.fields_of,
    )
    failures = [
        record
        for record in records
        if experiment_class.FAILED and record.get(experiment_class.FAILED)
    ]
    return _write_files(
        kind=experiment_class,
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
    path = folder / RESULTS
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
    for name in () if file_exists(out / SAMPLES) else (RESULTS, CSV, REPORT, FIGURE):
        if (out / name).exists():
            raise LogError(
                f"out must be a new folder or the folder of a run, got {out}, which contains "
                f"{name} and no {SAMPLES}. Remove it or give another --out."
            )


def _join_reasons(kind: type[Experiment], failures: Sequence[Row]) -> str:
    """Return the distinct reasons of failed cases, separated by semicolons."""
    return "; ".join(dict.fromkeys(str(sample[kind.FAILED]) for sample in failures))


def _merge_provenance(
    experiment: Experiment, earlier: Row | None, started: str, is_new: bool
) -> Row:
    """Return the provenance of the last run that added samples.

    Its settings in `GROWS` are merged with those of earlier runs: the union of lists, and the
    largest number.

    Args:
        experiment: the experiment of this run.
        earlier: the provenance that earlier runs wrote; None without earlier runs.
        started: time at which this run started.
        is_new: True if this run added samples.
    """
    # turn tuples into lists, so that the settings are comparable with those in ``earlier``
    record = json.loads(json.dumps(experiment.provenance(started)))
    if earlier is None:
        return record
    if repetition_notes := dict.fromkeys(
        [*earlier.get("repeated", ()), *record.get("repeated", ())]
    ):
        record["repeated"] = list(repetition_notes)
    for name in experiment.GROWS:
        old_value, new_value = earlier["settings"].get(name), record["settings"].get(name)
        if isinstance(old_value, list):
            record["settings"][name] = list(dict.fromkeys([*old_value, *new_value]))
        elif isinstance(old_value, int):
            record["settings"][name] = max(old_value, new_value)
    return record if is_new or record["settings"] != earlier["settings"] else earlier


def _write_files(
    kind: type[Experiment],
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
    names = [name for name in kind.CASE if name not in REPETITION_FIELDS]
    if cells := report.grouped(failures, names):
        record["failed"] = [
            {
                **{name: cell[0][name] for name in names},
                "cases": len(cell),
                "why": _join_reasons(kind, cell),
            }
            for cell in cells
        ]
    rows = _compute_rows(kind, samples, record["settings"], out / SAMPLES)
    # turn tuples into lists, so that report and figure see the rows as results.json contains them
    rows = json.loads(to_json(rows, out / RESULTS))
    with convert_write_errors(out):
        report.write_results(out, rows, record)
        write_atomically(out / CSV, report.as_csv(rows))
        kind.draw(out / FIGURE, rows)
        write_atomically(out / REPORT, render_report(kind, rows, record))
    return rows


def _compute_rows(
    kind: type[Experiment], samples: Sequence[Row], settings: Row, path: Path
) -> list[Row]:
    """Return the rows of an experiment.

    Raises:
        LogError: a sample in the log ``path`` lacks a field that the rows need.
    """
    try:
        return kind.rows(samples, settings)
    except KeyError as error:
        (name,) = error.args
        if all(name in sample for sample in samples):
            raise
        raise LogError(
            f"{path} has a sample without {name!r}. Repair it or give another --out."
        ) from error


def summary(kind: type[Experiment] | ArchivedRun, rows: Sequence[Row]) -> list[str]:
    """Return the first table and, if there are any, the sentences about the rows as a paragraph."""
    paragraphs = [next(iter(kind.tables(rows).values())), " ".join(kind.readings(rows))]
    return list(filter(None, paragraphs))


def render_report(
    kind: type[Experiment] | ArchivedRun, rows: Sequence[Row], provenance: Row
) -> str:
    """Return the content of ``report.md`` for rows and provenance of ``results.json``."""
    if isinstance(kind, ArchivedRun):
        return kind.report
    other_tables = [*list(kind.tables(rows).items())[1:], *make_failed_table(provenance).items()]
    paragraphs = [
        f"# {kind.title}",
        *summary(kind, rows),
        *provenance.get("repeated", ()),
        f"![{kind.caption}]({FIGURE})",
        *(f"## {heading}\n\n{table}" for heading, table in other_tables),
        kind.notes(provenance["settings"]),
        *configs(provenance["settings"]),
        f"{describe_run(provenance)}:",
        command(kind, provenance["settings"]),
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


def configs(settings: Row) -> list[str]:
    """Return one sentence per config of a run.

    A sentence lists the fields that differ from the default, or all fields of a config that
    `CabConfig` no longer accepts.
    """
    config_by_method = settings.get("cab_configs") or {"cab": settings.get("cab_config")}
    sentences = []
    for name, config in config_by_method.items():
        if config and has_current_fields(config):
            changed_fields = json.dumps(find_changed_fields(config))
            default_name = f"the default of cab_hf {__version__}"
            if is_earlier(config):
                default_name = "the earlier default (8 typical queries on every key)"
            sentences.append(
                f"Config of {name}: `{changed_fields}`, other fields as in {default_name}"
            )
        elif config:
            sentences.append(f"Config of {name}: `{json.dumps(config)}`")
    return sentences


def has_current_fields(config: Row) -> bool:
    """Return True if `CabConfig` has all fields of a recorded config.

    A field may have its current name, or its name in the version `is_earlier`.
    """
    accepted_names = {field.name for field in fields(CabConfig)} | get_default_fields(config).keys()
    return drop_unset_share(config).keys() <= accepted_names


def is_earlier(config: Row) -> bool:
    """Return True for a recorded config of versions that scored typical queries on every key."""
    return OLD_OUTLIER_FIELD in config


def get_default_fields(config: Row) -> dict[str, Any]:
    """Return the fields of the default config of the version that recorded ``config``."""
    default = CabConfig().to_dict()
    if not is_earlier(config):
        return default
    later_fields = {"outlier_queries", "typical_key_stride"}
    return {
        name: value for name, value in default.items() if name not in later_fields
    } | EARLIER_DEFAULT_FIELDS


def drop_unset_share(config: Row) -> dict[str, Any]:
    """Return a recorded config without ``top_p=None``, a renamed field that was not set."""
    return {name: value for name, value in config.items() if (name, value) != ("top_p", None)}


def find_changed_fields(config: Row) -> dict[str, Any]:
    """Return the fields of a recorded config that differ from the default of the same version."""
    default = get_default_fields(config)
    return {name: value for name, value in config.items() if value != default.get(name)}


def command(kind: type[Experiment] | ArchivedRun, settings: Row) -> str:
    """Return a Markdown code block of the commands that repeat a run with ``settings``."""
    if isinstance(kind, ArchivedRun):
        return kind.command
    return "\n".join(["```", *kind.commands(settings), "```"])
