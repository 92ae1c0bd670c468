"""Properties of attention that hold for random padding, packing, chunks and budgets.

By default there are 2,000 fixed cases, of which `make test` uses 500. ``CASES=20000`` draws 20,000
new cases.
"""

import os
from typing import NamedTuple

import torch
from budget import DTYPE_EPS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention
from valid_plan import assert_valid_plan

from cab_hf import CabConfig
from cab_hf.attention import cab_attention, cab_dense_attention
from cab_hf.call.hook import cab_mask
from cab_hf.call.scope import record_positions
from cab_hf.eval import methods  # noqa: F401  it registers rivals
from cab_hf.hf.rotary import slow_channels
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

NUM_CASES, NUM_FIXED_CASES = (
    int(os.environ.get(variable, default))
    for variable, default in (("CASES", 0), ("FIXED_CASES", 2000))
)
BLOCK_SIZES = ((16, 16), (32, 16), (64, 16), (48, 16), (32, 32), (16, 32), (16, 48), (32, 64))
# allowed difference of equivalent computations, relative to the largest output
ROUNDING_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
# the layer that calls attention: because it uses RoPE, predictors score half of the channels of
# large heads
CALLING_LAYER = LlamaAttention(
    LlamaConfig(hidden_size=16, num_attention_heads=1, num_hidden_layers=1), 0
)
FULL_BUDGET_FIELDS = {"mass_threshold": 0.0, "max_density": 1.0}


def make_hypothesis_settings(share_of_cases):
    """Return hypothesis settings whose number of examples is ``share_of_cases`` of all cases."""
    return settings(
        max_examples=int((NUM_CASES or NUM_FIXED_CASES) * share_of_cases),
        derandomize=not NUM_CASES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


class Heads(NamedTuple):
    """Numbers of query and KV heads, head dim, dtype, and seed of q, k and v."""

    num_heads: int
    num_kv_heads: int
    dim: int
    dtype: torch.dtype
    seed: int

    def draw_qkv(self, batch, length):
        """Return random q, k and v [B, H, N, D] with the strides of [B, N, H, D].

        q and k are doubled, so that the masses of blocks differ.
        """
        generator = torch.Generator().manual_seed(self.seed)

        def draw_normal(num_heads):
            x = torch.randn(batch, length, num_heads, self.dim, generator=generator)
            return x.to(self.dtype).transpose(1, 2)

        return (
            2 * draw_normal(self.num_heads),
            2 * draw_normal(self.num_kv_heads),
            draw_normal(self.num_kv_heads),
        )


class AttentionFeatures(NamedTuple):
    """Attention features: window in tokens, seed of random sinks, and soft cap; None: without."""

    window: int | None = None
    sink_seed: int | None = None
    softcap: float | None = None

    def make_logit_arguments(self, num_heads, dtype):
        """Return the arguments ``softcap`` and ``sinks`` of an attention function."""
        arguments = {"softcap": self.softcap}
        if self.sink_seed is not None:
            generator = torch.Generator().manual_seed(self.sink_seed)
            arguments["sinks"] = torch.randn(num_heads, generator=generator).to(dtype)
        return arguments


class RowLayout(NamedTuple):
    """Numbers of padding tokens (left, in the middle, right) and document lengths of a row."""

    left_padding: int
    middle_padding: int
    right_padding: int
    document_lengths: tuple[int, ...]

    @property
    def num_tokens(self):
        """Return the number of tokens without padding."""
        return sum(self.document_lengths)

    def make_doc_ids(self):
        """Return the document id of each slot, [N]; -1 for padding."""
        doc_ids = torch.repeat_interleave(torch.tensor(self.document_lengths))
        middle_token = self.num_tokens // 2

        def make_padding(num_padding_tokens):
            return torch.full((num_padding_tokens,), -1)

        doc_id_pieces = (
            make_padding(self.left_padding),
            doc_ids[:middle_token],
            make_padding(self.middle_padding),
            doc_ids[middle_token:],
        )
        return torch.cat([*doc_id_pieces, make_padding(self.right_padding)])


class BatchLayout(NamedTuple):
    """A batch of packed and padded documents, and how its documents are passed to attention."""

    doc_ids: torch.Tensor  # [B, N], rows as in `RowLayout.make_doc_ids`
    boundary_argument: str  # arguments that describe the documents; see `draw_batches`

    @property
    def call_arguments(self):
        """Return the arguments for `call_cab` that describe padding and documents."""
        is_token = self.doc_ids >= 0
        # treat padding as part of the previous document
        filled_doc_ids = torch.where(is_token, self.doc_ids, 0).cummax(-1).values
        is_document_start = F.pad(
            filled_doc_ids[:, 1:] != filled_doc_ids[:, :-1], (1, 0), value=True
        )
        arguments = (
            {}
            if is_token.all() and self.boundary_argument != "positions, ones"
            else {"padding_mask": is_token}
        )
        arguments["is_position_in_mask"] = self.boundary_argument == "positions of the mask"
        if self.boundary_argument == "lengths":
            cumulative_lengths = [
                *is_document_start.flatten().nonzero().flatten().tolist(),
                is_document_start.numel(),
            ]
            return arguments | {
                "cumulative_lengths": torch.tensor(cumulative_lengths, dtype=torch.int32)
            }
        token_rank = is_token.cumsum(-1) - 1
        first_rank = torch.where(is_document_start & is_token, token_rank, 0)
        for row in range(len(is_token)):
            for document in range(int(filled_doc_ids[row].max()) + 1):
                is_in_document = self.doc_ids[row] == document
                first_rank[row, is_in_document] = int(token_rank[row][is_in_document].min())
        positions = torch.where(
            is_token, token_rank - first_rank, torch.arange(is_token.shape[1]).flip(0)
        )
        return arguments | {"positions": positions}

    def make_visibility_mask(self, window=None):
        """Return the token mask of dense attention, bool [B, 1, N, N].

        A query may attend to earlier tokens of its document inside the window, and to itself.
        """
        is_same_document = self.doc_ids.unsqueeze(-1) == self.doc_ids.unsqueeze(-2)
        is_visible = (is_same_document & (self.doc_ids >= 0).unsqueeze(-2)).tril()
        if window is not None:
            is_visible = is_visible.triu(1 - window)
        return is_visible.unsqueeze(1)

    def iterate_documents(self):
        """Yield (row, indices of its tokens) of each document."""
        for row, row_doc_ids in enumerate(self.doc_ids):
            for doc_id in range(int(row_doc_ids.max()) + 1):
                yield row, (row_doc_ids == doc_id).nonzero().flatten()


@st.composite
def draw_heads(draw):
    """Draw a `Heads`."""
    kv_heads = draw(st.integers(1, 2))
    return Heads(
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        dim=draw(st.sampled_from((8, 16, 16, 64))),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def draw_features(draw):
    """Draw an `AttentionFeatures`."""
    return AttentionFeatures(
        window=draw(st.sampled_from((None, None, 1, 20, 70))),
        sink_seed=draw(st.one_of(st.none(), st.integers(0, 2**16))),
        softcap=draw(st.sampled_from((None, None, 5.0, 50.0))),
    )


@st.composite
def draw_batches(draw, max_tokens=120):
    """Draw a `BatchLayout` of one or two rows with up to ``max_tokens`` tokens."""
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        num_tokens = draw(st.integers(1, max_tokens))
        cut_positions = draw(st.lists(st.integers(0, num_tokens), max_size=3))
        if draw(st.booleans()):
            # add a document of one token
            cut_positions += [
                min(cut_position + 1, num_tokens) for cut_position in cut_positions[:1]
            ]
        document_ends = sorted({*cut_positions, num_tokens} - {0})
        lengths = tuple(
            document_end - document_start
            for document_start, document_end in zip(
                [0, *document_ends], document_ends, strict=False
            )
        )
        padding_lengths = st.one_of(st.just(0), st.integers(0, 40))
        rows.append(
            RowLayout(draw(padding_lengths), draw(padding_lengths), draw(padding_lengths), lengths)
        )
    row_doc_ids = [row.make_doc_ids() for row in rows]
    length = max(map(len, row_doc_ids))
    # pad all rows to the length of the longest row, all on the left or all on the right
    is_left_padded = draw(st.booleans())
    padded_doc_ids = [
        F.pad(
            doc_ids,
            (length - len(doc_ids), 0) if is_left_padded else (0, length - len(doc_ids)),
            value=-1,
        )
        for doc_ids in row_doc_ids
    ]
    return BatchLayout(
        torch.stack(padded_doc_ids),
        draw(st.sampled_from(("positions", "positions of the mask", "positions, ones", "lengths"))),
    )


@st.composite
def draw_config(draw, **fixed_fields):
    """Draw a `CabConfig`; ``fixed_fields`` are fields that are not drawn."""
    query_block, key_block = draw(st.sampled_from(BLOCK_SIZES))
    drawn_fields = {
        "query_block": query_block,
        "key_block": key_block,
        "sink_blocks": draw(st.integers(0, 2)),
        "local_blocks": draw(st.integers(0, 3)),
        "dense_tail_blocks": draw(st.integers(0, 2)),
        "outlier_queries": draw(st.sampled_from((0, 2, 4, 16))),
        "typical_queries": draw(st.sampled_from((1, 4, 16))),
        "typical_key_stride": draw(st.sampled_from((1, 4, 16))),
        "mass_threshold": draw(st.sampled_from((0.0, 0.02, 0.1, 0.3))),
        "share_threshold": draw(st.sampled_from((0.1, 0.5, 1.0))),
        "sparsity": draw(st.sampled_from((0.3, 0.8))),
        "max_density": draw(st.sampled_from((1.0, 0.5))),
        "min_length": draw(st.sampled_from((0, 0, 0, 40, 80, 120))),
    }
    return CabConfig.reading({**drawn_fields, **fixed_fields})


def call_cab(
    config,
    q,
    k,
    v,
    num_cached_keys=0,
    padding_mask=None,
    positions=None,
    cumulative_lengths=None,
    is_sparse=True,
    is_position_in_mask=False,
    window=None,
    sinks=None,
    softcap=None,
):
    """Call "cab" or "cab_dense" as a model's layer does, and return the output [B, N, H, D].

    Args:
        config: the CabConfig.
        q, k, v: [B, H, N, D].
        num_cached_keys: number of cached keys before the queries.
        padding_mask: padding mask, bool [B, N_k], True for tokens; None: no padding mask is passed.
        positions: position ids [B, N]; None: not passed.
        cumulative_lengths: cumulative lengths of documents; None: not passed.
        is_sparse: False for "cab_dense".
        is_position_in_mask: True to pass position ids to the mask function, and not to the layer.
        window: sliding window in tokens; None: no window.
        sinks, softcap: sinks of heads and soft cap of logits; None: without.
    """
    CALLING_LAYER.config.cab_config = config.to_dict()
    CALLING_LAYER.config.num_attention_heads = q.shape[1]
    if is_position_in_mask:
        record_positions(positions)
        positions = None
    mask = cab_mask(
        q.shape[0],
        q.shape[2],
        k.shape[2],
        q_offset=num_cached_keys,
        attention_mask=padding_mask,
        local_size=window,
    )
    attend = cab_attention if is_sparse else cab_dense_attention
    attention_options = {
        "position_ids": positions,
        "cu_seq_lens_q": cumulative_lengths,
        "cu_seq_lens_k": cumulative_lengths,
    }
    attention_options |= {"s_aux": sinks, "softcap": softcap}
    return attend(CALLING_LAYER, q, k, v, attention_mask=mask, **attention_options)[0]


def compute_masked_attention(q, k, v, is_visible, sinks=None, softcap=None):
    """Return attention [B, N, H, D] under the mask ``is_visible``, bool [B, 1 or H, N_q, N_k].

    The output of queries without keys is 0.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    has_no_keys = ~is_visible.any(-1, keepdim=True)
    if sinks is None and softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=is_visible | has_no_keys)
    else:
        logit_dtype = torch.promote_types(q.dtype, torch.float32)
        logits = (q @ k.mT).to(logit_dtype) * q.shape[-1] ** -0.5
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~(is_visible | has_no_keys), -torch.inf)
        if sinks is not None:
            sink_logits = sinks.to(logit_dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sink_logits], dim=-1)
        out = logits.softmax(-1)[..., : k.shape[2]].to(q.dtype) @ v
    return out.masked_fill(has_no_keys, 0.0).transpose(1, 2)


def assert_within_error_budget(actual, q, k, v, is_visible, is_compared, **logit_arguments):
    """Assert that ``actual`` is within the error budget: twice the error of plain PyTorch.

    Args:
        actual: output of `call_cab`.
        q, k, v, is_visible, logit_arguments: arguments of `compute_masked_attention`.
        is_compared: bool [B, N], tokens that are compared.
    """
    exact_out = compute_masked_attention(
        q.double(), k.double(), v.double(), is_visible=is_visible, **logit_arguments
    )
    plain_out = compute_masked_attention(q, k, v, is_visible=is_visible, **logit_arguments)
    assert actual.dtype == q.dtype and torch.isfinite(actual).all()
    error, plain_error = (
        (x.double() - exact_out)[is_compared].abs().max() for x in (actual, plain_out)
    )
    assert error <= 2 * (plain_error + DTYPE_EPS[q.dtype] * exact_out.abs().max())


def assert_equal_up_to_rounding(actual, expected, v):
    """Assert that two outputs of attention over the values ``v`` are equal up to rounding.

    Each computation rounds the outputs and the probabilities, whose products with v are summed.
    The allowed difference is therefore relative to the outputs and to v.
    """
    largest_value = max(1.0, (float(expected.abs().max()) + float(v.abs().max())) / 2)
    assert (actual.double() - expected.double()).abs().max() <= ROUNDING_TOLERANCE[
        expected.dtype
    ] * largest_value


@make_hypothesis_settings(0.25)
@given(st.data())
def test_full_budget_equals_masked_attention(data):
    """Compare "cab" with mass threshold 0, and "cab_dense", with attention under a token mask."""
    heads, batch, features = (
        data.draw(draw_heads()),
        data.draw(draw_batches()),
        data.draw(draw_features()),
    )
    config = data.draw(draw_config(**FULL_BUDGET_FIELDS))
    num_rows, length = batch.doc_ids.shape
    q, k, v = heads.draw_qkv(num_rows, length)
    logit_arguments, is_sparse = (
        features.make_logit_arguments(heads.num_heads, heads.dtype),
        data.draw(st.booleans()),
    )
    out = call_cab(
        config,
        q,
        k,
        v,
        **batch.call_arguments,
        **logit_arguments,
        is_sparse=is_sparse,
        window=features.window,
    )
    is_visible = batch.make_visibility_mask(features.window)
    assert_within_error_budget(
        out, q, k, v, is_visible=is_visible, is_compared=batch.doc_ids >= 0, **logit_arguments
    )


@make_hypothesis_settings(0.3)
@given(st.data())
def test_padded_and_packed_sequences_equal_single_sequences(data):
    """Compare each document of a padded and packed batch with a call for the document alone."""
    heads, batch = data.draw(draw_heads()), data.draw(draw_batches())
    predictor = data.draw(st.sampled_from(("rows",) * 5 + ("streaming", "oracle")))
    config = data.draw(draw_config(predictor=predictor))
    num_rows, length = batch.doc_ids.shape
    q, k, v = heads.draw_qkv(num_rows, length)
    logit_arguments = data.draw(draw_features()).make_logit_arguments(heads.num_heads, heads.dtype)
    out = call_cab(config, q, k, v, **batch.call_arguments, **logit_arguments)
    for row, document_slots in batch.iterate_documents():
        document_q, document_k, document_v = (
            x[row : row + 1, :, document_slots] for x in (q, k, v)
        )
        expected = call_cab(config, document_q, document_k, document_v, **logit_arguments)
        assert_equal_up_to_rounding(out[row : row + 1, document_slots], expected, document_v)


@make_hypothesis_settings(0.1)
@given(st.data())
def test_nan_key_reaches_all_queries_that_see_it(data):
    """Set a key to NaN: queries that may attend to it become NaN; other rows and heads do not."""
    heads, batch = data.draw(draw_heads()), data.draw(draw_batches())
    predictor = data.draw(st.sampled_from(("rows", "rows", "frc")))
    config = data.draw(draw_config(predictor=predictor))
    num_rows, length = batch.doc_ids.shape
    q, k, v = heads.draw_qkv(num_rows, length)
    nan_row, nan_slot = data.draw(st.sampled_from((batch.doc_ids >= 0).nonzero().tolist()))
    nan_head = data.draw(st.integers(0, heads.num_kv_heads - 1))
    k[nan_row, nan_head, nan_slot, data.draw(st.integers(0, heads.dim - 1))] = torch.nan
    out = call_cab(config, q, k, v, **batch.call_arguments)
    row_output = out[nan_row].unflatten(1, (heads.num_kv_heads, -1))
    is_visible = batch.make_visibility_mask()[nan_row, 0]
    # leave out queries with a single key, for which PyTorch may return 0 instead of NaN
    assert row_output[is_visible[:, nan_slot] & (is_visible.sum(-1) > 1), nan_head].isnan().all()
    assert out[torch.arange(len(out)) != nan_row].isfinite().all()
    assert row_output[:, torch.arange(heads.num_kv_heads) != nan_head].isfinite().all()


@make_hypothesis_settings(0.15)
@given(st.data())
def test_output_equals_attention_under_token_mask_of_plan(data):
    """Compare with the plan as a token mask, which must also contain the forced blocks."""
    heads, length = data.draw(draw_heads()), data.draw(st.integers(1, 160))
    config = data.draw(draw_config(min_length=0))
    q, k, v = heads.draw_qkv(1, length)
    key_ranges = KeyRanges.causal(1, length, length, "cpu")
    layer_context = LayerContext(
        key_ranges, heads.dim**-0.5, 0, channels=slow_channels(CALLING_LAYER, heads.dim)
    )
    plan = make_predictor(config)(q, k, layer_context)
    assert_valid_plan(plan)
    is_visible = plan.token_mask()
    is_causal = torch.ones(length, length, dtype=torch.bool).tril()
    assert not (is_visible & ~is_causal).any()
    assert is_visible.diagonal(dim1=-2, dim2=-1).all()
    assert (is_visible | ~is_causal)[:, :, :, : config.sink_blocks * config.key_block].all()
    if length >= config.query_block:
        tail_start = max(0, length - config.dense_tail_blocks * config.query_block)
        assert torch.equal(
            is_visible[0, :, tail_start:],
            is_causal[tail_start:].expand_as(is_visible[0, :, tail_start:]),
        )
    else:
        # a sequence shorter than a query block is computed densely
        is_visible = is_causal[None, None]
    is_compared = torch.ones(1, length, dtype=torch.bool)
    assert_within_error_budget(
        call_cab(config, q, k, v), q, k, v, is_visible=is_visible, is_compared=is_compared
    )


@make_hypothesis_settings(0.1)
@given(st.data())
def test_chunks_of_whole_query_blocks_equal_one_prefill(data):
    """Compare chunked prefill without dense tail; a last chunk below a query block is dense."""
    heads = data.draw(draw_heads())
    config = data.draw(draw_config(dense_tail_blocks=0, min_length=0))
    query_block = config.query_block
    chunk_tokens = query_block * data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 160), min_size=1, max_size=2))
    # left padding of each row is a multiple of the query block, and may end inside a chunk
    left_paddings = [query_block * data.draw(st.integers(0, 2)) for _ in lengths]
    total_length = max(map(sum, zip(left_paddings, lengths, strict=True)))
    slot_indices = torch.arange(total_length)
    padding_mask = torch.stack(
        [
            (slot_indices >= left_padding) & (slot_indices < left_padding + row_length)
            for left_padding, row_length in zip(left_paddings, lengths, strict=True)
        ]
    )
    q, k, v = heads.draw_qkv(len(lengths), total_length)
    cache, chunk_outputs = DynamicCache(), []
    for chunk_start in range(0, total_length, chunk_tokens):
        chunk_slice = slice(chunk_start, min(chunk_start + chunk_tokens, total_length))
        cached_keys, cached_values = cache.update(k[:, :, chunk_slice], v[:, :, chunk_slice], 0)
        chunk_outputs.append(
            call_cab(
                config,
                q[:, :, chunk_slice],
                cached_keys,
                cached_values,
                num_cached_keys=chunk_start,
                padding_mask=padding_mask[:, : chunk_slice.stop],
            )
        )
    actual = torch.cat(chunk_outputs, dim=1)
    for row, (left_padding, length) in enumerate(zip(left_paddings, lengths, strict=True)):
        row_q, row_k, row_v = (
            x[row : row + 1, :, left_padding : left_padding + length] for x in (q, k, v)
        )
        sparse_out = call_cab(config, row_q, row_k, row_v)
        dense_out = call_cab(config, row_q, row_k, row_v, is_sparse=False)
        # number of queries of this row in the last chunk
        num_last_chunk_tokens = length - max(
            0, (left_padding + length - 1) // chunk_tokens * chunk_tokens - left_padding
        )
        dense_start = (
            length - num_last_chunk_tokens if num_last_chunk_tokens < query_block else length
        )
        expected = torch.cat((sparse_out[:, :dense_start], dense_out[:, dense_start:]), dim=1)
        assert_equal_up_to_rounding(
            actual[row : row + 1, left_padding : left_padding + length], expected, row_v
        )


@make_hypothesis_settings(0.2)
@given(st.data())
def test_chunks_at_full_budget_equal_masked_attention(data):
    heads = data.draw(draw_heads())
    config = data.draw(draw_config(**FULL_BUDGET_FIELDS))
    row = RowLayout(data.draw(st.integers(0, 40)), 0, 0, (data.draw(st.integers(1, 120)),))
    batch = BatchLayout(torch.stack([row.make_doc_ids()]), "positions, ones")
    total_length = batch.doc_ids.shape[1]
    q, k, v = heads.draw_qkv(1, total_length)
    is_sparse, features = data.draw(st.booleans()), data.draw(draw_features())
    logit_arguments = features.make_logit_arguments(heads.num_heads, heads.dtype)
    cache, chunk_outputs, chunk_start = DynamicCache(), [], 0
    while chunk_start < total_length:
        chunk_end = min(total_length, chunk_start + data.draw(st.integers(1, 90)))
        cached_keys, cached_values = cache.update(
            k[:, :, chunk_start:chunk_end], v[:, :, chunk_start:chunk_end], 0
        )
        padding_mask = batch.doc_ids[:, :chunk_end] >= 0
        call_arguments = {
            "num_cached_keys": chunk_start,
            "padding_mask": padding_mask,
            "is_sparse": is_sparse,
            "window": features.window,
        }
        chunk_outputs.append(
            call_cab(
                config,
                q[:, :, chunk_start:chunk_end],
                cached_keys,
                cached_values,
                **call_arguments,
                **logit_arguments,
            )
        )
        chunk_start = chunk_end
    is_visible = batch.make_visibility_mask(features.window)
    assert_within_error_budget(
        torch.cat(chunk_outputs, 1),
        q,
        k,
        v,
        is_visible=is_visible,
        is_compared=batch.doc_ids >= 0,
        **logit_arguments,
    )
