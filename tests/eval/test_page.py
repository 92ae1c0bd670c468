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

RESULTS_FOLDER = Path(__file__).parents[2] / "eval" / "results"
# text with special characters of HTML and Markdown
TEXT_WITH_MARKUP = 'a <b>, c & d | "e" <script>alert(1)</script> ![x](https://host/x.png)'


def find_regex_groups(pattern, text):
    """Return the group of every match of ``pattern``, with HTML entities decoded."""
    return [unescape(group) for group in re.findall(pattern, text, re.DOTALL)]


class FixedReport(Passkey):
    """Experiment with fixed tables and sentences."""

    title, caption = "Told <i>", "seen & <drawn>"

    @staticmethod
    def tables(rows):
        first_table = markdown_table(rows, ["name", "value"])
        return {"First": first_table, "Others & more": markdown_table(rows, ["value"])}

    @staticmethod
    def summary_sentences(rows):
        return [f"It says {TEXT_WITH_MARKUP}.", "No more."]

    @staticmethod
    def notes(settings):
        return "What *value* means.\n\nNothing < 3."


def write_result_folder(result_folder, rows, **provenance):
    """Write a result folder with rows and a figure; ``provenance`` replaces default fields."""
    result_folder.mkdir(parents=True)
    provenance = {
        **{"experiment": "passkey", "device": "a GPU", "commit": "0123456789"},
        **{"versions": {"torch": "2"}, "finished": "today", "settings": {"keys": 4}},
        **provenance,
    }
    report.write_results(result_folder, rows, provenance)
    with charts.figure(result_folder / "figure.png", 1, 1, figsize=(1, 1)):
        pass


@pytest.fixture
def result_folder(tmp_path, monkeypatch):
    """Return a result folder of `FixedReport`."""
    monkeypatch.setattr(result_folders, "find_experiment_class", lambda provenance, _: FixedReport)
    rows = [{"name": TEXT_WITH_MARKUP, "value": 0.5}, {"name": "b", "value": None}]
    write_result_folder(tmp_path / "runs" / "told", rows)
    return tmp_path / "runs" / "told"


def render_folders(*result_folders):
    """Return the HTML page of result folders."""
    return page.render_page(page.read_folders(result_folders))


@pytest.fixture(scope="module")
def committed_page():
    """Return the page of all committed results."""
    return render_folders(RESULTS_FOLDER)


def test_section_has_report_parts_and_escapes_html(result_folder):
    html = render_folders(result_folder)
    assert find_regex_groups("<h2><a[^>]*>(.*?)</a></h2>", html) == ["Told <i>: told"]
    assert find_regex_groups("<summary>(.*?)</summary>", html) == [
        "Others & more",
        "Notes",
        "Versions and config",
    ]
    assert find_regex_groups("<p>(It says.*?)</p>", html) == [
        f"It says {TEXT_WITH_MARKUP.replace('![x](https://host/x.png)', '')}"
        '!<a href="https://host/x.png">x</a>.'
    ]
    assert "<td>0.50</td>" in html and "<td>–</td>" in html
    assert "<p>What <em>value</em> means.</p>\n<p>Nothing &lt; 3.</p>" in html
    assert "python -m cab_hf.eval passkey --keys 4" in html
    assert 'alt="seen &amp; &lt;drawn&gt;"' in html
    assert "<script" not in html and "<i>" not in html


def test_page_links_sections_and_loads_no_external_resource(committed_page):
    links = find_regex_groups(r'href="#([^"]+)"', committed_page)
    section_names = [path.parent.name for path in RESULTS_FOLDER.glob("*/results.json*")]
    # per section: a link in the contents, a link in the heading and a link to the top
    assert sorted(links) == sorted([*section_names, *section_names, *["top"] * len(section_names)])
    assert sorted(find_regex_groups(r'<section id="([^"]+)"', committed_page)) == sorted(
        section_names
    )
    loading_tags = {"script", "link", "iframe", "object", "embed", "base", "video"}
    assert not loading_tags & set(re.findall(r"<(\w+)", committed_page))
    source_prefixes = re.findall(r'\ssrc\s*=\s*"(.{22})', committed_page)
    assert source_prefixes and set(source_prefixes) == {"data:image/png;base64,"}
    assert not any(loading_text in committed_page for loading_text in ("srcset", "url(", "@import"))
    (security_policy,) = find_regex_groups(r'http-equiv="[^"]+" content="([^"]+)"', committed_page)
    assert security_policy.startswith("default-src 'none'; img-src data:;")


@pytest.mark.parametrize("folder_name", ["speed-ttft", "families", "passkey"])
def test_section_equals_report_with_figure_and_command(folder_name):
    report_text = (RESULTS_FOLDER / folder_name / "report.md").read_text()
    result, html = (
        result_folders.read_results(RESULTS_FOLDER / folder_name),
        render_folders(RESULTS_FOLDER / folder_name),
    )
    table_lines = [line for line in report_text.splitlines() if line.startswith("| ")]
    report_rows = [
        re.split(r" (?<!\\)\| ", line[2:-2]) for line in table_lines if "| --- |" not in line
    ]
    # the page shows cells without Markdown
    rows_without_markdown = [
        [re.sub(r"\\(\|)|`|\*\*", r"\1", cell) for cell in row] for row in report_rows
    ]
    html_cells = find_regex_groups(r"<t[hd][ >](.*?)</t[hd]>", html)
    html_cells = [re.sub(r"^[^<>]*\">|^>?|<[^>]+>", "", cell) for cell in html_cells]
    assert html_cells == [cell for row in rows_without_markdown for cell in row]
    assert find_regex_groups(r"<h2><a[^>]*>(.*?)</a></h2>", html) == [readme.format_heading(result)]
    headings = re.findall("^## (.+)$", report_text, re.MULTILINE)
    assert find_regex_groups(r"<summary>(.*?)</summary>", html)[: len(headings)] == headings
    ((alternative_text, encoded_figure),) = re.findall(
        r'<img alt="([^"]+)" src="[^,]+,([^"]+)">', html
    )
    assert (
        base64.b64decode(encoded_figure)
        == (RESULTS_FOLDER / folder_name / "figure.png").read_bytes()
        and alternative_text
    )
    command = experiment.format_command(result.experiment_class, result.provenance["settings"])
    (figure_caption,) = find_regex_groups(r"<figcaption>(.*?)</figcaption>", html)
    figure_caption = re.sub("<[^>]+>", "", figure_caption).strip()
    assert figure_caption == f"{result.experiment_class.caption}\n{command.strip('`').strip()}"


def test_folders_are_deduplicated_and_named_by_path(result_folder, tmp_path):
    write_result_folder(
        result_folder.parent / "other", [{"name": "a", "value": 1.0}], settings={"keys": 1}
    )
    results = page.read_folders([result_folder.parent, result_folder])
    assert [result.name for result in results] == ["other", "told"]
    write_result_folder(tmp_path / "more" / "told", [{"name": "a", "value": 1.0}])
    results = page.read_folders([result_folder, tmp_path / "more"])
    html, expected_names = (
        page.render_page(results),
        {str(result_folder), str(tmp_path / "more" / "told")},
    )
    assert {result.name for result in results} == expected_names
    assert set(find_regex_groups(r"<h2><a[^>]*>(.*?)</a>", html)) == {
        f"Told <i>: {name}" for name in expected_names
    }
    assert len(set(find_regex_groups(r'<section id="([^"]+)"', html))) == 2


def run_report_command(capsys, *arguments):
    """Return the exit status and the text on stderr."""
    try:
        status = __main__.main(["report", *map(str, arguments)])
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr().err


def test_page_command_writes_one_file(result_folder, tmp_path, capsys):
    out = tmp_path / "a" / "page"
    assert run_report_command(capsys, result_folder, "--out", out)[0] == 0
    assert [path.name for path in out.iterdir()] == ["index.html"]
    assert (out / "index.html").read_text() == render_folders(result_folder)


def replace_rows_by_number(result_folder):
    """Return the content of results.json with a number instead of a row."""
    return json.dumps({**json.loads((result_folder / "results.json").read_text()), "rows": [3]})


# content None removes the file, or the folder if the name is empty
@pytest.mark.parametrize(
    ("file_name", "content", "message"),
    [
        ("", None, "told has no results.json. Measure it again"),
        ("results.json", None, "told has no results.json. Measure"),
        ("results.json", "{", "must contain results of a run"),
        ("results.json", replace_rows_by_number, "shown: TypeError: "),
        ("figure.png", None, "shown: FileNotFoundError: "),
        ("figure.png", "version https://git-lfs", "figure.png is no PNG"),
    ],
    ids=["no folder", "no results", "broken", "invalid rows", "no figure", "invalid figure"],
)
def test_folder_without_results_is_refused(
    result_folder, tmp_path, capsys, file_name, content, message
):
    path = result_folder / file_name
    if content is not None:
        path.write_text(content(result_folder) if callable(content) else content)
    elif file_name:
        path.unlink()
    else:
        shutil.rmtree(path)
    status, error = run_report_command(capsys, result_folder, "--out", tmp_path / "out")
    assert status == 2 and error.count("\n") == 1 and not (tmp_path / "out").exists()
    assert error.startswith("python -m cab_hf.eval: report: ") and message in error


def test_missing_input_folders_and_file_as_output_are_refused(result_folder, tmp_path, capsys):
    status, error = run_report_command(capsys, "--out", tmp_path / "out")
    assert status == 2 and "folders must be result folders, got none" in error
    status, error = run_report_command(capsys, result_folder, "--out", result_folder / "figure.png")
    assert status == 2 and "figure.png cannot be written (File exists)" in error
