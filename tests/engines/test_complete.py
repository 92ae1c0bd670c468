"""Dense rows: query blocks that attend to all visible keys, without lists of key blocks."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from attention_cases import (
    assert_engine_within_budget,
    make_block_layout,
    make_case,
    make_random_plan,
    run_with_gradients,
)
from marks import mark_slow_except
from tiny import draw_qkv
from valid_plan import assert_valid_plan

from cab_hf import BlockPlan, engines
from cab_hf.ops import reference
from cab_hf.ops.attention import complete
from cab_hf.plan import KeyRanges

FOUR_HEADS_SHAPE = {"heads": 4, "kv_heads": 2}
TWO_HEADS_SHAPE = {"heads": 2, "kv_heads": 1}
DENSE_TAIL_FIELDS = {"dense_rows": "tail"}
CASES = [
    pytest.param(TWO_HEADS_SHAPE | {"q_length": 105, "dense_rows": [[3, 1]]}, (32, 16), id="rows"),
    pytest.param(
        FOUR_HEADS_SHAPE | DENSE_TAIL_FIELDS | {"q_length": 45, "plan_heads": 2},
        (32, 16),
        id="plan-of-groups",
    ),
    pytest.param(
        TWO_HEADS_SHAPE | DENSE_TAIL_FIELDS | {"q_length": 45, "plan_heads": 1},
        (32, 16),
        id="one-plan",
    ),
    pytest.param(
        TWO_HEADS_SHAPE | DENSE_TAIL_FIELDS | {"q_length": 63, "kv_length": 111},
        (32, 16),
        id="tail-of-a-chunk",
    ),
    pytest.param(
        TWO_HEADS_SHAPE | {"q_length": 75, "batch": 2, "dense_rows": [[-1, 2, 0], [-1, -1, -1]]},
        (32, 16),
        id="rows-of-one-sequence",
    ),
    pytest.param(
        TWO_HEADS_SHAPE | DENSE_TAIL_FIELDS | {"q_length": 75, "layout": "padded", "batch": 2},
        (32, 16),
        id="padded",
    ),
    pytest.param(
        TWO_HEADS_SHAPE | DENSE_TAIL_FIELDS | {"q_length": 130, "layout": "packed"},
        (32, 16),
        id="packed",
    ),
    pytest.param(
        TWO_HEADS_SHAPE | DENSE_TAIL_FIELDS | {"q_length": 70, "layout": "packed", "batch": 2},
        (16, 32),
        id="packed-wide-keys",
    ),
    pytest.param(
        TWO_HEADS_SHAPE | DENSE_TAIL_FIELDS | {"q_length": 50, "dim": 264}, (32, 16), id="split"
    ),
]
parametrize_cases = pytest.mark.parametrize(("shape", "block_sizes"), CASES)


def list_all_blocks(plan):
    """Return an equivalent plan without dense rows: their blocks are listed explicitly."""
    return BlockPlan.from_dense(
        plan.to_dense(), plan.ranges, query_block=plan.query_block, key_block=plan.key_block
    )


@pytest.fixture
def diagonal_plan():
    """Return a plan of 6 queries and keys, 2 heads and 2 x 2 blocks, with diagonal blocks only."""
    is_selected = torch.eye(3, dtype=torch.bool)[None, None].expand(1, 2, -1, -1)
    key_ranges = KeyRanges.causal(1, 6, 6, "cpu")
    dense_rows = torch.tensor([[2, -1]])
    return BlockPlan.from_dense(
        is_selected, key_ranges, query_block=2, key_block=2, dense_rows=dense_rows
    )


def test_dense_rows_are_attended_without_lists(diagonal_plan):
    assert_valid_plan(diagonal_plan)
    assert diagonal_plan.partial.counts.tolist() == [[[1, 1, 0], [1, 1, 0]]]
    assert diagonal_plan.full.counts.sum() == 0
    assert diagonal_plan.to_dense()[0].int().tolist() == [[[1, 0, 0], [0, 1, 0], [1, 1, 1]]] * 2
    assert int(diagonal_plan.token_mask()[0, 0].sum()) == 3 + 3 + 11
    assert tuple(map(int, diagonal_plan.pairs())) == (17 + 17, 42)


@parametrize_cases
def test_dense_rows_equal_listed_blocks(shape, block_sizes):
    *_, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    listed_plan = list_all_blocks(plan)
    assert torch.equal(plan.token_mask(), listed_plan.token_mask())
    assert torch.equal(plan.token_mask(5, 41, 30), listed_plan.token_mask(5, 41, 30))
    assert tuple(map(int, plan.pairs())) == tuple(map(int, listed_plan.pairs()))


def test_split_keys_end_at_key_block_borders():
    """Split keys for a chunk that starts inside a block; key blocks exceed `DENSE_BLOCK_SIZE`."""
    key_ranges = KeyRanges.causal(1, 128, 9788, "cpu")
    dense_rows = key_ranges.tail_rows(128, 128)
    *_, plan = complete._gather_dense_rows(key_ranges, dense_rows, (128, 256), 2)
    assert_valid_plan(plan)


@parametrize_cases
def test_dense_rows_of_reference_equal_listed_blocks(shape, block_sizes):
    q, k, v, grad, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    actual = run_with_gradients(
        engines.REFERENCE.attention, (q, k, v), grad_out=grad, plan=plan, scale=0.2
    )
    for tensor_name, expected in run_with_gradients(
        reference.attention, (q, k, v), grad_out=grad, plan=list_all_blocks(plan), scale=0.2
    ).items():
        assert torch.equal(actual[tensor_name], expected), tensor_name


@pytest.mark.parametrize(("shape", "block_sizes"), mark_slow_except(CASES, 0, 1, 3, 6, 8))
def test_dense_rows_of_kernels_equal_reference(shape, block_sizes):
    q, k, v, grad, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    assert_engine_within_budget(
        engines.TRITON.attention, q, k, v, grad_out=grad, plan=plan, scale=0.2
    )


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("shape", "block_sizes"), [CASES[0], CASES[4], CASES[5]])
def test_inference_output_equals_training_output(shape, block_sizes, return_lse):
    q, k, v, grad, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    training_results = engines.TRITON.attention(
        q.requires_grad_(), k, v, plan, scale=0.2, return_lse=return_lse
    )
    with torch.inference_mode():
        actual = engines.TRITON.attention(q, k, v, plan, scale=0.2, return_lse=return_lse)
    for actual_tensor, expected_tensor in zip(
        *((x if return_lse else (x,)) for x in (actual, training_results)), strict=True
    ):
        assert torch.equal(actual_tensor, expected_tensor)


@pytest.mark.parametrize("return_lse", mark_slow_except([False, True], 1))
@pytest.mark.parametrize(
    ("shape", "block_sizes"), [case for case in CASES if "dim" not in case.values[0]]
)
def test_split_keys_of_dense_rows_equal_reference(shape, block_sizes, return_lse, monkeypatch):
    """Dense rows are split along the keys, because few rows would leave multiprocessors idle."""
    q, k, v, _, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    monkeypatch.setattr(complete, "MERGE_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(complete, "MIN_KEYS_PER_SPLIT", 16)
    monkeypatch.setattr(complete, "DENSE_BLOCK_SIZE", max(block_sizes))
    gather_mock = Mock(wraps=complete._gather_dense_rows)
    monkeypatch.setattr(complete, "_gather_dense_rows", gather_mock)
    actual = engines.TRITON.attention(q, k, v, plan, scale=0.2, return_lse=return_lse)
    expected = reference.attention(q, k, v, list_all_blocks(plan), scale=0.2, return_lse=return_lse)
    for actual_tensor, expected_tensor in zip(
        *((x if return_lse else (x,)) for x in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-5, rtol=1e-4)
    assert all(call.args[3] > 1 for call in gather_mock.call_args_list)
    assert gather_mock.called == (plan.dense_rows is not None)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "block_sizes"), CASES[5:6])
def test_dense_rows_of_flex_equal_reference(shape, block_sizes):
    q, k, v, _, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    with torch.no_grad():
        actual = engines.FLEX.attention(q, k, v, plan, scale=0.2)
    has_keys = (plan.ranges.end >= 0)[:, None, :, None]
    expected = reference.attention(q, k, v, plan, scale=0.2)
    torch.testing.assert_close(actual.where(has_keys, 0), expected, atol=1e-5, rtol=1e-4)


def test_layers_share_the_plan_of_dense_rows(monkeypatch):
    q, k, v = draw_qkv(q_length=60, **FOUR_HEADS_SHAPE)
    key_ranges = KeyRanges.causal(1, 60, 60, "cpu")
    causal_mock = Mock(wraps=BlockPlan.causal)
    monkeypatch.setattr(BlockPlan, "causal", causal_mock)
    is_selected = torch.zeros(1, 4, 2, 4, dtype=torch.bool)
    for _ in range(3):
        dense_rows = key_ranges.tail_rows(32, 32)
        plan = BlockPlan.from_dense(
            is_selected, key_ranges, query_block=32, key_block=16, dense_rows=dense_rows
        )
        engines.TRITON.attention(q, k, v, plan, scale=0.2)
    assert causal_mock.call_count == 1


def test_plan_without_dense_rows_is_passed_unchanged():
    q, k, v = draw_qkv(q_length=70)
    plan = make_random_plan(q, k, (32, 16))
    arguments_of_calls = []
    complete.attention(
        lambda *args, **options: arguments_of_calls.append(args) or args[0],
        q=q,
        k=k,
        v=v,
        plan=plan,
        scale=0.2,
    )
    assert (
        len(arguments_of_calls) == 1
        and arguments_of_calls[0][0] is q
        and arguments_of_calls[0][3] is plan
    )


def test_tail_rows_equal_hand_computed_rows():
    assert KeyRanges.causal(2, 100, 130, "cpu").tail_rows(32, 32).tolist() == [[2, 3]] * 2
    assert KeyRanges.causal(1, 96, 96, "cpu").tail_rows(32, 32).tolist() == [[2, -1]]
    assert KeyRanges.causal(1, 31, 96, "cpu").tail_rows(32, 32) is None
    assert KeyRanges.causal(1, 96, 96, "cpu").tail_rows(0, 32) is None
    padded_ranges = make_block_layout(
        "padded", batch=2, length=100, kv_length=100, align=32, device="cpu"
    ).ranges
    assert padded_ranges.tail_rows(32, 32).tolist() == [[1, 2], [2, 3]]
    packed_ranges = make_block_layout(
        "packed", batch=1, length=100, kv_length=100, align=32, device="cpu"
    ).ranges
    # documents of 33 and 67 tokens: each has its own tail rows
    assert packed_ranges.tail_rows(32, 32).tolist() == [[0, 1, 3, 4]]
    assert replace(packed_ranges, documents=None).tail_rows(32, 32) is None
