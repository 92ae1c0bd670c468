"""Fidelity on a CUDA device: attention times, and numerical noise of kernels."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from words import make_tokenizer

from cab_hf.eval.__main__ import main

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Save a random model with the numbers and sizes of heads of SmolLM2; return its folder."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=65536,
        initializer_range=0.1,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_fidelity_records_attention_time_and_density(gpu, model_folder, tmp_path):
    method_names = "dense,full,cab,streaming,random,antidiagonal,xattention,xattention_16,"
    method_names += "vertical_slash,flexprefill,mean_pooled,trianglemix"
    arguments = ["--model", model_folder, "--out", tmp_path, "--methods", method_names]
    arguments += ["--lengths", 16384, "--documents", 2, "--probes", "continuation,asked,recall"]
    assert main(["fidelity", *map(str, arguments)]) == 0
    rows = {
        row["method"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]
    }
    assert set(rows) == set(method_names.split(","))
    for row in rows.values():
        assert row["dense_ms"] > 0 and row["attend_ms"] > 0
    assert rows["dense"]["over_dense"] == 1
    assert rows["streaming"]["attend_ms"] < rows["full"]["attend_ms"]
    kl_divergence = {method_name: row["continuation"]["kl"] for method_name, row in rows.items()}
    assert kl_divergence["dense"] == 0
    assert kl_divergence["full"] < kl_divergence["streaming"]
