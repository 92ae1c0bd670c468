"""Estimated memory of prompts, compared with real models and committed measurements."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny import tokens
from tiny_types import tiny_config
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

from cab_hf import CabConfig
from cab_hf.eval import fits
from cab_hf.eval.__main__ import main
from cab_hf.eval.kv_cache import read_with_cache
from cab_hf.eval.result_folders import read_results
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.cost_model import GIB

RESULTS = Path(__file__).parents[2] / "eval" / "results"
LENGTH = 300
# the model shape of the committed runs
LLAMA = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
CHUNKS = [2048, 8192, 32_768]
# the sampled queries and keys of the committed runs
MEASURED = CabConfig(typical_queries=8, typical_key_stride=1)


@pytest.fixture(scope="module")
def llama():
    """Return the memory model of prompts for the model and the config of the committed runs."""
    return dataclasses.replace(fits.Prompts.of(LLAMA), config=MEASURED)


def rows(name):
    """Return the rows of a committed run."""
    return read_results(RESULTS / name).rows


@torch.no_grad()
@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", "gemma4_text", "deepseek_v3", "qwen3_next", "mixtral"]
)
def test_estimated_weights_and_cache_equal_real_model(model_type):
    config = tiny_config(model_type)
    prompts = fits.Prompts.of(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert prompts.weights == sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    cache = DynamicCache(config=model.config)
    read_with_cache(model, tokens(1, LENGTH), cache)
    with_keys = [x for x in cache.layers if isinstance(getattr(x, "keys", None), torch.Tensor)]
    expected = sum(x.keys.nbytes + x.values.nbytes for x in with_keys if x.keys.ndim == 4)
    # a layer with a sliding window may cache the window without the current token
    bytes_of_current_token = sum(size for size, window in prompts.layers if window)
    actual = prompts.estimate_memory(LENGTH, None, fits.DYNAMIC).cache
    assert expected > 0 and actual in (expected, expected + bytes_of_current_token)


def test_estimated_cache_bytes_equal_static_cache(llama):
    cache = StaticCache(config=LLAMA, max_cache_len=LENGTH)
    cache.early_initialization(
        batch_size=1, num_heads=8, head_dim=128, dtype=torch.bfloat16, device="meta"
    )
    size = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    for chunk in (None, 128):
        assert llama.estimate_memory(LENGTH, chunk, fits.STATIC).cache == size
    layer = size / 32
    assert llama.estimate_memory(LENGTH, 128, fits.DYNAMIC).cache == size + layer / 2
    offloaded = llama.estimate_memory(LENGTH, None, fits.OFFLOADED)
    assert (offloaded.cache, offloaded.host) == (2 * layer, size)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_prompt_estimate_matches_measurement(llama, chunk):
    for row in rows(f"speed-prefill-chunk-{chunk}"):
        needed = llama.estimate_memory(row["length"], chunk, fits.STATIC)
        assert needed.weights / GIB == pytest.approx(row["weights_gib"])
        assert needed.cache / GIB == pytest.approx(row["cache_gib"])
        assert needed.workspace / GIB == pytest.approx(row["rest_gib"], rel=0.1)


def test_whole_prompt_estimate_matches_measurement(llama):
    for row in rows("speed-ttft"):
        if row["implementation"] == "cab":
            needed = llama.estimate_memory(row["length"], None, fits.DYNAMIC)
            rest = row["peak_gib"] * GIB - needed.weights - needed.cache
            assert needed.workspace == pytest.approx(rest, rel=0.1)


def test_selection_memory_estimate_matches_measurement(llama):
    for row in rows("speed-predictor"):
        length = row["length"]
        actual = llama.estimate_selection(32, 8, 128, length, length)
        assert actual / 2**20 == pytest.approx(row["peak_mib"], rel=0.1)


def test_longest_prompt_estimate_matches_search(llama):
    measured = [row for row in rows("speed-prefill") if row["fits"]][-1]
    longest = llama.find_longest(measured["room_gib"] * GIB, 32_768, fits.STATIC)
    assert longest == pytest.approx(measured["length"], rel=0.1)


@pytest.mark.parametrize("gib", [24, 48, 80])
@pytest.mark.parametrize("chunk", [0, 8192])
def test_longest_prompt_estimate_matches_search_on_small_gpus(llama, gib, chunk):
    """Estimates match with the memory limit of the run, and with this limit minus `CUDA_GIB`."""
    for implementation in ("cab_dense", "cab"):
        run = rows(f"speed-prefill-{gib}-{'chunks' if chunk else 'whole'}")
        run = [row for row in run if row["fits"] and row["implementation"] == implementation]
        measured = run[-1]
        cache = fits.STATIC if chunk else fits.DYNAMIC
        assert measured["room_gib"] == gib
        for tensors_gib in (gib, gib - fits.CUDA_GIB):
            longest = llama.find_longest(tensors_gib * GIB, chunk or None, cache)
            assert longest == pytest.approx(measured["length"], rel=0.1)


def test_longest_prompt_fits_and_next_step_does_not(llama):
    limit = 20 * GIB
    for chunk in (None, 8192):
        for cache in fits.CACHES:
            longest = llama.find_longest(limit, chunk, cache)
            assert llama.estimate_memory(longest, chunk, cache).total <= limit
            assert llama.estimate_memory(longest + fits.LENGTH_STEP, chunk, cache).total > limit


def test_model_type_without_meta_support_is_refused():
    with pytest.raises(UsageError, match="model type dbrx cannot be called on torch's meta device"):
        fits.Prompts.of(tiny_config("dbrx"))


def test_fits_command_prints_table(tmp_path, capsys):
    LLAMA.save_pretrained(tmp_path)
    assert main(["fits", "--model", str(tmp_path), "--gpu-gib", "24", "--chunk", "4k"]) == 0
    shown = capsys.readouterr().out
    assert "Weights in bfloat16: 14.96 GiB of 23.4 GiB" in shown
    assert shown.count("| in chunks of 4,096 |") == 3
    assert "The model has 2,048 positions" in shown
    assert main(["fits", "--model", str(tmp_path), "--gpu-gib", "8"]) == 2
    assert "the weights of 15.0 GiB, got 8" in capsys.readouterr().err
    assert main(["fits", "--model", str(tmp_path), "--gpu-gib", "0.5"]) == 2
    assert "got 0.5, of which tensors may use 0.0" in capsys.readouterr().err
