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
    ANSWER,
    KEY_NUMBERS,
    NAMES,
    QUESTION,
    TEXT_PLACEHOLDER,
    Key,
    Span,
    Tokens,
    cut_to_length,
    cycle_sentences,
    draw_keys,
    find_span,
    insert_statements,
    leading_tokens,
    make_instruction,
    render_around_text,
    sentence_tokens,
)
from cab_hf.data.tasks import TASKS, state_key
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.settings import format_suggestion

PREFIX = "retrieval"  # start of the names of synthetic sources
# number of keys per document by kind. "passkey": a question about one key at the end;
# "distractors": the same, with sentences that contain other numbers; "multi": questions about
# several keys; "recall": filler text that repeats several keys
NUM_KEYS = {"passkey": 1, "distractors": 1, "multi": 4, "recall": 12}
# numbers of keys of a "recall" document that is too short for 12 keys; the first that fits is used
FEWER_NUM_KEYS = (6, 3)
# kinds of documents that state every sentence twice, the second time in another order: filler text
# with keys, or keys only. They have thousands of labelled tokens, documents of other kinds a few
REPEATED_TEXT, REPEATED_KEYS = "repeats", "keys"
# templates of the sentences of kind "keys", with a name and a key. The key follows its name
# closely, because models then learn retrieval faster
KEY_TEMPLATES = ("{} {}.", "{} is {}.", "The pass key for {} is {}.")
# number of first tokens of a repeated sentence that have no labels, because they identify it
NUM_UNLABELLED_TOKENS = 3
KINDS = (*NUM_KEYS, REPEATED_TEXT, REPEATED_KEYS, *TASKS)


def is_retrieval_source(name: str) -> bool:
    """Return True if the source ``name`` has the prefix of synthetic sources."""
    return name.partition(":")[0] == PREFIX


def parse_retrieval_source(name: str) -> tuple[tuple[str, ...], int | None]:
    """Parse a source name such as ``retrieval:passkey+multi:8192``.

    Returns:
        The kinds, and the tokens of a document; None without a length.

    Raises:
        UsageError: a kind is unknown, or the length is no positive integer.
    """
    _, kinds_text, length_text, *extra_fields = [*name.split(":"), "", ""]
    if any(extra_fields) or not (length_text.isdecimal() and int(length_text) or not length_text):
        raise UsageError(
            f"{PREFIX} must be {PREFIX}:KINDS:LENGTH with a number of tokens as LENGTH, got "
            f"{name!r}."
        )
    for kind in kinds_text.split("+"):
        if kind not in KINDS:
            hint = format_suggestion(kind, KINDS)
            raise UsageError(f"{PREFIX} must name known kinds, got {kind!r} in {name!r}; {hint}")
    return tuple(kinds_text.split("+")), int(length_text) if length_text else None


def make_retrieval_document(
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
    if kind in (REPEATED_TEXT, REPEATED_KEYS):
        return _make_repeated_document(
            tokenizer, sentences if kind == REPEATED_TEXT else (), length, rng
        )
    if kind != "recall":
        return _make_question_document(
            tokenizer=tokenizer, sentences=sentences, length=length, rng=rng, kind=kind
        )
    for num_keys in (NUM_KEYS[kind], *FEWER_NUM_KEYS):
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
    leading_ids = leading_tokens(tokenizer)
    num_half_tokens, num_missing = divmod(length - len(leading_ids), 2)
    pieces: list[tuple[Tokens, Span]] = []
    for piece_tokens, label_span in _generate_statements(tokenizer, sentences, rng):
        num_free = num_half_tokens - sum(len(tokens) for tokens, _ in pieces)
        if len(piece_tokens) >= num_free:
            pieces.append((piece_tokens[:num_free], (0, 0)))
            break
        pieces.append((piece_tokens, label_span))
    tokens = [*leading_ids, *chain(*(piece_tokens for piece_tokens, _ in pieces))]
    piece_starts = [
        *accumulate((len(piece_tokens) for piece_tokens, _ in pieces), initial=len(leading_ids))
    ]
    needles, answers = [], []
    for index in rng.sample(range(len(pieces)), len(pieces)):
        piece_tokens, (label_start, label_end) = pieces[index]
        if label_start < label_end:
            needles.append((piece_starts[index], piece_starts[index + 1]))
            answers.append((len(tokens) + label_start, len(tokens) + label_end))
        tokens.extend(piece_tokens)
    if not answers:
        raise ValueError(
            f"length must have room for a key that is said twice, got {length}. Give a larger "
            "length."
        )
    # repeat the last token if the number of tokens is odd
    return Document((*tokens, *tokens[-1:] * num_missing), tuple(needles), tuple(answers))


def _generate_statements(
    tokenizer: Any, sentences: Sequence[str], rng: random.Random
) -> Iterator[tuple[Tokens, Span]]:
    """Yield the key statements and sentences that a document states twice, without end.

    Four key statements precede each sentence. Keys belong alternately to lockers with random
    numbers and to persons, and to lockers only after the last name. Without ``sentences``, there
    are key statements only: first one for each name, then for lockers.

    Yields:
        tokens: tokens of the statement or sentence.
        label_span: span of the tokens that have labels in the second statement.
    """
    unused_names = iter(rng.sample(NAMES, len(NAMES)))
    for sentence in cycle_sentences(sentences, rng) if sentences else repeat(None):
        for statement_number in range(4):
            name = next(unused_names, None) if statement_number % 2 or sentence is None else None
            owner = name or f"locker {rng.choice(KEY_NUMBERS)}"
            key = Key(f" for {owner}", str(rng.choice(KEY_NUMBERS)))
            if sentence is None:
                statement_text = rng.choice(KEY_TEMPLATES).format(owner, key.digits)
            else:
                statement_text = state_key(key)
            # rindex, because the number of a locker may equal its key
            label_span = find_span(
                tokenizer, statement_text, key.digits, statement_text.rindex(key.digits)
            )
            yield sentence_tokens(tokenizer, statement_text), label_span
        if sentence is None:
            continue
        tokens = sentence_tokens(tokenizer, sentence)
        yield tokens, (min(NUM_UNLABELLED_TOKENS, len(tokens)), len(tokens))


def _make_question_document(
    tokenizer: Any, sentences: Sequence[str], length: int, rng: random.Random, kind: str
) -> Document:
    """Return a document of filler text with keys, and a question and answer per key at the end.

    Args:
        tokenizer, sentences, length: as in `make_retrieval_document`.
        rng: random generator for keys and their positions.
        kind: "passkey", "distractors" or "multi".
    """
    num_keys = NUM_KEYS[kind]
    keys = draw_keys(rng, num_keys, has_names=num_keys > 1)
    statements = [sentence_tokens(tokenizer, key.statement) for key in keys]
    # turns of a chat: instruction, text and first question; answer; second question; ...
    questions = [QUESTION.format(whose=key.whose) for key in keys]
    questions[0] = "\n\n".join([make_instruction(num_keys), TEXT_PLACEHOLDER, questions[0]])
    answers = [f"{ANSWER.format(whose=key.whose)}{key.digits}." for key in keys]
    turns = chain(*zip(questions, answers, strict=True))
    head_tokens, after_text = render_around_text(tokenizer, list(turns))
    tail_tokens = sentence_tokens(tokenizer, after_text)

    num_free = length - len(head_tokens) - len(tail_tokens) - sum(map(len, statements))
    if num_free < 0:
        raise ValueError(
            f"length must have room for the question and {num_keys} keys, which take "
            f"{length - num_free} tokens, got {length}. Give a larger length."
        )
    filler_sentences = cycle_sentences(sentences, rng, keys if kind == "distractors" else None)
    pieces = cut_to_length(
        (sentence_tokens(tokenizer, sentence) for sentence in filler_sentences), num_free
    )
    insertion_indices = [rng.randrange(len(pieces) + 1) for _ in statements]
    tokens, needles = insert_statements(head_tokens, pieces, statements, insertion_indices)
    digit_spans = (find_span(tokenizer, after_text, key.digits) for key in keys)
    answer_spans = ((len(tokens) + start, len(tokens) + end) for start, end in digit_spans)
    return Document((*tokens, *tail_tokens), tuple(needles), tuple(answer_spans))
