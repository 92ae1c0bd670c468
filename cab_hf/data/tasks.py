"""Questions about long texts, as in long-context benchmarks, with an exact length in tokens.

Each question is a `Task`, stored under its name in `TASKS`. Most are tasks of RULER (Hsieh et al.
2024, arXiv 2404.06654). ``TASKS["uuid"].make(tokenizer, sentences, length, index, seed)`` is an
`Example`: a prompt and its answers. Use it for teacher forcing, generation or training.
"""

from __future__ import annotations

import random
import string
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, repeat, takewhile
from math import pi
from typing import Any, NamedTuple

from cab_hf.data.needles import (
    ANSWER,
    NAMES,
    NUMBERS,
    QUESTION,
    TEXT,
    Key,
    Span,
    Tokens,
    around_text,
    draw_keys,
    endless,
    fitted,
    instruction,
    nearest,
    running,
    sentence_tokens,
    span_of,
    with_statements,
)

__all__ = ["TASKS", "Example", "Task"]

# a sentence that is tokenized together with the question, whatever precedes it
END = "That is the end of the text."
# multiples of it spread over [0, 1) evenly, however many there are
GOLDEN = (5**0.5 - 1) / 2
# (tokens that are left, sentence -> its tokens) -> a text of exactly this length in pieces, or None
# if its words do not fit
Filler = Callable[[int, Callable[[str], Tokens]], list[Tokens] | None]


class Example(NamedTuple):
    """A prompt and the answers after it."""

    tokens: Tokens  # prompt and answers, as many as the length
    prompt: int  # tokens of the prompt; the first answer starts after it
    # the parts that the answers need, in the order of the draft; empty if they need the whole text
    needles: tuple[Span, ...]
    answers: tuple[Span, ...]
    replies: tuple[str, ...]  # the text of each answer


class Fact(NamedTuple):
    """A sentence that the text hides at the sentence border nearest to its depth."""

    depth: float  # from 0 (start of the text) to 1 (its end)
    sentence: str


@dataclass(frozen=True)
class Draft:
    """An example before it is fitted to a length."""

    instruction: str  # before the text
    question: str  # after the text
    begun: str  # the start of the answer, given to the model; the replies follow it
    replies: tuple[str, ...]  # the answers of the model, separated by commas
    needed: Sequence[Fact] = ()  # facts that the answers need
    others: Sequence[Fact] = ()  # other facts that the text hides
    filler: Filler | None = None  # the text around them; None: running text


@dataclass(frozen=True)
class Task:
    """A kind of question about a long text."""

    name: str  # name of the probe in ``fidelity``; lm_eval's task has ``cab_`` before it
    title: str  # heading of its column
    # (random generator, depth of one of the needed facts from 0 to 1) -> the facts and the question
    draft: Callable[[random.Random, float], Draft]

    def make(
        self,
        tokenizer: Any,
        sentences: Sequence[str],
        length: int,
        index: int,
        seed: int | str = 0,
    ) -> Example:
        """Build the example with number ``index``, which depends on the arguments alone.

        Args:
            tokenizer: a tokenizer of transformers; its chat template is used if it has one.
            sentences: sentences of the running text, which starts at a drawn sentence and wraps
                around.
            length: tokens of prompt and answers together.
            index: number of the example; depths of successive examples are spread evenly.
            seed: a whole number for evaluation, or a string that starts with ``finetune/`` for
                training, so that the two never draw the same example.
        Raises:
            ValueError: ``length`` is too small for the hidden facts and the question.
        """
        start = random.Random(f"{seed}/{self.name}/depth").random()
        rng = random.Random(f"{seed}/{self.name}/{length}/{index}")
        draft = self.draft(rng, (start + index * GOLDEN) % 1)
        head, tail, answers = _around(tokenizer, draft)
        tokens_of = partial(sentence_tokens, tokenizer)
        facts = [*draft.needed, *draft.others]
        statements = [tokens_of(fact.sentence) for fact in facts]

        filler = draft.filler or running_text(endless(sentences, rng))
        room = length - len(head) - len(tail) - sum(map(len, statements))
        pieces = filler(room, tokens_of) if room >= 0 else None
        if pieces is None:
            raise ValueError(
                f"length must have room for the task {self.name}, got {length}. Give a larger "
                "length."
            )
        ends = [0, *accumulate(map(len, pieces))]
        borders = [nearest(ends, fact.depth * ends[-1]) for fact in facts]
        tokens, ranges = with_statements(head, pieces, statements, borders)
        answers = [(len(tokens) + first, len(tokens) + last) for first, last in answers]
        return Example(
            tokens=(*tokens, *tail),
            prompt=answers[0][0],
            needles=tuple(ranges[: len(draft.needed)]),
            answers=tuple(answers),
            replies=draft.replies,
        )


def running_text(sentences: Iterator[str]) -> Filler:
    """Return a filler of the first sentences, which may start inside a sentence."""
    return lambda room, tokens_of: fitted(map(tokens_of, sentences), room)


def _around(tokenizer: Any, draft: Draft) -> tuple[Tokens, Tokens, list[Span]]:
    """Return the tokens before and after the text, and the ranges of the answers in the latter."""
    content = f"{draft.instruction}\n\n{running((TEXT, END))}\n\n{draft.question}"
    said = f"{draft.begun} {', '.join(draft.replies)}."
    head, after = around_text(tokenizer, [content, said])
    after = after.removeprefix(" ")
    ranges, place = [], len(after) - len(said) + len(draft.begun)
    for reply in draft.replies:
        ranges.append(span_of(tokenizer, after, reply, place))
        place = after.index(reply, place) + len(reply)
    return head, sentence_tokens(tokenizer, after), ranges


KEYS = 16  # number of keys that a text hides; one is asked for
VALUES = 4  # values per name
PASSAGES, SENTENCES = 4, 3  # passages, and sentences per passage
VERBS = ("bought", "carried", "found", "hid", "lost", "mended", "painted", "sold")
KINDS = ("black", "heavy", "little", "new", "red", "round", "silver", "wooden")
THINGS = (
    *("basket", "bell", "book", "bottle", "chair", "clock", "coat", "drum"),
    *("hammer", "ladder", "lamp", "map", "mirror", "table", "violin", "wheel"),
)
PLACES = (
    *("airport", "bakery", "bridge", "castle", "church", "farm", "garden", "harbour"),
    *("hospital", "library", "market", "museum", "river", "school", "station", "theatre"),
)


def statement(key: Key) -> str:
    """Return the sentence that states the key once."""
    return f"{ANSWER.format(whose=key.whose)}{key.digits}."


def one_of(keys: list[Key], rng: random.Random, depth: float) -> Draft:
    """Draft a text that hides all ``keys`` and asks for the first one, which is at ``depth``."""
    asked_key, *others = keys
    return Draft(
        instruction=instruction(len(keys)),
        question=QUESTION.format(whose=asked_key.whose),
        begun=ANSWER.format(whose=asked_key.whose).rstrip(),
        replies=(asked_key.digits,),
        needed=[Fact(depth, statement(asked_key))],
        others=[Fact(rng.random(), statement(key)) for key in others],
    )


def many_keys(rng: random.Random, depth: float) -> Draft:
    """Ask for one of 16 keys with different names.

    RULER's NIAH with several keys has 4.
    """
    return one_of(draw_keys(rng, KEYS), rng, depth)


def alike_keys(rng: random.Random, depth: float) -> Draft:
    """Ask for the key of one locker; 15 other lockers have numbers that differ in one digit.

    This is RULER's NIAH with distracting needles.
    """
    asked_number = str(rng.choice(NUMBERS))
    # a number must not start with 0
    changed = [
        asked_number[:place] + digit + asked_number[place + 1 :]
        for place in range(len(asked_number))
        for digit in "0123456789"
        if digit != asked_number[place] and (place or digit != "0")
    ]
    lockers = [asked_number, *rng.sample(changed, KEYS - 1)]
    # twice as many, because a key must not be a locker's number
    numbers = map(str, rng.sample(NUMBERS, 2 * KEYS))
    keys = (number for number in numbers if number not in lockers)
    return one_of([Key(f" for locker {it}", next(keys)) for it in lockers], rng, depth)


def several_values(rng: random.Random, depth: float) -> Draft:
    """Ask for all four keys of one name in the order of the text; another name has four keys too.

    This is RULER's NIAH with several values, with a second name.
    """
    asked_name, other = rng.sample(NAMES, 2)
    numbers = [str(number) for number in rng.sample(NUMBERS, 2 * VALUES)]
    depths = sorted([depth, *(rng.random() for _ in range(VALUES - 1))])
    values, more = tuple(numbers[:VALUES]), numbers[VALUES:]

    def fact(depth: float, name: str, digits: str) -> Fact:
        return Fact(depth, f"One of the pass keys for {name} is {digits}.")

    return Draft(
        instruction=instruction(len(numbers)),
        question=f"What are all the pass keys for {asked_name}, in the order of the text?",
        begun=f"The pass keys for {asked_name} are",
        replies=values,
        needed=[fact(at, asked_name, it) for at, it in zip(depths, values, strict=True)],
        others=[fact(rng.random(), other, digits) for digits in more],
    )


def uuids(rng: random.Random, depth: float) -> Draft:
    """Ask for the value of one key of a JSON object with random UUIDs as keys and values.

    Key-value retrieval (Liu et al. 2023, "Lost in the Middle", arXiv 2307.03172). The object fills
    the text; the prompt contains an excerpt of it.
    """

    def drawn() -> str:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    def others() -> Iterator[str]:
        while True:
            yield f'"{drawn()}": "{drawn()}",'

    key, value = drawn(), drawn()
    return Draft(
        instruction="The text below is part of a JSON object. Remember its keys and values.",
        question=f"What is the value of the key {key}?",
        begun=f"The value of the key {key} is",
        replies=(value,),
        needed=[Fact(depth, f'"{key}": "{value}",')],
        filler=running_text(others()),
    )


def copying(rng: random.Random, depth: float) -> Draft:
    """Ask for a copy of one of four passages of three sentences, given its first five words.

    This is the lookup by an n-gram of Jelassi et al. 2024, "Repeat After Me" (arXiv 2402.01032), in
    a long text. Names, verbs, things and places are drawn, so that no passage can be guessed.
    """
    names = iter(rng.sample(NAMES, PASSAGES * SENTENCES))

    def sentence() -> tuple[str, str]:
        verb, kind, thing, place = map(rng.choice, (VERBS, KINDS, THINGS, PLACES))
        return f"{next(names)} {verb} a {kind} {thing}", f"near the {place}."

    def passage() -> tuple[str, str]:
        (begun, rest), *more = (sentence() for _ in range(SENTENCES))
        return begun, " ".join([rest, *map(" ".join, more)])

    (begun, rest), *others = (passage() for _ in range(PASSAGES))
    return Draft(
        instruction="Remember every passage of the text below word for word.",
        question=f'Copy the passage of three sentences that begins with "{begun}".',
        begun=begun,
        replies=(rest.removesuffix("."),),
        needed=[Fact(depth, f"{begun} {rest}")],
        others=[Fact(rng.random(), " ".join(parts)) for parts in others],
    )


CHAINS, VARIABLES, LETTERS = 2, 5, 5  # chains, variables per chain, letters of a variable's name
PAIRS = 4
REACH = 0.4  # share of the text at either end


def tracking(rng: random.Random, depth: float) -> Draft:
    """Ask for five variables with one value: one is assigned it, each other copies the last one.

    RULER's variable tracking, with a second chain as a distractor.
    """
    drawn: dict[str, None] = {}
    while len(drawn) < CHAINS * VARIABLES:
        drawn["".join(rng.choices(string.ascii_uppercase, k=LETTERS))] = None
    names, values = list(drawn), rng.sample(NUMBERS, CHAINS)

    def assignments(number: int, first: float) -> list[Fact]:
        own = names[number * VARIABLES :][:VARIABLES]
        depths = sorted([first, *(rng.random() for _ in own[1:])])
        sources = [str(values[number]), *(f"VAR {name}" for name in own)]
        return [
            Fact(place, f"VAR {name} = {source}.")
            for place, name, source in zip(depths, own, sources, strict=False)
        ]

    return Draft(
        instruction="The text below hides assignments of variables. Remember them.",
        question=f"Which variables have the value {values[0]}, in the order of the text?",
        begun=f"The variables that have the value {values[0]} are",
        replies=tuple(names[:VARIABLES]),
        needed=assignments(0, depth),
        others=[*chain(*(assignments(number, rng.random()) for number in range(1, CHAINS)))],
    )


def two_facts(rng: random.Random, depth: float) -> Draft:
    """Ask for the key of somebody's deputy: one fact names the deputy, another states the key.

    One fact is in the first two fifths of the text and the other in the last two, in either order.
    Three other pairs are hidden as well. bAbI (Weston et al. 2015, arXiv 1502.05698) and RULER's
    HotpotQA have questions over two supporting facts.
    """
    names, numbers = rng.sample(NAMES, 2 * PAIRS), rng.sample(NUMBERS, PAIRS)

    def facts(number: int, first: float) -> list[Fact]:
        chief, deputy = names[2 * number : 2 * number + 2]
        depths = [REACH * first, 1 - REACH * rng.random()]
        rng.shuffle(depths)
        key = f"{ANSWER.format(whose=f' for {deputy}')}{numbers[number]}."
        return [Fact(depths[0], f"The deputy of {chief} is {deputy}."), Fact(depths[1], key)]

    whose = f" for the deputy of {names[0]}"
    return Draft(
        instruction=instruction(PAIRS),
        question=QUESTION.format(whose=whose),
        begun=ANSWER.format(whose=whose).rstrip(),
        replies=(str(numbers[0]),),
        needed=facts(0, depth),
        others=[*chain(*(facts(number, rng.random()) for number in range(1, PAIRS)))],
    )


CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
COMMON, LONG = 10, 4096  # common words of a list, and tokens of a long list
FREQUENT, DOTS = 3, "...."
LEAST = 100  # words of a text with distinct counts of the frequent words


def coined_words(rng: random.Random) -> Iterator[str]:
    """Yield different invented words of three syllables, such as "balonu"."""
    known: set[str] = set()
    while True:
        word = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(3))
        if word not in known:
            known.add(word)
            yield word


def common_words(rng: random.Random, depth: float) -> Draft:
    """Ask for the ten words that a list contains ten times as often as others, in order.

    RULER's common words: 30 times and 3 times; in a list of fewer than 4,096 tokens 10 times and
    once. The words are invented, RULER uses English words.
    """
    words = coined_words(rng)
    common = tuple(next(words) for _ in range(COMMON))

    def fill(room: int, tokens_of: Callable[[str], Tokens]) -> list[Tokens] | None:
        often, seldom = (30, 3) if room >= LONG else (10, 1)
        slots = [place for place in range(COMMON) for _ in range(often)]
        left = room - often * sum(len(tokens_of(word)) for word in common)
        if left < 0:
            return None
        others: list[Tokens] = []
        while left >= seldom * len(word := tokens_of(next(words))):
            others += [word] * seldom
            left -= seldom * len(word)
        slots += range(COMMON, COMMON + len(others))
        rng.shuffle(slots)
        # the order of the common words follows from their first occurrences
        order = [slot for slot in dict.fromkeys(slots) if slot < COMMON]
        tokens = dict(zip(order, map(tokens_of, common), strict=True))
        tokens |= enumerate(others, COMMON)
        # the rest has no room for another word at the frequency of the others
        return fitted(map(tokens_of, words), left) + [tokens[slot] for slot in slots]

    return Draft(
        instruction="The text below is a list of words. Remember which of them are common.",
        question=f"What are the {COMMON} most common words, in the order of the text?",
        begun="The most common words are",
        replies=common,
        filler=fill,
    )


def frequent_words(rng: random.Random, depth: float) -> Draft:
    """Ask for the three most frequent words of a text, the most frequent first.

    RULER's frequent words: invented words whose frequencies fall with the square of their rank (a
    zeta distribution of 2). The most frequent word is dots.
    """
    words = coined_words(rng)
    asked_words = tuple(next(words) for _ in range(FREQUENT))
    ranked = [DOTS, *asked_words]

    def fill(room: int, tokens_of: Callable[[str], Tokens]) -> list[Tokens] | None:
        def pieces(size: int) -> list[Tokens]:
            """Return the words of a text of about ``size`` words, in order of rank."""
            shares = (6 / (pi * rank) ** 2 for rank in range(1, size))
            counts = [*takewhile(bool, (int(size * share) for share in shares))]
            while len(ranked) <= len(counts):
                ranked.append(next(words))
            drawn = zip(ranked, counts, strict=False)
            return [*chain(*(repeat(tokens_of(word), count) for word, count in drawn))]

        def fits(size: int) -> bool:
            return sum(map(len, pieces(size))) <= room

        if not fits(LEAST):
            return None
        high = 2 * LEAST
        while fits(high):
            high *= 2
        text = pieces(bisect_left(range(high), True, lo=LEAST, key=lambda n: not fits(n)) - 1)
        rng.shuffle(text)
        return fitted(repeat(tokens_of(DOTS)), room - sum(map(len, text))) + text

    return Draft(
        instruction=f"The text below has coded words. Ignore the dots {DOTS} in it.",
        question=f"What are the {FREQUENT} most frequent words, the most frequent one first?",
        begun="The most frequent words are",
        replies=asked_words,
        filler=fill,
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("many_keys", "many keys", many_keys),
        Task("several_values", "several values", several_values),
        Task("alike_keys", "alike keys", alike_keys),
        Task("uuid", "UUIDs", uuids),
        Task("copying", "copying", copying),
        Task("tracking", "variable tracking", tracking),
        Task("two_facts", "two facts", two_facts),
        Task("common_words", "common words", common_words),
        Task("frequent_words", "frequent words", frequent_words),
    )
}
