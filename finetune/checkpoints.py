"""Checkpoints that survive a kill, with everything that a run needs to resume exactly.

A checkpoint is a folder ``step-00000050``. It contains a file of the state that all processes
share, a file per process, and the adapter or the trained model. It is written under another name,
synced to disk and renamed, so that a folder with its final name is complete. Only then an older
checkpoint is removed. Checksums are verified on reading.
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

KEPT = 2  # number of newest checkpoints that are kept
SHARED, MINE, ADAPTER = "shared.pt", "process-{}.pt", "adapter"
NAME = re.compile(r"step-\d{8,}")
State = dict[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, in one folder that all of its processes can access."""

    folder: Path
    rank: int
    processes: int
    wait: Callable[[], None]  # a barrier of all processes
    result: str = ADAPTER  # name of the trained weights, a folder in each checkpoint

    def newest(self) -> Path | None:
        """Return the folder of the last complete checkpoint; None if there is none."""
        return next(reversed(self._complete()), None)

    def save(
        self, step: int, shared: State, mine: State, write_result: Callable[[Path], None]
    ) -> Path:
        """Save the checkpoint of ``step`` and return its folder. All processes must call it.

        Args:
            step: number of the step.
            shared: state that is equal in all processes; process 0 saves it.
            mine: state of this process.
            write_result: function that writes into the folder it receives; process 0 calls it.

        Raises:
            LogError: the checkpoint cannot be written. Older checkpoints do not change.
        """
        target = self.folder / f"step-{step:08d}"
        aside = self.folder / f".{target.name}.partial"
        with writing(target):
            if self.rank == 0:
                self.clear()
                aside.mkdir(parents=True)
            self.wait()
            _write(mine, aside / MINE.format(self.rank))
            if self.rank == 0:
                write_result(aside / self.result)
                fields = {"step": step, "processes": self.processes}
                _write({**shared, **fields, "adapter": self._sums_of(aside)}, aside / SHARED)
            self.wait()
            if self.rank == 0:
                self._publish(aside, target)
        self.wait()
        return target

    def load(self, folder: Path) -> tuple[State, State]:
        """Load (shared, mine) of a checkpoint, with tensors on the CPU.

        Raises:
            UsageError: another number of processes made it, or a byte of it has changed.
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
        return shared, _read(folder / MINE.format(self.rank))

    def _sums_of(self, folder: Path) -> dict[str, str]:
        """Return the SHA-256 of the files of the trained weights in a checkpoint, by name."""
        place = folder / self.result
        files = (file for file in place.rglob("*") if file.is_file())
        return {str(file.relative_to(place)): file_sha256(file) for file in files}

    def _complete(self) -> list[Path]:
        """Return the folders of complete checkpoints, the newest last."""
        complete = (path for path in self.folder.glob("step-*") if NAME.fullmatch(path.name))
        return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))

    def clear(self) -> None:
        """Remove folders that a kill left half-written or half-removed; for process 0."""
        for left in self.folder.glob(".step-*"):
            shutil.rmtree(left)

    def _publish(self, aside: Path, target: Path) -> None:
        for path in (*aside.rglob("*"), aside):
            put_on_disk(path)
        os.rename(aside, target)
        put_on_disk(self.folder)
        for old in self._complete()[:-KEPT]:
            # a half-removed folder must not look complete
            hidden = old.with_name(f".{old.name}.removed")
            os.rename(old, hidden)
            shutil.rmtree(hidden)


def _write(state: State, path: Path) -> None:
    # with a path, torch gives no reason for a failure
    with open(path, "wb") as file:
        torch.save(state, file)
    put_on_disk(path)


def _read(path: Path) -> State:
    """Read a file of `_write`, with tensors on the CPU; UsageError if a byte has changed."""

    def sentence(error: Exception) -> str:
        # torch's own message explains how to run the code in the file
        why = getattr(error, "strerror", None) or "damaged"
        return _unreadable(path.parent, f"{path.name}: {why}")

    with refused_as(sentence):
        # torch writes checksums but does not verify them
        with zipfile.ZipFile(path) as parts:
            whole = parts.testzip() is None
        state = torch.load(path, map_location="cpu", weights_only=True) if whole else None
        if not isinstance(state, dict):
            raise ValueError(f"{path} is no checkpoint")
    return state


def _unreadable(folder: Path, why: str) -> str:
    return (
        f"checkpoint {folder.name} cannot be read ({why}). Remove the folder, and the run "
        "continues from the checkpoint before it."
    )


def put_on_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after SIGTERM, which has no other effect in the block."""
    asked = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGTERM, before)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def gathered(tensor: Tensor) -> Tensor:
    """Return a copy of the whole tensor on the CPU. All processes must call it if it is sharded."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.to("cpu", copy=True)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters by name, each `gathered`."""
    return {name: gathered(each) for name, each in trained(model).items()}


def load_parameters(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Set the trained parameters to the values of `parameters_of`; UsageError if names differ."""
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
    """Return the `gathered` state of the optimizer for each trained parameter, by name."""
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
            # a fused step counter is on the device, others on the CPU; it is never sharded
            steps = moments.pop("step")
            state = {key: _sharded_like(x, parameter) for key, x in moments.items()}
            state["step"] = steps.to(parameter.device) if fused else steps
            optimizer.state[parameter] = state


def _sharded_like(value: Tensor, parameter: Tensor) -> Tensor:
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def random_state() -> State:
    """Return the state of every random generator that this process may use."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
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
