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
from cab_hf.eval.quickcheck.advice import CAB, DENSE, FULL, Row, select
from cab_hf.eval.quickcheck.budget import BORDER, KERNELS, KL, PROBE, TTFT, Cost, Step
from cab_hf.eval.quickcheck.kernels import attend_with, kernel_names
from cab_hf.eval.teacher_forcing import (
    TeacherForced,
    compare_log_probs,
    predict_after_prompt,
    predict_log_probs,
    score_greedy_predictions,
)
from cab_hf.experiment.settings import first_line
from cab_hf.hf.layers import attention_layers
from cab_hf.patches.inspection import stats
from cab_hf.patches.switch import cab

CONTINUED = 256  # tokens after the prompt whose distributions are compared
CONTINUED_SHARE = 8  # at most 1 / 8 of the tokens of a document are compared
CHUNK = 64  # tokens after a prompt that are read per call
KEYS = 16  # largest number of keys per document
KEY_TOKENS = 60  # upper bound for the tokens of a sentence that states or repeats a key
KERNELS_KEPT = 2  # of the first comparison, this number of kernels is compared at longer lengths
# Largest accepted difference between the next-token probabilities of two dense kernels. A kernel
# with a larger difference is not used.
SAME = 0.1
GIB = 2**30


class OutOfTime(RuntimeError):
    """The error of a step that was stopped at the deadline."""


def measure_cost(model: Any) -> Cost:
    """Return the size of ``model``, from which times are scaled to other lengths.

    Input embeddings do not count, because they are looked up and not multiplied.
    """
    text = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight.numel()
    parameters = sum(p.numel() for p in model.parameters()) - embedding
    # mixture of experts: each token is multiplied by the weights of its active experts only
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    active = getattr(text, "num_experts_per_tok", None)
    if experts and active:
        parameters *= min(1.0, 2 * active / experts)
    return Cost(float(max(parameters, 1)), float(text.num_hidden_layers * text.hidden_size))


def num_keys(length: int, border: int) -> int:
    """Return the number of keys for a document of ``length`` tokens, from 1 to `KEYS`.

    Args:
        length: tokens of the document. Its first half states every key, and its second half repeats
            every key.
        border: every repeated key starts at a multiple of this number of tokens.
    """
    return max(1, min(KEYS, length // 2 // (KEY_TOKENS + border - 1)))


class Text(NamedTuple):
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
        runs: number of timed runs of the first token, for CAB and for dense attention.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        texts: Sequence[Text],
        config: CabConfig,
        seed: int,
        runs: int,
    ) -> None:
        self.model, self.tokenizer, self.texts = model, tokenizer, texts
        self.config, self.seed, self.runs = config.changed(min_length=0), seed, runs
        self.own = model.config.get_text_config()._attn_implementation
        self.is_cuda = model.device.type == "cuda"
        self.kernels = kernel_names(self.own, not self.is_cuda)
        self.warm_ups = int(self.is_cuda)
        self.deadline = inf
        # logits [vocabulary] of the last token of the latest timed prompt
        self.logits: Tensor | None = None
        for _, layer in attention_layers(model):
            layer.register_forward_pre_hook(self._stop_late)
        # (length, index) -> log-probabilities of dense attention, [predicted tokens, vocabulary]
        self.dense_cache: dict[tuple[int, int], Tensor] = {}

    def _stop_late(self, *_: Any) -> None:
        if time.perf_counter() > self.deadline:
            raise OutOfTime("took longer than estimated, and was stopped")

    def measure(self, step: Step, rows: Sequence[Row], deadline: float) -> dict[str, Any]:
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
            return self.probe(step)
        if step.measure == KERNELS:
            return self.compare_kernels(step, rows)
        if step.measure == TTFT:
            return self.first_token(step, rows)
        return self.divergence(step) if step.measure == KL else self.recall(step)

    def config_of(self, step: Step) -> CabConfig:
        """Return the config of a step; for the method FULL, a config that selects every block."""
        if step.method == FULL:
            return self.config.changed(mass_threshold=0.0, max_density=1.0)
        return self.config.changed(mass_threshold=step.threshold)

    @contextmanager
    def attending(self, step: Step) -> Iterator[None]:
        """Let the model attend with the method of a step inside the block."""
        if step.method == DENSE:
            yield
            return
        with cab(self.model, self.config_of(step)):
            stats(self.model, reset=True)
            yield

    def kernel(self, name: str) -> AbstractContextManager[None]:
        """Switch the model to a dense kernel of `kernel_names` inside the block."""
        return attend_with(self.model, name, self.own)

    def prompt(self, length: int, index: int = 0) -> Tensor:
        """Return document ``index`` without keys as token ids, int64 [1, length]."""
        return torch.tensor([self.plain_tokens(length, index)], device=self.model.device)

    def plain_tokens(self, length: int, index: int) -> Tokens:
        """Return the token ids of document ``index``, which has ``length`` tokens and no keys."""
        sentences, index_in_text = self.find_source(length, index)
        return make_plain_document(
            tokenizer=self.tokenizer,
            sentences=sentences,
            length=length,
            index=index_in_text,
            seed=self.seed,
        )

    def find_source(self, length: int, index: int) -> tuple[Sequence[str], int]:
        """Return the sentences from which document ``index`` is built, and its index in their text.

        With the same text, length, seed and index in the text, `cab_hf.eval fidelity` builds the
        same document.
        """
        long_texts = [text for text in self.texts if text.num_tokens >= length] or self.texts
        text = long_texts[index % len(long_texts)]
        return text.sentences, index // len(long_texts)

    @torch.inference_mode()
    def timed(self, ids: Tensor) -> float:
        """Return the seconds from the call of the model to the logits of the last prompt token.

        Args:
            ids: tokens of the prompt, int64 [1, N].
        """
        self._synchronize()
        started = time.perf_counter()
        self.logits = predict_after_prompt(self.model, ids, ids.shape[1])[0, -1]
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.model.device)

    def probe(self, step: Step) -> dict[str, Any]:
        """Time the second of two passes over a short prompt; the first pass compiles kernels."""
        ids = self.prompt(step.length)
        with self.attending(step):
            self.timed(ids)
            return {"pass_seconds": {step.method: self.timed(ids)}}

    def compared(self, rows: Sequence[Row], length: int) -> list[str]:
        """Return the names of the dense kernels to compare at a length.

        After a comparison at another length, these are its fastest kernels, or else all kernels.
        """
        return ranked_kernels(rows, length) or self.kernels

    def compare_kernels(self, step: Step, rows: Sequence[Row]) -> dict[str, Any]:
        """Time the dense kernels, and compare their next-token probabilities.

        Returns:
            ``kernel_ms``: name of a kernel -> milliseconds to the first token.
            ``reasons``: name of a kernel without a time -> reason. The kernel raised an error, or
            its probabilities differ from those of the first kernel by more than `SAME`.
            ``pass_seconds``: seconds of the slowest kernel, for estimates.
        """
        ids, ms, reasons, expected = self.prompt(step.length), {}, {}, None
        for name in self.compared(rows, step.length):
            try:
                with self.kernel(name):
                    self.timed(ids)
                    seconds = self.timed(ids)
            except OutOfTime:
                raise
            except Exception as error:
                # catch all errors: kernels of other packages raise many types
                reasons[name] = first_line(error)[:200]
                continue
            probabilities = self.logits.float().softmax(-1)
            expected = probabilities if expected is None else expected
            difference = (probabilities - expected).abs().max().item()
            if difference <= SAME:
                ms[name] = 1000 * seconds
            else:
                reasons[name] = f"differs by {difference:.2g} in a probability"
        if not ms:
            raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
        slowest = max(ms.values()) / 1000
        return {"kernel_ms": ms, "reasons": reasons, "pass_seconds": {DENSE: slowest}}

    def first_token(self, step: Step, rows: Sequence[Row]) -> dict[str, Any]:
        """Time the first token with the fastest dense kernel and with CAB, in alternating runs.

        Returns:
            ``kernel``: name of the dense kernel.
            ``dense_ms``, ``cab_ms``: median milliseconds.
            ``runs``: number of timed runs of each.
            ``dense_peak_gib``, ``cab_peak_gib``: peak memory, or None.
            ``densities``: density of each layer with CAB; None for layers that attend densely.
            ``pass_seconds``: the slowest run of each, for estimates.
        """
        ids = self.prompt(step.length)
        kernel = (ranked_kernels(rows, step.length) or [self.own])[0]
        contexts = {DENSE: partial(self.kernel, kernel), CAB: partial(self.attending, step)}
        seconds: dict[str, list[float]] = {name: [] for name in contexts}
        peaks: dict[str, float | None] = {}
        # runs with a negative number are warm-up runs
        for run in range(-self.warm_ups, self.runs):
            for name, context in contexts.items():
                with context():
                    self._reset_peak()
                    run_seconds = self.timed(ids)
                    if run >= 0:
                        seconds[name].append(run_seconds)
                    peaks[name] = self._peak_gib()
                    if name == CAB:
                        densities = [layer["density"] for layer in stats(self.model, reset=True)]
        return {
            "kernel": kernel,
            "dense_ms": 1000 * median(seconds[DENSE]),
            "cab_ms": 1000 * median(seconds[CAB]),
            "runs": len(seconds[DENSE]),
            "dense_peak_gib": peaks[DENSE],
            "cab_peak_gib": peaks[CAB],
            "densities": densities,
            "pass_seconds": {name: max(times) for name, times in seconds.items()},
        }

    def _reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.model.device)
        elif Path("/proc/self/clear_refs").exists():
            # on Linux, 5 resets VmHWM, the peak of the resident memory
            _try_write(Path("/proc/self/clear_refs"), "5")

    def _peak_gib(self) -> float | None:
        """Return the peak of allocated GPU memory, or of resident memory on a CPU, in GiB.

        Returns None on a CPU if the operating system does not report the peak.
        """
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.model.device) / GIB
        status = Path("/proc/self/status")
        peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
        return int(peak[1]) / 2**20 if peak else None

    def continuation(self, length: int, index: int) -> TeacherForced:
        """Return document ``index`` without keys, whose last tokens are the predicted range.

        The tokens before the range are the prompt.
        """
        tokens = self.plain_tokens(length, index)
        prompt = length - max(1, min(CONTINUED, length // CONTINUED_SHARE))
        return TeacherForced(tokens, ((prompt, length),), prompt)

    def dense(self, length: int, index: int) -> Tensor:
        """Return the cached log-probabilities of dense attention for a document.

        Returns:
            float32 [predicted tokens, vocabulary], on the CPU.
        """
        key = length, index
        if key not in self.dense_cache:
            reading = self.continuation(length, index)
            self.dense_cache[key] = predict_log_probs(self.model, reading, chunk=CHUNK).cpu()
        return self.dense_cache[key]

    def divergence(self, step: Step) -> dict[str, Any]:
        """Compare the predictions of tokens after a prompt with those of dense attention.

        Returns:
            ``kl``, ``agree``, ``count``: as in `teacher_forcing.compare_log_probs`.
            ``densities``: density of each layer; None for layers that attend densely.
            ``pass_seconds``: seconds of the step, for estimates.
        """
        dense = self.dense(step.length, step.index)
        reading = self.continuation(step.length, step.index)
        with self.attending(step):
            started = time.perf_counter()
            log_probs = predict_log_probs(self.model, reading, chunk=CHUNK)
            self._synchronize()
            seconds = time.perf_counter() - started
            densities = [layer["density"] for layer in stats(self.model, reset=True)]
        scores = compare_log_probs(log_probs, dense, reading)
        return {
            **{name: scores[name] for name in ("kl", "agree", "count")},
            "densities": densities,
            "pass_seconds": {step.method: seconds},
        }

    def document(self, step: Step) -> Document:
        """Return the document with keys for a step of RECALL or BORDER.

        The second half of the document repeats its keys. For BORDER, each repeat starts a query
        block. The number of keys is `num_keys`, or fewer if they do not fit.
        """
        border = self.config.query_block if step.measure == BORDER else 1
        keys = num_keys(step.length, border)
        sentences, index = self.find_source(step.length, step.index)
        while True:
            try:
                return make_recall_document(
                    self.tokenizer,
                    sentences,
                    step.length,
                    keys=keys,
                    index=index,
                    seed=self.seed,
                    border=border,
                )
            except ValueError:
                # `KEY_TOKENS` is too small for this tokenizer: try fewer keys
                if keys == 1:
                    raise RuntimeError("no key fits into a document of this length") from None
                keys //= 2

    def recall(self, step: Step) -> dict[str, Any]:
        """Return ``right``: for each key of a document, True if the model predicts its repetition.

        ``pass_seconds`` are the seconds of the step, for estimates.
        """
        document = self.document(step)
        with self.attending(step):
            started = time.perf_counter()
            result = score_greedy_predictions(
                self.model, TeacherForced(document.tokens, document.answers)
            )
            self._synchronize()
            seconds = time.perf_counter() - started
        return {**result, "pass_seconds": {step.method: seconds}}


def ranked_kernels(rows: Sequence[Row], length: int) -> list[str]:
    """Return the names of the `KERNELS_KEPT` fastest dense kernels, the fastest first.

    The times are those of the comparison at the length nearest to ``length``. Returns [] if no
    kernels were compared.
    """
    compared = select(rows, measure=KERNELS)
    if not compared:
        return []
    nearest = min(compared, key=lambda row: abs(row["length"] - length))
    return sorted(nearest["kernel_ms"], key=nearest["kernel_ms"].get)[:KERNELS_KEPT]


def unsupported(model: nn.Module) -> str | None:
    """Return the reason why no layer of ``model`` can attend sparsely; None if a layer can."""
    layers = list(attention_layers(model))
    if not layers:
        return "no attention layer that is known to be causal"
    if all(not getattr(module, "is_causal", True) for _, module in layers):
        return "attention that is not causal"
    return None


def _try_write(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, unless the operating system denies it."""
    try:
        path.write_text(text)
    except OSError:
        return
