"""``speed decode``: bytes per step, comparison with dense kernels, and rejected kernels."""

import sys
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from bench import measure_sample, run_speed
from torch.nn import functional as F

from cab_hf.eval.speed import decode, dense
from cab_hf.eval.speed.decode import Decode, Settings
from cab_hf.eval.speed.model import make_random_cache, make_random_model
from cab_hf.ops import decode as ops

TINY_SIZES = {
    "layers": 2,
    "hidden": 48,
    "intermediate": 48,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 16,
}
ATTENTION_CASE = {
    "part": "attention",
    "length": 600,
    "batch": 2,
    "way": "cab",
    "mode": None,
    "budget": 128,
}
MODEL_CASE = ATTENTION_CASE | {"part": "model", "mode": "static"}
TINY_OPTIONS = [
    word for name, value in TINY_SIZES.items() for word in (f"--{name.replace('_', '-')}", value)
]
TINY_OPTIONS = [*map(str, TINY_OPTIONS), "--seconds", "0", "--steps", "2"]


def make_tiny_settings(**setting_fields):
    """Return settings of a tiny model and one case; ``setting_fields`` replaces fields."""
    case_fields = {
        "lengths": (600,),
        "batches": (2,),
        "budgets": (128,),
        "steps": 3,
        "seconds": 0.0,
    }
    return Settings(device="cpu", **{**TINY_SIZES, **case_fields, **setting_fields})


def make_step(settings):
    """Return random inputs of a step with 600 keys, batch 2 and head dim 16."""
    return decode.make_random_step(settings, 600, 2, 16, device=torch.device("cpu"))


@pytest.mark.parametrize("kernel_name", ["SDPA", "transformers", "flash"])
def test_dense_baselines_of_cpu_are_timed(kernel_name):
    step = make_step(make_tiny_settings())
    sdpa_out = F.scaled_dot_product_attention(step.q, step.k, step.v, enable_gqa=True)
    torch.testing.assert_close(step.expected_out, sdpa_out)
    torch.testing.assert_close(step.weights.sum(-1), torch.ones(2, 2, 3))
    torch.testing.assert_close(decode.DENSE_KERNELS[kernel_name](step)(), step.expected_out)
    row = measure_sample(
        Decode, make_tiny_settings(), ATTENTION_CASE | {"way": kernel_name, "budget": None}
    )
    assert (row["error"], row["ms"], row["eager_ms"], row["kept"]) == (None, 2.0, 3.0, 600)
    # K and V of 600 tokens, for a batch of 2, 2 KV heads and 16 channels in float32
    assert row["bytes"] == 2 * 600 * 2 * 2 * 16 * 4


def test_flash_attn_gets_token_major_views_and_lengths(monkeypatch):
    step = make_step(make_tiny_settings())

    def fake_flash_attn(q, k, v, softmax_scale, cache_seqlens, causal):
        assert q.shape == (2, 1, 6, 16) and k.shape == v.shape == (2, 600, 2, 16)
        assert k.data_ptr() == step.k.data_ptr() and cache_seqlens.tolist() == [600, 600]
        return step.expected_out.transpose(1, 2), "log-sum-exp"

    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = fake_flash_attn
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dense, "find_spec", lambda name: True)
    torch.testing.assert_close(decode.DENSE_KERNELS["FA3"](step)(), step.expected_out)


def test_wrong_kernel_has_error_row(monkeypatch):
    def make_zeros_call(step):
        return lambda: torch.zeros_like(step.expected_out)

    monkeypatch.setitem(decode.DENSE_KERNELS, "SDPA", make_zeros_call)
    row = measure_sample(
        Decode, make_tiny_settings(), ATTENTION_CASE | {"way": "SDPA", "budget": None}
    )
    assert row["ms"] is None and "wrong by 1" in row["error"]


def test_bytes_of_cab_step_by_hand():
    settings = make_tiny_settings(lengths=(600,))
    row = measure_sample(Decode, settings, ATTENTION_CASE)
    assert row["error"] is None and row["full_error"] < 1e-5
    assert (row["ms"], row["index_ms"], row["choose_ms"], row["attend_ms"]) == (2.0,) * 4
    assert 64 <= row["kept"] <= 192 and 0.2 < row["mass"] < 1
    step = make_step(settings)
    channels = decode.slow_channels_of_llama(16)
    index_bytes = ops.index_keys(step.k, channels).nbytes
    # the step loads the index, and K and V of the selected keys
    batch_times_heads = 2 * 2
    assert row["bytes"] == index_bytes + batch_times_heads * row["kept"] * 2 * 16 * 4
    all_keys_row = measure_sample(Decode, settings, ATTENTION_CASE | {"budget": 600})
    assert all_keys_row["kept"] == 600 and all_keys_row["mass"] == pytest.approx(1)


def test_step_writes_index_of_new_key(monkeypatch):
    written_positions, write_index = [], ops.write_index

    def record_position_and_write(index, k, channels, start):
        written_positions.append((k.shape[2], int(start)))
        write_index(index, k, channels, start)

    monkeypatch.setattr(ops, "write_index", record_position_and_write)
    assert (
        measure_sample(Decode, make_tiny_settings(), ATTENTION_CASE | {"budget": 600})["error"]
        is None
    )
    # each step writes one key, at the last position
    assert set(written_positions) == {(1, 599)}
    # a float budget is a fraction of the cached keys, and an int budget a number of keys
    assert decode.count_budget_keys(0.25, 600) == 150 and decode.count_budget_keys(128, 600) == 128


def test_wrong_cab_step_is_not_timed(monkeypatch):
    original_attend = ops.attend

    def attend_wrongly_to_selected_keys(q, k, v, choice, **options):
        v = v if choice.to_mask().all() else v.roll(1, dims=2)
        return original_attend(q, k, v, choice, **options)

    monkeypatch.setattr(ops, "attend", attend_wrongly_to_selected_keys)
    row = measure_sample(Decode, make_tiny_settings(), ATTENTION_CASE)
    assert row["ms"] is None and "over the selected keys" in row["error"]


@torch.no_grad()
def test_steps_write_tokens_and_match_between_caches():
    model = make_random_model(make_tiny_settings())
    caches = []
    for is_static in (True, False):
        cache = make_random_cache(model, 40, 2, num_slots=decode.SLOT_MULTIPLE if is_static else 0)
        step = decode.make_decode_step(model, cache, 2, is_compiled=False)
        for _ in range(4):
            step()
        assert int(cache.get_seq_length()) == 44
        caches.append(cache)
    for static_layer, dynamic_layer in zip(*(cache.layers for cache in caches), strict=True):
        assert static_layer.keys.shape[2] == decode.SLOT_MULTIPLE
        torch.testing.assert_close(static_layer.keys[:, :, :44], dynamic_layer.keys)
        assert dynamic_layer.keys[:, :, 40:].abs().amin((0, 1, 3)).gt(0).all()


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_model_row_counts_cache_and_index(mode, monkeypatch):
    settings, choose_mock = make_tiny_settings(), Mock(wraps=ops.choose)
    monkeypatch.setattr(ops, "choose", choose_mock)
    dense_row = measure_sample(
        Decode, settings, MODEL_CASE | {"mode": mode, "way": "sdpa", "budget": None}
    )
    sparse_row = measure_sample(Decode, settings, MODEL_CASE | {"mode": mode})
    assert dense_row["error"] is sparse_row["error"] is None
    for row in (dense_row, sparse_row):
        assert row["ms"] > 0
        assert row["tokens_s"] == pytest.approx(2 / row["ms"] * 1e3)
        # a static cache has slots for all steps, rounded up to a multiple of SLOT_MULTIPLE
        num_slots = 640 if mode == "static" else 600 + decode.WARM_UP_STEPS + 3
        assert row["cache_gib"] * 2**30 == 2 * 2 * 2 * 2 * num_slots * 16 * 4
    assert dense_row["index_gib"] is None and dense_row["ran_as"] is None
    assert 0 < sparse_row["index_gib"] < sparse_row["cache_gib"]
    assert sparse_row["ran_as"] == "2 layers select the keys they read"
    assert choose_mock.call_count == 2 * (decode.WARM_UP_STEPS + 3)
    # 256 of 600 tokens are too many for a sparse step, which would save no time
    row = measure_sample(Decode, settings, MODEL_CASE | {"mode": mode, "budget": 256})
    assert row["error"] is None and row["ran_as"].startswith("dense: ")
    assert choose_mock.call_count == 2 * (decode.WARM_UP_STEPS + 3)


def test_cab_is_compared_with_fastest_dense_kernel():
    def make_sample(attention_name, ms, budget=None, mode=None, batch=1):
        """Return a sample of a kernel; if ``mode`` is set, of an attention implementation instead.

        ``attention_name`` is the name of the kernel or implementation.
        """
        benchmark_part = "model" if mode else "attention"
        case = {
            "part": benchmark_part,
            "length": 1000,
            "batch": batch,
            "way": attention_name,
            "mode": mode,
        }
        result_fields = dict.fromkeys((*Decode.COPIED_SETTINGS, *Decode.RESULT_FIELDS, "error"))
        result_fields |= {} if mode else {"bytes": 2e6, "bandwidth": 1000.0}
        return case | {"budget": budget} | result_fields | {"ms": ms}

    samples = [
        make_sample("SDPA", 8.0),
        make_sample("FA3", 4.0),
        make_sample("FA4", None),
        make_sample("cab", 1.0, 128),
        make_sample("sdpa", 10.0, mode="compiled"),
        make_sample("sdpa", 8.0, mode="dynamic"),
        make_sample("cab", 5.0, 128, mode="compiled"),
        make_sample("SDPA", 1.0, batch=4),
    ]
    rows = Decode.rows(samples[::-1], {})
    attention_row, model_row = (row for row in rows if row["way"] == "cab")
    assert (attention_row["baseline"], attention_row["over_best"]) == ("FA3", 4.0)
    # 2 MB in 1 ms are 2 GB/s, of a bandwidth of 1,000 GB/s
    assert (attention_row["gb_s"], attention_row["of_bandwidth"]) == (2.0, 0.002)
    assert attention_row["over_same"] is None
    assert (model_row["baseline"], model_row["over_best"]) == ("sdpa dynamic", 1.6)
    assert model_row["over_same"] == 2.0
    header, _, *lines = Decode.tables(rows)["All cases"].splitlines()
    cells = [dict(zip(header.split(" | "), line.split(" | "), strict=True)) for line in lines]
    (cab_cells,) = (
        line for line in cells if (line["attention"], line["mode"]) == ("cab", "compiled")
    )
    assert (cab_cells["ms"], cab_cells["baseline"], cab_cells["speed-up"]) == (
        "5.00",
        "sdpa dynamic",
        "1.60×",
    )


@pytest.mark.gpu
def test_gpu_uses_cuda_graphs_and_compiled_steps(gpu, tmp_path):
    shape_fields = {"layers": 2, "hidden": 256, "intermediate": 256, "heads": 8, "kv_heads": 2}
    settings = Settings(
        **shape_fields,
        vocab=512,
        lengths=(8192,),
        batches=(2,),
        budgets=(512,),
        steps=4,
        seconds=0.0,
    )
    experiment = Decode(settings)
    samples = [{**case, **experiment.measure(case)} for case in settings.list_requested_cases()]
    rows = Decode.rows(samples, {})
    for row in rows:
        if row["way"] in ("SDPA", "transformers", "flash", "sdpa", "cab"):
            assert row["error"] is None, row
        if row["way"] == "cab" and row["part"] == "attention":
            assert row["without_graph"] is None and row["mass"] > 0.2
        if row["way"] == "cab" and row["part"] == "model":
            assert row["peak_gib"] > row["cache_gib"] > row["index_gib"] > 0


def test_decode_run_writes_all_rows(tmp_path):
    options = (*TINY_OPTIONS, "--lengths", "512,640", "--batches", "1,2", "--kernels", "SDPA,FA3")
    rows = run_speed("decode", tmp_path, options, should_draw_figure=True)["rows"]
    # four pairs of length and batch: two kernels and cab, and three modes of sdpa and of cab
    assert [row["part"] for row in rows] == ["attention"] * 4 * 3 + ["model"] * 4 * 6
    failed_names = {
        row["way"] if row["mode"] is None else row["mode"] for row in rows if row["error"]
    }
    assert failed_names == {"FA3", "compiled"}
    timed_rows = [row for row in rows if row["error"] is None and row["way"] == "cab"]
    assert len(timed_rows) == 4 * 3 and all(row["over_best"] > 0 for row in timed_rows)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
