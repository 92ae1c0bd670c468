"""The provenance of results: all facts that reproduce them, without paths and host names."""

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
from cab_hf.experiment.cache import file_sha256
from cab_hf.experiment.settings import UsageError, first_line

PACKAGES = ("torch", "transformers", "triton", "flash-attn-4")
# the allocator settings of torch determine how much GPU memory can be used
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def utc_now() -> str:
    """Return the current time in ISO 8601, UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def file_identity(path: Path | str) -> dict[str, str]:
    """Return the ``name`` and ``sha256`` of a file, which do not depend on its folder."""
    return {"name": Path(path).name, "sha256": file_sha256(Path(path))}


def git_commit() -> str | None:
    """Return the commit of this code, with ``-dirty`` if files differ from it.

    A copy without its history reads it from ``$CAB_HF_COMMIT``; None if it is unknown.
    """

    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    how = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        # an installed copy may be inside another repository: only tracked files count
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], **how)
        describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run([*git, *describe], **how).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("CAB_HF_COMMIT")


def versions() -> dict[str, str]:
    """Return the versions of installed packages that affect results, by package name."""
    # metadata of an editable install may be older than its code
    result = {"python": platform.python_version(), "cab_hf": __version__}
    for package in PACKAGES:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return result


def computing_device(name: str) -> Any:
    """Return the torch device of that name; UsageError if torch cannot compute on it."""
    import torch

    try:
        device = torch.device(name)
        # only a returned value proves it: a device may be missing, or may store nothing
        torch.ones(1, device=device).item()
    except Exception as error:
        why = first_line(error)
        raise UsageError(
            f"device must be one on which torch can compute here, such as cpu, got {name!r} "
            f"({why})."
        ) from None
    return device


def device_name(device: Any) -> str:
    """Return the name of the GPU, or the architecture of the processor.

    If $CAB_HF_CAPABILITY selects the code of another GPU, the name includes its compute capability.
    """
    # imported here: settings and logs need no torch
    import torch

    from cab_hf.capability import NAMED

    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    if NAMED is None:
        return name
    major, minor = NAMED
    return f"{name}, code of compute capability {major}.{minor}"


def provenance(settings: Mapping[str, Any], device: Any, started: str) -> dict[str, Any]:
    """Return settings, versions, commit, device and times of a run; ``started`` is from `utc_now`.

    ``environment`` is included if it configures torch's allocator.
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
