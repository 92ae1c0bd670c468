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
from cab_hf.experiment.log import writing
from cab_hf.experiment.settings import UsageError, refused_as

NUM_KEPT = 2  # number of newest checkpoints that are not removed
# files in a checkpoint: the state that is equal in all processes, and the state of one process
SHARED, PER_PROCESS = "shared.pt", "process-{}.pt"
ADAPTER = "adapter"  # folder in a checkpoint with the trained adapter
NAME = re.compile(r"step-\d{8,}")  # name of a complete checkpoint
State = dict[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, in one folder that all processes of the run can access."""

    folder: Path
    rank: int  # of this process
    processes: int  # number of processes
    wait: Callable[[], None]  # a barrier of all processes
    result: str = ADAPTER  # name of the folder with the trained weights in each checkpoint

    def newest(self) -> Path | None:
        """Return the folder of the last complete checkpoint; None if there is none."""
        return next(reversed(self._complete()), None)

    def save(
        self, step: int, shared: State, own_state: State, write_result: Callable[[Path], None]
    ) -> Path:
        """Save the checkpoint of ``step`` and return its folder.

        All processes must call this method.

        Args:
            step: number of finished optimizer steps.
            shared: state that is equal in all processes; process 0 saves it.
            own_state: state of this process.
            write_result: function that receives the path of a new folder, and writes the trained
                weights into this folder. Only process 0 calls the function.

        Raises:
            LogError: the checkpoint cannot be written. Older checkpoints do not change.
        """
        target = self.folder / f"step-{step:08d}"
        partial = self.folder / f".{target.name}.partial"
        with writing(target):
            if self.rank == 0:
                self.clear()
                partial.mkdir(parents=True)
            self.wait()
            _write(own_state, partial / PER_PROCESS.format(self.rank))
            if self.rank == 0:
                write_result(partial / self.result)
                fields = {"step": step, "processes": self.processes}
                _write({**shared, **fields, "adapter": self._sums_of(partial)}, partial / SHARED)
            self.wait()
            if self.rank == 0:
                self._publish(partial, target)
        self.wait()
        return target

    def load(self, folder: Path) -> tuple[State, State]:
        """Load the checkpoint in ``folder``; return the ``shared`` and ``own_state`` of `save`.

        Tensors are on the CPU.

        Raises:
            UsageError: a run with another number of processes wrote the checkpoint, or a byte of a
                file has changed.
        """
        shared = _read(folder / SHARED)
        if shared["processes"] != self.processes:
            raise UsageError(
                f"{folder.name} was made by {shared['processes']} processes, and this run has "
                f"{self.processes}. Start as many processes, or give another --out."
            )
        differ = shared["adapter"].items() - self._sums_of(folder).items()
        if differ:
            name, _ = min(differ)
            raise UsageError(
                _unreadable(folder, f"{self.result}/{name} has changed since it was saved")
            )
        return shared, _read(folder / PER_PROCESS.format(self.rank))

    def _sums_of(self, folder: Path) -> dict[str, str]:
        """Return the SHA-256 of each file of the trained weights in a checkpoint, by path."""
        weights = folder / self.result
        files = (file for file in weights.rglob("*") if file.is_file())
        return {str(file.relative_to(weights)): file_sha256(file) for file in files}

    def _complete(self) -> list[Path]:
        """Return the folders of complete checkpoints, sorted by step."""
        complete = (path for path in self.folder.glob("step-*") if NAME.fullmatch(path.name))
        return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))

    def clear(self) -> None:
        """Remove folders that a killed run left half-written or half-removed.

        Only process 0 may call this method.
        """
        for incomplete in self.folder.glob(".step-*"):
            shutil.rmtree(incomplete)

    def _publish(self, partial: Path, target: Path) -> None:
        """Sync ``partial`` to disk, rename the folder to ``target``, and remove old checkpoints."""
        for path in (*partial.rglob("*"), partial):
            put_on_disk(path)
        os.rename(partial, target)
        put_on_disk(self.folder)
        for old in self._complete()[:-NUM_KEPT]:
            # a half-removed folder must not look complete
            hidden = old.with_name(f".{old.name}.removed")
            os.rename(old, hidden)
            shutil.rmtree(hidden)


def _write(state: State, path: Path) -> None:
    """Save ``state`` with torch.save and sync the file to disk."""
    # torch.save to an open file reports why a write failed; torch.save to a path does not
    with open(path, "wb") as file:
        torch.save(state, file)
    put_on_disk(path)


def _read(path: Path) -> State:
    """Return the state in a file of `_write`; raise a UsageError if the file is damaged.

    Tensors are on the CPU.
    """

    def message(error: Exception) -> str:
        # torch's own message suggests weights_only=False, which would run code from the file
        reason = getattr(error, "strerror", None) or "damaged"
        return _unreadable(path.parent, f"{path.name}: {reason}")

    with refused_as(message):
        # torch writes checksums into the zip file, but torch.load does not verify them
        with zipfile.ZipFile(path) as archive:
            is_intact = archive.testzip() is None
        state = torch.load(path, map_location="cpu", weights_only=True) if is_intact else None
        if not isinstance(state, dict):
            raise ValueError(f"{path} is no checkpoint")
    return state


def _unreadable(folder: Path, reason: str) -> str:
    """Return the error message for a checkpoint ``folder`` that cannot be read."""
    return (
        f"checkpoint {folder.name} cannot be read ({reason}). Remove the folder, and the run "
        "continues from the checkpoint before it."
    )


def put_on_disk(path: Path) -> None:
    """Sync the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after this process received SIGTERM.

    SIGTERM has no other effect inside the block.
    """
    signals = []
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: signals.append(True))
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of ``model`` that require gradients, by name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def gathered(tensor: Tensor) -> Tensor:
    """Return a copy of the unsharded tensor on the CPU.

    All processes must call this function if ``tensor`` is sharded.
    """
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.to("cpu", copy=True)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return unsharded CPU copies of the trained parameters, by name."""
    return {name: gathered(each) for name, each in trained(model).items()}


def load_parameters(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Set the trained parameters to ``saved``, a result of `parameters_of`.

    Raises:
        UsageError: the names of the parameters differ.
    """
    parameters = trained(model)
    differ = sorted(parameters.keys() ^ saved.keys())
    if differ:
        raise UsageError(
            f"the checkpoint trains other parameters ({differ[0]} is one of {len(differ)}). "
            "Continue with the settings of the first run, or give another --out."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_sharded_like(saved[name], parameter))


def optimizer_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, State]:
    """Return unsharded CPU copies of the optimizer state of each trained parameter, by name."""
    return {
        name: {key: gathered(value) for key, value in optimizer.state[each].items()}
        for name, each in trained(model).items()
        if each in optimizer.state
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, State]
) -> None:
    """Set the state of the optimizer to the result of `optimizer_of`."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for name, parameter in trained(model).items():
        if name in saved:
            moments = dict(saved[name])
            # fused optimizers have the step counter on the device, others on the CPU; no optimizer
            # shards the counter
            steps = moments.pop("step")
            state = {key: _sharded_like(x, parameter) for key, x in moments.items()}
            state["step"] = steps.to(parameter.device) if fused else steps
            optimizer.state[parameter] = state


def _sharded_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return ``value`` on the device of ``parameter``, sharded like ``parameter``."""
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def random_state() -> State:
    """Return the state of every random generator that this process may use."""
    algorithm, keys, *position = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (algorithm, keys.tolist(), *position),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def load_random_state(state: Mapping[str, Any]) -> None:
    """Set every random generator to the result of `random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state.get("cuda") is not None:
        torch.cuda.set_rng_state(state["cuda"])
