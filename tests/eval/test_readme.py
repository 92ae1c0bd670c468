"""The pages that show results: what is in them, that they are current, and what is refused."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from cab_hf import CabConfig
from cab_hf.eval import readme, report
from cab_hf.eval.tables import ROWS, TABLES, TIMED, Table, pivoted, read_results, source

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results"
NAMES = TABLES["default"].folders
SPEED, CHOOSING, *KEPT = NAMES
PAGE = "a\n<!-- table: default -->\nold\n<!-- end -->\nb\n"


def write(folder, rows, versions=("torch",), settings=(), **made):
    folder.mkdir(exist_ok=True)
    given = {"keys": 1, "filler": "noise", "methods": ["cab"], "device": "cuda", "note": "x"}
    made = {"experiment": "passkey", "device": "a GPU", "commit": "0123456789", **made}
    made |= {"versions": dict.fromkeys(versions, "2"), "settings": given | dict(settings)}
    report.write_results(folder, rows, made)
    return read_results(folder)


def table(name, results):
    """The cells of a table on a page, a list a row, less its heading."""
    page = readme.page_with_tables(f"<!-- table: {name} -->\n<!-- end -->\n", results, "../")
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture
def results(tmp_path):
    """A folder that has what the table of the default asks for, of passkey's experiment."""
    rows = []
    for text, kl in (("one", 0.001), ("other", 0.003)):
        place = {"text": text, "length": 8192}
        ratios = {"recall": 0.9 + 100 * kl, "recall_border": 1.0, "perplexity_border": 1.01}
        kept = {probe: {"ratio": ratio} for probe, ratio in ratios.items()}
        rows.append({**place, "method": "cab", "density": 0.3, "continuation": {"kl": kl}, **kept})
        rows.append({**place, "method": "full", "density": 1.0, "continuation": {"kl": 0.001}})
    for name in KEPT[:-1]:
        write(tmp_path / name, rows)
    # not everything was measured
    few = {"continuation": {"kl": 0.002}, "recall": {"ratio": 1.1}}
    write(tmp_path / KEPT[-1], [{"length": 65_536, "method": "cab", "density": 0.2, **few}])
    rows = []
    for length in (8192, 65_536, 131_072):
        rows.append({"length": length, "implementation": "FA3", "ms": 250.0})
        cab = {"implementation": "cab", "ms": 100.0, "density": 0.1, "over_best": 2.5}
        rows.append({"length": length, "baseline_ms": 250.0, **cab})
    write(tmp_path / SPEED, rows, commit="fedcba9876")
    write(tmp_path / CHOOSING, [{"length": 8192, "ms": 0.12}])
    return tmp_path


def test_settings_are_named_beside_means_over_texts(tmp_path):
    run = {"settings": {"cab_configs": {"cab": {}, "cab:few": {"exact_queries": 8}}}}
    run["settings"]["cab_configs"]["cab"] = CabConfig(min_length=0).to_dict()
    rows = [
        {"method": method, "text": text, "length": 64, "run": run, "recall": {"share": share}}
        for method, shares in {
            "dense": (1.0, 1.0),
            "cab": (0.9, 0.7),
            "cab:few": (0.5, 0.5),
        }.items()
        for text, share in zip("ab", shares, strict=True)
    ]
    shown = [(row["setting"], row["recall"]["share"]) for row in ROWS["over_texts"](rows)]
    assert shown == [("dense", 1.0), ("default", 0.8), ("exact_queries=8", 0.5)]


# --- what is committed


def test_the_pages_show_the_committed_results():
    shown = ""
    for path in (ROOT / "README.md", ROOT / "finetune" / "README.md", *ROOT.glob("docs/*.md")):
        page = path.read_text()
        up = "" if path.parent == ROOT else "../"
        assert readme.page_with_tables(page, RESULTS, up) == page, path
        shown += page
    assert all(f"<!-- table: {name} -->" in shown for name in TABLES)
    page = (RESULTS / "README.md").read_text()
    assert readme.results_page(RESULTS) == page
    folders = {path.name for path in RESULTS.iterdir() if path.is_dir()}
    assert set(re.findall(r"\]\((\S+)/report.md\)", page)) == folders


def test_results_are_small_enough_for_a_repository():
    for place, most in ((RESULTS, 5_000_000), (ROOT / "cab_hf" / "adapters", 10_000_000)):
        files = [path for path in place.rglob("*") if path.is_file()]
        # what renders a copy in place writes tables that git ignores
        assert sum(path.stat().st_size for path in files if path.suffix != ".csv") < most
    assert not list(RESULTS.rglob("*.jsonl")) and len(list(RESULTS.glob("*/samples.jsonl.xz"))) > 9


# --- what is shown


def test_headings_say_what_varies_and_else_the_folder(tmp_path):
    # what grows, what is no option and lists are not told
    runs = [
        write(tmp_path / "a", [], ("torch", "flash"), {"note": "no option"}),
        write(tmp_path / "b", [], settings={"keys": 4, "methods": ["dense"], "depths": [0]}),
        write(tmp_path / "c", [], settings={"keys": 4, "methods": ["cab"]}),
    ]
    title = "Passkey retrieval"
    shown = [f"{title}: keys 1, flash 2", f"{title}: keys 4, no flash"]
    assert [readme.heading(each, runs[:2]) for each in runs[:2]] == shown
    shown = [f"{shown[1]} (b)", f"{shown[1]} (c)"]
    assert [readme.heading(each, runs) for each in runs[1:]] == shown


def test_the_source_says_how_a_run_differed_from_what_is_committed(results):
    speed, choosing = (read_results(results / name) for name in (SPEED, CHOOSING))
    assert source([speed, choosing]) == "a GPU, torch 2, commit fedcba9 and 0123456"
    speed.provenance["commit"] = "fedcba9876-dirty"
    assert source([speed]).endswith("commit fedcba9-dirty")
    speed.provenance["settings"]["cab_config"] = {"select": "clusters", "key_block": 64}
    choosing.provenance["settings"]["cab_configs"] = {"cab": {"key_block": 64}}
    assert source([speed]).endswith("; by the default of cab_hf 0.2")
    assert source([speed, choosing]).endswith("; in part by the default of cab_hf 0.2")
    assert source([choosing]).endswith("commit 0123456")


def test_rows_and_columns_are_those_declared(tmp_path, monkeypatch):
    rows = [
        {"length": 4096, "way": way, "ms": ms, "inner": {"kl": kl}, "held": held}
        for way, ms, kl, held in (
            *(("cab", 1500.0, 0.5, 1), ("cab", 2500.0, None, 1)),
            *(("sdpa", 4000.0, 0.25, 1), ("sdpa", None, None, 1), ("FA3", 1.0, 1.0, 0)),
        )
    ]
    write(tmp_path / "a", rows)
    declared = {"any": ["a", "b"], "where": {"held": 1}, "has": "ms", "rows": "by_way"}
    columns = {"tokens": "length|,", "* s": "*.ms|s", "none": "cab.inner.none|s"}
    columns |= {"KL (sdpa)": ["cab.inner.kl|digits", "sdpa.inner.kl|.1f"]}
    columns |= {"of none": ["cab.inner.kl|digits", "FA3.inner.kl"]}
    monkeypatch.setitem(ROWS, "by_way", lambda rows: pivoted(rows, "way", "length"))
    text = Table({**declared, "columns": columns})(tmp_path).splitlines()
    # cab stands behind what it is compared with; means are over what was measured
    assert text[0] == "| tokens | sdpa s | cab s | none | KL (sdpa) | of none |"
    assert text[2:4] == ["| 4,096 | 4.00 | 2.00 | – | 0.500 (0.2) | 0.500 |", ""]
    with pytest.raises(ValueError, match="b has no results.json"):
        Table({"folders": ["a", "b"], "columns": columns})(tmp_path)


def test_the_default_by_hand(results):
    page = readme.page_with_tables(PAGE, results)
    assert page.startswith("a\n<!--") and page.endswith("<!-- end -->\nb\n") and "old" not in page
    assert readme.page_with_tables(page, results) == page
    # means over texts
    measured = ["0.250", "0.100", "2.50"]
    kept = ["0.30", "0.00200 (0.00100)", "× 1.10", "× 1.00", "× 1.01"]
    assert table("default_in_full", results) == [
        ["8,192", *measured, "0.120", "0.10", *kept],
        ["65,536", *measured, "–", "0.10", "0.20", "0.00200", "× 1.10", "–", "–"],
        ["131,072", *measured, "–", "0.10", *["–"] * 5],
    ]
    first, *_ = table("default", results)
    assert first == ["8,192", *measured, "0.00200 (0.00100)", "× 1.00"]


def test_a_step_of_training_is_of_the_last_folder_that_has_its_size(results):
    def step(length, name, ms, density=1.0, over=None):
        row = {"length": length, "implementation": name, "ms": ms, "density": density}
        return row | {"over_best": over, "ceiling": 2.0, "peak_gib": 32.0}

    first, second, fewer, *_ = TABLES["lora"].folders
    rows = [step(4096, "sdpa", 4000.0), step(4096, "FA4", 3000.0)]
    rows += [step(4096, "cab", 2000.0, 0.2, 1.5), step(8192, "cab", 9000.0, 0.2, 1.5)]
    write(results / first, rows, settings={"layers": 32}, experiment="speed lora")
    for name, ms, layers in ((second, 5000.0, 32), (fewer, 700.0, 4)):
        rows = [step(8192, "cab", ms, 0.1)]
        write(results / name, rows, settings={"layers": layers}, experiment="speed lora")
    assert table("lora", results) == [
        ["4,096", "32", "4.00", "3.00", "2.00", "1.50", "2.00", "0.20", "32.0"],
        ["8,192", "32", "–", "–", "5.00", "–", "2.00", "0.10", "32.0"],
        ["8,192", "4", "–", "–", "0.700", "–", "2.00", "0.10", "32.0"],
    ]


def test_what_trainings_keep_is_bold_where_it_is_less_for_sure(results):
    few = ("recall", "perplexity")
    most = (*few, "recall_border", "perplexity_border")
    for folder in TABLES["trained"].folders:
        untrained, dense = "beyond" in folder, "dense" in folder
        correct, value = (0, 900.0) if untrained else (90, 6.0) if dense else (50, 6.3)
        # the second run is 21 % worse, so that the geometric mean of both is by 10 %
        result = {"correct": correct, "n": 100, "value": value * 1.21 ** folder.endswith("seed-1")}
        asked = dict.fromkeys(few if untrained else most, result)
        rows = [
            {"method": method, "length": 32768, "density": 0.5, **asked}
            for method in (["dense"] if untrained else ["dense", "cab"])
        ]
        write(results / folder, rows, experiment="fidelity")
    # steps of dense training alone on a GPU; the first of them do not count
    log = results / "fidelity-trained-dense" / TIMED
    log.parent.mkdir()
    steps = [{"kind": "step", "step": n, "seconds": 9.0 if n <= 3 else n / 2} for n in range(1, 7)]
    lines = [{"identity": {}, "started": ""}, *steps]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = table("trained", results)
    assert len(shown) == 9
    nothing = ["**0.00 [0.00, 0.04]**", "–", "900", "–", "–", "–"]
    assert shown[0] == ["not at all", "1", "dense", "0.50", *nothing]
    # 180 of 200 keys, and 50 of 100
    best, less = "0.90 [0.85, 0.93]", "**0.50 [0.40, 0.60]**"
    dense = [best, best, "6.00, 7.26", "1.000", "1.000", "2.50"]
    assert shown[1] == ["dense", "2", "dense", "0.50", *dense]
    assert shown[4] == ["cab", "1", "cab", "0.50", less, less, "6.30", "0.955", "0.955", "–"]


def fidelity_run(folder, config, model="a", **settings):
    """A run of the default, or of another config, on two texts."""
    asked = {"recall": {"ratio": 0.9}, "tasks": {"delta": -0.013}}
    rows = [
        {"text": text, "length": 32768, "method": "cab", "density": 0.2, "over_dense": 0.5}
        | {"continuation": {"kl": 0.02}, **asked}
        for text in ("one", "other")
    ]
    full = {"length": 32768, "method": "full", "continuation": {"kl": 0.001}}
    settings |= {"model": model, "cab_configs": {"cab": config}}
    write(folder, [*rows, full], experiment="fidelity", settings=settings)


def test_models_are_shown_that_the_default_has_read(results):
    default = json.loads(json.dumps(asdict(CabConfig(min_length=0))))
    for name in ("here", "of other weights"):
        fidelity_run(results / name, default, model_sha256=name)
    fidelity_run(results / "by-another", {**default, "mass_threshold": 0.5}, "b")
    fidelity_run(results / "by-an-older", {**default, "exact_stride": 0}, "c")
    fidelity_run(results / "fidelity-trained-cab", default, "d")
    others = {"model": "e", "cab_configs": {"cab": default}}
    rows = [{"method": "full", "length": 32768, "density": 1.0}]
    write(results / "by-others", rows, experiment="fidelity", settings=others)
    kept = ["0.20", "0.50", "0.0200 (0.00100)", "–", "× 0.90", "–", "-1.3 points"]
    assert table("models", results) == 2 * [["a", "32,768", "2", *kept]]


def test_tasks_are_bold_where_they_are_surely_below_dense(results):
    def row(method, over, mean=None, **tasks):
        asked = {name: {"share": of[0], "delta_high": of[1]} for name, of in tasks.items()}
        fields = {"length": 8192, "method": method, "density": 0.5, "over_dense": over}
        return {**fields, **asked, **({"tasks": {"delta": mean}} if mean else {})}

    rows = [
        row("dense", 1.0, uuid=(0.9, 0.0)),
        row("cab", 0.5, -0.01, uuid=(0.5, -0.1), tracking=(0.4, 0.1)),
    ]
    write(results / TABLES["tasks"].folders[0], rows, settings={"model": "a"})
    (*_, tasks, mean, points), cab = table("tasks", results)
    assert (mean, points) == ("0.90", "–")
    # the mean is of the tasks that all were asked
    nothing, place = ["–"] * 3, ["a", "8,192", "cab", "0.50", "0.50"]
    scores = [*nothing, "**0.50**", "–", "0.40", *nothing, "0.50", "-1.0 points"]
    assert cab == [*place, *scores]


def test_context_parallelism_is_shown_of_the_most_ranks(results):
    def ranked(scheme, world, efficiency, **more):
        row = {"scheme": scheme, "world": world, "length": 65536, "direction": "forward"}
        row |= {"efficiency": efficiency, "ms": None, "density": None, "shape": "llama3-8b"}
        return {**row, "measured": True, **more}

    short, longer, *_ = TABLES["parallel"].folders
    rows = [ranked("grouped", 2, 0.75), ranked("ring", 8, None), ranked("grouped", 8, 0.875)]
    rows.append(ranked("grouped", 16, 0.9, measured=False))
    write(results / short, rows, experiment="speed context-parallel")
    rows = [ranked("grouped", 2, 1.0, ms=30.0)]
    rows.append(ranked("grouped+cab", 2, 0.75, ms=4.0, density=0.1))
    write(results / longer, rows, experiment="speed context-parallel")
    assert table("parallel", results) == [
        ["llama3-8b", "65,536", "8", "forward", "–", "87.5 %", "–", "–", "–"],
        ["llama3-8b", "65,536", "2", "forward", "–", "100 %", "75.0 %", "0.10", "7.50 ×"],
    ]


# --- the command


@pytest.fixture
def words(results, tmp_path_factory, monkeypatch):
    """Words of the command for a page of the default and one more page, in ``docs``."""
    docs = tmp_path_factory.mktemp("docs")
    (docs / "page.md").write_text(PAGE)
    (docs / "more.md").write_text("no tables are needed here")
    monkeypatch.setattr(readme, "results_page", lambda results: "all\n")
    given = {"page": docs / "page.md", "docs": docs / "none", "training": docs / "more.md"}
    given["results"] = results
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def test_a_run_is_added_once_or_not_at_all(results, words, tmp_path_factory, capsys):
    page = Path(words[1])
    page.write_text(f"{PAGE}<!-- table: models -->\n<!-- end -->\n")
    run = tmp_path_factory.mktemp("runs") / "fidelity-mine"
    fidelity_run(run, asdict(CabConfig()))
    (run / "results.csv").write_text("is in results.json as well")
    assert readme.main([*words, "--add", str(run)]) == 0
    assert [path.name for path in (results / run.name).iterdir()] == ["results.json"]
    assert "| a | 32,768 | 2 |" in page.read_text()
    assert "fidelity-mine is in the table of models" in capsys.readouterr().out
    assert readme.main([*words, "--add", str(run)]) == 2
    assert "fidelity-mine exists; rename" in capsys.readouterr().err
    fidelity_run(run, asdict(CabConfig(query_block=32)))
    run = run.rename(run.with_name("fidelity-small-blocks"))
    assert readme.main([*words, "--add", str(run)]) == 0
    assert "in the table" not in capsys.readouterr().out
    # nothing is added where a page cannot be written
    page.write_text("<!-- table: other -->\n<!-- end -->\n")
    run = run.rename(run.with_name("fidelity-of-an-hour"))
    assert readme.main([*words, "--add", str(run)]) == 2
    assert not (results / run.name).exists()
    assert readme.main([*words, "--add", str(page.parent)]) == 2
    assert f"{page.parent} has no results.json" in capsys.readouterr().err


def test_all_pages_are_written_and_large_files_packed(results, words, monkeypatch):
    folder = results / SPEED
    (folder / "samples.jsonl").write_text("{}")
    assert readme.main(words) == 0
    assert {path.name for path in folder.iterdir()} == {"results.json", "samples.jsonl.xz"}
    assert (results / "README.md").read_text() == "all\n"
    assert Path(words[1]).read_text() == readme.page_with_tables(PAGE, results)
    assert (results / readme.DEFAULT_FIGURE).stat().st_size > 5_000
    # many rows are packed as well, and read as before
    before = read_results(folder)
    monkeypatch.setattr(readme, "LARGE_RESULTS", 0)
    assert readme.main(words) == 0
    assert {path.name for path in folder.iterdir()} == {"results.json.xz", "samples.jsonl.xz"}
    assert read_results(folder) == before
    report.write_results(folder, before.rows, before.provenance)
    assert not (folder / "results.json.xz").exists()


@pytest.mark.parametrize(
    ("change", "page", "message"),
    [
        pytest.param("missing", PAGE, "speed-ttft has no results.json", id="no results"),
        pytest.param("unnamed", PAGE, "results.json names no experiment", id="no experiment"),
        pytest.param(None, PAGE.replace("<!-- end -->", ""), "without <!-- end -->", id="marker"),
        pytest.param(None, PAGE.replace("default", "other"), "a table 'other'", id="unknown table"),
    ],
)
def test_what_is_missing_is_refused_and_no_page_written(
    results, words, capsys, change, page, message
):
    path = results / SPEED / "results.json"
    if change == "missing":
        path.unlink()
    elif change == "unnamed":
        path.write_text(path.read_text().replace('"experiment"', '"other"'))
    Path(words[1]).write_text(page)
    assert readme.main(words) == 2
    assert message in capsys.readouterr().err
    assert Path(words[1]).read_text() == page and not (results / "README.md").exists()
