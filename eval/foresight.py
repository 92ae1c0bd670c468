"""Teacher forcing: what a model foresees of a text that stands there already, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.documents import Span, Tokens, sentence_tokens, shared
from cab_hf.eval.haystack import Prompt

LOGITS_AT_ONCE = 1024  # positions whose logits are in float32 at the same time


class Reading(NamedTuple):
    """What is read in one pass, and which tokens of it should be foreseen."""

    tokens: Tokens
    spans: tuple[Span, ...]


def answered(tokenizer: Any, prompt: Prompt) -> Reading:
    """A prompt and, behind it, the key it asks for."""
    answers = (prompt.begun, prompt.begun + prompt.key)
    before, whole = (sentence_tokens(tokenizer, answer) for answer in answers)
    # some tokenizers have the last blank and the first digit in one token
    same = shared(before, whole)
    kept = prompt.tokens[: len(prompt.tokens) - (len(before) - same)]
    return Reading(kept + whole[same:], ((len(kept), len(kept) + len(whole) - same),))


def foreseen(model: Any, reading: Reading) -> dict[str, list[bool]]:
    """Of each span whether all of its tokens are those that ``model`` finds likeliest."""
    places = [place for span in reading.spans for place in range(*span)]
    likeliest = _predictions(model, reading.tokens, places).argmax(-1).tolist()
    wrong = {p for p, token in zip(places, likeliest, strict=True) if token != reading.tokens[p]}
    return {"right": [wrong.isdisjoint(range(*span)) for span in reading.spans]}


def surprise(model: Any, reading: Reading) -> dict[str, float | int]:
    """The sum of negative log-likelihoods of all tokens in the spans, and how many they are."""
    places = [place for span in reading.spans for place in range(*span)]
    logits = _predictions(model, reading.tokens, places)
    targets = torch.tensor([reading.tokens[place] for place in places], device=logits.device)
    parts = zip(logits.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True)
    nll = sum(F.cross_entropy(few.float(), told, reduction="sum").item() for few, told in parts)
    return {"nll": nll, "count": len(places)}


@torch.no_grad()
def _predictions(model: Any, tokens: Tokens, places: Sequence[int]) -> Tensor:
    """Logits for the tokens at ``places``, [places, vocabulary], from one pass."""
    ids = torch.tensor([tokens], device=model.device)
    before = torch.tensor(places, device=model.device) - 1
    return model(ids, logits_to_keep=before, use_cache=False).logits[0]
