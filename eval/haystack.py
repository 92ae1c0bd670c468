"""Passkey prompts: keys hidden in filler, fitted to a number of tokens of the rendered prompt.

A prompt depends on (seed, length, depth, index, keys) alone, so every method and every run reads
the same prompts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from cab_hf.data.needles import (
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
from cab_hf.experiment.settings import UsageError, comma_separated

FILLERS = ("noise", "distractors", "text")


@dataclass(frozen=True)
class Prompt:
    """One rendered prompt."""

    text: str
    tokens: tuple[int, ...]
    key: str  # the digits that the prompt asks for
    # [start, end) of the sentences with the key, in tokens; None if left out
    needle: tuple[int, int] | None
    asking: int  # the first token of the question
    begun: str  # the beginning of the answer, at the end of the prompt


class Haystack:
    """A maker of prompts for one tokenizer and one kind of filler.

    Args:
        tokenizer: a tokenizer of transformers; its chat template is used if it has one.
        filler: ``noise`` (five sentences, repeated), ``distractors`` (the same with other numbers
            between them) or ``text`` (the sentences of ``file``, from a place that depends on the
            sample).
        keys: number of hidden named keys; 1 means one key without a name.
        file: UTF-8 text for ``text``.
        question_first: True to put the question before the text too, so that the model has it while
            it reads.
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
        """Return a prompt of ``length`` tokens, or a few fewer.

        Args:
            length: tokens of the prompt.
            depth: place of the key asked for, from 0 (start of the haystack) to 1 (its end),
                rounded to the nearest sentence border in tokens.
            index: number of the sample.
            seed: seed of the sample.
            hide_needle: True to leave out all keys and keep the rest of the prompt.
        Raises:
            UsageError: ``length`` is too small for instruction, keys and question.
        """
        rng = random.Random(f"{seed}/{length}/{depth:.6f}/{index}/{self.keys}")
        keys = draw_keys(rng, self.keys, named=self.keys > 1)
        asked_key, texts = keys[0], [key.statement for key in keys]
        # the other keys are spread evenly, at random offsets
        others = self.keys - 1
        depths = [depth, *((i + rng.random()) / others for i in range(others))]
        needles = list(zip(depths, texts, strict=True))

        sentences = self._fitted(asked_key.whose, needles, self._enough(rng, keys, length), length)
        full = self.render(asked_key.whose, needles, sentences)
        at = full.index(texts[0])
        # the leading blank belongs to the first token
        needle = (self.size(full[:at].removesuffix(" ")), self.size(full[: at + len(texts[0])]))
        text = self.render(asked_key.whose, [], sentences) if hide_needle else full
        return Prompt(
            text=text,
            tokens=tuple(self.encode(text)),
            key=asked_key.digits,
            needle=None if hide_needle else needle,
            asking=self.size(text[: text.rindex(QUESTION.format(whose=asked_key.whose))]),
            begun=ANSWER.format(whose=asked_key.whose),
        )

    def check_room(self, length: int) -> None:
        """Raise an error if the longest instructions, keys and questions do not fit into a length.

        Raises:
            UsageError: as in `prompt`.
        """
        names = sorted(NAMES, key=len)[-self.keys :]
        whose = [f" for {name}" if self.keys > 1 else "" for name in names]
        needles = [(0.0, Key(each, str(NUMBERS[-1])).statement) for each in whose]
        self._room(whose[-1], needles, length)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt."""
        # a chat template contains the special tokens
        plain = self.tokenizer.chat_template is None
        return self.tokenizer(text, add_special_tokens=plain)["input_ids"]

    def size(self, text: str) -> int:
        return len(self.encode(text))

    def render(
        self, whose: str, needles: Sequence[tuple[float, str]], sentences: Sequence[str]
    ) -> str:
        """Return the prompt as the model reads it, with the start of the answer.

        Each of ``needles``, (depth, text), is at the sentence border nearest to its depth.
        """
        ends = [0, *accumulate(map(self._sentence_size, sentences))]
        placed = list(sentences)
        # deepest first: later insertions do not move earlier text
        for depth, needle in sorted(needles, reverse=True):
            placed.insert(nearest(ends, depth * ends[-1]), needle)
        question = QUESTION.format(whose=whose)
        first = [question] if self.question_first else []
        content = "\n\n".join([instruction(self.keys), *first, running(placed), question])
        return as_turns(self.tokenizer, [content, ANSWER.format(whose=whose)])

    def _sentence_size(self, sentence: str) -> int:
        """Return the tokens of a sentence inside running text."""
        if sentence not in self._sizes:
            # measured after another sentence: alone, some tokenizers add a token at the start of a
            # text
            alone, joined = (
                len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
                for text in (NOISE[0], f"{NOISE[0]} {sentence}")
            )
            self._sizes[sentence] = joined - alone
        return self._sizes[sentence]

    def _enough(self, rng: random.Random, keys: Sequence[Key], length: int) -> list[str]:
        """Return sentences of more than ``length`` tokens, from an offset of the sample."""
        text = endless(self.sentences, rng, keys if self.filler == "distractors" else None)
        sentences, total = [], 0
        while total <= length:
            sentences.append(next(text))
            total += max(1, self._sentence_size(sentences[-1]))
        return sentences

    def _room(self, whose: str, needles: Sequence[tuple[float, str]], length: int) -> int:
        """Return the number of tokens left for sentences."""
        free = length - self.size(self.render(whose, needles, []))
        if free < 0:
            raise UsageError(
                f"length must have room for the question and {self.keys} keys, which take "
                f"{length - free} tokens, got {length}. Give a larger length."
            )
        return free

    def _fitted(
        self, whose: str, needles: Sequence[tuple[float, str]], sentences: list[str], length: int
    ) -> list[str]:
        """Return as many of ``sentences`` as fit, after the part of the next one that fits."""

        def room(chosen: list[str]) -> int:
            return length - self.size(self.render(whose, needles, chosen))

        free = self._room(whose, needles, length)
        # the sum of sizes is approximate: it gives a start, and rendering decides
        num_sentences = sum(end <= free for end in accumulate(map(self._sentence_size, sentences)))
        while num_sentences and room(sentences[:num_sentences]) < 0:
            num_sentences -= 1
        while num_sentences < len(sentences) - 1 and room(sentences[: num_sentences + 1]) >= 0:
            num_sentences += 1
        # the text starts inside a sentence: with the end of the first sentence that does not fit
        complete, words = sentences[:num_sentences], sentences[num_sentences].split()
        # a word has at least one token
        for start in range(max(1, len(words) - room(complete)), len(words)):
            excerpt = [" ".join(words[start:]), *complete]
            if room(excerpt) >= 0:
                return excerpt
        return complete


def parse_depths(text: str) -> tuple[float, ...]:
    """Parse ``0,0.5,1``, or a whole number n: n depths, evenly spaced from 0 to 1."""
    if not text.strip().isdigit():
        return comma_separated(float)(text)
    last = int(text) - 1
    return tuple(i / last for i in range(last + 1)) if last else (0.5,)


def read_sentences(name: str, file: Path | str) -> list[str]:
    """Read the sentences of a UTF-8 text; errors as in `read_text`."""
    return split_sentences(read_text(name, file))


def read_text(name: str, file: Path | str) -> str:
    """Read a UTF-8 text; the UsageError for other files names the setting ``name``."""
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise UsageError(f"{name} must be a UTF-8 text file, got {str(file)!r} ({why}).") from None
    if not text.strip() or "\0" in text:
        why = "binary" if text.strip() else "empty"
        raise UsageError(f"{name} must be a UTF-8 text file, got {str(file)!r} ({why}).")
    return text


def answered(text: str, key: str) -> bool:
    """Return True if the first number in ``text`` with as many digits as ``key`` equals ``key``."""
    numbers = re.findall(rf"(?<!\d)\d{{{len(key)}}}(?!\d)", text)
    return bool(numbers) and numbers[0] == key
