"""Results of removed experiments. Pages show them as their committed reports do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

# removed experiment -> its replacement
ARCHIVED = {
    "speed batches": "`speed attention --layouts`",
    "speed breakdown": "torch.profiler",
    "speed predictor": "`speed attention`",
    "speed prefill": "`speed ttft --longest`",
}
# the parts of a report that `cab_hf.eval.experiment.report_text` writes around its tables
TITLE = re.compile(r"# (.+)")
CAPTION = re.compile(r"!\[(.+)\]\(\S+\)")
ORIGIN = ("Config of ", "Made on ", "```")


@dataclass(frozen=True)
class Archived:
    """A removed experiment, with the text that its committed report has about one run.

    The attributes and methods are those that pages use of `cab_hf.eval.experiment.Experiment`.

    Attributes:
        name: name of the removed command.
        report: content of ``report.md`` in the folder of the run.
    """

    name: str
    report: str

    ADDED: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def read(cls, name: str, path: Path) -> Archived:
        """Read the report at ``path``.

        Raises:
            ValueError: the report is missing.
        """
        if not path.is_file():
            raise ValueError(
                f"{path.parent} must have a {path.name}, because {name!r} was removed, got none. "
                "Restore the file or remove the folder."
            )
        return cls(name, path.read_text())

    @property
    def title(self) -> str:
        return TITLE.match(self.report)[1]

    @property
    def caption(self) -> str:
        return CAPTION.search(self.report)[1]

    @property
    def command(self) -> str:
        """The command lines of the run, as Markdown code."""
        return self._parts[-1]

    @property
    def _parts(self) -> list[str]:
        return self.report.strip().split("\n\n")

    @property
    def _place_of_figure(self) -> int:
        return next(i for i, part in enumerate(self._parts) if CAPTION.match(part))

    def tables(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the tables of the report by heading; the first is the most important."""
        parts, tables = self._parts, {}
        for heading, table in zip(parts, parts[1:], strict=False):
            if table.startswith("|"):
                tables[heading.lstrip("# ")] = table
        return tables

    def readings(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the sentences between the first table and the figure."""
        return self._parts[2 : self._place_of_figure]

    def notes(self, settings: Mapping[str, Any]) -> str:
        """Return the explanations after the last table."""
        parts = self._parts
        tables = [i for i, part in enumerate(parts) if part.startswith("|")]
        notes = parts[max(self._place_of_figure, *tables) + 1 :]
        return "\n\n".join(part for part in notes if not part.startswith(ORIGIN))
