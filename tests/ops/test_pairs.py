"""The kernel that counts attended pairs, in the interpreter, compared with `BlockPlan.pairs`."""

import pytest
import torch
from attention_cases import make_case

from cab_hf.ops.pairs import add_pairs

SHAPES = [
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


def pairs(plan):
    return torch.stack(plan.pairs())


@pytest.mark.parametrize(("shape", "blocks"), SHAPES)
def test_counted_pairs_equal_plan_pairs(shape, blocks):
    *_, plan = make_case("cpu", torch.float32, blocks, **shape)
    expected = pairs(plan)
    counts = add_pairs(plan)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, expected)
    # `add_pairs` returns a new tensor, and does not change ``counts``
    assert torch.equal(add_pairs(plan, counts), 2 * expected)
    assert torch.equal(counts, expected)


def test_counted_pairs_include_sampled_blocks():
    *_, plan = make_case("cpu", torch.float32, (32, 16), q_length=300)
    sampled = plan.with_sample(2, torch.tensor(5))
    assert pairs(sampled)[0] > pairs(plan)[0]
    assert torch.equal(add_pairs(sampled), pairs(sampled))
