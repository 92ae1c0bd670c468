"""The base class of experiments, and the runner that measures, resumes and reports them.

settings -> cases -> one sample per case -> rows -> tables, a figure and sentences. Each sample is
measured once and logged immediately. Everything after samples is derived, and can be derived again
from the files of a run.
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
from cab_hf.config import OLD_OUTLIERS, CabConfig
from cab_hf.eval import report
from cab_hf.eval.archive import ARCHIVED, Archived
from cab_hf.experiment.log import (
    Log,
    LogError,
    as_json,
    file_exists,
    read_file,
    read_log,
    write_atomically,
    writing,
)
from cab_hf.experiment.provenance import provenance
from cab_hf.experiment.settings import UsageError, read_settings, spelled

PROG = "python -m cab_hf.eval"
SAMPLES, RESULTS, CSV = "samples.jsonl", "results.json", "results.csv"
REPORT, FIGURE = "report.md", "figure.png"
# fields that differ among the cases of one cell
REPEATED = ("depth", "index")
Row = Mapping[str, Any]


class Experiment(ABC):
    """The base class of experiments; `measure` opens models and clocks on demand."""

    name: ClassVar[str]  # name of its command
    purpose: ClassVar[str]  # one line of help
    title: ClassVar[str]  # title of its report
    caption: ClassVar[str]  # caption of its figure
    # a dataclass of options (`cab_hf.experiment.settings`) including ``out``, the folder
    Settings: ClassVar[type]
    # names of the fields that identify a case and its sample
    CASE: ClassVar[tuple[str, ...]]
    # fields that samples of earlier versions lack -> their values
    ADDED: ClassVar[Mapping[str, Any]] = {}
    # settings for the amount of measurements; a later run may change them
    GROWS: ClassVar[tuple[str, ...]] = ()
    # field of a sample with the reason for which its case is tried again; None: never
    FAILED: ClassVar[str | None] = None

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def recorded(self) -> dict[str, Any]:
        """Return the settings as results show them: JSON-able and without paths."""
        return {name: value for name, value in asdict(self.settings).items() if name != "out"}

    def identity(self) -> dict[str, Any]:
        """Return the facts that samples in one log share: all settings except `GROWS`."""
        recorded = self.recorded()
        fixed = {name: recorded[name] for name in recorded if name not in self.GROWS}
        return {"experiment": self.name, **fixed}

    def log(self, path: Path) -> Log:
        """Open the log at ``path`` for samples of this run."""
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
        """Return the fields in addition to `CASE` that rows and later cases need of a sample."""
        return ()

    @classmethod
    def fields_of(cls, sample: Row) -> Sequence[str]:
        """Return the fields that a sample must have: `measured`, or none if its case failed."""
        has_failed = cls.FAILED is not None and sample.get(cls.FAILED) is not None
        return () if has_failed else cls.measured(sample)

    def provenance(self, started: str) -> dict[str, Any]:
        """Return the facts that results record about their run."""
        device = getattr(self.settings, "device", "cpu")
        return {"experiment": self.name, **provenance(self.recorded(), device, started)}

    @abstractmethod
    def cases(self, samples: Sequence[Row]) -> Iterable[dict[str, Any]]:
        """Yield all cases in order.

        In addition to the fields of `CASE`, cases may contain facts from earlier samples.
        ``samples`` grows meanwhile: at each case, it contains a sample of every case before it.
        """

    def check(self) -> None:  # noqa: B027  most experiments accept all settings
        """Raise an error, before anything is written, for settings that cannot be measured.

        Raises:
            UsageError: the message contains the setting, its value and the accepted values.
        """

    def expected(self) -> int | None:
        """Return the number of cases for the progress bar; None if it is unknown."""
        return None

    @abstractmethod
    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Measure one case; the result and the fields of the case form a sample."""

    def sample(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of a case; `FAILED` is set if a later run should try it again."""
        return {**case, **self.measure(case)}

    def measure_missing(self, log: Log) -> bool:
        """Measure the cases that ``log`` lacks; return True if there was any."""
        before = len(log.records)
        # cells differ too much for estimating the time left from the latest cases
        with tqdm(total=self.expected(), unit="case", smoothing=0) as bar:
            for case in self.cases(log.records):
                if case in log:
                    # an earlier run measured it
                    bar.initial += 1
                else:
                    bar.set_description(", ".join(f"{name} {case[name]}" for name in self.CASE))
                    log.append(self.sample(case))
                bar.update()
        return len(log.records) > before

    @staticmethod
    @abstractmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of the results, in order; ``settings`` are the recorded settings."""

    @staticmethod
    @abstractmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """Return Markdown tables by heading; the first is the most important."""

    @staticmethod
    @abstractmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Summarise the rows in one or two sentences."""

    @staticmethod
    @abstractmethod
    def notes(settings: Mapping[str, Any]) -> str:
        """Return an explanation of the terms in the report."""

    @staticmethod
    @abstractmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Draw the figure as PNG."""

    @classmethod
    def commands(cls, settings: Row) -> list[str]:
        """Return the command lines that repeat a run with the recorded ``settings``."""
        words = f"{cls.name} {shlex.join(spelled(settings, cls.Settings))}".strip()
        return [f"{program} {words}" for program in cls.programs(settings)]

    @staticmethod
    def programs(settings: Row) -> list[str]:
        """Return the programs that started runs with the recorded ``settings``."""
        return [PROG]

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        """Run the experiment with ``words`` of a command line; return the exit status."""
        run(cls(read_settings(cls.Settings, words, f"{PROG} {cls.name}", cls.purpose)))
        return 0


def run(experiment: Experiment) -> list[dict[str, Any]]:
    """Measure missing cases, write all files and print the first table; return the rows.

    Raises:
        LogError: the folder contains files that this run cannot continue
            (`cab_hf.experiment.log`), or it cannot be written.
        UsageError: the settings cannot be measured.
    """
    out = Path(experiment.settings.out)
    _refuse_files_of_others(out)
    experiment.check()
    kind = type(experiment)
    with experiment.log(out / SAMPLES) as log:
        before = read_provenance(out)
        measured = experiment.measure_missing(log)
        failures, why = log.failures, _whys(kind, log.failures)
        if failures and not log.records:
            raise UsageError(
                f"no case could be measured: {why}. Give shorter lengths, or use a device with "
                "more memory, on which the same command continues."
            )
        provenance_record = _provenance(experiment, before, log.started, measured)
        rows = _write(kind, out, log.records, failures, provenance_record)
    if failures:
        print(
            f"\n{len(failures)} cases failed ({why}). The report lists them, and the same command "
            "tries them again."
        )
    print("\n" + "\n\n".join([*summary(kind, rows), *provenance_record.get("repeated", ())]))
    print(f"\nfigure: {out / FIGURE}\nreport: {out / REPORT}")
    return rows


def named(name: str) -> type[Experiment]:
    """Import the experiment of that command from its module.

    Raises:
        ValueError: the experiment was removed.
    """
    if name in ARCHIVED:
        raise ValueError(
            f"experiment must exist, got {name!r}, which was removed. Check out the commit of the "
            f"run, or use {ARCHIVED[name]}."
        )
    place = name.replace(" ", ".").replace("-", "_")
    return importlib.import_module(f"cab_hf.eval.{place}").EXPERIMENT


def kind_of(made: Row, folder: Path) -> type[Experiment] | Archived:
    """Return the experiment that made the results in ``folder``; ``made`` is their provenance."""
    name = made["experiment"]
    return Archived.read(name, folder / REPORT) if name in ARCHIVED else named(name)


def render(folder: Path | str) -> list[dict[str, Any]]:
    """Derive rows, table, figure and report of ``folder`` from its samples; return the rows."""
    folder = Path(folder)
    provenance_record = read_provenance(folder)
    if provenance_record is None:
        raise LogError(f"{folder} has no {RESULTS}. Let its run finish.")
    kind = named(provenance_record["experiment"])
    _, records = read_log(
        folder / SAMPLES,
        key=kind.CASE,
        added=kind.ADDED,
        failed=kind.FAILED,
        fields_of=kind.fields_of,
    )
    failures = [record for record in records if kind.FAILED and record.get(kind.FAILED)]
    # failures come last
    return _write(
        kind, folder, records[: len(records) - len(failures)], failures, provenance_record
    )


def read_provenance(folder: Path) -> Row | None:
    """Return the provenance of results in ``folder``; None if there are none.

    Raises:
        LogError: the file contains something else.
    """
    path = folder / RESULTS
    if not file_exists(path):
        return None
    try:
        made = json.loads(read_file(path))["provenance"]
        if {"settings", "versions"} <= made.keys():
            return made
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    raise LogError(
        f"{path} must contain results of a run. Remove it, and the next run writes it again."
    )


def _refuse_files_of_others(out: Path) -> None:
    """Raise an error for result files without samples, which a run must not overwrite."""
    for name in () if file_exists(out / SAMPLES) else (RESULTS, CSV, REPORT, FIGURE):
        if (out / name).exists():
            raise LogError(
                f"out must be a new folder or the folder of a run, got {out}, which contains "
                f"{name} and no {SAMPLES}. Remove it or give another --out."
            )


def _whys(kind: type[Experiment], failures: Sequence[Row]) -> str:
    return "; ".join(dict.fromkeys(str(each[kind.FAILED]) for each in failures))


def _provenance(experiment: Experiment, before: Row | None, started: str, measured: bool) -> Row:
    """Return the provenance of the last run that added samples, with the settings of all runs."""
    # as JSON reads it
    record = json.loads(json.dumps(experiment.provenance(started)))
    if before is None:
        return record
    if said := dict.fromkeys([*before.get("repeated", ()), *record.get("repeated", ())]):
        record["repeated"] = list(said)
    for name in experiment.GROWS:
        old, new = before["settings"].get(name), record["settings"].get(name)
        if isinstance(old, list):
            record["settings"][name] = list(dict.fromkeys([*old, *new]))
        elif isinstance(old, int):
            record["settings"][name] = max(old, new)
    return record if measured or record["settings"] != before["settings"] else before


def _write(
    kind: type[Experiment], out: Path, samples: Sequence[Row], failures: Sequence[Row], made: Row
) -> list[dict[str, Any]]:
    """Write all files; the provenance lists failed cells with fields, reasons and counts."""
    made = {name: value for name, value in made.items() if name != "failed"}
    names = [name for name in kind.CASE if name not in REPEATED]
    if cells := report.grouped(failures, *names):
        made["failed"] = [
            {**{x: some[0][x] for x in names}, "cases": len(some), "why": _whys(kind, some)}
            for some in cells
        ]
    # as JSON reads them
    rows = json.loads(as_json(_rows(kind, samples, made["settings"], out / SAMPLES), out / RESULTS))
    with writing(out):
        report.write_results(out, rows, made)
        write_atomically(out / CSV, report.as_csv(rows))
        kind.draw(out / FIGURE, rows)
        write_atomically(out / REPORT, report_text(kind, rows, made))
    return rows


def _rows(kind: type[Experiment], samples: Sequence[Row], settings: Row, path: Path) -> list[Row]:
    """Return the rows of an experiment; LogError if a sample in ``path`` lacks a field for them."""
    try:
        return kind.rows(samples, settings)
    except KeyError as error:
        (name,) = error.args
        if all(name in sample for sample in samples):
            raise
        raise LogError(
            f"{path} has a sample without {name!r}. Repair it or give another --out."
        ) from error


def summary(kind: type[Experiment] | Archived, rows: Sequence[Row]) -> list[str]:
    """Return the first table, and the sentences about the rows if there are any."""
    parts = [next(iter(kind.tables(rows).values())), " ".join(kind.readings(rows))]
    return list(filter(None, parts))


def report_text(kind: type[Experiment] | Archived, rows: Sequence[Row], provenance: Row) -> str:
    """Return ``report.md`` for the content of ``results.json``."""
    if isinstance(kind, Archived):
        return kind.report
    others = [*list(kind.tables(rows).items())[1:], *unmeasured(provenance).items()]
    parts = [
        f"# {kind.title}",
        *summary(kind, rows),
        *provenance.get("repeated", ()),
        f"![{kind.caption}]({FIGURE})",
        *(f"## {heading}\n\n{table}" for heading, table in others),
        kind.notes(provenance["settings"]),
        *configs(provenance["settings"]),
        f"{made_on(provenance)}:",
        command(kind, provenance["settings"]),
    ]
    return "\n\n".join(parts) + "\n"


# fields of the default from before typical queries were scored on strided keys
EARLIER_DEFAULT = {
    OLD_OUTLIERS: 16,
    "typical_queries": 8,
    "mass_threshold": 0.0025,
    "share_threshold": 0.05,
}


def unmeasured(provenance: Row) -> dict[str, str]:
    """Return a table of the cells that a later run should measure, by heading; {} without any."""
    cells = provenance.get("failed")
    return {"Not measured yet": report.markdown_table(cells, list(cells[0]))} if cells else {}


def made_on(provenance: Row) -> str:
    """Return device, versions, commit and time of a run, as a sentence without a full stop."""
    # packages that computed, with versions, and packages of baselines
    packages = [f"{name} {version}" for name, version in provenance["versions"].items()]
    packages += [*provenance.get("baselines", {}).values(), *provenance.get("environment", ())]
    return (
        f"Made on {provenance['device']} with {', '.join(dict.fromkeys(packages))}, commit "
        f"{provenance['commit'] or 'unknown'}; finished {provenance['finished']}"
    )


def configs(settings: Row) -> list[str]:
    """Describe the configs of a run by fields that differ from the default; old configs in full."""
    known = settings.get("cab_configs") or {"cab": settings.get("cab_config")}
    parsed = []
    for name, config in known.items():
        if config and has_current_fields(config):
            shown = json.dumps(unlike_default(config))
            default = f"the default of cab_hf {__version__}"
            if is_earlier(config):
                default = "the earlier default (8 typical queries on every key)"
            parsed.append(f"Config of {name}: `{shown}`, other fields as in {default}")
        elif config:
            parsed.append(f"Config of {name}: `{json.dumps(config)}`")
    return parsed


def has_current_fields(config: Row) -> bool:
    """Return True if `CabConfig` has every field of a recorded config, renamed ones included."""
    known = {field.name for field in fields(CabConfig)} | default_of(config).keys()
    return without_unset_share(config).keys() <= known


def is_earlier(config: Row) -> bool:
    """Return True for a recorded config from before typical queries were scored on strided keys."""
    return OLD_OUTLIERS in config


def default_of(config: Row) -> dict[str, Any]:
    """Return the fields of the default at the time of a recorded config."""
    default = CabConfig().to_dict()
    if not is_earlier(config):
        return default
    later = {"outlier_queries", "typical_key_stride"}
    return {name: x for name, x in default.items() if name not in later} | EARLIER_DEFAULT


def without_unset_share(config: Row) -> dict[str, Any]:
    """Return a recorded config without ``top_p=None``, which runs before the rename recorded."""
    return {name: value for name, value in config.items() if (name, value) != ("top_p", None)}


def unlike_default(config: Row) -> dict[str, Any]:
    """Return the fields of a recorded config that differ from the default of its time."""
    default = default_of(config)
    return {name: value for name, value in config.items() if value != default.get(name)}


def command(kind: type[Experiment] | Archived, settings: Row) -> str:
    """Return the command lines, as code, that repeat a run with the recorded ``settings``."""
    if isinstance(kind, Archived):
        return kind.command
    return "\n".join(["```", *kind.commands(settings), "```"])
