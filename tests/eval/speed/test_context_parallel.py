"""``speed context-parallel``: a killed and resumed run of two processes, errors, and times."""

import json

import pytest
import torch
import torch.distributed as dist
from bench import format_tables, run_torchrun

from cab_hf import distributed, engines
from cab_hf.eval.speed import context_parallel
from cab_hf.eval.speed.context_parallel import (
    DIRECTIONS,
    FORWARD,
    FORWARD_BACKWARD,
    ContextParallel,
    Settings,
)
from cab_hf.eval.speed.rank_group import RankGroup
from cab_hf.eval.speed.timing import Bench

# 900 tokens leave padding on a rank
QUICK_OPTIONS = ["--device", "cpu", "--lengths", "900", "--seconds", "0", "--runs", "2"]
# the command with a first argument n: rank 0 is killed at the n-th case; 0 kills no process
KILLED_RUN_SCRIPT = """
import os, signal, sys
from cab_hf.eval.__main__ import main
from cab_hf.eval.speed.context_parallel import ContextParallel
from cab_hf.experiment import provenance

# a commit between two runs must not change the provenance
provenance.git_commit = lambda: "0" * 40
measure, cases, last = ContextParallel.measure, [], int(sys.argv[1])

def measure_or_die(self, case):
    cases.append(case)
    if len(cases) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(self, case)

ContextParallel.measure = measure_or_die
raise SystemExit(main(sys.argv[2:]))
"""


def make_settings(**setting_fields):
    """Return settings of a short run; the keywords ``setting_fields`` add or replace fields."""
    return Settings(
        **{"device": "cpu", "lengths": (600,), "seconds": 0.0, "runs": 1, **setting_fields}
    )


@pytest.mark.slow
def test_killed_run_continues(tmp_path):
    script, folder = tmp_path / "killed.py", tmp_path / "run"
    script.write_text(KILLED_RUN_SCRIPT)
    arguments = ["speed", "context-parallel", *QUICK_OPTIONS, "--out", str(folder)]
    assert run_torchrun([str(script), "7", *arguments]).returncode != 0
    interrupted_log = (folder / "samples.jsonl").read_text()
    process = run_torchrun([str(script), "0", *arguments])
    assert process.returncode == 0, process.stderr[-3000:]
    complete_log = (folder / "samples.jsonl").read_text()
    # the logs have a header, and six or ten cases
    assert interrupted_log.count("\n") == 7 and complete_log.count("\n") == 11
    assert complete_log.startswith(interrupted_log)
    results = json.loads((folder / "results.json").read_text())
    rows = results["rows"]
    assert results["provenance"]["settings"]["worlds"] == [2]
    schemes = [*context_parallel.ONE_RANK_SCHEMES, *context_parallel.RANK_SCHEMES]
    assert [(row["direction"], row["scheme"]) for row in rows] == [
        (direction, scheme) for direction in DIRECTIONS for scheme in schemes
    ]
    for row in rows:
        # the engine of a CPU has the gradients that ring attention needs
        assert row["error"] is None and len(row["each_ms"]) == 2
        if row["scheme"] in context_parallel.RANK_SCHEMES:
            assert row["efficiency"] == row["alone_ms"] / row["ms"] / 2
    sparse_rows = [row for row in rows if "cab" in row["scheme"]]
    for one_rank_row, two_rank_row in zip(sparse_rows[::2], sparse_rows[1::2], strict=True):
        # the ranks use the plan of one process
        assert one_rank_row["density"] == two_rank_row["density"] < 1
    assert "torchrun --nproc_per_node=2 -m cab_hf.eval" in (folder / "report.md").read_text()


def measure_case(group, scheme, direction, apply_patch):
    """Return this rank's sample of a case, measured after ``apply_patch`` has patched a function.

    Args:
        group: the two ranks.
        scheme: name of the scheme.
        direction: "forward" or "forward+backward".
        apply_patch: function of the group and a `pytest.MonkeyPatch`.
    """
    with pytest.MonkeyPatch.context() as patch_context:
        apply_patch(group, patch_context)
        case = {"world": 2, "length": 600, "direction": direction, "scheme": scheme}
        return ContextParallel(make_settings(), RankGroup(group, group)).measure(case)


def patch_wrong_output(group, monkeypatch):
    """Add 1 to the output of "grouped" on rank 1."""
    patch_scheme_output(monkeypatch, lambda out: out + group.rank())


def patch_wrong_gradient(group, monkeypatch):
    """Halve the gradient of "grouped", but not its output."""
    patch_scheme_output(monkeypatch, lambda out: out / 2 + out.detach() / 2)


def patch_scheme_output(monkeypatch, change_output):
    """Replace the scheme "grouped" by one that applies ``change_output`` to its output."""

    def attend(q, k, v, **settings):
        out, lse = distributed.zigzag_attention(q, k, v, **settings)
        return change_output(out), lse

    monkeypatch.setitem(context_parallel.SCHEMES, "grouped", context_parallel.Scheme(attend))


def patch_other_engine(group, monkeypatch):
    """Make `engines.choose` return a GPU engine, whose log-sum-exp has no gradient."""
    monkeypatch.setattr(engines, "choose", lambda name, work: engines.FLEX)


def patch_out_of_memory(group, monkeypatch):
    """Make the allocation of the inputs raise an out-of-memory error."""

    def raise_out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 GiB. GPU 0")

    monkeypatch.setattr(Settings, "draw_random_heads", raise_out_of_memory)


@pytest.mark.parametrize(
    ("scheme", "direction", "apply_patch", "error"),
    [
        pytest.param("grouped", FORWARD, patch_wrong_output, "wrong by", id="output"),
        pytest.param(
            "grouped", FORWARD_BACKWARD, patch_wrong_gradient, "the gradient of q", id="gradient"
        ),
        pytest.param(
            "ring",
            FORWARD_BACKWARD,
            patch_other_engine,
            "must have gradients of its log-sum-exp",
            id="no-gradient",
        ),
        pytest.param("grouped", FORWARD, patch_out_of_memory, "out of memory", id="memory"),
    ],
)
def test_wrong_or_out_of_memory_case_is_not_timed(ranks, scheme, direction, apply_patch, error):
    for sample in ranks.run(2, measure_case, scheme, direction, apply_patch):
        assert sample["ms"] is None and error in sample["error"]


class RankBench(Bench):
    """A fake timer of rank r: calls take 1000 ms, then r + 1 ms, then 10 (2 - r) ms each."""

    def __init__(self, rank):
        super().__init__("cpu")
        self.rank, self.num_calls = rank, 0

    def time_runs(self, call, num_runs, before_run=lambda: None):
        run_ms = []
        for _ in range(num_runs):
            before_run()
            call()
            self.num_calls += 1
            # the first call is usually the warm-up
            run_ms.append(1000.0 if self.num_calls == 1 else self.rank + 1.0)
            if self.num_calls > 2:
                run_ms[-1] = 10.0 * (2 - self.rank)
        return run_ms, 3.0 + self.rank


def time_on_slowest_rank(group, timing_options):
    """Run `time_slowest` on this rank, with a fake timer.

    Returns:
        Reported ms, runs and calls per run; the number of actual calls; and the reported peak GiB.
    """
    calls = []
    rank_group, bench = RankGroup(group, group), RankBench(group.rank())
    result = rank_group.time_slowest(bench, lambda: calls.append(1), **timing_options)
    return result.ms, result.runs, result.in_a_row, len(calls), result.peak_gib


@pytest.mark.parametrize(
    ("timing_options", "expected"),
    [
        # the slowest rank is rank 1 in the first run (2 ms) and rank 0 later (20 ms)
        pytest.param({"min_runs": 3}, (20.0, 3, 1, 4), id="slowest"),
        pytest.param(
            {"min_runs": 1, "seconds": 0.0101}, (20.0, 5, 1, 6), id="as-many-as-there-is-time-for"
        ),
        pytest.param(
            {"min_runs": 3, "max_calls_per_run": 5}, (20.0 / 5, 3, 5, 2 + 3 * 5), id="in-a-row"
        ),
        pytest.param(
            {"min_runs": 1, "warm_up_seconds": 2.0}, (2.0, 1, 1, 2), id="short-first-call-warms-up"
        ),
        pytest.param(
            {"min_runs": 1, "warm_up_seconds": 0.5}, (1000.0, 1, 1, 1), id="long-first-call-counts"
        ),
    ],
)
def test_time_is_that_of_slowest_rank(ranks, timing_options, expected):
    for result in ranks.run(2, time_on_slowest_rank, timing_options):
        assert result == (*expected, 4.0)


def call_on_failing_ranks(group, failing_ranks):
    """Call `RankGroup.call_on_all_ranks` with a function that fails on the ranks ``failing_ranks``.

    Returns:
        The results of `call_on_all_ranks` and `broadcast_from_rank_0`, or the error message.
    """
    rank_group = RankGroup(group, group)

    def call():
        if group.rank() in failing_ranks:
            raise ValueError("no room")
        return group.rank()

    try:
        return rank_group.call_on_all_ranks(call), rank_group.broadcast_from_rank_0(
            group.rank() + 5
        )
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("failing_ranks", "expected"),
    [
        ((), [(0, 5), (1, 5)]),
        ((1,), ["rank 1: ValueError: no room"] * 2),
        ((0, 1), ["ValueError: no room"] * 2),
    ],
)
def test_failing_rank_fails_all_ranks(ranks, failing_ranks, expected):
    assert ranks.run(2, call_on_failing_ranks, failing_ranks) == expected


def test_rows_by_hand():
    def make_sample(scheme, length, ms, world_size=2, **result):
        empty_fields = dict.fromkeys((*ContextParallel.RESULT_FIELDS, "error"))
        case = {"world": world_size, "length": length, "direction": FORWARD, "scheme": scheme}
        return {**empty_fields, **case, "ms": ms, **result}

    samples = [
        make_sample("grouped", 2048, 100.0),
        make_sample("grouped", 1024, 25.0),
        make_sample("alone", 1024, 40.0, 1),
        make_sample("alone", 2048, None, 1, error="out of memory"),
    ]
    _, row, failed_row, longer_row = rows = ContextParallel.rows(samples, {})
    assert (row["iterations_s"], row["alone_ms"]) == (40.0, 40.0)
    assert row["efficiency"] == 0.8
    assert (
        failed_row["scheme"] == "alone"
        and longer_row["efficiency"] is longer_row["alone_ms"] is None
    )
    first_table, *_ = ContextParallel.tables(rows).values()
    assert "1,024" not in first_table and "out of memory" in format_tables(ContextParallel, rows)


def test_single_rank_measures_baselines(single_process_group, tmp_path):
    settings = make_settings(out=str(tmp_path), schemes=("grouped", "grouped+cab"))
    ContextParallel(settings, RankGroup(dist.group.WORLD)).run_on_all_ranks()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["provenance"]["settings"]["worlds"] == [1]
    assert {(row["scheme"], row["direction"]) for row in results["rows"]} == {
        (scheme, direction)
        for scheme in context_parallel.ONE_RANK_SCHEMES
        for direction in DIRECTIONS
    }
    assert all(row["ms"] > 0 for row in results["rows"])


def test_long_sequence_is_warmed_up_with_shorter_sequence(monkeypatch):
    monkeypatch.setattr("cab_hf.eval.speed.context_parallel.WARM_UP_TOKENS", 256)
    lengths = []
    original_attend = context_parallel.BenchCase.attend

    def record_length_and_attend(self, q, k, v):
        lengths.append(self.length)
        return original_attend(self, q, k, v)

    monkeypatch.setattr(context_parallel.BenchCase, "attend", record_length_and_attend)
    experiment = ContextParallel(make_settings(), RankGroup())
    case = {"world": 1, "length": 600, "direction": FORWARD, "scheme": "alone"}
    assert experiment.measure(case)["error"] is None
    # calls: the check, a short warm-up, then calls on the whole sequence, the last of them timed
    assert lengths[:3] == [4 * 128 - 37, 256, 600] and set(lengths[2:]) == {600}
