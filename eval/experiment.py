"""What an experiment is, and the one way in which all of them are run, resumed and reported.

settings -> cases -> a sample for each -> rows -> tables, a figure and a few words. Samples are
measured once and logged as they come; everything after them is derived and can be made anew from
the files of a run alone.
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
from cab_hf.config import CabConfig
from cab_hf.eval import report
from cab_hf.runs.log import (
    Log,
    LogError,
    as_json,
    is_there,
    read_file,
    read_log,
    write_atomically,
    writing,
)
from cab_hf.runs.provenance import provenance
from cab_hf.runs.settings import UsageError, read_settings, spelled

PROG = "python -m cab_hf.eval"
SAMPLES, RESULTS, CSV = "samples.jsonl", "results.json", "results.csv"
REPORT, FIGURE = "report.md", "figure.png"
# fields by which the cases of one cell differ
REPEATED = ("depth", "index")
Row = Mapping[str, Any]


class Experiment(ABC):
    """Base of all experiments; models and benches are opened by `measure`, when first needed."""

    name: ClassVar[str]  # the words of its command
    purpose: ClassVar[str]  # one line of help
    title: ClassVar[str]  # of its report
    caption: ClassVar[str]  # of its figure
    # a dataclass of options (`cab_hf.runs.settings`), with ``out``, the folder
    Settings: ClassVar[type]
    # names of the fields that identify a case, and so a sample
    CASE: ClassVar[tuple[str, ...]]
    # fields that samples of earlier versions lack -> what they would have had
    ADDED: ClassVar[Mapping[str, Any]] = {}
    # settings that say how much is measured and not what; a later run may have others
    GROWS: ClassVar[tuple[str, ...]] = ()
    # the field of a sample that says why its case is to be tried again; None: no case is
    FAILED: ClassVar[str | None] = None

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def recorded(self) -> dict[str, Any]:
        """The settings as results show them: JSON-able, and no paths, for results are committed."""
        return {name: value for name, value in asdict(self.settings).items() if name != "out"}

    def identity(self) -> dict[str, Any]:
        """What two samples must share to be in one log: all settings but those in `GROWS`."""
        recorded = self.recorded()
        fixed = {name: recorded[name] for name in recorded if name not in self.GROWS}
        return {"experiment": self.name, **fixed}

    def log(self, path: Path) -> Log:
        """The log at ``path`` of samples of this run, opened to be written."""
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
        """What results say of the run that made them."""
        device = getattr(self.settings, "device", "cpu")
        return {"experiment": self.name, **provenance(self.recorded(), device, started)}

    @abstractmethod
    def cases(self, samples: Sequence[Row]) -> Iterable[dict[str, Any]]:
        """All cases in order; beyond `CASE` they may hold what follows from earlier samples.

        ``samples`` grows meanwhile: when a case is asked for, it holds one of every case before.
        """

    def check(self) -> None:  # noqa: B027  most have nothing to refuse
        """Refuse, before anything is written, what could not be measured.

        Raises:
            UsageError: naming the setting, the value seen and what is accepted.
        """

    def expected(self) -> int | None:
        """How many cases there will be, for the progress bar; None where it is not known."""
        return None

    @abstractmethod
    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """What is found in one case; with the fields of the case it is a sample."""

    def sample(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """What is logged of a case; with `FAILED` where a later run is to try it again."""
        return {**case, **self.measure(case)}

    def measure_missing(self, log: Log) -> bool:
        """Measure the cases that ``log`` lacks; whether it got any sample."""
        before = len(log.records)
        # cells differ too much to estimate the time left by the latest cases
        with tqdm(total=self.expected(), unit="case", smoothing=0) as bar:
            for case in self.cases(log.records):
                if case in log:
                    # an earlier run has spent its time
                    bar.initial += 1
                else:
                    bar.set_description(", ".join(f"{name} {case[name]}" for name in self.CASE))
                    log.append(self.sample(case))
                bar.update()
        return len(log.records) > before

    @staticmethod
    @abstractmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What results show, in order; ``settings`` are the recorded ones."""

    @staticmethod
    @abstractmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """Heading -> Markdown table, the first being the one to look at."""

    @staticmethod
    @abstractmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """What the rows say, in one or two sentences."""

    @staticmethod
    @abstractmethod
    def notes(settings: Mapping[str, Any]) -> str:
        """What the words of the report mean."""

    @staticmethod
    @abstractmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """The figure, as PNG."""

    @staticmethod
    def programs(settings: Row) -> list[str]:
        """How runs with the recorded ``settings`` were begun, before the words of the command."""
        return [PROG]

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        """Run what ``words`` of a command line ask for; the exit status."""
        run(cls(read_settings(cls.Settings, words, f"{PROG} {cls.name}", cls.purpose)))
        return 0


def run(experiment: Experiment) -> list[dict[str, Any]]:
    """Measure what is missing in the folder, write all files, print the first table; the rows.

    Raises:
        LogError: the folder holds what this run cannot go on with (`cab_hf.runs.log`), or cannot be
            written.
        UsageError: what is asked for cannot be measured.
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
                f"no case could be measured: {why}; give shorter lengths, or a device with more "
                "memory, on which the same command goes on."
            )
        made = _provenance(experiment, before, log.started, measured)
        rows = _write(kind, out, log.records, failures, made)
    if failures:
        print(
            f"\n{len(failures)} cases failed ({why}); the report names them, and the same command "
            "tries them again."
        )
    print("\n" + "\n\n".join([*summary(kind, rows), *made.get("repeated", ())]))
    print(f"\nfigure: {out / FIGURE}\nreport: {out / REPORT}")
    return rows


def named(name: str) -> type[Experiment]:
    """The experiment of that command, which is where its module is."""
    place = name.replace(" ", ".").replace("-", "_")
    return importlib.import_module(f"cab_hf.eval.{place}").EXPERIMENT


def render(folder: Path | str) -> list[dict[str, Any]]:
    """Derive rows, table, figure and report of ``folder`` anew from its samples; the rows."""
    folder = Path(folder)
    made = read_provenance(folder)
    if made is None:
        raise LogError(f"{folder} has no {RESULTS}; let the run that it is of end.")
    kind = named(made["experiment"])
    _, records = read_log(
        folder / SAMPLES,
        key=kind.CASE,
        added=kind.ADDED,
        failed=kind.FAILED,
        fields_of=kind.fields_of,
    )
    failures = [record for record in records if kind.FAILED and record.get(kind.FAILED)]
    # which come last
    return _write(kind, folder, records[: len(records) - len(failures)], failures, made)


def read_provenance(folder: Path) -> Row | None:
    """What results in ``folder`` say of the run that made them; None where there are none.

    Raises:
        LogError: there is something else under their name.
    """
    path = folder / RESULTS
    if not is_there(path):
        return None
    try:
        made = json.loads(read_file(path))["provenance"]
        if {"settings", "versions"} <= made.keys():
            return made
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    raise LogError(f"{path} has no results of a run; take it away, and it is written anew.")


def _refuse_files_of_others(out: Path) -> None:
    """Files under the names of results, where no samples are, are not ours to write over."""
    for name in () if is_there(out / SAMPLES) else (RESULTS, CSV, REPORT, FIGURE):
        if (out / name).exists():
            raise LogError(
                f"{out} has {name} and no {SAMPLES}, so that it is of no run; take it away or give "
                "another --out."
            )


def _whys(kind: type[Experiment], failures: Sequence[Row]) -> str:
    return "; ".join(dict.fromkeys(str(each[kind.FAILED]) for each in failures))


def _provenance(experiment: Experiment, before: Row | None, started: str, measured: bool) -> Row:
    """Of the last run that added something; its settings are those of all runs together."""
    # as it will be read
    made = json.loads(json.dumps(experiment.provenance(started)))
    if before is None:
        return made
    if said := dict.fromkeys([*before.get("repeated", ()), *made.get("repeated", ())]):
        made["repeated"] = list(said)
    for name in experiment.GROWS:
        old, new = before["settings"].get(name), made["settings"].get(name)
        if isinstance(old, list):
            made["settings"][name] = list(dict.fromkeys([*old, *new]))
        elif isinstance(old, int):
            made["settings"][name] = max(old, new)
    return made if measured or made["settings"] != before["settings"] else before


def _write(
    kind: type[Experiment], out: Path, samples: Sequence[Row], failures: Sequence[Row], made: Row
) -> list[dict[str, Any]]:
    """All files; provenance has the cells of ``failures``: their fields, why and how many cases."""
    made = {name: value for name, value in made.items() if name != "failed"}
    names = [name for name in kind.CASE if name not in REPEATED]
    if cells := report.grouped(failures, *names):
        made["failed"] = [
            {**{x: some[0][x] for x in names}, "cases": len(some), "why": _whys(kind, some)}
            for some in cells
        ]
    # as they will be read
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
            f"{path} has a sample without {name!r}; repair it or give another --out."
        ) from error


def summary(kind: type[Experiment], rows: Sequence[Row]) -> list[str]:
    """What to look at first: the first table, and the readings where there are some."""
    parts = [next(iter(kind.tables(rows).values())), " ".join(kind.readings(rows))]
    return list(filter(None, parts))


def report_text(kind: type[Experiment], rows: Sequence[Row], provenance: Row) -> str:
    """``report.md`` from what ``results.json`` holds."""
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


def unmeasured(provenance: Row) -> dict[str, str]:
    """Heading -> table of the cells with cases that are to be tried again; empty without any."""
    cells = provenance.get("failed")
    return {"Not measured yet": report.markdown_table(cells, list(cells[0]))} if cells else {}


def made_on(provenance: Row) -> str:
    """Device, versions, commit and time of a run, as a sentence without its full stop."""
    # what computed, with its version, and whatever it was compared with
    packages = [f"{name} {version}" for name, version in provenance["versions"].items()]
    packages += [*provenance.get("baselines", {}).values(), *provenance.get("environment", ())]
    return (
        f"Made on {provenance['device']} with {', '.join(dict.fromkeys(packages))}, commit "
        f"{provenance['commit'] or 'unknown'}; finished {provenance['finished']}"
    )


def configs(settings: Row) -> list[str]:
    """What the configs that were in force set unlike the default; of other versions, the whole."""
    known = settings.get("cab_configs") or {"cab": settings.get("cab_config")}
    made = []
    for name, config in known.items():
        if config and of_today(config):
            shown = json.dumps(unlike_default(config))
            made.append(
                f"Config of {name}: `{shown}`, the default of cab_hf {__version__} beside it"
            )
        elif config:
            made.append(f"Config of {name}: `{json.dumps(config)}`")
    return made


def of_today(config: Row) -> bool:
    """Return True if `CabConfig` has every field of a config that a run recorded."""
    return without_unset_share(config).keys() <= {field.name for field in fields(CabConfig)}


def without_unset_share(config: Row) -> dict[str, Any]:
    """Return a recorded config without ``top_p=None``, which runs before the rename recorded."""
    return {name: value for name, value in config.items() if (name, value) != ("top_p", None)}


def unlike_default(config: Row) -> dict[str, Any]:
    """The fields of a saved config that the default has otherwise."""
    default = CabConfig().to_dict()
    return {name: value for name, value in config.items() if value != default.get(name)}


def command(kind: type[Experiment], settings: Row) -> str:
    """The command lines, as code, that measure anew what was recorded with ``settings``."""
    words = f"{kind.name} {shlex.join(spelled(settings, kind.Settings))}".strip()
    return "\n".join(["```", *(f"{program} {words}" for program in kind.programs(settings)), "```"])
