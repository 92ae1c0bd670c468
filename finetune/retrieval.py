"""Documents that a model learns retrieval from: keys hidden in running text and asked for again.

They are worded as those of the evaluations, and none is the same: seeds of evaluations begin with a
whole number, and seeds of these documents with ``finetune/``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

from cab_hf.finetune.settings import suggestion
from cab_hf.runs.settings import UsageError
from cab_hf.texts.documents import Document, recall_document
from cab_hf.texts.needles import (
    ANSWER,
    NAMES,
    NUMBERS,
    QUESTION,
    TEXT,
    Key,
    Span,
    Tokens,
    around_text,
    draw_keys,
    endless,
    fitted,
    instruction,
    leading_tokens,
    sentence_tokens,
    span_of,
    with_statements,
)
from cab_hf.texts.tasks import TASKS, statement

PREFIX = "retrieval"
# how many keys a document has: one asked for at the end, without and with other numbers in the
# text; several, asked for one after the other; and several that running text repeats
KEYS = {"passkey": 1, "distractors": 1, "multi": 4, "recall": 12}
# of recall, where a document is too short for all
FEWER_KEYS = (6, 3)
# sentences and keys that are all said again, in another order, and keys alone: a document has
# thousands of answers, where those above have a few
REPEATS, KEYS_ALONE = "repeats", "keys"
# of keys alone: the nearer a key is to its name, the sooner a model finds it
WORDINGS = ("{} {}.", "{} is {}.", "The pass key for {} is {}.")
BEGINNING = 3  # tokens of a repeated sentence that are given, to identify it
KINDS = (*KEYS, REPEATS, KEYS_ALONE, *TASKS)


def is_entry(name: str) -> bool:
    """Whether a source named so is synthetic."""
    return name.partition(":")[0] == PREFIX


def parse_entry(name: str) -> tuple[tuple[str, ...], int | None]:
    """(kinds, tokens of a document) of ``retrieval:KIND+KIND:LENGTH``; None without ``:LENGTH``.

    Raises:
        UsageError: a kind is none, or the length no number of tokens.
    """
    _, kinds, length, *others = [*name.split(":"), "", ""]
    if any(others) or not (length.isdecimal() and int(length) or not length):
        raise UsageError(
            f"{PREFIX} must be {PREFIX}:KINDS:LENGTH, the length a number of tokens; got {name!r}."
        )
    for kind in kinds.split("+"):
        if kind not in KINDS:
            hint = suggestion(kind, KINDS)
            raise UsageError(f"{PREFIX} has no kind {kind!r} in {name!r}; {hint}")
    return tuple(kinds.split("+")), int(length) if length else None


def retrieval_document(
    kind: str, tokenizer: Any, sentences: Sequence[str], length: int, index: int, seed: Any = 0
) -> Document:
    """A document of ``length`` tokens that asks for what its text has hidden.

    Args:
        kind: of `KINDS`.
        sentences: of the running text; they go round where they are too few.
        index: number of the document.
        seed: of all that is drawn; anything that has a text of its own.
    Raises:
        ValueError: ``length`` has no room for the keys and questions.
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
    """Sentences and keys in two orders; the second time all but their beginnings are answers."""
    begun = leading_tokens(tokenizer)
    half, odd = divmod(length - len(begun), 2)
    pieces: list[tuple[Tokens, Span]] = []
    for piece, learnt in _to_be_repeated(tokenizer, sentences, rng):
        room = half - sum(len(each) for each, _ in pieces)
        if len(piece) >= room:
            pieces.append((piece[:room], (0, 0)))
            break
        pieces.append((piece, learnt))
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
        raise ValueError(f"length {length} has no room for a key said twice; give a longer one.")
    return Document((*tokens, *tokens[-1:] * odd), tuple(needles), tuple(answers))


def _to_be_repeated(
    tokenizer: Any, sentences: Sequence[str], rng: random.Random
) -> Iterator[tuple[Tokens, Span]]:
    """Without end four keys and a sentence: tokens, and which of them are learnt the second time.

    Half of the keys are of lockers, and all once each name has one: names are few. Where there are
    no ``sentences``, names come first.
    """
    names = iter(rng.sample(NAMES, len(NAMES)))
    for sentence in endless(sentences, rng) if sentences else repeat(None):
        for place in range(4):
            name = next(names, None) if place % 2 or sentence is None else None
            whose = name or f"locker {rng.choice(NUMBERS)}"
            key = Key(f" for {whose}", str(rng.choice(NUMBERS)))
            alone = rng.choice(WORDINGS).format(whose, key.digits) if sentence is None else None
            text = alone or statement(key)
            # a locker may have the number that its key has
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
    drawn = draw_keys(rng, keys, named=keys > 1)
    statements = [sentence_tokens(tokenizer, key.statement) for key in drawn]
    # keys are asked for in this order and stated in any: question, answer, next question
    questions = [QUESTION.format(whose=key.whose) for key in drawn]
    questions[0] = "\n\n".join([instruction(keys), TEXT, questions[0]])
    answered = [f"{ANSWER.format(whose=key.whose)}{key.digits}." for key in drawn]
    turns = chain(*zip(questions, answered, strict=True))
    head, after = around_text(tokenizer, list(turns))
    tail = sentence_tokens(tokenizer, after)

    room = length - len(head) - len(tail) - sum(map(len, statements))
    if room < 0:
        raise ValueError(
            f"length {length} has no room for the question and {keys} keys, which take "
            f"{length - room} tokens; give a longer one."
        )
    text = endless(sentences, rng, drawn if kind == "distractors" else None)
    pieces = fitted((sentence_tokens(tokenizer, sentence) for sentence in text), room)
    borders = [rng.randrange(len(pieces) + 1) for _ in statements]
    tokens, needles = with_statements(head, pieces, statements, borders)
    spans = (span_of(tokenizer, after, key.digits) for key in drawn)
    answers = ((len(tokens) + start, len(tokens) + end) for start, end in spans)
    return Document((*tokens, *tail), tuple(needles), tuple(answers))
