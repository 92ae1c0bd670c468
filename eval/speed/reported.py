"""What ops on a whole model report: a table of all cases, notes, and lines over tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import grouped, markdown_table
from cab_hf.eval.speed import base
from cab_hf.eval.speed.model import CAB_DENSE, described


class Panel(NamedTuple):
    """A panel of a figure over tokens, with a line for each of ``fields``."""

    title: str
    unit: str
    fields: tuple[str, ...]
    log: bool = True


class Reported:
    """Base of experiments whose rows make one table and lines over tokens.

    Attributes:
        BY: what tells rows of one length apart, heading -> field.
        COLUMNS: of the table; those without a value in any row are left out.
        PANELS: of the figure; those without a value in any row are left out.
        NOTES: text on all runs, under "", and on those that have a setting.
    """

    BY: ClassVar[Mapping[str, str]] = {}
    COLUMNS: ClassVar[Mapping[str, Any]]
    PANELS: ClassVar[Sequence[Panel]]
    NOTES: ClassVar[Mapping[str, str]]

    @classmethod
    def tables(cls, rows: Sequence[Row]) -> dict[str, str]:
        return {"All cases": table(rows, cls.COLUMNS), **cls.remarks(rows)}

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
        """The panels side by side; what attends densely is grey."""
        panels = [
            panel
            for panel in cls.PANELS
            if any(row[field] is not None for row in rows for field in panel.fields)
        ]
        across, lengths = max(1, len(panels)), [row["length"] for row in rows]
        with charts.figure(path, 1, across, figsize=(5.5 * across, 4.6)) as axes:
            for axis, panel in zip(axes[0], panels, strict=False):
                greys = itertools.cycle(charts.GREYS)
                for alike, field in itertools.product(
                    grouped(rows, *cls.BY.values()), panel.fields
                ):
                    names = [alike[0][name] for name in cls.BY.values()]
                    names += [field] if len(panel.fields) > 1 else []
                    dense = cls.BY and not any(map(is_ours, names))
                    look = {"color": next(greys), "marker": "s"} if dense else {}
                    label = ", ".join(str(name) for name in names if name is not None)
                    charts.line(axis, alike, itemgetter(field), label=label, **look)
                charts.over_tokens(axis, lengths, panel.title, panel.unit, log=panel.log)


def is_ours(name: Any) -> bool:
    """Whether ``name`` is that of a way to attend sparsely."""
    return str(name).startswith("cab") and name != CAB_DENSE


def table(rows: Sequence[Row], columns: Mapping[str, Any]) -> str:
    """`markdown_table` of those ``columns`` that have a value in any row."""
    gets = {name: get if callable(get) else itemgetter(get) for name, get in columns.items()}
    kept = {name: get for name, get in gets.items() if any(get(row) is not None for row in rows)}
    return markdown_table(rows, kept)
