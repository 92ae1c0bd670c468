"""Numbers, files and figures that every evaluation shares."""

import json
import math
import re
from pathlib import Path

import pytest

from cab_hf.eval import readme, report

Z2 = report.Z_95**2


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        # at the ends the interval is [n / (n + z²), 1] and its mirror image
        pytest.param(10, 10, 10 / (10 + Z2), 1.0, id="all"),
        pytest.param(0, 10, 0.0, Z2 / (10 + Z2), id="none"),
        pytest.param(5, 10, 0.236593, 0.763407, id="half"),
        pytest.param(100, 100, 100 / (100 + Z2), 1.0, id="a hundred"),
        pytest.param(1, 1, 0.206549, 1.0, id="one"),
    ],
)
def test_wilson_by_hand(correct, n, low, high):
    assert report.wilson(correct, n) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(("correct", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_share(correct, n):
    with pytest.raises(ValueError, match="correct must be 0 to n"):
        report.wilson(correct, n)


def outcomes(both, only_ours, only_base, neither):
    pairs = [(1, 1)] * both + [(1, 0)] * only_ours + [(0, 1)] * only_base + [(0, 0)] * neither
    return zip(*pairs, strict=True)


# half of the width of Wilson's interval at 5 of 10
HALF = 0.263407


@pytest.mark.parametrize(
    ("table", "difference", "low", "high"),
    [
        # no correlation can be seen: the two intervals join at a right angle
        pytest.param((10, 0, 0, 0), 0.0, -Z2 / (10 + Z2), Z2 / (10 + Z2), id="both perfect"),
        # phi = (25 - 10 / 2) / 25 = 0.8, so the width is half² (1 + 1 - 1.6)
        pytest.param(
            (5, 0, 0, 5), 0.0, -HALF * math.sqrt(0.4), HALF * math.sqrt(0.4), id="always agree"
        ),
        # phi = -25 / 25, and the half widths add up
        pytest.param((0, 5, 5, 0), 0.0, -2 * HALF, 2 * HALF, id="never agree"),
        # every sample only ours: 1 - 0, and each end from its own side
        pytest.param((0, 10, 0, 0), 1.0, 1 - math.sqrt(2) * Z2 / (10 + Z2), 1.0, id="all ours"),
    ],
)
def test_paired_difference_by_hand(table, difference, low, high):
    ours, base = outcomes(*table)
    assert report.paired_difference(ours, base) == pytest.approx((difference, low, high), abs=2e-6)


def test_paired_difference_turns_with_the_pair():
    ours, base = outcomes(11, 2, 5, 3)
    difference, low, high = report.paired_difference(ours, base)
    assert report.paired_difference(base, ours) == pytest.approx((-difference, -high, -low))
    assert low < difference < high


def test_paired_difference_refuses_unequal_lengths():
    with pytest.raises(ValueError, match="one length"):
        report.paired_difference([True], [True, False])


def test_fingerprint_sees_values_and_not_their_order():
    assert report.fingerprint({"a": 1, "b": (2,)}) == report.fingerprint({"b": [2], "a": 1})
    assert report.fingerprint({"a": 1}) != report.fingerprint({"a": 2})


def test_samples_come_back(tmp_path):
    path = tmp_path / "deep" / "samples.jsonl"
    log = report.SampleLog(path, "f")
    log.append({"index": 0, "needle": (1, 2)})
    log.append({"index": 1, "needle": None})
    assert report.SampleLog(path, "f").samples == log.samples
    assert log.samples[0]["needle"] == [1, 2]


@pytest.mark.parametrize("torn", ['{"index": 1, "ans', '{"index": 1, "fingerprint": "f"}'])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "samples.jsonl"
    report.SampleLog(path, "f").append({"index": 0})
    whole = path.read_bytes()
    path.write_bytes(whole + torn.encode())
    log = report.SampleLog(path, "f")
    assert [s["index"] for s in log.samples] == [0]
    assert path.read_bytes() == whole
    log.append({"index": 1})
    assert [s["index"] for s in report.SampleLog(path, "f").samples] == [0, 1]


def test_a_broken_line_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"index": 0, "fing\n{"index": 1, "fingerprint": "f"}\n')
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        report.SampleLog(path, "f")


def test_samples_of_other_settings_are_refused(tmp_path):
    path = tmp_path / "samples.jsonl"
    report.SampleLog(path, "f").append({"index": 0})
    with pytest.raises(ValueError, match="another --out"):
        report.SampleLog(path, "g")
    assert len(report.SampleLog(path, "f").samples) == 1


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    report.write_atomically(path, "old")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(report.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_results_are_rows_and_provenance(tmp_path):
    made = report.provenance({"seed": 3}, "cpu", 3, report.utc_now())
    path = report.write_results(tmp_path, [{"n": 1}], made)
    content = json.loads(path.read_text())
    assert content["rows"] == [{"n": 1}]
    assert content["provenance"]["versions"]["torch"]
    assert content["provenance"]["finished"].endswith("+00:00")
    # results are committed: no value is a path
    assert '"/' not in path.read_text()


def test_the_commit_is_ours_or_none():
    commit = report.git_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit)


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
    report.heatmap(path, {f"method {i}": grid for i in range(panels)}, "length", "depth", "title")
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
