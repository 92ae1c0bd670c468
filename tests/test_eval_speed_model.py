"""``speed ttft`` and ``speed breakdown``: the model, its operations, its parts, what is said."""

import json

import pytest
import torch
from bench import FakeBench, quick, speed_run  # noqa: F401
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cab_hf import CabConfig
from cab_hf.eval import (
    dense,
    kernels,
    readme,
    speed,
    speed_breakdown,
    speed_model,
    speed_ttft,
)

TINY = {"layers": 3, "hidden": 24, "intermediate": 40, "heads": 4, "kv_heads": 2, "head_dim": 8}
BLOCKS = ["--config", "query_block=32", "--config", "key_block=16"]
SMALL = ["--layers", "1", "--lengths", "96,192", *BLOCKS]


def told(length, implementation, ms, density=1.0, **more):
    """A measured row, as `speed_ttft.measure` makes it."""
    fixed = {"ceiling": 2.0, "peak_gib": None, "tflops": 1.0, "ran_as": None, "error": None}
    key = {"length": length, "implementation": implementation}
    return key | {"ms": ms, "density": density} | fixed | more


def split_row(length, ms, **parts):
    """A measured row, as `speed_breakdown.measure` makes it; parts left out took no time."""
    spent = {f"{part}_ms": parts.get(part, 0.0) for part in speed_breakdown.SHOWN}
    fixed = {"density": 0.1, "ran_as": None, "why_no_split": None, "error": None}
    return {"length": length, "ms": ms} | spent | fixed


# --- the model


def test_operations_by_hand():
    settings = speed_ttft.Settings(device="cpu", vocab=11, **TINY)
    work = settings.model_flops(10)
    # per layer and token: q and o 24 x 32 each, k and v 24 x 16 each, three of 24 x 40 in the MLP
    weights = 3 * (2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 40)
    assert work["linear"] == 2 * (10 * weights + 24 * 11)
    assert work["attention"] == 3 * 4 * 4 * 8 * 10 * 10 / 2


def test_the_weights_counted_are_those_of_the_model():
    settings = speed_ttft.Settings(device="cpu", vocab=11, **TINY)
    model = speed_model.random_model(settings)
    linear = [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "proj" in name or "lm_head" in name
    ]
    assert settings.model_flops(1)["linear"] == 2 * sum(linear)
    assert model.dtype == torch.float32 and 0.01 < model.lm_head.weight.std() < 0.03


@pytest.mark.parametrize("name", ["sdpa", "SDPA", "cab-always"])
def test_every_way_to_attend_gives_the_same_logits(name):
    settings = speed_ttft.Settings(device="cpu", lengths=(70,), config=("mass=1.0",), **TINY)
    model, call = speed_model.random_model(settings), speed_model.prefill(settings, 70)
    expected = call().logits
    config = CabConfig(mass=1.0, min_length=0, query_block=32, key_block=16)
    with speed_model.attending(model, name, config):
        found = call()
    torch.testing.assert_close(found.logits, expected)
    assert found.logits.shape == (1, 1, settings.vocab)
    assert found.past_key_values.get_seq_length() == 70
    # as it was found
    assert model.config._attn_implementation == "sdpa"
    assert not [key for key in ALL_ATTENTION_FUNCTIONS if key.startswith("speed_")]


def test_a_budget_for_every_length():
    settings = speed_ttft.Settings(
        device="cpu", lengths=(256, 512), max_density=("0.1", "512:0.05")
    )
    assert settings.budgeted(256).max_density == 0.1
    config = settings.budgeted(512, min_length=0)
    assert (config.max_density, config.mass, config.min_length) == (0.05, 0.999, 0)


# --- ttft


def test_a_row_has_its_ceiling_by_hand():
    class Clock(FakeBench):
        def wall(self, call, runs):
            call()
            return 500.0, 2048.0

    settings = speed_ttft.Settings(
        device="cpu", lengths=(192,), config=("query_block=32", "key_block=16"), **TINY
    )
    key = {"length": 192, "implementation": "cab-always"}
    row = speed_ttft.measure(settings, key, Clock())
    work = settings.model_flops(192)
    assert (row["ms"], row["peak_gib"], row["error"]) == (500.0, 2.0, None)
    assert 0 < row["density"] < 0.6 and "sparse" in row["ran_as"]
    done = work["linear"] + row["density"] * work["attention"]
    assert row["ceiling"] == pytest.approx((work["linear"] + work["attention"]) / done)
    assert row["tflops"] == pytest.approx(done / 0.5 / 1e12)


def test_a_kernel_that_is_missing_or_wrong_is_a_row_with_its_reason(monkeypatch):
    def load():
        import no_such_kernels  # noqa: F401

    backwards = dense.Baseline(lambda: lambda q, k, v, scale: torch.zeros_like(q))
    both = {"FA3": dense.Baseline(load), "FA4": backwards}
    monkeypatch.setattr(dense, "ON_CPU", both)
    settings = speed_ttft.Settings(
        device="cpu", lengths=(96,), implementations=("FA3", "FA4"), **TINY
    )
    rows = [speed_ttft.measure(settings, key, FakeBench()) for key in settings.asked()]
    assert rows[0]["error"] == "no_such_kernels is not installed"
    assert "wrong by 1" in rows[1]["error"]
    rows = speed_ttft.derive(rows)
    assert [row["over_best"] for row in rows] == [None, None]
    said = " ".join(speed_ttft.readings(rows))
    assert "FA3 was not measured at 96 tokens: no_such_kernels is not installed." in said
    assert speed_ttft.overview(rows)


def test_gains_are_over_sdpa_and_over_the_fastest_dense_way():
    rows = [
        told(1000, "sdpa", 8.0),
        told(1000, "FA3", 4.0),
        told(1000, "cab-always", 8.0, 0.1),
        told(4000, "sdpa", 80.0),
        told(4000, "FA3", 40.0),
        told(4000, "cab-always", 20.0, 0.1),
    ]
    derived = speed_ttft.derive(reversed(rows))
    last = next(r for r in derived if r["length"] == 4000 and r["implementation"] == "cab-always")
    assert (last["baseline"], last["over_best"], last["over_sdpa"]) == ("FA3", 2.0, 4.0)
    said = " ".join(speed_ttft.readings(derived))
    assert "4.00× as fast as sdpa and 2.00× as fast as FA3, the fastest dense way" in said
    assert "no attention at that density could bring more than 2.00×" in said
    assert "faster than the fastest dense way from about 2,000 tokens on" in said


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folders of whole runs of both ops, by op."""
    folders = {}
    for op in ("ttft", "breakdown"):
        folders[op] = tmp_path_factory.mktemp(op)
        speed_run(op, folders[op], *SMALL)
    return folders


def rows_in(folder):
    return json.loads((folder / "results.json").read_text())["rows"]


def test_a_whole_run_of_ttft(finished):
    rows = rows_in(finished["ttft"])
    keys = [(row["length"], row["implementation"]) for row in rows]
    ways = ("sdpa", "SDPA", "cab", "cab-always")
    assert keys == [(length, way) for length in (96, 192) for way in ways]
    for row in rows:
        assert row["error"] is None and row["ms"] > 0 and row["over_best"] > 0
        assert (row["density"] < 1) == (row["implementation"] == "cab-always")
        assert (row["ceiling"] > 1) == (row["implementation"] == "cab-always")
    text = (finished["ttft"] / "report.md").read_text()
    assert "| tokens | sdpa s | SDPA s | cab s | cab-always s |" in text
    assert "cab-always: at most" in text and "1 layers of 64 channels" in text
    assert (finished["ttft"] / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_ttft_grows_by_an_implementation(tmp_path):
    words = ["--layers", "1", "--lengths", "96", "--runs", "1", "--implementations"]
    first = speed_run("ttft", tmp_path, *words, "sdpa")["rows"]
    content = speed_run("ttft", tmp_path, *words, "cab")
    assert [row["implementation"] for row in content["rows"]] == ["sdpa", "cab"]
    assert content["rows"][0]["ms"] == first[0]["ms"]
    assert content["rows"][1]["over_sdpa"] == first[0]["ms"] / content["rows"][1]["ms"]


# --- breakdown


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_coarsen_kernel", "coarsen"),
        ("_two_hop_kernel_0d1d2d", "curvature"),
        ("_block_lists_kernel", "select"),
        ("_block_attention_fwd_kernel", "attention"),
        ("_block_attention_split_levels_kernel", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("kernel_cutlass_flash_attn_cute_flash_fwd_sm90", "attention"),
        ("void flash::device_kernel<flash::FlashAttnFwdSm90>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "other"),
        ("void at::native::indexSelectLargeIndex<c10::BFloat16>", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kernels_of_a_prefill_are_sorted_by_name(kernel, part):
    assert kernels.part_of(kernel, speed_breakdown.PARTS) == part


def test_a_row_holds_the_wall_time_and_its_parts():
    settings = speed_breakdown.Settings(
        device="cpu", lengths=(96,), config=("query_block=32", "key_block=16"), **TINY
    )
    bench = FakeBench(kernels=("_coarsen_kernel", "_block_attention_fwd_kernel", "nvjet"))
    (row,) = speed_breakdown.derive([speed_breakdown.measure(settings, {"length": 96}, bench)])
    # the wall time is never that of a graph
    assert (row["ms"], row["kernels_ms"], row["idle_ms"], row["gap"]) == (3.0, 3.0, 0.0, 0.0)
    assert (row["coarsen_ms"], row["select_ms"], row["attention_ms"]) == (1.0, 0.0, 1.0)
    assert row["other_ms"] == 1.0 and row["density"] < 1 and "sparse" in row["ran_as"]


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        pytest.param((99.0, 97.5), "sum to the wall time within 3% at every length", id="agree"),
        pytest.param((99.0, 96.0), "by more than 3% at 200 tokens", id="idle"),
        pytest.param((104.0, 99.0), "by more than 3% at 100 tokens", id="profiled ran longer"),
    ],
)
def test_whether_the_parts_add_up_is_said(sums, said):
    lengths = (100, 200)
    rows = [
        split_row(length, 100.0, attention=total - 10, other=10.0)
        for length, total in zip(lengths, sums, strict=True)
    ]
    rows = speed_breakdown.derive(rows)
    sentence = speed_breakdown.readings(rows)[1]
    widest = max(rows, key=lambda row: abs(row["gap"]))
    assert said in sentence and f"by {widest['gap']:+.1%} of it" in sentence
    assert "attention" in speed_breakdown.readings(rows)[0]


def test_the_table_and_the_bars_show_every_part(tmp_path):
    rows = speed_breakdown.derive(
        [split_row(1024, 10.0, coarsen=1.0, attention=4.0, other=5.2), split_row(2048, 20.0)]
    )
    table = speed_breakdown.overview(rows).splitlines()
    assert table[2].count("|") == table[0].count("|") and "rest ms" in table[0]
    assert "4.00 (40.0 %)" in table[2] and "-0.200 (-2.00 %)" in table[2]
    speed_breakdown.draw(tmp_path / "speed.png", rows)
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_whole_run_of_breakdown_says_that_a_cpu_has_no_kernels(finished):
    for row in rows_in(finished["breakdown"]):
        assert row["ms"] > 0 and row["gap"] is None and row["error"] is None
    text = (finished["breakdown"] / "report.md").read_text()
    assert "Time is not split into parts at 96 and 192 tokens: there is no GPU to profile." in text


def test_memory_that_runs_out_is_a_row(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0")

    for op in (speed_ttft, speed_breakdown):
        monkeypatch.setattr(op, "prefill", full)
        settings = op.Settings(device="cpu", lengths=(96,), **TINY)
        rows = op.derive([op.measure(settings, key, FakeBench()) for key in settings.asked()])
        assert {row["error"] for row in rows} == {"out of memory: tried to allocate 4.00 GiB"}
        assert "out of memory" in " ".join(op.readings(rows)) and op.overview(rows)


# --- all of it


@pytest.mark.parametrize("op", ["ttft", "breakdown"])
def test_the_readme_shows_the_overview(finished, tmp_path, op):
    (tmp_path / f"speed-{op}").symlink_to(finished[op])
    shown = readme.render(f"<!-- results: speed-{op} -->\n<!-- end -->\n", tmp_path)
    assert speed.OPS[op].overview(rows_in(finished[op])) in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--max-density", "512:0.1"], "pairs that name 256 tokens", id="length"),
        pytest.param(["--max-density", "much"], "max_density must be a share", id="word"),
        pytest.param(["--max-density", "1.5"], "max_density is 1.5", id="share"),
        pytest.param(["--config", "max_density=0.3"], "config sets max_density", id="twice"),
        pytest.param(["--heads", "3"], "heads must be a multiple of kv_heads=2", id="heads"),
        pytest.param(["--layers", "0"], "layers must be at least 1", id="layers"),
        pytest.param(["--implementations", "FA9"], "implementations must be out of", id="way"),
        pytest.param(["--runs", "0"], "runs must be at least 1", id="runs"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(tmp_path, options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        speed.main(["ttft", "--device", "cpu", "--out", str(tmp_path / "none"), *options])
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("op", list(speed.OPS))
def test_without_a_gpu_every_op_says_so(op, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        speed.main([op, "--out", str(tmp_path / "none")])
    assert "torch finds no CUDA device" in capsys.readouterr().err
