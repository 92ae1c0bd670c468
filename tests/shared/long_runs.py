"""Runs of passkey and fidelity on a tiny model, for tests of their results."""

import json

import pytest
from tiny import SPARSE_WORDS

from cab_hf.eval.__main__ import main
from cab_hf.eval.experiment import named

# small settings for every command; later words override them
FIXED = {
    "passkey": "--lengths 400 --depths 3 --samples 1 --controls 0",
    "fidelity": "--lengths 300 --keys 2",
}
FILES = {"samples.jsonl", "results.json", "results.csv", "report.md", "figure.png"}


def start(name, model, out, *more, methods="dense,cab,random", drawn=False):
    """Run a command in the folder ``out`` and return its exit status."""
    words = [name, *FIXED[name].split(), "--device", "cpu", "--model", model, "--out", out]
    words += [word for assignment in SPARSE_WORDS for word in ("--cab", assignment)]
    with pytest.MonkeyPatch.context() as patch:
        # drawing takes longer than the rest of a run
        if not drawn:
            patch.setattr(named(name), "draw", lambda *_: None)
        return main([str(word) for word in (*words, "--methods", methods, *more)])


def command(name, model, out, *more, **kind):
    """Run a command and return its results.json, or None if it wrote none."""
    assert start(name, model, out, *more, **kind) == 0
    file = out / "results.json"
    return json.loads(file.read_text()) if file.exists() else None
