"""The model ``cab`` for lm-evaluation-harness; importing this module needs the package lm_eval."""

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
from cab_hf.dispatch import attended_pairs
from cab_hf.eval.harness import refuse_misspelt_arguments, report_attention
from cab_hf.eval.on_model import refuse_non_finite_logits
from cab_hf.experiment.models import make_greedy_config
from cab_hf.patches import apply_cab

CAB_FIELD_NAMES = {field.name for field in dataclasses.fields(CabConfig)}


def list_constructor_arguments(model_class: type) -> set[str]:
    """Return the names of the constructor arguments of a class and its bases."""
    return {
        name for base in model_class.__mro__ for name in inspect.signature(base.__init__).parameters
    }


class CabLM(HFLM):
    """The model ``hf`` of lm_eval with CAB switched on.

    The constructor also accepts fields of `CabConfig`. Decoding is greedy unless the task sets
    another way of sampling. Calls for likelihoods get a padding mask, see `_loglikelihood_tokens`.

    Attributes:
        padded_batch: (token ids [B, N], padding mask, bool [B, N]) of the latest batch that lm_eval
            padded on the right; None before the first batch.
    """

    padded_batch: tuple[Tensor, Tensor] | None = None

    def __init__(self, pretrained: Any, **arguments: Any) -> None:
        cab_fields = {name: arguments.pop(name) for name in CAB_FIELD_NAMES & arguments.keys()}
        refuse_misspelt_arguments(arguments, CAB_FIELD_NAMES | list_constructor_arguments(HFLM))
        super().__init__(pretrained, **arguments)
        self.model.generation_config = make_greedy_config(self.model)
        apply_cab(self.model, **cab_fields)

    def _loglikelihood_tokens(self, *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """Compute likelihoods as `HFLM` does, but with a padding mask.

        `HFLM` pads requests on the right without a mask. Dense causal attention ignores such
        padding, but CAB selects keys by the end of a sequence.
        """
        original_pad_and_concat = huggingface.pad_and_concat

        def pad_and_concat(longest: int, rows: Sequence[Tensor], **kwargs: Any) -> Tensor:
            # compute the lengths first, because the padding function changes the list of rows
            lengths = torch.tensor([row.shape[-1] for row in rows])
            batch = original_pad_and_concat(longest, rows, **kwargs)
            self.padded_batch = batch, torch.arange(longest) < lengths[:, None]
            return batch

        huggingface.pad_and_concat = pad_and_concat
        try:
            return super()._loglikelihood_tokens(*args, **kwargs)
        finally:
            huggingface.pad_and_concat = original_pad_and_concat

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        batch, padding_mask = self.padded_batch or (None, None)
        if batch is not inps:
            return super()._model_call(inps, *args, **kwargs)

        def add_mask(model: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return args, {"attention_mask": padding_mask.to(inps.device, torch.long), **kwargs}

        hook = self.model.register_forward_pre_hook(add_mask, with_kwargs=True)
        try:
            return super()._model_call(inps, *args, **kwargs)
        finally:
            hook.remove()


@functools.cache
def patch_model_class(model_class: type[HFLM]) -> None:
    """Patch a model class of lm_eval so that results include density and config of CAB.

    ``get_model_info`` then also returns the fields of `report_attention`. lm_eval calls it after
    all requests, before it prints or saves scores. Calls of a model also raise an error if a logit
    is not finite.
    """
    original_init, original_model_info, original_detect_batch_size = (
        model_class.__init__,
        model_class.get_model_info,
        model_class._detect_batch_size,
    )

    @functools.wraps(original_init)
    def __init__(self: HFLM, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        refuse_non_finite_logits(self.model)

    @functools.wraps(original_model_info)
    def get_model_info(self: HFLM) -> dict[str, Any]:
        # if --use_cache has all replies, the model is never called and has no density
        was_called = getattr(self, "cab_was_asked", False)
        cab_fields = report_attention(self.model) if was_called else {}
        return {**original_model_info(self), **cab_fields}

    @functools.wraps(original_detect_batch_size)
    def _detect_batch_size(self: HFLM, *args: Any, **kwargs: Any) -> int:
        # restore the counts of attended pairs afterwards: calls that try batch sizes do not count
        modules = list(self.model.modules())
        pair_counts = [attended_pairs.get(module) for module in modules]
        was_called = getattr(self, "cab_was_asked", False)
        batch_size = original_detect_batch_size(self, *args, **kwargs)
        for module, pair_count in zip(modules, pair_counts, strict=True):
            attended_pairs.pop(module, None)
            if pair_count is not None:
                attended_pairs[module] = pair_count
        self.cab_was_asked = was_called
        return batch_size

    def record_calls(method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``method`` so that it also records that the model was called."""

        @functools.wraps(method)
        def recording_method(self: HFLM, *args: Any, **kwargs: Any) -> Any:
            self.cab_was_asked = True
            return method(self, *args, **kwargs)

        return recording_method

    request_methods = (
        record_calls(model_class._model_call),
        record_calls(model_class._model_generate),
    )
    for function in (__init__, get_model_info, _detect_batch_size, *request_methods):
        setattr(model_class, function.__name__, function)
