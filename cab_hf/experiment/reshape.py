"""SmolLM2 in other shapes, to test CAB on models for which no setting was tuned.

* ``smollm2-d128-gqa4`` has heads of 128 channels, four query heads per KV head and a RoPE base of
  500,000, like Llama 3.
* ``smollm2-qk-norm`` normalises queries and keys, like Qwen3.

Both start from the weights of SmolLM2. Train them before measuring, by
``finetune/configs/other_shapes.yaml``, which takes some minutes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from cab_hf.experiment.offline_models import built_in_text, smollm2_folder

# torch and transformers are imported on demand: finding a folder needs neither
if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

WIDE, NORMALISED = "smollm2-d128-gqa4", "smollm2-qk-norm"
RESHAPED = (WIDE, NORMALISED)
# fields of a config that both shapes take from SmolLM2
SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
    *("max_position_embeddings", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# standard deviation of weights without a source in SmolLM2
RANDOM = 0.03
# characters of the text that measures queries and keys
MEASURED = slice(20_000, 28_000)


def make_reshaped(name: str, folder: Path) -> None:
    """Write a model of `RESHAPED` in float32 to ``folder``.

    Raises:
        UsageError: as for `smollm2_folder`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, trust_remote_code=False
    )
    if name == WIDE:
        reshaped = widened(model, head_dim=128, group=4, theta=500_000.0)
    else:
        text = built_in_text()[MEASURED]
        reshaped = with_qk_norm(model, tokenizer(text, return_tensors="pt").input_ids)
    reshaped.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def widened(model: PreTrainedModel, head_dim: int, group: int, theta: float) -> PreTrainedModel:
    """Return a LLaMA that computes the same as ``model``, with more and larger heads.

    A rotated pair of channels moves to the pair of the larger head with the nearest frequency.
    Added keys, values and query heads are random, and no layer uses them yet.

    Args:
        model: a LLaMA in float32, with smaller heads.
        head_dim: channels per head.
        group: query heads per KV head, more than ``model`` has.
        theta: RoPE base. The more channels a head has, the closer frequencies are to those of
            ``model``.
    """
    import torch

    config, state = model.config, model.state_dict()
    dim, kv_heads = config.head_dim, config.num_key_value_heads
    own = config.num_attention_heads // kv_heads
    # pair j rotates at base^(-2 j / dim), pair i of the larger head at theta^(-2 i / head_dim)
    base = config.rope_parameters["rope_theta"]
    step = head_dim / dim * math.log(base) / math.log(theta)
    pairs = torch.tensor([round(step * j) for j in range(dim // 2)])
    rotated = torch.cat([pairs, pairs + head_dim // 2])
    wide_model = _build_model(
        "llama",
        model,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        theta=theta,
    )
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return RANDOM * torch.randn(shape, generator=generator)

    hidden = config.hidden_size
    for name, before in state.items():
        kind = name.rpartition("self_attn.")[2]
        if kind == "q_proj.weight":
            q = torch.zeros(kv_heads, group, head_dim, hidden)
            # logits are divided by the root of the larger number of channels
            q[:, :own, rotated] = before.view(kv_heads, own, dim, hidden) * (head_dim / dim) ** 0.5
            q[:, own:] = random(kv_heads, group - own, head_dim, hidden)
            state[name] = q.flatten(0, 2)
        elif kind in ("k_proj.weight", "v_proj.weight"):
            larger = random(kv_heads, head_dim, hidden)
            # RoPE pairs channels of keys; values use the first channels
            channels = rotated if kind == "k_proj.weight" else slice(dim)
            larger[:, channels] = before.view(kv_heads, dim, hidden)
            state[name] = larger.flatten(0, 1)
        elif kind == "o_proj.weight":
            o = torch.zeros(hidden, kv_heads, group, head_dim)
            o[:, :, :own, :dim] = before.view(hidden, kv_heads, own, dim)
            state[name] = o.flatten(1)
    wide_model.load_state_dict(state)
    return wide_model


def with_qk_norm(model: PreTrainedModel, ids: Tensor) -> PreTrainedModel:
    """Return a Qwen3 with the weights of ``model``, a LLaMA in float32.

    The weight of each norm is the root mean square of the queries or keys of ``model`` on a text.
    This keeps the temperature of a layer, but not of its heads and tokens.

    Args:
        ids: int64 [1, N], the tokens of that text.
    """
    import torch

    config = model.config
    norm_model = _build_model(
        "qwen3",
        model,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        theta=config.rope_parameters["rope_theta"],
    )
    measured: dict[str, Tensor] = {}

    def measure(norm: str) -> nn.Module:
        def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            # the keys of the first tokens of a text differ from all others
            measured[norm] = output[:, 8:].square().mean().sqrt()

        return hook

    handles = [
        module.register_forward_hook(measure(name.replace("_proj", "_norm.weight")))
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj"))
    ]
    with torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    norms = {name: rms.expand(config.head_dim) for name, rms in measured.items()}
    norm_model.load_state_dict({**model.state_dict(), **norms})
    return norm_model


def _build_model(
    kind: str, model: PreTrainedModel, heads: int, kv_heads: int, head_dim: int, theta: float
) -> PreTrainedModel:
    """Build a model of another class and shape, whose weights will be replaced."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        **{name: getattr(model.config, name) for name in SHARED},
    )
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
