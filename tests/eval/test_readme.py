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
RESULTS_FOLDER = ROOT / "eval" / "results"
# result folders of the default table, at 32,768 and 131,072 tokens
SHORT_PROMPT_RUN, LONG_PROMPT_RUN = pages.DEFAULT_FOLDERS
# method of a fidelity run -> label in the default table
LABEL_BY_METHOD = {"dense": "dense", "cab": "default"}
# a page with an outdated table
OUTDATED_PAGE = "a\n<!-- table: default -->\nstale\n<!-- end -->\nb\n"


def write_result_folder(folder, rows, versions=("torch",), settings=(), **provenance):
    """Write a result folder and return its results.

    Args:
        folder: the folder.
        rows: rows of the results.
        versions: names of packages whose version is recorded.
        settings: settings that replace the defaults of this function.
        provenance: fields of the provenance that replace the defaults of this function.
    """
    folder.mkdir(exist_ok=True)
    default_settings = {
        "keys": 1,
        "filler": "noise",
        "methods": ["cab"],
        "device": "cuda",
        "note": "x",
    }
    recorded_provenance = {
        "experiment": "passkey",
        "device": "a GPU",
        "commit": "0123456789",
        **provenance,
    }
    recorded_provenance |= {
        "versions": dict.fromkeys(versions, "2"),
        "settings": default_settings | dict(settings),
    }
    report.write_results(folder, rows, recorded_provenance)
    return read_results(folder)


def render_cells(table_name, results_folder):
    """Return the cells of a table of a page, as a list per row, without the header row."""
    page = readme.update_tables(
        f"<!-- table: {table_name} -->\n<!-- end -->\n", results_folder, "../"
    )
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def make_fidelity_rows(length, methods):
    """Yield rows of two texts; method number n has KL n / 100, and 1 / n of the dense time."""
    for text, recall_share in (("one", 0.5), ("other", 1.0)):
        for method_number, method in enumerate(methods, 1):
            case_fields = {
                "text": text,
                "length": length,
                "method": method,
                "density": 1 / method_number,
            }
            time_fields = {"predict_ms": 10.0, "attend_ms": 90.0, "over_dense": 1 / method_number}
            yield {
                **case_fields,
                **time_fields,
                "continuation": {"kl": method_number / 100},
                "recall": {"share": recall_share},
            }


@pytest.fixture
def results_folder(tmp_path):
    """Return a folder with the results of the default table and of the picture."""
    default_config_fields = asdict(CabConfig(min_length=0))
    for folder, length in ((SHORT_PROMPT_RUN, 32_768), (LONG_PROMPT_RUN, 131_072)):
        configs = {name: {**default_config_fields} for name in LABEL_BY_METHOD if name != "dense"}
        rows = list(make_fidelity_rows(length, LABEL_BY_METHOD))
        write_result_folder(
            tmp_path / folder, rows, settings={"cab_configs": configs}, commit=folder
        )
    rows = []
    for length in picture.DRAWN_LENGTHS:
        cab_fields = {
            "implementation": "cab",
            "ms": 1000.0,
            "baseline_ms": 2500.0,
            "over_best": 2.5,
        }
        rows.append({"length": length, "density": 0.1, **cab_fields})
    write_result_folder(tmp_path / picture.TIMES_FOLDER, rows, commit="fedcba9876")
    plan = {"query_block": 128, "key_block": 64, "length": 1024, "density": 0.25}
    plan["rows"] = ["c000", "f000", "fc00", "ff00", "ffc0", "fff0", "fffc", "ffff"]
    (tmp_path / picture.PLAN_FILE).write_text(json.dumps(plan))
    return tmp_path


def test_committed_pages_equal_rendered_tables():
    text_of_pages = ""
    for path in (ROOT / "README.md", ROOT / "finetune" / "README.md", *ROOT.glob("docs/*.md")):
        page = path.read_text()
        root_prefix = "" if path.parent == ROOT else "../"
        assert readme.update_tables(page, RESULTS_FOLDER, root_prefix) == page, path
        text_of_pages += page
    assert all(f"<!-- table: {name} -->" in text_of_pages for name in TABLES)
    page = (RESULTS_FOLDER / "README.md").read_text()
    assert readme.render_results_page(RESULTS_FOLDER) == page
    folders = {path.name for path in RESULTS_FOLDER.iterdir() if path.is_dir()}
    assert set(re.findall(r"\]\((\S+)/report.md\)", page)) == folders


def test_committed_reports_equal_rendered_rows():
    for result in read_all_results(RESULTS_FOLDER):
        rendered_report = experiment.render_report(
            result.experiment_class, result.rows, result.provenance
        )
        assert rendered_report == (result.folder / "report.md").read_text(), result.name


def test_committed_results_stay_below_size_limit():
    max_bytes_by_folder = {RESULTS_FOLDER: 5_000_000, ROOT / "cab_hf" / "adapters": 10_000_000}
    for folder, max_bytes in max_bytes_by_folder.items():
        files = [path for path in folder.rglob("*") if path.is_file()]
        # rendering a committed run writes results.csv, which git ignores
        assert sum(path.stat().st_size for path in files if path.suffix != ".csv") < max_bytes
    assert (
        not list(RESULTS_FOLDER.rglob("*.jsonl"))
        and len(list(RESULTS_FOLDER.glob("*/samples.jsonl.xz"))) > 9
    )


def test_methods_are_merged_into_one_row():
    rows = [("cab", 1500.0, 0.5), ("cab", 2500.0, None), ("sdpa", 4000.0, 0.25)]
    rows = pandas.DataFrame(rows, columns=["way", "ms", "kl"]).assign(length=4096)
    merged_rows = frames.merge_methods(frames.add_seconds(rows), "cab", "way", ["length"])
    # means ignore missing values
    merged_rows["pair"] = frames.format_pairs(merged_rows, "kl", "sdpa.kl", report.format_digits)
    merged_rows["half"] = frames.format_pairs(merged_rows, "kl", "none.kl", report.format_digits)
    merged_table = frames.make_table(
        merged_rows, "length sdpa.seconds seconds none pair half", seconds="CAB, s"
    )
    lines = report.as_markdown(merged_table).splitlines()
    assert lines[0] == "| tokens | seconds | CAB, s | none | pair | half |"
    assert lines[2:] == ["| 4,096 | 4.00 | 2.00 | – | 0.500 (0.250) | – |"]


def test_extrapolated_time_has_an_approximation_sign():
    rows = [(13.4, "FA3", False), (842.0, "FA3", True), (None, None, None)]
    rows = pandas.DataFrame(rows, columns=["baseline_ms", "baseline", "extrapolated"])
    fastest_times = frames.add_fastest_dense(rows)["fastest"]
    assert fastest_times[:2].tolist() == ["13.4 FA3", "≈ 842 FA3"] and pandas.isna(fastest_times[2])


def test_rows_follow_the_order_of_labels():
    rows = pandas.DataFrame({"method": ["a", "b", "c", "a"], "n": range(4)})
    sorted_rows = frames.sort_by_label(rows, "method", {"c": "C", "a": "A"})
    assert sorted_rows[["label", "n"]].to_numpy().tolist() == [["C", 2], ["A", 0], ["A", 3]]
    with pytest.raises(ValueError, match="must have rows with method d, got none"):
        frames.sort_by_label(rows, "method", {"d": "D"})


def test_default_table_shows_speed_and_quality_of_one_config(results_folder):
    page = readme.update_tables(OUTDATED_PAGE, results_folder)
    assert page.startswith("a\n<!--") and page.endswith("<!-- end -->\nb\n") and "stale" not in page
    assert readme.update_tables(page, results_folder) == page
    table_rows = render_cells("default", results_folder)
    assert [row[:2] for row in table_rows[:2]] == [["32,768", "dense"], ["32,768", "default"]]
    # the cells from the threshold to the recall; recall after the prompt was not measured
    threshold = CabConfig().mass_threshold
    assert table_rows[1][2:9] == [str(threshold), "0.50", "100", "2.00", "0.0200", "–", "0.75"]
    long_default_row = table_rows[len(LABEL_BY_METHOD) + 1]
    assert long_default_row[:3] == ["131,072", "default", f"{threshold / 4:g}"]


def test_default_table_results_have_clean_commits():
    for name in pages.DEFAULT_FOLDERS:
        commit = read_results(RESULTS_FOLDER / name).provenance["commit"]
        assert re.fullmatch("[0-9a-f]{40}", commit), name


def test_sentence_without_single_row_raises(results_folder):
    assert "128k prompt comes 2.5 × sooner" in TABLES["headline"](results_folder)
    rows = frames.concatenate_rows([read_results(results_folder / picture.TIMES_FOLDER)])
    with pytest.raises(ValueError, match="must have one row for a number, got 2"):
        frames.get_only_row(rows, implementation="cab")


def test_picture_command_writes_plan_and_image(results_folder, monkeypatch, tmp_path):
    small_block_config = CabConfig(query_block=16, key_block=16, min_length=0)
    load_model = loading.load_model
    monkeypatch.setattr(
        loading, "load_model", lambda name, device: load_model(name, cab_config=small_block_config)
    )
    text_file = tmp_path / "a.txt"
    text_file.write_text("The grass is green. " * 5)
    options = {"text": text_file, "model": "tiny", "length": 512, "layer": 0, "head": 0}
    options["out"] = results_folder / picture.PLAN_FILE
    arguments = [
        argument for name, value in options.items() for argument in (f"--{name}", str(value))
    ]
    assert picture.main(arguments) == 0
    plan = json.loads((results_folder / picture.PLAN_FILE).read_text())
    assert len(plan["rows"]) == 512 // 16 and 0 < plan["density"] <= 1
    assert plan["provenance"]["text"]["name"] == "a.txt"
    picture.draw_picture(results_folder)
    assert (results_folder / picture.PICTURE_FILE).is_file()


def write_fidelity_run(folder, config, model="a", **settings):
    """Write a fidelity run of ``config`` with two texts."""
    probe_results = {"recall": {"ratio": 0.9}, "tasks": {"delta": -0.013}}
    rows = [
        {"text": text, "length": 32768, "method": "cab", "density": 0.2, "over_dense": 0.5}
        | {"continuation": {"kl": 0.02}, **probe_results}
        for text in ("one", "other")
    ]
    full_row = {"length": 32768, "method": "full", "continuation": {"kl": 0.001}}
    settings |= {"model": model, "cab_configs": {"cab": config}}
    write_result_folder(folder, [*rows, full_row], experiment="fidelity", settings=settings)


def test_runs_of_one_training_are_pooled():
    equal_columns = {"density": 0.25, "folder": "first", "recall_border.correct": None}
    equal_columns |= {"recall_border.n": None, "perplexity_border.value": [2.0, None]}
    differing_columns = {
        "recall.correct": [3, 1],
        "recall.n": [4, 6],
        "perplexity.value": [2.0, 8.0],
    }
    pooled_row = pages.pool_runs(pandas.DataFrame({**equal_columns, **differing_columns}))
    assert pooled_row["recall"] == pytest.approx(0.4) and pooled_row["runs"] == 2
    assert pooled_row["perplexity"] == pytest.approx(4.0) and pooled_row["each"] == "2.00, 8.00"
    assert pooled_row[["recall_border", "perplexity_border"]].isna().all()


@pytest.mark.parametrize(
    ("row", "sparse_layers", "exact_layers", "error"),
    [
        ({}, "all layers", None, None),
        ({"sparse": 2}, "layers without a window", "sliding windows", None),
        ({"windowed": "exact"}, "all layers", "sliding windows, if any", None),
        ({"verdict": "refused", "said": "x is set (y); do z. Or w."}, None, None, "x is set (y)"),
    ],
    ids=["all layers", "some layers", "windows", "refused"],
)
def test_model_type_row_states_sparse_and_exact_layers_or_error(
    row, sparse_layers, exact_layers, error
):
    row = {"verdict": "exact", "layers": 4, "sparse": 4, "said": None, **row}
    assert pages.describe_layers(row) == {
        "sparse": sparse_layers,
        "exact": exact_layers,
        "error": error,
    }


def test_models_table_lists_models_of_default_runs(results_folder):
    default_config_fields = json.loads(json.dumps(asdict(CabConfig(min_length=0))))
    for name in ("here", "of other weights"):
        write_fidelity_run(results_folder / name, default_config_fields, model_sha256=name)
    write_fidelity_run(
        results_folder / "by-another", {**default_config_fields, "mass_threshold": 0.5}, "b"
    )
    write_fidelity_run(
        results_folder / "by-an-older", {**default_config_fields, "exact_stride": 0}, "c"
    )
    write_fidelity_run(results_folder / "fidelity-trained-cab", default_config_fields, "d")
    other_settings = {"model": "e", "cab_configs": {"cab": default_config_fields}}
    rows = [{"method": "full", "length": 32768, "density": 1.0}]
    write_result_folder(
        results_folder / "by-others", rows, experiment="fidelity", settings=other_settings
    )
    cells = ["0.20", "0.50", "0.0200 (0.00100)", "–", "× 0.90", "–", "-1.3 points"]
    assert render_cells("models", results_folder) == 2 * [["a", "32,768", "today's", "2", *cells]]


@pytest.fixture
def page_arguments(results_folder, tmp_path_factory, monkeypatch):
    """Return the options of the command, for a page with the default table and a page without."""
    docs_folder = tmp_path_factory.mktemp("docs")
    (docs_folder / "page.md").write_text(OUTDATED_PAGE)
    (docs_folder / "more.md").write_text("no tables are needed here")
    monkeypatch.setattr(readme, "render_results_page", lambda results_folder: "all\n")
    options = {
        "page": docs_folder / "page.md",
        "docs": docs_folder / "none",
        "training": docs_folder / "more.md",
    }
    options["results"] = results_folder
    return [argument for name, value in options.items() for argument in (f"--{name}", str(value))]


def test_added_run_is_copied_and_existing_name_is_refused(
    results_folder, page_arguments, tmp_path_factory, capsys
):
    page_file = Path(page_arguments[1])
    page_file.write_text(f"{OUTDATED_PAGE}<!-- table: models -->\n<!-- end -->\n")
    run_folder = tmp_path_factory.mktemp("runs") / "fidelity-mine"
    write_fidelity_run(run_folder, asdict(CabConfig()))
    (run_folder / "results.csv").write_text("is in results.json as well")
    assert readme.main([*page_arguments, "--add", str(run_folder)]) == 0
    assert [path.name for path in (results_folder / run_folder.name).iterdir()] == ["results.json"]
    assert "| a | 32,768 | today's | 2 |" in page_file.read_text()
    assert "fidelity-mine is in the table of models" in capsys.readouterr().out
    assert readme.main([*page_arguments, "--add", str(run_folder)]) == 2
    assert "fidelity-mine exists. Rename" in capsys.readouterr().err
    write_fidelity_run(run_folder, asdict(CabConfig(query_block=32)))
    run_folder = run_folder.rename(run_folder.with_name("fidelity-small-blocks"))
    assert readme.main([*page_arguments, "--add", str(run_folder)]) == 0
    assert "in the table" not in capsys.readouterr().out
    # a run is not added if a page cannot be written
    page_file.write_text("<!-- table: other -->\n<!-- end -->\n")
    run_folder = run_folder.rename(run_folder.with_name("fidelity-of-an-hour"))
    assert readme.main([*page_arguments, "--add", str(run_folder)]) == 2
    assert not (results_folder / run_folder.name).exists()
    assert readme.main([*page_arguments, "--add", str(page_file.parent)]) == 2
    assert f"{page_file.parent} has no results.json" in capsys.readouterr().err


def test_command_writes_pages_and_packs_large_files(results_folder, page_arguments, monkeypatch):
    times_folder = results_folder / picture.TIMES_FOLDER
    (times_folder / "samples.jsonl").write_text("{}")
    assert readme.main(page_arguments) == 0
    assert {path.name for path in times_folder.iterdir()} == {"results.json", "samples.jsonl.xz"}
    assert (results_folder / "README.md").read_text() == "all\n"
    assert Path(page_arguments[1]).read_text() == readme.update_tables(
        OUTDATED_PAGE, results_folder
    )
    assert (results_folder / picture.PICTURE_FILE).stat().st_size > 5_000
    # large results are compressed as well, and give the same rows
    results_before = read_results(times_folder)
    monkeypatch.setattr(readme, "MAX_UNCOMPRESSED_BYTES", 0)
    assert readme.main(page_arguments) == 0
    assert {path.name for path in times_folder.iterdir()} == {"results.json.xz", "samples.jsonl.xz"}
    assert read_results(times_folder) == results_before
    report.write_results(times_folder, results_before.rows, results_before.provenance)
    assert not (times_folder / "results.json.xz").exists()


@pytest.mark.parametrize(
    ("replacements", "page", "message"),
    [
        (None, OUTDATED_PAGE, f"{SHORT_PROMPT_RUN} has no results.json"),
        ({'"experiment"': '"other"'}, OUTDATED_PAGE, "results.json names no experiment"),
        ({}, OUTDATED_PAGE.replace("<!-- end -->", ""), "must end with <!-- end -->"),
        ({}, OUTDATED_PAGE.replace("default", "other"), "got 'other' in the page"),
    ],
    ids=["no results", "no experiment", "marker", "unknown table"],
)
def test_invalid_input_is_refused_before_pages_are_written(
    results_folder, page_arguments, capsys, replacements, page, message
):
    results_file = results_folder / SHORT_PROMPT_RUN / "results.json"
    content = results_file.read_text()
    results_file.unlink()
    if replacements is not None:
        for old_text, new_text in replacements.items():
            content = content.replace(old_text, new_text)
        results_file.write_text(content)
    Path(page_arguments[1]).write_text(page)
    assert readme.main(page_arguments) == 2
    assert message in capsys.readouterr().err
    assert (
        Path(page_arguments[1]).read_text() == page and not (results_folder / "README.md").exists()
    )
