"""Tables and figures."""

import pytest

from cab_hf.eval import charts, report
from cab_hf.runs.markdown import code, plain


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


def one_cell(value):
    _, _, line = report.markdown_table([{"x": value}], ["x"]).splitlines()
    return line.removeprefix("| ").removesuffix(" |")


@pytest.mark.parametrize(
    ("write", "text", "shown"),
    [
        (one_cell, "a|b", r"a\|b"),
        (one_cell, r"a\|b", r"a\|b"),
        (one_cell, "a\nb", "a b"),
        (one_cell, "**0.00**", "**0.00**"),
        (plain, "my_text-1.txt", "my_text-1.txt"),
        (plain, "a|b.txt", r"a\|b.txt"),
        (plain, "`rm`.txt", r"\`rm\`.txt"),
        (plain, "a\n# b.txt", "a # b.txt"),
        (plain, "_a_ *b* [c](d) <e>", r"\_a\_ \*b\* \[c\](d) \<e\>"),
        (code, "a.*", "`a.*`"),
        (code, "(q|v)", r"`(q\|v)`"),
        (code, "a`b", "``a`b``"),
        (code, "`a", "`` `a ``"),
    ],
)
def test_text_is_shown_as_it_is(write, text, shown):
    assert write(text) == shown


@pytest.mark.parametrize("panels", [1, 3, 10])
def test_heatmap_is_a_picture(tmp_path, panels):
    path = tmp_path / "heatmap.png"
    grid = {(1024, 0.0): 1.0, (2048, 0.5): 0.25}
    charts.heatmap(path, {f"method {i}": grid for i in range(panels)}, "length", "depth")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_a_difference_is_shown_with_its_interval():
    row = {"delta": 0.05, "delta_low": -0.041, "delta_high": 0.1}
    assert report.difference(row) == "+0.05 [-0.04, +0.10]"
    assert report.difference({"delta": None}) is None and report.difference({}) is None
