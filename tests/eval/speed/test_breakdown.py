"""``speed breakdown``: kernels sorted by name, parts that add up, what is shown."""

import pytest
from bench import FakeBench, sample_of

from cab_hf.eval.speed import breakdown, timing
from cab_hf.eval.speed.breakdown import Breakdown, Settings

TINY = {"layers": 1, "hidden": 24, "intermediate": 40, "heads": 4, "kv_heads": 2, "head_dim": 8}
# so few that 96 tokens have blocks to leave out
BLOCKS = ("query_block=32", "key_block=16", "local_blocks=1", "dense_tail_blocks=0")


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_scored_keys_kernel", "keys"),
        ("_sweep_kernel_0d1d2d", "sweep"),
        ("_lists_kernel", "lists"),
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
    assert timing.part_of(kernel, breakdown.PARTS) == part


def test_a_row_holds_the_wall_time_and_its_parts():
    bench = FakeBench(kernels=("_scored_keys_kernel", "_block_attention_fwd_kernel", "nvjet"))
    settings = Settings(device="cpu", lengths=(96,), cab=BLOCKS, **TINY)
    (row,) = Breakdown.rows([sample_of(Breakdown, settings, {"length": 96}, bench)], {})
    # the wall time is never that of a graph
    assert (row["ms"], row["kernels_ms"], row["idle_ms"], row["gap"]) == (3.0, 3.0, 0.0, 0.0)
    assert (row["keys_ms"], row["lists_ms"], row["attention_ms"]) == (1.0, 0.0, 1.0)
    assert row["other_ms"] == 1.0 and row["density"] < 1 and "sparse" in row["ran_as"]


def test_the_table_and_the_bars_show_every_part(tmp_path):
    def sample(length, ms, **parts):
        spent = {f"{part}_ms": parts.get(part, 0.0) for part in (*breakdown.PARTS, "other")}
        fixed = {"density": 0.1, "ran_as": None, "why_no_split": None, "error": None}
        return {"length": length, "ms": ms} | spent | fixed

    samples = [sample(1024, 10.0, sweep=1.0, attention=4.0, other=5.2), sample(2048, 20.0)]
    rows = Breakdown.rows(samples, {})
    head, _, first, _ = Breakdown.tables(rows)["All cases"].splitlines()
    cells = dict(zip(head.split(" | "), first.split(" | "), strict=True))
    assert (cells["attention ms"], cells["other ms"]) == ("4.00", "5.20")
    assert (cells["idle ms"], cells["keys ms"]) == ("-0.200", "0")
    Breakdown.draw(tmp_path / "figure.png", rows)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
