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
TINY_SIZES = {
    "layers": 2,
    "hidden": 24,
    "intermediate": 40,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
}
SMALL_BLOCKS = ("query_block=32", "key_block=16", "local_blocks=1", "dense_tail_blocks=1")
RESULT_FILES = ["figure.png", "report.md", "results.csv", "results.json", "samples.jsonl"]


def run_speed(op, out, words=(), draws_figure=False):
    """Run ``speed OP`` on the CPU and return its results.json.

    Args:
        op: name of the command.
        out: folder of the results.
        words: further words of the command line, as a list or tuple.
        draws_figure: True to draw the figure, which is slow.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not draws_figure:
            patch.setattr(named(f"speed {op}"), "draw", lambda *_: None)
        assert main(["speed", op, "--device", "cpu", "--out", str(out), *words]) == 0
    return json.loads((out / "results.json").read_text())


def run_torchrun(words):
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


def read_usage_error(capsys, op, words):
    """Return the error message of a ``speed OP`` command that exits with status 2."""
    with pytest.raises(SystemExit) as error_info:
        main(["speed", op, *words])
    assert error_info.value.code == 2
    return capsys.readouterr().err


def measure_sample(experiment_class, settings, case, bench=None):
    """Measure ``case``, and return its result record.

    Args:
        experiment_class: class of the experiment.
        settings: settings of the experiment.
        case: fields of the case.
        bench: the `Bench` that measures times; None: a `FakeBench`.
    """
    experiment = experiment_class(settings)
    experiment.bench = FakeBench() if bench is None else bench
    return {**case, **experiment.measure(case)}


def format_tables(experiment_class, rows):
    """Return all tables that ``experiment_class`` makes of ``rows``, as one string."""
    return "\n".join(experiment_class.tables(rows).values())


class FakeBench(timing.Bench):
    """Bench that reports 2 ms per call in a CUDA graph, 3 ms per call from Python, and 5 GiB.

    ``no_graph_reason``: the reason why CUDA graph capture failed; None: capture succeeds.
    """

    def __init__(self, no_graph_reason=None):
        super().__init__("cpu")
        self.no_graph_reason = no_graph_reason

    def peak(self, call):
        return call(), 5.0

    def time(self, call, graph=True):
        call()
        return Timing(
            3.0, 2.0 if graph and not self.no_graph_reason else None, self.no_graph_reason
        )


class WallTimeBench(FakeBench):
    """Bench that reports half a second and 2 GiB for every run."""

    def time_runs(self, call, num_runs, before_run=lambda: None):
        before_run()
        call()
        return [500.0] * num_runs, 2.0


class DensityBench(Bench):
    """Bench that reports 100 ms times density for calls with a plan, and 10 ms for others."""

    def __init__(self):
        super().__init__("cpu")

    def time(self, call, graph=True):
        plans = [x for x in getattr(call, "args", ()) if isinstance(x, BlockPlan)]
        return Timing(100 * plans[0].density() if plans else 10.0)
