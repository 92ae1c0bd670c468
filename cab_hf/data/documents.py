"""Documents for one forward pass: filler text that states passkeys (numbers) and repeats them.

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
    cycle_sentences,
    draw_keys,
    find_span,
    insert_statements,
    leading_tokens,
    sentence_tokens,
)


class Document(NamedTuple):
    """A document of filler text that states passkeys and repeats the same passkeys later.

    A passkey is a number of five digits.

    Attributes:
        tokens: all tokens of the document.
        needles: for each passkey, the span of the sentences that state the passkey, in order of
            position.
        answers: for each passkey, the span of its digits in the sentence that repeats the passkey,
            in the order of ``needles``.
    """

    tokens: Tokens
    needles: tuple[Span, ...]
    answers: tuple[Span, ...]


def make_recall_document(
    tokenizer: Any,
    sentences: Sequence[str],
    length: int,
    keys: int,
    index: int,
    seed: int | str = 0,
    border: int = 1,
) -> Document:
    """Build a document of ``length`` tokens with ``keys`` passkeys, each with a different name.

    Passkeys are stated between sentences of the first half, and repeated in another order between
    sentences of the second half; the positions are random. If the second half starts inside a
    sentence without a later sentence border, this sentence is cut in two. Hence the minimum length
    does not depend on the drawn sentences.

    Args:
        tokenizer: a tokenizer of transformers; its special tokens come first.
        sentences: sentences of the filler text, which starts at a random sentence and continues
            with the first sentence after the last.
        length: number of tokens in the document.
        keys: number of passkeys.
        index: index of the document. Each index has other passkeys and another first sentence.
        seed: seed of the random generator, in addition to ``length``, ``keys`` and ``index``.
        border: the position of the first token of every answer is a multiple of ``border``.
            Filler text before each repetition moves the answer to this position.

    Raises:
        ValueError: ``keys`` exceeds the number of names, or ``length`` is too small for the
            passkeys.
    """
    rng = random.Random(f"{seed}/{length}/{keys}/{index}")
    statements, repetitions, digit_spans = _draw_named_keys(tokenizer, keys, rng)
    prefix = leading_tokens(tokenizer)
    # number of filler tokens in the first half, and in the document without padding before answers
    num_first_half = length // 2 - len(prefix) - _total_tokens(statements)
    max_padding = keys * (border - 1)
    num_filler = (
        length - len(prefix) - _total_tokens(statements) - _total_tokens(repetitions) - max_padding
    )
    pieces = _draw_sentences(tokenizer, sentences, rng, num_filler + max_padding)
    if 0 <= num_first_half <= num_filler:
        pieces = _cut_at_border(pieces, num_first_half, num_filler)
    piece_ends = [0, *accumulate(map(len, pieces))]
    borders_of_halves = [
        [index for index, end in enumerate(piece_ends) if end <= num_first_half],
        [index for index, end in enumerate(piece_ends) if num_first_half <= end <= num_filler],
    ]
    if not all(borders_of_halves):
        raise ValueError(
            f"length must have room for {keys} keys in both halves, got {length}. Give a larger "
            "length or fewer keys."
        )
    borders = [drawn for half in borders_of_halves for drawn in _draw_borders(rng, half, keys)]
    padding_tokens = [*chain(*_draw_sentences(tokenizer, sentences, rng, border - 1))]
    digit_starts = [first for first, _ in digit_spans.values()]

    def make_padding(statement_index: int, num_tokens: int) -> Sequence[int]:
        """Return the filler tokens to insert before a statement or repetition.

        They move the digits of a repetition to a multiple of ``border``. Statements need none.

        Args:
            statement_index: index in ``[*statements, *repetitions]``.
            num_tokens: number of tokens before the statement.
        """
        if statement_index < keys:
            return ()
        num_padding = -(num_tokens + digit_starts[statement_index - keys]) % border
        # the last tokens of the filler text, so that the padding ends with a complete sentence
        return padding_tokens[len(padding_tokens) - num_padding :]

    tokens, spans = insert_statements(
        prefix,
        pieces,
        statements=[*statements, *repetitions],
        borders=borders,
        make_padding=make_padding,
    )
    return _make_document(tokens[:length], spans[:keys], spans[keys:], digit_spans)


def make_asked_document(
    tokenizer: Any,
    sentences: Sequence[str],
    length: int,
    keys: int,
    index: int,
    seed: int | str = 0,
) -> tuple[Document, int]:
    """Build a document that ends with the repetitions of all passkeys.

    The document starts with a prompt: filler text with the statements of passkeys at random
    sentence borders. After the prompt, one sentence per passkey repeats the passkey. The order of
    the repetitions differs from the order of the statements.

    Args:
        tokenizer, sentences, length, keys, index, seed: see `make_recall_document`. ``length``
            includes the repetitions.

    Returns:
        document: the document.
        prompt_length: number of tokens in the prompt.

    Raises:
        ValueError: ``keys`` exceeds the number of names, or ``length`` is too small for the
            passkeys.
    """
    rng = random.Random(f"{seed}/asked/{length}/{keys}/{index}")
    statements, repetitions, digit_spans = _draw_named_keys(tokenizer, keys, rng)
    prefix = leading_tokens(tokenizer)
    prompt_length = length - _total_tokens(repetitions)
    num_filler = prompt_length - len(prefix) - _total_tokens(statements)
    pieces = _draw_sentences(tokenizer, sentences, rng, num_filler)
    piece_ends = [0, *accumulate(map(len, pieces))]
    borders = [index for index, end in enumerate(piece_ends) if end <= num_filler]
    if not borders:
        raise ValueError(
            f"length must have room for {keys} keys and {keys} questions, got {length}. Give a "
            "larger length or fewer keys."
        )
    tokens, needles = insert_statements(
        prefix, pieces, statements, _draw_borders(rng, borders, keys)
    )
    prompt = tokens[:prompt_length]
    tokens, repetition_spans = insert_statements(prompt, [], repetitions, [0] * keys)
    return _make_document(tokens, needles, repetition_spans, digit_spans), prompt_length


def insert_copies(
    document: Document, num_passages: int, passage_tokens: int, seed: int = 0
) -> tuple[Document, tuple[tuple[int, int], ...]]:
    """Replace filler tokens in the second half of a document by passages of its first half.

    Passages and copies overlap neither each other, nor needles, nor answers.

    Args:
        document: the document.
        num_passages: number of passages.
        passage_tokens: number of tokens per passage.
        seed: seed of the random positions of passages and copies.

    Returns:
        document: the document with copies.
        copies: a pair for each passage: index of its first token, and index of the first token of
            its copy. There are fewer than ``num_passages`` pairs if no tokens are left for more.
    """
    tokens, length = list(document.tokens), len(document.tokens)
    rng = random.Random(f"{seed}/{length}/{num_passages}/{passage_tokens}")
    # the document does not contain the length of the sentence around an answer; the longest
    # statement is an upper bound
    max_sentence_tokens = max(end - start for start, end in document.needles)
    excluded_spans = [
        *document.needles,
        *((end - max_sentence_tokens, end + 1) for _, end in document.answers),
    ]

    def draw_free_start(low: int, high: int) -> int | None:
        """Return a random start of a passage outside ``excluded_spans``; None if none exists.

        The passage starts and ends in [low, high), and is added to ``excluded_spans``.
        """
        starts = [
            start
            for start in range(low, high - passage_tokens)
            if all(end <= start or start + passage_tokens <= begin for begin, end in excluded_spans)
        ]
        if not starts:
            return None
        start = rng.choice(starts)
        excluded_spans.append((start, start + passage_tokens))
        return start

    copies = []
    for _ in range(num_passages):
        passage_start, copy_start = (
            draw_free_start(0, length // 2),
            draw_free_start(length // 2, length),
        )
        if passage_start is None or copy_start is None:
            break
        tokens[copy_start : copy_start + passage_tokens] = tokens[
            passage_start : passage_start + passage_tokens
        ]
        copies.append((passage_start, copy_start))
    return document._replace(tokens=tuple(tokens)), tuple(copies)


def make_plain_document(
    tokenizer: Any, sentences: Sequence[str], length: int, index: int, seed: int = 0
) -> Tokens:
    """Return ``length`` tokens of filler text without passkeys.

    Arguments as in `make_recall_document`.
    """
    rng = random.Random(f"{seed}/{length}/{index}")
    pieces = _draw_sentences(tokenizer, sentences, rng, length)
    return (*leading_tokens(tokenizer), *chain.from_iterable(pieces))[:length]


def count_tokens(tokenizer: Any, sentences: Sequence[str], max_tokens: int) -> int:
    """Return the number of tokens in ``sentences``, counted until ``max_tokens`` is reached.

    A result below ``max_tokens`` means that documents of ``max_tokens`` tokens repeat sentences.
    """
    num_tokens = 0
    for sentence in sentences:
        num_tokens += len(sentence_tokens(tokenizer, sentence))
        if num_tokens >= max_tokens:
            break
    return num_tokens


def _draw_sentences(
    tokenizer: Any, sentences: Sequence[str], rng: random.Random, num_tokens: int
) -> list[Tokens]:
    """Return the tokens of each of the fewest sentences with ``num_tokens`` tokens in total.

    The sentences are consecutive, and the first one is random. Their number of tokens may exceed
    ``num_tokens``.
    """
    pieces, num_drawn, sentence_iterator = [], 0, cycle_sentences(sentences, rng)
    while num_drawn < num_tokens:
        pieces.append(sentence_tokens(tokenizer, next(sentence_iterator)))
        num_drawn += len(pieces[-1])
    return pieces


def _cut_at_border(pieces: list[Tokens], low: int, high: int) -> list[Tokens]:
    """Return ``pieces`` such that a piece starts or ends at a position in [low, high].

    If no piece does, the piece that contains the middle of the interval is cut in two there.

    Args:
        pieces: tokens of consecutive pieces, such as sentences.
        low, high: positions in tokens from the start of the first piece.
    """
    piece_ends = [0, *accumulate(map(len, pieces))]
    if any(low <= end <= high for end in piece_ends):
        return pieces
    middle = (low + high) // 2
    index = bisect_right(piece_ends, middle) - 1
    cut_piece, cut_offset = pieces[index], middle - piece_ends[index]
    return [*pieces[:index], cut_piece[:cut_offset], cut_piece[cut_offset:], *pieces[index + 1 :]]


def _draw_named_keys(
    tokenizer: Any, num_keys: int, rng: random.Random
) -> tuple[list[Tokens], list[Tokens], dict[int, Span]]:
    """Draw passkeys with different names, and a random order of their repetitions.

    Returns:
        statements: for each passkey, the tokens of the sentences that state the passkey.
        repetitions: tokens of the sentences that repeat the passkeys, in another order.
        digits: dict from the index of a passkey in ``statements`` to the span of its digits inside
            its repetition. The dict has the order of ``repetitions``.

    Raises:
        ValueError: ``num_keys`` exceeds the number of names.
    """
    drawn_keys = draw_keys(rng, num_keys)
    order = list(range(num_keys))
    while num_keys > 1 and order == sorted(order):
        rng.shuffle(order)
    statements = [sentence_tokens(tokenizer, key.statement) for key in drawn_keys]
    repetitions = [sentence_tokens(tokenizer, drawn_keys[index].repeat) for index in order]
    digit_spans = {
        index: find_span(tokenizer, drawn_keys[index].repeat, drawn_keys[index].digits)
        for index in order
    }
    return statements, repetitions, digit_spans


def _make_document(
    tokens: Sequence[int],
    needles: Sequence[Span],
    repetitions: Sequence[Span],
    digit_spans: dict[int, Span],
) -> Document:
    """Return a `Document` whose answers are the spans of the digits inside the repetitions.

    Args:
        tokens: all tokens of the document.
        needles: for each passkey, the span in ``tokens`` of the sentence that states the passkey.
        repetitions: for each item of ``digit_spans``, the span of the sentence that repeats the
            key.
        digit_spans: index of a passkey in ``needles`` -> span of the digits of the passkey,
            relative to the start of the sentence that repeats the passkey.
    """
    answers = {
        key: (start + first, start + last)
        for (key, (first, last)), (start, _) in zip(digit_spans.items(), repetitions, strict=True)
    }
    return Document(tuple(tokens), tuple(needles), tuple(answers[key] for key in sorted(answers)))


def _draw_borders(rng: random.Random, borders: Sequence[int], num_borders: int) -> list[int]:
    """Return ``num_borders`` random items of ``borders``, sorted.

    Items repeat only if ``borders`` has fewer than ``num_borders`` items.
    """
    sample_borders = rng.sample if len(borders) >= num_borders else rng.choices
    return sorted(sample_borders(borders, k=num_borders))


def _total_tokens(pieces: Sequence[Tokens]) -> int:
    """Return the number of tokens in all pieces."""
    return sum(map(len, pieces))
