"""Passkey prompts: keys hidden in filler, fitted to a number of tokens of the rendered prompt.

A prompt is made from (seed, length, depth, index, keys) and nothing else, so every method, and
every run, is shown the same ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from cab_hf.runs.settings import UsageError, comma_separated
from cab_hf.texts.needles import (
    ANSWER,
    NAMES,
    NOISE,
    NUMBERS,
    QUESTION,
    Key,
    as_turns,
    draw_keys,
    endless,
    instruction,
    nearest,
    running,
    split_sentences,
)

FILLERS = ("noise", "distractors", "text")


@dataclass(frozen=True)
class Prompt:
    """One rendered prompt."""

    text: str
    tokens: tuple[int, ...]
    key: str  # the digits it asks for
    # [start, end) of the sentences that hold the key, in tokens; None if left out
    needle: tuple[int, int] | None
    asking: int  # the token where the question starts
    begun: str  # the answer's beginning, with which it ends


class Haystack:
    """Makes prompts for one tokenizer and one kind of filler.

    Args:
        tokenizer: of transformers; its chat template is used when it has one.
        filler: ``noise`` (five sentences for ever), ``distractors`` (the same with other numbers
            among them) or ``text`` (the sentences of ``file``, from a place of the sample's own).
        keys: how many named keys are hidden; 1 is a nameless one.
        file: UTF-8 text for ``text``.
        question_first: ask before the text, too, so that it is read knowing what is sought.
    """

    def __init__(
        self,
        tokenizer,
        filler: str = "noise",
        keys: int = 1,
        file: Path | str | None = None,
        question_first: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.filler = filler
        self.keys = keys
        self.question_first = question_first
        self.sentences = read_sentences("haystack", file) if file else NOISE
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
            UsageError: ``length`` has no room for instruction, keys and question.
        """
        rng = random.Random(f"{seed}/{length}/{depth:.6f}/{index}/{self.keys}")
        keys = draw_keys(rng, self.keys, named=self.keys > 1)
        asked, texts = keys[0], [key.statement for key in keys]
        # the other keys are spread evenly, a random way into their stretches
        others = self.keys - 1
        depths = [depth, *((i + rng.random()) / others for i in range(others))]
        needles = list(zip(depths, texts, strict=True))

        sentences = self._fitted(asked.whose, needles, self._enough(rng, keys, length), length)
        full = self.render(asked.whose, needles, sentences)
        at = full.index(texts[0])
        # the blank in front belongs to the first token
        needle = (self.size(full[:at].removesuffix(" ")), self.size(full[: at + len(texts[0])]))
        text = self.render(asked.whose, [], sentences) if hide_needle else full
        return Prompt(
            text=text,
            tokens=tuple(self.encode(text)),
            key=asked.digits,
            needle=None if hide_needle else needle,
            asking=self.size(text[: text.rindex(QUESTION.format(whose=asked.whose))]),
            begun=ANSWER.format(whose=asked.whose),
        )

    def check_room(self, length: int) -> None:
        """Refuse a length that the longest of instructions, keys and questions do not fit in.

        Raises:
            UsageError: as of `prompt`.
        """
        names = sorted(NAMES, key=len)[-self.keys :]
        whose = [f" for {name}" if self.keys > 1 else "" for name in names]
        needles = [(0.0, Key(each, str(NUMBERS[-1])).statement) for each in whose]
        self._room(whose[-1], needles, length)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt."""
        # a chat template writes the special tokens itself
        plain = self.tokenizer.chat_template is None
        return self.tokenizer(text, add_special_tokens=plain)["input_ids"]

    def size(self, text: str) -> int:
        return len(self.encode(text))

    def render(
        self, whose: str, needles: Sequence[tuple[float, str]], sentences: Sequence[str]
    ) -> str:
        """The prompt as the model reads it, with the answer begun.

        Each of ``needles``, (depth, text), is at the sentence border nearest to its depth.
        """
        ends = [0, *accumulate(map(self._sentence_size, sentences))]
        placed = list(sentences)
        # deepest first: what is inserted later does not move what is there
        for depth, needle in sorted(needles, reverse=True):
            placed.insert(nearest(ends, depth * ends[-1]), needle)
        question = QUESTION.format(whose=whose)
        first = [question] if self.question_first else []
        content = "\n\n".join([instruction(self.keys), *first, running(placed), question])
        return as_turns(self.tokenizer, [content, ANSWER.format(whose=whose)])

    def _sentence_size(self, sentence: str) -> int:
        """Tokens of a sentence as it is in running text."""
        if sentence not in self._sizes:
            # measured behind another: alone, some tokenizers add a token for the start of a text
            alone, joined = (
                len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
                for text in (NOISE[0], f"{NOISE[0]} {sentence}")
            )
            self._sizes[sentence] = joined - alone
        return self._sizes[sentence]

    def _enough(self, rng: random.Random, keys: Sequence[Key], length: int) -> list[str]:
        """Sentences of more than ``length`` tokens, from an offset of the sample's own."""
        text = endless(self.sentences, rng, keys if self.filler == "distractors" else None)
        sentences, total = [], 0
        while total <= length:
            sentences.append(next(text))
            total += max(1, self._sentence_size(sentences[-1]))
        return sentences

    def _room(self, whose: str, needles: Sequence[tuple[float, str]], length: int) -> int:
        """Tokens that are left for sentences."""
        free = length - self.size(self.render(whose, needles, []))
        if free < 0:
            raise UsageError(
                f"length {length} has no room for the question and {self.keys} keys, which take "
                f"{length - free} tokens; give a longer one."
            )
        return free

    def _fitted(
        self, whose: str, needles: Sequence[tuple[float, str]], sentences: list[str], length: int
    ) -> list[str]:
        """As many of ``sentences`` as there is room for, and before them what fits of the next."""

        def room(chosen: list[str]) -> int:
            return length - self.size(self.render(whose, needles, chosen))

        free = self._room(whose, needles, length)
        # sizes add up nearly: the sum says where to look, rendering decides
        taken = sum(end <= free for end in accumulate(map(self._sentence_size, sentences)))
        while taken and room(sentences[:taken]) < 0:
            taken -= 1
        while taken < len(sentences) - 1 and room(sentences[: taken + 1]) >= 0:
            taken += 1
        # the text starts within a sentence, as excerpts do: the end of the first one left out
        complete, words = sentences[:taken], sentences[taken].split()
        # a word takes a token at least
        for start in range(max(1, len(words) - room(complete)), len(words)):
            excerpt = [" ".join(words[start:]), *complete]
            if room(excerpt) >= 0:
                return excerpt
        return complete


def parse_depths(text: str) -> tuple[float, ...]:
    """``0,0.5,1``, or a whole number: that many, evenly spaced from 0 to 1."""
    if not text.strip().isdigit():
        return comma_separated(float)(text)
    last = int(text) - 1
    return tuple(i / last for i in range(last + 1)) if last else (0.5,)


def read_sentences(name: str, file: Path | str) -> list[str]:
    """The sentences of a UTF-8 text; errors as of `read_text`."""
    return split_sentences(read_text(name, file))


def read_text(name: str, file: Path | str) -> str:
    """A UTF-8 text; UsageError by the setting ``name`` where the file is none."""
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise UsageError(f"{name} must name a UTF-8 text; got {str(file)!r} ({why}).") from None
    if not text.strip() or "\0" in text:
        why = "binary" if text.strip() else "empty"
        raise UsageError(f"{name} must name a UTF-8 text; got {str(file)!r} ({why}).")
    return text


def answered(text: str, key: str) -> bool:
    """Whether the first number of as many digits as ``key`` in ``text`` is ``key``."""
    numbers = re.findall(rf"(?<!\d)\d{{{len(key)}}}(?!\d)", text)
    return bool(numbers) and numbers[0] == key
