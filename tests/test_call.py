"""State of a forward pass: plans that layers share, documents in masks, short sequences."""

from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from call_cases import compute_gradients, make_packed_position_ids
from tiny import FULL_BUDGET_CONFIG, MODEL_SIZES, SPARSE_CONFIG, draw_token_ids, make_tiny_model
from torch.nn import functional as F
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

import cab_hf
from cab_hf import checks
from cab_hf.call import forward_state
from cab_hf.call.hook import cab_mask
from cab_hf.call.layout import BlockLayout, LayoutOptions
from cab_hf.call.mask import MaskInfo
from cab_hf.call.packing import DocumentLength, detect_packing
from cab_hf.predictors import RowsPredictor, register_predictor

SELECTING_LAYERS = []


class FirstLayerPredictor(RowsPredictor):
    """Predictor that selects a plan in the first layer, which all other layers reuse."""

    def encode_keys(self, k, valid=None, channels=()):
        return k, valid, channels

    def choose(self, q, summary, layer_context):
        if "plan" not in layer_context.shared_state:
            SELECTING_LAYERS.append(layer_context.layer)
            k, valid, channels = summary
            encoded_keys = super().encode_keys(k, valid, channels)
            layer_context.shared_state["plan"] = super().choose(q, encoded_keys, layer_context)
        return layer_context.shared_state["plan"]


register_predictor("first-layer", FirstLayerPredictor)


def test_plan_is_shared_within_one_forward_pass():
    SELECTING_LAYERS.clear()
    model = make_tiny_model()
    with cab_hf.cab(model, SPARSE_CONFIG, predictor="first-layer"), torch.no_grad():
        model(draw_token_ids(1, 300))
        densities = {layer_stats["density"] for layer_stats in cab_hf.stats(model, reset=True)}
        assert SELECTING_LAYERS == [0] and len(densities) == 1
        model(draw_token_ids(1, 300))
    assert SELECTING_LAYERS == [0, 0]


def test_recompute_finds_shared_state_of_forward_pass():
    ids = draw_token_ids(1, 300)
    model = make_tiny_model().train()

    with cab_hf.cab(model, SPARSE_CONFIG, predictor="first-layer"):
        expected = compute_gradients(model, ids)
        model.gradient_checkpointing_enable()
        SELECTING_LAYERS.clear()
        for actual, expected_gradient in zip(compute_gradients(model, ids), expected, strict=True):
            torch.testing.assert_close(actual, expected_gradient)
        assert SELECTING_LAYERS == [0]


class RecordingPredictor(RowsPredictor):
    """Predictor that appends the layer index to `SELECTING_LAYERS` at each selection."""

    def choose(self, q, summary, layer_context):
        SELECTING_LAYERS.append(layer_context.layer)
        return super().choose(q, summary, layer_context)


register_predictor("counted", RecordingPredictor)


def test_recompute_reuses_plan_of_forward_pass():
    ids = draw_token_ids(1, 300)
    model = make_tiny_model().train()
    model.gradient_checkpointing_enable()
    layer_indices = list(range(model.config.num_hidden_layers))
    with cab_hf.cab(model, SPARSE_CONFIG, predictor="counted"):
        for _ in range(2):
            SELECTING_LAYERS.clear()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            assert layer_indices == SELECTING_LAYERS


def test_plan_saved_for_recompute_has_narrow_indices(monkeypatch):
    ids = draw_token_ids(1, 300)
    model = make_tiny_model().train()
    model.gradient_checkpointing_enable()
    saved_plans = []
    original_narrow_plan = forward_state.narrow_plan_to_int16

    def record_and_narrow_plan(plan):
        saved_plans.append((plan, original_narrow_plan(plan)))
        return saved_plans[-1][1]

    with cab_hf.cab(model, SPARSE_CONFIG):
        expected = compute_gradients(model, ids)
        monkeypatch.setattr(forward_state, "narrow_plan_to_int16", record_and_narrow_plan)
        monkeypatch.setattr(forward_state, "MIN_TRIMMED_BYTES", 0)
        assert all(map(torch.equal, compute_gradients(model, ids), expected))
    assert len(saved_plans) == model.config.num_hidden_layers
    for plan, int16_plan in saved_plans:
        for block_lists, narrow_block_lists in (
            (plan.full, int16_plan.full),
            (plan.partial, int16_plan.partial),
        ):
            assert block_lists.width == max(1, block_lists.counts.max())
            assert 2 * narrow_block_lists.indices.nbytes == block_lists.indices.nbytes
            assert torch.equal(narrow_block_lists.to_dense(19), block_lists.to_dense(19))


@pytest.mark.parametrize("has_checkpointing", [False, True])
def test_layer_called_twice_selects_two_plans(has_checkpointing):
    ids = draw_token_ids(1, 300)
    model = make_tiny_model().train()
    model.model.layers[1] = model.model.layers[0]

    with cab_hf.cab(model, SPARSE_CONFIG, predictor="counted"):
        SELECTING_LAYERS.clear()
        expected = compute_gradients(model, ids)
        assert SELECTING_LAYERS == [0, 0, 2]
        if has_checkpointing:
            model.gradient_checkpointing_enable()
        for actual, expected_gradient in zip(compute_gradients(model, ids), expected, strict=True):
            torch.testing.assert_close(actual, expected_gradient)


@pytest.mark.parametrize(
    ("positions", "mask_row", "doc_ids"),
    [
        pytest.param([0, 1, 2, 3], None, None, id="one"),
        pytest.param([0, 1, 0, 1], None, [0, 0, 1, 1], id="two"),
        pytest.param([0, 0, 0, 1], None, [0, 1, 2, 2], id="one-token-first"),
        pytest.param([0, 1, 0, 0], None, [0, 0, 1, 2], id="one-token-last"),
        pytest.param([3, 3, 4, 3], None, [0, 1, 1, 2], id="first-position-3"),
        pytest.param([0, 1, 1, 2], None, None, id="repeated-image-position"),
        pytest.param([0, 1, 5, 6], None, None, id="jump"),
        pytest.param([1, 1, 0, 1], [0, 0, 1, 1], None, id="padding-of-generate"),
        pytest.param([0, 0, 0, 1], [0, 0, 1, 1], None, id="padding-clamped"),
        pytest.param([0, 1, 0, 0], [1, 1, 0, 0], None, id="padding-right"),
        pytest.param([0, 9, 1, 0], [1, 0, 1, 1], [0, 0, 0, 1], id="padding-inside"),
        pytest.param([7, 0, 3, 0], [0, 1, 0, 1], [0, 0, 0, 1], id="one-token-each"),
        pytest.param([1, 2, 3, 4], [0, 0, 0, 0], None, id="padding-only"),
    ],
)
def test_positions_that_restart_start_documents(positions, mask_row, doc_ids):
    padding_mask = None if mask_row is None else torch.tensor([mask_row, [1] * 4])
    num_rows = 1 if mask_row is None else 2
    mask = cab_mask(num_rows, 4, 4, attention_mask=padding_mask)
    mask, _ = mask.with_documents(torch.tensor([positions, [0, 1, 2, 3]][:num_rows]))
    if doc_ids is None:
        assert mask.doc_ids is None
    else:
        expected_doc_ids = [doc_ids, [0] * 4][:num_rows]
        is_real_token = (
            torch.ones(num_rows, 4, dtype=torch.bool)
            if padding_mask is None
            else padding_mask.bool()
        )
        assert (
            mask.doc_ids[is_real_token].tolist()
            == torch.tensor(expected_doc_ids)[is_real_token].tolist()
        )


def test_mask_without_padding_is_dropped():
    mask = cab_mask(2, 4, 4, attention_mask=torch.ones(2, 4))
    mask, _ = mask.with_documents()
    assert mask.padding_mask is None and mask.is_plain_causal and mask.document_lengths is None


def test_lengths_count_document_tokens_without_padding():
    padding_mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    mask = cab_mask(2, 6, 6, attention_mask=padding_mask)
    mask, _ = mask.with_documents(torch.tensor([[0, 0, 1, 2, 0, 0], [0, 1, 0, 1, 0, 1]]))
    assert [
        [document_length.num_tokens for document_length in row_lengths]
        for row_lengths in mask.document_lengths
    ] == [[3, 1, 0], [2, 2, 2]]
    # for a chunk after a cache, each document has a length (queries, keys)
    mask = cab_mask(2, 2, 6, q_offset=4, attention_mask=padding_mask)
    mask, _ = mask.with_documents(torch.tensor([[3, 4], [4, 5]]))
    assert mask.document_lengths == [[(1, 4)], [(2, 6)]] and mask.longest_document == (2, 6)


@pytest.mark.parametrize(
    ("mask", "cumulative_lengths", "error_type", "error_pattern"),
    [
        pytest.param(
            MaskInfo(1, 4, 9, 5),
            [0, 2, 4],
            NotImplementedError,
            "cu_seq_lens_q is set in a call of 4 tokens that continues a cache",
            id="cache",
        ),
        pytest.param(
            MaskInfo(1, 1, None, torch.tensor(8)),
            [0, 1],
            NotImplementedError,
            "cu_seq_lens_q is set in a call of 1 tokens",
            id="decode",
        ),
        pytest.param(
            MaskInfo(1, 4, 4, 0), [0, 2, 5], ValueError, "must end at 4 .* an end at 5", id="long"
        ),
        pytest.param(
            MaskInfo(2, 4, 4, 0), [0, 2, 5], ValueError, "must end at 8 .* an end at 5", id="batch"
        ),
        pytest.param(
            MaskInfo(1, 4, 4, 0), [2, 4], ValueError, r"from 0, .* got \[2, 4\]", id="no 0"
        ),
        pytest.param(
            MaskInfo(1, 4, 4, 0), [0, 3, 1, 4], ValueError, "cumulative lengths", id="falling"
        ),
        pytest.param(MaskInfo(1, 4, 4, 0), [0.0, 4.0], ValueError, r"int \[doc", id="fractions"),
        pytest.param(MaskInfo(1, 4, 4, 0), [[0, 4]], ValueError, r"shape \(1, 2\)", id="two rows"),
        pytest.param(MaskInfo(1, 4, 4, 0), [], ValueError, "cumulative lengths", id="none"),
    ],
)
def test_invalid_cumulative_lengths_raise(mask, cumulative_lengths, error_type, error_pattern):
    with pytest.raises(error_type, match=error_pattern):
        mask.with_documents(None, torch.tensor(cumulative_lengths))


def test_repeated_cumulative_lengths_are_ignored():
    """Ignore repetitions of the last boundary, which collators add to get a fixed tensor size."""
    mask = MaskInfo(1, 4, 4, 0)
    mask, _ = mask.with_documents(None, torch.tensor([0, 1, 4, 4, 4]))
    assert mask.doc_ids.tolist() == [[0, 1, 1, 1]]


LEFT_PADDED_ROW_MASK = torch.tensor([[False, False, True, True], [True, True, True, True]])
PACKING_CASES = [
    pytest.param({"padding_mask": LEFT_PADDED_ROW_MASK}, None, [[(2, 2)], [(4, 4)]], id="padding"),
    pytest.param(
        {"padding_mask": LEFT_PADDED_ROW_MASK | True}, None, None, id="mask-without-padding"
    ),
    pytest.param(
        {"position_ids": torch.tensor([[0, 1, 0, 1]])}, [[0, 0, 1, 1]] * 2, None, id="positions"
    ),
    pytest.param(
        {"cu_seqlens": torch.tensor([0, 1, 4])}, [[0, 1, 1, 1]] * 2, None, id="cumulative-lengths"
    ),
]


@pytest.mark.parametrize(("packing_arguments", "doc_ids", "document_lengths"), PACKING_CASES)
def test_detect_packing_finds_documents_and_padding(packing_arguments, doc_ids, document_lengths):
    packing_arguments = {
        "position_ids": None,
        "cu_seqlens": None,
        "padding_mask": None,
        **packing_arguments,
    }
    packing = detect_packing(**packing_arguments, batch=2, query_slots=slice(0, 4), kv_length=4)
    assert (packing.doc_ids is None) if doc_ids is None else packing.doc_ids.tolist() == doc_ids
    assert packing.document_lengths == document_lengths
    assert (packing.padding_mask is None) == (document_lengths is None)


def make_layout(num_rows, length, padding_mask=None, doc_ids=None, document_lengths=None):
    """Return the `BlockLayout` of a prefill of ``num_rows`` rows with ``length`` tokens each."""
    return BlockLayout.build(
        batch=num_rows,
        q_length=length,
        kv_length=length,
        q_offset=0,
        padding_mask=padding_mask,
        doc_ids=doc_ids,
        align=16,
        device=torch.device("cpu"),
        options=LayoutOptions(document_lengths=document_lengths),
    )


def test_masks_are_frozen_and_share_detected_documents():
    mask = cab_mask(1, 4, 4)
    with pytest.raises(FrozenInstanceError):
        mask.window = 3
    assert len(fields(MaskInfo)) <= 10
    first_mask, _ = mask.with_documents(torch.tensor([[0, 1, 0, 1]]))
    second_mask, _ = mask.with_documents(torch.tensor([[0, 1, 2, 3]]))
    assert mask.doc_ids is None and second_mask.doc_ids is first_mask.doc_ids is not None


def test_compiled_packed_documents_with_mask_raise(monkeypatch):
    """Raise an error, because the values of a padding mask are unknown under torch.compile."""
    doc_ids = torch.tensor([[0, 0, 1, 1]])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(
        NotImplementedError, match="attention_mask is set under torch.compile for packed documents"
    ):
        make_layout(1, 4, padding_mask=doc_ids > 0, doc_ids=doc_ids)


@pytest.mark.parametrize(
    "has_document_lengths", [True, False], ids=["known-lengths", "unknown-lengths"]
)
@pytest.mark.parametrize(
    ("min_lengths", "expected_query_blocks"),
    [
        pytest.param({"min_queries": 0, "min_tokens": 20}, [[], []], id="none"),
        pytest.param({"min_queries": 0, "min_tokens": 21}, [[0, 1], []], id="tokens"),
        pytest.param({"min_queries": 21, "min_tokens": 0}, [[0, 1], []], id="queries"),
        pytest.param({"min_queries": 0, "min_tokens": 41}, [[0, 1], [0, 1, 2]], id="all"),
    ],
)
def test_query_blocks_below_min_length_belong_to_short_sequences(
    min_lengths, expected_query_blocks, has_document_lengths
):
    padding_mask = torch.arange(40) >= torch.tensor([[20], [0]])
    document_lengths = (
        [[DocumentLength(20, 20)], [DocumentLength(40, 40)]] if has_document_lengths else None
    )
    layout = make_layout(2, 40, padding_mask=padding_mask, document_lengths=document_lengths)
    actual_query_blocks = layout.query_blocks_below_min_length(**min_lengths, query_block=16)
    if has_document_lengths and expected_query_blocks == [[], []]:
        assert actual_query_blocks is None
        return
    assert [
        [query_block for query_block in padded_query_blocks if query_block >= 0]
        for padded_query_blocks in actual_query_blocks.tolist()
    ] == expected_query_blocks
    # with known lengths, the result is not wider than the longest list
    assert not has_document_lengths or actual_query_blocks.shape[1] == max(
        map(len, expected_query_blocks)
    )


def test_plain_call_has_no_query_blocks_below_min_length():
    layout = make_layout(1, 40)
    assert layout.query_blocks_below_min_length(99, 99, 16) is None


def test_layout_of_padding_only_has_empty_ranges():
    doc_ids = torch.tensor([[0, 0, 1, 1]])
    layout = make_layout(1, 4, padding_mask=doc_ids < 0, doc_ids=doc_ids)
    assert layout.ranges.end.tolist() == [[-1]]
    assert not layout.restore(layout.queries(torch.ones(1, 1, 4, 2))).any()


@pytest.fixture
def gemma():
    """Return a Gemma 4, which slices the mask for layers that share KV with earlier layers."""
    model_sizes = MODEL_SIZES | {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "sliding_window": 40,
    }
    config = Gemma4TextConfig(
        **model_sizes,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=16,
    )
    torch.manual_seed(0)
    return Gemma4ForCausalLM(config).eval()


LEFT_PADDING_MASK = torch.arange(150) >= torch.tensor([[21], [0]])
SLICED_MASK_CASES = {
    "padded": (
        {"input_ids": draw_token_ids(2, 150), "attention_mask": LEFT_PADDING_MASK.long()},
        LEFT_PADDING_MASK,
    ),
    "packed": (
        {
            "input_ids": draw_token_ids(1, 150),
            "position_ids": make_packed_position_ids((90, 60)),
            "use_cache": False,
        },
        torch.ones(1, 150, dtype=torch.bool),
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("logits_to_keep", [0, 1, 20, 50, 100])
@pytest.mark.parametrize(
    ("inputs", "token_mask"), SLICED_MASK_CASES.values(), ids=SLICED_MASK_CASES
)
@pytest.mark.parametrize("implementation", ["cab", "cab_dense"])
def test_sliced_mask_computes_last_queries_only(
    gemma, logits_to_keep, inputs, token_mask, implementation
):
    inputs = {**inputs, "logits_to_keep": logits_to_keep}
    expected = gemma(**inputs).logits
    cab_hf.apply_cab(gemma, FULL_BUDGET_CONFIG)
    gemma.set_attn_implementation(implementation)
    is_real_token = token_mask[:, -logits_to_keep:]
    actual = gemma(**inputs).logits
    torch.testing.assert_close(actual[is_real_token], expected[is_real_token], atol=2e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("logits_to_keep", [1, 20])
def test_last_queries_of_padded_batch_equal_single_rows(gemma, logits_to_keep):
    cab_hf.apply_cab(gemma, SPARSE_CONFIG)
    ids, mask = draw_token_ids(2, 600), torch.ones(2, 600, dtype=torch.long)
    mask[0, :40] = 0
    actual = gemma(ids, attention_mask=mask, logits_to_keep=logits_to_keep).logits
    expected = gemma(ids[1:], logits_to_keep=logits_to_keep).logits
    torch.testing.assert_close(actual[1:], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "mask_index",
    [
        pytest.param((slice(None), slice(None), slice(2), slice(None)), id="first-queries"),
        pytest.param((slice(None), slice(None), slice(8, None), slice(None)), id="no-query"),
        pytest.param((slice(None), slice(None), slice(-4, None), slice(4)), id="fewer-keys"),
        pytest.param((slice(None), slice(None), slice(None, None, 2), slice(None)), id="stride"),
        pytest.param((slice(None), 0), id="a-head"),
    ],
)
def test_other_mask_slices_raise(mask_index):
    with pytest.raises(NotImplementedError, match="computes with its attention mask"):
        cab_mask(1, 8, 8)[mask_index]


def make_right_padded_ids(*row_lengths):
    """Return random token ids [B, N], right-padded with 0; row i has ``row_lengths[i]`` tokens."""
    max_length = max(row_lengths)
    rows = [
        F.pad(draw_token_ids(1, row_length, seed=row_length), (0, max_length - row_length))
        for row_length in row_lengths
    ]
    return torch.cat(rows)


RIGHT_PADDING_CASES = [
    pytest.param(make_right_padded_ids(60, 40, 51), 1, id="rows-of-other-lengths"),
    pytest.param(make_right_padded_ids(60, 58), 0, id="two-equal-tokens"),
    pytest.param(draw_token_ids(3, 60), 0, id="rows-of-one-length"),
    pytest.param(F.pad(draw_token_ids(2, 40), (0, 20)), 0, id="same-ending-in-all-rows"),
    pytest.param(F.pad(draw_token_ids(1, 40), (0, 20)), 0, id="one-sequence"),
]


@pytest.mark.parametrize(("ids", "num_warnings"), RIGHT_PADDING_CASES)
@torch.no_grad()
def test_right_padding_without_mask_warns_once(ids, num_warnings, monkeypatch, recwarn):
    monkeypatch.setattr(checks, "_shown_warning_keys", set())
    model = cab_hf.apply_cab(make_tiny_model(), SPARSE_CONFIG)
    model(ids, attention_mask=(ids != 0).long(), use_cache=False)
    assert not any("attention_mask" in str(warning.message) for warning in recwarn)
    for _ in range(2):
        model(ids, use_cache=False)
    messages = [
        str(warning.message)
        for warning in recwarn
        if "without an attention_mask" in str(warning.message)
    ]
    assert len(messages) == num_warnings
    assert all(
        "reads 3 sequences" in message and "of which 2 end in 4 or more" in message
        for message in messages
    )
