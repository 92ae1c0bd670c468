"""Teacher forcing: a model's predictions of a given text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.scope import reading as reading_prompt
from cab_hf.data.needles import Span, Tokens, common_prefix_length, sentence_tokens
from cab_hf.eval.haystack import Prompt
from cab_hf.eval.kv_cache import cache_of, read_on

LOGITS_AT_ONCE = 1024  # positions whose logits are in float32 at the same time
CHUNK = 64  # default tokens per call after a prompt


class TeacherForced(NamedTuple):
    """The tokens to read, and the ranges of tokens to predict.

    Attributes:
        ranges: [start, end) of the predicted tokens.
        prompt: number of prefilled tokens; the rest is read through the KV cache in chunks. None if
            all tokens are read in one pass.
    """

    tokens: Tokens
    ranges: tuple[Span, ...]
    prompt: int | None = None

    @property
    def places(self) -> list[int]:
        """The positions of predicted tokens, in order of the ranges."""
        return [place for span in self.ranges for place in range(*span)]


def answered(tokenizer: Any, prompt: Prompt) -> TeacherForced:
    """Return a prompt followed by the key that it asks for."""
    answers = (prompt.begun, prompt.begun + prompt.key)
    before, complete = (sentence_tokens(tokenizer, answer) for answer in answers)
    # some tokenizers join the last blank and the first digit
    same = common_prefix_length(before, complete)
    kept = prompt.tokens[: len(prompt.tokens) - (len(before) - same)]
    return TeacherForced(kept + complete[same:], ((len(kept), len(kept) + len(complete) - same),))


def greedy_match(model: Any, reading: TeacherForced, **how: Any) -> dict[str, list[bool]]:
    """Return, for each span, True if ``model`` finds all of its tokens likeliest.

    ``how`` are arguments of `after_prompt`.
    """
    return right_spans(predictions(model, reading, **how), reading)


def right_spans(logits: Tensor, reading: TeacherForced) -> dict[str, list[bool]]:
    """Return `greedy_match` for given logits [places, vocabulary]."""
    likeliest = zip(reading.places, logits.argmax(-1).tolist(), strict=True)
    wrong = {place for place, token in likeliest if token != reading.tokens[place]}
    return {"right": [wrong.isdisjoint(range(*span)) for span in reading.ranges]}


def nll(model: Any, reading: TeacherForced) -> dict[str, float | int]:
    """Return the summed negative log-likelihood of all tokens in the ranges, and their number."""
    logits = predictions(model, reading)
    targets = torch.tensor([reading.tokens[at] for at in reading.places], device=logits.device)
    parts = zip(logits.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True)
    nll = sum(F.cross_entropy(few.float(), given, reduction="sum").item() for few, given in parts)
    return {"nll": nll, "count": len(targets)}


def distributions(model: Any, reading: TeacherForced, **how: Any) -> Tensor:
    """Return the log-probabilities of ``model`` at each position, float32 [places, vocabulary].

    ``how`` are arguments of `after_prompt`.
    """
    return predictions(model, reading, **how).float().log_softmax(-1)


def divergence(result: Tensor, dense: Tensor, reading: TeacherForced) -> dict[str, float | int]:
    """Compare log-probabilities ``result`` with those of dense attention.

    Args:
        result, dense: [places, vocabulary], at the positions of ``reading``.
        reading: the tokens.

    Returns:
        ``kl``, the sum over positions of KL(dense || found) in nats; ``agree``, the number of
        positions where both find the same token likeliest; ``nll``, the summed negative
        log-likelihood of the actual tokens by ``result``; and ``count``, the number of positions.
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
    """Return logits of span tokens, [places, vocabulary]; ``how`` as in `after_prompt`."""
    ids = torch.tensor([reading.tokens], device=model.device)
    before = torch.tensor(reading.places, device=model.device) - 1
    if reading.prompt is None:
        return model(ids, logits_to_keep=before, use_cache=False).logits[0]
    if min(reading.places) < reading.prompt:
        raise ValueError(
            f"places must be after the prompt of {reading.prompt} tokens, got "
            f"{min(reading.places)}."
        )
    logits = after_prompt(model, ids, reading.prompt, chunk, **how)
    return logits[0, before - (reading.prompt - 1)]


@torch.no_grad()
def after_prompt(
    model: Any,
    ids: Tensor,
    prompt: int,
    chunk: int = 1,
    cache: Any = None,
    stepping: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prefill_chunk: int = 0,
) -> Tensor:
    """Return logits for the tokens after a prompt, [B, N - prompt, vocabulary].

    Args:
        model: the model.
        ids: int [B, N], sequences of one length without padding.
        prompt: tokens that are read first; the rest is read through the KV cache.
        chunk: tokens after the prompt that are read at once; 1 means decode steps.
        cache: an empty cache; None for the default of the model.
        stepping: a context for reading the tokens after the prompt.
        prefill_chunk: tokens of the prompt that are read at once; 0: all of them.
    """
    read = _prefilled(model, ids[:, :prompt], cache, prefill_chunk)
    # logits of the last prompt token, and of all later tokens except the last
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
    """Return logits at each position of ``reading``, [places, vocabulary]; ranges end chat turns.

    The tokens before a span are a prompt that continues the cache of earlier turns. The span is
    read after it as in `after_prompt`, which explains the other arguments.
    """
    ids = torch.tensor([reading.tokens], device=model.device)
    logits, end = [], 0
    for start, stop in reading.ranges:
        read = _prefilled(model, ids[:, :start], cache, prefill_chunk, end)
        cache, end = cache_of(read), stop
        turn = [read.logits]
        for few in ids[:, start:stop].split(chunk, dim=1):
            turn.append(read_on(model, few, cache).logits)
        # the prediction of the last token belongs to the prompt of the next turn
        logits.append(torch.cat(turn, dim=1)[:, :-1])
    return torch.cat(logits, dim=1)[0]


def divergence_by_turn(result: Tensor, dense: Tensor, reading: TeacherForced) -> dict[str, Any]:
    """Return the `divergence` of logits ``result`` from ``dense``, both of `behind_turns`.

    Returns:
        ``turns``, the `divergence` of each span, and the sums over all ranges.
    """
    dense = dense.to(result.device)
    sizes = [stop - start for start, stop in reading.ranges]
    turns = [
        divergence(*(x.float().log_softmax(-1) for x in both), reading._replace(ranges=(span,)))
        for span, *both in zip(reading.ranges, result.split(sizes), dense.split(sizes), strict=True)
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
    """Generate ``tokens`` greedy tokens after prompts ``ids`` [B, N]: int [B, tokens].

    An end-of-text token does not stop it. The other arguments are those of `after_prompt`.
    """
    read = _prefilled(model, ids, cache, prefill_chunk)
    written = [read.logits[:, -1:].argmax(-1)]
    with stepping():
        while len(written) < tokens:
            read = read_on(model, written[-1], cache_of(read))
            written.append(read.logits[:, -1:].argmax(-1))
    return torch.cat(written, dim=1)


def _prefilled(model: Any, ids: Tensor, cache: Any, at_once: int, cached: int = 0) -> Any:
    """Return the output of ``model`` for the last token of prompts ``ids`` [B, N], read in chunks.

    The first ``cached`` tokens are in the cache already.
    """
    with reading_prompt(ids.shape[1], start=cached):
        for chunk in ids[:, cached:].split(at_once or ids.shape[1], dim=1):
            read = read_on(model, chunk, cache, logits_to_keep=1)
            cache = cache_of(read)
    return read
