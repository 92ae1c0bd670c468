"""Evaluate a model during training: held-out loss, and retrieval of pass keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cab_hf.data.documents import Document, make_recall_document
from cab_hf.data.needles import NOISE_SENTENCES
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.loss import IGNORED_LABEL
from cab_hf.finetune.objective import Batch, all_reduce_sums, count_labels
from cab_hf.finetune.parallel import Parallel
from cab_hf.finetune.settings import Settings

# seed of pass-key documents. It differs from all seeds of eval/ and of training documents
SEED = "finetune/validation"


class Validation:
    """An evaluation of the held-out loss and of pass-key retrieval, divided among replicas.

    All replicas call the model equally often, because under FSDP every forward pass needs all
    processes. A replica with fewer documents repeats a sequence or uses an additional document.

    Args:
        tokenizer: the tokenizer of the model.
        held_out: sequences that training does not use, dicts of [N] tensors; may be empty.
        settings: the settings of the run.
        accelerator: accelerate's accelerator.
        parallel: the replicas.

    Raises:
        UsageError: one of the lengths is too short for a document with a key.
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
        # built before training, so that a length that is too short raises an error early
        indices = self._own_indices(settings.passkeys)
        try:
            self.documents = {
                length: {
                    index: make_recall_document(
                        tokenizer, NOISE_SENTENCES, length, 1, index=index, seed=SEED
                    )
                    for index in indices
                }
                for length in (settings.evaluated_lengths() if indices else ())
            }
        except ValueError as error:
            raise UsageError(f"passkey_lengths: {error}") from error

    @torch.no_grad()
    def measure(self, objective: nn.Module) -> dict[str, Any]:
        """Evaluate the model in ``objective``, an `Objective`, in eval mode.

        All processes must call this method.

        Returns:
            ``held_out_loss``: the mean loss per label; None without held-out sequences.
            ``passkey``: by length, a str, the share of documents with a correctly predicted key.
        """
        objective.eval()
        try:
            passkey_shares = {
                str(length): self._measure_passkey_accuracy(objective, length)
                for length in self.documents
            }
            held_out_loss = self._compute_held_out_loss(objective) if self.held_out else None
        finally:
            objective.train()
        return {"held_out_loss": held_out_loss, "passkey": passkey_shares}

    def _own_indices(self, num_documents: int) -> range:
        """Return the indices of the documents that this replica evaluates.

        All replicas get the same number of indices. Hence some indices may be
        ``num_documents`` or larger.
        """
        num_replicas = self.parallel.num_replicas
        return range(
            self.parallel.replica_index,
            -(-num_documents // num_replicas) * num_replicas,
            num_replicas,
        )

    def _compute_held_out_loss(self, objective: nn.Module) -> float:
        """Return the mean loss per label of the held-out sequences of all replicas."""
        loss, num_labels = 0.0, 0.0
        for index in self._own_indices(len(self.held_out)):
            batch = self._shard_sequence(self.held_out[index % len(self.held_out)])
            batch_loss = objective(batch).item()
            # an index beyond the end repeats a sequence, whose loss is not added again
            if index < len(self.held_out):
                loss, num_labels = loss + batch_loss, num_labels + count_labels(batch).item()
        loss, num_labels = all_reduce_sums([loss, num_labels], self.accelerator)
        return loss / max(1.0, num_labels)

    def _measure_passkey_accuracy(self, objective: nn.Module, length: int) -> float:
        """Return the share of documents of ``length`` tokens with a correctly predicted key."""
        documents = self.documents[length]
        wrong_token_counts = [0.0] * (len(documents) * self.parallel.num_replicas)
        for index, document in documents.items():
            wrong_token_counts[index] = float(self._num_wrong_tokens(objective, document))
        # the tokens of a key may be in several processes; the key is correct if the sum is 0
        wrong_token_counts = all_reduce_sums(wrong_token_counts, self.accelerator)
        return wrong_token_counts.count(0.0) / len(wrong_token_counts)

    def _num_wrong_tokens(self, objective: nn.Module, document: Document) -> int:
        """Count the wrongly predicted tokens of the repeated key in this process's shard."""
        start, end = document.answers[0]
        tokens = torch.tensor(document.tokens)
        labels = torch.full_like(tokens, IGNORED_LABEL)
        labels[start - 1 : end - 1] = tokens[start:end]
        positions = torch.arange(len(tokens))
        batch = self._shard_sequence(
            {"input_ids": tokens, "position_ids": positions, "labels": labels}
        )
        (labels,) = batch["labels"]
        query_indices = (labels != IGNORED_LABEL).nonzero().squeeze(1)
        predicted_tokens = objective(batch, query_indices)
        return int((predicted_tokens != labels[query_indices]).sum())

    def _shard_sequence(self, sequence: Batch) -> Batch:
        """Return this process's shard of a sequence as a batch of one row, on the run's device.

        ``sequence`` is a dict of [N] tensors.
        """
        batch = {name: tensor[None] for name, tensor in sequence.items()}
        own_shard = self.parallel.shard_batch(batch)
        return {name: tensor.to(self.accelerator.device) for name, tensor in own_shard.items()}
