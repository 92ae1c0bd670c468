import dataclasses
import json

import pytest

from cab_hf import CabConfig


@pytest.mark.parametrize(
    "field, value",
    [
        ("query_block", 100),
        ("query_block", 0),
        ("query_block", 128.0),
        ("key_block", 48),
        ("sink_blocks", -1),
        ("local_blocks", True),
        ("dense_tail", -1),
        ("coarsen", "max"),
        ("select", "all"),
        ("curvature", "ollivier"),
        ("mass", 0.0),
        ("mass", 1.1),
        ("mass", float("nan")),
        ("mass", "0.9"),
        ("bridges", -0.1),
        ("sparsity", 1.0),
        ("redundancy", 2),
        ("max_density", 0),
        ("dense_layers", (-1,)),
        ("dense_layers", 3),
        ("min_length", 1.5),
        ("engine", None),
        ("predictor", 7),
        ("sparse_decode", "yes"),
    ],
)
def test_a_bad_value_is_named(field, value):
    with pytest.raises(ValueError, match=rf"CabConfig\.{field} is .*; it must be "):
        CabConfig(**{field: value})


def test_it_is_frozen_and_hashes():
    config = CabConfig(dense_layers=[1, 2])
    assert hash(config) == hash(CabConfig(dense_layers=(1, 2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mass = 0.5


@pytest.mark.parametrize(
    "config",
    [CabConfig(), CabConfig(dense_layers=(0, 3), mass=1), CabConfig.published(0.9, "additive")],
    ids=["default", "changed", "published"],
)
def test_it_survives_json(config):
    assert CabConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_fields_and_wrong_kinds_are_refused():
    with pytest.raises(ValueError, match="no field 'topk'; its fields are query_block"):
        CabConfig.from_dict({"topk": 3})
    with pytest.raises(ValueError, match="it must be a dict"):
        CabConfig.from_dict("mass=0.9")


def test_published_is_the_published_recipe():
    config = CabConfig.published(sparsity=0.9)
    assert (config.coarsen, config.select, config.curvature) == ("max_l2", "topk", "forman")
    assert (config.query_block, config.key_block, config.sparsity) == (64, 64, 0.9)
    assert (config.redundancy, config.sink_blocks, config.dense_tail) == (1.0, 0, 0)
    assert CabConfig.published(min_length=0, dense_tail=1).dense_tail == 1
