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
    find_leading_special_tokens,
    find_span,
    insert_statements,
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
    num_keys: int,
    index: int,
    seed: int | str = 0,
    answer_alignment: int = 1,
) -> Document:
    """Build a document of ``length`` tokens with ``num_keys`` passkeys, each with a different name.

    Passkeys are stated between sentences of the first half, and repeated in another order between
    sentences of the second half; the positions are random. If the second half starts inside a
    sentence without a later sentence border, this sentence is cut in two. Hence the minimum length
    does not depend on the drawn sentences.

    Args:
        tokenizer: a tokenizer of transformers; its special tokens come first.
        sentences: sentences of the filler text, which starts at a random sentence and continues
            with the first sentence after the last.
        length: number of tokens in the document.
        num_keys: number of passkeys.
        index: index of the document. Each index has other passkeys and another first sentence.
        seed: seed of the random generator, in addition to ``length``, ``num_keys`` and ``index``.
        answer_alignment: the position of the first token of every answer is a multiple of
            ``answer_alignment``. Filler text before each repetition moves the answer to this
            position.

    Raises:
        ValueError: ``num_keys`` exceeds the number of names, or ``length`` is too small for the
            passkeys.
    """
    rng = random.Random(f"{seed}/{length}/{num_keys}/{index}")
    statements, repetitions, digit_spans = _draw_named_keys(tokenizer, num_keys, rng)
    prefix_tokens = find_leading_special_tokens(tokenizer)
    # filler tokens of the first half; below, those of the whole document, where the padding before
    # answers is not counted as filler
    num_first_half_tokens = length // 2 - len(prefix_tokens) - _count_tokens_of_pieces(statements)
    max_padding_tokens = num_keys * (answer_alignment - 1)
    num_filler_tokens = (
        length
        - len(prefix_tokens)
        - _count_tokens_of_pieces(statements)
        - _count_tokens_of_pieces(repetitions)
        - max_padding_tokens
    )
    pieces = _draw_sentences(tokenizer, sentences, rng, num_filler_tokens + max_padding_tokens)
    if 0 <= num_first_half_tokens <= num_filler_tokens:
        pieces = _cut_at_border(pieces, num_first_half_tokens, num_filler_tokens)
    piece_ends = [0, *accumulate(map(len, pieces))]
    borders_of_halves = [
        [index for index, piece_end in enumerate(piece_ends) if piece_end <= num_first_half_tokens],
        [
            index
            for index, piece_end in enumerate(piece_ends)
            if num_first_half_tokens <= piece_end <= num_filler_tokens
        ],
    ]
    if not all(borders_of_halves):
        raise ValueError(
            f"length must have room for {num_keys} keys in both halves, got {length}. Give a "
            "larger length or fewer keys."
        )
    borders = [
        drawn_border
        for half_borders in borders_of_halves
        for drawn_border in _draw_borders(rng, half_borders, num_keys)
    ]
    padding_tokens = [*chain(*_draw_sentences(tokenizer, sentences, rng, answer_alignment - 1))]
    digit_starts = [first_digit_token for first_digit_token, _ in digit_spans.values()]

    def make_padding(statement_index: int, num_tokens: int) -> Sequence[int]:
        """Return the filler tokens to insert before a statement or repetition.

        They move the digits of a repetition to a multiple of ``answer_alignment``. Statements need
        none.

        Args:
            statement_index: index in ``[*statements, *repetitions]``.
            num_tokens: number of tokens before the statement.
        """
        if statement_index < num_keys:
            return ()
        num_padding_tokens = (
            -(num_tokens + digit_starts[statement_index - num_keys]) % answer_alignment
        )
        # the last tokens of the filler text, so that the padding ends with a complete sentence
        return padding_tokens[len(padding_tokens) - num_padding_tokens :]

    tokens, spans = insert_statements(
        prefix_tokens,
        pieces,
        statements=[*statements, *repetitions],
        borders=borders,
        make_padding=make_padding,
    )
    return _make_document(tokens[:length], spans[:num_keys], spans[num_keys:], digit_spans)


def make_asked_document(
    tokenizer: Any,
    sentences: Sequence[str],
    length: int,
    num_keys: int,
    index: int,
    seed: int | str = 0,
) -> tuple[Document, int]:
    """Build a document that ends with the repetitions of all passkeys.

    The document starts with a prompt: filler text with the statements of passkeys at random
    sentence borders. After the prompt, one sentence per passkey repeats the passkey. The order of
    the repetitions differs from the order of the statements.

    Args:
        tokenizer, sentences, length, num_keys, index, seed: see `make_recall_document`. ``length``
            includes the repetitions.

    Returns:
        document: the document.
        prompt_length: number of tokens in the prompt.

    Raises:
        ValueError: ``num_keys`` exceeds the number of names, or ``length`` is too small for the
            passkeys.
    """
    rng = random.Random(f"{seed}/asked/{length}/{num_keys}/{index}")
    statements, repetitions, digit_spans = _draw_named_keys(tokenizer, num_keys, rng)
    prefix_tokens = find_leading_special_tokens(tokenizer)
    prompt_length = length - _count_tokens_of_pieces(repetitions)
    num_filler_tokens = prompt_length - len(prefix_tokens) - _count_tokens_of_pieces(statements)
    pieces = _draw_sentences(tokenizer, sentences, rng, num_filler_tokens)
    piece_ends = [0, *accumulate(map(len, pieces))]
    borders = [
        index for index, piece_end in enumerate(piece_ends) if piece_end <= num_filler_tokens
    ]
    if not borders:
        raise ValueError(
            f"length must have room for {num_keys} keys and {num_keys} questions, got {length}. "
            "Give a larger length or fewer keys."
        )
    tokens, needles = insert_statements(
        prefix_tokens, pieces, statements, _draw_borders(rng, borders, num_keys)
    )
    prompt_tokens = tokens[:prompt_length]
    tokens, repetition_spans = insert_statements(prompt_tokens, [], repetitions, [0] * num_keys)
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

    def draw_free_start(min_start: int, max_end: int) -> int | None:
        """Return a random start of a passage outside ``excluded_spans``; None if none exists.

        The passage starts and ends in [min_start, max_end), and is added to ``excluded_spans``.
        """
        free_starts = [
            start
            for start in range(min_start, max_end - passage_tokens)
            if all(
                excluded_end <= start or start + passage_tokens <= excluded_start
                for excluded_start, excluded_end in excluded_spans
            )
        ]
        if not free_starts:
            return None
        start = rng.choice(free_starts)
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
    return (*find_leading_special_tokens(tokenizer), *chain.from_iterable(pieces))[:length]


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
    pieces, num_drawn_tokens, sentence_iterator = [], 0, cycle_sentences(sentences, rng)
    while num_drawn_tokens < num_tokens:
        pieces.append(sentence_tokens(tokenizer, next(sentence_iterator)))
        num_drawn_tokens += len(pieces[-1])
    return pieces


def _cut_at_border(pieces: list[Tokens], min_position: int, max_position: int) -> list[Tokens]:
    """Return ``pieces`` such that a piece starts or ends in [min_position, max_position].

    If no piece does, the piece that contains the middle of the interval is cut in two there.

    Args:
        pieces: tokens of consecutive pieces, such as sentences.
        min_position, max_position: positions in tokens from the start of the first piece.
    """
    piece_ends = [0, *accumulate(map(len, pieces))]
    if any(min_position <= piece_end <= max_position for piece_end in piece_ends):
        return pieces
    middle_position = (min_position + max_position) // 2
    cut_index = bisect_right(piece_ends, middle_position) - 1
    cut_piece, cut_offset = pieces[cut_index], middle_position - piece_ends[cut_index]
    return [
        *pieces[:cut_index],
        cut_piece[:cut_offset],
        cut_piece[cut_offset:],
        *pieces[cut_index + 1 :],
    ]


def _draw_named_keys(
    tokenizer: Any, num_keys: int, rng: random.Random
) -> tuple[list[Tokens], list[Tokens], dict[int, Span]]:
    """Draw passkeys with different names, and a random order of their repetitions.

    Returns:
        statements: for each passkey, the tokens of the sentences that state the passkey.
        repetitions: tokens of the sentences that repeat the passkeys, in another order.
        digit_spans: dict from the index of a passkey in ``statements`` to the span of its digits
            inside its repetition. The dict has the order of ``repetitions``.

    Raises:
        ValueError: ``num_keys`` exceeds the number of names.
    """
    drawn_keys = draw_keys(rng, num_keys)
    repetition_order = list(range(num_keys))
    while num_keys > 1 and repetition_order == sorted(repetition_order):
        rng.shuffle(repetition_order)
    statements = [sentence_tokens(tokenizer, key.statement) for key in drawn_keys]
    repetitions = [
        sentence_tokens(tokenizer, drawn_keys[key_index].repetition)
        for key_index in repetition_order
    ]
    digit_spans = {
        key_index: find_span(
            tokenizer, drawn_keys[key_index].repetition, drawn_keys[key_index].digits
        )
        for key_index in repetition_order
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
        key_index: (repetition_start + first_digit, repetition_start + digits_end)
        for (key_index, (first_digit, digits_end)), (repetition_start, _) in zip(
            digit_spans.items(), repetitions, strict=True
        )
    }
    return Document(
        tuple(tokens), tuple(needles), tuple(answers[key_index] for key_index in sorted(answers))
    )


def _draw_borders(rng: random.Random, borders: Sequence[int], num_borders: int) -> list[int]:
    """Return ``num_borders`` random items of ``borders``, sorted.

    Items repeat only if ``borders`` has fewer than ``num_borders`` items.
    """
    sample_borders = rng.sample if len(borders) >= num_borders else rng.choices
    return sorted(sample_borders(borders, k=num_borders))


def _count_tokens_of_pieces(pieces: Sequence[Tokens]) -> int:
    """Return the number of tokens in all pieces."""
    return sum(map(len, pieces))
