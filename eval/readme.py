"""The pages that show results, written from the files of results alone.

``eval/results/README.md`` and the figure ``default.png`` beside it are written as they are; in
``README.md``, ``finetune/README.md`` and the pages of ``docs`` only what stands between
``<!-- table: NAME -->`` and ``<!-- end -->``, for every NAME of `TABLES`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from operator import itemgetter
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

from cab_hf.config import CabConfig, without_rivals
from cab_hf.eval import charts, experiment
from cab_hf.eval.experiment import CSV, FIGURE, REPORT, RESULTS, SAMPLES, Experiment, Row, named
from cab_hf.eval.fidelity import ALL_TASKS
from cab_hf.eval.intervals import wilson
from cab_hf.eval.report import digits, grouped, markdown_table, percent, with_interval
from cab_hf.eval.speed.dense import time_shown
from cab_hf.finetune.curve import STEP
from cab_hf.runs.log import PACKED, is_there, pack, read_file, read_log, write_atomically
from cab_hf.runs.markdown import plain
from cab_hf.runs.settings import comma_separated, option, read_settings
from cab_hf.texts.tasks import TASKS

ROOT = Path(__file__).parents[1]
# experiments whose folders come first, in this order; those of one by name
ORDER = (
    "passkey",
    *("fidelity", "calibrate"),
    *(f"speed {op}" for op in ("ttft", "attention", "predictor", "batches", "breakdown")),
    *(f"speed {op}" for op in ("prefill", "serve", "decode", "lora", "context-parallel")),
    "families",
    "families-context-parallel",
)
# how long the default takes, and what it keeps of texts
SPEED = "speed-ttft"
KEPT = ("fidelity-default-32k", "fidelity-smollm2-128k")
# a training step by length and layers; of one in several folders that of the last is shown
STEPS = tuple("speed-lora" + which for which in ("", "-131k", "-262k", "-524k", "-524k-4-layers"))
SPREAD = "speed-lora-spread"
TRAINED_TOKENS = 32768
# what a model was trained with -> a folder for each run of what it keeps, and how it is read there
TRAININGS = {
    "not at all": (("fidelity-smollm2-beyond",), ("dense",)),
    "dense": (("fidelity-trained-dense", "fidelity-trained-dense-seed-1"), ("dense", "cab")),
    "cab": (("fidelity-trained-cab",), ("dense", "cab")),
    "cab, sampling one block in 16": (("fidelity-trained-sampled-16",), ("dense", "cab")),
    "cab, sampling one block in 8": (
        ("fidelity-trained-sampled-8", "fidelity-trained-sampled-8-seed-1"),
        ("dense", "cab"),
    ),
}
# beside it, some steps of the same training with the GPU to themselves
TIMED, WARM_UP = Path("alone", "log.jsonl"), 3
# requests side by side, a question about a cached text, and a text that is read in chunks
SERVED, BEHIND = "speed-serve", f"{SPEED}-behind"
CHUNKED = tuple(f"speed-prefill-chunk-{tokens}" for tokens in (2048, 8192, 32768))
PARALLEL = "speed-context-parallel"
PARALLELS = tuple(PARALLEL + which for which in ("", "-1m", "-4", "-4-1m", "-4-70b", "-4-1m-70b"))
DEALT = "speed-lora-cp"
# what ranks share -> the folders of how long it takes them
SHARED = {"training step": (DEALT, f"{DEALT}-4"), "first token": (f"{SPEED}-1m", f"{SPEED}-1m-4")}
# cab, and what it spares the work of
SPARSE, WHOLE = "grouped+cab", "grouped"
CAB, FULL = "cab", "full"
FIDELITY = "fidelity"
CHOOSING = "speed-predictor"
# how long a decode step takes, and what it keeps
STEPS_OF_DECODE = ("speed-decode", "speed-decode-model", "speed-decode-model-8k")
DECODED, DECODED_METHOD = "fidelity-decode", "cab:keys"
# ways to read a long text -> their names in `COMPARED`, on one of its texts
COMPARED, COMPARED_TEXT = "fidelity-default-32k", "licences"
CHOICES = {
    "default": "cab",
    "mass_threshold=0.005": "cab:sparser",
    '"cab_dense"': "dense",
}
# tasks of long-context benchmarks, by the default and by others in its time
TASKED = ("fidelity-tasks", "fidelity-tasks-32k")
# one change of the default at a time, and batches beside dense ways
BATCHES = "speed-batches"
FAMILIES = "families"
EXACT, REFUSED, NOT_BUILT = "exact", "refused", "not built"
QUALITY = {
    "recall": "in-text recall",
    "recall_border": "block-start recall",
    "perplexity_border": "block-start perplexity (less is better)",
}
# columns of perplexity over that of dense training and reading
OVER_DENSE = {"× dense": "perplexity", "at block starts × dense": "perplexity_border"}
RECALLS = {"asked": "end-of-prompt", "recall": "in-text", "recall_border": "block-start"}
DEFAULT_FIGURE = "default.png"
KEPT_COLUMNS = (
    "density of texts",
    "KL (noise)",
    "in-text recall",
    "block-start recall",
    "block-start perplexity",
)
# bytes of rows from which they are packed, too
LARGE_RESULTS = 40_000
INTRODUCTION = f"""# Results

Each folder is one run of an experiment: `{SAMPLES}`, what was measured, a case a line, here packed
as `{PACKED}`; `{RESULTS}`, the rows derived from it and where they come from (a run writes them as
`{CSV}` too); `{FIGURE}`; and `{REPORT}`, all of this to be read. The command below a figure
measures it anew, on the device named beside it; this page is written, and samples (and rows, where
they are many) are packed, by `make readme`. Up to cab_hf 0.2, the default chose blocks by means and
bounds of keys and by outlier queries: what names that version was measured so."""


@dataclass(frozen=True)
class Results:
    """What a folder of results holds."""

    name: str
    rows: Sequence[Row]
    provenance: Mapping[str, Any]
    kind: type[Experiment]
    folder: Path

    def row(self, **wanted: Any) -> Row:
        """The only row of those values; ValueError where there is none."""
        results = [r for r in self.rows if wanted.items() <= r.items()]
        if len(results) != 1:
            text = ", ".join(f"{name} {value}" for name, value in wanted.items())
            raise ValueError(f"{self.name} must have one row of {text}; it has {len(results)}.")
        return results[0]


def read_results(folder: Path) -> Results:
    """What is in ``folder``; ValueError where it is no folder of results of an experiment."""
    path = folder / RESULTS
    if not is_there(path):
        raise ValueError(f"{folder} has no {RESULTS}; measure it again or take it away.")
    made = experiment.read_provenance(folder)
    if "experiment" not in made:
        raise ValueError(f"{path} names no experiment in its provenance; measure it again.")
    kind = named(made["experiment"])
    rows = [{**kind.ADDED, **row} for row in json.loads(read_file(path))["rows"]]
    return Results(folder.name, rows, made, kind, folder)


def results_page(results: Path) -> str:
    """The page of all folders in ``results``; ValueError as of `read_results`."""
    matches = all_results(results)
    return "\n\n".join([INTRODUCTION, *(section(each, matches) for each in matches)]) + "\n"


def all_results(results: Path) -> list[Results]:
    """Those in ``results``, as pages show them; ValueError as of `read_results`."""
    return in_order(map(read_results, filter(Path.is_dir, results.iterdir())))


def in_order(results: Iterable[Results]) -> list[Results]:
    """As pages show them: by `ORDER`, those of one experiment by name."""
    return sorted(results, key=lambda each: (*(each.kind.name != x for x in ORDER), each.name))


def section(result: Results, among: Sequence[Results]) -> str:
    """One folder: table, readings, figure and command; ``among`` are all on the page."""
    kind = result.kind
    parts = [
        f"## {heading(result, among)}",
        *experiment.summary(kind, result.rows),
        f"![{kind.caption}]({result.name}/{FIGURE})",
        f"{source([result])}; [{result.name}]({result.name}/{REPORT}) tells more.",
        experiment.command(kind, result.provenance["settings"]),
    ]
    return "\n\n".join(parts)


def heading(result: Results, among: Sequence[Results]) -> str:
    """The title of a section, unlike that of any other."""
    given, *others = (
        ": ".join(filter(None, (each.kind.title, varying(each, among))))
        for each in (result, *(each for each in among if each is not result))
    )
    return f"{given} ({result.name})" if given in others else given


def varying(result: Results, among: Iterable[Results]) -> str:
    """In which settings and versions ``result`` differs from others of its experiment."""
    same = [_identity(each) for each in among if each.kind is result.kind]
    parts = []
    for name in dict.fromkeys(name for each in same for name in each):
        if len({each.get(name) for each in same}) > 1:
            value, name = _identity(result).get(name), name.replace("_", " ")
            parts.append(f"no {name}" if value is None else f"{name} {value}")
    return ", ".join(parts)


def _identity(result: Results) -> dict[str, Any]:
    """What tells two runs of an experiment apart, as far as it is short enough for a heading."""
    made, kind = result.provenance, result.kind
    fixed = {field.name for field in fields(kind.Settings)} - set(kind.GROWS)
    record = {name: made["settings"][name] for name in made["settings"] if name in fixed}
    record |= made["versions"]
    return {name: each for name, each in record.items() if not isinstance(each, (dict, list))}


def source(results: Sequence[Results]) -> str:
    """Device, torch and commit of the runs, in one line, and what chose by an earlier default."""
    made = [each.provenance for each in results]
    told = {
        "": [each["device"] for each in made],
        "torch ": [each["versions"]["torch"] for each in made],
        "commit ": [_short(each["commit"] or "unknown") for each in made],
    }
    line = ", ".join(what + _listed(list(dict.fromkeys(each))) for what, each in told.items())
    old = [_chose_otherwise(each) for each in results]
    return line + (f"; {'' if all(old) else 'in part '}by the default of cab_hf 0.2" * any(old))


def _chose_otherwise(result: Results) -> bool:
    """Whether blocks were chosen by settings that have gone since."""
    settings = result.provenance["settings"]
    configs = [settings.get("cab_config"), *settings.get("cab_configs", {}).values()]
    known = {field.name for field in fields(CabConfig)}
    return any(config and without_rivals(config).keys() - known for config in configs)


def _listed(names: Sequence[str]) -> str:
    """As "a", "a and b" or "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _short(commit: str) -> str:
    """Seven digits of a commit, and whether files differed from it."""
    number, *changed = commit.split("-", 1)
    return "-".join([number[:7], *changed])


def default_table(results: Path) -> str:
    """By length: time to the first token, and what the same config keeps of texts."""
    speed, choosing, *kept = (read_results(results / name) for name in (SPEED, CHOOSING, *KEPT))
    predict_ms = {row["length"]: row["ms"] for row in choosing.rows}
    rows = []
    for cab in (row for row in speed.rows if row["implementation"] == CAB):
        length, ms = cab["length"], predict_ms.get(cab["length"])
        seconds = {"best dense s": digits(cab["baseline_ms"] / 1000)}
        seconds |= {"CAB s": digits(cab["ms"] / 1000), "×": f"{cab['over_best']:.2f}"}
        seconds["choosing, ms a layer"] = ms and digits(ms)
        place = {"tokens": f"{length:,}", **seconds, "density": cab["density"]}
        rows.append(place | _shown(_kept(kept, length)))
    return _table(rows, [speed, *kept])


def _kept(results: Sequence[Results], length: int) -> dict[str, float | None] | None:
    """What CAB keeps at one length, each the mean over texts; None where no text was read.

    Of recall and perplexity the ratio to dense attention. What no text was read for is None.
    """
    rows = [row for each in results for row in each.rows if row["length"] == length]
    cab, full = ([row for row in rows if row["method"] == name] for name in (CAB, FULL))
    if not cab:
        return None
    ratios = {probe: _mean_of(cab, probe, "ratio") for probe in QUALITY}
    kl, noise = (_mean([row["continuation"]["kl"] for row in some]) for some in (cab, full))
    return {"density": fmean(row["density"] for row in cab), "kl": kl, "noise": noise, **ratios}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _mean_of(rows: Sequence[Row], probe: str, what: str) -> float | None:
    """The mean over the ``rows`` that were asked; None where none was."""
    return _mean([row[probe][what] for row in rows if probe in row])


def _points(difference: float | None) -> str | None:
    return None if difference is None else f"{100 * difference:+.1f} points"


def _shown(kept: Mapping[str, float | None] | None) -> dict[str, str | float | None]:
    """The columns of `_kept`."""
    if kept is None:
        return dict.fromkeys(KEPT_COLUMNS)
    ratios = (_times(kept[probe]) for probe in QUALITY)
    kl = _with_noise(kept["kl"], kept["noise"])
    return dict(zip(KEPT_COLUMNS, (kept["density"], kl, *ratios), strict=True))


def _times(ratio: float | None) -> str | None:
    return None if ratio is None else f"× {ratio:.2f}"


def _with_noise(kl: float, noise: float | None) -> str:
    return digits(kl) if noise is None else f"{digits(kl)} ({digits(noise)})"


def draw_default(results: Path) -> None:
    """Draw `default_table`: seconds to the first token, and quality over dense, by length."""
    speed, *kept = (read_results(results / name) for name in (SPEED, *KEPT))
    rows = [row for row in speed.rows if row["implementation"] == CAB]
    lengths = [row["length"] for row in rows]
    read = {length: _kept(kept, length) for length in lengths}
    quality = [{"length": length, **found} for length, found in read.items() if found]
    with charts.figure(results / DEFAULT_FIGURE, 1, 2, figsize=(9, 3.6)) as ((left, right),):
        look = {"color": "black", "label": "fastest dense attention"}
        charts.line(left, rows, lambda row: row["baseline_ms"] / 1000, **look)
        look = {"color": "C3", "label": "CAB, default settings"}
        charts.line(left, rows, lambda row: row["ms"] / 1000, **look)
        for row in rows:
            place = (row["length"], row["ms"] / 1000)
            text = f"× {row['over_best']:.2f}"
            left.annotate(text, place, xytext=(4, -12), textcoords="offset points", fontsize=8)
        charts.over_tokens(left, lengths, "time to the first token, LLaMA-3-8B shape", "s")
        for colour, (probe, label) in enumerate(QUALITY.items()):
            look = {"color": f"C{colour}", "label": label}
            charts.line(right, quality, itemgetter(probe), **look)
        right.axhline(1, color="black", linestyle="--", label="dense attention")
        shown = [row["length"] for row in quality]
        charts.over_tokens(right, shown, "same settings, SmolLM2: over dense", "×", log=False)
        right.set_ylim(0.8, 1.2)


def choices_table(results: Path) -> str:
    """What each way to read a long text takes and keeps."""
    result = read_results(results / COMPARED)
    rows = []
    for name, method in CHOICES.items():
        row = result.row(method=method, text=COMPARED_TEXT)
        ms = row["predict_ms"] + row["attend_ms"]
        shares = {f"{label} recall": row[probe]["share"] for probe, label in RECALLS.items()}
        fields = {"settings": name, "attention ms": digits(ms), "density": row["density"]}
        rows.append(fields | {"KL": digits(row["continuation"]["kl"]), **shares})
    return _table(rows, [result])


def families_sentence(results: Path) -> str:
    """How many model types attend exactly, are refused, and could not be built, as a sentence."""
    rows = read_results(results / FAMILIES).rows
    counts = Counter(row["verdict"] for row in rows)
    return (
        f"Of {len(rows)} causal model types of transformers, {counts[EXACT]} give the outputs of "
        f"dense attention when every block is kept,\n{counts[REFUSED]} are refused with a sentence "
        f"that names the reason, and {counts[NOT_BUILT]} could not be built\n"
        f"([list](eval/results/{FAMILIES}/report.md))."
    )


def _bold(text: str, sure: bool) -> str:
    return f"**{text}**" if sure else text


def lora_table(results: Path) -> str:
    """A training step, dense and sparse; GiB are the peak of the sparse one."""
    read = [read_results(results / name) for name in STEPS if (results / name).is_dir()]
    by_size = {}
    for each in read:
        one = [row for row in each.rows if row["spread"] == "alone" and not row["sought"]]
        layers = each.provenance["settings"]["layers"]
        by_size |= {(alike[0]["length"], layers): alike for alike in grouped(one, "length")}
    ways = dict.fromkeys(row["implementation"] for each in read for row in each.rows)
    # dense ones first
    ways = [*(name for name in ways if name != CAB), CAB]
    rows = []
    for (length, layers), alike in sorted(
        by_size.items(), key=lambda item: (item[0][0], -item[0][1])
    ):
        ms = {row["implementation"]: row["ms"] / 1000 for row in alike}
        (cab,) = (row for row in alike if row["implementation"] == CAB)
        over = cab["over_best"] and f"{cab['over_best']:.2f}"
        rows.append(
            {
                **{"tokens": f"{length:,}", "layers": layers},
                **{f"{name} s": digits(ms.get(name)) for name in ways},
                **{"×": over, "at most": f"{cab['ceiling']:.2f}"},
                **{"density": cab["density"], "GiB": digits(cab["peak_gib"])},
            }
        )
    return _table(rows, read)


def spread_table(results: Path) -> str:
    """A training step over ranks, beside one rank alone."""
    result = read_results(results / SPREAD)
    rows = [
        {
            "tokens": f"{row['length']:,}",
            "GPUs": row["world"],
            "data parallel": row["spread"],
            "attention": row["implementation"],
            "s": digits(row["ms"] / 1000),
            "tokens/s a GPU": f"{row['tokens_s']:,.0f}",
            "efficiency": percent(row["efficiency"]),
        }
        for row in sorted(result.rows, key=itemgetter("length", "world"))
        if row["ms"]
    ]
    return _table(rows, [result])


def dealt_table(results: Path) -> str:
    """What ranks share one text for, dense and sparse."""
    rows, read = [], []
    for what, folders in SHARED.items():
        for folder in filter(Path.is_dir, (results / name for name in folders)):
            read.append(read_results(folder))
            cab = read[-1].row(implementation="cab")
            dense = cab["baseline_ms"]
            rows.append(
                {
                    "what": what,
                    "tokens": f"{cab['length']:,}",
                    "GPUs": cab["world"],
                    "dense s": dense and digits(dense / 1000),
                    "cab s": digits(cab["ms"] / 1000),
                    "×": cab["over_best"],
                    "density": cab["density"],
                    "GiB a GPU": digits(cab["peak_gib"]),
                }
            )
    return _table(rows, read)


def trained_table(results: Path) -> str:
    """What models keep that were trained and read densely or sparsely.

    The keys of all runs together; perplexity, of all tokens and of those that begin a query block,
    the geometric mean over runs, also over that of dense training and dense reading. Bold where
    an interval lies below that of the same. Of the training the seconds of a step, where they
    were measured with the GPU to itself.
    """
    made = {
        name: [read_results(results / each) for each in TRAININGS[name][0]] for name in TRAININGS
    }
    best = _over_runs(made["dense"], "dense")
    probes = {"in-text recall": "recall", "block-start recall": "recall_border"}
    rows = []
    for name, (_, methods) in TRAININGS.items():
        for method in methods:
            row = _over_runs(made[name], method)
            fields = {"trained": name, "runs": len(made[name]), "read": method}
            fields["density"] = row["density"]
            for heading, probe in probes.items():
                part = row.get(probe)
                fields[heading] = part and _beside(part, best[probe])
            fields["perplexity of each"] = ", ".join(map(digits, row["perplexities"]))
            for heading, probe in OVER_DENSE.items():
                value, least = row.get(probe), best[probe]
                shown = value and value < 100 * least
                fields[heading] = f"{value / least:.3f}" if shown else None
            seconds = _seconds_of_a_step(made[name][0].folder / TIMED)
            fields["s of a step"] = seconds and digits(seconds)
            rows.append(fields)
    return _table(rows, [each for runs in made.values() for each in runs])


def _over_runs(runs: Sequence[Results], method: str) -> dict[str, Any]:
    """What ``runs`` of one training keep when read by ``method``: see `trained_table`."""
    rows = [each.row(method=method, length=TRAINED_TOKENS) for each in runs]
    # older results have a cost, which is 1 where dense attention reads
    kept: dict[str, Any] = {"density": fmean(row.get("density", row.get("cost")) for row in rows)}
    for probe in ("recall", "recall_border"):
        if all(row.get(probe) for row in rows):
            right, n = (sum(row[probe][what] for row in rows) for what in ("correct", "n"))
            low, high = wilson(right, n)
            kept[probe] = {"share": right / n, "low": low, "high": high}
    for probe in OVER_DENSE.values():
        if all(row.get(probe) for row in rows):
            kept[probe] = geometric_mean(row[probe]["value"] for row in rows)
    kept["perplexities"] = [row["perplexity"]["value"] for row in rows]
    return kept


def _seconds_of_a_step(log: Path) -> float | None:
    """Of a training run, the median without its first steps; None where there is no ``log``."""
    if not is_there(log):
        return None
    _, records = read_log(log)
    steps = [each for each in records if each["kind"] == STEP]
    return median(each["seconds"] for each in steps if each["step"] > WARM_UP)


def _beside(result: Row, best: Row) -> str:
    """What was right, with its interval; bold where that lies below the one of ``best``."""
    given = with_interval(result["share"], result["low"], result["high"])
    return _bold(given, result["high"] < best["low"])


def models_table(results: Path) -> str:
    """What the default keeps of every model and length that `fidelity` has read by it.

    Columns are means over texts: recalls over those of dense attention, and the difference to it in
    the mean over tasks. What models keep that were trained for `trained_table` is there.
    """
    trained = {folder for folders, _ in TRAININGS.values() for folder in folders}
    read = [x for x in all_results(results) if x.name not in trained and _by_default(x)]
    rows = []
    for each in read:
        settings = each.provenance["settings"]
        # two of one name may have been trained apart
        model = {"model": settings["model"], "weights": settings.get("model_sha256", "")}
        rows += [{**row, **model} for row in each.rows]
    rows.sort(key=itemgetter("model", "length"))
    alike = grouped(rows, "model", "weights", "length")
    return _table([_model_row(some) for some in alike], read)


def _by_default(result: Results) -> bool:
    """Whether `fidelity` has read there by today's default, at whatever length that begins."""
    read_by = {row.get("method") for row in result.rows}
    if result.provenance["experiment"] != FIDELITY or CAB not in read_by:
        return False
    config = result.provenance["settings"].get("cab_configs", {}).get(CAB, {})
    config = without_rivals(config)
    known = {field.name for field in fields(CabConfig)}
    if not config or not config.keys() <= known:
        return False
    return CabConfig.reading({**config, "min_length": CabConfig.min_length}) == CabConfig()


def _model_row(rows: Sequence[Row]) -> dict[str, Any]:
    """A row of `models_table`, of the rows of one model and length."""
    cab, full = ([row for row in rows if row["method"] == name] for name in (CAB, FULL))
    place = {"model": plain(cab[0]["model"]), "tokens": f"{cab[0]['length']:,}"}
    place["texts"] = len({row["text"] for row in cab})
    times = [row["over_dense"] for row in cab if row.get("over_dense")]
    spent = {"density": _mean([row["density"] for row in cab])}
    spent |= {"attention time × dense": _mean(times)}
    kl, noise = (_mean_of(some, "continuation", "kl") for some in (cab, full))
    kept = {"KL (noise)": None if kl is None else _with_noise(kl, noise)}
    for probe, name in RECALLS.items():
        kept[f"{name} recall"] = _times(_mean_of(cab, probe, "ratio"))
    kept["mean over tasks to dense"] = _points(_mean_of(cab, ALL_TASKS, "delta"))
    return {**place, **spent, **kept}


def tasks_table(results: Path) -> str:
    """Shares of right answers to tasks, by method: those of dense attention, of CAB and of rivals.

    Bold where the interval of the difference to dense lies below 0. A task that a method was not
    asked, since dense attention does not do it, has none. The mean of shares is over the tasks that
    all methods were asked, that of differences to dense over all nine.
    """
    read = [read_results(results / name) for name in TASKED if (results / name).is_dir()]
    rows = []
    for each in read:
        shared = [name for name in TASKS if all(name in row for row in each.rows)]
        for row in each.rows:
            place = {"model": plain(each.provenance["settings"]["model"])}
            place |= {"tokens": f"{row['length']:,}", "method": row["method"]}
            place |= {"density": row["density"], "time × dense": row["over_dense"]}
            shares = {task.title: _task(row.get(name)) for name, task in TASKS.items()}
            of_all = _mean([row[name]["share"] for name in shared])
            difference = _points(row.get(ALL_TASKS, {}).get("delta"))
            means = {"mean of tasks asked of all": of_all, "mean of nine to dense": difference}
            rows.append({**place, **shares, **means})
    return _table(rows, read)


def _task(result: Row | None) -> str | None:
    """The share that was right; bold where it is surely less than that of dense attention."""
    if result is None:
        return None
    return _bold(f"{result['share']:.2f}", result.get("delta_high", 0.0) < 0)


def batches_table(results: Path) -> str:
    """A layer's attention over whole, padded and packed texts, beside the best dense way."""
    result = read_results(results / BATCHES)
    rows = [
        {
            "layout": row["layout"],
            "batch": row["batch"],
            "tokens": f"{row['length']:,}",
            "density": row["density"],
            "choose ms": digits(row["choose_ms"]),
            "attend ms": digits(row["attend_ms"]),
            "cab ms": digits(row["ms"]),
            "best dense ms": time_shown(row),
            "cab × dense": f"{row['ratio']:.2f}",
        }
        for row in result.rows
    ]
    return _table(rows, [result])


def parallel_table(results: Path) -> str:
    """Attention over the most ranks measured: its share of so many times one's rate, and CAB's."""
    matches = [read_results(results / name) for name in PARALLELS if (results / name).is_dir()]
    shown = [row for each in matches for row in _efficiencies(each)]
    columns = dict.fromkeys(name for row in shown for name in row)
    return _table([{name: row.get(name) for name in columns} for row in shown], matches)


def _efficiencies(result: Results) -> list[dict[str, Any]]:
    """A row a length and direction, a column a scheme."""
    # links have no direction, and one rank alone no efficiency
    rows = [row for row in result.rows if row["measured"] and row["direction"]]
    world = max(row["world"] for row in rows)
    made = []
    for alike in grouped([row for row in rows if row["world"] == world], "length", "direction"):
        place = {
            **{"model": alike[0]["shape"], "tokens": f"{alike[0]['length']:,}"},
            **{"ranks": world, "pass": alike[0]["direction"]},
        }
        schemes = {row["scheme"]: percent(row["efficiency"]) for row in alike}
        ms = {row["scheme"]: row["ms"] for row in alike if row["ms"]}
        density = next((row["density"] for row in alike if row["scheme"] == SPARSE), None)
        fields: dict[str, Any] = {"density": density}
        if ms.keys() >= {SPARSE, WHOLE}:
            fields["cab over dense"] = f"{ms[WHOLE] / ms[SPARSE]:.2f} ×"
        made.append(place | schemes | fields)
    return made


def served_table(results: Path) -> str:
    """A trace of requests, served densely and sparsely."""
    result = read_results(results / SERVED)
    rows = [
        {
            "attention": row["implementation"],
            "s": digits(row["total_s"]),
            "×": f"{row['over_best']:.2f}",
            "prompt tokens/s": f"{row['prompt_tokens_s']:,.0f}",
            **{f"TTFT {p} s": digits(row[f"ttft_{p}"]) for p in ("p50", "p99")},
            **{f"TPOT {p} ms": digits(row[f"tpot_{p}"]) for p in ("p50", "p99")},
            "density": row["density"],
        }
        for row in result.rows
        if row["served"]
    ]
    return _table(rows, [result])


def behind_table(results: Path) -> str:
    """A question about a text that the cache holds, dense and sparse."""
    result = read_results(results / BEHIND)
    rows = [
        {
            "cached tokens": f"{cab['behind']:,}",
            "tokens of the question": f"{cab['length']:,}",
            "best dense s": digits(cab["baseline_ms"] / 1000),
            "cab s": digits(cab["ms"] / 1000),
            "×": f"{cab['over_best']:.2f}",
            "at most": f"{cab['ceiling']:.2f}",
            "density": cab["density"],
        }
        for cab in result.rows
        if cab["implementation"] == CAB
    ]
    return _table(rows, [result])


def chunks_table(results: Path) -> str:
    """One prompt, by the chunks that it is read in."""
    read = [read_results(results / name) for name in CHUNKED]
    rows = [
        {
            "tokens": f"{row['length']:,}",
            "of a chunk": f"{row['chunk']:,}",
            "s": digits(row["ms"] / 1000),
            "tokens/s": f"{row['tokens_s']:,.0f}",
            "density": f"{row['density']:.4f}",
            "GiB beside weights and cache": digits(row["rest_gib"]),
        }
        for each in read
        for row in each.rows
    ]
    return _table(rows, read)


def decode_table(results: Path) -> str:
    """A decode step: attention of one layer, and of a compiled model; sparse beside dense."""
    read = [read_results(results / name) for name in STEPS_OF_DECODE]
    measured = sorted(
        (row for each in read for row in each.rows), key=itemgetter("length", "batch")
    )
    rows = []
    for alike in grouped(measured, "length", "batch"):
        told = [row for row in alike if row["budget"]]
        least = min(row["budget"] for row in told)
        sparse = {row["part"]: row for row in told if row["budget"] == least}
        # told to read everything, cab decodes densely
        dense = [row for row in told if row["budget"] >= row["length"]]
        layer, model = sparse.get("attention", {}), sparse.get("model", {})
        ways = {"best dense ms": layer.get("baseline_ms"), "sparse ms": layer.get("ms")}
        ways |= {"model, sdpa ms": model.get("baseline_ms")}
        ways |= {"model, dense ms": dense[0]["ms"] if dense else None}
        ways |= {"model, sparse ms": model.get("ms")}
        place = {"tokens": f"{alike[0]['length']:,}", "batch": alike[0]["batch"]}
        rows.append(place | {name: digits(ms) for name, ms in ways.items()})
    return _table(rows, read)


def decoded_table(results: Path) -> str:
    """What a sparse decode step keeps behind a sparse prompt."""
    result = read_results(results / DECODED)
    rows = []
    for text in dict.fromkeys(row["text"] for row in result.rows):
        full, dense, cab = (
            result.row(text=text, method=name) for name in (FULL, "dense", DECODED_METHOD)
        )
        recalls = (each["decode_asked"]["share"] for each in (cab, dense))
        agreements = (percent(each["decode"]["agreement"]) for each in (cab, full))
        kls = (digits(each["decode"]["kl"]) for each in (cab, full))
        rows.append(
            {
                "text": plain(text),
                "tokens": f"{cab['length']:,}",
                "density of the prompt": cab["density"],
                "KL (noise)": "{} ({})".format(*kls),
                "greedy agreement (noise)": "{} ({})".format(*agreements),
                "end-of-prompt recall (dense)": "{:.2f} ({:.2f})".format(*recalls),
            }
        )
    return _table(rows, [result])


TABLES: dict[str, Callable[[Path], str]] = {
    "default": default_table,
    "choices": choices_table,
    "families": families_sentence,
    "lora": lora_table,
    "spread": spread_table,
    "trained": trained_table,
    "models": models_table,
    "tasks": tasks_table,
    "batches": batches_table,
    "parallel": parallel_table,
    "sharded": dealt_table,
    "served": served_table,
    "behind": behind_table,
    "chunks": chunks_table,
    "decode": decode_table,
    "decoded": decoded_table,
}
PLACE = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


def page_with_tables(page: str, results: Path, up: str = "") -> str:
    """``page`` with its tables made anew.

    Args:
        up: from the folder of the page to the root, ``"../"`` for a page one folder down.

    Raises:
        ValueError: for a marker without an end, a table that `TABLES` does not have, or one whose
            results are missing.
    """

    def written(place: re.Match[str]) -> str:
        name = place[1]
        if name not in TABLES:
            raise ValueError(f"the page has a table {name!r}; known are {', '.join(TABLES)}.")
        table = TABLES[name](results).replace("](eval/", f"]({up}eval/")
        return f"<!-- table: {name} -->\n{table}\n<!-- end -->"

    made, count = PLACE.subn(written, page)
    if count != page.count("<!-- table: "):
        raise ValueError("the page has a table without <!-- end --> behind it.")
    return made


def _table(rows: Sequence[Row], results: Sequence[Results]) -> str:
    shown = markdown_table(rows, list(rows[0]))
    return f"{shown}\n\n{source(results)}; more in [eval/results](eval/results)."


@dataclass(frozen=True)
class Settings:
    """Where the pages are; results are shown by the README.md in their folder."""

    page: str = option(str(ROOT / "README.md"), "the file whose tables are written")
    docs: str = option(str(ROOT / "docs"), "the folder of more such files")
    training: str = option(str(ROOT / "finetune" / "README.md"), "one more such file")
    results: str = option(str(ROOT / "eval" / "results"), "the folder of all results")
    add: tuple[str, ...] = option(
        (), "folders of runs of your own, copied there first", comma_separated(str)
    )


def _add(folder: Path, results: Path, undo: ExitStack) -> Path:
    """Copy what pages show of a run to ``results``, until ``undo``; the folder there.

    Raises:
        ValueError: where it is no run, or its name is taken.
    """
    read_results(folder)
    target = results / folder.resolve().name
    if target.exists():
        raise ValueError(f"{target} exists; rename {folder}, or take away what is there.")
    names = (RESULTS, SAMPLES, REPORT, FIGURE)
    target.mkdir()
    undo.callback(shutil.rmtree, target)
    for name in (*names, *(name + PACKED for name in names)):
        if (folder / name).is_file():
            shutil.copy2(folder / name, target / name)
    return target


def _where_shown(folder: Path) -> str:
    """A sentence on a run that was added."""
    if _by_default(read_results(folder)):
        return f"{folder.name} is in the table of models."
    return (
        f"{folder.name} is in {folder.parent / 'README.md'}; the table of models is of fidelity by "
        "the default config on a GPU."
    )


def _write_pages(settings: Settings) -> None:
    """All pages anew, or none."""
    page, docs, results = map(Path, (settings.page, settings.docs, settings.results))
    pages = {
        results / "README.md": results_page(results),
        page: page_with_tables(page.read_text(), results),
    }
    for path in (*sorted(docs.glob("*.md")), Path(settings.training)):
        pages[path] = page_with_tables(path.read_text(), results, "../")
    for path, text in pages.items():
        write_atomically(path, text)


def main(words: Sequence[str]) -> int:
    """Write all pages anew, or none, and pack the samples of all results; the exit status.

    Runs that were to be added are where all pages are written, and nowhere else.
    """
    prog = f"{experiment.PROG} readme"
    settings = read_settings(Settings, words, prog)
    results = Path(settings.results)
    try:
        with ExitStack() as undo:
            added = [_add(Path(folder), results, undo) for folder in settings.add]
            _write_pages(settings)
            undo.pop_all()
        for folder in added:
            print(_where_shown(folder))
        draw_default(results)
        for folder in filter(Path.is_dir, results.iterdir()):
            pack(folder / SAMPLES)
            result = folder / RESULTS
            if result.is_file() and result.stat().st_size > LARGE_RESULTS:
                pack(result)
    except (OSError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0
