"""Long runs: what they say before they begin, memory that runs out, shards."""

import json
import shlex

import pytest
import torch
from tiny import SPARSE_WORDS
from words import TEXT

from cab_hf.eval import fidelity, passkey
from cab_hf.eval.__main__ import main
from cab_hf.eval.experiment import render, unlike_default
from cab_hf.runs.log import read_log
from cab_hf.runs.settings import read_settings, spelled

SET = [word for assignment in SPARSE_WORDS for word in ("--cab", assignment)]
PASSKEY = ["passkey", *SET, "--methods", "dense,cab,random", "--lengths", "400", "--depths", "3"]
PASSKEY += ["--device", "cpu", "--controls", "0"]
FIDELITY = ["fidelity", *SET, "--methods", "dense,cab,random", "--lengths", "300", "--keys", "2"]
FIDELITY += ["--device", "cpu"]
WIDE = ["--variant", "wide=mass_threshold=0.06"]
OUT_OF_MEMORY = "out of memory: tried to allocate 4.00 GiB"


@pytest.fixture
def command(model_folder, tmp_path, monkeypatch):
    """Runs a command on the tiny model; its results, or None where there are none."""
    for kind in (fidelity.Fidelity, passkey.Passkey):
        monkeypatch.setattr(kind, "draw", lambda *_: None)

    def start(words, *more, status=0, out="out"):
        folder = tmp_path / out
        given = [*words, "--model", str(model_folder), "--out", str(folder), *more]
        assert main(given) == status
        results = folder / "results.json"
        return json.loads(results.read_text()) if results.exists() else None

    return start


@pytest.mark.parametrize(
    ("words", "cases"), [(PASSKEY, 9), (FIDELITY, 24)], ids=["passkey", "fidelity"]
)
def test_a_run_says_what_is_ahead_and_a_dry_one_ends_there(command, tmp_path, capsys, words, cases):
    assert command(words, "--dry-run") is None and not (tmp_path / "out").exists()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"{cases} cases"
    results = command(words)
    assert capsys.readouterr().out.splitlines()[0] == line
    assert "dry_run" not in results["provenance"]["settings"]
    command(words, "--dry-run")
    assert capsys.readouterr().out == "nothing is left to measure\n"
    command(words, "--dry-run", "--lengths", "400,300,420")
    assert capsys.readouterr().out == f"{2 * cases} cases ({cases} are there)\n"


@pytest.mark.parametrize(
    ("kind", "words", "texts"),
    [
        pytest.param(passkey.Passkey, PASSKEY, ["--filler", "text", "--haystack"], id="passkey"),
        pytest.param(fidelity.Fidelity, [*FIDELITY, *WIDE], ["--texts"], id="fidelity"),
    ],
)
def test_a_report_is_made_from_the_files_alone_and_says_its_command(
    command, tmp_path, model_folder, kind, words, texts
):
    (book := tmp_path / "book.txt").write_text(TEXT)
    results = command([*words, *texts, str(book)], "--methods", "dense,cab")
    settings, folder = results["provenance"]["settings"], tmp_path / "out"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in ("results.csv", "report.md"):
        (folder / name).unlink()
    render(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    given, report = spelled(settings, kind.Settings), before["report.md"].decode()
    assert f"python -m cab_hf.eval {kind.name} {shlex.join(given)}" in report
    for name, config in settings.get("cab_configs", {"cab": settings.get("cab_config")}).items():
        assert f"Config of {name}: `{json.dumps(unlike_default(config))}`, the default" in report
    # no result has the paths of files
    for option, path in (("--model", model_folder), (texts[-1], book)):
        given[given.index(option) + 1] = str(path)
    again = kind(read_settings(kind.Settings, given, kind.name))
    assert json.loads(json.dumps(again.recorded())) == settings


# --- memory that runs out


def full(*_, **more):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0")


def test_a_case_without_memory_is_passed_over_and_tried_again(command, monkeypatch, tmp_path):
    complete = command(PASSKEY, out="complete")
    answer = passkey.Passkey.answer

    def scarce(self, prompt, method):
        return full() if type(method).name == "random" else answer(self, prompt, method)

    monkeypatch.setattr(passkey.Passkey, "answer", scarce)
    results = command(PASSKEY)
    assert [row["method"] for row in results["rows"]] == ["dense", "cab"]
    cell = {"method": "random", "length": 400, "keys": 1, "cases": 3, "why": OUT_OF_MEMORY}
    assert results["provenance"]["failed"] == [cell]
    _, samples = read_log(tmp_path / "out" / "samples.jsonl")
    assert [s["error"] for s in samples if "error" in s] == [OUT_OF_MEMORY] * 3

    monkeypatch.setattr(passkey.Passkey, "answer", answer)
    results = command(PASSKEY)
    assert results["rows"] == complete["rows"] and "failed" not in results["provenance"]


def test_what_is_matched_to_a_method_without_memory_waits_for_it(command, monkeypatch):
    complete = command(FIDELITY, out="complete")
    read = fidelity.Fidelity.read

    def scarce(self, case, reading, method):
        return full() if case["method"] == "cab" else read(self, case, reading, method)

    monkeypatch.setattr(fidelity.Fidelity, "read", scarce)
    results = command(FIDELITY)
    assert {row["method"] for row in results["rows"]} == {"dense"}
    failed = {(cell["method"], cell["why"]) for cell in results["provenance"]["failed"]}
    unknown = "the density to match could not be measured"
    assert failed == {("cab", OUT_OF_MEMORY), ("random", unknown)}
    monkeypatch.setattr(fidelity.Fidelity, "read", read)
    assert command(FIDELITY)["rows"] == complete["rows"]


def test_another_error_ends_the_run(command, monkeypatch):
    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(passkey.Passkey, "answer", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        command(PASSKEY)


# --- shards


def experiment_of(words, shard=None, **fields):
    kind = {"passkey": passkey, "fidelity": fidelity}[words[0]].EXPERIMENT
    methods = ("dense", "cab", "random")
    return kind(kind.Settings(device="cpu", lengths=(300,), methods=methods, shard=shard, **fields))


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("words", [PASSKEY, FIDELITY], ids=lambda words: words[0])
def test_every_case_is_of_one_shard_and_a_question_is_asked_by_it_of_all(words, parts):
    experiments = [experiment_of(words, f"{part}/{parts}") for part in range(1, parts + 1)]
    free = [case for case in experiments[0].planned() if not experiments[0].waits(case)]
    waiting = [case for case in experiments[0].planned() if experiments[0].waits(case)]
    # some are there, of which the others are not to depend
    for known, cases in ((free[:4], free[4:]), (free, waiting)):
        shares = [each.share(known) for each in experiments]
        assert sorted(map(str, cases)) == sorted(str(case) for mine in shares for case in mine)
        questions = [set(map(experiments[0].question, mine)) for mine in shares]
        assert sum(map(len, questions)) == len(set().union(*questions))


def test_what_is_timed_or_fitted_by_time_is_of_no_shard(monkeypatch):
    experiment = experiment_of(FIDELITY, "1/1", equal="time")
    free = [case for case in experiment.planned() if not experiment.waits(case)]
    assert experiment.share([]) and not experiment.share(free)
    monkeypatch.setattr(fidelity.Fidelity, "alone", lambda self, case: case["probe"] == "recall")
    shares = [experiment_of(FIDELITY, f"{part}/3").share([]) for part in (1, 2, 3)]
    assert all(shares)
    assert "recall" not in {case["probe"] for mine in shares for case in mine}


def test_a_run_that_stops_has_asked_all_methods_alike():
    experiment = experiment_of(FIDELITY)
    cases = list(experiment.planned())
    free = [case for case in cases if not experiment.waits(case)]
    # what waits for all of the others comes behind them
    assert cases[: len(free)] == free and {case["method"] for case in cases[len(free) :]} == {
        "random"
    }
    pairs = list(zip(free[::2], free[1::2], strict=True))
    assert all((a["method"], b["method"]) == ("dense", "cab") for a, b in pairs)
    assert all(experiment.question(a) == experiment.question(b) for a, b in pairs)


@pytest.mark.parametrize("words", [PASSKEY, FIDELITY], ids=["passkey", "fidelity"])
def test_processes_that_a_launcher_starts_are_refused(command, monkeypatch, capsys, words):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        command(words)
    assert "--shard 1/2" in capsys.readouterr().err


def test_shards_find_what_one_process_finds(command, tmp_path, monkeypatch, capsys):
    complete = command(PASSKEY, out="complete")
    answer, answered = passkey.Passkey.answer, []

    def counted(self, prompt, method):
        answered.append(type(method).name)
        return answer(self, prompt, method)

    monkeypatch.setattr(passkey.Passkey, "answer", counted)
    # those that match another method are left to the second time
    for methods in ({"dense", "cab"}, {"random"}):
        answered.clear()
        for shard in ("1/2", "2/2"):
            assert command(PASSKEY, "--shard", shard) is None
        assert set(answered) == methods and len(answered) == 3 * len(methods)
    assert len(list((tmp_path / "out").iterdir())) == 2
    assert command(PASSKEY, "--seed", "1", "--shard", "1/2", status=2) is None
    assert "made with seed 0, this run has 1" in capsys.readouterr().err
    answered.clear()
    results = command(PASSKEY)
    assert not answered and results["rows"] == complete["rows"]
    assert results["provenance"]["settings"] == complete["provenance"]["settings"]
    assert not list((tmp_path / "out").glob("*shard*"))
