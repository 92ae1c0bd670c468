"""Documents for learning retrieval: keys hidden in running text and asked for again.

The wording is that of the evaluations, but no document is the same: seeds of evaluations start with
a whole number, and seeds of these documents with ``finetune/``.
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

PREFIX = "retrieval"
# number of keys per document: one key asked for at the end, without or with distractors; several
# keys asked for in turn; and several keys repeated in running text
KEYS = {"passkey": 1, "distractors": 1, "multi": 4, "recall": 12}
# numbers of keys of recall in documents too short for all
FEWER_KEYS = (6, 3)
# sentences and keys that are all repeated in another order, and keys alone: such a document has
# thousands of answers, others have a few
REPEATS, KEYS_ALONE = "repeats", "keys"
# wordings of keys alone: models find a key sooner if it is close to its name
WORDINGS = ("{} {}.", "{} is {}.", "The pass key for {} is {}.")
BEGINNING = 3  # tokens of a repeated sentence that are given, to identify it
KINDS = (*KEYS, REPEATS, KEYS_ALONE, *TASKS)


def is_entry(name: str) -> bool:
    """Return True if a source with this name is synthetic."""
    return name.partition(":")[0] == PREFIX


def parse_entry(name: str) -> tuple[tuple[str, ...], int | None]:
    """Parse ``retrieval:KIND+KIND:LENGTH`` to (kinds, tokens of a document or None).

    Raises:
        UsageError: a kind is unknown, or the length is no number of tokens.
    """
    _, kinds, length, *others = [*name.split(":"), "", ""]
    if any(others) or not (length.isdecimal() and int(length) or not length):
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
    """Build a document of ``length`` tokens that asks for keys hidden in its text.

    Args:
        kind: one of `KINDS`.
        tokenizer: the tokenizer of the model.
        sentences: sentences of the running text; they repeat if they are too few.
        length: tokens of the document.
        index: number of the document.
        seed: seed of the document; any value with a string form.
    Raises:
        ValueError: ``length`` is too small for the keys and questions.
    """
    own_seed = f"finetune/{seed}"
    if kind in TASKS:
        example = TASKS[kind].make(tokenizer, sentences, length, index, own_seed)
        return Document(example.tokens, example.needles, example.answers)
    rng = random.Random(f"{own_seed}/{kind}/{length}/{index}")
    if kind in (REPEATS, KEYS_ALONE):
        return _said_again(tokenizer, sentences if kind == REPEATS else (), length, rng)
    if kind != "recall":
        return _asked_at_the_end(tokenizer, sentences, length, rng, kind)
    for keys in (KEYS[kind], *FEWER_KEYS):
        try:
            return recall_document(tokenizer, sentences, length, keys, index, own_seed)
        except ValueError as error:
            no_room = error
    raise no_room


def _said_again(
    tokenizer: Any, sentences: Sequence[str], length: int, rng: random.Random
) -> Document:
    """Return sentences and keys in two orders; in the second all but their starts are answers."""
    begun = leading_tokens(tokenizer)
    half, odd = divmod(length - len(begun), 2)
    pieces: list[tuple[Tokens, Span]] = []
    for piece, labels in _to_be_repeated(tokenizer, sentences, rng):
        room = half - sum(len(each) for each, _ in pieces)
        if len(piece) >= room:
            pieces.append((piece[:room], (0, 0)))
            break
        pieces.append((piece, labels))
    tokens = [*begun, *chain(*(piece for piece, _ in pieces))]
    ends = [*accumulate((len(piece) for piece, _ in pieces), initial=len(begun))]
    needles, answers = [], []
    for which in rng.sample(range(len(pieces)), len(pieces)):
        piece, (start, end) = pieces[which]
        if start < end:
            needles.append((ends[which], ends[which + 1]))
            answers.append((len(tokens) + start, len(tokens) + end))
        tokens.extend(piece)
    if not answers:
        raise ValueError(
            f"length must have room for a key that is said twice, got {length}. Give a larger "
            "length."
        )
    return Document((*tokens, *tokens[-1:] * odd), tuple(needles), tuple(answers))


def _to_be_repeated(
    tokenizer: Any, sentences: Sequence[str], rng: random.Random
) -> Iterator[tuple[Tokens, Span]]:
    """Yield four keys and a sentence in turn: tokens, and the part with labels in the repeat.

    Half of the keys belong to lockers, and all of them once each name has one, because names are
    few. Without ``sentences``, names come first.
    """
    names = iter(rng.sample(NAMES, len(NAMES)))
    for sentence in endless(sentences, rng) if sentences else repeat(None):
        for place in range(4):
            name = next(names, None) if place % 2 or sentence is None else None
            whose = name or f"locker {rng.choice(NUMBERS)}"
            key = Key(f" for {whose}", str(rng.choice(NUMBERS)))
            alone = rng.choice(WORDINGS).format(whose, key.digits) if sentence is None else None
            text = alone or statement(key)
            # the number of a locker may equal its key
            where = span_of(tokenizer, text, key.digits, text.rindex(key.digits))
            yield sentence_tokens(tokenizer, text), where
        if sentence is None:
            continue
        tokens = sentence_tokens(tokenizer, sentence)
        yield tokens, (min(BEGINNING, len(tokens)), len(tokens))


def _asked_at_the_end(
    tokenizer: Any, sentences: Sequence[str], length: int, rng: random.Random, kind: str
) -> Document:
    keys = KEYS[kind]
    drawn_keys = draw_keys(rng, keys, named=keys > 1)
    statements = [sentence_tokens(tokenizer, key.statement) for key in drawn_keys]
    # keys are asked for in this order and stated in any: question, answer, next question
    questions = [QUESTION.format(whose=key.whose) for key in drawn_keys]
    questions[0] = "\n\n".join([instruction(keys), TEXT, questions[0]])
    answered = [f"{ANSWER.format(whose=key.whose)}{key.digits}." for key in drawn_keys]
    turns = chain(*zip(questions, answered, strict=True))
    head, after = around_text(tokenizer, list(turns))
    tail = sentence_tokens(tokenizer, after)

    num_free = length - len(head) - len(tail) - sum(map(len, statements))
    if num_free < 0:
        raise ValueError(
            f"length must have room for the question and {keys} keys, which take "
            f"{length - num_free} tokens, got {length}. Give a larger length."
        )
    text = endless(sentences, rng, drawn_keys if kind == "distractors" else None)
    pieces = cut_to_length((sentence_tokens(tokenizer, sentence) for sentence in text), num_free)
    borders = [rng.randrange(len(pieces) + 1) for _ in statements]
    tokens, needles = with_statements(head, pieces, statements, borders)
    ranges = (span_of(tokenizer, after, key.digits) for key in drawn_keys)
    answers = ((len(tokens) + start, len(tokens) + end) for start, end in ranges)
    return Document((*tokens, *tail), tuple(needles), tuple(answers))
