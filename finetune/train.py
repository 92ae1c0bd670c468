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
from cab_hf.experiment.models import TRAINED
from cab_hf.experiment.provenance import provenance
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import checkpoints, cost_model, curve, dry_run, finite
from cab_hf.finetune.adapters import WEIGHTS
from cab_hf.finetune.checkpoints import Checkpoints
from cab_hf.finetune.data import prefetched
from cab_hf.finetune.models import loaded_sha256, save_adapter
from cab_hf.finetune.objective import Batch, Objective, labelled, learning_rate, one_sum
from cab_hf.finetune.offload import Offload
from cab_hf.finetune.parallel import Parallel
from cab_hf.finetune.prepare import build, open_data
from cab_hf.finetune.rank_checks import ending_together, facts_of, require_equal
from cab_hf.finetune.rotary import load_rotary_state, rotary_state
from cab_hf.finetune.settings import ALL, PROG, Settings
from cab_hf.finetune.tiles import compute_in_tiles, tile_of
from cab_hf.finetune.validation import Validation

# files and a folder in the output folder of a run
LOG, CURVE, RESULTS = "log.jsonl", "curve.png", "results.json"
CHECKPOINTS = "checkpoints"
# types of errors that invalid settings may raise
OF_SETTINGS = (ValueError, NotImplementedError)


def run(settings: Settings) -> int:
    """Train, or print the estimated cost if ``dry_run`` is set; return the exit status."""
    rank, expected_errors = int(os.environ.get("RANK", 0)), OF_SETTINGS if settings.dry_run else ()
    try:
        with accelerating(settings) as accelerator, ending_together(), refusing(expected_errors):
            if settings.dry_run:
                dry_run.print_report(settings, accelerator)
            else:
                Run(settings, accelerator).train()
    except (UsageError, NotImplementedError) as error:
        process = f" (process {rank})" if rank else ""
        print(f"{PROG}{process}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        # any disk may be full, for example the disk with the cache of datasets
        if error.errno not in logs.DISK_FULL:
            raise
        print(f"{PROG}: {error.strerror}. Free disk space, and the run continues.", file=sys.stderr)
        return 2
    return 0


@contextmanager
def accelerating(settings: Settings) -> Iterator[Accelerator]:
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
def refusing(errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Convert ``errors`` and out-of-memory errors of the GPU inside the block to a UsageError."""
    try:
        yield
    except errors as error:
        raise UsageError(str(error)) from error
    except torch.OutOfMemoryError as error:
        peak = torch.cuda.max_memory_allocated() / cost_model.GIB
        raise UsageError(
            f"the GPU ran out of memory at {peak:.1f} GiB. Change {dry_run.SAVINGS}."
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
        self.processes, self.rank = accelerator.num_processes, accelerator.process_index
        self.out = Path(settings.out)
        require_run(self.out)
        with refusing(OF_SETTINGS):
            self.accumulation = settings.accumulation(self.processes)
            # adapters are initialised randomly and must be equal in all processes
            set_seed(settings.seed)
            self.model, self.tokenizer = build(settings, accelerator.device)
            cost = cost_model.Cost.of(self.model)
            self._fit_into_memory(cost)
            self.parallel = Parallel(settings, self.model, accelerator)
            vocabulary = self.model.config.get_text_config().vocab_size
            packed, held_out, self.source_hashes = open_data(
                settings=settings,
                tokenizer=self.tokenizer,
                parallel=self.parallel,
                notify=self._tell,
                vocabulary=vocabulary,
            )
            self._require_equal_processes()
        self.packed = packed
        self.position = packed.state_dict()  # after the last sequence that was trained on
        self.data = prefetched(packed, 2 * settings.micro_batch, settings.data_workers)
        self.cost = cost
        if cost.uncounted:
            self._tell(f"MFU is not reported: {cost.uncounted}.")
        self.objective, self.optimizer = self._prepare()
        self.validation = Validation(
            tokenizer=self.tokenizer,
            held_out=held_out,
            settings=settings,
            accelerator=accelerator,
            parallel=self.parallel,
        )
        self.checkpoints = Checkpoints(
            folder=self.out / CHECKPOINTS,
            rank=self.rank,
            processes=self.processes,
            wait=accelerator.wait_for_everyone,
            result=TRAINED if settings.train == ALL else checkpoints.ADAPTER,
        )
        self.done = self._resume()  # number of finished steps

    def _fit_into_memory(self, cost: cost_model.Cost) -> None:
        """Install tiles and offloading.

        Values that the settings leave open are chosen by the length and by the memory estimate.

        Raises:
            UsageError: the estimate does not fit into memory.
        """
        settings, device = self.settings, self.accelerator.device
        tokens = settings.length * settings.micro_batch // settings.cp
        tile = tile_of(tokens, settings.tile_tokens)
        if tile:
            compute_in_tiles(self.model, tile)
            for name in cost.untiled:
                self._tell(f"{name} computes all tokens at once, because tiles need a plain MLP.")
        offloaded = settings.offload_layers
        if offloaded is None and device.type == "cuda":
            spread, room = dry_run.spread_of(self.accelerator), dry_run.room_of(settings, device)
            fitted = dry_run.fit(settings=settings, cost=cost, spread=spread, room=room)
            dry_run.refuse_too_long(
                settings=settings, cost=cost, spread=spread, room=room, fitted=fitted
            )
            offloaded = fitted.offloaded
            if offloaded:
                self._tell(f"{dry_run.transfer(settings, fitted)}.")
        if offloaded:
            Offload(offloaded, device).enable(self.model)

    def _require_equal_processes(self) -> None:
        """Raise a UsageError if processes have different settings, data or weights."""
        if self.processes == 1:
            return
        facts = facts_of(self.settings, self.model, self.tokenizer)
        for field, hashes in self.source_hashes.items():
            for number, sha256 in enumerate(hashes.values(), 1):
                facts[f"the content of source {number} of --{field}"] = sha256
        require_equal({**facts, "the content of --calibration": calibration_sha256(self.settings)})

    def _prepare(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Build the objective and the optimizer, and wrap both with accelerate."""
        settings = self.settings
        optimizer = torch.optim.AdamW(
            checkpoints.trained(self.model).values(),
            lr=settings.lr,
            betas=(0.9, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=self.accelerator.device.type == "cuda",
        )
        needs_autocast = settings.dtype != settings.weights_dtype
        autocast = getattr(torch, settings.dtype) if needs_autocast else None
        objective = Objective(self.model, autocast)
        objective, optimizer = self.accelerator.prepare(objective, optimizer)
        return objective.train(), optimizer

    def _resume(self) -> int:
        """Load the newest checkpoint if there is one; return the number of finished steps."""
        # dropout masks must differ between processes
        set_seed(self.settings.seed + self.rank)
        # all ranks use the checkpoint that rank 0 finds, because file systems may be out of sync
        (newest,) = broadcast_object_list([self.checkpoints.newest()])
        if newest is None:
            return 0
        # opening the log raises an error if its settings differ, before the checkpoint is read. An
        # empty log is not opened, because opening would write the settings of this run
        log = self.out / LOG
        is_empty = log.is_file() and b"\n" not in log.read_bytes()
        if logs.file_exists(log) and not is_empty:
            with self._log():
                pass
        shared, own_state = self.checkpoints.load(newest)
        if self.accelerator.is_main_process:
            identity = logs.as_recorded(self._identity)
            logs.require_identity(newest, json.loads(shared["identity"]), identity)
        checkpoints.load_parameters(self.model, shared["parameters"])
        checkpoints.load_optimizer(self.optimizer, self.model, shared["optimizer"])
        self.position = json.loads(own_state["data"])
        self.packed.load_state_dict(self.position)
        checkpoints.load_random_state(own_state["random"])
        load_rotary_state(self.model, own_state["rotary"])
        return shared["step"]

    def train(self) -> None:
        """Train the remaining steps, and write the results."""
        attending = self.parallel.attending(self.model)
        stopping = checkpoints.asked_to_stop()
        silent = not self.accelerator.is_local_main_process
        bar = tqdm(total=self.settings.steps, initial=self.done, unit="step", disable=silent)
        with self._log() as log, attending, stopping as stop_request, bar:
            if log is not None:
                logged_steps = [x["step"] for x in log.records if x["kind"] == curve.STEP]
                num_logged = sum(step <= self.done for step in logged_steps)
                if num_logged < self.done:
                    self._tell(
                        f"{LOG} has {num_logged} of the {self.done} steps that were made before."
                    )
            for step in range(self.done + 1, self.settings.steps + 1):
                record, stop = self._step(step, stop_request)
                self._note(log, curve.STEP, step, record)
                bar.set_postfix(loss=f"{record['loss']:.3f}", refresh=False)
                bar.update()
                is_last = step == self.settings.steps
                if due(self.settings.eval_every, step, is_last):
                    # evaluation may change the RoPE state, because its sequences may be longer
                    rotary = rotary_state(self.model)
                    result = self.validation.measure(self.objective)
                    load_rotary_state(self.model, rotary)
                    self._note(log, curve.EVALUATION, step, result)
                    # the densities of training must not include the evaluation
                    cab_hf.stats(self.model, reset=True)
                if stop or due(self.settings.save_every, step, is_last):
                    self._save(step)
                if stop and not is_last:
                    self._tell(f"stopped at step {step} on request; the same command continues.")
                    return
            if log is not None:
                self._end(log)

    def _step(self, step: int, stop_request: Callable[[], bool]) -> tuple[dict[str, Any], bool]:
        """Run one optimizer step: forward and backward passes, clipping and update.

        Args:
            step: number of the step.
            stop_request: function that returns True if this process received SIGTERM.

        Returns:
            record: the fields of the step in the log.
            stop: True if any process received SIGTERM.
        """
        settings, accelerator, start = self.settings, self.accelerator, time.perf_counter()
        micro_batches = []
        for _ in range(self.accumulation):
            sequences = []
            for _ in range(settings.micro_batch):
                sequence, self.position = next(self.data)
                sequences.append(sequence)
            micro_batches.append(self.parallel.sharded(default_collate(sequences)))
        num_labels = float(sum(labelled(batch) for batch in micro_batches))
        (num_labels,) = one_sum([num_labels], accelerator)
        rate = learning_rate(step, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, counts = self._gradients(micro_batches, num_labels)
        norm = self._clip()
        finite.require_finite_step(
            step=step, loss=loss, norm=norm, model=self.model, accelerator=accelerator
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss, stop, *totals = one_sum([loss, float(stop_request()), *counts.tolist()], accelerator)
        peak = None
        if self.cost.uncounted is None:
            peak = cost_model.peak_flops(accelerator.device, settings.peak_tflops)
        # no device sync is needed before reading the clock, because `one_sum` was one
        speed = cost_model.line(
            totals=totals,
            seconds=time.perf_counter() - start,
            processes=self.processes,
            peak=peak,
        )
        peak_gib = cost_model.peak_gib(accelerator.device)
        record = {"loss": loss / max(1.0, num_labels), "grad_norm": norm, "lr": rate}
        return {**record, **speed, "peak_gib": peak_gib}, stop > 0

    def _gradients(
        self, micro_batches: Sequence[Batch], num_labels: float
    ) -> tuple[float, torch.Tensor]:
        """Run forward and backward passes of all micro batches, which accumulate gradients.

        Args:
            micro_batches: the batches of this process.
            num_labels: number of labels in all processes.

        Returns:
            loss: summed loss of this process.
            counts: float64 [4], sum of `cost_model.count` over the micro batches.
        """
        # the loss is the mean over the labels of all processes; the factor `processes` cancels the
        # average of gradients over processes by DDP and FSDP
        scale = self.processes / max(1.0, num_labels)
        total = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)
        counts = torch.zeros(4, dtype=torch.float64)
        for number, batch in enumerate(micro_batches, 1):
            on_device = {name: each.to(total.device) for name, each in batch.items()}
            # gradients are exchanged after the last micro batch
            is_last = number == len(micro_batches)
            with nullcontext() if is_last else self.accelerator.no_sync(self.objective):
                loss = self.objective(on_device)
                self.accelerator.backward(loss * scale)
            total += loss.detach()
            positions = self.parallel.positions(batch)
            counts += cost_model.count(self.cost, positions, cab_hf.stats(self.model, reset=True))
        return total.item(), counts

    def _clip(self) -> float:
        """Clip the gradients by their norm over all processes; return the norm before clipping."""
        trained = list(checkpoints.trained(self.model).values())
        norm = nn.utils.clip_grad_norm_(trained, self.settings.clip or float("inf"))
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def _save(self, step: int) -> None:
        """Save the checkpoint of ``step``; all processes must call this method."""
        parameters = checkpoints.parameters_of(self.model)
        optimizer = checkpoints.optimizer_of(self.optimizer, self.model)
        finite.require_finite_state(step, parameters, optimizer)
        shared = {"parameters": parameters, "optimizer": optimizer}
        if self.accelerator.is_main_process:
            shared["identity"] = json.dumps(self._identity)
        own_state = {
            "random": checkpoints.random_state(),
            "data": json.dumps(self.position),
            "rotary": rotary_state(self.model),
        }

        def write_result(folder: Path) -> None:
            dtype = getattr(torch, self.settings.adapter_dtype)
            rounded = {name: x.to(dtype) for name, x in parameters.items()}
            if self.settings.train == ALL:
                self.model.save_pretrained(folder, state_dict=rounded)
                self.tokenizer.save_pretrained(folder)
            else:
                save_adapter(self.model, self.tokenizer, folder, rounded)

        self.checkpoints.save(step, shared, own_state, write_result)

    def _end(self, log: logs.Log) -> None:
        """Copy the trained weights to the output folder; write the curve and the provenance."""
        settings = {name: x for name, x in asdict(self.settings).items() if name != "out"}
        evaluations = [each for each in log.records if each["kind"] == curve.EVALUATION]
        results = {
            "provenance": provenance(settings, self.accelerator.device, log.started),
            "processes": self.processes,
            "evaluation": evaluations[-1] if evaluations else None,
        }
        name = self.checkpoints.result
        with logs.writing(self.out):
            trained = self.checkpoints.newest() / name
            shutil.copytree(trained, self.out / name, dirs_exist_ok=True)
            self.checkpoints.clear()
            curve.draw(self.out / CURVE, log.records)
            logs.write_atomically(self.out / RESULTS, json.dumps(results, indent=2) + "\n")
        self._tell(f"{self.settings.steps} steps; {self.out / name}, {self.out / CURVE}")

    def _log(self) -> Any:
        """Return a context manager that yields the log in the main process, else None."""
        if not self.accelerator.is_main_process:
            return nullcontext()
        return logs.Log(self.out / LOG, self._identity, ("kind", "step"))

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Return settings and SHA-256 of input files, which must be equal when a run resumes."""
        settings = self.settings
        hashes = {"model": loaded_sha256(self.model), "calibration": calibration_sha256(settings)}
        hashes |= self.source_hashes
        if settings.adapter:
            hashes["adapter"] = file_sha256(Path(settings.adapter) / WEIGHTS)
        return {**settings.identity(self.processes), "sha256": hashes}

    def _note(self, log: logs.Log | None, kind: str, step: int, record: Mapping[str, Any]) -> None:
        """Append a record of ``kind`` to ``log``, unless ``log`` is None."""
        if log is not None:
            log.append({"kind": kind, "step": step, **record})

    def _tell(self, sentence: str) -> None:
        """Print ``sentence`` in the main process."""
        if self.accelerator.is_main_process:
            tqdm.write(sentence)


def due(every: int, step: int, is_last: bool) -> bool:
    """Return True if ``step`` is a multiple of ``every`` or the last step; False if every is 0."""
    return bool(every) and (is_last or step % every == 0)


def calibration_sha256(settings: Settings) -> str | None:
    """Return the SHA-256 of the file in ``--calibration``; None without a calibration."""
    return file_sha256(Path(settings.calibration)) if settings.calibration else None


def require_run(folder: Path) -> None:
    """Raise a UsageError if ``folder`` contains files but no log and no checkpoints."""
    names = {path.name for path in folder.glob("[!.]*")} if folder.is_dir() else set()
    if names and not names & {LOG, CHECKPOINTS}:
        raise UsageError(
            f"out must be a new or an empty folder or the folder of a run, got {folder}, which "
            f"contains {min(names)!r} and no run."
        )
