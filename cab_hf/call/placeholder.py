"""`MaskPlaceholder` and `PagedBatch`: objects that models pass on in place of a mask tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cab_hf.call.forward_state import SETTINGS_CHANGED, ForwardState, in_backward_pass

# arguments that attention functions receive together with a `PagedBatch`
KEYWORDS = (
    *("batch", "cache", "block_table", "read_index", "write_index"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("logits_indices", "logits_processor_args"),
)


class UsedAsTensor(NotImplementedError, AttributeError):
    """Error for a model that computes with its mask; an AttributeError, so `hasattr` is False."""


class _NoShape(tuple[int, ...]):
    """Shape of a placeholder, with a number of dimensions but without sizes."""

    model: str

    def __getitem__(self, index: Any) -> Any:
        raise used_as_tensor(self.model, "a size")

    def __iter__(self) -> Any:
        raise used_as_tensor(self.model, "a size")


class MaskPlaceholder:
    """An object in place of a mask tensor [B, 1, N_q, N_k]; computing with it raises an error.

    Attributes:
        ndim: number of dimensions. Models and transformers distinguish attention masks, which have
            4 dimensions, from padding masks.
        model: name of the model, for error messages.
    """

    ndim: ClassVar[int] = 4
    model: str

    @property
    def shape(self) -> tuple[int, ...]:
        shape = _NoShape([0] * self.ndim)
        shape.model = self.model
        return shape

    def __getattr__(self, name: str) -> Any:
        if name == "__setstate__":
            # copy and pickle look this up before they set the fields
            raise AttributeError(name)
        raise used_as_tensor(self.model, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        masks = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)]
        # a mask inside a list, as for torch.cat, is not found
        model = masks[0].model if masks else "this model"
        raise used_as_tensor(model, getattr(function, "__name__", "a function of torch"))

    def contiguous(self) -> MaskPlaceholder:
        """Return self, for generate(), which calls this method on the masks of static caches."""
        return self


def used_as_tensor(model: str, what: str) -> UsedAsTensor:
    """Return the error for a model that reads the attribute ``what`` of its mask."""
    if in_backward_pass():
        return UsedAsTensor(SETTINGS_CHANGED)
    return UsedAsTensor(
        f"{model} computes with its attention mask (reads its {what!r}), for which 'cab' "
        "provides no mask tensor. Load it with attn_implementation='eager'."
    )


def _operator(name: str) -> Callable[..., Any]:
    def refused(self: MaskPlaceholder, *_: Any) -> Any:
        raise used_as_tensor(self.model, name)

    return refused


# Python looks up operators on the class and does not call `__getattr__`
for _name in ("getitem", "setitem", "invert", "neg", "lt", "le", "gt", "ge"):
    setattr(MaskPlaceholder, f"__{_name}__", _operator(_name))
for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
    setattr(MaskPlaceholder, f"__{_name}__", _operator(_name))
    setattr(MaskPlaceholder, f"__r{_name}__", _operator(_name))


@dataclass(frozen=True, eq=False)
class PagedBatch(MaskPlaceholder):
    """The mask of all layers in a forward pass of continuous batching: sequences packed in one row.

    Attributes:
        model: name of the model, for error messages.
        tokens: number of tokens of all sequences, including padding.
        prompts: prompt length of each request in tokens, in batch order.
        state: state that the layers share.
    """

    model: str
    tokens: int
    prompts: tuple[int, ...] = ()
    state: ForwardState = field(default_factory=ForwardState)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (1, tokens), the shape of a padding mask, which models without a cache read."""
        return 1, self.tokens
