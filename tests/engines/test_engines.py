"""Engines compared with the reference, and the reference compared with a loop over queries."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from attention_cases import make_random_plan
from budget import assert_within_budget
from marks import mark_slow_except
from tiny import draw_qkv
from torch.nn.attention.flex_attention import flex_attention
from valid_plan import assert_valid_plan

from cab_hf import BlockPlan, engines
from cab_hf.call.layout import BlockLayout
from cab_hf.experiment.log import read_file
from cab_hf.ops import reference
from cab_hf.ops.attention import ffpa, flash, flex, traced
from cab_hf.plan import BlockIndices, KeyRanges

SHAPE_CASES = [
    pytest.param({"q_length": 256}, id="even"),
    pytest.param({"q_length": 63, "kv_length": 111}, id="chunk"),
    pytest.param({"q_length": 205, "heads": 3, "kv_heads": 1}, id="odd-group-3"),
    pytest.param({"q_length": 130, "heads": 2, "kv_heads": 2, "batch": 3}, id="batch"),
]
BLOCK_SIZE_CASES = [
    pytest.param((64, 32), id="64x32"),
    pytest.param((32, 64), id="32x64"),
]


def make_block_mask(plan, device, training=False):
    """Return the `BlockMask` of FlexAttention for a plan."""
    block_tables = flex.make_block_tables(plan, plan.heads, device, training)
    return flex.make_block_mask(block_tables, plan.q_length, plan.kv_length)


def attend_by_loop(q, k, v, *, plan, scale):
    """Compute attention by a loop over heads and queries, in float64.

    Returns:
        (output [B, H, N, D], log-sum-exp [B, H, N]).
    """
    q, k, v = (x.double() for x in (q, k, v))
    query_heads_per_kv_head = q.shape[1] // k.shape[1]
    heads_per_plan_head = q.shape[1] // plan.heads
    mask = plan.token_mask()
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        is_visible = mask[b, h // heads_per_plan_head, i]
        if is_visible.any():
            logits = k[b, h // query_heads_per_kv_head, is_visible] @ q[b, h, i] * scale
            lse[b, h, i] = logits.logsumexp(0)
            out[b, h, i] = logits.softmax(0) @ v[b, h // query_heads_per_kv_head, is_visible]
    return out, lse


@pytest.mark.parametrize(
    ("shape", "block_sizes", "plan_heads"),
    [
        *(
            (shape.values[0], blocks.values[0], None)
            for shape in SHAPE_CASES
            for blocks in BLOCK_SIZE_CASES
        ),
        *(({"q_length": 63, "kv_length": 111}, (32, 16), heads) for heads in (1, 2, 3, 6)),
    ],
    ids=str,
)
def test_reference_equals_loop_over_queries(shape, block_sizes, plan_heads):
    """Compare also plans with fewer heads than q: each plan head applies to several query heads."""
    q, k, v = draw_qkv(**shape)
    plan = make_random_plan(q, k, block_sizes, num_plan_heads=plan_heads)
    assert_valid_plan(plan)
    actual = engines.REFERENCE.attention(q, k, v, plan, scale=0.3, return_lse=True)
    expected = attend_by_loop(q, k, v, plan=plan, scale=0.3)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor.double(), expected_tensor, atol=1e-5, rtol=1e-4)


def test_plan_heads_that_do_not_divide_query_heads_raise():
    q, k, v = draw_qkv(q_length=63)
    plan = make_random_plan(q, k, (32, 16), num_plan_heads=4)
    with pytest.raises(ValueError, match="divides the 6 heads of q, got 4"):
        reference.attention(q, k, v, plan, scale=0.3)


def test_queries_without_keys_have_zero_output_and_empty_log_sum_exp():
    """Test both causes: the key range of a query is empty, or its query block lists no blocks."""
    q, k, v = draw_qkv(q_length=96)
    key_ranges = KeyRanges.causal(1, 96, 96, q.device)
    key_ranges = replace(key_ranges, end=key_ranges.end.masked_fill(torch.arange(96) < 5, -1))
    plan = make_random_plan(q, k, (32, 32), ranges=key_ranges)
    is_selected = plan.to_dense()
    is_selected[:, 1, 2] = False
    plan = BlockPlan.from_dense(is_selected, key_ranges, query_block=32, key_block=32)
    out, lse = reference.attention(q, k, v, plan, scale=0.3, return_lse=True)
    is_empty = torch.zeros(q.shape[:3], dtype=torch.bool)
    is_empty[:, :, :5] = True
    is_empty[:, 1, 64:] = True
    assert torch.equal(lse == -torch.inf, is_empty)
    assert torch.equal((out == 0).all(-1), is_empty)
    assert out.isfinite().all()


PLAN_KINDS = ["plain", "dense-rows", "sampled", "plan-of-groups", "not-finite", "softcap"]


@pytest.mark.parametrize("shape", SHAPE_CASES)
@pytest.mark.parametrize("plan_kind", PLAN_KINDS)
def test_traced_op_equals_reference(plan_kind, shape):
    """Compare the custom op that is used under torch.compile, forward and backward."""
    q, k, v = draw_qkv(**shape)
    dense_rows = torch.tensor([[0, -1]] * len(q)) if plan_kind == "dense-rows" else None
    plan_heads = k.shape[1] if plan_kind == "plan-of-groups" else None
    plan = make_random_plan(q, k, (32, 16), num_plan_heads=plan_heads, dense_rows=dense_rows)
    if plan_kind == "sampled":
        plan = plan.with_sample(3, torch.tensor(5))
    if plan_kind == "not-finite":
        # some heads list the block of the NaN key for some query blocks
        k[:, :, 20] = torch.nan

    def compute_results(attention_function):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        logit_options = {"scale": 0.3, "softcap": 3.0 if plan_kind == "softcap" else None}
        out, lse = attention_function(
            inputs[0], inputs[1], inputs[2], plan=plan, return_lse=True, **logit_options
        )
        gradients = torch.autograd.grad(out, inputs, draw_qkv(**shape, seed=9)[0])
        if plan_kind == "not-finite":
            # gradients of k and v are undefined for rows that attend to the NaN key
            gradients = [gradients[0].where(out.isfinite(), 0.0)]
        return out.detach(), lse.detach(), *gradients

    for actual, expected in zip(
        compute_results(traced.attention), compute_results(reference.attention), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_traced_op_passes_opcheck():
    """Run `torch.library.opcheck` on the custom op: shapes, strides and gradients."""
    q, k, v = (x.requires_grad_() for x in draw_qkv(q_length=63, kv_length=111))
    plan = make_random_plan(q, k, (32, 16))
    attention_op = traced._attention_op
    attention_op_mock = Mock(wraps=attention_op)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(traced, "_attention_op", attention_op_mock)
        traced.attention(q, k, v, plan, scale=0.3, return_lse=True)
    (recorded_call,) = attention_op_mock.call_args_list
    torch.library.opcheck(attention_op, recorded_call.args, recorded_call.kwargs)


@pytest.mark.parametrize("plan_heads", mark_slow_except([None, 1, 2, 3], 0))
@pytest.mark.parametrize("block_sizes", mark_slow_except(BLOCK_SIZE_CASES, 0))
@pytest.mark.parametrize("shape", mark_slow_except(SHAPE_CASES, 0))
def test_compiled_flex_equals_reference(shape, block_sizes, plan_heads):
    """Compare values, because FlexAttention without compilation ignores block lists silently."""
    q, k, v = draw_qkv(**shape)
    if plan_heads is not None and q.shape[1] % plan_heads:
        pytest.skip("the number of plan heads must divide the number of query heads")
    plan = make_random_plan(q, k, block_sizes, num_plan_heads=plan_heads)
    with torch.no_grad():
        actual = flex.attention(q, k, v, plan, scale=0.3)

    def attend_by_reference(q, k, v):
        return reference.attention(q, k, v, plan, scale=0.3)

    assert_within_budget(actual, attend_by_reference, q, k, v)


@pytest.mark.parametrize("engine_name", ["gather", "reference", "flex"])
def test_soft_cap_equals_formula(engine_name):
    q, k, v = draw_qkv(q_length=70, dim=32)
    plan = make_random_plan(q, k, (32, 16), dense_rows=torch.tensor([[1]]))

    def attend_by_hand(q, k, v):
        k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
        logits = 2.0 * torch.tanh(q @ k.mT * 0.3 / 2.0)
        return logits.masked_fill(~plan.token_mask(), -torch.inf).softmax(-1) @ v

    engine = {"gather": engines.GATHER, "reference": engines.REFERENCE, "flex": engines.FLEX}[
        engine_name
    ]
    with torch.no_grad():
        out = engine.attention(q, k, v, plan, scale=0.3, softcap=2.0)
    assert_within_budget(out, attend_by_hand, q, k, v)


@pytest.mark.slow
def test_flex_with_padding_and_documents_equals_reference():
    q, k, v = draw_qkv(batch=2, q_length=180)
    padding_mask = torch.ones(2, 180, dtype=torch.bool)
    padding_mask[0, :25] = False
    doc_ids = torch.tensor([[0] * 70 + [1] * 110] * 2)
    layout = BlockLayout.build(
        batch=2,
        q_length=180,
        kv_length=180,
        q_offset=0,
        padding_mask=padding_mask,
        doc_ids=doc_ids,
        align=64,
        device=q.device,
    )
    q, k, v = layout.queries(q), layout.keys(k), layout.keys(v)
    plan = make_random_plan(q, k, (64, 32), ranges=layout.ranges)
    assert_valid_plan(plan)
    with torch.no_grad():
        actual = flex.attention(q, k, v, plan, scale=0.3)
    has_keys = (layout.ranges.end >= 0)[:, None, :, None]
    expected = reference.attention(q, k, v, plan, scale=0.3)
    torch.testing.assert_close(actual.where(has_keys, 0), expected, atol=1e-5, rtol=1e-4)


def test_uncompiled_flex_attention_ignores_block_lists():
    """Document why the engine always compiles. Remove this test when PyTorch fixes the error."""
    q, k, v = draw_qkv(q_length=256)
    plan = make_random_plan(q, k, (64, 32), selection_probability=0.0)
    mask_of_lists = make_block_mask(plan, torch.device("meta"))
    with torch.no_grad():
        uncompiled_out = flex_attention(
            q, k, v, block_mask=mask_of_lists, scale=0.3, enable_gqa=True
        )
        compiled_out = flex.attention(q, k, v, plan, scale=0.3)
    causal_plan = BlockPlan.causal(plan.ranges, q.shape[1], 64, 32)
    expected = reference.attention(q, k, v, causal_plan, scale=0.3)
    torch.testing.assert_close(uncompiled_out, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(uncompiled_out, compiled_out, atol=1e-2)


@pytest.mark.slow
def test_flex_raises_at_recompile_limit(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(flex, "RECOMPILE_LIMIT", 1)
    with torch.no_grad(), pytest.raises(Exception, match="(?i)recompile"):
        for length in (64, 96, 160):
            q, k, v = draw_qkv(q_length=length)
            flex.attention(q, k, v, make_random_plan(q, k, (32, 32)), scale=0.3)
    torch._dynamo.reset()


def test_partial_and_full_lists_of_block_mask_have_equal_strides():
    """Check strides: torch 2.11 reads ``full_kv_indices`` with the strides of ``kv_indices``."""
    q, k, _ = draw_qkv(q_length=256)
    block_mask = make_block_mask(make_random_plan(q, k, (64, 32)), q.device, training=True)
    assert block_mask.kv_indices.stride() == block_mask.full_kv_indices.stride()
    assert block_mask.q_indices.stride() == block_mask.full_q_indices.stride()


def test_block_mask_transpose_lists_every_attending_query_block():
    q, k, _ = draw_qkv(q_length=700)
    plan = make_random_plan(q, k, (128, 128))
    block_mask = make_block_mask(plan, q.device, training=True)
    is_attended = plan.to_dense().transpose(2, 3)
    is_listed = torch.zeros_like(is_attended)
    for counts, indices in (
        (block_mask.q_num_blocks, block_mask.q_indices),
        (block_mask.full_q_num_blocks, block_mask.full_q_indices),
    ):
        for b, h, j in (counts > 0).nonzero().tolist():
            is_listed[b, h, j, indices[b, h, j, : counts[b, h, j]].long()] = True
    assert torch.equal(is_listed, is_attended)


def test_blocks_merged_for_training_attend_the_same_tokens():
    """Backward kernels reject key blocks of 64: blocks are merged, and mask_mod masks pairs."""
    q, k, _ = draw_qkv(q_length=300)
    plan = make_random_plan(q, k, (64, 32), selection_probability=0.9)
    block_mask = make_block_mask(plan, q.device, training=True)
    assert block_mask.BLOCK_SIZE == (128, 128)
    block_lists = (
        BlockIndices(block_mask.kv_num_blocks, block_mask.kv_indices),
        BlockIndices(block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    )
    # expand block masks [B, H, 3, 3] to token masks [B, H, 300, 300]
    is_partial, is_full = (
        x.to_dense(3).repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :300, :300]
        for x in block_lists
    )
    batch, head, query, key = torch.meshgrid(*map(torch.arange, is_partial.shape), indexing="ij")
    is_attended = is_full | (is_partial & block_mask.mask_mod(batch, head, query, key))
    assert torch.equal(is_attended, plan.token_mask())
    assert is_full.any() and is_partial.any()


def test_incomplete_last_block_is_partial():
    q, k, _ = draw_qkv(q_length=205)
    plan = make_random_plan(q, k, (64, 32), selection_probability=1.0)
    last_block_index = plan.kv_blocks - 1
    assert not plan.full.to_dense(plan.kv_blocks)[..., last_block_index].any()
    assert plan.partial.to_dense(plan.kv_blocks)[..., -1, last_block_index].all()


@pytest.mark.parametrize(
    "workload_fields, reason, fallback_name",
    [
        pytest.param({"training": True}, "no backward on CPU", "reference", id="training"),
        pytest.param({"dtype": torch.float64}, "float64", "gather", id="dtype"),
        pytest.param(
            {"device": "cuda", "head_dim": 320, "dtype": torch.bfloat16},
            "head dims",
            "triton",
            id="head-dim",
        ),
        pytest.param({"device": "mps"}, "not on mps", "reference", id="device"),
    ],
)
def test_unavailable_engine_by_name_raises_and_auto_falls_back(
    workload_fields, reason, fallback_name
):
    workload = make_workload(
        **{"device": "cpu", "head_dim": 64, "dtype": torch.float32, **workload_fields}
    )
    with pytest.raises(ValueError, match=reason):
        engines.choose("flex", workload)
    assert engines.choose("auto", workload).name == fallback_name


DEFAULT_WORKLOAD_FIELDS = {
    "device": "cuda",
    "head_dim": 128,
    "dtype": torch.bfloat16,
    "training": False,
    "query_block": 128,
    "key_block": 64,
}
HOPPER_CAPABILITY, AMPERE_CAPABILITY, BLACKWELL_CAPABILITY = (9, 0), (8, 0), (10, 0)


@pytest.mark.parametrize(
    "capability, workload_fields, expected_backend",
    [
        pytest.param(HOPPER_CAPABILITY, {}, "FLASH", id="forward"),
        pytest.param(HOPPER_CAPABILITY, {"head_dim": 80}, "FLASH", id="d80"),
        pytest.param(HOPPER_CAPABILITY, {"training": True}, "FLASH", id="training"),
        pytest.param(
            HOPPER_CAPABILITY, {"training": True, "head_dim": 80}, "FLASH", id="training-d80"
        ),
        pytest.param(HOPPER_CAPABILITY, {"head_dim": 100}, "TRITON", id="odd-head-dim"),
        pytest.param(HOPPER_CAPABILITY, {"dtype": torch.float32}, "TRITON", id="float32"),
        pytest.param(HOPPER_CAPABILITY, {"key_block": 32}, "TRITON", id="narrow-keys"),
        pytest.param(AMPERE_CAPABILITY, {}, "TRITON", id="ampere"),
        pytest.param(BLACKWELL_CAPABILITY, {}, "TRITON", id="blackwell-narrow"),
        pytest.param(
            BLACKWELL_CAPABILITY, {"query_block": 256, "key_block": 128}, "FLASH", id="blackwell"
        ),
        pytest.param(
            BLACKWELL_CAPABILITY,
            {"query_block": 256, "key_block": 128, "training": True},
            "FLASH",
            id="blackwell-training",
        ),
        pytest.param(HOPPER_CAPABILITY, {"device": "cpu"}, "CPU", id="cpu"),
    ],
)
def test_flex_selects_flash_backend_by_capability(
    monkeypatch, capability, workload_fields, expected_backend
):
    patch_gpu_capability(monkeypatch, capability)
    workload = make_workload(**workload_fields)
    assert f"({expected_backend}" in engines.choose("flex", workload).label(workload)


@pytest.mark.parametrize("installed_version", ["4.0.0b1", "4.0.0b37", "4.0.0"])
def test_untested_flash_attn_version_is_unavailable(monkeypatch, installed_version):
    uncached_why_not_installed = flash._why_not_installed.__wrapped__
    patch_gpu_capability(monkeypatch, HOPPER_CAPABILITY)
    monkeypatch.setattr(flash, "version", lambda name: installed_version)
    monkeypatch.setattr(flash, "_why_not_installed", uncached_why_not_installed)
    expected_message = f"4.0.0b36 or later, below 4.0.0b37, not {installed_version}"
    assert expected_message in flash.unavailable(128, torch.bfloat16, 128, 64)


def test_flash_extra_pins_the_tested_version():
    setup_cfg = (Path(__file__).parents[2] / "setup.cfg").read_text()
    requirement = f"flash = flash-attn-4>={flash.MIN_VERSION},<{flash.UNTESTED_VERSION}\n"
    assert requirement in setup_cfg


@pytest.mark.parametrize(
    "engine_name, workload_fields, expected_label",
    [
        pytest.param("reference", {}, "reference", id="reference"),
        pytest.param("triton", {}, "triton", id="triton"),
        pytest.param("flex", {}, "flex (FLASH)", id="forward"),
        pytest.param("flex", {"device": "cpu"}, "flex (CPU)", id="cpu"),
        pytest.param("flex", {"training": True, "key_block": 128}, "flex (FLASH)", id="wide-keys"),
        pytest.param(
            "flex",
            {"training": True},
            "flex (FLASH, gradients by triton)",
            id="gradients-by-triton",
        ),
        pytest.param("flex", {"training": True, "head_dim": 256}, "flex (FLASH)", id="d256"),
        pytest.param(
            "flex",
            {"training": True, "dtype": torch.float32},
            "flex (TRITON, blocks merged to 128 x 128)",
            id="merged",
        ),
    ],
)
def test_label_names_engine_and_backend(monkeypatch, engine_name, workload_fields, expected_label):
    patch_gpu_capability(monkeypatch, HOPPER_CAPABILITY)
    workload = make_workload(**workload_fields)
    assert engines.choose(engine_name, workload).label(workload) == expected_label


@pytest.mark.parametrize(
    ("workload_fields", "length", "expected_name"),
    [
        pytest.param({}, 4096, "sdpa", id="sdpa-has-a-fast-kernel"),
        pytest.param({}, None, "triton", id="sdpa-is-slow-under-masks"),
        pytest.param({"head_dim": 320}, 4096, "triton", id="d320"),
        pytest.param({"head_dim": 512}, 4096, "ffpa", id="d512"),
        pytest.param({"head_dim": 512}, 300, "triton", id="d512-short"),
        pytest.param({"head_dim": 512}, None, "triton", id="d512-masked"),
        pytest.param({"head_dim": 512, "training": True}, 4096, "triton", id="d512-training"),
        pytest.param({"head_dim": 512, "device": "cpu"}, 4096, "sdpa", id="cpu"),
    ],
)
def test_exact_attention_selects_engine_by_head_dim_and_length(
    monkeypatch, workload_fields, length, expected_name
):
    patch_gpu_capability(monkeypatch, HOPPER_CAPABILITY)
    monkeypatch.setattr(ffpa, "_why_not_installed", lambda: None)
    assert (
        engines.choose_exact_attention(make_workload(**workload_fields), length).name
        == expected_name
    )


def test_unmeasured_gpu_uses_pytorch_engines(monkeypatch):
    patch_gpu_capability(monkeypatch, AMPERE_CAPABILITY)
    assert engines.choose("auto", make_workload()) is engines.FLEX
    assert engines.choose_exact_attention(make_workload(), None) is engines.SDPA
    assert engines.choose_exact_attention(make_workload(head_dim=512), 4096) is engines.SDPA
    assert engines.choose("triton", make_workload()) is engines.TRITON


def test_missing_ffpa_is_not_selected(monkeypatch):
    patch_gpu_capability(monkeypatch, HOPPER_CAPABILITY)
    monkeypatch.setattr(ffpa, "find_spec", lambda name: None)
    monkeypatch.setattr(ffpa, "_why_not_installed", ffpa._why_not_installed.__wrapped__)
    assert engines.choose_exact_attention(make_workload(head_dim=512), 4096) is engines.TRITON


# smallest length at which engines are compared: at 8,192 tokens, launch overhead dominates, and
# the times of engines differ by at most 0.14 ms
MIN_COMPARED_TOKENS = 16384


def read_measured_rows(results_folder):
    """Return the rows of a speed run in eval/results with at least `MIN_COMPARED_TOKENS` tokens."""
    results_path = Path(__file__).parents[2] / "eval" / "results" / results_folder / "results.json"
    rows = json.loads(read_file(results_path))["rows"]
    long_rows = [row for row in rows if row["length"] >= MIN_COMPARED_TOKENS and not row["error"]]
    assert long_rows
    return long_rows


@pytest.mark.parametrize(
    ("backend", "results_folder"),
    [("FLASH", "speed-attention"), ("TRITON", "speed-attention-without-flash")],
)
def test_auto_order_matches_measured_times(backend, results_folder):
    missing_engine = engines.FLASH if backend == "TRITON" else None
    engine_names = [x.name for x in engines.FASTEST if x not in (missing_engine, engines.REFERENCE)]
    fastest_engine_name, *other_engine_names = dict.fromkeys(engine_names)
    for row in read_measured_rows(results_folder):
        times_ms = row["attend_ms"]
        assert backend in row["labels"]["flex"]
        # two engines may run the same kernel, and runs of one kernel differ by up to 2%
        assert times_ms[fastest_engine_name] <= 1.02 * min(
            times_ms[engine_name] for engine_name in other_engine_names
        ), row


def test_ffpa_head_dims_match_measured_times():
    for row in read_measured_rows("speed-attention-wide"):
        if row["direction"] == "forward" and row["budget"] == 1:
            is_faster = row["baselines"]["ffpa CuTe"] < 0.98 * row["attend_ms"]["triton"]
            assert is_faster == (row["head_dim"] in ffpa.FASTER_HEAD_DIMS)


def make_workload(**changed_fields):
    """Return a `Workload` with `DEFAULT_WORKLOAD_FIELDS`, except for ``changed_fields``."""
    return engines.Workload(**{**DEFAULT_WORKLOAD_FIELDS, **changed_fields})


def patch_gpu_capability(monkeypatch, capability):
    """Patch torch to report a CUDA device of this capability, with flash-attn-4 installed."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flash, "_why_not_installed", lambda: None)


def test_flex_without_compiler_is_unavailable_on_cpu(monkeypatch):
    monkeypatch.setattr(flex.shutil, "which", lambda name: None)
    reason = flex.unavailable(
        device="cpu",
        head_dim=64,
        dtype=torch.float32,
        training=False,
        query_block=128,
        key_block=64,
    )
    assert "C++ compiler" in reason


def test_unknown_engine_raises():
    cpu_workload = engines.Workload(
        device="cpu",
        head_dim=64,
        dtype=torch.float32,
        training=False,
        query_block=128,
        key_block=64,
    )
    with pytest.raises(ValueError, match="'reference', 'gather', 'flex', 'triton', got 'fastest'"):
        engines.choose("fastest", cpu_workload)


def test_flex_with_soft_cap_compiles_for_dynamic_lengths(monkeypatch):
    """Compile with dynamic shapes, under which the soft cap must still be a constant."""
    compiled_attend = torch.compile(flex._attend, dynamic=True, backend="aot_eager")
    monkeypatch.setattr(flex, "_compile_attend", lambda _: compiled_attend)
    for length in (96, 160):
        q, k, v = draw_qkv(q_length=length, kv_length=length)
        plan = make_random_plan(q, k, (32, 16))
        has_keys = (plan.ranges.end >= 0)[:, None, :, None]
        with torch.no_grad():
            out = flex.attention(q, k, v, plan, scale=0.3, softcap=3.0)
        expected = reference.attention(q, k, v, plan, scale=0.3, softcap=3.0)
        torch.testing.assert_close(
            out.where(has_keys, 0), expected.where(has_keys, 0), atol=1e-5, rtol=1e-4
        )
