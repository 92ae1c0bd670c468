"""Teacher forcing: a model reads a text, and its predictions of the text's tokens are scored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.scope import set_prompt as reading_prompt
from cab_hf.data.needles import Span, Tokens, common_prefix_length, sentence_tokens
from cab_hf.eval.haystack import Prompt
from cab_hf.eval.kv_cache import get_cache, read_with_cache

MAX_FLOAT32_POSITIONS = 1024  # number of positions whose logits are converted to float32 together
DEFAULT_CHUNK_TOKENS = 64  # default number of tokens per call after a prompt


class Reading(NamedTuple):
    """The tokens that a model reads, and the ranges of tokens whose predictions are scored.

    Attributes:
        tokens: the ids of all tokens, including predicted tokens.
        predicted_ranges: (start, end) of each range of predicted tokens, without the token at
            ``end``.
        prompt_length: number of prefilled tokens; the model reads the following tokens in chunks,
            with the KV cache of earlier tokens. None: the model reads all tokens in one pass.
    """

    tokens: Tokens
    predicted_ranges: tuple[Span, ...]
    prompt_length: int | None = None

    @property
    def predicted_positions(self) -> list[int]:
        """The positions of all predicted tokens, in the order of ``predicted_ranges``."""
        return [position for start, end in self.predicted_ranges for position in range(start, end)]


def append_key(tokenizer: Any, prompt: Prompt) -> Reading:
    """Append the requested key to a prompt, and return both with the key as the predicted range."""
    answers = (prompt.answer_start, prompt.answer_start + prompt.key)
    tokens_before, complete_tokens = (sentence_tokens(tokenizer, answer) for answer in answers)
    # some tokenizers join the last blank of the prompt and the first digit of the key to one token
    num_common = common_prefix_length(tokens_before, complete_tokens)
    start = len(prompt.tokens) - (len(tokens_before) - num_common)
    key_tokens = complete_tokens[num_common:]
    return Reading(prompt.tokens[:start] + key_tokens, ((start, start + len(key_tokens)),))


def score_greedy_predictions(model: Any, reading: Reading, **options: Any) -> dict[str, list[bool]]:
    """Return {"right": list}: for each range, True if all its tokens are predicted.

    A token is predicted if its logit is the largest of the vocabulary.

    Args:
        model: the model.
        reading: the tokens and ranges.
        options: keyword arguments of `predict_logits`.
    """
    return score_spans(predict_logits(model, reading, **options), reading)


def score_spans(logits: Tensor, reading: Reading) -> dict[str, list[bool]]:
    """Return {"right": list}: for each range, True if all its tokens have the largest logit.

    Args:
        logits: logits that predict the tokens of all ranges, [positions, vocabulary].
        reading: the tokens and ranges.
    """
    predicted_tokens = zip(reading.predicted_positions, logits.argmax(-1).tolist(), strict=True)
    wrong_positions = {
        position for position, token in predicted_tokens if token != reading.tokens[position]
    }
    return {
        "right": [
            wrong_positions.isdisjoint(range(start, end)) for start, end in reading.predicted_ranges
        ]
    }


def compute_nll(model: Any, reading: Reading) -> dict[str, float | int]:
    """Return the sum of the negative log-likelihoods of the tokens in the ranges.

    Returns:
        ``nll``: the sum in nats.
        ``count``: the number of tokens.
    """
    logits = predict_logits(model, reading)
    target_ids = get_target_ids(reading, logits.device)
    total_nll = sum(
        F.cross_entropy(chunk_logits.float(), chunk_target_ids, reduction="sum").item()
        for chunk_logits, chunk_target_ids in zip(
            logits.split(MAX_FLOAT32_POSITIONS),
            target_ids.split(MAX_FLOAT32_POSITIONS),
            strict=True,
        )
    )
    return {"nll": total_nll, "count": len(target_ids)}


def get_target_ids(reading: Reading, device: torch.device) -> Tensor:
    """Return the ids of the tokens in the ranges, int64 [positions]."""
    return torch.tensor([reading.tokens[i] for i in reading.predicted_positions], device=device)


def predict_log_probs(model: Any, reading: Reading, **options: Any) -> Tensor:
    """Return the predicted log-probabilities for the positions of the ranges.

    Args:
        model: the model.
        reading: the tokens and ranges.
        options: keyword arguments of `predict_logits`.

    Returns:
        float32 [positions, vocabulary].
    """
    return predict_logits(model, reading, **options).float().log_softmax(-1)


def compare_log_probs(
    log_probs: Tensor, dense_log_probs: Tensor, reading: Reading
) -> dict[str, float | int]:
    """Compare the log-probabilities of a method with those of dense attention.

    Args:
        log_probs: log-probabilities of the method, [positions, vocabulary].
        dense_log_probs: log-probabilities of dense attention, [positions, vocabulary].
        reading: the tokens and ranges.

    Returns:
        ``kl``, the sum over positions of KL(dense || result) in nats; ``agree``, the number of
        positions with the same likeliest token; ``nll``, the summed negative log-likelihood of the
        actual tokens by ``log_probs``; and ``count``, the number of positions.
    """
    dense_log_probs = dense_log_probs.to(log_probs.device)
    kl = F.kl_div(log_probs, dense_log_probs, log_target=True, reduction="none").sum(
        -1, dtype=torch.float64
    )
    target_ids = get_target_ids(reading, log_probs.device)
    return {
        "kl": kl.sum().item(),
        "agree": int((log_probs.argmax(-1) == dense_log_probs.argmax(-1)).sum()),
        "nll": F.nll_loss(log_probs, target_ids, reduction="sum").item(),
        "count": len(target_ids),
    }


@torch.no_grad()
def predict_logits(
    model: Any, reading: Reading, chunk: int = DEFAULT_CHUNK_TOKENS, **options: Any
) -> Tensor:
    """Return the logits that predict the tokens of the ranges, [positions, vocabulary].

    Args:
        model: the model.
        reading: the tokens and ranges.
        chunk, options: arguments of `predict_after_prompt`; ignored if
            ``reading.prompt_length`` is None.

    Raises:
        ValueError: a range starts inside the prompt.
    """
    ids = torch.tensor([reading.tokens], device=model.device)
    # the logits at position i predict the token at position i + 1
    positions_before = torch.tensor(reading.predicted_positions, device=model.device) - 1
    if reading.prompt_length is None:
        return model(ids, logits_to_keep=positions_before, use_cache=False).logits[0]
    if min(reading.predicted_positions) < reading.prompt_length:
        raise ValueError(
            f"positions must be after the prompt of {reading.prompt_length} tokens, got "
            f"{min(reading.predicted_positions)}."
        )
    logits = predict_after_prompt(model, ids, reading.prompt_length, chunk, **options)
    return logits[0, positions_before - (reading.prompt_length - 1)]


@torch.no_grad()
def predict_after_prompt(
    model: Any,
    ids: Tensor,
    prompt_length: int,
    chunk: int = 1,
    cache: Any = None,
    get_step_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prefill_chunk: int = 0,
) -> Tensor:
    """Return the logits that predict the tokens after a prompt, [B, N - prompt, vocabulary].

    Args:
        model: the model.
        ids: int [B, N], sequences of one length without padding.
        prompt_length: number of tokens to prefill; the following tokens are read with the KV cache.
        chunk: tokens per call after the prompt; 1 means decode steps.
        cache: an empty cache; None for the default of the model.
        get_step_context: a function that returns a context manager; the tokens after the prompt are
            read inside its context.
        prefill_chunk: tokens per call in the prompt; 0: the whole prompt in one call.
    """
    output = _prefill(model, ids[:, :prompt_length], cache, prefill_chunk)
    # collect the logits at the last prompt token and at all later tokens except the last token
    logits, last_position = [output.logits], ids.shape[1] - 1
    with get_step_context():
        for start in range(prompt_length, last_position, chunk):
            chunk_ids = ids[:, start : min(start + chunk, last_position)]
            output = read_with_cache(model, chunk_ids, get_cache(output))
            logits.append(output.logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def predict_turns(
    model: Any,
    reading: Reading,
    chunk: int = DEFAULT_CHUNK_TOKENS,
    cache: Any = None,
    prefill_chunk: int = 0,
) -> Tensor:
    """Return the logits that predict the last tokens of every chat turn, [positions, vocabulary].

    Each range of ``reading`` contains the last tokens of a turn. The earlier tokens of the turn are
    prefilled, after the cached tokens of earlier turns. The range is then read in chunks.

    Args:
        model: the model.
        reading: the tokens of all turns, and a range per turn.
        chunk, cache, prefill_chunk: as in `predict_after_prompt`.
    """
    ids = torch.tensor([reading.tokens], device=model.device)
    logits, num_cached = [], 0
    for start, end in reading.predicted_ranges:
        output = _prefill(
            model=model,
            ids=ids[:, :start],
            cache=cache,
            prefill_chunk=prefill_chunk,
            num_cached=num_cached,
        )
        cache, num_cached = get_cache(output), end
        turn_logits = [output.logits]
        for chunk_ids in ids[:, start:end].split(chunk, dim=1):
            turn_logits.append(read_with_cache(model, chunk_ids, cache).logits)
        # leave out the last logits, which predict the first token of the next turn
        logits.append(torch.cat(turn_logits, dim=1)[:, :-1])
    return torch.cat(logits, dim=1)[0]


def compare_turns(logits: Tensor, dense_logits: Tensor, reading: Reading) -> dict[str, Any]:
    """Compare the logits of a method with those of dense attention, turn by turn.

    Args:
        logits: logits of the method from `predict_turns`, [positions, vocabulary].
        dense_logits: logits of dense attention, [positions, vocabulary].
        reading: the tokens, and a range per turn.

    Returns:
        ``turns``, the result of `compare_log_probs` for each turn, and the sums over all turns.
    """
    dense_logits = dense_logits.to(logits.device)
    turn_sizes = [stop - start for start, stop in reading.predicted_ranges]
    turn_results = []
    for span, turn_logits, dense_turn_logits in zip(
        reading.predicted_ranges,
        logits.split(turn_sizes),
        dense_logits.split(turn_sizes),
        strict=True,
    ):
        log_probs, dense_log_probs = (
            x.float().log_softmax(-1) for x in (turn_logits, dense_turn_logits)
        )
        turn_results.append(
            compare_log_probs(
                log_probs, dense_log_probs, reading._replace(predicted_ranges=(span,))
            )
        )
    return {
        "turns": turn_results,
        **{
            field: sum(turn_result[field] for turn_result in turn_results)
            for field in turn_results[0]
        },
    }


@torch.no_grad()
def generate_greedily(
    model: Any,
    ids: Tensor,
    num_tokens: int,
    cache: Any = None,
    get_step_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prefill_chunk: int = 0,
) -> Tensor:
    """Generate tokens greedily after prompts, and return them, int64 [B, tokens].

    Args:
        model: the model.
        ids: the prompts, int [B, N].
        num_tokens: number of tokens to generate; an end-of-text token does not stop the generation.
        cache, get_step_context, prefill_chunk: as in `predict_after_prompt`.
    """
    output = _prefill(model, ids, cache, prefill_chunk)
    generated_ids = [output.logits[:, -1:].argmax(-1)]
    with get_step_context():
        while len(generated_ids) < num_tokens:
            output = read_with_cache(model, generated_ids[-1], get_cache(output))
            generated_ids.append(output.logits[:, -1:].argmax(-1))
    return torch.cat(generated_ids, dim=1)


def _prefill(model: Any, ids: Tensor, cache: Any, prefill_chunk: int, num_cached: int = 0) -> Any:
    """Prefill prompts in chunks, and return the model's output for the last token.

    Args:
        model: the model.
        ids: the prompts, int [B, N].
        cache: the cache, or None for the default of the model.
        prefill_chunk: tokens per call; 0: all tokens in one call.
        num_cached: number of leading tokens that the cache contains already.
    """
    with reading_prompt(ids.shape[1], num_cached_tokens=num_cached):
        for chunk_ids in ids[:, num_cached:].split(prefill_chunk or ids.shape[1], dim=1):
            output = read_with_cache(model, chunk_ids, cache, logits_to_keep=1)
            cache = get_cache(output)
    return output
