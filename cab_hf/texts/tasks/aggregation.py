"""Tasks whose answer is in no place of the text: words are to be counted in all of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain, repeat, takewhile
from math import pi

from cab_hf.texts.needles import Tokens, fitted
from cab_hf.texts.tasks.base import Draft, NoRoom

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
COMMON, LONG = 10, 4096  # common words of a list, and tokens of a long one
FREQUENT, DOTS = 3, "...."
LEAST = 100  # words of a text in which the frequent ones differ in number


def coined_words(rng: random.Random) -> Iterator[str]:
    """Different words of three syllables that no language needs to have, such as "balonu"."""
    known: set[str] = set()
    while True:
        word = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(3))
        if word not in known:
            known.add(word)
            yield word


def common_words(rng: random.Random, depth: float) -> Draft:
    """The ten words that a list has ten times as often as all others, in the order they appear in.

    RULER's common words (Hsieh et al. 2024, arXiv 2404.06654): 30 times and 3 times; in a list of
    fewer than 4,096 tokens 10 times and once. Words are coined, where RULER has English ones.
    """
    words = coined_words(rng)
    common = tuple(next(words) for _ in range(COMMON))

    def fill(room: int, tokens_of: Callable[[str], Tokens]) -> list[Tokens]:
        often, seldom = (30, 3) if room >= LONG else (10, 1)
        slots = [place for place in range(COMMON) for _ in range(often)]
        left = room - often * sum(len(tokens_of(word)) for word in common)
        if left < 0:
            raise NoRoom
        others: list[Tokens] = []
        while left >= seldom * len(word := tokens_of(next(words))):
            others += [word] * seldom
            left -= seldom * len(word)
        slots += range(COMMON, COMMON + len(others))
        rng.shuffle(slots)
        # which of the common words is which follows from where they come first
        order = [slot for slot in dict.fromkeys(slots) if slot < COMMON]
        tokens = dict(zip(order, map(tokens_of, common), strict=True))
        tokens |= enumerate(others, COMMON)
        # what is left has room for no further word as often as the others
        return fitted(map(tokens_of, words), left) + [tokens[slot] for slot in slots]

    return Draft(
        instruction="The text below is a list of words. Remember which of them are common.",
        question=f"What are the {COMMON} most common words, in the order of the text?",
        begun="The most common words are",
        replies=common,
        filler=fill,
    )


def frequent_words(rng: random.Random, depth: float) -> Draft:
    """The three words that a text has most often, the first one first.

    RULER's frequent words (Hsieh et al. 2024, arXiv 2404.06654): coined words whose frequencies
    fall with the square of their rank (a zeta distribution of 2), the first of them dots.
    """
    words = coined_words(rng)
    asked = tuple(next(words) for _ in range(FREQUENT))
    ranked = [DOTS, *asked]

    def fill(room: int, tokens_of: Callable[[str], Tokens]) -> list[Tokens]:
        def pieces(size: int) -> list[Tokens]:
            """The words of a text of about ``size`` words, in order of rank."""
            shares = (6 / (pi * rank) ** 2 for rank in range(1, size))
            counts = [*takewhile(bool, (int(size * share) for share in shares))]
            while len(ranked) <= len(counts):
                ranked.append(next(words))
            drawn = zip(ranked, counts, strict=False)
            return [*chain(*(repeat(tokens_of(word), count) for word, count in drawn))]

        def fits(size: int) -> bool:
            return sum(map(len, pieces(size))) <= room

        if not fits(LEAST):
            raise NoRoom
        low, high = LEAST, 2 * LEAST
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        text = pieces(low)
        rng.shuffle(text)
        return fitted(repeat(tokens_of(DOTS)), room - sum(map(len, text))) + text

    return Draft(
        instruction=f"The text below has coded words. Ignore the dots {DOTS} in it.",
        question=f"What are the {FREQUENT} most frequent words, the most frequent one first?",
        begun="The most frequent words are",
        replies=asked,
        filler=fill,
    )
