"""Fast runs of speed commands, and fake benches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cab_hf.eval.__main__ import main
from cab_hf.eval.experiment import named
from cab_hf.eval.speed import timing
from cab_hf.eval.speed.timing import Bench, Timing
from cab_hf.plan import BlockPlan

ROOT = Path(__file__).parents[2]
# standalone: each launch has its own rendezvous, so that launches may run at once
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
# a model for commands that run whole models; small blocks, so that short prompts have unlisted ones
TINY = {"layers": 2, "hidden": 24, "intermediate": 40, "heads": 4, "kv_heads": 2, "head_dim": 8}
BLOCKS = ("query_block=32", "key_block=16", "local_blocks=1", "dense_tail_blocks=1")
FILES = ["figure.png", "report.md", "results.csv", "results.json", "samples.jsonl"]


def speed_run(op, out, *words, drawn=False):
    """Return results.json of ``speed OP`` on the CPU; figures are slow and off by default."""
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(named(f"speed {op}"), "draw", lambda *_: None)
        assert main(["speed", op, "--device", "cpu", "--out", str(out), *words]) == 0
    return json.loads((out / "results.json").read_text())


def torchrun(*words):
    """Run two ranks of a module or a script and return the finished process."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *TORCHRUN, *words],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def refused(capsys, op, *words):
    """Return the error message of a ``speed OP`` command that exits with status 2."""
    with pytest.raises(SystemExit) as stop:
        main(["speed", op, *words])
    assert stop.value.code == 2
    return capsys.readouterr().err


def sample_of(kind, settings, case, bench=None):
    """Return the sample of ``case`` on a bench, by default `FakeBench`."""
    experiment = kind(settings)
    experiment.bench = FakeBench() if bench is None else bench
    return {**case, **experiment.measure(case)}


def shown(kind, rows):
    """Return all tables of ``rows``."""
    return "\n".join(kind.tables(rows).values())


class FakeBench(timing.Bench):
    """Fake bench of a GPU: every call takes 2 ms in a CUDA graph and 3 ms from Python."""

    def __init__(self, why_not=None):
        super().__init__("cpu")
        self.why_not = why_not

    def peak(self, call):
        return call(), 5.0

    def time(self, call, graph=True):
        call()
        return Timing(3.0, 2.0 if graph and not self.why_not else None, self.why_not)


class Clock(FakeBench):
    """Fake clock: every run takes half a second and 2 GiB."""

    def walls(self, call, runs, before=lambda: None):
        before()
        call()
        return [500.0] * runs, 2.0


class DensityBench(Bench):
    """Fake bench: attention takes (pairs / 100) ms, selection and dense attention 10 ms."""

    def __init__(self):
        super().__init__("cpu")

    def time(self, call, graph=True):
        plans = [x for x in getattr(call, "args", ()) if isinstance(x, BlockPlan)]
        return Timing(100 * plans[0].density() if plans else 10.0)
