"""Rows of result folders as DataFrames, and tables of their columns.

Nested fields of a row are columns with dots: ``recall.share``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas
from pandas import DataFrame, Series

from cab_hf.eval.report import digits, percent
from cab_hf.eval.result_folders import Results
from cab_hf.experiment.markdown import code, plain

Format = str | Callable[[Any], str | None]

# name of a column -> heading, and format of its values (default: two decimals)
COLUMNS: dict[str, tuple[str, Format] | str] = {
    # settings
    "batch": "batch",
    "behind": ("cached tokens", "{:,.0f}"),
    "chunk": ("tokens of a chunk", "{:,.0f}"),
    "direction": "pass",
    "gib": ("GPU GiB", "{:g}"),
    "implementation": "attention",
    "length": ("tokens", "{:,.0f}"),
    "longest": ("longest prompt", "{:,.0f}"),
    "model": ("model", plain),
    "model_type": ("model type", code),
    "offloaded": ("offloaded layers", "{:.0f}"),
    "segments": "expandable segments",
    "setting": "configuration",
    "shape": "model",
    "spread": "data parallel",
    "text": ("text", plain),
    "threshold": ("mass threshold at this length", "{:.3g}"),
    "world": "GPUs",
    # time and memory; seconds are those of a step or of the first token
    "attend_ms": ("attention, ms", digits),
    "attention_ms": ("attention, ms", digits),
    "baseline_ms": ("fastest dense, ms", digits),
    "baseline_s": ("fastest dense, s", digits),
    "ceiling": "upper bound",
    "choose_ms": ("selection, ms", digits),
    "efficiency": ("efficiency", percent),
    "estimate": ("estimated tokens", "{:,.0f}"),
    "fastest": "fastest dense, ms",
    "gain": "speed-up",
    "host_gib": ("host GiB", digits),
    "ms": ("CAB, ms", digits),
    "over_best": "speed-up",
    "over_dense": "attention time / dense",
    "peak_gib": ("GiB", digits),
    "predict_ms": ("selection, ms", digits),
    "prompt_tokens_s": ("prompt tokens/s", "{:,.0f}"),
    "ratio": "CAB / dense",
    "rest_gib": ("GiB beside weights and cache", digits),
    "seconds": ("seconds", digits),
    "step_s": ("seconds per step", digits),
    "tokens_s": ("tokens/s", "{:,.0f}"),
    "total_s": ("seconds", digits),
    "tpot_p50": ("TPOT p50 ms", digits),
    "tpot_p99": ("TPOT p99 ms", digits),
    "ttft_p50": ("TTFT p50 s", digits),
    "ttft_p99": ("TTFT p99 s", digits),
    # quality
    "asked.ratio": ("recall after the prompt / dense", "× {:.2f}"),
    "asked.share": "recall after the prompt",
    "continuation.kl": ("KL", digits),
    "each": "perplexity per run",
    "mean": "mean of the common tasks",
    "perplexity_ratio": ("perplexity / dense", "{:.3f}"),
    "perplexity_border_ratio": ("block-start perplexity / dense", "{:.3f}"),
    "perplexity_border.ratio": ("block-start perplexity / dense", "× {:.2f}"),
    "recall.ratio": ("recall in the prompt / dense", "× {:.2f}"),
    "recall.share": "recall in the prompt",
    "recall_border.ratio": ("recall at block starts / dense", "× {:.2f}"),
    "recall_border.share": "recall at block starts",
    "tasks.delta": ("mean of nine tasks, difference to dense", lambda x: f"{100 * x:+.1f} points"),
}


def rows_of(runs: Sequence[Results]) -> DataFrame:
    """Return the rows of all runs; each has the folder, its name, and the provenance of its run."""
    rows = pandas.json_normalize([row for run in runs for row in run.rows])
    run_of = [run for run in runs for _ in run.rows]
    return rows.assign(
        folder=[run.folder for run in run_of],
        name=[run.name for run in run_of],
        device=[run.provenance["device"] for run in run_of],
        run=[run.provenance for run in run_of],
    )


def setting(rows: DataFrame, name: str) -> Series:
    """Return a recorded setting of the run of each row, None without it."""
    return rows["run"].map(lambda run: run["settings"].get(name))


def text(rows: DataFrame, name: str, write: Format = "{:.2f}") -> Series:
    """Return a column as text; missing values stay missing, also in sums with other text."""
    values = rows[name] if name in rows else Series(None, rows.index, dtype=object)
    write = write.format if isinstance(write, str) else write
    return values.map(write, na_action="ignore").astype("string")


def show(rows: DataFrame, names: str, **headings: str) -> DataFrame:
    """Return a table of the columns ``names``, which are separated by spaces.

    ``headings`` replace those of `COLUMNS`. A column ``way.name`` of `side_by_side` has the format
    of ``name``. A column that the rows lack is empty.
    """
    shown = {}
    for name in names.split():
        column = COLUMNS.get(name, COLUMNS.get(name.partition(".")[2], name))
        heading, write = (column, None) if isinstance(column, str) else column
        cells = rows[name] if write is None and name in rows else text(rows, name, write or str)
        shown[headings.get(name, heading)] = cells
    return DataFrame(shown)


def both(rows: DataFrame, first: str, second: str, write: Format) -> Series:
    """Return cells ``first (second)``."""
    return text(rows, first, write) + " (" + text(rows, second, write) + ")"


def interval(rows: DataFrame, name: str, write: Format = "{:.2f}") -> Series:
    """Return cells ``0.05 [0.04, 0.06]``, without an interval if there is none."""
    low, high = (text(rows, f"{name}_{edge}", write) for edge in ("low", "high"))
    return text(rows, name, write) + (" [" + low + ", " + high + "]").fillna("")


def bold(cells: Series, is_bold: Series) -> Series:
    """Mark cells as bold."""
    return cells.mask(is_bold, "**" + cells + "**")


def in_order(rows: DataFrame, name: str, labels: Mapping[Any, str]) -> DataFrame:
    """Return the rows whose ``name`` is in ``labels``, in the order of labels, with a ``label``.

    Raises:
        ValueError: a label has no row.
    """
    if missing := labels.keys() - set(rows[name]):
        raise ValueError(
            f"table must have rows with {name} {', '.join(map(str, missing))}, got none. Measure "
            "them, or change eval/pages.py."
        )
    rows = rows[rows[name].isin(list(labels))]
    place = rows[name].map(list(labels).index)
    return rows.assign(label=rows[name].map(labels)).iloc[place.argsort(kind="stable")]


def one_row(rows: DataFrame, **values: Any) -> Series:
    """Return the row with these values; ValueError if there is not exactly one."""
    for name, value in values.items():
        rows = rows[rows[name] == value]
    if len(rows) != 1:
        raise ValueError(f"a sentence must have one row for a number, got {len(rows)}.")
    return rows.iloc[0]


def side_by_side(rows: DataFrame, main: str, way: str, by: Sequence[str]) -> DataFrame:
    """Return one row per value of ``by``: the numbers of ``main``, and of each other ``way``.

    The columns of other ways begin with their name, ``dense.ms``. Numbers of several rows are
    averaged.
    """
    numbers = rows.select_dtypes("number").columns.difference(by)
    wide = rows.pivot_table(list(numbers), list(by), way, aggfunc="mean", sort=False)
    wide.columns = [name if of == main else f"{of}.{name}" for name, of in wide.columns]
    order = rows[list(by)].drop_duplicates()
    return order.merge(wide.reset_index(), on=list(by))


def with_seconds(rows: DataFrame) -> DataFrame:
    """Add ``ms`` and ``baseline_ms`` in seconds."""
    baseline_ms = rows.get("baseline_ms", math.nan)
    return rows.assign(seconds=rows["ms"] / 1e3, baseline_s=baseline_ms / 1e3)


def with_fastest(rows: DataFrame) -> DataFrame:
    """Add ``fastest``: time and name of the fastest dense kernel; ≈ marks extrapolation."""
    about = rows["extrapolated"].eq(True).map({True: "≈ ", False: ""})
    return rows.assign(fastest=about + text(rows, "baseline_ms", digits) + " " + rows["baseline"])
