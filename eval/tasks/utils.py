"""Functions that lm-evaluation-harness calls for the documents and scores of these tasks.

`cab_hf.data.documents`, `cab_hf.eval.haystack` and `cab_hf.data.tasks` build the questions. Every
function that returns documents receives all of ``--model_args`` and ``--metadata`` as keywords, and
ignores unknown keywords. Consecutive documents have different lengths, so that ``--limit`` includes
every length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from cab_hf.data.documents import make_recall_document
from cab_hf.data.needles import NOISE_SENTENCES, find_leading_special_tokens, split_sentences
from cab_hf.data.tasks import TASKS
from cab_hf.eval.haystack import Haystack, is_right_answer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
Documents = list[dict[str, Any]]


def make_passkey_documents(
    *,
    max_seq_lengths: Sequence[int] = (4096,),
    samples: int = 20,
    keys: int = 1,
    haystack: str | None = None,
    seed: int = 0,
    **tokenizer_options: Any,
) -> Documents:
    """Return the prompts of ``cab_hf.eval passkey``, ``samples`` per length.

    Successive prompts of a length hide the keys at successive `DEPTHS`.

    Args:
        max_seq_lengths: lengths in tokens.
        samples: number of prompts per length.
        keys: number of hidden keys per prompt.
        haystack: UTF-8 file whose sentences surround the keys; None: the sentences
            `NOISE_SENTENCES`.
        seed: seed of the prompts.
        tokenizer_options: arguments of `load_tokenizer`.
    """
    prompt_builder = Haystack(
        load_tokenizer(**tokenizer_options), "text" if haystack else "noise", keys, haystack
    )
    documents = []
    for prompt_number, length in product(range(samples), max_seq_lengths):
        index, depth_index = divmod(prompt_number, len(DEPTHS))
        depth = DEPTHS[depth_index]
        prompt = prompt_builder.make_prompt(length, depth, index, seed)
        document = {"text": prompt.text, "key": prompt.key}
        documents.append({**document, "length": length, "depth": depth, "index": index})
    return documents


def _make_split(make_documents: Callable[..., Documents]) -> Callable[..., dict[str, Any]]:
    """Return a function that calls ``make_documents`` and returns lm_eval's {"test": data set}."""

    def make_split(**metadata: Any) -> dict[str, Any]:
        import datasets

        return {"test": datasets.Dataset.from_list(make_documents(**metadata))}

    return make_split


def score_passkey_reply(document: dict[str, Any], replies: Sequence[str]) -> dict[str, float]:
    """Return {length: score}: 1.0 if the reply contains the key of the document, or else 0.0."""
    return {str(document["length"]): float(is_right_answer(replies[0], document["key"]))}


def make_recall_questions(
    *,
    keys: int,
    max_seq_lengths: Sequence[int] = (4096,),
    documents: int = 4,
    haystack: str | None = None,
    seed: int = 0,
    **tokenizer_options: Any,
) -> Documents:
    """Return a question for each key that a document repeats.

    Every document states ``keys`` named numbers (keys), and repeats these keys later. A question is
    a dict: the field ``text`` is the document up to the repeated key, and ``key`` contains the
    digits of the key. If ``text`` ends with a space, lm_eval scores the space together with the
    digits.

    Args:
        keys: number of different keys in each document.
        documents: number of documents per length.
        max_seq_lengths, haystack, seed, tokenizer_options: as in `make_passkey_documents`.
    """
    tokenizer, sentences = load_tokenizer(**tokenizer_options), _read_sentences(haystack)
    # lm_eval adds the leading special tokens again
    num_leading_tokens = len(find_leading_special_tokens(tokenizer))

    def decode_text(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens[num_leading_tokens:], clean_up_tokenization_spaces=False)

    def make_questions(length: int, index: int) -> Documents:
        document = make_recall_document(
            tokenizer=tokenizer,
            sentences=sentences,
            length=length,
            num_keys=keys,
            index=index,
            seed=seed,
        )
        questions = []
        for start, end in document.answers:
            text_before, text_with_key = (
                decode_text(document.tokens[:start]),
                decode_text(document.tokens[:end]),
            )
            key = text_with_key[len(text_before) :]
            questions.append({"text": text_before, "key": key, "length": length, "index": index})
        return questions

    questions: Documents = []
    for index in range(documents):
        question_lists = [make_questions(length, index) for length in max_seq_lengths]
        for key in range(keys):
            questions += [length_questions[key] for length_questions in question_lists]
    return questions


def score_recall_reply(
    document: dict[str, Any], replies: Sequence[tuple[float, bool]]
) -> dict[str, float]:
    """Return {length: score}: 1.0 if greedy decoding would generate the key, or else 0.0."""
    ((_, is_greedy),) = replies
    return {str(document["length"]): float(is_greedy)}


def make_task_documents(
    *,
    task_name: str,
    max_seq_lengths: Sequence[int] = (4096,),
    samples: int = 20,
    haystack: str | None = None,
    seed: int = 0,
    **tokenizer_options: Any,
) -> Documents:
    """Return ``samples`` prompts per length of one of `TASKS`, with the expected answers.

    A prompt and its answers together have ``length`` tokens, or one more or less if the prompt
    starts inside a word.

    Args:
        task_name: key of `TASKS`.
        max_seq_lengths, samples, haystack, seed, tokenizer_options: as in `make_passkey_documents`.
    """
    tokenizer, sentences = load_tokenizer(**tokenizer_options), _read_sentences(haystack)
    # lm_eval adds the leading special tokens again, unless a chat template contains them
    num_leading_tokens = (
        len(find_leading_special_tokens(tokenizer)) if tokenizer.chat_template is None else 0
    )
    documents = []
    for index, length in product(range(samples), max_seq_lengths):
        example = TASKS[task_name].make(
            tokenizer=tokenizer, sentences=sentences, length=length, index=index, seed=seed
        )
        prompt_tokens = example.tokens[num_leading_tokens : example.prompt]
        replies = list(example.replies)
        document = {
            "text": tokenizer.decode(prompt_tokens, clean_up_tokenization_spaces=False),
            "key": ", ".join(replies),
            "replies": replies,
        }
        documents.append({**document, "length": length, "index": index})
    return documents


def score_task_reply(document: dict[str, Any], replies: Sequence[str]) -> dict[str, float]:
    """Return {length: score}, where the score is the fraction of expected answers in the reply.

    Order, case and blanks do not matter, as in RULER (Hsieh et al. 2024, arXiv 2404.06654).
    """
    reply, *expected_answers = (
        "".join(text.split()).casefold() for text in (replies[0], *document["replies"])
    )
    return {str(document["length"]): fmean(answer in reply for answer in expected_answers)}


def load_tokenizer(
    tokenizer: str | None = None,
    pretrained: str | None = None,
    model: str | None = None,
    trust_remote_code: bool = False,
    **ignored_options: Any,
) -> Any:
    """Load the tokenizer by which the lengths of documents are measured.

    The arguments have the names that RULER's tasks use: ``tokenizer``, or else ``pretrained``, or
    else ``model`` names the tokenizer.
    """
    from transformers import AutoTokenizer

    name = tokenizer or pretrained or model
    if not name:
        raise ValueError(
            "tokenizer must be a name or path, because lengths are in its tokens, got none. Give "
            "--model_args pretrained=NAME or --metadata tokenizer=NAME."
        )
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def _read_sentences(haystack: str | None) -> Sequence[str]:
    """Return the sentences of the UTF-8 file ``haystack``, or `NOISE_SENTENCES` for None."""
    return split_sentences(Path(haystack).read_text("utf-8-sig")) if haystack else NOISE_SENTENCES


make_passkey_split, make_recall_split, make_task_split = map(
    _make_split, (make_passkey_documents, make_recall_questions, make_task_documents)
)
