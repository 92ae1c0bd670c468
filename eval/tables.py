"""The tables of README.md and docs, declared in ``tables.yaml``, from folders of results."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import yaml

from cab_hf.config import CabConfig
from cab_hf.data.tasks import TASKS
from cab_hf.eval import experiment
from cab_hf.eval.experiment import (
    RESULTS,
    Experiment,
    Row,
    is_earlier,
    kind_of,
    of_today,
    unlike_default,
    without_unset_share,
)
from cab_hf.eval.fidelity_report import attention_ms
from cab_hf.eval.intervals import wilson
from cab_hf.eval.report import digits, grouped, markdown_table, percent, seconds, with_interval
from cab_hf.eval.speed.dense import time_shown
from cab_hf.experiment.log import is_there, read_file, read_log
from cab_hf.experiment.markdown import code, plain
from cab_hf.finetune.curve import STEP
from cab_hf.ops.reference import THRESHOLD_KEYS

CAB, FAMILIES = "cab", "families"
# the remedy comes after these in an error message
REASON_ENDS = re.compile(r"; |\. ")
# steps of a training run that had the GPU to itself, next to its folder
TIMED, WARM_UP = Path("alone", "log.jsonl"), 3


@dataclass(frozen=True)
class Results:
    """The content of a folder of results."""

    name: str
    rows: Sequence[Row]
    provenance: Mapping[str, Any]
    kind: type[Experiment]
    folder: Path


def read_results(folder: Path) -> Results:
    """Read ``folder``; ValueError if it contains no results of an experiment."""
    path = folder / RESULTS
    if not is_there(path):
        raise ValueError(f"{folder} has no {RESULTS}. Measure it again or remove the folder.")
    made = experiment.read_provenance(folder)
    if "experiment" not in made:
        raise ValueError(f"{path} names no experiment in its provenance. Measure it again.")
    kind = kind_of(made, folder)
    rows = [{**kind.ADDED, **row} for row in json.loads(read_file(path))["rows"]]
    return Results(folder.name, rows, made, kind, folder)


def all_results(results: Path) -> list[Results]:
    """Read all folders in ``results``, by name; ValueError as in `read_results`."""
    return list(map(read_results, sorted(filter(Path.is_dir, results.iterdir()))))


def source(results: Sequence[Results]) -> str:
    """Return a sentence with the devices, torch versions and commits of runs.

    A second sentence names cab_hf 0.2 if one of the runs selected blocks by its settings.
    """
    made = [each.provenance for each in results]
    # after a comma the name has the compute capability whose code ran
    devices = _listed(each["device"].partition(", code of")[0] for each in made)
    versions = _listed(each["versions"]["torch"] for each in made)
    commits = _listed(_short(each["commit"] or "unknown") for each in made)
    line = f"Measured on {devices} with torch {versions} at commit {commits}."
    old = [_chose_otherwise(each["settings"]) for each in made]
    if any(old):
        line += f" {'All' if all(old) else 'Some'} runs select blocks as cab_hf 0.2 did."
    return line


def _listed(names: Iterable[str]) -> str:
    """Join distinct names in their order: "a, b and c"."""
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} and {last}" if first else last


def _chose_otherwise(settings: Row) -> bool:
    """Return True if blocks were selected by settings that no longer exist."""
    configs = [settings.get("cab_config"), *settings.get("cab_configs", {}).values()]
    return any(config and not of_today(config) for config in configs)


def _short(commit: str) -> str:
    """Return seven digits of a commit, and "-dirty" if files differed from it."""
    number, *changed = commit.split("-", 1)
    return "-".join([number[:7], *changed])


# --- a table as it is declared


def value_at(path: str, row: Any) -> Any:
    """Return the value of a row at ``path``, ``name.of.an.inner.field``, or None."""
    for name in filter(None, path.split(".")):
        row = (row or {}).get(name)
    return row


def _cell(column: str | Sequence[str], row: Row) -> Any:
    """Return the content of a cell; ``tables.yaml`` describes columns."""
    if not isinstance(column, str):
        value, other = (_cell(each, row) for each in column)
        return value if value is None or other is None else f"{value} ({other})"
    path, _, how = column.partition("|")
    value = value_at(path, row)
    return value if value is None or not how else FORMATS.get(how, f"{{:{how}}}".format)(value)


def _task(result: Row) -> str:
    """Return the share of right answers, bold if it is significantly below dense attention."""
    return _bold(f"{result['share']:.2f}", result.get("delta_high", 0.0) < 0)


def _kl(probe: Row) -> str:
    return with_interval(probe["kl"], probe["kl_low"], probe["kl_high"], digits)


def _bold(text: str, sure: bool) -> str:
    return f"**{text}**" if sure else text


FORMATS: dict[str, Callable[[Any], str | None]] = {
    **{"digits": digits, "s": seconds, "percent": percent, "task": _task},
    **{"plain": plain, "code": code, "kl": _kl},
    **{"times": "× {:.2f}".format, "points": lambda share: f"{100 * share:+.1f} points"},
    **{"best_dense": time_shown, "attention": lambda row: digits(attention_ms(row))},
    "shared": {"speed lora": "training step", "speed ttft": "first token"}.__getitem__,
}


class Table:
    """One table; a call with the folder of all results returns Markdown with a source line.

    Args:
        declared: its declaration in ``tables.yaml``.
    """

    def __init__(self, declared: Mapping[str, Any]) -> None:
        self.declared, self.folders = declared, declared["folders"]

    def read(self, results: Path) -> list[Results]:
        """Read the folders of the table; ValueError for a missing folder."""
        return [read_results(results / name) for name in self.folders]

    def rows(self, read: Sequence[Results]) -> list[Row]:
        """Return the rows to show; each contains ``folder``, its ``name``, and its ``run``."""
        rows = [
            {**row, "folder": each.folder, "name": each.name, "run": each.provenance}
            for each in read
            for row in each.rows
        ]
        has, where = self.declared.get("has"), self.declared.get("where", {})
        kept = [row for row in rows if (not has or row[has]) and where.items() <= row.items()]
        for field, (path, names) in self.declared.get("named", {}).items():
            if missing := names.keys() - {value_at(path, row) for row in kept}:
                raise ValueError(
                    f"table must have rows with {path} {', '.join(missing)}, got none. Measure "
                    "them, or change tables.yaml."
                )
            kept = [
                {**row, field: name}
                for value, name in names.items()
                for row in kept
                if value_at(path, row) == value
            ]
        made = ROWS[self.declared.get("rows")](kept)
        only = self.declared.get("only", {})
        return [row for row in made if all(row[name] in some for name, some in only.items())]

    def __call__(self, results: Path) -> str:
        """Return the table in Markdown, followed by the source of its results."""
        read = self.read(results)
        rows, columns = self.rows(read), {}
        ways = dict.fromkeys(name for row in rows for name in row.get("ways", ()))
        for heading, column in self.declared["columns"].items():
            for way in ways if "*" in heading else [""]:
                of_way = column.replace("*", way) if "*" in column else column
                columns[heading.replace("*", way)] = partial(_cell, of_way)
        shown = markdown_table(rows, columns)
        return f"{shown}\n\n{source(read)} Source: [eval/results](eval/results/README.md)."


class Sentence:
    """Text with numbers from results.

    Args:
        declared: ``sentence``, a format string, and ``values``: for each name in the string the
            ``folders``, ``rows`` and ``only`` of a `Table`, and ``show``, the column.
    """

    def __init__(self, declared: Mapping[str, Any]) -> None:
        self.text, self.values = declared["sentence"], declared["values"]

    def __call__(self, results: Path) -> str:
        """Return the sentence with the numbers that are in ``results``."""
        return self.text.format_map({name: _number(x, results) for name, x in self.values.items()})


def _number(declared: Mapping[str, Any], results: Path) -> Any:
    """Return the number of a `Sentence`; ValueError unless one row has it."""
    table = Table(declared)
    rows = table.rows(table.read(results))
    if len(rows) != 1:
        raise ValueError(f"a sentence must have one row for a number, got {len(rows)}.")
    return _cell(declared["show"], rows[0])


# --- rows of tables that show more than rows as they are


def pivoted(rows: Sequence[Row], way: str, *by: str) -> list[dict[str, Any]]:
    """Return one row per value of the fields ``by``, with the results of each ``way`` by name.

    Several rows of a way are averaged. ``ways`` lists the names, cab last, and ``rows`` contains
    the original rows.
    """
    made = []
    for some in grouped(rows, *by):
        ways = {alike[0][way]: _mean(alike) for alike in grouped(some, way)}
        row = {name: some[0][name] for name in by} | {"rows": some}
        made.append({**row, "ways": sorted(ways, key=CAB.__eq__), **ways})
    return made


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of mappings by field: of different floats the mean, else the first value."""
    values = [value for value in values if value is not None]
    first = values[0] if values else None
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _mean([value.get(name) for value in values]) for name in names}
    alike = all(value == first for value in values)
    return fmean(values) if isinstance(first, float) and not alike else first


def _over_texts(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield a row per length and method: means over texts, and the fields unlike the default.

    ``gain`` is the time of dense attention divided by that of the method. ``threshold`` is the mass
    threshold of the last row, ``mass_threshold * min(1, 32768 / length)``.
    """

    def config_of(row: Row) -> Row:
        return row["run"]["settings"]["cab_configs"].get(row["method"], {})

    # a method of the same name may have been measured with an earlier default as well
    rows = [{**row, "is_earlier": is_earlier(config_of(row))} for row in rows]
    groups = grouped(rows, "length", "method", "is_earlier")
    for some in sorted(groups, key=lambda some: some[0]["length"]):
        first = some[0]
        config = config_of(first)
        # every comparison sets min_length to 0, and the tables of a cascade are in a file
        other = [
            f"{name}={value}"
            for name, value in sorted(unlike_default(config).items())
            if name not in ("head_map", "origin") and (name, value) != ("min_length", 0)
        ]
        if first["is_earlier"]:
            other = ["earlier default", *other]
        setting = ", ".join(other) or ("default" if config else first["method"])
        mean, threshold = _mean(some), config.get("mass_threshold")
        if threshold is not None:
            threshold *= min(1, THRESHOLD_KEYS / first["length"])
        gain = 1 / mean["over_dense"] if mean.get("over_dense") else None
        yield {**mean, "setting": setting, "threshold": threshold, "gain": gain}


def _steps(rows: Sequence[Row]) -> list[Row]:
    """Return one row per length and number of layers; the last folder counts."""
    rows = [{**row, "layers": row["run"]["settings"]["layers"]} for row in rows]
    last = {(row["length"], row["layers"]): row["folder"] for row in rows}
    rows = [row for row in rows if last[row["length"], row["layers"]] == row["folder"]]
    made = pivoted(rows, "implementation", "length", "layers")
    return sorted(made, key=lambda row: (row["length"], -row["layers"]))


def _longest(rows: Sequence[Row]) -> list[Row]:
    """Return one row per folder: the longest prompt that fits by attention, and its GiB."""
    kept = []
    for some in grouped([row for row in rows if row["fits"]], "folder", "implementation"):
        row = max(some, key=itemgetter("length"))
        settings, environment = row["run"]["settings"], row["run"].get("environment", ())
        chunk, segments = settings.get("chunk"), "expandable_segments:True" in "".join(environment)
        read = f"in chunks of {chunk:,}" if chunk else "whole"
        how = {"gib": settings["gpu_gib"], "read": read, "segments": "yes" if segments else "no"}
        kept.append({**row, **how})
    return pivoted(kept, "implementation", "gib", "read", "segments")


def _most_ranks(rows: Sequence[Row]) -> Iterator[Row]:
    """Return rows of the most ranks of each folder: one per length and direction, by scheme."""
    for some in grouped(rows, "folder"):
        world = max(row["world"] for row in some)
        most = [row for row in some if row["world"] == world]
        for row in pivoted(most, "scheme", "shape", "length", "world", "direction"):
            sparse, whole = (value_at(f"{name}.ms", row) for name in ("grouped+cab", "grouped"))
            yield {**row, "over_whole": f"{whole / sparse:.2f} ×" if sparse and whole else None}


def _decode_steps(rows: Sequence[Row]) -> list[Row]:
    """Return one row per length and batch: the smallest budget of each part, and a dense one."""
    ways = []
    for row in sorted(rows, key=itemgetter("length", "batch", "budget")):
        # with a budget of all tokens cab decodes densely
        ways.append({**row, "way": row["part"] + " dense" * (row["budget"] >= row["length"])})
    least = [alike[0] for alike in grouped(ways, "length", "batch", "way")]
    return pivoted(least, "way", "length", "batch")


def _asked(rows: Sequence[Row]) -> Iterator[Row]:
    """Add the mean over tasks that all methods of a folder have."""
    for some in grouped(rows, "folder"):
        shared = [name for name in TASKS if all(name in row for row in some)]
        for row in some:
            yield {**row, "mean": fmean(row[name]["share"] for name in shared) if shared else None}


def _trainings(rows: Sequence[Row]) -> Iterator[Row]:
    """Return one row per training and way to read, over all runs.

    Shares are over the keys of all runs together, bold if an interval is below that of dense
    training and reading. Perplexities are geometric means relative to those of the same.
    """
    best = _over_runs([row for row in rows if row["trained"] == row["method"] == "dense"])
    for some in grouped(rows, "trained", "method"):
        row, first = _over_runs(some), some[0]
        for probe in ("recall", "recall_border"):
            if probe in row:
                row[probe] = _bold(with_interval(*row[probe]), row[probe][2] < best[probe][1])
        for probe in ("perplexity", "perplexity_border"):
            ratio = row.get(probe, 0) / best[probe]
            # far off, it means nothing
            row[probe] = ratio if 0 < ratio < 100 else None
        place = {"trained": first["trained"], "runs": len(some), "read": first["method"]}
        yield {**row, **place, "step_s": _seconds_of_a_step(first["folder"] / TIMED)}


def _over_runs(rows: Sequence[Row]) -> dict[str, Any]:
    """Return, by probe, a share and its interval or a mean perplexity, if all runs have it."""
    kept: dict[str, Any] = {"density": fmean(row["density"] for row in rows)}
    for probe in ("recall", "recall_border"):
        if all(row.get(probe) for row in rows):
            right, n = (sum(row[probe][what] for row in rows) for what in ("correct", "n"))
            kept[probe] = (right / n, *wilson(right, n))
    for probe in ("perplexity", "perplexity_border"):
        if all(row.get(probe) for row in rows):
            kept[probe] = geometric_mean(row[probe]["value"] for row in rows)
    return {**kept, "each": ", ".join(digits(row["perplexity"]["value"]) for row in rows)}


def _seconds_of_a_step(log: Path) -> float | None:
    """Return the median step time of a training without its first steps, or None."""
    if not is_there(log):
        return None
    _, records = read_log(log)
    steps = [each for each in records if each["kind"] == STEP]
    return median(each["seconds"] for each in steps if each["step"] > WARM_UP)


def _models(rows: Sequence[Row]) -> Iterator[Row]:
    """Return one row per model and length, means over texts; equal names may have other weights."""
    made = []
    for row in rows:
        settings = row["run"]["settings"]
        weights = settings.get("model_sha256", "")
        made.append({**row, "model": settings["model"], "weights": weights})
    made.sort(key=itemgetter("model", "length"))
    for row in pivoted(made, "method", "model", "weights", "length"):
        yield {**row, "texts": len({x["text"] for x in row["rows"] if x["method"] == CAB})}


def _supported(rows: Sequence[Row]) -> Iterator[Row]:
    """Return rows with ``sparse_in`` and ``exact_in``, kinds of layers, or ``reason``."""
    for row in rows:
        if row["verdict"] != "exact":
            yield {**row, "reason": REASON_ENDS.split(row["said"])[0]}
        elif row["sparse"] < row["layers"]:
            yield {**row, "sparse_in": "layers without a window", "exact_in": "sliding windows"}
        else:
            # what comes without windows was computed with some too, where its config has them
            windows = "sliding windows, if any" if row.get("windowed") == "exact" else None
            yield {**row, "sparse_in": "all layers", "exact_in": windows}


def _supported_by_layers(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield a row per kind of sparse layers, with the names of the model families."""
    rows = [{"sparse_in": None, "exact_in": None, **row} for row in rows]
    for some in grouped(rows, "sparse_in", "exact_in"):
        names = "; ".join(row["family"] for row in some)
        yield {**some[0], "families": names, "sparse_in": some[0]["sparse_in"] or "raises an error"}


ROWS: dict[str | None, Callable[[list[Row]], Sequence[Row] | Iterator[Row]]] = {
    None: list,
    "by_ranks": partial(sorted, key=itemgetter("length", "world")),
    "by_method": lambda rows: pivoted(rows, "method", "text", "length"),
    "over_texts": _over_texts,
    **{"steps": _steps, "longest": _longest, "asked": _asked},
    "supported_by_layers": lambda rows: _supported_by_layers(list(_supported(rows))),
    **{"most_ranks": _most_ranks, "decode_steps": _decode_steps},
    **{"trainings": _trainings, "models": _models, "supported": _supported},
}


# --- all of them


def by_default(result: Results) -> bool:
    """Return True if `fidelity` ran there with the default of its time at any ``min_length``."""
    read_by = {row.get("method") for row in result.rows}
    if result.provenance["experiment"] != "fidelity" or CAB not in read_by:
        return False
    configs = result.provenance["settings"].get("cab_configs", {})
    config = without_unset_share(configs.get(CAB, {}))
    if not config or not of_today(config):
        return False
    return unlike_default({**config, "min_length": CabConfig.min_length}) == {}


class Models(Table):
    """The table of the default's quality for every model, without runs in tables of their own."""

    def read(self, results: Path) -> list[Results]:
        others = {x for name in ("trained", "front", "code_paths") for x in TABLES[name].folders}
        return [x for x in all_results(results) if x.name not in others and by_default(x)]


def families_sentence(results: Path) -> str:
    """Return sentences that count the model types that match dense attention, or raise errors."""
    rows = read_results(results / FAMILIES).rows
    counts = Counter(row["verdict"] for row in rows)
    return (
        f"We tested {len(rows)} causal model types of transformers with every block kept. "
        f"Of these, {counts['exact']} match dense attention,\n{counts['refused']} raise an error "
        f"that names the reason, and {counts['not built']} could not be built\n"
        f"([list](eval/results/{FAMILIES}/report.md))."
    )


_DECLARED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
TABLES: dict[str, Callable[[Path], str]] = {
    name: Sentence(of) if "sentence" in of else (Models if name == "models" else Table)(of)
    for name, of in _DECLARED.items()
}
TABLES["families"] = families_sentence
