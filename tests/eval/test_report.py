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


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        pytest.param("a|b", r"a\|b", id="bar"),
        pytest.param(r"a\|b", r"a\|b", id="escaped already"),
        pytest.param("a\nb", "a b", id="line"),
        pytest.param("**0.00**", "**0.00**", id="marks that are meant"),
    ],
)
def test_whatever_a_cell_holds_it_is_one(value, cell):
    assert report.markdown_table([{"x": value}], ["x"]).splitlines()[2:] == [f"| {cell} |"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param("my_text-1.txt", "my_text-1.txt", id="plain"),
        pytest.param("a|b.txt", r"a\|b.txt", id="bar"),
        pytest.param("`rm`.txt", r"\`rm\`.txt", id="code"),
        pytest.param("a\n# b.txt", "a # b.txt", id="line"),
        pytest.param("_a_ *b* [c](d) <e>", r"\_a\_ \*b\* \[c\](d) \<e\>", id="marks"),
    ],
)
def test_a_name_is_shown_as_it_is(name, shown):
    assert plain(name) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("a.*", "`a.*`", id="plain"),
        pytest.param("(q|v)", r"`(q\|v)`", id="bar"),
        pytest.param("a`b", "``a`b``", id="code"),
        pytest.param("`a", "`` `a ``", id="begins with code"),
    ],
)
def test_code_is_shown_as_it_is(text, shown):
    assert code(text) == shown


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
