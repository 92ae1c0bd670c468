"""What ops on a whole model report: a table of all cases, notes, and lines over tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import digits, grouped, markdown_table, percent
from cab_hf.eval.speed import base
from cab_hf.eval.speed.model import CAB_DENSE, TIMES, described

HEADINGS = {
    **{"length": "tokens", "implementation": "way", "world": "ranks", "ceiling": "at most"},
    **{"tokens": "tokens in all", "tokens_s": "tokens/s", "gb_s": "GB/s", "tflops": "TFLOP/s"},
    **{"prompt_tokens_s": "prompt tokens/s", "output_tokens_s": "output tokens/s"},
    **{"cab_dense": "cab_dense", "peak_mib": "peak MiB"},
}
SHARES = ("efficiency", "of_bandwidth", "gap", "density", "mass")


class Panel(NamedTuple):
    """A panel of a figure over tokens, with a line for each of ``fields``."""

    title: str
    unit: str
    fields: tuple[str, ...]
    log: bool = True

    def shows(self, rows: Sequence[Row]) -> bool:
        """Whether any row has a value for it."""
        return any(row[field] is not None for row in rows for field in self.fields)


class Reported:
    """Base of experiments whose rows make one table and lines over tokens.

    Attributes:
        BY: what tells rows of one length apart, heading -> field; "way" is how they attend.
        APART: headings of those whose values have panels of their own.
        PANELS: of the figure; those without a value in any row are left out.
        NOTES: text on all runs, under "", and on those that have a setting.
    """

    BY: ClassVar[Mapping[str, str]] = {}
    APART: ClassVar[Sequence[str]] = ()
    PANELS: ClassVar[Sequence[Panel]]
    NOTES: ClassVar[Mapping[str, str]]

    @classmethod
    def tables(cls, rows: Sequence[Row]) -> dict[str, str]:
        return {"All cases": cls.table(rows), **cls.remarks(rows)}

    @classmethod
    def table(cls, rows: Sequence[Row]) -> str:
        """`table` without settings that all rows share, and without what is a remark."""
        settings = ("op", *cls.SHAPE, *cls.ADDED)
        same = [name for name in settings if len({row.get(name) for row in rows}) < 2]
        # what tells rows apart comes first
        names = dict.fromkeys(("length", *cls.BY.values(), *rows[0])) if rows else ()
        ordered = [{name: row[name] for name in names if name in row} for row in rows]
        return table(ordered, (*same, *base.REMARKS))

    @classmethod
    def remarks(cls, rows: Sequence[Row]) -> dict[str, str]:
        """`base.remarks`, by what differs among rows; what there is not is a dash, as in tables."""
        by = base.varying(rows, cls.BY)
        dashes = [{name: "–" for name in by.values() if row[name] is None} for row in rows]
        return base.remarks([{**row, **x} for row, x in zip(rows, dashes, strict=True)], by)

    @classmethod
    def notes(cls, settings: Mapping[str, Any]) -> str:
        texts = [text for name, text in cls.NOTES.items() if not name or settings.get(name)]
        return "\n\n".join([described(settings), *texts])

    @classmethod
    def draw(cls, path: Path, rows: Sequence[Row]) -> None:
        """The panels side by side, a line of them for each of `APART`; dense ways are grey."""
        panels = [panel for panel in cls.PANELS if panel.shows(rows)]
        by = base.varying(rows, cls.BY)
        apart = {heading: by.pop(heading) for heading in cls.APART if heading in by}
        groups, across = grouped(rows, *apart.values()), max(1, len(panels))
        with charts.figure(
            path, len(groups), across, figsize=(5.5 * across, 4.6 * len(groups))
        ) as (axes):
            for beside, some in zip(axes, groups, strict=True):
                lengths = [row["length"] for row in some]
                for axis, panel in zip(beside, panels, strict=False):
                    axis.set_visible(panel.shows(some))
                    cls.draw_lines(axis, panel, some, by)
                    title = ", ".join([*named(some[0], apart), panel.title])
                    charts.over_tokens(axis, lengths, title, panel.unit, log=panel.log)

    @classmethod
    def draw_lines(
        cls, axis: Any, panel: Panel, rows: Sequence[Row], by: Mapping[str, str]
    ) -> None:
        """The lines of a panel, told apart by ``by``; of several fields those of cab alone."""
        greys, several = itertools.cycle(charts.GREYS), len(panel.fields) > 1
        for alike, field in itertools.product(grouped(rows, *by.values()), panel.fields):
            dense = "way" in cls.BY and not is_ours(alike[0][cls.BY["way"]])
            if dense and several:
                continue
            look = {"color": next(greys), "marker": "s"} if dense else {}
            label = ", ".join([*named(alike[0], by), *[heading_of(field)] * several])
            charts.line(axis, alike, itemgetter(field), label=label or None, **look)


def named(row: Row, by: Mapping[str, str]) -> list[str]:
    """What tells a row from others, numbers behind their headings."""
    values = {heading: row[name] for heading, name in by.items() if row[name] is not None}
    return [x if isinstance(x, str) else f"{heading} {x:g}" for heading, x in values.items()]


def heading_of(name: str) -> str:
    """A field as people read it."""
    return HEADINGS.get(name, name.replace("_", " ").replace("gib", "GiB"))


def is_ours(name: Any) -> bool:
    """Whether ``name`` is that of a way to attend sparsely."""
    return str(name).startswith("cab") and name != CAB_DENSE


def table(rows: Sequence[Row], hidden: Sequence[str] = ()) -> str:
    """Numbers and names in ``rows`` that are no flags, a column for each field with a value."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        kinds = {type(row.get(name)) for row in rows} - {type(None)}
        if name not in hidden and kinds and kinds <= {int, float, str}:
            columns[heading_of(name)] = partial(written, name)
    return markdown_table(rows, columns)


def written(name: str, row: Row) -> str | None:
    """The field ``name`` of a row as a table shows it."""
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value
    if name in SHARES:
        return percent(value)
    if "over_" in name or name == "ceiling":
        return TIMES(value)
    return f"{value:,}" if isinstance(value, int) else digits(value)
