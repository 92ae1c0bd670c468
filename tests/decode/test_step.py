"""Sparse decode steps under per-layer settings: cascades, calibrated tables, `describe`."""

from types import SimpleNamespace

import pytest
import torch
from tiny import draw_qkv, make_tiny_model

import cab_hf
from cab_hf import CabConfig
from cab_hf.call.call import Call
from cab_hf.call.mask import MaskInfo
from cab_hf.config import block_sizes
from cab_hf.decode.cache import KeyIndex
from cab_hf.decode.step import SHARED_CHOICE_KEY, map_kv_heads
from cab_hf.dispatch import sparse_decode
from cab_hf.ops import Workload, decode

KV_LENGTH = 600
READ_128_KEYS_FIELDS = {"sparse_decode": True, "decode_tokens": 128}


SCALE = 0.25


def run_decode_step(mask, config, layer_index, qkv):
    """Return the attention output of one sparse decode step of layer ``layer_index``."""
    q, k, v = qkv
    attention_call = Call(
        q=q,
        k=k,
        v=v,
        scale=SCALE,
        layer=SimpleNamespace(layer_idx=layer_index),
        config=config,
        is_sparse=True,
        workload=Workload.from_tensors(q, k, v, block_sizes(config)),
        mask=mask,
        key_index=KeyIndex(decode.index_keys(k, ()), ()),
    )
    return sparse_decode(attention_call)


def make_mask_of_last_token():
    """Return the `MaskInfo` of a decode step: one query after KV_LENGTH - 1 cached tokens."""
    return MaskInfo(batch=1, q_length=1, kv_length=KV_LENGTH, q_offset=KV_LENGTH - 1)


@pytest.mark.parametrize(
    ("head_map", "anchor_heads"),
    [
        pytest.param((), [0, 1], id="same-heads"),
        pytest.param(((), (3, 4, 0, 1, 2, 2)), [1, 0], id="most-of-a-group"),
    ],
)
def test_cascade_layer_reads_keys_selected_by_its_anchor(head_map, anchor_heads):
    head_map_rows = [head_map_row or tuple(range(6)) for head_map_row in head_map]
    config = CabConfig(
        predictor="cascade",
        anchors=(0,),
        head_map=tuple(head_map_rows),
        min_length=0,
        **READ_128_KEYS_FIELDS,
    )
    mask = make_mask_of_last_token()
    run_decode_step(mask, config, 0, draw_qkv(q_length=1, kv_length=KV_LENGTH))
    q, k, v = draw_qkv(q_length=1, kv_length=KV_LENGTH, seed=1)
    choice = mask.forward_state.shared_state[SHARED_CHOICE_KEY].choice.map_to_layer(
        q.device, tuple(anchor_heads)
    )
    actual = run_decode_step(mask, config, 1, (q, k, v))
    expected = decode.attend(q, k, v, choice, scale=SCALE, length=torch.tensor([KV_LENGTH]))
    torch.testing.assert_close(actual, expected)


def test_anchor_with_other_head_count_raises():
    config = CabConfig(predictor="cascade", anchors=(0,), min_length=0, **READ_128_KEYS_FIELDS)
    mask = make_mask_of_last_token()
    run_decode_step(mask, config, 0, draw_qkv(q_length=1, kv_length=KV_LENGTH))
    with pytest.raises(ValueError, match="layer 1 has 6 query heads and 3 KV heads"):
        run_decode_step(mask, config, 1, draw_qkv(q_length=1, kv_length=KV_LENGTH, kv_heads=3))


@pytest.mark.parametrize(
    ("head_map_row", "kv_heads", "expected_heads"),
    [
        pytest.param((0, 1, 2, 3, 4, 5), 2, (0, 1), id="same"),
        pytest.param((5, 5, 0, 1, 3, 0), 2, (1, 0), id="most"),
        pytest.param((5, 0, 3, 3), 4, (5, 0, 3, 3), id="groups-of-one"),
        pytest.param((2, 0, 0, 3), 2, (1, 0), id="the-first-of-equals"),
    ],
)
def test_kv_head_follows_majority_of_its_query_heads(head_map_row, kv_heads, expected_heads):
    assert map_kv_heads(head_map_row, kv_heads) == expected_heads


@pytest.mark.parametrize(
    ("decode_tokens", "q_offset", "num_keys"),
    [
        pytest.param(128, 599, 128, id="number"),
        pytest.param(0.25, 598, 150, id="share-rounded-up"),
        pytest.param(0.25, torch.tensor(598), 150, id="share-of-a-static-cache"),
    ],
)
def test_budget_is_computed_once_per_forward_pass(decode_tokens, q_offset, num_keys):
    mask = MaskInfo(batch=1, q_length=1, kv_length=None, q_offset=q_offset)
    length_and_num_keys = mask.decode_budget(decode_tokens, 0, torch.device("cpu"))
    assert [(x.tolist(), x.dtype) for x in length_and_num_keys] == [
        ([int(q_offset) + 1], torch.int64),
        ([num_keys], torch.int32),
    ]
    assert mask.decode_budget(decode_tokens, 0, torch.device("cpu")) is length_and_num_keys


@pytest.mark.parametrize(
    ("decode_tokens", "expected_num_keys"),
    [
        pytest.param(128, [2**31 - 1, 128], id="number"),
        pytest.param(0.25, [2**31 - 1, 125], id="share-of-the-row"),
    ],
)
@pytest.mark.parametrize("num_slots", [600, 900], ids=["growing", "static"])
def test_budget_depends_on_tokens_of_the_row(decode_tokens, expected_num_keys, num_slots):
    # in a static cache, the mask may be True for the unwritten slots after the sequence
    padding_mask = torch.ones(2, num_slots, dtype=torch.bool)
    padding_mask[0, :201], padding_mask[1, :100] = False, False
    mask = MaskInfo(
        batch=2,
        q_length=1,
        kv_length=None,
        q_offset=torch.tensor(599),
        padding_mask=padding_mask,
    )
    length, num_keys_to_read = mask.decode_budget(decode_tokens, 400, torch.device("cpu"))
    assert (length.tolist(), num_keys_to_read.tolist()) == ([600], expected_num_keys)


@pytest.mark.parametrize(
    ("config_fields", "expected_text"),
    [
        pytest.param({}, "  decode: dense", id="off"),
        pytest.param(READ_128_KEYS_FIELDS, "128 keys per KV head, from 512 tokens on", id="number"),
        pytest.param(
            READ_128_KEYS_FIELDS | {"min_length": 700}, "from 700 tokens on", id="min_length"
        ),
        pytest.param(
            READ_128_KEYS_FIELDS | {"decode_tokens": 0.1}, "0.1 of the keys per KV head", id="share"
        ),
        pytest.param(
            READ_128_KEYS_FIELDS | {"decode_tokens": 0.5}, "dense, decode_tokens 0.5", id="too-much"
        ),
        # bytes of the index per key: 32 of 64 channels in 4 bits, and a scale of 2 bytes. They are
        # divided by the bytes of a key and a value in float32
        pytest.param(READ_128_KEYS_FIELDS, "an index of 0.035 of its bytes", id="index"),
        pytest.param(
            READ_128_KEYS_FIELDS | {"dense_layers": (1, 2)},
            "an index of 0.012 of its bytes",
            id="one-layer-of-3",
        ),
        pytest.param(
            READ_128_KEYS_FIELDS | {"dense_layers": (0, 1, 2)},
            "no layer selects keys",
            id="no-layer",
        ),
        pytest.param(
            READ_128_KEYS_FIELDS | {"predictor": "cascade", "anchors": (0,)},
            "index of 0.012",
            id="one-anchor",
        ),
    ],
)
def test_describe_reports_keys_read_per_step(config_fields, expected_text):
    model = cab_hf.apply_cab(make_tiny_model(head_dim=64), **{"min_length": 0, **config_fields})
    assert expected_text in cab_hf.describe(model).splitlines()[-2]
