"""Fast runs of the commands ``speed OP``, and fake `Bench` classes that report fixed times."""

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
# --standalone chooses a free port, so that several launches can run at the same time
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
# TINY: sizes of a random model. BLOCKS: CabConfig fields with blocks small enough that short
# prompts have unselected blocks
TINY = {"layers": 2, "hidden": 24, "intermediate": 40, "heads": 4, "kv_heads": 2, "head_dim": 8}
BLOCKS = ("query_block=32", "key_block=16", "local_blocks=1", "dense_tail_blocks=1")
FILES = ["figure.png", "report.md", "results.csv", "results.json", "samples.jsonl"]


def speed_run(op, out, words=(), drawn=False):
    """Run ``speed OP`` on the CPU and return its results.json.

    Args:
        op: name of the command.
        out: folder of the results.
        words: further words of the command line, as a list or tuple.
        drawn: True to draw the figure, which is slow.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(named(f"speed {op}"), "draw", lambda *_: None)
        assert main(["speed", op, "--device", "cpu", "--out", str(out), *words]) == 0
    return json.loads((out / "results.json").read_text())


def torchrun(words):
    """Run ``torchrun --nproc_per_node=2`` with the list ``words``, and return the process."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *TORCHRUN, *words],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def refused(capsys, op, words):
    """Return the error message of a ``speed OP`` command that exits with status 2."""
    with pytest.raises(SystemExit) as raised:
        main(["speed", op, *words])
    assert raised.value.code == 2
    return capsys.readouterr().err


def sample_of(kind, settings, case, bench=None):
    """Measure ``case``, and return its result record.

    Args:
        kind: class of the experiment.
        settings: settings of the experiment.
        case: fields of the case.
        bench: the `Bench` that measures times; None: a `FakeBench`.
    """
    experiment = kind(settings)
    experiment.bench = FakeBench() if bench is None else bench
    return {**case, **experiment.measure(case)}


def shown(kind, rows):
    """Return all tables of ``rows`` by the experiment class ``kind``, as one string."""
    return "\n".join(kind.tables(rows).values())


class FakeBench(timing.Bench):
    """Bench that reports 2 ms per call in a CUDA graph, 3 ms per call from Python, and 5 GiB.

    ``why_not`` is the reported reason why CUDA graph capture failed; None: capture succeeds.
    """

    def __init__(self, why_not=None):
        super().__init__("cpu")
        self.why_not = why_not

    def peak(self, call):
        return call(), 5.0

    def time(self, call, graph=True):
        call()
        return Timing(3.0, 2.0 if graph and not self.why_not else None, self.why_not)


class Clock(FakeBench):
    """Bench that reports half a second and 2 GiB for every run."""

    def walls(self, call, runs, before=lambda: None):
        before()
        call()
        return [500.0] * runs, 2.0


class DensityBench(Bench):
    """Bench that reports 100 ms times density for calls with a plan, and 10 ms for others."""

    def __init__(self):
        super().__init__("cpu")

    def time(self, call, graph=True):
        plans = [x for x in getattr(call, "args", ()) if isinstance(x, BlockPlan)]
        return Timing(100 * plans[0].density() if plans else 10.0)
