"""Tasks whose answer stands in the text and has to be looked up."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator

from cab_hf.texts.needles import ANSWER, NAMES, NUMBERS, QUESTION, Key, draw_keys, instruction
from cab_hf.texts.tasks.base import Draft, Fact, running_text

KEYS = 16  # that a text hides, of which one is asked for
VALUES = 4  # of a name
PASSAGES, SENTENCES = 4, 3  # sentences of a passage
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
    """The key said once."""
    return f"{ANSWER.format(whose=key.whose)}{key.digits}."


def one_of(keys: list[Key], rng: random.Random, depth: float) -> Draft:
    """A draft that hides all ``keys`` and asks for the first one, which is at ``depth``."""
    asked, *others = keys
    return Draft(
        instruction=instruction(len(keys)),
        question=QUESTION.format(whose=asked.whose),
        begun=ANSWER.format(whose=asked.whose).rstrip(),
        replies=(asked.digits,),
        needed=[Fact(depth, statement(asked))],
        others=[Fact(rng.random(), statement(key)) for key in others],
    )


def many_keys(rng: random.Random, depth: float) -> Draft:
    """One of 16 keys of different names is asked for.

    RULER's NIAH with several keys (Hsieh et al. 2024, arXiv 2404.06654), which has 4.
    """
    return one_of(draw_keys(rng, KEYS), rng, depth)


def alike_keys(rng: random.Random, depth: float) -> Draft:
    """The key of one locker is asked for; 15 others have numbers that differ in one digit.

    RULER's NIAH with distracting needles (Hsieh et al. 2024, arXiv 2404.06654).
    """
    asked = str(rng.choice(NUMBERS))
    # a first digit of 0 would be no number
    changed = [
        asked[:place] + digit + asked[place + 1 :]
        for place in range(len(asked))
        for digit in "0123456789"
        if digit != asked[place] and (place or digit != "0")
    ]
    lockers = [asked, *rng.sample(changed, KEYS - 1)]
    # twice as many, as a key may be no locker's number
    numbers = map(str, rng.sample(NUMBERS, 2 * KEYS))
    keys = (number for number in numbers if number not in lockers)
    return one_of([Key(f" for locker {it}", next(keys)) for it in lockers], rng, depth)


def several_values(rng: random.Random, depth: float) -> Draft:
    """All four keys of one name are asked for, in the order of the text; another name has as many.

    RULER's NIAH with several values (Hsieh et al. 2024, arXiv 2404.06654), which has no other name.
    """
    asked, other = rng.sample(NAMES, 2)
    numbers = [str(number) for number in rng.sample(NUMBERS, 2 * VALUES)]
    depths = sorted([depth, *(rng.random() for _ in range(VALUES - 1))])
    values, more = tuple(numbers[:VALUES]), numbers[VALUES:]

    def fact(depth: float, name: str, digits: str) -> Fact:
        return Fact(depth, f"One of the pass keys for {name} is {digits}.")

    return Draft(
        instruction=instruction(len(numbers)),
        question=f"What are all the pass keys for {asked}, in the order of the text?",
        begun=f"The pass keys for {asked} are",
        replies=values,
        needed=[fact(at, asked, it) for at, it in zip(depths, values, strict=True)],
        others=[fact(rng.random(), other, digits) for digits in more],
    )


def uuids(rng: random.Random, depth: float) -> Draft:
    """The value of one key of a JSON object whose keys and values are all random UUIDs.

    Key-value retrieval (Liu et al. 2023, "Lost in the Middle", arXiv 2307.03172). The object fills
    the text, of which the prompt has an excerpt.
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
    """One of four passages of three sentences is to be copied, told by its first five words.

    The lookup by an n-gram of Jelassi et al. 2024, "Repeat After Me" (arXiv 2402.01032), in a long
    text. Names, verbs, things and places are drawn, so that no passage can be guessed.
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
