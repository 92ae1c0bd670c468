"""The pages that show results: what is in them, that they are current, and what is refused."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from cab_hf import CabConfig
from cab_hf.eval import readme, report
from cab_hf.eval.passkey import Passkey
from cab_hf.eval.readme import CHOOSING, KEPT, SPEED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results"
COMMITTED = ["fidelity-default", "smollm2-8192-text-1key", "families"]
PAGE = "a\n<!-- table: default -->\nold\n<!-- end -->\nb\n"
MADE = {"experiment": "passkey", "device": "a GPU", "commit": "0123456789"}
LENGTHS = (8192, 65_536, 131_072)


def answers(method, accuracy, density, delta=None):
    """A row of passkey."""
    row = {"method": method, "length": 8, "keys": 1, "n": 100, "correct": round(100 * accuracy)}
    row |= {"accuracy": accuracy, "low": 0.0, "high": 1.0, "density": density}
    if delta is not None:
        row |= {"delta": delta, "delta_low": delta - 0.1, "delta_high": delta + 0.1}
        row |= {"pairs": 100, "same": 1}
    return row


def write(folder, rows, **made):
    folder.mkdir()
    settings = {"keys": 1, "filler": "noise", "methods": ["cab"], "device": "cuda", "note": "x"}
    versions = made.pop("versions", {"torch": "2"})
    settings |= made.pop("settings", {})
    report.write_results(folder, rows, {**MADE, "versions": versions, "settings": settings, **made})


@pytest.fixture
def results(tmp_path):
    """A folder that has all that both pages ask for; the speed rows have passkey's experiment."""
    *most, last = KEPT
    for name, length in zip(most, (8192,), strict=True):
        rows = []
        for text, kl in (("one", 0.001), ("other", 0.003)):
            place = {"text": text, "length": length}
            ratios = {"recall": 0.9 + 100 * kl, "recall_border": 1.0, "perplexity_border": 1.01}
            kept = {probe: {"ratio": ratio} for probe, ratio in ratios.items()}
            rows.append(
                {**place, "method": "cab", "density": 0.3, "continuation": {"kl": kl}, **kept}
            )
            full = {"method": "full", "density": 1.0, "continuation": {"kl": 0.001}}
            rows.append({**place, **full})
        write(tmp_path / name, rows)
    # not everything was measured
    few = {"continuation": {"kl": 0.002}, "recall": {"ratio": 1.1}}
    write(tmp_path / last, [{"length": 65_536, "method": "cab", "density": 0.2, **few}])
    rows = []
    for length in LENGTHS:
        rows.append({"length": length, "implementation": "FA3", "ms": 250.0})
        cab = {"implementation": "cab", "ms": 100.0, "density": 0.1, "over_best": 2.5}
        rows.append({"length": length, "baseline_ms": 250.0, **cab})
    write(tmp_path / SPEED, rows, commit="fedcba9876")
    write(tmp_path / CHOOSING, [{"length": 8192, "ms": 0.12}])
    return tmp_path


# --- what is shown


@pytest.mark.parametrize("name", COMMITTED)
def test_a_section_holds_all_that_its_report_begins_with(name):
    actual = readme.read_results(RESULTS / name)
    text = readme.section(actual, [actual])
    complete = (RESULTS / name / "report.md").read_text()
    title, table, said, *_ = complete.split("\n\n")
    assert text.startswith(f"#{title}\n\n{table}\n\n{said}\n\n![")
    assert text.split("```")[1] == complete.split("```")[1]
    assert f"{actual.provenance['device']}, torch " in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [Path(link).name for link in links] == ["figure.png", "report.md"]
    assert all((RESULTS / link).is_file() for link in links)


def test_headings_say_what_varies(tmp_path):
    rows = [answers("dense", 0.9, 1.0)]
    both = {"torch": "2", "flash": "4"}
    write(tmp_path / "a", rows, settings={"note": "no option"}, versions=both)
    # what grows, what is no option and lists are not told
    write(tmp_path / "b", rows, settings={"keys": 4, "methods": ["dense"], "depths": [0]})
    result = [readme.read_results(tmp_path / name) for name in "ab"]
    shown = [readme.section(each, result).splitlines()[0] for each in result]
    assert shown == [
        "## Passkey retrieval: keys 1, flash 4",
        "## Passkey retrieval: keys 4, no flash",
    ]


def test_runs_that_differ_in_nothing_short_go_by_their_folders(tmp_path):
    for name in "ab":
        write(tmp_path / name, [answers("dense", 0.9, 1.0)], settings={"methods": [name]})
    write(tmp_path / "c", [answers("dense", 0.9, 1.0)], settings={"keys": 4})
    result = [readme.read_results(tmp_path / name) for name in "abc"]
    shown = [readme.section(each, result).splitlines()[0] for each in result]
    assert shown == [
        "## Passkey retrieval: keys 1 (a)",
        "## Passkey retrieval: keys 1 (b)",
        "## Passkey retrieval: keys 4",
    ]


def test_all_folders_are_on_the_page_in_order(results, monkeypatch):
    class Later(Passkey):
        name = "families"

    kinds = {"passkey": Passkey, "families": Later}
    monkeypatch.setattr(readme, "named", kinds.get)
    write(results / "a", [answers("dense", 0.9, 1.0)], experiment="families")
    for name in (SPEED, CHOOSING, *KEPT):
        write(results / f"{name}-passkey", [answers("dense", 0.9, 1.0)])
        (results / name / "results.json").unlink()
        (results / name).rmdir()
    shown = re.findall(r"\]\((\S+)/report.md\)", readme.results_page(results))
    ordered = sorted(f"{name}-passkey" for name in (*KEPT, CHOOSING, SPEED))
    assert shown == [*ordered, "a"]


def test_the_table_of_the_readme_by_hand(results):
    page = readme.page_with_tables(PAGE, results)
    assert "old" not in page and page.startswith("a\n") and page.endswith("<!-- end -->\nb\n")
    heading = "| tokens | best dense s | CAB s | × | choosing, ms a layer | density |"
    kept = "density of texts | KL (noise) | in-text recall | block-start recall |"
    assert f"{heading} {kept} block-start perplexity |" in page
    # means over texts
    kept = "0.30 | 0.00200 (0.00100) | × 1.10 | × 1.00 | × 1.01 |"
    assert f"| 8,192 | 0.250 | 0.100 | 2.50 | 0.120 | 0.10 | {kept}" in page
    kept = "0.20 | 0.00200 | × 1.10 | – | – |"
    assert f"| 65,536 | 0.250 | 0.100 | 2.50 | – | 0.10 | {kept}" in page
    assert "| 131,072 | 0.250 | 0.100 | 2.50 | – | 0.10 | – | – | – | – | – |" in page
    assert (
        "a GPU, torch 2, commit fedcba9 and 0123456; more in [eval/results](eval/results)." in page
    )
    assert page.count("\n| ") == 2 + len(LENGTHS)


def test_a_commit_whose_files_had_changed_is_shown_as_that(results):
    result = readme.read_results(results / SPEED)
    assert "commit fedcba9;" in f"{readme.source([result])};"
    result.provenance["commit"] = "fedcba9876-dirty"
    assert readme.source([result]).endswith("commit fedcba9-dirty")


def test_what_an_earlier_default_chose_is_shown_as_that(results):
    result, other = (readme.read_results(results / name) for name in (SPEED, CHOOSING))
    result.provenance["settings"]["cab_config"] = {"select": "clusters", "key_block": 64}
    other.provenance["settings"]["cab_configs"] = {"cab": {"key_block": 64}}
    assert readme.source([result]).endswith("; by the default of cab_hf 0.2")
    assert readme.source([result, other]).endswith("; in part by the default of cab_hf 0.2")
    assert readme.source([other]).endswith("commit 0123456")


def test_a_page_made_anew_is_the_same(results):
    page = readme.page_with_tables(PAGE, results)
    assert readme.page_with_tables(page, results) == page


# --- what is committed


def test_the_pages_show_the_committed_results():
    page = (ROOT / "README.md").read_text()
    assert readme.page_with_tables(page, RESULTS) == page
    below = [*(ROOT / "docs").glob("*.md"), ROOT / "finetune" / "README.md"]
    for path in below:
        page = path.read_text()
        assert readme.page_with_tables(page, RESULTS, "../") == page, path
    shown = "".join(path.read_text() for path in (ROOT / "README.md", *below))
    assert all(f"<!-- table: {name} -->" in shown for name in readme.TABLES)


def test_the_choices_of_a_user_are_compared_on_one_text(results):
    rows = [
        {"text": readme.COMPARED_TEXT, "method": method, "predict_ms": 1.0, "attend_ms": 2.5}
        | {"density": 0.1, "continuation": {"kl": 0.01}}
        | {probe: {"share": 0.9} for probe in readme.RECALLS}
        for method in readme.CHOICES.values()
    ]
    drop(results, readme.COMPARED)
    (results / readme.COMPARED).rmdir()
    write(results / readme.COMPARED, rows)
    table = readme.choices_table(results)
    assert "| default | 3.50 | 0.10 | 0.0100 | 0.90 | 0.90 | 0.90 |" in table


def test_types_of_models_are_counted(results):
    verdicts = ("exact", "exact", "refused", "not built")
    write(results / readme.FAMILIES, [{"verdict": verdict} for verdict in verdicts])
    said = readme.families_sentence(results).replace("\n", " ")
    assert said.startswith("Of 4 causal model types of transformers, 2 give the outputs")
    assert "1 are refused" in said and "1 could not be built" in said


def test_the_page_of_results_shows_all_of_them():
    assert readme.results_page(RESULTS) == (RESULTS / "README.md").read_text()


def test_results_are_small_enough_for_a_repository():
    for place, most in ((RESULTS, 5_000_000), (ROOT / "cab_hf" / "adapters", 10_000_000)):
        files = [path for path in place.rglob("*") if path.is_file()]
        # what renders a copy in place writes tables that git ignores
        assert sum(path.stat().st_size for path in files if path.suffix != ".csv") < most
    assert not list(RESULTS.rglob("*.jsonl")) and len(list(RESULTS.glob("*/samples.jsonl.xz"))) > 9


def test_a_step_of_training_is_shown_beside_all_dense_ones(results):
    def step(length, name, ms, density=1.0, over=None):
        row = {"length": length, "implementation": name, "ms": ms, "density": density}
        return row | {"over_best": over, "ceiling": 2.0, "peak_gib": 32.0}

    rows = [step(4096, "sdpa", 4000.0), step(4096, "FA4", 3000.0)]
    rows += [step(4096, "cab", 2000.0, 0.2, 1.5), step(8192, "cab", 9000.0, 0.2, 1.5)]
    how = {"experiment": "speed lora", "settings": {"layers": 32}}
    write(results / readme.STEPS[0], rows, **how)
    # of a length in several folders that of the last is shown
    write(results / readme.STEPS[1], [step(8192, "cab", 5000.0, 0.1)], **how)
    # a shape of fewer layers has a row of its own
    how["settings"] = {"layers": 4}
    write(results / readme.STEPS[2], [step(8192, "cab", 700.0, 0.1)], **how)
    result = readme.page_with_tables("<!-- table: lora -->\n<!-- end -->\n", results, "../")
    assert "| tokens | layers | sdpa s | FA4 s | cab s | × | at most | density | GiB |" in result
    assert "| 4,096 | 32 | 4.00 | 3.00 | 2.00 | 1.50 | 2.00 | 0.20 | 32.0 |" in result
    assert "| 8,192 | 32 | – | – | 5.00 | – | 2.00 | 0.10 | 32.0 |\n" in result
    assert "| 8,192 | 4 | – | – | 0.700 | – | 2.00 | 0.10 | 32.0 |\n\n" in result
    # seen from a folder further down
    assert "more in [eval/results](../eval/results)." in result


def test_what_trainings_keep_is_bold_where_it_is_less_for_sure(results):
    def row(method, probes, correct, perplexity):
        result = {"correct": correct, "n": 100, "value": perplexity}
        place = {"method": method, "length": readme.TRAINED_TOKENS, "cost": 0.5}
        return place | dict.fromkeys(probes, result)

    few = ("recall", "perplexity")
    most = (*few, "recall_border", "perplexity_border")
    kept = {"not at all": (0, 900.0), "dense": (90, 6.0)}
    for name, (folders, methods) in readme.TRAININGS.items():
        asked, values = few if name == "not at all" else most, kept.get(name, (50, 6.3))
        for run, folder in enumerate(folders):
            # the second run is 21 % worse, so that the geometric mean of both is by 10 %
            correct, perplexity = values[0], values[1] * 1.21**run
            rows = [row(method, asked, correct, perplexity) for method in methods]
            write(results / folder, rows, experiment="fidelity")
    # steps of dense training alone on a GPU; the first of them do not count
    log = results / readme.TRAININGS["dense"][0][0] / readme.TIMED
    log.parent.mkdir()
    seconds = [
        {"kind": "step", "step": n, "seconds": 9.0 if n <= 3 else n / 2} for n in range(1, 7)
    ]
    log.write_text(
        "".join(json.dumps(line) + "\n" for line in [{"identity": {}, "started": ""}, *seconds])
    )
    result = readme.page_with_tables("<!-- table: trained -->\n<!-- end -->\n", results, "../")
    assert (
        "| not at all | 1 | dense | 0.50 | **0.00 [0.00, 0.04]** | – | 900 | – | – | – |" in result
    )
    # 180 of 200 keys, and 50 of 100
    best, less = "0.90 [0.85, 0.93]", "**0.50 [0.40, 0.60]**"
    dense = f"| dense | 2 | dense | 0.50 | {best} | {best} | 6.00, 7.26 | 1.000 | 1.000 | 2.50 |"
    assert dense in result
    assert f"| cab | 1 | cab | 0.50 | {less} | {less} | 6.30 | 0.955 | 0.955 | – |" in result
    assert result.count("\n| ") == 2 + 9
    # what a folder lacks is refused
    rewrite(results, readme.TRAININGS["cab"][0][0])
    with pytest.raises(ValueError, match="must have one row of method "):
        readme.page_with_tables("<!-- table: trained -->\n<!-- end -->\n", results, "../")


def fidelity_run(folder, config, model="a", kl=0.02, **settings):
    """A run of the default, or of another config, on two texts."""
    asked = {"recall": {"ratio": 0.9}, "tasks": {"delta": -0.013}}
    rows = [
        {"text": text, "length": 32768, "method": "cab", "density": 0.2, "over_dense": 0.5}
        | {"continuation": {"kl": kl}, **asked}
        for text in ("one", "other")
    ]
    full = {"length": 32768, "method": "full", "continuation": {"kl": 0.001}}
    settings |= {"model": model, "cab_configs": {"cab": config}}
    write(folder, [*rows, full], experiment="fidelity", settings=settings)


def test_models_are_shown_that_the_default_has_read(results):
    default = json.loads(json.dumps(asdict(CabConfig(min_length=0))))
    fidelity_run(results / "by-default", default)
    fidelity_run(results / "by-another", {**default, "mass_threshold": 0.5}, "b")
    fidelity_run(results / "by-an-older", {**default, "exact_stride": 0}, "c")
    settings = {"model": "e", "cab_configs": {"cab": default}}
    rows = [{"method": "full", "length": 32768, "density": 1.0}]
    write(results / "by-others", rows, experiment="fidelity", settings=settings)
    fidelity_run(results / readme.TRAININGS["cab"][0][0], default, "d")
    page = readme.page_with_tables("<!-- table: models -->\n<!-- end -->\n", results, "../")
    row = "| a | 32,768 | 2 | 0.20 | 0.50 | 0.0200 (0.00100) | – | × 0.90 | – | -1.3 points |"
    assert row in page
    assert page.count("\n| ") == 3


def test_models_of_one_name_and_other_weights_have_a_row_each(results):
    default = json.loads(json.dumps(asdict(CabConfig(min_length=0))))
    for name in ("here", "there"):
        fidelity_run(results / name, default, model_sha256=name)
    page = readme.page_with_tables("<!-- table: models -->\n<!-- end -->\n", results, "../")
    assert page.count("| a | 32,768 | 2 |") == 2


def test_tasks_are_bold_where_they_are_surely_below_dense(results):
    def row(method, over, mean=None, **tasks):
        asked = {
            name: dict(zip(("share", "delta_high"), of, strict=True)) for name, of in tasks.items()
        }
        fields = {"length": 8192, "method": method, "density": 0.5, "over_dense": over}
        return {**fields, **asked, **({"tasks": {"delta": mean}} if mean else {})}

    rows = [
        row("dense", 1.0, uuid=(0.9, 0.0)),
        row("cab", 0.5, -0.01, uuid=(0.5, -0.1), tracking=(0.4, 0.1)),
        row("streaming", None, uuid=(0.7, 0.0)),
    ]
    write(results / readme.TASKED[0], rows, experiment="fidelity", settings={"model": "a"})
    page = readme.page_with_tables("<!-- table: tasks -->\n<!-- end -->\n", results, "../")
    assert "| a | 8,192 | dense | 0.50 | 1.00 | – | – | – | 0.90 |" in page
    assert "| a | 8,192 | cab | 0.50 | 0.50 | – | – | – | **0.50** | – | 0.40 |" in page
    # of the tasks that all were asked, and of all nine
    assert "| 0.50 | -1.0 points |" in page and "| 0.70 | – |" in page
    assert "| a | 8,192 | streaming | 0.50 | – |" in page


def test_a_run_is_added_once(results, tmp_path_factory, capsys, monkeypatch):
    run = tmp_path_factory.mktemp("runs") / "fidelity-mine"
    fidelity_run(run, asdict(CabConfig()))
    (run / "results.csv").write_text("is in results.json as well")
    docs = tmp_path_factory.mktemp("docs")
    page = docs / "page.md"
    page.write_text("<!-- table: models -->\n<!-- end -->\n")
    monkeypatch.setattr(readme, "results_page", lambda results: "all\n")
    monkeypatch.setattr(readme, "draw_default", lambda results: None)
    words = ["--page", str(page), "--training", str(page), "--docs", str(docs)]
    words += ["--results", str(results), "--add", str(run)]
    assert readme.main(words) == 0
    assert [path.name for path in (results / "fidelity-mine").iterdir()] == ["results.json"]
    assert "| a | 32,768 | 2 |" in page.read_text()
    assert capsys.readouterr().out == "fidelity-mine is in the table of models.\n"
    assert readme.main(words) == 2
    assert "fidelity-mine exists; rename" in capsys.readouterr().err
    other = run.with_name("fidelity-small-blocks")
    fidelity_run(other, asdict(CabConfig(query_block=32)))
    words[-1] = str(other)
    assert readme.main(words) == 0
    assert "the table of models is of fidelity by the default" in capsys.readouterr().out
    # nothing is added where a page cannot be written
    shown = page.read_text()
    page.write_text("<!-- table: other -->\n<!-- end -->\n")
    words[-1] = str(other.rename(run.with_name("fidelity-of-an-hour")))
    assert readme.main(words) == 2
    assert "the page has a table 'other'" in capsys.readouterr().err
    assert not (results / "fidelity-of-an-hour").exists()
    page.write_text(shown)
    words[-1] = str(docs)
    assert readme.main(words) == 2
    assert f"{docs} has no results.json" in capsys.readouterr().err


def test_what_ranks_share_is_shown_with_what_it_takes(results):
    def of(name, ms, over=None):
        row = {"implementation": name, "length": 131072, "world": 2, "peak_gib": 50.0, "ms": ms}
        row |= {"density": 1.0 if name == "cab_dense" else 0.1}
        return row | {"over_best": over, "baseline_ms": over and 5000.0}

    rows = [of("cab", 2000.0, 2.5), of("cab_dense", 5000.0, 1.0)]
    (step, _), (first, _) = readme.SHARED.values()
    write(results / step, rows, experiment="speed lora")
    write(results / first, [of("cab", 3000.0)], experiment="speed ttft")
    result = readme.page_with_tables("<!-- table: sharded -->\n<!-- end -->\n", results, "../")
    assert "| training step | 131,072 | 2 | 5.00 | 2.00 | 2.50 | 0.10 | 50.0 |\n" in result
    assert "| first token | 131,072 | 2 | – | 3.00 | – | 0.10 | 50.0 |\n\n" in result


def test_a_step_over_ranks_is_shown_beside_one(results):
    step = {"length": 32768, "implementation": "cab"}
    rows = [
        {
            **step,
            "spread": "alone",
            "world": 1,
            "ms": 4000.0,
            "tokens_s": 8192.0,
            "efficiency": 1.0,
        },
        {**step, "spread": "ddp", "world": 4, "ms": 8000.0, "tokens_s": 4096.0, "efficiency": 0.5},
        {**step, "spread": "ddp", "world": 2, "ms": 5000.0, "tokens_s": 6553.6, "efficiency": 0.8},
        {**step, "spread": "cp", "world": 2, "ms": None, "tokens_s": None, "efficiency": None},
    ]
    write(results / readme.SPREAD, rows, experiment="speed lora")
    result = readme.page_with_tables("<!-- table: spread -->\n<!-- end -->\n", results, "../")
    assert "| 32,768 | 1 | alone | cab | 4.00 | 8,192 | 100 % |\n" in result
    # in the order of ranks, whatever was measured first
    more = "| 32,768 | 2 | ddp | cab | 5.00 | 6,554 | 80.0 % |\n| 32,768 | 4 | ddp | cab | 8.00 |"
    assert more in result


def ranked(scheme, world, efficiency, **more):
    """A row of context parallelism."""
    row = {"scheme": scheme, "world": world, "length": 65536, "direction": "forward+backward"}
    result = {"efficiency": efficiency, "ms": None, "density": None, "shape": "llama3-8b"}
    return {**row, "measured": True, **result, **more}


def test_context_parallelism_is_shown_where_it_was_measured(results):
    marker = "<!-- table: parallel -->\n"
    page = f"{PAGE}{marker}<!-- end -->\n"
    rows = [
        ranked("grouped", 2, 0.75),
        ranked("ring", 8, None),
        ranked("grouped", 8, 0.875),
        ranked("grouped", 8, 0.5, direction="forward"),
        ranked("grouped", 16, 0.9, measured=False),
    ]
    made = {"experiment": "speed context-parallel"}
    write(results / readme.PARALLEL, rows, **made)
    result = readme.page_with_tables(page, results).split(marker)[1]
    assert result.startswith("| model | tokens | ranks | pass | ring | grouped | density |")
    assert "| llama3-8b | 65,536 | 8 | forward+backward | – | 87.5 % | – |\n" in result
    assert "| llama3-8b | 65,536 | 8 | forward | – | 50.0 % | – |\n\n" in result
    # longer texts stand below, in the same columns, and beside CAB what it spares
    longer = {"direction": "forward", "length": 131072}
    rows = [ranked("grouped", 2, 1.0, ms=30.0, **longer)]
    rows.append(ranked("grouped+cab", 2, 0.75, ms=4.0, density=0.1, **longer))
    write(results / readme.PARALLELS[1], rows, **made)
    result = readme.page_with_tables(page, results).split(marker)[1]
    assert (
        "| llama3-8b | 131,072 | 2 | forward | – | 100 % | 0.10 | 75.0 % | 7.50 × |\n\n" in result
    )


# --- what is refused


def drop(results, name):
    (results / name / "results.json").unlink()


def rewrite(results, name, **made):
    result = readme.read_results(results / name)
    provenance = {k: v for k, v in {**result.provenance, **made}.items() if v is not None}
    report.write_results(results / name, result.rows[:1], provenance)


@pytest.mark.parametrize(
    ("change", "page", "message"),
    [
        pytest.param(drop, PAGE, "speed-ttft has no results.json", id="no results"),
        pytest.param(
            lambda *at: rewrite(*at, experiment=None),
            PAGE,
            "results.json names no experiment",
            id="no experiment",
        ),
        pytest.param(
            None,
            PAGE.replace("<!-- end -->", ""),
            "a table without <!-- end --> behind it",
            id="marker",
        ),
    ],
)
def test_what_is_missing_is_refused(results, change, page, message):
    if change:
        change(results, SPEED)
    with pytest.raises(ValueError, match=message):
        readme.page_with_tables(page, results)


def test_the_command_writes_all_pages_or_none(results, tmp_path, capsys, monkeypatch):
    file = tmp_path / "page.md"
    file.write_text(PAGE)
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "more.md").write_text("no tables are needed here")
    words = ["--page", str(file), "--results", str(results), "--docs", str(docs)]
    words += ["--training", str(docs / "more.md")]
    monkeypatch.setattr(readme, "results_page", lambda results: "all\n")
    (results / SPEED / "samples.jsonl").write_text("{}")
    assert readme.main(words) == 0
    assert {path.name for path in (results / SPEED).iterdir()} == {
        *("results.json", "samples.jsonl.xz")
    }
    assert (results / "README.md").read_text() == "all\n"
    assert file.read_text() == readme.page_with_tables(PAGE, results)

    # many rows are packed as well, and read as before
    before = readme.read_results(results / SPEED)
    monkeypatch.setattr(readme, "LARGE_RESULTS", 0)
    assert readme.main(words) == 0
    assert {path.name for path in (results / SPEED).iterdir()} == {
        *("results.json.xz", "samples.jsonl.xz")
    }
    assert readme.read_results(results / SPEED) == before
    report.write_results(results / SPEED, before.rows, before.provenance)
    assert not (results / SPEED / "results.json.xz").exists()

    assert (results / readme.DEFAULT_FIGURE).stat().st_size > 5_000

    (results / "README.md").unlink()
    unknown = "<!-- table: other -->\n<!-- end -->\n"
    file.write_text(unknown)
    assert readme.main(words) == 2
    assert "the page has a table 'other'; known are default" in capsys.readouterr().err
    assert file.read_text() == unknown and not (results / "README.md").exists()
