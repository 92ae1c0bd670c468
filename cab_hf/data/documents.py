"""Documents for one forward pass: filler text that states numbers (keys) and repeats them later.

A document depends only on (tokenizer, sentences, length, keys, seed, index), so that every method
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
    """A document of filler text that states keys and repeats the same keys later.

    Attributes:
        tokens: all tokens of the document.
        needles: for each key, the span of the sentences that state the key, in order of position.
        answers: for each key, the span of its digits in the sentence that repeats the key, in the
            order of ``needles``.
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

    Keys are stated between sentences of the first half, and repeated in another order between
    sentences of the second half; the positions are random. If the second half starts inside a
    sentence without a later sentence border, this sentence is cut in two. Hence the minimum length
    does not depend on the drawn sentences.

    Args:
        tokenizer: a tokenizer of transformers; its special tokens come first.
        sentences: sentences of the filler text, which starts at a random sentence and continues
            with the first sentence after the last.
        length: number of tokens in the document.
        keys: number of keys.
        index: index of the document. Each index has other keys and another first sentence.
        seed: seed of the random generator, in addition to ``length``, ``keys`` and ``index``.
        border: the position of the first token of every answer is a multiple of ``border``.
            Filler text before each repetition moves the answer to this position.

    Raises:
        ValueError: ``keys`` exceeds the number of names, or ``length`` is too small for the keys.
    """
    rng = random.Random(f"{seed}/{length}/{keys}/{index}")
    statements, repetitions, digits = _named_keys(tokenizer, keys, rng)
    head = leading_tokens(tokenizer)
    # number of filler tokens in the first half, and in the document without padding before answers
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
        """Return the filler tokens to insert before a statement or repetition.

        They move the digits of a repetition to a multiple of ``border``. Statements need none.

        Args:
            statement: index in ``[*statements, *repetitions]``.
            num_tokens: number of tokens before the statement.
        """
        if statement < keys:
            return ()
        missing = -(num_tokens + digit_starts[statement - keys]) % border
        # the last tokens of the filler text, so that the padding ends with a complete sentence
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

    The document starts with a prompt: filler text with the statements of keys at random sentence
    borders. After the prompt, one sentence per key repeats the key. The order of the repetitions
    differs from the order of the statements.

    Args:
        tokenizer, sentences, length, keys, index, seed: see `recall_document`. ``length`` includes
            the repetitions.

    Returns:
        document: the document.
        prompt_length: number of tokens in the prompt.

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
    """Replace filler tokens in the second half of a document by passages of its first half.

    Passages and copies overlap neither each other, nor needles, nor answers.

    Args:
        document: the document.
        count: number of passages.
        size: number of tokens per passage.
        seed: seed of the random positions of passages and copies.

    Returns:
        document: the document with copies.
        copies: a pair for each passage: index of its first token, and index of the first token of
            its copy. There are fewer than ``count`` pairs if no tokens are left for more.
    """
    tokens, length = list(document.tokens), len(document.tokens)
    rng = random.Random(f"{seed}/{length}/{count}/{size}")
    # the document does not contain the length of the sentence around an answer; the longest
    # statement is an upper bound
    max_sentence = max(end - start for start, end in document.needles)
    excluded_spans = [
        *document.needles,
        *((end - max_sentence, end + 1) for _, end in document.answers),
    ]

    def draw_free(low: int, high: int) -> int | None:
        """Return a random start of ``size`` tokens outside ``excluded_spans``; None if none exists.

        The passage starts and ends in [low, high), and is added to ``excluded_spans``.
        """
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
    """Return ``length`` tokens of filler text without keys; arguments as in `recall_document`."""
    rng = random.Random(f"{seed}/{length}/{index}")
    pieces = _sentences(tokenizer, sentences, rng, length)
    return (*leading_tokens(tokenizer), *chain.from_iterable(pieces))[:length]


def count_tokens(tokenizer: Any, sentences: Sequence[str], limit: int) -> int:
    """Return the number of tokens in ``sentences``, counted until ``limit`` is reached.

    A result below ``limit`` means that documents of ``limit`` tokens repeat sentences.
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
    """Return the tokens of each of the fewest consecutive sentences with ``size`` tokens in total.

    The first sentence is random. The last sentence may exceed ``size``.
    """
    pieces, total, iterator = [], 0, endless(sentences, rng)
    while total < size:
        pieces.append(sentence_tokens(tokenizer, next(iterator)))
        total += len(pieces[-1])
    return pieces


def _with_border(pieces: list[Tokens], low: int, high: int) -> list[Tokens]:
    """Return ``pieces`` such that a piece starts or ends at a position in [low, high].

    If no piece does, the piece that contains the middle of the interval is cut in two there.

    Args:
        pieces: tokens of consecutive pieces, such as sentences.
        low, high: positions in tokens from the start of the first piece.
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
    """Draw keys with different names, and a random order in which the keys are repeated.

    Returns:
        statements: for each key, the tokens of the sentences that state the key.
        repetitions: tokens of the sentences that repeat the keys, in another order.
        digits: dict from the index of a key in ``statements`` to the span of its digits inside its
            repetition. The dict has the order of ``repetitions``.

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
    """Return a `Document` whose answers are the spans of the digits inside the repetitions.

    Args:
        tokens: all tokens of the document.
        needles: for each key, the span in ``tokens`` of the sentence that states the key.
        repetitions: for each item of ``digits``, the span of the sentence that repeats the key.
        digits: index of a key in ``needles`` -> span of the digits of the key, relative to the
            start of the sentence that repeats the key.
    """
    answers = {
        key: (start + first, start + last)
        for (key, (first, last)), (start, _) in zip(digits.items(), repetitions, strict=True)
    }
    return Document(tuple(tokens), tuple(needles), tuple(answers[key] for key in sorted(answers)))


def _draw(rng: random.Random, borders: Sequence[int], count: int) -> list[int]:
    """Return ``count`` random items of ``borders``, sorted.

    Items repeat only if ``borders`` has fewer than ``count`` items.
    """
    draw = rng.sample if len(borders) >= count else rng.choices
    return sorted(draw(borders, k=count))


def _total(pieces: Sequence[Tokens]) -> int:
    """Return the number of tokens in all pieces."""
    return sum(map(len, pieces))
