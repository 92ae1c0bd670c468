"""Keys, the sentences that state keys, filler sentences, and functions that tokenize sentences.

A key is a number in a long text, such as 12345 in the sentence "The pass key for Bob is 12345."

The modules `cab_hf.data.documents`, `cab_hf.data.tasks`, ``eval.haystack`` and
``finetune.retrieval`` build their texts with this module.
"""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, count
from typing import Any, NamedTuple

# numbers from which keys and distractors are drawn
KEY_NUMBERS = range(10_000, 100_000)
# white space between two sentences
SENTENCE_END_PATTERN = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’)])\s+")
# a line of text with the line breaks before it
LINE_PATTERN = re.compile(r"\n+[^\n]+")
# a text is split into lines if most of its words are in sentences with more words than this
LONG_SENTENCE_WORDS = 60
# filler sentences of passkey prompts
NOISE_SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
# persons after which keys are named if a text has several keys
PERSON_NAMES = (
    *("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry"),
    *("Julia", "Kevin", "Laura", "Martin", "Nancy", "Oscar", "Peter", "Rachel"),
    *("Simon", "Tina", "Victor", "Wendy", "Adam", "Beth", "Chris", "Diana"),
    *("Eric", "Fiona", "George", "Helen", "Ivan", "Jane", "Karl", "Linda"),
)
# sentences that state a key; ``whose`` is " for NAME", or empty if the text has one key
KEY_STATEMENT_TEMPLATE = "The pass key{whose} is {key}. Remember it. {key} is the pass key{whose}."
# sentence that repeats a key later in the text
KEY_REPETITION_TEMPLATE = "As was said above, the pass key{whose} is {key}."
# distance between distractors in sentences
DISTRACTOR_STRIDE_SENTENCES = 12
# sentences with numbers that are no keys, so that digits alone do not identify a key
DISTRACTOR_TEMPLATES = (
    "The locker number is {}.",
    "The order number is {}.",
    "The house has the number {}.",
    "The ticket has the number {}.",
    "The phone extension is {}.",
    "The invoice number is {}.",
    "The train has the number {}.",
    "The meter shows {}.",
)
INSTRUCTION_TEMPLATE = "There {are} hidden in the text below. Find {it} and remember {it}."
QUESTION_TEMPLATE = "What is the pass key{whose}?"
# start of the answer, with the blank before the key. The prompt ends with this start, so that the
# last token of the prefill predicts the first digit. Otherwise only decode steps, which may be
# dense, would predict the key
ANSWER_START_TEMPLATE = "The pass key{whose} is "
# number of sentences whose tokens are cached
MAX_CACHED_SENTENCES = 2**16
# placeholder that is rendered with the chat template in place of the filler text
TEXT_PLACEHOLDER = "<<running text>>"

Tokens = tuple[int, ...]
# index of the first token, and index after the last token
Span = tuple[int, int]


class Key(NamedTuple):
    """A number that a text states and a question asks for.

    Attributes:
        owner_phrase: " for NAME", or "" if the text has one key.
        digits: the digits of the number.
    """

    owner_phrase: str
    digits: str

    @property
    def statement(self) -> str:
        """Return sentences that state the key twice."""
        return KEY_STATEMENT_TEMPLATE.format(whose=self.owner_phrase, key=self.digits)

    @property
    def repetition(self) -> str:
        """Return a sentence that repeats the key later in the text."""
        return KEY_REPETITION_TEMPLATE.format(whose=self.owner_phrase, key=self.digits)


def draw_keys(rng: random.Random, num_keys: int, has_names: bool = True) -> list[Key]:
    """Draw keys with different numbers and different names.

    Args:
        rng: random generator.
        num_keys: number of keys.
        has_names: False to leave out the names, as for a text with one key.

    Raises:
        ValueError: ``num_keys`` exceeds the number of names.
    """
    if not 1 <= num_keys <= len(PERSON_NAMES):
        raise ValueError(f"keys must be 1 to {len(PERSON_NAMES)}, got {num_keys!r}.")
    numbers, names = rng.sample(KEY_NUMBERS, num_keys), rng.sample(PERSON_NAMES, num_keys)
    return [
        Key(f" for {name}" if has_names else "", str(number))
        for name, number in zip(names, numbers, strict=True)
    ]


def make_instruction(num_keys: int) -> str:
    """Return the sentences that tell a model to remember ``num_keys`` keys of the text below."""
    if num_keys > 1:
        return INSTRUCTION_TEMPLATE.format(are="are important pass keys", it="them")
    return INSTRUCTION_TEMPLATE.format(are="is an important pass key", it="it")


def cycle_sentences(
    sentences: Sequence[str], rng: random.Random, keys: Collection[Key] | None = None
) -> Iterator[str]:
    """Return an endless iterator over the sentences, in order, from a random sentence on.

    The first sentence is drawn when `cycle_sentences` is called, not when the iteration begins.

    Args:
        sentences: the sentences of the cycle.
        rng: random generator.
        keys: keys of the text. Every `DISTRACTOR_STRIDE_SENTENCES`-th sentence is replaced by a
            distractor, whose number is none of these keys. None means no distractors.
    """
    first_index = rng.randrange(len(sentences))

    def get_sentence(index: int) -> str:
        if (
            keys is not None
            and index % DISTRACTOR_STRIDE_SENTENCES == DISTRACTOR_STRIDE_SENTENCES - 1
        ):
            distractor_number = str(rng.choice(KEY_NUMBERS))
            if all(distractor_number != key.digits for key in keys):
                return rng.choice(DISTRACTOR_TEMPLATES).format(distractor_number)
        return sentences[(first_index + index) % len(sentences)]

    return map(get_sentence, count())


def insert_statements(
    prefix_tokens: Sequence[int],
    pieces: Sequence[Tokens],
    statements: Sequence[Tokens],
    borders: Sequence[int],
    make_padding: Callable[[int, int], Sequence[int]] = lambda statement_index, length: (),
) -> tuple[list[int], list[Span]]:
    """Insert statements between the pieces of a text, and return where each statement is.

    Args:
        prefix_tokens: tokens before the text.
        pieces: tokens of the text, such as one piece per sentence.
        statements: tokens of each statement.
        borders: number of pieces before each statement. Statements at the same border keep their
            order.
        make_padding: function of the index of a statement and the number of tokens before the
            statement. Returns the tokens to insert directly before the statement.

    Returns:
        tokens: ``prefix_tokens``, and the text with the statements.
        spans: the span of each statement in ``tokens``, in the order of ``statements``.
    """
    tokens, num_inserted_pieces = list(prefix_tokens), 0
    spans: dict[int, Span] = {}
    for statement_index in sorted(range(len(statements)), key=borders.__getitem__):
        tokens.extend(chain(*pieces[num_inserted_pieces : borders[statement_index]]))
        num_inserted_pieces = borders[statement_index]
        tokens.extend(make_padding(statement_index, len(tokens)))
        spans[statement_index] = (len(tokens), len(tokens) + len(statements[statement_index]))
        tokens.extend(statements[statement_index])
    tokens.extend(chain(*pieces[num_inserted_pieces:]))
    return tokens, [spans[statement_index] for statement_index in range(len(statements))]


def cut_to_length(pieces: Iterable[Tokens], length: int) -> list[Tokens]:
    """Return as many of the first ``pieces`` as needed for ``length`` tokens.

    Tokens in excess of ``length`` are removed at the start, so that the result ends with a complete
    piece.
    """
    kept_pieces, num_tokens, piece_iterator = [], 0, iter(pieces)
    while num_tokens < length:
        kept_pieces.append(next(piece_iterator))
        num_tokens += len(kept_pieces[-1])
    num_excess_tokens = num_tokens - length
    while num_excess_tokens and num_excess_tokens >= len(kept_pieces[0]):
        num_excess_tokens -= len(kept_pieces.pop(0))
    if num_excess_tokens:
        kept_pieces[0] = kept_pieces[0][num_excess_tokens:]
    return kept_pieces


def find_nearest_index(ascending_values: Sequence[int], target_value: float) -> int:
    """Return the index of the value nearest to ``target_value`` in an ascending sequence."""
    insertion_index = bisect.bisect_left(ascending_values, target_value)
    candidates = range(max(0, insertion_index - 1), min(insertion_index + 1, len(ascending_values)))
    return min(candidates, key=lambda i: abs(ascending_values[i] - target_value))


def render_turns(tokenizer: Any, turns: Sequence[str]) -> str:
    """Return a conversation as one string, rendered with the chat template of a tokenizer.

    Without a chat template, the turns are paragraphs. The last turn has no end-of-turn token, so
    that a model continues the last turn.

    Args:
        tokenizer: a tokenizer of transformers.
        turns: messages of user and assistant, alternately. The first is of the user, the last of
            the assistant.
    """
    if tokenizer.chat_template is None:
        return "\n\n".join(turns)
    messages = [
        {"role": ("user", "assistant")[turn_index % 2], "content": content}
        for turn_index, content in enumerate(turns[:-1])
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return prompt + turns[-1]


def render_around_text(tokenizer: Any, turns: Sequence[str]) -> tuple[Tokens, str]:
    """Render a conversation in which the placeholder `TEXT_PLACEHOLDER` stands for the filler text.

    Args:
        tokenizer: a tokenizer of transformers.
        turns: as in `render_turns`. One turn contains `TEXT_PLACEHOLDER`.

    Returns:
        tokens: tokens of the conversation before the placeholder, with special tokens.
        text_after: the string after the placeholder, not tokenized.

    Raises:
        ValueError: the chat template changes the text of a user's turn.
    """
    text_before, placeholder, text_after = render_turns(tokenizer, turns).partition(
        TEXT_PLACEHOLDER
    )
    if not placeholder:
        raise ValueError(
            "tokenizer must have a chat template that does not change the text of a user's turn. "
            "Use another tokenizer, or remove its chat template."
        )
    # a chat template contains the special tokens
    special_tokens = (
        find_leading_special_tokens(tokenizer) if tokenizer.chat_template is None else ()
    )
    return (
        *special_tokens,
        *tokenizer(text_before, add_special_tokens=False)["input_ids"],
    ), text_after


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, or into lines if it has few sentence ends, such as source code.

    In a sentence, single blanks replace all white space. A line starts with its line break and
    keeps its indentation.

    Raises:
        ValueError: the text is empty.
    """
    sentences = list(filter(None, SENTENCE_END_PATTERN.split(" ".join(text.split()))))
    if not sentences:
        raise ValueError("haystack must contain text, got none. Give a text with words in it.")
    words_per_sentence = [len(sentence.split()) for sentence in sentences]
    if 2 * sum(
        num_words for num_words in words_per_sentence if num_words > LONG_SENTENCE_WORDS
    ) <= sum(words_per_sentence):
        return sentences
    return LINE_PATTERN.findall("\n".join(["", *map(str.rstrip, text.splitlines())]))


def join_sentences(sentences: Sequence[str]) -> str:
    """Join the results of `split_sentences`: sentences with a blank between, lines without."""
    spaced_sentences = (
        sentence if sentence.startswith("\n") else f" {sentence}" for sentence in sentences
    )
    return "".join(spaced_sentences).lstrip()


@lru_cache(maxsize=MAX_CACHED_SENTENCES)
def sentence_tokens(tokenizer: Any, sentence: str) -> Tokens:
    """Return the tokens that a sentence has after another sentence, with the blank between them."""
    # not tokenized alone, because some tokenizers add a token at the start of a text
    joined_tokens = tokenizer(
        join_sentences((NOISE_SENTENCES[0], sentence)), add_special_tokens=False
    )["input_ids"]
    return tuple(joined_tokens[len(_tokenize_noise_sentence(tokenizer)) :])


@lru_cache(maxsize=8)
def find_leading_special_tokens(tokenizer: Any) -> Tokens:
    """Return the special tokens that ``tokenizer`` puts before a text."""
    tokens_with_special = tokenizer(NOISE_SENTENCES[0], add_special_tokens=True)["input_ids"]
    return tuple(
        tokens_with_special[: tokens_with_special.index(_tokenize_noise_sentence(tokenizer)[0])]
    )


@lru_cache(maxsize=8)
def _tokenize_noise_sentence(tokenizer: Any) -> Tokens:
    """Return the tokens of the sentence ``NOISE_SENTENCES[0]`` alone, without special tokens."""
    return tuple(tokenizer(NOISE_SENTENCES[0], add_special_tokens=False)["input_ids"])


def find_span(tokenizer: Any, sentence: str, substring: str, search_start: int = 0) -> Span:
    """Return the span of the tokens in `sentence_tokens` that contain a part of the sentence.

    The span may include the blank before the part.

    Args:
        tokenizer: a tokenizer of transformers.
        sentence: the sentence.
        substring: a substring of the sentence.
        search_start: index of the character at which the search for ``substring`` starts.
    """
    first_char_index = sentence.index(substring, search_start)
    all_tokens = sentence_tokens(tokenizer, sentence)
    tokens_before = sentence_tokens(tokenizer, sentence[:first_char_index])
    tokens_up_to_end = sentence_tokens(tokenizer, sentence[: first_char_index + len(substring)])
    return common_prefix_length(all_tokens, tokens_before), len(tokens_up_to_end)


def common_prefix_length(first_tokens: Sequence[int], second_tokens: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences of tokens."""
    token_pairs = enumerate(zip(first_tokens, second_tokens, strict=False))
    return next(
        (
            index
            for index, (first_token, second_token) in token_pairs
            if first_token != second_token
        ),
        min(len(first_tokens), len(second_tokens)),
    )
