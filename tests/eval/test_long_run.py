"""Long runs: what they say before they begin, memory that runs out, shares of processes."""

import json

import pytest
import torch
from bench import torchrun
from tiny import SPARSE_WORDS
from torch import distributed as dist

from cab_hf.eval import fidelity, long_run, passkey
from cab_hf.eval.__main__ import main
from cab_hf.eval.experiment import run
from cab_hf.runs.log import read_log
from cab_hf.runs.settings import read_settings

SET = [word for assignment in SPARSE_WORDS for word in ("--cab", assignment)]
PASSKEY = ["passkey", *SET, "--methods", "dense,cab,random", "--lengths", "400", "--depths", "3"]
PASSKEY += ["--device", "cpu", "--controls", "0"]
FIDELITY = ["fidelity", *SET, "--methods", "dense,cab,random", "--lengths", "300", "--keys", "2"]
FIDELITY += ["--device", "cpu"]
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
    report = (tmp_path / "out" / "report.md").read_text()
    assert f"| random | 400 | 1 | 3 | {OUT_OF_MEMORY} |" in report
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


def test_without_any_memory_nothing_is_reported(command, monkeypatch, capsys):
    monkeypatch.setattr(passkey.Passkey, "answer", full)
    assert command(PASSKEY, status=2) is None
    assert f"no case could be measured: {OUT_OF_MEMORY}" in capsys.readouterr().err


# --- shares of processes


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("words", [PASSKEY, FIDELITY], ids=lambda words: words[0])
def test_every_case_is_of_one_rank_and_a_question_is_asked_by_it_of_all(words, ranks):
    kind = {"passkey": passkey, "fidelity": fidelity}[words[0]].EXPERIMENT
    settings = kind.Settings(device="cpu", lengths=(300,), methods=("dense", "cab", "random"))
    experiment = kind(settings)
    given = [long_run.Share(experiment, rank, ranks).mine([]) for rank in range(ranks)]
    everything = list(experiment.planned())
    assert sorted(map(str, everything)) == sorted(str(case) for mine in given for case in mine)
    questions = [set(map(experiment.question, mine)) for mine in given]
    assert sum(map(len, questions)) == len(set().union(*questions))
    known = everything[:4]
    left = [long_run.Share(experiment, rank, ranks).mine(known) for rank in range(ranks)]
    assert sum(map(len, left)) == len(everything) - 4


def test_what_is_timed_is_of_one_rank(monkeypatch):
    monkeypatch.setattr(fidelity.Fidelity, "alone", lambda self, case: case["probe"] == "recall")
    settings = fidelity.Settings(device="cpu", lengths=(300,), methods=("dense", "cab", "random"))
    given = [long_run.Share(fidelity.Fidelity(settings), rank, 3).mine([]) for rank in range(3)]
    timed = [[case["probe"] for case in mine].count("recall") for mine in given]
    assert timed == [3, 0, 0] and all(given)


def test_a_run_that_stops_has_asked_all_methods_alike():
    settings = fidelity.Settings(device="cpu", lengths=(300,), methods=("dense", "cab", "random"))
    experiment = fidelity.Fidelity(settings)
    cases = list(experiment.planned())
    free = [case for case in cases if not experiment.waits(case)]
    # what waits for all of the others comes behind them
    assert cases[: len(free)] == free and {case["method"] for case in cases[len(free) :]} == {
        "random"
    }
    pairs = list(zip(free[::2], free[1::2], strict=True))
    assert all((a["method"], b["method"]) == ("dense", "cab") for a, b in pairs)
    assert all(experiment.question(a) == experiment.question(b) for a, b in pairs)


@pytest.mark.parametrize(("rank", "gpu"), [(0, 0), (1, 1), (5, 1)])
def test_processes_take_turns_at_gpus(monkeypatch, rank, gpu):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    long_run.take_gpu(1)
    assert not taken
    long_run.take_gpu(6)
    assert taken == [gpu]


@pytest.mark.slow
def test_processes_find_what_one_finds(command, model_folder, tmp_path):
    out = tmp_path / "shared"
    given = [*FIDELITY, "--model", str(model_folder), "--out", str(out)]
    done = torchrun("-m", "cab_hf.eval", *given)
    assert done.returncode == 0, done.stderr
    # one says what is ahead, and shows the rows
    assert done.stdout.count("24 cases\n") == 1 == done.stdout.count("report:")
    # a thread each, as torchrun has it: sums of two are rounded otherwise
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = command(FIDELITY)
    torch.set_num_threads(threads)
    results = json.loads((out / "results.json").read_text())
    assert results["rows"] == expected["rows"]
    assert results["provenance"]["settings"] == expected["provenance"]["settings"]
    names = {path.name for path in out.iterdir()}
    assert names == {"samples.jsonl", "results.json", "results.csv", "report.md", "figure.png"}


@pytest.fixture
def alone(tmp_path):
    """A group of this process alone."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def settings_of(model_folder, out):
    """Those of `PASSKEY`."""
    given = [*PASSKEY[1:], "--model", str(model_folder), "--out", str(out)]
    return read_settings(passkey.Settings, given, "passkey")


def test_what_another_rank_found_and_missed_is_in_the_log(
    command, model_folder, tmp_path, monkeypatch, alone
):
    complete = command(PASSKEY, out="complete")
    _, samples = read_log(tmp_path / "complete" / "samples.jsonl")
    experiment = passkey.Passkey(settings_of(model_folder, tmp_path / "out"))
    share = long_run.Share(experiment, 0, 2)
    asked = set(map(experiment.question, share.mine([])))
    others = [s for s in samples if experiment.question(s) not in asked]
    assert others and len(others) + len(share.mine([])) == len(samples)
    last = {name: others[-1][name] for name in experiment.CASE} | {"error": OUT_OF_MEMORY}

    def gather(given, own):
        given[:] = [own, [*others[:-1], last]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    rows = run(experiment, share.lead)
    failed = json.loads((tmp_path / "out" / "results.json").read_text())["provenance"]["failed"]
    assert [(cell["method"], cell["cases"]) for cell in failed] == [("random", 1)]
    assert [row["n"] for row in rows] == [3, 3, 2]
    # and is tried again by whoever goes on
    assert command(PASSKEY)["rows"] == complete["rows"]


def test_what_a_kill_left_of_another_rank_is_taken_up(command, model_folder, tmp_path):
    complete = command(PASSKEY, out="complete")
    _, samples = read_log(tmp_path / "complete" / "samples.jsonl")
    experiment = passkey.Passkey(settings_of(model_folder, tmp_path / "out"))
    with long_run._opened(experiment, tmp_path / "out" / "samples.rank1.jsonl") as log:
        for sample in samples[1::2]:
            log.append(sample)
    measured = []
    experiment.sample = lambda case: (
        measured.append(case) or passkey.Passkey.sample(experiment, case)
    )
    rows = run(experiment, long_run._measure_alone)
    assert len(measured) == len(samples[::2]) and rows == complete["rows"]
    assert not list((tmp_path / "out").glob("*rank*"))


def test_a_device_that_all_processes_would_take_is_refused(model_folder, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = [*PASSKEY, "--model", str(model_folder), "--device", "cpu:0"]
    assert main(words) == 2
    assert "device is 'cpu:0'; where 2 processes share a run it must be" in capsys.readouterr().err
