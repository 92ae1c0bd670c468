import dataclasses
import json

import pytest

from cab_hf import CabConfig
from cab_hf.config import Budgets, budgets_of


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
        ("mass", ()),
        ("mass", ((0.5, 1.1),)),
        ("mass", ((0.5, 0.5), (0.5,))),
        ("mass", (0.5, 0.5)),
        ("exact_share", 1.5),
        ("exact_share", ((),)),
        ("exact_share", (("a",),)),
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
    [
        CabConfig(),
        CabConfig(dense_layers=(0, 3), mass=1),
        CabConfig.published(0.9, "additive"),
        CabConfig(mass=((0.0, 0.5), (1, 0.25)), exact_share=((0.1, 0), (0, 0))),
    ],
    ids=["default", "changed", "published", "tables"],
)
def test_it_survives_json(config):
    assert CabConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_lists_of_a_table_are_frozen_and_given_back():
    config = CabConfig(mass=[[0.5, 1.0]], exact_share=[[0.1, 0.0]])
    assert config.mass == ((0.5, 1.0),) and hash(config) == hash(CabConfig(**config.to_dict()))
    assert config.to_dict()["mass"] == [[0.5, 1.0]]
    assert config.to_dict()["exact_share"] == [[0.1, 0.0]]


TABLE = ((0.0, 0.3, 1.0), (0.6, 0.6, 0.6), (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("fields", "layer", "budgets"),
    [
        pytest.param({}, None, Budgets((0.9,)), id="a-number"),
        pytest.param({"mass": 1}, 0, Budgets((1,)), id="everything-listed"),
        pytest.param({"mass": TABLE}, 0, Budgets((0.0, 0.3, 1.0), (), (2,)), id="table"),
        pytest.param({"mass": TABLE}, 1, Budgets((0.6,)), id="a-layer-of-one-number"),
        pytest.param({"mass": TABLE}, 2, Budgets((1.0,), (), (0, 1, 2)), id="a-dense-layer"),
        pytest.param({"exact_share": 0.2}, None, Budgets((0.9,), (0.2, 0.2, 0.2)), id="all-exact"),
        pytest.param(
            {"mass": TABLE, "exact_share": 0.2},
            0,
            Budgets((0.0, 0.3, 1.0), (0.2, 0.2, 0.0), (2,)),
            id="dense-before-exact",
        ),
        pytest.param({"mass": 1.0, "exact_share": 0.2}, 0, Budgets((1.0,)), id="all-before-exact"),
        pytest.param({"mass": TABLE, "select": "topk"}, 0, Budgets((1.0,)), id="topk"),
    ],
)
def test_budgets_of_a_layer(fields, layer, budgets):
    assert budgets_of(CabConfig(**fields), layer, 3) == budgets


@pytest.mark.parametrize("name", ["mass", "exact_share"])
@pytest.mark.parametrize(
    ("layer", "heads", "sentence"),
    [
        pytest.param(3, 3, "3 layers of 3 heads, which do not fit layer 3 of 3 heads", id="layer"),
        pytest.param(0, 4, "3 layers of 3 heads, which do not fit layer 0 of 4 heads", id="head"),
        pytest.param(None, 3, "this layer has no index", id="no-index"),
    ],
)
def test_a_table_of_another_model_is_refused(name, layer, heads, sentence):
    with pytest.raises(ValueError, match=rf"CabConfig\.{name} .*{sentence}"):
        budgets_of(CabConfig(**{name: TABLE}), layer, heads)


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
