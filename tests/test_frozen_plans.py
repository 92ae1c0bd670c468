"""Plans equal stored plans, and logits are close to stored logits.

Inputs are multiples of 1/8, so that dot products are exact on every CPU. After an intended change
of results, rewrite the stored values:

    PYTHONPATH=tests/shared python tests/test_frozen_plans.py
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from marks import mark_slow_except
from selecting import arrange_in_layout, plan_by_kernels, plan_by_reference
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model

import cab_hf
from cab_hf import CabConfig

STORED_RESULTS_FILE = Path(__file__).parent / "shared" / "frozen_plans.json"
ROWS_CONFIG = CabConfig(
    32, 16, outlier_queries=4, typical_queries=4,
    typical_key_stride=1, mass_threshold=0.08, share_threshold=0.3,
)  # fmt: skip
FRC_CONFIG = CabConfig(32, 16, predictor="frc", sparsity=0.6)
HALF_CHANNELS = tuple(range(16, 32))
# by name: (config, sizes of q and k, layout, further arguments of `plan_by_reference`)
PLAN_CASES = {
    "causal": (ROWS_CONFIG, {}, "causal", {"channels": HALF_CHANNELS}),
    "padded": (ROWS_CONFIG, {"batch": 2}, "padded", {"channels": HALF_CHANNELS}),
    "packed": (ROWS_CONFIG, {}, "packed", {"channels": HALF_CHANNELS}),
    "chunk": (ROWS_CONFIG, {"length": 100, "kv_length": 300}, "chunk", {"channels": HALF_CHANNELS}),
    "in-place": (ROWS_CONFIG, {"batch": 2, "length": 140}, "in-place", {"channels": HALF_CHANNELS}),
    "7-tokens": (replace(ROWS_CONFIG, dense_tail_blocks=0), {"length": 7}, "causal", {}),
    "odd-length": (ROWS_CONFIG, {"length": 333}, "causal", {}),
    "one-kv-head": (ROWS_CONFIG, {"kv_heads": 1}, "causal", {"channels": HALF_CHANNELS}),
    "every-4th-key": (
        replace(ROWS_CONFIG, typical_key_stride=4),
        {},
        "packed",
        {"channels": HALF_CHANNELS},
    ),
    "typical-alone": (replace(ROWS_CONFIG, outlier_queries=0), {}, "causal", {}),
    "wide-keys": (replace(ROWS_CONFIG, key_block=64), {}, "causal", {"channels": HALF_CHANNELS}),
    "capped": (
        replace(ROWS_CONFIG, max_density=0.4),
        {"batch": 2},
        "padded",
        {"channels": HALF_CHANNELS},
    ),
    "capped-listed": (replace(ROWS_CONFIG, max_density=0.3), {"batch": 2}, "in-place", {}),
    "two-tails": (replace(ROWS_CONFIG, dense_tail_blocks=2), {"batch": 2}, "padded", {}),
    "sinks": (ROWS_CONFIG, {}, "causal", {"sinks": torch.tensor([-3.0, 4.0, 12.0, 90.0])}),
    "softcap": (ROWS_CONFIG, {}, "causal", {"softcap": 4.0}),
    "cascade": (replace(ROWS_CONFIG, predictor="cascade", anchors=(0,)), {}, "causal", {}),
    "frc": (FRC_CONFIG, {}, "causal", {}),
    "frc-padded": (FRC_CONFIG, {"batch": 2}, "padded", {}),
    "frc-additive": (replace(FRC_CONFIG, curvature="additive"), {}, "packed", {}),
}
# plans that are also computed by kernels: few, because the interpreter takes seconds per plan
KERNEL_CASE_NAMES = mark_slow_except(
    ["chunk", "capped-listed", "every-4th-key", "padded", "capped", "frc-padded"], 0
)
LAYOUTS = ["causal", "padded"]


def draw_qk(batch=1, length=300, kv_length=None, heads=4, kv_heads=2, dim=32):
    """Return random q and k, multiples of 1/8, [B, H, N, D]."""
    generator = torch.Generator().manual_seed(0)
    qk_shapes = (batch, heads, length, dim), (batch, kv_heads, kv_length or length, dim)
    return [(16 * torch.randn(shape, generator=generator)).round() / 8 for shape in qk_shapes]


def make_plan_inputs(case_name):
    """Return (config, q, k, `KeyRanges`, further arguments of `plan_by_reference`) for a plan."""
    config, qk_sizes, layout, plan_options = PLAN_CASES[case_name]
    q, k = draw_qk(**qk_sizes)
    q, k, key_ranges = arrange_in_layout(layout, q, k, config.query_block)
    return config, q, k, key_ranges, plan_options


def hash_plan(plan):
    """Return a hash of the block lists of a plan; unused list entries do not change the hash."""
    hashed_tensors = [plan.full.counts, plan.partial.counts]
    hashed_tensors += [
        hashed_tensor.indices.masked_fill(~hashed_tensor.listed(), -1)
        for hashed_tensor in (plan.full, plan.partial)
    ]
    # cut index lists to the longest list, because their width is only an upper bound
    hashed_tensors = [
        hashed_tensor[..., : int(hashed_tensor.ge(0).sum(-1).max())]
        if hashed_tensor.ndim > 3
        else hashed_tensor
        for hashed_tensor in hashed_tensors
    ]
    dense_rows = plan.dense_rows if plan.dense_rows is not None else torch.empty(0)
    hashed_text = json.dumps(
        [hashed_tensor.tolist() for hashed_tensor in (*hashed_tensors, dense_rows)]
    )
    return hashlib.sha256(hashed_text.encode()).hexdigest()[:16]


def compute_logits(layout):
    """Return some logits of a tiny model, whose weights are drawn here in a fixed order.

    The weights therefore do not depend on the versions of libraries.
    """
    model, ids = make_tiny_model(), draw_token_ids(2, 300)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
        mask = torch.ones_like(ids)
        if layout == "padded":
            mask[0, :60] = 0
        with cab_hf.cab(model, SPARSE_CONFIG):
            logits = model(ids, attention_mask=mask).logits
    return logits[:, 99::100, :3].flatten()


@pytest.fixture(scope="module")
def stored_results():
    """Return the content of `STORED_RESULTS_FILE`: stored hashes of plans, and stored logits."""
    return json.loads(STORED_RESULTS_FILE.read_text())


@pytest.mark.parametrize("case_name", PLAN_CASES)
def test_reference_plan_equals_stored_hash(case_name, stored_results):
    config, q, k, key_ranges, plan_options = make_plan_inputs(case_name)
    assert (
        hash_plan(plan_by_reference(config, q, k, key_ranges, **plan_options))
        == stored_results["plans"][case_name]
    )


@pytest.mark.parametrize("case_name", KERNEL_CASE_NAMES)
def test_kernel_plan_equals_stored_hash(case_name, stored_results):
    config, q, k, key_ranges, plan_options = make_plan_inputs(case_name)
    assert (
        hash_plan(plan_by_kernels(config, q, k, key_ranges, **plan_options))
        == stored_results["plans"][case_name]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_close_to_stored_values(layout, stored_results):
    expected = torch.tensor(stored_results["logits"][layout])
    torch.testing.assert_close(compute_logits(layout), expected, atol=1e-3, rtol=1e-3)


def write_stored_results():
    """Compute all plans and logits on this machine, and write `STORED_RESULTS_FILE`.

    Raises:
        ValueError: a plan changes if queries are scaled by 1 - 1e-6 or 1 + 1e-6.
    """
    hash_by_case = {}
    for case_name in PLAN_CASES:
        config, q, k, key_ranges, plan_options = make_plan_inputs(case_name)
        plans_of_scaled_queries = [
            plan_by_reference(config, q * query_scale, k, key_ranges, **plan_options)
            for query_scale in (1, 1 - 1e-6, 1 + 1e-6)
        ]
        hash_by_case[case_name], *scaled_hashes = map(hash_plan, plans_of_scaled_queries)
        if any(scaled_hash != hash_by_case[case_name] for scaled_hash in scaled_hashes):
            raise ValueError(f"{case_name} must not depend on rounding. Change its inputs.")
    logits_by_layout = {
        layout: [round(logit, 4) for logit in compute_logits(layout).tolist()] for layout in LAYOUTS
    }
    STORED_RESULTS_FILE.write_text(
        json.dumps({"plans": hash_by_case, "logits": logits_by_layout}, indent=1) + "\n"
    )


if __name__ == "__main__":
    write_stored_results()
