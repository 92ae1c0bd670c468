"""Teacher forcing: a model reads a text, and its predictions of the text's tokens are scored."""

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

LOGITS_AT_ONCE = 1024  # number of positions whose logits are converted to float32 together
CHUNK = 64  # default number of tokens per call after a prompt


class TeacherForced(NamedTuple):
    """The tokens that a model reads, and the ranges of tokens whose predictions are scored.

    Attributes:
        tokens: the ids of all tokens, including predicted tokens.
        ranges: (start, end) of each range of predicted tokens, without the token at ``end``.
        prompt: number of prefilled tokens; the model reads the following tokens in chunks, with the
            KV cache of earlier tokens. None: the model reads all tokens in one pass.
    """

    tokens: Tokens
    ranges: tuple[Span, ...]
    prompt: int | None = None

    @property
    def positions(self) -> list[int]:
        """The positions of all predicted tokens, in the order of ``ranges``."""
        return [position for start, end in self.ranges for position in range(start, end)]


def answered(tokenizer: Any, prompt: Prompt) -> TeacherForced:
    """Append the requested key to a prompt, and return both with the key as the predicted range."""
    answers = (prompt.begun, prompt.begun + prompt.key)
    before, complete = (sentence_tokens(tokenizer, answer) for answer in answers)
    # some tokenizers join the last blank of the prompt and the first digit of the key to one token
    same = common_prefix_length(before, complete)
    start = len(prompt.tokens) - (len(before) - same)
    key = complete[same:]
    return TeacherForced(prompt.tokens[:start] + key, ((start, start + len(key)),))


def greedy_match(model: Any, reading: TeacherForced, **options: Any) -> dict[str, list[bool]]:
    """Return {"right": list}: for each range, True if all its tokens are predicted.

    A token is predicted if its logit is the largest of the vocabulary.

    Args:
        model: the model.
        reading: the tokens and ranges.
        options: keyword arguments of `predictions`.
    """
    return right_spans(predictions(model, reading, **options), reading)


def right_spans(logits: Tensor, reading: TeacherForced) -> dict[str, list[bool]]:
    """Return {"right": list}: for each range, True if all its tokens have the largest logit.

    Args:
        logits: logits that predict the tokens of all ranges, [positions, vocabulary].
        reading: the tokens and ranges.
    """
    predicted = zip(reading.positions, logits.argmax(-1).tolist(), strict=True)
    wrong = {position for position, token in predicted if token != reading.tokens[position]}
    return {"right": [wrong.isdisjoint(range(start, end)) for start, end in reading.ranges]}


def nll(model: Any, reading: TeacherForced) -> dict[str, float | int]:
    """Return the sum of the negative log-likelihoods of the tokens in the ranges.

    Returns:
        ``nll``: the sum in nats.
        ``count``: the number of tokens.
    """
    logits = predictions(model, reading)
    targets = target_ids(reading, logits.device)
    total = sum(
        F.cross_entropy(chunk.float(), chunk_targets, reduction="sum").item()
        for chunk, chunk_targets in zip(
            logits.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True
        )
    )
    return {"nll": total, "count": len(targets)}


def target_ids(reading: TeacherForced, device: torch.device) -> Tensor:
    """Return the ids of the tokens in the ranges, int64 [positions]."""
    return torch.tensor([reading.tokens[i] for i in reading.positions], device=device)


def distributions(model: Any, reading: TeacherForced, **options: Any) -> Tensor:
    """Return the predicted log-probabilities for the positions of the ranges.

    Args:
        model: the model.
        reading: the tokens and ranges.
        options: keyword arguments of `predictions`.

    Returns:
        float32 [positions, vocabulary].
    """
    return predictions(model, reading, **options).float().log_softmax(-1)


def divergence(result: Tensor, dense: Tensor, reading: TeacherForced) -> dict[str, float | int]:
    """Compare the log-probabilities of a method with those of dense attention.

    Args:
        result: log-probabilities of the method, [positions, vocabulary].
        dense: log-probabilities of dense attention, [positions, vocabulary].
        reading: the tokens and ranges.

    Returns:
        ``kl``, the sum over positions of KL(dense || result) in nats; ``agree``, the number of
        positions with the same likeliest token; ``nll``, the summed negative log-likelihood of the
        actual tokens by ``result``; and ``count``, the number of positions.
    """
    dense = dense.to(result.device)
    kl = F.kl_div(result, dense, log_target=True, reduction="none").sum(-1, dtype=torch.float64)
    targets = target_ids(reading, result.device)
    return {
        "kl": kl.sum().item(),
        "agree": int((result.argmax(-1) == dense.argmax(-1)).sum()),
        "nll": F.nll_loss(result, targets, reduction="sum").item(),
        "count": len(targets),
    }


@torch.no_grad()
def predictions(model: Any, reading: TeacherForced, chunk: int = CHUNK, **options: Any) -> Tensor:
    """Return the logits that predict the tokens of the ranges, [positions, vocabulary].

    Args:
        model: the model.
        reading: the tokens and ranges.
        chunk, options: arguments of `after_prompt`; ignored if ``reading.prompt`` is None.

    Raises:
        ValueError: a range starts inside the prompt.
    """
    ids = torch.tensor([reading.tokens], device=model.device)
    # the logits at position i predict the token at position i + 1
    before = torch.tensor(reading.positions, device=model.device) - 1
    if reading.prompt is None:
        return model(ids, logits_to_keep=before, use_cache=False).logits[0]
    if min(reading.positions) < reading.prompt:
        raise ValueError(
            f"positions must be after the prompt of {reading.prompt} tokens, got "
            f"{min(reading.positions)}."
        )
    logits = after_prompt(model, ids, reading.prompt, chunk, **options)
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
    """Return the logits that predict the tokens after a prompt, [B, N - prompt, vocabulary].

    Args:
        model: the model.
        ids: int [B, N], sequences of one length without padding.
        prompt: number of tokens to prefill; the following tokens are read with the KV cache.
        chunk: tokens per call after the prompt; 1 means decode steps.
        cache: an empty cache; None for the default of the model.
        stepping: a function that returns a context manager; the tokens after the prompt are read
            inside its context.
        prefill_chunk: tokens per call in the prompt; 0: the whole prompt in one call.
    """
    output = _prefilled(model, ids[:, :prompt], cache, prefill_chunk)
    # collect the logits at the last prompt token and at all later tokens except the last token
    logits, last = [output.logits], ids.shape[1] - 1
    with stepping():
        for start in range(prompt, last, chunk):
            chunk_ids = ids[:, start : min(start + chunk, last)]
            output = read_on(model, chunk_ids, cache_of(output))
            logits.append(output.logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def after_turns(
    model: Any,
    reading: TeacherForced,
    chunk: int = CHUNK,
    cache: Any = None,
    prefill_chunk: int = 0,
) -> Tensor:
    """Return the logits that predict the last tokens of every chat turn, [positions, vocabulary].

    Each range of ``reading`` contains the last tokens of a turn. The earlier tokens of the turn are
    prefilled, after the cached tokens of earlier turns. The range is then read in chunks.

    Args:
        model: the model.
        reading: the tokens of all turns, and a range per turn.
        chunk, cache, prefill_chunk: as in `after_prompt`.
    """
    ids = torch.tensor([reading.tokens], device=model.device)
    logits, num_cached = [], 0
    for start, stop in reading.ranges:
        output = _prefilled(
            model=model,
            ids=ids[:, :start],
            cache=cache,
            prefill_chunk=prefill_chunk,
            num_cached=num_cached,
        )
        cache, num_cached = cache_of(output), stop
        turn = [output.logits]
        for chunk_ids in ids[:, start:stop].split(chunk, dim=1):
            turn.append(read_on(model, chunk_ids, cache).logits)
        # leave out the last logits, which predict the first token of the next turn
        logits.append(torch.cat(turn, dim=1)[:, :-1])
    return torch.cat(logits, dim=1)[0]


def divergence_by_turn(result: Tensor, dense: Tensor, reading: TeacherForced) -> dict[str, Any]:
    """Compare the logits of a method with those of dense attention, turn by turn.

    Args:
        result: logits of the method from `after_turns`, [positions, vocabulary].
        dense: logits of dense attention, [positions, vocabulary].
        reading: the tokens, and a range per turn.

    Returns:
        ``turns``, the result of `divergence` for each turn, and the sums over all turns.
    """
    dense = dense.to(result.device)
    sizes = [stop - start for start, stop in reading.ranges]
    turns = []
    for span, turn, dense_turn in zip(
        reading.ranges, result.split(sizes), dense.split(sizes), strict=True
    ):
        log_probs, dense_log_probs = (x.float().log_softmax(-1) for x in (turn, dense_turn))
        turns.append(divergence(log_probs, dense_log_probs, reading._replace(ranges=(span,))))
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
    """Generate tokens greedily after prompts, and return them, int64 [B, tokens].

    Args:
        model: the model.
        ids: the prompts, int [B, N].
        tokens: number of tokens to generate; an end-of-text token does not stop the generation.
        cache, stepping, prefill_chunk: as in `after_prompt`.
    """
    output = _prefilled(model, ids, cache, prefill_chunk)
    generated = [output.logits[:, -1:].argmax(-1)]
    with stepping():
        while len(generated) < tokens:
            output = read_on(model, generated[-1], cache_of(output))
            generated.append(output.logits[:, -1:].argmax(-1))
    return torch.cat(generated, dim=1)


def _prefilled(model: Any, ids: Tensor, cache: Any, prefill_chunk: int, num_cached: int = 0) -> Any:
    """Prefill prompts in chunks, and return the model's output for the last token.

    Args:
        model: the model.
        ids: the prompts, int [B, N].
        cache: the cache, or None for the default of the model.
        prefill_chunk: tokens per call; 0: all tokens in one call.
        num_cached: number of leading tokens that the cache contains already.
    """
    with reading_prompt(ids.shape[1], start=num_cached):
        for chunk in ids[:, num_cached:].split(prefill_chunk or ids.shape[1], dim=1):
            output = read_on(model, chunk, cache, logits_to_keep=1)
            cache = cache_of(output)
    return output
