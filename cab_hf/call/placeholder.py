"""`NotATensor`: what models hand on as an attention mask, and may not compute with; a `Batch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cab_hf.call.forward_pass import SETTINGS_CHANGED, ForwardState, in_backward_pass

# what attention functions receive with a `Batch`
KEYWORDS = (
    *("batch", "cache", "block_table", "read_index", "write_index"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("logits_indices", "logits_processor_args"),
)


class UsedAsTensor(NotImplementedError, AttributeError):
    """A model computes with the mask itself. An AttributeError too, so that `hasattr` is False."""


class _NoShape(tuple[int, ...]):
    """The shape of a placeholder: its number of dimensions is known, its sizes are not."""

    model: str

    def __getitem__(self, index: Any) -> Any:
        raise used_as_tensor(self.model, "a size")

    def __iter__(self) -> Any:
        raise used_as_tensor(self.model, "a size")


class NotATensor:
    """Object in the place of a mask tensor [B, 1, N_q, N_k], which refuses to be computed with.

    Attributes:
        ndim: number of dimensions. Models and transformers distinguish masks that are ready for
            attention, which have 4, from padding masks.
        model: whose mask it is, for the sentence.
    """

    ndim: ClassVar[int] = 4
    model: str

    @property
    def shape(self) -> tuple[int, ...]:
        shape = _NoShape([0] * self.ndim)
        shape.model = self.model
        return shape

    def __getattr__(self, name: str) -> Any:
        raise used_as_tensor(self.model, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        masks = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)]
        # none of them where it is in a list, as for torch.cat
        model = masks[0].model if masks else "this model"
        raise used_as_tensor(model, getattr(function, "__name__", "a function of torch"))

    def contiguous(self) -> NotATensor:
        """Itself: generate() tidies the masks of static caches this way."""
        return self


def used_as_tensor(model: str, what: str) -> UsedAsTensor:
    """The error for a model that reads the attribute ``what`` of its mask."""
    if in_backward_pass():
        return UsedAsTensor(SETTINGS_CHANGED)
    return UsedAsTensor(
        f"{model} computes with its attention mask (reads its {what!r}), for which 'cab' "
        "provides no mask tensor. Load it with attn_implementation='eager'."
    )


def _operator(name: str) -> Callable[..., Any]:
    def refused(self: NotATensor, *_: Any) -> Any:
        raise used_as_tensor(self.model, name)

    return refused


# Python looks these up on the class, not by `__getattr__`
for _name in ("getitem", "setitem", "invert", "neg", "lt", "le", "gt", "ge"):
    setattr(NotATensor, f"__{_name}__", _operator(_name))
for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
    setattr(NotATensor, f"__{_name}__", _operator(_name))
    setattr(NotATensor, f"__r{_name}__", _operator(_name))


@dataclass(eq=False)
class Batch(NotATensor):
    """The mask of all layers in a forward pass of continuous batching: many sequences in a row.

    Attributes:
        model: its name, for error messages.
        tokens: of all sequences, and what pads them.
        prompts: tokens of the prompt of each request, in the order of the batch.
        state: what the layers share.
    """

    model: str
    tokens: int
    prompts: tuple[int, ...] = ()
    state: ForwardState = field(default_factory=ForwardState)

    @property
    def shape(self) -> tuple[int, int]:
        """That of a mask of all tokens, which models read where they have no cache."""
        return 1, self.tokens
