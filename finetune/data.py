"""Documents packed into sequences of one length; each document attends to itself alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.loss import IGNORED
from cab_hf.finetune.sources import (
    Document,
    Part,
    RetrievalDocuments,
    Source,
    State,
    TextDocuments,
    TextSource,
)

HOLD_OUT = 100  # one of this number of documents is held out
Item = dict[str, Tensor]


class Packed:
    """An endless iterator over packed sequences: the share of one process.

    A sequence is a dict of int64 tensors [length]: ``input_ids``; ``position_ids``, which restart
    in each document; and ``labels``, already shifted: the next token, or -100 if the next token
    belongs to another document, is padding or has no label.

    The next document comes from the source with the largest deficit to its share of the tokens. The
    rest of a document that does not fit into a sequence continues in a later sequence as a document
    of its own. The last token before the cut still predicts the first token after it. Synthetic
    documents are never cut: they wait for the next sequence, and padding fills this sequence if
    nothing else fits.

    Sequence i belongs to process i % ``world``. Every process packs all sequences but makes tensors
    of its own only, so that the order does not depend on ``world``.

    Args:
        tokenizer: the tokenizer of the model.
        sources: sources with their shares of the tokens. Synthetic documents are hidden in texts of
            all sources, including those with a share of 0.
        length: tokens per sequence.
        seed: seed of the order of documents; sources have their own seeds.
        rank, world: this process, and the number of processes.
        hold_out: one of every ``hold_out`` documents of a source, the first in the order of its
            data, is reserved for `held_out`; 0 reserves none.
        only_held_out: True to pack the reserved documents instead of the others.
        vocabulary: number of tokens in the model's vocabulary; None: no limit.

    Raises:
        UsageError: no source has a share; or, while reading, a document cannot be used.
    """

    def __init__(
        self,
        tokenizer: Any,
        sources: Sequence[tuple[Source, float]],
        length: int,
        seed: int,
        *,
        rank: int = 0,
        world: int = 1,
        hold_out: int = HOLD_OUT,
        only_held_out: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        if not any(share for _, share in sources):
            raise UsageError(
                "data must contain a source with a share of the tokens above 0, got none. Give a "
                "source without =0."
            )
        self.length, self.rank, self.world = length, rank, world
        self._tokenizer, self._vocabulary = tokenizer, vocabulary or math.inf
        # padding has no label
        padding = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self._padding = next(x for x in padding if x is not None and x < self._vocabulary)
        part = Part(hold_out, only_held_out)
        texts = [source for source, _ in sources if isinstance(source, TextSource)]
        self._cursors = []
        for place, (source, share) in enumerate(sources):
            if not share:
                continue
            # an entry named twice is shuffled twice
            salt = f"{seed}/{place}"
            if isinstance(source, TextSource):
                documents = TextDocuments(source, part=part, salt=salt, tokenizer=tokenizer)
            else:
                documents = RetrievalDocuments(
                    source,
                    part=part,
                    salt=salt,
                    tokenizer=tokenizer,
                    length=length,
                    others=texts,
                )
            self._cursors.append(SourceCursor(documents, share))
        self._num_packed = 0  # sequences of all processes

    @property
    def epoch(self) -> int:
        """The number of times that every text source has been read to its end."""
        epochs = (cursor.documents.epoch for cursor in self._cursors)
        return min((epoch for epoch in epochs if epoch is not None), default=0)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        self._finish_round()
        for _ in range(self.rank):
            self._pack()
        item = _as_tensors(self._pack(), self.length, self._padding)
        highest = int(item["input_ids"].max())
        if highest >= self._vocabulary:
            raise UsageError(
                f"data must contain tokens below {self._vocabulary}, the vocabulary of the model, "
                f"got token {highest} ({self._tokenizer.convert_ids_to_tokens(highest)!r}). Give "
                "a model whose embeddings were resized for its tokenizer, or data without that "
                "token."
            )
        return item

    def state_dict(self) -> State:
        """Return the position after the last sequence, JSON-able and equal in all processes."""
        self._finish_round()
        return {"made": self._num_packed, "cursors": [each.state_dict() for each in self._cursors]}

    def load_state_dict(self, state: State) -> None:
        """Resume from a position in the same data; ``world`` must divide the sequences made."""
        self._num_packed = state["made"]
        for cursor, place in zip(self._cursors, state["cursors"], strict=True):
            cursor.load_state_dict(place)

    def _finish_round(self) -> None:
        """Skip the sequences of the other processes after this one's last sequence."""
        while self._num_packed % self.world:
            self._pack()

    def _pack(self) -> list[Document]:
        """Return the pieces of the next sequence."""
        pieces, num_free = [], self.length
        while num_free:
            by_lag = sorted(self._cursors, key=lambda cursor: cursor.taken / cursor.share)
            furthest_behind = next((cursor for cursor in by_lag if cursor.fits(num_free)), None)
            if furthest_behind is None:
                break
            pieces.append(furthest_behind.take(num_free))
            num_free -= pieces[-1].size
        self._num_packed += 1
        return pieces


def prefetched(packed: Packed, depth: int = 2, workers: int = 1) -> Iterator[tuple[Item, State]]:
    """Yield sequences with their end positions; a worker makes them during earlier steps.

    The worker is a process: a thread would compete with the thread that launches kernels, and with
    several workers `datasets` would read a stream in another order. The worker starts with the
    first sequence. Errors of the worker are raised here.

    Args:
        packed: the sequences.
        depth: number of sequences that the worker makes ahead.
        workers: 1, or 0 for no worker.
    """
    # the seed of the worker must not come from the generator of the run
    how: dict[str, Any] = {"batch_size": None, "generator": torch.Generator()}
    if workers:
        # open files cannot be pickled
        how |= {"num_workers": 1, "prefetch_factor": depth, "multiprocessing_context": "fork"}
    for item, place in DataLoader(_WithPlaces(packed), **how):
        if isinstance(item, Exception):
            raise item
        yield item, place


class _WithPlaces(IterableDataset):
    """Sequences with their end positions; an error is the last item."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def __iter__(self) -> Iterator[tuple[Item | Exception, State | None]]:
        try:
            for item in self._packed:
                yield item, self._packed.state_dict()
        except Exception as error:
            yield error, None


class SourceCursor:
    """The documents of a source as they are packed, piece by piece; ``taken`` tokens so far."""

    def __init__(self, documents: TextDocuments | RetrievalDocuments, share: float) -> None:
        self.documents, self.share = documents, share
        self.taken = self._done = 0  # tokens of all documents, and of the current one
        self._begun: State = {}  # position of the current document
        self._document: Document | None = None

    def fits(self, room: int) -> bool:
        """Return True if the next piece fits into ``room`` tokens; text documents may be cut."""
        return not self.documents.never_cut or self._next().size <= room

    def take(self, room: int) -> Document:
        """Return the next piece, with at most ``room`` tokens."""
        document = self._next()
        piece = document.piece(self._done, min(document.size, self._done + room))
        self.taken, self._done = self.taken + piece.size, self._done + piece.size
        # a last single token is dropped: it is already a label, and has no next token to predict
        if document.size - self._done < 2:
            self._document, self._done = None, 0
        return piece

    def _next(self) -> Document:
        if self._document is None:
            self._begun = self.documents.state_dict()
            self._document = next(self.documents)
        return self._document

    def state_dict(self) -> State:
        begun = self.documents.state_dict() if self._document is None else self._begun
        return {"taken": self.taken, "begun": begun, "done": self._done}

    def load_state_dict(self, state: State) -> None:
        self.taken, self._done = state["taken"], state["done"]
        self.documents.load_state_dict(state["begun"])
        self._document = None


def held_out(
    tokenizer: Any,
    sources: Sequence[tuple[Source, float]],
    length: int,
    count: int,
    seed: int = 0,
    *,
    hold_out: int = HOLD_OUT,
    vocabulary: int | None = None,
) -> list[Item]:
    """Return ``count`` fixed sequences of the documents that `Packed` reserves.

    Returns fewer if the reserved documents are too few. ``hold_out`` is 1 for sources that training
    does not read. Other arguments and errors are those of `Packed`.
    """
    how = {"hold_out": hold_out, "only_held_out": True, "vocabulary": vocabulary}
    packed = Packed(tokenizer, sources, length, seed, **how)
    sequences: list[Item] = []
    while len(sequences) < count and not packed.epoch:
        sequences.append(next(packed))
    return sequences


def _as_tensors(pieces: Sequence[Document], length: int, padding: int) -> Item:
    """Concatenate pieces, with padding as one more document."""
    sizes = [piece.size for piece in pieces]
    left = length - sum(sizes)
    end = np.full(left, padding, np.int32), np.full(left, IGNORED, np.int32)
    tokens, labels = zip(*(piece.make() for piece in pieces), end, strict=True)
    positions = [np.arange(size) for size in (*sizes, left)]
    columns = {"input_ids": tokens, "position_ids": positions, "labels": labels}
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return {name: torch.from_numpy(each.astype(np.int64)) for name, each in joined.items()}
