"""`Batch`: the mask of all layers in a forward pass of continuous batching."""

from __future__ import annotations

from dataclasses import dataclass, field

from cab_hf.call.forward_pass import ForwardState
from cab_hf.call.placeholder import NotATensor

# what attention functions receive with a batch
KEYWORDS = (
    *("batch", "cache", "block_table", "read_index", "write_index"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("logits_indices", "logits_processor_args"),
)


@dataclass(eq=False)
class Batch(NotATensor):
    """Many sequences in a row, each of which is attended by itself.

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
