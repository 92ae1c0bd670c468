"""Baselines of passkey and fidelity: fitted budgets, evicted keys, and restored models."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from rivals import SMALL_BLOCKS_CONFIG, compute_eager_probabilities, draw_qk
from tiny import draw_token_ids, make_tiny_model
from transformers import GenerationConfig

from cab_hf.eval import methods
from cab_hf.eval.methods import METHODS, Cell, base, blocks, caches, last_queries
from cab_hf.eval.teacher_forcing import predict_after_prompt
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

PROMPT_TOKENS = 600
FIT_CONDITIONS = Cell(SMALL_BLOCKS_CONFIG, 0.4, PROMPT_TOKENS)
# the same conditions for top-p methods and a model of two layers. The realised density of a config
# is the number after the colon in the name of its predictor
TOP_P_FIT_CONDITIONS = replace(
    FIT_CONDITIONS,
    measure_density=lambda config: float(config.predictor.partition(":")[2]),
    num_layers=2,
)
MATCHED_METHODS = [name for name, method in METHODS.items() if method.is_budget_matched]


@pytest.fixture(scope="module")
def model():
    return make_tiny_model(num_hidden_layers=2)


@pytest.fixture(autouse=True)
def lower_minimum_of_flexprefill(monkeypatch):
    """Lower `FLEXPREFILL_MIN_TOKENS`, with which short sequences would select all blocks."""
    monkeypatch.setattr(last_queries, "FLEXPREFILL_MIN_TOKENS", 32)


@pytest.fixture(scope="module")
def ids():
    return draw_token_ids(1, PROMPT_TOKENS)


@torch.no_grad()
def compute_logits(model, ids):
    return model(ids).logits


def generate(model, ids, num_tokens=4):
    """Return the prompt ``ids`` followed by ``num_tokens`` greedily generated tokens."""
    greedy_config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config)


class SimulatedDecode:
    """One attention layer that computes a prompt and decode steps by an eviction method.

    Attributes:
        method: the eviction method.
        num_prompt_tokens, num_steps: tokens of the prompt, and decode steps.
        kept, shares, module: arguments of `EvictingMethod.attend`, which updates ``kept`` and
            ``shares`` for the layer ``module``.
        q, k, v: queries, keys and values of all tokens.
        out: output of the prompt.
        probabilities: attention probabilities of the prompt, [1, H, T, T] with T prompt tokens.
    """

    def __init__(self, method, num_prompt_tokens, num_steps):
        self.method, self.num_prompt_tokens, self.num_steps = method, num_prompt_tokens, num_steps
        self.kept, self.shares, self.module = {}, {}, torch.nn.Module()
        self.q, self.k = draw_qk(num_prompt_tokens + num_steps)
        self.v = draw_qk(num_prompt_tokens + num_steps, seed=1)[1]
        self.out = self.attend(slice(num_prompt_tokens), num_prompt_tokens)
        q, k = self.q[:, :, :num_prompt_tokens], self.k[:, :, :num_prompt_tokens]
        self.probabilities = compute_eager_probabilities(q, k, 0.25)
        assert self.shares == {self.module: min(1, method.num_kept_tokens / num_prompt_tokens)}

    def attend(self, query_slice, num_keys):
        """Return the method's output for a slice of queries over the first ``num_keys`` keys."""
        k, v = self.k[:, :, :num_keys], self.v[:, :, :num_keys]
        attend_with_eviction = partial(self.method.attend, self.kept, self.shares)
        out, _ = attend_with_eviction(
            self.module, self.q[:, :, query_slice], k, v, attention_mask=None, scaling=0.25
        )
        return out

    def check_decode_steps(self, cached_positions, update_positions):
        """Compare every decode step with attention over the keys that are still in the cache.

        Args:
            cached_positions: positions of the keys in the cache after the prompt, per KV head.
            update_positions: function of a KV head, the positions of its keys and their attention
                weights in a step. It returns the positions that remain after the step.
        """
        for position in range(self.num_prompt_tokens, self.num_prompt_tokens + self.num_steps):
            step_output = self.attend(slice(position, position + 1), position + 1)
            for head in range(2):
                positions, query_heads = (
                    [*cached_positions[head], position],
                    slice(3 * head, 3 * head + 3),
                )
                keys, values = self.k[0, head, positions], self.v[0, head, positions]
                weights = (self.q[0, query_heads, position] @ keys.T * 0.25).softmax(-1)
                torch.testing.assert_close(step_output[0, 0, query_heads], weights @ values)
                cached_positions[head] = update_positions(head, positions, weights)


def test_h2o_evicts_keys_with_least_attention():
    """The expected keys of each KV head are computed from complete attention probabilities."""
    num_kept_tokens, num_prompt_tokens = 11, 40
    decoding = SimulatedDecode(caches.H2O(num_kept_tokens), num_prompt_tokens, num_steps=12)
    received_mass = decoding.probabilities.sum(2).unflatten(1, (2, 3)).sum(2)[0].tolist()

    def evict_to_budget(head, cached_positions):
        while len(cached_positions) > num_kept_tokens:
            evictable_positions = cached_positions[: len(cached_positions) - num_kept_tokens // 2]
            cached_positions.remove(min(evictable_positions, key=received_mass[head].__getitem__))
        return cached_positions

    def add_mass_and_evict(head, positions, weights):
        received_mass[head].append(0.0)
        for position, mass in zip(positions, weights.sum(0).tolist(), strict=True):
            received_mass[head][position] += mass
        return evict_to_budget(head, positions)

    decoding.check_decode_steps(
        [evict_to_budget(head, list(range(num_prompt_tokens))) for head in range(2)],
        add_mass_and_evict,
    )


@pytest.mark.parametrize(("num_kept_tokens", "num_prompt_tokens"), [(45, 100), (20, 100), (90, 40)])
def test_snapkv_keeps_keys_attended_by_prompt_end(num_kept_tokens, num_prompt_tokens):
    """The expected keys of each KV head are computed from complete attention probabilities."""
    decoding = SimulatedDecode(caches.SnapKV(num_kept_tokens), num_prompt_tokens, num_steps=3)
    expected = decoding.probabilities @ decoding.v[:, :, :num_prompt_tokens].repeat_interleave(
        3, dim=1
    )
    torch.testing.assert_close(decoding.out.transpose(1, 2), expected)

    num_window_tokens = min(32, num_kept_tokens, num_prompt_tokens)
    mass = decoding.probabilities[
        0, :, -num_window_tokens:, : num_prompt_tokens - num_window_tokens
    ].sum(1)
    cached_positions = []
    for key_mass in mass.unflatten(0, (2, 3)).sum(1).tolist():
        # the mean over five neighbours counts zeros outside of the row
        pooled_mass = [
            sum(key_mass[max(0, position - 2) : position + 3]) / 5
            for position in range(len(key_mass))
        ]
        best_positions = sorted(range(len(key_mass)), key=lambda position: -pooled_mass[position])[
            : max(0, num_kept_tokens - num_window_tokens)
        ]
        cached_positions.append(
            [
                *sorted(best_positions),
                *range(num_prompt_tokens - num_window_tokens, num_prompt_tokens),
            ]
        )
    # SnapKV evicts no decoded tokens
    decoding.check_decode_steps(cached_positions, lambda head, positions, weights: positions)


@pytest.mark.parametrize(
    ("method", "num_sinks", "num_kept_tokens"),
    [(caches.StreamingCache(50), 4, 50), (caches.StreamingCache(PROMPT_TOKENS), 0, PROMPT_TOKENS)],
    ids=["after a dense prefill", "all keys"],
)
def test_streaming_decode_attends_to_sinks_and_window(
    model, ids, method, num_sinks, num_kept_tokens
):
    num_prompt_tokens = 560
    with method.apply_to(model):
        step_logits = predict_after_prompt(
            model, ids, num_prompt_tokens, cache=method.make_cache(model)
        )
    query, key = torch.arange(PROMPT_TOKENS)[:, None], torch.arange(PROMPT_TOKENS)
    is_kept = (
        (key < num_sinks)
        | (key >= query - (num_kept_tokens - num_sinks))
        | (query < num_prompt_tokens)
    )
    with torch.no_grad():
        masked_logits = model(ids, attention_mask=((key <= query) & is_kept)[None, None]).logits
    torch.testing.assert_close(
        step_logits, masked_logits[:, num_prompt_tokens - 1 : -1], atol=1e-4, rtol=1e-4
    )


def test_streaming_cache_drops_keys_outside_prefill_window(model, ids):
    streaming_method = methods.Streaming.fit(replace(FIT_CONDITIONS, budget=0.2))
    cache = streaming_method.make_cache(model)
    with streaming_method.apply_to(model):
        predict_after_prompt(model, ids, 560, cache=cache)
    num_kept_tokens = (streaming_method.config.local_blocks + 1) * streaming_method.config.key_block
    assert {layer.keys.shape[2] for layer in cache.layers} == {num_kept_tokens}
    # `predict_after_prompt` does not pass the last token to the model
    assert cache.get_seq_length() == PROMPT_TOKENS - 1


def test_step_tokens_count_index_bytes(model):
    """The index of a key counts as its bytes / (2 * 16 * 4), the bytes of K and V of a token."""
    config = SMALL_BLOCKS_CONFIG.changed(sparse_decode=True, decode_tokens=128)
    sparse_method = methods.Cab(config)
    with sparse_method.apply_to(model):
        cache = sparse_method.make_cache(model)
        model(torch.zeros(1, 3, dtype=torch.long), past_key_values=cache)
    index = cache.layers[0].index
    index_to_kv_bytes_ratio = index.nbytes / index.scales.numel() / (2 * 16 * 4)
    assert (
        sparse_method.count_step_tokens(model, PROMPT_TOKENS)
        == 128 + PROMPT_TOKENS * index_to_kv_bytes_ratio
    )
    # a sequence below 4 * decode_tokens is decoded densely
    assert sparse_method.count_step_tokens(model, 511) == 511
    share_budget_method = methods.Cab(config.changed(decode_tokens=0.1))
    assert share_budget_method.count_step_tokens(model, PROMPT_TOKENS) == pytest.approx(
        60 + PROMPT_TOKENS * index_to_kv_bytes_ratio
    )
    one_dense_layer_method = methods.Cab(config.changed(dense_layers=(1,)))
    step_tokens_by_layer = 128 + PROMPT_TOKENS * index_to_kv_bytes_ratio, PROMPT_TOKENS
    assert one_dense_layer_method.count_step_tokens(model, PROMPT_TOKENS) == pytest.approx(
        sum(step_tokens_by_layer) / 2
    )
    assert methods.Cab(SMALL_BLOCKS_CONFIG).count_step_tokens(model, PROMPT_TOKENS) == PROMPT_TOKENS
    assert caches.H2O(50).count_step_tokens(model, PROMPT_TOKENS) == 50


EVICTION_METHODS = [name for name, method in METHODS.items() if method.has_dense_prefill]


@pytest.mark.parametrize("method_name", EVICTION_METHODS)
def test_eviction_cache_has_dense_prefill_and_sparse_decode(method_name, model, ids):
    logits_before = compute_logits(model, ids)
    dense_answer = generate(model, ids)
    with METHODS[method_name](2 * PROMPT_TOKENS).apply_to(model):
        torch.testing.assert_close(compute_logits(model, ids), logits_before, atol=1e-4, rtol=1e-4)
        assert torch.equal(generate(model, ids), dense_answer)
    first_token = dense_answer[:, PROMPT_TOKENS : PROMPT_TOKENS + 1]

    def compute_second_token_logits():
        cache = model(ids, use_cache=True).past_key_values
        return model(first_token, past_key_values=cache).logits

    with torch.no_grad():
        dense_logits = compute_second_token_logits()
        with METHODS[method_name](30).apply_to(model):
            assert (compute_second_token_logits() - dense_logits).abs().max() > 1e-2


@pytest.mark.parametrize("method_name", EVICTION_METHODS)
def test_eviction_cache_with_padding_or_chunks_raises(method_name, model, ids):
    padding_mask = torch.ones_like(ids)
    padding_mask[:, :5] = 0
    with METHODS[method_name](300).apply_to(model), torch.no_grad():
        with pytest.raises(ValueError, match="without padding"):
            model(ids, attention_mask=padding_mask)
        cache = model(ids[:, :300], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=f"{method_name} must get a whole prompt"):
            model(ids[:, 300:], past_key_values=cache)


def test_fp8_without_torchao_raises(monkeypatch):
    monkeypatch.setattr(base, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="torchao is not installed"):
        METHODS["fp8"].fit(FIT_CONDITIONS)


@pytest.mark.parametrize("method_name", METHODS)
def test_method_restores_model_after_error(method_name, model, ids, halve_weights_for_fp8):
    logits_before = compute_logits(model, ids)
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        METHODS[method_name].fit(TOP_P_FIT_CONDITIONS).apply_to(model) as densities,
    ):
        generate(model, ids)
        assert densities()
        raise RuntimeError("in the middle")
    assert model.config._attn_implementation == "sdpa"
    assert model.config.cab_config is None
    assert torch.equal(compute_logits(model, ids), logits_before)


@pytest.mark.parametrize("method_name", MATCHED_METHODS)
def test_matched_method_reaches_budget(method_name, model, ids):
    budget = 0.3
    # the published recipe has blocks of 64 tokens, so its density has coarser steps
    tolerance = 0.06 if method_name == "published" else 0.03
    # dense tail rows would exceed the budget of such a short sequence
    fit_conditions = replace(
        FIT_CONDITIONS, config=replace(FIT_CONDITIONS.config, dense_tail_blocks=0), budget=budget
    )
    fit_conditions = replace(
        fit_conditions, measure_density=methods.make_density_measure(model, ids[0].tolist())
    )
    with METHODS[method_name].fit(fit_conditions).apply_to(model) as densities:
        compute_logits(model, ids)
        assert densities() == pytest.approx([budget] * 2, abs=tolerance)
    with pytest.raises(ValueError, match="budget"):
        METHODS[method_name].fit(replace(TOP_P_FIT_CONDITIONS, budget=None))


@pytest.mark.parametrize("method_name", ["xattention_fitted", "flexprefill_fitted", "mean_pooled"])
def test_fitted_share_is_restored_from_log(method_name):
    config = METHODS[method_name].fit(TOP_P_FIT_CONDITIONS).config
    predictor = method_name.removesuffix("_fitted")
    assert config.predictor == f"{predictor}:0.4"
    assert blocks.logged_config(config.to_dict()) == config
    assert blocks.logged_config({**config.to_dict(), "predictor": predictor}).predictor == predictor
    with pytest.raises(ValueError, match=f"cell must measure the density .* {method_name}, got"):
        METHODS[method_name].fit(FIT_CONDITIONS)


@pytest.mark.parametrize("method_name", METHODS)
def test_dense_tail_applies_to_methods_matched_by_blocks(method_name, halve_weights_for_fp8):
    fit_conditions = replace(
        TOP_P_FIT_CONDITIONS, config=replace(SMALL_BLOCKS_CONFIG, dense_tail_blocks=3)
    )
    config = getattr(METHODS[method_name].fit(fit_conditions), "config", None)
    if config is None or method_name == "trianglemix":  # TriangleMix has its own last queries
        return
    methods_without_tail = ("streaming", "published", "xattention", "xattention_16", "flexprefill")
    assert config.dense_tail_blocks == (0 if method_name in methods_without_tail else 3)


def test_trianglemix_has_dense_and_triangle_layers(model, ids, monkeypatch):
    monkeypatch.setattr(blocks, "TRIANGLE_WINDOW_TOKENS", 70)
    monkeypatch.setattr(blocks, "TRIANGLE_LAST_QUERIES", 40)
    method = blocks.TriangleMix.fit(TOP_P_FIT_CONDITIONS)
    assert method.config.dense_layers == (0,)
    with method.apply_to(model) as densities:
        compute_logits(model, ids)
        first_density, second_density = densities()
    assert first_density is None and 0 < second_density < 1
    layer_context = LayerContext(KeyRanges.causal(1, 320, 320, "cpu"), 0.25, layer=1)
    plan = make_predictor(method.config)(*draw_qk(320), layer_context)
    query_block, key_block = torch.arange(10)[:, None], torch.arange(20)
    # the windows of 70 tokens of the queries in a 32-query block cover seven blocks of 16 keys. The
    # last 40 queries are in two query blocks
    expected = (key_block == 0) | (key_block > 2 * query_block + 1 - 7) | (query_block >= 8)
    expected &= key_block <= 2 * query_block + 1
    assert torch.equal(plan.to_dense()[0], expected.expand(6, -1, -1))
    query, key = torch.arange(320)[:, None], torch.arange(320)
    is_in_window = (key <= query) & (key > query - 70)
    is_selected = plan.to_dense()[0, 0].repeat_interleave(32, 0).repeat_interleave(16, 1)
    assert is_selected[is_in_window].all()
    # the method adds the dense_layers of the config to its own
    fit_conditions = replace(
        TOP_P_FIT_CONDITIONS, config=replace(SMALL_BLOCKS_CONFIG, dense_layers=(5,)), num_layers=7
    )
    assert blocks.TriangleMix.fit(fit_conditions).config.dense_layers == (0, 1, 2, 5)
    with pytest.raises(ValueError, match="cell must contain the number of layers"):
        blocks.TriangleMix.fit(FIT_CONDITIONS)


def test_densities_are_reset_per_sample(model, ids):
    with METHODS["random"].fit(FIT_CONDITIONS).apply_to(model) as densities:
        compute_logits(model, ids)
        first_densities = densities()
        compute_logits(model, ids)
        assert densities() == first_densities
        assert densities() == [None, None]
