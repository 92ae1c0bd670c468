"""Synthetic documents that train retrieval: keys in filler text, and questions about the keys.

Questions have the same wording as in the evaluations. But no document equals a document of an
evaluation, because seeds of evaluations start with an integer and these seeds with ``finetune/``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

from cab_hf.data.documents import Document, recall_document
from cab_hf.data.needles import (
    ANSWER,
    NAMES,
    NUMBERS,
    QUESTION,
    TEXT,
    Key,
    Span,
    Tokens,
    around_text,
    cut_to_length,
    draw_keys,
    endless,
    instruction,
    leading_tokens,
    sentence_tokens,
    span_of,
    with_statements,
)
from cab_hf.data.tasks import TASKS, statement
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.settings import suggestion

PREFIX = "retrieval"  # start of the names of synthetic sources
# number of keys per document by kind. "passkey": a question about one key at the end;
# "distractors": the same, with sentences that contain other numbers; "multi": questions about
# several keys; "recall": filler text that repeats several keys
KEYS = {"passkey": 1, "distractors": 1, "multi": 4, "recall": 12}
# numbers of keys of a "recall" document that is too short for 12 keys; the first that fits is used
FEWER_KEYS = (6, 3)
# kinds of documents that state every sentence twice, the second time in another order: filler text
# with keys, or keys only. They have thousands of labelled tokens, documents of other kinds a few
REPEATS, KEYS_ALONE = "repeats", "keys"
# templates of the sentences of kind "keys", with a name and a key. The key follows its name
# closely, because models then learn retrieval faster
WORDINGS = ("{} {}.", "{} is {}.", "The pass key for {} is {}.")
# number of first tokens of a repeated sentence that have no labels, because they identify it
BEGINNING = 3
KINDS = (*KEYS, REPEATS, KEYS_ALONE, *TASKS)


def is_entry(name: str) -> bool:
    """Return True if the source ``name`` has the prefix of synthetic sources."""
    return name.partition(":")[0] == PREFIX


def parse_entry(name: str) -> tuple[tuple[str, ...], int | None]:
    """Parse a source name such as ``retrieval:passkey+multi:8192``.

    Returns:
        The kinds, and the tokens of a document; None without a length.

    Raises:
        UsageError: a kind is unknown, or the length is no positive integer.
    """
    _, kinds, length, *extra_fields = [*name.split(":"), "", ""]
    if any(extra_fields) or not (length.isdecimal() and int(length) or not length):
        raise UsageError(
            f"{PREFIX} must be {PREFIX}:KINDS:LENGTH with a number of tokens as LENGTH, got "
            f"{name!r}."
        )
    for kind in kinds.split("+"):
        if kind not in KINDS:
            hint = suggestion(kind, KINDS)
            raise UsageError(f"{PREFIX} must name known kinds, got {kind!r} in {name!r}; {hint}")
    return tuple(kinds.split("+")), int(length) if length else None


def retrieval_document(
    kind: str, tokenizer: Any, sentences: Sequence[str], length: int, index: int, seed: Any = 0
) -> Document:
    """Build a document of ``length`` tokens that states keys and later repeats them as answers.

    Args:
        kind: one of `KINDS`.
        tokenizer: the tokenizer of the model.
        sentences: sentences of the filler text. They repeat if they are too few.
        length: tokens of the document.
        index: index of the document; each index has other keys.
        seed: seed of the document; any value with a string form.

    Raises:
        ValueError: ``length`` is too small for the keys and questions.
    """
    document_seed = f"finetune/{seed}"
    if kind in TASKS:
        example = TASKS[kind].make(tokenizer, sentences, length, index=index, seed=document_seed)
        return Document(example.tokens, example.needles, example.answers)
    rng = random.Random(f"{document_seed}/{kind}/{length}/{index}")
    if kind in (REPEATS, KEYS_ALONE):
        return _repeated(tokenizer, sentences if kind == REPEATS else (), length, rng)
    if kind != "recall":
        return _questions_at_end(
            tokenizer=tokenizer, sentences=sentences, length=length, rng=rng, kind=kind
        )
    for num_keys in (KEYS[kind], *FEWER_KEYS):
        try:
            return recall_document(
                tokenizer, sentences, length, num_keys, index=index, seed=document_seed
            )
        except ValueError as error:
            too_short = error
    raise too_short


def _repeated(
    tokenizer: Any, sentences: Sequence[str], length: int, rng: random.Random
) -> Document:
    """Return a document that states each sentence and key twice, the second time in another order.

    Answers are the labelled tokens of the second statements; see `_to_be_repeated`.
    """
    leading = leading_tokens(tokenizer)
    half, num_missing = divmod(length - len(leading), 2)
    pieces: list[tuple[Tokens, Span]] = []
    for piece, labels in _to_be_repeated(tokenizer, sentences, rng):
        num_free = half - sum(len(tokens) for tokens, _ in pieces)
        if len(piece) >= num_free:
            pieces.append((piece[:num_free], (0, 0)))
            break
        pieces.append((piece, labels))
    tokens = [*leading, *chain(*(piece for piece, _ in pieces))]
    ends = [*accumulate((len(piece) for piece, _ in pieces), initial=len(leading))]
    needles, answers = [], []
    for index in rng.sample(range(len(pieces)), len(pieces)):
        piece, (start, end) = pieces[index]
        if start < end:
            needles.append((ends[index], ends[index + 1]))
            answers.append((len(tokens) + start, len(tokens) + end))
        tokens.extend(piece)
    if not answers:
        raise ValueError(
            f"length must have room for a key that is said twice, got {length}. Give a larger "
            "length."
        )
    # repeat the last token if the number of tokens is odd
    return Document((*tokens, *tokens[-1:] * num_missing), tuple(needles), tuple(answers))


def _to_be_repeated(
    tokenizer: Any, sentences: Sequence[str], rng: random.Random
) -> Iterator[tuple[Tokens, Span]]:
    """Yield the key statements and sentences that a document states twice, without end.

    Four key statements precede each sentence. Keys belong alternately to lockers with random
    numbers and to persons, and to lockers only after the last name. Without ``sentences``, there
    are key statements only: first one for each name, then for lockers.

    Yields:
        tokens: tokens of the statement or sentence.
        labels: span of the tokens that have labels in the second statement.
    """
    names = iter(rng.sample(NAMES, len(NAMES)))
    for sentence in endless(sentences, rng) if sentences else repeat(None):
        for number in range(4):
            name = next(names, None) if number % 2 or sentence is None else None
            owner = name or f"locker {rng.choice(NUMBERS)}"
            key = Key(f" for {owner}", str(rng.choice(NUMBERS)))
            if sentence is None:
                text = rng.choice(WORDINGS).format(owner, key.digits)
            else:
                text = statement(key)
            # rindex, because the number of a locker may equal its key
            labels = span_of(tokenizer, text, key.digits, text.rindex(key.digits))
            yield sentence_tokens(tokenizer, text), labels
        if sentence is None:
            continue
        tokens = sentence_tokens(tokenizer, sentence)
        yield tokens, (min(BEGINNING, len(tokens)), len(tokens))


def _questions_at_end(
    tokenizer: Any, sentences: Sequence[str], length: int, rng: random.Random, kind: str
) -> Document:
    """Return a document of filler text with keys, and a question and answer per key at the end.

    Args:
        tokenizer, sentences, length: as in `retrieval_document`.
        rng: random generator for keys and their positions.
        kind: "passkey", "distractors" or "multi".
    """
    num_keys = KEYS[kind]
    keys = draw_keys(rng, num_keys, named=num_keys > 1)
    statements = [sentence_tokens(tokenizer, key.statement) for key in keys]
    # turns of a chat: instruction, text and first question; answer; second question; ...
    questions = [QUESTION.format(whose=key.whose) for key in keys]
    questions[0] = "\n\n".join([instruction(num_keys), TEXT, questions[0]])
    answers = [f"{ANSWER.format(whose=key.whose)}{key.digits}." for key in keys]
    turns = chain(*zip(questions, answers, strict=True))
    head, after_text = around_text(tokenizer, list(turns))
    tail = sentence_tokens(tokenizer, after_text)

    num_free = length - len(head) - len(tail) - sum(map(len, statements))
    if num_free < 0:
        raise ValueError(
            f"length must have room for the question and {num_keys} keys, which take "
            f"{length - num_free} tokens, got {length}. Give a larger length."
        )
    text = endless(sentences, rng, keys if kind == "distractors" else None)
    pieces = cut_to_length((sentence_tokens(tokenizer, sentence) for sentence in text), num_free)
    borders = [rng.randrange(len(pieces) + 1) for _ in statements]
    tokens, needles = with_statements(head, pieces, statements, borders)
    digit_spans = (span_of(tokenizer, after_text, key.digits) for key in keys)
    answer_spans = ((len(tokens) + start, len(tokens) + end) for start, end in digit_spans)
    return Document((*tokens, *tail), tuple(needles), tuple(answer_spans))
