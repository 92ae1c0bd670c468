"""``speed lora`` over ranks: two processes, what is wrong is not timed, lengths that are sought."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from bench import FakeBench, torchrun
from torch import nn

from cab_hf.eval.__main__ import main
from cab_hf.eval.speed import lora, spread
from cab_hf.eval.speed.lora import LoraStep, Settings
from cab_hf.eval.speed.spread import SPREADS, next_length
from cab_hf.eval.speed.team import Team

COMMITTED = lora.Path(__file__).parents[3] / "eval" / "results" / "speed-lora"
TINY = {"layers": 3, "hidden": 24, "intermediate": 40, "heads": 4, "kv_heads": 2, "head_dim": 8}
SMALL = ("query_block=32", "key_block=16", "local_blocks=1", "min_length=0", "dense_tail_blocks=1")


def settings_of(**more):
    given = {"device": "cpu", "lengths": (600,), "runs": 1, "cab": SMALL, "spread": SPREADS}
    return Settings(**{**TINY, **given, **more})


def sample_of(length, way, how, world, ms, **more):
    """A sample, as `LoraStep.measure` makes it."""
    fixed = {"density": 1.0, "ceiling": 1.0, "peak_gib": 2.0, "tflops": 1.0, "ran_as": None}
    place = {"length": length, "implementation": way, "spread": how, "world": world}
    result = {"ms": ms, "fits": True, "sought": False, "room_gib": 9.0, "error": None}
    return place | fixed | result | more


# --- the command


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a whole run of two ranks."""
    out = tmp_path_factory.mktemp("spread") / "run"
    sizes = [word for name, size in TINY.items() for word in (f"--{name}".replace("_", "-"), size)]
    words = [*sizes, "--device", "cpu", "--lengths", "600", "--runs", "1", "--max-density", "0.2"]
    words += [word for each in SMALL for word in ("--cab", each)]
    command = ["-m", "cab_hf.eval", "speed", "lora", *map(str, words), "--out", str(out)]
    done = torchrun(*command, "--implementations", "sdpa,cab_dense,cab")
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.slow
def test_a_whole_run(finished):
    results = json.loads((finished / "results.json").read_text())
    rows = results["rows"]
    assert results["provenance"]["settings"]["worlds"] == [2]
    ways = ("sdpa", "cab_dense", "cab")
    # a sequence that is sharded is attended by what knows of ranks
    meant = [(how, way) for how in SPREADS for way in (ways[1:] if how == "cp" else ways)]
    assert [(row["spread"], row["implementation"]) for row in rows] == meant
    assert [row["world"] for row in rows] == [1] * 3 + [2] * 8
    alone = {row["implementation"]: row for row in rows[:3]}
    for row in rows:
        assert row["error"] is None and row["ms"] > 0 and row["fits"]
        one = alone[row["implementation"]]
        # one half of a text, or a text of its own
        share = 0.5 if row["spread"] == "cp" else 1.0
        assert row["tokens_s"] == pytest.approx(share * 600 / row["ms"] * 1e3)
        assert row["efficiency"] == pytest.approx(share * one["ms"] / row["ms"])
        # ranks choose as one does
        assert row["density"] == pytest.approx(one["density"], rel=0.1)
        assert (row["density"] < 1) == (row["implementation"] == "cab")
    (sharded,) = (row for row in rows if row["spread"] == "cp" and row["implementation"] == "cab")
    assert sharded["baseline"] == "cab_dense"
    # of the same text, every query being on one rank
    assert sharded["density"] == pytest.approx(alone["cab"]["density"], rel=1e-6)


@pytest.mark.parametrize("how", ["ddp", "alone,cp"])
def test_without_torchrun_it_says_how_to_launch(tmp_path, monkeypatch, capsys, how):
    monkeypatch.delenv("RANK", raising=False)
    words = ["--device", "cpu", "--out", str(tmp_path / "none"), "--spread", how]
    assert main(["speed", "lora", *words]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith("torchrun --nproc_per_node=N -m cab_hf.eval speed lora.")
    assert not (tmp_path / "none").exists()


def test_one_rank_is_refused(one_process, tmp_path):
    measured = LoraStep(settings_of(out=str(tmp_path)), Team(dist.group.WORLD))
    with pytest.raises(ValueError, match="torchrun started 1; give it --nproc_per_node=2"):
        measured.over_ranks()


# --- what is compared


def test_efficiency_is_over_the_same_way_and_length_alone():
    samples = [
        sample_of(1000, "cab", "alone", 1, 100.0),
        sample_of(1000, "cab_dense", "alone", 1, 200.0),
        sample_of(2000, "cab", "alone", 1, 400.0),
        sample_of(1000, "cab", "ddp", 2, 125.0),
        sample_of(2000, "cab", "cp", 2, 250.0),
        sample_of(2000, "cab_dense", "cp", 2, 1000.0),
        sample_of(1000, "cab", "fsdp2", 4, 160.0),
    ]
    rows = LoraStep.rows(samples, {})
    actual = {(r["spread"], r["implementation"], r["length"]): r for r in rows}
    sharded = actual["cp", "cab", 2000]
    assert actual["ddp", "cab", 1000]["efficiency"] == pytest.approx(100 / 125)
    assert actual["ddp", "cab", 1000]["tokens_s"] == pytest.approx(8000)
    assert sharded["efficiency"] == pytest.approx(400 / 250 / 2)
    assert actual["fsdp2", "cab", 1000]["tokens_s"] == pytest.approx(1000 / 0.16)
    # nobody has read so much alone
    assert actual["cp", "cab_dense", 2000]["efficiency"] is None
    assert (sharded["baseline"], sharded["over_best"]) == ("cab_dense", 4.0)


def sample_on(group, how, way, meddle=None, settings=None, **more):
    """The sample of a case, on each rank of a group."""
    with pytest.MonkeyPatch.context() as patch:
        if meddle is not None:
            meddle(group, patch)
        measured = LoraStep(settings_of(**(settings or {})), Team(group, group))
        world = 1 if how == "alone" else group.size()
        case = {"length": 600, "implementation": way, "spread": how, "world": world}
        try:
            return measured.measure({**case, "sought": False, **more})
        finally:
            lora.trainee.cache_clear()
            lora.random_model.cache_clear()


def twice_the_same(group, patch):
    """Ranks that all learn the first sequence."""
    draw = lora.batch_of

    def drawn(settings, tokens, number=0):
        # what one process does in turns is right
        return draw(settings, tokens, 0 if wrapped() else number)

    def wrapped():
        return spread_now[0]

    spread_now, made = [False], spread.shared

    def shared(*given):
        spread_now[0] = given[0] != "alone"
        return made(*given)

    patch.setattr(lora, "batch_of", drawn)
    patch.setattr(spread, "shared", shared)


def deaf(group, patch):
    """Attention on the second rank that does not see the first half of a head."""
    from cab_hf.distributed.sharded import ShardedFrame

    attend = ShardedFrame.attend

    def halved(self, *heads):
        out = attend(self, *heads)
        return out * 0.5 if group.rank() else out

    patch.setattr(ShardedFrame, "attend", halved)


@pytest.mark.parametrize(
    ("how", "way", "meddle"),
    [
        pytest.param("ddp", "sdpa", twice_the_same, id="ddp", marks=pytest.mark.slow),
        pytest.param("fsdp2", "sdpa", twice_the_same, id="fsdp2", marks=pytest.mark.slow),
        pytest.param("cp", "cab_dense", deaf, id="cp"),
    ],
)
def test_what_is_wrong_is_not_timed(ranks, how, way, meddle):
    for sample in ranks.run(2, sample_on, how, way, meddle):
        assert sample["ms"] is None and sample["fits"] is None
        with pytest.raises(AssertionError, match=rf"wrong by .* in the gradients of {how} at"):
            raise AssertionError(sample["error"])


def test_gradients_may_be_off_by_little_more_than_one_process_is():
    exact = torch.ones(4)
    spread.check_gradients([torch.full((4,), 1.014)], spread.Meant(exact, 0.01), "it")
    for result, rounding in ((1.016, 0.01), (1.001, 0.0)):
        with pytest.raises(ArithmeticError, match=r"wrong by .* in the gradients of it"):
            spread.check_gradients([torch.full((4,), result)], spread.Meant(exact, rounding), "it")


def test_what_is_meant_is_computed_in_float32():
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, bias=False).bfloat16()
    weight = layer.weight.detach().clone()
    x = torch.randn(32, 64)

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, batch):
            return self.layer(batch.to(self.layer.weight.dtype)).float().square().sum()

    loss = Loss()
    alone = loss, "cp", 2, 32, lambda tokens, number: x
    rounded = spread.of_one_process(*alone)
    assert spread.meant(rounded, None).rounding == 0.0
    with spread.in_float32(loss):
        actual = spread.meant(rounded, spread.of_one_process(*alone))
    exact = torch.nn.Parameter(weight.float())
    (x @ exact.T).square().sum().div(32).backward()
    torch.testing.assert_close(actual.gradients, exact.grad.flatten())
    assert 1e-4 < actual.rounding < 0.05
    assert layer.weight.dtype == torch.bfloat16 and torch.equal(layer.weight, weight)


def test_below_float32_a_small_sequence_keeps_every_block():
    config = replace(settings_of().cab_config, mass_threshold=0.01)
    exact, rounded = (spread.check_config(config, d) for d in (torch.float32, torch.bfloat16))
    assert exact == replace(config, min_length=0)
    assert rounded == replace(exact, mass_threshold=0.0, max_density=1.0)


# --- the longest


@pytest.mark.parametrize("limit", [0, 63, 64, 200, 1000, 6399, 6400, 100_000])
@pytest.mark.parametrize("guess", [64, 1024, 6400, 50_000])
@pytest.mark.parametrize("asked", [(), (100,), (100, 3000)])
def test_the_longest_that_fits_is_found(limit, guess, asked):
    tried = {length: length <= limit for length in asked}
    for _ in range(40):
        length = next_length(tried, guess, 64)
        if length is None:
            break
        assert length % 64 == 0 and length > 0 and length not in tried
        tried[length] = length <= limit
    assert length is None
    fitting = [n for n, fits in tried.items() if fits]
    assert max(fitting, default=0) // 64 == limit // 64


def layers_reached(monkeypatch, count):
    """The layers whose gradients were made, of so many."""
    made, layers = [], nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def make(number):
        return lambda *_: made.append(number)

    x = torch.zeros(2, 4)
    with spread.until_peak(layers):
        for number, layer in enumerate(layers):
            x = layer(x)
            x.register_hook(make(number))
        with lora.suppress(spread.Reached):
            x.sum().backward()
    assert not any(layer._forward_pre_hooks for layer in layers)
    return made


@pytest.mark.parametrize(
    ("count", "meant"),
    [
        # the gradient of what layer 2 of 5 gives is what layer 3 had to make
        pytest.param(5, [4, 3, 2], id="many"),
        # nothing is learnt before the first
        pytest.param(2, [1, 0], id="two"),
        pytest.param(1, [0], id="one"),
    ],
)
def test_a_try_ends_behind_the_second_to_last_layer(monkeypatch, count, meant):
    assert layers_reached(monkeypatch, count) == meant


class Small(FakeBench):
    """A GPU that holds 300 tokens, whatever they are learnt by."""

    tries: list = []

    def room(self):
        return 2.0**-10

    def walls(self, call, runs, before=lambda: None):
        call()
        return [1.0], 0.5

    def wall(self, call, runs, warm_up_calls):
        call()
        return 1.0, 0.5


def search(tmp_path, monkeypatch, step, *words):
    """Rows of a run with a search, in which ``step`` stands for a step."""
    made = lora.learn
    with monkeypatch.context() as patch:
        patch.setattr(LoraStep, "bench", Small())
        patch.setattr(LoraStep, "draw", lambda *_: None)
        patch.setattr(lora, "WARM_UP_TOKENS", 32)
        patch.setattr(lora, "learn", lambda *given: step(made, *given))
        sizes = ["--layers", "3", "--runs", "1", "--lengths", "96", "--implementations", "sdpa,cab"]
        words = [*sizes, "--longest", *words, "--device", "cpu", "--out", str(tmp_path)]
        assert main(["speed", "lora", *words]) == 0
    return json.loads((tmp_path / "results.json").read_text())["rows"]


def full_at_300(made, shared, optimizer, tokens):
    if tokens > 300:
        # a step that has begun
        for parameter in shared.learnt:
            parameter.grad = torch.ones_like(parameter)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0")
    made(shared, optimizer, tokens)


@pytest.mark.slow
def test_a_search_for_the_longest(tmp_path, monkeypatch):
    rows = search(tmp_path, monkeypatch, full_at_300)
    for way in ("sdpa", "cab"):
        some = [row for row in rows if row["implementation"] == way]
        tried = {row["length"]: row["fits"] for row in some}
        assert tried[256] and tried[320] is False and tried[96]
        assert all(fits == (length <= 300) for length, fits in tried.items())
        assert all(row["ms"] is None for row in some if row["sought"])
    # that memory ran out is no remark
    # nothing is left of what did not fit
    given = {"device": "cpu", "layers": 3, "lengths": (96,), "runs": 1, "out": str(tmp_path)}
    settings = Settings(**given, implementations=("sdpa", "cab"), longest=True)
    hits = lora.trainee.cache_info().hits
    assert all(p.grad is None for p in lora.trainee(settings).objective.parameters())
    assert lora.trainee.cache_info().hits == hits + 1
