"""``speed ttft`` over ranks: two processes, the logits of one, a cache that stays sharded."""

import json

import pytest
import torch
from bench import torchrun

from cab_hf.eval.speed import model
from cab_hf.eval.speed import ttft as across
from cab_hf.eval.speed.team import Team
from cab_hf.eval.speed.ttft import Settings
from cab_hf.eval.speed.ttft import TimeToFirstToken as Ttft

TINY = {"layers": 2, "hidden": 24, "intermediate": 40, "heads": 4, "kv_heads": 2, "head_dim": 8}
SMALL = ("query_block=32", "key_block=16", "local_blocks=1", "dense_tail_blocks=1")


def tiny(**more):
    return Settings(device="cpu", **{**TINY, "cab": SMALL, **more})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a whole run of two ranks."""
    out = tmp_path_factory.mktemp("across") / "run"
    words = ["--device", "cpu", "--lengths", "600", "--runs", "1", "--max-density", "0.2"]
    words += [word for each in SMALL for word in ("--cab", each)]
    done = torchrun("-m", "cab_hf.eval", "speed", "ttft", *words, "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.slow
def test_a_whole_run(finished):
    results = json.loads((finished / "results.json").read_text())
    rows = results["rows"]
    # what knows of ranks
    assert [row["implementation"] for row in rows] == ["cab_dense", "cab", "cab-always"]
    assert results["provenance"]["settings"]["worlds"] == [2]
    for row in rows:
        assert row["error"] is None and row["ms"] > 0 and row["world"] == 2
        assert row["baseline"] == "cab_dense"
        assert (row["density"] < 1) == (row["implementation"] == "cab-always")
    assert (finished / "figure.png").read_bytes().startswith(b"\x89PNG")


def read_on(group, way, length):
    """(logits, keys a layer, density) on a rank."""
    settings = tiny(lengths=(length,), max_density=("0.2",))
    team = Team(group, group)
    with across.prefilling_across(settings, length, way, team, 100, 512) as (call, known):
        read = call()
        cached = [layer.keys.shape[2] for layer in read.past_key_values.layers]
        # inference tensors stay where they were made
        return read.logits.clone().tolist(), cached, known()["density"]


@pytest.mark.parametrize("length", [600, 1024])
@pytest.mark.parametrize("way", ["cab_dense", "cab-always"])
def test_the_last_token_has_the_logits_of_one_process(ranks, way, length):
    settings = tiny(lengths=(length,), max_density=("0.2",))
    with model.prefilling(settings, length, way) as (call, known):
        expected, density = call().logits, known()["density"]
    actual = ranks.run(2, read_on, way, length)
    # the first of four chunks and the last are on rank 0; 600 tokens end in the third, on rank 1
    holder = 0 if length == 1024 else 1
    torch.testing.assert_close(torch.tensor(actual[holder][0]), expected)
    other = torch.tensor(actual[1 - holder][0])
    assert other.shape == expected.shape and not torch.allclose(other, expected)
    for _, cached, share in actual:
        # chunks of 256 and of 256 tokens: half of the prompt, with its padding
        assert cached == [512] * 2
        assert share == pytest.approx(density, rel=1e-6)


def test_an_mlp_in_chunks_gives_the_same():
    made = model.random_model(tiny(lengths=(64,)))
    mlp, x = made.model.layers[0].mlp, torch.randn(1, 70, 24)
    with torch.no_grad():
        expected, seen = mlp(x), []
        handle = mlp.gate_proj.register_forward_hook(lambda _, given, __: seen.append(given[0]))
        with across.mlp_in_chunks(made, 32):
            torch.testing.assert_close(mlp(x), expected)
            assert [each.shape[1] for each in seen] == [32, 32, 6]
        mlp(x)
        handle.remove()
    # as it was found
    assert seen[-1].shape[1] == 70 and "forward" not in vars(mlp)


def slowest_on(group):
    """The sample of a case, of ranks of which one has a higher peak."""

    class Uneven:
        device = torch.device("cpu")

        def settle(self):
            pass

        def walls(self, call, runs, before=lambda: None):
            before()
            call()
            return [100.0 * (group.rank() + 1)] * runs, 3.0 - group.rank()

    measured = Ttft(tiny(lengths=(600,), runs=1), Team(group, group))
    measured.bench = Uneven()
    case = {"length": 600, "implementation": "cab_dense", "world": group.size()}
    return measured.measure(case)


def test_the_slowest_rank_and_the_highest_peak_count(ranks):
    for sample in ranks.run(2, slowest_on):
        assert (sample["ms"], sample["peak_gib"], sample["error"]) == (200.0, 3.0, None)
        work = tiny(lengths=(600,)).attended_flops(600, 1.0)
        assert sample["tflops"] == pytest.approx(work / 2 / 0.2 / 1e12)


def test_ranks_take_what_knows_of_them(monkeypatch):
    assert tiny().implementations[0] == "sdpa" and "ranks" not in tiny().method
    monkeypatch.setenv("RANK", "0")
    assert tiny().implementations == ("cab_dense", "cab", "cab-always")
    assert "the slowest of each run" in tiny().method
    with pytest.raises(ValueError, match="'sdpa',.; it must be out of cab_dense, cab"):
        tiny(implementations=("sdpa",))
