"""Passkey retrieval: how often a method lets the model read out a number hidden in a long text.

Every method answers the same prompts. Cells are (method, length, keys); a sample is (cell, depth,
index). What a sample answered is written to ``samples.jsonl`` as it comes; ``results.json``,
``results.md`` and ``heatmap.png`` are derived from that file.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from cab_hf.config import CabConfig
from cab_hf.eval import report
from cab_hf.eval.haystack import FILLERS, Haystack, Prompt, answered, check_haystack
from cab_hf.eval.methods import (
    CONTROLS,
    H2O,
    METHODS,
    Cab,
    Cell,
    Dense,
    Full,
    LayerDensities,
    Method,
    NoNeedle,
)
from cab_hf.eval.models import load_model
from cab_hf.eval.settings import comma_separated, option, parse_assignment

ANSWER_TOKENS = 8  # five digits of a token each, and what a model may put around them
STAGES = {
    "prefill": "Decoding is dense, except that streaming and h2o no longer have what they dropped.",
    "both": "Decoding is sparse too.",
}
CELL_FIELDS = ("method", "length", "keys")
SAMPLE_FIELDS = (*CELL_FIELDS, "depth", "index")
MATCH = "match"  # a budget: what CAB realises in the same cell


def parse_depths(text: str) -> tuple[float, ...]:
    """``0,0.5,1``, or a whole number: that many, evenly spaced from 0 to 1."""
    if not text.strip().isdigit():
        return comma_separated(float)(text)
    number = int(text)
    if number == 1:
        return (0.5,)
    return tuple(i / (number - 1) for i in range(number))


def parse_budget(text: str) -> str | float:
    """``match``, or a density."""
    return MATCH if text == MATCH else float(text)


@dataclass(frozen=True)
class Settings:
    """What a run is told. None stands for a default that depends on the device.

    Raises:
        ValueError: naming the option, the value seen and what is accepted.
    """

    model: str = option("smollm2", "name or path of a causal LM; smollm2 needs no hub")
    methods: tuple[str, ...] = option(
        ("dense", "cab", "published", "streaming", "random", "h2o"),
        f"comma-separated, of {', '.join(METHODS)}",
        comma_separated(str),
    )
    lengths: tuple[int, ...] | None = option(
        None,
        "comma-separated prompt lengths in tokens (default: 1536 on CPU, 8192 on a GPU)",
        comma_separated(int),
    )
    depths: tuple[float, ...] = option(
        parse_depths("5"),
        "comma-separated places of the key in the text, 0 to 1; or how many, evenly spaced",
        parse_depths,
    )
    samples: int | None = option(
        None, "samples of each length and depth (default: 1 on CPU, 20 on a GPU)", int
    )
    controls: int | None = option(
        None, "how many of them the controls answer too (default: 1 on CPU, all on a GPU)", int
    )
    keys: int = option(1, "how many named keys are hidden; one is asked for", int)
    filler: str = option("noise", f"what surrounds the key: {', '.join(FILLERS)}")
    haystack: str | None = option(None, "text file for --filler text")
    stage: str = option(
        "prefill", "prefill: decoding is dense for block methods; both: it is sparse as well"
    )
    budget: str | float = option(
        MATCH, "density of the baselines: match (what cab realises), or a number", parse_budget
    )
    set: tuple[str, ...] = option(
        (), "field=value of CabConfig, e.g. mass=0.8; repeatable", repeatable=True
    )
    out: str = option("passkey_results", "folder for the results; a run found there goes on")
    seed: int = option(0, "of prompts and keys", int)
    device: str | None = option(None, "torch device (default: cuda where there is one)")
    dtype: str | None = option(None, "torch dtype (default: float32 on CPU, bfloat16 on a GPU)")

    def __post_init__(self) -> None:
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        small = torch.device(device).type == "cpu"
        samples = (1 if small else 20) if self.samples is None else self.samples
        controls = (1 if small else samples) if self.controls is None else self.controls
        lengths = self.lengths or ((1536,) if small else (8192,))
        # nothing is asked twice: a repeated name or number counts once
        resolved = {
            "methods": tuple(dict.fromkeys(self.methods)),
            "lengths": tuple(dict.fromkeys(lengths)),
            "depths": tuple(dict.fromkeys(self.depths)),
            "device": device,
            "dtype": self.dtype or ("float32" if small else "bfloat16"),
            "samples": samples,
            "controls": controls,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        self._validate()

    def _validate(self) -> None:
        for method in self.methods:
            self._check("methods", method in METHODS, f"names of {', '.join(METHODS)}", method)
        self._check("methods", self.methods, "at least one name")
        self._check("lengths", min(self.lengths) > 0, "numbers of tokens")
        self._check(
            "depths", self.depths and all(0 <= d <= 1 for d in self.depths), "shares from 0 to 1"
        )
        self._check("samples", self.samples > 0, "at least 1")
        self._check("controls", 0 <= self.controls <= self.samples, "0 to the number of samples")
        self._check("stage", self.stage in STAGES, f"one of {', '.join(STAGES)}")
        matched = [name for name in self.methods if METHODS[name].matched]
        if self.budget == MATCH:
            self._check(
                "budget",
                not matched or Cab.name in self.methods,
                f"a density such as 0.2 when {', '.join(matched)} is to match a budget and cab, "
                "whose density would be matched, is not among the methods",
            )
        else:
            self._check("budget", 0 < self.budget <= 1, "match or a density in (0, 1]")
        check_haystack(self.filler, self.keys, self.haystack)
        _ = self.cab_config  # refuses bad fields here rather than in the middle of a run

    def _check(self, name: str, holds: object, accepted: str, value: object = None) -> None:
        if not holds:
            value = getattr(self, name) if value is None else value
            raise ValueError(f"{name} must be {accepted}; got {value!r}.")

    @cached_property
    def cab_config(self) -> CabConfig:
        """CAB's config: ``--set`` over the defaults, sparse at any length."""
        chosen = dict(map(parse_assignment, self.set))
        fixed = {"min_length": 0, "sparse_decode": self.stage == "both"}
        return CabConfig.from_dict({**fixed, **chosen})

    def identity(self) -> dict[str, Any]:
        """What a sample's outcome depends on, without paths: results are committed.

        Methods and lengths are left out, so that a run can be extended by more of them.
        """
        text = None
        if self.haystack is not None:
            digest = hashlib.sha256(Path(self.haystack).read_bytes()).hexdigest()
            text = {"name": Path(self.haystack).name, "sha256": digest}
        model = Path(self.model).name if Path(self.model).exists() else self.model
        left_out = ("methods", "lengths", "out", "controls", "set")
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        return {**kept, "model": model, "haystack": text, "cab_config": self.cab_config.to_dict()}


# --- running


def run(settings: Settings) -> list[dict[str, Any]]:
    """Answer what is not answered yet, write all results, print the table; returns its rows."""
    out = Path(settings.out)
    started = report.utc_now()
    log = report.SampleLog(out / "samples.jsonl", report.fingerprint(settings.identity()))
    model, tokenizer = load_model(settings.model, settings.device, settings.dtype)
    haystack = Haystack(tokenizer, settings.filler, settings.keys, settings.haystack)

    answerer = Answerer(model, tokenizer, log, settings)
    with tqdm(total=len(settings.lengths) * answerer.samples_per_length, unit="sample") as bar:
        for length in settings.lengths:
            # kept for one length: every method is asked the same
            prompts = cache(partial(haystack.prompt, length, seed=settings.seed))
            for name in answerer.methods:
                answerer.run_cell(name, length, prompts, bar)

    told = {"methods": settings.methods, "lengths": settings.lengths, "set": settings.set}
    provenance = report.provenance(
        {**settings.identity(), **told, "controls": settings.controls},
        settings.device,
        settings.seed,
        started,
    )
    return write_report(out, log.samples, provenance)


class Answerer:
    """Asks a model and writes down what it said."""

    def __init__(self, model, tokenizer, log: report.SampleLog, settings: Settings) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.log = log
        self.settings = settings
        self.done = {tuple(s[name] for name in SAMPLE_FIELDS) for s in log.samples}
        # those that match a budget wait for the one that sets it
        chosen = sorted(settings.methods, key=lambda name: METHODS[name].matched)
        controls = CONTROLS if settings.controls else ()
        self.methods = [*chosen, *(name for name in controls if name not in chosen)]

    def samples_of(self, method: str) -> int:
        """Samples of each length and depth that ``method`` answers."""
        asked = method in self.settings.methods
        return self.settings.samples if asked else self.settings.controls

    @property
    def samples_per_length(self) -> int:
        return len(self.settings.depths) * sum(map(self.samples_of, self.methods))

    def run_cell(self, name: str, length: int, prompts: Callable[..., Prompt], bar: tqdm) -> None:
        """Answer the samples of one method at one length; ``prompts(depth, index, ...)``."""
        settings = self.settings
        cell = (name, length, settings.keys)
        samples = list(product(settings.depths, range(self.samples_of(name))))
        todo = [sample for sample in samples if (*cell, *sample) not in self.done]
        bar.set_description(f"{name} at {length}")
        bar.update(len(samples) - len(todo))
        if not todo:
            return
        budget = self.budget(length) if METHODS[name].matched else None
        method = METHODS[name].fit(Cell(settings.cab_config, budget, length, self.model.device))
        with method.applied(self.model) as densities:
            for depth, index in todo:
                prompt = prompts(depth, index, hide_needle=method.hides_needle)
                place = dict(zip(SAMPLE_FIELDS, (*cell, depth, index), strict=True))
                outcome = self.ask(method, prompt, densities)
                self.log.append({**place, "budget": budget, **outcome})
                bar.update()

    def ask(self, method: Method, prompt: Prompt, densities: LayerDensities) -> dict[str, Any]:
        """What became of one prompt; ``density`` is over all layers, dense ones counting 1."""
        started = time.perf_counter()
        answer = self.answer(prompt)
        seconds = time.perf_counter() - started
        layers = densities()
        sparse = [density for density in layers if density is not None]
        needle = prompt.needle
        return {
            "tokens": len(prompt.tokens),
            "needle": needle,
            "reached": needle and method.reaches(len(prompt.tokens), prompt.asking, needle),
            "density": fmean(1.0 if density is None else density for density in layers),
            "sparse_density": fmean(sparse) if sparse else None,
            "expected": prompt.key,
            "answer": answer,
            "correct": answered(answer, prompt.key),
            "seconds": round(seconds, 3),
        }

    def budget(self, length: int) -> float:
        """The density baselines are to match at ``length``, in the layers that are not dense."""
        if self.settings.budget != MATCH:
            return self.settings.budget
        ours = (Cab.name, length, self.settings.keys)
        realised = [s["sparse_density"] for s in self.log.samples if _cell(s) == ours]
        return fmean(1.0 if density is None else density for density in realised)

    @torch.no_grad()
    def answer(self, prompt: Prompt) -> str:
        """What the model says next, greedily."""
        own = self.model.generation_config
        greedy = GenerationConfig(
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
        )
        ids = torch.tensor([prompt.tokens], device=self.model.device)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=greedy
        )
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def _cell(sample: dict[str, Any]) -> tuple:
    return tuple(sample[name] for name in CELL_FIELDS)


# --- results, from samples alone


def summarise(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a (method, length, keys): accuracy and its Wilson interval, difference to dense.

    The difference is over the samples both answered, with Newcombe's interval. Rows of a method
    that cannot see everything also count the samples whose needle it could not see.
    """
    cells: dict[tuple, list[dict[str, Any]]] = {}
    for sample in samples:
        cells.setdefault(_cell(sample), []).append(sample)
    dense = {_question(s): s for s in samples if s["method"] == Dense.name}
    order = list(METHODS)
    rows = []
    for cell in sorted(cells, key=lambda c: (c[1], c[2], order.index(c[0]))):
        members = cells[cell]
        correct = sum(s["correct"] for s in members)
        low, high = report.wilson(correct, len(members))
        row = {
            **dict(zip(CELL_FIELDS, cell, strict=True)),
            "n": len(members),
            "correct": correct,
            "accuracy": correct / len(members),
            "low": low,
            "high": high,
            "density": fmean(s["density"] for s in members),
            "budget": members[0]["budget"],
        }
        pairs = [(s, dense[_question(s)]) for s in members if _question(s) in dense]
        if pairs and cell[0] != Dense.name:
            ours, base = zip(*((s["correct"], d["correct"]) for s, d in pairs), strict=True)
            difference = report.paired_difference(ours, base)
            row |= dict(zip(("delta", "delta_low", "delta_high"), difference, strict=True))
            row |= {"pairs": len(pairs), "same": sum(s["answer"] == d["answer"] for s, d in pairs)}
        if any(s["reached"] is not None for s in members):
            outside = [s["correct"] for s in members if not s["reached"]]
            row |= {"outside_n": len(outside), "outside_correct": sum(outside)}
        rows.append(row)
    return rows


def _question(sample: dict[str, Any]) -> tuple:
    return sample["length"], sample["keys"], sample["depth"], sample["index"]


def _interval(key: str, low: str, high: str, form: str = ".2f") -> Callable[[dict], str | None]:
    def shown(row: dict[str, Any]) -> str | None:
        if row.get(key) is None:
            return None
        return f"{row[key]:{form}} [{row[low]:{form}}, {row[high]:{form}}]"

    return shown


COLUMNS = {
    "method": "method",
    "length": "length",
    "keys": "keys",
    "correct": lambda row: f"{row['correct']} of {row['n']}",
    "accuracy [95 %]": _interval("accuracy", "low", "high"),
    "density": "density",
    "to dense [95 %]": _interval("delta", "delta_low", "delta_high", "+.2f"),
}


def readings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the rows say, a sentence each: first CAB, then the controls."""
    said = []
    for row in rows:
        where = f"at {row['length']} tokens"
        if row["method"] == Cab.name and "pairs" in row:
            difference = COLUMNS["to dense [95 %]"](row)
            said.append(
                f"{where.capitalize()} cab answers {row['correct']} of {row['n']} attending "
                f"{row['density']:.0%} of the pairs; its difference to dense is {difference}."
            )
        if "outside_n" in row:
            said.append(
                f"{row['method']} found {row['outside_correct']} of {row['outside_n']} needles "
                f"outside its window {where} (it should find none)."
            )
        if row["method"] == Full.name and "pairs" in row:
            said.append(
                f"full budget gave dense's very words in {row['same']} of {row['pairs']} samples "
                f"{where} (kernels round differently, so not all need agree below float32)."
            )
        if row["method"] == NoNeedle.name:
            said.append(f"Without the needle, {row['correct']} of {row['n']} are guessed {where}.")
    if any(row["method"] == H2O.name for row in rows):
        said.append("h2o prefills densely: its density is the share of the prompt's keys it keeps.")
    return said


def write_report(
    out: Path, samples: Sequence[dict[str, Any]], provenance: dict[str, Any]
) -> list[dict[str, Any]]:
    """Derive results.json, results.md and heatmap.png from the samples; prints the table."""
    settings = provenance["settings"]
    constant = {name: settings[name] for name in ("stage", "filler")}
    rows = [{**row, **constant} for row in summarise(samples)]
    report.write_results(out, rows, provenance)

    table = report.markdown_table(rows, COLUMNS)
    said = "\n".join(f"* {sentence}" for sentence in readings(rows))
    made = (
        f"Model {settings['model']} in {settings['dtype']} on {provenance['device']}, filler "
        f"{settings['filler']}, stage {settings['stage']}, seed {settings['seed']}; "
        + ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
        + f"; commit {provenance['commit'] or 'unknown'}; finished {provenance['finished']}."
    )
    explained = (
        "Accuracy with Wilson's interval, paired difference to dense with Newcombe's, both 95 %. "
        f"Density: attended over causal (query, key) pairs. {STAGES[settings['stage']]}"
    )
    report.write_atomically(
        out / "results.md",
        f"# Passkey retrieval\n\n{table}\n\n{said}\n\n{explained}\n\n"
        f"![accuracy by depth and length](heatmap.png)\n\n{made}\n",
    )
    draw_heatmap(out / "heatmap.png", samples)
    print(f"\n{table}\n\n{said}\n\nheat map: {out / 'heatmap.png'}\ntable: {out / 'results.md'}")
    return rows


def draw_heatmap(path: Path, samples: Sequence[dict[str, Any]]) -> None:
    """Accuracy by depth and length, one panel a method."""
    panels: dict[str, dict[tuple[float, float], float]] = {}
    for method in METHODS:
        grid: dict[tuple[float, float], list[bool]] = {}
        for s in samples:
            if s["method"] == method:
                grid.setdefault((s["length"], s["depth"]), []).append(s["correct"])
        if grid:
            panels[method] = {place: fmean(outcomes) for place, outcomes in grid.items()}
    report.heatmap(path, panels, "prompt length (tokens)", "depth of the key", "passkey retrieval")
