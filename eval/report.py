"""Functions that write rows of results as JSON, CSV and Markdown, and that format numbers.

Importing pandas takes long. Functions therefore import pandas when they are called.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cab_hf.experiment.log import remove_packed_file, write_atomically

if TYPE_CHECKING:
    from pandas import DataFrame

UNESCAPED_BAR_PATTERN = re.compile(r"(?<!\\)\|")  # a vertical bar that no backslash escapes
MISSING_CELL = "–"
CELL_PADDING_PATTERN = re.compile(r" {2,}\|")  # spaces that align the columns of a table


def write_results(
    folder: Path, rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]
) -> None:
    """Write ``{"rows": rows, "provenance": provenance}`` to results.json."""
    # one row per line keeps diffs readable
    lines = ",\n".join(map(json.dumps, rows))
    content = f'{{"rows": [\n{lines}\n],\n"provenance": {json.dumps(provenance)}}}\n'
    path = folder / "results.json"
    write_atomically(path, content)
    remove_packed_file(path)


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as CSV with a header.

    A field with a mapping becomes one column per key, such as ``recall.share``.
    """
    import pandas

    # without dtype object, a missing value would turn a column of integers into floats
    row_frames = [pandas.json_normalize(row).astype(object) for row in rows]
    return (
        pandas.concat(row_frames).to_csv(index=False, lineterminator="\n") if row_frames else "\n"
    )


def group_rows(
    rows: Sequence[Mapping[str, Any]], field_names: Iterable[str]
) -> list[list[Mapping[str, Any]]]:
    """Return lists of rows that have equal values in the fields ``field_names``.

    Groups are in the order of their first rows.
    """
    field_names = tuple(field_names)
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in field_names), []).append(row)
    return list(groups.values())


def markdown_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | Mapping[str, Any]
) -> str:
    """Return a Markdown table with one line per row, formatted by `as_markdown`.

    Args:
        rows: the rows.
        columns: names of the fields to show, which are also the headings; or heading -> field, or
            heading -> function from row to cell.
    """
    from pandas import DataFrame

    columns = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    cells = [
        [field(row) if callable(field) else row.get(field) for field in columns.values()]
        for row in rows
    ]
    return as_markdown(DataFrame(cells, columns=list(columns), dtype=object))


def as_markdown(table: DataFrame) -> str:
    """Format a DataFrame as a Markdown table.

    Floats have two decimals, and a dash replaces None and missing values.
    """
    cells = table.astype(object).where(table.notna(), None).map(_format_cell)
    heading, _, *body_lines = cells.to_markdown(index=False, disable_numparse=True).splitlines()
    # remove the alignment: otherwise a longer cell would change all lines of the table in a diff
    lines = [CELL_PADDING_PATTERN.sub(" |", line) for line in (heading, *body_lines)]
    lines.insert(1, "| --- " * table.shape[1] + "|")
    return "\n".join(lines)


def _format_cell(value: Any) -> str:
    """Return a value as the text of a table cell."""
    if value is None:
        return MISSING_CELL
    if isinstance(value, float):
        return f"{value:.2f}"
    # a line break would end the row, and a bar would end the cell
    return UNESCAPED_BAR_PATTERN.sub(r"\|", " ".join(str(value).splitlines()))


def format_with_interval(
    value: float,
    low: float | None,
    high: float | None,
    format_number: Callable[[float], str | None] = "{:.2f}".format,
) -> str:
    """Format a value with its interval, such as ``0.05 [0.04, 0.06]``.

    Args:
        value: the value.
        low, high: ends of the interval; None without an interval.
        format_number: function that formats each number.
    """
    return f"{format_number(value)}" + (
        "" if low is None else f" [{format_number(low)}, {format_number(high)}]"
    )


def format_difference(row: Mapping[str, Any]) -> str | None:
    """Format the difference to dense attention in a row, such as ``+0.05 [+0.04, +0.06]``.

    The row has the fields of `compare_shares`. Returns None if it has no ``delta``.
    """
    if row.get("delta") is None:
        return None
    return format_with_interval(row["delta"], row["delta_low"], row["delta_high"], "{:+.2f}".format)


def format_digits(value: float | None) -> str | None:
    """Format a number with three significant digits and no exponent; return None for None."""
    if not value:
        return None if value is None else "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def format_seconds(ms: float) -> str | None:
    """Format milliseconds as seconds, such as ``1.37``."""
    return format_digits(ms / 1e3)


def format_percent(share: float | None) -> str | None:
    """Format a number from 0 to 1 as a percentage, such as ``12.3 %``; return None for None."""
    return None if share is None else f"{format_digits(100 * share)} %"


def make_cell_formatter(
    format_value: Callable[[Any], str | None], *keys: str
) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function from row to cell that formats one value, for `markdown_table`.

    Args:
        format_value: function that formats the value.
        keys: the keys of the value: ``"recall", "share"`` for ``row["recall"]["share"]``. The cell
            is None if the value is None or a key is missing.
    """

    def format_cell(value: Any) -> str | None:
        for key in keys:
            value = (value or {}).get(key)
        return None if value is None else format_value(value)

    return format_cell
