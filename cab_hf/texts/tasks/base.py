"""What tasks share: a draft of what is hidden and asked, fitted to an exact number of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from cab_hf.texts.needles import (
    TEXT,
    Span,
    Tokens,
    around_text,
    endless,
    fitted,
    nearest,
    running,
    sentence_tokens,
    span_of,
    with_statements,
)

# a sentence that is tokenized together with the question, whatever stands before it
END = "That is the end of the text."
# steps of it spread over [0, 1) evenly, however many there are
GOLDEN = (5**0.5 - 1) / 2
# (tokens that are left for it, sentence -> its tokens) -> a text of just so many, in pieces
Filler = Callable[[int, Callable[[str], Tokens]], list[Tokens]]


class Example(NamedTuple):
    """A prompt and, behind it, its answers.

    Attributes:
        tokens: of both, as many as the length that was asked for.
        prompt: how many of them are the prompt; the first answer begins behind it.
        needles: [start, end) in tokens of what the answers need, in the order of the draft; none
            where they need all of the text.
        answers: [start, end) in tokens of each answer.
        replies: the text of each answer.
    """

    tokens: Tokens
    prompt: int
    needles: tuple[Span, ...]
    answers: tuple[Span, ...]
    replies: tuple[str, ...]


class Fact(NamedTuple):
    """A sentence that the text hides, at the sentence border nearest to its depth."""

    depth: float  # from 0 (start of the text) to 1 (its end)
    sentence: str


@dataclass(frozen=True)
class Draft:
    """An example before it is fitted to a length.

    Attributes:
        instruction: what stands before the text.
        question: what stands behind it.
        begun: the beginning of the answer, given to the model; the replies follow it.
        replies: what the model has to say, with commas between them.
        needed: what the answers need.
        others: more that the text hides.
        filler: what is around them; None: running text.
    """

    instruction: str
    question: str
    begun: str
    replies: tuple[str, ...]
    needed: Sequence[Fact] = ()
    others: Sequence[Fact] = ()
    filler: Filler | None = None


@dataclass(frozen=True)
class Task:
    """A kind of question about a long text.

    Attributes:
        name: of the probe in ``fidelity``, and behind ``cab_`` of the task in lm_eval.
        title: heading of its column.
        draft: (what draws everything, where one of the needed facts goes, from 0 to 1) -> what is
            hidden and asked.
    """

    name: str
    title: str
    draft: Callable[[random.Random, float], Draft]

    def make(
        self,
        tokenizer: Any,
        sentences: Sequence[str],
        length: int,
        index: int,
        seed: int | str = 0,
    ) -> Example:
        """The example with number ``index``, a function of the arguments and nothing else.

        Args:
            tokenizer: of transformers; its chat template is used when it has one.
            sentences: of the running text, which starts at a drawn one and goes round.
            length: of prompt and answers together, in tokens.
            index: number of the example; depths of successive ones are spread evenly.
            seed: of all that is drawn. A whole number for evaluation; a text that begins with
                ``finetune/`` for training, so that the two never draw the same.
        Raises:
            ValueError: ``length`` has no room for what is hidden and asked.
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
        try:
            if room < 0:
                raise NoRoom
            pieces = filler(room, tokens_of)
        except NoRoom:
            raise ValueError(
                f"length {length} has no room for the task {self.name}; give a longer one."
            ) from None
        ends = [0, *accumulate(map(len, pieces))]
        borders = [nearest(ends, fact.depth * ends[-1]) for fact in facts]
        tokens, spans = with_statements(head, pieces, statements, borders)
        answers = [(len(tokens) + first, len(tokens) + last) for first, last in answers]
        return Example(
            tokens=(*tokens, *tail),
            prompt=answers[0][0],
            needles=tuple(spans[: len(draft.needed)]),
            answers=tuple(answers),
            replies=draft.replies,
        )


class NoRoom(Exception):
    """What a filler has to hold does not fit."""


def running_text(sentences: Iterator[str]) -> Filler:
    """A filler of the first sentences, which starts within one as excerpts do."""
    return lambda room, tokens_of: fitted(map(tokens_of, sentences), room)


def _around(tokenizer: Any, draft: Draft) -> tuple[Tokens, Tokens, list[Span]]:
    """The tokens before the text and behind it, and which of the latter are the answers."""
    content = f"{draft.instruction}\n\n{running((TEXT, END))}\n\n{draft.question}"
    said = f"{draft.begun} {', '.join(draft.replies)}."
    head, after = around_text(tokenizer, [content, said])
    after = after.removeprefix(" ")
    spans, place = [], len(after) - len(said) + len(draft.begun)
    for reply in draft.replies:
        spans.append(span_of(tokenizer, after, reply, place))
        place = after.index(reply, place) + len(reply)
    return head, sentence_tokens(tokenizer, after), spans
