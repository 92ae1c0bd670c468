"""Block selection of the baselines, compared with hand calculations and eager attention."""

import math
from dataclasses import replace

import pytest
import torch
from rivals import (
    LAST_QUERY_PREDICTORS,
    RIVAL_CONFIGS,
    compute_eager_probabilities,
    draw_qk,
    make_config,
    select_blocks,
)
from valid_plan import assert_valid_plan

from cab_hf.call.layout import BlockLayout
from cab_hf.eval import methods
from cab_hf.eval.methods import blocks, caches, last_queries
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, attention_mass, make_predictor

# scale and block sizes of `rivals.SMALL_BLOCKS_CONFIG`
BLOCK_MASS_OPTIONS = {"scale": 0.25, "query_block": 32, "key_block": 16}


@pytest.fixture(autouse=True)
def lower_minimum_of_flexprefill(monkeypatch):
    """Lower `FLEXPREFILL_MIN_TOKENS`, with which short sequences would select all blocks."""
    monkeypatch.setattr(last_queries, "FLEXPREFILL_MIN_TOKENS", 32)


def sum_over_blocks(probabilities, key_block, query_block):
    """Return the sums of probabilities [..., N_q, N_k] over blocks, [..., M_q, M_k]."""
    for block_size in (key_block, query_block):
        sums = [block.sum(-1) for block in probabilities.split(block_size, -1)]
        probabilities = torch.stack(sums, -1).transpose(-1, -2)
    return probabilities


@pytest.mark.parametrize(("length", "query_blocks_per_chunk"), [(96, 1), (205, 2), (205, 100)])
def test_block_mass_equals_summed_eager_attention(length, query_blocks_per_chunk, monkeypatch):
    q, k = draw_qk(length)
    logits_per_query_block = q.shape[1] * 32 * length
    monkeypatch.setattr(
        attention_mass, "MAX_LOGITS_PER_CHUNK", query_blocks_per_chunk * logits_per_query_block
    )
    key_ranges = KeyRanges.causal(1, length, length, "cpu")
    mass = attention_mass.compute_block_mass(q, k, key_ranges, **BLOCK_MASS_OPTIONS)
    probabilities = compute_eager_probabilities(q, k, 0.25)
    torch.testing.assert_close(mass, sum_over_blocks(probabilities, 16, 32))
    torch.testing.assert_close(caches.sum_columns(q, k, key_ranges, 0.25), probabilities.sum(2))
    # only the first 40 queries are real: 32 in the first block and 8 in the second
    key_ranges = replace(key_ranges, end=torch.where(torch.arange(length) < 40, key_ranges.end, -1))
    mass = attention_mass.compute_block_mass(q, k, key_ranges, **BLOCK_MASS_OPTIONS).sum(-1)
    expected = torch.tensor([32.0, 8.0, *[0.0] * (-(-length // 32) - 2)])
    torch.testing.assert_close(mass, expected.expand(1, 6, -1))


def test_antidiagonal_score_by_hand():
    """One head with one channel: the logit of a tile is the mean product on its antidiagonal."""
    stride = blocks.ANTIDIAGONAL_STRIDE
    q, k = draw_qk(2 * stride, heads=1, kv_heads=1, dim=1)
    key_ranges = KeyRanges.causal(1, 2 * stride, 2 * stride, "cpu")
    (_, probabilities), *other_row_chunks = attention_mass.iterate_attention_rows(
        q, k, key_ranges, scale=2.0, stride=stride
    )
    q, k = q.flatten(), k.flatten()
    second_tile_indices = range(stride, 2 * stride)
    first_logit = sum(q[i] * k[2 * stride - 1 - i] for i in second_tile_indices) * 2 / stride
    second_logit = sum(q[i] * k[3 * stride - 1 - i] for i in second_tile_indices) * 2 / stride
    assert not other_row_chunks
    torch.testing.assert_close(probabilities[0, 0, 0], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(
        probabilities[0, 0, 1], torch.stack([first_logit, second_logit]).softmax(0)
    )


@pytest.mark.parametrize("length", [1, 205])
def test_vertical_slash_scores_equal_eager_attention(length):
    q, k = draw_qk(length)
    layer_context = LayerContext(KeyRanges.causal(1, length, length, "cpu"), 0.25)
    block_scores = last_queries.score_vertical_slash(q, k, layer_context, 32, 16, num_queries=20)
    attention_probabilities = compute_eager_probabilities(q, k, 0.25)[:, :, -20:]
    distance = torch.arange(length)[-20:, None] - torch.arange(length)
    column_mass = attention_probabilities.sum(2)
    diagonal_mass = torch.stack(
        [(attention_probabilities * (distance == d)).sum((2, 3)) for d in range(length)], -1
    )
    for row in range(length // 32):  # query blocks without the incomplete last block
        for block in range(2 * row + 2):
            block_keys = slice(16 * block, min(16 * block + 16, length))
            nearest_distance = max(0, 32 * row - block_keys.stop + 1)
            max_diagonal_mass = diagonal_mass[
                ..., nearest_distance : 32 * row + 32 - block_keys.start
            ].amax(-1)
            expected = torch.maximum(column_mass[..., block_keys].amax(-1), max_diagonal_mass)
            torch.testing.assert_close(block_scores[:, :, row, block], expected)


@pytest.mark.parametrize("predictor_name", RIVAL_CONFIGS)
@pytest.mark.parametrize("length", [33, 320])
def test_no_row_selects_a_future_block(predictor_name, length):
    is_selected = select_blocks(RIVAL_CONFIGS[predictor_name], *draw_qk(length))[0]
    row_index, block_index = torch.arange(is_selected.shape[1]), torch.arange(is_selected.shape[2])
    is_future = 16 * block_index > 32 * row_index[:, None] + 31
    assert not is_selected[:, is_future].any()
    # every query block attends to the key blocks with its own positions
    is_diagonal = block_index[:, None] // 2 == row_index
    assert is_selected[:, (is_diagonal.T & ~is_future)].all()


@pytest.mark.parametrize(
    "predictor_name", [name for name in RIVAL_CONFIGS if name not in LAST_QUERY_PREDICTORS]
)
def test_later_tokens_do_not_change_selection(predictor_name):
    q, k = draw_qk(320)
    is_selected_before = select_blocks(RIVAL_CONFIGS[predictor_name], q, k)[:, :, :6]
    assert 0 < is_selected_before.sum() < is_selected_before.numel()
    q, k = q.clone(), k.clone()
    q[:, :, 192:] *= -3
    k[:, :, 192:] += 5
    assert torch.equal(
        select_blocks(RIVAL_CONFIGS[predictor_name], q, k)[:, :, :6], is_selected_before
    )


@pytest.mark.parametrize("predictor_name", [name for name in RIVAL_CONFIGS if name != "random"])
@pytest.mark.parametrize(
    ("document_lengths", "is_real"),
    [([90, 205, 150], None), ([90, 205], [False, True]), ([205, 90], [True, False])],
    ids=["packed", "padded-left", "padded-right"],
)
def test_packed_or_padded_sequence_selects_blocks_of_single_sequence(
    predictor_name, document_lengths, is_real
):
    """Compare the blocks of a sequence of 205 tokens within a longer row, and as a row alone."""
    document_of_token = torch.arange(len(document_lengths)).repeat_interleave(
        torch.tensor(document_lengths)
    )[None]
    padding_mask = None if is_real is None else torch.tensor(is_real)[document_of_token]
    length = document_of_token.shape[1]
    q, k = draw_qk(length)
    layout = BlockLayout.build(
        batch=1,
        q_length=length,
        kv_length=length,
        q_offset=0,
        padding_mask=padding_mask,
        doc_ids=document_of_token if is_real is None else None,
        align=32,
        device=q.device,
    )
    config = RIVAL_CONFIGS[predictor_name]
    predictor = make_predictor(config)
    q_in_layout, k_in_layout = layout.queries(q), layout.keys(k)
    layer_context = LayerContext(layout.ranges, 0.25)
    if is_real is None and predictor_name in LAST_QUERY_PREDICTORS:
        with pytest.raises(NotImplementedError, match=f"packed document, got '{config.predictor}'"):
            predictor(q_in_layout, k_in_layout, layer_context)
        return
    is_selected = predictor(q_in_layout, k_in_layout, layer_context).to_dense()
    is_in_sequence = document_of_token[0] == document_lengths.index(205)
    is_selected_alone = select_blocks(config, q[:, :, is_in_sequence], k[:, :, is_in_sequence])
    # the layout pads the previous document from 90 tokens to 96, a multiple of the block size
    first_row, first_block = (3, 6) if is_real is None else (0, 0)
    assert torch.equal(
        is_selected[:, :, first_row : first_row + 7, first_block : first_block + 13],
        is_selected_alone,
    )


@pytest.mark.parametrize(
    ("predictor_name", "stride", "mass_share"),
    [("xattention", 8, None), ("xattention_16", 16, 0.3)],
)
def test_xattention_selects_fewest_blocks_above_threshold(predictor_name, stride, mass_share):
    q, k = draw_qk(320)
    q, k = 4 * q, 4 * k
    is_selected = select_blocks(
        make_config(predictor_name, mass_share, sink_blocks=1, local_blocks=0), q, k
    )
    key_ranges = KeyRanges.causal(1, 320, 320, "cpu")
    mass = attention_mass.compute_block_mass(q, k, key_ranges, **BLOCK_MASS_OPTIONS, stride=stride)
    mass = mass / mass.sum(-1, keepdim=True)
    for head in range(6):
        for row in range(10):
            forced_blocks = {0, 2 * row, 2 * row + 1}
            other_blocks = sorted(
                set(range(2 * row)) - forced_blocks, key=lambda j: -mass[0, head, row, j]
            )
            expected_blocks, total_mass = (
                set(forced_blocks),
                sum(mass[0, head, row, j].item() for j in forced_blocks),
            )
            for block in other_blocks:
                if total_mass >= (mass_share or 0.8) - 1e-5:
                    break
                expected_blocks.add(block)
                total_mass += mass[0, head, row, block].item()
            assert set(is_selected[0, head, row].nonzero().flatten().tolist()) == expected_blocks


def test_columns_and_diagonals_map_to_blocks_by_hand():
    """Query blocks of 4 tokens span two key blocks: row m has the key blocks 2 m and 2 m + 1."""
    key_ranges = KeyRanges.causal(1, 12, 12, "cpu")
    empty_mask = torch.zeros(1, 1, 6, dtype=torch.bool)
    column_mask, diagonal_mask = empty_mask.clone(), empty_mask.clone()
    column_mask[..., 1] = True
    # keep the keys at a distance of three key blocks before a query
    diagonal_mask[..., 3] = True
    is_visible = torch.ones(6, 6, dtype=torch.bool).tril()[1::2]
    is_selected = (
        last_queries.select_touched_blocks(
            column_mask, empty_mask, key_ranges, query_block=4, key_block=2
        )[0, 0]
        & is_visible
    )
    assert is_selected.nonzero().tolist() == [[0, 1], [1, 1], [2, 1]]
    is_selected = (
        last_queries.select_touched_blocks(
            empty_mask, diagonal_mask, key_ranges, query_block=4, key_block=2
        )[0, 0]
        & is_visible
    )
    assert is_selected.nonzero().tolist() == [[1, 0], [2, 1], [2, 2]]
    # query blocks of 2 tokens are half of a key block of 4 tokens
    key_ranges = KeyRanges.causal(1, 24, 24, "cpu")
    is_selected = last_queries.select_touched_blocks(
        empty_mask, diagonal_mask, key_ranges, query_block=2, key_block=4
    )[0, 0]
    assert is_selected.nonzero().tolist() == [[6, 0], [7, 0], [8, 1], [9, 1], [10, 2], [11, 2]]


def test_root_divergence_by_hand():
    p, q = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.5, 0.5, 0.0])
    # KL(p || m) = log 4/3, KL(q || m) = log(2/3) / 2 + log(2) / 2
    expected = ((math.log(4 / 3) + math.log(2 / 3) / 2 + math.log(2) / 2) / 2) ** 0.5
    assert last_queries.compute_root_divergence(p, q).item() == pytest.approx(expected)
    assert last_queries.compute_root_divergence(p, p) == 0
    disjoint_divergence = last_queries.compute_root_divergence(p, torch.tensor([0.0, 0.0, 1.0]))
    assert disjoint_divergence.item() == pytest.approx(math.log(2) ** 0.5)


@pytest.mark.parametrize("tau", [0.0, 9.0], ids=["vertical-slash", "query-aware"])
def test_flexprefill_selection_equals_eager_attention(tau, monkeypatch):
    """The values of FLEXPREFILL_TAU make all heads vertical-slash, or all heads query-aware."""
    length = 205
    monkeypatch.setattr(last_queries, "FLEXPREFILL_TAU", tau)
    gamma, min_blocks = 0.6, 2
    q, k = draw_qk(length)
    is_selected = select_blocks(
        make_config("flexprefill", gamma, sink_blocks=0, local_blocks=0), 3 * q, k
    )
    num_rows, num_blocks = -(-length // 32), -(-length // 16)

    def select_fewest_keys(shares, target_share):
        """Return the fewest keys of ``shares`` whose values sum to at least ``target_share``."""
        chosen_keys, total_share = set(), 0.0
        for key in sorted(shares, key=lambda key: -shares[key]):
            if total_share >= target_share:
                break
            chosen_keys.add(key)
            total_share += shares[key]
        return chosen_keys

    def select_best_blocks(shares, target_share):
        """Return the blocks with the largest sums, n // 16 + 1 blocks but at least ``min_blocks``.

        n is the smallest number of tokens whose ``shares`` sum to more than ``target_share``.
        """
        num_tokens, total_share = 1, 0.0
        for share in sorted(shares, reverse=True):
            total_share += share
            if total_share > target_share:
                break
            num_tokens += 1
        block_sums = {j: sum(shares[16 * j : 16 * j + 16]) for j in range(num_blocks)}
        return set(
            sorted(block_sums, key=lambda j: -block_sums[j])[
                : max(min_blocks, num_tokens // 16 + 1)
            ]
        )

    attention_probabilities = compute_eager_probabilities(3 * q, k, 0.25)[0, :, -32:] / 32
    distance = torch.arange(length)[-32:, None] - torch.arange(length)
    query_and_key_blocks = [x.split(block_size, 2) for x, block_size in ((3 * q, 32), (k, 16))]
    block_means = [
        torch.stack([block.mean(2) for block in blocks_of_tensor], 2)[0]
        for blocks_of_tensor in query_and_key_blocks
    ]
    logits = block_means[0] @ block_means[1].repeat_interleave(3, 0).transpose(-1, -2) * 0.25
    diagonal_blocks_by_row = {
        row: {2 * row, 2 * row + 1} & set(range(num_blocks)) for row in range(num_rows)
    }
    for head in range(6):
        column_shares = attention_probabilities[head].sum(0).tolist()
        diagonal_shares = [
            attention_probabilities[head][distance == t].sum().item() for t in range(length)
        ]
        vertical_slash_share = 0.0 if tau else gamma
        selected_columns, selected_diagonals = (
            select_best_blocks(column_shares, vertical_slash_share),
            select_best_blocks(diagonal_shares, vertical_slash_share),
        )
        share_by_block = {}
        for row in range(num_rows):
            probabilities = (
                logits[head, row, : max(diagonal_blocks_by_row[row]) + 1].softmax(0).tolist()
            )
            share_by_block |= {
                (row, j): probability / num_rows for j, probability in enumerate(probabilities)
            }
        query_aware_blocks = select_fewest_keys(share_by_block, gamma) if tau else set()
        for row in range(num_rows):
            visible_blocks = range(max(diagonal_blocks_by_row[row]) + 1)
            # a shorter last query block may end in its first key block
            first_block, last_block = 2 * row, (min(32 * row + 32, length) - 1) // 16
            blocks_on_diagonals = {
                t - d for t in range(first_block, last_block + 1) for d in selected_diagonals
            }
            expected = diagonal_blocks_by_row[row] | (
                (selected_columns | blocks_on_diagonals) & set(visible_blocks)
            )
            expected |= {j for j in visible_blocks if (row, j) in query_aware_blocks}
            assert set(is_selected[0, head, row].nonzero().flatten().tolist()) == expected


def test_flexprefill_divergence_is_small_for_constant_blocks():
    """Keys are constant within a block, so block means give the exact attention."""
    k = draw_qk(20)[1].repeat_interleave(16, dim=2)
    q = draw_qk(10)[0].repeat_interleave(32, dim=2)
    key_ranges = KeyRanges.causal(1, 320, 320, "cpu")
    key_means = blocks.average_blocks(k, key_ranges.key_valid, 16)
    estimated_probabilities = last_queries.estimate_last_block(
        q, key_means, key_ranges, 0.25, 32, 16
    )
    exact_probabilities, _ = caches.sum_columns_and_diagonals(q, k, key_ranges, 0.25, 32)
    exact_probabilities = exact_probabilities.unflatten(-1, (20, 16)).sum(-1) / 32
    # the causal mask cuts the last two blocks for some of the last 32 queries
    assert (
        last_queries.compute_root_divergence(estimated_probabilities, exact_probabilities) < 0.25
    ).all()
    torch.testing.assert_close(estimated_probabilities.sum(-1), torch.ones(1, 6))


def test_share_1_selects_all_blocks_and_flexprefill_has_a_minimum(monkeypatch):
    q, k = draw_qk(320)
    selection_of_all_blocks = select_blocks(make_config("oracle", sparsity=0.0), q, k)
    for predictor_name in ("flexprefill", "xattention", "mean_pooled"):
        assert torch.equal(
            select_blocks(make_config(predictor_name, 1.0), q, k), selection_of_all_blocks
        )
    num_selected_blocks = select_blocks(make_config("flexprefill", 0.01), q, k).sum()
    monkeypatch.setattr(last_queries, "FLEXPREFILL_MIN_TOKENS", 64)
    assert select_blocks(make_config("flexprefill", 0.01), q, k).sum() > num_selected_blocks


def test_streaming_selects_sink_and_window_only():
    is_selected = select_blocks(
        make_config("streaming", sink_blocks=1, local_blocks=3), *draw_qk(320)
    )
    assert is_selected.shape == (1, 6, 10, 20)
    for row in range(10):
        newest_block = 2 * row + 1
        expected = {0, *range(max(0, newest_block - 2), newest_block + 1)}
        for head in range(6):
            assert set(is_selected[0, head, row].nonzero().flatten().tolist()) == expected


def test_streaming_reaches_keys_of_its_window():
    config = make_config("streaming", sink_blocks=1, local_blocks=4)
    streaming_method = methods.Streaming(config)
    # the question starts in the row of queries [288, 320), which keeps keys [0, 16) and [256, 320)
    assert streaming_method.can_reach(320, 300, (10, 20))
    assert not streaming_method.can_reach(320, 300, (16, 256))
    assert streaming_method.can_reach(320, 300, (200, 257))
    # a question that starts one row earlier also uses the window of that row
    assert streaming_method.can_reach(320, 280, (200, 240))
    # a question in the dense tail reaches all keys
    assert methods.Streaming(replace(config, dense_tail_blocks=1)).can_reach(320, 300, (16, 256))


def test_random_selection_is_deterministic_per_head_and_sequence():
    config = make_config("random", sparsity=0.7)
    is_selected = select_blocks(config, *draw_qk(640, seed=1))
    assert torch.equal(is_selected, select_blocks(config, *draw_qk(640, seed=1)))
    assert not torch.equal(is_selected, select_blocks(config, *draw_qk(640, seed=2)))
    assert not torch.equal(is_selected[:, 0], is_selected[:, 1])
    assert not torch.equal(is_selected, select_blocks(config, *draw_qk(641))[:, :, :20, :40])


@pytest.mark.parametrize("predictor_name", ["random", "vertical_slash"])
def test_row_share_includes_forced_blocks(predictor_name):
    is_selected = select_blocks(
        make_config(predictor_name, sparsity=0.7, local_blocks=2), *draw_qk(640)
    )
    for row in range(20):
        num_visible_blocks = 2 * row + 2
        num_forced_blocks = min(num_visible_blocks, 3)
        num_budget_blocks = -(-num_visible_blocks * 3 // 10)
        assert (is_selected[0, :, row].sum(-1) == max(num_forced_blocks, num_budget_blocks)).all()
        assert is_selected[0, :, row, 0].all()
        assert is_selected[0, :, row, num_visible_blocks - 2 : num_visible_blocks].all()


def test_single_query_has_a_plan():
    """One query after 199 cached keys attends to the first and the last key block."""
    q, k = draw_qk(200)
    key_ranges = KeyRanges.causal(1, 1, 200, "cpu")
    for config in RIVAL_CONFIGS.values():
        plan = make_predictor(config)(q[:, :, -1:], k, LayerContext(key_ranges, 0.25))
        assert_valid_plan(plan)
        assert plan.to_dense()[0, :, 0, [0, 12]].all()
