"""Tasks whose answer needs several facts, one leading to the next."""

from __future__ import annotations

import random
import string
from itertools import chain

from cab_hf.texts.needles import ANSWER, NAMES, NUMBERS, QUESTION, instruction
from cab_hf.texts.tasks.base import Draft, Fact

CHAINS, VARIABLES, LETTERS = 2, 5, 5  # variables of a chain, letters of a variable's name
PAIRS = 4
REACH = 0.4  # of the text at either end


def tracking(rng: random.Random, depth: float) -> Draft:
    """All five variables that have a value are asked for: one is assigned it, each other the last.

    RULER's variable tracking (Hsieh et al. 2024, arXiv 2404.06654), with a second chain beside it.
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
    """The key of somebody's deputy is asked for: one fact names the deputy, another has the key.

    One of them is in the first two fifths of the text and the other in the last two, in either
    order; three other pairs are hidden as well. Questions over two supporting facts are those of
    bAbI (Weston et al. 2015, arXiv 1502.05698) and of RULER's HotpotQA (Hsieh et al. 2024, arXiv
    2404.06654).
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
