"""Rows of result folders as DataFrames, and tables of their columns.

A nested field of a row is a column whose name has a dot, such as ``recall.share``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas
from pandas import DataFrame, Series

from cab_hf.eval.report import digits, percent
from cab_hf.eval.result_folders import Results
from cab_hf.experiment.markdown import escape_markdown, format_code

# format of a value: a template for str.format, or a function
Format = str | Callable[[Any], str | None]

# name of a column -> heading, or (heading, format of the values). Without a format, `as_markdown`
# writes floats with two decimals.
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
    "model": ("model", escape_markdown),
    "model_type": ("model type", format_code),
    "offloaded": ("offloaded layers", "{:.0f}"),
    "segments": "expandable segments",
    "setting": "configuration",
    "shape": "model",
    "spread": "data parallel",
    "text": ("text", escape_markdown),
    "threshold": ("mass threshold at this length", "{:.3g}"),
    "world": "GPUs",
    # time and memory; seconds of a training step or of the first token
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
    """Return the rows of all runs as a DataFrame.

    The added columns ``folder`` and ``name`` contain path and name of the result folder. ``device``
    is the device of the run, and ``run`` is the run's provenance.
    """
    rows = pandas.json_normalize([row for run in runs for row in run.rows])
    run_by_row = [run for run in runs for _ in run.rows]
    return rows.assign(
        folder=[run.folder for run in run_by_row],
        name=[run.name for run in run_by_row],
        device=[run.provenance["device"] for run in run_by_row],
        run=[run.provenance for run in run_by_row],
    )


def setting(rows: DataFrame, name: str) -> Series:
    """Return for each row the setting ``name`` of its run; None if the run did not record it."""
    return rows["run"].map(lambda run: run["settings"].get(name))


def text(rows: DataFrame, name: str, write: Format = "{:.2f}") -> Series:
    """Return the formatted values of a column.

    Missing values stay missing, and a string that is concatenated with a missing value is missing.

    Args:
        rows: the rows.
        name: name of the column. If there is no such column, all values are missing.
        write: format of the values.
    """
    values = rows[name] if name in rows else Series(None, rows.index, dtype=object)
    write = write.format if isinstance(write, str) else write
    return values.map(write, na_action="ignore").astype("string")


def show(rows: DataFrame, names: str, **headings: str) -> DataFrame:
    """Return a table with headings and formatted values.

    Args:
        rows: the rows.
        names: names of the columns, separated by spaces. A name without a column in ``rows`` yields
            an empty column. A column ``method.name`` of `merge_methods` has heading and format of
            ``name``.
        headings: name of a column -> heading that replaces the heading in `COLUMNS`.
    """
    columns = {}
    for name in names.split():
        heading_and_format = COLUMNS.get(name, COLUMNS.get(name.partition(".")[2], name))
        heading, value_format = (
            (heading_and_format, None)
            if isinstance(heading_and_format, str)
            else heading_and_format
        )
        cells = (
            rows[name]
            if value_format is None and name in rows
            else text(rows, name, value_format or str)
        )
        columns[headings.get(name, heading)] = cells
    return DataFrame(columns)


def both(rows: DataFrame, first: str, second: str, write: Format) -> Series:
    """Return the formatted values of two columns as ``first (second)``."""
    return text(rows, first, write) + " (" + text(rows, second, write) + ")"


def interval(rows: DataFrame, name: str, write: Format = "{:.2f}") -> Series:
    """Return formatted values with intervals, such as ``0.05 [0.04, 0.06]``.

    The columns ``{name}_low`` and ``{name}_high`` contain the ends of the interval. A value without
    these columns, or with missing values there, is formatted without an interval.
    """
    low, high = (text(rows, f"{name}_{end}", write) for end in ("low", "high"))
    return text(rows, name, write) + (" [" + low + ", " + high + "]").fillna("")


def bold(cells: Series, is_bold: Series) -> Series:
    """Return ``cells`` in Markdown's bold where ``is_bold`` is true."""
    return cells.mask(is_bold, "**" + cells + "**")


def in_order(rows: DataFrame, name: str, labels: Mapping[Any, str]) -> DataFrame:
    """Return the rows with a label, in the order of ``labels``.

    Args:
        rows: the rows.
        name: the column whose value determines the label of a row.
        labels: value of the column -> label. Rows with other values are left out.

    Returns:
        The rows with the additional column ``label``.

    Raises:
        ValueError: a label has no row.
    """
    if missing_labels := labels.keys() - set(rows[name]):
        raise ValueError(
            f"table must have rows with {name} {', '.join(map(str, missing_labels))}, got none. "
            "Measure "
            "them, or change eval/pages.py."
        )
    rows = rows[rows[name].isin(list(labels))]
    rank = rows[name].map(list(labels).index)
    return rows.assign(label=rows[name].map(labels)).iloc[rank.argsort(kind="stable")]


def get_only_row(rows: DataFrame, **values: Any) -> Series:
    """Return the only row that has, in each column of ``values``, the value of this argument.

    Raises:
        ValueError: no row, or several rows, have these values.
    """
    for name, value in values.items():
        rows = rows[rows[name] == value]
    if len(rows) != 1:
        raise ValueError(f"a sentence must have one row for a number, got {len(rows)}.")
    return rows.iloc[0]


def merge_methods(rows: DataFrame, main: str, way: str, by: Sequence[str]) -> DataFrame:
    """Merge the rows of different methods into one row for each combination of values of ``by``.

    Args:
        rows: the rows.
        main: the method whose columns keep their names. Columns of other methods get the method as
            prefix, as in ``dense.ms``.
        way: the column with the name of the method.
        by: the columns with equal values in all rows that are merged into one.

    Returns:
        The columns ``by``, and all columns with numbers. If a method has several rows for one
        merged row, the number is their mean.
    """
    number_columns = rows.select_dtypes("number").columns.difference(by)
    merged = rows.pivot_table(
        values=list(number_columns), index=list(by), columns=way, aggfunc="mean", sort=False
    )
    merged.columns = [
        name if value == main else f"{value}.{name}" for name, value in merged.columns
    ]
    key_rows = rows[list(by)].drop_duplicates()
    return key_rows.merge(merged.reset_index(), on=list(by))


def add_seconds(rows: DataFrame) -> DataFrame:
    """Add the columns ``seconds`` and ``baseline_s``, from ``ms`` and ``baseline_ms``."""
    baseline_ms = rows.get("baseline_ms", math.nan)
    return rows.assign(seconds=rows["ms"] / 1e3, baseline_s=baseline_ms / 1e3)


def add_fastest(rows: DataFrame) -> DataFrame:
    """Add the column ``fastest``: time and name of the fastest dense kernel, such as ``842 FA3``.

    ≈ marks extrapolated times.
    """
    extrapolation_mark = rows["extrapolated"].eq(True).map({True: "≈ ", False: ""})
    return rows.assign(
        fastest=extrapolation_mark + text(rows, "baseline_ms", digits) + " " + rows["baseline"]
    )
