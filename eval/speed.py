"""How long an op takes, beside the best dense attention in the same run: ``speed OP``.

Rows are measured one by one and written to ``results.json`` as they come; ``results.csv``,
``report.md`` and ``speed.png`` are derived from that file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from cab_hf.config import CabConfig
from cab_hf.eval import (
    dense,
    report,
    speed_attention,
    speed_breakdown,
    speed_predictor,
    speed_prefill,
    speed_ttft,
)
from cab_hf.eval.settings import add_options, read_options
from cab_hf.eval.speed_settings import SpeedSettings
from cab_hf.eval.timing import bench_on, in_a_sentence

# second word -> what it measures, a module with
#   PURPOSE, TITLE, CAPTION  one line each: of the command, its report and its figure
#   Settings                 a `SpeedSettings`, with shape(settings): what was computed on
#   measure(settings, key, bench)  the row of one of ``settings.asked()``
#   derive(rows)             the rows in order, with what only several of them together tell; every
#                            one has "ms" and "error"
#   overview(rows)           the table to look at first
#   sections(rows)           paragraphs with the other tables
#   readings(rows)           what the rows say, a sentence each
#   notes(settings)          what the words mean
#   draw(path, rows)         the figure
OPS: dict[str, ModuleType] = {
    "predictor": speed_predictor,
    "attention": speed_attention,
    "ttft": speed_ttft,
    "breakdown": speed_breakdown,
    "prefill": speed_prefill,
}


# --- settings


def read_yaml(path: Path | str, kind: type) -> dict[str, Any]:
    """The settings in a YAML file, a mapping from option to value, by field of ``kind``.

    Values are what would be typed on the command line; lists may be lists, and ``config`` a
    mapping. ValueError for a file that is none, an option there is not, a value that is refused.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"settings must be a YAML file; {path}: {in_a_sentence(error)}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"settings must be a mapping from option to value; {path} holds none.")
    known = {field.name: field for field in fields(kind)}
    read = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(f"{path} sets {key!r}; the options are {', '.join(known)}.")
        metadata = known[name].metadata
        if isinstance(value, dict):
            value = [f"{field}={setting!r}" for field, setting in value.items()]
        items = value if isinstance(value, list) else [value]
        try:
            if metadata["repeatable"]:
                read[name] = [metadata["parse"](str(item)) for item in items]
            elif value is not None:
                read[name] = metadata["parse"](",".join(map(str, items)))
        except ValueError as error:
            raise ValueError(f"{path}, {key}: {error}") from error
    return read


def with_commas(words: Sequence[str]) -> list[str]:
    """``--lengths 1024 2048`` as ``--lengths 1024,2048``, which is what options understand."""
    lists = {
        f"--{name.replace('_', '-')}" for op in OPS.values() for name in op.Settings.KEYS.values()
    }
    joined: list[str] = []
    last_option, values = "", 0
    for word in words:
        if word.startswith("-"):
            last_option, values = word, 0
        elif last_option in lists:
            values += 1
        if values > 1:
            joined[-1] += f",{word}"
        else:
            joined.append(word)
    return joined


# --- the file


class Results:
    """The rows of one run in ``results.json``, on disk as soon as they are there.

    Raises:
        ValueError: the file holds rows of other settings, of another GPU or of other code.
    """

    def __init__(self, settings: SpeedSettings, op: str) -> None:
        self.path = Path(settings.out) / "results.json"
        self.settings = settings
        self.op = op
        self.started = report.utc_now()
        self.rows: list[dict[str, Any]] = []
        if self.path.exists():
            self._resume(json.loads(self.path.read_text()))

    def _resume(self, content: Mapping[str, Any]) -> None:
        found, now = (self._comparable(made) for made in (content["provenance"], self.provenance()))
        differs = [name for name in now if found.get(name) != now[name]]
        if differs:
            name = differs[0]
            raise ValueError(
                f"{self.path} was made with {name} {found.get(name)!r}, this run has "
                f"{now[name]!r}; give another --out, or what the first run had to go on with it."
            )
        self.rows = content["rows"]
        self.started = content["provenance"]["started"]

    def _comparable(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """What must be the same for two rows to stand in one table, each by its name."""
        many = self.settings.KEYS.values()
        settings = {name: value for name, value in made["settings"].items() if name not in many}
        made_by = {name: made.get(name) for name in ("device", "versions", "baselines", "commit")}
        return settings | made_by

    def provenance(self) -> dict[str, Any]:
        """`report.provenance` of this run, and the versions of the dense baselines."""
        settings = self.settings
        told = {"op": self.op, **settings.identity()}
        for name, values in settings.KEYS.items():
            told[values] = sorted({*getattr(settings, values), *(row[name] for row in self.rows)})
        made = report.provenance(told, settings.device, settings.seed, self.started)
        behind = {name: one.version() for name, one in dense.on(settings.device).items()}
        made["baselines"] = {name: version for name, version in behind.items() if version}
        # as it will be read
        return json.loads(json.dumps(made))

    def todo(self) -> list[dict[str, Any]]:
        """The keys that have no row yet, what was asked for before what follows from its rows."""
        asked = [key for key in self.settings.asked() if self.row(key) is None]
        return asked or [key for key in self.settings.follow_up(self.rows) if self.row(key) is None]

    def row(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The row of that key; None where it is not measured."""
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def add(self, row: Mapping[str, Any]) -> None:
        """Write the file with one more row."""
        self.rows = OPS[self.op].derive([*self.rows, row])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        report.write_results(self.path.parent, self.rows, self.provenance())


# --- the report, from results.json alone


def render(content: Mapping[str, Any]) -> str:
    """``report.md`` from what ``results.json`` holds."""
    rows, made = content["rows"], content["provenance"]
    settings = made["settings"]
    op = OPS[settings["op"]]
    chosen = CabConfig.from_dict(settings["cab_config"])
    default = CabConfig().to_dict()
    changed = {k: v for k, v in chosen.to_dict().items() if v != default[k]}
    packages = (f"{name} {version}" for name, version in made["versions"].items())
    # baselines of one package name it once
    versions = dict.fromkeys([*packages, *made["baselines"].values()])
    parts = [
        f"# {op.TITLE}",
        op.overview(rows),
        "\n".join(f"* {sentence}" for sentence in op.readings(rows)),
        f"![{op.CAPTION}](speed.png)",
        *op.sections(rows),
        f"Method: {settings['method']}. {op.notes(settings)}",
        f"{op.Settings.shape(settings)}, "
        f"{f'CabConfig with {changed}' if changed else 'default CabConfig'}, seed "
        f"{settings['seed']}, on {made['device']}; "
        f"{', '.join(versions)}; commit "
        f"{made['commit'] or 'unknown'}; finished {made['finished']}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_report(out: Path | str) -> str:
    """Derive results.csv, speed.png and report.md from results.json in ``out``; the report."""
    out = Path(out)
    content = json.loads((out / "results.json").read_text())
    op = OPS[content["provenance"]["settings"]["op"]]
    report.write_atomically(out / "results.csv", report.as_csv(content["rows"]))
    op.draw(out / "speed.png", content["rows"])
    text = render(content)
    report.write_atomically(out / "report.md", text)
    return text


# --- the command


def run(op: str, settings: SpeedSettings, results: Results | None = None) -> list[dict[str, Any]]:
    """Measure the rows that are not there yet, write all files, print the report; the rows."""
    results = Results(settings, op) if results is None else results
    bench = None
    while todo := results.todo():
        bench = bench or bench_on(settings.device, getattr(settings, "seconds", None))
        for key in todo:
            results.add(OPS[op].measure(settings, key, bench))
            row = results.row(key)
            told = row["error"] or f"{report.digits(row['ms'])} ms"
            named = ", ".join(f"{name} {value}" for name, value in key.items())
            print(f"{op}, {named}: {told}", file=sys.stderr, flush=True)
    print(write_report(settings.out), end="")
    return results.rows


def main(arguments: Sequence[str]) -> int:
    """Run the op named in ``arguments``, what stands behind ``speed``; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cab_hf.eval speed", description=__doc__)
    ops = parser.add_subparsers(dest="op", required=True)
    for name, op in OPS.items():
        command = ops.add_parser(name, help=op.PURPOSE, description=op.PURPOSE)
        add_options(command, op.Settings)
        command.add_argument(
            "--settings", metavar="FILE", help="YAML file of these options; those typed here win"
        )
    parsed = parser.parse_args(with_commas(arguments))
    kind = OPS[parsed.op].Settings
    try:
        if parsed.settings is not None:
            fill_in(parsed, read_yaml(parsed.settings, kind), kind)
        settings = read_options(parsed, kind)
        results = Results(settings, parsed.op)
    except ValueError as error:
        parser.exit(2, f"{parser.prog} {parsed.op}: {error}\n")
    run(parsed.op, settings, results)
    return 0


def fill_in(parsed: argparse.Namespace, read: Mapping[str, Any], kind: type) -> None:
    """Add what a file says to what was typed; repeatable options are taken from both."""
    repeatable = {field.name for field in fields(kind) if field.metadata["repeatable"]}
    for name, value in read.items():
        if name in repeatable:
            # of two assignments to a field the later one holds
            setattr(parsed, name, [*value, *getattr(parsed, name, ())])
        elif not hasattr(parsed, name):
            setattr(parsed, name, value)
