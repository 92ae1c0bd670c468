"""Parts of documents with hidden keys: keys, statements, sentences and their tokens.

`cab_hf.data.documents`, `cab_hf.data.tasks`, the prompts of ``eval.haystack`` and the documents
of ``finetune.retrieval`` use these parts.
"""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, count
from typing import Any, NamedTuple

NUMBERS = range(10_000, 100_000)  # keys, and numbers that are no keys
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’)])\s+")
LINE = re.compile(r"\n+[^\n]+")
# words of a sentence; a text with most words in longer sentences is no prose
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
# numbers that are no keys: a selector that looks for digits matches these as well
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
# the answer is begun for the model, blank included, so that the last token of the prefill predicts
# the first digit. Otherwise only decoding would be tested, which may be dense.
ANSWER = "The pass key{whose} is "
KEPT_SENTENCES = 2**16  # number of sentences whose tokens are cached
# placeholder of the running text in a chat template
TEXT = "<<running text>>"

Tokens = tuple[int, ...]
Span = tuple[int, int]  # [start, end) in tokens


class Key(NamedTuple):
    """A number that a text hides."""

    whose: str  # " for NAME", or nothing for a single key
    digits: str

    @property
    def statement(self) -> str:
        return NEEDLE.format(whose=self.whose, key=self.digits)

    @property
    def repeat(self) -> str:
        return REPEAT.format(whose=self.whose, key=self.digits)


def draw_keys(rng: random.Random, keys: int, named: bool = True) -> list[Key]:
    """Draw different numbers as keys; several keys, or ``named`` keys, have different names.

    Raises:
        ValueError: ``keys`` exceeds the number of names.
    """
    if not 1 <= keys <= len(NAMES):
        raise ValueError(f"keys must be 1 to {len(NAMES)}, got {keys!r}.")
    numbers, names = rng.sample(NUMBERS, keys), rng.sample(NAMES, keys)
    return [
        Key(f" for {name}" if named else "", str(number))
        for name, number in zip(names, numbers, strict=True)
    ]


def instruction(keys: int) -> str:
    """Return the instruction before a text that hides ``keys`` keys."""
    if keys > 1:
        return INSTRUCTION.format(are="are important pass keys", it="them")
    return INSTRUCTION.format(are="is an important pass key", it="it")


def endless(
    sentences: Sequence[str], rng: random.Random, keys: Collection[Key] | None = None
) -> Iterator[str]:
    """Yield sentences without end, wrapping around, from a place that ``rng`` draws immediately.

    With ``keys``, every `DISTRACTOR_EVERY`-th sentence contains a number that is no key.
    """
    first = rng.randrange(len(sentences))

    def at(place: int) -> str:
        if keys is not None and place % DISTRACTOR_EVERY == DISTRACTOR_EVERY - 1:
            number = str(rng.choice(NUMBERS))
            if all(number != key.digits for key in keys):
                return rng.choice(DISTRACTORS).format(number)
        return sentences[(first + place) % len(sentences)]

    return map(at, count())


def with_statements(
    begun: Sequence[int],
    pieces: Sequence[Tokens],
    statements: Sequence[Tokens],
    borders: Sequence[int],
    before: Callable[[int, int], Sequence[int]] = lambda which, at: (),
) -> tuple[list[int], list[Span]]:
    """Insert each statement at its border between ``pieces``, and return where the statements are.

    Args:
        begun: tokens before the text.
        borders: number of pieces before each statement; statements at one border keep their order.
        before: function (statement, tokens so far) -> more tokens to insert before the statement.
    """
    tokens, done = list(begun), 0
    ranges: dict[int, Span] = {}
    for which in sorted(range(len(statements)), key=borders.__getitem__):
        tokens.extend(chain(*pieces[done : borders[which]]))
        done = borders[which]
        tokens.extend(before(which, len(tokens)))
        ranges[which] = (len(tokens), len(tokens) + len(statements[which]))
        tokens.extend(statements[which])
    tokens.extend(chain(*pieces[done:]))
    return tokens, [ranges[which] for which in range(len(statements))]


def fitted(pieces: Iterable[Tokens], room: int) -> list[Tokens]:
    """Return the first ``pieces`` with ``room`` tokens in all.

    The first piece may be cut at its start.
    """
    fitting, total, more = [], 0, iter(pieces)
    while total < room:
        fitting.append(next(more))
        total += len(fitting[-1])
    over = total - room
    while over and over >= len(fitting[0]):
        over -= len(fitting.pop(0))
    if over:
        fitting[0] = fitting[0][over:]
    return fitting


def nearest(ascending: Sequence[int], target: float) -> int:
    """Return the index of the value nearest to ``target``."""
    above = bisect.bisect_left(ascending, target)
    around = range(max(0, above - 1), min(above + 1, len(ascending)))
    return min(around, key=lambda i: abs(ascending[i] - target))


def as_turns(tokenizer: Any, said: Sequence[str]) -> str:
    """Render a conversation for a model: ``said`` contains the turns, the user's first.

    Without a chat template the turns are paragraphs. The last turn is left open, as in an
    evaluation, even if a template would end it.
    """
    if tokenizer.chat_template is None:
        return "\n\n".join(said)
    turns = [
        {"role": ("user", "assistant")[turn % 2], "content": content}
        for turn, content in enumerate(said[:-1])
    ]
    asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return asked + said[-1]


def around_text(tokenizer: Any, said: Sequence[str]) -> tuple[Tokens, str]:
    """Return the tokens before the running text, and the text after it.

    Args:
        said: as in `as_turns`, with `TEXT` in the place of the running text.
    Raises:
        ValueError: the chat template changes the text of a user's turn.
    """
    before, result, after = as_turns(tokenizer, said).partition(TEXT)
    if not result:
        raise ValueError(
            "tokenizer must have a chat template that does not change the text of a user's turn. "
            "Use another tokenizer, or remove its chat template."
        )
    # a chat template contains the special tokens
    begun = leading_tokens(tokenizer) if tokenizer.chat_template is None else ()
    return (*begun, *tokenizer(before, add_special_tokens=False)["input_ids"]), after


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences with single blanks; ValueError for an empty text.

    A text with few sentence ends, such as source code, is split into lines. A line keeps its
    indentation and starts with its line break.
    """
    sentences = list(filter(None, SENTENCE_END.split(" ".join(text.split()))))
    if not sentences:
        raise ValueError("haystack must contain text, got none. Give a text with words in it.")
    words = [len(sentence.split()) for sentence in sentences]
    if 2 * sum(count for count in words if count > LONG_SENTENCE) <= sum(words):
        return sentences
    return LINE.findall("\n".join(["", *map(str.rstrip, text.splitlines())]))


def running(sentences: Sequence[str]) -> str:
    """Join sentences with blanks; lines need no blank."""
    spaced = (text if text.startswith("\n") else f" {text}" for text in sentences)
    return "".join(spaced).lstrip()


@lru_cache(maxsize=KEPT_SENTENCES)
def sentence_tokens(tokenizer: Any, sentence: str) -> Tokens:
    """Return the tokens of a sentence inside running text."""
    # measured after another sentence: alone, some tokenizers add a token at the start of a text
    joined = tokenizer(running((NOISE[0], sentence)), add_special_tokens=False)["input_ids"]
    return tuple(joined[len(_alone(tokenizer)) :])


@lru_cache(maxsize=8)
def leading_tokens(tokenizer: Any) -> Tokens:
    """Return the special tokens that ``tokenizer`` puts before a text."""
    with_special = tokenizer(NOISE[0], add_special_tokens=True)["input_ids"]
    return tuple(with_special[: with_special.index(_alone(tokenizer)[0])])


@lru_cache(maxsize=8)
def _alone(tokenizer: Any) -> Tokens:
    """Return the tokens of a sentence that is a whole text."""
    return tuple(tokenizer(NOISE[0], add_special_tokens=False)["input_ids"])


def span_of(tokenizer: Any, sentence: str, part: str, start: int = 0) -> Span:
    """Return the range of `sentence_tokens` that contains ``part``, perhaps with a leading blank.

    Args:
        start: character at which the search for ``part`` starts.
    """
    at = sentence.index(part, start)
    complete, before, until = (
        sentence_tokens(tokenizer, text)
        for text in (sentence, sentence[:at], sentence[: at + len(part)])
    )
    return shared(complete, before), len(until)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two texts have in common at the start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
