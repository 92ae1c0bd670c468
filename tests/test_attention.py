"""Models with "cab": logits equal sdpa at full budget, and do not depend on padding or packing."""

import copy
from unittest.mock import Mock

import pytest
import torch
import transformers
from call_cases import (
    MODEL_CALLS,
    compute_gradients,
    compute_logits,
    make_packed_position_ids,
    pad_left,
)
from marks import is_transformers_before, mark_slow_except
from tiny import (
    FULL_BUDGET_CONFIG,
    MODEL_FAMILIES,
    MODEL_SIZES,
    SPARSE_CONFIG,
    draw_token_ids,
    make_tiny_model,
)
from tiny_types import FIRST_REGULAR_TOKEN
from tiny_types import make_tiny_model as make_model_of_type
from transformers import (
    AttentionInterface,
    LlamaForSequenceClassification,
)

import cab_hf
from cab_hf import BlockPlan, CabConfig, engines
from cab_hf.eval import methods  # noqa: F401  it registers rivals

TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}
parametrize_family = pytest.mark.parametrize("family", MODEL_FAMILIES)


@pytest.fixture(scope="module")
def llama():
    """Return a tiny LLaMA."""
    return make_tiny_model()


@pytest.fixture(scope="module")
def one_layer_llama():
    """Return a tiny LLaMA of one layer."""
    return make_tiny_model(num_hidden_layers=1)


@parametrize_family
@pytest.mark.parametrize("implementation", ["cab", "cab_dense"])
@pytest.mark.parametrize(("inputs", "real_tokens"), MODEL_CALLS.values(), ids=MODEL_CALLS)
def test_full_budget_equals_sdpa(family, implementation, inputs, real_tokens):
    if family == "llama4" and "position_ids" in inputs and is_transformers_before("5.24"):
        pytest.skip("this transformers counts the chunks of packed documents from the row's start")
    model = make_tiny_model(family)
    expected = compute_logits(model, **inputs)
    cab_hf.apply_cab(model, FULL_BUDGET_CONFIG)
    model.set_attn_implementation(implementation)
    actual = compute_logits(model, **inputs)
    torch.testing.assert_close(actual[real_tokens], expected[real_tokens], **TOLERANCE)
    assert torch.isfinite(actual).all()


parametrize_document_lengths = pytest.mark.parametrize(
    "document_lengths",
    [
        pytest.param((60, 90), id="two"),
        pytest.param((50, 1, 99), id="one-token"),
        pytest.param((1, 1, 1, 147), id="one-token-first"),
        pytest.param((148, 1, 1), id="one-token-last"),
    ],
)
# arguments of `make_packed_inputs`: cache, and padding on the left and right
parametrize_packed_options = pytest.mark.parametrize(
    "packing_options",
    [
        pytest.param({"use_cache": True}, id="cache"),
        pytest.param({"use_cache": False, "left_padding": 0, "right_padding": 0}, id="mask"),
        pytest.param(
            {"use_cache": True, "left_padding": 0, "right_padding": 0}, id="mask-and-cache"
        ),
        pytest.param({"use_cache": False, "left_padding": 0, "right_padding": 1}, id="right"),
        pytest.param({"use_cache": True, "left_padding": 40, "right_padding": 0}, id="left"),
        pytest.param({"use_cache": True, "left_padding": 5, "right_padding": 33}, id="both"),
    ],
)


def make_packed_inputs(document_lengths, use_cache, left_padding=None, right_padding=0):
    """Return (keyword arguments of a model for packed documents, index of tokens without padding).

    ``left_padding`` and ``right_padding`` are numbers of padding tokens. ``left_padding`` None: no
    padding and no attention mask.
    """
    ids = draw_token_ids(1, sum(document_lengths))
    positions = make_packed_position_ids(document_lengths)
    inputs = {"use_cache": use_cache}
    if left_padding is None:
        return inputs | {"input_ids": ids, "position_ids": positions}, slice(None)
    mask = torch.cat(
        [torch.zeros(left_padding), torch.ones(sum(document_lengths)), torch.zeros(right_padding)]
    ).bool()
    # padding has random tokens and descending positions, which must not change the logits
    inputs["input_ids"] = draw_token_ids(1, len(mask), seed=5).masked_scatter(mask, ids)
    padding_positions = torch.arange(len(mask)).flip(0).unsqueeze(0)
    inputs["position_ids"] = padding_positions.masked_scatter(mask, positions)
    return inputs | {"attention_mask": mask.long().unsqueeze(0)}, mask


@parametrize_document_lengths
@parametrize_packed_options
@pytest.mark.parametrize("implementation", ["cab", "cab_dense"])
@pytest.mark.parametrize("family", ["llama", "qwen3-some-sliding"])
def test_packed_documents_match_sdpa_with_and_without_mask_and_cache(
    family, implementation, document_lengths, packing_options
):
    """Compare with sdpa without mask and cache, which then detects documents by position ids."""
    model = make_tiny_model(family, num_hidden_layers=2)
    expected = compute_logits(model, **make_packed_inputs(document_lengths, use_cache=False)[0])
    cab_hf.apply_cab(model, FULL_BUDGET_CONFIG)
    model.set_attn_implementation(implementation)
    inputs, real_tokens = make_packed_inputs(document_lengths, **packing_options)
    torch.testing.assert_close(
        compute_logits(model, **inputs)[:, real_tokens], expected, **TOLERANCE
    )


@pytest.mark.parametrize("use_cache", [False, True])
def test_jumping_or_repeated_positions_match_sdpa(llama, use_cache):
    token_indices = torch.arange(150)
    jumping_positions = torch.where(token_indices < 60, token_indices, token_indices + 40)
    inputs = {"input_ids": draw_token_ids(1, 150), "use_cache": use_cache}
    for positions in (jumping_positions, token_indices + 7):
        inputs["position_ids"] = positions.unsqueeze(0)
        expected = compute_logits(llama, **inputs)
        with cab_hf.cab(llama, FULL_BUDGET_CONFIG):
            torch.testing.assert_close(compute_logits(llama, **inputs), expected, **TOLERANCE)


@parametrize_family
@pytest.mark.parametrize(
    "generate_options",
    [
        pytest.param({}, id="dynamic"),
        pytest.param({"cache_implementation": "static"}, id="static"),
        pytest.param({"prefill_chunk_size": 64}, id="chunked"),
        pytest.param({"prefill_chunk_size": 50}, id="odd-chunks"),
        pytest.param({"num_beams": 2}, id="beams"),
    ],
)
@pytest.mark.parametrize("num_padding_tokens", [0, 21])
def test_full_budget_generates_tokens_of_sdpa(family, generate_options, num_padding_tokens):
    if (
        family == "llama4"
        and "cache_implementation" in generate_options
        and is_transformers_before("5.24")
    ):
        pytest.skip("this transformers makes no mask of chunks for a static cache")
    model = make_tiny_model(family)
    ids, mask = pad_left(draw_token_ids(2, 130), num_padding_tokens)
    mask = mask.clone()
    mask[1, : num_padding_tokens + 10] = 1 if not num_padding_tokens else 0
    generate_options = {"max_new_tokens": 4, "do_sample": False, **generate_options}
    expected = model.generate(ids, attention_mask=mask, **generate_options)
    cab_hf.apply_cab(model, FULL_BUDGET_CONFIG)
    assert (
        model.generate(ids, attention_mask=mask, **generate_options).tolist() == expected.tolist()
    )


PUBLISHED_CONFIGS = [
    CabConfig.published(0.6, curvature, query_block=32, key_block=16, min_length=0)
    for curvature in ("forman", "additive")
]


@pytest.mark.parametrize(
    "config", [SPARSE_CONFIG, *PUBLISHED_CONFIGS], ids=["sparse", "forman", "additive"]
)
@pytest.mark.parametrize(
    "changed_slice", [slice(200, 201), slice(224, 320)], ids=["one", "the-rest"]
)
def test_changed_tokens_leave_earlier_query_blocks_unchanged(llama, config, changed_slice):
    """Assert bit-identical logits in query blocks before the first changed token."""
    ids = draw_token_ids(1, 320)
    changed_ids = ids.clone()
    changed_ids[0, changed_slice] = (ids[0, changed_slice] + 1) % 60 + 3
    with cab_hf.cab(llama, config):
        original_logits, changed_logits = (
            compute_logits(llama, input_ids=ids),
            compute_logits(llama, input_ids=changed_ids),
        )
    block_start = changed_slice.start // config.query_block * config.query_block
    assert torch.equal(original_logits[:, :block_start], changed_logits[:, :block_start])
    assert not torch.equal(
        original_logits[:, changed_slice.start :], changed_logits[:, changed_slice.start :]
    )


@pytest.mark.parametrize(
    "boundary_argument", ["position_ids", "position_ids with a cache", "cu_seq_lens"]
)
def test_packed_logits_equal_single_document_logits(llama, boundary_argument):
    document_lengths = (170, 33, 240)
    documents = [
        draw_token_ids(1, document_length, seed=document_length)
        for document_length in document_lengths
    ]
    positions = make_packed_position_ids(document_lengths)
    inputs = {
        "input_ids": torch.cat(documents, 1),
        "use_cache": boundary_argument.endswith("cache"),
    }
    inputs["position_ids"] = positions
    if boundary_argument == "cu_seq_lens":
        cumulative_lengths = torch.tensor([0, *document_lengths]).cumsum(0).to(torch.int32)
        inputs |= {"cu_seq_lens_q": cumulative_lengths, "cu_seq_lens_k": cumulative_lengths}
        # position ids do not restart at documents: only the cumulative lengths define documents
        inputs["position_ids"] = torch.arange(sum(document_lengths)).unsqueeze(0)
    document_starts = [0, 170, 203]
    with cab_hf.cab(llama, SPARSE_CONFIG):
        packed_logits = compute_logits(llama, **inputs)[0].split(document_lengths)
        for document, document_start, actual in zip(
            documents, document_starts, packed_logits, strict=True
        ):
            first_position = document_start if boundary_argument == "cu_seq_lens" else 0
            document_positions = torch.arange(
                first_position, first_position + document.shape[1]
            ).unsqueeze(0)
            expected = compute_logits(llama, input_ids=document, position_ids=document_positions)[0]
            torch.testing.assert_close(actual, expected, **TOLERANCE)


ONES_MASK = {"attention_mask": torch.ones(2, 150, dtype=torch.int64)}
MASK_AND_CACHE_INPUTS = {
    "mask": ONES_MASK | {"use_cache": False},
    "cache": {"use_cache": True},
    "mask-and-cache": ONES_MASK | {"use_cache": True},
}
# model types that pass position ids to mask functions only, not to attention layers
POSITION_IDS_IN_MASK_ONLY_TYPES = [
    "llama4_text",
    "gpt_bigcode",
    "persimmon",
    "ctrl",
    "moshi",
    "fuyu",
    "whisper",
]


@pytest.mark.parametrize(
    "cache_and_mask_inputs", MASK_AND_CACHE_INPUTS.values(), ids=MASK_AND_CACHE_INPUTS
)
@pytest.mark.parametrize("model_type", mark_slow_except(POSITION_IDS_IN_MASK_ONLY_TYPES, 0, 1))
def test_layers_without_position_ids_separate_documents(model_type, cache_and_mask_inputs):
    model = cab_hf.apply_cab(make_model_of_type(model_type), FULL_BUDGET_CONFIG)
    ids = draw_token_ids(2, 150) + FIRST_REGULAR_TOKEN
    packed_logits = compute_logits(
        model,
        input_ids=ids,
        position_ids=make_packed_position_ids((70, 80)),
        **cache_and_mask_inputs,
    )
    expected = compute_logits(model, input_ids=ids[:, 70:], use_cache=False)
    torch.testing.assert_close(packed_logits[:, 70:], expected, **TOLERANCE)


@torch.no_grad()
def test_model_without_position_ids_separates_documents():
    model = make_model_of_type("granitemoehybrid", layer_types=["full_attention"] * 4)
    cab_hf.apply_cab(model, FULL_BUDGET_CONFIG)
    ids = draw_token_ids(1, 150) + FIRST_REGULAR_TOKEN
    packed_inputs = {"position_ids": make_packed_position_ids((70, 80)), "use_cache": False}
    expected = compute_logits(model, input_ids=ids[:, 70:], use_cache=False)
    torch.testing.assert_close(
        compute_logits(model, input_ids=ids, **packed_inputs)[:, 70:], expected, **TOLERANCE
    )


@pytest.mark.parametrize(
    ("cumulative_lengths", "document_lengths"),
    [
        pytest.param([0, 60, 150], [(60, 90), (60, 90)], id="ends-of-one-row"),
        pytest.param([0, 60, 150, 190, 250, 300], [(60, 90), (40, 60, 50)], id="ends-of-all-rows"),
    ],
)
def test_cumulative_lengths_separate_documents_of_a_batch(
    llama, cumulative_lengths, document_lengths
):
    ids, positions = draw_token_ids(2, 150), torch.arange(150)
    cumulative_lengths = torch.tensor(cumulative_lengths, dtype=torch.int32)
    with cab_hf.cab(llama, SPARSE_CONFIG):
        logits = compute_logits(
            llama, input_ids=ids, cu_seq_lens_q=cumulative_lengths, cu_seq_lens_k=cumulative_lengths
        )
        for row_ids, row_logits, row_lengths in zip(ids, logits, document_lengths, strict=True):
            documents = zip(
                row_ids.split(row_lengths),
                positions.split(row_lengths),
                row_logits.split(row_lengths),
                strict=True,
            )
            for document, document_positions, actual in documents:
                inputs = {"input_ids": document[None], "position_ids": document_positions[None]}
                torch.testing.assert_close(actual, compute_logits(llama, **inputs)[0], **TOLERANCE)


@pytest.mark.parametrize("row_lengths", [(150,), (150, 192), (128, 150)], ids=str)
def test_last_chunk_below_query_block_is_dense(one_layer_llama, row_lengths):
    """A chunk shorter than a query block is dense, as steps of assisted decoding must be."""
    max_length, compared_row = max(row_lengths), row_lengths.index(150)
    ids = draw_token_ids(len(row_lengths), max_length)
    mask = torch.stack([torch.arange(max_length) < row_length for row_length in row_lengths])
    with (
        cab_hf.cab(one_layer_llama, SPARSE_CONFIG, redundancy=0.0, dense_tail_blocks=0),
        torch.no_grad(),
    ):
        prefill_logits = one_layer_llama(ids[[compared_row], :150]).logits
        cache = one_layer_llama(ids[:, :128], attention_mask=mask[:, :128]).past_key_values
        actual = one_layer_llama(ids[:, 128:], attention_mask=mask, past_key_values=cache).logits
    # in a model of one layer, cached keys do not depend on attention, so that dense logits are the
    # expected ones
    dense_logits = compute_logits(one_layer_llama, input_ids=ids[[compared_row], :150])
    torch.testing.assert_close(actual[compared_row, :22], dense_logits[0, 128:], **TOLERANCE)
    assert not torch.allclose(dense_logits[0, 128:], prefill_logits[0, 128:], atol=1e-3)


def test_chunks_of_whole_query_blocks_equal_one_prefill_without_curvature(llama):
    """Turn off curvature and dense tail, because these two depend on where chunks end."""
    ids = draw_token_ids(1, 328)
    with cab_hf.cab(llama, SPARSE_CONFIG, redundancy=0.0, dense_tail_blocks=0), torch.no_grad():
        expected = llama(ids).logits
        cache, chunk_logits = None, []
        for chunk_ids in ids.split(96, dim=1):
            out = llama(chunk_ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            chunk_logits.append(out.logits)
    torch.testing.assert_close(torch.cat(chunk_logits, 1), expected, **TOLERANCE)


def train_and_record_losses(model, num_steps=20):
    """Train ``model`` on random tokens, and return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    step_losses = []
    for step in range(num_steps):
        ids = draw_token_ids(2, 96, seed=step)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(loss.item())
    return torch.tensor(step_losses)


def test_full_budget_training_losses_match_dense():
    dense_model = make_tiny_model()
    cab_model = cab_hf.apply_cab(copy.deepcopy(dense_model), FULL_BUDGET_CONFIG)
    expected = train_and_record_losses(dense_model)
    assert expected[-1] < expected[0]
    torch.testing.assert_close(train_and_record_losses(cab_model), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("family", ["llama", "granite-swa"])
def test_gradient_checkpointing_gives_the_same_gradients(family):
    ids = draw_token_ids(2, 200)
    model = cab_hf.apply_cab(make_tiny_model(family), SPARSE_CONFIG).train()
    expected = compute_gradients(model, ids)
    model.gradient_checkpointing_enable()
    for actual, expected_gradient in zip(compute_gradients(model, ids), expected, strict=True):
        torch.testing.assert_close(actual, expected_gradient)


def test_unselected_keys_get_no_gradient(llama):
    """Backpropagate from the last query: only tokens of its selected blocks get a gradient."""
    model = copy.deepcopy(llama)
    cab_hf.apply_cab(
        model, CabConfig.published(0.9, "none", query_block=32, key_block=16, min_length=0)
    )
    embeddings = model.get_input_embeddings()(draw_token_ids(1, 320)).detach().requires_grad_()
    # keep one layer, because tokens that are not selected would get gradients through other layers
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    out = model(inputs_embeds=embeddings, use_cache=False).logits
    out[0, -1].sum().backward()
    has_gradient = embeddings.grad[0].abs().sum(-1).unflatten(0, (-1, 16)).sum(-1) > 0
    assert has_gradient[-1]
    assert not has_gradient.all()


@pytest.mark.parametrize(
    "config_fields",
    [
        pytest.param({}, id="sparse"),
        pytest.param({"mass_threshold": 0.08}, id="fewer"),
        pytest.param({"min_length": 1000}, id="exact"),
        pytest.param({"query_block": 512}, id="decode"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
@pytest.mark.parametrize("num_padding_tokens", [0, 37])
def test_output_is_contiguous(monkeypatch, family, config_fields, num_padding_tokens):
    """Check contiguity, because AFMoE and JetMoE call `view` on the output of attention."""
    attention_results = []
    model = cab_hf.apply_cab(make_tiny_model(family), FULL_BUDGET_CONFIG, **config_fields)
    attend = AttentionInterface._global_mapping["cab"]

    def record_result(module, q, k, v, mask, **options):
        attention_results.append(attend(module, q, k, v, mask, **options))
        return attention_results[-1]

    monkeypatch.setitem(AttentionInterface._global_mapping, "cab", record_result)
    ids, mask = pad_left(draw_token_ids(2, 150), num_padding_tokens)
    compute_logits(model, input_ids=ids, attention_mask=mask)
    assert len(attention_results) == 3 and all(out.is_contiguous() for out, _ in attention_results)


@pytest.mark.parametrize(
    ("class_prefix", "model_fields"),
    [
        pytest.param("Phimoe", {"sliding_window": 40, "num_local_experts": 2}, id="phimoe"),
        pytest.param("Mixtral", {"sliding_window": 40, "num_local_experts": 2}, id="mixtral"),
        pytest.param("Starcoder2", {"sliding_window": 40}, id="starcoder2"),
        pytest.param("Bart", {"decoder_layers": 2, "d_model": 48}, id="bart-decoder"),
        pytest.param("JetMoe", {"num_local_experts": 2, "kv_channels": 16}, id="jetmoe"),
    ],
)
@pytest.mark.parametrize("implementation", ["cab", "cab_dense"])
def test_windows_and_masks_unknown_to_the_layer_are_applied(
    class_prefix, model_fields, implementation
):
    """Test windows and masks that cab_hf must find without an attribute of the attention layer."""
    config = getattr(transformers, f"{class_prefix}Config")(**MODEL_SIZES | model_fields)
    torch.manual_seed(0)
    model = getattr(transformers, f"{class_prefix}ForCausalLM")(config).eval()
    ids, mask = pad_left(draw_token_ids(2, 120), 21)
    expected = compute_logits(model, input_ids=ids, attention_mask=mask)
    cab_hf.apply_cab(model, FULL_BUDGET_CONFIG)
    model.set_attn_implementation(implementation)
    actual = compute_logits(model, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], **TOLERANCE)
    expected_text = (
        "sliding window of 40 tokens" if "sliding_window" in model_fields else "engine gather"
    )
    if implementation == "cab":
        assert expected_text in cab_hf.describe(model, tokens=120)


def test_sequence_classification_with_right_padding():
    model = make_tiny_model(model_class=LlamaForSequenceClassification)
    ids = draw_token_ids(2, 120)
    ids[0, -40:] = 0
    mask = (ids != 0).long()
    expected = compute_logits(model, input_ids=ids, attention_mask=mask)
    cab_hf.apply_cab(model, FULL_BUDGET_CONFIG)
    torch.testing.assert_close(
        compute_logits(model, input_ids=ids, attention_mask=mask), expected, **TOLERANCE
    )


def test_set_attn_implementation_switches_at_run_time():
    model = make_tiny_model()
    ids = draw_token_ids(1, 200)
    expected = compute_logits(model, input_ids=ids)
    model.config.cab_config = SPARSE_CONFIG.to_dict()
    model.set_attn_implementation("cab")
    assert not torch.allclose(compute_logits(model, input_ids=ids), expected, atol=1e-3)
    model.set_attn_implementation("sdpa")
    assert torch.equal(compute_logits(model, input_ids=ids), expected)


@pytest.mark.parametrize("implementation", ["cab", "cab_dense"])
def test_wrapped_function_accepts_positional_arguments(llama, monkeypatch, implementation):
    model, ids = cab_hf.apply_cab(copy.deepcopy(llama), SPARSE_CONFIG), draw_token_ids(1, 200)
    model.set_attn_implementation(implementation)
    expected = compute_logits(model, input_ids=ids)
    attend = AttentionInterface()[implementation]

    def attend_positionally(module, q, k, v, attention_mask, dropout=0.0, scaling=None, **kwargs):
        return attend(module, q, k, v, attention_mask, dropout, scaling, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, implementation, attend_positionally)
    assert torch.equal(compute_logits(model, input_ids=ids), expected)


def test_float32_queries_of_adapters_are_cast_to_model_dtype():
    model = cab_hf.apply_cab(make_tiny_model().to(torch.bfloat16), SPARSE_CONFIG)

    class Adapter(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).float()

    for layer in model.model.layers:
        q_proj = layer.self_attn.q_proj
        adapter = Adapter(q_proj.in_features, q_proj.out_features, bias=False, dtype=torch.bfloat16)
        adapter.load_state_dict(q_proj.state_dict())
        layer.self_attn.q_proj = adapter
    assert torch.isfinite(compute_logits(model, input_ids=draw_token_ids(1, 150))).all()


def test_blockwise_dense_matches_sdpa_with_one_plan_for_all_layers(monkeypatch):
    """Test the path of GPUs for large heads and masks, with the reference engine on a CPU."""
    model = make_tiny_model()
    ids = draw_token_ids(2, 300)
    mask = torch.ones_like(ids)
    mask[0, :33] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        model.set_attn_implementation("cab_dense")
        monkeypatch.setattr(
            engines, "choose_exact_attention", lambda work, *lengths: engines.REFERENCE
        )
        causal_mock = Mock(wraps=BlockPlan.causal)
        monkeypatch.setattr(BlockPlan, "causal", causal_mock)
        actual = model(input_ids=ids, attention_mask=mask).logits
    assert causal_mock.call_count == 1
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], **TOLERANCE)
