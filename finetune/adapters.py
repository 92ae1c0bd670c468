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

from cab_hf.runs import models as run_models
from cab_hf.runs.settings import UsageError, first_line, refused_as

ADVICE = (
    "give the base (--model, or --base), rank, alpha, targets and norms that it was trained with"
)
WEIGHTS = "adapter_model.safetensors"
# what `save_adapter` records of a model
RECORDED_FIELDS = {
    "sha256": str,
    "rope_parameters": dict,
    "max_position_embeddings": int,
    "cab_config": dict,
}


def read_adapter_config(adapter: Path) -> Any:
    """PEFT's config of an adapter; UsageError where it, its weights or LoRA is missing."""
    from peft import LoraConfig, PeftConfig

    if not all((adapter / name).is_file() for name in (run_models.ADAPTER_CONFIG, WEIGHTS)):
        raise UsageError(
            f"adapter must be a folder with {run_models.ADAPTER_CONFIG} and {WEIGHTS}; got "
            f"{str(adapter)!r}."
        )
    with reading(adapter, run_models.ADAPTER_CONFIG):
        config = PeftConfig.from_pretrained(str(adapter))
        kind = config.peft_type.value
    # its header has the length of the file
    with reading(adapter, WEIGHTS), safe_open(adapter / WEIGHTS, "pt"):
        pass
    if not isinstance(config, LoraConfig):
        raise UsageError(f"adapter {adapter.name} must be LoRA's; got {kind}.")
    config.inference_mode = False
    return config


def reading(adapter: Path, file: str) -> AbstractContextManager[None]:
    """Turn any error inside into a UsageError that names a file of an adapter."""
    return refused_as(
        lambda error: (
            f"{file} of adapter {adapter.name} is truncated, or not what PEFT saves and merges "
            f"({first_sentence(error)}); give the folder as it was saved."
        )
    )


def first_sentence(error: Exception) -> str:
    return first_line(error).partition(". ")[0]


def read_base(adapter: Path) -> dict[str, Any]:
    """What `save_adapter` recorded of the model an adapter was trained in; {} without a record."""
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
    """Refuse a base that an adapter was not trained in, by its content or else by its name.

    ``fields`` are those of `read_base`, ``recorded`` is the name in PEFT's config.
    """
    if fields.get("sha256"):
        wanted, seen = fields["sha256"], run_models.content_sha256(base)
        of, has = f"a model of SHA-256 {wanted[:12]}", f"base {name_of(base)!r} has {seen[:12]}"
    else:
        wanted, seen = name_of(recorded or base), name_of(base)
        of, has = repr(wanted), f"base is {seen!r}"
    if seen != wanted:
        raise UsageError(f"adapter {adapter.name} was trained in {of}, and {has}; {ADVICE}.")


def name_of(model: str) -> str:
    """The name of a model, or of its folder without the path."""
    return Path(model).name if Path(model).exists() else model


def load_weights(adapted: Any, adapter: Path) -> list[str]:
    """Load the weights in the folder ``adapter`` into ``adapted``, a PeftModel.

    Beside an adapter of head or embeddings PEFT saves their own weights, which are loaded as well;
    the names of those that have changed by it are returned.

    Raises:
        UsageError: they are of other modules or shapes, or cannot be read.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    with reading(adapter, WEIGHTS):
        result = load_file(adapter / WEIGHTS)
    complete = get_peft_model_state_dict(adapted, save_embedding_layers=True)
    wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    others = {name: complete[name] for name in result if name in complete and name not in wanted}
    wanted |= others
    # a head tied to trained embeddings may be written once
    written = {wanted[name].data_ptr(): x for name, x in result.items() if name in wanted}
    for name, x in wanted.items():
        if name not in result and x.data_ptr() in written:
            result[name] = written[x.data_ptr()]
    for name in sorted(wanted.keys() | result.keys()):
        ours, theirs = (
            f"of shape {list(x[name].shape)}" if name in x else "missing" for x in (wanted, result)
        )
        if ours != theirs:
            part = name.removeprefix("base_model.model.")
            text = f"{part} is {theirs} in the adapter and {ours} in the base"
            raise misfit(adapter, adapted, text)
    same = {name: torch.equal(result[name].to(x.dtype), x.cpu()) for name, x in others.items()}
    set_peft_model_state_dict(adapted, result)
    return [name for name in same if not same[name]]


def misfit(adapter: Path, base: Any, why: str) -> UsageError:
    """The error of an adapter that does not fit ``base``, a model."""
    name = name_of(base.config.name_or_path) or type(base).__name__
    return UsageError(f"adapter {adapter.name} does not fit base {name!r}: {why}; {ADVICE}.")


def begin_with(adapted: Any, adapter: Path) -> None:
    """Load into ``adapted``, a PeftModel, an adapter that was trained in the same base.

    Positions may be stretched otherwise than they were then.

    Raises:
        UsageError: another base, other modules, rank or alpha, or no adapter.
    """
    config, ours = read_adapter_config(adapter), adapted.active_peft_config
    base = adapted.get_base_model()
    check_base(adapter, base.name_or_path, read_base(adapter), config.base_model_name_or_path)
    theirs, wanted = ((x.r, x.lora_alpha) for x in (config, ours))
    if theirs != wanted:
        raise misfit(adapter, base, f"its rank and alpha are {theirs}, those given {wanted}")
    changed = load_weights(adapted, adapter)
    if changed:
        name = changed[0].removeprefix("base_model.model.")
        raise misfit(adapter, base, f"{name} is another one in the adapter; merge it")
