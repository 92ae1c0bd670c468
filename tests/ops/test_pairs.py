"""The kernel that counts attended pairs, in the interpreter, compared with `BlockPlan.pairs`."""

import pytest
import torch
from attention_cases import make_case

from cab_hf.ops.pairs import count_query_key_pairs

CASES = [
    pytest.param({"q_length": 200}, (32, 16), id="plain"),
    pytest.param({"q_length": 70, "kv_length": 261, "heads": 18, "batch": 2}, (16, 32), id="chunk"),
    # 48 is no power of two
    pytest.param({"q_length": 150, "layout": "padded", "batch": 2}, (48, 16), id="padded"),
    pytest.param({"q_length": 200, "layout": "packed"}, (16, 16), id="packed"),
    pytest.param(
        {"q_length": 130, "dense_rows": "tail", "batch": 2},
        (32, 16),
        id="dense-rows",
    ),
    pytest.param({"q_length": 130, "plan_heads": 1}, (32, 16), id="one-head"),
]


def stack_pair_counts(plan):
    return torch.stack(plan.pairs())


@pytest.mark.parametrize(("shape", "block_sizes"), CASES)
def test_counted_pairs_equal_plan_pairs(shape, block_sizes):
    *_, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    expected = stack_pair_counts(plan)
    pair_counts = count_query_key_pairs(plan)
    assert pair_counts.dtype == torch.int64
    assert torch.equal(pair_counts, expected)
    # `count_query_key_pairs` returns a new tensor, and does not change ``pair_counts``
    assert torch.equal(count_query_key_pairs(plan, pair_counts), 2 * expected)
    assert torch.equal(pair_counts, expected)


def test_counted_pairs_include_sampled_blocks():
    *_, plan = make_case("cpu", torch.float32, (32, 16), q_length=300)
    sampled_plan = plan.with_sample(2, torch.tensor(5))
    assert stack_pair_counts(sampled_plan)[0] > stack_pair_counts(plan)[0]
    assert torch.equal(count_query_key_pairs(sampled_plan), stack_pair_counts(sampled_plan))
