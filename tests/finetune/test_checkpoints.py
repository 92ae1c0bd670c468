"""Checkpoints: complete or absent, the newest two remain, and a run resumes exactly."""

import io
import os
import random
import resource
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cab_hf.experiment.log import LogError
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import checkpoints
from cab_hf.finetune.checkpoints import Checkpoints, asked_to_stop


class Killed(BaseException):
    """Exception that no handler catches, in place of a kill."""


@pytest.fixture
def kept(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", 0, 1, lambda: None)


def adapter(folder):
    folder.mkdir()
    (folder / "weights").write_text("of the adapter")


def save(kept, step):
    return kept.save(step, {"value": torch.full((3,), step)}, {"data": str(step)}, adapter)


def names(kept):
    return sorted(path.name for path in kept.folder.iterdir())


def test_newest_two_checkpoints_remain(kept):
    assert kept.newest() is None
    # ordered as numbers
    for step in (2, 4, 99_999_999, 100_000_000):
        save(kept, step)
    assert names(kept) == ["step-100000000", "step-99999999"]
    shared, mine = kept.load(kept.newest())
    assert (shared["step"], shared["value"][0], mine["data"]) == (10**8, 10**8, "100000000")
    assert (kept.newest() / "adapter" / "weights").read_text() == "of the adapter"


KILLS = {
    "before anything is written": ("save", 0, 2),
    "with the shared part missing": ("save", 1, 2),
    "before all is on disk": ("put_on_disk", 2, 2),
    "before it has its name": ("rename", 0, 2),
    "before an old one is taken away": ("rename", 1, 3),
    "while an old one is taken away": ("rmtree", 0, 3),
}


@pytest.mark.parametrize(("where", "left", "newest"), KILLS.values(), ids=KILLS)
def test_incomplete_checkpoint_is_ignored(kept, monkeypatch, where, left, newest):
    save(kept, 1)
    save(kept, 2)
    owner = {"save": torch, "put_on_disk": checkpoints, "rename": os, "rmtree": checkpoints.shutil}
    true, calls = getattr(owner[where], where), []

    def killed(*arguments, **options):
        calls.append(arguments)
        if len(calls) > left:
            raise Killed
        return true(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner[where], where, killed)
        with pytest.raises(Killed):
            save(kept, 3)
    assert kept.newest().name == f"step-{newest:08d}"
    assert kept.load(kept.newest())[0]["step"] == newest
    save(kept, 4)
    # the incomplete folder of the killed run is removed
    assert names(kept) == [f"step-{newest:08d}", "step-00000004"]


def test_files_are_synced_before_rename(kept, monkeypatch):
    done = []
    sync, rename = checkpoints.put_on_disk, os.rename
    monkeypatch.setattr(checkpoints, "put_on_disk", lambda path: (done.append(path), sync(path)))
    monkeypatch.setattr(os, "rename", lambda *names: (done.append("renamed"), rename(*names)))
    target = save(kept, 1)
    before = {path.name for path in done[: done.index("renamed")]}
    assert {path.name for path in target.rglob("*")} <= before
    assert done[-1] == kept.folder


@pytest.mark.parametrize("part", ["mine", "shared", "adapter"])
def test_full_disk_error_is_the_same_for_all_libraries(kept, part):
    save(kept, 1)
    large, small = {"x": torch.zeros(50_000)}, {"x": torch.zeros(1)}

    def write_adapter(folder):
        folder.mkdir()
        save_file(large if part == "adapter" else small, folder / "adapter.safetensors")

    given = [large if part == name else small for name in ("shared", "mine")]
    # simulate a full disk: the system refuses to write files above this size in bytes
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(LogError, match=r"step-00000002 cannot be written \(.*too large"):
            kept.save(2, *given, write_adapter)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(kept) == [".step-00000002.partial", "step-00000001"]
    save(kept, 2)
    assert names(kept) == ["step-00000001", "step-00000002"]


def test_other_process_count_raises(kept):
    folder = save(kept, 1)
    more = Checkpoints(kept.folder, 0, 2, lambda: None)
    with pytest.raises(UsageError, match="made by 1 processes, and this run has 2. Start as many"):
        more.load(folder)


def damaged(content):
    """Flip one bit of the tensor."""
    at = content.index(torch.full((64,), 3.0).numpy().tobytes()) + 100
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


class Foreign:
    """Class that torch unpickles only from a trusted file."""


def foreign(_):
    written = io.BytesIO()
    torch.save(Foreign(), written)
    return written.getvalue()


CHANGES = {"a bit": damaged, "truncated": lambda content: content[: len(content) // 2]}
CHANGES |= {"text": lambda _: b"no checkpoint", "foreign": foreign, "gone": None}


@pytest.mark.parametrize("file", ["shared.pt", "process-0.pt", "adapter/weights"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_damaged_checkpoint_raises(kept, file, change):
    def write_adapter(folder):
        folder.mkdir()
        save_file({"x": torch.full((64,), 3.0)}, folder / "weights")

    for step in (1, 2):
        state = {"x": torch.full((64,), 3.0)}
        folder = kept.save(step, state, state, write_adapter)
    if change is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(change((folder / file).read_bytes()))
    with pytest.raises(UsageError) as refusal:
        kept.load(kept.newest())
    result = str(refusal.value)
    assert result.startswith(f"checkpoint step-00000002 cannot be read ({file}")
    assert result.endswith(
        "). Remove the folder, and the run continues from the checkpoint before it."
    )
    assert "weights_only" not in result and len(result.splitlines()) == 1
    shutil.rmtree(folder)
    assert kept.load(kept.newest())[0]["step"] == 1


def test_sigterm_sets_stop_flag_only():
    before = signal.getsignal(signal.SIGTERM)
    with asked_to_stop() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()
    assert signal.getsignal(signal.SIGTERM) is before


def test_checkpoint_has_trained_parameters_and_generator_states():
    """test_lora checks that resumed steps are bit-identical."""

    def draws():
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    state = checkpoints.random_state()
    expected = draws()
    checkpoints.load_random_state(state)
    assert draws() == expected
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    # frozen parameters are not saved
    model[0].bias.requires_grad_(False)
    saved = checkpoints.parameters_of(model)
    assert saved.keys() == {"0.weight", "2.weight", "2.bias"}
    model[0].bias.requires_grad_(True)
    with pytest.raises(UsageError, match="trains other parameters .0.bias is one of 1."):
        checkpoints.load_parameters(model, saved)
