"""Pack documents into sequences of equal length; no document attends to another one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.loss import IGNORED_LABEL
from cab_hf.finetune.sources import (
    Document,
    DocumentFilter,
    RetrievalDocuments,
    Source,
    State,
    TextDocuments,
    TextSource,
)

HOLD_OUT_INTERVAL = 100  # by default every 100th document of a source is held out
PackedSequence = dict[str, Tensor]  # a packed sequence; see `SequencePacker`


class SequencePacker:
    """An endless iterator over the packed sequences of one process.

    A sequence is a dict of int64 tensors [length]: ``input_ids``; ``position_ids``, which restart
    in each document; and ``labels``, already shifted: the next token, or -100 if the next token
    belongs to another document, is padding or has no label.

    The next document comes from the source with the smallest ratio of packed tokens to requested
    share. A text document that does not fit is cut: its remaining tokens start a later sequence as
    a separate document. The last token before the cut still has the first token after the cut as
    its label. Synthetic documents are never cut: they start the next sequence, and padding fills
    the current sequence if no other document fits.

    Sequence i belongs to process i % ``num_processes``. Every process packs all sequences, but
    builds the tensors of its own sequences only. Hence the order does not depend on
    ``num_processes``.

    Args:
        tokenizer: the tokenizer of the model.
        source_shares: pairs of a source and its requested share of the tokens. Synthetic documents
            insert their keys into text from all text sources, including sources with a share of 0.
        sequence_tokens: tokens per sequence.
        seed: seed of the order of documents, in addition to the seed of each source.
        rank: rank of this process.
        num_processes: number of processes.
        hold_out_every: one of ``hold_out_every`` consecutive documents of a source is reserved for
            `pack_held_out_sequences`; 0 reserves none.
        only_held_out: True to pack the reserved documents instead of all others.
        vocabulary_size: number of tokens in the model's vocabulary; None: no limit.

    Raises:
        UsageError: all sources have a share of 0; or, while reading, a document cannot be used.
    """

    def __init__(
        self,
        tokenizer: Any,
        source_shares: Sequence[tuple[Source, float]],
        sequence_tokens: int,
        seed: int,
        *,
        rank: int = 0,
        num_processes: int = 1,
        hold_out_every: int = HOLD_OUT_INTERVAL,
        only_held_out: bool = False,
        vocabulary_size: int | None = None,
    ) -> None:
        if not any(share for _, share in source_shares):
            raise UsageError(
                "data must contain a source with a share of the tokens above 0, got none. Give a "
                "source without =0."
            )
        self.length, self.rank, self.num_processes = sequence_tokens, rank, num_processes
        self._tokenizer, self._vocabulary_size = tokenizer, vocabulary_size or math.inf
        # any token in the vocabulary can be padding, because padding has no label
        padding_candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self._padding_token = next(
            token
            for token in padding_candidates
            if token is not None and token < self._vocabulary_size
        )
        document_filter = DocumentFilter(hold_out_every, only_held_out)
        text_sources = [source for source, _ in source_shares if isinstance(source, TextSource)]
        self._cursors = []
        for source_index, (source, share) in enumerate(source_shares):
            if not share:
                continue
            # two entries of the same source get different orders
            salt = f"{seed}/{source_index}"
            if isinstance(source, TextSource):
                documents = TextDocuments(
                    source, document_filter=document_filter, salt=salt, tokenizer=tokenizer
                )
            else:
                documents = RetrievalDocuments(
                    source,
                    document_filter=document_filter,
                    salt=salt,
                    tokenizer=tokenizer,
                    sequence_tokens=sequence_tokens,
                    text_sources=text_sources,
                )
            self._cursors.append(SourceCursor(documents, share))
        self._num_packed = 0  # number of sequences that all processes together have packed

    @property
    def epoch(self) -> int:
        """Return the number of complete passes over the text source with the fewest passes."""
        source_epochs = (cursor.documents.epoch for cursor in self._cursors)
        return min((epoch for epoch in source_epochs if epoch is not None), default=0)

    def __iter__(self) -> Iterator[PackedSequence]:
        return self

    def __next__(self) -> PackedSequence:
        self._skip_sequences_of_other_ranks()
        for _ in range(self.rank):
            self._pack_sequence()
        sequence = _concatenate_pieces(self._pack_sequence(), self.length, self._padding_token)
        largest_token = int(sequence["input_ids"].max())
        if largest_token >= self._vocabulary_size:
            raise UsageError(
                f"data must contain tokens below {self._vocabulary_size}, the vocabulary of the "
                "model, "
                f"got token {largest_token} "
                f"({self._tokenizer.convert_ids_to_tokens(largest_token)!r}). Give a "
                "model whose embeddings were resized for its tokenizer, or data without that "
                "token."
            )
        return sequence

    def state_dict(self) -> State:
        """Return the position after the latest round of sequences as a JSON-able dict.

        In a round, each process gets one sequence, so that the position is equal in all processes.
        """
        self._skip_sequences_of_other_ranks()
        return {
            "made": self._num_packed,
            "cursors": [cursor.state_dict() for cursor in self._cursors],
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a result of `state_dict` for the same sources.

        ``num_processes`` must divide the number of sequences that were packed before.
        """
        self._num_packed = state["made"]
        for cursor, cursor_state in zip(self._cursors, state["cursors"], strict=True):
            cursor.load_state_dict(cursor_state)

    def _skip_sequences_of_other_ranks(self) -> None:
        """Pack and drop sequences of other processes until the next one belongs to process 0."""
        while self._num_packed % self.num_processes:
            self._pack_sequence()

    def _pack_sequence(self) -> list[Document]:
        """Return the documents of the next sequence, without padding."""
        pieces, num_free_tokens = [], self.length
        while num_free_tokens:
            cursors_by_deficit = sorted(
                self._cursors, key=lambda cursor: cursor.num_packed_tokens / cursor.share
            )
            cursor = next(
                (cursor for cursor in cursors_by_deficit if cursor.can_fit(num_free_tokens)), None
            )
            if cursor is None:
                break
            pieces.append(cursor.take_piece(num_free_tokens))
            num_free_tokens -= pieces[-1].num_tokens
        self._num_packed += 1
        return pieces


def prefetch_sequences(
    packer: SequencePacker, num_sequences_ahead: int = 2, num_workers: int = 1
) -> Iterator[tuple[PackedSequence, State]]:
    """Yield pairs of a sequence and the state of ``packer`` after it, from a worker process.

    The worker is a process, because a thread would slow down the thread that launches kernels. Only
    one worker is allowed, because several would read a stream of `datasets` in another order. The
    worker starts when the first sequence is requested. Errors in the worker are raised here.

    Args:
        packer: the sequences.
        num_sequences_ahead: number of sequences that the worker packs ahead.
        num_workers: 1; or 0 to pack in this process.
    """
    # DataLoader draws the seed of the worker from this generator, not from the generator of the run
    loader_options: dict[str, Any] = {"batch_size": None, "generator": torch.Generator()}
    if num_workers:
        # fork, because open files cannot be pickled
        loader_options |= {
            "num_workers": 1,
            "prefetch_factor": num_sequences_ahead,
            "multiprocessing_context": "fork",
        }
    for sequence, packer_state in DataLoader(_SequencesWithStates(packer), **loader_options):
        if isinstance(sequence, Exception):
            raise sequence
        yield sequence, packer_state


class _SequencesWithStates(IterableDataset):
    """A dataset of pairs: a sequence of ``packer``, and the state of ``packer`` after it.

    If ``packer`` raises an error, the last pair is (error, None).
    """

    def __init__(self, packer: SequencePacker) -> None:
        self._packer = packer

    def __iter__(self) -> Iterator[tuple[PackedSequence | Exception, State | None]]:
        try:
            for sequence in self._packer:
                yield sequence, self._packer.state_dict()
        except Exception as error:
            yield error, None


class SourceCursor:
    """An iterator over the documents of one source that cuts text documents to a requested size.

    Attributes:
        documents: the documents of the source.
        share: requested share of the packed tokens.
        num_packed_tokens: number of tokens that `take_piece` has returned.
    """

    def __init__(self, documents: TextDocuments | RetrievalDocuments, share: float) -> None:
        self.documents, self.share = documents, share
        self.num_packed_tokens = 0
        self._document: Document | None = None  # the current document; None: read the next
        self._document_state: State = {}  # position of the source before the current document
        self._num_document_tokens = 0  # tokens of the current document that were packed

    def can_fit(self, num_free_tokens: int) -> bool:
        """Return True if `take_piece` can return a piece of at most ``num_free_tokens`` tokens."""
        return (
            not self.documents.is_never_cut
            or self._read_current_document().num_tokens <= num_free_tokens
        )

    def take_piece(self, num_free_tokens: int) -> Document:
        """Return the next piece, with at most ``num_free_tokens`` tokens."""
        document, start_token = self._read_current_document(), self._num_document_tokens
        piece = document.cut(start_token, min(document.num_tokens, start_token + num_free_tokens))
        self.num_packed_tokens += piece.num_tokens
        self._num_document_tokens += piece.num_tokens
        # drop a last token that remains alone: it was already a label, and has no next token
        if document.num_tokens - self._num_document_tokens < 2:
            self._document, self._num_document_tokens = None, 0
        return piece

    def _read_current_document(self) -> Document:
        """Return the current document, after reading the next document if necessary."""
        if self._document is None:
            self._document_state = self.documents.state_dict()
            self._document = next(self.documents)
        return self._document

    def state_dict(self) -> State:
        """Return the position of the next piece as a JSON-able dict."""
        document_state = (
            self.documents.state_dict() if self._document is None else self._document_state
        )
        return {
            "taken": self.num_packed_tokens,
            "begun": document_state,
            "done": self._num_document_tokens,
        }

    def load_state_dict(self, state: State) -> None:
        """Set the position to a result of `state_dict`."""
        self.num_packed_tokens, self._num_document_tokens = state["taken"], state["done"]
        self.documents.load_state_dict(state["begun"])
        self._document = None


def pack_held_out_sequences(
    tokenizer: Any,
    source_shares: Sequence[tuple[Source, float]],
    sequence_tokens: int,
    num_sequences: int,
    seed: int = 0,
    *,
    hold_out_every: int = HOLD_OUT_INTERVAL,
    vocabulary_size: int | None = None,
) -> list[PackedSequence]:
    """Return the first ``num_sequences`` sequences of the documents that `SequencePacker` reserves.

    The list is shorter if there are too few reserved documents.

    Args:
        tokenizer, source_shares, sequence_tokens, seed, vocabulary_size: as in `SequencePacker`.
        num_sequences: largest number of sequences.
        hold_out_every: as in `SequencePacker`; 1 to use all documents, for sources without training
            documents.

    Raises:
        UsageError: as in `SequencePacker`.
    """
    packer = SequencePacker(
        tokenizer=tokenizer,
        source_shares=source_shares,
        sequence_tokens=sequence_tokens,
        seed=seed,
        hold_out_every=hold_out_every,
        only_held_out=True,
        vocabulary_size=vocabulary_size,
    )
    sequences: list[PackedSequence] = []
    while len(sequences) < num_sequences and not packer.epoch:
        sequences.append(next(packer))
    return sequences


def _concatenate_pieces(
    pieces: Sequence[Document], sequence_tokens: int, padding_token: int
) -> PackedSequence:
    """Concatenate documents to tensors [length]; padding is an additional document at the end.

    Args:
        pieces: the documents.
        sequence_tokens: tokens of the sequence.
        padding_token: id of the padding token.
    """
    piece_sizes = [piece.num_tokens for piece in pieces]
    num_padding = sequence_tokens - sum(piece_sizes)
    padding_arrays = (
        np.full(num_padding, padding_token, np.int32),
        np.full(num_padding, IGNORED_LABEL, np.int32),
    )
    tokens, labels = zip(
        *(piece.make_token_arrays() for piece in pieces), padding_arrays, strict=True
    )
    positions = [np.arange(piece_size) for piece_size in (*piece_sizes, num_padding)]
    arrays_by_name = {"input_ids": tokens, "position_ids": positions, "labels": labels}
    joined_arrays = {
        array_name: np.concatenate(arrays) for array_name, arrays in arrays_by_name.items()
    }
    return {
        array_name: torch.from_numpy(joined_array.astype(np.int64))
        for array_name, joined_array in joined_arrays.items()
    }
