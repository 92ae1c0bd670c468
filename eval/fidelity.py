"""Fidelity: whether a method keeps the answers of dense attention, on any text.

Several methods read the same texts, at budgets matched by density or by time. Nothing is generated:
a model reads a text with its answers, once, and is asked what it would have said at each
of their tokens. Three probes, and those of tasks, are what a user of sparse prefill feels: there
the method reads a prompt, and what follows is read through the KV cache, densely; one of them does
so turn after turn, as chats do. Three are what a user of sparse decoding feels: what follows is
read, or written, one token at a time and as the method decodes. Cells are (method, text, length,
budget); a case is (cell, probe, depth, index). How long attention takes in a cell is timed once, on
a device where times mean something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    answered,
    behind_prompt,
    behind_turns,
    continued,
    distributions,
    divergence,
    divergence_by_turn,
    greedy_match,
    nll,
    right_spans,
)
from cab_hf.runs.provenance import file_identity
from cab_hf.texts.documents import asked_document, plain_document, recall_document
from cab_hf.texts.needles import Span, Tokens
from cab_hf.texts.tasks import TASKS

# fields that a sample has in addition to its case: of any probe but time, and of some probes
READ = ("tokens", "density", "sparse_density", "seconds")
LIKELIHOOD = ("nll", "count")
DIVERGENCE = ("kl", "agree", *LIKELIHOOD)
TIMED = ("tokens", "predict_ms", "attend_ms", "dense_ms", "dense_kernel")
# probes that are compared with dense attention: how logits are computed and compared
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
    """The spans that end `TURN_COUNT` equal turns of a text, as long as `CONTINUED` has it."""
    ends = [length * turn // TURN_COUNT for turn in range(TURN_COUNT + 1)]
    read = max(1, min(CONTINUED, length // TURN_COUNT // CONTINUED_SHARE))
    return tuple((end - read, end) for end in ends[1:])


def at_once(length: int) -> int:
    """How many texts of a length are decoded side by side."""
    return max(1, TOKENS_AT_ONCE // length)


class Fidelity(LongRun):
    """A case is one text read under one method; a sample is what of it was foreseen.

    The probe of a case is `TIME` where attention is timed.
    """

    name = "fidelity"
    purpose = "whether answers and perplexity are those of dense attention, on texts of your own"
    title = "Fidelity to dense attention"
    caption = "quality by attention time, or by density where no time was measured"
    Settings = Settings
    CELL, FITTED = CELL, "fitted"
    CASE = (*CELL, "probe", "depth", "index")
    # what cab and variant say is in cab_configs
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
        # kept for all methods
        self.haystack = cache(self._haystack)
        self.reading = lru_cache(a_length)(self._reading)
        self.dense = lru_cache(3 * settings.documents)(self._dense)
        self.tokens_kept = cache(self._tokens_kept)
        # items of a case -> what is found in it and in those beside it, which follow each other
        self.decoded = lru_cache(1)(self._decoded)
        # cell -> the method whose time is matched: fitted once, as no time is taken twice
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
        # how much room an example needs depends on what it has drawn
        for probe, index in product(probes, range(settings.task_samples)):
            if probe in TASKS:
                self.reading(next(iter(settings.files)), min(settings.lengths), probe, None, index)

    def recorded(self) -> dict[str, Any]:
        settings, given = self.settings, super().recorded()
        given["variant"] = list(map(without_folder, settings.variant))
        if settings.equal == DENSITY:
            # as it always was
            del given["equal"]
        files = settings.files.values()
        given["texts"] = [NOISE if file is None else file_identity(file) for file in files]
        configs = {name: config.to_dict() for name, config in settings.configs.items()}
        return {**given, "cab_configs": configs}

    def running(self) -> dict[str, Sequence[str]]:
        files = filter(None, self.settings.files.values())
        return {Path(file).name: read_sentences("texts", file) for file in files}

    # --- texts

    def _haystack(self, text: str, probe: str) -> Haystack:
        """What makes the prompts of a probe."""
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
        """Probe, depth and index of all that a method is asked of a text and a length."""
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
        # what is dense but for its steps has no more to say
        kept = DECODES if kind_of(method).dense_prefill else PROBES
        if not settings.asked:
            kept = [probe for probe in kept if probe not in WITH_KEYS_ASKED]
        results = [
            {"probe": probe, **place}
            for probe in settings.probes
            if probe in kept and (probe in PROMPTED or not hidden)
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
        """All methods are asked a question before the next: a run that stops has asked them alike.

        So what a question needs of dense attention is computed once, too. What is matched to a
        method waits for all that this is asked.
        """
        settings = self.settings
        matched = [name for name in settings.compared if kind_of(name).matched]
        arms = [(name, None) for name in settings.compared if name not in matched]
        arms += [(name, budget) for budget, name in product(settings.budgets, matched)]
        for text, length in product(settings.files, settings.lengths):
            asked: dict[tuple, list[dict[str, Any]]] = {}
            for method, budget in arms:
                cell = dict(zip(CELL, (method, text, length, budget), strict=True))
                for question in self.questions(method):
                    case = {**cell, **question}
                    asked.setdefault(self.question(case), []).append(case)
            yield from sorted(chain.from_iterable(asked.values()), key=self.waits)

    def alone(self, case: Mapping[str, Any]) -> bool:
        # one fit by time, which is logged, holds for all cases of a cell
        return case["probe"] == TIME or self.by_time(case)

    def waits(self, case: Mapping[str, Any]) -> bool:
        return case["budget"] == MATCH

    def by_time(self, case: Mapping[str, Any]) -> bool:
        """Whether what it is to match is a time."""
        return self.settings.equal == TIME and self.waits(case)

    def fitted(self, case: Mapping[str, Any], samples: Sequence[Row]) -> float | None:
        """The density in layers that are not dense, or ms.

        What an earlier run fitted to the cell by time, and logged, is what it goes on with.
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

    # --- methods, and what they take

    @cached_property
    def clock(self) -> AttentionClock | None:
        """What times attention in a model's layers; None where times would mean nothing."""
        device = self.settings.device
        bench = layer_bench(device)
        if bench is None and self.settings.equal == TIME:
            # which is asked for all the same
            bench = Bench(device)
        return None if bench is None else AttentionClock(bench)

    def _tokens_kept(self, length: int, budget: str | float) -> int:
        """Tokens of as many bytes as a step of the matched config reads."""
        if budget != MATCH:
            return max(2, round(budget * length))
        matched = Cab(self.settings.configs[self.settings.match])
        return round(matched.step_tokens(self.model, length))

    def method(self, case: Mapping[str, Any]) -> Method:
        """Set up for a case; block sizes and engine of baselines are the matched method's."""
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
        """What was foreseen, or how long attention takes."""
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
            # before the method is on
            if case["probe"] in COMPARED:
                self.dense_of(case)
            result = self.under(method, lambda: self.read(case, reading, method))
        return {"tokens": len(tokens), **result, **logged}

    def _dense(self, text: str, length: int, probe: str, indices: range) -> Tensor:
        """What dense attention foresees there, on the CPU; a run that goes on computes it anew."""
        if probe == DECODE:
            _, *given = self._side_by_side(text, length, probe, indices)
            return behind_prompt(self.model, *given).cpu()
        compute, _ = COMPARED[probe]
        reading = self.reading(text, length, probe, None, indices[0])
        return compute(self.model, reading, chunk=self.settings.chunk).cpu()

    def dense_of(self, case: Mapping[str, Any]) -> Tensor:
        """`dense` of a case that is read alone."""
        alone = range(case["index"], case["index"] + 1)
        return self.dense(case["text"], case["length"], case["probe"], alone)

    def read(
        self, case: Mapping[str, Any], reading: TeacherForced, method: Method
    ) -> dict[str, Any]:
        """What the model foresees of ``reading``, by the method, which is on."""
        probe, settings = case["probe"], self.settings
        # CAB keeps all keys, and reads them all where it does not decode
        cache = None if type(method) is Cab else method.cache(self.model)
        how = {"chunk": settings.chunk, "cache": cache, "prefill_chunk": settings.prefill_chunk}
        if probe in COMPARED:
            compute, compare = COMPARED[probe]
            dense = self.dense_of(case)
            # dense attention is what the others are held against, and so exactly itself
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
        # before the method is on
        dense = self.dense(text, length, DECODE, indices) if probe == DECODE else None
        step_tokens = method.step_tokens(self.model, length)

        def read() -> dict[str, Any]:
            how = {"cache": method.cache(self.model), "stepping": method.stepping}
            how["prefill_chunk"] = settings.prefill_chunk
            if probe == GREEDY:
                written = continued(self.model, ids[:, :prompt], length - prompt, **how)
                return {"cases": [{"written": each} for each in written.tolist()]}
            # dense attention is what the others are held against, and so exactly itself
            itself = probe == DECODE and case["method"] == Dense.name
            logits = dense if itself else behind_prompt(self.model, ids, prompt, **how)
            if probe == DECODE_ASKED:
                given = zip(logits, readings, strict=True)
                # of the first that is read behind the prompt, the first row
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
        """(readings, their tokens [B, length], how many of them all have as prompt)."""
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
                f"{settings['match']}, choosing included, within {OFF:.0%} where there is one."
            )
        parts.append(
            f"{NOTES} At block starts it does not: what is asked there is the first of {border} "
            "tokens that whole query blocks make up."
        )
        return " ".join(parts)


EXPERIMENT = Fidelity

NOTES = (
    "docs/evaluation.md (Words) says what is asked and what the columns mean. Nothing but "
    "continuations is generated: an answer is right when each of its tokens is the likeliest one "
    f"after all that stands before it. Behind a prompt {CONTINUED} tokens of the same text are "
    "read (an eighth of it at most), by exact attention but for methods that have dropped keys for "
    "good. Shares with Wilson's interval, differences to dense with Newcombe's (over keys, those "
    "of one text counting as independent), ratios of perplexity the geometric mean over documents "
    "with Student's, as KL is the mean, all 95 %. Attention ms: by CUDA events, on the q, k and v "
    "of one text of the cell as dense attention has them; × dense: over the fastest dense kernel "
    "on the same. Behind ~, choosing is not measured: it takes what Xu et al. 2025 report, over "
    f"dense attention {', '.join(f'{x:.3f} for {name}' for name, x in REPORTED.items() if x)}, and "
    f"0 for {', '.join(name for name, x in REPORTED.items() if not x)}. Elsewhere it is measured, "
    "in older results that of plain PyTorch too. Query blocks are decided as a whole, so that what "
    "an answer's first token attends may depend on all that follow in the block."
)
