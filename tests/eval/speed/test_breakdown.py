"""``speed breakdown``: kernels sorted by name, parts that add up."""

import pytest
from bench import BLOCKS, TINY, FakeBench, sample_of

from cab_hf.eval.speed import breakdown, timing
from cab_hf.eval.speed.breakdown import Breakdown, Settings


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_quantize_keys_kernel", "keys"),
        ("_farthest_points_kernel", "outliers"),
        ("_gather_queries_kernel", "rows"),
        ("_score_kernel_0d1d2d", "sweep"),
        ("_threshold_kernel", "keep"),
        ("_compact_kernel", "lists"),
        ("_select_kernel", "lists"),
        ("_block_attention_fwd_kernel", "attention"),
        ("block_attention_split_p_kernel", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("kernel_cutlass_flash_attn_cute_flash_fwd_sm90", "attention"),
        ("void flash::device_kernel<flash::FlashAttnFwdSm90>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "other"),
        ("void at::native::indexSelectLargeIndex<c10::BFloat16>", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<int>>", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kernels_of_a_prefill_are_sorted_by_name(kernel, part):
    assert timing.part_of(kernel, breakdown.PARTS) == part


def test_parts_are_medians_of_sums(monkeypatch):
    calls = [[("_score_kernel", ms), ("_score_kernel", 1.0), ("x", 4.0)] for ms in (1, 9, 2)]
    bench, parts = FakeBench(), {"keys": ("quantize_keys",), "sweep": ("score_kernel",)}
    monkeypatch.setattr(bench, "kernels", lambda call: calls)
    expected = {"keys_ms": 0.0, "sweep_ms": 3.0, "other_ms": 4.0}
    assert bench.parts(print, parts) == expected


def test_a_row_holds_the_wall_time_and_its_parts():
    bench = FakeBench(kernels=("_quantize_keys_kernel", "_block_attention_fwd_kernel", "nvjet"))
    settings = Settings(device="cpu", lengths=(96,), cab=BLOCKS, **TINY)
    (row,) = Breakdown.rows([sample_of(Breakdown, settings, {"length": 96}, bench)], {})
    # the wall time is never that of a graph
    assert (row["ms"], row["kernels_ms"], row["idle_ms"], row["gap"]) == (3.0, 3.0, 0.0, 0.0)
    assert (row["keys_ms"], row["lists_ms"], row["attention_ms"]) == (1.0, 0.0, 1.0)
    assert row["other_ms"] == 1.0 and row["density"] < 1 and "sparse" in row["ran_as"]
