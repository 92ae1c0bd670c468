"""Tables, figures and the README made of them."""

from pathlib import Path

import pytest

from cab_hf.eval import charts, readme, report


def test_markdown_table_by_hand():
    rows = [{"method": "cab", "accuracy": 0.954}, {"method": "dense", "accuracy": None}]
    columns = {"who": "method", "accuracy": "accuracy", "long": lambda row: len(row["method"])}
    assert report.markdown_table(rows, columns).splitlines() == [
        "| who | accuracy | long |",
        "| --- | --- | --- |",
        "| cab | 0.95 | 3 |",
        "| dense | – | 5 |",
    ]
    assert report.markdown_table(rows, ["method", "absent"]).splitlines()[2] == "| cab | – |"


@pytest.mark.parametrize("panels", [1, 3, 10])
def test_heatmap_is_a_picture(tmp_path, panels):
    path = tmp_path / "heatmap.png"
    grid = {(1024, 0.0): 1.0, (2048, 0.5): 0.25}
    charts.heatmap(path, {f"method {i}": grid for i in range(panels)}, "length", "depth")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_the_readme_shows_the_committed_results():
    root = Path(__file__).parents[1]
    page = (root / "README.md").read_text()
    assert readme.render(page, root / "eval" / "results") == page
    assert page.count("<!-- results: ") >= 2


def test_a_table_is_made_from_its_results(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    row = {"method": "cab", "length": 8, "keys": 1, "n": 2, "correct": 1, "density": 0.25}
    row |= {"accuracy": 0.5, "low": 0.1, "high": 0.9}
    made = {"device": "a GPU", "versions": {"torch": "2"}, "commit": "0123456789"}
    report.write_results(folder, [row], made)
    page = readme.render("a\n<!-- results: one -->\nold\n<!-- end -->\nb\n", tmp_path)
    assert "old" not in page and "| cab | 8 | 1 | 1 of 2 | 0.50 [0.10, 0.90] | 0.25 |" in page
    assert page.startswith("a\n") and page.endswith("<!-- end -->\nb\n")
