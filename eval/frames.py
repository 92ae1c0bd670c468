"""Rows of result folders as DataFrames, and tables of their columns.

A nested field of a row is a column whose name has a dot, such as ``recall.share``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas
from pandas import DataFrame, Series

from cab_hf.eval.report import format_digits, format_percent
from cab_hf.eval.result_folders import Results
from cab_hf.experiment.markdown import escape_markdown, format_code

# format of a value: a template for str.format, or a function
ValueFormat = str | Callable[[Any], str | None]

# name of a column -> heading, or (heading, format of the values). Without a format, `as_markdown`
# writes floats with two decimals.
COLUMN_FORMATS: dict[str, tuple[str, ValueFormat] | str] = {
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
    "attend_ms": ("attention, ms", format_digits),
    "attention_ms": ("attention, ms", format_digits),
    "baseline_ms": ("fastest dense, ms", format_digits),
    "baseline_s": ("fastest dense, s", format_digits),
    "ceiling": "upper bound",
    "choose_ms": ("selection, ms", format_digits),
    "efficiency": ("efficiency", format_percent),
    "estimate": ("estimated tokens", "{:,.0f}"),
    "fastest": "fastest dense, ms",
    "gain": "speed-up",
    "host_gib": ("host GiB", format_digits),
    "ms": ("CAB, ms", format_digits),
    "over_best": "speed-up",
    "over_dense": "attention time / dense",
    "peak_gib": ("GiB", format_digits),
    "predict_ms": ("selection, ms", format_digits),
    "prompt_tokens_s": ("prompt tokens/s", "{:,.0f}"),
    "ratio": "CAB / dense",
    "rest_gib": ("GiB beside weights and cache", format_digits),
    "seconds": ("seconds", format_digits),
    "step_s": ("seconds per step", format_digits),
    "tokens_s": ("tokens/s", "{:,.0f}"),
    "total_s": ("seconds", format_digits),
    "tpot_p50": ("TPOT p50 ms", format_digits),
    "tpot_p99": ("TPOT p99 ms", format_digits),
    "ttft_p50": ("TTFT p50 s", format_digits),
    "ttft_p99": ("TTFT p99 s", format_digits),
    # quality
    "asked.ratio": ("recall after the prompt / dense", "× {:.2f}"),
    "asked.share": "recall after the prompt",
    "continuation.kl": ("KL", format_digits),
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


def concatenate_rows(runs: Sequence[Results]) -> DataFrame:
    """Return the rows of all runs as a DataFrame.

    The added columns ``folder`` and ``name`` contain path and name of the result folder. ``device``
    is the device of the run, and ``run`` is the run's provenance.
    """
    rows = pandas.json_normalize([row for run in runs for row in run.rows])
    runs_by_row = [run for run in runs for _ in run.rows]
    return rows.assign(
        folder=[run.folder for run in runs_by_row],
        name=[run.name for run in runs_by_row],
        device=[run.provenance["device"] for run in runs_by_row],
        run=[run.provenance for run in runs_by_row],
    )


def get_setting(rows: DataFrame, name: str) -> Series:
    """Return for each row the setting ``name`` of its run; None if the run did not record it."""
    return rows["run"].map(lambda run: run["settings"].get(name))


def format_column(rows: DataFrame, name: str, value_format: ValueFormat = "{:.2f}") -> Series:
    """Return the formatted values of a column.

    Missing values stay missing, and a string that is concatenated with a missing value is missing.

    Args:
        rows: the rows.
        name: name of the column. If there is no such column, all values are missing.
        value_format: format of the values.
    """
    values = rows[name] if name in rows else Series(None, rows.index, dtype=object)
    value_format = value_format.format if isinstance(value_format, str) else value_format
    return values.map(value_format, na_action="ignore").astype("string")


def make_table(rows: DataFrame, column_names: str, **headings: str) -> DataFrame:
    """Return a table with headings and formatted values.

    Args:
        rows: the rows.
        column_names: names of the columns, separated by spaces. A name without a column in ``rows``
            yields an empty column. A column ``method.name`` of `merge_methods` has heading and
            format of ``name``.
        headings: name of a column -> heading that replaces the heading in `COLUMN_FORMATS`.
    """
    columns = {}
    for name in column_names.split():
        heading_and_format = COLUMN_FORMATS.get(
            name, COLUMN_FORMATS.get(name.partition(".")[2], name)
        )
        heading, value_format = (
            (heading_and_format, None)
            if isinstance(heading_and_format, str)
            else heading_and_format
        )
        cells = (
            rows[name]
            if value_format is None and name in rows
            else format_column(rows, name, value_format or str)
        )
        columns[headings.get(name, heading)] = cells
    return DataFrame(columns)


def format_pairs(
    rows: DataFrame, first_name: str, second_name: str, value_format: ValueFormat
) -> Series:
    """Return the formatted values of two columns as ``first (second)``."""
    return (
        format_column(rows, first_name, value_format)
        + " ("
        + format_column(rows, second_name, value_format)
        + ")"
    )


def format_intervals(rows: DataFrame, name: str, value_format: ValueFormat = "{:.2f}") -> Series:
    """Return formatted values with intervals, such as ``0.05 [0.04, 0.06]``.

    The columns ``{name}_low`` and ``{name}_high`` contain the ends of the interval. A value without
    these columns, or with missing values there, is formatted without an interval.
    """
    low, high = (format_column(rows, f"{name}_{end}", value_format) for end in ("low", "high"))
    return format_column(rows, name, value_format) + (" [" + low + ", " + high + "]").fillna("")


def make_bold(cells: Series, is_bold: Series) -> Series:
    """Return ``cells`` in Markdown's bold where ``is_bold`` is true."""
    return cells.mask(is_bold, "**" + cells + "**")


def sort_by_label(rows: DataFrame, column: str, label_by_value: Mapping[Any, str]) -> DataFrame:
    """Return the rows with a label, in the order of ``label_by_value``.

    Args:
        rows: the rows.
        column: the column whose value determines the label of a row.
        label_by_value: value of the column -> label. Rows with other values are left out.

    Returns:
        The rows with the additional column ``label``.

    Raises:
        ValueError: a label has no row.
    """
    if missing_labels := label_by_value.keys() - set(rows[column]):
        raise ValueError(
            f"table must have rows with {column} {', '.join(map(str, missing_labels))}, got none. "
            "Measure "
            "them, or change eval/pages.py."
        )
    rows = rows[rows[column].isin(list(label_by_value))]
    label_rank = rows[column].map(list(label_by_value).index)
    return rows.assign(label=rows[column].map(label_by_value)).iloc[
        label_rank.argsort(kind="stable")
    ]


def get_only_row(rows: DataFrame, **value_by_column: Any) -> Series:
    """Return the only row that has the value of ``value_by_column`` in each of its columns.

    Raises:
        ValueError: no row, or several rows, have these values.
    """
    for name, value in value_by_column.items():
        rows = rows[rows[name] == value]
    if len(rows) != 1:
        raise ValueError(f"a sentence must have one row for a number, got {len(rows)}.")
    return rows.iloc[0]


def merge_methods(
    rows: DataFrame, main_method: str, method_column: str, key_columns: Sequence[str]
) -> DataFrame:
    """Merge the rows of different methods into one row for each combination of ``key_columns``.

    Args:
        rows: the rows.
        main_method: the method whose columns keep their names. Columns of other methods get the
            method as prefix, as in ``dense.ms``.
        method_column: the column with the name of the method.
        key_columns: the columns with equal values in all rows that are merged into one.

    Returns:
        The columns ``key_columns``, and all columns with numbers. If a method has several rows for
        one merged row, the number is their mean.
    """
    number_columns = rows.select_dtypes("number").columns.difference(key_columns)
    merged_rows = rows.pivot_table(
        values=list(number_columns),
        index=list(key_columns),
        columns=method_column,
        aggfunc="mean",
        sort=False,
    )
    merged_rows.columns = [
        name if value == main_method else f"{value}.{name}" for name, value in merged_rows.columns
    ]
    key_rows = rows[list(key_columns)].drop_duplicates()
    return key_rows.merge(merged_rows.reset_index(), on=list(key_columns))


def add_seconds(rows: DataFrame) -> DataFrame:
    """Add the columns ``seconds`` and ``baseline_s``, from ``ms`` and ``baseline_ms``."""
    baseline_ms = rows.get("baseline_ms", math.nan)
    return rows.assign(seconds=rows["ms"] / 1e3, baseline_s=baseline_ms / 1e3)


def add_fastest_dense(rows: DataFrame) -> DataFrame:
    """Add the column ``fastest``: time and name of the fastest dense kernel, such as ``842 FA3``.

    ≈ marks extrapolated times.
    """
    extrapolation_mark = rows["extrapolated"].eq(True).map({True: "≈ ", False: ""})
    return rows.assign(
        fastest=extrapolation_mark
        + format_column(rows, "baseline_ms", format_digits)
        + " "
        + rows["baseline"]
    )
