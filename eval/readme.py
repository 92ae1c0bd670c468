"""Write the pages that show results, from the committed result files.

The command writes ``README.md`` and ``picture.png`` in ``eval/results``. In ``README.md``,
``finetune/README.md`` and the pages of ``docs``, it replaces the text between ``<!-- table: NAME
-->`` and ``<!-- end -->``, where NAME is a key of `cab_hf.eval.pages.TABLES`.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cab_hf.eval import experiment, picture
from cab_hf.eval.experiment import CSV_FILE, FIGURE_FILE, REPORT_FILE, RESULTS_FILE, SAMPLES_FILE
from cab_hf.eval.pages import TABLES
from cab_hf.eval.result_folders import (
    Results,
    describe_source,
    read_all_results,
    read_results,
    uses_default_config,
)
from cab_hf.experiment.log import PACKED_SUFFIX, pack_file, write_atomically
from cab_hf.experiment.settings import comma_separated, option, read_settings

REPOSITORY_FOLDER = Path(__file__).parents[1]
# commands of experiments in the order of their sections; runs of one experiment are sorted by name
EXPERIMENT_ORDER = (
    "passkey",
    "fidelity",
    *(f"speed {op}" for op in ("ttft", "attention", "predictor", "batches", "breakdown")),
    *(f"speed {op}" for op in ("prefill", "serve", "decode", "lora", "context-parallel")),
    "families",
)
MAX_UNCOMPRESSED_BYTES = 40_000  # bytes; the command compresses a larger results.json
INTRODUCTION = f"""# Results

This page shows every committed run. Each folder is one run of an experiment:

* `{SAMPLES_FILE}` has one line per measured case. `make readme` compresses the file to \
`{PACKED_SUFFIX}`.
* `{RESULTS_FILE}` has the rows and their provenance. A run also writes the rows to `{CSV_FILE}`.
* `{FIGURE_FILE}` and `{REPORT_FILE}` show the rows.

The command below a figure repeats the run. Runs of cab_hf 0.2 selected blocks by means and bounds
of keys and by outlier queries; their lines name that version."""
MARKED_TABLE_PATTERN = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


def render_results_page(results: Path) -> str:
    """Return the content of ``eval/results/README.md``.

    Args:
        results: the folder of all results.

    Raises:
        ValueError: a folder contains no results.
    """
    sections = map(render_section, sort_by_experiment(read_all_results(results)))
    return "\n\n".join([INTRODUCTION, *sections]) + "\n"


def sort_by_experiment(results: Iterable[Results]) -> list[Results]:
    """Return ``results`` sorted by experiment, in the order of `EXPERIMENT_ORDER`, then by name."""
    return sorted(
        results,
        key=lambda result: (
            *(result.experiment_class.name != name for name in EXPERIMENT_ORDER),
            result.name,
        ),
    )


def render_section(result: Results) -> str:
    """Return the Markdown section of one result folder: table, sentences, figure and command."""
    experiment_class = result.experiment_class
    paragraphs = [
        f"## {format_heading(result)}",
        *experiment.make_summary(experiment_class, result.rows),
        f"![{experiment_class.caption}]({result.name}/{FIGURE_FILE})",
        f"{describe_source([result])} All rows: [report]({result.name}/{REPORT_FILE}).",
        experiment.format_command(experiment_class, result.provenance["settings"]),
    ]
    return "\n\n".join(paragraphs)


def format_heading(result: Results) -> str:
    """Return the title of the section of a result folder."""
    return f"{result.experiment_class.title}: {result.name}"


def update_tables(page: str, results: Path, link_prefix: str = "") -> str:
    """Return the text of a page in which the text of every marker in `TABLES` is written again.

    Args:
        page: the text of the page.
        results: the folder of all results.
        link_prefix: prefix of links to ``eval/``: the path from the folder of the page to the root
            of the repository, such as ``"../"`` for a page in ``docs``.

    Raises:
        ValueError: a marker has no end, `TABLES` lacks a table, or its results are missing.
    """

    def replace_table(marker_match: re.Match[str]) -> str:
        name = marker_match[1]
        if name not in TABLES:
            raise ValueError(f"table must be one of {', '.join(TABLES)}, got {name!r} in the page.")
        table = TABLES[name](results).replace("](eval/", f"]({link_prefix}eval/")
        return f"<!-- table: {name} -->\n{table}\n<!-- end -->"

    updated_page, num_tables = MARKED_TABLE_PATTERN.subn(replace_table, page)
    if num_tables != page.count("<!-- table: "):
        raise ValueError("each table in the page must end with <!-- end -->.")
    return updated_page


@dataclass(frozen=True)
class Settings:
    """Options of ``cab_hf.eval readme``: the paths of the pages and of the results."""

    page: str = option(str(REPOSITORY_FOLDER / "README.md"), "page whose tables are written")
    docs: str = option(str(REPOSITORY_FOLDER / "docs"), "folder of more such pages")
    training: str = option(str(REPOSITORY_FOLDER / "finetune" / "README.md"), "one more such page")
    results: str = option(str(REPOSITORY_FOLDER / "eval" / "results"), "folder of all results")
    add: tuple[str, ...] = option(
        (), "folders of your own runs, which are copied there first", comma_separated(str)
    )


def _add_run(folder: Path, results: Path, undo_stack: ExitStack) -> str:
    """Copy the files of a run from which pages are written to a new folder in ``results``.

    Args:
        folder: folder of the run.
        results: folder of all results.
        undo_stack: a stack to which a callback is added; closing the stack removes the copy.

    Returns:
        A sentence that names the page or table with the run.

    Raises:
        ValueError: the folder contains no run, or ``results`` has a folder of this name.
    """
    run = read_results(folder)
    copied_folder = results / folder.resolve().name
    if copied_folder.exists():
        raise ValueError(
            f"folder must have a new name, got {folder}, and {copied_folder} exists. Rename the "
            "folder, "
            "or remove the old results."
        )
    copied_folder.mkdir()
    undo_stack.callback(shutil.rmtree, copied_folder)
    for name in (RESULTS_FILE, SAMPLES_FILE, REPORT_FILE, FIGURE_FILE):
        for path in (folder / name, folder / (name + PACKED_SUFFIX)):
            if path.is_file():
                shutil.copy2(path, copied_folder)
    if uses_default_config(run):
        return f"{copied_folder.name} is in the table of models."
    return (
        f"{copied_folder.name} is in {results / 'README.md'}. The table of models shows only "
        "fidelity "
        "runs with the default config on a GPU."
    )


def _write_pages(settings: Settings, results: Path) -> None:
    """Write all pages; write no page if the text of a marker cannot be computed."""
    page = Path(settings.page)
    text_by_path = {
        results / "README.md": render_results_page(results),
        page: update_tables(page.read_text(), results),
    }
    for path in (*sorted(Path(settings.docs).glob("*.md")), Path(settings.training)):
        text_by_path[path] = update_tables(path.read_text(), results, link_prefix="../")
    for path, text in text_by_path.items():
        write_atomically(path, text)


def main(arguments: Sequence[str]) -> int:
    """Run the command with the options ``arguments``; return the exit status.

    The command writes all pages or none, draws the picture and compresses large files. If it writes
    no pages, it removes the copies of the runs of ``--add``.
    """
    prog = f"{experiment.PROG} readme"
    settings = read_settings(Settings, arguments, prog)
    results = Path(settings.results)
    try:
        with ExitStack() as undo_stack:
            sentences = [_add_run(Path(folder), results, undo_stack) for folder in settings.add]
            _write_pages(settings, results)
            undo_stack.pop_all()
        print("".join(f"{sentence}\n" for sentence in sentences), end="")
        picture.draw_picture(results)
        for folder in filter(Path.is_dir, results.iterdir()):
            pack_file(folder / SAMPLES_FILE)
            results_file = folder / RESULTS_FILE
            if results_file.is_file() and results_file.stat().st_size > MAX_UNCOMPRESSED_BYTES:
                pack_file(results_file)
    except (OSError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0
