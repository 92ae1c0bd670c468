"""The CPU engine "gather": copy the keys of listed blocks, and attend densely to the copy."""

import pytest
import torch
from attention_cases import make_case
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model

import cab_hf
from cab_hf import BlockPlan, CabConfig, engines
from cab_hf.ops import reference
from cab_hf.ops.attention import gather

BLOCK_SIZES = (32, 16)
FOUR_HEADS_SHAPE = {"heads": 4, "kv_heads": 2}
CASES = [
    pytest.param(FOUR_HEADS_SHAPE | {"q_length": 205}, BLOCK_SIZES, id="odd"),
    pytest.param(FOUR_HEADS_SHAPE | {"q_length": 63, "kv_length": 111}, BLOCK_SIZES, id="chunk"),
    pytest.param(FOUR_HEADS_SHAPE | {"q_length": 130}, (16, 64), id="wide-keys"),
    pytest.param({"heads": 3, "kv_heads": 1, "q_length": 130, "batch": 3}, BLOCK_SIZES, id="batch"),
    pytest.param(
        FOUR_HEADS_SHAPE | {"q_length": 130, "plan_heads": 2}, BLOCK_SIZES, id="plan-of-groups"
    ),
    pytest.param(FOUR_HEADS_SHAPE | {"q_length": 130, "plan_heads": 1}, BLOCK_SIZES, id="one-plan"),
    pytest.param(
        FOUR_HEADS_SHAPE | {"q_length": 75, "layout": "padded", "batch": 2},
        BLOCK_SIZES,
        id="padded",
    ),
    pytest.param(
        FOUR_HEADS_SHAPE | {"q_length": 130, "layout": "packed"}, BLOCK_SIZES, id="packed"
    ),
    pytest.param(
        FOUR_HEADS_SHAPE | {"q_length": 130, "dense_rows": "tail"}, BLOCK_SIZES, id="dense-rows"
    ),
]


@pytest.mark.parametrize("max_logits_per_call", [1, 4096, gather.MAX_LOGITS_PER_CALL])
@pytest.mark.parametrize(("shape", "block_sizes"), CASES)
def test_output_and_log_sum_exp_equal_reference(
    monkeypatch, shape, block_sizes, max_logits_per_call
):
    monkeypatch.setattr(gather, "MAX_LOGITS_PER_CALL", max_logits_per_call)
    q, k, v, _, plan = make_case("cpu", torch.float32, block_sizes, **shape)
    expected = reference.attention(q, k, v, plan, scale=0.2, return_lse=True)
    actual = engines.GATHER.attention(q, k, v, plan, scale=0.2, return_lse=True)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-5, rtol=1e-4)
    assert torch.equal(engines.GATHER.attention(q, k, v, plan, scale=0.2), actual[0])


def test_bfloat16_products_accumulate_in_float32():
    q, k, v, _, plan = make_case(
        "cpu", torch.bfloat16, BLOCK_SIZES, **FOUR_HEADS_SHAPE, q_length=205
    )
    exact_out = reference.attention(*(x.double() for x in (q, k, v)), plan=plan, scale=0.2)
    bfloat16_out = gather.attention(q, k, v, plan, scale=0.2)
    assert bfloat16_out.dtype == torch.bfloat16
    max_error = (bfloat16_out.double() - exact_out).abs().max()
    assert (
        max_error
        <= 2 * (reference.attention(q, k, v, plan, scale=0.2).double() - exact_out).abs().max()
    )


def test_empty_rows_have_zero_output():
    q, k, v, _, plan = make_case(
        "cpu", torch.float32, BLOCK_SIZES, **FOUR_HEADS_SHAPE, q_length=130
    )
    is_selected = plan.to_dense()
    is_selected[:, 1, 2] = False
    plan = BlockPlan.from_dense(
        is_selected, plan.ranges, query_block=BLOCK_SIZES[0], key_block=BLOCK_SIZES[1]
    )
    expected = reference.attention(q, k, v, plan, scale=0.2, return_lse=True)
    actual = gather.attention(q, k, v, plan, scale=0.2, return_lse=True)
    assert (actual[0][:, 1, 64:96] == 0).all() and (actual[1][:, 1, 64:96] == -torch.inf).all()
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-5, rtol=1e-4)


def make_workload(**changed_fields):
    """Return a `Workload` of float32 inference on a CPU, except for ``changed_fields``."""
    default_fields = {"device": "cpu", "head_dim": 64, "dtype": torch.float32, "training": False}
    block_fields = {"query_block": CabConfig().query_block, "key_block": CabConfig().key_block}
    return engines.Workload(**{**default_fields, **block_fields, **changed_fields})


@pytest.mark.parametrize(
    ("changed_fields", "expected_engine"),
    [
        pytest.param({}, engines.GATHER, id="default"),
        pytest.param({"training": True}, engines.REFERENCE, id="training"),
        pytest.param({"query_block": 16, "key_block": 16}, engines.GATHER, id="small-blocks"),
    ],
)
def test_auto_selects_gather_on_cpu_for_inference(changed_fields, expected_engine):
    assert engines.choose("auto", make_workload(**changed_fields)) is expected_engine


@pytest.mark.parametrize(
    ("changed_fields", "reason"),
    [({"device": "cuda"}, "runs on a CPU, not on cuda"), ({"training": True}, "has no backward")],
)
def test_unavailable_gather_raises_with_reason(changed_fields, reason):
    with pytest.raises(ValueError, match=f"engine is 'gather', which {reason}"):
        engines.choose("gather", make_workload(**changed_fields))


def test_model_logits_equal_reference_engine():
    model, ids = make_tiny_model(), draw_token_ids(1, 300)
    logits_by_engine = {}
    for engine_name in ("reference", "gather"):
        cab_hf.apply_cab(model, SPARSE_CONFIG, engine=engine_name)
        assert f"engine {engine_name}" in cab_hf.describe(model)
        with torch.no_grad():
            logits_by_engine[engine_name] = model(ids).logits
    torch.testing.assert_close(
        logits_by_engine["gather"], logits_by_engine["reference"], atol=1e-4, rtol=1e-4
    )
