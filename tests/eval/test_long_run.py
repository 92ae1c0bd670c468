"""Long runs: dry runs, cases out of memory, shards, and runs that continue."""

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
from long_runs import run_eval, run_eval_and_read_results
from words import PROSE_TEXT

from cab_hf import CabConfig
from cab_hf.eval import fidelity, passkey
from cab_hf.eval.experiment import find_changed_fields, import_experiment, render
from cab_hf.eval.fidelity import Fidelity
from cab_hf.eval.on_model import SMALL_BLOCK_FIELDS
from cab_hf.eval.passkey import Passkey
from cab_hf.experiment.log import read_log
from cab_hf.experiment.settings import read_settings, to_command_line

COMMAND_NAMES = "passkey", "fidelity"
# command -> number of cases of a run by `run_eval_and_read_results` with its default options
NUM_CASES = {"passkey": 9, "fidelity": 24}
WIDE_VARIANT_OPTIONS = "--variant", "wide=mass_threshold=0.06"
OUT_OF_MEMORY = "out of memory: tried to allocate 4.00 GiB"
for_each_command = pytest.mark.parametrize("command_name", COMMAND_NAMES)


@pytest.fixture(scope="module")
def finished_runs(model_folder, tmp_path_factory):
    """Return a finished run per command, with ``folder``, ``results`` and ``printed_text``."""
    runs = {}
    for command_name in COMMAND_NAMES:
        folder, printed_text = tmp_path_factory.mktemp("complete") / command_name, StringIO()
        with redirect_stdout(printed_text):
            results = run_eval_and_read_results(command_name, model_folder, folder)
        runs[command_name] = SimpleNamespace(
            folder=folder, results=results, printed_text=printed_text.getvalue()
        )
    return runs


@pytest.fixture
def run_passkey(model_folder, tmp_path):
    """Return a function from words to the results of the passkey command in one folder."""
    return partial(run_eval_and_read_results, "passkey", model_folder, tmp_path / "out")


@for_each_command
def test_dry_run_prints_number_of_cases(
    model_folder, finished_runs, tmp_path, capsys, command_name
):
    assert (
        run_eval_and_read_results(
            command_name, model_folder, tmp_path / "out", command_options=["--dry-run"]
        )
        is None
    )
    assert not (tmp_path / "out").exists()
    (printed_line,) = capsys.readouterr().out.splitlines()
    assert (
        printed_line
        == f"{NUM_CASES[command_name]} cases"
        == finished_runs[command_name].printed_text.splitlines()[0]
    )
    assert "dry_run" not in finished_runs[command_name].results["provenance"]["settings"]
    continue_run = partial(
        run_eval_and_read_results, command_name, model_folder, finished_runs[command_name].folder
    )
    continue_run(command_options=["--dry-run"])
    assert capsys.readouterr().out == "nothing is left to measure\n"
    # the command with two additional lengths
    extended_lengths = {"passkey": "400,300,420", "fidelity": "300,400,420"}[command_name]
    continue_run(command_options=["--dry-run", "--lengths", extended_lengths])
    assert (
        capsys.readouterr().out
        == f"{2 * NUM_CASES[command_name]} cases ({NUM_CASES[command_name]} are measured)\n"
    )


@pytest.mark.parametrize(
    ("experiment", "options"),
    [
        pytest.param(Passkey, ["--filler", "text", "--haystack"], id="passkey"),
        pytest.param(Fidelity, [*WIDE_VARIANT_OPTIONS, "--texts"], id="fidelity"),
    ],
)
def test_report_renders_from_files_and_contains_command(
    model_folder, tmp_path, experiment, options
):
    (book_file := tmp_path / "book.txt").write_text(PROSE_TEXT)
    folder = tmp_path / "out"
    results = run_eval_and_read_results(
        experiment.name,
        model_folder,
        folder,
        command_options=[*options, book_file],
        methods="dense,cab",
    )
    settings = results["provenance"]["settings"]
    file_contents_before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for file_name in ("results.csv", "report.md"):
        (folder / file_name).unlink()
    with pytest.MonkeyPatch.context() as patch_context:
        patch_context.setattr(experiment, "draw", lambda *_: None)
        render(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == file_contents_before
    command_arguments = to_command_line(settings, experiment.Settings)
    report = file_contents_before["report.md"].decode()
    assert f"python -m cab_hf.eval {experiment.name} {shlex.join(command_arguments)}" in report
    for config_name, config in settings.get(
        "cab_configs", {"cab": settings.get("cab_config")}
    ).items():
        assert (
            f"Config of {config_name}: `{json.dumps(find_changed_fields(config))}`, other fields"
            in report
        )
    # results contain file names, but no paths
    for option, path in (("--model", model_folder), (options[-1], book_file)):
        command_arguments[command_arguments.index(option) + 1] = str(path)
    resumed_experiment = experiment(
        read_settings(experiment.Settings, command_arguments, experiment.name)
    )
    assert json.loads(json.dumps(resumed_experiment.recorded_settings())) == settings


def raise_out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0")


def test_matched_method_waits_for_method_out_of_memory(
    model_folder, finished_runs, monkeypatch, tmp_path
):
    original_score_reading = Fidelity.score_reading

    def raise_out_of_memory_for_cab(self, case, reading, method):
        if case["method"] == "cab":
            raise_out_of_memory()
        return original_score_reading(self, case, reading, method)

    with monkeypatch.context() as patch_context:
        patch_context.setattr(Fidelity, "score_reading", raise_out_of_memory_for_cab)
        # collecting the garbage of a test session takes longer than measuring the cases
        patch_context.setattr("cab_hf.eval.long_run.gc.collect", lambda: 0)
        results = run_eval_and_read_results("fidelity", model_folder, tmp_path)
    assert {row["method"] for row in results["rows"]} == {"dense"}
    failure_reason_by_method = {
        "cab": OUT_OF_MEMORY,
        "random": "the density to match could not be measured",
    }
    recorded_reasons = {
        (failed_case["method"], failed_case["why"])
        for failed_case in results["provenance"]["failed"]
    }
    assert recorded_reasons == set(failure_reason_by_method.items())
    sample_errors = [sample.get("error") for sample in read_log(tmp_path / "samples.jsonl")[1]]
    assert sorted(filter(None, sample_errors)) == sorted(8 * [*failure_reason_by_method.values()])
    resumed_results = run_eval_and_read_results("fidelity", model_folder, tmp_path)
    assert resumed_results["rows"] == finished_runs["fidelity"].results["rows"]
    assert "failed" not in resumed_results["provenance"]


def make_experiment(command_name, shard=None, **setting_fields):
    """Return the experiment of a command with dense, cab and random at one length."""
    experiment = import_experiment(command_name)
    settings = {"device": "cpu", "lengths": (300,), "methods": ("dense", "cab", "random")}
    return experiment(experiment.Settings(**settings, shard=shard, **setting_fields))


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@for_each_command
def test_shards_partition_cases_by_question(command_name, num_shards):
    experiments = [
        make_experiment(command_name, f"{shard_number}/{num_shards}")
        for shard_number in range(1, num_shards + 1)
    ]
    independent_cases = [
        case
        for case in experiments[0].list_planned_cases()
        if not experiments[0].needs_other_samples(case)
    ]
    dependent_cases = [
        case
        for case in experiments[0].list_planned_cases()
        if experiments[0].needs_other_samples(case)
    ]
    # shards must not depend on the cases that are already measured
    for measured_cases, cases in (
        (independent_cases[:4], independent_cases[4:]),
        (independent_cases, dependent_cases),
    ):
        cases_by_shard = [
            shard_experiment.list_shard_cases(measured_cases) for shard_experiment in experiments
        ]
        assert sorted(map(str, cases)) == sorted(
            str(case) for shard in cases_by_shard for case in shard
        )
        # no two shards share a question
        questions = [
            question
            for shard in cases_by_shard
            for question in set(map(experiments[0].get_question_key, shard))
        ]
        assert len(questions) == len(set(questions))


def test_timed_cases_belong_to_no_shard(monkeypatch):
    experiment = make_experiment("fidelity", "1/1", equal="time")
    independent_cases = [
        case for case in experiment.list_planned_cases() if not experiment.needs_other_samples(case)
    ]
    assert experiment.list_shard_cases([]) and not experiment.list_shard_cases(independent_cases)
    monkeypatch.setattr(Fidelity, "must_run_alone", lambda self, case: case["probe"] == "recall")
    cases_by_shard = [
        make_experiment("fidelity", f"{shard_number}/3").list_shard_cases([])
        for shard_number in (1, 2, 3)
    ]
    assert all(cases_by_shard)
    assert "recall" not in {case["probe"] for shard in cases_by_shard for case in shard}


def test_cases_alternate_methods_per_question():
    experiment = make_experiment("fidelity")
    cases = list(experiment.list_planned_cases())
    independent_cases = [case for case in cases if not experiment.needs_other_samples(case)]
    # cases that need the results of other cases come last
    assert cases[: len(independent_cases)] == independent_cases
    assert {case["method"] for case in cases[len(independent_cases) :]} == {"random"}
    case_pairs = list(zip(independent_cases[::2], independent_cases[1::2], strict=True))
    assert all(
        (dense_case["method"], cab_case["method"]) == ("dense", "cab")
        for dense_case, cab_case in case_pairs
    )
    assert all(
        experiment.get_question_key(dense_case) == experiment.get_question_key(cab_case)
        for dense_case, cab_case in case_pairs
    )


@for_each_command
def test_world_size_above_1_is_refused(model_folder, tmp_path, monkeypatch, capsys, command_name):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        run_eval(command_name, model_folder, tmp_path)
    assert "--shard 1/2" in capsys.readouterr().err


def test_merged_shards_equal_one_process(
    run_passkey, finished_runs, monkeypatch, model_folder, tmp_path, capsys
):
    generate_answer, methods_that_answered, out = Passkey.generate_answer, [], tmp_path / "out"

    def record_method_and_answer(self, prompt, method):
        methods_that_answered.append(type(method).name)
        return generate_answer(self, prompt, method)

    monkeypatch.setattr(Passkey, "generate_answer", record_method_and_answer)
    # the second run of all shards measures random, which is matched to the density of cab
    for methods in ({"dense", "cab"}, {"random"}):
        methods_that_answered.clear()
        for shard in ("1/2", "2/2"):
            assert run_passkey(command_options=["--shard", shard]) is None
        assert set(methods_that_answered) == methods and len(methods_that_answered) == 3 * len(
            methods
        )
    assert len(list(out.iterdir())) == 2
    assert (
        run_eval("passkey", model_folder, out, command_options=["--seed", "1", "--shard", "1/2"])
        == 2
    )
    assert "made with seed 0, this run has 1" in capsys.readouterr().err
    methods_that_answered.clear()
    results, expected_results = run_passkey(), finished_runs["passkey"].results
    assert not methods_that_answered
    # times differ between runs
    rows = [{**row, "seconds": None} for row in results["rows"]]
    assert rows == [{**row, "seconds": None} for row in expected_results["rows"]]
    assert results["provenance"]["settings"] == expected_results["provenance"]["settings"]
    assert not list(out.glob("*shard*"))


def test_run_continues_only_with_model_of_same_hash(run_passkey, model_folder, tmp_path, capsys):
    changed_model, copied_model = (
        shutil.copytree(model_folder, tmp_path / parent_name / model_folder.name)
        for parent_name in "ab"
    )
    config_fields = json.loads((changed_model / "config.json").read_text())
    (changed_model / "config.json").write_text(json.dumps({**config_fields, "rms_norm_eps": 0.5}))
    run_passkey(methods="dense,cab")
    out, log_before = tmp_path / "out", (tmp_path / "out" / "samples.jsonl").read_bytes()
    assert run_eval("passkey", changed_model, out, methods="cab,streaming") == 2
    message = "made with model_sha256 '[0-9a-f]{64}', this run has '[0-9a-f]{64}'. Give another"
    assert re.search(message, capsys.readouterr().err)
    assert (out / "samples.jsonl").read_bytes() == log_before
    results = run_eval_and_read_results("passkey", copied_model, out, methods="cab,streaming")
    assert [row["method"] for row in results["rows"]] == ["dense", "cab", "streaming"]
    assert results["provenance"]["settings"]["methods"] == ["dense", "cab", "streaming"]


@pytest.mark.parametrize("module", [passkey, fidelity], ids=COMMAND_NAMES)
@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ((), SMALL_BLOCK_FIELDS),
        (("mass_threshold=0.08",), {"mass_threshold": 0.08}),
        (("predictor=random",), {"predictor": "random"}),
    ],
)
def test_assigned_fields_replace_small_block_defaults(module, assignments, expected):
    """Any assigned field replaces all defaults, which another predictor might not support."""
    settings = module.Settings(device="cpu", cab=assignments)
    config = settings.cab_config if module is passkey else settings.configs["cab"]
    assert config == CabConfig(min_length=0, **expected)


@pytest.mark.parametrize(
    ("command_name", "text_options"),
    [("fidelity", "--texts a.txt,b.txt"), ("passkey", "--filler text --haystack a.txt")],
)
def test_short_text_is_reported_as_repeated(
    model_folder, tmp_path, monkeypatch, command_name, text_options
):
    monkeypatch.chdir(tmp_path)
    # a.txt has 400 tokens and a byte order mark; b.txt has 1,200 tokens
    Path("a.txt").write_text("So it goes. " * 100, "utf-8-sig")
    Path("b.txt").write_text("So it goes. " * 300)
    options = f"--model {model_folder} --device cpu {text_options} --lengths 400,900,1200"
    experiment = import_experiment(command_name)(
        read_settings(import_experiment(command_name).Settings, options.split(), command_name, "")
    )
    message = "a.txt has 400 tokens, so that it repeats in texts of 900 and 1,200 tokens."
    assert experiment.provenance("now")["repeated"] == [message]
    assert set(experiment.sentences_by_file()["a.txt"]) == {"So it goes."}


@pytest.mark.parametrize(
    ("folder", "run_name"), [("runs/mine/model", "mine"), ("runs/mine", "mine"), ("model", "here")]
)
def test_trained_model_has_name_of_its_run(folder, run_name, tmp_path, monkeypatch):
    (tmp_path / "here" / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Fidelity, "model_sha256", "its hash")
    Path("a.txt").write_text("It was.")
    settings = fidelity.Settings(model=folder, device="cpu", texts=("a.txt",))
    assert Fidelity(settings).recorded_settings()["model"] == run_name


@for_each_command
def test_log_sample_without_required_field_is_refused(
    finished_runs, command_name, tmp_path, model_folder, capsys
):
    samples = (finished_runs[command_name].folder / "samples.jsonl").read_text().splitlines()
    header, experiment = samples[0], import_experiment(command_name)
    line_by_probe = {json.loads(line).get("probe"): line for line in samples[1:]}
    for line in line_by_probe.values():
        sample = json.loads(line)
        assert {*sample} - {*experiment.CASE_FIELDS} == {*experiment.required_fields(sample)}
        for field in experiment.required_fields(sample):
            incomplete_line = json.dumps({x: value for x, value in sample.items() if x != field})
            (tmp_path / "samples.jsonl").write_text(f"{header}\n{line}\n{incomplete_line}\n")
            assert run_eval(command_name, model_folder, tmp_path) == 2
            assert f"samples.jsonl, line 3 has no {field!r}. Repair it" in capsys.readouterr().err
