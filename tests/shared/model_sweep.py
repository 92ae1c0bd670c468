"""Sweep over model types: each type, tiny and random, with its own attention and with "cab".

One process compares logits: loaded by name and under `apply_cab`, with and without padding, and of
packed documents. Several processes compare a training step inside `cab_hf.context_parallel` with
the step of one process.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tiny_types import (
    FIRST_TOKEN,
    ROPE,
    VOCABULARY,
    tiny_config,
    tiny_model,
    window_fields,
)
from torch import Tensor, nn
from torch.multiprocessing import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import cab_hf
from cab_hf import distributed
from cab_hf.dispatch import attended
from cab_hf.distributed.batch import IGNORED
from cab_hf.eval.experiment import Row
from cab_hf.eval.families import (
    DOCUMENTS,
    FULL,
    LEAST_SCALE,
    LIMITS,
    PACKED,
    PADDING,
    TEXT,
    TOKENS,
    Families,
)
from cab_hf.patches import apply_cab

BLOCK = 32
# the fork server of Python 3.11 does not search the folder of this module
PRELOADED = ["cab_hf.eval.families", "cab_hf.patches", "torch.multiprocessing"]
PRELOADED += ["transformers.models.auto.modeling_auto", "transformers.masking_utils"]
SAMPLE = "sample.json"  # file with the result of the processes of a type
# settings of types with routers, whose auxiliary loss is part of the loss
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
# fewer positions than a test has, with frequencies that depend on the longest position
DYNAMIC = {
    "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0},
    "max_position_embeddings": 64,
}
# arguments that only a loss needs
LABELS = ("labels", "shift_labels", "num_items_in_batch")
# distinguishes errors of this project from errors of other libraries
OURS = re.compile("cab|context_parallel")


class Sweep(Families):
    """The experiment that measures the types of its settings, each in its own processes."""

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for model_type in self.settings.types:
            yield {"model_type": model_type}

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        options = self.settings
        return in_processes(case["model_type"], options.ranks, options.timeout, options.memory)


def in_processes(model_type: str, ranks: int, timeout: float, memory: float) -> dict[str, Any]:
    """Return the sample of a type, from one process or from the first process of a gloo group.

    A type that needs more than ``timeout`` seconds, or crashes a process, counts as not built.

    Args:
        model_type: the type.
        ranks: number of processes.
        timeout: seconds.
        memory: GiB of address space per process.
    """
    # children are forked from a process that has imported all libraries and computed nothing
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
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
    # otherwise this process would wait for ranks of its group that stopped
    os._exit(0)


def examine(model_type: str) -> dict[str, Any]:
    """Return the outcome of a type per part of `PARTS` in one process, or {"not_built": why}."""
    try:
        model, expected, reads_padding = built(model_type)
        result = {
            "model": type(model).__name__,
            "reads_padding": reads_padding,
            "by_name": compare(by_name, model, expected),
            "applied": compare(applied, model, expected),
        }
        windows = window_fields(model_type)
        if windows:
            model, expected, _ = built(model_type, **windows)
            result["windowed"] = compare(applied, model, expected)
        return result
    except Exception as error:
        return {"not_built": _last_line(error)}


def built(model_type: str, **values: Any) -> tuple[PreTrainedModel, dict[str, Tensor], list[str]]:
    """Return a model, its logits with its own attention, and the inputs whose padding it reads."""
    model = tiny_model(model_type, **values)
    expected = {name: logits(model, **given) for name, given in inputs().items()}
    padded = {name: logits(model, **given) for name, given in inputs(FIRST_TOKEN).items()}
    read = [
        name
        for name in expected
        if _difference(padded[name], expected[name]) > LIMITS["difference"]
    ]
    try:
        with separate_documents(model):
            separate = logits(model, **packed_inputs()[PACKED])
    except Exception:
        # the type does not accept position ids
        return model, expected, read
    return model, expected | dict.fromkeys(packed_inputs(), separate), read


def inputs(padding: int | None = None) -> dict[str, dict[str, Any]]:
    """Return arguments of a model by name: two rows of tokens, the first one padded.

    Padding tokens are random, or ``padding``. They do not change a model that applies its mask.
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


def packed_inputs() -> dict[str, dict[str, Any]]:
    """Return arguments of a model by name: the tokens of `inputs`, packed as `DOCUMENTS`.

    A mask and a cache must not change the logits.
    """
    alone = packed(inputs()["plain"]) | {"use_cache": False}
    mask = {"attention_mask": torch.ones_like(alone["input_ids"])}
    return {
        PACKED: alone,
        f"{PACKED}, mask": alone | mask,
        f"{PACKED}, cache": alone | {"use_cache": True},
    }


@contextmanager
def separate_documents(model: PreTrainedModel) -> Iterator[None]:
    """Mask other `DOCUMENTS` in the model's own attention inside the ``with`` block."""
    name = model.config.get_text_config()._attn_implementation
    make = ALL_MASK_ATTENTION_FUNCTIONS[name]
    lengths = torch.tensor(DOCUMENTS)
    document = torch.arange(len(DOCUMENTS)).repeat_interleave(lengths).expand(2, -1)

    def make_separate(*arguments: Any, **options: Any) -> Any:
        own_document = packed_sequence_mask_function(document)
        options["mask_function"] = and_masks(options["mask_function"], own_document)
        return make(*arguments, **{**options, "allow_is_causal_skip": False})

    AttentionMaskInterface.register(name, make_separate)
    try:
        yield
    finally:
        AttentionMaskInterface.register(name, make)


def logits(model: PreTrainedModel, attention_mask: Tensor | None = None, **given: Any) -> Tensor:
    """Return the logits of all tokens that are not padding, [tokens, vocabulary].

    Raises:
        ValueError: a logit is not finite.
    """
    # some types draw random numbers in the forward pass
    torch.manual_seed(2)
    masked = {} if attention_mask is None else {"attention_mask": attention_mask}
    with torch.no_grad():
        result = model(**given, **masked).logits
    result = result.flatten(0, 1) if attention_mask is None else result[attention_mask.bool()]
    if not result.isfinite().all():
        raise ValueError("its logits are not finite")
    return result


def by_name(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the same weights, made with ``attn_implementation="cab"``."""
    config = copy.deepcopy(model.config)
    config.get_text_config().cab_config = FULL.to_dict()
    named = type(model)._from_config(config, dtype=torch.float32, attn_implementation="cab")
    named.load_state_dict(model.state_dict())
    return named.eval()


def applied(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy under `apply_cab`."""
    return apply_cab(copy.deepcopy(model), FULL)


def compare(
    switch: Callable[[PreTrainedModel], PreTrainedModel],
    model: PreTrainedModel,
    expected: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return the outcome of every input, and the numbers of layers that ran by cab and sparsely."""
    with counted("cab") as layers:
        try:
            cab_model = switch(model)
        except Exception as error:
            every = dict.fromkeys(expected, outcome(error))
            return {"inputs": every, "layers": 0, "sparse": 0}
        result = {}
        for name, arguments in (inputs() | packed_inputs()).items():
            if name not in expected:
                continue
            try:
                result[name] = {
                    "difference": _difference(logits(cab_model, **arguments), expected[name])
                }
            except Exception as error:
                result[name] = outcome(error)
    sparse = sum(module in attended for module in layers)
    return {"inputs": result, "layers": len(layers), "sparse": sparse}


def _difference(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().max())


@contextmanager
def counted(implementation: str) -> Iterator[set[nn.Module]]:
    """Count the modules that attend by ``implementation`` inside the block."""
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
    """Return the outcome of an error: "refused" for an error of ours, else "failed"."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | NotImplementedError) and OURS.search(text):
        return {"refused": text}
    return {"failed": _last_line(error)}


def _last_line(error: Exception) -> str:
    return " ".join(traceback.format_exception_only(error)[-1].split())[:300]


# --- one type, on every rank


class StepMode(NamedTuple):
    """The mode of a step: its dtype, and whether the type's own loss is used."""

    dtype: str
    own_loss: bool


MODES = tuple(StepMode(dtype, own) for own in (True, False) for dtype in ("float64", "float32"))


class Step(NamedTuple):
    """A training step: loss, logits [B, N, V], and gradients of parameters by name."""

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]


def examine_over_ranks(model_type: str) -> dict[str, Any]:
    """Return the outcome of a type in each build of `builds`, or ``{"not_built": why}``.

    All ranks must call this, and return the same. Each rank also computes the step of a single
    process.
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
            # ranks are out of step; the group of this rank ends with its process
            return {"model": None, **result, name: {TEXT: {"failed": _last_line(error)}}}
        if "not_built" not in each:
            inputs = each.pop("inputs")
            result = {**each, **result, name: inputs}
        elif name == "plain":
            return each
    return result


def builds(model_type: str) -> dict[str, dict[str, Any]]:
    """Return the fields of `tiny_config` for each build, by name."""
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
    """Return the outcome of every input of one build."""
    try:
        model = tiny_model(model_type, **fields)
    except Exception as error:
        return {"not_built": _last_line(error)}
    fields_of_model = {"model": type(model).__name__}
    try:
        apply_cab(model, FULL)
    except Exception as error:
        return {**fields_of_model, "inputs": dict.fromkeys((TEXT, PACKED), outcome(error))}
    try:
        alone, mode, expected = in_one_process(model_type, fields)
        apply_cab(alone, FULL)
    except Exception as error:
        return {"not_built": _last_line(error)}
    model = model.to(getattr(torch, mode.dtype))
    result = {TEXT: over_ranks(model, texts(), mode, expected)}
    try:
        expected = step(alone, packed(texts()), mode)
    except Exception as error:
        result[PACKED] = outcome(error)
    else:
        result[PACKED] = over_ranks(model, packed(texts()), mode, expected)
    return {**fields_of_model, "dtype": mode.dtype, "inputs": result}


def in_one_process(
    model_type: str, fields: Mapping[str, Any]
) -> tuple[PreTrainedModel, StepMode, Step]:
    """Return a model, the first of `MODES` that it supports, and its step with own attention."""
    for mode in MODES:
        model = tiny_model(model_type, **fields).to(getattr(torch, mode.dtype))
        try:
            result = step(model, texts(), mode)
            if not result.logits.isfinite().all():
                raise ValueError("its logits are not finite")
            return model, mode, result
        except Exception:
            if mode == MODES[-1]:
                raise


def texts() -> dict[str, Tensor]:
    """Return two rows of tokens; the first seven labels of a row are ignored."""
    ids = inputs()["plain"]["input_ids"]
    labels = ids.clone()
    labels[:, :7] = -100
    return {"input_ids": ids, "labels": labels}


def packed(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tokens as packed `DOCUMENTS`."""
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])
    return {**batch, "position_ids": positions.expand_as(batch["input_ids"])}


def step(model: PreTrainedModel, inputs: Mapping[str, Tensor], mode: StepMode) -> Step:
    """Run a training step on a batch, or on the result of `cab_hf.distributed.shard`."""
    model.zero_grad()
    # some types draw random numbers in the forward pass
    torch.manual_seed(2)
    if mode.own_loss:
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
    """Return the mean loss of a batch, or a rank's share of it."""
    shifted = inputs.get("shift_labels")
    if shifted is None:
        shifted = F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
    counted = inputs.get("num_items_in_batch", (shifted != IGNORED).sum())
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum") / counted


def over_ranks(
    model: PreTrainedModel, batch: Mapping[str, Tensor], mode: StepMode, expected: Step
) -> dict[str, Any]:
    """Return the error of a step over ranks relative to ``expected``, or why there was no step."""
    own_step, why = None, None
    with counted("cab") as layers:
        try:
            with cab_hf.context_parallel(model, block=BLOCK):
                inputs = distributed.shard(batch, block=BLOCK)
                own_step = step(model, inputs, mode)
        except distributed.RankLost:
            raise
        except Exception as error:
            why = outcome(error)
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why)
    if any(reasons):
        same = len({tuple(each or ()) for each in reasons}) == 1
        return why if same else {"failed": f"ranks differ: {reasons}"}
    logits = distributed.unshard(own_step.logits, inputs["cu_seq_lens_q"], block=BLOCK)
    for summed in (own_step.loss, *own_step.gradients.values()):
        dist.all_reduce(summed)
    largest = max(float(x.abs().max()) for x in expected.gradients.values())
    gradients = (
        _relative(own_step.gradients[name], meant, LEAST_SCALE * largest)
        for name, meant in expected.gradients.items()
    )
    off = {
        "loss": _relative(own_step.loss, expected.loss),
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
