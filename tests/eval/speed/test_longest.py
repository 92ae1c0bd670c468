"""``speed ttft --longest``: prompts in chunks, and the search for the longest prompt that fits."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bench import TINY_MODEL_SIZES, FakeBench, measure_sample, run_speed

from cab_hf.eval.fits import MemoryModel
from cab_hf.eval.speed import model
from cab_hf.eval.speed.ttft import Settings
from cab_hf.eval.speed.ttft import TimeToFirstToken as Ttft

SMALL_BLOCK_ASSIGNMENTS = ("query_block=32", "key_block=16", "dense_tail_blocks=1")
SEARCH_OPTIONS = ["--layers", "1", "--chunk", "64", "--multiple", "64", "--runs", "1", "--longest"]
SEARCH_OPTIONS += [
    option for assignment in SMALL_BLOCK_ASSIGNMENTS for option in ("--cab", assignment)
]


def make_case(length, implementation="cab-always"):
    """Return a case of one rank that is not part of a search."""
    case = {"variant": "plain", "length": length, "implementation": implementation}
    return {**case, "world": 1, "sought": False}


class FakeGpuBench(FakeBench):
    """A fake timer of a GPU with ``limit_mib`` MiB of memory; n tokens need 100 + n / 2 MiB."""

    def __init__(self, limit_mib=500.0):
        super().__init__()
        self.limit_mib = limit_mib

    def time_runs(self, call, num_runs, before_run=lambda: None):
        length = int(call().past_key_values.get_seq_length())
        peak_mib = 100.0 + length / 2
        if peak_mib > self.limit_mib:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0")
        return [10.0 * length] * num_runs, peak_mib / 1024

    def available_gib(self):
        return 500.0 / 1024


def make_settings(length, implementations=("cab-always",), **setting_fields):
    """Return settings of a tiny model and one length, in chunks of 64 tokens."""
    case_fields = {
        "lengths": (length,),
        "chunk": 64,
        "cab": SMALL_BLOCK_ASSIGNMENTS,
        "implementations": implementations,
    }
    return Settings(device="cpu", **case_fields, **TINY_MODEL_SIZES, **setting_fields)


def run_search(
    tmp_path,
    monkeypatch,
    bench,
    implementations="cab-always",
    estimated_tokens=0,
    should_draw_figure=False,
):
    """Run ``speed ttft --longest``, and return its rows, including those of the search.

    Args:
        tmp_path: folder of the results.
        monkeypatch: fixture of pytest.
        bench: a `FakeGpuBench`; None if nothing is measured.
        implementations: value of --implementations.
        estimated_tokens: estimated longest prompt, in tokens; 0 for no estimate.
        should_draw_figure: True to draw the figure.
    """

    @contextmanager
    def fake_prefill(settings, length, *_, **options):
        cache = SimpleNamespace(get_seq_length=lambda: length)
        output = SimpleNamespace(past_key_values=cache)
        yield lambda: output, lambda: {"density": 0.1, "ran_as": None}, lambda: None

    monkeypatch.setattr(model, "prepare_prefill", fake_prefill)
    monkeypatch.setattr(Ttft, "bench", bench)
    monkeypatch.setattr(Ttft, "estimate_tokens", lambda *_: estimated_tokens)
    search_options = [*SEARCH_OPTIONS, "--lengths", "256,512", "--implementations", implementations]
    results = run_speed("ttft", tmp_path, search_options, should_draw_figure=should_draw_figure)
    return results["rows"]


@pytest.mark.parametrize("length", [192, 200])
def test_chunked_prompt_logits_equal_whole_prompt(length):
    settings = make_settings(length, max_density=("1.0",))
    with model.prepare_prefill(settings, length, "sdpa") as (prefill_call, *_):
        expected_logits = prefill_call().logits
    with model.prepare_prefill(settings, length, "cab-always", settings.chunk) as (
        prefill_call,
        *_,
    ):
        output = prefill_call()
    torch.testing.assert_close(output.logits, expected_logits)
    assert output.logits.shape == (1, 1, settings.vocab)
    cache = output.past_key_values
    assert cache.get_seq_length() == length == cache.get_max_length()
    cache_bytes = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert settings.compute_cache_gib(length) == cache_bytes / 2**30


def test_random_model_is_cached():
    settings, bench = make_settings(192), FakeGpuBench()
    loaded_models = []
    bench.available_gib = lambda: (
        loaded_models.append(model.make_random_model(settings)) or 500.0 / 1024
    )
    measure_sample(Ttft, settings, make_case(192), bench)
    with model.prepare_prefill(settings, 192, "sdpa", settings.chunk, variant=model.PLAIN_VARIANT):
        loaded_models.append(model.make_random_model(settings, model.PLAIN_VARIANT))
    assert len({id(cached_model) for cached_model in loaded_models}) == 1


def test_longest_row_by_hand():
    settings = make_settings(192)
    case = make_case(192)
    (row,) = Ttft.rows([measure_sample(Ttft, settings, case, FakeGpuBench())], {})
    assert (row["ms"], row["tokens_s"], row["fits"], row["error"]) == (1920.0, 100.0, True, None)
    assert (row["peak_gib"], row["room_gib"]) == (196 / 1024, 500 / 1024)
    assert row["cache_gib"] == settings.compute_cache_gib(192)
    assert row["rest_gib"] == pytest.approx(196 / 1024 - row["cache_gib"] - row["weights_gib"])
    # the density is high, because half of each chunk is dense tail
    assert 0 < row["density"] < 0.8


@pytest.mark.parametrize(
    ("limit_mib", "fits_by_length"),
    [
        # 800 and 660 tokens fit: 100 + n / 2 <= limit. The search uses multiples of 64
        pytest.param(500.0, {768: True, 832: False, 896: False, 1024: False}, id="800"),
        pytest.param(430.0, {640: True, 704: False, 768: False, 1024: False}, id="660"),
    ],
)
def test_search_runs_longest_length(tmp_path, monkeypatch, limit_mib, fits_by_length):
    rows = run_search(
        tmp_path, monkeypatch, FakeGpuBench(limit_mib), should_draw_figure=limit_mib == 430.0
    )
    assert {row["length"]: row["fits"] for row in rows if row["sought"]} == fits_by_length
    assert [row["length"] for row in rows] == sorted({256, 512, *fits_by_length})
    for row in rows:
        assert (row["peak_gib"] is None) == (row["fits"] is False) == (row["error"] is not None)
    (sentence,) = Ttft.summary_sentences(rows)
    longest_length = max(length for length, is_fitting in fits_by_length.items() if is_fitting)
    assert sentence.startswith(f"{longest_length} tokens are the longest")
    assert f"{longest_length + 64} tokens do not fit" in sentence
    # the second run measures nothing
    assert run_search(tmp_path, monkeypatch, None) == rows


def test_search_starts_near_estimate(tmp_path, monkeypatch):
    rows = run_search(tmp_path, monkeypatch, FakeGpuBench(), estimated_tokens=900)
    # the search starts at .9 and 1.1 of the estimate, rounded down to multiples of 64
    assert [row["length"] for row in rows if row["sought"]] == [768, 832, 960]
    (sentence,) = Ttft.summary_sentences(rows)
    assert sentence.endswith("832 tokens do not fit; estimated: 900.")


def test_whole_prompt_estimate_equals_fits():
    settings = make_settings(200, max_density=("1.0",))
    settings = replace(settings, chunk=0, longest=True, implementations=("sdpa", "cab"))
    experiment = Ttft(settings)
    experiment.bench = FakeGpuBench()
    memory_model = MemoryModel.from_config(model.make_model_config(settings))
    expected = memory_model.find_longest_prompt(500 * 2**20, None, "dynamic")
    assert 0 < experiment.estimate_tokens("cab") <= expected < experiment.estimate_tokens("sdpa")
    case = make_case(200, "cab")
    (row,) = Ttft.rows([measure_sample(Ttft, settings, case, FakeGpuBench())], {})
    assert row["estimate"] == experiment.estimate_tokens("cab") and row["error"] is None


def test_search_covers_every_implementation(tmp_path, monkeypatch):
    implementations = ["cab_dense", "cab"]
    rows = run_search(
        tmp_path, monkeypatch, FakeGpuBench(), implementations=",".join(implementations)
    )
    sentences = [line for line in Ttft.summary_sentences(rows) if "are the longest" in line]
    for implementation, sentence in zip(implementations, sentences, strict=True):
        fitting_lengths = [
            row["length"] for row in rows if row["implementation"] == implementation and row["fits"]
        ]
        assert max(fitting_lengths) == 768
        assert sentence.startswith(f"768 tokens are the longest that fit for {implementation}: ")


def test_other_errors_end_the_search(tmp_path, monkeypatch):
    class BenchWithWrongKernel(FakeGpuBench):
        def time_runs(self, call, num_runs, before_run=None):
            ms, peak_gib = super().time_runs(call, num_runs)
            if peak_gib > 400 / 1024:
                raise RuntimeError("a kernel is wrong")
            return ms, peak_gib

    failed_row = run_search(tmp_path, monkeypatch, BenchWithWrongKernel())[-2]
    assert (failed_row["length"], failed_row["fits"], failed_row["error"]) == (
        768,
        None,
        "a kernel is wrong",
    )
