"""Passkey prompts of ``length`` tokens: passkeys (numbers) hidden in filler text.

For one tokenizer and filler, a prompt depends only on (seed, length, depth, index, number of
passkeys), so that every method and every run reads the same prompts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from cab_hf.data.needles import (
    ANSWER_START_TEMPLATE,
    KEY_NUMBERS,
    NOISE_SENTENCES,
    PERSON_NAMES,
    QUESTION_TEMPLATE,
    Key,
    cycle_sentences,
    draw_keys,
    find_nearest_index,
    join_sentences,
    make_instruction,
    render_turns,
    split_sentences,
)
from cab_hf.experiment.settings import UsageError, comma_separated

FILLERS = ("noise", "distractors", "text")


@dataclass(frozen=True)
class Prompt:
    """One rendered prompt.

    Attributes:
        text: the whole prompt, rendered by the chat template.
        tokens: the token ids of ``text``.
        key: the digits of the requested passkey.
        needle_span: [start, end) of the tokens of the sentence that states the requested passkey;
            None if the prompt has no such sentence.
        question_start: position of the first token of the question after the filler.
        answer_start: the beginning of the answer, with which ``text`` ends.
    """

    text: str
    tokens: tuple[int, ...]
    key: str
    needle_span: tuple[int, int] | None
    question_start: int
    answer_start: str


class Haystack:
    """A builder of prompts for one tokenizer and one kind of filler text.

    Args:
        tokenizer: a tokenizer of transformers; prompts use its chat template unless it has none.
        filler: ``noise`` (five sentences, repeated), ``distractors`` (the same sentences, and
            between them sentences with other numbers) or ``text`` (the sentences of ``file``,
            which start at a random sentence).
        num_keys: number of hidden passkeys. Several passkeys have names; a single one has none.
        file: UTF-8 file for the filler ``text``.
        question_first: True to ask the question before the filler too.
    """

    def __init__(
        self,
        tokenizer,
        filler: str = "noise",
        num_keys: int = 1,
        file: Path | str | None = None,
        question_first: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.filler = filler
        self.num_keys = num_keys
        self.question_first = question_first
        self.sentences = read_sentences("haystack", file) if file else NOISE_SENTENCES
        self._token_counts: dict[str, int] = {}

    def make_prompt(
        self, length: int, depth: float, index: int, seed: int = 0, hide_needle: bool = False
    ) -> Prompt:
        """Return a prompt that has ``length`` tokens or a few tokens fewer.

        Args:
            length: tokens of the prompt.
            depth: position of the requested passkey as a fraction of the filler's tokens, from 0
                (start) to 1 (end), rounded to the nearest sentence border.
            index: index of the prompt among prompts of equal length and depth.
            seed: seed of all prompts.
            hide_needle: True to leave out the sentences with passkeys from the prompt; instruction,
                filler and question stay the same.

        Raises:
            UsageError: ``length`` is too small for instruction, passkeys and question.
        """
        rng = random.Random(f"{seed}/{length}/{depth:.6f}/{index}/{self.num_keys}")
        keys = draw_keys(rng, self.num_keys, has_names=self.num_keys > 1)
        asked_key, statements = keys[0], [key.statement for key in keys]
        # divide the filler into equal ranges, and put one of the other passkeys at random into each
        num_other_keys = self.num_keys - 1
        depths = [depth, *((i + rng.random()) / num_other_keys for i in range(num_other_keys))]
        needles = list(zip(depths, statements, strict=True))

        candidate_sentences = self._draw_sentences(rng, keys, length)
        sentences = self._fit_filler(asked_key.owner_phrase, needles, candidate_sentences, length)
        full_text = self.render_prompt(asked_key.owner_phrase, needles, sentences)
        needle_start = full_text.index(statements[0])
        needle_end = needle_start + len(statements[0])
        # tokenizers join the blank before the needle with the needle's first token
        needle_span = (
            self.count_tokens(full_text[:needle_start].removesuffix(" ")),
            self.count_tokens(full_text[:needle_end]),
        )
        text = (
            self.render_prompt(asked_key.owner_phrase, [], sentences) if hide_needle else full_text
        )
        return Prompt(
            text=text,
            tokens=tuple(self.encode(text)),
            key=asked_key.digits,
            needle_span=None if hide_needle else needle_span,
            question_start=self.count_tokens(
                text[: text.rindex(QUESTION_TEMPLATE.format(whose=asked_key.owner_phrase))]
            ),
            answer_start=ANSWER_START_TEMPLATE.format(whose=asked_key.owner_phrase),
        )

    def check_length(self, length: int) -> None:
        """Raise an error if instruction, longest passkeys and question exceed ``length`` tokens.

        Raises:
            UsageError: ``length`` is too small for some prompts.
        """
        longest_names = sorted(PERSON_NAMES, key=len)[-self.num_keys :]
        owner_phrases = [f" for {owner}" if self.num_keys > 1 else "" for owner in longest_names]
        needles = [
            (0.0, Key(owner_phrase, str(KEY_NUMBERS[-1])).statement)
            for owner_phrase in owner_phrases
        ]
        self._count_free_tokens(owner_phrases[-1], needles, length)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt."""
        # a prompt that a chat template has rendered contains the special tokens already
        has_no_template = self.tokenizer.chat_template is None
        return self.tokenizer(text, add_special_tokens=has_no_template)["input_ids"]

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a rendered prompt, or of its beginning."""
        return len(self.encode(text))

    def render_prompt(
        self, owner_phrase: str, needles: Sequence[tuple[float, str]], sentences: Sequence[str]
    ) -> str:
        """Return the text of a prompt, which ends with the beginning of the answer.

        Args:
            owner_phrase: phrase with the name of the requested passkey, such as " for Mary"; "" for
                a passkey without a name.
            needles: (depth, sentence that states the passkey) of each passkey. The depth is a
                fraction of the filler's tokens, from 0 to 1. The sentence is inserted at the
                nearest border of filler sentences.
            sentences: the filler.
        """
        sentence_ends = [0, *accumulate(map(self._count_sentence_tokens, sentences))]
        context_sentences = list(sentences)
        # insert the deepest needle first, so that indices of earlier borders stay valid
        for depth, needle in sorted(needles, reverse=True):
            context_sentences.insert(
                find_nearest_index(sentence_ends, depth * sentence_ends[-1]), needle
            )
        question = QUESTION_TEMPLATE.format(whose=owner_phrase)
        questions_before = [question] if self.question_first else []
        content = "\n\n".join(
            [
                make_instruction(self.num_keys),
                *questions_before,
                join_sentences(context_sentences),
                question,
            ]
        )
        return render_turns(
            self.tokenizer, [content, ANSWER_START_TEMPLATE.format(whose=owner_phrase)]
        )

    def _count_sentence_tokens(self, sentence: str) -> int:
        """Return the number of tokens of a sentence that follows another sentence."""
        if sentence not in self._token_counts:
            # count the tokens after another sentence, because some tokenizers put an additional
            # token, such as a space, before the first word of every string
            first_tokens, joined_tokens = (
                len(self.tokenizer(counted_text, add_special_tokens=False)["input_ids"])
                for counted_text in (NOISE_SENTENCES[0], f"{NOISE_SENTENCES[0]} {sentence}")
            )
            self._token_counts[sentence] = joined_tokens - first_tokens
        return self._token_counts[sentence]

    def _draw_sentences(self, rng: random.Random, keys: Sequence[Key], length: int) -> list[str]:
        """Return filler sentences with more than ``length`` tokens in total.

        Args:
            rng: random generator of the prompt.
            keys: the passkeys of the prompt. The numbers of distractors differ from the passkeys.
            length: number of tokens.
        """
        sentence_stream = cycle_sentences(
            self.sentences, rng, keys if self.filler == "distractors" else None
        )
        sentences, total_tokens = [], 0
        while total_tokens <= length:
            sentences.append(next(sentence_stream))
            total_tokens += max(1, self._count_sentence_tokens(sentences[-1]))
        return sentences

    def _count_free_tokens(
        self, owner_phrase: str, needles: Sequence[tuple[float, str]], length: int
    ) -> int:
        """Return the number of tokens that a prompt of ``length`` tokens has for filler.

        The arguments ``owner_phrase`` and ``needles`` are those of `render_prompt`.

        Raises:
            UsageError: the prompt has more than ``length`` tokens without filler.
        """
        num_free_tokens = length - self.count_tokens(self.render_prompt(owner_phrase, needles, []))
        if num_free_tokens < 0:
            raise UsageError(
                f"length must have room for the question and {self.num_keys} keys, which take "
                f"{length - num_free_tokens} tokens, got {length}. Give a larger length."
            )
        return num_free_tokens

    def _fit_filler(
        self,
        owner_phrase: str,
        needles: Sequence[tuple[float, str]],
        sentences: list[str],
        length: int,
    ) -> list[str]:
        """Return the filler with which the rendered prompt has at most ``length`` tokens.

        The filler consists of the first n ``sentences``, for the largest n that fits. The remaining
        tokens are filled by the last words of sentence n + 1, which precede the first sentence.

        Args:
            owner_phrase, needles: as in `render_prompt`.
            sentences: candidates for the filler, with more than ``length`` tokens in total.
            length: largest number of tokens of the prompt.
        """

        def count_free_tokens(filler: list[str]) -> int:
            return length - self.count_tokens(self.render_prompt(owner_phrase, needles, filler))

        num_free_tokens = self._count_free_tokens(owner_phrase, needles, length)
        # Start from the sum of the sentences' sizes. The rendered prompt may have a few tokens more
        # or fewer, so that the number of sentences is then corrected.
        num_sentences = sum(
            cumulative_tokens <= num_free_tokens
            for cumulative_tokens in accumulate(map(self._count_sentence_tokens, sentences))
        )
        while num_sentences and count_free_tokens(sentences[:num_sentences]) < 0:
            num_sentences -= 1
        while num_sentences < len(sentences) - 1:
            if count_free_tokens(sentences[: num_sentences + 1]) < 0:
                break
            num_sentences += 1
        complete_sentences, next_words = sentences[:num_sentences], sentences[num_sentences].split()
        # a word has at least one token
        for first_word in range(
            max(1, len(next_words) - count_free_tokens(complete_sentences)), len(next_words)
        ):
            filler = [" ".join(next_words[first_word:]), *complete_sentences]
            if count_free_tokens(filler) >= 0:
                return filler
        return complete_sentences


def parse_depths(text: str) -> tuple[float, ...]:
    """Return depths from 0 to 1.

    Args:
        text: comma-separated depths, such as ``0,0.5,1``, or the number of evenly spaced depths.
    """
    if not text.strip().isdigit():
        return comma_separated(float)(text)
    last_index = int(text) - 1
    return tuple(i / last_index for i in range(last_index + 1)) if last_index else (0.5,)


def read_sentences(setting_name: str, file: Path | str) -> list[str]:
    """Read a UTF-8 file and return its sentences; arguments and errors as in `read_text`."""
    return split_sentences(read_text(setting_name, file))


def read_text(setting_name: str, file: Path | str) -> str:
    """Return the content of a UTF-8 text file.

    Args:
        setting_name: name of the setting with the path, for the error message.
        file: path of the file.

    Raises:
        UsageError: the file cannot be read, is empty, or is not UTF-8 text.
    """
    problem = None
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "not UTF-8"
    else:
        if not text.strip() or "\0" in text:
            problem = "binary" if text.strip() else "empty"
    if problem is not None:
        raise UsageError(
            f"{setting_name} must be a UTF-8 text file, got {str(file)!r} ({problem})."
        )
    return text


def is_right_answer(text: str, key: str) -> bool:
    """Return True if the first number in ``text`` with as many digits as ``key`` equals ``key``."""
    numbers = re.findall(rf"(?<!\d)\d{{{len(key)}}}(?!\d)", text)
    return bool(numbers) and numbers[0] == key
