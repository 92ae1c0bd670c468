"""Block attention kernels in Triton's interpreter, compared with the reference op."""

import pytest
import torch
from attention_cases import (
    assert_engine_within_budget,
    make_case,
    make_random_plan,
    run_with_gradients,
)
from marks import mark_slow_except
from tiny import draw_qkv

from cab_hf import BlockPlan, engines
from cab_hf.ops import reference
from cab_hf.ops.attention import block, split, transpose
from cab_hf.ops.attention.tiles import BlockLists
from cab_hf.plan import BlockIndices, KeyRanges

CASES = [
    pytest.param({"q_length": 96}, (32, 16), id="even", marks=pytest.mark.slow),
    pytest.param({"q_length": 63, "kv_length": 111}, (32, 16), id="chunk"),
    pytest.param({"q_length": 70, "heads": 3, "kv_heads": 1, "batch": 2}, (16, 32), id="wide-keys"),
    pytest.param(
        {"q_length": 61, "heads": 2, "kv_heads": 2, "dim": 24},
        (48, 16),
        id="query-block-of-3-key-blocks",
    ),
    pytest.param({"q_length": 7, "heads": 4, "kv_heads": 1}, (32, 16), id="below-one-block"),
    pytest.param(
        {"q_length": 90, "layout": "padded", "batch": 2},
        (32, 16),
        id="padded",
        marks=pytest.mark.slow,
    ),
    pytest.param({"q_length": 90, "layout": "packed"}, (32, 16), id="packed"),
    pytest.param(
        {"q_length": 64, "plan_heads": 2},
        (32, 16),
        id="plan-shared-by-group",
        marks=pytest.mark.slow,
    ),
    pytest.param({"q_length": 64, "plan_heads": 1}, (32, 16), id="plan-shared-by-all"),
    pytest.param(
        {"q_length": 64, "selection_probability": 0.0},
        (32, 16),
        id="diagonal-blocks-only",
        marks=pytest.mark.slow,
    ),
    pytest.param({"q_length": 50, "heads": 2, "kv_heads": 1, "dim": 272}, (32, 16), id="split"),
    pytest.param(
        {
            "q_length": 45,
            "kv_length": 80,
            "heads": 2,
            "kv_heads": 2,
            "dim": 320,
            "selection_probability": 0.7,
        },
        (16, 32),
        id="split-chunk",
    ),
    pytest.param(
        {"q_length": 66, "heads": 2, "kv_heads": 1, "dim": 264, "layout": "padded", "batch": 2},
        (32, 16),
        id="split-padded",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("shape", "block_sizes"), CASES)
def test_kernels_equal_reference(shape, block_sizes):
    q, k, v, grad, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    assert_engine_within_budget(block.attention, q, k, v, grad_out=grad, plan=plan, scale=0.2)


@pytest.mark.parametrize(("shape", "block_sizes"), mark_slow_except(CASES, 1, 11))
def test_pointer_kernels_equal_reference(shape, block_sizes, force_pointer_loads):
    q, k, v, grad, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    assert_engine_within_budget(block.attention, q, k, v, grad_out=grad, plan=plan, scale=0.2)


def test_large_float32_head_dim_is_unavailable(force_pointer_loads):
    assert block.unavailable("cuda", 128, torch.float32) is None
    assert block.unavailable("cuda", 256, torch.bfloat16) is None
    assert "16 to 128" in block.unavailable("cuda", 256, torch.float32)


@pytest.mark.parametrize(("shape", "block_sizes"), mark_slow_except(CASES, 1, 10))
def test_gradients_flow_through_log_sum_exp(shape, block_sizes):
    q, k, v, grad, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    assert_engine_within_budget(
        block.attention, q, k, v, grad_out=grad, plan=plan, scale=0.2, has_lse_gradient=True
    )


@pytest.mark.parametrize(("shape", "block_sizes"), mark_slow_except(CASES, 1, 10))
def test_soft_cap_equals_reference(shape, block_sizes):
    q, k, v, grad, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    assert_engine_within_budget(
        block.attention, q, k, v, grad_out=grad, plan=plan, scale=0.2, softcap=3.0
    )


@pytest.mark.parametrize("dim", [16, 264], ids=["fused", "split"])
def test_float16_is_within_error_budget(dim):
    shape = {"q_length": 50, "heads": 2, "kv_heads": 1, "dim": dim}
    q, k, v, grad, plan = make_case("cpu", torch.float16, (32, 16), **shape)
    assert_engine_within_budget(block.attention, q, k, v, grad_out=grad, plan=plan, scale=dim**-0.5)


@pytest.mark.slow
def test_small_workspace_equals_one_pass(monkeypatch):
    """A small workspace forces the kernels for large heads to process query blocks in groups.

    The gradients dk and dv are then sums over groups.
    """
    shape = {"q_length": 50, "heads": 2, "kv_heads": 1, "dim": 264}
    q, k, v, grad, plan = make_case("cpu", torch.float32, (16, 16), **shape)
    expected = run_with_gradients(block.attention, (q, k, v), grad_out=grad, plan=plan, scale=0.1)
    monkeypatch.setattr(split, "WORKSPACE_BYTES", 1)
    actual = run_with_gradients(block.attention, (q, k, v), grad_out=grad, plan=plan, scale=0.1)
    for tensor_name in expected:
        torch.testing.assert_close(actual[tensor_name], expected[tensor_name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dim", [16, 264], ids=["fused", "split"])
def test_nan_in_unlisted_blocks_does_not_reach_output(dim):
    """Set all keys and values that the last query block does not list to NaN."""
    q, k, v = draw_qkv(q_length=96, heads=2, kv_heads=1, dim=dim)
    plan = make_random_plan(q, k, (32, 16), selection_probability=0.0)
    is_selected = plan.to_dense()[0]
    expected = reference.attention(q, k, v, plan, scale=0.2)
    # bool [N]: keys in blocks that any query block lists, and that the last query block lists
    is_listed = is_selected.any(0).any(0).repeat_interleave(16)[:96]
    is_listed_by_last_block = is_selected[:, -1].any(0).repeat_interleave(16)[:96]
    k, v = (x.masked_fill(~is_listed_by_last_block[:, None], torch.nan) for x in (k, v))
    actual = block.attention(q, k, v, plan, scale=0.2)
    assert is_listed.all() and not is_listed_by_last_block.all()
    torch.testing.assert_close(actual[:, :, 64:], expected[:, :, 64:], atol=1e-5, rtol=1e-4)


def test_unaligned_and_strided_tensors_are_accepted():
    """Pass k with an unaligned address, and v whose channels are not contiguous."""
    q, k, v = draw_qkv(q_length=40, dim=16)
    plan = make_random_plan(q, k, (32, 16))
    expected = reference.attention(q, k, v, plan, scale=0.2)
    unaligned_k = torch.empty(k.numel() + 1)[1:].view(k.shape).copy_(k)
    strided_v = v.transpose(2, 3).contiguous().transpose(2, 3)
    actual = block.attention(q, unaligned_k, strided_v, plan, scale=0.2)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("dim", "value_dim"), [(24, 16), (16, 24)], ids=["narrow-values", "wide-values"]
)
def test_value_head_dim_unequal_to_key_head_dim_equals_reference(dim, value_dim):
    q, k, _ = draw_qkv(q_length=40, dim=dim)
    v = draw_qkv(q_length=40, dim=value_dim)[2]
    plan = make_random_plan(q, k, (32, 16), dense_rows=torch.tensor([[1]]))
    expected = engines.REFERENCE.attention(q, k, v, plan, scale=0.2, return_lse=True)
    actual = engines.TRITON.attention(q, k, v, plan, scale=0.2, return_lse=True)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-5, rtol=1e-4)


def test_registered_op_passes_opcheck():
    q, k, v = (x.requires_grad_() for x in draw_qkv(q_length=40))
    plan = make_random_plan(q.detach(), k.detach(), (32, 16))
    torch.library.opcheck(
        block.forward_op,
        (q, k, v),
        block.make_op_arguments(plan, 0.2),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_empty_plan_has_zero_output_and_gradients():
    q, k, v = (x.requires_grad_() for x in draw_qkv(q_length=40))
    key_ranges = KeyRanges.causal(1, 40, 40, "cpu")
    is_selected = torch.zeros(1, 6, 2, 3, dtype=torch.bool)
    plan = BlockPlan.from_dense(is_selected, key_ranges, query_block=32, key_block=16)
    out, lse = block.attention(q, k, v, plan, scale=0.2, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize(("num_rows", "num_columns"), [(5, 7), (33, 16), (270, 3)])
def test_transposed_lists_equal_reference(num_rows, num_columns, monkeypatch):
    generator = torch.Generator().manual_seed(num_rows)
    is_listed = torch.rand(1, 2, num_rows, num_columns, generator=generator) < 0.3
    is_listed[0, 0] = False
    block_lists = BlockIndices.from_dense(is_listed)
    expected = block_lists.transpose(num_columns)
    for max_bytes in (transpose.MAX_WIDE_LISTS_BYTES, 0):
        monkeypatch.setattr(transpose, "MAX_WIDE_LISTS_BYTES", max_bytes)
        actual = transpose.transpose(block_lists, num_columns)
        assert torch.equal(actual.to_dense(num_rows), expected.to_dense(num_rows))
        assert actual.width == (num_rows if max_bytes else int(expected.counts.max()))
    column_lists = transpose.pack_columns(block_lists, num_columns, with_slots=True)
    assert torch.equal(column_lists.counts, expected.counts)
    for batch, plan_head, column in expected.counts.nonzero().tolist():
        start, count = (
            int(column_lists.starts[batch, plan_head, column]),
            int(column_lists.counts[batch, plan_head, column]),
        )
        column_rows = column_lists.rows[start : start + count]
        assert (
            column_rows.tolist()
            == is_listed[batch, plan_head, :, column].nonzero().flatten().tolist()
        )
        slots = column_lists.slots[start : start + count].long()
        assert (block_lists.indices[batch, plan_head, column_rows.long(), slots] == column).all()
    lists_without_slots, num_listed = (
        transpose.pack_columns(block_lists, num_columns),
        int(expected.counts.sum()),
    )
    assert torch.equal(lists_without_slots.rows[:num_listed], column_lists.rows[:num_listed])
    assert all(map(torch.equal, lists_without_slots[:2], column_lists[:2]))


def test_lists_of_width_1_are_widened():
    """Check that lists have at least two columns: Triton 3.6 drops a width of 1 from tuples."""
    block_lists = BlockIndices(
        torch.ones(1, 2, 3, dtype=torch.int32), torch.full((1, 2, 3, 1), 7).int()
    )
    kernel_lists = BlockLists.from_indices(block_lists)
    assert kernel_lists.width == kernel_lists.indices.shape[-1] == 2
    assert kernel_lists.indices[..., 0].eq(7).all()
