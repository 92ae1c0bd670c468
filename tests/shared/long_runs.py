"""Run the evaluation commands ``passkey`` and ``fidelity`` with a tiny model."""

import json

import pytest
from tiny import SPARSE_WORDS

from cab_hf.eval.__main__ import main
from cab_hf.eval.experiment import named

# by command: options that make the command fast; options of a test come later and override them
FAST_OPTIONS = {
    "passkey": "--lengths 400 --depths 3 --samples 1 --controls 0",
    "fidelity": "--lengths 300 --keys 2",
}
RESULT_FILES = {"samples.jsonl", "results.json", "results.csv", "report.md", "figure.png"}


def run_eval(name, model, out, words=(), methods="dense,cab,random", draws_figure=False):
    """Run an evaluation command on the CPU and return its exit status.

    Args:
        name: "passkey" or "fidelity".
        model: folder of the model.
        out: folder of the results.
        words: further words of the command line, as a list or tuple.
        methods: value of ``--methods``.
        draws_figure: True to draw the figure, which is slow.
    """
    line = [name, *FAST_OPTIONS[name].split(), "--device", "cpu", "--model", model, "--out", out]
    line += [word for assignment in SPARSE_WORDS for word in ("--cab", assignment)]
    with pytest.MonkeyPatch.context() as patch:
        if not draws_figure:
            patch.setattr(named(name), "draw", lambda *_: None)
        return main([str(word) for word in (*line, "--methods", methods, *words)])


def run_eval_and_read_results(name, model, out, words=(), **options):
    """Run an evaluation command; return the content of its results.json, or None without the file.

    Arguments are those of `run_eval`.
    """
    assert run_eval(name, model, out, words=words, **options) == 0
    results_file = out / "results.json"
    return json.loads(results_file.read_text()) if results_file.exists() else None
