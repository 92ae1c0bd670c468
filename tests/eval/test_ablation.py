"""The ablation command: what it changes, how changes are paired, and that it can be resumed."""

import json

import pytest

from cab_hf.config import CabConfig
from cab_hf.eval import ablation
from cab_hf.eval.__main__ import main
from cab_hf.eval.ablation import Ablation, Settings, changes
from cab_hf.eval.intervals import mean_interval, paired_difference
from cab_hf.eval.on_model import SMALL

SPARSE = ("query_block=32", "key_block=16", "top_p=0.6", "dense_tail_blocks=1", "local_blocks=2")
DOCUMENTS = ("--documents", "2", "--lengths", "400", "--keys", "2", "--asked", "2")
WHOLE = {"rows", "curvature", "bounds", "mass", "top", "tail", "sinks", "local", "query", "key"}


def start(model_folder, out, *more, drawn=False):
    given = ["--model", model_folder, "--out", out, "--device", "cpu", *DOCUMENTS]
    given += [word for assignment in SPARSE for word in ("--cab", assignment)]
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(Ablation, "draw", lambda *_: None)
        return main(["ablation", *map(str, (*given, *more))])


def command(model_folder, out, *more, **kind):
    assert start(model_folder, out, *more, **kind) == 0
    return json.loads((out / "results.json").read_text())


# --- what is changed


@pytest.mark.parametrize(
    "config", [CabConfig(), CabConfig(**SMALL)], ids=["default", "default of a CPU"]
)
def test_every_change_is_another_config_that_holds(config):
    made = changes(config)
    assert {name.partition("_")[0] for name in made} >= WHOLE - {"tail"}
    # the default of a CPU has no tail to lose
    assert ("tail_none" in made) == (config.dense_tail_blocks > 0)
    configs = [config.changed(**change.fields) for change in made.values()]
    assert len({*configs, config}) == len(configs) + 1
    assert all(change.says.endswith(".") for change in made.values())
    assert len({change.says for change in made.values()}) == len(made)


def test_a_change_that_changes_nothing_is_left_out():
    assert "rows_none" not in changes(CabConfig(exact_queries=0))
    assert "rows_all" not in changes(CabConfig(exact_queries=128))
    # keys of 16 are the smallest blocks there are
    assert "key_block_half" not in changes(CabConfig(key_block=16))


def test_changes_are_made_of_what_is_set(tmp_path):
    fields = {"changes": ("rows_all", "sinks_none"), "cab": ("query_block=64", "top_p=0.5")}
    settings = Settings(device="cpu", **fields, variant=("mine=top_p=0.3",))
    configs = settings.configs
    assert list(configs) == ["cab", "cab:rows_all", "cab:sinks_none", "cab:mine"]
    assert configs["cab:rows_all"] == configs["cab"].changed(exact_queries=64)
    assert configs["cab:sinks_none"].top_p == 0.5
    assert settings.compared == ("dense", "full", *configs)


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        pytest.param(
            ["--changes", "magic"], "changes is 'magic'; it must be of rows_none", id="name"
        ),
        pytest.param(["--cab", "predictor=random"], "predictor and select", id="another predictor"),
        pytest.param(
            ["--variant", "rows_all=top_p=0.5"],
            "variant is ('rows_all=top_p=0.5',); it must be NAME=... of other names than",
            id="taken",
        ),
        pytest.param(
            ["--methods", "dense"], "with cab, which all is held against", id="no default"
        ),
    ],
)
def test_what_cannot_be_ablated_is_refused(more, refusal, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["ablation", "--device", "cpu", "--out", str(tmp_path), *more])
    assert refusal in capsys.readouterr().err


# --- rows


def sample(method, probe, index, **result):
    place = {"method": method, "text": "noise", "length": 8, "budget": None, "probe": probe}
    return {**place, "depth": None, "index": index, "fitted": None, "density": 0.5, **result}


def test_changes_are_paired_with_the_default_by_hand():
    def of(method, kls, *right):
        more = {"count": 10, "nll": 1.0, "agree": 8}
        return [
            *(sample(method, "continuation", i, kl=kl, **more) for i, kl in enumerate(kls)),
            *(sample(method, "recall", i, right=each) for i, each in enumerate(right)),
        ]

    default = CabConfig(min_length=0)
    configs = {
        "cab": default.to_dict(),
        "cab:sinks_none": default.changed(sink_blocks=0).to_dict(),
        "cab:mine": default.changed(top_p=0.3, top_k_share=0.0).to_dict(),
    }
    samples = [
        *of("dense", [0.0, 0.0], [True, True], [True, True]),
        *of("cab", [1.0, 2.0], [True, True], [True, False]),
        *of("cab:sinks_none", [2.0, 3.1, 9.0], [False, True], [False, False]),
        *of("cab:mine", [0.5], [True, True]),
    ]
    rows = Ablation.rows(samples, {"cab_configs": configs})
    dense, cab, mine, sinks = sorted(
        rows, key=lambda row: (row["method"] != "dense", row["method"])
    )
    assert "to_default" not in dense and "to_default" not in cab
    assert (sinks["change"], mine["change"]) == ("sink_blocks=0", "top_p=0.3, top_k_share=0.0")
    assert sinks["says"] == "The beginning of a text is not always kept."
    assert mine["says"] == ablation.GIVEN.format("mine")
    kl = sinks["to_default"]["continuation"]
    # the default has read no third document
    expected = mean_interval([0.2, 0.31], [0.1, 0.2])
    assert [kl[name] for name in ("delta", "delta_low", "delta_high")] == pytest.approx(expected)
    assert kl["pairs"] == 2
    among = mean_interval([0.2, 0.31], [0.1, 0.2], level=0.975)
    assert [kl[name] for name in ("delta", "among_low", "among_high")] == pytest.approx(among)
    recall = sinks["to_default"]["recall"]
    interval = paired_difference([0, 1, 0, 0], [1, 1, 1, 0])
    assert tuple(recall[name] for name in ("delta", "delta_low", "delta_high")) == interval
    assert mine["to_default"]["continuation"] == {"delta": pytest.approx(-0.05), "pairs": 1}

    (table,) = Ablation.tables(rows).values()
    assert "| cab:sinks_none | sink_blocks=0 | 8 | 0.50 |" in table
    assert "| -0.0500 |" in table
    assert "attention ms" not in table and "end-of-prompt" not in table
    # its own interval is above 0, that of both changes together is not
    assert kl["delta_low"] > 0 > kl["among_low"]
    said = (
        "On noise, 8 tokens, of {} changes these raise the KL behind the prompt: {}; these "
        "lower it: none (95 % for all of them together)."
    )
    assert Ablation.readings(rows)[-1] == said.format(2, "none")
    alone = [each for each in samples if each["method"] != "cab:mine"]
    rows = Ablation.rows(alone, {"cab_configs": configs})
    assert Ablation.readings(rows)[-1] == said.format(1, "sinks_none")


# --- the command


def test_a_killed_run_ends_as_a_whole_one(model_folder, tmp_path, monkeypatch):
    more = ("--changes", "rows_none,tail_none,key_block_twice", "--variant", "mine=top_p=0.3")
    complete = command(model_folder, tmp_path / "whole", *more, drawn=True)
    rows = {row["method"]: row for row in complete["rows"]}
    names = ("rows_none", "tail_none", "key_block_twice", "mine")
    assert list(rows) == ["dense", "cab", *(f"cab:{name}" for name in names), "full"]
    for name in names:
        row = rows[f"cab:{name}"]
        assert row["to_default"].keys() == {"continuation", "asked", "recall"}
        assert row["to_default"]["continuation"]["pairs"] == 2
    assert rows["cab:rows_none"]["change"] == "exact_queries=0"
    report = (tmp_path / "whole" / "report.md").read_text()
    assert report.startswith("# Ablation of the default")
    assert "| method | what was changed | length | density | KL behind the prompt |" in report
    assert "The last queries of a text choose like all others." in report

    measure, calls = Ablation.measure, []

    def counted(self, case):
        calls.append(case)
        if len(calls) == 16:
            raise KeyboardInterrupt
        return measure(self, case)

    monkeypatch.setattr(Ablation, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        command(model_folder, tmp_path / "killed", *more)
    assert command(model_folder, tmp_path / "killed", *more)["rows"] == complete["rows"]


def test_all_changes_run(model_folder, tmp_path):
    results = command(model_folder, tmp_path, "--probes", "continuation", "--documents", "1")
    changed = [row for row in results["rows"] if "to_default" in row]
    default = Settings(device="cpu", cab=SPARSE).configs["cab"]
    assert {row["method"] for row in changed} == {f"cab:{name}" for name in changes(default)}
    assert not any(row["says"].startswith(ablation.GIVEN.format("")[:-1]) for row in changed)
    # and nearly all are felt
    assert sum(row["to_default"]["continuation"]["delta"] != 0 for row in changed) > 15
