"""Teacher forcing: what a model predicts of a text that is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.scope import reading as reading_prompt
from cab_hf.eval.haystack import Prompt
from cab_hf.eval.kv_cache import cache_of, read_on
from cab_hf.texts.needles import Span, Tokens, sentence_tokens, shared

LOGITS_AT_ONCE = 1024  # positions whose logits are in float32 at the same time
CHUNK = 64  # tokens behind a prompt that are read at once, unless told


class TeacherForced(NamedTuple):
    """What is read, and which tokens of it should be foreseen.

    Attributes:
        spans: [start, end) of those tokens.
        prompt: how many tokens are prefilled; what follows is read through the KV cache, chunk by
            chunk. None where all tokens are read in one pass.
    """

    tokens: Tokens
    spans: tuple[Span, ...]
    prompt: int | None = None

    @property
    def places(self) -> list[int]:
        """The tokens that should be foreseen, in order of the spans."""
        return [place for span in self.spans for place in range(*span)]


def answered(tokenizer: Any, prompt: Prompt) -> TeacherForced:
    """A prompt and, behind it, the key it asks for."""
    answers = (prompt.begun, prompt.begun + prompt.key)
    before, complete = (sentence_tokens(tokenizer, answer) for answer in answers)
    # some tokenizers have the last blank and the first digit in one token
    same = shared(before, complete)
    kept = prompt.tokens[: len(prompt.tokens) - (len(before) - same)]
    return TeacherForced(kept + complete[same:], ((len(kept), len(kept) + len(complete) - same),))


def greedy_match(model: Any, reading: TeacherForced, **how: Any) -> dict[str, list[bool]]:
    """Of each span whether all of its tokens are those that ``model`` finds likeliest.

    ``how`` it is read is told as to `behind_prompt`.
    """
    return right_spans(predictions(model, reading, **how), reading)


def right_spans(logits: Tensor, reading: TeacherForced) -> dict[str, list[bool]]:
    """`greedy_match` of what a model said: logits [places, vocabulary]."""
    likeliest = zip(reading.places, logits.argmax(-1).tolist(), strict=True)
    wrong = {place for place, token in likeliest if token != reading.tokens[place]}
    return {"right": [wrong.isdisjoint(range(*span)) for span in reading.spans]}


def nll(model: Any, reading: TeacherForced) -> dict[str, float | int]:
    """The sum of negative log-likelihoods of all tokens in the spans, and how many they are."""
    logits = predictions(model, reading)
    targets = torch.tensor([reading.tokens[at] for at in reading.places], device=logits.device)
    parts = zip(logits.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True)
    nll = sum(F.cross_entropy(few.float(), given, reduction="sum").item() for few, given in parts)
    return {"nll": nll, "count": len(targets)}


def distributions(model: Any, reading: TeacherForced, **how: Any) -> Tensor:
    """The log-probabilities ``model`` gives at each place, float32 [places, vocabulary].

    ``how`` it is read is told as to `behind_prompt`.
    """
    return predictions(model, reading, **how).float().log_softmax(-1)


def divergence(result: Tensor, dense: Tensor, reading: TeacherForced) -> dict[str, float | int]:
    """How far log-probabilities ``result`` are from those of dense attention.

    Args:
        result, dense: [places, vocabulary], of the places of ``reading``.

    Returns:
        ``kl``, the sum over places of KL(dense || found) in nats; ``agree``, at how many places
        both find the same token likeliest; ``nll``, the sum of negative log-likelihoods of the
        tokens that stand there, by ``result``; and ``count``, how many places there are.
    """
    dense = dense.to(result.device)
    kl = F.kl_div(result, dense, log_target=True, reduction="none").sum(-1, dtype=torch.float64)
    targets = torch.tensor([reading.tokens[at] for at in reading.places], device=result.device)
    return {
        "kl": kl.sum().item(),
        "agree": int((result.argmax(-1) == dense.argmax(-1)).sum()),
        "nll": F.nll_loss(result, targets, reduction="sum").item(),
        "count": len(targets),
    }


@torch.no_grad()
def predictions(model: Any, reading: TeacherForced, chunk: int = CHUNK, **how: Any) -> Tensor:
    """Logits for the tokens of the spans, [places, vocabulary]; ``how`` of `behind_prompt`."""
    ids = torch.tensor([reading.tokens], device=model.device)
    before = torch.tensor(reading.places, device=model.device) - 1
    if reading.prompt is None:
        return model(ids, logits_to_keep=before, use_cache=False).logits[0]
    if min(reading.places) < reading.prompt:
        raise ValueError(
            f"places must be behind the prompt of {reading.prompt}; got {min(reading.places)}."
        )
    logits = behind_prompt(model, ids, reading.prompt, chunk, **how)
    return logits[0, before - (reading.prompt - 1)]


@torch.no_grad()
def behind_prompt(
    model: Any,
    ids: Tensor,
    prompt: int,
    chunk: int = 1,
    cache: Any = None,
    stepping: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prefill_chunk: int = 0,
) -> Tensor:
    """Logits for the tokens behind a prompt, [B, N - prompt, vocabulary], on the model's device.

    Args:
        ids: int [B, N], texts of one length without padding.
        prompt: how many tokens are read first; what follows is read through the KV cache.
        chunk: tokens behind the prompt that are read at once; 1 is the manner of decode.
        cache: an empty one; None for what the model makes itself.
        stepping: a context in which the tokens behind the prompt are read.
        prefill_chunk: tokens of the prompt that are read at once; 0: all of them.
    """
    read = _prefilled(model, ids[:, :prompt], cache, prefill_chunk)
    # of the last token of the prompt, and of all behind it but the last of the text
    logits, last = [read.logits], ids.shape[1] - 1
    with stepping():
        for start in range(prompt, last, chunk):
            few = ids[:, start : min(start + chunk, last)]
            read = read_on(model, few, cache_of(read))
            logits.append(read.logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def behind_turns(
    model: Any,
    reading: TeacherForced,
    chunk: int = CHUNK,
    cache: Any = None,
    prefill_chunk: int = 0,
) -> Tensor:
    """Logits at each place of ``reading``, [places, vocabulary], whose spans end turns of a chat.

    What stands before a span is a prompt, which continues the cache of the turns before it; the
    span is read behind it as `behind_prompt` reads, whose arguments the others are.
    """
    ids = torch.tensor([reading.tokens], device=model.device)
    logits, end = [], 0
    for start, stop in reading.spans:
        read = _prefilled(model, ids[:, :start], cache, prefill_chunk, end)
        cache, end = cache_of(read), stop
        turn = [read.logits]
        for few in ids[:, start:stop].split(chunk, dim=1):
            turn.append(read_on(model, few, cache).logits)
        # what the last token foresees belongs to the prompt of the next turn
        logits.append(torch.cat(turn, dim=1)[:, :-1])
    return torch.cat(logits, dim=1)[0]


def divergence_by_turn(result: Tensor, dense: Tensor, reading: TeacherForced) -> dict[str, Any]:
    """`divergence` of logits ``result`` from ``dense``, both as of `behind_turns`.

    Returns:
        ``turns``, what `divergence` says of each span, and its sums over all of them.
    """
    dense = dense.to(result.device)
    sizes = [stop - start for start, stop in reading.spans]
    turns = [
        divergence(*(x.float().log_softmax(-1) for x in both), reading._replace(spans=(span,)))
        for span, *both in zip(reading.spans, result.split(sizes), dense.split(sizes), strict=True)
    ]
    return {"turns": turns, **{name: sum(turn[name] for turn in turns) for name in turns[0]}}


@torch.no_grad()
def continued(
    model: Any,
    ids: Tensor,
    tokens: int,
    cache: Any = None,
    stepping: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prefill_chunk: int = 0,
) -> Tensor:
    """The ``tokens`` likeliest tokens behind prompts ``ids`` [B, N], one by one: int [B, tokens].

    An end-of-text token ends nothing. The other arguments are those of `behind_prompt`.
    """
    read = _prefilled(model, ids, cache, prefill_chunk)
    written = [read.logits[:, -1:].argmax(-1)]
    with stepping():
        while len(written) < tokens:
            read = read_on(model, written[-1], cache_of(read))
            written.append(read.logits[:, -1:].argmax(-1))
    return torch.cat(written, dim=1)


def _prefilled(model: Any, ids: Tensor, cache: Any, at_once: int, cached: int = 0) -> Any:
    """What ``model`` says of the last token of prompts ``ids`` [B, N], which it reads in chunks.

    The first ``cached`` tokens are in the cache already.
    """
    with reading_prompt(ids.shape[1]):
        for chunk in ids[:, cached:].split(at_once or ids.shape[1], dim=1):
            read = read_on(model, chunk, cache, logits_to_keep=1)
            cache = cache_of(read)
    return read
