"""The CPU engine "gather": copy the keys of listed blocks, and attend densely to the copy."""

import pytest
import torch
from attention_cases import make_case
from tiny import SPARSE, tiny_model, tokens

import cab_hf
from cab_hf import BlockPlan, CabConfig, engines
from cab_hf.ops import reference
from cab_hf.ops.attention import gather

BLOCKS = (32, 16)
FOUR_HEADS = {"heads": 4, "kv_heads": 2}
CASES = [
    pytest.param(FOUR_HEADS | {"q_length": 205}, BLOCKS, id="odd"),
    pytest.param(FOUR_HEADS | {"q_length": 63, "kv_length": 111}, BLOCKS, id="chunk"),
    pytest.param(FOUR_HEADS | {"q_length": 130}, (16, 64), id="wide-keys"),
    pytest.param({"heads": 3, "kv_heads": 1, "q_length": 130, "batch": 3}, BLOCKS, id="batch"),
    pytest.param(FOUR_HEADS | {"q_length": 130, "plan_heads": 2}, BLOCKS, id="plan-of-groups"),
    pytest.param(FOUR_HEADS | {"q_length": 130, "plan_heads": 1}, BLOCKS, id="one-plan"),
    pytest.param(
        FOUR_HEADS | {"q_length": 75, "layout": "padded", "batch": 2}, BLOCKS, id="padded"
    ),
    pytest.param(FOUR_HEADS | {"q_length": 130, "layout": "packed"}, BLOCKS, id="packed"),
    pytest.param(FOUR_HEADS | {"q_length": 130, "dense_rows": "tail"}, BLOCKS, id="dense-rows"),
]


@pytest.mark.parametrize("max_logits", [1, 4096, gather.LOGITS_AT_A_TIME])
@pytest.mark.parametrize(("shape", "blocks"), CASES)
def test_output_and_log_sum_exp_equal_reference(monkeypatch, shape, blocks, max_logits):
    monkeypatch.setattr(gather, "LOGITS_AT_A_TIME", max_logits)
    q, k, v, _, plan = make_case("cpu", torch.float32, blocks, **shape)
    expected = reference.attention(q, k, v, plan, scale=0.2, return_lse=True)
    actual = engines.GATHER.attention(q, k, v, plan, scale=0.2, return_lse=True)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-5, rtol=1e-4)
    assert torch.equal(engines.GATHER.attention(q, k, v, plan, scale=0.2), actual[0])


def test_bfloat16_products_accumulate_in_float32():
    q, k, v, _, plan = make_case("cpu", torch.bfloat16, BLOCKS, **FOUR_HEADS, q_length=205)
    exact = reference.attention(*(x.double() for x in (q, k, v)), plan=plan, scale=0.2)
    actual = gather.attention(q, k, v, plan, scale=0.2)
    assert actual.dtype == torch.bfloat16
    error = (actual.double() - exact).abs().max()
    assert error <= 2 * (reference.attention(q, k, v, plan, scale=0.2).double() - exact).abs().max()


def test_empty_rows_have_zero_output():
    q, k, v, _, plan = make_case("cpu", torch.float32, BLOCKS, **FOUR_HEADS, q_length=130)
    is_selected = plan.to_dense()
    is_selected[:, 1, 2] = False
    plan = BlockPlan.from_dense(
        is_selected, plan.ranges, query_block=BLOCKS[0], key_block=BLOCKS[1]
    )
    expected = reference.attention(q, k, v, plan, scale=0.2, return_lse=True)
    actual = gather.attention(q, k, v, plan, scale=0.2, return_lse=True)
    assert (actual[0][:, 1, 64:96] == 0).all() and (actual[1][:, 1, 64:96] == -torch.inf).all()
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-5, rtol=1e-4)


def workload(**changes):
    """Return a `Workload` of float32 inference on a CPU, except for the fields ``changes``."""
    fields = {"device": "cpu", "head_dim": 64, "dtype": torch.float32, "training": False}
    blocks = {"query_block": CabConfig().query_block, "key_block": CabConfig().key_block}
    return engines.Workload(**{**fields, **blocks, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, engines.GATHER, id="default"),
        pytest.param({"training": True}, engines.REFERENCE, id="training"),
        pytest.param({"query_block": 16, "key_block": 16}, engines.GATHER, id="small-blocks"),
    ],
)
def test_auto_selects_gather_on_cpu_for_inference(changes, expected):
    assert engines.choose("auto", workload(**changes)) is expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"device": "cuda"}, "runs on a CPU, not on cuda"), ({"training": True}, "has no backward")],
)
def test_unavailable_gather_raises_with_reason(changes, reason):
    with pytest.raises(ValueError, match=f"engine is 'gather', which {reason}"):
        engines.choose("gather", workload(**changes))


def test_model_logits_equal_reference_engine():
    model, ids = tiny_model(), tokens(1, 300)
    logits = {}
    for engine in ("reference", "gather"):
        cab_hf.apply_cab(model, SPARSE, engine=engine)
        assert f"engine {engine}" in cab_hf.describe(model)
        with torch.no_grad():
            logits[engine] = model(ids).logits
    torch.testing.assert_close(logits["gather"], logits["reference"], atol=1e-4, rtol=1e-4)
