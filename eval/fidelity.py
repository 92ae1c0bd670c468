"""Fidelity: whether a method keeps the answers of dense attention, on any text.

Nothing is generated: a model reads a text whose answers stand in it, once, and is asked what it
would have said at each of their tokens. Three probes, and those of tasks, are what a user of sparse
prefill feels: there the method reads a prompt, and what follows is read through the KV cache,
densely; one of them does so turn after turn, as chats do. Three are what a user of sparse decoding
feels: what follows is read, or written, one token at a time and as the method decodes. Cells are
(method, text, length, budget); a case is (cell, probe, depth, index).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, product
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.decode.step import decodes_sparsely
from cab_hf.eval import charts
from cab_hf.eval.comparison import (
    CELL,
    RATIO,
    TIME,
    TIME_COLUMNS,
    Comparison,
    ComparisonSettings,
    cell_fields,
    cells_of,
    draw_by_name,
    draw_legend,
    draw_lines,
    fewer_readings,
    finish_panel,
    kind_of,
    looks_of,
    mark_fewer,
    notes_how,
    notes_time,
    off_readings,
    perplexity,
    ratio_to_dense,
    time_said,
)
from cab_hf.eval.experiment import Row
from cab_hf.eval.haystack import Haystack, read_sentences
from cab_hf.eval.intervals import (
    mean_interval,
    mean_of_intervals,
    paired_difference,
    wilson,
)
from cab_hf.eval.methods import (
    CACHES,
    Cab,
    Dense,
    Full,
    Method,
    Published,
    exact_readings,
)
from cab_hf.eval.on_model import refusing
from cab_hf.eval.passkey import MATCH, parse_depths
from cab_hf.eval.report import (
    column,
    difference,
    digits,
    grouped,
    markdown_table,
    with_interval,
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
from cab_hf.runs.markdown import plain
from cab_hf.runs.provenance import file_identity
from cab_hf.runs.settings import by_device, comma_separated, option, require
from cab_hf.texts.documents import asked_document, plain_document, recall_document
from cab_hf.texts.needles import NAMES, Span, Tokens, shared
from cab_hf.texts.tasks import TASKS

PASS, QUESTION_FIRST, MULTI_KEY = "pass", "question_first", "multi_key"
RECALL, PERPLEXITY = "recall", "perplexity"
# of what begins a query block: nothing that chooses with the query before it has seen it
RECALL_BORDER, PERPLEXITY_BORDER = "recall_border", "perplexity_border"
RECALLS, PERPLEXITIES = (RECALL, RECALL_BORDER), (PERPLEXITY, PERPLEXITY_BORDER)
# of what follows a prompt: the prompt is read by the method, what follows through the KV cache
CONTINUATION, ASKED = "continuation", "asked"
# the same in every turn of a chat, over one KV cache; and how many turns there are
TURNS, TURN_COUNT = "turns", 5
# the same, where the method also decodes what follows; and what it writes itself
DECODE, DECODE_ASKED, GREEDY = "decode", "decode_asked", "greedy"
DECODES = (DECODE, DECODE_ASKED, GREEDY)
WITH_KEYS_ASKED = (ASKED, DECODE_ASKED)
PROMPTS = (CONTINUATION, ASKED, TURNS, *DECODES, PASS, QUESTION_FIRST, MULTI_KEY)
PROBES = (*PROMPTS, *RECALLS, *PERPLEXITIES, *TASKS)
# stands for the probes of all tasks, and for the mean over them
ALL_TASKS = "tasks"
# unless others are asked for
USUAL = (CONTINUATION, ASKED, PASS, QUESTION_FIRST, RECALL, PERPLEXITY)
# tokens of a text that are read behind a prompt, and the most of it that they may be
CONTINUED, CONTINUED_SHARE = 256, 8
# tokens of all the texts that are decoded side by side, as a step costs their launches once
TOKENS_AT_ONCE = 2**17
PROMPTED = (PASS, QUESTION_FIRST, MULTI_KEY)  # probes that are prompts; the others are documents
# keys in the prompts of a probe, each of another name, where they are several
NAMED_KEYS = {MULTI_KEY: 4}
BORDER = 128  # tokens that whole query blocks make up, unless one is larger
NOISE = "noise"  # the text that is no file
# what every method is asked alike
question_of = itemgetter("text", "length", "probe", "depth", "index")


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


class Fidelity(Comparison):
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
    def reference(self) -> Callable[[str, int, int], Tensor]:
        """(text, length, index) -> dense log-probabilities of a continuation, on the CPU.

        Kept for the methods that are held against them; a run that goes on computes them anew.
        """

        @lru_cache(maxsize=self.settings.documents)
        def made(text: str, length: int, index: int) -> Tensor:
            reading = self.reading(text, length, CONTINUATION, None, index)
            return distributions(self.model, reading, self.settings.chunk).cpu()

        return made

    @cached_property
    def dense_turns(self) -> Callable[[str, int, int], Tensor]:
        """(text, length, index) -> dense logits of `TURNS`, on the CPU; kept as `reference`."""

        @lru_cache(maxsize=self.settings.documents)
        def made(text: str, length: int, index: int) -> Tensor:
            reading = self.reading(text, length, TURNS, None, index)
            return behind_turns(self.model, reading, self.settings.chunk).cpu()

        return made

    @cached_property
    def dense_decoded(self) -> Callable[[str, int, range], Tensor]:
        """(text, length, indices) -> dense logits of `DECODE`, on the CPU; kept as `reference`."""

        settings = self.settings
        batches = -(-settings.documents // at_once(max(settings.lengths)))

        @lru_cache(maxsize=batches)
        def made(text: str, length: int, indices: range) -> Tensor:
            return behind_prompt(
                self.model, *self._side_by_side(text, length, DECODE, indices)[1:]
            ).cpu()

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

    @staticmethod
    def usual(samples: Sequence[Row]) -> list[Row]:
        """Those that read a text of its length in one pass and are asked nothing twice.

        Where there are none, all that have a density.
        """
        parts = [s for s in samples if s["probe"] != TIME]
        read = [s for s in parts if s["probe"] not in DECODES] or parts
        unusual = (QUESTION_FIRST, CONTINUATION, ASKED, TURNS, *TASKS)
        return [s for s in read if s["probe"] not in unusual] or read

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
        if case["probe"] == CONTINUATION:
            self.reference(case["text"], case["length"], case["index"])
        if case["probe"] == TURNS:
            self.dense_turns(case["text"], case["length"], case["index"])
        result = self.under(method, lambda: self.read(case, reading, method))
        return {"tokens": len(reading.tokens), **result}

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
        dense = self.dense_decoded(text, length, indices) if probe == DECODE else None
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
        if probe == TURNS:
            dense = self.dense_turns(case["text"], case["length"], case["index"])
            result = dense if itself else behind_turns(self.model, reading, *how)
            return divergence_by_turn(result, dense, reading)
        if probe == CONTINUATION:
            dense = self.reference(case["text"], case["length"], case["index"])
            result = dense if itself else distributions(self.model, reading, *how)
            return divergence(result, dense, reading)
        if probe in PERPLEXITIES:
            return nll(self.model, reading)
        return greedy_match(self.model, reading, *how)

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One row a (method, text, length, budget), with what was found by each probe.

        Of answers: the share that is right with Wilson's interval, and the difference to dense with
        Newcombe's. Of perplexity: its ratio to dense, the geometric mean over documents with
        Student's interval. Both over what this method and dense attention have read alike. Of what
        follows a prompt also the KL divergence a token, the mean over documents with Student's
        interval, and the share of tokens at which greedy decoding would agree with dense. Of what
        is decoded the KL divergence also over that of `Full`, the noise floor. Of turns also what
        is found in each, and by how much the last one's KL exceeds the first one's. Of
        continuations: how many are those of dense word for word, and how many tokens they begin
        alike.
        """
        dense = {question_of(s): s for s in samples if s["method"] == Dense.name}
        cells = cells_of(samples)
        rows = [_row(cell, dense) for cell in cells]
        mark_fewer(rows, cells)
        _tell_means_of_tasks(rows)
        _hold_against_floor(rows)
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        shown = {
            heading: write
            for heading, (probe, write) in COLUMNS.items()
            if probe is None or any(row.get(probe) for row in rows)
        }
        turned = [row for row in rows if row.get(TURNS)]
        return table_a_text(rows, shown) | table_a_text(turned, TURN_COLUMNS, "Turn after turn on")

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """What CAB changes in each text, at the greatest length, and what rows do not hold.

        That is the match, cases that others have, and a method that was dense attention.
        """
        cab = {row["text"]: row for row in rows if row["method"] == Cab.name and _compared(row)}
        return [
            f"On {plain(text)}, {row['length']} tokens, cab attends {row['density']:.0%} of the "
            f"pairs{time_said(row)}; against dense: "
            f"{', '.join([*_behind(row, rows), *_turning(row), *_decoding(row), *_changes(row)])}."
            for text, row in cab.items()
        ] + [*off_readings(rows), *fewer_readings(rows), *exact_readings(rows)]

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        configs = settings["cab_configs"]
        border = border_of(config.get("query_block", 0) for config in configs.values())
        return notes_how(settings) + (
            "Nothing but continuations is generated: an answer is right when each of its tokens is "
            "the likeliest one after all that stands before it. Behind the prompt: the method "
            f"reads a prompt, and {CONTINUED} tokens of the same text that follow (an eighth of it "
            "at most) are read through the KV cache, teacher forced, by exact attention but for "
            "methods that have dropped keys for good; KL is KL(dense || method) of the next token, "
            "in nats, a token, the mean over documents with Student's interval; agreement is the "
            "share of tokens at which both find the same token likeliest. Full, the sparse path "
            "with all blocks, shows what of it kernels and rounding leave. Asked behind it: keys "
            "stated in the prompt and repeated behind it. Decode: the method reads a prompt and "
            "then what follows one token at a time, teacher forced, against dense attention that "
            "reads it so. Its floor is the KL of full, which decodes by another exact kernel than "
            "dense. Keys a step: tokens whose K and V have the bytes that a step reads in a layer, "
            "for CAB the index of all tokens and decode_tokens rows. Streaming (4 sinks and the "
            "latest tokens), h2o (heavy hitters and the latest, half each) and snapkv (what the "
            "last queries of the prompt attend, and all that is decoded) read the prompt densely "
            "there, and keep so many; the density of the last two is what they keep. Equal "
            "continuations: greedy ones that are those of dense word for word; agreeing prefix: "
            "tokens until the first other one, the mean. "
            f"{notes_time()}"
            "Pass: a key in a text, asked for behind it; question first: asked for before it as "
            "well; multi key: one of four of different names. Recall: keys stated in the first "
            "half of a document and repeated in its second. Perplexity: of the second "
            "half of a document without keys. Shares with Wilson's interval, differences to dense "
            "with Newcombe's "
            "(of recall over keys, those of one document counting as independent), ratios of "
            "perplexity the geometric mean over documents with Student's, all 95 %. Density: "
            "attended over causal (query, key) pairs. "
            "Query blocks are decided as a whole, so that what an answer's first token "
            "attends may depend on its later ones, as on all that follow in the block. At borders "
            "it does not: there numbers of recall, and the tokens of perplexity, are the first of "
            f"{border} tokens that whole query blocks make up."
            f"{_chats(settings.get('probes', ()))}{_tasks(settings.get('probes', ()))}"
            f"{_cascades(configs)}"
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Quality over attention time or density, a row of panels each text and length."""
        panels = grouped(rows, "text", "length")
        tasks = {
            name: task.title for name, task in TASKS.items() if any(row.get(name) for row in rows)
        }
        asked = [probe for probe in DRAWN if any(row.get(probe) for row in rows)]
        columns = {probe: DRAWN[probe] for probe in asked or ([] if tasks else DRAWN)}
        columns |= {ALL_TASKS: ("right answers by task", "share")} if tasks else {}
        looks = looks_of(rows)
        # names of tasks stand beside each other
        widths = [max(1, 0.3 * len(tasks)) if probe == ALL_TASKS else 1 for probe in columns]
        size = (max(7.2, 3.6 * sum(widths)), 0.9 + 2.9 * len(panels))
        grid = {"figsize": size, "width_ratios": widths}
        with charts.figure(path, len(panels), len(columns), **grid) as axes:
            for beside, own in zip(axes, panels, strict=True):
                for axis, (probe, (title, value)) in zip(beside, columns.items(), strict=True):
                    if probe == ALL_TASKS:
                        draw_by_name(axis, own, tasks, looks)
                    else:
                        _panel(axis, own, probe, value, looks)
                    where = f"{own[0]['text']}, {own[0]['length']:,} tokens"
                    axis.set_title(f"{title}\n{where}", fontsize=9, parse_math=False)
            draw_legend(axes)


EXPERIMENT = Fidelity


def table_a_text(
    rows: Sequence[Row], columns: Mapping[str, Any], heading: str = "On"
) -> dict[str, str]:
    """A table of each text, under its name behind ``heading``."""
    return {
        f"{heading} {plain(own[0]['text'])}": markdown_table(own, columns)
        for own in grouped(rows, "text")
    }


def _chats(probes: Sequence[str]) -> str:
    """What turns are, where they are asked for."""
    if TURNS not in probes:
        return ""
    return (
        f" Turns: a text is read as {TURN_COUNT} equal turns over one KV cache, each a prompt that "
        f"the method reads and the {CONTINUED} tokens that follow it (an eighth of the turn at "
        "most), read as those behind a prompt are, against dense attention that reads the same "
        f"turns. Turn {TURN_COUNT} less turn 1: the mean over documents with Student's interval."
    )


def _tasks(probes: Sequence[str]) -> str:
    """What answers of tasks are, where some are asked for."""
    if not {*TASKS} & {*probes}:
        return ""
    return (
        " Tasks: the method reads a prompt, and its answers behind it are read through the KV "
        "cache as those asked behind a prompt are; each answer counts, those of one prompt as "
        "independent. Mean over tasks: each counts once, with the intervals of all joined by MOVER."
    )


def border_of(query_blocks: Iterable[int]) -> int:
    """Tokens from one border to the next: at each, a query block of every config begins."""
    return max(BORDER, *query_blocks)


def _cascades(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Which methods are cascades, and how they differ; of configs as they are recorded."""
    parts = []
    for name, config in configs.items():
        if anchors := config.get("anchors"):
            budget = f"{config['max_density']:g} of each row"
            if config["max_density"] == 1 and "mass_threshold" in config:
                budget = f"mass_threshold {config['mass_threshold']:g}"
            # older results have tables, and say how anchors chose, and for whom
            budget = "budgets a head" if isinstance(config.get("top_p"), Sequence) else budget
            how = ""
            if "anchor_scores" in config:
                how = f" by {config['anchor_scores']} scores, {SHARING[config['anchor_heads']]}"
            parts.append(f"{name} of {len(anchors)} anchors{how}, {budget}")
    return f" Cascades: {'; '.join(parts)}." if parts else ""


def _row(members: Sequence[Row], dense: Mapping[tuple, Row]) -> dict[str, Any]:
    row = cell_fields(members, Fidelity.usual(members))
    decoded = next((s for s in members if s["probe"] in DECODES), None)
    if decoded is not None:
        step_tokens = decoded["step_tokens"]
        row |= {"step_tokens": step_tokens, "step_share": step_tokens / decoded["length"]}
    compared = {} if members[0]["method"] == Dense.name else dense
    scored = dict.fromkeys(PERPLEXITIES, perplexity) | {GREEDY: _written, TURNS: _turns}
    scored |= dict.fromkeys((CONTINUATION, DECODE), _continuation)
    for probe in PROBES:
        own = [s for s in members if s["probe"] == probe]
        pairs = [(s, compared[question_of(s)]) for s in own if question_of(s) in compared]
        if own:
            row[probe] = scored.get(probe, _answers)(own, pairs)
    return row


def _continuation(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """KL divergence a token and greedy agreement, and what `perplexity` tells."""
    means = [s["kl"] / s["count"] for s in own]
    fields = {"kl": fmean(means)}
    if len(own) > 1:
        _, low, high = mean_interval(means, [0.0] * len(means))
        # no divergence is below 0
        fields |= {"kl_low": max(0.0, low), "kl_high": high}
    agreed, count = (sum(s[name] for s in own) for name in ("agree", "count"))
    return {**fields, "agreement": agreed / count, **perplexity(own, pairs)}


def _turns(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """`_continuation` of all turns and of each, and the KL of the last less that of the first."""
    turns = [
        _continuation(
            [s["turns"][at] for s in own], [(s["turns"][at], b["turns"][at]) for s, b in pairs]
        )
        for at in range(TURN_COUNT)
    ]
    first, last = ([s["turns"][at]["kl"] / s["turns"][at]["count"] for s in own] for at in (0, -1))
    fields = {"growth": fmean(last) - fmean(first)}
    if len(own) > 1:
        _, low, high = mean_interval(last, first)
        fields |= {"growth_low": low, "growth_high": high}
    return {**_continuation(own, pairs), "turns": turns, **fields}


def _hold_against_floor(rows: Sequence[dict[str, Any]]) -> None:
    """Give what was decoded its KL over that of `Full` on the same, where that is there."""
    place = itemgetter("text", "length")
    decoded = [row for row in rows if row.get(DECODE) and row["method"] != Dense.name]
    floors = {place(row): row[DECODE]["kl"] for row in decoded if row["method"] == Full.name}
    for row in decoded:
        floor = floors.get(place(row), 0.0)
        if floor > 0:
            row[DECODE]["over_floor"] = row[DECODE]["kl"] / floor


def _written(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """How many continuations are those of dense, and how many tokens they begin alike."""
    fields = {"n": len(own), "tokens": len(own[0]["written"])}
    if not pairs:
        return fields
    alike = [shared(s["written"], base["written"]) for s, base in pairs]
    equal = sum(s["written"] == base["written"] for s, base in pairs)
    low, high = wilson(equal, len(pairs))
    fields |= {"pairs": len(pairs), "equal": equal, "low": low, "high": high}
    return {**fields, "share": equal / len(pairs), "prefix": fmean(alike)}


def _answers(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """What was right; every key counts, and only keys both were asked for are compared."""
    right = [each for s in own for each in s["right"]]
    low, high = wilson(sum(right), len(right))
    fields = {
        "n": len(right),
        "correct": sum(right),
        "share": fmean(right),
        "low": low,
        "high": high,
    }
    if not pairs:
        return fields
    both = [keys for s, base in pairs for keys in zip(s["right"], base["right"], strict=True)]
    ours, base = zip(*both, strict=True)
    interval = paired_difference(ours, base)
    fields |= dict(zip(("delta", "delta_low", "delta_high"), interval, strict=True))
    return {**fields, "pairs": len(both), "ratio": sum(ours) / sum(base) if any(base) else None}


def _mean_of_tasks(results: Sequence[Row]) -> dict[str, Any]:
    """What `_answers` says of each task, as the mean over tasks, each counting once."""
    shown = {"n": len(results)}
    for names in (("share", "low", "high"), ("delta", "delta_low", "delta_high")):
        if all(names[0] in result for result in results):
            parts = [tuple(map(result.get, names)) for result in results]
            shown |= dict(zip(names, mean_of_intervals(parts), strict=True))
    return shown


def _tell_means_of_tasks(rows: Sequence[dict[str, Any]]) -> None:
    """Give rows their mean over tasks, where they have all that others of their text have."""
    for alike in grouped(rows, "text", "length"):
        asked = [name for name in TASKS if any(name in row for row in alike)]
        for row in alike:
            if asked and row.keys() >= {*asked}:
                row[ALL_TASKS] = _mean_of_tasks([row[name] for name in asked])


def _panel(
    axis: Any, rows: Sequence[Row], probe: str, value: str, looks: Mapping[str, Mapping[str, Any]]
) -> None:
    """``value`` of a probe over time or density, a line a method; dense attention is a level."""
    results = [row for row in rows if row.get(probe, {}).get(value) is not None]
    for row in results:
        if row["method"] == Dense.name and value != "kl":
            axis.axhline(row[probe][value], color="black", linestyle="--", label=Dense.name)
    if value == "ratio" and any(row["method"] == Dense.name for row in rows):
        axis.axhline(1, color="black", linestyle="--", label=Dense.name)
    drawn = [row for row in results if row["method"] in looks]
    timed = bool(drawn) and all(row.get("over_dense") is not None for row in drawn)
    share = "step_share" if probe in DECODES else "over_dense" if timed else "density"
    draw_lines(axis, drawn, share, itemgetter(probe), (value, *EDGES[value]), looks)
    if value == "share":
        axis.set_ylim(-0.04, 1.04)
    # what a method changes and what kernels leave are some powers of ten apart
    if value == "kl" and drawn and all(row[probe][value] > 0 for row in drawn):
        axis.set_yscale("log", nonpositive="clip")
    finish_panel(axis, share)


def _of(probe: str, write: Callable[[Row], str | None]) -> tuple[str, Callable[[Row], Any]]:
    """A column of what a probe found: the probe, and what is shown of a row."""
    return probe, column(write, probe)


def _share(result: Row) -> str:
    return with_interval(result["share"], result["low"], result["high"])


def _divergence(result: Row) -> str:
    """KL a token, and its interval where there is one."""
    edges = [digits(result[edge]) for edge in EDGES["kl"] if result.get(edge) is not None]
    return f"{digits(result['kl'])}{' [{}, {}]'.format(*edges) if edges else ''}"


def _compared(row: Row) -> bool:
    """Whether there is anything to say of a row against dense."""
    behind = row.get(CONTINUATION, {}).get("pairs")
    return bool(behind or _turning(row) or _decoding(row) or _changes(row))


def _behind(row: Row, rows: Sequence[Row]) -> list[str]:
    """What follows a prompt, against dense; beside what the sparse path at full budget leaves."""
    result = row.get(CONTINUATION)
    if not result or not result.get("pairs"):
        return []
    place = itemgetter("text", "length")
    full = [each for each in rows if each["method"] == Full.name and place(each) == place(row)]
    noise = [digits(each[CONTINUATION]["kl"]) for each in full if each.get(CONTINUATION)]
    beside = f" (of the kernels alone {noise[0]})" if noise else ""
    return [
        f"behind the prompt KL {_divergence(result)} a token{beside}",
        f"greedy agreement {result['agreement']:.1%}",
        f"perplexity behind the prompt × {ratio_to_dense(result)}",
    ]


def _turning(row: Row) -> list[str]:
    """What follows the first and the last turn of a chat, against dense."""
    result = row.get(TURNS)
    if not result or not result.get("pairs"):
        return []
    first, *_, last = map(_divergence, result["turns"])
    return [f"KL a token {first} in turn 1 and {last} in turn {TURN_COUNT} of a chat"]


def _growth(result: Row) -> str:
    """The KL of the last turn less that of the first, and its interval where there is one."""
    edges = [f"{result[edge]:+.2g}" for edge in ("growth_low", "growth_high") if edge in result]
    return f"{result['growth']:+.2g}{' [{}, {}]'.format(*edges) if edges else ''}"


def _decoding(row: Row) -> list[str]:
    """What was decoded, against dense, beside the floor where there is one."""
    said = []
    if row.get(DECODE, {}).get("pairs"):
        result = row[DECODE]
        over = result.get("over_floor")
        beside = "" if over is None else f" ({over:.1f} × the floor)"
        said += [
            f"decoded KL {_divergence(result)} a token{beside}",
            f"decoded agreement {result['agreement']:.1%}",
        ]
    if row.get(GREEDY, {}).get("pairs"):
        said.append(f"{_equal(row[GREEDY])} continuations equal")
    return said


def _equal(result: Row) -> str | None:
    """``34 of 100``, where continuations are held against those of dense."""
    return f"{result['equal']} of {result['pairs']}" if "pairs" in result else None


def _prefix(result: Row) -> str | None:
    return f"{result['prefix']:.0f} of {result['tokens']}" if "pairs" in result else None


def _changes(row: Row) -> list[str]:
    """What a method changes against dense, a probe an item."""
    left_out = (CONTINUATION, TURNS, DECODE, GREEDY, *TASKS)
    probes = [probe for probe in (*PROBES, ALL_TASKS) if probe not in left_out]
    fields = {probe: (ratio_to_dense if probe in PERPLEXITIES else difference) for probe in probes}
    result = {probe: write(row[probe]) for probe, write in fields.items() if row.get(probe)}
    times = dict.fromkeys(PERPLEXITIES, "× ")
    return [
        f"{SAID.get(probe, probe.replace('_', ' '))} {times.get(probe, '')}{change}"
        for probe, change in result.items()
        if change
    ]


# whose a plan of an anchor is
SHARING = {"each": "a plan a head", "group": "a plan a KV head", "all": "one plan for all heads"}
SAID = {
    ASKED: "end-of-prompt recall",
    DECODE_ASKED: "decoded recall",
    RECALL: "in-text recall",
    RECALL_BORDER: "block-start recall",
    PERPLEXITY_BORDER: "block-start perplexity",
    ALL_TASKS: "mean over tasks",
}
DRAWN = {
    CONTINUATION: ("KL behind the prompt", "kl"),
    ASKED: ("end-of-prompt recall", "share"),
    TURNS: ("KL over turns", "kl"),
    DECODE: ("KL of decoding", "kl"),
    DECODE_ASKED: ("decoded recall", "share"),
    GREEDY: ("equal continuations", "share"),
    RECALL: ("in-text recall", "share"),
    RECALL_BORDER: ("block-start recall", "share"),
    PASS: ("pass", "share"),
    PERPLEXITY: ("perplexity × dense", "ratio"),
    PERPLEXITY_BORDER: ("block-start perplexity × dense", "ratio"),
}
EDGES = {
    "share": ("low", "high"),
    "ratio": RATIO[1:],
    "kl": ("kl_low", "kl_high"),
}
# heading -> the probe or time that a row must have for it, and what is shown of a row
COLUMNS = {
    "method": (None, "method"),
    "length": (None, "length"),
    "budget": (None, "budget"),
    "density": (None, "density"),
    "KL behind the prompt": _of(CONTINUATION, _divergence),
    "agreement": _of(CONTINUATION, lambda result: f"{result['agreement']:.3f}"),
    "perplexity behind the prompt × dense": _of(CONTINUATION, ratio_to_dense),
    "end-of-prompt recall": _of(ASKED, _share),
    "end-of-prompt recall to dense": _of(ASKED, difference),
    "KL over turns": _of(TURNS, _divergence),
    "keys a step": ("step_tokens", column(lambda tokens: f"{tokens:,.0f}", "step_tokens")),
    "decode KL": _of(DECODE, _divergence),
    "× floor": _of(DECODE, lambda result: digits(result.get("over_floor"))),
    "decode agreement": _of(DECODE, lambda result: f"{result['agreement']:.3f}"),
    "decode recall": _of(DECODE_ASKED, _share),
    "decode recall to dense": _of(DECODE_ASKED, difference),
    "equal continuations": _of(GREEDY, _equal),
    "agreeing prefix": _of(GREEDY, _prefix),
    **TIME_COLUMNS,
    "pass [95 %]": _of(PASS, _share),
    "pass to dense": _of(PASS, difference),
    "question first": _of(QUESTION_FIRST, _share),
    "question first to dense": _of(QUESTION_FIRST, difference),
    "multi key [95 %]": _of(MULTI_KEY, _share),
    "multi key to dense": _of(MULTI_KEY, difference),
    "in-text recall [95 %]": _of(RECALL, _share),
    "in-text recall to dense": _of(RECALL, difference),
    "in-text recall × dense": _of(RECALL, ratio_to_dense),
    "block-start recall [95 %]": _of(RECALL_BORDER, _share),
    "block-start recall to dense": _of(RECALL_BORDER, difference),
    "perplexity": _of(PERPLEXITY, lambda result: f"{result['value']:.2f}"),
    "perplexity × dense [95 %]": _of(PERPLEXITY, ratio_to_dense),
    "block-start perplexity × dense [95 %]": _of(PERPLEXITY_BORDER, ratio_to_dense),
    "mean over tasks [95 %]": _of(ALL_TASKS, _share),
    "mean over tasks to dense": _of(ALL_TASKS, difference),
    **{
        f"{task.title} {heading}": _of(name, write)
        for name, task in TASKS.items()
        for heading, write in (("[95 %]", _share), ("to dense", difference))
    },
}
TURN_COLUMNS = {
    **{name: COLUMNS[name][1] for name in ("method", "length", "budget", "density")},
    **{
        f"KL of turn {at + 1}": column(
            lambda result, at=at: _divergence(result["turns"][at]), TURNS
        )
        for at in range(TURN_COUNT)
    },
    f"turn {TURN_COUNT} less turn 1": column(_growth, TURNS),
    "agreement, turn by turn": column(
        lambda result: ", ".join(f"{turn['agreement']:.3f}" for turn in result["turns"]), TURNS
    ),
}
