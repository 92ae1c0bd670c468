"""Which model types attend as they should: each type of causal LM, tiny and random, against itself.

Every type of transformers' registry is built in miniature (`cab_hf.eval.tiny_types`), in processes
of its own, and computed by the implementation it comes with and by "cab" at full budget, which must
not differ. One process compares logits: loaded by name and under `apply_cab`, with and without
padding. Several compare a training step inside `cab_hf.context_parallel` with that of one.
"""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import re
import resource
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import cab_hf
from cab_hf import distributed
from cab_hf.config import CabConfig
from cab_hf.distributed.batch import IGNORED
from cab_hf.engines.sparse import attended
from cab_hf.eval import charts
from cab_hf.eval.experiment import Experiment, Row
from cab_hf.eval.report import column, markdown_table
from cab_hf.eval.tiny_types import (
    FIRST_TOKEN,
    ROPE,
    VOCABULARY,
    causal_types,
    tiny_config,
    tiny_model,
    window_fields,
)
from cab_hf.patches import apply_cab
from cab_hf.runs.settings import comma_separated, option, require

TOKENS, PADDING, BLOCK = 150, 43, 32
# documents of one sequence, one of them a single token
DOCUMENTS = (70, 1, 79)
TEXT, PACKED = "one text", "packed"
SAMPLE = "sample.json"  # what the processes of a type leave
# blocks small enough that a few tokens are many of them, and all of them kept
FULL = CabConfig(query_block=32, key_block=16, min_length=0, mass_threshold=0.0)
# how far results may differ: logits of one process absolutely, those over ranks relatively
LIMITS = {"difference": 1e-4, "loss": 1e-5, "logits": 1e-5, "gradients": 1e-5}
# of the largest gradient of any parameter, as much as those count that are smaller
LEAST_SCALE = 1e-6
# how a model is made: cab turned on in two ways in one process, three builds over ranks;
# ``windowed`` has sliding windows and ``dynamic`` dynamic RoPE, where a type comes without
PARTS = ("by_name", "applied", "plain", "windowed", "dynamic")
# weights of a loss that counts beside the others, where a type has routers
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
# positions of which a test has more, and frequencies that depend on how many it has
DYNAMIC = {
    "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0},
    "max_position_embeddings": 64,
}
# what only a loss needs
LABELS = ("labels", "shift_labels", "num_items_in_batch")
# how refusals of this project are known from errors of others
OURS = re.compile("cab|context_parallel")
EXACT, REFUSED, IN_PART = "exact", "refused", "refused in part"
NOT_OURS, WRONG, FAILS, NOT_BUILT = "not reached", "WRONG", "fails", "not built"
# the worse comes first
VERDICTS = (WRONG, FAILS, NOT_OURS, IN_PART, REFUSED, EXACT, NOT_BUILT)
# field of a row -> heading and value of its column, where a run has that field
DETAILS = {
    "model_type": ("type", "model_type"),
    "by_name": ("by name", "by_name"),
    "applied": ("apply_cab", "applied"),
    **{name: (name, name) for name in ("plain", "windowed", "dynamic", "dtype", "layers")},
    "sparse": ("sparse", "sparse"),
    "difference": ("off by", column("{:.0e}".format, "difference")),
    **{
        name: (f"{name} off by", column("{:.0e}".format, name))
        for name in ("loss", "logits", "gradients")
    },
    "reads_padding": ("not compared", lambda row: ", ".join(row["reads_padding"]) or None),
    "said": ("because", "said"),
}


@dataclass(frozen=True)
class Settings:
    """The options of the command; a ValueError names the option that is refused."""

    types: tuple[str, ...] = option(
        (), "comma-separated model types (default: all)", comma_separated(str)
    )
    ranks: int = option(1, "processes over which context_parallel splits a text", int)
    timeout: int = option(300, "seconds for one type", int)
    memory: int = option(24, "GiB of address space for a process", int)
    out: str = option("families_results", "folder for the results; a run found there goes on")

    def __post_init__(self) -> None:
        known = causal_types()
        for each in self.types:
            require(self, "types", each in known, "types of AutoModelForCausalLM", each)
        require(self, "ranks", self.ranks > 0, "at least 1")
        require(self, "timeout", self.timeout > 0, "more than 0 seconds")
        require(self, "memory", self.memory > 0, "more than 0 GiB")


class Families(Experiment):
    """A sample is what one type does in each of `PARTS`, with every input."""

    name = "families"
    purpose = "whether every type of causal LM attends exactly or is refused"
    title = "Model types that attend as they should"
    caption = "model types by what they do"
    Settings = Settings
    CASE = ("model_type",)
    GROWS = ("timeout", "memory")

    def types(self) -> Sequence[str]:
        return self.settings.types or causal_types()

    def expected(self) -> int:
        return len(self.types())

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for model_type in self.types():
            yield {"model_type": model_type}

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        given = self.settings
        return in_processes(case["model_type"], given.ranks, given.timeout, given.memory)

    @classmethod
    def rows(cls, samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A type a row: its verdict, what was said, and how far it was off."""
        return [judged(sample) for sample in sorted(samples, key=itemgetter("model_type"))]

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """Which types do what; then a table for each of these."""
        overview = []
        for verdict in VERDICTS:
            types = [row["model_type"] for row in rows if row["verdict"] == verdict]
            if types:
                which = ", ".join(types)
                overview.append({"verdict": verdict, "types": len(types), "which": which})
        tables = {"Types": markdown_table(overview, ["verdict", "types", "which"])}
        known = {name for row in rows for name in row}
        details = dict(DETAILS[name] for name in DETAILS if name in known)
        for heading, verdicts, columns in (
            ("Not as it should be", (WRONG, FAILS, NOT_OURS, IN_PART), details),
            ("Exact", (EXACT,), details),
            ("Refused", (REFUSED,), {"type": "model_type", "model": "model", "because": "said"}),
            ("Not built", (NOT_BUILT,), {"type": "model_type", "because": "said"}),
        ):
            chosen = [row for row in rows if row["verdict"] in verdicts]
            if chosen:
                tables[heading] = markdown_table(chosen, columns)
        return tables

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        count = Counter(row["verdict"] for row in rows)
        built = len(rows) - count[NOT_BUILT]
        wrong = built - count[EXACT] - count[REFUSED]
        return [
            f"Of {len(rows)} types {built} could be built: {count[EXACT]} attend exactly, "
            f"{count[REFUSED]} are refused in a sentence, {wrong or 'none'} do anything else."
        ]

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        ranks = settings["ranks"]
        blocks = f"mass_threshold 0 and blocks of {FULL.query_block} x {FULL.key_block}"
        if ranks == 1:
            how = (
                f"is given {TOKENS} tokens in float32, plain and with {PADDING} tokens of padding "
                "left and right; its logits are compared with those of the implementation it comes "
                f'with, at {blocks}: loaded with `attn_implementation="cab"`, under `apply_cab`, '
                "and *windowed*: under that with sliding windows, where a type may have some and "
                f"comes without. *{EXACT}*: never off by more than {LIMITS['difference']:g}, and "
                "layers attend through cab (`sparse` of them under a plan, the others in a sliding "
                "window). Inputs whose padding a type reads by its own implementation are left out."
            )
        else:
            how = (
                "takes a training step, in float64, or in float32 where its own code wants that, "
                f"of two rows of {TOKENS} tokens on {ranks} ranks (gloo), under `apply_cab` at "
                f"{blocks}, inside `cab_hf.context_parallel`. *{TEXT}*: one document, against the "
                f"attention that a type comes with, in one process; *{PACKED}*: documents of "
                f"{', '.join(map(str, DOCUMENTS))} tokens, against cab in one process. Routers add "
                "their loss where a type has one; of a type whose own loss takes other labels, the "
                "cross-entropy of its logits is taken. *windowed*: with sliding windows, and "
                "*dynamic*: with rotary frequencies that depend on the longest position, where a "
                f"type may have them and comes without. *{EXACT}*: loss, logits and the summed "
                f"gradients of all parameters are off by at most {LIMITS['loss']:g} of the largest "
                "of each, and layers attend through cab (gradients of less than "
                f"{LEAST_SCALE:g} of the largest of all count as that much)."
            )
        return (
            "Every type of `AutoModelForCausalLM` is built with a few layers and random weights, "
            f"and {how} *{NOT_OURS}*: the same numbers, but no layer attends through cab; "
            f"*{IN_PART}*: some inputs or builds are refused; *{FAILS}*: an error that is no "
            "refusal."
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


def judged(sample: Row) -> dict[str, Any]:
    """The verdict on a type and on each of its parts, the first message, the largest differences.

    ``layers`` counts attention layers that ran by cab, ``sparse`` those of them under a plan.
    """
    row = {name: sample.get(name) for name in ("model_type", "model")}
    if "not_built" in sample:
        return {**row, "verdict": NOT_BUILT, "said": sample["not_built"]}
    fields = {name: sample[name] for name in ("dtype", "reads_padding") if name in sample}
    outcomes, counts = {}, {"layers": [0], "sparse": []}
    for name in (name for name in PARTS if name in sample):
        part = sample[name]
        # one process counts layers over all inputs, ranks for each
        inputs = part.get("inputs", part)
        outcomes[name] = [
            {"layers": part.get("layers"), **each}
            for given, each in inputs.items()
            if given not in fields.get("reads_padding", ())
        ]
        for of, counted_layers in counts.items():
            counted_layers += [each[of] for each in (part, *inputs.values()) if of in each]
    every = [each for some in outcomes.values() for each in some]
    said = (each.get("refused") or each.get("failed") for each in every)
    verdicts = {name: worst(list(map(verdict_on, some))) for name, some in outcomes.items()}
    alone = "reads_padding" in sample
    differences = [name for name in LIMITS if (name == "difference") == alone]
    return {
        **row,
        "verdict": worst(list(verdicts.values())),
        **verdicts,
        "said": next(filter(None, said), None),
        **{name: max((e[name] for e in every if name in e), default=None) for name in differences},
        **{name: max(some) for name, some in counts.items() if some},
        **fields,
    }


def verdict_on(outcome: Row) -> str:
    """The verdict on one input."""
    if "refused" in outcome or "failed" in outcome:
        return REFUSED if "refused" in outcome else FAILS
    if not all(outcome[name] <= limit for name, limit in LIMITS.items() if name in outcome):
        return WRONG
    return EXACT if outcome["layers"] else NOT_OURS


def worst(verdicts: Sequence[str]) -> str:
    """The verdict on all of them together."""
    return IN_PART if set(verdicts) == {EXACT, REFUSED} else min(verdicts, key=VERDICTS.index)


# --- one type, in processes of its own


def in_processes(model_type: str, ranks: int, timeout: float, memory: float) -> dict[str, Any]:
    """The sample of a type, from one process or from the first of several in a group (gloo).

    A type that needs more than ``timeout`` seconds, or kills a process, counts as not built.

    Args:
        memory: GiB of address space of each process.
    """
    # children are forked from a process that has imported everything and computed nothing
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    ends = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        words = model_type, memory, ranks, folder
        group = start_processes(_child, words, ranks, False, True, "forkserver")
        try:
            while not group.join(max(0.0, ends - time.monotonic())):
                if time.monotonic() > ends:
                    return {"not_built": f"took longer than {timeout:g} seconds"}
            return json.loads(Path(folder, SAMPLE).read_text())
        except (ProcessExitedException, ProcessRaisedException) as error:
            code = getattr(error, "exit_code", 1)
            return {"not_built": f"its process died with exit code {code}"}
        finally:
            for process in group.processes:
                process.kill()
                process.join()


def _child(rank: int, model_type: str, memory: float, ranks: int, folder: str) -> None:
    limit = round(memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    if ranks == 1:
        sample = examine(model_type)
    else:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        sample = examine_over_ranks(model_type)
    if rank == 0:
        Path(folder, SAMPLE).write_text(json.dumps(sample))
    # a group whose ranks did not go on together would wait for them
    os._exit(0)


def examine(model_type: str) -> dict[str, Any]:
    """What a type does behind each of `PARTS` in one process, or ``{"not_built": why}``."""
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
    read = [
        name
        for name in expected
        if _difference(padded[name], expected[name]) > LIMITS["difference"]
    ]
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


# --- one type, on every rank


class Way(NamedTuple):
    """How a step is computed: its dtype, and whether by the loss that a type comes with."""

    dtype: str
    own_loss: bool


WAYS = tuple(Way(dtype, own) for own in (True, False) for dtype in ("float64", "float32"))


class Step(NamedTuple):
    """A training step: the loss, logits [B, N, V], and the gradients of parameters by name."""

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]


def examine_over_ranks(model_type: str) -> dict[str, Any]:
    """What a type does in each build of `builds`, or ``{"not_built": why}``; all ranks call this.

    Every rank finds the same, and computes for itself what a step in one process gives.
    """
    try:
        given = builds(model_type)
    except Exception as error:
        return {"not_built": _last_line(error)}
    result: dict[str, Any] = {}
    for name, fields in given.items():
        try:
            each = step_of_build(model_type, fields)
        except Exception as error:
            # ranks that do not go on together; the group of this rank ends with its process
            return {"model": None, **result, name: {TEXT: {"failed": _last_line(error)}}}
        if "not_built" not in each:
            inputs = each.pop("inputs")
            result = {**each, **result, name: inputs}
        elif name == "plain":
            return each
    return result


def builds(model_type: str) -> dict[str, dict[str, Any]]:
    """Name -> the fields of `tiny_config` with values of their own."""
    config = tiny_config(model_type)
    has = vars(config)
    routers = {name: value for name, value in ROUTERS.items() if name in has}
    result = {"plain": routers}
    windows = window_fields(model_type)
    if windows:
        result["windowed"] = {**routers, **windows}
    rope = has.get("rope_parameters") or {}
    if rope.get("rope_type") == "default":
        fields = {**rope, **DYNAMIC["rope_parameters"]}
        result["dynamic"] = {**routers, **DYNAMIC, "rope_parameters": fields}
    return result


def step_of_build(model_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of every input of one build."""
    try:
        model = tiny_model(model_type, **fields)
    except Exception as error:
        return {"not_built": _last_line(error)}
    known = {"model": type(model).__name__}
    try:
        apply_cab(model, FULL)
    except Exception as error:
        return {**known, "inputs": dict.fromkeys((TEXT, PACKED), outcome(error))}
    try:
        alone, way, expected = in_one_process(model_type, fields)
        apply_cab(alone, FULL)
    except Exception as error:
        return {"not_built": _last_line(error)}
    model = model.to(getattr(torch, way.dtype))
    result = {TEXT: over_ranks(model, texts(), way, expected)}
    try:
        expected = step(alone, packed(texts()), way)
    except Exception as error:
        result[PACKED] = outcome(error)
    else:
        result[PACKED] = over_ranks(model, packed(texts()), way, expected)
    return {**known, "dtype": way.dtype, "inputs": result}


def in_one_process(model_type: str, fields: Mapping[str, Any]) -> tuple[PreTrainedModel, Way, Step]:
    """A model, the first of `WAYS` that it can go, and its step by its own attention."""
    for way in WAYS:
        model = tiny_model(model_type, **fields).to(getattr(torch, way.dtype))
        try:
            result = step(model, texts(), way)
            if not result.logits.isfinite().all():
                raise ValueError("its logits are not finite")
            return model, way, result
        except Exception:
            if way == WAYS[-1]:
                raise


def texts() -> dict[str, Tensor]:
    """Two rows of tokens, of which the first few are not to be learnt."""
    ids = inputs()["plain"]["input_ids"]
    labels = ids.clone()
    labels[:, :7] = -100
    return {"input_ids": ids, "labels": labels}


def packed(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tokens as `DOCUMENTS`."""
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])
    return {**batch, "position_ids": positions.expand_as(batch["input_ids"])}


def step(model: PreTrainedModel, inputs: Mapping[str, Tensor], way: Way) -> Step:
    """A training step on a batch, or on what `cab_hf.distributed.shard` makes of one."""
    model.zero_grad()
    # some types draw as they go
    torch.manual_seed(2)
    if way.own_loss:
        result = model(**inputs, use_cache=False)
        loss = result.loss
    else:
        unlabelled = {name: x for name, x in inputs.items() if name not in LABELS}
        result = model(**unlabelled, use_cache=False)
        loss = _loss(result.logits, inputs)
    loss.backward()
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }
    return Step(loss.detach(), result.logits.detach(), gradients)


def _loss(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The mean loss of a batch, or a rank's share of it."""
    shifted = inputs.get("shift_labels")
    if shifted is None:
        shifted = F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
    counted = inputs.get("num_items_in_batch", (shifted != IGNORED).sum())
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum") / counted


def over_ranks(
    model: PreTrainedModel, batch: Mapping[str, Tensor], way: Way, expected: Step
) -> dict[str, Any]:
    """How far a step over ranks is off from the one ``expected``, or why there was none."""
    mine, why = None, None
    with counted("cab") as layers:
        try:
            with cab_hf.context_parallel(model, block=BLOCK):
                inputs = distributed.shard(batch, block=BLOCK)
                mine = step(model, inputs, way)
        except distributed.RankLost:
            raise
        except Exception as error:
            why = outcome(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, why)
    if any(everyone):
        same = len({tuple(each or ()) for each in everyone}) == 1
        return why if same else {"failed": f"ranks differ: {everyone}"}
    logits = distributed.unshard(mine.logits, inputs["cu_seq_lens_q"], block=BLOCK)
    for summed in (mine.loss, *mine.gradients.values()):
        dist.all_reduce(summed)
    largest = max(float(x.abs().max()) for x in expected.gradients.values())
    gradients = (
        _relative(mine.gradients[name], meant, LEAST_SCALE * largest)
        for name, meant in expected.gradients.items()
    )
    off = {
        "loss": _relative(mine.loss, expected.loss),
        "logits": _relative(logits, expected.logits),
        "gradients": max(gradients),
    }
    if wrong := [name for name, by in off.items() if not math.isfinite(by)]:
        return {"failed": f"its {' and '.join(wrong)} are not finite"}
    return {**off, "layers": len(layers)}


def _relative(result: Tensor, meant: Tensor, least: float = 0.0) -> float:
    off = float((result - meant).abs().max())
    if math.isnan(off):
        return math.inf
    return off / max(float(meant.abs().max()), least) if off else 0.0
