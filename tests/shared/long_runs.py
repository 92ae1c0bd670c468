"""Run the evaluation commands ``passkey`` and ``fidelity`` with a tiny model."""

import json

import pytest
from tiny import SPARSE_ASSIGNMENTS

from cab_hf.eval.__main__ import main
from cab_hf.eval.experiment import import_experiment

# by command: options that make the command fast; options of a test come later and override them
FAST_OPTIONS = {
    "passkey": "--lengths 400 --depths 3 --samples 1 --controls 0",
    "fidelity": "--lengths 300 --keys 2",
}
RESULT_FILE_NAMES = {"samples.jsonl", "results.json", "results.csv", "report.md", "figure.png"}


def run_eval(
    command_name,
    model_folder,
    out_folder,
    command_options=(),
    methods="dense,cab,random",
    should_draw_figure=False,
):
    """Run an evaluation command on the CPU and return its exit status.

    Args:
        command_name: "passkey" or "fidelity".
        model_folder: folder of the model.
        out_folder: folder of the results.
        command_options: further options of the command, as a list or tuple.
        methods: value of ``--methods``.
        should_draw_figure: True to draw the figure, which is slow.
    """
    command_line = [
        command_name,
        *FAST_OPTIONS[command_name].split(),
        "--device",
        "cpu",
        "--model",
        model_folder,
        "--out",
        out_folder,
    ]
    command_line += [
        argument for assignment in SPARSE_ASSIGNMENTS for argument in ("--cab", assignment)
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not should_draw_figure:
            monkeypatch.setattr(import_experiment(command_name), "draw", lambda *_: None)
        return main(
            [str(argument) for argument in (*command_line, "--methods", methods, *command_options)]
        )


def run_eval_and_read_results(
    command_name, model_folder, out_folder, command_options=(), **run_options
):
    """Run an evaluation command; return the content of its results.json, or None without the file.

    Arguments are those of `run_eval`.
    """
    assert (
        run_eval(
            command_name, model_folder, out_folder, command_options=command_options, **run_options
        )
        == 0
    )
    results_file = out_folder / "results.json"
    return json.loads(results_file.read_text()) if results_file.exists() else None
