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
from cab_hf.dispatch import attended_pairs
from cab_hf.distributed.batch import IGNORED_LABEL
from cab_hf.eval.experiment import Row
from cab_hf.eval.families import (
    DIFFERENCE_LIMITS,
    DOCUMENTS,
    FULL_CONFIG,
    MIN_GRADIENT_SCALE,
    PACKED,
    PADDING,
    TEXT,
    TOKENS,
    Families,
)
from cab_hf.patches import apply_cab

BLOCK = 32  # tokens: chunks of ranks in `context_parallel` are multiples of this number
# modules that the fork server imports; Python 3.11 cannot import this module there
PRELOADED_MODULES = ["cab_hf.eval.families", "cab_hf.patches", "torch.multiprocessing"]
PRELOADED_MODULES += ["transformers.models.auto.modeling_auto", "transformers.masking_utils"]
SAMPLE_FILE = "sample.json"  # file in which rank 0 stores its result record
# config fields of mixture-of-experts models that add the router loss to the loss
ROUTER_LOSS_FIELDS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
# dynamic RoPE: frequencies depend on the longest position; inputs are longer than 64 positions
DYNAMIC_ROPE_FIELDS = {
    "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0},
    "max_position_embeddings": 64,
}
# arguments of a model that only its loss uses
LABEL_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch")
# messages of errors that this project raises match this pattern
OWN_ERROR_PATTERN = re.compile("cab|context_parallel")


class Sweep(Families):
    """Experiment that compares "cab" with the default attention for each type in its settings."""

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for model_type in self.settings.types:
            yield {"model_type": model_type}

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        options = self.settings
        return examine_in_processes(
            case["model_type"], options.ranks, options.timeout, options.memory
        )


def examine_in_processes(
    model_type: str, ranks: int, timeout: float, memory: float
) -> dict[str, Any]:
    """Examine a model type in new processes, and return the result record of rank 0.

    Args:
        model_type: type of the model, such as "llama".
        ranks: number of processes; several processes form a gloo group.
        timeout: seconds after which the processes are killed.
        memory: limit of address space per process in GiB.

    Returns:
        The result of `examine_model_type` or `examine_steps_over_ranks`; {"not_built": reason}
        after a timeout or a crash of a process.
    """
    # fork from a process that has imported all libraries but started no threads
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED_MODULES)
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        process_group = start_processes(
            _run_child,
            args=(model_type, memory, ranks, folder),
            nprocs=ranks,
            join=False,
            daemon=True,
            start_method="forkserver",
        )
        try:
            while not process_group.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    return {"not_built": f"took longer than {timeout:g} seconds"}
            return json.loads(Path(folder, SAMPLE_FILE).read_text())
        except (ProcessExitedException, ProcessRaisedException) as error:
            code = getattr(error, "exit_code", 1)
            return {"not_built": f"its process died with exit code {code}"}
        finally:
            for process in process_group.processes:
                process.kill()
                process.join()


def _run_child(rank: int, model_type: str, memory: float, ranks: int, folder: str) -> None:
    """Examine a type in process ``rank``; rank 0 writes its result record to ``folder``."""
    limit_bytes = round(memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    torch.set_num_threads(1)
    if ranks == 1:
        sample = examine_model_type(model_type)
    else:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        sample = examine_steps_over_ranks(model_type)
    if rank == 0:
        Path(folder, SAMPLE_FILE).write_text(json.dumps(sample))
    # exit without destroying the group, which would wait for ranks that may have died
    os._exit(0)


def examine_model_type(model_type: str) -> dict[str, Any]:
    """Return the results of `compare_logits` by name of the switch, or {"not_built": reason}.

    The names are "by_name" for `load_by_name`, and "applied" for `copy_with_cab`.
    """
    try:
        model, expected, reads_padding = build_model(model_type)
        result = {
            "model": type(model).__name__,
            "reads_padding": reads_padding,
            "by_name": compare_logits(load_by_name, model, expected),
            "applied": compare_logits(copy_with_cab, model, expected),
        }
        windows = window_fields(model_type)
        if windows:
            model, expected, _ = build_model(model_type, **windows)
            result["windowed"] = compare_logits(copy_with_cab, model, expected)
        return result
    except Exception as error:
        return {"not_built": _last_line(error)}


def build_model(
    model_type: str, **values: Any
) -> tuple[PreTrainedModel, dict[str, Tensor], list[str]]:
    """Build a model of a type, and compute its logits with its default attention.

    Returns:
        (model, logits by name of the input, names of inputs for which the ids of padding tokens
        change the logits of other tokens).
    """
    model = tiny_model(model_type, **values)
    expected = {name: compute_logits(model, **fields) for name, fields in make_inputs().items()}
    padded_logits = {
        name: compute_logits(model, **fields) for name, fields in make_inputs(FIRST_TOKEN).items()
    }
    reads_padding = [
        name
        for name in expected
        if _difference(padded_logits[name], expected[name]) > DIFFERENCE_LIMITS["difference"]
    ]
    try:
        with mask_across_documents(model):
            separate_logits = compute_logits(model, **make_packed_inputs()[PACKED])
    except Exception:
        # models of some types do not accept position ids: omit packed inputs
        return model, expected, reads_padding
    return model, expected | dict.fromkeys(make_packed_inputs(), separate_logits), reads_padding


def make_inputs(padding: int | None = None) -> dict[str, dict[str, Any]]:
    """Return model arguments by name: "plain", "left padded" and "right padded", two rows each.

    Row 0 of the padded inputs has padding. ``padding`` is the id of padding tokens; None: random
    ids, which must not change the logits of other tokens.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FIRST_TOKEN, VOCABULARY, (2, TOKENS), generator=generator)
    result = {"plain": {"input_ids": ids}}
    for name, padding_slice in (
        ("left padded", slice(PADDING)),
        ("right padded", slice(-PADDING, None)),
    ):
        mask, tokens = torch.ones_like(ids), ids.clone()
        mask[0, padding_slice] = 0
        if padding is not None:
            tokens[0, padding_slice] = padding
        result[name] = {"input_ids": tokens, "attention_mask": mask}
    return result


def make_packed_inputs() -> dict[str, dict[str, Any]]:
    """Return model arguments by name: the tokens of `make_inputs` as packed documents.

    There are three inputs: without mask and cache, with a mask of ones, and with a cache. All three
    must have the same logits. `DOCUMENTS` has the lengths of the documents.
    """
    fields = pack_documents(make_inputs()["plain"]) | {"use_cache": False}
    mask = {"attention_mask": torch.ones_like(fields["input_ids"])}
    return {
        PACKED: fields,
        f"{PACKED}, mask": fields | mask,
        f"{PACKED}, cache": fields | {"use_cache": True},
    }


@contextmanager
def mask_across_documents(model: PreTrainedModel) -> Iterator[None]:
    """Make the default attention mask pairs across `DOCUMENTS`, inside the ``with`` block."""
    name = model.config.get_text_config()._attn_implementation
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS[name]
    lengths = torch.tensor(DOCUMENTS)
    doc_ids = torch.arange(len(DOCUMENTS)).repeat_interleave(lengths).expand(2, -1)

    def make_document_mask(*, mask_function: Any, **options: Any) -> Any:
        mask_function = and_masks(mask_function, packed_sequence_mask_function(doc_ids))
        options["allow_is_causal_skip"] = False
        return make_mask(mask_function=mask_function, **options)

    AttentionMaskInterface.register(name, make_document_mask)
    try:
        yield
    finally:
        AttentionMaskInterface.register(name, make_mask)


def compute_logits(
    model: PreTrainedModel, attention_mask: Tensor | None = None, **fields: Any
) -> Tensor:
    """Return the logits of all tokens that are not padding, [tokens, vocabulary].

    Raises:
        ValueError: a logit is not finite.
    """
    # some types draw random numbers in the forward pass, which must be equal in all calls
    torch.manual_seed(2)
    mask_argument = {} if attention_mask is None else {"attention_mask": attention_mask}
    with torch.no_grad():
        result = model(**fields, **mask_argument).logits
    result = result.flatten(0, 1) if attention_mask is None else result[attention_mask.bool()]
    if not result.isfinite().all():
        raise ValueError("its logits are not finite")
    return result


def load_by_name(model: PreTrainedModel) -> PreTrainedModel:
    """Return a new model with the same weights, created with ``attn_implementation="cab"``."""
    config = copy.deepcopy(model.config)
    config.get_text_config().cab_config = FULL_CONFIG.to_dict()
    cab_model = type(model)._from_config(config, dtype=torch.float32, attn_implementation="cab")
    cab_model.load_state_dict(model.state_dict())
    return cab_model.eval()


def copy_with_cab(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of ``model`` after `apply_cab`."""
    return apply_cab(copy.deepcopy(model), FULL_CONFIG)


def compare_logits(
    switch: Callable[[PreTrainedModel], PreTrainedModel],
    model: PreTrainedModel,
    expected: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Switch a model to "cab", and compare its logits with ``expected``.

    Args:
        switch: function that returns the model with "cab": `load_by_name` or `copy_with_cab`.
        model: model with its default attention.
        expected: logits by name of the input.

    Returns:
        {"inputs": {name of the input: {"difference": largest difference of a logit}, or the result
        of `describe_error`}, "layers": number of layers that "cab" computed, "sparse": number of
        these layers with a plan}.
    """
    with record_modules("cab") as layers:
        try:
            cab_model = switch(model)
        except Exception as error:
            outcomes = dict.fromkeys(expected, describe_error(error))
            return {"inputs": outcomes, "layers": 0, "sparse": 0}
        result = {}
        for name, arguments in (make_inputs() | make_packed_inputs()).items():
            if name not in expected:
                continue
            try:
                result[name] = {
                    "difference": _difference(
                        compute_logits(cab_model, **arguments), expected[name]
                    )
                }
            except Exception as error:
                result[name] = describe_error(error)
    num_sparse = sum(module in attended_pairs for module in layers)
    return {"inputs": result, "layers": len(layers), "sparse": num_sparse}


def _difference(result: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference."""
    return float((result - expected).abs().max())


@contextmanager
def record_modules(implementation: str) -> Iterator[set[nn.Module]]:
    """Yield a set to which each module that calls ``implementation`` is added inside the block."""
    function, modules = ALL_ATTENTION_FUNCTIONS[implementation], set()

    def record_and_attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
    ) -> Any:
        modules.add(module)
        return function(module, q, k, v, mask, **options)

    AttentionInterface.register(implementation, record_and_attend)
    try:
        yield modules
    finally:
        AttentionInterface.register(implementation, function)


def describe_error(error: Exception) -> dict[str, str]:
    """Return {"refused": message} for an error of this project, and {"failed": message} else."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | NotImplementedError) and OWN_ERROR_PATTERN.search(text):
        return {"refused": text}
    return {"failed": _last_line(error)}


def _last_line(error: Exception) -> str:
    """Return the type and message of an error in up to 300 characters."""
    return " ".join(traceback.format_exception_only(error)[-1].split())[:300]


class StepMode(NamedTuple):
    """Dtype and loss function of a training step."""

    dtype: str
    has_model_loss: bool  # True for the loss of the model, False for the loss of this module


STEP_MODES = tuple(
    StepMode(dtype, has_model_loss)
    for has_model_loss in (True, False)
    for dtype in ("float64", "float32")
)


class Step(NamedTuple):
    """A training step: loss, logits [B, N, V], and gradients of parameters by name."""

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]


def examine_steps_over_ranks(model_type: str) -> dict[str, Any]:
    """Return {name of a build: result of `compare_steps_of_build`}, or {"not_built": reason}.

    All ranks must call this function, and return equal results. Each rank also computes the step of
    a single process.
    """
    try:
        fields_by_build = list_builds(model_type)
    except Exception as error:
        return {"not_built": _last_line(error)}
    result: dict[str, Any] = {}
    for name, fields in fields_by_build.items():
        try:
            build_result = compare_steps_of_build(model_type, fields)
        except Exception as error:
            # after an error in one rank, the ranks cannot continue together
            return {"model": None, **result, name: {TEXT: {"failed": _last_line(error)}}}
        if "not_built" not in build_result:
            inputs = build_result.pop("inputs")
            result = {**build_result, **result, name: inputs}
        elif name == "plain":
            return build_result
    return result


def list_builds(model_type: str) -> dict[str, dict[str, Any]]:
    """Return arguments of `tiny_config` by variant that the type supports.

    "plain" has the defaults, "windowed" sliding windows, and "dynamic" dynamic RoPE.
    """
    config_fields = vars(tiny_config(model_type))
    router_fields = {
        name: value for name, value in ROUTER_LOSS_FIELDS.items() if name in config_fields
    }
    result = {"plain": router_fields}
    windows = window_fields(model_type)
    if windows:
        result["windowed"] = {**router_fields, **windows}
    rope = config_fields.get("rope_parameters") or {}
    if rope.get("rope_type") == "default":
        fields = {**rope, **DYNAMIC_ROPE_FIELDS["rope_parameters"]}
        result["dynamic"] = {**router_fields, **DYNAMIC_ROPE_FIELDS, "rope_parameters": fields}
    return result


def compare_steps_of_build(model_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Build a model, and return the results of `compare_step_over_ranks` by name of the input."""
    try:
        model = tiny_model(model_type, **fields)
    except Exception as error:
        return {"not_built": _last_line(error)}
    fields_of_model = {"model": type(model).__name__}
    try:
        apply_cab(model, FULL_CONFIG)
    except Exception as error:
        return {**fields_of_model, "inputs": dict.fromkeys((TEXT, PACKED), describe_error(error))}
    try:
        single_model, mode, expected = run_step_in_one_process(model_type, fields)
        apply_cab(single_model, FULL_CONFIG)
    except Exception as error:
        return {"not_built": _last_line(error)}
    model = model.to(getattr(torch, mode.dtype))
    result = {TEXT: compare_step_over_ranks(model, make_batch(), mode, expected)}
    try:
        expected = run_step(single_model, pack_documents(make_batch()), mode)
    except Exception as error:
        result[PACKED] = describe_error(error)
    else:
        result[PACKED] = compare_step_over_ranks(
            model, pack_documents(make_batch()), mode, expected
        )
    return {**fields_of_model, "dtype": mode.dtype, "inputs": result}


def run_step_in_one_process(
    model_type: str, fields: Mapping[str, Any]
) -> tuple[PreTrainedModel, StepMode, Step]:
    """Return (model, mode, `Step`) with default attention, in the first mode that works.

    `STEP_MODES` lists the modes. Some types do not run in float64, or have no loss.
    """
    for mode in STEP_MODES:
        model = tiny_model(model_type, **fields).to(getattr(torch, mode.dtype))
        try:
            result = run_step(model, make_batch(), mode)
            if not result.logits.isfinite().all():
                raise ValueError("its logits are not finite")
            return model, mode, result
        except Exception:
            if mode == STEP_MODES[-1]:
                raise


def make_batch() -> dict[str, Tensor]:
    """Return a batch of two rows; the first seven tokens of each row have no label."""
    ids = make_inputs()["plain"]["input_ids"]
    labels = ids.clone()
    labels[:, :7] = -100
    return {"input_ids": ids, "labels": labels}


def pack_documents(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``batch`` with position ids that restart at 0 for each of `DOCUMENTS`."""
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])
    return {**batch, "position_ids": positions.expand_as(batch["input_ids"])}


def run_step(model: PreTrainedModel, inputs: Mapping[str, Tensor], mode: StepMode) -> Step:
    """Return the `Step` of ``inputs``: a batch, or a shard by `cab_hf.distributed.shard`."""
    model.zero_grad()
    # some types draw random numbers in the forward pass
    torch.manual_seed(2)
    if mode.has_model_loss:
        result = model(**inputs, use_cache=False)
        loss = result.loss
    else:
        inputs_without_labels = {
            name: x for name, x in inputs.items() if name not in LABEL_ARGUMENTS
        }
        result = model(**inputs_without_labels, use_cache=False)
        loss = _compute_loss(result.logits, inputs)
    loss.backward()
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }
    return Step(loss.detach(), result.logits.detach(), gradients)


def _compute_loss(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss over labels.

    For a shard, return its summed loss divided by the number of labels in all shards.
    """
    shifted_labels = inputs.get("shift_labels")
    if shifted_labels is None:
        shifted_labels = F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
    num_labels = inputs.get("num_items_in_batch", (shifted_labels != IGNORED_LABEL).sum())
    return (
        F.cross_entropy(logits.flatten(0, 1), shifted_labels.flatten(), reduction="sum")
        / num_labels
    )


def compare_step_over_ranks(
    model: PreTrainedModel, batch: Mapping[str, Tensor], mode: StepMode, expected: Step
) -> dict[str, Any]:
    """Return the relative errors of a step that is sharded over all ranks, or an error.

    An error is the result of `describe_error`.

    Args:
        model: model with "cab".
        batch: the complete batch, equal in all ranks.
        mode: mode of the step.
        expected: the `Step` of one process with default attention.
    """
    rank_step, failure = None, None
    with record_modules("cab") as layers:
        try:
            with cab_hf.context_parallel(model, block=BLOCK):
                inputs = distributed.shard(batch, block=BLOCK)
                rank_step = run_step(model, inputs, mode)
        except distributed.RankLost:
            raise
        except Exception as error:
            failure = describe_error(error)
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if any(failures):
        are_equal = len({tuple(rank_failure or ()) for rank_failure in failures}) == 1
        return failure if are_equal else {"failed": f"ranks differ: {failures}"}
    logits = distributed.unshard(rank_step.logits, inputs["cu_seq_lens_q"], block=BLOCK)
    for tensor in (rank_step.loss, *rank_step.gradients.values()):
        dist.all_reduce(tensor)
    largest_gradient = max(float(x.abs().max()) for x in expected.gradients.values())
    gradient_errors = (
        _relative_error(rank_step.gradients[name], gradient, MIN_GRADIENT_SCALE * largest_gradient)
        for name, gradient in expected.gradients.items()
    )
    errors = {
        "loss": _relative_error(rank_step.loss, expected.loss),
        "logits": _relative_error(logits, expected.logits),
        "gradients": max(gradient_errors),
    }
    if non_finite_names := [name for name, error in errors.items() if not math.isfinite(error)]:
        return {"failed": f"its {' and '.join(non_finite_names)} are not finite"}
    return {**errors, "layers": len(layers)}


def _relative_error(result: Tensor, expected: Tensor, min_scale: float = 0.0) -> float:
    """Return max |result - expected| / max(max |expected|, least); infinity for NaN."""
    error = float((result - expected).abs().max())
    if math.isnan(error):
        return math.inf
    return error / max(float(expected.abs().max()), min_scale) if error else 0.0
