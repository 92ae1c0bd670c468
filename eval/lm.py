"""The model that lm-evaluation-harness knows as ``cab``; importing this needs lm_eval."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from lm_eval.models.huggingface import HFLM

from cab_hf.config import CabConfig
from cab_hf.eval.harness import refuse_misspelt
from cab_hf.patches import apply_cab
from cab_hf.runs.models import greedy

FIELDS = {field.name for field in dataclasses.fields(CabConfig)}


def taken_by(kind: type) -> set[str]:
    """The names of arguments that a class, or one that it is made of, takes."""
    return {name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters}


class CabLM(HFLM):
    """lm_eval's ``hf`` with CAB switched on: fields of `CabConfig` are arguments like its own.

    How tokens are chosen is for the task to say; where it says nothing, they are the likeliest.
    """

    def __init__(self, pretrained: Any, **arguments: Any) -> None:
        chosen = {name: arguments.pop(name) for name in FIELDS & arguments.keys()}
        refuse_misspelt(arguments, FIELDS | taken_by(HFLM))
        super().__init__(pretrained, **arguments)
        self.model.generation_config = greedy(self.model)
        apply_cab(self.model, **chosen)
