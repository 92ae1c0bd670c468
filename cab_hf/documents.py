"""Documents to be read in one pass: running text in which keys are named, and named again later.

A document is made from (tokenizer, sentences, length, keys, seed, index) and nothing else, so every
method, and every run, is shown the same ones.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

NUMBERS = range(10_000, 100_000)  # keys, and numbers that are none
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’)])\s+")
LINE = re.compile(r"\n+[^\n]+")
# words of a sentence; a text with most of its words in longer ones is no prose
LONG_SENTENCE = 60
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
NAMES = (
    *("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry"),
    *("Julia", "Kevin", "Laura", "Martin", "Nancy", "Oscar", "Peter", "Rachel"),
    *("Simon", "Tina", "Victor", "Wendy", "Adam", "Beth", "Chris", "Diana"),
    *("Eric", "Fiona", "George", "Helen", "Ivan", "Jane", "Karl", "Linda"),
)
NEEDLE = "The pass key{whose} is {key}. Remember it. {key} is the pass key{whose}."
REPEAT = "As was said above, the pass key{whose} is {key}."
# numbers that are no pass keys: a selector that looks for digits finds these as well
DISTRACTOR_EVERY = 12
DISTRACTORS = (
    "The locker number is {}.",
    "The order number is {}.",
    "The house has the number {}.",
    "The ticket has the number {}.",
    "The phone extension is {}.",
    "The invoice number is {}.",
    "The train has the number {}.",
    "The meter shows {}.",
)
INSTRUCTION = "There {are} hidden in the text below. Find {it} and remember {it}."
QUESTION = "What is the pass key{whose}?"
# the answer is begun for the model, blank included, so that the first digit already is predicted by
# the last token of the prefill; otherwise only decoding would be tested where decoding is dense
ANSWER = "The pass key{whose} is "
KEPT_SENTENCES = 2**16  # whose tokens are remembered

Tokens = tuple[int, ...]
Span = tuple[int, int]  # [start, end) in tokens


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
        border: of which the place of every answer is a multiple; more text stands before it then.
    Raises:
        ValueError: ``keys`` is more than there are names, or ``length`` has no room for them.
    """
    rng = random.Random(f"{seed}/{length}/{keys}/{index}")
    numbers, order, needles, repeats = _named_keys(tokenizer, keys, rng)
    statements = [*needles, *(sentence_tokens(tokenizer, repeat) for repeat in repeats)]

    begun = leading_tokens(tokenizer)
    # of running text: how much the first half has room for, and how much the document
    early = length // 2 - len(begun) - _total(needles)
    moved = keys * (border - 1)
    late = length - len(begun) - _total(statements) - moved
    pieces = _text(tokenizer, sentences, rng.randrange(len(sentences)), late + moved)
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

    digits = [
        digits_of(tokenizer, repeat, numbers[key])
        for key, repeat in zip(order, repeats, strict=True)
    ]
    firsts = [None] * keys + [first for first, _ in digits]
    more = [*chain(*_text(tokenizer, sentences, rng.randrange(len(sentences)), border - 1))]

    tokens, starts, done = list(begun), [], 0
    for at, statement, first in zip(borders, statements, firsts, strict=True):
        tokens.extend(chain(*pieces[done:at]))
        if first is not None:
            missing = -(len(tokens) + first) % border
            # what ends a sentence
            tokens.extend(more[len(more) - missing :])
        starts.append(len(tokens))
        tokens.extend(statement)
        done = at
    tokens.extend(chain(*pieces[done:]))

    answers = {
        key: (start + first, start + last)
        for key, start, (first, last) in zip(order, starts[keys:], digits, strict=True)
    }
    return Document(
        tokens=tuple(tokens[:length]),
        needles=tuple((at, at + len(each)) for at, each in zip(starts, needles, strict=False)),
        answers=tuple(answers[key] for key in range(keys)),
    )


def asked_document(
    tokenizer: Any,
    sentences: Sequence[str],
    length: int,
    keys: int,
    index: int,
    seed: int | str = 0,
) -> tuple[Document, int]:
    """A document whose end repeats all keys, and how many of its tokens stand before that end.

    What stands before is a prompt: running text with the keys stated at random sentence borders.
    Behind it there is one sentence a key, in another order, and nothing else.

    Args:
        length: in tokens, of all together; the others as of `recall_document`.
    Raises:
        ValueError: ``keys`` is more than there are names, or ``length`` has no room for them.
    """
    rng = random.Random(f"{seed}/asked/{length}/{keys}/{index}")
    numbers, order, needles, repeats = _named_keys(tokenizer, keys, rng)
    asking = [sentence_tokens(tokenizer, repeat) for repeat in repeats]

    tokens = list(leading_tokens(tokenizer))
    prompt = length - _total(asking)
    text = prompt - len(tokens) - _total(needles)
    pieces = _text(tokenizer, sentences, rng.randrange(len(sentences)), text)
    borders = [at for at, end in enumerate([0, *accumulate(map(len, pieces))]) if end <= text]
    if not borders:
        raise ValueError(
            f"length {length} has no room for {keys} keys and as many questions behind them; give "
            "a longer one or fewer keys."
        )
    starts, done = [], 0
    for at, needle in zip(_drawn(rng, borders, keys), needles, strict=True):
        tokens.extend(chain(*pieces[done:at]))
        starts.append(len(tokens))
        tokens.extend(needle)
        done = at
    tokens.extend(chain(*pieces[done:]))
    tokens = tokens[:prompt]

    answers = {}
    for key, repeat, question in zip(order, repeats, asking, strict=True):
        first, last = digits_of(tokenizer, repeat, numbers[key])
        answers[key] = len(tokens) + first, len(tokens) + last
        tokens.extend(question)
    document = Document(
        tokens=tuple(tokens),
        needles=tuple((at, at + len(each)) for at, each in zip(starts, needles, strict=True)),
        answers=tuple(answers[key] for key in range(keys)),
    )
    return document, prompt


def with_copies(
    document: Document, count: int, size: int, seed: int = 0
) -> tuple[Document, tuple[tuple[int, int], ...]]:
    """The document with passages of its first half copied into its second, and where.

    A copy takes the place of what stood there, and leaves out needles and answers. Each pair is
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
    pieces = _text(tokenizer, sentences, rng.randrange(len(sentences)), length)
    return tuple(chain(begun, *pieces))[:length]


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, white space made single blanks; ValueError for an empty text.

    Of a text that has few ends of sentences, as source code, they are the lines, each with its
    indentation and behind its line break.
    """
    sentences = list(filter(None, SENTENCE_END.split(" ".join(text.split()))))
    if not sentences:
        raise ValueError("haystack has no text in it.")
    words = [len(sentence.split()) for sentence in sentences]
    if 2 * sum(count for count in words if count > LONG_SENTENCE) <= sum(words):
        return sentences
    return LINE.findall("\n".join(["", *map(str.rstrip, text.splitlines())]))


def running(sentences: Sequence[str]) -> str:
    """Sentences as one text, with a blank between those that are not lines."""
    spaced = (text if text.startswith("\n") else f" {text}" for text in sentences)
    return "".join(spaced).lstrip()


@lru_cache(maxsize=KEPT_SENTENCES)
def sentence_tokens(tokenizer: Any, sentence: str) -> Tokens:
    """Tokens of a sentence as it stands in running text."""
    return _behind_another(tokenizer, sentence)


@lru_cache(maxsize=8)
def leading_tokens(tokenizer: Any) -> Tokens:
    """The special tokens that ``tokenizer`` puts before a text."""
    with_special, alone = (
        tokenizer(NOISE[0], add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    first = next(at for at, token in enumerate(with_special) if token == alone[0])
    return tuple(with_special[:first])


def digits_of(tokenizer: Any, sentence: str, digits: str) -> Span:
    """Which of `sentence_tokens` hold the ``digits``; a blank may be in the first one, too."""
    at = sentence.index(digits)
    whole, before, until = (
        _behind_another(tokenizer, text)
        for text in (sentence, sentence[:at], sentence[: at + len(digits)])
    )
    return shared(whole, before), len(until)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common from the start on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _behind_another(tokenizer: Any, sentence: str) -> Tokens:
    joined = tokenizer(running((NOISE[0], sentence)), add_special_tokens=False)["input_ids"]
    return tuple(joined[_another(tokenizer) :])


@lru_cache(maxsize=8)
def _another(tokenizer: Any) -> int:
    """Tokens of a sentence that others are behind: alone, some tokenizers add one for its start."""
    return len(tokenizer(NOISE[0], add_special_tokens=False)["input_ids"])


def _text(tokenizer: Any, sentences: Sequence[str], first: int, size: int) -> list[Tokens]:
    """Sentences of at least ``size`` tokens from the ``first`` on, round and round."""
    pieces, total = [], 0
    while total < size:
        sentence = sentences[(first + len(pieces)) % len(sentences)]
        pieces.append(sentence_tokens(tokenizer, sentence))
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
) -> tuple[list[str], list[int], list[Tokens], list[str]]:
    """Digits of keys with names, an order to repeat them in, what states each, what repeats it.

    Raises:
        ValueError: ``keys`` is more than there are names.
    """
    if not 1 <= keys <= len(NAMES):
        raise ValueError(f"keys must be 1 to {len(NAMES)}; got {keys!r}.")
    numbers = list(map(str, rng.sample(NUMBERS, keys)))
    named = [
        {"whose": f" for {name}", "key": number}
        for name, number in zip(rng.sample(NAMES, keys), numbers, strict=True)
    ]
    order = _another_order(rng, keys)
    needles = [sentence_tokens(tokenizer, NEEDLE.format(**each)) for each in named]
    return numbers, order, needles, [REPEAT.format(**named[key]) for key in order]


def _another_order(rng: random.Random, keys: int) -> list[int]:
    order = list(range(keys))
    while keys > 1 and order == sorted(order):
        rng.shuffle(order)
    return order


def _drawn(rng: random.Random, borders: Sequence[int], count: int) -> list[int]:
    """``count`` of ``borders``, ascending; some several times only where there are too few."""
    draw = rng.sample if len(borders) >= count else rng.choices
    return sorted(draw(borders, k=count))


def _total(pieces: Sequence[Tokens]) -> int:
    return sum(map(len, pieces))
