"""Configs of earlier versions load by the names that their fields had; both names are refused."""

import json

import pytest

from cab_hf import CabConfig
from cab_hf.renamed import renamed, renamed_in
from cab_hf.runs.log import Log, LogError, read_log

OLD = {"mass": 0.8, "dense_tail": 3, "predictor": "xattention", "min_length": 64}
NEW = CabConfig(top_p=0.8, dense_tail_blocks=3, predictor="xattention", min_length=64)


def test_fields_load_by_the_names_they_had(tmp_path):
    assert CabConfig.from_dict(OLD) == NEW
    (tmp_path / "old.json").write_text(json.dumps(OLD))
    assert CabConfig.calibrated(tmp_path / "old.json") == NEW
    # what is written has the names of today
    assert not {"mass", "dense_tail"} & NEW.to_dict().keys()
    assert CabConfig.from_dict(NEW.to_dict()) == NEW


@pytest.mark.parametrize(
    ("old", "new"),
    [("mass", "top_p"), ("bridges", "top_k_share"), ("dense_tail", "dense_tail_blocks")],
)
def test_both_names_of_a_field_are_refused(old, new):
    with pytest.raises(ValueError, match=f"{old!r} and {new!r} are two names of one field"):
        CabConfig.from_dict({old: 1, new: 1})


def test_unknown_fields_are_refused_as_before():
    with pytest.raises(ValueError, match="CabConfig has no field 'masses'; its fields are query_"):
        CabConfig.from_dict({"masses": 0.5})


def test_keyword_overrides_of_earlier_versions_replace_what_is_set(tiny_of_three_layers):
    import cab_hf

    model = cab_hf.apply_cab(tiny_of_three_layers, NEW)
    changed = cab_hf.apply_cab(model, **{"mass": 0.5}).config.cab_config
    assert (changed["top_p"], "mass" in changed) == (0.5, False)


@pytest.fixture
def tiny_of_three_layers():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


@pytest.mark.parametrize(
    ("recorded", "read"),
    [
        # a config, whole or in part, wherever it stands
        ({"cab_config": {**OLD, "key_block": 64, "gone": 1}}, {"top_p": 0.8, "gone": 1}),
        ({"options": [{"mass": 0.5, "exact_queries": 4}]}, {"top_p": 0.5, "exact_queries": 4}),
        ({"words": ["mass=0.5", "coarsen=box", "x=1"]}, ["top_p=0.5", "coarsen=minmax", "x=1"]),
        # what was measured is no field
        ({"row": {"mass": 0.5, "needle": 1.0}}, {"mass": 0.5, "needle": 1.0}),
        ({"graph": {"bridges": 8, "outcomes": []}}, {"bridges": 8, "outcomes": []}),
        ({"row": {"coarsen": "box", "n": 3}}, {"coarsen": "minmax", "n": 3}),
    ],
)
def test_what_runs_recorded_is_read_by_the_names_of_today(recorded, read):
    (seen,) = renamed_in(recorded).values()
    seen = seen[0] if isinstance(seen, list) and isinstance(read, dict) else seen
    if isinstance(read, dict):
        assert seen.items() >= read.items() and "dense_tail" not in seen
        assert renamed_in(seen) == seen
    else:
        assert seen == read


def test_a_log_of_an_earlier_version_goes_on(tmp_path):
    path = tmp_path / "log.jsonl"
    full = {**OLD, "key_block": 64}
    header = {"identity": {"seed": 0, "cab_config": full}, "started": "2026"}
    path.write_text(
        json.dumps(header) + "\n" + json.dumps({"index": 0, "own": {"mass": 1.0}}) + "\n"
    )
    identity = {"seed": 0, "cab_config": renamed(full)}
    with Log(path, identity, ("index",)) as log:
        assert log.records == [{"index": 0, "own": {"top_p": 1.0}}]
    assert read_log(path)[0] == identity
    other = {"seed": 0, "cab_config": {**renamed(full), "top_p": 0.5}}
    with pytest.raises(LogError, match="cab_config.top_p 0.8, this run has 0.5"):
        Log(path, other, ("index",))


@pytest.mark.parametrize(
    ("recorded", "read"),
    [
        (
            {"set": ["top_p=0.5"], "cab": ["a=b.json"]},
            {"cab": ["top_p=0.5"], "variant": ["a=b.json"]},
        ),
        ({"set": []}, {"cab": []}),
        ({"config": ["b=1"], "cab_config": None}, {"cab": ["b=1"], "cab_config": None}),
        # of a run that trains, and of one of today
        ({"cab": ["top_p=0.5"], "config": "a.yaml"}, {"cab": ["top_p=0.5"], "config": "a.yaml"}),
        ({"cab": ["a=1"], "variant": ["b=2"]}, {"cab": ["a=1"], "variant": ["b=2"]}),
    ],
)
def test_options_of_earlier_versions_go_by_their_names_of_today(recorded, read):
    assert renamed_in({"settings": recorded}) == {"settings": read}
