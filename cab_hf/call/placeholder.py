"""`MaskPlaceholder` and `PagedBatch`: objects that layers receive in place of a mask tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cab_hf.call.forward_state import SETTINGS_CHANGED_ERROR, ForwardState, is_in_backward_pass

# keyword arguments that attention functions receive together with a `PagedBatch`
PAGING_KEYWORDS = (
    "batch",
    "block_table",
    "cache",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "logits_indices",
    "logits_processor_args",
    "max_length_k",
    "max_length_q",
    "read_index",
    "write_index",
)


class MaskUsedAsTensorError(NotImplementedError, AttributeError):
    """Error for a model that computes with its mask.

    The class is also an AttributeError, so that `hasattr` returns False.
    """


class _ShapeWithoutSizes(tuple[int, ...]):
    """The shape of a placeholder, which has a number of dimensions; reading a size fails.

    Attributes:
        model_name: name of the model, for error messages.
    """

    model_name: str

    def __getitem__(self, index: Any) -> Any:
        raise used_as_tensor_error(self.model_name, "a size")

    def __iter__(self) -> Any:
        raise used_as_tensor_error(self.model_name, "a size")


class MaskPlaceholder:
    """An object that replaces a mask tensor [B, 1, N_q, N_k].

    A model that computes with the object raises an error.

    Attributes:
        ndim: number of dimensions. By this number, models and transformers distinguish attention
            masks, which have 4 dimensions, from padding masks, which have 2.
        model_name: name of the model, for error messages.
    """

    ndim: ClassVar[int] = 4
    model_name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with ``ndim`` entries. ``len`` works, and reading an entry raises an error."""
        shape = _ShapeWithoutSizes([0] * self.ndim)
        shape.model_name = self.model_name
        return shape

    def __getattr__(self, name: str) -> Any:
        if name == "__setstate__":
            # copy and pickle look up this method before ``model_name`` is set, which the error
            # reads
            raise AttributeError(name)
        raise used_as_tensor_error(self.model_name, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        masks = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)]
        # empty if the mask is inside a list, for example in torch.cat
        model_name = masks[0].model_name if masks else "this model"
        raise used_as_tensor_error(model_name, getattr(function, "__name__", "a function of torch"))

    def contiguous(self) -> MaskPlaceholder:
        """Return self; `generate` calls this method on the masks of static caches."""
        return self


def used_as_tensor_error(model_name: str, feature: str) -> MaskUsedAsTensorError:
    """Return the error for a model that computes with its mask.

    Args:
        model_name: name of the model.
        feature: attribute, operator or function that the model uses.
    """
    if is_in_backward_pass():
        return MaskUsedAsTensorError(SETTINGS_CHANGED_ERROR)
    return MaskUsedAsTensorError(
        f"{model_name} computes with its attention mask (reads its {feature!r}), for which 'cab' "
        "provides no mask tensor. Load it with attn_implementation='eager'."
    )


def _make_failing_operator(operator_name: str) -> Callable[..., Any]:
    """Return a method that raises `MaskUsedAsTensorError` for the operator ``operator_name``."""

    def fail(self: MaskPlaceholder, *_: Any) -> Any:
        raise used_as_tensor_error(self.model_name, operator_name)

    return fail


# Python looks up operators on the class and does not call `__getattr__`
for _operator_name in ("getitem", "setitem", "invert", "neg", "lt", "le", "gt", "ge"):
    setattr(MaskPlaceholder, f"__{_operator_name}__", _make_failing_operator(_operator_name))
for _operator_name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
    setattr(MaskPlaceholder, f"__{_operator_name}__", _make_failing_operator(_operator_name))
    setattr(MaskPlaceholder, f"__r{_operator_name}__", _make_failing_operator(_operator_name))


@dataclass(frozen=True, eq=False)
class PagedBatch(MaskPlaceholder):
    """The mask of a forward pass of continuous batching, which packs all sequences into one row.

    Attributes:
        model_name: name of the model, for error messages.
        num_tokens: number of tokens of all sequences, including padding.
        prompt_lengths: prompt length of each request in tokens, in the order of the row.
        forward_state: caches that the layers share.
    """

    model_name: str
    num_tokens: int
    prompt_lengths: tuple[int, ...] = ()
    forward_state: ForwardState = field(default_factory=ForwardState)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (1, num_tokens) of a padding mask, which models read in calls without a cache."""
        return 1, self.num_tokens
