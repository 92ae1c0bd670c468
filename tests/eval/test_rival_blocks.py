"""Block selection of the baselines, compared with hand calculations and eager attention."""

import math
from dataclasses import replace

import pytest
import torch
from rivals import (
    LAST_QUERY_PREDICTORS,
    RIVAL_CONFIGS,
    blocks_selected_by,
    eager_probabilities,
    make_config,
    random_qk,
)
from valid_plan import assert_valid_plan

from cab_hf.call.layout import BlockLayout
from cab_hf.eval import methods
from cab_hf.eval.methods import blocks, caches, last_queries
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, attention_mass, make_predictor

# scale and block sizes of `rivals.SMALL_BLOCKS`
BLOCK_MASS = {"scale": 0.25, "query_block": 32, "key_block": 16}


@pytest.fixture(autouse=True)
def lower_minimum_of_flexprefill(monkeypatch):
    """Lower `MIN_TOKENS`, with which FlexPrefill would select all blocks of a short sequence."""
    monkeypatch.setattr(last_queries, "MIN_TOKENS", 32)


def sums_over_blocks(probabilities, key_block, query_block):
    """Return the sums of probabilities [..., N_q, N_k] over blocks, [..., M_q, M_k]."""
    for size in (key_block, query_block):
        sums = [part.sum(-1) for part in probabilities.split(size, -1)]
        probabilities = torch.stack(sums, -1).transpose(-1, -2)
    return probabilities


@pytest.mark.parametrize(("length", "row_blocks"), [(96, 1), (205, 2), (205, 100)])
def test_block_mass_equals_summed_eager_attention(length, row_blocks, monkeypatch):
    q, k = random_qk(length)
    logits_per_row_block = q.shape[1] * 32 * length
    monkeypatch.setattr(attention_mass, "MAX_LOGITS_PER_CHUNK", row_blocks * logits_per_row_block)
    ranges = KeyRanges.causal(1, length, length, "cpu")
    mass = attention_mass.compute_block_mass(q, k, ranges, **BLOCK_MASS)
    probabilities = eager_probabilities(q, k, 0.25)
    torch.testing.assert_close(mass, sums_over_blocks(probabilities, 16, 32))
    torch.testing.assert_close(caches.sum_columns(q, k, ranges, 0.25), probabilities.sum(2))
    # only the first 40 queries are real: 32 in the first block and 8 in the second
    ranges = replace(ranges, end=torch.where(torch.arange(length) < 40, ranges.end, -1))
    mass = attention_mass.compute_block_mass(q, k, ranges, **BLOCK_MASS).sum(-1)
    expected = torch.tensor([32.0, 8.0, *[0.0] * (-(-length // 32) - 2)])
    torch.testing.assert_close(mass, expected.expand(1, 6, -1))


def test_antidiagonal_score_by_hand():
    """One head with one channel: the logit of a tile is the mean product on its antidiagonal."""
    stride = blocks.STRIDE
    q, k = random_qk(2 * stride, heads=1, kv_heads=1, dim=1)
    ranges = KeyRanges.causal(1, 2 * stride, 2 * stride, "cpu")
    (_, rows), *later_chunks = attention_mass.iterate_attention_rows(
        q, k, ranges, scale=2.0, stride=stride
    )
    q, k = q.flatten(), k.flatten()
    second_tile = range(stride, 2 * stride)
    first_logit = sum(q[i] * k[2 * stride - 1 - i] for i in second_tile) * 2 / stride
    second_logit = sum(q[i] * k[3 * stride - 1 - i] for i in second_tile) * 2 / stride
    assert not later_chunks
    torch.testing.assert_close(rows[0, 0, 0], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(rows[0, 0, 1], torch.stack([first_logit, second_logit]).softmax(0))


@pytest.mark.parametrize("length", [1, 205])
def test_vertical_slash_scores_equal_eager_attention(length):
    q, k = random_qk(length)
    call = LayerContext(KeyRanges.causal(1, length, length, "cpu"), 0.25)
    score = last_queries.score_vertical_slash(q, k, call, 32, 16, num_queries=20)
    attention = eager_probabilities(q, k, 0.25)[:, :, -20:]
    distance = torch.arange(length)[-20:, None] - torch.arange(length)
    column = attention.sum(2)
    diagonal = torch.stack([(attention * (distance == d)).sum((2, 3)) for d in range(length)], -1)
    for row in range(length // 32):  # query blocks without the incomplete last block
        for block in range(2 * row + 2):
            keys = slice(16 * block, min(16 * block + 16, length))
            nearest = max(0, 32 * row - keys.stop + 1)
            best_diagonal = diagonal[..., nearest : 32 * row + 32 - keys.start].amax(-1)
            expected = torch.maximum(column[..., keys].amax(-1), best_diagonal)
            torch.testing.assert_close(score[:, :, row, block], expected)


@pytest.mark.parametrize("name", RIVAL_CONFIGS)
@pytest.mark.parametrize("length", [33, 320])
def test_no_row_selects_a_future_block(name, length):
    keep = blocks_selected_by(RIVAL_CONFIGS[name], *random_qk(length))[0]
    rows, blocks = torch.arange(keep.shape[1]), torch.arange(keep.shape[2])
    later = 16 * blocks > 32 * rows[:, None] + 31
    assert not keep[:, later].any()
    # every query block attends to the key blocks with its own positions
    own = blocks[:, None] // 2 == rows
    assert keep[:, (own.T & ~later)].all()


@pytest.mark.parametrize(
    "name", [name for name in RIVAL_CONFIGS if name not in LAST_QUERY_PREDICTORS]
)
def test_later_tokens_do_not_change_selection(name):
    q, k = random_qk(320)
    before = blocks_selected_by(RIVAL_CONFIGS[name], q, k)[:, :, :6]
    assert 0 < before.sum() < before.numel()
    q, k = q.clone(), k.clone()
    q[:, :, 192:] *= -3
    k[:, :, 192:] += 5
    assert torch.equal(blocks_selected_by(RIVAL_CONFIGS[name], q, k)[:, :, :6], before)


@pytest.mark.parametrize("name", [name for name in RIVAL_CONFIGS if name != "random"])
@pytest.mark.parametrize(
    ("documents", "is_real"),
    [([90, 205, 150], None), ([90, 205], [False, True]), ([205, 90], [True, False])],
    ids=["packed", "padded-left", "padded-right"],
)
def test_packed_or_padded_sequence_selects_blocks_of_single_sequence(name, documents, is_real):
    """Compare the blocks of a sequence of 205 tokens within a longer row, and as a row alone."""
    document_of_token = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))[
        None
    ]
    valid = None if is_real is None else torch.tensor(is_real)[document_of_token]
    length = document_of_token.shape[1]
    q, k = random_qk(length)
    layout = BlockLayout.build(
        batch=1,
        q_length=length,
        kv_length=length,
        q_offset=0,
        padding_mask=valid,
        doc_ids=document_of_token if is_real is None else None,
        align=32,
        device=q.device,
    )
    config = RIVAL_CONFIGS[name]
    predictor = make_predictor(config)
    q_laid, k_laid = layout.queries(q), layout.keys(k)
    call = LayerContext(layout.ranges, 0.25)
    if is_real is None and name in LAST_QUERY_PREDICTORS:
        with pytest.raises(NotImplementedError, match=f"packed document, got '{config.predictor}'"):
            predictor(q_laid, k_laid, call)
        return
    selected = predictor(q_laid, k_laid, call).to_dense()
    in_sequence = document_of_token[0] == documents.index(205)
    alone = blocks_selected_by(config, q[:, :, in_sequence], k[:, :, in_sequence])
    # the layout pads the previous document from 90 tokens to 96, a multiple of the block size
    row, block = (3, 6) if is_real is None else (0, 0)
    assert torch.equal(selected[:, :, row : row + 7, block : block + 13], alone)


@pytest.mark.parametrize(
    ("name", "stride", "share"), [("xattention", 8, None), ("xattention_16", 16, 0.3)]
)
def test_xattention_selects_fewest_blocks_above_threshold(name, stride, share):
    q, k = random_qk(320)
    q, k = 4 * q, 4 * k
    keep = blocks_selected_by(make_config(name, share, sink_blocks=1, local_blocks=0), q, k)
    ranges = KeyRanges.causal(1, 320, 320, "cpu")
    mass = attention_mass.compute_block_mass(q, k, ranges, **BLOCK_MASS, stride=stride)
    mass = mass / mass.sum(-1, keepdim=True)
    for head in range(6):
        for row in range(10):
            forced = {0, 2 * row, 2 * row + 1}
            others = sorted(set(range(2 * row)) - forced, key=lambda j: -mass[0, head, row, j])
            expected, total = set(forced), sum(mass[0, head, row, j].item() for j in forced)
            for block in others:
                if total >= (share or 0.8) - 1e-5:
                    break
                expected.add(block)
                total += mass[0, head, row, block].item()
            assert set(keep[0, head, row].nonzero().flatten().tolist()) == expected


def test_columns_and_diagonals_map_to_blocks_by_hand():
    """Query blocks of 4 tokens span two key blocks: row m has the key blocks 2 m and 2 m + 1."""
    ranges = KeyRanges.causal(1, 12, 12, "cpu")
    none = torch.zeros(1, 1, 6, dtype=torch.bool)
    column, diagonal = none.clone(), none.clone()
    column[..., 1] = True
    # keep the keys at a distance of three key blocks before a query
    diagonal[..., 3] = True
    visible = torch.ones(6, 6, dtype=torch.bool).tril()[1::2]
    keep = (
        last_queries.select_touched_blocks(column, none, ranges, query_block=4, key_block=2)[0, 0]
        & visible
    )
    assert keep.nonzero().tolist() == [[0, 1], [1, 1], [2, 1]]
    keep = (
        last_queries.select_touched_blocks(none, diagonal, ranges, query_block=4, key_block=2)[0, 0]
        & visible
    )
    assert keep.nonzero().tolist() == [[1, 0], [2, 1], [2, 2]]
    # query blocks of 2 tokens are half of a key block of 4 tokens
    ranges = KeyRanges.causal(1, 24, 24, "cpu")
    keep = last_queries.select_touched_blocks(none, diagonal, ranges, query_block=2, key_block=4)[
        0, 0
    ]
    assert keep.nonzero().tolist() == [[6, 0], [7, 0], [8, 1], [9, 1], [10, 2], [11, 2]]


def test_root_divergence_by_hand():
    p, q = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.5, 0.5, 0.0])
    # KL(p || m) = log 4/3, KL(q || m) = log(2/3) / 2 + log(2) / 2
    expected = ((math.log(4 / 3) + math.log(2 / 3) / 2 + math.log(2) / 2) / 2) ** 0.5
    assert last_queries.compute_root_divergence(p, q).item() == pytest.approx(expected)
    assert last_queries.compute_root_divergence(p, p) == 0
    disjoint = last_queries.compute_root_divergence(p, torch.tensor([0.0, 0.0, 1.0]))
    assert disjoint.item() == pytest.approx(math.log(2) ** 0.5)


@pytest.mark.parametrize("tau", [0.0, 9.0], ids=["vertical-slash", "query-aware"])
def test_flexprefill_selection_equals_eager_attention(tau, monkeypatch):
    """The values of TAU make all heads vertical-slash, or all heads query-aware."""
    length = 205
    monkeypatch.setattr(last_queries, "TAU", tau)
    gamma, min_blocks = 0.6, 2
    q, k = random_qk(length)
    keep = blocks_selected_by(
        make_config("flexprefill", gamma, sink_blocks=0, local_blocks=0), 3 * q, k
    )
    rows, blocks = -(-length // 32), -(-length // 16)

    def fewest_with_share(shares, wanted):
        """Return the fewest keys of the dict ``shares`` whose values sum to at least ``wanted``."""
        chosen, total = set(), 0.0
        for key in sorted(shares, key=lambda key: -shares[key]):
            if total >= wanted:
                break
            chosen.add(key)
            total += shares[key]
        return chosen

    def best_blocks(shares, wanted):
        """Return the blocks with the largest sums, n // 16 + 1 blocks but at least ``min_blocks``.

        n is the smallest number of tokens whose ``shares`` sum to more than ``wanted``.
        """
        tokens, total = 1, 0.0
        for share in sorted(shares, reverse=True):
            total += share
            if total > wanted:
                break
            tokens += 1
        of_block = {j: sum(shares[16 * j : 16 * j + 16]) for j in range(blocks)}
        return set(
            sorted(of_block, key=lambda j: -of_block[j])[: max(min_blocks, tokens // 16 + 1)]
        )

    attention = eager_probabilities(3 * q, k, 0.25)[0, :, -32:] / 32
    distance = torch.arange(length)[-32:, None] - torch.arange(length)
    means = [x.split(size, 2) for x, size in ((3 * q, 32), (k, 16))]
    means = [torch.stack([part.mean(2) for part in parts], 2)[0] for parts in means]
    logits = means[0] @ means[1].repeat_interleave(3, 0).transpose(-1, -2) * 0.25
    own = {row: {2 * row, 2 * row + 1} & set(range(blocks)) for row in range(rows)}
    for head in range(6):
        column = attention[head].sum(0).tolist()
        diagonal = [attention[head][distance == t].sum().item() for t in range(length)]
        share = 0.0 if tau else gamma
        columns, diagonals = best_blocks(column, share), best_blocks(diagonal, share)
        pooled = {}
        for row in range(rows):
            probabilities = logits[head, row, : max(own[row]) + 1].softmax(0).tolist()
            pooled |= {(row, j): each / rows for j, each in enumerate(probabilities)}
        query_aware = fewest_with_share(pooled, gamma) if tau else set()
        for row in range(rows):
            visible = range(max(own[row]) + 1)
            # the last query block may have the keys of one key block only
            first, last = 2 * row, (min(32 * row + 32, length) - 1) // 16
            on_diagonals = {t - d for t in range(first, last + 1) for d in diagonals}
            expected = own[row] | ((columns | on_diagonals) & set(visible))
            expected |= {j for j in visible if (row, j) in query_aware}
            assert set(keep[0, head, row].nonzero().flatten().tolist()) == expected


def test_flexprefill_divergence_is_small_for_constant_blocks():
    """Keys are constant within a block, so block means give the exact attention."""
    k = random_qk(20)[1].repeat_interleave(16, dim=2)
    q = random_qk(10)[0].repeat_interleave(32, dim=2)
    ranges = KeyRanges.causal(1, 320, 320, "cpu")
    keys = blocks.average_blocks(k, ranges.key_valid, 16)
    pooled = last_queries.estimate_last_block(q, keys, ranges, 0.25, 32, 16)
    columns, _ = caches.sum_columns_and_diagonals(q, k, ranges, 0.25, 32)
    columns = columns.unflatten(-1, (20, 16)).sum(-1) / 32
    # the causal mask cuts the last two blocks for some of the last 32 queries
    assert (last_queries.compute_root_divergence(pooled, columns) < 0.25).all()
    torch.testing.assert_close(pooled.sum(-1), torch.ones(1, 6))


def test_share_1_selects_all_blocks_and_flexprefill_has_a_minimum(monkeypatch):
    q, k = random_qk(320)
    everything = blocks_selected_by(make_config("oracle", sparsity=0.0), q, k)
    for name in ("flexprefill", "xattention", "mean_pooled"):
        assert torch.equal(blocks_selected_by(make_config(name, 1.0), q, k), everything)
    few = blocks_selected_by(make_config("flexprefill", 0.01), q, k).sum()
    monkeypatch.setattr(last_queries, "MIN_TOKENS", 64)
    assert blocks_selected_by(make_config("flexprefill", 0.01), q, k).sum() > few


def test_streaming_selects_sink_and_window_only():
    keep = blocks_selected_by(
        make_config("streaming", sink_blocks=1, local_blocks=3), *random_qk(320)
    )
    assert keep.shape == (1, 6, 10, 20)
    for row in range(10):
        newest = 2 * row + 1
        expected = {0, *range(max(0, newest - 2), newest + 1)}
        for head in range(6):
            assert set(keep[0, head, row].nonzero().flatten().tolist()) == expected


def test_streaming_reaches_keys_of_its_window():
    config = make_config("streaming", sink_blocks=1, local_blocks=4)
    streaming = methods.Streaming(config)
    # the question starts in the row of queries [288, 320), which keeps keys [0, 16) and [256, 320)
    assert streaming.reaches(320, 300, (10, 20))
    assert not streaming.reaches(320, 300, (16, 256))
    assert streaming.reaches(320, 300, (200, 257))
    # a question that starts one row earlier also uses the window of that row
    assert streaming.reaches(320, 280, (200, 240))
    # a question in the dense tail reaches all keys
    assert methods.Streaming(replace(config, dense_tail_blocks=1)).reaches(320, 300, (16, 256))


def test_random_selection_is_deterministic_per_head_and_sequence():
    config = make_config("random", sparsity=0.7)
    once = blocks_selected_by(config, *random_qk(640, seed=1))
    assert torch.equal(once, blocks_selected_by(config, *random_qk(640, seed=1)))
    assert not torch.equal(once, blocks_selected_by(config, *random_qk(640, seed=2)))
    assert not torch.equal(once[:, 0], once[:, 1])
    assert not torch.equal(once, blocks_selected_by(config, *random_qk(641))[:, :, :20, :40])


@pytest.mark.parametrize("name", ["random", "vertical_slash"])
def test_row_share_includes_forced_blocks(name):
    keep = blocks_selected_by(make_config(name, sparsity=0.7, local_blocks=2), *random_qk(640))
    for row in range(20):
        visible = 2 * row + 2
        forced = min(visible, 3)
        share = -(-visible * 3 // 10)
        assert (keep[0, :, row].sum(-1) == max(forced, share)).all()
        assert keep[0, :, row, 0].all()
        assert keep[0, :, row, visible - 2 : visible].all()


def test_single_query_has_a_plan():
    """One query after 199 cached keys attends to the first and the last key block."""
    q, k = random_qk(200)
    ranges = KeyRanges.causal(1, 1, 200, "cpu")
    for config in RIVAL_CONFIGS.values():
        plan = make_predictor(config)(q[:, :, -1:], k, LayerContext(ranges, 0.25))
        assert_valid_plan(plan)
        assert plan.to_dense()[0, :, 0, [0, 12]].all()
