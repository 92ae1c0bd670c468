"""NaN and infinity in a key change all queries that may attend to it, but no earlier block."""

from dataclasses import replace

import pytest
import torch
from marks import mark_slow_except
from selecting import plan_by_kernels, plan_by_reference, random_peaked_qk
from tiny import SMALL, VOCABULARY, qkv, tiny_model, tokens
from torch.nn import functional as F

from cab_hf import CabConfig, apply_cab
from cab_hf.ops import reference
from cab_hf.ops.attention import block, gather
from cab_hf.plan import BlockPlan, KeyRanges
from cab_hf.selection.reference import sample_typical_queries

BLOCK_FIELDS = {"query_block": 32, "key_block": 16, "dense_tail_blocks": 0, "local_blocks": 1}
SMALL_BLOCKS = {"query_block": 16, "key_block": 16}
LENGTH = 232
BAD_TOKEN = 170
NON_FINITE_VALUES = [torch.nan, torch.inf, -torch.inf]


def make_config(**fields):
    """Return a CabConfig with small blocks and high thresholds, except for ``fields``."""
    return CabConfig(**{**BLOCK_FIELDS, "mass_threshold": 0.05, "share_threshold": 0.3, **fields})


CONFIGS = [
    pytest.param(make_config(outlier_queries=8), id="rows"),
    pytest.param(make_config(outlier_queries=0), id="typical"),
    pytest.param(CabConfig.published(0.7, **SMALL_BLOCKS), id="published"),
    pytest.param(CabConfig.published(0.7, "additive", **SMALL_BLOCKS), id="published-additive"),
    pytest.param(CabConfig.published(0.7, "none", **SMALL_BLOCKS), id="published-magnitude"),
    pytest.param(make_config(predictor="cascade", anchors=(0,), outlier_queries=8), id="cascade"),
]
# configs for tests of kernels: few, because the interpreter is slow
KERNEL_CONFIGS = [case for case in CONFIGS if case.id in ("rows", "typical", "published")]


CAPPED_CONFIGS = [
    pytest.param(make_config(max_density=0.2), id="capped"),
    pytest.param(make_config(max_density=0.01, sink_blocks=1), id="capped-to-forced-blocks"),
    pytest.param(CabConfig.published(0.99, **SMALL_BLOCKS), id="published-forced-blocks"),
]


def replace_tokens(x, index, value):
    """Return a copy of ``x`` [B, H, N, D] with ``value`` in all channels of tokens ``index``."""
    x = x.clone()
    x[:, :, index] = value
    return x


@pytest.mark.parametrize("value", NON_FINITE_VALUES, ids=str)
@pytest.mark.parametrize("num_cached", [pytest.param(0, id="text"), pytest.param(16, id="chunk")])
@pytest.mark.parametrize("config", CONFIGS)
def test_nan_key_does_not_change_selection_of_earlier_blocks(config, num_cached, value):
    _assert_same_earlier_selection(plan_by_reference, config, num_cached, value)


@pytest.mark.parametrize("config", mark_slow_except(KERNEL_CONFIGS, 0))
def test_nan_key_does_not_change_kernel_selection_of_earlier_blocks(config):
    _assert_same_earlier_selection(plan_by_kernels, config, 16, torch.nan)


def _assert_same_earlier_selection(compute_plan, config, num_cached, value):
    """Assert that earlier query blocks select the same blocks if later q and k are ``value``.

    All tokens from `BAD_TOKEN` on are replaced. ``num_cached`` is the number of cached keys.
    """
    shape = {"q_length": LENGTH, "kv_length": LENGTH + num_cached, "heads": 2, "kv_heads": 1}
    q, k = random_peaked_qk(**shape)
    ranges = KeyRanges.causal(1, LENGTH, LENGTH + num_cached, "cpu")
    expected = compute_plan(config, q, k, ranges).to_dense()
    broken_q = replace_tokens(q, slice(BAD_TOKEN, None), value)
    broken_k = replace_tokens(k, BAD_TOKEN + num_cached, value)
    actual = compute_plan(config, broken_q, broken_k, ranges).to_dense()
    bad_query_block = BAD_TOKEN // config.query_block
    assert bad_query_block > 3 and not expected[:, :, bad_query_block - 1].all()
    assert torch.equal(actual[:, :, :bad_query_block], expected[:, :, :bad_query_block])


@pytest.mark.parametrize("value", NON_FINITE_VALUES, ids=str)
@pytest.mark.parametrize("config", [*CONFIGS, *CAPPED_CONFIGS])
def test_blocks_with_nan_key_are_selected(config, value):
    _assert_block_selected(plan_by_reference, config, value)


@pytest.mark.parametrize("config", mark_slow_except([*KERNEL_CONFIGS, *CAPPED_CONFIGS], 0, 3))
def test_kernels_select_blocks_with_nan_key(config):
    _assert_block_selected(plan_by_kernels, config, torch.inf)


def _assert_block_selected(compute_plan, config, value):
    """Assert that all later queries select the block of a key with ``value`` in one channel.

    The key is in KV head 1; the blocks of the other KV head must not change.
    """
    q, k = random_peaked_qk(q_length=LENGTH, heads=4, kv_heads=2, dim=32)
    ranges, index = KeyRanges.causal(1, LENGTH, LENGTH, "cpu"), 70
    expected = compute_plan(config, q, k, ranges).to_dense()
    k[:, 1, index, 5] = value
    actual = compute_plan(config, q, k, ranges).to_dense()
    later_query_blocks, bad_key_block = (
        slice(index // config.query_block, None),
        index // config.key_block,
    )
    assert (
        actual[:, 2:, later_query_blocks, bad_key_block].all()
        and not expected[:, 2:, later_query_blocks, bad_key_block].all()
    )
    assert torch.equal(actual[:, :2], expected[:, :2])


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], *CAPPED_CONFIGS[:1]])
def test_nan_in_padding_does_not_change_selection(config):
    q, k = random_peaked_qk(q_length=LENGTH, heads=2, kv_heads=1, dim=32)
    ranges = KeyRanges.causal(1, LENGTH, LENGTH, "cpu")
    padding_mask = torch.ones(1, LENGTH, dtype=torch.bool)
    padding_mask[:, 64:80] = False
    ranges = replace(ranges, start=ranges.start.clamp(min=80), key_valid=padding_mask)
    ranges = replace(ranges, end=ranges.end.masked_fill(torch.arange(LENGTH) < 80, -1))
    for compute_plan in (plan_by_reference, plan_by_kernels):
        expected = compute_plan(config, q, k, ranges).to_dense()
        actual = compute_plan(
            config, q, replace_tokens(k, slice(64, 80), torch.nan), ranges
        ).to_dense()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("value", NON_FINITE_VALUES, ids=str)
@pytest.mark.parametrize("compute_plan", [plan_by_reference, plan_by_kernels])
def test_nan_scored_query_selects_all_blocks(compute_plan, value):
    q, k = random_peaked_qk(q_length=LENGTH, heads=2, kv_heads=1, dim=32)
    ranges = KeyRanges.causal(1, LENGTH, LENGTH, "cpu")
    settings = make_config(outlier_queries=0, typical_queries=8, typical_key_stride=1)
    expected = compute_plan(settings, q, k, ranges).to_dense()
    index = int(sample_typical_queries(ranges, 32, settings.typical_queries)[0, 5, 1])
    q[:, 1, index, 3] = value
    actual = compute_plan(settings, q, k, ranges).to_dense()
    assert (
        actual[0, 1, 5, : (index + 16) // 16].all() and not expected[0, 1, 5, : index // 16].all()
    )
    expected[:, 1, 5] = actual[:, 1, 5]
    assert torch.equal(actual, expected)


ENGINES = [
    pytest.param(reference.attention, id="reference"),
    pytest.param(block.attention, id="kernels"),
    pytest.param(gather.attention, id="gather"),
]
SHAPES = [
    pytest.param(16, 96, 96, (32, 16), id="text"),
    pytest.param(16, 96, 96, (16, 32), id="wide-keys"),
    pytest.param(16, 96, 120, (32, 16), id="chunk"),
    pytest.param(264, 96, 120, (32, 16), id="split-chunk"),
]


@pytest.mark.parametrize("value", NON_FINITE_VALUES, ids=str)
@pytest.mark.parametrize(("dim", "q_length", "kv_length", "blocks"), SHAPES)
@pytest.mark.parametrize("attend", ENGINES)
def test_nan_key_does_not_change_earlier_query_blocks(
    attend, dim, q_length, kv_length, blocks, value
):
    """Replace a key and value that query blocks 0 and 1 do not see by NaN or infinity."""
    q, k, v = qkv(q_length=q_length, kv_length=kv_length, heads=2, kv_heads=1, dim=dim)
    query_block, key_block = blocks
    ranges = KeyRanges.causal(1, q_length, kv_length, "cpu")
    plan = BlockPlan.causal(ranges, 2, query_block, key_block)
    position = int(ranges.end[0, 2 * query_block - 1]) + 1
    expected = attend(q, k, v, plan, scale=0.2)
    broken_k, broken_v = replace_tokens(k, position, value), replace_tokens(v, position, value)
    actual = attend(q, broken_k, broken_v, plan, scale=0.2)
    num_unchanged = 2 * query_block
    torch.testing.assert_close(actual[:, :, :num_unchanged], expected[:, :, :num_unchanged])
    assert not actual[:, :, num_unchanged:].isfinite().all()


@pytest.mark.parametrize("outlier_queries", [0, 8])
def test_nan_token_leaves_earlier_logits_finite(outlier_queries):
    model = tiny_model()
    ids = tokens(1, 160)
    settings = replace(SMALL, mass_threshold=0.08, outlier_queries=outlier_queries)
    apply_cab(model, settings)
    with torch.no_grad():
        model.model.embed_tokens.weight[VOCABULARY - 1] = torch.nan
        ids[ids == VOCABULARY - 1] = 3
        expected = model(ids).logits
        ids[0, 100] = VOCABULARY - 1
        actual = model(ids).logits
    assert actual[0, 100].isnan().all()
    assert torch.equal(actual[:, :96], expected[:, :96])


FULL_CONFIG = replace(SMALL, mass_threshold=0.0, dense_tail_blocks=0)
CAB_CONFIGS = {
    "full": FULL_CONFIG,
    "sparse": replace(SMALL, mass_threshold=0.08, dense_tail_blocks=0),
    "capped": replace(SMALL, max_density=0.1, dense_tail_blocks=0),
    "cascade": replace(SMALL, predictor="cascade", anchors=(0,), dense_tail_blocks=0),
    "published": CabConfig.published(0.9, **SMALL_BLOCKS, min_length=0),
}


@pytest.mark.parametrize("settings", CAB_CONFIGS.values(), ids=CAB_CONFIGS)
def test_nan_token_reaches_all_later_logits(settings):
    model, ids = tiny_model(), tokens(1, 300)
    embeddings = model.get_input_embeddings()(ids).detach()
    embeddings[0, 100] = torch.nan
    with torch.no_grad():
        expected = model(inputs_embeds=embeddings, use_cache=False).logits.isfinite().all(-1)
        apply_cab(model, settings)
        actual = model(inputs_embeds=embeddings, use_cache=False).logits.isfinite().all(-1)
    assert not expected[:, 128:].any() and not actual[:, 128:].any()
    assert actual[:, :96].all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", NON_FINITE_VALUES, ids=str)
@pytest.mark.parametrize("attend", [ENGINES[0], ENGINES[2]])
def test_full_budget_output_is_finite_where_sdpa_is(attend, value, name):
    """Set one channel of a key, value or query to NaN or infinity, and compare with SDPA."""
    inputs = dict(zip("qkv", qkv(q_length=LENGTH, heads=4, kv_heads=2, dim=32), strict=True))
    inputs[name][:, :, 70, 5] = value
    q, k, v = inputs.values()
    ranges = KeyRanges.causal(1, LENGTH, LENGTH, "cpu")
    plan = plan_by_reference(make_config(mass_threshold=0.0), q, k, ranges)
    actual = attend(q, k, v, plan, scale=0.2).isfinite()
    # call SDPA per query without mask, because masking does not remove NaN
    outputs = [
        F.scaled_dot_product_attention(
            q[:, :, [i]], k[:, :, : i + 1], v[:, :, : i + 1], scale=0.2, enable_gqa=True
        )
        for i in range(LENGTH)
    ]
    expected = torch.cat(outputs, dim=2).isfinite()
    # leave out query block 64 to 95: its queries before key 70 may be NaN, because the product of a
    # masked weight 0 and NaN is NaN
    compared_queries = [*range(64), *range(96, LENGTH)] if name != "q" else [*range(LENGTH)]
    assert torch.equal(actual[:, :, compared_queries], expected[:, :, compared_queries])
    assert not expected.all()
