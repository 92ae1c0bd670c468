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
    FIRST_REGULAR_TOKEN,
    ROPE_PARAMETERS,
    VOCAB_SIZE,
    make_tiny_config,
    make_tiny_model,
    make_window_fields,
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
    DOCUMENT_LENGTHS,
    FULL_CONFIG,
    MIN_GRADIENT_SCALE,
    NUM_PADDING_TOKENS,
    NUM_TOKENS,
    ONE_TEXT_INPUT,
    PACKED_INPUT,
    Families,
)
from cab_hf.patches import apply_cab

BLOCK_TOKENS = 32  # tokens: chunks of ranks in `context_parallel` are multiples of this number
# modules that the fork server imports; Python 3.11 cannot import this module there
PRELOADED_MODULES = ["cab_hf.eval.families", "cab_hf.patches", "torch.multiprocessing"]
PRELOADED_MODULES += ["transformers.models.auto.modeling_auto", "transformers.masking_utils"]
SAMPLE_FILE = "sample.json"  # file in which rank 0 stores its result record
# config fields of mixture-of-experts models that add the router loss to the loss
ROUTER_LOSS_FIELDS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
# dynamic RoPE: frequencies depend on the longest position; inputs are longer than 64 positions
DYNAMIC_ROPE_FIELDS = {
    "rope_parameters": {**ROPE_PARAMETERS, "rope_type": "dynamic", "factor": 4.0},
    "max_position_embeddings": 64,
}
# arguments of a model that only its loss uses
LABEL_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch")
# messages of errors that this project raises match this pattern
CAB_ERROR_PATTERN = re.compile("cab|context_parallel")


class Sweep(Families):
    """Experiment that compares "cab" with the default attention for each type in its settings."""

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for model_type in self.settings.types:
            yield {"model_type": model_type}

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        settings = self.settings
        return examine_in_processes(
            case["model_type"], settings.ranks, settings.timeout, settings.memory
        )


def examine_in_processes(
    model_type: str, num_ranks: int, timeout_seconds: float, memory_gib: float
) -> dict[str, Any]:
    """Examine a model type in new processes, and return the result record of rank 0.

    Args:
        model_type: type of the model, such as "llama".
        num_ranks: number of processes; several processes form a gloo group.
        timeout_seconds: seconds after which the processes are killed.
        memory_gib: limit of address space per process in GiB.

    Returns:
        The result of `examine_model_type` or `examine_steps_over_ranks`; {"not_built": reason}
        after a timeout or a crash of a process.
    """
    # fork from a process that has imported all libraries but started no threads
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED_MODULES)
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryDirectory() as exchange_folder:
        process_group = start_processes(
            _run_child,
            args=(model_type, memory_gib, num_ranks, exchange_folder),
            nprocs=num_ranks,
            join=False,
            daemon=True,
            start_method="forkserver",
        )
        try:
            while not process_group.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    return {"not_built": f"took longer than {timeout_seconds:g} seconds"}
            return json.loads(Path(exchange_folder, SAMPLE_FILE).read_text())
        except (ProcessExitedException, ProcessRaisedException) as error:
            exit_code = getattr(error, "exit_code", 1)
            return {"not_built": f"its process died with exit code {exit_code}"}
        finally:
            for process in process_group.processes:
                process.kill()
                process.join()


def _run_child(
    rank: int, model_type: str, memory_gib: float, num_ranks: int, exchange_folder: str
) -> None:
    """Examine a type as ``rank``; rank 0 writes the result record to ``exchange_folder``."""
    limit_bytes = round(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    torch.set_num_threads(1)
    if num_ranks == 1:
        result_record = examine_model_type(model_type)
    else:
        store_url = f"file://{exchange_folder}/store"
        dist.init_process_group("gloo", init_method=store_url, rank=rank, world_size=num_ranks)
        result_record = examine_steps_over_ranks(model_type)
    if rank == 0:
        Path(exchange_folder, SAMPLE_FILE).write_text(json.dumps(result_record))
    # exit without destroying the group, which would wait for ranks that may have died
    os._exit(0)


def examine_model_type(model_type: str) -> dict[str, Any]:
    """Return the results of `compare_logits` by name of the switch, or {"not_built": reason}.

    The names are "by_name" for `load_by_name`, and "applied" for `copy_with_cab`.
    """
    try:
        model, expected_logits, inputs_reading_padding = build_model(model_type)
        result_record = {
            "model": type(model).__name__,
            "reads_padding": inputs_reading_padding,
            "by_name": compare_logits(load_by_name, model, expected_logits),
            "applied": compare_logits(copy_with_cab, model, expected_logits),
        }
        window_fields = make_window_fields(model_type)
        if window_fields:
            model, expected_logits, _ = build_model(model_type, **window_fields)
            result_record["windowed"] = compare_logits(copy_with_cab, model, expected_logits)
        return result_record
    except Exception as error:
        return {"not_built": _format_error(error)}


def build_model(
    model_type: str, **config_fields: Any
) -> tuple[PreTrainedModel, dict[str, Tensor], list[str]]:
    """Build a model of a type, and compute its logits with its default attention.

    Returns:
        (model, logits by name of the input, names of inputs for which the ids of padding tokens
        change the logits of other tokens).
    """
    model = make_tiny_model(model_type, **config_fields)
    expected_logits = {
        input_name: compute_logits(model, **model_inputs)
        for input_name, model_inputs in make_inputs().items()
    }
    padded_logits = {
        input_name: compute_logits(model, **model_inputs)
        for input_name, model_inputs in make_inputs(FIRST_REGULAR_TOKEN).items()
    }
    inputs_reading_padding = [
        input_name
        for input_name in expected_logits
        if _compute_max_difference(padded_logits[input_name], expected_logits[input_name])
        > DIFFERENCE_LIMITS["difference"]
    ]
    try:
        with mask_across_documents(model):
            document_logits = compute_logits(model, **make_packed_inputs()[PACKED_INPUT])
    except Exception:
        # models of some types do not accept position ids: omit packed inputs
        return model, expected_logits, inputs_reading_padding
    return (
        model,
        expected_logits | dict.fromkeys(make_packed_inputs(), document_logits),
        inputs_reading_padding,
    )


def make_inputs(padding_id: int | None = None) -> dict[str, dict[str, Any]]:
    """Return model arguments by name: "plain", "left padded" and "right padded", two rows each.

    Row 0 of the padded inputs has padding. ``padding_id`` is the id of padding tokens; None: random
    ids, which must not change the logits of other tokens.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FIRST_REGULAR_TOKEN, VOCAB_SIZE, (2, NUM_TOKENS), generator=generator)
    inputs_by_name = {"plain": {"input_ids": ids}}
    for input_name, padding_slice in (
        ("left padded", slice(NUM_PADDING_TOKENS)),
        ("right padded", slice(-NUM_PADDING_TOKENS, None)),
    ):
        mask, padded_ids = torch.ones_like(ids), ids.clone()
        mask[0, padding_slice] = 0
        if padding_id is not None:
            padded_ids[0, padding_slice] = padding_id
        inputs_by_name[input_name] = {"input_ids": padded_ids, "attention_mask": mask}
    return inputs_by_name


def make_packed_inputs() -> dict[str, dict[str, Any]]:
    """Return model arguments by name: the tokens of `make_inputs` as packed documents.

    There are three inputs: without mask and cache, with a mask of ones, and with a cache. All three
    must have the same logits. `DOCUMENT_LENGTHS` has the lengths of the documents.
    """
    packed_inputs = pack_documents(make_inputs()["plain"]) | {"use_cache": False}
    mask_input = {"attention_mask": torch.ones_like(packed_inputs["input_ids"])}
    return {
        PACKED_INPUT: packed_inputs,
        f"{PACKED_INPUT}, mask": packed_inputs | mask_input,
        f"{PACKED_INPUT}, cache": packed_inputs | {"use_cache": True},
    }


@contextmanager
def mask_across_documents(model: PreTrainedModel) -> Iterator[None]:
    """Make the default attention mask pairs of different documents, inside the ``with`` block."""
    implementation = model.config.get_text_config()._attn_implementation
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    lengths = torch.tensor(DOCUMENT_LENGTHS)
    doc_ids = torch.arange(len(DOCUMENT_LENGTHS)).repeat_interleave(lengths).expand(2, -1)

    def make_document_mask(*, mask_function: Any, **options: Any) -> Any:
        mask_function = and_masks(mask_function, packed_sequence_mask_function(doc_ids))
        options["allow_is_causal_skip"] = False
        return make_mask(mask_function=mask_function, **options)

    AttentionMaskInterface.register(implementation, make_document_mask)
    try:
        yield
    finally:
        AttentionMaskInterface.register(implementation, make_mask)


def compute_logits(
    model: PreTrainedModel, attention_mask: Tensor | None = None, **model_inputs: Any
) -> Tensor:
    """Return the logits of all tokens that are not padding, [tokens, vocabulary].

    Raises:
        ValueError: a logit is not finite.
    """
    # some types draw random numbers in the forward pass, which must be equal in all calls
    torch.manual_seed(2)
    mask_argument = {} if attention_mask is None else {"attention_mask": attention_mask}
    with torch.no_grad():
        logits = model(**model_inputs, **mask_argument).logits
    logits = logits.flatten(0, 1) if attention_mask is None else logits[attention_mask.bool()]
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
    return logits


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
    switch_to_cab: Callable[[PreTrainedModel], PreTrainedModel],
    model: PreTrainedModel,
    expected_logits: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Switch a model to "cab", and compare its logits with ``expected_logits``.

    Args:
        switch_to_cab: `load_by_name` or `copy_with_cab`, which return the model with "cab".
        model: model with its default attention.
        expected_logits: logits by name of the input.

    Returns:
        {"inputs": {name of the input: {"difference": largest difference of a logit}, or the result
        of `describe_error`}, "layers": number of layers that "cab" computed, "sparse": number of
        these layers with a plan}.
    """
    with record_attention_modules("cab") as cab_layers:
        try:
            cab_model = switch_to_cab(model)
        except Exception as error:
            outcomes = dict.fromkeys(expected_logits, describe_error(error))
            return {"inputs": outcomes, "layers": 0, "sparse": 0}
        outcome_by_input = {}
        for input_name, model_inputs in (make_inputs() | make_packed_inputs()).items():
            if input_name not in expected_logits:
                continue
            try:
                outcome_by_input[input_name] = {
                    "difference": _compute_max_difference(
                        compute_logits(cab_model, **model_inputs), expected_logits[input_name]
                    )
                }
            except Exception as error:
                outcome_by_input[input_name] = describe_error(error)
    num_sparse_layers = sum(module in attended_pairs for module in cab_layers)
    return {"inputs": outcome_by_input, "layers": len(cab_layers), "sparse": num_sparse_layers}


def _compute_max_difference(result: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference."""
    return float((result - expected).abs().max())


@contextmanager
def record_attention_modules(implementation: str) -> Iterator[set[nn.Module]]:
    """Yield a set to which each module that calls ``implementation`` is added inside the block."""
    original_attention, calling_modules = ALL_ATTENTION_FUNCTIONS[implementation], set()

    def record_and_attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
    ) -> Any:
        calling_modules.add(module)
        return original_attention(module, q, k, v, mask, **options)

    AttentionInterface.register(implementation, record_and_attend)
    try:
        yield calling_modules
    finally:
        AttentionInterface.register(implementation, original_attention)


def describe_error(error: Exception) -> dict[str, str]:
    """Return {"refused": message} for an error of this project, and {"failed": message} else."""
    message = " ".join(str(error).split())
    if isinstance(error, ValueError | NotImplementedError) and CAB_ERROR_PATTERN.search(message):
        return {"refused": message}
    return {"failed": _format_error(error)}


def _format_error(error: Exception) -> str:
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


class TrainingStep(NamedTuple):
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
        return {"not_built": _format_error(error)}
    result_record: dict[str, Any] = {}
    for build_name, config_fields in fields_by_build.items():
        try:
            build_result = compare_steps_of_build(model_type, config_fields)
        except Exception as error:
            # after an error in one rank, the ranks cannot continue together
            return {
                "model": None,
                **result_record,
                build_name: {ONE_TEXT_INPUT: {"failed": _format_error(error)}},
            }
        if "not_built" not in build_result:
            outcome_by_input = build_result.pop("inputs")
            result_record = {**build_result, **result_record, build_name: outcome_by_input}
        elif build_name == "plain":
            return build_result
    return result_record


def list_builds(model_type: str) -> dict[str, dict[str, Any]]:
    """Return arguments of `make_tiny_config` by variant that the type supports.

    "plain" has the defaults, "windowed" sliding windows, and "dynamic" dynamic RoPE.
    """
    config_fields = vars(make_tiny_config(model_type))
    router_fields = {
        field_name: value
        for field_name, value in ROUTER_LOSS_FIELDS.items()
        if field_name in config_fields
    }
    fields_by_build = {"plain": router_fields}
    window_fields = make_window_fields(model_type)
    if window_fields:
        fields_by_build["windowed"] = {**router_fields, **window_fields}
    rope_parameters = config_fields.get("rope_parameters") or {}
    if rope_parameters.get("rope_type") == "default":
        dynamic_rope_parameters = {**rope_parameters, **DYNAMIC_ROPE_FIELDS["rope_parameters"]}
        fields_by_build["dynamic"] = {
            **router_fields,
            **DYNAMIC_ROPE_FIELDS,
            "rope_parameters": dynamic_rope_parameters,
        }
    return fields_by_build


def compare_steps_of_build(model_type: str, config_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Build a model, and return the results of `compare_step_over_ranks` by name of the input."""
    try:
        model = make_tiny_model(model_type, **config_fields)
    except Exception as error:
        return {"not_built": _format_error(error)}
    model_record = {"model": type(model).__name__}
    try:
        apply_cab(model, FULL_CONFIG)
    except Exception as error:
        return {
            **model_record,
            "inputs": dict.fromkeys((ONE_TEXT_INPUT, PACKED_INPUT), describe_error(error)),
        }
    try:
        single_process_model, step_mode, expected_step = run_step_in_one_process(
            model_type, config_fields
        )
        apply_cab(single_process_model, FULL_CONFIG)
    except Exception as error:
        return {"not_built": _format_error(error)}
    model = model.to(getattr(torch, step_mode.dtype))
    outcome_by_input = {
        ONE_TEXT_INPUT: compare_step_over_ranks(model, make_batch(), step_mode, expected_step)
    }
    try:
        expected_step = run_step(single_process_model, pack_documents(make_batch()), step_mode)
    except Exception as error:
        outcome_by_input[PACKED_INPUT] = describe_error(error)
    else:
        outcome_by_input[PACKED_INPUT] = compare_step_over_ranks(
            model, pack_documents(make_batch()), step_mode, expected_step
        )
    return {**model_record, "dtype": step_mode.dtype, "inputs": outcome_by_input}


def run_step_in_one_process(
    model_type: str, config_fields: Mapping[str, Any]
) -> tuple[PreTrainedModel, StepMode, TrainingStep]:
    """Return (model, mode, `TrainingStep`) with default attention, in the first mode that works.

    `STEP_MODES` lists the modes. Some types do not run in float64, or have no loss.
    """
    for step_mode in STEP_MODES:
        model = make_tiny_model(model_type, **config_fields).to(getattr(torch, step_mode.dtype))
        try:
            step = run_step(model, make_batch(), step_mode)
            if not step.logits.isfinite().all():
                raise ValueError("its logits are not finite")
            return model, step_mode, step
        except Exception:
            if step_mode == STEP_MODES[-1]:
                raise


def make_batch() -> dict[str, Tensor]:
    """Return a batch of two rows; the first seven tokens of each row have no label."""
    ids = make_inputs()["plain"]["input_ids"]
    labels = ids.clone()
    labels[:, :7] = -100
    return {"input_ids": ids, "labels": labels}


def pack_documents(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``batch`` with position ids that restart at 0 for each of `DOCUMENT_LENGTHS`."""
    positions = torch.cat([torch.arange(length) for length in DOCUMENT_LENGTHS])
    return {**batch, "position_ids": positions.expand_as(batch["input_ids"])}


def run_step(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], step_mode: StepMode
) -> TrainingStep:
    """Return the `TrainingStep` of ``inputs``: a batch, or a shard of `distributed.shard`."""
    model.zero_grad()
    # some types draw random numbers in the forward pass
    torch.manual_seed(2)
    if step_mode.has_model_loss:
        output = model(**inputs, use_cache=False)
        loss = output.loss
    else:
        inputs_without_labels = {
            name: x for name, x in inputs.items() if name not in LABEL_ARGUMENTS
        }
        output = model(**inputs_without_labels, use_cache=False)
        loss = _compute_loss(output.logits, inputs)
    loss.backward()
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }
    return TrainingStep(loss.detach(), output.logits.detach(), gradients)


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
    model: PreTrainedModel,
    batch: Mapping[str, Tensor],
    step_mode: StepMode,
    expected_step: TrainingStep,
) -> dict[str, Any]:
    """Return the relative errors of a step that is sharded over all ranks, or an error.

    An error is the result of `describe_error`.

    Args:
        model: model with "cab".
        batch: the complete batch, equal in all ranks.
        step_mode: mode of the step.
        expected_step: the `TrainingStep` of one process with default attention.
    """
    rank_step, failure = None, None
    with record_attention_modules("cab") as cab_layers:
        try:
            with cab_hf.context_parallel(model, block=BLOCK_TOKENS):
                sharded_batch = distributed.shard(batch, block=BLOCK_TOKENS)
                rank_step = run_step(model, sharded_batch, step_mode)
        except distributed.RankLost:
            raise
        except Exception as error:
            failure = describe_error(error)
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if any(failures):
        are_equal = len({tuple(rank_failure or ()) for rank_failure in failures}) == 1
        return failure if are_equal else {"failed": f"ranks differ: {failures}"}
    logits = distributed.unshard(
        rank_step.logits, sharded_batch["cu_seq_lens_q"], block=BLOCK_TOKENS
    )
    for summed_tensor in (rank_step.loss, *rank_step.gradients.values()):
        dist.all_reduce(summed_tensor)
    largest_gradient = max(
        float(gradient_tensor.abs().max()) for gradient_tensor in expected_step.gradients.values()
    )
    gradient_errors = (
        _compute_relative_error(
            rank_step.gradients[name], gradient, MIN_GRADIENT_SCALE * largest_gradient
        )
        for name, gradient in expected_step.gradients.items()
    )
    relative_errors = {
        "loss": _compute_relative_error(rank_step.loss, expected_step.loss),
        "logits": _compute_relative_error(logits, expected_step.logits),
        "gradients": max(gradient_errors),
    }
    if non_finite_names := [
        name for name, error in relative_errors.items() if not math.isfinite(error)
    ]:
        return {"failed": f"its {' and '.join(non_finite_names)} are not finite"}
    return {**relative_errors, "layers": len(cab_layers)}


def _compute_relative_error(result: Tensor, expected: Tensor, min_scale: float = 0.0) -> float:
    """Return max |result - expected| / max(max |expected|, min_scale); infinity for NaN."""
    error = float((result - expected).abs().max())
    if math.isnan(error):
        return math.inf
    return error / max(float(expected.abs().max()), min_scale) if error else 0.0
