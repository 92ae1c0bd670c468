"""The tables of README.md, written from the results they show.

A table stands between ``<!-- results: FOLDER -->`` and ``<!-- end -->``, FOLDER being a folder of
``eval/results``. Nothing between the two is typed by hand. A folder is read by the command it is
named after, and by ``passkey`` where it is named after none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cab_hf.eval import speed
from cab_hf.eval.bridges import Bridges
from cab_hf.eval.passkey import Passkey
from cab_hf.runs.log import write_atomically
from cab_hf.runs.settings import option, read_settings

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Settings:
    """Where the page is."""

    page: str = option(str(ROOT / "README.md"), "the file whose tables are written")


def render(page: str, results: Path) -> str:
    """``page`` with every table made anew; FileNotFoundError for a folder without results."""

    def table(place: re.Match[str]) -> str:
        folder = results / place[2]
        content = json.loads((folder / "results.json").read_text())
        rows, made = content["rows"], content["provenance"]
        shown, sentences = _read(place[2], rows)
        said = "\n".join(f"* {sentence}" for sentence in sentences)
        source = (
            f"{made['device']}, torch {made['versions']['torch']}, commit {made['commit'][:7]}; "
            f"rows and figure in [eval/results/{place[2]}](eval/results/{place[2]})."
        )
        return f"{place[1]}{shown}\n\n{said}\n\n{source}\n{place[3]}"

    return PLACE.sub(table, page)


def _read(folder: str, rows: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """(table, sentences) of the rows of a folder of results."""
    if folder.startswith("bridges"):
        return next(iter(Bridges.tables(rows).values())), Bridges.readings(rows)
    for name, op in speed.OPS.items():
        if folder.startswith(f"speed-{name}"):
            return op.overview(rows), op.readings(rows)
    return next(iter(Passkey.tables(rows).values())), Passkey.readings(rows)


def main(words: Sequence[str]) -> int:
    """Write the tables of the page anew."""
    page = Path(read_settings(Settings, words, "python -m cab_hf.eval readme").page)
    write_atomically(page, render(page.read_text(), ROOT / "eval" / "results"))
    return 0
