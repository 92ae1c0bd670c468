"""Fidelity: whether a method keeps the answers of dense attention, on any text.

Nothing is generated: a model reads a text whose answers stand in it, once, and is asked what it
would have said at each of their tokens. Three probes, and those of tasks, are what a user of sparse
prefill feels: there the method reads a prompt, and what follows is read through the KV cache,
densely; one of them does so turn after turn, as chats do. Three are what a user of sparse decoding
feels: what follows is read, or written, one token at a time and as the method decodes. Cells are
(method, text, length, budget); a case is (cell, probe, depth, index).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.decode.step import decodes_sparsely
from cab_hf.eval.comparison import (
    CELL,
    TIME,
    Comparison,
    ComparisonSettings,
    kind_of,
)
from cab_hf.eval.fidelity_report import FidelityReport
from cab_hf.eval.haystack import Haystack, read_sentences
from cab_hf.eval.methods import (
    CACHES,
    Cab,
    Dense,
    Method,
    Published,
)
from cab_hf.eval.on_model import refusing
from cab_hf.eval.passkey import MATCH, parse_depths
from cab_hf.eval.probes import (
    ALL_TASKS,
    ASKED,
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
    PERPLEXITY_BORDER,
    PROBES,
    PROMPTED,
    QUESTION_FIRST,
    RECALL_BORDER,
    RECALLS,
    TOKENS_AT_ONCE,
    TURN_COUNT,
    TURNS,
    USUAL,
    WITH_KEYS_ASKED,
    border_of,
    question_of,
)
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
from cab_hf.runs.settings import by_device, comma_separated, option, require
from cab_hf.texts.documents import asked_document, plain_document, recall_document
from cab_hf.texts.needles import NAMES, Span, Tokens
from cab_hf.texts.tasks import TASKS

# of probes that are held against what dense attention foresees: it, and the comparison
COMPARED = {
    CONTINUATION: (distributions, divergence),
    TURNS: (behind_turns, divergence_by_turn),
}


def spell_texts(texts: Sequence[str | Mapping[str, str]]) -> str:
    """Texts as they are typed, from what is given or recorded."""
    return ",".join(text["name"] if isinstance(text, Mapping) else text for text in texts)


@dataclass(frozen=True)
class Settings(ComparisonSettings):
    """What a run is told. None stands for a default that depends on the device."""

    texts: tuple[str, ...] = option(
        (NOISE,),
        f"comma-separated, {NOISE} (five sentences) or UTF-8 files; both repeat if they are short",
        comma_separated(str),
        spell=spell_texts,
    )
    probes: tuple[str, ...] = option(
        USUAL,
        f"comma-separated, of {', '.join(PROBES)}; {ALL_TASKS}: the last {len(TASKS)}",
        comma_separated(str),
    )
    depths: int | None = by_device(20, 2, "depths of the key in a prompt, evenly spaced", int)
    pass_samples: int | None = by_device(100, 2, "prompts of each length, over all depths", int)
    documents: int | None = by_device(20, 1, "documents of each length", int)
    task_samples: int | None = by_device(100, 2, "prompts of each length and task", int)
    keys: int | None = by_device(12, 4, "how many keys a document of recall has", int)
    asked: int | None = by_device(
        12,
        4,
        f"how many keys a prompt of the probe {ASKED} has, all asked for after it; 0: none",
        int,
    )
    decoded: int | None = by_device(
        512, 48, f"tokens after a prompt that the probe {DECODE} reads, one at a time", int
    )
    continuations: int | None = by_device(100, 2, f"prompts of each length for {GREEDY}", int)
    written: int | None = by_device(256, 32, f"tokens that {GREEDY} generates after a prompt", int)
    out: str = option("fidelity_results", "folder for the results; a run found there goes on")

    def __post_init__(self) -> None:
        super().__post_init__()
        named = ((*TASKS,) if probe == ALL_TASKS else (probe,) for probe in self.probes)
        object.__setattr__(self, "probes", tuple(dict.fromkeys(chain(*named))))
        check = partial(require, self)
        others = self.asked or set(self.probes) - {*WITH_KEYS_ASKED}
        check("asked", others, "at least 1 where all probes ask for keys")
        for probe in self.probes:
            check("probes", probe in PROBES, f"of {', '.join(PROBES)}", probe)
        check("probes", self.probes, "at least one name")
        for text in self.texts:
            check("texts", text == NOISE or Path(text).is_file(), f"{NOISE} or text files", text)
        for text in self.texts:
            if text != NOISE:
                read_sentences("texts", text)
        distinct = self.texts and len(self.files) == len(self.texts)
        check("texts", distinct, "at least one, of different names without folder and ending")
        counts = ("depths", "pass_samples", "task_samples", "documents", "continuations")
        for name in (*counts, "decoded", "written"):
            check(name, getattr(self, name) > 0, "at least 1")
        check("keys", 1 <= self.keys <= len(NAMES), f"1 to {len(NAMES)}")
        check("asked", 0 <= self.asked <= len(NAMES), f"0 to {len(NAMES)}")
        complete = all(self.border % config.query_block == 0 for config in self.configs.values())
        borders = complete or not {RECALL_BORDER, PERPLEXITY_BORDER} & set(self.probes)
        of = f"none at block starts where query blocks do not divide {self.border}"
        check("probes", borders, of)
        for config in self.configs.values():
            # what is decoded may be an eighth of the text
            prompt = min(self.lengths) * (CONTINUED_SHARE - 1) // CONTINUED_SHARE
            check(
                "lengths",
                not self.decoding or not config.sparse_decode or decodes_sparsely(config, prompt),
                f"such that 7/8 of each are 4 times decode_tokens={config.decode_tokens} or more, "
                "for below decoding is dense",
            )
        if TURNS in self.probes:
            block = self.largest_block
            check(
                "lengths",
                min(self.lengths) // TURN_COUNT >= 2 * block,
                f"at least {2 * TURN_COUNT * block} each for {TURNS}: {TURN_COUNT} turns of 2 "
                f"query blocks of {block}",
            )
        caches = [name for name in self.methods if name in CACHES] if self.decoding else []
        check(
            "match",
            not caches or MATCH not in self.budgets or self.configs[self.match].sparse_decode,
            f"a config with sparse_decode=true, the bytes of whose steps {', '.join(caches)} are "
            "to match",
        )

    @cached_property
    def files(self) -> dict[str, str | None]:
        """Short name of each text -> its file, None for noise."""
        return {Path(text).stem: None if text == NOISE else text for text in self.texts}

    @property
    def border(self) -> int:
        return border_of(config.query_block for config in self.configs.values())

    @property
    def decoding(self) -> set[str]:
        return {*self.probes} & {*DECODES}

    @property
    def largest_block(self) -> int:
        """Tokens of the largest query block of any method."""
        configs = list(self.configs.values())
        if Published.name in self.methods:
            configs.append(CabConfig.published())
        return max(config.query_block for config in configs)


def turn_ends(length: int) -> tuple[Span, ...]:
    """The spans that end `TURN_COUNT` equal turns of a text, as long as `CONTINUED` has it."""
    ends = [length * turn // TURN_COUNT for turn in range(TURN_COUNT + 1)]
    read = max(1, min(CONTINUED, length // TURN_COUNT // CONTINUED_SHARE))
    return tuple((end - read, end) for end in ends[1:])


def at_once(length: int) -> int:
    """How many texts of a length are decoded side by side."""
    return max(1, TOKENS_AT_ONCE // length)


class Fidelity(FidelityReport):
    """A case is one text read under one method; a sample is what of it was foreseen."""

    name = "fidelity"
    purpose = "whether answers and perplexity are those of dense attention, on texts of your own"
    title = "Fidelity to dense attention"
    caption = "quality by attention time, or by density where no time was measured"
    Settings = Settings
    CASE = (*CELL, "probe", "depth", "index")
    GROWS = (
        *(*Comparison.GROWS, "lengths", "probes"),
        *("pass_samples", "task_samples", "documents", "continuations"),
    )

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

    @cached_property
    def haystack(self) -> Callable[[str, str], Haystack]:
        """(text, probe) -> what makes its prompts."""
        files, tokenizer = self.settings.files, self.tokenizer

        @lru_cache
        def made(text: str, probe: str) -> Haystack:
            filler = NOISE if files[text] is None else "text"
            keys = NAMED_KEYS.get(probe, 1)
            return Haystack(tokenizer, filler, keys, files[text], probe == QUESTION_FIRST)

        return made

    @cached_property
    def reading(self) -> Callable[..., TeacherForced]:
        """(text, length, probe, depth, index, hide_needle) -> it, kept for all methods."""
        settings = self.settings
        a_length = len(PROMPTED) * settings.pass_samples + len(PROBES) * settings.documents
        a_length += settings.continuations + len(TASKS) * settings.task_samples
        return lru_cache(maxsize=a_length)(self._reading)

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

    @cached_property
    def dense(self) -> Callable[[str, int, str, range], Tensor]:
        """(text, length, probe, indices) -> what dense attention foresees there, on the CPU.

        Kept for the methods that are held against it; a run that goes on computes it anew.
        """
        settings = self.settings

        @lru_cache(maxsize=3 * settings.documents)
        def made(text: str, length: int, probe: str, indices: range) -> Tensor:
            if probe == DECODE:
                _, *given = self._side_by_side(text, length, probe, indices)
                return behind_prompt(self.model, *given).cpu()
            compute, _ = COMPARED[probe]
            reading = self.reading(text, length, probe, None, indices[0])
            return compute(self.model, reading, settings.chunk).cpu()

        return made

    @cached_property
    def tokens_kept(self) -> Callable[[int, str | float], int]:
        """(length, budget) -> tokens of as many bytes as a step of the matched config reads."""

        @lru_cache
        def made(length: int, budget: str | float) -> int:
            if budget != MATCH:
                return max(2, round(budget * length))
            matched = Cab(self.settings.configs[self.settings.match])
            return round(matched.step_tokens(self.model, length))

        return made

    @property
    def texts(self) -> Sequence[str]:
        return list(self.settings.files)

    def typical(self, text: str, length: int) -> Tokens:
        return self.reading(text, length, PERPLEXITY, None, 0).tokens

    def running(self) -> dict[str, Sequence[str]]:
        files = filter(None, self.settings.files.values())
        return {Path(file).name: read_sentences("texts", file) for file in files}

    def recorded(self) -> dict[str, Any]:
        given, files = super().recorded(), self.settings.files.values()
        given["texts"] = [NOISE if file is None else file_identity(file) for file in files]
        return given

    def questions(self, method: str) -> list[dict[str, Any]]:
        """Probe, depth and index of all that a method is asked of a text and a length."""
        settings = self.settings
        depths = parse_depths(str(settings.depths))
        prompts = [
            {"depth": depths[i % len(depths)], "index": i // len(depths)}
            for i in range(settings.pass_samples)
        ]
        documents = [{"depth": None, "index": index} for index in range(settings.documents)]
        # a document has no needle to hide
        hidden = kind_of(method).hides_needle
        continuations = [{"depth": None, "index": i} for i in range(settings.continuations)]
        examples = [{"depth": None, "index": i} for i in range(settings.task_samples)]
        places = dict.fromkeys(PROMPTED, prompts) | dict.fromkeys(TASKS, examples)
        places[GREEDY] = continuations
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

    def method(self, case: Mapping[str, Any]) -> Method:
        name = case["method"]
        if name in CACHES and case["probe"] in DECODES:
            return CACHES[name](self.tokens_kept(case["length"], case["budget"]))
        return super().method(case)

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """What was foreseen."""
        if case["probe"] not in DECODES:
            return super().measure(case)
        place = case["index"] % at_once(case["length"])
        first = {**case, "index": case["index"] - place}
        return self.decoded(tuple(first.items()))[place]

    def probed(self, case: Mapping[str, Any], method: Method) -> dict[str, Any]:
        reading = self.reading(*question_of(case), hide_needle=method.hides_needle)
        # before the method is on
        if case["probe"] in COMPARED:
            self.dense_of(case)
        result = self.under(method, lambda: self.read(case, reading, method))
        return {"tokens": len(reading.tokens), **result}

    def dense_of(self, case: Mapping[str, Any]) -> Tensor:
        """`dense` of a case that is read alone."""
        alone = range(case["index"], case["index"] + 1)
        return self.dense(case["text"], case["length"], case["probe"], alone)

    @cached_property
    def decoded(self) -> Callable[[tuple], list[dict[str, Any]]]:
        """Items of a case -> what was found in it and in those that are decoded beside it.

        Kept until others are: they follow each other.
        """
        return lru_cache(maxsize=1)(self._decoded)

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

    def read(
        self, case: Mapping[str, Any], reading: TeacherForced, method: Method
    ) -> dict[str, Any]:
        """What the model foresees of ``reading``, by the method, which is on."""
        probe, settings = case["probe"], self.settings
        # CAB keeps all keys, and reads them all where it does not decode
        cache = None if type(method) is Cab else method.cache(self.model)
        how = settings.chunk, cache, settings.prefill_chunk
        # dense attention is what the others are held against, and so exactly itself
        itself = case["method"] == Dense.name
        if probe in COMPARED:
            compute, compare = COMPARED[probe]
            dense = self.dense_of(case)
            return compare(dense if itself else compute(self.model, reading, *how), dense, reading)
        if probe in PERPLEXITIES:
            return nll(self.model, reading)
        return greedy_match(self.model, reading, *how)


EXPERIMENT = Fidelity
