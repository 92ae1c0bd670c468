"""Fidelity: how well a method preserves the predictions of dense attention, on any text.

Several methods read the same texts, with budgets matched by density or by time. A model reads a
text with its answers once (teacher forcing), and the probes compare its predictions at the answers.
Continuations alone are generated.

Three probes and the tasks measure sparse prefill: the method reads a prompt, and dense attention
reads the following tokens through the KV cache. One of them does so turn after turn, as in a chat.
Three probes measure sparse decoding: the following tokens are read, or written, one at a time, as
the method decodes.

A cell is (method, text, length, budget); a case is (cell, probe, depth, index). The attention time
of a cell is measured once, on a device where times are meaningful.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cab_hf.data.documents import asked_document, plain_document, recall_document
from cab_hf.data.needles import Span, Tokens
from cab_hf.data.tasks import TASKS
from cab_hf.eval import fidelity_figure, fidelity_report
from cab_hf.eval.attention_time import REPORTED, AttentionClock, layer_bench
from cab_hf.eval.experiment import Row
from cab_hf.eval.fidelity_report import CELL, attention_ms, cell_of, usual
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
    answered,
    behind_turns,
    continued,
    distributions,
    divergence,
    divergence_by_turn,
    greedy_match,
    nll,
    right_spans,
)
from cab_hf.experiment.provenance import file_identity

# fields that a sample has in addition to its case: of any probe but time, and of some probes
READ = ("tokens", "density", "sparse_density", "seconds")
LIKELIHOOD = ("nll", "count")
DIVERGENCE = ("kl", "agree", *LIKELIHOOD)
TIMED = ("tokens", "predict_ms", "attend_ms", "dense_ms", "dense_kernel")
# probes that compare with predictions of dense attention: function and comparison
COMPARED = {
    CONTINUATION: (distributions, divergence),
    TURNS: (behind_turns, divergence_by_turn),
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
    """Return the ranges that end `TURN_COUNT` equal turns of a text, sized like `CONTINUED`."""
    ends = [length * turn // TURN_COUNT for turn in range(TURN_COUNT + 1)]
    read = max(1, min(CONTINUED, length // TURN_COUNT // CONTINUED_SHARE))
    return tuple((end - read, end) for end in ends[1:])


def at_once(length: int) -> int:
    """Return the number of texts of a length that are decoded as one batch."""
    return max(1, TOKENS_AT_ONCE // length)


class Fidelity(LongRun):
    """The experiment; a case is one text read under one method, a sample contains its predictions.

    The probe of a case is `TIME` if attention is timed.
    """

    name = "fidelity"
    purpose = "compare answers and perplexity with dense attention, on texts of your own"
    title = "Fidelity to dense attention"
    caption = "quality by attention time, or by density if no time was measured"
    Settings = Settings
    CELL, FITTED = CELL, "fitted"
    CASE = (*CELL, "probe", "depth", "index")
    # the configs of cab and variant are in cab_configs
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
        a_length = len(PROMPTED) * settings.pass_samples + len(PROBES) * settings.documents
        a_length += settings.continuations + len(TASKS) * settings.task_samples
        # shared by all methods
        self.haystack = cache(self._haystack)
        self.reading = lru_cache(a_length)(self._reading)
        self.dense = lru_cache(3 * settings.documents)(self._dense)
        self.tokens_kept = cache(self._tokens_kept)
        # consecutive cases that are decoded as one batch -> their results
        self.decoded = lru_cache(1)(self._decoded)
        # cell -> the method whose time is matched; fitted once, because times vary
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
                self.reading(text, length, probe, None, 0)
        # whether an example fits depends on its random draws
        for probe, index in product(probes, range(settings.task_samples)):
            if probe in TASKS:
                self.reading(next(iter(settings.files)), min(settings.lengths), probe, None, index)

    def recorded(self) -> dict[str, Any]:
        settings, recorded = self.settings, super().recorded()
        recorded["variant"] = list(map(without_folder, settings.variant))
        if settings.equal == DENSITY:
            # results of earlier versions lack this field
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
        """Return the maker of the prompts of a probe."""
        file = self.settings.files[text]
        filler, keys = NOISE if file is None else "text", NAMED_KEYS.get(probe, 1)
        return Haystack(self.tokenizer, filler, keys, file, probe == QUESTION_FIRST)

    def _reading(
        self,
        text: str,
        length: int,
        probe: str,
        depth: float | None,
        index: int,
        hide_needle: bool = False,
    ) -> TeacherForced:
        settings, tokenizer = self.settings, self.tokenizer
        haystack = self.haystack(text, probe)
        if probe in PROMPTED:
            prompt = haystack.prompt(length, depth, index, settings.seed, hide_needle)
            return answered(tokenizer, prompt)
        place = (tokenizer, haystack.sentences, length)
        behind = {CONTINUATION: CONTINUED, DECODE: settings.decoded, GREEDY: settings.written}
        if probe in (TURNS, *behind, *PERPLEXITIES):
            tokens = plain_document(*place, index, settings.seed)
            if probe == TURNS:
                return TeacherForced(tokens, turn_ends(length))
            if probe in behind:
                prompt = length - max(1, min(behind[probe], length // CONTINUED_SHARE))
                return TeacherForced(tokens, ((prompt, length),), prompt)
            if probe == PERPLEXITY:
                return TeacherForced(tokens, ((length // 2, length),))
            border = settings.border
            starts = range(-(-length // 2 // border) * border, length, border)
            return TeacherForced(tokens, tuple((at, at + 1) for at in starts))
        with refusing("lengths"):
            if probe in TASKS:
                example = TASKS[probe].make(*place, index, settings.seed)
                return TeacherForced(example.tokens, example.answers, example.prompt)
            if probe in WITH_KEYS_ASKED:
                document, prompt = asked_document(*place, settings.asked, index, settings.seed)
                return TeacherForced(document.tokens, document.answers, prompt)
            border = settings.border if probe == RECALL_BORDER else 1
            document = recall_document(*place, settings.keys, index, settings.seed, border)
        return TeacherForced(document.tokens, document.answers)

    def typical(self, text: str, length: int) -> Tokens:
        return self.reading(text, length, PERPLEXITY, None, 0).tokens

    # --- cases

    def questions(self, method: str) -> list[dict[str, Any]]:
        """Yield probe, depth and index of all questions to a method for a text and a length."""
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
        places = dict.fromkeys(PROMPTED, prompts) | dict.fromkeys(TASKS, examples)
        places[GREEDY] = continuations
        # a document has no needle to hide
        hidden = kind_of(method).hides_needle
        # a method with dense prefill differs from dense only in its decode steps
        supported_probes = DECODES if kind_of(method).dense_prefill else PROBES
        if not settings.asked:
            supported_probes = [probe for probe in supported_probes if probe not in WITH_KEYS_ASKED]
        results = [
            {"probe": probe, **place}
            for probe in settings.probes
            if probe in supported_probes and (probe in PROMPTED or not hidden)
            for place in places.get(probe, documents)
        ]
        if self.clock is not None and not hidden and not kind_of(method).dense_prefill:
            results.append({"probe": TIME, "depth": None, "index": 0})
        return results

    def question(self, case: Mapping[str, Any]) -> tuple[Any, ...]:
        *asked, index = question_of(case)
        together = at_once(case["length"]) if case["probe"] in DECODES else 1
        return *asked, index // together

    def planned(self) -> Iterator[dict[str, Any]]:
        """Yield all methods for a question before the next one, so that a stopped run is balanced.

        The results of dense attention are therefore computed once per question, too. Methods that
        match another method wait until it has answered all questions.
        """
        settings = self.settings
        matched = [name for name in settings.compared if kind_of(name).matched]
        arms = [(name, None) for name in settings.compared if name not in matched]
        arms += [(name, budget) for budget, name in product(settings.budgets, matched)]
        for text, length in product(settings.files, settings.lengths):
            cases_by_question: dict[tuple, list[dict[str, Any]]] = {}
            for method, budget in arms:
                cell = dict(zip(CELL, (method, text, length, budget), strict=True))
                for question in self.questions(method):
                    case = {**cell, **question}
                    cases_by_question.setdefault(self.question(case), []).append(case)
            yield from sorted(chain.from_iterable(cases_by_question.values()), key=self.waits)

    def alone(self, case: Mapping[str, Any]) -> bool:
        # a fit by time is logged once and applies to all cases of a cell
        return case["probe"] == TIME or self.by_time(case)

    def waits(self, case: Mapping[str, Any]) -> bool:
        return case["budget"] == MATCH

    def by_time(self, case: Mapping[str, Any]) -> bool:
        """Return True if the method matches a time."""
        return self.settings.equal == TIME and self.waits(case)

    def fitted(self, case: Mapping[str, Any], samples: Sequence[Row]) -> float | None:
        """Return the density in layers that are not dense, or ms.

        The value that an earlier run fitted to the cell by time, and logged, is used again.
        """
        for sample in samples:
            if cell_of(sample) == cell_of(case) and "fitted_config" in sample:
                config = logged_config(sample["fitted_config"])
                self.timed[cell_of(case)] = kind_of(case["method"])(config)
        if not self.waits(case):
            return case["budget"]
        ours = (self.settings.match, case["text"], case["length"], None)
        own = [sample for sample in samples if cell_of(sample) == ours]
        if self.by_time(case):
            return next((attention_ms(s) for s in own if s["probe"] == TIME), None)
        return realised_density(usual(own))

    # --- methods and their budgets

    @cached_property
    def clock(self) -> AttentionClock | None:
        """The clock of attention in a model's layers; None if times would be meaningless."""
        device = self.settings.device
        bench = layer_bench(device)
        if bench is None and self.settings.equal == TIME:
            # timing was requested explicitly
            bench = Bench(device)
        return None if bench is None else AttentionClock(bench)

    def _tokens_kept(self, length: int, budget: str | float) -> int:
        """Return the tokens whose bytes equal those that a step of the matched config reads."""
        if budget != MATCH:
            return max(2, round(budget * length))
        matched = Cab(self.settings.configs[self.settings.match])
        return round(matched.step_tokens(self.model, length))

    def method(self, case: Mapping[str, Any]) -> Method:
        """Return the method of a case; baselines use blocks and engine of the matched method."""
        settings, name, length = self.settings, case["method"], case["length"]
        if name in CACHES and case["probe"] in DECODES:
            return CACHES[name](self.tokens_kept(length, case["budget"]))
        if cell_of(case) in self.timed:
            return self.timed[cell_of(case)]
        config = settings.configs.get(name, settings.configs[settings.match])
        place, more = (case["text"], length), {}
        if self.by_time(case):
            clock, model, tokens = self.clock, self.model, self.typical(*place)
            more["took"] = lambda config: attention_ms(clock.time(model, tokens, config))
        method = self.fit(kind_of(name), config, case, *place, **more)
        if more:
            self.timed[cell_of(case)] = method
        return method

    # --- samples

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Return the predictions, or the time of attention."""
        if case["probe"] in DECODES:
            place = case["index"] % at_once(case["length"])
            first = {**case, "index": case["index"] - place}
            return self.decoded(tuple(first.items()))[place]
        new = cell_of(case) not in self.timed
        method = self.method(case)
        timed = cell_of(case) in self.timed
        logged = {"fitted_config": method.config.to_dict()} if new and timed else {}
        if case["probe"] == TIME:
            tokens = self.typical(case["text"], case["length"])
            with refusing("model"):
                result = self.clock.time(self.model, tokens, getattr(method, "config", None))
            if timed:
                result["match_ms"] = case["fitted"]
        else:
            reading = self.reading(*question_of(case), hide_needle=method.hides_needle)
            tokens = reading.tokens
            # before the method is switched on
            if case["probe"] in COMPARED:
                self.dense_of(case)
            result = self.under(method, lambda: self.read(case, reading, method))
        return {"tokens": len(tokens), **result, **logged}

    def _dense(self, text: str, length: int, probe: str, indices: range) -> Tensor:
        """Return the predictions of dense attention on the CPU; a resumed run recomputes them."""
        if probe == DECODE:
            _, *given = self._side_by_side(text, length, probe, indices)
            return after_prompt(self.model, *given).cpu()
        compute, _ = COMPARED[probe]
        reading = self.reading(text, length, probe, None, indices[0])
        return compute(self.model, reading, chunk=self.settings.chunk).cpu()

    def dense_of(self, case: Mapping[str, Any]) -> Tensor:
        """Return `dense` of a case that is read alone."""
        alone = range(case["index"], case["index"] + 1)
        return self.dense(case["text"], case["length"], case["probe"], alone)

    def read(
        self, case: Mapping[str, Any], reading: TeacherForced, method: Method
    ) -> dict[str, Any]:
        """Return the model's predictions of ``reading`` by the active method."""
        probe, settings = case["probe"], self.settings
        # CAB keeps all keys, and reads them all unless it decodes sparsely
        cache = None if type(method) is Cab else method.cache(self.model)
        how = {"chunk": settings.chunk, "cache": cache, "prefill_chunk": settings.prefill_chunk}
        if probe in COMPARED:
            compute, compare = COMPARED[probe]
            dense = self.dense_of(case)
            # dense attention is the reference, so it is compared with itself exactly
            itself = case["method"] == Dense.name
            return compare(dense if itself else compute(self.model, reading, **how), dense, reading)
        if probe in PERPLEXITIES:
            return nll(self.model, reading)
        return greedy_match(self.model, reading, **how)

    def _decoded(self, first: tuple) -> list[dict[str, Any]]:
        case, settings = dict(first), self.settings
        text, length, probe = (case[name] for name in ("text", "length", "probe"))
        count = settings.continuations if probe == GREEDY else settings.documents
        indices = range(case["index"], min(case["index"] + at_once(length), count))
        readings, ids, prompt = self._side_by_side(text, length, probe, indices)
        method = self.method(case)
        # before the method is switched on
        dense = self.dense(text, length, DECODE, indices) if probe == DECODE else None
        step_tokens = method.step_tokens(self.model, length)

        def read() -> dict[str, Any]:
            how = {"cache": method.cache(self.model), "stepping": method.stepping}
            how["prefill_chunk"] = settings.prefill_chunk
            if probe == GREEDY:
                written = continued(self.model, ids[:, :prompt], length - prompt, **how)
                return {"cases": [{"written": each} for each in written.tolist()]}
            # dense attention is the reference, so it is compared with itself exactly
            itself = probe == DECODE and case["method"] == Dense.name
            logits = dense if itself else after_prompt(self.model, ids, prompt, **how)
            if probe == DECODE_ASKED:
                given = zip(logits, readings, strict=True)
                # the first row belongs to the first token after the prompt
                return {
                    "cases": [right_spans(x[torch.tensor(r.places) - prompt], r) for x, r in given]
                }
            likely = (x.float().log_softmax(-1) for x in logits)
            base = (x.float().log_softmax(-1) for x in dense.to(logits.device))
            return {"cases": list(map(divergence, likely, base, readings))}

        result = self.under(method, read)
        cases = result.pop("cases")
        result |= {"tokens": length, "step_tokens": step_tokens}
        result["seconds"] = round(result["seconds"] / len(cases), 3)
        return [{**each, **result} for each in cases]

    def _side_by_side(
        self, text: str, length: int, probe: str, indices: range
    ) -> tuple[list[TeacherForced], Tensor, int]:
        """Return (readings, their tokens [B, length], the shortest prompt of them)."""
        readings = [self.reading(text, length, probe, None, index) for index in indices]
        ids = torch.tensor([reading.tokens for reading in readings], device=self.model.device)
        return readings, ids, min(reading.prompt for reading in readings)

    # --- words

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        chunk = settings.get("prefill_chunk")
        configs = settings["cab_configs"].values()
        border = border_of(config.get("query_block", 0) for config in configs)
        parts = [f"Prompts are read in chunks of {chunk:,} tokens."] if chunk else []
        if settings.get("equal") == TIME:
            parts.append(
                "Matched methods have the budget at which attention takes as long as that of "
                f"{settings['match']}, including block selection, within {OFF:.0%} if such a "
                "budget exists."
            )
        parts.append(
            f"{NOTES} At block starts it does not: the answer there starts with the first of "
            f"{border} tokens that form whole query blocks."
        )
        return " ".join(parts)


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
