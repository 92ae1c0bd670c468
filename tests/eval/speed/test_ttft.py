"""``speed ttft``: the model and its operations, rows by hand, gains and their ceiling."""

from dataclasses import replace

import pytest
import torch
from bench import FakeBench, refused, sample_of, shown, speed_run
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cab_hf import CabConfig
from cab_hf.eval.speed import dense, model
from cab_hf.eval.speed.ttft import Settings
from cab_hf.eval.speed.ttft import TimeToFirstToken as Ttft

TINY = {"layers": 3, "hidden": 24, "intermediate": 40, "heads": 4, "kv_heads": 2, "head_dim": 8}
# so few that 96 tokens have blocks to leave out
SMALL = ("query_block=32", "key_block=16", "local_blocks=1", "dense_tail_blocks=1")
BLOCKS = [word for each in SMALL for word in ("--cab", each)]


def tiny(**more):
    return Settings(device="cpu", **{**TINY, **more})


def derive(samples):
    return Ttft.rows([{**Ttft.ADDED, **sample} for sample in samples], {})


def made_sample(length, implementation, ms, density=1.0, **more):
    """A sample, as `Ttft.measure` makes it."""
    fixed = {"ceiling": 2.0, "peak_gib": None, "tflops": 1.0, "ran_as": None, "error": None}
    key = {"length": length, "implementation": implementation}
    return key | {"ms": ms, "density": density} | fixed | more


# --- the model


def test_operations_by_hand():
    settings = tiny(vocab=11)
    work = settings.model_flops(10)
    # per layer and token: q and o 24 x 32 each, k and v 24 x 16 each, three of 24 x 40 in the MLP
    weights = 3 * (2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 40)
    assert work["linear"] == 2 * (10 * weights + 24 * 11)
    assert work["attention"] == 3 * 4 * 4 * 8 * 10 * 10 / 2


def test_the_weights_counted_are_those_of_the_model():
    settings = tiny(vocab=11)
    made = model.random_model(settings)
    linear = [
        parameter.numel()
        for name, parameter in made.named_parameters()
        if "proj" in name or "lm_head" in name
    ]
    assert settings.model_flops(1)["linear"] == 2 * sum(linear)
    assert made.dtype == torch.float32 and 0.01 < made.lm_head.weight.std() < 0.03


@pytest.mark.parametrize("name", ["sdpa", "SDPA", "cab-always"])
def test_every_way_to_attend_gives_the_same_logits(name):
    settings = tiny(lengths=(70,), cab=("mass_threshold=0.0",))
    made, call = model.random_model(settings), model.prefill(settings, 70)
    expected = call().logits
    config = CabConfig(mass_threshold=0.0, min_length=0, query_block=32, key_block=16)
    with model.attending(made, name, config):
        actual = call()
    torch.testing.assert_close(actual.logits, expected)
    assert actual.logits.shape == (1, 1, settings.vocab)
    assert actual.past_key_values.get_seq_length() == 70
    # as it was found
    assert made.config._attn_implementation == "sdpa"
    assert not [key for key in ALL_ATTENTION_FUNCTIONS if key.startswith("speed_")]


def test_a_budget_for_every_length():
    settings = Settings(device="cpu", lengths=(256, 512), max_density=("0.1", "512:0.05"))
    assert settings.budgeted(256).max_density == 0.1
    config = settings.budgeted(512, min_length=0)
    assert (config.max_density, config.mass_threshold, config.min_length) == (0.05, 0.0, 0)


# --- ttft


def test_a_row_has_its_ceiling_by_hand():
    class Clock(FakeBench):
        def wall(self, call, runs):
            call()
            return 500.0, 2.0

    settings = tiny(lengths=(192,), cab=SMALL)
    case = {"length": 192, "implementation": "cab-always"}
    row = sample_of(Ttft, settings, case, Clock())
    work = settings.model_flops(192)
    assert (row["ms"], row["peak_gib"], row["error"]) == (500.0, 2.0, None)
    assert 0 < row["density"] < 0.6 and "sparse" in row["ran_as"]
    done = work["linear"] + row["density"] * work["attention"]
    assert row["ceiling"] == pytest.approx((work["linear"] + work["attention"]) / done)
    assert row["tflops"] == pytest.approx(done / 0.5 / 1e12)


def test_a_kernel_that_is_missing_or_wrong_is_a_row_with_its_reason(monkeypatch):
    def load():
        import no_such_kernels  # noqa: F401

    backwards = dense.Baseline(lambda: lambda q, k, v, scale: torch.zeros_like(q))
    both = {"FA3": dense.Baseline(load), "FA4": backwards}
    monkeypatch.setattr(dense, "ON_CPU", both)
    settings = tiny(lengths=(96,), implementations=("FA3", "FA4"))
    rows = derive([sample_of(Ttft, settings, case) for case in settings.asked()])
    assert rows[0]["error"] == "no_such_kernels is not installed"
    assert "wrong by 1" in rows[1]["error"]
    assert [row["over_best"] for row in rows] == [None, None]
    said = "| FA3 | not measured | no_such_kernels is not installed | 96 |"
    assert said in shown(Ttft, rows) and Ttft.readings(rows) == []


# --- behind a cache


def test_operations_behind_a_cache_are_those_of_the_whole_less_what_is_cached():
    settings = tiny(vocab=11)
    complete, cached, asked = (settings.model_flops(*n) for n in ((30,), (20,), (10, 20)))
    assert asked["attention"] == complete["attention"] - cached["attention"]
    assert asked["linear"] == settings.model_flops(10)["linear"]


@pytest.mark.parametrize("name", ["sdpa", "cab_dense", "cab-always"])
def test_a_question_continues_the_same_cache_again_and_again(name):
    from cab_hf.eval.speed.steps import filled
    from cab_hf.eval.speed.ttft import asking

    settings = tiny(
        lengths=(70,), behind=90, cab=(*SMALL, "mass_threshold=0.0"), max_density=("1.0",)
    )
    made = model.random_model(settings)
    assert made.config.max_position_embeddings == 160
    cache = filled(made, 90, 1, 0, static=False, config=None)
    with torch.no_grad():
        expected = made(model.prompt_of(settings, 70), past_key_values=cache).logits[:, -1:]
    with asking(settings, 70, 90, name) as (call, crop, known):
        for _ in range(3):
            crop()
            read = call()
            assert read.past_key_values.get_seq_length() == 160
            torch.testing.assert_close(read.logits, expected, rtol=1e-4, atol=1e-4)
        assert known()["density"] == 1
    assert made.config._attn_implementation == "sdpa"


def test_a_row_behind_a_cache_by_hand():
    class Clock(FakeBench):
        def wall(self, call, runs, before):
            before()
            call()
            return 500.0, 2.0

    settings = tiny(lengths=(96,), behind=500, cab=SMALL)
    case = {"length": 96, "implementation": "cab-always"}
    row = sample_of(Ttft, settings, case, Clock())
    assert (row["behind"], row["ms"], row["error"]) == (500, 500.0, None)
    # the last 32 tokens reach into two query blocks of the text, of which the call has 52 tokens:
    # these attend all
    assert 52 / 96 < row["density"] < 0.7 and "sparse" in row["ran_as"]
    work = settings.model_flops(96, 500)
    done = work["linear"] + row["density"] * work["attention"]
    assert row["ceiling"] == pytest.approx((work["linear"] + work["attention"]) / done)
    assert row["tflops"] == pytest.approx(done / 0.5 / 1e12)


def test_a_kernel_that_continues_no_cache_is_a_row_with_its_reason(monkeypatch):
    first = dense.ON_CPU["SDPA"]
    both = {"SDPA": first, "FA3": replace(first, continues=True)}
    monkeypatch.setattr(dense, "ON_CPU", both)
    settings = tiny(lengths=(96,), behind=64, implementations=("SDPA", "FA3"), cab=SMALL)
    rows = [sample_of(Ttft, settings, case) for case in settings.asked()]
    said = "SDPA cannot continue a cache: to it, queries are the first tokens"
    assert rows[0]["error"] == said
    # what says that it can is looked at
    assert rows[1]["error"].startswith("ArithmeticError: wrong by ")


def test_gains_are_over_sdpa_and_over_the_fastest_dense_way():
    samples = [
        made_sample(1000, "sdpa", 8.0),
        made_sample(1000, "FA3", 4.0),
        made_sample(1000, "cab-always", 8.0, 0.1),
        made_sample(4000, "sdpa", 80.0),
        made_sample(4000, "FA3", 40.0),
        made_sample(4000, "cab-always", 20.0, 0.1),
    ]
    rows = derive(reversed(samples))
    last = next(r for r in rows if r["length"] == 4000 and r["implementation"] == "cab-always")
    assert (last["baseline"], last["over_best"], last["over_sdpa"]) == ("FA3", 2.0, 4.0)
    (said,) = Ttft.readings(rows)
    assert "from about 2,000 tokens on" in said


# --- settings


def test_a_run_behind_a_cache(tmp_path):
    words = ("--layers", "1", "--lengths", "64,128", "--behind", "256", "--runs", "1", *BLOCKS)
    rows = speed_run("ttft", tmp_path, *words, drawn=True)["rows"]
    assert {row["behind"] for row in rows} == {256}
    errors = {row["implementation"] for row in rows if row["error"]}
    assert errors == {"SDPA"}
    # dense below min_length, and by cab alone sparse
    densities = {row["implementation"]: row["density"] for row in rows if not row["error"]}
    assert densities["sdpa"] == densities["cab"] == 1 > densities["cab-always"]


def test_a_question_that_no_block_holds_is_refused(capsys, tmp_path):
    words = ("--device", "cpu", "--behind", "256", "--lengths", "64", "--out", str(tmp_path))
    said = refused(capsys, "ttft", *words)
    assert "lengths is (64,); it must be at least query_block=128 each behind a cache" in said
