"""``speed ttft``: operations and rows by hand, questions after a cache, and ranks."""

import json
from dataclasses import replace

import pytest
import torch
from bench import (
    SMALL_BLOCK_ASSIGNMENTS,
    TINY_MODEL_SIZES,
    WallTimeBench,
    format_tables,
    measure_sample,
    run_speed,
    run_torchrun,
)

from cab_hf import break_even
from cab_hf.eval.speed import dense, model, ttft
from cab_hf.eval.speed.rank_group import RankGroup
from cab_hf.eval.speed.ttft import Settings
from cab_hf.eval.speed.ttft import TimeToFirstToken as Ttft

BLOCK_OPTIONS = [
    option for assignment in SMALL_BLOCK_ASSIGNMENTS for option in ("--cab", assignment)
]


def make_tiny_settings(**setting_fields):
    """Return settings of a tiny model; ``setting_fields`` override the defaults."""
    return Settings(device="cpu", **{**TINY_MODEL_SIZES, **setting_fields})


def make_sample(length, implementation, ms, density=1.0, variant="plain"):
    """Return a sample of `Ttft`, the fields of a case and of its result, with a time of ``ms``."""
    result_fields = {"ceiling": 2.0, "peak_gib": None, "tflops": 1.0, "ran_as": None, "error": None}
    case_fields = {"length": length, "implementation": implementation, "world": 1, "behind": 0}
    case_fields["variant"] = variant
    return {**Ttft.ADDED_DEFAULTS, **case_fields, "ms": ms, "density": density, **result_fields}


def test_operations_by_hand_are_those_of_the_model():
    settings = make_tiny_settings(vocab=11)
    # weights per layer: q and o 24 x 32 each, k and v 24 x 16 each, three of 24 x 40 in the MLP
    num_layer_weights = 2 * (2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 40)
    linear_flops, attention_flops = (
        2 * (10 * num_layer_weights + 24 * 11),
        2 * 4 * 4 * 8 * 10 * 10 / 2,
    )
    assert settings.count_flops(10) == linear_flops + attention_flops
    assert settings.count_flops(10, 0.25) == linear_flops + 0.25 * attention_flops
    # after 20 cached tokens: the causal pairs of all 30 tokens, minus those of the 20 cached tokens
    cached_attention_flops = 2 * 4 * 4 * 8 * (30**2 - 20**2) / 2
    assert settings.count_flops(10, num_cached=20) == linear_flops + cached_attention_flops
    llama = model.make_random_model(settings)
    weight_sizes = [
        parameter.numel()
        for name, parameter in llama.named_parameters()
        if "proj" in name or "lm_head" in name
    ]
    assert settings.count_flops(1, 0.0) == 2 * sum(weight_sizes)
    assert llama.dtype == torch.float32 and 0.01 < llama.lm_head.weight.std() < 0.03


@pytest.mark.parametrize("implementation", ["sdpa", "SDPA", "cab-always"])
def test_implementations_have_equal_logits(implementation):
    settings = make_tiny_settings(
        lengths=(70,),
        cab=(*SMALL_BLOCK_ASSIGNMENTS[:2], "mass_threshold=0.0"),
        max_density=("1.0",),
    )
    with model.prepare_prefill(settings, 70, "sdpa") as (prefill_call, *_):
        expected = prefill_call().logits
    with model.prepare_prefill(settings, 70, implementation) as (prefill_call, *_):
        actual = prefill_call()
    torch.testing.assert_close(actual.logits, expected)
    assert actual.logits.shape == (1, 1, settings.vocab)
    assert actual.past_key_values.get_seq_length() == 70
    # the model has its own implementation again
    assert model.make_random_model(settings).config._attn_implementation == "sdpa"


def test_max_density_per_length():
    settings = Settings(device="cpu", lengths=(256, 512), max_density=("0.1", "512:0.05"))
    assert settings.make_config_with_density(256).max_density == 0.1
    config = settings.make_config_with_density(512, "cab-always")
    assert (config.max_density, config.mass_threshold, config.min_length) == (0.05, 0.0, 0)


@pytest.mark.parametrize(
    ("length", "num_cached", "min_density", "max_density"),
    [
        pytest.param(192, 0, 0, 0.6, id="prompt"),
        # the dense tail of 32 tokens reaches into two query blocks of the sequence. The call has 52
        # tokens in these blocks, and they attend to all keys
        pytest.param(96, 500, 52 / 96, 0.7, id="question"),
    ],
)
def test_ttft_row_by_hand(length, num_cached, min_density, max_density):
    settings = make_tiny_settings(lengths=(length,), behind=num_cached, cab=SMALL_BLOCK_ASSIGNMENTS)
    case = {"variant": "plain", "length": length, "implementation": "cab-always", "world": 1}
    row = measure_sample(Ttft, settings, case | {"sought": False}, WallTimeBench())
    assert (row["ms"], row["peak_gib"], row["error"]) == (500.0, 2.0, None)
    assert row["behind"] == num_cached
    assert min_density < row["density"] < max_density and "sparse" in row["ran_as"]
    flops = settings.count_flops(length, row["density"], num_cached)
    assert row["ceiling"] == pytest.approx(settings.count_flops(length, 1.0, num_cached) / flops)
    assert row["tflops"] == pytest.approx(flops / 0.5 / 1e12)


@pytest.mark.parametrize(("min_length", "is_dense"), [(64, False), (80, True)])
def test_question_after_cache_is_routed_by_its_own_length(min_length, is_dense, monkeypatch):
    monkeypatch.setattr(break_even, "BREAK_EVEN_POINTS", {"cpu": ((100, min_length),)})
    settings = make_tiny_settings(
        lengths=(70,), behind=90, cab=(*SMALL_BLOCK_ASSIGNMENTS, "min_length=16")
    )
    with model.prepare_prefill(settings, 70, "cab", num_cached=90) as (
        prefill_call,
        attention_fields,
        _,
    ):
        prefill_call()
        assert (attention_fields()["density"] == 1.0) is is_dense


def test_missing_or_wrong_kernel_has_error_row(monkeypatch):
    def import_missing_module():
        import no_such_kernels  # noqa: F401

    zeros_baseline = dense.Baseline(lambda: lambda q, k, v, scale: torch.zeros_like(q))
    monkeypatch.setattr(
        dense,
        "CPU_BASELINES",
        {"FA3": dense.Baseline(import_missing_module), "FA4": zeros_baseline},
    )
    settings = make_tiny_settings(lengths=(96,), implementations=("FA3", "FA4"))
    samples = [
        measure_sample(Ttft, settings, case | {"world": 1, "sought": False})
        for case in settings.list_requested_cases()
    ]
    rows = Ttft.rows(samples, {})
    assert rows[0]["error"] == "no_such_kernels is not installed"
    assert "wrong by 1" in rows[1]["error"]
    assert [row["over_best"] for row in rows] == [None, None]
    line = "| FA3 | not measured | no_such_kernels is not installed | 96 |"
    assert line in format_tables(Ttft, rows) and Ttft.summary_sentences(rows) == []


def test_speed_ups_over_sdpa_and_fastest_dense():
    samples = [
        make_sample(1000, "sdpa", 8.0),
        make_sample(1000, "FA3", 4.0),
        make_sample(1000, "cab-always", 8.0, 0.1),
        make_sample(4000, "sdpa", 80.0),
        make_sample(4000, "FA3", 40.0),
        make_sample(4000, "cab-always", 20.0, 0.1),
    ]
    rows = Ttft.rows(samples[::-1], {})
    row_by_case = {(row["length"], row["implementation"]): row for row in rows}
    cab_row = row_by_case[4000, "cab-always"]
    assert (cab_row["baseline"], cab_row["over_best"], cab_row["over_sdpa"]) == ("FA3", 2.0, 4.0)
    (sentence,) = Ttft.summary_sentences(rows)
    assert "from about 2,000 tokens on" in sentence


def test_speed_up_compares_with_dense_of_same_variant():
    samples = [
        make_sample(1000, implementation, ms, variant=variant)
        for variant, dense_ms, cab_ms in (("plain", 9.0, 6.0), ("fp8", 8.0, 4.0))
        for implementation, ms in (("FA3", dense_ms), ("cab", cab_ms))
    ]
    rows = Ttft.rows(samples, {})
    assert [row["over_best"] for row in rows] == [1.0, 1.5, 1.0, 2.0]
    plain_sentence, fp8_sentence = Ttft.summary_sentences(rows)
    assert "At 1,000 tokens cab is 1.50" in plain_sentence
    assert "At 1,000 tokens with fp8 cab is 2.00" in fp8_sentence


def test_variants_follow_the_order_of_the_run(tmp_path, monkeypatch):
    applied_variants = []
    for name in ("fp8", "liger"):
        monkeypatch.setitem(
            model.MODULE_REPLACERS, name, lambda _, name=name: applied_variants.append(name)
        )
    options = ["--variants", "fp8+liger,fp8,plain", "--implementations", "SDPA,cab", *BLOCK_OPTIONS]
    options += ["--layers", "1", "--runs", "1", "--lengths", "96"]
    rows = run_speed("ttft", tmp_path, options, should_draw_figure=True)["rows"]
    expected = [
        (variant, implementation)
        for variant in ("plain", "fp8", "fp8+liger")
        for implementation in ("SDPA", "cab")
    ]
    assert [(row["variant"], row["implementation"]) for row in rows] == expected
    assert applied_variants == ["fp8", "fp8", "liger"]
    assert all(row["over_best"] for row in rows)


@pytest.mark.parametrize("implementation", ["sdpa", "cab_dense", "cab-always"])
def test_question_reuses_cropped_cache(implementation):
    config = (*SMALL_BLOCK_ASSIGNMENTS, "mass_threshold=0.0")
    settings = make_tiny_settings(lengths=(70,), behind=90, cab=config, max_density=("1.0",))
    llama = model.make_random_model(settings)
    assert llama.config.max_position_embeddings == 160
    with torch.no_grad():
        cache = model.make_random_cache(llama, 90)
        output = llama(model.draw_random_tokens(settings, 70), past_key_values=cache)
    expected = output.logits[:, -1:]
    with model.prepare_prefill(settings, 70, implementation, num_cached=90) as (
        prefill_call,
        attention_fields,
        crop_cache,
    ):
        for _ in range(3):
            crop_cache()
            output = prefill_call()
            assert output.past_key_values.get_seq_length() == 160
            torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
        assert attention_fields()["density"] == 1


def test_kernel_without_cache_support_has_error_row(monkeypatch):
    sdpa_baseline = dense.CPU_BASELINES["SDPA"]
    # "FA3" is SDPA under another name, and wrongly has aligns_to_last_key=True
    baselines = {"SDPA": sdpa_baseline, "FA3": replace(sdpa_baseline, aligns_to_last_key=True)}
    monkeypatch.setattr(dense, "CPU_BASELINES", baselines)
    settings = make_tiny_settings(
        lengths=(96,), behind=64, implementations=("SDPA", "FA3"), cab=SMALL_BLOCK_ASSIGNMENTS
    )
    rows = [
        measure_sample(Ttft, settings, case | {"world": 1, "sought": False})
        for case in settings.list_requested_cases()
    ]
    error = "SDPA cannot continue a cache: it takes queries for the first tokens"
    assert rows[0]["error"] == error
    assert rows[1]["error"].startswith("ArithmeticError: wrong by ")


def test_run_after_a_cache(tmp_path):
    options = (
        "--layers",
        "1",
        "--lengths",
        "64,128",
        "--behind",
        "256",
        "--runs",
        "1",
        *BLOCK_OPTIONS,
    )
    rows = run_speed("ttft", tmp_path, options, should_draw_figure=True)["rows"]
    assert {row["behind"] for row in rows} == {256}
    errors = {row["implementation"] for row in rows if row["error"]}
    assert errors == {"SDPA"}
    # the lengths are below min_length, which cab-always ignores
    densities = {row["implementation"]: row["density"] for row in rows if not row["error"]}
    assert densities["sdpa"] == densities["cab"] == 1 > densities["cab-always"]


@pytest.mark.slow
def test_ttft_run_of_two_ranks(tmp_path):
    options = [
        "--device",
        "cpu",
        "--lengths",
        "600",
        "--runs",
        "1",
        "--max-density",
        "0.2",
        *BLOCK_OPTIONS,
    ]
    options += ["--out", str(tmp_path / "run")]
    process = run_torchrun(["-m", "cab_hf.eval", "speed", "ttft", *options])
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    rows = results["rows"]
    # only these implementations support a sequence sharded over ranks
    assert [row["implementation"] for row in rows] == ["cab_dense", "cab", "cab-always"]
    assert results["provenance"]["settings"]["worlds"] == [2]
    for row in rows:
        assert row["error"] is None and row["ms"] > 0 and row["world"] == 2
        assert row["baseline"] == "cab_dense"
        assert (row["density"] < 1) == (row["implementation"] == "cab-always")


def prefill_on_rank(group, implementation, length):
    """Return (logits, cached keys per layer, density) of a prompt on a rank."""
    settings = make_tiny_settings(
        lengths=(length,), max_density=("0.2",), cab=SMALL_BLOCK_ASSIGNMENTS
    )
    with pytest.MonkeyPatch.context() as patch_context:
        patch_context.setattr(ttft, "WARM_UP_TOKENS", 512)
        patch_context.setattr(ttft, "MAX_MLP_TOKENS", 100)
        with ttft.prepare_sharded_prefill(
            settings, length, implementation, RankGroup(group, group)
        ) as (
            prefill_call,
            attention_fields,
            _,
        ):
            output = prefill_call()
            num_cached_by_layer = [layer.keys.shape[2] for layer in output.past_key_values.layers]
            # a list, because other processes cannot receive inference tensors
            return (
                output.logits.clone().tolist(),
                num_cached_by_layer,
                attention_fields()["density"],
            )


@pytest.mark.parametrize("length", [600, 1024])
@pytest.mark.parametrize("implementation", ["cab_dense", "cab-always"])
def test_last_logits_equal_one_process(ranks, implementation, length):
    settings = make_tiny_settings(
        lengths=(length,), max_density=("0.2",), cab=SMALL_BLOCK_ASSIGNMENTS
    )
    with model.prepare_prefill(settings, length, implementation) as (
        prefill_call,
        attention_fields,
        _,
    ):
        expected_logits, density = prefill_call().logits, attention_fields()["density"]
    results_by_rank = ranks.run(2, prefill_on_rank, implementation, length)
    # rank 0 has chunks 0 and 3 of four, and rank 1 has chunks 1 and 2. 600 tokens end in chunk 2
    last_rank = 0 if length == 1024 else 1
    torch.testing.assert_close(torch.tensor(results_by_rank[last_rank][0]), expected_logits)
    for _, num_cached_by_layer, rank_density in results_by_rank:
        # each rank has two chunks of 256 tokens, padding included
        assert num_cached_by_layer == [512] * 2
        assert rank_density == pytest.approx(density, rel=1e-6)


def test_ranks_allow_cab_implementations_only(monkeypatch):
    assert make_tiny_settings().implementations[0] == "sdpa"
    monkeypatch.setenv("RANK", "0")
    assert make_tiny_settings().implementations == ("cab_dense", "cab", "cab-always")
    with pytest.raises(ValueError, match="must be out of cab_dense, cab.*, got .*'sdpa',"):
        make_tiny_settings(implementations=("sdpa",))
    with pytest.raises(ValueError, match="variants must be plain if ranks .*, got .*'fp8'"):
        make_tiny_settings(variants=("plain", "fp8"))
