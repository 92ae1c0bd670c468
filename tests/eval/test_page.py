"""The page of results for a browser: what is on it, that it is complete in itself, what sorts."""

import base64
import json
import re
import shutil
from html import unescape
from pathlib import Path

import browser
import pytest

from cab_hf.eval import __main__, charts, experiment, page, readme, report, tables
from cab_hf.eval.passkey import Passkey
from cab_hf.eval.report import markdown_table

RESULTS = Path(__file__).parents[2] / "eval" / "results"
# the figure apart
GOLDEN = Path(__file__).with_name("section.html")
HOSTILE = 'a <b>, c & d | "e" <script>alert(1)</script> ![x](https://host/x.png)'


def found(pattern, text):
    """What the groups of a pattern hold, as text."""
    return [unescape(each) for each in re.findall(pattern, text, re.DOTALL)]


class Told(Passkey):
    """What is given to it, as tables and sentences."""

    title, caption = "Told <i>", "seen & <drawn>"

    @staticmethod
    def tables(rows):
        first = markdown_table(rows, ["name", "value"])
        return {"First": first, "Others & more": markdown_table(rows, ["value"])}

    @staticmethod
    def readings(rows):
        return [f"It says {HOSTILE}.", "No more."]

    @staticmethod
    def notes(settings):
        return "What *value* means.\n\nNothing < 3."


def write(folder, rows, **made):
    """A folder of results, with a figure."""
    folder.mkdir(parents=True)
    made = {
        **{"experiment": "passkey", "device": "a GPU", "commit": "0123456789"},
        **{"versions": {"torch": "2"}, "finished": "today", "settings": {"keys": 4}},
        **made,
    }
    report.write_results(folder, rows, made)
    with charts.figure(folder / "figure.png", 1, 1, figsize=(1, 1)):
        pass


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "kind_of", lambda made, _: Told)
    rows = [{"name": HOSTILE, "value": 0.5}, {"name": "b", "value": None}]
    write(tmp_path / "runs" / "told", rows)
    return tmp_path / "runs" / "told"


def made(*folders):
    return page.page(page.read_all(folders))


@pytest.fixture(scope="module")
def committed():
    """The page of all committed results."""
    return made(RESULTS)


# --- what is on it


def test_a_section_is_the_golden_one(folder):
    """All parts of a report; texts of results are text, and columns of numbers are marked."""
    text = made(folder)
    (section,) = re.findall(r"<section.*?</section>\n", text, re.DOTALL)
    assert re.sub(r"base64,[^\"]+", "PICTURE", section) == GOLDEN.read_text()
    assert text.count("<script") == 1


def test_the_contents_lead_to_every_section_and_nothing_is_loaded_from_elsewhere(committed):
    links = found(r'href="#([^"]+)"', committed)
    names = [path.parent.name for path in RESULTS.glob("*/results.json*")]
    # once in the contents, once in the heading; and back
    assert sorted(links) == sorted([*names, *names, *["top"] * len(names)])
    assert sorted(found(r'<section id="([^"]+)"', committed)) == sorted(names)
    loading = {"link", "iframe", "object", "embed", "base", "video"}
    assert not loading & set(re.findall(r"<(\w+)", committed))
    sources = re.findall(r'\ssrc\s*=\s*"(.{22})', committed)
    assert sources and set(sources) == {"data:image/png;base64,"}
    assert not any(word in committed for word in ("srcset", "url(", "@import"))
    (policy,) = found(r'http-equiv="[^"]+" content="([^"]+)"', committed)
    assert policy.startswith("default-src 'none'; img-src data:;")


@pytest.mark.parametrize("name", ["speed-ttft", "families", "smollm2-8192-1key"])
def test_a_section_is_the_report_with_its_figure_and_command(name):
    complete = (RESULTS / name / "report.md").read_text()
    result, text = readme.read_results(RESULTS / name), made(RESULTS / name)
    lines = [line for line in complete.splitlines() if line.startswith("| ")]
    rows = [re.split(r" (?<!\\)\| ", line[2:-2]) for line in lines if "| --- |" not in line]
    # as text, without the marks of Markdown
    plain = [[re.sub(r"\\(\|)|`|\*\*", r"\1", cell) for cell in row] for row in rows]
    cells = found(r"<t[hd][ >](.*?)</t[hd]>", text)
    cells = [re.sub(r"^[^<>]*\">|^>?|<[^>]+>", "", cell) for cell in cells]
    assert cells == [cell for row in plain for cell in row]
    assert found(r"<h2><a[^>]*>(.*?)</a></h2>", text) == [readme.heading(result)]
    headings = re.findall("^## (.+)$", complete, re.MULTILINE)
    assert found(r"<summary>(.*?)</summary>", text)[: len(headings)] == headings
    ((alternative, picture),) = re.findall(r'<img alt="([^"]+)" src="[^,]+,([^"]+)">', text)
    assert base64.b64decode(picture) == (RESULTS / name / "figure.png").read_bytes() and alternative
    command = experiment.command(result.kind, result.provenance["settings"])
    (said,) = found(r"<figcaption>(.*?)</figcaption>", text)
    said = re.sub("<[^>]+>", "", said).strip()
    assert said == f"{result.kind.caption}\n{command.strip('`').strip()}"


def test_folders_count_once_and_those_of_one_name_go_by_their_paths(folder, tmp_path):
    write(folder.parent / "other", [{"name": "a", "value": 1.0}], settings={"keys": 1})
    results = page.read_all([folder.parent, folder])
    assert [each.name for each in results] == ["other", "told"]
    write(tmp_path / "more" / "told", [{"name": "a", "value": 1.0}])
    results = page.read_all([folder, tmp_path / "more"])
    text, names = page.page(results), {str(folder), str(tmp_path / "more" / "told")}
    assert {each.name for each in results} == names
    assert set(found(r"<h2><a[^>]*>(.*?)</a>", text)) == {f"Told <i>: {name}" for name in names}
    assert len(set(found(r'<section id="([^"]+)"', text))) == 2


# --- numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("0.35", 0.35), ("131,072", 131072), ("-0.02 [-0.07, +0.02]", -0.02), ("+0.06", 0.06)),
        *(("10.1 %", 10.1), ("19%", 19), ("2.19×", 2.19), ("× 1.10", 1.1), ("1e-06", 1e-6)),
        *(("64k", 65536), ("1M", 1 << 20), ("92 of 100", 0.92), ("0 of 0", 0)),
        *(("62.2 (0 + 62.2)", 62.2), ("1.00 FA3", 1), ("63.2, 30 %", 63.2), ("0.90 [0.8]", 0.9)),
        *(("–", None), ("", None), ("128x64", None), ("3-layer", None), ("16,32", None)),
        *(("cab", None), ("2026-01-02", None), ("4090s", None)),
    ],
)
def test_a_cell_is_sorted_by_the_number_that_it_begins_with(text, expected):
    assert page.value(text) == expected


# --- in a browser


ORDERS = """
(() => {
  const table = document.querySelector("table");
  const read = (column) => [...table.tBodies[0].rows].map((row) => row.cells[column].textContent);
  const button = (column) => table.tHead.rows[0].cells[column].querySelector("button");
  const answer = [];
  for (const column of [0, 0, 1, 1, 2]) {
    button(column).click();
    answer.push([...read(column), table.querySelectorAll("[aria-sort]").length,
      table.tHead.rows[0].cells[column].getAttribute("aria-sort")]);
  }
  return answer;
})()"""


@pytest.mark.skipif(not browser.installed(), reason=browser.NEEDED)
def test_the_page_sorts_in_a_browser_and_logs_nothing(tmp_path, monkeypatch):
    class Sorted(Told):
        @staticmethod
        def tables(rows):
            return {"First": markdown_table(rows, ["name", "value", "both"])}

    monkeypatch.setattr(tables, "named", {"passkey": Sorted}.get)
    rows = [("b10", "2,048", "none"), ("b9", None, "1 of 4"), ("a", "64.5 %", "0.2×")]
    keys = ("name", "value", "both")
    write(tmp_path / "run", [dict(zip(keys, row, strict=True)) for row in rows])
    (tmp_path / "index.html").write_text(made(tmp_path / "run"))
    result, logged = browser.browse(tmp_path / "index.html", ORDERS)
    assert result == [
        ["a", "b9", "b10", 1, "ascending"],
        ["b10", "b9", "a", 1, "descending"],
        ["64.5 %", "2,048", "–", 1, "ascending"],
        ["2,048", "64.5 %", "–", 1, "descending"],
        ["0.2×", "1 of 4", "none", 1, "ascending"],
    ]
    assert not logged


@pytest.mark.skipif(not browser.installed(), reason=browser.NEEDED)
def test_all_committed_results_open_in_a_browser_without_a_word(committed, tmp_path):
    (tmp_path / "index.html").write_text(committed)
    script = """(() => ({
      figures: [...document.images].every((image) => image.naturalWidth > 0),
      wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
      buttons: document.querySelectorAll("th button").length
        === document.querySelectorAll("th").length,
    }))()"""
    result, logged = browser.browse(tmp_path / "index.html", script)
    assert result == {"figures": True, "wide": False, "buttons": True} and not logged


# --- the command, and what it refuses


def run(capsys, *words):
    """Exit status and what is said on stderr."""
    try:
        status = __main__.main(["report", *map(str, words)])
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr().err


def test_the_command_writes_one_file(folder, tmp_path, capsys):
    out = tmp_path / "a" / "page"
    assert run(capsys, folder, "--out", out)[0] == 0
    assert [path.name for path in out.iterdir()] == ["index.html"]
    assert (out / "index.html").read_text() == made(folder)


def rows_of_another_kind(folder):
    return json.dumps({**json.loads((folder / "results.json").read_text()), "rows": [3]})


# a file and what is in it instead, None where it is missing
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("", None, "told has no results.json. Measure it again"),
        ("results.json", None, "told has no results.json. Measure"),
        ("results.json", "{", "must contain results of a run"),
        ("results.json", rows_of_another_kind, "shown: TypeError: "),
        ("figure.png", None, "shown: FileNotFoundError: "),
        ("figure.png", "version https://git-lfs", "figure.png is no PNG"),
    ],
    ids=["gone", "no results", "broken", "rows", "no figure", "figure"],
)
def test_a_folder_that_cannot_be_shown_is_refused(folder, tmp_path, capsys, name, content, message):
    path = folder / name
    if content is not None:
        path.write_text(content(folder) if callable(content) else content)
    elif name:
        path.unlink()
    else:
        shutil.rmtree(path)
    status, said = run(capsys, folder, "--out", tmp_path / "out")
    assert status == 2 and said.count("\n") == 1 and not (tmp_path / "out").exists()
    assert said.startswith("python -m cab_hf.eval: report: ") and message in said


def test_words_without_folders_and_a_place_that_is_a_file_are_refused(folder, tmp_path, capsys):
    status, said = run(capsys, "--out", tmp_path / "out")
    assert status == 2 and "folders must be result folders, got none" in said
    status, said = run(capsys, folder, "--out", folder / "figure.png")
    assert status == 2 and "figure.png cannot be written (File exists)" in said
