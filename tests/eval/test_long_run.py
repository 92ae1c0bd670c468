"""Long runs: dry runs, out-of-memory errors, shards, models and texts."""

import json
import re
import shlex
import shutil
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from long_runs import command, start
from words import TEXT

from cab_hf import CabConfig
from cab_hf.eval import fidelity, passkey
from cab_hf.eval.experiment import named, render, unlike_default
from cab_hf.eval.fidelity import Fidelity
from cab_hf.eval.on_model import SMALL
from cab_hf.eval.passkey import Passkey
from cab_hf.experiment.log import read_log
from cab_hf.experiment.settings import read_settings, spelled

NAMES = "passkey", "fidelity"
CASES = {"passkey": 9, "fidelity": 24}
WIDE = "--variant", "wide=mass_threshold=0.06"
OUT_OF_MEMORY = "out of memory: tried to allocate 4.00 GiB"
by_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def complete(model_folder, tmp_path_factory):
    """Return finished runs by name, each with ``folder``, ``results`` and ``printed`` text."""
    runs = {}
    for name in NAMES:
        folder, printed = tmp_path_factory.mktemp("complete") / name, StringIO()
        with redirect_stdout(printed):
            results = command(name, model_folder, folder)
        runs[name] = SimpleNamespace(folder=folder, results=results, printed=printed.getvalue())
    return runs


@pytest.fixture
def on_passkey(model_folder, tmp_path):
    return partial(command, "passkey", model_folder, tmp_path / "out")


@by_name
def test_dry_run_prints_number_of_cases(model_folder, complete, tmp_path, capsys, name):
    assert command(name, model_folder, tmp_path / "out", "--dry-run") is None
    assert not (tmp_path / "out").exists()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"{CASES[name]} cases" == complete[name].printed.splitlines()[0]
    assert "dry_run" not in complete[name].results["provenance"]["settings"]
    going_on = partial(command, name, model_folder, complete[name].folder, "--dry-run")
    going_on()
    assert capsys.readouterr().out == "nothing is left to measure\n"
    # two additional lengths
    going_on("--lengths", {"passkey": "400,300,420", "fidelity": "300,400,420"}[name])
    assert capsys.readouterr().out == f"{2 * CASES[name]} cases ({CASES[name]} are measured)\n"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param(Passkey, ["--filler", "text", "--haystack"], id="passkey"),
        pytest.param(Fidelity, [*WIDE, "--texts"], id="fidelity"),
    ],
)
def test_report_renders_from_files_and_contains_command(model_folder, tmp_path, kind, words):
    (book := tmp_path / "book.txt").write_text(TEXT)
    folder = tmp_path / "out"
    results = command(kind.name, model_folder, folder, *words, book, methods="dense,cab")
    settings = results["provenance"]["settings"]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in ("results.csv", "report.md"):
        (folder / name).unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "draw", lambda *_: None)
        render(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    given, report = spelled(settings, kind.Settings), before["report.md"].decode()
    assert f"python -m cab_hf.eval {kind.name} {shlex.join(given)}" in report
    for name, config in settings.get("cab_configs", {"cab": settings.get("cab_config")}).items():
        assert f"Config of {name}: `{json.dumps(unlike_default(config))}`, other fields" in report
    # results contain file names, but no paths
    for option, path in (("--model", model_folder), (words[-1], book)):
        given[given.index(option) + 1] = str(path)
    again = kind(read_settings(kind.Settings, given, kind.name))
    assert json.loads(json.dumps(again.recorded())) == settings


# --- memory that runs out


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0")


def test_matched_method_waits_for_method_out_of_memory(
    model_folder, complete, monkeypatch, tmp_path
):
    read = Fidelity.read

    def scarce(self, case, reading, method):
        return full() if case["method"] == "cab" else read(self, case, reading, method)

    with monkeypatch.context() as patch:
        patch.setattr(Fidelity, "read", scarce)
        # garbage collection of a whole test session takes longer than the cases
        patch.setattr("cab_hf.eval.long_run.gc.collect", lambda: 0)
        results = command("fidelity", model_folder, tmp_path)
    assert {row["method"] for row in results["rows"]} == {"dense"}
    why = {"cab": OUT_OF_MEMORY, "random": "the density to match could not be measured"}
    failed = {(cell["method"], cell["why"]) for cell in results["provenance"]["failed"]}
    assert failed == set(why.items())
    errors = [each.get("error") for each in read_log(tmp_path / "samples.jsonl")[1]]
    assert sorted(filter(None, errors)) == sorted(8 * [*why.values()])
    again = command("fidelity", model_folder, tmp_path)
    assert again["rows"] == complete["fidelity"].results["rows"]
    assert "failed" not in again["provenance"]


# --- shards


def experiment_of(name, shard=None, **fields):
    kind, methods = named(name), ("dense", "cab", "random")
    return kind(kind.Settings(device="cpu", lengths=(300,), methods=methods, shard=shard, **fields))


@pytest.mark.parametrize("parts", [1, 2, 5])
@by_name
def test_shards_partition_cases_by_question(name, parts):
    experiments = [experiment_of(name, f"{part}/{parts}") for part in range(1, parts + 1)]
    free = [case for case in experiments[0].planned() if not experiments[0].waits(case)]
    waiting = [case for case in experiments[0].planned() if experiments[0].waits(case)]
    # shards must not depend on the cases that are already measured
    for known, cases in ((free[:4], free[4:]), (free, waiting)):
        shares = [each.share(known) for each in experiments]
        assert sorted(map(str, cases)) == sorted(str(case) for mine in shares for case in mine)
        questions = [set(map(experiments[0].question, mine)) for mine in shares]
        assert sum(map(len, questions)) == len(set().union(*questions))


def test_timed_cases_belong_to_no_shard(monkeypatch):
    experiment = experiment_of("fidelity", "1/1", equal="time")
    free = [case for case in experiment.planned() if not experiment.waits(case)]
    assert experiment.share([]) and not experiment.share(free)
    monkeypatch.setattr(Fidelity, "alone", lambda self, case: case["probe"] == "recall")
    shares = [experiment_of("fidelity", f"{part}/3").share([]) for part in (1, 2, 3)]
    assert all(shares)
    assert "recall" not in {case["probe"] for mine in shares for case in mine}


def test_cases_alternate_methods_per_question():
    experiment = experiment_of("fidelity")
    cases = list(experiment.planned())
    free = [case for case in cases if not experiment.waits(case)]
    # cases that wait for all others come last
    assert cases[: len(free)] == free
    assert {case["method"] for case in cases[len(free) :]} == {"random"}
    pairs = list(zip(free[::2], free[1::2], strict=True))
    assert all((a["method"], b["method"]) == ("dense", "cab") for a, b in pairs)
    assert all(experiment.question(a) == experiment.question(b) for a, b in pairs)


@by_name
def test_world_size_above_1_is_refused(model_folder, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        start(name, model_folder, tmp_path)
    assert "--shard 1/2" in capsys.readouterr().err


def test_merged_shards_equal_one_process(
    on_passkey, complete, monkeypatch, model_folder, tmp_path, capsys
):
    answer, answered, out = Passkey.answer, [], tmp_path / "out"

    def counted(self, prompt, method):
        answered.append(type(method).name)
        return answer(self, prompt, method)

    monkeypatch.setattr(Passkey, "answer", counted)
    # methods that match another method are measured by the second start
    for methods in ({"dense", "cab"}, {"random"}):
        answered.clear()
        for shard in ("1/2", "2/2"):
            assert on_passkey("--shard", shard) is None
        assert set(answered) == methods and len(answered) == 3 * len(methods)
    assert len(list(out.iterdir())) == 2
    assert start("passkey", model_folder, out, "--seed", "1", "--shard", "1/2") == 2
    assert "made with seed 0, this run has 1" in capsys.readouterr().err
    answered.clear()
    results, expected = on_passkey(), complete["passkey"].results
    assert not answered
    # times differ between runs
    timed = [{**row, "seconds": None} for row in results["rows"]]
    assert timed == [{**row, "seconds": None} for row in expected["rows"]]
    assert results["provenance"]["settings"] == expected["provenance"]["settings"]
    assert not list(out.glob("*shard*"))


# --- models, texts and configs


def test_run_continues_only_with_model_of_same_hash(on_passkey, model_folder, tmp_path, capsys):
    other, same = (shutil.copytree(model_folder, tmp_path / x / model_folder.name) for x in "ab")
    shown = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**shown, "rms_norm_eps": 0.5}))
    on_passkey(methods="dense,cab")
    out, before = tmp_path / "out", (tmp_path / "out" / "samples.jsonl").read_bytes()
    assert start("passkey", other, out, methods="cab,streaming") == 2
    output = "made with model_sha256 '[0-9a-f]{64}', this run has '[0-9a-f]{64}'. Give another"
    assert re.search(output, capsys.readouterr().err)
    assert (out / "samples.jsonl").read_bytes() == before
    results = command("passkey", same, out, methods="cab,streaming")
    assert [row["method"] for row in results["rows"]] == ["dense", "cab", "streaming"]
    assert results["provenance"]["settings"]["methods"] == ["dense", "cab", "streaming"]


@pytest.mark.parametrize("kind", [passkey, fidelity], ids=NAMES)
@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ((), SMALL),
        (("mass_threshold=0.08",), {"mass_threshold": 0.08}),
        (("predictor=random",), {"predictor": "random"}),
    ],
)
def test_given_fields_replace_small_block_defaults(kind, assignments, expected):
    """Another predictor may not use the fields that the small-block defaults set."""
    settings = kind.Settings(device="cpu", cab=assignments)
    chosen = settings.cab_config if kind is passkey else settings.configs["cab"]
    assert chosen == CabConfig(min_length=0, **expected)


@pytest.mark.parametrize(
    ("name", "words"),
    [("fidelity", "--texts a.txt,b.txt"), ("passkey", "--filler text --haystack a.txt")],
)
def test_short_text_is_reported_as_repeated(model_folder, tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    # a.txt has 400 tokens and a byte order mark; b.txt has 1,200 tokens
    Path("a.txt").write_text("So it goes. " * 100, "utf-8-sig")
    Path("b.txt").write_text("So it goes. " * 300)
    given = f"--model {model_folder} --device cpu {words} --lengths 400,900,1200"
    opened = named(name)(read_settings(named(name).Settings, given.split(), name, ""))
    message = "a.txt has 400 tokens, so that it repeats in texts of 900 and 1,200 tokens."
    assert opened.provenance("now")["repeated"] == [message]
    assert set(opened.running()["a.txt"]) == {"So it goes."}


@pytest.mark.parametrize(
    ("folder", "name"), [("runs/mine/model", "mine"), ("runs/mine", "mine"), ("model", "here")]
)
def test_trained_model_has_name_of_its_run(folder, name, tmp_path, monkeypatch):
    (tmp_path / "here" / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Fidelity, "content", "its hash")
    Path("a.txt").write_text("It was.")
    settings = fidelity.Settings(model=folder, device="cpu", texts=("a.txt",))
    assert Fidelity(settings).recorded()["model"] == name


@by_name
def test_log_sample_without_required_field_is_refused(
    complete, name, tmp_path, model_folder, capsys
):
    samples = (complete[name].folder / "samples.jsonl").read_text().splitlines()
    header, kind = samples[0], named(name)
    by_probe = {json.loads(line).get("probe"): line for line in samples[1:]}
    for line in by_probe.values():
        sample = json.loads(line)
        assert {*sample} - {*kind.CASE} == {*kind.fields_of(sample)}
        for field in kind.fields_of(sample):
            rest = json.dumps({x: value for x, value in sample.items() if x != field})
            (tmp_path / "samples.jsonl").write_text(f"{header}\n{line}\n{rest}\n")
            assert start(name, model_folder, tmp_path) == 2
            assert f"samples.jsonl, line 3 has no {field!r}. Repair it" in capsys.readouterr().err
