"""Write a LLaMA with random weights to a folder, to measure the speed of a shape without weights.

    python examples/random_model.py FOLDER [field=value ...]

The default shape is that of LLaMA-3-8B, with 131,072 positions. Arguments ``field=value`` change
fields of `LlamaConfig`. The tokenizer has one token per byte. The attention of random weights is
not meaningful, so limit the density by ``max_density`` when you measure:

    python -m cab_hf.eval quickcheck --model FOLDER --kl 0 \
        --cab mass_threshold=1e-6 --cab max_density=0.1
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from cab_hf.experiment.models import load_tokenizer
from cab_hf.experiment.settings import parse_assignment

LLAMA_3_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}


def main(folder, *config_assignments):
    """Write the model and its tokenizer.

    Args:
        folder: the folder to write.
        config_assignments: words ``field=value`` with fields of `LlamaConfig`.
    """
    config = LlamaConfig(**{**LLAMA_3_8B, **dict(map(parse_assignment, config_assignments))})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
