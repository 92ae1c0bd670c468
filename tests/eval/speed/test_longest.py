"""``speed ttft --longest``: prompts in chunks, and the search for the longest prompt that fits."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bench import TINY, FakeBench, sample_of, speed_run

from cab_hf.eval.fits import Prompts
from cab_hf.eval.speed import model
from cab_hf.eval.speed.ttft import Settings
from cab_hf.eval.speed.ttft import TimeToFirstToken as Ttft

SMALL = ("query_block=32", "key_block=16", "dense_tail_blocks=1")
WORDS = ["--layers", "1", "--chunk", "64", "--multiple", "64", "--runs", "1", "--longest"]
WORDS += [word for each in SMALL for word in ("--cab", each)]


def case_of(length, implementation="cab-always"):
    place = {"variant": "plain", "length": length, "implementation": implementation}
    return {**place, "world": 1, "sought": False}


class Device(FakeBench):
    """A GPU that needs 100 MiB and half a MiB per token, of which ``limit`` MiB are free."""

    def __init__(self, limit=500.0):
        super().__init__()
        self.limit = limit

    def walls(self, call, runs, before=lambda: None):
        length = int(call().past_key_values.get_seq_length())
        peak = 100.0 + length / 2
        if peak > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0")
        return [10.0 * length] * runs, peak / 1024

    def room(self):
        return 500.0 / 1024


def settings_of(length, implementations=("cab-always",), **more):
    shape = {"lengths": (length,), "chunk": 64, "cab": SMALL, "implementations": implementations}
    return Settings(device="cpu", **shape, **TINY, **more)


def search(tmp_path, monkeypatch, bench, *words, implementations="cab-always", estimate=0, **how):
    """Return the rows of a run on ``bench``, including searched lengths; no model runs."""

    @contextmanager
    def prefilling(settings, length, *_, **more):
        cache = SimpleNamespace(get_seq_length=lambda: length)
        read = SimpleNamespace(past_key_values=cache)
        yield lambda: read, lambda: {"density": 0.1, "ran_as": None}, lambda: None

    monkeypatch.setattr(model, "prefilling", prefilling)
    monkeypatch.setattr(Ttft, "bench", bench)
    monkeypatch.setattr(Ttft, "estimated", lambda *_: estimate)
    words = [*WORDS, "--lengths", "256,512", "--implementations", implementations, *words]
    return speed_run("ttft", tmp_path, *words, **how)["rows"]


@pytest.mark.parametrize("length", [192, 200])
def test_chunked_prompt_logits_equal_whole_prompt(length):
    settings = settings_of(length, max_density=("1.0",))
    with model.prefilling(settings, length, "sdpa") as (call, *_):
        expected = call().logits
    with model.prefilling(settings, length, "cab-always", settings.chunk) as (call, *_):
        read = call()
    torch.testing.assert_close(read.logits, expected)
    assert read.logits.shape == (1, 1, settings.vocab)
    cache = read.past_key_values
    assert cache.get_seq_length() == length == cache.get_max_length()
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert settings.cache_gib(length) == held / 2**30


def test_random_model_is_cached():
    settings, memory = settings_of(192), Device()
    kept = []
    memory.room = lambda: kept.append(model.random_model(settings)) or 500.0 / 1024
    case = case_of(192)
    sample_of(Ttft, settings, case, memory)
    with model.prefilling(settings, 192, "sdpa", settings.chunk, variant=model.PLAIN):
        kept.append(model.random_model(settings, model.PLAIN))
    assert len({id(each) for each in kept}) == 1


def test_longest_row_by_hand():
    settings = settings_of(192)
    case = case_of(192)
    (row,) = Ttft.rows([sample_of(Ttft, settings, case, Device())], {})
    assert (row["ms"], row["tokens_s"], row["fits"], row["error"]) == (1920.0, 100.0, True, None)
    assert (row["peak_gib"], row["room_gib"]) == (196 / 1024, 500 / 1024)
    assert row["cache_gib"] == settings.cache_gib(192)
    assert row["rest_gib"] == pytest.approx(196 / 1024 - row["cache_gib"] - row["weights_gib"])
    # half of each chunk is its tail
    assert 0 < row["density"] < 0.8


@pytest.mark.parametrize(
    ("limit", "tried"),
    [
        # 100 + N / 2 <= 500, in chunks of 64
        pytest.param(500.0, {768: True, 832: False, 896: False, 1024: False}, id="800"),
        pytest.param(430.0, {640: True, 704: False, 768: False, 1024: False}, id="660"),
    ],
)
def test_search_runs_longest_length(tmp_path, monkeypatch, limit, tried):
    rows = search(tmp_path, monkeypatch, Device(limit), drawn=limit == 430.0)
    assert {row["length"]: row["fits"] for row in rows if row["sought"]} == tried
    assert [row["length"] for row in rows] == sorted({256, 512, *tried})
    for row in rows:
        assert (row["peak_gib"] is None) == (row["fits"] is False) == (row["error"] is not None)
    (said,) = Ttft.readings(rows)
    fits = max(length for length, fits in tried.items() if fits)
    assert (
        said.startswith(f"{fits} tokens are the longest")
        and f"{fits + 64} tokens do not fit" in said
    )
    # the second run measures nothing
    assert search(tmp_path, monkeypatch, None) == rows


def test_search_starts_near_estimate(tmp_path, monkeypatch):
    rows = search(tmp_path, monkeypatch, Device(), estimate=900, drawn=False)
    # nine and eleven tenths of it, in chunks of 64
    assert [row["length"] for row in rows if row["sought"]] == [768, 832, 960]
    (said,) = Ttft.readings(rows)
    assert said.endswith("832 tokens do not fit; estimated: 900.")


def test_whole_prompt_estimate_equals_fits():
    settings = settings_of(200, max_density=("1.0",))
    whole = replace(settings, chunk=0, longest=True, implementations=("sdpa", "cab"))
    experiment = Ttft(whole)
    experiment.bench = Device()
    prompts = Prompts.of(model.llama_config(whole))
    expected = prompts.longest(500 * 2**20, None, "dynamic")
    assert 0 < experiment.estimated("cab") <= expected < experiment.estimated("sdpa")
    case = case_of(200, "cab")
    (row,) = Ttft.rows([sample_of(Ttft, whole, case, Device())], {})
    assert row["estimate"] == experiment.estimated("cab") and row["error"] is None


def test_search_covers_every_implementation(tmp_path, monkeypatch):
    ways = ["cab_dense", "cab"]
    both = ",".join(ways)
    rows = search(tmp_path, monkeypatch, Device(), implementations=both, drawn=False)
    said = [line for line in Ttft.readings(rows) if "are the longest" in line]
    for way, line in zip(ways, said, strict=True):
        fit = [x["length"] for x in rows if x["implementation"] == way and x["fits"]]
        assert max(fit) == 768
        assert line.startswith(f"768 tokens are the longest that fit for {way}: ")


def test_other_errors_end_the_search(tmp_path, monkeypatch):
    class Broken(Device):
        def walls(self, call, runs, before=None):
            ms, peak = super().walls(call, runs)
            if peak > 400 / 1024:
                raise RuntimeError("a kernel is wrong")
            return ms, peak

    last = search(tmp_path, monkeypatch, Broken())[-2]
    assert (last["length"], last["fits"], last["error"]) == (768, None, "a kernel is wrong")
