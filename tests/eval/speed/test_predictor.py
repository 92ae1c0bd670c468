"""``speed predictor``, and what all speed ops share: rows, arithmetic, going on."""

import json
import math
import sys
from types import ModuleType

import pytest
import torch
from bench import sample_of, shown, speed_run

from cab_hf.eval import charts
from cab_hf.eval.__main__ import main
from cab_hf.eval.speed import dense, predictor, timing
from cab_hf.eval.speed.predictor import Predictor, Settings
from cab_hf.eval.speed.timing import Timing

SHAPE = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16"]


def command(out, *more, lengths=("256", "512"), **how):
    return speed_run("predictor", out, *SHAPE, "--lengths", *lengths, *more, **how)


def tiny(**more):
    return Settings(device="cpu", heads=4, kv_heads=2, head_dim=16, **more)


def row_of(length, ms=1.0, baselines=None, **more):
    """A sample, as `Predictor.measure` makes it."""
    parts = dict.fromkeys(predictor.PARTS)
    fields = {"baselines": baselines or {}, "not_measured": {}, "without_graph": {}}
    times = {"ms": ms, "eager_ms": ms, "graph_ms": None, "peak_mib": None}
    parts_of = {"length": length, "density": None, "error": None, "why_no_split": None}
    return parts_of | times | fields | parts | more


def derive(samples):
    return Predictor.rows(samples, {})


# --- the row


def test_the_time_is_the_replay_and_eager_stands_beside_it():
    row = sample_of(Predictor, tiny(), {"length": 256})
    assert (row["ms"], row["graph_ms"], row["eager_ms"], row["peak_mib"]) == (2.0, 2.0, 3.0, 5.0)
    assert (row["keys_ms"], row["sweep_ms"], row["lists_ms"]) == (1.0, 0.0, 1.0)
    assert row["without_graph"] == {}


def test_the_first_error_of_a_capture_is_the_reason():
    class Broken(timing.GpuBench):
        def __init__(self):
            pass

        def _median(self, call):
            return 1.0

        def _captured(self, call):
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            finally:
                raise RuntimeError("capture was invalidated")

    result = Broken().time(lambda: None)
    assert result == Timing(1.0, None, "operation not permitted when stream is capturing")


def test_inputs_lie_as_transformers_hands_them():
    q, k = tiny().random_heads(300, 16, torch.device("cpu"), "qk")
    assert q.shape == (1, 4, 300, 16) and k.shape == (1, 2, 300, 16)
    assert q.transpose(1, 2).is_contiguous() and k.transpose(1, 2).is_contiguous()


# --- arithmetic


def test_a_baseline_is_extrapolated_from_the_longest_measured():
    rows = [
        row_of(400, 2.0),
        row_of(100, 1.0, {"FA3": 1.0, "cuDNN": 0.5}),
        row_of(200, 1.5, {"FA3": 3.0, "cuDNN": 9.0}),
    ]
    near, middle, far = derive(rows)
    assert (near["baseline_ms"], near["extrapolated"]) == (1.0, False)
    assert (middle["baseline_ms"], middle["extrapolated"]) == (3.0, False)
    assert (far["baseline"], far["baseline_ms"], far["extrapolated"]) == ("FA3", 12.0, True)
    assert far["ratio"] == pytest.approx(2.0 / 12.0)
    assert "| ≈ 12.0 |" in shown(Predictor, [near, middle, far])


@pytest.mark.parametrize(
    ("measured", "name"),
    [
        ({"flash": 1.0, "cuDNN": 3.0, "FA4": 2.0, "FA3": 4.0}, "FA3"),
        ({"flash": 1.0, "cuDNN": 3.0, "FA4": 2.0}, "cuDNN"),
        ({"flash": 3.0, "FA4": 2.0}, "FA4"),
        ({}, None),
    ],
)
def test_a_ratio_is_against_what_is_preferred_or_the_fastest(measured, name):
    assert dense.against(measured) == name


def test_growth_is_from_the_row_before_that_has_a_time():
    rows = derive([row_of(100, 1.0), row_of(200, None), row_of(400, 8.0)])
    assert [row["exponent"] for row in rows] == [None, None, pytest.approx(1.5)]


def test_of_a_cascade_an_anchor_is_timed(tmp_path):
    blocks = ("--cab", "query_block=32", "--cab", "key_block=16")
    more = (*blocks, "--cab", "predictor=cascade", "--cab", "anchors=[3]")
    more += ("--cab", "mass_threshold=0.2", "--cab", "share_threshold=0.5")
    (row,) = command(tmp_path / "run", *more, lengths=("256",))["rows"]
    assert row["ms"] > 0 and 0 < row["density"] < 1


# --- baselines


def test_a_wrong_kernel_is_not_measured(monkeypatch):
    def swapped(q, k, v, scale):
        return attend(q, v.expand_as(k), k, scale)

    attend = dense.ON_CPU["SDPA"].load()
    monkeypatch.setattr(dense, "ON_CPU", {"bad": dense.Baseline(lambda: swapped)})
    row = sample_of(Predictor, tiny(), {"length": 256}, timing.Bench("cpu"))
    assert row["baselines"] == {} and "wrong by" in row["not_measured"]["bad"]


def test_baselines_end_where_they_are_told_to(tmp_path):
    near, far = command(tmp_path, "--dense-up-to", "256")["rows"]
    assert far["baselines"] == {} and far["extrapolated"] is True
    assert far["baseline_ms"] == pytest.approx(4 * near["baseline_ms"])


def test_flash_attn_functions_get_token_major_views(monkeypatch):
    def kernel(q, k, v, softmax_scale, causal):
        assert q.shape == (1, 300, 4, 16) and k.shape == v.shape == (1, 300, 2, 16)
        assert q.is_contiguous() and causal
        out = dense.ON_CPU["SDPA"].load()(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale)
        return out.transpose(1, 2), "log-sum-exp"

    module = ModuleType("flash_attn_interface")
    module.flash_attn_func = kernel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dense, "find_spec", lambda name: True)
    q, k, v = tiny().random_heads(300, 16, torch.device("cpu"), "qkv")
    dense.check_dense(dense.ON_GPU["FA3"].load(), q, k, v)


@pytest.mark.gpu
def test_a_gpu_has_graph_peak_parts_and_baselines(gpu, tmp_path):
    out = ["--out", str(tmp_path), "--lengths", "1024", "4096"]
    assert main(["speed", "predictor", *out]) == 0
    for row in json.loads((tmp_path / "results.json").read_text())["rows"]:
        assert row["error"] is None and row["without_graph"].get("predictor") is None
        assert row["graph_ms"] == row["ms"] > 0 and row["peak_mib"] > 0
        assert all(row[f"{part}_ms"] > 0 for part in timing.PREDICTOR)
        kernels = math.fsum(row[part] for part in predictor.PARTS)
        assert kernels <= 2 * row["ms"]
        assert "cuDNN" in row["baselines"], row["not_measured"]


def test_names_of_lengths_do_not_stand_on_each_other():
    assert charts.apart([1024, 2048, 2048, 960_000, 983_040]) == [1024, 2048, 983_040]
