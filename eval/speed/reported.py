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


class Reported:
    """Base of experiments whose rows make one table and lines over tokens.

    Attributes:
        BY: what tells rows of one length apart, heading -> field.
        PANELS: of the figure; those without a value in any row are left out.
        NOTES: text on all runs, under "", and on those that have a setting.
    """

    BY: ClassVar[Mapping[str, str]] = {}
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


def table(rows: Sequence[Row], hidden: Sequence[str] = ()) -> str:
    """Numbers and names in ``rows`` that are no flags, a column for each field with a value."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        kinds = {type(row.get(name)) for row in rows} - {type(None)}
        if name not in hidden and kinds and kinds <= {int, float, str}:
            heading = HEADINGS.get(name, name.replace("_", " ").replace("gib", "GiB"))
            columns[heading] = partial(written, name)
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
