"""What a run is watched by: the loss of texts it never learns, and keys in long documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cab_hf.documents import NOISE, Document, recall_document
from cab_hf.finetune.objective import Batch, labelled, one_sum
from cab_hf.runs.settings import Refused

# no evaluation and no training document is made from it
SEED = "finetune/validation"


class Validation:
    """The same questions at every evaluation, dealt out to the processes.

    All processes ask equally often, for a model that is spread over them is called by all at once:
    what is left over at the end of a round is asked of more documents.

    Args:
        held_out: sequences that training never sees, [N] tensors each.
        keys: documents looked at for every one of ``lengths``.

    Raises:
        Refused: a document of one of the lengths has no room for a key.
    """

    def __init__(
        self,
        tokenizer: Any,
        held_out: Sequence[Batch],
        lengths: Sequence[int],
        keys: int,
        accelerator: Any,
    ) -> None:
        self.accelerator = accelerator
        self.held_out = held_out
        # made now: what has no room is refused before anything is learnt
        self.documents = {
            length: [_document(tokenizer, length, index) for index in self._mine(keys)]
            for length in (lengths if keys else ())
        }

    @torch.no_grad()
    def measure(self, objective: nn.Module) -> dict[str, Any]:
        """``held_out_loss``, a token's, and ``passkey``, the share of keys found by length."""
        objective.eval()
        try:
            found = {str(length): self._passkey(objective, length) for length in self.documents}
            loss = self._loss(objective) if self.held_out else None
        finally:
            objective.train()
        return {"held_out_loss": loss, "passkey": found}

    def _mine(self, count: int) -> range:
        """Which of ``count`` questions, made a multiple of the processes, this one asks."""
        processes = self.accelerator.num_processes
        return range(self.accelerator.process_index, -(-count // processes) * processes, processes)

    def _loss(self, objective: nn.Module) -> float:
        device, loss, tokens = self.accelerator.device, 0.0, 0.0
        for index in self._mine(len(self.held_out)):
            sequence = self.held_out[index % len(self.held_out)]
            batch = {name: each[None].to(device) for name, each in sequence.items()}
            part = objective(batch).item()
            # one that is asked again only keeps the others company
            if index < len(self.held_out):
                loss, tokens = loss + part, tokens + labelled(batch).item()
        loss, tokens = one_sum([loss, tokens], self.accelerator)
        return loss / max(1.0, tokens)

    def _passkey(self, objective: nn.Module, length: int) -> float:
        documents = self.documents[length]
        found = sum(self._found(objective, document) for document in documents)
        found, count = one_sum([float(found), float(len(documents))], self.accelerator)
        return found / count

    def _found(self, objective: nn.Module, document: Document) -> bool:
        """Whether a key that the document's second half repeats is foreseen there, all of it."""
        start, end = document.answers[0]
        ids = torch.tensor([document.tokens], device=self.accelerator.device)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        before = torch.arange(start - 1, end - 1, device=ids.device)
        foreseen = objective({"input_ids": ids, "position_ids": positions}, before)
        return foreseen.tolist() == list(document.tokens[start:end])


def _document(tokenizer: Any, length: int, index: int) -> Document:
    try:
        return recall_document(tokenizer, NOISE, length, 1, index, SEED)
    except ValueError as error:
        raise Refused(f"passkey_lengths: {error}") from error
