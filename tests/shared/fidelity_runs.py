"""Runs of fidelity on a tiny model, for the tests that read what they write."""

import json

import pytest
from tiny import SPARSE_WORDS

from cab_hf.eval.__main__ import main
from cab_hf.eval.fidelity import Fidelity

LENGTH = 300
SMALL = "query_block=32,key_block=16,mass_threshold=0.06,share_threshold=0.5,dense_tail_blocks=1"
FILES = {"samples.jsonl", "results.json", "results.csv", "report.md", "figure.png"}


def start(model_folder, out, *more, methods="dense,cab,random", drawn=False):
    given = ["--model", model_folder, "--out", out, "--methods", methods, "--lengths", LENGTH]
    fixed = ["--keys", "2", "--device", "cpu"]
    fixed += [word for assignment in SPARSE_WORDS for word in ("--cab", assignment)]
    with pytest.MonkeyPatch.context() as patch:
        # which takes longer than the rest
        if not drawn:
            patch.setattr(Fidelity, "draw", lambda *_: None)
        return main(["fidelity", *map(str, (*given, *fixed, *more))])


def command(model_folder, out, *more, **kind):
    assert start(model_folder, out, *more, **kind) == 0
    return json.loads((out / "results.json").read_text())
