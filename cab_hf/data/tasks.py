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
    ANSWER_START_TEMPLATE,
    KEY_NUMBERS,
    PERSON_NAMES,
    QUESTION_TEMPLATE,
    TEXT_PLACEHOLDER,
    Key,
    Span,
    Tokens,
    cut_to_length,
    cycle_sentences,
    draw_keys,
    find_nearest_index,
    find_span,
    insert_statements,
    join_sentences,
    make_instruction,
    render_around_text,
    sentence_tokens,
)

__all__ = ["TASKS", "Example", "Task"]

# last sentence of every text. It separates the filler text from the question, so that the tokens of
# the question do not depend on the filler text
END_SENTENCE = "That is the end of the text."
# golden ratio: the fractional parts of its multiples are evenly spread over [0, 1), for any number
# of multiples
GOLDEN_RATIO = (5**0.5 - 1) / 2
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
        first_depth = random.Random(f"{seed}/{self.name}/depth").random()
        rng = random.Random(f"{seed}/{self.name}/{length}/{index}")
        draft = self.draft(rng, (first_depth + index * GOLDEN_RATIO) % 1)
        prefix_tokens, suffix_tokens, answers = _tokenize_around_text(tokenizer, draft)
        tokenize = partial(sentence_tokens, tokenizer)
        facts = [*draft.needed_facts, *draft.other_facts]
        statements = [tokenize(fact.sentence) for fact in facts]

        build_filler = draft.filler or make_running_filler(cycle_sentences(sentences, rng))
        num_filler_tokens = (
            length - len(prefix_tokens) - len(suffix_tokens) - sum(map(len, statements))
        )
        pieces = build_filler(num_filler_tokens, tokenize) if num_filler_tokens >= 0 else None
        if pieces is None:
            raise ValueError(
                f"length must have room for the task {self.name}, got {length}. Give a larger "
                "length."
            )
        piece_ends = [0, *accumulate(map(len, pieces))]
        borders = [find_nearest_index(piece_ends, fact.depth * piece_ends[-1]) for fact in facts]
        tokens, spans = insert_statements(prefix_tokens, pieces, statements, borders)
        answers = [
            (len(tokens) + answer_start, len(tokens) + answer_end)
            for answer_start, answer_end in answers
        ]
        return Example(
            tokens=(*tokens, *suffix_tokens),
            prompt=answers[0][0],
            needles=tuple(spans[: len(draft.needed_facts)]),
            answers=tuple(answers),
            replies=draft.replies,
        )


def make_running_filler(sentences: Iterator[str]) -> Filler:
    """Return a `Filler` that concatenates ``sentences``, and cuts excess tokens at the start."""
    return lambda length, tokens_of: cut_to_length(map(tokens_of, sentences), length)


def _tokenize_around_text(tokenizer: Any, draft: Draft) -> tuple[Tokens, Tokens, list[Span]]:
    """Tokenize the instruction, question and answers of a draft, without the text between.

    Returns:
        prefix_tokens: tokens before the text, with the instruction.
        suffix_tokens: tokens after the text, with the question and the answers.
        reply_spans: the span of each answer in ``suffix_tokens``.
    """
    placeholder_text = join_sentences((TEXT_PLACEHOLDER, END_SENTENCE))
    user_turn = f"{draft.instruction}\n\n{placeholder_text}\n\n{draft.question}"
    assistant_turn = f"{draft.answer_start} {', '.join(draft.replies)}."
    prefix_tokens, text_after = render_around_text(tokenizer, [user_turn, assistant_turn])
    text_after = text_after.removeprefix(" ")
    # index of the character at which the search for the next reply starts
    search_start = len(text_after) - len(assistant_turn) + len(draft.answer_start)
    reply_spans = []
    for reply in draft.replies:
        reply_spans.append(find_span(tokenizer, text_after, reply, search_start))
        search_start = text_after.index(reply, search_start) + len(reply)
    return prefix_tokens, sentence_tokens(tokenizer, text_after), reply_spans


# keys in a text of `draft_many_keys` and `draft_alike_keys`; the question is about one key
NUM_KEYS = 16
# keys per name in `draft_several_values`
VALUES_PER_NAME = 4
# passages in a text of `draft_copying`
NUM_PASSAGES = 4
# sentences per passage in `draft_copying`
SENTENCES_PER_PASSAGE = 3
# words of the sentences in `draft_copying`
VERBS = ("bought", "carried", "found", "hid", "lost", "mended", "painted", "sold")
ADJECTIVES = ("black", "heavy", "little", "new", "red", "round", "silver", "wooden")
OBJECTS = (
    *("basket", "bell", "book", "bottle", "chair", "clock", "coat", "drum"),
    *("hammer", "ladder", "lamp", "map", "mirror", "table", "violin", "wheel"),
)
PLACES = (
    *("airport", "bakery", "bridge", "castle", "church", "farm", "garden", "harbour"),
    *("hospital", "library", "market", "museum", "river", "school", "station", "theatre"),
)


def state_key(key: Key) -> str:
    """Return a sentence that states ``key`` once; `Key.statement` states a key twice."""
    return f"{ANSWER_START_TEMPLATE.format(whose=key.owner_phrase)}{key.digits}."


def draft_question_about_first_key(keys: list[Key], rng: random.Random, depth: float) -> Draft:
    """Return a draft with several keys in the text and a question about the first key.

    Args:
        keys: the keys.
        rng: random generator for the positions of the other keys.
        depth: position of the first key in the text, from 0 to 1.
    """
    asked_key, *other_keys = keys
    return Draft(
        instruction=make_instruction(len(keys)),
        question=QUESTION_TEMPLATE.format(whose=asked_key.owner_phrase),
        answer_start=ANSWER_START_TEMPLATE.format(whose=asked_key.owner_phrase).rstrip(),
        replies=(asked_key.digits,),
        needed_facts=[Fact(depth, state_key(asked_key))],
        other_facts=[Fact(rng.random(), state_key(key)) for key in other_keys],
    )


def draft_many_keys(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for one of 16 keys with different names.

    RULER's multi-key NIAH is the same task with 4 keys.
    """
    return draft_question_about_first_key(draw_keys(rng, NUM_KEYS), rng, depth)


def draft_alike_keys(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for the key of one of 16 lockers.

    The numbers of the other 15 lockers differ from the number of this locker in one digit. This is
    RULER's NIAH with distracting needles.
    """
    asked_number = str(rng.choice(KEY_NUMBERS))
    # a number must not start with 0
    changed_numbers = [
        asked_number[:digit_index] + digit + asked_number[digit_index + 1 :]
        for digit_index in range(len(asked_number))
        for digit in "0123456789"
        if digit != asked_number[digit_index] and (digit_index > 0 or digit != "0")
    ]
    locker_numbers = [asked_number, *rng.sample(changed_numbers, NUM_KEYS - 1)]
    # 2 * NUM_KEYS numbers, because at most NUM_KEYS numbers are those of lockers and cannot be keys
    candidate_numbers = map(str, rng.sample(KEY_NUMBERS, 2 * NUM_KEYS))
    key_numbers = (number for number in candidate_numbers if number not in locker_numbers)
    keys = [
        Key(f" for locker {locker_number}", next(key_numbers)) for locker_number in locker_numbers
    ]
    return draft_question_about_first_key(keys, rng, depth)


def draft_several_values(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for all four keys of one name, in the order of the text.

    This is RULER's NIAH with several values. Four keys of another name are distractors.
    """
    asked_name, other_name = rng.sample(PERSON_NAMES, 2)
    key_numbers = [str(number) for number in rng.sample(KEY_NUMBERS, 2 * VALUES_PER_NAME)]
    depths = sorted([depth, *(rng.random() for _ in range(VALUES_PER_NAME - 1))])
    asked_values, other_values = tuple(key_numbers[:VALUES_PER_NAME]), key_numbers[VALUES_PER_NAME:]

    def make_fact(depth: float, person_name: str, digits: str) -> Fact:
        return Fact(depth, f"One of the pass keys for {person_name} is {digits}.")

    return Draft(
        instruction=make_instruction(len(key_numbers)),
        question=f"What are all the pass keys for {asked_name}, in the order of the text?",
        answer_start=f"The pass keys for {asked_name} are",
        replies=asked_values,
        needed_facts=[
            make_fact(value_depth, asked_name, digits)
            for value_depth, digits in zip(depths, asked_values, strict=True)
        ],
        other_facts=[make_fact(rng.random(), other_name, digits) for digits in other_values],
    )


def draft_uuids(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for the value of a key in a JSON object of random UUIDs.

    The task is the key-value retrieval of Liu et al. 2023, "Lost in the Middle" (arXiv 2307.03172).
    The text consists of key-value pairs of the object.
    """

    def draw_uuid() -> str:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    def make_other_pairs() -> Iterator[str]:
        while True:
            yield f'"{draw_uuid()}": "{draw_uuid()}",'

    asked_uuid, value_uuid = draw_uuid(), draw_uuid()
    return Draft(
        instruction="The text below is part of a JSON object. Remember its keys and values.",
        question=f"What is the value of the key {asked_uuid}?",
        answer_start=f"The value of the key {asked_uuid} is",
        replies=(value_uuid,),
        needed_facts=[Fact(depth, f'"{asked_uuid}": "{value_uuid}",')],
        filler=make_running_filler(make_other_pairs()),
    )


def draft_copying(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for a copy of one of four passages, given its first five words.

    The task is the n-gram lookup of Jelassi et al. 2024, "Repeat After Me" (arXiv 2402.01032), in a
    long text. A passage has three sentences of random words, so that a model cannot guess the
    passage.
    """
    unused_names = iter(rng.sample(PERSON_NAMES, NUM_PASSAGES * SENTENCES_PER_PASSAGE))

    def draw_sentence() -> tuple[str, str]:
        """Return a random sentence in two parts: the first five words, and the other words."""
        verb, adjective, object_name, place_name = map(
            rng.choice, (VERBS, ADJECTIVES, OBJECTS, PLACES)
        )
        return f"{next(unused_names)} {verb} a {adjective} {object_name}", f"near the {place_name}."

    def draw_passage() -> tuple[str, str]:
        """Return a random passage in two parts: the first five words, and the other words."""
        (first_words, last_words), *sentences = (
            draw_sentence() for _ in range(SENTENCES_PER_PASSAGE)
        )
        return first_words, " ".join([last_words, *map(" ".join, sentences)])

    (first_words, last_words), *other_passages = (draw_passage() for _ in range(NUM_PASSAGES))
    return Draft(
        instruction="Remember every passage of the text below word for word.",
        question=f'Copy the passage of three sentences that begins with "{first_words}".',
        answer_start=first_words,
        replies=(last_words.removesuffix("."),),
        needed_facts=[Fact(depth, f"{first_words} {last_words}")],
        other_facts=[Fact(rng.random(), " ".join(passage)) for passage in other_passages],
    )


# number of chains of assignments in a text of `draft_tracking`
NUM_CHAINS = 2
# number of variables per chain
VARIABLES_PER_CHAIN = 5
# number of letters in the name of a variable
LETTERS_PER_VARIABLE = 5
# number of pairs of facts in a text of `draft_two_facts`
NUM_FACT_PAIRS = 4
# the facts of `draft_two_facts` are in the first 40 % and the last 40 % of the text
OUTER_TEXT_SHARE = 0.4


def draft_tracking(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for all variables of a chain of assignments.

    A chain is ``VAR A = 12345``, ``VAR B = VAR A``, ``VAR C = VAR B`` and so on. This is RULER's
    variable tracking, with a second chain as a distractor.
    """
    # a dict without values, as an ordered set
    unique_names: dict[str, None] = {}
    while len(unique_names) < NUM_CHAINS * VARIABLES_PER_CHAIN:
        unique_names["".join(rng.choices(string.ascii_uppercase, k=LETTERS_PER_VARIABLE))] = None
    variable_names, chain_values = list(unique_names), rng.sample(KEY_NUMBERS, NUM_CHAINS)

    def make_assignments(chain_index: int, required_depth: float) -> list[Fact]:
        """Return the assignments of a chain as facts, one of them at depth ``required_depth``."""
        names_of_chain = variable_names[chain_index * VARIABLES_PER_CHAIN :][:VARIABLES_PER_CHAIN]
        depths = sorted([required_depth, *(rng.random() for _ in names_of_chain[1:])])
        assigned_values = [
            str(chain_values[chain_index]),
            *(f"VAR {variable_name}" for variable_name in names_of_chain),
        ]
        return [
            Fact(depth, f"VAR {variable_name} = {assigned_value}.")
            for depth, variable_name, assigned_value in zip(
                depths, names_of_chain, assigned_values, strict=False
            )
        ]

    return Draft(
        instruction="The text below hides assignments of variables. Remember them.",
        question=f"Which variables have the value {chain_values[0]}, in the order of the text?",
        answer_start=f"The variables that have the value {chain_values[0]} are",
        replies=tuple(variable_names[:VARIABLES_PER_CHAIN]),
        needed_facts=make_assignments(0, depth),
        other_facts=[
            *chain(
                *(
                    make_assignments(chain_index, rng.random())
                    for chain_index in range(1, NUM_CHAINS)
                )
            )
        ],
    )


def draft_two_facts(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for the key of a person's deputy.

    One fact names the deputy, and another fact states the deputy's key. One of both facts is in the
    first two fifths of the text, and the other in the last two fifths, in random order. The text
    contains three other pairs of facts. bAbI (Weston et al. 2015, arXiv 1502.05698) and RULER's
    HotpotQA have questions over two supporting facts.
    """
    person_names, key_numbers = (
        rng.sample(PERSON_NAMES, 2 * NUM_FACT_PAIRS),
        rng.sample(KEY_NUMBERS, NUM_FACT_PAIRS),
    )

    def make_facts(pair_index: int, depth: float) -> list[Fact]:
        """Return the two facts of a pair, one in the first and one in the last part of the text.

        Args:
            pair_index: index of the pair.
            depth: position of the first of the two facts inside the first part of the text, from 0
                to 1.
        """
        chief, deputy = person_names[2 * pair_index : 2 * pair_index + 2]
        depths = [OUTER_TEXT_SHARE * depth, 1 - OUTER_TEXT_SHARE * rng.random()]
        rng.shuffle(depths)
        key_sentence = (
            f"{ANSWER_START_TEMPLATE.format(whose=f' for {deputy}')}{key_numbers[pair_index]}."
        )
        return [
            Fact(depths[0], f"The deputy of {chief} is {deputy}."),
            Fact(depths[1], key_sentence),
        ]

    owner_phrase = f" for the deputy of {person_names[0]}"
    return Draft(
        instruction=make_instruction(NUM_FACT_PAIRS),
        question=QUESTION_TEMPLATE.format(whose=owner_phrase),
        answer_start=ANSWER_START_TEMPLATE.format(whose=owner_phrase).rstrip(),
        replies=(str(key_numbers[0]),),
        needed_facts=make_facts(0, depth),
        other_facts=[
            *chain(
                *(make_facts(pair_index, rng.random()) for pair_index in range(1, NUM_FACT_PAIRS))
            )
        ],
    )


# letters of the words that `coin_words` yields
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
# number of common words in a list of `draft_common_words`
NUM_COMMON_WORDS = 10
# number of tokens from which on `draft_common_words` repeats each word of its list three times as
# often
LONG_LIST_TOKENS = 4096
# number of words that the question of `draft_frequent_words` asks for
NUM_FREQUENT_WORDS = 3
# most frequent word in a text of `draft_frequent_words`. The question says to ignore it, as in
# RULER
DOTS_WORD = "...."
# smallest number of words in a text of `draft_frequent_words`. With fewer words, the words that are
# asked for could occur equally often
MIN_NUM_WORDS = 100


def coin_words(rng: random.Random) -> Iterator[str]:
    """Yield random invented words of three syllables, such as "balonu", without repetition."""
    yielded_words: set[str] = set()
    while True:
        word = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(3))
        if word not in yielded_words:
            yielded_words.add(word)
            yield word


def draft_common_words(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for the ten words that a list contains most often.

    This is RULER's task of common words, with invented instead of English words. The ten words
    occur 30 times each and the others 3 times each; in a list of fewer than 4,096 tokens, 10 times
    and once. The answer has the words in the order of the list. ``depth`` is not used.
    """
    new_words = coin_words(rng)
    common_words = tuple(next(new_words) for _ in range(NUM_COMMON_WORDS))

    def fill_text(length: int, tokenize: Callable[[str], Tokens]) -> list[Tokens] | None:
        """Return the shuffled list of words with ``length`` tokens; a `Filler`."""
        common_word_count, other_word_count = (30, 3) if length >= LONG_LIST_TOKENS else (10, 1)
        # every entry of the list is an index: below NUM_COMMON_WORDS for common words
        list_entries = [
            word_index for word_index in range(NUM_COMMON_WORDS) for _ in range(common_word_count)
        ]
        num_remaining_tokens = length - common_word_count * sum(
            len(tokenize(word)) for word in common_words
        )
        if num_remaining_tokens < 0:
            return None
        other_words: list[Tokens] = []
        while num_remaining_tokens >= other_word_count * len(word := tokenize(next(new_words))):
            other_words += [word] * other_word_count
            num_remaining_tokens -= other_word_count * len(word)
        list_entries += range(NUM_COMMON_WORDS, NUM_COMMON_WORDS + len(other_words))
        rng.shuffle(list_entries)
        # renumber the common words, so that they first occur in the order of the answer
        common_word_order = [
            word_index
            for word_index in dict.fromkeys(list_entries)
            if word_index < NUM_COMMON_WORDS
        ]
        tokens_of_entry = dict(zip(common_word_order, map(tokenize, common_words), strict=True))
        tokens_of_entry |= enumerate(other_words, NUM_COMMON_WORDS)
        # too few tokens remain for another word with ``other_word_count`` occurrences
        padding_pieces = cut_to_length(map(tokenize, new_words), num_remaining_tokens)
        return padding_pieces + [tokens_of_entry[word_index] for word_index in list_entries]

    return Draft(
        instruction="The text below is a list of words. Remember which of them are common.",
        question=f"What are the {NUM_COMMON_WORDS} most common words, in the order of the text?",
        answer_start="The most common words are",
        replies=common_words,
        filler=fill_text,
    )


def draft_frequent_words(rng: random.Random, depth: float) -> Draft:
    """Return a draft that asks for the three most frequent words, the most frequent first.

    This is RULER's task of frequent words: invented words whose frequency is proportional to
    1 / rank² (a zeta distribution with exponent 2). The word with rank 1 consists of dots, and the
    question says to ignore dots. ``depth`` is not used.
    """
    new_words = coin_words(rng)
    asked_words = tuple(next(new_words) for _ in range(NUM_FREQUENT_WORDS))
    words_by_rank = [DOTS_WORD, *asked_words]

    def fill_text(length: int, tokenize: Callable[[str], Tokens]) -> list[Tokens] | None:
        """Return the tokens of as many words as fit, and of dots up to ``length``.

        Returns None if fewer than `MIN_NUM_WORDS` words fit. The function is a `Filler`.
        """

        def make_pieces(num_words: int) -> list[Tokens]:
            """Return the tokens of all occurrences of all words, about ``num_words`` in total."""
            word_shares = (6 / (pi * rank) ** 2 for rank in range(1, num_words))
            occurrence_counts = [
                *takewhile(bool, (int(num_words * share) for share in word_shares))
            ]
            while len(words_by_rank) <= len(occurrence_counts):
                words_by_rank.append(next(new_words))
            words_with_counts = zip(words_by_rank, occurrence_counts, strict=False)
            return [
                *chain(
                    *(
                        repeat(tokenize(word), occurrence_count)
                        for word, occurrence_count in words_with_counts
                    )
                )
            ]

        def is_too_long(num_words: int) -> bool:
            return sum(map(len, make_pieces(num_words))) > length

        if is_too_long(MIN_NUM_WORDS):
            return None
        max_num_words = 2 * MIN_NUM_WORDS
        while not is_too_long(max_num_words):
            max_num_words *= 2
        first_too_large_count = bisect_left(
            range(max_num_words), True, lo=MIN_NUM_WORDS, key=is_too_long
        )
        text_pieces = make_pieces(first_too_large_count - 1)
        rng.shuffle(text_pieces)
        padding_pieces = cut_to_length(
            repeat(tokenize(DOTS_WORD)), length - sum(map(len, text_pieces))
        )
        return padding_pieces + text_pieces

    return Draft(
        instruction=f"The text below has coded words. Ignore the dots {DOTS_WORD} in it.",
        question=(
            f"What are the {NUM_FREQUENT_WORDS} most frequent words, the most frequent one first?"
        ),
        answer_start="The most frequent words are",
        replies=asked_words,
        filler=fill_text,
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("many_keys", "many keys", draft_many_keys),
        Task("several_values", "several values", draft_several_values),
        Task("alike_keys", "alike keys", draft_alike_keys),
        Task("uuid", "UUIDs", draft_uuids),
        Task("copying", "copying", draft_copying),
        Task("tracking", "variable tracking", draft_tracking),
        Task("two_facts", "two facts", draft_two_facts),
        Task("common_words", "common words", draft_common_words),
        Task("frequent_words", "frequent words", draft_frequent_words),
    )
}
