"""Tasks of long-context benchmarks: prompts of an exact length in tokens, and their answers.

`TASKS` is a dict from the name of a task to the `Task`. Most tasks come from RULER (Hsieh et al.
2024, arXiv 2404.06654). ``TASKS["uuid"].make(tokenizer, sentences, length, index, seed)``
returns an `Example`, a prompt with its answers, for teacher forcing, generation or training.
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
    cut_to_length,
    draw_keys,
    endless,
    instruction,
    nearest,
    running,
    sentence_tokens,
    span_of,
    with_statements,
)

__all__ = ["TASKS", "Example", "Task"]

# last sentence of every text. It separates the filler text from the question, so that the tokens of
# the question do not depend on the filler text
END = "That is the end of the text."
# golden ratio: the fractional parts of its multiples are evenly spread over [0, 1), for any number
# of multiples
GOLDEN = (5**0.5 - 1) / 2
# function that builds the text around the facts. Its arguments are a length in tokens, and a
# function that tokenizes a sentence. It returns the tokens of each piece of the text, such as a
# sentence, with exactly this length in total. It returns None if the length is too small
Filler = Callable[[int, Callable[[str], Tokens]], list[Tokens] | None]


class Example(NamedTuple):
    """The tokens of a prompt and its answers, with the positions of answers and needed facts.

    Attributes:
        tokens: tokens of the prompt and of the answers.
        prompt: number of tokens in the prompt. The first answer starts after the prompt.
        needles: spans of the facts that the answers need; empty if the answers need the whole text.
        answers: span of each answer.
        replies: each answer as a string.
    """

    tokens: Tokens
    prompt: int
    needles: tuple[Span, ...]
    answers: tuple[Span, ...]
    replies: tuple[str, ...]


class Fact(NamedTuple):
    """A sentence to insert in the text, at the sentence border nearest to a relative position.

    Attributes:
        depth: position from 0 (start of the text) to 1 (end of the text).
        sentence: the sentence.
    """

    depth: float
    sentence: str


@dataclass(frozen=True)
class Draft:
    """An example before its facts are inserted in a text of the required length.

    Attributes:
        instruction: instruction before the text.
        question: question after the text.
        answer_start: start of the model's answer, which is part of the prompt.
        replies: correct answers after ``answer_start``, separated by commas.
        needed_facts: facts that the answers need.
        other_facts: other facts in the text.
        filler: function that builds the text around the facts; None means consecutive sentences.
    """

    instruction: str
    question: str
    answer_start: str
    replies: tuple[str, ...]
    needed_facts: Sequence[Fact] = ()
    other_facts: Sequence[Fact] = ()
    filler: Filler | None = None


@dataclass(frozen=True)
class Task:
    """A benchmark task: a kind of question about a long text, with a generator of examples.

    Attributes:
        name: name of the probe in ``fidelity``. The name of the task in lm_eval is "cab_" + name.
        title: heading of the task's column in tables.
        draft: function of a random generator and of a depth from 0 to 1, at which one needed fact
            is inserted. Returns the `Draft` of an example.
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
        """Build an example. Equal arguments return equal examples.

        Args:
            tokenizer: a tokenizer of transformers. Its chat template is used if there is one.
            sentences: sentences of the filler text, which starts at a random sentence and
                continues with the first sentence after the last.
            length: number of tokens of prompt and answers together.
            index: index of the example. The depths of successive examples are evenly spread.
            seed: a whole number for evaluation, or a string that starts with ``finetune/`` for
                training, so that training and evaluation never draw the same example.

        Raises:
            ValueError: ``length`` is too small for the facts and the question.
        """
        start = random.Random(f"{seed}/{self.name}/depth").random()
        rng = random.Random(f"{seed}/{self.name}/{length}/{index}")
        draft = self.draft(rng, (start + index * GOLDEN) % 1)
        head, tail, answers = _around(tokenizer, draft)
        tokens_of = partial(sentence_tokens, tokenizer)
        facts = [*draft.needed_facts, *draft.other_facts]
        statements = [tokens_of(fact.sentence) for fact in facts]

        filler = draft.filler or running_text(endless(sentences, rng))
        num_filler = length - len(head) - len(tail) - sum(map(len, statements))
        pieces = filler(num_filler, tokens_of) if num_filler >= 0 else None
        if pieces is None:
            raise ValueError(
                f"length must have room for the task {self.name}, got {length}. Give a larger "
                "length."
            )
        ends = [0, *accumulate(map(len, pieces))]
        borders = [nearest(ends, fact.depth * ends[-1]) for fact in facts]
        tokens, spans = with_statements(head, pieces, statements, borders)
        answers = [(len(tokens) + first, len(tokens) + last) for first, last in answers]
        return Example(
            tokens=(*tokens, *tail),
            prompt=answers[0][0],
            needles=tuple(spans[: len(draft.needed_facts)]),
            answers=tuple(answers),
            replies=draft.replies,
        )


def running_text(sentences: Iterator[str]) -> Filler:
    """Return a `Filler` that concatenates ``sentences``, and cuts excess tokens at the start."""
    return lambda length, tokens_of: cut_to_length(map(tokens_of, sentences), length)


def _around(tokenizer: Any, draft: Draft) -> tuple[Tokens, Tokens, list[Span]]:
    """Tokenize the instruction, question and answers of a draft, without the text between.

    Returns:
        head: tokens before the text, with the instruction.
        tail: tokens after the text, with the question and the answers.
        answers: the span of each answer in ``tail``.
    """
    request = f"{draft.instruction}\n\n{running((TEXT, END))}\n\n{draft.question}"
    answer = f"{draft.answer_start} {', '.join(draft.replies)}."
    head, after = around_text(tokenizer, [request, answer])
    after = after.removeprefix(" ")
    # index of the character at which the search for the next reply starts
    search_start = len(after) - len(answer) + len(draft.answer_start)
    spans = []
    for reply in draft.replies:
        spans.append(span_of(tokenizer, after, reply, search_start))
        search_start = after.index(reply, search_start) + len(reply)
    return head, sentence_tokens(tokenizer, after), spans


# keys in a text of `many_keys` and `alike_keys`; the question is about one key
NUM_KEYS = 16
# keys per name in `several_values`
VALUES = 4
# passages in a text of `copying`
PASSAGES = 4
# sentences per passage in `copying`
SENTENCES = 3
# words of the sentences in `copying`
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
    """Return a sentence that states ``key`` once; `Key.statement` states a key twice."""
    return f"{ANSWER.format(whose=key.whose)}{key.digits}."


def one_of(keys: list[Key], rng: random.Random, depth: float) -> Draft:
    """Return a draft with several keys in the text and a question about the first key.

    Args:
        keys: the keys.
        rng: random generator for the positions of the other keys.
        depth: position of the first key in the text, from 0 to 1.
    """
    asked_key, *other_keys = keys
    return Draft(
        instruction=instruction(len(keys)),
        question=QUESTION.format(whose=asked_key.whose),
        answer_start=ANSWER.format(whose=asked_key.whose).rstrip(),
        replies=(asked_key.digits,),
        needed_facts=[Fact(depth, statement(asked_key))],
        other_facts=[Fact(rng.random(), statement(key)) for key in other_keys],
    )


def many_keys(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for one of 16 keys with different names.

    RULER's multi-key NIAH is the same task with 4 keys.
    """
    return one_of(draw_keys(rng, NUM_KEYS), rng, depth)


def alike_keys(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for the key of one of 16 lockers.

    The numbers of the other 15 lockers differ from the number of this locker in one digit. This is
    RULER's NIAH with distracting needles.
    """
    asked_number = str(rng.choice(NUMBERS))
    # a number must not start with 0
    changed = [
        asked_number[:i] + digit + asked_number[i + 1 :]
        for i in range(len(asked_number))
        for digit in "0123456789"
        if digit != asked_number[i] and (i > 0 or digit != "0")
    ]
    lockers = [asked_number, *rng.sample(changed, NUM_KEYS - 1)]
    # 2 * NUM_KEYS numbers, because at most NUM_KEYS numbers are those of lockers and cannot be keys
    candidates = map(str, rng.sample(NUMBERS, 2 * NUM_KEYS))
    numbers = (number for number in candidates if number not in lockers)
    keys = [Key(f" for locker {locker}", next(numbers)) for locker in lockers]
    return one_of(keys, rng, depth)


def several_values(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for all four keys of one name, in the order of the text.

    This is RULER's NIAH with several values. Four keys of another name are distractors.
    """
    asked_name, other_name = rng.sample(NAMES, 2)
    numbers = [str(number) for number in rng.sample(NUMBERS, 2 * VALUES)]
    depths = sorted([depth, *(rng.random() for _ in range(VALUES - 1))])
    asked_values, other_values = tuple(numbers[:VALUES]), numbers[VALUES:]

    def fact(depth: float, name: str, digits: str) -> Fact:
        return Fact(depth, f"One of the pass keys for {name} is {digits}.")

    return Draft(
        instruction=instruction(len(numbers)),
        question=f"What are all the pass keys for {asked_name}, in the order of the text?",
        answer_start=f"The pass keys for {asked_name} are",
        replies=asked_values,
        needed_facts=[
            fact(value_depth, asked_name, digits)
            for value_depth, digits in zip(depths, asked_values, strict=True)
        ],
        other_facts=[fact(rng.random(), other_name, digits) for digits in other_values],
    )


def uuids(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for the value of a key in a JSON object of random UUIDs.

    The task is the key-value retrieval of Liu et al. 2023, "Lost in the Middle" (arXiv 2307.03172).
    The text consists of key-value pairs of the object.
    """

    def draw_uuid() -> str:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    def other_pairs() -> Iterator[str]:
        while True:
            yield f'"{draw_uuid()}": "{draw_uuid()}",'

    key, value = draw_uuid(), draw_uuid()
    return Draft(
        instruction="The text below is part of a JSON object. Remember its keys and values.",
        question=f"What is the value of the key {key}?",
        answer_start=f"The value of the key {key} is",
        replies=(value,),
        needed_facts=[Fact(depth, f'"{key}": "{value}",')],
        filler=running_text(other_pairs()),
    )


def copying(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for a copy of one of four passages, given its first five words.

    The task is the n-gram lookup of Jelassi et al. 2024, "Repeat After Me" (arXiv 2402.01032), in a
    long text. A passage has three sentences of random words, so that a model cannot guess the
    passage.
    """
    names = iter(rng.sample(NAMES, PASSAGES * SENTENCES))

    def draw_sentence() -> tuple[str, str]:
        """Return a random sentence in two parts: the first five words, and the other words."""
        verb, kind, thing, location = map(rng.choice, (VERBS, KINDS, THINGS, PLACES))
        return f"{next(names)} {verb} a {kind} {thing}", f"near the {location}."

    def draw_passage() -> tuple[str, str]:
        """Return a random passage in two parts: the first five words, and the other words."""
        (start, end), *sentences = (draw_sentence() for _ in range(SENTENCES))
        return start, " ".join([end, *map(" ".join, sentences)])

    (start, end), *other_passages = (draw_passage() for _ in range(PASSAGES))
    return Draft(
        instruction="Remember every passage of the text below word for word.",
        question=f'Copy the passage of three sentences that begins with "{start}".',
        answer_start=start,
        replies=(end.removesuffix("."),),
        needed_facts=[Fact(depth, f"{start} {end}")],
        other_facts=[Fact(rng.random(), " ".join(passage)) for passage in other_passages],
    )


# chains of assignments in `tracking`
CHAINS = 2
# variables per chain
VARIABLES = 5
# letters in the name of a variable
LETTERS = 5
# pairs of facts in a text of `two_facts`
NUM_PAIRS = 4
# the facts of `two_facts` are in the first 40 % and the last 40 % of the text
OUTER_SHARE = 0.4


def tracking(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for all variables of a chain of assignments.

    A chain is ``VAR A = 12345``, ``VAR B = VAR A``, ``VAR C = VAR B`` and so on. This is RULER's
    variable tracking, with a second chain as a distractor.
    """
    # a dict without values, as an ordered set
    unique_names: dict[str, None] = {}
    while len(unique_names) < CHAINS * VARIABLES:
        unique_names["".join(rng.choices(string.ascii_uppercase, k=LETTERS))] = None
    names, values = list(unique_names), rng.sample(NUMBERS, CHAINS)

    def assignments(chain_index: int, one_depth: float) -> list[Fact]:
        """Return the assignments of a chain as facts; one of the facts has depth ``one_depth``."""
        chain_names = names[chain_index * VARIABLES :][:VARIABLES]
        depths = sorted([one_depth, *(rng.random() for _ in chain_names[1:])])
        sources = [str(values[chain_index]), *(f"VAR {name}" for name in chain_names)]
        return [
            Fact(depth, f"VAR {name} = {source}.")
            for depth, name, source in zip(depths, chain_names, sources, strict=False)
        ]

    return Draft(
        instruction="The text below hides assignments of variables. Remember them.",
        question=f"Which variables have the value {values[0]}, in the order of the text?",
        answer_start=f"The variables that have the value {values[0]} are",
        replies=tuple(names[:VARIABLES]),
        needed_facts=assignments(0, depth),
        other_facts=[*chain(*(assignments(i, rng.random()) for i in range(1, CHAINS)))],
    )


def two_facts(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for the key of a person's deputy.

    One fact names the deputy, and another fact states the deputy's key. One of both facts is in the
    first two fifths of the text, and the other in the last two fifths, in random order. The text
    contains three other pairs of facts. bAbI (Weston et al. 2015, arXiv 1502.05698) and RULER's
    HotpotQA have questions over two supporting facts.
    """
    names, numbers = rng.sample(NAMES, 2 * NUM_PAIRS), rng.sample(NUMBERS, NUM_PAIRS)

    def facts(pair: int, depth: float) -> list[Fact]:
        """Return the two facts of a pair, one in the first and one in the last part of the text.

        Args:
            pair: index of the pair.
            depth: position of the first of the two facts inside the first part of the text, from 0
                to 1.
        """
        chief, deputy = names[2 * pair : 2 * pair + 2]
        depths = [OUTER_SHARE * depth, 1 - OUTER_SHARE * rng.random()]
        rng.shuffle(depths)
        key = f"{ANSWER.format(whose=f' for {deputy}')}{numbers[pair]}."
        return [Fact(depths[0], f"The deputy of {chief} is {deputy}."), Fact(depths[1], key)]

    whose = f" for the deputy of {names[0]}"
    return Draft(
        instruction=instruction(NUM_PAIRS),
        question=QUESTION.format(whose=whose),
        answer_start=ANSWER.format(whose=whose).rstrip(),
        replies=(str(numbers[0]),),
        needed_facts=facts(0, depth),
        other_facts=[*chain(*(facts(pair, rng.random()) for pair in range(1, NUM_PAIRS)))],
    )


# letters of the words that `coined_words` yields
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
# number of common words in a list of `common_words`
COMMON = 10
# number of tokens from which on `common_words` repeats each word of its list three times as often
LONG_LIST_TOKENS = 4096
# number of words that the question of `frequent_words` asks for
FREQUENT = 3
# most frequent word in a text of `frequent_words`. The question says to ignore it, as in RULER
DOTS = "...."
# smallest number of words in a text of `frequent_words`. With fewer words, the words that are asked
# for could occur equally often
MIN_WORDS = 100


def coined_words(rng: random.Random) -> Iterator[str]:
    """Yield random invented words of three syllables, such as "balonu", without repetition."""
    yielded: set[str] = set()
    while True:
        word = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(3))
        if word not in yielded:
            yielded.add(word)
            yield word


def common_words(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for the ten words that a list contains most often.

    This is RULER's task of common words, with invented instead of English words. The ten words
    occur 30 times each and the others 3 times each; in a list of fewer than 4,096 tokens, 10 times
    and once. The answer has the words in the order of the list. ``depth`` is not used.
    """
    words = coined_words(rng)
    common = tuple(next(words) for _ in range(COMMON))

    def fill(length: int, tokens_of: Callable[[str], Tokens]) -> list[Tokens] | None:
        """Return the shuffled list of words with ``length`` tokens; a `Filler`."""
        common_count, other_count = (30, 3) if length >= LONG_LIST_TOKENS else (10, 1)
        # every entry of the list is an index: below COMMON for common words
        entries = [index for index in range(COMMON) for _ in range(common_count)]
        remaining = length - common_count * sum(len(tokens_of(word)) for word in common)
        if remaining < 0:
            return None
        others: list[Tokens] = []
        while remaining >= other_count * len(word := tokens_of(next(words))):
            others += [word] * other_count
            remaining -= other_count * len(word)
        entries += range(COMMON, COMMON + len(others))
        rng.shuffle(entries)
        # renumber the common words, so that they first occur in the order of the answer
        order = [index for index in dict.fromkeys(entries) if index < COMMON]
        tokens = dict(zip(order, map(tokens_of, common), strict=True))
        tokens |= enumerate(others, COMMON)
        # too few tokens remain for another word with ``other_count`` occurrences
        padding = cut_to_length(map(tokens_of, words), remaining)
        return padding + [tokens[index] for index in entries]

    return Draft(
        instruction="The text below is a list of words. Remember which of them are common.",
        question=f"What are the {COMMON} most common words, in the order of the text?",
        answer_start="The most common words are",
        replies=common,
        filler=fill,
    )


def frequent_words(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for the three most frequent words, the most frequent first.

    This is RULER's task of frequent words: invented words whose frequency is proportional to
    1 / rank² (a zeta distribution with exponent 2). The word with rank 1 consists of dots, and the
    question says to ignore dots. ``depth`` is not used.
    """
    words = coined_words(rng)
    asked_words = tuple(next(words) for _ in range(FREQUENT))
    words_by_rank = [DOTS, *asked_words]

    def fill(length: int, tokens_of: Callable[[str], Tokens]) -> list[Tokens] | None:
        """Return the tokens of as many words as fit, and of dots up to ``length``.

        Returns None if fewer than `MIN_WORDS` words fit. The function is a `Filler`.
        """

        def pieces(size: int) -> list[Tokens]:
            """Return the tokens of all occurrences of all words, for about ``size`` occurrences."""
            shares = (6 / (pi * rank) ** 2 for rank in range(1, size))
            counts = [*takewhile(bool, (int(size * share) for share in shares))]
            while len(words_by_rank) <= len(counts):
                words_by_rank.append(next(words))
            word_counts = zip(words_by_rank, counts, strict=False)
            return [*chain(*(repeat(tokens_of(word), count) for word, count in word_counts))]

        def is_too_long(size: int) -> bool:
            return sum(map(len, pieces(size))) > length

        if is_too_long(MIN_WORDS):
            return None
        upper_bound = 2 * MIN_WORDS
        while not is_too_long(upper_bound):
            upper_bound *= 2
        first_too_long = bisect_left(range(upper_bound), True, lo=MIN_WORDS, key=is_too_long)
        text = pieces(first_too_long - 1)
        rng.shuffle(text)
        padding = cut_to_length(repeat(tokens_of(DOTS)), length - sum(map(len, text)))
        return padding + text

    return Draft(
        instruction=f"The text below has coded words. Ignore the dots {DOTS} in it.",
        question=f"What are the {FREQUENT} most frequent words, the most frequent one first?",
        answer_start="The most frequent words are",
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
