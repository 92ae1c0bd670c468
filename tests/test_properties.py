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
from valid_plan import require_valid

from cab_hf import CabConfig
from cab_hf.attention import cab_attention, cab_dense_attention
from cab_hf.call.hook import cab_mask
from cab_hf.call.scope import record_positions
from cab_hf.eval import methods  # noqa: F401  it registers rivals
from cab_hf.hf.rotary import slow_channels
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

CASES, FIXED = (int(os.environ.get(name, n)) for name, n in (("CASES", 0), ("FIXED_CASES", 2000)))
BLOCKS = ((16, 16), (32, 16), (64, 16), (48, 16), (32, 32), (16, 32), (16, 48), (32, 64))
# allowed difference of equivalent computations, relative to the largest output
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
# the calling layer: its RoPE makes predictors score half of the channels of large heads
LAYER = LlamaAttention(LlamaConfig(hidden_size=16, num_attention_heads=1, num_hidden_layers=1), 0)
EVERYTHING = {"mass_threshold": 0.0, "max_density": 1.0}


def cases(share):
    """Return hypothesis settings whose number of examples is ``share`` of all cases."""
    return settings(
        max_examples=int((CASES or FIXED) * share),
        derandomize=not CASES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


class Heads(NamedTuple):
    """Numbers of query and KV heads, head dim, dtype, and seed of q, k and v."""

    query: int
    key: int
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

        return 2 * normal(self.query), 2 * normal(self.key), normal(self.key)


class Features(NamedTuple):
    """Attention features: window in tokens, seed of random sinks, and soft cap; None: without."""

    window: int | None = None
    sinks: int | None = None
    softcap: float | None = None

    def arguments(self, heads, dtype):
        """Return the arguments ``softcap`` and ``sinks`` for `attend` and `masked`."""
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

    def document(self):
        """Return the document id of each slot, [N]; -1 for padding."""
        ids = torch.repeat_interleave(torch.tensor(self.lengths))
        middle = self.tokens // 2

        def padding(count):
            return torch.full((count,), -1)

        pieces = padding(self.left), ids[:middle], padding(self.hole), ids[middle:]
        return torch.cat([*pieces, padding(self.right)])


class Batch(NamedTuple):
    """A batch of packed and padded documents, and how its documents are passed to attention."""

    document: torch.Tensor  # [B, N], rows as in `Row.document`
    given_by: str  # arguments that describe the documents; see `batches`

    @property
    def arguments(self):
        """Return the arguments for `attend` that describe padding and documents."""
        real = self.document >= 0
        # treat padding as part of the previous document
        filled = torch.where(real, self.document, 0).cummax(-1).values
        begins = F.pad(filled[:, 1:] != filled[:, :-1], (1, 0), value=True)
        arguments = {} if real.all() and self.given_by != "positions, ones" else {"real": real}
        arguments["by_mask"] = self.given_by == "positions of the mask"
        if self.given_by == "lengths":
            ends = [*begins.flatten().nonzero().flatten().tolist(), begins.numel()]
            return arguments | {"ends": torch.tensor(ends, dtype=torch.int32)}
        rank = real.cumsum(-1) - 1
        first = torch.where(begins & real, rank, 0)
        for row in range(len(real)):
            for document in range(int(filled[row].max()) + 1):
                is_in_document = self.document[row] == document
                first[row, is_in_document] = int(rank[row][is_in_document].min())
        positions = torch.where(real, rank - first, torch.arange(real.shape[1]).flip(0))
        return arguments | {"positions": positions}

    def visible_pairs(self, window=None):
        """Return the token mask of dense attention, bool [B, 1, N, N].

        A query may attend to earlier tokens of its document inside the window, and to itself.
        """
        same = self.document.unsqueeze(-1) == self.document.unsqueeze(-2)
        visible = (same & (self.document >= 0).unsqueeze(-2)).tril()
        if window is not None:
            visible = visible.triu(1 - window)
        return visible.unsqueeze(1)

    def texts(self):
        """Yield (row, indices of its tokens) of each document."""
        for row, doc_ids in enumerate(self.document):
            for doc_id in range(int(doc_ids.max()) + 1):
                yield row, (doc_ids == doc_id).nonzero().flatten()


@st.composite
def heads(draw):
    """Draw a `Heads`."""
    kv_heads = draw(st.integers(1, 2))
    return Heads(
        query=kv_heads * draw(st.integers(1, 3)),
        key=kv_heads,
        dim=draw(st.sampled_from((8, 16, 16, 64))),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def features(draw):
    """Draw a `Features`."""
    return Features(
        window=draw(st.sampled_from((None, None, 1, 20, 70))),
        sinks=draw(st.one_of(st.none(), st.integers(0, 2**16))),
        softcap=draw(st.sampled_from((None, None, 5.0, 50.0))),
    )


@st.composite
def batches(draw, longest=120):
    """Draw a `Batch` of one or two rows with up to ``longest`` tokens."""
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        tokens = draw(st.integers(1, longest))
        cuts = draw(st.lists(st.integers(0, tokens), max_size=3))
        if draw(st.booleans()):
            # add a document of one token
            cuts += [min(cut + 1, tokens) for cut in cuts[:1]]
        ends = sorted({*cuts, tokens} - {0})
        lengths = tuple(b - a for a, b in zip([0, *ends], ends, strict=False))
        padding = st.one_of(st.just(0), st.integers(0, 40))
        rows.append(Row(draw(padding), draw(padding), draw(padding), lengths))
    documents = [row.document() for row in rows]
    length = max(map(len, documents))
    # pad all rows to the length of the longest row, all on the left or all on the right
    left = draw(st.booleans())
    padded = [
        F.pad(x, (length - len(x), 0) if left else (0, length - len(x)), value=-1)
        for x in documents
    ]
    return Batch(
        torch.stack(padded),
        draw(st.sampled_from(("positions", "positions of the mask", "positions, ones", "lengths"))),
    )


@st.composite
def budgets(draw, **fixed):
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


def attend(
    config,
    q,
    k,
    v,
    past=0,
    real=None,
    positions=None,
    ends=None,
    sparse=True,
    by_mask=False,
    window=None,
    sinks=None,
    softcap=None,
):
    """Call "cab" or "cab_dense" as a model's layer does, and return the output [B, N, H, D].

    Args:
        config: the CabConfig.
        q, k, v: [B, H, N, D].
        past: number of cached keys before the queries.
        real: padding mask, bool [B, N_k], True for tokens; None: no padding mask is passed.
        positions: position ids [B, N]; None: not passed.
        ends: cumulative lengths of documents; None: not passed.
        sparse: False for "cab_dense".
        by_mask: True to pass position ids to the mask function, and not to the layer.
        window: sliding window in tokens; None: no window.
        sinks, softcap: sinks of heads and soft cap of logits; None: without.
    """
    LAYER.config.cab_config = config.to_dict()
    LAYER.config.num_attention_heads = q.shape[1]
    if by_mask:
        record_positions(positions)
        positions = None
    mask = cab_mask(
        q.shape[0],
        q.shape[2],
        k.shape[2],
        q_offset=past,
        attention_mask=real,
        local_size=window,
    )
    function = cab_attention if sparse else cab_dense_attention
    fields = {"position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    fields |= {"s_aux": sinks, "softcap": softcap}
    return function(LAYER, q, k, v, attention_mask=mask, **fields)[0]


def masked(q, k, v, visible, sinks=None, softcap=None):
    """Return attention [B, N, H, D] under the mask ``visible``, bool [B, 1 or H, N_q, N_k].

    The output of queries without keys is 0.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    has_no_keys = ~visible.any(-1, keepdim=True)
    if sinks is None and softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | has_no_keys)
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        logits = (q @ k.mT).to(wide) * q.shape[-1] ** -0.5
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~(visible | has_no_keys), -torch.inf)
        if sinks is not None:
            column = sinks.to(wide).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, column], dim=-1)
        out = logits.softmax(-1)[..., : k.shape[2]].to(q.dtype) @ v
    return out.masked_fill(has_no_keys, 0.0).transpose(1, 2)


def assert_is(actual, q, k, v, visible, is_compared, **features):
    """Assert that ``actual`` is within the error budget: twice the error of plain PyTorch.

    Args:
        actual: output of `attend`.
        q, k, v, visible, features: arguments of `masked`.
        is_compared: bool [B, N], tokens that are compared.
    """
    exact = masked(q.double(), k.double(), v.double(), visible=visible, **features)
    plain = masked(q, k, v, visible=visible, **features)
    assert actual.dtype == q.dtype and torch.isfinite(actual).all()
    error, plain_error = ((x.double() - exact)[is_compared].abs().max() for x in (actual, plain))
    assert error <= 2 * (plain_error + EPS[q.dtype] * exact.abs().max())


def assert_same(actual, expected, v):
    """Assert that two outputs of attention over the values ``v`` are equal up to rounding.

    Each computation rounds the outputs and the probabilities, whose products with v are summed.
    The allowed difference is therefore relative to the outputs and to v.
    """
    largest = max(1.0, (float(expected.abs().max()) + float(v.abs().max())) / 2)
    assert (actual.double() - expected.double()).abs().max() <= ROUNDING[expected.dtype] * largest


@cases(0.25)
@given(st.data())
def test_full_budget_equals_masked_attention(data):
    """Compare "cab" with mass threshold 0, and "cab_dense", with attention under a token mask."""
    shape, batch, layer = data.draw(heads()), data.draw(batches()), data.draw(features())
    config = data.draw(budgets(**EVERYTHING))
    num_rows, length = batch.document.shape
    q, k, v = shape.draw(num_rows, length)
    arguments, sparse = layer.arguments(shape.query, shape.dtype), data.draw(st.booleans())
    out = attend(
        config, q, k, v, **batch.arguments, **arguments, sparse=sparse, window=layer.window
    )
    visible = batch.visible_pairs(layer.window)
    assert_is(out, q, k, v, visible=visible, is_compared=batch.document >= 0, **arguments)


@cases(0.3)
@given(st.data())
def test_padded_and_packed_sequences_equal_single_sequences(data):
    """Compare each document of a padded and packed batch with a call for the document alone."""
    shape, batch = data.draw(heads()), data.draw(batches())
    predictor = data.draw(st.sampled_from(("rows",) * 5 + ("streaming", "oracle")))
    config = data.draw(budgets(predictor=predictor))
    num_rows, length = batch.document.shape
    q, k, v = shape.draw(num_rows, length)
    arguments = data.draw(features()).arguments(shape.query, shape.dtype)
    out = attend(config, q, k, v, **batch.arguments, **arguments)
    for row, slots in batch.texts():
        own_q, own_k, own_v = (x[row : row + 1, :, slots] for x in (q, k, v))
        expected = attend(config, own_q, own_k, own_v, **arguments)
        assert_same(out[row : row + 1, slots], expected, own_v)


@cases(0.1)
@given(st.data())
def test_nan_key_reaches_all_queries_that_see_it(data):
    """Set a key to NaN: queries that may attend to it become NaN; other rows and heads do not."""
    shape, batch = data.draw(heads()), data.draw(batches())
    predictor = data.draw(st.sampled_from(("rows", "rows", "frc")))
    config = data.draw(budgets(predictor=predictor))
    num_rows, length = batch.document.shape
    q, k, v = shape.draw(num_rows, length)
    row, slot = data.draw(st.sampled_from((batch.document >= 0).nonzero().tolist()))
    head = data.draw(st.integers(0, shape.key - 1))
    k[row, head, slot, data.draw(st.integers(0, shape.dim - 1))] = torch.nan
    out = attend(config, q, k, v, **batch.arguments)
    row_output = out[row].unflatten(1, (shape.key, -1))
    visible = batch.visible_pairs()[row, 0]
    # leave out queries with a single key, for which PyTorch may return 0 instead of NaN
    assert row_output[visible[:, slot] & (visible.sum(-1) > 1), head].isnan().all()
    assert out[torch.arange(len(out)) != row].isfinite().all()
    assert row_output[:, torch.arange(shape.key) != head].isfinite().all()


@cases(0.15)
@given(st.data())
def test_output_equals_attention_under_token_mask_of_plan(data):
    """Compare with the plan as a token mask, which must also contain the forced blocks."""
    shape, length = data.draw(heads()), data.draw(st.integers(1, 160))
    config = data.draw(budgets(min_length=0))
    q, k, v = shape.draw(1, length)
    ranges = KeyRanges.causal(1, length, length, "cpu")
    call = LayerContext(ranges, shape.dim**-0.5, 0, channels=slow_channels(LAYER, shape.dim))
    plan = make_predictor(config)(q, k, call)
    require_valid(plan)
    visible = plan.token_mask()
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    assert not (visible & ~causal).any()
    assert visible.diagonal(dim1=-2, dim2=-1).all()
    assert (visible | ~causal)[:, :, :, : config.sink_blocks * config.key_block].all()
    if length >= config.query_block:
        tail = max(0, length - config.dense_tail_blocks * config.query_block)
        assert torch.equal(visible[0, :, tail:], causal[tail:].expand_as(visible[0, :, tail:]))
    else:
        # a sequence shorter than a query block is computed densely
        visible = causal[None, None]
    is_compared = torch.ones(1, length, dtype=torch.bool)
    assert_is(attend(config, q, k, v), q, k, v, visible=visible, is_compared=is_compared)


@cases(0.1)
@given(st.data())
def test_chunks_of_whole_query_blocks_equal_one_prefill(data):
    """Compare chunked prefill without dense tail; a last chunk below a query block is dense."""
    shape = data.draw(heads())
    config = data.draw(budgets(dense_tail_blocks=0, min_length=0))
    size = config.query_block
    chunk = size * data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 160), min_size=1, max_size=2))
    # left padding of each row is a multiple of the query block, and may end inside a chunk
    lefts = [size * data.draw(st.integers(0, 2)) for _ in lengths]
    total = max(map(sum, zip(lefts, lengths, strict=True)))
    slots = torch.arange(total)
    real = torch.stack(
        [(slots >= left) & (slots < left + n) for left, n in zip(lefts, lengths, strict=True)]
    )
    q, k, v = shape.draw(len(lengths), total)
    cache, chunk_outputs = DynamicCache(), []
    for start in range(0, total, chunk):
        tokens = slice(start, min(start + chunk, total))
        keys, values = cache.update(k[:, :, tokens], v[:, :, tokens], 0)
        chunk_outputs.append(
            attend(config, q[:, :, tokens], keys, values, past=start, real=real[:, : tokens.stop])
        )
    actual = torch.cat(chunk_outputs, dim=1)
    for row, (left, length) in enumerate(zip(lefts, lengths, strict=True)):
        own_q, own_k, own_v = (x[row : row + 1, :, left : left + length] for x in (q, k, v))
        sparse_out = attend(config, own_q, own_k, own_v)
        dense_out = attend(config, own_q, own_k, own_v, sparse=False)
        # number of queries of this row in the last chunk
        num_last = length - max(0, (left + length - 1) // chunk * chunk - left)
        border = length - num_last if num_last < size else length
        expected = torch.cat((sparse_out[:, :border], dense_out[:, border:]), dim=1)
        assert_same(actual[row : row + 1, left : left + length], expected, own_v)


@cases(0.2)
@given(st.data())
def test_chunks_at_full_budget_equal_masked_attention(data):
    shape = data.draw(heads())
    config = data.draw(budgets(**EVERYTHING))
    row = Row(data.draw(st.integers(0, 40)), 0, 0, (data.draw(st.integers(1, 120)),))
    batch = Batch(torch.stack([row.document()]), "positions, ones")
    total = batch.document.shape[1]
    q, k, v = shape.draw(1, total)
    sparse, layer = data.draw(st.booleans()), data.draw(features())
    arguments = layer.arguments(shape.query, shape.dtype)
    cache, chunk_outputs, start = DynamicCache(), [], 0
    while start < total:
        stop = min(total, start + data.draw(st.integers(1, 90)))
        keys, values = cache.update(k[:, :, start:stop], v[:, :, start:stop], 0)
        real = batch.document[:, :stop] >= 0
        call_arguments = {"past": start, "real": real, "sparse": sparse, "window": layer.window}
        chunk_outputs.append(
            attend(config, q[:, :, start:stop], keys, values, **call_arguments, **arguments)
        )
        start = stop
    visible = batch.visible_pairs(layer.window)
    assert_is(
        torch.cat(chunk_outputs, 1),
        q,
        k,
        v,
        visible=visible,
        is_compared=batch.document >= 0,
        **arguments,
    )
