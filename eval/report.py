"""Results as tables: JSON, CSV, Markdown, and numbers as they are read."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cab_hf.runs.log import drop_packed, write_atomically

BAR = re.compile(r"(?<!\\)\|")


def write_results(
    folder: Path, rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]
) -> None:
    """Write ``{"rows": rows, "provenance": provenance}`` to results.json."""
    # a row a line: as short as can be, and what changes is seen
    lines = ",\n".join(map(json.dumps, rows))
    content = f'{{"rows": [\n{lines}\n],\n"provenance": {json.dumps(provenance)}}}\n'
    path = folder / "results.json"
    write_atomically(path, content)
    drop_packed(path)


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows with a header; what is a mapping in a row is a column for each of its keys."""
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
    """Rows that have the same values in the fields ``names``, together."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.2f}"
    # a row is a line, and a bar ends a cell
    return BAR.sub(r"\|", " ".join(str(value).splitlines()))


def markdown_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | Mapping[str, Any]
) -> str:
    """A Markdown table: floats with two decimals, None and missing values a dash.

    ``columns`` are keys of the rows; or a dict from heading to a key or a function of the row.
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
    """A value and the interval around it where there is one, ``0.05 [0.04, 0.06]``."""
    return f"{write(value)}" + ("" if low is None else f" [{write(low)}, {write(high)}]")


def difference(row: Mapping[str, Any]) -> str | None:
    """``delta`` of a row with its interval, ``+0.05 [+0.04, +0.06]``; None where it has none."""
    if row.get("delta") is None:
        return None
    return with_interval(row["delta"], row["delta_low"], row["delta_high"], "{:+.2f}".format)


def digits(value: float | None) -> str | None:
    """A number with three digits that count, and no exponent."""
    if not value:
        return None if value is None else "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def seconds(ms: float) -> str | None:
    """Milliseconds as seconds, ``1.37``."""
    return digits(ms / 1e3)


def percent(share: float | None) -> str | None:
    """A share as ``12.3 %``."""
    return None if share is None else f"{digits(100 * share)} %"


def column(write: Callable[[Any], str | None], *path: str) -> Callable[[Mapping[str, Any]], Any]:
    """What `markdown_table` shows of a row: ``write`` of the value at ``path``, if there is one."""

    def cell(row: Any) -> str | None:
        for name in path:
            row = (row or {}).get(name)
        return None if row is None else write(row)

    return cell
