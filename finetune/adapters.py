"""Adapters in folders that PEFT writes: read, checked against their base, and loaded."""

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
from cab_hf.experiment.settings import UsageError, first_line, refused_as

ADVICE = "Use the base (--model, or --base), rank, alpha, targets and norms of its training"
WEIGHTS = "adapter_model.safetensors"
# fields of a model that `save_adapter` records
RECORDED_FIELDS = {
    "sha256": str,
    "rope_parameters": dict,
    "max_position_embeddings": int,
    "cab_config": dict,
}


def read_adapter_config(adapter: Path) -> Any:
    """Return PEFT's config of an adapter; UsageError if it, its weights or LoRA is missing."""
    from peft import LoraConfig, PeftConfig

    if not all((adapter / name).is_file() for name in (run_models.ADAPTER_CONFIG, WEIGHTS)):
        raise UsageError(
            f"adapter must be a folder with {run_models.ADAPTER_CONFIG} and {WEIGHTS}, got "
            f"{str(adapter)!r}. Give the folder that finetune/lora.py or PEFT saved."
        )
    with reading(adapter, run_models.ADAPTER_CONFIG):
        config = PeftConfig.from_pretrained(str(adapter))
        kind = config.peft_type.value
    # the header contains the length of the file
    with reading(adapter, WEIGHTS), safe_open(adapter / WEIGHTS, "pt"):
        pass
    if not isinstance(config, LoraConfig):
        raise UsageError(
            f"adapter must be a LoRA adapter, got {adapter.name}, which is {kind}. Give another "
            "folder."
        )
    config.inference_mode = False
    return config


def reading(adapter: Path, file: str) -> AbstractContextManager[None]:
    """Turn any error inside the block into a UsageError that names a file of an adapter."""
    return refused_as(
        lambda error: (
            f"{file} of adapter {adapter.name} must be a file as PEFT saves it, got another one "
            f"({first_sentence(error)}). Give the folder as it was saved."
        )
    )


def first_sentence(error: Exception) -> str:
    return first_line(error).partition(". ")[0]


def read_base(adapter: Path) -> dict[str, Any]:
    """Return the record of `save_adapter` about the base of an adapter; {} without a record."""
    file = adapter / run_models.BASE
    if not file.is_file():
        return {}
    with reading(adapter, run_models.BASE):
        text = json.loads(file.read_text("utf-8"))
        for name, kind in RECORDED_FIELDS.items():
            if not isinstance(text.get(name), kind | None):
                raise ValueError(f"{name} is {text[name]!r}")
    return text


def check_base(adapter: Path, base: str, fields: Mapping[str, Any], recorded: str | None) -> None:
    """Raise an error for a base in which an adapter was not trained.

    Bases are compared by content if it is recorded, else by name. ``fields`` is the result of
    `read_base`, ``recorded`` is the name in PEFT's config.
    """
    if fields.get("sha256"):
        expected_base, actual_base = fields["sha256"], run_models.content_sha256(base)
        of, has = (
            f"a model with SHA-256 {expected_base[:12]}",
            f"base {name_of(base)!r} has {actual_base[:12]}",
        )
    else:
        expected_base, actual_base = name_of(recorded or base), name_of(base)
        of, has = repr(expected_base), f"base is {actual_base!r}"
    if actual_base != expected_base:
        raise UsageError(f"adapter {adapter.name} was trained in {of}, and {has}. {ADVICE}.")


def name_of(model: str) -> str:
    """Return the name of a model, or of its folder without the path."""
    return Path(model).name if Path(model).exists() else model


def load_weights(adapted: Any, adapter: Path) -> list[str]:
    """Load the weights in the folder ``adapter`` into ``adapted``, a PeftModel.

    PEFT saves an adapter of the head or the embeddings with the weights of these layers, which are
    loaded too. Returns the names of such weights that changed.

    Raises:
        UsageError: the weights belong to other modules or shapes, or cannot be read.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    with reading(adapter, WEIGHTS):
        result = load_file(adapter / WEIGHTS)
    complete = get_peft_model_state_dict(adapted, save_embedding_layers=True)
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    others = {name: complete[name] for name in result if name in complete and name not in expected}
    expected |= others
    # a head tied to trained embeddings may be stored once
    written = {expected[name].data_ptr(): x for name, x in result.items() if name in expected}
    for name, x in expected.items():
        if name not in result and x.data_ptr() in written:
            result[name] = written[x.data_ptr()]
    for name in sorted(expected.keys() | result.keys()):
        ours, theirs = (
            f"of shape {list(x[name].shape)}" if name in x else "missing"
            for x in (expected, result)
        )
        if ours != theirs:
            part = name.removeprefix("base_model.model.")
            text = f"{part} is {theirs} in the adapter and {ours} in the base"
            raise misfit(adapter, adapted, text)
    same = {name: torch.equal(result[name].to(x.dtype), x.cpu()) for name, x in others.items()}
    set_peft_model_state_dict(adapted, result)
    return [name for name in same if not same[name]]


def misfit(adapter: Path, base: Any, why: str) -> UsageError:
    """Return the error for an adapter that does not fit ``base``, a model."""
    name = name_of(base.config.name_or_path) or type(base).__name__
    return UsageError(f"adapter {adapter.name} does not fit base {name!r}: {why}. {ADVICE}.")


def begin_with(adapted: Any, adapter: Path) -> None:
    """Load an adapter that was trained in the same base into ``adapted``, a PeftModel.

    Its positions may have been stretched differently.

    Raises:
        UsageError: the base, modules, rank or alpha differ, or there is no adapter.
    """
    config, ours = read_adapter_config(adapter), adapted.active_peft_config
    base = adapted.get_base_model()
    check_base(adapter, base.name_or_path, read_base(adapter), config.base_model_name_or_path)
    theirs, wanted = ((x.r, x.lora_alpha) for x in (config, ours))
    if theirs != wanted:
        raise misfit(
            adapter, base, f"its rank and alpha are {theirs}, and the settings have {wanted}"
        )
    changed = load_weights(adapted, adapter)
    if changed:
        name = changed[0].removeprefix("base_model.model.")
        raise misfit(
            adapter,
            base,
            f"{name} differs in the adapter, so that the adapter must be merged first",
        )
