"""The HTML page of results: its content, its resources, and the command that writes it."""

import base64
import json
import re
import shutil
from html import unescape
from pathlib import Path

import pytest

from cab_hf.eval import __main__, charts, experiment, page, readme, report, result_folders
from cab_hf.eval.passkey import Passkey
from cab_hf.eval.report import markdown_table

RESULTS = Path(__file__).parents[2] / "eval" / "results"
# text with special characters of HTML and Markdown
HOSTILE = 'a <b>, c & d | "e" <script>alert(1)</script> ![x](https://host/x.png)'


def matches(pattern, text):
    """Return the group of every match of ``pattern``, with HTML entities decoded."""
    return [unescape(each) for each in re.findall(pattern, text, re.DOTALL)]


class FixedReport(Passkey):
    """Experiment with fixed tables and sentences."""

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


def write(folder, rows, **provenance):
    """Write a result folder with rows and a figure; ``provenance`` replaces default fields."""
    folder.mkdir(parents=True)
    provenance = {
        **{"experiment": "passkey", "device": "a GPU", "commit": "0123456789"},
        **{"versions": {"torch": "2"}, "finished": "today", "settings": {"keys": 4}},
        **provenance,
    }
    report.write_results(folder, rows, provenance)
    with charts.figure(folder / "figure.png", 1, 1, figsize=(1, 1)):
        pass


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a result folder of `FixedReport`."""
    monkeypatch.setattr(result_folders, "find_experiment_class", lambda provenance, _: FixedReport)
    rows = [{"name": HOSTILE, "value": 0.5}, {"name": "b", "value": None}]
    write(tmp_path / "runs" / "told", rows)
    return tmp_path / "runs" / "told"


def page_of(*folders):
    """Return the HTML page of result folders."""
    return page.page(page.read_folders(folders))


@pytest.fixture(scope="module")
def committed():
    """Return the page of all committed results."""
    return page_of(RESULTS)


def test_section_has_report_parts_and_escapes_html(folder):
    text = page_of(folder)
    assert matches("<h2><a[^>]*>(.*?)</a></h2>", text) == ["Told <i>: told"]
    assert matches("<summary>(.*?)</summary>", text) == [
        "Others & more",
        "Notes",
        "Versions and config",
    ]
    assert matches("<p>(It says.*?)</p>", text) == [
        f"It says {HOSTILE.replace('![x](https://host/x.png)', '')}"
        '!<a href="https://host/x.png">x</a>.'
    ]
    assert "<td>0.50</td>" in text and "<td>–</td>" in text
    assert "<p>What <em>value</em> means.</p>\n<p>Nothing &lt; 3.</p>" in text
    assert "python -m cab_hf.eval passkey --keys 4" in text
    assert 'alt="seen &amp; &lt;drawn&gt;"' in text
    assert "<script" not in text and "<i>" not in text


def test_page_links_sections_and_loads_no_external_resource(committed):
    links = matches(r'href="#([^"]+)"', committed)
    names = [path.parent.name for path in RESULTS.glob("*/results.json*")]
    # per section: a link in the contents, a link in the heading and a link to the top
    assert sorted(links) == sorted([*names, *names, *["top"] * len(names)])
    assert sorted(matches(r'<section id="([^"]+)"', committed)) == sorted(names)
    loading = {"script", "link", "iframe", "object", "embed", "base", "video"}
    assert not loading & set(re.findall(r"<(\w+)", committed))
    sources = re.findall(r'\ssrc\s*=\s*"(.{22})', committed)
    assert sources and set(sources) == {"data:image/png;base64,"}
    assert not any(word in committed for word in ("srcset", "url(", "@import"))
    (policy,) = matches(r'http-equiv="[^"]+" content="([^"]+)"', committed)
    assert policy.startswith("default-src 'none'; img-src data:;")


@pytest.mark.parametrize("name", ["speed-ttft", "families", "smollm2-8192-1key"])
def test_section_equals_report_with_figure_and_command(name):
    report_text = (RESULTS / name / "report.md").read_text()
    result, text = result_folders.read_results(RESULTS / name), page_of(RESULTS / name)
    lines = [line for line in report_text.splitlines() if line.startswith("| ")]
    rows = [re.split(r" (?<!\\)\| ", line[2:-2]) for line in lines if "| --- |" not in line]
    # the page shows cells without Markdown
    plain = [[re.sub(r"\\(\|)|`|\*\*", r"\1", cell) for cell in row] for row in rows]
    cells = matches(r"<t[hd][ >](.*?)</t[hd]>", text)
    cells = [re.sub(r"^[^<>]*\">|^>?|<[^>]+>", "", cell) for cell in cells]
    assert cells == [cell for row in plain for cell in row]
    assert matches(r"<h2><a[^>]*>(.*?)</a></h2>", text) == [readme.heading(result)]
    headings = re.findall("^## (.+)$", report_text, re.MULTILINE)
    assert matches(r"<summary>(.*?)</summary>", text)[: len(headings)] == headings
    ((alternative, picture),) = re.findall(r'<img alt="([^"]+)" src="[^,]+,([^"]+)">', text)
    assert base64.b64decode(picture) == (RESULTS / name / "figure.png").read_bytes() and alternative
    command = experiment.command(result.kind, result.provenance["settings"])
    (figure_caption,) = matches(r"<figcaption>(.*?)</figcaption>", text)
    figure_caption = re.sub("<[^>]+>", "", figure_caption).strip()
    assert figure_caption == f"{result.kind.caption}\n{command.strip('`').strip()}"


def test_folders_are_deduplicated_and_named_by_path(folder, tmp_path):
    write(folder.parent / "other", [{"name": "a", "value": 1.0}], settings={"keys": 1})
    results = page.read_folders([folder.parent, folder])
    assert [each.name for each in results] == ["other", "told"]
    write(tmp_path / "more" / "told", [{"name": "a", "value": 1.0}])
    results = page.read_folders([folder, tmp_path / "more"])
    text, names = page.page(results), {str(folder), str(tmp_path / "more" / "told")}
    assert {each.name for each in results} == names
    assert set(matches(r"<h2><a[^>]*>(.*?)</a>", text)) == {f"Told <i>: {name}" for name in names}
    assert len(set(matches(r'<section id="([^"]+)"', text))) == 2


def run(capsys, *words):
    """Return the exit status and the text on stderr."""
    try:
        status = __main__.main(["report", *map(str, words)])
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr().err


def test_page_command_writes_one_file(folder, tmp_path, capsys):
    out = tmp_path / "a" / "page"
    assert run(capsys, folder, "--out", out)[0] == 0
    assert [path.name for path in out.iterdir()] == ["index.html"]
    assert (out / "index.html").read_text() == page_of(folder)


def with_invalid_rows(folder):
    """Return the content of results.json with a number instead of a row."""
    return json.dumps({**json.loads((folder / "results.json").read_text()), "rows": [3]})


# content None removes the file, or the folder if the name is empty
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("", None, "told has no results.json. Measure it again"),
        ("results.json", None, "told has no results.json. Measure"),
        ("results.json", "{", "must contain results of a run"),
        ("results.json", with_invalid_rows, "shown: TypeError: "),
        ("figure.png", None, "shown: FileNotFoundError: "),
        ("figure.png", "version https://git-lfs", "figure.png is no PNG"),
    ],
    ids=["no folder", "no results", "broken", "invalid rows", "no figure", "invalid figure"],
)
def test_folder_without_results_is_refused(folder, tmp_path, capsys, name, content, message):
    path = folder / name
    if content is not None:
        path.write_text(content(folder) if callable(content) else content)
    elif name:
        path.unlink()
    else:
        shutil.rmtree(path)
    status, error = run(capsys, folder, "--out", tmp_path / "out")
    assert status == 2 and error.count("\n") == 1 and not (tmp_path / "out").exists()
    assert error.startswith("python -m cab_hf.eval: report: ") and message in error


def test_missing_input_folders_and_file_as_output_are_refused(folder, tmp_path, capsys):
    status, error = run(capsys, "--out", tmp_path / "out")
    assert status == 2 and "folders must be result folders, got none" in error
    status, error = run(capsys, folder, "--out", folder / "figure.png")
    assert status == 2 and "figure.png cannot be written (File exists)" in error
