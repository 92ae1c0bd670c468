"""The training loop of ``finetune/lora.py``."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate
from tqdm import tqdm

import cab_hf
from cab_hf.experiment import log as logs
from cab_hf.experiment.cache import file_sha256
from cab_hf.experiment.models import TRAINED_MODEL_FOLDER
from cab_hf.experiment.provenance import provenance
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import checkpoints, cost_model, curve, dry_run, finite
from cab_hf.finetune.adapters import WEIGHTS_FILE
from cab_hf.finetune.checkpoints import Checkpoints
from cab_hf.finetune.data import prefetch_sequences
from cab_hf.finetune.models import hash_base_model, save_adapter
from cab_hf.finetune.objective import (
    Batch,
    Objective,
    all_reduce_sums,
    compute_learning_rate,
    count_labels,
)
from cab_hf.finetune.offload import Offload
from cab_hf.finetune.parallel import ContextParallelism
from cab_hf.finetune.prepare import build_model, open_data
from cab_hf.finetune.rank_checks import (
    collect_facts,
    report_errors_to_all_processes,
    require_equal_facts,
)
from cab_hf.finetune.rotary import get_rotary_state, load_rotary_state
from cab_hf.finetune.settings import PROG, TRAIN_ALL, Settings
from cab_hf.finetune.tiles import choose_tile_tokens, compute_in_tiles
from cab_hf.finetune.validation import Validation

# files and a folder in the output folder of a run
LOG_FILE, CURVE_FILE, RESULTS_FILE = "log.jsonl", "curve.png", "results.json"
CHECKPOINTS_FOLDER = "checkpoints"
# types of errors that invalid settings may raise
SETTINGS_ERROR_TYPES = (ValueError, NotImplementedError)


def run(settings: Settings) -> int:
    """Train, or print the estimated cost if ``dry_run`` is set; return the exit status."""
    rank, expected_error_types = (
        int(os.environ.get("RANK", 0)),
        SETTINGS_ERROR_TYPES if settings.dry_run else (),
    )
    try:
        with (
            open_accelerator(settings) as accelerator,
            report_errors_to_all_processes(),
            convert_errors(expected_error_types),
        ):
            if settings.dry_run:
                dry_run.print_report(settings, accelerator)
            else:
                Run(settings, accelerator).train()
    except (UsageError, NotImplementedError) as error:
        process_phrase = f" (process {rank})" if rank else ""
        print(f"{PROG}{process_phrase}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        # any disk may be full, for example the disk with the cache of datasets
        if error.errno not in logs.DISK_FULL_ERRORS:
            raise
        print(f"{PROG}: {error.strerror}. Free disk space, and the run continues.", file=sys.stderr)
        return 2
    return 0


@contextmanager
def open_accelerator(settings: Settings) -> Iterator[Accelerator]:
    """Yield an Accelerator, which connects the processes of the run until the block ends."""
    accelerator = Accelerator(
        cpu=settings.cpu or not torch.cuda.is_available(),
        # `Objective` controls autocast; this value overrides the setting of a launcher
        mixed_precision="no",
        project_dir=settings.out,
    )
    try:
        yield accelerator
    finally:
        accelerator.end_training()


@contextmanager
def convert_errors(error_types: tuple[type[Exception], ...]) -> Iterator[None]:
    """Convert ``error_types`` and out-of-memory errors inside the block to a UsageError."""
    try:
        yield
    except error_types as error:
        raise UsageError(str(error)) from error
    except torch.OutOfMemoryError as error:
        peak_gib = torch.cuda.max_memory_allocated() / cost_model.GIB
        raise UsageError(
            f"the GPU ran out of memory at {peak_gib:.1f} GiB. Change "
            f"{dry_run.MEMORY_SAVING_OPTIONS}."
        ) from error


class Run:
    """A training run, which resumes from the newest checkpoint in its folder.

    Args:
        settings: the settings of the run.
        accelerator: accelerate's accelerator.

    Raises:
        UsageError: the settings do not fit the model, the data or the machine, or the folder
            contains a run with other settings.
    """

    def __init__(self, settings: Settings, accelerator: Accelerator) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.num_processes, self.rank = accelerator.num_processes, accelerator.process_index
        self.out = Path(settings.out)
        require_run_folder(self.out)
        with convert_errors(SETTINGS_ERROR_TYPES):
            self.num_micro_batches = settings.count_micro_batches(self.num_processes)
            # adapters are initialised randomly and must be equal in all processes
            set_seed(settings.seed)
            self.model, self.tokenizer = build_model(settings, accelerator.device)
            cost = cost_model.Cost.from_model(self.model)
            self._fit_into_memory(cost)
            self.parallelism = ContextParallelism(settings, self.model, accelerator)
            vocabulary_size = self.model.config.get_text_config().vocab_size
            packer, held_out_sequences, self.source_hashes = open_data(
                settings=settings,
                tokenizer=self.tokenizer,
                parallelism=self.parallelism,
                print_notice=self._print,
                vocabulary_size=vocabulary_size,
            )
            self._require_equal_processes()
        self.packer = packer
        self.data_position = packer.state_dict()  # after the last sequence that was trained on
        self.sequences = prefetch_sequences(packer, 2 * settings.micro_batch, settings.data_workers)
        self.cost = cost
        if cost.unknown_flops_reason:
            self._print(f"MFU is not reported: {cost.unknown_flops_reason}.")
        self.objective, self.optimizer = self._prepare_objective()
        self.validation = Validation(
            tokenizer=self.tokenizer,
            held_out_sequences=held_out_sequences,
            settings=settings,
            accelerator=accelerator,
            parallelism=self.parallelism,
        )
        self.checkpoints = Checkpoints(
            folder=self.out / CHECKPOINTS_FOLDER,
            rank=self.rank,
            num_processes=self.num_processes,
            wait_for_all=accelerator.wait_for_everyone,
            weights_folder_name=TRAINED_MODEL_FOLDER
            if settings.train == TRAIN_ALL
            else checkpoints.ADAPTER_FOLDER,
        )
        self.num_finished_steps = self._resume()  # number of finished steps

    def _fit_into_memory(self, cost: cost_model.Cost) -> None:
        """Install tiles and offloading.

        Values that the settings leave open are chosen by the length and by the memory estimate.

        Raises:
            UsageError: the estimate does not fit into memory.
        """
        settings, device = self.settings, self.accelerator.device
        num_tokens = settings.length * settings.micro_batch // settings.cp
        tile_tokens = choose_tile_tokens(num_tokens, settings.tile_tokens)
        if tile_tokens:
            compute_in_tiles(self.model, tile_tokens)
            for mlp_class in cost.untiled_mlp_classes:
                self._print(
                    f"{mlp_class} computes all tokens at once, because tiles need a plain MLP."
                )
        num_offloaded_layers = settings.offload_layers
        if num_offloaded_layers is None and device.type == "cuda":
            sharding_arguments, available_memory = (
                dry_run.make_sharding_arguments(self.accelerator),
                dry_run.get_available_memory(settings, device),
            )
            memory_fit = dry_run.choose_offloading(
                settings=settings,
                cost=cost,
                sharding_arguments=sharding_arguments,
                available_memory=available_memory,
            )
            dry_run.refuse_too_long_sequences(
                settings=settings,
                cost=cost,
                sharding_arguments=sharding_arguments,
                available_memory=available_memory,
                memory_fit=memory_fit,
            )
            num_offloaded_layers = memory_fit.num_offloaded_layers
            if num_offloaded_layers:
                self._print(f"{dry_run.format_offloading(settings, memory_fit)}.")
        if num_offloaded_layers:
            Offload(num_offloaded_layers, device).install_in_layers(self.model)

    def _require_equal_processes(self) -> None:
        """Raise a UsageError if processes have different settings, data or weights."""
        if self.num_processes == 1:
            return
        facts = collect_facts(self.settings, self.model, self.tokenizer)
        for setting, sha256_by_source in self.source_hashes.items():
            for source_number, sha256 in enumerate(sha256_by_source.values(), 1):
                facts[f"the content of source {source_number} of --{setting}"] = sha256
        require_equal_facts(
            {**facts, "the content of --calibration": compute_calibration_sha256(self.settings)}
        )

    def _prepare_objective(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Build the objective and the optimizer, and wrap both with accelerate."""
        settings = self.settings
        optimizer = torch.optim.AdamW(
            checkpoints.get_trained_parameters(self.model).values(),
            lr=settings.lr,
            betas=(0.9, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=self.accelerator.device.type == "cuda",
        )
        needs_autocast = settings.dtype != settings.weights_dtype
        autocast_dtype = getattr(torch, settings.dtype) if needs_autocast else None
        objective = Objective(self.model, autocast_dtype)
        objective, optimizer = self.accelerator.prepare(objective, optimizer)
        return objective.train(), optimizer

    def _resume(self) -> int:
        """Load the newest checkpoint if there is one; return the number of finished steps."""
        # dropout masks must differ between processes
        set_seed(self.settings.seed + self.rank)
        # all ranks use the checkpoint that rank 0 finds, because file systems may be out of sync
        (newest_checkpoint,) = broadcast_object_list([self.checkpoints.find_newest()])
        if newest_checkpoint is None:
            return 0
        # opening the log raises an error if its settings differ, before the checkpoint is read. An
        # empty log is not opened, because opening would write the settings of this run
        log_file = self.out / LOG_FILE
        is_log_empty = log_file.is_file() and b"\n" not in log_file.read_bytes()
        if logs.file_exists(log_file) and not is_log_empty:
            with self._open_log():
                pass
        shared_state, process_state = self.checkpoints.load(newest_checkpoint)
        if self.accelerator.is_main_process:
            identity = logs.convert_through_json(self._run_identity)
            logs.require_identity(newest_checkpoint, json.loads(shared_state["identity"]), identity)
        checkpoints.load_parameters(self.model, shared_state["parameters"])
        checkpoints.load_optimizer(self.optimizer, self.model, shared_state["optimizer"])
        self.data_position = json.loads(process_state["data"])
        self.packer.load_state_dict(self.data_position)
        checkpoints.load_random_state(process_state["random"])
        load_rotary_state(self.model, process_state["rotary"])
        return shared_state["step"]

    def train(self) -> None:
        """Train the remaining steps, and write the results."""
        sharding_context = self.parallelism.shard_model_inputs(self.model)
        sigterm_context = checkpoints.catch_sigterm()
        is_progress_hidden = not self.accelerator.is_local_main_process
        progress_bar = tqdm(
            total=self.settings.steps,
            initial=self.num_finished_steps,
            unit="step",
            disable=is_progress_hidden,
        )
        with (
            self._open_log() as log,
            sharding_context,
            sigterm_context as is_stop_requested,
            progress_bar,
        ):
            if log is not None:
                logged_steps = [
                    record["step"]
                    for record in log.records
                    if record["kind"] == curve.STEP_RECORD_KIND
                ]
                num_logged_steps = sum(step <= self.num_finished_steps for step in logged_steps)
                if num_logged_steps < self.num_finished_steps:
                    self._print(
                        f"{LOG_FILE} has {num_logged_steps} of the {self.num_finished_steps} steps "
                        "that were made before."
                    )
            for step in range(self.num_finished_steps + 1, self.settings.steps + 1):
                record, should_stop = self._run_step(step, is_stop_requested)
                self._append_record(log, curve.STEP_RECORD_KIND, step, record)
                progress_bar.set_postfix(loss=f"{record['loss']:.3f}", refresh=False)
                progress_bar.update()
                is_last_step = step == self.settings.steps
                if is_due(self.settings.eval_every, step, is_last_step):
                    # evaluation may change the RoPE state, because its sequences may be longer
                    saved_rotary_state = get_rotary_state(self.model)
                    evaluation_fields = self.validation.evaluate(self.objective)
                    load_rotary_state(self.model, saved_rotary_state)
                    self._append_record(log, curve.EVALUATION_RECORD_KIND, step, evaluation_fields)
                    # the densities of training must not include the evaluation
                    cab_hf.stats(self.model, reset=True)
                if should_stop or is_due(self.settings.save_every, step, is_last_step):
                    self._save_checkpoint(step)
                if should_stop and not is_last_step:
                    self._print(f"stopped at step {step} on request; the same command continues.")
                    return
            if log is not None:
                self._write_results(log)

    def _run_step(
        self, step: int, is_stop_requested: Callable[[], bool]
    ) -> tuple[dict[str, Any], bool]:
        """Run one optimizer step: forward and backward passes, clipping and update.

        Args:
            step: number of the step.
            is_stop_requested: function that returns True if this process received SIGTERM.

        Returns:
            record: the fields of the step in the log.
            should_stop: True if any process received SIGTERM.
        """
        settings, accelerator, start_seconds = self.settings, self.accelerator, time.perf_counter()
        micro_batches = []
        for _ in range(self.num_micro_batches):
            sequences = []
            for _ in range(settings.micro_batch):
                sequence, self.data_position = next(self.sequences)
                sequences.append(sequence)
            micro_batches.append(self.parallelism.shard_batch(default_collate(sequences)))
        num_labels = float(sum(count_labels(batch) for batch in micro_batches))
        (num_labels,) = all_reduce_sums([num_labels], accelerator)
        lr = compute_learning_rate(step, settings)
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = lr
        loss_sum, token_and_flop_counts = self._accumulate_gradients(micro_batches, num_labels)
        grad_norm = self._clip_gradients()
        finite.require_finite_step(
            step=step, loss=loss_sum, grad_norm=grad_norm, model=self.model, accelerator=accelerator
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss_sum, num_stop_requests, *token_and_flop_totals = all_reduce_sums(
            [loss_sum, float(is_stop_requested()), *token_and_flop_counts.tolist()], accelerator
        )
        peak_flops = None
        if self.cost.unknown_flops_reason is None:
            peak_flops = cost_model.get_peak_flops(accelerator.device, settings.peak_tflops)
        # no device sync is needed before reading the clock, because `all_reduce_sums` was one
        throughput_fields = cost_model.make_step_log_fields(
            token_and_flop_totals=token_and_flop_totals,
            step_seconds=time.perf_counter() - start_seconds,
            num_processes=self.num_processes,
            peak_flops_per_device=peak_flops,
        )
        peak_gib = cost_model.pop_peak_memory_gib(accelerator.device)
        record = {"loss": loss_sum / max(1.0, num_labels), "grad_norm": grad_norm, "lr": lr}
        return {**record, **throughput_fields, "peak_gib": peak_gib}, num_stop_requests > 0

    def _accumulate_gradients(
        self, micro_batches: Sequence[Batch], num_labels: float
    ) -> tuple[float, torch.Tensor]:
        """Run forward and backward passes of all micro batches, which accumulate gradients.

        Args:
            micro_batches: the batches of this process.
            num_labels: number of labels in all processes.

        Returns:
            total_loss: summed loss of this process.
            token_and_flop_counts: float64 [4], sum of `cost_model.count_flops` over the micro
                batches.
        """
        # the loss is the mean over the labels of all processes; the factor `num_processes` cancels
        # the average of gradients over processes by DDP and FSDP
        loss_scale = self.num_processes / max(1.0, num_labels)
        total_loss = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)
        token_and_flop_counts = torch.zeros(4, dtype=torch.float64)
        for batch_number, batch in enumerate(micro_batches, 1):
            device_batch = {
                input_name: tensor.to(total_loss.device) for input_name, tensor in batch.items()
            }
            # gradients are exchanged after the last micro batch
            is_last_batch = batch_number == len(micro_batches)
            with nullcontext() if is_last_batch else self.accelerator.no_sync(self.objective):
                loss = self.objective(device_batch)
                self.accelerator.backward(loss * loss_scale)
            total_loss += loss.detach()
            positions = self.parallelism.get_local_positions(batch)
            token_and_flop_counts += cost_model.count_flops(
                self.cost, positions, cab_hf.stats(self.model, reset=True)
            )
        return total_loss.item(), token_and_flop_counts

    def _clip_gradients(self) -> float:
        """Clip the gradients by their norm over all processes; return the norm before clipping."""
        parameters = list(checkpoints.get_trained_parameters(self.model).values())
        grad_norm = nn.utils.clip_grad_norm_(parameters, self.settings.clip or float("inf"))
        return (grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm).item()

    def _save_checkpoint(self, step: int) -> None:
        """Save the checkpoint of ``step``; all processes must call this method."""
        parameters = checkpoints.copy_parameters(self.model)
        optimizer_states = checkpoints.copy_optimizer_state(self.optimizer, self.model)
        finite.require_finite_state(step, parameters, optimizer_states)
        shared_state = {"parameters": parameters, "optimizer": optimizer_states}
        if self.accelerator.is_main_process:
            shared_state["identity"] = json.dumps(self._run_identity)
        process_state = {
            "random": checkpoints.get_random_state(),
            "data": json.dumps(self.data_position),
            "rotary": get_rotary_state(self.model),
        }

        def write_weights(weights_folder: Path) -> None:
            dtype = getattr(torch, self.settings.adapter_dtype)
            cast_parameters = {name: parameter.to(dtype) for name, parameter in parameters.items()}
            if self.settings.train == TRAIN_ALL:
                self.model.save_pretrained(weights_folder, state_dict=cast_parameters)
                self.tokenizer.save_pretrained(weights_folder)
            else:
                save_adapter(self.model, self.tokenizer, weights_folder, cast_parameters)

        self.checkpoints.save(step, shared_state, process_state, write_weights)

    def _write_results(self, log: logs.Log) -> None:
        """Copy the trained weights to the output folder; write the curve and the provenance."""
        settings = {
            setting: setting_value
            for setting, setting_value in asdict(self.settings).items()
            if setting != "out"
        }
        evaluations = [
            record for record in log.records if record["kind"] == curve.EVALUATION_RECORD_KIND
        ]
        results = {
            "provenance": provenance(settings, self.accelerator.device, log.started),
            "processes": self.num_processes,
            "evaluation": evaluations[-1] if evaluations else None,
        }
        weights_folder_name = self.checkpoints.weights_folder_name
        with logs.convert_write_errors(self.out):
            trained_folder = self.checkpoints.find_newest() / weights_folder_name
            shutil.copytree(trained_folder, self.out / weights_folder_name, dirs_exist_ok=True)
            self.checkpoints.remove_incomplete()
            curve.draw_training_curves(self.out / CURVE_FILE, log.records)
            logs.write_atomically(self.out / RESULTS_FILE, json.dumps(results, indent=2) + "\n")
        self._print(
            f"{self.settings.steps} steps; {self.out / weights_folder_name}, "
            f"{self.out / CURVE_FILE}"
        )

    def _open_log(self) -> Any:
        """Return a context manager that yields the log in the main process, else None."""
        if not self.accelerator.is_main_process:
            return nullcontext()
        return logs.Log(self.out / LOG_FILE, self._run_identity, ("kind", "step"))

    @cached_property
    def _run_identity(self) -> dict[str, Any]:
        """Return settings and SHA-256 of input files, which must be equal when a run resumes."""
        settings = self.settings
        sha256_by_input = {
            "model": hash_base_model(self.model),
            "calibration": compute_calibration_sha256(settings),
        }
        sha256_by_input |= self.source_hashes
        if settings.adapter:
            sha256_by_input["adapter"] = file_sha256(Path(settings.adapter) / WEIGHTS_FILE)
        return {**settings.get_identity(self.num_processes), "sha256": sha256_by_input}

    def _append_record(
        self, log: logs.Log | None, record_kind: str, step: int, record: Mapping[str, Any]
    ) -> None:
        """Append a record of ``record_kind`` to ``log``, unless ``log`` is None."""
        if log is not None:
            log.append({"kind": record_kind, "step": step, **record})

    def _print(self, message: str) -> None:
        """Print ``message`` in the main process."""
        if self.accelerator.is_main_process:
            tqdm.write(message)


def is_due(interval_steps: int, step: int, is_last_step: bool) -> bool:
    """Return True at each multiple of ``interval_steps`` and at the last step; never for 0."""
    return bool(interval_steps) and (is_last_step or step % interval_steps == 0)


def compute_calibration_sha256(settings: Settings) -> str | None:
    """Return the SHA-256 of the file in ``--calibration``; None without a calibration."""
    return file_sha256(Path(settings.calibration)) if settings.calibration else None


def require_run_folder(folder: Path) -> None:
    """Raise a UsageError if ``folder`` contains files but no log and no checkpoints."""
    file_names = {path.name for path in folder.glob("[!.]*")} if folder.is_dir() else set()
    if file_names and not file_names & {LOG_FILE, CHECKPOINTS_FOLDER}:
        raise UsageError(
            f"out must be a new or an empty folder or the folder of a run, got {folder}, which "
            f"contains {min(file_names)!r} and no run."
        )
