"""KV cache layers with an index of quantised keys: each change of keys updates the index."""

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
    make_indexed_layer,
)
from cab_hf.ops import decode

CHANNELS = (1, 3, 4, 7)


def make_keys_and_values(length, seed=0, batch=3):
    """Return random keys and values [batch, 2, length, 8]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, batch, 2, length, 8), generator=generator).unbind(0)


def index_equals_rebuilt_index(layer):
    """Return True if the index is bit-identical to one built from all keys."""
    rebuilt_index = decode.index_keys(layer.keys, layer.channels)
    return all(map(torch.equal, layer.index, rebuilt_index))


def make_empty_layer(layer_class=IndexedDynamicLayer, channels=(), **options):
    layer = layer_class(**options)
    layer.channels = channels
    return layer


def make_filled_layer(layer_class=IndexedDynamicLayer, length=20, **options):
    layer = make_empty_layer(layer_class, **options)
    keys, values = make_keys_and_values(length)
    with torch.no_grad():
        layer.update(keys, values)
    return layer


def make_in_place_operation(operation):
    """Return a function that applies ``operation`` to a layer and returns the layer."""

    def apply_and_return(layer):
        operation(layer)
        return layer

    return apply_and_return


OPERATIONS = {
    "nothing": lambda layer: layer,
    "reorder": make_in_place_operation(lambda layer: layer.reorder_cache(torch.tensor([2, 2, 0]))),
    "crop": make_in_place_operation(lambda layer: layer.crop(-7)),
    "crop-nothing": make_in_place_operation(lambda layer: layer.crop(0)),
    "repeat": make_in_place_operation(lambda layer: layer.batch_repeat_interleave(2)),
    "select": make_in_place_operation(
        lambda layer: layer.batch_select_indices(torch.tensor([2, 0]))
    ),
    "offload": make_in_place_operation(lambda layer: (layer.offload(), layer.prefetch())),
    "reset": make_in_place_operation(lambda layer: layer.reset()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
}


# by name: class with an index, its base class in transformers, and arguments of both
LAYER_KINDS = {
    "dynamic": (IndexedDynamicLayer, DynamicLayer, {}),
    "static": (IndexedStaticLayer, StaticLayer, {"max_cache_len": 32}),
    "dynamic-hybrid": (IndexedHybridLayer, LinearAttentionAndFullAttentionLayer, {}),
    "static-hybrid": (
        IndexedStaticHybridLayer,
        LinearAttentionAndStaticFullAttentionLayer,
        {"max_cache_len": 32},
    ),
}
# names of the `OPERATIONS` that every class supports
COMMON_OPERATIONS = ("nothing", "reorder", "offload", "reset", "deepcopy", "pickle")
CASES = [("dynamic", name) for name in OPERATIONS]
CASES += [(kind, name) for kind in LAYER_KINDS if kind != "dynamic" for name in COMMON_OPERATIONS]


def write_states(layer):
    """Return ``layer`` after writing its linear attention states, if it has any."""
    if hasattr(layer, "update_conv_state"):
        generator = torch.Generator().manual_seed(7)
        layer.update_conv_state(torch.randn(3, 4, 5, generator=generator))
        layer.update_recurrent_state(torch.randn(3, 4, 2, generator=generator))
    return layer


def require_same_layer(layer, plain_layer):
    """Assert that ``layer`` equals ``plain_layer``, which has no index, also after two more tokens.

    The index of ``layer`` must equal an index that is built from all its keys.
    """
    assert layer.get_seq_length() == plain_layer.get_seq_length()
    if hasattr(plain_layer, "conv_states"):
        assert torch.equal(layer.conv_states[0], plain_layer.conv_states[0])
        assert torch.equal(layer.recurrent_states[0], plain_layer.recurrent_states[0])
    batch = 3 if plain_layer.keys is None else plain_layer.keys.shape[0]
    for seed in (1, 2):
        keys, values = make_keys_and_values(1, seed, batch)
        actual, expected = layer.update(keys, values), plain_layer.update(keys, values)
        assert all(map(torch.equal, actual, expected))
        assert index_equals_rebuilt_index(layer)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_cache_operation_matches_transformers_and_updates_index(kind, name):
    indexed_class, plain_class, options = LAYER_KINDS[kind]
    layer = make_filled_layer(indexed_class, channels=CHANNELS, **options)
    layer = OPERATIONS[name](write_states(layer))
    plain_layer = OPERATIONS[name](write_states(make_filled_layer(plain_class, **options)))
    if (kind, name) == ("dynamic-hybrid", "reset") and plain_layer.get_seq_length():
        pytest.skip("this version of transformers resets only the states of a hybrid layer")
    if (kind, name) == ("dynamic", "reset"):
        # some versions of transformers set the keys to 0 instead of removing them
        plain_layer = DynamicLayer()
    assert type(layer) is indexed_class
    require_same_layer(layer, plain_layer)


@torch.no_grad()
@pytest.mark.parametrize("kind", LAYER_KINDS)
@pytest.mark.parametrize("length", [0, 20])
def test_index_added_later_equals_index_from_start(kind, length):
    indexed_class, plain_class, options = LAYER_KINDS[kind]
    plain_layer = (
        make_filled_layer(plain_class, length, **options) if length else plain_class(**options)
    )
    plain_layer = write_states(plain_layer)
    layer = make_indexed_layer(copy.deepcopy(plain_layer), CHANNELS)
    assert type(layer) is indexed_class and make_indexed_layer(layer, CHANNELS) is layer
    require_same_layer(layer, plain_layer)


@torch.no_grad()
def test_step_writes_one_token_in_place(monkeypatch):
    monkeypatch.setattr(cache, "SPARE_TOKENS", 8)
    layer, addresses = make_filled_layer(length=15, channels=CHANNELS), []
    for seed in range(12):
        keys, values = make_keys_and_values(1, seed)
        layer.update(keys, values)
        addresses.append([x.data_ptr() for x in (layer.keys, layer.values, *layer.index)])
    # the buffers have 16 slots at step 0, 24 slots from step 1 on, and 32 from step 9 on
    first_steps = [addresses.index(address) for address in addresses]
    assert first_steps == [0] + 8 * [1] + 3 * [9]


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepcopy", "pickle"])
def test_copy_does_not_share_buffers(name):
    layer = make_filled_layer(channels=CHANNELS)
    keys_before = layer.keys.clone()
    layer_copy = OPERATIONS[name](layer)
    address = layer_copy.keys.data_ptr()
    for changed_layer, seed in ((layer_copy, 0), (layer, 9)):
        keys, values = make_keys_and_values(1, seed=seed)
        changed_layer.update(keys, values)
    assert layer_copy.keys.data_ptr() == address != layer.keys.data_ptr()
    assert torch.equal(layer_copy.keys[:, :, :20], keys_before)
    assert index_equals_rebuilt_index(layer_copy) and index_equals_rebuilt_index(layer)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_offloading_moves_the_index(kind):
    indexed_class, _, options = LAYER_KINDS[kind]
    layer = make_filled_layer(indexed_class, channels=CHANNELS, **options)
    layer.device = torch.device("meta")
    layer.prefetch()
    assert {x.device.type for x in (layer.keys, layer.values, *layer.index)} == {"meta"}


def test_gradients_flow_through_a_cache():
    layer, leaves = make_empty_layer(channels=CHANNELS), []
    for seed, length in enumerate((20, 1, 1)):
        new_keys, new_values = (x.requires_grad_() for x in make_keys_and_values(length, seed))
        leaves += [new_keys, new_values]
        keys, values = layer.update(new_keys, new_values)
        (keys.square().sum() + values.square().sum()).backward(retain_graph=True)
    assert index_equals_rebuilt_index(layer) and not any(x.requires_grad for x in layer.index)
    # a token contributes to the loss of its own call and of all later calls
    for leaf, num_calls in zip(leaves, (3, 3, 2, 2, 1, 1), strict=True):
        torch.testing.assert_close(leaf.grad, 2 * num_calls * leaf)


def test_cache_of_inference_mode_continues_outside_of_it():
    with torch.inference_mode():
        layer = make_filled_layer(channels=CHANNELS)
    keys, values = make_keys_and_values(1)
    with torch.no_grad():
        layer.update(keys, values)
    assert layer.get_seq_length() == 21 and index_equals_rebuilt_index(layer)


@torch.no_grad()
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_returned_keys_carry_the_index(kind):
    indexed_class, _, options = LAYER_KINDS[kind]
    layer = make_empty_layer(indexed_class, CHANNELS, **options)
    for num_tokens in (20, 1):
        new_keys, new_values = make_keys_and_values(num_tokens)
        keys, values = layer.update(new_keys, new_values)
        assert keys.cab_index.index is layer.index and keys.cab_index.channels == CHANNELS
        assert not any(hasattr(x, "cab_index") for x in (keys.clone(), values))


def test_dense_layer_has_no_index():
    model = cab_hf.apply_cab(
        tiny_model("qwen3-some-sliding", num_hidden_layers=4, max_window_layers=2),
        min_length=0,
        dense_layers=(1,),
        sparse_decode=True,
    )
    class_names = [type(layer).__name__ for layer in cab_hf.index_cache(model).layers]
    sliding = "DynamicSlidingWindowLayer"
    assert class_names == ["IndexedDynamicLayer", "DynamicLayer", sliding, sliding]


@torch.no_grad()
def test_cache_with_lazy_layers_is_indexed():
    model = cab_hf.apply_cab(tiny_model(), min_length=0, sparse_decode=True)
    indexed_cache = cab_hf.index_cache(model, DynamicCache())
    model(tokens(1, 30), past_key_values=indexed_cache)
    assert len(indexed_cache.layers) == 3
    assert all(map(index_equals_rebuilt_index, indexed_cache.layers))
