"""Which model types attend as they should: each type of causal LM, tiny and random, against itself.

Every type of transformers' registry is built in miniature (`cab_hf.eval.tiny_types`), a process
each, and asked for logits by the implementation it comes with and by "cab" at full budget, which
must not differ: loaded by name and under `apply_cab`, with and without padding.
"""

from __future__ import annotations

import copy
import multiprocessing
import re
import resource
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cab_hf.config import CabConfig
from cab_hf.engines.sparse import attended
from cab_hf.eval import charts
from cab_hf.eval.experiment import Experiment, Row
from cab_hf.eval.report import column, markdown_table
from cab_hf.eval.tiny_types import FIRST_TOKEN, VOCABULARY, causal_types, tiny_model, window_fields
from cab_hf.patches import apply_cab
from cab_hf.runs.settings import comma_separated, option, require

TOKENS, PADDING = 150, 43
# blocks small enough that a few tokens are many of them, and all of them kept
FULL = CabConfig(query_block=32, key_block=16, min_length=0, mass_threshold=0.0)
TOLERANCE = 1e-4
# how cab is turned on; ``windowed`` is a model with sliding windows, where a type comes without
DOORS = ("by_name", "applied", "windowed")
# what our sentences speak of
OURS = re.compile("cab|context_parallel")
EXACT, REFUSED, IN_PART = "exact", "refused", "refused in part"
NOT_OURS, WRONG, FAILS, NOT_BUILT = "not reached", "WRONG", "fails", "not built"
# the worse comes first
VERDICTS = (WRONG, FAILS, NOT_OURS, IN_PART, REFUSED, EXACT, NOT_BUILT)


@dataclass(frozen=True)
class Settings:
    """What a run is told; a ValueError names the option that is refused."""

    types: tuple[str, ...] = option(
        (), "comma-separated model types (default: all)", comma_separated(str)
    )
    timeout: int = option(300, "seconds for one type", int)
    memory: int = option(12, "GiB of address space for one type", int)
    out: str = option("families_results", "folder for the results; a run found there goes on")

    def __post_init__(self) -> None:
        known = causal_types()
        for each in self.types:
            require(self, "types", each in known, "types of AutoModelForCausalLM", each)
        require(self, "timeout", self.timeout > 0, "more than 0 seconds")
        require(self, "memory", self.memory > 0, "more than 0 GiB")


class Families(Experiment):
    """A sample is what one type does behind both doors, with every input."""

    name = "families"
    purpose = "whether every type of causal LM attends exactly or is refused"
    title = "Which model types attend as they should?"
    caption = "model types by what they do"
    Settings = Settings
    CASE = ("model_type",)
    GROWS = ("timeout", "memory")
    EXACTLY: ClassVar[str] = "attend exactly"
    # columns of a type that was measured
    DETAILS: ClassVar[Mapping[str, Any]] = {
        "type": "model_type",
        **{"by name": "by_name", "apply_cab": "applied", "with windows": "windowed"},
        **{"layers": "layers", "sparse": "sparse", "off by": column("{:.0e}".format, "difference")},
        "not compared": lambda row: ", ".join(row["reads_padding"]) or None,
        "because": "said",
    }

    def types(self) -> Sequence[str]:
        return self.settings.types or causal_types()

    def expected(self) -> int:
        return len(self.types())

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for model_type in self.types():
            yield {"model_type": model_type}

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        given = self.settings
        return in_a_process(case["model_type"], given.timeout, given.memory)

    @classmethod
    def rows(cls, samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A type a row: its verdict, what was said, and how far it was off."""
        return [cls.row(sample) for sample in sorted(samples, key=itemgetter("model_type"))]

    @staticmethod
    def row(sample: Row) -> dict[str, Any]:
        """The verdict on a type; ``layers`` and ``sparse`` count attention layers that ran by cab.

        Inputs whose padding a type reads by its own attention are compared with nothing.
        """
        doors = {name: sample[name] for name in DOORS if name in sample}
        padded = sample.get("reads_padding")
        result = {
            name: [
                {**each, "layers": door["layers"]}
                for given, each in door["inputs"].items()
                if given not in padded
            ]
            for name, door in doors.items()
        }
        row = judged(sample, result, ("difference",), TOLERANCE)
        if not doors:
            return row
        ran = {name: max(door[name] for door in doors.values()) for name in ("layers", "sparse")}
        return {**row, **ran, "reads_padding": padded}

    @classmethod
    def tables(cls, rows: Sequence[Row]) -> dict[str, str]:
        """Which types do what; then a table for each of these."""
        return verdict_tables(rows, cls.DETAILS)

    @classmethod
    def readings(cls, rows: Sequence[Row]) -> list[str]:
        count = Counter(row["verdict"] for row in rows)
        built = len(rows) - count[NOT_BUILT]
        wrong = built - count[EXACT] - count[REFUSED]
        return [
            f"Of {len(rows)} types {built} could be built: {count[EXACT]} {cls.EXACTLY}, "
            f"{count[REFUSED]} are refused in a sentence, {wrong or 'none'} do anything else."
        ]

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return (
            "Every type of `AutoModelForCausalLM` is built with a few layers and random weights, "
            f"and given {TOKENS} tokens in float32, plain and with {PADDING} tokens of padding "
            "left and right; its logits are compared with those of the implementation it comes "
            f"with, at mass_threshold 0 and blocks of {FULL.query_block} x {FULL.key_block}: "
            'loaded with `attn_implementation="cab"`, under `apply_cab`, and under that with '
            f"sliding windows, where a type may have some and comes without. *{EXACT}*: never off "
            f"by more than {TOLERANCE:g}, and layers attend through cab (`sparse` of them under a "
            f"plan, the others in a sliding window); *{NOT_OURS}*: the same logits, but no layer "
            f"asked cab for them; *{IN_PART}*: some inputs or ways of loading are refused; "
            f"*{FAILS}*: an error that is no refusal. Where padding changes what a type computes "
            "by its own implementation, there is nothing to compare that input with, and it is "
            "left out."
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """How many types do what."""
        count = Counter(row["verdict"] for row in rows)
        shown = [verdict for verdict in reversed(VERDICTS) if count[verdict]]
        with charts.figure(path, 1, 1, figsize=(6, 0.6 + 0.4 * len(shown))) as axes:
            bars = axes[0, 0].barh(shown, [count[verdict] for verdict in shown])
            axes[0, 0].bar_label(bars, padding=2)
            axes[0, 0].margins(x=0.1)
            axes[0, 0].set_xlabel("model types")


EXPERIMENT = Families


# --- what is said of a type


def judged(
    sample: Row, results: Mapping[str, Sequence[Row]], differences: Sequence[str], tolerance: float
) -> dict[str, Any]:
    """The verdict on a type and on each part of what was ``results``, and the first thing said.

    Args:
        results: by part, the outcome of every input.
        differences: fields of an outcome, of which a row has the largest.
    """
    row = {name: sample.get(name) for name in ("model_type", "model")}
    if "not_built" in sample:
        return {**row, "verdict": NOT_BUILT, "said": sample["not_built"]}

    def verdict(each: Row) -> str:
        if "refused" in each or "failed" in each:
            return REFUSED if "refused" in each else FAILS
        if not all(each[name] <= tolerance for name in differences):
            return WRONG
        return EXACT if each["layers"] else NOT_OURS

    verdicts = {name: worst(list(map(verdict, some))) for name, some in results.items()}
    every = [each for some in results.values() for each in some]
    said = (each.get("refused") or each.get("failed") for each in every)
    return {
        **row,
        "verdict": worst(list(verdicts.values())),
        **verdicts,
        "said": next(filter(None, said), None),
        **{name: max((e[name] for e in every if name in e), default=None) for name in differences},
    }


def worst(verdicts: Sequence[str]) -> str:
    """What is said of all of them together."""
    return IN_PART if set(verdicts) == {EXACT, REFUSED} else min(verdicts, key=VERDICTS.index)


def verdict_tables(rows: Sequence[Row], details: Mapping[str, Any]) -> dict[str, str]:
    """Heading -> table of the rows of some verdicts; of types that were measured, ``details``."""
    tables = {"Types": _overview(rows)}
    for heading, verdicts, columns in (
        ("Not as it should be", (WRONG, FAILS, NOT_OURS, IN_PART), details),
        ("Exact", (EXACT,), details),
        ("Refused", (REFUSED,), {"type": "model_type", "model": "model", "because": "said"}),
        ("Not built", (NOT_BUILT,), {"type": "model_type", "because": "said"}),
    ):
        results = [row for row in rows if row["verdict"] in verdicts]
        if results:
            tables[heading] = markdown_table(results, columns)
    return tables


def _overview(rows: Sequence[Row]) -> str:
    shown = []
    for verdict in VERDICTS:
        types = [row["model_type"] for row in rows if row["verdict"] == verdict]
        if types:
            shown.append({"verdict": verdict, "types": len(types), "which": ", ".join(types)})
    return markdown_table(shown, ["verdict", "types", "which"])


# --- one type, in a process of its own


def in_a_process(model_type: str, timeout: float, memory: float) -> dict[str, Any]:
    """What `examine` finds, in at most ``timeout`` seconds and ``memory`` GiB of address space.

    A type that needs more, or kills its process, is as good as not built.
    """
    # children are forked from a process that has imported everything and computed nothing
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, model_type, memory), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            return {"not_built": f"took longer than {timeout:g} seconds"}
        return ours.recv()
    except EOFError:
        process.join()
        return {"not_built": f"its process died with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _child(pipe: Connection, model_type: str, memory: float) -> None:
    limit = round(memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    pipe.send(examine(model_type))


def examine(model_type: str) -> dict[str, Any]:
    """What a type does behind each of `DOORS`, or ``{"not_built": why}``."""
    try:
        model, expected, reads_padding = built(model_type)
        result = {
            "model": type(model).__name__,
            "reads_padding": reads_padding,
            "by_name": behind(by_name, model, expected),
            "applied": behind(applied, model, expected),
        }
        windows = window_fields(model_type)
        if windows:
            model, expected, _ = built(model_type, **windows)
            result["windowed"] = behind(applied, model, expected)
        return result
    except Exception as error:
        return {"not_built": _last_line(error)}


def built(model_type: str, **values: Any) -> tuple[PreTrainedModel, dict[str, Tensor], list[str]]:
    """A model, its logits by its own attention, and the inputs of which it reads the padding."""
    model = tiny_model(model_type, **values)
    expected = {name: logits(model, **given) for name, given in inputs().items()}
    padded = {name: logits(model, **given) for name, given in inputs(FIRST_TOKEN).items()}
    read = [name for name in expected if _difference(padded[name], expected[name]) > TOLERANCE]
    return model, expected, read


def inputs(padding: int | None = None) -> dict[str, dict[str, Tensor]]:
    """Name -> what a model is given, two rows of tokens, the first of them padded.

    What stands where there is padding matters to no model that heeds its mask: any tokens, or
    ``padding`` everywhere.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FIRST_TOKEN, VOCABULARY, (2, TOKENS), generator=generator)
    result = {"plain": {"input_ids": ids}}
    for name, padded in (("left padded", slice(PADDING)), ("right padded", slice(-PADDING, None))):
        mask, tokens = torch.ones_like(ids), ids.clone()
        mask[0, padded] = 0
        if padding is not None:
            tokens[0, padded] = padding
        result[name] = {"input_ids": tokens, "attention_mask": mask}
    return result


def logits(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
    """[tokens, vocabulary] of all tokens that are no padding.

    Raises:
        ValueError: where one is not finite.
    """
    # some types draw as they go
    torch.manual_seed(2)
    masked = {} if attention_mask is None else {"attention_mask": attention_mask}
    with torch.no_grad():
        result = model(input_ids=input_ids, **masked).logits
    result = result.flatten(0, 1) if attention_mask is None else result[attention_mask.bool()]
    if not result.isfinite().all():
        raise ValueError("its logits are not finite")
    return result


def by_name(model: PreTrainedModel) -> PreTrainedModel:
    """One of the same weights, made with ``attn_implementation="cab"``."""
    config = copy.deepcopy(model.config)
    config.get_text_config().cab_config = FULL.to_dict()
    named = type(model)._from_config(config, dtype=torch.float32, attn_implementation="cab")
    named.load_state_dict(model.state_dict())
    return named.eval()


def applied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy under `apply_cab`."""
    return apply_cab(copy.deepcopy(model), FULL)


def behind(
    door: Callable[[PreTrainedModel], PreTrainedModel],
    model: PreTrainedModel,
    expected: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The outcome of every input, and how many attention layers ran by cab, and sparsely."""
    with counted("cab") as layers:
        try:
            switched = door(model)
        except Exception as error:
            every = dict.fromkeys(expected, outcome(error))
            return {"inputs": every, "layers": 0, "sparse": 0}
        result = {}
        for name, given in inputs().items():
            try:
                result[name] = {
                    "difference": _difference(logits(switched, **given), expected[name])
                }
            except Exception as error:
                result[name] = outcome(error)
    sparse = sum(module in attended for module in layers)
    return {"inputs": result, "layers": len(layers), "sparse": sparse}


def _difference(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().max())


@contextmanager
def counted(implementation: str) -> Iterator[set[nn.Module]]:
    """The modules that attend by ``implementation`` inside of the block."""
    function, modules = ALL_ATTENTION_FUNCTIONS[implementation], set()

    def counting(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        modules.add(module)
        return function(module, *arguments, **options)

    AttentionInterface.register(implementation, counting)
    try:
        yield modules
    finally:
        AttentionInterface.register(implementation, function)


def outcome(error: Exception) -> dict[str, str]:
    """A refusal says what it refuses; everything else failed."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | NotImplementedError) and OURS.search(text):
        return {"refused": text}
    return {"failed": _last_line(error)}


def _last_line(error: Exception) -> str:
    return " ".join(traceback.format_exception_only(error)[-1].split())[:300]
