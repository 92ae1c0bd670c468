"""Results of removed experiments; pages copy their tables and texts from the committed reports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

# command of a removed experiment -> what replaces the command
REMOVED_COMMANDS = {
    "speed batches": "`speed attention --layouts`",
    "speed breakdown": "torch.profiler",
    "speed predictor": "`speed attention`",
    "speed prefill": "`speed ttft --longest`",
}
# Patterns for paragraphs of reports by `cab_hf.eval.experiment.render_report`: the title, the
# figure, and the beginnings of the final paragraphs with config, device and command lines.
TITLE_PATTERN = re.compile(r"# (.+)")
CAPTION_PATTERN = re.compile(r"!\[(.+)\]\(\S+\)")
ORIGIN_PREFIXES = ("Config of ", "Made on ", "```")


@dataclass(frozen=True)
class ArchivedRun:
    """A replacement for the class of a removed experiment, for the results of one run.

    It has the attributes and methods of `cab_hf.eval.experiment.Experiment` that pages use. They
    return texts from the report of the run.

    Attributes:
        name: name of the removed command.
        report: content of ``report.md`` in the folder of the run.
    """

    name: str
    report: str

    ADDED_DEFAULTS: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def read(cls, name: str, path: Path) -> ArchivedRun:
        """Read a report, and return the replacement for the experiment that wrote it.

        Args:
            name: name of the removed command.
            path: path of ``report.md``.

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
        return TITLE_PATTERN.match(self.report)[1]

    @property
    def caption(self) -> str:
        return CAPTION_PATTERN.search(self.report)[1]

    @property
    def command(self) -> str:
        """The command lines of the run, as Markdown code."""
        return self._report_paragraphs[-1]

    @property
    def _report_paragraphs(self) -> list[str]:
        return self.report.strip().split("\n\n")

    @property
    def _figure_paragraph_index(self) -> int:
        """The index in `_report_paragraphs` of the paragraph that shows the figure."""
        return next(
            paragraph_index
            for paragraph_index, paragraph in enumerate(self._report_paragraphs)
            if CAPTION_PATTERN.match(paragraph)
        )

    def tables(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return heading -> Markdown table, in the order of the report.

        ``rows`` is ignored: the report contains the tables.
        """
        paragraphs, tables = self._report_paragraphs, {}
        for heading, paragraph_after in zip(paragraphs, paragraphs[1:], strict=False):
            if paragraph_after.startswith("|"):
                tables[heading.lstrip("# ")] = paragraph_after
        return tables

    def summary_sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the sentences between the first table and the figure; ``rows`` is ignored."""
        return self._report_paragraphs[2 : self._figure_paragraph_index]

    def notes(self, settings: Mapping[str, Any]) -> str:
        """Return the paragraphs after figure and tables, without config, device and command lines.

        ``settings`` is ignored.
        """
        paragraphs = self._report_paragraphs
        table_indices = [
            paragraph_index
            for paragraph_index, paragraph in enumerate(paragraphs)
            if paragraph.startswith("|")
        ]
        final_paragraphs = paragraphs[max([self._figure_paragraph_index, *table_indices]) + 1 :]
        return "\n\n".join(
            paragraph for paragraph in final_paragraphs if not paragraph.startswith(ORIGIN_PREFIXES)
        )
