"""Sources of documents, read epoch after epoch without end, each with a resumable position.

A ``state_dict`` is JSON: the position of the next document. Documents that were read ahead are read
again.
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

from cab_hf.data.needles import NOISE, leading_tokens, split_sentences
from cab_hf.experiment.cache import file_sha256
from cab_hf.experiment.settings import UsageError, first_line, refused_as
from cab_hf.finetune.loss import IGNORED
from cab_hf.finetune.pypi_docs import MANUALS, manuals_file
from cab_hf.finetune.retrieval import is_entry, parse_entry, retrieval_document
from cab_hf.finetune.settings import suggestion

State = dict[str, Any]
# reader of `datasets` by file suffix; a byte order mark is no text
KINDS = {
    ".txt": ("from_text", {"sample_by": "document", "encoding": "utf-8-sig"}),
    ".jsonl": ("from_json", {}),
    ".json": ("from_json", {}),
    ".parquet": ("from_parquet", {}),
}
# number of texts that are shuffled together, because a stream cannot be shuffled as a whole
BLOCK_STREAMED = 256
# an upper bound: sentences around keys repeat only if a source has no more of them
CHARACTERS_A_TOKEN = 6
# characters at the start of a text that show whether it has two tokens
LOOKED_AT = 256
# arguments of a tokenizer for the tokens of a text alone
TOKENS_ALONE = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
# keys are at sentence ends: text without any, such as tables, is cut into these pieces
SHORT = re.compile(r"\s*\S.{0,600}(?!\S)|\s*\S.{0,600}", re.DOTALL)
Arrays = tuple[np.ndarray, np.ndarray]


class Document(NamedTuple):
    """A document of ``size`` tokens, or a piece of one, made only when it is needed.

    ``make()`` returns tokens, int32 [size], and labels, int32 [size]: the token that each token
    predicts, already shifted, or IGNORED.
    """

    size: int
    make: Callable[[], Arrays]

    def piece(self, start: int, end: int) -> Document:
        """Return its tokens from ``start`` to ``end``."""
        return Document(end - start, lambda: tuple(each[start:end] for each in self.make()))


class Part(NamedTuple):
    """The held-out documents of a source, or all others.

    Document ``first`` and every ``every``-th document after it are held out, in the order of the
    data. If ``every`` is 0, no document is held out.
    """

    every: int
    held_out: bool = False
    first: int = 0

    def has(self, number: Any) -> Any:
        """Return True if a document is in this part, by its number or an array of numbers."""
        is_held_out = number % self.every == self.first if self.every else number < 0
        return is_held_out == self.held_out


@dataclass(frozen=True)
class TextSource:
    """Texts that `datasets` reads."""

    name: str
    dataset: Any  # a Dataset or an IterableDataset
    text_field: str
    seed: int = 0
    shuffle: bool = True
    # files of the dataset with their SHA-256; for a data set on the hub its commit
    files: dict[Path, str] = field(default_factory=dict)
    sha256: str | None = None  # of all files

    @property
    def rows(self) -> int | None:
        """The number of documents; None for a stream."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None


@dataclass(frozen=True)
class RetrievalSource:
    """Synthetic documents: keys hidden in the text of other sources. Only answers have labels."""

    name: str
    kinds: tuple[str, ...]  # from `retrieval.KINDS`, in turn; a kind named twice has two turns
    length: int | None  # tokens of a document; None: those of a sequence
    seed: int = 0

    rows = sha256 = None
    files: ClassVar[dict[Path, str]] = {}


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

    * ``NAME.txt`` is one document; a ``.jsonl`` or ``.parquet`` file has one document per row.
    * A folder contains such files of one kind.
    * ``manuals`` is the source of `cab_hf.finetune.pypi_docs`.
    * ``retrieval:passkey+multi:8192`` are kinds of `retrieval.KINDS` and a number of tokens.
    * ``NAME`` or ``NAME:CONFIG`` is a data set on the hub.

    Args:
        name: one of these.
        text_field: field of a row with its text; text files and manuals have their own.
        split: split of a data set on the hub.
        streaming: True to read during training instead of downloading and indexing first. Then
            blocks of 256 documents are shuffled, in the order of the stream.
        seed: seed of the order of the documents, or of the synthetic documents.

    Raises:
        UsageError: the source does not exist, cannot be read, or has no text or no such field.
    """
    if is_entry(name):
        return RetrievalSource(name, *parse_entry(name), seed)
    paths = [manuals_file()] if name == MANUALS else _local_files(name)
    if name == MANUALS or (paths and paths[0].suffix == ".txt"):
        text_field = "text"
    with _reading(name, paths, text_field):
        files = {path: file_sha256(path) for path in paths}
        if paths:
            dataset = _open_files(files, streaming)
        else:
            dataset, files[Path(name)] = _open_hub(name, split, streaming)
        fields = dataset and (dataset.column_names or list(next(iter(dataset), {})))
    if not fields or (not streaming and not len(dataset)):
        raise UsageError(
            f"source {name!r} must contain documents, got none. Give a source with text in it."
        )
    if text_field not in fields:
        hint = suggestion(text_field, fields)
        raise UsageError(f"source {name!r} has no field {text_field!r}; {hint}")
    # results and checkpoints contain the name of a file without its folder
    shown, sums = Path(name).name if paths else name, list(files.values())
    content = sums[0] if len(sums) == 1 else sha256("".join(sums).encode()).hexdigest()
    rows = dataset.select_columns([text_field])
    return TextSource(shown, rows, text_field, seed, files=files, sha256=content)


def is_local(name: str) -> bool:
    """Return True if `make_source` needs no network; UsageError for a path that does not exist."""
    return is_entry(name) or (name != MANUALS and bool(_local_files(name)))


def refuse_overlap(
    training: Sequence[tuple[Source, float]], validation: Sequence[tuple[Source, float]]
) -> None:
    """Raise an error if a run would be validated on a text of its training data.

    Sources without a share do not count.

    Raises:
        UsageError: names a source of ``validation`` with a file that ``training`` has too.
    """
    own, others = ([source for source, share in each if share] for each in (training, validation))
    source_of = {content: source.name for source in own for content in source.files.values()}
    for source in others:
        for file, content in source.files.items():
            if content in source_of:
                raise UsageError(
                    f"validation must contain other texts than data, got {source.name!r} and "
                    f"{source_of[content]!r}, where {file.name} is the same text. Give other "
                    "texts, or leave validation out to hold out documents of data."
                )


def _local_files(name: str) -> list[Path]:
    """Return the files at the path ``name``; an empty list if it is no path."""
    path, known = Path(os.path.expanduser(name)), ", ".join(KINDS)
    if not path.is_file() and not path.is_dir():
        local = path.suffix in KINDS or path.is_absolute() or name.startswith((".", "~"))
        # datasets would also read the folder before a colon
        if local or Path(name.split(":")[0]).is_dir():
            raise _nothing_there(name)
        return []
    files = [path]
    if path.is_dir():
        shown = (file for file in path.rglob("*") if file.suffix in KINDS and not file.is_dir())
        # hidden files are copies of editors
        files = sorted(x for x in shown if "/." not in f"/{x.relative_to(path).as_posix()}")
    kinds = sorted({file.suffix for file in files})
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise UsageError(
            f"source {name!r} must be a file of {known}, or a folder of files of one of these "
            f"kinds, got {' and '.join(kinds) or 'no'} files."
        )
    return files


def _nothing_there(name: str) -> UsageError:
    return UsageError(
        f"source must be an existing file or folder, got {name!r}. Give the path of one."
    )


def _open_hub(name: str, split: str, streaming: bool) -> tuple[Any, str | None]:
    """Open a data set on the hub; return it with the hash of its commit."""
    from datasets import load_dataset, load_dataset_builder
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    path, _, config = name.partition(":")
    if path in _PACKAGED_DATASETS_MODULES:
        # datasets would read any files in the working directory
        raise _nothing_there(name)
    content = load_dataset_builder(path, config or None).hash
    return load_dataset(path, config or None, split=split, streaming=streaming), content


def _open_files(files: dict[Path, str], streaming: bool, **options: Any) -> Any:
    """Read the rows of exactly these ``files``, by SHA-256; None if all are empty."""
    from datasets import Dataset
    from datasets.data_files import DataFilesDict, DataFilesList
    from datasets.utils.extract import Extractor

    read, usual = KINDS[next(iter(files)).suffix]
    # datasets cannot infer the fields of an empty file; an empty text is a document, skipped later
    filled = {
        os.path.abspath(file): (content,)
        for file, content in files.items()
        if file.stat().st_size or (read == "from_text" and len(files) > 1)
    }
    for file in filled:
        # datasets caches extracted files by path alone
        if read != "from_parquet" and Extractor.infer_extractor_format(file):
            raise ValueError(f"{Path(file).name} is compressed")
    if not filled:
        return None
    # a path alone would be a pattern, cached by its time stamp
    named = DataFilesDict(train=DataFilesList(list(filled), list(filled.values())))
    # unlike load_dataset, these readers call no server that counts loads
    how = {"split": "train", "streaming": streaming, **usual, **options}
    return getattr(Dataset, read)(named, **how)


def _reading(name: str, files: Sequence[Path], text_field: str) -> AbstractContextManager[None]:
    """Turn any error inside the block into a UsageError that names the source.

    The message names the first of several ``files`` that cannot be read or lacks the field.
    """

    def sentence(error: Exception) -> str:
        bad, features = "", None
        for file in files if len(files) > 1 else ():
            try:
                dataset = _open_files({file: ""}, True, features=features)
                if any(text_field not in row for row in dataset or ()):
                    raise ValueError(f"it has no field {text_field!r}")
            except Exception as of_file:
                bad, error = f"{file.name}: ", of_file
                break
            features = features or (dataset and dataset.features)
        # the error of datasets only says that it failed, and its cause says why
        error = error.__cause__ or error
        why = error.details() if hasattr(error, "details") else first_line(error)
        return (
            f"source {name!r} cannot be read ({bad}{why}). Give readable files or another data set."
        )

    return refused_as(sentence)


def first_held_out(source: TextSource, tokenizer: Any, every: int) -> int:
    """Return the number of the first document that is held out: below ``every``.

    Its place is that of the first document with at least two tokens, so that the held-out part is
    not an empty row. Without such a document the number is 0.
    """
    # reading a stream moves its place
    rows = source.dataset if source.rows is not None else copy.deepcopy(source.dataset)
    with _reading(source.name, [*source.files], source.text_field):
        for number, row in enumerate(rows):
            text = row.get(source.text_field)
            start = text.strip()[:LOOKED_AT] if isinstance(text, str) else ""
            if start and len(tokenizer(start, **TOKENS_ALONE)["input_ids"]) >= 2:
                return number % every
    return 0


class Texts:
    """The texts of a source, without end, in a new random order each epoch.

    All rows are shuffled together. A stream is shuffled block by block, because the buffer of
    datasets' own shuffling is lost when a run resumes. ``salt`` seeds the order.
    """

    def __init__(self, source: TextSource, part: Part, salt: str, tokenizer: Any = None) -> None:
        if part.every and tokenizer is not None:
            part = part._replace(first=first_held_out(source, tokenizer, part.every))
        self._source, self._part = source, part
        self._seed = f"finetune/{salt}/{source.seed}"
        self._first: State = {"epoch": 0, "row": 0, "block": 0}
        if source.rows is None:
            # a second reader of the source must not move this one
            self._dataset = copy.deepcopy(source.dataset)
            self._first["dataset"] = copy.deepcopy(self._dataset.state_dict())
        elif not part.has(np.arange(source.rows)).any():
            raise self._no_documents()
        self.load_state_dict({"begun": self._first, "taken": 0})

    @property
    def epoch(self) -> int:
        """The number of times that all texts were read."""
        return self._next["epoch"]

    def __next__(self) -> str:
        if self._taken == len(self._texts):
            self._begun, self._taken = self._next, 0
            self._texts = self._read()
        self._taken += 1
        return self._texts[self._taken - 1]

    def at_most_twice(self) -> Iterator[str]:
        """Yield texts until all of them have been read again from the start."""
        begun = self.epoch
        while self.epoch <= begun + 1:
            yield Texts.__next__(self)

    def state_dict(self) -> State:
        """Return the position of the next text.

        The position is the start of its block, and the number of texts taken from the block.
        """
        return {"begun": self._begun, "taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        self._begun, self._taken = state["begun"], state["taken"]
        self._go_to(self._begun)
        self._texts = self._read() if self._taken else []

    def _go_to(self, place: State) -> None:
        """Set the position of the next block."""
        self._next, source = place, self._source
        if source.rows is None:
            self._dataset.load_state_dict(copy.deepcopy(place["dataset"]))
            self._rows = enumerate(self._dataset, place["row"])
            return
        order = np.flatnonzero(self._part.has(np.arange(source.rows)))
        if source.shuffle:
            drawn = random.Random(f"{self._seed}/{place['epoch']}").getrandbits(32)
            # the draws of this generator are the same in every version of numpy
            order = np.random.RandomState(drawn).permutation(order)
        self._rows = ((number, source.dataset[number]) for number in order[place["row"] :].tolist())

    def _read(self) -> list[str]:
        """Read the next block, from the next epoch if this one has ended."""
        with _reading(self._source.name, [*self._source.files], self._source.text_field):
            texts = self._read_block()
            if not texts and self._next["block"]:
                self._go_to({**self._first, "epoch": self.epoch + 1})
                texts = self._read_block()
        if not texts:
            raise self._no_documents()
        return texts

    def _read_block(self) -> list[str]:
        texts: list[str] = []
        place, streamed = dict(self._next), self._source.rows is None
        for number, row in self._rows:
            place["row"] += 1
            if self._part.has(number):
                texts.append(self._checked(row.get(self._source.text_field), number))
            if len(texts) == (BLOCK_STREAMED if streamed else 1):
                break
        if texts and streamed:
            # only then: right after a load, a data set returns positions from the first row
            place["dataset"] = copy.deepcopy(self._dataset.state_dict())
            if self._source.shuffle:
                seed = f"{self._seed}/{place['epoch']}/{place['block']}"
                random.Random(seed).shuffle(texts)
        place["block"] += bool(texts)
        self._next = place
        return texts

    def _checked(self, text: Any, number: int) -> str:
        if not isinstance(text, str | None):
            raise UsageError(
                f"field {self._source.text_field!r} of source {self._source.name!r} must contain "
                f"strings, got {text!r} in document {number}."
            )
        return text if text and text.strip() else ""

    def _no_documents(self) -> UsageError:
        which = "held-out documents" if self._part.held_out else "documents"
        rule = f"one in {self._part.every}" if self._part.every else "none"
        return UsageError(
            f"source {self._source.name!r} has no {which} if {rule} is held out. Give it more "
            "documents, or hold out those of another source."
        )


class TextDocuments(Texts):
    """Texts as tokens: special tokens before a text, the text, and the end-of-text token.

    Texts with fewer than two tokens are skipped.
    """

    never_cut = False  # a document may continue in the next sequence

    def __init__(self, source: TextSource, part: Part, salt: str, tokenizer: Any) -> None:
        super().__init__(source, part, salt, tokenizer)
        self._tokenizer, end = tokenizer, tokenizer.eos_token_id
        self._before, self._after = leading_tokens(tokenizer), () if end is None else (end,)

    def __next__(self) -> Document:
        for text in self.at_most_twice():
            ids = self._tokenizer(text, **TOKENS_ALONE)["input_ids"]
            if len(ids) >= 2:
                tokens = np.asarray((*self._before, *ids, *self._after), dtype=np.int32)
                made = tokens, np.append(tokens[1:], np.int32(IGNORED))
                return Document(len(tokens), lambda made=made: made)
        which, remedy = "documents", "or leave the source out"
        if self._part.held_out and self._part.every > 1:
            which, remedy = "held-out documents", "or use --held-out 0 or --validation"
        elif self._part.every > 1:
            which = "documents that are not held out,"
            remedy = "use --held-out 0 or --validation, or leave the source out"
        raise UsageError(
            f"source {self._source.name!r} must contain {which} of two tokens or more, got only "
            f"shorter ones. Give longer documents, {remedy}."
        )


class RetrievalDocuments:
    """Synthetic documents that cycle through the kinds and through the sources of their text.

    Args:
        length: tokens of a sequence, and of a document if its source has no length.
        others: sources of the text; without any the text is `NOISE`.

    Raises:
        UsageError: a document is longer than a sequence, or too short for its keys.
    """

    epoch = None  # synthetic documents never end
    never_cut = True  # a question without its text cannot be answered

    def __init__(
        self,
        source: RetrievalSource,
        part: Part,
        salt: str,
        tokenizer: Any,
        length: int,
        others: Sequence[TextSource],
    ) -> None:
        self._source, self._tokenizer, self._index = source, tokenizer, 0
        self._length = source.length or length
        if self._length > length:
            raise UsageError(
                f"source {source.name!r} must have documents of at most {length} tokens, the "
                f"length of a sequence, got {self._length}. Give it a smaller length."
            )
        self._seed = f"{salt}/{source.seed}/{part.held_out}"
        salt = f"{salt}/{source.name}"
        self._haystacks = [Texts(other, part, salt, tokenizer) for other in others]
        for turn in range(len(source.kinds)):
            self.make(turn, ())

    def __next__(self) -> Document:
        index, excerpts = self._index, self._excerpts()
        self._index += 1
        return Document(self._length, lambda: self.make(index, excerpts))

    def make(self, index: int, excerpts: Sequence[str]) -> Arrays:
        """Return tokens and labels of a document; UsageError if it is too short for its keys."""
        kinds = self._source.kinds
        kind, around = kinds[index % len(kinds)], list(_sentences(excerpts)) or NOISE
        try:
            document = retrieval_document(
                kind, self._tokenizer, around, self._length, index, self._seed
            )
        except ValueError as error:
            # each document draws other names and numbers, so a later one may be longer than the
            # first
            raise UsageError(f"source {self._source.name!r}: {error}") from None
        tokens = np.asarray(document.tokens, dtype=np.int32)
        labels = np.full_like(tokens, IGNORED)
        for start, end in document.answers:
            # the token before predicts each token
            labels[start - 1 : end - 1] = tokens[start:end]
        return tokens, labels

    def _excerpts(self) -> list[str]:
        """Return text for one document; a longer text is cut at a drawn place."""
        if not self._haystacks:
            return []
        turn = self._index // len(self._source.kinds)
        rng = random.Random(f"finetune/{self._seed}/text/{self._index}")
        num_characters, excerpts = self._length * CHARACTERS_A_TOKEN, []
        for text in self._haystacks[turn % len(self._haystacks)].at_most_twice():
            start = rng.randrange(max(1, len(text) - num_characters))
            excerpt = text[start : start + num_characters]
            if excerpt.strip():
                excerpts.append(excerpt)
                num_characters -= len(excerpt)
            if num_characters <= 0:
                break
        return excerpts

    def state_dict(self) -> State:
        return {"index": self._index, "texts": [each.state_dict() for each in self._haystacks]}

    def load_state_dict(self, state: State) -> None:
        self._index = state["index"]
        for texts, place in zip(self._haystacks, state["texts"], strict=True):
            texts.load_state_dict(place)


def _sentences(excerpts: Sequence[str]) -> Iterator[str]:
    for sentence in chain.from_iterable(map(split_sentences, excerpts)):
        yield from (piece.strip(" ") for piece in SHORT.findall(sentence))
