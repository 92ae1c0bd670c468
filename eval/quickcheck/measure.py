"""The measurements of a quick check, which `Measurements` takes on a model."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cab_hf.config import CabConfig
from cab_hf.data.documents import Document, make_plain_document, make_recall_document
from cab_hf.data.needles import Tokens
from cab_hf.eval.quickcheck.advice import CAB, DENSE, FULL, Row, select_rows
from cab_hf.eval.quickcheck.budget import (
    KERNEL_COMPARISON,
    KL,
    PROBE,
    RECALL_BORDER,
    TTFT,
    Cost,
    Step,
)
from cab_hf.eval.quickcheck.kernels import list_kernel_names, use_dense_kernel
from cab_hf.eval.teacher_forcing import (
    Reading,
    compare_log_probs,
    predict_after_prompt,
    predict_log_probs,
    score_greedy_predictions,
)
from cab_hf.experiment.settings import first_line
from cab_hf.hf.layers import attention_layers
from cab_hf.patches.inspection import stats
from cab_hf.patches.switch import cab

MAX_CONTINUATION_TOKENS = 256  # tokens after the prompt whose distributions are compared
CONTINUATION_DIVISOR = 8  # at most 1 / 8 of the tokens of a document are compared
CHUNK_TOKENS = 64  # tokens after a prompt that are read per call
MAX_KEYS = 16  # largest number of keys per document
MAX_KEY_TOKENS = 60  # upper bound for the tokens of a sentence that states or repeats a key
# of the first comparison, this number of kernels is compared at longer lengths
NUM_KERNELS_KEPT = 2
# Largest accepted difference between the next-token probabilities of two dense kernels. A kernel
# with a larger difference is not used.
MAX_PROBABILITY_DIFFERENCE = 0.1
GIB = 2**30


class OutOfTime(RuntimeError):
    """The error of a step that was stopped at the deadline."""


def measure_cost(model: Any) -> Cost:
    """Return the size of ``model``, from which times are scaled to other lengths.

    Input embeddings do not count, because they are looked up and not multiplied.
    """
    text_config = model.config.get_text_config()
    num_embedding_parameters = model.get_input_embeddings().weight.numel()
    num_parameters = (
        sum(parameter.numel() for parameter in model.parameters()) - num_embedding_parameters
    )
    # mixture of experts: each token is multiplied by the weights of its active experts only
    num_experts = getattr(text_config, "num_local_experts", None) or getattr(
        text_config, "num_experts", None
    )
    num_active_experts = getattr(text_config, "num_experts_per_tok", None)
    if num_experts and num_active_experts:
        num_parameters *= min(1.0, 2 * num_active_experts / num_experts)
    return Cost(
        float(max(num_parameters, 1)),
        float(text_config.num_hidden_layers * text_config.hidden_size),
    )


def choose_num_keys(length: int, border_tokens: int) -> int:
    """Return the number of keys for a document of ``length`` tokens, from 1 to `MAX_KEYS`.

    Args:
        length: tokens of the document. Its first half states every key, and its second half repeats
            every key.
        border_tokens: every repeated key starts at a multiple of this number of tokens.
    """
    return max(1, min(MAX_KEYS, length // 2 // (MAX_KEY_TOKENS + border_tokens - 1)))


class SourceText(NamedTuple):
    """A text from whose sentences documents are built.

    Attributes:
        sentences: the sentences in the order of the text.
        num_tokens: number of tokens. Counting stops at the longest measured length.
    """

    sentences: Sequence[str]
    num_tokens: int


class Measurements:
    """The measurements on one model and its texts.

    Args:
        model: a causal LM on its device.
        tokenizer: the model's tokenizer.
        texts: texts from which documents are built. Documents with consecutive indices come from
            different texts. Texts with fewer tokens than a document are left out if possible.
        config: the config of CAB, in which each step replaces ``mass_threshold``.
        seed: seed of the documents.
        num_runs: number of timed runs of the first token, for CAB and for dense attention.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        texts: Sequence[SourceText],
        config: CabConfig,
        seed: int,
        num_runs: int,
    ) -> None:
        self.model, self.tokenizer, self.texts = model, tokenizer, texts
        self.config, self.seed, self.num_runs = config.changed(min_length=0), seed, num_runs
        self.own_implementation = model.config.get_text_config()._attn_implementation
        self.is_cuda = model.device.type == "cuda"
        self.kernel_names = list_kernel_names(self.own_implementation, not self.is_cuda)
        self.num_warm_ups = int(self.is_cuda)
        self.deadline = inf
        # logits [vocabulary] of the last token of the latest timed prompt
        self.last_logits: Tensor | None = None
        for _, layer in attention_layers(model):
            layer.register_forward_pre_hook(self._stop_after_deadline)
        # (length, index) -> log-probabilities of dense attention, [predicted tokens, vocabulary]
        self.dense_log_prob_cache: dict[tuple[int, int], Tensor] = {}

    def _stop_after_deadline(self, *_: Any) -> None:
        if time.perf_counter() > self.deadline:
            raise OutOfTime("took longer than estimated, and was stopped")

    def measure_step(self, step: Step, rows: Sequence[Row], deadline: float) -> dict[str, Any]:
        """Return the measured fields of a step.

        Args:
            step: the step.
            rows: rows of earlier steps.
            deadline: value of `time.perf_counter` after which no further layer is computed.

        Raises:
            OutOfTime: the deadline passed during the step.
        """
        self.deadline = deadline
        if step.measure == PROBE:
            return self.measure_probe(step)
        if step.measure == KERNEL_COMPARISON:
            return self.compare_kernels(step, rows)
        if step.measure == TTFT:
            return self.measure_first_token(step, rows)
        return self.measure_divergence(step) if step.measure == KL else self.measure_recall(step)

    def make_config(self, step: Step) -> CabConfig:
        """Return the config of a step; for the method FULL, a config that selects every block."""
        if step.method == FULL:
            return self.config.changed(mass_threshold=0.0, max_density=1.0)
        return self.config.changed(mass_threshold=step.threshold)

    @contextmanager
    def attend_by_method(self, step: Step) -> Iterator[None]:
        """Let the model attend with the method of a step inside the block."""
        if step.method == DENSE:
            yield
            return
        with cab(self.model, self.make_config(step)):
            stats(self.model, reset=True)
            yield

    def attend_with_kernel(self, kernel_name: str) -> AbstractContextManager[None]:
        """Switch the model to a dense kernel of `list_kernel_names` inside the block."""
        return use_dense_kernel(self.model, kernel_name, self.own_implementation)

    def make_prompt(self, length: int, index: int = 0) -> Tensor:
        """Return document ``index`` without keys as token ids, int64 [1, length]."""
        return torch.tensor([self.make_plain_tokens(length, index)], device=self.model.device)

    def make_plain_tokens(self, length: int, index: int) -> Tokens:
        """Return the token ids of document ``index``, which has ``length`` tokens and no keys."""
        sentences, index_in_text = self.find_source_sentences(length, index)
        return make_plain_document(
            tokenizer=self.tokenizer,
            sentences=sentences,
            length=length,
            index=index_in_text,
            seed=self.seed,
        )

    def find_source_sentences(self, length: int, index: int) -> tuple[Sequence[str], int]:
        """Return the sentences from which document ``index`` is built, and its index in their text.

        With the same text, length, seed and index in the text, `cab_hf.eval fidelity` builds the
        same document.
        """
        long_texts = [
            source_text for source_text in self.texts if source_text.num_tokens >= length
        ] or self.texts
        source_text = long_texts[index % len(long_texts)]
        return source_text.sentences, index // len(long_texts)

    @torch.inference_mode()
    def time_first_token(self, prompt_ids: Tensor) -> float:
        """Return the seconds from the call of the model to the logits of the last prompt token.

        Args:
            prompt_ids: tokens of the prompt, int64 [1, N].
        """
        self._synchronize()
        start_time = time.perf_counter()
        self.last_logits = predict_after_prompt(self.model, prompt_ids, prompt_ids.shape[1])[0, -1]
        self._synchronize()
        return time.perf_counter() - start_time

    def _synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.model.device)

    def measure_probe(self, step: Step) -> dict[str, Any]:
        """Time the second of two passes over a short prompt; the first pass compiles kernels."""
        prompt_ids = self.make_prompt(step.length)
        with self.attend_by_method(step):
            self.time_first_token(prompt_ids)
            return {"pass_seconds": {step.method: self.time_first_token(prompt_ids)}}

    def list_compared_kernels(self, rows: Sequence[Row], length: int) -> list[str]:
        """Return the names of the dense kernels to compare at a length.

        After a comparison at another length, these are its fastest kernels, or else all kernels.
        """
        return rank_kernels(rows, length) or self.kernel_names

    def compare_kernels(self, step: Step, rows: Sequence[Row]) -> dict[str, Any]:
        """Time the dense kernels, and compare their next-token probabilities.

        Returns:
            ``kernel_ms``: name of a kernel -> milliseconds to the first token.
            ``reasons``: name of a kernel without a time -> reason. The kernel raised an error, or
            its probabilities differ from those of the first kernel by more than
            `MAX_PROBABILITY_DIFFERENCE`.
            ``pass_seconds``: seconds of the slowest kernel, for estimates.
        """
        prompt_ids = self.make_prompt(step.length)
        ms_by_kernel, reason_by_kernel, first_probabilities = {}, {}, None
        for kernel_name in self.list_compared_kernels(rows, step.length):
            try:
                with self.attend_with_kernel(kernel_name):
                    self.time_first_token(prompt_ids)
                    seconds = self.time_first_token(prompt_ids)
            except OutOfTime:
                raise
            except Exception as error:
                # catch all errors: kernels of other packages raise many types
                reason_by_kernel[kernel_name] = first_line(error)[:200]
                continue
            probabilities = self.last_logits.float().softmax(-1)
            first_probabilities = (
                probabilities if first_probabilities is None else first_probabilities
            )
            difference = (probabilities - first_probabilities).abs().max().item()
            if difference <= MAX_PROBABILITY_DIFFERENCE:
                ms_by_kernel[kernel_name] = 1000 * seconds
            else:
                reason_by_kernel[kernel_name] = f"differs by {difference:.2g} in a probability"
        if not ms_by_kernel:
            raise RuntimeError(
                "; ".join(
                    f"{kernel_name}: {reason}" for kernel_name, reason in reason_by_kernel.items()
                )
            )
        slowest_s = max(ms_by_kernel.values()) / 1000
        return {
            "kernel_ms": ms_by_kernel,
            "reasons": reason_by_kernel,
            "pass_seconds": {DENSE: slowest_s},
        }

    def measure_first_token(self, step: Step, rows: Sequence[Row]) -> dict[str, Any]:
        """Time the first token with the fastest dense kernel and with CAB, in alternating runs.

        Returns:
            ``kernel``: name of the dense kernel.
            ``dense_ms``, ``cab_ms``: median milliseconds.
            ``runs``: number of timed runs of each.
            ``dense_peak_gib``, ``cab_peak_gib``: peak memory, or None.
            ``densities``: density of each layer with CAB; None for layers that attend densely.
            ``pass_seconds``: the slowest run of each, for estimates.
        """
        prompt_ids = self.make_prompt(step.length)
        kernel_name = (rank_kernels(rows, step.length) or [self.own_implementation])[0]
        context_by_method = {
            DENSE: partial(self.attend_with_kernel, kernel_name),
            CAB: partial(self.attend_by_method, step),
        }
        seconds_by_method: dict[str, list[float]] = {method: [] for method in context_by_method}
        peak_gib_by_method: dict[str, float | None] = {}
        # runs with a negative number are warm-up runs
        for run_index in range(-self.num_warm_ups, self.num_runs):
            for method, context in context_by_method.items():
                with context():
                    self._reset_peak()
                    run_seconds = self.time_first_token(prompt_ids)
                    if run_index >= 0:
                        seconds_by_method[method].append(run_seconds)
                    peak_gib_by_method[method] = self._read_peak_gib()
                    if method == CAB:
                        densities = [layer["density"] for layer in stats(self.model, reset=True)]
        return {
            "kernel": kernel_name,
            "dense_ms": 1000 * median(seconds_by_method[DENSE]),
            "cab_ms": 1000 * median(seconds_by_method[CAB]),
            "runs": len(seconds_by_method[DENSE]),
            "dense_peak_gib": peak_gib_by_method[DENSE],
            "cab_peak_gib": peak_gib_by_method[CAB],
            "densities": densities,
            "pass_seconds": {
                method: max(run_times) for method, run_times in seconds_by_method.items()
            },
        }

    def _reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.model.device)
        elif Path("/proc/self/clear_refs").exists():
            # on Linux, 5 resets VmHWM, the peak of the resident memory
            _try_write(Path("/proc/self/clear_refs"), "5")

    def _read_peak_gib(self) -> float | None:
        """Return the peak of allocated GPU memory, or of resident memory on a CPU, in GiB.

        Returns None on a CPU if the operating system does not report the peak.
        """
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.model.device) / GIB
        status_file = Path("/proc/self/status")
        peak_match = (
            re.search(r"VmHWM:\s+(\d+) kB", status_file.read_text())
            if status_file.exists()
            else None
        )
        return int(peak_match[1]) / 2**20 if peak_match else None

    def make_continuation(self, length: int, index: int) -> Reading:
        """Return document ``index`` without keys, whose last tokens are the predicted range.

        The tokens before the range are the prompt.
        """
        tokens = self.make_plain_tokens(length, index)
        num_prompt_tokens = length - max(
            1, min(MAX_CONTINUATION_TOKENS, length // CONTINUATION_DIVISOR)
        )
        return Reading(tokens, ((num_prompt_tokens, length),), num_prompt_tokens)

    def predict_densely(self, length: int, index: int) -> Tensor:
        """Return the cached log-probabilities of dense attention for a document.

        Returns:
            float32 [predicted tokens, vocabulary], on the CPU.
        """
        cache_key = length, index
        if cache_key not in self.dense_log_prob_cache:
            document = self.make_continuation(length, index)
            self.dense_log_prob_cache[cache_key] = predict_log_probs(
                self.model, document, chunk=CHUNK_TOKENS
            ).cpu()
        return self.dense_log_prob_cache[cache_key]

    def measure_divergence(self, step: Step) -> dict[str, Any]:
        """Compare the predictions of tokens after a prompt with those of dense attention.

        Returns:
            ``kl``, ``agree``, ``count``: as in `teacher_forcing.compare_log_probs`.
            ``densities``: density of each layer; None for layers that attend densely.
            ``pass_seconds``: seconds of the step, for estimates.
        """
        dense_log_probs = self.predict_densely(step.length, step.index)
        document = self.make_continuation(step.length, step.index)
        with self.attend_by_method(step):
            start_time = time.perf_counter()
            log_probs = predict_log_probs(self.model, document, chunk=CHUNK_TOKENS)
            self._synchronize()
            seconds = time.perf_counter() - start_time
            densities = [layer["density"] for layer in stats(self.model, reset=True)]
        score_fields = compare_log_probs(log_probs, dense_log_probs, document)
        return {
            **{field_name: score_fields[field_name] for field_name in ("kl", "agree", "count")},
            "densities": densities,
            "pass_seconds": {step.method: seconds},
        }

    def make_document(self, step: Step) -> Document:
        """Return the document with keys for a step of RECALL or RECALL_BORDER.

        The second half of the document repeats its keys. For RECALL_BORDER, each repeat starts a
        query block. The number of keys is `choose_num_keys`, or fewer if they do not fit.
        """
        border_tokens = self.config.query_block if step.measure == RECALL_BORDER else 1
        num_keys = choose_num_keys(step.length, border_tokens)
        sentences, index_in_text = self.find_source_sentences(step.length, step.index)
        while True:
            try:
                return make_recall_document(
                    self.tokenizer,
                    sentences,
                    step.length,
                    num_keys=num_keys,
                    index=index_in_text,
                    seed=self.seed,
                    answer_alignment=border_tokens,
                )
            except ValueError:
                # `MAX_KEY_TOKENS` is too small for this tokenizer: try fewer keys
                if num_keys == 1:
                    raise RuntimeError("no key fits into a document of this length") from None
                num_keys //= 2

    def measure_recall(self, step: Step) -> dict[str, Any]:
        """Return ``right``: for each key of a document, True if the model predicts its repetition.

        ``pass_seconds`` are the seconds of the step, for estimates.
        """
        document = self.make_document(step)
        with self.attend_by_method(step):
            start_time = time.perf_counter()
            score_fields = score_greedy_predictions(
                self.model, Reading(document.tokens, document.answers)
            )
            self._synchronize()
            seconds = time.perf_counter() - start_time
        return {**score_fields, "pass_seconds": {step.method: seconds}}


def rank_kernels(rows: Sequence[Row], length: int) -> list[str]:
    """Return the names of the `NUM_KERNELS_KEPT` fastest dense kernels, the fastest first.

    The times are those of the comparison at the length nearest to ``length``. Returns [] if no
    kernels were compared.
    """
    comparison_rows = select_rows(rows, measure=KERNEL_COMPARISON)
    if not comparison_rows:
        return []
    nearest_row = min(comparison_rows, key=lambda row: abs(row["length"] - length))
    return sorted(nearest_row["kernel_ms"], key=nearest_row["kernel_ms"].get)[:NUM_KERNELS_KEPT]


def find_unsupported_reason(model: nn.Module) -> str | None:
    """Return the reason why no layer of ``model`` can attend sparsely; None if a layer can."""
    named_layers = list(attention_layers(model))
    if not named_layers:
        return "no attention layer that is known to be causal"
    if all(not getattr(module, "is_causal", True) for _, module in named_layers):
        return "attention that is not causal"
    return None


def _try_write(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, unless the operating system denies it."""
    try:
        path.write_text(text)
    except OSError:
        return
