"""Documents to be read in one pass: running text in which keys are named, and named again later.

A document is a function of (tokenizer, sentences, length, keys, seed, index), so that every method
and every run reads the same ones.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from cab_hf.texts.needles import (
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
    """Running text in which keys are stated and, further behind, repeated."""

    tokens: Tokens
    needles: tuple[Span, ...]  # what states each key, in the order of the text
    answers: tuple[Span, ...]  # the digits of each key where it is repeated, keys as in `needles`


def recall_document(
    tokenizer: Any,
    sentences: Sequence[str],
    length: int,
    keys: int,
    index: int,
    seed: int | str = 0,
    border: int = 1,
) -> Document:
    """A document of ``length`` tokens with ``keys`` keys, each of another name.

    The keys are stated at random sentence borders of the first half, and repeated in another order
    at random ones of the second. Where one sentence is all of the second half it is cut: whether
    there is room does not depend on which sentences the seed has drawn.

    Args:
        tokenizer: of transformers; special tokens it puts before a text are the first ones.
        sentences: of the running text, which starts at one of the document's own and wraps round.
        index: number of the document.
        border: of which the place of every answer is a multiple; more text precedes it then.
    Raises:
        ValueError: ``keys`` is more than there are names, or ``length`` has no room for them.
    """
    rng = random.Random(f"{seed}/{length}/{keys}/{index}")
    stated, repeated, digits = _named_keys(tokenizer, keys, rng)
    begun = leading_tokens(tokenizer)
    # of running text: how much the first half has room for, and how much the document
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
            f"length {length} has no room for {keys} keys in both halves; give a longer one or "
            "fewer keys."
        )
    borders = [at for half in halves for at in _drawn(rng, half, keys)]
    more = [*chain(*_text(tokenizer, sentences, rng, border - 1))]

    begins = [first for first, _ in digits.values()]

    def before(which: int, at: int) -> Sequence[int]:
        missing = -(at + begins[which - keys]) % border if which >= keys else 0
        # what ends a sentence
        return more[len(more) - missing :]

    tokens, spans = with_statements(begun, pieces, [*stated, *repeated], borders, before)
    return _document(tokens[:length], spans[:keys], spans[keys:], digits)


def asked_document(
    tokenizer: Any,
    sentences: Sequence[str],
    length: int,
    keys: int,
    index: int,
    seed: int | str = 0,
) -> tuple[Document, int]:
    """A document whose end repeats all keys, and how many of its tokens precede that end.

    The tokens before it are a prompt: running text with keys stated at random sentence borders.
    Behind it there is one sentence a key, in another order, and nothing else.

    Args:
        length: in tokens, of all together; the others as of `recall_document`.
    Raises:
        ValueError: ``keys`` is more than there are names, or ``length`` has no room for them.
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
            f"length {length} has no room for {keys} keys and as many questions behind them; give "
            "a longer one or fewer keys."
        )
    tokens, needed = with_statements(begun, pieces, stated, _drawn(rng, borders, keys))
    tokens, asking = with_statements(tokens[:prompt], [], repeated, [0] * keys)
    return _document(tokens, needed, asking, digits), prompt


def with_copies(
    document: Document, count: int, size: int, seed: int = 0
) -> tuple[Document, tuple[tuple[int, int], ...]]:
    """The document with passages of its first half copied into its second, and where.

    A copy takes the place of what was there, and leaves out needles and answers. Each pair is
    (start of the passage, start of its copy), ``size`` tokens long both; there are ``count`` of
    them, or as many as there is room for.
    """
    tokens, length = list(document.tokens), len(document.tokens)
    rng = random.Random(f"{seed}/{length}/{count}/{size}")
    # a statement is no longer than the longest needle
    room = max(end - start for start, end in document.needles)
    taken = [*document.needles, *((end - room, end + 1) for _, end in document.answers)]

    def free(low: int, high: int) -> int | None:
        starts = [
            start
            for start in range(low, high - size)
            if all(end <= start or start + size <= begin for begin, end in taken)
        ]
        if not starts:
            return None
        start = rng.choice(starts)
        taken.append((start, start + size))
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
    """The first ``length`` tokens of running text and nothing else; see `recall_document`."""
    rng = random.Random(f"{seed}/{length}/{index}")
    begun = leading_tokens(tokenizer)
    pieces = _text(tokenizer, sentences, rng, length)
    return tuple(chain(begun, *pieces))[:length]


def least_tokens(tokenizer: Any, sentences: Sequence[str], most: int) -> int:
    """The tokens of ``sentences``, counted until they are ``most``: more text than that repeats."""
    total = 0
    for sentence in sentences:
        total += len(sentence_tokens(tokenizer, sentence))
        if total >= most:
            break
    return total


def _text(tokenizer: Any, sentences: Sequence[str], rng: random.Random, size: int) -> list[Tokens]:
    """Sentences of at least ``size`` tokens from a drawn one on, round and round."""
    pieces, total, text = [], 0, endless(sentences, rng)
    while total < size:
        pieces.append(sentence_tokens(tokenizer, next(text)))
        total += len(pieces[-1])
    return pieces


def _with_border(pieces: list[Tokens], low: int, high: int) -> list[Tokens]:
    """The same tokens with a border between two places, for which a long sentence is cut in two."""
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
    """Keys of different names: (what states each, what repeats each, digits).

    The keys are repeated in another order, which is that of ``digits``: by the number of the key,
    which tokens of its repeat are the digits.

    Raises:
        ValueError: ``keys`` is more than there are names.
    """
    drawn = draw_keys(rng, keys)
    order = list(range(keys))
    while keys > 1 and order == sorted(order):
        rng.shuffle(order)
    stated = [sentence_tokens(tokenizer, key.statement) for key in drawn]
    repeated = [sentence_tokens(tokenizer, drawn[at].repeat) for at in order]
    digits = {at: span_of(tokenizer, drawn[at].repeat, drawn[at].digits) for at in order}
    return stated, repeated, digits


def _document(
    tokens: Sequence[int], needles: Sequence[Span], repeats: Sequence[Span], digits: dict[int, Span]
) -> Document:
    """The document in which keys are stated and, in the order of ``digits``, repeated."""
    answers = {
        key: (start + first, start + last)
        for (key, (first, last)), (start, _) in zip(digits.items(), repeats, strict=True)
    }
    return Document(tuple(tokens), tuple(needles), tuple(answers[key] for key in sorted(answers)))


def _drawn(rng: random.Random, borders: Sequence[int], count: int) -> list[int]:
    """``count`` of ``borders``, ascending; some several times only where there are too few."""
    draw = rng.sample if len(borders) >= count else rng.choices
    return sorted(draw(borders, k=count))


def _total(pieces: Sequence[Tokens]) -> int:
    return sum(map(len, pieces))
