"""The HTML page of results: content, and no external resources."""

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
HOSTILE = 'a <b>, c & d | "e" <script>alert(1)</script> ![x](https://host/x.png)'


def found(pattern, text):
    """Return the groups of all matches of a pattern as text."""
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


def write(folder, rows, **made):
    """Write a folder of results, with a figure."""
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
    monkeypatch.setattr(result_folders, "kind_of", lambda made, _: FixedReport)
    rows = [{"name": HOSTILE, "value": 0.5}, {"name": "b", "value": None}]
    write(tmp_path / "runs" / "told", rows)
    return tmp_path / "runs" / "told"


def made(*folders):
    return page.page(page.read_all(folders))


@pytest.fixture(scope="module")
def committed():
    """Return the page of all committed results."""
    return made(RESULTS)


# --- content


def test_section_has_report_parts_and_escapes_html(folder):
    text = made(folder)
    assert found("<h2><a[^>]*>(.*?)</a></h2>", text) == ["Told <i>: told"]
    assert found("<summary>(.*?)</summary>", text) == [
        "Others & more",
        "Notes",
        "Versions and config",
    ]
    assert found("<p>(It says.*?)</p>", text) == [
        f"It says {HOSTILE.replace('![x](https://host/x.png)', '')}"
        '!<a href="https://host/x.png">x</a>.'
    ]
    assert "<td>0.50</td>" in text and "<td>–</td>" in text
    assert "<p>What <em>value</em> means.</p>\n<p>Nothing &lt; 3.</p>" in text
    assert "python -m cab_hf.eval passkey --keys 4" in text
    assert 'alt="seen &amp; &lt;drawn&gt;"' in text
    assert "<script" not in text and "<i>" not in text


def test_page_links_sections_and_loads_no_external_resource(committed):
    links = found(r'href="#([^"]+)"', committed)
    names = [path.parent.name for path in RESULTS.glob("*/results.json*")]
    # per section: a link in the contents, a link in the heading and a link to the top
    assert sorted(links) == sorted([*names, *names, *["top"] * len(names)])
    assert sorted(found(r'<section id="([^"]+)"', committed)) == sorted(names)
    loading = {"script", "link", "iframe", "object", "embed", "base", "video"}
    assert not loading & set(re.findall(r"<(\w+)", committed))
    sources = re.findall(r'\ssrc\s*=\s*"(.{22})', committed)
    assert sources and set(sources) == {"data:image/png;base64,"}
    assert not any(word in committed for word in ("srcset", "url(", "@import"))
    (policy,) = found(r'http-equiv="[^"]+" content="([^"]+)"', committed)
    assert policy.startswith("default-src 'none'; img-src data:;")


@pytest.mark.parametrize("name", ["speed-ttft", "families", "smollm2-8192-1key"])
def test_section_equals_report_with_figure_and_command(name):
    complete = (RESULTS / name / "report.md").read_text()
    result, text = result_folders.read_results(RESULTS / name), made(RESULTS / name)
    lines = [line for line in complete.splitlines() if line.startswith("| ")]
    rows = [re.split(r" (?<!\\)\| ", line[2:-2]) for line in lines if "| --- |" not in line]
    # cells as plain text, without Markdown
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


def test_folders_are_deduplicated_and_named_by_path(folder, tmp_path):
    write(folder.parent / "other", [{"name": "a", "value": 1.0}], settings={"keys": 1})
    results = page.read_all([folder.parent, folder])
    assert [each.name for each in results] == ["other", "told"]
    write(tmp_path / "more" / "told", [{"name": "a", "value": 1.0}])
    results = page.read_all([folder, tmp_path / "more"])
    text, names = page.page(results), {str(folder), str(tmp_path / "more" / "told")}
    assert {each.name for each in results} == names
    assert set(found(r"<h2><a[^>]*>(.*?)</a>", text)) == {f"Told <i>: {name}" for name in names}
    assert len(set(found(r'<section id="([^"]+)"', text))) == 2


# --- the command


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
    assert (out / "index.html").read_text() == made(folder)


def rows_of_another_kind(folder):
    return json.dumps({**json.loads((folder / "results.json").read_text()), "rows": [3]})


# (file, other content, error); None removes the file
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
def test_folder_without_results_is_refused(folder, tmp_path, capsys, name, content, message):
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


def test_missing_folders_or_file_as_output_are_refused(folder, tmp_path, capsys):
    status, said = run(capsys, "--out", tmp_path / "out")
    assert status == 2 and "folders must be result folders, got none" in said
    status, said = run(capsys, folder, "--out", folder / "figure.png")
    assert status == 2 and "figure.png cannot be written (File exists)" in said
