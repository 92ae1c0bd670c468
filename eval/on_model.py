"""What experiments on a model share: how they are told which one, and that it is opened late."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from cab_hf.eval.experiment import Experiment
from cab_hf.eval.models import load_model
from cab_hf.runs.settings import by_device, fill_by_device, option


@dataclass(frozen=True)
class OnModelSettings:
    """The model, and where it runs. None stands for a default that depends on the device."""

    model: str = option("smollm2", "name or path of a causal LM; smollm2 needs no hub")
    set: tuple[str, ...] = option(
        (), "field=value of CabConfig, e.g. mass=0.8; repeatable", repeatable=True
    )
    seed: int = option(0, "of all that is drawn: prompts, documents, keys", int)
    device: str | None = option(None, "torch device (default: cuda where there is one)")
    dtype: str | None = by_device("bfloat16", "float32", "torch dtype")

    def __post_init__(self) -> None:
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        object.__setattr__(self, "device", device)
        fill_by_device(self, self.on_cpu)

    @property
    def on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"


class OnModel(Experiment):
    """Base of experiments whose settings are `OnModelSettings`."""

    @cached_property
    def model_and_tokenizer(self) -> tuple[Any, Any]:
        settings = self.settings
        return load_model(settings.model, settings.device, settings.dtype)

    def recorded(self) -> dict[str, Any]:
        told, model = super().recorded(), self.settings.model
        return {**told, "model": Path(model).name if Path(model).exists() else model}
