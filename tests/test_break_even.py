"""Break-even points: below a measured number of queries after a cache, dense is faster."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model
from transformers import DynamicCache

import cab_hf
from cab_hf import CabConfig, break_even
from cab_hf.call.mask import MaskInfo
from cab_hf.call.scope import Prompt, current_prompt, set_prompt
from cab_hf.engines import Workload
from cab_hf.route import route

BREAK_EVEN_POINTS = {"cpu": ((400, 64), (800, 200))}
ROUTING_CONFIG = replace(SPARSE_CONFIG, min_length=100)


@pytest.fixture(autouse=True)
def patched_break_even_points(monkeypatch):
    """Use `BREAK_EVEN_POINTS`, and a least length of 20,000 tokens for 4 heads of 16 channels."""
    monkeypatch.setattr(break_even, "BREAK_EVEN_POINTS", BREAK_EVEN_POINTS)
    monkeypatch.setattr(break_even, "FEW_HEADS_POINTS", {"cpu": (4 * 16, 20_000)})


@pytest.mark.parametrize(
    ("q_length", "kv_length", "device", "has_enough_queries"),
    [
        pytest.param(1, 399, "cpu", True, id="shorter-than-every-point"),
        pytest.param(63, 400, "cpu", False, id="few-queries"),
        pytest.param(64, 400, "cpu", True, id="enough-queries"),
        pytest.param(199, 799, "cpu", True, id="between-points"),
        pytest.param(199, 800, "cpu", False, id="last-point"),
        pytest.param(1, 800, "mps", True, id="unmeasured-device"),
    ],
)
def test_last_point_below_kv_length_decides(q_length, kv_length, device, has_enough_queries):
    assert break_even.has_enough_queries(q_length, kv_length, device) is has_enough_queries


def test_committed_points_are_ascending_and_name_their_device():
    measurements = json.loads(break_even.POINTS_FILE.read_text())
    assert set(measurements) == {"cpu", "cuda"}
    for measurement in measurements.values():
        num_keys_of_points = [num_keys for num_keys, _ in measurement["points"]]
        assert measurement["device"] and num_keys_of_points == sorted(set(num_keys_of_points))


def compute_route(q_length, kv_length, config=ROUTING_CONFIG, num_heads=None, **mask_fields):
    """Return the `Route` of a call with "cab"; ``mask_fields`` are further fields of `MaskInfo`."""
    workload = Workload(
        device="cpu",
        head_dim=16,
        dtype=torch.float32,
        training=False,
        query_block=config.query_block,
        key_block=config.key_block,
        num_heads=num_heads,
    )
    mask = MaskInfo(1, q_length, kv_length, kv_length - q_length, **mask_fields)
    return route(mask, config, workload, is_sparse=True, layer=SimpleNamespace(layer_idx=0))


@pytest.mark.parametrize(
    ("q_length", "kv_length", "call_fields", "method_family"),
    [
        pytest.param(500, 500, {}, "sparse", id="prompt"),
        pytest.param(48, 500, {}, "dense", id="question"),
        pytest.param(64, 500, {}, "sparse", id="long-question"),
        pytest.param(48, 300, {}, "sparse", id="short-cache"),
        pytest.param(
            48, 500, {"config": replace(ROUTING_CONFIG, min_length=0)}, "sparse", id="always"
        ),
        # the route of a chunk depends on its whole prompt, not on the chunk
        pytest.param(48, 500, {"prompt": Prompt(700)}, "sparse", id="chunk-of-prompt"),
        pytest.param(48, 500, {"prompt": Prompt(700, start=640)}, "dense", id="chunk-of-question"),
        pytest.param(48, 300, {"prompt": Prompt(700, start=640)}, "dense", id="first-chunk"),
    ],
)
def test_short_question_after_long_cache_is_dense(q_length, kv_length, call_fields, method_family):
    actual_route = compute_route(q_length, kv_length, **call_fields)
    assert actual_route.method.partition("_")[0] == method_family
    if method_family == "dense":
        assert actual_route.dense_reason == (
            "fewer than 64 queries after a long cache, where dense attention is faster"
        )


@pytest.mark.parametrize(
    ("prompt_length", "num_heads", "min_length", "method_family"),
    [
        pytest.param(19_999, 4, 16_384, "dense", id="few-heads"),
        pytest.param(20_000, 4, 16_384, "sparse", id="long-prompt"),
        pytest.param(19_999, 5, 16_384, "sparse", id="more-heads"),
        pytest.param(19_999, None, 16_384, "sparse", id="unknown-heads"),
        pytest.param(19_999, 4, 16_383, "sparse", id="lower-min-length"),
    ],
)
def test_few_heads_raise_min_length(prompt_length, num_heads, min_length, method_family):
    config = replace(ROUTING_CONFIG, min_length=min_length)
    actual_route = compute_route(prompt_length, prompt_length, config=config, num_heads=num_heads)
    assert actual_route.method.partition("_")[0] == method_family
    if method_family == "dense":
        # the config also makes shorter rows of a batch dense
        assert actual_route.config.min_length == 20_000
        assert actual_route.dense_reason == "input shorter than min_length=20000"


@pytest.mark.parametrize(("prompt_start", "method_family"), [(0, "sparse"), (640, "dense")])
def test_prompt_start_excludes_cached_tokens_from_query_count(prompt_start, method_family):
    with set_prompt(700, num_cached_tokens=prompt_start):
        prompt = current_prompt(1, None, 700)
    assert compute_route(48, 500, prompt=prompt).method.partition("_")[0] == method_family


@pytest.mark.parametrize(("question_length", "is_dense"), [(48, True), (96, False)])
def test_generate_computes_short_question_densely(question_length, is_dense):
    ids = draw_token_ids(1, 416 + question_length)
    sparse_config = replace(ROUTING_CONFIG, mass_threshold=0.6, share_threshold=1.0)

    def generate_first_logits(implementation):
        """Prefill 416 tokens densely, then return the first logits of `generate` for all tokens."""
        model = make_tiny_model()
        if implementation == "cab":
            cab_hf.apply_cab(model, sparse_config)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model.set_attn_implementation("sdpa")
            model(ids[:, :416], past_key_values=cache)
            model.set_attn_implementation(implementation)
        output = model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.logits[0]

    assert (
        torch.allclose(generate_first_logits("cab"), generate_first_logits("sdpa"), atol=1e-4)
        is is_dense
    )


def test_break_even_points_start_at_default_min_length():
    """Below `min_length`, attention is dense anyway, so that points there would have no effect."""
    for num_keys, num_queries in json.loads(break_even.POINTS_FILE.read_text())["cpu"]["points"]:
        assert num_keys >= CabConfig().min_length and num_queries <= num_keys
