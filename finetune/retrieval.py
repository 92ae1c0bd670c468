"""Synthetic documents that train retrieval: keys in filler text, and questions about the keys.

Questions have the same wording as in the evaluations. But no document equals a document of an
evaluation, because seeds of evaluations start with an integer and these seeds with ``finetune/``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

from cab_hf.data.documents import Document, make_recall_document
from cab_hf.data.needles import (
    ANSWER_START_TEMPLATE,
    KEY_NUMBERS,
    PERSON_NAMES,
    QUESTION_TEMPLATE,
    TEXT_PLACEHOLDER,
    Key,
    Span,
    Tokens,
    cut_to_length,
    cycle_sentences,
    draw_keys,
    find_leading_special_tokens,
    find_span,
    insert_statements,
    make_instruction,
    render_around_text,
    sentence_tokens,
)
from cab_hf.data.tasks import TASKS, state_key
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.settings import format_suggestion

RETRIEVAL_PREFIX = "retrieval"  # start of the names of synthetic sources
# number of keys per document by kind. "passkey": a question about one key at the end;
# "distractors": the same, with sentences that contain other numbers; "multi": questions about
# several keys; "recall": filler text that repeats several keys
NUM_KEYS_BY_KIND = {"passkey": 1, "distractors": 1, "multi": 4, "recall": 12}
# numbers of keys of a "recall" document that is too short for 12 keys; the first that fits is used
FALLBACK_RECALL_NUM_KEYS = (6, 3)
# kinds of documents that state every sentence twice, the second time in another order: filler text
# with keys, or keys only. They have thousands of labelled tokens, documents of other kinds a few
REPEATED_TEXT_KIND, REPEATED_KEYS_KIND = "repeats", "keys"
# templates of the sentences of kind "keys", with a name and a key. The key follows its name
# closely, because models then learn retrieval faster
KEY_TEMPLATES = ("{} {}.", "{} is {}.", "The pass key for {} is {}.")
# number of first tokens of a repeated sentence that have no labels, because they identify it
NUM_UNLABELLED_TOKENS = 3
DOCUMENT_KINDS = (*NUM_KEYS_BY_KIND, REPEATED_TEXT_KIND, REPEATED_KEYS_KIND, *TASKS)


def is_retrieval_source(source_name: str) -> bool:
    """Return True if the source ``source_name`` has the prefix of synthetic sources."""
    return source_name.partition(":")[0] == RETRIEVAL_PREFIX


def parse_retrieval_source(source_name: str) -> tuple[tuple[str, ...], int | None]:
    """Parse a source name such as ``retrieval:passkey+multi:8192``.

    Returns:
        The kinds, and the tokens of a document; None without a length.

    Raises:
        UsageError: a kind is unknown, or the length is no positive integer.
    """
    _, kinds_text, length_text, *surplus_name_parts = [*source_name.split(":"), "", ""]
    if any(surplus_name_parts) or not (
        length_text.isdecimal() and int(length_text) or not length_text
    ):
        raise UsageError(
            f"{RETRIEVAL_PREFIX} must be {RETRIEVAL_PREFIX}:KINDS:LENGTH with a number of tokens "
            "as LENGTH, got "
            f"{source_name!r}."
        )
    for document_kind in kinds_text.split("+"):
        if document_kind not in DOCUMENT_KINDS:
            suggestion = format_suggestion(document_kind, DOCUMENT_KINDS)
            raise UsageError(
                f"{RETRIEVAL_PREFIX} must name known kinds, got {document_kind!r} in "
                f"{source_name!r}; {suggestion}"
            )
    return tuple(kinds_text.split("+")), int(length_text) if length_text else None


def make_retrieval_document(
    kind: str, tokenizer: Any, sentences: Sequence[str], length: int, index: int, seed: Any = 0
) -> Document:
    """Build a document of ``length`` tokens that states keys and later repeats them as answers.

    Args:
        kind: one of `DOCUMENT_KINDS`.
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
    if kind in (REPEATED_TEXT_KIND, REPEATED_KEYS_KIND):
        return _make_repeated_document(
            tokenizer, sentences if kind == REPEATED_TEXT_KIND else (), length, rng
        )
    if kind != "recall":
        return _make_question_document(
            tokenizer=tokenizer, sentences=sentences, length=length, rng=rng, kind=kind
        )
    for num_keys in (NUM_KEYS_BY_KIND[kind], *FALLBACK_RECALL_NUM_KEYS):
        try:
            return make_recall_document(
                tokenizer, sentences, length, num_keys, index=index, seed=document_seed
            )
        except ValueError as error:
            length_error = error
    raise length_error


def _make_repeated_document(
    tokenizer: Any, sentences: Sequence[str], length: int, rng: random.Random
) -> Document:
    """Return a document that states each sentence and key twice, the second time in another order.

    Answers are the labelled tokens of the second statements; see `_generate_statements`.
    """
    leading_ids = find_leading_special_tokens(tokenizer)
    num_tokens_per_half, num_padding_tokens = divmod(length - len(leading_ids), 2)
    statements: list[tuple[Tokens, Span]] = []
    for statement_tokens, label_span in _generate_statements(tokenizer, sentences, rng):
        num_free_tokens = num_tokens_per_half - sum(len(tokens) for tokens, _ in statements)
        if len(statement_tokens) >= num_free_tokens:
            statements.append((statement_tokens[:num_free_tokens], (0, 0)))
            break
        statements.append((statement_tokens, label_span))
    tokens = [*leading_ids, *chain(*(statement_tokens for statement_tokens, _ in statements))]
    statement_starts = [
        *accumulate(
            (len(statement_tokens) for statement_tokens, _ in statements), initial=len(leading_ids)
        )
    ]
    needles, answers = [], []
    for statement_index in rng.sample(range(len(statements)), len(statements)):
        statement_tokens, (label_start, label_end) = statements[statement_index]
        if label_start < label_end:
            needles.append(
                (statement_starts[statement_index], statement_starts[statement_index + 1])
            )
            answers.append((len(tokens) + label_start, len(tokens) + label_end))
        tokens.extend(statement_tokens)
    if not answers:
        raise ValueError(
            f"length must have room for a key that is said twice, got {length}. Give a larger "
            "length."
        )
    # repeat the last token if the number of tokens is odd
    return Document((*tokens, *tokens[-1:] * num_padding_tokens), tuple(needles), tuple(answers))


def _generate_statements(
    tokenizer: Any, sentences: Sequence[str], rng: random.Random
) -> Iterator[tuple[Tokens, Span]]:
    """Yield the key statements and sentences that a document states twice, without end.

    Four key statements precede each sentence. Keys belong alternately to lockers with random
    numbers and to persons, and to lockers only after the last name. Without ``sentences``, there
    are key statements only: first one for each name, then for lockers.

    Yields:
        statement_tokens: tokens of the statement or sentence.
        label_span: span of the tokens that have labels in the second statement.
    """
    unused_names = iter(rng.sample(PERSON_NAMES, len(PERSON_NAMES)))
    for sentence in cycle_sentences(sentences, rng) if sentences else repeat(None):
        for statement_number in range(4):
            person_name = (
                next(unused_names, None) if statement_number % 2 or sentence is None else None
            )
            key_owner = person_name or f"locker {rng.choice(KEY_NUMBERS)}"
            key = Key(f" for {key_owner}", str(rng.choice(KEY_NUMBERS)))
            if sentence is None:
                statement_text = rng.choice(KEY_TEMPLATES).format(key_owner, key.digits)
            else:
                statement_text = state_key(key)
            # rindex, because the number of a locker may equal its key
            label_span = find_span(
                tokenizer, statement_text, key.digits, statement_text.rindex(key.digits)
            )
            yield sentence_tokens(tokenizer, statement_text), label_span
        if sentence is None:
            continue
        statement_tokens = sentence_tokens(tokenizer, sentence)
        yield (
            statement_tokens,
            (min(NUM_UNLABELLED_TOKENS, len(statement_tokens)), len(statement_tokens)),
        )


def _make_question_document(
    tokenizer: Any, sentences: Sequence[str], length: int, rng: random.Random, kind: str
) -> Document:
    """Return a document of filler text with keys, and a question and answer per key at the end.

    Args:
        tokenizer, sentences, length: as in `make_retrieval_document`.
        rng: random generator for keys and their positions.
        kind: "passkey", "distractors" or "multi".
    """
    num_keys = NUM_KEYS_BY_KIND[kind]
    keys = draw_keys(rng, num_keys, has_names=num_keys > 1)
    statements = [sentence_tokens(tokenizer, key.statement) for key in keys]
    # turns of a chat: instruction, text and first question; answer; second question; ...
    questions = [QUESTION_TEMPLATE.format(whose=key.owner_phrase) for key in keys]
    questions[0] = "\n\n".join([make_instruction(num_keys), TEXT_PLACEHOLDER, questions[0]])
    answers = [
        f"{ANSWER_START_TEMPLATE.format(whose=key.owner_phrase)}{key.digits}." for key in keys
    ]
    chat_turns = chain(*zip(questions, answers, strict=True))
    tokens_before_filler, text_after_filler = render_around_text(tokenizer, list(chat_turns))
    tokens_after_filler = sentence_tokens(tokenizer, text_after_filler)

    num_free_tokens = (
        length - len(tokens_before_filler) - len(tokens_after_filler) - sum(map(len, statements))
    )
    if num_free_tokens < 0:
        raise ValueError(
            f"length must have room for the question and {num_keys} keys, which take "
            f"{length - num_free_tokens} tokens, got {length}. Give a larger length."
        )
    filler_sentences = cycle_sentences(sentences, rng, keys if kind == "distractors" else None)
    filler_pieces = cut_to_length(
        (sentence_tokens(tokenizer, sentence) for sentence in filler_sentences), num_free_tokens
    )
    insertion_indices = [rng.randrange(len(filler_pieces) + 1) for _ in statements]
    tokens, needles = insert_statements(
        tokens_before_filler, filler_pieces, statements, insertion_indices
    )
    digit_spans = (find_span(tokenizer, text_after_filler, key.digits) for key in keys)
    answer_spans = (
        (len(tokens) + key_start, len(tokens) + key_end) for key_start, key_end in digit_spans
    )
    return Document((*tokens, *tokens_after_filler), tuple(needles), tuple(answer_spans))
