"""Baselines of passkey and fidelity: fitted budgets, evicted keys, and restored models."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from rivals import SMALL_BLOCKS, eager_probabilities, random_qk
from tiny import tiny_model, tokens
from transformers import GenerationConfig

from cab_hf.eval import methods
from cab_hf.eval.methods import METHODS, Cell, base, blocks, caches, last_queries
from cab_hf.eval.teacher_forcing import predict_after_prompt
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

LENGTH = 600
CELL = Cell(SMALL_BLOCKS, 0.4, LENGTH)
# the same cell for top-p methods and a model of two layers. The realised density of a config is
# the number after the colon in the name of its predictor
TOP_P_CELL = replace(
    CELL, realised=lambda config: float(config.predictor.partition(":")[2]), layers=2
)
MATCHED = [name for name, method in METHODS.items() if method.matched]


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=2)


@pytest.fixture(autouse=True)
def lower_minimum_of_flexprefill(monkeypatch):
    """Lower `MIN_TOKENS`, with which FlexPrefill would select all blocks of a short sequence."""
    monkeypatch.setattr(last_queries, "MIN_TOKENS", 32)


@pytest.fixture(scope="module")
def ids():
    return tokens(1, LENGTH)


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


def generate(model, ids, tokens=4):
    """Return the prompt ``ids`` followed by ``tokens`` greedily generated tokens."""
    greedy = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)


class Decoding:
    """One attention layer that computes a prompt and decode steps by an eviction method.

    Attributes:
        method: the eviction method.
        prompt, steps: number of tokens of the prompt, and number of decode steps.
        kept, shares, module: arguments of `EvictingMethod.attend`, which updates ``kept`` and
            ``shares`` for the layer ``module``.
        q, k, v: queries, keys and values of all tokens.
        out: output of the prompt.
        probabilities: attention probabilities of the prompt, [1, H, prompt, prompt].
    """

    def __init__(self, method, prompt, steps):
        self.method, self.prompt, self.steps = method, prompt, steps
        self.kept, self.shares, self.module = {}, {}, torch.nn.Module()
        self.q, self.k = random_qk(prompt + steps)
        self.v = random_qk(prompt + steps, seed=1)[1]
        self.out = self.attend(slice(prompt), prompt)
        q, k = self.q[:, :, :prompt], self.k[:, :, :prompt]
        self.probabilities = eager_probabilities(q, k, 0.25)
        assert self.shares == {self.module: min(1, method.tokens / prompt)}

    def attend(self, queries, num_keys):
        """Return the method's output for a slice of queries over the first ``num_keys`` keys."""
        k, v = self.k[:, :, :num_keys], self.v[:, :, :num_keys]
        attend = partial(self.method.attend, self.kept, self.shares)
        out, _ = attend(self.module, self.q[:, :, queries], k, v, attention_mask=None, scaling=0.25)
        return out

    def check_steps(self, alive, after):
        """Compare every decode step with attention over the keys that are still in the cache.

        Args:
            alive: for each KV head, the positions of the keys in the cache after the prompt.
            after: function of a KV head, the positions of its keys and their attention weights in a
                step. It returns the positions that remain after the step.
        """
        for at in range(self.prompt, self.prompt + self.steps):
            out = self.attend(slice(at, at + 1), at + 1)
            for head in range(2):
                positions, group = [*alive[head], at], slice(3 * head, 3 * head + 3)
                keys, values = self.k[0, head, positions], self.v[0, head, positions]
                weights = (self.q[0, group, at] @ keys.T * 0.25).softmax(-1)
                torch.testing.assert_close(out[0, 0, group], weights @ values)
                alive[head] = after(head, positions, weights)


def test_h2o_evicts_keys_with_least_attention():
    """The expected keys of each KV head are computed from complete attention probabilities."""
    tokens, prompt = 11, 40
    decoding = Decoding(caches.H2O(tokens), prompt, steps=12)
    received = decoding.probabilities.sum(2).unflatten(1, (2, 3)).sum(2)[0].tolist()

    def evict(head, alive):
        while len(alive) > tokens:
            old = alive[: len(alive) - tokens // 2]
            alive.remove(min(old, key=received[head].__getitem__))
        return alive

    def after(head, positions, weights):
        received[head].append(0.0)
        for position, mass in zip(positions, weights.sum(0).tolist(), strict=True):
            received[head][position] += mass
        return evict(head, positions)

    decoding.check_steps([evict(head, list(range(prompt))) for head in range(2)], after)


@pytest.mark.parametrize(("tokens", "prompt"), [(45, 100), (20, 100), (90, 40)])
def test_snapkv_keeps_keys_attended_by_prompt_end(tokens, prompt):
    """The expected keys of each KV head are computed from complete attention probabilities."""
    decoding = Decoding(caches.SnapKV(tokens), prompt, steps=3)
    expected = decoding.probabilities @ decoding.v[:, :, :prompt].repeat_interleave(3, dim=1)
    torch.testing.assert_close(decoding.out.transpose(1, 2), expected)

    window = min(32, tokens, prompt)
    mass = decoding.probabilities[0, :, -window:, : prompt - window].sum(1)
    alive = []
    for row in mass.unflatten(0, (2, 3)).sum(1).tolist():
        # the mean over five neighbours counts zeros outside of the row
        pooled = [sum(row[max(0, at - 2) : at + 3]) / 5 for at in range(len(row))]
        best = sorted(range(len(row)), key=lambda at: -pooled[at])[: max(0, tokens - window)]
        alive.append([*sorted(best), *range(prompt - window, prompt)])
    # SnapKV evicts no decoded tokens
    decoding.check_steps(alive, lambda head, positions, weights: positions)


@pytest.mark.parametrize(
    ("method", "sinks", "tokens"),
    [(caches.StreamingCache(50), 4, 50), (caches.StreamingCache(LENGTH), 0, LENGTH)],
    ids=["after a dense prefill", "all keys"],
)
def test_streaming_decode_attends_to_sinks_and_window(model, ids, method, sinks, tokens):
    prompt = 560
    with method.applied(model):
        steps = predict_after_prompt(model, ids, prompt, cache=method.cache(model))
    row, column = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    is_kept = (column < sinks) | (column >= row - (tokens - sinks)) | (row < prompt)
    with torch.no_grad():
        masked = model(ids, attention_mask=((column <= row) & is_kept)[None, None]).logits
    torch.testing.assert_close(steps, masked[:, prompt - 1 : -1], atol=1e-4, rtol=1e-4)


def test_streaming_cache_drops_keys_outside_prefill_window(model, ids):
    streaming = methods.Streaming.fit(replace(CELL, budget=0.2))
    cache = streaming.cache(model)
    with streaming.applied(model):
        predict_after_prompt(model, ids, 560, cache=cache)
    num_kept = (streaming.config.local_blocks + 1) * streaming.config.key_block
    assert {layer.keys.shape[2] for layer in cache.layers} == {num_kept}
    # `predict_after_prompt` does not pass the last token to the model
    assert cache.get_seq_length() == LENGTH - 1


def test_step_tokens_count_index_bytes(model):
    """The index of a key counts as its bytes / (2 * 16 * 4), the bytes of K and V of a token."""
    config = SMALL_BLOCKS.changed(sparse_decode=True, decode_tokens=128)
    sparse = methods.Cab(config)
    with sparse.applied(model):
        cache = sparse.cache(model)
        model(torch.zeros(1, 3, dtype=torch.long), past_key_values=cache)
    index = cache.layers[0].index
    index_share = index.nbytes / index.scales.numel() / (2 * 16 * 4)
    assert sparse.step_tokens(model, LENGTH) == 128 + LENGTH * index_share
    # a sequence below 4 * decode_tokens is decoded densely
    assert sparse.step_tokens(model, 511) == 511
    share = methods.Cab(config.changed(decode_tokens=0.1))
    assert share.step_tokens(model, LENGTH) == pytest.approx(60 + LENGTH * index_share)
    one_dense = methods.Cab(config.changed(dense_layers=(1,)))
    per_layer = 128 + LENGTH * index_share, LENGTH
    assert one_dense.step_tokens(model, LENGTH) == pytest.approx(sum(per_layer) / 2)
    assert methods.Cab(SMALL_BLOCKS).step_tokens(model, LENGTH) == LENGTH
    assert caches.H2O(50).step_tokens(model, LENGTH) == 50


EVICTION_METHODS = [name for name, method in METHODS.items() if method.dense_prefill]


@pytest.mark.parametrize("name", EVICTION_METHODS)
def test_eviction_cache_has_dense_prefill_and_sparse_decode(name, model, ids):
    before = logits(model, ids)
    dense_answer = generate(model, ids)
    with METHODS[name](2 * LENGTH).applied(model):
        torch.testing.assert_close(logits(model, ids), before, atol=1e-4, rtol=1e-4)
        assert torch.equal(generate(model, ids), dense_answer)
    first_token = dense_answer[:, LENGTH : LENGTH + 1]

    def second_token_logits():
        cache = model(ids, use_cache=True).past_key_values
        return model(first_token, past_key_values=cache).logits

    with torch.no_grad():
        dense = second_token_logits()
        with METHODS[name](30).applied(model):
            assert (second_token_logits() - dense).abs().max() > 1e-2


@pytest.mark.parametrize("name", EVICTION_METHODS)
def test_eviction_cache_with_padding_or_chunks_raises(name, model, ids):
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    with METHODS[name](300).applied(model), torch.no_grad():
        with pytest.raises(ValueError, match="without padding"):
            model(ids, attention_mask=mask)
        cache = model(ids[:, :300], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=f"{name} must get a whole prompt"):
            model(ids[:, 300:], past_key_values=cache)


def test_fp8_without_torchao_raises(monkeypatch):
    monkeypatch.setattr(base, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="torchao is not installed"):
        METHODS["fp8"].fit(CELL)


@pytest.mark.parametrize("name", METHODS)
def test_method_restores_model_after_error(name, model, ids, halved_for_fp8):
    before = logits(model, ids)
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        METHODS[name].fit(TOP_P_CELL).applied(model) as densities,
    ):
        generate(model, ids)
        assert densities()
        raise RuntimeError("in the middle")
    assert model.config._attn_implementation == "sdpa"
    assert model.config.cab_config is None
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("name", MATCHED)
def test_matched_method_reaches_budget(name, model, ids):
    budget = 0.3
    # the published recipe has blocks of 64 tokens, so its density has coarser steps
    tolerance = 0.06 if name == "published" else 0.03
    # dense tail rows would exceed the budget of such a short sequence
    cell = replace(CELL, config=replace(CELL.config, dense_tail_blocks=0), budget=budget)
    cell = replace(cell, realised=methods.realised_on(model, ids[0].tolist()))
    with METHODS[name].fit(cell).applied(model) as densities:
        logits(model, ids)
        assert densities() == pytest.approx([budget] * 2, abs=tolerance)
    with pytest.raises(ValueError, match="budget"):
        METHODS[name].fit(replace(TOP_P_CELL, budget=None))


@pytest.mark.parametrize("name", ["xattention_fitted", "flexprefill_fitted", "mean_pooled"])
def test_fitted_share_is_restored_from_log(name):
    config = METHODS[name].fit(TOP_P_CELL).config
    predictor = name.removesuffix("_fitted")
    assert config.predictor == f"{predictor}:0.4"
    assert blocks.logged_config(config.to_dict()) == config
    assert blocks.logged_config({**config.to_dict(), "predictor": predictor}).predictor == predictor
    with pytest.raises(ValueError, match=f"cell must measure the density .* {name}, got"):
        METHODS[name].fit(CELL)


@pytest.mark.parametrize("name", METHODS)
def test_dense_tail_applies_to_methods_matched_by_blocks(name, halved_for_fp8):
    cell = replace(TOP_P_CELL, config=replace(SMALL_BLOCKS, dense_tail_blocks=3))
    config = getattr(METHODS[name].fit(cell), "config", None)
    if config is None or name == "trianglemix":  # TriangleMix has its own last queries
        return
    without_tail = ("streaming", "published", "xattention", "xattention_16", "flexprefill")
    assert config.dense_tail_blocks == (0 if name in without_tail else 3)


def test_trianglemix_has_dense_and_triangle_layers(model, ids, monkeypatch):
    monkeypatch.setattr(blocks, "WINDOW", 70)
    monkeypatch.setattr(blocks, "LAST_QUERIES", 40)
    method = blocks.TriangleMix.fit(TOP_P_CELL)
    assert method.config.dense_layers == (0,)
    with method.applied(model) as densities:
        logits(model, ids)
        first, second = densities()
    assert first is None and 0 < second < 1
    call = LayerContext(KeyRanges.causal(1, 320, 320, "cpu"), 0.25, layer=1)
    plan = make_predictor(method.config)(*random_qk(320), call)
    rows, block = torch.arange(10)[:, None], torch.arange(20)
    # the windows of 70 tokens of the queries in a 32-query block cover seven blocks of 16 keys. The
    # last 40 queries are in two query blocks
    expected = (block == 0) | (block > 2 * rows + 1 - 7) | (rows >= 8)
    expected &= block <= 2 * rows + 1
    assert torch.equal(plan.to_dense()[0], expected.expand(6, -1, -1))
    query, key = torch.arange(320)[:, None], torch.arange(320)
    window = (key <= query) & (key > query - 70)
    selected = plan.to_dense()[0, 0].repeat_interleave(32, 0).repeat_interleave(16, 1)
    assert selected[window].all()
    # the method adds the dense_layers of the config to its own
    cell = replace(TOP_P_CELL, config=replace(SMALL_BLOCKS, dense_layers=(5,)), layers=7)
    assert blocks.TriangleMix.fit(cell).config.dense_layers == (0, 1, 2, 5)
    with pytest.raises(ValueError, match="cell must contain the number of layers"):
        blocks.TriangleMix.fit(CELL)


def test_densities_are_reset_per_sample(model, ids):
    with METHODS["random"].fit(CELL).applied(model) as densities:
        logits(model, ids)
        first = densities()
        logits(model, ids)
        assert densities() == first
        assert densities() == [None, None]
