"""Cache layers with an index: every change of the keys also changes the index."""

import copy
import pickle

import pytest
import torch
from tiny import tiny_model, tokens
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    StaticLayer,
)

import cab_hf
from cab_hf.decode import cache
from cab_hf.decode.cache import (
    IndexedDynamicLayer,
    IndexedHybridLayer,
    IndexedStaticHybridLayer,
    IndexedStaticLayer,
    indexed,
)
from cab_hf.ops import decode

CHANNELS = (1, 3, 4, 7)


def key_value(length, seed=0, batch=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, 2, length, 8, generator=generator).unbind(0)


def in_step(layer):
    """Return True if the index is bit-identical to one built from all keys."""
    scratch = decode.index_keys(layer.keys, layer.channels)
    return all(torch.equal(*each) for each in zip(layer.index, scratch, strict=True))


def made(kind=IndexedDynamicLayer, channels=(), **kwargs):
    layer = kind(**kwargs)
    layer.channels = channels
    return layer


def filled(kind=IndexedDynamicLayer, length=20, **kwargs):
    layer = made(kind, **kwargs)
    with torch.no_grad():
        layer.update(*key_value(length))
    return layer


def select(layer, way):
    way(layer)
    return layer


OPERATIONS = {
    "nothing": lambda layer: layer,
    "reorder": lambda layer: select(layer, lambda x: x.reorder_cache(torch.tensor([2, 2, 0]))),
    "crop": lambda layer: select(layer, lambda x: x.crop(-7)),
    "crop-nothing": lambda layer: select(layer, lambda x: x.crop(0)),
    "repeat": lambda layer: select(layer, lambda x: x.batch_repeat_interleave(2)),
    "select": lambda layer: select(layer, lambda x: x.batch_select_indices(torch.tensor([2, 0]))),
    "offload": lambda layer: select(layer, lambda x: (x.offload(), x.prefetch())),
    "reset": lambda layer: select(layer, lambda x: x.reset()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
}


# a layer with an index, transformers' own, and options
KINDS = {
    "dynamic": (IndexedDynamicLayer, DynamicLayer, {}),
    "static": (IndexedStaticLayer, StaticLayer, {"max_cache_len": 32}),
    "dynamic-hybrid": (IndexedHybridLayer, LinearAttentionAndFullAttentionLayer, {}),
    "static-hybrid": (
        IndexedStaticHybridLayer,
        LinearAttentionAndStaticFullAttentionLayer,
        {"max_cache_len": 32},
    ),
}
OF_ALL = ("nothing", "reorder", "offload", "reset", "deepcopy", "pickle")
DONE = [("dynamic", name) for name in OPERATIONS]
DONE += [(kind, name) for kind in KINDS if kind != "dynamic" for name in OF_ALL]


def with_states(layer):
    """Return ``layer`` after writing its linear attention states, if it has any."""
    if hasattr(layer, "update_conv_state"):
        generator = torch.Generator().manual_seed(7)
        layer.update_conv_state(torch.randn(3, 4, 5, generator=generator))
        layer.update_recurrent_state(torch.randn(3, 4, 2, generator=generator))
    return layer


def require_same(layer, plain):
    """Assert that two layers are equal, also after two more tokens, with an up-to-date index."""
    assert layer.get_seq_length() == plain.get_seq_length()
    if hasattr(plain, "conv_states"):
        assert torch.equal(layer.conv_states[0], plain.conv_states[0])
        assert torch.equal(layer.recurrent_states[0], plain.recurrent_states[0])
    batch = 3 if plain.keys is None else plain.keys.shape[0]
    for seed in (1, 2):
        new = key_value(1, seed, batch)
        for mine, theirs in zip(layer.update(*new), plain.update(*new), strict=True):
            assert torch.equal(mine, theirs)
        assert in_step(layer)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "name"), DONE)
def test_cache_operation_matches_transformers_and_updates_index(kind, name):
    own, plain_kind, options = KINDS[kind]
    layer = OPERATIONS[name](with_states(filled(own, channels=CHANNELS, **options)))
    plain = OPERATIONS[name](with_states(filled(plain_kind, **options)))
    if (kind, name) == ("dynamic-hybrid", "reset") and plain.get_seq_length():
        pytest.skip("this version of transformers resets such a layer in part")
    if (kind, name) == ("dynamic", "reset"):
        # some versions keep zeros in a plain layer
        plain = DynamicLayer()
    assert type(layer) is own
    require_same(layer, plain)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 20])
def test_index_added_later_equals_index_from_start(kind, length):
    own, plain_kind, options = KINDS[kind]
    plain = with_states(filled(plain_kind, length, **options) if length else plain_kind(**options))
    layer = indexed(copy.deepcopy(plain), CHANNELS)
    assert type(layer) is own and indexed(layer, CHANNELS) is layer
    require_same(layer, plain)


@torch.no_grad()
def test_step_writes_one_token_in_place(monkeypatch):
    monkeypatch.setattr(cache, "SPARE_TOKENS", 8)
    layer, places = filled(length=15, channels=CHANNELS), []
    for seed in range(12):
        layer.update(*key_value(1, seed))
        places.append([x.data_ptr() for x in (layer.keys, layer.values, *layer.index)])
    # 15 tokens are written; the buffer has 16 slots, and then 24
    assert [places.index(place) for place in places] == [0] + 8 * [1] + 3 * [9]


@torch.no_grad()
@pytest.mark.parametrize("how", [copy.deepcopy, OPERATIONS["pickle"]], ids=["deepcopy", "pickle"])
def test_copy_does_not_share_buffers(how):
    layer = filled(channels=CHANNELS)
    before = layer.keys.clone()
    twin = how(layer)
    place = twin.keys.data_ptr()
    twin.update(*key_value(1))
    layer.update(*key_value(1, seed=9))
    assert twin.keys.data_ptr() == place != layer.keys.data_ptr()
    assert torch.equal(twin.keys[:, :, :20], before) and in_step(twin) and in_step(layer)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_offloading_moves_the_index(kind):
    own, _, options = KINDS[kind]
    layer = filled(own, channels=CHANNELS, **options)
    layer.device = torch.device("meta")
    layer.prefetch()
    assert {x.device.type for x in (layer.keys, layer.values, *layer.index)} == {"meta"}


def test_gradients_flow_through_a_cache():
    layer, pieces = made(channels=CHANNELS), []
    for seed, length in enumerate((20, 1, 1)):
        new = [x.requires_grad_() for x in key_value(length, seed)]
        pieces += new
        keys, values = layer.update(*new)
        (keys.square().sum() + values.square().sum()).backward(retain_graph=True)
    assert in_step(layer) and not any(x.requires_grad for x in layer.index)
    # a token counts in its call and in all that follow
    for piece, calls in zip(pieces, (3, 3, 2, 2, 1, 1), strict=True):
        torch.testing.assert_close(piece.grad, 2 * calls * piece)


def test_cache_of_inference_mode_continues_outside_of_it():
    with torch.inference_mode():
        layer = filled(channels=CHANNELS)
    with torch.no_grad():
        layer.update(*key_value(1))
    assert layer.get_seq_length() == 21 and in_step(layer)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_returned_keys_carry_the_index(kind):
    own, _, options = KINDS[kind]
    layer = made(own, CHANNELS, **options)
    for tokens_at_once in (20, 1):
        keys, values = layer.update(*key_value(tokens_at_once))
        assert keys.cab_index.index is layer.index and keys.cab_index.channels == CHANNELS
        assert not any(hasattr(x, "cab_index") for x in (keys.clone(), values))


def test_dense_layer_has_no_index():
    model = cab_hf.apply_cab(
        tiny_model("qwen3-some-sliding", num_hidden_layers=4, max_window_layers=2),
        min_length=0,
        dense_layers=(1,),
        sparse_decode=True,
    )
    kinds = [type(layer).__name__ for layer in cab_hf.index_cache(model).layers]
    sliding = "DynamicSlidingWindowLayer"
    assert kinds == ["IndexedDynamicLayer", "DynamicLayer", sliding, sliding]


@torch.no_grad()
def test_cache_with_lazy_layers_is_indexed():
    model = cab_hf.apply_cab(tiny_model(), min_length=0, sparse_decode=True)
    own = cab_hf.index_cache(model, DynamicCache())
    model(tokens(1, 30), past_key_values=own)
    assert len(own.layers) == 3 and all(in_step(layer) for layer in own.layers)
