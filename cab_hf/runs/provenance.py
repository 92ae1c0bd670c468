"""What a reader needs to get the same numbers again; never a path, never a host name."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from cab_hf import __version__
from cab_hf.runs.cache import file_sha256
from cab_hf.runs.settings import UsageError, first_line

PACKAGES = ("torch", "transformers", "triton", "flash-attn-4")
# how torch's allocator is set decides how much of a GPU's memory can be used
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def utc_now() -> str:
    """The time, to the second, as ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def file_identity(path: Path | str) -> dict[str, str]:
    """The ``name`` and ``sha256`` of a file, which identify it but not its place."""
    return {"name": Path(path).name, "sha256": file_sha256(Path(path))}


def git_commit() -> str | None:
    """The commit of this code, ``-dirty`` where files differ from it.

    For a copy without its history it is read from ``$CAB_HF_COMMIT``; None where it is unknown.
    """

    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    how = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        # an installed copy may lie inside another repository: only a tracked file is ours
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], **how)
        describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run([*git, *describe], **how).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("CAB_HF_COMMIT")


def versions() -> dict[str, str]:
    """Versions of what computes, by package name; those not installed are left out."""
    # metadata of an editable install may be older than its code
    result = {"python": platform.python_version(), "cab_hf": __version__}
    for package in PACKAGES:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return result


def computing_device(name: str) -> Any:
    """The torch device of that name; UsageError where torch cannot compute on it here."""
    import torch

    try:
        device = torch.device(name)
        # only a value that comes back proves it: a device may be missing, or may hold none
        torch.ones(1, device=device).item()
    except Exception as error:
        why = first_line(error)
        raise UsageError(
            f"device must be one that torch computes on here, such as cpu; got {name!r} ({why})."
        ) from None
    return device


def device_name(device: Any) -> str:
    """The GPU's name, or the processor's architecture; and which other GPU it runs the code of."""
    # imported here: settings and logs need no torch
    import torch

    from cab_hf.capability import NAMED

    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return name if NAMED is None else "{}, code of compute capability {}.{}".format(name, *NAMED)


def provenance(settings: Mapping[str, Any], device: Any, started: str) -> dict[str, Any]:
    """Settings, versions, commit, device and times of a run; ``started`` is from `utc_now`.

    ``environment`` is there where it sets torch's allocator.
    """
    environment = [f"{name}={os.environ[name]}" for name in ALLOCATOR if name in os.environ]
    return {
        "settings": dict(settings),
        "versions": versions(),
        "commit": git_commit(),
        "device": device_name(device),
        "started": started,
        "finished": utc_now(),
        **({"environment": environment} if environment else {}),
    }
