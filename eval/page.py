"""Write one HTML page of result folders: tables, figures and commands, no network.

The section of a folder has the content of its section in ``eval/results/README.md`` and of its
``report.md``. The page contains its style sheet and its figures. Its content security policy
forbids the browser to load other files.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markupsafe import Markup

from cab_hf.eval import experiment
from cab_hf.eval.experiment import FIGURE_FILE, PROG, RESULTS_FILE
from cab_hf.eval.readme import format_heading, sort_by_experiment
from cab_hf.eval.result_folders import Results, describe_source, read_results
from cab_hf.experiment.log import convert_write_errors, file_exists, write_atomically
from cab_hf.experiment.settings import (
    UsageError,
    convert_errors,
    first_line,
    operands,
    option,
    read_settings,
)

PAGE_FILE = "index.html"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Settings:
    """Options of ``cab_hf.eval report``."""

    folders: tuple[str, ...] = operands("a folder of results, or a folder of such folders")
    out: str = option("report", "folder for the page")


def main(arguments: Sequence[str]) -> int:
    """Run the command with the options ``arguments``; return the exit status."""
    purpose = "write one HTML page of result folders, which needs no network"
    settings = read_settings(Settings, arguments, f"{PROG} report", purpose)
    results = read_folders(list(map(Path, settings.folders)))
    out = Path(settings.out)
    html = render_page(results)
    with convert_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / PAGE_FILE, html)
    print(f"report: {out / PAGE_FILE}")
    return 0


def read_folders(paths: Sequence[Path]) -> list[Results]:
    """Read result folders, and return their contents in the order of the page.

    If several folders have the same name, their path replaces the name.

    Args:
        paths: folders of results, and folders that contain such folders.

    Raises:
        UsageError: there are no folders, or a folder contains no results.
    """
    folder_by_resolved_path = {
        folder.resolve(): folder for path in paths for folder in _list_folders(path)
    }
    folders = folder_by_resolved_path.values()
    if not folders:
        raise UsageError(
            "folders must be result folders, got none. Give some, such as eval/results."
        )
    results = []
    for folder in folders:
        with convert_errors(partial(_describe_refusal, folder)):
            results.append(read_results(folder))
    name_counts = Counter(result.name for result in results)
    return sort_by_experiment(
        replace(result, name=str(result.folder)) if name_counts[result.name] > 1 else result
        for result in results
    )


def _list_folders(folder: Path) -> list[Path]:
    """Return the subfolders of ``folder``; ``[folder]`` if it has results or no subfolders."""
    if file_exists(folder / RESULTS_FILE) or not folder.is_dir():
        return [folder]
    return sorted(filter(Path.is_dir, folder.iterdir())) or [folder]


def _describe_refusal(folder: Path, error: Exception) -> str:
    """Return the message that ``folder`` cannot be shown, with the reason from ``error``.

    The class of the error is part of the message unless it is a ValueError.
    """
    error_class_prefix = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{folder} cannot be shown: {error_class_prefix}{first_line(error)}."


def render_page(results: Sequence[Results]) -> str:
    """Return an HTML page with the tables and sentences of ``results``.

    Raises:
        UsageError: a report cannot be written from the results of a folder.
    """
    sections = []
    for result in results:
        with convert_errors(partial(_describe_refusal, result.folder)):
            sections.append(_make_section(result))
    # escape HTML in names and results, and show pictures as links, because the page loads no files
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["markdown"] = lambda text: Markup(markdown.render(text))
    environment.filters["inline"] = lambda text: Markup(markdown.renderInline(text))
    return environment.get_template("page.html").render(sections=sections)


def _make_section(result: Results) -> dict[str, Any]:
    """Return the variables with which `page.html` renders the section of a result folder."""
    experiment_class, provenance = result.experiment_class, result.provenance
    (_, first_table), *other_tables = experiment_class.tables(result.rows).items()
    origin_sentences = [
        f"{experiment.describe_run(provenance)}.",
        *experiment.describe_configs(provenance["settings"]),
    ]
    figure = (result.folder / FIGURE_FILE).read_bytes()
    if not figure.startswith(PNG_SIGNATURE):
        raise ValueError(f"{FIGURE_FILE} is no PNG")
    return {
        "name": result.name,
        "experiment_class": experiment_class,
        "anchor": re.sub(r"[^\w.-]+", "-", result.name),
        "heading": format_heading(result),
        "source": describe_source([result]),
        "table": first_table,
        "sentences": [
            *experiment_class.summary_sentences(result.rows),
            *provenance.get("repeated", ()),
        ],
        "figure": base64.b64encode(figure).decode(),
        "command": experiment.format_command(experiment_class, provenance["settings"]),
        "folded": {
            **dict(other_tables),
            **experiment.make_failed_table(provenance),
            "Notes": experiment_class.notes(provenance["settings"]),
            "Versions and config": "\n\n".join(origin_sentences),
        },
    }
