"""Hand-computed forced blocks and dense tails, and properties of all predictors."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from selecting import plan_by_reference
from tiny import draw_qkv

from cab_hf import CabConfig
from cab_hf.call.layout import BlockLayout
from cab_hf.eval import methods  # noqa: F401  registers predictors of other methods
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges, block_visibility
from cab_hf.predictors import LayerContext, RowsPredictor, make_predictor, register_predictor

EXAMPLE_PATH = Path(__file__).parents[2] / "examples" / "own_predictor.py"
CONFIGS = [
    pytest.param(CabConfig(32, 16, mass_threshold=0.08, share_threshold=0.5), id="rows"),
    pytest.param(CabConfig(16, 32, mass_threshold=0.08, share_threshold=0.5), id="wide-keys"),
    pytest.param(CabConfig.published(0.7, query_block=32, key_block=32), id="published"),
    pytest.param(CabConfig.published(0.7, "additive", query_block=32, key_block=16), id="additive"),
]
parametrize_configs = pytest.mark.parametrize("config", CONFIGS)


def change_config(config, **fields):
    """Return ``config`` with changed ``fields``; also allow fields that its predictor ignores."""
    return CabConfig.from_dict({**config.to_dict(), **fields})


def test_block_positions_follow_slot_of_first_query():
    key_ranges = KeyRanges.causal(2, 40, 72, "cpu")
    assert key_ranges.rows(16).block_positions(16).tolist() == [[2, 3, 4]] * 2
    padded_ranges = replace(key_ranges, end=key_ranges.end.masked_fill(torch.arange(40) >= 32, -1))
    assert padded_ranges.rows(16).block_positions(16).tolist() == [[2, 3, 0]] * 2


def test_share_rounds_up_without_floating_point_error():
    is_visible = torch.ones(1, 60, dtype=torch.bool)
    assert [reference.share_of_row(is_visible, share).item() for share in (0.05, 0.1, 0.11)] == [
        3,
        6,
        7,
    ]


def test_forced_blocks_are_sink_local_and_own_blocks():
    key_ranges = KeyRanges.causal(1, 128, 128, "cpu")
    config = CabConfig(
        query_block=32, key_block=16, sink_blocks=1, local_blocks=3, dense_tail_blocks=0
    )
    is_forced = reference.forced_blocks(block_visibility(key_ranges, 32, 16), key_ranges, config)
    assert [row.nonzero().flatten().tolist() for row in is_forced[0]] == [
        [0, 1],
        [0, 1, 2, 3],
        [0, 3, 4, 5],
        [0, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    ("length", "num_tail_blocks", "tail_rows"),
    [
        pytest.param(128, 0, [], id="none"),
        pytest.param(128, 1, [3], id="whole-blocks"),
        pytest.param(130, 1, [3, 4], id="one-block-more-if-the-last-is-short"),
        pytest.param(130, 2, [2, 3, 4], id="two"),
        pytest.param(128, 9, [0, 1, 2, 3], id="everything"),
        pytest.param(32, 1, [0], id="one-block"),
        pytest.param(31, 1, [], id="fewer-than-a-block"),
    ],
)
def test_dense_tail_rows_are_forced(length, num_tail_blocks, tail_rows):
    key_ranges = KeyRanges.causal(2, length, length + 64, "cpu")
    config = CabConfig(query_block=32, key_block=16, dense_tail_blocks=num_tail_blocks)
    is_visible = block_visibility(key_ranges, 32, 16)
    is_forced = reference.forced_blocks(is_visible, key_ranges, config)
    is_fully_forced = (is_forced == is_visible).all(-1)
    assert torch.equal(
        key_ranges.tail(num_tail_blocks * 32, 32)[0].nonzero().flatten(),
        torch.tensor(tail_rows).long(),
    )
    rows_outside_tail = [row for row in range(is_fully_forced.shape[1]) if row not in tail_rows]
    assert is_fully_forced[0, tail_rows].all() and not is_fully_forced[0, rows_outside_tail].any()


def test_every_document_has_a_dense_tail():
    padding_mask = torch.ones(2, 150, dtype=torch.bool)
    padding_mask[0, :23] = False
    padding_mask[1, 140:] = False
    document_ids = (torch.arange(150) >= 70).long().expand(2, -1)
    layout = BlockLayout.build(
        batch=2,
        q_length=150,
        kv_length=150,
        q_offset=0,
        padding_mask=padding_mask,
        doc_ids=document_ids,
        align=32,
        device=torch.device("cpu"),
    )
    # row lengths between document borders: 47 + 80 tokens, and 70 + 70 tokens
    assert layout.ranges.tail(32, 32).nonzero().tolist() == [
        [0, 0],
        [0, 1],
        [0, 3],
        [0, 4],
        [1, 1],
        [1, 2],
        [1, 4],
        [1, 5],
    ]


@pytest.mark.parametrize(
    "predictor_name", ["antidiagonal", "oracle", "random", "rows", "streaming"]
)
def test_every_predictor_applies_dense_tail(predictor_name):
    q, k, _ = draw_qkv(q_length=300)
    mass_fields = (
        {"mass_threshold": 0.2, "share_threshold": 1.0} if predictor_name == "rows" else {}
    )
    config = CabConfig(query_block=32, key_block=16, predictor=predictor_name, **mass_fields)
    plan = make_predictor(config)(q, k, LayerContext(KeyRanges.causal(1, 300, 300, "cpu"), 0.25))
    tail_mask = plan.token_mask()[:, :, 300 - 32 :]
    assert torch.equal(
        tail_mask, torch.ones(300, 300, dtype=torch.bool).tril()[-32:].expand_as(tail_mask)
    )
    assert plan.density() < 0.8


@parametrize_configs
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 111, 205])
@pytest.mark.parametrize("head_counts", [(1, 1), (9, 3), (4, 4)], ids=str)
def test_any_length_and_group_gives_a_valid_plan(config, length, head_counts):
    q, k, _ = draw_qkv(batch=2, heads=head_counts[0], kv_heads=head_counts[1], q_length=length)
    plan = plan_by_reference(config, q, k)
    token_indices = torch.arange(length)
    assert plan.token_mask()[:, :, token_indices, token_indices].all(), "a query must see itself"


@parametrize_configs
def test_full_budget_selects_every_block(config):
    q, k, _ = draw_qkv(q_length=205)
    full_budget_config = change_config(
        config, **({"sparsity": 0} if config.predictor == "frc" else {"mass_threshold": 0})
    )
    assert plan_by_reference(full_budget_config, q, k).density() == 1


@parametrize_configs
@pytest.mark.parametrize("max_density", [0.2, 0.5])
def test_max_density_caps_every_row(config, max_density):
    q, k, _ = draw_qkv(q_length=900)
    key_ranges = KeyRanges.causal(1, 900, 900, "cpu")
    is_visible = block_visibility(key_ranges, config.query_block, config.key_block)
    num_forced = reference.forced_blocks(is_visible, key_ranges, config).sum(-1)
    max_selected = torch.maximum(
        num_forced, reference.share_of_row(is_visible, max_density).squeeze(-1)
    )
    num_selected = (
        plan_by_reference(change_config(config, max_density=max_density), q, k).to_dense().sum(-1)
    )
    assert (num_selected <= max_selected.unsqueeze(1)).all()


@parametrize_configs
def test_plans_are_deterministic(config):
    q, k, _ = draw_qkv(q_length=300)
    assert torch.equal(
        plan_by_reference(config, q, k).to_dense(), plan_by_reference(config, q, k).to_dense()
    )


def test_plans_have_no_gradient():
    q, k, _ = draw_qkv(q_length=100)
    plan = plan_by_reference(CabConfig(32, 16), q.requires_grad_(), k.requires_grad_())
    assert not plan.full.counts.requires_grad


def test_own_predictor_example_runs(capsys):
    runpy.run_path(str(EXAMPLE_PATH))["main"]()
    description, *layer_lines = capsys.readouterr().out.split("\nlayer ")
    assert "predictor loudest" in description and "layers 0-1: sparse" in description
    assert [line.split(":")[1].strip()[:5] for line in layer_lines] == ["0.414", "0.414"]


def test_predictor_is_registered_by_name():
    register_predictor("test-again", RowsPredictor)
    register_predictor("test-again", RowsPredictor)
    assert isinstance(make_predictor(CabConfig(predictor="test-again")), RowsPredictor)
    with pytest.raises(ValueError, match="name must be unused, got 'test-again'"):
        register_predictor("test-again", lambda config: None)
    with pytest.raises(ValueError, match="factory must be a Predictor class.*, got 3"):
        register_predictor("test-number", 3)
    with pytest.raises(ValueError, match="name must be a string.*, got 3"):
        register_predictor(3, RowsPredictor)
    with pytest.raises(ValueError, match="predictor must be one of .*rows.*, got 'nobody'"):
        make_predictor(CabConfig(predictor="nobody"))
