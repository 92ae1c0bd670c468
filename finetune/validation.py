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
from cab_hf.finetune.parallel import ContextParallelism
from cab_hf.finetune.settings import Settings

# seed of pass-key documents. It differs from all seeds of eval/ and of training documents
PASSKEY_SEED = "finetune/validation"


class Validation:
    """An evaluation of the held-out loss and of pass-key retrieval, divided among replicas.

    All replicas call the model equally often, because under FSDP every forward pass needs all
    processes. A replica with fewer documents repeats a sequence or uses an additional document.

    Args:
        tokenizer: the tokenizer of the model.
        held_out_sequences: sequences that training does not use, dicts of [N] tensors; may be
            empty.
        settings: the settings of the run.
        accelerator: accelerate's accelerator.
        parallelism: the replicas.

    Raises:
        UsageError: one of the lengths is too short for a document with a key.
    """

    def __init__(
        self,
        tokenizer: Any,
        held_out_sequences: Sequence[Batch],
        settings: Settings,
        accelerator: Any,
        parallelism: ContextParallelism,
    ) -> None:
        self.accelerator, self.parallelism, self.held_out_sequences = (
            accelerator,
            parallelism,
            held_out_sequences,
        )
        # built before training, so that a length that is too short raises an error early
        document_indices = self._get_replica_indices(settings.passkeys)
        try:
            self.documents = {
                length: {
                    document_index: make_recall_document(
                        tokenizer,
                        NOISE_SENTENCES,
                        length,
                        1,
                        index=document_index,
                        seed=PASSKEY_SEED,
                    )
                    for document_index in document_indices
                }
                for length in (settings.get_passkey_lengths() if document_indices else ())
            }
        except ValueError as error:
            raise UsageError(f"passkey_lengths: {error}") from error

    @torch.no_grad()
    def evaluate(self, objective: nn.Module) -> dict[str, Any]:
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
            held_out_loss = (
                self._compute_held_out_loss(objective) if self.held_out_sequences else None
            )
        finally:
            objective.train()
        return {"held_out_loss": held_out_loss, "passkey": passkey_shares}

    def _get_replica_indices(self, num_documents: int) -> range:
        """Return the indices of the documents or sequences that this replica evaluates.

        All replicas get the same number of indices. Hence some indices may be ``num_documents`` or
        larger.
        """
        num_replicas = self.parallelism.num_replicas
        return range(
            self.parallelism.replica_index,
            -(-num_documents // num_replicas) * num_replicas,
            num_replicas,
        )

    def _compute_held_out_loss(self, objective: nn.Module) -> float:
        """Return the mean loss per label of the held-out sequences of all replicas."""
        total_loss, num_labels = 0.0, 0.0
        for sequence_index in self._get_replica_indices(len(self.held_out_sequences)):
            batch = self._shard_sequence(
                self.held_out_sequences[sequence_index % len(self.held_out_sequences)]
            )
            batch_loss = objective(batch).item()
            # an index beyond the end repeats a sequence, whose loss is not added again
            if sequence_index < len(self.held_out_sequences):
                total_loss, num_labels = (
                    total_loss + batch_loss,
                    num_labels + count_labels(batch).item(),
                )
        total_loss, num_labels = all_reduce_sums([total_loss, num_labels], self.accelerator)
        return total_loss / max(1.0, num_labels)

    def _measure_passkey_accuracy(self, objective: nn.Module, length: int) -> float:
        """Return the share of documents of ``length`` tokens with a correctly predicted key."""
        documents = self.documents[length]
        wrong_token_counts = [0.0] * (len(documents) * self.parallelism.num_replicas)
        for document_index, document in documents.items():
            wrong_token_counts[document_index] = float(
                self._count_wrong_tokens(objective, document)
            )
        # the tokens of a key may be in several processes; the key is correct if the sum is 0
        wrong_token_counts = all_reduce_sums(wrong_token_counts, self.accelerator)
        return wrong_token_counts.count(0.0) / len(wrong_token_counts)

    def _count_wrong_tokens(self, objective: nn.Module, document: Document) -> int:
        """Count the wrongly predicted tokens of the repeated key in this process's shard."""
        key_start, key_end = document.answers[0]
        tokens = torch.tensor(document.tokens)
        labels = torch.full_like(tokens, IGNORED_LABEL)
        labels[key_start - 1 : key_end - 1] = tokens[key_start:key_end]
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
        batch = {tensor_name: tensor[None] for tensor_name, tensor in sequence.items()}
        own_shard = self.parallelism.shard_batch(batch)
        return {
            tensor_name: tensor.to(self.accelerator.device)
            for tensor_name, tensor in own_shard.items()
        }
