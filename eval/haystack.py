"""Passkey prompts: keys hidden in filler, fitted to a number of tokens of the rendered prompt.

A prompt is made from (seed, length, depth, index, keys) and nothing else, so every method, and
every run, is shown the same ones.
"""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path

FILLERS = ("noise", "distractors", "text")
KEY_DIGITS = 5
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’)])\s+")
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
# numbers that are no pass keys: a selector that looks for digits finds these as well
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
NAMES = (
    *("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry"),
    *("Julia", "Kevin", "Laura", "Martin", "Nancy", "Oscar", "Peter", "Rachel"),
    *("Simon", "Tina", "Victor", "Wendy", "Adam", "Beth", "Chris", "Diana"),
    *("Eric", "Fiona", "George", "Helen", "Ivan", "Jane", "Karl", "Linda"),
)
INSTRUCTION = "There {are} hidden in the text below. Find {it} and remember {it}."
NEEDLE = "The pass key{whose} is {key}. Remember it. {key} is the pass key{whose}."
QUESTION = "What is the pass key{whose}?"
# the answer is begun for the model, blank included, so that the first digit already is predicted by
# the last token of the prefill; otherwise only decoding would be tested where decoding is dense
ANSWER = "The pass key{whose} is "


@dataclass(frozen=True)
class Prompt:
    """One rendered prompt.

    Attributes:
        tokens: its ids.
        key: the digits it asks for.
        needle: [start, end) of the sentences that hold the key, in tokens; None if left out.
        asking: the token where the question starts.
    """

    tokens: tuple[int, ...]
    key: str
    needle: tuple[int, int] | None
    asking: int


class Haystack:
    """Makes prompts for one tokenizer and one kind of filler.

    Args:
        tokenizer: of transformers; its chat template is used when it has one.
        filler: ``noise`` (five sentences for ever), ``distractors`` (the same with other numbers
            among them) or ``text`` (the sentences of ``file``, from a place of the sample's own).
        keys: how many named keys are hidden; 1 is a nameless one.
        file: UTF-8 text for ``text``.
    Raises:
        ValueError: as `check_haystack`.
    """

    def __init__(
        self, tokenizer, filler: str = "noise", keys: int = 1, file: Path | str | None = None
    ) -> None:
        check_haystack(filler, keys, file)
        self.tokenizer = tokenizer
        self.filler = filler
        self.keys = keys
        self.sentences = split_sentences(Path(file).read_text("utf-8")) if file else NOISE
        self._sizes: dict[str, int] = {}

    def prompt(
        self, length: int, depth: float, index: int, seed: int = 0, hide_needle: bool = False
    ) -> Prompt:
        """The prompt of at most ``length`` tokens, and within a few of it.

        Args:
            depth: where the key asked for is, from 0 (start of the haystack) to 1 (its end): at the
                sentence border nearest to it in tokens.
            index: number of the sample.
            hide_needle: leave out all keys and change nothing else.
        Raises:
            ValueError: ``length`` has no room for instruction, keys and question.
        """
        rng = random.Random(f"{seed}/{length}/{depth:.6f}/{index}/{self.keys}")
        low, high = 10 ** (KEY_DIGITS - 1), 10**KEY_DIGITS
        keys = [str(key) for key in rng.sample(range(low, high), self.keys)]
        names = rng.sample(NAMES, self.keys)
        whose = [f" for {name}" if self.keys > 1 else "" for name in names]
        needles = [NEEDLE.format(whose=w, key=k) for w, k in zip(whose, keys, strict=True)]
        # the other keys are spread evenly, a random way into their stretches
        others = self.keys - 1
        depths = [depth, *((i + rng.random()) / others for i in range(others))]
        draft = _Draft(self, whose[0], list(zip(depths, needles, strict=True)))

        sentences = self._enough(self._stream(rng, set(keys)), length)
        taken = self._most_that_fit(draft, sentences, length)
        # the text starts within a sentence, as excerpts do: the end of the first one left out
        words = self._most_words_that_fit(draft, sentences[taken], sentences[:taken], length)
        sentences = [*words, *sentences[:taken]]

        full = draft.render(sentences)
        at = full.index(needles[0])
        # the blank in front belongs to the first token
        start = self.size(full[:at].removesuffix(" "))
        needle = (start, self.size(full[: at + len(needles[0])]))
        text = draft.render(sentences, hide_needle) if hide_needle else full
        return Prompt(
            tokens=tuple(self.encode(text)),
            key=keys[0],
            needle=None if hide_needle else needle,
            asking=self.size(text[: text.rindex(draft.question)]),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt."""
        # a chat template writes the special tokens itself
        plain = self.tokenizer.chat_template is None
        return self.tokenizer(text, add_special_tokens=plain)["input_ids"]

    def size(self, text: str) -> int:
        """How many tokens that is."""
        return len(self.encode(text))

    def chat(self, content: str, answer: str) -> str:
        """The prompt as the model reads it, with the answer begun."""
        if self.tokenizer.chat_template is None:
            return f"{content}\n\n{answer}"
        turn = [{"role": "user", "content": content}]
        rendered = self.tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True
        )
        return rendered + answer

    def sentence_sizes(self, sentences: Sequence[str]) -> list[int]:
        """Tokens of each sentence as it stands in running text."""
        for sentence in set(sentences) - self._sizes.keys():
            # measured behind another: alone, some tokenizers add a token for the start of a text
            alone, joined = (
                len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
                for text in (NOISE[0], f"{NOISE[0]} {sentence}")
            )
            self._sizes[sentence] = joined - alone
        return [self._sizes[sentence] for sentence in sentences]

    def _stream(self, rng: random.Random, keys: set[str]) -> Iterator[str]:
        """Sentences without end, from an offset of the sample's own."""
        offset = rng.randrange(len(self.sentences))
        for i in count():
            if self.filler == "distractors" and i % DISTRACTOR_EVERY == DISTRACTOR_EVERY - 1:
                number = rng.randrange(10 ** (KEY_DIGITS - 1), 10**KEY_DIGITS)
                if str(number) not in keys:
                    yield rng.choice(DISTRACTORS).format(number)
                    continue
            yield self.sentences[(offset + i) % len(self.sentences)]

    def _enough(self, stream: Iterator[str], length: int) -> list[str]:
        """Sentences of more than ``length`` tokens."""
        sentences, total = [], 0
        while total <= length:
            sentences.append(next(stream))
            total += max(1, self.sentence_sizes(sentences[-1:])[0])
        return sentences

    def _most_that_fit(self, draft: _Draft, sentences: list[str], length: int) -> int:
        """How many of ``sentences`` the prompt has room for."""
        room = length - self.size(draft.render([]))
        if room < 0:
            raise ValueError(
                f"length {length} has no room for the question and {self.keys} keys, which take "
                f"{length - room} tokens; give a longer one."
            )
        ends = list(accumulate(self.sentence_sizes(sentences)))

        def fits(taken: int) -> bool:
            return self.size(draft.render(sentences[:taken])) <= length

        # sizes add up nearly: the sum says where to look, rendering decides
        taken = sum(end <= room for end in ends)
        while taken and not fits(taken):
            taken -= 1
        while taken < len(sentences) - 1 and fits(taken + 1):
            taken += 1
        return taken

    def _most_words_that_fit(
        self, draft: _Draft, sentence: str, sentences: list[str], length: int
    ) -> list[str]:
        """The longest end of ``sentence`` that fits before ``sentences``: [] or one string."""
        room = length - self.size(draft.render(sentences))
        words = sentence.split()
        # a word takes a token at least
        for start in range(max(1, len(words) - room), len(words)):
            end = " ".join(words[start:])
            if self.size(draft.render([end, *sentences])) <= length:
                return [end]
        return []


@dataclass(frozen=True)
class _Draft:
    """A prompt but for its filler: ``needles`` are (depth, sentences), the one asked for first."""

    haystack: Haystack
    whose: str
    needles: list[tuple[float, str]]

    @property
    def question(self) -> str:
        return QUESTION.format(whose=self.whose)

    def render(self, sentences: list[str], hide_needles: bool = False) -> str:
        """The prompt as text, each needle at the sentence border nearest to its depth."""
        ends = [0, *accumulate(self.haystack.sentence_sizes(sentences))]
        placed = list(sentences)
        # deepest first: what is inserted later does not move what is there
        for depth, needle in sorted(self.needles, reverse=True) if not hide_needles else ():
            placed.insert(_nearest(ends, depth * ends[-1]), needle)
        several = len(self.needles) > 1
        instruction = INSTRUCTION.format(
            are="are important pass keys" if several else "is an important pass key",
            it="them" if several else "it",
        )
        content = f"{instruction}\n\n{' '.join(placed)}\n\n{self.question}"
        return self.haystack.chat(content, ANSWER.format(whose=self.whose))


def _nearest(ascending: list[int], target: float) -> int:
    """Index of the value nearest to ``target``."""
    above = bisect.bisect_left(ascending, target)
    around = range(max(0, above - 1), min(above + 1, len(ascending)))
    return min(around, key=lambda i: abs(ascending[i] - target))


def check_haystack(filler: str, keys: int, file: Path | str | None) -> None:
    """Raises ValueError for an unknown filler, too many keys, or a file missing or not needed."""
    if filler not in FILLERS:
        raise ValueError(f"filler must be one of {', '.join(FILLERS)}; got {filler!r}.")
    if not 1 <= keys <= len(NAMES):
        raise ValueError(f"keys must be 1 to {len(NAMES)}; got {keys}.")
    if (filler == "text") != (file is not None):
        raise ValueError(
            f"haystack is the file of the filler 'text'; got haystack={file!r} with filler "
            f"{filler!r}: give both or neither."
        )
    if file is not None and not Path(file).is_file():
        raise ValueError(f"haystack must be a text file; got {file!r}.")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, white space made single blanks; ValueError for an empty text."""
    running = " ".join(text.split())
    sentences = [s for s in SENTENCE_END.split(running) if s]
    if not sentences:
        raise ValueError("haystack has no text in it.")
    return sentences


def answered(text: str, key: str) -> bool:
    """Whether the first number of as many digits as ``key`` in ``text`` is ``key``."""
    numbers = re.findall(rf"(?<!\d)\d{{{len(key)}}}(?!\d)", text)
    return bool(numbers) and numbers[0] == key
