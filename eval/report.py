"""Results as tables in JSON, CSV and Markdown, and formats of numbers."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cab_hf.experiment.log import drop_packed, write_atomically

BAR = re.compile(r"(?<!\\)\|")


def write_results(
    folder: Path, rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]
) -> None:
    """Write ``{"rows": rows, "provenance": provenance}`` to results.json."""
    # one row per line: short, with readable diffs
    lines = ",\n".join(map(json.dumps, rows))
    content = f'{{"rows": [\n{lines}\n],\n"provenance": {json.dumps(provenance)}}}\n'
    path = folder / "results.json"
    write_atomically(path, content)
    drop_packed(path)


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as CSV with a header; a mapping in a row becomes one column per key."""
    flat = []
    for row in rows:
        cells = {}
        for name, value in row.items():
            inner = value if isinstance(value, dict) else {"": value}
            cells |= {f"{name}.{key}".rstrip("."): each for key, each in inner.items()}
        flat.append(cells)
    written = io.StringIO()
    columns = dict.fromkeys(name for cells in flat for name in cells)
    writer = csv.DictWriter(written, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return written.getvalue()


def grouped(rows: Sequence[Mapping[str, Any]], *names: str) -> list[list[Mapping[str, Any]]]:
    """Return groups of rows that are equal in the fields ``names``."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.2f}"
    # a row must be one line, and a bar would end a cell
    return BAR.sub(r"\|", " ".join(str(value).splitlines()))


def markdown_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | Mapping[str, Any]
) -> str:
    """Return a Markdown table: floats with two decimals, a dash for None and missing values.

    ``columns`` are keys of the rows, or a dict from heading to a key or a function of the row.
    """
    columns = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    lines = [list(columns), ["---"] * len(columns)]
    for row in rows:
        values = (get(row) if callable(get) else row.get(get) for get in columns.values())
        lines.append([_cell(value) for value in values])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_interval(
    value: float,
    low: float | None,
    high: float | None,
    write: Callable[[float], str | None] = "{:.2f}".format,
) -> str:
    """Format a value with its interval if there is one, ``0.05 [0.04, 0.06]``."""
    return f"{write(value)}" + ("" if low is None else f" [{write(low)}, {write(high)}]")


def difference(row: Mapping[str, Any]) -> str | None:
    """Format ``delta`` of a row with its interval, ``+0.05 [+0.04, +0.06]``; None without one."""
    if row.get("delta") is None:
        return None
    return with_interval(row["delta"], row["delta_low"], row["delta_high"], "{:+.2f}".format)


def digits(value: float | None) -> str | None:
    """Format a number with three significant digits and no exponent."""
    if not value:
        return None if value is None else "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def seconds(ms: float) -> str | None:
    """Format milliseconds as seconds, ``1.37``."""
    return digits(ms / 1e3)


def percent(share: float | None) -> str | None:
    """Format a share as ``12.3 %``."""
    return None if share is None else f"{digits(100 * share)} %"


def column(write: Callable[[Any], str | None], *path: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a column for `markdown_table`: ``write`` of the value at ``path``, if there is one."""

    def cell(row: Any) -> str | None:
        for name in path:
            row = (row or {}).get(name)
        return None if row is None else write(row)

    return cell
