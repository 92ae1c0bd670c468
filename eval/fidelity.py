"""Fidelity: how well a method preserves the predictions of dense attention, on any text.

Several methods read the same texts, at the same density or the same attention time. A model reads a
text with its answers once (teacher forcing), and the probes score the model's predictions of the
answers. Only the probe ``greedy`` generates tokens.

The probes ``continuation``, ``asked`` and ``turns`` and the tasks measure sparse prefill: the
method reads a prompt, and dense attention reads the following tokens through the KV cache.
``turns`` repeats this for every turn of a chat. The probes ``decode``, ``decode_asked`` and
``greedy`` measure sparse decoding: the method processes the following tokens one at a time.

A cell is (method, text, length, budget); a case is (cell, probe, depth, index). The attention time
of a cell is measured once, on a GPU or, with ``--equal time``, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.data.documents import asked_document, plain_document, recall_document
from cab_hf.data.needles import Span, Tokens
from cab_hf.data.tasks import TASKS
from cab_hf.eval import fidelity_figure, fidelity_report
from cab_hf.eval.attention_time import REPORTED, AttentionClock, layer_bench
from cab_hf.eval.experiment import Row
from cab_hf.eval.fidelity_report import CELL, attention_ms, cell_of, samples_for_density
from cab_hf.eval.fidelity_settings import (
    DENSITY,
    OFF,
    TIME,
    Settings,
    kind_of,
    without_folder,
)
from cab_hf.eval.haystack import Haystack, parse_depths, read_sentences
from cab_hf.eval.long_run import MATCH, LongRun
from cab_hf.eval.methods import CACHES, Cab, Dense, Method, logged_config
from cab_hf.eval.on_model import realised_density, refusing
from cab_hf.eval.probes import (
    CONTINUATION,
    CONTINUED,
    CONTINUED_SHARE,
    DECODE,
    DECODE_ASKED,
    DECODES,
    GREEDY,
    NAMED_KEYS,
    NOISE,
    PERPLEXITIES,
    PERPLEXITY,
    PROBES,
    PROMPTED,
    QUESTION_FIRST,
    RECALL_BORDER,
    RECALLS,
    TOKENS_AT_ONCE,
    TURN_COUNT,
    TURNS,
    WITH_KEYS_ASKED,
    border_of,
    question_of,
)
from cab_hf.eval.speed.timing import Bench
from cab_hf.eval.teacher_forcing import (
    TeacherForced,
    after_prompt,
    after_turns,
    answered,
    continued,
    distributions,
    divergence,
    divergence_by_turn,
    greedy_match,
    nll,
    right_spans,
)
from cab_hf.experiment.provenance import file_identity

# fields that a sample has in addition to its case
READ = ("tokens", "density", "sparse_density", "seconds")  # all probes except `TIME`
LIKELIHOOD = ("nll", "count")  # perplexities
DIVERGENCE = ("kl", "agree", *LIKELIHOOD)  # comparisons with the distributions of dense attention
TIMED = ("tokens", "predict_ms", "attend_ms", "dense_ms", "dense_kernel")  # `TIME`
# probe -> function that computes predictions, and function that compares them with dense attention
COMPARED = {
    CONTINUATION: (distributions, divergence),
    TURNS: (after_turns, divergence_by_turn),
}


def measured_of(sample: Row) -> list[str]:
    """Return the fields that a sample of `Fidelity` must have, by its probe."""
    probe = sample["probe"]
    if probe == TIME:
        return ["fitted", *TIMED]
    fields = ["fitted", *READ]
    if probe in (*COMPARED, DECODE):
        fields += DIVERGENCE
    elif probe in PERPLEXITIES:
        fields += LIKELIHOOD
    elif probe == GREEDY:
        fields.append("written")
    elif probe in PROBES:
        fields.append("right")
    if probe == TURNS:
        fields.append("turns")
    return fields + ["step_tokens"] * (probe in DECODES)


def turn_ends(length: int) -> tuple[Span, ...]:
    """Return the range of the predicted tokens at the end of each of `TURN_COUNT` equal turns.

    A range has `CONTINUED` tokens, but at most 1 / `CONTINUED_SHARE` of the tokens of a turn.
    """
    ends = [length * turn // TURN_COUNT for turn in range(TURN_COUNT + 1)]
    num_predicted = max(1, min(CONTINUED, length // TURN_COUNT // CONTINUED_SHARE))
    return tuple((end - num_predicted, end) for end in ends[1:])


def texts_per_batch(length: int) -> int:
    """Return the number of texts of ``length`` tokens that are decoded as one batch."""
    return max(1, TOKENS_AT_ONCE // length)


class Fidelity(LongRun):
    """The experiment that compares methods with dense attention.

    A case is one text that one method reads, and its sample contains the scores of the predictions.
    The sample of a case with the probe `TIME` contains the attention time of the cell instead.
    """

    name = "fidelity"
    purpose = "compare answers and perplexity with dense attention, on texts of your own"
    title = "Fidelity to dense attention"
    caption = "quality by attention time, or by density if no time was measured"
    Settings = Settings
    CELL, FITTED = CELL, "fitted"
    CASE = (*CELL, "probe", "depth", "index")
    # A later run may spell ``cab`` and ``variant`` differently: the configs that follow from them
    # are recorded as cab_configs, which must stay the same.
    GROWS = (
        *("methods", "budgets", "cab", "variant", "lengths", "probes"),
        *("pass_samples", "task_samples", "documents", "continuations"),
    )
    measured = staticmethod(measured_of)
    rows = staticmethod(fidelity_report.rows_of)
    tables = staticmethod(fidelity_report.tables_of)
    readings = staticmethod(fidelity_report.readings_of)
    draw = staticmethod(fidelity_figure.draw)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        readings_per_length = len(PROMPTED) * settings.pass_samples
        readings_per_length += len(PROBES) * settings.documents + settings.continuations
        readings_per_length += len(TASKS) * settings.task_samples
        # caches that all methods share
        self.haystack = cache(self._haystack)
        self.reading = lru_cache(readings_per_length)(self._reading)
        self.dense = lru_cache(3 * settings.documents)(self._dense)
        self.tokens_kept = cache(self._tokens_kept)
        # Consecutive cases are decoded as one batch. This cache contains the results of the latest
        # batch, for the remaining cases of the batch.
        self.decoded = lru_cache(1)(self._decoded)
        # cell -> the method fitted to a time; fitted once, because times vary
        self.timed: dict[tuple, Method] = {}

    def check(self) -> None:
        super().check()
        settings = self.settings
        probes = settings.probes
        for text, length in product(settings.files, settings.lengths):
            for probe in filter(PROMPTED.__contains__, probes):
                self.haystack(text, probe).check_room(length)
            asked = WITH_KEYS_ASKED if settings.asked else ()
            for probe in filter((*RECALLS, *asked).__contains__, probes):
                self.reading(text=text, length=length, probe=probe, depth=None, index=0)
        # build all samples of the tasks, because some samples may not fit into the shortest length
        for probe, index in product(probes, range(settings.task_samples)):
            if probe in TASKS:
                self.reading(
                    text=next(iter(settings.files)),
                    length=min(settings.lengths),
                    probe=probe,
                    depth=None,
                    index=index,
                )

    def recorded(self) -> dict[str, Any]:
        settings, recorded = self.settings, super().recorded()
        recorded["variant"] = list(map(without_folder, settings.variant))
        if settings.equal == DENSITY:
            # results of earlier versions have no setting ``equal``, and always matched densities
            del recorded["equal"]
        files = settings.files.values()
        recorded["texts"] = [NOISE if file is None else file_identity(file) for file in files]
        configs = {name: config.to_dict() for name, config in settings.configs.items()}
        return {**recorded, "cab_configs": configs}

    def running(self) -> dict[str, Sequence[str]]:
        files = filter(None, self.settings.files.values())
        return {Path(file).name: read_sentences("texts", file) for file in files}

    # --- texts

    def _haystack(self, text: str, probe: str) -> Haystack:
        """Return the `Haystack` that builds the prompts of a probe from a text."""
        file = self.settings.files[text]
        return Haystack(
            tokenizer=self.tokenizer,
            filler=NOISE if file is None else "text",
            keys=NAMED_KEYS.get(probe, 1),
            file=file,
            question_first=probe == QUESTION_FIRST,
        )

    def _reading(
        self,
        text: str,
        length: int,
        probe: str,
        depth: float | None,
        index: int,
        hide_needle: bool = False,
    ) -> TeacherForced:
        """Return the tokens that a case reads, and the ranges of tokens to predict.

        Args:
            text: name of the text.
            length: number of tokens to read, including the predicted tokens.
            probe: name of the probe.
            depth: depth of the key in a prompt, 0 to 1; None for probes that are not in `PROMPTED`.
            index: number of the sample.
            hide_needle: True to leave the keys out of a prompt.
        """
        settings = self.settings
        haystack = self.haystack(text, probe)
        if probe in PROMPTED:
            prompt = haystack.prompt(
                length=length,
                depth=depth,
                index=index,
                seed=settings.seed,
                hide_needle=hide_needle,
            )
            return answered(self.tokenizer, prompt)
        arguments = {
            "tokenizer": self.tokenizer,
            "sentences": haystack.sentences,
            "length": length,
            "index": index,
            "seed": settings.seed,
        }
        num_predicted = {
            CONTINUATION: CONTINUED,
            DECODE: settings.decoded,
            GREEDY: settings.written,
        }
        if probe in (TURNS, *num_predicted, *PERPLEXITIES):
            tokens = plain_document(**arguments)
            if probe == TURNS:
                return TeacherForced(tokens, turn_ends(length))
            if probe in num_predicted:
                prompt_length = length - max(
                    1, min(num_predicted[probe], length // CONTINUED_SHARE)
                )
                return TeacherForced(tokens, ((prompt_length, length),), prompt_length)
            if probe == PERPLEXITY:
                return TeacherForced(tokens, ((length // 2, length),))
            border = settings.border
            starts = range(-(-length // 2 // border) * border, length, border)
            return TeacherForced(tokens, tuple((start, start + 1) for start in starts))
        with refusing("lengths"):
            return self._question_reading(probe, arguments)

    def _question_reading(self, probe: str, arguments: Mapping[str, Any]) -> TeacherForced:
        """Return tokens and answers of an example of a task, or of a document with keys.

        Args:
            probe: a task, a probe of `WITH_KEYS_ASKED` or a probe of `RECALLS`.
            arguments: the arguments that all builders of documents have: tokenizer, sentences,
                length, index and seed.
        """
        settings = self.settings
        if probe in TASKS:
            example = TASKS[probe].make(**arguments)
            return TeacherForced(example.tokens, example.answers, example.prompt)
        if probe in WITH_KEYS_ASKED:
            document, prompt = asked_document(**arguments, keys=settings.asked)
            return TeacherForced(document.tokens, document.answers, prompt)
        border = settings.border if probe == RECALL_BORDER else 1
        document = recall_document(**arguments, keys=settings.keys, border=border)
        return TeacherForced(document.tokens, document.answers)

    def typical(self, text_key: tuple[str, int]) -> Tokens:
        text, length = text_key
        reading = self.reading(text=text, length=length, probe=PERPLEXITY, depth=None, index=0)
        return reading.tokens

    # --- cases

    def questions(self, method: str) -> list[dict[str, Any]]:
        """Return probe, depth and index of all cases of a method on one text and length."""
        settings = self.settings
        depths = parse_depths(str(settings.depths))
        prompts = [
            {"depth": depths[i % len(depths)], "index": i // len(depths)}
            for i in range(settings.pass_samples)
        ]
        documents, continuations, examples = (
            [{"depth": None, "index": index} for index in range(count)]
            for count in (settings.documents, settings.continuations, settings.task_samples)
        )
        samples_by_probe = dict.fromkeys(PROMPTED, prompts) | dict.fromkeys(TASKS, examples)
        samples_by_probe[GREEDY] = continuations
        # The control without a needle answers only prompts: documents have no needle to leave out.
        hides_needle = kind_of(method).hides_needle
        # a method with dense prefill differs from dense only in its decode steps
        has_dense_prefill = kind_of(method).dense_prefill
        supported_probes = DECODES if has_dense_prefill else PROBES
        if not settings.asked:
            supported_probes = [probe for probe in supported_probes if probe not in WITH_KEYS_ASKED]
        questions = [
            {"probe": probe, **sample}
            for probe in settings.probes
            if probe in supported_probes and (probe in PROMPTED or not hides_needle)
            for sample in samples_by_probe.get(probe, documents)
        ]
        if self.clock is not None and not hides_needle and not has_dense_prefill:
            questions.append({"probe": TIME, "depth": None, "index": 0})
        return questions

    def question(self, case: Mapping[str, Any]) -> tuple[Any, ...]:
        *fields, index = question_of(case)
        batch_size = texts_per_batch(case["length"]) if case["probe"] in DECODES else 1
        return *fields, index // batch_size

    def planned(self) -> Iterator[dict[str, Any]]:
        """Yield the cases of all methods for one question before the cases of the next question.

        A run that is stopped has therefore asked all methods the same questions. The predictions of
        dense attention are computed once per question. Cases with the budget `MATCH` come last,
        because the budget follows from all samples of the method of ``--match``.
        """
        settings = self.settings
        matched = [name for name in settings.compared if kind_of(name).matched]
        methods_with_budgets = [(name, None) for name in settings.compared if name not in matched]
        methods_with_budgets += [
            (name, budget) for budget, name in product(settings.budgets, matched)
        ]
        for text, length in product(settings.files, settings.lengths):
            cases_by_question: dict[tuple, list[dict[str, Any]]] = {}
            for method, budget in methods_with_budgets:
                cell = {"method": method, "text": text, "length": length, "budget": budget}
                for question in self.questions(method):
                    case = {**cell, **question}
                    cases_by_question.setdefault(self.question(case), []).append(case)
            yield from sorted(chain.from_iterable(cases_by_question.values()), key=self.waits)

    def alone(self, case: Mapping[str, Any]) -> bool:
        # A method is fitted to a time once per cell, because times vary. One process must therefore
        # measure all cases of the cell.
        return case["probe"] == TIME or self.by_time(case)

    def waits(self, case: Mapping[str, Any]) -> bool:
        return case["budget"] == MATCH

    def by_time(self, case: Mapping[str, Any]) -> bool:
        """Return True if the budget of the case is the attention time of the ``--match`` method."""
        return self.settings.equal == TIME and self.waits(case)

    def fitted(self, case: Mapping[str, Any], samples: Sequence[Row]) -> float | None:
        """Return the budget of a case.

        The budget is a density in layers that are not dense, or the milliseconds of attention if
        `by_time` is True. Returns None for methods without a budget, or while samples of the method
        of ``--match`` are missing. If ``samples`` contain a config that an earlier run fitted to
        the cell by time, the call also adds the method with this config to `timed`.
        """
        for sample in samples:
            if cell_of(sample) == cell_of(case) and "fitted_config" in sample:
                config = logged_config(sample["fitted_config"])
                self.timed[cell_of(case)] = kind_of(case["method"])(config)
        if not self.waits(case):
            return case["budget"]
        matched_cell = (self.settings.match, case["text"], case["length"], None)
        matched_samples = [sample for sample in samples if cell_of(sample) == matched_cell]
        if self.by_time(case):
            return next((attention_ms(s) for s in matched_samples if s["probe"] == TIME), None)
        return realised_density(samples_for_density(matched_samples))

    # --- methods and their budgets

    @cached_property
    def clock(self) -> AttentionClock | None:
        """The clock for attention in all layers of the model; None if the run measures no times."""
        device = self.settings.device
        bench = layer_bench(device)
        if bench is None and self.settings.equal == TIME:
            # the user asked for times on a CPU
            bench = Bench(device)
        return None if bench is None else AttentionClock(bench)

    def _tokens_kept(self, length: int, budget: str | float) -> int:
        """Return the number of cached tokens that a method with ``budget`` keeps.

        With the budget `MATCH`, a decode step over these tokens reads as many bytes of the cache as
        a decode step with the config of the ``--match`` method.
        """
        if budget != MATCH:
            return max(2, round(budget * length))
        matched = Cab(self.settings.configs[self.settings.match])
        return round(matched.step_tokens(self.model, length))

    def method(self, case: Mapping[str, Any]) -> Method:
        """Return the method of a case with parameters that realise the budget of the case.

        Baselines use the block sizes and the engine in the config of the ``--match`` method.
        """
        settings, name = self.settings, case["method"]
        text_key = (case["text"], case["length"])
        if name in CACHES and case["probe"] in DECODES:
            return CACHES[name](self.tokens_kept(case["length"], case["budget"]))
        if cell_of(case) in self.timed:
            return self.timed[cell_of(case)]
        config = settings.configs.get(name, settings.configs[settings.match])
        if not self.by_time(case):
            return self.fit(kind_of(name), config, case, text_key)
        clock, model, tokens = self.clock, self.model, self.typical(text_key)

        def took(config: CabConfig) -> float:
            return attention_ms(clock.time(model, tokens, config))

        method = self.fit(kind_of(name), config, case, text_key, took=took)
        self.timed[cell_of(case)] = method
        return method

    # --- samples

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores of the predictions, or the attention time of the cell."""
        if case["probe"] in DECODES:
            row_in_batch = case["index"] % texts_per_batch(case["length"])
            first = {**case, "index": case["index"] - row_in_batch}
            return self.decoded(tuple(first.items()))[row_in_batch]
        was_fitted = cell_of(case) in self.timed
        method = self.method(case)
        is_timed = cell_of(case) in self.timed
        fit = {"fitted_config": method.config.to_dict()} if is_timed and not was_fitted else {}
        if case["probe"] == TIME:
            tokens = self.typical((case["text"], case["length"]))
            with refusing("model"):
                result = self.clock.time(self.model, tokens, getattr(method, "config", None))
            if is_timed:
                result["match_ms"] = case["fitted"]
        else:
            names = ("text", "length", "probe", "depth", "index")
            question = {name: case[name] for name in names}
            reading = self.reading(**question, hide_needle=method.hides_needle)
            tokens = reading.tokens
            # compute the dense predictions before the method is active
            if case["probe"] in COMPARED:
                self.dense_of(case)
            result = self.measure_under(method, lambda: self.read(case, reading, method))
        return {"tokens": len(tokens), **result, **fit}

    def _dense(self, text: str, length: int, probe: str, indices: range) -> Tensor:
        """Return the predictions of dense attention, a tensor on the CPU.

        Args:
            text: name of the text.
            length: tokens of each document.
            probe: `DECODE` or a key of `COMPARED`.
            indices: indices of the documents. The probe `DECODE` reads all these documents as one
                batch; other probes read only the first document.

        Returns:
            Logits [B, tokens, vocabulary] for `DECODE`, or else the result of the function in
            `COMPARED`.
        """
        if probe == DECODE:
            _, ids, prompt = self._batch(text, length, probe, indices)
            return after_prompt(self.model, ids, prompt).cpu()
        compute, _ = COMPARED[probe]
        reading = self.reading(text=text, length=length, probe=probe, depth=None, index=indices[0])
        return compute(self.model, reading, chunk=self.settings.chunk).cpu()

    def dense_of(self, case: Mapping[str, Any]) -> Tensor:
        """Return the cached predictions of dense attention for one case."""
        indices = range(case["index"], case["index"] + 1)
        return self.dense(case["text"], case["length"], case["probe"], indices)

    def read(
        self, case: Mapping[str, Any], reading: TeacherForced, method: Method
    ) -> dict[str, Any]:
        """Return the scores of the model's predictions of ``reading``; ``method`` is active."""
        probe, settings = case["probe"], self.settings
        # CAB needs no special cache: in these probes, tokens after a prompt attend to all keys
        cache = None if type(method) is Cab else method.cache(self.model)
        options = {"chunk": settings.chunk, "cache": cache, "prefill_chunk": settings.prefill_chunk}
        if probe in COMPARED:
            compute, compare = COMPARED[probe]
            dense = self.dense_of(case)
            # dense attention is the reference: reuse its predictions, so that its divergence is 0
            is_reference = case["method"] == Dense.name
            predictions = dense if is_reference else compute(self.model, reading, **options)
            return compare(predictions, dense, reading)
        if probe in PERPLEXITIES:
            return nll(self.model, reading)
        return greedy_match(self.model, reading, **options)

    def _decoded(self, first: tuple) -> list[dict[str, Any]]:
        """Decode a batch of cases of one method, and return the measured fields of each case.

        Args:
            first: the first case of the batch, as a tuple of (field, value) pairs, which is
                hashable. The following cases have consecutive ``index``.
        """
        case, settings = dict(first), self.settings
        text, length, probe = (case[name] for name in ("text", "length", "probe"))
        count = settings.continuations if probe == GREEDY else settings.documents
        indices = range(case["index"], min(case["index"] + texts_per_batch(length), count))
        readings, ids, prompt = self._batch(text, length, probe, indices)
        method = self.method(case)
        # compute the dense predictions before the method is active
        dense = self.dense(text, length, DECODE, indices) if probe == DECODE else None
        step_tokens = method.step_tokens(self.model, length)

        def read() -> dict[str, Any]:
            options = {
                "cache": method.cache(self.model),
                "stepping": method.stepping,
                "prefill_chunk": settings.prefill_chunk,
            }
            if probe == GREEDY:
                written = continued(self.model, ids[:, :prompt], length - prompt, **options)
                return {"cases": [{"written": tokens} for tokens in written.tolist()]}
            # dense attention is the reference: its divergence from itself is exactly 0
            is_reference = probe == DECODE and case["method"] == Dense.name
            logits = dense if is_reference else after_prompt(self.model, ids, prompt, **options)
            if probe == DECODE_ASKED:
                # row 0 of the logits predicts the first token after the prompt
                return {
                    "cases": [
                        right_spans(row[torch.tensor(reading.positions) - prompt], reading)
                        for row, reading in zip(logits, readings, strict=True)
                    ]
                }
            log_probs = (row.float().log_softmax(-1) for row in logits)
            dense_log_probs = (row.float().log_softmax(-1) for row in dense.to(logits.device))
            return {"cases": list(map(divergence, log_probs, dense_log_probs, readings))}

        result = self.measure_under(method, read)
        cases = result.pop("cases")
        result |= {"tokens": length, "step_tokens": step_tokens}
        result["seconds"] = round(result["seconds"] / len(cases), 3)
        return [{**scores, **result} for scores in cases]

    def _batch(
        self, text: str, length: int, probe: str, indices: range
    ) -> tuple[list[TeacherForced], Tensor, int]:
        """Build the documents of a batch; arguments as in `_dense`.

        Returns:
            The documents as `TeacherForced`; their token ids, int [B, length]; and the number of
            tokens of the shortest prompt.
        """
        readings = [
            self.reading(text=text, length=length, probe=probe, depth=None, index=index)
            for index in indices
        ]
        ids = torch.tensor([reading.tokens for reading in readings], device=self.model.device)
        return readings, ids, min(reading.prompt for reading in readings)

    # --- report

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        chunk = settings.get("prefill_chunk")
        configs = settings["cab_configs"].values()
        border = border_of(config.get("query_block", 0) for config in configs)
        sentences = [f"Prompts are read in chunks of {chunk:,} tokens."] if chunk else []
        if settings.get("equal") == TIME:
            sentences.append(
                "Matched methods have the budget at which attention takes as long as that of "
                f"{settings['match']}, including block selection, within {OFF:.0%} if such a "
                "budget exists."
            )
        sentences.append(
            f"{NOTES} At block starts it does not: the answer there starts with the first of "
            f"{border} tokens that form whole query blocks."
        )
        return " ".join(sentences)


EXPERIMENT = Fidelity

NOTES = (
    "docs/evaluation.md (Words) explains the probes and the columns. Only continuations are "
    "generated: an answer is right if each of its tokens is the likeliest one after the tokens "
    f"before it. After a prompt, {CONTINUED} tokens of the same text are read (at most an eighth "
    "of it) by exact attention, except by methods that have dropped keys for good. Shares have "
    "Wilson's interval. Differences to dense have Newcombe's interval (over keys; those of one "
    "text count as independent). Ratios of perplexity are the geometric mean over documents with "
    "Student's interval, and KL is the mean; all intervals are 95 %. ms: by CUDA "
    "events, on the q, k and v of one text of the cell under dense attention; time / dense: "
    "divided by the fastest dense kernel on the same inputs. After ~, block selection is not "
    "measured: its time is the share of dense attention that Xu et al. 2025 report, "
    f"{', '.join(f'{x:.3f} for {name}' for name, x in REPORTED.items() if x)}, and 0 for "
    f"{', '.join(name for name, x in REPORTED.items() if not x)}. Elsewhere it is measured, in "
    "older results in plain PyTorch too. Query blocks select keys as a whole, so the keys of an "
    "answer's first token may depend on all later tokens in the block."
)
