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
from cab_hf.data.documents import make_asked_document, make_plain_document, make_recall_document
from cab_hf.data.needles import Span, Tokens
from cab_hf.data.tasks import TASKS
from cab_hf.eval import fidelity_figure, fidelity_report
from cab_hf.eval.attention_time import REPORTED_SELECTION_SHARES, AttentionClock, make_layer_bench
from cab_hf.eval.experiment import Row
from cab_hf.eval.fidelity_report import (
    CELL_FIELDS,
    get_attention_ms,
    get_cell_key,
    select_density_samples,
)
from cab_hf.eval.fidelity_settings import (
    DENSITY,
    MATCH_TOLERANCE,
    TIME,
    Settings,
    find_method_class,
    format_recorded_variant,
)
from cab_hf.eval.haystack import Haystack, parse_depths, read_sentences
from cab_hf.eval.long_run import MATCH_BUDGET, LongRun
from cab_hf.eval.methods import CACHES, Cab, Dense, Method, logged_config
from cab_hf.eval.on_model import average_sparse_density, convert_value_errors
from cab_hf.eval.probes import (
    ASKED_KEY_PROBES,
    CONTINUATION,
    CONTINUATION_DIVISOR,
    DECODE,
    DECODE_ASKED,
    DECODE_PROBES,
    GREEDY,
    MAX_BATCH_TOKENS,
    MAX_CONTINUATION_TOKENS,
    NOISE_TEXT_NAME,
    NUM_KEYS_BY_PROBE,
    NUM_TURNS,
    PASSKEY_PROBES,
    PERPLEXITY,
    PERPLEXITY_PROBES,
    PROBES,
    QUESTION_FIRST,
    RECALL_BORDER,
    RECALL_PROBES,
    TURNS,
    find_border,
    get_question,
)
from cab_hf.eval.speed.timing import Bench
from cab_hf.eval.teacher_forcing import (
    Reading,
    append_key,
    compare_log_probs,
    compare_turns,
    compute_nll,
    generate_greedily,
    predict_after_prompt,
    predict_log_probs,
    predict_turns,
    score_greedy_predictions,
    score_spans,
)
from cab_hf.experiment.provenance import file_identity

# fields that a sample has in addition to its case
READING_FIELDS = ("tokens", "density", "sparse_density", "seconds")  # all probes except `TIME`
LIKELIHOOD_FIELDS = ("nll", "count")  # perplexities
# comparisons with the distributions of dense attention
DIVERGENCE_FIELDS = ("kl", "agree", *LIKELIHOOD_FIELDS)
TIMED_FIELDS = ("tokens", "predict_ms", "attend_ms", "dense_ms", "dense_kernel")  # `TIME`
# probe -> function that computes predictions, and function that compares them with dense attention
FUNCTIONS_BY_PROBE = {
    CONTINUATION: (predict_log_probs, compare_log_probs),
    TURNS: (predict_turns, compare_turns),
}


def list_measured_fields(sample: Row) -> list[str]:
    """Return the fields that a sample of `Fidelity` must have, by its probe."""
    probe = sample["probe"]
    if probe == TIME:
        return ["fitted", *TIMED_FIELDS]
    fields = ["fitted", *READING_FIELDS]
    if probe in (*FUNCTIONS_BY_PROBE, DECODE):
        fields += DIVERGENCE_FIELDS
    elif probe in PERPLEXITY_PROBES:
        fields += LIKELIHOOD_FIELDS
    elif probe == GREEDY:
        fields.append("written")
    elif probe in PROBES:
        fields.append("right")
    if probe == TURNS:
        fields.append("turns")
    return fields + ["step_tokens"] * (probe in DECODE_PROBES)


def find_turn_ends(length: int) -> tuple[Span, ...]:
    """Return the range of the predicted tokens at the end of each of `NUM_TURNS` equal turns.

    A range has `MAX_CONTINUATION_TOKENS` tokens, but at most 1 / `CONTINUATION_DIVISOR` of the
    tokens of a turn.
    """
    turn_borders = [length * turn // NUM_TURNS for turn in range(NUM_TURNS + 1)]
    num_predicted = max(
        1, min(MAX_CONTINUATION_TOKENS, length // NUM_TURNS // CONTINUATION_DIVISOR)
    )
    return tuple((end - num_predicted, end) for end in turn_borders[1:])


def count_texts_per_batch(length: int) -> int:
    """Return the number of texts of ``length`` tokens that are decoded as one batch."""
    return max(1, MAX_BATCH_TOKENS // length)


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
    CELL_FIELDS, BUDGET_FIELD = CELL_FIELDS, "fitted"
    CASE_FIELDS = (*CELL_FIELDS, "probe", "depth", "index")
    # A later run may spell ``cab`` and ``variant`` differently: the configs that follow from them
    # are recorded as cab_configs, which must stay the same.
    EXTENSIBLE_SETTINGS = (
        *("methods", "budgets", "cab", "variant", "lengths", "probes"),
        *("pass_samples", "task_samples", "documents", "continuations"),
    )
    measured_fields = staticmethod(list_measured_fields)
    rows = staticmethod(fidelity_report.make_rows)
    tables = staticmethod(fidelity_report.make_tables)
    summary_sentences = staticmethod(fidelity_report.make_sentences)
    draw = staticmethod(fidelity_figure.draw_figure)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        num_sequences = len(PASSKEY_PROBES) * settings.pass_samples
        num_sequences += len(PROBES) * settings.documents + settings.continuations
        num_sequences += len(TASKS) * settings.task_samples
        # caches that all methods share
        self.make_haystack = cache(self._make_haystack)
        self.make_reading = lru_cache(num_sequences)(self._make_reading)
        self.compute_dense_predictions = lru_cache(3 * settings.documents)(
            self._compute_dense_predictions
        )
        self.count_kept_tokens = cache(self._count_kept_tokens)
        # Consecutive cases are decoded as one batch. This cache contains the results of the latest
        # batch, for the remaining cases of the batch.
        self.decode_batch = lru_cache(1)(self._decode_batch)
        # cell -> the method fitted to a time; fitted once, because times vary
        self.method_by_timed_cell: dict[tuple, Method] = {}

    def check_settings(self) -> None:
        super().check_settings()
        settings = self.settings
        probes = settings.probes
        for text, length in product(settings.file_by_text, settings.lengths):
            for probe in filter(PASSKEY_PROBES.__contains__, probes):
                self.make_haystack(text, probe).check_length(length)
            asked_probes = ASKED_KEY_PROBES if settings.asked else ()
            for probe in filter((*RECALL_PROBES, *asked_probes).__contains__, probes):
                self.make_reading(text=text, length=length, probe=probe, depth=None, index=0)
        # build all samples of the tasks, because some samples may not fit into the shortest length
        for probe, index in product(probes, range(settings.task_samples)):
            if probe in TASKS:
                self.make_reading(
                    text=next(iter(settings.file_by_text)),
                    length=min(settings.lengths),
                    probe=probe,
                    depth=None,
                    index=index,
                )

    def recorded_settings(self) -> dict[str, Any]:
        settings, recorded_settings = self.settings, super().recorded_settings()
        recorded_settings["variant"] = list(map(format_recorded_variant, settings.variant))
        if settings.equal == DENSITY:
            # results of earlier versions have no setting ``equal``, and always matched densities
            del recorded_settings["equal"]
        files = settings.file_by_text.values()
        recorded_settings["texts"] = [
            NOISE_TEXT_NAME if file is None else file_identity(file) for file in files
        ]
        configs = {name: config.to_dict() for name, config in settings.configs.items()}
        return {**recorded_settings, "cab_configs": configs}

    def sentences_by_file(self) -> dict[str, Sequence[str]]:
        files = filter(None, self.settings.file_by_text.values())
        return {Path(file).name: read_sentences("texts", file) for file in files}

    def _make_haystack(self, text: str, probe: str) -> Haystack:
        """Return the `Haystack` that builds the prompts of a probe from a text."""
        file = self.settings.file_by_text[text]
        return Haystack(
            tokenizer=self.tokenizer,
            filler=NOISE_TEXT_NAME if file is None else "text",
            num_keys=NUM_KEYS_BY_PROBE.get(probe, 1),
            file=file,
            question_first=probe == QUESTION_FIRST,
        )

    def _make_reading(
        self,
        text: str,
        length: int,
        probe: str,
        depth: float | None,
        index: int,
        hide_needle: bool = False,
    ) -> Reading:
        """Return the tokens that a case reads, and the ranges of tokens to predict.

        Args:
            text: name of the text.
            length: number of tokens to read, including the predicted tokens.
            probe: name of the probe.
            depth: depth of the key in a prompt, 0 to 1; None for probes that are not in
                `PASSKEY_PROBES`.
            index: number of the sample.
            hide_needle: True to leave the keys out of a prompt.
        """
        settings = self.settings
        haystack = self.make_haystack(text, probe)
        if probe in PASSKEY_PROBES:
            prompt = haystack.make_prompt(
                length=length,
                depth=depth,
                index=index,
                seed=settings.seed,
                hide_needle=hide_needle,
            )
            return append_key(self.tokenizer, prompt)
        document_arguments = {
            "tokenizer": self.tokenizer,
            "sentences": haystack.sentences,
            "length": length,
            "index": index,
            "seed": settings.seed,
        }
        num_predicted_by_probe = {
            CONTINUATION: MAX_CONTINUATION_TOKENS,
            DECODE: settings.decoded,
            GREEDY: settings.written,
        }
        if probe in (TURNS, *num_predicted_by_probe, *PERPLEXITY_PROBES):
            tokens = make_plain_document(**document_arguments)
            if probe == TURNS:
                return Reading(tokens, find_turn_ends(length))
            if probe in num_predicted_by_probe:
                prompt_length = length - max(
                    1, min(num_predicted_by_probe[probe], length // CONTINUATION_DIVISOR)
                )
                return Reading(tokens, ((prompt_length, length),), prompt_length)
            if probe == PERPLEXITY:
                return Reading(tokens, ((length // 2, length),))
            border_interval = settings.border_interval_tokens
            block_starts = range(
                -(-length // 2 // border_interval) * border_interval, length, border_interval
            )
            return Reading(tokens, tuple((start, start + 1) for start in block_starts))
        with convert_value_errors("lengths"):
            return self._make_question_reading(probe, document_arguments)

    def _make_question_reading(self, probe: str, document_arguments: Mapping[str, Any]) -> Reading:
        """Return tokens and answers of an example of a task, or of a document with keys.

        Args:
            probe: a task, a probe of `ASKED_KEY_PROBES` or a probe of `RECALL_PROBES`.
            document_arguments: the arguments that all builders of documents have: tokenizer,
                sentences, length, index and seed.
        """
        settings = self.settings
        if probe in TASKS:
            example = TASKS[probe].make(**document_arguments)
            return Reading(example.tokens, example.answers, example.prompt)
        if probe in ASKED_KEY_PROBES:
            document, prompt_length = make_asked_document(
                **document_arguments, num_keys=settings.asked
            )
            return Reading(document.tokens, document.answers, prompt_length)
        border_interval = settings.border_interval_tokens if probe == RECALL_BORDER else 1
        document = make_recall_document(
            **document_arguments, num_keys=settings.keys, answer_alignment=border_interval
        )
        return Reading(document.tokens, document.answers)

    def get_fitting_tokens(self, text_key: tuple[str, int]) -> Tokens:
        text, length = text_key
        reading = self.make_reading(text=text, length=length, probe=PERPLEXITY, depth=None, index=0)
        return reading.tokens

    def list_questions(self, method: str) -> list[dict[str, Any]]:
        """Return probe, depth and index of all cases of a method on one text and length."""
        settings = self.settings
        depths = parse_depths(str(settings.depths))
        prompt_samples = [
            {"depth": depths[i % len(depths)], "index": i // len(depths)}
            for i in range(settings.pass_samples)
        ]
        document_samples, continuation_samples, task_samples = (
            [{"depth": None, "index": index} for index in range(num_samples)]
            for num_samples in (settings.documents, settings.continuations, settings.task_samples)
        )
        samples_by_probe = dict.fromkeys(PASSKEY_PROBES, prompt_samples) | dict.fromkeys(
            TASKS, task_samples
        )
        samples_by_probe[GREEDY] = continuation_samples
        # The control without a needle answers only prompts: documents have no needle to leave out.
        hides_needle = find_method_class(method).hides_needle
        # a method with dense prefill differs from dense only in its decode steps
        has_dense_prefill = find_method_class(method).has_dense_prefill
        supported_probes = DECODE_PROBES if has_dense_prefill else PROBES
        if not settings.asked:
            supported_probes = [
                probe for probe in supported_probes if probe not in ASKED_KEY_PROBES
            ]
        questions = [
            {"probe": probe, **sample}
            for probe in settings.probes
            if probe in supported_probes and (probe in PASSKEY_PROBES or not hides_needle)
            for sample in samples_by_probe.get(probe, document_samples)
        ]
        if self.attention_clock is not None and not hides_needle and not has_dense_prefill:
            questions.append({"probe": TIME, "depth": None, "index": 0})
        return questions

    def get_question_key(self, case: Mapping[str, Any]) -> tuple[Any, ...]:
        *fields, index = get_question(case)
        batch_size = count_texts_per_batch(case["length"]) if case["probe"] in DECODE_PROBES else 1
        return *fields, index // batch_size

    def list_planned_cases(self) -> Iterator[dict[str, Any]]:
        """Yield the cases of all methods for one question before the cases of the next question.

        A run that is stopped has therefore asked all methods the same questions. The predictions of
        dense attention are computed once per question. Cases with the budget `MATCH_BUDGET` come
        last, because the budget follows from all samples of the method of ``--match``.
        """
        settings = self.settings
        matched_methods = [
            name for name in settings.compared_methods if find_method_class(name).is_budget_matched
        ]
        methods_with_budgets = [
            (name, None) for name in settings.compared_methods if name not in matched_methods
        ]
        methods_with_budgets += [
            (name, budget) for budget, name in product(settings.budgets, matched_methods)
        ]
        for text, length in product(settings.file_by_text, settings.lengths):
            cases_by_question: dict[tuple, list[dict[str, Any]]] = {}
            for method, budget in methods_with_budgets:
                cell = {"method": method, "text": text, "length": length, "budget": budget}
                for question in self.list_questions(method):
                    case = {**cell, **question}
                    cases_by_question.setdefault(self.get_question_key(case), []).append(case)
            yield from sorted(
                chain.from_iterable(cases_by_question.values()), key=self.needs_other_samples
            )

    def must_run_alone(self, case: Mapping[str, Any]) -> bool:
        # A cell (`get_cell_key`) consists of all cases with equal method, text, length and budget.
        # A method is fitted to a time once per cell, because times vary. One process must therefore
        # measure all cases of the cell.
        return case["probe"] == TIME or self.is_matched_by_time(case)

    def needs_other_samples(self, case: Mapping[str, Any]) -> bool:
        return case["budget"] == MATCH_BUDGET

    def is_matched_by_time(self, case: Mapping[str, Any]) -> bool:
        """Return True if the budget of the case is the attention time of the ``--match`` method."""
        return self.settings.equal == TIME and self.needs_other_samples(case)

    def find_budget(self, case: Mapping[str, Any], samples: Sequence[Row]) -> float | None:
        """Return the budget of a case.

        The budget is a density in layers that are not dense, or the milliseconds of attention if
        `is_matched_by_time` is True. Returns None for methods without a budget, or while samples of
        the method of ``--match`` are missing.

        An earlier run may have logged the config with which a method has the attention time of the
        ``--match`` method. If ``samples`` contain such a config for the cell of the case
        (`get_cell_key`), the call also adds the method with this config to `method_by_timed_cell`.
        """
        for sample in samples:
            if get_cell_key(sample) == get_cell_key(case) and "fitted_config" in sample:
                config = logged_config(sample["fitted_config"])
                self.method_by_timed_cell[get_cell_key(case)] = find_method_class(case["method"])(
                    config
                )
        if not self.needs_other_samples(case):
            return case["budget"]
        matched_cell = (self.settings.match, case["text"], case["length"], None)
        matched_samples = [sample for sample in samples if get_cell_key(sample) == matched_cell]
        if self.is_matched_by_time(case):
            return next((get_attention_ms(s) for s in matched_samples if s["probe"] == TIME), None)
        return average_sparse_density(select_density_samples(matched_samples))

    @cached_property
    def attention_clock(self) -> AttentionClock | None:
        """The clock for attention in all layers of the model; None if the run measures no times."""
        device = self.settings.device
        bench = make_layer_bench(device)
        if bench is None and self.settings.equal == TIME:
            # the user asked for times on a CPU
            bench = Bench(device)
        return None if bench is None else AttentionClock(bench)

    def _count_kept_tokens(self, length: int, budget: str | float) -> int:
        """Return the number of cached tokens that a method with ``budget`` keeps.

        With the budget `MATCH_BUDGET`, a decode step over these tokens reads as many bytes of the
        cache as a decode step with the config of the ``--match`` method.
        """
        if budget != MATCH_BUDGET:
            return max(2, round(budget * length))
        matched_method = Cab(self.settings.configs[self.settings.match])
        return round(matched_method.count_step_tokens(self.model, length))

    def make_method(self, case: Mapping[str, Any]) -> Method:
        """Return the method of a case with parameters that realise the budget of the case.

        Baselines use the block sizes and the engine in the config of the ``--match`` method.
        """
        settings, method_name = self.settings, case["method"]
        text_key = (case["text"], case["length"])
        if method_name in CACHES and case["probe"] in DECODE_PROBES:
            return CACHES[method_name](self.count_kept_tokens(case["length"], case["budget"]))
        if get_cell_key(case) in self.method_by_timed_cell:
            return self.method_by_timed_cell[get_cell_key(case)]
        config = settings.configs.get(method_name, settings.configs[settings.match])
        if not self.is_matched_by_time(case):
            return self.fit_method(find_method_class(method_name), config, case, text_key)
        attention_clock, model, tokens = (
            self.attention_clock,
            self.model,
            self.get_fitting_tokens(text_key),
        )

        def measure_ms(config: CabConfig) -> float:
            return get_attention_ms(attention_clock.time(model, tokens, config))

        method = self.fit_method(
            find_method_class(method_name), config, case, text_key, measure_time_ms=measure_ms
        )
        self.method_by_timed_cell[get_cell_key(case)] = method
        return method

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores of the predictions, or the attention time of the cell."""
        if case["probe"] in DECODE_PROBES:
            row_in_batch = case["index"] % count_texts_per_batch(case["length"])
            first_case = {**case, "index": case["index"] - row_in_batch}
            return self.decode_batch(tuple(first_case.items()))[row_in_batch]
        was_fitted = get_cell_key(case) in self.method_by_timed_cell
        method = self.make_method(case)
        is_timed = get_cell_key(case) in self.method_by_timed_cell
        fit_fields = (
            {"fitted_config": method.config.to_dict()} if is_timed and not was_fitted else {}
        )
        if case["probe"] == TIME:
            tokens = self.get_fitting_tokens((case["text"], case["length"]))
            with convert_value_errors("model"):
                result = self.attention_clock.time(
                    self.model, tokens, getattr(method, "config", None)
                )
            if is_timed:
                result["match_ms"] = case["fitted"]
        else:
            question_fields = ("text", "length", "probe", "depth", "index")
            question = {name: case[name] for name in question_fields}
            reading = self.make_reading(**question, hide_needle=method.hides_needle)
            tokens = reading.tokens
            # compute the dense predictions before the method is active
            if case["probe"] in FUNCTIONS_BY_PROBE:
                self.get_dense_predictions(case)
            result = self.measure_with(method, lambda: self.score_reading(case, reading, method))
        return {"tokens": len(tokens), **result, **fit_fields}

    def _compute_dense_predictions(
        self, text: str, length: int, probe: str, indices: range
    ) -> Tensor:
        """Return the predictions of dense attention, a tensor on the CPU.

        Args:
            text: name of the text.
            length: tokens of each document.
            probe: `DECODE` or a key of `FUNCTIONS_BY_PROBE`.
            indices: indices of the documents. The probe `DECODE` reads all these documents as one
                batch; other probes read only the first document.

        Returns:
            Logits [B, tokens, vocabulary] for `DECODE`, or else the result of the function in
            `FUNCTIONS_BY_PROBE`.
        """
        if probe == DECODE:
            _, ids, prompt_length = self._make_batch(text, length, probe, indices)
            return predict_after_prompt(self.model, ids, prompt_length).cpu()
        compute_predictions, _ = FUNCTIONS_BY_PROBE[probe]
        reading = self.make_reading(
            text=text, length=length, probe=probe, depth=None, index=indices[0]
        )
        return compute_predictions(
            self.model, reading, chunk=self.settings.dense_chunk_tokens
        ).cpu()

    def get_dense_predictions(self, case: Mapping[str, Any]) -> Tensor:
        """Return the cached predictions of dense attention for one case."""
        indices = range(case["index"], case["index"] + 1)
        return self.compute_dense_predictions(case["text"], case["length"], case["probe"], indices)

    def score_reading(
        self, case: Mapping[str, Any], reading: Reading, method: Method
    ) -> dict[str, Any]:
        """Return the scores of the model's predictions of ``reading``; ``method`` is active."""
        probe, settings = case["probe"], self.settings
        # CAB needs no special cache: in these probes, tokens after a prompt attend to all keys
        cache = None if type(method) is Cab else method.make_cache(self.model)
        prediction_options = {
            "chunk": settings.dense_chunk_tokens,
            "cache": cache,
            "prefill_chunk": settings.prefill_chunk,
        }
        if probe in FUNCTIONS_BY_PROBE:
            compute_predictions, score_predictions = FUNCTIONS_BY_PROBE[probe]
            dense_logits = self.get_dense_predictions(case)
            # dense attention is the reference: reuse its predictions, so that its divergence is 0
            is_reference = case["method"] == Dense.name
            predictions = (
                dense_logits
                if is_reference
                else compute_predictions(self.model, reading, **prediction_options)
            )
            return score_predictions(predictions, dense_logits, reading)
        if probe in PERPLEXITY_PROBES:
            return compute_nll(self.model, reading)
        return score_greedy_predictions(self.model, reading, **prediction_options)

    def _decode_batch(self, first_case_items: tuple) -> list[dict[str, Any]]:
        """Decode a batch of cases of one method, and return the measured fields of each case.

        Args:
            first_case_items: the first case of the batch, as a tuple of (field, value) pairs, which
                is hashable. The following cases have consecutive ``index``.
        """
        case, settings = dict(first_case_items), self.settings
        text, length, probe = (case[name] for name in ("text", "length", "probe"))
        num_samples = settings.continuations if probe == GREEDY else settings.documents
        indices = range(
            case["index"], min(case["index"] + count_texts_per_batch(length), num_samples)
        )
        readings, ids, prompt_length = self._make_batch(text, length, probe, indices)
        method = self.make_method(case)
        # compute the dense predictions before the method is active
        dense_logits = (
            self.compute_dense_predictions(text, length, DECODE, indices)
            if probe == DECODE
            else None
        )
        step_tokens = method.count_step_tokens(self.model, length)

        def decode_and_score() -> dict[str, Any]:
            prediction_options = {
                "cache": method.make_cache(self.model),
                "get_step_context": method.get_decode_context,
                "prefill_chunk": settings.prefill_chunk,
            }
            if probe == GREEDY:
                generated_ids = generate_greedily(
                    self.model, ids[:, :prompt_length], length - prompt_length, **prediction_options
                )
                return {"cases": [{"written": tokens} for tokens in generated_ids.tolist()]}
            # dense attention is the reference: its divergence from itself is exactly 0
            is_reference = probe == DECODE and case["method"] == Dense.name
            logits = (
                dense_logits
                if is_reference
                else predict_after_prompt(self.model, ids, prompt_length, **prediction_options)
            )
            if probe == DECODE_ASKED:
                # row 0 of the logits predicts the first token after the prompt
                return {
                    "cases": [
                        score_spans(
                            sequence_logits[
                                torch.tensor(reading.predicted_positions) - prompt_length
                            ],
                            reading,
                        )
                        for sequence_logits, reading in zip(logits, readings, strict=True)
                    ]
                }
            log_probs = (sequence_logits.float().log_softmax(-1) for sequence_logits in logits)
            dense_log_probs = (
                sequence_logits.float().log_softmax(-1)
                for sequence_logits in dense_logits.to(logits.device)
            )
            return {"cases": list(map(compare_log_probs, log_probs, dense_log_probs, readings))}

        result = self.measure_with(method, decode_and_score)
        case_scores = result.pop("cases")
        result |= {"tokens": length, "step_tokens": step_tokens}
        result["seconds"] = round(result["seconds"] / len(case_scores), 3)
        return [{**scores, **result} for scores in case_scores]

    def _make_batch(
        self, text: str, length: int, probe: str, indices: range
    ) -> tuple[list[Reading], Tensor, int]:
        """Build the documents of a batch; arguments as in `_compute_dense_predictions`.

        Returns:
            The documents as `Reading`; their token ids, int [B, length]; and the number of
            tokens of the shortest prompt.
        """
        readings = [
            self.make_reading(text=text, length=length, probe=probe, depth=None, index=index)
            for index in indices
        ]
        ids = torch.tensor([reading.tokens for reading in readings], device=self.model.device)
        return readings, ids, min(reading.prompt_length for reading in readings)

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        prefill_chunk = settings.get("prefill_chunk")
        configs = settings["cab_configs"].values()
        border_interval = find_border(config.get("query_block", 0) for config in configs)
        sentences = (
            [f"Prompts are read in chunks of {prefill_chunk:,} tokens."] if prefill_chunk else []
        )
        if settings.get("equal") == TIME:
            sentences.append(
                "Matched methods have the budget at which attention takes as long as that of "
                f"{settings['match']}, including block selection, within {MATCH_TOLERANCE:.0%} if "
                "such a budget exists."
            )
        sentences.append(
            f"{REPORT_NOTES} At block starts it does not: the answer there starts with the first "
            "of "
            f"{border_interval} tokens that form whole query blocks."
        )
        return " ".join(sentences)


EXPERIMENT = Fidelity

REPORT_NOTES = (
    "docs/evaluation.md (Words) explains the probes and the columns. Only continuations are "
    "generated: an answer is right if each of its tokens is the likeliest one after the tokens "
    f"before it. After a prompt, {MAX_CONTINUATION_TOKENS} tokens of the same text are read (at "
    "most an eighth of it) by exact attention, except by methods that have dropped keys for good. "
    "Shares have Wilson's interval. Differences to dense have Newcombe's interval (over keys; "
    "those of one text count as independent). Ratios of perplexity are the geometric mean over "
    "documents with Student's interval, and KL is the mean; all intervals are 95 %. ms: by CUDA "
    "events, on the q, k and v of one text of the cell under dense attention; time / dense: "
    "divided by the fastest dense kernel on the same inputs. After ~, block selection is not "
    "measured: its time is the share of dense attention that Xu et al. 2025 report, "
    f"{', '.join(f'{x:.3f} for {name}' for name, x in REPORTED_SELECTION_SHARES.items() if x)}, "
    "and 0 for "
    f"{', '.join(name for name, x in REPORTED_SELECTION_SHARES.items() if not x)}. Elsewhere it "
    "is measured, in older results in plain PyTorch too. Query blocks select keys as a whole, so "
    "the keys of an answer's first token may depend on all later tokens in the block."
)
