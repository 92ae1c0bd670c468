"""`route` decides how a layer is computed; dispatch and `describe` both call `route`."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cab_hf import CabConfig, engines
from cab_hf.call.layout import DocumentLength
from cab_hf.call.mask import MaskDetails, MaskInfo
from cab_hf.decode.cache import KeyIndex
from cab_hf.engines import Workload
from cab_hf.route import route

PREFILL_CONFIG = CabConfig(query_block=32, key_block=16, min_length=100, dense_layers=(3,))
CPU_WORKLOAD = Workload(
    device="cpu",
    head_dim=16,
    dtype=torch.float32,
    training=False,
    query_block=32,
    key_block=16,
)


def compute_route(
    config=PREFILL_CONFIG,
    is_sparse=True,
    layer_index=0,
    q_length=300,
    kv_length=300,
    longest_document=None,
    key_index=None,
    cache_slots=None,
    **mask_fields,
):
    """Return the `Route` of a layer for a call with one row.

    Args:
        config, is_sparse: as in `route`.
        layer_index: index of the layer.
        q_length, kv_length: queries and keys of the call.
        longest_document: (queries, tokens) of the longest document; None: lengths are unknown.
        key_index: index of the KV cache; None: no index.
        cache_slots: slots of a static cache; None: no static cache.
        mask_fields: further fields of `MaskInfo`.
    """
    document_lengths = (
        None
        if longest_document is None
        else [[DocumentLength(num_queries=longest_document[0], num_tokens=longest_document[1])]]
    )
    if longest_document is not None:
        mask_fields["doc_ids"] = torch.zeros(1, kv_length)
    mask_details = MaskDetails(cache_length=cache_slots, document_lengths=document_lengths)
    mask = MaskInfo(1, q_length, kv_length, 0, **mask_fields, details=mask_details)
    layer = SimpleNamespace(layer_idx=layer_index)
    return route(mask, config, CPU_WORKLOAD, is_sparse=is_sparse, layer=layer, key_index=key_index)


@pytest.mark.parametrize(
    ("call_fields", "method", "reason"),
    [
        pytest.param({}, "sparse", None, id="sparse"),
        pytest.param({"q_length": 150}, "sparse", None, id="chunk"),
        pytest.param({"is_sparse": False}, "dense", None, id="cab_dense"),
        pytest.param({"window": 8}, "dense_masked", "sliding window of 8 tokens", id="window"),
        pytest.param({"layer_index": 3}, "dense", "in dense_layers", id="dense-layer"),
        pytest.param({"layer_index": None}, "sparse", None, id="no-index"),
        pytest.param({"q_length": 1}, "dense", "fewer than query_block=32", id="decode"),
        pytest.param({"q_length": 1, "kv_length": None}, "dense_masked", "(decode)", id="static"),
        pytest.param({"kv_length": 99, "q_length": 99}, "dense", "min_length=100", id="short"),
        pytest.param(
            {"longest_document": (99, 99)}, "dense_masked", "min_length=100", id="short-sequences"
        ),
        pytest.param(
            {"longest_document": (31, 300)},
            "dense_masked",
            "query_block=32",
            id="short-last-chunks",
        ),
        pytest.param({"longest_document": (32, 100)}, "sparse", None, id="one-long-sequence"),
    ],
)
def test_prefill_route_and_reason_by_call(call_fields, method, reason):
    actual_route = compute_route(**call_fields)
    assert actual_route.method == method
    assert (
        (actual_route.dense_reason is None)
        if reason is None
        else reason in actual_route.dense_reason
    )
    assert actual_route.engine is (engines.GATHER if method == "sparse" else engines.SDPA)


DECODE_STEP_CONFIG = CabConfig(
    min_length=0, dense_layers=(3,), sparse_decode=True, decode_tokens=128
)
KEY_INDEX = KeyIndex(torch.zeros(1, 1, 512, 16), ())


@pytest.mark.parametrize(
    ("call_fields", "reason"),
    [
        pytest.param({}, None, id="sparse"),
        pytest.param({"kv_length": None, "cache_slots": 512}, None, id="static-cache"),
        pytest.param({"key_index": None}, "without an index", id="plain-cache"),
        pytest.param({"q_length": 2}, "fewer than query_block=128", id="few-queries"),
        pytest.param({"kv_length": 511}, "too short for decode_tokens=128", id="short"),
        pytest.param({"kv_length": None, "cache_slots": 511}, "too short", id="few-slots"),
        pytest.param(
            {"config": replace(DECODE_STEP_CONFIG, min_length=513)},
            "min_length=513",
            id="min_length",
        ),
        pytest.param({"config": replace(DECODE_STEP_CONFIG, decode_tokens=0.25)}, None, id="share"),
        pytest.param(
            {"config": replace(DECODE_STEP_CONFIG, decode_tokens=0.26)}, "too short", id="most"
        ),
        pytest.param({"config": replace(PREFILL_CONFIG, min_length=0)}, "query_block=32", id="off"),
        pytest.param({"window": 8}, "sliding window", id="window"),
        pytest.param({"layer_index": 3}, "in dense_layers", id="dense-layer"),
    ],
)
def test_decode_step_route_and_reason_by_call(call_fields, reason):
    actual_route = compute_route(
        **{
            "config": DECODE_STEP_CONFIG,
            "q_length": 1,
            "kv_length": 512,
            "key_index": KEY_INDEX,
            **call_fields,
        }
    )
    assert (actual_route.method == "sparse_decode") == (reason is None)
    assert (
        (actual_route.dense_reason is None)
        if reason is None
        else reason in actual_route.dense_reason
    )


def test_configured_engine_is_used_or_raises():
    config = CabConfig(query_block=32, key_block=16, min_length=0, engine="flex")
    assert compute_route(config).engine is engines.FLEX
    with pytest.raises(ValueError, match="engine is 'triton', which runs on cuda"):
        compute_route(CabConfig(min_length=0, engine="triton"))


@pytest.mark.parametrize(
    ("call_fields", "expected_lengths"),
    [
        pytest.param({}, (300, 300), id="whole"),
        pytest.param({"padding_mask": torch.ones(1, 300)}, (None, None), id="masked"),
        pytest.param({"q_length": 200}, (None, 200), id="chunk"),
    ],
)
def test_exact_engine_receives_length_only_without_mask(monkeypatch, call_fields, expected_lengths):
    received_lengths = []
    monkeypatch.setattr(
        engines,
        "choose_exact_attention",
        lambda work, *lengths: received_lengths.append(lengths) or engines.TRITON,
    )
    actual_route = compute_route(is_sparse=False, **call_fields)
    assert actual_route.method == "dense_blockwise" and actual_route.engine is engines.TRITON
    assert received_lengths == [expected_lengths]


@pytest.mark.parametrize(
    ("call_fields", "method"),
    [
        pytest.param({}, "dense", id="whole"),
        pytest.param({"q_length": 1}, "dense", id="decode"),
        pytest.param({"q_length": 200}, "dense_masked", id="chunk"),
        pytest.param({"padding_mask": torch.ones(1, 300)}, "dense_masked", id="padding"),
        pytest.param({"window": 8}, "dense_masked", id="window"),
        pytest.param({"q_length": 1, "kv_length": None}, "dense_masked", id="static-cache"),
    ],
)
def test_sdpa_is_masked_unless_causal_or_single_query(call_fields, method):
    assert compute_route(is_sparse=False, **call_fields).method == method
