"""Which model types compute over ranks what they compute in one process, or say that they cannot.

Every type of transformers' registry is built in miniature (`cab_hf.eval.tiny_types`) on two ranks,
processes that stay up for all types. A training step inside `cab_hf.context_parallel`, at full
budget, must have the loss, the logits and the gradients of one process.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import resource
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

import cab_hf
from cab_hf import distributed
from cab_hf.distributed.batch import IGNORED
from cab_hf.eval import families
from cab_hf.eval.experiment import Row
from cab_hf.eval.families import (
    EXACT,
    FAILS,
    FULL,
    IN_PART,
    NOT_OURS,
    TOKENS,
    Families,
    counted,
    outcome,
)
from cab_hf.eval.report import column
from cab_hf.eval.tiny_types import ROPE, tiny_config, tiny_model, window_fields
from cab_hf.patches import apply_cab
from cab_hf.runs.settings import option

RANKS, BLOCK = 2, 32
# documents of one sequence, one of them a single token
DOCUMENTS = (70, 1, 79)
TEXT, PACKED = "one text", "packed"
TOLERANCE = 1e-5
# of the largest gradient of any parameter, as much as those count that are smaller
LEAST_SCALE = 1e-6
# weights of a loss that counts beside the others, where a type has routers
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
# positions of which a test has more, and frequencies that depend on how many it has
DYNAMIC = {
    "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0},
    "max_position_embeddings": 64,
}
# what only a loss needs
LABELS = ("labels", "shift_labels", "num_items_in_batch")
# how a type is built: as it comes, and with what it may have
BUILDS = ("plain", "windowed", "dynamic")
DIFFERENCES = ("loss", "logits", "gradients")


@dataclass(frozen=True)
class Settings(families.Settings):
    """What a run is told; a ValueError names the option that is refused."""

    memory: int = option(24, "GiB of address space for a rank", int)
    out: str = option("families_cp_results", "folder for the results; a run found there goes on")


class FamiliesContextParallel(Families):
    """A sample is what one type does over ranks, in each of its builds, with every input."""

    name = "families-context-parallel"
    purpose = "whether every type computes over ranks as in one process"
    title = "Which model types compute over ranks what they compute in one process?"
    caption = "model types by what they do over ranks"
    Settings = Settings
    EXACTLY = "compute over ranks what one process does"
    DETAILS: ClassVar[Mapping[str, Any]] = {
        "type": "model_type",
        **{name: name for name in BUILDS},
        **{"dtype": "dtype", "layers": "layers"},
        **{f"{name} off by": column("{:.0e}".format, name) for name in DIFFERENCES},
        "because": "said",
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.ranks = Ranks(settings.memory)

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        try:
            for model_type in self.types():
                yield {"model_type": model_type}
        finally:
            self.ranks.end()

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        return self.ranks.examine(case["model_type"], self.settings.timeout)

    @staticmethod
    def row(sample: Row) -> dict[str, Any]:
        """The verdict on a type; ``layers`` counts attention layers that ran by cab."""
        result = {name: list(sample[name].values()) for name in BUILDS if name in sample}
        row = families.judged(sample, result, DIFFERENCES, TOLERANCE)
        if not result:
            return row
        layers = max(each.get("layers", 0) for some in result.values() for each in some)
        return {**row, "dtype": sample.get("dtype"), "layers": layers}

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return (
            "Every type of `AutoModelForCausalLM` is built with a few layers and random weights, "
            "in float64, or in float32 where its own code wants that, and takes a training step "
            f"of two rows of {TOKENS} tokens on {RANKS} ranks (gloo), under `apply_cab` at "
            f"mass_threshold 0 and blocks of {FULL.query_block} x {FULL.key_block}, inside "
            f"`cab_hf.context_parallel`. *{TEXT}*: one document, against the attention that a type "
            f"comes with, in one process. *{PACKED}*: documents of "
            f"{', '.join(map(str, DOCUMENTS))} tokens, against cab in one process. Routers add "
            "their loss where a type has one; of a type whose own loss takes other labels, the "
            "cross-entropy of its logits is taken. *plain*: as a type comes; *windowed*: with "
            "sliding windows, and *dynamic*: with rotary frequencies that depend on the longest "
            f"position, where a type may have them and comes without. *{EXACT}*: loss, logits and "
            f"the summed gradients of all parameters are off by at most {TOLERANCE:g} of the "
            "largest of each, and layers attend through cab (gradients of less than "
            f"{LEAST_SCALE:g} of the largest of all count as that much). *{IN_PART}*: some inputs "
            f"or builds are refused; *{FAILS}*: an error that is no refusal; *{NOT_OURS}*: the "
            "same numbers, but no layer asked cab for them."
        )


EXPERIMENT = FamiliesContextParallel


# --- two ranks that stay up


class Ranks:
    """`RANKS` processes in one group (gloo), started when first asked, and anew after a failure.

    Args:
        memory: GiB of address space of each.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        # where they meet
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def examine(self, model_type: str, timeout: float) -> dict[str, Any]:
        """What `examine` finds on the first of the ranks, in at most ``timeout`` seconds.

        A type that needs more, or kills a rank, is as good as not built.
        """
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send(model_type)
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < RANKS:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            # also what a rank that has died leaves open
            ready = wait(waiting, timeout)
            try:
                answers |= {each["rank"]: each for each in (pipe.recv() for pipe in ready)}
            except (EOFError, ConnectionResetError):
                self.end()
                return {"not_built": "a rank died"}
            if not ready:
                self.end()
                return {"not_built": f"took longer than {timeout:g} seconds"}
        if any(each["broken"] for each in answers.values()):
            # whoever waited for a rank that failed has left the group
            self.end()
        return answers[0]["found"]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []
        if self.folder is not None:
            self.folder.cleanup()

    def _start(self) -> None:
        # children are forked from a process that has imported everything and computed nothing
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            parts = rank, f"file://{self.folder.name}/store", self.memory, theirs
            process = context.Process(target=_serve, args=parts, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)


def _serve(rank: int, store: str, memory: int, pipe: Connection) -> None:
    limit = round(memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    patience = timedelta(minutes=30)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=RANKS, timeout=patience
    )
    while True:
        try:
            model_type = pipe.recv()
        except EOFError:
            return
        result, broken = examine(model_type)
        pipe.send({"rank": rank, "found": result, "broken": broken})


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


def examine(model_type: str) -> tuple[dict[str, Any], bool]:
    """What a type does in each of `BUILDS`, or ``{"not_built": why}``; and whether ranks are lost.

    Every rank calls this; the first one compares, what the others find is of no interest.
    """
    try:
        given = builds(model_type)
    except Exception as error:
        return {"not_built": said(error)}, False
    result: dict[str, Any] = {}
    for name, fields in given.items():
        try:
            each = behind(model_type, fields)
        except Exception as error:
            # not what refuses a model: ranks that do not go on together
            each = {"inputs": {TEXT: {"failed": said(error)}}}
            return {"model": None, **result, name: each["inputs"]}, True
        if "not_built" not in each:
            result = {**each, **result, name: each["inputs"]}
        elif name == BUILDS[0]:
            return each, False
    del result["inputs"]
    return result, False


def said(error: Exception) -> str:
    """An error in a line."""
    return next(iter(outcome(error).values()))


def builds(model_type: str) -> dict[str, dict[str, Any]]:
    """Name -> what `tiny_config` is told."""
    config = tiny_config(model_type)
    has = vars(config)
    routers = {name: value for name, value in ROUTERS.items() if name in has}
    result = {BUILDS[0]: routers}
    windows = window_fields(model_type)
    if windows:
        result["windowed"] = {**routers, **windows}
    rope = has.get("rope_parameters") or {}
    if rope.get("rope_type") == "default":
        fields = {**rope, **DYNAMIC["rope_parameters"]}
        result["dynamic"] = {**routers, **DYNAMIC, "rope_parameters": fields}
    return result


def behind(model_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of every input of one build, on the first rank."""
    mine = dist.get_rank() == 0
    try:
        model = tiny_model(model_type, **fields)
    except Exception as error:
        return {"not_built": said(error)}
    known = {"model": type(model).__name__}
    try:
        apply_cab(model, FULL)
    except Exception as error:
        return {**known, "inputs": dict.fromkeys((TEXT, PACKED), outcome(error))}
    why, way, expected = None, None, {}
    if mine:
        try:
            model, way, expected[TEXT] = in_one_process(model_type, fields)
            apply_cab(model, FULL)
        except Exception as error:
            why = said(error)
    why, way = _from_first((why, way))
    if why is not None:
        return {"not_built": why}
    known["dtype"] = way.dtype
    model = model.to(getattr(torch, way.dtype))
    result = {}
    for name in (TEXT, PACKED):
        refused = None
        if mine and name not in expected:
            try:
                expected[name] = step(model, packed(texts()), way)
            except Exception as error:
                refused = outcome(error)
        (refused,) = _from_first((refused,))
        result[name] = refused or over_ranks(model, name, way, expected.get(name))
    return {**known, "inputs": result}


def in_one_process(model_type: str, fields: Mapping[str, Any]) -> tuple[PreTrainedModel, Way, Step]:
    """A model, the first of `WAYS` that it can go, and its step by its own attention."""
    *others, last = WAYS
    model = tiny_model(model_type, **fields)
    for way in others:
        try:
            wide = copy.deepcopy(model).to(getattr(torch, way.dtype))
            return wide, way, _finite(step(wide, texts(), way))
        except Exception:
            continue
    return model, last, _finite(step(model, texts(), last))


def _finite(result: Step) -> Step:
    if not result.logits.isfinite().all():
        raise ValueError("its logits are not finite")
    return result


def texts() -> dict[str, Tensor]:
    """Two rows of tokens, of which the first few are not to be learnt."""
    ids = families.inputs()["plain"]["input_ids"]
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
    model: PreTrainedModel, name: str, way: Way, expected: Step | None
) -> dict[str, Any]:
    """How far a step over ranks is off, or why there was none; ``expected`` is the first rank's."""
    batch = texts() if name == TEXT else packed(texts())
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
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, why)
    if any(everyone):
        same = len({tuple(each or ()) for each in everyone}) == 1
        return why if same else {"failed": f"ranks differ: {everyone}"}
    logits = distributed.unshard(mine.logits, inputs["cu_seq_lens_q"], block=BLOCK)
    for summed in (mine.loss, *mine.gradients.values()):
        dist.all_reduce(summed)
    if expected is None:
        return {}
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


def _from_first(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the first rank has, on all of them."""
    parts = [value]
    dist.broadcast_object_list(parts)
    return parts[0]
