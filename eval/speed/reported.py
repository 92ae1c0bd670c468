"""Reports of speed ops: a table of all cases, remarks, notes, and lines over tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import digits, grouped, markdown_table, percent

CAB_DENSE = "cab_dense"  # exact attention, over ranks as well
HEADINGS = {
    **{"length": "tokens", "implementation": "attention", "way": "attention", "world": "ranks"},
    **{"ceiling": "upper bound", "over_best": "speed-up", "over_same": "speed-up over sdpa"},
    **{"ratio": "time / baseline", "predict_ms": "select ms", "choose_ms": "select ms"},
    **{"tokens": "tokens in all", "tokens_s": "tokens/s", "gb_s": "GB/s"},
    **{"tflops": "TFLOP/s", "labels": "computed by", "break_even": "faster than dense"},
    **{"prompt_tokens_s": "prompt tokens/s", "output_tokens_s": "output tokens/s"},
    **{"cab_dense": "cab_dense", "peak_mib": "peak MiB", "iterations_s": "turns/s"},
}
SHARES = ("efficiency", "of_bandwidth", "gap", "density", "mass")
TIMES = "{:.2f}×".format
# field of a sample -> its meaning; the field contains a text, or texts by name
REMARKS = {
    "ran_as": "ran as",
    "error": "not measured",
    "why_no_split": "not split into parts",
    "without_graph": "no CUDA graph, so its time is eager",
    "not_measured": "not measured",
}


class Panel(NamedTuple):
    """A panel of a figure over tokens, left out if no row has a value of its ``fields``."""

    title: str
    unit: str
    fields: tuple[str, ...]
    log: bool = True

    def shows(self, rows: Sequence[Row]) -> bool:
        return any(row.get(field) is not None for row in rows for field in self.fields)


class Reported:
    """The base class of experiments whose rows form one table and lines over tokens."""

    # fields that distinguish rows of one length, heading -> field; "way" is the attention
    BY: ClassVar[Mapping[str, str]] = {}
    # headings of fields whose values have separate panels
    APART: ClassVar[Sequence[str]] = ()
    # fields in addition to the length on which the ``baselines`` of a row depend
    DENSE: ClassVar[Sequence[str]] = ()
    # drawn field -> field that contains it by name of a kernel
    OF_DENSE: ClassVar[Mapping[str, str]] = {"ms": "baselines"}
    # fields without a column
    HIDDEN: ClassVar[Sequence[str]] = ()
    # True if the first table contains the longest length alone
    LONGEST_FIRST: ClassVar[bool] = False
    PANELS: ClassVar[Sequence[Panel]]
    # notes on all runs under "", and notes on runs with a setting
    NOTES: ClassVar[Mapping[str, str]]
    # function that describes inputs and clock from recorded settings
    described: ClassVar[Callable[[Mapping[str, Any]], str]]

    @classmethod
    def shown(cls, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows of tables and figures: one row per attention."""
        return rows

    @classmethod
    def tables(cls, rows: Sequence[Row]) -> dict[str, str]:
        shown, made = cls.shown(rows), {}
        if cls.LONGEST_FIRST:
            most = max((row["length"] for row in shown), default=0)
            longest = [row for row in shown if row["length"] == most]
            if len(longest) < len(shown):
                made["At the longest length"] = cls.table(longest)
        made["All cases"] = cls.table(shown)
        if any(row.get("baselines") for row in rows):
            names = (*cls.DENSE, "length")
            once = [alike[0] for alike in grouped(rows, *names)]
            ways = [{name: row[name] for name in names} | row["baselines"] for row in once]
            same = [n for n in cls.ADDED if len({row.get(n) for row in rows}) == 1]
            made["Dense attention, ms"] = table(ways, same)
        return made | cls.remarks(rows)

    @classmethod
    def table(cls, rows: Sequence[Row]) -> str:
        """Return the `table` without settings that all rows share, and without remarks."""
        settings = ("op", *cls.SHAPE, *cls.ADDED)
        same = [n for n in settings if all(row.get(n) == rows[0].get(n) for row in rows)]
        # fields that distinguish rows come first
        names = dict.fromkeys(("length", *cls.BY.values(), *rows[0])) if rows else ()
        ordered = [{name: row[name] for name in names if name in row} for row in rows]
        return table(ordered, (*same, *REMARKS, *cls.HIDDEN))

    @classmethod
    def remarks(cls, rows: Sequence[Row]) -> dict[str, str]:
        """Return `remarks` by the fields that differ among rows; missing values are dashes."""
        told = {h: name for h, name in cls.BY.items() if not cls.DENSE or name in cls.DENSE}
        by = varying(rows, told)
        dashes = [{name: "–" for name in by.values() if row[name] is None} for row in rows]
        return remarks([{**row, **x} for row, x in zip(rows, dashes, strict=True)], by)

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Return sentences that the first table does not show; none by default."""
        return []

    @classmethod
    def notes(cls, settings: Mapping[str, Any]) -> str:
        texts = [text for name, text in cls.NOTES.items() if not name or settings.get(name)]
        return "\n\n".join([cls.described(settings), *texts])

    @classmethod
    def lines(cls, rows: Sequence[Row]) -> list[Row]:
        """Return rows to draw: the shown ones, and one for each dense kernel."""
        names, made = (*cls.DENSE, "length"), list(cls.shown(rows))
        for first, *_ in grouped(rows, *names) if cls.OF_DENSE else ():
            place = dict.fromkeys(cls.BY.values()) | {field: first[field] for field in names}
            for way in first.get("baselines") or ():
                values = {field: first[named].get(way) for field, named in cls.OF_DENSE.items()}
                made.append({**place, "way": way, **values})
        return made

    @classmethod
    def draw(cls, path: Path, rows: Sequence[Row]) -> None:
        """Draw the panels side by side, one row for each value of `APART`; dense lines are grey."""
        lines = cls.lines(rows)
        panels = [panel for panel in cls.PANELS if panel.shows(lines)]
        # dense kernels have no blocks and no budget: missing fields do not separate panels
        apart = varying(rows, {heading: cls.BY[heading] for heading in cls.APART})
        by = {h: name for h, name in varying(lines, cls.BY).items() if h not in cls.APART}
        groups, across = grouped(rows, *apart.values()), max(1, len(panels))
        with charts.figure(
            path, len(groups), across, figsize=(5.5 * across, 4.6 * len(groups))
        ) as (axes):
            for beside, some in zip(axes, groups, strict=True):
                lengths, drawn = [row["length"] for row in some], cls.lines(some)
                for axis, panel in zip(beside, panels, strict=False):
                    axis.set_visible(panel.shows(drawn))
                    cls.draw_lines(axis, panel, drawn, by)
                    title = ", ".join([*named(some[0], apart), panel.title])
                    charts.over_tokens(axis, lengths, title, panel.unit, log=panel.log)

    @classmethod
    def draw_lines(
        cls, axis: Any, panel: Panel, rows: Sequence[Row], by: Mapping[str, str]
    ) -> None:
        """Draw the lines of a panel by ``by``; several fields are drawn for cab alone."""
        greys, several = itertools.cycle(charts.GREYS), len(panel.fields) > 1
        for alike, field in itertools.product(grouped(rows, *by.values()), panel.fields):
            dense = "way" in cls.BY and not is_ours(alike[0][cls.BY["way"]])
            if dense and several:
                continue
            look = {"color": next(greys), "marker": "s"} if dense else {}
            label = ", ".join([*named(alike[0], by), *[heading_of(field)] * several])
            charts.line(
                axis, alike, lambda row, field=field: row.get(field), label=label or None, **look
            )


def varying(rows: Sequence[Row], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the ``columns``, heading -> field, that differ among rows."""
    return {h: name for h, name in columns.items() if len({row.get(name) for row in rows}) > 1}


def remarks(rows: Sequence[Row], by: Mapping[str, str]) -> dict[str, str]:
    """Return a table of `REMARKS` by the fields that distinguish rows besides length, or {}."""
    lengths: dict[tuple, dict[str, None]] = {}
    for (field, kind), row in itertools.product(REMARKS.items(), rows):
        said = row.get(field) or {}
        for name, text in (said if isinstance(said, Mapping) else {"": said}).items():
            what = (*(row[each] for each in by.values()), kind, text)
            lengths.setdefault((what, name), {})[f"{row['length']:,}"] = None
    # equal remarks of several names are joined
    names: dict[tuple, list[str]] = {}
    for (what, name), where in lengths.items():
        names.setdefault((*what, ", ".join(where)), []).append(name)
    headings = (*(HEADINGS.get(x, x) for x in by), "what", "reason", "tokens", "for")
    lines = [dict(zip(headings, (*k, ", ".join(of)), strict=True)) for k, of in names.items()]
    shown = headings if any(line["for"] for line in lines) else headings[:-1]
    return {"Remarks": markdown_table(lines, shown)} if lines else {}


def named(row: Row, by: Mapping[str, str]) -> list[str]:
    """Return the values that distinguish a row from others; numbers follow their headings."""
    values = {heading: row[name] for heading, name in by.items() if row[name] is not None}
    return [x if isinstance(x, str) else f"{heading} {x:g}" for heading, x in values.items()]


def heading_of(name: str) -> str:
    """Return the heading of a field."""
    return HEADINGS.get(name, name.replace("_", " ").replace("gib", "GiB"))


def is_ours(name: Any) -> bool:
    """Return True if ``name`` is a sparse attention."""
    return str(name).startswith("cab") and name != CAB_DENSE


def table(rows: Sequence[Row], hidden: Sequence[str] = ()) -> str:
    """Return numbers and names in ``rows`` without flags, one column per field with a value."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        kinds = {type(row.get(name)) for row in rows} - {type(None)}
        if name not in hidden and kinds and kinds <= {int, float, str}:
            columns[heading_of(name)] = partial(written, name)
    return markdown_table(rows, columns)


def written(name: str, row: Row) -> str | None:
    """Format the field ``name`` of a row for a table."""
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value
    if name in SHARES:
        return percent(value)
    if "over_" in name or name == "ceiling":
        return TIMES(value)
    shown = f"{value:,}" if isinstance(value, int) else digits(value)
    return f"≈ {shown}" if name == "baseline_ms" and row.get("extrapolated") else shown
