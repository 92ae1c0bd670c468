"""Estimated memory of prompts, compared with real models and committed measurements."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny import draw_token_ids
from tiny_types import make_tiny_config
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

from cab_hf import CabConfig
from cab_hf.eval import fits
from cab_hf.eval.__main__ import main
from cab_hf.eval.kv_cache import read_with_cache
from cab_hf.eval.result_folders import read_results
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.cost_model import GIB

RESULTS_FOLDER = Path(__file__).parents[2] / "eval" / "results"
PROMPT_TOKENS = 300
# the model shape of the committed runs
LLAMA_CONFIG = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
CHUNK_TOKENS = [2048, 8192, 32_768]
# the sampled queries and keys of the committed runs
MEASURED_CONFIG = CabConfig(typical_queries=8, typical_key_stride=1)


@pytest.fixture(scope="module")
def llama_memory_model():
    """Return the memory model for the model and the config of the committed runs."""
    return dataclasses.replace(fits.MemoryModel.from_config(LLAMA_CONFIG), config=MEASURED_CONFIG)


def read_rows(run_name):
    """Return the rows of a committed run."""
    return read_results(RESULTS_FOLDER / run_name).rows


@torch.no_grad()
@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", "gemma4_text", "deepseek_v3", "qwen3_next", "mixtral"]
)
def test_estimated_weights_and_cache_equal_real_model(model_type):
    config = make_tiny_config(model_type)
    memory_model = fits.MemoryModel.from_config(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert memory_model.weight_bytes == sum(
        x.nbytes for x in (*model.parameters(), *model.buffers())
    )
    cache = DynamicCache(config=model.config)
    read_with_cache(model, draw_token_ids(1, PROMPT_TOKENS), cache)
    layers_with_keys = [
        layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), torch.Tensor)
    ]
    expected_bytes = sum(
        layer.keys.nbytes + layer.values.nbytes
        for layer in layers_with_keys
        if layer.keys.ndim == 4
    )
    # a layer with a sliding window may cache the window without the current token
    bytes_of_current_token = sum(
        layer_bytes for layer_bytes, window in memory_model.cache_layers if window
    )
    actual_bytes = memory_model.estimate_memory(PROMPT_TOKENS, None, fits.DYNAMIC_CACHE).cache_bytes
    assert expected_bytes > 0 and actual_bytes in (
        expected_bytes,
        expected_bytes + bytes_of_current_token,
    )


def test_estimated_cache_bytes_equal_static_cache(llama_memory_model):
    cache = StaticCache(config=LLAMA_CONFIG, max_cache_len=PROMPT_TOKENS)
    cache.early_initialization(
        batch_size=1, num_heads=8, head_dim=128, dtype=torch.bfloat16, device="meta"
    )
    cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    for chunk_tokens in (None, 128):
        assert (
            llama_memory_model.estimate_memory(
                PROMPT_TOKENS, chunk_tokens, fits.STATIC_CACHE
            ).cache_bytes
            == cache_bytes
        )
    layer_bytes = cache_bytes / 32
    assert (
        llama_memory_model.estimate_memory(PROMPT_TOKENS, 128, fits.DYNAMIC_CACHE).cache_bytes
        == cache_bytes + layer_bytes / 2
    )
    offloaded_estimate = llama_memory_model.estimate_memory(
        PROMPT_TOKENS, None, fits.OFFLOADED_CACHE
    )
    assert (offloaded_estimate.cache_bytes, offloaded_estimate.host_bytes) == (
        2 * layer_bytes,
        cache_bytes,
    )


@pytest.mark.parametrize("chunk_tokens", CHUNK_TOKENS)
def test_chunked_prompt_estimate_matches_measurement(llama_memory_model, chunk_tokens):
    for row in read_rows(f"speed-prefill-chunk-{chunk_tokens}"):
        estimate = llama_memory_model.estimate_memory(
            row["length"], chunk_tokens, fits.STATIC_CACHE
        )
        assert estimate.weight_bytes / GIB == pytest.approx(row["weights_gib"])
        assert estimate.cache_bytes / GIB == pytest.approx(row["cache_gib"])
        assert estimate.workspace_bytes / GIB == pytest.approx(row["rest_gib"], rel=0.1)


def test_whole_prompt_estimate_matches_measurement(llama_memory_model):
    for row in read_rows("speed-ttft"):
        if row["implementation"] == "cab":
            estimate = llama_memory_model.estimate_memory(row["length"], None, fits.DYNAMIC_CACHE)
            workspace_bytes = row["peak_gib"] * GIB - estimate.weight_bytes - estimate.cache_bytes
            assert estimate.workspace_bytes == pytest.approx(workspace_bytes, rel=0.1)


def test_selection_memory_estimate_matches_measurement(llama_memory_model):
    for row in read_rows("speed-predictor"):
        length = row["length"]
        actual_bytes = llama_memory_model.estimate_selection_bytes(32, 8, 128, length, length)
        assert actual_bytes / 2**20 == pytest.approx(row["peak_mib"], rel=0.1)


def test_longest_prompt_estimate_matches_search(llama_memory_model):
    longest_row = [row for row in read_rows("speed-prefill") if row["fits"]][-1]
    longest_length = llama_memory_model.find_longest_prompt(
        longest_row["room_gib"] * GIB, 32_768, fits.STATIC_CACHE
    )
    assert longest_length == pytest.approx(longest_row["length"], rel=0.1)


@pytest.mark.parametrize("gpu_gib", [24, 48, 80])
@pytest.mark.parametrize("chunk_tokens", [0, 8192])
def test_longest_prompt_estimate_matches_search_on_small_gpus(
    llama_memory_model, gpu_gib, chunk_tokens
):
    """Estimates match with the memory limit of the run, and with this limit minus `CUDA_GIB`."""
    for implementation in ("cab_dense", "cab"):
        run_rows = read_rows(f"speed-prefill-{gpu_gib}-{'chunks' if chunk_tokens else 'whole'}")
        run_rows = [
            row for row in run_rows if row["fits"] and row["implementation"] == implementation
        ]
        longest_row = run_rows[-1]
        cache_type = fits.STATIC_CACHE if chunk_tokens else fits.DYNAMIC_CACHE
        assert longest_row["room_gib"] == gpu_gib
        for tensor_limit_gib in (gpu_gib, gpu_gib - fits.CUDA_GIB):
            longest_length = llama_memory_model.find_longest_prompt(
                tensor_limit_gib * GIB, chunk_tokens or None, cache_type
            )
            assert longest_length == pytest.approx(longest_row["length"], rel=0.1)


def test_longest_prompt_fits_and_next_step_does_not(llama_memory_model):
    limit_bytes = 20 * GIB
    for chunk_tokens in (None, 8192):
        for cache_type in fits.CACHE_KINDS:
            longest_length = llama_memory_model.find_longest_prompt(
                limit_bytes, chunk_tokens, cache_type
            )
            assert (
                llama_memory_model.estimate_memory(
                    longest_length, chunk_tokens, cache_type
                ).total_bytes
                <= limit_bytes
            )
            assert (
                llama_memory_model.estimate_memory(
                    longest_length + fits.LENGTH_STEP, chunk_tokens, cache_type
                ).total_bytes
                > limit_bytes
            )


def test_model_type_without_meta_support_is_refused():
    with pytest.raises(UsageError, match="model type dbrx cannot be called on torch's meta device"):
        fits.MemoryModel.from_config(make_tiny_config("dbrx"))


def test_fits_command_prints_table(tmp_path, capsys):
    LLAMA_CONFIG.save_pretrained(tmp_path)
    assert main(["fits", "--model", str(tmp_path), "--gpu-gib", "24", "--chunk", "4k"]) == 0
    printed_text = capsys.readouterr().out
    assert "Weights in bfloat16: 14.96 GiB of 23.4 GiB" in printed_text
    assert printed_text.count("| in chunks of 4,096 |") == 3
    assert "The model has 2,048 positions" in printed_text
    assert main(["fits", "--model", str(tmp_path), "--gpu-gib", "8"]) == 2
    assert "the weights of 15.0 GiB, got 8" in capsys.readouterr().err
    assert main(["fits", "--model", str(tmp_path), "--gpu-gib", "0.5"]) == 2
    assert "got 0.5, of which tensors may use 0.0" in capsys.readouterr().err
