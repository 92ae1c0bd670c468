"""Checkpoints: incomplete folders are ignored, the newest two remain, damage raises."""

import io
import os
import random
import resource
import shutil
import signal
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cab_hf.experiment.log import LogError
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import checkpoints
from cab_hf.finetune.checkpoints import Checkpoints, catch_sigterm


class Killed(BaseException):
    """Exception that simulates a killed process: ``except Exception`` does not catch it."""


@pytest.fixture
def checkpoint_folder(tmp_path):
    """Return a `Checkpoints` of one process, without saved steps."""
    return Checkpoints(tmp_path / "checkpoints", 0, 1, lambda: None)


def write_adapter(folder):
    """Create ``folder`` with one text file, in place of the files of an adapter."""
    folder.mkdir()
    (folder / "weights").write_text("of the adapter")


def save(checkpoint_folder, step):
    """Save a checkpoint of ``step`` with a tensor of three elements, and return its folder."""
    shared = {"value": torch.full((3,), step)}
    return checkpoint_folder.save(step, shared, {"data": str(step)}, write_adapter)


def list_folder_names(checkpoint_folder):
    """Return the sorted folder names of all checkpoints, complete or incomplete."""
    return sorted(path.name for path in checkpoint_folder.folder.iterdir())


def test_newest_two_checkpoints_remain(checkpoint_folder):
    assert checkpoint_folder.find_newest() is None
    # sorted by name, step-100000000 would come before step-99999999
    for step in (2, 4, 99_999_999, 100_000_000):
        save(checkpoint_folder, step)
    assert list_folder_names(checkpoint_folder) == ["step-100000000", "step-99999999"]
    shared, own_state = checkpoint_folder.load(checkpoint_folder.find_newest())
    assert (shared["step"], shared["value"][0], own_state["data"]) == (10**8, 10**8, "100000000")
    assert (checkpoint_folder.find_newest() / "adapter" / "weights").read_text() == "of the adapter"


# (function in which saving step 3 is killed, calls of the function before the kill, newest
# complete step afterwards)
KILLS = {
    "before the first file": ("save", 0, 2),
    "before the shared file": ("save", 1, 2),
    "before all files are synced": ("sync_to_disk", 2, 2),
    "before the folder is renamed": ("rename", 0, 2),
    "before an old checkpoint is renamed": ("rename", 1, 3),
    "before an old checkpoint is removed": ("rmtree", 0, 3),
}


@pytest.mark.parametrize(("function", "num_calls", "newest"), KILLS.values(), ids=KILLS)
def test_incomplete_checkpoint_is_ignored(
    checkpoint_folder, monkeypatch, function, num_calls, newest
):
    save(checkpoint_folder, 1)
    save(checkpoint_folder, 2)
    owners = {
        "save": torch,
        "sync_to_disk": checkpoints,
        "rename": os,
        "rmtree": checkpoints.shutil,
    }
    # the first calls run the original function
    original = getattr(owners[function], function)
    killed = Mock(wraps=original, side_effect=[DEFAULT] * num_calls + [Killed])
    with monkeypatch.context() as patch:
        patch.setattr(owners[function], function, killed)
        with pytest.raises(Killed):
            save(checkpoint_folder, 3)
    assert checkpoint_folder.find_newest().name == f"step-{newest:08d}"
    assert checkpoint_folder.load(checkpoint_folder.find_newest())[0]["step"] == newest
    save(checkpoint_folder, 4)
    # saving step 4 has removed the incomplete folder of step 3
    assert list_folder_names(checkpoint_folder) == [f"step-{newest:08d}", "step-00000004"]


def test_files_are_synced_before_rename(checkpoint_folder, monkeypatch):
    events = []
    sync, rename = checkpoints.sync_to_disk, os.rename
    monkeypatch.setattr(checkpoints, "sync_to_disk", lambda path: (events.append(path), sync(path)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("renamed"), rename(a, b)))
    target = save(checkpoint_folder, 1)
    synced_before = {path.name for path in events[: events.index("renamed")]}
    assert {path.name for path in target.rglob("*")} <= synced_before
    assert events[-1] == checkpoint_folder.folder


@pytest.mark.parametrize("large_part", ["own_state", "shared", "adapter"])
def test_full_disk_error_is_the_same_for_all_libraries(checkpoint_folder, large_part):
    save(checkpoint_folder, 1)
    large, small = {"x": torch.zeros(50_000)}, {"x": torch.zeros(1)}

    def write_adapter(folder):
        folder.mkdir()
        save_file(large if large_part == "adapter" else small, folder / "adapter.safetensors")

    shared = large if large_part == "shared" else small
    own_state = large if large_part == "own_state" else small
    # simulate a full disk: limit the size of each written file to 100,000 bytes
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(LogError, match=r"step-00000002 cannot be written \(.*too large"):
            checkpoint_folder.save(2, shared, own_state, write_adapter)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list_folder_names(checkpoint_folder) == [".step-00000002.partial", "step-00000001"]
    save(checkpoint_folder, 2)
    assert list_folder_names(checkpoint_folder) == ["step-00000001", "step-00000002"]


def test_other_process_count_raises(checkpoint_folder):
    folder = save(checkpoint_folder, 1)
    checkpoints_of_two = Checkpoints(checkpoint_folder.folder, 0, 2, lambda: None)
    with pytest.raises(UsageError, match="made by 1 processes, and this run has 2. Start as many"):
        checkpoints_of_two.load(folder)


def flip_bit(content):
    """Return the content of a file with one flipped bit in a tensor of 64 threes."""
    index = content.index(torch.full((64,), 3.0).numpy().tobytes()) + 100
    return content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :]


class Foreign:
    """Class that `torch.load` rejects with ``weights_only=True``."""


def pickled_class(_):
    """Return the bytes of a file in which `torch.save` pickled a `Foreign` object."""
    buffer = io.BytesIO()
    torch.save(Foreign(), buffer)
    return buffer.getvalue()


# by name: function from the content of a file to its damaged content; None: remove the file
CHANGES = {"flipped bit": flip_bit, "truncated": lambda content: content[: len(content) // 2]}
CHANGES |= {"text": lambda _: b"no checkpoint", "pickled class": pickled_class, "missing": None}


@pytest.mark.parametrize("file", ["shared.pt", "process-0.pt", "adapter/weights"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_damaged_checkpoint_raises(checkpoint_folder, file, change):
    def write_adapter(folder):
        folder.mkdir()
        save_file({"x": torch.full((64,), 3.0)}, folder / "weights")

    for step in (1, 2):
        state = {"x": torch.full((64,), 3.0)}
        folder = checkpoint_folder.save(step, state, state, write_adapter)
    if change is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(change((folder / file).read_bytes()))
    with pytest.raises(UsageError) as raised:
        checkpoint_folder.load(checkpoint_folder.find_newest())
    message = str(raised.value)
    assert message.startswith(f"checkpoint step-00000002 cannot be read ({file}")
    assert message.endswith(
        "). Remove the folder, and the run continues from the checkpoint before it."
    )
    assert "weights_only" not in message and len(message.splitlines()) == 1
    shutil.rmtree(folder)
    assert checkpoint_folder.load(checkpoint_folder.find_newest())[0]["step"] == 1


def test_sigterm_sets_stop_flag_only():
    previous_handler = signal.getsignal(signal.SIGTERM)
    with catch_sigterm() as stop_requested:
        assert not stop_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_requested()
    assert signal.getsignal(signal.SIGTERM) is previous_handler


def test_checkpoint_has_trained_parameters_and_generator_states():
    """Check the saved state; `test_stopped_run_resumes_bit_identically` checks resumed runs."""

    def draw_random_numbers():
        """Draw one number from each random generator: Python, NumPy and torch."""
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    state = checkpoints.get_random_state()
    expected = draw_random_numbers()
    checkpoints.load_random_state(state)
    assert draw_random_numbers() == expected
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    # frozen parameters are not saved
    model[0].bias.requires_grad_(False)
    saved = checkpoints.copy_parameters(model)
    assert saved.keys() == {"0.weight", "2.weight", "2.bias"}
    model[0].bias.requires_grad_(True)
    with pytest.raises(UsageError, match="trains other parameters .0.bias is one of 1."):
        checkpoints.load_parameters(model, saved)
