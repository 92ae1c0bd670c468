"""How long an op takes, beside the best dense attention in the same run: ``speed OP``.

Rows are measured one by one and written to ``results.json`` as they come; ``results.csv``,
``report.md`` and ``speed.png`` are derived from that file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
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
from cab_hf.eval.speed_settings import SpeedSettings
from cab_hf.eval.timing import bench_on
from cab_hf.runs.log import write_atomically
from cab_hf.runs.provenance import provenance, utc_now
from cab_hf.runs.settings import read_settings

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
        self.started = utc_now()
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
        """`provenance` of this run, and the versions of the dense baselines."""
        settings = self.settings
        told = {"op": self.op, **settings.identity()}
        for name, values in settings.KEYS.items():
            told[values] = sorted({*getattr(settings, values), *(row[name] for row in self.rows)})
        made = provenance(told, settings.device, self.started)
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
    write_atomically(out / "results.csv", report.as_csv(content["rows"]))
    op.draw(out / "speed.png", content["rows"])
    text = render(content)
    write_atomically(out / "report.md", text)
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
    prog = "python -m cab_hf.eval speed"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    ops = parser.add_subparsers(dest="op", required=True)
    for name, op in OPS.items():
        ops.add_parser(name, help=op.PURPOSE, add_help=False)
    parsed, words = parser.parse_known_args(arguments)
    op = OPS[parsed.op]
    settings = read_settings(op.Settings, words, f"{prog} {parsed.op}", op.PURPOSE)
    try:
        results = Results(settings, parsed.op)
    except ValueError as error:
        parser.exit(2, f"{prog} {parsed.op}: {error}\n")
    run(parsed.op, settings, results)
    return 0
