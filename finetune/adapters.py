"""Read adapter folders that PEFT wrote, compare them with their base model, and load them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cab_hf.experiment import models as run_models
from cab_hf.experiment.settings import UsageError, convert_errors, first_line

MISFIT_ADVICE = (
    "Give the base model (--model, or --base), rank, alpha, targets and norms that the adapter was "
    "trained with"
)
WEIGHTS_FILE = "adapter_model.safetensors"
# type of each field that `save_adapter` writes about the base model into the file `BASE`
RECORDED_FIELDS = {
    "sha256": str,
    "rope_parameters": dict,
    "max_position_embeddings": int,
    "cab_config": dict,
}


def read_adapter_config(adapter: Path) -> Any:
    """Return the PEFT config of the adapter in the folder ``adapter``.

    Raises:
        UsageError: the config or the weights are missing or unreadable, or the adapter is no LoRA
            adapter.
    """
    from peft import LoraConfig, PeftConfig

    if not all((adapter / name).is_file() for name in (run_models.ADAPTER_CONFIG, WEIGHTS_FILE)):
        raise UsageError(
            f"adapter must be a folder with {run_models.ADAPTER_CONFIG} and {WEIGHTS_FILE}, got "
            f"{str(adapter)!r}. Give the folder that finetune/lora.py or PEFT saved."
        )
    with convert_read_errors(adapter, run_models.ADAPTER_CONFIG):
        config = PeftConfig.from_pretrained(str(adapter))
        peft_type = config.peft_type.value
    # opening a truncated file raises, because its header contains the length of the file
    with convert_read_errors(adapter, WEIGHTS_FILE), safe_open(adapter / WEIGHTS_FILE, "pt"):
        pass
    if not isinstance(config, LoraConfig):
        raise UsageError(
            f"adapter must be a LoRA adapter, got {adapter.name}, which is {peft_type}. Give "
            "another folder."
        )
    config.inference_mode = False
    return config


def convert_read_errors(adapter: Path, file: str) -> AbstractContextManager[None]:
    """Return a context manager that converts errors inside its block to a UsageError.

    The message names ``file`` in the folder ``adapter``.
    """
    return convert_errors(
        lambda error: (
            f"{file} of adapter {adapter.name} must be a file in PEFT's format, got a file that "
            f"cannot be read ({first_sentence(error)}). Give the folder as it was saved."
        )
    )


def first_sentence(error: Exception) -> str:
    """Return the first sentence of the message of ``error``, without its full stop."""
    return first_line(error).partition(". ")[0]


def read_base(adapter: Path) -> dict[str, Any]:
    """Read the fields that `save_adapter` wrote about the base model of an adapter.

    The types of the fields are those in `RECORDED_FIELDS`. The dict is empty if PEFT saved the
    adapter without `save_adapter`.
    """
    file = adapter / run_models.BASE_FILE
    if not file.is_file():
        return {}
    with convert_read_errors(adapter, run_models.BASE_FILE):
        fields = json.loads(file.read_text("utf-8"))
        for name, field_type in RECORDED_FIELDS.items():
            if not isinstance(fields.get(name), field_type | None):
                raise ValueError(f"{name} is {fields[name]!r}")
    return fields


def check_base(
    adapter: Path, base: str, fields: Mapping[str, Any], recorded_name: str | None
) -> None:
    """Raise a UsageError unless ``adapter`` was trained on the base model ``base``.

    The SHA-256 of the weights is compared if ``fields`` has one, else the name of the model.

    Args:
        adapter: folder of the adapter.
        base: name or folder of the base model.
        fields: the result of `read_base`.
        recorded_name: name of the base model in PEFT's config; None: the name is not checked.
    """
    if fields.get("sha256"):
        expected_base, actual_base = fields["sha256"], run_models.content_sha256(base)
        expected_text = f"a model with SHA-256 {expected_base[:12]}"
        actual_text = f"base {display_name(base)!r} has {actual_base[:12]}"
    else:
        expected_base, actual_base = display_name(recorded_name or base), display_name(base)
        expected_text, actual_text = repr(expected_base), f"base is {actual_base!r}"
    if actual_base != expected_base:
        raise UsageError(
            f"adapter {adapter.name} was trained in {expected_text}, and {actual_text}. "
            f"{MISFIT_ADVICE}."
        )


def display_name(model: str) -> str:
    """Return the name of a model for messages: the folder name of a path, else ``model`` itself."""
    return Path(model).name if Path(model).exists() else model


def load_weights(peft_model: Any, adapter: Path) -> list[str]:
    """Load the weights in the folder ``adapter`` into ``peft_model``, a PeftModel.

    If an adapter changes the head or the embeddings, PEFT also saves the base weights of these
    layers. This function loads such base weights too.

    Returns:
        The names of base weights whose saved values differ from those of ``peft_model``.

    Raises:
        UsageError: the weights belong to other modules or shapes, or cannot be read.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    with convert_read_errors(adapter, WEIGHTS_FILE):
        saved_weights = load_file(adapter / WEIGHTS_FILE)
    weights_with_embeddings = get_peft_model_state_dict(peft_model, save_embedding_layers=True)
    expected_weights = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    base_weights = {
        name: weights_with_embeddings[name]
        for name in saved_weights
        if name in weights_with_embeddings and name not in expected_weights
    }
    expected_weights |= base_weights
    # PEFT may save the shared weight of a tied head and embeddings under one name only
    saved_weight_by_address = {
        expected_weights[name].data_ptr(): saved_weight
        for name, saved_weight in saved_weights.items()
        if name in expected_weights
    }
    for name, weight in expected_weights.items():
        if name not in saved_weights and weight.data_ptr() in saved_weight_by_address:
            saved_weights[name] = saved_weight_by_address[weight.data_ptr()]
    for name in sorted(expected_weights.keys() | saved_weights.keys()):
        base_phrase, adapter_phrase = (
            f"of shape {list(weights[name].shape)}" if name in weights else "missing"
            for weights in (expected_weights, saved_weights)
        )
        if base_phrase != adapter_phrase:
            module = name.removeprefix("base_model.model.")
            reason = f"{module} is {adapter_phrase} in the adapter and {base_phrase} in the base"
            raise make_misfit_error(adapter, peft_model, reason)
    changed_names = [
        name
        for name, weight in base_weights.items()
        if not torch.equal(saved_weights[name].to(weight.dtype), weight.cpu())
    ]
    set_peft_model_state_dict(peft_model, saved_weights)
    return changed_names


def make_misfit_error(adapter: Path, base: Any, reason: str) -> UsageError:
    """Return a UsageError with the ``reason`` why ``adapter`` does not fit the model ``base``."""
    name = display_name(base.config.name_or_path) or type(base).__name__
    return UsageError(
        f"adapter {adapter.name} does not fit base {name!r}: {reason}. {MISFIT_ADVICE}."
    )


def initialise_adapter(peft_model: Any, adapter: Path) -> None:
    """Initialise the adapter of ``peft_model``, a PeftModel, from the folder ``adapter``.

    Both adapters must have the same base model, but their RoPE scaling may differ.

    Raises:
        UsageError: the base, modules, rank or alpha differ, or the folder has no adapter.
    """
    config, active_config = read_adapter_config(adapter), peft_model.active_peft_config
    base = peft_model.get_base_model()
    check_base(
        adapter=adapter,
        base=base.name_or_path,
        fields=read_base(adapter),
        recorded_name=config.base_model_name_or_path,
    )
    adapter_values, settings_values = (
        (lora_config.r, lora_config.lora_alpha) for lora_config in (config, active_config)
    )
    if adapter_values != settings_values:
        raise make_misfit_error(
            adapter,
            base,
            f"its rank and alpha are {adapter_values}, and the settings have {settings_values}",
        )
    changed_names = load_weights(peft_model, adapter)
    if changed_names:
        changed_name = changed_names[0].removeprefix("base_model.model.")
        raise make_misfit_error(
            adapter,
            base,
            f"{changed_name} differs in the adapter, so that the adapter must be merged first",
        )
