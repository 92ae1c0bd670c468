"""The model ``cab`` of lm-evaluation-harness; importing this module needs lm_eval."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.models import huggingface
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.dispatch import attended
from cab_hf.eval.harness import refuse_misspelt, what_was_attended
from cab_hf.eval.on_model import refuse_not_finite
from cab_hf.experiment.models import greedy
from cab_hf.patches import apply_cab

FIELDS = {field.name for field in dataclasses.fields(CabConfig)}


def taken_by(kind: type) -> set[str]:
    """Return the names of arguments of a class and its bases."""
    return {name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters}


class CabLM(HFLM):
    """lm_eval's ``hf`` with CAB switched on; fields of `CabConfig` are additional arguments.

    The task determines how tokens are sampled; by default decoding is greedy. For requests of
    likelihoods the end of each request is passed on, see `_loglikelihood_tokens`.
    """

    # a batch that lm_eval has padded on the right, and its mask
    padded: tuple[Tensor, Tensor] | None = None

    def __init__(self, pretrained: Any, **arguments: Any) -> None:
        chosen = {name: arguments.pop(name) for name in FIELDS & arguments.keys()}
        refuse_misspelt(arguments, FIELDS | taken_by(HFLM))
        super().__init__(pretrained, **arguments)
        self.model.generation_config = greedy(self.model)
        apply_cab(self.model, **chosen)

    def _loglikelihood_tokens(self, *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """Compute likelihoods as `HFLM`, and pass on the length of each request.

        `HFLM` pads requests on the right without a mask. Dense causal kernels do not need the
        lengths, but CAB selects keys by the end of a sequence.
        """
        pad = huggingface.pad_and_concat

        def pad_and_concat(longest: int, rows: Sequence[Tensor], **kwargs: Any) -> Tensor:
            # the rows are padded in place
            lengths = torch.tensor([row.shape[-1] for row in rows])
            batch = pad(longest, rows, **kwargs)
            self.padded = batch, torch.arange(longest) < lengths[:, None]
            return batch

        huggingface.pad_and_concat = pad_and_concat
        try:
            return super()._loglikelihood_tokens(*args, **kwargs)
        finally:
            huggingface.pad_and_concat = pad

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        batch, real = self.padded or (None, None)
        if batch is not inps:
            return super()._model_call(inps, *args, **kwargs)

        def with_mask(model: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return args, {"attention_mask": real.to(inps.device, torch.long), **kwargs}

        hook = self.model.register_forward_pre_hook(with_mask, with_kwargs=True)
        try:
            return super()._model_call(inps, *args, **kwargs)
        finally:
            hook.remove()


@functools.cache
def watch(kind: type[HFLM]) -> None:
    """Make models of ``kind`` report `what_was_attended` with their scores if they attend by "cab".

    Models whose outputs are not finite raise an error. lm_eval asks a model for its info after all
    requests, and before it shows or saves scores.
    """
    init, tell, detect = kind.__init__, kind.get_model_info, kind._detect_batch_size

    @functools.wraps(init)
    def __init__(self: HFLM, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        refuse_not_finite(self.model)

    @functools.wraps(tell)
    def get_model_info(self: HFLM) -> dict[str, Any]:
        # replies cached by --use_cache call no model
        result = what_was_attended(self.model) if getattr(self, "cab_was_asked", False) else {}
        return {**tell(self), **result}

    @functools.wraps(detect)
    def _detect_batch_size(self: HFLM, *args: Any, **kwargs: Any) -> int:
        # trial calls are no requests
        modules = list(self.model.modules())
        before, asked = [attended.get(m) for m in modules], getattr(self, "cab_was_asked", False)
        size = detect(self, *args, **kwargs)
        for module, pairs in zip(modules, before, strict=True):
            attended.pop(module, None)
            if pairs is not None:
                attended[module] = pairs
        self.cab_was_asked = asked
        return size

    def asking(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(self: HFLM, *args: Any, **kwargs: Any) -> Any:
            self.cab_was_asked = True
            return method(self, *args, **kwargs)

        return wrapped

    requests = asking(kind._model_call), asking(kind._model_generate)
    for function in (__init__, get_model_info, _detect_batch_size, *requests):
        setattr(kind, function.__name__, function)
