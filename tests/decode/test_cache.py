"""Layers of a cache with an index: whatever is done to the keys is done to their index."""

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
    """Whether the index is, bit for bit, one made from scratch."""
    made = decode.index_keys(layer.keys, layer.channels)
    return all(torch.equal(*each) for each in zip(layer.index, made, strict=True))


def filled(kind=IndexedDynamicLayer, length=20, **kwargs):
    layer = kind(**kwargs)
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


@torch.no_grad()
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_dynamic_layer_does_what_transformers_does_and_its_index_too(name):
    layer = OPERATIONS[name](filled(channels=CHANNELS))
    plain = OPERATIONS[name](filled(DynamicLayer))
    if name == "reset":
        # some versions keep zeros in a plain layer
        plain = DynamicLayer()
        assert layer.get_seq_length() == 0
    batch = 3 if plain.keys is None else plain.keys.shape[0]
    for seed in (1, 2):
        new = key_value(1, seed, batch)
        for mine, theirs in zip(layer.update(*new), plain.update(*new), strict=True):
            assert torch.equal(mine, theirs)
        assert in_step(layer)


@torch.no_grad()
@pytest.mark.parametrize("name", ["nothing", "reorder", "offload", "reset", "deepcopy", "pickle"])
def test_a_static_layer_too(name):
    layer = OPERATIONS[name](filled(IndexedStaticLayer, max_cache_len=32, channels=CHANNELS))
    plain = OPERATIONS[name](filled(StaticLayer, max_cache_len=32))
    for seed in (1, 2):
        new = key_value(1, seed)
        for mine, theirs in zip(layer.update(*new), plain.update(*new), strict=True):
            assert torch.equal(mine, theirs)
        assert in_step(layer)
    assert layer.get_seq_length() == plain.get_seq_length()


def with_states(layer):
    """``layer`` after its states of linear attention have been written as well."""
    generator = torch.Generator().manual_seed(7)
    layer.update_conv_state(torch.randn(3, 4, 5, generator=generator))
    layer.update_recurrent_state(torch.randn(3, 4, 2, generator=generator))
    return layer


HYBRIDS = [
    pytest.param(IndexedHybridLayer, LinearAttentionAndFullAttentionLayer, {}, id="dynamic"),
    pytest.param(
        IndexedStaticHybridLayer,
        LinearAttentionAndStaticFullAttentionLayer,
        {"max_cache_len": 32},
        id="static",
    ),
]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "plain_kind", "options"), HYBRIDS)
@pytest.mark.parametrize(
    "name", ["nothing", "reorder", "offload", "reset", "deepcopy", "pickle", "indexed-later"]
)
def test_so_does_a_layer_with_states_of_linear_attention(kind, plain_kind, options, name):
    plain = with_states(filled(plain_kind, **options))
    if name == "indexed-later":
        layer = indexed(copy.deepcopy(plain), CHANNELS)
    else:
        layer = OPERATIONS[name](with_states(filled(kind, channels=CHANNELS, **options)))
        plain = OPERATIONS[name](plain)
    assert type(layer) is kind and torch.equal(layer.conv_states[0], plain.conv_states[0])
    assert torch.equal(layer.recurrent_states[0], plain.recurrent_states[0])
    for mine, theirs in zip(layer.update(*key_value(1)), plain.update(*key_value(1)), strict=True):
        assert torch.equal(mine, theirs)
    assert in_step(layer) and layer.get_seq_length() == plain.get_seq_length()


@torch.no_grad()
def test_a_step_writes_one_token_in_place(monkeypatch):
    monkeypatch.setattr(cache, "ROOM", 8)
    layer, places = filled(length=15, channels=CHANNELS), []
    for seed in range(12):
        layer.update(*key_value(1, seed))
        places.append([x.data_ptr() for x in (layer.keys, layer.values, *layer.index)])
    # 15 are written, there is room for 16, then for 24
    assert [places.index(place) for place in places] == [0] + 8 * [1] + 3 * [9]


@torch.no_grad()
@pytest.mark.parametrize("how", [copy.deepcopy, OPERATIONS["pickle"]], ids=["deepcopy", "pickle"])
def test_a_copy_has_room_of_its_own(how):
    layer = filled(channels=CHANNELS)
    before = layer.keys.clone()
    twin = how(layer)
    place = twin.keys.data_ptr()
    twin.update(*key_value(1))
    layer.update(*key_value(1, seed=9))
    assert twin.keys.data_ptr() == place != layer.keys.data_ptr()
    assert torch.equal(twin.keys[:, :, :20], before) and in_step(twin) and in_step(layer)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_index_travels_with_an_offloaded_layer(kind):
    options = {"max_cache_len": 32} if kind == "static" else {}
    made = IndexedStaticLayer if kind == "static" else IndexedDynamicLayer
    layer = filled(made, channels=CHANNELS, **options)
    layer.device = torch.device("meta")
    layer.prefetch()
    assert {x.device.type for x in (layer.keys, layer.values, *layer.index)} == {"meta"}


def test_gradients_flow_through_a_cache():
    layer, pieces = IndexedDynamicLayer(CHANNELS), []
    for seed, length in enumerate((20, 1, 1)):
        new = [x.requires_grad_() for x in key_value(length, seed)]
        pieces += new
        keys, values = layer.update(*new)
        (keys.square().sum() + values.square().sum()).backward(retain_graph=True)
    assert in_step(layer) and not any(x.requires_grad for x in layer.index)
    # a token counts in its call and in all that follow
    for piece, calls in zip(pieces, (3, 3, 2, 2, 1, 1), strict=True):
        torch.testing.assert_close(piece.grad, 2 * calls * piece)


def test_what_was_made_in_inference_mode_is_continued_outside_of_it():
    with torch.inference_mode():
        layer = filled(channels=CHANNELS)
    with torch.no_grad():
        layer.update(*key_value(1))
    assert layer.get_seq_length() == 21 and in_step(layer)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(DynamicLayer, {}, id="dynamic"),
        pytest.param(StaticLayer, {"max_cache_len": 32}, id="static"),
    ],
)
@pytest.mark.parametrize("length", [0, 20])
def test_a_plain_layer_is_indexed_as_if_it_had_been_from_the_start(kind, options, length):
    plain = filled(kind, length, **options) if length else kind(**options)
    layer = indexed(plain, CHANNELS)
    assert layer.get_seq_length() == length
    layer.update(*key_value(1, seed=5))
    plain = filled(kind, length, **options) if length else kind(**options)
    assert torch.equal(layer.keys, plain.update(*key_value(1, seed=5))[0]) and in_step(layer)
    assert indexed(layer, CHANNELS) is layer


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "options"),
    [(IndexedDynamicLayer, {}), (IndexedStaticLayer, {"max_cache_len": 40})],
)
def test_the_keys_that_a_layer_returns_have_its_index_and_others_none(kind, options):
    layer = kind(channels=CHANNELS, **options)
    for tokens_at_once in (20, 1):
        keys, values = layer.update(*key_value(tokens_at_once))
        assert keys.cab_index.index is layer.index and keys.cab_index.channels == CHANNELS
        assert not any(hasattr(x, "cab_index") for x in (keys.clone(), values))


def test_a_layer_that_needs_none_keeps_no_index():
    model = cab_hf.apply_cab(
        tiny_model("qwen3-some-sliding", num_hidden_layers=4, max_window_layers=2),
        min_length=0,
        dense_layers=(1,),
        sparse_decode=True,
    )
    made = cab_hf.index_cache(model)
    kinds = [type(layer).__name__ for layer in made.layers]
    sliding = "DynamicSlidingWindowLayer"
    assert kinds == ["IndexedDynamicLayer", "DynamicLayer", sliding, sliding]


@torch.no_grad()
def test_a_cache_of_layers_made_as_they_come_is_indexed_too():
    model = cab_hf.apply_cab(tiny_model(), min_length=0, sparse_decode=True)
    made = cab_hf.index_cache(model, DynamicCache())
    model(tokens(1, 30), past_key_values=made)
    assert len(made.layers) == 3 and all(in_step(layer) for layer in made.layers)
