"""``speed ttft``: FLOPs of the model, rows by hand, questions after a cache, and ranks."""

import json
from dataclasses import replace

import pytest
import torch
from bench import BLOCKS, TINY, Clock, sample_of, shown, speed_run, torchrun

from cab_hf import break_even
from cab_hf.eval.speed import dense, model, ttft
from cab_hf.eval.speed.rank_group import RankGroup
from cab_hf.eval.speed.ttft import Settings
from cab_hf.eval.speed.ttft import TimeToFirstToken as Ttft

WORDS = [word for each in BLOCKS for word in ("--cab", each)]


def tiny(**more):
    return Settings(device="cpu", **{**TINY, **more})


def made_sample(length, implementation, ms, density=1.0, variant="plain"):
    """A sample, as `Ttft.measure` makes it."""
    fixed = {"ceiling": 2.0, "peak_gib": None, "tflops": 1.0, "ran_as": None, "error": None}
    place = {"length": length, "implementation": implementation, "world": 1, "behind": 0}
    place["variant"] = variant
    return {**Ttft.ADDED, **place, "ms": ms, "density": density, **fixed}


def test_operations_by_hand_are_those_of_the_model():
    settings = tiny(vocab=11)
    # per layer and token: q and o 24 x 32 each, k and v 24 x 16 each, three of 24 x 40 in the MLP
    weights = 2 * (2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 40)
    linear, attention = 2 * (10 * weights + 24 * 11), 2 * 4 * 4 * 8 * 10 * 10 / 2
    assert settings.flops(10) == linear + attention
    assert settings.flops(10, 0.25) == linear + 0.25 * attention
    # after a cache: FLOPs of all tokens minus FLOPs of the cached ones
    cached = 2 * 4 * 4 * 8 * (30**2 - 20**2) / 2
    assert settings.flops(10, num_cached=20) == linear + cached
    made = model.random_model(settings)
    counted = [p.numel() for n, p in made.named_parameters() if "proj" in n or "lm_head" in n]
    assert settings.flops(1, 0.0) == 2 * sum(counted)
    assert made.dtype == torch.float32 and 0.01 < made.lm_head.weight.std() < 0.03


@pytest.mark.parametrize("way", ["sdpa", "SDPA", "cab-always"])
def test_implementations_have_equal_logits(way):
    settings = tiny(lengths=(70,), cab=(*BLOCKS[:2], "mass_threshold=0.0"), max_density=("1.0",))
    with model.prefilling(settings, 70, "sdpa") as (call, *_):
        expected = call().logits
    with model.prefilling(settings, 70, way) as (call, *_):
        actual = call()
    torch.testing.assert_close(actual.logits, expected)
    assert actual.logits.shape == (1, 1, settings.vocab)
    assert actual.past_key_values.get_seq_length() == 70
    # as it was found
    assert model.random_model(settings).config._attn_implementation == "sdpa"


def test_max_density_per_length():
    settings = Settings(device="cpu", lengths=(256, 512), max_density=("0.1", "512:0.05"))
    assert settings.budgeted(256).max_density == 0.1
    config = settings.budgeted(512, "cab-always")
    assert (config.max_density, config.mass_threshold, config.min_length) == (0.05, 0.0, 0)


@pytest.mark.parametrize(
    ("length", "behind", "least", "most"),
    [
        pytest.param(192, 0, 0, 0.6, id="prompt"),
        # the last 32 tokens reach into two query blocks of the text, of which the call has 52
        # tokens: these attend all
        pytest.param(96, 500, 52 / 96, 0.7, id="question"),
    ],
)
def test_ttft_row_by_hand(length, behind, least, most):
    settings = tiny(lengths=(length,), behind=behind, cab=BLOCKS)
    case = {"variant": "plain", "length": length, "implementation": "cab-always", "world": 1}
    row = sample_of(Ttft, settings, case | {"sought": False}, Clock())
    assert (row["ms"], row["peak_gib"], row["error"]) == (500.0, 2.0, None)
    assert row["behind"] == behind
    assert least < row["density"] < most and "sparse" in row["ran_as"]
    done = settings.flops(length, row["density"], behind)
    assert row["ceiling"] == pytest.approx(settings.flops(length, 1.0, behind) / done)
    assert row["tflops"] == pytest.approx(done / 0.5 / 1e12)


@pytest.mark.parametrize(("least", "is_dense"), [(64, False), (80, True)])
def test_question_after_cache_is_routed_by_its_own_length(least, is_dense, monkeypatch):
    monkeypatch.setattr(break_even, "POINTS", {"cpu": ((100, least),)})
    settings = tiny(lengths=(70,), behind=90, cab=(*BLOCKS, "min_length=16"))
    with model.prefilling(settings, 70, "cab", num_cached=90) as (call, known, _):
        call()
        assert (known()["density"] == 1.0) is is_dense


def test_missing_or_wrong_kernel_has_error_row(monkeypatch):
    def load():
        import no_such_kernels  # noqa: F401

    zeros = dense.Baseline(lambda: lambda q, k, v, scale: torch.zeros_like(q))
    monkeypatch.setattr(dense, "ON_CPU", {"FA3": dense.Baseline(load), "FA4": zeros})
    settings = tiny(lengths=(96,), implementations=("FA3", "FA4"))
    samples = [
        sample_of(Ttft, settings, case | {"world": 1, "sought": False}) for case in settings.asked()
    ]
    rows = Ttft.rows(samples, {})
    assert rows[0]["error"] == "no_such_kernels is not installed"
    assert "wrong by 1" in rows[1]["error"]
    assert [row["over_best"] for row in rows] == [None, None]
    said = "| FA3 | not measured | no_such_kernels is not installed | 96 |"
    assert said in shown(Ttft, rows) and Ttft.readings(rows) == []


def test_speed_ups_over_sdpa_and_fastest_dense():
    samples = [
        made_sample(1000, "sdpa", 8.0),
        made_sample(1000, "FA3", 4.0),
        made_sample(1000, "cab-always", 8.0, 0.1),
        made_sample(4000, "sdpa", 80.0),
        made_sample(4000, "FA3", 40.0),
        made_sample(4000, "cab-always", 20.0, 0.1),
    ]
    rows = Ttft.rows(samples[::-1], {})
    last = next(r for r in rows if r["length"] == 4000 and r["implementation"] == "cab-always")
    assert (last["baseline"], last["over_best"], last["over_sdpa"]) == ("FA3", 2.0, 4.0)
    (said,) = Ttft.readings(rows)
    assert "from about 2,000 tokens on" in said


def test_speed_up_compares_with_dense_of_same_variant():
    samples = [
        made_sample(1000, way, ms, variant=variant)
        for variant, dense_ms, ours in (("plain", 9.0, 6.0), ("fp8", 8.0, 4.0))
        for way, ms in (("FA3", dense_ms), ("cab", ours))
    ]
    rows = Ttft.rows(samples, {})
    assert [row["over_best"] for row in rows] == [1.0, 1.5, 1.0, 2.0]
    plain, fp8 = Ttft.readings(rows)
    assert "At 1,000 tokens cab is 1.50" in plain
    assert "At 1,000 tokens with fp8 cab is 2.00" in fp8


def test_variants_follow_the_order_of_the_run(tmp_path, monkeypatch):
    made = []
    for name in ("fp8", "liger"):
        monkeypatch.setitem(model.HASTENED, name, lambda _, name=name: made.append(name))
    words = ["--variants", "fp8+liger,fp8,plain", "--implementations", "SDPA,cab", *WORDS]
    words += ["--layers", "1", "--runs", "1", "--lengths", "96"]
    rows = speed_run("ttft", tmp_path, *words, drawn=True)["rows"]
    ways = ["SDPA", "cab"]
    expected = [(name, way) for name in ("plain", "fp8", "fp8+liger") for way in ways]
    assert [(row["variant"], row["implementation"]) for row in rows] == expected
    assert made == ["fp8", "fp8", "liger"]
    assert all(row["over_best"] for row in rows)


@pytest.mark.parametrize("way", ["sdpa", "cab_dense", "cab-always"])
def test_question_reuses_cropped_cache(way):
    config = (*BLOCKS, "mass_threshold=0.0")
    settings = tiny(lengths=(70,), behind=90, cab=config, max_density=("1.0",))
    made = model.random_model(settings)
    assert made.config.max_position_embeddings == 160
    with torch.no_grad():
        cache = model.random_cache(made, 90)
        read = made(model.random_tokens(settings, 70), past_key_values=cache)
    expected = read.logits[:, -1:]
    with model.prefilling(settings, 70, way, num_cached=90) as (call, known, crop):
        for _ in range(3):
            crop()
            read = call()
            assert read.past_key_values.get_seq_length() == 160
            torch.testing.assert_close(read.logits, expected, rtol=1e-4, atol=1e-4)
        assert known()["density"] == 1


def test_kernel_without_cache_support_has_error_row(monkeypatch):
    first = dense.ON_CPU["SDPA"]
    both = {"SDPA": first, "FA3": replace(first, continues=True)}
    monkeypatch.setattr(dense, "ON_CPU", both)
    settings = tiny(lengths=(96,), behind=64, implementations=("SDPA", "FA3"), cab=BLOCKS)
    rows = [
        sample_of(Ttft, settings, case | {"world": 1, "sought": False}) for case in settings.asked()
    ]
    said = "SDPA cannot continue a cache: it takes queries for the first tokens"
    assert rows[0]["error"] == said
    # check that a kernel which claims cache support computes it
    assert rows[1]["error"].startswith("ArithmeticError: wrong by ")


def test_run_after_a_cache(tmp_path):
    words = ("--layers", "1", "--lengths", "64,128", "--behind", "256", "--runs", "1", *WORDS)
    rows = speed_run("ttft", tmp_path, *words, drawn=True)["rows"]
    assert {row["behind"] for row in rows} == {256}
    errors = {row["implementation"] for row in rows if row["error"]}
    assert errors == {"SDPA"}
    # dense below min_length, and by cab alone sparse
    densities = {row["implementation"]: row["density"] for row in rows if not row["error"]}
    assert densities["sdpa"] == densities["cab"] == 1 > densities["cab-always"]


@pytest.mark.slow
def test_ttft_run_of_two_ranks(tmp_path):
    words = ["--device", "cpu", "--lengths", "600", "--runs", "1", "--max-density", "0.2", *WORDS]
    done = torchrun("-m", "cab_hf.eval", "speed", "ttft", *words, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    rows = results["rows"]
    # implementations with context parallelism
    assert [row["implementation"] for row in rows] == ["cab_dense", "cab", "cab-always"]
    assert results["provenance"]["settings"]["worlds"] == [2]
    for row in rows:
        assert row["error"] is None and row["ms"] > 0 and row["world"] == 2
        assert row["baseline"] == "cab_dense"
        assert (row["density"] < 1) == (row["implementation"] == "cab-always")


def read_on(group, way, length):
    """(logits, keys a layer, density) on a rank."""
    settings = tiny(lengths=(length,), max_density=("0.2",), cab=BLOCKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ttft, "WARM_UP_TOKENS", 512)
        patch.setattr(ttft, "MLP_TOKENS", 100)
        with ttft.prefilling_across(settings, length, way, RankGroup(group, group)) as (
            call,
            known,
            _,
        ):
            read = call()
            cached = [layer.keys.shape[2] for layer in read.past_key_values.layers]
            # inference tensors stay where they were made
            return read.logits.clone().tolist(), cached, known()["density"]


@pytest.mark.parametrize("length", [600, 1024])
@pytest.mark.parametrize("way", ["cab_dense", "cab-always"])
def test_last_logits_equal_one_process(ranks, way, length):
    settings = tiny(lengths=(length,), max_density=("0.2",), cab=BLOCKS)
    with model.prefilling(settings, length, way) as (call, known, _):
        expected, density = call().logits, known()["density"]
    actual = ranks.run(2, read_on, way, length)
    # the first of four chunks and the last are on rank 0; 600 tokens end in the third, on rank 1
    holder = 0 if length == 1024 else 1
    torch.testing.assert_close(torch.tensor(actual[holder][0]), expected)
    for _, cached, share in actual:
        # chunks of 256 and of 256 tokens: half of the prompt, with its padding
        assert cached == [512] * 2
        assert share == pytest.approx(density, rel=1e-6)


def test_ranks_allow_cab_implementations_only(monkeypatch):
    assert tiny().implementations[0] == "sdpa"
    monkeypatch.setenv("RANK", "0")
    assert tiny().implementations == ("cab_dense", "cab", "cab-always")
    with pytest.raises(ValueError, match="must be out of cab_dense, cab.*, got .*'sdpa',"):
        tiny(implementations=("sdpa",))
    with pytest.raises(ValueError, match="variants must be plain if ranks .*, got .*'fp8'"):
        tiny(variants=("plain", "fp8"))
