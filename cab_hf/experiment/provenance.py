"""The provenance of results: settings, versions, commit, device and times of a run.

The provenance suffices to reproduce a result. It contains no paths and no host names.
"""

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

# packages whose versions affect results
RECORDED_PACKAGES = ("torch", "transformers", "triton", "flash-attn-4")
# environment variables of torch's allocator, which affect how much GPU memory a run can use
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def utc_now() -> str:
    """Return the current time in ISO 8601, UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def file_identity(path: Path | str) -> dict[str, str]:
    """Return ``{"name": name without folder, "sha256": hash of the content}`` of a file."""
    return {"name": Path(path).name, "sha256": file_sha256(Path(path))}


def git_commit() -> str | None:
    """Return the commit of this code, with the suffix ``-dirty`` if files differ from the commit.

    Without a git history, return the value of ``$CAB_HF_COMMIT``, or None if the variable is not
    set.
    """
    this_file = Path(__file__).resolve()
    git_command = ["git", "-C", str(this_file.parent)]
    run_options = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        # fails for a copy of cab_hf inside another repository that does not track this file
        subprocess.run([*git_command, "ls-files", "--error-unmatch", this_file.name], **run_options)
        describe_args = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run([*git_command, *describe_args], **run_options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("CAB_HF_COMMIT")


def package_versions() -> dict[str, str]:
    """Return the versions of installed packages that affect results, by package name."""
    # cab_hf's version is not read from metadata, which may be older than the code of an editable
    # install
    version_by_package = {"python": platform.python_version(), "cab_hf": __version__}
    for package in RECORDED_PACKAGES:
        try:
            version_by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return version_by_package


def computing_device(device_string: str) -> Any:
    """Return the torch device ``device_string`` after computing on it once.

    Raises:
        UsageError: torch cannot compute on the device.
    """
    import torch

    try:
        device = torch.device(device_string)
        # read a computed value: a missing device and the device "meta" fail here, not before
        torch.ones(1, device=device).item()
    except Exception as error:
        reason = first_line(error)
        raise UsageError(
            f"device must be one on which torch can compute here, such as cpu, got "
            f"{device_string!r} ({reason})."
        ) from None
    return device


def device_name(device: Any) -> str:
    """Return the name of a GPU, or the architecture of the processor.

    If $CAB_HF_CAPABILITY is set, the compute capability in this variable is appended.

    Args:
        device: a torch device or its name.
    """
    # imported on demand, because settings and logs need no torch
    import torch

    from cab_hf.capability import CAPABILITY_OVERRIDE

    device = torch.device(device)
    hardware_name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    )
    if CAPABILITY_OVERRIDE is None:
        return hardware_name
    major, minor = CAPABILITY_OVERRIDE
    return f"{hardware_name}, code of compute capability {major}.{minor}"


def provenance(settings: Mapping[str, Any], device: Any, start_time: str) -> dict[str, Any]:
    """Return a dict with settings, versions, commit, device and times of a run.

    The end of the run is the time of this call. The dict has the key "environment" only if
    environment variables configure torch's allocator.

    Args:
        settings: the settings of the run, as JSON stores them.
        device: a torch device or its name.
        start_time: the result of `utc_now` at the start of the run.
    """
    environment = [
        f"{variable_name}={os.environ[variable_name]}"
        for variable_name in ALLOCATOR_VARIABLES
        if variable_name in os.environ
    ]
    return {
        "settings": dict(settings),
        "versions": package_versions(),
        "commit": git_commit(),
        "device": device_name(device),
        "started": start_time,
        "finished": utc_now(),
        **({"environment": environment} if environment else {}),
    }
