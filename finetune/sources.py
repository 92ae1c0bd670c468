"""Sources of documents: endless iterators over shuffled epochs, with resumable positions.

A ``state_dict`` is JSON-able and contains the position of the next document. A resumed run reads
documents again that were read ahead but not trained on.
"""

from __future__ import annotations

import copy
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cab_hf.data.needles import NOISE_SENTENCES, find_leading_special_tokens, split_sentences
from cab_hf.experiment.cache import file_sha256
from cab_hf.experiment.settings import UsageError, convert_errors, first_line
from cab_hf.finetune.loss import IGNORED_LABEL
from cab_hf.finetune.pypi_docs import MANUALS_SOURCE, get_manuals_file
from cab_hf.finetune.retrieval import (
    is_retrieval_source,
    make_retrieval_document,
    parse_retrieval_source,
)
from cab_hf.finetune.settings import format_suggestion

State = dict[str, Any]
# by file suffix: name of a constructor of `datasets.Dataset`, and arguments for the constructor.
# utf-8-sig removes a byte order mark
FILE_READER_BY_SUFFIX = {
    ".txt": ("from_text", {"sample_by": "document", "encoding": "utf-8-sig"}),
    ".jsonl": ("from_json", {}),
    ".json": ("from_json", {}),
    ".parquet": ("from_parquet", {}),
}
# number of consecutive texts of a stream that are shuffled among each other. A stream cannot be
# shuffled as a whole
STREAM_BLOCK_TEXTS = 256
# an upper bound on characters per token, with which the required filler text is estimated
CHARACTERS_PER_TOKEN = 6
# number of characters at the start of a text that are tokenized to check for two tokens
NUM_CHECKED_CHARACTERS = 256
# tokenizer arguments that return the tokens of a text without special tokens
TOKENIZER_OPTIONS = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
# splits text without sentence ends, such as tables, into pieces of up to 601 characters after white
# space, and ends pieces before white space if possible. Passkeys are inserted between pieces
PIECE_PATTERN = re.compile(r"\s*\S.{0,600}(?!\S)|\s*\S.{0,600}", re.DOTALL)
# tokens and labels of a document, int32 [num_tokens] each
TokenArrays = tuple[np.ndarray, np.ndarray]


class Document(NamedTuple):
    """A document, or a piece of a document, whose tokens are computed lazily.

    Attributes:
        num_tokens: number of tokens.
        make_token_arrays: function that returns tokens, int32 [num_tokens], and labels of the same
            shape: the token that each token predicts, already shifted, or `IGNORED_LABEL`.
    """

    num_tokens: int
    make_token_arrays: Callable[[], TokenArrays]

    def cut(self, start_token: int, end_token: int) -> Document:
        """Return the tokens from ``start_token`` to ``end_token``, exclusive, as a document."""
        return Document(
            end_token - start_token,
            lambda: tuple(
                token_array[start_token:end_token] for token_array in self.make_token_arrays()
            ),
        )


class DocumentFilter(NamedTuple):
    """A predicate that selects either the held-out documents of a source or all other documents.

    Attributes:
        hold_out_every: one of ``hold_out_every`` consecutive documents is held out; 0: none.
        selects_held_out: True to select the held-out documents, False to select all others.
        first_held_out: index of the first held-out document in the order of the data.
    """

    hold_out_every: int
    selects_held_out: bool = False
    first_held_out: int = 0

    def selects(self, document_index: Any) -> Any:
        """Return True if the filter selects the document; for an array of indices, an array."""
        is_held_out = (
            document_index % self.hold_out_every == self.first_held_out
            if self.hold_out_every
            else document_index < 0
        )
        return is_held_out == self.selects_held_out


@dataclass(frozen=True)
class TextSource:
    """A source of text documents that the package `datasets` reads."""

    name: str
    dataset: Any  # datasets.Dataset or datasets.IterableDataset
    text_field: str  # field of a row that contains the text
    seed: int = 0  # seed of the order of documents
    is_shuffled: bool = True
    # SHA-256 of each file by path; for a data set on the hub, the hash of its commit by name
    file_hashes: dict[Path, str] = field(default_factory=dict)
    sha256: str | None = None  # SHA-256 of all files, or the hash of the commit

    @property
    def num_documents(self) -> int | None:
        """Return the number of documents; None for a stream."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None


@dataclass(frozen=True)
class RetrievalSource:
    """A source of synthetic documents: keys in text of other sources. Only answers have labels."""

    name: str
    # elements of `retrieval.DOCUMENT_KINDS`; documents cycle through the tuple
    kinds: tuple[str, ...]
    length: int | None  # tokens of a document; None: the length of a sequence
    seed: int = 0  # seed of the keys and their positions

    num_documents = sha256 = None
    file_hashes: ClassVar[dict[Path, str]] = {}


Source = TextSource | RetrievalSource


def make_source(
    name: str,
    *,
    text_field: str = "text",
    split: str = "train",
    streaming: bool = False,
    seed: int = 0,
) -> Source:
    """Open a source of documents.

    A name has one of these forms:

    * ``FILE.txt``, which is one document;
    * ``FILE.jsonl``, ``FILE.json`` or ``FILE.parquet``, with one document per row;
    * a folder of such files with the same suffix;
    * ``manuals``, the documents of `cab_hf.finetune.pypi_docs`;
    * ``retrieval:passkey+multi:8192``: synthetic documents of these kinds
      (`retrieval.DOCUMENT_KINDS`) with this number of tokens;
    * ``NAME`` or ``NAME:CONFIG``: a data set on the hub.

    Args:
        name: the name of the source.
        text_field: field of a row that contains the text; ignored for text files and manuals.
        split: split of a data set on the hub.
        streaming: True to read the data during training instead of downloading and indexing it
            first. Documents are then shuffled in blocks of 256.
        seed: seed of the order of documents, or of synthetic documents.

    Raises:
        UsageError: the source does not exist, cannot be read, or has no documents or no field
            ``text_field``.
    """
    if is_retrieval_source(name):
        document_kinds, document_tokens = parse_retrieval_source(name)
        return RetrievalSource(name=name, kinds=document_kinds, length=document_tokens, seed=seed)
    paths = [get_manuals_file()] if name == MANUALS_SOURCE else _find_local_files(name)
    if name == MANUALS_SOURCE or (paths and paths[0].suffix == ".txt"):
        text_field = "text"
    with _convert_read_errors(name, paths, text_field):
        hash_by_file = {path: file_sha256(path) for path in paths}
        if paths:
            dataset = _open_files(hash_by_file, streaming)
        else:
            dataset, hash_by_file[Path(name)] = _open_hub_dataset(name, split, streaming)
        field_names = dataset and (dataset.column_names or list(next(iter(dataset), {})))
    if not field_names or (not streaming and not len(dataset)):
        raise UsageError(
            f"source {name!r} must contain documents, got none. Give a source with text in it."
        )
    if text_field not in field_names:
        suggestion = format_suggestion(text_field, field_names)
        raise UsageError(f"source {name!r} has no field {text_field!r}; {suggestion}")
    return TextSource(
        # results and checkpoints contain the name of a file without its folder
        name=Path(name).name if paths else name,
        dataset=dataset.select_columns([text_field]),
        text_field=text_field,
        seed=seed,
        file_hashes=hash_by_file,
        sha256=_combine_hashes(list(hash_by_file.values())),
    )


def _combine_hashes(hashes: Sequence[str]) -> str:
    """Return the hash if there is one, else the SHA-256 of the concatenation of all hashes."""
    return hashes[0] if len(hashes) == 1 else sha256("".join(hashes).encode()).hexdigest()


def is_local_source(source_name: str) -> bool:
    """Return True if `make_source` can open ``source_name`` without a network.

    Raises:
        UsageError: ``source_name`` is the path of a missing file or folder.
    """
    return is_retrieval_source(source_name) or (
        source_name != MANUALS_SOURCE and bool(_find_local_files(source_name))
    )


def refuse_overlap(
    training_source_shares: Sequence[tuple[Source, float]],
    validation_source_shares: Sequence[tuple[Source, float]],
) -> None:
    """Raise a UsageError if a training file and a validation file have the same content.

    ``training_source_shares`` and ``validation_source_shares`` are pairs (source, share). Sources
    with a share of 0 are not checked, because they contribute no documents.
    """
    training_sources, validation_sources = (
        [source for source, share in source_shares if share]
        for source_shares in (training_source_shares, validation_source_shares)
    )
    source_by_hash = {
        file_hash: source.name
        for source in training_sources
        for file_hash in source.file_hashes.values()
    }
    for source in validation_sources:
        for file, file_hash in source.file_hashes.items():
            if file_hash in source_by_hash:
                raise UsageError(
                    f"validation must contain other documents than data, got {source.name!r} and "
                    f"{source_by_hash[file_hash]!r}, which both have the content of {file.name}. "
                    "Give other documents, or leave validation out to hold out documents of data."
                )


def _find_local_files(source_name: str) -> list[Path]:
    """Return the files of a source that is a local file or folder.

    Returns [] if ``source_name`` looks like the name of a data set on the hub.

    Raises:
        UsageError: ``source_name`` looks like a path that does not exist, or the files have unknown
            or different suffixes.
    """
    source_path, suffixes_text = (
        Path(os.path.expanduser(source_name)),
        ", ".join(FILE_READER_BY_SUFFIX),
    )
    if not source_path.is_file() and not source_path.is_dir():
        has_path_form = (
            source_path.suffix in FILE_READER_BY_SUFFIX
            or source_path.is_absolute()
            or source_name.startswith((".", "~"))
        )
        # refuse FOLDER:CONFIG: `_open_hub_dataset` passes the part before ":" to the package
        # `datasets`, which would read the local folder instead of a data set on the hub
        if has_path_form or Path(source_name.split(":")[0]).is_dir():
            raise _make_missing_path_error(source_name)
        return []
    local_files = [source_path]
    if source_path.is_dir():
        readable_files = (
            file
            for file in source_path.rglob("*")
            if file.suffix in FILE_READER_BY_SUFFIX and not file.is_dir()
        )
        # hidden files are often backups of editors
        local_files = sorted(
            file
            for file in readable_files
            if "/." not in f"/{file.relative_to(source_path).as_posix()}"
        )
    found_suffixes = sorted({file.suffix for file in local_files})
    if len(found_suffixes) != 1 or found_suffixes[0] not in FILE_READER_BY_SUFFIX:
        raise UsageError(
            f"source {source_name!r} must be a file of {suffixes_text}, or a folder of files of "
            f"one of these kinds, got {' and '.join(found_suffixes) or 'no'} files."
        )
    return local_files


def _make_missing_path_error(name: str) -> UsageError:
    """Return the error for a source name that is neither a path nor a data set on the hub."""
    return UsageError(
        f"source must be an existing file or folder, got {name!r}. Give the path of a file or "
        "folder."
    )


def _open_hub_dataset(name: str, split: str, streaming: bool) -> tuple[Any, str | None]:
    """Return the data set ``name`` of the hub, and the hash of its commit or None if unknown."""
    from datasets import load_dataset, load_dataset_builder
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    dataset_name, _, config_name = name.partition(":")
    if dataset_name in _PACKAGED_DATASETS_MODULES:
        # for a name such as "json", datasets would read all JSON files in the working directory
        raise _make_missing_path_error(name)
    commit_hash = load_dataset_builder(dataset_name, config_name or None).hash
    return load_dataset(
        dataset_name, config_name or None, split=split, streaming=streaming
    ), commit_hash


def _open_files(hash_by_file: dict[Path, str], streaming: bool, **dataset_options: Any) -> Any:
    """Open files of the same suffix with `datasets`; return None if all files are empty.

    Args:
        hash_by_file: path and SHA-256 of each file. The SHA-256 is part of the key of the cache of
            datasets.
        streaming: True to return an IterableDataset instead of a Dataset.
        dataset_options: further arguments of the reader.

    Raises:
        ValueError: a file is compressed.
    """
    from datasets import Dataset
    from datasets.data_files import DataFilesDict, DataFilesList
    from datasets.utils.extract import Extractor

    reader_name, reader_options = FILE_READER_BY_SUFFIX[next(iter(hash_by_file)).suffix]
    # datasets fails for empty files without rows; an empty text file is a document that is skipped
    nonempty_files = {
        os.path.abspath(file): (file_hash,)
        for file, file_hash in hash_by_file.items()
        if file.stat().st_size or (reader_name == "from_text" and len(hash_by_file) > 1)
    }
    for file in nonempty_files:
        # the cache of datasets does not notice a change of a compressed file
        if reader_name != "from_parquet" and Extractor.infer_extractor_format(file):
            raise ValueError(f"{Path(file).name} is compressed")
    if not nonempty_files:
        return None
    # lists of paths and hashes, because datasets would expand a str as a pattern, and use the time
    # stamp of the file as the key of its cache
    data_files = DataFilesDict(
        train=DataFilesList(list(nonempty_files), list(nonempty_files.values()))
    )
    # unlike load_dataset, the methods of Dataset do not report their use to a server
    return getattr(Dataset, reader_name)(
        data_files, split="train", streaming=streaming, **reader_options, **dataset_options
    )


def _convert_read_errors(
    source_name: str, files: Sequence[Path], text_field: str
) -> AbstractContextManager[None]:
    """Return a context manager that converts errors inside its block to a UsageError.

    The message names the source ``source_name``. If the source has several ``files``, the message
    also names the first file that cannot be read or has no field ``text_field``.
    """

    def format_message(reported_error: Exception) -> str:
        file_prefix, row_features = "", None
        for file in files if len(files) > 1 else ():
            try:
                dataset = _open_files({file: ""}, True, features=row_features)
                if any(text_field not in row for row in dataset or ()):
                    raise ValueError(f"it has no field {text_field!r}")
            except Exception as file_error:
                file_prefix, reported_error = f"{file.name}: ", file_error
                break
            row_features = row_features or (dataset and dataset.features)
        # errors of datasets often have the original error as their cause
        reported_error = reported_error.__cause__ or reported_error
        error_text = (
            reported_error.details()
            if hasattr(reported_error, "details")
            else first_line(reported_error)
        )
        return (
            f"source {source_name!r} cannot be read ({file_prefix}{error_text}). Give readable "
            "files or another "
            "data set."
        )

    return convert_errors(format_message)


def find_first_held_out(source: TextSource, tokenizer: Any, hold_out_every: int) -> int:
    """Return the index of the first held-out document, from 0 to ``hold_out_every - 1``.

    Every ``hold_out_every``-th document from this index on is held out. The index is such that the
    first document with two tokens or more is held out; hence not all held-out documents are empty.
    The index is 0 if no document has two tokens.
    """
    # a stream is copied, because reading it changes its position
    dataset_rows = (
        source.dataset if source.num_documents is not None else copy.deepcopy(source.dataset)
    )
    with _convert_read_errors(source.name, [*source.file_hashes], source.text_field):
        for document_index, row in enumerate(dataset_rows):
            text = row.get(source.text_field)
            text_start = text.strip()[:NUM_CHECKED_CHARACTERS] if isinstance(text, str) else ""
            if text_start and len(tokenizer(text_start, **TOKENIZER_OPTIONS)["input_ids"]) >= 2:
                return document_index % hold_out_every
    return 0


class TextIterator:
    """An endless iterator over the texts of a source, in a new random order each epoch.

    All rows of a data set are shuffled. A stream is shuffled within blocks of `STREAM_BLOCK_TEXTS`
    texts, because a run that resumes would lose the shuffle buffer of datasets.

    Args:
        source: the source.
        document_filter: selects the held-out documents, or all others.
        salt: seed of the order, in addition to the seed of the source.
        tokenizer: the tokenizer of the model, which `find_first_held_out` uses; None: the first
            held-out document is ``document_filter.first_held_out``.

    Raises:
        UsageError: ``document_filter`` has no documents of the source.
    """

    def __init__(
        self, source: TextSource, document_filter: DocumentFilter, salt: str, tokenizer: Any = None
    ) -> None:
        if document_filter.hold_out_every and tokenizer is not None:
            document_filter = document_filter._replace(
                first_held_out=find_first_held_out(
                    source, tokenizer, document_filter.hold_out_every
                )
            )
        self._source, self._document_filter = source, document_filter
        self._seed = f"finetune/{salt}/{source.seed}"
        self._first_position: State = {"epoch": 0, "row": 0, "block": 0}
        if source.num_documents is None:
            # copied, because each reader of the same source needs its own position
            self._dataset = copy.deepcopy(source.dataset)
            self._first_position["dataset"] = copy.deepcopy(self._dataset.state_dict())
        elif not document_filter.selects(np.arange(source.num_documents)).any():
            raise self._make_no_documents_error()
        self.load_state_dict({"begun": self._first_position, "taken": 0})

    @property
    def epoch(self) -> int:
        """Return the number of complete passes over the texts."""
        return self._next_position["epoch"]

    def __next__(self) -> str:
        if self._num_taken_texts == len(self._texts):
            self._block_position, self._num_taken_texts = self._next_position, 0
            self._texts = self._read_texts()
        self._num_taken_texts += 1
        return self._texts[self._num_taken_texts - 1]

    def iterate_at_most_two_epochs(self) -> Iterator[str]:
        """Yield texts to the end of the next epoch, so that each text is yielded at least once."""
        first_epoch = self.epoch
        while self.epoch <= first_epoch + 1:
            yield TextIterator.__next__(self)

    def state_dict(self) -> State:
        """Return the position of the next text as a JSON-able dict.

        The position is the start of the current block, and the number of texts read from the block.
        """
        return {"begun": self._block_position, "taken": self._num_taken_texts}

    def load_state_dict(self, state: State) -> None:
        """Set the position to a result of `state_dict`."""
        self._block_position, self._num_taken_texts = state["begun"], state["taken"]
        self._set_next_position(self._block_position)
        self._texts = self._read_texts() if self._num_taken_texts else []

    def _set_next_position(self, position: State) -> None:
        """Make ``position`` the position from which `_read_block` reads the next block."""
        self._next_position, source = position, self._source
        if source.num_documents is None:
            self._dataset.load_state_dict(copy.deepcopy(position["dataset"]))
            self._rows = enumerate(self._dataset, position["row"])
            return
        document_order = np.flatnonzero(
            self._document_filter.selects(np.arange(source.num_documents))
        )
        if source.is_shuffled:
            order_seed = random.Random(f"{self._seed}/{position['epoch']}").getrandbits(32)
            # RandomState returns the same numbers in every version of numpy
            document_order = np.random.RandomState(order_seed).permutation(document_order)
        document_indices = document_order[position["row"] :].tolist()
        self._rows = (
            (document_index, source.dataset[document_index]) for document_index in document_indices
        )

    def _read_texts(self) -> list[str]:
        """Return the texts of the next block, which may be the first block of the next epoch."""
        with _convert_read_errors(
            self._source.name, [*self._source.file_hashes], self._source.text_field
        ):
            texts = self._read_block()
            if not texts and self._next_position["block"]:
                self._set_next_position({**self._first_position, "epoch": self.epoch + 1})
                texts = self._read_block()
        if not texts:
            raise self._make_no_documents_error()
        return texts

    def _read_block(self) -> list[str]:
        """Read the next block, and advance the position; return [] at the end of an epoch.

        A block is one text of a data set, or up to `STREAM_BLOCK_TEXTS` texts of a stream.
        """
        texts: list[str] = []
        position, is_stream = dict(self._next_position), self._source.num_documents is None
        for row_number, row in self._rows:
            position["row"] += 1
            if self._document_filter.selects(row_number):
                texts.append(self._check_text(row.get(self._source.text_field), row_number))
            if len(texts) == (STREAM_BLOCK_TEXTS if is_stream else 1):
                break
        if texts and is_stream:
            # the position is not stored for an empty block: if no row was read after
            # load_state_dict, the state of a stream of datasets would be that of the first row
            position["dataset"] = copy.deepcopy(self._dataset.state_dict())
            if self._source.is_shuffled:
                block_seed = f"{self._seed}/{position['epoch']}/{position['block']}"
                random.Random(block_seed).shuffle(texts)
        position["block"] += bool(texts)
        self._next_position = position
        return texts

    def _check_text(self, text: Any, document_index: int) -> str:
        """Return ``text``, or "" for None and blank text.

        Raises:
            UsageError: ``text`` is neither a string nor None.
        """
        if not isinstance(text, str | None):
            raise UsageError(
                f"field {self._source.text_field!r} of source {self._source.name!r} must contain "
                f"strings, got {text!r} in document {document_index}."
            )
        return text if text and text.strip() else ""

    def _make_no_documents_error(self) -> UsageError:
        """Return the error for a source of which ``document_filter`` selects no document."""
        document_phrase = (
            "held-out documents" if self._document_filter.selects_held_out else "documents"
        )
        hold_out_phrase = (
            f"one in {self._document_filter.hold_out_every}"
            if self._document_filter.hold_out_every
            else "none"
        )
        return UsageError(
            f"source {self._source.name!r} has no {document_phrase} if {hold_out_phrase} is "
            "held out. Give it more documents, or hold out those of another source."
        )


class TextDocuments(TextIterator):
    """An endless iterator over the tokenized texts of a source, as `Document` objects.

    A document has the leading special tokens of the tokenizer, the text, and the end-of-text token.
    Texts with fewer than two tokens are skipped. Arguments are those of `TextIterator`.
    """

    is_never_cut = False  # a document may continue in the next sequence

    def __init__(
        self, source: TextSource, document_filter: DocumentFilter, salt: str, tokenizer: Any
    ) -> None:
        super().__init__(source, document_filter, salt, tokenizer)
        self._tokenizer, end_of_text_token = tokenizer, tokenizer.eos_token_id
        self._leading_tokens, self._trailing_tokens = (
            find_leading_special_tokens(tokenizer),
            () if end_of_text_token is None else (end_of_text_token,),
        )

    def __next__(self) -> Document:
        for text in self.iterate_at_most_two_epochs():
            text_tokens = self._tokenizer(text, **TOKENIZER_OPTIONS)["input_ids"]
            if len(text_tokens) >= 2:
                tokens = np.asarray(
                    (*self._leading_tokens, *text_tokens, *self._trailing_tokens), dtype=np.int32
                )
                token_arrays = tokens, np.append(tokens[1:], np.int32(IGNORED_LABEL))
                return Document(len(tokens), lambda token_arrays=token_arrays: token_arrays)
        document_phrase, remedy_phrase = "documents", "or leave the source out"
        if self._document_filter.selects_held_out and self._document_filter.hold_out_every > 1:
            document_phrase, remedy_phrase = (
                "held-out documents",
                "or use --held-out 0 or --validation",
            )
        elif self._document_filter.hold_out_every > 1:
            document_phrase = "documents that are not held out,"
            remedy_phrase = "use --held-out 0 or --validation, or leave the source out"
        raise UsageError(
            f"source {self._source.name!r} must contain {document_phrase} of two tokens or more, "
            f"got only shorter ones. Give longer documents, {remedy_phrase}."
        )


class RetrievalDocuments:
    """An endless iterator over synthetic documents, which cycles through the kinds of a source.

    Args:
        source: the kinds and the length of documents.
        document_filter: held-out documents, or all others; both have different seeds.
        salt: seed of the documents, in addition to the seed of the source.
        tokenizer: the tokenizer of the model.
        sequence_tokens: tokens of a sequence, and of a document if ``source.length`` is None.
        text_sources: sources of the filler text, used in turn; without sources the filler text
            consists of the sentences in `NOISE_SENTENCES`.

    Raises:
        UsageError: a document is longer than a sequence, or too short for its keys.
    """

    epoch = None  # there are always new synthetic documents
    is_never_cut = True  # because a question in a later piece would be separated from its key

    def __init__(
        self,
        source: RetrievalSource,
        document_filter: DocumentFilter,
        salt: str,
        tokenizer: Any,
        sequence_tokens: int,
        text_sources: Sequence[TextSource],
    ) -> None:
        self._source, self._tokenizer, self._document_index = source, tokenizer, 0
        self._length = source.length or sequence_tokens
        if self._length > sequence_tokens:
            raise UsageError(
                f"source {source.name!r} must have documents of at most {sequence_tokens} tokens, "
                "the "
                f"length of a sequence, got {self._length}. Give it a smaller length."
            )
        self._seed = f"{salt}/{source.seed}/{document_filter.selects_held_out}"
        salt = f"{salt}/{source.name}"
        self._filler_texts = [
            TextIterator(text_source, document_filter, salt, tokenizer)
            for text_source in text_sources
        ]
        # raise errors for a length that is too small before training starts
        for document_index in range(len(source.kinds)):
            self.make_token_arrays(document_index, ())

    def __next__(self) -> Document:
        document_index, excerpts = self._document_index, self._draw_excerpts()
        self._document_index += 1
        return Document(self._length, lambda: self.make_token_arrays(document_index, excerpts))

    def make_token_arrays(self, document_index: int, excerpts: Sequence[str]) -> TokenArrays:
        """Return tokens and labels of document ``document_index``.

        ``excerpts`` are the filler text; without excerpts, its sentences are those in
        `NOISE_SENTENCES`.

        Raises:
            UsageError: the document is too short for its keys.
        """
        document_kinds = self._source.kinds
        try:
            document = make_retrieval_document(
                kind=document_kinds[document_index % len(document_kinds)],
                tokenizer=self._tokenizer,
                sentences=list(_split_excerpts(excerpts)) or NOISE_SENTENCES,
                length=self._length,
                index=document_index,
                seed=self._seed,
            )
        except ValueError as error:
            # the check in the constructor is not sufficient, because keys of later documents may
            # have more tokens
            raise UsageError(f"source {self._source.name!r}: {error}") from None
        tokens = np.asarray(document.tokens, dtype=np.int32)
        labels = np.full_like(tokens, IGNORED_LABEL)
        for answer_start, answer_end in document.answers:
            # labels are shifted: token i predicts token i + 1
            labels[answer_start - 1 : answer_end - 1] = tokens[answer_start:answer_end]
        return tokens, labels

    def _draw_excerpts(self) -> list[str]:
        """Return filler texts that together are long enough for the next document.

        If a text is too long, a random range of characters is cut out.
        """
        if not self._filler_texts:
            return []
        kind_cycle_index = self._document_index // len(self._source.kinds)
        rng = random.Random(f"finetune/{self._seed}/text/{self._document_index}")
        num_missing_characters, excerpts = self._length * CHARACTERS_PER_TOKEN, []
        for text in self._filler_texts[
            kind_cycle_index % len(self._filler_texts)
        ].iterate_at_most_two_epochs():
            excerpt_start = rng.randrange(max(1, len(text) - num_missing_characters))
            excerpt = text[excerpt_start : excerpt_start + num_missing_characters]
            if excerpt.strip():
                excerpts.append(excerpt)
                num_missing_characters -= len(excerpt)
            if num_missing_characters <= 0:
                break
        return excerpts

    def state_dict(self) -> State:
        """Return the JSON-able position of the next document."""
        return {
            "index": self._document_index,
            "texts": [text_iterator.state_dict() for text_iterator in self._filler_texts],
        }

    def load_state_dict(self, state: State) -> None:
        """Set the position to a result of `state_dict`."""
        self._document_index = state["index"]
        for text_iterator, text_position in zip(self._filler_texts, state["texts"], strict=True):
            text_iterator.load_state_dict(text_position)


def _split_excerpts(excerpts: Sequence[str]) -> Iterator[str]:
    """Yield the sentences of ``excerpts``; divide long sentences into pieces (`PIECE_PATTERN`)."""
    for sentence in chain.from_iterable(map(split_sentences, excerpts)):
        yield from (piece.strip(" ") for piece in PIECE_PATTERN.findall(sentence))
