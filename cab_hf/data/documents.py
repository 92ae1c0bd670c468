"""Documents for one forward pass: running text that states keys, and repeats the keys later.

A document is a function of (tokenizer, sentences, length, keys, seed, index), so that every method
and every run measures the same documents.
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
    """Running text that states keys and repeats the keys later.

    Attributes:
        tokens: all tokens of the document.
        needles: the span of each key's statement, in the order of the text.
        answers: the span of the digits in each key's repetition, in the order of ``needles``.
    """

    tokens: Tokens
    needles: tuple[Span, ...]
    answers: tuple[Span, ...]


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

    Keys are stated at random sentence borders of the first half, and repeated in another order at
    random sentence borders of the second half. A sentence that fills the whole second half is cut,
    so that the required length does not depend on the drawn sentences.

    Args:
        tokenizer: a tokenizer of transformers; its special tokens come first.
        sentences: sentences of the running text, which starts at a random sentence and continues
            with the first sentence after the last.
        length: number of tokens in the document.
        keys: number of keys.
        index: index of the document.
        seed: seed of the document.
        border: the first token of every answer is at a multiple of ``border``. Additional text
            before each repetition moves the answer to this position.

    Raises:
        ValueError: ``keys`` exceeds the number of names, or ``length`` is too small for the keys.
    """
    rng = random.Random(f"{seed}/{length}/{keys}/{index}")
    statements, repetitions, digits = _named_keys(tokenizer, keys, rng)
    head = leading_tokens(tokenizer)
    # tokens of running text in the first half, and in the document without padding
    first_half = length // 2 - len(head) - _total(statements)
    max_padding = keys * (border - 1)
    total = length - len(head) - _total(statements) - _total(repetitions) - max_padding
    pieces = _sentences(tokenizer, sentences, rng, total + max_padding)
    if 0 <= first_half <= total:
        pieces = _with_border(pieces, first_half, total)
    ends = [0, *accumulate(map(len, pieces))]
    borders_of_halves = [
        [index for index, end in enumerate(ends) if end <= first_half],
        [index for index, end in enumerate(ends) if first_half <= end <= total],
    ]
    if not all(borders_of_halves):
        raise ValueError(
            f"length must have room for {keys} keys in both halves, got {length}. Give a larger "
            "length or fewer keys."
        )
    borders = [drawn for half in borders_of_halves for drawn in _draw(rng, half, keys)]
    padding_text = [*chain(*_sentences(tokenizer, sentences, rng, border - 1))]
    digit_starts = [first for first, _ in digits.values()]

    def padding(statement: int, num_tokens: int) -> Sequence[int]:
        """Return tokens that move the digits of a repetition to a multiple of ``border``."""
        if statement < keys:
            return ()
        missing = -(num_tokens + digit_starts[statement - keys]) % border
        # the last tokens, so that the padding ends with a complete sentence
        return padding_text[len(padding_text) - missing :]

    tokens, spans = with_statements(
        head, pieces, statements=[*statements, *repetitions], borders=borders, padding=padding
    )
    return _document(tokens[:length], spans[:keys], spans[keys:], digits)


def asked_document(
    tokenizer: Any,
    sentences: Sequence[str],
    length: int,
    keys: int,
    index: int,
    seed: int | str = 0,
) -> tuple[Document, int]:
    """Build a document that ends with the repetitions of all keys.

    The document starts with a prompt: running text with keys stated at random sentence borders.
    After the prompt comes one sentence per key, in another order.

    Args:
        tokenizer, sentences, length, keys, index, seed: see `recall_document`. ``length`` includes
            the repetitions.

    Returns:
        (document, number of tokens in the prompt).

    Raises:
        ValueError: ``keys`` exceeds the number of names, or ``length`` is too small for the keys.
    """
    rng = random.Random(f"{seed}/asked/{length}/{keys}/{index}")
    statements, repetitions, digits = _named_keys(tokenizer, keys, rng)
    head = leading_tokens(tokenizer)
    prompt_length = length - _total(repetitions)
    num_text = prompt_length - len(head) - _total(statements)
    pieces = _sentences(tokenizer, sentences, rng, num_text)
    ends = [0, *accumulate(map(len, pieces))]
    borders = [index for index, end in enumerate(ends) if end <= num_text]
    if not borders:
        raise ValueError(
            f"length must have room for {keys} keys and {keys} questions, got {length}. Give a "
            "larger length or fewer keys."
        )
    tokens, needles = with_statements(head, pieces, statements, _draw(rng, borders, keys))
    prompt = tokens[:prompt_length]
    tokens, repeated = with_statements(prompt, [], repetitions, [0] * keys)
    return _document(tokens, needles, repeated, digits), prompt_length


def with_copies(
    document: Document, count: int, size: int, seed: int = 0
) -> tuple[Document, tuple[tuple[int, int], ...]]:
    """Copy passages of the first half of a document over text in its second half.

    Passages and copies do not overlap each other, needles or answers.

    Args:
        document: the document.
        count: number of passages.
        size: number of tokens per passage.
        seed: seed of the positions.

    Returns:
        (document with copies, pairs). A pair is (first token of a passage, first token of its
        copy). There are fewer than ``count`` pairs if the document has no free text for more.
    """
    tokens, length = list(document.tokens), len(document.tokens)
    rng = random.Random(f"{seed}/{length}/{count}/{size}")
    # upper bound for the sentence of an answer, whose length the document does not contain
    max_sentence = max(end - start for start, end in document.needles)
    excluded_spans = [
        *document.needles,
        *((end - max_sentence, end + 1) for _, end in document.answers),
    ]

    def draw_free(low: int, high: int) -> int | None:
        """Draw the first token of a free passage in [low, high), and exclude the passage."""
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
        source, target = draw_free(0, length // 2), draw_free(length // 2, length)
        if source is None or target is None:
            break
        tokens[target : target + size] = tokens[source : source + size]
        copies.append((source, target))
    return document._replace(tokens=tuple(tokens)), tuple(copies)


def plain_document(
    tokenizer: Any, sentences: Sequence[str], length: int, index: int, seed: int = 0
) -> Tokens:
    """Return ``length`` tokens of running text without keys; arguments as in `recall_document`."""
    rng = random.Random(f"{seed}/{length}/{index}")
    pieces = _sentences(tokenizer, sentences, rng, length)
    return (*leading_tokens(tokenizer), *chain.from_iterable(pieces))[:length]


def count_tokens(tokenizer: Any, sentences: Sequence[str], limit: int) -> int:
    """Return the number of tokens in ``sentences``; stop counting at ``limit`` tokens or more.

    Documents with more tokens than ``sentences`` repeat sentences.
    """
    total = 0
    for sentence in sentences:
        total += len(sentence_tokens(tokenizer, sentence))
        if total >= limit:
            break
    return total


def _sentences(
    tokenizer: Any, sentences: Sequence[str], rng: random.Random, size: int
) -> list[Tokens]:
    """Return the tokens of consecutive sentences from a random one on, at least ``size`` tokens."""
    pieces, total, iterator = [], 0, endless(sentences, rng)
    while total < size:
        pieces.append(sentence_tokens(tokenizer, next(iterator)))
        total += len(pieces[-1])
    return pieces


def _with_border(pieces: list[Tokens], low: int, high: int) -> list[Tokens]:
    """Return ``pieces`` with a border between two pieces at a token from ``low`` to ``high``.

    If there is no border, the piece that contains the middle is cut in two.
    """
    ends = [0, *accumulate(map(len, pieces))]
    if any(low <= end <= high for end in ends):
        return pieces
    middle = (low + high) // 2
    index = bisect_right(ends, middle) - 1
    piece, cut = pieces[index], middle - ends[index]
    return [*pieces[:index], piece[:cut], piece[cut:], *pieces[index + 1 :]]


def _named_keys(
    tokenizer: Any, keys: int, rng: random.Random
) -> tuple[list[Tokens], list[Tokens], dict[int, Span]]:
    """Draw keys with different names, and an order in which they are repeated.

    Returns:
        (statements, repetitions, digits). ``statements`` has the tokens of each key's statement.
        ``repetitions`` has the tokens of each key's repetition, in another order. ``digits`` maps
        the index of a key to the span of its digits in its repetition, in the order of
        ``repetitions``.

    Raises:
        ValueError: ``keys`` exceeds the number of names.
    """
    drawn_keys = draw_keys(rng, keys)
    order = list(range(keys))
    while keys > 1 and order == sorted(order):
        rng.shuffle(order)
    statements = [sentence_tokens(tokenizer, key.statement) for key in drawn_keys]
    repetitions = [sentence_tokens(tokenizer, drawn_keys[index].repeat) for index in order]
    digits = {
        index: span_of(tokenizer, drawn_keys[index].repeat, drawn_keys[index].digits)
        for index in order
    }
    return statements, repetitions, digits


def _document(
    tokens: Sequence[int],
    needles: Sequence[Span],
    repetitions: Sequence[Span],
    digits: dict[int, Span],
) -> Document:
    """Build a `Document`.

    Args:
        tokens: all tokens.
        needles: the span of each statement.
        repetitions: the span of each repetition, in the order of ``digits``.
        digits: span of the digits in a repetition, by index of the key.
    """
    answers = {
        key: (start + first, start + last)
        for (key, (first, last)), (start, _) in zip(digits.items(), repetitions, strict=True)
    }
    return Document(tuple(tokens), tuple(needles), tuple(answers[key] for key in sorted(answers)))


def _draw(rng: random.Random, borders: Sequence[int], count: int) -> list[int]:
    """Draw ``count`` of ``borders`` in ascending order, with duplicates only if necessary."""
    draw = rng.sample if len(borders) >= count else rng.choices
    return sorted(draw(borders, k=count))


def _total(pieces: Sequence[Tokens]) -> int:
    """Return the number of tokens in all pieces."""
    return sum(map(len, pieces))
