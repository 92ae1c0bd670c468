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
# type of each field that `save_adapter` writes about the base model into `BASE_MODEL_FILE`
BASE_MODEL_FIELD_TYPES = {
    "sha256": str,
    "rope_parameters": dict,
    "max_position_embeddings": int,
    "cab_config": dict,
}


def read_adapter_config(adapter_folder: Path) -> Any:
    """Return the PEFT config of the adapter in the folder ``adapter_folder``.

    Raises:
        UsageError: the config or the weights are missing or unreadable, or the adapter is no LoRA
            adapter.
    """
    from peft import LoraConfig, PeftConfig

    if not all(
        (adapter_folder / file_name).is_file()
        for file_name in (run_models.ADAPTER_CONFIG_FILE, WEIGHTS_FILE)
    ):
        raise UsageError(
            f"adapter must be a folder with {run_models.ADAPTER_CONFIG_FILE} and {WEIGHTS_FILE}, "
            f"got {str(adapter_folder)!r}. Give the folder that finetune/lora.py or PEFT saved."
        )
    with convert_read_errors(adapter_folder, run_models.ADAPTER_CONFIG_FILE):
        adapter_config = PeftConfig.from_pretrained(str(adapter_folder))
        peft_type = adapter_config.peft_type.value
    # opening a truncated file raises, because its header contains the length of the file
    with (
        convert_read_errors(adapter_folder, WEIGHTS_FILE),
        safe_open(adapter_folder / WEIGHTS_FILE, "pt"),
    ):
        pass
    if not isinstance(adapter_config, LoraConfig):
        raise UsageError(
            f"adapter must be a LoRA adapter, got {adapter_folder.name}, which is {peft_type}. "
            "Give "
            "another folder."
        )
    adapter_config.inference_mode = False
    return adapter_config


def convert_read_errors(adapter_folder: Path, file_name: str) -> AbstractContextManager[None]:
    """Return a context manager that converts errors inside its block to a UsageError.

    The message names ``file_name`` in the folder ``adapter_folder``.
    """
    return convert_errors(
        lambda error: (
            f"{file_name} of adapter {adapter_folder.name} must be a file in PEFT's format, got a "
            "file that "
            f"cannot be read ({get_first_sentence(error)}). Give the folder as it was saved."
        )
    )


def get_first_sentence(error: Exception) -> str:
    """Return the first sentence of the message of ``error``, without its full stop."""
    return first_line(error).partition(". ")[0]


def read_base_model_fields(adapter_folder: Path) -> dict[str, Any]:
    """Read the fields that `save_adapter` wrote about the base model of an adapter.

    The types of the fields are those in `BASE_MODEL_FIELD_TYPES`. The dict is empty if PEFT saved
    the adapter without `save_adapter`.
    """
    base_model_file = adapter_folder / run_models.BASE_MODEL_FILE
    if not base_model_file.is_file():
        return {}
    with convert_read_errors(adapter_folder, run_models.BASE_MODEL_FILE):
        base_model_fields = json.loads(base_model_file.read_text("utf-8"))
        for field_name, field_type in BASE_MODEL_FIELD_TYPES.items():
            if not isinstance(base_model_fields.get(field_name), field_type | None):
                raise ValueError(f"{field_name} is {base_model_fields[field_name]!r}")
    return base_model_fields


def require_base_model(
    adapter_folder: Path, base: str, base_fields: Mapping[str, Any], recorded_base_name: str | None
) -> None:
    """Raise a UsageError unless ``adapter_folder`` was trained on the base model ``base``.

    The SHA-256 of the weights is compared if ``base_fields`` has one, else the name of the model.

    Args:
        adapter_folder: folder of the adapter.
        base: name or folder of the base model.
        base_fields: the result of `read_base_model_fields`.
        recorded_base_name: name of the base model in PEFT's config; None: the name is not checked.
    """
    if base_fields.get("sha256"):
        expected_base, actual_base = base_fields["sha256"], run_models.content_sha256(base)
        expected_base_phrase = f"a model with SHA-256 {expected_base[:12]}"
        actual_base_phrase = f"base {format_model_name(base)!r} has {actual_base[:12]}"
    else:
        expected_base, actual_base = (
            format_model_name(recorded_base_name or base),
            format_model_name(base),
        )
        expected_base_phrase, actual_base_phrase = repr(expected_base), f"base is {actual_base!r}"
    if actual_base != expected_base:
        raise UsageError(
            f"adapter {adapter_folder.name} was trained in {expected_base_phrase}, and "
            f"{actual_base_phrase}. "
            f"{MISFIT_ADVICE}."
        )


def format_model_name(name_or_path: str) -> str:
    """Return the name of a model for messages: the folder name if ``name_or_path`` is a path."""
    return Path(name_or_path).name if Path(name_or_path).exists() else name_or_path


def load_weights(peft_model: Any, adapter_folder: Path) -> list[str]:
    """Load the weights in the folder ``adapter_folder`` into ``peft_model``, a PeftModel.

    If an adapter changes the head or the embeddings, PEFT also saves the base weights of these
    layers. This function loads such base weights too.

    Returns:
        The names of base weights whose saved values differ from those of ``peft_model``.

    Raises:
        UsageError: the weights belong to other modules or shapes, or cannot be read.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    with convert_read_errors(adapter_folder, WEIGHTS_FILE):
        saved_weights = load_file(adapter_folder / WEIGHTS_FILE)
    weights_with_embeddings = get_peft_model_state_dict(peft_model, save_embedding_layers=True)
    expected_weights = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    base_weights = {
        weight_name: weights_with_embeddings[weight_name]
        for weight_name in saved_weights
        if weight_name in weights_with_embeddings and weight_name not in expected_weights
    }
    expected_weights |= base_weights
    # PEFT may save the shared weight of a tied head and embeddings under one name only
    saved_weight_by_address = {
        expected_weights[weight_name].data_ptr(): saved_weight
        for weight_name, saved_weight in saved_weights.items()
        if weight_name in expected_weights
    }
    for weight_name, weight in expected_weights.items():
        if weight_name not in saved_weights and weight.data_ptr() in saved_weight_by_address:
            saved_weights[weight_name] = saved_weight_by_address[weight.data_ptr()]
    for weight_name in sorted(expected_weights.keys() | saved_weights.keys()):
        base_weight_phrase, adapter_weight_phrase = (
            f"of shape {list(weights_by_name[weight_name].shape)}"
            if weight_name in weights_by_name
            else "missing"
            for weights_by_name in (expected_weights, saved_weights)
        )
        if base_weight_phrase != adapter_weight_phrase:
            misfit_weight_name = weight_name.removeprefix("base_model.model.")
            misfit_reason = (
                f"{misfit_weight_name} is {adapter_weight_phrase} in the adapter and "
                f"{base_weight_phrase} in the base"
            )
            raise make_misfit_error(adapter_folder, peft_model, misfit_reason)
    changed_weight_names = [
        weight_name
        for weight_name, weight in base_weights.items()
        if not torch.equal(saved_weights[weight_name].to(weight.dtype), weight.cpu())
    ]
    set_peft_model_state_dict(peft_model, saved_weights)
    return changed_weight_names


def make_misfit_error(adapter_folder: Path, base_model: Any, misfit_reason: str) -> UsageError:
    """Return a UsageError with the reason why an adapter does not fit the model ``base_model``."""
    base_name = format_model_name(base_model.config.name_or_path) or type(base_model).__name__
    return UsageError(
        f"adapter {adapter_folder.name} does not fit base {base_name!r}: {misfit_reason}. "
        f"{MISFIT_ADVICE}."
    )


def initialise_adapter(peft_model: Any, adapter_folder: Path) -> None:
    """Initialise the adapter of ``peft_model``, a PeftModel, from the folder ``adapter_folder``.

    Both adapters must have the same base model, but their RoPE scaling may differ.

    Raises:
        UsageError: the base, modules, rank or alpha differ, or the folder has no adapter.
    """
    adapter_config, active_config = (
        read_adapter_config(adapter_folder),
        peft_model.active_peft_config,
    )
    base_model = peft_model.get_base_model()
    require_base_model(
        adapter_folder=adapter_folder,
        base=base_model.name_or_path,
        base_fields=read_base_model_fields(adapter_folder),
        recorded_base_name=adapter_config.base_model_name_or_path,
    )
    adapter_rank_and_alpha, settings_rank_and_alpha = (
        (lora_config.r, lora_config.lora_alpha) for lora_config in (adapter_config, active_config)
    )
    if adapter_rank_and_alpha != settings_rank_and_alpha:
        raise make_misfit_error(
            adapter_folder,
            base_model,
            f"its rank and alpha are {adapter_rank_and_alpha}, and the settings have "
            f"{settings_rank_and_alpha}",
        )
    changed_weight_names = load_weights(peft_model, adapter_folder)
    if changed_weight_names:
        changed_weight_name = changed_weight_names[0].removeprefix("base_model.model.")
        raise make_misfit_error(
            adapter_folder,
            base_model,
            f"{changed_weight_name} differs in the adapter, so that the adapter must be merged "
            "first",
        )
