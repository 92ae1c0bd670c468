"""Models to train: loaded for a length, with adapters, and run without their head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cab_hf.checks import require
from cab_hf.config import SPARSE, CabConfig
from cab_hf.experiment import models as run_models
from cab_hf.experiment.log import write_atomically
from cab_hf.finetune.settings import ROPES, suggestion
from cab_hf.hf.model_config import cab_config_of
from cab_hf.patches import apply_cab

# of Llama 3.1, the source of this scaling
LLAMA3_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# the name in PEFT
ALL_LINEAR = "all-linear"
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def load_model(
    name: str,
    *,
    attn_implementation: str = "cab",
    cab_config: CabConfig | Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    device: Any = "cpu",
    length: int | None = None,
    qlora: bool = False,
    trust_remote_code: bool = False,
    **rope: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM in eval mode with positions for ``length`` tokens, and its tokenizer.

    Args:
        name: ``smollm2``, ``tiny`` (a random LLaMA with byte tokens), a folder, or a name on the
            hub.
        attn_implementation: the attention implementation.
        cab_config: settings of "cab". Fields in a mapping change the settings in the model's
            config, which are the default, else `CabConfig()`.
        dtype: name of the torch dtype of the weights.
        device: the device of the model.
        length: tokens of a sequence; None: no check.
        qlora: True for weights in 4 bits (NF4, bitsandbytes), with products in ``dtype``.
        trust_remote_code: True to run Python code that comes with the model.
        rope: ``rope``, ``rope_factor`` and ``rope_theta`` of `stretch_positions`.

    Raises:
        UsageError: the model does not exist or cannot be loaded.
        ValueError: positions do not reach ``length``, a scaling does not fit the model, dtype or
            ``cab_config`` is invalid, or bitsandbytes is missing for qlora.
    """
    config = run_models.load_config(name, trust_remote_code)
    stretch_positions(config, name, length, **rope)
    options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    options |= four_bits(dtype, device) if qlora else {}
    model, tokenizer = run_models.load_model(name, device, dtype, config=config, **options)
    for module in model.modules() if qlora else ():
        # otherwise bitsandbytes packs weights when a CPU evaluates, and gradients stop there
        module.support_avx512bf16_for_cpu = False
    # PEFT records it as the base of an adapter: a name instead of a path
    model.name_or_path = name
    if attn_implementation in SPARSE:
        complete = cab_config is None or isinstance(cab_config, CabConfig)
        apply_cab(model, cab_config) if complete else apply_cab(model, **cab_config)
    elif isinstance(cab_config, Mapping):
        # dense attention does not use them, but bad fields raise the same errors
        cab_config_of(model.config.get_text_config()).changed(**cab_config)
    return model, tokenizer


def four_bits(dtype: str, device: Any) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` for 4-bit weights; errors as in `load_model`."""
    installed = find_spec("bitsandbytes") is not None
    require(installed, "qlora", True, "off, unless bitsandbytes is installed")
    from transformers import BitsAndBytesConfig

    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        # the same dtype as all other weights, because FSDP shards them together
        bnb_4bit_quant_storage=dtype,
    )
    return {"quantization_config": quantised, "device_map": {"": device}}


def stretch_positions(
    config: PreTrainedConfig,
    name: str,
    length: int | None,
    rope: str | None = None,
    rope_factor: float | None = None,
    rope_theta: float | None = None,
) -> None:
    """Change the rotary positions of ``config`` in place so that they reach ``length`` tokens.

    Args:
        config: the config of the model.
        name: name of the model, for error messages.
        length: tokens to reach; None: no check.
        rope: None leaves positions unchanged. ``linear`` divides all frequencies by the factor.
            ``dynamic`` raises theta with the longest position of a call. ``yarn`` and ``llama3``
            divide low frequencies. ``theta`` uses another base.
        rope_factor: factor of the number of positions; by default the factor that ``length`` needs.
        rope_theta: the base of ``theta``; by default theta * factor^(D / (D - 2)), which divides
            the lowest frequency by the factor (NTK-aware). At a factor of 16 SmolLM2 needed four
            times as much (``configs/smollm2_128k_start.yaml``).

    Raises:
        ValueError: positions do not reach ``length``, the model has a scaling already, or it has no
            rotary positions.
    """
    if rope is None:
        reach = run_models.max_prompt_tokens(config)
        most = f"at most {reach} for model {name!r} without rope (one of {', '.join(ROPES)})"
        require(None in (length, reach) or length <= reach, "length", length, most)
        return
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    original = getattr(text, "max_position_embeddings", None)
    kind = (original and parameters.get("rope_type")) or "no RoPE, or other ones in other layers"
    unscaled = f"none for model {name!r}, which has positions of {kind}"
    require(kind == "default", "rope", rope, unscaled)
    needed = 1.0 if length is None else max(1.0, length / original)
    unneeded = f"none for length {length}, which the {original} positions of the model reach"
    require(rope_factor or needed > 1, "rope", rope, unneeded)
    factor = rope_factor or needed
    require(factor >= needed, "rope_factor", factor, f"{needed:g} or more for length {length}")
    if rope == "theta":
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        dim = int(dim * parameters.get("partial_rotary_factor", 1.0))
        base = rope_theta or parameters["rope_theta"] * factor ** (dim / (dim - 2))
        scaled = {"rope_theta": base}
    else:
        scaled = {"rope_type": rope, "factor": factor}
    if rope in ("yarn", "llama3"):
        scaled["original_max_position_embeddings"] = original
    scaled |= LLAMA3_FACTORS if rope == "llama3" else {}
    text.rope_parameters = {**parameters, **scaled}
    if rope not in ("linear", "dynamic"):
        # those two need the original number, the others have it next to their factor
        text.max_position_embeddings = round(factor * original)


def with_lora(
    model: PreTrainedModel,
    targets: Sequence[str] | str,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    norms: bool = False,
) -> Any:
    """Return ``model`` with float32 LoRA adapters and all other weights frozen, a PeftModel.

    Adapters compute their products in the dtype of the model, as under autocast.

    Args:
        model: a causal language model.
        targets: last names of linear layers, such as ``q_proj``, or ``all-linear`` for all layers
            except the head.
        rank: rank of the adapters.
        alpha: the product of an adapter is scaled by ``alpha / rank``.
        dropout: dropout of the inputs of adapters.
        norms: True to train all norms too.

    Raises:
        ValueError: a target is no layer of the model; a head that is tied to the embeddings has an
            adapter; or a head has dropout.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils import ModulesToSaveWrapper

    listed = sorted(set(targets.split(",") if isinstance(targets, str) else targets))
    targets = ALL_LINEAR if listed == [ALL_LINEAR] else listed
    if targets != ALL_LINEAR:
        _check_targets(model, targets, dropout)
    # transformers has no common class of norms
    norm_names = {
        _last_name(n) for n, m in model.named_modules() if type(m).__name__.endswith("Norm")
    }
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        modules_to_save=sorted(norm_names) if norms else None,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype.itemsize < torch.float32.itemsize:
            # small updates would be rounded away
            parameter.data = parameter.data.float()
    dtype = model.dtype
    for wrapper in adapted.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            for norm in wrapper.modules_to_save.values():
                # a norm trained in float32 returns the dtype of the model
                norm.register_forward_hook(lambda module, inputs, output: output.to(dtype))
    round_products(adapted)
    return adapted


class CastLinear(nn.Linear):
    """A linear layer that computes in the dtype of its input, whatever the dtype of its weight."""

    def __init__(self, layer: nn.Linear) -> None:
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, has_bias, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def round_products(adapted: nn.Module) -> None:
    """Make adapters of linear layers compute in the dtype of their input, as under autocast.

    PEFT would convert their input and output to float32, which moves several times the bytes of the
    adapted layer.
    """
    for module in adapted.modules():
        if not hasattr(module, "lora_A"):
            continue
        # PEFT's switch, which `peft.helpers.disable_input_dtype_casting` sets temporarily
        module.cast_input_dtype_enabled = False
        for adapters in (module.lora_A, module.lora_B):
            for name, layer in adapters.items():
                adapters[name] = CastLinear(layer)


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Make layers keep only their input and recompute the rest in the backward pass."""
    # transformers has renamed it
    old = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
    causal = causal_model(model)
    if hasattr(causal, "_require_grads_hook"):
        # frozen embeddings need no gradient, and their output would stay in memory
        causal.disable_input_require_grads()


def _check_targets(model: PreTrainedModel, targets: Sequence[str], dropout: float) -> None:
    # layers of bitsandbytes have this class too
    names = {_last_name(name) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for target in targets:
        hint = suggestion(target, sorted(names))
        require(
            target in names,
            "targets",
            targets,
            f"names of linear layers of this model ({hint.rstrip('.')})",
        )
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    head = next((_last_name(name) for name, m in model.named_modules() if m is head), None)
    alone = f"without {head!r}, which shares its weight with the embeddings in this model"
    require(not (tied and head in targets), "targets", targets, alone)
    # the loss adds an adapter of the head to its weight
    require(
        not dropout or head not in targets, "dropout", dropout, f"0 if targets contain {head!r}"
    )


def _last_name(name: str) -> str:
    return name.rpartition(".")[2]


def forward_hidden(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the hidden states that enter the head, and the weight of the head.

    The head returns its input meanwhile. Operations of the model on logits, such as scaling, then
    apply to the hidden states, which is equivalent if they are linear. The call goes through all
    wrappers of the model, so that all hooks run.

    Args:
        model: a causal LM, with or without adapters. Under FSDP the weight exists only while the
            wrapped module runs: call this function, and use the weight, inside of it.
        batch: ``input_ids`` int64 [B, N] and other inputs of the model; labels are ignored.

    Returns:
        hidden [B, N, D], scaled as the model scales its logits, and weight [V, D], including the
        product of an adapter.

    Raises:
        NotImplementedError: the logits of the head are no such product.
    """
    weights = []

    def forward(hidden: Tensor) -> Tensor:
        weights.append(head_weight(head))
        return hidden

    head = _head_of(causal_model(model))
    before = vars(head).get("forward")
    head.forward = forward
    try:
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        hidden = model(**inputs, use_cache=False).logits
    finally:
        del head.forward
        if before is not None:
            head.forward = before
    return hidden, weights[-1]


def causal_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a PEFT model, or ``model`` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _head_of(causal: PreTrainedModel) -> nn.Module:
    """Return the module that computes logits; NotImplementedError if they are no scaled product."""
    head, text = causal.get_output_embeddings(), causal.config.get_text_config()
    caps = {name: getattr(text, name, None) for name in SOFT_CAPS}
    wrong = [f"caps its logits ({name}={x})" for name, x in caps.items() if x is not None]
    if head is None or getattr(head, "bias", None) is not None:
        wrong.append("has no head" if head is None else "has a head with a bias")
    if wrong:
        raise NotImplementedError(
            "model must compute logits as hidden states times one weight, got "
            f"{type(causal).__name__}, which {wrong[0]}. Train another model."
        )
    return head


def head_weight(head: nn.Module) -> Tensor:
    """Return the weight [V, D] of a head, including the product of an adapter of `with_lora`."""
    if not hasattr(head, "lora_A"):
        return head.weight
    (name,), weight = head.active_adapters, head.base_layer.weight
    product = head.lora_B[name].weight @ head.lora_A[name].weight
    return weight + (head.scaling[name] * product).to(weight.dtype)


def save_adapter(
    adapted: Any,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an adapter, its tokenizer, and the facts of its base for `cab_hf.finetune.merge`.

    Args:
        adapted: the result of `with_lora`, unwrapped.
        tokenizer: the tokenizer of the model.
        folder: the folder to write.
        state_dict: its parameters, gathered if FSDP has sharded them.
    """
    folder = Path(folder)
    # PEFT would ask the hub whether the embeddings have grown
    adapted.save_pretrained(folder, state_dict=state_dict, save_embedding_layers=False)
    tokenizer.save_pretrained(folder)
    causal = causal_model(adapted)
    text = causal.config.get_text_config()
    fields = {"sha256": loaded_sha256(causal)}
    fields |= {name: getattr(text, name, None) for name in run_models.RESTORED}
    write_atomically(folder / run_models.BASE, json.dumps(fields, indent=2) + "\n")


def loaded_sha256(model: nn.Module) -> str:
    """Return the `content_sha256` of a loaded model, with or without adapters.

    Its files are read only once: checkpoints are many, bases are large, and files that are replaced
    later are not the loaded ones.
    """
    causal = causal_model(model)
    if not hasattr(causal, "_cab_sha256"):
        causal._cab_sha256 = run_models.content_sha256(causal.name_or_path)
    return causal._cab_sha256
