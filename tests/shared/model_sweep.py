"""Sweep over model types: compare "cab" with the default attention of tiny random models.

One process compares logits of models that are loaded with "cab" or changed by `apply_cab`, with and
without padding, and for packed documents. Several processes compare a training step inside
`cab_hf.context_parallel` with the step of one process.
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

BLOCK = 32  # tokens: chunks of ranks in `context_parallel` are multiples of this number
# modules that the fork server imports; Python 3.11 cannot import this module there
PRELOADED = ["cab_hf.eval.families", "cab_hf.patches", "torch.multiprocessing"]
PRELOADED += ["transformers.models.auto.modeling_auto", "transformers.masking_utils"]
SAMPLE = "sample.json"  # file in which rank 0 stores its result record
# config fields of mixture-of-experts models that add the router loss to the loss
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
# dynamic RoPE: frequencies depend on the longest position; inputs are longer than 64 positions
DYNAMIC = {
    "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0},
    "max_position_embeddings": 64,
}
# arguments of a model that only its loss uses
LABELS = ("labels", "shift_labels", "num_items_in_batch")
# messages of errors that this project raises match this pattern
OURS = re.compile("cab|context_parallel")


class Sweep(Families):
    """Experiment that compares "cab" with the default attention for each type in its settings."""

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for model_type in self.settings.types:
            yield {"model_type": model_type}

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        options = self.settings
        return in_processes(case["model_type"], options.ranks, options.timeout, options.memory)


def in_processes(model_type: str, ranks: int, timeout: float, memory: float) -> dict[str, Any]:
    """Examine a model type in new processes, and return the result record of rank 0.

    Args:
        model_type: type of the model, such as "llama".
        ranks: number of processes; several processes form a gloo group.
        timeout: seconds after which the processes are killed.
        memory: limit of address space per process in GiB.

    Returns:
        The result of `examine` or `examine_over_ranks`; {"not_built": reason} after a timeout or a
        crash of a process.
    """
    # fork from a process that has imported all libraries but started no threads
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    ends = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        group = start_processes(
            _child,
            args=(model_type, memory, ranks, folder),
            nprocs=ranks,
            join=False,
            daemon=True,
            start_method="forkserver",
        )
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
    """Examine a type in process ``rank``; rank 0 writes its result record to ``folder``."""
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
    # exit without destroying the group, which would wait for ranks that may have died
    os._exit(0)


def examine(model_type: str) -> dict[str, Any]:
    """Return the results of `compare` for "by_name" and "applied", or {"not_built": reason}."""
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
    """Build a model of a type, and compute its logits with its default attention.

    Returns:
        (model, logits by name of the input, names of inputs for which the ids of padding tokens
        change the logits of other tokens).
    """
    model = tiny_model(model_type, **values)
    expected = {name: logits(model, **fields) for name, fields in inputs().items()}
    padded = {name: logits(model, **fields) for name, fields in inputs(FIRST_TOKEN).items()}
    reads_padding = [
        name
        for name in expected
        if _difference(padded[name], expected[name]) > LIMITS["difference"]
    ]
    try:
        with separate_documents(model):
            separate = logits(model, **packed_inputs()[PACKED])
    except Exception:
        # models of some types do not accept position ids: omit packed inputs
        return model, expected, reads_padding
    return model, expected | dict.fromkeys(packed_inputs(), separate), reads_padding


def inputs(padding: int | None = None) -> dict[str, dict[str, Any]]:
    """Return model arguments by name: "plain", "left padded" and "right padded", two rows each.

    Row 0 of the padded inputs has padding. ``padding`` is the id of padding tokens; None: random
    ids, which must not change the logits of other tokens.
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
    """Return model arguments by name: the tokens of `inputs` as packed documents, in three forms.

    The forms are without mask and cache, with a mask of ones, and with a cache. All three must
    have the same logits. `DOCUMENTS` has the lengths of the documents.
    """
    fields = packed(inputs()["plain"]) | {"use_cache": False}
    mask = {"attention_mask": torch.ones_like(fields["input_ids"])}
    return {
        PACKED: fields,
        f"{PACKED}, mask": fields | mask,
        f"{PACKED}, cache": fields | {"use_cache": True},
    }


@contextmanager
def separate_documents(model: PreTrainedModel) -> Iterator[None]:
    """Make the default attention mask pairs across `DOCUMENTS`, inside the ``with`` block."""
    name = model.config.get_text_config()._attn_implementation
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS[name]
    lengths = torch.tensor(DOCUMENTS)
    document = torch.arange(len(DOCUMENTS)).repeat_interleave(lengths).expand(2, -1)

    def make_document_mask(*, mask_function: Any, **options: Any) -> Any:
        mask_function = and_masks(mask_function, packed_sequence_mask_function(document))
        options["allow_is_causal_skip"] = False
        return make_mask(mask_function=mask_function, **options)

    AttentionMaskInterface.register(name, make_document_mask)
    try:
        yield
    finally:
        AttentionMaskInterface.register(name, make_mask)


def logits(model: PreTrainedModel, attention_mask: Tensor | None = None, **fields: Any) -> Tensor:
    """Return the logits of all tokens that are not padding, [tokens, vocabulary].

    Raises:
        ValueError: a logit is not finite.
    """
    # some types draw random numbers in the forward pass, which must be equal in all calls
    torch.manual_seed(2)
    masked = {} if attention_mask is None else {"attention_mask": attention_mask}
    with torch.no_grad():
        result = model(**fields, **masked).logits
    result = result.flatten(0, 1) if attention_mask is None else result[attention_mask.bool()]
    if not result.isfinite().all():
        raise ValueError("its logits are not finite")
    return result


def by_name(model: PreTrainedModel) -> PreTrainedModel:
    """Return a new model with the same weights, created with ``attn_implementation="cab"``."""
    config = copy.deepcopy(model.config)
    config.get_text_config().cab_config = FULL.to_dict()
    cab_model = type(model)._from_config(config, dtype=torch.float32, attn_implementation="cab")
    cab_model.load_state_dict(model.state_dict())
    return cab_model.eval()


def applied(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of ``model`` after `apply_cab`."""
    return apply_cab(copy.deepcopy(model), FULL)


def compare(
    switch: Callable[[PreTrainedModel], PreTrainedModel],
    model: PreTrainedModel,
    expected: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Switch a model to "cab", and compare its logits with ``expected``.

    Args:
        switch: function that returns the model with "cab": `by_name` or `applied`.
        model: model with its default attention.
        expected: logits by name of the input.

    Returns:
        {"inputs": {name of the input: {"difference": largest difference of a logit} or `outcome`},
        "layers": number of layers that "cab" computed, "sparse": number of them with a plan}.
    """
    with counted("cab") as layers:
        try:
            cab_model = switch(model)
        except Exception as error:
            outcomes = dict.fromkeys(expected, outcome(error))
            return {"inputs": outcomes, "layers": 0, "sparse": 0}
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
    """Return the largest absolute difference."""
    return float((result - expected).abs().max())


@contextmanager
def counted(implementation: str) -> Iterator[set[nn.Module]]:
    """Yield a set to which each module that calls ``implementation`` is added inside the block."""
    function, modules = ALL_ATTENTION_FUNCTIONS[implementation], set()

    def recording(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
    ) -> Any:
        modules.add(module)
        return function(module, q, k, v, mask, **options)

    AttentionInterface.register(implementation, recording)
    try:
        yield modules
    finally:
        AttentionInterface.register(implementation, function)


def outcome(error: Exception) -> dict[str, str]:
    """Return {"refused": message} for an error of this project, and {"failed": message} else."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | NotImplementedError) and OURS.search(text):
        return {"refused": text}
    return {"failed": _last_line(error)}


def _last_line(error: Exception) -> str:
    """Return the type and message of an error in up to 300 characters."""
    return " ".join(traceback.format_exception_only(error)[-1].split())[:300]


class StepMode(NamedTuple):
    """Dtype and loss function of a training step."""

    dtype: str
    own_loss: bool  # True for the loss of the model, False for the loss of this module


MODES = tuple(StepMode(dtype, own) for own in (True, False) for dtype in ("float64", "float32"))


class Step(NamedTuple):
    """A training step: loss, logits [B, N, V], and gradients of parameters by name."""

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]


def examine_over_ranks(model_type: str) -> dict[str, Any]:
    """Return the results of `step_of_build` by variant in `builds`, or {"not_built": reason}.

    All ranks must call this function, and return equal results. Each rank also computes the step of
    a single process.
    """
    try:
        fields_by_build = builds(model_type)
    except Exception as error:
        return {"not_built": _last_line(error)}
    result: dict[str, Any] = {}
    for name, fields in fields_by_build.items():
        try:
            build_result = step_of_build(model_type, fields)
        except Exception as error:
            # after an error in one rank, the ranks cannot continue together
            return {"model": None, **result, name: {TEXT: {"failed": _last_line(error)}}}
        if "not_built" not in build_result:
            inputs = build_result.pop("inputs")
            result = {**build_result, **result, name: inputs}
        elif name == "plain":
            return build_result
    return result


def builds(model_type: str) -> dict[str, dict[str, Any]]:
    """Return arguments of `tiny_config` by variant that the type supports.

    "plain" has the defaults, "windowed" sliding windows, and "dynamic" dynamic RoPE.
    """
    config_fields = vars(tiny_config(model_type))
    routers = {name: value for name, value in ROUTERS.items() if name in config_fields}
    result = {"plain": routers}
    windows = window_fields(model_type)
    if windows:
        result["windowed"] = {**routers, **windows}
    rope = config_fields.get("rope_parameters") or {}
    if rope.get("rope_type") == "default":
        fields = {**rope, **DYNAMIC["rope_parameters"]}
        result["dynamic"] = {**routers, **DYNAMIC, "rope_parameters": fields}
    return result


def step_of_build(model_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of `over_ranks` by name of the input, for one variant of a type."""
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
        single_model, mode, expected = in_one_process(model_type, fields)
        apply_cab(single_model, FULL)
    except Exception as error:
        return {"not_built": _last_line(error)}
    model = model.to(getattr(torch, mode.dtype))
    result = {TEXT: over_ranks(model, texts(), mode, expected)}
    try:
        expected = step(single_model, packed(texts()), mode)
    except Exception as error:
        result[PACKED] = outcome(error)
    else:
        result[PACKED] = over_ranks(model, packed(texts()), mode, expected)
    return {**fields_of_model, "dtype": mode.dtype, "inputs": result}


def in_one_process(
    model_type: str, fields: Mapping[str, Any]
) -> tuple[PreTrainedModel, StepMode, Step]:
    """Return (model, mode, `Step`) with default attention, in the first mode that works.

    `MODES` lists the modes. Some types do not run in float64, or have no loss.
    """
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
    """Return a batch of two rows; the first seven tokens of each row have no label."""
    ids = inputs()["plain"]["input_ids"]
    labels = ids.clone()
    labels[:, :7] = -100
    return {"input_ids": ids, "labels": labels}


def packed(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``batch`` with position ids that restart at 0 for each of `DOCUMENTS`."""
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])
    return {**batch, "position_ids": positions.expand_as(batch["input_ids"])}


def step(model: PreTrainedModel, inputs: Mapping[str, Tensor], mode: StepMode) -> Step:
    """Return the `Step` of ``inputs``: a batch, or a shard by `cab_hf.distributed.shard`."""
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
    """Return the mean loss over labels.

    For a shard, return its summed loss divided by the number of labels in all shards.
    """
    shifted = inputs.get("shift_labels")
    if shifted is None:
        shifted = F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
    num_labels = inputs.get("num_items_in_batch", (shifted != IGNORED).sum())
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum") / num_labels


def over_ranks(
    model: PreTrainedModel, batch: Mapping[str, Tensor], mode: StepMode, expected: Step
) -> dict[str, Any]:
    """Return the relative errors of a step that is sharded over all ranks, or an `outcome`.

    Args:
        model: model with "cab".
        batch: the complete batch, equal in all ranks.
        mode: mode of the step.
        expected: the `Step` of one process with default attention.
    """
    own_step, failure = None, None
    with counted("cab") as layers:
        try:
            with cab_hf.context_parallel(model, block=BLOCK):
                inputs = distributed.shard(batch, block=BLOCK)
                own_step = step(model, inputs, mode)
        except distributed.RankLost:
            raise
        except Exception as error:
            failure = outcome(error)
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if any(failures):
        are_equal = len({tuple(each or ()) for each in failures}) == 1
        return failure if are_equal else {"failed": f"ranks differ: {failures}"}
    logits = distributed.unshard(own_step.logits, inputs["cu_seq_lens_q"], block=BLOCK)
    for tensor in (own_step.loss, *own_step.gradients.values()):
        dist.all_reduce(tensor)
    largest = max(float(x.abs().max()) for x in expected.gradients.values())
    gradient_errors = (
        _relative_error(own_step.gradients[name], gradient, LEAST_SCALE * largest)
        for name, gradient in expected.gradients.items()
    )
    errors = {
        "loss": _relative_error(own_step.loss, expected.loss),
        "logits": _relative_error(logits, expected.logits),
        "gradients": max(gradient_errors),
    }
    if not_finite := [name for name, error in errors.items() if not math.isfinite(error)]:
        return {"failed": f"its {' and '.join(not_finite)} are not finite"}
    return {**errors, "layers": len(layers)}


def _relative_error(result: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return max |result - expected| / max(max |expected|, least); infinity for NaN."""
    error = float((result - expected).abs().max())
    if math.isnan(error):
        return math.inf
    return error / max(float(expected.abs().max()), least) if error else 0.0
