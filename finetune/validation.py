"""Validation of a run: the loss of held-out texts, and keys found in long documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cab_hf.data.documents import Document, recall_document
from cab_hf.data.needles import NOISE
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.loss import IGNORED
from cab_hf.finetune.objective import Batch, labelled, one_sum
from cab_hf.finetune.parallel import Parallel
from cab_hf.finetune.settings import Settings

# no evaluation and no training document has this seed
SEED = "finetune/validation"


class Validation:
    """The fixed questions of every evaluation, divided among the replicas.

    All replicas compute equally often, because a sharded model must be called by all processes at
    once. The last round is filled up with further documents.

    Args:
        held_out: sequences that are excluded from training, [N] tensors each.
        settings: the number of keys, and the lengths of their documents.

    Raises:
        UsageError: a document of one of the lengths is too short for a key.
    """

    def __init__(
        self,
        tokenizer: Any,
        held_out: Sequence[Batch],
        settings: Settings,
        accelerator: Any,
        parallel: Parallel,
    ) -> None:
        self.accelerator, self.parallel, self.held_out = accelerator, parallel, held_out
        # made before training, so that documents that are too short raise an error now
        mine = self._mine(settings.passkeys)
        try:
            self.documents = {
                length: {x: recall_document(tokenizer, NOISE, length, 1, x, SEED) for x in mine}
                for length in (settings.evaluated_lengths() if mine else ())
            }
        except ValueError as error:
            raise UsageError(f"passkey_lengths: {error}") from error

    @torch.no_grad()
    def measure(self, objective: nn.Module) -> dict[str, Any]:
        """Return ``held_out_loss`` per token, and ``passkey``, the share of keys per length."""
        objective.eval()
        try:
            result = {str(length): self._passkey(objective, length) for length in self.documents}
            loss = self._loss(objective) if self.held_out else None
        finally:
            objective.train()
        return {"held_out_loss": loss, "passkey": result}

    def _mine(self, count: int) -> range:
        """Return this process's numbers of ``count`` questions, equally many on each replica."""
        replicas = self.parallel.replicas
        return range(self.parallel.replica, -(-count // replicas) * replicas, replicas)

    def _loss(self, objective: nn.Module) -> float:
        loss, tokens = 0.0, 0.0
        for index in self._mine(len(self.held_out)):
            batch = self._sharded(self.held_out[index % len(self.held_out)])
            part = objective(batch).item()
            # repeated documents are not counted
            if index < len(self.held_out):
                loss, tokens = loss + part, tokens + labelled(batch).item()
        loss, tokens = one_sum([loss, tokens], self.accelerator)
        return loss / max(1.0, tokens)

    def _passkey(self, objective: nn.Module, length: int) -> float:
        documents = self.documents[length]
        missed = [0.0] * (len(documents) * self.parallel.replicas)
        for index, document in documents.items():
            missed[index] = float(self._missed(objective, document))
        # tokens of one key may be on several ranks
        missed = one_sum(missed, self.accelerator)
        return missed.count(0.0) / len(missed)

    def _missed(self, objective: nn.Module, document: Document) -> int:
        """Count the wrongly predicted tokens of the repeated key in this process's part."""
        start, end = document.answers[0]
        tokens = torch.tensor(document.tokens)
        labels = torch.full_like(tokens, IGNORED)
        labels[start - 1 : end - 1] = tokens[start:end]
        positions = torch.arange(len(tokens))
        batch = self._sharded({"input_ids": tokens, "position_ids": positions, "labels": labels})
        (expected,) = batch["labels"]
        places = (expected != IGNORED).nonzero().squeeze(1)
        return int((objective(batch, places) != expected[places]).sum())

    def _sharded(self, sequence: Batch) -> Batch:
        """Return this process's part of a sequence, [N] tensors, on its device."""
        mine = self.parallel.sharded({name: each[None] for name, each in sequence.items()})
        return {name: each.to(self.accelerator.device) for name, each in mine.items()}
