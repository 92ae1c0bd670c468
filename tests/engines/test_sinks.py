"""Attention sinks: one learnt logit per head in the softmax, whose value vector is zero."""

from functools import partial

import pytest
import torch
from attention_cases import make_case
from budget import assert_within_budget
from marks import mark_slow_except

from cab_hf import engines
from cab_hf.call.layout import BlockLayout
from cab_hf.ops import reference
from cab_hf.ops.attention import complete, traced

SINK_LOGITS = (-2.0, 0.0, 3.0, 40.0)
HEAD_COUNTS = {"heads": 4, "kv_heads": 2}
CASES = [
    pytest.param({"q_length": 105, "dense_rows": "tail"}, id="dense-rows"),
    pytest.param({"q_length": 75, "layout": "padded", "batch": 2}, id="padded"),
    pytest.param({"q_length": 130, "sample_period": 3, "selection_probability": 0.2}, id="sampled"),
    pytest.param({"q_length": 50, "dim": 264}, id="split"),
]
ATTENTION_BY_ENGINE = {
    "reference": engines.REFERENCE.attention,
    "traced": traced.attention,
    "triton": engines.TRITON.attention,
}


def attend_with_sink_column(q, k, v, sinks, *, plan, scale):
    """Compute attention under a plan with an additional logit column, the sink of each head."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    logits = q @ k.mT * scale
    is_attended = plan.token_mask().expand(logits.shape)
    if plan.sampled is not None:
        is_sampled = plan.of_sampled().token_mask().expand(logits.shape)
        logits = logits + is_sampled * torch.log(torch.tensor(plan.sample_period))
        is_attended = is_attended | is_sampled
    logits = logits.masked_fill(~is_attended, -torch.inf)
    sink_column = sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, sink_column], dim=-1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("shape", mark_slow_except(CASES, 0, 1))
@pytest.mark.parametrize("engine_name", ATTENTION_BY_ENGINE)
def test_output_and_gradients_equal_softmax_with_sink_column(engine_name, shape):
    q, k, v, grad, plan = make_case("cpu", torch.float32, (32, 16), **HEAD_COUNTS, **shape)
    layout = BlockLayout(plan.ranges, k.shape[2])
    sinks = torch.tensor(SINK_LOGITS)

    class EngineStub:
        attention = staticmethod(ATTENTION_BY_ENGINE[engine_name])

    def compute_with_gradients(attention_function, tensors):
        """Return the output and the gradients of q, k, v and sinks."""
        q, k, v, sinks = leaves = [x.detach().requires_grad_() for x in tensors]
        has_keys = (plan.ranges.end >= 0)[:, None, :, None]
        out = attention_function(q, k, v, sinks) * has_keys
        return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))

    def attend_by_engine(q, k, v, sinks):
        return layout.attend(EngineStub, q, k, v, plan, scale=0.1, sinks=sinks)

    def compute_expected_tensor(tensor_index, *tensors):
        attend_by_formula = partial(attend_with_sink_column, plan=plan, scale=0.1)
        return compute_with_gradients(attend_by_formula, tensors)[tensor_index]

    for tensor_index, actual_tensor in enumerate(
        compute_with_gradients(attend_by_engine, (q, k, v, sinks))
    ):
        assert_within_budget(
            actual_tensor, partial(compute_expected_tensor, tensor_index), q, k, v, sinks
        )


@pytest.mark.parametrize("memory_layout", ["heads first", "tokens first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_kernel_applies_sinks(dtype, memory_layout, monkeypatch):
    monkeypatch.setattr(complete, "MERGE_DEVICE_TYPES", ("cpu",))
    shape = (2, 4, 150, 80) if memory_layout == "heads first" else (2, 150, 4, 80)
    out = torch.randn(shape).to(dtype)
    out = out if memory_layout == "heads first" else out.transpose(1, 2)
    lse = 4 * torch.randn(2, 4, 150)
    # query 7 of head 1 in row 0 has no keys
    lse[0, 1, 7], out[0, 1, 7] = -torch.inf, 0.0
    sinks = torch.tensor(SINK_LOGITS, dtype=dtype)
    expected_out = reference.rescale_for_sinks(out.double(), lse.double(), sinks)
    actual_out = complete.rescale_for_sinks(
        out.clone(memory_format=torch.preserve_format), lse, sinks
    )
    assert actual_out.stride() == out.stride()
    torch.testing.assert_close(
        actual_out.double(), expected_out, atol=1e-6, rtol=2 * torch.finfo(dtype).eps
    )


def test_training_does_not_change_output_in_place(monkeypatch):
    monkeypatch.setattr(complete, "MERGE_DEVICE_TYPES", ("cpu",))
    out, lse = torch.randn(1, 4, 30, 16), torch.randn(1, 4, 30)
    sinks = torch.tensor(SINK_LOGITS, requires_grad=True)
    expected_out = out.clone()
    complete.rescale_for_sinks(out, lse, sinks).sum().backward()
    assert torch.equal(out, expected_out) and sinks.grad.abs().sum() > 0
