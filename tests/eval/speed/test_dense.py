"""Dense baselines of the speed commands: their selection, inputs, checks and times."""

import json
import sys
from types import ModuleType

import pytest
import torch
from bench import measure_sample, run_speed

from cab_hf.eval import charts
from cab_hf.eval.__main__ import main
from cab_hf.eval.speed import dense, timing
from cab_hf.eval.speed.attention import Attention, Settings
from cab_hf.eval.speed.timing import Timing

FORWARD_CASE = {"length": 256, "head_dim": 16, "direction": "forward", "blocks": "32x16"}
FORWARD_CASE |= {"layout": "whole", "budget": 0.2}


def make_tiny_settings(**setting_fields):
    """Return settings of a layer with few heads and channels."""
    return Settings(
        device="cpu", heads=4, kv_heads=2, head_dims=(16,), seconds=0.0, **setting_fields
    )


def test_first_capture_error_is_reported():
    class BenchWithoutGraphs(timing.GpuBench):
        def __init__(self):
            pass

        def _time_median(self, call):
            return 1.0

        def _capture_graph(self, call):
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            finally:
                raise RuntimeError("capture was invalidated")

    result = BenchWithoutGraphs().time(lambda: None)
    assert result == Timing(1.0, None, "operation not permitted when stream is capturing")


def test_inputs_have_the_memory_layout_of_transformers():
    q, k = make_tiny_settings().draw_random_heads(300, 16, torch.device("cpu"), "qk")
    assert q.shape == (1, 4, 300, 16) and k.shape == (1, 2, 300, 16)
    assert q.transpose(1, 2).is_contiguous() and k.transpose(1, 2).is_contiguous()


def test_baseline_is_extrapolated_from_longest_length():
    rows = [
        {"length": 100, "ms": 1.0, "baselines": {"FA3": 1.0, "cuDNN": 0.5}},
        {"length": 200, "ms": 1.5, "baselines": {"FA3": 3.0, "cuDNN": 9.0}},
        {"length": 400, "ms": 2.0, "baselines": {}},
    ]
    short_fields, middle_fields, long_fields = (dense.compare_with_dense(row, rows) for row in rows)
    assert (short_fields["baseline_ms"], short_fields["extrapolated"]) == (1.0, False)
    assert (middle_fields["baseline_ms"], middle_fields["extrapolated"]) == (3.0, False)
    assert (long_fields["baseline"], long_fields["baseline_ms"], long_fields["extrapolated"]) == (
        "FA3",
        12.0,
        True,
    )
    assert long_fields["ratio"] == pytest.approx(2.0 / 12.0)
    assert dense.format_dense_time(long_fields) == "≈ 12.0 FA3"


@pytest.mark.parametrize(
    ("baseline_ms", "expected_name"),
    [
        ({"flash": 1.0, "cuDNN": 3.0, "FA4": 2.0, "FA3": 4.0}, "FA3"),
        ({"flash": 1.0, "cuDNN": 3.0, "FA4": 2.0}, "cuDNN"),
        ({"flash": 3.0, "FA4": 2.0}, "FA4"),
        ({}, None),
    ],
)
def test_ratio_uses_preferred_or_fastest_baseline(baseline_ms, expected_name):
    assert dense.choose_baseline(baseline_ms) == expected_name


def test_wrong_dense_kernel_is_not_measured(monkeypatch):
    sdpa_attend = dense.CPU_BASELINES["SDPA"].load_kernel()

    def attend_with_keys_and_values_swapped(q, k, v, scale):
        return sdpa_attend(q, v.expand_as(k), k, scale)

    wrong_baseline = dense.Baseline(lambda: attend_with_keys_and_values_swapped)
    monkeypatch.setattr(dense, "CPU_BASELINES", {"bad": wrong_baseline})
    row = measure_sample(Attention, make_tiny_settings(), FORWARD_CASE, timing.Bench("cpu"))
    assert row["baselines"] == {} and "wrong by" in row["not_measured"]["bad"]


def test_baselines_are_measured_up_to_a_length_and_a_cascade_by_its_anchor(tmp_path):
    shape_options = "--heads 4 --kv-heads 2 --head-dims 16 --seconds 0 --directions forward"
    options = [
        *shape_options.split(),
        "--lengths",
        "192,384",
        "--densities",
        "0.2",
        "--dense-up-to",
        "192",
    ]
    cascade_assignments = (
        "predictor=cascade",
        "anchors=[3]",
        "mass_threshold=0.2",
        "share_threshold=0.5",
    )
    options += [option for assignment in cascade_assignments for option in ("--cab", assignment)]
    short_row, long_row = run_speed("attention", tmp_path, options)["rows"]
    assert long_row["baselines"] == {} and long_row["extrapolated"] is True
    assert long_row["baseline_ms"] == pytest.approx(4 * short_row["baseline_ms"])
    assert short_row["predict_ms"] > 0 and 0 < short_row["density"] < 1


def test_flash_attn_functions_get_token_major_views(monkeypatch):
    def fake_flash_attn(q, k, v, softmax_scale, causal):
        assert q.shape == (1, 300, 4, 16) and k.shape == v.shape == (1, 300, 2, 16)
        assert q.is_contiguous() and causal
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = dense.CPU_BASELINES["SDPA"].load_kernel()(q, k, v, softmax_scale)
        return out.transpose(1, 2), "log-sum-exp"

    module = ModuleType("flash_attn_interface")
    module.flash_attn_func = fake_flash_attn
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dense, "find_spec", lambda name: True)
    q, k, v = make_tiny_settings().draw_random_heads(300, 16, torch.device("cpu"), "qkv")
    dense.check_dense(dense.GPU_BASELINES["FA3"].load_kernel(), q, k, v)


@pytest.mark.gpu
def test_attention_run_on_gpu_has_graphs_peaks_and_baselines(gpu, tmp_path):
    out = ["--out", str(tmp_path), "--lengths", "1024,4096", "--directions", "forward"]
    assert main(["speed", "attention", *out]) == 0
    for row in json.loads((tmp_path / "results.json").read_text())["rows"]:
        assert row["error"] is None and row["without_graph"].get("predicting") is None
        assert row["ms"] > 0 and all(row["peak_mib"].values())
        assert "cuDNN" in row["baselines"], row["not_measured"]


def test_labels_of_lengths_do_not_overlap():
    assert charts.choose_ticks([1024, 2048, 2048, 960_000, 983_040]) == [1024, 2048, 983_040]
