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


class KilledError(BaseException):
    """Exception that simulates a killed process: ``except Exception`` does not catch it."""


@pytest.fixture
def checkpoints_of_run(tmp_path):
    """Return a `Checkpoints` of one process, without saved steps."""
    return Checkpoints(tmp_path / "checkpoints", 0, 1, lambda: None)


def write_adapter(folder):
    """Create ``folder`` with one text file, in place of the files of an adapter."""
    folder.mkdir()
    (folder / "weights").write_text("of the adapter")


def save_checkpoint_of_step(checkpoints_of_run, step):
    """Save a checkpoint of ``step`` with a tensor of three elements, and return its folder."""
    shared_state = {"value": torch.full((3,), step)}
    return checkpoints_of_run.save(step, shared_state, {"data": str(step)}, write_adapter)


def list_folder_names(checkpoints_of_run):
    """Return the sorted folder names of all checkpoints, complete or incomplete."""
    return sorted(path.name for path in checkpoints_of_run.folder.iterdir())


def test_newest_two_checkpoints_remain(checkpoints_of_run):
    assert checkpoints_of_run.find_newest() is None
    # sorted by name, step-100000000 would come before step-99999999
    for step in (2, 4, 99_999_999, 100_000_000):
        save_checkpoint_of_step(checkpoints_of_run, step)
    assert list_folder_names(checkpoints_of_run) == ["step-100000000", "step-99999999"]
    shared_state, process_state = checkpoints_of_run.load(checkpoints_of_run.find_newest())
    assert (shared_state["step"], shared_state["value"][0], process_state["data"]) == (
        10**8,
        10**8,
        "100000000",
    )
    assert (
        checkpoints_of_run.find_newest() / "adapter" / "weights"
    ).read_text() == "of the adapter"


# (function in which saving step 3 is killed, calls of the function before the kill, newest
# complete step afterwards)
KILL_CASES = {
    "before the first file": ("save", 0, 2),
    "before the shared file": ("save", 1, 2),
    "before all files are synced": ("sync_to_disk", 2, 2),
    "before the folder is renamed": ("rename", 0, 2),
    "before an old checkpoint is renamed": ("rename", 1, 3),
    "before an old checkpoint is removed": ("rmtree", 0, 3),
}


@pytest.mark.parametrize(
    ("function_name", "num_calls_before_kill", "newest_step"), KILL_CASES.values(), ids=KILL_CASES
)
def test_incomplete_checkpoint_is_ignored(
    checkpoints_of_run, monkeypatch, function_name, num_calls_before_kill, newest_step
):
    save_checkpoint_of_step(checkpoints_of_run, 1)
    save_checkpoint_of_step(checkpoints_of_run, 2)
    module_by_function = {
        "save": torch,
        "sync_to_disk": checkpoints,
        "rename": os,
        "rmtree": checkpoints.shutil,
    }
    # the first calls run the original function
    original_function = getattr(module_by_function[function_name], function_name)
    killing_mock = Mock(
        wraps=original_function, side_effect=[DEFAULT] * num_calls_before_kill + [KilledError]
    )
    with monkeypatch.context() as patch_context:
        patch_context.setattr(module_by_function[function_name], function_name, killing_mock)
        with pytest.raises(KilledError):
            save_checkpoint_of_step(checkpoints_of_run, 3)
    assert checkpoints_of_run.find_newest().name == f"step-{newest_step:08d}"
    assert checkpoints_of_run.load(checkpoints_of_run.find_newest())[0]["step"] == newest_step
    save_checkpoint_of_step(checkpoints_of_run, 4)
    # saving step 4 has removed the incomplete folder of step 3
    assert list_folder_names(checkpoints_of_run) == [f"step-{newest_step:08d}", "step-00000004"]


def test_files_are_synced_before_rename(checkpoints_of_run, monkeypatch):
    disk_events = []
    original_sync, original_rename = checkpoints.sync_to_disk, os.rename
    monkeypatch.setattr(
        checkpoints, "sync_to_disk", lambda path: (disk_events.append(path), original_sync(path))
    )
    monkeypatch.setattr(
        os, "rename", lambda a, b: (disk_events.append("renamed"), original_rename(a, b))
    )
    saved_folder = save_checkpoint_of_step(checkpoints_of_run, 1)
    names_synced_before_rename = {path.name for path in disk_events[: disk_events.index("renamed")]}
    assert {path.name for path in saved_folder.rglob("*")} <= names_synced_before_rename
    assert disk_events[-1] == checkpoints_of_run.folder


@pytest.mark.parametrize("large_state_name", ["process_state", "shared", "adapter"])
def test_full_disk_error_is_the_same_for_all_libraries(checkpoints_of_run, large_state_name):
    save_checkpoint_of_step(checkpoints_of_run, 1)
    large_state, small_state = {"x": torch.zeros(50_000)}, {"x": torch.zeros(1)}

    def write_adapter(folder):
        folder.mkdir()
        save_file(
            large_state if large_state_name == "adapter" else small_state,
            folder / "adapter.safetensors",
        )

    shared_state = large_state if large_state_name == "shared" else small_state
    process_state = large_state if large_state_name == "process_state" else small_state
    # simulate a full disk: limit the size of each written file to 100,000 bytes
    previous_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, previous_limits[1]))
    try:
        with pytest.raises(LogError, match=r"step-00000002 cannot be written \(.*too large"):
            checkpoints_of_run.save(2, shared_state, process_state, write_adapter)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous_limits)
    assert list_folder_names(checkpoints_of_run) == [".step-00000002.partial", "step-00000001"]
    save_checkpoint_of_step(checkpoints_of_run, 2)
    assert list_folder_names(checkpoints_of_run) == ["step-00000001", "step-00000002"]


def test_other_process_count_raises(checkpoints_of_run):
    saved_folder = save_checkpoint_of_step(checkpoints_of_run, 1)
    checkpoints_of_two_processes = Checkpoints(checkpoints_of_run.folder, 0, 2, lambda: None)
    with pytest.raises(UsageError, match="made by 1 processes, and this run has 2. Start as many"):
        checkpoints_of_two_processes.load(saved_folder)


def flip_bit(file_content):
    """Return the content of a file with one flipped bit in a tensor of 64 threes."""
    byte_index = file_content.index(torch.full((64,), 3.0).numpy().tobytes()) + 100
    return (
        file_content[:byte_index]
        + bytes([file_content[byte_index] ^ 1])
        + file_content[byte_index + 1 :]
    )


class ForeignClass:
    """Class that `torch.load` rejects with ``weights_only=True``."""


def pickle_foreign_object(_):
    """Return the bytes of a file in which `torch.save` pickled a `ForeignClass` object."""
    buffer = io.BytesIO()
    torch.save(ForeignClass(), buffer)
    return buffer.getvalue()


# by name: function from the content of a file to its damaged content; None: remove the file
FILE_DAMAGES = {"flipped bit": flip_bit, "truncated": lambda content: content[: len(content) // 2]}
FILE_DAMAGES |= {
    "text": lambda _: b"no checkpoint",
    "pickled class": pickle_foreign_object,
    "missing": None,
}


@pytest.mark.parametrize("damaged_file", ["shared.pt", "process-0.pt", "adapter/weights"])
@pytest.mark.parametrize("damage", FILE_DAMAGES.values(), ids=FILE_DAMAGES)
def test_damaged_checkpoint_raises(checkpoints_of_run, damaged_file, damage):
    def write_adapter(saved_folder):
        saved_folder.mkdir()
        save_file({"x": torch.full((64,), 3.0)}, saved_folder / "weights")

    for step in (1, 2):
        tensor_state = {"x": torch.full((64,), 3.0)}
        saved_folder = checkpoints_of_run.save(step, tensor_state, tensor_state, write_adapter)
    if damage is None:
        (saved_folder / damaged_file).unlink()
    else:
        (saved_folder / damaged_file).write_bytes(
            damage((saved_folder / damaged_file).read_bytes())
        )
    with pytest.raises(UsageError) as error_info:
        checkpoints_of_run.load(checkpoints_of_run.find_newest())
    message = str(error_info.value)
    assert message.startswith(f"checkpoint step-00000002 cannot be read ({damaged_file}")
    assert message.endswith(
        "). Remove the folder, and the run continues from the checkpoint before it."
    )
    assert "weights_only" not in message and len(message.splitlines()) == 1
    shutil.rmtree(saved_folder)
    assert checkpoints_of_run.load(checkpoints_of_run.find_newest())[0]["step"] == 1


def test_sigterm_sets_stop_flag_only():
    previous_handler = signal.getsignal(signal.SIGTERM)
    with catch_sigterm() as is_stop_requested:
        assert not is_stop_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert is_stop_requested()
    assert signal.getsignal(signal.SIGTERM) is previous_handler


def test_checkpoint_has_trained_parameters_and_generator_states():
    """Check the saved state; `test_stopped_run_resumes_bit_identically` checks resumed runs."""

    def draw_random_numbers():
        """Draw one number from each random generator: Python, NumPy and torch."""
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    random_state = checkpoints.get_random_state()
    expected_numbers = draw_random_numbers()
    checkpoints.load_random_state(random_state)
    assert draw_random_numbers() == expected_numbers
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    # frozen parameters are not saved
    model[0].bias.requires_grad_(False)
    saved_parameters = checkpoints.copy_parameters(model)
    assert saved_parameters.keys() == {"0.weight", "2.weight", "2.bias"}
    model[0].bias.requires_grad_(True)
    with pytest.raises(UsageError, match="trains other parameters .0.bias is one of 1."):
        checkpoints.load_parameters(model, saved_parameters)
