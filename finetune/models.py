"""Load models for long sequences, add LoRA adapters, and return hidden states instead of logits."""

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
from cab_hf.config import SPARSE_IMPLEMENTATIONS, CabConfig
from cab_hf.experiment import models as run_models
from cab_hf.experiment.log import write_atomically
from cab_hf.finetune.settings import ROPE_SCALINGS, format_suggestion
from cab_hf.hf.model_config import cab_config_of
from cab_hf.patches import apply_cab

# parameters of the RoPE scaling "llama3", as in the config of Llama 3.1
LLAMA3_ROPE_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# value of PEFT's ``target_modules`` for all linear layers except the head
ALL_LINEAR_TARGETS = "all-linear"
# config fields of models that apply tanh to their logits
LOGIT_CAP_FIELDS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


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
    """Load a causal LM and its tokenizer; the model is in eval mode.

    Args:
        name: ``smollm2``, ``tiny`` (a random LLaMA with byte tokens), a folder, or a name on the
            hub.
        attn_implementation: the attention implementation.
        cab_config: settings of sparse attention. None: the ``cab_config`` in the model's config, or
            else `CabConfig()`. A mapping replaces single fields of this default.
        dtype: name of the torch dtype of the weights.
        device: the device of the model.
        length: tokens of a sequence; None: do not check that positions reach it.
        qlora: True for weights in 4 bits (NF4, bitsandbytes), with products in ``dtype``.
        trust_remote_code: True to run Python code that comes with the model.
        rope: ``rope``, ``rope_factor`` and ``rope_theta`` of `stretch_positions`.

    Raises:
        UsageError: the model does not exist or cannot be loaded.
        ValueError: ``length`` exceeds the positions of the model, the model does not support the
            RoPE scaling, dtype or ``cab_config`` is invalid, or qlora lacks bitsandbytes.
    """
    config = run_models.load_config(name, trust_remote_code)
    stretch_positions(config, name, length, **rope)
    load_options = {
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    load_options |= make_four_bit_options(dtype, device) if qlora else {}
    model, tokenizer = run_models.load_model(name, device, dtype, config=config, **load_options)
    for module in model.modules() if qlora else ():
        # in eval mode on a CPU, bitsandbytes would repack weights to a format without gradients
        module.support_avx512bf16_for_cpu = False
    # PEFT records this name as the base of an adapter; transformers may have set a path
    model.name_or_path = name
    if attn_implementation in SPARSE_IMPLEMENTATIONS:
        is_complete_config = cab_config is None or isinstance(cab_config, CabConfig)
        apply_cab(model, cab_config) if is_complete_config else apply_cab(model, **cab_config)
    elif isinstance(cab_config, Mapping):
        # dense attention does not use the fields; this call only raises errors for invalid fields
        cab_config_of(model.config.get_text_config()).changed(**cab_config)
    return model, tokenizer


def make_four_bit_options(dtype: str, device: Any) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` that load weights in 4 bits.

    Args:
        dtype: name of the torch dtype of products and of weights that stay unquantised.
        device: the device of the model.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    is_installed = find_spec("bitsandbytes") is not None
    require(is_installed, "qlora", True, "off, unless bitsandbytes is installed")
    from transformers import BitsAndBytesConfig

    quantisation_config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        # the same dtype as all other weights, because FSDP shards them together
        bnb_4bit_quant_storage=dtype,
    )
    return {"quantization_config": quantisation_config, "device_map": {"": device}}


def stretch_positions(
    config: PreTrainedConfig,
    model_name: str,
    length: int | None,
    rope: str | None = None,
    rope_factor: float | None = None,
    rope_theta: float | None = None,
) -> None:
    """Change the RoPE scaling of ``config`` in place so that positions reach ``length`` tokens.

    Args:
        config: the config of the model.
        model_name: name of the model, for error messages.
        length: tokens of the longest sequence; None: no check.
        rope: the scaling. None leaves positions unchanged. ``linear`` divides all frequencies by
            the factor. ``dynamic`` raises theta with the longest position of a call. ``yarn`` and
            ``llama3`` divide low frequencies. ``theta`` uses another RoPE base.
        rope_factor: new number of positions divided by the old; None: the smallest sufficient
            factor.
        rope_theta: RoPE base for ``theta``; None: theta * factor^(D / (D - 2)), which divides the
            lowest frequency by the factor (NTK-aware). With a factor of 16, SmolLM2 needed four
            times this base (``configs/smollm2_128k_start.yaml``).

    Raises:
        ValueError: positions do not reach ``length``, the model already has a RoPE scaling, or the
            model has no RoPE.
    """
    if rope is None:
        max_positions = run_models.max_prompt_tokens(config)
        accepted_values = (
            f"at most {max_positions} for model {model_name!r} without rope (one of "
            f"{', '.join(ROPE_SCALINGS)})"
        )
        require(
            None in (length, max_positions) or length <= max_positions,
            "length",
            length,
            accepted_values,
        )
        return
    text_config = config.get_text_config()
    rope_parameters = getattr(text_config, "rope_parameters", None) or {}
    original_positions = getattr(text_config, "max_position_embeddings", None)
    rope_type = (
        original_positions and rope_parameters.get("rope_type")
    ) or "no RoPE, or other ones in other layers"
    accepted_values = f"none for model {model_name!r}, which has positions of {rope_type}"
    require(rope_type == "default", "rope", rope, accepted_values)
    min_rope_factor = 1.0 if length is None else max(1.0, length / original_positions)
    accepted_values = (
        f"none for length {length}, which the {original_positions} positions of the model reach"
    )
    require(rope_factor or min_rope_factor > 1, "rope", rope, accepted_values)
    used_rope_factor = rope_factor or min_rope_factor
    require(
        used_rope_factor >= min_rope_factor,
        "rope_factor",
        used_rope_factor,
        f"{min_rope_factor:g} or more for length {length}",
    )
    if rope == "theta":
        rotary_dim = getattr(text_config, "head_dim", None)
        rotary_dim = rotary_dim or text_config.hidden_size // text_config.num_attention_heads
        rotary_dim = int(rotary_dim * rope_parameters.get("partial_rotary_factor", 1.0))
        used_rope_theta = rope_theta or rope_parameters["rope_theta"] * used_rope_factor ** (
            rotary_dim / (rotary_dim - 2)
        )
        rope_changes = {"rope_theta": used_rope_theta}
    else:
        rope_changes = {"rope_type": rope, "factor": used_rope_factor}
    if rope in ("yarn", "llama3"):
        rope_changes["original_max_position_embeddings"] = original_positions
    rope_changes |= LLAMA3_ROPE_FACTORS if rope == "llama3" else {}
    text_config.rope_parameters = {**rope_parameters, **rope_changes}
    if rope not in ("linear", "dynamic"):
        # linear and dynamic are relative to this number; other scalings ignore it or record the
        # original number next to the factor
        text_config.max_position_embeddings = round(used_rope_factor * original_positions)


def with_lora(
    model: PreTrainedModel,
    targets: Sequence[str] | str,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    trains_norms: bool = False,
) -> Any:
    """Add float32 LoRA adapters to ``model`` and freeze all other weights; return a PeftModel.

    The products of adapters have the dtype of the model, as under autocast.

    Args:
        model: a causal language model.
        targets: last names of linear layers, such as ``q_proj``, or ``all-linear`` for all layers
            except the head.
        rank: rank of the adapters.
        alpha: outputs of adapters are scaled by ``alpha / rank``.
        dropout: dropout probability of the inputs of adapters.
        trains_norms: True to train all norms too, in float32.

    Raises:
        ValueError: a target is no linear layer of the model; a head that is tied to the embeddings
            is a target; or a head is a target and ``dropout`` is not 0.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils import ModulesToSaveWrapper

    target_names = sorted(set(targets.split(",") if isinstance(targets, str) else targets))
    targets = ALL_LINEAR_TARGETS if target_names == [ALL_LINEAR_TARGETS] else target_names
    if targets != ALL_LINEAR_TARGETS:
        _check_targets(model, targets, dropout)
    # selected by name, because the norms of transformers have no common base class
    norm_names = {
        _get_last_name_part(module_name)
        for module_name, module in model.named_modules()
        if type(module).__name__.endswith("Norm")
    }
    lora_config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        modules_to_save=sorted(norm_names) if trains_norms else None,
        task_type="CAUSAL_LM",
    )
    peft_model = get_peft_model(model, lora_config)
    for parameter in peft_model.parameters():
        if parameter.requires_grad and parameter.dtype.itemsize < torch.float32.itemsize:
            # updates of 16-bit weights would be lost in rounding
            parameter.data = parameter.data.float()
    model_dtype = model.dtype
    for peft_module in peft_model.modules():
        if isinstance(peft_module, ModulesToSaveWrapper):
            for trained_norm in peft_module.modules_to_save.values():
                # without this hook, the output of a float32 norm would be float32
                trained_norm.register_forward_hook(
                    lambda module, inputs, output: output.to(model_dtype)
                )
    compute_in_input_dtype(peft_model)
    return peft_model


class CastLinear(nn.Linear):
    """A linear layer that casts its weight to the dtype of its input before the product."""

    def __init__(self, layer: nn.Linear) -> None:
        """Use the weight and bias parameters of ``layer``, without copies."""
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, has_bias, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def compute_in_input_dtype(peft_model: nn.Module) -> None:
    """Make the LoRA adapters of a PeftModel compute in the dtype of their input.

    By default PEFT casts inputs and outputs of adapters to float32, which takes several times the
    memory traffic of the adapted layer itself.
    """
    for module in peft_model.modules():
        if not hasattr(module, "lora_A"):
            continue
        # set permanently; `peft.helpers.disable_input_dtype_casting` sets this attribute in a block
        module.cast_input_dtype_enabled = False
        for adapter_layers in (module.lora_A, module.lora_B):
            for adapter_name, linear_layer in adapter_layers.items():
                adapter_layers[adapter_name] = CastLinear(linear_layer)


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Make decoder layers save only their input and recompute activations in the backward pass."""
    # newer versions of transformers have another name for this method
    old_enable_method = model.gradient_checkpointing_enable
    enable_checkpointing = getattr(model, "activation_checkpointing_enable", old_enable_method)
    enable_checkpointing({"use_reentrant": False})
    causal_lm = unwrap_causal_lm(model)
    if hasattr(causal_lm, "_require_grads_hook"):
        # PEFT makes the output of frozen embeddings require gradients, which would cost memory and
        # is needed only for reentrant checkpoints
        causal_lm.disable_input_require_grads()


def _check_targets(model: PreTrainedModel, targets: Sequence[str], dropout: float) -> None:
    """Raise a ValueError if `with_lora` does not support ``targets``, or ``dropout`` with them."""
    # quantised layers of bitsandbytes are subclasses of nn.Linear
    linear_names = {
        _get_last_name_part(module_name)
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    for target in targets:
        suggestion = format_suggestion(target, sorted(linear_names))
        require(
            target in linear_names,
            "targets",
            targets,
            f"names of linear layers of this model ({suggestion.rstrip('.')})",
        )
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    head_name = next(
        (
            _get_last_name_part(module_name)
            for module_name, module in model.named_modules()
            if module is head
        ),
        None,
    )
    accepted_targets = (
        f"without {head_name!r}, which shares its weight with the embeddings in this model"
    )
    require(not (is_tied and head_name in targets), "targets", targets, accepted_targets)
    # the loss computes logits with the sum of the head's weight and its adapter, without dropout
    require(
        not dropout or head_name not in targets,
        "dropout",
        dropout,
        f"0 if targets contain {head_name!r}",
    )


def _get_last_name_part(module_name: str) -> str:
    """Return the part of a module's name after the last dot."""
    return module_name.rpartition(".")[2]


def forward_hidden(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Run ``model`` without its head; return the last hidden states and the weight of the head.

    During the forward pass, the head returns its input instead of logits. A model that scales its
    logits then scales the hidden states, which is equivalent. ``model`` is called with all of its
    wrappers, so that their hooks run.

    Args:
        model: a causal LM, with or without adapters. Under FSDP the weight exists only inside the
            forward pass of the wrapped module: call this function, and use the weight, there.
        batch: ``input_ids`` int64 [B, N] and other inputs of the model; labels are ignored.

    Returns:
        hidden [B, N, D], scaled as the model scales its logits, and weight [V, D], including the
        product of an adapter.

    Raises:
        NotImplementedError: the logits are not hidden states times one weight.
    """
    head_weights = []

    def return_hidden(hidden: Tensor) -> Tensor:
        head_weights.append(merge_head_weight(head))
        return hidden

    head = _get_head(unwrap_causal_lm(model))
    # not None if another library has replaced the method of this object
    original_forward = vars(head).get("forward")
    head.forward = return_hidden
    try:
        model_inputs = {
            input_name: tensor for input_name, tensor in batch.items() if input_name != "labels"
        }
        hidden = model(**model_inputs, use_cache=False).logits
    finally:
        del head.forward
        if original_forward is not None:
            head.forward = original_forward
    return hidden, head_weights[-1]


def unwrap_causal_lm(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a PEFT model, or ``model`` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _get_head(causal_lm: PreTrainedModel) -> nn.Module:
    """Return the head of a causal LM.

    Raises:
        NotImplementedError: the logits are not hidden states times one weight.
    """
    head, text_config = causal_lm.get_output_embeddings(), causal_lm.config.get_text_config()
    logit_cap_by_field = {field: getattr(text_config, field, None) for field in LOGIT_CAP_FIELDS}
    unsupported_reasons = [
        f"caps its logits ({field}={logit_cap})"
        for field, logit_cap in logit_cap_by_field.items()
        if logit_cap is not None
    ]
    if head is None or getattr(head, "bias", None) is not None:
        unsupported_reasons.append("has no head" if head is None else "has a head with a bias")
    if unsupported_reasons:
        raise NotImplementedError(
            "model must compute logits as hidden states times one weight, got "
            f"{type(causal_lm).__name__}, which {unsupported_reasons[0]}. Train another model."
        )
    return head


def merge_head_weight(head: nn.Module) -> Tensor:
    """Return the weight [V, D] of a head, including the product of an adapter of `with_lora`."""
    if not hasattr(head, "lora_A"):
        return head.weight
    (adapter_name,), weight = head.active_adapters, head.base_layer.weight
    adapter_product = head.lora_B[adapter_name].weight @ head.lora_A[adapter_name].weight
    return weight + (head.scaling[adapter_name] * adapter_product).to(weight.dtype)


def save_adapter(
    peft_model: Any,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an adapter, its tokenizer, and facts about its base model into a folder.

    The facts are the SHA-256 and the fields `RESTORED_FIELDS` of the base, in the file
    `BASE_MODEL_FILE`. `cab_hf.finetune.merge` and `cab_hf.finetune.adapters` read this file.

    Args:
        peft_model: the result of `with_lora`, without wrappers such as DDP.
        tokenizer: the tokenizer of the model.
        folder: the folder to write.
        state_dict: trained parameters by name, unsharded; None: the parameters of ``peft_model``.
    """
    folder = Path(folder)
    # by default PEFT asks the hub whether the vocabulary has grown
    peft_model.save_pretrained(folder, state_dict=state_dict, save_embedding_layers=False)
    tokenizer.save_pretrained(folder)
    causal_lm = unwrap_causal_lm(peft_model)
    text_config = causal_lm.config.get_text_config()
    base_model_fields = {"sha256": hash_base_model(causal_lm)}
    base_model_fields |= {
        field: getattr(text_config, field, None) for field in run_models.RESTORED_FIELDS
    }
    write_atomically(
        folder / run_models.BASE_MODEL_FILE, json.dumps(base_model_fields, indent=2) + "\n"
    )


def hash_base_model(model: nn.Module) -> str:
    """Return the SHA-256 of the files of a loaded model, with or without adapters.

    The first call stores the result in an attribute of the model. Hence later calls are fast, and
    do not depend on files that were replaced after loading.
    """
    causal_lm = unwrap_causal_lm(model)
    if not hasattr(causal_lm, "_cab_sha256"):
        causal_lm._cab_sha256 = run_models.content_sha256(causal_lm.name_or_path)
    return causal_lm._cab_sha256
