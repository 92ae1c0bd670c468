"""Tables of the pages equal the committed results, and the readme command checks its input."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pandas
import pytest

from cab_hf import CabConfig
from cab_hf.eval import experiment, frames, pages, picture, readme, report
from cab_hf.eval.pages import TABLES
from cab_hf.eval.result_folders import read_all_results, read_results
from cab_hf.experiment import loading

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results"
# result folders of the default table, at 32,768 and 131,072 tokens
SHORT, LONG = pages.DEFAULT_FOLDERS
# method of a fidelity run -> label in the default table
CONFIGURATIONS = {"dense": "dense", "cab": "default"}
# a page with an outdated table
PAGE = "a\n<!-- table: default -->\nstale\n<!-- end -->\nb\n"


def write(folder, rows, versions=("torch",), settings=(), **provenance):
    """Write a result folder and return its results.

    Args:
        folder: the folder.
        rows: rows of the results.
        versions: names of packages whose version is recorded.
        settings: settings that replace the defaults of this function.
        provenance: fields of the provenance that replace the defaults of this function.
    """
    folder.mkdir(exist_ok=True)
    defaults = {"keys": 1, "filler": "noise", "methods": ["cab"], "device": "cuda", "note": "x"}
    made = {"experiment": "passkey", "device": "a GPU", "commit": "0123456789", **provenance}
    made |= {"versions": dict.fromkeys(versions, "2"), "settings": defaults | dict(settings)}
    report.write_results(folder, rows, made)
    return read_results(folder)


def table(name, results):
    """Return the cells of a table of a page, as a list per row, without the header row."""
    page = readme.update_tables(f"<!-- table: {name} -->\n<!-- end -->\n", results, "../")
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def fidelity_rows(length, methods):
    """Yield rows of two texts; method number n has KL n / 100, and 1 / n of the dense time."""
    for text, share in (("one", 0.5), ("other", 1.0)):
        for number, method in enumerate(methods, 1):
            case = {"text": text, "length": length, "method": method, "density": 1 / number}
            times = {"predict_ms": 10.0, "attend_ms": 90.0, "over_dense": 1 / number}
            yield {
                **case,
                **times,
                "continuation": {"kl": number / 100},
                "recall": {"share": share},
            }


@pytest.fixture
def results(tmp_path):
    """Return a folder with the results of the default table and of the picture."""
    default = asdict(CabConfig(min_length=0))
    for folder, length in ((SHORT, 32_768), (LONG, 131_072)):
        configs = {name: {**default} for name in CONFIGURATIONS if name != "dense"}
        rows = list(fidelity_rows(length, CONFIGURATIONS))
        write(tmp_path / folder, rows, settings={"cab_configs": configs}, commit=folder)
    rows = []
    for length in picture.LENGTHS:
        cab = {"implementation": "cab", "ms": 1000.0, "baseline_ms": 2500.0, "over_best": 2.5}
        rows.append({"length": length, "density": 0.1, **cab})
    write(tmp_path / picture.TIMES, rows, commit="fedcba9876")
    plan = {"query_block": 128, "key_block": 64, "length": 1024, "density": 0.25}
    plan["rows"] = ["c000", "f000", "fc00", "ff00", "ffc0", "fff0", "fffc", "ffff"]
    (tmp_path / picture.PLAN).write_text(json.dumps(plan))
    return tmp_path


def test_committed_pages_equal_rendered_tables():
    text_of_pages = ""
    for path in (ROOT / "README.md", ROOT / "finetune" / "README.md", *ROOT.glob("docs/*.md")):
        page = path.read_text()
        up = "" if path.parent == ROOT else "../"
        assert readme.update_tables(page, RESULTS, up) == page, path
        text_of_pages += page
    assert all(f"<!-- table: {name} -->" in text_of_pages for name in TABLES)
    page = (RESULTS / "README.md").read_text()
    assert readme.render_results_page(RESULTS) == page
    folders = {path.name for path in RESULTS.iterdir() if path.is_dir()}
    assert set(re.findall(r"\]\((\S+)/report.md\)", page)) == folders


def test_committed_reports_equal_rendered_rows():
    for result in read_all_results(RESULTS):
        rendered = experiment.render_report(result.kind, result.rows, result.provenance)
        assert rendered == (result.folder / "report.md").read_text(), result.name


def test_committed_results_stay_below_size_limit():
    limits = {RESULTS: 5_000_000, ROOT / "cab_hf" / "adapters": 10_000_000}
    for folder, max_bytes in limits.items():
        files = [path for path in folder.rglob("*") if path.is_file()]
        # rendering a committed run writes results.csv, which git ignores
        assert sum(path.stat().st_size for path in files if path.suffix != ".csv") < max_bytes
    assert not list(RESULTS.rglob("*.jsonl")) and len(list(RESULTS.glob("*/samples.jsonl.xz"))) > 9


def test_methods_are_merged_into_one_row():
    rows = [("cab", 1500.0, 0.5), ("cab", 2500.0, None), ("sdpa", 4000.0, 0.25)]
    rows = pandas.DataFrame(rows, columns=["way", "ms", "kl"]).assign(length=4096)
    wide = frames.merge_methods(frames.add_seconds(rows), "cab", "way", ["length"])
    # means ignore missing values
    wide["pair"] = frames.both(wide, "kl", "sdpa.kl", report.digits)
    wide["half"] = frames.both(wide, "kl", "none.kl", report.digits)
    shown = frames.show(wide, "length sdpa.seconds seconds none pair half", seconds="CAB, s")
    text = report.as_markdown(shown).splitlines()
    assert text[0] == "| tokens | seconds | CAB, s | none | pair | half |"
    assert text[2:] == ["| 4,096 | 4.00 | 2.00 | – | 0.500 (0.250) | – |"]


def test_extrapolated_time_has_an_approximation_sign():
    rows = [(13.4, "FA3", False), (842.0, "FA3", True), (None, None, None)]
    rows = pandas.DataFrame(rows, columns=["baseline_ms", "baseline", "extrapolated"])
    shown = frames.add_fastest(rows)["fastest"]
    assert shown[:2].tolist() == ["13.4 FA3", "≈ 842 FA3"] and pandas.isna(shown[2])


def test_rows_follow_the_order_of_labels():
    rows = pandas.DataFrame({"method": ["a", "b", "c", "a"], "n": range(4)})
    chosen = frames.in_order(rows, "method", {"c": "C", "a": "A"})
    assert chosen[["label", "n"]].to_numpy().tolist() == [["C", 2], ["A", 0], ["A", 3]]
    with pytest.raises(ValueError, match="must have rows with method d, got none"):
        frames.in_order(rows, "method", {"d": "D"})


def test_default_table_shows_speed_and_quality_of_one_config(results):
    page = readme.update_tables(PAGE, results)
    assert page.startswith("a\n<!--") and page.endswith("<!-- end -->\nb\n") and "stale" not in page
    assert readme.update_tables(page, results) == page
    shown = table("default", results)
    assert [row[:2] for row in shown[:2]] == [["32,768", "dense"], ["32,768", "default"]]
    # the cells from the threshold to the recall; recall after the prompt was not measured
    threshold = CabConfig().mass_threshold
    assert shown[1][2:9] == [str(threshold), "0.50", "100", "2.00", "0.0200", "–", "0.75"]
    long_default = shown[len(CONFIGURATIONS) + 1]
    assert long_default[:3] == ["131,072", "default", f"{threshold / 4:g}"]


def test_default_table_results_have_clean_commits():
    for name in pages.DEFAULT_FOLDERS:
        commit = read_results(RESULTS / name).provenance["commit"]
        assert re.fullmatch("[0-9a-f]{40}", commit), name


def test_sentence_needs_exactly_one_row(results):
    assert "128k prompt comes 2.5 × sooner" in TABLES["headline"](results)
    rows = frames.rows_of([read_results(results / picture.TIMES)])
    with pytest.raises(ValueError, match="must have one row for a number, got 2"):
        frames.get_only_row(rows, implementation="cab")


def test_picture_command_writes_plan_and_image(results, monkeypatch, tmp_path):
    small = CabConfig(query_block=16, key_block=16, min_length=0)
    load = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda name, device: load(name, cab_config=small))
    text = tmp_path / "a.txt"
    text.write_text("The grass is green. " * 5)
    options = {"text": text, "model": "tiny", "length": 512, "layer": 0, "head": 0}
    options["out"] = results / picture.PLAN
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert picture.main(words) == 0
    plan = json.loads((results / picture.PLAN).read_text())
    assert len(plan["rows"]) == 512 // 16 and 0 < plan["density"] <= 1
    assert plan["provenance"]["text"]["name"] == "a.txt"
    picture.draw(results)
    assert (results / picture.PICTURE).is_file()


def fidelity_run(folder, config, model="a", **settings):
    """Write a fidelity run of ``config`` with two texts."""
    probes = {"recall": {"ratio": 0.9}, "tasks": {"delta": -0.013}}
    rows = [
        {"text": text, "length": 32768, "method": "cab", "density": 0.2, "over_dense": 0.5}
        | {"continuation": {"kl": 0.02}, **probes}
        for text in ("one", "other")
    ]
    full = {"length": 32768, "method": "full", "continuation": {"kl": 0.001}}
    settings |= {"model": model, "cab_configs": {"cab": config}}
    write(folder, [*rows, full], experiment="fidelity", settings=settings)


def test_runs_of_one_training_are_pooled():
    values = {"density": 0.25, "folder": "first", "recall_border.correct": None}
    values |= {"recall_border.n": None, "perplexity_border.value": [2.0, None]}
    counts = {"recall.correct": [3, 1], "recall.n": [4, 6], "perplexity.value": [2.0, 8.0]}
    pooled = pages.pool_runs(pandas.DataFrame({**values, **counts}))
    assert pooled["recall"] == pytest.approx(0.4) and pooled["runs"] == 2
    assert pooled["perplexity"] == pytest.approx(4.0) and pooled["each"] == "2.00, 8.00"
    assert pooled[["recall_border", "perplexity_border"]].isna().all()


@pytest.mark.parametrize(
    ("row", "sparse", "exact", "error"),
    [
        ({}, "all layers", None, None),
        ({"sparse": 2}, "layers without a window", "sliding windows", None),
        ({"windowed": "exact"}, "all layers", "sliding windows, if any", None),
        ({"verdict": "refused", "said": "x is set (y); do z. Or w."}, None, None, "x is set (y)"),
    ],
    ids=["all layers", "some layers", "windows", "refused"],
)
def test_model_type_row_states_sparse_exact_or_refused(row, sparse, exact, error):
    row = {"verdict": "exact", "layers": 4, "sparse": 4, "said": None, **row}
    assert pages.describe_layers(row) == {"sparse": sparse, "exact": exact, "error": error}


def test_models_table_lists_models_of_default_runs(results):
    default = json.loads(json.dumps(asdict(CabConfig(min_length=0))))
    for name in ("here", "of other weights"):
        fidelity_run(results / name, default, model_sha256=name)
    fidelity_run(results / "by-another", {**default, "mass_threshold": 0.5}, "b")
    fidelity_run(results / "by-an-older", {**default, "exact_stride": 0}, "c")
    fidelity_run(results / "fidelity-trained-cab", default, "d")
    others = {"model": "e", "cab_configs": {"cab": default}}
    rows = [{"method": "full", "length": 32768, "density": 1.0}]
    write(results / "by-others", rows, experiment="fidelity", settings=others)
    cells = ["0.20", "0.50", "0.0200 (0.00100)", "–", "× 0.90", "–", "-1.3 points"]
    assert table("models", results) == 2 * [["a", "32,768", "2", *cells]]


@pytest.fixture
def words(results, tmp_path_factory, monkeypatch):
    """Return the options of the command, for a page with the default table and a page without."""
    docs = tmp_path_factory.mktemp("docs")
    (docs / "page.md").write_text(PAGE)
    (docs / "more.md").write_text("no tables are needed here")
    monkeypatch.setattr(readme, "render_results_page", lambda results: "all\n")
    options = {"page": docs / "page.md", "docs": docs / "none", "training": docs / "more.md"}
    options["results"] = results
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def test_add_run_is_idempotent_or_refused(results, words, tmp_path_factory, capsys):
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
    assert "fidelity-mine exists. Rename" in capsys.readouterr().err
    fidelity_run(run, asdict(CabConfig(query_block=32)))
    run = run.rename(run.with_name("fidelity-small-blocks"))
    assert readme.main([*words, "--add", str(run)]) == 0
    assert "in the table" not in capsys.readouterr().out
    # a run is not added if a page cannot be written
    page.write_text("<!-- table: other -->\n<!-- end -->\n")
    run = run.rename(run.with_name("fidelity-of-an-hour"))
    assert readme.main([*words, "--add", str(run)]) == 2
    assert not (results / run.name).exists()
    assert readme.main([*words, "--add", str(page.parent)]) == 2
    assert f"{page.parent} has no results.json" in capsys.readouterr().err


def test_command_writes_pages_and_packs_large_files(results, words, monkeypatch):
    folder = results / picture.TIMES
    (folder / "samples.jsonl").write_text("{}")
    assert readme.main(words) == 0
    assert {path.name for path in folder.iterdir()} == {"results.json", "samples.jsonl.xz"}
    assert (results / "README.md").read_text() == "all\n"
    assert Path(words[1]).read_text() == readme.update_tables(PAGE, results)
    assert (results / picture.PICTURE).stat().st_size > 5_000
    # large results are compressed as well, and give the same rows
    before = read_results(folder)
    monkeypatch.setattr(readme, "LARGE_RESULTS", 0)
    assert readme.main(words) == 0
    assert {path.name for path in folder.iterdir()} == {"results.json.xz", "samples.jsonl.xz"}
    assert read_results(folder) == before
    report.write_results(folder, before.rows, before.provenance)
    assert not (folder / "results.json.xz").exists()


@pytest.mark.parametrize(
    ("results_of", "page", "message"),
    [
        (None, PAGE, f"{SHORT} has no results.json"),
        ({'"experiment"': '"other"'}, PAGE, "results.json names no experiment"),
        ({}, PAGE.replace("<!-- end -->", ""), "must end with <!-- end -->"),
        ({}, PAGE.replace("default", "other"), "got 'other' in the page"),
    ],
    ids=["no results", "no experiment", "marker", "unknown table"],
)
def test_missing_results_raise_before_pages_are_written(
    results, words, capsys, results_of, page, message
):
    path = results / SHORT / "results.json"
    text = path.read_text()
    path.unlink()
    if results_of is not None:
        for name, other in results_of.items():
            text = text.replace(name, other)
        path.write_text(text)
    Path(words[1]).write_text(page)
    assert readme.main(words) == 2
    assert message in capsys.readouterr().err
    assert Path(words[1]).read_text() == page and not (results / "README.md").exists()
