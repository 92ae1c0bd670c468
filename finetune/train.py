"""A run of ``finetune/lora.py``: its parts, its steps and its files."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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

LOG, CURVE, RESULTS = "log.jsonl", "curve.png", "results.json"
CHECKPOINTS = "checkpoints"
# errors caused by settings, wherever they are raised
OF_SETTINGS = (ValueError, NotImplementedError)


def run(settings: Settings) -> int:
    """Train, or with ``dry_run`` print the cost; return the exit status."""
    rank, refused = int(os.environ.get("RANK", 0)), OF_SETTINGS if settings.dry_run else ()
    try:
        with accelerating(settings) as accelerator, ending_together(), refusing(refused):
            if settings.dry_run:
                dry_run.print_report(settings, accelerator)
            else:
                Run(settings, accelerator).train()
    except (UsageError, NotImplementedError) as error:
        of = f" (process {rank})" if rank else ""
        print(f"{PROG}{of}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        # the disk may be full in any folder, also in a cache of data
        if error.errno not in logs.DISK_FULL:
            raise
        print(f"{PROG}: {error.strerror}. Free disk space, and the run continues.", file=sys.stderr)
        return 2
    return 0


@contextmanager
def accelerating(settings: Settings) -> Iterator[Accelerator]:
    """Connect the processes of this run inside the block."""
    accelerator = Accelerator(
        cpu=settings.cpu or not torch.cuda.is_available(),
        # the objective controls autocast: frozen weights need none, whatever a launcher sets
        mixed_precision="no",
        project_dir=settings.out,
    )
    try:
        yield accelerator
    finally:
        accelerator.end_training()


@contextmanager
def refusing(errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn ``errors``, and a device out of memory, into a UsageError of one line."""
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
    """A run, resumed if its folder contains a checkpoint.

    Raises:
        UsageError: the settings do not fit the model, the data or the machine, or the folder
            contains a run of other settings.
    """

    def __init__(self, settings: Settings, accelerator: Accelerator) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.processes, self.rank = accelerator.num_processes, accelerator.process_index
        self.out = Path(settings.out)
        require_run(self.out)
        with refusing(OF_SETTINGS):
            self.accumulation = settings.accumulation(self.processes)
            # the same adapter in every process
            set_seed(settings.seed)
            self.model, self.tokenizer = build(settings, accelerator.device)
            cost = cost_model.Cost.of(self.model)
            self._fit_into_memory(cost)
            self.parallel = Parallel(settings, self.model, accelerator)
            vocabulary = self.model.config.get_text_config().vocab_size
            packed, held_out, self.read = open_data(
                settings, self.tokenizer, self.parallel, self._tell, vocabulary
            )
            self._agree()
        self.packed, self.place = packed, packed.state_dict()
        self.data = prefetched(packed, 2 * settings.micro_batch, settings.data_workers)
        self.cost = cost
        if cost.uncounted:
            self._tell(f"MFU is not reported: {cost.uncounted}.")
        self.objective, self.optimizer = self._prepare()
        self.validation = Validation(self.tokenizer, held_out, settings, accelerator, self.parallel)
        self.checkpoints = Checkpoints(
            self.out / CHECKPOINTS,
            self.rank,
            self.processes,
            accelerator.wait_for_everyone,
            TRAINED if settings.train == ALL else checkpoints.ADAPTER,
        )
        self.done = self._resume()

    def _fit_into_memory(self, cost: cost_model.Cost) -> None:
        """Set up tiles of MLPs and offloading of checkpoints, as given or as necessary."""
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
            fitted = dry_run.fit(settings, cost, spread, room)
            dry_run.refuse_too_long(settings, cost, spread, room, fitted)
            offloaded = fitted.offloaded
            if offloaded:
                self._tell(f"{dry_run.transfer(settings, fitted)}.")
        if offloaded:
            Offload(offloaded, device).enable(self.model)

    def _agree(self) -> None:
        """Raise an error if processes have different settings, texts or weights."""
        if self.processes == 1:
            return
        facts = facts_of(self.settings, self.model, self.tokenizer)
        for field, sums in self.read.items():
            for number, sha256 in enumerate(sums.values(), 1):
                facts[f"the content of source {number} of --{field}"] = sha256
        require_equal({**facts, "the content of --calibration": calibration_sha256(self.settings)})

    def _prepare(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the loss and the optimizer, distributed over the processes."""
        settings = self.settings
        optimizer = torch.optim.AdamW(
            checkpoints.trained(self.model).values(),
            lr=settings.lr,
            betas=(0.9, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=self.accelerator.device.type == "cuda",
        )
        rounded = settings.dtype != settings.weights_dtype
        autocast = getattr(torch, settings.dtype) if rounded else None
        objective = Objective(self.model, autocast)
        objective, optimizer = self.accelerator.prepare(objective, optimizer)
        return objective.train(), optimizer

    def _resume(self) -> int:
        """Resume from the newest checkpoint; return the number of its steps."""
        # different dropout in every process
        set_seed(self.settings.seed + self.rank)
        # all ranks use the checkpoint that rank 0 finds: file systems of hosts may differ
        (newest,) = broadcast_object_list([self.checkpoints.newest()])
        if newest is None:
            return 0
        # opening the log raises an error for other settings before a checkpoint is read; an empty
        # log would become this run's
        log = self.out / LOG
        empty = log.is_file() and b"\n" not in log.read_bytes()
        if logs.file_exists(log) and not empty:
            with self._log():
                pass
        shared, own_state = self.checkpoints.load(newest)
        if self.accelerator.is_main_process:
            wanted = logs.as_recorded(self._identity)
            logs.require_identity(newest, json.loads(shared["identity"]), wanted)
        checkpoints.load_parameters(self.model, shared["parameters"])
        checkpoints.load_optimizer(self.optimizer, self.model, shared["optimizer"])
        self.place = json.loads(own_state["data"])
        self.packed.load_state_dict(self.place)
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
                noted = [x["step"] for x in log.records if x["kind"] == curve.STEP]
                count = sum(step <= self.done for step in noted)
                if count < self.done:
                    self._tell(f"{LOG} has {count} of the {self.done} steps that were made before.")
            for step in range(self.done + 1, self.settings.steps + 1):
                record, stop = self._step(step, stop_request)
                self._note(log, curve.STEP, step, record)
                bar.set_postfix(loss=f"{record['loss']:.3f}", refresh=False)
                bar.update()
                last = step == self.settings.steps
                if due(self.settings.eval_every, step, last):
                    # its sequences may be longer than all before
                    rotary = rotary_state(self.model)
                    result = self.validation.measure(self.objective)
                    load_rotary_state(self.model, rotary)
                    self._note(log, curve.EVALUATION, step, result)
                    # evaluation attends too
                    cab_hf.stats(self.model, reset=True)
                if stop or due(self.settings.save_every, step, last):
                    self._save(step)
                if stop and not last:
                    self._tell(f"stopped at step {step} on request; the same command continues.")
                    return
            if log is not None:
                self._end(log)

    def _step(self, step: int, asked: Any) -> tuple[dict[str, Any], bool]:
        """Train one step; return its line of the log, and whether to stop after it."""
        settings, accelerator, start = self.settings, self.accelerator, time.perf_counter()
        micro_batches = []
        for _ in range(self.accumulation):
            sequences = []
            for _ in range(settings.micro_batch):
                sequence, self.place = next(self.data)
                sequences.append(sequence)
            micro_batches.append(self.parallel.sharded(default_collate(sequences)))
        mine = float(sum(labelled(batch) for batch in micro_batches))
        (tokens,) = one_sum([mine], accelerator)
        rate = learning_rate(step, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, counted = self._gradients(micro_batches, tokens)
        norm = self._clip()
        finite.require_finite_step(step, loss, norm, self.model, accelerator)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss, stop, *totals = one_sum([loss, float(asked()), *counted.tolist()], accelerator)
        peak = None
        if self.cost.uncounted is None:
            peak = cost_model.peak_flops(accelerator.device, settings.peak_tflops)
        # the sum was a device sync
        speed = cost_model.line(totals, time.perf_counter() - start, self.processes, peak)
        peak_gib = cost_model.peak_gib(accelerator.device)
        record = {"loss": loss / max(1.0, tokens), "grad_norm": norm, "lr": rate}
        return {**record, **speed, "peak_gib": peak_gib}, stop > 0

    def _gradients(
        self, micro_batches: Sequence[Batch], tokens: float
    ) -> tuple[float, torch.Tensor]:
        """Compute the gradients of a step of ``tokens``.

        Returns the summed loss of this process and the `cost_model.count`.
        """
        # gradients are averaged over the processes, and the loss is the mean over all tokens; each
        # token is in one process, with or without sharded sequences
        scale = self.processes / max(1.0, tokens)
        total = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)
        counted = torch.zeros(4, dtype=torch.float64)
        for place, batch in enumerate(micro_batches, 1):
            on_device = {name: each.to(total.device) for name, each in batch.items()}
            alone = place < len(micro_batches)
            with self.accelerator.no_sync(self.objective) if alone else nullcontext():
                loss = self.objective(on_device)
                self.accelerator.backward(loss * scale)
            total += loss.detach()
            positions = self.parallel.positions(batch)
            counted += cost_model.count(self.cost, positions, cab_hf.stats(self.model, reset=True))
        return total.item(), counted

    def _clip(self) -> float:
        """Clip the gradients of all processes together; return their norm before."""
        trained = list(checkpoints.trained(self.model).values())
        norm = nn.utils.clip_grad_norm_(trained, self.settings.clip or float("inf"))
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def _save(self, step: int) -> None:
        # all processes contribute their parts of sharded tensors
        parameters = checkpoints.parameters_of(self.model)
        optimizer = checkpoints.optimizer_of(self.optimizer, self.model)
        finite.require_finite_state(step, parameters, optimizer)
        shared = {"parameters": parameters, "optimizer": optimizer}
        if self.accelerator.is_main_process:
            shared["identity"] = json.dumps(self._identity)
        own_state = {
            "random": checkpoints.random_state(),
            "data": json.dumps(self.place),
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
        """Write the trained weights, a curve, and the provenance of both."""
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
        """Open the log in the process that writes it; a repeated record counts once."""
        if not self.accelerator.is_main_process:
            return nullcontext()
        return logs.Log(self.out / LOG, self._identity, ("kind", "step"))

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """The facts that two runs must share to use the same folder: settings and data."""
        settings = self.settings
        sums = {"model": loaded_sha256(self.model), "calibration": calibration_sha256(settings)}
        sums |= self.read
        if settings.adapter:
            sums["adapter"] = file_sha256(Path(settings.adapter) / WEIGHTS)
        return {**settings.identity(self.processes), "sha256": sums}

    def _note(self, log: logs.Log | None, kind: str, step: int, record: Mapping[str, Any]) -> None:
        if log is not None:
            log.append({"kind": kind, "step": step, **record})

    def _tell(self, sentence: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(sentence)


def due(every: int, step: int, last: bool) -> bool:
    return bool(every) and (last or step % every == 0)


def calibration_sha256(settings: Settings) -> str | None:
    return file_sha256(Path(settings.calibration)) if settings.calibration else None


def require_run(folder: Path) -> None:
    """Raise an error for a folder with other content than a run."""
    held = {path.name for path in folder.glob("[!.]*")} if folder.is_dir() else set()
    if held and not held & {LOG, CHECKPOINTS}:
        raise UsageError(
            f"out must be a new or an empty folder or the folder of a run, got {folder}, which "
            f"contains {min(held)!r} and no run."
        )
