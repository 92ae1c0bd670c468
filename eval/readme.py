"""The pages that show results, written from the files of results alone.

``eval/results/README.md`` and the figure ``default.png`` beside it are written as they are; in
``README.md``, ``finetune/README.md`` and the pages of ``docs`` only what is between
``<!-- table: NAME -->`` and ``<!-- end -->``, for every NAME of `cab_hf.eval.tables.TABLES`.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cab_hf.eval import charts, experiment
from cab_hf.eval.experiment import CSV, FIGURE, REPORT, RESULTS, SAMPLES
from cab_hf.eval.tables import (
    TABLES,
    Results,
    all_results,
    by_default,
    read_results,
    source,
    value_at,
)
from cab_hf.runs.log import PACKED, pack, write_atomically
from cab_hf.runs.settings import comma_separated, option, read_settings

ROOT = Path(__file__).parents[1]
# experiments in the order of the page; runs of one experiment by name
ORDER = (
    "passkey",
    "fidelity",
    *(f"speed {op}" for op in ("ttft", "attention", "predictor", "batches", "breakdown")),
    *(f"speed {op}" for op in ("prefill", "serve", "decode", "lora", "context-parallel")),
    "families",
)
DEFAULT_FIGURE = "default.png"
QUALITY = {
    "recall": "in-text recall",
    "recall_border": "block-start recall",
    "perplexity_border": "block-start perplexity (less is better)",
}
# bytes of rows from which they are packed, too
LARGE_RESULTS = 40_000
INTRODUCTION = f"""# Results

Each folder is one run of an experiment: `{SAMPLES}`, what was measured, a case a line, here packed
as `{PACKED}`; `{RESULTS}`, the rows derived from it and where they come from (a run writes them as
`{CSV}` too); `{FIGURE}`; and `{REPORT}`, all of this to be read. The command below a figure
measures it anew, on the device named beside it; this page is written, and samples (and rows, where
they are many) are packed, by `make readme`. Up to cab_hf 0.2, the default chose blocks by means and
bounds of keys and by outlier queries: what names that version was measured so."""
PLACE = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


def results_page(results: Path) -> str:
    """Return the page of all folders in ``results``; ValueError as in `read_results`."""
    shown = in_order(all_results(results))
    return "\n\n".join([INTRODUCTION, *map(section, shown)]) + "\n"


def in_order(results: Iterable[Results]) -> list[Results]:
    """Return results in the order of pages: by `ORDER`, then by name."""
    return sorted(results, key=lambda each: (*(each.kind.name != x for x in ORDER), each.name))


def section(result: Results) -> str:
    """Return the section of one folder: table, sentences, figure and command."""
    kind = result.kind
    parts = [
        f"## {heading(result)}",
        *experiment.summary(kind, result.rows),
        f"![{kind.caption}]({result.name}/{FIGURE})",
        f"{source([result])}; [its report]({result.name}/{REPORT}) has all of it.",
        experiment.command(kind, result.provenance["settings"]),
    ]
    return "\n\n".join(parts)


def heading(result: Results) -> str:
    """Return the title of a section."""
    return f"{result.kind.title}: {result.name}"


def draw_default(results: Path) -> None:
    """Draw the table of the default: seconds to the first token, and quality over dense."""
    table = TABLES["default"]
    rows = table.rows(table.read(results))
    lengths = [row["length"] for row in rows]
    with charts.figure(results / DEFAULT_FIGURE, 1, 2, figsize=(9, 3.6)) as ((left, right),):
        for colour, label, field in (
            ("black", "fastest dense attention", "baseline_ms"),
            ("C3", "CAB", "ms"),
        ):
            times = [row["first_token"] for row in rows]
            look = {"color": colour, "label": label}
            charts.line(left, times, lambda row, field=field: row[field] / 1000, **look)
        for row in times:
            place, text = (row["length"], row["ms"] / 1000), f"× {row['over_best']:.2f}"
            left.annotate(text, place, xytext=(4, -12), textcoords="offset points", fontsize=8)
        charts.over_tokens(left, lengths, "time to the first token, LLaMA-3-8B shape", "s")
        for colour, (probe, label) in enumerate(QUALITY.items()):
            look = {"color": f"C{colour}", "label": label}
            charts.line(right, rows, partial(value_at, f"cab.{probe}.ratio"), **look)
        right.axhline(1, color="black", linestyle="--", label="dense attention")
        shown = [row["length"] for row in rows if "cab" in row]
        charts.over_tokens(right, shown, "same settings, SmolLM2: over dense", "×", log=False)
        right.set_ylim(0.8, 1.2)


def page_with_tables(page: str, results: Path, up: str = "") -> str:
    """Return ``page`` with its tables written again.

    Args:
        page: the text of the page.
        results: the folder of all results.
        up: path from the folder of the page to the root, ``"../"`` for a page one folder down.

    Raises:
        ValueError: a marker has no end, `TABLES` lacks a table, or its results are missing.
    """

    def written(place: re.Match[str]) -> str:
        name = place[1]
        if name not in TABLES:
            raise ValueError(f"table must be one of {', '.join(TABLES)}, got {name!r} in the page.")
        table = TABLES[name](results).replace("](eval/", f"]({up}eval/")
        return f"<!-- table: {name} -->\n{table}\n<!-- end -->"

    made, count = PLACE.subn(written, page)
    if count != page.count("<!-- table: "):
        raise ValueError("each table in the page must end with <!-- end -->.")
    return made


@dataclass(frozen=True)
class Settings:
    """The paths of the pages; the README.md in the folder of results shows all results."""

    page: str = option(str(ROOT / "README.md"), "page whose tables are written")
    docs: str = option(str(ROOT / "docs"), "folder of more such pages")
    training: str = option(str(ROOT / "finetune" / "README.md"), "one more such page")
    results: str = option(str(ROOT / "eval" / "results"), "folder of all results")
    add: tuple[str, ...] = option(
        (), "folders of your own runs, which are copied there first", comma_separated(str)
    )


def _add(folder: Path, results: Path, undo: ExitStack) -> str:
    """Copy the parts of a run that pages show to ``results``; return a sentence about its table.

    The copy is removed on ``undo``.

    Raises:
        ValueError: the folder contains no run, or its name is taken.
    """
    run = read_results(folder)
    target = results / folder.resolve().name
    if target.exists():
        raise ValueError(
            f"folder must have a new name, got {folder}, and {target} exists. Rename the folder, "
            "or remove the old results."
        )
    target.mkdir()
    undo.callback(shutil.rmtree, target)
    for name in (RESULTS, SAMPLES, REPORT, FIGURE):
        for path in (folder / name, folder / (name + PACKED)):
            if path.is_file():
                shutil.copy2(path, target)
    if by_default(run):
        return f"{target.name} is in the table of models."
    return (
        f"{target.name} is in {results / 'README.md'}. The table of models shows only fidelity "
        "runs with the default config on a GPU."
    )


def _write_pages(settings: Settings, results: Path) -> None:
    """Write all pages, or none."""
    page, made = Path(settings.page), partial(page_with_tables, results=results)
    pages = {results / "README.md": results_page(results), page: made(page.read_text())}
    for path in (*sorted(Path(settings.docs).glob("*.md")), Path(settings.training)):
        pages[path] = made(path.read_text(), up="../")
    for path, text in pages.items():
        write_atomically(path, text)


def main(words: Sequence[str]) -> int:
    """Write all pages, or none, and compress the samples; return the exit status.

    Runs given by ``--add`` are added only if all pages are written.
    """
    prog = f"{experiment.PROG} readme"
    settings = read_settings(Settings, words, prog)
    results = Path(settings.results)
    try:
        with ExitStack() as undo:
            said = [_add(Path(folder), results, undo) for folder in settings.add]
            _write_pages(settings, results)
            undo.pop_all()
        print("".join(f"{each}\n" for each in said), end="")
        draw_default(results)
        for folder in filter(Path.is_dir, results.iterdir()):
            pack(folder / SAMPLES)
            result = folder / RESULTS
            if result.is_file() and result.stat().st_size > LARGE_RESULTS:
                pack(result)
    except (OSError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0
