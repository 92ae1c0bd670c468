"""Properties of attention that hold for random padding, packing, chunks and budgets.

By default there are 2,000 fixed cases, of which `make test` uses 500. ``CASES=20000`` draws 20,000
new cases.
"""

import os
from typing import NamedTuple

import torch
from budget import EPS
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
    int(os.environ.get(name, n)) for name, n in (("CASES", 0), ("FIXED_CASES", 2000))
)
BLOCKS = ((16, 16), (32, 16), (64, 16), (48, 16), (32, 32), (16, 32), (16, 48), (32, 64))
# allowed difference of equivalent computations, relative to the largest output
ROUNDING_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
# the calling layer: its RoPE makes predictors score half of the channels of large heads
LAYER = LlamaAttention(LlamaConfig(hidden_size=16, num_attention_heads=1, num_hidden_layers=1), 0)
FULL_BUDGET = {"mass_threshold": 0.0, "max_density": 1.0}


def hypothesis_settings(share):
    """Return hypothesis settings whose number of examples is ``share`` of all cases."""
    return settings(
        max_examples=int((NUM_CASES or NUM_FIXED_CASES) * share),
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

    def draw(self, batch, length):
        """Return random q, k and v [B, H, N, D] with the strides of [B, N, H, D].

        q and k are doubled, so that the masses of blocks differ.
        """
        generator = torch.Generator().manual_seed(self.seed)

        def normal(heads):
            x = torch.randn(batch, length, heads, self.dim, generator=generator)
            return x.to(self.dtype).transpose(1, 2)

        return 2 * normal(self.num_heads), 2 * normal(self.num_kv_heads), normal(self.num_kv_heads)


class Features(NamedTuple):
    """Attention features: window in tokens, seed of random sinks, and soft cap; None: without."""

    window: int | None = None
    sinks: int | None = None
    softcap: float | None = None

    def arguments(self, heads, dtype):
        """Return the arguments ``softcap`` and ``sinks`` of an attention function."""
        arguments = {"softcap": self.softcap}
        if self.sinks is not None:
            generator = torch.Generator().manual_seed(self.sinks)
            arguments["sinks"] = torch.randn(heads, generator=generator).to(dtype)
        return arguments


class Row(NamedTuple):
    """Numbers of padding tokens (left, in the middle, right) and document lengths of a row."""

    left: int
    hole: int
    right: int
    lengths: tuple[int, ...]

    @property
    def tokens(self):
        """Return the number of tokens without padding."""
        return sum(self.lengths)

    def make_doc_ids(self):
        """Return the document id of each slot, [N]; -1 for padding."""
        doc_ids = torch.repeat_interleave(torch.tensor(self.lengths))
        middle = self.tokens // 2

        def make_padding(count):
            return torch.full((count,), -1)

        pieces = (
            make_padding(self.left),
            doc_ids[:middle],
            make_padding(self.hole),
            doc_ids[middle:],
        )
        return torch.cat([*pieces, make_padding(self.right)])


class Batch(NamedTuple):
    """A batch of packed and padded documents, and how its documents are passed to attention."""

    doc_ids: torch.Tensor  # [B, N], rows as in `Row.make_doc_ids`
    boundary_argument: str  # arguments that describe the documents; see `draw_batches`

    @property
    def arguments(self):
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

    def visible_pairs(self, window=None):
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
    """Draw a `Features`."""
    return Features(
        window=draw(st.sampled_from((None, None, 1, 20, 70))),
        sinks=draw(st.one_of(st.none(), st.integers(0, 2**16))),
        softcap=draw(st.sampled_from((None, None, 5.0, 50.0))),
    )


@st.composite
def draw_batches(draw, max_tokens=120):
    """Draw a `Batch` of one or two rows with up to ``max_tokens`` tokens."""
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        num_tokens = draw(st.integers(1, max_tokens))
        cut_positions = draw(st.lists(st.integers(0, num_tokens), max_size=3))
        if draw(st.booleans()):
            # add a document of one token
            cut_positions += [min(cut + 1, num_tokens) for cut in cut_positions[:1]]
        ends = sorted({*cut_positions, num_tokens} - {0})
        lengths = tuple(b - a for a, b in zip([0, *ends], ends, strict=False))
        padding = st.one_of(st.just(0), st.integers(0, 40))
        rows.append(Row(draw(padding), draw(padding), draw(padding), lengths))
    row_doc_ids = [row.make_doc_ids() for row in rows]
    length = max(map(len, row_doc_ids))
    # pad all rows to the length of the longest row, all on the left or all on the right
    is_left_padded = draw(st.booleans())
    padded_doc_ids = [
        F.pad(x, (length - len(x), 0) if is_left_padded else (0, length - len(x)), value=-1)
        for x in row_doc_ids
    ]
    return Batch(
        torch.stack(padded_doc_ids),
        draw(st.sampled_from(("positions", "positions of the mask", "positions, ones", "lengths"))),
    )


@st.composite
def draw_config(draw, **fixed):
    """Draw a `CabConfig`; ``fixed`` are fields that are not drawn."""
    query_block, key_block = draw(st.sampled_from(BLOCKS))
    fields = {
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
    return CabConfig.reading({**fields, **fixed})


def call_cab(
    config,
    q,
    k,
    v,
    num_cached=0,
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
        num_cached: number of cached keys before the queries.
        padding_mask: padding mask, bool [B, N_k], True for tokens; None: no padding mask is passed.
        positions: position ids [B, N]; None: not passed.
        cumulative_lengths: cumulative lengths of documents; None: not passed.
        is_sparse: False for "cab_dense".
        is_position_in_mask: True to pass position ids to the mask function, and not to the layer.
        window: sliding window in tokens; None: no window.
        sinks, softcap: sinks of heads and soft cap of logits; None: without.
    """
    LAYER.config.cab_config = config.to_dict()
    LAYER.config.num_attention_heads = q.shape[1]
    if is_position_in_mask:
        record_positions(positions)
        positions = None
    mask = cab_mask(
        q.shape[0],
        q.shape[2],
        k.shape[2],
        q_offset=num_cached,
        attention_mask=padding_mask,
        local_size=window,
    )
    function = cab_attention if is_sparse else cab_dense_attention
    fields = {
        "position_ids": positions,
        "cu_seq_lens_q": cumulative_lengths,
        "cu_seq_lens_k": cumulative_lengths,
    }
    fields |= {"s_aux": sinks, "softcap": softcap}
    return function(LAYER, q, k, v, attention_mask=mask, **fields)[0]


def compute_masked_attention(q, k, v, is_visible, sinks=None, softcap=None):
    """Return attention [B, N, H, D] under the mask ``is_visible``, bool [B, 1 or H, N_q, N_k].

    The output of queries without keys is 0.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    has_no_keys = ~is_visible.any(-1, keepdim=True)
    if sinks is None and softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=is_visible | has_no_keys)
    else:
        wide_dtype = torch.promote_types(q.dtype, torch.float32)
        logits = (q @ k.mT).to(wide_dtype) * q.shape[-1] ** -0.5
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~(is_visible | has_no_keys), -torch.inf)
        if sinks is not None:
            sink_logits = sinks.to(wide_dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sink_logits], dim=-1)
        out = logits.softmax(-1)[..., : k.shape[2]].to(q.dtype) @ v
    return out.masked_fill(has_no_keys, 0.0).transpose(1, 2)


def assert_within_error_budget(actual, q, k, v, is_visible, is_compared, **features):
    """Assert that ``actual`` is within the error budget: twice the error of plain PyTorch.

    Args:
        actual: output of `call_cab`.
        q, k, v, is_visible, features: arguments of `compute_masked_attention`.
        is_compared: bool [B, N], tokens that are compared.
    """
    exact_out = compute_masked_attention(
        q.double(), k.double(), v.double(), is_visible=is_visible, **features
    )
    plain_out = compute_masked_attention(q, k, v, is_visible=is_visible, **features)
    assert actual.dtype == q.dtype and torch.isfinite(actual).all()
    error, plain_error = (
        (x.double() - exact_out)[is_compared].abs().max() for x in (actual, plain_out)
    )
    assert error <= 2 * (plain_error + EPS[q.dtype] * exact_out.abs().max())


def assert_equal_up_to_rounding(actual, expected, v):
    """Assert that two outputs of attention over the values ``v`` are equal up to rounding.

    Each computation rounds the outputs and the probabilities, whose products with v are summed.
    The allowed difference is therefore relative to the outputs and to v.
    """
    largest = max(1.0, (float(expected.abs().max()) + float(v.abs().max())) / 2)
    assert (actual.double() - expected.double()).abs().max() <= ROUNDING_TOLERANCE[
        expected.dtype
    ] * largest


@hypothesis_settings(0.25)
@given(st.data())
def test_full_budget_equals_masked_attention(data):
    """Compare "cab" with mass threshold 0, and "cab_dense", with attention under a token mask."""
    heads, batch, features = (
        data.draw(draw_heads()),
        data.draw(draw_batches()),
        data.draw(draw_features()),
    )
    config = data.draw(draw_config(**FULL_BUDGET))
    num_rows, length = batch.doc_ids.shape
    q, k, v = heads.draw(num_rows, length)
    logit_arguments, is_sparse = (
        features.arguments(heads.num_heads, heads.dtype),
        data.draw(st.booleans()),
    )
    out = call_cab(
        config,
        q,
        k,
        v,
        **batch.arguments,
        **logit_arguments,
        is_sparse=is_sparse,
        window=features.window,
    )
    is_visible = batch.visible_pairs(features.window)
    assert_within_error_budget(
        out, q, k, v, is_visible=is_visible, is_compared=batch.doc_ids >= 0, **logit_arguments
    )


@hypothesis_settings(0.3)
@given(st.data())
def test_padded_and_packed_sequences_equal_single_sequences(data):
    """Compare each document of a padded and packed batch with a call for the document alone."""
    heads, batch = data.draw(draw_heads()), data.draw(draw_batches())
    predictor = data.draw(st.sampled_from(("rows",) * 5 + ("streaming", "oracle")))
    config = data.draw(draw_config(predictor=predictor))
    num_rows, length = batch.doc_ids.shape
    q, k, v = heads.draw(num_rows, length)
    logit_arguments = data.draw(draw_features()).arguments(heads.num_heads, heads.dtype)
    out = call_cab(config, q, k, v, **batch.arguments, **logit_arguments)
    for row, slots in batch.iterate_documents():
        document_q, document_k, document_v = (x[row : row + 1, :, slots] for x in (q, k, v))
        expected = call_cab(config, document_q, document_k, document_v, **logit_arguments)
        assert_equal_up_to_rounding(out[row : row + 1, slots], expected, document_v)


@hypothesis_settings(0.1)
@given(st.data())
def test_nan_key_reaches_all_queries_that_see_it(data):
    """Set a key to NaN: queries that may attend to it become NaN; other rows and heads do not."""
    heads, batch = data.draw(draw_heads()), data.draw(draw_batches())
    predictor = data.draw(st.sampled_from(("rows", "rows", "frc")))
    config = data.draw(draw_config(predictor=predictor))
    num_rows, length = batch.doc_ids.shape
    q, k, v = heads.draw(num_rows, length)
    row, slot = data.draw(st.sampled_from((batch.doc_ids >= 0).nonzero().tolist()))
    head = data.draw(st.integers(0, heads.num_kv_heads - 1))
    k[row, head, slot, data.draw(st.integers(0, heads.dim - 1))] = torch.nan
    out = call_cab(config, q, k, v, **batch.arguments)
    row_output = out[row].unflatten(1, (heads.num_kv_heads, -1))
    is_visible = batch.visible_pairs()[row, 0]
    # leave out queries with a single key, for which PyTorch may return 0 instead of NaN
    assert row_output[is_visible[:, slot] & (is_visible.sum(-1) > 1), head].isnan().all()
    assert out[torch.arange(len(out)) != row].isfinite().all()
    assert row_output[:, torch.arange(heads.num_kv_heads) != head].isfinite().all()


@hypothesis_settings(0.15)
@given(st.data())
def test_output_equals_attention_under_token_mask_of_plan(data):
    """Compare with the plan as a token mask, which must also contain the forced blocks."""
    heads, length = data.draw(draw_heads()), data.draw(st.integers(1, 160))
    config = data.draw(draw_config(min_length=0))
    q, k, v = heads.draw(1, length)
    ranges = KeyRanges.causal(1, length, length, "cpu")
    call = LayerContext(ranges, heads.dim**-0.5, 0, channels=slow_channels(LAYER, heads.dim))
    plan = make_predictor(config)(q, k, call)
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


@hypothesis_settings(0.1)
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
    slots = torch.arange(total_length)
    padding_mask = torch.stack(
        [
            (slots >= left) & (slots < left + n)
            for left, n in zip(left_paddings, lengths, strict=True)
        ]
    )
    q, k, v = heads.draw(len(lengths), total_length)
    cache, chunk_outputs = DynamicCache(), []
    for start in range(0, total_length, chunk_tokens):
        token_slice = slice(start, min(start + chunk_tokens, total_length))
        keys, values = cache.update(k[:, :, token_slice], v[:, :, token_slice], 0)
        chunk_outputs.append(
            call_cab(
                config,
                q[:, :, token_slice],
                keys,
                values,
                num_cached=start,
                padding_mask=padding_mask[:, : token_slice.stop],
            )
        )
    actual = torch.cat(chunk_outputs, dim=1)
    for row, (left, length) in enumerate(zip(left_paddings, lengths, strict=True)):
        row_q, row_k, row_v = (x[row : row + 1, :, left : left + length] for x in (q, k, v))
        sparse_out = call_cab(config, row_q, row_k, row_v)
        dense_out = call_cab(config, row_q, row_k, row_v, is_sparse=False)
        # number of queries of this row in the last chunk
        num_last_chunk = length - max(0, (left + length - 1) // chunk_tokens * chunk_tokens - left)
        dense_start = length - num_last_chunk if num_last_chunk < query_block else length
        expected = torch.cat((sparse_out[:, :dense_start], dense_out[:, dense_start:]), dim=1)
        assert_equal_up_to_rounding(actual[row : row + 1, left : left + length], expected, row_v)


@hypothesis_settings(0.2)
@given(st.data())
def test_chunks_at_full_budget_equal_masked_attention(data):
    heads = data.draw(draw_heads())
    config = data.draw(draw_config(**FULL_BUDGET))
    row = Row(data.draw(st.integers(0, 40)), 0, 0, (data.draw(st.integers(1, 120)),))
    batch = Batch(torch.stack([row.make_doc_ids()]), "positions, ones")
    total_length = batch.doc_ids.shape[1]
    q, k, v = heads.draw(1, total_length)
    is_sparse, features = data.draw(st.booleans()), data.draw(draw_features())
    logit_arguments = features.arguments(heads.num_heads, heads.dtype)
    cache, chunk_outputs, start = DynamicCache(), [], 0
    while start < total_length:
        stop = min(total_length, start + data.draw(st.integers(1, 90)))
        keys, values = cache.update(k[:, :, start:stop], v[:, :, start:stop], 0)
        real = batch.doc_ids[:, :stop] >= 0
        call_arguments = {
            "num_cached": start,
            "padding_mask": real,
            "is_sparse": is_sparse,
            "window": features.window,
        }
        chunk_outputs.append(
            call_cab(config, q[:, :, start:stop], keys, values, **call_arguments, **logit_arguments)
        )
        start = stop
    is_visible = batch.visible_pairs(features.window)
    assert_within_error_budget(
        torch.cat(chunk_outputs, 1),
        q,
        k,
        v,
        is_visible=is_visible,
        is_compared=batch.doc_ids >= 0,
        **logit_arguments,
    )
