"""Where documents come from, and a place among them that a run can return to.

Sources have no end: they are read epoch after epoch. Their ``state_dict`` is JSON: the place of the
next document. What was read ahead is not part of it and is read again.
"""

from __future__ import annotations

import copy
import difflib
import os
import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cab_hf.finetune.loss import IGNORED
from cab_hf.finetune.retrieval import Entry, is_entry, parse_entry, retrieval_document
from cab_hf.runs.models import file_sha256
from cab_hf.runs.settings import UsageError, first_line, refused_as
from cab_hf.runs.stand_ins import MANUALS, manuals_file
from cab_hf.texts.needles import NOISE, leading_tokens, split_sentences

State = dict[str, Any]
# files by their endings: what `datasets` reads them with; a byte order mark is no text
KINDS = {
    ".txt": ("from_text", {"sample_by": "document", "encoding": "utf-8-sig"}),
    ".jsonl": ("from_json", {}),
    ".json": ("from_json", {}),
    ".parquet": ("from_parquet", {}),
}
# rows read at once; a stream cannot be shuffled as a whole, so that these blocks of it are
BLOCK_ROWS = 64
BLOCK_STREAMED = 256
TOKENISED_CHARACTERS = 2**20  # of texts that are tokenised at once
# more than text has: sentences around keys repeat only where a source has no more of them
CHARACTERS_A_TOKEN = 6
# keys stand at the ends of sentences: text without any, such as tables, is cut to these
SHORT = re.compile(r"\s*\S.{0,600}(?!\S)|\s*\S.{0,600}", re.DOTALL)


class Tokenised(NamedTuple):
    """A document, or a piece of one.

    Attributes:
        tokens: int32 [n].
        labels: int32 [n], what each token is to predict, already shifted; IGNORED where nothing.
    """

    tokens: np.ndarray
    labels: np.ndarray

    @property
    def size(self) -> int:
        return len(self.tokens)

    def tokenised(self) -> Tokenised:
        return self


class LazyDocument(NamedTuple):
    """A document of ``size`` tokens that is made where it is needed; others are passed over."""

    size: int
    tokenised: Callable[[], Tokenised]


class Part(NamedTuple):
    """Which documents of a source: the held out ones, or all others.

    Of every ``every`` documents, in the order of the data and whatever the seed, the first is held
    out; none where ``every`` is 0.
    """

    every: int
    held_out: bool = False

    def has(self, number: Any) -> Any:
        """Whether it has a document, by its number; of an array of numbers, each of them."""
        return (number % self.every == 0 if self.every else number < 0) == self.held_out


@dataclass(frozen=True)
class TextSource:
    """Texts that `datasets` reads.

    Attributes:
        dataset: a Dataset or an IterableDataset with the field alone.
        skipped: a sentence on documents without text, where there are such or may be.
        files: that the dataset is read from, and ``sha256`` of their content; none of the hub's.
    """

    name: str
    dataset: Any
    field: str
    seed: int = 0
    shuffle: bool = True
    skipped: str | None = None
    files: Sequence[Path] = ()
    sha256: str | None = None

    whole = False  # a document may go on in the next sequence

    @property
    def rows(self) -> int | None:
        """How many documents it has; None for a stream."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None

    def texts(self, part: Part, salt: str) -> Texts:
        """Its texts; ``salt`` tells the order from that of another reader of the same source."""
        return Texts(self, part, f"{salt}/{self.seed}" if self.shuffle else None)

    def documents(
        self, tokenizer: Any, part: Part, salt: str, length: int, others: Sequence[TextSource]
    ) -> TextDocuments:
        """Its documents for sequences of ``length`` tokens."""
        return TextDocuments(self, self.texts(part, salt), tokenizer)


@dataclass(frozen=True)
class RetrievalSource:
    """Synthetic documents: keys hidden in the text of the sources beside it.

    Only their answers are learnt.
    """

    name: str
    entry: Entry
    seed: int = 0

    whole = True  # a question without its text cannot be answered
    rows = skipped = sha256 = None

    def documents(
        self, tokenizer: Any, part: Part, salt: str, length: int, others: Sequence[TextSource]
    ) -> RetrievalDocuments:
        """Its documents, hidden in texts of ``others``.

        Raises:
            UsageError: a document is longer than a sequence, or has no room for its keys.
        """
        size = self.entry.length or length
        if size > length:
            raise UsageError(
                f"source {self.name!r} has documents of {size} tokens, and a sequence has "
                f"{length}; give it the length of a sequence or less."
            )
        try:
            for kind in self.entry.kinds:
                retrieval_document(kind, tokenizer, NOISE, size, 0)
        except ValueError as error:
            raise UsageError(f"source {self.name!r}: {error}") from None
        haystacks = [other.texts(part, f"{salt}/{self.name}") for other in others]
        seed = f"{salt}/{self.seed}/{part.held_out}"
        return RetrievalDocuments(self, tokenizer, size, seed, haystacks)


Source = TextSource | RetrievalSource


def make_source(
    name: str,
    *,
    text_field: str = "text",
    split: str = "train",
    streaming: bool = False,
    seed: int = 0,
    shuffle: bool = True,
) -> Source:
    """What documents are read from; those of fewer than two tokens are skipped.

    Args:
        name: a ``.txt`` file, which is one document, or a ``.jsonl`` or ``.parquet`` file with one
            a row; a folder of such files of one kind; ``manuals``, those of open-source packages
            (see `runs.stand_ins`); ``retrieval:passkey+multi:8192``, synthetic documents of
            those kinds and that many tokens (see `finetune.retrieval.KINDS`); or a data set of the
            hub, ``NAME`` or ``NAME:CONFIG``.
        text_field: the field of a row with its text; files of text and manuals have their own.
        split: of a data set of the hub.
        streaming: read while training instead of downloading and indexing first; then blocks of
            256 documents are shuffled, in the order they come.
        seed: of the order of the documents, or of the synthetic ones.
        shuffle: False leaves the documents in the order of the data.

    Raises:
        UsageError: there is no such source, it cannot be read, has no text or no such field.
    """
    if is_entry(name):
        return RetrievalSource(name, parse_entry(name), seed)
    files = _files_of(name)
    own = name == MANUALS or (files and files[0].suffix == ".txt")
    field = "text" if own else text_field
    fields: Sequence[str] = ()
    if not files or any(file.stat().st_size for file in files):
        with _reading(repr(name), files, field):
            sums = list(map(file_sha256, files))
            opened = _open_files(files, sums, streaming) if files else _open(name, split, streaming)
            fields = opened.column_names or list(next(iter(opened), {}))
    if not fields or (not streaming and not len(opened)):
        raise UsageError(f"source {name!r} has no documents; give one with text in it.")
    if field not in fields:
        near = difflib.get_close_matches(field, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its fields are {', '.join(fields)}."
        where = f" in {files[0].name}" if len(files) > 1 else ""
        raise UsageError(f"source {name!r} has no field {field!r}{where}; {hint}")
    # results and checkpoints say which file it was, not in which folder
    shown = Path(name).name if files else name
    dataset = opened.select_columns([field])
    with _reading(repr(name)):
        skipped = _skipped(dataset, field, shown)
    content = _sha256_of(sums) if files else None
    return TextSource(shown, dataset, field, seed, shuffle, skipped, files, content)


def _skipped(dataset: Any, field: str, shown: str) -> str | None:
    """A sentence on documents without text; UsageError where there are no others."""
    if not hasattr(dataset, "__len__"):
        return f"source {shown!r} is read as it comes: documents without text are skipped."
    from pyarrow import compute, string, types

    texts = dataset.data.column(field)
    texts = texts.cast(string()) if types.is_null(texts.type) else texts
    if not (types.is_string(texts.type) or types.is_large_string(texts.type)):
        raise UsageError(
            f"field {field!r} of source {shown!r} must hold text; it has {texts.type}."
        )
    # a chunk at a time: what is trimmed is a copy
    trimmed = map(compute.utf8_trim_whitespace, texts.chunks)
    lengths = [np.asarray(compute.utf8_length(each).fill_null(0)) for each in trimmed]
    empty = np.flatnonzero(np.concatenate(lengths) == 0)
    if len(empty) == len(dataset):
        raise UsageError(f"source {shown!r} has no documents with text; give one that has.")
    if not len(empty):
        return None
    return (
        f"source {shown!r}: {len(empty)} of {len(dataset)} documents have no text and are skipped; "
        f"the first of them is row {empty[0]}, counted from 0."
    )


def content_sha256(name: str) -> str | None:
    """The SHA-256 of a source's files in their order; None of synthetic documents.

    Of a data set of the hub it is the commit, for a stream is not read.

    Raises:
        UsageError: there is no such source.
    """
    if is_entry(name):
        return None
    files = _files_of(name)
    if files:
        return _sha256_of(list(map(file_sha256, files)))
    from datasets import load_dataset_builder

    with _reading(repr(name)):
        path, _, config = name.partition(":")
        return load_dataset_builder(path, config or None).hash


def _sha256_of(sums: Sequence[str]) -> str:
    return sums[0] if len(sums) == 1 else sha256("".join(sums).encode()).hexdigest()


def is_local(name: str) -> bool:
    """Whether `make_source` needs no network for it; UsageError for a path where nothing is."""
    return is_entry(name) or (name != MANUALS and bool(_local_files(name)))


def refuse_learnt(
    learnt: Sequence[tuple[str, float]], watched: Sequence[tuple[str, float]]
) -> None:
    """Refuse to validate a run on what it learns.

    Synthetic documents are others where they are held out, and texts of share 0 are not learnt.

    Args:
        learnt, watched: names and shares of sources.

    Raises:
        UsageError: naming a source of ``watched`` with a file that ``learnt`` has too.
    """
    own, others = (
        [name for name, share in named if share and not is_entry(name)]
        for named in (learnt, watched)
    )
    instead = (
        "give texts that are not learnt, or leave validation out: then documents of data are kept "
        "for it."
    )
    known = [(name, file) for name in own for file in _local_files(name)]
    for name in others:
        for file in _local_files(name):
            other = next((other for other, same in known if _are_alike(file, same)), None)
            if other is not None:
                raise UsageError(
                    f"validation has {name!r} and data {other!r}, where {file.name} is the same "
                    f"text; {instead}"
                )
        if name in own:
            raise UsageError(f"validation and data both have {name!r}; {instead}")


def _are_alike(one: Path, other: Path) -> bool:
    """Whether two files have the same content."""
    same_size = one.stat().st_size == other.stat().st_size
    return same_size and (one.samefile(other) or file_sha256(one) == file_sha256(other))


def _files_of(name: str) -> list[Path]:
    return [manuals_file()] if name == MANUALS else _local_files(name)


def _local_files(name: str) -> list[Path]:
    """The files that ``name`` stands for, none where it is no path."""
    path, known = Path(os.path.expanduser(name)), ", ".join(KINDS)
    if path.is_dir():
        results = sorted(file for file in path.rglob("*") if _is_text(file, path))
        kinds = sorted({file.suffix for file in results})
        if len(kinds) != 1:
            raise UsageError(
                f"source {name!r} must be a folder of files of one kind of {known}; it holds "
                f"{' and '.join(kinds) or 'no'} files."
            )
        lost = next((file for file in results if not file.is_file()), None)
        if lost is not None:
            raise UsageError(
                f"source {name!r} has {lost.name}, a link to nothing; take it away or restore it."
            )
        return results
    if path.is_file() and path.suffix not in KINDS:
        raise UsageError(f"source {name!r} must be a file of {known}.")
    if path.is_file():
        return [path]
    # datasets would also read the folder before a colon
    local = path.is_absolute() or name.startswith((".", "~")) or Path(name.split(":")[0]).is_dir()
    if path.suffix in KINDS or local:
        raise UsageError(f"source {name!r} is no file or folder that is there; give one that is.")
    return []


def _is_text(file: Path, folder: Path) -> bool:
    """Whether ``folder`` has it as a document: hidden ones are copies that editors keep."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.suffix in KINDS and not hidden and not file.is_dir()


def _open(name: str, split: str, streaming: bool) -> Any:
    from datasets import load_dataset
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    path, _, config = name.partition(":")
    if path in _PACKAGED_DATASETS_MODULES:
        # datasets would read whatever is in the working directory
        raise UsageError(f"source {name!r} is no file or folder that is there; give one that is.")
    return load_dataset(path, config or None, split=split, streaming=streaming)


def _open_files(files: Sequence[Path], sums: Sequence[str], streaming: bool, **options: Any) -> Any:
    """The rows of exactly these ``files``, which have the SHA-256 ``sums``."""
    from datasets import Dataset
    from datasets.data_files import DataFilesDict, DataFilesList
    from datasets.utils.extract import Extractor

    read, usual = KINDS[files[0].suffix]
    # of an empty file datasets cannot tell the fields; one of text is a document, skipped later
    filled = {
        os.path.abspath(file): (each,)
        for file, each in zip(files, sums, strict=True)
        if read == "from_text" or file.stat().st_size
    }
    for file in filled:
        if "::" in file:
            raise ValueError(f"datasets takes the '::' in {file} for an address")
        # datasets keeps what it unpacks by its path alone
        if read != "from_parquet" and Extractor.infer_extractor_format(file):
            raise ValueError(f"{Path(file).name} is compressed")
    # a path alone would be taken for a pattern, and cached by its time stamp
    named = DataFilesDict(train=DataFilesList(list(filled), list(filled.values())))
    # unlike load_dataset they ask no server, which counts what is loaded
    how = {"split": "train", "streaming": streaming, **usual, **options}
    return getattr(Dataset, read)(named, **how)


def _reading(
    text: str, files: Sequence[Path] = (), field: str = ""
) -> AbstractContextManager[None]:
    """Whatever goes wrong inside becomes a UsageError that names the source.

    Args:
        files: that are read; of several the one that cannot be is named.
        field: that their rows are to have.
    """

    def tell(error: Exception) -> str:
        bad, error = (_bad_file(files, field) if len(files) > 1 else None) or ("", error)
        # what datasets raises says that it failed, and its cause why
        error = error.__cause__ or error
        why = error.details() if hasattr(error, "details") else first_line(error)
        return (
            f"source {text} cannot be read ({bad}{why}); give a file, a folder or a data set of "
            "the hub that can."
        )

    return refused_as(tell)


def _bad_file(files: Sequence[Path], field: str) -> tuple[str, Exception] | None:
    """The first file that lacks the field or cannot be read as those before it, and why."""
    features = None
    for file in files:
        try:
            dataset = _open_files([file], [""], True, features=features)
            for row in dataset if file.stat().st_size else ():
                if field not in row:
                    raise ValueError(f"it has no field {field!r}")
        except Exception as error:
            return f"{file.name}: ", error
        features = features or dataset.features
    return None


class Texts:
    """The texts of a source, without end, read a block at a time.

    Rows are shuffled as a whole, anew each epoch; of a stream each block is shuffled by itself:
    the buffer of datasets' own shuffling is lost when a run goes on.

    Args:
        seed: of the order; None keeps that of the data.
    """

    def __init__(self, source: TextSource, part: Part, seed: str | None) -> None:
        self._source, self._part, self._seed = source, part, seed
        if source.rows is None:
            # its place is its own: a second reader of a source must not move the first
            self._dataset = copy.deepcopy(source.dataset)
            start = copy.deepcopy(self._dataset.state_dict())
            self._first: State = {"epoch": 0, "number": 0, "block": 0, "dataset": start}
        else:
            numbers = np.arange(source.rows)
            self._rows = numbers[part.has(numbers)]
            self._first = {"epoch": 0, "row": 0}
            if not len(self._rows):
                self._refuse_nothing()
        self._go_to(self._first)
        self._begun = self._first  # where the block was read
        self._texts: list[str] = []  # of the block
        self._taken = 0  # how many of them

    @property
    def epoch(self) -> int:
        """How often all texts were read."""
        return self._next["epoch"]

    def peek(self, characters: int = 1) -> list[str]:
        """The texts that come next: one at least, and more up to ``characters`` in all."""
        if self._taken == len(self._texts):
            self._begun, self._taken = self._next, 0
            self._texts = self._read()
        texts: list[str] = []
        for text in self._texts[self._taken :]:
            texts.append(text)
            characters -= len(text)
            if characters <= 0:
                break
        return texts

    def advance(self) -> None:
        """Go on to the text after the next one."""
        self._taken += 1

    def state_dict(self) -> State:
        """The place of the next text."""
        return {"block": self._begun, "taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        self._begun, self._taken = state["block"], state["taken"]
        self._go_to(self._begun)
        self._texts = self._read() if self._taken else []

    def _go_to(self, place: State) -> None:
        """Have ``place`` be that of the next block."""
        self._next = place
        if self._source.rows is None:
            self._dataset.load_state_dict(copy.deepcopy(place["dataset"]))
            self._stream = iter(self._dataset)
        else:
            self._ordered = self._rows
            if self._seed is not None:
                drawn = random.Random(f"finetune/{self._seed}/{place['epoch']}").getrandbits(32)
                # of numpy's generators the one whose draws are the same in every version
                self._ordered = np.random.RandomState(drawn).permutation(self._rows)

    def _read(self) -> list[str]:
        read = self._read_stream if self._source.rows is None else self._read_rows
        texts = read()
        if not texts:
            if not self._next.get("block", 1):
                self._refuse_nothing()
            self._go_to({**self._first, "epoch": self.epoch + 1})
            texts = read()
        return texts

    def _read_rows(self) -> list[str]:
        row = self._next["row"]
        rows = self._ordered[row : row + BLOCK_ROWS].tolist()
        self._next = {**self._next, "row": row + len(rows)}
        with self._reading():
            texts = self._source.dataset[rows][self._source.field] if rows else []
        return [self._checked(text, row) for row, text in zip(rows, texts, strict=True)]

    def _read_stream(self) -> list[str]:
        texts: list[str] = []
        epoch, number, block, place = self._next.values()
        with self._reading():
            for row in self._stream:
                if self._part.has(number):
                    texts.append(self._checked(row.get(self._source.field), number))
                number += 1
                if len(texts) == BLOCK_STREAMED:
                    break
        if texts:
            # only then: right after a load a data set tells its place from the first row
            place = copy.deepcopy(self._dataset.state_dict())
            if self._seed is not None:
                random.Random(f"finetune/{self._seed}/{epoch}/{block}").shuffle(texts)
            block += 1
        self._next = {"epoch": epoch, "number": number, "block": block, "dataset": place}
        return texts

    def _reading(self) -> AbstractContextManager[None]:
        return _reading(repr(self._source.name), self._source.files, self._source.field)

    def _checked(self, text: Any, number: int) -> str:
        if text is None or (isinstance(text, str) and not text.strip()):
            return ""
        if not isinstance(text, str):
            raise UsageError(
                f"field {self._source.field!r} of source {self._source.name!r} must hold text; "
                f"document {number} has {text!r}."
            )
        return text

    def _refuse_nothing(self) -> None:
        part = self._part
        which = "held-out documents" if part.held_out else "documents"
        rule = f"one in {part.every} is held out" if part.every else "none is held out"
        raise UsageError(
            f"source {self._source.name!r} has no {which} where {rule}; give it more, or hold out "
            "those of another source."
        )


class TextDocuments:
    """Texts as tokens: the special ones before a text, its own, and the one that ends it."""

    def __init__(self, source: TextSource, texts: Texts, tokenizer: Any) -> None:
        self._source, self._texts, self._tokenizer = source, texts, tokenizer
        self._ready: deque[Sequence[int]] = deque()
        self._before = leading_tokens(tokenizer)
        end = tokenizer.eos_token_id
        self._after = () if end is None else (end,)

    @property
    def epoch(self) -> int:
        return self._texts.epoch

    def __next__(self) -> Tokenised:
        begun = self._texts.epoch
        while True:
            if not self._ready:
                texts = self._texts.peek(TOKENISED_CHARACTERS)
                options = {"add_special_tokens": False, "return_attention_mask": False}
                encoded = self._tokenizer(texts, verbose=False, **options)
                self._ready.extend(encoded["input_ids"])
            ids = self._ready.popleft()
            self._texts.advance()
            if len(ids) >= 2:
                tokens = np.asarray((*self._before, *ids, *self._after), dtype=np.int32)
                return Tokenised(tokens, np.append(tokens[1:], np.int32(IGNORED)))
            if self._texts.epoch > begun + 1:
                raise UsageError(
                    f"source {self._source.name!r} has only documents of fewer than two tokens, "
                    "the fewest that one can be learnt of; give it longer ones, or leave it out."
                )

    def state_dict(self) -> State:
        return self._texts.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._texts.load_state_dict(state)
        self._ready.clear()


@dataclass
class RetrievalDocuments:
    """Synthetic documents in turns: of the kinds, and of the sources whose text is around keys."""

    _source: RetrievalSource
    _tokenizer: Any
    _length: int
    _seed: str
    _haystacks: Sequence[Texts]
    _index: int = 0
    epoch: None = None  # there are always others

    def __next__(self) -> LazyDocument:
        make = partial(self._make, self._index, self._excerpts())
        self._index += 1
        return LazyDocument(self._length, make)

    def _make(self, index: int, excerpts: Sequence[str]) -> Tokenised:
        kinds = self._source.entry.kinds
        kind, around = kinds[index % len(kinds)], list(_sentences(excerpts)) or NOISE
        try:
            document = retrieval_document(
                kind, self._tokenizer, around, self._length, index, self._seed
            )
        except ValueError as error:
            # other names and numbers are drawn for each: one may be longer than the first was
            raise UsageError(f"source {self._source.name!r}: {error}") from None
        tokens = np.asarray(document.tokens, dtype=np.int32)
        labels = np.full(len(tokens), IGNORED, np.int32)
        for start, end in document.answers:
            # each is predicted by the token before it
            labels[start - 1 : end - 1] = tokens[start:end]
        return Tokenised(tokens, labels)

    def _excerpts(self) -> list[str]:
        """As much text as one document takes; of a longer text an excerpt at a drawn place."""
        if not self._haystacks:
            return []
        turn = self._index // len(self._source.entry.kinds)
        texts = self._haystacks[turn % len(self._haystacks)]
        rng = random.Random(f"finetune/{self._seed}/text/{self._index}")
        wanted, begun = self._length * CHARACTERS_A_TOKEN, texts.epoch
        excerpts: list[str] = []
        while wanted > 0 and texts.epoch <= begun + 1:
            text = texts.peek()[0]
            texts.advance()
            start = rng.randrange(max(1, len(text) - wanted))
            excerpt = text[start : start + wanted]
            if excerpt.strip():
                excerpts.append(excerpt)
                wanted -= len(excerpt)
        return excerpts

    def state_dict(self) -> State:
        return {"index": self._index, "texts": [texts.state_dict() for texts in self._haystacks]}

    def load_state_dict(self, state: State) -> None:
        self._index = state["index"]
        for texts, place in zip(self._haystacks, state["texts"], strict=True):
            texts.load_state_dict(place)


def _sentences(excerpts: Sequence[str]) -> Iterator[str]:
    for sentence in chain.from_iterable(map(split_sentences, excerpts)):
        yield from (piece.strip(" ") for piece in SHORT.findall(sentence))
