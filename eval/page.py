"""Write one HTML page of result folders: sortable tables, figures and commands, no network.

The parts are those of ``eval/results/README.md`` and ``report.md``. The page contains its style,
its script and its figures. Its content security policy allows a browser to load nothing else.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from string import Template

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token

from cab_hf.eval import experiment
from cab_hf.eval.experiment import FIGURE, PROG, RESULTS
from cab_hf.eval.readme import heading, in_order
from cab_hf.eval.result_folders import Results, read_results, source
from cab_hf.experiment.log import is_there, write_atomically, writing
from cab_hf.experiment.settings import (
    UsageError,
    first_line,
    operands,
    option,
    read_settings,
    refused_as,
)

PAGE = "index.html"
PNG = b"\x89PNG\r\n\x1a\n"
MISSING = ("", "–")
LONG = 30  # letters of a cell that may wrap
Cell = tuple[Token, str]  # with its text
UNITS = {"": 1, "k": 2**10, "M": 2**20}
# × 1.10, 2.19×, 10.1 %, 131,072, 64k, 1e-06, 92 of 100, 0.90 [0.83, 0.94], 62.2 (0 + 62.2)
NUMBER = re.compile(
    r"×?\s*([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?)([kM]?)"
    r"(?: of (\d+)| ?[%×])?(?=$|,?\s)"
)


@dataclass(frozen=True)
class Settings:
    """The result folders, and the folder of the page."""

    folders: tuple[str, ...] = operands("a folder of results, or a folder of such folders")
    out: str = option("report", "folder for the page")


def main(words: Sequence[str]) -> int:
    """Write the page of the folders in ``words`` of a command line; return the exit status."""
    purpose = "write one HTML page of result folders, which needs no network"
    settings = read_settings(Settings, words, f"{PROG} report", purpose)
    results = read_all(list(map(Path, settings.folders)))
    out = Path(settings.out)
    made = page(results)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / PAGE, made)
    print(f"report: {out / PAGE}")
    return 0


def read_all(given: Sequence[Path]) -> list[Results]:
    """Read the folders in the order of the page, each under its own name.

    Raises:
        UsageError: there are no folders, or one of them contains no results.
    """
    folders = {each.resolve(): each for folder in given for each in _folders_in(folder)}.values()
    if not folders:
        raise UsageError(
            "folders must be result folders, got none. Give some, such as eval/results."
        )
    results = []
    for folder in folders:
        with refused_as(partial(_refusal, folder)):
            results.append(read_results(folder))
    names = Counter(each.name for each in results)
    return in_order(
        replace(each, name=str(each.folder)) if names[each.name] > 1 else each for each in results
    )


def _folders_in(folder: Path) -> list[Path]:
    """Return ``folder`` itself, or its subfolders if it contains folders and no results."""
    if is_there(folder / RESULTS) or not folder.is_dir():
        return [folder]
    return sorted(filter(Path.is_dir, folder.iterdir())) or [folder]


def _refusal(folder: Path, error: Exception) -> str:
    """Return an error about ``folder``; errors of other libraries include their class."""
    what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{folder} cannot be shown: {what}{first_line(error)}."


def page(results: Sequence[Results]) -> str:
    """Return the page as HTML.

    Raises:
        UsageError: the content of a folder cannot be shown.
    """
    sections = []
    for result in results:
        with refused_as(partial(_refusal, result.folder)):
            sections.append(_section(result))
    text, style, script = (
        Path(__file__).with_name(f"page.{kind}").read_text() for kind in ("html", "css", "js")
    )
    return Template(text).substitute(
        style=style,
        script=script,
        contents=_contents(results),
        sections="\n".join(sections),
    )


def _contents(results: Sequence[Results]) -> str:
    """Return links to all sections, below the titles of their experiments."""
    groups: dict[str, list[Results]] = {}
    for each in results:
        groups.setdefault(each.kind.title, []).append(each)
    lines = []
    for title, alike in groups.items():
        lines.append(f"<li>{_inline(title)}\n<ul>")
        for each in alike:
            lines.append(f'<li><a href="#{_anchor(each)}">{escape(each.name)}</a></li>')
        lines.append("</ul></li>")
    return "\n".join(lines)


def _anchor(result: Results) -> str:
    return re.sub(r"[^\w.-]+", "-", result.name)


def _section(result: Results) -> str:
    kind, made, anchor = result.kind, result.provenance, _anchor(result)
    (_, first), *others = kind.tables(result.rows).items()
    origin = [f"{experiment.made_on(made)}.", *experiment.configs(made["settings"])]
    folded = {**dict(others), **experiment.unmeasured(made), "Notes": kind.notes(made["settings"])}
    folded["Versions and config"] = "\n\n".join(origin)
    parts = [
        f'<section id="{anchor}">',
        f'<h2><a href="#{anchor}">{_inline(heading(result))}</a></h2>',
        f'<p class="source">{escape(source([result]))} Folder <code>{escape(result.name)}</code>. '
        '<a href="#top">Contents</a></p>',
        *map(_blocks, [first, *kind.readings(result.rows), *made.get("repeated", ())]),
        _figure(result),
        *(
            f"<details>\n<summary>{_inline(name)}</summary>\n{_blocks(text)}</details>"
            for name, text in folded.items()
        ),
        "</section>",
    ]
    return "\n".join(parts)


def _figure(result: Results) -> str:
    """Return the figure as part of the page, with its command."""
    picture = (result.folder / FIGURE).read_bytes()
    if not picture.startswith(PNG):
        raise ValueError(f"{FIGURE} is no PNG")
    data = base64.b64encode(picture).decode()
    caption = result.kind.caption
    command = experiment.command(result.kind, result.provenance["settings"])
    return (
        f'<figure>\n<img alt="{escape(caption)}" src="data:image/png;base64,{data}">\n'
        f"<figcaption>{_inline(caption)}\n{_blocks(command)}</figcaption>\n</figure>"
    )


def value(text: str) -> float | None:
    """Return the number at the start of a cell, or a share such as ``92 of 100``; else None."""
    match = NUMBER.match(text.strip())
    if not match:
        return None
    number, unit, of = match.groups()
    return float(number.replace(",", "")) * UNITS[unit] / (int(of or 0) or 1)


def _give_values(state: StateCore) -> None:
    """Mark columns of numbers, and give their cells the ``data-value`` that the script sorts by."""
    rows: list[list[Cell]] = []
    for token, content in zip(state.tokens, [*state.tokens[1:], None], strict=True):
        if token.type == "tr_open":
            rows.append([])
        elif token.type in ("th_open", "td_open"):
            rows[-1].append((token, "".join(child.content for child in content.children)))
        elif token.type == "table_close":
            for column in zip(*rows, strict=True):
                _give_value(column)
            rows = []


def _give_value(column: Sequence[Cell]) -> None:
    """Mark a column, heading first, as numeric if most of its cells are numbers."""
    cells = [(token, value(text)) for token, text in column[1:] if text.strip() not in MISSING]
    numbers = [(token, number) for token, number in cells if number is not None]
    for token, number in numbers:
        token.attrSet("data-value", f"{number:.12g}")
    for token, text in column:
        if 2 * len(numbers) > len(cells):
            token.attrSet("class", "number")
        elif len(text) > LONG:
            token.attrSet("class", "words")


def _code(tokens: Sequence[Token], place: int, *_: object) -> str:
    """Return a block of code in which lines break between words."""
    lines = (line.split(" ") for line in tokens[place].content.splitlines())
    marked = (" ".join(f"<span>{escape(word)}</span>" for word in words) for words in lines)
    return "<pre><code>" + "\n".join(marked) + "</code></pre>\n"


def _markdown() -> MarkdownIt:
    """Return a CommonMark parser: tables scroll, tags become text, pictures become links."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    parser.core.ruler.push("values", _give_values)
    parser.renderer.rules |= {
        "fence": _code,
        "table_open": lambda *_: '<div class="table" tabindex="0">\n<table>\n',
        "table_close": lambda *_: "</table>\n</div>\n",
    }
    return parser


_MARKDOWN = _markdown()
_blocks, _inline = _MARKDOWN.render, _MARKDOWN.renderInline
