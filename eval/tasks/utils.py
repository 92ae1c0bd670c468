"""Documents and scores of the tasks in this folder, called by lm-evaluation-harness.

The questions are written in `cab_hf.data.documents`, `cab_hf.eval.haystack` and
`cab_hf.data.tasks`. Every function receives all of ``--model_args`` and ``--metadata`` as keywords
and ignores unknown ones. Lengths take turns, so that ``--limit`` keeps documents of every length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any

from cab_hf.data.documents import recall_document
from cab_hf.data.needles import NOISE, leading_tokens, split_sentences
from cab_hf.data.tasks import TASKS
from cab_hf.eval.haystack import Haystack, answered

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
Documents = list[dict[str, Any]]


def passkey_documents(
    *,
    max_seq_lengths: Sequence[int] = (4096,),
    samples: int = 20,
    keys: int = 1,
    haystack: str | None = None,
    seed: int = 0,
    **others: Any,
) -> Documents:
    """Return ``samples`` prompts per length, those of ``cab_hf.eval passkey``, depths in turn.

    Args:
        max_seq_lengths: lengths in tokens.
        samples: prompts per length.
        keys: number of hidden keys.
        haystack: UTF-8 file whose sentences surround the keys; noise by default.
        seed: seed of the prompts.
    """
    hay = Haystack(load_tokenizer(**others), "text" if haystack else "noise", keys, haystack)
    documents = []
    for number, length in product(range(samples), max_seq_lengths):
        index, depth = divmod(number, len(DEPTHS))
        prompt = hay.prompt(length, DEPTHS[depth], index, seed)
        place = {"length": length, "depth": DEPTHS[depth], "index": index}
        documents.append({"text": prompt.text, "key": prompt.key, **place})
    return documents


def _as_split(make: Callable[..., Documents]) -> Callable[..., dict[str, Any]]:
    """Wrap documents as a data set, which a task's file requires."""

    def split(**metadata: Any) -> dict[str, Any]:
        import datasets

        return {"test": datasets.Dataset.from_list(make(**metadata))}

    return split


def found(document: dict[str, Any], replies: Sequence[str]) -> dict[str, float]:
    """Score whether the reply contains the key, under the document's length."""
    return {str(document["length"]): float(answered(replies[0], document["key"]))}


def recall_documents(
    *,
    keys: int,
    max_seq_lengths: Sequence[int] = (4096,),
    documents: int = 4,
    haystack: str | None = None,
    seed: int = 0,
    **others: Any,
) -> Documents:
    """Return, for each key in the documents of each length, the text before it and its digits.

    lm_eval scores a final blank of the text together with the digits. Other arguments are those of
    `passkey_documents`.
    """
    tokenizer, sentences = load_tokenizer(**others), _sentences(haystack)
    begun = len(leading_tokens(tokenizer))  # lm_eval adds them again

    def text(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens[begun:], clean_up_tokenization_spaces=False)

    def asked(length: int, index: int) -> Documents:
        tokens, _, answers = recall_document(tokenizer, sentences, length, keys, index, seed)
        place = {"length": length, "index": index}
        parts = [(text(tokens[:start]), text(tokens[:end])) for start, end in answers]
        return [
            {"text": before, "key": complete[len(before) :], **place} for before, complete in parts
        ]

    made: Documents = []
    for index in range(documents):
        alike = [asked(length, index) for length in max_seq_lengths]
        made += chain(*zip(*alike, strict=True))
    return made


def recalled(document: dict[str, Any], replies: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """Score whether each token of the key was the likeliest, under the document's length."""
    ((_, likeliest),) = replies
    return {str(document["length"]): float(likeliest)}


def task_documents(
    *,
    task_name: str,
    max_seq_lengths: Sequence[int] = (4096,),
    samples: int = 20,
    haystack: str | None = None,
    seed: int = 0,
    **others: Any,
) -> Documents:
    """Return ``samples`` prompts per length of one of `TASKS`, with the answers to each.

    Prompt and answers together have that length, plus or minus a token if the text starts inside a
    word. Other arguments are those of `passkey_documents`.
    """
    tokenizer, sentences = load_tokenizer(**others), _sentences(haystack)
    # lm_eval adds special tokens to a prompt again; a chat template contains them
    begun = len(leading_tokens(tokenizer)) if tokenizer.chat_template is None else 0
    documents = []
    for index, length in product(range(samples), max_seq_lengths):
        example = TASKS[task_name].make(tokenizer, sentences, length, index, seed)
        prompt = example.tokens[begun : example.prompt]
        text = tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
        place = {"length": length, "index": index}
        replies = list(example.replies)
        documents.append({"text": text, "key": ", ".join(replies), "replies": replies, **place})
    return documents


def said(document: dict[str, Any], replies: Sequence[str]) -> dict[str, float]:
    """Score the share of answers in the reply, under the document's length.

    Order, case and blanks do not matter, as in RULER (Hsieh et al. 2024, arXiv 2404.06654).
    """
    reply, *expected = (
        "".join(text.split()).casefold() for text in (replies[0], *document["replies"])
    )
    return {str(document["length"]): fmean(answer in reply for answer in expected)}


def load_tokenizer(
    tokenizer: str | None = None,
    pretrained: str | None = None,
    model: str | None = None,
    trust_remote_code: bool = False,
    **others: Any,
) -> Any:
    """Load the tokenizer that measures documents, named as for RULER's tasks."""
    from transformers import AutoTokenizer

    name = tokenizer or pretrained or model
    if not name:
        raise ValueError(
            "tokenizer must be a name or path, because lengths are in its tokens, got none. Give "
            "--model_args pretrained=NAME or --metadata tokenizer=NAME."
        )
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def _sentences(haystack: str | None) -> Sequence[str]:
    """Return the sentences of a UTF-8 file; noise without one."""
    return split_sentences(Path(haystack).read_text("utf-8-sig")) if haystack else NOISE


passkey, recall, task = map(_as_split, (passkey_documents, recall_documents, task_documents))
