"""Documents for one forward pass: running text that states keys and repeats them later.

A document is a function of (tokenizer, sentences, length, keys, seed, index), so that every method
and every run reads the same documents.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from cab_hf.data.needles import (
    Span,
    Tokens,
    draw_keys,
    endless,
    leading_tokens,
    sentence_tokens,
    span_of,
    with_statements,
)


class Document(NamedTuple):
    """Running text in which keys are stated and later repeated."""

    tokens: Tokens
    needles: tuple[Span, ...]  # the statement of each key, in the order of the text
    answers: tuple[Span, ...]  # the digits of each repeated key, in the order of `needles`


def recall_document(
    tokenizer: Any,
    sentences: Sequence[str],
    length: int,
    keys: int,
    index: int,
    seed: int | str = 0,
    border: int = 1,
) -> Document:
    """Build a document of ``length`` tokens with ``keys`` keys, each with a different name.

    The keys are stated at random sentence borders of the first half, and repeated in another order
    at random sentence borders of the second half. A sentence that fills the whole second half is
    cut, so that the required length does not depend on the drawn sentences.

    Args:
        tokenizer: a tokenizer of transformers; its special tokens come first.
        sentences: sentences of the running text, which starts at a drawn sentence and wraps around.
        length: tokens of the document.
        keys: number of keys.
        index: number of the document.
        seed: seed of the document.
        border: the position of every answer is a multiple of it; more text precedes answers then.
    Raises:
        ValueError: ``keys`` exceeds the number of names, or ``length`` is too small for them.
    """
    rng = random.Random(f"{seed}/{length}/{keys}/{index}")
    stated, repeated, digits = _named_keys(tokenizer, keys, rng)
    begun = leading_tokens(tokenizer)
    # tokens of running text that fit into the first half, and into the document
    early = length // 2 - len(begun) - _total(stated)
    moved = keys * (border - 1)
    late = length - len(begun) - _total(stated) - _total(repeated) - moved
    pieces = _text(tokenizer, sentences, rng, late + moved)
    if 0 <= early <= late:
        pieces = _with_border(pieces, early, late)
    ends = [0, *accumulate(map(len, pieces))]
    halves = [
        [at for at, end in enumerate(ends) if end <= early],
        [at for at, end in enumerate(ends) if early <= end <= late],
    ]
    if not all(halves):
        raise ValueError(
            f"length must have room for {keys} keys in both halves, got {length}. Give a larger "
            "length or fewer keys."
        )
    borders = [at for half in halves for at in _drawn(rng, half, keys)]
    more = [*chain(*_text(tokenizer, sentences, rng, border - 1))]

    begins = [first for first, _ in digits.values()]

    def before(which: int, at: int) -> Sequence[int]:
        missing = -(at + begins[which - keys]) % border if which >= keys else 0
        # the tokens that end a sentence
        return more[len(more) - missing :]

    tokens, ranges = with_statements(begun, pieces, [*stated, *repeated], borders, before)
    return _document(tokens[:length], ranges[:keys], ranges[keys:], digits)


def asked_document(
    tokenizer: Any,
    sentences: Sequence[str],
    length: int,
    keys: int,
    index: int,
    seed: int | str = 0,
) -> tuple[Document, int]:
    """Build a document whose end repeats all keys; return it with the length of its prompt.

    The prompt is running text with keys stated at random sentence borders. After the prompt comes
    one sentence per key, in another order, and nothing else.

    Args:
        length: tokens of the whole document; other arguments as in `recall_document`.
    Raises:
        ValueError: ``keys`` exceeds the number of names, or ``length`` is too small for them.
    """
    rng = random.Random(f"{seed}/asked/{length}/{keys}/{index}")
    stated, repeated, digits = _named_keys(tokenizer, keys, rng)
    begun = leading_tokens(tokenizer)
    prompt = length - _total(repeated)
    text = prompt - len(begun) - _total(stated)
    pieces = _text(tokenizer, sentences, rng, text)
    borders = [at for at, end in enumerate([0, *accumulate(map(len, pieces))]) if end <= text]
    if not borders:
        raise ValueError(
            f"length must have room for {keys} keys and {keys} questions, got {length}. Give a "
            "larger length or fewer keys."
        )
    tokens, needed = with_statements(begun, pieces, stated, _drawn(rng, borders, keys))
    tokens, asking = with_statements(tokens[:prompt], [], repeated, [0] * keys)
    return _document(tokens, needed, asking, digits), prompt


def with_copies(
    document: Document, count: int, size: int, seed: int = 0
) -> tuple[Document, tuple[tuple[int, int], ...]]:
    """Copy passages of the first half of a document into its second half.

    A copy replaces the text at its place, and avoids needles and answers. Each returned pair is
    (start of the passage, start of its copy), both ``size`` tokens long. Fewer than ``count`` pairs
    are returned if the document has no room for more.
    """
    tokens, length = list(document.tokens), len(document.tokens)
    rng = random.Random(f"{seed}/{length}/{count}/{size}")
    # a statement is at most as long as the longest needle
    room = max(end - start for start, end in document.needles)
    excluded_spans = [*document.needles, *((end - room, end + 1) for _, end in document.answers)]

    def free(low: int, high: int) -> int | None:
        starts = [
            start
            for start in range(low, high - size)
            if all(end <= start or start + size <= begin for begin, end in excluded_spans)
        ]
        if not starts:
            return None
        start = rng.choice(starts)
        excluded_spans.append((start, start + size))
        return start

    copies = []
    for _ in range(count):
        source, target = free(0, length // 2), free(length // 2, length)
        if source is None or target is None:
            break
        tokens[target : target + size] = tokens[source : source + size]
        copies.append((source, target))
    return document._replace(tokens=tuple(tokens)), tuple(copies)


def plain_document(
    tokenizer: Any, sentences: Sequence[str], length: int, index: int, seed: int = 0
) -> Tokens:
    """Return the first ``length`` tokens of running text without keys; see `recall_document`."""
    rng = random.Random(f"{seed}/{length}/{index}")
    begun = leading_tokens(tokenizer)
    pieces = _text(tokenizer, sentences, rng, length)
    return tuple(chain(begun, *pieces))[:length]


def count_tokens(tokenizer: Any, sentences: Sequence[str], most: int) -> int:
    """Count the tokens of ``sentences`` up to ``most``: longer documents repeat sentences."""
    total = 0
    for sentence in sentences:
        total += len(sentence_tokens(tokenizer, sentence))
        if total >= most:
            break
    return total


def _text(tokenizer: Any, sentences: Sequence[str], rng: random.Random, size: int) -> list[Tokens]:
    """Return sentences of at least ``size`` tokens, from a drawn sentence on, wrapping around."""
    pieces, total, text = [], 0, endless(sentences, rng)
    while total < size:
        pieces.append(sentence_tokens(tokenizer, next(text)))
        total += len(pieces[-1])
    return pieces


def _with_border(pieces: list[Tokens], low: int, high: int) -> list[Tokens]:
    """Return the same tokens with a border between two places; a long sentence is cut in two."""
    ends = [0, *accumulate(map(len, pieces))]
    if any(low <= end <= high for end in ends):
        return pieces
    cut = (low + high) // 2
    at = bisect_right(ends, cut) - 1
    sentence, place = pieces[at], cut - ends[at]
    return [*pieces[:at], sentence[:place], sentence[place:], *pieces[at + 1 :]]


def _named_keys(
    tokenizer: Any, keys: int, rng: random.Random
) -> tuple[list[Tokens], list[Tokens], dict[int, Span]]:
    """Draw keys with different names: (statement of each, repeat of each, digits).

    The repeats are in another order, the order of ``digits``. ``digits`` maps the number of a key
    to the tokens of its repeat that are digits.

    Raises:
        ValueError: ``keys`` exceeds the number of names.
    """
    drawn_keys = draw_keys(rng, keys)
    order = list(range(keys))
    while keys > 1 and order == sorted(order):
        rng.shuffle(order)
    stated = [sentence_tokens(tokenizer, key.statement) for key in drawn_keys]
    repeated = [sentence_tokens(tokenizer, drawn_keys[at].repeat) for at in order]
    digits = {at: span_of(tokenizer, drawn_keys[at].repeat, drawn_keys[at].digits) for at in order}
    return stated, repeated, digits


def _document(
    tokens: Sequence[int], needles: Sequence[Span], repeats: Sequence[Span], digits: dict[int, Span]
) -> Document:
    """Build the document that states keys and repeats them in the order of ``digits``."""
    answers = {
        key: (start + first, start + last)
        for (key, (first, last)), (start, _) in zip(digits.items(), repeats, strict=True)
    }
    return Document(tuple(tokens), tuple(needles), tuple(answers[key] for key in sorted(answers)))


def _drawn(rng: random.Random, borders: Sequence[int], count: int) -> list[int]:
    """Draw ``count`` of ``borders``, ascending, with duplicates only if there are too few."""
    draw = rng.sample if len(borders) >= count else rng.choices
    return sorted(draw(borders, k=count))


def _total(pieces: Sequence[Tokens]) -> int:
    return sum(map(len, pieces))
