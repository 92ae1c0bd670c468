"""SmolLM2 converted to other head dims and architectures.

The models test CAB on shapes that were not used to choose its default settings.

* ``smollm2-d128-gqa4`` has heads of 128 channels, four query heads per KV head and a RoPE base of
  500,000, like Llama 3.
* ``smollm2-qk-norm`` normalises queries and keys, like Qwen3.

Both models start from the weights of SmolLM2. Train the models with
``finetune/configs/other_shapes.yaml`` before you measure, which takes some minutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cab_hf.experiment.offline_models import built_in_text, smollm2_folder

# torch and transformers are imported on demand, because finding a folder needs neither
if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

WIDE_MODEL, NORMALISED_MODEL = "smollm2-d128-gqa4", "smollm2-qk-norm"
RESHAPED_MODELS = (WIDE_MODEL, NORMALISED_MODEL)
# fields of the config that are copied from SmolLM2
SHARED_CONFIG_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
    *("max_position_embeddings", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# standard deviation of the random weights of new channels and heads
RANDOM_STD = 0.03
# characters of `built_in_text` on which the norms of queries and keys are measured
MEASURED_CHARACTERS = slice(20_000, 28_000)


def make_reshaped_model(model_name: str, folder: Path) -> None:
    """Write a reshaped model in float32 and its tokenizer to a folder.

    Args:
        model_name: one of `RESHAPED_MODELS`.
        folder: the folder to write.

    Raises:
        UsageError: SmolLM2 is not available, see `smollm2_folder`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source_folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(source_folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        source_folder, dtype=torch.float32, trust_remote_code=False
    )
    if model_name == WIDE_MODEL:
        reshaped_model = widen_heads(model, head_dim=128, group_size=4, theta=500_000.0)
    else:
        sample_text = built_in_text()[MEASURED_CHARACTERS]
        reshaped_model = add_qk_norm(model, tokenizer(sample_text, return_tensors="pt").input_ids)
    reshaped_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def widen_heads(
    model: PreTrainedModel, head_dim: int, group_size: int, theta: float
) -> PreTrainedModel:
    """Return a LLaMA with more and larger heads and nearly the same outputs as ``model``.

    Every pair of rotated channels moves to the pair of the larger head with the nearest frequency.
    New channels of keys and values and new query heads have random weights. The other weights of
    new channels are zero, so that the new channels and heads do not change the output.

    Args:
        model: a LLaMA in float32, with smaller heads.
        head_dim: channels per head of the result.
        group_size: query heads per KV head of the result, more than ``model`` has.
        theta: RoPE base of the result.
    """
    import torch

    config, state_dict = model.config, model.state_dict()
    old_head_dim, kv_heads = config.head_dim, config.num_key_value_heads
    old_group_size = config.num_attention_heads // kv_heads
    # pair j rotates at old_theta^(-2 j / old_head_dim), pair i of the larger head at theta^(-2 i /
    # head_dim)
    old_theta = config.rope_parameters["rope_theta"]
    pair_ratio = head_dim / old_head_dim * math.log(old_theta) / math.log(theta)
    channel_pairs = torch.tensor([round(pair_ratio * j) for j in range(old_head_dim // 2)])
    # rotated_channels[c]: channel of the larger head that receives channel c of ``model``
    rotated_channels = torch.cat([channel_pairs, channel_pairs + head_dim // 2])
    wide_model = _build_model(
        "llama",
        model,
        num_heads=kv_heads * group_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        theta=theta,
    )
    random_generator = torch.Generator().manual_seed(0)

    def draw_weights(*shape: int) -> Tensor:
        return RANDOM_STD * torch.randn(shape, generator=random_generator)

    hidden_size = config.hidden_size
    for parameter_name, weight in state_dict.items():
        projection = parameter_name.rpartition("self_attn.")[2]
        if projection == "q_proj.weight":
            q = torch.zeros(kv_heads, group_size, head_dim, hidden_size)
            # attention divides logits by sqrt(head_dim) instead of sqrt(old_head_dim)
            old_q = weight.view(kv_heads, old_group_size, old_head_dim, hidden_size)
            q[:, :old_group_size, rotated_channels] = old_q * (head_dim / old_head_dim) ** 0.5
            q[:, old_group_size:] = draw_weights(
                kv_heads, group_size - old_group_size, head_dim, hidden_size
            )
            state_dict[parameter_name] = q.flatten(0, 2)
        elif projection in ("k_proj.weight", "v_proj.weight"):
            larger_weight = draw_weights(kv_heads, head_dim, hidden_size)
            # values are not rotated, so that their channels keep their indices
            larger_head_channels = (
                rotated_channels if projection == "k_proj.weight" else slice(old_head_dim)
            )
            larger_weight[:, larger_head_channels] = weight.view(
                kv_heads, old_head_dim, hidden_size
            )
            state_dict[parameter_name] = larger_weight.flatten(0, 1)
        elif projection == "o_proj.weight":
            o = torch.zeros(hidden_size, kv_heads, group_size, head_dim)
            o[:, :, :old_group_size, :old_head_dim] = weight.view(
                hidden_size, kv_heads, old_group_size, old_head_dim
            )
            state_dict[parameter_name] = o.flatten(1)
    wide_model.load_state_dict(state_dict)
    return wide_model


def add_qk_norm(model: PreTrainedModel, input_ids: Tensor) -> PreTrainedModel:
    """Return a Qwen3 with the weights of ``model``, a LLaMA in float32.

    The weight of each norm is the root mean square of the queries or keys of ``model`` in one
    forward pass. Hence the magnitude of logits stays the same on average over a layer, but changes
    for single heads and tokens.

    Args:
        model: a LLaMA in float32.
        input_ids: int64 [1, N], the tokens of the forward pass.
    """
    import torch

    config = model.config
    norm_model = _build_model(
        "qwen3",
        model,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        theta=config.rope_parameters["rope_theta"],
    )
    # root mean square of a projection's output, by parameter name of the norm of this output
    rms_by_norm: dict[str, Tensor] = {}

    def make_rms_hook(norm_name: str) -> Callable[..., None]:
        """Return a forward hook for a projection that stores the output's RMS in `rms_by_norm`."""

        def store_rms(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            # the keys of the first tokens are outliers and are left out
            rms_by_norm[norm_name] = output[:, 8:].square().mean().sqrt()

        return store_rms

    hook_handles = [
        module.register_forward_hook(make_rms_hook(module_name.replace("_proj", "_norm.weight")))
        for module_name, module in model.named_modules()
        if module_name.endswith(("q_proj", "k_proj"))
    ]
    with torch.no_grad():
        model(input_ids, use_cache=False, logits_to_keep=1)
    for hook_handle in hook_handles:
        hook_handle.remove()
    norm_weights = {
        norm_name: rms.expand(config.head_dim) for norm_name, rms in rms_by_norm.items()
    }
    norm_model.load_state_dict({**model.state_dict(), **norm_weights})
    return norm_model


def _build_model(
    model_type: str,
    model: PreTrainedModel,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    theta: float,
) -> PreTrainedModel:
    """Build a model with random weights and the `SHARED_CONFIG_FIELDS` of another model's config.

    Args:
        model_type: model type in transformers, such as "qwen3".
        model: the model whose config has the `SHARED_CONFIG_FIELDS`.
        num_heads: number of query heads.
        num_kv_heads: number of KV heads.
        head_dim: channels per head.
        theta: RoPE base.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        **{field_name: getattr(model.config, field_name) for field_name in SHARED_CONFIG_FIELDS},
    )
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
