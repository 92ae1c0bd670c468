"""NaN and infinity in a key change all queries that may attend to it, but no earlier block."""

from dataclasses import replace

import pytest
import torch
from marks import mark_slow_except
from selecting import draw_peaked_qk, plan_by_kernels, plan_by_reference
from tiny import SMALL_BLOCKS_CONFIG, VOCAB_SIZE, draw_qkv, draw_token_ids, make_tiny_model
from torch.nn import functional as F

from cab_hf import CabConfig, apply_cab
from cab_hf.ops import reference
from cab_hf.ops.attention import block, gather
from cab_hf.plan import BlockPlan, KeyRanges
from cab_hf.selection.reference import sample_typical_queries

BLOCK_FIELDS = {"query_block": 32, "key_block": 16, "dense_tail_blocks": 0, "local_blocks": 1}
SMALL_BLOCK_FIELDS = {"query_block": 16, "key_block": 16}
SEQUENCE_LENGTH = 232
FIRST_BAD_TOKEN = 170
NON_FINITE_VALUES = [torch.nan, torch.inf, -torch.inf]


def make_config(**config_fields):
    """Return a CabConfig with small blocks and high thresholds, except for ``config_fields``."""
    return CabConfig(
        **{**BLOCK_FIELDS, "mass_threshold": 0.05, "share_threshold": 0.3, **config_fields}
    )


CONFIG_CASES = [
    pytest.param(make_config(outlier_queries=8), id="rows"),
    pytest.param(make_config(outlier_queries=0), id="typical"),
    pytest.param(CabConfig.published(0.7, **SMALL_BLOCK_FIELDS), id="published"),
    pytest.param(
        CabConfig.published(0.7, "additive", **SMALL_BLOCK_FIELDS), id="published-additive"
    ),
    pytest.param(CabConfig.published(0.7, "none", **SMALL_BLOCK_FIELDS), id="published-magnitude"),
    pytest.param(make_config(predictor="cascade", anchors=(0,), outlier_queries=8), id="cascade"),
]
# configs for tests of kernels: few, because the interpreter is slow
KERNEL_CONFIG_CASES = [case for case in CONFIG_CASES if case.id in ("rows", "typical", "published")]


CAPPED_CONFIG_CASES = [
    pytest.param(make_config(max_density=0.2), id="capped"),
    pytest.param(make_config(max_density=0.01, sink_blocks=1), id="capped-to-forced-blocks"),
    pytest.param(CabConfig.published(0.99, **SMALL_BLOCK_FIELDS), id="published-forced-blocks"),
]


def replace_tokens(x, token_index, non_finite_value):
    """Return a copy of ``x`` [B, H, N, D] with all channels of tokens ``token_index`` replaced."""
    x = x.clone()
    x[:, :, token_index] = non_finite_value
    return x


@pytest.mark.parametrize("non_finite_value", NON_FINITE_VALUES, ids=str)
@pytest.mark.parametrize(
    "num_cached_keys", [pytest.param(0, id="prompt"), pytest.param(16, id="chunk")]
)
@pytest.mark.parametrize("config", CONFIG_CASES)
def test_nan_key_does_not_change_selection_of_earlier_blocks(
    config, num_cached_keys, non_finite_value
):
    _assert_same_earlier_selection(plan_by_reference, config, num_cached_keys, non_finite_value)


@pytest.mark.parametrize("config", mark_slow_except(KERNEL_CONFIG_CASES, 0))
def test_nan_key_does_not_change_kernel_selection_of_earlier_blocks(config):
    _assert_same_earlier_selection(plan_by_kernels, config, 16, torch.nan)


def _assert_same_earlier_selection(compute_plan, config, num_cached_keys, non_finite_value):
    """Assert that non-finite later q and k do not change the blocks of earlier query blocks.

    All tokens from `FIRST_BAD_TOKEN` on are replaced.
    ``num_cached_keys`` keys precede the first query.
    """
    input_sizes = {
        "q_length": SEQUENCE_LENGTH,
        "kv_length": SEQUENCE_LENGTH + num_cached_keys,
        "heads": 2,
        "kv_heads": 1,
    }
    q, k = draw_peaked_qk(**input_sizes)
    key_ranges = KeyRanges.causal(1, SEQUENCE_LENGTH, SEQUENCE_LENGTH + num_cached_keys, "cpu")
    expected = compute_plan(config, q, k, key_ranges).to_dense()
    broken_q = replace_tokens(q, slice(FIRST_BAD_TOKEN, None), non_finite_value)
    broken_k = replace_tokens(k, FIRST_BAD_TOKEN + num_cached_keys, non_finite_value)
    actual = compute_plan(config, broken_q, broken_k, key_ranges).to_dense()
    bad_query_block = FIRST_BAD_TOKEN // config.query_block
    assert bad_query_block > 3 and not expected[:, :, bad_query_block - 1].all()
    assert torch.equal(actual[:, :, :bad_query_block], expected[:, :, :bad_query_block])


@pytest.mark.parametrize("non_finite_value", NON_FINITE_VALUES, ids=str)
@pytest.mark.parametrize("config", [*CONFIG_CASES, *CAPPED_CONFIG_CASES])
def test_blocks_with_nan_key_are_selected(config, non_finite_value):
    _assert_block_selected(plan_by_reference, config, non_finite_value)


@pytest.mark.parametrize(
    "config", mark_slow_except([*KERNEL_CONFIG_CASES, *CAPPED_CONFIG_CASES], 0, 3)
)
def test_kernels_select_blocks_with_nan_key(config):
    _assert_block_selected(plan_by_kernels, config, torch.inf)


def _assert_block_selected(compute_plan, config, non_finite_value):
    """Assert that all later queries select the block of a key with one non-finite channel.

    The key is in KV head 1; the blocks of the other KV head must not change.
    """
    q, k = draw_peaked_qk(q_length=SEQUENCE_LENGTH, heads=4, kv_heads=2, dim=32)
    key_ranges, bad_token = KeyRanges.causal(1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, "cpu"), 70
    expected = compute_plan(config, q, k, key_ranges).to_dense()
    k[:, 1, bad_token, 5] = non_finite_value
    actual = compute_plan(config, q, k, key_ranges).to_dense()
    later_query_blocks, bad_key_block = (
        slice(bad_token // config.query_block, None),
        bad_token // config.key_block,
    )
    assert (
        actual[:, 2:, later_query_blocks, bad_key_block].all()
        and not expected[:, 2:, later_query_blocks, bad_key_block].all()
    )
    assert torch.equal(actual[:, :2], expected[:, :2])


@pytest.mark.parametrize("config", [CONFIG_CASES[0], CONFIG_CASES[1], *CAPPED_CONFIG_CASES[:1]])
def test_nan_in_padding_does_not_change_selection(config):
    q, k = draw_peaked_qk(q_length=SEQUENCE_LENGTH, heads=2, kv_heads=1, dim=32)
    key_ranges = KeyRanges.causal(1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, "cpu")
    padding_mask = torch.ones(1, SEQUENCE_LENGTH, dtype=torch.bool)
    padding_mask[:, 64:80] = False
    key_ranges = replace(key_ranges, start=key_ranges.start.clamp(min=80), key_valid=padding_mask)
    key_ranges = replace(
        key_ranges, end=key_ranges.end.masked_fill(torch.arange(SEQUENCE_LENGTH) < 80, -1)
    )
    for compute_plan in (plan_by_reference, plan_by_kernels):
        expected = compute_plan(config, q, k, key_ranges).to_dense()
        actual = compute_plan(
            config, q, replace_tokens(k, slice(64, 80), torch.nan), key_ranges
        ).to_dense()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("non_finite_value", NON_FINITE_VALUES, ids=str)
@pytest.mark.parametrize("compute_plan", [plan_by_reference, plan_by_kernels])
def test_nan_scored_query_selects_all_blocks(compute_plan, non_finite_value):
    q, k = draw_peaked_qk(q_length=SEQUENCE_LENGTH, heads=2, kv_heads=1, dim=32)
    key_ranges = KeyRanges.causal(1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, "cpu")
    config = make_config(outlier_queries=0, typical_queries=8, typical_key_stride=1)
    expected = compute_plan(config, q, k, key_ranges).to_dense()
    scored_query = int(sample_typical_queries(key_ranges, 32, config.typical_queries)[0, 5, 1])
    q[:, 1, scored_query, 3] = non_finite_value
    actual = compute_plan(config, q, k, key_ranges).to_dense()
    assert (
        actual[0, 1, 5, : (scored_query + 16) // 16].all()
        and not expected[0, 1, 5, : scored_query // 16].all()
    )
    expected[:, 1, 5] = actual[:, 1, 5]
    assert torch.equal(actual, expected)


ENGINE_CASES = [
    pytest.param(reference.attention, id="reference"),
    pytest.param(block.attention, id="kernels"),
    pytest.param(gather.attention, id="gather"),
]
SHAPE_CASES = [
    pytest.param(16, 96, 96, (32, 16), id="text"),
    pytest.param(16, 96, 96, (16, 32), id="wide-keys"),
    pytest.param(16, 96, 120, (32, 16), id="chunk"),
    pytest.param(264, 96, 120, (32, 16), id="split-chunk"),
]


@pytest.mark.parametrize("non_finite_value", NON_FINITE_VALUES, ids=str)
@pytest.mark.parametrize(("dim", "q_length", "kv_length", "block_sizes"), SHAPE_CASES)
@pytest.mark.parametrize("attend", ENGINE_CASES)
def test_nan_key_does_not_change_earlier_query_blocks(
    attend, dim, q_length, kv_length, block_sizes, non_finite_value
):
    """Replace a key and value that query blocks 0 and 1 do not see by NaN or infinity."""
    q, k, v = draw_qkv(q_length=q_length, kv_length=kv_length, heads=2, kv_heads=1, dim=dim)
    query_block, key_block = block_sizes
    key_ranges = KeyRanges.causal(1, q_length, kv_length, "cpu")
    plan = BlockPlan.causal(key_ranges, 2, query_block, key_block)
    bad_key = int(key_ranges.end[0, 2 * query_block - 1]) + 1
    expected = attend(q, k, v, plan, scale=0.2)
    broken_k, broken_v = (
        replace_tokens(k, bad_key, non_finite_value),
        replace_tokens(v, bad_key, non_finite_value),
    )
    actual = attend(q, broken_k, broken_v, plan, scale=0.2)
    num_unchanged_queries = 2 * query_block
    torch.testing.assert_close(
        actual[:, :, :num_unchanged_queries], expected[:, :, :num_unchanged_queries]
    )
    assert not actual[:, :, num_unchanged_queries:].isfinite().all()


@pytest.mark.parametrize("outlier_queries", [0, 8])
# the engine gather computes attention to NaN by other operations, which round differently
@pytest.mark.parametrize(("engine", "tolerance"), [("reference", 0.0), ("gather", 1e-5)])
def test_nan_token_leaves_earlier_logits_finite(outlier_queries, engine, tolerance):
    model = make_tiny_model()
    ids = draw_token_ids(1, 160)
    config = replace(SMALL_BLOCKS_CONFIG, mass_threshold=0.08, outlier_queries=outlier_queries)
    apply_cab(model, config, engine=engine)
    with torch.no_grad():
        model.model.embed_tokens.weight[VOCAB_SIZE - 1] = torch.nan
        ids[ids == VOCAB_SIZE - 1] = 3
        expected = model(ids).logits
        ids[0, 100] = VOCAB_SIZE - 1
        actual = model(ids).logits
    assert actual[0, 100].isnan().all()
    torch.testing.assert_close(actual[:, :96], expected[:, :96], atol=tolerance, rtol=tolerance)


FULL_BUDGET_CONFIG = replace(SMALL_BLOCKS_CONFIG, mass_threshold=0.0, dense_tail_blocks=0)
CONFIG_BY_NAME = {
    "full": FULL_BUDGET_CONFIG,
    "sparse": replace(SMALL_BLOCKS_CONFIG, mass_threshold=0.08, dense_tail_blocks=0),
    "capped": replace(SMALL_BLOCKS_CONFIG, max_density=0.1, dense_tail_blocks=0),
    "cascade": replace(SMALL_BLOCKS_CONFIG, predictor="cascade", anchors=(0,), dense_tail_blocks=0),
    "published": CabConfig.published(0.9, **SMALL_BLOCK_FIELDS, min_length=0),
}


@pytest.mark.parametrize("config", CONFIG_BY_NAME.values(), ids=CONFIG_BY_NAME)
def test_nan_token_reaches_all_later_logits(config):
    model, ids = make_tiny_model(), draw_token_ids(1, 300)
    embeddings = model.get_input_embeddings()(ids).detach()
    embeddings[0, 100] = torch.nan
    with torch.no_grad():
        expected_is_finite = (
            model(inputs_embeds=embeddings, use_cache=False).logits.isfinite().all(-1)
        )
        apply_cab(model, config)
        actual_is_finite = (
            model(inputs_embeds=embeddings, use_cache=False).logits.isfinite().all(-1)
        )
    assert not expected_is_finite[:, 128:].any() and not actual_is_finite[:, 128:].any()
    assert actual_is_finite[:, :96].all()


@pytest.mark.parametrize("changed_input", ["q", "k", "v"])
@pytest.mark.parametrize("non_finite_value", NON_FINITE_VALUES, ids=str)
@pytest.mark.parametrize("attend", [ENGINE_CASES[0], ENGINE_CASES[2]])
def test_full_budget_output_is_finite_where_sdpa_is(attend, non_finite_value, changed_input):
    """Set one channel of a key, value or query to NaN or infinity, and compare with SDPA."""
    inputs = dict(
        zip("qkv", draw_qkv(q_length=SEQUENCE_LENGTH, heads=4, kv_heads=2, dim=32), strict=True)
    )
    inputs[changed_input][:, :, 70, 5] = non_finite_value
    q, k, v = inputs.values()
    key_ranges = KeyRanges.causal(1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, "cpu")
    plan = plan_by_reference(make_config(mass_threshold=0.0), q, k, key_ranges)
    actual_is_finite = attend(q, k, v, plan, scale=0.2).isfinite()
    # call SDPA per query without mask, because masking does not remove NaN
    outputs = [
        F.scaled_dot_product_attention(
            q[:, :, [query]], k[:, :, : query + 1], v[:, :, : query + 1], scale=0.2, enable_gqa=True
        )
        for query in range(SEQUENCE_LENGTH)
    ]
    expected_is_finite = torch.cat(outputs, dim=2).isfinite()
    # leave out query block 64 to 95: its queries before key 70 may be NaN, because the product of a
    # masked weight 0 and NaN is NaN
    compared_queries = (
        [*range(64), *range(96, SEQUENCE_LENGTH)]
        if changed_input != "q"
        else [*range(SEQUENCE_LENGTH)]
    )
    assert torch.equal(
        actual_is_finite[:, :, compared_queries], expected_is_finite[:, :, compared_queries]
    )
    assert not expected_is_finite.all()
