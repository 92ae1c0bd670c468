"""Fast runs of the commands ``speed OP``, and fake `Bench` classes that report fixed times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cab_hf.eval.__main__ import main
from cab_hf.eval.experiment import import_experiment
from cab_hf.eval.speed import timing
from cab_hf.eval.speed.timing import Bench, Timing
from cab_hf.plan import BlockPlan

ROOT = Path(__file__).parents[2]
# --standalone chooses a free port, so that several launches can run at the same time
TORCHRUN_ARGUMENTS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
# sizes of a random model
TINY_MODEL_SIZES = {
    "layers": 2,
    "hidden": 24,
    "intermediate": 40,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
}
# values of the option --cab, with blocks small enough that short prompts have unselected blocks
SMALL_BLOCK_ASSIGNMENTS = (
    "query_block=32",
    "key_block=16",
    "local_blocks=1",
    "dense_tail_blocks=1",
)
RESULT_FILE_NAMES = ["figure.png", "report.md", "results.csv", "results.json", "samples.jsonl"]


def run_speed(op, out_folder, command_options=(), should_draw_figure=False):
    """Run ``speed OP`` on the CPU and return its results.json.

    Args:
        op: name of the command.
        out_folder: folder of the results.
        command_options: further options of the command, as a list or tuple.
        should_draw_figure: True to draw the figure, which is slow.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not should_draw_figure:
            monkeypatch.setattr(import_experiment(f"speed {op}"), "draw", lambda *_: None)
        assert (
            main(["speed", op, "--device", "cpu", "--out", str(out_folder), *command_options]) == 0
        )
    return json.loads((out_folder / "results.json").read_text())


def run_torchrun(program_arguments):
    """Run ``torchrun --nproc_per_node=2`` with ``program_arguments``; return the process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *TORCHRUN_ARGUMENTS, *program_arguments],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def read_usage_error(capsys, op, command_options):
    """Return the error message of a ``speed OP`` command that exits with status 2."""
    with pytest.raises(SystemExit) as error_info:
        main(["speed", op, *command_options])
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

    def measure_peak(self, call):
        return call(), 5.0

    def time(self, call, has_graph=True):
        call()
        return Timing(
            3.0, 2.0 if has_graph and not self.no_graph_reason else None, self.no_graph_reason
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

    def time(self, call, has_graph=True):
        plans = [
            argument for argument in getattr(call, "args", ()) if isinstance(argument, BlockPlan)
        ]
        return Timing(100 * plans[0].density() if plans else 10.0)
