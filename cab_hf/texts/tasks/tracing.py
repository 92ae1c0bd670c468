"""Tasks whose answer needs several facts, one leading to the next."""

from __future__ import annotations

import random
import string
from typing import ClassVar

from cab_hf.texts.needles import ANSWER, NAMES, NUMBERS, QUESTION, instruction
from cab_hf.texts.tasks.base import Draft, Fact, Task


class Tracking(Task):
    """All five variables that have a value are asked for: one is assigned it, each other the last.

    RULER's variable tracking (Hsieh et al. 2024, arXiv 2404.06654), with a second chain beside it.
    """

    name = "tracking"
    title = "variable tracking"
    CHAINS: ClassVar[int] = 2
    VARIABLES: ClassVar[int] = 5  # of a chain
    LETTERS: ClassVar[int] = 5  # of a variable's name

    def draft(self, rng: random.Random, depth: float) -> Draft:
        count = self.CHAINS * self.VARIABLES
        names: dict[str, None] = {}
        while len(names) < count:
            names["".join(rng.choices(string.ascii_uppercase, k=self.LETTERS))] = None
        names, values = list(names), rng.sample(NUMBERS, self.CHAINS)

        def chain(number: int, first: float) -> tuple[Fact, ...]:
            own = names[number * self.VARIABLES :][: self.VARIABLES]
            depths = sorted([first, *(rng.random() for _ in own[1:])])
            sources = [str(values[number]), *(f"VAR {name}" for name in own)]
            return tuple(
                Fact(place, f"VAR {name} = {source}.")
                for place, name, source in zip(depths, own, sources, strict=False)
            )

        asked, others = chain(0, depth), []
        for number in range(1, self.CHAINS):
            others += chain(number, rng.random())
        return Draft(
            instruction="The text below hides assignments of variables. Remember them.",
            question=f"Which variables have the value {values[0]}, in the order of the text?",
            begun=f"The variables that have the value {values[0]} are",
            replies=tuple(names[: self.VARIABLES]),
            needed=asked,
            others=tuple(others),
        )


class TwoFacts(Task):
    """The key of somebody's deputy is asked for: one fact names the deputy, another has the key.

    One of them is in the first two fifths of the text and the other in the last two, in either
    order; three other pairs are hidden as well. Questions over two supporting facts are those of
    bAbI (Weston et al. 2015, arXiv 1502.05698) and of RULER's HotpotQA (Hsieh et al. 2024, arXiv
    2404.06654).
    """

    name = "two_facts"
    title = "two facts"
    PAIRS: ClassVar[int] = 4
    REACH: ClassVar[float] = 0.4  # of the text at either end

    def draft(self, rng: random.Random, depth: float) -> Draft:
        names = rng.sample(NAMES, 2 * self.PAIRS)
        numbers = rng.sample(NUMBERS, self.PAIRS)

        def facts(number: int, first: float) -> tuple[Fact, Fact]:
            chief, deputy = names[2 * number : 2 * number + 2]
            depths = [self.REACH * first, 1 - self.REACH * rng.random()]
            rng.shuffle(depths)
            key = f"{ANSWER.format(whose=f' for {deputy}')}{numbers[number]}."
            return Fact(depths[0], f"The deputy of {chief} is {deputy}."), Fact(depths[1], key)

        asked, others = facts(0, depth), []
        for number in range(1, self.PAIRS):
            others += facts(number, rng.random())
        whose = f" for the deputy of {names[0]}"
        return Draft(
            instruction=instruction(self.PAIRS),
            question=QUESTION.format(whose=whose),
            begun=ANSWER.format(whose=whose).rstrip(),
            replies=(str(numbers[0]),),
            needed=asked,
            others=tuple(others),
        )
