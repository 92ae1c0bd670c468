"""Properties of all speed commands: runs, result files, and committed results."""

import json
import shlex
from itertools import product
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from bench import read_usage_error, run_speed
from marks import NEEDS_SERVING

from cab_hf.eval.__main__ import main
from cab_hf.eval.archive import REMOVED_COMMANDS
from cab_hf.eval.experiment import find_experiment_class, import_experiment, read_provenance, render
from cab_hf.eval.report import format_digits
from cab_hf.eval.speed import COMMANDS, dense
from cab_hf.eval.speed.runner import IDENTITY_FIELDS
from cab_hf.eval.speed.timing import is_out_of_memory
from cab_hf.experiment import provenance
from cab_hf.experiment.log import read_file, read_log
from cab_hf.experiment.settings import read_settings

RESULTS_FOLDER = Path(__file__).parents[3] / "eval" / "results"
LOAD_SDPA_KERNEL = dense.CPU_BASELINES["SDPA"].load_kernel
HEAD_OPTIONS = "--heads 4 --kv-heads 2"
# few forced blocks, so that blocks of 192 tokens can be skipped
BLOCK_OPTIONS = (
    "--cab query_block=32 --cab key_block=16 --cab local_blocks=1 --cab dense_tail_blocks=1"
)


def check_attention_rows(rows):
    """Check the rows of ``speed attention``."""
    row_keys = [(row["direction"], row["budget"], row["length"]) for row in rows]
    assert row_keys == list(product(("forward", "backward"), (0.2, 1.0), (192, 384)))
    for row in rows:
        assert row["attend_ms"]["reference"] > 0 and row["not_measured"] == {}
        assert (row["density"] == 1) == (row["budget"] == 1)
        selects_blocks = row["direction"] == "forward" and row["budget"] < 1
        assert (row["predict_ms"] is not None) == selects_blocks == bool(row["total_ms"])
        assert row["ratio"] == row["ms"] / row["baselines"]["SDPA"]


def check_ttft_rows(
    rows, sparse_implementation="cab-always", implementations=("sdpa", "SDPA", "cab", "cab-always")
):
    """Check the rows of ``speed ttft``: only ``sparse_implementation`` skips blocks."""
    row_keys = [(row["length"], row["implementation"]) for row in rows]
    assert row_keys == list(product((96, 192), implementations))
    for row in rows:
        is_sparse = row["implementation"] == sparse_implementation
        assert row["over_best"] > 0
        assert (row["density"] < 1) == (row["ceiling"] > 1) == is_sparse


def check_lora_rows(rows):
    """Check the rows of ``speed lora``."""
    check_ttft_rows(rows, sparse_implementation="cab", implementations=("sdpa", "SDPA", "cab"))


def check_serve_rows(rows):
    """Check the rows of ``speed serve``."""
    assert [row["density"] < 1 for row in rows] == [False, False, True]
    for row in rows:
        assert (row["batching"]["max_batch_tokens"], row["batching"]["page_size"]) == (64, 16)
        assert sorted(request["length"] for request in row["served"]) == [96, 96, 192]
        assert all(
            request["arrived"] < request["first"] < request["last"] for request in row["served"]
        )


@pytest.mark.parametrize(
    ("op", "options", "check_rows", "num_rows"),
    [
        (
            "attention",
            f"{HEAD_OPTIONS} --head-dims 16 --seconds 0 --densities 0.2,1 --lengths 192,384",
            check_attention_rows,
            8,
        ),
        ("ttft", f"--layers 1 --lengths 96,192 --runs 1 {BLOCK_OPTIONS}", check_ttft_rows, 8),
        pytest.param(
            "serve",
            "--layers 1 --lengths 96,192 --requests 2,192:1 --batch-tokens 64 --new-tokens 4 "
            f"--warm-up 1 --implementations sdpa,cab_dense,cab-always --rate 50 {BLOCK_OPTIONS}",
            check_serve_rows,
            3,
            marks=NEEDS_SERVING,
        ),
        (
            "lora",
            f"--layers 1 --lengths 96,192 --runs 1 --max-density 0.2 {BLOCK_OPTIONS} "
            "--cab min_length=0",
            check_lora_rows,
            6,
        ),
    ],
)
def test_every_op_runs(op, options, check_rows, num_rows, tmp_path):
    rows = run_speed(op, tmp_path, options.split(), should_draw_figure=True)["rows"]
    assert len(rows) == num_rows and all(row["error"] is None for row in rows)
    assert all(row["ms"] > 0 for row in rows if "ms" in row)
    check_rows(rows)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    # the second run measures nothing
    assert run_speed(op, tmp_path, options.split())["rows"] == rows


@pytest.mark.parametrize("op", list(COMMANDS))
def test_ops_without_gpu_raise(op, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = read_usage_error(capsys, op, ["--out", str(tmp_path / "none")])
    assert "device must be a CUDA device, got 'cuda'" in error
    assert not (tmp_path / "none").exists()


def test_ops_are_listed_and_unknown_ones_refused(capsys):
    assert main(["speed", "--help"]) == 0
    help_text = capsys.readouterr().out
    assert all(f"\n  {op:16}  " in help_text for op in COMMANDS)
    for arguments in (["speed", "magic"], ["speed"]):
        assert main(arguments) == 2
        assert "speed: command must be one of attention, ttft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "attribute_name", "new_value", "field"),
    [
        (provenance, "git_commit", lambda: "1" * 40, "commit"),
        (provenance, "device_name", lambda device: "a GPU", "device"),
        (provenance, "package_versions", lambda: {"torch": "9"}, "versions"),
        (
            dense,
            "CPU_BASELINES",
            {"SDPA": dense.Baseline(LOAD_SDPA_KERNEL, lambda: "SDPA 9")},
            "baselines",
        ),
    ],
    ids=["commit", "device", "versions", "baselines"],
)
def test_run_with_other_settings_is_not_extended(
    tmp_path, monkeypatch, capsys, module, attribute_name, new_value, field
):
    attention_options = (
        f"{HEAD_OPTIONS} --head-dims 16 --seconds 0 --directions forward --densities 0.2 --lengths"
    )
    attention_options = attention_options.split()
    (first_row,) = run_speed("attention", tmp_path, [*attention_options, "192"])["rows"]
    results = run_speed("attention", tmp_path, [*attention_options, "96"])
    assert [row["length"] for row in results["rows"]] == [96, 192]
    assert results["rows"][1]["ms"] == first_row["ms"]
    assert sorted(results["provenance"]["settings"]["lengths"]) == [96, 192]
    monkeypatch.setattr(module, attribute_name, new_value)
    arguments = ["--device", "cpu", "--out", str(tmp_path), *attention_options, "64"]
    assert main(["speed", "attention", *arguments]) == 2
    assert f"made with {field}" in capsys.readouterr().err


# removed option -> its value in all committed runs
REMOVED_OPTIONS = {"budgets": [], "inputs": "topics", "batch": 1, "heads_k_stride": 4, "turns": 8}
REMOVED_OPTIONS |= {"rope_theta": 500_000.0, "host_gib": 0.0, "gpu_gib": 0.0}
# former defaults of settings that commands of committed runs do not contain
EARLIER_DEFAULTS = {"min_length": 8192, "predictor": "curvature", "top_p": 0.999}
EARLIER_DEFAULTS |= {"dense_tail_blocks": 1, "typical_queries": 8, "mass_threshold": 0.0025}
EARLIER_DEFAULTS |= {"share_threshold": 0.05}
EARLIER_DEFAULTS |= {"curvature": "additive", "redundancy": 0.3}
# folder of a committed run -> True if the command was removed
IS_ARCHIVED_BY_FOLDER = {
    folder: read_provenance(folder)["experiment"] in REMOVED_COMMANDS
    for folder in RESULTS_FOLDER.glob("speed-*")
}


@pytest.mark.parametrize(
    "folder",
    sorted(x for x in IS_ARCHIVED_BY_FOLDER if not IS_ARCHIVED_BY_FOLDER[x]),
    ids=lambda path: path.name,
)
def test_committed_results_equal_rows_of_samples(folder, monkeypatch):
    results = json.loads(read_file(folder / "results.json"))
    provenance, rows = results["provenance"], results["rows"]
    experiment = import_experiment(provenance["experiment"])
    identity, samples = read_log(folder / "samples.jsonl", added_defaults=experiment.ADDED_DEFAULTS)
    assert {name: identity[name] for name in IDENTITY_FIELDS} == {
        name: provenance[name] for name in IDENTITY_FIELDS
    }
    # one row of speed serve covers all lengths of its trace, and has the total time
    is_trace = provenance["experiment"] == "speed serve"
    get_row_fields = (
        itemgetter("implementation", "total_s") if is_trace else itemgetter("length", "ms")
    )
    assert list(map(get_row_fields, experiment.rows(samples, provenance["settings"]))) == list(
        map(get_row_fields, rows)
    )
    # the printed commands, one per number of ranks, parse to the recorded settings
    commands = (folder / "report.md").read_text().split("```\n")[1].splitlines()
    (command_options,) = {command.partition(experiment.name)[2] for command in commands}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = read_settings(experiment.Settings, shlex.split(command_options), experiment.name)
    recorded_settings = {
        "worlds": [],
        **json.loads(json.dumps(experiment(settings).recorded_settings())),
    }
    for name, default_value in REMOVED_OPTIONS.items():
        if name not in recorded_settings:
            assert provenance["settings"].pop(name, default_value) == default_value
    # compare the options and fields that the committed run and today's code have
    recorded_settings = {name: recorded_settings[name] for name in provenance["settings"]}
    committed_config, current_config = (
        provenance["settings"]["cab_config"],
        recorded_settings["cab_config"],
    )
    common_fields = set(committed_config) & set(current_config)
    provenance["settings"]["cab_config"] = {name: committed_config[name] for name in common_fields}
    # a field with its former default was not set by the command
    recorded_settings["cab_config"] = {
        name: committed_config[name]
        if committed_config[name] == EARLIER_DEFAULTS.get(name)
        else current_config[name]
        for name in common_fields
    }
    # torchrun sets the number of ranks, and the method is not an option
    replaced_fields = {"method": "", "worlds": []}
    assert {**recorded_settings, **replaced_fields} == {**provenance["settings"], **replaced_fields}


@pytest.mark.parametrize(
    "folder",
    sorted(x for x in IS_ARCHIVED_BY_FOLDER if IS_ARCHIVED_BY_FOLDER[x]),
    ids=lambda path: path.name,
)
def test_archived_results_render_their_report(folder):
    provenance, report = read_provenance(folder), (folder / "report.md").read_text()
    experiment = find_experiment_class(provenance, folder)
    assert report.startswith(f"# {experiment.title}\n") and experiment.title.endswith("(archived)")
    (sentence,) = [
        line for line in experiment.summary_sentences([]) if line.startswith("ArchivedRun: ")
    ]
    assert f"`{experiment.name}` was removed" in sentence
    expected_report_parts = [
        *experiment.tables([]).values(),
        *experiment.summary_sentences([]),
        experiment.notes({}),
        experiment.command,
    ]
    assert all(part and part in report for part in expected_report_parts)
    assert experiment.command.startswith(f"```\npython -m cab_hf.eval {experiment.name}")
    with pytest.raises(ValueError, match="which was removed. Check out the commit"):
        render(folder)


def test_out_of_memory_errors_are_detected():
    errors = {
        torch.OutOfMemoryError("CUDA out of memory"): True,
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"): True,
        RuntimeError("Triton Error [CUDA]: out of memory"): True,
        RuntimeError("a kernel is wrong"): False,
        ValueError("out of memory of what"): False,
    }
    assert {error: is_out_of_memory(error) for error in errors} == errors


def test_numbers_have_three_significant_digits():
    values = {0.0: "0", 0.0123456: "0.0123", 1.0: "1.00", 98.76: "98.8", 13_312.4: "13,312"}
    assert (
        format_digits(None) is None and {value: format_digits(value) for value in values} == values
    )
