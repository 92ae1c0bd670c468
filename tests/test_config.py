import copy
import dataclasses
import inspect
import json
import re

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, WhisperConfig

from cab_hf import CabConfig, checks
from cab_hf.config import FIELDS_BY_NAME, Origin, num_typical_queries
from cab_hf.hf.fit import require_layers

CASCADE_CONFIG_FIELDS = {"predictor": "cascade", "anchors": (0,)}
NAN, INFINITY = float("nan"), float("inf")
# values whose type or range is wrong for most fields of CabConfig
INVALID_VALUES = [
    *(None, True, 1, -1, 1.5, NAN, INFINITY, 2**40, "x", "", b"x", {}, {"a": 1}, {1}, object()),
    *((), (1,), ((1,),), ((),), (None,), [[]], [["x"]], [[True]], [[NAN]], [[-1]], [[2, 1], [1]]),
    *(torch.tensor(1), torch.ones(2), np.float32(0.5), np.ones((1, 1))),
]
CALIBRATION_ORIGIN = Origin("smollm2", layers=30, heads=9, kv_heads=3, length=8192)


@pytest.mark.parametrize(
    "field_name, invalid_value",
    [
        ("query_block", 100),
        ("query_block", 0),
        ("query_block", 128.0),
        ("key_block", 48),
        ("sink_blocks", -1),
        ("local_blocks", True),
        ("dense_tail_blocks", -1),
        ("curvature", "ollivier"),
        ("sparsity", 1.0),
        ("redundancy", 2),
        ("max_density", 0),
        ("dense_layers", (-1,)),
        ("dense_layers", 3),
        ("min_length", 1.5),
        ("engine", None),
        ("predictor", 7),
        ("sparse_decode", "yes"),
        ("decode_tokens", 127),
        ("decode_tokens", 0.0),
        ("decode_tokens", 1.0),
        ("decode_tokens", True),
        ("sparsity", ()),
        ("sparsity", ((0.5, 1.0),)),
        ("sparsity", ((0.5, 0.5), (0.5,))),
        ("sparsity", (0.5, 0.5)),
        ("mass_threshold", -0.1),
        ("mass_threshold", 1.1),
        ("share_threshold", 0),
        ("share_threshold", float("nan")),
        ("typical_queries", 0),
        ("typical_queries", 6),
        ("outlier_queries", 3),
        ("typical_key_stride", 0),
        ("typical_key_stride", 3),
        ("typical_key_stride", 128),
        ("outlier_queries", -1),
        ("outlier_queries", 256),
        ("outlier_queries", 2.0),
        ("outlier_queries", False),
        ("min_length", 2**70),
        ("query_block", 2**70),
        ("key_block", 2**31),
        ("sink_blocks", 2**31),
        ("local_blocks", 2**40),
        ("dense_tail_blocks", 2**63),
        ("dense_layers", (2**31,)),
        ("engine", list(range(1000))),
        ("origin", "smollm2"),
        ("origin", ("smollm2", 30)),
        ("origin", {"model": "smollm2"}),
        ("origin", {**CALIBRATION_ORIGIN._asdict(), "heads": 0}),
        ("origin", {**CALIBRATION_ORIGIN._asdict(), "layers": "30"}),
        ("origin", {**CALIBRATION_ORIGIN._asdict(), "length": None}),
        ("origin", {**CALIBRATION_ORIGIN._asdict(), "model": None}),
    ],
)
def test_out_of_range_value_raises_with_field_name(field_name, invalid_value):
    with pytest.raises(
        ValueError, match=rf"CabConfig\.{field_name} must be .*, got "
    ) as error_info:
        CabConfig(**{field_name: invalid_value})
    assert len(str(error_info.value)) < 200


@pytest.mark.parametrize("base_fields", [{}, CASCADE_CONFIG_FIELDS], ids=["rows", "cascade"])
@pytest.mark.parametrize("field_name", FIELDS_BY_NAME)
def test_wrong_type_raises_or_serialises(field_name, base_fields):
    for invalid_value in INVALID_VALUES:
        try:
            config = CabConfig(**{**base_fields, field_name: invalid_value})
        except ValueError as error:
            assert re.match(rf"CabConfig\.{field_name} (is|must be) ", str(error))
        else:
            assert CabConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("head_map", [1, 0, None, False, "", {}, torch.ones(2)])
def test_head_map_must_be_a_table(head_map):
    with pytest.raises(ValueError, match=r"CabConfig.head_map must be a table.*, got "):
        CabConfig(**CASCADE_CONFIG_FIELDS, head_map=head_map)


@pytest.mark.parametrize("number", [np.float32(0.5), np.int64(8192), torch.tensor(0.5)])
def test_error_shows_value_of_numpy_and_torch_numbers(number):
    field_name = "min_length" if isinstance(number, np.int64) else "mass_threshold"
    with pytest.raises(
        ValueError, match=rf"CabConfig\.{field_name} must be .*, got {re.escape(repr(number))}"
    ):
        CabConfig(**{field_name: number})


def test_default_min_length_is_16384():
    assert CabConfig().min_length == 16384


def test_config_is_frozen_and_hashable():
    config = CabConfig(dense_layers=[1, 2])
    assert hash(config) == hash(CabConfig(dense_layers=(1, 2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mass_threshold = 0.5


@pytest.mark.parametrize(
    "config",
    [
        CabConfig(),
        CabConfig(dense_layers=(0, 3), mass_threshold=1),
        CabConfig.published(0.9, "additive"),
        CabConfig.published(((0.0, 0.5), (0, 0.25))),
        CabConfig(origin=CALIBRATION_ORIGIN),
        CabConfig(origin=CALIBRATION_ORIGIN._replace(layers=None, heads=None, kv_heads=None)),
    ],
    ids=["default", "changed", "published", "tables", "calibrated", "calibrated-uneven"],
)
def test_config_round_trips_through_json(config):
    assert CabConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_table_lists_become_tuples_and_serialise_as_lists():
    config = CabConfig.published([[0.5, 0.0]])
    assert config.sparsity == ((0.5, 0.0),) and hash(config) == hash(CabConfig(**config.to_dict()))
    assert config.to_dict()["sparsity"] == [[0.5, 0.0]]


def test_saved_file_names_calibrated_model(tmp_path):
    config = CabConfig(origin=CALIBRATION_ORIGIN)
    config.save(tmp_path / "own.json")
    origin_fields = {"model": "smollm2", "layers": 30, "heads": 9, "kv_heads": 3, "length": 8192}
    assert json.loads((tmp_path / "own.json").read_text())["origin"] == origin_fields
    assert CabConfig.calibrated(tmp_path / "own.json") == config == CabConfig(origin=origin_fields)
    assert hash(config) == hash(CabConfig(origin=origin_fields)) != hash(CabConfig())
    # a config that was not calibrated has no origin
    assert "origin" not in CabConfig().to_dict()


@pytest.mark.parametrize(
    ("model_config", "last_layer"),
    [
        pytest.param(LlamaConfig(num_hidden_layers=3), 2, id="llama"),
        pytest.param(WhisperConfig(encoder_layers=2, decoder_layers=5), 4, id="decoder"),
    ],
)
def test_layer_index_beyond_model_raises(model_config, last_layer):
    require_layers(CabConfig(dense_layers=(0, last_layer)), model_config)
    with pytest.raises(ValueError, match=rf"dense_layers has 99; .* 0 to {last_layer}\."):
        require_layers(CabConfig(dense_layers=(0, 99)), model_config)


def test_any_layer_index_is_valid_without_num_hidden_layers():
    require_layers(CabConfig(dense_layers=(99,)), PreTrainedConfig())


def test_model_config_with_cab_config_can_be_saved(tmp_path):
    cab_config = CabConfig.published(((0.5, 0.0),), dense_layers=(0,))
    for model_config in (LlamaConfig(cab_config=cab_config), LlamaConfig()):
        model_config.cab_config = cab_config
        model_config.save_pretrained(tmp_path)
        assert LlamaConfig.from_pretrained(tmp_path).cab_config == cab_config.to_dict()


def test_model_config_has_no_cab_config_by_default():
    model_config = LlamaConfig()
    assert model_config.cab_config is None and "cab_config" not in model_config.to_dict()
    model_config.cab_config = {"mass_threshold": 0.5}
    copied_model_config = copy.deepcopy(model_config)
    copied_model_config.cab_config["mass_threshold"] = 1.0
    assert model_config.cab_config == {"mass_threshold": 0.5}
    del model_config.cab_config
    assert model_config.cab_config is None and "cab_config" not in model_config.to_dict()


UNUSED_FIELDS = [
    pytest.param({"sparsity": 0.8}, "sparsity is 0.8, which predictor='rows' does", id="share"),
    pytest.param({"anchors": (0,)}, r"anchors is \(0,\), which predictor='rows'", id="anchors"),
    pytest.param(
        {"curvature": "additive"}, "curvature is 'additive', which .*predictor='frc'", id="rank"
    ),
    pytest.param(
        {"predictor": "frc", "typical_queries": 4},
        "typical_queries is 4, which .*='rows', predictor='cascade'",
        id="of-rows",
    ),
]


@pytest.mark.parametrize(("config_fields", "message_pattern"), UNUSED_FIELDS)
def test_unused_field_raises(config_fields, message_pattern):
    error_pattern = f"CabConfig.{message_pattern}"
    with pytest.raises(ValueError, match=error_pattern):
        CabConfig(**config_fields)
    with pytest.raises(ValueError, match=error_pattern):
        CabConfig.from_dict(config_fields)
    with pytest.raises(ValueError, match=error_pattern):
        CabConfig().changed(**config_fields)


@pytest.mark.parametrize(("config_fields", "message_pattern"), UNUSED_FIELDS)
def test_saved_unused_field_raises(config_fields, message_pattern):
    with pytest.raises(ValueError, match=f"CabConfig.{message_pattern}"):
        CabConfig.from_dict({**CabConfig().to_dict(), **config_fields})


@pytest.mark.parametrize(
    "config_fields",
    [
        {"predictor": "mine", "sparsity": 0.8, "redundancy": 0.5, "anchors": (3,)},
        {"curvature": "none", "sparsity": 0},
        {"predictor": "frc", "sparsity": 0.8, "outlier_queries": 0, "curvature": "additive"},
    ],
)
def test_used_fields_and_off_values_are_accepted(config_fields):
    assert (
        CabConfig(**config_fields).to_dict().items()
        >= CabConfig().changed(**config_fields).to_dict().items()
    )


def test_replace_resets_fields_that_become_unused():
    config = CabConfig(mass_threshold=0.5, outlier_queries=0, min_length=0)
    assert config.changed(predictor="frc", sparsity=0.5) == CabConfig(
        predictor="frc", sparsity=0.5, outlier_queries=0, min_length=0
    )
    with pytest.raises(ValueError, match="no field 'top_pp'"):
        config.changed(top_pp=0.5)


@pytest.mark.parametrize(
    ("config_fields", "unknown_names"),
    [
        ({"topk": 3}, "'topk'"),
        ({"topk": 3, "self": 1, "cls": 2}, "'topk', 'self' or 'cls'"),
        # fields that version 0.2 had: in a saved config, and in a dict that names a predictor
        ({**CabConfig().to_dict(), "coarsen": "minmax", "top_p": None}, "'coarsen' or 'top_p'"),
        ({"predictor": "frc", "select": "topk"}, "'select'"),
        ({"predictor": "mine", "top_p": 0.9}, "'top_p'"),
    ],
)
@pytest.mark.parametrize(
    "make_config",
    [CabConfig.from_dict]
    + [lambda fields, call=call: call(**fields) for call in (CabConfig, CabConfig().changed)]
    + [lambda fields: CabConfig.published(**fields)],
    ids=["from_dict", "constructor", "changed", "published"],
)
def test_unknown_fields_are_listed_in_one_error(make_config, config_fields, unknown_names):
    with pytest.raises(ValueError) as error_info:
        make_config(config_fields)
    field_names = ", ".join(field.name for field in dataclasses.fields(CabConfig))
    assert (
        str(error_info.value)
        == f"CabConfig has no field {unknown_names}; its fields are {field_names}."
    )


def test_from_dict_with_other_types_raises():
    with pytest.raises(ValueError, match="no field 1 or 'topk'; its fields are query_block"):
        CabConfig.from_dict({1: 2, "topk": 3})
    with pytest.raises(ValueError, match="cab_config must be a dict"):
        CabConfig.from_dict("top_p=0.9")


def test_old_name_of_outlier_queries_loads_with_warning(monkeypatch):
    monkeypatch.setattr(checks, "_shown_warning_keys", set())
    with pytest.warns(UserWarning, match="exact_queries is now outlier_queries") as caught_warnings:
        loaded_config = CabConfig.from_dict({"exact_queries": 8, "typical_queries": 8})
        assert CabConfig.from_dict({"exact_queries": 8}) == CabConfig(outlier_queries=8)
        assert CabConfig().changed(exact_queries=8) == CabConfig(outlier_queries=8)
        assert CabConfig(exact_queries=8) == CabConfig(outlier_queries=8)
    assert len(caught_warnings) == 1
    # a config with the old name exact_queries gets typical_key_stride 1, as it was computed then
    assert loaded_config == CabConfig(outlier_queries=8, typical_queries=8, typical_key_stride=1)
    with pytest.raises(ValueError, match="got both"):
        CabConfig.from_dict({"exact_queries": 8, "outlier_queries": 8})


def test_default_typical_queries_fits_every_block_size():
    assert num_typical_queries(CabConfig()) == 32
    assert num_typical_queries(CabConfig(16, 16)) == 16
    assert num_typical_queries(CabConfig(48, 48)) == 16
    with pytest.raises(ValueError, match="typical_queries must be a power of two .*, got 64"):
        CabConfig(48, 48, typical_queries=64)


def test_published_returns_settings_of_the_paper():
    config = CabConfig.published(sparsity=0.9)
    assert (config.predictor, config.curvature) == ("frc", "forman")
    assert (config.query_block, config.key_block, config.sparsity) == (64, 64, 0.9)
    assert (config.redundancy, config.sink_blocks, config.dense_tail_blocks) == (1.0, 0, 0)
    assert CabConfig.published(min_length=0, dense_tail_blocks=1).dense_tail_blocks == 1


def test_decode_tokens_requires_sparse_decode():
    with pytest.raises(ValueError, match="which sparse_decode=False does not read.*=True"):
        CabConfig(decode_tokens=512)
    config = CabConfig(sparse_decode=True, decode_tokens=512)
    assert config.changed(sparse_decode=False) == CabConfig()
    saved_fields = CabConfig().to_dict()
    del saved_fields["decode_tokens"]
    assert CabConfig.from_dict(saved_fields) == CabConfig()


@pytest.mark.parametrize("field_name", [field.name for field in dataclasses.fields(CabConfig)])
def test_docstring_states_default_of_every_field(field_name):
    docstring_entries = re.split(r"^    (?=\w+: )", inspect.getdoc(CabConfig), flags=re.MULTILINE)
    (docstring_entry,) = [
        field_entry
        for field_entry in docstring_entries
        if field_entry.startswith(f"{field_name}: ")
    ]
    default_value = getattr(CabConfig(), field_name)
    default_text = (
        f'``"{default_value}"``' if isinstance(default_value, str) else repr(default_value)
    )
    assert f"Default {default_text}." in " ".join(docstring_entry.split())
