"""Atomic checkpoints from which a run resumes bit-identically, even after a kill.

A checkpoint is a folder such as ``step-00000050``. The folder contains a file with the state that
is equal in all processes, a file per process, and the adapter or the trained model. Processes
write the folder under a temporary name, sync the folder to disk and rename it, so that a folder
with its final name is complete. Then the oldest checkpoint is removed. `Checkpoints.load` verifies
checksums.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from cab_hf.experiment.cache import file_sha256
from cab_hf.experiment.log import convert_write_errors
from cab_hf.experiment.settings import UsageError, convert_errors

NUM_KEPT_CHECKPOINTS = 2  # number of newest checkpoints that are not removed
# files in a checkpoint: the state that is equal in all processes, and the state of one process
SHARED_STATE_FILE, PROCESS_STATE_FILE = "shared.pt", "process-{}.pt"
ADAPTER_FOLDER = "adapter"  # folder in a checkpoint with the trained adapter
CHECKPOINT_NAME_PATTERN = re.compile(r"step-\d{8,}")  # name of a complete checkpoint
State = dict[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, in one folder that all processes of the run can access."""

    folder: Path
    rank: int  # rank of this process
    num_processes: int  # number of processes
    wait_for_all: Callable[[], None]  # a barrier of all processes
    # name of the folder with the trained weights in each checkpoint
    weights_folder_name: str = ADAPTER_FOLDER

    def find_newest(self) -> Path | None:
        """Return the folder of the last complete checkpoint; None if there is none."""
        return next(reversed(self._find_complete_folders()), None)

    def save(
        self,
        step: int,
        shared_state: State,
        process_state: State,
        write_weights: Callable[[Path], None],
    ) -> Path:
        """Save the checkpoint of ``step`` and return its folder.

        All processes must call this method.

        Args:
            step: number of finished optimizer steps.
            shared_state: state that is equal in all processes; process 0 saves it.
            process_state: state of this process.
            write_weights: function that receives the path of a new folder, and writes the trained
                weights into this folder. Only process 0 calls the function.

        Raises:
            LogError: the checkpoint cannot be written. Older checkpoints do not change.
        """
        final_folder = self.folder / f"step-{step:08d}"
        temporary_folder = self.folder / f".{final_folder.name}.partial"
        with convert_write_errors(final_folder):
            if self.rank == 0:
                self.remove_incomplete()
                temporary_folder.mkdir(parents=True)
            self.wait_for_all()
            _save_state(process_state, temporary_folder / PROCESS_STATE_FILE.format(self.rank))
            if self.rank == 0:
                write_weights(temporary_folder / self.weights_folder_name)
                progress_fields = {"step": step, "processes": self.num_processes}
                _save_state(
                    {
                        **shared_state,
                        **progress_fields,
                        "adapter": self._hash_weights(temporary_folder),
                    },
                    temporary_folder / SHARED_STATE_FILE,
                )
            self.wait_for_all()
            if self.rank == 0:
                self._move_to_final_folder(temporary_folder, final_folder)
        self.wait_for_all()
        return final_folder

    def load(self, checkpoint_folder: Path) -> tuple[State, State]:
        """Load a checkpoint; return the ``shared_state`` and ``process_state`` of `save`.

        Tensors are on the CPU.

        Raises:
            UsageError: a run with another number of processes wrote the checkpoint, or a byte of a
                file has changed.
        """
        shared_state = _load_state(checkpoint_folder / SHARED_STATE_FILE)
        if shared_state["processes"] != self.num_processes:
            raise UsageError(
                f"{checkpoint_folder.name} was made by {shared_state['processes']} processes, and "
                "this run has "
                f"{self.num_processes}. Start as many processes, or give another --out."
            )
        changed_hashes = (
            shared_state["adapter"].items() - self._hash_weights(checkpoint_folder).items()
        )
        if changed_hashes:
            changed_file, _ = min(changed_hashes)
            raise UsageError(
                _format_unreadable_error(
                    checkpoint_folder,
                    f"{self.weights_folder_name}/{changed_file} has changed since it was saved",
                )
            )
        return shared_state, _load_state(checkpoint_folder / PROCESS_STATE_FILE.format(self.rank))

    def _hash_weights(self, checkpoint_folder: Path) -> dict[str, str]:
        """Return the SHA-256 of each file of the trained weights in a checkpoint, by path."""
        weights_folder = checkpoint_folder / self.weights_folder_name
        weight_files = (file for file in weights_folder.rglob("*") if file.is_file())
        return {str(file.relative_to(weights_folder)): file_sha256(file) for file in weight_files}

    def _find_complete_folders(self) -> list[Path]:
        """Return the folders of complete checkpoints, sorted by step."""
        complete_folders = (
            path
            for path in self.folder.glob("step-*")
            if CHECKPOINT_NAME_PATTERN.fullmatch(path.name)
        )
        return sorted(complete_folders, key=lambda path: int(path.name.removeprefix("step-")))

    def remove_incomplete(self) -> None:
        """Remove folders that a killed run left half-written or half-removed.

        Only process 0 may call this method.
        """
        for incomplete_folder in self.folder.glob(".step-*"):
            shutil.rmtree(incomplete_folder)

    def _move_to_final_folder(self, temporary_folder: Path, final_folder: Path) -> None:
        """Sync a folder to disk, rename it to ``final_folder``, and remove old checkpoints."""
        for path in (*temporary_folder.rglob("*"), temporary_folder):
            sync_to_disk(path)
        os.rename(temporary_folder, final_folder)
        sync_to_disk(self.folder)
        for old_checkpoint_folder in self._find_complete_folders()[:-NUM_KEPT_CHECKPOINTS]:
            # a half-removed folder must not look complete
            renamed_folder = old_checkpoint_folder.with_name(
                f".{old_checkpoint_folder.name}.removed"
            )
            os.rename(old_checkpoint_folder, renamed_folder)
            shutil.rmtree(renamed_folder)


def _save_state(state: State, path: Path) -> None:
    """Save ``state`` with torch.save and sync the file to disk."""
    # torch.save to an open file reports why a write failed; torch.save to a path does not
    with open(path, "wb") as file:
        torch.save(state, file)
    sync_to_disk(path)


def _load_state(path: Path) -> State:
    """Return the state in a file of `_save_state`; raise a UsageError if the file is damaged.

    Tensors are on the CPU.
    """

    def format_message(error: Exception) -> str:
        # torch's own message suggests weights_only=False, which would run code from the file
        reason = getattr(error, "strerror", None) or "damaged"
        return _format_unreadable_error(path.parent, f"{path.name}: {reason}")

    with convert_errors(format_message):
        # torch writes checksums into the zip file, but torch.load does not verify them
        with zipfile.ZipFile(path) as archive:
            is_intact = archive.testzip() is None
        state = torch.load(path, map_location="cpu", weights_only=True) if is_intact else None
        if not isinstance(state, dict):
            raise ValueError(f"{path} is no checkpoint")
    return state


def _format_unreadable_error(checkpoint_folder: Path, reason: str) -> str:
    """Return the error message for a checkpoint ``checkpoint_folder`` that cannot be read."""
    return (
        f"checkpoint {checkpoint_folder.name} cannot be read ({reason}). Remove the folder, and "
        "the run "
        "continues from the checkpoint before it."
    )


def sync_to_disk(path: Path) -> None:
    """Sync the content of a file, or the names in a folder, to disk."""
    file_descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)


@contextmanager
def catch_sigterm() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after this process received SIGTERM.

    SIGTERM has no other effect inside the block.
    """
    received_signals = []
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: received_signals.append(True))
    try:
        yield lambda: bool(received_signals)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def get_trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of ``model`` that require gradients, by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def gather_on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy of the unsharded tensor on the CPU.

    All processes must call this function if ``tensor`` is sharded.
    """
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.to("cpu", copy=True)


def copy_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return unsharded CPU copies of the trained parameters, by name."""
    return {
        name: gather_on_cpu(parameter) for name, parameter in get_trained_parameters(model).items()
    }


def load_parameters(model: nn.Module, saved_parameters: Mapping[str, Tensor]) -> None:
    """Set the trained parameters to ``saved_parameters``, a result of `copy_parameters`.

    Raises:
        UsageError: the names of the parameters differ.
    """
    parameters = get_trained_parameters(model)
    different_parameter_names = sorted(parameters.keys() ^ saved_parameters.keys())
    if different_parameter_names:
        raise UsageError(
            f"the checkpoint trains other parameters ({different_parameter_names[0]} is one of "
            f"{len(different_parameter_names)}). Continue with the settings of the first "
            "run, or give another --out."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_shard_like(saved_parameters[name], parameter))


def copy_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, State]:
    """Return unsharded CPU copies of the optimizer state of each trained parameter, by name."""
    return {
        name: {
            state_name: gather_on_cpu(state_tensor)
            for state_name, state_tensor in optimizer.state[parameter].items()
        }
        for name, parameter in get_trained_parameters(model).items()
        if parameter in optimizer.state
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved_states: Mapping[str, State]
) -> None:
    """Set the state of the optimizer to the result of `copy_optimizer_state`."""
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    for name, parameter in get_trained_parameters(model).items():
        if name in saved_states:
            moment_by_name = dict(saved_states[name])
            # fused optimizers have the step counter on the device, others on the CPU; no optimizer
            # shards the counter
            step_counter = moment_by_name.pop("step")
            parameter_state = {
                moment_name: _shard_like(moment, parameter)
                for moment_name, moment in moment_by_name.items()
            }
            parameter_state["step"] = (
                step_counter.to(parameter.device) if is_fused else step_counter
            )
            optimizer.state[parameter] = parameter_state


def _shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return ``tensor`` on the device of ``parameter``, sharded like ``parameter``."""
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor


def get_random_state() -> State:
    """Return the state of every random generator that this process may use."""
    algorithm, key_array, *position = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (algorithm, key_array.tolist(), *position),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def load_random_state(random_state: Mapping[str, Any]) -> None:
    """Set every random generator to the result of `get_random_state`."""
    random.setstate(random_state["python"])
    np.random.set_state(random_state["numpy"])
    torch.set_rng_state(random_state["torch"])
    if random_state.get("cuda") is not None:
        torch.cuda.set_rng_state(random_state["cuda"])
